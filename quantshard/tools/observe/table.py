"""Results of `explain` and `plan`: one row per parameter, totals, and tables to print."""

import io
import json
import math
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from rich import box
from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.table import Table
from rich.text import Text

from quantshard.errors import printable
from quantshard.limits import FALLBACKS
from quantshard.readable import counted_name, human_bytes, united_groups
from quantshard.tools.observe.costs import KINDS, Costs, Row, StepMemory, Totals, parameter_bytes

EMULATED = "emulated"
"""Path of a GEMM that dequantizes its operands, and the name of that fallback."""

_WIDE = 120


@dataclass(frozen=True)
class Report:
    """The result of `explain` or `plan`.

    `str(report)` and rich print a table as wide as the terminal, as the environment variable COLUMNS, or 80 columns.
    """

    rows: tuple[Row, ...]
    totals: Totals
    attention: tuple[str, ...] = ()
    """Attention backends that run without mask and dropout, each with its modules."""
    loss: tuple[str, ...] = ()
    """How converted transformers models compute their loss."""
    memory: StepMemory | None = None
    """Peak memory of a training step, if `plan` was called with a step."""
    parameter: Mapping[str, Any] = field(default_factory=dict)
    """Bytes per parameter of weights, masters and moments; empty without an optimizer."""
    is_summary: bool = False
    """Whether rows stand for several parameters and are printed without details."""

    @classmethod
    def of(
        cls,
        rows: list[Row],
        bf16_optimizer_bytes: int,
        attention: Sequence[tuple[str, str]] = (),
        loss: Iterable[str] = (),
    ) -> "Report":
        """Build a report from rows, (module name, attention backend) pairs and descriptions of losses."""
        summed = {name: sum(getattr(row, name) for row in rows) for name in _COSTS}
        count = sum(math.prod(row.shape) for row in rows)
        totals = Totals(parameters=count, bf16_optimizer_bytes=bf16_optimizer_bytes, **summed)
        return cls(tuple(rows), totals, tuple(_merged(attention)), tuple(loss), parameter=parameter_bytes(rows))

    def summary(self) -> "Report":
        """Return this report with similar parameters united in one row: `layers.{0-31}.{q,k}_proj.weight x64`.

        Parameters are similar if they are stored and computed in the same way; bytes are summed.
        """
        groups = united_groups((row.name, _kind(row), row) for row in self.rows)
        rows = tuple(_united(pattern, rows) for pattern, rows in groups)
        return replace(self, rows=rows, is_summary=True)

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
        rows = [{"name": row.name, **asdict(row), "bytes": row.bytes} for row in self.rows]
        totals = asdict(self.totals) | {"bytes": self.totals.bytes, "gather_bytes": self.totals.gather_bytes}
        texts = {name: list(getattr(self, name)) for name in ("attention", "loss", "fallbacks", "warnings")}
        memory = {} if self.memory is None else {"memory": self.memory.to_dict()}
        per_parameter = {"parameter": dict(self.parameter)} if self.parameter else {}
        return {"rows": rows, "totals": totals, **per_parameter, **memory, **texts}

    def to_json(self) -> str:
        """Return the rows and totals as JSON."""
        return json.dumps(self.to_dict(), indent=2)

    def __str__(self) -> str:
        out = io.StringIO()
        Console(file=out, width=shutil.get_terminal_size().columns, color_system=None).print(self)
        return "\n".join(line.rstrip() for line in out.getvalue().splitlines())

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield _render(self, options.max_width >= _WIDE)


_COSTS = [cost.name for cost in fields(Costs)]


def _kind(row: Row) -> tuple[object, ...]:
    """Values that parameters in one row of a summary have in common."""
    stored = (len(row.shape), row.dtype, row.format, *row.optimizer.items())
    return stored, *row.mesh.items(), row.placements, row.gemm, row.gemm_reason, row.fallbacks, row.warnings


def _united(pattern: str, rows: Sequence[Row]) -> Row:
    sums: dict[str, Any] = {name: sum(getattr(row, name) for row in rows) for name in (*_COSTS, "elements")}
    sums["state_sizes"] = {state: sum(row.state_sizes[state] for row in rows) for state in rows[0].state_sizes}
    return replace(rows[0], name=counted_name(pattern, len(rows)), **sums)


