"""`checkpoints.Manager` and the commit of a checkpoint: whole or not at all, verified, retired, in the background.

Each test names its rank count.
"""

from __future__ import annotations

import errno
import random
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist

from quantshard import checkpoints
from quantshard.checkpoints.disk import commit, manifest, ownership, store
from quantshard.checkpoints.disk.commit import CommitWriter
from quantshard.checkpoints.manager import Manager
from quantshard.errors import CheckpointError, ConfigurationError, RankMismatchError
from tests.distributed.models import RECIPES, Case
from tests.distributed.pool import GROUP_SECONDS, run_ranks
from tests.distributed.saving import SHAPES, Run, new_run

pytestmark = pytest.mark.distributed


class Counter:
    """Stands for the order of the data: a position of this rank's."""

    def __init__(self, at: int = 0) -> None:
        self.at = at

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def names(folder: Path) -> list[str]:
    return sorted(
        path.name for path in folder.iterdir() if path.name not in (ownership.LOCK_FILE, ownership.OWNER_FILE)
    )


def message_of(action: Callable[[], object]) -> str:
    try:
        action()
    except (CheckpointError, ConfigurationError, RankMismatchError) as error:
        return str(error)
    return "nothing was raised"


def restored(case: Case, manager: Manager) -> tuple[Any, dict[str, str]]:
    target = new_run(replace(case, seed=99), str(manager.directory))
    found = manager.restore(target.model, target.optimizer)
    return found, target.held()


def without_generator(held: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in held.items() if name != "torch's generator"}


# What stands on disk --------------------------------------------------------------------------------------------------


def saved_whole(case: Case, folder: str) -> list[str]:
    """What is wrong with a saved checkpoint."""
    run, path = new_run(case, folder), Path(folder) / "c"
    path.mkdir(exist_ok=True)  # an empty directory is in nobody's way
    checkpoints.save(path, run.model, run.optimizer, {"step": 3, "recipe": case.recipe})
    found = manifest.read_manifest(path)
    assert found is not None
    facts = found.step, found.recipe, found.mesh, found.world_size, sorted(found.files)
    wanted = 3, "mxfp8", {"inner": 2}, 2, [".metadata", "__0_0.distcp", "__1_0.distcp"]
    wrong = [] if facts == wanted else [str(facts)]
    (Path(folder) / "mine").mkdir(exist_ok=True)
    (Path(folder) / "mine" / "config.json").touch()
    wrong.append(message_of(lambda: checkpoints.save(f"{folder}/mine", run.model, run.optimizer)))
    return wrong + manifest.problems(path)


def test_a_checkpoint_has_a_manifest_and_nothing_stays_beside_it(tmp_path: Path) -> None:
    """2 ranks."""
    for wrong in run_ranks(2, saved_whole, Case("mxfp8", (2,), shapes=SHAPES), str(tmp_path)):
        assert len(wrong) == 1 and "holds other files (config.json)" in wrong[0]
    assert names(tmp_path) == ["c", "mine"] and names(tmp_path / "mine") == ["config.json"]


@contextmanager
def full_disk() -> Iterator[None]:
    """The last rank's disk is full: the kernel's own device for it stands in for each file of tensors."""
    create = store.LocalStore.create_stream

    @contextmanager
    def on_full(self: Any, path: Any, mode: str) -> Iterator[Any]:
        last = dist.get_rank() == dist.get_world_size() - 1 and str(path).endswith(".distcp")
        with create(self, "/dev/full" if last and mode == "wb" else path, mode) as stream:
            yield stream

    with mock.patch.object(store.LocalStore, "create_stream", on_full):
        yield


@contextmanager
def failing(where: Any, name: str) -> Iterator[None]:
    def fail(*args: Any) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    with mock.patch.object(where, name, fail):
        yield


