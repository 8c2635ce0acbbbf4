"""Results of `explain` and `plan`: one row per parameter, totals, and tables to print."""

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
from quantshard.tools.observe.costs import KINDS, ParameterBytes, Row, StepMemory, Totals

MORE = "a wider terminal or COLUMNS=240 has them"
"""Hint on how to see the columns that did not fit."""

EMULATED = "emulated"
"""Path of a GEMM that dequantizes its operands, and the name of that fallback."""

_Column = tuple[Literal["left", "right"], Callable[[Row], str]]
_LEFT: Final = "left"
_RIGHT: Final = "right"

_REPEATED = re.compile(r"((?:[^.{}]+\.)*)[^.{}]+\.\{\d")
"""Matches the name of a repeated layer; the group is the parent of the layer's container."""

_UNBOUNDED = 10000
_NAME_WIDTH = 30
_SUMMARY_NAME_WIDTH = 44
"""Width that names get before columns are left out."""


@dataclass(frozen=True)
class Report:
    """The result of `explain` or `plan`.

    `str(report)` and rich print a table as wide as the terminal, as the environment variable COLUMNS, or 80 columns.
    """

    rows: tuple[Row, ...]
    totals: Totals
    attention: tuple[str, ...] = ()
    """Attention backends that run without mask and dropout, each with its modules."""
    more: str = MORE
    """Hint on how to see the columns that did not fit."""
    memory: StepMemory | None = None
    """Peak memory of a training step, if `plan` was called with a step."""
    parameter: ParameterBytes | None = None
    """Bytes per parameter of weights, masters and moments, with their preset; None without an optimizer."""
    is_summary: bool = False
    """Whether rows stand for several parameters and are printed without details."""

    @classmethod
    def of(cls, rows: list[Row], bf16_optimizer_bytes: int, attention: Iterable[tuple[str, str]] = ()) -> Report:
        """Build a report from rows and from (module name, attention backend) pairs."""
        summed = {name: sum(getattr(row, name) for row in rows) for name in _summed_fields()}
        count = sum(math.prod(row.shape) for row in rows)
        totals = Totals(parameters=count, bf16_optimizer_bytes=bf16_optimizer_bytes, **summed)
        return cls(tuple(rows), totals, tuple(_merged(attention)), parameter=ParameterBytes.of(rows))

    def summary(self, more: str = MORE) -> Report:
        """Return this report with similar parameters united in one row: `layers.{0-31}.{q,k}_proj.weight x64`.

        Parameters are similar if they are stored and computed in the same way; bytes are summed. `more`: where to find
        the columns that are left out.
        """
        groups = united_groups((row.name, _kind(row), row) for row in self.rows)
        rows = tuple(_united(pattern, rows) for pattern, rows in groups)
        return replace(self, rows=rows, more=more, is_summary=True)

    @property
    def warnings(self) -> tuple[str, ...]:
        """Advice on what to change, each with the parameters concerned."""
        return tuple(_merged((row.name, text) for row in self.rows for text in row.warnings))

    @property
    def fallbacks(self) -> tuple[str, ...]:
        """Fallbacks in use: each with its reason, a remedy, and the parameters concerned."""
        return tuple(_merged((row.name, f"{name}: {FALLBACKS[name]}") for row in self.rows for name in row.fallbacks))

    def to_dict(self) -> dict[str, Any]:
        """Return the rows and totals as a dict that JSON can represent."""
        rows = [asdict(row) | {"bytes": row.bytes} for row in self.rows]
        totals = asdict(self.totals) | {"bytes": self.totals.bytes, "gather_bytes": self.totals.gather_bytes}
        texts = {name: list(getattr(self, name)) for name in ("attention", "fallbacks", "warnings")}
        memory = {} if self.memory is None else {"memory": self.memory.to_dict()}
        parameter = self.parameter
        per_parameter = {} if parameter is None else {"parameter": asdict(parameter) | {"together": parameter.together}}
        return {"rows": rows, "totals": totals, **per_parameter, **memory, **texts}

    def to_json(self) -> str:
        """Return the rows and totals as JSON."""
        return json.dumps(self.to_dict(), indent=2)

    def __str__(self) -> str:
        out = io.StringIO()
        width = min(shutil.get_terminal_size().columns, _UNBOUNDED)
        Console(file=out, width=width, color_system=None).print(self)
        return "\n".join(line.rstrip() for line in out.getvalue().splitlines())

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield _render(self)


