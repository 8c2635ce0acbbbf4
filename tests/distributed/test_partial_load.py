"""Loads of damaged files, and loads that fail half way: nothing is written, or what was written to is not used."""

from __future__ import annotations

import itertools
import shutil
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import DefaultLoadPlanner

from quantshard import checkpoints
from quantshard.checkpoints import high_precision, rank_states
from quantshard.checkpoints.disk.manifest import MANIFEST, METADATA_FILE
from quantshard.checkpoints.manager import Manager
from quantshard.checkpoints.safe_read import NoManifestWarning, SafeReader
from quantshard.errors import CheckpointError
from quantshard.optimizers import FusedAdam
from tests.distributed.models import Case
from tests.distributed.pool import run_ranks
from tests.distributed.saving import FULL, SHAPES, Run, new_run, on_rank_0

pytestmark = pytest.mark.distributed

KINDS = {
    "codes": "model.1.weight",
    "scale": "model.1.weight_scale_inv",
    "key": "model.1.weight_key",
    "master": "optimizer.state.2.master_param",
    "moment": "optimizer.state.2.exp_avg_sq",
    "metadata": METADATA_FILE,
}


def flip(folder: Path, key: str) -> None:
    """One bit of the last piece of an entry, which lies in the file of the last rank that has any."""
    if key == METADATA_FILE:
        file, at = folder / key, (folder / key).read_bytes().rindex(b".tmp")  # which nobody reads
    else:
        reader = SafeReader(folder)
        chunk, values = list(reader.pieces(key))[-1]
        info = next(i for k, i in reader.metadata.storage_data.items() if k.fqn == key and k.offset == chunk.offsets)
        file = folder / info.relative_path
        wanted = values.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        at = file.read_bytes().index(wanted, info.offset, info.offset + info.length)
    content = bytearray(file.read_bytes())
    content[at] ^= 1
    file.write_bytes(content)


def message_of(action: Callable[[], object]) -> str:
    try:
        action()
    except CheckpointError as error:
        return str(error)
    return "nothing was raised"


def held(run: Run) -> dict[str, str]:
    return {name: value for name, value in run.held().items() if name != "torch's generator"}


def damaged(case: Case, folder: str, kinds: Sequence[str]) -> list[str]:
    """Of a bit of some kinds: what is wrong after a load that finds it, and after a good load."""
    root, wrong = Path(folder), []
    source = new_run(case, folder)
    source.train(1)
    saved = held(source)
    checkpoints.save(root / "good", source.model, source.optimizer)
    for kind in kinds:
        key, path = KINDS[kind], root / kind
        on_rank_0(shutil.copytree, root / "good", path)
        on_rank_0(flip, path, key)
        target = new_run(replace(case, seed=99), folder)
        before = held(target)
        said = message_of(lambda: checkpoints.load(path, target.model, target.optimizer))  # noqa: B023
        if "damaged" not in said or held(target) != before:
            wrong.append(f"{kind}: {said} {'' if held(target) == before else 'CHANGED'}")
        checkpoints.load(root / "good", target.model, target.optimizer)
        if held(target) != saved:
            wrong.append(f"{kind}: not healed")
        target.train(1)
    return wrong


@pytest.mark.parametrize(
    ("ranks", "kinds"),
    [
        (1, list(KINDS)),
        (2, ["codes", "master", "metadata"]),
        pytest.param(3, list(KINDS), marks=pytest.mark.exhaustive),
    ],
)
def test_a_flipped_bit_is_not_loaded_in_part(ranks: int, kinds: list[str], tmp_path: Path) -> None:
    """1, 2 and 3 ranks: a bit of each kind of tensor in the file of the last rank."""
    assert run_ranks(ranks, damaged, Case("mxfp8", (ranks,), shapes=SHAPES), str(tmp_path), kinds) == [[]] * ranks


# Loads that fail while they write -------------------------------------------------------------------------------------


class Failure(Exception):
    """Of a disk, a user's module, or a Ctrl-C: on the last rank alone."""


def is_last() -> bool:
    return dist.get_rank() == dist.get_world_size() - 1


def failing(where: Any, name: str, error: type[BaseException]) -> Any:
    """On the last rank a function fails at its end, when others have written; where nobody asks the others, on all."""
    whole = getattr(where, name)

    def fail(*args: Any, **kwargs: Any) -> Any:
        found = whole(*args, **kwargs)
        of_the_load = where is not DefaultLoadPlanner or args[1].dest_index.fqn == "model.1.bias"
        if of_the_load and (is_last() or name == "requantize_"):
            raise error("it failed")
        return found

    return mock.patch.object(where, name, fail)


