"""A load is read, planned, agreed on and applied: in how many collectives, and what a plan says."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from quantshard import checkpoints
from quantshard.checkpoints import Manager, rank_states
from quantshard.checkpoints.disk.manifest import MANIFEST
from quantshard.checkpoints.loading import LoadRequest, plan_load, read_contents
from quantshard.errors import CheckpointError
from quantshard.tensor import components
from tests.checkpoints.small import built
from tests.distributed.models import Case, bits, build, optimizer_of
from tests.distributed.pool import run_ranks
from tests.tensor.test_tensor import differing

COLLECTIVES = [
    *("all_gather", "all_gather_into_tensor", "all_gather_object", "all_reduce", "barrier", "broadcast"),
    *("broadcast_object_list", "gather", "gather_object", "reduce_scatter_tensor", "scatter", "scatter_object_list"),
]


class CollectiveSGD(torch.optim.SGD):
    """A stock optimizer whose step is a collective call."""

    def step(self, closure: Any = None) -> Any:
        dist.all_reduce(torch.ones(1))
        return super().step(closure)


def fused(case: Case, model: torch.nn.Module) -> torch.optim.Optimizer:
    return optimizer_of(model, case)


def stock(kind: Callable[..., torch.optim.Optimizer], case: Case, model: torch.nn.Module) -> torch.optim.Optimizer:
    return kind([p for p in model.parameters() if components.quantized_local(p) is None], lr=0.5, momentum=0.5)


Build = Callable[[Case, torch.nn.Module], torch.optim.Optimizer]

LOADS: dict[str, tuple[str, Build]] = {
    "FusedAdam": ("mxfp8", fused),
    "scales that are powers of two": ("block", fused),
    "a stock optimizer": ("mxfp8", partial(stock, torch.optim.SGD)),
}
"""The recipe and the optimizer."""


def callers(load: Callable[[], object]) -> list[str]:
    """The modules that make collectives during a load."""
    found: list[str] = []

    def counted(name: str) -> Callable[..., Any]:
        whole = getattr(dist, name)

        def count(*args: Any, **kwargs: Any) -> Any:
            found.append(sys._getframe(1).f_globals["__name__"])
            return whole(*args, **kwargs)

        return count

    with mock.patch.multiple(dist, **{name: counted(name) for name in COLLECTIVES}):
        load()
    return found


def collectives(recipe: str, optimizer_for: Build, folder: str) -> list[list[str]]:
    """Of a load, and of a restore."""
    case = Case(recipe, (dist.get_world_size(),), shapes=((32, 64), (64, 33)))
    model = build(case)
    optimizer = optimizer_for(case, model)
    checkpoints.save(f"{folder}/c", model, optimizer)
    with Manager(f"{folder}/run") as manager:
        manager.save(1, model, optimizer)
        model = build(replace(case, seed=9))
        optimizer = optimizer_for(case, model)
        return [
            callers(lambda: checkpoints.load(f"{folder}/c", model, optimizer)),
            callers(lambda: manager.restore(model, optimizer)),
        ]


@pytest.mark.distributed
@pytest.mark.parametrize("kind", LOADS)
def test_ranks_agree_before_and_after_the_plan_and_at_the_end(kind: str, tmp_path: Path) -> None:
    """3 ranks; the others are DCP's own, and before a restore which steps there are."""
    recipe, optimizer_for = LOADS[kind]
    for load, restore in run_ranks(3, collectives, recipe, optimizer_for, str(tmp_path)):
        agreed, by_dcp = "quantshard.checkpoints.disk.agreement", ["torch.distributed.checkpoint.utils"] * 3
        assert load == [agreed] * 2 + by_dcp + [agreed]
        assert restore == [agreed, *load]


def from_own_disk(recipe: str, optimizer_for: Build, path: str) -> tuple[str, bool]:
    """The last rank's disk has no metadata: what is said, and whether the model is as it was."""
    case = Case(recipe, (3,), shapes=((32, 64), (64, 33)))
    model = build(case)
    optimizer = optimizer_for(case, model)
    if "momentum" in optimizer.param_groups[0]:  # then it has states, which a new one will need
        for param in optimizer.param_groups[0]["params"]:
            param.grad = torch.ones_like(param)
        optimizer.step()
    checkpoints.save(path, model, optimizer)
    optimizer = optimizer_for(case, model)
    there, before = f"{path}-nowhere" if dist.get_rank() == 2 else path, bits(model)
    began = time.monotonic()
    with pytest.raises(CheckpointError) as raised:
        checkpoints.load(there, model, optimizer)
    assert time.monotonic() - began < 20, "it was waited for"
    return str(raised.value), bits(model) == before


