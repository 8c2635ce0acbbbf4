"""Loads of damaged files, and loads that fail half way: nothing is written, or what was written to is not used."""

from __future__ import annotations

import itertools
import shutil
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from quantshard import checkpoints
from quantshard.checkpoints import high_precision, partial_load
from quantshard.checkpoints.checksums import NoManifestWarning
from quantshard.checkpoints.manager import Manager
from quantshard.checkpoints.manifest import MANIFEST
from quantshard.checkpoints.metadata import METADATA_FILE, read_metadata
from quantshard.checkpoints.reader import SafePlanner, SafeReader
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
        metadata = read_metadata(folder)
        chunk, values = list(SafeReader(folder, metadata).pieces(key))[-1]
        info = next(i for k, i in metadata.storage_data.items() if k.fqn == key and k.offset == chunk.offsets)
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


def uses(run: Run, path: Path) -> dict[str, Callable[[], object]]:
    """What must not go on with a mixture."""
    x = torch.zeros(2, run.case.shapes[0][0], dtype=torch.bfloat16)
    return {
        "forward": lambda: run.model(x),
        "forward of a layer": lambda: run.model[0](x),
        "state_dict": run.model.state_dict,
        "state_dict of a layer": run.model[0].state_dict,
        "step": run.optimizer.step,
        "the optimizer's state_dict": run.optimizer.state_dict,
        "save": lambda: checkpoints.save(path, run.model, run.optimizer),
        "save of the model": lambda: checkpoints.save(path, run.model, None),
    }


def refused(run: Run, path: Path) -> list[str]:
    """What does not raise that must, or not in words that tell what happened and what to do."""
    wrong = []
    for name, use in uses(run, path).items():
        said = message_of(use)
        if "failed after it had begun to write (" not in said or "build it anew" not in said:
            wrong.append(f"{name}: {said}")
    return wrong + ([f"{path} is there"] if path.exists() else [])


def held(run: Run) -> dict[str, str]:
    return {name: value for name, value in run.held().items() if name != "torch's generator"}


def damaged(case: Case, folder: str) -> list[str]:
    """Of a bit of each kind: what is wrong where there is a manifest, where there is none, and after a good load."""
    root, wrong = Path(folder), []
    source = new_run(case, folder)
    source.train(1)
    saved = held(source)
    checkpoints.save(root / "good", source.model, source.optimizer)
    for kind, key in KINDS.items():
        path = root / kind
        on_rank_0(shutil.copytree, root / "good", path)
        on_rank_0(flip, path, key)
        target = new_run(replace(case, seed=99), folder)
        before = held(target)
        said = message_of(lambda: checkpoints.load(path, target.model, target.optimizer))  # noqa: B023
        if "damaged" not in said or held(target) != before:
            wrong.append(f"{kind}: {said} {'' if held(target) == before else 'CHANGED'}")
        on_rank_0((path / MANIFEST).unlink)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", NoManifestWarning)
            said = message_of(lambda: checkpoints.load(path, target.model, target.optimizer))  # noqa: B023
        if kind != "metadata":  # which is read before anything is written
            wrong += [
                f"{kind}: {line}" for line in [said, *refused(target, root / "not saved")] if "damaged" not in line
            ]
        checkpoints.load(root / "good", target.model, target.optimizer)
        if held(target) != saved or partial_load._hooks:
            wrong.append(f"{kind}: not healed")
        target.train(1)
    return wrong


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_flipped_bit_is_not_loaded_in_part(ranks: int, tmp_path: Path) -> None:
    """1 and 3 ranks: a bit of each kind of tensor in the file of the last rank, with and without a manifest."""
    assert run_ranks(ranks, damaged, Case("mxfp8", (ranks,), shapes=SHAPES), str(tmp_path)) == [[]] * ranks


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
        of_the_load = where is not SafePlanner or args[1].dest_index.fqn == "model.1.bias"
        if of_the_load and (is_last() or name == "requantize_"):
            raise error("it failed")
        return found

    return mock.patch.object(where, name, fail)


def half_way(case: Case, folder: str) -> list[str]:
    """Of each entrance that writes into a live model, failing on the last rank: what is wrong on this one."""
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
            (SafePlanner, "commit_tensor"),
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
        "restore": (lambda run: restoring.restore(run.model, run.optimizer), (Manager, "_load_own"), case),
        "load_from_rank0": (
            lambda run: checkpoints.load_from_rank0(run.model, whole),
            (nn.Module, "load_state_dict"),
            case,
        ),
        "load_high_precision": (
            lambda run: checkpoints.load_high_precision(run.model, values),
            (high_precision.amax, "requantize_"),
            case,
        ),
    }
    for (name, (load, where, its_case)), error in itertools.product(entrances.items(), (Failure, KeyboardInterrupt)):
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
            expected = {error.__name__ if is_last() and error is KeyboardInterrupt else "CheckpointError"}
            expected |= {"load_high_precision": {error.__name__}, "load": {"DamagedError"}}.get(name, set())
            if said not in expected:
                wrong.append(f"{name}, {error.__name__}: {said}")
            only_model = name in ("load_from_rank0", "load_high_precision")
            for use, action in uses(run, root / "not saved").items():
                if "step" in use and only_model:
                    continue
                if "optimizer's" in use and only_model:
                    continue
                if "failed after it had begun to write (" not in message_of(action):
                    wrong.append(f"{name}, {error.__name__}: {use}: {message_of(action)}")
            if only_model:  # which the optimizer was not told of, and sees
                with pytest.raises(Exception, match="was given new values after"):
                    run.optimizer.step()
            load(run)
        if partial_load._hooks or (whole_case and held(run) != saved):
            wrong.append(f"{name}: not healed")
    return wrong


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_load_that_fails_half_way_leaves_what_refuses(ranks: int, tmp_path: Path) -> None:
    """1 and 3 ranks: every entrance that writes into a live model fails on the last rank, by an error and a Ctrl-C."""
    assert run_ranks(ranks, half_way, Case("mxfp8", (ranks,), shapes=SHAPES), str(tmp_path)) == [[]] * ranks
