"""Stages of torch.distributed.pipelining on 2 ranks: the bits of the model in one piece, or an error at once.

What is not compared: `nvfp4`, whose random streams differ by rank.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
import types
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

import quantshard as qs
from quantshard import private_torch
from quantshard.collectives.delayed_scaling import check_same_stage
from quantshard.errors import ConfigurationError
from quantshard.optimizers import FusedAdam
from quantshard.private_torch import RunningStage
from quantshard.tensor import observation
from tests.distributed.models import RECIPES
from tests.distributed.pool import run_ranks
from tests.interpreter import kernels_on, prepared_once
from tests.pages import snippets

pytestmark = pytest.mark.distributed

WIDTH, ROWS, MICRO_BATCHES, STEPS = 32, 8, 4, 2
ZERO_BUBBLE = "zero bubble"
"""Two stages on each rank: of layers 0 and 1, and 4 and 5; backward runs twice, first for inputs."""
SCHEDULES = {"gpipe": pipelining.ScheduleGPipe, "1f1b": pipelining.Schedule1F1B}


class Pipeline(NamedTuple):
    """A case. `shapes`: whether stages are told the shapes of what they send ("static"), or infer them in a pass of
    their own."""

    recipe: str
    schedule: str
    shapes: str
    kind: str = "linear"


PIPELINES = [
    *(Pipeline("delayed", schedule, shapes) for schedule in SCHEDULES for shapes in ("dynamic", "static")),
    Pipeline("delayed", "1f1b", "dynamic", "checkpointed"),
    Pipeline("delayed", "gpipe", "dynamic", "compiled"),
    Pipeline("mxfp8", "1f1b", "dynamic"),
    Pipeline("current", "gpipe", "dynamic"),
    Pipeline("delayed", ZERO_BUBBLE, "dynamic"),
    Pipeline("mxfp8", ZERO_BUBBLE, "dynamic", "main_grad"),
]
EXPERTS = Pipeline("delayed", "1f1b", "dynamic", "experts")

Trained = tuple[list[float], dict[str, Tensor]]
"""The losses of all micro-batches, and state dicts."""


class Checkpointed(nn.Sequential):
    """Layers that are recomputed in backward."""

    def forward(self, x: Tensor) -> Any:
        return checkpoint(super().forward, x, use_reentrant=False)


class Experts(nn.Module):
    """Of which each takes half of the rows."""

    def __init__(self) -> None:
        super().__init__()
        self.grouped = qs.GroupedLinear(2, WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Any:
        return self.grouped(x, [len(x) // 2] * 2)


def layers(recipe: str, kind: str = "linear") -> dict[str, nn.Module]:
    """By name, the same on all ranks."""
    torch.manual_seed(7)
    with qs.quantized_model_init(recipe=RECIPES[recipe]):
        if kind == "experts":
            return {str(index): Experts() for index in range(2)}
        options = {"fuse_wgrad_accumulation": kind == "main_grad"}
        parts = {str(index): qs.Linear(WIDTH, WIDTH, **options) if index % 2 else nn.GELU() for index in range(8)}
    for part in parts.values() if kind == "main_grad" else ():
        if isinstance(part, qs.Linear):
            part.weight.main_grad = torch.zeros(WIDTH, WIDTH)
    return parts


def named(parts: dict[str, nn.Module], kind: type[nn.Sequential] = nn.Sequential) -> nn.Sequential:
    model = kind()
    for name, part in parts.items():
        model.add_module(name, part)
    return model


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    x, target = torch.randn(2, MICRO_BATCHES * ROWS, WIDTH, generator=generator)
    return x, target


def loss_of(y: Tensor, target: Tensor) -> Tensor:
    return (y - target).square().mean()


def state_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items() if isinstance(value, Tensor)}


def in_one_piece(recipe: str, group: dist.ProcessGroup, kind: str = "linear") -> Trained:
    model, losses = named(layers(recipe, kind)), list[float]()
    optimizer = FusedAdam(model.parameters(), lr=1e-2)
    for step in range(STEPS):
        with qs.autocast(recipe=RECIPES[recipe], amax_reduction_group=group):
            for x, target in zip(*(part.chunk(MICRO_BATCHES) for part in batch(step)), strict=True):
                loss = loss_of(model(x), target)
                loss.backward()
                losses.append(loss.item())
        scale_gradients(model)
        optimizer.step()
        optimizer.zero_grad()
    return losses, state_of(model)


def scale_gradients(model: nn.Module, grads: bool = True) -> None:
    """As schedules do with `grad`, after all micro-batches."""
    for param in model.parameters():
        for attribute in (*(["grad"] if grads else []), "main_grad"):
            if (gradient := getattr(param, attribute, None)) is not None:
                gradient.div_(MICRO_BATCHES)


def stage_of(case: Pipeline, model: nn.Module, group: dist.ProcessGroup | None = None) -> Any:
    """This rank's, in its schedule."""
    rank, told = dist.get_rank(), dict[str, Any]()
    if case.shapes == "static":
        example = torch.zeros(ROWS, WIDTH)
        told = {"input_args": example.clone().requires_grad_(rank > 0), "output_args": example.requires_grad_()}
    if case.schedule == ZERO_BUBBLE:
        pairs = [
            pipelining.PipelineStage(part, rank + 2 * index, 4, torch.device("cpu"), group=group)
            for index, part in enumerate(model.children())
        ]
        return pipelining.ScheduleInterleavedZeroBubble(pairs, MICRO_BATCHES, loss_fn=loss_of)
    stage = pipelining.PipelineStage(model, rank, 2, torch.device("cpu"), group=group, **told)
    return SCHEDULES[case.schedule](stage, MICRO_BATCHES, loss_fn=loss_of)


