"""A run's folder and the operations on it.

    config.toml               the settings; [launch]: how the run was last started; [corpus]: the data with digests
    model/config.json         configuration of the model, if it is a transformers model
    tokens/                   token shards of data that had to be tokenized, unless another place was named
    metrics.jsonl             one JSON object per step
    starts.jsonl              one per start or resume: settings, versions, and which weights were requantized
    samples.jsonl             generated texts, if enabled
    statistics.jsonl          one per step with statistics or an alarm
    parameters.json           how each parameter is stored, as reported by `explain` at the last start
    checkpoints/step-000050   the checkpoint after 50 steps; appears when complete. The setting `checkpoints` moves them
                              to another folder or URL, marked by `of-run.json`
    logs/                     rank-N.log: log of a rank; rank-N.txt: traceback of a failed rank
    profile/                  traces and memory snapshots, if enabled
    tensorboard/, wandb/      if enabled; wandb.json has the id of the run there

Only rank 0 writes here, except for checkpoints and logs. It holds a lock, so that two runs never share a folder. Files
are replaced atomically, and links are refused (`terminal.outputs`).
"""

import json
import math
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import tomli_w

from quantshard import checkpoints
from quantshard.checkpoints.disk import ownership
from quantshard.checkpoints.disk.store import is_local, local, locate, why
from quantshard.errors import CheckpointError, ConfigurationError, QuantshardError
from quantshard.foreign import json_object, read_json
from quantshard.interop.layouts.files import CONFIGURATION, read_layout_json
from quantshard.tools.report.records import parse_record, read_records, step_of
from quantshard.tools.terminal import outputs
from quantshard.tools.trainer.settings import config
from quantshard.tools.trainer.settings.config import TrainSettings
from quantshard.tools.trainer.settings.values import SettingType, read_table

_CHECKPOINTS = "checkpoints"
_OF_RUN, _OF_RUN_BYTES = "of-run.json", 1 << 16
"""File next to checkpoints outside of the run's folder; names the run that owns them."""

_LAUNCH = {
    "processes": SettingType(int, 1, config.COUNT),
    "mesh": config.KINDS["mesh"],
    "threads": SettingType(int, 1, 4096),
}
_CORPUS = {
    "sha256": SettingType(str, 64, 64),
    "bytes": SettingType(int, 0, (1 << 63) - 1),
    "files": SettingType(list, 68, 4200),
    "sources": SettingType(list, 1, 100),
    "heldout_files": SettingType(int, 0, config.STEPS),
    "tokenizer": SettingType(str, 64, 64),
    "vocabulary": SettingType(int, 1, config.SIZE),
    "end_of_document": SettingType(int, 0, config.SIZE),
}
_REQUIRED = {"launch": ("processes",), "corpus": ("sha256", "bytes", "files")}


