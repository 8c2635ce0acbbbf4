"""The built-in language model: a decoder over tokens, made of quantshard's modules.

Two architectures: "llama" (RMSNorm, SwiGLU, rotary positions, no biases) and "gpt" (LayerNorm, GELU, learned positions,
biases). The recipe quantizes the weights of the layers; embeddings, head and norms stay in high precision. In a mixture
of experts (Shazeer et al., 2017, arXiv:1701.06538), a router in high precision chooses the experts of each token.

Tensor parallelism shards the layers. Embeddings and head are replicated over tp, because the byte vocabulary (257) is
prime. Sequence parallelism divides the sequences of the batch between the embedding and the head.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from quantshard import modules
from quantshard.distributed import tensor_parallel
from quantshard.distributed.module_meshes import TensorParallelConfig
from quantshard.distributed.tensor_parallel import TensorParallel
from quantshard.modules import autocast, quantized_model_init
from quantshard.modules.base.initialization import WeightSpec
from quantshard.modules.base.module import QuantizedModule
from quantshard.modules.context_parallel import ContextParallel
from quantshard.modules.contexts.layer_recipes import RecipeByName, check_reached, matches
from quantshard.modules.quantize import open_layers
from quantshard.recipe import HighPrecision, Recipe
from quantshard.tools.trainer.data.packing import Documents
from quantshard.tools.trainer.data.tokenizer import VOCABULARY
from quantshard.tools.trainer.models.mixture import MixtureLayer, Routing
from quantshard.tools.trainer.settings.config import TrainSettings
from quantshard.tools.trainer.settings.values import LayerRecipes


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
            self._add_weight("weight", WeightSpec((entries, size), std=0.02))

    def forward(self, index: Tensor) -> Tensor:
        """Look up index int64 [...] -> [..., size]."""
        return F.embedding(index, gathered_weight(self))


def gathered_weight(module: QuantizedModule) -> Tensor:
    return cast(Tensor, module._locals(("weight",))[0])


class LanguageModel(nn.Module):
    """Decoder that returns logits of the next token, or the loss.

    Built on `device`; on "meta", `reset_parameters` of its modules fills the parameters later, sharded or not.

    Args:
        recipe: one recipe for all layers, one per layer, or patterns that match `linear_names`.
        sequence_parallel: divide the sequences of a batch over `tp_mesh`; the batch must be divisible.
        vocabulary: number of tokens; 0: from the settings, or the byte vocabulary.
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
        # of each layer in the last forward
        self.routing: list[Routing] = []
        recipes: Sequence[Recipe | RecipeByName]
        if isinstance(recipe, LayerRecipes):
            recipes = [_recipe_by_part(recipe, f"layers.{number}") for number in range(settings.layers)]
        else:
            recipes = [recipe] * settings.layers if isinstance(recipe, Recipe) else list(recipe)
        self.vocabulary = vocabulary = vocabulary or settings.vocabulary or VOCABULARY
        group = None if tp_mesh is None else tp_mesh.get_group()
        self.sequence_parallel, self.tp = sequence_parallel, TensorParallel.of(group, None, sequence_parallel)
        hidden, dtype = settings.hidden, settings.torch_params_dtype
        llama = settings.architecture == "llama"
        parallel: dict[str, Any] = {"tp_mesh": tp_mesh, "sequence_parallel": sequence_parallel}
        self.embedding = Embedding(vocabulary, hidden, dtype, device, tp_mesh)
        self.positions = None if llama else Embedding(settings.seq_length, hidden, dtype, device, tp_mesh)
        self.layers = nn.ModuleList()
        self.recipes: list[Recipe] = []
        for number, layer_recipe in enumerate(recipes):
            if isinstance(layer_recipe, Recipe):
                with quantized_model_init(recipe=layer_recipe, preserve_high_precision_init_val=True):
                    layer = _layer(settings, number + 1, device, parallel, ep_mesh)
            else:
                layer = _layer(settings, number + 1, device, parallel, ep_mesh)
                modules.quantize_(layer, layer_recipe, preserve_high_precision_init_val=True)
                # the recipe for the autocast around the layer: the first one that quantizes
                own = (part.recipe_in(None) for part in layer.modules() if isinstance(part, QuantizedModule))
                layer_recipe = next((recipe for recipe in own if recipe and recipe.table), HighPrecision())
            self.layers.append(layer)
            self.recipes.append(layer_recipe)
        kind = modules.RMSNorm if llama else modules.LayerNorm
        self.norm = kind(hidden, settings.norm_eps, params_dtype=dtype, device=device, **parallel)
        angles = partial(modules.RotaryPositionEmbedding, settings.head_size, rotary_base=settings.rope_theta)
        self.rotary = angles() if llama else None
        self.head = None
        if not settings.tied:
            with quantized_model_init(enabled=False):
                self.head = modules.Linear(
                    hidden, vocabulary, bias=False, params_dtype=dtype, device=device, tp_mesh=tp_mesh
                )

    @property
    def batch_multiple(self) -> int:
        """The divisor that the number of sequences of a batch must have."""
        return self.tp.size if self.sequence_parallel else 1

    def forward(
        self, tokens: Tensor, targets: Tensor | None = None, documents: Documents | None = None, **loss: Any
    ) -> Any:
        """Map tokens int64 [batch, sequence] to logits [batch, sequence, vocabulary], in the dtype of the parameters.

        With `targets`, return the mean loss with z-loss, and the z-loss, without the logits of all tokens. All ranks of
        a tensor-parallel group pass the same tokens and get the same results. `documents`: tokens attend within their
        document only. `loss`: see `linear_cross_entropy`.
        """
        self.routing = []
        parallel = ContextParallel.running()
        length = tokens.shape[1] * (1 if parallel is None else parallel.ranks.size)
        x = self.embedding(tokens)
        angles = None if self.rotary is None else self.rotary(length, device=tokens.device)
        attention: dict[str, Any] = {}
        positions = None if documents is None else documents.positions
        if documents is not None:
            # of each token, [sequence, batch, 1, features]
            angles = None if angles is None else angles[positions, 0].transpose(0, 1)
            attention = {"cu_seqlens_q": documents.boundaries, "self_attn_mask_type": "padding_causal"}
        if parallel is not None and angles is not None:
            angles = parallel.local(angles)
        if self.positions is not None:
            index = torch.arange(length, device=tokens.device) if positions is None else positions
            x = x + self.positions(index if parallel is None else parallel.local(index, -1))
        if self.sequence_parallel:
            x = tensor_parallel.split_rows(x, self.tp)
        # one outer autocast, so that its exit work runs once
        with autocast(recipe=self.recipes[0]):
            for number, layer in enumerate(self.layers):
                x = self._through(number, layer, x, rotary_pos_emb=angles, **attention)
        x = self.norm(x)
        if self.sequence_parallel:
            x = tensor_parallel.join_rows(x, self.tp)
        if targets is not None:
            weight = gathered_weight(self.embedding if self.head is None else self.head)
            return modules.linear_cross_entropy(x, weight, targets, return_z_loss=True, **loss)
        return F.linear(x, gathered_weight(self.embedding)) if self.head is None else cast(Tensor, self.head(x))

    def _through(self, number: int, layer: nn.Module, x: Tensor, **attention: Any) -> Tensor:
        layer_recipe, settings = self.recipes[number], self.settings
        with nullcontext() if layer_recipe is self.recipes[0] else autocast(recipe=layer_recipe):
            if self.training and settings.recompute == "layer":
                has_dropout = settings.dropout > 0
                run = _by_recipe(layer, layer_recipe) if settings.compile else layer
                out = checkpoint(run, x, **attention, use_reentrant=False, preserve_rng_state=has_dropout)
            else:
                out = layer(x, **attention)
        if settings.experts:
            out, routing = out
            self.routing.append(routing)
        return cast(Tensor, out)


