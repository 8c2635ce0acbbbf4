"""`report` and `watch` as a user types them: what they say, and what they leave alone."""

from __future__ import annotations

import io
import math
import sys
import threading
import time
from pathlib import Path

import pytest

from quantshard.checkpoints.disk import ownership, store
from quantshard.tools.report.page import is_report
from quantshard.tools.terminal.screen import transfer_bar
from tests.tools.cli.hostile import told
from tests.tools.report.runs import entry, made_run, sampled, write


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "1000")
    return made_run(tmp_path / "run")


def test_a_report_is_written_and_replaced(run: Path) -> None:
    for _ in range(2):
        code, (line,), err = told("report", "run")
        assert code == 0 and not err and line.startswith("wrote report.html: 1 run, ") and line.endswith("KiB")
    page = run.parent / "report.html"
    assert is_report(page.read_bytes()[:4096])
    made_run(run.parent / "other")
    code, (line,), _ = told("report", "run", "other", "--out", "both.html")
    assert code == 0 and line.startswith("wrote both.html: 2 runs, ")


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (
            ["report", "run", "--out", "mine.html"],
            1,
            "mine.html exists and is no report; name another place with --out",
        ),
        (["report", "run", "--out", "link.html"], 1, "link.html exists and is no report"),
        (["report", "run", "--out", "none/x.html"], 1, "cannot write none/x.html: No such file"),
        (["report", "run", "--out", "run"], 1, "run is no regular file"),
        (["report", "run", "rnu"], 1, "there is no run in rnu: it has no config.toml"),
        (["report", "nothing://x"], 1, "nothing://x cannot be reached by fsspec"),
        (["report", "mine.html"], 1, "there is no run in mine.html: it has no config.toml"),
        (["report", "run", "--opne"], 2, "--opne"),
        (["watch", "mine.html"], 1, "there is no run in mine.html: it has no config.toml"),
        (["watch", "run", "more"], 2, "more"),
        (["train", "--run", "r", "--log-level", "loud"], 1, "log_level = 'loud': choose one of: auto, debug, info"),
        (["train", "--run", "r", "--wandb", "x" * 200], 1, "must be text of at most 128 characters"),
    ],
)
def test_refused_in_one_line(run: Path, arguments: list[str], code: int, says: str) -> None:
    (run.parent / "mine.html").write_text("mine")
    (run.parent / "link.html").symlink_to("mine.html")
    before = sorted(run.parent.rglob("*"))
    found, out, err = told(*arguments)
    assert (found, out, len(err)) == (code, [], 1) and says in err[0] and err[0].startswith("quantshard: "), err
    assert sorted(run.parent.rglob("*")) == before and (run.parent / "mine.html").read_text() == "mine"


def test_damaged_files_are_named(run: Path) -> None:
    (run / "config.toml").write_bytes(b"steps = \xff")
    for command in ("report", "watch"):
        code, _, (line,) = told(command, "run")
        assert code == 1 and "run/config.toml is not TOML" in line


def test_a_run_is_watched_in_a_pipe(run: Path) -> None:
    """The last steps that there are, then each new one, until it ends."""
    write(run / "metrics.jsonl", [entry(step) for step in range(1, 36)])

    def trains() -> None:
        for step in range(36, 41):
            write(run / "metrics.jsonl", [entry(step)], "a")
            time.sleep(0.05)

    training = threading.Thread(target=trains)
    training.start()
    code, out, err = told("watch", "run")
    training.join()
    assert code == 0 and not err and out[-1] == "done at step 40"
    lines = [line for line in out[:-1] if not line.startswith("ALARM (saturation): ")]
    assert lines == sorted(lines) and lines[-1].startswith("step 40/40  loss 4.0110  lr 1.00e-03  2,048 tokens/s")
    assert {line.split()[1] for line in lines} >= {f"{step}/40" for step in range(36, 41)} and len(lines) < len(out) - 1


