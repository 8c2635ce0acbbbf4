"""`torch.compile(mode="reduce-overhead")`: which operators CUDA graphs hold, and training with them against eager.

On a CPU Inductor cuts a function where it would for a GPU, and what a graph would hold runs again and leaves nothing
behind, as a replay does. The graphs themselves are tried on a GPU.
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import quantshard as qs
from quantshard import private_torch
from quantshard.collectives.delayed_scaling import PendingAmaxes
from quantshard.modules.contexts import pending_amaxes
from quantshard.modules.gemms import graph_state
from quantshard.modules.graphs.recorder import states_preserved
from quantshard.optimizers import FusedAdam
from quantshard.private_torch import lookup
from tests.distributed.models import RECIPES, bits
from tests.modules.graphed import module_of

pytestmark = pytest.mark.filterwarnings("ignore:.*Function'> should not be instantiated:DeprecationWarning")
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

WIDTH, TOKENS, STEPS = 32, 16, 4


@pytest.fixture(autouse=True)
def compiled_anew() -> Iterator[None]:
    torch._dynamo.reset()
    gc.collect()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("name", ["read_amaxes", "record_amaxes", "draw", "fetch_copy", "record_forward_amaxes"])
def test_operators_of_state_are_marked(name: str) -> None:
    assert torch.Tag.cudagraph_unsafe in getattr(torch.ops.quantshard, name).default.tags


def test_a_handle_keeps_its_address() -> None:
    """A CUDA graph that copied it would not know the module."""
    marked = torch.empty(1)
    torch._dynamo.mark_static_address(marked, guard=False)
    layers = [layer := qs.Linear(8, 8, device="cpu"), copy.deepcopy(layer)]
    assert all(vars(layer._handle) == vars(marked) != {} for layer in layers)
    assert len({layer._handle.data_ptr() for layer in layers}) == 2


# Without a GPU ---------------------------------------------------------------------------------------------------


class Pair(nn.Module):
    """Two linear layers, and before and between them what Inductor compiles; as exact there as eagerly."""

    def __init__(self, recipe: Any) -> None:
        super().__init__()
        torch.manual_seed(3)
        with qs.quantized_model_init(recipe=recipe):
            self.first, self.second = (qs.Linear(WIDTH, WIDTH, device="cpu") for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.second((self.first(x * 0.5)).relu()) * 2
        return y


class HeldParts:
    """What Inductor would give to CUDA graphs. `runs`: whether the state of layers was read inside of these or outside.

    All that they leave with the host is undone, but of their first run, which is the one that warms a graph up.
    """

    def __init__(self, model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
        self.model, self.count, self.inside = model, 0, False
        self.runs: set[bool] = set()
        live_state = graph_state._live_state

        def watched_state(*args: Any) -> Any:
            self.runs.add(self.inside)
            return live_state(*args)

        monkeypatch.setattr(graph_state, "_live_state", watched_state)

    def wrap(self, part: Callable[[list[Any]], Any], _: Any) -> Callable[[list[Any]], Any]:
        warm = False
        self.count += 1

        def run(args: list[Any]) -> Any:
            nonlocal warm
            assert all(isinstance(arg, Tensor) for arg in args), "what an operator returns is apart from it"
            self.inside = True
            try:
                if not warm:
                    warm = True
                    return part(args)
                with (
                    pending_amaxes.amaxes_noted_in(PendingAmaxes(), PendingAmaxes()),
                    states_preserved([self.model], torch.device("cpu")),
                ):
                    return part(args)
            finally:
                self.inside = False

        return run


@pytest.fixture
def cut_as_on_a_gpu() -> Iterator[Callable[[HeldParts], None]]:
    from torch._inductor import scheduler, utils

    with mock.patch.object(scheduler.BaseSchedulerNode, "is_gpu", lambda self: True):
        yield lambda parts: utils.set_customized_partition_wrappers(parts.wrap)
    utils.set_customized_partition_wrappers(None)  # type: ignore[arg-type]


def trained(model: nn.Module, recipe: Any, call: Callable[[Tensor], Tensor]) -> list[Any]:
    """Outputs and gradients of some steps of training, and the bits of all that a checkpoint holds."""
    optimizer = FusedAdam(model.named_parameters(), lr=1e-2)
    seen: list[Any] = []
    for step in range(STEPS):
        x = torch.randn(TOKENS, WIDTH, generator=torch.Generator().manual_seed(step)).mul_(1 + step).requires_grad_()
        with qs.autocast(recipe=recipe):
            y = call(x)
        y.square().sum().backward()
        seen += [y.detach(), x.grad, *(param.grad for param in model.parameters())]
        optimizer.step()
        optimizer.zero_grad()
    return [*seen, bits(model, optimizer)]


def test_a_version_that_cuts_at_no_operator_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    gone = lookup.MissingName("torch._inductor.utils.NO_SUCH_LIST", "torch.compile of a layer")
    monkeypatch.setattr(private_torch.autograd, "_unsafe", lambda: gone)
    with pytest.raises(qs.errors.TorchVersionError, match="NO_SUCH_LIST"):
        private_torch.check_order_is_kept()


# On a GPU --------------------------------------------------------------------------------------------------------


def steps_on_a_gpu(
    names: list[str], recipe: Any, mode: str | None, micro_batches: int = 1, **options: Any
) -> list[Any]:
    """As `trained`, of other modules. What a graph returns is copied before the next one runs; gradients that several
    runs add to have memory of their own from the start, for else they are what the first one returned."""
    model = nn.Sequential(*[module_of(name, recipe, "cuda", **options) for name in names])
    if mode is not None:
        model.compile(fullgraph=True, mode=mode)
    optimizer = FusedAdam(model.named_parameters(), lr=1e-2, weight_decay=0.1)
    seen: list[Any] = []
    if micro_batches > 1:
        for param in model.parameters():
            param.grad = torch.zeros(param.shape, dtype=param.dtype, device="cuda")
    for step in range(6):
        for micro in range(micro_batches):
            generator = torch.Generator().manual_seed(10 * step + micro)
            x = torch.randn(96, 1, 64, generator=generator).to("cuda", torch.bfloat16).requires_grad_()
            with qs.autocast(recipe=recipe):
                y = model(x)
            y.float().sin().square().mean().backward()
            assert x.grad is not None
            seen += [y.detach().clone(), x.grad.clone()]
        seen += [param.grad.clone() for param in model.parameters() if param.grad is not None]
        optimizer.step()
        optimizer.zero_grad(set_to_none=micro_batches == 1)
    return [*seen, bits(model, optimizer)]


def assert_same(found: list[Any], expected: list[Any]) -> None:
    for index, (a, b) in enumerate(zip(found, expected, strict=True)):
        assert torch.equal(a, b) if isinstance(a, Tensor) else a == b, index


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How often each replay of a CUDA graph came, as ones."""
    found: list[int] = []
    real = torch.cuda.CUDAGraph.replay
    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", lambda graph: found.append(1) or real(graph))
    return found


