"""Misuse and bad luck: each is refused in words, on every rank, instead of training on with wrong weights.

Each test names its rank count.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import quantshard as qs
from quantshard.errors import QuantshardError
from quantshard.optimizers import FusedAdam
from quantshard.tensor import components
from tests.covering import exhaustive
from tests.distributed.models import RECIPES, Case, bits, build, mesh_of, optimizer_of, train
from tests.distributed.pool import run_ranks

pytestmark = pytest.mark.distributed


def message_of(function: Callable[[], Any]) -> str:
    try:
        function()
    except QuantshardError as error:
        return str(error)
    return "nothing was raised"


def ones(case: Case) -> torch.Tensor:
    return torch.ones(2, case.shapes[0][0], dtype=torch.bfloat16)


def whole_values(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: torch.full(param.shape, 0.5) for name, param in model.named_parameters()}


def load_after_evaluation(case: Case) -> dict[str, str]:
    model = build(case)
    model.eval()
    with torch.no_grad(), qs.autocast(recipe=RECIPES[case.recipe]):
        model(ones(case))  # FSDP2 leaves the outermost module's weights gathered
    qs.checkpoints.load_high_precision(model, whole_values(model))
    return bits(model)


@pytest.mark.parametrize("recipe", ["delayed", "block", "nvfp4"])
def test_high_precision_values_reach_the_shards_after_an_evaluation(recipe: str) -> None:
    """1 and 3 ranks: what is loaded is not lost in gathered copies."""
    [alone] = run_ranks(1, load_after_evaluation, Case(recipe, None))
    for found in run_ranks(3, load_after_evaluation, Case(recipe, (3,))):
        assert found == alone


def write_while_gathered(case: Case) -> list[str]:
    model = build(case)
    model[0].unshard()
    weight = model[0].weight
    return [
        message_of(model[0].reset_parameters),
        message_of(lambda: qs.requantize_([(weight, torch.zeros(weight.shape))])),
        message_of(lambda: weight.quantize_(torch.zeros(weight.shape))),
    ]


def call_a_shard(case: Case) -> list[str]:
    found = []
    for enabled in (True, False):
        with qs.quantized_model_init(enabled, RECIPES[case.recipe]):
            model = nn.Sequential(qs.Linear(96, 96, params_dtype=torch.bfloat16, device="cpu"))
        fully_shard(model, mesh=mesh_of(case))
        found.append(message_of(lambda model=model: model[0](torch.ones(2, 96, dtype=torch.bfloat16))))
    return found


def different_modules(case: Case) -> list[str]:
    torch.manual_seed(1)
    with qs.quantized_model_init(recipe=RECIPES[case.recipe]):
        experts = [qs.Linear(96, 96, device="cpu") for _ in range(3)]
    used = experts[: 1 + dist.get_rank()]  # other modules, and another number of them

    def forward() -> None:
        with qs.autocast(recipe=RECIPES[case.recipe]):
            for expert in used:
                expert(torch.ones(2, 96))

    return [message_of(forward)]


class Unreadable(dict):
    """As a mapping of the user's over files that are not there."""

    def __getitem__(self, key: str) -> Any:
        raise ConnectionError("no route to host")


def one_bad_state_dict(case: Case) -> list[str]:
    """On one rank something else each time; that it is said on all of them is what `load_high_precision` promises."""
    model, found = build(case), []
    values = whole_values(model)
    weight = values["0.weight"]
    bad: list[Any] = [
        {key: value for key, value in values.items() if key != "0.weight"},
        values | {"0.weight": weight.numpy()},
        values | {"0.weight": weight.to("meta")},
        Unreadable(values),
        None,
    ]
    before = bits(model)
    for wrong in bad:
        state = wrong if dist.get_rank() == 1 else values
        found.append(message_of(lambda state=state: qs.checkpoints.load_high_precision(model, state)))
    assert bits(model) == before
    return found


def one_bad_argument(case: Case) -> list[str]:
    """On one rank a value of another type; the others do not wait."""
    model, bad = build(case), dist.get_rank() == 1
    path = "/nonexistent/of-no-use"
    return [
        message_of(lambda: qs.checkpoints.save(path, model, None, [3] if bad else {})),  # type: ignore[arg-type]
        message_of(lambda: qs.checkpoints.high_precision_state_dict(model, {} if bad else None)),  # type: ignore[arg-type]
    ]


def change_resharding(case: Case) -> list[str]:
    model = build(case)
    train(model, optimizer_of(model, case), case, 0, 1)
    model[0].set_reshard_after_forward(False)
    return [message_of(lambda: model(ones(case)))]


