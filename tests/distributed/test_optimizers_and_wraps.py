"""Optimizer x recipe x wrap: each trains to the bits of the same optimizer over the same model, unwrapped.

On 1, 2, 3 and 4 ranks; a table is printed. `RECIPE_OF` says which recipe a pair of optimizer and wrap is tried with:
every pair (optimizer, recipe), (optimizer, wrap) and (wrap, recipe) is covered by `make test-all`. Compared are
weights, scales, random keys and draws, histories, masters and moments, after two steps.

Where a wrap does not change what gradients are, they are fixed: every rank runs forward and backward over the same
batch, so that FSDP2 gathers and histories grow, and then gets its part of the same global gradients, so that sums over
ranks play no part. One process trains with these once. In the other wraps gradients are those of backward over
different batches, and one model in each rank, unwrapped, whose gradients are averaged by hand, is what they equal.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch.distributed._composable import checkpoint
from torch.optim import SGD, Adam, AdamW, Optimizer

import quantshard as qs
from quantshard.optimizers import FusedAdam, Lion, MasterWeights, Muon
from tests.covering import in_turns
from tests.distributed.models import RECIPES, bits, set_gradients
from tests.distributed.pool import run_ranks
from tests.distributed.wraps import (
    BF16_COMPUTE,
    OFFLOAD,
    STEPS,
    Found,
    Named,
    Net,
    build as build_net,
    data_parallel,
    fp32_by_hand,
    inputs,
    shard,
    train,
)

pytestmark = pytest.mark.distributed

WIDTHS = (40, 70, 4)
"""Two layers of each model: blocks are cut, and the third rank of three holds nothing of the last."""


def build(recipe: str, dtype: torch.dtype, seed: int = 7) -> Net:
    return build_net(recipe, dtype, seed, WIDTHS)


# Optimizers

DECAY = {"lr": 1e-2, "weight_decay": 0.1}
MOMENTUM = {"lr": 0.1, "momentum": 0.9}


def fused(**options: Any) -> Callable[[Named], Optimizer]:
    return partial(FusedAdam, **DECAY, **options)


def moments(dtype: torch.dtype) -> Callable[[Named], Optimizer]:
    return fused(exp_avg_dtype=dtype, exp_avg_sq_dtype=dtype)


STOCK: dict[str, Callable[[Named], Optimizer]] = {
    "AdamW": partial(AdamW, **DECAY, foreach=False),
    "AdamW, foreach": partial(AdamW, **DECAY, foreach=True),
    "Adam": partial(Adam, **DECAY),
    "SGD, momentum": partial(SGD, **MOMENTUM),
}
"""Over float32 models: in bfloat16 PyTorch's kernels for CPUs round the last elements of a tensor otherwise, and which
are last depends on the mesh."""

OPTIMIZERS: dict[str, Callable[[Named], Optimizer]] = {
    "FusedAdam": fused(),
    "fp16 masters": fused(master_weight_dtype=torch.float16),
    "bf16 masters": fused(master_weight_dtype=torch.bfloat16),
    "no masters": fused(master_weights=False),
    "FP8 moments": moments(torch.uint8),
    "bf16 moments": moments(torch.bfloat16),
    "remainders": fused(store_param_remainders=True),
    "capturable": fused(capturable=True),
    "MasterWeights(AdamW)": partial(MasterWeights, AdamW, **DECAY),
    "MasterWeights(SGD)": partial(MasterWeights, SGD, **MOMENTUM),
    **STOCK,
}


def muon(named: Named) -> Optimizer:
    matrices = [pair for pair in named if pair[1].ndim == 2]
    others = {"params": [pair for pair in named if pair[1].ndim != 2], "algorithm": "adamw", "lr": 1e-2}
    return Muon([{"params": matrices}, others], **DECAY, momentum_buffer_dtype=torch.uint8)


OTHER_UPDATES: dict[str, Callable[[Named], Optimizer]] = {
    "Muon": muon,
    "Lion": partial(Lion, **DECAY, exp_avg_dtype=torch.uint8),
}
"""Tried with every wrap, in a test of their own."""

EVERY = {**OPTIMIZERS, **OTHER_UPDATES}

# Wraps


def recomputing(model: Any) -> Any:
    for layer in model:
        checkpoint(layer)
    return shard(model)


@dataclass(frozen=True)
class Wrap:
    """A way to wrap a model. `like`: if its gradients are not fixed, how the model by hand gets them."""

    ranks: int
    wrap: Callable[[Any], Any] = shard
    like: str = ""


WRAPS = {
    "resumed": Wrap(1),
    "x1": Wrap(1),
    "x2": Wrap(2),
    "x3": Wrap(3),
    "2x2": Wrap(4, partial(shard, mesh=(2, 2))),
    "offload": Wrap(2, partial(shard, offload_policy=OFFLOAD)),
    "DDP": Wrap(2, data_parallel, "DDP"),
    "mixed": Wrap(2, partial(shard, mp_policy=BF16_COMPUTE), "fp32"),
    "recompute": Wrap(2, recomputing, "FSDP2"),
}
"""resumed: no wrap; after one step a new model and optimizer load what the first saved. xN: FSDP2 on N ranks.
2x2: HSDP. mixed: float32 weights, computed in bfloat16. recompute: activation checkpointing of every layer."""


RECIPE_OF = {(optimizer, wrap): recipe for optimizer, wrap, recipe in in_turns(OPTIMIZERS, WRAPS, [*RECIPES])}
"""In turns. There are more optimizers and more wraps than recipes, so each of both meets every recipe."""

RECIPE_OF |= {
    (optimizer, wrap): [*RECIPES][(i + j) % len(RECIPES)]
    for (i, optimizer), (j, wrap) in itertools.product(enumerate(OTHER_UPDATES), enumerate(WRAPS))
}


# Training


def dtype_of(optimizer: str) -> torch.dtype:
    return torch.float32 if optimizer in STOCK else torch.bfloat16


def step(model: Net, optimizer: Optimizer, recipe: str, number: int) -> None:
    dtype = next(model.parameters()).dtype
    with qs.autocast(recipe=RECIPES[recipe]):
        out = model(inputs(number, rank=0).to(dtype))
    out.float().square().mean().backward()
    set_gradients(model, number)
    optimizer.step()
    optimizer.zero_grad()


def with_fixed_gradients(model: Net, optimizer: str, recipe: str) -> Found:
    its_optimizer = EVERY[optimizer](list(model.named_parameters()))
    for number in range(STEPS):
        step(model, its_optimizer, recipe, number)
    return bits(model, its_optimizer)


def resumed(optimizer: str, recipe: str) -> Found:
    state: Any = None
    for number in range(STEPS):
        model = build(recipe, dtype_of(optimizer), seed=7 + number)
        its_optimizer = EVERY[optimizer](list(model.named_parameters()))
        if state is not None:
            model.load_state_dict(state[0])
            its_optimizer.load_state_dict(state[1])
        step(model, its_optimizer, recipe, number)
        state = copy.deepcopy((model.state_dict(), its_optimizer.state_dict()))
    return bits(model, its_optimizer)


def alone(pairs: list[tuple[str, str]]) -> dict[tuple[str, str], Found]:
    """(optimizer, recipe) -> the bits that an unwrapped model gets from fixed gradients."""
    return {pair: with_fixed_gradients(build(pair[1], dtype_of(pair[0])), *pair) for pair in pairs}


def want_and_got(optimizer: str, name: str, recipe: str, fixed: Found) -> tuple[Found, Found]:
    wrap, make, dtype = WRAPS[name], EVERY[optimizer], dtype_of(optimizer)
    if name == "resumed":
        return fixed, resumed(optimizer, recipe)
    if not wrap.like:
        return fixed, with_fixed_gradients(wrap.wrap(build(recipe, dtype)), optimizer, recipe)
    if wrap.like == "fp32":
        dtype = torch.float32
        want = fp32_by_hand(recipe, make, WIDTHS)
    else:
        want = train(build(recipe, dtype), recipe, make=make, by_hand=wrap.like, input_dtype=dtype)
    return want, train(wrap.wrap(build(recipe, dtype)), recipe, make=make, input_dtype=dtype)


def compare(name: str, optimizers: list[str], fixed: dict[tuple[str, str], Found]) -> dict[str, str]:
    """What differs, by optimizer; "" if nothing does."""
    found = {}
    for optimizer in optimizers:
        recipe = RECIPE_OF[optimizer, name]
        want, got = want_and_got(optimizer, name, recipe, fixed.get((optimizer, recipe), {}))
        found[optimizer] = ", ".join(key for key in want | got if want.get(key) != got.get(key))
    return found


# The table


def test_every_pair_is_covered() -> None:
    every = [(optimizer, wrap, RECIPE_OF[optimizer, wrap]) for optimizer in OPTIMIZERS for wrap in WRAPS]
    assert len({(optimizer, recipe) for optimizer, _, recipe in every}) == len(OPTIMIZERS) * len(RECIPES)
    assert len({(wrap, recipe) for _, wrap, recipe in every}) == len(WRAPS) * len(RECIPES)


# tests/distributed/test_wraps.py has each wrap, test_plain_optimizers.py each optimizer
@pytest.mark.exhaustive
def test_table(show: Callable[[str], None]) -> None:
    """1, 2, 3 and 4 ranks."""
    every = list(itertools.product(OPTIMIZERS, WRAPS))
    fixed_pairs = {(optimizer, RECIPE_OF[optimizer, name]) for optimizer, name in every if not WRAPS[name].like}
    [fixed] = run_ranks(1, alone, sorted(fixed_pairs))
    differ: dict[tuple[str, str], list[str]] = {}
    for name, wrap in WRAPS.items():
        fixed_here = {} if wrap.like else fixed
        for rank, found in enumerate(run_ranks(wrap.ranks, compare, name, list(OPTIMIZERS), fixed_here)):
            for optimizer, keys in found.items():
                differ.setdefault((optimizer, name), []).extend([f"rank {rank} of {wrap.ranks}: {keys}"] * bool(keys))
    rows = [["", *WRAPS]]
    for optimizer in OPTIMIZERS:
        words = [f"{RECIPE_OF[optimizer, name]} {'DIFFER' if differ[optimizer, name] else 'equal'}" for name in WRAPS]
        rows.append([optimizer, *words])
    show("\n".join("".join(entry.ljust(25) for entry in row).rstrip() for row in rows))
    assert not any(differ.values()), {pair: found for pair, found in differ.items() if found}


@pytest.mark.parametrize(
    "names", [["offload", "2x2"], pytest.param([*WRAPS], marks=pytest.mark.exhaustive)], ids=["some", "all"]
)
def test_other_updates(names: list[str]) -> None:
    """The same of optimizers whose updates are not Adam's."""
    pairs = {(optimizer, RECIPE_OF[optimizer, name]) for optimizer in OTHER_UPDATES for name in names}
    [fixed] = run_ranks(1, alone, sorted(pairs))
    for name in names:
        for found in run_ranks(WRAPS[name].ranks, compare, name, [*OTHER_UPDATES], fixed):
            assert not any(found.values()), f"{name}: {found}"
