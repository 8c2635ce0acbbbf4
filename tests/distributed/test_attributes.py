"""What users and frameworks set on quantized parameters stays there: moved, copied, sharded, gathered and loaded."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import quantshard as qs
from quantshard.tensor import components
from tests.distributed.pool import run_ranks

pytestmark = pytest.mark.distributed


MARK = ["a mark"]
"""Compared by identity where no copy is asked for."""


def born(device: str = "cpu") -> nn.Module:
    torch.manual_seed(0)
    with torch.device(device):
        model = nn.Sequential(nn.Linear(40, 48, bias=False), nn.ReLU(), nn.Linear(48, 40)).to(torch.bfloat16)
    model[0].weight.mark = MARK  # before convert
    qs.convert(model, "nvfp4")
    model[2].weight.mark = MARK
    return model


def marked(model: nn.Module) -> bool:
    weights = [model[0].weight, model[2].weight]
    assert all(components.quantized_local(weight) is not None for weight in weights)
    return all(getattr(weight, "mark", None) is MARK for weight in weights)


def test_moved_copied_and_loaded() -> None:
    model = born()
    weight = model[0].weight
    assert marked(model) and marked(model.to(torch.float32)) and marked(model.cpu()) and marked(model.half())
    assert model[0].weight is weight
    twin = copy.deepcopy(model)
    assert twin[0].weight.mark == MARK and twin[0].weight.mark is not MARK
    model.load_state_dict(born().state_dict())
    assert marked(model)
    model.load_state_dict(born().half().state_dict(), assign=True)
    assert marked(model) and model[0].weight is not weight
    assert marked(model.to("meta")) and marked(model.to_empty(device="cpu"))
    meta = born("meta")
    meta.load_state_dict(born().state_dict(), assign=True)
    assert marked(meta)
    meta = born("meta")
    for module in (meta[0], meta[2]):
        module.reset_parameters()
    assert marked(meta)
    assert qs.revert(meta) == 2 and meta[0].weight.mark is MARK
    assert not hasattr(meta[0].weight, "quantized_storage")  # nor are the codes kept alive


def test_the_mark_of_a_weight_stays_its_own() -> None:
    """One that comes from elsewhere in its place has none, and takes none."""
    model, other = born(), born()
    del other[0].weight.mark
    model[0].weight = other[0].weight
    assert not hasattr(model[0].weight, "mark")


def sharded(folder: Path) -> list[str]:
    """What is not marked after each of these."""
    lost = []

    def check(what: str) -> None:
        if not marked(model):
            lost.append(what)

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model, seen = born(), []
    for layer in (model[0], model[2]):
        layer.register_forward_pre_hook(lambda module, _: seen.append(getattr(module.weight, "mark", None)))
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    assert isinstance(model[0].weight, DTensor)
    check("fully_shard")
    optimizer = qs.optimizers.FusedAdam(model.named_parameters())
    for _ in range(2):
        model(torch.ones(3, 40, dtype=torch.bfloat16)).sum().backward()
        optimizer.step()
    assert seen == [MARK] * 4  # those of the gathered weights
    check("steps")
    qs.checkpoints.save(folder / "ours", model, optimizer)
    state = get_model_state_dict(model)
    dcp.save(state, checkpoint_id=folder / "stock")
    qs.checkpoints.load(folder / "ours", model, optimizer)
    check("load")
    dcp.load(state, checkpoint_id=folder / "stock")
    set_model_state_dict(model, state)
    check("DCP")
    model.load_state_dict(model.state_dict(), assign=True)
    check("assign")
    model.to(torch.float32)
    check("to")
    meta = born("meta")
    fully_shard(meta, mesh=mesh)
    model = meta
    check("meta")
    model.to_empty(device="cpu")
    check("to_empty")
    qs.checkpoints.load_high_precision(model, plain())
    check("load_high_precision")
    return lost


def plain() -> dict[str, Tensor]:
    torch.manual_seed(1)
    return {"0.weight": torch.randn(48, 40), "2.weight": torch.randn(40, 48), "2.bias": torch.zeros(40)}


@pytest.mark.parametrize("ranks", [1, 3])
def test_sharded_gathered_and_loaded(ranks: int, tmp_path: Path) -> None:
    assert run_ranks(ranks, sharded, tmp_path) == [[]] * ranks
