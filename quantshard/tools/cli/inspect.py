"""`quantshard inspect`, `verify` and `diff`: show, check and compare checkpoints."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import typer
from rich.console import Group
from rich.table import Table
from rich.text import Text
from typer import Argument, Option

from quantshard.checkpoints import inspection
from quantshard.checkpoints.comparison import Comparison, Difference, compare
from quantshard.checkpoints.inspection import Inspection, TensorSummary, Verification
from quantshard.checkpoints.saving import EXTRA
from quantshard.errors import CheckpointError, ConfigurationError
from quantshard.readable import counted_name, human_bytes, pattern_groups
from quantshard.tools.cli.exchange import CHECKPOINT
from quantshard.tools.cli.explain import WIDE
from quantshard.tools.observe.table import plain_table
from quantshard.tools.terminal.outputs import existing
from quantshard.tools.terminal.screen import Screen, complain, say, say_whole, transfer_bar


def inspect(
    path: str = CHECKPOINT,
    json_: bool = Option(False, "--json", help="print the result as JSON"),
    wide: bool = WIDE,
) -> None:
    """Show what is inside a checkpoint: formats, shapes, bytes, scales, and shares of saturated and zero codes.

    Safe for untrusted files: nothing in them is run.
    """
    result = inspection.inspect_checkpoint(existing(path, "a checkpoint"))
    if json_:
        say_whole(result.to_json())
    else:
        Screen(wide=wide).print(inspection_tables(result, wide))


def inspection_tables(contents: Inspection, wide: bool = True) -> Group:
    """Format an inspection as tables. `wide`: one row per tensor instead of one per name pattern."""
    rows: Sequence[TensorSummary] = contents.rows
    if not wide:
        named = ((row.name, (row.kind, row.format, row.shape, row.chunks, row.codes), row) for row in rows)
        rows = [_united(pattern, members) for pattern, members in pattern_groups(named)]
    parts: list[Any] = [_rows(rows, wide), _totals(contents)]
    if contents.run is not None:
        origin = ", ".join(f"{name} {value}" for name, value in contents.run.items() if value is not None)
        parts.append(Text(f"written by: {origin}"))
    if contents.others:
        parts.append(Text(f"{len(contents.others)} entries that are no tensors, the first {contents.others[0]}"))
    parts += [Text(f"wrong: {line}", style="bold red") for row in contents.rows for line in row.wrong]
    return Group(*parts)


def _united(pattern: str, rows: Sequence[TensorSummary]) -> TensorSummary:
    scales = [scale for row in rows for scale in row.scales or ()]
    counts: dict[str, Any] = {
        name: sum(getattr(row, name) or 0 for row in rows)
        for name in ("bytes", "codes", "zeros", "saturated")
        if getattr(rows[0], name) is not None
    }
    scale_range = (min(scales), max(scales)) if scales else None
    return replace(rows[0], name=counted_name(pattern, len(rows)), scales=scale_range, **counts)


def _rows(summaries: Sequence[TensorSummary], wide: bool) -> Table:
    headings = ["tensor", "stored as", "shape", "bytes"] + ["pieces", "scales", "saturated", "zero"] * wide
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
        ][: len(headings)]
        for row in summaries
    ]
    return plain_table(headings, rows, texts=2, edge=False)


def _share(count: int | None, row: TensorSummary) -> str:
    return "-" if count is None or not row.codes else f"{count} ({count / row.codes:.2%})"


def _totals(contents: Inspection) -> Table:
    headings = ("what", "stored as", "tensors", "elements", "bytes", "bytes an element")
    rows = [
        (t.kind, t.format, str(t.tensors), f"{t.numel:,}", human_bytes(t.bytes), f"{t.bytes_per_element:.3f}")
        for t in contents.totals
    ]
    return plain_table(headings, rows, texts=2)


def verify(checkpoint: str = CHECKPOINT) -> None:
    """Check that a checkpoint is complete: checksums of files, pieces of tensors, components of weights.

    Safe for untrusted files: nothing in them is run. Exit code 0: complete; 1: prints a line for each problem.
    """
    existing(checkpoint, "a checkpoint")
    with transfer_bar("reading"):
        result = inspection.verify(checkpoint)
    say(*verification_lines(result))
    if not result.ok:
        raise typer.Exit(1)


def verification_lines(verification: Verification) -> list[str]:
    lines = [f"wrong: {' '.join(line.split())}" for line in verification.problems]
    if not verification.checksums and verification.tensors:
        lines.append("there is no manifest, so files were not compared with checksums; completeness was checked")
    if not verification.tensors and not verification.others:  # there is no readable checkpoint
        return lines or [f"not whole: {verification.path} has no entries"]
    size = f"{verification.tensors} tensors ({verification.quantized} quantized), {verification.others} other entries"
    count = len(verification.problems)
    state = f"not whole: {count} problem{'s' if count > 1 else ''}" if count else "whole"
    return [*lines, f"{state}: {verification.path}, {size}, {human_bytes(verification.bytes)}"]


_TITLES = {
    inspection.WEIGHT: "weights",
    inspection.STATE: "optimizer",
    EXTRA: "extra",
    inspection.RANK: "states of ranks",
    inspection.RANDOM: "random keys and draws",
    inspection.HISTORY: "amax histories",
}


def diff(
    checkpoint_a: str = Argument(
        ..., metavar="CKPT_A", help="a checkpoint, e.g. DIR/checkpoints/step-000100, or its URL"
    ),
    checkpoint_b: str = Argument(..., metavar="CKPT_B", help="the checkpoint to compare with"),
) -> None:
    """Compare two checkpoints bit by bit; they may be from different meshes.

    Names the first difference, and counts those of weights, optimizer and the rest. Exit code 0: equal; 1: different;
    2: one cannot be read.
    """
    try:
        for path in (checkpoint_a, checkpoint_b):
            existing(path, "a checkpoint")
        comparison = compare(checkpoint_a, checkpoint_b)
    except (CheckpointError, ConfigurationError) as error:
        complain(str(error))
        raise typer.Exit(2) from None
    say(*_comparison_lines(comparison))
    if not comparison.equal:
        raise typer.Exit(1)


def _comparison_lines(comparison: Comparison) -> list[str]:
    """Format a comparison as lines of text, with a line per name pattern with equal differences."""
    suffix = f", {comparison.others} other entries" if comparison.others else ""
    size = f"{comparison.tensors} tensors, {comparison.bytes} bytes{suffix}"
    if comparison.first is None:
        return [f"equal: {size}"]
    keys = set(comparison.keys)
    lines = [f"{len(comparison.differences)} of {len(keys)} entries differ; both have {size}"]
    lines += [f"A: {comparison.path_a}", f"B: {comparison.path_b}", f"first difference: {comparison.first}"]
    for kind, title in _TITLES.items():
        members = [key for key in comparison.keys if inspection.kind_of(key, keys) == kind]
        differences = [d for d in comparison.differences if inspection.kind_of(d.key, keys) == kind]
        if not differences:
            continue
        lines.append(f"{title}: {len(differences)} of {len(members)} differ")
        keyed = ((d.key, (d.only_in, d.elements, "" if d.count or d.only_in else d.what), d) for d in differences)
        lines += [f"  {counted_name(pattern, len(same))}: {_said(same)}" for pattern, same in pattern_groups(keyed)]
    return lines


def _said(differences: Sequence[Difference]) -> str:
    first = differences[0]
    if first.only_in:
        return f"only in {first.only_in}"
    if not first.count:
        return first.what
    values = [entry.largest for entry in differences if entry.largest is not None]
    suffix = f", by at most {max(values):.4g}" if values else ""
    return f"{sum(d.count for d in differences)} of {sum(d.elements for d in differences)} elements{suffix}"
