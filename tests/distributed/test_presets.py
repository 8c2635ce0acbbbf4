"""Presets of FusedAdam over ranks: the bits of their options spelled out, on any mesh, resumed on others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import quantshard as qs
from quantshard.optimizers import FusedAdam
from quantshard.state_storage import PRESETS
from tests.distributed.models import bits, set_gradients
from tests.distributed.pool import run_ranks

pytestmark = pytest.mark.distributed

CASES = [(recipe, preset) for recipe in ("block", "mxfp8") for preset in PRESETS]

Bits = tuple[dict[str, str], dict[str, str]]


def built(recipe: str, seed: int, **options: Any) -> tuple[nn.Module, FusedAdam]:
    torch.manual_seed(seed)
    with qs.quantized_model_init(recipe=recipe):
        model = nn.Sequential(*(qs.Linear(a, b, params_dtype=torch.bfloat16) for a, b in ((96, 150), (150, 67))))
    for module in [*model, model]:
        fully_shard(module, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return model, FusedAdam(model.named_parameters(), lr=1e-2, weight_decay=0.1, **options)


def trained(folder: str, spelled: bool, loads: bool) -> list[Bits]:
    """The bits after two steps, which are saved or loaded, and after four."""
    found = []
    for number, (recipe, preset) in enumerate(CASES):
        options = PRESETS[preset].arguments() if spelled else {"preset": preset}
        model, optimizer = built(recipe, number + 10 * loads, **options)
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


@pytest.mark.parametrize(("saves", "loads"), [(3, 1), (1, 3)])
def test_a_checkpoint_of_a_preset_goes_on_on_other_ranks_spelled_out(saves: int, loads: int, tmp_path: Path) -> None:
    """And the reverse; the bits are those of the run that never stopped."""
    saved = run_ranks(saves, trained, str(tmp_path), loads == 3, False)
    loaded = run_ranks(loads, trained, str(tmp_path), saves == 3, True)
    assert all(ran == saved[0] for ran in [*saved, *loaded])
    assert all(before != after for before, after in saved[0])
