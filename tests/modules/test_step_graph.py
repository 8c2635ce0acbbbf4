"""`StepGraph` without a GPU: with a graph that runs its work again, steps have the bits of eager ones, and what a graph
would do in silence is refused by name. Graphs themselves: tests/distributed/test_graphs_fsdp.py and test_graphs.py."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import quantshard as qs
from quantshard.errors import ConfigurationError, UnsupportedOperationError
from quantshard.modules.graphs import step_graph
from quantshard.optimizers import FusedAdam
from tests.distributed.models import RECIPES, bits
from tests.distributed.pool import run_ranks

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
    monkeypatch.setattr(step_graph, "recorded", lambda work: captured.append(work) or work)
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


def test_a_graph_reads_what_was_copied_to_it(rerun: list[Any]) -> None:
    training, read = Training(), []

    def step(x: Tensor) -> None:
        read.append(x.data_ptr())

    graphed = qs.StepGraph(step, training.model, training.optimizer)
    given = [torch.full((1,), float(number)) for number in range(6)]
    for each in given:
        graphed(each)
    assert [address == each.data_ptr() for address, each in zip(read, given, strict=True)] == [True] * 2 + [False] * 4
    assert len({*read[2:]}) == 1


def test_other_shapes_constants_and_contexts_have_graphs_of_their_own(rerun: list[Any]) -> None:
    training, entered = Training(), []

    @contextmanager
    def sampled() -> Iterator[None]:
        entered.append(training.works)
        yield

    step = qs.StepGraph(training.step, training.model, training.optimizer)
    kinds = ""
    calls: list[Callable[[], Any]] = [
        lambda: step(batch(0)), lambda: step(batch(0, rows=5)), lambda: step(batch(0), 2.0),
        lambda: step.within(sampled, batch(0)),
    ]  # fmt: skip
    for call in calls * 6:
        before = len(rerun), sum(step._eager.values())
        call()
        kinds += "c" if len(rerun) > before[0] else "e" if sum(step._eager.values()) > before[1] else "r"
    assert kinds == "eeeeeeeececercrerrrcrrrr", "FusedAdam needs an eager step between two captures"
    assert len(entered) == 6
    step.close()
    step(batch(0))
    step(batch(0))
    assert len(rerun) == 5, "after close a step is captured again, behind an eager one"


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


def page(words: str) -> str:
    """The one snippet of docs/graphs.md that has these words."""
    text = (Path(__file__).parents[2] / "docs" / "graphs.md").read_text(encoding="utf-8")
    [found] = [each for each in re.findall(r"```python\n(.*?)```", text, flags=re.S) if words in each]
    return str(found)


def test_the_page(rerun: list[Any]) -> None:
    """The snippet of docs/graphs.md trains, at the rates of its scheduler."""
    torch.manual_seed(3)
    with qs.quantized_model_init(recipe="current"):
        model = qs.Linear(HIDDEN, HIDDEN, params_dtype=torch.bfloat16, device="cpu")
    pairs = [(batch(number)["x"], batch(number)["y"]) for number in range(6)]
    names: dict[str, Any] = {"model": model, "batches": pairs, "FusedAdam": FusedAdam, "quantshard": qs}
    names["loss_of"] = lambda y, wanted: (y.float() - wanted.float()).square().mean()
    before, _, after = page("StepGraph(train_step").partition("\n\n\n")
    exec(before, names)
    names["scheduler"] = torch.optim.lr_scheduler.LambdaLR(names["optimizer"], lambda step: 0.5**step)
    exec(after, names)
    assert names["loss"].isfinite() and not names["loss"].requires_grad and len(rerun) == 1
    [group] = names["optimizer"].param_groups
    assert int(group["step"]) == 6 and group["lr"].item() == pytest.approx(1e-3 * 0.5**6)


def test_disabled_it_calls_the_step_itself(rerun: list[Any]) -> None:
    training = Training()
    optimizer = torch.optim.SGD(training.model.parameters(), lr=0.1)
    step = qs.StepGraph(training.step, training.model, optimizer, enabled=False)
    for number in range(4):
        assert step(batch(number))["loss"].requires_grad
    assert training.works == 4 and not rerun


def replaced(training: Training) -> str:
    training.model[1] = qs.Linear(HIDDEN, HIDDEN, params_dtype=torch.bfloat16, device="cpu")
    return "the module was replaced"


def evaluated(training: Training) -> str:
    training.model[1].eval()
    return "1 was replaced, frozen, switched or hooked since the capture"


def frozen(training: Training) -> str:
    training.model[0].weight.requires_grad_(False)
    return "0.weight was replaced, frozen"


@pytest.mark.parametrize("change", [replaced, evaluated, frozen])
def test_what_is_another_since_the_capture_is_named(change: Callable[[Training], str]) -> None:
    training = Training()
    step = qs.StepGraph(training.step, training.model, training.optimizer)
    for number in range(3):
        step(batch(number))
    says = change(training)
    with pytest.raises(ConfigurationError, match=re.escape(says)):
        step(batch(3))


def test_another_autocast_around_is_refused() -> None:
    training = Training()
    step = qs.StepGraph(training.step, training.model, training.optimizer)
    for number in range(3):
        step(batch(number))
    with qs.autocast(recipe="mxfp8"), pytest.raises(ConfigurationError, match="captured in another autocast"):
        step(batch(3))


def test_the_cache_of_an_autocast_around_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    training = Training()
    step = qs.StepGraph(training.step, training.model, training.optimizer)
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda device: True)
    step(batch(0))
    step(batch(0))
    with pytest.raises(ConfigurationError, match=r"is called within torch.autocast, .*enter it in the step"):
        step(batch(0))


def test_gradients_that_a_replay_would_not_leave_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    training = Training()
    monkeypatch.setattr(step_graph, "recorded", lambda work: (work(), work)[1])  # Python runs at a capture

    def step(x: Tensor) -> None:
        with qs.autocast(recipe=RECIPES["delayed"]):
            training.model(x).float().sum().backward()

    graphed = qs.StepGraph(step, training.model, training.optimizer)
    for _ in range(2):
        graphed(batch(0)["x"])
        training.optimizer.step()
        training.optimizer.zero_grad()
    with pytest.raises(ConfigurationError, match=r"leaves a gradient of 0.weight, .*call optimizer.step\(\) and"):
        graphed(batch(0)["x"])


def test_optimizers_whose_rate_a_graph_would_keep_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Training().model
    for optimizer, says in (
        (FusedAdam(model.parameters(), lr=1e-3), "lr of group 0 of FusedAdam is 0.001, which a graph would keep"),
        (torch.optim.SGD(model.parameters(), lr=0.5), "lr of group 0 of SGD is 0.5"),
        (torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.5), foreach=False), "lr of group 0 of AdamW"),
    ):
        with pytest.raises(ConfigurationError, match=re.escape(says)):
            qs.StepGraph(print, model, optimizer)
    monkeypatch.undo()
    with pytest.raises(ConfigurationError, match="parameters are on cpu, and a CUDA graph is of one GPU"):
        qs.StepGraph(print, model, FusedAdam(model.parameters(), lr=1e-3, capturable=True))
    with pytest.raises(ConfigurationError, match=re.escape("StepGraph(optimizer='adam'): it must be")):
        qs.StepGraph(print, model, "adam")  # type: ignore[arg-type]


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
    assert "the model" in told and "StepGraph do not take what DistributedDataParallel wraps" in told


def test_arguments_of_other_types_are_refused() -> None:
    training = Training()
    step = qs.StepGraph(training.step, training.model, training.optimizer)
    with pytest.raises(ConfigurationError, match="argument 0 is a Training; a step takes tensors and constants"):
        step(training)
    with pytest.raises(ConfigurationError, match=r"argument 0\['x'\] requires a gradient, which a replay would leave"):
        step({"x": batch(0)["x"].requires_grad_()})


def test_what_cannot_be_captured_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()

    def fail() -> None:
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    class Graph:
        def __init__(self, *_: object, **__: object) -> None: ...

        def __enter__(self) -> None: ...

        def __exit__(self, *_: object) -> None: ...

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", Graph)
    with pytest.raises(UnsupportedOperationError, match=r"cannot be captured .operation not permitted[^\n]*waits for"):
        step_graph.recorded(fail)
