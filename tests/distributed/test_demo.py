"""The demo, small: what it claims, and that it fails where it must.

The run that it kills has processes of its own; its other commands run in those of the pool, in `make test-all` once
more in their own too.
"""

import json
import math
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from quantshard.checkpoints.comparison import compare
from quantshard.errors import ConfigurationError
from quantshard.tools.cli import demo
from quantshard.tools.trainer import launch
from tests.distributed.commands import quantshard

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

ROOT = Path(__file__).parents[2]
STEPS, EVERY = 24, 6
SIZES = {
    "hidden": 64, "layers": 1, "heads": 2, "seq_length": 32, "global_batch": 4, "steps": STEPS, "warmup": 5,
    "save_every": EVERY, "eval_every": 12, "eval_sequences": 4,
}  # fmt: skip
RUNS = ("uninterrupted", "killed", "on-1-process")


def in_the_pool(self: demo.Demo, arguments: list[str], run: Any, kill_at: int | None = None) -> int:
    """Stands for `Demo.run`, where processes are not the point."""
    if kill_at is not None:
        return run_command(self, arguments, run, kill_at)
    with pytest.MonkeyPatch.context() as patched:
        patched.delenv("RANK")  # as the demo itself does for what it starts
        result = quantshard(*arguments)
    assert result.returncode == 0, result.stderr
    return demo.last_step(run)