FAILURES: dict[str, tuple[Callable[[], Any], str]] = {
    "disk full": (full_disk, "No space left on device"),
    "no folder can be made": (lambda: failing(store.LocalStore, "mkdir"), "Read-only file system"),
    "no manifest can be written": (lambda: failing(store.LocalStore, "write"), "Read-only file system"),
    "no rename": (lambda: failing(commit, "put_in_place"), "Read-only file system"),
}


def failed_saves(case: Case, folder: str, mode: str | None) -> list[str]:
    """For each failure: the message, unless the checkpoint before is the only one and is loaded bit for bit."""
    run, found = new_run(case, folder), []
    with Manager(folder, async_=mode) as manager:
        manager.save(1, run.model, run.optimizer)
        manager.wait()
        held = run.held()
        run.train(1)
        for failure, _ in FAILURES.values():
            with failure():
                message = message_of(lambda: (manager.save(2, run.model, run.optimizer), manager.wait()))
            dist.barrier()
            if names(Path(folder)) != ["step-000001"] or manager.steps() != [1]:
                message += f" LEFT {names(Path(folder))}"
            if restored(case, manager)[1] != held:
                message += " DIFFER"
            found.append(message)
        manager.save(2, run.model, run.optimizer)
    return found


@pytest.mark.parametrize("mode", [pytest.param(None, marks=pytest.mark.exhaustive), "thread"])
def test_a_save_that_fails_is_one_error_on_every_rank_and_changes_nothing(mode: str | None, tmp_path: Path) -> None:
    """3 ranks: real ENOSPC on one of them, and others on all or on the first."""
    by_rank = run_ranks(3, failed_saves, Case("mxfp8", (3,), shapes=SHAPES), str(tmp_path), mode)
    assert by_rank[0] == by_rank[1] == by_rank[2]
    for message, (_, words) in zip(by_rank[0], FAILURES.values(), strict=True):
        assert message.startswith(f"{tmp_path}/step-000002 could not be written: ") and words in message, message
        assert message.endswith("; other checkpoints are unchanged"), message


# Restoring ------------------------------------------------------------------------------------------------------------


def run_of_three(case: Case, folder: str, keep: dict[str, Any]) -> list[dict[str, str]]:
    """Steps 1 to 3 with their own extra entries and a counter a rank; what was held at each."""
    run, counter, held = new_run(case, folder), Counter(), []
    with Manager(folder, state={"data": counter}, **keep) as manager:
        for step in range(1, 4):
            run.train(1)
            counter.at = 10 * step + dist.get_rank()
            random.random(), np.random.random(), torch.rand(1)
            manager.save(step, run.model, run.optimizer, {"step": step})
            held.append(run.held() | {"python": repr(random.random()), "numpy": repr(np.random.random())})
    return held


def restore_it(case: Case, folder: str) -> dict[str, Any]:
    run, counter = new_run(replace(case, seed=5), folder), Counter()
    with Manager(folder, state={"data": counter}) as manager, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = manager.restore(run.model, run.optimizer)
        again = None
        if found is not None:
            run.train(1)
            again = message_of(lambda: manager.save(found.step, run.model, run.optimizer))
            manager.save(found.step + 1, run.model, run.optimizer)  # though there may be a damaged one
            assert manager.latest() == max(3, found.step + 1)
            again += message_of(lambda: manager.save(found.step + 1, run.model, run.optimizer))
    held = run.held() | {"python": repr(random.random()), "numpy": repr(np.random.random())}
    said = [str(entry.message) for entry in caught if "is skipped" in str(entry.message)]
    return {"found": found, "counter": counter.at, "held": held, "said": said, "again": again}


def flip(path: Path) -> None:
    file = path / "__1_0.distcp"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 4
    file.write_bytes(content)


