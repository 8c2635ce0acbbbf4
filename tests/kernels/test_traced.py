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
from tests.covering import exhaustive

pytest.importorskip("triton")
from quantshard.kernels import graph_launch

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
            *[("linear", recipe, "aot_eager") for recipe in RECIPES],
            *[(kind, "current", "aot_eager") for kind in MODULES if kind != "layer"],
            *[("linear", recipe, "inductor") for recipe in ("current", "delayed", "nvfp4")],
            ("mlp", "delayed", "aot_eager"),
        ],
    ),
)
def test_a_traced_graph_has_the_bits_of_eager_code(kind: str, recipe: str, backend: str, recorded: list[str]) -> None:
    expected = trained(kind, recipe, None)
    compiled = trained(kind, recipe, backend)
    assert recorded
    assert all(map(torch.equal, expected, compiled))


@pytest.mark.parametrize("recompute", ["inside", "outside"])
@pytest.mark.parametrize(
    "recipe", ["current", *(pytest.param(name, marks=pytest.mark.exhaustive) for name in RECIPES[1:])]
)
def test_checkpointed_layers(recipe: str, recompute: str, recorded: list[str]) -> None:
    expected = trained("linear", recipe, None)
    compiled = trained("linear", recipe, "aot_eager", recompute=recompute)
    assert recorded
    assert all(map(torch.equal, expected, compiled))


@pytest.mark.parametrize("recipe", RECIPES)
def test_kernels_write_what_they_declare(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors that a kernel does not declare as written are unchanged after its launch."""
    launched: set[str] = set()
    undeclared: list[str] = []

    def checked(kernel: Any, grid: tuple[int, ...], args: Any, options: Any) -> None:
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
