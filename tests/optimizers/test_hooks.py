"""Hooks registered on an optimizer run as those of `torch.optim` do: in this order, with these arguments, once each."""

import copy

import pytest
import torch
from torch import nn

from quantshard.errors import CheckpointError
from quantshard.optimizers import FusedAdam, MasterWeights

OPTIMIZERS = {
    "torch": lambda params: torch.optim.AdamW(params, lr=0.1),
    "FusedAdam": lambda params: FusedAdam(params, lr=0.1),
    "FusedAdam, capturable": lambda params: FusedAdam(params, lr=0.1, capturable=True),
    "MasterWeights": lambda params: MasterWeights(torch.optim.AdamW, params, lr=0.1),
}
every_optimizer = pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)


def stepped(make, start=0.5):
    """An optimizer of one parameter, after one step."""
    param = nn.Parameter(torch.full((3,), start, dtype=torch.bfloat16))
    optimizer = make([param])
    param.grad = torch.ones(3, dtype=torch.bfloat16)
    optimizer.step()
    return optimizer


@every_optimizer
def test_every_hook_runs_once_and_in_order(make):
    optimizer = stepped(make)
    state = copy.deepcopy(optimizer.state_dict())
    calls = []
    for name in ("load_state_dict_pre", "load_state_dict_post", "state_dict_pre", "state_dict_post", "step_pre"):
        register = getattr(optimizer, f"register_{name}_hook")
        register(lambda own, *args, name=name: calls.append((name, own is optimizer)))
        register(
            lambda own, *args, name=name: calls.append((name, len(args))), prepend=True
        ) if "dict" in name else None
    optimizer.load_state_dict(state)
    assert calls == [
        ("load_state_dict_pre", 1), ("load_state_dict_pre", True),
        ("load_state_dict_post", 0), ("load_state_dict_post", True),
    ]  # fmt: skip
    calls.clear()
    optimizer.state_dict()
    optimizer.step()
    assert calls == [
        ("state_dict_pre", 0), ("state_dict_pre", True), ("state_dict_post", 1), ("state_dict_post", True),
        ("step_pre", True),
    ]  # fmt: skip


@every_optimizer
def test_what_a_hook_returns_is_loaded(make):
    """It replaces the state dict, or changes the copy that it got: the one that was given stays."""
    given = stepped(make).state_dict()
    optimizer = stepped(make)

    def add(own, state):
        state["seen"] = 1

    def replace(own, state):
        assert state.pop("seen") == 1
        return {**state, "param_groups": [{**group, "lr": 0.25} for group in state["param_groups"]]}

    optimizer.register_load_state_dict_pre_hook(add)
    optimizer.register_load_state_dict_pre_hook(replace)
    optimizer.load_state_dict(state_dict=given)
    assert optimizer.param_groups[0]["lr"] == 0.25
    assert "seen" not in given and given["param_groups"][0]["lr"] == pytest.approx(0.1)


@every_optimizer
def test_a_hook_after_a_load_sees_what_was_loaded(make):
    optimizer = stepped(make)
    saved, seen = copy.deepcopy(stepped(make, start=4.0).state_dict()), []
    optimizer.register_load_state_dict_post_hook(lambda own: seen.append((own.state_dict(), torch.is_grad_enabled())))
    optimizer.load_state_dict(saved)
    ((found, differentiable),) = seen
    assert differentiable
    assert all(torch.equal(value, found["state"][0][key]) for key, value in saved["state"][0].items())


@pytest.mark.parametrize("make", list(OPTIMIZERS.values())[1:], ids=list(OPTIMIZERS)[1:])
def test_no_hook_runs_after_a_load_that_is_refused(make):
    optimizer = stepped(make)
    calls = []
    optimizer.register_load_state_dict_post_hook(calls.append)
    with pytest.raises(CheckpointError):
        optimizer.load_state_dict({**optimizer.state_dict(), "state": {}})
    assert not calls


@every_optimizer
def test_a_hook_sees_and_may_replace_the_state_dict_that_is_returned(make):
    optimizer = stepped(make)
    seen = []
    optimizer.register_state_dict_post_hook(lambda own, state: seen.append(state["param_groups"][0]["lr"]))
    optimizer.register_state_dict_post_hook(lambda own, state: {"state": state["state"], "param_groups": [{}]})
    assert optimizer.state_dict()["param_groups"] == [{}]
    assert isinstance(seen[0], float)
