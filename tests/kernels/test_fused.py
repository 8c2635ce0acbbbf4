"""A normalization, linear layers and an activation as one step of autograd have the bits of the steps one by one."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.multiprocessing.reductions import StorageWeakRef

import quantshard as qs
from quantshard import kernel_dispatch, private_torch
from quantshard.errors import UnsupportedOperationError
from quantshard.gemm import operands
from quantshard.interop.conversion import fusion
from quantshard.modules import fused, fused_operands
from quantshard.modules.activation_storage import STORAGES
from quantshard.modules.contexts import context
from quantshard.modules.gemms import functional
from quantshard.modules.layernorm_mlp import activate
from quantshard.recipe import Gemm, QuantSpec, TableRecipe, TensorRole, resolve
from quantshard.tensor.quantized_tensor import QuantizedTensor
from tests.covering import exhaustive
from tests.distributed import models

pytest.importorskip("triton")
pytestmark = [
    pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning"),  # NumPy's, in the interpreter
    pytest.mark.filterwarnings("ignore:.*Function'> should not be instantiated:DeprecationWarning"),  # Dynamo's
]
ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
TOKENS, SIZE, FFN = 21, 40, 70  # one tile, since the interpreter is slow
RECIPES = {name: resolve(recipe) for name, recipe in models.RECIPES.items()}

MODULES: dict[str, Callable[..., nn.Module]] = {
    "norm and linear": lambda **o: qs.LayerNormLinear(SIZE, FFN, bias=False, normalization="RMSNorm", **o),
    "norm and three linears": lambda **o: qs.LayerNormLinear(
        SIZE, FFN, bias=True, parameters_split={"a": 30, "b": 24, "c": 16}, separate_outputs=True, **o
    ),
    "mlp": lambda **o: qs.LayerNormMLP(SIZE, FFN, bias=True, **o),
    "gated mlp": lambda **o: qs.LayerNormMLP(
        SIZE, FFN, bias=False, normalization="RMSNorm", activation="swiglu", **o
    ),
    "gated mlp, stored": lambda **o: MODULES["gated mlp"](activation_storage="fp8", **o),
}  # fmt: skip


def build(name: str, recipe: qs.recipe.Recipe, quantize: bool, dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    torch.manual_seed(3)
    with qs.quantized_model_init(enabled=quantize, recipe=recipe):
        module = MODULES[name](params_dtype=dtype, device="cpu")
    with torch.no_grad():
        module.layer_norm_weight.copy_(torch.linspace(0.5, 1.5, SIZE))
    return module.to(DEVICE)


def trained(
    module: nn.Module, recipe: qs.recipe.Recipe, residual: bool, dtype: torch.dtype, steps: int = 2
) -> dict[str, Tensor]:
    """Of some steps: outputs, all gradients, and the histories at the end."""
    found: dict[str, Tensor] = {}
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        x, other = (torch.randn(3, 7, SIZE, generator=generator).to(DEVICE, dtype).requires_grad_() for _ in "xr")
        with qs.autocast(recipe=recipe):
            out = module(x, residual=other) if residual else module(x)
        outputs = out if isinstance(out, tuple | list) else (out,)
        # an output that nobody uses, at times
        sum((step + 1) * y.float().sin().sum() for y in outputs[step == 1 and len(outputs) > 1 :]).backward()
        found |= {f"y{step}.{i}": y.detach() for i, y in enumerate(outputs)}
        grads = {"x": x.grad, "residual": other.grad, **{name: p.grad for name, p in module.named_parameters()}}
        found |= {f"d{name}{step}": grad for name, grad in grads.items() if grad is not None}
        module.zero_grad()
    return found | {name: t.clone() for name, t in module.state_dict().items() if "history" in name}


@pytest.fixture
def both(monkeypatch: pytest.MonkeyPatch, kernels_on_cpu: None) -> Callable[..., tuple[Any, Any]]:
    """Runs a function fused, and one by one; it asserts that the first was."""

    def run(function: Callable[[], Any]) -> tuple[Any, Any]:
        used: list[bool] = []
        real = fused.fits
        with monkeypatch.context() as patch:
            patch.setattr(fused, "fits", lambda *args: used.append(real(*args)) or used[-1])
            one = function()
            assert used and all(used)
            patch.setattr(fused, "fits", lambda *args: False)
            return one, function()

    return run


def differing(one: dict[str, Tensor], other: dict[str, Tensor]) -> list[str]:
    """Names of what differs; on a GPU fc1's bias gradient by more than the order of a sum of TOKENS terms explains."""
    assert one.keys() == other.keys(), one.keys() ^ other.keys()
    eps = torch.finfo(torch.float32).eps
    room = {name: TOKENS * eps if ON_GPU and name.startswith("dfc1_bias") else 0.0 for name in one}
    return [
        name
        for name in one
        if not torch.allclose(one[name], other[name], rtol=room[name], atol=room[name], equal_nan=True)
    ]


