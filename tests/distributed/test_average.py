"""An average of the weights (EMA) in a second model, as docs/optimizers.md keeps it, and what is said of other ways on
sharded weights.

Each test names its rank count.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from quantshard.errors import UnsupportedOperationError
from quantshard.tensor import components
from tests.distributed.models import Case, bits, build, optimizer_of, set_gradients
from tests.distributed.pool import run_ranks
from tests.pages import snippets

pytestmark = pytest.mark.distributed
SHAPES = ((96, 150), (150, 67))


def values(param: Tensor) -> Tensor:
    """This rank's, float32."""
    quantized = components.quantized_local(param)
    local: Any = param.to_local() if hasattr(param, "to_local") else param  # type: ignore[operator]
    return (local if quantized is None else quantized.dequantize(dtype=torch.float32)).detach().float().clone()


def averaged(case: Case) -> tuple[dict[str, str], float]:
    """Bits of the average after some steps, and how far it is from one in float32, by the distance from the model."""
    (snippet,) = snippets("docs/optimizers.md#as-a-second-model")
    model = build(case)
    names: dict[str, Any] = {"torch": torch, "model": model, "build": lambda: build(Case(**{**vars(case), "seed": 8}))}
    exec(snippet, names)
    optimizer = optimizer_of(model, case)
    means = [values(param) for param in model.parameters()]
    for step in range(12):
        set_gradients(model, step)
        optimizer.step()
        names["update_average"](0.8)
        means = [mean.lerp(values(param), 0.2) for mean, param in zip(means, model.parameters(), strict=True)]
    near = sum(float((values(a) - m).norm() ** 2) for a, m in zip(names["average"].parameters(), means, strict=True))
    far = sum(float((values(p) - m).norm() ** 2) for p, m in zip(model.parameters(), means, strict=True))
    return bits(names["average"]), (near / far) ** 0.5


@pytest.mark.parametrize("recipe", ["mxfp8", pytest.param("block", marks=pytest.mark.exhaustive)])
def test_the_average_of_the_document(recipe: str) -> None:
    """1 and 3 ranks: the same bits, near the average in float32."""
    wanted: dict[str, str] = {}
    for ranks in (1, 3):
        for found, distance in run_ranks(ranks, averaged, Case(recipe, (ranks,), shapes=SHAPES)):
            wanted = wanted or found
            assert found == wanted and distance < 0.3, distance


def said(case: Case) -> list[str]:
    weight: Any = build(case)[0].weight
    attempts: list[Callable[[], object]] = [
        lambda: weight.detach().clone().lerp_(weight.detach(), 0.1),
    ]
    messages = []
    for attempt in attempts:
        with pytest.raises(UnsupportedOperationError) as caught:
            attempt()
        messages.append(str(caught.value))
    return messages


def test_what_is_refused_says_what_to_do() -> None:
    """2 ranks."""
    for (clone,) in run_ranks(2, said, Case("mxfp8", (2,), shapes=SHAPES)):
        assert clone.endswith("give the optimizer ema_decay (docs/optimizers.md)")


def unsharded(case: Case) -> bool:
    """What the messages advise: each rank has the whole weight's values."""
    model = build(case)
    model[0].unshard()
    whole = model[0].weight.dequantize()
    model[0].reshard()
    first = components.storage_of(model[0].weight).shard.origin[0]
    mine = model[0].weight.to_local().dequantize()
    return torch.equal(whole[first : first + len(mine)], mine) and whole.shape == (150, 96)


def test_the_advice_holds() -> None:
    """2 ranks."""
    assert run_ranks(2, unsharded, Case("mxfp8", (2,), shapes=SHAPES)) == [True, True]