REFUSED = {
    write_while_gathered: (2, "current", "call reshard()"),
    call_a_shard: (2, "block", "still sharded"),
    different_modules: (3, "delayed", "different modules"),
    one_bad_state_dict: (3, "mxfp8", "on rank 1: "),
    one_bad_argument: (2, "current", "on rank 1: "),
    change_resharding: (2, "mxfp8 two copies", "before the first forward"),
}


@pytest.mark.parametrize("function", REFUSED)
def test_refused_on_every_rank(function: Any) -> None:
    """2 and 3 ranks."""
    ranks, recipe, way_out = REFUSED[function]
    for messages in run_ranks(ranks, function, Case(recipe, (ranks,))):
        for message in messages:
            assert way_out in message, messages


def infinite_loss(case: Case) -> tuple[bool, int]:
    model = build(case)
    optimizer = optimizer_of(model, case)
    train(model, optimizer, case, 0, 1)
    before = {k: v for k, v in bits(model, optimizer).items() if not k.endswith(("amax_history", "draws"))}
    with qs.autocast(recipe=RECIPES[case.recipe]):
        out = model(ones(case)).float()
    (out.sum() * (float("inf") if dist.get_rank() == 0 else 1.0)).backward()
    optimizer.step()
    after = bits(model, optimizer)
    return all(after[k] == v for k, v in before.items()), optimizer.skipped_steps


@pytest.mark.parametrize("recipe", exhaustive([(name,) for name in RECIPES], [("delayed",), ("block",), ("nvfp4",)]))
def test_an_infinite_loss_on_one_rank_changes_nothing(recipe: str) -> None:
    """3 ranks: saturating codes do not hide an infinite gradient from the optimizer."""
    assert run_ranks(3, infinite_loss, Case(recipe, (3,))) == [(True, 1)] * 3


def stale_masters(case: Case) -> tuple[str, bool]:
    model = build(case)
    optimizer = optimizer_of(model, case)
    qs.checkpoints.load_high_precision(model, whole_values(model))
    for param in model.parameters():
        param.grad = torch.zeros_like(param)
    found = message_of(optimizer.step)
    optimizer.reseed_masters()
    before = bits(model)
    for group in optimizer.param_groups:
        group["weight_decay"] = 0.0
    optimizer.step()
    return found, bits(model) == before


def test_masters_do_not_overwrite_what_was_loaded() -> None:
    """2 ranks: the step raises until the masters are seeded anew."""
    for found, kept in run_ranks(2, stale_masters, Case("block", (2,))):
        assert "reseed_masters" in found
        assert kept


def small(**options: Any) -> nn.Module:
    with qs.quantized_model_init(recipe="mxfp8"):
        return nn.Sequential(qs.Linear(64, 64, device="cpu"), qs.Linear(64, 64, device="cpu", **options))


def test_an_optimizer_state_of_parameters_in_another_order() -> None:
    """No ranks: refused by name."""
    model = small()
    names = list(model.named_parameters())
    saved = FusedAdam(names).state_dict()
    assert "'1.bias'" in message_of(lambda: FusedAdam(names[::-1]).load_state_dict(saved))


def test_frozen_parameters_have_no_state_until_they_are_unfrozen() -> None:
    """No ranks."""
    model = small()
    model[0].weight.requires_grad_(False)
    optimizer = FusedAdam(model.named_parameters())
    assert model[0].weight not in optimizer.state
    model[0].weight.requires_grad_(True)
    model(torch.ones(2, 64)).sum().backward()
    assert "initialize_state" in message_of(optimizer.step)
    optimizer.initialize_state(model[0].weight)
    optimizer.step()


def test_a_second_derivative_is_refused() -> None:
    """No ranks: a gradient penalty would be lost in silence."""
    model = small()
    x = torch.ones(2, 64, requires_grad=True)
    with qs.autocast(recipe="mxfp8"):
        loss = model(x).sum()
    assert "create_graph=True" in message_of(lambda: torch.autograd.grad(loss, x, create_graph=True))


def test_a_step_between_forward_and_backward_is_noticed() -> None:
    """No ranks: as for plain parameters."""
    model = small()
    optimizer = FusedAdam(model.parameters())
    with qs.autocast(recipe="mxfp8"):
        loss = model(torch.ones(2, 64)).sum()
        model(torch.ones(2, 64)).sum().backward()
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_values_of_another_shape_are_not_broadcast() -> None:
    """No ranks."""
    weight = components.quantized_local(small()[0].weight)
    assert weight is not None
    assert "are (1, 64), not" in message_of(lambda: qs.requantize_([(weight, torch.ones(1, 64))]))
