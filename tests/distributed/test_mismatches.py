"""Ranks that used different modules under delayed scaling learn of it before a collective call keeps one of them.

2 ranks. On a GPU the forward's mismatch is told later, and FSDP2 with CPU offload waits at the end of backward for its
collective calls on the host. Here gloo's wait on the host as soon as they are made, and a flag stands for one that the
GPU has yet to send. What this cannot show: streams, and NCCL's own waiting.
"""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.distributed.fsdp import fully_shard

import quantshard as qs
from quantshard.collectives import flags
from quantshard.collectives.delayed_scaling import MISMATCHES
from quantshard.errors import RankMismatchError
from tests.distributed.models import RECIPES
from tests.distributed.pool import run_ranks
from tests.distributed.wraps import OFFLOAD, build, inputs

pytestmark = pytest.mark.distributed


class LateFlag(flags.PendingFlag):
    """Of a device that runs behind the host."""

    def __init__(self, flag: Tensor) -> None:
        super().__init__(flag)
        self.is_here = False


def step_in_which_ranks_differ() -> list[str]:
    """Where the error comes: in the forward or in backward."""
    model = build("delayed", widths=(40, 70, 70, 70))
    fully_shard(model, offload_policy=OFFLOAD)
    model.order = (0, 1, 2) if torch.distributed.get_rank() else (0, 1)
    found, y = [], None
    with mock.patch.object(flags, "PendingFlag", LateFlag):
        for action in ("forward", "backward"):
            try:
                if action == "forward":
                    with qs.autocast(recipe=RECIPES["delayed"]):
                        y = model(inputs(0))
                elif y is not None:
                    y.float().sum().backward()
            except RankMismatchError:
                found.append(action)
        MISMATCHES.settle()
    return found


def test_ranks_that_used_different_modules_do_not_wait_under_cpu_offload() -> None:
    assert run_ranks(2, step_in_which_ranks_differ) == [["backward"], ["backward"]]


def step_after_texts_of_different_lengths() -> list[float]:
    """The last input amaxes of replicas in training mode."""
    model, rank = build("delayed", torch.float32, widths=(40, 70, 70)), torch.distributed.get_rank()
    for _ in range(rank):
        with torch.no_grad(), qs.autocast(recipe=RECIPES["delayed"]):
            model(100 * inputs(rank).float())
    with qs.autocast(recipe=RECIPES["delayed"]):
        with torch.no_grad():
            for _ in range(rank):
                model(100 * inputs(rank).float())
        y = model(inputs(rank).float())
    y.sum().backward()
    return [model[0].input_amax_history[-1].item(), inputs(rank).float().abs().max().item()]


def test_ranks_may_call_replicas_without_gradients_as_often_as_they_like() -> None:
    found = run_ranks(3, step_after_texts_of_different_lengths)
    assert [recorded for recorded, _ in found] == 3 * [max(amax for _, amax in found)]
