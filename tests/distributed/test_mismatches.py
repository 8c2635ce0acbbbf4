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
