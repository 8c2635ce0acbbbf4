"""`StepGraph` without a GPU: with a graph that runs its work again, steps have the bits of eager ones, and what a graph
would do in silence is refused by name. Graphs themselves: tests/distributed/test_graphs_fsdp.py and test_graphs.py."""

from __future__ import annotations

import operator
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import quantshard as qs
from quantshard.errors import ConfigurationError, UnsupportedOperationError
from quantshard.modules.graphs import step_graph
from quantshard.modules.graphs.recorder import GraphRecorder
from quantshard.optimizers import FusedAdam
from tests.distributed.models import RECIPES, bits
from tests.distributed.pool import run_ranks
from tests.pages import snippets

HIDDEN = 32


class Training:
    """Two layers, their optimizer, and a step; `works` counts what Python ran."""

    def __init__(self, recipe: str = "delayed") -> None:
        torch.manual_seed(3)
        with qs.quantized_model_init(recipe=RECIPES[recipe]):
            layers = [qs.Linear(HIDDEN, HIDDEN, params_dtype=torch.bfloat16, device="cpu") for _ in range(2)]
        self.model, self.recipe, self.works = nn.Sequential(*layers), recipe, 0
        self.optimizer = FusedAdam(self.model.named_parameters(), lr=1e-2, capturable=True)

    def step(self, batch: dict[str, Tensor], factor: float = 1.0, *, more: Tensor | None = None) -> dict[str, Any]:
        self.works += 1
        with qs.autocast(recipe=RECIPES[self.recipe]):
            y = self.model(batch["x"])
        loss = factor * (y.float() - batch["y"].float()).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return {"loss": loss, "y": [y], "more": more, "kind": "step"}


@pytest.fixture(autouse=True)
def rerun(monkeypatch: pytest.MonkeyPatch) -> list[Callable[[], Any]]:
    """Replays that run their work again; those that were captured."""
    captured: list[Callable[[], Any]] = []
    monkeypatch.setattr(GraphRecorder, "record", lambda _, owner, work: (captured.append(work) or work, None))
    monkeypatch.setattr(step_graph, "_device", lambda model: torch.device("cpu"))
    return captured


def batch(number: int, rows: int = 8) -> dict[str, Tensor]:
    x = torch.randn(2, rows, HIDDEN, generator=torch.Generator().manual_seed(number)).bfloat16()
    return {"x": x[0], "y": x[1]}


@pytest.mark.parametrize("recipe", ["delayed", "nvfp4"])
def test_steps_have_the_bits_of_eager_ones(rerun: list[Any], recipe: str) -> None:
    eager, graphed = Training(recipe), Training(recipe)
    with qs.StepGraph(graphed.step, graphed.model, graphed.optimizer) as step:
        found = [step(batch(number), more=torch.tensor(number)) for number in range(6)]
    expected = [eager.step(batch(number), more=torch.tensor(number)) for number in range(6)]
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one["loss"], other["loss"]) and torch.equal(one["y"][0], other["y"][0])
        assert int(one["more"]) == int(other["more"]) and one["kind"] == "step"
    assert not found[-1]["loss"].requires_grad
    assert len({each["loss"].item() for each in found}) == 6, "results are copies, and those of a step stay"
    assert bits(eager.model, eager.optimizer) == bits(graphed.model, graphed.optimizer)
    assert len(rerun) == 1


def test_a_step_is_given_copies(rerun: list[Any]) -> None:
    """A graph's lie at one address; what a step does to them its caller does not see, of an eager step neither."""
    training, read = Training(), []

    def step(x: Tensor) -> Tensor:
        read.append(x.data_ptr())
        return x.add_(1)

    graphed = qs.StepGraph(step, training.model, training.optimizer)
    given = [torch.full((1,), float(number)) for number in range(6)]
    results = [graphed(each) for each in given]
    assert len({*read[2:]}) == 1 and not {*read} & {each.data_ptr() for each in given}
    assert [each.item() for each in given] == [0, 1, 2, 3, 4, 5]
    assert [each.item() for each in results] == [1, 2, 3, 4, 5, 6]


