"""Registry rows for `kernels/quantize/`, which quantize, measure, dequantize and transpose matrices."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from quantshard import kernel_dispatch, kernels, numerics, recipe
from quantshard.formats import ALL, FORMATS, Encoding, Format, Orientation, OrientedCodes, Role, Scaling
from quantshard.gemm import producers
from quantshard.numerics import RandomBits, quantization_error, swizzled
from quantshard.tools.cli.doctor import recipe_names
from tests.kernels.cases.base import TOO_FAR, Bound, Expected, KernelCase, KernelRow, bytes_of
from tests.oracle import transpose_parts

if kernels.USABLE:
    from quantshard.kernels.quantize import amax, dequantize, error, matrix, random_words, swizzle, transpose
    from quantshard.kernels.quantize.targets import KernelOutputs, QuantizedOutput, QuantizeRequest, QuantizeSpec

Cases = dict[str, dict[str, Any]]


def trained_formats() -> set[str]:
    """Names of the formats that the named recipes compute in."""
    tables = (recipe.resolve(name).table for name in recipe_names())
    return {cell.format.name for table in tables for cell in table.values() if cell is not None}


def timed_of(cases: Mapping[str, Mapping[str, Any]]) -> tuple[str, ...]:
    """Names of the cases with formats that recipes train with."""
    return tuple(name for name, options in cases.items() if options["fmt"].name in trained_formats())


def is_decoded(fmt: Format) -> bool:
    """Whether recipes quantize activations to this format along rows, so that kernels can decode it at once."""
    return fmt.copies[Orientation.ROWWISE].block[0] == 1 and len(fmt.copies) == 1 and fmt.name in trained_formats()


def encodings_of(fmt: Format) -> tuple[Encoding, Encoding]:
    """Encodings of codes and scales."""
    copy = fmt.copies[Orientation.ROWWISE]
    return copy.codes.encoding, copy.scale.encoding


def is_kept(fmt: Format) -> bool:
    """Whether only optimizers store this format: 16-bit codes, which Adam's kernel writes."""
    return encodings_of(fmt)[0].bits > 8


QUANTIZED = tuple(fmt for fmt in FORMATS.values() if not is_kept(fmt))
"""Formats that kernels quantize to."""


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
    """Request to quantize one copy of a format, and the oracle's result in the order of `results_of`.

    The request includes amaxes if blocks are larger than a tile. `transposed`: also the codes of the transpose.
    `words`: random words, for stochastic rounding. `decoded`: values instead of codes and scales.
    """
    copy = fmt.copies[which]
    words_by_orientation = None if words is None else dict.fromkeys(Orientation, words.tensor(x.device))
    parts = numerics.quantize(x, fmt, scaling, words=words_by_orientation)
    amaxes = numerics.block_amax(x, copy.block) if ALL in copy.block else None
    by_columns = producers.read_by_columns(copy)
    spec = QuantizeSpec(copy, scaling, (0, 0), transposed, by_columns, "" if amaxes is None else "amaxes")
    request = QuantizeRequest(spec._replace(decoded=decoded), amaxes, parts.get("amax"), words)
    if decoded:
        shape = (x.shape[0], x.shape[1] + (-x.shape[1] % 16 if scaling.random_hadamard else 0))
        return request, [numerics.dequantize(copy, parts, shape).to(x.dtype), None, None]
    transposed_codes = None
    if transposed:
        transposed_codes = transpose_parts(fmt, parts, (x.shape[0], x.shape[1]))[copy.codes.name]
    return request, [parts[copy.codes.name], parts[copy.scale.name], transposed_codes]


def results_of(output: QuantizedOutput | None) -> list[Tensor | None]:
    """Codes, scales, and codes of the transpose."""
    return [None] * 3 if output is None else [output.codes, output.scale, output.transposed]


