"""Rows of the registry of kernels for `kernels/quantize/`, which quantize, measure, dequantize, transpose a matrix."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from quantshard import kernel_dispatch, kernels, numerics, recipe
from quantshard.formats import ALL, FORMATS, Encoding, Format, Orientation, OrientedCodes, Role, Scaling
from quantshard.gemm import producers
from quantshard.numerics import RandomBits, quantization_error, swizzling
from quantshard.tools.doctor.cases import TOO_FAR, Bound, Expected, KernelCase, KernelRow, recipe_names
from quantshard.tools.doctor.results import UnavailableError
from quantshard.tools.doctor.timing import bytes_of

if kernels.USABLE:
    from quantshard.kernels.quantize import amax, dequantize, error, matrix, scales, swizzle, transpose, words
    from quantshard.kernels.quantize.targets import KernelOutputs, QuantizedOutput, QuantizeRequest, QuantizeSpec

Cases = dict[str, dict[str, Any]]


def trained_formats() -> set[str]:
    """Names of the formats that the named recipes compute in."""
    tables = (recipe.resolve(name).table for name in recipe_names())
    return {cell.format.name for table in tables for cell in table.values() if cell is not None}


def timed_of(cases: Mapping[str, Mapping[str, Any]]) -> tuple[str, ...]:
    """Those of cases, each of a format, that recipes train with."""
    return tuple(name for name, options in cases.items() if options["fmt"].name in trained_formats())


def is_decoded(fmt: Format) -> bool:
    """True for what recipes quantize activations into along rows: it may be decoded at once."""
    return fmt.copies[Orientation.ROWWISE].block[0] == 1 and len(fmt.copies) == 1 and fmt.name in trained_formats()


def encodings_of(fmt: Format) -> tuple[Encoding, Encoding]:
    """Those of codes and scales."""
    copy = fmt.copies[Orientation.ROWWISE]
    return copy.codes.encoding, copy.scale.encoding


def is_kept(fmt: Format) -> bool:
    """True for what optimizers alone store: 16-bit codes, which Adam's kernel writes."""
    return encodings_of(fmt)[0].bits > 8


QUANTIZED = tuple(fmt for fmt in FORMATS.values() if not is_kept(fmt))
"""The formats that kernels quantize into."""


def quantization(
    x: Tensor,
    fmt: Format,
    scaling: Scaling = Scaling(),  # noqa: B008  (frozen)
    *,
    which: Orientation = Orientation.ROWWISE,
    words: RandomBits | None = None,
    transposed: bool = False,
    decoded: bool = False,
) -> tuple[QuantizeRequest, list[Expected]]:
    """How one copy of a format is to be quantized, and what of it the oracle makes, as `results_of` gives it.

    With amaxes given where its blocks reach beyond a tile. `transposed`: the codes of the transpose too. `words`:
    random words, for stochastic rounding. `decoded`: values in place of codes and scales.
    """
    copy = fmt.copies[which]
    drawn = None if words is None else dict.fromkeys(Orientation, words.tensor(x.device))
    parts = numerics.quantize(x, fmt, scaling, words=drawn)
    known = numerics.block_amax(x, copy.block) if ALL in copy.block else None
    by_columns = producers.read_by_columns(copy)
    spec = QuantizeSpec(copy, scaling, (0, 0), transposed, by_columns, "" if known is None else "amaxes")
    request = QuantizeRequest(spec._replace(decoded=decoded), known, parts.get("amax"), words)
    if decoded:
        shape = (x.shape[0], x.shape[1] + (-x.shape[1] % 16 if scaling.random_hadamard else 0))
        return request, [numerics.dequantize(copy, parts, shape).to(x.dtype), None, None]
    across = None
    if transposed:
        across = numerics.transpose_parts(fmt, parts, (x.shape[0], x.shape[1]))[copy.codes.name]
    return request, [parts[copy.codes.name], parts[copy.scale.name], across]


def results_of(output: QuantizedOutput | None) -> list[Tensor | None]:
    """Codes, scales and codes of the transpose."""
    return [None] * 3 if output is None else [output.codes, output.scale, output.transposed]