def test_other_shapes_constants_and_contexts_have_graphs_of_their_own(rerun: list[Any]) -> None:
    training, entered = Training(), []

    @contextmanager
    def sampled() -> Iterator[None]:
        entered.append(training.works)
        yield

    step = qs.StepGraph(training.step, training.model, training.optimizer)
    kinds, eager_steps = "", lambda: sum(last.count for last in step._eager.values())
    calls: list[Callable[[], Any]] = [
        lambda: step(batch(0)), lambda: step(batch(0, rows=5)), lambda: step(batch(0), 2.0),
        lambda: step.within(sampled, batch(0)),
    ]  # fmt: skip
    for call in calls * 6:
        before = len(rerun), eager_steps()
        call()
        kinds += "c" if len(rerun) > before[0] else "e" if eager_steps() > before[1] else "r"
    assert kinds == "eeeeeeeececercrerrrcrrrr", "FusedAdam needs an eager step between two captures"
    assert len(entered) == 6
    step.close()
    for _ in range(3):
        step(batch(0))
    assert len(rerun) == 5, "after close a step is captured again, behind eager ones"


def test_what_arguments_stand_in_tells_graphs_apart(rerun: list[Any]) -> None:
    training, seen = Training(), []
    step = qs.StepGraph(lambda given: seen.append(type(given)), training.model, training.optimizer)
    tensor = torch.ones(2, 3)
    for _ in range(6):
        for given in ([tensor], (tensor,), {0: tensor}, [tensor.t().contiguous().t()]):
            step(given)
            assert seen[-1] is type(given)
    assert len(rerun) == 4


def test_entries_of_a_dict_in_another_order_are_not_taken_for_each_other(rerun: list[Any]) -> None:
    training = Training()
    x, y = torch.full((2,), 1.0), torch.full((2,), 2.0)
    step = qs.StepGraph(lambda given, **more: given["x"] + more["b"], training.model, training.optimizer)
    for _ in range(5):
        for given in ({"x": x, "y": y}, {"y": y, "x": x}):
            for more in ({"a": x, "b": y}, {"b": y, "a": x}):
                assert step(given, **more).tolist() == [3, 3]
    assert len(rerun) == 2


def test_a_number_that_changes_is_said_to_be_no_argument(rerun: list[Any]) -> None:
    training = Training()
    step = qs.StepGraph(training.step, training.model, training.optimizer)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for number in range(100):
            step(batch(0), 1 + number / 100)
    [message] = [str(each.message) for each in told if "StepGraph" in str(each.message)]
    assert "argument 1 = 1.32" in message and "pass numbers that change as tensors" in message
    assert not rerun and len(step._eager) <= step_graph.MOST_KINDS


def test_of_too_many_shapes_the_last_run_eagerly_and_it_is_said_once(rerun: list[Any]) -> None:
    training = Training()
    step = qs.StepGraph(training.step, training.model, training.optimizer)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for rows in range(1, step_graph.MOST_GRAPHS + 3):
            for _ in range(4):
                step(batch(0, rows))
    assert len(rerun) == step_graph.MOST_GRAPHS
    [message] = [str(each.message) for each in told if "StepGraph" in str(each.message)]
    assert "argument 0['x'] = [9, 32]" in message and "run eagerly" in message


def test_the_page(rerun: list[Any]) -> None:
    """The snippet of docs/performance.md trains, at the rates of its scheduler."""
    torch.manual_seed(3)
    with qs.quantized_model_init(recipe="current"):
        model = qs.Linear(HIDDEN, HIDDEN, params_dtype=torch.bfloat16, device="cpu")
    pairs = [(batch(number)["x"], batch(number)["y"]) for number in range(6)]
    names: dict[str, Any] = {"model": model, "batches": pairs, "FusedAdam": FusedAdam, "quantshard": qs}
    names["loss_of"] = lambda y, wanted: (y.float() - wanted.float()).square().mean()
    (snippet,) = snippets("docs/performance.md#the-whole-step-stepgraph")
    before, _, after = snippet.partition("\n\n\n")
    exec(before, names)
    names["scheduler"] = torch.optim.lr_scheduler.LambdaLR(names["optimizer"], lambda step: 0.5**step)
    exec(after, names)
    assert names["loss"].isfinite() and not names["loss"].requires_grad and len(rerun) == 1
    [group] = names["optimizer"].param_groups
    assert int(group["step"]) == 6 and group["lr"].item() == pytest.approx(1e-3 * 0.5**6)


def test_disabled_each_step_is_eager(rerun: list[Any]) -> None:
    training = Training()
    optimizer = torch.optim.SGD(training.model.parameters(), lr=0.1)
    step = qs.StepGraph(training.step, training.model, optimizer, enabled=False)
    for number in range(4):
        assert not step(batch(number))["loss"].requires_grad
    assert training.works == 4 and not rerun


def test_enabled_is_a_flag() -> None:
    training = Training()
    with pytest.raises(ConfigurationError, match=r"enabled=.no"):
        qs.StepGraph(training.step, training.model, training.optimizer, enabled="no")  # type: ignore[arg-type]


