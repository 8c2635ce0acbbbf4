"""Stock optimizers make their states in the first step: a new one is loaded all the same, and nothing else changes.

Sharded ones are in `tests/distributed/test_restored_optimizers`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import StepLR

import quantshard as qs
from quantshard import checkpoints
from quantshard.errors import CheckpointError, ConfigurationError
from tests.checkpoints.stock import KINDS, Rows, make
from tests.tensor.test_tensor import differing

PLAIN_ONLY: dict[str, Callable[[Any], Optimizer]] = {
    "Adafactor": lambda params: torch.optim.Adafactor(params, lr=1e-2),
    "AdamW fused": lambda params: torch.optim.AdamW(params, lr=1e-2, fused=True),
}
"""They do not move quantized weights."""


def build(recipe: str = "nvfp4", seed: int = 3) -> nn.Sequential:
    torch.manual_seed(seed)
    with qs.quantized_model_init(recipe=recipe):
        return nn.Sequential(qs.Linear(32, 48, params_dtype=torch.bfloat16), nn.Linear(48, 8, dtype=torch.bfloat16))


def stepped(model: nn.Module, optimizer: Optimizer, *steps: int) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        for param in model.parameters():
            param.grad = torch.randn(param.shape, generator=generator).to(param.dtype)
        model[1].bias.grad = None  # it is never trained, and has no state
        optimizer.step()


def held(model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    state = optimizer.state_dict()
    states = {f"{n}.{k}": torch.as_tensor(v).clone() for n, own in state["state"].items() for k, v in own.items()}
    groups = torch.tensor([*repr(state["param_groups"]).encode()])
    return {key: value.clone() for key, value in model.state_dict().items()} | states | {"groups": groups}


@pytest.mark.parametrize("kind", [*KINDS, *PLAIN_ONLY])
def test_a_new_process_goes_on(kind: str, tmp_path: Path) -> None:
    construct, recipe = {**KINDS, **PLAIN_ONLY}[kind], "bf16" if kind in PLAIN_ONLY else "nvfp4"
    model, other = build(recipe), build(recipe, seed=4)
    optimizer, resumed = construct(model.parameters()), construct(other.parameters())
    stepped(model, optimizer, 0, 1)
    checkpoints.save(tmp_path / "c", model, optimizer)
    checkpoints.load(tmp_path / "c", other, resumed)
    assert not differing(held(model, optimizer), held(other, resumed))
    stepped(model, optimizer, 2, 3)
    stepped(other, resumed, 2, 3)
    assert not differing(held(model, optimizer), held(other, resumed))


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_goes_back(kind: str, tmp_path: Path) -> None:
    """To where it had no states yet, with states that a step made since."""
    model = build()
    optimizer = make(kind, model)
    checkpoints.save(tmp_path / "c", model, optimizer)
    before = held(model, optimizer)
    stepped(model, optimizer, 0, 1)
    checkpoints.load(tmp_path / "c", model, optimizer)
    assert not differing(before, held(model, optimizer))


def test_states_of_no_parameter_are_loaded(tmp_path: Path) -> None:
    """Under a name of their own, where both sides have them."""
    found = []
    for seen in (7, 0):
        model = nn.Linear(3, 3)
        optimizer = torch.optim.SGD(model.parameters())
        optimizer.state["all"] = {"seen": seen, "mean": torch.full((2,), float(seen))}  # type: ignore[index]
        if seen:
            checkpoints.save(tmp_path / "c", model, optimizer)
        else:
            checkpoints.load(tmp_path / "c", model, optimizer)
            found = [optimizer.state["all"]["seen"], *optimizer.state["all"]["mean"].tolist()]  # type: ignore[index]
    assert found == [7, 7.0, 7.0]


class Noisy(Rows):
    """Draws random numbers, and remembers what it saw."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.seen: list[int] = []

    def step(self, closure: None = None) -> None:
        self.seen.append(int(torch.randint(9, (1,))))
        super().step()


def test_nothing_changes_when_the_states_are_made(tmp_path: Path) -> None:
    """And the load is refused in the end: weights, gradients, draws, generators, rates, counts and hooks."""
    model = build()
    optimizer = Noisy(model.named_parameters())
    stepped(model, optimizer, 0)
    checkpoints.save(tmp_path / "c", model, optimizer)
    model = build(seed=4)
    with torch.no_grad():
        other = nn.Sequential(model[0], nn.Linear(48, 9, dtype=torch.bfloat16))
    optimizer = Noisy(other.named_parameters())
    schedule, calls = StepLR(optimizer, 1), []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    for param in other.parameters():
        param.grad = torch.ones_like(param)
    before, drawn, scheduled = held(other, optimizer), torch.get_rng_state(), dict(schedule.state_dict())
    with pytest.raises(CheckpointError, match=r"of another model: model.1.bias has shape"):
        checkpoints.load(tmp_path / "c", other, optimizer)
    assert not differing(before, held(other, optimizer))
    assert torch.equal(drawn, torch.get_rng_state()) and schedule.state_dict() == scheduled
    assert all((param.grad == 1).all() for param in other.parameters())
    assert not optimizer.state and not calls and not optimizer.seen
    assert not getattr(optimizer, "_opt_called", False)


class Wrapping(Rows):
    """Steps another optimizer too, over the parameters themselves."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.inner = torch.optim.SGD(self.param_groups[0]["params"], lr=1.0)

    def step(self, closure: None = None) -> None:
        self.inner.step()
        super().step()


def test_an_optimizer_within_another_does_not_step(tmp_path: Path) -> None:
    """What cannot be made is named, and what the checkpoint tells of it is taken."""
    model = nn.Linear(8, 8)
    optimizer = Wrapping(model.parameters())
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    checkpoints.save(tmp_path / "c", model, optimizer)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with pytest.raises(CheckpointError, match=r"1 tensors that this one lacks \(first: \['optimizer.state.0.squares"):
        checkpoints.load(tmp_path / "c", model, Wrapping(model.parameters()))
    assert not differing(before, model.state_dict())


def test_a_step_that_needs_a_closure_is_refused_at_the_save(tmp_path: Path) -> None:
    model = nn.Linear(3, 3)
    with pytest.raises(ConfigurationError, match=r"LBFGS: checkpoints.save does not take .* needs a closure"):
        checkpoints.save(tmp_path / "c", model, torch.optim.LBFGS(model.parameters()))
    assert not (tmp_path / "c").exists()


def test_the_states_of_another_optimizer_are_refused(tmp_path: Path) -> None:
    """Its options have all those of the new one; the states tell."""
    model = nn.Linear(3, 3)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    checkpoints.save(tmp_path / "c", model, optimizer)
    with pytest.raises(CheckpointError, match=r"of another optimizer: it lacks 2 of this one's tensors .*exp_inf"):
        checkpoints.load(tmp_path / "c", model, torch.optim.Adamax(model.parameters()))
