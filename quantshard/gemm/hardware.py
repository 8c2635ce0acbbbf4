"""Hardware support: PyTorch's scaled matrix products, the GPUs that have them, and the layouts of their scales."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Final, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from quantshard import kernel_dispatch, kernels, numerics
from quantshard.formats import ALL, E2M1, E4M3, E5M2, E8M0, FP32, Format, Orientation, OrientedCodes
from quantshard.recipe import OPERANDS, Gemm, QuantSpec, Recipe, TensorRole
from quantshard.tensor.storage import QuantizedStorage

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

    `since`, `before`: compute capabilities. `seen`: a GPU on which the product was tested, or None. `rows`: the left
    operand's row count must be a multiple of it. `fast`: whether it can sum in the tensor cores alone; see
    `recipe.MMParams`.
    """

    left: ScaleLayout
    right: ScaleLayout
    since: Capability
    before: Capability = NEVER
    seen: str | None = None
    rows: int = 1
    fast: bool = False

    def is_on(self, device: torch.device) -> bool:
        """Whether the device has the product."""
        return self.is_of(capability_of(device))

    def is_of(self, capability: Capability | None) -> bool:
        """Whether devices of a compute capability have the product."""
        return capability is not None and self.since <= capability < self.before

    @property
    def needs(self) -> str:
        """The compute capabilities that have the product, in words."""
        return dotted(self.since) + (f" up to {dotted(self.before)}" if self.before < NEVER else " and newer")


META_CAPABILITY: Capability | None = None
"""Compute capability of the GPU that the meta device stands for (`described_gpu`), or None."""


@cache
def capability_of(device: torch.device) -> Capability | None:
    """The compute capability of an NVIDIA GPU. None for other devices, and for a GPU that this machine lacks."""
    if device.type == "meta":
        return META_CAPABILITY
    has_one = device.type == "cuda" and torch.cuda.is_available() and torch.version.hip is None  # AMD's are "cuda" too
    return torch.cuda.get_device_capability(device) if has_one else None


def dotted(capability: Capability) -> str:
    """A compute capability in words."""
    return ".".join(map(str, capability))


# Layouts of scales ---------------------------------------------------------------------------------------------------


def as_single(grid: Tensor) -> Tensor:
    """A single scale, which PyTorch accepts in any shape."""
    return grid


def strided(grid: Tensor, strides: tuple[int, int]) -> Tensor:
    """A grid with exactly these strides, given that its memory already has them.

    `contiguous` may leave a dim of one entry with any stride, and PyTorch's scaled products check that stride too.
    """
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


def as_e8m0(grid: Tensor) -> Tensor:
    """`numerics.swizzled` bytes as PyTorch's E8M0."""
    return numerics.swizzled(grid).view(torch.float8_e8m0fnu)


def as_e4m3(grid: Tensor) -> Tensor:
    """`numerics.swizzled` bytes as PyTorch's E4M3."""
    return numerics.swizzled(grid).view(torch.float8_e4m3fn)


# The table -----------------------------------------------------------------------------------------------------------


def _layout(
    layout: Callable[[Tensor], Tensor], *recipes: F.ScalingType, swizzle: tuple[F.SwizzleType, ...] = ()
) -> ScaleLayout:
    return ScaleLayout(tuple(int(item.value) for item in recipes), layout, tuple(int(item.value) for item in swizzle))


_TYPES, _SWIZZLE = F.ScalingType, F.SwizzleType
_WHOLE = _layout(as_single, _TYPES.TensorWise)
_ROW, _ROW_RIGHT = _layout(by_rows, _TYPES.RowWise), _layout(by_rows_right, _TYPES.RowWise)
_VECTOR, _SQUARE = _layout(by_columns, _TYPES.BlockWise1x128), _layout(by_four, _TYPES.BlockWise128x128)
_MX = _layout(as_e8m0, _TYPES.BlockWise1x32, swizzle=(_SWIZZLE.SWIZZLE_32_4_4,))
_NV = _layout(as_e4m3, _TYPES.BlockWise1x16, _TYPES.TensorWise, swizzle=(_SWIZZLE.SWIZZLE_32_4_4, _SWIZZLE.NO_SWIZZLE))

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


def product_of_formats(left: Format, right: Format) -> ScaledProduct | None:
    """The scaled product of operands quantized along their rows, on any hardware, or None."""
    return product_of_kinds(stored_kind(left), stored_kind(right))


def products_of(spec: QuantSpec) -> list[ScaledProduct]:
    """The scaled products that accept a weight as right operand, on any hardware."""
    kind = stored_kind(spec.format)
    products = [product for (_, right), product in NATIVE.items() if right in (kind, flat(kind))]
    return list(dict.fromkeys(products))


# Predictions ---------------------------------------------------------------------------------------------------------


