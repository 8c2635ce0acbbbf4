"""Hardware support: PyTorch's scaled matrix products, the GPUs that have them, and the layouts of their scales."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Final, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from quantshard import numerics
from quantshard.formats import ALL, E2M1, E4M3, E5M2, E8M0, FP32, Format, Orientation, OrientedCodes
from quantshard.recipe import QuantSpec

Capability = tuple[int, int]
NEVER: Capability = (99, 0)
Kind = tuple[str, str, int, int]
"""One side of a scaled product: the encodings of its codes and of its scales, and the rows and the elements of a row
under one scale."""


class ScaleLayout(NamedTuple):
    """PyTorch's enum values for a kind of scales, and the function that lays out a grid [rows, blocks of a row]."""

    recipes: tuple[int, ...]
    layout: Callable[[Tensor], Tensor]
    swizzle: tuple[int, ...]


@dataclass(frozen=True)
class ScaledProduct:
    """A scaled product: layouts of the scales of the left and right operand, and the GPUs that have the product.

    `since`, `before`: compute capabilities. `seen`: a GPU on which it was tested, or None. `rows`: the left operand's
    row count must be a multiple of it. `fast`: see `recipe.MMParams`.
    """

    left: ScaleLayout
    right: ScaleLayout
    since: Capability
    before: Capability = NEVER
    seen: str | None = None
    rows: int = 1
    fast: bool = False

    def is_of(self, capability: Capability | None) -> bool:
        """Whether devices of a compute capability have the product."""
        return capability is not None and self.since <= capability < self.before


META_CAPABILITY: Capability | None = None
"""Compute capability of the GPU that the meta device stands for (`described_gpu`), or None."""


@cache
def capability_of(device: torch.device) -> Capability | None:
    """The compute capability of an NVIDIA GPU. None for other devices, and for a GPU that this machine lacks."""
    if device.type == "meta":
        return META_CAPABILITY
    has_one = device.type == "cuda" and torch.cuda.is_available() and torch.version.hip is None  # AMD's are "cuda" too
    return torch.cuda.get_device_capability(device) if has_one else None


# Layouts of scales ---------------------------------------------------------------------------------------------------


def as_single(grid: Tensor) -> Tensor:
    """A single scale, which PyTorch accepts in any shape."""
    return grid


def strided(grid: Tensor, strides: tuple[int, int]) -> Tensor:
    """A grid with exactly these strides, also in a dim of one entry, which PyTorch's scaled products check too."""
    return grid if grid.stride() == strides else grid.as_strided(grid.shape, strides)


def by_rows(grid: Tensor) -> Tensor:
    """Scales of the left operand's rows, [rows, 1], with strides (1, 1)."""
    return strided(grid.contiguous(), (1, 1))


def by_rows_right(grid: Tensor) -> Tensor:
    """Scales of the right operand's rows, [1, rows], with strides (rows, 1)."""
    return strided(grid.contiguous().view(1, -1), (grid.shape[0], 1))


def by_columns(grid: Tensor) -> Tensor:
    """Scales with strides (1, rows): column by column, as kernels store them (`producers`)."""
    strides = (1, grid.shape[0])
    return grid if grid.stride() == strides else strided(grid.t().contiguous().t(), strides)


def by_four(grid: Tensor) -> Tensor:
    """Scales of square blocks, transposed: strides (1, n), with n blocks in a row, padded to a multiple of 4."""
    more = -grid.shape[1] % 4
    padded = F.pad(grid, (0, more)) if more else grid
    return strided(padded.contiguous().t(), (1, padded.shape[1]))


