"""A run's folder, and what may be done to it.

    model/config.json         the configuration of a model of transformers, if it is one
    config.toml               the settings; [launch]: how it was started last; [corpus]: the data, with their digests
    tokens/                   token shards of data that had to be made into tokens, if nothing else was named for them
    metrics.jsonl             one JSON object a step
    starts.jsonl              one JSON object each time it was started or resumed: versions and settings then in force,
                              and which weights were then quantized anew
    samples.jsonl             generated texts, if they were asked for
    statistics.jsonl          one JSON object a step with statistics or an alarm (docs/statistics.md)
    parameters.json           how each parameter is stored, as `explain` found it when the run was started last
    checkpoints/step-000050   after 50 steps; it appears when it is complete (docs/checkpoints.md); or elsewhere, where
                              the setting `checkpoints` says, in a folder or behind a URL that `of-run.json` marks
    logs/rank-1.log           what a process logged (trainer/monitoring/logs.py)
    logs/rank-1.txt           the traceback of a process that failed
    profile/rank-0.json       the trace of some steps, if it was asked for; memory-rank-0.pickle: of a GPU's memory
    tensorboard/, wandb/      if they were asked for; wandb.json has the id of the run there

Only rank 0 writes here, checkpoints and logs apart, and holds a lock while it does, so that two runs never share a
folder. What a run has written is not overwritten: files are replaced in one move. No link is followed in the folder,
and one of another user is refused (`terminal.outputs`). Of checkpoints only those are removed that the settings give
up, and those that were never completed or are damaged, when their step is saved again.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from quantshard import checkpoints
from quantshard.checkpoints.disk import ownership
from quantshard.checkpoints.disk.manifest import MANIFEST
from quantshard.checkpoints.disk.store import LocalStore, is_local, local, locate, why
from quantshard.errors import CheckpointError, ConfigurationError, QuantshardError
from quantshard.foreign import json_object, read_json, read_regular
from quantshard.interop.layouts.files import read_layout_json
from quantshard.interop.layouts.writing import CONFIGURATION
from quantshard.read_limits import FILE_BYTES
from quantshard.tools.terminal import inputs, outputs
from quantshard.tools.trainer.settings.config import TrainSettings
from quantshard.tools.trainer.settings.settings_file import (
    corpus_table,
    from_mapping,
    launch_table,
    read_settings_file,
    to_toml,
)

_RECORD_BYTES = 1 << 30
"""The most bytes of a file of records that is read whole: four million steps."""

_LONG_BYTES = 1 << 26
"""Of a longer one no more is read than its end."""

_STEP_DIGITS = 6
_CHECKPOINTS = "checkpoints"
_OF_RUN, _OF_RUN_BYTES = "of-run.json", 1 << 16
"""Names the run whose checkpoints lie beside it, where that is not the run's folder."""


