"""Saves that fail or are interrupted: by a full disk, a signal, a directory that is gone, what is not there in full.

Each test names its rank count.
"""

from __future__ import annotations

import errno
import io
import os
import resource
import shutil
import signal
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint import DefaultLoadPlanner

from quantshard import checkpoints, private_torch
from quantshard.checkpoints.disk import agreement, commit, ownership, store
from quantshard.checkpoints.disk.commit import CommitWriter
from quantshard.checkpoints.manager import BackgroundSaver, Manager
from quantshard.errors import CheckpointError
from tests.distributed import durability
from tests.distributed.models import Case
from tests.distributed.pool import run_ranks
from tests.distributed.saving import Run, new_run
from tests.distributed.test_manager import names

pytestmark = pytest.mark.distributed

SHAPES = ((40, 150),)


def is_last() -> bool:
    return dist.get_rank() == dist.get_world_size() - 1


def raised(action: Callable[[], object]) -> str:
    try:
        action()
    except BaseException as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


# Disks ----------------------------------------------------------------------------------------------------------------


class Broken(io.FileIO):
    """A file of a disk that takes a thousand bytes of it, and keeps nothing for later."""

    number = 0

    def write(self, data: Any) -> int:
        room = max(12000 - self.tell(), 0)
        if memoryview(data).nbytes > room:
            super().write(memoryview(data).cast("B")[:room])
            raise OSError(self.number, os.strerror(self.number))
        return super().write(data) or 0


@contextmanager
def broken_disk(number: int) -> Iterator[None]:
    """Of the last rank; EFBIG is the system's own."""
    if number == errno.EFBIG and is_last():
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        return
    create = store.LocalStore.create_stream

    @contextmanager
    def on_broken(self: Any, path: Any, mode: str) -> Iterator[Any]:
        if mode != "wb" or not str(path).endswith(".distcp") or not is_last():
            with create(self, path, mode) as stream:
                yield stream
            return
        with Broken(path, mode) as broken:
            broken.number = number
            yield broken

    with mock.patch.object(store.LocalStore, "create_stream", on_broken):
        yield


DISKS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EIO)


def on_broken_disks(case: Case, folder: str) -> list[str]:
    run, found = new_run(case, folder), []
    for mode in (None, "thread"):
        with Manager(f"{folder}/{mode}", async_=mode) as manager:
            manager.save(1, run.model, run.optimizer)
            manager.wait()
            for number in DISKS:
                with broken_disk(number):
                    found.append(raised(lambda: (manager.save(2, run.model, run.optimizer), manager.wait())))
                dist.barrier()
                found[-1] += f" LEFT {names(Path(manager.directory))}"
    with broken_disk(errno.ENOSPC):
        found.append(raised(lambda: checkpoints.save(f"{folder}/alone", run.model, run.optimizer)))
    dist.barrier()
    return [*found, str(names(Path(folder)))]


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_disk_that_fails_is_said_in_words(ranks: int, tmp_path: Path) -> None:
    """1 and 3 ranks: the last one's; with the file, what is intact and what to do, the same on every rank."""
    by_rank = run_ranks(ranks, on_broken_disks, Case("mxfp8", (ranks,), shapes=((400, 300),)), str(tmp_path))
    assert all(found == by_rank[0] for found in by_rank)
    *messages, alone, left = by_rank[0]
    assert left == "['None', 'thread']"
    numbers = [*DISKS, *DISKS, errno.ENOSPC]
    where = "" if ranks == 1 else "on rank 2: "
    for number, message in zip(numbers, [*messages, alone], strict=True):
        assert message.startswith("CheckpointError: ") and f"could not be written: {where}{os.strerror(number)}: " in (
            message
        )
        assert f".tmp/__{ranks - 1}_0.distcp; other checkpoints are unchanged" in message, message
        assert "inline_container" not in message
    assert all(message.endswith(" LEFT ['step-000001']") for message in messages), messages


# Signals --------------------------------------------------------------------------------------------------------------


@contextmanager
def signalled(where: Any, name: str, on: Callable[[], bool]) -> Iterator[None]:
    """A real SIGINT to this process, at the end of a function."""
    whole = getattr(where, name)

    def then_signal(*args: Any, **kwargs: Any) -> Any:
        found = whole(*args, **kwargs)
        if on():
            signal.raise_signal(signal.SIGINT)
        return found

    with mock.patch.object(where, name, then_signal):
        yield


