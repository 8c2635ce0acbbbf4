"""Reads the files of a run, in a folder or at a URL, into a `RunHistory`. They are untrusted; no link is followed."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np

from quantshard import foreign
from quantshard.checkpoints.disk import manifest, ownership
from quantshard.checkpoints.disk.commit import is_complete
from quantshard.checkpoints.disk.store import LocalStore, locate, why
from quantshard.errors import CheckpointError, ConfigurationError
from quantshard.readable import human_bytes
from quantshard.tools.report.records import (
    LARGEST,
    LARGEST_STEP,
    MOST_COLUMNS,
    Column,
    MetricReader,
    MetricTable,
    Record,
    RecordFile,
    StatisticsReader,
)
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
    """The files of a run, given the path or URL of its folder."""

    def __init__(self, run: str | os.PathLike[str]) -> None:
        self.store, self.place = locate(os.fspath(run))
        self.is_local = isinstance(self.store, LocalStore)
        whole = os.path.abspath(self.place) if self.is_local else self.place
        self.name = whole.rstrip("/").rpartition("/")[2] or whole
        try:
            is_run = self.store.is_file(self.file(CONFIG))
        except OSError as error:
            raise ConfigurationError(f"{run} cannot be read: {why(error)}") from None
        if not is_run:
            hint = inputs.meant_path(Path(self.place)) if self.is_local and not os.path.lexists(self.place) else ""
            raise ConfigurationError(f"there is no run in {run}: it has no {CONFIG}{hint}")

    def file(self, name: str) -> str:
        """Path or URL of a file of the run."""
        return self.store.join(self.place, name)

    def records(self, name: str) -> RecordFile:
        """Open a record file of the run."""
        return RecordFile(self.store, self.file(name))

    def config(self) -> dict[str, Any]:
        """Settings by name, with nested tables flattened (`launch.processes`) and without `corpus.files`."""
        where = self.file(CONFIG)
        content = self._read(where, _CONFIG_BYTES)
        settings = flattened(foreign.toml_table(content, where))
        return {name: value for name, value in settings.items() if name != "corpus.files"}

    def parameters(self) -> dict[str, Any]:
        """JSON report of `explain` from the last start; empty if the run did not write one."""
        where = self.file(PARAMETERS)
        content = self._read(where, _PARAMETER_BYTES, if_missing=b"{}")
        return foreign.json_object(content, where)

    def _read(self, where: str, limit: int, if_missing: bytes | None = None) -> bytes:
        try:
            if if_missing is not None and not self.store.is_file(where):
                return if_missing
            return self.store.read(where, limit)
        except OSError as error:
            raise ConfigurationError(f"cannot read {where}: {why(error)}") from None

    def starts(self) -> list[Record]:
        """Records of the first starts of the run, at most `_MOST_STARTS`."""
        starts: list[Record] = []
        for batch in self.records(STARTS).batches():
            starts += batch[: _MOST_STARTS - len(starts)]
            if len(starts) == _MOST_STARTS:
                break
        return starts

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
        whole = not self.is_local or not manifest.problems(path, contents=False)
        return CheckpointRow(step, whole, described.bytes, _moment(described.saved_at))

    def is_trained(self) -> bool | None:
        """Whether a process is training the run now, or None if unknown, as for a URL."""
        return ownership.is_locked(self.place) if self.is_local else None


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


# The whole run

LOSS, HELDOUT, HELDOUT_OF_AVERAGE, SPEED, MEMORY, SECONDS, TOKENS = (
    "loss", "heldout_loss", "heldout_loss_ema", "tokens_per_s", "memory_bytes", "seconds", "tokens",
)  # fmt: skip
"""Names in `metrics.jsonl` that get special treatment in a report; other figures are plotted unchanged."""


@dataclass(frozen=True)
class RunHistory:
    """All data that a run has written so far.

    `where`: path or URL as the user wrote it. `config`: settings by name. `parameters`: the JSON report of `explain`.
    `is_trained`: whether a process is training the run now, or None if unknown. `notes`: sentences about data that was
    torn, broken or left out.
    """

    name: str
    where: str
    config: dict[str, Any]
    parameters: dict[str, Any]
    starts: list[Record]
    metrics: MetricTable
    statistics: StatisticsReader
    checkpoints: list[CheckpointRow]
    is_trained: bool | None
    notes: tuple[str, ...]

    @property
    def elsewhere(self) -> str:
        """Location of the checkpoints outside the run's folder, or ""."""
        return checkpoints_elsewhere(self.config)

    def tokens(self) -> Column | None:
        """Cumulative training tokens at each step, or None if unknown."""
        counted = self.metrics.columns.get(TOKENS)
        if counted is not None and len(counted) and np.isfinite(counted).all() and (np.diff(counted) >= 0).all():
            return counted
        per_step = tokens_per_step(self.config)
        return None if per_step is None else self.metrics.steps.astype(np.float64) * per_step

    def seconds(self) -> Column | None:
        """Cumulative training seconds at each step, or None if unknown."""
        durations = self.metrics.columns.get(SECONDS)
        if durations is None:
            speed, tokens = self.metrics.columns.get(SPEED), tokens_per_step(self.config)
            if speed is None or tokens is None:
                return None
            durations = np.divide(tokens, speed, out=np.full(len(speed), np.nan), where=speed > tokens / LARGEST)
        return np.cumsum(np.where(np.isfinite(durations) & (durations >= 0), durations, 0.0))