def _by_recipe(layer: nn.Module, recipe: Recipe) -> Callable[..., Any]:
    """Make a layer enter its autocast itself: compiled code recomputes it outside of the first forward's."""

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
    if all(any(matches(pattern, name) for name in names) for pattern in recipes.patterns):
        check_reached("recipe", recipes.patterns, names)
        return [recipes.of_layer(name) for name in names]
    return recipes.of_parts(linear_names(settings))


def _recipe_by_part(recipes: LayerRecipes, layer: str) -> RecipeByName:
    return lambda module, name: recipes.of_layer(f"{layer}.{name}")


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
    norm = "RMSNorm" if llama else "LayerNorm"
    return modules.TransformerLayer(
        settings.hidden, settings.ffn, settings.heads, layernorm_epsilon=settings.norm_eps, layer_number=number,
        hidden_dropout=settings.dropout, attention_dropout=settings.dropout, kv_channels=settings.head_size,
        self_attn_mask_type="causal", num_gqa_groups=settings.kv_heads, bias=not llama, normalization=norm,
        attn_input_format="bshd", activation="swiglu" if llama else "gelu", set_parallel_mode=True,
        recompute_activation=settings.recompute == "activation", activation_storage=settings.activation_storage,
        qk_norm_type=norm if settings.qk_norm else None, qk_norm_eps=settings.norm_eps, qk_norm_before_rope=True,
        params_dtype=settings.torch_params_dtype, device=device, **cut,
    )  # fmt: skip
