"""What `explain` and `plan` found: a row a parameter, the totals, and how they are printed."""

from __future__ import annotations

import io
import json
import math
import re
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from itertools import compress
from typing import Any, Final, Literal

from rich import box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.table import Table
from rich.text import Text

from quantshard.errors import printable
from quantshard.limits import FALLBACKS
from quantshard.readable import common_start, counted_name, human_bytes, united_groups
from quantshard.tools.observe.parameter_bytes import ParameterBytes, ParameterPart
from quantshard.tools.observe.step_memory import KINDS, StepMemory

WEIGHTS = "weights"
GATHERED = "given to all-gathers, forward and backward"
"""How the lines of the totals begin that compare weights and traffic with BF16."""

MORE = "a wider terminal or COLUMNS=240 has them"
"""Where the columns are to be had for which there is no room."""

EMULATED = "emulated"
"""The path of a GEMM that dequantizes its operands, and the fallback of that name."""

_Column = tuple[Literal["left", "right"], Callable[["Row"], str]]
_LEFT: Final = "left"
_RIGHT: Final = "right"

_REPEATED = re.compile(r"((?:[^.{}]+\.)*)[^.{}]+\.\{\d")
"""The name of a repeated layer, and its container's parent."""

_UNBOUNDED = 10000
_NAME_WIDTH = 30
_SUMMARY_NAME_WIDTH = 44
"""Columns that names get before others are left out."""


@dataclass(frozen=True)
class Row:
    """One parameter. Bytes are those of this rank.

    `elements`: how many are here. `format`: what is stored, as a checkpoint's `X_format` names it, or the dtype.
    `bf16_bytes`: the local elements in BF16. `shared_scale_bytes`: the scales that other ranks keep too;
    `straddling_blocks`: the blocks here that other ranks hold elements of. `forward_gather_bytes`,
    `backward_gather_bytes`: what this rank gives to the all-gathers of one forward and one backward, padding included.
    `reduced_bytes`: its part of a step's amax reduction. `gemm`: "native", "emulated" or "" for a parameter that is no
    operand of a matrix product. `optimizer`: state -> format, and `state_sizes`: state -> bytes, which add up to
    `optimizer_bytes`. `mesh`: mesh axis -> size, with one entry of `placements` each. `local_rows`: first and one past
    the last global row held here. `fallbacks`: names in `limits.FALLBACKS`.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    format: str
    code_bytes: int
    scale_bytes: int
    shared_scale_bytes: int
    straddling_blocks: int
    bf16_bytes: int
    forward_gather_bytes: int
    backward_gather_bytes: int
    bf16_gather_bytes: int
    reduced_bytes: int
    gemm: str
    gemm_reason: str
    optimizer: dict[str, str]
    optimizer_bytes: int
    state_sizes: dict[str, int]
    elements: int
    mesh: dict[str, int]
    placements: tuple[str, ...]
    local_rows: tuple[int, int]
    fallbacks: tuple[str, ...]
    notes: tuple[str, ...]
    warnings: tuple[str, ...]

    @property
    def bytes(self) -> int:
        """Codes and scales."""
        return self.code_bytes + self.scale_bytes


@dataclass(frozen=True)
class Totals:
    """Sums over the rows; the fields that begin with `bf16` are what the same model takes with BF16 weights."""

    parameters: int
    code_bytes: int
    scale_bytes: int
    shared_scale_bytes: int
    straddling_blocks: int
    bf16_bytes: int
    forward_gather_bytes: int
    backward_gather_bytes: int
    bf16_gather_bytes: int
    reduced_bytes: int
    optimizer_bytes: int
    bf16_optimizer_bytes: int

    @property
    def bytes(self) -> int:
        """Codes and scales."""
        return self.code_bytes + self.scale_bytes

    @property
    def gather_bytes(self) -> int:
        """What this rank gives to the all-gathers of one forward and one backward."""
        return self.forward_gather_bytes + self.backward_gather_bytes


@dataclass(frozen=True)
class Report:
    """What `explain` or `plan` found. `str(report)` is the table, as rich prints it too: as wide as the terminal, or
    as the environment's COLUMNS say, or of 80 columns."""

    rows: tuple[Row, ...]
    totals: Totals
    attention: tuple[str, ...] = ()
    """The backends by which attention would run without mask and dropout, each with its modules."""
    more: str = MORE
    """Where the columns are to be had for which there is no room."""
    memory: StepMemory | None = None
    """What a training step takes at most, if `plan` was given one."""
    parameter: ParameterBytes | None = None
    """Bytes a parameter of weight, master and moments, and the preset that they are of; None without an optimizer."""
    is_summary: bool = False
    """Whether rows stand for several parameters, and are printed without details."""

    @classmethod
    def of(cls, rows: list[Row], bf16_optimizer_bytes: int, attention: Iterable[tuple[str, str]] = ()) -> Report:
        """The report of these rows, and of these modules' backends of attention."""
        summed = {name: sum(getattr(row, name) for row in rows) for name in _summed_fields()}
        count = sum(math.prod(row.shape) for row in rows)
        totals = Totals(parameters=count, bf16_optimizer_bytes=bf16_optimizer_bytes, **summed)
        return cls(tuple(rows), totals, tuple(_merged(attention)), parameter=ParameterBytes.of(map(_part, rows)))

    def summary(self, more: str = MORE) -> Report:
        """Return this report with one row for similar parameters that are stored and computed with alike, which has the
        sums of their bytes: `layers.{0-31}.{q,k}_proj.weight x64`. `more`: where the left-out columns are shown."""
        groups = united_groups((row.name, _kind(row), row) for row in self.rows)
        rows = tuple(_united(pattern, rows) for pattern, rows in groups)
        return replace(self, rows=rows, more=more, is_summary=True)

    @property
    def warnings(self) -> tuple[str, ...]:
        """Advice on what to change, each piece with the parameters that it is about."""
        return tuple(_merged((row.name, text) for row in self.rows for text in row.warnings))

    @property
    def fallbacks(self) -> tuple[str, ...]:
        """The fallbacks that are taken: each says why, what to do, and by which parameters."""
        return tuple(_merged((row.name, f"{name}: {FALLBACKS[name]}") for row in self.rows for name in row.fallbacks))

    def to_dict(self) -> dict[str, Any]:
        """The rows and totals, as JSON can write them."""
        rows = [asdict(row) | {"bytes": row.bytes} for row in self.rows]
        totals = asdict(self.totals) | {"bytes": self.totals.bytes, "gather_bytes": self.totals.gather_bytes}
        told = {name: list(getattr(self, name)) for name in ("attention", "fallbacks", "warnings")}
        memory = {} if self.memory is None else {"memory": self.memory.to_dict()}
        parameter = self.parameter
        of_one = {} if parameter is None else {"parameter": asdict(parameter) | {"together": parameter.together}}
        return {"rows": rows, "totals": totals, **of_one, **memory, **told}

    def to_json(self) -> str:
        """The rows and totals as JSON."""
        return json.dumps(self.to_dict(), indent=2)

    def __str__(self) -> str:
        out = io.StringIO()
        width = min(shutil.get_terminal_size().columns, _UNBOUNDED)
        Console(file=out, width=width, color_system=None).print(self)
        return "\n".join(line.rstrip() for line in out.getvalue().splitlines())

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield _render(self)