def plain_table(
    headings: Sequence[str], rows: Iterable[Sequence[str | Text]], *, texts: int = 1, edge: bool = True
) -> Table:
    """A table of untrusted texts. `texts`: number of columns aligned to the left; the others have numbers."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=edge)
    for number, heading in enumerate(headings):
        is_text = number < texts
        table.add_column(heading, justify="left" if is_text else "right", overflow="fold", no_wrap=not is_text)
    for row in rows:
        table.add_row(*(Text(printable(cell)) if isinstance(cell, str) else cell for cell in row))
    return table


def _render(report: Report, is_wide: bool) -> Group:
    parts: list[Any] = [_totals_table(report.totals)]
    parts.append(Text(_parameter_text(report.parameter) if report.parameter else ""))
    if report.memory is not None:
        memory = report.memory
        peak = f"peak {human_bytes(memory.peak)} in {memory.highest.phase}, with {memory.step}"
        parts += [_memory_table(memory), *(Text(printable(line), style="bold") for line in (peak, memory.fits) if line)]
    rows = [_cells(row, is_wide) for row in report.rows]
    texts, numbers = rows[0] if rows else ({"parameter": ""}, {})
    cells = ([*texts.values(), *numbers.values()] for texts, numbers in rows)
    parts.append(plain_table([*texts, *numbers], cells, texts=len(texts), edge=False))
    native = ((r.name, f"GEMM {r.gemm}: {r.gemm_reason}") for r in report.rows if r.gemm not in ("", EMULATED))
    notes = ((row.name, text) for row in report.rows for text in row.notes)
    details = [] if report.is_summary else _merged([*native, *notes])
    parts += [Text(printable(text)) for text in (*details, *report.attention, *report.loss)]
    reasons = dict.fromkeys(row.gemm_reason for row in report.rows if row.gemm == EMULATED)
    parts += [Text(printable(f"{EMULATED}: {reason}; right numbers, slower than BF16")) for reason in reasons]
    other_fallbacks = (text for text in report.fallbacks if f": {EMULATED}: " not in text)
    parts += [Text(f"fallback: {printable(text)}") for text in other_fallbacks]
    parts += [Text(f"warning: {printable(text)}", style="bold") for text in report.warnings]
    return Group(*parts)


def _parameter_text(sizes: Mapping[str, Any]) -> str:
    names = ("weight", "master", "moments", *["average"] * bool(sizes["average"]))
    terms = " + ".join(f"{name} {sizes[name]:.2f}" for name in names)
    return f"bytes per {'quantized ' * sizes['is_quantized']}parameter: {terms} = {sizes['together']:.2f}"


def _cells(row: Row, is_wide: bool) -> tuple[dict[str, str], dict[str, str]]:
    """The texts and the numbers of a row, by heading."""
    texts, numbers = {"parameter": row.name, "stored as": row.format, "GEMM": row.gemm or "-"}, {"here": row.bytes}
    if is_wide:
        states: dict[str, list[str]] = {}
        for state, fmt in row.optimizer.items():
            states.setdefault(fmt, []).append(state.removesuffix("_param"))
        axes = zip(row.mesh.items(), row.placements, strict=True)
        texts["optimizer"] = "; ".join(f"{', '.join(names)} {fmt}" for fmt, names in states.items()) or "-"
        texts["mesh"] = ", ".join(f"{axis}={size} {placement}" for (axis, size), placement in axes) or "-"
        numbers |= {"in BF16": row.bf16_bytes, "gathered forward": row.forward_gather_bytes}
        numbers["backward"] = row.backward_gather_bytes
    return texts, {heading: human_bytes(number) for heading, number in numbers.items()}


def _totals_table(totals: Totals) -> Table:
    lines = [
        (f"weights of {totals.parameters:,} parameters", totals.bytes, totals.bf16_bytes),
        ("given to all-gathers, forward and backward", totals.gather_bytes, totals.bf16_gather_bytes),
        ("optimizer states", totals.optimizer_bytes, totals.bf16_optimizer_bytes),
    ]
    rows = [
        (label, human_bytes(size), human_bytes(bf16_size), f"{size / bf16_size:.2f}" if bf16_size else "-")
        for label, size, bf16_size in lines
        if size or bf16_size
    ]
    return plain_table(("this rank", "here", "in BF16", "ratio"), rows, edge=False)


def _memory_table(memory: StepMemory) -> Table:
    rows = [
        [kind, *(human_bytes(phase.bytes[kind]) for phase in memory.phases)]
        for kind in KINDS
        if max(phase.bytes[kind] for phase in memory.phases) * 1000 >= memory.peak
    ]
    return plain_table(["most memory of a step", *(phase.phase for phase in memory.phases)], rows, edge=False)


def _merged(texts: Iterable[tuple[str, str]]) -> list[str]:
    """Each distinct text, with the parameters concerned."""
    merged: dict[str, list[str]] = {}
    for name, text in texts:
        merged.setdefault(text, []).append(name)
    more = {text: f" and {len(names) - 1} more" if len(names) > 1 else "" for text, names in merged.items()}
    return [f"{names[0]}{more[text]}: {text}" for text, names in merged.items()]
