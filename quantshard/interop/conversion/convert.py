"""`convert` and `revert`: replace a model's linear layers by quantized ones in place, and back.

A layer can have several places: children of modules, and plain attributes, lists, tuples and dicts, which PyTorch does
not list. A layer replaced in only one place would still compute in the other, and train in vain.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from torch import Tensor, nn

from quantshard import sharding
from quantshard.errors import ConfigurationError
from quantshard.interop.conversion import experts, fusion, linear, selection
from quantshard.interop.conversion.experts import ConvertedExperts
from quantshard.interop.conversion.forward import enter_recipe, leave_recipe
from quantshard.interop.conversion.fusion import FusedLayers, UnfusedLayers
from quantshard.interop.conversion.head_loss import AUTO as AUTO_LOSS, Loss, check_loss, set_loss, unset_loss
from quantshard.interop.conversion.linear import ConvertedLinear
from quantshard.interop.conversion.selection import Filter, LayerChoice
from quantshard.modules.activation_storage import HIGH_PRECISION, check_storage
from quantshard.modules.contexts import settings
from quantshard.modules.contexts.layer_recipes import Recipes, by_name
from quantshard.optimizers.checks import REPLACED
from quantshard.readable import by_pattern, human_bytes, united_groups
from quantshard.recipe import AUTO, HighPrecision, Recipe
from quantshard.tensor import components

TRANSPOSED = "a Conv1D of transformers, whose weight is transposed and which is no torch.nn.Linear"

WHERE = ("linear", "fused")

Places = dict[int, list[Callable[[nn.Module], None]]]
"""Module identity -> functions that put another module into each of its places."""

_MODULE_ATTRIBUTES = frozenset(vars(nn.Module()))


@dataclass(frozen=True)
class ConvertedLayer:
    """A converted layer: its format, and the bytes of its unsharded weight before and after."""

    name: str
    shape: tuple[int, ...]
    recipe: str
    format: str
    bytes_before: int
    bytes_after: int


@dataclass(frozen=True)
class LeftLayer:
    """A linear layer, or a stack of experts' weights, that was not converted, and the reason."""

    name: str
    shape: tuple[int, ...]
    reason: str


@dataclass(frozen=True)
class ConversionReport:
    """The result of `convert`. Prints as one line per name pattern."""

    converted: tuple[ConvertedLayer, ...]
    left: tuple[LeftLayer, ...]
    fused: tuple[FusedLayers, ...] = ()
    unfused: tuple[UnfusedLayers, ...] = ()
    loss: str = ""

    @property
    def bytes_before(self) -> int:
        """Size of the converted weights before conversion, in bytes."""
        return sum(layer.bytes_before for layer in self.converted)

    @property
    def bytes_after(self) -> int:
        """Size of the converted weights now, including scales, in bytes."""
        return sum(layer.bytes_after for layer in self.converted)

    def to_dict(self) -> dict[str, object]:
        """Return the report as a JSON-serializable dict."""
        return asdict(self)

    def high_precision(self) -> list[str]:
        """Return report lines about what stays in high precision, with reasons; empty if everything was converted."""
        lines = []
        if self.left:
            lines.append(f"not converted: {len(self.left)} linear layers")
            for pattern, layers in united_groups((layer.name, layer.reason, layer) for layer in self.left):
                shape = f" {list(layers[0].shape)}" if len({layer.shape for layer in layers}) == 1 else ""
                lines.append(f"  {pattern}{shape}{_times(len(layers))}: {layers[0].reason}")
        return lines

    def __str__(self) -> str:
        sizes = f"{human_bytes(self.bytes_before)} of weights are {human_bytes(self.bytes_after)} now"
        stacks = sum(len(layer.shape) == 3 for layer in self.converted)
        also = f" and {stacks} stacks of experts" if stacks else ""
        lines = [f"converted {len(self.converted) - stacks} linear layers{also}: {sizes}"]
        kinds = [(layer.name, (layer.shape, f"{layer.recipe}: {layer.format}")) for layer in self.converted]
        for pattern, count, (shape, kind) in by_pattern(kinds):
            lines.append(f"  {pattern} {list(shape)}{_times(count)}: {kind}")
        lines += self.high_precision()
        fused = [(layers.name, layers.step) for layers in self.fused]
        unfused = [(layers.name, layers.reason) for layers in self.unfused]
        for title, entries in {"fused": fused, "not fused": unfused}.items():
            lines += [f"{title}: {len(entries)}"] if entries else []
            lines += [f"  {pattern}{_times(count)}: {text}" for pattern, count, text in by_pattern(entries)]
        return "\n".join([*lines, self.loss] if self.loss else lines)


