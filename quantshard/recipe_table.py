"""What all recipes are: a table of cells, (role, GEMM) -> format row and scaling, as the head of `recipe` has it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from enum import Enum
from functools import cached_property
from typing import Final

from quantshard import formats
from quantshard.argument_kinds import suggests_fields
from quantshard.errors import ConfigurationError
from quantshard.formats import Scaling
from quantshard.recipe_arguments import RecipePredicates, check_scalings


class Gemm(str, Enum):
    """The three matrix products of a linear layer."""

    FPROP = "fprop"
    DGRAD = "dgrad"
    WGRAD = "wgrad"


class TensorRole(str, Enum):
    """What a quantized operand is."""

    WEIGHT = "weight"
    INPUT = "input"
    GRAD_OUTPUT = "grad_output"


OPERANDS: Final = {
    Gemm.FPROP: (TensorRole.INPUT, TensorRole.WEIGHT),
    Gemm.DGRAD: (TensorRole.GRAD_OUTPUT, TensorRole.WEIGHT),
    Gemm.WGRAD: (TensorRole.GRAD_OUTPUT, TensorRole.INPUT),
}
"""The roles of the left and the right operand."""


_HISTORY_MARK = "+hist"


@dataclass(frozen=True, slots=True)
class QuantSpec:
    """One entry of a recipe's table: the format row, and how scales are chosen and values rounded."""

    format: formats.Format
    scaling: Scaling = field(default_factory=Scaling)

    def __hash__(self) -> int:
        """That of what tells most cells apart: caches ask for it in each call."""
        return hash((self.format.name, self.scaling.history))

    @property
    def tag(self) -> str:
        """Name of what is stored, as a checkpoint records it (at most `FORMAT_NAME_BYTES` ASCII characters)."""
        return self.format.name + (_HISTORY_MARK if self.scaling.history else "")

    def __str__(self) -> str:
        given = [(f.name, getattr(self.scaling, f.name), getattr(Scaling(), f.name)) for f in fields(Scaling)]
        options = [f"{name}={value}" for name, value, plain in given if value != plain]
        return self.tag + (f" ({', '.join(options)})" if options else "")


class CellPair(tuple[QuantSpec | None, QuantSpec | None]):
    """The cells of an input's or gradient's two GEMMs; hashed by identity: each call asks caches for it."""

    __hash__ = object.__hash__


def format_of_tag(tag: str) -> tuple[formats.Format | None, bool]:
    """The format that a `QuantSpec.tag` names, None if it names none; and whether past amaxes are kept with it."""
    name = tag.removesuffix(_HISTORY_MARK)
    return formats.FORMATS.get(name), name != tag


Table = Mapping[tuple[TensorRole, Gemm], QuantSpec]


@dataclass(frozen=True)
class Recipe(RecipePredicates):
    """Base of all recipes. Subclasses are frozen dataclasses that derive `table` from their fields."""

    @property
    def name(self) -> str:
        """The short name by which the recipe is asked for and printed."""
        raise NotImplementedError

    @cached_property
    def table(self) -> Table:
        """(role, GEMM) -> cell; entries that are missing stay in high precision."""
        raise NotImplementedError

    @cached_property
    def fast_gemms(self) -> frozenset[Gemm]:
        """GEMMs that need not sum in float32; see `MMParams`."""
        return frozenset()

    @cached_property
    def weight(self) -> QuantSpec | None:
        """How weights are stored, or None if they stay in high precision."""
        cells = {self.table.get((TensorRole.WEIGHT, gemm)) for gemm in (Gemm.FPROP, Gemm.DGRAD)}
        if len(cells) != 1:
            raise ConfigurationError(
                f"recipe {self.name!r} names two formats for weights ({cells}), but a weight is stored once; give both "
                "entries one row: with square blocks, or with a rowwise and a columnwise copy"
            )
        cell = cells.pop()
        if cell is not None:
            self._check_weight(cell)
        return cell

    def _check_weight(self, cell: QuantSpec) -> None:
        scaling = cell.scaling
        if scaling.stochastic_rounding or scaling.random_hadamard:
            raise ConfigurationError(
                f"recipe {self.name!r}: weights are rounded to nearest and not transformed; leave stochastic_rounding "
                "and random_hadamard to activations and gradients"
            )
        if scaling.history and any(copy.block != (formats.ALL, formats.ALL) for copy in cell.format.copies.values()):
            raise ConfigurationError(
                f"recipe {self.name!r}: an amax history gives one scale for the whole tensor, but {cell.format.name} "
                "has blocks; use a per-tensor format with it"
            )

    @cached_property
    def activations(self) -> Mapping[TensorRole, CellPair]:
        """How an input and an output gradient are quantized: as it stands, and for wgrad."""
        first, find = {TensorRole.INPUT: Gemm.FPROP, TensorRole.GRAD_OUTPUT: Gemm.DGRAD}, self.table.get
        return {role: CellPair((find((role, gemm)), find((role, Gemm.WGRAD)))) for role, gemm in first.items()}

    @cached_property
    def histories(self) -> Mapping[TensorRole, int]:
        """The lengths of the amax histories that it needs of inputs and output gradients."""
        read = {role: [cell.scaling.history for cell in pair if cell] for role, pair in self.activations.items()}
        return {role: max(lengths) for role, lengths in read.items() if any(lengths)}

    @cached_property
    def is_delayed(self) -> bool:
        """True if it scales anything by past amaxes."""
        return any(cell.scaling.history for cell in self.table.values())

    @cached_property
    def input_draws(self) -> bool:
        """True if quantizing an input draws random words, so that a second time gives other codes."""
        return any(cell and cell.scaling.stochastic_rounding for cell in self.activations[TensorRole.INPUT])


@suggests_fields
@dataclass(frozen=True)
class TableRecipe(Recipe):
    """A recipe written as its table. `fast`: GEMMs that need not sum in float32; see `MMParams`."""

    label: str
    cells: Table = field(hash=False)
    fast: frozenset[Gemm] = frozenset()

    def __post_init__(self) -> None:
        object.__setattr__(self, "cells", dict(self.cells))  # the caller's may change
        for role, gemm in self.cells:
            if role not in OPERANDS[gemm]:
                raise ConfigurationError(
                    f"recipe {self.label!r}: {gemm.value} reads no {role.value}, but "
                    f"{' and '.join(each.value for each in OPERANDS[gemm])}; leave the entry out"
                )
        scalings = {(role.value, gemm.value): cell.scaling for (role, gemm), cell in self.cells.items()}
        check_scalings(self.label, scalings)

    @property
    def name(self) -> str:
        return self.label

    @cached_property
    def table(self) -> Table:
        return self.cells

    @cached_property
    def fast_gemms(self) -> frozenset[Gemm]:
        return self.fast