def quantize_case(
    x: Tensor, fmt: Format, transposed: bool = False, next_amax: bool = False, which: Orientation = Orientation.ROWWISE
) -> KernelCase:
    """Codes and scales of one copy, and the transpose's codes; the amax for the next step in the same pass."""
    if is_kept(fmt):
        raise UnavailableError("16-bit codes are those of optimizer states, which Adam's kernel writes")
    request, expected = quantization(x, fmt, which=which, transposed=transposed)
    seen = torch.zeros((), dtype=torch.float32, device=x.device) if next_amax else None
    largest = x.abs().amax().float() if next_amax else None
    return KernelCase(
        lambda: [*results_of(matrix.quantize_matrix(x, request, None, seen)[0]), seen],
        lambda: [*expected, largest], bytes_of(x, *_tensors(expected)),
    )  # fmt: skip


def _tensors(expected: Iterable[Expected]) -> list[Tensor]:
    return [part for part in expected if isinstance(part, Tensor)]


def _quantize_cases() -> Cases:
    """Every copy of every format; with the transpose where blocks are square, and where one scale is delayed."""
    found: Cases = {}
    for fmt in FORMATS.values():
        name = f"quantize {fmt.name}"
        found[name] = {"fmt": fmt}
        if is_kept(fmt):
            continue
        found |= {f"{name}, {which.value}": {"fmt": fmt, "which": which} for which in list(fmt.copies)[1:]}
        ways: Cases = {name: {"fmt": fmt}}
        if fmt.transposable:
            ways[f"{name} + transpose"] = {"fmt": fmt, "transposed": True}
        found |= ways
        if fmt.copies[Orientation.ROWWISE].block == (ALL, ALL):
            found |= {f"{way} + next amax": options | {"next_amax": True} for way, options in ways.items()}
    return found


def quantize_both_case(x: Tensor, fmt: Format, scaling: Scaling, decoded: int = 0) -> KernelCase:
    """Codes and scales by rows and, with scales of their own, by columns; `decoded`: values in place of the codes by
    rows, or of both."""
    padded = x.shape[0] + (-x.shape[0] % 16 if scaling.random_hadamard else 0)  # what the transform sees of a column
    shapes = [(x.shape[0], x.shape[1]), (x.shape[1], padded)]
    words = [RandomBits(5, 1, 0, shape, transposed=turned) for turned, shape in zip((False, True), shapes, strict=True)]
    (one, by_rows), (two, by_columns) = (
        quantization(values, fmt, way, words=drawn if way.stochastic_rounding else None, decoded=number < decoded)
        for number, (values, drawn, way) in enumerate(
            (
                (x, words[0], Scaling(stochastic_rounding=scaling.stochastic_rounding)),
                (x.t(), words[1], scaling),
            )
        )
    )
    expected = [*by_rows, *by_columns]
    return KernelCase(
        lambda: [part for output in matrix.quantize_matrix(x, one, two) for part in results_of(output)],
        lambda: expected, bytes_of(x, *_tensors(expected)),
    )  # fmt: skip


def _both_cases() -> Cases:
    """With transform and stochastic rounding where blocks lie along rows and within a tile."""
    found: Cases = {}
    for fmt in QUANTIZED:
        block = fmt.copies[Orientation.ROWWISE].block
        if fmt.transposable or len(fmt.copies) > 1 or block[0] != 1:
            continue
        name = f"quantize {fmt.name}, both directions"
        found[name] = {"fmt": fmt, "scaling": Scaling()}
        if is_decoded(fmt):
            found[f"{name}, the first decoded"] = {"fmt": fmt, "scaling": Scaling(), "decoded": 1}
            found[f"{name}, decoded"] = {"fmt": fmt, "scaling": Scaling(), "decoded": 2}
        if ALL not in block:
            rounded = f"{name} + stochastic_rounding"
            found[rounded] = {"fmt": fmt, "scaling": Scaling(stochastic_rounding=True)}
            turned = Scaling(stochastic_rounding=True, random_hadamard=True)
            found[f"{rounded} + random_hadamard"] = {"fmt": fmt, "scaling": turned}
            if is_decoded(fmt):
                found[f"{rounded} + random_hadamard, decoded"] = {"fmt": fmt, "scaling": turned, "decoded": 2}
    return found


def amax_case(x: Tensor, fmt: Format) -> KernelCase:
    """Of the blocks of the first scale of a format."""
    part = next(c for c in fmt.components if c.role is Role.SCALE)
    expected = numerics.block_amax(x, part.block_shape)
    return KernelCase(lambda: [amax.block_amax(x, part.block_shape)], lambda: [expected], bytes_of(x, expected))


