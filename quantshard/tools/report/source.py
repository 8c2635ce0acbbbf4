"""Where a run lies, a folder or a URL, and what its small files say: nothing of it is trusted, and no link followed."""

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

_CONFIG_BYTES = 32 << 20
_PARAMETER_BYTES = 64 << 20
_MOST_STARTS, _MOST_CHECKPOINTS = 1000, 200
_STEP = re.compile(r"step-(\d{1,12})")


@dataclass(frozen=True)
class CheckpointRow:
    """One checkpoint of a run: after which step, whether it is whole, its bytes, and when it was saved (None: its
    manifest does not say)."""

    step: int
    complete: bool
    bytes: int | None = None
    saved_at: datetime | None = None


class RunSource:
    """A run's files, by the path or the URL of its folder.

    Raises:
        ConfigurationError: there is no run.
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
        """The path of one of its files."""
        return self.store.join(self.place, name)

    def records(self, name: str) -> RecordFile:
        """One of its files of records."""
        return RecordFile(self.store, self.file(name))

    def config(self) -> dict[str, Any]:
        """Its settings by name, those of tables with a dot: `launch.processes`; the list of its data left out.

        Raises:
            ConfigurationError: it is not TOML, or cannot be read.
        """
        where = self.file(CONFIG)
        try:
            content = self.store.read(where, _CONFIG_BYTES)
        except OSError as error:
            raise ConfigurationError(f"cannot read {where}: {why(error)}") from None
        found = flattened(foreign.toml_table(content, where))
        return {name: value for name, value in found.items() if name != "corpus.files"}

    def parameters(self) -> dict[str, Any]:
        """What `explain` found when it was started last; empty for a run that did not note it.

        Raises:
            ConfigurationError: it is not JSON, or cannot be read.
        """
        where = self.file(PARAMETERS)
        try:
            if not self.store.is_file(where):
                return {}
            return foreign.json_object(self.store.read(where, _PARAMETER_BYTES), where)
        except OSError as error:
            raise ConfigurationError(f"cannot read {where}: {why(error)}") from None

    def starts(self) -> list[Record]:
        """The records of its starts, the first ones where they are many."""
        found: list[Record] = []
        for batch in self.records(STARTS).batches():
            found += batch[: _MOST_STARTS - len(found)]
            if len(found) == _MOST_STARTS:
                break
        return found

    def checkpoints(self) -> list[CheckpointRow]:
        """Its checkpoints, the newest ones where they are many, ascending; empty where a server does not list them."""
        folder = self.file(CHECKPOINTS)
        try:
            if self.store.leads_out(self.store.join(folder, "x"), self.place):
                return []
            names = self.store.names(folder)
        except OSError:
            return []
        found = [(int(step[1]), name) for name in names if (step := _STEP.fullmatch(name.rstrip("/")))]
        newest = sorted(found)[-_MOST_CHECKPOINTS:]
        return [self._checkpoint(step, self.store.join(folder, name)) for step, name in newest]

    def _checkpoint(self, step: int, path: str) -> CheckpointRow:
        try:
            if self.store.leads_out(self.store.join(path, "x"), self.place):
                return CheckpointRow(step, False)
            described = manifest.read_manifest(path)
            if described is None:
                return CheckpointRow(step, is_complete(path))
        except CheckpointError:
            return CheckpointRow(step, False)
        whole = not self._is_local or not manifest.problems(path, contents=False)
        return CheckpointRow(step, whole, described.bytes, _moment(described.saved_at))

    def is_trained(self) -> bool | None:
        """Whether a process trains it now; None where nobody can tell, as behind a URL."""
        return ownership.is_locked(self.place) if self._is_local else None


def flattened(table: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    """A table whose inner tables are entries of names with a dot."""
    found: dict[str, Any] = {}
    for name, value in table.items():
        found |= flattened(value, f"{before}{name}.") if isinstance(value, Mapping) else {before + name: value}
    return found


def _moment(text: str) -> datetime | None:
    try:
        moment = datetime.fromisoformat(text)
        return None if moment.tzinfo is None else moment.astimezone(timezone.utc)
    except (ValueError, OverflowError):
        return None
