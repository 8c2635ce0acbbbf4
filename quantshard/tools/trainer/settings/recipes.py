"""The recipes of a run's layers: one for all, or by patterns of names, `layers.0=bf16,*.proj=block,*=mxfp8`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from quantshard import recipe
from quantshard.errors import ConfigurationError
from quantshard.modules.contexts.layer_recipes import check_reached, matches, unreached
from quantshard.recipe import HighPrecision, Recipe
from quantshard.tools.trainer.settings.schema import shown_value

_ALL = "*"


def text_of(table: Mapping[str, object], where: str) -> str:
    """A table of a file, pattern -> recipe, as `LayerRecipes.parse` reads it.

    Raises:
        ConfigurationError: it is empty, a recipe is no name, or a pattern has what stands between patterns.
    """
    if not table:
        raise ConfigurationError(f"{where}: recipe is a table without an entry; give one, as '*' = 'mxfp8'")
    for pattern, name in table.items():
        if not isinstance(name, str) or not pattern or "=" in pattern or "," in pattern:
            raise ConfigurationError(
                f"{where}: recipe has {shown_value(pattern)} = {shown_value(name)}; it must be a pattern without ',' "
                "and '=', and the name of a recipe"
            )
    return ",".join(f"{pattern}={name}" for pattern, name in table.items())


@dataclass(frozen=True)
class LayerRecipes:
    """Patterns of layers' names and their recipes' names; the first pattern that matches a layer holds."""

    patterns: Mapping[str, str]

    @classmethod
    def parse(cls, text: str) -> LayerRecipes:
        """Parse a recipe's name, or `PATTERN=RECIPE` for each of several, with commas between them; resolve "auto".

        Raises:
            ConfigurationError: a recipe is unknown, or an entry has another form or stands twice.
        """
        if "=" not in text:
            recipe.resolve(text)
            return cls(MappingProxyType({_ALL: recipe.concrete_name(text)}))
        found: dict[str, str] = {}
        for entry in text.split(","):
            pattern, equals, name = (part.strip() for part in entry.partition("="))
            if not (pattern and equals and name):
                raise ConfigurationError(
                    f"recipe = {shown_value(text)}: {shown_value(entry.strip())} is no PATTERN=RECIPE; write it as in "
                    "layers.0=bf16,*=mxfp8"
                )
            if pattern in found:
                raise ConfigurationError(f"recipe = {shown_value(text)}: {shown_value(pattern)} stands there twice")
            recipe.resolve(name)
            found[pattern] = recipe.concrete_name(name)
        return cls(MappingProxyType(found))

    @property
    def text(self) -> str:
        """What `parse` reads, with the recipes that "auto" stood for."""
        if list(self.patterns) == [_ALL]:
            return self.patterns[_ALL]
        return ",".join(f"{pattern}={name}" for pattern, name in self.patterns.items())

    @property
    def recipes(self) -> dict[str, Recipe]:
        """What `quantshard.convert` takes: pattern -> recipe."""
        return {pattern: recipe.resolve(name) for pattern, name in self.patterns.items()}

    @property
    def single(self) -> Recipe | None:
        """The recipe of all layers, where no pattern tells them apart."""
        return recipe.resolve(self.patterns[_ALL]) if list(self.patterns) == [_ALL] else None

    def tells_parts(self, layers: Sequence[str]) -> bool:
        """Whether a pattern is for parts of layers, as it matches none of these layers' names."""
        return any(not any(matches(pattern, name) for name in layers) for pattern in self.patterns)

    def of_layers(self, names: Sequence[str]) -> list[Recipe]:
        """The recipe of each of these layers, which no pattern tells parts of; high precision where none matches.

        Raises:
            ConfigurationError: a pattern matches none that earlier ones have left.
        """
        check_reached("recipe", self.patterns, names)
        return [self.of_layer(name) for name in names]

    def of_parts(self, names: Sequence[str]) -> LayerRecipes:
        """The same by patterns that match linear layers, of these names: one that matches a layer around some of them
        is for all within.

        Raises:
            ConfigurationError: a pattern matches none of them, or none that earlier ones have left.
        """
        found, left = dict[str, str](), list(names)
        for pattern, recipe_name in self.patterns.items():
            before, spellings = len(left), (pattern, f"{pattern}.*")
            for each in spellings:
                rest = [name for name in left if not matches(each, name)]
                if len(rest) < len(left):
                    found[each], left = recipe_name, rest
            if len(left) < before or pattern == _ALL:
                continue
            if not any(matches(each, name) for each in spellings for name in names):
                raise ConfigurationError(
                    f"recipe: {shown_value(pattern)} matches none of the layers of this model, nor a part of one; "
                    f"its linear layers are {names[0]} to {names[-1]}"
                )
            raise unreached("recipe", pattern)
        return LayerRecipes(MappingProxyType(found))

    def of_layer(self, name: str) -> Recipe:
        """That of one layer; high precision where no pattern matches."""
        found = next((each for pattern, each in self.patterns.items() if matches(pattern, name)), None)
        return HighPrecision() if found is None else recipe.resolve(found)
