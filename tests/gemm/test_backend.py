"""Matrix products of quantized operands: what native ones are given, and that they give what emulated ones do.

Without a GPU a stand-in takes the place of PyTorch's scaled product: it checks what that does (CUDA 13.0, PyTorch 2.11,
`ScaledBlas.cpp`) and reads scales where cuBLAS documents that they lie. Strides are checked of dims of one entry too:
PyTorch does, and allows what is no more than a view of one scale for one operand where the other's is so too.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from quantshard import formats, kernel_dispatch, private_torch, sharding
from quantshard.formats import E2M1, E4M3, E5M2, E8M0, FORMATS, Orientation
from quantshard.gemm import backend, hardware, operands, predictions
from quantshard.modules import Linear, autocast, quantized_model_init
from quantshard.numerics import decode, swizzled, unpack
from quantshard.recipe import DelayedScaling, Float8CurrentScaling, Gemm, MMParams, QuantSpec, Recipe, resolve
from quantshard.sharding import ceil_div
from quantshard.tensor.storage import QuantizedStorage
from tests.covering import exhaustive

TYPES = F.ScalingType
BY_NUMBER, SWIZZLE_BY_NUMBER = (
    {int(kind.value): kind for kind in kinds.__members__.values()} for kinds in (TYPES, F.SwizzleType)
)
ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
HOPPER, BLACKWELL = (9, 0), (10, 0)


def values_of(codes: Tensor) -> Tensor:
    """Codes [rows, bytes] of a native dtype -> float64."""
    if codes.dtype is torch.float4_e2m1fn_x2:
        stored = codes.view(torch.uint8)
        return decode(unpack(stored, E2M1, 2 * stored.shape[1]), E2M1).double()
    encoding = next(e for e in (E4M3, E5M2) if e.native is codes.dtype)
    return decode(codes.view(torch.uint8), encoding).double()


def swizzled_at(row: int, col: int, cols: int) -> int:
    """Where cuBLAS looks for the scale of a row and a block of it (its documentation, "1D block scaling")."""
    tile = row // 128 * ceil_div(cols, 4) + col // 4
    return tile * 512 + row % 32 * 16 + row % 128 // 32 * 4 + col % 4


def spread(side: Tensor, scales: Sequence[Tensor], recipes: Sequence[int], is_right: bool) -> Tensor:
    """The scale of each element of an operand [rows, K], from scales in the layout that is demanded."""
    rows, k = side.shape
    scale, recipe = scales[0], BY_NUMBER[recipes[0]]
    blocks = ceil_div(k, 128)
    if recipe == TYPES.TensorWise:
        assert scale.numel() == 1 and scale.dtype is torch.float32
        return scale.double().expand(rows, k)
    if recipe == TYPES.RowWise:
        assert scale.shape == ((1, rows) if is_right else (rows, 1)) and scale.dtype is torch.float32
        assert scale.stride() == ((rows, 1) if is_right else (1, 1))
        return scale.double().reshape(rows, 1).expand(rows, k)
    if recipe == TYPES.BlockWise1x128:
        assert scale.shape == (rows, blocks) and rows % 4 == 0
        assert scale.stride() == (1, rows), scale.stride()
        return scale.double().repeat_interleave(128, 1)[:, :k]
    if recipe == TYPES.BlockWise128x128:
        four = ceil_div(blocks, 4) * 4
        assert is_right and scale.shape == (four, ceil_div(rows, 128))
        assert scale.stride() == (1, four), scale.stride()
        return scale.t().double().repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :k]
    size = 32 if recipe == TYPES.BlockWise1x32 else 16
    encoding = E8M0 if size == 32 else E4M3
    cols = ceil_div(k, size)
    assert scale.dtype is encoding.native and scale.is_contiguous()
    assert scale.numel() == ceil_div(rows, 128) * 128 * ceil_div(cols, 4) * 4
    decoded = decode(scale.view(torch.uint8), encoding).double().tolist()
    grid = torch.tensor([[decoded[swizzled_at(i, j, cols)] for j in range(cols)] for i in range(rows)])
    whole = scales[1].double() if size == 16 else 1.0
    return (grid * whole).repeat_interleave(size, 1)[:, :k]


_WIDE = {(E4M3.native, E4M3.native), (E5M2.native, E4M3.native), (E4M3.native, E5M2.native)}
TAKEN: dict[F.ScalingType, set[tuple[Any, Any]]] = {
    TYPES.TensorWise: _WIDE,
    TYPES.RowWise: _WIDE,
    TYPES.BlockWise1x128: {(E4M3.native, E4M3.native)},
    TYPES.BlockWise1x32: {(E4M3.native, E4M3.native)},
    TYPES.BlockWise1x16: {(torch.float4_e2m1fn_x2, torch.float4_e2m1fn_x2)},
}
"""Codes of the left and right operand that PyTorch takes with each kind of scales (its `check_..._recipe`)."""


def stand_in(
    a: Tensor, b: Tensor, scale_a: Sequence[Tensor], recipe_a: Sequence[int], swizzle_a: Sequence[int],
    scale_b: Sequence[Tensor], recipe_b: Sequence[int], swizzle_b: Sequence[int], bias: Tensor | None,
    output_dtype: torch.dtype, contraction_dim: Sequence[int], use_fast_accum: bool,
) -> Tensor:  # fmt: skip
    """`torch._scaled_mm_v2`, in float64."""
    assert len(contraction_dim) == 0
    assert not (use_fast_accum and output_dtype == torch.float32)
    b = b.t()
    assert a.stride() == (a.shape[1], 1) and b.stride() == (b.shape[1], 1), "row-major by column-major"
    assert a.shape[1] == b.shape[1] and a.shape[1] % 16 == 0 and b.shape[0] % 16 == 0, (a.shape, b.shape)
    assert bias is None or (bias.dtype == output_dtype != torch.float32 and bias.shape == (b.shape[0],))
    assert tuple(side.dtype for side in (a, b)) in TAKEN[BY_NUMBER[recipe_a[0]]]
    left, right = values_of(a), values_of(b)
    out = (left * spread(left, scale_a, recipe_a, False)) @ (right * spread(right, scale_b, recipe_b, True)).t()
    return (out if bias is None else out + bias.double()).to(output_dtype)


@pytest.fixture(params=[HOPPER, BLACKWELL], ids=["9.0", "10.0"])
def capability(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[int, int]]:
    """A GPU of this capability: the one that is there, or a stand-in."""
    if ON_GPU:
        if torch.cuda.get_device_capability() != request.param:
            pytest.skip(f"the GPU is not of capability {request.param}")
    else:
        monkeypatch.setattr(hardware, "capability_of", lambda device: request.param)
        monkeypatch.setattr(private_torch, "scaled_mm", stand_in)
    yield request.param


PAIRS = {
    "tensor": ("fp8_e4m3", "fp8_e4m3", HOPPER, BLACKWELL),
    "gradient": ("fp8_e5m2", "fp8_e4m3", HOPPER, BLACKWELL),
    "row": ("fp8_1xrow", "fp8_1xrow", HOPPER),
    "vector by square": ("fp8_1x128", "fp8_128x128", HOPPER),
    "vector by vector": ("fp8_1x128", "fp8_1x128", HOPPER),
    "square by square": ("fp8_128x128", "fp8_128x128", HOPPER),
    "mx": ("mxfp8_1x32", "mxfp8_1x32", BLACKWELL),
    "mx by square": ("mxfp8_1x32", "mxfp8_32x32", BLACKWELL),
    "mx, 4 bits": ("mxfp4_1x32", "mxfp4_32x32"),
    "mx, 4 by 8 bits": ("mxfp4_1x32", "mxfp8_1x32"),
    "nv": ("nvfp4_1x16", "nvfp4_1x16", BLACKWELL),
    "nv by square": ("nvfp4_1x16", "nvfp4_16x16", BLACKWELL),
}
SHAPES = [(1, 1, 1), (3, 5, 7), (17, 256, 16), (64, 48, 128), (130, 257, 200), (5, 300, 1030), (260, 16, 512)]


def quantized(rows: int, cols: int, name: str, seed: int) -> QuantizedStorage:
    values = torch.randn(rows, cols, generator=torch.Generator().manual_seed(seed))
    values *= torch.rand(rows, 1, generator=torch.Generator().manual_seed(seed + 1)).exp()
    return operands.quantize_operand(values.bfloat16().to(DEVICE), QuantSpec(FORMATS[name]))


def in_double(storage: QuantizedStorage) -> Tensor:
    return storage.dequantize().double()


def close(found: Tensor, a: Tensor, b: Tensor, native: bool) -> None:
    """Within what float32 sums can be off, of products that the operands bound, and one rounding.

    FP8 tensor cores of Hopper align 32 products to the largest of them and keep 14 bits (DeepSeek-V3's report, 3.3.2):
    each loses up to 2**-13 of the largest, together no more than 2**-8 of the sum of their magnitudes. What is emulated
    on a GPU rounds both operands to bfloat16.
    """
    exact = a @ b
    sums = (2.0**-8 if native else 2.0**-7) if ON_GPU else 2.0**-20
    room = sums * (a.abs() @ b.abs()) + torch.finfo(found.dtype).eps * exact.abs()
    assert found.shape == exact.shape
    assert ((found.double() - exact).abs() <= room + 1e-30).all()


@pytest.mark.parametrize("name", PAIRS)
def test_native_products(name: str, capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    left, right, *having = PAIRS[name]
    calls: list[int] = []
    real = private_torch.scaled_mm
    monkeypatch.setattr(private_torch, "scaled_mm", lambda *args: calls.append(1) or real(*args))
    for (m, n, k), dtype in itertools.product(SHAPES, (torch.bfloat16, torch.float32)):
        a, b = quantized(m, k, left, 0), quantized(n, k, right, 2)
        close(backend.matmul(a, b, dtype, transpose_b=True), in_double(a), in_double(b).t(), capability in having)
        if FORMATS[right].transposable:  # dgrad
            b = quantized(k, n, right, 2)
            close(backend.matmul(a, b, dtype), in_double(a), in_double(b), capability in having)
        if FORMATS[left].transposable and FORMATS[right].transposable:  # wgrad
            a = quantized(k, m, left, 0)
            product = backend.matmul(a, b, dtype, transpose_a=True)
            close(product, in_double(a).t(), in_double(b), capability in having)
    assert bool(calls) == (capability in having), "it must be native where there is one, and only there"


@pytest.mark.parametrize("name", PAIRS)
def test_bias_and_poison(name: str, capability: tuple[int, int]) -> None:
    left, right, *_ = PAIRS[name]
    a, b = quantized(7, 40, left, 0), quantized(9, 40, right, 2)
    nothing, nan = torch.zeros((), device=DEVICE), torch.full((), torch.nan, device=DEVICE)
    for dtype, of_bias in itertools.product((torch.bfloat16, torch.float32), repeat=2):
        bias = torch.randn(9, device=DEVICE).to(of_bias)
        plain = backend.matmul(a, b, torch.float32, transpose_b=True)
        found = backend.matmul(a, b, dtype, transpose_b=True, bias=bias)
        bound = torch.finfo(dtype).eps * (plain + bias.float()).abs() + 2.0**-7 * plain.abs().max() * ON_GPU + 1e-6
        assert found.dtype is dtype and ((found.float() - plain - bias.float()).abs() <= bound).all()
        assert torch.equal(backend.matmul(a, b, dtype, transpose_b=True, bias=bias, nan_flag=nothing), found)
        assert backend.matmul(a, b, dtype, transpose_b=True, nan_flag=nan).isnan().all()
    if FORMATS[right].transposable:  # dgrad; of an aligned shape too, whose scales are transposed with the codes
        for n in (9, 144):
            b = quantized(40 if n == 9 else 304, n, right, 2)
            a = quantized(7, b.shard.shape[0], left, 0)
            plain = backend.matmul(a, b, torch.bfloat16)
            assert torch.equal(backend.matmul(a, b, torch.bfloat16, nan_flag=nothing), plain) and plain.isfinite().all()
            assert backend.matmul(a, b, torch.bfloat16, nan_flag=nan).isnan().all()


def test_what_has_no_native_product_is_emulated(capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Two E5M2, blocks that a cut crosses, no elements, and operands in high precision."""

    def refuse(*_: object, **__: object) -> Tensor:
        raise AssertionError("not native")

    monkeypatch.setattr(private_torch, "scaled_mm", refuse)
    gradient = quantized(32, 64, "fp8_e5m2", 0)
    close(
        backend.matmul(gradient, gradient, torch.float32, transpose_b=True), in_double(gradient),
        in_double(gradient).t(), False,
    )  # fmt: skip
    weight = quantized(300, 256, "fp8_128x128", 0)
    piece = weight.piece(0, 100, 100)  # its first block begins 28 rows above it
    vector = quantized(4, 256, "fp8_1x128", 1)
    close(
        backend.matmul(vector, piece, torch.float32, transpose_b=True), in_double(vector), in_double(piece).t(), False
    )
    half = quantized(4, 256, "fp16_1x128", 2)
    product = backend.matmul(half, half, torch.float32, transpose_b=True)
    close(product, in_double(half), in_double(half).t(), False)
    nobody = quantized(0, 256, "fp8_e4m3", 0)
    assert backend.matmul(nobody, quantized(8, 256, "fp8_e4m3", 1), torch.float32, transpose_b=True).shape == (0, 8)
    high = torch.randn(5, 256, device=DEVICE)
    close(backend.matmul(high, weight, torch.float32, transpose_b=True), high.double(), in_double(weight).t(), False)


@pytest.mark.parametrize(
    ("why", "pair", "shapes"),
    [
        ("no product of these formats", ("fp8_e5m2", "fp8_e5m2"), ((32, 64), (32, 64))),
        ("no product of these formats", ("fp16_1x128", "fp16_1x128"), ((4, 256), (8, 256))),
        ("no elements", ("fp8_e4m3", "fp8_e4m3"), ((0, 256), (8, 256))),
        ("crosses blocks", ("fp8_1x128", "fp8_128x128"), ((4, 256), (300, 256))),
    ],
    ids=lambda part: part if isinstance(part, str) else None,
)
def test_reasons(
    why: str, pair: tuple[str, str], shapes: tuple[tuple[int, int], tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """That a product is emulated for."""
    monkeypatch.setattr(hardware, "capability_of", lambda device: HOPPER)
    device = torch.device("cpu")
    (left, right), (of_left, of_right) = (FORMATS[name] for name in pair), (sharding.whole(shape) for shape in shapes)
    if "crosses" in why:
        of_right = of_right.piece(0, 100, 100)
    assert backend.plan_product(left, of_left, True, right, of_right, True, device, torch.bfloat16, None, False) is None
    rowwise = FORMATS["fp8_1xrow"]  # has no codes for dgrad
    for fmt, as_stored, native in ((FORMATS["fp8_e4m3"], False, True), (rowwise, True, True), (rowwise, False, False)):
        operand = fmt, sharding.whole((8, 8))
        plan = backend.plan_product(*operand, True, *operand, as_stored, device, torch.float32, None, False)
        assert (plan is not None) == native, "codes were quantized along the summed dim"


def test_an_aligned_piece_is_native(capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    real = private_torch.scaled_mm
    monkeypatch.setattr(private_torch, "scaled_mm", lambda *args: calls.append(1) or real(*args))
    weight, vector = quantized(300, 256, "fp8_128x128", 0), quantized(4, 256, "fp8_1x128", 1)
    for start, chunk in ((128, 128), (256, 128), (0, 100)):
        piece = weight.piece(0, start, chunk)
        close(
            backend.matmul(vector, piece, torch.bfloat16, transpose_b=True), in_double(vector), in_double(piece).t(),
            capability == HOPPER,
        )  # fmt: skip
    assert len(calls) == (3 if capability == HOPPER else 0)


@pytest.mark.parametrize("name", PAIRS)
def test_products_are_called_as_the_public_function_calls_them(
    name: str, capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By `torch.nn.functional.scaled_mm`, which takes enums for numbers."""
    left, right, *having = PAIRS[name]
    if capability not in having:
        pytest.skip("emulated")
    a, b, bias = quantized(20, 256, left, 0), quantized(32, 256, right, 2), torch.randn(32, device=DEVICE).bfloat16()
    ours: list[Any] = []
    public: list[Any] = []
    monkeypatch.setattr(private_torch, "scaled_mm", lambda *given: ours.append(given) or torch.zeros(20, 32))
    monkeypatch.setattr(torch, "_scaled_mm_v2", lambda *given: public.append(given))
    for added, fast in ((None, False), (bias, True)):
        backend.matmul(a, b, torch.bfloat16, transpose_b=True, bias=added, fast=fast)
        codes_a, codes_b, scales_a, kinds_a, swizzle_a, scales_b, kinds_b, swizzle_b, fused, dtype, _, fast = ours[-1]
        kinds = ([BY_NUMBER[kind] for kind in of_side] for of_side in (kinds_a, kinds_b))
        swizzles = ([SWIZZLE_BY_NUMBER[kind] for kind in of_side] or None for of_side in (swizzle_a, swizzle_b))
        F.scaled_mm(
            codes_a, codes_b, list(scales_a), next(kinds), list(scales_b), next(kinds), *swizzles, bias=fused,
            output_dtype=dtype, use_fast_accum=fast,
        )  # fmt: skip
    for mine, theirs in zip(ours, public, strict=True):
        assert len(mine) == len(theirs)
        for one, other in zip(mine, theirs, strict=True):
            assert one is other or list(one) == list(other)  # of lists, tensors are compared by identity first


def test_a_plan_serves_what_it_was_made_for_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another dtype, bias, GPU or shard of the same extents has another; operands of equal ones share it."""
    if ON_GPU:
        pytest.skip("by the stand-in")
    calls: list[Any] = []
    monkeypatch.setattr(private_torch, "scaled_mm", lambda *given: calls.append(given) or stand_in(*given))
    vector, large = quantized(4, 256, "fp8_1x128", 1), quantized(300, 256, "fp8_128x128", 0)
    whole, piece = quantized(100, 256, "fp8_128x128", 2), large.piece(0, 0, 100)  # whose scales are those of 300 rows
    other = quantized(100, 256, "fp8_128x128", 3)
    nothing = torch.zeros(100, dtype=torch.bfloat16)
    for there in (HOPPER, None, BLACKWELL, HOPPER):
        monkeypatch.setattr(hardware, "capability_of", lambda device, there=there: there)
        for weight, dtype, bias in itertools.product(
            (whole, piece, other), (torch.bfloat16, torch.float32), (None, nothing, nothing.float())
        ):
            calls.clear()
            found = backend.matmul(vector, weight, dtype, transpose_b=True, bias=bias)
            close(found, in_double(vector), in_double(weight).t(), False)
            assert found.dtype is dtype and len(calls) == (there == HOPPER)
            if calls:
                assert (calls[0][8] is None) == (bias is None or bias.dtype != dtype or dtype is torch.float32)
    vector.products = []
    for weight in (whole, other, whole):
        backend.matmul(vector, weight, dtype, transpose_b=True)
    assert len(vector.products) == 1


@pytest.mark.parametrize(
    ("recipe", "fast"),
    [
        ("delayed", [False] * 3),
        ("current", [False] * 3),
        ("block", [False] * 3),
        ("rowwise", [False] * 3),
        (Float8CurrentScaling(fp8_gemm_fprop=MMParams(False)), [True, False, False]),
        (Float8CurrentScaling(fp8_gemm_dgrad=MMParams(False)), [False, True, False]),
        (DelayedScaling(fp8_gemm_fprop=MMParams(False), fp8_gemm_wgrad=MMParams(False)), [True, False, True]),
    ],
    ids=["delayed", "current", "block", "rowwise", "fprop", "dgrad", "fprop and wgrad"],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_which_products_may_sum_fast(
    recipe: str | Recipe, fast: list[bool], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that the recipe names, and none that gives float32, as weight gradients of float32 weights are."""
    if ON_GPU and torch.cuda.get_device_capability() != HOPPER:
        pytest.skip("of Hopper")
    real, seen = private_torch.scaled_mm if ON_GPU else stand_in, []
    monkeypatch.setattr(private_torch, "scaled_mm", lambda *a: seen.append(a[-1]) or real(*a))
    if not ON_GPU:
        monkeypatch.setattr(hardware, "capability_of", lambda device: HOPPER)
    with quantized_model_init(enabled=False, recipe=recipe):
        layer = Linear(128, 128, bias=False, params_dtype=dtype, device=DEVICE)
    x = torch.randn(16, 128, dtype=dtype, device=DEVICE, requires_grad=True)
    with autocast(recipe=recipe):
        y = layer(x)
    y.backward(torch.randn_like(y))
    turned = [True, False, True] if recipe == "rowwise" else [True] * 3  # dgrad of rowwise weights reads values
    assert seen == [flag and dtype == torch.bfloat16 for flag, native in zip(fast, turned, strict=True) if native]


def test_the_transposed_copy_serves_wgrad(capability: tuple[int, int]) -> None:
    """As `producers.both_ways` gives it: a storage of the transpose."""
    a, b = quantized(40, 24, "fp8_e5m2", 0), quantized(40, 33, "fp8_e4m3", 2)
    expected = backend.matmul(a, b, torch.float32, transpose_a=True)

    def turned(s: QuantizedStorage) -> QuantizedStorage:
        parts = {"codes": s.components["codes"].t().contiguous(), "scale_inv": s.components["scale_inv"]}
        return QuantizedStorage(s.spec, sharding.whole((s.shard.shape[1], s.shard.shape[0])), parts)

    assert torch.equal(backend.matmul(turned(a), turned(b), torch.float32, transpose_b=True), expected)


def test_paths_are_named(capability: tuple[int, int]) -> None:
    device = torch.device("cuda")
    native = {
        name: predictions.gemm_path(resolve(name).weight, device)[0] for name in ("current", "block", "mxfp8", "nvfp4")
    }
    hopper = capability == HOPPER
    assert native == {
        "current": "native",
        "block": "native" if hopper else "emulated",
        "mxfp8": "emulated" if hopper else "native",
        "nvfp4": "emulated" if hopper else "native",
    }
    path, reason = predictions.gemm_path(resolve("mxfp8").weight, device)
    assert ("not yet run on this hardware" in reason) == (not hopper), "only H200s were there"
    assert path == "native" or "9.0" in reason


SIZES = (1, 16, 17, 127, 128, 129, 256)
SMALL = tuple(itertools.product(SIZES, repeat=3)) if ON_GPU else tuple(
    (m, n, SIZES[(i + j) % len(SIZES)]) for i, m in enumerate(SIZES) for j, n in enumerate(SIZES)
)  # fmt: skip


def with_column_scales(storage: QuantizedStorage) -> QuantizedStorage:
    """Make the scales column-major, as kernels store scales for GEMMs that read them so."""
    name = storage.spec.format.copies[Orientation.ROWWISE].scale.name
    transposed = storage.components[name].t().contiguous().t()
    return replace(storage, components=storage.components | {name: transposed})


def orientations(
    left: str, right: str, m: int, n: int, k: int, made: Callable[[int, int, str, int], QuantizedStorage]
) -> Iterator[tuple[QuantizedStorage, QuantizedStorage, bool, bool]]:
    """Operands of fprop and, where one copy serves both directions, of dgrad and wgrad; which are transposed."""
    yield made(m, k, left, 0), made(n, k, right, 2), False, True
    if FORMATS[right].transposable:
        yield made(m, k, left, 0), made(k, n, right, 2), False, False
        if FORMATS[left].transposable:
            yield made(k, m, left, 0), made(k, n, right, 2), True, False


EVERY_PAIR = list(itertools.product(PAIRS, [HOPPER, BLACKWELL]))
ONCE = [
    (name, (having or [HOPPER])[turn % len(having or [HOPPER])])
    for turn, (name, (_, _, *having)) in enumerate(PAIRS.items())
]
"""Each pair on one GPU, where its product is native."""


@pytest.mark.parametrize(
    ("name", "capability"),
    exhaustive(EVERY_PAIR, EVERY_PAIR if ON_GPU else ONCE),
    indirect=["capability"],
    ids=lambda part: part if isinstance(part, str) else f"{part[0]}.{part[1]}",
)
def test_small_products(name: str, capability: tuple[int, int]) -> None:
    """Of every combination of sizes, in both dtypes, with a bias and without, on a GPU; else of every two, in turns.

    Operands come from the oracle, whose shapes are compiled by nothing.
    """
    left, right, *having = PAIRS[name]
    made, right_ones = lru_cache(None)(quantized), []
    sums = (2.0**-8 if capability in having else 2.0**-7) if ON_GPU else 2.0**-20
    with kernel_dispatch.kernels_only_on():
        for turn, (m, n, k) in enumerate(SMALL):
            bias = torch.randn(n, generator=torch.Generator().manual_seed(4)).bfloat16().to(DEVICE)
            for a, b, turned_a, turned_b in orientations(left, right, m, n, k, made):
                x, y = in_double(a).t() if turned_a else in_double(a), in_double(b).t() if turned_b else in_double(b)
                exact, room = x @ y, sums * (x.abs() @ y.abs()) + 1e-30
                every = list(itertools.product((torch.bfloat16, torch.float32), (None, bias)))
                for dtype, added in every if ON_GPU else (every[turn % 2], every[3 - turn % 2]):
                    swapped = (with_column_scales(a), b) if dtype is torch.float32 else (a, with_column_scales(b))
                    found = backend.matmul(
                        *swapped, dtype, transpose_a=turned_a, transpose_b=turned_b, bias=added
                    )  # fmt: skip
                    total = exact if added is None else exact + added.double()
                    bound = room + torch.finfo(dtype).eps * total.abs() + 2.0**-22 * (total - exact).abs()
                    assert found.shape == (m, n) and found.dtype is dtype
                    right_ones.append(((found.double() - total).abs() <= bound).all())
    assert torch.stack(right_ones).all()


@pytest.mark.skipif(not ON_GPU, reason="where kernels store scales and products read them")
@pytest.mark.parametrize("recipe", ["delayed", "current", "block", "rowwise"])
@pytest.mark.parametrize(
    "sizes", [(256, 128, 256), (1, 128, 128), (17, 16, 1), (129, 127, 128)], ids=lambda s: "x".join(map(str, s))
)
def test_small_layers_on_kernels(sizes: tuple[int, int, int], recipe: str) -> None:
    """Rows, in_features and out_features of a layer: near what it gives without kernels, whose codes are the same."""
    rows, features, outputs = sizes
    torch.manual_seed(0)
    with quantized_model_init(recipe=recipe):
        layer = Linear(features, outputs, bias=True, params_dtype=torch.bfloat16, device=DEVICE)
    x, dy = (torch.randn(rows, size, dtype=torch.bfloat16, device=DEVICE) for size in (features, outputs))
    found = []
    for types in (("cuda",), ()):
        leaf, used = x.clone().requires_grad_(), copy.deepcopy(layer)  # its histories are those of a new one
        with kernel_dispatch.kernels_only_on(*types):
            with autocast(recipe=recipe):
                y = used(leaf)
            y.backward(dy)
        found.append([t.detach().double() for t in (y, leaf.grad, used.weight.grad)])
    for on_kernels, without in zip(*found, strict=True):
        assert (on_kernels - without).norm() <= 2.0**-6 * without.norm()


STRIDES: dict[Any, Callable[[int, int], tuple[int, int]]] = {
    hardware.by_rows: lambda rows, blocks: (1, 1),
    hardware.by_rows_right: lambda rows, blocks: (rows, 1),
    hardware.by_columns: lambda rows, blocks: (1, rows),
    hardware.by_four: lambda rows, blocks: (1, ceil_div(blocks, 4) * 4),
}
"""The strides of a layout, by the rows and columns of the grid before."""


def as_found(grid: Tensor) -> Iterator[Tensor]:
    """A grid in the memory layouts that operands have: by rows, by columns, transposed, a piece of a larger one, and
    with strides of single entries that are those of nothing."""
    rows, cols = grid.shape
    yield grid
    yield grid.t().contiguous().t()
    larger = grid.new_zeros(rows + 2, cols + 3)
    larger[1:-1, 2:-1] = grid
    yield larger[1:-1, 2:-1]
    yield larger.t().contiguous().t()[1:-1, 2:-1]
    strides = (cols if rows > 1 else 77, 1 if cols > 1 else 77)
    yield grid.clone().as_strided((rows, cols), strides if cols > 1 or rows == 1 else (1, 77))


@pytest.mark.parametrize("layout", STRIDES, ids=lambda layout: layout.__name__)
def test_strides_of_scales(layout: Callable[[Tensor], Tensor]) -> None:
    """Exactly those that are promised, also of a dim of one entry, whatever the strides of the grid."""
    for size, k in itertools.product(SIZES, (*SIZES, 512, 640)):
        if layout in (hardware.by_rows, hardware.by_rows_right):
            shape = (size, 1)
        else:
            shape = (ceil_div(size, 128) if layout is hardware.by_four else size, ceil_div(k, 128))
        grid = torch.rand(shape)
        for found in as_found(grid):
            assert torch.equal(found, grid)
            laid = layout(found)
            assert laid.stride() == STRIDES[layout](*shape), (shape, found.stride())
            turned = laid if layout in (hardware.by_rows, hardware.by_columns) else laid.t()
            assert torch.equal(turned[:, : shape[1]], grid)


def test_scales_of_every_native_product_have_a_layout_that_is_tested() -> None:
    """Or none: one scale, and the flat bytes of the swizzle."""
    sides = [side for native in hardware.NATIVE.values() for side in (native.left, native.right)]
    assert {side.layout for side in sides if not side.swizzle} - {hardware.as_single} == STRIDES.keys()


def test_the_swizzle() -> None:
    """Of rows and columns that fill no tile: each byte lies where cuBLAS looks for it, zeros elsewhere."""
    for rows, cols in ((1, 1), (128, 4), (129, 5), (300, 9)):
        grid = torch.randint(1, 255, (rows, cols), dtype=torch.uint8)
        flat = swizzled(grid)
        found = torch.tensor([[int(flat[swizzled_at(i, j, cols)]) for j in range(cols)] for i in range(rows)])
        assert torch.equal(found, grid.long()) and flat.count_nonzero() == rows * cols
        assert torch.equal(swizzled(grid.t().contiguous().t()), flat)


def test_rows_name_the_formats_that_recipes_use() -> None:
    """Every weight format of a named recipe has a native product on some GPU."""
    kinds = {kind for pair in hardware.NATIVE for kind in pair}
    for name in ("delayed", "current", "block", "rowwise", "mxfp8", "nvfp4"):
        cell = resolve(name).weight
        assert cell is not None
        kind = hardware.stored_kind(cell.format)
        assert kind in kinds or hardware.flat(kind) in kinds, name
    assert formats.ALL not in (128, 32, 16)


@pytest.mark.parametrize(
    ("name", "emulated"),
    [
        *(
            (name, ())
            for name in ("current", "delayed", "block", "rowwise", "current/wgrad:bf16", "current/fprop:bf16")
        ),
        ("current/fprop:block", (Gemm.FPROP,)),
        ("current/dgrad:mxfp8", (Gemm.DGRAD,)),
        ("nvfp4/wgrad:current", (Gemm.FPROP, Gemm.DGRAD)),
        ("nvfp4/dgrad:current/wgrad:current", (Gemm.FPROP, Gemm.DGRAD)),
    ],
)
def test_a_layer_is_native_if_all_its_products_are(
    name: str, emulated: tuple[Gemm, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A recipe mixed by GEMM may have formats that no product takes together, which strict mode and explain tell."""
    monkeypatch.setattr(hardware, "capability_of", lambda device: HOPPER)
    recipe, device = resolve(name), torch.device("meta")
    assert predictions.emulated_gemms(recipe, HOPPER) == emulated
    path, why = predictions.gemm_path(recipe.weight, device, recipe)
    assert path == ("emulated" if emulated else "native") and (
        "emulated" in predictions.fallbacks(None, recipe, device)
    ) == bool(emulated)
    assert not emulated or name.startswith("nvfp4") or emulated[0].value in why