def rate(training: Training) -> str:
    training.optimizer.param_groups[0]["lr"] = 1e-9
    return "lr of group 0 of FusedAdam was replaced since the capture, .*lr.fill_"


def decay(training: Training) -> str:
    training.optimizer.param_groups[0]["weight_decay"] = 0.5
    return "weight_decay of group 0 of FusedAdam was replaced"


def state(training: Training) -> str:
    entries = training.optimizer.state[training.model[0].weight]
    entries["exp_avg"] = entries["exp_avg"].clone()
    return "a state of FusedAdam was replaced"


def group(training: Training) -> str:
    training.optimizer.add_param_group({"params": [("more", nn.Parameter(torch.ones(3)))]})
    return "of FusedAdam was replaced"


def replaced(training: Training) -> str:
    training.model[1] = qs.Linear(HIDDEN, HIDDEN, params_dtype=torch.bfloat16, device="cpu")
    return "the module was replaced"


def evaluated(training: Training) -> str:
    training.model[1].eval()
    return "1 was replaced, frozen, switched or hooked since the capture"


def frozen(training: Training) -> str:
    training.model[0].weight.requires_grad_(False)
    return "0.weight was replaced, frozen"


def no_python(_: GraphRecorder, owner: str, work: Callable[[], Any]) -> tuple[Callable[[], Any], Any]:
    """A capture, which Python runs, and replays, which it does not."""
    result = work()
    return lambda: result, result


@pytest.mark.parametrize("change", [replaced, evaluated, frozen, rate, decay, state, group])
def test_what_is_another_since_the_capture_is_named(
    monkeypatch: pytest.MonkeyPatch, change: Callable[[Training], str]
) -> None:
    monkeypatch.setattr(GraphRecorder, "record", no_python)
    training = Training()
    step = qs.StepGraph(training.step, training.model, training.optimizer)
    for number in range(4):
        step(batch(number))
    assert training.works == 3
    says = change(training)
    at_once = change in (rate, decay, group)  # of tensors within some steps
    with pytest.raises(ConfigurationError, match=says):
        for number in range(1 if at_once else step_graph.EVERY):
            step(batch(number))


def test_a_model_that_was_switched_is_named_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GraphRecorder, "record", no_python)
    training = Training()
    step = qs.StepGraph(training.step, training.model, training.optimizer)
    for number in range(4):
        step(batch(number))
    training.model.eval()
    with pytest.raises(ConfigurationError, match=r"the mode of the model .train or eval. was switched since"):
        step(batch(4))


def test_what_is_written_in_place_is_no_other(rerun: list[Any]) -> None:
    """Rates, and a state that is loaded."""
    training = Training()
    step = qs.StepGraph(training.step, training.model, training.optimizer)
    for number in range(4):
        step(batch(number))
    training.optimizer.param_groups[0]["lr"].fill_(1e-4)
    training.optimizer.load_state_dict(training.optimizer.state_dict())
    training.model.load_state_dict(training.model.state_dict())
    step(batch(4))
    assert len(rerun) == 1


def test_another_autocast_around_is_refused() -> None:
    training = Training()
    step = qs.StepGraph(training.step, training.model, training.optimizer)
    for number in range(3):
        step(batch(number))
    with (
        qs.autocast(recipe="mxfp8"),
        pytest.raises(ConfigurationError, match="StepGraph: the step was captured under"),
    ):
        step(batch(3))


def test_the_cache_of_an_autocast_around_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    training = Training()
    step = qs.StepGraph(training.step, training.model, training.optimizer)
    step(batch(0))
    step(batch(0))
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda device: True)  # not before: torch.autocast restores it
    with pytest.raises(ConfigurationError, match=r"casts; enter it with"):
        step(batch(0))


def test_gradients_that_a_replay_would_not_leave_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    training = Training()
    monkeypatch.setattr(GraphRecorder, "record", lambda _, owner, work: (work, work()))  # Python runs at a capture

    def step(x: Tensor) -> None:
        with qs.autocast(recipe=RECIPES["delayed"]):
            training.model(x).float().sum().backward()

    for zeroed in (True, False):
        graphed = qs.StepGraph(step, training.model, training.optimizer)
        for _ in range(2):
            graphed(batch(0)["x"])
            training.optimizer.step()
            if zeroed:
                training.optimizer.zero_grad()
        before = [param.grad for param in training.model.parameters()]
        with pytest.raises(ConfigurationError, match=r"leaves a gradient of 0.weight; call optimizer.step\(\) and"):
            graphed(batch(0)["x"])
        assert all(map(operator.is_, before, [param.grad for param in training.model.parameters()]))
        training.optimizer.zero_grad()


