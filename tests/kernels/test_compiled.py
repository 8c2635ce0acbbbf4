"""torch.compile where kernels run: a normalization and its linear layers are traced together, with the bits of eager.

So is a rotation. What is left of an MLP for Inductor is no more than an addition, so it is held to the same bits.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import quantshard as qs
from quantshard.kernels import workspace
from quantshard.modules import fused, rotary
from quantshard.modules.contexts import pending_amaxes
from quantshard.tensor.quantized_tensor import QuantizedTensor
from tests.covering import exhaustive
from tests.distributed.models import RECIPES

pytest.importorskip("triton")
pytestmark = [
    pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning"),  # NumPy's, in the interpreter
    pytest.mark.filterwarnings("ignore:.*Function'> should not be instantiated:DeprecationWarning"),  # Dynamo's
]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SIZE, FFN, TOKENS = 24, 40, 5
STEPS = 2
BY_NAME = {**RECIPES, "delayed": "delayed"}
"""Recipes as torch 2.11 compiles an autocast: by a name, but for one."""

Compiler = Callable[[Callable[..., Any]], Callable[..., Any]]


class Layer(nn.Module):
    """A transformer layer with rotary embedding; forward makes the angles."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.rotary = qs.RotaryPositionEmbedding(6)
        self.layer = qs.TransformerLayer(
            SIZE, FFN, 4, 2, hidden_dropout=0.0, attention_dropout=0.0, normalization="RMSNorm", activation="swiglu",
            attention_backend="math", **options,
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x, rotary_pos_emb=self.rotary(x.shape[0], device=DEVICE))


FUSED_QKV: dict[str, Any] = {"fuse_qkv_params": True, "qkv_weight_interleaved": False, "bias": False}
MODULES: dict[str, Callable[..., nn.Module]] = {
    "norm and linear": lambda **o: qs.LayerNormLinear(SIZE, FFN, bias=False, normalization="RMSNorm", **o),
    "norm and three linears": lambda **o: qs.LayerNormLinear(
        SIZE, FFN, parameters_split={"a": 20, "b": 12, "c": 8}, separate_outputs=True, **o
    ),
    "mlp": lambda **o: qs.LayerNormMLP(SIZE, FFN, zero_centered_gamma=True, **o),
    "gated mlp": lambda **o: qs.LayerNormMLP(SIZE, FFN, bias=False, activation="swiglu", eps=1e-3, **o),
    "recomputing mlp": lambda **o: qs.LayerNormMLP(SIZE, FFN, recompute_activation=True, return_bias=True, **o),
    "storing mlp": lambda **o: qs.LayerNormMLP(
        SIZE, FFN, recompute_activation=True, activation="swiglu", activation_storage="fp8", **o
    ),
    "layer": lambda **o: Layer(**o),
    "layer with fused projections": lambda **o: Layer(**o, **FUSED_QKV),
}