def quantize_case(
    x: Tensor, fmt: Format, transposed: bool = False, next_amax: bool = False, which: Orientation = Orientation.ROWWISE
) -> KernelCase:
    """Codes and scales of one copy.

    `transposed`: also the codes of the transpose. `next_amax`: also the amax for the next step, in the same pass.
    """
    request, expected = quantization(x, fmt, which=which, transposed=transposed)
    next_amax_out = torch.zeros((), dtype=torch.float32, device=x.device) if next_amax else None
    expected_amax = x.abs().amax().float() if next_amax else None
    return KernelCase(
        lambda: [*results_of(matrix.quantize_matrix(x, request, None, next_amax_out)[0]), next_amax_out],
        lambda: [*expected, expected_amax], bytes_of(x, *_tensors(expected)),
    )  # fmt: skip


def _tensors(expected: Iterable[Expected]) -> list[Tensor]:
    return [part for part in expected if isinstance(part, Tensor)]


def _quantize_cases() -> Cases:
    """Every copy of every format; with the transpose for square blocks, and with the next amax for tensor scales."""
    cases: Cases = {}
    for fmt in QUANTIZED:
        name = f"quantize {fmt.name}"
        cases[name] = {"fmt": fmt}
        cases |= {
            f"{name}, {orientation.value}": {"fmt": fmt, "which": orientation} for orientation in list(fmt.copies)[1:]
        }
        variants: Cases = {name: {"fmt": fmt}}
        if fmt.transposable:
            variants[f"{name} + transpose"] = {"fmt": fmt, "transposed": True}
        cases |= variants
        if fmt.copies[Orientation.ROWWISE].block == (ALL, ALL):
            cases |= {f"{variant} + next amax": options | {"next_amax": True} for variant, options in variants.items()}
    return cases


def quantize_both_case(x: Tensor, fmt: Format, scaling: Scaling, decoded: int = 0) -> KernelCase:
    """Codes and scales by rows and, with separate scales, by columns.

    `decoded`: 1 for values instead of the rowwise codes, 2 for values of both.
    """
    # The transform pads columns to a multiple of 16.
    padded = x.shape[0] + (-x.shape[0] % 16 if scaling.random_hadamard else 0)
    shapes = [(x.shape[0], x.shape[1]), (x.shape[1], padded)]
    words = [
        RandomBits(5, 1, 0, shape, transposed=is_transposed)
        for is_transposed, shape in zip((False, True), shapes, strict=True)
    ]
    (rowwise, by_rows), (columnwise, by_columns) = (
        quantization(
            values,
            fmt,
            direction_scaling,
            words=bits if direction_scaling.stochastic_rounding else None,
            decoded=number < decoded,
        )
        for number, (values, bits, direction_scaling) in enumerate(
            (
                (x, words[0], Scaling(stochastic_rounding=scaling.stochastic_rounding)),
                (x.t(), words[1], scaling),
            )
        )
    )
    expected = [*by_rows, *by_columns]
    return KernelCase(
        lambda: [part for output in matrix.quantize_matrix(x, rowwise, columnwise) for part in results_of(output)],
        lambda: expected, bytes_of(x, *_tensors(expected)),
    )  # fmt: skip


def _both_cases() -> Cases:
    """Formats with blocks along rows; with stochastic rounding and transform for blocks within a tile."""
    cases: Cases = {}
    for fmt in QUANTIZED:
        block = fmt.copies[Orientation.ROWWISE].block
        if fmt.transposable or len(fmt.copies) > 1 or block[0] != 1:
            continue
        name = f"quantize {fmt.name}, both directions"
        cases[name] = {"fmt": fmt, "scaling": Scaling()}
        if is_decoded(fmt):
            cases[f"{name}, the first decoded"] = {"fmt": fmt, "scaling": Scaling(), "decoded": 1}
            cases[f"{name}, decoded"] = {"fmt": fmt, "scaling": Scaling(), "decoded": 2}
        if ALL not in block:
            rounded = f"{name} + stochastic_rounding"
            cases[rounded] = {"fmt": fmt, "scaling": Scaling(stochastic_rounding=True)}
            transformed = Scaling(stochastic_rounding=True, random_hadamard=True)
            cases[f"{rounded} + random_hadamard"] = {"fmt": fmt, "scaling": transformed}
            if is_decoded(fmt):
                cases[f"{rounded} + random_hadamard, decoded"] = {"fmt": fmt, "scaling": transformed, "decoded": 2}
    return cases


