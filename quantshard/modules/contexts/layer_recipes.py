"""Recipes of layers by their names: one for all, a mapping from patterns, or a function; for all who take them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from quantshard.argument_kinds import shown_argument
from quantshard.errors import ConfigurationError
from quantshard.recipe import Recipe, concrete_name, resolve

HIGH_PRECISION = "bf16"
"""The recipe that leaves a layer as it is."""

RecipeByName = Mapping[str, str | Recipe] | Callable[[nn.Module, str], str | Recipe]
"""Patterns of names and recipes, of which the first that matches a layer holds; or a function of a layer and its name.
Where no pattern matches a layer, it stays in high precision, as by "bf16"."""

Recipes = str | Recipe | RecipeByName

_KIND = "linear layers of this model"


def by_name(recipes: object) -> bool:
    """Whether these are recipes that depend on a layer's name."""
    return isinstance(recipes, Mapping) or (callable(recipes) and not isinstance(recipes, type))


def matches(pattern: str, name: str) -> bool:
    """True if a pattern (`*`, `?`, `[...]`) covers the whole name, or the end of it behind a dot."""
    return fnmatchcase(name, pattern) or fnmatchcase(name, f"*.{pattern}")


def check_recipes(owner: str, recipes: Recipes) -> None:
    """Refuse what could never be the recipes of a model, whatever its layers are.

    Raises:
        ConfigurationError: a mapping is empty, or a recipe is not known.
    """
    if isinstance(recipes, Mapping):
        if not recipes:
            raise ConfigurationError(
                f"{owner}(recipe={{}}): a mapping needs an entry, as {{'*.down_proj': 'block', '*': 'mxfp8'}}"
            )
        for pattern, recipe in recipes.items():
            _resolved(f"{owner}(recipe=...)", recipe, f"{pattern!r}")
    elif not by_name(recipes):
        resolve(recipes)  # type: ignore[arg-type]


def concrete_recipes(recipes: Recipes) -> Recipes:
    """Replace "auto" by the recipe that it stands for on this machine, also inside a mapping."""
    if isinstance(recipes, Mapping):
        return {pattern: concrete_name(each) if isinstance(each, str) else each for pattern, each in recipes.items()}
    return concrete_name(recipes) if isinstance(recipes, str) else recipes


def recipes_of(
    owner: str, recipes: Recipes, layers: Sequence[tuple[str, Any]], kind: str = _KIND
) -> list[Recipe | None]:
    """The recipe of each of these layers, given by name; None where no pattern matches.

    Raises:
        ConfigurationError: a pattern matches none of them, or none that others leave it, or a recipe is not known.
    """
    check_recipes(owner, recipes)
    if isinstance(recipes, Mapping):
        names = [name for name, _ in layers]
        check_patterns(f"{owner}(recipe=", recipes, names, kind)
        check_reached(f"{owner}(recipe)", recipes, names)
        known = {pattern: resolve(recipe) for pattern, recipe in recipes.items()}
        return [
            next((recipe for pattern, recipe in known.items() if matches(pattern, name)), None) for name, _ in layers
        ]
    if callable(recipes):
        return [_resolved(f"{owner}(recipe=...)", recipes(layer, name), name) for name, layer in layers]
    return [resolve(recipes)] * len(layers)


def check_patterns(argument: str, patterns: Iterable[str], names: Sequence[str], kind: str = _KIND) -> None:
    """Refuse a pattern that matches none of the layers.

    Raises:
        ConfigurationError: with a name that is near, or how names end.
    """
    for pattern in patterns:
        if not isinstance(pattern, str):
            raise ConfigurationError(f"{argument}{shown_argument(pattern)}) is no pattern of names, which is text")
        if not any(matches(pattern, name) for name in names):
            ends = sorted({name.rsplit(".", 1)[-1] for name in names})
            near = get_close_matches(pattern.rsplit(".", 1)[-1], ends, 1)
            first = f"; the first is {names[0]!r}" if near == [pattern.rsplit(".", 1)[-1]] else ""
            hint = f"did you mean {near[0]!r}?" if near and not first else f"their names end in {', '.join(ends[:12])}"
            within = f"{pattern}.*"
            if any(matches(within, name) for name in names):  # it is a module around some of them
                hint, first = f"did you mean {within!r}?", ""
            raise ConfigurationError(f"{argument}{pattern!r}) matches none of the {len(names)} {kind}; {hint}{first}")


def check_reached(argument: str, patterns: Iterable[str], names: Sequence[str]) -> None:
    """Refuse a pattern that holds for no name since others, which stand before it, match all that it matches; `*` is
    for what is left, which may be nothing.

    Raises:
        ConfigurationError: naming the pattern.
    """
    left = list(names)
    for pattern in patterns:
        rest = [name for name in left if not matches(pattern, name)]
        if len(rest) == len(left) and pattern != "*":
            raise unreached(argument, pattern)
        left = rest


def unreached(argument: str, pattern: str) -> ConfigurationError:
    """What is said of a pattern that holds for no name."""
    return ConfigurationError(
        f"{argument}: {pattern!r} would do nothing, since the first pattern that matches a layer holds, and those "
        "before it match all its layers; let it stand before them, or leave it out"
    )


def _resolved(argument: str, recipe: object, what: str) -> Recipe:
    """A recipe that a mapping or a function gives; None, which elsewhere is the default recipe, is none."""
    if not isinstance(recipe, str | Recipe):
        raise ConfigurationError(
            f"{argument}: {what} has {recipe!r}, which is no recipe nor the name of one; {HIGH_PRECISION!r} leaves a "
            "layer in high precision"
        )
    return resolve(recipe)
