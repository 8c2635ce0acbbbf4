"""What processes log, and what TensorBoard and Weights & Biases get; a resumed run has each step once."""

from __future__ import annotations

import io
import json
import logging
import os
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import wandb
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from quantshard.errors import CheckpointError, ConfigurationError
from quantshard.optimizers import FusedAdam
from quantshard.private_torch import memory
from quantshard.private_torch.lookup import MissingName
from quantshard.statistics import Alarm
from quantshard.tools.terminal import screen
from quantshard.tools.trainer import measurements, progress, trackers
from quantshard.tools.trainer.loop import ProcessInfo, Trainer
from quantshard.tools.trainer.measurements import RunStatistics, traced_steps
from quantshard.tools.trainer.progress import Progress
from quantshard.tools.trainer.run_dir import RunDir
from quantshard.tools.trainer.settings.config import TrainSettings
from quantshard.tools.trainer.trackers import open_trackers
from tests.tools.cli.hostile import Started, content as config_of, made, resumed, told
from tests.tools.report.runs import NAMES, entry, sampled

SETTINGS = TrainSettings(tensorboard=True, wandb="project")


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setattr(warnings, "formatwarning", warnings.formatwarning)
    screen.prepare_output()
    folder = tmp_path / "run"
    folder.mkdir()
    return RunDir(folder)


# Logs


