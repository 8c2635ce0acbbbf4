"""Modules on kernels: within the bounds of the kernels, rotations to the bit; no kernel where none may run."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from itertools import product
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

import quantshard as qs
from quantshard import kernel_dispatch
from quantshard.kernels.fused import norm as kn
from quantshard.modules import layernorm_mlp, norm, rotary
from quantshard.modules.layernorm_mlp import ACTIVATIONS, activate
from quantshard.modules.norm import Normalization
from quantshard.modules.rotary import RotaryPositionEmbedding, apply_rotary_pos_emb
from tests.covering import exhaustive, in_turns
from tests.kernels import test_activation as of_activation, test_norm as of_norm
from tests.kernels.cases.base import agrees
from tests.kernels.cases.fused import EPS, ActivationReference, NormReference

pytestmark = [
    pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning"),  # NumPy's, in the interpreter
    pytest.mark.filterwarnings("ignore:.*Function'> should not be instantiated:DeprecationWarning"),  # Dynamo's
]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Kernels run on the tensors of a test; the names of those that ran."""
    names: list[str] = []
    monkeypatch.setattr(kernel_dispatch, "KERNEL_DEVICES", {"cuda", "cpu"})
    for module, name in (
        (norm.norm_kernel, "norm_statistics"),
        (norm.norm_kernel, "normalize_and_quantize"),
        (norm.norm_kernel, "norm_backward"),
        (layernorm_mlp.activation_kernel, "activate_and_quantize"),
        (layernorm_mlp.activation_kernel, "activate_backward_and_quantize"),
        (rotary.rotary_kernel, "rotate"),
    ):
        real = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *a, real=real, name=name, **k: names.append(name) or real(*a, **k))
    return names


@pytest.fixture
def on_oracle(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], list[Tensor]]], list[Tensor]]:
    def run(function: Callable[[], list[Tensor]]) -> list[Tensor]:
        with monkeypatch.context() as patch:
            patch.setattr(kernel_dispatch, "KERNEL_DEVICES", set())
            return function()

    return run


def data(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0, mean: float = 0.0) -> Tensor:
    return of_norm.values(*shape, dtype=dtype, seed=seed, mean=mean)


# Normalization


@pytest.mark.parametrize("kind", [qs.LayerNorm, qs.RMSNorm])
@pytest.mark.parametrize("zero_centered", [False, True])
def test_norms_are_within_the_bounds_of_their_kernels(kind, zero_centered, used):
    centered = kind is qs.LayerNorm
    module = kind(290, EPS, zero_centered_gamma=zero_centered, params_dtype=torch.bfloat16, device="cpu").to(DEVICE)
    with torch.no_grad():
        for seed, parameter in enumerate(module.parameters()):
            parameter.copy_(data(290, seed=8 + seed))
    x, dy = data(3, 5, 290, mean=1.0).requires_grad_(), data(3, 5, 290, seed=1)
    y = module(x)
    y.backward(dy)
    assert used == ["norm_statistics", "normalize_and_quantize", "norm_backward"]  # statistics are taken once
    rows, dy = x.detach().view(15, 290), dy.view(15, 290)
    bias = module.bias.detach() if centered else None
    exact = NormReference(rows, kn.NormParameters(module.weight.detach(), bias, float(zero_centered)), centered)
    of_norm.check([y.detach().view(15, 290)], [exact.result()])
    grads = [x.grad.view(15, 290), module.weight.grad, module.bias.grad if centered else None]
    of_norm.check(grads, exact.gradients(dy))


@pytest.mark.parametrize("kind", ["LayerNorm", "RMSNorm"])
@pytest.mark.parametrize("unused", [None, 0, 1])
def test_residuals_are_added_in_the_kernels(kind, unused, used):
    """The normalized sum and the sum, of which one may have no gradient."""
    normalization = Normalization(kind, 290, EPS, False)
    x, residual, more = (data(2, 6, 290, seed=seed) for seed in range(3))
    x.requires_grad_(), residual.requires_grad_()
    parameters = of_norm.parameters(290, kind == "LayerNorm")
    weight, bias = parameters.gamma.requires_grad_(), parameters.beta
    results = normalization.with_residual(x, weight, bias, residual)
    assert torch.equal(results[1], x + residual)
    exact = NormReference(results[1].detach().view(12, 290), parameters, bias is not None)
    of_norm.check([results[0].detach().view(12, 290)], [exact.result()])
    dy = data(2, 6, 290, seed=4)
    read = [n for n in range(2) if n != unused]
    torch.autograd.backward([results[n] for n in read], [(dy, more)[n] for n in read])
    bound, *_ = exact.gradients(dy.view(12, 290) * (unused != 0))
    later = more.view(12, 290) * (unused != 1)
    assert agrees(x.grad.view(12, 290), of_norm.added(bound, later))
    assert torch.equal(x.grad, residual.grad)
    assert (weight.grad is None) == (unused == 0)
    assert used.count("norm_backward") == (unused != 0)


