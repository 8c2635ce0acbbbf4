"""Reads the untrusted files of a run, in a folder or at a URL, at once or while they grow. No link is followed."""

import math
import os
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np

from quantshard import foreign
from quantshard.checkpoints.disk import ownership
from quantshard.checkpoints.disk.store import LocalStore, Store, locate, why
from quantshard.errors import ConfigurationError
from quantshard.readable import human_bytes
from quantshard.tools.report import records

CONFIG, METRICS, STARTS, STATISTICS = "config.toml", "metrics.jsonl", "starts.jsonl", "statistics.jsonl"


def flattened(table: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in table.items():
        flat |= flattened(value, f"{before}{name}.") if isinstance(value, Mapping) else {before + name: value}
    return flat


LOSS, HELDOUT, HELDOUT_OF_AVERAGE, SPEED, MEMORY = (
    "loss", "heldout_loss", "heldout_loss_ema", "tokens_per_s", "memory_bytes",
)  # fmt: skip
"""Names in `metrics.jsonl` that get special treatment in a report; other figures are plotted unchanged."""


@dataclass(frozen=True)
class RunHistory:
    """All data that a run has written so far.

    `where`: path or URL as the user wrote it. `config`: settings by name. `is_trained`: whether a process is training
    the run now; None if unknown. `notes`: sentences about incomplete, invalid or skipped data.
    """

    name: str
    where: str
    config: dict[str, Any]
    starts: list[records.Record]
    metrics: records.MetricTable
    statistics: records.StatisticsReader
    is_trained: bool | None
    notes: tuple[str, ...]

    def tokens(self) -> records.Column | None:
        """Cumulative training tokens at each step, or None if unknown."""
        per_step = tokens_per_step(self.config)
        return None if per_step is None else self.metrics.steps.astype(np.float64) * per_step

    def seconds(self) -> records.Column | None:
        """Cumulative training seconds at each step, or None if unknown."""
        speed, tokens = self.metrics.columns.get(SPEED), tokens_per_step(self.config)
        if speed is None or tokens is None:
            return None
        # A speed that is missing or not finite adds no time.
        return np.cumsum(np.divide(tokens, speed, out=np.zeros(len(speed)), where=speed > tokens / records.LARGEST))


def tokens_per_step(config: dict[str, Any]) -> float | None:
    sizes = [config.get(name) for name in ("global_batch", "seq_length")]
    return float(math.prod(sizes)) if all(type(size) is int and 0 < size < 1 << 40 for size in sizes) else None  # type: ignore[arg-type, operator]


def planned_steps(config: dict[str, Any]) -> int | None:
    steps = config.get("steps")
    return steps if type(steps) is int and 0 < steps < records.LARGEST_STEP else None


def read_config(store: Store, path: str) -> dict[str, Any]:
    """Settings of a run by name, with nested tables flattened (`launch.processes`) and without `corpus.files`."""
    file = store.join(path, CONFIG)
    try:
        if not store.is_file(file):
            raise ConfigurationError(f"there is no run in {path}: it has no {CONFIG}")
        settings = flattened(foreign.toml_table(store.read(file, 32 << 20), file))
    except OSError as error:
        raise ConfigurationError(f"cannot read {file}: {why(error)}") from None
    settings.pop("corpus.files", None)
    return settings


def read_history(run: str | os.PathLike[str]) -> RunHistory:
    """Read all files of a run, given the path or URL of its folder, also while the run is being trained."""
    store, path = locate(os.fspath(run))
    is_local = isinstance(store, LocalStore)
    absolute = os.path.abspath(path) if is_local else path
    metrics_file, starts_file, statistics_file = (
        records.RecordFile(store, store.join(path, name)) for name in (METRICS, STARTS, STATISTICS)
    )
    statistics = records.StatisticsReader()
    try:
        config = read_config(store, path)
        metrics = records.MetricTable.of(metrics_file.records())
        statistics.add(statistics_file.records())
        starts = list(islice(starts_file.records(), 1000))
    except OSError as error:
        raise ConfigurationError(f"cannot read {error.filename or run}: {why(error)}") from None
    return RunHistory(
        absolute.rstrip("/").rpartition("/")[2] or absolute,
        os.fspath(run),
        config,
        starts,
        metrics,
        statistics,
        # a lock at a URL cannot be checked
        ownership.is_locked(path) if is_local else None,
        tuple(note for file in (metrics_file, statistics_file) for note in _omissions(file)),
    )


def _omissions(file: records.RecordFile) -> list[str]:
    lines = "1 line is" if file.broken == 1 else f"{file.broken} lines are"
    problems = {
        f"{lines} no record, and left out": file.broken,
        "its last line was cut off, or is still being written, and is left out": file.torn,
        f"the first {human_bytes(file.skipped)} were not read": file.skipped,
    }
    return [f"{file.path}: {text}" for text, applies in problems.items() if applies]


def step_line(entry: Mapping[str, Any], planned: int | None) -> str:
    line = f"loss {_said(entry.get(LOSS), '.4f')}  lr {_said(entry.get('lr'), '.2e')}"
    line += f"  {_said(entry.get(SPEED), ',.0f')} tokens/s"
    if records.number(entry.get("skipped_steps")) > 0:
        line += f"  {_said(entry['skipped_steps'], '.0f')} steps skipped"
    if records.number(entry.get("dropped_rows")) > 0:
        line += f"  {_said(entry['dropped_rows'], '.1%')} of rows dropped"
    if HELDOUT in entry:
        line += f"  held-out loss {_said(entry[HELDOUT], '.4f')}"
    if HELDOUT_OF_AVERAGE in entry:
        line += f"  of the average {_said(entry[HELDOUT_OF_AVERAGE], '.4f')}"
    return f"step {records.step_of(entry) or 0}{'' if planned is None else f'/{planned}'}  {line}"


def _said(value: object, form: str) -> str:
    """Format a figure; a value that is not a finite number is returned as text."""
    return format(records.number(value), form) if math.isfinite(records.number(value)) else str(value)[:20]


START_SECONDS = 30.0
"""Seconds to wait for a run to start, because its processes lock it only after importing PyTorch."""


class RunWatch:
    """Follows a run, reading only new records at each poll. `state`: "" until the run is "done" or "stopped"."""

    def __init__(self, run: str | os.PathLike[str]) -> None:
        self._store, self._path = locate(os.fspath(run))
        self.is_local = isinstance(self._store, LocalStore)
        self.step, self.state = 0, ""
        self.planned = planned_steps(read_config(self._store, self._path))
        self._metrics, self._statistics = (
            records.RecordFile(self._store, self._store.join(self._path, name)) for name in (METRICS, STATISTICS)
        )
        self._starts_until = time.monotonic() + START_SECONDS

    def poll(self, most: int) -> list[str]:
        """Read new records; return a line for each new step and alarm, at most the last `most` of both."""
        last_step = -1
        if self._metrics.was_rewritten():
            # A resume rewrote the file, possibly with a new number of steps.
            last_step, self.step = self.step, 0
            self._statistics.restart()
            self.planned = planned_steps(read_config(self._store, self._path))
        added: deque[records.Record] = deque(maxlen=most)
        for record in self._metrics.records():
            if (step := records.step_of(record)) is not None:
                self.step = step
                if step > last_step:
                    added.append(record)
        self._statistics.was_rewritten()
        reader = records.StatisticsReader()
        reader.add({"step": r.get("step"), "alarms": r.get("alarms")} for r in self._statistics.records())
        alarms = [alarm for alarm in reader.alarms if alarm.step > last_step]
        return [
            *(step_line(record, self.planned) for record in added),
            *(f"ALARM ({alarm.kind}): {alarm.text}" for alarm in alarms[-most:]),
        ]

    def has_ended(self) -> bool:
        """Whether the last step is done, the run's process stopped, or none started in `START_SECONDS`."""
        is_trained = ownership.is_locked(self._path) if self.is_local else None
        if is_trained:
            self._starts_until = 0.0
            return False
        self.planned = planned_steps(read_config(self._store, self._path))
        if self.planned is not None and self.step >= self.planned:
            self.state = "done"
        elif is_trained is False and time.monotonic() >= self._starts_until:
            self.state = "stopped"
        return bool(self.state)
