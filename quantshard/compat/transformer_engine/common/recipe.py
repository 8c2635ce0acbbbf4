"""TransformerEngine's `common.recipe`: quantshard's recipes with TransformerEngine's arguments and predicates.

Some arguments support only one value here. That value is accepted and dropped, other values raise.
"""

from __future__ import annotations

from typing import Any, Final, TypeVar, cast

from quantshard import recipe
from quantshard.errors import ConfigurationError
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

_HIGH_PRECISION_ATTENTION: Final = "attention runs in high precision; leave it out"
_BLOCKS: Final = "weights have one scale for 128x128 elements, activations and gradients one for 1x128; leave it out"
_FLOAT32_SUMS: Final = "these GEMMs sum in float32; leave it out"
_LARGEST_OVER_SIX: Final = "a block is scaled by its largest value over 6; leave it out"

_COMMON: Final[dict[str, tuple[Any, str]]] = {
    "fp8_dpa": (False, _HIGH_PRECISION_ATTENTION),
    "fp8_mha": (False, _HIGH_PRECISION_ATTENTION),
    "backward_override": (
        None,
        "the recipe's table says how gradients are computed; write a recipe.MixedRecipe, as "
        'MixedRecipe("mxfp8", dgrad="bf16", wgrad="bf16")',
    ),
}
_E4M3: Final = {"fp8_format": (Format.E4M3, "codes of 8 bits are E4M3 in this recipe; leave it out")}

FIXED: Final[dict[str, dict[str, tuple[Any, str]]]] = {
    "DelayedScaling": _COMMON
    | {
        "reduce_amax": (
            True,
            "amax histories would differ between ranks, and a checkpoint holds one; leave it out (the reduction is one "
            "small collective for all modules)",
        ),
        "interval": (1, "scales are computed in every step; leave it out"),
        "scaling_factor_compute_algo": (None, "a scale is the largest code over the amax, by 2**margin; leave it out"),
        "override_linear_precision": (
            (False, False, False),
            "write a recipe.TableRecipe, in which an entry that is missing stays in high precision",
        ),
    },
    "Float8CurrentScaling": _COMMON,
    "Float8BlockScaling": _COMMON
    | _E4M3
    | {
        "x_block_scaling_dim": (1, _BLOCKS),
        "w_block_scaling_dim": (2, _BLOCKS),
        "grad_block_scaling_dim": (1, _BLOCKS),
        "fp8_gemm_fprop": (MMParams(), _FLOAT32_SUMS),
        "fp8_gemm_dgrad": (MMParams(), _FLOAT32_SUMS),
        "fp8_gemm_wgrad": (MMParams(), _FLOAT32_SUMS),
    },
    "MXFP8BlockScaling": _COMMON | _E4M3 | {"margin": (0, "only delayed scaling has a margin; leave it out")},
    "NVFP4BlockScaling": _COMMON
    | _E4M3
    | {
        "fp4_format": (Format.E2M1, "codes of 4 bits are E2M1; leave it out"),
        "row_scaled_activation": (False, "an activation has one second scale; leave it out"),
        "nvfp4_4over6": ("none", _LARGEST_OVER_SIX),
        "nvfp4_4over6_e4m3_use_256": ("all", _LARGEST_OVER_SIX),
        "nvfp4_4over6_err_mode": ("MAE", _LARGEST_OVER_SIX),
    },
}
"""Recipe -> argument -> (its only supported value, the reason and the alternative)."""


class RecipeAdapter(type):
    """Metaclass of TransformerEngine's classes: a call returns an instance of quantshard's class, their base."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        fixed = FIXED[cls.__name__]
        for name, value in kwargs.items():
            if name in fixed and value is not None and value != fixed[name][0]:
                raise ConfigurationError(
                    f"{cls.__name__}({name}={value!r}) is not supported, {fixed[name][0]!r} is: {fixed[name][1]}"
                )
        return cls.__mro__[1](*args, **{name: value for name, value in kwargs.items() if name not in fixed})

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
