"""Runs whose files are not what their last start left: edited, cut, damaged, or given up before the first step."""

from __future__ import annotations

import json
import resource
import signal
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from quantshard.checkpoints import Restored
from quantshard.checkpoints.disk import ownership
from quantshard.checkpoints.disk.manifest import digest
from quantshard.errors import CheckpointError, ConfigurationError
from quantshard.tools.terminal import outputs
from quantshard.tools.trainer import data, restarts
from quantshard.tools.trainer.loop import Trainer
from quantshard.tools.trainer.run_dir import RunDir
from quantshard.tools.trainer.settings.config import TrainSettings
from tests.tools.cli.hostile import Started, made, told


def begun(folder: Path) -> tuple[RunDir, TrainSettings]:
    """A run with a checkpoint, and the record of its start."""
    run = RunDir(made(folder))
    settings = run.read_config()[0]
    run.append(run.starts, {"step": 0, "settings": restarts.recorded(settings)})
    return run, settings


def edit(run: RunDir, was: str, now: str) -> None:
    text = run.config.read_text()
    assert was in text
    run.config.write_text(text.replace(was, now))


def test_a_run_is_not_made_shorter_than_it_is(tmp_path: Path) -> None:
    run, _ = begun(tmp_path)
    code, _, (line,) = told("resume", run.path, "--steps", 1)
    assert code == 1 and "has a checkpoint of step 2, and steps = 1 would end before it; give at least 2" in line
    assert told("resume", run.path, "--steps", 2)[0] is Started


def test_a_run_that_failed_before_its_first_step_leaves_its_folder_free(tmp_path: Path) -> None:
    run = RunDir(made(tmp_path))
    run.withdraw()
    assert run.is_begun(), "who does not hold a run removes nothing"
    run.lock()
    run.withdraw()
    assert run.is_begun(), "it has a checkpoint"
    (run.path / "checkpoints" / "step-000002" / ".metadata").unlink()
    (run.path / "checkpoints" / "step-000002").rmdir()
    run.append(run.metrics, {"step": 1})
    run.withdraw()
    assert run.is_begun(), "it has done a step"
    run.metrics.unlink()
    (run.path / "checkpoints" / ownership.LOCK_FILE).touch()
    (run.path / "logs").mkdir()
    run.withdraw()
    assert {path.name for path in run.path.iterdir()} == {"checkpoints", "logs", ownership.LOCK_FILE}
    run.check_new()


def test_status_asks_for_files_as_long_as_they_were(tmp_path: Path) -> None:
    run, _ = begun(tmp_path)
    edit(run, "steps = 200", "steps = 2")
    folder = run.path / "checkpoints" / "step-000002"
    (folder / "__0_0.distcp").write_bytes(b"codes")
    contents = {name: digest((folder / name).read_bytes()) for name in ("__0_0.distcp", ".metadata")}
    files = {name: {"bytes": length, "xxh3_128": checksum} for name, (length, checksum) in contents.items()}
    saved = {
        "quantshard": 1,
        "files": files,
        "world_size": 1,
        "torch": "2.13.0",
        "saved_at": "2026-11-26T04:00:00+00:00",
    }
    (folder / "manifest.json").write_text(json.dumps(saved))
    assert told("status", run.path)[0] == 0
    (folder / "__0_0.distcp").write_bytes(b"code")
    code, out, _ = told("status", run.path)
    said = " ".join(map(str.strip, out))
    assert code == 75 and "step 2 is damaged" in said and said.endswith("not done, 0 of 2 steps are saved")
    (folder / "__0_0.distcp").unlink()
    code, out, _ = told("status", run.path, "--json")
    found = json.loads("".join(out))
    assert (code, found["done"], found["step"]) == (75, False, 0) and "is missing" in found["damaged"][0]


def test_texts_that_are_trained_and_evaluated_on(tmp_path: Path) -> None:
    """By contents, whatever their names; empty files are alike and say nothing."""
    for name, content in (("a", "one"), ("b", "two"), ("c", "two"), ("d/x", "three"), ("e/x", "four")):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content)
        (tmp_path / name).with_name("empty").touch()
    a, b, c, d, e = (str(tmp_path / name) for name in "abcde")
    assert data.collect([a, b, d], [e]).leaks() == ""
    line = data.collect([a, b], [c]).leaks()
    assert f"{c} is evaluated on and trained on: {b} has the same contents" in line


def test_the_settings_of_another_run_say_how_many_processes(tmp_path: Path) -> None:
    """As `train --config DIR/config.toml --run ANOTHER`, which an error of `resume` advises."""
    run = made(tmp_path)  # of 2
    code, out, err = told("train", "--run", tmp_path / "new", "--config", run / "config.toml")
    assert code is Started and out[-1] == "starting 2 processes", err
    assert told("train", "--run", tmp_path / "n", "--config", run / "config.toml", "--nproc-per-node", 1)[1][-1] == (
        "starting 1 process"
    )


def test_a_file_that_cannot_be_written_is_one_error(tmp_path: Path) -> None:
    """The end of a full disk comes twice: as the file is written, and as it is closed."""
    before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (8, before[1]))
        with pytest.raises(ConfigurationError, match=r"cannot write .*file: File too large"):
            outputs.write_file(tmp_path / "file", "longer than that")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "extra",
    [{}, *({"step": step} for step in ("5", [5], float("nan"), float("inf"), None, 6))],
    ids=str,
)
def test_a_checkpoint_of_another_step_is_refused(tmp_path: Path, extra: dict[str, Any]) -> None:
    trainer = mock.Mock(run=RunDir(tmp_path))
    trainer.progress.moving.return_value = mock.MagicMock()
    trainer.manager.restore.return_value = Restored(5, str(tmp_path / "step_5"), extra)
    with pytest.raises(CheckpointError, match=r"step_5 is of step .*; restore its name"):
        Trainer.restore(trainer)
    trainer.loader.load_state_dict.assert_not_called()
