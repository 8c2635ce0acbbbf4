"""The page of `quantshard report`: one self-contained HTML file.

uPlot (MIT license, 50 KB, `page/uPlot.iife.min.js`) draws the charts, with zoom and hover. `page/page.js` passes it the
numbers of the page.

The texts of an untrusted run are in the page. The template therefore escapes them, the numbers are JSON that cannot
close an HTML element, and the Content-Security-Policy allows only the script with the given digest and no requests.
"""

from __future__ import annotations

import base64
import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from quantshard.errors import printable
from quantshard.readable import human_bytes
from quantshard.tools.report import summary
from quantshard.tools.report.charts import as_script, page_data
from quantshard.tools.report.history import RunHistory
from quantshard.version import __version__

MARK = '<meta name="generator" content="quantshard report">'
"""Marker that identifies a file as a report, which a newer report can replace."""

_FOLDER = Path(__file__).parent / "page"
_SCRIPTS = ("uPlot.iife.min.js", "page.js")
_STYLES = ("uPlot.min.css", "page.css")


def is_report(head: bytes) -> bool:
    """Whether `head`, the beginning of a file, belongs to a report."""
    return MARK.encode() in head


def render(runs: Sequence[RunHistory], now: datetime | None = None) -> str:
    """Render the HTML page that compares `runs`. `now`: creation time shown in the page header."""
    names = labels(runs)
    script = "\n".join((_FOLDER / name).read_text(encoding="utf-8") for name in _SCRIPTS)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    environment = Environment(
        loader=FileSystemLoader(_FOLDER),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["bytes"] = lambda size: summary.NONE if size is None else human_bytes(size)
    environment.filters["time"] = summary.said_time
    environment.filters["counted"] = lambda count, one, many: f"{count:,} {one if count == 1 else many}"
    environment.filters["said"] = lambda value: printable(summary.said(value))
    environments = [summary.environment_of(run) for run in runs]
    return environment.get_template("page.html").render(
        mark=MARK,
        script=script,
        style="\n".join((_FOLDER / name).read_text(encoding="utf-8") for name in _STYLES),
        policy=f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'",
        data=as_script(page_data(runs, names)),
        runs=list(zip(names, runs, strict=True)),
        figures=_by_name([summary.final_figures(run) for run in runs]),
        changed=summary.differences([run.config for run in runs]),
        environments=_by_name(environments),
        weights=[summary.weight_rows(run) for run in runs],
        memory=[summary.memory_parts(run) for run in runs],
        made=summary.said_time(now or datetime.now(timezone.utc)),
        version=__version__,
    )


def labels(runs: Sequence[RunHistory]) -> list[str]:
    """Labels of the runs: their names, or the paths given by the user where names are equal."""
    counts = Counter(run.name for run in runs)
    return [printable(run.name if counts[run.name] == 1 else run.where)[:200] for run in runs]


def _by_name(tables: Sequence[Mapping[str, object]]) -> list[tuple[str, list[object]]]:
    """Rows of a table with a column for each run, without rows that are empty for all runs."""
    names = dict.fromkeys(name for table in tables for name in table)
    rows = [(name, [table.get(name, summary.NONE) for table in tables]) for name in names]
    return [(name, cells) for name, cells in rows if set(map(str, cells)) != {summary.NONE}]
