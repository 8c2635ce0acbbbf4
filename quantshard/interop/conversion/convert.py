"""`convert` and `revert`: replace a model's linear layers by quantized ones in place, and back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from torch import Tensor, nn

from quantshard import sharding
from quantshard.errors import ConfigurationError
from quantshard.interop.conversion import checks, fusion, gated_mlp
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
from quantshard.modules.contexts import context
from quantshard.modules.contexts.layer_recipes import Recipes, by_name
from quantshard.recipe import AUTO, HighPrecision, Recipe
from quantshard.tensor import components

TRANSPOSED = "a Conv1D of transformers, whose weight is transposed and which is no torch.nn.Linear"

WHERE = ("linear", "fused")
"""Values of `modules=`."""


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
    """Quantize the weights of a model's linear layers in place; parameter names do not change.

    Convert before the model is sharded (`fully_shard`) and before the optimizer is built. On the meta device only the
    layers are replaced, and values are loaded later, for example by `checkpoints.load_high_precision`.

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

    Returns:
        A printable report of converted and unconverted layers, with reasons and sizes.

    Raises:
        ConfigurationError: the model is sharded or already converted; no layer can be converted; a pattern matches
            nothing; a recipe is unknown; values are infinite or NaN; or no fused MLP could use `activation_storage`.
            The model is then unchanged.
    """
    context.check_flags("convert", autocast=autocast, preserve_high_precision_init_val=preserve_high_precision_init_val)
    check_modules("convert", modules)
    check_storage("convert", activation_storage)
    checks.check_model(model, "convert")
    layer_choices = choices(model, recipe, filter)
    if not any(choice.recipe for choice in layer_choices):
        raise ConfigurationError(_nothing(model, layer_choices))
    [(common, _)] = Counter(choice.recipe for choice in layer_choices if choice.recipe).most_common(1)
    checks.check_values(layer_choices)
    keep = preserve_high_precision_init_val
    around = None if by_name(recipe) else common
    places = places_of(model)
    # build all layers before replacing any, so that an error leaves the model unchanged
    built = [
        (choice, choice.recipe, empty_linear(choice.module, choice.name, choice.recipe, around, autocast, keep))
        for choice in layer_choices
        if choice.recipe
    ]
    unconverted = tuple(
        LeftLayer(c.name, tuple(c.module.weight.shape), c.reason) for c in layer_choices if not c.recipe
    )
    unconverted += tuple(
        LeftLayer(name, tuple(item.get_parameter("weight").shape), TRANSPOSED)
        for name, item in transposed_linears(model)
    )
    experts = tuple(
        ExpertParameter(name, tuple(item.shape), item.numel() * item.element_size())
        for name, item in stacked_experts(model)
    )
    mlps = fusion.gated_mlps(model, layer_choices) if modules == "fused" else []
    if activation_storage != HIGH_PRECISION and all(item.reason for item in mlps):
        raise ConfigurationError(_no_storage(activation_storage, modules, mlps))
    enter_recipe(model, common, autocast)
    leave_fast_path({id(choice.module) for choice, _, _ in built}, model)
    del layer_choices
    converted = []
    # free each layer once it is replaced, so that both models are never in memory at once
    while built:
        converted.append(_exchange(places, *built.pop(0), keep))
    if modules == "linear":
        return ConversionReport(tuple(converted), unconverted, experts)
    return ConversionReport(tuple(converted), unconverted, experts, *fusion.fuse(model, mlps, activation_storage))


def show_linears(model: nn.Module, names: Iterable[str]) -> None:
    """Replace linear layers of a model on the meta device by quantshard layers with high-precision weights.

    The new layers compute the same results, report to observers (`tensor.observation`) and quantize in an autocast.
    """
    plain, places = HighPrecision(), places_of(model)
    for name in names:
        old = model.get_submodule(name)
        assert isinstance(old, nn.Linear) and old.weight.is_meta, name
        new = empty_linear(old, name, plain, plain, by_itself=False, keep_values=False)
        fill_linear(new, old, name, keep_values=False)
        for put in places[id(old)]:
            put(new)


def check_modules(function: str, modules: object) -> None:
    """Check that `modules` is one of `WHERE`.

    Raises:
        ConfigurationError: it is not.
    """
    if modules not in WHERE:
        raise ConfigurationError(f"{function}(modules={modules!r}): choose one of: {', '.join(WHERE)}")


def revert(model: nn.Module) -> int:
    """Undo `convert`: replace quantized layers by plain `nn.Linear` layers with the dequantized weights.

    An existing optimizer still holds the quantized weights. Build a new one to continue training.

    Returns:
        The number of layers that were replaced.

    Raises:
        ConfigurationError: the model is sharded, or contains no layer made by `convert`.
    """
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
    plain_weights: dict[int, Tensor] = {}
    for module in layers:
        plain = plain_linear(module, plain_weights.get(id(module.weight)))
        plain_weights[id(module.weight)] = plain.weight  # keep weights tied that were tied after convert
        for put in places[id(module)]:
            put(plain)
    leave_recipe(model)
    return len(layers)


def _exchange(places: Places, choice: LayerChoice, recipe: Recipe, new: ConvertedLinear, keep: bool) -> ConvertedLayer:
    old = choice.module
    shape = (old.out_features, old.in_features)
    fill_linear(new, old, choice.name, keep)
    for put in places[id(old)]:
        put(new)
    fmt = components.storage_of(new.weight).cell.format
    after: int = sum(sharding.stored_bytes(fmt, sharding.whole(shape)).values())
    before = old.weight.numel() * old.weight.element_size()
    return ConvertedLayer(choice.name, shape, recipe.name, fmt.name, before, after)


def _no_storage(name: str, modules: str, mlps: list[fusion.GatedMLPChoice]) -> str:
    why = "; ".join(f"{mlp.name}: {mlp.reason}" for mlp in mlps[:3]) or "this model has none of a known class"
    if modules != "fused":
        why = "give modules='fused'"
    return f"convert(activation_storage={name!r}) is for gated MLPs that are computed as one step: {why}"


def _nothing(model: nn.Module, chosen: list[LayerChoice]) -> str:
    if not chosen:
        kinds = Counter(
            type(module).__name__ for module in model.modules() if any(True for _ in module.parameters(False))
        )
        summary = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common(6)) or "no parameters"
        return f"convert: this model has no torch.nn.Linear (it has {summary}), so there is nothing to convert"
    reasons = Counter(choice.reason for choice in chosen)
    reasons.update(TRANSPOSED for _ in transposed_linears(model))
    reason_counts = "; ".join(f"{count}: {reason}" for reason, count in reasons.most_common(4))
    return f"convert: none of the {reasons.total()} linear layers can be converted ({reason_counts})"