class RunDir:
    """Paths and files of one run."""

    def __init__(self, path: Path) -> None:
        self.path = path = local(path, "the folder of a run")
        self.config = path / "config.toml"
        self.metrics = path / "metrics.jsonl"
        self.samples = path / "samples.jsonl"
        self.statistics = path / "statistics.jsonl"
        self.starts = path / "starts.jsonl"
        self.tokens = path / "tokens"
        self.logs = path / "logs"
        self.profile = path / "profile"
        self.model = path / "model"
        self.parameters = path / "parameters.json"
        self.tensorboard = path / "tensorboard"
        self.wandb = path / "wandb.json"
        self.checkpoints: Path | str = path / _CHECKPOINTS  # until settings are read
        self._is_locked = False
        self._lock: object = None  # held as long as this object lives

    def check_new(self) -> None:
        """Refuse a folder that holds anything except tokens and what `withdraw` leaves."""
        checkpoints = self.path / _CHECKPOINTS
        allowed = {self.tokens, self.logs, self.model, checkpoints, self.path / ownership.LOCK_FILE}
        if self.path.is_dir() and set(self.path.iterdir()) <= allowed and not any(checkpoints.glob("step-*")):
            return
        if os.path.lexists(self.path):
            way_on = f"`quantshard resume {self.path}` or --auto-resume"
            raise ConfigurationError(f"{self.path} exists: go on with it by {way_on}, or name another --run")

    def is_begun(self) -> bool:
        return os.path.lexists(self.config)

    def create(
        self,
        settings: TrainSettings,
        launch: Mapping[str, Any],
        corpus: Mapping[str, Any],
        model: Mapping[str, Any] | None = None,
    ) -> None:
        """Create the folder of a new run and write its configuration. `model`: that of a transformers model."""
        self.check_new()
        self.follow(settings)
        if not isinstance(self.checkpoints, Path) and (self.saved_steps() or self.incomplete_steps()):
            owner = self._marked() or "another run"
            raise ConfigurationError(f"{self.checkpoints} holds checkpoints of {owner}; name another --checkpoints")
        outputs.make_folder(self.path)
        if model is not None:
            outputs.write_file(self.model / CONFIGURATION, json.dumps(model, indent=2) + "\n", within=self.path)
        # last, because a folder with config.toml is a run
        self.write_config(settings, launch, corpus)

    def withdraw(self) -> None:
        """Undo `create` for a locked run that failed before its first step; logs and tokens stay."""
        # the user must see the original failure
        with suppress(QuantshardError):
            is_saved = self.saved_steps() or self.incomplete_steps()
            if self._is_locked and not os.path.lexists(self.metrics) and not is_saved:
                outputs.remove_unfinished(self.path, self.config.name, self.starts.name, self.parameters.name)

    def read_model(self, settings: TrainSettings) -> dict[str, Any] | None:
        """Read the configuration of a transformers model; None if the model is built by sizes."""
        return None if settings.is_by_sizes else read_layout_json(self.model / CONFIGURATION)

    def write_config(self, settings: TrainSettings, launch: Mapping[str, Any], corpus: Mapping[str, Any]) -> None:
        """Write or replace `config.toml`, and mark the location of the checkpoints as this run's."""
        self.follow(settings)
        self._mark_place()
        outputs.write_file(self.config, to_toml(settings, {"launch": launch, "corpus": corpus}), within=self.path)

    def read_config(self) -> tuple[TrainSettings, dict[str, Any], dict[str, Any]]:
        """Read the settings and the tables [launch] and [corpus]."""
        if not self.is_begun():
            raise ConfigurationError(f"there is no run in {self.path}: it has no config.toml")
        content, where = config.read_settings_file(self.config), str(self.config)
        settings = TrainSettings(**config.from_mapping(content, where))
        settings.check(where)
        data, heldout = (tuple(map(self.here, paths)) for paths in (settings.data, settings.heldout_data))
        settings = replace(settings, data=data, heldout_data=heldout, tokenizer=self.here(settings.tokenizer))
        self.follow(settings)
        return settings, _table("launch", _LAUNCH, content, where), _table("corpus", _CORPUS, content, where)

    def here(self, path: str) -> str:
        """Return the current path of something in `tokens` if the run's folder was renamed; otherwise `path`."""
        _, is_tokens, rest = path.rpartition(f"/{self.tokens.name}/")
        moved = self.tokens.absolute() / rest
        return str(moved) if is_tokens and not os.path.lexists(path) and os.path.lexists(moved) else path

    def check_ours(self) -> None:
        """Check that no path of the run leads to another place."""
        if self.path.is_dir():
            files = (self.config, self.metrics, self.samples, self.starts, self.statistics, self.parameters, self.wandb)
            folders = (self.logs, self.path / _CHECKPOINTS, self.tokens, self.model, self.profile, self.tensorboard)
            names = [*(file.name for file in files), *(f"{folder.name}/" for folder in folders), "wandb/"]
            locks = [ownership.LOCK_FILE, f"{_CHECKPOINTS}/{ownership.LOCK_FILE}"]
            outputs.check_no_links(self.path, (*names, *locks, f"{self.model.name}/{CONFIGURATION}"))

    def follow(self, settings: TrainSettings) -> None:
        """Use the location of checkpoints in the settings from now on."""
        self.checkpoints = settings.checkpoints or self.path / _CHECKPOINTS

    def checkpoint(self, step: int) -> Path | str:
        name = f"step-{step:06d}"
        return self.checkpoints / name if isinstance(self.checkpoints, Path) else f"{self.checkpoints}/{name}"

    def saved_steps(self) -> list[int]:
        """Return the steps with a complete checkpoint, ascending."""
        return checkpoints.Manager(self.checkpoints, read_only=True).steps()

    def incomplete_steps(self) -> list[int]:
        """Return the steps of checkpoints that were cut off or are being written, ascending."""
        store, path = locate(self.checkpoints)
        try:
            steps = [int(name[5:]) for name in store.names(path) if re.fullmatch(r"step-\d{6,}", name)]
        except OSError as error:
            raise CheckpointError(f"{self.checkpoints} cannot be read ({why(error)})") from error
        complete = self.saved_steps()
        return sorted(step for step in steps if step not in complete)

    def check_place(self, named: bool) -> None:
        """Check that outside checkpoints belong to the run, unless the user just named their location.

        A malicious `config.toml` could name another run's checkpoints, and the oldest of these would be removed.
        """
        if isinstance(self.checkpoints, Path) or named or (run := self._marked()) == str(self.path.absolute()):
            return
        reason = f"names {run}" if run else "is not there"
        raise ConfigurationError(
            f"{self.checkpoints}, where {self.config} has the checkpoints, is not known as this run's: {_OF_RUN} there "
            f"{reason}; if it is, pass --checkpoints {self.checkpoints}"
        )

    def look_in(self, named: str | None) -> None:
        """Look for checkpoints where the user says, or where the settings say, if that is local and marked.

        A URL from the untrusted `config.toml` alone is never contacted.
        """
        if named is not None:
            self.checkpoints = named or self.path / _CHECKPOINTS
        elif isinstance(self.checkpoints, str) and not is_local(self.checkpoints):
            raise ConfigurationError(f"checkpoints of {self.path} are at a URL; pass --checkpoints {self.checkpoints}")
        self.check_place(named is not None)

    def _marked(self) -> str:
        """Return the run in the mark next to outside checkpoints; "" if there is no mark."""
        store, path = locate(self.checkpoints)
        try:
            return str(json_object(store.read(store.join(path, _OF_RUN), _OF_RUN_BYTES), _OF_RUN)["run"])
        except (FileNotFoundError, ValueError, KeyError):
            return ""
        except OSError as error:
            raise CheckpointError(f"cannot read {self.checkpoints} ({why(error)})") from error

    def _mark_place(self) -> None:
        run = str(self.path.absolute())
        if isinstance(self.checkpoints, Path) or self._marked() == run:
            return
        store, path = locate(self.checkpoints)
        try:
            store.make(path)
            store.write(store.join(path, _OF_RUN), json.dumps({"run": run}).encode())
        except OSError as error:
            reason = f"({why(error)}); name another place with --checkpoints"
            raise CheckpointError(f"cannot write to {self.checkpoints} {reason}") from error

    def last_complete(self) -> int:
        """Return the last step with a complete checkpoint."""
        steps = self.saved_steps()
        if not steps:
            raise ConfigurationError(f"{self.checkpoints} has no complete checkpoint; train --config {self.config}")
        return steps[-1]

    def append(self, file: Path, record: Mapping[str, Any]) -> None:
        """Append one JSON object as a line. Numbers without a JSON form (inf, nan) become strings."""
        nonfinite = {k: str(v) for k, v in record.items() if isinstance(v, float) and not math.isfinite(v)}
        outputs.append_text(file, json.dumps({**record, **nonfinite}) + "\n", within=self.path)

    def read_starts(self) -> list[dict[str, Any]]:
        return read_records(self.starts)

    def requantized(self) -> tuple[bool, bool]:
        """Return whether any start requantized the weights to another recipe, and whether any without masters."""
        starts = [start for start in self.read_starts() if "requantized" in start]
        return bool(starts), any(start.get("lossy") is True for start in starts)

    def forget_after(self, step: int) -> None:
        """Drop the records of later steps and a truncated line, so that the files read as one run."""
        for file in (self.metrics, self.samples, self.starts, self.statistics):
            if os.path.lexists(file):
                outputs.cut_after(file, lambda line: _is_up_to(step, line), within=self.path)

    def lock(self) -> None:
        """Lock the run until this process ends, however it ends."""
        try:
            self._lock = ownership.lock(self.path)
            self._is_locked = True
        except TimeoutError:
            raise ConfigurationError(f"{self.path} is in use by another training process; stop that first") from None


