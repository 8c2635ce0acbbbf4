"""Computes layers of transformers models together, for `convert(modules="fused")`.

A gated MLP, `down_proj(act_fn(gate_proj(x)) * up_proj(x))`, becomes one autograd step (`modules/fused.py` `mlp`): its
class becomes a subclass with another forward. If calling a layer would do more than multiply (hooks, a wrapper, a
replaced layer), the original forward runs. Other layers that read the same tensor share its quantization.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from quantshard import limits, private_torch
from quantshard.errors import warn_once
from quantshard.interop.conversion.forward import subclass_with
from quantshard.interop.conversion.linear import ConvertedLinear
from quantshard.interop.conversion.selection import LayerChoice
from quantshard.modules import fused
from quantshard.modules.activation_storage import HIGH_PRECISION, STORAGES
from quantshard.modules.contexts import context, settings
from quantshard.modules.fused_operands import NormInput
from quantshard.modules.gemms import compiled, functional, graph_state
from quantshard.modules.gemms.compiled import TracedLinear
from quantshard.modules.gemms.functional import PreparedLinear
from quantshard.modules.gemms.linear_state import LinearState
from quantshard.modules.gemms.shared_input import InputReader, SharedInput
from quantshard.modules.layernorm_mlp import activate_stored
from quantshard.recipe import Recipe

GATE, UP, DOWN = LAYERS = ("gate_proj", "up_proj", "down_proj")

FAMILIES = {
    "LlamaMLP": "llama", "MistralMLP": "mistral", "Qwen2MLP": "qwen2", "Qwen3MLP": "qwen3", "Qwen3MoeMLP": "qwen3_moe",
    "GemmaMLP": "gemma", "Gemma2MLP": "gemma2", "Gemma3MLP": "gemma3",
}  # fmt: skip
"""Classes with a forward that computes the formula above, and the transformers model that defines each."""

ACTIVATIONS = {
    "torch.nn.modules.activation.SiLU": "swiglu",
    "transformers.activations.SiLUActivation": "swiglu",
    "transformers.activations.GELUTanh": "geglu",
    "torch.nn.modules.activation.ReLU": "reglu",
}
"""Class of act_fn -> name of the gated activation in `LayerNormMLP`."""

_PLAIN = "_quantshard_plain_mlp"

READERS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Names of sibling layers that usually read the same tensor; each call checks whether they do."""


@dataclass(frozen=True)
class FusedLayers:
    """Layers computed as one step: the name of their parent module, and a description of the step."""

    name: str
    step: str


@dataclass(frozen=True)
class UnfusedLayers:
    """Layers that `modules="fused"` did not fuse: the name of their parent module, and the reason."""

    name: str
    reason: str


GatedMLP = tuple[str, nn.Module, str]
"""The name of a gated MLP, the MLP, and the reason why it is not fused ("" if it is)."""


def gated_mlps(model: nn.Module, chosen: Sequence[LayerChoice]) -> list[GatedMLP]:
    by_module = {id(choice.module): choice for choice in chosen}
    return [
        (name, module, unknown(module) or _mismatch(module, by_module))
        for name, module in model.named_modules()
        if dict(module.named_children()).keys() >= set(LAYERS)
    ]


def _mismatch(module: nn.Module, by_module: dict[int, LayerChoice]) -> str:
    """Return why the layers of an MLP cannot be fused: their conversions differ. "" if they can."""
    layer_choices = [by_module.get(id(getattr(module, name))) for name in LAYERS]
    for name, choice in zip(LAYERS, layer_choices, strict=True):
        if choice is None or choice.recipe is None:
            return f"its {name} is not converted ({choice.reason if choice else 'no torch.nn.Linear'})"
    recipes = [choice.recipe for choice in layer_choices if choice]
    dtypes = {choice.module.weight.dtype for choice in layer_choices if choice}
    if any(recipe != recipes[0] for recipe in recipes):
        return f"its layers have different recipes ({', '.join(recipe.name for recipe in recipes if recipe)})"
    return "its layers have different dtypes" if len(dtypes) > 1 else ""


