"""`quantshard diff`: compares two checkpoints bit by bit and summarizes the differences by kind of entry."""

from __future__ import annotations

import json
from collections.abc import Container, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Annotated, Any

import typer

from quantshard.checkpoints.comparison import Comparison, Difference, compare, largest_difference
from quantshard.checkpoints.inspection import HISTORY, RANDOM, RANK, STATE, WEIGHT, kind_of
from quantshard.checkpoints.saving import EXTRA
from quantshard.errors import CheckpointError, ConfigurationError
from quantshard.interop.layouts.source import MODEL, OPTIMIZER, CheckpointModel
from quantshard.readable import counted_name, pattern_groups
from quantshard.state_storage import STATE_SCALE_SUFFIXES, scaled_state
from quantshard.tensor.components import FORMAT_SUFFIX
from quantshard.tools.terminal import inputs
from quantshard.tools.terminal.screen import complain, say, say_whole

UNEQUAL, UNREADABLE = 1, 2
"""Exit codes, as in `diff` for text files."""

WEIGHTS = "weights"
_GROUPS = {
    WEIGHT: WEIGHTS,
    STATE: "optimizer",
    EXTRA: "extra",
    RANK: "states of ranks",
    RANDOM: "random keys and draws",
    HISTORY: "amax histories",
}


@dataclass
class EntryGroup:
    """Entries of one kind: the number of equal ones and the differences."""

    name: str
    equal: int = 0
    differences: list[Difference] = field(default_factory=list)

    @property
    def changed(self) -> list[Difference]:
        """Differing entries that exist in both checkpoints."""
        return [difference for difference in self.differences if not difference.only_in]

    @property
    def largest(self) -> Difference | None:
        """Entry with the largest difference of values, or None if no difference of values is known."""
        with_values = [difference for difference in self.changed if difference.largest is not None]
        return max(with_values, key=lambda difference: difference.largest or 0.0, default=None)

    def parts(self) -> list[str]:
        """Short phrases that summarize the group."""
        if not self.differences:
            return [f"{self.name} equal"]
        phrases = []
        if changed := self.changed:
            top = self.largest
            suffix = "" if top is None else f" (by at most {top.largest:.4g}: {top.key})"
            phrases.append(f"{self.name} differ in {len(changed)} of {len(changed) + self.equal}{suffix}")
        for side in "AB":
            if count := sum(difference.only_in == side for difference in self.differences):
                phrases.append(f"{count} {'entry' if count == 1 else 'entries'} only in {side}: {self.name}")
        return phrases

    def to_dict(self) -> dict[str, Any]:
        """Convert to a JSON-serializable dict."""
        top = self.largest
        return {
            "name": self.name,
            "equal": self.equal,
            "different": len(self.changed),
            **{f"only_in_{side.lower()}": sum(d.only_in == side for d in self.differences) for side in "AB"},
            "largest_difference": None if top is None else top.largest,
            "largest_in": None if top is None else top.key,
        }


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command("diff", no_args_is_help=True)(diff)


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
            inputs.existing(path, "a checkpoint")
        comparison = _with_values(compare(checkpoint_a, checkpoint_b))
    except (CheckpointError, ConfigurationError) as error:
        complain(str(error))
        raise typer.Exit(UNREADABLE) from None
    if json_:
        say_whole(json.dumps(comparison_dict(comparison), indent=1))
    else:
        say(*comparison_lines(comparison))
    if not comparison.equal:
        raise typer.Exit(UNEQUAL)


def groups_of(comparison: Comparison) -> list[EntryGroup]:
    """Group the entries by kind, weights first."""
    differing, keys = {difference.key: difference for difference in comparison.differences}, set(comparison.keys)
    groups = {WEIGHTS: EntryGroup(WEIGHTS)}
    for key in comparison.keys:
        name = _GROUPS[kind_of(key, keys)]
        group = groups.setdefault(name, EntryGroup(name))
        if key in differing:
            group.differences.append(differing[key])
        else:
            group.equal += 1
    return [group for group in groups.values() if group.equal or group.differences]


def _with_values(comparison: Comparison) -> Comparison:
    """Add the largest difference of dequantized values to each differing component of a quantized weight.

    Only differing weights are read again. Weights of other shapes and foreign checkpoints are left unchanged.
    """
    keys = set(comparison.keys)
    comparison = replace(
        comparison, differences=tuple(_of_values(compared, keys) for compared in comparison.differences)
    )
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


def _of_values(found: Difference, keys: Container[str]) -> Difference:
    """Drop the largest difference if it compares codes or scales of an optimizer state instead of values."""
    is_scaled = scaled_state(found.key) or any(found.key + suffix in keys for suffix in STATE_SCALE_SUFFIXES)
    return replace(found, largest=None) if found.key.startswith(OPTIMIZER) and is_scaled else found


def _owner(name: str, weights: Container[str]) -> str:
    """Weight that owns a component: `x.weight` for `x.weight_scale_inv`, or "" if there is no such weight."""
    while name and name not in weights:
        name = name.rpartition("_")[0]
    return name


def comparison_lines(comparison: Comparison) -> list[str]:
    """Format a comparison as lines of text."""
    suffix = f", {comparison.others} other entries" if comparison.others else ""
    size = f"{comparison.tensors} tensors, {comparison.bytes} bytes{suffix}"
    if comparison.first is None:
        return [f"equal: {size}"]
    groups = groups_of(comparison)
    lines = [", ".join(part for group in groups for part in group.parts())]
    lines += [f"A: {comparison.path_a}", f"B: {comparison.path_b} (both have {size})"]
    lines.append(f"first difference: {comparison.first}")
    for group in groups:
        lines += [f"{group.name}:", *_patterns(group.differences)] if group.differences else []
    return lines


def _patterns(differences: Iterable[Difference]) -> list[str]:
    """Format one line per name pattern with equal differences."""
    keyed = ((d.key, (d.only_in, d.elements, "" if d.count or d.only_in else d.what), d) for d in differences)
    return [f"  {counted_name(pattern, len(members))}: {_said(members)}" for pattern, members in pattern_groups(keyed)]


def _said(found: Sequence[Difference]) -> str:
    first = found[0]
    if first.only_in:
        return f"only in {first.only_in}"
    if not first.count:
        return first.what
    values = [entry.largest for entry in found if entry.largest is not None]
    suffix = f", by at most {max(values):.4g}" if values else ""
    return f"{sum(d.count for d in found)} of {sum(d.elements for d in found)} elements{suffix}"


def comparison_dict(comparison: Comparison) -> dict[str, Any]:
    """Convert a comparison to a JSON-serializable dict."""
    return {
        "equal": comparison.equal,
        "a": comparison.path_a,
        "b": comparison.path_b,
        "tensors": comparison.tensors,
        "others": comparison.others,
        "bytes": comparison.bytes,
        "groups": [group.to_dict() for group in groups_of(comparison)],
        "differences": [asdict(difference) for difference in comparison.differences],
    }
