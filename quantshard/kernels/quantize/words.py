"""Random words of a rectangle, written to memory: `numerics.random_words`, for values that no kernel rounds itself."""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from quantshard.kernels.launch import launch_kernel
from quantshard.kernels.quantize import random_words as rw
from quantshard.numerics import RandomBits, swap_halves

TILE: Final = (8, 256)


@triton.jit(do_not_specialize=rw.RANDOM)
def words_kernel(
    out_ptr, k0, k1, draw, stream, width, row_origin, col_origin, rows, cols, ROWS: tl.constexpr, COLS: tl.constexpr,
    BY_FOUR: tl.constexpr, SHORT: tl.constexpr, STORED: tl.constexpr,
):  # fmt: skip
    index: tl.constexpr = tl.uint32 if SHORT else tl.int64
    row, col = tl.program_id(0) * ROWS, tl.program_id(1) * COLS
    draw_number = tl.load(draw) if STORED else draw
    key = (k0, k1, draw_number, stream, width)
    words = rw.words_of_tile(row_origin + row, col_origin + col, key, ROWS, COLS, BY_FOUR, 1, index)
    i, j = row + tl.arange(0, ROWS), col + tl.arange(0, COLS)
    offsets = i.to(tl.int64)[:, None] * cols + j[None, :]
    tl.store(out_ptr + offsets, words.to(tl.int64), mask=(i < rows)[:, None] & (j < cols)[None, :])


def random_words(bits: RandomBits, device: torch.device) -> Tensor:
    """Return `numerics.random_words` of `bits`: int64 [R, C] in [0, 2**32)."""
    if bits.transposed:
        return swap_halves(random_words(bits.untransposed, device)).t()
    height, width = bits.global_shape
    rows, cols = (height - bits.origin[0], width - bits.origin[1]) if bits.shape is None else bits.shape
    out = torch.empty(max(rows, 0), max(cols, 0), dtype=torch.int64, device=device)
    if out.numel() == 0:
        return out
    grid = triton.cdiv(rows, TILE[0]), triton.cdiv(cols, TILE[1])
    launch_kernel(
        words_kernel, grid, device,
        out, *rw.halves(bits.key), bits.draw, bits.stream, width, *bits.origin, rows, cols, ROWS=TILE[0], COLS=TILE[1],
        BY_FOUR=width % 4 == bits.origin[1] % 4 == 0, SHORT=height * width < 1 << 32,
        STORED=isinstance(bits.draw, Tensor), num_warps=4,
    )  # fmt: skip
    return out
