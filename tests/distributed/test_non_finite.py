"""New values of quantized weights that are infinite or NaN, which codes and scales could hide: raised on every rank,
by name, with how many and where, and nothing is written.

Each test names its rank count.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import quantshard as qs
from quantshard import checkpoints
from quantshard.errors import QuantshardError
from quantshard.optimizers import FusedAdam
from quantshard.tensor import components
from quantshard.tensor.storage import QuantizedStorage
from tests.distributed.models import Case, bits, build, set_gradients
from tests.distributed.pool import run_ranks
from tests.distributed.test_robustness import whole_values

pytestmark = pytest.mark.distributed

SHAPES = ((96, 300), (300, 96))
INF, NAN = float("inf"), float("nan")


def message_of(function: Callable[[], object]) -> str:
    try:
        function()
    except QuantshardError as error:
        return str(error)
    return "nothing was raised"


def local_values(model: nn.Module) -> list[tuple[Tensor, Tensor]]:
    pairs = []
    for layer in model:
        local = components.quantized_local(layer.weight)
        assert local is not None
        pairs.append((layer.weight, torch.ones(local.shape)))
    return pairs


def origin(pair: tuple[Tensor, Tensor]) -> int:
    storage: QuantizedStorage = components.storage_of(pair[0])
    return storage.shard.origin[0]


def of_one_rank(case: Case) -> list[Any]:
    """What is said where the last rank alone has such values, and whether any bit changed."""
    model = build(case)
    before = bits(model)
    pairs, last = local_values(model), torch.distributed.get_rank() == case.ranks - 1
    if last:
        pairs[1][1][-1, 7], pairs[1][1][-1, 9] = INF, NAN
    found = [message_of(lambda: qs.requantize_(pairs))]
    whole = whole_values(model)
    if last:
        whole["1.weight"][50, 3] = -INF  # of a part that it does not hold: nobody else is told of it, nor reads it
        whole["1.weight"][-1, 3] = -INF
    found.append(message_of(lambda: checkpoints.load_high_precision(model, whole)))

    def born(weight: Tensor) -> None:
        weight.fill_(1.0)
        weight[2, 5] = NAN

    with qs.quantized_model_init(recipe="mxfp8"):
        found.append(message_of(lambda: qs.Linear(64, 64, init_method=born, device="cpu")))
    return [*found, bits(model) == before, origin(pairs[1])]


@pytest.mark.parametrize("recipe", ["mxfp8", "delayed", "nvfp4"])
def test_values_that_are_not_finite_are_raised_on_every_rank(recipe: str) -> None:
    """3 ranks, of which one has them."""
    ranks = run_ranks(3, of_one_rank, Case(recipe, (3,), shapes=SHAPES))
    for rank, (written, loaded, born, kept, first) in enumerate(ranks):
        assert kept, "nothing may be written"
        assert "QuantizedTensor" in written and "requantize_" in written
        where = "2 of 9600 values are infinite or NaN, the first, inf, at [95, 7]" if rank == 2 else "other ranks"
        assert where in written, (rank, written)
        assert "1.weight: " in loaded and "the first, -inf, at [95, 3]" in loaded and "rank 2" in loaded, loaded
        assert "Linear.weight: 1 of 4096 values" in born and "the first, nan, at [2, 5]" in born
        assert first == 32 * rank


def large_gradients(case: Case) -> list[tuple[str, str]]:
    """What optimizers say of gradients where the last rank has a large one, and where the first has a NaN beside."""
    found = []
    for capturable in (False, True):
        model = build(case)
        optimizer = FusedAdam(model.named_parameters(), lr=1e-3, capturable=capturable)
        said = []
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the step that is skipped
            for bad in (False, True):
                set_gradients(model, 0)
                grads = [param.grad for param in model.parameters()]
                if torch.distributed.get_rank() == case.ranks - 1:
                    grads[2].to_local()[-1, 7] = 2e19
                if bad and torch.distributed.get_rank() == 0:
                    grads[0].to_local()[0, 0] = NAN
                optimizer.step()
                said.append(optimizer.large_gradient)
        assert optimizer.skipped_steps == 2
        found.append((said[0], said[1]))
    return found


def test_large_gradients_are_told_from_those_that_are_not_finite_on_every_rank() -> None:
    """1 and 3 ranks; what ranks then do together depends on it."""
    for ranks in (1, 3):
        for found in run_ranks(ranks, large_gradients, Case("mxfp8", (ranks,), shapes=SHAPES)):
            assert found == [("1.weight", "")] * 2
