"""Data of the charts and tables of statistics in a report, for the script of the page."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quantshard.tools.report.history import HELDOUT, LOSS, MEMORY, SECONDS, SPEED, TOKENS, RunHistory
from quantshard.tools.report.metrics import step_of
from quantshard.tools.report.samples import StatisticsReader

_POINTS, _MOST_POINTS, _LEAST_POINTS = 160_000, 2_000, 100
"""Points of all curves in a page, and the maximum and minimum per curve. A point takes about 17 bytes."""

_CELLS = 250_000
"""Cells of all tables of statistics in a page, about 6 bytes each."""

_AXIS_POINTS = 500
_MEANS, _NOISE = 150, 0.004
"""Number of means drawn for a noisy curve, and the noise threshold: mean change per step / range of the curve."""

_TITLES = {
    LOSS: "Loss",
    SPEED: "Tokens per second",
    "mfu": "Model FLOPs utilization (MFU)",
    MEMORY: "Memory of the first process, peak",
    "grad_norm": "Norm of the gradient",
    "lr": "Learning rate",
    "skipped_steps": "Skipped steps",
    SECONDS: "Seconds of a step",
    "data_wait_s": "Seconds of a step that waited for data",
}
"""Titles of the charts, in display order; other charts follow under their own names."""

_UNITS = {"mfu": "share", MEMORY: "bytes"}
_MOST_CURVES = 6
"""Maximum number of memory curves in one chart."""


def page_data(runs: Sequence[RunHistory], names: Sequence[str]) -> dict[str, Any]:
    """JSON-serializable data for the script of a page. `names`: unique labels of the runs."""
    charts = _charts(runs)
    keys = [curve for chart in charts for curve in chart["curves"]]
    num_curves = sum(key in run.metrics.columns for run in runs for key in keys)
    most = max(_LEAST_POINTS, min(_MOST_POINTS, _POINTS // max(1, num_curves)))
    room = _CELLS // max(1, sum(len(run.statistics.maps) for run in runs))
    return {
        "charts": charts,
        "runs": [_run_data(run, name, keys, most) for run, name in zip(runs, names, strict=True)],
        "maps": [_map_data(run.statistics, room) for run in runs],
    }


def as_script(data: dict[str, Any]) -> str:
    """Serialize to JSON that is safe inside a script element: texts cannot close the element."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def thinned(values: NDArray[np.float64], most: int) -> NDArray[np.int64]:
    """Ascending int64 indices of at most `most` points (>= 4) that represent a curve [N].

    They include the minimum and maximum of each of equally wide buckets, so that no spike is lost.
    """
    count = len(values)
    if count <= most:
        return np.arange(count, dtype=np.int64)
    width = -(-count // max(1, (most - 2) // 2))
    full = count // width * width
    grid = values[:full].reshape(-1, width)
    starts = np.arange(0, full, width)
    indices = [starts + grid.argmin(1), starts + grid.argmax(1), np.array([0, count - 1])]
    if full < count:
        indices.append(np.array([full + values[full:].argmin(), full + values[full:].argmax()]))
    return np.unique(np.concatenate(indices)).astype(np.int64)


def _charts(runs: Sequence[RunHistory]) -> list[dict[str, Any]]:
    names = dict.fromkeys(name for run in runs for name in run.metrics.columns if name != TOKENS)
    groups: dict[str, list[str]] = {name: [name] for name in _TITLES if name in names}
    for name in names:
        if name == HELDOUT:
            groups.setdefault(LOSS, []).append(name)
        elif _is_memory(name) and name != MEMORY and len(groups.get(MEMORY, ())) < _MOST_CURVES:
            groups.setdefault(MEMORY, []).append(name)
        elif name not in _TITLES:
            groups[name] = [name]
    return [
        {
            "title": _TITLES.get(name, name),
            "curves": curves,
            "unit": _UNITS.get(name, "bytes" if _is_memory(name) else ""),
        }
        for name, curves in groups.items()
    ]


def _is_memory(name: str) -> bool:
    return name.startswith("memory") and name.endswith("bytes")


def _run_data(run: RunHistory, name: str, keys: list[str], most: int) -> dict[str, Any]:
    curves, bad = {}, {}
    for key in keys:
        steps, values = run.metrics.there(key)
        if len(steps):
            indices = thinned(values, most)
            means = _means(steps, values) if most > 4 * _MEANS else None
            curves[key] = [steps[indices].tolist(), _short(values[indices]), means]
        if key in run.metrics.columns and len(wrong := run.metrics.not_finite(key)):
            bad[key] = wrong[:: max(1, len(wrong) // _LEAST_POINTS)].tolist()
    restarts = sorted({step for start in run.starts if (step := step_of(start))})
    axes = {"tokens": _axis(run, run.tokens()), "time": _axis(run, run.seconds())}
    return {"name": name, "curves": curves, "bad": bad, "restarts": restarts[-_LEAST_POINTS:], "axes": axes}


def _means(steps: NDArray[np.int64], values: NDArray[np.float64]) -> list[list[float]] | None:
    """Means over windows of equally many steps for a noisy curve, or None for a smooth curve."""
    width = len(values) // _MEANS
    if width < 3 or np.abs(np.diff(values)).mean() < _NOISE * np.ptp(values):
        return None
    means = (array[: len(values) // width * width].reshape(-1, width).mean(1) for array in (steps, values))
    return [_short(array) for array in means]


def _axis(run: RunHistory, values: NDArray[np.float64] | None) -> list[list[float]] | None:
    """Points of a monotonic x axis (tokens or time) over steps, which the script interpolates linearly."""
    if values is None or not len(values) or not np.isfinite(values).all():
        return None
    indices = np.unique(np.linspace(0, len(values) - 1, min(len(values), _AXIS_POINTS)).astype(np.int64))
    return [run.metrics.steps[indices].tolist(), _short(values[indices])]


def _short(values: NDArray[np.float64]) -> list[float]:
    """Round values to six digits, and write whole numbers as int."""
    rounded = (float(f"{value:.6g}") for value in values)
    return [int(value) if value.is_integer() and abs(value) < 1e15 else value for value in rounded]


def _map_data(read: StatisticsReader, room: int) -> dict[str, Any]:
    """Statistics of one run by role, statistic and name. `room`: maximum number of cells per table."""
    samples = read.samples
    names = list(read.names)[: max(1, room // max(1, len(samples)))]
    maps = []
    for role, statistic in read.maps:
        cells = [[_cell(values.get((role, statistic), {}).get(name)) for _, values in samples] for name in names]
        rows = [[index, *row] for index, row in enumerate(cells) if any(cell is not None for cell in row)]
        maps.append({"role": role, "statistic": statistic, "rows": rows})
    return {"names": names, "steps": [step for step, _ in samples], "maps": maps}


def _cell(value: float | None) -> float | str | None:
    """Round to three digits; a value that is not finite becomes "x"."""
    if value is None:
        return None
    return float(f"{value:.3g}") if math.isfinite(value) else "x"
