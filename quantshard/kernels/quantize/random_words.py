"""Random words of tiles, by Philox counters of global indices (`numerics.random_words`), and launch arguments."""

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from quantshard.kernels import language as ql
from quantshard.kernels.launch import launch_kernel
from quantshard.kernels.quantize.targets import MOST_PLANS, KernelOutputs, QuantizeRequest, Rounding
from quantshard.numerics import Pair, RandomBits, swap_halves


@triton.jit
def philox(c0, c1, c2, c3, k0, k1):
    """Philox4x32-10 of uint32 tiles: `numerics.philox`."""
    for _ in tl.static_range(10):
        product0 = c0.to(tl.uint64) * 0xD2511F53  # one instruction for both halves
        product1 = c2.to(tl.uint64) * 0xCD9E8D57
        c0 = (product1 >> 32).to(tl.uint32) ^ c1 ^ k0
        c2 = (product0 >> 32).to(tl.uint32) ^ c3 ^ k1
        c1 = product1.to(tl.uint32)
        c3 = product0.to(tl.uint32)
        k0 = k0 + 0x9E3779B9
        k1 = k1 + 0xBB67AE85
    return c0, c1, c2, c3


@triton.jit
def words_of_tile(
    row, col, words, ROWS: tl.constexpr, COLS: tl.constexpr, BY_FOUR: tl.constexpr, TOGETHER: tl.constexpr = 1,
    INDEX: tl.constexpr = tl.int64,
):  # fmt: skip
    """Random words, uint32 [ROWS, COLS], of the tile at a global row and column: `numerics.random_words`.

    `words`: (k0, k1, draw, stream, width of the global matrix). BY_FOUR: the width is a multiple of 4. INDEX: integer
    type that can count the elements of that matrix.
    """
    width = words[4]
    rows = (row + ql.row_order(ROWS, TOGETHER)).to(INDEX)[:, None]
    if BY_FOUR:
        calls = rows * (width // 4) + (col // 4 + tl.arange(0, COLS // 4))[None, :]
        return tl.reshape(_four_words(calls, words), (ROWS, COLS))
    else:
        return _one_word(rows * width + (col + tl.arange(0, COLS))[None, :], words)


@triton.jit
def words_of_transposed_tile(
    row, col, words, ROWS: tl.constexpr, COLS: tl.constexpr, BY_FOUR: tl.constexpr, TOGETHER: tl.constexpr,
    INDEX: tl.constexpr,
):  # fmt: skip
    """`words_of_tile` for a tile held as its transpose: uint32 [COLS, ROWS]."""
    width = words[4]
    if BY_FOUR:
        tl.static_assert(TOGETHER % 4 == 0)
        # in this order each thread calls the generator for its own elements: 4 neighbours of ROWS, in turn
        LANES: tl.constexpr = 32 if ROWS > 128 else ROWS // 4
        TIMES: tl.constexpr = ROWS // (4 * LANES)
        FAR: tl.constexpr = COLS // TOGETHER
        position = tl.arange(0, TOGETHER // 4 * TIMES * 4 * FAR)
        four = position % FAR * (TOGETHER // 4) + position // (FAR * 4 * TIMES)
        line = position // FAR % 4 + position // (FAR * 4) % TIMES * (4 * LANES)
        lines = line[:, None] + 4 * tl.arange(0, LANES)[None, :]
        bits = _four_words((row + lines).to(INDEX) * (width // 4) + (col // 4 + four)[:, None], words)
        bits = tl.reshape(bits, (TOGETHER // 4, TIMES, 4, FAR, LANES, 4))
        return tl.reshape(tl.permute(bits, (0, 5, 3, 1, 4, 2)), (COLS, ROWS))
    else:
        rows = (row + tl.arange(0, ROWS)).to(INDEX)[None, :] * width
        return _one_word(rows + (col + ql.row_order(COLS, TOGETHER))[:, None], words)


@triton.jit
def _philox_at(call, words):
    k0, k1, draw, stream, _ = words
    zero = tl.zeros_like(call).to(tl.uint32)
    high = zero if call.dtype == tl.uint32 else (call >> 32).to(tl.uint32)
    return philox(
        call.to(tl.uint32), high, zero + draw.to(tl.uint32), zero + stream.to(tl.uint32), k0.to(tl.uint32),
        k1.to(tl.uint32),
    )  # fmt: skip


@triton.jit
def _four_words(call, words):
    """Words of four neighbours from each Philox call, as two trailing dims of 2."""
    w0, w1, w2, w3 = _philox_at(call, words)
    return tl.join(tl.join(w0, w2), tl.join(w1, w3))


@triton.jit
def _one_word(element_index, words):
    w0, w1, w2, w3 = _philox_at(element_index >> 2, words)
    index = element_index & 3
    return tl.where(index < 2, tl.where(index == 0, w0, w1), tl.where(index == 2, w2, w3))


@triton.jit
def key_of(part: tl.constexpr, first, second, third):
    """Select the key and draw of matrix number `part`."""
    return first if part == 0 else (second if part == 1 else third)


KEYS: Final = 3
"""The most matrices with random words in one launch: queries, keys and values."""
NO_KEY: Final = (0, 0, 0)
NO_STREAMS: Final = (0, 1, 0, 1)
RANDOM = ("k0", "k1", "draw", "stream", "other_stream")
"""Arguments exempt from Triton's specialization, which would recompile a kernel for the value 1 or a multiple of 16."""
RANDOM_OF_PARTS = (*RANDOM, "k2", "k3", "draw1", "k4", "k5", "draw2")

RandomArguments = tuple[tuple[Any, ...], tuple[int, ...], Rounding | None, Rounding | None]
"""Key and draw; stream and width of both directions; compile-time properties of both directions."""


def random_arguments(one: QuantizeRequest | None, two: QuantizeRequest | None) -> RandomArguments:
    first, second = one and one.words, two and two.words
    bits = first or second
    if bits is None:
        return NO_KEY, NO_STREAMS, None, None
    first_bits, second_bits, is_loaded = first or bits, second or bits, isinstance(bits.draw, Tensor)
    can_share = first_bits.stream == second_bits.stream and second_bits.transposed and not first_bits.transposed
    width, rounding = _rounding(first_bits.global_shape, first_bits.transposed, is_loaded)
    shared_with = first_bits.global_shape if can_share else None
    other_width, other_rounding = _rounding(second_bits.global_shape, second_bits.transposed, is_loaded, shared_with)
    streams = first_bits.stream, width, second_bits.stream, other_width
    return (*halves(bits.key), bits.draw), streams, first and rounding, second and other_rounding


@lru_cache(MOST_PLANS)
def _rounding(
    shape: Pair, transposed: bool, draw_loaded: bool, shared_with: Pair | None = None
) -> tuple[int, Rounding]:
    """Width of the global matrix and compile-time properties of the random words, for one direction.

    `shared_with`: shape of the other direction's matrix, if that has the transposed words of the same stream.
    """
    width, is_short = shape[0 if transposed else 1], math.prod(shape) < 1 << 32
    is_shared = shared_with is not None and (shared_with[1], math.prod(shared_with) < 1 << 32) == (width, is_short)
    return width, Rounding(width % 4 == 0, is_short, draw_loaded, transposed, is_shared)


def random_arguments_of(
    requests: Sequence[KernelOutputs],
) -> tuple[tuple[Any, ...], tuple[int, ...], list[Rounding | None]]:
    """Return the arguments of a launch: a key and draw for each of `KEYS` matrices, flat because of `RANDOM`."""
    if not any([request is not None and request.words is not None for outputs in requests for request in outputs[:2]]):
        return NO_KEY * KEYS, NO_STREAMS, [None, None]
    arguments = [random_arguments(outputs.rowwise, outputs.columnwise) for outputs in requests]
    keys = [part for key, *_ in arguments for part in key]
    _, streams, *roundings = arguments[0]
    return (*keys, *NO_KEY * (KEYS - len(requests))), streams, roundings


def halves(key: int | tuple[Any, Any]) -> tuple[Any, Any]:
    """Split a 64-bit key into signed 32-bit halves, which recompile no kernel; a traced graph has split it already."""
    if isinstance(key, tuple):
        return key
    low, high = key & 0xFFFFFFFF, key >> 32 & 0xFFFFFFFF
    return low - ((low & 1 << 31) << 1), high - ((high & 1 << 31) << 1)


TILE: Final = (8, 256)


@triton.jit(do_not_specialize=RANDOM)
def words_kernel(
    out_ptr, k0, k1, draw, stream, width, row_origin, col_origin, rows, cols, ROWS: tl.constexpr, COLS: tl.constexpr,
    BY_FOUR: tl.constexpr, SHORT: tl.constexpr, STORED: tl.constexpr,
):  # fmt: skip
    index: tl.constexpr = tl.uint32 if SHORT else tl.int64
    row, col = tl.program_id(0) * ROWS, tl.program_id(1) * COLS
    draw_number = tl.load(draw) if STORED else draw
    key = (k0, k1, draw_number, stream, width)
    words = words_of_tile(row_origin + row, col_origin + col, key, ROWS, COLS, BY_FOUR, 1, index)
    i, j = row + tl.arange(0, ROWS), col + tl.arange(0, COLS)
    offsets = i.to(tl.int64)[:, None] * cols + j[None, :]
    tl.store(out_ptr + offsets, words.to(tl.int64), mask=(i < rows)[:, None] & (j < cols)[None, :])


def random_words(bits: RandomBits, device: torch.device) -> Tensor:
    """Return `numerics.random_words` of `bits`: int64 [R, C] in [0, 2**32), for values that no kernel rounds itself."""
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
        out, *halves(bits.key), bits.draw, bits.stream, width, *bits.origin, rows, cols, ROWS=TILE[0], COLS=TILE[1],
        BY_FOUR=width % 4 == bits.origin[1] % 4 == 0, SHORT=height * width < 1 << 32,
        STORED=isinstance(bits.draw, Tensor), num_warps=4,
    )  # fmt: skip
    return out
