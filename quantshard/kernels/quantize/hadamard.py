"""The random Hadamard transform along the rows of a tile: `numerics.hadamard16`."""

from __future__ import annotations

import triton
import triton.language as tl

from quantshard.numerics.hadamard import HADAMARD_NEGATIVE


@triton.jit
def hadamard16(x, SIGNS, ROWS: tl.constexpr, COLS: tl.constexpr, STEP: tl.constexpr):
    """Transform groups of 16 elements, STEP apart, of float32 [ROWS, COLS] times SIGNS: `numerics.hadamard16`."""
    x = x * SIGNS
    x = _butterflies(x, STEP, ROWS, COLS)
    x = _butterflies(x, 2 * STEP, ROWS, COLS)
    x = _butterflies(x, 4 * STEP, ROWS, COLS)
    return _butterflies(x, 8 * STEP, ROWS, COLS) * 0.25


@triton.jit
def _butterflies(x, STRIDE: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr):
    pairs = tl.reshape(x, (ROWS * COLS // (2 * STRIDE), 2, STRIDE))
    a, b = tl.split(tl.permute(pairs, (0, 2, 1)))
    return tl.reshape(tl.permute(tl.join(a + b, a - b), (0, 2, 1)), (ROWS, COLS))


# a bit mask, because a kernel cannot index a tuple by a tile
SIGN_MASK = tl.constexpr(HADAMARD_NEGATIVE)


@triton.jit
def hadamard_signs(columns):
    """Return +1 or -1 for each of these global columns."""
    mask = tl.zeros_like(columns) + SIGN_MASK
    return 1.0 - 2.0 * ((mask >> (columns % 16)) & 1).to(tl.float32)
