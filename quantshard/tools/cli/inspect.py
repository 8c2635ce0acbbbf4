"""`quantshard inspect`, `verify` and `diff`: show, check and compare checkpoints."""

from __future__ import annotations

import json
from collections.abc import Container, Iterable, Sequence
from dataclasses import asdict, replace
from typing import Annotated, Any, Literal

import typer
from rich.console import Group
from rich.table import Table
from rich.text import Text

from quantshard.checkpoints.comparison import Comparison, Difference, compare, largest_difference
from quantshard.checkpoints.inspection import (
    HISTORY,
    RANDOM,
    RANK,
    STATE,
    WEIGHT,
    Inspection,
    TensorSummary,
    Verification,
    kind_of,
)
from quantshard.checkpoints.inspection import verify as verify_checkpoint
from quantshard.checkpoints.saving import EXTRA
from quantshard.errors import CheckpointError, ConfigurationError, printable
from quantshard.interop.layouts.inspection import inspect as inspect_path
from quantshard.interop.layouts.source import MODEL, OPTIMIZER, CheckpointModel
from quantshard.readable import counted_name, human_bytes, pattern_groups
from quantshard.state_storage import STATE_SCALE_SUFFIXES, scaled_state
from quantshard.tensor.components import FORMAT_SUFFIX
from quantshard.tools.cli.exchange import CHECKPOINT, existing_checkpoint
from quantshard.tools.cli.explain import WIDE, WIDER
from quantshard.tools.observe.table import FittedTable, plain_table
from quantshard.tools.terminal.screen import Screen, complain, say, say_whole, transfer_bar


def inspect(
    path: Annotated[str, typer.Argument(metavar="CKPT", help="checkpoint, its URL, or safetensors (file or folder)")],
    json_: Annotated[bool, typer.Option("--json", help="print the result as JSON")] = False,
    wide: Annotated[bool, WIDE] = False,
    data: Annotated[bool, typer.Option("--data/--no-data", help="also read scales and codes")] = True,
) -> None:
    """Show what is inside a checkpoint: formats, shapes, bytes, scales, and shares of saturated and zero codes.

    Safe for untrusted files: nothing in them is run.
    """
    inspection = inspect_path(existing_checkpoint(path, "a checkpoint or safetensors files"), data)
    if json_:
        say_whole(inspection.to_json())
    else:
        Screen(wide=wide).print(inspection_tables(inspection, wide))


def inspection_tables(inspection: Inspection, wide: bool = True) -> Group:
    """Format an inspection as tables. `wide`: one row per tensor instead of one per name pattern."""
    rows: Sequence[TensorSummary] = inspection.rows
    if not wide:
        named = ((row.name, (row.kind, row.format, row.shape, row.chunks, row.codes), row) for row in rows)
        rows = [_united(pattern, members) for pattern, members in pattern_groups(named)]
    parts: list[Any] = [_rows(rows), _totals(inspection)]
    if inspection.run is not None:
        origin = ", ".join(f"{name} {value}" for name, value in inspection.run.items() if value is not None)
        parts.append(Text(f"written by: {origin}"))
    if inspection.others:
        parts.append(Text(f"{len(inspection.others)} entries that are no tensors, the first {inspection.others[0]}"))
    parts += [Text(f"wrong: {line}", style="bold red") for row in inspection.rows for line in row.wrong]
    return Group(*parts)


_COLUMNS: dict[str, Literal["left", "right"]] = {
    "tensor": "left",
    "stored as": "left",
    **dict.fromkeys(("shape", "bytes", "pieces", "scales", "saturated", "zero"), "right"),
}
_SPARED = ("pieces", "zero", "saturated", "scales", "shape")


def _united(pattern: str, rows: Sequence[TensorSummary]) -> TensorSummary:
    """Merge rows: sums of bytes and codes, and the range of the scales."""
    scales = [scale for row in rows for scale in row.scales or ()]
    counts: dict[str, Any] = {
        name: sum(getattr(row, name) or 0 for row in rows)
        for name in ("bytes", "codes", "zeros", "saturated")
        if getattr(rows[0], name) is not None
    }
    scale_range = (min(scales), max(scales)) if scales else None
    return replace(rows[0], name=counted_name(pattern, len(rows)), scales=scale_range, **counts)


def _rows(summaries: Sequence[TensorSummary]) -> FittedTable:
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
        for row in summaries
    ]
    return FittedTable(_COLUMNS, rows, _SPARED, WIDER)


