"""TransformerEngine's `common.recipe`: quantshard's recipes with TransformerEngine's arguments and predicates."""

from typing import Any, Final, TypeVar, cast

from quantshard import recipe
from quantshard.compat.transformer_engine.arguments import supported
from quantshard.recipe import Format, MMParams, Recipe

__all__ = [
    "DelayedScaling",
    "Float8BlockScaling",
    "Float8CurrentScaling",
    "Format",
    "MMParams",
    "MXFP8BlockScaling",
    "NVFP4BlockScaling",
    "Recipe",
]

_Recipe = TypeVar("_Recipe", bound=Recipe)


class RecipeAdapter(type):
    """Metaclass of TransformerEngine's classes: a call returns an instance of quantshard's class, their base."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        return cls.__mro__[1](*args, **supported(cls.__name__, kwargs))

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, cls.__mro__[1])


def _adapted(kind: type[_Recipe]) -> type[_Recipe]:
    adapted: Any = RecipeAdapter(kind.__name__, (kind,), {"__module__": __name__, "__doc__": kind.__doc__})
    return cast("type[_Recipe]", adapted)


DelayedScaling = _adapted(recipe.DelayedScaling)
Float8CurrentScaling = _adapted(recipe.Float8CurrentScaling)
Float8BlockScaling = _adapted(recipe.Float8BlockScaling)
MXFP8BlockScaling = _adapted(recipe.MXFP8BlockScaling)
NVFP4BlockScaling = _adapted(recipe.NVFP4BlockScaling)

_PREDICATES: Final[dict[str, tuple[type[Recipe], ...]]] = {
    "delayed": (recipe.DelayedScaling,),
    "float8_current_scaling": (recipe.Float8CurrentScaling,),
    "float8_per_tensor_scaling": (recipe.DelayedScaling, recipe.Float8CurrentScaling),
    "float8_block_scaling": (recipe.Float8BlockScaling,),
    "mxfp8": (recipe.MXFP8BlockScaling,),
    "nvfp4": (recipe.NVFP4BlockScaling,),
    "custom": (recipe.TableRecipe, recipe.MixedRecipe),
}
"""TransformerEngine's methods that test the class of a recipe. Importing this module adds them to all recipes."""

for _name, _kinds in _PREDICATES.items():
    setattr(Recipe, _name, lambda self, kinds=_kinds: isinstance(self, kinds))
