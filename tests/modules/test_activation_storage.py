"""What an activation's inputs are kept as for backward: codes by definition, forwards of the same bits, gradients
within the error of a code; and what is not finite stays so."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import quantshard as qs
from quantshard.errors import ConfigurationError, UnsupportedOperationError
from quantshard.gemm import operands
from quantshard.modules.activation_storage import ACTIVATION_SPECS, AS_IS, STORAGES, ActivationStorage
from quantshard.modules.layernorm_mlp import ACTIVATIONS, activate, activate_stored, is_gated
from tests.modules.test_mlp import bytes_kept

FP8 = STORAGES["fp8"]
TOKENS, FEATURES = 7, 300
"""Two blocks of 128 and one of 44."""


def inputs(dtype: torch.dtype = torch.float32, count: int = 2) -> list[Tensor]:
    """Of magnitudes from 1e-4 to 1e4 by token, zeros, and one that is alone in its block."""
    generator = torch.Generator().manual_seed(0)
    found = [torch.randn(TOKENS, FEATURES, generator=generator) for _ in range(count)]
    for x in found:
        x *= torch.logspace(-4, 4, TOKENS).unsqueeze(1)
        x[2, :130] = 0.0
        x[3, 256:] = 0.0
        x[3, 299] = -3.0
    return [x.to(dtype) for x in found]


def by_definition(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, scales and values of x [tokens, features], block by block."""
    codes, scales, values = torch.empty(x.shape, dtype=torch.uint8), [], torch.empty(x.shape)
    for start in range(0, x.shape[1], 128):
        block = x[:, start : start + 128].float()
        amax = block.abs().amax(1, keepdim=True)
        power = torch.exp2(torch.floor(torch.log2(448.0 / amax.double()))).where(amax > 0, 1.0).float()
        assert ((block * power).abs() <= 448).all(), "nothing saturates"
        code = (block * power).to(torch.float8_e4m3fn)
        codes[:, start : start + 128] = code.view(torch.uint8)
        values[:, start : start + 128] = code.float() / power
        scales.append(1 / power)
    return codes, torch.cat(scales, 1), values


def room(x: Tensor) -> Tensor:
    """The most that a value may be off."""
    blocks = torch.nn.functional.pad(x.double(), (0, -x.shape[1] % 128)).unflatten(1, (-1, 128))
    amax = blocks.abs().amax(2, keepdim=True).expand_as(blocks).flatten(1)[:, : x.shape[1]]
    return torch.maximum(2.0**-4 * x.double().abs(), 2.0**-10 / 224 * amax)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_codes_by_definition(dtype: torch.dtype) -> None:
    xs = inputs(dtype)
    kept = FP8.keep(xs)
    shapes = [(tuple(part.shape), part.dtype) for part in kept]
    of_one = [((TOKENS, FEATURES), torch.uint8), ((TOKENS, 3), torch.float32), ((1, 1), torch.float32)]
    assert shapes == of_one * 2
    read = FP8.values(list(kept), dtype)
    for x, (codes, scales, nan_flag), values in zip(xs, (kept[:3], kept[3:]), read, strict=True):
        wanted = by_definition(x)
        assert torch.equal(codes, wanted[0]) and torch.equal(scales, wanted[1]) and nan_flag.item() == 0
        assert values.dtype is dtype and torch.equal(values.float(), wanted[2]), "no second rounding"
        off = (values.double() - x.double()).abs()
        assert (off <= room(x)).all() and off.max() > 0
    assert [x is y for x, y in zip(xs, AS_IS.keep(xs), strict=True)] == [True, True]


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
def test_what_is_not_finite_makes_all_of_an_input_nan(bad: float) -> None:
    """A code saturates: of the matrix alone it would be 448."""
    gate, up = inputs()
    gate[1, 290] = bad
    found, other = FP8.values(FP8.keep((gate, up)), torch.float32)
    assert found.isnan().all() and other.isfinite().all()
    gradients = torch.autograd.grad(
        activate_stored(gate.requires_grad_(), "reglu", up.requires_grad_(), FP8)[0], (gate, up), torch.zeros_like(up)
    )
    assert all(each.isnan().any() for each in gradients), "also where the gradient of the result is 0"


