"""`checkpoints.save` and `load`: what is refused, in one sentence on every rank, and that nothing saved is lost.

Each test names its rank count.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.tensor import DTensor, distribute_tensor

from quantshard import checkpoints
from quantshard.checkpoints.disk import manifest
from quantshard.errors import CheckpointError, ConfigurationError, RankMismatchError
from quantshard.tensor import component_loading
from tests.distributed.models import Case, bits, build, optimizer_of, train
from tests.distributed.pool import GROUP_SECONDS, run_ranks

pytestmark = pytest.mark.distributed
EXTRA = {"step": 3, "loss": 0.1, "name": "run", "words": torch.arange(5)}


def save(case: Case, path: str) -> dict[str, str]:
    model = build(case)
    optimizer = optimizer_of(model, case)
    train(model, optimizer, case, 0, 1)
    checkpoints.save(path, model, optimizer, EXTRA)
    return bits(model, optimizer)


def load(case: Case, path: str) -> tuple[dict[str, str], dict[str, object]]:
    model = build(case)
    optimizer = optimizer_of(model, case)
    extra = checkpoints.load(path, model, optimizer)
    return bits(model, optimizer), {k: v.tolist() if isinstance(v, torch.Tensor) else v for k, v in extra.items()}


def failure(case: Case, path: str, action: Callable[..., object]) -> str:
    try:
        action(case, path)
    except CheckpointError as error:
        return str(error)
    return "nothing was raised"


@pytest.mark.parametrize(
    "recipe", ["nvfp4", *(pytest.param(name, marks=pytest.mark.exhaustive) for name in ("delayed", "mxfp8 two copies"))]
)
def test_round_trip_with_extra_entries(recipe: str, tmp_path: Path) -> None:
    """2 and 3 ranks: bits, and the caller's own entries."""
    path = str(tmp_path / "c")
    saved = run_ranks(2, save, Case(recipe, (2,)), path)[0]
    for loaded, extra in run_ranks(3, load, Case(recipe, (3,), seed=9), path):
        assert loaded == saved
        assert extra == {**EXTRA, "words": [0, 1, 2, 3, 4]}


def with_extras(case: Case, folder: str) -> list[object]:
    """What is said of entries that cannot be saved, and what comes back of those that can, in each mode."""
    model = build(case)
    optimizer, rank = optimizer_of(model, case), dist.get_rank()
    mesh = next(param.device_mesh for param in model.parameters() if isinstance(param, DTensor))
    cut = distribute_tensor(torch.arange(6.0), mesh)
    wrong = {
        "unequal": {"step": 1, "losses": {"last": float(rank)}},
        "on one rank": {"step": 1, "best": Path("x") if rank else "x"},
        "cut": {"mean": {"weight": cut}},
    }
    good = {"step": 1, "schedule": {"last": 3, "seen": {}, 4: [torch.ones(2), (1, None)]}, "cut": cut}
    found: list[object] = []
    for mode in (None, "thread"):
        with checkpoints.Manager(f"{folder}/{mode}", async_=mode) as manager:
            for extra in wrong.values():
                try:
                    manager.save(1, model, optimizer, extra)
                except (ConfigurationError, RankMismatchError) as error:
                    found.append(str(error))
            assert manager.wait() is None and manager.steps() == []
            manager.save(1, model, optimizer, good)
            restored = manager.restore(model, optimizer)
        assert restored is not None
        found.append(repr(restored.extra))
    return found


def test_extra_entries_of_ranks_that_do_not_agree(tmp_path: Path) -> None:
    """3 ranks: one error on all, by the call, and nothing is written; and nested entries of each mode."""
    first, *others = run_ranks(3, with_extras, Case("mxfp8", (3,)), str(tmp_path))
    assert others == [first, first] and len(first) == 8
    unequal, on_one_rank, cut, good = first[:4]
    assert unequal.startswith("extra['losses'] differs on rank 1; ")
    assert on_one_rank.startswith("on rank 1: extra['best'], a PosixPath, cannot be saved as plain data")
    assert cut.startswith("extra['mean'], a dict, ") and "must be an entry of `extra` itself" in cut
    schedule = "{'last': 3, 'seen': {}, 4: [tensor([1., 1.]), (1, None)]}"
    assert good == f"{{'step': 1, 'schedule': {schedule}, 'cut': tensor([0., 1., 2., 3., 4., 5.])}}"
    assert first[4:] == first[:4]


