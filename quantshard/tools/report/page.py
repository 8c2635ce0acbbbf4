"""The page of `quantshard report`: one self-contained HTML file.

uPlot (MIT license, 50 KB, `page/uPlot.iife.min.js`) draws the charts, with zoom and hover. `page/page.js` passes it the
numbers of the page.

The texts of an untrusted run are in the page. The template therefore escapes them, the numbers are JSON that cannot
close an HTML element, and the Content-Security-Policy allows only the script with the given digest and no requests.
"""

import base64
import hashlib
import json
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from numpy.typing import NDArray

from quantshard.errors import printable
from quantshard.readable import human_bytes
from quantshard.tools.report import history
from quantshard.tools.report.records import ExpertTable, StatisticsReader, step_of
from quantshard.version import __version__

MARK = '<meta name="generator" content="quantshard report">'
"""Marker that identifies a file as a report, which a newer report can replace."""

_HEAD_BYTES = 4096
_FOLDER = Path(__file__).parent / "page"
_SCRIPTS = ("uPlot.iife.min.js", "page.js")
_STYLES = ("uPlot.min.css", "page.css")


def is_report(content: bytes) -> bool:
    return MARK.encode() in content[:_HEAD_BYTES]


def render(runs: Sequence[history.RunHistory], now: datetime | None = None) -> str:
    """Render the HTML page that compares `runs`. `now`: creation time shown in the page header."""
    names = labels(runs)
    script = "\n".join((_FOLDER / name).read_text(encoding="utf-8") for name in _SCRIPTS)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    environment = Environment(
        loader=FileSystemLoader(_FOLDER), autoescape=True, undefined=StrictUndefined, trim_blocks=True,
        lstrip_blocks=True,
    )  # fmt: skip
    environment.filters["said"] = lambda value: printable(said(value))
    # Texts cannot close the script element.
    data = json.dumps(page_data(runs, names), separators=(",", ":"), allow_nan=False)
    data = data.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
    return environment.get_template("page.html").render(
        mark=MARK,
        script=script,
        style="\n".join((_FOLDER / name).read_text(encoding="utf-8") for name in _STYLES),
        policy=f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'",
        data=data,
        runs=list(zip(names, runs, strict=True)),
        figures=[row for row in _by_name([final_figures(run) for run in runs]) if set(row[1]) != {NONE}],
        changed=differences([run.config | environment_of(run) for run in runs]),
        settings=[run.config | environment_of(run) for run in runs],
        made=f"{now or datetime.now(timezone.utc):%Y-%m-%d %H:%M} UTC",
        version=__version__,
    )


def labels(runs: Sequence[history.RunHistory]) -> list[str]:
    counts = Counter(run.name for run in runs)
    return [printable(run.name if counts[run.name] == 1 else run.where)[:200] for run in runs]


def _by_name(tables: Sequence[Mapping[str, Any]]) -> list[tuple[str, list[str]]]:
    names = dict.fromkeys(name for table in tables for name in table)
    return [(name[:_LONGEST], [said(table.get(name, NONE)) for table in tables]) for name in names]


_LONGEST = 300
_MOST_ROWS = 500
NONE = "–"


def final_figures(run: history.RunHistory) -> dict[str, str]:
    """Figures for the comparison of runs, by title. A missing figure is `NONE`."""
    done, planned = int(run.metrics.steps[-1]) if len(run.metrics.steps) else 0, history.planned_steps(run.config)
    state = "" if planned is not None and done >= planned else ", being trained" if run.is_trained else ""
    steps, heldout = run.metrics.there(history.HELDOUT)

    def figure(column: str | NDArray[np.float64] | None, text: Callable[[NDArray[np.float64]], str]) -> str:
        values = run.metrics.there(column)[1] if isinstance(column, str) else column
        return NONE if values is None or not len(values) else text(values)

    return {
        "steps": f"{done:,}" + (f" of {planned:,}" if planned else "") + state,
        "last loss": figure(history.LOSS, lambda losses: f"{losses[-1]:.4f}"),
        "last held-out loss": figure(heldout, lambda losses: f"{losses[-1]:.4f}"),
        "best held-out loss": figure(heldout, lambda losses: f"{losses.min():.4f} (step {steps[losses.argmin()]:,})"),
        "tokens": figure(run.tokens(), lambda tokens: f"{tokens[-1]:,.0f}"),
        "tokens/s (median)": figure(history.SPEED, lambda speeds: f"{np.median(speeds):,.0f}"),
        "MFU (median)": figure("mfu", lambda shares: f"{np.median(shares):.1%}"),
        "peak memory": figure(history.MEMORY, lambda sizes: human_bytes(int(sizes.max()))),
        "time in steps": figure(run.seconds(), lambda passed: str(timedelta(seconds=round(min(passed[-1], 1e9))))),
        "skipped steps": figure("skipped_steps", lambda counts: f"{counts[-1]:,.0f}"),
        "starts": str(len(run.starts)) if run.starts else NONE,
        "alarms": ", ".join(f"{count} {kind}" for kind, count in run.statistics.counts.items()) or "none",
    }


def differences(tables: Sequence[Mapping[str, Any]]) -> list[tuple[str, list[str]]]:
    return [row for row in _by_name(tables) if len(set(row[1])) > 1][:_MOST_ROWS]


def environment_of(run: history.RunHistory) -> dict[str, Any]:
    start = run.starts[-1] if run.starts else {}
    result: dict[str, Any] = {name: start[name] for name in ("processes", "mesh", "packing") if name in start}
    environment = start.get("environment")
    for name, value in environment.items() if isinstance(environment, Mapping) else ():
        result |= value if isinstance(value, Mapping) else {name: value}
    return result