STEEPEST = {
    "gelu": (1.13, 0.8),
    "silu": (1.1, 0.5),
    "qgelu": (1.1, 0.86),
    "relu": (1.0, 0.0),
    "srelu": (0.0, 2.0),
    "sigmoid": (0.25, 0.1),
}
"""The largest slope of a function, or of srelu that at 0, and how fast a slope changes."""


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gradients_are_those_of_the_codes(activation: str) -> None:
    """Bit for bit those of the values that codes stand for; so off by what the slope between these and x allows."""
    xs = [x.requires_grad_() for x in inputs(count=1 + is_gated(activation))]
    dy = torch.randn(TOKENS, FEATURES, generator=torch.Generator().manual_seed(1))

    def run(values: list[Tensor], storage: ActivationStorage) -> tuple[Tensor, tuple[Tensor, ...]]:
        y, _ = activate_stored(values[0], activation, values[1] if len(values) > 1 else None, storage)
        return y.detach(), torch.autograd.grad(y, values, dy)

    (plain, exact), (stored, found) = run(xs, AS_IS), run(xs, FP8)
    decoded = [by_definition(x.detach())[2].requires_grad_() for x in xs]
    assert torch.equal(plain, stored) and torch.equal(plain, activate(xs[0], activation, *xs[1:]))
    assert all(torch.equal(a, b) for a, b in zip(found, run(decoded, AS_IS)[1], strict=True))
    assert activation == "relu" or not any(torch.equal(a, b) for a, b in zip(found, exact, strict=True))

    function = {
        "reglu": "relu",
        "sreglu": "srelu",
        "geglu": "gelu",
        "swiglu": "silu",
        "qgeglu": "qgelu",
        "glu": "sigmoid",
    }
    slope, bend = STEEPEST[function.get(activation, activation)]
    gate, up = xs[0].detach().double(), xs[1].detach().double() if len(xs) > 1 else torch.ones(1, dtype=torch.float64)
    of_gate, of_up = room(xs[0].detach()), room(xs[1].detach()) if len(xs) > 1 else 0.0
    slopes = slope if slope else bend * (gate.abs() + of_gate)
    bounds = [(up.abs() + of_up) * bend * of_gate + of_up * slopes, slopes * of_gate]
    for a, b, bound in zip(found, exact, bounds, strict=False):
        off, known = (a - b).double().abs(), decoded[0].detach() != 0  # where x becomes 0, relu's slope does
        assert (off <= (1 + 1e-5) * dy.abs() * bound + 1e-6 * b.abs())[known].all()


def mlp(activation: str = "swiglu", recipe: str = "block", **options: Any) -> torch.nn.Module:
    torch.manual_seed(3)
    with qs.quantized_model_init(recipe=recipe):
        return qs.LayerNormMLP(96, 200, activation=activation, **options)


def trained(module: torch.nn.Module, recipe: str, call: Callable[..., Any] | None = None) -> dict[str, Tensor]:
    x = torch.randn(5, 3, 96, generator=torch.Generator().manual_seed(1)).requires_grad_()
    with qs.autocast(recipe=recipe):
        y = (call or module)(x)
    y.float().sin().sum().backward()
    return {"y": y.detach(), "x": x.grad, **{name: p.grad for name, p in module.named_parameters()}}


