"""`quantshard inspect` and `verify`: show and check the contents of a checkpoint."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Annotated, Any, Literal

import typer
from rich.console import Group
from rich.table import Table
from rich.text import Text

from quantshard.checkpoints.inspection import Inspection, TensorSummary, Verification
from quantshard.checkpoints.inspection import verify as verify_checkpoint
from quantshard.errors import printable
from quantshard.interop.layouts.inspection import inspect as inspect_path
from quantshard.readable import counted_name, human_bytes, pattern_groups
from quantshard.tools.cli.explain import WIDE, WIDER
from quantshard.tools.observe.table import FittedTable, plain_table
from quantshard.tools.terminal import inputs
from quantshard.tools.terminal.progress import transfer_bar
from quantshard.tools.terminal.screen import Screen, say, say_whole


def register(app: typer.Typer) -> None:
    """Add the commands to the command line."""
    app.command("inspect", no_args_is_help=True)(inspect)
    app.command("verify", no_args_is_help=True)(verify)


def inspect(
    path: Annotated[str, typer.Argument(metavar="CKPT", help="checkpoint, its URL, or safetensors (file or folder)")],
    json_: Annotated[bool, typer.Option("--json", help="print the result as JSON")] = False,
    wide: Annotated[bool, WIDE] = False,
    data: Annotated[bool, typer.Option("--data/--no-data", help="also read scales and codes")] = True,
) -> None:
    """Show what is inside a checkpoint: formats, shapes, bytes, scales, and shares of saturated and zero codes.

    It may come from anybody: nothing in it is run.
    """
    inspection = inspect_path(inputs.existing(path, "a checkpoint or safetensors files"), data)
    if json_:
        say_whole(inspection.to_json())
    else:
        Screen(wide=wide).print(inspection_tables(inspection, wide))


def inspection_tables(found: Inspection, wide: bool = True) -> Group:
    """Format an inspection as tables. `wide`: one row per tensor instead of one per name pattern."""
    parts: list[Any] = [_rows(found.rows if wide else _by_pattern(found.rows)), _totals(found)]
    if found.run is not None:
        origin = ", ".join(f"{name} {value}" for name, value in found.run.items() if value is not None)
        parts.append(Text(f"written by: {origin}"))
    if found.others:
        parts.append(Text(f"{len(found.others)} entries that are no tensors, the first {found.others[0]}"))
    parts += [Text(f"wrong: {line}", style="bold red") for row in found.rows for line in row.wrong]
    return Group(*parts)


_COLUMNS: dict[str, Literal["left", "right"]] = {
    "tensor": "left",
    "stored as": "left",
    **dict.fromkeys(("shape", "bytes", "pieces", "scales", "saturated", "zero"), "right"),
}
_SPARED = ("pieces", "zero", "saturated", "scales", "shape")


def _by_pattern(rows: Sequence[TensorSummary]) -> list[TensorSummary]:
    """Merge the rows of tensors with the same name pattern and storage."""
    named = ((row.name, (row.kind, row.format, row.shape, row.chunks, row.codes), row) for row in rows)
    return [_united(pattern, members) for pattern, members in pattern_groups(named)]


def _united(pattern: str, rows: Sequence[TensorSummary]) -> TensorSummary:
    """Merge rows: sums of bytes and codes, and the range of the scales."""
    scales = [scale for row in rows for scale in row.scales or ()]
    counts: dict[str, Any] = {
        name: None if getattr(rows[0], name) is None else sum(getattr(row, name) or 0 for row in rows)
        for name in ("codes", "zeros", "saturated")
    }
    return replace(
        rows[0],
        name=counted_name(pattern, len(rows)),
        bytes=sum(row.bytes for row in rows),
        scales=(min(scales), max(scales)) if scales else None,
        **counts,
    )


def _rows(found: Sequence[TensorSummary]) -> FittedTable:
    rows = [
        [
            row.name,
            row.format,
            "-" if row.shape is None else " x ".join(map(str, row.shape)) or "scalar",
            human_bytes(row.bytes),
            str(row.chunks),
            "-" if row.scales is None else f"{row.scales[0]:.3g} to {row.scales[1]:.3g}",
            _share(row.saturated, row),
            _share(row.zeros, row),
        ]
        for row in found
    ]
    return FittedTable(_COLUMNS, rows, _SPARED, WIDER)


def _share(count: int | None, row: TensorSummary) -> str:
    return "-" if count is None or not row.codes else f"{count} ({count / row.codes:.2%})"


def _totals(found: Inspection) -> Table:
    table = plain_table("what", "stored as", "tensors", "elements", "bytes", "bytes an element", texts=2)
    for total in found.totals:
        table.add_row(
            total.kind,
            Text(printable(total.format)),
            str(total.tensors),
            f"{total.numel:,}",
            human_bytes(total.bytes),
            f"{total.bytes_per_element:.3f}",
        )
    return table


# Verify

WRONG = 1
"""Exit code if anything is wrong."""


def verify(
    checkpoint: Annotated[
        str, typer.Argument(metavar="CKPT", help="a checkpoint, e.g. DIR/checkpoints/step-000100, or its URL")
    ],
    json_: Annotated[bool, typer.Option("--json", help="print the result as JSON")] = False,
) -> None:
    """Check that a checkpoint is complete: checksums of files, pieces of tensors, components of weights.

    It may come from anybody: nothing in it is run. Exit code 0: nothing is wrong; 1: something is, a line each.
    """
    inputs.existing(checkpoint, "a checkpoint")
    with transfer_bar("reading"):
        result = verify_checkpoint(checkpoint)
    if json_:
        say_whole(json.dumps({**asdict(result), "ok": result.ok}, indent=1))
    else:
        say(*verification_lines(result))
    if not result.ok:
        raise typer.Exit(WRONG)


def verification_lines(found: Verification) -> list[str]:
    """Format a verification as lines of text."""
    lines = [f"wrong: {' '.join(line.split())}" for line in found.problems]
    if not found.checksums and found.tensors:
        lines.append("there is no manifest, so files were not compared with checksums; completeness was checked")
    if not found.tensors and not found.others:  # there is no readable checkpoint
        return lines or [f"not whole: {found.path} has no entries"]
    size = f"{found.tensors} tensors ({found.quantized} quantized), {found.others} other entries"
    count = len(found.problems)
    state = f"not whole: {count} problem{'s' if count > 1 else ''}" if count else "whole"
    return [*lines, f"{state}: {found.path}, {size}, {human_bytes(found.bytes)}"]
