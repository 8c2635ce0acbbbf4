"""Training of small modules whose `forward` may be captured, and graphs for machines without a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import quantshard as qs
from quantshard.modules.graphs import callables
from quantshard.modules.graphs.module_graph import PassRecord
from quantshard.optimizers import FusedAdam
from tests.distributed.models import RECIPES, bits

TOKENS, HIDDEN = 96, 64
MODULES = ("Linear", "LayerNormMLP", "TransformerLayer", "converted", "experts")


class RerunGraph:
    """What a graph is to those who replay it: the same work once more, on the same tensors, its results in the tensors
    of the first time, and nothing that Python did besides; autograd does not see that they are written."""

    def __init__(self, work: Callable[[], PassRecord]) -> None:
        self.work, self.first = work, work()

    def replay(self) -> None:
        found = self.work()
        old = [*self.first.tensors, *(note.amaxes for note in self.first.notes)]
        new = [*found.tensors, *(note.amaxes for note in found.notes)]
        with torch.no_grad():
            for into, values in zip(old, new, strict=True):
                assert (into is None) == (values is None)
                if into is not None:
                    into.data.copy_(values)


class RerunRecorder:
    """A `GraphRecorder` without CUDA: what is recorded is run again where a graph would be replayed."""

    def __init__(self, *_: Any) -> None:
        self.recorded = 0

    @contextmanager
    def warming(self) -> Iterator[None]:
        yield

    recording = warming

    def record(self, owner: str, work: Callable[[], PassRecord]) -> tuple[Callable[[], None], PassRecord]:
        graph = RerunGraph(work)
        return graph.replay, graph.first


@pytest.fixture
def rerun(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs that run on a CPU."""
    monkeypatch.setattr(callables, "GraphRecorder", RerunRecorder)
    monkeypatch.setattr(callables.recorders, "graph_device", lambda *_: torch.device("cpu"))


def module_of(name: str, recipe: Any, device: str, quantized: bool = True, dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(5)
    made: dict[str, Any] = {"params_dtype": torch.bfloat16, "device": device}
    if name == "converted":
        layers = [nn.Linear(HIDDEN, 160), nn.GELU(), nn.Linear(160, HIDDEN)]
        model: nn.Module = nn.Sequential(*layers).to(device, torch.bfloat16)
        qs.convert(model, recipe)
        return model
    with qs.quantized_model_init(quantized, recipe=recipe):
        if name == "Linear":
            return qs.Linear(HIDDEN, HIDDEN, **made)
        if name == "experts":
            return Experts(**made)
        if name == "LayerNormMLP":
            return qs.LayerNormMLP(HIDDEN, 160, normalization="RMSNorm", activation="swiglu", **made)
        return qs.TransformerLayer(
            HIDDEN, 160, 4, 2, hidden_dropout=dropout, attention_dropout=0.0, normalization="RMSNorm",
            activation="swiglu", attention_backend="math", **made,
        )  # fmt: skip


class Experts(nn.Module):
    """As many rows for each as a capture fixes, of one none."""

    SPLITS = (TOKENS // 2, 0, TOKENS // 4 + 1, TOKENS // 4 - 1)

    def __init__(self, **made: Any) -> None:
        super().__init__()
        self.layer = qs.GroupedLinear(len(self.SPLITS), HIDDEN, HIDDEN, **made)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x, self.SPLITS)
        return y


class Training:
    """A model of one or more modules, trained by micro-batches; what it computes on the way is kept."""

    def __init__(
        self,
        recipe: str,
        modules: list[nn.Module],
        optimizer: Callable[..., Any] = FusedAdam,
        micro_batches: int = 2,
    ) -> None:
        self.recipe, self.model, self.micro_batches = recipe, nn.Sequential(*modules), micro_batches
        self.device = next(self.model.parameters()).device
        self.optimizer = optimizer(self.model.named_parameters(), lr=1e-2, weight_decay=0.1)
        self.seen: list[Tensor] = []

    def data(self, number: int) -> Tensor:
        generator = torch.Generator().manual_seed(number)
        return torch.randn(TOKENS, 1, HIDDEN, generator=generator).to(self.device, torch.bfloat16)

    def sample(self) -> tuple[Tensor, ...]:
        return (self.data(99).requires_grad_(),)

    def capture(self, several: bool = False, **options: Any) -> None:
        """Capture the model as one module, or each of its modules."""
        options = {"recipe": RECIPES[self.recipe]} | options
        if several:
            parts = tuple(self.model)
            assert qs.make_graphed_callables(parts, [self.sample()] * len(parts), **options) == parts
        else:
            assert qs.make_graphed_callables(self.model, self.sample(), **options) is self.model

    def forward(self, x: Tensor) -> Tensor:
        with qs.autocast(recipe=RECIPES[self.recipe]):
            y: Tensor = self.model(x)
        return y

    def step(self, number: int) -> None:
        for micro in range(self.micro_batches):
            x = self.data(10 * number + micro).requires_grad_()
            loss = (self.forward(x).float() * (1 + micro)).sin().square().mean()
            loss.backward()
            assert x.grad is not None
            self.seen += [loss.detach(), x.grad]
        self.seen += [param.grad.clone() for param in self.model.parameters() if param.grad is not None]
        self.optimizer.step()
        self.optimizer.zero_grad()

    def run(self, steps: int = 5) -> dict[str, str]:
        """Train, and give the bits of all that a checkpoint holds."""
        for number in range(steps):
            self.step(number)
        return bits(self.model, self.optimizer)


def assert_same(eager: Training, graphed: Training, steps: int = 5) -> None:
    """Losses, gradients, parameters, histories, draws and states of the optimizer, bit for bit."""
    results = []
    for training in (eager, graphed):
        torch.manual_seed(12)  # of dropout
        results.append(training.run(steps))
    assert len(eager.seen) == len(graphed.seen) and len(eager.seen) > steps
    assert all(torch.equal(a, b) for a, b in zip(eager.seen, graphed.seen, strict=True))
    assert all(loss.isfinite().all() for loss in eager.seen)
    assert results[0] == results[1]


class Failing(nn.Module):
    """A module whose forward fails after so many runs."""

    def __init__(self, inner: nn.Module, runs: int) -> None:
        super().__init__()
        self.inner, self.runs = inner, runs

    def forward(self, x: Tensor) -> Any:
        self.runs -= 1
        if self.runs < 0:
            raise ValueError("enough")
        return self.inner(x)