def interrupted(case: Case, folder: str) -> list[str]:
    """What each call raises that a SIGINT on the last rank, or on the first, interrupts; and what is left."""
    found = []
    signal.signal(signal.SIGINT, signal.default_int_handler)
    run: Run = new_run(case, folder)
    with Manager(folder) as manager:
        manager.save(1, run.model, run.optimizer)
        points = [
            ("save, writing", CommitWriter, "write_data"),
            ("save, preparing", commit, "prepare_target"),
            ("save, committing", store.LocalStore, "write"),
        ]
        for name, where, function in points:
            with signalled(where, function, is_last if name.endswith("writing") else lambda: dist.get_rank() == 0):
                said = raised(lambda: manager.save(2, run.model, run.optimizer))
            dist.barrier()
            found.append(f"{name}: {said} LEFT {names(Path(folder))}")
        loads: dict[str, Callable[[], object]] = {
            "load": lambda: checkpoints.load(manager.path(1), run.model, run.optimizer),
            "restore": lambda: manager.restore(run.model, run.optimizer),
        }
        for name, load in loads.items():
            with signalled(DefaultLoadPlanner, "commit_tensor", is_last):
                found.append(f"{name}: {raised(load)}")
        manager.restore(run.model, run.optimizer)
        manager.save(2, run.model, run.optimizer)
    return [*found, str(manager.steps())]


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_signal_is_a_keyboard_interrupt(ranks: int, tmp_path: Path) -> None:
    """1 and 2 ranks: on the rank that got it; the other is told, and nothing of the save is kept."""
    by_rank = run_ranks(ranks, interrupted, Case("mxfp8", (ranks,), shapes=SHAPES), str(tmp_path))
    for rank, found in enumerate(by_rank):
        assert found[-1] == "[1, 2]"
        for line, hit in zip(found, (ranks - 1, 0, 0, ranks - 1, ranks - 1, None), strict=True):
            if hit is None:
                continue
            if rank == hit:
                assert ": KeyboardInterrupt: " in line, line
            else:
                assert ": CheckpointError: " in line and f"rank {hit} was interrupted (KeyboardInterrupt)" in line, line
            if line.startswith("save"):
                assert line.endswith(" LEFT ['step-000001']"), line


# What is there in full ------------------------------------------------------------------------------------------------


def saved_durably(case: Case, folder: str) -> list[str]:
    """What is not durable in time of `checkpoints.save` and of a Manager, by itself and by a thread."""
    run, log = new_run(case, folder), Path(folder, f"{dist.get_rank()}.log")
    with durability.recorded(log):
        checkpoints.save(f"{folder}/deep/er/alone", run.model, run.optimizer)
        for mode in (None, "thread"):
            with Manager(f"{folder}/{mode}", async_=mode) as manager:
                manager.save(1, run.model, run.optimizer)
    dist.barrier()
    logs, places = sorted(Path(folder).glob("*.log")), ("deep/er/alone", "None/step-000001", "thread/step-000001")
    wrong = [f"{place}: {line}" for place in places for line in durability.not_durable(Path(folder, place), logs)]
    synced = "".join(log.read_text() for log in logs)
    made = [folder, f"{folder}/deep", f"{folder}/deep/er"]
    return wrong + [f"{path} was made and its folder not synced" for path in made if f'"path": "{path}"' not in synced]


@pytest.mark.parametrize("ranks", [1, 2])
def test_files_and_folders_are_durable_before_a_checkpoint_has_its_name(ranks: int, tmp_path: Path) -> None:
    """1 and 2 ranks. By a process: `test_async.py`."""
    assert run_ranks(ranks, saved_durably, Case("mxfp8", (ranks,), shapes=SHAPES), str(tmp_path)) == [[]] * ranks


def cut_before_the_commit(case: Case, folder: str) -> list[str]:
    """The last rank's file is not as long as it was written when the first looks; what is left."""
    run, write = new_run(case, folder), CommitWriter.write_data
    found = []

    def write_and_cut(self: CommitWriter, *args: Any) -> Any:
        done = write(self, *args)
        if is_last():
            file = Path(self.target.written_in, f"__{dist.get_rank()}_0.distcp")
            change(file)
        return done

    changes: list[Callable[[Path], object]] = [lambda file: os.truncate(file, 100), Path.unlink]
    for change in changes:  # noqa: B007 (it is read by the function above)
        with mock.patch.object(CommitWriter, "write_data", write_and_cut):
            found.append(raised(lambda: checkpoints.save(f"{folder}/c", run.model, run.optimizer)))
        dist.barrier()
    return [*found, str(names(Path(folder)))]


