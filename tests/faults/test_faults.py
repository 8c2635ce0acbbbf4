"""Jobs that are killed and resumed lose no bit; in the long form `make drill`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from quantshard.checkpoints.comparison import compare
from quantshard.checkpoints.disk import manifest
from tests.faults.drill import BOUND_SECONDS, Drill, attempt, differences, errors
from tests.faults.job import Fault, Job

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Job:
    job = Job(str(tmp_path_factory.mktemp("whole") / "job"), "nvfp4")
    assert attempt(job).codes == [0, 0], errors(job)
    return job


@pytest.mark.exhaustive  # `make test` has kills at chosen moments, below
@pytest.mark.parametrize(("kills", "seed"), [(3, 376), (5, 3)])
def test_a_handful_of_kills(whole: Job, tmp_path: Path, show: Callable[[str], None], kills: int, seed: int) -> None:
    """2 ranks. By the one seed most of a job's attempts are killed; by the other a background save is killed too."""
    drill = Drill(tmp_path, kills, seed, recipes=("nvfp4",), modes=(None, "thread"))
    drill.wholes["nvfp4"] = whole
    result = drill.run()
    show(result.table())
    assert sum(result.moments.values()) == kills and result.lines >= 8
    assert not result.wrong, result.wrong


def test_one_process_that_dies_alone_ends_the_job(whole: Job, tmp_path: Path) -> None:
    """2 ranks: within a bounded time, with an error; resumed, nothing is lost."""
    job = replace(whole, folder=str(tmp_path / "job"), mode="thread")
    dead = attempt(job, Fault("step: before the optimizer", 4, 1), all_at_once=False)
    assert dead.codes == [1, -9] and dead.others_ended_after < BOUND_SECONDS
    assert "Error" in errors(job)[0]
    assert attempt(job).codes == [0, 0]
    assert differences(job, whole) == []


def test_a_kill_in_the_rename_leaves_no_trace_and_a_lost_bit_is_found(whole: Job, tmp_path: Path) -> None:
    """2 ranks: what is half written is hidden, and gone with the next save. The comparison can fail."""
    job = replace(whole, folder=str(tmp_path / "job"))
    assert attempt(job, Fault("rename: before", 2, 0)).killed == "rename: before"
    assert sorted(path.name for path in job.checkpoints.glob("step-*")) == ["step-000002"]
    assert [path.suffix for path in job.checkpoints.glob(".step*")] == [".tmp"]
    assert attempt(job).codes == [0, 0]
    assert differences(job, whole) == []
    losses = Path(job.folder, "losses.jsonl")
    losses.write_text(losses.read_text().replace("0x1.", "0x1.8", 1))
    assert [wrong.startswith("{'step': ") for wrong in differences(job, whole)] == [True]
    losses.unlink()
    assert "step 1 is missing" in differences(job, whole)


def test_a_kill_before_the_marker_behind_a_url(whole: Job, tmp_path: Path) -> None:
    """2 ranks: data and metadata are there, the manifest is empty."""
    job = replace(whole, folder=str(tmp_path / "job"), behind_url=True, mode="thread")
    assert attempt(job, Fault("writing: the metadata are there", 2, 0)).killed
    assert {path.name for path in job.checkpoints.glob("*/.metadata")} == {".metadata"}
    assert sorted(path.parent.name for path in job.checkpoints.glob("*/.metadata")) == ["step-000002", "step-000004"]
    written = [path.parent.name for path in job.checkpoints.glob(f"*/{manifest.MANIFEST}") if path.stat().st_size]
    assert written == ["step-000002"]
    assert attempt(job).codes == [0, 0], errors(job)
    assert differences(job, whole) == []


def test_elastic(whole: Job, tmp_path: Path) -> None:
    """2 ranks, killed; 1 goes on from the very bits."""
    job = replace(whole, folder=str(tmp_path / "job"), keep_last=9)
    assert attempt(job, Fault("writing: the data are there", 3, 1)).killed
    alone = attempt(replace(job, ranks=1, copy=True))
    assert alone.codes == [0], errors(job)
    step = int(Path(job.folder, "from").read_text())
    for path in job.checkpoints.glob("step-*"):
        assert manifest.problems(path) == []
    assert step == 4 and {line["step"] for line in job.lines()} == set(range(1, 9))
    compared = compare(job.checkpoints / "step-000004", Path(job.folder, "copy"))
    assert compared.equal and compared.tensors > 20
