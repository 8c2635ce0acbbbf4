"""torch.compile of every module where no kernels run: quantized layers run eagerly between graphs, with the same bits.

Graphs that contain layers are in tests/kernels/test_traced.py and tests/kernels/test_compiled.py.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import quantshard as qs
from quantshard.errors import FallbackError
from quantshard.gemm import predictions
from quantshard.modules.contexts import pending_amaxes
from quantshard.tensor import observation
from tests.covering import exhaustive
from tests.distributed.models import RECIPES

# Dynamo itself makes an instance of every autograd.Function that it traces
pytestmark = pytest.mark.filterwarnings("ignore:.*Function'> should not be instantiated:DeprecationWarning")

ROOT = Path(__file__).parents[2]
WIDTH, TOKENS = 33, 7  # divide by nothing


class RotaryAttention(nn.Module):
    """Attention with rotary embedding: forward makes the angles."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.rotary = qs.RotaryPositionEmbedding(8)
        self.attention = qs.MultiheadAttention(
            WIDTH, 4, 8, num_gqa_groups=2, attention_dropout=0.0, input_layernorm=True, **options
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, rotary_pos_emb=self.rotary(x.shape[0]))


class Core(nn.Module):
    """Only the core attention; it has no weights."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.attend = qs.DotProductAttention(3, 11)

    def forward(self, x: Tensor) -> Tensor:
        heads = x.unflatten(-1, (3, 11))
        return self.attend(heads, heads, heads)


class FirstOf(nn.Module):
    """The sum of all outputs of a module that returns several."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Tensor:
        return sum(out.sum(-1) for out in self.module(x))


MODULES: dict[str, Callable[..., nn.Module]] = {
    "Linear": lambda **o: qs.Linear(WIDTH, 40, **o),
    "Linear without bias": lambda **o: qs.Linear(WIDTH, 40, bias=False, **o),
    "Linear returning bias": lambda **o: FirstOf(qs.Linear(WIDTH, 40, return_bias=True, **o)),
    "LayerNorm": lambda **o: qs.LayerNorm(WIDTH, **o),
    "RMSNorm": lambda **o: qs.RMSNorm(WIDTH, zero_centered_gamma=True, **o),
    "LayerNormLinear": lambda **o: FirstOf(qs.LayerNormLinear(WIDTH, 40, return_layernorm_output=True, **o)),
    "LayerNormMLP": lambda **o: qs.LayerNormMLP(WIDTH, 20, activation="swiglu", normalization="RMSNorm", **o),
    "DotProductAttention": Core,
    "MultiheadAttention": RotaryAttention,
    "TransformerLayer": lambda **o: qs.TransformerLayer(WIDTH, 50, 3, hidden_dropout=0.0, attention_dropout=0.0, **o),
}


KEEPING = ("delayed", "nvfp4", "mxfp8 two copies")
"""Recipes with something to keep between or within steps."""


SEVERAL_LAYERS = ("LayerNormMLP", "MultiheadAttention", "TransformerLayer")


EVALUATED = [("Linear", "delayed"), ("Linear", "nvfp4")]


def cells() -> list[Any]:
    """(Module, recipe, autocast inside, evaluated too), in turns: a linear layer with every recipe, every module with
    one.

    Modules differ in what is between their linear layers, which is the same to all recipes; but those with several
    of them are also tried with delayed scaling, which keeps a history for each; by `make test-all` alone with others.
    So are a linear layer with most recipes that keep nothing, evaluations of most, a linear layer with autocast both
    inside and outside, and attention, which is in a layer.
    """
    found = {("Linear", recipe, turn % 2 == 0) for turn, recipe in enumerate(RECIPES)}
    chosen = {(*cell[:2], cell[1] != "delayed" and cell[2]) for cell in found if cell[1] in (*KEEPING, "block")}
    found |= {("Linear", recipe, inside) for recipe in KEEPING for inside in (True, False)}
    for turn, name in enumerate(MODULES):
        cell = (name, list(RECIPES)[(turn + 3) % len(RECIPES)], turn % 2 == 0)
        found.add(cell)
        if name in SEVERAL_LAYERS:
            cell = (name, "delayed", turn % 2 == 0)
            found.add(cell)
        if name != "MultiheadAttention":
            chosen.add(cell)
    every = [(*cell, evaluate) for cell in sorted(found) for evaluate in (False, True)]
    return exhaustive(every, {(*cell, cell[:2] in EVALUATED) for cell in chosen})


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    assert not pending_amaxes.forward_amaxes()
    assert not pending_amaxes.backward_amaxes


