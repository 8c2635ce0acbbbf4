"""Reads the files of a run, in a folder or at a URL, into a `RunHistory`. They are untrusted; no link is followed."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np

from quantshard import foreign
from quantshard.checkpoints.disk import ownership
from quantshard.checkpoints.disk.store import LocalStore, locate, why
from quantshard.errors import ConfigurationError
from quantshard.readable import human_bytes
from quantshard.tools.report.records import (
    LARGEST,
    LARGEST_STEP,
    Column,
    MetricTable,
    Record,
    RecordFile,
    StatisticsReader,
)

CONFIG, METRICS, STARTS, STATISTICS = "config.toml", "metrics.jsonl", "starts.jsonl", "statistics.jsonl"

_CONFIG_BYTES = 32 << 20
_MOST_STARTS = 1000


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
            raise ConfigurationError(f"there is no run in {run}: it has no {CONFIG}")

    def file(self, name: str) -> str:
        """Path or URL of a file of the run."""
        return self.store.join(self.place, name)

    def records(self, name: str) -> RecordFile:
        """Open a record file of the run."""
        return RecordFile(self.store, self.file(name))

    def config(self) -> dict[str, Any]:
        """Settings by name, with nested tables flattened (`launch.processes`) and without `corpus.files`."""
        where = self.file(CONFIG)
        try:
            content = self.store.read(where, _CONFIG_BYTES)
        except OSError as error:
            raise ConfigurationError(f"cannot read {where}: {why(error)}") from None
        settings = flattened(foreign.toml_table(content, where))
        return {name: value for name, value in settings.items() if name != "corpus.files"}

    def starts(self) -> list[Record]:
        """Records of the first starts of the run, at most `_MOST_STARTS`."""
        return list(islice(self.records(STARTS).records(), _MOST_STARTS))

    def is_trained(self) -> bool | None:
        """Whether a process is training the run now, or None if unknown, as for a URL."""
        return ownership.is_locked(self.place) if self.is_local else None


def flattened(table: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    """Flatten nested tables into entries with dotted names."""
    flat: dict[str, Any] = {}
    for name, value in table.items():
        flat |= flattened(value, f"{before}{name}.") if isinstance(value, Mapping) else {before + name: value}
    return flat


# The whole run

LOSS, HELDOUT, HELDOUT_OF_AVERAGE, SPEED, MEMORY = (
    "loss", "heldout_loss", "heldout_loss_ema", "tokens_per_s", "memory_bytes",
)  # fmt: skip
"""Names in `metrics.jsonl` that get special treatment in a report; other figures are plotted unchanged."""


@dataclass(frozen=True)
class RunHistory:
    """All data that a run has written so far.

    `where`: path or URL as the user wrote it. `config`: settings by name. `is_trained`: whether a process is training
    the run now, or None if unknown. `notes`: sentences about data that was torn, broken or left out.
    """

    name: str
    where: str
    config: dict[str, Any]
    starts: list[Record]
    metrics: MetricTable
    statistics: StatisticsReader
    is_trained: bool | None
    notes: tuple[str, ...]

    def tokens(self) -> Column | None:
        """Cumulative training tokens at each step, or None if unknown."""
        per_step = tokens_per_step(self.config)
        return None if per_step is None else self.metrics.steps.astype(np.float64) * per_step

    def seconds(self) -> Column | None:
        """Cumulative training seconds at each step, or None if unknown."""
        speed, tokens = self.metrics.columns.get(SPEED), tokens_per_step(self.config)
        if speed is None or tokens is None:
            return None
        # A speed that is missing or not finite adds no time.
        return np.cumsum(np.divide(tokens, speed, out=np.zeros(len(speed)), where=speed > tokens / LARGEST))


def tokens_per_step(config: dict[str, Any]) -> float | None:
    """Number of tokens per step according to the settings, or None."""
    sizes = [config.get(name) for name in ("global_batch", "seq_length")]
    return float(math.prod(sizes)) if all(type(size) is int and 0 < size < 1 << 40 for size in sizes) else None  # type: ignore[arg-type, operator]


def planned_steps(config: dict[str, Any]) -> int | None:
    """Number of steps in the settings, or None if missing or invalid."""
    steps = config.get("steps")
    return steps if type(steps) is int and 0 < steps < LARGEST_STEP else None


def read_history(run: str | os.PathLike[str]) -> RunHistory:
    """Read all files of a run, also while the run is being trained."""
    source = RunSource(run)
    files = {name: source.records(name) for name in (METRICS, STATISTICS)}
    statistics = StatisticsReader()
    try:
        metrics = MetricTable.of(files[METRICS].records())
        statistics.add(files[STATISTICS].records())
        starts = source.starts()
    except OSError as error:
        where = error.filename or source.file(STARTS)
        raise ConfigurationError(f"cannot read {where}: {why(error)}") from None
    notes = tuple(note for file in files.values() for note in _omissions(file))
    return RunHistory(
        source.name, os.fspath(run), source.config(), starts, metrics, statistics, source.is_trained(), notes,
    )  # fmt: skip


def _omissions(file: RecordFile) -> list[str]:
    """Sentences about what a record file lost, or what was not read of it."""
    lines = "1 line is" if file.broken == 1 else f"{file.broken} lines are"
    problems = {
        f"{lines} no record, and left out": file.broken,
        "its last line was cut off, or is still being written, and is left out": file.torn,
        f"the first {human_bytes(file.skipped)} were not read": file.skipped,
    }
    return [f"{file.path}: {text}" for text, applies in problems.items() if applies]