def part_of(case: Pipeline) -> nn.Sequential:
    """This rank's half of the layers."""
    found = list(layers(case.recipe, case.kind).items())
    half = len(found) // 2
    own = dict(found[half:] if dist.get_rank() else found[:half])
    if case.schedule == ZERO_BUBBLE:
        first = 2 * dist.get_rank()
        return nn.Sequential(*(named(dict(found[start : start + 2])) for start in (first, first + 4)))
    return named(own, Checkpointed if case.kind == "checkpointed" else nn.Sequential)


def run(schedule: Any, step: int) -> list[float]:
    """The losses, which the last stage knows."""
    x, target = batch(step)
    seen: list[Tensor] = []
    if dist.get_rank() == 0:
        schedule.step(x)
    else:
        schedule.step(target=target, losses=seen)
    return [loss.item() for loss in seen]


def in_stages(case: Pipeline, group: dist.ProcessGroup) -> Trained:
    """Of this rank's."""
    model, losses = part_of(case), list[float]()
    called: Any = torch.compile(model, backend="eager") if case.kind == "compiled" else model
    schedule, optimizer = stage_of(case, called), FusedAdam(model.parameters(), lr=1e-2)
    for step in range(STEPS):
        with qs.autocast(recipe=RECIPES[case.recipe], amax_reduction_group=group):
            losses += run(schedule, step)
        scale_gradients(model, grads=False)
        optimizer.step()
        optimizer.zero_grad()
    state = state_of(model)
    return losses, {name.split(".", 1)[1]: v for name, v in state.items()} if case.schedule == ZERO_BUBBLE else state


def of_this_rank() -> dist.ProcessGroup:
    group = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    assert isinstance(group, dist.ProcessGroup)
    return group


def piece_of(case: Pipeline) -> str:
    """The kind of the model in one piece that a case is compared with."""
    return case.kind if case.kind in ("experts", "main_grad") else "linear"


def differences(cases: Sequence[Pipeline], in_kernels: bool = False) -> dict[Pipeline, list[str]]:
    """What differs from the model in one piece on this rank, by case."""
    rank, group, wrong = dist.get_rank(), of_this_rank(), {}
    with contextlib.ExitStack() as stack:
        if in_kernels:
            stack.enter_context(prepared_once())
            stack.enter_context(kernels_on("cpu"))
        pieces = {(case.recipe, piece_of(case)) for case in cases}
        expected = {piece: in_one_piece(piece[0], group, piece[1]) for piece in pieces}
        for case in cases:
            (losses, state), (whole_losses, whole) = in_stages(case, group), expected[case.recipe, piece_of(case)]
            wrong[case] = ["losses"] if losses != (whole_losses if rank else []) else []
            wrong[case] += [name for name, value in state.items() if not torch.equal(value, whole[name])]
            histories = [value for name, value in state.items() if name.endswith("amax_history")]
            if len(histories) != (6 if case.recipe == "delayed" else 0):
                wrong[case] += [f"{len(histories)} histories"]
            wrong[case] += ["an empty history" for history in histories if history.count_nonzero() < STEPS]
    return wrong


def test_stages_have_the_bits_of_the_model_in_one_piece() -> None:
    assert run_ranks(2, differences, PIPELINES) == [{case: [] for case in PIPELINES}] * 2


@pytest.mark.exhaustive
@pytest.mark.skipif(torch.cuda.is_available(), reason="its ranks are on the CPU, where the interpreter runs then")
def test_stages_of_experts_at_once_too() -> None:
    pytest.importorskip("triton")
    assert run_ranks(2, differences, [EXPERTS], True) == [{EXPERTS: []}] * 2


def refusal(case: Pipeline) -> str:
    """What a step says where amaxes would be reduced over all ranks."""
    rank, pipeline = dist.get_rank(), dist.new_group([0, 1], timeout=timedelta(seconds=20))
    schedule = stage_of(case, part_of(case), pipeline)
    try:
        with contextlib.ExitStack() as stack:
            if case.kind == "experts":
                stack.enter_context(prepared_once())
                stack.enter_context(kernels_on("cpu"))
            with qs.autocast(recipe=RECIPES[case.recipe]):
                run(schedule, 0)
    except RuntimeError as error:
        if isinstance(error.__cause__, ConfigurationError):
            if rank == 0:  # the other has come as far as waiting for what it runs on
                dist.send(torch.zeros(ROWS, WIDTH), 1, pipeline)
            return str(error.__cause__)
    os._exit(1)  # the other waits for this one, and so would the next cases