def test_a_damaged_checkpoint_is_skipped_by_name(tmp_path: Path) -> None:
    """2 ranks: one bit in the last, a file cut in the one before; the first is loaded. Then none is left."""
    case = Case("nvfp4", (2,), shapes=SHAPES)
    run_ranks(2, run_of_three, case, str(tmp_path), {})
    flip(tmp_path / "step-000003")
    (tmp_path / "step-000002" / ".metadata").write_bytes(b"short")
    by_rank = run_ranks(2, restore_it, case, str(tmp_path))
    for rank, told in enumerate(by_rank):
        assert (told["found"].step, told["found"].skipped, told["counter"]) == (1, (3, 2), 10 + rank)
        assert told["again"].count("holds a complete checkpoint") == 2
        assert bool(told["said"]) == (rank == 0)
    first, second = by_rank[0]["said"]
    assert "step-000003/__1_0.distcp is damaged: its checksum is" in first
    assert "it is not the file that manifest.json describes" in second
    assert manifest.problems(tmp_path / "step-000002") == []  # written anew
    for step in (1, 2, 3):
        (tmp_path / f"step-{step:06d}" / "__0_0.distcp").unlink(missing_ok=True)
    for message in run_ranks(2, restore_nothing, case, str(tmp_path)):
        assert "has no checkpoint to go on from" in message
        assert message.count("__0_0.distcp is missing") == 3


def restore_nothing(case: Case, folder: str) -> str:
    return message_of(lambda: restore_it(case, folder))


def restore_only(case: Case, folder: str, step: int | None) -> tuple[Any, ...]:
    run, counter = new_run(replace(case, seed=5), folder), Counter()
    with Manager(folder, state={"data": counter}, read_only=True) as manager:
        found = manager.restore(run.model, run.optimizer, step=step)
    assert found is not None
    held = run.held() | {"python": repr(random.random()), "numpy": repr(np.random.random())}
    return found.step, found.extra, found.left, counter.at, held


@pytest.mark.parametrize("mode", [pytest.param(None, marks=pytest.mark.exhaustive), "thread"])
def test_what_is_restored_is_what_was_saved(mode: str | None, tmp_path: Path) -> None:
    """2 ranks, and 1 and 3: weights, states, and each rank's generators and counter, of the last step or another."""
    case = Case("nvfp4", (2,), shapes=SHAPES)
    held = run_ranks(2, run_of_three, case, str(tmp_path), {"async_": mode})
    for step in (None, 2):
        at = step or 3
        for rank, found in enumerate(run_ranks(2, restore_only, case, str(tmp_path), step)):
            assert found == (at, {"step": at}, (), 10 * at + rank, held[rank][at - 1])
    for ranks in (1, 3):  # the counters differ by rank, so they belong to nobody
        for found in run_ranks(ranks, restore_only, replace(case, mesh=(ranks,)), str(tmp_path), None):
            assert found[2] == ("random", "data") or found[2] == ("data",)


def restore_into_another_optimizer(case: Case, folder: str) -> tuple[list[str], list[bool], float]:
    """Of all ranks, and of the last alone: messages, and whether the run is as it was. Then one that fits."""
    found, same, last = [], [], dist.get_rank() == dist.get_world_size() - 1
    with Manager(folder, read_only=True) as manager, warnings.catch_warnings():
        warnings.simplefilter("error")  # nothing is skipped
        for moments, seed in ((torch.bfloat16, None), (torch.float32, 7)):
            run = new_run(replace(case, seed=5, moments=moments), folder)
            if seed is not None and last:
                run.optimizer.param_groups[0]["rounding_seed"] = seed
            before = run.held()
            found.append(message_of(partial(manager.restore, run.model, run.optimizer)))
            same.append(run.held() == before)
        run = new_run(replace(case, seed=5), folder)
        if last:
            run.optimizer.param_groups[0]["initial_lr"] = 0.5
        restored = manager.restore(run.model, run.optimizer)
    assert restored is not None and restored.step == 3 and restored.skipped == ()
    return found, same, run.optimizer.param_groups[0].get("initial_lr", 0.0)