def convert(
    model: nn.Module,
    recipe: Recipes = AUTO,
    *,
    filter: Filter | None = None,
    modules: str = "linear",
    autocast: bool = True,
    preserve_high_precision_init_val: bool = False,
    activation_storage: str = HIGH_PRECISION,
    loss: Loss = AUTO_LOSS,
) -> ConversionReport:
    """Quantize the weights of a model's linear layers in place; parameter names do not change.

    Convert before the model is sharded (`fully_shard`) and before the optimizer is built. On the meta device only the
    layers are replaced, and values are loaded later, for example by `checkpoints.load_high_precision`. An error leaves
    the model unchanged.

    Args:
        model: any module. Its `nn.Linear` layers are replaced by quantshard's, keeping biases, hooks, frozen flags,
            devices and nominal dtypes. Subclasses of `nn.Linear`, and layers with a shared or computed weight, are not
            converted.
        recipe: a recipe or its name ("auto" is "mxfp8" on Blackwell GPUs and "current" elsewhere); or a mapping from
            layer name patterns to recipes, in which the first match wins: `{"*.down_proj": "block", "*": "mxfp8"}`; or
            a function of module and name that returns a recipe. "bf16" leaves a layer unchanged. With a mapping or
            function, layers use their own recipes in every autocast that quantizes; with a single recipe, layers follow
            the autocast.
        filter: which layers to convert: a function of module and name, or patterns (`"*.mlp.*"`, `"q_proj"`) that match
            a whole name or its end after a dot. Default: all layers except the head and routers.
        modules: "linear" converts each layer on its own. "fused" also computes the gated MLPs of transformers' Llama,
            Mistral, Qwen and Gemma families as one step: gate and up share one quantized input, and the activation is
            quantized as it is computed, with one rounding where the model's own code has two. Names do not change. An
            MLP of an unknown class, or with different recipes, is left and listed in the report. An MLP with hooked,
            wrapped or replaced layers (LoRA) calls its layers separately and warns once. Layers named q_proj, k_proj
            and v_proj that read the same tensor quantize it once, except under delayed scaling.
        autocast: make `model.forward` enter the recipe, so that training loops need no `quantshard.autocast`.
        preserve_high_precision_init_val: keep the original values on the CPU for the masters of an optimizer built
            later. Otherwise masters start from the quantized values.
        activation_storage: how fused MLPs store gate and up for backward: "high_precision" or "fp8"; see
            `LayerNormMLP`.
        loss: "auto" computes the loss of transformers models in chunks of tokens (`linear_cross_entropy`), if it is
            transformers' ForCausalLMLoss of the head's outputs; "chunked" raises if it is not; "model" leaves it. A
            dict, such as {"label_smoothing": 0.1, "z_loss": 1e-4}, is "chunked" with these options.

    Returns:
        A printable report of converted and unconverted layers, with reasons and sizes.
    """
    keep = preserve_high_precision_init_val
    settings.check_flags("convert", autocast=autocast, preserve_high_precision_init_val=keep)
    check_modules("convert", modules)
    check_storage("convert", activation_storage)
    check_loss("convert", loss)
    selection.check_model(model, "convert")
    layer_choices = selection.choices(model, recipe, filter)
    if not any(choice.recipe for choice in layer_choices):
        reasons = [choice.reason for choice in layer_choices]
        reasons += [TRANSPOSED] if selection.transposed_linears(model) else []
        summary = "; ".join(dict.fromkeys(reasons)) or "it has no torch.nn.Linear"
        raise ConfigurationError(f"convert: no layer of this model can be converted: {summary}")
    [(common, _)] = Counter(choice.recipe for choice in layer_choices if choice.recipe).most_common(1)
    selection.check_values(layer_choices)
    around = None if by_name(recipe) else common
    places = places_of(model)
    # build all layers before replacing any, so that an error leaves the model unchanged
    built = [
        (choice, choice.recipe, linear.empty_linear(choice.module, choice.name, choice.recipe, around, autocast, keep))
        for choice in layer_choices
        if choice.recipe and isinstance(choice.module, nn.Linear)
    ]
    unconverted = _left(model, layer_choices)
    mlps = fusion.gated_mlps(model, layer_choices) if modules == "fused" else []
    if activation_storage != HIGH_PRECISION and all(reason for _, _, reason in mlps):
        summary = "; ".join(f"{name}: {reason}" for name, _, reason in mlps[:3])
        problem = f"convert(activation_storage={activation_storage!r}) needs gated MLPs of a known class"
        raise ConfigurationError(f"{problem} and modules='fused'" + (f" ({summary})" if summary else ""))
    enter_recipe(model, common, autocast)
    linear.leave_fast_path({id(choice.module) for choice, _, _ in built}, model)
    converted = []
    for choice in layer_choices:
        if choice.recipe and not isinstance(choice.module, nn.Linear):
            sizes = {name: weight.nbytes for name, weight in choice.weights.items()}
            experts.convert_experts(choice.module, choice.name, choice.recipe, around, autocast, keep)
            converted += [_converted(choice, *size, choice.recipe) for size in sizes.items()]
    del layer_choices
    # free each layer once it is replaced, so that both models are never in memory at once
    while built:
        converted.append(_exchange(places, *built.pop(0), keep))
    fused = fusion.fuse(model, mlps, activation_storage) if modules == "fused" else ((), ())
    return ConversionReport(tuple(converted), unconverted, *fused, set_loss(model, loss))


