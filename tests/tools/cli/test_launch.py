"""Of the processes that failed, the one that is named: the reason, and not what followed from it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from quantshard.errors import CheckpointError, LostRankError
from quantshard.tools.trainer import launch

LOST = "another rank exited or never joined (Connection closed by peer); see its output"


def failure(rank: int, error: BaseException | None, folder: Path, monkeypatch: pytest.MonkeyPatch) -> ProcessFailure:
    """Of a process that raised an error, or was killed."""
    file = folder / f"error-{rank}.json"
    if error is not None:
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
        monkeypatch.setenv("RANK", str(rank))
        launch.report_failure(error, folder / "logs")
    found = ProcessFailure(local_rank=rank, pid=1, exitcode=1 if error else -9, error_file=str(file))
    found.message = json.loads(file.read_text())["message"] if error else found.message
    return found


@pytest.mark.parametrize(
    ("errors", "said"),
    [
        ((LostRankError(LOST), None), "process 1 was killed by SIGKILL"),
        ((RuntimeError("Connection closed by peer"), None), "process 1 was killed by SIGKILL"),
        ((LostRankError(LOST), CheckpointError("the disk is full")), "process 1: the disk is full"),
        ((CheckpointError("the disk is full"), None), "process 0: the disk is full"),
        ((LostRankError(LOST), LostRankError(LOST)), f"process 0: {LOST}"),
    ],
)
def test_the_reason_is_named(
    errors: tuple[BaseException | None, ...], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failures = {rank: failure(rank, error, tmp_path, monkeypatch) for rank, error in enumerate(errors)}
    assert str(launch._explain(failures)) == said


def test_whoever_has_no_launcher_is_told_of_a_lost_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """srun and the like read no file, so a process says why it ends."""
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    assert launch.report_failure(LostRankError(LOST), tmp_path / "logs") == LOST
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    assert launch.report_failure(LostRankError(LOST), tmp_path / "logs") == ""