def amax_case(x: Tensor, fmt: Format) -> KernelCase:
    """Amaxes of the blocks of a format's first scale."""
    part = next(c for c in fmt.components if c.role is Role.SCALE)
    expected = numerics.block_amax(x, part.block_shape)
    return KernelCase(lambda: [amax.block_amax(x, part.block_shape)], lambda: [expected], bytes_of(x, expected))


def scales_case(x: Tensor, fmt: Format) -> KernelCase:
    """Scales and multipliers from the amaxes of the blocks, for formats with one scale."""
    copy, scaling = fmt.copies[Orientation.ROWWISE], Scaling()
    grids = numerics.amaxes(x, fmt)
    expected = [part[copy.scale.name] for part in numerics.scales_and_multipliers(grids, fmt, scaling, x.dtype)]
    grid = grids[copy.scale.name]
    return KernelCase(
        lambda: amax.scales(grid, copy, scaling, x.dtype), lambda: expected, bytes_of(grid, *expected)
    )  # fmt: skip


def dequantize_case(x: Tensor, fmt: Format, dtype: torch.dtype = torch.bfloat16) -> KernelCase:
    """Values from codes and scales."""
    copy, shape, parts = fmt.copies[Orientation.ROWWISE], (x.shape[0], x.shape[1]), numerics.quantize(x, fmt)
    expected = numerics.dequantize(copy, parts, shape).to(dtype)
    inputs = [parts[c.name] for c in fmt.components if c.copy is Orientation.ROWWISE]
    return KernelCase(
        lambda: dequantize.dequantize_matrices(copy, [(parts, shape, (0, 0))], dtype),
        lambda: [expected],
        bytes_of(expected, *inputs),
    )


def _statistics_rows(copies: int, device: torch.device) -> tuple[Tensor, Tensor]:
    sums = torch.zeros(copies, len(quantization_error.SUMS), dtype=torch.float64, device=device)
    empty = torch.tensor(quantization_error.EMPTY, dtype=torch.float32, device="cpu").to(device)
    return sums, empty.repeat(copies, 1)


def _together(extremes: Tensor) -> Tensor:
    return torch.cat([extremes[:, :2].amax(0), extremes[:, 2:].amin(0)])


def values_case(x: Tensor) -> KernelCase:
    """Counts and amax of values that are not quantized, with an infinity, a NaN and a zero."""
    values = x.clone()
    for index, value in enumerate((math.inf, math.nan, 0.0)):
        values.view(-1)[index : index + 1] = value

    def launch() -> list[Tensor | None]:
        sums, extremes = _statistics_rows(3, x.device)
        error.add_values(sums, extremes, values)
        return [sums.sum(0), _together(extremes)]

    def oracle() -> list[Expected]:
        (sums,), (extremes,) = _statistics_rows(1, x.device)
        quantization_error.add_values(sums[None], extremes[None], values)
        return [sums, extremes]

    return KernelCase(launch, oracle, bytes_of(x))


def words_case(x: Tensor, quads: bool = False, stored: bool = False) -> KernelCase:
    """Random words of a part of a matrix.

    `quads`: rows start at a multiple of a Philox call's four words. `stored`: the draw is in memory, as in a captured
    step.
    """
    rows, cols = x.shape
    width = (cols + 7) // 4 * 4 + (0 if quads else 1)
    draw = torch.tensor(70, dtype=torch.int64, device=x.device) if stored else 70
    bits = RandomBits(0x9E3779B97F4A7C15, draw, 5, (rows + 3, width), (3, 4 if quads else 2), (rows, cols - 4 * quads))
    return KernelCase(
        lambda: [random_words.random_words(bits, x.device)],
        lambda: [bits.tensor(x.device)],
        8 * math.prod(bits.shape or ()),
    )


def error_case(x: Tensor, fmt: Format, hadamard: bool = False) -> KernelCase:
    """Counts, extremes and squared errors of one copy; some values saturate."""
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
        quantization_error.add_error(sums[None], extremes[None], exact, copy, parts)
        squares = sums[6:]
        bound = (math.log2(exact.numel()) + 4) * 2.0**-23 * squares + 2.0**-21 * squares.prod().sqrt()
        return [sums[:6], extremes, Bound(squares, bound)]

    inputs = [parts[c.name] for c in fmt.components if c.copy is Orientation.ROWWISE]
    return KernelCase(launch, oracle, bytes_of(x, *inputs))