KEEPING = ("delayed", "nvfp4")
"""Recipes with something that the next step reads."""
CASES = [(m, r) for m, r in itertools.product(MODULES, RECIPES) if ON_GPU or m == "gated mlp" or r == "delayed"]
CASES += [("norm and linear", recipe) for recipe in RECIPES if not ON_GPU and recipe != "delayed"]
FEWER = [
    (m, r)
    for m, r in CASES
    if (m == "norm and linear") == (r not in ("delayed", "block", "nvfp4"))
    and (m, r) != ("gated mlp", "delayed")
    and (m, r) != ("gated mlp", "block")
]
"""A gated MLP with delayed scaling is in the tests below."""


@pytest.mark.parametrize(("name", "recipe"), exhaustive(CASES, CASES if ON_GPU else FEWER))
def test_bits(name: str, recipe: str, both: Callable[..., tuple[Any, Any]]) -> None:
    for quantize, residual in ((True, "mlp" in name), (False, False))[: 2 if ON_GPU or recipe == "block" else 1]:
        dtype = torch.bfloat16 if quantize else torch.float32

        count = 2 if recipe in KEEPING else 1
        steps = partial(trained, recipe=RECIPES[recipe], residual=residual, dtype=dtype, steps=count)
        one, other = both(lambda: steps(build(name, RECIPES[recipe], quantize, dtype)))  # noqa: B023
        assert not differing(one, other), (quantize, residual)
        assert any(name.startswith("d") for name in one)


