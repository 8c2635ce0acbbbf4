"""Plot the losses of arms of `convergence_table.py` that were trained on the same tokens."""

from __future__ import annotations

import re
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.convergence_table import REFERENCE, ArmResult, TrainedOn, reference_name

SMOOTH = 10
"""Number of recorded losses that a point of a curve averages."""

_BY_LAYER = re.compile(r"(?:[^\s,=]+=[^\s,]+(?:,(?=\S)|))+")
_DASHES = ("-", "--", ":")


def draw(file: Path, trained: TrainedOn, arms: Mapping[str, ArmResult]) -> None:
    """Plot training losses by tokens, their differences from BF16 with the same seeds and optimizer, and the
    differences of held-out losses: each seed and the mean."""
    import matplotlib  # slow to import
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
    """Shorten the name of an arm with recipes by layer: `nvfp4; current: layers 0, 1`."""
    match = _BY_LAYER.match(arm)
    if match is None:
        return arm
    patterns: dict[str, list[str]] = {}
    for pattern, _, recipe in (pair.partition("=") for pair in match[0].split(",")):
        patterns.setdefault(recipe, []).append(pattern)
    exceptions = "; ".join(f"{recipe}: {_layers(names)}" for recipe, names in patterns.items() if "*" not in names)
    default = next((recipe for recipe, names in patterns.items() if "*" in names), "bf16")
    return f"{default}; {exceptions}{arm[match.end() :]}"


def _layers(patterns: Sequence[str]) -> str:
    numbers = [pattern.removeprefix("layers.") for pattern in patterns if pattern.startswith("layers.")]
    names = [pattern for pattern in patterns if not pattern.startswith("layers.")]
    return ", ".join([f"layers {', '.join(numbers)}"] * bool(numbers) + names)


def _draw_losses(panel: Any, trained: TrainedOn, arms: Mapping[str, ArmResult], styles: Mapping[str, Any]) -> None:
    for name, arm in arms.items():
        seeds = [_smooth(record["losses"]) for record in arm.records.values()]
        losses = [statistics.fmean(point) for point in zip(*seeds, strict=False)]
        panel.plot(_million_tokens(trained, arm, len(losses)), losses, linewidth=0.9, **styles[name])
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
        seeds = []
        for seed in arm.records.keys() & reference.keys():
            pairs = zip(_smooth(arm.records[seed]["losses"]), _smooth(reference[seed]["losses"]), strict=False)
            seeds.append([100 * (loss / reference_loss - 1) for loss, reference_loss in pairs])
        means = [statistics.fmean(point) for point in zip(*seeds, strict=False)]
        panel.plot(_million_tokens(trained, arm, len(means)), means, linewidth=0.9, **styles[name])
    panel.axhline(0.0, color="gray", linewidth=0.8)
    panel.set_title(f"training loss relative to {REFERENCE} of the same seeds", fontsize="small", loc="left")
    panel.set(xlabel="million tokens", ylabel="%")


def _draw_heldout(
    panel: Any, arms: Mapping[str, ArmResult], compared: Mapping[str, ArmResult], styles: Mapping[str, Any]
) -> None:
    """Draw dots for seeds, a bar for their mean, and a line in the style of the curves, the lowest loss on top."""
    differences = {name: arm.differences(arms[reference_name(name)]) for name, arm in compared.items()}
    rows = sorted(((statistics.fmean(values), name) for name, values in differences.items() if values), reverse=True)
    for y, (mean, name) in enumerate(rows):
        color = styles[name]["color"]
        panel.plot(differences[name], [y] * len(differences[name]), "o", color=color, markersize=4)
        panel.plot([mean], [y], "|", color=color, markersize=12, markeredgewidth=2)
        panel.axhline(y, linewidth=0.6, alpha=0.6, **styles[name])
    panel.axvline(0.0, color="gray", linewidth=0.8)
    labels = [f"{label(name)} ({arms[name].latest('bytes'):.3g})" for _, name in rows]
    panel.set_yticks(range(len(rows)), labels, fontsize="small")
    panel.set_ylim(-0.7, max(1, len(rows)) - 0.3)
    title = f"held-out loss relative to {REFERENCE} of the same seed; in brackets bytes per parameter"
    panel.set_title(title, fontsize="small", loc="left")
    panel.set(xlabel="%")


def _million_tokens(trained: TrainedOn, arm: ArmResult, points: int) -> list[float]:
    """Return the x coordinates of a curve."""
    step = trained.tokens / max(1, len(next(iter(arm.records.values()))["losses"])) / 1e6
    return [step * (index + SMOOTH) for index in range(points)]


def _smooth(losses: Sequence[float]) -> list[float]:
    """Average each `SMOOTH` consecutive losses, or all if there are fewer."""
    size = min(SMOOTH, len(losses))
    return [statistics.fmean(losses[last - size : last]) for last in range(max(1, size), len(losses) + 1)]
