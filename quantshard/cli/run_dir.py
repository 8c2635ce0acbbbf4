"""A run's folder, and what may be done to it.

    config.toml               the settings; [launch]: how it was started last; [corpus]: the data, with their digests
    metrics.jsonl             one JSON object a step
    starts.jsonl              one JSON object each time it was started or resumed: versions and settings then in force,
                              and which weights were then quantized anew
    samples.jsonl             generated texts, if they were asked for
    checkpoints/step-000050   after 50 steps; it appears when it is complete (docs/checkpoints.md)
    logs/rank-1.txt           the traceback of a process that failed

Only rank 0 writes here, checkpoints and logs apart, and holds a lock while it does, so that two runs never share a
folder. What a run has written is not overwritten: files are replaced in one move. Of checkpoints only those are removed
that the settings give up, and those that were never completed or are damaged, when their step is saved again.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quantshard import checkpoints
from quantshard.checkpoints import ownership
from quantshard.checkpoints.store import local
from quantshard.cli.config import Settings, from_mapping, read_toml, to_toml
from quantshard.errors import ConfigurationError

_STEP_DIGITS = 6


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
        self.starts = path / "starts.jsonl"
        self.logs = path / "logs"
        self.checkpoints = path / "checkpoints"

    # Configuration ---------------------------------------------------------------------------------------------------

    def check_new(self) -> None:
        """Refuse a folder that holds anything.

        Raises:
            ConfigurationError: it exists and is not empty, or is no folder.
        """
        if not self.path.exists() or (self.path.is_dir() and not any(self.path.iterdir())):
            return
        instead = f"go on with it by `quantshard resume {self.path}`"
        if not self.path.is_dir() or not self.saved_steps()[0]:
            instead = "it holds no checkpoint to go on from, so remove it if you want its place"
        raise ConfigurationError(f"{self.path} exists: {instead}, or name another --run")

    def create(self, settings: Settings, launch: Mapping[str, Any], corpus: Mapping[str, Any]) -> None:
        """Make the folder of a new run and write its configuration."""
        self.check_new()
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self.write_config(settings, launch, corpus)
        except OSError as error:
            raise ConfigurationError(f"cannot write the run folder {self.path}: {error.strerror}") from None

    def write_config(self, settings: Settings, launch: Mapping[str, Any], corpus: Mapping[str, Any]) -> None:
        """Write or replace `config.toml`."""
        self._replace(self.config, to_toml(settings, {"launch": dict(launch), "corpus": dict(corpus)}))

    def read_config(self) -> tuple[Settings, dict[str, Any], dict[str, Any]]:
        """The settings, and the tables [launch] and [corpus].

        Raises:
            ConfigurationError: there is no run here, or its configuration is not one.
        """
        if not self.config.is_file():
            raise ConfigurationError(f"there is no run in {self.path}: it has no config.toml")
        content = read_toml(self.config)
        if not isinstance(content.get("launch"), dict) or not isinstance(content.get("corpus"), dict):
            raise ConfigurationError(f"{self.config} is not the configuration of a run: it lacks [launch] or [corpus]")
        settings = Settings(**from_mapping(content, str(self.config)))
        return settings, content["launch"], content["corpus"]

    # Checkpoints -----------------------------------------------------------------------------------------------------

    def checkpoint(self, step: int) -> Path:
        """Folder of the checkpoint after a step."""
        return self.checkpoints / f"step-{step:0{_STEP_DIGITS}d}"

    def saved_steps(self) -> tuple[list[int], list[int]]:
        """Steps with a complete checkpoint, and steps whose checkpoint was not completed, both ascending."""
        found = []
        for path in self.checkpoints.glob("step-*"):
            digits = path.name.removeprefix("step-")
            if digits.isdecimal():
                found.append(int(digits))
        complete = [step for step in sorted(found) if checkpoints.is_complete(self.checkpoint(step))]
        return complete, [step for step in sorted(found) if step not in complete]

    def last_complete(self) -> tuple[int, list[int]]:
        """The last step with a complete checkpoint, and the later steps with one that was not completed.

        Raises:
            ConfigurationError: no checkpoint is complete.
        """
        complete, incomplete = self.saved_steps()
        if not complete:
            raise ConfigurationError(
                f"{self.path} has no complete checkpoint to go on from; start again with `quantshard train --config "
                f"{self.config} --run ANOTHER`"
            )
        return complete[-1], [step for step in incomplete if step > complete[-1]]

    # Records ---------------------------------------------------------------------------------------------------------

    def append(self, file: Path, record: Mapping[str, Any]) -> None:
        """Append one JSON object as a line; numbers that JSON cannot say (inf, nan) become strings."""
        plain = {
            key: str(value) if isinstance(value, float) and not math.isfinite(value) else value
            for key, value in record.items()
        }
        with open(file, "a", encoding="utf-8") as lines:
            lines.write(json.dumps(plain) + "\n")

    def last_start(self) -> dict[str, Any] | None:
        """The last record of `starts`, of which `forget_after` has dropped what was cut off; None if there is none."""
        lines = self.starts.read_text(encoding="utf-8").splitlines() if self.starts.is_file() else []
        return json.loads(lines[-1]) if lines else None

    def requantized(self) -> tuple[bool, bool]:
        """Whether some start quantized the weights anew, into another recipe; and whether without masters too."""
        lines = self.starts.read_text(encoding="utf-8").splitlines() if self.starts.is_file() else []
        found = [start for line in lines if "requantized" in (start := _record(line))]
        return bool(found), any(start["lossy"] for start in found)

    def forget_after(self, step: int) -> None:
        """Drop the records of later steps, and a line that was cut off, so that the files read as one run."""
        for file in (self.metrics, self.samples, self.starts):
            if not file.exists():
                continue
            lines = file.read_text(encoding="utf-8").splitlines()
            kept = [line for line in lines if _step_of(line) <= step]
            if kept != lines:
                self._replace(file, "".join(line + "\n" for line in kept))

    def _replace(self, file: Path, content: str) -> None:
        new = file.with_name(file.name + ".new")
        new.write_text(content, encoding="utf-8")
        os.replace(new, file)

    # Lock ------------------------------------------------------------------------------------------------------------

    def lock(self) -> None:
        """Hold the run until this process ends, however it ends.

        Raises:
            ConfigurationError: another process holds it, and did not end within a few seconds.
        """
        try:
            ownership.lock(self.path)
        except BlockingIOError:
            said = f"{self.path} is in use by another training process; stop that one first"
            raise ConfigurationError(said) from None


def _record(line: str) -> dict[str, Any]:
    """What a line says; nothing if it was cut off."""
    try:
        return dict(json.loads(line))
    except (ValueError, TypeError):
        return {}


def _step_of(line: str) -> float:
    """The step of a record; infinite for a line that is none."""
    try:
        return int(_record(line)["step"])
    except (ValueError, KeyError, TypeError):
        return math.inf
