"""`quantize_`: quantizes the weights of quantshard's layers in an existing model, by recipes per layer name."""

from collections import defaultdict

from torch import nn
from torch.distributed.tensor import DTensor

from quantshard import private_torch
from quantshard.errors import ConfigurationError
from quantshard.modules.base.module import QuantizedModule
from quantshard.modules.contexts.context import InitPlan
from quantshard.modules.contexts.layer_recipes import Recipes, by_name, recipes_of
from quantshard.recipe import HighPrecision


def quantize_(model: nn.Module, recipe: Recipes, *, preserve_high_precision_init_val: bool = False) -> None:
    """Quantize the weights of a model's quantshard layers in place, keeping their values.

    Call it before `fully_shard` and before the optimizer is built. Layers that were built in a `quantized_model_init`
    keep its recipe. Build large models on the meta device, where nothing is quantized before it has values.

    Args:
        model: a module that was built outside of `quantized_model_init`.
        recipe: a mapping from patterns of layer names to recipes, of which the first match applies, or a function of
            module and name, as for `convert`: `{"layers.0.*": "bf16", "*": "mxfp8"}`. Each layer then runs with its own
            recipe in any autocast that quantizes. With one recipe for all layers, they follow the autocast.
        preserve_high_precision_init_val: see `quantized_model_init`.

    Raises:
        ConfigurationError: there is no layer to quantize; a pattern matches none; or a weight is sharded, shared with
            another module, or has hooks. The model is then unchanged.
    """
    layers = open_layers(model)
    if not layers:
        raise ConfigurationError("quantize_: no quantshard layer to quantize; for nn.Linear use quantshard.convert")
    recipes = recipes_of("quantize_", recipe, layers)
    planned = [
        (name, layer, InitPlan(own or HighPrecision(), bool(own and own.weight), preserve_high_precision_init_val))
        for (name, layer), own in zip(layers, recipes, strict=True)
    ]
    _check_weights(model, [(name, layer) for name, layer, plan in planned if plan.quantize])
    for name, layer, plan in planned:
        layer.take_plan(plan, name, has_own_recipe=by_name(recipe))


def open_layers(model: nn.Module) -> list[tuple[str, QuantizedModule]]:
    """Return (name, layer) of the layers with weights that were built outside of `quantized_model_init`."""
    return [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, QuantizedModule) and module._weights and module._plan.is_open
    ]


def _check_weights(model: nn.Module, layers: list[tuple[str, QuantizedModule]]) -> None:
    """Raise if a weight is sharded, computed or shared, or has hooks, which its replacement would not have."""
    users: dict[int, list[str]] = defaultdict(list)
    for name, module in model.named_modules():
        for parameter in module.parameters(recurse=False):
            users[id(parameter)].append(name)
    for name, layer in layers:
        for leaf in layer._weights:
            param, problem = private_torch.registered_parameter(layer, leaf), ""
            if param is None:
                problem = "is computed from other parameters (parametrized)"
            elif isinstance(param, DTensor) and (layer.tp_mesh is None or param.device_mesh != layer.tp_mesh):
                problem = "is sharded already"
            elif private_torch.has_gradient_hooks(param):
                problem = "has hooks already"
            elif len(users[id(param)]) > 1:
                problem = f"is a parameter of {' and '.join(users[id(param)])}"
            if problem:
                raise ConfigurationError(f"quantize_: {name}.{leaf} {problem}; call quantize_ first, or give it 'bf16'")
