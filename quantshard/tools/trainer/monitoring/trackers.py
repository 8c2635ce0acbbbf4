"""TensorBoard and Weights & Biases: what rank 0 writes for them beside `metrics.jsonl`, if the settings ask for it.

A resumed run goes on where it was: in the same run of Weights & Biases, whose id is in `wandb.json` in its folder, and
in the same folder of TensorBoard, which forgets the steps that are trained again.
"""

from __future__ import annotations

import configparser
import inspect
import io
import json
import os
import re
import secrets
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stderr
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from quantshard.errors import ConfigurationError
from quantshard.foreign import read_json, read_regular
from quantshard.tools.report.metrics import step_of
from quantshard.tools.terminal import outputs
from quantshard.tools.trainer.run_dir import RunDir
from quantshard.tools.trainer.settings.config import TrainSettings
from quantshard.tools.trainer.settings.schema import shown_value

_WANDB_MODES = ("online", "offline", "disabled", "shared")
_WANDB_FILE_KEYS = {"entity", "project", "mode"}
_ID, _ID_BYTES = re.compile(r"[a-z0-9]{4,64}"), 4096


class Tracker(Protocol):
    """Where the figures of a run go besides its own files; used on rank 0 alone."""

    def metrics(self, entry: Mapping[str, Any]) -> None:
        """Take a record of `metrics.jsonl`."""

    def statistics(self, record: Mapping[str, Any]) -> None:
        """Take a record of `statistics.jsonl`."""

    def close(self, failed: bool) -> None:
        """Write what is still to be written. `failed`: the run ends by an error."""


def check_trackers(settings: TrainSettings) -> None:
    """Refuse settings whose packages are not installed, before anything is written.

    Raises:
        ConfigurationError: naming the setting, the package, and how to get it.
    """
    for name, wanted in (("tensorboard", settings.tensorboard), ("wandb", bool(settings.wandb))):
        if wanted and not _is_installed(name):
            raise ConfigurationError(
                f"{name} = {getattr(settings, name)!r} needs a missing package; run: pip install {name}"
            )
    mode = os.environ.get("WANDB_MODE", "online")
    if settings.wandb and mode not in _WANDB_MODES:
        raise ConfigurationError(f"WANDB_MODE = {shown_value(mode)}: choose one of: {', '.join(_WANDB_MODES)}")


def check_account(settings: TrainSettings) -> None:
    """Refuse a run that is to be sent to Weights & Biases without an account's key, before anything is written. Whether
    the key is good is found out with the server, when the run is begun.

    Raises:
        ConfigurationError: there is no key, or it is none.
    """
    if not settings.wandb or os.environ.get("WANDB_MODE", "online") in ("offline", "disabled"):
        return
    _check_wandb_settings(os.environ.get("WANDB_DIR") or ".")
    if os.environ.get("WANDB_API_KEY"):
        return
    import wandb  # the package of the extra

    if "prompt" not in inspect.signature(wandb.login).parameters:
        return  # of versions that can only ask for a key it is found out when the run is begun
    try:
        with _no_questions(), redirect_stderr(io.StringIO()):
            found = wandb.login(prompt=False, verify=False)
    except wandb.errors.Error as error:
        raise _unreachable(str(error)) from None
    if not found:
        raise _unreachable("no API key is configured")


def _check_wandb_settings(*folders: str) -> None:
    """Refuse settings of Weights & Biases in a folder that could send the user's key to another server."""
    for file in (Path(folder, name, "settings") for folder in folders for name in ("wandb", ".wandb")):
        if not os.path.lexists(file):
            continue
        parser = configparser.ConfigParser(interpolation=None)
        try:
            parser.read_string(read_regular(file, _ID_BYTES).decode("utf-8"))
        except (configparser.Error, ValueError) as error:
            raise ConfigurationError(f"{file}: {shown_value(str(error))}; delete it") from None
        keys = {*parser.defaults(), *(key for section in parser.sections() for key in parser[section])}
        if unsafe := sorted(keys - _WANDB_FILE_KEYS):
            raise ConfigurationError(
                f"{file} sets {shown_value(unsafe[0])}; delete it, or set WANDB_{unsafe[0][:40].upper()} instead"
            )


def _unreachable(why: str) -> ConfigurationError:
    said = " ".join(why.split())
    return ConfigurationError(
        f"Weights & Biases cannot be reached ({said}); log in with `wandb login`, or set WANDB_MODE=offline"
    )


def _is_installed(name: str) -> bool:
    """Whether a package is; a folder that happens to have its name, as Weights & Biases leaves some, is none."""
    found = find_spec(name)
    return found is not None and found.origin is not None


