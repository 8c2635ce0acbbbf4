"""`quantshard diff`: compare two checkpoints bit by bit, and say what differs in groups."""

from __future__ import annotations

import json
from collections.abc import Container, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Annotated, Any

import typer

from quantshard.checkpoints.inspect.compare import Comparison, Difference, compare, largest_difference
from quantshard.checkpoints.inspect.inspection import HISTORY, RANDOM, RANK, STATE, WEIGHT, kind_of
from quantshard.checkpoints.untrusted.extras import EXTRA
from quantshard.errors import CheckpointError, ConfigurationError
from quantshard.interop.layouts.source import MODEL, OPTIMIZER, CheckpointModel
from quantshard.readable import counted_name, pattern_groups
from quantshard.state_cells import STATE_SCALE_SUFFIXES, scaled_state
from quantshard.tensor.components import FORMAT_SUFFIX
from quantshard.tools.terminal import inputs
from quantshard.tools.terminal.screen import complain, say, say_whole

UNEQUAL, UNREADABLE = 1, 2
"""Exit codes, as those of the diff that compares texts."""

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
    """Entries of one kind: how many are equal, and the differences. `largest`: of values, and in which entry."""

    name: str
    equal: int = 0
    differences: list[Difference] = field(default_factory=list)

    @property
    def changed(self) -> list[Difference]:
        """The entries that both checkpoints have."""
        return [found for found in self.differences if not found.only_in]

    @property
    def largest(self) -> Difference | None:
        """The entry with the largest difference of values."""
        known = [found for found in self.changed if found.largest is not None]
        return max(known, key=lambda found: found.largest or 0.0, default=None)

    def parts(self) -> list[str]:
        """What is said of it, in a few words."""
        if not self.differences:
            return [f"{self.name} equal"]
        said = []
        if changed := self.changed:
            most = self.largest
            by = "" if most is None else f" (by at most {most.largest:.4g}: {most.key})"
            said.append(f"{self.name} differ in {len(changed)} of {len(changed) + self.equal}{by}")
        for side in "AB":
            if count := sum(found.only_in == side for found in self.differences):
                said.append(f"{count} {'entry' if count == 1 else 'entries'} only in {side}: {self.name}")
        return said

    def to_dict(self) -> dict[str, Any]:
        """As JSON can write it."""
        most = self.largest
        return {
            "name": self.name,
            "equal": self.equal,
            "different": len(self.changed),
            **{f"only_in_{side.lower()}": sum(d.only_in == side for d in self.differences) for side in "AB"},
            "largest_difference": None if most is None else most.largest,
            "largest_in": None if most is None else most.key,
        }


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command("diff", no_args_is_help=True)(diff)


def diff(
    checkpoint_a: Annotated[
        str, typer.Argument(metavar="CKPT_A", help="a checkpoint, e.g. DIR/checkpoints/step-000100, or its URL")
    ],
    checkpoint_b: Annotated[str, typer.Argument(metavar="CKPT_B", help="the one to compare it with")],
    json_: Annotated[bool, typer.Option("--json", help="what was found, as JSON")] = False,
) -> None:
    """Compare two checkpoints bit by bit, whatever processes and meshes wrote them.

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
    """The entries by kind, weights first."""
    differing, keys = {found.key: found for found in comparison.differences}, set(comparison.keys)
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
    """The comparison with, for each component of a quantized weight, the largest difference of the weight's values.

    Only what differs is read once more; of what is no checkpoint of ours, or of other shapes, nothing is said."""
    keys = set(comparison.keys)
    comparison = replace(comparison, differences=tuple(_of_values(found, keys) for found in comparison.differences))
    if not any(kind_of(d.key, keys) == WEIGHT and not d.only_in for d in comparison.differences):
        return comparison
    try:
        a, b = CheckpointModel(comparison.path_a), CheckpointModel(comparison.path_b)
    except (CheckpointError, ConfigurationError):
        return comparison
    found, values = [], dict[str, float]()
    for entry in comparison.differences:
        name = entry.key.removeprefix(MODEL)
        owner = _owner(name, a.weights)
        one, two = a.weights.get(owner), b.weights.get(owner)
        is_part = kind_of(entry.key, keys) == WEIGHT and one is not None and one.tag is not None
        if is_part and one is not None and two is not None and one.shape == two.shape:
            if owner not in values:
                values[owner] = largest_difference(a.values(one), b.values(two))
            if name == owner + FORMAT_SUFFIX:  # bytes of a name
                entry = replace(entry, what=f"{one.tag} and {two.tag}", count=0)
            else:
                entry = replace(entry, largest=values[owner])
        found.append(entry)
    return replace(comparison, differences=tuple(found))


def _of_values(found: Difference, keys: Container[str]) -> Difference:
    """Without a largest difference, where that is one of codes or scales of an optimizer's state, and not of values."""
    if found.by_value:
        return found
    is_scaled = scaled_state(found.key) or any(found.key + suffix in keys for suffix in STATE_SCALE_SUFFIXES)
    return replace(found, largest=None) if found.key.startswith(OPTIMIZER) and is_scaled else found


def _owner(name: str, weights: Container[str]) -> str:
    """The weight that an entry is a component of: `x.weight` of `x.weight_scale_inv`; "" for none."""
    while name and name not in weights:
        name = name.rpartition("_")[0]
    return name


def comparison_lines(comparison: Comparison) -> list[str]:
    """What a comparison found, as lines."""
    also = f", {comparison.others} other entries" if comparison.others else ""
    size = f"{comparison.tensors} tensors, {comparison.bytes} bytes{also}"
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
    """A line for the entries of a pattern of which the same is to be said."""
    told = ((d.key, (d.only_in, d.elements, "" if d.count or d.only_in else d.what), d) for d in differences)
    return [f"  {counted_name(pattern, len(found))}: {_said(found)}" for pattern, found in pattern_groups(told)]


def _said(found: Sequence[Difference]) -> str:
    first = found[0]
    if first.only_in:
        return f"only in {first.only_in}"
    if not first.count:
        return first.what
    values = [entry.largest for entry in found if entry.largest is not None]
    by = f", by at most {max(values):.4g}" if values else ""
    return f"{sum(d.count for d in found)} of {sum(d.elements for d in found)} elements{by}"


def comparison_dict(comparison: Comparison) -> dict[str, Any]:
    """What a comparison found, as JSON can write it."""
    return {
        "equal": comparison.equal,
        "a": comparison.path_a,
        "b": comparison.path_b,
        "tensors": comparison.tensors,
        "others": comparison.others,
        "bytes": comparison.bytes,
        "groups": [group.to_dict() for group in groups_of(comparison)],
        "differences": [asdict(found) for found in comparison.differences],
    }
