"""The memory layout of block scales for tensor cores of compute capability 10."""

from __future__ import annotations

import torch
from torch import Tensor

from quantshard.numerics import Pair


def swizzled(grid: Tensor) -> Tensor:
    """Rearrange bytes [R, C] into flat tiles of 128 x 4, in which rows i, i + 32, i + 64 and i + 96 are adjacent.

    This is the layout of block scales that tensor cores of compute capability 10 read (cuBLAS, "1D block scaling
    factors layout"). The last tiles are padded with zeros.
    """
    more = (0, -grid.shape[1] % 4, 0, -grid.shape[0] % 128)
    padded = torch.nn.functional.pad(grid, more) if any(more) else grid  # can have any strides
    tiles = padded.reshape(padded.shape[0] // 128, 4, 32, padded.shape[1] // 4, 4)
    return tiles.permute(0, 3, 2, 1, 4).reshape(-1)


def unswizzled(flat: Tensor, shape: Pair) -> Tensor:
    """Inverse of `swizzled`: the bytes of a grid [R, C]."""
    tiles = flat.view(-(shape[0] // -128), -(shape[1] // -4), 32, 4, 4).permute(0, 3, 2, 1, 4)
    return tiles.reshape(tiles.shape[0] * 128, -1)[: shape[0], : shape[1]]
