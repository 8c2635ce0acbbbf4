"""The recipes of a run's layers: one for all, or by name pattern, `layers.0=bf16,*.proj=block,*=mxfp8`."""

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
    """Convert a TOML table pattern -> recipe to the text that `LayerRecipes.parse` reads."""
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
    """Name patterns of layers and their recipe names; the first match counts."""

    patterns: Mapping[str, str]

    @classmethod
    def parse(cls, text: str) -> LayerRecipes:
        """Parse a recipe name, or comma-separated `PATTERN=RECIPE` entries; resolve "auto"."""
        if "=" not in text:
            recipe.resolve(text)
            return cls(MappingProxyType({_ALL: recipe.concrete_name(text)}))
        patterns: dict[str, str] = {}
        for entry in text.split(","):
            pattern, equals, name = (part.strip() for part in entry.partition("="))
            if not (pattern and equals and name):
                raise ConfigurationError(
                    f"recipe = {shown_value(text)}: {shown_value(entry.strip())} is no PATTERN=RECIPE; write it as in "
                    "layers.0=bf16,*=mxfp8"
                )
            if pattern in patterns:
                raise ConfigurationError(f"recipe = {shown_value(text)}: {shown_value(pattern)} stands there twice")
            recipe.resolve(name)
            patterns[pattern] = recipe.concrete_name(name)
        return cls(MappingProxyType(patterns))

    @property
    def text(self) -> str:
        """The text that `parse` reads, with "auto" resolved."""
        if list(self.patterns) == [_ALL]:
            return self.patterns[_ALL]
        return ",".join(f"{pattern}={name}" for pattern, name in self.patterns.items())

    @property
    def recipes(self) -> dict[str, Recipe]:
        """The mapping pattern -> recipe that `quantshard.convert` takes."""
        return {pattern: recipe.resolve(name) for pattern, name in self.patterns.items()}

    @property
    def single(self) -> Recipe | None:
        """The recipe of all layers; None if there are patterns."""
        return recipe.resolve(self.patterns[_ALL]) if list(self.patterns) == [_ALL] else None

    def tells_parts(self, layers: Sequence[str]) -> bool:
        """Return True if a pattern addresses parts of layers, that is, matches none of these layer names."""
        return any(not any(matches(pattern, name) for name in layers) for pattern in self.patterns)

    def of_layers(self, names: Sequence[str]) -> list[Recipe]:
        """Return the recipe of each of these layers, if no pattern addresses parts; high precision without a match."""
        check_reached("recipe", self.patterns, names)
        return [self.of_layer(name) for name in names]

    def of_parts(self, names: Sequence[str]) -> LayerRecipes:
        """Return equivalent patterns for linear layers of these names. A pattern that matches a layer also applies to
        all linear layers inside it.
        """
        patterns, unmatched = dict[str, str](), list(names)
        for pattern, recipe_name in self.patterns.items():
            old_count, spellings = len(unmatched), (pattern, f"{pattern}.*")
            for spelling in spellings:
                rest = [name for name in unmatched if not matches(spelling, name)]
                if len(rest) < len(unmatched):
                    patterns[spelling], unmatched = recipe_name, rest
            if len(unmatched) < old_count or pattern == _ALL:
                continue
            if not any(matches(spelling, name) for spelling in spellings for name in names):
                raise ConfigurationError(
                    f"recipe: {shown_value(pattern)} matches none of the layers of this model, nor a part of one; "
                    f"its linear layers are {names[0]} to {names[-1]}"
                )
            raise unreached("recipe", pattern)
        return LayerRecipes(MappingProxyType(patterns))

    def of_layer(self, name: str) -> Recipe:
        """Return the recipe of one layer; high precision without a match."""
        recipe_name = next((value for pattern, value in self.patterns.items() if matches(pattern, name)), None)
        return HighPrecision() if recipe_name is None else recipe.resolve(recipe_name)
