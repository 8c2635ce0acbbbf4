"""Fused activations where the registry of kernels has no case: edge values, one direction, pieces, poison, layouts."""

import pytest
import torch

pytest.importorskip("triton")

from quantshard import numerics
from quantshard.formats import ALL, FP8_1X128, FP8_128X128, NVFP4_1X16, Orientation, Scaling
from quantshard.kernels.fused import activation as ka, epilogue
from quantshard.kernels.fused.epilogue import KernelOutputs
from quantshard.kernels.quantize import targets as kt
from quantshard.modules.layernorm_mlp import ACTIVATIONS, activate
from tests import oracle
from tests.kernels.asked import request_of
from tests.kernels.cases.base import U, agrees
from tests.kernels.cases.fused import ActivationReference

# numpy, under the interpreter, warns of what IEEE 754 defines
pytestmark = pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def values(rows, cols, dtype, seed=0):
    """Of many magnitudes, with the edges: zeros, subnormals, and so large that exp overflows."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, cols, generator=generator) * torch.exp(torch.randn(rows, cols, generator=generator))
    edges = torch.tensor([0.0, -0.0, 1e-40, -1e-40, 200.0, -200.0, 6e4, -6e4, -88.0, 88.0, -12.5, 3e-5])
    flat = x.view(-1)
    flat[: min(len(edges), len(flat) - 1)] = edges[: len(flat) - 1] if len(flat) > 1 else edges[:0]
    return x.to(dtype).to(DEVICE)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_edges_are_within_the_stated_bounds(name, dtype):
    gate, dh = values(5, 40, dtype), values(5, 40, dtype, seed=2).clamp(-100, 100)
    up = values(5, 40, dtype, seed=1).clamp(-100, 100).flip(0) if name in ka.GATED else None
    high, d_gate, d_up = (torch.empty_like(gate) for _ in range(3))
    ka.activate_and_quantize(gate, name, up, KernelOutputs(high=high))
    second = None if up is None else KernelOutputs(high=d_up)
    ka.activate_backward_and_quantize(dh, gate, name, up, KernelOutputs(high=d_gate), second)
    exact = ActivationReference(gate, name, up)
    assert agrees(high, exact.result())
    assert all(map(agrees, (d_gate, None if up is None else d_up), exact.gradients(dh)))


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_results_are_the_oracles_or_their_neighbours(name):
    gate, dh, up = (values(33, 257, torch.bfloat16, seed).clamp(-30, 30).requires_grad_() for seed in range(3))
    up = up if name in ka.GATED else None
    want = activate(gate, name, up)
    wanted = torch.autograd.grad(want, [gate] if up is None else [gate, up], dh)
    got = [torch.empty_like(gate, requires_grad=False) for _ in range(3)]
    gate, dh, up = gate.detach(), dh.detach(), None if up is None else up.detach()
    ka.activate_and_quantize(gate, name, up, KernelOutputs(high=got[0]))
    ka.activate_backward_and_quantize(
        dh, gate, name, up, KernelOutputs(high=got[1]), None if up is None else KernelOutputs(high=got[2])
    )
    for one, other in zip(got, (want, *wanted), strict=False):
        if "re" in name:  # no exp: every operation is exact or rounded the same
            assert torch.equal(one, other)
        else:
            apart = (one.float() - other.float()).abs()
            cancelled = 2.0**-19 * (1 + gate.float().abs()) * (1 + dh.float().abs()) * (1 if up is None else 30)
            assert (apart <= 2.0**-7 * other.float().abs() + cancelled).all()


@pytest.mark.parametrize("name", ["gelu", "silu", "qgelu"])
def test_the_largest_numbers_do_not_become_nan(name):
    """x**2 overflows, and x**3, where the oracle's gelu has no gradient: infinity times zero."""
    x = torch.tensor([[-1e38, -1e20, -1e13, -200.0, 200.0, 1e13, 1e20, 1e38]], device=DEVICE)
    high, slope = torch.empty_like(x), torch.empty_like(x)
    ka.activate_and_quantize(x, name, None, KernelOutputs(high=high))
    ka.activate_backward_and_quantize(torch.ones_like(x), x, name, None, KernelOutputs(high=slope))
    assert torch.equal(high, x.clamp(min=0)) and torch.equal(slope, (x > 0).float())


def request(fmt, scaling, grids, dtype, transposed=False, words=None):
    copy = fmt.copies[Orientation.ROWWISE]
    given = oracle.encode_scales(grids, fmt, scaling, dtype)[copy.scale.name] if ALL in copy.block else None
    return request_of(
        copy, scaling, multipliers=given, second_amax=grids.get("amax"), words=words, transposed=transposed
    )


