"""Which rows of a matrix are of which expert, as kernels read it: two tables on the device.

They are made of counts that the host knows, or by a kernel of counts that lie on the device, which nobody waits for.
Then it is not known how many tiles there are, but how many there may be; those that are too many have no rows.
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
from quantshard.kernels.tables import DeviceTable

FEW_ROWS: Final = 64
MANY_ROWS: Final = 128
TILES: Final = 32
"""Rows of the table of tiles that a program writes at once."""


@dataclass(frozen=True)
class ExpertSegments:
    """The rows of a matrix of codes that belong to each expert.

    `rows`: the most rows in a tile. `values`, `total`: rows without and with those between experts, or of the latter
    the most that there may be. `spans`: int64 [experts, 4] on the device: number of the expert, its first row, the one
    after its last, and by how many rows its codes lie behind its values. `tiles`: int64 [tiles, 4]: the same with the
    first row of each tile; an expert without rows has none. A tile that is too many begins at or behind its end.
    """

    rows: int
    values: int
    total: int
    spans: Tensor
    tiles: Tensor

    @staticmethod
    def of(counts: Sequence[int], device: torch.device, unit: int = 1) -> ExpertSegments:
        """`counts`: how many rows each expert has, in order. The copy to the device does not wait for it.

        `unit`: what the first row of codes of an expert is a multiple of.
        """
        rows, total, held = _segments(tuple(counts), device, unit)
        table = held.tensor()
        return ExpertSegments(rows, sum(counts), total, table[: len(counts)], table[len(counts) :])

    @staticmethod
    def of_tensor(counts: Tensor, values: int, unit: int = 1) -> ExpertSegments:
        """`counts`: int64 or int32 [experts], contiguous, where kernels read it. It must sum to `values` and have none
        below 0: an assertion on the device, which the next call that waits for it raises, and nothing reads beyond."""
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
        """How many experts."""
        return self.spans.shape[0]


def _rows_of_tile(values: int, experts: int, unit: int) -> int:
    """The most rows in a tile, which a unit of more than one row is."""
    return FEW_ROWS if unit == 1 and values <= FEW_ROWS * experts else MANY_ROWS


@lru_cache(maxsize=16)  # layers that follow each other have the same, and so has a capture as the run before it
def _segments(counts: tuple[int, ...], device: torch.device, unit: int) -> tuple[int, int, DeviceTable]:
    """The most rows in a tile, how many rows of codes there are, and the table of `spans` and `tiles`."""
    rows = _rows_of_tile(sum(counts), len(counts), unit)
    starts = list(accumulate([count + -count % unit for count in counts], initial=0))
    shifts = accumulate([-count % unit for count in counts], initial=0)
    ends = map(add, starts, counts)
    spans = list(zip(range(len(counts)), starts, ends, shifts, strict=False))  # the last start and shift are of no one
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
    """A program for each expert writes its span and its tiles, and a last one the tiles that are too many."""
    expert, e = tl.program_id(0), tl.arange(0, EXPERTS)
    told = tl.load(counts + e, mask=e < experts, other=0).to(tl.int64)
    count = tl.minimum(tl.maximum(told, 0), values)  # so that wrong ones write nowhere else, before they are told
    spaces = (UNIT - count % UNIT) % UNIT
    start = tl.sum(tl.where(e < expert, count + spaces, 0))
    shift = tl.sum(tl.where(e < expert, spaces, 0))
    first = tl.sum(tl.where(e < expert, (count + ROWS - 1) // ROWS, 0))  # the number of its first tile
    end = start + tl.sum(tl.where(e == expert, count, 0))
    is_last = expert == experts
    after = tl.minimum(tl.where(is_last, tiles, first + (end - start + ROWS - 1) // ROWS), tiles)
    if is_last:
        tl.store(fits, (tl.sum(told) == values) & (tl.min(told) >= 0))
    else:
        write_row(table + expert * 4, expert, start, end, shift, None)
    number = tl.where(is_last, 0, expert)
    start, end, shift = tl.where(is_last, 0, start), tl.where(is_last, 0, end), tl.where(is_last, 0, shift)
    for tile in range(first, after, TILES):
        t = tile + tl.arange(0, TILES)
        at = start + (t - first) * ROWS
        write_row(table + (experts + t) * 4, number, at, end, shift, t < after)