@pytest.mark.parametrize("ranks", [1, 2])
def test_what_is_not_as_long_as_it_was_written_is_not_committed(ranks: int, tmp_path: Path) -> None:
    """1 and 2 ranks."""
    by_rank = run_ranks(ranks, cut_before_the_commit, Case("mxfp8", (ranks,), shapes=SHAPES), str(tmp_path))
    for cut, gone, left in by_rank:
        assert "bytes, but 100 on the first rank" in cut, cut
        assert "bytes, but None on the first rank" in gone, gone
        assert left == "[]"


def retired(case: Case, folder: str) -> list[Any]:
    """With one to keep: what stays when the newest is not whole, and when those between are damaged."""
    run, found, write = new_run(case, folder), [], commit.put_in_place
    with Manager(folder, keep_last=1) as manager:
        manager.save(1, run.model, run.optimizer)

        def put_and_cut(*args: Any) -> None:
            write(*args)
            os.truncate(f"{folder}/step-000002/__0_0.distcp", 100)

        with mock.patch.object(commit, "put_in_place", put_and_cut):
            found.append(raised(lambda: manager.save(2, run.model, run.optimizer)))
        found.append(manager.steps())
    with Manager(folder, keep_last=2) as manager, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        manager.save(3, run.model, run.optimizer)  # 2 is cut, so it is none of the two
        found.append(manager.steps())
        file = Path(manager.path(3), "__0_0.distcp")
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        file.write_bytes(content)
        manager.restore(run.model, run.optimizer)
        manager.save(4, run.model, run.optimizer)  # 3 is as long as it was, and was found to be damaged
        found.append(manager.steps())
    return found


def test_the_last_good_checkpoint_is_not_retired(tmp_path: Path) -> None:
    """1 rank: one that is not whole does not count, the newest neither."""
    message, *steps = run_ranks(1, retired, Case("mxfp8", (1,), shapes=SHAPES), str(tmp_path))[0]
    assert "step-000002/__0_0.distcp has 100 bytes, and manifest.json says" in message, message
    assert message.endswith("though it was just saved; nothing older was removed")
    assert steps == [[1, 2], [1, 2, 3], [1, 2, 3, 4]]


# Directories ----------------------------------------------------------------------------------------------------------


def odd_places(case: Case, folder: str) -> dict[str, str]:
    """What is said of each place that is no directory of this run's."""
    run, root, found, first = new_run(case, folder), Path(folder), {}, dist.get_rank() == 0
    (root / "elsewhere").mkdir(exist_ok=True)
    with Manager(root / "run") as manager:
        manager.save(1, run.model, run.optimizer)
        for step, target in ((2, root / "elsewhere"), (3, root / "nowhere")):
            if first:
                os.symlink(target, manager.path(step))
            dist.barrier()
            found[f"link {step}"] = raised(lambda: manager.save(step, run.model, run.optimizer))  # noqa: B023
        if first:
            Path(manager.path(4)).touch()
        dist.barrier()
        found["file"] = raised(lambda: manager.save(4, run.model, run.optimizer))
        found["left"] = str(names(root / "run") + names(root / "elsewhere"))
        dist.barrier()  # before rank 0 removes them
        for what in ("removed", "made again"):
            if first:
                shutil.rmtree(root / "run", ignore_errors=True)
                if what == "made again":
                    (root / "run").mkdir()
            dist.barrier()
            found[what] = raised(lambda: manager.save(5, run.model, run.optimizer))
            dist.barrier()
            found[what] += f" LEFT {sorted(os.listdir(root / 'run')) if (root / 'run').exists() else None}"
            dist.barrier()  # before rank 0 makes the next place
    (root / "a file").touch()
    found["Manager of a file"] = raised(lambda: Manager(root / "a file"))
    found["below a file"] = raised(lambda: checkpoints.save(root / "a file" / "c", run.model, run.optimizer))
    with Manager(root / "again"):
        with mock.patch.object(ownership, "LOCK_SECONDS", 0.1):
            found["twice"] = raised(lambda: Manager(root / "again"))
    return found