def swizzled_as(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    """A layout: `numerics.swizzled` bytes as PyTorch's E8M0 or E4M3."""
    return lambda grid: numerics.swizzled(grid).view(dtype)


def _layout(
    layout: Callable[[Tensor], Tensor], *recipes: F.ScalingType, swizzle: tuple[F.SwizzleType, ...] = ()
) -> ScaleLayout:
    return ScaleLayout(tuple(int(item.value) for item in recipes), layout, tuple(int(item.value) for item in swizzle))


_TYPES, _SWIZZLE = F.ScalingType, F.SwizzleType
_WHOLE = _layout(as_single, _TYPES.TensorWise)
_ROW, _ROW_RIGHT = _layout(by_rows, _TYPES.RowWise), _layout(by_rows_right, _TYPES.RowWise)
_VECTOR, _SQUARE = _layout(by_columns, _TYPES.BlockWise1x128), _layout(by_four, _TYPES.BlockWise128x128)
_MX = _layout(swizzled_as(torch.float8_e8m0fnu), _TYPES.BlockWise1x32, swizzle=(_SWIZZLE.SWIZZLE_32_4_4,))
_NV_SWIZZLE = (_SWIZZLE.SWIZZLE_32_4_4, _SWIZZLE.NO_SWIZZLE)
_NV = _layout(swizzled_as(torch.float8_e4m3fn), _TYPES.BlockWise1x16, _TYPES.TensorWise, swizzle=_NV_SWIZZLE)

_FP8, _FP8_WIDE = (E4M3.name, FP32.name, ALL, ALL), (E5M2.name, FP32.name, ALL, ALL)
_1XROW, _1X128, _128X128 = ((E4M3.name, FP32.name, *block) for block in ((1, ALL), (1, 128), (128, 128)))
_MXFP8, _NVFP4 = (E4M3.name, E8M0.name, 1, 32), (E2M1.name, E4M3.name, 1, 16)
_PER_TENSOR = ScaledProduct(_WHOLE, _WHOLE, (8, 9), seen="H200", fast=True)

# cuBLAS multiplies no E5M2 by E5M2. After Hopper TransformerEngine emulates blocks of 1x128 and 128x128 by MXFP8 (it
# pads scales of 1x128 to 4 rows, as `rows` does here), and it has MXFP8 in all directions on 10.x alone.
NATIVE: Final[dict[tuple[Kind, Kind], ScaledProduct]] = {
    (_FP8, _FP8): _PER_TENSOR,
    (_FP8_WIDE, _FP8): _PER_TENSOR,
    (_FP8, _FP8_WIDE): _PER_TENSOR,
    (_1XROW, _1XROW): ScaledProduct(_ROW, _ROW_RIGHT, (9, 0), (10, 0), seen="H200", fast=True),
    (_1X128, _128X128): ScaledProduct(_VECTOR, _SQUARE, (9, 0), (10, 0), seen="H200", rows=4),
    (_1X128, _1X128): ScaledProduct(_VECTOR, _VECTOR, (9, 0), (10, 0), seen="H200", rows=4),
    (_MXFP8, _MXFP8): ScaledProduct(_MX, _MX, (10, 0), (11, 0)),
    (_NVFP4, _NVFP4): ScaledProduct(_NV, _NV, (10, 0), (11, 0)),
}
"""All scaled products, by the kinds of the left and the right operand."""


def kind_of(copy: OrientedCodes, block: tuple[int, int]) -> Kind:
    """Key in `NATIVE` of an operand that is read from this copy, in blocks of this shape."""
    return (copy.codes.encoding.name, copy.scale.encoding.name, *block)


def product_of_kinds(left: Kind, right: Kind) -> ScaledProduct | None:
    """The scaled product of two kinds; otherwise that with a scale per row, since larger blocks can be read so."""
    return NATIVE.get((left, right)) or NATIVE.get((flat(left), flat(right)))


def flat(kind: Kind) -> Kind:
    """The kind of the same operand with a scale for every row."""
    return kind if ALL in kind else (*kind[:2], 1, kind[3])


def stored_kind(fmt: Format) -> Kind:
    """The kind of an operand that was quantized along its rows."""
    copy = fmt.copies[Orientation.ROWWISE]
    return kind_of(copy, copy.block)


def multiplies(spec: QuantSpec, capability: Capability | None) -> bool:
    """Whether GPUs of this capability have any product of operands that are quantized by `spec` along their rows."""
    kind = stored_kind(spec.format)
    return any(product.is_of(capability) for kinds, product in NATIVE.items() if kind in kinds or flat(kind) in kinds)
