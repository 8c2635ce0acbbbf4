"""Layers built in a `quantized_model_init` whose recipes go by names: what they are called is known when it is left.

A module does not know its name while it is built. So these layers are built in high precision, and when the context is
left, names are those of the tree of modules that was put together inside: PyTorch's hooks on registering a submodule or
a parameter have shown who took part, and the outermost of them have no name. The weights are then quantized from the
values that they have, as `convert` does. The other ways were weighed: a call `finish(model)` of the user's is one more
line that can be forgotten, and a context that is left without it would have to raise; patterns for an attribute's name
alone cannot tell `layers.0.proj` from `layers.1.proj`; and `name=` is an argument of our layers, but not of the blocks
that other code makes of them.
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
"""Layers: the name, the module and its `InitPlan` of each."""


class UnnamedLayers:
    """The layers of quantshard that are built while one `quantized_model_init` is entered."""

    def __init__(self, owner: str, recipes: RecipeByName) -> None:
        self._owner, self._recipes = owner, recipes
        self._seen: WeakValueDictionary[int, nn.Module] = WeakValueDictionary()
        self._hooks = [
            torch_modules.register_module_parameter_registration_hook(self._note),
            torch_modules.register_module_module_registration_hook(self._note),
        ]

    def __deepcopy__(self, memo: dict[int, Any]) -> UnnamedLayers:
        return self  # a copy of a layer, made inside, is one more layer of these

    def _note(self, module: nn.Module, name: str, value: nn.Module | Tensor | None) -> None:
        for each in (module, value):
            if isinstance(each, nn.Module):
                self._seen[id(each)] = each

    def leave(self) -> None:
        """See no more of what is built."""
        for hook in self._hooks:
            hook.remove()

    def give(self, plan_of: Callable[[Recipe], Any]) -> None:
        """Let each layer be as if it had been built by the plan of its recipe.

        A collective call if tensor parallelism cuts any.

        Raises:
            ConfigurationError: no layer was built, or one that is alive has no name; a pattern matches none; a weight
                that would be quantized is another module's too, sharded, or in an optimizer, or has hooks. On all ranks
                that have built alike.
        """
        gc.collect()  # what was thrown away in a cycle lives on some ranks and not on others, which would not take part
        found = [(name, layer, plan_of(recipe)) for name, layer, recipe in self._recipes_by_layer()]
        self._check_users(found)
        for name, layer, plan in found:
            layer.check_plan(plan, name)
        replaced = [
            (f"{name}.{leaf}", ref(weight))
            for name, layer, plan in found
            if plan.quantize
            for leaf, weight in layer.named_weights()
        ]
        for name, layer, plan in found:
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
        given = recipes_of(self._owner, self._recipes, layers, "layers that were built inside")
        return [(name, layer, recipe or HighPrecision()) for (name, layer), recipe in zip(layers, given, strict=True)]

    def _outermost(self) -> list[nn.Module]:
        seen = list(self._seen.values())
        below = {id(child) for module in seen for child in module.children()}
        return [module for module in seen if id(module) not in below]

    def _layers(self) -> list[tuple[str, Any]]:
        """The layers with weights whose recipes these are to tell, each once."""
        found: dict[int, tuple[str, Any]] = {}
        for name, module in self._modules():
            if getattr(module, "unnamed_layers", None) is self:
                found.setdefault(id(module), (name, module))
        return list(found.values())

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
                others = [other for module, other in users[id(weight)].items() if module != id(layer)]
                if others:
                    raise ConfigurationError(
                        f"{self._owner}(recipe=...): {name}.{leaf} is also a parameter of {_shown(others)}, so it "
                        f"cannot be quantized by {plan.recipe.name!r}; give {name!r} the recipe {HIGH_PRECISION!r}"
                    )


def _check_optimizers(owner: str, replaced: list[tuple[str, ReferenceType[nn.Parameter]]]) -> None:
    """Raise if an optimizer holds weights that others have replaced. It is looked for if anything holds one."""
    alive = {id(weight): name for name, each in replaced if (weight := each()) is not None}
    for optimizer in components.living_optimizers() if alive else ():
        groups = getattr(optimizer, "param_groups", ())  # or its constructor failed
        names = [alive[id(param)] for group in groups for param in group["params"] if id(param) in alive]
        if names:
            raise ConfigurationError(
                f"{owner}(recipe=...): a {type(optimizer).__name__} was made inside, and holds {_shown(names)}, in "
                "whose place quantized weights are now; make it after the context"
            )


def _shown(names: list[str]) -> str:
    return ", ".join(names[:_FEW]) + (", ..." if len(names) > _FEW else "")
