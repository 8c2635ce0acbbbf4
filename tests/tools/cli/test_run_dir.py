"""A run's folder: nothing is overwritten, and records read as one run."""

import errno
import json
import math
import subprocess
import sys

import pytest

from quantshard.checkpoints.disk import ownership
from quantshard.checkpoints.disk.store import LocalStore
from quantshard.errors import ConfigurationError
from quantshard.tools.trainer.run_dir import RunDir
from quantshard.tools.trainer.settings.config import TrainSettings
from quantshard.tools.trainer.worker import WorkerJob, _requantization

CORPUS = {"sha256": "0" * 64, "bytes": 0, "files": []}


@pytest.fixture
def run(tmp_path):
    run = RunDir(tmp_path / "run")
    run.create(TrainSettings(), {"processes": 2}, CORPUS)
    return run


def checkpoint(run, step, complete):
    path = run.checkpoint(step)
    path.mkdir(parents=True)
    (path / "__0_0.distcp").write_text("x")
    if complete:
        (path / ".metadata").write_text("x")
    return path


def test_folder_must_be_new(run, tmp_path):
    checkpoint(run, 3, complete=True)
    with pytest.raises(ConfigurationError, match="quantshard resume"):
        run.check_new()
    (tmp_path / "empty").mkdir()
    RunDir(tmp_path / "empty").check_new()
    (tmp_path / "file").touch()
    with pytest.raises(ConfigurationError, match="exists"):
        RunDir(tmp_path / "file").check_new()
    with pytest.raises(ConfigurationError, match="cannot write"):
        RunDir(tmp_path / "file" / "run").create(TrainSettings(), {}, {})


def test_config_round_trip(run, tmp_path):
    assert run.read_config() == (TrainSettings(), {"processes": 2}, CORPUS)
    with pytest.raises(ConfigurationError, match="there is no run in"):
        RunDir(tmp_path / "none").read_config()
    run.config.write_text("hidden = 96\n")
    with pytest.raises(ConfigurationError, match="lacks"):
        run.read_config()


def test_last_complete(run):
    with pytest.raises(ConfigurationError, match="no complete checkpoint"):
        run.last_complete()
    for step, complete in ((4, True), (2, True), (3, False), (6, False), (1000000, False)):
        checkpoint(run, step, complete)
    assert run.last_complete() == 4


@pytest.mark.parametrize("last", [0, 1, 3, 5, 9])
def test_the_end_of_a_file_is_cut(run, last):
    lines = [json.dumps({"step": step, "rows": ["x" * 20 * (step % 3)]}) for step in range(1, 6)]
    run.statistics.write_text("\n".join(lines) + '\n{"step": 6, "lo')
    run.forget_after(last)
    assert run.statistics.read_text() == "".join(line + "\n" for line in lines[:last])


def test_records(run):
    loss = 0.1 + 0.2
    for step in range(1, 6):
        run.append(run.metrics, {"step": step, "loss": loss / step, "grad_norm": math.inf})
    with open(run.metrics, "a") as file:
        file.write('{"step": 6, "lo')  # cut off by a kill
    run.forget_after(3)
    records = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    assert [record["step"] for record in records] == [1, 2, 3]
    assert records[0] == {"step": 1, "loss": loss, "grad_norm": "inf"}
    assert not list(run.path.glob("*.new"))


@pytest.mark.skipif(sys.platform == "win32", reason="no flock")
def test_lock_excludes_others_until_the_process_ends(run, monkeypatch):
    monkeypatch.setattr(ownership, "LOCK_SECONDS", 0.2)
    program = f"import fcntl\nfile = open({str(run.path / '.lock')!r}, 'a')\nfcntl.flock(file, fcntl.LOCK_EX)\n"
    other = subprocess.Popen(
        [sys.executable, "-c", program + "print(1, flush=True)\ninput()"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert other.stdout is not None
    other.stdout.readline()
    with pytest.raises(ConfigurationError, match="in use"):
        run.lock()
    other.kill()
    other.communicate()
    run.lock()


@pytest.mark.skipif(sys.platform == "win32", reason="no flock")
def test_where_there_are_no_locks_a_warning_names_the_folder(run, monkeypatch):
    def none(*args):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", none)
    for owns in (run.lock, lambda: ownership.Ownership(LocalStore(), str(run.path))):
        with pytest.warns(UserWarning, match=rf"^{run.path} cannot be locked \(No locks available\)"):
            owns()


def test_lossy_is_asked_for_each_time(run):
    """What a start did without masters is done again until a checkpoint has it; another recipe is another question."""
    resumed, other = WorkerJob(True, False), WorkerJob(True, False, overrides={"recipe": "block"})
    assert _requantization(run, resumed) == (False, False)
    run.append(run.starts, {"step": 2, "recipe": "nvfp4", "requantized": "7 weights", "lossy": True})
    assert _requantization(run, resumed) == (True, True)
    assert _requantization(run, other) == (True, False)
