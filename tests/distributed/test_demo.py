"""The demo, small: what it tells, and that it fails where it must.

The run that it kills has processes of its own; its other commands run in those of the pool, in `make test-all` once
more in their own too.
"""

import json
import math
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from quantshard.checkpoints.inspect.compare import compare
from quantshard.errors import ConfigurationError
from quantshard.tools.cli import demo
from quantshard.tools.trainer import launch
from quantshard.tools.trainer.settings.config import read_settings_file
from tests.distributed.commands import quantshard

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

ROOT = Path(__file__).parents[2]
STEPS, EVERY = 24, 6
SIZES = {
    "hidden": 64, "layers": 1, "heads": 2, "seq_length": 32, "global_batch": 4, "steps": STEPS, "warmup": 5,
    "save_every": EVERY, "eval_every": 12, "eval_sequences": 4,
}  # fmt: skip
RUNS = ("uninterrupted", "killed", "on-1-process")


def in_the_pool(self: demo.DemoRun, arguments: list[str], run: Any, kill_at: int | None) -> int:
    """Stands for `DemoRun.follow`, where processes are not the point."""
    if kill_at is not None:
        return follow(self, arguments, run, kill_at)
    self.say(f"  $ quantshard {' '.join(arguments)}")
    with pytest.MonkeyPatch.context() as patched:
        patched.delenv("RANK")  # as the demo itself does for what it starts
        done = quantshard(*arguments)
    assert done.returncode == 0, done.stderr
    (self.out / f"{run.path.name}-{arguments[0]}.log").write_text(done.stdout, encoding="utf-8")
    return demo.last_step(run)


