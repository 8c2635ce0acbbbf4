"""Lion, and so any optimizer on `ElementwiseOptimizer`, is sharded, saved and loaded on other ranks, bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import quantshard as qs
from quantshard.optimizers import Lion
from tests.distributed.models import bits, set_gradients
from tests.distributed.pool import run_ranks
from tests.optimizers.test_lion import SETTINGS

pytestmark = pytest.mark.distributed

CASES = [(recipe, dtype) for recipe in ("block", "mxfp8") for dtype in (torch.float32, torch.uint8)]


def trained(folder: str, steps: range, loads: bool) -> list[tuple[dict[str, str], dict[str, str]]]:
    """For each case the bits before and after steps of a model that is saved before them, or loaded."""
    found = []
    for number, (recipe, dtype) in enumerate(CASES):
        torch.manual_seed(number + 10 * loads)
        with qs.quantized_model_init(recipe=recipe):
            model = nn.Sequential(*(qs.Linear(a, b, params_dtype=torch.bfloat16) for a, b in ((96, 150), (150, 67))))
        for module in [*model, model]:
            fully_shard(module, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
        optimizer = Lion(model.named_parameters(), **SETTINGS, exp_avg_dtype=dtype)
        for step in () if loads else range(steps.start):
            set_gradients(model, step)
            optimizer.step()
        (qs.checkpoints.load if loads else qs.checkpoints.save)(f"{folder}/{number}", model, optimizer)
        before = bits(model, optimizer)
        for step in steps:
            set_gradients(model, step)
            optimizer.step()
        found.append((before, bits(model, optimizer)))
    return found


@pytest.mark.parametrize(("saves", "loads"), [(3, 1), (1, 3)])
def test_the_same_bits_after_a_load_on_other_ranks(saves: int, loads: int, tmp_path: Path) -> None:
    saved = run_ranks(saves, trained, str(tmp_path), range(2, 4), False)
    loaded = run_ranks(loads, trained, str(tmp_path), range(2, 4), True)
    assert all(ran == saved[0] for ran in [*saved, *loaded])
    assert all(before != after for before, after in saved[0])


def test_the_same_bits_on_one_rank_and_on_three(tmp_path: Path) -> None:
    [alone] = run_ranks(1, trained, str(tmp_path / "1"), range(2, 4), False)
    assert all(ran == alone for ran in run_ranks(3, trained, str(tmp_path / "3"), range(2, 4), False))