def transpose_case(x: Tensor, blocks: bool = False) -> KernelCase:
    """Transposed bytes. `blocks`: also the scales of their 128 x 128 blocks, with a NaN flag of 0 added."""
    codes = x.view(torch.uint8)[:, : x.shape[1]].contiguous()
    if not blocks:
        transposed = lambda: [transpose.by_columns([(codes, None, None)])[0][0].t()]  # noqa: E731
        return KernelCase(transposed, lambda: [codes.t().contiguous()], 2 * bytes_of(codes))
    scales, zero = numerics.block_amax(x, (128, 128)), torch.zeros((), dtype=torch.float32, device=x.device)

    def oracle() -> list[Tensor | None]:
        with kernel_dispatch.kernels_only_on():
            return list(kernel_dispatch.by_columns([(codes, scales, zero)], torch.uint8)[0])

    return KernelCase(
        lambda: list(transpose.by_columns([(codes, scales, zero)])[0]), oracle, 2 * bytes_of(codes, scales)
    )


def swizzle_case(x: Tensor, fmt: Format, turned: bool = False) -> KernelCase:
    """A stored matrix in the layout of GEMMs with swizzled scales. `turned`: its transpose."""
    copy, matrices, inputs = _stored_of(x, fmt)
    return KernelCase(
        lambda: _bytes_of_results(swizzle.SwizzleRequest(copy, matrices, turned).finish()),
        lambda: _swizzled_by_oracle(copy, matrices, turned),
        bytes_of(*(inputs if turned else inputs[1:]), *_tensors(_swizzled_by_oracle(copy, matrices, turned))),
    )  # fmt: skip


def _stored_of(x: Tensor, fmt: Format) -> tuple[OrientedCodes, list[kernel_dispatch.StoredMatrix], list[Tensor]]:
    """A stored matrix as an argument of `kernel_dispatch.swizzle`, with a NaN flag of 0; and its codes and scales."""
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
    ((codes, swizzled_scales, second_scale),) = made
    return [None if codes is None else codes.view(torch.uint8), swizzled_scales.view(torch.uint8), second_scale]


def ready_case(x: Tensor, fmt: Format, weight: Format | None = None, turned: bool = False) -> KernelCase:
    """Codes and scales in the layout of GEMMs.

    `weight`: format of a stored matrix to swizzle in the same launch (see `swizzle_case`).
    """
    copy, parts = fmt.copies[Orientation.ROWWISE], numerics.quantize(x, fmt)
    request = QuantizeRequest(QuantizeSpec(copy, Scaling(), ready=True), second_amax=parts.get("amax"))
    swizzled_scales = swizzled(parts[copy.scale.name])
    second_amax = parts.get("amax")
    unit = 1.0 / (copy.codes.encoding.max * copy.scale.encoding.max)
    expected: list[Tensor | None] = [
        parts[copy.codes.name], swizzled_scales, None if second_amax is None else (second_amax * unit).view(1, 1)
    ]  # fmt: skip
    inputs, weight_args = [x], None if weight is None else _stored_of(x, weight)
    if weight_args is not None:
        expected += _swizzled_by_oracle(*weight_args[:2], turned)
        inputs += weight_args[2]

    def launch() -> list[Tensor | None]:
        weight_request = None if weight_args is None else swizzle.SwizzleRequest(*weight_args[:2], turned)
        ((output, _),) = matrix.quantize_matrices([x], [KernelOutputs(request)], weight_request)
        assert output is not None
        codes, scale = (getattr(part, "base", part).view(torch.uint8) for part in (output.codes, output.scale))
        return [
            codes,
            scale,
            output.second_scale,
            *([] if weight_request is None else _bytes_of_results(weight_request.finish())),
        ]

    return KernelCase(launch, lambda: expected, bytes_of(*inputs, *_tensors(expected)))


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