def fuse(
    model: nn.Module, mlps: Sequence[GatedMLP], activation_storage: str = HIGH_PRECISION
) -> tuple[tuple[FusedLayers, ...], tuple[UnfusedLayers, ...]]:
    """Fuse MLPs, and let layers share the quantization of their input. Returns what was fused and what was not."""
    storage_note = "" if activation_storage == HIGH_PRECISION else f", gate and up saved as {activation_storage}"
    fused_layers, unfused = [], [UnfusedLayers(name, reason) for name, _, reason in mlps if reason]
    for name, mlp, reason in mlps:
        if not reason:
            fuse_mlp(mlp, activation_storage)
            fused_layers.append(FusedLayers(name, f"gated MLP, {activation_of(mlp.act_fn)}{storage_note}"))
    for name, module in model.named_modules():
        for group in _readers(module):
            names = ", ".join(group)
            reason = _share([getattr(module, child) for child in group])
            if any(name == entry.name for entry in fused_layers):
                # already one step; the input is shared only if the layers are called separately
                continue
            if reason:
                unfused.append(UnfusedLayers(name, f"{names}: {reason}"))
            else:
                fused_layers.append(FusedLayers(name, f"{names}: their input is quantized once"))
    return tuple(fused_layers), tuple(unfused)


def is_fused(model: nn.Module) -> bool:
    layers = (module for module in model.modules() if isinstance(module, ConvertedLinear))
    has_fused_mlp = any(isinstance(module, FusedGatedMLP) for module in model.modules())
    return has_fused_mlp or any(layer.shared_input is not None for layer in layers)


def _readers(module: nn.Module) -> list[list[str]]:
    groups = [[name for name in group if isinstance(getattr(module, name, None), ConvertedLinear)] for group in READERS]
    return [group for group in groups if len(group) > 1]


def _share(layers: Sequence[ConvertedLinear]) -> str:
    """Let layers share the quantization of their input, or return why they cannot ("" if they can)."""
    if any(layer.recipe != layers[0].recipe or layer.model_recipe != layers[0].model_recipe for layer in layers):
        return "they have different recipes"
    if any(layer.has_histories for layer in layers):
        return "delayed scaling keeps a history per layer"
    shared_input = SharedInput()
    for layer in layers:
        layer.shared_input = InputReader(shared_input)
    return ""


def unknown(module: nn.Module) -> str:
    """Return why a candidate might not compute the formula, or "" if it does."""
    kind = type(module)
    family = FAMILIES.get(kind.__name__)
    if family is None or kind.__module__ != f"transformers.models.{family}.modeling_{family}":
        return f"{kind.__module__.split('.')[0]}.{kind.__name__} is not a known class"
    if "forward" in vars(module) or kind.forward.__module__ != kind.__module__:
        return f"the forward of {kind.__name__} was replaced"
    extras = {name for name, _ in module.named_children()} - {*LAYERS, "act_fn"}
    if extras or next(iter(module.parameters(recurse=False)), None) is not None:
        return f"it also has {', '.join(sorted(extras)) or 'parameters'}"
    act_fn = getattr(module, "act_fn", None)
    return "" if activation_of(act_fn) else f"no kernel computes its act_fn ({type(act_fn).__name__})"


def activation_of(act_fn: object) -> str:
    """Return the gated activation that uses `act_fn` on the gate, or "" if it is not supported."""
    kind = type(act_fn)
    name = ACTIVATIONS.get(f"{kind.__module__}.{kind.__qualname__}", "")
    if name == "geglu" and not isinstance(getattr(act_fn, "act", None), functools.partial):
        # another implementation of tanh, which rounds differently
        return ""
    return name


def fuse_mlp(module: nn.Module, activation_storage: str = HIGH_PRECISION) -> None:
    """Make an MLP compute its converted layers as one step; `activation_storage`: how gate and up are saved."""
    module.__class__ = subclass_with(FusedGatedMLP, _PLAIN, type(module))  # type: ignore[arg-type]  # mypy: unhashable
    cast(Any, module)._activation_storage = activation_storage
    _new_handle(module)


def unfuse(model: nn.Module) -> None:
    for module in model.modules():
        if (plain := getattr(type(module), _PLAIN, None)) is not None:
            module.__class__ = plain
            del module._handle, module._activation_storage