def fallbacks(stored: QuantizedStorage | None, recipe: Recipe | None, device: torch.device) -> tuple[str, ...]:
    """The `limits.FALLBACKS` that the GEMMs of one linear layer take.

    `stored`: the weight; None if it is stored in high precision. `recipe`: autocast's recipe; None if it is unknown,
    which assumes one that fits the weight.
    """
    if recipe is not None and not recipe.table:
        return () if stored is None else ("dequantized",)
    spec = stored.spec if stored is not None else recipe.weight if recipe is not None else None
    names = ["emulated"] if gemm_path(spec, device, recipe)[0] == "emulated" else []
    if spec is not None and device.type in kernel_dispatch.KERNEL_DEVICES and not kernels.USABLE:
        names.append("no kernels")
    if stored is None:
        return (*names, "quantized each forward") if spec is not None else ()
    fmt = stored.spec.format
    if not fmt.serves_columns:
        names.append("dgrad dequantizes")
    # FSDP2's shards are gathered before a GEMM, so only cuts by tensor parallelism matter
    is_operand = stored.gathered or stored.mesh is not None
    blocks = zip(stored.shard.origin, fmt.copies[Orientation.ROWWISE].block, strict=True)
    starts_on_blocks = all(cover == ALL or start % cover == 0 for start, cover in blocks)
    if is_operand and "emulated" not in names and not starts_on_blocks:
        names.append("cut blocks")
    if stored.gathered and not stored.has(Orientation.ROWWISE):
        names.append("extra gather")
    return tuple(names)


@lru_cache(maxsize=256)
def emulated_gemms(recipe: Recipe, capability: Capability) -> tuple[Gemm, ...]:
    """GEMMs without a native product of their two quantized formats on this hardware.

    Dgrad with a weight that has one copy along its rows is not listed: it is another fallback ("dgrad dequantizes").
    """
    gemms = []
    for gemm, roles in OPERANDS.items():
        left_spec, right_spec = (recipe.table.get((role, gemm)) for role in roles)
        if left_spec is None or right_spec is None or (gemm is Gemm.DGRAD and not right_spec.format.serves_columns):
            continue
        product = product_of_formats(left_spec.format, right_spec.format)
        if product is None or not product.is_of(capability):
            gemms.append(gemm)
    return tuple(gemms)


def gemm_path(spec: QuantSpec | None, device: torch.device, recipe: Recipe | None = None) -> tuple[str, str]:
    """How a weight's GEMMs run on a device, and why: ("native" or "emulated", reason).

    If `recipe` is given and stores such weights, "native" means that all of its products are native.
    """
    if spec is None:
        return "native", "high precision"
    name = spec.format.copies[Orientation.ROWWISE].codes.encoding.name
    capability = capability_of(device)
    if capability is None:
        where = "a CPU has" if device.type == "cpu" else f"{device.type}, where there is one: quantshard knows"
        return "emulated", f"{where} no {name} matrix product"
    version, products = dotted(capability), products_of(spec)
    for native in products:
        if native.is_on(device):
            emulated = () if recipe is None or recipe.weight != spec else emulated_gemms(recipe, capability)
            if emulated:
                names = " and ".join(gemm.value for gemm in emulated)
                return "emulated", f"compute capability {version} has no product of the formats of {names}"
            note = "" if native.seen else ", not yet run on this hardware"
            return "native", f"{name} matrix product of compute capability {version}{note}"
    with_scales = f"{name} matrix product with the scales of {spec.format.name}"
    if not products:
        return "emulated", f"PyTorch has no {with_scales}"
    needs = ", ".join(native.needs for native in products)
    return "emulated", f"compute capability {version} has no {with_scales} (such products: {needs})"


# Many experts at once ------------------------------------------------------------------------------------------------

LARGEST_GROUPED: Final = 1 << 35
"""Most multiplications in the fprop of an expert, averaged over experts, for which experts run in one kernel.

Beyond this, PyTorch's FP8 products save more time (1200 TFLOP/s instead of 350) than their launches cost: on an H200
and its host more than a millisecond per expert and step (benchmarks/experts.py).
"""


def block_together(recipe: Recipe) -> int | None:
    """Number of elements along the summed dim under one scale, if a recipe lets one kernel multiply all experts.

    It is 0 if each expert's input, weight and gradient has one scale. It is None if experts must run one at a time:
    only recipes with one 8-bit format per role, rounded to nearest in all GEMMs, qualify. These have one scale per
    tensor, or square blocks of 32 or 128 in weights and as many elements of a row in activations and gradients.
    """
    if any((role, gemm) not in recipe.table for gemm, roles in OPERANDS.items() for role in roles):
        return None  # an operand stays in high precision
    specs_by_role = [
        {spec for (role, _), spec in recipe.table.items() if role is tensor_role} for tensor_role in TensorRole
    ]
    if any(len(specs) != 1 or not _is_plain(*specs) for specs in specs_by_role):
        return None
    weight, *activation_blocks = (
        (*spec.format.copies[Orientation.ROWWISE].block, bool(spec.scaling.history)) for (spec,) in specs_by_role
    )
    if {weight[:2], *(blocks[:2] for blocks in activation_blocks)} == {(ALL, ALL)}:
        return 0
    block = weight[0]
    fits = block in (32, 128) and weight == (block, block, False) and set(activation_blocks) == {(1, block, False)}
    return block if fits else None


def _is_plain(spec: QuantSpec) -> bool:
    scaling, copies = spec.scaling, spec.format.copies
    nearest = not (scaling.stochastic_rounding or scaling.random_hadamard)
    return nearest and len(copies) == 1 and copies[Orientation.ROWWISE].codes.encoding in (E4M3, E5M2)


def is_faster_together(rows: int, experts: int, shape: tuple[int, int]) -> bool:
    """Whether one kernel multiplies `rows` rows of `experts` experts with weights of `shape` faster than a product per
    expert.

    Kernels index the elements of a weight in 32 bits, so larger weights return False.
    """
    return experts > 1 and rows * shape[0] * shape[1] <= experts * LARGEST_GROUPED and shape[0] * shape[1] < 1 << 31