def run_of_checkpoint(checkpoint: str) -> RunDir | None:
    """Return the run around a checkpoint, or the run that a mark names if its settings name the location too."""
    if not is_local(checkpoint):
        return None
    folder = local(checkpoint, "a checkpoint").absolute().parent
    mark = folder / _OF_RUN
    if os.path.lexists(mark):
        run_path = read_json(mark, _OF_RUN_BYTES).get("run")
        if isinstance(run_path, str) and os.path.isabs(run_path) and (run := RunDir(Path(run_path))).is_begun():
            named = run.read_config()[0].checkpoints
            if named and is_local(named) and os.path.realpath(local(named, "")) == os.path.realpath(folder):
                return run
    run = RunDir(folder.parent)
    return run if run.config.is_file() else None


def to_toml(settings: TrainSettings, tables: Mapping[str, Any]) -> str:
    values = {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(settings).items()}
    return tomli_w.dumps(values) + "\n" + tomli_w.dumps(dict(tables), multiline_strings=False)


def recorded_processes(content: Mapping[str, Any], where: str) -> int:
    return int(_table("launch", _LAUNCH, content, where)["processes"]) if "launch" in content else 0


def _table(name: str, kinds: Mapping[str, SettingType], content: Mapping[str, Any], where: str) -> dict[str, Any]:
    table = content.get(name)
    if not isinstance(table, dict) or any(key not in table for key in _REQUIRED[name]):
        keys = ", ".join(_REQUIRED[name])
        raise ConfigurationError(f"{where} is not the configuration of a run: it lacks [{name}] with {keys}")
    return read_table(table, kinds, f"{where}: [{name}]", f"it has {', '.join(kinds)}")


def _is_up_to(last_step: int, line: bytes) -> bool:
    step = step_of(parse_record(line) or {})
    return step is not None and step <= last_step
