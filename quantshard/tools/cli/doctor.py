"""`quantshard doctor`: describes this machine, tests its kernels and measures its speed."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.status import Status

from quantshard.errors import ConfigurationError
from quantshard.tools.doctor import Result, Watch, diagnose, is_report
from quantshard.tools.terminal import outputs
from quantshard.tools.terminal.screen import Screen, say_whole

WRONG = 1
"""Exit code if anything is wrong."""


class _ProgressWatch(Watch):
    """Reports progress on standard error: a status line on a terminal, otherwise one line per test."""

    def __init__(self, status: Status) -> None:
        self.status = status
        self.start = time.perf_counter()

    def begin(self, name: str, number: int, count: int) -> None:
        line = f"{number} of {count}, {time.perf_counter() - self.start:.0f} s: {name}"
        if self.status.console.is_terminal:
            self.status.update(line)
        else:
            self.status.console.print(line, end=" ... ")

    def end(self, result: Result, seconds: float) -> None:
        if not self.status.console.is_terminal:
            self.status.console.print(f"{result.state}, {seconds:.1f} s")


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command("doctor")(doctor)


def doctor(
    json_: Annotated[bool, typer.Option("--json", help="the whole report as JSON, printed or written to FILE")] = False,
    file: Annotated[Path | None, typer.Argument(metavar="FILE", help="where --json writes")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="no probes of bandwidth, GEMMs and disk")] = False,
    directory: Annotated[
        Path | None,
        typer.Option("--dir", metavar="DIR", help="whose disk is probed. Default: the system's for temporary files"),
    ] = None,
) -> None:
    """Report what this machine is, test every kernel against its oracle, and measure memory, GEMMs and disk.

    On a GPU this takes some minutes: kernels are compiled. What runs is said on standard error, in a log a line each
    with the seconds that it took. Names of hosts, users and files are not in the report, so
    that it can be posted. Exit code 0: nothing is wrong; 1: something is, and its line says WRONG.
    """
    if file is not None and not json_:
        raise ConfigurationError(f"unexpected argument {str(file)!r}; a report is written with --json {file}")
    if directory is not None and not directory.is_dir():
        raise ConfigurationError(f"there is no folder {directory}; name one with --dir")
    if file is not None:
        outputs.check_replaceable(file, is_report, "report of doctor", "--json")
    folder = None if quick else directory or Path(tempfile.gettempdir())
    with Screen(stderr=True, soft_wrap=True).status("looking at this machine") as status:
        report = diagnose(folder, _ProgressWatch(status))
    if json_ and file is None:
        say_whole(report.to_json())
    else:
        Screen().print(report)
    if file is not None:
        outputs.write_file(file, report.to_json() + "\n")
    if not report.ok:
        raise typer.Exit(WRONG)