SAID = {
    "link 2": "is a symbolic link",
    "link 3": "is a symbolic link",
    "file": "step-000004 could not be written: Not a directory",
    "left": "['step-000001', 'step-000002', 'step-000003', 'step-000004']",
    "removed": "{root}/run was removed or replaced while this run used it",
    "made again": "{root}/run was removed or replaced while this run used it",
    "Manager of a file": "{root}/a file cannot be made or locked: File exists",
    "below a file": "{root}/a file/c could not be written: ",
    "twice": "{root}/again is in use by another run, process ",
}


@pytest.mark.parametrize("ranks", [1, 2])
def test_places_that_are_not_the_runs_are_refused_by_name(ranks: int, tmp_path: Path) -> None:
    """1 and 2 ranks: before anything is written."""
    for found in run_ranks(ranks, odd_places, Case("mxfp8", (ranks,), shapes=SHAPES), str(tmp_path)):
        for name, words in SAID.items():
            assert words.format(root=tmp_path) in found[name], (name, found[name])
        assert found["removed"].endswith(" LEFT None") and found["made again"].endswith(" LEFT []"), found


# Copies to memory -----------------------------------------------------------------------------------------------------


def without_memory(case: Case, folder: str) -> list[str]:
    run, stage, found = new_run(case, folder), BackgroundSaver.copied, []

    def fail(*args: Any) -> Any:
        if is_last():
            raise MemoryError("no room")
        return stage(*args)

    with Manager(folder, async_="thread") as manager:
        with mock.patch.object(BackgroundSaver, "copied", fail):
            found.append(raised(lambda: manager.save(1, run.model, run.optimizer)))
        manager.save(1, run.model, run.optimizer)
        manager.wait()
        return [*found, str(manager.steps())]


def test_a_copy_that_fails_on_one_rank_is_told_to_all(tmp_path: Path) -> None:
    """2 ranks."""
    by_rank = run_ranks(2, without_memory, Case("mxfp8", (2,), shapes=SHAPES), str(tmp_path))
    assert by_rank[0] == by_rank[1] and by_rank[0][1] == "[1]"
    assert "step-000001 could not be copied to memory: on rank 1: MemoryError: no room" in by_rank[0][0]


# A rank that is lost --------------------------------------------------------------------------------------------------


def lost(case: Case, folder: str) -> list[str]:
    """What is raised where a collective call of DCP's says that another rank is gone, and where memory ends."""
    run, place = new_run(case, folder), Path(folder, "c")
    checkpoints.save(place, run.model, run.optimizer)
    calls = {
        "save_checkpoint": lambda: checkpoints.save(Path(folder, "d"), run.model, run.optimizer),
        "load_checkpoint": lambda: checkpoints.load(place, run.model, run.optimizer),
    }
    found = []
    for name, call in calls.items():
        for error in (RuntimeError("Connection reset by peer"), torch.OutOfMemoryError("CUDA out of memory")):
            with mock.patch.object(private_torch, name, side_effect=error), pytest.raises(CheckpointError) as raised:
                call()
            found.append(f"{name}: {type(raised.value).__name__}")
        dist.barrier()
    return found


def test_a_lost_rank_is_no_damage(tmp_path: Path) -> None:
    """2 ranks: an intact checkpoint is not called damaged, nor is this rank's lack of memory another's end."""
    expected = ["LostRankError", "CheckpointError"]
    for found in run_ranks(2, lost, Case("mxfp8", (2,), shapes=SHAPES), str(tmp_path)):
        assert found == [f"{name}_checkpoint: {kind}" for name in ("save", "load") for kind in expected]


def unsummarized(ranks: int) -> str:
    """The error of this rank if the last one cannot summarize its result."""

    def summarize(number: int) -> int:
        if number == ranks - 1:
            raise MemoryError("no room for a digest")
        return number

    try:
        agreement.exchange_results(dist.get_rank, summarize)
    except CheckpointError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_rank_that_cannot_summarize_its_result_fails_on_all(ranks: int) -> None:
    messages = run_ranks(ranks, unsummarized, ranks)
    assert len(messages) == ranks and all("MemoryError: no room for a digest" in message for message in messages)
