"""`quantshard status`: reports whether a run is finished, for scripts that restart runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from quantshard.checkpoints.disk import manifest
from quantshard.tools.terminal.screen import say, say_whole
from quantshard.tools.trainer.run_dir import RunDir

NOT_DONE = 75
"""Exit code if steps are left: EX_TEMPFAIL of sysexits.h, which means "try again"."""


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command("status", no_args_is_help=True)(status)


def status(
    run: Annotated[Path, typer.Argument(metavar="DIR", help="folder of the run")],
    checkpoints: Annotated[
        str | None, typer.Option(metavar="PLACE", help="folder or URL of the run's checkpoints")
    ] = None,
    json_: Annotated[bool, typer.Option("--json", help="print the result as JSON")] = False,
) -> None:
    """Report whether a run is finished, according to its last complete checkpoint.

    What is in the files is not read: `verify` does.
    A URL that the run's config.toml names is asked only if you name it too, with --checkpoints.

    Exit code 0: it has; 75: steps are left; 1: there is no run, or nobody can tell.
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