def _share(count: int | None, row: TensorSummary) -> str:
    return "-" if count is None or not row.codes else f"{count} ({count / row.codes:.2%})"


def _totals(inspection: Inspection) -> Table:
    table = plain_table("what", "stored as", "tensors", "elements", "bytes", "bytes an element", texts=2)
    for total in inspection.totals:
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


def verify(
    checkpoint: Annotated[str, CHECKPOINT],
    json_: Annotated[bool, typer.Option("--json", help="print the result as JSON")] = False,
) -> None:
    """Check that a checkpoint is complete: checksums of files, pieces of tensors, components of weights.

    Safe for untrusted files: nothing in them is run. Exit code 0: complete; 1: prints a line for each problem.
    """
    existing_checkpoint(checkpoint, "a checkpoint")
    with transfer_bar("reading"):
        result = verify_checkpoint(checkpoint)
    if json_:
        say_whole(json.dumps({**asdict(result), "ok": result.ok}, indent=1))
    else:
        say(*verification_lines(result))
    if not result.ok:
        raise typer.Exit(1)


def verification_lines(verification: Verification) -> list[str]:
    """Format a verification as lines of text."""
    lines = [f"wrong: {' '.join(line.split())}" for line in verification.problems]
    if not verification.checksums and verification.tensors:
        lines.append("there is no manifest, so files were not compared with checksums; completeness was checked")
    if not verification.tensors and not verification.others:  # there is no readable checkpoint
        return lines or [f"not whole: {verification.path} has no entries"]
    size = f"{verification.tensors} tensors ({verification.quantized} quantized), {verification.others} other entries"
    count = len(verification.problems)
    state = f"not whole: {count} problem{'s' if count > 1 else ''}" if count else "whole"
    return [*lines, f"{state}: {verification.path}, {size}, {human_bytes(verification.bytes)}"]


# Diff

UNEQUAL, UNREADABLE = 1, 2
"""Exit codes, as in `diff` for text files."""

_GROUPS = {
    WEIGHT: "weights",
    STATE: "optimizer",
    EXTRA: "extra",
    RANK: "states of ranks",
    RANDOM: "random keys and draws",
    HISTORY: "amax histories",
}


def diff(
    checkpoint_a: Annotated[
        str, typer.Argument(metavar="CKPT_A", help="a checkpoint, e.g. DIR/checkpoints/step-000100, or its URL")
    ],
    checkpoint_b: Annotated[str, typer.Argument(metavar="CKPT_B", help="the checkpoint to compare with")],
    json_: Annotated[bool, typer.Option("--json", help="print the result as JSON")] = False,
) -> None:
    """Compare two checkpoints bit by bit; they may be from different meshes.

    Counts the differences of weights, optimizer and the rest, with the largest, and names the first. Exit code 0:
    equal; 1: different; 2: one cannot be read.
    """
    try:
        for path in (checkpoint_a, checkpoint_b):
            existing_checkpoint(path, "a checkpoint")
        comparison = _with_values(compare(checkpoint_a, checkpoint_b))
    except (CheckpointError, ConfigurationError) as error:
        complain(str(error))
        raise typer.Exit(UNREADABLE) from None
    if json_:
        result = {
            "equal": comparison.equal,
            "a": comparison.path_a,
            "b": comparison.path_b,
            "tensors": comparison.tensors,
            "others": comparison.others,
            "bytes": comparison.bytes,
            "groups": [group for group, _ in _groups(comparison)],
            "differences": [asdict(difference) for difference in comparison.differences],
        }
        say_whole(json.dumps(result, indent=1))
    else:
        say(*_comparison_lines(comparison))
    if not comparison.equal:
        raise typer.Exit(UNEQUAL)


def _groups(comparison: Comparison) -> list[tuple[dict[str, Any], list[Difference]]]:
    """Summaries of the entries by kind, weights first, each with its differences."""
    differing, keys = {difference.key: difference for difference in comparison.differences}, set(comparison.keys)
    keys_by_kind: dict[str, list[str]] = {_GROUPS[WEIGHT]: []}
    for key in comparison.keys:
        keys_by_kind.setdefault(_GROUPS[kind_of(key, keys)], []).append(key)
    groups = []
    for name, members in keys_by_kind.items():
        differences = [differing[key] for key in members if key in differing]
        shared = [difference for difference in differences if not difference.only_in]
        top = max((d for d in shared if d.largest is not None), key=lambda d: d.largest or 0.0, default=None)
        summary = {
            "name": name,
            "equal": len(members) - len(differences),
            "different": len(shared),
            **{f"only_in_{side.lower()}": sum(d.only_in == side for d in differences) for side in "AB"},
            "largest_difference": None if top is None else top.largest,
            "largest_in": None if top is None else top.key,
        }
        if members:
            groups.append((summary, differences))
    return groups