def scales_case(x: Tensor, fmt: Format) -> KernelCase:
    """Scales and multipliers from the amaxes of the blocks, for formats with one scale."""
    copy, scaling = fmt.copies[Orientation.ROWWISE], Scaling()
    grids = numerics.amaxes(x, fmt)
    expected = [
        made(grids, fmt, scaling, x.dtype)[copy.scale.name] for made in (numerics.scales, numerics.encode_scales)
    ]
    grid = grids[copy.scale.name]
    return KernelCase(
        lambda: scales.scales(grid, copy, scaling, x.dtype), lambda: expected, bytes_of(grid, *expected)
    )  # fmt: skip


def dequantize_case(x: Tensor, fmt: Format, dtype: torch.dtype = torch.bfloat16) -> KernelCase:
    """Codes and scales to values."""
    copy, shape, parts = fmt.copies[Orientation.ROWWISE], (x.shape[0], x.shape[1]), numerics.quantize(x, fmt)
    expected = numerics.dequantize(copy, parts, shape).to(dtype)
    read = [parts[c.name] for c in fmt.components if c.copy is Orientation.ROWWISE]
    return KernelCase(
        lambda: [dequantize.dequantize(copy, parts, shape, dtype=dtype)], lambda: [expected], bytes_of(expected, *read)
    )


def _statistics_rows(copies: int, device: torch.device) -> tuple[Tensor, Tensor]:
    sums = torch.zeros(copies, len(quantization_error.SUMS), dtype=torch.float64, device=device)
    empty = torch.tensor(quantization_error.EMPTY, dtype=torch.float32, device="cpu").to(device)
    return sums, empty.repeat(copies, 1)


def _together(extremes: Tensor) -> Tensor:
    return torch.cat([extremes[:, :2].amax(0), extremes[:, 2:].amin(0)])


def values_case(x: Tensor) -> KernelCase:
    """Counts and amax of values that were not quantized, of which some are neither finite nor zero."""
    seen = x.clone()
    for place, value in enumerate((math.inf, math.nan, 0.0)):
        seen.view(-1)[place : place + 1] = value

    def launch() -> list[Tensor | None]:
        sums, extremes = _statistics_rows(3, x.device)
        error.add_values(sums, extremes, seen)
        return [sums.sum(0), _together(extremes)]

    def oracle() -> list[Expected]:
        (sums,), (extremes,) = _statistics_rows(1, x.device)
        quantization_error.add_values_(sums, extremes, seen)
        return [sums, extremes]

    return KernelCase(launch, oracle, bytes_of(x))


def words_case(x: Tensor, quads: bool = False, stored: bool = False) -> KernelCase:
    """Random words of a part of a matrix, whose rows begin with whole calls of Philox or not; `stored`: the draw is in
    memory, as in a captured step."""
    rows, cols = x.shape
    width = (cols + 7) // 4 * 4 + (0 if quads else 1)
    draw = torch.tensor(70, dtype=torch.int64, device=x.device) if stored else 70
    bits = RandomBits(0x9E3779B97F4A7C15, draw, 5, (rows + 3, width), (3, 4 if quads else 2), (rows, cols - 4 * quads))
    return KernelCase(
        lambda: [words.random_words(bits, x.device)],
        lambda: [bits.tensor(x.device)],
        8 * math.prod(bits.shape or ()),
    )


def error_case(x: Tensor, fmt: Format, hadamard: bool = False) -> KernelCase:
    """Counts, extremes and squares of the error of one copy, some of whose values saturate."""
    copy, exact = fmt.copies[Orientation.ROWWISE], numerics.hadamard16(x) if hadamard else x
    amaxes = {name: grid * 0.75 for name, grid in numerics.amaxes(exact, fmt).items()}
    parts, multipliers = numerics.scales_and_multipliers(amaxes, fmt, Scaling(), x.dtype)
    parts[copy.codes.name] = numerics.quantize_codes(exact, copy, multipliers)

    def launch() -> list[Tensor | None]:
        sums, extremes = _statistics_rows(3, x.device)
        error.add_error(sums, extremes, x, copy, parts, hadamard=hadamard)
        total = sums.sum(0)
        return [total[:6], _together(extremes), total[6:]]

    def oracle() -> list[Expected]:
        (sums,), (extremes,) = _statistics_rows(1, x.device)
        quantization_error.add_error_(sums, extremes, exact, copy, parts)
        squares = sums[6:]
        bound = (math.log2(exact.numel()) + 4) * 2.0**-23 * squares + 2.0**-21 * squares.prod().sqrt()
        return [sums[:6], extremes, Bound(squares, bound)]

    read = [parts[c.name] for c in fmt.components if c.copy is Orientation.ROWWISE]
    return KernelCase(launch, oracle, bytes_of(x, *read))