def build(name: str, recipe: Any, stored: bool = True, dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    with qs.quantized_model_init(enabled=stored, recipe=recipe):
        return MODULES[name](params_dtype=dtype) if name != "DotProductAttention" else Core()


def data(seed: int = 0, tokens: int = TOKENS) -> Tensor:
    return torch.randn(tokens, 2, WIDTH, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def skip_objects(recipe: Any, inside: bool = True) -> None:
    """torch 2.11's Dynamo raises for a recipe object in the autocast of a compiled function; a name will do."""
    if inside and not isinstance(recipe, str) and torch.__version__ < "2.12":
        pytest.skip("torch 2.11 compiles an autocast by a recipe's name only")


def steps(
    module: nn.Module, recipe: Any, inside: bool, compiler: Callable[..., Any] | None, evaluate: bool = False
) -> list[Tensor]:
    """Outputs and gradients of two training steps, then of evaluation with them and without, and the state after.

    An evaluation is two graphs more.
    """

    def within(x: Tensor) -> Tensor:
        with qs.autocast(recipe=recipe):
            return module(x)

    function: Callable[[Tensor], Tensor] = within if inside else module
    if compiler is not None:
        skip_objects(recipe, inside)
        function = compiler(function)
    seen = []
    for step in range(2 + evaluate):
        module.train(step < 2)
        x = data(step)
        if inside:
            y = function(x)
        else:
            with qs.autocast(recipe=recipe):
                y = function(x)
        (y * torch.arange(1, y.shape[-1] + 1)).sum().backward()
        assert x.grad is not None
        seen += [y.detach(), x.grad]
    if evaluate:
        with torch.no_grad():
            seen.append(function(data(9)))
    seen += [param.grad for param in module.parameters() if param.grad is not None]
    return seen + list(module.state_dict().values())


def aot_eager(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    return torch.compile(function, backend="aot_eager", **options)


def inductor(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    return torch.compile(function, backend="inductor", **options)


def assert_equal(compiled: list[Tensor], plain: list[Tensor]) -> None:
    for index, (a, b) in enumerate(zip(compiled, plain, strict=True)):
        assert torch.equal(a, b), (index, a.shape, a.dtype, (a.float() - b.float()).abs().max())


@pytest.mark.parametrize(("name", "recipe", "inside", "evaluate"), cells())
def test_bits_of_every_module(name: str, recipe: str, inside: bool, evaluate: bool) -> None:
    asked = RECIPES[recipe]
    compiled = steps(build(name, asked), asked, inside, aot_eager, evaluate)
    assert_equal(compiled, steps(build(name, asked), asked, inside, None, evaluate))


@pytest.mark.parametrize("recipe", exhaustive([(name,) for name in RECIPES], [("delayed",)]))
def test_bits_with_high_precision_weights(recipe: str) -> None:
    in_turns = list(RECIPES).index(recipe) % 2
    name, dtype = (("LayerNormMLP", torch.bfloat16), ("Linear", torch.float32))[in_turns]
    asked = RECIPES[recipe]
    evaluate = name == "Linear"
    compiled = steps(build(name, asked, stored=False, dtype=dtype), asked, True, aot_eager, evaluate)
    assert_equal(compiled, steps(build(name, asked, stored=False, dtype=dtype), asked, True, None, evaluate))


@pytest.mark.parametrize("recipe", ["delayed", pytest.param("nvfp4", marks=pytest.mark.exhaustive)])
def test_bits_outside_of_autocast(recipe: str) -> None:
    inside = recipe == "nvfp4"
    compiled = steps(build("LayerNormMLP", RECIPES[recipe]), "bf16", inside, aot_eager)
    assert_equal(compiled, steps(build("LayerNormMLP", RECIPES[recipe]), "bf16", inside, None))


@pytest.mark.slow
@pytest.mark.parametrize("recipe", [pytest.param("delayed", marks=pytest.mark.exhaustive), "nvfp4"])
def test_inductor_keeps_the_bits_of_linear_layers(recipe: str) -> None:
    asked = RECIPES[recipe]
    compiled = steps(build("Linear", asked), asked, True, inductor)
    assert_equal(compiled, steps(build("Linear", asked), asked, True, None))


# Activation recomputation


@pytest.mark.parametrize(
    ("compiler", "how", "recipes"),
    [
        (aot_eager, checkpoint, ["mxfp8 two copies"]),
        pytest.param(aot_eager, checkpoint, list(RECIPES), marks=pytest.mark.exhaustive),
        (aot_eager, qs.checkpoint, ["delayed", "nvfp4"]),
        pytest.param(inductor, qs.checkpoint, ["nvfp4"], marks=pytest.mark.exhaustive),
    ],
)
def test_checkpointing_inside_a_compiled_function(
    compiler: Callable[..., Any], how: Callable[..., Any], recipes: list[str]
) -> None:
    def run(recipe: str, compile_: bool, recompute: bool) -> list[Tensor]:
        with qs.quantized_model_init(recipe=RECIPES[recipe]):
            torch.manual_seed(0)
            layer = qs.Linear(WIDTH, WIDTH)

        def twice(x: Tensor) -> Tensor:
            return layer(layer(x).relu())

        def function(x: Tensor) -> Tensor:
            with qs.autocast(recipe=RECIPES[recipe]):
                return how(twice, x, use_reentrant=False) if recompute else twice(x)

        x = data()
        y = (compiler(function) if compile_ else function)(x)
        y.square().sum().backward()
        return [y.detach(), x.grad, layer.weight.grad, *layer.state_dict().values()]

    for recipe in recipes if torch.__version__ >= "2.12" else {"current", "nvfp4"} & {*recipes}:
        assert_equal(run(recipe, True, True), run(recipe, False, False))


def test_a_failed_forward_records_nothing() -> None:
    layer = build("Linear", "delayed")

    def function(x: Tensor) -> Tensor:
        with qs.autocast(recipe="delayed"):
            raise ValueError(layer(x).shape)

    with pytest.raises(ValueError, match="40"):
        aot_eager(function)(data())
    assert layer.input_amax_history.count_nonzero() == 0


def test_a_layer_without_kernels_is_in_no_graph() -> None:
    with pytest.raises(Exception, match="quantshard: a compiled function runs"), qs.autocast(recipe="current"):
        aot_eager(build("Linear", "current"), fullgraph=True)(data())


def test_a_layer_without_kernels_is_refused_under_strict(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without strict, and in steps whose operands are observed, it runs."""
    module = build("Linear", "current")
    compiled = aot_eager(module)
    monkeypatch.setattr(predictions, "fallbacks", lambda *_: ())  # on a CPU every product is emulated
    with qs.autocast(recipe="current"):
        expected = compiled(data())
    with qs.autocast(recipe="current", strict=True):
        with pytest.raises(FallbackError, match="strict: Linear: a compiled function runs it eagerly"):
            compiled(data())
        monkeypatch.setattr(observation, "active", mock.Mock())
        assert torch.equal(compiled(data()), expected)


@pytest.mark.parametrize(
    ("recipe", "reentrant"),
    [
        *[("delayed", False), ("nvfp4", True)],
        pytest.param("delayed", True, marks=pytest.mark.exhaustive),  # on kernels: tests/kernels/test_compiled.py
        *[pytest.param(*cell, marks=pytest.mark.exhaustive) for cell in (("mxfp8 two copies", False), ("block", True))],
    ],
)
def test_checkpointing_a_compiled_function(recipe: str, reentrant: bool) -> None:
    def run(recompute: bool) -> list[Tensor]:
        torch._dynamo.reset()
        module = build("LayerNormMLP", RECIPES[recipe])

        def function(x: Tensor) -> Tensor:
            with qs.autocast(recipe=RECIPES[recipe]):
                return module(x)

        skip_objects(RECIPES[recipe])
        compiled = aot_eager(function)
        for step in range(2):
            x = data(step)
            y = qs.checkpoint(compiled, x, use_reentrant=reentrant) if recompute else function(x)
            y.square().sum().backward()
        return [y.detach(), x.grad, *(p.grad for p in module.parameters()), *module.state_dict().values()]

    assert_equal(run(True), run(False))


def test_no_autograd_function_returns_what_to_or_reshape_may_return_unchanged() -> None:
    """torch 2.11's Dynamo loses the gradient then, in silence; these tests run on a later one."""
    source = Path(qs.__file__).parent
    found = [
        f"{path.name}: {ast.unparse(node)}"
        for path in source.rglob("*.py")
        if "autograd.Function" in (text := path.read_text(encoding="utf-8"))
        for function in ast.walk(ast.parse(text))
        if isinstance(function, ast.ClassDef) and any("autograd.Function" in ast.unparse(b) for b in function.bases)
        for method in function.body
        if isinstance(method, ast.FunctionDef) and method.name == "forward"
        for node in ast.walk(method)
        if isinstance(node, ast.Return) and node.value is not None and ast.unparse(node.value).endswith("dtype)")
        # `read_values` casts in the same way
        if not ast.unparse(node.value).startswith(("private_torch.cast(", "tensor.read_values("))
    ]
    assert not found


def test_a_process_group_inside_a_compiled_function_is_refused() -> None:
    layer, group = build("Linear", "current"), nn.Identity()  # whatever is not None

    def function(x: Tensor) -> Tensor:
        with qs.autocast(recipe="current", amax_reduction_group=group):  # type: ignore[arg-type]
            return layer(x)

    with pytest.raises(Exception, match="enter it around the compiled function"):
        aot_eager(function, fullgraph=True)(data())


@pytest.mark.exhaustive  # of the library alone: tests/tools/cli/test_extra.py
def test_the_compiler_is_not_imported_until_it_is_used():
    """Every command, and every rank of a run, would take a third longer to start."""
    program = "import sys, quantshard.tools.cli; print([n for n in sys.modules if n.startswith('torch._dynamo')])"
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT)
    assert ran.stdout == "[]\n"
