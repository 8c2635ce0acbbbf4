"""The language model that the command line trains: a decoder over tokens, built of quantshard's modules.

    tokens -> embedding (+ learned positions in gpt) -> layers -> normalization -> head -> logits

Two architectures: "llama" (RMSNorm, SwiGLU, rotary positions, no biases) and "gpt" (LayerNorm, GELU, learned positions,
biases). The layers' weights are quantized by the recipe; embeddings and head stay in high precision, as do norms. All
parameters have one dtype, since FSDP2 wants that of a group.

Tensor parallelism cuts the layers. Embeddings and head are whole on each of its ranks, which so have the same logits
and the same loss: of bytes there are 257, a prime number, and a padded table would not be that of one process. Under
sequence parallelism the ranks divide the sequences of the batch, between the embedding and the head.
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
from quantshard.interop.conversion.report import ConversionReport
from quantshard.modules import (
    LayerNorm,
    Linear,
    RMSNorm,
    RotaryPositionEmbedding,
    TransformerLayer,
    autocast,
    quantized_model_init,
)
from quantshard.modules.base.module import QuantizedModule, WeightSpec
from quantshard.modules.contexts.layer_recipes import HIGH_PRECISION, RecipeByName
from quantshard.numerics import distributions
from quantshard.recipe import HighPrecision, Recipe
from quantshard.tools.trainer.data import END_OF_DOCUMENT, VOCABULARY
from quantshard.tools.trainer.data.preparation import rounded_up
from quantshard.tools.trainer.models import huggingface
from quantshard.tools.trainer.models.losses import TokenLosses, token_losses
from quantshard.tools.trainer.models.mixture import MixtureLayer
from quantshard.tools.trainer.settings.config import TrainSettings
from quantshard.tools.trainer.settings.mesh import MeshSpec, split
from quantshard.tools.trainer.settings.recipes import LayerRecipes

_EMBEDDING_STD = 0.02
_SAMPLE_STREAM = 1
_ROWS = 8
"""Of a head whose products cuBLAS reads 16 bytes at a time."""


class Embedding(QuantizedModule):
    """Rows of a high-precision table [entries, size], born the same on any number of processes."""

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
        """Index int64 [...] -> [..., size]."""
        return F.embedding(index, self.table())

    def table(self) -> Tensor:
        """The gathered weight."""
        return cast(Tensor, self._local("weight"))


class LanguageModel(nn.Module):
    """Logits of the next token.

    Built on `device`; on "meta", `reset_parameters` of its modules fills it later, whole or sharded.

    Args:
        settings: its sizes and the like.
        recipe: of the layers, or one for each, or by patterns that match `linear_names`.
        device: where the parameters are made.
        tp_mesh: the axis of tensor parallelism.
        sequence_parallel: divide the sequences of a batch over its ranks; they must come out even.
        vocabulary: how many tokens there are, if not as many as the settings say; bytes where these do not.
        ep_mesh: the axis that experts are spread over.
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
        self.balance: Tensor | None = None  # mean balance loss of the last forward's routers
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
        cut: dict[str, Any] = {"tp_mesh": tp_mesh, "sequence_parallel": sequence_parallel}
        self.embedding = Embedding(vocabulary, hidden, dtype, device, tp_mesh)
        self.positions = None if llama else Embedding(settings.seq_length, hidden, dtype, device, tp_mesh)
        self.layers = nn.ModuleList()
        self.recipes = []
        for number, own in enumerate(recipes):
            with quantized_model_init(recipe=own, preserve_high_precision_init_val=True):
                layer = _layer(settings, number + 1, device, cut, ep_mesh)
            self.layers.append(layer)
            self.recipes.append(own if isinstance(own, Recipe) else _around(layer))
        kind = RMSNorm if llama else LayerNorm
        self.norm = kind(hidden, settings.norm_eps, params_dtype=dtype, device=device, **cut)
        self.rotary = None
        if llama:
            self.rotary = RotaryPositionEmbedding(settings.head_size, rotary_base=settings.rope_theta)
        self.head = None
        if not settings.tied:
            with quantized_model_init(enabled=False):
                self.head = Linear(hidden, vocabulary, bias=False, params_dtype=dtype, device=device, tp_mesh=tp_mesh)

    @property
    def batch_multiple(self) -> int:
        """What the number of sequences of a batch must be a multiple of."""
        return self.tp.size if self.sequence_parallel else 1

    def forward(self, tokens: Tensor) -> Tensor:
        """Tokens int64 [batch, sequence] -> logits [batch, sequence, vocabulary], in the dtype of parameters.

        The ranks of a tensor-parallel group give the same tokens and get the same logits.
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
        with autocast(recipe=self.recipes[0]):  # which is left once, at the end
            for number, layer in enumerate(self.layers):
                x = self._through(number, layer, x, angles)
        x = self.norm(x)
        if self.sequence_parallel:
            x = tensor_parallel.join_rows(x, self.tp)
        return F.linear(x, self.embedding.table()) if self.head is None else cast(Tensor, self.head(x))

    def _through(self, number: int, layer: nn.Module, x: Tensor, angles: Tensor | None) -> Tensor:
        own, settings = self.recipes[number], self.settings
        with nullcontext() if own is self.recipes[0] else autocast(recipe=own):
            if self.training and _is_recomputed(settings, number):
                keeps_state = settings.dropout > 0
                run = _by_recipe(layer, own) if settings.compile else layer
                out = checkpoint(run, x, rotary_pos_emb=angles, use_reentrant=False, preserve_rng_state=keeps_state)
            else:
                out = layer(x, rotary_pos_emb=angles)
        if settings.experts:
            out, balance = out
            self.balance = balance / settings.layers + (self.balance if number else 0.0)
        return cast(Tensor, out)


def _by_recipe(layer: nn.Module, recipe: Recipe) -> Callable[..., Any]:
    """A layer that enters its autocast itself: compiled code of a second forward knows nothing of the first one's."""

    def run(*args: Any, **kwargs: Any) -> Any:
        with autocast(recipe=recipe):
            return layer(*args, **kwargs)

    return run