def test_a_step_that_begins_with_zero_grad_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    training = Training()
    monkeypatch.setattr(GraphRecorder, "record", lambda _, owner, work: (work, work()))

    def step(x: Tensor) -> None:
        training.optimizer.zero_grad()
        with qs.autocast(recipe=RECIPES["delayed"]):
            training.model(x).float().sum().backward()
        training.optimizer.step()

    graphed = qs.StepGraph(step, training.model, training.optimizer)
    for _ in range(4):
        graphed(batch(0)["x"])
    assert len(graphed._replays) == 1


def test_optimizers_whose_rate_a_graph_would_keep_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Training().model
    elsewhere = torch.optim.SGD(model.parameters(), lr=0.5)
    elsewhere.param_groups[0]["lr"] = torch.ones((), device="meta")
    for optimizer, lr in (
        (FusedAdam(model.parameters(), lr=1e-3), "0.001"),
        (torch.optim.SGD(model.parameters(), lr=0.5), "0.5"),
        (torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.5), foreach=False), "tensor(0.5000)"),
        (elsewhere, "tensor(..., device='meta', size=())"),
    ):
        remedy = f"use {type(optimizer).__name__}(..., capturable=True)"
        message = f"a graph keeps lr of group 0, {lr}, for ever; {remedy}"
        with pytest.raises(ConfigurationError, match=re.escape(message)):
            qs.StepGraph(print, model, optimizer)
    monkeypatch.undo()
    with pytest.raises(ConfigurationError, match="tensors are on cpu, but a CUDA graph is of one GPU"):
        qs.StepGraph(print, model, FusedAdam(model.parameters(), lr=1e-3, capturable=True))


def replicated() -> str:
    training = Training()
    model = DistributedDataParallel(training.model, init_sync=False)
    with pytest.raises(UnsupportedOperationError) as error:
        qs.StepGraph(print, model, training.optimizer)
    return str(error.value)


@pytest.mark.distributed
def test_replicas_are_refused() -> None:
    """1 rank."""
    [told] = run_ranks(1, replicated)
    assert "the model" in told and "StepGraph do not take DistributedDataParallel" in told


def test_arguments_of_other_types_are_refused() -> None:
    training = Training()
    step = qs.StepGraph(training.step, training.model, training.optimizer)
    with pytest.raises(ConfigurationError, match="StepGraph: a Training"):
        step(training)
    with pytest.raises(ConfigurationError, match="an argument requires a gradient, and a replay gives none"):
        step({"x": batch(0)["x"].requires_grad_()})


class Result(NamedTuple):
    y: Tensor


@dataclass
class Unknown:
    y: Tensor


def test_results_that_would_be_the_graphs_own_memory_are_refused() -> None:
    training = Training()
    step = qs.StepGraph(lambda x: Unknown(x), training.model, training.optimizer)
    with pytest.raises(ConfigurationError, match="StepGraph: a Unknown"):
        step(batch(0)["x"])
    step = qs.StepGraph(lambda x: (Result(training.model[0].bias), x), training.model, training.optimizer)
    found = [step(batch(0)["x"])[0] for _ in range(4)]
    assert all(isinstance(each, Result) and not each.y.requires_grad for each in found)
    assert len({each.y.data_ptr() for each in found} | {training.model[0].bias.data_ptr()}) == 5


class Graph:
    """In the place of torch.cuda's."""

    def __init__(self, *_: object, **__: object) -> None: ...

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


def raising(error: BaseException) -> Callable[[], Any]:
    def fail() -> Any:
        try:
            raise KeyError("before")
        except KeyError:
            raise error  # noqa: B904 (its context is not the cause)

    return fail


def test_what_cannot_be_captured_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", Graph)
    recorder = GraphRecorder(torch.device("cpu"))
    text = "operation not permitted when stream is capturing\nmore"
    with pytest.raises(UnsupportedOperationError, match=r"cannot be captured .operation not permitted[^\n]*waits for"):
        recorder.record("the step", raising(RuntimeError(text)))
    with pytest.raises(UnsupportedOperationError, match=r"cannot be captured .RuntimeError"):
        recorder.record("the step", raising(RuntimeError()))
    for error in (torch.OutOfMemoryError("no memory"), ValueError("a shape"), ConfigurationError("ours")):
        with pytest.raises(type(error), match=str(error)):
            recorder.record("the step", raising(error))
