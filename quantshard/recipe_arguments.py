"""What TransformerEngine's recipes take and answer, so that scripts which spell it out run as they are.

Some of their arguments have one value here: that one is accepted, others are refused, and none is ignored.
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
"""Argument -> the value that it has here, and why it has no other, with the way out."""


def fixed(name: str, default: Any = None) -> Any:
    """A field of a recipe, by keyword, that takes one value: that of the table, or `default` in another type."""
    value, reason = _FIXED[name]
    return field(default=value if default is None else default, kw_only=True, repr=False, metadata={_REASON: reason})


def fixed_fields(recipe: Any) -> Iterator[Field[Any]]:
    """The fields of a recipe, or of its class, that take one value."""
    return (each for each in fields(recipe) if _REASON in each.metadata)


def check_fixed(recipe: Any) -> None:
    """Raise for a field that takes one value and was given another; None leaves it out.

    Raises:
        ConfigurationError: with the value that it takes, and why it takes no other.
    """
    for each in fixed_fields(recipe):
        given = getattr(recipe, each.name)
        if given is None:
            object.__setattr__(recipe, each.name, each.default)  # a frozen dataclass
        elif given != each.default:
            raise ConfigurationError(
                f"{type(recipe).__name__}({each.name}={given!r}) is not supported, {each.default!r} is: "
                f"{each.metadata[_REASON]}"
            )


class RecipePredicates:
    """TransformerEngine's methods that tell which recipe one is."""

    def __getstate__(self) -> dict[str, Any]:
        """What it was made with: what follows from that is for the release that reads a pickle to say."""
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
        """True for a recipe of FP8 with one scale a tensor."""
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
    """Check how a table's operands are scaled, by role and GEMM.

    Raises:
        ConfigurationError: a Hadamard transform that does not cancel, or a role of which one GEMM's operand is scaled
            by past amaxes and the other's is not, or otherwise: there is one history for both.
    """
    turned = {at for at, scaling in scalings.items() if scaling.random_hadamard and at[0] != "weight"}
    if turned not in (set(), {("input", "wgrad"), ("grad_output", "wgrad")}):
        raise ConfigurationError(
            f"recipe {label!r}: the Hadamard transform cancels only if both operands of wgrad have it; set "
            "random_hadamard for both or for neither, and in no other GEMM"
        )
    for role in ("input", "grad_output"):
        read = {gemm: (s.history, s.most_recent) for (of, gemm), s in scalings.items() if of == role}
        if len(set(read.values())) > 1:
            said = ", ".join(f"{gemm} {_history(*found)}" for gemm, found in read.items())
            raise ConfigurationError(
                f"recipe {label!r}: operands of the role {role} have one amax history, and are all scaled by it, in "
                f"one way, or none; here are {said}"
            )


def _history(length: int, most_recent: bool) -> str:
    return f"with a history of {length}{' (the most recent)' * most_recent}" if length else "without a history"
