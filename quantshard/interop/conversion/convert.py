"""`convert` and `revert`: the linear layers of a model become quantized ones, in place, and plain ones again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from torch import Tensor, nn

from quantshard import sharding
from quantshard.argument_kinds import MODULE, check_arguments, suggests_names
from quantshard.errors import ConfigurationError
from quantshard.interop.conversion import checks, fusion, gated_mlp, optimizer_watch
from quantshard.interop.conversion.forward import enter_recipe, leave_recipe
from quantshard.interop.conversion.linear import (
    ConvertedLinear,
    empty_linear,
    fill_linear,
    leave_fast_path,
    plain_linear,
)
from quantshard.interop.conversion.places import Places, places_of
from quantshard.interop.conversion.report import ConversionReport, ConvertedLayer, ExpertParameter, LeftLayer
from quantshard.interop.conversion.selection import Filter, LayerChoice, choices, stacked_experts, transposed_linears
from quantshard.modules.activation_storage import HIGH_PRECISION, check_storage
from quantshard.modules.base import weight_watch
from quantshard.modules.contexts import context
from quantshard.modules.contexts.layer_recipes import Recipes, by_name
from quantshard.recipe import AUTO, HighPrecision, Recipe
from quantshard.tensor import components

TRANSPOSED = "a Conv1D of transformers, whose weight is transposed and which is no torch.nn.Linear"

WHERE = ("linear", "fused")
"""What `modules=` may name."""


@suggests_names
def convert(
    model: nn.Module,
    recipe: Recipes = AUTO,
    *,
    filter: Filter | None = None,
    modules: str = "linear",
    autocast: bool = True,
    preserve_high_precision_init_val: bool = False,
    activation_storage: str = HIGH_PRECISION,
) -> ConversionReport:
    """Quantize the weights of a model's linear layers, in place; names of parameters stay as they are.

    Convert before the model is sharded (`fully_shard`) and before the optimizer is made. On the meta device it is the
    layers alone that change; values are loaded later, by `checkpoints.load_high_precision` for one.

    Args:
        model: any module. Its `nn.Linear` layers are exchanged for quantshard's; their biases, hooks, frozen flags,
            devices and nominal dtypes stay. Subclasses of `nn.Linear`, and layers whose weight is shared with another
            module or computed, are left.
        recipe: a recipe or its name ("auto" is "mxfp8" on Blackwell GPUs and "current" elsewhere); or a mapping from
            patterns of layers' names to recipes, of which the first that matches holds:
            `{"*.down_proj": "block", "*": "mxfp8"}`; or a function of module and name that gives one for each.
            "bf16" leaves a layer as it is. Layers whose recipes go by names run by them in every autocast
            that quantizes; those of one recipe run by the autocast's.
        filter: which layers to convert: a function of module and name, or patterns (`"*.mlp.*"`, `"q_proj"`), which
            match a whole name or its end behind a dot. By default all but the head and routers.
        modules: "linear": each layer by itself. "fused": besides, the gated MLPs of transformers' Llama, Mistral, Qwen
            and Gemma families are computed as one step: gate and up share one quantized input, and the activation is
            quantized as it is computed, rounded once where the model's own code rounds twice. Names stay. An MLP that
            is not of a known class, or not converted whole by one recipe, is left and listed; one whose layers have
            hooks, were wrapped or exchanged (LoRA) calls them, and warns once.
            Layers named q_proj, k_proj, v_proj that read one tensor quantize it once, but under delayed scaling.
        autocast: make `model.forward` enter the recipe, so that no loop needs `quantshard.autocast`.
        preserve_high_precision_init_val: keep the values on the CPU, for the masters of an optimizer that is made
            later, which otherwise begin with the quantized values.
        activation_storage: how fused MLPs keep gate and up for backward: "high_precision", or "fp8"; see
            `LayerNormMLP`.

    Returns:
        What was converted and what was left, with reasons and bytes; print it.

    Raises:
        ConfigurationError: the model is sharded or converted already, or no layer is left to convert; a pattern matches
            nothing; a recipe is not known; values are infinite or NaN; no MLP is fused that could keep codes. The model
            is then as it was.
    """
    context.check_flags("convert", autocast=autocast, preserve_high_precision_init_val=preserve_high_precision_init_val)
    check_modules("convert", modules)
    check_storage("convert", activation_storage)
    checks.check_model(model, "convert")
    chosen = choices(model, recipe, filter)
    if not any(choice.recipe for choice in chosen):
        raise ConfigurationError(_nothing(model, chosen))
    [(common, _)] = Counter(choice.recipe for choice in chosen if choice.recipe).most_common(1)
    checks.check_values(chosen)
    keep = preserve_high_precision_init_val
    around = None if by_name(recipe) else common
    places = places_of(model)
    # all are built before the first is exchanged: what is refused is refused before anything changed
    built = [
        (choice, choice.recipe, empty_linear(choice.module, choice.name, choice.recipe, around, autocast, keep))
        for choice in chosen
        if choice.recipe
    ]
    left = tuple(LeftLayer(c.name, tuple(c.module.weight.shape), c.reason) for c in chosen if not c.recipe)
    left += tuple(
        LeftLayer(name, tuple(each.get_parameter("weight").shape), TRANSPOSED)
        for name, each in transposed_linears(model)
    )
    experts = tuple(
        ExpertParameter(name, tuple(each.shape), each.numel() * each.element_size())
        for name, each in stacked_experts(model)
    )
    mlps = fusion.gated_mlps(model, chosen) if modules == "fused" else []
    if activation_storage != HIGH_PRECISION and all(each.reason for each in mlps):
        raise ConfigurationError(_no_storage(activation_storage, modules, mlps))
    enter_recipe(model, common, autocast)
    leave_fast_path({id(choice.module) for choice, _, _ in built}, model)
    if autocast:
        optimizer_watch.begin(model, {choice.name: choice.module.weight for choice, _, _ in built})
    del chosen
    converted = []
    while built:  # each layer goes when its successor is there: the two models are never there at once
        converted.append(_exchange(places, *built.pop(0), keep))
    for module in model.modules():  # what is left in high precision trains in vain as easily
        if next(module.parameters(recurse=False), None) is not None:
            weight_watch.watch(module)
    if modules == "linear":
        return ConversionReport(tuple(converted), left, experts)
    return ConversionReport(tuple(converted), left, experts, *fusion.fuse(model, mlps, activation_storage))


def show_linears(model: nn.Module, names: Iterable[str]) -> None:
    """Exchange linear layers of a model on the meta device for ours with their weights in high precision, which compute
    the same, show it to who observes (`tensor.observation`), and quantize it in an autocast."""
    plain, places = HighPrecision(), places_of(model)
    for name in names:
        old = model.get_submodule(name)
        assert isinstance(old, nn.Linear) and old.weight.is_meta, name
        new = empty_linear(old, name, plain, plain, by_itself=False, keep_values=False)
        fill_linear(new, old, name, keep_values=False)
        for put in places[id(old)]:
            put(new)


def check_modules(function: str, modules: object) -> None:
    """Raise unless `modules` is one of `WHERE`."""
    if modules not in WHERE:
        raise ConfigurationError(f"{function}(modules={modules!r}): choose one of: {', '.join(WHERE)}")


@suggests_names
def revert(model: nn.Module) -> int:
    """Undo `convert`: plain `nn.Linear` layers of the values that the quantized weights stand for; how many.

    An optimizer that was made before holds the quantized weights, and a step of it warns of that: make another to train
    on.

    Raises:
        ConfigurationError: the model is sharded, or holds no layer that `convert` made.
    """
    check_arguments("revert", MODULE, model=model)
    checks.check_unsharded(model, "revert")
    layers = [module for module in model.modules() if isinstance(module, ConvertedLinear)]
    if not layers:
        raise ConfigurationError("revert: this model holds no layer that quantshard.convert made")
    if isinstance(model, ConvertedLinear):
        raise ConfigurationError(
            "revert: this is itself a layer that quantshard.convert made, which another takes the place of; give the "
            "model that holds it"
        )
    gated_mlp.unfuse(model)
    places = places_of(model)
    named = [(name, module) for name, module in model.named_modules() if isinstance(module, ConvertedLinear)]
    names = {id(module.weight): name for name, module in reversed(named)}
    made: dict[int, Tensor] = {}
    for module in layers:
        plain = plain_linear(module, made.get(id(module.weight)))
        made[id(module.weight)] = plain.weight  # weights that were tied after convert stay so
        for put in places[id(module)]:
            put(plain)
        weight_watch.watch(plain)
    leave_recipe(model)
    optimizer_watch.end(model)
    optimizer_watch.note_reverted((names[id(module.weight)], module.weight) for module in layers)
    return len(layers)


def _exchange(places: Places, choice: LayerChoice, recipe: Recipe, new: ConvertedLinear, keep: bool) -> ConvertedLayer:
    old = choice.module
    shape = (old.out_features, old.in_features)
    fill_linear(new, old, choice.name, keep)
    for put in places[id(old)]:
        put(new)
    fmt = components.storage_of(new.weight).cell.format
    stored: int = sum(sharding.stored_bytes(fmt, sharding.whole(shape)).values())
    before = old.weight.numel() * old.weight.element_size()
    return ConvertedLayer(choice.name, shape, recipe.name, fmt.name, before, stored)


def _no_storage(name: str, modules: str, mlps: list[fusion.GatedMLPChoice]) -> str:
    why = "; ".join(f"{each.name}: {each.reason}" for each in mlps[:3]) or "this model has none of a known class"
    if modules != "fused":
        why = "give modules='fused'"
    return f"convert(activation_storage={name!r}) is for gated MLPs that are computed as one step: {why}"


def _nothing(model: nn.Module, chosen: list[LayerChoice]) -> str:
    if not chosen:
        kinds = Counter(
            type(module).__name__ for module in model.modules() if any(True for _ in module.parameters(False))
        )
        held = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common(6)) or "no parameters"
        return f"convert: this model has no torch.nn.Linear (it has {held}), so there is nothing to convert"
    reasons = Counter(choice.reason for choice in chosen)
    reasons.update(TRANSPOSED for _ in transposed_linears(model))
    said = "; ".join(f"{count}: {reason}" for reason, count in reasons.most_common(4))
    return f"convert: none of the {reasons.total()} linear layers can be converted ({said})"