def same_codes(target, high, fmt, scaling, grids, drawn=None):
    """Codes, scales and transposed codes are what the oracle makes of the high-precision result."""
    copy = fmt.copies[Orientation.ROWWISE]
    codes = numerics.quantize_codes(high, copy, oracle.encode_scales(grids, fmt, scaling, high.dtype), (0, 0), drawn)
    assert torch.equal(target.codes, codes)
    if target.scale is not None:
        assert torch.equal(target.scale, oracle.scales(grids, fmt, scaling, high.dtype)[copy.scale.name])
    if target.transposed is not None:
        unpacked = numerics.unpack(codes, copy.codes.encoding, high.shape[1]).t().contiguous()
        assert torch.equal(target.transposed, numerics.pack(unpacked, copy.codes.encoding))


@pytest.mark.parametrize("backward", [False, True])
def test_two_programs_fit_on_a_multiprocessor(backward):
    """Where a program would take most of its 65536 registers for itself, they are bounded."""
    like = torch.ones(37, 290, dtype=torch.bfloat16, device=DEVICE)
    asked = request(FP8_1X128, Scaling(), numerics.amaxes(like, FP8_1X128), like.dtype)
    launch = epilogue.plan_epilogue(KernelOutputs(asked, asked), like, backward=backward).constants
    assert (launch["TILE"], launch["num_warps"], launch["maxnreg"]) == (kt.TileShape(128, 128, 4), 8, 128)
    assert 2 * 32 * launch["num_warps"] * launch["maxnreg"] == 65536
    alone = epilogue.plan_epilogue(KernelOutputs(asked), like, backward=backward).constants
    assert (alone["maxnreg"] is None) != backward


def test_either_direction_alone_and_one_gradient_alone():
    shape, fmt, scaling = (37, 290), FP8_1X128, Scaling()
    gate, up, dh = (values(*shape, torch.bfloat16, seed).clamp(-60, 60) for seed in range(3))
    high, d_up, sums = torch.empty_like(gate), torch.empty_like(gate), torch.empty(290, device=DEVICE)
    asked = request_of(fmt.copies[Orientation.ROWWISE], scaling)
    one, two = ka.activate_and_quantize(gate, "swiglu", up, KernelOutputs(columnwise=asked, high=high))
    assert one is None
    same_codes(two, high.t().contiguous(), fmt, scaling, numerics.amaxes(high.t(), fmt))
    found = ka.activate_backward_and_quantize(
        dh, gate, "swiglu", up, KernelOutputs(high=high, sums=sums), KernelOutputs(asked)
    )
    assert found[0] == (None, None) and found[1][1] is None
    ka.activate_backward_and_quantize(dh, gate, "swiglu", up, KernelOutputs(), KernelOutputs(high=d_up))
    same_codes(found[1][0], d_up, fmt, scaling, numerics.amaxes(d_up, fmt))
    assert ((sums.double() - high.double().sum(0)).abs() <= 37 * U * high.double().abs().sum(0)).all()


def test_a_piece_of_a_matrix_has_its_tiles_where_the_whole_has():
    """An origin within a block: more tiles than the shape alone would need, for a gradient without codes too."""
    shape, origin, fmt, scaling = (40, 290), (100, 254), FP8_128X128, Scaling()
    gate, sums = values(*shape, torch.bfloat16).clamp(-60, 60), torch.empty(290, device=DEVICE)
    copy, d_up, ones = fmt.copies[Orientation.ROWWISE], torch.empty_like(gate), torch.ones_like(gate)
    ka.activate_and_quantize(gate, "relu", None, KernelOutputs(high=d_up))
    grids = {copy.scale.name: numerics.block_amax(d_up, copy.block, origin)}
    given = oracle.encode_scales(grids, fmt, scaling, d_up.dtype)
    asked = request_of(copy, scaling, origin=origin, multipliers=given[copy.scale.name])
    _, (found, _) = ka.activate_backward_and_quantize(
        ones, gate, "reglu", ones, KernelOutputs(sums=sums), KernelOutputs(asked)
    )
    assert torch.equal(found.codes, numerics.quantize_codes(d_up, copy, given, origin))
    assert torch.equal(sums, (gate > 0).float().sum(0))


