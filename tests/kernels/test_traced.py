"""Compiled graphs that contain kernel launches: the bits of eager code, and only the declared tensors are written."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
import torch._functorch.config as functorch
import torch._inductor.config as inductor
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import quantshard as qs
from quantshard.formats import Orientation
from tests.covering import exhaustive
from tests.distributed.models import RECIPES as BY_RECIPE
from tests.modules.test_reduce_overhead import HeldParts, Pair, assert_same, cut_as_on_a_gpu
from tests.modules.test_reduce_overhead import trained as steps

pytest.importorskip("triton")
from quantshard.kernels import graph_launch
from quantshard.kernels.optimizer import history

__all__ = ["cut_as_on_a_gpu"]  # a fixture

pytestmark = pytest.mark.usefixtures("kernels_on_cpu")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
OPTIONS: dict[str, Any] = {"params_dtype": torch.bfloat16, "device": DEVICE}
NO_DROPOUT = {"hidden_dropout": 0.0, "attention_dropout": 0.0}
MODULES: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: qs.Linear(48, 80, **OPTIONS),
    "norm and linear": lambda: qs.LayerNormLinear(48, 80, **OPTIONS),
    "mlp": lambda: qs.LayerNormMLP(48, 80, activation="swiglu", **OPTIONS),
    "layer": lambda: qs.TransformerLayer(64, 96, 4, **NO_DROPOUT, **OPTIONS),
}


def trained(kind: str, recipe: str, backend: str | None, bad: bool = False, recompute: str = "") -> list[Tensor]:
    """The output of a module and all gradients, compiled by a backend or eager (None).

    `bad`: gradients have an inf. `recompute`: activation checkpointing "inside" or "outside" the compiled function.
    """
    torch.manual_seed(0)
    with qs.quantized_model_init(recipe=recipe):
        module = MODULES[kind]()
    width = 64 if kind == "layer" else 48
    x = torch.randn(5, 2, width, generator=torch.Generator().manual_seed(1)).to(DEVICE, torch.bfloat16).requires_grad_()
    forward: Any = module
    if recompute == "inside":
        forward = partial(checkpoint, module, use_reentrant=False)
    if backend is not None:
        forward = torch.compile(forward, fullgraph=True, backend=backend)

    def step(x: Tensor) -> Tensor:
        with qs.autocast(recipe=recipe):
            out: Tensor = forward(x)
            return out

    y = checkpoint(step, x, use_reentrant=False) if recompute == "outside" else step(x)
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(2)).to(y)
    if bad:
        dy[0, 0, 0] = torch.inf
    y.backward(dy)
    grads = [param.grad for param in module.parameters()]
    assert x.grad is not None
    return [y.detach(), x.grad, *[grad for grad in grads if grad is not None]]


RECIPES = ("delayed", "current", "rowwise", "block", "mxfp8", "nvfp4")


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Names of the kernels that are recorded in graphs."""
    names: list[str] = []
    record = graph_launch.record

    def counted(kernel: Any, *others: Any) -> None:
        names.append(kernel.fn.__name__)
        record(kernel, *others)

    monkeypatch.setattr(graph_launch, "record", counted)
    torch._dynamo.reset()
    with functorch.patch(enable_autograd_cache=False), inductor.patch(fx_graph_cache=False):
        yield names


@pytest.mark.parametrize(
    ("kind", "recipe", "backend"),
    exhaustive(
        product(MODULES, RECIPES, ("aot_eager", "inductor")),
        [
            *[("linear", recipe, "aot_eager") for recipe in ("block", "nvfp4", "delayed")],
            ("mlp", "current", "aot_eager"),
            ("linear", "current", "inductor"),
            ("mlp", "delayed", "inductor"),
        ],
    ),
)
def test_a_traced_graph_has_the_bits_of_eager_code(kind: str, recipe: str, backend: str, recorded: list[str]) -> None:
    expected = trained(kind, recipe, None)
    compiled = trained(kind, recipe, backend)
    assert recorded
    assert all(map(torch.equal, expected, compiled))


