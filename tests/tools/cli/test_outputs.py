"""What commands write: never through a link or into a pipe."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from quantshard.checkpoints.disk.store import is_taken
from quantshard.errors import ConfigurationError
from quantshard.tools.terminal import outputs
from quantshard.tools.trainer import launch, worker
from quantshard.tools.trainer.run_dir import RunDir
from quantshard.tools.trainer.settings.config import TrainSettings
from tests.tools.cli.test_commands import run as command

KEPT = "do not touch\n"


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    """A file of the user's."""
    file = tmp_path / "mine"
    file.write_text(KEPT)
    return file


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path / "run")
    run.create(TrainSettings(), {"processes": 2}, {"files": []})
    return run


def test_a_file_is_written_in_one_move(tmp_path: Path) -> None:
    file, old = tmp_path / "file", os.umask(0o027)
    try:
        outputs.write_file(file, "one\n")
        assert stat.S_IMODE(file.stat().st_mode) == 0o640
        os.link(file, tmp_path / "second")
        file.chmod(0o604)
        outputs.write_file(file, b"two\n")
    finally:
        os.umask(old)
    assert file.read_text() == "two\n" and stat.S_IMODE(file.stat().st_mode) == 0o604
    assert (tmp_path / "second").read_text() == "one\n"
    outputs.append_text(tmp_path / "new", "a\n")
    outputs.append_text(tmp_path / "new", "b\n")
    assert (tmp_path / "new").read_text() == "a\nb\n"
    with pytest.raises(ConfigurationError, match=r"cannot write .*none/file: No such file"):
        outputs.write_file(tmp_path / "none" / "file", "")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "new", "second"]


def test_what_failed_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text(KEPT)

    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ConfigurationError, match="No space left"):
        outputs.write_file(tmp_path / "file", "other")
    assert [path.name for path in tmp_path.iterdir()] == ["file"] and (tmp_path / "file").read_text() == KEPT


@pytest.mark.parametrize("kind", ["link", "dangling", "pipe", "folder"])
def test_only_a_regular_file_is_replaced_or_continued(tmp_path: Path, mine: Path, kind: str) -> None:
    file = tmp_path / "file"
    plant(file, kind, mine)
    for write in (outputs.append_text, outputs.write_file):
        with pytest.raises(ConfigurationError, match=r"is a link|is no regular file"):
            write(file, "more")
    assert mine.read_text() == KEPT and not (tmp_path / "nowhere").exists()


def plant(file: Path, kind: str, mine: Path) -> None:
    if kind in ("link", "dangling"):
        file.symlink_to(mine if kind == "link" else mine.with_name("nowhere"))
    elif kind == "pipe":
        os.mkfifo(file)
    else:
        file.mkdir()


def test_no_write_of_a_run_follows_a_link(run: RunDir, mine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a crafted run can hold: a link with the name of each file that is written, and of each folder."""
    (run.path / "config.toml.new").symlink_to(mine)  # what earlier versions wrote first
    run.write_config(TrainSettings(), {"processes": 2}, {"files": []})
    for file in (run.metrics, run.samples, run.statistics, run.starts):
        file.symlink_to(mine)
        with pytest.raises(ConfigurationError, match="is a link"):
            run.append(file, {"step": 1})
    monkeypatch.setenv("RANK", "1")
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    (run.path / "logs").mkdir()
    (run.path / "logs" / "rank-1.txt").symlink_to(mine)
    assert launch.report_failure(ValueError("it"), run.logs) == "ValueError: it"
    (run.path / "logs" / "rank-1.txt").unlink()
    (run.path / "logs").rmdir()
    (run.path / "logs").symlink_to(mine.parent)
    launch.report_failure(ValueError("it"), run.logs)
    assert mine.read_text() == KEPT and not (mine.parent / "rank-1.txt").exists()
    run.config.unlink()
    run.config.symlink_to(mine)
    with pytest.raises(ConfigurationError, match="is a link"):
        run.write_config(TrainSettings(), {}, {})
    assert mine.read_text() == KEPT


LINKED = [
    "config.toml",
    "metrics.jsonl",
    "samples.jsonl",
    "statistics.jsonl",
    "starts.jsonl",
    ".lock",
    "logs",
    "checkpoints",
]


@pytest.mark.parametrize("name", [*LINKED, "checkpoints/.lock"])
def test_a_run_with_a_link_is_not_resumed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, mine: Path, name: str
) -> None:
    monkeypatch.setattr(launch, "launch", lambda processes, arguments: None)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RANK", raising=False)
    (tmp_path / "text").write_text("0123456789" * 100)
    assert command(monkeypatch, capsys, "train", "--run", "r", "--data", "text") == (0, [])
    saved = tmp_path / "r" / "checkpoints" / "step-000002"
    saved.mkdir(parents=True)
    (saved / ".metadata").touch()
    assert command(monkeypatch, capsys, "resume", "r") == (0, [])
    place = tmp_path / "r" / name
    if place.exists():
        place.rename(tmp_path / "moved")
    place.symlink_to(tmp_path / "moved" if (tmp_path / "moved").exists() else mine)
    code, (line,) = command(monkeypatch, capsys, "resume", "r")
    assert code == 1 and f"r/{name} is a link" in line and "put what it leads to in its place" in line
    with pytest.raises(ConfigurationError, match="is a link"):  # the processes look themselves
        worker._read(RunDir(tmp_path / "r"), worker.WorkerJob(resume=True, launched=True), None)  # type: ignore[arg-type]
    assert mine.read_text() == KEPT


def test_the_path_of_a_run_may_lead_through_links(run: RunDir, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(run.path)
    linked = RunDir(tmp_path / "link")
    linked.check_ours()
    linked.append(linked.metrics, {"step": 1})
    assert run.metrics.read_text() == '{"step": 1}\n'


def test_copy_goes_to_no_link(tmp_path: Path) -> None:
    (tmp_path / "copy").symlink_to(tmp_path / "nowhere")
    assert is_taken(str(tmp_path / "copy"))
