"""Layers built in a `quantized_model_init` with recipes per layer name. The names are only known at its exit.

A module does not know its name while it is being built, so these layers are built in high precision. PyTorch's
registration hooks record all modules that are built or extended inside. At the exit, names follow from the module tree,
whose outermost modules have no name, and the weights are quantized from their current values, as in `convert`.

Alternatives: a `finish(model)` call can be forgotten; patterns of attribute names cannot distinguish `layers.0.proj`
from `layers.1.proj`; a `name=` argument is not available for blocks that other code builds from the layers.
"""

from __future__ import annotations

import gc
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any
from weakref import ReferenceType, WeakValueDictionary, ref

from torch import Tensor, nn
from torch.nn.modules import module as torch_modules

from quantshard.errors import ConfigurationError
from quantshard.modules.contexts.layer_recipes import HIGH_PRECISION, RecipeByName, recipes_of
from quantshard.recipe import HighPrecision, Recipe
from quantshard.tensor import components

_FEW = 4

Found = list[tuple[str, Any, Any]]
"""(name, module, `InitPlan`) of each layer."""


class UnnamedLayers:
    """Collection of the quantshard layers that are built inside one `quantized_model_init`."""

    def __init__(self, owner: str, recipes: RecipeByName) -> None:
        self._owner, self._recipes = owner, recipes
        self._seen: WeakValueDictionary[int, nn.Module] = WeakValueDictionary()
        self._hooks = [
            torch_modules.register_module_parameter_registration_hook(self._note),
            torch_modules.register_module_module_registration_hook(self._note),
        ]

    def __deepcopy__(self, memo: dict[int, Any]) -> UnnamedLayers:
        return self  # a copied layer belongs to the same collection

    def _note(self, module: nn.Module, name: str, value: nn.Module | Tensor | None) -> None:
        for item in (module, value):
            if isinstance(item, nn.Module):
                self._seen[id(item)] = item

    def leave(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()

    def give(self, plan_of: Callable[[Recipe], Any]) -> None:
        """Convert each layer in place to what the plan of its recipe would have built.

        A collective call if tensor parallelism shards a layer. Errors occur on all ranks that have built the same
        layers.

        Raises:
            ConfigurationError: no layer was built, or a live layer has no name; a pattern matches no layer; a weight to
                quantize is shared with another module, sharded, in an optimizer, or has hooks.
        """
        gc.collect()  # garbage in cycles can be alive on some ranks only, which then disagree about the layers
        planned = [(name, layer, plan_of(recipe)) for name, layer, recipe in self._recipes_by_layer()]
        self._check_users(planned)
        for name, layer, plan in planned:
            layer.check_plan(plan, name)
        replaced = [
            (f"{name}.{leaf}", ref(weight))
            for name, layer, plan in planned
            if plan.quantize
            for leaf, weight in layer.named_weights()
        ]
        for name, layer, plan in planned:
            layer.take_plan(plan, name)
        _check_optimizers(self._owner, replaced)

    def _recipes_by_layer(self) -> list[tuple[str, Any, Recipe]]:
        layers = self._layers()
        nameless = [type(layer).__name__ for name, layer in layers if not name]
        if not layers:
            raise ConfigurationError(
                f"{self._owner}(recipe=...): no layer of quantshard was built inside; build quantshard.Linear in the "
                "place of torch.nn.Linear, or call quantshard.convert(model, recipe)"
            )
        if nameless:
            raise ConfigurationError(
                f"{self._owner}(recipe=...): {_shown(nameless)} of {len(layers)} layers belongs to no module when the "
                "context is left, so it has no name for the recipes to go by; make it part of the model inside, or "
                "build it under one recipe"
            )
        recipes = recipes_of(self._owner, self._recipes, layers, "layers that were built inside")
        return [(name, layer, recipe or HighPrecision()) for (name, layer), recipe in zip(layers, recipes, strict=True)]

    def _outermost(self) -> list[nn.Module]:
        modules = list(self._seen.values())
        below = {id(child) for module in modules for child in module.children()}
        return [module for module in modules if id(module) not in below]

    def _layers(self) -> list[tuple[str, Any]]:
        """(name, layer) of each layer with weights that belongs to this collection, without duplicates."""
        named_layers: dict[int, tuple[str, Any]] = {}
        for name, module in self._modules():
            if getattr(module, "unnamed_layers", None) is self:
                named_layers.setdefault(id(module), (name, module))
        return list(named_layers.values())

    def _modules(self) -> Iterator[tuple[str, nn.Module]]:
        for outermost in self._outermost():
            yield from outermost.named_modules()

    def _check_users(self, found: Found) -> None:
        users: dict[int, dict[int, str]] = defaultdict(dict)
        for name, module in self._modules():
            for parameter in module.parameters(recurse=False):
                users[id(parameter)].setdefault(id(module), name)
        for name, layer, plan in found:
            for leaf, weight in layer.named_weights() if plan.quantize else ():
                other_names = [other_name for module, other_name in users[id(weight)].items() if module != id(layer)]
                if other_names:
                    raise ConfigurationError(
                        f"{self._owner}(recipe=...): {name}.{leaf} is also a parameter of {_shown(other_names)}, so it "
                        f"cannot be quantized by {plan.recipe.name!r}; give {name!r} the recipe {HIGH_PRECISION!r}"
                    )


def _check_optimizers(owner: str, replaced: list[tuple[str, ReferenceType[nn.Parameter]]]) -> None:
    """Raise if an optimizer holds replaced weights. Optimizers are searched only if a replaced weight is alive."""
    alive = {id(weight): name for name, reference in replaced if (weight := reference()) is not None}
    for optimizer in components.living_optimizers() if alive else ():
        groups = getattr(optimizer, "param_groups", ())  # missing if its constructor failed
        names = [alive[id(param)] for group in groups for param in group["params"] if id(param) in alive]
        if names:
            raise ConfigurationError(
                f"{owner}(recipe=...): a {type(optimizer).__name__} was made inside, and holds {_shown(names)}, in "
                "whose place quantized weights are now; make it after the context"
            )


def _shown(names: list[str]) -> str:
    return ", ".join(names[:_FEW]) + (", ..." if len(names) > _FEW else "")
