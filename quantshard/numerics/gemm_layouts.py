"""Layouts in which scaled products read stored matrices: transposed codes, and swizzled scales."""

from collections.abc import Sequence

import torch
from torch import Tensor

from quantshard import numerics
from quantshard.formats import Encoding, OrientedCodes
from quantshard.numerics import Pair

StoredMatrix = tuple[Pair, Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]
"""(shape, codes, scales, amax, nan_flag, other) of one copy of a matrix [R, C].

`amax`: of the second scale. `nan_flag`: float32 scalar; NaN makes the whole matrix NaN, and `other`, swizzled E8M0
scales of R rows.
"""
SwizzledMatrix = tuple[Tensor | None, Tensor, Tensor | None]
"""(codes of the transpose [C, R] or None, flat swizzled scales, second scale or None), in PyTorch's dtypes."""


def transpose_codes(codes: Tensor, encoding: Encoding, cols: int) -> Tensor:
    """Transpose the stored codes of a matrix [R, `cols`]."""
    return numerics.pack(numerics.unpack(codes, encoding, cols).t().contiguous(), encoding)


def by_columns(
    matrices: Sequence[tuple[Tensor, Tensor | None, Tensor | None]], dtype: torch.dtype
) -> list[tuple[Tensor, Tensor | None]]:
    """Lay out the 8-bit codes [R, C] of several matrices by columns, viewed as `dtype`, an 8-bit dtype.

    Each matrix is (codes, scales, nan_flag). Scales of 128 x 128 blocks, if any, are also laid out by columns, padded
    with zeros to a multiple of 4, and increased by the float32 scalar `nan_flag`, if any.
    """
    results = []
    for codes, scales, nan_flag in matrices:
        scales_by_columns = None
        if scales is not None:
            transposed = scales.t() if nan_flag is None else scales.t() + nan_flag
            scales_by_columns = torch.nn.functional.pad(transposed, (0, -transposed.shape[1] % 4)).contiguous().t()
        results.append((codes.t().contiguous().view(dtype).t(), scales_by_columns))
    return results


def swizzle(copy: OrientedCodes, matrix: StoredMatrix, turned: bool) -> SwizzledMatrix:
    """Convert a matrix, or its transpose (`turned`), for scaled products: an 8-bit scale per row, `swizzled`."""
    (shape, codes, scales, amax, nan_flag, other), encoding = matrix, copy.codes.encoding
    transposed_codes, block_rows = None, copy.block[0]
    second = None if amax is None else amax * (1.0 / (encoding.max * copy.scale.encoding.max))
    if nan_flag is not None and other is not None and nan_flag.isnan():
        other.view(torch.uint8).view(-(shape[0] // -128), -1)[:, :512:4] = 0xFF  # NaN in the first block of each row
    if turned:
        transposed_codes = transpose_codes(codes, encoding, shape[1]).view(encoding.gemm_dtype)
        scales, shape, block_rows = scales.t(), shape[::-1], copy.block[1]
    grid = scales.repeat_interleave(block_rows, 0)[: shape[0]]
    if nan_flag is not None and second is not None:
        second = second + nan_flag
    elif nan_flag is not None:
        grid = torch.where(nan_flag.isnan(), 0xFF, grid)
    return transposed_codes, numerics.swizzled(grid).view(copy.scale.encoding.gemm_dtype), second