class Converted(nn.Module):
    """A gated MLP of three linear layers, as those of transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(SIZE, FFN) for _ in range(2))
        self.down_proj, self.act_fn = nn.Linear(FFN, SIZE, bias=False), nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


@pytest.mark.parametrize(
    "recipe", RECIPES if ON_GPU else ["delayed", pytest.param("nvfp4", marks=pytest.mark.exhaustive)]
)
def test_bits_of_a_converted_mlp(recipe: str, both: Callable[..., tuple[Any, Any]]) -> None:
    """Without a normalization, of layers with histories of their own."""

    def run(storage: str = "high_precision") -> dict[str, Tensor]:
        torch.manual_seed(3)
        model = nn.Sequential(Converted()).bfloat16()
        qs.convert(model, RECIPES[recipe], autocast=False)
        fusion.fuse_mlp(model[0], storage)
        return trained(model.to(DEVICE), RECIPES[recipe], False, torch.bfloat16)

    one, other = both(run)
    assert not differing(one, other) and len(one) > 10
    changed = differing(one, run("fp8"))
    assert "y0.0" not in changed and "d0.gate_proj.weight0" in changed and "d0.down_proj.weight0" not in changed


@pytest.mark.exhaustive
@pytest.mark.parametrize("recipe", ["delayed", "nvfp4"][: 2 if ON_GPU else 1])
def test_a_converted_mlp_in_a_graph(recipe: str, kernels_on_cpu: None) -> None:
    found = []
    for compiles in (False, True):
        torch.manual_seed(3)
        model = nn.Sequential(Converted()).bfloat16()
        qs.convert(model, RECIPES[recipe], autocast=False)
        fusion.fuse_mlp(model[0])
        if compiles:
            model[0].compile(backend="aot_eager", fullgraph=True)
        found.append(trained(model.to(DEVICE), RECIPES[recipe], False, torch.bfloat16))
    assert not differing(*found)


@pytest.mark.parametrize("recipe", ["delayed", "current", "block", "nvfp4"][: 4 if ON_GPU else 1])
def test_frozen_weights_no_gradients_and_recomputation(recipe: str, both: Callable[..., tuple[Any, Any]]) -> None:
    chosen = RECIPES[recipe]

    def frozen(which: str) -> dict[str, Tensor]:
        module = build("gated mlp", chosen, True)
        for key, param in module.named_parameters():
            param.requires_grad_(which not in key)
        return trained(module, chosen, True, torch.bfloat16, steps=1)

    for which in ("fc1", "fc2", "weight", "layer_norm") if ON_GPU else ("fc1", "fc2"):
        one, other = both(lambda which=which: frozen(which))
        assert not differing(one, other), which

    def recomputed() -> dict[str, Tensor]:
        module = build("gated mlp", chosen, True)
        forward = module.forward
        module.forward = lambda *args, **options: qs.checkpoint(forward, *args, **options)  # type: ignore[method-assign]
        return trained(module, chosen, False, torch.bfloat16, steps=2 if ON_GPU else 1)

    one, other = both(recomputed)
    assert not differing(one, other)
    plain = trained(build("gated mlp", chosen, True), chosen, False, torch.bfloat16, steps=2 if ON_GPU else 1)
    assert not differing(one, plain), "recomputation changes nothing"

    def evaluated() -> dict[str, Tensor]:
        module = build("gated mlp", chosen, True).eval()
        with torch.no_grad(), qs.autocast(recipe=chosen):
            return {"y": module(torch.ones(5, SIZE, device=DEVICE, dtype=torch.bfloat16))}

    one, other = both(evaluated)
    assert not differing(one, other)
    assert not context.forward_amaxes()


@pytest.mark.parametrize(
    "recipe", ["delayed", *(pytest.param(each, marks=pytest.mark.exhaustive) for each in ("mxfp8", "current", "block"))]
)
def test_a_gradient_that_is_not_finite_spreads(recipe: str, both: Callable[..., tuple[Any, Any]]) -> None:
    """Codes saturate; yet every gradient is NaN somewhere, so that the step is skipped."""

    def run() -> dict[str, Tensor]:
        module = build("gated mlp", RECIPES[recipe], True)
        x = torch.randn(TOKENS, SIZE, generator=torch.Generator().manual_seed(1)).to(DEVICE, torch.bfloat16)
        with qs.autocast(recipe=RECIPES[recipe]):
            y = module(x.requires_grad_())
        grad = torch.ones_like(y)
        grad[3, 5] = float("inf")
        y.backward(grad)
        return {"x": x.grad, **{name: p.grad for name, p in module.named_parameters()}}

    for found in both(run):
        assert all(grad.isnan().any() for grad in found.values())


@pytest.mark.parametrize(
    "recipe",
    ["delayed", "nvfp4", "current", "block"]
    if ON_GPU
    else ["delayed", *(pytest.param(each, marks=pytest.mark.exhaustive) for each in ("current", "nvfp4"))],
)
def test_recomputed_activations(recipe: str, both: Callable[..., tuple[Any, Any]]) -> None:
    chosen = RECIPES[recipe]

    def run(recomputes: bool) -> dict[str, Tensor]:
        module = build("gated mlp", chosen, True)
        module.recompute_activation = recomputes  # type: ignore[assignment]
        return trained(module, chosen, False, torch.bfloat16, steps=2 if ON_GPU and recipe == "delayed" else 1)

    one, other = both(lambda: run(True))
    assert not differing(one, other) and not differing(one, run(False))


@pytest.mark.parametrize("recomputes", [False, pytest.param(True, marks=pytest.mark.exhaustive)])
def test_stored_codes_are_those_of_the_oracle(recomputes: bool, both: Callable[..., tuple[Any, Any]]) -> None:
    """Forwards have the bits of what is stored as it is; the activation that is made again of codes saturates at the
    amax of the forward."""
    chosen = RECIPES["current"]

    def run(name: str = "gated mlp, stored") -> dict[str, Tensor]:
        module = build(name, chosen, True)
        module.recompute_activation = recomputes  # type: ignore[assignment]
        return trained(module, chosen, True, torch.bfloat16, steps=1)

    one, other = both(run)
    assert not differing(one, other)
    if not ON_GPU:
        with kernel_dispatch.kernels_only_on("cuda"):
            oracle = run()
        assert {*differing(one, oracle)} <= {"dx0", "dresidual0"}, "but for the normalization's backward"
    expected = {name for name in one if name[0] == "y"} | ({"dfc2_weight0"} if not recomputes else set())
    assert expected == one.keys() - set(differing(one, run("gated mlp")))


def test_a_graph_that_is_kept_runs_backward_twice(kernels_on_cpu: None) -> None:
    """Backward lets go of what forward has kept, but not with retain_graph=True."""
    module = build("gated mlp", RECIPES["block"], True)
    x = torch.randn(TOKENS, SIZE, device=DEVICE).bfloat16().requires_grad_()
    with qs.autocast(recipe="block"):
        y = module(x).float().sum()
    once = torch.autograd.grad(y, [x, *module.parameters()], retain_graph=True)
    twice = torch.autograd.grad(y, [x, *module.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(once, twice, strict=True))
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        y.backward()


@pytest.mark.parametrize("name", ["gated mlp", "gated mlp, stored"])
def test_backward_lets_go_of_what_it_has_read(name: str, monkeypatch: pytest.MonkeyPatch, kernels_on_cpu: None) -> None:
    """The outputs of fc1, or their codes, and the codes that fc2 has kept, before the GEMMs of fc1, which need the
    memory."""
    module = build(name, RECIPES["current"], True)
    kept: dict[str, StorageWeakRef] = {}
    there: list[list[str]] = []
    take, gradients = private_torch.take_saved, functional.LinearBackward.gradients

    def watched(ctx: Any) -> tuple[Any, ...]:
        saved = take(ctx)
        _, inner, _, (_, *codes) = fused._split(saved, *ctx.sizes)
        inner = [inner[0], inner[len(inner) // 2]]
        named = zip(("gate", "up", "codes"), (*inner, *codes), strict=False)  # the scale shares its memory with others
        kept.update((name, StorageWeakRef(tensor.untyped_storage())) for name, tensor in named)
        return saved

    def counted(*args: Any) -> Any:
        gc.collect()  # the interpreter of kernels leaves cycles
        there.append([name for name, storage in kept.items() if not storage.expired()])
        return gradients(*args)

    def values(*args: Any) -> Any:
        found = real(*args)
        kept.update((f"{index}, read", StorageWeakRef(x.untyped_storage())) for index, x in enumerate(found))
        return found

    real = fused.ActivationStorage.values
    monkeypatch.setattr(fused.ActivationStorage, "values", values)
    monkeypatch.setattr(private_torch, "take_saved", watched)
    monkeypatch.setattr(functional.LinearBackward, "gradients", counted)
    x = torch.randn(TOKENS, SIZE, device=DEVICE).bfloat16().requires_grad_()
    with qs.autocast(recipe=RECIPES["current"]):
        y = module(x)
    y.backward(torch.ones_like(y))
    assert there == [["gate", "up", "codes"], []], "of fc2, and of fc1"


@pytest.mark.parametrize("large", [True, False])
def test_backward_takes_the_amax_of_the_forward(
    large: bool, monkeypatch: pytest.MonkeyPatch, kernels_on_cpu: None
) -> None:
    """Under current scaling normalized rows are never written: their amax is taken with their statistics, and backward,
    which quantizes many again, has it."""
    monkeypatch.setattr(operands, "LARGE", 0 if large else 1 << 30)
    module = build("gated mlp", RECIPES["current"], True)
    measured: list[bool] = []
    emitted: list[bool] = []
    kind = fused_operands.OperandProducer
    real, launch = kind.in_memory, fused_operands.norm_kernels.normalize_and_quantize

    def is_norm(source: fused_operands.OperandProducer) -> bool:
        return getattr(source.launch, "func", None) is fused_operands.norm_kernels.normalize_and_quantize

    def watched_launch(*arguments: Any) -> Any:
        emitted.append(private_torch.in_backward())
        return launch(*arguments)

    def watched_measured(source: fused_operands.OperandProducer, *plan: Any) -> Any:
        if is_norm(source):
            measured.append(private_torch.in_backward())
        return real(source, *plan)

    monkeypatch.setattr(fused_operands.norm_kernels, "normalize_and_quantize", watched_launch)
    monkeypatch.setattr(kind, "in_memory", watched_measured)
    x = torch.randn(TOKENS, SIZE, device=DEVICE).bfloat16().requires_grad_()
    with qs.autocast(recipe=RECIPES["current"]):
        y = module(x)
    y.backward(torch.ones_like(y))
    assert not measured and emitted == [False, True][: 1 + large]


@pytest.mark.parametrize("recomputes", [False, True])
def test_what_is_kept_for_backward(recomputes: bool, kernels_on_cpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of many tokens: z, the two outputs of fc1, statistics and, unless made again, the codes of the second input in 8
    bits."""
    monkeypatch.setattr(operands, "LARGE", 0)
    module = build("gated mlp", RECIPES["current"], True)
    module.recompute_activation = recomputes  # type: ignore[assignment]
    kept: dict[int, int] = {}

    def pack(t: Tensor) -> Tensor:
        if not isinstance(t, QuantizedTensor):
            storage = t.untyped_storage()
            kept[storage.data_ptr()] = storage.nbytes()
        return t

    tokens = 1024 if ON_GPU else 256
    x = torch.randn(tokens, SIZE, device=DEVICE).bfloat16().requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t), qs.autocast(recipe="current"):
        module(x)
    activations = sum(kept.values())
    outputs = -(-FFN // 16) * 16 if ON_GPU else FFN  # a native product fills its rows up
    expected = tokens * (2 * SIZE + 2 * 2 * outputs + (0 if recomputes else FFN))
    assert expected <= activations <= expected + tokens * 4 + 4096, (activations, expected)


def test_second_derivatives_are_refused(kernels_on_cpu: None) -> None:
    module = build("gated mlp", RECIPES["current"], True)
    x = torch.randn(4, SIZE, device=DEVICE).bfloat16().requires_grad_()
    with qs.autocast(recipe="current"):
        y = module(x)
    with pytest.raises(UnsupportedOperationError, match="create_graph"):
        torch.autograd.grad(y.float().sum(), x, create_graph=True)


class Pending(torch.autograd.Function):
    """Its input, and its gradient, as DTensor's collectives hand them out: without an address."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return AsyncCollectiveTensor(x.clone())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return AsyncCollectiveTensor(grads[0].clone())


@pytest.mark.parametrize(
    "name", ["linear", "norm", *(pytest.param(each, marks=pytest.mark.exhaustive) for each in ("gated mlp", "layer"))]
)
def test_tensors_that_collectives_still_fill(name: str, kernels_on_cpu: None) -> None:
    """They have no address that a kernel could read; the bits are those of plain tensors."""
    others: dict[str, Callable[[], nn.Module]] = {
        "linear": lambda: qs.Linear(SIZE, FFN, params_dtype=torch.bfloat16, device="cpu"),
        "norm": lambda: qs.RMSNorm(SIZE, params_dtype=torch.bfloat16, device="cpu"),
        "layer": lambda: qs.TransformerLayer(
            SIZE, FFN, 4, 2, hidden_dropout=0.0, attention_dropout=0.0, normalization="RMSNorm", activation="swiglu",
            params_dtype=torch.bfloat16, device="cpu", attention_backend="math",
        ),
    }  # fmt: skip
    angles = qs.RotaryPositionEmbedding(SIZE // 4)(TOKENS, device=DEVICE)
    found: list[dict[str, Tensor]] = []
    for wrap in (Pending.apply, lambda x: x):
        torch.manual_seed(3)
        with qs.quantized_model_init(recipe=RECIPES["delayed"]):
            module = build(name, RECIPES["delayed"], True) if name in MODULES else others[name]().to(DEVICE)
        x = torch.randn(TOKENS, 1, SIZE, generator=torch.Generator().manual_seed(1)).to(DEVICE, torch.bfloat16)
        with qs.autocast(recipe=RECIPES["delayed"]):
            y = module(wrap(x.requires_grad_()), **({"rotary_pos_emb": angles} if name == "layer" else {}))
        wrap(y).float().sin().sum().backward()
        found.append({"y": y.detach(), "dx": x.grad, **{key: p.grad for key, p in module.named_parameters()}})
    assert not differing(*found)
    assert isinstance(Pending.apply(x), AsyncCollectiveTensor) and Pending.apply(x).data_ptr() == 0


def test_an_input_that_is_rounded_stochastically_is_drawn_once(both: Callable[..., tuple[Any, Any]]) -> None:
    table = dict(RECIPES["mxfp8"].table)
    for gemm in (Gemm.FPROP, Gemm.WGRAD):
        cell = table[TensorRole.INPUT, gemm]
        table[TensorRole.INPUT, gemm] = QuantSpec(cell.format, replace(cell.scaling, stochastic_rounding=True))
    chosen = TableRecipe("rounded inputs", table)
    one, other = both(lambda: trained(build("gated mlp", chosen, True), chosen, False, torch.bfloat16, steps=1))
    assert not differing(one, other)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernels_keep_what_the_oracle_keeps(dtype: torch.dtype, kernels_on_cpu: None) -> None:
    """Codes, scales and poisons of an activation's inputs, also of rows that lie apart, and what backward reads; a
    slope at NaN is NaN."""
    x = torch.randn(5, 2 * 300, generator=torch.Generator().manual_seed(1)) * torch.logspace(-4, 4, 600)
    x[2, 3], x[3, :300] = float("inf"), 0.0
    gate, up = x.to(DEVICE, dtype).chunk(2, dim=1)
    for inputs in ([gate, up], [gate.contiguous(), up], [up[:0], up[:0]]):
        kept = STORAGES["fp8"].keep(inputs)
        values = STORAGES["fp8"].values([*kept], dtype)
        with kernel_dispatch.kernels_only_on():
            wanted = STORAGES["fp8"].keep(inputs)
            read = STORAGES["fp8"].values([*wanted], dtype)
        finite = slice(None) if len(inputs[0]) == 0 else slice(3, None)  # of the other all is NaN, whatever codes say
        for found, expected in zip(kept[finite], wanted[finite], strict=True):
            assert torch.equal(found, expected) and found.shape == expected.shape
        for found, expected in zip(values, read, strict=True):
            assert torch.equal(found.isnan(), expected.isnan())
            assert torch.equal(found.nan_to_num(), expected.nan_to_num())
    assert values[0].shape == (0, 300)
    gate = torch.tensor([[float("nan"), 1.0, -1.0]], device=DEVICE, dtype=dtype).requires_grad_()
    activate(gate, "relu").sum().backward()
    assert gate.grad is not None and gate.grad.isnan().tolist() == [[True, False, False]]