def test_each_rank_has_a_log(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    log, before = logging.getLogger("quantshard.trainer"), logging.getLogger("quantshard").handlers[:]
    for rank in (0, 3):
        with warnings.catch_warnings(), progress.logged(TrainSettings(), rank, run.path):
            warnings.simplefilter("always")
            log.info("begun\x1b[2J")
            log.debug("too much")
            warnings.warn("is it right?", stacklevel=1)
    assert capsys.readouterr() == ("", "quantshard: WARNING: is it right?\n")
    lines = (run.logs / "rank-3.log").read_text().splitlines()
    assert [line.partition(" [rank 3] ")[2] for line in lines] == [
        "INFO quantshard.trainer: begun\\x1b[2J",
        "WARNING py.warnings: is it right?",
    ]
    assert (run.logs / "rank-0.log").read_text().count("[rank 0]") == 2
    assert logging.getLogger("quantshard").handlers == before and warnings.showwarning.__module__ == "warnings"


def test_levels(run: RunDir, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    log = logging.getLogger("quantshard.x")
    monkeypatch.setenv("QUANTSHARD_LOG", "debug")
    for level in ("auto", "error"):
        with progress.logged(replace(TrainSettings(), log_level=level), 0, run.path):
            log.debug(level)
            log.error("wrong")
    assert capsys.readouterr().err == "quantshard: DEBUG: auto\n" + 2 * "quantshard: ERROR: wrong\n"
    assert len((run.logs / "rank-0.log").read_text().splitlines()) == 3


def test_a_failure_is_logged_with_its_trace(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    for error in (CheckpointError("it is full"), ValueError("three")):
        with pytest.raises(type(error)), progress.logged(TrainSettings(), 1, run.path):
            raise error
    text = (run.logs / "rank-1.log").read_text()
    assert "ERROR quantshard.tools.trainer.progress: it is full\n" in text and text.count("Traceback") == 1
    assert "ValueError: three" in text and capsys.readouterr().err == ""  # the launcher says it


def test_a_log_that_cannot_be_written_is_told_once(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    run.logs.mkdir()
    (run.logs / "rank-2.log").symlink_to("/dev/null")
    with progress.logged(TrainSettings(), 2, run.path):
        logging.getLogger("quantshard").info("x")
        logging.getLogger("quantshard").info("y")
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("quantshard: [rank 2] WARNING: ") and "rank-2.log is a link" in line


@pytest.mark.parametrize("level", ["auto", "info", "warning"])
def test_notes_are_shown_once(run: RunDir, capsys: pytest.CaptureFixture[str], level: str) -> None:
    """And logged as grave as they are: alarms are warnings."""
    shown = Progress(TrainSettings(), shown=True)
    model = torch.nn.Linear(2, 2)
    optimizer = FusedAdam(model.parameters(), lr=1e-3)
    statistics = RunStatistics(TrainSettings(), model, optimizer, lambda record: None, shown.note, 0)
    with progress.logged(replace(TrainSettings(), log_level=level), 0, run.path):
        shown.note("100% saved %s")
        statistics.add_alarm(Alarm("nan", "x", 1.0, "of the loss"))
    assert capsys.readouterr() == ("100% saved %s\nALARM (nan): of the loss\n", "")
    lines = [line.partition("] ")[2] for line in (run.logs / "rank-0.log").read_text().splitlines()]
    name = "quantshard.tools.trainer.progress"
    assert lines == [
        *([f"INFO {name}: 100% saved %s"] if level != "warning" else ()),
        f"WARNING {name}: ALARM (nan): of the loss",
    ]


# Traces


def traced(
    run: RunDir, steps: int, asked: int, error: BaseException | None = None, device: torch.device | None = None
) -> None:
    with traced_steps(run, 0, device or torch.device("cpu"), asked) as step:
        for _ in range(steps):
            torch.ones(2).sum()
            step()
        if error is not None:
            raise error


def test_no_step_was_traced_is_said(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    file = run.profile / "rank-0.json"
    traced(run, 0, 2)
    note = "quantshard: no step was traced: --profile begins after 3 steps, and 0 were trained\n"
    assert capsys.readouterr().err == note and not file.exists()
    traced(run, 9, 0)
    assert not file.exists()
    traced(run, 4, 2)
    assert capsys.readouterr().err == "" and json.loads(file.read_text())["traceEvents"]
    assert [path.name for path in run.profile.iterdir()] == ["rank-0.json"]


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """The calls by which PyTorch records the memory of a GPU, of stand-ins for them and for the trace of a GPU."""
    calls: list[tuple[Any, ...]] = []

    def record(enabled: str | None, **options: Any) -> None:
        calls.append((enabled, options.get("device"), options.get("max_entries", 0) > 0))

    def dump(file: str) -> None:
        calls.append(("dump",))
        Path(file).write_bytes(b"a snapshot")

    assert callable(memory._record) and callable(memory._dump)
    for name, stand_in in (("_record", record), ("_dump", dump)):
        monkeypatch.setattr(memory, name, stand_in)
    of_cpu = measurements.profile
    monkeypatch.setattr(measurements, "profile", lambda activities, **more: of_cpu(activities=activities[:1], **more))
    return calls


GPU = torch.device("cuda", 0)
BEGUN = ("all", GPU, True)
ENDED = (None, None, False)


def test_a_snapshot_of_the_memory_of_a_gpu(run: RunDir, recorded: list[tuple[Any, ...]]) -> None:
    file = run.profile / "memory-rank-0.pickle"
    traced(run, 2, 2, device=GPU)
    assert recorded == [BEGUN] and not file.exists()
    recorded.clear()
    with pytest.raises(ZeroDivisionError):
        traced(run, 4, 2, ZeroDivisionError(), GPU)  # what is there is kept
    assert recorded == [BEGUN, ("dump",), ENDED] and file.read_bytes() == b"a snapshot"
    recorded.clear()
    traced(run, 9, 2, device=GPU)
    assert recorded == [BEGUN, ("dump",), ENDED] and (run.profile / "rank-0.json").exists()


@pytest.mark.parametrize("missing", ["_record", "_dump"])
def test_without_the_snapshot_there_is_a_trace(
    run: RunDir,
    recorded: list[tuple[Any, ...]],
    missing: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(memory, missing, MissingName(f"torch.cuda.memory.{missing}", "the snapshot"))
    traced(run, 9, 2, device=GPU)
    assert recorded == [] and (run.profile / "rank-0.json").exists()
    (line,) = capsys.readouterr().err.splitlines()
    assert f"no torch.cuda.memory.{missing}, without which the snapshot cannot work" in line
    assert line.endswith("; the memory snapshot is lost")


def test_a_snapshot_that_cannot_be_written_is_told(
    run: RunDir, recorded: list[tuple[Any, ...]], capsys: pytest.CaptureFixture[str]
) -> None:
    (run.profile).symlink_to("/tmp")
    traced(run, 5, 1, device=GPU)
    assert recorded[-1] == ENDED
    _, line = capsys.readouterr().err.splitlines()
    assert line.endswith("; memory-rank-0.pickle is lost")


def test_a_trace_that_cannot_be_written_ends_nothing(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    """On a host without the run's folder; the error of the training stays the one that is raised."""
    (run.profile).symlink_to("/tmp")
    traced(run, 5, 1)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("quantshard: [rank 0] WARNING: ") and line.endswith("; rank-0.json is lost")
    with pytest.raises(ZeroDivisionError):
        traced(run, 5, 9, ZeroDivisionError())


# Trackers


def test_steps_that_are_trained_again_count_once(run: RunDir) -> None:
    (run.path / "wandb").mkdir()
    for done, steps in ((0, range(1, 7)), (4, range(5, 9))):
        opened = open_trackers(SETTINGS, run, done)
        for step in steps:
            for tracker in opened:
                tracker.metrics(entry(step, loss=float(step)))
                tracker.statistics(sampled(step, ({"kind": "nan", "text": "of the loss"},) if step == 3 else ()))
        for tracker in opened:
            tracker.close(failed=False)
    found = EventAccumulator(str(run.tensorboard), purge_orphaned_data=True)
    found.Reload()
    assert [(event.step, event.value) for event in found.Scalars("loss")] == [(step, step) for step in range(1, 9)]
    assert len(found.Scalars(f"input/amax/{NAMES[1]}")) == 8 and "alarm/nan/text_summary" in found.Tags()["tensors"]
    made = json.loads(run.wandb.read_text())["id"]
    folders = sorted((run.path / "wandb").glob("offline-run-*"))
    assert len(folders) == 2
    assert all(f"-{made}" in folder.name for folder in folders)  # the second of one second has "-1" behind it
    assert all(b"grad_norm" in next(folder.glob("*.wandb")).read_bytes() for folder in folders)


def test_weights_and_biases_asks_nothing(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without an account: neither on a terminal nor elsewhere."""
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setenv("HOME", str(run.path))
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    wandb.teardown()  # it has read its environment in this process before
    asked, begin = [], wandb.init
    monkeypatch.setattr(wandb, "init", lambda **options: asked.append(sys.stdin.isatty()) or begin(**options))
    monkeypatch.setattr(sys, "stdin", type("Terminal", (io.StringIO,), {"isatty": lambda stream: True})())
    with pytest.raises(
        ConfigurationError, match=r"cannot be reached .*; log in with `wandb login`, or set WANDB_MODE=off"
    ):
        open_trackers(replace(SETTINGS, tensorboard=False), run, 0)
    assert asked == [False] and sys.stdin.isatty()
    run.wandb.write_text('{"id": "../x"}')
    with pytest.raises(ConfigurationError, match=r"Weights & Biases cannot be reached"):
        open_trackers(replace(SETTINGS, tensorboard=False), run, 0)
    (run.path / "wandb").mkdir()
    (run.path / "wandb" / "settings").write_text("[default]\nbase_url = http://127.0.0.1:9\n")
    with pytest.raises(ConfigurationError, match=r"wandb/settings sets 'base_url'; delete it"):
        open_trackers(replace(SETTINGS, tensorboard=False), run, 0)


@pytest.mark.parametrize(
    ("flags", "environment", "says"),
    [
        (["--tensorboard"], {}, "tensorboard = True needs a missing package; run: pip install tensorboard"),
        (["--wandb", "p"], {}, "wandb = 'p' needs a missing package; run: pip install wandb"),
        ([], {"QUANTSHARD_LOG": "loud"}, "QUANTSHARD_LOG = 'loud': choose one of: auto, debug, info, warning, error"),
    ],
)  # fmt: skip
def test_refused_before_a_folder_is_made(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, flags: list[str], environment: dict[str, str], says: str
) -> None:
    there = made(run.path)
    monkeypatch.setattr(trackers, "find_spec", lambda name: None)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    code, out, err = told("train", "--run", run.path / "new", "--data", run.path / "text", "--seq-length", 16, *flags)
    assert (code, out, len(err)) == (1, [], 1) and says in err[0] and not (run.path / "new").exists()
    more = {"tensorboard": "--tensorboard" in flags, "wandb": "p" if "--wandb" in flags else ""}
    code, _, err = resumed(there, config_of(there) | more)
    assert code == 1 and says in err[0]


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--device", "cuda"], "device = 'cuda', but torch sees no GPU here; use --device cpu or auto"),
        (["--device", "cuda", "--nproc-per-node", 3], "process 2 here has no GPU: there are 2; start fewer"),
    ],
)
def test_a_mistake_leaves_no_folder_in_the_way(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, flags: list[Any], says: str
) -> None:
    """So that the corrected command finds its place free."""
    (run.path / "text").write_text("0123456789" * 100)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: 3 in flags)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    given = ["train", "--run", run.path / "new", "--data", run.path / "text", "--seq-length", 16, "--hidden", 64,
             "--heads", 2, "--layers", 1, "--global-batch", 6]  # fmt: skip
    code, out, (line,) = told(*given, *flags)
    assert (code, out) == (1, []) and says in line and not (run.path / "new").exists()
    assert told(*given, "--device", "cpu")[0] is Started


def test_links_in_the_place_of_their_folders_are_refused(run: RunDir) -> None:
    there = made(run.path)
    assert resumed(there, config_of(there))[0] is Started
    for name in ("tensorboard", "wandb", "statistics.jsonl", "parameters.json", "wandb.json"):
        os.symlink("/tmp", there / name)
        code, _, (line,) = resumed(there, config_of(there))
        assert code == 1 and f"{name} is a link" in line
        (there / name).unlink()


def test_statistics_go_everywhere(run: RunDir) -> None:
    """Into the run's file and the trackers, on the first process alone."""
    given: list[dict[str, Any]] = []
    tracker = SimpleNamespace(statistics=given.append)
    record = sampled(3, ({"kind": "nan", "text": "x"},))
    for rank in (1, 0):
        place = ProcessInfo(rank, 2, torch.device("cpu"))
        trainer = SimpleNamespace(place=place, run=run, trackers=[tracker])
        Trainer.record_statistics(trainer, record)  # type: ignore[arg-type]
    assert given == [record] and json.loads(run.statistics.read_text()) == record
    run.forget_after(2)
    assert run.statistics.read_text() == ""