def linear_names(settings: TrainSettings) -> list[str]:
    """The names of the linear layers that have a recipe, layer by layer."""
    parts: list[str] = []

    def note(module: nn.Module, name: str) -> str:
        parts.append(name)
        return HIGH_PRECISION

    with torch.random.fork_rng(devices=[]), quantized_model_init(recipe=note):
        kept = _layer(settings, 1, "meta", {})  # until the names are asked for
    del kept
    return [f"layers.{number}.{part}" for number in range(settings.layers) for part in parts]


def recipes_of(settings: TrainSettings) -> Sequence[Recipe] | LayerRecipes:
    """What `LanguageModel` is given for the recipes of the settings.

    Raises:
        ConfigurationError: a pattern matches nothing, or nothing that earlier ones have left.
    """
    recipes, names = LayerRecipes.parse(settings.recipe), [f"layers.{number}" for number in range(settings.layers)]
    return recipes.of_parts(linear_names(settings)) if recipes.tells_parts(names) else recipes.of_layers(names)


def _of_part(recipes: LayerRecipes, number: int, module: nn.Module, name: str) -> Recipe:
    return recipes.of_layer(f"layers.{number}.{name}")


def _around(layer: nn.Module) -> Recipe:
    """That of the autocast around a layer whose parts run by their own: of one of them, if any quantizes."""
    own = (module.recipe_in(None) for module in layer.modules() if isinstance(module, QuantizedModule))
    return next((recipe for recipe in own if recipe is not None and recipe.table), HighPrecision())


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
    """What a run's model is made from.

    `configuration`: of transformers' model; None for the decoder that is built by sizes. `recipe`: of all layers of
    this decoder, one with arguments, which the settings cannot say; None for that of the settings.
    """

    settings: TrainSettings
    configuration: Mapping[str, Any] | None = None
    recipe: Recipe | None = None

    def check(self) -> list[str]:
        """Refuse tokens and sequences that the model has no place for; what is odd about them, in lines.

        Raises:
            ConfigurationError: with the numbers.
        """
        if self.configuration is None:
            rows = self.settings.vocabulary
            if not rows % _ROWS or self.settings.init_from:
                return []
            return [
                f"WARNING: vocabulary = {rows} is no multiple of {_ROWS}, so a GPU multiplies by the head several "
                f"times as slowly as it could; --vocabulary {rounded_up(rows)} has room for the same tokens"
            ]
        where, settings = self.settings.model, self.settings
        held, tokens = huggingface.vocabulary_size(self.configuration, where), settings.vocabulary or VOCABULARY
        if held < tokens:
            raise ConfigurationError(
                f"model = {where} has {held} tokens, fewer than the {tokens} of the data; take its own tokenizer, by "
                "--tokenizer"
            )
        longest = huggingface.longest_sequence(self.configuration)
        if longest is not None and longest < settings.seq_length:
            raise ConfigurationError(
                f"seq_length = {settings.seq_length}, but model = {where} has positions for {longest} tokens alone"
            )
        if held != tokens and not settings.vocabulary:
            raise ConfigurationError(
                f"there is no tokenizer in model = {where}, which has {held} tokens; name one with --tokenizer, or "
                f"give --vocabulary {tokens} to train on bytes"
            )
        return []

    def described(
        self, tp_mesh: DeviceMesh | None = None, sequence_parallel: bool = False, ep_mesh: DeviceMesh | None = None
    ) -> nn.Module:
        """The model on the meta device, its linear layers quantized.

        Raises:
            ConfigurationError: it cannot be built, or a pattern of its recipes matches nothing.
        """
        return self.converted(tp_mesh, sequence_parallel, ep_mesh)[0]

    def converted(
        self, tp_mesh: DeviceMesh | None = None, sequence_parallel: bool = False, ep_mesh: DeviceMesh | None = None
    ) -> tuple[nn.Module, ConversionReport | None]:
        """As `described`, and what became of each linear layer of a model of transformers that has quantized ones."""
        settings = self.settings
        if self.configuration is not None:
            recipes = LayerRecipes.parse(settings.recipe)
            model, report = huggingface.converted(self.configuration, settings.model, recipes, causal=True)
            huggingface.recompute_layers(model, settings.recompute_every if settings.recompute == "layer" else 0)
            return model, report
        layers = self.recipe or recipes_of(settings)
        return LanguageModel(settings, layers, "meta", tp_mesh, sequence_parallel, ep_mesh=ep_mesh), None


