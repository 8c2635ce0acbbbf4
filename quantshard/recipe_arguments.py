"""Arguments and methods of TransformerEngine's recipes, so that scripts that use them run unchanged.

Some arguments support only one value here. That value is accepted, other values raise, and no argument is ignored.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import Field, field, fields
from functools import cached_property
from typing import Any, Final

from quantshard.errors import ConfigurationError
from quantshard.formats import Scaling

_REASON: Final = "reason"

_HIGH_PRECISION_ATTENTION: Final = "attention runs in high precision; leave it out"
_BLOCKS: Final = "weights have one scale for 128x128 elements, activations and gradients one for 1x128; leave it out"
_FLOAT32_SUMS: Final = "these GEMMs sum in float32; leave it out"
_LARGEST_OVER_SIX: Final = "a block is scaled by its largest value over 6; leave it out"

_FIXED: Final[dict[str, tuple[Any, str]]] = {
    "fp8_dpa": (False, _HIGH_PRECISION_ATTENTION),
    "fp8_mha": (False, _HIGH_PRECISION_ATTENTION),
    "backward_override": (
        None,
        "the recipe's table says how gradients are computed; write a recipe.MixedRecipe, as "
        'MixedRecipe("mxfp8", dgrad="bf16", wgrad="bf16")',
    ),
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
    "margin": (0, "only delayed scaling has a margin; leave it out"),
    "fp8_format": ("E4M3", "codes of 8 bits are E4M3 in this recipe; leave it out"),
    "fp4_format": ("E2M1", "codes of 4 bits are E2M1; leave it out"),
    "x_block_scaling_dim": (1, _BLOCKS),
    "w_block_scaling_dim": (2, _BLOCKS),
    "grad_block_scaling_dim": (1, _BLOCKS),
    "row_scaled_activation": (False, "an activation has one second scale; leave it out"),
    "nvfp4_4over6": ("none", _LARGEST_OVER_SIX),
    "nvfp4_4over6_e4m3_use_256": ("all", _LARGEST_OVER_SIX),
    "nvfp4_4over6_err_mode": ("MAE", _LARGEST_OVER_SIX),
    "use_split_accumulator": (True, _FLOAT32_SUMS),
}
"""Argument -> (its only supported value, the reason and the alternative)."""


def fixed(name: str, default: Any = None) -> Any:
    """Return a keyword-only recipe field that supports one value: that in `_FIXED`, or `default` in another type."""
    value, reason = _FIXED[name]
    return field(default=value if default is None else default, kw_only=True, repr=False, metadata={_REASON: reason})


def fixed_fields(recipe: Any) -> Iterator[Field[Any]]:
    """Iterate over the fields of a recipe or recipe class that support one value."""
    return (field_ for field_ in fields(recipe) if _REASON in field_.metadata)


def check_fixed(recipe: Any) -> None:
    """Raise if a field that supports one value has another. None means the default.

    Raises:
        ConfigurationError: a field has another value. The message gives the supported value and the reason.
    """
    for field_ in fixed_fields(recipe):
        value = getattr(recipe, field_.name)
        if value is None:
            object.__setattr__(recipe, field_.name, field_.default)  # a frozen dataclass
        elif value != field_.default:
            raise ConfigurationError(
                f"{type(recipe).__name__}({field_.name}={value!r}) is not supported, {field_.default!r} is: "
                f"{field_.metadata[_REASON]}"
            )


class RecipePredicates:
    """TransformerEngine's methods that test the type of a recipe."""

    def __getstate__(self) -> dict[str, Any]:
        """Pickle the fields only, not cached properties, which the release that reads the pickle computes itself."""
        kind = type(self)
        return {
            key: value for key, value in vars(self).items() if not isinstance(getattr(kind, key, None), cached_property)
        }

    def _is(self, *classes: str) -> bool:
        return any(kind.__name__ in classes for kind in type(self).__mro__)

    def delayed(self) -> bool:
        """True for `DelayedScaling`."""
        return self._is("DelayedScaling")

    def float8_current_scaling(self) -> bool:
        """True for `Float8CurrentScaling`."""
        return self._is("Float8CurrentScaling")

    def float8_per_tensor_scaling(self) -> bool:
        """True for an FP8 recipe with one scale per tensor."""
        return self._is("DelayedScaling", "Float8CurrentScaling")

    def float8_block_scaling(self) -> bool:
        """True for `Float8BlockScaling`."""
        return self._is("Float8BlockScaling")

    def mxfp8(self) -> bool:
        """True for `MXFP8BlockScaling`."""
        return self._is("MXFP8BlockScaling")

    def nvfp4(self) -> bool:
        """True for `NVFP4BlockScaling`."""
        return self._is("NVFP4BlockScaling")

    def custom(self) -> bool:
        """True for `TableRecipe` and `MixedRecipe`."""
        return self._is("TableRecipe", "MixedRecipe")


def check_scalings(label: str, scalings: Mapping[tuple[str, str], Scaling]) -> None:
    """Check how the operands of a table are scaled, by role and GEMM.

    Raises:
        ConfigurationError: a Hadamard transform that does not cancel, or two operands of one role with different amax
            histories, although a role has only one history.
    """
    transformed = {
        operand for operand, scaling in scalings.items() if scaling.random_hadamard and operand[0] != "weight"
    }
    if transformed not in (set(), {("input", "wgrad"), ("grad_output", "wgrad")}):
        raise ConfigurationError(
            f"recipe {label!r}: the Hadamard transform cancels only if both operands of wgrad have it; set "
            "random_hadamard for both or for neither, and in no other GEMM"
        )
    for role in ("input", "grad_output"):
        histories = {
            gemm: (s.history, s.most_recent) for (operand_role, gemm), s in scalings.items() if operand_role == role
        }
        if len(set(histories.values())) > 1:
            described = ", ".join(f"{gemm} {_history(*history)}" for gemm, history in histories.items())
            raise ConfigurationError(
                f"recipe {label!r}: operands of the role {role} have one amax history, and are all scaled by it, in "
                f"one way, or none; here are {described}"
            )


def _history(length: int, most_recent: bool) -> str:
    return f"with a history of {length}{' (the most recent)' * most_recent}" if length else "without a history"
