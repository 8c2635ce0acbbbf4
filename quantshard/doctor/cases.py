"""The kernels that quantize, measure, dequantize and transpose, each on one matrix: the call, the bytes that it must
move, and whether what it gave is the oracle's, bit for bit.

Imported only where `kernels.USABLE`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quantshard import numerics
from quantshard.doctor.timing import bytes_of
from quantshard.formats import ALL, FORMATS, Copy, Format, Role, Scaling
from quantshard.gemm import producers
from quantshard.kernels.fused import rounded_sum
from quantshard.kernels.quantize import amax, dequantize, scales, transpose
from quantshard.kernels.quantize.matrix import quantize_matrix
from quantshard.kernels.quantize.targets import QuantizedOutput, QuantizeRequest
from quantshard.numerics import RandomBits


class KernelCase(NamedTuple):
    """One kernel: how to call it on a matrix, the bytes that it moves, and whether its result is the oracle's."""

    name: str
    call: Callable[[], Any]
    moved: int
    is_right: Callable[[Any], bool]


Wanted = tuple[QuantizeRequest, Callable[[QuantizedOutput | None], bool], dict[str, Tensor]]
"""How a matrix is to be quantized, whether a kernel did so, and the oracle's components."""

QUANTIZED = tuple(fmt for fmt in FORMATS.values() if fmt.copies[Copy.ROWWISE].codes.encoding.bits <= 8)
"""The formats that kernels quantize into; 16-bit codes are written by Adam's kernel alone."""


def same_bits(found: Tensor | None, expected: Tensor) -> bool:
    """Bit for bit, and of one shape."""
    if found is None or found.shape != expected.shape or found.dtype != expected.dtype:
        return False
    return torch.equal(*(t.contiguous().view(-1).view(torch.uint8) for t in (found, expected)))


def expected_quantization(
    x: Tensor,
    fmt: Format,
    scaling: Scaling = Scaling(),  # noqa: B008  (frozen)
    *,
    which: Copy = Copy.ROWWISE,
    words: RandomBits | None = None,
    transposed: bool = False,
) -> Wanted:
    """For one copy of a format: with multipliers given where its blocks reach beyond a tile.

    `transposed`: the codes of the transpose too. `words`: random words, for stochastic rounding.
    """
    copy = fmt.copies[which]
    drawn = None if words is None else dict.fromkeys(Copy, words.tensor(x.device))
    parts = numerics.quantize(x, fmt, scaling, words=drawn)
    known = None
    if ALL in copy.block:
        known = numerics.encode_scales(numerics.amaxes(x, fmt), fmt, scaling, x.dtype)[copy.scale.name]
    request = QuantizeRequest(
        copy, scaling, multipliers=known, second_amax=parts.get("amax"), words=words, transposed=transposed,
        by_columns=producers.read_by_columns(copy),
    )  # fmt: skip

    def is_right(target: QuantizedOutput | None) -> bool:
        if target is None:
            return False
        if transposed:
            across = numerics.transpose_parts(fmt, parts, (x.shape[0], x.shape[1]))[copy.codes.name]
            if not same_bits(target.transposed, across):
                return False
        scales_are_right = known is not None or same_bits(target.scale, parts[copy.scale.name])
        return scales_are_right and same_bits(target.codes, parts[copy.codes.name])

    return request, is_right, parts


def quantize_case(x: Tensor, fmt: Format, transposed: bool, next_amax: bool, which: Copy = Copy.ROWWISE) -> KernelCase:
    """Codes and scales of one copy, and the transpose's codes: with the amax known, or taken from the blocks."""
    request, is_right, _ = expected_quantization(x, fmt, which=which, transposed=transposed)
    seen = torch.zeros((), dtype=torch.float32, device=x.device) if next_amax else None
    sample, _ = quantize_matrix(x, request, None, seen)

    def both_are_right(found: tuple[QuantizedOutput, QuantizedOutput | None]) -> bool:
        return is_right(found[0]) and (seen is None or torch.equal(seen, x.abs().amax().float()))

    name = f"quantize {fmt.name}" + ("" if which is Copy.ROWWISE else f", {which.value}")
    name += (" + transpose" if transposed else "") + (" + next amax" if next_amax else "")
    moved = bytes_of(x, sample.codes, sample.scale, sample.transposed)
    return KernelCase(name, lambda: quantize_matrix(x, request, None, seen), moved, both_are_right)


