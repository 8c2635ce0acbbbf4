"""The picture of arms of `convergence_table.py` that saw the same tokens: their losses, and what these differ by."""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.convergence_table import REFERENCE, ArmResult, Record, TrainedOn, reference_name

SMOOTH = 10
"""Recorded losses that a point of the curves is the mean of."""

_BY_LAYER = re.compile(r"(?:[^\s,=]+=[^\s,]+(?:,(?=\S)|))+")
_DASHES = ("-", "--", ":")


def draw(file: Path, trained: TrainedOn, arms: Mapping[str, ArmResult]) -> None:
    """Of each arm: its training losses by tokens; what these differ by from BF16's, of the same seeds and the same
    optimizer; and what held-out losses differ by, each seed and their mean."""
    import matplotlib  # here, since it takes long to import
    from matplotlib.figure import Figure

    compared = {
        name: arm for name, arm in arms.items() if reference_name(name) in arms and reference_name(name) != name
    }
    height = 0.26 * len(compared) + 1.0
    figure = Figure(figsize=(11, 4.2 + height), layout="constrained")
    top, bottom = figure.subfigures(2, 1, height_ratios=(4.2, height))
    curves, drift = top.subplots(1, 2)
    styles = {
        name: {"color": f"C{number % 10}", "linestyle": _DASHES[number // 10 % 3]} for number, name in enumerate(arms)
    }
    _draw_losses(curves, trained, arms, styles)
    _draw_drift(drift, trained, arms, compared, styles)
    _draw_heldout(bottom.subplots(), arms, compared, styles)
    figure.suptitle(str(trained), fontsize="small")
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "convergence"}):
        figure.savefig(file, metadata={"Date": None} if file.suffix == ".svg" else None)


def label(arm: str) -> str:
    """An arm's name, and if its recipes go by layer, the recipe of most layers first: `nvfp4; current: layers 0, 1`."""
    matched = _BY_LAYER.match(arm)
    if matched is None:
        return arm
    patterns: dict[str, list[str]] = {}
    for pattern, _, recipe in (pair.partition("=") for pair in matched[0].split(",")):
        patterns.setdefault(recipe, []).append(pattern)
    others = "; ".join(f"{recipe}: {_listed(names)}" for recipe, names in patterns.items() if "*" not in names)
    most = next((recipe for recipe, names in patterns.items() if "*" in names), "bf16")
    return f"{most}; {others}{arm[matched.end() :]}"


def _listed(patterns: Sequence[str]) -> str:
    numbers = [pattern.removeprefix("layers.") for pattern in patterns if pattern.startswith("layers.")]
    parts = [pattern for pattern in patterns if not pattern.startswith("layers.")]
    return ", ".join([f"layers {', '.join(numbers)}"] * bool(numbers) + parts)


def _draw_losses(panel: Any, trained: TrainedOn, arms: Mapping[str, ArmResult], styles: Mapping[str, Any]) -> None:
    for name, arm in arms.items():
        seeds = [_smoothed(record) for record in arm.records.values()]
        losses = [statistics.fmean(each) for each in zip(*seeds, strict=False)]
        panel.plot(_tokens(trained, arm, len(losses)), losses, linewidth=0.9, **styles[name])
    panel.set_title("training loss", fontsize="small", loc="left")
    panel.set(xlabel="million tokens", ylabel="nats a token")


def _draw_drift(
    panel: Any,
    trained: TrainedOn,
    arms: Mapping[str, ArmResult],
    compared: Mapping[str, ArmResult],
    styles: Mapping[str, Any],
) -> None:
    for name, arm in compared.items():
        reference = arms[reference_name(name)].records
        seeds = [
            [100 * (own / other - 1) for own, other in zip(_smoothed(record), _smoothed(reference[seed]), strict=False)]
            for seed, record in arm.records.items()
            if seed in reference
        ]
        means = [statistics.fmean(each) for each in zip(*seeds, strict=False)]
        panel.plot(_tokens(trained, arm, len(means)), means, linewidth=0.9, **styles[name])
    panel.axhline(0.0, color="gray", linewidth=0.8)
    panel.set_title(f"training loss beside {REFERENCE} of the same seeds", fontsize="small", loc="left")
    panel.set(xlabel="million tokens", ylabel="%")


def _draw_heldout(
    panel: Any, arms: Mapping[str, ArmResult], compared: Mapping[str, ArmResult], styles: Mapping[str, Any]
) -> None:
    """Dots for seeds, a bar for their mean, and a line as in the curves; the least loss stands highest."""
    found = {name: arm.differences(arms[reference_name(name)]) for name, arm in compared.items()}
    shown = sorted(((statistics.fmean(each), name) for name, each in found.items() if each), reverse=True)
    for place, (mean, name) in enumerate(shown):
        color = styles[name]["color"]
        panel.plot(found[name], [place] * len(found[name]), "o", color=color, markersize=4)
        panel.plot([mean], [place], "|", color=color, markersize=12, markeredgewidth=2)
        panel.axhline(place, linewidth=0.6, alpha=0.6, **styles[name])
    panel.axvline(0.0, color="gray", linewidth=0.8)
    labels = [f"{label(name)} ({arms[name].latest('bytes'):.3g})" for _, name in shown]
    panel.set_yticks(range(len(shown)), labels, fontsize="small")
    panel.set_ylim(-0.7, max(1, len(shown)) - 0.3)
    title = f"held-out loss beside {REFERENCE} of the same seed; in brackets bytes a parameter"
    panel.set_title(title, fontsize="small", loc="left")
    panel.set(xlabel="%")


def _tokens(trained: TrainedOn, arm: ArmResult, points: int) -> list[float]:
    """Million tokens at each point of a curve."""
    step = trained.tokens / max(1, len(next(iter(arm.records.values()))["losses"])) / 1e6
    return [step * (at + SMOOTH) for at in range(points)]


def _smoothed(record: Record) -> list[float]:
    return list(_means(record["losses"]))


def _means(losses: Sequence[float]) -> Iterator[float]:
    """Of each `SMOOTH` in a row, or of all if there are fewer."""
    size = min(SMOOTH, len(losses))
    return (statistics.fmean(losses[last - size : last]) for last in range(max(1, size), len(losses) + 1))
