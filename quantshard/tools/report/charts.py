"""The numbers of a report's charts and maps, few enough for a page: what its script draws."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quantshard.tools.report.heat_maps import StatisticsReader
from quantshard.tools.report.history import HELDOUT, LOSS, MEMORY, SECONDS, SPEED, TOKENS, RunHistory
from quantshard.tools.report.metrics import step_of
from quantshard.tools.report.thinning import thinned

_POINTS, _MOST_POINTS, _LEAST_POINTS = 160_000, 2_000, 100
"""Points of all curves of a page, and the most and the fewest of one. A point takes about 17 bytes."""

_CELLS, _FEWEST_COLUMNS = 250_000, 8
"""Cells of all maps of a page, of about 6 bytes, and the fewest columns that a map is merged into."""

_AXIS_POINTS = 500
_MEANS, _NOISE = 150, 0.004
"""Means of a noisy curve, and the change from step to step, as a share of all that it changes, that is noise."""

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
"""The charts in their order; others come behind, by their names."""

_UNITS = {"mfu": "share", MEMORY: "bytes"}
_MOST_CURVES = 6
"""Of one run in one chart."""


def page_data(runs: Sequence[RunHistory], names: Sequence[str]) -> dict[str, Any]:
    """All that the script of a page draws, as JSON can write it. `names`: those by which the runs are told apart."""
    charts = _charts(runs)
    keys = [curve for chart in charts for curve in chart["curves"]]
    there = sum(key in run.metrics.columns for run in runs for key in keys)
    most = max(_LEAST_POINTS, min(_MOST_POINTS, _POINTS // max(1, there)))
    return {
        "charts": charts,
        "runs": [_run_data(run, name, keys, most) for run, name in zip(runs, names, strict=True)],
        "maps": _maps(runs),
    }


def as_script(data: dict[str, Any]) -> str:
    """JSON that may stand in an element of a page: none of its texts can end that."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _charts(runs: Sequence[RunHistory]) -> list[dict[str, Any]]:
    found = dict.fromkeys(name for run in runs for name in run.metrics.columns if name != TOKENS)
    groups: dict[str, list[str]] = {name: [name] for name in _TITLES if name in found}
    for name in found:
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
            kept = thinned(values, most)
            curves[key] = [
                _steps(steps[kept]),
                _short(values[kept]),
                _means(steps, values) if most > 4 * _MEANS else None,
            ]
        if key in run.metrics.columns and len(wrong := run.metrics.not_finite(key)):
            bad[key] = wrong[:: max(1, len(wrong) // _LEAST_POINTS)].tolist()
    restarts = sorted({step for start in run.starts if (step := step_of(start))})
    axes = {"tokens": _axis(run, run.tokens()), "time": _axis(run, run.seconds())}
    return {"name": name, "curves": curves, "bad": bad, "restarts": restarts[-_LEAST_POINTS:], "axes": axes}


def _steps(steps: NDArray[np.int64]) -> list[int] | dict[str, int]:
    """As the page has them: many that are equally far apart by the first and their distance."""
    apart = np.diff(steps)
    if len(steps) > _LEAST_POINTS and (apart == apart[0]).all():
        return {"first": int(steps[0]), "apart": int(apart[0])}
    return list(steps.tolist())


def _means(steps: NDArray[np.int64], values: NDArray[np.float64]) -> list[list[float]] | None:
    """The curve of means of equally many steps, for one that would be a band of noise; None for a smooth one."""
    width = len(values) // _MEANS
    if width < 3 or np.abs(np.diff(values)).mean() < _NOISE * np.ptp(values):
        return None
    grids = (each[: len(values) // width * width].reshape(-1, width).mean(1) for each in (steps, values))
    return [_short(each) for each in grids]


def _axis(run: RunHistory, values: NDArray[np.float64] | None) -> list[list[float]] | None:
    """Points of a curve over steps that only rises, between which the script draws straight lines."""
    if values is None or not len(values) or not np.isfinite(values).all():
        return None
    kept = np.unique(np.linspace(0, len(values) - 1, min(len(values), _AXIS_POINTS)).astype(np.int64))
    return [run.metrics.steps[kept].tolist(), _short(values[kept])]


def _short(values: NDArray[np.float64]) -> list[float]:
    """Six digits of each, whole numbers without a point."""
    rounded = (float(f"{value:.6g}") for value in values)
    return [int(value) if value.is_integer() and abs(value) < 1e15 else value for value in rounded]


def _maps(runs: Sequence[RunHistory]) -> list[dict[str, Any] | None]:
    sizes = [len(run.statistics.maps) for run in runs if run.statistics.columns]
    room = _CELLS // max(1, sum(sizes))
    return [_map_data(run.statistics, room) if run.statistics.columns else None for run in runs]


def _map_data(read: StatisticsReader, room: int) -> dict[str, Any]:
    """One run's maps; `room`: cells that each may have."""
    names = list(read.names)[: max(1, room // _FEWEST_COLUMNS)]
    columns = read.merged(max(_FEWEST_COLUMNS, room // len(names)))
    maps = []
    for role, statistic in read.maps:
        cells = [[_cell(each.values.get((role, statistic), {}).get(name)) for each in columns] for name in names]
        used = [at for at, row in enumerate(cells) if any(cell is not None for cell in row)]
        maps.append({"role": role, "statistic": statistic, "rows": used, "cells": [cells[at] for at in used]})
    return {"names": names, "steps": [each.first for each in columns], "maps": maps}


def _cell(value: float | None) -> float | str | None:
    """Three digits; a text for what is not finite."""
    if value is None:
        return None
    return float(f"{value:.3g}") if math.isfinite(value) else "x"
