"""The page of `quantshard report`: one HTML file that asks nobody for anything.

Its script, the files of `page/` one after the other, draws the charts as SVG and the maps on canvases, from the numbers
in the page. It is our own, of 500 lines: Plotly's and Bokeh's take most of the 5 MB that a report may have, and seconds
of a phone, and a smaller one would be a minified copy here that nobody updates. Two kinds of pictures are all that is
needed.

A run may be anybody's, and its texts are in the page: the template escapes all of them, the numbers are JSON that can
end no element, and the page's own policy lets no other script run than the one whose digest it names, nor any request
be made.
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
"""By which a file is known as a report, which another may replace."""

_FOLDER = Path(__file__).parent / "page"
_SCRIPTS = ("base.js", "charts.js", "maps.js")


def is_report(head: bytes) -> bool:
    """Whether a file that begins so is a report."""
    return MARK.encode() in head


def render(runs: Sequence[RunHistory], now: datetime | None = None) -> str:
    """The page that compares some runs. `now`: the time in its head."""
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
        style=(_FOLDER / "page.css").read_text(encoding="utf-8"),
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
    """The runs' names; of those that have one name, what they were named as."""
    counts = Counter(run.name for run in runs)
    return [printable(run.name if counts[run.name] == 1 else run.where)[:200] for run in runs]


def _by_name(tables: Sequence[Mapping[str, object]]) -> list[tuple[str, list[object]]]:
    """Rows of a table that has a column for each run; those that say something of any."""
    names = dict.fromkeys(name for table in tables for name in table)
    rows = [(name, [table.get(name, summary.NONE) for table in tables]) for name in names]
    return [(name, cells) for name, cells in rows if set(map(str, cells)) != {summary.NONE}]
