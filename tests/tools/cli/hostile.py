"""Runs that somebody else has made: a folder as `resume` takes it, changed, and what the command says of it."""

from __future__ import annotations

import io
import sys
from contextlib import ExitStack, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any
from unittest.mock import patch

import tomli_w

from quantshard.tools import cli
from quantshard.tools.trainer import launch, worker
from quantshard.tools.trainer.run_dir import RunDir
from quantshard.tools.trainer.settings.config import TrainSettings, read_settings_file

SMALL = TrainSettings(recipe="mxfp8", hidden=64, heads=2, layers=1, seq_length=16, global_batch=4)


class Started(BaseException):
    """Processes would have been started."""


def told(*arguments: Any) -> tuple[object, list[str], list[str]]:
    """A command's exit code, or `Started`, and the lines of standard output and of standard error."""
    out, err = io.StringIO(), io.StringIO()
    with ExitStack() as stack:
        stack.enter_context(patch.object(sys, "argv", ["quantshard", *map(str, arguments)]))
        stack.enter_context(patch.object(launch, "launch", side_effect=Started))
        stack.enter_context(redirect_stdout(out))
        stack.enter_context(redirect_stderr(err))
        try:
            cli.main()
        except SystemExit as end:
            return end.code, out.getvalue().splitlines(), err.getvalue().splitlines()
        except Started:
            return Started, out.getvalue().splitlines(), err.getvalue().splitlines()
    raise AssertionError("main always exits")


def made(folder: Path) -> Path:
    """A run that could be resumed, with a text of its own."""
    folder.mkdir(exist_ok=True)
    (folder / "text").write_text("0123456789" * 100)
    run = folder / "run"
    worker.create_run(RunDir(run), TrainSettings(**(vars(SMALL) | {"data": (str(folder / "text"),)})).resolved(), 2)
    (run / "checkpoints" / "step-000002").mkdir(parents=True)
    (run / "checkpoints" / "step-000002" / ".metadata").touch()
    return run


def read(run: Path) -> None:
    """All that `resume` reads of a run before it starts processes, but for its checkpoints; it says what is wrong."""
    folder = RunDir(run)
    folder.check_ours()
    settings, _, corpus = folder.read_config()
    worker.recorded_data(settings, corpus)
    folder.read_starts()
    folder.requantized()


def content(run: Path) -> dict[str, Any]:
    """What `config.toml` says."""
    return read_settings_file(run / "config.toml")


def resumed(run: Path, config: dict[str, Any] | str | bytes) -> tuple[object, list[str], list[str]]:
    """What `resume` says of a run with this `config.toml`; see `told`."""
    if isinstance(config, dict):
        config = tomli_w.dumps(config)
    (run / "config.toml").write_bytes(config.encode() if isinstance(config, str) else config)
    return told("resume", run)