@pytest.mark.distributed
@pytest.mark.parametrize("kind", [*LOADS, "a step that is collective"])
def test_a_rank_that_cannot_read_keeps_none_waiting(kind: str, tmp_path: Path) -> None:
    """3 ranks; neither where scales are looked at together, nor where the others' optimizers make a step."""
    recipe, optimizer_for = LOADS.get(kind, ("mxfp8", partial(stock, CollectiveSGD)))
    path = str(tmp_path / "c")
    said = f"on rank 2: {path}-nowhere is not a complete checkpoint: it has no .metadata"
    for message, same in run_ranks(3, from_own_disk, recipe, optimizer_for, path):
        assert message.startswith(said) and same, message


def from_disks_with_and_without(path: str) -> str:
    """The last rank's disk has no manifest."""
    model = build(Case("mxfp8", (3,), shapes=((32, 64), (64, 33))))
    checkpoints.save(path, model, None)
    disk = f"{path}-{dist.get_rank() == 2}"
    if dist.get_rank():
        shutil.copytree(path, disk)
    if dist.get_rank() == 2:
        Path(disk, MANIFEST).unlink()
    before = bits(model)
    with pytest.raises(CheckpointError) as raised:
        checkpoints.load(disk if dist.get_rank() else path, model)
    assert bits(model) == before
    return str(raised.value)


@pytest.mark.distributed
def test_a_manifest_that_one_rank_lacks_is_told_on_all(tmp_path: Path) -> None:
    """3 ranks."""
    for message in run_ranks(3, from_disks_with_and_without, str(tmp_path / "c")):
        assert "rank 2 sees no manifest.json; share the files" in message


# Of one process -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", ["mxfp8", "current"])
def test_a_plan_says_of_every_entry_what_becomes_of_it(recipe: str, tmp_path: Path) -> None:
    """And writes nothing."""
    source, states = built("mxfp8")
    states.param_groups[0]["initial_lr"] = 0.5  # which the other has not, and takes
    checkpoints.save(tmp_path / "c", source, states, {"step": 3})
    model, optimizer = built(recipe)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    request = LoadRequest(tmp_path / "c", model, optimizer, requantize=recipe != "mxfp8")
    plan = plan_load(request, *read_contents(request))
    assert not differing(before, model.state_dict())
    extra = {key for key in plan.reader.entries if key.startswith("extra.")}
    parts = [set(plan.targets), set(plan.settings), set(plan.ignored_keys), extra]
    assert set().union(*parts) == plan.reader.entries.keys() | plan.paths.keys()
    assert sum(map(len, parts)) == len(set().union(*parts))
    assert plan.settings["optimizer.param_groups.0.lr"] == states.param_groups[0]["lr"]
    assert plan.settings["optimizer.param_groups.0.initial_lr"] == 0.5
    assert "optimizer.param_groups.0.params" in plan.ignored_keys
    converted = {conversion.name for conversion in plan.weight_conversions}
    assert {name for name in components.named_parameters(model) if f"model.{name}" in plan.ignored_keys} == converted
    assert bool(converted) == request.requantize


def test_a_state_of_a_rank_that_cannot_be_read_is_found_before_anything_is_written(tmp_path: Path) -> None:
    model, optimizer = built("mxfp8")
    with Manager(tmp_path) as manager:
        manager.save(1, *built("mxfp8"))
        with torch.no_grad():
            model[0].bias.fill_(7.0)
        with (
            mock.patch.object(rank_states, "decoded", side_effect=CheckpointError("it is cut")),
            pytest.raises(CheckpointError, match="it is cut"),
        ):
            manager.restore(model, optimizer)
        assert (model[0].bias == 7).all()
        manager.restore(model, optimizer)
    assert not (model[0].bias == 7).any()