def test_stochastic_rounding_draws_the_words_of_each_gradient():
    shape, dtype, fmt, scaling = (5, 64), torch.bfloat16, NVFP4_1X16, Scaling(stochastic_rounding=True)
    gate, up, dh = (values(*shape, dtype, seed).clamp(-60, 60) for seed in range(3))
    highs = [torch.empty_like(gate) for _ in range(2)]
    ka.activate_backward_and_quantize(dh, gate, "geglu", up, *(KernelOutputs(high=x) for x in highs))
    words = [kt.RandomBits(-12345678901234, 7, 3, shape), kt.RandomBits(1 << 33, 8, 1, shape)]
    turned_words = [w._replace(stream=w.stream + 5, global_shape=shape[::-1]) for w in words]
    asked = [[], []]
    for x, out_grads in zip(highs, asked, strict=True):
        for w, y in zip((words, turned_words), (x, x.t()), strict=True):
            out_grads.append(request(fmt, scaling, numerics.amaxes(y, fmt), dtype, words=w[x is highs[1]]))
    found = ka.activate_backward_and_quantize(
        dh, gate, "geglu", up, *(KernelOutputs(*out_grads) for out_grads in asked)
    )
    for targets, x, out_grads in zip(found, highs, asked, strict=True):
        for target, y, way in zip(targets, (x, x.t().contiguous()), out_grads, strict=True):
            w = way.words
            drawn = numerics.random_words(w.key, w.draw, w.stream, w.global_shape).to(DEVICE)
            same_codes(target, y, fmt, scaling, numerics.amaxes(y, fmt), drawn)


def scalar(x=0.0):
    return torch.full((), x, device=DEVICE)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_amax_alone_is_that_of_the_result(dtype):
    gate, up = (values(37, 290, dtype, seed).clamp(-60, 60) for seed in range(2))
    high, amax, kept = torch.empty_like(gate), scalar(), scalar(1e9)
    ka.activate_and_quantize(gate, "geglu", up, KernelOutputs(high=high))
    ka.activate_and_quantize(gate, "geglu", up, KernelOutputs(amax=amax))
    ka.activate_and_quantize(gate, "geglu", up, KernelOutputs(amax=kept))
    assert torch.equal(amax, high.abs().amax().float()) and kept == 1e9
    gate[36, 289] = torch.nan
    ka.activate_and_quantize(gate, "geglu", up, KernelOutputs(amax=amax))
    assert amax.isnan()


@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
def test_a_gradient_that_is_not_finite_poisons(bad):
    dh, gate, up = (values(37, 290, torch.bfloat16, seed).clamp(-9, 9) for seed in range(3))
    up[36, 289] = 0.0
    for at, d_gate_is_bad in [((36, 289), True), (None, False)]:
        if at is not None:
            dh[at] = bad
        nan_flag = [scalar(), scalar()]
        ka.activate_backward_and_quantize(dh, gate, "swiglu", up, *(KernelOutputs(nan_flag=p) for p in nan_flag))
        assert nan_flag[0].isnan() == d_gate_is_bad and nan_flag[1].isnan() == (at is not None)
        dh[36, 289] = 1.0
    of_bias = scalar()
    dh[3, 5] = bad
    ka.quantize_gradients([dh], [KernelOutputs(nan_flag=of_bias)])
    assert of_bias.isnan()


def test_sums_are_of_the_rounded_results():
    """Each is a tree over at most 37 terms: within 37 u of their magnitudes."""
    dh, gate, up = (values(37, 290, torch.bfloat16, seed).clamp(-60, 60) for seed in range(3))
    highs = [torch.empty_like(gate) for _ in range(2)]
    sums = [torch.empty(290, device=DEVICE) for _ in range(2)]
    ka.activate_backward_and_quantize(
        dh, gate, "swiglu", up, *(KernelOutputs(high=x, sums=s) for x, s in zip(highs, sums, strict=True))
    )
    of_grad = torch.empty(290, device=DEVICE, dtype=torch.bfloat16)
    ka.quantize_gradients([dh], [KernelOutputs(sums=of_grad)])
    for x, s in zip(highs, sums, strict=True):
        assert ((s.double() - x.double().sum(0)).abs() <= 37 * U * x.double().abs().sum(0)).all()
    error = (of_grad.double() - dh.double().sum(0)).abs()
    assert (error <= 2.0**-8 * of_grad.abs().double() + 37 * U * dh.double().abs().sum(0)).all()


@pytest.mark.parametrize("shape", [(0, 7), (7, 0)])
def test_nothing_gives_nothing(shape):
    x, sums, amax = torch.empty(shape, device=DEVICE), torch.ones(shape[1], device=DEVICE), scalar()
    ka.activate_and_quantize(x, "silu", None, KernelOutputs(high=x.clone(), sums=sums, amax=amax))
    ka.activate_backward_and_quantize(x, x, "silu", None, KernelOutputs(high=x.clone()))
    assert (sums == 0).all() and amax == 0


def test_halves_of_one_matrix_are_read_where_they_lie():
    both = values(9, 14, torch.bfloat16)
    gate, up = both.chunk(2, dim=1)
    high, want = torch.empty(9, 7, dtype=both.dtype, device=DEVICE), torch.empty(9, 7, dtype=both.dtype, device=DEVICE)
    ka.activate_and_quantize(gate, "swiglu", up, KernelOutputs(high=high))
    ka.activate_and_quantize(gate.contiguous(), "swiglu", up.t().contiguous().t(), KernelOutputs(high=want))
    assert torch.equal(high, want)
