"""CUDA graphs under FSDP2: a whole sharded step, with its collectives, captured once and replayed.

On as many GPUs as there are, up to two. With one rank FSDP2 neither gathers nor reduces; so there is a case of one GPU,
too, that plays the first of two ranks: all that FSDP2 does around its collectives is real, streams, events and buffers
included, and a collective gives what two ranks that hold the same would get.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

import quantshard as qs
from quantshard import kernel_dispatch, private_torch
from quantshard.errors import ConfigurationError
from quantshard.optimizers import FusedAdam
from tests.distributed.models import RECIPES, sha
from tests.distributed.pool import run_ranks

GPUS = torch.cuda.device_count()
DEVICE = "cuda" if GPUS else "cpu"
on_ranks = pytest.mark.parametrize(
    "ranks",
    [pytest.param(n, marks=pytest.mark.skipif(GPUS < n, reason=f"needs {n} GPU{'s' * (n > 1)}")) for n in (1, 2)],
)
STEPS, TOKENS, HIDDEN = 8, 96, 64


class _Buffers:
    """Where the collectives that are played read and write."""

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class PlayedGather(_Buffers):
    """All ranks hold what this one does."""

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False) -> None:
        output_tensor.view(group.size(), -1).copy_(input_tensor.clone())  # its own part is the input


class PlayedReduction(_Buffers):
    """All ranks add what this one does, and average."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
    ) -> None:
        output_tensor.copy_(input_tensor.view(group.size(), -1)[group.rank()])


@contextmanager
def two_ranks_played() -> Iterator[None]:
    """This process is the first of two ranks, of which the other one holds the same."""
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


class Training:
    """Two sharded transformer layers, their optimizer, and the tensors that a captured step reads and writes."""

    def __init__(self, recipe: str) -> None:
        torch.manual_seed(5)
        with qs.quantized_model_init(recipe=RECIPES[recipe]):
            layers = [
                qs.TransformerLayer(
                    HIDDEN, 160, 4, 2, hidden_dropout=0.0, attention_dropout=0.0, normalization="RMSNorm",
                    activation="swiglu", params_dtype=torch.bfloat16, device=DEVICE, attention_backend="math",
                )
                for _ in range(2)
            ]  # fmt: skip
        self.model = nn.Sequential(*layers)
        mesh = init_device_mesh(DEVICE, (dist.get_world_size(),))
        policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
        for module in (*layers, self.model):
            fully_shard(module, mesh=mesh, mp_policy=policy)
            if dist.get_backend() == "fake":
                assert isinstance(module, FSDPModule)
                module.set_custom_all_gather(PlayedGather())  # type: ignore[arg-type]
                module.set_custom_reduce_scatter(PlayedReduction())  # type: ignore[arg-type]
        for layer, following in pairwise(layers):
            assert isinstance(layer, FSDPModule) and isinstance(following, FSDPModule)
            layer.set_modules_to_forward_prefetch([following])
        self.recipe = recipe
        self.optimizer = FusedAdam(self.model.named_parameters(), lr=1e-3, weight_decay=0.1, capturable=True)
        self.x = torch.zeros(TOKENS, 1, HIDDEN, dtype=torch.bfloat16, device=DEVICE)
        self.loss = torch.zeros((), device=DEVICE)

    def step(self) -> None:
        with qs.autocast(recipe=RECIPES[self.recipe]):
            y = self.model(self.x)
        loss = y.float().square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.loss.copy_(loss.detach())

    def take(self, number: int, step: Any) -> Tensor:
        """One step on data of its own."""
        generator = torch.Generator().manual_seed(number * 7 + dist.get_rank())
        self.x.copy_(torch.randn(self.x.shape, generator=generator))
        step()
        return self.loss.clone()


def captured(training: Training) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        training.step()
    return graph


