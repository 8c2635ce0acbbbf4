"""The rows of each expert in a matrix, as kernels read them: two tables on the device.

Built from counts on the host, or without a synchronization from counts on the device, with room for the most tiles.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from operator import add
from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from quantshard import private_torch
from quantshard.kernels.launch import launch_kernel
from quantshard.kernels.workspace import DeviceTable

FEW_ROWS: Final = 64
MANY_ROWS: Final = 128
TILES: Final = 32
"""Rows of the table of tiles that a program writes at once."""


@dataclass(frozen=True)
class ExpertSegments:
    """The rows of each expert in a matrix of codes.

    `rows`: the most rows in a tile. `values`: number of rows with values. `total`: number of rows, or an upper bound.
    `spans`: int64 [experts, 4] on the device: number of the expert, its first row, the end of its rows, and the offset
    of its rows of codes from its rows of values. `tiles`: int64 [tiles, 4], the same with the first row of each tile;
    an expert without rows has none. A surplus tile starts at the end of its rows, or later.
    """

    rows: int
    values: int
    total: int
    spans: Tensor
    tiles: Tensor

    @staticmethod
    def of(counts: Sequence[int], device: torch.device, unit: int = 1) -> ExpertSegments:
        """Build the tables from `counts`, the number of rows of each expert. The copy does not wait for the device.

        `unit`: the first row of codes of each expert is a multiple of it.
        """
        rows, total, device_table = _segments(tuple(counts), device, unit)
        table = device_table.tensor()
        return ExpertSegments(rows, sum(counts), total, table[: len(counts)], table[len(counts) :])

    @staticmethod
    def of_tensor(counts: Tensor, values: int, unit: int = 1) -> ExpertSegments:
        """Build the tables from `counts` on the device: int64 or int32 [experts], contiguous, of sum `values`.

        An assertion on the device checks the counts, and the next call that synchronizes raises it.
        """
        experts = counts.shape[0]
        rows = _rows_of_tile(values, experts, unit)
        tiles = (values + (rows - 1) * min(experts, values)) // rows
        total = tiles * rows if unit > 1 else values
        table = torch.empty((experts + tiles, 4), dtype=torch.int64, device=counts.device)
        fits = torch.empty((), dtype=torch.bool, device=counts.device)
        launch_kernel(
            segments_kernel, (experts + 1,), counts.device,
            counts, values, table, fits, experts, tiles,
            UNIT=unit, ROWS=rows, EXPERTS=triton.next_power_of_2(experts), TILES=TILES, num_warps=4,
        )  # fmt: skip
        private_torch.assert_on_device(
            fits, f"m_splits has an entry below 0, or does not sum to the {values} rows of the input"
        )
        return ExpertSegments(rows, values, total, table[:experts], table[experts:])

    def __len__(self) -> int:
        return self.spans.shape[0]


def _rows_of_tile(values: int, experts: int, unit: int) -> int:
    """The most rows in a tile; equal to `unit`, if that is more than one row."""
    return FEW_ROWS if unit == 1 and values <= FEW_ROWS * experts else MANY_ROWS


@lru_cache(maxsize=16)  # consecutive layers share counts, as do a capture and the run before it
def _segments(counts: tuple[int, ...], device: torch.device, unit: int) -> tuple[int, int, DeviceTable]:
    """The most rows in a tile, the number of rows of codes, and the table of `spans` and `tiles`."""
    rows = _rows_of_tile(sum(counts), len(counts), unit)
    starts = list(accumulate([count + -count % unit for count in counts], initial=0))
    shifts = accumulate([-count % unit for count in counts], initial=0)
    ends = map(add, starts, counts)
    # not strict, because the last start and shift belong to no expert
    spans = list(zip(range(len(counts)), starts, ends, shifts, strict=False))
    tiles = [(e, row, end, shift) for e, start, end, shift in spans for row in range(start, end, rows)]
    return rows, starts[-1], DeviceTable([*spans, *tiles], device)


@triton.jit
def write_row(row, expert, start, end, shift, mask):
    tl.store(row, expert, mask=mask)
    tl.store(row + 1, start, mask=mask)
    tl.store(row + 2, end, mask=mask)
    tl.store(row + 3, shift, mask=mask)


@triton.jit
def segments_kernel(
    counts, values, table, fits, experts, tiles,
    UNIT: tl.constexpr, ROWS: tl.constexpr, EXPERTS: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """One program for each expert writes its span and tiles; one more program writes the surplus tiles."""
    expert, e = tl.program_id(0), tl.arange(0, EXPERTS)
    unchecked_counts = tl.load(counts + e, mask=e < experts, other=0).to(tl.int64)
    count = tl.minimum(tl.maximum(unchecked_counts, 0), values)  # clamped: invalid counts cause no writes out of bounds
    padding = (UNIT - count % UNIT) % UNIT
    start = tl.sum(tl.where(e < expert, count + padding, 0))
    shift = tl.sum(tl.where(e < expert, padding, 0))
    first = tl.sum(tl.where(e < expert, (count + ROWS - 1) // ROWS, 0))  # the number of its first tile
    end = start + tl.sum(tl.where(e == expert, count, 0))
    is_last = expert == experts
    after = tl.minimum(tl.where(is_last, tiles, first + (end - start + ROWS - 1) // ROWS), tiles)
    if is_last:
        tl.store(fits, (tl.sum(unchecked_counts) == values) & (tl.min(unchecked_counts) >= 0))
    else:
        write_row(table + expert * 4, expert, start, end, shift, None)
    number = tl.where(is_last, 0, expert)
    start, end, shift = tl.where(is_last, 0, start), tl.where(is_last, 0, end), tl.where(is_last, 0, shift)
    for tile in range(first, after, TILES):
        t = tile + tl.arange(0, TILES)
        tile_start = start + (t - first) * ROWS
        write_row(table + (experts + t) * 4, number, tile_start, end, shift, t < after)