def test_a_run_is_waited_for(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that `train` has not made yet, in a folder that it may have made for its tokens."""
    run.rename(run.parent / "later")
    waits = [lambda: run.mkdir(), lambda: None, lambda: run.rmdir() or (run.parent / "later").rename(run)]
    monkeypatch.setattr("quantshard.tools.cli.report.time.sleep", lambda seconds: waits and waits.pop(0)())
    code, out, err = told("watch", "run")
    assert code == 0 and not err and out[0] == "run is not a run yet; waiting for it to start"
    assert not waits and out[-1] == "done at step 40"


def test_a_run_that_starts_is_not_called_stopped(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The processes of `resume` lock a run seconds after the command is given."""
    write(run / "metrics.jsonl", [entry(step) for step in range(1, 36)])
    (run / ".lock").write_text("")
    locks = []

    def sleep(seconds: float) -> None:
        if not locks:
            locks.append(ownership.lock(run))
            write(run / "metrics.jsonl", [entry(36)], "a")
        else:
            locks[0].release()

    monkeypatch.setattr("quantshard.tools.cli.report.time.sleep", sleep)
    code, out, err = told("watch", "run")
    assert code == 0 and not err and out[-2].startswith("step 36/40") and out[-1] == "stopped at step 36"
    monkeypatch.setattr("quantshard.tools.report.history.START_SECONDS", 0.0)
    assert told("watch", "run")[1][-1] == "stopped at step 36"
    (run / ".lock").unlink()
    assert told("watch", "run")[1][-1] == "stopped at step 36"


def test_a_run_that_is_gone(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Looked for again and again, then told in a line."""
    write(run / "metrics.jsonl", [entry(1)])
    slept: list[float] = []

    def moved_at_the_third(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 3:
            run.rename(run.parent / "moved")

    monkeypatch.setattr("quantshard.tools.cli.report.time.sleep", moved_at_the_third)
    code, _, (line,) = told("watch", "run")
    assert code == 1 and len(slept) >= 3 and "run cannot be read: there is no run in run" in line


def test_ctrl_c_ends_watching(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(run / "metrics.jsonl", [entry(1)])

    def interrupted(seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("quantshard.tools.cli.report.time.sleep", interrupted)
    assert told("watch", "run")[0] == 130


class Terminal(io.StringIO):
    """A stream that says that it is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("stream", [io.StringIO, Terminal])
def test_bars_are_for_terminals(run: Path, monkeypatch: pytest.MonkeyPatch, stream: type[io.StringIO]) -> None:
    """Of what is moved, by whichever thread; gone in the end, and nothing of them in a file."""
    monkeypatch.setattr(sys, "stderr", err := stream())
    monkeypatch.setenv("TERM", "xterm-256color")
    with transfer_bar("reading"):
        store.expect_transfer(4_000_000)
        worker = threading.Thread(target=store.report_transfer, args=(3_000_000,))
        worker.start()
        worker.join()
        time.sleep(0.2 if stream is Terminal else 0)
    store.report_transfer(1)  # nobody is told
    assert (stream is Terminal) == ("3.0/4.0 MB" in err.getvalue()) and (stream is Terminal or not err.getvalue())


EXTREMES = 1e308, 1.7976931348623157e308, -1.7e308, 3.5e38, 3.4028234e38, 5e-324, -5e-324, math.inf, math.nan, 10**400
FIGURES = (
    "loss", "heldout_loss", "heldout_loss_ema", "lr", "grad_norm", "skipped_steps", "tokens_per_s", "memory_bytes",
    "mfu",
)  # fmt: skip


@pytest.mark.parametrize("value", [None, *(pytest.param(x, marks=pytest.mark.exhaustive) for x in (1e308, 5e-324))])
def test_any_number_is_a_figure(run: Path, value: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """No figure of a record, however large, small or odd, ends a report or a watch; `None`: all of them in turn."""
    values = EXTREMES if value is None else (value,) * 12
    steps = range(41, 41 + len(values))
    odd = [entry(step, **dict.fromkeys(FIGURES, value)) for step, value in zip(steps, values, strict=True)]
    write(run / "metrics.jsonl", odd, "a")
    alarm = {"kind": "x", "name": "n", "value": values[0]}
    write(run / "statistics.jsonl", [sampled(41, (alarm,), amax=values[0], sqnr_db=values[-1])], "a")
    config = (run / "config.toml").read_text()
    for planned in (steps[-1] + 1, (1 << 63) - 1):
        (run / "config.toml").write_text(config.replace("steps = 40", f"steps = {planned}"))
        code, (line,), err = told("report", "run")
        assert code == 0 and not err and line.startswith("wrote report.html"), err
        with monkeypatch.context() as patched:
            patched.setattr("quantshard.tools.report.history.START_SECONDS", 0.0)
            (run / ".lock").touch()
            code, out, err = told("watch", "run")
        assert code == 0 and not err and out[-1] == f"stopped at step {steps[-1]}", err
    (run / "config.toml").write_text(config)
    code, out, err = told("watch", "run")
    assert code == 0 and not err and out[-1] == f"done at step {steps[-1]}"
