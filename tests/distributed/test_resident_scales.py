"""What a shard keeps is its own: neither the whole that it was cut from, nor what is gathered of it, share its memory.

Each test names its rank count.
"""

from __future__ import annotations

import gc
from weakref import ref

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

import quantshard as qs
from quantshard.formats import Role
from quantshard.tensor import components
from quantshard.tensor.quantized_tensor import QuantizedTensor
from tests.distributed.models import RECIPES
from tests.distributed.pool import run_ranks

pytestmark = pytest.mark.distributed


def shared_memory(recipe: str) -> list[str]:
    """What of a model's shards is not their own."""
    with qs.quantized_model_init(recipe=RECIPES[recipe], preserve_high_precision_init_val=True):
        model = nn.Sequential(qs.Linear(300, 150, params_dtype=torch.bfloat16, bias=False))
    born = components.storage_of(model[0].weight)
    wholes = {name: ref(part) for name, part in born.components.items()}
    pointers = {part.untyped_storage().data_ptr() for part in born.components.values()}
    before = {name: part.clone() for name, part in born.components.items()}
    fully_shard(model[0])
    fully_shard(model)
    wrong = []
    shard = components.storage_of(model[0].weight)
    for name, part in shard.components.items():
        if part.untyped_storage().data_ptr() in pointers or part.untyped_storage().nbytes() > part.nbytes:
            wrong.append(f"{name} is a view of the whole")
        part.add_(1)
    wrong += [
        f"{name} changed with the shard" for name in before if not torch.equal(before[name], born.components[name])
    ]
    kept = shard.high_precision
    if kept is None or kept.untyped_storage().nbytes() > kept.nbytes:
        wrong.append("the values that were kept are a view of the whole")
    del born
    gc.collect()
    wrong += [f"the whole {name} is still there" for name, whole in wholes.items() if whole() is not None]
    model[0].unshard()
    weight = model[0].weight
    assert isinstance(weight, QuantizedTensor) and weight.quantized_storage.gathered
    gathered = {name: part.clone() for name, part in weight.quantized_storage.components.items()}
    resident = [c for c in shard.spec.format.components if c.role is not Role.CODES and not shard.shard.gathers(c)]
    if not resident:
        wrong.append("no scale is resident, so nothing was tried")
    for component in resident:
        shard.components[component.name].add_(1)  # as the next step's weight does, before the backward of this one
        if not torch.equal(gathered[component.name], weight.quantized_storage.components[component.name]):
            wrong.append(f"the gathered {component.name} changed with the shard's")
    return wrong


@pytest.mark.parametrize("recipe", ["current", "block", "nvfp4"])
def test_resident_scales_are_copies(recipe: str) -> None:
    """3 ranks, whose blocks straddle."""
    assert run_ranks(3, shared_memory, recipe) == [[]] * 3