def truncate(path: Path) -> None:
    largest = max(path.glob("*.distcp"), key=lambda file: file.stat().st_size)
    largest.write_bytes(largest.read_bytes()[: largest.stat().st_size // 2])


def remove_file(path: Path) -> None:
    next(path.glob("*.distcp")).unlink()


def remove_metadata(path: Path) -> None:
    (path / ".metadata").unlink()


def garble_metadata(path: Path) -> None:
    (path / ".metadata").write_bytes(b"not a pickle")


DAMAGE = {
    truncate: "bytes, and manifest.json says",
    remove_file: "is missing",
    remove_metadata: "not a complete checkpoint",
    garble_metadata: "cannot be read",
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """By 1 and by 3 ranks, with mxfp8."""
    paths = {ranks: tmp_path_factory.mktemp("saved") / str(ranks) for ranks in (1, 3)}
    for ranks, path in paths.items():
        run_ranks(ranks, save, Case("mxfp8", (ranks,)), str(path))
    return paths


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage(damage: Callable[[Path], None], saved: dict[int, Path], tmp_path: Path) -> None:
    """1 and 3 ranks: one line on every rank, no hang."""
    for ranks in (1, 3):
        path = tmp_path / str(ranks)
        case = Case("mxfp8", (ranks,))
        shutil.copytree(saved[ranks], path)
        damage(path)
        for message in run_ranks(ranks, failure, case, str(path), load):
            assert DAMAGE[damage] in message
            assert str(path) in message
            assert "\n" not in message


OTHERS = {
    "another recipe": (
        Case("current", (3,)),
        "of another recipe: 0.weight is stored as mxfp8_32x32 there and as fp8_e4m3",
    ),
    "other rows": (Case("mxfp8", (3,), shapes=((96, 64), (64, 3))), "of another model"),
    "fewer layers": (Case("mxfp8", (3,), shapes=((96, 300),)), "of another model"),
    "other moments": (Case("mxfp8", (3,), moments=torch.uint8), "of another optimizer: its group 0 has no 'rounding"),
    "narrower moments": (Case("mxfp8", (3,), moments=torch.bfloat16), "exp_avg is torch.float32 [300, 96] there"),
}


@pytest.mark.parametrize("other", OTHERS)
def test_another_model_or_recipe(other: str, saved: dict[int, Path]) -> None:
    """3 ranks: refused by name before anything is read."""
    case, expected = OTHERS[other]
    for message in run_ranks(3, failure, case, str(saved[3]), load):
        assert expected in message


def plain_load(case: Case, path: str) -> str:
    model = build(case)
    state = {"model": model.state_dict()}
    dcp.load(state, checkpoint_id=path)
    try:
        model.load_state_dict(state["model"])
    except RuntimeError as error:
        return str(error)
    return "nothing was raised"


def test_the_plain_idiom_refuses_another_recipe_of_the_same_shapes(tmp_path: Path) -> None:
    """2 ranks: delayed and current weights have the same tensors but for the history; the tag tells them apart."""
    path = str(tmp_path / "c")
    run_ranks(2, save, Case("delayed", (2,)), path)
    for message in run_ranks(2, plain_load, Case("current", (2,)), path):
        assert "'fp8_e4m3+hist'" in message
        assert "'fp8_e4m3'" in message


def test_a_complete_checkpoint_is_not_overwritten(tmp_path: Path) -> None:
    """2 ranks: the second save raises on both, the first can still be loaded."""
    path, case = str(tmp_path / "c"), Case("current", (2,))
    saved = run_ranks(2, save, case, path)[0]
    assert all("holds a complete checkpoint" in message for message in run_ranks(2, failure, case, path, save))
    assert run_ranks(2, load, case, path)[0][0] == saved


def test_an_incomplete_one_is(tmp_path: Path) -> None:
    """2 ranks: files without metadata are in nobody's way."""
    path, case = tmp_path / "c", Case("current", (2,))
    run_ranks(2, save, case, str(path))
    remove_metadata(path)
    saved = run_ranks(2, save, case, str(path))[0]
    assert run_ranks(2, load, case, str(path))[0][0] == saved


def save_unwritable(case: Case, path: str) -> str:
    return failure(case, path, save)


def test_a_path_that_cannot_be_written(tmp_path: Path) -> None:
    """2 ranks: a file stands where the directory should; one line on both, and the file is as it was."""
    path = tmp_path / "c"
    path.write_text("mine")
    for message in run_ranks(2, save_unwritable, Case("current", (2,)), str(path)):
        assert "could not be written" in message
        assert "\n" not in message
    assert path.read_text() == "mine"


def world() -> int:
    return dist.get_world_size()


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_the_pool_gives_fresh_groups(ranks: int) -> None:
    """1 to 4 ranks: what all other tests stand on."""
    assert run_ranks(ranks, world) == [ranks] * ranks


ONE_DISK: dict[str, tuple[Callable[[Path], object], str]] = {
    "nothing": (shutil.rmtree, "is not a complete checkpoint: it has no .metadata"),
    "no metadata": (lambda disk: (disk / ".metadata").unlink(), "is not a complete checkpoint: it has no .metadata"),
    "cut metadata": (lambda disk: (disk / ".metadata").write_bytes(b"\x80\x04"), "its .metadata cannot be read"),
    "no file": (lambda disk: (disk / "__0_0.distcp").unlink(), "__0_0.distcp is missing; restore its files"),
    "a cut manifest": (lambda disk: (disk / "manifest.json").write_text("{"), "is damaged: it is not JSON"),
}


def load_from_own_disk(case: Case, path: str) -> tuple[list[str], bool]:
    """Each rank has a disk; the last one's lacks something. The messages, and whether the model is as it was."""
    model = build(case)
    optimizer = optimizer_of(model, case)
    before, found = bits(model, optimizer), []
    for number, (damage, _) in enumerate(ONE_DISK.values()):
        disk = Path(f"{path}-{number}-{dist.get_rank()}")
        shutil.copytree(path, disk)
        if dist.get_rank() == 2:
            damage(disk)
        began = time.monotonic()
        found.append(failure(case, str(disk), lambda case, disk: checkpoints.load(disk, model, optimizer)))
        assert time.monotonic() - began < GROUP_SECONDS / 2, "it was waited for"
    return found, bits(model, optimizer) == before


def test_what_one_rank_cannot_read_is_told_on_all_at_once(tmp_path: Path) -> None:
    """3 ranks: the last one's disk lacks something."""
    case, path = Case("mxfp8", (3,), shapes=((32, 32),)), str(tmp_path / "c")
    run_ranks(3, save, case, path)
    for found, same in run_ranks(3, load_from_own_disk, replace(case, seed=9), path):
        assert same
        for number, (message, (_, said)) in enumerate(zip(found, ONE_DISK.values(), strict=True)):
            assert message.startswith(f"on rank 2: {path}-{number}-2") and said in message, message


FAILING: tuple[tuple[Any, str], ...] = (
    (manifest, "wrong_file"),
    (torch.nn.Module, "load_state_dict"),
    (component_loading, "fitting_pairs"),
)
"""What is called while a checkpoint is verified, when it was read, and while what rank 0 has is looked at."""


def fail_on_the_last(case: Case, folder: str) -> list[str]:
    """What is said where the last rank runs out of memory."""
    model, found = build(case), []
    optimizer = optimizer_of(model, case)
    whole = build(replace(case, mesh=None)).state_dict()

    def fail(*_: Any, **__: Any) -> Any:
        raise MemoryError("no memory")

    def load(what: str) -> None:
        if what == "fitting_pairs":
            checkpoints.load_from_rank0(model, whole)
        else:
            manager.restore(model, optimizer)

    with checkpoints.Manager(folder) as manager:
        manager.save(1, model, optimizer)
        for where, what in FAILING:
            with mock.patch.object(where, what, fail if dist.get_rank() == 2 else getattr(where, what)):
                found.append(failure(case, what, lambda _, what: load(what)))
    return found


def test_what_fails_on_one_rank_in_any_way_fails_on_all(tmp_path: Path) -> None:
    """3 ranks: errors that nobody foresees leave no rank waiting."""
    for found in run_ranks(3, fail_on_the_last, Case("mxfp8", (3,), shapes=((32, 32),)), str(tmp_path)):
        error = "on rank 2: MemoryError: no memory"
        partly = f"{error}; the model is partly loaded: load again, or build it again"
        assert found == [error, partly, f"load_from_rank0: {error}"]
