"""Reads all files of a run into a `RunHistory`, the source of a report."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from typing import Any

import numpy as np

from quantshard.checkpoints.disk.store import why
from quantshard.errors import ConfigurationError
from quantshard.readable import human_bytes
from quantshard.tools.report.metrics import LARGEST, LARGEST_STEP, MOST_COLUMNS, Column, MetricReader, MetricTable
from quantshard.tools.report.records import Record, RecordFile
from quantshard.tools.report.samples import StatisticsReader
from quantshard.tools.report.source import METRICS, STARTS, STATISTICS, STATISTICS_BYTES, CheckpointRow, RunSource

LOSS, HELDOUT, HELDOUT_OF_AVERAGE, SPEED, MEMORY, SECONDS, TOKENS = (
    "loss", "heldout_loss", "heldout_loss_ema", "tokens_per_s", "memory_bytes", "seconds", "tokens",
)  # fmt: skip
"""Names in `metrics.jsonl` that get special treatment in a report; other figures are plotted unchanged."""


@dataclass(frozen=True)
class RunHistory:
    """All data that a run has written so far.

    Attributes:
        where: path or URL of the run, as the user wrote it.
        config: settings by name.
        parameters: the JSON report of `explain`.
        is_trained: whether a process is training the run now, or None if unknown.
        notes: sentences about data that was torn, broken or left out.
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
    def steps_planned(self) -> int | None:
        """Number of steps in the settings, or None if missing or invalid."""
        return planned_steps(self.config)

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
    """Read all files of a run, also while the run is being trained.

    Raises:
        ConfigurationError: the run does not exist, or one of its files is unreadable or damaged.
        CheckpointError: its URL cannot be reached.
    """
    source = RunSource(run)
    files = {name: source.records(name) for name in (METRICS, STATISTICS)}
    metrics, statistics = MetricReader(files[METRICS].path), StatisticsReader()
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
    if table.others:
        notes.append(f"{source.file(METRICS)} has more than {MOST_COLUMNS} figures a step; the others are not drawn")
    if statistics.left_out:
        notes.append(f"{source.file(STATISTICS)} has more tensors or statistics than a table shows; they are left out")
    return RunHistory(
        source.name, os.fspath(run), source.config(), source.parameters(), starts, table, statistics,
        source.checkpoints(), source.is_trained(), tuple(notes),
    )  # fmt: skip


def _omissions(file: RecordFile) -> list[str]:
    """Sentences about what a record file lost, or what was not read of it."""
    problems = []
    if file.broken:
        lines = "1 line is" if file.broken == 1 else f"{file.broken} lines are"
        problems.append(f"{file.path}: {lines} no record, and left out")
    if file.torn:
        problems.append(f"{file.path}: its last line was cut off, or is still being written, and is left out")
    if file.skipped:
        problems.append(f"{file.path}: {human_bytes(file.skipped)}, evenly over the run, were not read")
    return problems