@needs_gpu
@pytest.mark.parametrize("recipe", RECIPES)
def test_steps_have_the_bits_of_those_compiled_without_graphs(recipe: str, replays: list[int]) -> None:
    """1 process: weights that the optimizer changes, histories, draws; of what records the parts between are held."""
    found, plain = (
        steps_on_a_gpu(["TransformerLayer", "LayerNormMLP"], RECIPES[recipe], mode)
        for mode in ("reduce-overhead", "default")
    )
    assert_same(found, plain)
    assert len(replays) >= 2 * 4  # forward and backward of steps 3 to 6; the first two warm up and capture


@needs_gpu
@pytest.mark.parametrize("quantized", [True, False])
@pytest.mark.parametrize("recipe", RECIPES)
def test_steps_of_two_micro_batches_have_the_bits_of_eager(recipe: str, quantized: bool, replays: list[int]) -> None:
    """1 process. What Inductor computes itself in this module, an addition, is as in eager."""
    found, eager = (
        steps_on_a_gpu(["LayerNormMLP"], RECIPES[recipe], mode, 2, quantized=quantized)
        for mode in ("reduce-overhead", None)
    )
    assert_same(found, eager)
    assert replays


@needs_gpu
@pytest.mark.filterwarnings("ignore:Unable to hit fast path of CUDAGraphs")  # each layer waits for the others' backward
def test_layers_compiled_one_by_one_and_moved() -> None:
    """1 process: one compiled function, of which each layer has graphs of its own, by the address of its handle."""

    def steps(compiled: bool) -> list[Tensor]:
        layers = nn.Sequential(*[module_of("LayerNormMLP", "current", "cpu") for _ in range(3)]).to("cuda")
        assert all(layer._handle.is_cuda for layer in layers)
        seen = []
        for scale, layer in enumerate(layers):
            layer.layer_norm_weight.data.mul_(1 + scale)
            if compiled:
                layer.compile(fullgraph=True, mode="reduce-overhead")
        for step in range(4):
            x = torch.randn(96, 64, generator=torch.Generator().manual_seed(step)).to("cuda", torch.bfloat16)
            with qs.autocast(recipe="current"):
                y = layers(x.requires_grad_())
            y.float().square().mean().backward()
            seen += [y.detach().clone(), *(param.grad.clone() for param in layers.parameters())]
            layers.zero_grad()
        return seen

    assert_same(steps(True), steps(False))