def _part(row: Row) -> ParameterPart:
    is_quantized = row.format != row.dtype
    return ParameterPart(row.elements, row.bytes, row.state_sizes, row.optimizer, is_quantized)


def _summed_fields() -> list[str]:
    """The fields of a row that add up."""
    return [f.name for f in fields(Totals) if f.name in Row.__annotations__]


def _kind(row: Row) -> tuple[object, ...]:
    """What the parameters of one row of a summary have in common."""
    states = tuple(row.optimizer.items())
    mesh = tuple(row.mesh.items())
    paths = (row.gemm, row.gemm_reason, row.fallbacks, row.warnings)
    return len(row.shape), row.dtype, row.format, states, mesh, row.placements, *paths


def _united(pattern: str, rows: Sequence[Row]) -> Row:
    """A row that stands for several."""
    sums: dict[str, Any] = {name: sum(getattr(row, name) for row in rows) for name in (*_summed_fields(), "elements")}
    sums["state_sizes"] = {state: sum(row.state_sizes[state] for row in rows) for state in rows[0].state_sizes}
    return replace(rows[0], name=counted_name(pattern, len(rows)), **sums)


# Printing


@dataclass(frozen=True)
class FittedTable:
    """A table for rich, of texts that may come from anybody. Where it is too wide, the names in its first column are
    folded, then columns are left out, and a line says which.

    `columns`: heading -> side that it is aligned to. `spared`: which columns are left out, in this order. `more`: where
    they are to be had. `name_width`: the width below which columns are left out rather than names folded.
    """

    columns: Mapping[str, Literal["left", "right"]]
    rows: Sequence[Sequence[str]]
    spared: Sequence[str]
    more: str = MORE
    name_width: int = _NAME_WIDTH

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        left_out = 0
        while left_out < len(self.spared) and self._width(left_out, console, options) > options.max_width:
            left_out += 1
        room = options.max_width - self._width(left_out, console, options)
        yield self._table(left_out, self.name_width + max(0, room))
        if left_out:
            names = ", ".join(self.spared[:left_out])
            yield Text(f"no room for the columns {names}: {self.more}")

    def _width(self, left_out: int, console: Console, options: ConsoleOptions) -> int:
        """The width of the table, with its names folded as far as may be."""
        longest = max((cell_len(printable(cells[0])) for cells in self.rows), default=0)
        whole = self._table(left_out).__rich_measure__(console, options.update(width=_UNBOUNDED)).maximum
        return whole - max(0, longest - self.name_width)

    def _table(self, left_out: int, name_width: int = _UNBOUNDED) -> Table:
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
        shown = [heading not in self.spared[:left_out] for heading in self.columns]
        for heading in compress(self.columns, shown):
            table.add_column(heading, justify=self.columns[heading], overflow="fold")
        for cells in self.rows:
            name, *others = (printable(cell) for cell in compress(cells, shown))
            table.add_row(Text(folded(name, name_width)), *map(Text, others))
        return table