def transpose_case(x: Tensor, blocks: bool = False) -> KernelCase:
    """Bytes; `blocks`: and the scales of their blocks of 128 x 128, to which a poison of 0 is added."""
    codes = x.view(torch.uint8)[:, : x.shape[1]].contiguous()
    if not blocks:
        return KernelCase(
            lambda: [transpose.transpose(codes)], lambda: [codes.t().contiguous()], 2 * bytes_of(codes)
        )  # fmt: skip
    scales, zero = numerics.block_amax(x, (128, 128)), torch.zeros((), dtype=torch.float32, device=x.device)

    def oracle() -> list[Tensor | None]:
        with kernel_dispatch.kernels_only_on():
            return list(kernel_dispatch.by_columns([(codes, scales, zero)], torch.uint8)[0])

    return KernelCase(
        lambda: list(transpose.by_columns([(codes, scales, zero)])[0]), oracle, 2 * bytes_of(codes, scales)
    )


def swizzle_case(x: Tensor, fmt: Format, turned: bool = False) -> KernelCase:
    """A stored matrix as products with swizzled scales read it; `turned`: its transpose."""
    copy, given, read = _stored_of(x, fmt)
    return KernelCase(
        lambda: _bytes_of_results(swizzle.SwizzleRequest(copy, given, turned).finish()),
        lambda: _swizzled_by_oracle(copy, given, turned),
        bytes_of(*(read if turned else read[1:]), *_tensors(_swizzled_by_oracle(copy, given, turned))),
    )  # fmt: skip


def _stored_of(x: Tensor, fmt: Format) -> tuple[OrientedCodes, list[kernel_dispatch.StoredMatrix], list[Tensor]]:
    """A stored matrix as `kernel_dispatch.swizzle` takes it, under a poison of 0; and its codes and scales."""
    copy, parts = fmt.copies[Orientation.ROWWISE], numerics.quantize(x, fmt)
    zero = torch.zeros((), dtype=torch.float32, device=x.device)
    codes, grid = parts[copy.codes.name], parts[copy.scale.name]
    amax = None if copy.amax is None else parts[copy.amax.name]
    return copy, [((x.shape[0], x.shape[1]), codes, grid, amax, zero, None)], [codes, grid]


def _swizzled_by_oracle(
    copy: OrientedCodes, given: Sequence[kernel_dispatch.StoredMatrix], turned: bool
) -> list[Tensor | None]:
    with kernel_dispatch.kernels_only_on():
        return _bytes_of_results(kernel_dispatch.swizzle(copy, given, turned))


def _bytes_of_results(made: Sequence[kernel_dispatch.SwizzledMatrix]) -> list[Tensor | None]:
    ((across, laid, second),) = made
    return [None if across is None else across.view(torch.uint8), laid.view(torch.uint8), second]


def ready_case(x: Tensor, fmt: Format, weight: Format | None = None, turned: bool = False) -> KernelCase:
    """Codes and scales as products read them; and in the same launch the matrix stored as `weight`, as `swizzle_case`
    has it."""
    copy, parts = fmt.copies[Orientation.ROWWISE], numerics.quantize(x, fmt)
    request = QuantizeRequest(QuantizeSpec(copy, Scaling(), ready=True), second_amax=parts.get("amax"))
    laid = swizzling.swizzled(parts[copy.scale.name])
    second = parts.get("amax")
    unit = 1.0 / (copy.codes.encoding.max * copy.scale.encoding.max)
    expected: list[Tensor | None] = [
        parts[copy.codes.name], laid, None if second is None else (second * unit).view(1, 1)
    ]  # fmt: skip
    read, stored = [x], None if weight is None else _stored_of(x, weight)
    if stored is not None:
        expected += _swizzled_by_oracle(*stored[:2], turned)
        read += stored[2]

    def launch() -> list[Tensor | None]:
        laid = None if stored is None else swizzle.SwizzleRequest(*stored[:2], turned)
        ((found, _),) = matrix.quantize_matrices([x], [KernelOutputs(request)], laid)
        assert found is not None
        codes, scale = (getattr(part, "base", part).view(torch.uint8) for part in (found.codes, found.scale))
        return [codes, scale, found.second_scale, *([] if laid is None else _bytes_of_results(laid.finish()))]

    return KernelCase(launch, lambda: expected, bytes_of(*read, *_tensors(expected)))