@pytest.mark.parametrize(
    ("recipe", "recompute"), exhaustive(product(RECIPES, ["inside", "outside"]), [("current", "inside")])
)
def test_checkpointed_layers(recipe: str, recompute: str, recorded: list[str]) -> None:
    expected = trained("linear", recipe, None)
    compiled = trained("linear", recipe, "aot_eager", recompute=recompute)
    assert recorded
    assert all(map(torch.equal, expected, compiled))


def test_a_copy_that_was_not_gathered_is_fetched(recorded: list[str]) -> None:
    """FSDP2 gathers one of two copies for forward, and a graph keeps the components that it was traced with."""
    recipe = qs.recipe.MXFP8BlockScaling(enable_2d_quantization=False)

    def run(compiled: bool) -> list[Tensor]:
        torch.manual_seed(0)
        with qs.quantized_model_init(recipe=recipe):
            module = qs.Linear(64, 96, **OPTIONS)
        storage = module.weight.quantized_storage
        columnwise = storage.spec.format.copies[Orientation.COLUMNWISE]
        missing = {name: storage.components.pop(name) for name in (columnwise.codes.name, columnwise.scale.name)}
        storage.fetch = lambda _: missing
        x = torch.randn(32, 64, generator=torch.Generator().manual_seed(1)).to(DEVICE, torch.bfloat16).requires_grad_()
        with qs.autocast(recipe=recipe):
            y = (torch.compile(module, backend="aot_eager", fullgraph=True) if compiled else module)(x)
        y.sum().backward()
        return [y.detach(), x.grad, module.weight.grad]

    expected = run(False)
    assert all(map(torch.equal, expected, run(True)))
    assert recorded


@pytest.mark.slow
@pytest.mark.skipif(DEVICE == "cuda", reason="tests/modules/test_reduce_overhead.py has the graphs themselves")
@pytest.mark.parametrize("recipe", ["delayed", "nvfp4"])
def test_replays_of_parts_leave_nothing_behind(
    recipe: str, cut_as_on_a_gpu: Callable[[HeldParts], None], monkeypatch: pytest.MonkeyPatch, recorded: list[str]
) -> None:
    """What a CUDA graph would contain reads no state and draws nothing: its state is undone after each run."""
    asked = BY_RECIPE[recipe]
    eager = steps(plain := Pair(asked), asked, plain)
    parts = HeldParts(model := Pair(asked), monkeypatch)
    cut_as_on_a_gpu(parts)
    assert_same(steps(model, asked, torch.compile(model, fullgraph=True)), eager)
    assert parts.count >= 2 and recorded


@pytest.mark.parametrize("recipe", RECIPES)
def test_kernels_write_what_they_declare(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors that a kernel does not declare as written are unchanged after its launch."""
    launched: set[str] = set()
    undeclared: list[str] = []

    def checked(kernel: Any, grid: tuple[int, ...], args: Any, options: Any) -> None:
        if kernel.fn.__module__ == history.__name__:  # in no graph: `read_state` and `record_amaxes` launch these
            kernel[grid](*args, **options)
            return
        arguments = graph_launch.LaunchArguments(graph_launch.written_paths(kernel))
        for value, name in zip(args, kernel.arg_names, strict=False):
            arguments.template(value, (name,))
        before = [tensor.clone() for tensor in arguments.read]
        kernel[grid](*args, **options)
        launched.add(kernel.fn.__name__)
        if not all(torch.equal(_bytes(a), _bytes(b)) for a, b in zip(before, arguments.read, strict=True)):
            undeclared.append(kernel.fn.__name__)

    monkeypatch.setattr(graph_launch, "record", checked)
    with graph_launch.traced_launches():
        trained("linear", recipe, None, bad=True)
        trained("mlp", recipe, None)
    assert "quantize_kernel" in launched or "deliver_kernel" in launched
    assert undeclared == []


def _bytes(x: Tensor) -> Tensor:
    return x.contiguous().flatten().view(torch.uint8)
