"""The built-in language model: a decoder over tokens, made of quantshard's modules.

    tokens -> embedding (+ learned positions in gpt) -> layers -> normalization -> head -> logits

Two architectures: "llama" (RMSNorm, SwiGLU, rotary positions, no biases) and "gpt" (LayerNorm, GELU, learned positions,
biases). The recipe quantizes the weights of the layers; embeddings, head and norms stay in high precision. All
parameters have one dtype, because FSDP2 requires one dtype per group.

Tensor parallelism shards the layers. Embeddings and head are replicated over tp, so that its ranks have the same logits
and loss: the byte vocabulary (257) is prime, and a padded table would differ from the table of one process. Sequence
parallelism divides the sequences of the batch between the embedding and the head.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from quantshard import numerics
from quantshard.distributed import tensor_parallel
from quantshard.distributed.module_meshes import TensorParallelConfig
from quantshard.distributed.tensor_parallel import TensorParallel
from quantshard.errors import ConfigurationError
from quantshard.interop.conversion.convert import ConversionReport
from quantshard.modules import (
    LayerNorm,
    Linear,
    RMSNorm,
    RotaryPositionEmbedding,
    TransformerLayer,
    autocast,
    quantize_,
    quantized_model_init,
)
from quantshard.modules.base.initialization import WeightSpec
from quantshard.modules.base.module import QuantizedModule
from quantshard.modules.contexts.layer_recipes import RecipeByName
from quantshard.modules.quantize import open_layers
from quantshard.numerics import distributions
from quantshard.recipe import HighPrecision, Recipe
from quantshard.tools.trainer.data import END_OF_DOCUMENT, VOCABULARY
from quantshard.tools.trainer.models import huggingface
from quantshard.tools.trainer.models.layers import MixtureLayer, TokenLosses, token_losses
from quantshard.tools.trainer.settings.config import TrainSettings
from quantshard.tools.trainer.settings.mesh import MeshSpec, split
from quantshard.tools.trainer.settings.recipes import LayerRecipes

_EMBEDDING_STD = 0.02
_SAMPLE_STREAM = 1


class Embedding(QuantizedModule):
    """High-precision table [entries, size], initialized the same on any number of ranks."""

    def __init__(
        self,
        entries: int,
        size: int,
        params_dtype: torch.dtype,
        device: torch.device | str,
        tp_mesh: DeviceMesh | None = None,
    ) -> None:
        with quantized_model_init(enabled=False):
            super().__init__(device, params_dtype, TensorParallelConfig(tp_mesh=tp_mesh))
            self._add_weight("weight", WeightSpec((entries, size), std=_EMBEDDING_STD))

    def forward(self, index: Tensor) -> Tensor:
        """Look up index int64 [...] -> [..., size]."""
        return F.embedding(index, self.table())

    def table(self) -> Tensor:
        """Return the gathered weight."""
        return cast(Tensor, self._local("weight"))


class LanguageModel(nn.Module):
    """Decoder that returns logits of the next token.

    Built on `device`; on "meta", `reset_parameters` of its modules fills the parameters later, sharded or not.

    Args:
        settings: sizes and options.
        recipe: one recipe for all layers, one per layer, or patterns that match `linear_names`.
        device: device of the parameters.
        tp_mesh: tensor-parallel mesh.
        sequence_parallel: divide the sequences of a batch over `tp_mesh`; the batch must be divisible.
        vocabulary: number of tokens; 0: from the settings, or the byte vocabulary.
        ep_mesh: expert-parallel mesh.
    """

    def __init__(
        self,
        settings: TrainSettings,
        recipe: Recipe | Sequence[Recipe] | LayerRecipes,
        device: torch.device | str,
        tp_mesh: DeviceMesh | None = None,
        sequence_parallel: bool = False,
        vocabulary: int = 0,
        ep_mesh: DeviceMesh | None = None,
    ) -> None:
        super().__init__()
        self.settings = settings
        # mean balance loss of the routers in the last forward
        self.balance: Tensor | None = None
        recipes: Sequence[Recipe | RecipeByName]
        if isinstance(recipe, LayerRecipes):
            recipes = [partial(_of_part, recipe, number) for number in range(settings.layers)]
        else:
            recipes = [recipe] * settings.layers if isinstance(recipe, Recipe) else list(recipe)
        vocabulary = vocabulary or settings.vocabulary or VOCABULARY
        group = None if tp_mesh is None else tp_mesh.get_group()
        self.sequence_parallel, self.tp = sequence_parallel, TensorParallel.of(group, None, sequence_parallel)
        hidden, dtype = settings.hidden, settings.torch_params_dtype
        llama = settings.architecture == "llama"
        parallel_options: dict[str, Any] = {"tp_mesh": tp_mesh, "sequence_parallel": sequence_parallel}
        self.embedding = Embedding(vocabulary, hidden, dtype, device, tp_mesh)
        self.positions = None if llama else Embedding(settings.seq_length, hidden, dtype, device, tp_mesh)
        self.layers = nn.ModuleList()
        self.recipes = []
        for number, layer_recipe in enumerate(recipes):
            if isinstance(layer_recipe, Recipe):
                with quantized_model_init(recipe=layer_recipe, preserve_high_precision_init_val=True):
                    layer = _layer(settings, number + 1, device, parallel_options, ep_mesh)
            else:
                layer = _layer(settings, number + 1, device, parallel_options, ep_mesh)
                quantize_(layer, layer_recipe, preserve_high_precision_init_val=True)
            self.layers.append(layer)
            self.recipes.append(layer_recipe if isinstance(layer_recipe, Recipe) else _around(layer))
        kind = RMSNorm if llama else LayerNorm
        self.norm = kind(hidden, settings.norm_eps, params_dtype=dtype, device=device, **parallel_options)
        self.rotary = None
        if llama:
            self.rotary = RotaryPositionEmbedding(settings.head_size, rotary_base=settings.rope_theta)
        self.head = None
        if not settings.tied:
            with quantized_model_init(enabled=False):
                self.head = Linear(hidden, vocabulary, bias=False, params_dtype=dtype, device=device, tp_mesh=tp_mesh)

    @property
    def batch_multiple(self) -> int:
        """The divisor that the number of sequences of a batch must have."""
        return self.tp.size if self.sequence_parallel else 1

    def forward(self, tokens: Tensor) -> Tensor:
        """Map tokens int64 [batch, sequence] to logits [batch, sequence, vocabulary], in the dtype of the parameters.

        All ranks of a tensor-parallel group pass the same tokens and get the same logits.
        """
        length = tokens.shape[1]
        x = self.embedding(tokens)
        angles = None
        if self.rotary is not None:
            angles = self.rotary(length, device=tokens.device)
        if self.positions is not None:
            x = x + self.positions(torch.arange(length, device=tokens.device))
        if self.sequence_parallel:
            x = tensor_parallel.split_rows(x, self.tp)
        # one outer autocast, so that its exit work runs once
        with autocast(recipe=self.recipes[0]):
            for number, layer in enumerate(self.layers):
                x = self._through(number, layer, x, angles)
        x = self.norm(x)
        if self.sequence_parallel:
            x = tensor_parallel.join_rows(x, self.tp)
        return F.linear(x, self.embedding.table()) if self.head is None else cast(Tensor, self.head(x))

    def _through(self, number: int, layer: nn.Module, x: Tensor, angles: Tensor | None) -> Tensor:
        layer_recipe, settings = self.recipes[number], self.settings
        with nullcontext() if layer_recipe is self.recipes[0] else autocast(recipe=layer_recipe):
            if self.training and _is_recomputed(settings, number):
                has_dropout = settings.dropout > 0
                run = _by_recipe(layer, layer_recipe) if settings.compile else layer
                out = checkpoint(run, x, rotary_pos_emb=angles, use_reentrant=False, preserve_rng_state=has_dropout)
            else:
                out = layer(x, rotary_pos_emb=angles)
        if settings.experts:
            out, balance = out
            self.balance = balance / settings.layers + (self.balance if number else 0.0)
        return cast(Tensor, out)


def _by_recipe(layer: nn.Module, recipe: Recipe) -> Callable[..., Any]:
    """Wrap a layer so that it enters its autocast itself. The recomputed forward of compiled code runs outside of the
    autocast of the first forward."""

    def run(*args: Any, **kwargs: Any) -> Any:
        with autocast(recipe=recipe):
            return layer(*args, **kwargs)

    return run


def linear_names(settings: TrainSettings) -> list[str]:
    """Return the names of all linear layers that have a recipe, in order of the layers."""
    with torch.random.fork_rng(devices=[]):
        parts = [name for name, _ in open_layers(_layer(settings, 1, "meta", {}))]
    return [f"layers.{number}.{part}" for number in range(settings.layers) for part in parts]


def recipes_of(settings: TrainSettings) -> Sequence[Recipe] | LayerRecipes:
    """Return the recipes of the settings in the form that `LanguageModel` takes."""
    recipes, names = LayerRecipes.parse(settings.recipe), [f"layers.{number}" for number in range(settings.layers)]
    return recipes.of_parts(linear_names(settings)) if recipes.tells_parts(names) else recipes.of_layers(names)


def _of_part(recipes: LayerRecipes, number: int, module: nn.Module, name: str) -> Recipe:
    return recipes.of_layer(f"layers.{number}.{name}")


def _around(layer: nn.Module) -> Recipe:
    """Return the recipe for the autocast around a layer with recipes per part: the first one that quantizes."""
    recipes = (module.recipe_in(None) for module in layer.modules() if isinstance(module, QuantizedModule))
    return next((recipe for recipe in recipes if recipe is not None and recipe.table), HighPrecision())


def _layer(
    settings: TrainSettings,
    number: int,
    device: torch.device | str,
    cut: dict[str, Any],
    ep_mesh: DeviceMesh | None = None,
) -> nn.Module:
    if settings.experts:
        return MixtureLayer(settings, number, device, ep_mesh)
    llama = settings.architecture == "llama"
    return TransformerLayer(
        settings.hidden,
        settings.ffn,
        settings.heads,
        num_gqa_groups=settings.kv_heads,
        kv_channels=settings.head_size,
        layernorm_epsilon=settings.norm_eps,
        recompute_activation=settings.recompute == "activation",
        activation_storage=settings.activation_storage,
        qk_norm_type=("RMSNorm" if llama else "LayerNorm") if settings.qk_norm else None,
        qk_norm_eps=settings.norm_eps,
        qk_norm_before_rope=True,
        hidden_dropout=settings.dropout,
        attention_dropout=settings.dropout,
        layer_number=number,
        self_attn_mask_type="causal",
        params_dtype=settings.torch_params_dtype,
        bias=not llama,
        activation="swiglu" if llama else "gelu",
        normalization="RMSNorm" if llama else "LayerNorm",
        attn_input_format="bshd",
        set_parallel_mode=True,
        device=device,
        **cut,
    )


def _is_recomputed(settings: TrainSettings, number: int) -> bool:
    return settings.recompute == "layer" and number % settings.recompute_every == 0


@dataclass(frozen=True)
class ModelSpec:
    """The description of a run's model.

    `configuration`: configuration of a transformers model; None for the built-in decoder. `recipe`: recipe with
    arguments for all layers of the built-in decoder; None for the recipe of the settings.
    """

    settings: TrainSettings
    configuration: Mapping[str, Any] | None = None
    recipe: Recipe | None = None

    def check(self) -> None:
        """Check that a transformers model has room for the data's tokens and sequences."""
        if self.configuration is None:
            return
        where, settings = self.settings.model, self.settings
        size, tokens = huggingface.vocabulary_size(self.configuration, where), settings.vocabulary or VOCABULARY
        if size < tokens:
            raise ConfigurationError(
                f"model = {where} has {size} tokens, fewer than the {tokens} of the data; take its own tokenizer, by "
                "--tokenizer"
            )
        longest = huggingface.longest_sequence(self.configuration)
        if longest is not None and longest < settings.seq_length:
            raise ConfigurationError(
                f"seq_length = {settings.seq_length}, but model = {where} has positions for {longest} tokens alone"
            )
        if size != tokens and not settings.vocabulary:
            raise ConfigurationError(
                f"there is no tokenizer in model = {where}, which has {size} tokens; name one with --tokenizer, or "
                f"give --vocabulary {tokens} to train on bytes"
            )

    def described(
        self, tp_mesh: DeviceMesh | None = None, sequence_parallel: bool = False, ep_mesh: DeviceMesh | None = None
    ) -> nn.Module:
        """Build the model on the meta device with quantized linear layers."""
        return self.converted(tp_mesh, sequence_parallel, ep_mesh)[0]

    def converted(
        self, tp_mesh: DeviceMesh | None = None, sequence_parallel: bool = False, ep_mesh: DeviceMesh | None = None
    ) -> tuple[nn.Module, ConversionReport | None]:
        """Build as `described`; also return the conversion report of a transformers model with quantized layers."""
        settings = self.settings
        if self.configuration is not None:
            recipes = LayerRecipes.parse(settings.recipe)
            model, report = huggingface.converted(self.configuration, settings.model, recipes, causal=True)
            huggingface.recompute_layers(model, settings.recompute_every if settings.recompute == "layer" else 0)
            return model, report
        layers = self.recipe or recipes_of(settings)
        return LanguageModel(settings, layers, "meta", tp_mesh, sequence_parallel, ep_mesh=ep_mesh), None