def _summed_fields() -> list[str]:
    """Names of the fields of `Row` that add up."""
    return [f.name for f in fields(Totals) if f.name in Row.__annotations__]


def _kind(row: Row) -> tuple[object, ...]:
    """Values that parameters in one row of a summary have in common."""
    states = tuple(row.optimizer.items())
    mesh = tuple(row.mesh.items())
    paths = (row.gemm, row.gemm_reason, row.fallbacks, row.warnings)
    return len(row.shape), row.dtype, row.format, states, mesh, row.placements, *paths


def _united(pattern: str, rows: Sequence[Row]) -> Row:
    """A row that stands for several parameters."""
    sums: dict[str, Any] = {name: sum(getattr(row, name) for row in rows) for name in (*_summed_fields(), "elements")}
    sums["state_sizes"] = {state: sum(row.state_sizes[state] for row in rows) for state in rows[0].state_sizes}
    return replace(rows[0], name=counted_name(pattern, len(rows)), **sums)


# Printing


@dataclass(frozen=True)
class FittedTable:
    """A rich table of untrusted texts that fits its width.

    If the table is too wide, names in the first column are folded, then columns are left out, and a last line says so.

    `columns`: heading -> alignment. `spared`: columns to leave out, in this order. `more`: a hint on how to see the
    columns left out. `name_width`: width to which names are folded before columns are left out.
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
        yield self._table(left_out, self.name_width + room)
        if left_out:
            yield Text(f"no room for {left_out} more columns: {self.more}")

    def _width(self, left_out: int, console: Console, options: ConsoleOptions) -> int:
        """Width of the table with its names folded to `name_width`."""
        longest = max((cell_len(printable(cells[0])) for cells in self.rows), default=0)
        unfolded = self._table(left_out).__rich_measure__(console, options.update(width=_UNBOUNDED)).maximum
        return unfolded - max(0, longest - self.name_width)

    def _table(self, left_out: int, name_width: int = _UNBOUNDED) -> Table:
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
        is_shown = [heading not in self.spared[:left_out] for heading in self.columns]
        for heading in compress(self.columns, is_shown):
            table.add_column(heading, justify=self.columns[heading], overflow="fold")
        for cells in self.rows:
            name, *texts = (printable(cell) for cell in compress(cells, is_shown))
            table.add_row(Text(folded(name, name_width)), *map(Text, texts))
        return table


def folded(name: str, width: int) -> str:
    """Break a name after dots into lines of at most `width` columns; a longer part keeps its line."""
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
    parts += [Text()] if report.parameter is None else [Text(str(report.parameter))]
    if report.memory is not None:
        memory = report.memory
        peak = f"peak {human_bytes(memory.peak)} in {memory.highest.phase}, with {memory.step}"
        parts += [_memory_table(memory), *(Text(printable(line), style="bold") for line in (peak, memory.fits) if line)]
    parts.append(_parameter_table(report, heading))
    parts += [Text(printable(text)) for text in (*_details(report), *report.attention)]
    reasons = dict.fromkeys(row.gemm_reason for row in report.rows if row.gemm == EMULATED)
    parts += [Text(printable(f"{EMULATED}: {reason}; right numbers, slower than BF16")) for reason in reasons]
    other_fallbacks = (text for text in report.fallbacks if f": {EMULATED}: " not in text)
    parts += [Text(f"fallback: {printable(text)}") for text in other_fallbacks]
    parts += [Text(f"warning: {printable(text)}", style="bold") for text in report.warnings]
    return Group(*parts)


def _details(report: Report) -> list[str]:
    """Reasons of native GEMMs, and notes; empty for a summary."""
    if report.is_summary:
        return []
    native = (
        (row.name, f"GEMM {row.gemm}: {row.gemm_reason}") for row in report.rows if row.gemm not in ("", EMULATED)
    )
    return _merged([*native, *((row.name, text) for row in report.rows for text in row.notes)])


def _without_prefix(names: Sequence[str]) -> tuple[str, list[str]]:
    """The parent of all repeated layers, such as `model.`, and the names without that prefix and `.weight`."""
    parents = [match[1].split(".")[:-1] for name in names if (match := _REPEATED.match(name))]
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


def plain_table(*headings: str, texts: int = 1, edge: bool = True) -> Table:
    """An empty table. `texts`: number of columns aligned to the left; the others have numbers."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=edge)
    for number, heading in enumerate(headings):
        table.add_column(heading, justify="left" if number < texts else "right", overflow="fold")
    return table


