"""`quantshard status`, `watch` and `report`: tell whether a run is finished, follow it, and compare runs."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.live import Live

from quantshard.checkpoints.disk import manifest
from quantshard.checkpoints.disk.store import why
from quantshard.errors import ConfigurationError
from quantshard.readable import human_bytes
from quantshard.tools.report.figures import NOT_RUNNING, START_SECONDS, LiveView, RunWatch, step_line
from quantshard.tools.report.history import CONFIG, read_history
from quantshard.tools.report.page import is_report, render
from quantshard.tools.report.records import Record
from quantshard.tools.terminal import inputs, outputs
from quantshard.tools.terminal.screen import Screen, complain, say, say_whole
from quantshard.tools.trainer.run_dir import RunDir

NOT_DONE = 75
"""Exit code of `status` if steps are left: EX_TEMPFAIL of sysexits.h, which means "try again"."""

_FIRST_LINES = 10
"""Maximum number of past steps printed at the start, if the output is not a terminal."""

_MOST_LINES = 1000
"""Maximum number of steps printed per poll."""

_FAILURES = 5
"""Number of consecutive failed polls after which `watch` gives up."""

_EVERY, _EVERY_URL = 1.0, 5.0


def status(
    run: Annotated[Path, typer.Argument(metavar="DIR", help="folder of the run")],
    checkpoints: Annotated[
        str | None, typer.Option(metavar="PLACE", help="folder or URL of the run's checkpoints")
    ] = None,
    json_: Annotated[bool, typer.Option("--json", help="print the result as JSON")] = False,
) -> None:
    """Report whether a run is finished, according to its last complete checkpoint.

    Only the sizes of files are checked; `verify` reads them. A URL in the run's config.toml is used only if you pass it
    with --checkpoints. Exit code 0: finished; 75: steps remain; 1: there is no run, or its state is unknown.
    """
    folder = RunDir(run)
    settings = folder.read_config()[0]
    folder.look_in(checkpoints)
    step, damaged = _last_saved(folder)
    done = step >= settings.steps
    if json_:
        say_whole(json.dumps({"done": done, "step": step, "steps": settings.steps, "damaged": damaged}))
    else:
        for problem in damaged:
            say(problem)
        say(f"{folder.path}: {'done' if done else 'not done'}, {step} of {settings.steps} steps are saved")
    if not done:
        raise typer.Exit(NOT_DONE)


def _last_saved(folder: RunDir) -> tuple[int, list[str]]:
    """Step of the last intact checkpoint (0 without one), and descriptions of later, damaged checkpoints.

    Only the existence and sizes of files are checked. A resume skips damaged checkpoints.
    """
    damaged: list[str] = []
    for step in reversed(folder.saved_steps()[0]):
        problems = manifest.problems(folder.checkpoint(step), contents=False)
        if not problems:
            return step, damaged
        damaged.append(f"the checkpoint of step {step} is damaged: {problems[0]}")
    return 0, damaged


def report(
    runs: Annotated[list[str], typer.Argument(metavar="RUN...", help="run folders or URLs")],
    out: Annotated[Path, typer.Option(metavar="FILE", help="page to write; replaces an existing report")] = Path(
        "report.html"
    ),
    force: Annotated[bool, typer.Option("--force", help="replace FILE even if it is not a report")] = False,
    open_: Annotated[bool, typer.Option("--open", help="open the page in the browser")] = False,
) -> None:
    """Compare runs in one HTML file: losses, speed, memory, statistics, settings, checkpoints.

    The file needs no network and no other files. Runs that are still training are shown in their current state.
    """
    outputs.check_replaceable(out, lambda head: force or is_report(head), "report", "--out, or replace it by --force")
    page = render([read_history(run) for run in runs]).encode()
    outputs.write_file(out, page)
    say(f"wrote {out}: {len(runs)} {'run' if len(runs) == 1 else 'runs'}, {human_bytes(len(page))}")
    if open_ and typer.launch(str(out.absolute())):
        complain(f"no browser could be started; open {out.absolute()} in one")


def watch(
    run: Annotated[str, typer.Argument(metavar="RUN", help="run folder or URL")],
    once: Annotated[bool, typer.Option("--once", help="show the current state and exit")] = False,
    every: Annotated[
        float | None,
        typer.Option(metavar="S", min=0.1, max=3600, help="seconds between updates. Default: 1, or 5 for a URL"),
    ] = None,
) -> None:
    """Follow a run while it trains; in a pipe, print one line per step.

    Waits for a run that does not exist yet, and ends when the run does. Writes nothing.
    """
    if not once:
        _wait_for(run, every or _EVERY)
    run_watch, screen = RunWatch(run), Screen(soft_wrap=True)
    try:
        records = run_watch.poll(_FIRST_LINES)
        has_ended = run_watch.has_ended()
    except OSError as error:
        raise ConfigurationError(f"{run} cannot be read: {why(error)}") from None
    if once or (has_ended and screen.is_terminal):
        Screen().print(LiveView(run_watch.figures))
        return
    seconds = every or (_EVERY if run_watch.source.is_local else _EVERY_URL)
    if screen.is_terminal:
        with Live(LiveView(run_watch.figures), console=screen, refresh_per_second=4):
            _follow(run_watch, seconds, records, shown=False)
    else:
        if run_watch.figures.state == NOT_RUNNING:
            say(f"no process trains {run}; waiting {START_SECONDS:.0f} s for one to start")
        _follow(run_watch, seconds, records, shown=True)


def _wait_for(run: str, seconds: float) -> None:
    """Wait until a local folder contains a run; `train` creates the run after preparing its data."""
    folder = Path(run)
    if "://" in run or not _may_become_run(folder):
        return
    hint = "" if os.path.lexists(folder) else inputs.meant_path(folder)
    say(f"{run} is not a run yet{hint}; waiting for it to start")
    while _may_become_run(folder):
        time.sleep(seconds)


def _may_become_run(place: Path) -> bool:
    return not os.path.lexists(place) or (place.is_dir() and not os.path.lexists(place / CONFIG))


def _follow(followed: RunWatch, seconds: float, new: list[Record], shown: bool) -> None:
    """Poll the run until it has ended. `shown`: print one line per step."""
    failures, ended = 0, False
    while True:
        if shown and new:
            say(*(step_line(entry, followed.figures.planned) for entry in new))
        if ended:
            break
        try:
            # Checked before the last poll, so that no record written in between is missed.
            ended = followed.has_ended()
            time.sleep(0 if ended else seconds)
            new, failures = followed.poll(_MOST_LINES), 0
        except (OSError, ConfigurationError) as error:
            new, failures, ended = [], failures + 1, False
            if failures == _FAILURES:
                reason = str(error) if isinstance(error, ConfigurationError) else why(error)
                raise ConfigurationError(f"{followed.source.place} cannot be read any more: {reason}") from None
    if shown:
        say(f"{followed.figures.state} at step {followed.figures.step}")