def build(spec: ModelSpec, mesh: DeviceMesh, *, random: bool = True) -> nn.Module:
    """Build the model, shard it over the mesh and fill it with its initial weights. Collective.

    The mesh has the named axes of `mesh.MeshSpec`. The tp axis shards the layers; `fully_shard` gets the other axes.
    The model is built on the meta device and filled shard by shard, so that no rank ever holds all of it.

    Random keys of the weights come from torch's generator, which is seeded here. With `random=False`, the weights of a
    transformers model stay uninitialized until they are loaded.
    """
    settings = spec.settings
    torch.manual_seed(settings.seed)
    parts = split(mesh)
    tp_size = 1 if parts.tp is None else parts.tp.size()
    axes = MeshSpec(dp_shard=parts.data.size(), tp=tp_size)
    model = spec.described(parts.tp, settings.divides_sequences(axes), parts.ep)
    layers = huggingface.repeated_layers(model)
    # dtype of gradient sums over ranks and micro-batches
    policy = MixedPrecisionPolicy(reduce_dtype=settings.torch_reduce_dtype)
    fsdp_options: dict[str, Any] = {"reshard_after_forward": settings.reshard_after_forward, "mp_policy": policy}
    for layer in layers:
        if settings.compile:
            layer.compile()
        if parts.ep is not None:
            fully_shard(cast(MixtureLayer, layer).mlp.expert_layers(), mesh=parts.experts, **fsdp_options)
        fully_shard(layer, mesh=parts.data, **fsdp_options)
    fully_shard(model, mesh=parts.data, **fsdp_options)
    _prefetch(layers)
    if spec.configuration is not None:
        huggingface.leave_meta(model, torch.device(mesh.device_type))
        if random:
            huggingface.initialize(model, settings.seed)
        return model
    for module in model.modules():
        if isinstance(module, QuantizedModule):
            module.reset_parameters()
    return model