class FusedGatedMLP(nn.Module):
    gate_proj: ConvertedLinear
    up_proj: ConvertedLinear
    down_proj: ConvertedLinear
    act_fn: nn.Module
    _handle: Tensor
    _activation_storage: str = HIGH_PRECISION

    def forward(self, x: Tensor) -> Any:
        if not self._is_fused():
            return super().forward(x)  # type: ignore[misc]
        recipe_context = self.gate_proj.own_autocast()
        if torch.compiler.is_compiling() and not self._is_traced(x, compiled.setting_in(recipe_context)):
            return compiled.run_eagerly(FusedGatedMLP.forward, self, x)
        if recipe_context is None:
            return self._computed(x)
        with recipe_context:
            return self._computed(x)

    def _is_traced(self, x: Tensor, setting: str) -> bool:
        """Return whether a graph of torch.compile contains this module."""
        weights = [getattr(self, name).weight for name in LAYERS]
        is_stored = self._activation_storage != HIGH_PRECISION and not settings.quantizes(setting)
        return not is_stored and compiled.can_trace(setting, x, weights)

    def _is_fused(self) -> bool:
        """Return whether calling the layers would only multiply by their weights; warns once if not."""
        for name in (*LAYERS, "act_fn"):
            child = getattr(self, name)
            if name != "act_fn" and type(child) is not ConvertedLinear:
                why = f"is a {type(child).__name__}"
            elif not private_torch.runs_forward_alone(child) or (name == "act_fn" and not activation_of(child)):
                why = "has hooks or was replaced"
            else:
                continue
            _warn_of_calls(type(self).__name__, name, why, context.current_setting(), self._activation_storage)
            return False
        return True

    def _computed(self, x: Tensor) -> Tensor:
        x = self.gate_proj._input(x)
        gate: Any = self.gate_proj.prepare(x.shape, x.device)
        up: Any = self.up_proj.prepare(x.shape, x.device)
        down: Any = self.down_proj.prepare((*x.shape[:-1], self.gate_proj.out_features), x.device)
        activation, storage = activation_of(self.act_fn), STORAGES[self._activation_storage]
        linear: Callable[..., Any] = functional.linear
        fc1: TracedLinear | PreparedLinear
        if isinstance(gate, TracedLinear):
            # operators in the graph find this module by its handle
            linear = compiled.traced_linear
            fc1 = gate._replace(
                weights=[gate.weights[0], up.weights[0]],
                biases=[gate.biases[0], up.biases[0]],
                module=self._handle,
                names=(f"{GATE}.weight", f"{UP}.weight"),
            )
            down = down._replace(module=self._handle, names=(f"{DOWN}.weight",))
        else:
            fc1 = PreparedLinear.joined([gate, up])
        front = NormInput(x)
        if fused.fits(front, fc1, down):
            return fused.mlp(front, fc1, activation, down, storage=storage)[0]
        inner = linear(x, fc1)
        return linear(activate_stored(inner[0], activation, inner[1], storage)[0], down)[0]

    # Interface used by operators

    def _linear_state(self, weights: Sequence[str], recipe: Recipe, prefix: str = "") -> LinearState:
        layers = [cast(ConvertedLinear, self.get_submodule(name.removesuffix(".weight"))) for name in weights]
        states = [layer._linear_state(layer._layer.weights, recipe) for layer in layers]
        return states[0] if len(states) == 1 else LinearState.joined(states)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        super()._apply(fn, recurse)
        self._handle = graph_state.handle_beside(self, self._handle)
        return self

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        # a copy needs its own handle
        _new_handle(self)


@private_torch.constant_in_graphs
def _warn_of_calls(mlp: str, layer: str, why: str, setting: str, storage: str) -> None:
    if settings.registered[setting].strict:
        raise limits.fallback_error(("mlp not fused",), f"{mlp}.{layer}")
    storage_note = "" if storage == HIGH_PRECISION else f", without activation_storage={storage!r}"
    warn_once(
        "unfused mlp",
        f"{mlp}: {layer} {why}, so its layers are called one by one, with other roundings{storage_note}; avoid it with "
        "convert(modules='linear')",
    )


def _new_handle(module: nn.Module) -> None:
    device = next(module.parameters()).device
    cast(Any, module)._handle = graph_state.handle(cast(graph_state.LinearModule, module), device)