def here(line: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
    """Stands for `subprocess.run` of a command that starts no others."""
    assert line[:2] == [sys.executable, launch.command_script()] and options.keys() == {"env", "capture_output", "text"}
    return quantshard(*line[2:])


follow = demo.DemoRun.follow


TOLD = [pytest.param(in_the_pool, id="pool"), pytest.param(follow, id="started", marks=pytest.mark.exhaustive)]


@pytest.fixture(scope="module", params=TOLD)
def told(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> tuple[Path, str]:
    """The folder of a demo that was run, and what it printed."""
    folder = tmp_path_factory.mktemp("demo")
    text = "".join(f"def f{i}(x):\n    return x + {i * i}\n\n" for i in range(2000))
    (folder / "text.py").write_text(text)
    settings = SIZES | {"data": [str(folder / "text.py")]}
    (folder / "sizes.toml").write_text(tomli_w.dumps(settings))
    handler = signal.getsignal(signal.SIGTERM)
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("PYTHONPATH", str(ROOT))
        patched.setenv("RANK", "5")  # the demo does not take itself for a worker
        patched.setattr(demo.DemoRun, "follow", request.param)
        if request.param is in_the_pool:
            patched.setattr(demo.subprocess, "run", here)
        result = quantshard("demo", "--out", folder / "out", "--config", folder / "sizes.toml")
    signal.signal(signal.SIGTERM, handler)
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stderr == ""
    return folder / "out", result.stdout


def losses(out: Path, run: str) -> dict[int, float]:
    lines = (out / run / "metrics.jsonl").read_text().splitlines()
    return {record["step"]: record["loss"] for record in map(json.loads, lines)}


def test_story_is_told(told):
    text = told[1]
    assert re.findall(r"^\[(\d)/5\]", text, re.MULTILINE) == list("12345")
    assert text.count("expected:") >= 3
    assert "emulated" in text
    for line in re.findall(r"^  \$ quantshard (\w+) (\S+)", text, re.MULTILINE):
        assert line[0] in ("train", "resume", "diff")
    assert len(re.findall(r" ok *$", text, re.MULTILINE)) == 4
    assert "FAILED" not in text
    assert "what it writes after 0 steps" in text
    assert f"what it writes after {STEPS} steps" in text
    assert re.search(r"weights, bytes on each process +\S+ KiB \(0\.\d\d of BF16's", text)
    assert re.search(r"on the wire, bytes a step +\S+ KiB \(0\.\d\d of BF16's", text)


def test_what_it_says_is_so(told):
    out, text = told
    runs = {run: losses(out, run) for run in RUNS}
    assert all(list(by_step) == list(range(1, STEPS + 1)) for by_step in runs.values())
    assert runs["killed"] == runs["uninterrupted"]
    (killed_at, resumed) = map(int, re.search(r"killed when step (\d+) was done; .* step (\d+)\.", text).groups())
    assert STEPS / 2 < killed_at < STEPS
    assert killed_at // EVERY - resumed // EVERY in (0, 1) and resumed % EVERY == 0  # 1: killed while it saved
    single = runs["on-1-process"]
    assert all(single[step] == runs["uninterrupted"][step] for step in range(1, resumed + 1))
    gap = max(abs(single[step] - runs["uninterrupted"][step]) for step in single)
    assert f"at most {gap:.5f}" in text
    assert compare(out / f"killed/checkpoints/step-{resumed:06d}", out / f"resaved-step-{resumed:06d}").equal


def story(told: tuple[Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> demo.DemoRun:
    """A copy of what was told, to tell again without training."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setattr(demo.DemoRun, "follow", lambda *arguments: 0)
    monkeypatch.setattr(demo.DemoRun, "diff", lambda self, a, b: compare(a, b).equal)  # faster than the command
    shutil.copytree(told[0], tmp_path / "out")
    again = demo.DemoRun(tmp_path / "out", read_settings_file(tmp_path / "out" / demo.MARK))
    again.resumed = int(re.search(r"last complete checkpoint is of step (\d+)", told[1])[1])
    again.parameters = 60_000
    return again


def change_metrics(path: Path, step: int, change: Any) -> None:
    records = [json.loads(line) for line in path.read_text().splitlines()]
    change(records[step - 1])
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


@pytest.mark.parametrize("field", ["loss", "grad_norm", "heldout_loss"])
def test_one_unit_in_the_last_place_of_one_step_is_a_failure(told, tmp_path, monkeypatch, field):
    again = story(told, tmp_path, monkeypatch)
    again.resume_on_two()
    assert again.failures == []
    nudge = lambda record: record.update({field: math.nextafter(record[field], 9)})  # noqa: E731
    change_metrics(again.killed.metrics, STEPS, nudge)
    again.resume_on_two()
    assert again.failures == ["resumed on 2: losses bitwise equal"]


def test_a_missing_step_is_a_failure(told, tmp_path, monkeypatch):
    again = story(told, tmp_path, monkeypatch)
    lines = again.killed.metrics.read_text().splitlines(keepends=True)
    again.killed.metrics.write_text("".join(lines[: STEPS - EVERY] + lines[STEPS - EVERY + 1 :]))
    again.resume_on_two()
    assert again.failures == ["resumed on 2: losses bitwise equal"]


def test_other_bits_in_the_checkpoint_are_a_failure(told, tmp_path, monkeypatch):
    command_diff = demo.DemoRun.diff
    again = story(told, tmp_path, monkeypatch)
    monkeypatch.setattr(demo.DemoRun, "diff", command_diff)
    monkeypatch.setattr(demo.subprocess, "run", here)
    shutil.rmtree(again.killed.checkpoint(STEPS))
    shutil.copytree(again.single.checkpoint(STEPS), again.killed.checkpoint(STEPS))
    again.resume_on_two()
    assert again.failures == ["resumed on 2: last checkpoint bitwise equal"]


def test_other_bits_after_loading_are_a_failure(told, tmp_path, monkeypatch):
    again = story(told, tmp_path, monkeypatch)
    shutil.rmtree(tmp_path / "out" / f"resaved-step-{again.resumed:06d}")

    def save_another(run: Any, saved: Path, resaved: Path) -> int:
        shutil.copytree(again.killed.checkpoint(STEPS), resaved)
        return 60_000

    monkeypatch.setattr(demo, "load_and_save", save_another)
    again.load_on_one()
    assert again.failures == ["loaded by 1: weights and optimizer bitwise equal"]


def test_only_the_checkpoint_can_make_the_bits_equal(told, tmp_path, monkeypatch):
    again = story(told, tmp_path, monkeypatch)
    monkeypatch.setattr(demo.checkpoints, "load", lambda *arguments: {"step": again.resumed})
    saved = again.killed.checkpoint(again.resumed)
    demo.load_and_save(again.killed, saved, tmp_path / "not-loaded")
    differing = {difference.key for difference in compare(saved, tmp_path / "not-loaded").differences}
    assert {"model.layers.0.self_attention.proj.weight", "model.layers.0.self_attention.proj.weight_key"} < differing


def test_a_loss_out_of_bounds_is_a_failure(told, tmp_path, monkeypatch):
    again = story(told, tmp_path, monkeypatch)
    again.resume_on_one()
    assert again.failures == []
    first = again.resumed + 1
    assert again.rounding_bounds()[first] < 0.02
    change_metrics(again.single.metrics, first, lambda record: record.update(loss=record["loss"] + 0.02))
    again.resume_on_one()
    assert again.failures == ["resumed on 1: losses within the bound"]


def test_a_failure_ends_the_command_with_an_error(tmp_path, monkeypatch):
    def tell(self: demo.DemoRun) -> None:
        self.add("bits", "other ones", False)

    monkeypatch.setattr(demo.DemoRun, "tell", tell)
    monkeypatch.setattr(demo.DemoRun, "summary", lambda self: None)
    with pytest.raises(demo.DemoError, match="the demo failed: bits"):
        demo.demo(tmp_path / "out")


def test_a_run_that_ends_before_it_is_killed_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(demo, "_command", lambda arguments: [sys.executable, "-S", "-c", "print('all steps done')"])
    again = demo.DemoRun(tmp_path, SIZES)
    says = r"ended before it could be killed at step 99 \(all steps done\); see .*killed-train.log"
    with pytest.raises(demo.DemoError, match=says):
        again.train(again.killed, "mxfp8", kill_at=99)


def ends_with(line: str, code: int) -> Any:
    """Stands for `demo._command`: one that does not import PyTorch."""
    return lambda arguments: [sys.executable, "-S", "-c", f"print('begun\\n{line}'); raise SystemExit({code})"]


SAYS = "quantshard: hidden = 128 is not a multiple of heads = 7"


@pytest.mark.parametrize(
    "command", [ends_with(SAYS, 1), pytest.param(demo._command, marks=pytest.mark.exhaustive)], ids=["says", "started"]
)
def test_a_command_that_fails_is_named(tmp_path, monkeypatch, command):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setattr(demo, "_command", command)
    (tmp_path / demo.MARK).write_text("heads = 7\n")
    again = demo.DemoRun(tmp_path, SIZES)
    with pytest.raises(demo.DemoError, match=r"`quantshard train` failed: quantshard: hidden = .*heads = 7"):
        again.train(again.whole, "mxfp8")


def test_a_command_that_ends_well_is_followed(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(demo, "_command", ends_with("all steps done", 0))
    again = demo.DemoRun(tmp_path, SIZES)
    again.whole.path.mkdir()
    again.whole.metrics.write_text('{"step": 24, "loss": 3.5}\n')
    assert again.train(again.whole, "mxfp8") == 24
    assert (tmp_path / "uninterrupted-train.log").read_text() == "begun\nall steps done\n"
    assert "done in 0 s" in capsys.readouterr().out


def test_folder_of_an_earlier_demo_is_emptied_and_others_are_refused(tmp_path):
    demo._prepare(tmp_path / "out", {"steps": 1})
    (tmp_path / "out/old").touch()
    demo._prepare(tmp_path / "out", {"steps": 2})
    assert [path.name for path in (tmp_path / "out").iterdir()] == [demo.MARK]
    assert read_settings_file(tmp_path / "out" / demo.MARK) == {"steps": 2}
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/file").touch()
    for path in (tmp_path / "mine", tmp_path / "mine/file"):
        with pytest.raises(ConfigurationError, match="name another folder"):
            demo._prepare(path, {})
    assert (tmp_path / "mine/file").exists()