def _left(model: nn.Module, choices: Iterable[LayerChoice]) -> tuple[LeftLayer, ...]:
    """Return what `convert` leaves in high precision."""
    layers = [
        LeftLayer(_weight_name(choice, name), tuple(weight.shape), choice.reason)
        for choice in choices
        if not choice.recipe
        for name, weight in choice.weights.items()
    ]
    for name, item in selection.transposed_linears(model):
        layers.append(LeftLayer(name, tuple(item.get_parameter("weight").shape), TRANSPOSED))
    for name, param in selection.stacked_experts(model):
        reason = f"stacked experts, {human_bytes(param.nbytes)} in high precision"
        layers.append(LeftLayer(name, tuple(param.shape), reason))
    return tuple(layers)


def show_linears(model: nn.Module, names: Iterable[str]) -> None:
    """Replace linear layers of a model on meta by layers in high precision, which report to observers."""
    plain, places = HighPrecision(), places_of(model)
    for name in names:
        old = model.get_submodule(name)
        assert isinstance(old, nn.Linear) and old.weight.is_meta, name
        new = linear.empty_linear(old, name, plain, plain, by_itself=False, keep_values=False)
        linear.fill_linear(new, old, name, keep_values=False)
        for put in places[id(old)]:
            put(new)


def check_modules(function: str, modules: object) -> None:
    if modules not in WHERE:
        raise ConfigurationError(f"{function}(modules={modules!r}): choose one of: {', '.join(WHERE)}")