def folded(name: str, width: int) -> str:
    """A name in lines of at most so many columns, broken behind dots; a longer part keeps its line."""
    lines = [""]
    for part in re.split(r"(?<=\.)", name):
        if lines[-1] and cell_len(lines[-1] + part) > width:
            lines.append("")
        lines[-1] += part
    return "\n".join(lines)


def _render(report: Report) -> Group:
    heading = "parameter"
    if report.is_summary:
        prefix, names = _without_prefix([row.name for row in report.rows])
        heading += f" (without {prefix})" if prefix else ""
        report = replace(
            report, rows=tuple(replace(row, name=name) for row, name in zip(report.rows, names, strict=True))
        )
    parts: list[Any] = [_totals_table(report.totals)]
    parts += [Text()] if report.parameter is None else [Text(str(report.parameter)), Text()]
    if report.memory is not None:
        parts += [_memory_table(report.memory), Text(printable(_peak_text(report.memory)), style="bold"), Text()]
    parts.append(_parameter_table(report, heading))
    parts += [Text(printable(text)) for text in (*_details(report), *report.attention)]
    reasons = dict.fromkeys(row.gemm_reason for row in report.rows if row.gemm == EMULATED)
    parts += [Text(printable(f"{EMULATED}: {reason}; right numbers, slower than BF16")) for reason in reasons]
    others = (text for text in report.fallbacks if f": {EMULATED}: " not in text)
    parts += [Text(f"fallback: {printable(text)}") for text in others]
    parts += [Text(f"warning: {printable(text)}", style="bold") for text in report.warnings]
    return Group(*parts)


def _details(report: Report) -> list[str]:
    """Why GEMMs are native, and notes; a summary has neither."""
    if report.is_summary:
        return []
    native = (
        (row.name, f"GEMM {row.gemm}: {row.gemm_reason}") for row in report.rows if row.gemm not in ("", EMULATED)
    )
    return _merged([*native, *((row.name, text) for row in report.rows for text in row.notes)])


def _without_prefix(names: Sequence[str]) -> tuple[str, list[str]]:
    """The parent of all repeated layers, as `model.`, and the names without it and without `.weight`."""
    parents = [found[1].split(".")[:-1] for name in names if (found := _REPEATED.match(name))]
    prefix = "".join(f"{part}." for part in common_start(parents))
    short = [re.sub(r"\.weight(?= x\d+$|$)", "", name.removeprefix(prefix)) for name in names]
    return (prefix, short) if len(set(short)) == len(short) else ("", list(names))


def _parameter_table(report: Report, heading: str) -> FittedTable:
    texts = _SUMMARY if report.is_summary else _COLUMNS
    columns = {heading: _LEFT, **{name: side for name, (side, _) in texts.items()}}
    rows = [[row.name, *(text(row) for _, text in texts.values())] for row in report.rows]
    spared = [name for name in _SPARED if name in texts]
    return FittedTable(columns, rows, spared, report.more, _SUMMARY_NAME_WIDTH if report.is_summary else _NAME_WIDTH)