def tokens_per_step(config: dict[str, Any]) -> float | None:
    """Number of tokens per step according to the settings, or None."""
    sizes = [config.get(name) for name in ("global_batch", "seq_length")]
    return float(math.prod(sizes)) if all(type(size) is int and 0 < size < 1 << 40 for size in sizes) else None  # type: ignore[arg-type, operator]


def planned_steps(config: dict[str, Any]) -> int | None:
    """Number of steps in the settings, or None if missing or invalid."""
    steps = config.get("steps")
    return steps if type(steps) is int and 0 < steps < LARGEST_STEP else None


def checkpoints_elsewhere(config: dict[str, Any]) -> str:
    """Location of checkpoints in the settings, or "". Untrusted: for display only, never accessed."""
    location = config.get("checkpoints")
    return location if isinstance(location, str) else ""


def read_history(run: str | os.PathLike[str]) -> RunHistory:
    """Read all files of a run, also while the run is being trained."""
    source = RunSource(run)
    files = {name: source.records(name) for name in (METRICS, STATISTICS)}
    metrics, statistics = MetricReader(), StatisticsReader()
    try:
        for batch in files[METRICS].batches():
            metrics.add(batch)
        for batch in files[STATISTICS].batches(STATISTICS_BYTES):
            statistics.add(batch)
        starts = source.starts()
    except OSError as error:
        where = error.filename or source.file(STARTS)
        raise ConfigurationError(f"cannot read {where}: {why(error)}") from None
    table = metrics.table()
    notes = [note for file in files.values() for note in _omissions(file)]
    last = int(table.steps[-1]) if len(table.steps) else 0
    if lost := max(0, last - len(table.steps)):
        notes.append(f"{source.file(METRICS)} has no records of {lost:,} of {last:,} steps; curves are without them")
    if table.has_more:
        notes.append(f"{source.file(METRICS)} has more than {MOST_COLUMNS} figures a step; the others are not drawn")
    return RunHistory(
        source.name, os.fspath(run), source.config(), source.parameters(), starts, table, statistics,
        source.checkpoints(), source.is_trained(), tuple(notes),
    )  # fmt: skip


def _omissions(file: RecordFile) -> list[str]:
    """Sentences about what a record file lost, or what was not read of it."""
    lines = "1 line is" if file.broken == 1 else f"{file.broken} lines are"
    problems = {
        f"{lines} no record, and left out": file.broken,
        "its last line was cut off, or is still being written, and is left out": file.torn,
        f"{human_bytes(file.skipped)}, evenly over the run, were not read": file.skipped,
    }
    return [f"{file.path}: {text}" for text, applies in problems.items() if applies]