def build(spec: ModelSpec, mesh: DeviceMesh, *, random: bool = True) -> nn.Module:
    """The model, sharded over the mesh and filled with its initial weights. A collective call.

    The mesh has the axes of `mesh.MeshSpec`, by name; that of tensor parallelism cuts the layers, `fully_shard` gets
    the others. The model is described on the meta device and filled shard by shard, so that no process ever holds all
    of it. The random keys of the weights come from torch's generator, seeded here. Without `random`, weights of
    transformers' models have no values yet: they are to be loaded.
    """
    settings = spec.settings
    torch.manual_seed(settings.seed)
    parts = split(mesh)
    tp_size = 1 if parts.tp is None else parts.tp.size()
    axes = MeshSpec(dp_shard=parts.data.size(), tp=tp_size)
    model = spec.described(parts.tp, settings.divides_sequences(axes), parts.ep)
    layers = huggingface.repeated_layers(model)
    policy = MixedPrecisionPolicy(reduce_dtype=settings.torch_reduce_dtype)  # of sums over processes and micro-batches
    how: dict[str, Any] = {"reshard_after_forward": settings.reshard_after_forward, "mp_policy": policy}
    for layer in layers:
        if settings.compile:
            layer.compile()
        if parts.ep is not None:
            fully_shard(cast(MixtureLayer, layer).mlp.expert_layers(), mesh=parts.experts, **how)
        fully_shard(layer, mesh=parts.data, **how)
    fully_shard(model, mesh=parts.data, **how)
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
    """Tokens int64 [batch, sequence] -> logits [batch, sequence, vocabulary], of either kind of model."""
    if isinstance(model, LanguageModel):
        return cast(Tensor, model(tokens))
    return cast(Tensor, model(input_ids=tokens, use_cache=False).logits)


