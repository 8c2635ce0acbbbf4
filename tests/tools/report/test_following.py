"""Following a run that is trained elsewhere: its new steps and alarms, and its end."""

from __future__ import annotations

from pathlib import Path

import pytest

from quantshard.checkpoints.disk import ownership
from quantshard.tools.report import history
from quantshard.tools.report.history import RunWatch
from tests.tools.report.runs import entry, made_run, sampled, write


def steps_in(lines: list[str]) -> list[int]:
    return [int(line.split()[1].partition("/")[0]) for line in lines if line.startswith("step")]


def test_following_a_run(tmp_path: Path) -> None:
    run = made_run(tmp_path / "run", steps=10, planned=20)
    followed = RunWatch(run)
    lines = followed.poll(4)
    assert steps_in(lines) == [7, 8, 9, 10] and followed.step == 10
    assert lines[-1] == "ALARM (saturation): a fifth of the codes is the largest one"
    assert not followed.has_ended() and followed.poll(99) == []  # nobody ever locked it: it may be about to begin
    write(run / "metrics.jsonl", [entry(11)], "a")
    write(run / "statistics.jsonl", [sampled(11, ({"kind": "nan", "text": "x"},))], "a")
    lines = followed.poll(99)
    assert steps_in(lines) == [11] and lines[-1] == "ALARM (nan): x"
    write(run / "metrics.jsonl", [entry(step, loss=9.0) for step in range(1, 8)])  # resumed after step 5
    (run / "config.toml").write_text((run / "config.toml").read_text().replace("steps = 20", "steps = 30"))
    assert followed.poll(99) == [] and (followed.step, followed.planned) == (7, 30)
    write(run / "metrics.jsonl", [entry(8)], "a")
    assert steps_in(followed.poll(99)) == [8]


def test_when_a_run_has_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = made_run(tmp_path / "run", steps=10, planned=20)
    followed = RunWatch(run)
    followed.poll(99)
    handle = ownership.lock(run)
    assert handle is not None and ownership.is_locked(run) and not followed.has_ended()
    handle.release()
    assert ownership.is_locked(run) is False and followed.has_ended() and followed.state == "stopped"
    write(run / "metrics.jsonl", [entry(step) for step in range(11, 21)], "a")
    followed.poll(99)
    assert followed.has_ended() and followed.state == "done"
    monkeypatch.setattr(history, "START_SECONDS", 0.0)
    (run / ".lock").unlink()
    (run / ".lock").symlink_to("/dev/zero")
    assert ownership.is_locked(run) is None