def _optimizer_text(formats: Mapping[str, str]) -> str:
    by_format: dict[str, list[str]] = {}
    for state, fmt in formats.items():
        by_format.setdefault(fmt, []).append(state.removesuffix("_param"))
    return "; ".join(f"{', '.join(states)} {fmt}" for fmt, states in by_format.items()) or "-"


def _mesh_text(row: Row) -> str:
    axes = zip(row.mesh.items(), row.placements, strict=True)
    return ", ".join(f"{axis}={size} {placement}" for (axis, size), placement in axes) or "-"


def _sharding_text(row: Row) -> str:
    return f"{_mesh_text(row)}: rows {row.local_rows[0]}-{row.local_rows[1]}" if row.mesh else "-"


def _code_text(row: Row) -> str:
    return human_bytes(row.code_bytes) + (f" + {human_bytes(row.scale_bytes)}" if row.scale_bytes else "")


def _shape_text(row: Row) -> str:
    return " x ".join(map(str, row.shape)) or "scalar"


def _totals_table(totals: Totals) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for heading in ("this rank", "here", "in BF16", "ratio"):
        table.add_column(heading, justify="left" if heading == "this rank" else "right")
    lines = [
        (f"{WEIGHTS} of {totals.parameters:,} parameters", totals.bytes, totals.bf16_bytes),
        (GATHERED, totals.gather_bytes, totals.bf16_gather_bytes),
        ("amaxes reduced in a step", totals.reduced_bytes, 0),
        ("optimizer states", totals.optimizer_bytes, totals.bf16_optimizer_bytes),
    ]
    for what, here, bf16 in (line for line in lines if any(line[1:])):
        table.add_row(what, human_bytes(here), human_bytes(bf16), f"{here / bf16:.2f}" if bf16 else "-")
    return table


def _memory_table(memory: StepMemory) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    table.add_column("most memory of a step", justify="left")
    for phase in memory.phases:
        table.add_column(phase.phase, justify="right")
    for kind in KINDS:
        if any(phase.bytes[kind] for phase in memory.phases):
            table.add_row(kind, *(human_bytes(phase.bytes[kind]) for phase in memory.phases))
    table.add_row("together", *(human_bytes(phase.total) for phase in memory.phases))
    return table


def _peak_text(memory: StepMemory) -> str:
    fits = f"; {memory.fits}" if memory.fits else ""
    return f"peak {human_bytes(memory.peak)} of a step of {memory.step}, in {memory.highest.phase}{fits}"


def _merged(told: Iterable[tuple[str, str]]) -> list[str]:
    """Each text once, with the parameters that it is about."""
    names: dict[str, list[str]] = {}
    for name, text in told:
        names.setdefault(text, []).append(name)
    return [
        f"{about[0]}{f' and {len(about) - 1} more' if len(about) > 1 else ''}: {text}" for text, about in names.items()
    ]


_COMMON: dict[str, _Column] = {
    "in BF16": (_RIGHT, lambda row: human_bytes(row.bf16_bytes)),
    "gathered forward": (_RIGHT, lambda row: human_bytes(row.forward_gather_bytes)),
    "backward": (_RIGHT, lambda row: human_bytes(row.backward_gather_bytes)),
    "GEMM": (_LEFT, lambda row: row.gemm or "-"),
    "optimizer": (_LEFT, lambda row: _optimizer_text(row.optimizer)),
}
_COLUMNS: dict[str, _Column] = {
    "shape": (_RIGHT, _shape_text),
    "stored as": (_LEFT, lambda row: row.format),
    "codes + scales": (_RIGHT, _code_text),
    **_COMMON,
    "sharding": (_LEFT, _sharding_text),
}
"""Heading -> side and text of a cell, after the name."""
_SUMMARY: dict[str, _Column] = {
    "stored as": (_LEFT, lambda row: row.format),
    "here": (_RIGHT, lambda row: human_bytes(row.bytes)),
    **_COMMON,
    "mesh": (_LEFT, _mesh_text),
}
"""Those of a summary, whose rows have no shape of their own."""
_SPARED = ("optimizer", "backward", "gathered forward", "in BF16", "sharding", "mesh", "shape")
"""Columns that are left out, one after the other, where the table is too wide for the terminal."""
