"""TensorBoard and Weights & Biases trackers, which rank 0 feeds if the settings enable them.

A resumed run continues in the same Weights & Biases run (the id is in `wandb.json` in the run's folder) and in the same
TensorBoard folder, where the records of repeated steps are purged.
"""

import configparser
import io
import json
import os
import secrets
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeAlias

from quantshard.errors import ConfigurationError, shown
from quantshard.foreign import read_json, read_regular
from quantshard.tools.report.records import step_of
from quantshard.tools.terminal import outputs
from quantshard.tools.trainer.run_dir import RunDir
from quantshard.tools.trainer.settings.config import TrainSettings

_FILE_BYTES = 4096


def check_trackers(settings: TrainSettings) -> None:
    """Check that the packages of the enabled trackers are installed, before anything is written."""
    for name in ("tensorboard", "wandb"):
        # a folder of that name, as Weights & Biases creates, has no origin
        if (value := getattr(settings, name)) and getattr(find_spec(name), "origin", None) is None:
            raise ConfigurationError(f"{name} = {value!r} needs a missing package; run: pip install {name}")


def _check_wandb_settings(*folders: str) -> None:
    """Refuse Weights & Biases settings in a folder that could send the user's key to another server."""
    for file in (Path(folder, name, "settings") for folder in folders for name in ("wandb", ".wandb")):
        if not os.path.lexists(file):
            continue
        parser = configparser.ConfigParser(interpolation=None)
        try:
            parser.read_string(read_regular(file, _FILE_BYTES).decode("utf-8"))
        except (configparser.Error, ValueError) as error:
            raise ConfigurationError(f"{file}: {shown(str(error))}; delete it") from None
        keys = {*parser.defaults(), *(key for section in parser.sections() for key in parser[section])}
        if unsafe := sorted(keys - {"entity", "project", "mode"}):
            raise ConfigurationError(f"{file} sets {shown(unsafe[0])}; delete it, or use WANDB_* variables")


def open_trackers(settings: TrainSettings, run: RunDir, done: int) -> list["Tracker"]:
    trackers: list[Tracker] = []
    if settings.tensorboard:
        trackers.append(TensorBoardTracker(run, done))
    if settings.wandb:
        trackers.append(WandbTracker(settings, run))
    return trackers


def _figures_of(record: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Yield (tag, value) of a statistics record; tags are role/statistic/tensor: "weight/amax/layers.0.proj.weight"."""
    for row in record["rows"]:
        for statistic, value in row.items():
            if isinstance(value, int | float):
                yield f"{row['role']}/{statistic}/{row['name']}", value


class TensorBoardTracker:
    """Event files in the run's folder `tensorboard`."""

    def __init__(self, run: RunDir, done: int) -> None:
        # optional dependency
        from torch.utils.tensorboard import SummaryWriter

        outputs.make_folder(run.tensorboard)
        self.writer = SummaryWriter(str(run.tensorboard), purge_step=done + 1 if done else None)

    def metrics(self, entry: Mapping[str, Any]) -> None:
        for name, value in entry.items():
            if name != "step" and isinstance(value, int | float):
                self.writer.add_scalar(name, value, step_of(entry))

    def statistics(self, record: Mapping[str, Any]) -> None:
        for tag, value in _figures_of(record):
            self.writer.add_scalar(tag, value, step_of(record))
        for alarm in record["alarms"]:
            self.writer.add_text(f"alarm/{alarm['kind']}", alarm["text"], step_of(record))

    def close(self, failed: bool) -> None:
        self.writer.close()


class WandbTracker:
    """A Weights & Biases run, online or offline according to WANDB_MODE, with files in the run's folder `wandb`."""

    def __init__(self, settings: TrainSettings, run: RunDir) -> None:
        # optional dependency
        import wandb

        _check_wandb_settings(str(run.path), os.environ.get("WANDB_DIR") or ".")
        # wandb would run git in the run's folder, and git executes commands from a repository's configuration
        options = wandb.Settings(silent=True, console="off", disable_git=True, disable_code=True, save_code=False)
        # an empty stdin, so that wandb does not wait for input while all other ranks wait too
        stdin, sys.stdin = sys.stdin, io.StringIO()
        try:
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
            reason = " ".join(str(error).split())
            advice = "log in with `wandb login`, or set WANDB_MODE=offline"
            raise ConfigurationError(f"Weights & Biases cannot be reached ({reason}); {advice}") from None
        finally:
            sys.stdin = stdin

    def metrics(self, entry: Mapping[str, Any]) -> None:
        self.run.log({name: value for name, value in entry.items() if name != "step"}, step=step_of(entry))

    def statistics(self, record: Mapping[str, Any]) -> None:
        alarms = {f"alarm/{alarm['kind']}": 1 for alarm in record["alarms"]}
        self.run.log(dict(_figures_of(record)) | alarms, step=step_of(record))

    def close(self, failed: bool) -> None:
        self.run.finish(exit_code=int(failed))


Tracker: TypeAlias = TensorBoardTracker | WandbTracker


def _wandb_id(run: RunDir) -> str:
    """Return this run's Weights & Biases id: the recorded one, or a new one, which is recorded."""
    if os.path.lexists(run.wandb):
        return str(read_json(run.wandb, _FILE_BYTES).get("id"))
    new_id = secrets.token_hex(8)
    outputs.write_file(run.wandb, json.dumps({"id": new_id}) + "\n", within=run.path)
    return new_id
