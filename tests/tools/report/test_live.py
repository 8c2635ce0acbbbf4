"""The live view: what it shows in 80 columns, in ASCII too, and following a run that is trained elsewhere."""

from __future__ import annotations

import io
import shutil
import sys
from pathlib import Path

import pytest

from quantshard.checkpoints.disk import ownership
from quantshard.tools.report.figures import LiveView, RunFigures, RunWatch, sparkline, step_line
from quantshard.tools.report.history import read_history
from quantshard.tools.report.page import render
from quantshard.tools.terminal.screen import Screen
from tests.tools.report.runs import entry, made_run, sampled, write


def shown(figures: RunFigures, monkeypatch: pytest.MonkeyPatch, encoding: str = "utf-8") -> list[str]:
    """The lines of the view in a file of 80 columns."""
    out = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    monkeypatch.delenv("COLUMNS", raising=False)
    with monkeypatch.context() as patched:
        patched.setattr(sys, "stdout", out)
        Screen().print(LiveView(figures))
    out.flush()
    return out.buffer.getvalue().decode(encoding).splitlines()  # type: ignore[attr-defined]


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_what_the_view_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, encoding: str) -> None:
    followed = RunWatch(made_run(tmp_path / "run", steps=30, planned=90))
    assert len(followed.poll(99)) == 30
    followed.figures.add(entry(31, mfu=0.4321, grad_norm=float("nan")))
    lines = shown(followed.figures, monkeypatch, encoding)
    text = "\n".join(lines)
    assert all(len(line) == 80 for line in lines) and len(lines) == 9
    for said in (
        "step 31/90",
        "eta 59 s",
        "best 2.5333 at step 30",
        "2,048 tokens/s   MFU 43.2%   memory 1.0 GiB",
        "lr 1.00e-03   grad norm inf   skipped 0",
        "step 20, ",
        "step 3, saturation: a fifth of the codes",
    ):
        assert said in text, said
    mark = "█" if encoding == "utf-8" else "#"
    assert f"4.2003  {mark}" in text and text.isascii() == (encoding == "ascii")


def test_checkpoints_elsewhere_are_named_and_not_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = made_run(tmp_path / "run")
    config = (run / "config.toml").read_text()
    (run / "config.toml").write_text('checkpoints = "s3://<b>/run"\n' + config)
    followed = RunWatch(run)
    followed.poll(1)
    text = "\n".join(shown(followed.figures, monkeypatch))
    assert "elsewhere: s3://<b>/run" in text and "step 20, " not in text
    shutil.rmtree(run / "checkpoints")
    page = render([read_history(run)])
    assert '<p class="quiet">elsewhere: s3://&lt;b&gt;/run</p>' in page and "does not list them" not in page
    (run / "config.toml").write_text("checkpoints = 3\n" + config)
    assert "elsewhere" not in render([read_history(run)])


def test_names_and_alarms_of_anybody(monkeypatch: pytest.MonkeyPatch) -> None:
    figures = RunFigures("a\x1b[2J[red]")
    figures.add({"step": 1, "loss": "\x1b[2J", "lr": [], "skipped_steps": {}})
    figures.add_statistics({"step": 1, "alarms": [{"kind": "\x1b[31m", "text": "x\n" * 500}]})
    lines = shown(figures, monkeypatch)
    assert "\x1b" not in "".join(lines) and "a\\x1b[2J[red]" in lines[0] and all(len(line) <= 80 for line in lines)
    assert step_line(figures.entry, 3) == "step 1/3  loss \x1b[2J  lr []  None tokens/s"  # escaped where it is shown


def test_a_sparkline_has_all_that_was_added() -> None:
    values = [*map(float, range(100_000)), float("nan")]
    assert sparkline(values, 8) == "▁▂▃▄▅▆▇█" and sparkline(values, 8, ascii_only=True) == "_.,-=+*#"
    assert sparkline([], 8) == "" and sparkline([1.0, 2.0], 8) == "▁█"


def test_following_a_run(tmp_path: Path) -> None:
    run = made_run(tmp_path / "run", steps=10, planned=20)
    followed = RunWatch(run)
    assert [record["step"] for record in followed.poll(4)] == [7, 8, 9, 10] and followed.figures.step == 10
    assert not followed.has_ended() and followed.poll(99) == []  # nobody ever locked it: it may be about to begin
    write(run / "metrics.jsonl", [entry(11)], "a")
    write(run / "statistics.jsonl", [sampled(11, ({"kind": "nan", "text": "x"},))], "a")
    assert [record["step"] for record in followed.poll(99)] == [11] and followed.figures.alarms[-1].step == 11
    write(run / "metrics.jsonl", [entry(step, loss=9.0) for step in range(1, 8)])  # resumed after step 5
    (run / "config.toml").write_text((run / "config.toml").read_text().replace("steps = 20", "steps = 30"))
    assert followed.poll(99) == [] and (followed.figures.step, followed.figures.planned) == (7, 30)
    write(run / "metrics.jsonl", [entry(8)], "a")
    assert [record["step"] for record in followed.poll(99)] == [8]


def test_alarms_of_statistics_that_were_written_anew(tmp_path: Path) -> None:
    run = made_run(tmp_path / "run", steps=10)
    followed = RunWatch(run)
    followed.poll(99)
    assert [alarm.step for alarm in followed.figures.alarms] == [3]
    alarm = {"kind": "nan", "text": "x"}
    write(run / "statistics.jsonl", [sampled(step, (alarm,) if step in (3, 5) else ()) for step in range(1, 8)])
    assert followed.poll(99) == [] and [alarm.step for alarm in followed.figures.alarms] == [3, 5]


def test_when_a_run_has_ended(tmp_path: Path) -> None:
    run = made_run(tmp_path / "run", steps=10, planned=20)
    followed = RunWatch(run)
    followed.poll(99)
    handle = ownership.lock(run)
    assert handle is not None and ownership.is_locked(run) and not followed.has_ended()
    handle.release()
    assert ownership.is_locked(run) is False and followed.has_ended() and followed.figures.state == "stopped"
    write(run / "metrics.jsonl", [entry(step) for step in range(11, 21)], "a")
    followed.poll(99)
    assert followed.has_ended() and followed.figures.state == "done"
    (run / ".lock").unlink()
    (run / ".lock").symlink_to("/dev/zero")
    assert ownership.is_locked(run) is None