def said(value: object) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, list | tuple):
        value = ", ".join(str(item)[:_LONGEST] for item in value[:_LONGEST])
    text = str(value)
    return text if len(text) <= _LONGEST else text[: _LONGEST - 1] + "…"


_POINTS, _MARKS = 2_000, 100
"""Maximum number of points per curve, and of marks of resumes and of values that are not finite."""

_CELLS = 250_000
"""Cells of all tables of statistics in a page, about 6 bytes each."""

_AXIS_POINTS = 500
_MEANS, _NOISE = 150, 0.004
"""Number of means drawn for a noisy curve, and the noise threshold: mean change per step / range of the curve."""

_TITLES = {
    history.LOSS: "Loss",
    history.SPEED: "Tokens per second",
    "mfu": "Model FLOPs utilization (MFU)",
    history.MEMORY: "Memory of the first process, peak",
    "grad_norm": "Norm of the gradient",
    "lr": "Learning rate",
    "skipped_steps": "Skipped steps",
    "data_wait_s": "Seconds of a step that waited for data",
}
"""Titles of the charts, in display order; other charts follow under their own names."""

_UNITS = {"mfu": "share", history.MEMORY: "bytes"}


def page_data(runs: Sequence[history.RunHistory], names: Sequence[str]) -> dict[str, Any]:
    """JSON-serializable data for the script of a page. `names`: unique labels of the runs."""
    charts = _charts(runs)
    keys = [curve for chart in charts for curve in chart["curves"]]
    room = _CELLS // max(1, sum(len(run.statistics.maps) + len(run.statistics.tables) for run in runs))
    return {
        "charts": charts,
        "runs": [_run_data(run, name, keys) for run, name in zip(runs, names, strict=True)],
        "maps": [_map_data(run.statistics, room) for run in runs],
    }


def thinned(values: NDArray[np.float64], most: int) -> NDArray[np.int64]:
    """Return at most `most` (>= 4) ascending indices of a curve: the extremes of equal buckets, so no spike is lost."""
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


def _charts(runs: Sequence[history.RunHistory]) -> list[dict[str, Any]]:
    names = dict.fromkeys(name for run in runs for name in run.metrics.columns)
    titles = {name: _TITLES.get(name, name) for name in (*_TITLES, *names) if name in names and name != history.HELDOUT}
    curves = {history.LOSS: [history.LOSS, history.HELDOUT]}
    charts = ((title, curves.get(name, [name]), _UNITS.get(name, "")) for name, title in titles.items())
    return [{"title": title, "curves": names, "unit": unit} for title, names, unit in charts]


def _run_data(run: history.RunHistory, name: str, keys: list[str]) -> dict[str, Any]:
    curves, bad = {}, {}
    for key in keys:
        steps, values = run.metrics.there(key)
        if len(steps):
            indices = thinned(values, _POINTS)
            curves[key] = [steps[indices].tolist(), _short(values[indices]), _means(steps, values)]
        if key in run.metrics.columns and len(wrong := run.metrics.steps[np.isinf(run.metrics.columns[key])]):
            bad[key] = wrong[:: max(1, len(wrong) // _MARKS)].tolist()
    restarts = sorted({step for start in run.starts if (step := step_of(start))})
    axes = {"tokens": _axis(run, run.tokens()), "time": _axis(run, run.seconds())}
    return {"name": name, "curves": curves, "bad": bad, "restarts": restarts[-_MARKS:], "axes": axes}


def _means(steps: NDArray[np.int64], values: NDArray[np.float64]) -> list[list[float]] | None:
    """Means over windows of equally many steps for a noisy curve, or None for a smooth curve."""
    width = len(values) // _MEANS
    if width < 3 or np.abs(np.diff(values)).mean() < _NOISE * np.ptp(values):
        return None
    means = (array[: len(values) // width * width].reshape(-1, width).mean(1) for array in (steps, values))
    return [_short(array) for array in means]


def _axis(run: history.RunHistory, values: NDArray[np.float64] | None) -> list[list[float]] | None:
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
    """Statistics of a run by role, statistic and name, those by expert first. `room`: most cells per table."""
    samples = read.samples
    names = list(read.names)[: max(1, room // max(1, len(samples)))]
    maps = [_expert_map(key, table, names, room) for key, table in read.tables.items()]
    for role, statistic in read.maps:
        cells = [[_cell(values.get((role, statistic), {}).get(name)) for _, values in samples] for name in names]
        rows = [[index, *row] for index, row in enumerate(cells) if any(cell is not None for cell in row)]
        maps.append({"role": role, "statistic": statistic, "rows": rows})
    return {"names": names, "steps": [step for step, _ in samples], "maps": maps}


def _expert_map(key: tuple[str, str], table: ExpertTable, names: Sequence[str], room: int) -> dict[str, Any]:
    (role, statistic), (step, values) = key, table
    width = max(map(len, values.values()))
    rows = [[index, *map(_cell, values[name])] for index, name in enumerate(names) if name in values]
    title, columns = f"{statistic} by expert, step {step:,}", [f"expert {number}" for number in range(width)]
    return {"role": role, "statistic": title, "rows": rows[: room // max(1, width)], "columns": columns}


def _cell(value: float | None) -> float | str | None:
    """Round to three digits; a value that is not finite becomes "x"."""
    if value is None:
        return None
    return float(f"{value:.3g}") if math.isfinite(value) else "x"
