"""A pytest plugin: each test that begins, passes or fails has a line in a file at once, so that a run may be cut off.

    pytest --journal FILE [--minutes 8]             a new journal; after 8 minutes no further test begins
    pytest --journal FILE --left [--minutes 8]      goes on: the tests that have not ended, those that were cut off last
    pytest --journal FILE --failed                  the tests that failed
    python -m tests.journal FILE                    what failed, with the first lines of each error, and was cut off

Lines are JSON: `{"test": ..., "outcome": "began" | "passed" | "skipped" | "failed", "seconds": ..., "error": ...}`. The
last line of a test counts.
"""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

FIRST, LAST = 8, 8
"""Lines of an error that are kept."""

Rows = dict[str, dict[str, Any]]
"""The line that counts, by test."""


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("journal")
    group.addoption("--journal", type=Path, help="a file that gets a line for each test as it begins and ends")
    group.addoption("--left", action="store_true", help="only the tests that have not ended by the journal")
    group.addoption("--failed", action="store_true", help="only the tests that failed by the journal")
    group.addoption("--minutes", type=float, help="begin no test later")


def pytest_configure(config: pytest.Config) -> None:
    file, left, failed = (config.getoption(name) for name in ("journal", "left", "failed"))
    if (left or failed) and (file is None or not file.is_file()):
        raise pytest.UsageError(f"--{'left' if left else 'failed'}: there is no journal {file or '(--journal FILE)'}")
    if left and failed:
        raise pytest.UsageError("--left and --failed leave no test")
    config.pluginmanager.register(Selection(read(file) if left or failed else {}, failed, config.getoption("minutes")))
    if file is not None and not hasattr(config, "workerinput"):  # workers of pytest-xdist report to the one process
        file.parent.mkdir(parents=True, exist_ok=True)
        config.pluginmanager.register(Journal(file, anew=not (left or failed)))


class Selection:
    """Which tests run, and until when; the same in each worker of pytest-xdist."""

    def __init__(self, rows: Rows, failed: bool, minutes: float | None) -> None:
        self.rows, self.failed, self.minutes = rows, failed, minutes
        self.start = time.monotonic()

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        if not self.rows and not self.failed:
            return
        found: dict[bool, list[pytest.Item]] = {True: [], False: []}
        for item in items:
            outcome = self.outcome(item)
            found[outcome == "failed" if self.failed else outcome in ("", "began")].append(item)
        items[:] = sorted(found[True], key=lambda item: self.outcome(item) == "began")
        config.hook.pytest_deselected(items=found[False])

    def outcome(self, item: pytest.Item) -> str:
        return str(self.rows.get(item.nodeid, {}).get("outcome", ""))

    def pytest_runtest_teardown(self, item: pytest.Item) -> None:
        if self.minutes is not None and time.monotonic() > self.start + 60 * self.minutes:
            item.session.shouldstop = f"--minutes {self.minutes:g} are over"


class Journal:
    """Writes the file."""

    def __init__(self, file: Path, anew: bool) -> None:
        self.file = file
        with file.open("w" if anew else "a", encoding="utf-8") as opened:
            opened.write("" if anew else "\n")  # the last line may have been cut off

    def write(self, test: str, outcome: str, **more: Any) -> None:
        with self.file.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"test": test, "outcome": outcome} | more) + "\n")

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.write(nodeid, "began")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.write(report.nodeid, "failed", seconds=round(report.duration, 1), error=error(report))
        elif report.when == "call" or report.skipped:
            self.write(report.nodeid, report.outcome, seconds=round(report.duration, 1))

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.write(report.nodeid, "failed", error=error(report))

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        terminalreporter.section(f"journal {self.file}")
        terminalreporter.write_line(summary(read(self.file))[0])


def error(report: pytest.TestReport | pytest.CollectReport) -> str:
    """Where, and the first and last lines of a failure's message; those of a rank end with what it raised."""
    crash = getattr(report.longrepr, "reprcrash", None)
    text = report.longreprtext if crash is None else f"{crash.path}:{crash.lineno}: {crash.message}"
    lines = text.splitlines()
    if len(lines) > FIRST + LAST:
        lines[FIRST:-LAST] = [f"... {len(lines) - FIRST - LAST} lines"]
    return "\n".join(line[:300] for line in lines)


def read(file: Path) -> Rows:
    """Of a file in which lines may have been cut off."""
    rows: Rows = {}
    for line in file.read_text(encoding="utf-8").splitlines():
        if line.startswith("{") and line.endswith("}"):
            row = json.loads(line)
            rows[row["test"]] = row
    return rows


def summary(rows: Rows) -> list[str]:
    """A line of numbers, and lines for each test that failed or was cut off."""
    found = Counter(row["outcome"] for row in rows.values())
    lines = [", ".join(f"{found[outcome]} {outcome}" for outcome in ("passed", "skipped", "failed")) or "no test"]
    lines[0] += f", {found['began']} cut off" * bool(found["began"])
    for test, row in rows.items():
        if row["outcome"] == "began":
            lines.append(f"\nCUT OFF {test}")
        elif row["outcome"] == "failed":
            lines.append(f"\nFAILED {test}\n{row['error']}")
    return lines


if __name__ == "__main__":
    print("\n".join(summary(read(Path(sys.argv[1])))))