def _totals_table(totals: Totals) -> Table:
    table = plain_table("this rank", "here", "in BF16", "ratio", edge=False)
    lines = [
        (f"weights of {totals.parameters:,} parameters", totals.bytes, totals.bf16_bytes),
        ("given to all-gathers, forward and backward", totals.gather_bytes, totals.bf16_gather_bytes),
        ("optimizer states", totals.optimizer_bytes, totals.bf16_optimizer_bytes),
    ]
    for label, local_bytes, bf16_bytes in (line for line in lines if any(line[1:])):
        ratio = f"{local_bytes / bf16_bytes:.2f}" if bf16_bytes else "-"
        table.add_row(label, human_bytes(local_bytes), human_bytes(bf16_bytes), ratio)
    return table


def _memory_table(memory: StepMemory) -> Table:
    table = plain_table("most memory of a step", *(phase.phase for phase in memory.phases), edge=False)
    for kind in KINDS:
        if max(phase.bytes[kind] for phase in memory.phases) * 1000 >= memory.peak:
            table.add_row(kind, *(human_bytes(phase.bytes[kind]) for phase in memory.phases))
    return table


def _merged(texts: Iterable[tuple[str, str]]) -> list[str]:
    """Each distinct text, with the parameters concerned."""
    names: dict[str, list[str]] = {}
    for name, text in texts:
        names.setdefault(text, []).append(name)
    return [
        f"{parameters[0]}{f' and {len(parameters) - 1} more' if len(parameters) > 1 else ''}: {text}"
        for text, parameters in names.items()
    ]


_COMMON: dict[str, _Column] = {
    "in BF16": (_RIGHT, lambda row: human_bytes(row.bf16_bytes)),
    "gathered forward": (_RIGHT, lambda row: human_bytes(row.forward_gather_bytes)),
    "backward": (_RIGHT, lambda row: human_bytes(row.backward_gather_bytes)),
    "GEMM": (_LEFT, lambda row: row.gemm or "-"),
    "optimizer": (_LEFT, lambda row: _optimizer_text(row.optimizer)),
}
_COLUMNS: dict[str, _Column] = {
    "shape": (_RIGHT, lambda row: " x ".join(map(str, row.shape)) or "scalar"),
    "stored as": (_LEFT, lambda row: row.format),
    "codes + scales": (
        _RIGHT,
        lambda row: human_bytes(row.code_bytes) + (f" + {human_bytes(row.scale_bytes)}" if row.scale_bytes else ""),
    ),
    **_COMMON,
    "sharding": (
        _LEFT,
        lambda row: f"{_mesh_text(row)}: rows {row.local_rows[0]}-{row.local_rows[1]}" if row.mesh else "-",
    ),
}
"""Heading -> alignment and text of a cell, for the columns after the name."""
_SUMMARY: dict[str, _Column] = {
    "stored as": (_LEFT, lambda row: row.format),
    "here": (_RIGHT, lambda row: human_bytes(row.bytes)),
    **_COMMON,
    "mesh": (_LEFT, _mesh_text),
}
"""Columns of a summary; its rows have no shape."""
_SPARED = ("optimizer", "backward", "gathered forward", "in BF16", "sharding", "mesh", "shape")
"""Columns to leave out, in this order, if the table is too wide for the terminal."""
