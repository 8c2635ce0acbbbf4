"""The kernels that quantize, measure and dequantize have the oracle's bits where the registry of kernels has no case:
options, pieces of a matrix, edge values, strides.

On a machine without a GPU Triton's interpreter runs them (tests/conftest.py asks for it).
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from quantshard import kernel_dispatch, numerics
from quantshard.formats import ALL, FORMATS, Format, Orientation, Role, Scaling
from quantshard.gemm import hardware

pytest.importorskip("triton")

from quantshard.gemm import producers
from quantshard.kernels.fused.activation import quantize_gradients
from quantshard.kernels.fused.epilogue import KernelOutputs
from quantshard.kernels.quantize import amax, dequantize, transpose
from quantshard.kernels.quantize.matrix import quantize_matrix
from quantshard.kernels.quantize.targets import QuantizedOutput, QuantizeRequest, QuantizeSpec
from quantshard.numerics import RandomBits
from tests import oracle
from tests.covering import exhaustive
from tests.kernels.asked import request_of

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CODES = [fmt for fmt in FORMATS.values() if fmt.copies[Orientation.ROWWISE].codes.encoding.bits <= 8]
SHAPES = [(1, 1), (5, 7), (35, 300)]
IN_A_TILE = [(5, 7), (3, 12)]
"""Shapes for random words, which the interpreter is slow at: where four neighbours share a call, and where not."""

ORIGINS = [(5, 6), (100, 254)]
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, of infinities in the interpreter
KEY, DRAW = -123456789012345, 7


def encodings(fmt: Format) -> tuple[object, ...]:
    copy = fmt.copies[Orientation.ROWWISE]
    return copy.codes.encoding, copy.scale.encoding, ALL in copy.block


FEWER = list({encodings(fmt): fmt for fmt in reversed(CODES)}.values())
"""One format of each pair of encodings, of codes and of scales, whether a tile sees whole blocks or not."""

a_format_of_each_encoding = pytest.mark.parametrize(
    "fmt", exhaustive([(fmt,) for fmt in CODES], [(fmt,) for fmt in FEWER]), ids=lambda fmt: fmt.name
)


def values(shape: tuple[int, int], dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Of many magnitudes, with zeros, a row of zeros, and numbers that float8 rounds to even."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(shape, generator=generator) * torch.exp(3 * torch.randn(shape, generator=generator))
    x[0, 0] = 0
    x[3:4] = 0
    x[4:5, :5] = torch.tensor([1.0625, 1.1875, -1.0625, -448.0, 464.0])[: shape[1]]
    return x.to(dtype)


def same(found: Tensor, expected: Tensor) -> bool:
    """Bit for bit, the sign of zero too; NaN is NaN."""
    assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
    if found.is_floating_point():
        alike = torch.isnan(found.cpu()) & torch.isnan(expected)
        found, expected = (torch.where(alike, 0, t).contiguous() for t in (found.cpu(), expected))
    return torch.equal(*(t.cpu().contiguous().view(-1).view(torch.uint8) for t in (found, expected)))


def on_device(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.to(DEVICE)


def with_spec(request: QuantizeRequest, **options: bool) -> QuantizeRequest:
    return request._replace(spec=request.spec._replace(**options))


def words_of(shape: tuple[int, int], stream: int, stochastic: bool) -> RandomBits | None:
    return RandomBits(KEY, DRAW, stream, shape) if stochastic else None


@pytest.mark.parametrize(
    ("fmt", "stochastic"),
    exhaustive(
        itertools.product(CODES, [False, True]),
        [(fmt, drawn) for fmt in CODES for drawn in (False, True)[: 1 + (fmt in FEWER)]],
    ),
    ids=lambda part: getattr(part, "name", part),
)
def test_codes_and_scales(fmt: Format, stochastic: bool) -> None:
    """From the values alone, where a tile sees whole blocks, and with multipliers or amaxes given."""
    kinds = ((torch.bfloat16, False), (torch.float32, True), (torch.float16, False))
    for shape, (dtype, power_of_two) in zip(IN_A_TILE if stochastic else SHAPES, kinds, strict=False):
        x, scaling = values(shape, dtype), Scaling(power_of_two=power_of_two, stochastic_rounding=stochastic)
        expected = numerics.quantize(
            x, fmt, scaling, words=dict.fromkeys(Orientation, numerics.random_words(KEY, DRAW, 3, shape))
        )
        grids = numerics.amaxes(x, fmt)
        for copy in fmt.copies.values():
            second, words = on_device(grids.get("amax")), words_of(shape, 3, stochastic)
            if ALL in copy.block or not stochastic:
                given = oracle.encode_scales(grids, fmt, scaling, dtype)[copy.scale.name]
                request = request_of(copy, scaling, multipliers=on_device(given), words=words)
                found, _ = quantize_matrix(x.to(DEVICE), request)
                assert found.scale is None and same(found.codes, expected[copy.codes.name])
            if copy.amax is None:
                request = request_of(copy, scaling, amaxes=on_device(grids[copy.scale.name]), words=words)
                found, _ = quantize_matrix(x.to(DEVICE), request)
                assert same(found.codes, expected[copy.codes.name])
                assert same(found.scale, expected[copy.scale.name])
            for by_columns in () if ALL in copy.block else (False, True):
                request = request_of(copy, scaling, second_amax=second, words=words, by_columns=by_columns)
                found, _ = quantize_matrix(x.to(DEVICE), request)
                assert same(found.codes, expected[copy.codes.name])
                assert found.scale is not None and same(found.scale, expected[copy.scale.name])
                assert (found.scale.t() if by_columns else found.scale).is_contiguous()


@pytest.mark.parametrize(
    ("fmt", "origins"),
    exhaustive(
        itertools.product(CODES, [(origin,) for origin in ORIGINS]),
        [(fmt, (ORIGINS[turn % 2],)) for turn, fmt in enumerate(CODES)],
    ),
    ids=lambda part: getattr(part, "name", str(part)),
)
def test_pieces_are_those_of_the_whole(fmt: Format, origins: tuple[tuple[int, int], ...]) -> None:
    """Of a rectangle anywhere in the global matrix: grids, codes with random words, and values."""
    for origin in origins:
        x = values((30, 6))
        scaling, whole = Scaling(stochastic_rounding=True), (origin[0] + 31, origin[1] + 8)
        grids = numerics.amaxes(x, fmt, origin)
        for part in fmt.components:
            if part.role is not Role.CODES:
                assert same(amax.block_amax(x.to(DEVICE), part.block_shape, origin), grids[part.name])
        for copy in fmt.copies.values():
            given = oracle.encode_scales(grids, fmt, scaling, x.dtype)
            words = numerics.random_words(KEY, DRAW, 2, whole, origin, (30, 6))
            expected = numerics.quantize_codes(x, copy, given, origin, words)
            request = request_of(
                copy, scaling, origin=origin, multipliers=on_device(given[copy.scale.name]),
                words=RandomBits(KEY, torch.tensor(DRAW, device=DEVICE), 2, whole),
            )  # fmt: skip
            assert same(quantize_matrix(x.to(DEVICE), request)[0].codes, expected)
            parts = {**oracle.scales(grids, fmt, scaling, x.dtype), copy.codes.name: expected}
            there = {name: part.to(DEVICE) for name, part in parts.items()}
            back = numerics.dequantize(copy, parts, (30, 6), origin)
            piece = there, (30, 6), origin
            assert same(dequantize.dequantize_matrices(copy, [piece], torch.float32)[0], back)
            (half,) = dequantize.dequantize_matrices(copy, [piece], torch.bfloat16)
            assert same(half, back.bfloat16())


@pytest.mark.parametrize(
    ("stochastic", "hadamard"),
    exhaustive(itertools.product((False, True), repeat=2), [(False, False), (True, True)]),
)
def test_both_directions_from_one_read(stochastic: bool, hadamard: bool) -> None:
    """The transpose has scales, random words and padding of its own; a strided view gives the same."""
    scaling = Scaling(stochastic_rounding=stochastic, random_hadamard=hadamard)
    names = ("nvfp4_1x16",) if stochastic else ("fp8_1x128", "mxfp8_1x32", "nvfp4_1x16")
    if not (stochastic or hadamard):
        names += ("mxfp8_32x1",)
    large = itertools.cycle([(150, 70), SHAPES[2]])  # several tiles in one dim, and in the other
    for name, shape in [
        (name, shape) for name in names for shape in (IN_A_TILE if stochastic else (SHAPES[1], next(large)))
    ]:
        fmt, x = FORMATS[name], values(shape)
        requests, expected = zip(*(wanted(v, fmt, scaling, s) for v, s in ((x, 1), (x.t(), 2))), strict=True)
        by_columns = [with_spec(request, by_columns=True) for request in requests]
        found: list[QuantizedOutput | None] = [
            *quantize_matrix(x.to(DEVICE), *requests),
            quantize_matrix(x.to(DEVICE).t(), requests[1])[0],
        ]
        found += quantize_matrix(x.to(DEVICE), *by_columns)
        for target, parts in zip(found, [*expected, expected[1], *expected], strict=True):
            assert target is not None and target.scale is not None
            assert same(target.codes, parts["codes"])
            assert same(target.scale, parts["scale_inv"])


@pytest.mark.parametrize("hadamard", [False, True])
def test_both_directions_share_the_calls_of_the_generator(hadamard: bool) -> None:
    """The transpose alone has the same bits, read as one or not; four neighbours of a row share a call, or not."""
    fmt, rounds = FORMATS["nvfp4_1x16"], Scaling(stochastic_rounding=True)
    turned = replace(rounds, random_hadamard=hadamard)
    for shape in [*IN_A_TILE, (150, 72)]:
        x = values(shape)
        one, by_rows = wanted(x, fmt, rounds, 1)
        two, by_columns = wanted(x.t(), fmt, turned, 1, transposed=True)
        given = x.to(DEVICE)
        alone, _ = quantize_matrix(given.t(), two)
        copied, _ = quantize_matrix(given.t().contiguous(), two)
        for target, parts in zip(
            [*quantize_matrix(given, one, two), alone, copied], [by_rows, *[by_columns] * 3], strict=True
        ):
            assert target is not None
            assert same(target.codes, parts["codes"])
            assert same(target.scale, parts["scale_inv"])


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("name", ["fp8_1x128", "nvfp4_1x16"])
def test_both_directions_of_a_piece(name: str, shared: bool) -> None:
    """It lies across the corner of four tiles; scales are given, random words are those of the whole, of a stream for
    each direction or `shared`."""
    fmt, x, origin, whole = FORMATS[name], values((40, 12)), (100, 254), (144, 272)
    scaling, requests, expected = Scaling(stochastic_rounding=True), [], []
    for stream, turn in enumerate((False, True)):
        y, at, of = (x.t(), origin[::-1], whole[::-1]) if turn else (x, origin, whole)
        copy, shape = fmt.copies[Orientation.ROWWISE], (y.shape[0], y.shape[1])
        given = oracle.encode_scales(numerics.amaxes(y, fmt, at), fmt, scaling, x.dtype)
        bits = RandomBits(KEY, DRAW, 0 if shared else stream, of, transposed=shared and turn)
        words = bits._replace(origin=at, shape=shape).tensor()
        expected.append(numerics.quantize_codes(y, copy, given, at, words))
        multipliers = on_device(given[copy.scale.name])
        requests.append(request_of(copy, scaling, origin=at, multipliers=multipliers, words=bits))
    for target, codes in zip(quantize_matrix(x.to(DEVICE), *requests), expected, strict=True):
        assert target is not None and same(target.codes, codes)


def wanted(
    x: Tensor,
    fmt: Format,
    scaling: Scaling,
    stream: int,
    which: Orientation = Orientation.ROWWISE,
    transposed: bool = False,
) -> tuple[QuantizeRequest, dict[str, Tensor]]:
    rows, cols = x.shape
    shape = (rows, cols + (-cols % 16 if scaling.random_hadamard else 0))
    bits = RandomBits(KEY, DRAW, stream, shape, transposed=transposed)
    parts = numerics.quantize(x, fmt, scaling, words=dict.fromkeys(Orientation, bits.tensor()))
    request = request_of(
        fmt.copies[which], scaling, second_amax=on_device(parts.get("amax")),
        words=bits if scaling.stochastic_rounding else None,
    )  # fmt: skip
    return request, parts


@pytest.mark.parametrize("fmt", [fmt for fmt in CODES if fmt.transposable], ids=lambda fmt: fmt.name)
def test_the_transpose_of_square_blocks(fmt: Format) -> None:
    """Codes of the transpose, and the next amax, NaN too, in the same pass."""
    for shape, odd in zip(SHAPES, (float("inf"), float("nan"), 0.0), strict=True):
        x = values(shape)
        x[0, -1] = odd
        copy, seen = fmt.copies[Orientation.ROWWISE], torch.full((), 2.0, device=DEVICE)
        given = oracle.encode_scales(numerics.amaxes(x, fmt), fmt, Scaling(), x.dtype)[copy.scale.name]
        found, _ = quantize_matrix(
            x.to(DEVICE), request_of(copy, Scaling(), multipliers=on_device(given), transposed=True), None, seen
        )
        parts = {copy.codes.name: found.codes.cpu()}
        assert found.transposed is not None
        assert same(found.transposed, oracle.transpose_parts(fmt, parts, shape)[copy.codes.name])
        assert same(seen, torch.maximum(x.float().abs().amax(), torch.tensor(2.0)))


@pytest.mark.parametrize(("odd", "at"), [(None, 0), (float("-inf"), 0), (float("nan"), -1)])
@pytest.mark.parametrize("merges", [False, True])
def test_the_scale_of_a_tensor_is_nan_if_not_all_values_are_finite(merges: bool, odd: float | None, at: int) -> None:
    """By its own amax, or found in the same pass, in the tile that stores the scale or another; codes stay."""
    fmt, x = FORMATS["fp8_e5m2"], values((300, 530))
    if odd is not None:
        x[at, at] = odd
    known = numerics.block_amax(values((300, 530)) if merges else x, (ALL, ALL))
    grids = {"scale_inv": known}
    given = oracle.encode_scales(grids, fmt, Scaling(), x.dtype)["scale_inv"]
    scale = torch.zeros(1, 1, device=DEVICE) if merges else None
    spec = QuantizeSpec(
        fmt.copies[Orientation.ROWWISE],
        Scaling(),
        transposed=True,
        given="amaxes",
        nan_from_amax=not merges,
        merges_scale=merges,
    )
    request = QuantizeRequest(spec, on_device(known), scale=scale)
    ((found, _),) = quantize_gradients([x.to(DEVICE)], [KernelOutputs(request, nan_flag=scale)])
    assert found is not None
    assert same(found.codes, numerics.quantize_codes(x, fmt.copies[Orientation.ROWWISE], {"scale_inv": given}))
    expected = oracle.scales(grids, fmt, Scaling(), x.dtype)["scale_inv"]
    assert same(found.scale, expected if odd is None else torch.full((1, 1), float("nan")))


@pytest.mark.parametrize("stochastic", [False, True])
@pytest.mark.parametrize(
    "fmt", [f for f in CODES if f.copies[Orientation.ROWWISE].codes.encoding.bits == 4], ids=lambda fmt: fmt.name
)
def test_what_fills_a_byte_up_is_zero(fmt: Format, stochastic: bool) -> None:
    """Beside an odd last column, or row of the transpose, whatever the multiplier of its block, NaN too."""
    for odd in (float("nan"), float("inf"), 0.0):
        x = values((35, 37), torch.float32)
        x[-1, -1] = odd
        scaling, which = Scaling(stochastic_rounding=stochastic), list(fmt.copies)[-1]
        asked = [wanted(v, fmt, scaling, stream, which) for stream, v in enumerate((x, x.t()))]
        both = quantize_matrix(x.to(DEVICE), asked[0][0], asked[1][0])
        for target, (_, expected) in zip(both, asked, strict=True):
            assert target is not None and same(target.codes, expected[fmt.copies[which].codes.name])
            assert (target.codes[:, -1] >> 4 == 0).all()
        if fmt.transposable:
            found, _ = quantize_matrix(x.to(DEVICE), with_spec(asked[0][0], transposed=True))
            across = oracle.transpose_parts(fmt, asked[0][1], (35, 37))[fmt.copies[which].codes.name]
            assert found.transposed is not None and same(found.transposed, across)
            assert (found.transposed[:, -1] >> 4 == 0).all()


def edges() -> Tensor:
    """Ties of every encoding and their neighbours, powers of two times the largest code, and what is no number."""
    grid = torch.arange(0, 256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    middles = (grid[:-1] + grid[1:]) / 2
    halves = torch.cat([middles, 448.0 * 2.0 ** torch.arange(-20, 20), 6.0 * 2.0 ** torch.arange(-4, 4)])
    ulp = torch.cat([halves, torch.nextafter(halves, halves + 1), torch.nextafter(halves, halves - 1)])
    odd = torch.tensor([0.0, -0.0, float("inf"), -float("inf"), float("nan"), 2.0**-149, 2.0**-126, 3e38, 464.0, 480.0])
    nan = torch.tensor([0xFFC00000 - (1 << 32), 0x7F800001], dtype=torch.int32).view(torch.float32)
    return torch.cat([grid, ulp, -ulp, odd, nan]).reshape(1, -1)


@a_format_of_each_encoding
def test_edge_values(fmt: Format) -> None:
    """Rounding alone (all multipliers are 1, then the largest float32), and scales of amaxes that are no numbers."""
    copy, x = fmt.copies[Orientation.ROWWISE], edges()
    for factor in (1.0, torch.finfo(torch.float32).max):
        given = torch.full_like(numerics.block_amax(x, copy.block), factor)
        expected = numerics.quantize_codes(x, copy, {copy.scale.name: given})
        found, _ = quantize_matrix(x.to(DEVICE), request_of(copy, Scaling(), multipliers=on_device(given)))
        assert same(found.codes, expected)
    if ALL not in copy.block:
        expected = numerics.quantize(x, fmt)
        alone, _ = quantize_matrix(
            x.to(DEVICE), request_of(copy, Scaling(), second_amax=on_device(expected.get("amax")))
        )
        assert alone.scale is not None
        assert same(alone.scale, expected[copy.scale.name]) and same(alone.codes, expected[copy.codes.name])
        back = numerics.dequantize(copy, expected, (1, x.shape[1]))
        there = {name: part.to(DEVICE) for name, part in expected.items()}
        assert same(dequantize.dequantize_matrices(copy, [(there, (1, x.shape[1]), (0, 0))], torch.float32)[0], back)


@a_format_of_each_encoding
def test_blocks_of_tiny_amaxes(fmt: Format) -> None:
    """Scales that would overflow become the largest of float32, or of the dtype of the values."""
    copy = fmt.copies[Orientation.ROWWISE]
    if ALL in copy.block:
        pytest.skip("its scales come from amaxes that were taken before")
    for dtype in (torch.bfloat16, torch.float32, torch.float16):
        x = torch.full((3, 70), 2.0**-24 if dtype is torch.float16 else 2.0**-133).to(dtype)
        for power_of_two in (False, True):
            scaling = Scaling(power_of_two=power_of_two)
            expected = numerics.quantize(x, fmt, scaling)
            found, _ = quantize_matrix(
                x.to(DEVICE), request_of(copy, scaling, second_amax=on_device(expected.get("amax")))
            )
            assert found.scale is not None and same(found.scale, expected[copy.scale.name])
            assert same(found.codes, expected[copy.codes.name])


def test_a_word_rounds_up_where_it_and_the_fraction_are_one() -> None:
    """Of the way to the smallest code, 2**-9, E4M3 has 20 bits: with those of the word exactly 1, and 2**-20 less."""
    shape, copy = (32, 256), FORMATS["fp8_e4m3"].copies[Orientation.ROWWISE]
    words = numerics.random_words(KEY, DRAW, 3, shape)
    request = request_of(copy, Scaling(), multipliers=torch.ones(1, 1, device=DEVICE), words=words_of(shape, 3, True))
    for less in (0, 1):
        x = ((1 << 20) - (words >> 12) - less).float() * 2.0**-29
        codes = quantize_matrix(x.to(DEVICE), request)[0].codes.cpu()
        assert (codes == 1 - less).all()
        assert same(codes, numerics.quantize_codes(x, copy, {copy.scale.name: torch.ones(1, 1)}, words=words))


@pytest.mark.parametrize("shape", [(0, 5), (5, 0)])
def test_nothing_is_transposed(shape: tuple[int, int]) -> None:
    x = torch.empty(shape, dtype=torch.uint8, device=DEVICE)
    assert transpose.by_columns([(x, None, None)])[0][0].shape == shape


@pytest.mark.parametrize(
    ("shape",),
    exhaustive(
        [((1, 1),), ((128, 128),), ((129, 300),), ((300, 129),), ((512, 640),), ((640, 513),)],
        [((1, 1),), ((129, 300),), ((300, 129),)],
    ),
)
def test_scales_are_transposed_with_their_codes(shape: tuple[int, int]) -> None:
    """Of grids that lie by rows, by columns and within a larger one; with a poison in every scale."""
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
    rows, cols = -(-shape[0] // 128), -(-shape[1] // 128)
    larger = torch.rand(rows + 2, cols + 3, generator=generator)
    grids = [larger[1:-1, 2:-1], larger[1:-1, 2:-1].contiguous(), larger[1:-1, 2:-1].t().contiguous().t()]
    for grid, nan_flag in itertools.product(grids, (None, 0.0, torch.nan)):
        given = [codes, grid, None if nan_flag is None else torch.tensor(nan_flag)]
        with kernel_dispatch.kernels_only_on():
            expected = kernel_dispatch.by_columns([given], torch.uint8)[0]
        (found,) = transpose.by_columns([[part if part is None else part.to(DEVICE) for part in given]])
        for mine, theirs in zip(found, expected, strict=True):
            assert mine.t().is_contiguous()
            torch.testing.assert_close(mine.cpu(), theirs, rtol=0, atol=0, equal_nan=True)
        laid = expected[1].t()
        assert laid.shape == (cols, -(-rows // 4) * 4) and not laid[:, rows:].any()
        assert laid[:, :rows].isnan().all() if nan_flag is torch.nan else torch.equal(laid[:, :rows], grid.t())


TRANSPOSABLE = ["fp8_e4m3", "fp8_e5m2", "fp8_128x128", "mxfp8_32x32", "nvfp4_16x16"]


def test_amax_of_transformed_rows() -> None:
    x = values((33, 50))
    found = amax.block_amax(x.to(DEVICE), (ALL, ALL), hadamard=True)
    assert same(found, numerics.block_amax(numerics.hadamard16(x), (ALL, ALL)))
    x[20, 3] = float("nan")
    assert torch.isnan(amax.block_amax(x.to(DEVICE), (1, ALL))).flatten().tolist() == [row == 20 for row in range(33)]


@pytest.mark.parametrize(
    ("name", "dtype"),
    exhaustive(
        itertools.product(TRANSPOSABLE, [torch.bfloat16, torch.float32]),
        [(name, (torch.bfloat16, torch.float32)[turn % 2]) for turn, name in enumerate(TRANSPOSABLE)],
    ),
)
def test_tiles_with_all_their_elements(name: str, dtype: torch.dtype) -> None:
    """Whole tiles, which a GPU reads and writes by 16 bytes: there an assembler has lost bytes."""
    fmt = FORMATS[name]
    copy, x = fmt.copies[Orientation.ROWWISE], torch.randn(256, 256, device=DEVICE, dtype=dtype)
    expected = numerics.quantize(x, fmt)
    grids = numerics.amaxes(x, fmt)
    known = oracle.encode_scales(grids, fmt, Scaling(), dtype)[copy.scale.name] if ALL in copy.block else None
    request = request_of(copy, Scaling(), multipliers=known, second_amax=grids.get("amax"), transposed=True)
    outputs = KernelOutputs(request, amax=torch.zeros((), device=DEVICE), nan_flag=torch.zeros((), device=DEVICE))
    for target, _ in (quantize_matrix(x, request), *quantize_gradients([x], [outputs])):
        assert torch.equal(target.codes, expected[copy.codes.name])
        assert torch.equal(target.transposed, oracle.transpose_parts(fmt, expected, x.shape)[copy.codes.name])
        assert known is not None or torch.equal(target.scale, expected[copy.scale.name])


def test_scales_lie_as_products_read_them() -> None:
    """What `producers` has kernels store by columns is what a scaled product wants so, and nothing else."""
    sides = [
        (kind, side)
        for kinds, n in hardware.NATIVE.items()
        for kind, side in zip(kinds, (n.left, n.right), strict=True)
    ]
    wanted = {kind for kind, side in sides if side.layout is hardware.by_columns}
    assert wanted
    for copy in (copy for fmt in FORMATS.values() for copy in fmt.copies.values()):
        kind = (copy.codes.encoding.name, copy.scale.encoding.name, *copy.block)
        assert producers.read_by_columns(copy) == (kind in wanted), kind
