"""Lion and the presets of FusedAdam have the same bits on any number of ranks, saved and loaded on others.

A preset goes on where its options are spelled out, and the reverse.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.optim import Optimizer

import quantshard as qs
from quantshard.optimizers import FusedAdam, Lion
from quantshard.state_storage import PRESETS
from tests.distributed.models import bits, set_gradients
from tests.distributed.pool import run_ranks
from tests.optimizers.test_lion import SETTINGS

pytestmark = pytest.mark.distributed

adam: Callable[..., Optimizer] = partial(FusedAdam, lr=1e-2, weight_decay=0.1)
CASES: list[tuple[str, Callable[..., Optimizer], Callable[..., Optimizer]]] = [
    *((recipe, *[partial(Lion, **SETTINGS, exp_avg_dtype=dtype)] * 2)
      for recipe, dtype in (("block", torch.float32), ("mxfp8", torch.uint8))),
    *((recipe, partial(adam, preset=preset), partial(adam, **PRESETS[preset].arguments()))
      for recipe, preset in zip(("mxfp8", "block"), PRESETS, strict=True)),
]  # fmt: skip
"""Recipe, the optimizer of the run that is saved, and that of the run that loads."""


def trained(folder: str, loads: bool) -> list[tuple[dict[str, str], dict[str, str]]]:
    """The bits of each case after two steps, which are saved or loaded, and after four."""
    found = []
    for number, (recipe, *optimizers) in enumerate(CASES):
        torch.manual_seed(number + 10 * loads)
        with qs.quantized_model_init(recipe=recipe):
            model = nn.Sequential(*(qs.Linear(a, b, params_dtype=torch.bfloat16) for a, b in ((96, 150), (150, 67))))
        for module in [*model, model]:
            fully_shard(module, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
        optimizer: Any = optimizers[loads](model.named_parameters())
        for step in () if loads else range(2):
            set_gradients(model, step)
            optimizer.step()
        (qs.checkpoints.load if loads else qs.checkpoints.save)(f"{folder}/{number}", model, optimizer)
        before = bits(model, optimizer)
        for step in range(2, 4):
            set_gradients(model, step)
            optimizer.step()
        found.append((before, bits(model, optimizer)))
    return found


@pytest.mark.parametrize(("saves", "loads"), [(3, 1), pytest.param(1, 3, marks=pytest.mark.exhaustive)])
def test_the_same_bits_after_a_load_on_other_ranks(saves: int, loads: int, tmp_path: Path) -> None:
    saved, loaded = run_ranks(saves, trained, str(tmp_path), False), run_ranks(loads, trained, str(tmp_path), True)
    assert all(ran == saved[0] for ran in [*saved, *loaded])
    assert all(before != after for before, after in saved[0])
