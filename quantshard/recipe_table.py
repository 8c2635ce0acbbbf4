"""The base of all recipes: a table (role, GEMM) -> format row and scaling. See `recipe` for the named ones."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from enum import Enum
from functools import cached_property
from typing import Any, Final

from quantshard import formats
from quantshard.errors import ConfigurationError
from quantshard.formats import Scaling


class Gemm(str, Enum):
    """The three matrix products of a linear layer."""

    FPROP = "fprop"
    DGRAD = "dgrad"
    WGRAD = "wgrad"


class TensorRole(str, Enum):
    """The role of a quantized operand."""

    WEIGHT = "weight"
    INPUT = "input"
    GRAD_OUTPUT = "grad_output"


OPERANDS: Final = {
    Gemm.FPROP: (TensorRole.INPUT, TensorRole.WEIGHT),
    Gemm.DGRAD: (TensorRole.GRAD_OUTPUT, TensorRole.WEIGHT),
    Gemm.WGRAD: (TensorRole.GRAD_OUTPUT, TensorRole.INPUT),
}
"""The roles of the left and right operands of each GEMM."""

_HISTORY_MARK = "+hist"


@dataclass(frozen=True, slots=True)
class QuantSpec:
    """One entry of a recipe's table: the format row, and how scales are chosen and values rounded."""

    format: formats.Format
    scaling: Scaling = field(default_factory=Scaling)
    tag: str = field(init=False, repr=False, compare=False)
    """Name of the stored format in a checkpoint (at most `FORMAT_NAME_BYTES` ASCII characters)."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "tag", self.format.name + (_HISTORY_MARK if self.scaling.history else ""))

    def stacked(self, rows: int) -> "QuantSpec":
        """Return the spec of a stack of matrices with `rows` rows each."""
        return QuantSpec(formats.stacked(self.format, rows), self.scaling)

    @property
    def of_matrix(self) -> "QuantSpec":
        """The spec of each matrix of a stack; of other tensors, the spec itself."""
        return QuantSpec(self.format.of_matrix, self.scaling) if self.format.matrix_rows else self

    def __str__(self) -> str:
        settings = ((option.name, getattr(self.scaling, option.name), option.default) for option in fields(Scaling))
        options = [f"{name}={value}" for name, value, default in settings if value != default]
        return self.tag + (f" ({', '.join(options)})" if options else "")


SpecPair = tuple[QuantSpec | None, QuantSpec | None]
"""The table entries for both GEMMs of an input or gradient."""


def format_of_tag(tag: str) -> tuple[formats.Format | None, bool]:
    """Return the format that a `QuantSpec.tag` names, or None, and whether the tag includes an amax history."""
    name = tag.removesuffix(_HISTORY_MARK)
    return formats.FORMATS.get(name), name != tag


Table = Mapping[tuple[TensorRole, Gemm], QuantSpec]


@dataclass(frozen=True)
class Recipe:
    """Base of all recipes. Subclasses are frozen dataclasses that compute `table` from their fields."""

    def __getstate__(self) -> dict[str, Any]:
        """Pickle the fields only. Cached properties are computed again by the release that reads the pickle."""
        kind = type(self)
        return {
            key: value for key, value in vars(self).items() if not isinstance(getattr(kind, key, None), cached_property)
        }

    @property
    def name(self) -> str:
        """The short name of the recipe, accepted by `resolve` and used in messages."""
        raise NotImplementedError

    @cached_property
    def table(self) -> Table:
        """(role, GEMM) -> entry. Operands without an entry stay in high precision."""
        raise NotImplementedError

    @cached_property
    def fast_gemms(self) -> frozenset[Gemm]:
        """GEMMs that may sum in lower precision than float32: those whose `MMParams` (a field, if any) say so."""
        params = {gemm: getattr(self, f"fp8_gemm_{gemm.value}", None) for gemm in Gemm}
        return frozenset(gemm for gemm, mm in params.items() if mm and not mm.use_split_accumulator)

    @cached_property
    def weight(self) -> QuantSpec | None:
        """How weights are stored, or None if they stay in high precision."""
        specs = {self.table.get((TensorRole.WEIGHT, gemm)) for gemm in (Gemm.FPROP, Gemm.DGRAD)}
        if len(specs) != 1:
            raise ConfigurationError(f"recipe {self.name!r} has two formats for weights ({specs}); use one")
        spec = specs.pop()
        if spec is None:
            return None
        if spec.scaling.stochastic_rounding or spec.scaling.random_hadamard:
            raise ConfigurationError(f"recipe {self.name!r}: weights take no stochastic_rounding or random_hadamard")
        blocks = {copy.block for copy in spec.format.copies.values()}
        if spec.scaling.history and blocks != {(formats.ALL, formats.ALL)}:
            raise ConfigurationError(f"recipe {self.name!r}: {spec.format.name} has blocks; a history needs one scale")
        return spec

    @cached_property
    def activations(self) -> Mapping[TensorRole, SpecPair]:
        """How inputs and output gradients are quantized, first for fprop or dgrad, then for wgrad."""
        first, entry = {TensorRole.INPUT: Gemm.FPROP, TensorRole.GRAD_OUTPUT: Gemm.DGRAD}, self.table.get
        return {role: (entry((role, gemm)), entry((role, Gemm.WGRAD))) for role, gemm in first.items()}

    @cached_property
    def histories(self) -> Mapping[TensorRole, int]:
        """Lengths of the amax histories for inputs and output gradients. Roles without a history are left out."""
        lengths = {
            role: max((spec.scaling.history for spec in pair if spec), default=0)
            for role, pair in self.activations.items()
        }
        return {role: length for role, length in lengths.items() if length}

    @cached_property
    def is_delayed(self) -> bool:
        """True if any operand is scaled by past amaxes."""
        return any(spec.scaling.history for spec in self.table.values())

    @cached_property
    def input_draws(self) -> bool:
        """True if quantizing an input draws random bits, so that quantizing again gives different codes."""
        return any(spec and spec.scaling.stochastic_rounding for spec in self.activations[TensorRole.INPUT])


@dataclass(frozen=True)
class TableRecipe(Recipe):
    """A recipe given directly as its table. `fast`: GEMMs that may accumulate in lower precision; see `MMParams`."""

    label: str
    cells: Table = field(hash=False)
    fast: frozenset[Gemm] = frozenset()

    def __post_init__(self) -> None:
        object.__setattr__(self, "cells", dict(self.cells))  # a copy: the caller may change the original
        for role, gemm in self.cells:
            if role not in OPERANDS[gemm]:
                raise ConfigurationError(f"recipe {self.label!r}: {gemm.value} reads no {role.value}")
        check_scalings(self.label, self.cells)

    @property
    def name(self) -> str:
        return self.label

    @cached_property
    def table(self) -> Table:
        return self.cells

    @cached_property
    def fast_gemms(self) -> frozenset[Gemm]:
        return self.fast


def check_scalings(label: str, table: Table) -> None:
    """Check how the operands of a table are scaled."""
    activations = {operand: spec.scaling for operand, spec in table.items() if operand[0] is not TensorRole.WEIGHT}
    transformed = {operand for operand, scaling in activations.items() if scaling.random_hadamard}
    if transformed not in (set(), {(TensorRole.INPUT, Gemm.WGRAD), (TensorRole.GRAD_OUTPUT, Gemm.WGRAD)}):
        raise ConfigurationError(f"recipe {label!r}: set random_hadamard for both operands of wgrad and no others")
    for role in (TensorRole.INPUT, TensorRole.GRAD_OUTPUT):
        histories = {(s.history, s.most_recent) for (other, _), s in activations.items() if other is role}
        if len(histories) > 1:
            described = " and ".join(f"history={length}, most_recent={newest}" for length, newest in sorted(histories))
            raise ConfigurationError(f"recipe {label!r}: role {role.value} needs one amax history, not {described}")
