"""Selects the layers that `modules="fused"` fuses, and records why the others are not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from quantshard.interop.conversion import gated_mlp
from quantshard.interop.conversion.linear import ConvertedLinear
from quantshard.interop.conversion.report import FusedLayers, UnfusedLayers
from quantshard.interop.conversion.selection import LayerChoice
from quantshard.modules.activation_storage import HIGH_PRECISION
from quantshard.modules.gemms.shared_input import InputReader, SharedInput

READERS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Names of sibling layers that usually read the same tensor; each call checks whether they do."""

NORM_NAMES = frozenset({"input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm"})
"""Names of norms in decoder layers, some of which precede linear layers."""

_ROUNDS_BEFORE = "its own code rounds before it multiplies by the weight, the fused kernel once behind it"
_KEPT = "its output passes through the model's own forwards, so that it would be written all the same"
NORMS = {
    **dict.fromkeys("LlamaRMSNorm MistralRMSNorm MixtralRMSNorm".split(), _ROUNDS_BEFORE),
    **dict.fromkeys("Qwen2RMSNorm Qwen3RMSNorm Qwen3MoeRMSNorm".split(), _ROUNDS_BEFORE),
    **dict.fromkeys("GemmaRMSNorm Gemma2RMSNorm Gemma3RMSNorm".split(), _KEPT),
}
"""Norm class -> reason why the norm is not fused with the layers after it."""


@dataclass(frozen=True)
class GatedMLPChoice:
    """A gated MLP, and the reason why it is not fused ("" if it is)."""

    name: str
    module: nn.Module
    reason: str


def gated_mlps(model: nn.Module, chosen: Sequence[LayerChoice]) -> list[GatedMLPChoice]:
    """List all gated MLPs of a model, before its layers are replaced."""
    by_module = {id(choice.module): choice for choice in chosen}
    return [
        GatedMLPChoice(name, module, gated_mlp.unknown(module) or _apart(module, by_module))
        for name, module in model.named_modules()
        if gated_mlp.is_candidate(module)
    ]


def _apart(module: nn.Module, by_module: dict[int, LayerChoice]) -> str:
    """Return why the layers of an MLP cannot be fused: their conversions differ. "" if they can."""
    layer_choices = [by_module.get(id(getattr(module, name))) for name in gated_mlp.LAYERS]
    for name, choice in zip(gated_mlp.LAYERS, layer_choices, strict=True):
        if choice is None or choice.recipe is None:
            return f"its {name} is not converted ({choice.reason if choice else 'no torch.nn.Linear'})"
    recipes = [choice.recipe for choice in layer_choices if choice]
    dtypes = {choice.module.weight.dtype for choice in layer_choices if choice}
    if any(recipe != recipes[0] for recipe in recipes):
        return f"its layers have different recipes ({', '.join(recipe.name for recipe in recipes if recipe)})"
    return "its layers have different dtypes" if len(dtypes) > 1 else ""


def fuse(
    model: nn.Module, mlps: Sequence[GatedMLPChoice], activation_storage: str = HIGH_PRECISION
) -> tuple[tuple[FusedLayers, ...], tuple[UnfusedLayers, ...]]:
    """Fuse MLPs and let layers that read the same input share its quantization. Returns what was fused and what was
    not."""
    storage_note = "" if activation_storage == HIGH_PRECISION else f", gate and up kept as {activation_storage}"
    fused, unfused = [], [UnfusedLayers(entry.name, entry.reason) for entry in mlps if entry.reason]
    for entry in mlps:
        if not entry.reason:
            gated_mlp.fuse(entry.module, activation_storage)
            fused.append(
                FusedLayers(entry.name, f"gated MLP, {gated_mlp.activation_of(entry.module.act_fn)}{storage_note}")
            )
    for name, module in model.named_modules():
        for group in _readers(module):
            names = ", ".join(group)
            reason = _share([getattr(module, child) for child in group])
            if any(name == entry.name for entry in fused):
                # already one step; the input is shared only if the layers are called separately
                continue
            if reason:
                unfused.append(UnfusedLayers(name, f"{names}: {reason}"))
            else:
                fused.append(FusedLayers(name, f"{names}: their input is quantized once"))
        if _is_norm_before(name, module):
            unfused.append(UnfusedLayers(name, NORMS[type(module).__name__]))
    return tuple(fused), tuple(unfused)


def is_fused(model: nn.Module) -> bool:
    """Return whether a model has fused layers or layers that share their input's quantization."""
    layers = (module for module in model.modules() if isinstance(module, ConvertedLinear))
    has_fused_mlp = any(isinstance(module, gated_mlp.FusedGatedMLP) for module in model.modules())
    return has_fused_mlp or any(layer.shared_input is not None for layer in layers)


def _readers(module: nn.Module) -> list[list[str]]:
    """Return groups of converted child layers that read the same tensor in all supported families."""
    groups = [[name for name in group if isinstance(getattr(module, name, None), ConvertedLinear)] for group in READERS]
    return [group for group in groups if len(group) > 1]


def _share(layers: Sequence[ConvertedLinear]) -> str:
    """Let layers share the quantization of their input, or return why they cannot ("" if they can)."""
    if any(layer.recipe != layers[0].recipe or layer.model_recipe != layers[0].model_recipe for layer in layers):
        return "they have different recipes"
    if any(layer.has_histories for layer in layers):
        return "under delayed scaling each has a history of its own to scale by"
    shared_input = SharedInput()
    for layer in layers:
        layer.shared_input = InputReader(shared_input)
    return ""


def _is_norm_before(name: str, module: nn.Module) -> bool:
    """Return whether a module is a known norm between a residual connection and linear layers."""
    return name.rpartition(".")[2] in NORM_NAMES and type(module).__name__ in NORMS