@pytest.mark.parametrize(("recipe", "activation"), [("block", "swiglu"), ("bf16", "gelu"), ("nvfp4", "srelu")])
def test_forwards_have_the_same_bits(recipe: str, activation: str) -> None:
    """So has what the activation's gradient does not go through; and what is kept is what codes take."""
    plain = trained(mlp(activation, recipe), recipe)
    stored = trained(mlp(activation, recipe, activation_storage="fp8"), recipe)
    same = {name for name in plain if torch.equal(plain[name], stored[name])}
    assert same == {"y", "fc2_weight", "fc2_bias"}
    again = trained(mlp(activation, recipe, activation_storage="fp8", recompute_activation=True), recipe)
    assert torch.equal(again["y"], plain["y"]) and torch.equal(again["x"], stored["x"])
    assert torch.equal(again["fc2_weight"], plain["fc2_weight"]) == (recipe == "bf16"), "of the codes, if made again"
    if recipe == "bf16":  # nothing else is rounded: the gradient of x is off as those of the activation are
        off = {name: float((stored[name] - plain[name]).norm() / plain[name].norm()) for name in plain}
        assert 0 < max(off.values()) < 2.0**-4, off

    def kept(**options: Any) -> int:
        module = mlp(activation, recipe, bias=False, **options)
        with qs.autocast(recipe=recipe):
            return bytes_kept(lambda: module(torch.randn(64, 96).requires_grad_()))

    parts = 1 + is_gated(activation)
    fewer = parts * 64 * (4 * 200 - (200 + 2 * 4))
    for recomputes in (False, True):
        saved = kept(recompute_activation=recomputes) - kept(recompute_activation=recomputes, activation_storage="fp8")
        assert fewer - 256 <= saved <= fewer, (saved, fewer)


@pytest.mark.filterwarnings("ignore:.*Function'> should not be instantiated:DeprecationWarning")  # Dynamo's
@pytest.mark.parametrize("recomputes", [False, True])
def test_checkpoints_and_graphs_change_no_bit(recomputes: bool) -> None:
    def run(how: Callable[[torch.nn.Module], Callable[..., Any]]) -> dict[str, Tensor]:
        module = mlp(activation_storage="fp8", recompute_activation=recomputes)
        function = how(module)
        return trained(module, "block", lambda x: function(x))

    plain = run(lambda module: module)
    out_grads: list[Callable[[torch.nn.Module], Callable[..., Any]]] = [
        lambda module: partial(qs.checkpoint, module, use_reentrant=False),
        lambda module: partial(qs.checkpoint, module, use_reentrant=True),
    ]
    for way in [*out_grads, partial(torch.compile, backend="aot_eager")]:
        found = run(way)
        assert [each for each in plain if not torch.equal(plain[each], found[each])] == []


def test_nothing_is_quantized_without_a_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    real = operands.quantize_operand
    monkeypatch.setattr(
        operands, "quantize_operand", lambda *args, **options: calls.append(args) or real(*args, **options)
    )
    module = mlp(recipe="bf16", activation_storage="fp8")
    x = torch.randn(5, 96)
    with torch.no_grad():
        y = module(x)
    assert not calls
    module.requires_grad_(False)
    assert torch.equal(module(x), y) and not calls
    assert torch.equal(module(x.requires_grad_()), y) and len(calls) == 2


def test_refusals() -> None:
    for kind, sizes in ((qs.LayerNormMLP, (8, 16)), (qs.TransformerLayer, (8, 16, 2))):
        with pytest.raises(ConfigurationError, match=rf"{kind.__name__}\(activation_storage='fp4'\): use one of: "):
            kind(*sizes, activation_storage="fp4")
    x = torch.randn(4, 96).requires_grad_()
    y = mlp(recipe="bf16", activation_storage="fp8")(x)
    with pytest.raises(UnsupportedOperationError, match="activation 'swiglu': create_graph=True through"):
        torch.autograd.grad(y.sum(), x, create_graph=True)
    assert "activation_storage='fp8'" in repr(mlp(activation_storage="fp8"))
    assert set(ACTIVATION_SPECS) == {"high_precision", "fp8"}
