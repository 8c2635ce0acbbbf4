"""Tables of a report: final figures, differing settings, environments, weights and memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NamedTuple

import numpy as np

from quantshard.readable import counted_name, human_bytes, pattern_groups
from quantshard.tools.report.history import HELDOUT, LOSS, MEMORY, SPEED, RunHistory

_LONGEST = 300
_MOST_ROWS = 500
NONE = "–"


class WeightRow(NamedTuple):
    """Storage of one parameter, or of several identical ones, as text."""

    name: str
    shape: str
    format: str
    bytes: str
    gemm: str
    optimizer: str
    fallbacks: str


class MemoryPart(NamedTuple):
    """Memory of the first process used for one purpose, and its share of the peak, 0 to 1."""

    kind: str
    bytes: str
    share: float


def final_figures(run: RunHistory) -> dict[str, str]:
    """Figures for the comparison of runs, by title. A missing figure is `NONE`."""
    losses, heldout = run.metrics.there(LOSS)[1], run.metrics.there(HELDOUT)
    best = int(heldout[1].argmin()) if len(heldout[1]) else 0
    speed, memory, mfu = (run.metrics.there(name)[1] for name in (SPEED, MEMORY, "mfu"))
    skipped, seconds, tokens = run.metrics.there("skipped_steps")[1], run.seconds(), run.tokens()
    return {
        "steps": _progress(run),
        "last loss": f"{losses[-1]:.4f}" if len(losses) else NONE,
        "last held-out loss": f"{heldout[1][-1]:.4f}" if len(heldout[1]) else NONE,
        "best held-out loss": f"{heldout[1][best]:.4f} (step {heldout[0][best]:,})" if len(heldout[1]) else NONE,
        "tokens": f"{tokens[-1]:,.0f}" if tokens is not None and len(tokens) else NONE,
        "tokens/s (median)": f"{np.median(speed):,.0f}" if len(speed) else NONE,
        "MFU (median)": f"{np.median(mfu):.1%}" if len(mfu) else NONE,
        "peak memory": human_bytes(int(memory.max())) if len(memory) else NONE,
        "time in steps": said_seconds(float(seconds[-1])) if seconds is not None and len(seconds) else NONE,
        "skipped steps": f"{skipped[-1]:,.0f}" if len(skipped) else NONE,
        "starts": str(len(run.starts)) if run.starts else NONE,
        "alarms": ", ".join(f"{count} {kind}" for kind, count in run.statistics.counts.items()) or "none",
    }


def _progress(run: RunHistory) -> str:
    done, planned = int(run.metrics.steps[-1]) if len(run.metrics.steps) else 0, run.steps_planned
    state = "" if planned is not None and done >= planned else ", being trained" if run.is_trained else ""
    return f"{done:,}" + (f" of {planned:,}" if planned else "") + state


def said_seconds(seconds: float) -> str:
    """Format a duration in its two largest units: "3 h 05 min"."""
    if seconds < 60:
        return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"
    minutes = int(seconds // 60)
    if minutes < 60:
        return f"{minutes} min {int(seconds % 60):02d} s"
    hours = minutes // 60
    return f"{hours} h {minutes % 60:02d} min" if hours < 48 else f"{hours // 24} d {hours % 24:02d} h"


def differences(tables: Sequence[Mapping[str, Any]]) -> list[tuple[str, list[str]]]:
    """Settings that differ between runs, with the value of every run.

    Paths of data are left out if the digests are equal, because every run has its own folder of tokens.
    """
    names = dict.fromkeys(name for table in tables for name in table)
    digests = {table.get("corpus.sha256") for table in tables}
    if len(digests) == 1 and None not in digests:
        names = {name: None for name in names if name not in ("data", "heldout_data")}
    rows = [(name, [said(table[name]) if name in table else NONE for table in tables]) for name in names]
    return [(name[:_LONGEST], values) for name, values in rows if len(set(values)) > 1][:_MOST_ROWS]


def said(value: object) -> str:
    """Format a value as a table cell."""
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, list | tuple):
        value = ", ".join(str(item)[:_LONGEST] for item in value[:_LONGEST])
    text = str(value)
    return text if len(text) <= _LONGEST else text[: _LONGEST - 1] + "…"


def environment_of(run: RunHistory) -> dict[str, Any]:
    """Environment of the last start: processes, mesh, versions, device, environment variables."""
    start = run.starts[-1] if run.starts else {}
    result: dict[str, Any] = {name: start[name] for name in ("processes", "mesh") if name in start}
    environment = start.get("environment")
    for name, value in environment.items() if isinstance(environment, Mapping) else ():
        result |= value if isinstance(value, Mapping) else {name: value}
    return result


def weight_rows(run: RunHistory) -> list[WeightRow]:
    """Storage and GEMMs of the weights, with identical weights in one row."""
    rows = run.parameters.get("rows")
    weights = [_weight_row(row) for row in (rows if isinstance(rows, list) else ()) if isinstance(row, Mapping)]
    groups = pattern_groups((row.name, row[1:], row) for row in weights)
    return [members[0]._replace(name=counted_name(name, len(members))) for name, members in groups][:_MOST_ROWS]


def _weight_row(row: Mapping[str, Any]) -> WeightRow:
    shape, optimizer, fallbacks = row.get("shape"), row.get("optimizer"), row.get("fallbacks")
    return WeightRow(
        said(row.get("name", "")),
        " x ".join(map(str, shape[:8])) if isinstance(shape, list) else "",
        said(row.get("format", "")),
        human_bytes(count) if (count := _count(row, "code_bytes") + _count(row, "scale_bytes")) else NONE,
        said(row.get("gemm") or NONE),
        said([f"{name} {kind}" for name, kind in optimizer.items()]) if isinstance(optimizer, Mapping) else "",
        said(fallbacks) if isinstance(fallbacks, list) else "",
    )


def memory_parts(run: RunHistory) -> list[MemoryPart]:
    """Breakdown of the first process's peak memory, empty if the run did not record its parameters.

    The remainder up to the peak is attributed to activations, gradients and libraries.
    """
    totals = run.parameters.get("totals")
    peak = run.metrics.there(MEMORY)[1]
    if not isinstance(totals, Mapping) or not len(peak):
        return []
    kinds = {"codes of weights": "code_bytes", "scales": "scale_bytes", "optimizer states": "optimizer_bytes"}
    counts = {kind: _count(totals, name) for kind, name in kinds.items()}
    most = max(int(peak.max()), 1)
    counts["activations, gradients, libraries"] = max(0, most - sum(counts.values()))
    return [MemoryPart(kind, human_bytes(count), min(1.0, count / most)) for kind, count in counts.items()]


def _count(table: Mapping[str, Any], name: str) -> int:
    value = table.get(name)
    return value if type(value) is int and 0 <= value < 1 << 62 else 0


def said_age(saved_at: datetime, now: datetime) -> str:
    """Format the age of a checkpoint, for the live view."""
    return f"{said_seconds(max(0.0, (now - saved_at).total_seconds()))} ago"


def said_time(moment: datetime | None) -> str:
    """Format a UTC time to the minute."""
    return NONE if moment is None else f"{moment:%Y-%m-%d %H:%M} UTC"