def test_what_the_norm_kernels_do_not_take_goes_to_the_oracle(used, on_oracle):
    """Float64, and a residual of another dtype, which sets that of the sum."""
    weight = torch.ones(6, device=DEVICE)
    x = data(5, 6).double().requires_grad_()
    normalization = Normalization("RMSNorm", 6, EPS, False)
    normalization(x, weight, None).sum().backward()
    normalization(data(5, 6), weight.double(), None)
    assert used == []
    out, total = normalization.with_residual(data(5, 6), weight, None, data(5, 6).float())
    assert out.dtype == total.dtype == torch.float32
    assert used == ["norm_statistics", "normalize_and_quantize"]


def test_parameters_apart_in_memory_are_read_where_they_lie(used):
    wide, x = data(14, dtype=torch.float32), data(5, 7)
    strided, whole = wide[::2].requires_grad_(), wide[::2].clone().requires_grad_()
    results = [Normalization("LayerNorm", 7, EPS, False)(x, weight, weight) for weight in (strided, whole)]
    assert torch.equal(*results) and len(used) == 4


# Activations


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_are_within_the_bounds_of_their_kernels(name, used):
    gated = layernorm_mlp.is_gated(name)
    gate, dh = of_activation.values(9, 22, torch.bfloat16), of_activation.values(9, 22, torch.bfloat16, 2).clamp(-9, 9)
    up = of_activation.values(9, 22, torch.bfloat16, 1).clamp(-100, 100).flip(0) if gated else None
    leaves = [t.view(3, 3, 22).requires_grad_() for t in (gate, up) if t is not None]
    h = activate(leaves[0], name, *leaves[1:])
    grads = torch.autograd.grad(h, leaves, dh.view(3, 3, 22))
    assert used == ["activate_and_quantize", "activate_backward_and_quantize"]
    exact = ActivationReference(gate.detach(), name, None if up is None else up.detach())
    of_norm.check([h.detach().view(9, 22)], [exact.result()])
    of_norm.check([t.view(9, 22) for t in grads], exact.gradients(dh)[: len(grads)])


def test_activations_of_other_layouts_and_dtypes(used, on_oracle):
    """Transposed inputs, halves of one output, a vector and a scalar; two dtypes go to the oracle."""
    both = data(10, 8)
    for gate, up in (both.chunk(2, -1), (both.t(), both.t().flip(0)), (both[0, :4], both[0, 4:]), (both[0, 0],) * 2):
        gate, up = gate.detach().requires_grad_(), up.detach().requires_grad_()

        def run(gate: Tensor = gate, up: Tensor = up) -> list[Tensor]:
            h = activate(gate, "sreglu", up)
            return [h, *torch.autograd.grad(h, (gate, up), torch.ones_like(h) * 3)]

        assert all(map(torch.equal, run(), on_oracle(run)))  # of exact functions
    assert len(used) == 8
    assert activate(data(3, 4), "swiglu", data(3, 4).float()).dtype == torch.bfloat16
    assert len(used) == 8


# Rotary embedding


@pytest.mark.parametrize(
    ("interleaved", "dtype", "tensor_format"),
    exhaustive(
        product([False, True], [torch.bfloat16, torch.float32], ["sbhd", "bshd"]),
        in_turns([False, True], [torch.bfloat16, torch.float32], ["sbhd", "bshd"]),
    ),
)
def test_rotations_have_the_oracles_bits(interleaved, dtype, tensor_format, used, on_oracle):
    freqs = RotaryPositionEmbedding(12, 0.7, interleaved=interleaved)(7, device=DEVICE)
    t, dy = data(5, 3, 4, 12, dtype=dtype).requires_grad_(), data(5, 3, 4, 12, dtype=dtype, seed=1)

    def run() -> list[Tensor]:
        out = apply_rotary_pos_emb(t, freqs, tensor_format, interleaved=interleaved)
        return [out, *torch.autograd.grad(out, t, dy)]

    found = run()
    assert used == ["rotate", "rotate"]
    assert all(map(torch.equal, found, on_oracle(run)))