class RunDir:
    """Paths and files of one run.

    Raises:
        ConfigurationError: the path is a URL.
    """

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
        self.statistics = path / "statistics.jsonl"
        self.parameters = path / "parameters.json"
        self.logs = path / "logs"
        self.tensorboard = path / "tensorboard"
        self.wandb = path / "wandb.json"
        self.checkpoints: Path | str = path / _CHECKPOINTS  # until settings that say otherwise are read
        self._is_locked = False

    # Configuration ---------------------------------------------------------------------------------------------------

    def check_new(self) -> None:
        """Refuse a folder that holds anything but tokens, and what `withdraw` leaves.

        Raises:
            ConfigurationError: it exists and is not empty, or is no folder.
        """
        if not self.path.exists() or (self.path.is_dir() and self._is_free()):
            return
        instead = f"go on with it by `quantshard resume {self.path}` or --auto-resume"
        if not self.path.is_dir() or not self._has_checkpoint():
            instead = "it holds no checkpoint to go on from, so remove it if you want its place"
        raise ConfigurationError(f"{self.path} exists: {instead}, or name another --run")

    def _is_free(self) -> bool:
        checkpoints = self.path / _CHECKPOINTS
        left = {self.tokens, self.logs, self.model, self.path / ownership.LOCK_FILE}
        if checkpoints.is_dir() and {each.name for each in checkpoints.iterdir()} <= {ownership.LOCK_FILE}:
            left.add(checkpoints)
        return set(self.path.iterdir()) <= left

    def is_begun(self) -> bool:
        """Whether there is a run here, with or without a checkpoint."""
        return os.path.lexists(self.config)

    def _has_checkpoint(self) -> bool:
        with suppress(QuantshardError):  # what is there is in the way, whatever its settings say
            if self.is_begun():
                self.read_config()
            return bool(self.saved_steps()[0])
        return False

    def create(
        self,
        settings: TrainSettings,
        launch: Mapping[str, Any],
        corpus: Mapping[str, Any],
        model: Mapping[str, Any] | None = None,
    ) -> None:
        """Make the folder of a new run and write its configuration. `model`: that of a model of transformers."""
        self.check_new()
        self.follow(settings)
        self._check_place_is_free()
        text = _config(settings, launch, corpus)
        if len(text) > (most := FILE_BYTES["run"]):
            raise ConfigurationError(
                f"{self.config} would have {len(text)} bytes, more than the {most} that are read of it: it lists "
                f"{len(corpus['files'])} data files; join them into fewer"
            )
        outputs.make_folder(self.path)
        if model is not None:
            self.write(self.model / CONFIGURATION, json.dumps(model, indent=2) + "\n")
        self._mark_place()
        self.write(self.config, text)  # the last: with it, this is a run

    def withdraw(self) -> None:
        """Make no run of a run again that this process holds and that failed before its first step: the corrected
        command may then have the same folder. Its logs and tokens stay."""
        with suppress(QuantshardError):  # the failure itself is what the user must read
            if self._is_locked and not os.path.lexists(self.metrics) and not any(self.saved_steps()):
                outputs.remove_unfinished(self.path, self.config.name, self.starts.name, self.parameters.name)

    def read_model(self, settings: TrainSettings) -> dict[str, Any] | None:
        """The configuration of the run's model; None if it is built by sizes.

        Raises:
            CheckpointError: it is missing or damaged.
        """
        return None if settings.is_by_sizes else read_layout_json(self.model / CONFIGURATION)

    def write_config(self, settings: TrainSettings, launch: Mapping[str, Any], corpus: Mapping[str, Any]) -> None:
        """Write or replace `config.toml`, and mark the place of checkpoints as the run's."""
        self.follow(settings)
        self._mark_place()
        self.write(self.config, _config(settings, launch, corpus))

    def read_config(self) -> tuple[TrainSettings, dict[str, Any], dict[str, Any]]:
        """The settings, and the tables [launch] and [corpus].

        Raises:
            ConfigurationError: there is no run here, or its configuration is not one.
        """
        if not self.is_begun():
            hint = "" if os.path.lexists(self.path) else inputs.meant_path(self.path)
            raise ConfigurationError(f"there is no run in {self.path}: it has no config.toml{hint}")
        content, where = read_settings_file(self.config), str(self.config)
        settings = TrainSettings(**from_mapping(content, where))
        settings.check(where)
        data, heldout = (tuple(map(self.here, paths)) for paths in (settings.data, settings.heldout_data))
        settings = replace(settings, data=data, heldout_data=heldout, tokenizer=self.here(settings.tokenizer))
        self.follow(settings)
        return settings, launch_table(content, where), corpus_table(content, where)

    def here(self, path: str) -> str:
        """Where something in `tokens` is that was recorded when the folder had another name; other paths unchanged."""
        _, is_tokens, rest = path.rpartition(f"/{self.tokens.name}/")
        moved = self.tokens.absolute() / rest
        return str(moved) if is_tokens and not os.path.lexists(path) and os.path.lexists(moved) else path

    def holds_tokens(self, path: str) -> bool:
        """Whether something that was recorded are tokens that were made for this run, in its folder."""
        return Path(path).is_relative_to(self.tokens.absolute())

    def check_ours(self) -> None:
        """See that what is about to be written cannot end up elsewhere, nor anybody else's settings be followed.

        Raises:
            ConfigurationError: naming a folder or file that is a link, has a second name, or is another user's.
        """
        if self.path.is_dir():
            files = (self.config, self.metrics, self.samples, self.starts, self.statistics, self.parameters, self.wandb)
            locks = (ownership.LOCK_FILE, f"{_CHECKPOINTS}/{ownership.LOCK_FILE}")
            folders = (self.logs, self.path / _CHECKPOINTS, self.tokens, self.model, self.profile, self.tensorboard)
            model = f"{self.model.name}/{CONFIGURATION}"
            names = (
                *(file.name for file in files),
                *(f"{folder.name}/" for folder in folders),
                "wandb/",
                model,
                *locks,
            )
            outputs.check_folder(self.path, names)

    # Checkpoints -----------------------------------------------------------------------------------------------------

    def follow(self, settings: TrainSettings) -> None:
        """From now on look for checkpoints where the settings say."""
        self.checkpoints = settings.checkpoints or self.path / _CHECKPOINTS

    def checkpoint(self, step: int) -> Path | str:
        """Folder, or URL, of the checkpoint after a step."""
        name = f"step-{step:0{_STEP_DIGITS}d}"
        return self.checkpoints / name if isinstance(self.checkpoints, Path) else f"{self.checkpoints}/{name}"

    def saved_steps(self) -> tuple[list[int], list[int]]:
        """Steps with a complete checkpoint, and steps whose checkpoint was not completed, both ascending.

        Raises:
            CheckpointError: their place cannot be looked at.
        """
        store, place = locate(self.checkpoints)
        try:
            names = store.names(place)
            steps = (name.removeprefix("step-") for name in names if name.startswith("step-"))
            found = sorted(int(digits) for digits in steps if digits.isascii() and digits.isdecimal())
            complete = [step for step in found if self._is_complete(step)]
        except NotADirectoryError:
            raise CheckpointError(
                f"{self.checkpoints} is no folder, in which checkpoints are kept; name another"
            ) from None
        except OSError as error:
            raise CheckpointError(f"{self.checkpoints} cannot be looked at ({why(error)}); see that it can") from error
        return complete, [step for step in found if step not in complete]

    def _is_complete(self, step: int) -> bool:
        """As the Manager sees it: where nothing is renamed, the manifest is the last that is written."""
        store, place = locate(self.checkpoint(step))
        return checkpoints.is_complete(place) if store.renames else store.is_file(store.join(place, MANIFEST))

    def check_place(self, named: bool) -> None:
        """See that checkpoints outside of the run's folder are the run's. `named`: the user has named the place now.

        A `config.toml` of somebody else could name a place of other checkpoints, of which old ones are removed.

        Raises:
            ConfigurationError: the place is not marked as this run's, and was not named.
        """
        if isinstance(self.checkpoints, Path) or named or (run := self._marked()) == str(self.path.absolute()):
            return
        told = f"says that they are those of {run}" if run else "is not there"
        raise ConfigurationError(
            f"{self.checkpoints}, where {self.config} has the checkpoints, is not known as this run's: {_OF_RUN} there "
            f"{told}; if it is, name it with --checkpoints {self.checkpoints}"
        )

    def look_in(self, named: str | None) -> None:
        """Look for checkpoints in the place that the user has named now, or else where the settings say: in the run's
        folder, or in another one of this machine that is marked as the run's. No URL is asked that only a `config.toml`
        names, for that may be anybody's.

        Raises:
            ConfigurationError: it is a URL that was not named, or the place is not marked as this run's.
        """
        if named is not None:
            self.checkpoints = named or self.path / _CHECKPOINTS
        elif isinstance(self.checkpoints, str) and not is_local(self.checkpoints):
            raise ConfigurationError(
                f"{self.config} has the checkpoints in {self.checkpoints}, and a URL is asked only if you name it: "
                f"--checkpoints {self.checkpoints}"
            )
        self.check_place(named is not None)

    def _check_place_is_free(self) -> None:
        if not isinstance(self.checkpoints, Path) and any(self.saved_steps()):
            raise ConfigurationError(
                f"{self.checkpoints} holds checkpoints of {self._marked() or 'a run that is not named there'}; name "
                "another place with --checkpoints"
            )

    def _marked(self) -> str:
        """The run that a place outside of the run's folder is marked with; "" for none."""
        store, place = locate(self.checkpoints)
        try:
            return str(json_object(store.read(store.join(place, _OF_RUN), _OF_RUN_BYTES), _OF_RUN)["run"])
        except (FileNotFoundError, ValueError, KeyError):
            return ""
        except OSError as error:
            raise CheckpointError(f"{self.checkpoints} cannot be read ({why(error)}); see that it can") from error

    def _mark_place(self) -> None:
        run = str(self.path.absolute())
        if isinstance(self.checkpoints, Path) or self._marked() == run:
            return
        store, place = locate(self.checkpoints)
        try:
            if isinstance(store, LocalStore):
                store.make(place)
            store.write(store.join(place, _OF_RUN), json.dumps({"run": run}).encode())
        except OSError as error:
            raise CheckpointError(
                f"{self.checkpoints} cannot be written ({why(error)}); see that it can, or name another place with "
                "--checkpoints"
            ) from error

    def last_complete(self) -> tuple[int, list[int]]:
        """The last step with a complete checkpoint, and the later steps with one that was not completed.

        Raises:
            ConfigurationError: no checkpoint is complete.
        """
        complete, incomplete = self.saved_steps()
        if not complete:
            raise ConfigurationError(
                f"{self.path} has no complete checkpoint to go on from{self._elsewhere}; start again with `quantshard "
                f"train --config {self.config} --run ANOTHER`"
            )
        return complete[-1], [step for step in incomplete if step > complete[-1]]

    @property
    def _elsewhere(self) -> str:
        return "" if isinstance(self.checkpoints, Path) else f" in {self.checkpoints}"

    # Records ---------------------------------------------------------------------------------------------------------

    def append(self, file: Path, record: Mapping[str, Any]) -> None:
        """Append one JSON object as a line; numbers that JSON cannot say (inf, nan) become strings."""
        plain = {
            key: str(value) if isinstance(value, float) and not math.isfinite(value) else value
            for key, value in record.items()
        }
        outputs.append_text(file, json.dumps(plain) + "\n", within=self.path)

    def read_starts(self) -> list[dict[str, Any]]:
        """The records of `starts`, without a line that was cut off."""
        return [start for line in self._content(self.starts).split(b"\n") if (start := _record(line))]

    def last_start(self) -> dict[str, Any]:
        """The last record of `starts`; empty if there is none."""
        return next(reversed(self.read_starts()), {})

    def requantized(self) -> tuple[bool, bool]:
        """Whether some start quantized the weights anew, into another recipe; and whether without masters too."""
        found = [start for start in self.read_starts() if "requantized" in start]
        return bool(found), any(start.get("lossy") is True for start in found)

    def forget_after(self, step: int) -> None:
        """Drop the records of later steps, and a line that was cut off, so that the files read as one run.

        Of a long file the end alone is read: its steps are in order.
        """
        for file in (self.metrics, self.samples, self.starts, self.statistics):
            if os.path.lexists(file) and os.lstat(file).st_size > _LONG_BYTES:
                outputs.cut_after(file, lambda line: _step_of(line) <= step, within=self.path)
                continue
            content = self._content(file)
            kept = b"".join(line + b"\n" for line in content.split(b"\n") if _step_of(line) <= step)
            if kept != content:
                self.write(file, kept)

    def lost_steps(self, done: int) -> str:
        """A line on steps that are done and have no record in `metrics`, which nothing brings back; "" if all have. Of
        a long file nobody looks."""
        if os.path.lexists(self.metrics) and os.lstat(self.metrics).st_size > _LONG_BYTES:
            return ""
        there = {step for line in self._content(self.metrics).split(b"\n") if (step := _step_of(line)) <= done}
        if not (lost := done - len(there)):
            return ""
        first = next(step for step in range(1, done + 1) if step not in there)  # at most one beyond what is there
        which = f"step {first}" if lost == 1 else f"{lost:,} steps, the first of them {first:,}"
        return f"{self.metrics} has lost the records of {which}; curves and best losses are without them"

    def _content(self, file: Path) -> bytes:
        """What a file of records has; nothing if it is not there.

        Raises:
            ConfigurationError: it is no regular file, or longer than what is read.
        """
        return read_regular(file, _RECORD_BYTES) if os.path.lexists(file) else b""

    def write(self, file: Path, content: str | bytes) -> None:
        """Write or replace a file of the run."""
        outputs.write_file(file, content, within=self.path)

    # Lock ------------------------------------------------------------------------------------------------------------

    def lock(self) -> None:
        """Hold the run until this process ends, however it ends.

        Raises:
            ConfigurationError: another process holds it, and did not end within a few seconds.
        """
        try:
            ownership.lock(self.path)
            self._is_locked = True
        except BlockingIOError:
            said = f"{self.path} is in use by another training process; stop that one first"
            raise ConfigurationError(said) from None
        except OSError as error:
            raise ConfigurationError(f"{self.path} cannot be locked: {error.strerror or error}") from None


