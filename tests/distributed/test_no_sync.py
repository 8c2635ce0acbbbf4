"""The host waits for nothing in a training step: on a GPU under PyTorch's guard against synchronization, which does not
see a wait for an event, and with an eye on these.

On a CPU the same steps run without the guard, and what a GPU tells later is told later here too.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

import quantshard as qs
from quantshard.errors import RankMismatchError
from quantshard.optimizers import FusedAdam, Lion, MasterWeights, Muon, clip_grad_norm_, muon_groups
from tests.covering import exhaustive
from tests.distributed.models import RECIPES, bits
from tests.distributed.pool import run_ranks
from tests.distributed.test_recompute import Recomputing
from tests.late_flags import flags_come_late, read_flags

GPU = torch.cuda.is_available()
HIDDEN, TOKENS, WARM, STEPS = 64, 32 if GPU else 4, 2, 3 if GPU else 1
NAMED = [name for name in RECIPES if name != "mxfp8 two copies"] if GPU else ["delayed", "nvfp4"]


@contextmanager
def no_waiting(device: str) -> Iterator[None]:
    if device != "cuda":
        yield
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the mode is a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@dataclass(frozen=True)
class Way:
    """How a step is taken: `quantized`: so are the weights; `micro_batches`: of which gradients are accumulated."""

    shard: bool = False
    micro_batches: int = 1
    recompute: bool = False
    optimizer: str = "FusedAdam"
    quantized: bool = True


WAYS = {
    "plain": Way(),
    "plain weights": Way(quantized=False),
    "accumulated": Way(micro_batches=2),
    "recomputed": Way(recompute=True),
    "MasterWeights": Way(optimizer="MasterWeights"),
    "Lion": Way(optimizer="Lion"),
    "Muon": Way(optimizer="Muon"),
    "sharded": Way(shard=True),
    "sharded, all": Way(shard=True, micro_batches=2, recompute=True),
    "sharded, MasterWeights": Way(shard=True, optimizer="MasterWeights"),
    "sharded, Muon": Way(shard=True, optimizer="Muon"),
}

OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "FusedAdam": lambda model: FusedAdam(list(model.named_parameters()), lr=1e-2),
    "MasterWeights": lambda model: MasterWeights(torch.optim.AdamW, list(model.named_parameters()), lr=1e-2),
    "Lion": lambda model: Lion(list(model.named_parameters()), lr=1e-3),
    "Muon": lambda model: Muon(muon_groups(model, head=[], adamw={"lr": 1e-2}), lr=1e-2),
}


def built(recipe: str, way: Way, device: str) -> nn.Module:
    torch.manual_seed(5)
    with qs.quantized_model_init(way.quantized, recipe=RECIPES[recipe]):
        layers: list[nn.Module] = [
            qs.TransformerLayer(
                HIDDEN, 160, 4, 2, hidden_dropout=0.0, attention_dropout=0.0, normalization="RMSNorm",
                activation="swiglu", params_dtype=torch.bfloat16, device=device, attention_backend="math",
            )
            for _ in range(2 if GPU else 1)
        ]  # fmt: skip
    model = nn.Sequential(
        *[Recomputing(layer, checkpoint, use_reentrant=False) if way.recompute else layer for layer in layers]
    )
    if way.shard:
        mesh = init_device_mesh(device, (dist.get_world_size(),))
        for layer in model:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    return model


def step(model: nn.Module, optimizer: Any, recipe: str, batches: list[Tensor]) -> Tensor:
    """One whole step; the loss stays where it is."""
    losses = []
    for number, x in enumerate(batches):
        if hasattr(model, "set_requires_gradient_sync"):
            model.set_requires_gradient_sync(number == len(batches) - 1)
        with qs.autocast(recipe=RECIPES[recipe]):
            y = model(x)
        loss = y.float().square().mean()
        loss.backward()
        losses.append(loss.detach())
    clip_grad_norm_(model, 0.5)
    with read_flags() as (made, read):
        optimizer.step()
    # PyTorch's optimizers cannot be told by the device; and on a CPU no kernel runs here (`test_late_flags.py`)
    assert not GPU or isinstance(optimizer, MasterWeights) or made.isdisjoint(read)
    optimizer.zero_grad()
    return torch.stack(losses)


def steps(recipe: str, way: Way, device: str) -> list[float]:
    """Losses of steps, of which all but the first do not wait."""
    model = built(recipe, way, device)
    optimizer = OPTIMIZERS[way.optimizer](model)
    batches = [torch.randn(TOKENS, 1, HIDDEN, device=device, dtype=torch.bfloat16) for _ in range(way.micro_batches)]
    losses = [step(model, optimizer, recipe, batches) for _ in range(WARM)]
    with no_waiting(device):
        losses += [step(model, optimizer, recipe, batches) for _ in range(STEPS)]
    found = torch.stack(losses)
    assert found.isfinite().all() and found[-1].mean() < found[0].mean()
    assert bits(model)  # a state dict may wait
    return found.flatten().tolist()


def sharded_steps(recipe: str, ways: list[Way], device: str) -> list[list[float]]:
    with flags_come_late():
        return [steps(recipe, way, device) for way in ways]


ALONE = [name for name in WAYS if not WAYS[name].shard]
CELLS = list(product(NAMED, ALONE))
TURNS = [(NAMED[turn % len(NAMED)], way) for turn, way in enumerate(ALONE)]


@pytest.mark.parametrize(("recipe", "way"), exhaustive(CELLS, CELLS if GPU else TURNS))
def test_steps_without_a_process_group(recipe: str, way: str) -> None:
    """1 process: no step waits after the second."""
    with flags_come_late():
        steps(recipe, WAYS[way], "cuda" if GPU else "cpu")


@pytest.mark.distributed
@pytest.mark.parametrize("recipe", NAMED if GPU else ["delayed", pytest.param("nvfp4", marks=pytest.mark.exhaustive)])
def test_steps_with_a_process_group(recipe: str) -> None:
    """1 rank: the same, in one that reduces amaxes over all its ranks, and under FSDP2."""
    ways = [way for name, way in WAYS.items() if GPU or name in ("sharded, all", "sharded, Muon")]
    run_ranks(1, sharded_steps, recipe, ways, "cuda" if GPU else "cpu")


@pytest.mark.skipif(not GPU, reason="needs a GPU")
def test_the_guard_guards() -> None:
    """1 process."""
    flag = torch.ones((), device="cuda")
    with pytest.raises(RuntimeError), no_waiting("cuda"):
        flag.item()


# Ranks that differ, which learn of it later ------------------------------------------------------------------------


def told_by(function: Callable[[], Any]) -> str:
    try:
        function()
    except RankMismatchError as error:
        return str(error)
    return ""


class Differing:
    """Layers of which each rank uses others in one pass, and all use the first in the next one."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        with qs.quantized_model_init(recipe=RECIPES["delayed"]):
            self.layers = nn.Sequential(*[qs.Linear(96, 96, device="cpu") for _ in range(dist.get_world_size())])
        self.x = torch.ones(2, 96)

    def run(self, count: int, inside: bool = False) -> str:
        """What leaving autocast, or backward, tells after a forward of the first layers."""

        def forward() -> None:
            with qs.autocast(recipe=RECIPES["delayed"]):
                self.y = self.layers[:count](self.x)

        return told_by(forward)

    def backward(self) -> str:
        return told_by(lambda: self.y.sum().backward())

    def histories(self) -> list[float]:
        return [float(value.count_nonzero()) for name, value in self.layers.named_buffers()]


