"""Compiled graphs that contain kernel launches: the bits of eager code, and only the declared tensors are written."""

from __future__ import annotations

import base64
import copy
import gc
import pickle
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product
from typing import Any
from unittest import mock

import pytest
import torch
import torch._functorch.config as functorch
import torch._inductor.config as inductor
from functorch.compile import make_boxed_func
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch.utils.checkpoint import checkpoint

import quantshard as qs
from quantshard.errors import UnsupportedOperationError
from quantshard.formats import FP8_E4M3, Orientation, Scaling
from quantshard.gemm import predictions
from quantshard.modules.gemms import graph_state
from quantshard.optimizers import FusedAdam
from quantshard.recipe import Gemm, QuantSpec, TableRecipe, TensorRole, resolve
from quantshard.tensor import observation
from tests.covering import exhaustive
from tests.distributed.models import OF_WEIGHTS, RECIPES as BY_RECIPE
from tests.modules.test_reduce_overhead import HeldParts, Pair, assert_same, cut_as_on_a_gpu, trained as steps

pytest.importorskip("triton")
from quantshard.kernels import graph_launch
from quantshard.kernels.optimizer import multi_tensor

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
        product(MODULES, (*RECIPES, *OF_WEIGHTS), ("aot_eager", "inductor")),
        [
            *[("linear", recipe, "aot_eager") for recipe in ("block", "nvfp4")],
            ("mlp", "nvfp4-weights", "aot_eager"),
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


CHECKPOINTED = [cell for cell in product(RECIPES, ["inside", "outside"]) if cell != ("delayed", "inside")]


@pytest.mark.parametrize(("recipe", "recompute"), exhaustive(CHECKPOINTED, [("current", "inside")]))
def test_checkpointed_layers(recipe: str, recompute: str, recorded: list[str]) -> None:
    expected = trained("linear", recipe, None)
    compiled = trained("linear", recipe, "aot_eager", recompute=recompute)
    assert recorded
    assert all(map(torch.equal, expected, compiled))


def test_a_recomputation_outside_of_its_autocast_is_refused(recorded: list[str]) -> None:
    module = built("linear", "current")
    compiled = torch.compile(module, backend="aot_eager")
    with qs.autocast(recipe="current"):
        y = checkpoint(compiled, data(5, 2, 48), use_reentrant=False)
    with pytest.raises(Exception, match="enter autocast inside the checkpointed function"):
        y.sum().backward()


def built(kind: str, recipe: Any) -> nn.Module:
    torch.manual_seed(0)
    with qs.quantized_model_init(recipe=recipe):
        return MODULES[kind]()


def data(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(DEVICE, torch.bfloat16).requires_grad_()


def results(module: nn.Module, call: Any, recipe: Any, *inputs: Tensor) -> list[Tensor]:
    """Outputs, all gradients, and the state after a pass for each input."""
    found: list[Any] = []
    for x in inputs:
        with qs.autocast(recipe=recipe):
            y = call(x)
        y.float().square().sum().backward()
        found += [y.detach(), x.grad]
    return [*found, *(param.grad for param in module.parameters()), *module.state_dict().values()]


def same(kind: str, recipe: Any, shapes: Sequence[tuple[int, ...]], **options: Any) -> bool:
    """Whether a compiled module has the bits of an eager one."""
    eager, module = built(kind, recipe), built(kind, recipe)
    expected = results(eager, eager, recipe, *(data(*shape) for shape in shapes))
    compiled = results(module, torch.compile(module, **options), recipe, *(data(*shape) for shape in shapes))
    return all(map(torch.equal, expected, compiled))


@pytest.mark.parametrize(
    ("kind", "recipe", "dynamic"),
    exhaustive(
        [("linear", "nvfp4", None), ("linear", "delayed", True), ("mlp", "current", True), ("mlp", "delayed", None)],
        [("linear", "nvfp4", None), ("mlp", "delayed", None), ("linear", "delayed", True)],
    ),
)
def test_each_length_has_a_graph(kind: str, recipe: str, dynamic: bool | None, recorded: list[str]) -> None:
    """Launches have fixed sizes, also where Dynamo would make them symbolic."""
    torch._dynamo.utils.counters.clear()
    shapes = [(tokens, 2, 48) for tokens in (21, 16, 9)]
    assert same(kind, recipe, shapes, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 3


@pytest.mark.parametrize("recipe", ["delayed", pytest.param("nvfp4", marks=pytest.mark.exhaustive)])
def test_a_graph_that_is_run_as_it_is(recipe: str, recorded: list[str]) -> None:
    assert same("linear", recipe, [(5, 2, 48)] * 2, backend="eager", fullgraph=True)


@pytest.mark.parametrize("recipe", ["delayed", pytest.param("nvfp4", marks=pytest.mark.exhaustive)])
def test_layers_compiled_one_by_one_share_a_graph(recipe: str, recorded: list[str]) -> None:
    with qs.quantized_model_init(recipe=recipe):
        layers = nn.Sequential(*[qs.Linear(48, 48, **OPTIONS) for _ in range(3)])
    layers.append(copy.deepcopy(layers[0]))
    again = copy.deepcopy(layers)
    torch._dynamo.utils.counters.clear()
    for layer in layers:
        layer.compile(fullgraph=True, backend="aot_eager")
    found = [results(model, model, recipe, data(16, 48), data(16, 48)) for model in (layers, again)]
    assert all(map(torch.equal, *found))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def trained_twice(module: nn.Module, call: Any, optimizer: FusedAdam, recipes: Sequence[str]) -> list[Tensor]:
    """Outputs of a step by each recipe, and the state after them."""
    outputs = []
    for recipe in recipes:
        outputs += results(module, call, recipe, data(16, 48))[:2]
        optimizer.step()
        optimizer.zero_grad()
    return [*outputs, *module.state_dict().values()]


@pytest.mark.parametrize(
    ("stored", "recipes"), [("current", ("current",) * 3), (None, ("current", "block", "current"))]
)
def test_an_optimizer_built_before_and_recipes_that_change(
    stored: str | None, recipes: Sequence[str], recorded: list[str]
) -> None:
    """Compiled steps have the bits of eager ones. Weights in high precision follow the recipe of each step."""
    outcomes = []
    for is_compiled in (False, True):
        torch.manual_seed(0)
        with qs.quantized_model_init(enabled=stored is not None, recipe=stored or "current"):
            module = qs.Linear(48, 48, **OPTIONS)
        optimizer = FusedAdam(module.named_parameters(), lr=1e-2)
        if is_compiled:
            module.compile(fullgraph=True, backend="aot_eager")
        outcomes.append(trained_twice(module, module, optimizer, recipes))
    assert all(map(torch.equal, *outcomes))


def test_hooks_run_inside_a_compiled_function(recorded: list[str]) -> None:
    outcomes = []
    for is_compiled in (False, True):
        torch.manual_seed(0)
        with qs.quantized_model_init(recipe="current"):
            module = nn.Sequential(qs.Linear(48, 48, **OPTIONS), qs.Linear(48, 48, **OPTIONS))
        module[0].register_forward_hook(lambda layer, inputs, output: 2 * output)
        call = torch.compile(module, fullgraph=True, backend="aot_eager") if is_compiled else module
        outcomes.append(results(module, call, "current", data(16, 48)))
    assert all(map(torch.equal, *outcomes))


def test_weights_of_another_recipe_are_refused(recorded: list[str]) -> None:
    compiled = torch.compile(built("linear", "mxfp8"), backend="aot_eager")
    with pytest.raises(Exception, match=r"weight of a compiled layer .* enter autocast with the recipe of the weights"):
        with qs.autocast(recipe="current"):
            compiled(data(5, 48))


def test_fallbacks_are_refused_under_strict(recorded: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(predictions, "fallbacks", lambda *_: ("dequantized",))
    compiled = torch.compile(built("linear", "current"), backend="aot_eager")
    with pytest.raises(Exception, match=r"FallbackError.*weight"), qs.autocast(recipe="current", strict=True):
        compiled(data(5, 48))


@pytest.mark.parametrize("recipe", ["current", "delayed"])
def test_a_module_that_is_gone_before_backward(recipe: str, recorded: list[str]) -> None:
    """Backward needs its histories only."""
    module = built("linear", recipe)
    compiled, x = torch.compile(module, backend="aot_eager"), data(5, 48)
    with qs.autocast(recipe=recipe):
        loss = compiled(x).sum()
    del module, compiled
    torch._dynamo.reset()
    gc.collect()
    if recipe == "current":
        loss.backward()
        assert x.grad is not None
        return
    with pytest.raises(UnsupportedOperationError, match=r"'weight'.*deleted before backward"):
        loss.backward()


def test_a_structure_of_another_process_is_told() -> None:
    with pytest.raises(UnsupportedOperationError, match="0123 was compiled by another process"):
        graph_state.structure_of("0123")


def test_a_second_call_draws_words_of_its_own(recorded: list[str]) -> None:
    """Of one input: a partitioner would make one call of two, where a call leaves nothing behind."""
    rounded = QuantSpec(FP8_E4M3, Scaling(stochastic_rounding=True))
    table = dict.fromkeys(resolve("current").table, QuantSpec(FP8_E4M3))
    recipe = TableRecipe(
        "rounded inputs", table | {(TensorRole.INPUT, gemm): rounded for gemm in (Gemm.FPROP, Gemm.WGRAD)}
    )
    module = built("linear", recipe)
    again = copy.deepcopy(module)

    def twice(x: Tensor, module: nn.Module = module) -> Tensor:
        return torch.stack([module(x), module(x)])

    compiled = results(module, torch.compile(twice, backend="aot_eager", fullgraph=True), recipe, data(5, 48))
    assert not torch.equal(*compiled[0])
    assert all(map(torch.equal, compiled, results(again, partial(twice, module=again), recipe, data(5, 48))))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_layers_without_kernels_run_eagerly(dtype: torch.dtype, recorded: list[str]) -> None:
    """In float64, or while an observer reads operands."""
    torch.manual_seed(0)
    with qs.quantized_model_init(recipe="current"):
        module = qs.LayerNormMLP(48, 80, params_dtype=dtype, device=DEVICE)
    again = copy.deepcopy(module)
    with pytest.MonkeyPatch.context() as patch:
        if dtype is torch.bfloat16:
            patch.setattr(observation, "active", mock.Mock())
        compiled = results(module, torch.compile(module), "current", data(5, 48).to(dtype).detach().requires_grad_())
    assert not recorded
    expected = results(again, again, "current", data(5, 48).to(dtype).detach().requires_grad_())
    assert all(map(torch.equal, compiled, expected))


# An input of several layers -------------------------------------------------------------------------------------------


class Readers(nn.Module):
    """Projections of one tensor, which may change between the first and the second of them, and one of their sum."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            setattr(self, name, nn.Linear(32, 32, bias=False, dtype=torch.bfloat16, device=DEVICE))
        self.is_changed = False

    def forward(self, x: Tensor) -> Tensor:
        x = x * 2
        q = self.q_proj(x)
        if self.is_changed:
            x.add_(1)
        return self.o_proj(q * 2 + self.k_proj(x) + self.v_proj(x))


@pytest.mark.parametrize(
    ("recipe", "is_changed", "recompute", "count"),
    [
        ("current", False, False, 2),
        pytest.param("mxfp8", False, False, 2, marks=pytest.mark.exhaustive),
        ("current", True, False, 3),
        ("current", False, True, 2),
        ("delayed", False, False, 4),
    ],
)
def test_a_graph_quantizes_an_input_once_for_all_layers(
    recipe: str, is_changed: bool, recompute: bool, count: int, recorded: list[str]
) -> None:
    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return make_boxed_func(graph.forward)

    found = []
    for compiles in (False, True):
        torch.manual_seed(0)
        model = Readers()
        qs.convert(model, recipe)
        model.is_changed = is_changed
        call: Any = partial(checkpoint, model, use_reentrant=False) if recompute else model
        if compiles:
            call = torch.compile(call, backend=aot_autograd(fw_compiler=keep, bw_compiler=keep), fullgraph=True)
        found.append(results(model, call, recipe, data(40, 32)))
    assert all(map(torch.equal, *found))
    assert launches(graphs[0])["quantize_kernel"] == count


@pytest.mark.parametrize("recipe", RECIPES)
def test_no_arithmetic_of_scales_is_left_to_the_compiler(recipe: str, recorded: list[str]) -> None:
    """Of weights in high precision too. On a GPU, Inductor's division is approximate."""
    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return make_boxed_func(graph.forward)

    with qs.quantized_model_init(enabled=False, recipe=recipe):
        module = qs.Linear(48, 80, **OPTIONS)
    call = torch.compile(module, backend=aot_autograd(fw_compiler=keep, bw_compiler=keep), fullgraph=True)
    results(module, call, recipe, data(32, 48))
    operations = {
        str(node.target).split(".")[1]
        for graph in graphs
        for node in graph.graph.nodes
        if node.op == "call_function"
        if str(node.target).startswith("aten.")
    }
    assert not operations & ARITHMETIC, operations


ARITHMETIC = {"div", "reciprocal", "mul", "pow", "exp2", "log2", "frexp", "ldexp", "round", "floor", "clamp"}


def launches(graph: torch.fx.GraphModule) -> Counter[str]:
    """Kernels in a graph, and how often each is launched."""
    programs = [arg for node in graph.graph.nodes for arg in node.kwargs.values() if isinstance(arg, str)]
    return Counter(pickle.loads(zlib.decompress(base64.b85decode(program)))[0][1] for program in programs)


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
@pytest.mark.parametrize("recipe", ["delayed", pytest.param("nvfp4", marks=pytest.mark.exhaustive)])
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
    assert parts.runs == {False}


@pytest.mark.parametrize("recipe", RECIPES)
def test_kernels_write_what_they_declare(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors that a kernel does not declare as written are unchanged after its launch."""
    launched: set[str] = set()
    undeclared: list[str] = []

    def checked(kernel: Any, grid: tuple[int, ...], args: Any, options: Any) -> None:
        if kernel.fn.__module__ == multi_tensor.__name__:  # in no graph: `read_state` and `record_amaxes` launch these
            kernel[grid](*args, **options)
            return
        arguments = graph_launch.LaunchArguments(kernel)
        for value, name in zip(args, kernel.arg_names, strict=False):
            arguments.expression(value, (name,))
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