def test_a_checkpoint_of_another_optimizer_is_an_error_on_every_rank(tmp_path: Path) -> None:
    """3 ranks: no earlier one is taken in its place. What a schedule adds on one rank is no option."""
    case = Case("mxfp8", (3,), shapes=SHAPES)
    run_ranks(3, run_of_three, case, str(tmp_path), {})
    for rank, (found, same, initial_lr) in enumerate(run_ranks(3, restore_into_another_optimizer, case, str(tmp_path))):
        said = f"{tmp_path}/step-000003 is of another optimizer: its group 0 has no 'rounding_seed'"
        assert found[0].startswith(f"{said}, optimizer.state.0.exp_avg is torch.float32") and "\n" not in found[0]
        assert found[1].startswith(f"on rank 2: {said}; build it with the options")
        assert same == [True, True] and initial_lr == (0.5 if rank == 2 else 0)


class OnlyHere:
    """Its state needs code to be read, on the last rank alone."""

    def state_dict(self) -> dict[str, Any]:
        return {"at": Counter() if dist.get_rank() else 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise AssertionError


class FailsThere(OnlyHere):
    """It cannot say its state on the last rank."""

    def state_dict(self) -> dict[str, Any]:
        return {"at": {0: 1}[dist.get_rank()]}


def with_such_a_state(case: Case, folder: str) -> list[str]:
    run = new_run(case, folder)
    with Manager(folder, state={"data": OnlyHere()}) as manager:
        found = [message_of(lambda: manager.save(1, run.model, run.optimizer)), str(manager.steps())]
    with Manager(folder, state={"data": FailsThere()}) as manager:
        found.append(message_of(lambda: manager.save(1, run.model, run.optimizer)))
        found.append(str([manager._prepare(1).replace] if dist.get_rank() == 0 else [False]))
    for wrong in ({"state": {"random": Counter()}}, {"state": {"a": 1}}, {"keep_last": 0}, {"async_": "fork"}):
        try:
            Manager(folder, **wrong)
        except ConfigurationError as error:
            found.append(str(error))
    return found


def with_such_a_step(case: Case, folder: str) -> list[str]:
    run, found = new_run(case, folder), []
    with Manager(folder) as manager:
        for step in (2.5, "3", -1, True, torch.tensor(3)):
            try:
                manager.save(step, run.model, run.optimizer)  # type: ignore[arg-type]
            except ConfigurationError as error:
                found.append(str(error))
        with mock.patch.object(manager, "_prepare", side_effect=ZeroDivisionError("of rank 0")):
            found.append(message_of(lambda: manager.save(1, run.model, run.optimizer)))
        manager.save(1, run.model, run.optimizer)
        found.append(str(manager.steps()))
    return found


def test_a_step_that_is_none_is_refused_on_every_rank(tmp_path: Path) -> None:
    """3 ranks: and an error of rank 0 of any kind is one on all of them, so that the next save works."""
    ran = run_ranks(3, with_such_a_step, Case("mxfp8", (3,), shapes=((32, 32),)), str(tmp_path))
    assert ran[0] == ran[1] == ran[2] and len(ran[0]) == 7, ran
    assert all("a step is an int, 0 or more" in message for message in ran[0][:5]), ran[0]
    assert ran[0][5:] == ["ZeroDivisionError: of rank 0", "[1]"]


def test_a_state_that_cannot_be_plain_is_refused_on_every_rank(tmp_path: Path) -> None:
    """2 ranks: and arguments that do not fit."""
    first, second = run_ranks(2, with_such_a_state, Case("mxfp8", (2,), shapes=((32, 32),)), str(tmp_path))
    assert first == second and len(first) == 8, first
    assert first[0].startswith("on rank 1: the state of 'data', a dict, cannot be saved as plain data")
    assert first[1] == "[]"
    assert first[2] == "on rank 1: KeyError: 1"
    assert first[3] == "[False]"  # another's complete checkpoint of the step would not be replaced


# Retention and ownership ----------------------------------------------------------------------------------------------


def retained(case: Case, folder: str) -> list[list[int]]:
    """The steps that are there after each save: 1 to 7, every third kept, the last two kept."""
    run, found = new_run(case, folder), []
    with Manager(folder, keep_last=2, keep_every=3) as manager:
        for step in range(1, 8):
            manager.save(step, run.model, run.optimizer)
            if step == 6 and dist.get_rank() == 0:
                Path(manager.path(6), "__0_0.distcp").write_bytes(b"cut")
            dist.barrier()
            found.append(manager.steps())
    return found


def test_retention(tmp_path: Path) -> None:
    """1 rank: what is damaged is not counted."""
    found = run_ranks(1, retained, Case("mxfp8", (1,), shapes=((32, 32),)), str(tmp_path))[0]
    assert found == [[1], [1, 2], [2, 3], [3, 4], [3, 4, 5], [3, 5, 6], [3, 5, 6, 7]]


def two_runs(case: Case, folder: str) -> list[str]:
    run = new_run(case, folder)
    with mock.patch.object(ownership, "LOCK_SECONDS", 0.2), Manager(folder) as manager:
        second = message_of(lambda: Manager(folder))
        manager.save(1, run.model, run.optimizer)
        with Manager(folder, read_only=True) as reader:
            reading = str(reader.steps())
            try:
                reader.save(2, run.model, run.optimizer)
            except ConfigurationError as error:
                reading += str(error)
    with Manager(folder) as third:
        return [second, reading, str(third.latest())]


def test_two_runs_on_one_directory(tmp_path: Path) -> None:
    """2 ranks: the second is refused on both; a reader is not, and one after the first is not."""
    for second, reading, third in run_ranks(2, two_runs, Case("mxfp8", (2,), shapes=((32, 32),)), str(tmp_path)):
        assert f"{tmp_path} is in use by another run" in second
        assert reading.startswith("[1]") and "read_only" in reading and third == "1"


# In the background ----------------------------------------------------------------------------------------------------


def saved_beside_training(case: Case, folder: str) -> list[Any]:
    """The checkpoint of a slow writer, while steps change every weight, is of the state at the call."""
    run: Run = new_run(case, folder)
    run.train(1)
    may_write, write, running = threading.Event(), CommitWriter.write_data, []

    def slow(*args: Any) -> Any:
        running.append(len(running))
        assert may_write.wait(GROUP_SECONDS)
        return write(*args)

    with mock.patch.object(CommitWriter, "write_data", slow), Manager(folder, async_="thread") as manager:
        held = run.held()
        report = manager.save(1, run.model, run.optimizer)
        assert report.background_seconds is None and report.bytes > 0
        run.train(2)
        changed = len(held.items() - run.held().items()) > len(held) // 4
        none_yet = manager.steps()
        threading.Timer(0.3, may_write.set).start()
        second = run.held()
        manager.save(2, run.model, run.optimizer)  # waits for the first
        waited = manager.steps() == [1] or manager.steps() == [1, 2]
        done = manager.wait()
        assert done is not None and done.background_seconds is not None and done.step == 2
        found = [none_yet, changed, waited, len(running)]
        for step, expected in ((1, held), (2, second)):
            target = new_run(replace(case, seed=99), folder)
            manager.restore(target.model, target.optimizer, step=step)
            found.append(target.held() == expected)
    return found


@pytest.mark.parametrize(
    "recipe", ["delayed", "nvfp4", *(pytest.param(each, marks=pytest.mark.exhaustive) for each in ("block", "mxfp8"))]
)
def test_in_the_background_it_is_the_state_at_the_call(recipe: str, tmp_path: Path) -> None:
    """2 ranks."""
    assert recipe in RECIPES
    for found in run_ranks(2, saved_beside_training, Case(recipe, (2,), shapes=SHAPES), str(tmp_path)):
        assert found == [[], True, True, 2, True, True]