@pytest.mark.parametrize("kind", ["linear", "experts"])
def test_amaxes_are_not_reduced_over_other_stages(kind: str) -> None:
    """Without the check both ranks wait, until the process group's timeout."""
    if kind == "experts" and (torch.cuda.is_available() or importlib.util.find_spec("triton") is None):
        pytest.skip("experts are computed at once by Triton's interpreter")
    first, second = run_ranks(2, refusal, Pipeline("delayed", "gpipe", "static", kind))
    assert first == second and "amax_reduction_group" in first and "docs/distributed.md" in first


def refused_groups() -> list[bool]:
    """Of amaxes over all ranks: where each rank has a pipeline of its own, of one that infers shapes, and of one over
    all ranks."""
    found = []
    for stage in (RunningStage(of_this_rank(), False), RunningStage(None, True), RunningStage(None, False)):
        try:
            check_same_stage(dist.group.WORLD, stage)
            found.append(False)
        except ConfigurationError:
            found.append(True)
    return found


def test_replicas_of_a_stage_may_share_amaxes() -> None:
    assert run_ranks(2, refused_groups) == [[False, False, True]] * 2


class ShownOperands(observation.Observer):
    """How often operands were shown."""

    def __init__(self) -> None:
        self.count = 0

    def see_operand(self, *args: Any) -> None:
        self.count += 1

    def see_plain(self, *args: Any) -> None:
        raise AssertionError("a layer in high precision")


def shown(case: Pipeline) -> int:
    observer = ShownOperands()
    with mock.patch.object(observation, "active", observer), qs.autocast(recipe=RECIPES[case.recipe]):
        run(stage_of(case, part_of(case)), 0)
    return observer.count


def both_shown() -> list[int]:
    return [shown(Pipeline("mxfp8", "gpipe", shapes)) for shapes in ("dynamic", "static")]


def test_what_infers_shapes_is_not_observed() -> None:
    for dynamic, static in run_ranks(2, both_shown):
        assert dynamic == static > 0


def by_the_page(stages: int) -> Trained:
    """As docs/distributed.md has it: two stages once, or one twice, which both read the same."""
    (code,) = snippets("docs/distributed.md#stages-of-a-pipeline-torchdistributedpipelining", "py")
    case, losses = Pipeline("delayed", "1f1b", "static"), list[Tensor]()

    def loss_fn(y: Tensor, target: Tensor) -> Tensor:
        losses.append(loss_of(y, target))
        return losses[-1]

    names = {
        **vars(pipelining), "quantshard": qs, "init_device_mesh": init_device_mesh, "device": torch.device("cpu"),
        "DistributedDataParallel": nn.parallel.DistributedDataParallel, "stages": stages, "replicas": 2 // stages,
        "part": part_of(case) if stages == 2 else named(layers("delayed")), "micro_batches": MICRO_BATCHES,
        "loss_fn": loss_fn, "example": torch.zeros(ROWS, WIDTH).requires_grad_(), "recipe": RECIPES["delayed"],
        "batches": [batch(step) for step in range(STEPS)],
    }  # fmt: skip
    exec(code.replace("lr=1e-3, weight_decay=0.01", "lr=1e-2"), names)
    state = state_of(names["part"])
    return [loss.item() for loss in losses], {name.removeprefix("module."): value for name, value in state.items()}


def equals_page(stages: int) -> bool:
    group = of_this_rank()
    expected, whole = in_one_piece("delayed", group)
    losses, state = by_the_page(stages)
    is_last = stages == 1 or dist.get_rank() == 1
    return losses == (expected if is_last else []) and all(torch.equal(state[name], whole[name]) for name in state)


@pytest.mark.parametrize("stages", [1, 2])
def test_the_page_trains_stages(stages: int) -> None:
    assert run_ranks(2, equals_page, stages) == [True, True]


NAME = "torch.distributed.pipelining.stage"
OTHER_STAGES = """
class PipelineStage:
    group = None
    def forward_one_chunk(self, ask): return ask()
    def backward_one_chunk(self, ask): return ask()
    def backward_weight_one_chunk(self, ask): return ask()
    def infer(self, ask): return ask()
"""


def stages(source: str) -> Any:
    """A module in the place of PyTorch's."""
    module = types.ModuleType(NAME)
    exec(source, vars(module))
    return module


def test_a_stage_runs_on_values_in_three_methods(monkeypatch: pytest.MonkeyPatch) -> None:
    other = stages(OTHER_STAGES)
    monkeypatch.setitem(sys.modules, NAME, other)
    stage, ask = other.PipelineStage(), private_torch.running_stage
    for method in (stage.forward_one_chunk, stage.backward_one_chunk, stage.backward_weight_one_chunk):
        assert method(ask) == method(lambda: stage.infer(ask)) == RunningStage(None, False)
    assert stage.infer(ask) == RunningStage(None, True)
    assert ask() is None


def test_outside_of_pipelines_nothing_is_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, NAME)
    with mock.patch.object(sys, "_getframe", side_effect=AssertionError):
        assert private_torch.running_stage() is None
