"""Statistics of a file of any length: some samples, evenly, the first and the last; every alarm; no more is parsed."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quantshard.checkpoints.disk.store import LocalStore
from quantshard.tools.report import record_sample, records
from quantshard.tools.report.history import read_history
from quantshard.tools.report.page import render
from quantshard.tools.report.records import Record
from quantshard.tools.report.watching import RunWatch
from tests.tools.report.runs import made_run, sampled, write

ALARM = {"kind": "saturation", "name": "a", "value": 0.2, "text": 'odd: ], "alarms": [] }'}
SPIKE = {"kind": "loss", "name": "loss", "value": 9.0, "text": "a spike"}


@pytest.fixture
def parsed(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """The lines of statistics that are parsed, where 20 samples of 2000 may be."""
    found: list[bytes] = []

    parse = records.records_of

    def noted(lines: list[bytes], all_or_none: bool = False) -> list[Record]:
        found.extend(line for line in lines if b'"alarms"' in line)
        return parse(lines, all_or_none)

    monkeypatch.setattr(records, "records_of", noted)
    monkeypatch.setattr(record_sample, "_PARSED", 20 * len(json.dumps(sampled(1000))))
    return found


def dense(tmp_path: Path, alarms: dict[int, tuple[dict[str, Any], ...]]) -> Path:
    """A run with 2000 samples; a step that 2 does not divide has alarms alone."""
    run = made_run(tmp_path / "run", steps=10)
    steps = sorted({*range(2, 4001, 2), *alarms})
    write(run / "statistics.jsonl", [_record(step, alarms.get(step, ())) for step in steps])
    return run


def _record(step: int, alarms: tuple[dict[str, Any], ...]) -> Record:
    return sampled(step, alarms) if step % 2 == 0 else {"step": step, "rows": [], "alarms": list(alarms)}


def test_some_samples_evenly_and_all_alarms(tmp_path: Path, parsed: list[bytes]) -> None:
    alarms = {2: (ALARM,), 1000: (ALARM, SPIKE), 1001: (SPIKE,), 2002: (ALARM,), 3999: (SPIKE,), 4000: (ALARM,)}
    history = read_history(dense(tmp_path, alarms))
    firsts = [column.first for column in history.statistics.columns]
    assert firsts[0] == 2 and history.statistics.columns[-1].last == 4000 and 18 <= len(firsts) <= 23
    apart = np.diff(firsts)
    assert apart[:-1].max() < 1.3 * apart[:-1].min(), "they are not evenly apart"
    assert [(entry.step, entry.kind) for entry in history.statistics.alarms()] == [
        (step, alarm["kind"]) for step, told in alarms.items() for alarm in told
    ]
    assert history.statistics.alarms()[0].text == ALARM["text"] and history.statistics.counts["saturation"] == 4
    whole = [line for line in parsed if b'"rows": [{' in line]
    assert len(whole) == len(firsts) and len(parsed) <= len(whole) + len(alarms)
    (note,) = history.notes
    assert f"has 2,000 samples of statistics: the maps show {len(firsts)} of them" in note
    assert "has 2,000 samples of statistics" in render([history])


def test_a_short_file_is_read_whole(tmp_path: Path) -> None:
    history = read_history(dense(tmp_path, {}))
    assert sum(history.statistics.each for _ in history.statistics.columns) >= 2000 and not history.notes


def test_an_alarm_behind_the_last_sample(tmp_path: Path, parsed: list[bytes]) -> None:
    history = read_history(dense(tmp_path, {4001: (SPIKE,)}))
    assert history.statistics.columns[-1].last == 4000 and [a.step for a in history.statistics.alarms()] == [4001]


def test_lines_of_others_are_parsed(tmp_path: Path, parsed: list[bytes]) -> None:
    run = dense(tmp_path, {})
    lines = (run / "statistics.jsonl").read_text().splitlines()
    lines[999] = json.dumps({"alarms": [SPIKE], "step": 2000})
    lines[1499] = json.dumps(sampled(3000, (ALARM,)), separators=(",", ":"))
    lines[1600] = "no record"
    (run / "statistics.jsonl").write_text("\n".join(lines) + "\n")
    history = read_history(run)
    assert [entry.step for entry in history.statistics.alarms()] == [2000, 3000]
    assert 3000 in [column.first for column in history.statistics.columns]
    assert any("1 line is no record" in note for note in history.notes)
    assert any("has 1,998 samples" in note for note in history.notes)


def test_of_a_file_beyond_what_is_looked_at_parts_are_read(
    tmp_path: Path, parsed: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(records, "AT_ONCE", 4096)
    monkeypatch.setattr(record_sample, "LOG_BYTES", 10 * 4096)
    run = dense(tmp_path, {2: (ALARM,), 3: (SPIKE,), 4000: (ALARM,)})
    asked: list[int] = []
    before = LocalStore.read_range

    def noted(store: LocalStore, path: str, start: int, stop: int) -> bytes:
        if path.endswith("statistics.jsonl"):
            asked.append(start)
        return before(store, path, start, stop)

    monkeypatch.setattr(LocalStore, "read_range", noted)
    history = read_history(run)
    size = (run / "statistics.jsonl").stat().st_size
    apart = np.diff(asked)
    assert len(asked) <= 11 and apart.max() < 1.2 * size / 9
    columns = history.statistics.columns
    assert columns[0].first == 2 and columns[-1].last == 4000
    assert [entry.step for entry in history.statistics.alarms()] == [2, 3, 4000]
    left = size - 10 * 4096
    told = next(note for note in history.notes if "are not read" in note)
    assert f"{left / 1024:.0f}"[:2] in told and not any("no record" in note for note in history.notes)


@pytest.mark.exhaustive
@pytest.mark.parametrize("content", [b"", b"\n" * (200 << 20)], ids=["sparse", "line ends"])
def test_long_files_take_seconds(tmp_path: Path, content: bytes) -> None:
    run = made_run(tmp_path / "run", steps=5)
    for name in ("statistics.jsonl", "metrics.jsonl"):
        (run / name).write_bytes(content)
        if not content:
            os.truncate(run / name, 20 << 30)
    start = time.process_time()
    history = read_history(run)
    assert time.process_time() - start < 10
    assert content or any("19.0 GiB of it, evenly over the run, are not read" in note for note in history.notes)


def test_a_watch_parses_alarms_alone(tmp_path: Path, parsed: list[bytes]) -> None:
    run = dense(tmp_path, {2: (ALARM,), 1000: (ALARM,), 1001: (SPIKE,), 4000: (ALARM,)})
    watch = RunWatch(run)
    watch.poll(10)
    assert [entry.step for entry in watch.figures.alarms] == [1000, 1001, 4000]
    assert len(parsed) == 4 and not any(b'"rows": [{' in line for line in parsed)
    write(run / "statistics.jsonl", [sampled(4002), sampled(4004, (SPIKE,))], "a")
    watch.poll(10)
    assert [entry.step for entry in watch.figures.alarms] == [1001, 4000, 4004] and len(parsed) == 5