def revert(model: nn.Module) -> int:
    """Undo `convert`: replace quantized layers by plain `nn.Linear` layers with the dequantized weights.

    An existing optimizer still holds the quantized weights. Build a new one to continue training.

    Returns:
        The number of layers that were replaced.
    """
    selection.check_unsharded(model, "revert")
    layers = [module for module in model.modules() if isinstance(module, ConvertedLinear)]
    stacks = [module for module in model.modules() if isinstance(module, ConvertedExperts)]
    if not layers and not stacks:
        raise ConfigurationError("revert: this model has no layer made by quantshard.convert")
    if isinstance(model, ConvertedLinear):
        raise ConfigurationError("revert cannot replace the model itself; call it on the model around this layer")
    fusion.unfuse(model)
    unset_loss(model)
    places = places_of(model)
    plain_weights: dict[int, Tensor] = {}
    for module in layers:
        plain = linear.plain_linear(module, plain_weights.get(id(module.weight)))
        plain_weights[id(module.weight)] = plain.weight  # keep weights tied that were tied after convert
        for put in places[id(module)]:
            put(plain)
        _mark_replaced(module, plain)
    for stack in stacks:
        experts.revert_experts(stack)
    leave_recipe(model)
    return len(layers) + len(stacks)


def _exchange(places: Places, choice: LayerChoice, recipe: Recipe, new: ConvertedLinear, keep: bool) -> ConvertedLayer:
    old = choice.module
    assert isinstance(old, nn.Linear)
    size = old.weight.nbytes
    linear.fill_linear(new, old, choice.name, keep)
    for put in places[id(old)]:
        put(new)
    _mark_replaced(old, new)
    return _converted(replace(choice, module=new), "weight", size, recipe)


def _converted(choice: LayerChoice, name: str, bytes_before: int, recipe: Recipe) -> ConvertedLayer:
    weight = choice.module.get_parameter(name)
    storage = components.storage_of(weight)
    after: int = sum(sharding.stored_bytes(storage.spec.format, storage.shard).values())
    label, fmt = _weight_name(choice, name), storage.spec.format.name
    return ConvertedLayer(label, tuple(weight.shape), recipe.name, fmt, bytes_before, after)


def _weight_name(choice: LayerChoice, name: str) -> str:
    """Return how reports name a weight: a layer by its module, a stack of experts by its parameter."""
    return choice.name if name == "weight" else f"{choice.name}.{name}"


def _mark_replaced(old: nn.Module, new: nn.Module) -> None:
    """Mark the parameters of a replaced layer that the new one does not have, for optimizers that hold them."""
    remaining = set(new.parameters())
    for param in old.parameters():
        if param not in remaining:
            setattr(param, REPLACED, True)


def _times(count: int) -> str:
    return f" x{count}" if count > 1 else ""


def places_of(model: nn.Module) -> Places:
    places: Places = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if name:
            parent, _, child = name.rpartition(".")
            places.setdefault(id(module), []).append(partial(setattr, model.get_submodule(parent), child))
    for module in list(model.modules()):
        attributes = vars(module)
        for name in attributes.keys() - _MODULE_ATTRIBUTES:
            _add_places(attributes[name], partial(attributes.__setitem__, name), places, depth=4)
    return places


def _add_places(value: Any, put: Callable[[Any], None], places: Places, depth: int) -> None:
    """Record the modules in `value`. `put`: replaces `value` in its container. `depth`: maximum nesting to search."""
    if isinstance(value, nn.Module):
        places.setdefault(id(value), []).append(put)
    elif depth == 0:
        return
    elif isinstance(value, list | dict):
        for key, entry in list(value.items() if isinstance(value, dict) else enumerate(value)):
            _add_places(entry, partial(value.__setitem__, key), places, depth - 1)
    elif isinstance(value, tuple):
        entries = list(value)
        for index, entry in enumerate(value):
            _add_places(entry, partial(_put_into_tuple, entries, index, put), places, depth - 1)


def _put_into_tuple(entries: list[Any], index: int, put: Callable[[Any], None], new: Any) -> None:
    entries[index] = new
    put(tuple(entries))