QUANTIZE, BOTH = _quantize_cases(), _both_cases()
AMAX: Cases = {f"amax {fmt.name}": {"fmt": fmt} for fmt in QUANTIZED}
SCALES: Cases = {f"scales {f.name}": {"fmt": f} for f in QUANTIZED if f.copies[Orientation.ROWWISE].amax is None}
VALUES: Cases = {"counts and amax of values": {}}
WORDS: Cases = {"random words": {}, "random words, whole calls": {"quads": True}}
WORDS |= {"random words, a draw in memory": {"quads": True, "stored": True}}
ERRORS: Cases = {f"error of {fmt.name}": {"fmt": fmt} for fmt in QUANTIZED}
_TURNED = [fmt for fmt in QUANTIZED if encodings_of(fmt)[0].bits == 4]
ERRORS |= {f"error of {fmt.name} + random_hadamard": {"fmt": fmt, "hadamard": True} for fmt in _TURNED}
DEQUANTIZE: Cases = {f"dequantize {fmt.name}": {"fmt": fmt} for fmt in QUANTIZED}
TRANSPOSE: Cases = {"transpose of bytes": {}, "transpose of bytes and scales": {"blocks": True}}
SWIZZLED = [fmt for fmt in QUANTIZED if fmt.copies[Orientation.ROWWISE].scale.encoding.bits == 8]
SWIZZLE: Cases = {f"swizzle {fmt.name}": {"fmt": fmt} for fmt in SWIZZLED if fmt.transposable}
SWIZZLE |= {f"{name}, transposed": {**options, "turned": True} for name, options in SWIZZLE.items()}
READY: Cases = {f"quantize {fmt.name}, ready": {"fmt": fmt} for fmt in SWIZZLED if is_decoded(fmt)}
BESIDE: Cases = {
    f"{name}, beside {weight.name}{', transposed' * turned}": {**options, "weight": weight, "turned": turned}
    for name, options in READY.items()
    for weight in SWIZZLED
    for turned in (False, True)
    if weight.transposable and encodings_of(weight) == encodings_of(options["fmt"])
}
WIDE: Cases = {f"{name} to fp32": {**options, "dtype": torch.float32} for name, options in DEQUANTIZE.items()}

ROWS = (
    KernelRow({"quantize_kernel"}, quantize_case, QUANTIZE, timed_of(QUANTIZE), (35, 290)),
    KernelRow({"quantize_kernel"}, quantize_both_case, BOTH, timed_of(BOTH), (35, 290)),
    KernelRow({"amax_kernel"}, amax_case, AMAX, timed_of(AMAX), (35, 290)),
    KernelRow({"scales_kernel"}, scales_case, SCALES, timed_of(SCALES), (131, 257)),
    KernelRow({"dequantize_kernel"}, dequantize_case, DEQUANTIZE | WIDE, timed_of(DEQUANTIZE), (35, 290)),
    KernelRow({"error_kernel"}, error_case, ERRORS, timed_of(ERRORS), (35, 290), TOO_FAR),
    KernelRow({"values_kernel"}, values_case, VALUES, list(VALUES), (35, 290)),
    KernelRow({"words_kernel"}, words_case, WORDS, ["random words, whole calls"], (35, 290)),
    KernelRow({"swizzle_kernel"}, swizzle_case, SWIZZLE, timed_of(SWIZZLE), (288, 320)),
    KernelRow({"quantize_kernel"}, ready_case, READY | BESIDE, timed_of(READY | BESIDE), (288, 320)),
    KernelRow({"transpose_kernel"}, transpose_case, TRANSPOSE, ["transpose of bytes"], (35, 290)),
)