def batch_multiple(model: nn.Module) -> int:
    """What the number of sequences of a batch must be a multiple of."""
    return model.batch_multiple if isinstance(model, LanguageModel) else 1


def _prefetch(layers: Iterable[nn.Module]) -> None:
    """Each layer begins to gather the weights of the next when it has its own, and not when the host comes to it.

    FSDP2 does so by itself in backward alone.
    """
    for layer, following in pairwise(layers):
        assert isinstance(layer, FSDPModule) and isinstance(following, FSDPModule)
        layer.set_modules_to_forward_prefetch([following])


def losses(model: nn.Module, tokens: Tensor, targets: Tensor) -> TokenLosses:
    """Those of a pass that is trained on. The gradient of our own decoder's logits, which nobody else has, takes their
    place in memory."""
    return token_losses(logits(model, tokens), targets, overwrites=isinstance(model, LanguageModel))


def loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy in nats a token."""
    return token_losses(logits, targets).cross_entropy


def trained_loss(model: nn.Module, found: TokenLosses, settings: TrainSettings) -> Tensor:
    """The loss that is told, and what is trained on besides."""
    more = found.cross_entropy
    if settings.z_loss:
        more = more + settings.z_loss * found.z_loss
    if isinstance(model, LanguageModel) and model.balance is not None and settings.balance_loss:
        balance, model.balance = model.balance, None  # of this forward, whose graph goes with it
        more = more + settings.balance_loss * balance
    return more


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
    """Continue the tokens of a prompt by `length` more, as the begin of a document. A collective call.

    Each token is drawn by the counter generator from the model's distribution, on rank 0, and sent to the others; the
    model reads at most its seq_length last tokens. The mode (train or eval) is put back, and gathered weights freed.
    """
    device = next(model.parameters()).device
    tokens = [end_of_document, *prompt]
    words = numerics.random_words(seed, 0, _SAMPLE_STREAM, (1, length))[0]
    was_training = model.training
    model.eval()
    for chance in distributions.uniform(words).tolist():
        # alike sequences, where one cannot be divided: no scale of an activation depends on how many there are
        window = torch.tensor(
            [tokens[-settings.seq_length :]] * batch_multiple(model), dtype=torch.int64, device=device
        )
        probabilities = (logits(model, window)[0, -1, :vocabulary].double() / temperature).softmax(-1)
        token = torch.searchsorted(probabilities.cumsum(-1), torch.tensor([chance], dtype=torch.float32, device=device))
        token.clamp_(max=len(probabilities) - 1)
        if dist.is_initialized():
            dist.broadcast(token, 0)
        tokens.append(int(token))
    model.train(was_training)
    reshard(model)
    return tokens[1 + len(prompt) :]


def reshard(model: nn.Module) -> None:
    """Free what a forward without a backward left gathered, so that the next one gathers the weights of its time."""
    for module in _sharded(model):
        module.reshard()


def reduce_gradients(model: nn.Module, *, now: bool) -> None:
    """Whether the next backward reduces gradients over the processes, or adds to those that wait for it."""
    for module in _sharded(model):
        module.set_requires_gradient_sync(now, recurse=False)


def _sharded(model: nn.Module) -> Iterator[FSDPModule]:
    return (module for module in model.modules() if isinstance(module, FSDPModule))
