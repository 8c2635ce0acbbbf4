"""Access to the files of a run in a folder or at a URL. Contents are untrusted, and links are not followed."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from quantshard import foreign
from quantshard.checkpoints.disk import manifest, ownership
from quantshard.checkpoints.disk.commit import is_complete
from quantshard.checkpoints.disk.store import LocalStore, locate, why
from quantshard.errors import CheckpointError, ConfigurationError
from quantshard.tools.report.records import Record, RecordFile
from quantshard.tools.terminal import inputs

CONFIG, METRICS, STARTS, STATISTICS = "config.toml", "metrics.jsonl", "starts.jsonl", "statistics.jsonl"
PARAMETERS, CHECKPOINTS = "parameters.json", "checkpoints"

STATISTICS_BYTES = 256 << 20
"""Bytes of `statistics.jsonl` that are read; of a longer file, evenly spaced parts."""

_CONFIG_BYTES = 32 << 20
_PARAMETER_BYTES = 64 << 20
_MOST_STARTS, _MOST_CHECKPOINTS = 1000, 200
_STEP = re.compile(r"step-(\d{1,12})")


@dataclass(frozen=True)
class CheckpointRow:
    """One checkpoint of a run; `bytes` and `saved_at` are None if unknown."""

    step: int
    complete: bool
    bytes: int | None = None
    saved_at: datetime | None = None


class RunSource:
    """The files of a run, given the path or URL of its folder.

    Raises:
        ConfigurationError: the folder does not contain a run.
        CheckpointError: the URL cannot be reached.
    """

    def __init__(self, run: str | os.PathLike[str]) -> None:
        self.store, self.place = locate(os.fspath(run))
        whole = os.path.abspath(self.place) if self._is_local else self.place
        self.name = whole.rstrip("/").rpartition("/")[2] or whole
        try:
            is_run = self.store.is_file(self.file(CONFIG))
        except OSError as error:
            raise ConfigurationError(f"{run} cannot be read: {why(error)}") from None
        if not is_run:
            hint = inputs.meant_path(Path(self.place)) if self._is_local and not os.path.lexists(self.place) else ""
            raise ConfigurationError(f"there is no run in {run}: it has no {CONFIG}{hint}")

    @property
    def _is_local(self) -> bool:
        return isinstance(self.store, LocalStore)

    def file(self, name: str) -> str:
        """Path or URL of a file of the run."""
        return self.store.join(self.place, name)

    def records(self, name: str) -> RecordFile:
        """Open a record file of the run."""
        return RecordFile(self.store, self.file(name))

    def config(self) -> dict[str, Any]:
        """Settings by name, with nested tables flattened (`launch.processes`) and without `corpus.files`.

        Raises:
            ConfigurationError: the file is not TOML or cannot be read.
        """
        where = self.file(CONFIG)
        try:
            content = self.store.read(where, _CONFIG_BYTES)
        except OSError as error:
            raise ConfigurationError(f"cannot read {where}: {why(error)}") from None
        settings = flattened(foreign.toml_table(content, where))
        return {name: value for name, value in settings.items() if name != "corpus.files"}

    def parameters(self) -> dict[str, Any]:
        """JSON report of `explain` from the last start; empty if the run did not write one.

        Raises:
            ConfigurationError: the file is not JSON or cannot be read.
        """
        where = self.file(PARAMETERS)
        try:
            if not self.store.is_file(where):
                return {}
            return foreign.json_object(self.store.read(where, _PARAMETER_BYTES), where)
        except OSError as error:
            raise ConfigurationError(f"cannot read {where}: {why(error)}") from None

    def starts(self) -> list[Record]:
        """Records of the first starts of the run, at most `_MOST_STARTS`."""
        records: list[Record] = []
        for batch in self.records(STARTS).batches():
            records += batch[: _MOST_STARTS - len(records)]
            if len(records) == _MOST_STARTS:
                break
        return records

    def checkpoints(self) -> list[CheckpointRow]:
        """The newest checkpoints, at most `_MOST_CHECKPOINTS`, in ascending order.

        Empty if a server does not list folders.
        """
        folder = self.file(CHECKPOINTS)
        try:
            names = [] if os.path.islink(folder) else self.store.names(folder)
        except OSError:
            return []
        steps = [(int(step[1]), name) for name in names if (step := _STEP.fullmatch(name.rstrip("/")))]
        newest = sorted(steps)[-_MOST_CHECKPOINTS:]
        return [self._checkpoint(step, self.store.join(folder, name)) for step, name in newest]

    def _checkpoint(self, step: int, path: str) -> CheckpointRow:
        try:
            if os.path.islink(path):
                return CheckpointRow(step, False)
            described = manifest.read_manifest(path)
            if described is None:
                return CheckpointRow(step, is_complete(path))
        except CheckpointError:
            return CheckpointRow(step, False)
        whole = not self._is_local or not manifest.problems(path, contents=False)
        return CheckpointRow(step, whole, described.bytes, _moment(described.saved_at))

    def is_trained(self) -> bool | None:
        """Whether a process is training the run now, or None if unknown, as for a URL."""
        return ownership.is_locked(self.place) if self._is_local else None


def flattened(table: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    """Flatten nested tables into entries with dotted names."""
    flat: dict[str, Any] = {}
    for name, value in table.items():
        flat |= flattened(value, f"{before}{name}.") if isinstance(value, Mapping) else {before + name: value}
    return flat


def _moment(text: str) -> datetime | None:
    try:
        moment = datetime.fromisoformat(text)
        return None if moment.tzinfo is None else moment.astimezone(timezone.utc)
    except (ValueError, OverflowError):
        return None