def _phrases(group: dict[str, Any]) -> list[str]:
    """Short phrases that summarize a group."""
    name, changed, phrases = group["name"], group["different"], []
    if changed:
        top = group["largest_difference"]
        suffix = "" if top is None else f" (by at most {top:.4g}: {group['largest_in']})"
        phrases.append(f"{name} differ in {changed} of {changed + group['equal']}{suffix}")
    for side in "AB":
        if count := group[f"only_in_{side.lower()}"]:
            phrases.append(f"{count} {'entry' if count == 1 else 'entries'} only in {side}: {name}")
    return phrases or [f"{name} equal"]


def _with_values(comparison: Comparison) -> Comparison:
    """Add the largest difference of dequantized values to each differing component of a quantized weight.

    Only differing weights are read again. Weights of other shapes and foreign checkpoints are left unchanged.
    """
    keys = set(comparison.keys)
    comparison = replace(comparison, differences=tuple(_of_values(entry, keys) for entry in comparison.differences))
    if not any(kind_of(d.key, keys) == WEIGHT and not d.only_in for d in comparison.differences):
        return comparison
    try:
        a, b = CheckpointModel(comparison.path_a), CheckpointModel(comparison.path_b)
    except (CheckpointError, ConfigurationError):
        return comparison
    compared, values = [], dict[str, float]()
    for entry in comparison.differences:
        name = entry.key.removeprefix(MODEL)
        owner = _owner(name, a.weights)
        weight_a, weight_b = a.weights.get(owner), b.weights.get(owner)
        is_part = kind_of(entry.key, keys) == WEIGHT and weight_a is not None and weight_a.tag is not None
        if is_part and weight_a is not None and weight_b is not None and weight_a.shape == weight_b.shape:
            if owner not in values:
                values[owner] = largest_difference(a.values(weight_a), b.values(weight_b))
            if name == owner + FORMAT_SUFFIX:  # the bytes encode the format's name
                entry = replace(entry, what=f"{weight_a.tag} and {weight_b.tag}", count=0)
            else:
                entry = replace(entry, largest=values[owner])
        compared.append(entry)
    return replace(comparison, differences=tuple(compared))


def _of_values(difference: Difference, keys: Container[str]) -> Difference:
    """Drop the largest difference if it compares codes or scales of an optimizer state instead of values."""
    is_scaled = scaled_state(difference.key) or any(difference.key + suffix in keys for suffix in STATE_SCALE_SUFFIXES)
    return replace(difference, largest=None) if difference.key.startswith(OPTIMIZER) and is_scaled else difference


def _owner(name: str, weights: Container[str]) -> str:
    """Weight that owns a component: `x.weight` for `x.weight_scale_inv`, or "" if there is no such weight."""
    while name and name not in weights:
        name = name.rpartition("_")[0]
    return name


def _comparison_lines(comparison: Comparison) -> list[str]:
    """Format a comparison as lines of text."""
    suffix = f", {comparison.others} other entries" if comparison.others else ""
    size = f"{comparison.tensors} tensors, {comparison.bytes} bytes{suffix}"
    if comparison.first is None:
        return [f"equal: {size}"]
    groups = _groups(comparison)
    lines = [", ".join(phrase for group, _ in groups for phrase in _phrases(group))]
    lines += [f"A: {comparison.path_a}", f"B: {comparison.path_b} (both have {size})"]
    lines.append(f"first difference: {comparison.first}")
    for group, differences in groups:
        lines += [f"{group['name']}:", *_patterns(differences)] if differences else []
    return lines


def _patterns(differences: Iterable[Difference]) -> list[str]:
    """Format one line per name pattern with equal differences."""
    keyed = ((d.key, (d.only_in, d.elements, "" if d.count or d.only_in else d.what), d) for d in differences)
    return [f"  {counted_name(pattern, len(members))}: {_said(members)}" for pattern, members in pattern_groups(keyed)]


def _said(differences: Sequence[Difference]) -> str:
    first = differences[0]
    if first.only_in:
        return f"only in {first.only_in}"
    if not first.count:
        return first.what
    values = [entry.largest for entry in differences if entry.largest is not None]
    suffix = f", by at most {max(values):.4g}" if values else ""
    return f"{sum(d.count for d in differences)} of {sum(d.elements for d in differences)} elements{suffix}"