@pytest.fixture(autouse=True)
def used(monkeypatch: pytest.MonkeyPatch, kernels_on_cpu: None) -> list[str]:
    """A list that grows with the names of fused forwards as they run, eagerly or in an operator."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    names: list[str] = []
    for name in ("_run_mlp", "_run_norm_linear"):
        real = getattr(fused, name)
        monkeypatch.setattr(fused, name, lambda *a, real=real, name=name: names.append(name) or real(*a))
    return names


def build(name: str, recipe: Any, stored: bool = True, dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    torch.manual_seed(3)
    with qs.quantized_model_init(enabled=stored, recipe=recipe):
        return MODULES[name](params_dtype=dtype, device="cpu").to(DEVICE)


def data(seed: int, dtype: torch.dtype = torch.bfloat16, tokens: int = TOKENS) -> Tensor:
    values = torch.randn(tokens, 2, SIZE, generator=torch.Generator().manual_seed(seed))
    return values.to(DEVICE, dtype).requires_grad_()


def aot_eager(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    return torch.compile(function, fullgraph=True, backend="aot_eager", **options)


def inductor(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, fullgraph=True, backend="inductor")


def graphs() -> int:
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def trained(
    module: nn.Module,
    recipe: Any,
    compiler: Compiler | None,
    inside: bool = False,
    steps: int = STEPS,
    evaluate: bool = False,
) -> dict[str, Tensor]:
    """Outputs and all gradients of some steps, perhaps an evaluation, which is another graph, and the state after."""

    def within(x: Tensor) -> Any:
        with qs.autocast(recipe=recipe):
            return module(x)

    function: Callable[[Tensor], Any] = within if inside else module
    call = function if compiler is None else compiler(function)
    found: dict[str, Tensor] = {}

    def run(x: Tensor, name: str) -> list[Tensor]:
        with qs.autocast(enabled=False) if inside else qs.autocast(recipe=recipe):
            out = call(x)
        outputs = list(out) if isinstance(out, tuple | list) else [out]
        found.update((f"{name}.{index}", y.detach()) for index, y in enumerate(outputs))
        return outputs

    dtype = next(module.parameters()).dtype
    for step in range(steps):
        x = data(step, dtype)
        outputs = run(x, f"y{step}")
        # an output that nobody uses, at times
        sum(y.float().sin().sum() for y in outputs[step == 1 and len(outputs) > 1 :]).backward()
        grads = {"x": x.grad, **{name: param.grad for name, param in module.named_parameters()}}
        found |= {f"d{name}{step}": grad for name, grad in grads.items() if grad is not None}
        module.zero_grad()
    assert compiler is None or graphs() == 1
    if evaluate:
        module.eval()
        with torch.no_grad():
            run(data(9, dtype), "evaluated")
    assert not pending_amaxes.forward_amaxes() and not pending_amaxes.backward_amaxes
    return found | {name: t.clone() for name, t in module.state_dict().items()}


def differing(one: dict[str, Tensor], other: dict[str, Tensor]) -> list[str]:
    assert one.keys() == other.keys(), one.keys() ^ other.keys()
    return [name for name in one if not torch.equal(one[name], other[name])]


CHOSEN = [("norm and linear", "delayed", True), ("norm and three linears", "nvfp4", False)]
"""Module, recipe, and whether it is evaluated too: recipes that keep or draw something."""


def cells() -> list[Any]:
    """(Module, recipe, weights stored quantized, autocast inside, evaluated too): every module with delayed scaling,
    which keeps most between steps, the gated MLP with every recipe, and a layer with two."""
    found = [(name, "delayed", turn % 3 != 2, turn % 2 == 0) for turn, name in enumerate(MODULES)]
    found += [("gated mlp", recipe, turn % 3 != 1, turn % 2 == 1) for turn, recipe in enumerate(RECIPES)]
    found += [
        ("layer with fused projections", "current", True, False),
        ("mlp", "current", False, True),
        ("norm and three linears", "nvfp4", False, False),
    ]
    every = [(*cell, evaluate) for cell in sorted(set(found)) for evaluate in (False, True)]
    return exhaustive(every, [cell for cell in every if (*cell[:2], cell[-1]) in CHOSEN])


@pytest.mark.parametrize(("name", "recipe", "stored", "inside", "evaluate"), cells())
def test_bits(name: str, recipe: str, stored: bool, inside: bool, evaluate: bool, used: list[str]) -> None:
    asked = BY_NAME[recipe] if inside else RECIPES[recipe]
    if inside and not isinstance(asked, str) and torch.__version__ < "2.12":
        pytest.skip("torch 2.11 compiles an autocast by a recipe's name only")
    eager = trained(build(name, asked, stored), asked, None, inside, evaluate=evaluate)
    forwards = len(used)
    assert forwards and forwards % (STEPS + evaluate) == 0
    compiled = trained(build(name, asked, stored), asked, aot_eager, inside, evaluate=evaluate)
    # eagerly, and while the graph is traced
    assert {*used[forwards:]} == {*used[:forwards]}
    assert not differing(eager, compiled)


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("recipe", ["current", "delayed", "nvfp4", "block"])
def test_inductor_has_the_same_bits(recipe: str, used: list[str]) -> None:
    eager = trained(build("gated mlp", recipe), recipe, None, steps=2)
    forwards = len(used)
    assert not differing(eager, trained(build("gated mlp", recipe), recipe, inductor, steps=2))
    assert len(used) > forwards > 0


@pytest.mark.parametrize(
    ("recipe", "which"),
    exhaustive(
        [("current", ("fc2",)), ("current", ("weight",)), ("nvfp4", ("fc2", "weight")),
         ("delayed", ("fc1", "fc2", "layer_norm", "weight"))],
        [("current", ("weight",))],
    ),
)  # fmt: skip
def test_of_what_gradients_are_needed(recipe: str, which: tuple[str, ...], used: list[str]) -> None:
    """Frozen weights, and frozen parameters of the normalization; in float32 too."""
    for frozen in which:
        found = []
        for compiler in (None, aot_eager):
            torch._dynamo.reset()
            torch._dynamo.utils.counters.clear()
            module = build("mlp", RECIPES[recipe], dtype=torch.float32 if frozen == which[-1] else torch.bfloat16)
            for key, param in module.named_parameters():
                param.requires_grad_(frozen not in key)
            found.append(trained(module, RECIPES[recipe], compiler, steps=1))
        assert not differing(*found), frozen


@pytest.mark.exhaustive
@pytest.mark.parametrize("recipe", ["current", "nvfp4", "delayed"])
def test_an_input_needs_no_gradient(recipe: str) -> None:
    found = []
    for compiler in (None, aot_eager):
        module = build("gated mlp", RECIPES[recipe])
        with qs.autocast(recipe=RECIPES[recipe]):
            y = (module if compiler is None else compiler(module))(data(0).detach())
        y.float().square().sum().backward()
        found.append({name: param.grad for name, param in module.named_parameters()})
    assert not differing(*found)


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # Dynamo's
@pytest.mark.parametrize(
    ("kind", "forward"),
    [
        (lambda *args, **o: qs.LayerNormLinear(SIZE, SIZE, *args, **o), "_run_norm_linear"),
        (lambda *args, **o: qs.LayerNormMLP(SIZE, FFN, *args, **o), "_run_mlp"),
    ],
    ids=["linear", "mlp"],
)
def test_layers_that_differ_in_a_number_are_compiled_one_by_one(
    kind: Callable[..., nn.Module], forward: str, used: list[str]
) -> None:
    """A float of a module that is another in the next call becomes a symbol to Dynamo; a graph asks its value."""
    with qs.quantized_model_init(recipe="current"):
        options: dict[str, Any] = {"params_dtype": torch.bfloat16, "device": DEVICE, "bias": False}
        layers = [kind(eps, **options) for eps in (1e-1, 1e-2, 1e-3)]
    again = copy.deepcopy(layers)
    for layer in layers:
        layer.compile(fullgraph=True, backend="aot_eager")
    found = []
    for model in (layers, again):
        y = data(0)
        with qs.autocast(recipe="current"):
            for layer in model:
                y = layer(y)
        y.float().sum().backward()
        parameters = nn.ModuleList(model).named_parameters()
        found.append({"y": y, **{name: param.grad for name, param in parameters}})
    assert not differing(*found)
    assert {*used} == {forward}


@pytest.mark.exhaustive
@pytest.mark.parametrize("how", ["quantized", "float32"])
def test_weights_that_differ(how: str, used: list[str]) -> None:
    """One of them quantized or of another dtype."""
    found = []
    for compiler in (None, aot_eager):
        module = build("gated mlp", "block", stored=False)
        stored = how == "quantized"
        module.fc2_weight = build("gated mlp", "block", stored, torch.bfloat16 if stored else torch.float32).fc2_weight
        found.append(trained(module, "block", compiler, steps=1))
    assert not differing(*found)
    # eagerly, and while the graph is traced
    assert len(used) > 2 and {*used} == {"_run_mlp"}


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["mlp", "norm and three linears"])
def test_biases_of_two_dtypes(name: str, used: list[str]) -> None:
    """Each has a gradient of its own dtype, which is not rounded to that of another."""
    found = []
    for compiler in (None, aot_eager):
        module = build(name, "current")
        biases = [parameter for parameter in module.named_parameters() if "norm" not in parameter[0]]
        last, bias = [parameter for parameter in biases if parameter[0].endswith("bias")][-1]
        setattr(module, last, nn.Parameter(bias.detach().float()))
        found.append(trained(module, "current", compiler, steps=1))
    assert not differing(*found)
    # eagerly, and while the graph is traced
    assert len(used) >= 2 and len({*used}) == 1, "both of them"


@pytest.mark.exhaustive
@pytest.mark.parametrize("recipe", ["delayed", "block"])
@pytest.mark.parametrize("recomputes", [False, True])
def test_no_more_is_kept_for_backward(recipe: str, recomputes: bool) -> None:
    """A compiled MLP keeps the bytes of an eager one, but for scales and alignment."""
    tokens, kept = 128, []
    for compiler in (None, aot_eager):
        module = build("gated mlp", RECIPES[recipe])
        module.recompute_activation = recomputes  # type: ignore[assignment]
        state = module.state_dict()  # held, as what is seen is: the address of a tensor that is gone is another's
        own = {part.untyped_storage().data_ptr() for part in state.values()}
        seen: dict[int, torch.UntypedStorage] = {}

        def pack(t: Tensor, own: set[int] = own, seen: dict[int, torch.UntypedStorage] = seen) -> Tensor:
            if not isinstance(t, QuantizedTensor) and t.untyped_storage().data_ptr() not in own:
                seen[t.untyped_storage().data_ptr()] = t.untyped_storage()
            return t

        x = data(0, tokens=tokens)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t), qs.autocast(recipe=RECIPES[recipe]):
            (module if compiler is None else compiler(module))(x)
        kept.append(sum(storage.nbytes() for storage in seen.values()))
    assert 2 * tokens * 2 * FFN < kept[1] <= 1.03 * kept[0] + 1024, (
        kept
    )  # on a GPU eager keeps rows that a product filled up


# Activation recomputation


@pytest.mark.exhaustive  # without kernels: tests/modules/test_compile.py
@pytest.mark.parametrize(("recipe", "reentrant"), [("delayed", False), ("delayed", True), ("nvfp4", False)])
def test_checkpointing_a_compiled_function(recipe: str, reentrant: bool, used: list[str]) -> None:
    def run(recompute: bool) -> dict[str, Tensor]:
        module = build("norm and linear" if recipe == "nvfp4" else "gated mlp", recipe)

        def function(x: Tensor) -> Tensor:
            with qs.autocast(recipe=recipe):
                return module(x)

        compiled = aot_eager(function)
        for step in range(2):
            x = data(step)
            y = qs.checkpoint(compiled, x, use_reentrant=reentrant) if recompute else function(x)
            y.float().square().sum().backward()
        found = {"y": y.detach(), "dx": x.grad, **{f"d{name}": p.grad for name, p in module.named_parameters()}}
        return found | module.state_dict()

    plain = run(False)
    assert not differing(plain, run(True))
    assert len(used) > 2, "eagerly, and while the graph is traced"


@pytest.mark.parametrize(
    "recipe", ["delayed", *(pytest.param(each, marks=pytest.mark.exhaustive) for each in ("current", "nvfp4"))]
)
def test_checkpointing_inside_a_compiled_function(recipe: str) -> None:
    def run(compiler: Compiler | None) -> dict[str, Tensor]:
        module = build("norm and linear" if recipe == "nvfp4" else "mlp", recipe)

        def function(x: Tensor) -> Tensor:
            with qs.autocast(recipe=recipe):
                return checkpoint(module, x, use_reentrant=False)

        x = data(0)
        y = (function if compiler is None else compiler(function))(x)
        y.float().square().sum().backward()
        return {"y": y.detach(), "dx": x.grad, **{name: param.grad for name, param in module.named_parameters()}}

    if recipe == "delayed":
        with pytest.raises(Exception, match="does not keep; compile the checkpointed function"):
            run(aot_eager)
    else:
        assert not differing(run(aot_eager), run(None))


@pytest.mark.parametrize("compiler", [aot_eager, pytest.param(inductor, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize(
    ("tensor_format", "interleaved"),
    exhaustive([("sbhd", False), ("bshd", False), ("bshd", True)], [("bshd", True)]),
)
def test_rotations(compiler: Compiler, tensor_format: str, interleaved: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the kernel, forward and backward, of queries alone or of a projection, whose gradient is joined in place."""
    angles = qs.RotaryPositionEmbedding(6, interleaved=interleaved)(5, device=DEVICE)
    layout = rotary.HeadLayout(tensor_format, interleaved)
    ran: list[str] = []
    real = rotary.rotary_kernel.rotate

    def rotate(*args: Any, **options: Any) -> Tensor:
        ran.append("join" if "out" in options else "rotate")
        return real(*args, **options)

    monkeypatch.setattr(rotary.rotary_kernel, "rotate", rotate)
    for function in (
        lambda t: rotary.apply_rotary_pos_emb(t, angles, tensor_format, interleaved=interleaved),
        lambda t: rotary.rotate_projection(t, 4, 2, angles, layout),
    ):
        found = []
        for call in (function, compiler(function)):
            ran.clear()
            shape = (5, 2, 8, 6) if tensor_format == "sbhd" else (2, 5, 8, 6)
            t = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(DEVICE, torch.bfloat16)
            t.requires_grad_()
            out = call(t)
            outputs = out if isinstance(out, tuple) else (out,)
            sum((y * (index + 1)).square().sum() for index, y in enumerate(outputs)).backward()
            found.append([*outputs, t.grad])
            assert ran == {1: ["rotate", "rotate"], 3: ["rotate", "join", "join"]}[len(outputs)]
        assert all(map(torch.equal, *found))


@pytest.mark.parametrize("recipe", ["current", pytest.param("nvfp4", marks=pytest.mark.exhaustive)])
def test_scalars_of_operators_share_no_memory(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No results of an operator may; and of memory that is a CUDA graph's none may be left for later."""

    def shared(*_: Any) -> Any:
        raise AssertionError("scalars of an operator share an allocation")

    with qs.quantized_model_init(recipe=recipe):
        module = MODULES["gated mlp"](device=DEVICE, params_dtype=torch.bfloat16)
    compiled = torch.compile(module, backend="aot_eager")
    monkeypatch.setattr(workspace, "_FREE", {})
    monkeypatch.setattr(workspace, "zero_scalars", shared)
    x = torch.randn(TOKENS, SIZE, device=DEVICE).bfloat16().requires_grad_()
    with qs.autocast(recipe=recipe):
        y = compiled(x)
    y.sum().backward()
    with pytest.raises(AssertionError, match="share an allocation"), qs.autocast(recipe=recipe):
        module(x)