def quantize_both_case(x: Tensor, fmt: Format, scaling: Scaling) -> KernelCase:
    """Codes and scales by rows and, with scales of their own, by columns."""
    padded = x.shape[0] + (-x.shape[0] % 16 if scaling.random_hadamard else 0)  # what the transform sees of a column
    shapes = [(x.shape[0], x.shape[1]), (x.shape[1], padded)]
    words = [RandomBits(5, 1, stream, shape) for stream, shape in enumerate(shapes)]
    asked = [
        expected_quantization(values, fmt, way, words=drawn if way.stochastic_rounding else None)
        for values, drawn, way in (
            (x, words[0], Scaling(stochastic_rounding=scaling.stochastic_rounding)),
            (x.t(), words[1], scaling),
        )
    ]
    (one, _, _), (two, _, _) = asked
    sample = quantize_matrix(x, one, two)

    def is_right(found: tuple[QuantizedOutput, QuantizedOutput | None]) -> bool:
        return all(right(target) for target, (_, right, _) in zip(found, asked, strict=True))

    extras = [word for word in ("stochastic_rounding", "random_hadamard") if getattr(scaling, word)]
    moved = bytes_of(x, *(part for target in sample if target for part in (target.codes, target.scale)))
    name = f"quantize {fmt.name}, both directions" + "".join(f" + {extra}" for extra in extras)
    return KernelCase(name, lambda: quantize_matrix(x, one, two), moved, is_right)


def amax_case(x: Tensor, fmt: Format) -> KernelCase:
    """Of the blocks of the first scale of a format."""
    part = next(c for c in fmt.components if c.role is Role.SCALE)
    expected = numerics.block_amax(x, part.covers)
    moved = bytes_of(x, expected)
    return KernelCase(
        f"amax {fmt.name}", lambda: amax.block_amax(x, part.covers), moved, lambda out: same_bits(out, expected)
    )


def dequantize_case(x: Tensor, fmt: Format) -> KernelCase:
    """Codes and scales to bfloat16; to float32 too before it is called right."""
    copy, shape, parts = fmt.copies[Copy.ROWWISE], (x.shape[0], x.shape[1]), numerics.quantize(x, fmt)
    exact = numerics.dequantize(copy, parts, shape)
    expected = exact.bfloat16()
    moved = bytes_of(expected, *_of_copy(parts, fmt))

    def call(dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return dequantize.dequantize(copy, parts, shape, dtype=dtype)

    def is_right(found: Tensor) -> bool:
        return same_bits(found, expected) and same_bits(call(torch.float32), exact)

    return KernelCase(f"dequantize {fmt.name} to bf16", call, moved, is_right)


def _of_copy(parts: Mapping[str, Tensor], fmt: Format) -> list[Tensor]:
    return [parts[c.name] for c in fmt.components if c.copy is Copy.ROWWISE]


def transpose_case(x: Tensor) -> KernelCase:
    """Bytes."""
    codes = x.view(torch.uint8)[:, : x.shape[1]].contiguous()
    return KernelCase(
        "transpose of bytes", lambda: transpose.transpose(codes), 2 * bytes_of(codes),
        lambda out: same_bits(out, codes.t().contiguous()),
    )  # fmt: skip


def rounded_sum_case(x: Tensor) -> KernelCase:
    """Gradients of an input from two weights: float32, rounded to the dtype of x."""
    parts = [x.float() * scale for scale in (1.0, 0.01)]
    expected = (parts[0] + parts[1]).to(x.dtype)
    return KernelCase(
        f"sum of two, to {str(x.dtype).removeprefix('torch.')}", lambda: rounded_sum.rounded_sum(parts, x.dtype),
        bytes_of(*parts, expected), lambda out: same_bits(out, expected),
    )  # fmt: skip


def scales_case(x: Tensor, fmt: Format) -> KernelCase:
    """Scales and multipliers from the amaxes of the blocks, for formats with one scale."""
    copy, scaling = fmt.copies[Copy.ROWWISE], Scaling()
    grids = numerics.amaxes(x, fmt)
    expected = [
        made(grids, fmt, scaling, x.dtype)[copy.scale.name] for made in (numerics.scales, numerics.encode_scales)
    ]
    amax_grid = grids[copy.scale.name]

    def call() -> tuple[Tensor, Tensor]:
        return scales.scales(amax_grid, copy, scaling, x.dtype)

    def is_right(found: tuple[Tensor, Tensor]) -> bool:
        return all(same_bits(one, other) for one, other in zip(found, expected, strict=True))

    return KernelCase(f"scales {fmt.name}", call, bytes_of(amax_grid, *expected), is_right)