def replays_and_steps(recipe: str, warm: int) -> tuple[bool, bool, list[float]]:
    """Whether losses are those of eager steps, and whether the state is; and the losses."""
    eager, replayed = (Training(recipe) for _ in range(2))
    qs.capturable_(replayed.model)
    for number in range(warm):
        for training in (eager, replayed):
            training.take(number, training.step)
    graph = captured(replayed)
    losses = []
    for training, step in ((eager, eager.step), (replayed, graph.replay)):
        ways = {warm + STEPS // 2: training.step}  # one between the replays is eager
        losses.append(
            torch.stack([training.take(number, ways.get(number, step)) for number in range(warm, warm + STEPS)])
        )
    same = held(eager) == held(replayed)
    return torch.equal(*losses), same, losses[0].tolist()


def held(training: Training) -> dict[str, str]:
    """Hashes of all that this rank keeps."""
    tensors: dict[str, Any] = dict(training.model.state_dict())
    for index, entries in training.optimizer.state_dict()["state"].items():
        tensors.update({f"{index}.{key}": value for key, value in entries.items() if isinstance(value, Tensor)})
    return {name: sha(private_torch.local_tensor(tensor)) for name, tensor in tensors.items()}


def graphed_and_eager(recipe: str) -> tuple[bool, bool]:
    """Whether the losses of a `StepGraph` are those of eager steps, and whether the state is; of two lengths, from
    batches of the host."""
    eager, graphed = (Training(recipe) for _ in range(2))

    def step(training: Training, x: Tensor) -> Tensor:
        training.x = x.to(DEVICE)
        training.step()
        return training.loss

    losses: list[list[float]] = [[], []]
    with qs.StepGraph(partial(step, graphed), graphed.model, graphed.optimizer) as replayed:
        for number in range(2 * STEPS):
            generator = torch.Generator().manual_seed(number * 7 + dist.get_rank())
            x = torch.randn(TOKENS - 32 * (number % 2), 1, HIDDEN, generator=generator).bfloat16()
            losses[0].append(step(eager, x).item())
            losses[1].append(replayed(x).item())
        assert len(replayed._replays) == 2
    assert len({*losses[0]}) == 2 * STEPS
    return losses[0] == losses[1], held(eager) == held(graphed)


@pytest.mark.distributed
@on_ranks
@pytest.mark.parametrize("recipe", ["current", "nvfp4"])
def test_a_step_graph_has_the_bits_of_steps(recipe: str, ranks: int) -> None:
    """1 and 2 ranks: losses and all that is kept; the group ends, since its graphs have gone before."""
    assert run_ranks(ranks, graphed_and_eager, recipe) == [(True, True)] * ranks


@pytest.mark.distributed
@on_ranks
@pytest.mark.parametrize("recipe", RECIPES)
def test_replays_are_steps(recipe: str, ranks: int) -> None:
    """Losses, weights, states, amax histories and draws, bit for bit."""
    for same_losses, same_state, losses in run_ranks(ranks, replays_and_steps, recipe, 2):
        assert same_losses and same_state
        assert len(set(losses)) == STEPS


@pytest.mark.skipif(not GPUS, reason="needs a GPU")
@pytest.mark.parametrize("recipe", RECIPES)
def test_replays_are_steps_where_ranks_are_played(recipe: str) -> None:
    """1 process, as the first of 2."""
    with two_ranks_played():
        same_losses, same_state, losses = replays_and_steps(recipe, 2)
    assert same_losses and same_state
    assert len(set(losses)) == STEPS


# What would be silently wrong ----------------------------------------------------------------------------------------


def told_by_a_forward(gathered_in: bool, used_in: bool, trains: bool) -> str:
    """What a forward says of weights that were gathered before; `..._in`: in a capture, which is played."""
    training = Training("current")
    with mock.patch.object(kernel_dispatch, "is_capturing", lambda: gathered_in):
        for module in training.model.modules():
            if isinstance(module, FSDPModule):
                module.unshard()
    with mock.patch.object(kernel_dispatch, "is_capturing", lambda: used_in), torch.set_grad_enabled(trains):
        try:
            with qs.autocast(recipe="current"):
                training.model(training.x)
        except ConfigurationError as error:
            return str(error)
    return ""


@pytest.mark.distributed
@pytest.mark.skipif(bool(GPUS), reason="the capture is played")
@pytest.mark.parametrize("trains", [True, False])
def test_weights_gathered_outside_of_a_capture_are_refused(trains: bool) -> None:
    """2 ranks. A capture in inference may read weights that were gathered before, which nothing changes."""

    def told(gathered_in: bool, used_in: bool) -> str:
        first, second = run_ranks(2, told_by_a_forward, gathered_in, used_in, trains)
        assert first == second
        return first

    assert told(False, False) == told(True, True) == ""
    assert (
        "outside the capture of a CUDA graph and is used inside" in told(False, True)
        if trains
        else not told(False, True)
    )
    assert "inside the capture of a CUDA graph and is used outside" in told(True, False)