def run_of_checkpoint(checkpoint: str) -> RunDir | None:
    """The run whose checkpoint this is: in the run's folder, or in another one of this machine that is marked as the
    run's. None if it is in neither. A mark may be anybody's: it counts if the run's settings name the place.

    Raises:
        ConfigurationError: the mark, or the configuration of the run that it names, is damaged or a link.
    """
    if not is_local(checkpoint):
        return None
    place = local(checkpoint, "a checkpoint").absolute().parent
    mark = place / _OF_RUN
    if os.path.lexists(mark):
        named = read_json(mark, _OF_RUN_BYTES).get("run")
        if isinstance(named, str) and os.path.isabs(named) and (run := RunDir(Path(named))).is_begun():
            settings = run.read_config()[0]
            if _is_same_folder(settings.checkpoints, place):
                return run
    run = RunDir(place.parent)
    return run if run.config.is_file() else None


def _is_same_folder(named: str, place: Path) -> bool:
    return bool(named) and is_local(named) and os.path.realpath(local(named, "")) == os.path.realpath(place)


def _config(settings: TrainSettings, launch: Mapping[str, Any], corpus: Mapping[str, Any]) -> bytes:
    """The content of `config.toml`.

    Raises:
        ConfigurationError: a path is not UTF-8.
    """
    try:
        return to_toml(settings, {"launch": dict(launch), "corpus": dict(corpus)}).encode("utf-8")
    except UnicodeEncodeError as error:
        near = error.object[max(0, error.start - 40) : error.end]
        raise ConfigurationError(
            f"config.toml is UTF-8, and cannot say ...{near}, which is not; rename the file or folder"
        ) from None


def _record(line: bytes) -> dict[str, Any]:
    """What a line says; nothing if it was cut off."""
    try:
        return dict(json.loads(line))
    except (ValueError, TypeError, RecursionError):
        return {}


def _step_of(line: bytes) -> float:
    """The step of a record; infinite for a line that is no record."""
    step = _record(line).get("step")
    return step if type(step) is int else math.inf