def half_way(case: Case, folder: str, turns: Sequence[int]) -> list[str]:
    """Of each entrance that writes into a live model, failing on the last rank: what is wrong on this one. By one kind
    of error where there is one turn."""
    root, wrong = Path(folder), []
    source = new_run(case, folder)
    source.train(1)
    saved = held(source)
    checkpoints.save(root / "good", source.model, source.optimizer)
    with Manager(root / "run") as manager:
        manager.save(1, source.model, source.optimizer)
    whole = source.named_state(FULL)["model"] if case.mesh else source.model.state_dict()
    values = {name: torch.randn(param.shape) for name, param in source.model.named_parameters()}
    restoring = Manager(root / "run", read_only=True)
    other = replace(case, recipe="block")
    entrances: dict[str, tuple[Callable[[Run], object], Any, Case]] = {
        "load": (
            lambda run: checkpoints.load(root / "good", run.model, run.optimizer),
            (DefaultLoadPlanner, "commit_tensor"),
            case,
        ),
        "load of the model": (
            lambda run: checkpoints.load(root / "good", run.model),
            (DefaultLoadPlanner, "commit_tensor"),
            case,
        ),
        "the optimizer refuses": (
            lambda run: checkpoints.load(root / "good", run.model, run.optimizer),
            (FusedAdam, "load_state_dict"),
            case,
        ),
        "requantize": (
            lambda run: checkpoints.load(root / "good", run.model, run.optimizer, requantize=True),
            (FusedAdam, "load_state_dict"),
            other,
        ),
        "restore": (
            lambda run: restoring.restore(run.model, run.optimizer),
            (rank_states.RandomGenerators, "load_state_dict"),
            case,
        ),
        "load_from_rank0": (
            lambda run: checkpoints.load_from_rank0(run.model, whole),
            (nn.Module, "load_state_dict"),
            case,
        ),
        "load_high_precision": (
            lambda run: checkpoints.load_high_precision(run.model, values),
            (high_precision.requantize, "requantize_"),
            case,
        ),
    }
    kinds = itertools.product(enumerate(entrances.items()), enumerate((Failure, KeyboardInterrupt)))
    for (i, (name, (load, where, its_case))), (j, error) in kinds:
        if (i + j) % 2 not in turns:
            continue
        run = new_run(replace(its_case, seed=99), folder)
        whole_case = name in ("load", "the optimizer refuses", "restore")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with failing(*where, error):
                try:
                    load(run)
                    said = "nothing was raised"
                except BaseException as found:
                    said = type(found).__name__
                    if isinstance(found, CheckpointError) and "the model is partly loaded" not in str(found):
                        wrong.append(f"{name}, {error.__name__}: {found}")
            expected = {error.__name__ if is_last() and error is KeyboardInterrupt else "CheckpointError"}
            expected |= {
                "load_high_precision": {error.__name__},
                "load": {"DamagedError"},
                "load of the model": {"DamagedError"},
            }.get(name, set())
            if said not in expected:
                wrong.append(f"{name}, {error.__name__}: {said}")
            load(run)
        if whole_case and held(run) != saved:
            wrong.append(f"{name}: not healed")
    return wrong


@pytest.mark.parametrize(
    ("ranks", "turns"),
    [(1, (1,)), (2, (0,)), *(pytest.param(*rest, marks=pytest.mark.exhaustive) for rest in ((1, (0,)), (3, (0, 1))))],
)
def test_a_load_that_fails_half_way_says_so(ranks: int, turns: tuple[int, ...], tmp_path: Path) -> None:
    """1, 2 and 3 ranks: every entrance that writes into a live model fails on the last rank, by an error and a Ctrl-C,
    in turns on 1 and 2."""
    assert run_ranks(ranks, half_way, Case("mxfp8", (ranks,), shapes=SHAPES), str(tmp_path), turns) == [[]] * ranks


def test_a_checkpoint_without_a_manifest_is_named(tmp_path: Path) -> None:
    model, path = nn.Linear(3, 3), tmp_path / "c"
    checkpoints.save(path, model, None)
    (path / MANIFEST).unlink()
    with pytest.warns(NoManifestWarning) as caught:
        checkpoints.load(path, model)
    said = str(caught[0].message)
    assert said.startswith(f"{path} has no manifest.json: its files may be damaged") and len(caught) == 1
    assert f"`quantshard verify {path}`" in said and "checkpoints.save writes a manifest" in said
    assert caught[0].filename == __file__


def without_one(folder: str) -> list[str]:
    """The warnings of each rank: `load` of a plain checkpoint, and `restore`."""
    run = new_run(Case("mxfp8", (dist.get_world_size(),), shapes=((32, 32),)), folder)
    dcp.save(run.state(), checkpoint_id=f"{folder}/step-000001")
    with warnings.catch_warnings(record=True) as caught, Manager(folder, read_only=True) as manager:
        warnings.simplefilter("always")
        checkpoints.load(f"{folder}/step-000001", run.model, run.optimizer)
        manager.restore(run.model, run.optimizer)
    return [str(warning.message) for warning in caught if warning.category is NoManifestWarning]


def test_the_warning_is_of_rank_0(tmp_path: Path) -> None:
    """2 ranks: once a load."""
    first, second = run_ranks(2, without_one, str(tmp_path))
    assert len(first) == 2 and second == []
