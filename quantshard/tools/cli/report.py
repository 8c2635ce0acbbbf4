"""`quantshard status`, `watch` and `report`: tell whether a run is finished, follow it, and compare runs."""

import json
import os
import time
from pathlib import Path

import typer
from typer import Argument, Option

from quantshard.checkpoints.disk import manifest
from quantshard.checkpoints.disk.store import why
from quantshard.errors import ConfigurationError
from quantshard.readable import human_bytes
from quantshard.tools.report.history import CONFIG, RunWatch, read_history
from quantshard.tools.report.page import is_report, render
from quantshard.tools.terminal import outputs
from quantshard.tools.terminal.screen import say, say_whole
from quantshard.tools.trainer.run_dir import RunDir

NOT_DONE = 75
"""Exit code of `status` if steps are left: EX_TEMPFAIL of sysexits.h, which means "try again"."""


_FIRST_LINES, _MOST_LINES = 10, 1000
"""Maximum number of steps that `watch` prints at the start, and per later poll."""

_SECONDS, _SECONDS_URL, _FAILURES = 1.0, 5.0, 5
"""Seconds between polls, and number of consecutive failed polls after which `watch` gives up."""


def status(
    run: Path = Argument(..., metavar="DIR", help="folder of the run"),
    checkpoints: str | None = Option(None, metavar="PLACE", help="folder or URL of the run's checkpoints"),
    json_: bool = Option(False, "--json", help="print the result as JSON"),
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
    """Step of the last intact checkpoint (0 without one), and descriptions of later, damaged ones, by size."""
    damaged: list[str] = []
    for step in reversed(folder.saved_steps()):
        problems = manifest.problems(folder.checkpoint(step), contents=False)
        if not problems:
            return step, damaged
        damaged.append(f"the checkpoint of step {step} is damaged: {problems[0]}")
    return 0, damaged


def report(
    runs: list[str] = Argument(..., metavar="RUN...", help="run folders or URLs"),
    out: Path = Option(Path("report.html"), metavar="FILE", help="page to write; replaces an existing report"),
) -> None:
    """Compare runs in one HTML file: losses, speed, memory, statistics, alarms, settings.

    The file needs no network and no other files. Runs that are still training are shown in their current state.
    """
    if out.is_file() and not is_report(out.read_bytes()):
        raise ConfigurationError(f"{out} exists and is no report; name another place with --out")
    page = render([read_history(run) for run in runs]).encode()
    outputs.write_file(out, page)
    say(f"wrote {out}: {len(runs)} {'run' if len(runs) == 1 else 'runs'}, {human_bytes(len(page))}")


def watch(run: str = Argument(..., metavar="RUN", help="run folder or URL")) -> None:
    """Follow a run while it trains: one line per step, and alarms.

    Waits for a run that does not exist yet, and ends when the run does. Writes nothing.
    """
    if "://" not in run and _may_become_run(Path(run)):
        say(f"{run} is not a run yet; waiting for it to start")
        while _may_become_run(Path(run)):
            time.sleep(_SECONDS)
    followed = RunWatch(run)
    seconds = _SECONDS if followed.is_local else _SECONDS_URL
    most, failures, ended = _FIRST_LINES, 0, False
    while not ended:
        try:
            # Checked before the last poll, so that no record written in between is missed.
            ended = followed.has_ended()
            say(*followed.poll(most))
            most, failures = _MOST_LINES, 0
        except (OSError, ConfigurationError) as error:
            failures, ended = failures + 1, False
            if failures == _FAILURES:
                reason = why(error) if isinstance(error, OSError) else error
                raise ConfigurationError(f"{run} cannot be read: {reason}") from None
        time.sleep(0 if ended else seconds)
    say(f"{followed.state} at step {followed.step}")


def _may_become_run(place: Path) -> bool:
    """Whether a local folder can still become a run; `train` creates the run after preparing its data."""
    return not os.path.lexists(place) or (place.is_dir() and not os.path.lexists(place / CONFIG))