def logits(model: nn.Module, tokens: Tensor) -> Tensor:
    """Compute logits [batch, sequence, vocabulary] from tokens int64 [batch, sequence], for either kind of model."""
    if isinstance(model, LanguageModel):
        return cast(Tensor, model(tokens))
    return cast(Tensor, model(input_ids=tokens, use_cache=False).logits)


def batch_multiple(model: nn.Module) -> int:
    """Return the divisor that the number of sequences of a batch must have."""
    return model.batch_multiple if isinstance(model, LanguageModel) else 1


def _prefetch(layers: Iterable[nn.Module]) -> None:
    """Make each layer prefetch the next layer's all-gather as soon as its own is done, instead of when the host gets
    there.

    FSDP2 prefetches by default in backward only.
    """
    for layer, next_layer in pairwise(layers):
        assert isinstance(layer, FSDPModule) and isinstance(next_layer, FSDPModule)
        layer.set_modules_to_forward_prefetch([next_layer])


def losses(model: nn.Module, tokens: Tensor, targets: Tensor) -> TokenLosses:
    """Compute the losses of a training pass. Nothing else uses the logits of the built-in decoder, so backward
    overwrites them with their gradient to save memory."""
    return token_losses(logits(model, tokens), targets, overwrites=isinstance(model, LanguageModel))


def loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy in nats per token."""
    return token_losses(logits, targets).cross_entropy


def trained_loss(model: nn.Module, found: TokenLosses, settings: TrainSettings) -> Tensor:
    """Sum the cross-entropy and the auxiliary losses: the value that backward starts from."""
    total = found.cross_entropy
    if settings.z_loss:
        total = total + settings.z_loss * found.z_loss
    if isinstance(model, LanguageModel) and model.balance is not None and settings.balance_loss:
        # cleared, because it keeps the graph of this forward alive
        balance, model.balance = model.balance, None
        total = total + settings.balance_loss * balance
    return total


@torch.no_grad()
def generate(
    model: nn.Module,
    settings: TrainSettings,
    prompt: Sequence[int],
    length: int,
    *,
    seed: int = 0,
    temperature: float = 0.8,
    end_of_document: int = END_OF_DOCUMENT,
    vocabulary: int = VOCABULARY,
) -> list[int]:
    """Continue a prompt by `length` tokens, as the beginning of a document. Collective.

    Rank 0 samples each token from the model's distribution with the counter-based generator and broadcasts it. The
    model reads at most its last seq_length tokens. Afterwards the mode (train or eval) is restored and gathered weights
    are freed.
    """
    device = next(model.parameters()).device
    tokens = [end_of_document, *prompt]
    random_bits = numerics.random_words(seed, 0, _SAMPLE_STREAM, (1, length))[0]
    training = model.training
    model.eval()
    for sample in distributions.uniform(random_bits).tolist():
        # identical rows, because one row cannot be divided over tp; an activation's scale does not depend on their
        # number
        window = torch.tensor(
            [tokens[-settings.seq_length :]] * batch_multiple(model), dtype=torch.int64, device=device
        )
        probabilities = (logits(model, window)[0, -1, :vocabulary].double() / temperature).softmax(-1)
        token = torch.searchsorted(probabilities.cumsum(-1), torch.tensor([sample], dtype=torch.float32, device=device))
        token.clamp_(max=len(probabilities) - 1)
        if dist.is_initialized():
            dist.broadcast(token, 0)
        tokens.append(int(token))
    model.train(training)
    reshard(model)
    return tokens[1 + len(prompt) :]


def reshard(model: nn.Module) -> None:
    """Free weights that a forward without backward left gathered, so that the next forward gathers current ones."""
    for module in _sharded(model):
        module.reshard()


def reduce_gradients(model: nn.Module, *, now: bool) -> None:
    """Set whether the next backward reduces gradients over ranks or only accumulates them."""
    for module in _sharded(model):
        module.set_requires_gradient_sync(now, recurse=False)


def _sharded(model: nn.Module) -> Iterator[FSDPModule]:
    return (module for module in model.modules() if isinstance(module, FSDPModule))