def differing(late: bool) -> dict[str, Any]:
    found: dict[str, Any] = {}
    mine, everyone = 1 + dist.get_rank(), dist.get_world_size()
    for how in ("next flush", "backward", "state dict"):
        training = Differing()
        with flags_come_late() if late else partial(no_waiting, "cpu")():
            first = training.run(mine)
            nothing_recorded = not any(training.histories())
            later = {
                "next flush": lambda training=training: training.run(everyone),
                "backward": training.backward if late else lambda: "",
                "state dict": lambda training=training: told_by(training.layers.state_dict),
            }[how]()
            again = training.run(everyone) + told_by(training.layers.state_dict)
        found[how] = first, nothing_recorded, later, again, all(training.histories()[:1])
    return found


@pytest.mark.distributed
@pytest.mark.skipif(GPU, reason="its ranks find out on a CPU, and a GPU's event is played")
@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_that_differ_are_told_later(ranks: int) -> None:
    """By the next pass's collective, by backward or by a state dict: on all ranks, and nothing is recorded; once."""
    for found in run_ranks(ranks, differing, True):
        for how, (first, nothing_recorded, later, again, recorded) in found.items():
            assert (first, nothing_recorded, again) == ("", True, ""), how
            assert "ranks used different modules" in later, how
            assert recorded, how


@pytest.mark.distributed
@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_that_differ_on_a_cpu_are_told_at_once(ranks: int) -> None:
    """And not a second time."""
    for found in run_ranks(ranks, differing, False):
        for how, (first, nothing_recorded, later, again, recorded) in found.items():
            assert "ranks used different modules" in first, how
            assert (nothing_recorded, later, again, recorded) == (True, "", "", True), how


def differing_backward() -> list[str]:
    """Gradients of other layers on each rank: told by the forward after."""
    training = Differing()
    with flags_come_late():
        found = [training.run(dist.get_world_size())]
        keep = training.layers[: 1 + dist.get_rank()]
        y = training.x
        with qs.autocast(recipe=RECIPES["delayed"]):
            for layer in training.layers:
                y = layer(y) if layer in keep else y + 0 * layer(y).detach()
        found.append(told_by(lambda: y.sum().backward()))
        found.append(training.run(1))
        found.append(training.run(1) + training.backward())
    return found


@pytest.mark.distributed
@pytest.mark.skipif(GPU, reason="its ranks find out on a CPU, and a GPU's event is played")
def test_ranks_that_differ_in_backward_are_told_later() -> None:
    """3 ranks."""
    for first, backward, after, again in run_ranks(3, differing_backward):
        assert (first, backward, again) == ("", "", "") and "or a backward" in after