@pytest.mark.parametrize(
    ("fused", "interleaved", "separate"),
    exhaustive(
        [(*order, separate) for order in ((True, False), (True, True), (False, False)) for separate in (False, True)],
        [(True, False, False), (True, False, True), (True, True, False), (False, False, True)],
    ),
)
def test_attention_rotates_as_the_oracle_does(fused, interleaved, separate, used, on_oracle):
    """Queries, keys and values from one GEMM in either order or from three, with one table of angles or two."""
    module = qs.MultiheadAttention(
        24, 4, 6, 0.0, num_gqa_groups=2, fuse_qkv_params=fused, qkv_weight_interleaved=interleaved, bias=False,
        device="cpu", params_dtype=torch.bfloat16,
    ).to(DEVICE)  # fmt: skip
    freqs = RotaryPositionEmbedding(6)(5, device=DEVICE)
    angles = (freqs, freqs / 2) if separate else freqs
    x = data(5, 2, 24).requires_grad_()

    def run() -> list[Tensor]:
        y = module(x, rotary_pos_emb=angles)
        return [y, *torch.autograd.grad(y, [x, *module.parameters()], data(5, 2, 24, seed=1))]

    found = run()
    together = fused and not interleaved and not separate
    assert used == ["rotate"] * (3 if together else 4)
    assert all(map(torch.equal, found, on_oracle(run)))


def test_one_table_serves_queries_and_keys(monkeypatch, used):
    freqs, q, k = RotaryPositionEmbedding(6)(5, device=DEVICE), data(5, 2, 4, 6), data(5, 2, 2, 6)
    made = []
    real = rotary._table
    monkeypatch.setattr(rotary, "_table", lambda *a: made.append(1) or real(*a))
    layout = rotary.HeadLayout("sbhd", False)
    rotary.rotate_queries_and_keys(q, k, freqs, layout)
    assert len(made) == 1
    rotary.rotate_queries_and_keys(q, k[:3], freqs, layout)  # keys of fewer positions
    assert len(made) == 3


def test_layers_share_the_table_of_their_angles():
    freqs, q = RotaryPositionEmbedding(6)(5, device=DEVICE), data(5, 2, 4, 6)
    layout = rotary.HeadLayout("sbhd", False)

    def table(freqs: Tensor, t: Tensor = q, layout: rotary.HeadLayout = layout) -> rotary.RotaryTable:
        return rotary._table(t, freqs, layout)

    first = table(freqs)
    assert table(freqs, data(5, 2, 2, 6)).cos is first.cos  # keys, or those of another layer
    assert torch.equal(table(freqs, q[:3]).cos, first.cos[:3])
    assert table(freqs, q.transpose(0, 1), layout._replace(tensor_format="bshd")).cos.shape == (1, 5, 1, 6)
    again = table(freqs)
    assert again.cos is not first.cos and torch.equal(again.cos, first.cos)  # one for each angles, the last
    freqs.add_(1)
    assert torch.equal(table(freqs).cos, freqs.cos())
    with torch.inference_mode():
        assert table(freqs).cos is not table(freqs).cos
    assert not table(freqs).cos.is_inference()
    with mock.patch.object(rotary.kernel_dispatch, "is_capturing", lambda: True):
        assert table(freqs).cos is not table(freqs).cos  # made by each replay of the graph
    kept = weakref.ref(table(freqs).cos)
    del first, again, freqs
    gc.collect()
    assert kept() is None


def test_angles_that_are_learned_get_their_gradient(used):
    freqs = RotaryPositionEmbedding(6)(5, device=DEVICE).requires_grad_()
    for _ in range(2):  # each forward has a table of its own
        apply_rotary_pos_emb(data(5, 2, 4, 6), freqs).sum().backward()
    assert freqs.grad.abs().sum() > 0 and used == []


# Whole layers


def layer(**options) -> qs.TransformerLayer:
    torch.manual_seed(0)
    return qs.TransformerLayer(
        24, 40, 4, 2, hidden_dropout=0.0, attention_dropout=0.0, normalization="RMSNorm", activation="swiglu",
        bias=False, fuse_qkv_params=True, qkv_weight_interleaved=False, device="cpu", **options,
    ).to(DEVICE)  # fmt: skip