def here(line: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
    """Stands for `subprocess.run` of a command that starts no others."""
    assert line[:2] == [sys.executable, launch.command_script()] and options.keys() == {"env", "capture_output", "text"}
    return quantshard(*line[2:])


run_command = demo.Demo.run

RUNNERS = [
    pytest.param(in_the_pool, id="pool"),
    pytest.param(run_command, id="started", marks=pytest.mark.exhaustive),
]


@pytest.fixture(scope="module", params=RUNNERS)
def finished(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> tuple[Path, str]:
    """The folder of a demo that was run, and what it printed."""
    folder = tmp_path_factory.mktemp("demo")
    text = "".join(f"def f{i}(x):\n    return x + {i * i}\n\n" for i in range(2000))
    (folder / "text.py").write_text(text)
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("PYTHONPATH", str(ROOT))
        patched.setenv("RANK", "5")  # the demo does not take itself for a worker
        patched.setattr(demo, "SETTINGS", SIZES | {"data": [str(folder / "text.py")]})
        patched.setattr(demo.Demo, "run", request.param)
        if request.param is in_the_pool:
            patched.setattr(demo.subprocess, "run", here)
        result = quantshard("demo", "--out", folder / "out")
    assert result.returncode == 0, result.stdout + result.stderr
    return folder / "out", result.stdout


def losses(out: Path, run: str) -> dict[int, float]:
    lines = (out / run / "metrics.jsonl").read_text().splitlines()
    return {record["step"]: record["loss"] for record in map(json.loads, lines)}


def test_all_claims_hold(finished):
    out, text = finished
    assert text.count("  ok: ") == 4 and "FAILED" not in text and "All claims hold" in text
    runs = {run: losses(out, run) for run in RUNS}
    assert all(list(by_step) == list(range(1, STEPS + 1)) for by_step in runs.values())
    assert runs["killed"] == runs["uninterrupted"]
    resumed = int(re.search(r"the last complete checkpoint is of step (\d+)", " ".join(text.split()))[1])
    assert compare(out / f"killed/checkpoints/step-{resumed:06d}", out / "loaded-on-1-process").equal


def chapters(finished: tuple[Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> demo.Demo:
    """A copy of a finished demo, whose chapters compare again without training."""
    monkeypatch.setattr(demo, "SETTINGS", SIZES)
    monkeypatch.setattr(demo.Demo, "run", lambda *arguments: 0)
    monkeypatch.setattr(demo.Demo, "equal", lambda self, a, b: compare(a, b).equal)  # faster than the command
    shutil.copytree(finished[0], tmp_path / "out")
    again = demo.Demo(tmp_path / "out")
    again.resumed = STEPS // 2
    return again


def change_metrics(path: Path, step: int, change: Any) -> None:
    records = [json.loads(line) for line in path.read_text().splitlines()]
    change(records[step - 1])
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


@pytest.mark.parametrize(
    "field", ["loss", *(pytest.param(name, marks=pytest.mark.exhaustive) for name in ("grad_norm", "heldout_loss"))]
)
def test_one_unit_in_the_last_place_of_one_step_is_a_failure(finished, tmp_path, monkeypatch, field):
    again = chapters(finished, tmp_path, monkeypatch)
    again.resume_on_two()
    assert again.failures == []
    change_metrics(again.killed.metrics, STEPS, lambda record: record.update({field: math.nextafter(record[field], 9)}))
    again.resume_on_two()
    assert [failure[:6] for failure in again.failures] == ["losses"]


def test_a_missing_step_is_a_failure(finished, tmp_path, monkeypatch):
    again = chapters(finished, tmp_path, monkeypatch)
    lines = again.killed.metrics.read_text().splitlines(keepends=True)
    again.killed.metrics.write_text("".join(lines[: STEPS - EVERY] + lines[STEPS - EVERY + 1 :]))
    again.resume_on_two()
    assert [failure[:6] for failure in again.failures] == ["losses"]


def test_other_bits_in_the_checkpoint_are_a_failure(finished, tmp_path, monkeypatch):
    with_command = demo.Demo.equal
    again = chapters(finished, tmp_path, monkeypatch)
    monkeypatch.setattr(demo.Demo, "equal", with_command)
    monkeypatch.setattr(demo.subprocess, "run", here)
    shutil.rmtree(again.killed.checkpoint(STEPS))
    shutil.copytree(again.single.checkpoint(STEPS), again.killed.checkpoint(STEPS))
    again.resume_on_two()
    assert again.failures == ["the last checkpoint is bitwise equal to that of chapter 1"]


def test_other_loaded_bits_and_another_loss_are_failures(finished, tmp_path, monkeypatch):
    again = chapters(finished, tmp_path, monkeypatch)
    again.resumed = next(
        step
        for step in range(EVERY, STEPS, EVERY)
        if compare(again.single.checkpoint(step), again.out / "loaded-on-1-process").equal
    )
    again.resume_on_one()
    assert again.failures == []
    first = again.resumed + 1
    change_metrics(again.single.metrics, first, lambda record: record.update(loss=record["loss"] + 0.02))
    shutil.rmtree(again.out / "loaded-on-1-process")
    shutil.copytree(again.killed.checkpoint(STEPS), again.out / "loaded-on-1-process")
    again.resume_on_one()
    assert len(again.failures) == 2 and "loaded bits" in again.failures[0] and f"step {first}" in again.failures[1]


def ends_with(code: int) -> Any:
    """Stands for `demo._command`: one that does not import PyTorch."""
    return lambda arguments: [sys.executable, "-S", "-c", f"print('all steps done'); raise SystemExit({code})"]


@pytest.mark.parametrize(("code", "kill_at"), [(0, 99), (1, None)])
def test_a_command_that_ends_early_or_fails_is_named(tmp_path, monkeypatch, code, kill_at):
    monkeypatch.setattr(demo, "_command", ends_with(code))
    again = demo.Demo(tmp_path)
    with pytest.raises(
        demo.DemoError, match=rf"`quantshard train` ended with exit code {code}; see .*killed-train.log"
    ):
        again.train(again.killed, kill_at=kill_at)
    assert (tmp_path / "killed-train.log").read_text() == "all steps done\n"


def test_a_failure_ends_the_command_with_an_error(tmp_path, monkeypatch):
    for name in ("kill", "resume_on_two", "resume_on_one"):
        monkeypatch.setattr(demo.Demo, name, lambda self: None)
    monkeypatch.setattr(demo.Demo, "uninterrupted", lambda self: self.claim("bits", False))
    with pytest.raises(demo.DemoError, match="the demo failed: bits"):
        demo.demo(tmp_path / "out")


def test_an_existing_folder_is_refused(tmp_path):
    with pytest.raises(ConfigurationError, match="exists; remove it, or name another folder with --out"):
        demo.demo(tmp_path)
