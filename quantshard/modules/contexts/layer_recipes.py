"""Recipes per layer: one recipe for all layers, a mapping from name patterns to recipes, or a function."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from quantshard.errors import ConfigurationError
from quantshard.recipe import Recipe, concrete_name, resolve

HIGH_PRECISION = "bf16"
"""Name of the recipe that leaves a layer in high precision."""

RecipeByName = Mapping[str, str | Recipe] | Callable[[nn.Module, str], str | Recipe]
"""Mapping from name patterns to recipes, where the first match applies, or a function of a layer and its name.

A layer that no pattern matches stays in high precision, as with "bf16"."""

Recipes = str | Recipe | RecipeByName


def by_name(recipes: object) -> bool:
    """Return whether recipes depend on layer names."""
    return isinstance(recipes, Mapping) or (callable(recipes) and not isinstance(recipes, type))


def matches(pattern: str, name: str) -> bool:
    """Return whether a pattern (`*`, `?`, `[...]`) matches the whole name, or a suffix of it that follows a dot."""
    return fnmatchcase(name, pattern) or fnmatchcase(name, f"*.{pattern}")


def check_recipes(owner: str, recipes: Recipes) -> None:
    """Check recipes without a model."""
    if isinstance(recipes, Mapping):
        if not recipes:
            raise ConfigurationError(f"{owner}(recipe={{}}): give an entry, as {{'*.down': 'block', '*': 'mxfp8'}}")
        for pattern, recipe in recipes.items():
            _resolved(f"{owner}(recipe=...)", recipe, f"{pattern!r}")
    elif not by_name(recipes):
        resolve(recipes)  # type: ignore[arg-type]


def concrete_recipes(recipes: Recipes) -> Recipes:
    """Replace "auto" by the recipe that it selects on this machine, also inside a mapping."""
    if isinstance(recipes, Mapping):
        return {key: concrete_name(recipe) if isinstance(recipe, str) else recipe for key, recipe in recipes.items()}
    return concrete_name(recipes) if isinstance(recipes, str) else recipes


def recipes_of(owner: str, recipes: Recipes, layers: Sequence[tuple[str, Any]]) -> list[Recipe | None]:
    """Return the recipe of each layer, None where no pattern matches. `layers`: (name, module) pairs."""
    check_recipes(owner, recipes)
    if isinstance(recipes, Mapping):
        names = [name for name, _ in layers]
        check_patterns(f"{owner}(recipe=", recipes, names)
        check_reached(f"{owner}(recipe)", recipes, names)
        pairs = [(pattern, resolve(recipe)) for pattern, recipe in recipes.items()]
        return [next((recipe for pattern, recipe in pairs if matches(pattern, name)), None) for name in names]
    if callable(recipes):
        return [_resolved(f"{owner}(recipe=...)", recipes(layer, name), name) for name, layer in layers]
    return [resolve(recipes)] * len(layers)


def check_patterns(argument: str, patterns: Iterable[str], names: Sequence[str]) -> None:
    """Check that each pattern matches at least one layer name."""
    for pattern in patterns:
        if not any(matches(pattern, name) for name in names):
            first = ", ".join(names[:3])
            raise ConfigurationError(f"{argument}{pattern!r}) matches none of the {len(names)} linear layers ({first})")


def check_reached(argument: str, patterns: Iterable[str], names: Sequence[str]) -> None:
    """Check that each pattern applies to a name that no earlier pattern matches. `*` is exempt, as the default."""
    remaining = list(names)
    for pattern in patterns:
        rest = [name for name in remaining if not matches(pattern, name)]
        if len(rest) == len(remaining) and pattern != "*":
            raise ConfigurationError(f"{argument}: earlier patterns match all layers of {pattern!r}; put it first")
        remaining = rest


def _resolved(argument: str, recipe: object, what: str) -> Recipe:
    """Resolve a recipe from a mapping or function. None, elsewhere the default recipe, is rejected."""
    if not isinstance(recipe, str | Recipe):
        raise ConfigurationError(f"{argument}: {what} has {recipe!r}, no recipe; {HIGH_PRECISION!r} is high precision")
    return resolve(recipe)