def test_a_transformer_layer_runs_on_kernels(used, on_oracle):
    module, freqs = layer(), RotaryPositionEmbedding(6)(5, device=DEVICE)
    x, dy = data(5, 2, 24, dtype=torch.float32).requires_grad_(), data(5, 2, 24, dtype=torch.float32, seed=1)

    def run() -> list[Tensor]:
        y = module(x, rotary_pos_emb=freqs)
        return [y, *torch.autograd.grad(y, [x, *module.parameters()], dy)]

    found = run()
    forward = ["norm_statistics", "normalize_and_quantize", "rotate"]
    forward += ["norm_statistics", "normalize_and_quantize", "activate_and_quantize"]
    backward = ["activate_backward_and_quantize", "norm_backward", "rotate", "rotate", "norm_backward"]
    assert used == forward + backward
    for a, b in zip(found, on_oracle(run), strict=True):
        assert (a - b).abs().max() <= 1e-5 * b.abs().max()


def test_what_is_traced_runs_on_no_kernel_but_that_of_rotations(used, on_oracle):
    module, freqs = layer(), RotaryPositionEmbedding(6)(5, device=DEVICE)
    x = data(5, 2, 24, dtype=torch.float32).requires_grad_()
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")

    def run(function: Callable[..., Tensor]) -> list[Tensor]:
        y = function(x, rotary_pos_emb=freqs)
        return [y, *torch.autograd.grad(y.square().sum(), [x, *module.parameters()])]

    found = run(compiled)
    assert used == ["rotate"] * 3  # forward, and of queries and keys backward
    assert all(map(torch.equal, found, on_oracle(lambda: run(module))))


def test_a_second_derivative_is_the_oracles(used, on_oracle):
    """Of each function in the same point, with the same gradient of its result."""
    normalization, freqs = Normalization("LayerNorm", 12, EPS, False), RotaryPositionEmbedding(4)(3, device=DEVICE)
    x, other = (data(3, 2, 12, dtype=torch.float32, seed=seed).requires_grad_() for seed in range(2))
    weight = data(12, dtype=torch.float32, seed=3).requires_grad_()
    dy = data(3, 2, 12, dtype=torch.float32, seed=4).requires_grad_()
    functions = [
        lambda: normalization(x, weight, weight),
        lambda: sum(normalization.with_residual(x, weight, weight, other)),
        lambda: activate(x, "geglu", other),
        lambda: activate(x, "srelu"),
        lambda: apply_rotary_pos_emb(x.view(3, 2, 3, 4), freqs).view(3, 2, 12) * 1.0,
        lambda: rotary.rotate_projection(x.view(3, 2, 3, 4), 1, 1, freqs, rotary.HeadLayout("sbhd", False))[0].repeat(
            1, 1, 3, 1
        ).view(3, 2, 12),
    ]  # fmt: skip
    for function in functions:

        def twice(function: Callable[[], Tensor] = function) -> list[Tensor]:
            first = torch.autograd.grad(function(), x, dy, create_graph=True)[0]
            second = torch.autograd.grad(first.square().sum(), [x, weight, other, dy], allow_unused=True)
            return [first, *(t for t in second if t is not None)]

        found, expected = twice(), on_oracle(twice)
        assert len(found) == len(expected) >= 2
        assert all(torch.allclose(a, b, rtol=1e-6, atol=1e-6) for a, b in zip(found, expected, strict=True))
    assert "norm_backward" not in used and used.count("norm_statistics") == 2


@pytest.mark.parametrize(("shape", "is_in_kernel"), [((4, 2, 1, 8), True), ((4, 1, 3, 8), False)])
def test_angles_of_each_sample_or_head(
    shape: tuple[int, ...], is_in_kernel: bool, used: list[str], on_oracle: Callable[..., Any]
) -> None:
    """The kernel reads angles of each token; PyTorch rotates heads that have their own."""
    angles, t = data(*shape, dtype=torch.float32, seed=1), data(4, 2, 3, 8)
    (expected,) = on_oracle(lambda: [apply_rotary_pos_emb(t, angles)])
    assert torch.equal(apply_rotary_pos_emb(t, angles), expected)
    assert used == ["rotate"] * is_in_kernel