def open_trackers(settings: TrainSettings, run: RunDir, done: int) -> list[Tracker]:
    """The trackers that the settings ask for, of a run that goes on after step `done`.

    Raises:
        ConfigurationError: one cannot be had: a package is missing, or Weights & Biases refuses.
    """
    check_trackers(settings)
    found: list[Tracker] = []
    if settings.tensorboard:
        found.append(TensorBoardTracker(run, done))
    if settings.wandb:
        found.append(WandbTracker(settings, run))
    return found


def figures_of(record: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """The figures of a record of statistics, by role, statistic and tensor: "weight/amax/layers.0.proj.weight"."""
    for row in record.get("rows", ()):
        for statistic, value in row.items():
            if statistic not in ("name", "role") and isinstance(value, int | float):
                yield f"{row.get('role', 'tensor')}/{statistic}/{row['name']}", float(value)


class TensorBoardTracker:
    """Event files in the run's folder `tensorboard`."""

    def __init__(self, run: RunDir, done: int) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary  # the package of the extra
        from torch.utils.tensorboard import SummaryWriter

        outputs.make_folder(run.tensorboard)
        self.writer = SummaryWriter(str(run.tensorboard), purge_step=done + 1 if done else None)
        self._files: Any = self.writer.file_writer
        self._summary = Summary

    def metrics(self, entry: Mapping[str, Any]) -> None:
        """Take a record of `metrics.jsonl`."""
        numbers = {name: each for name, each in entry.items() if name != "step" and isinstance(each, int | float)}
        self._add(numbers, step_of(entry))

    def _add(self, figures: Mapping[str, float], step: int | None) -> None:
        """All of a step as one event; `add_scalar` makes one of each, and takes six times as long."""
        values = [self._summary.Value(tag=name, simple_value=value) for name, value in figures.items()]
        if values:
            self._files.add_summary(self._summary(value=values), step)

    def statistics(self, record: Mapping[str, Any]) -> None:
        """Take a record of `statistics.jsonl`."""
        self._add(dict(figures_of(record)), step_of(record))
        for alarm in record.get("alarms", ()):
            self.writer.add_text(f"alarm/{alarm.get('kind')}", str(alarm.get("text")), step_of(record))

    def close(self, failed: bool) -> None:
        """Write what is still to be written."""
        self.writer.close()


class WandbTracker:
    """A run of Weights & Biases, by WANDB_MODE online or offline, with files in the run's folder `wandb`.

    Raises:
        ConfigurationError: it cannot be begun, or `wandb.json` says no id.
    """

    def __init__(self, settings: TrainSettings, run: RunDir) -> None:
        import wandb  # the package of the extra

        _check_wandb_settings(str(run.path), os.environ.get("WANDB_DIR") or ".")
        # wandb would run git in the run's folder, and git runs commands that a repository's configuration names
        options = wandb.Settings(silent=True, console="off", disable_git=True, disable_code=True, save_code=False)
        try:
            with _no_questions():
                self.run = wandb.init(
                    project=settings.wandb,
                    id=_wandb_id(run),
                    resume="allow",
                    name=run.path.absolute().name,
                    dir=str(run.path),
                    config=asdict(settings),
                    settings=options,
                )
        except wandb.errors.Error as error:
            raise _unreachable(str(error)) from None

    def metrics(self, entry: Mapping[str, Any]) -> None:
        """Take a record of `metrics.jsonl`."""
        self.run.log({name: value for name, value in entry.items() if name != "step"}, step=step_of(entry))

    def statistics(self, record: Mapping[str, Any]) -> None:
        """Take a record of `statistics.jsonl`."""
        counts = {f"alarm/{alarm.get('kind')}": 1 for alarm in record.get("alarms", ())}
        self.run.log({**dict(figures_of(record)), **counts}, step=step_of(record))

    def close(self, failed: bool) -> None:
        """Write what is still to be written, or send it."""
        self.run.finish(exit_code=int(failed))


@contextmanager
def _no_questions() -> Iterator[None]:
    """Without an account Weights & Biases would ask for one, and all ranks wait: so there is nobody to ask."""
    before, sys.stdin = sys.stdin, io.StringIO()
    try:
        yield
    finally:
        sys.stdin = before


def _wandb_id(run: RunDir) -> str:
    """The id of this run with Weights & Biases: the one of before, or a new one, which is noted."""
    if os.path.lexists(run.wandb):
        found = read_json(run.wandb, _ID_BYTES).get("id")
        if type(found) is not str or not _ID.fullmatch(found):
            raise ConfigurationError(f"{run.wandb}: id is {shown_value(found)}, and must be 4 to 64 of a-z and 0-9")
        return found
    made = secrets.token_hex(8)
    run.write(run.wandb, json.dumps({"id": made}) + "\n")
    return made
