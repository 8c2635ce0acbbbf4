"""The table of number formats: each format is one row of data.

A row lists the components that are stored for a 2-D tensor. `block_shape` gives, for each component, how many logical
elements of each dim one stored entry covers. Everything structural is arithmetic over `block_shape`: component shapes,
how to cut a shard, what to gather, where amaxes are reduced, bytes per element and checkpoint keys. To add a format,
add one call of `_row` at the end of this file.

Sources of the element encodings: OCP 8-bit Floating Point Specification (E4M3, E5M2), OCP Microscaling Formats v1.0
(E2M1, E8M0), IEEE 754 (FP16, FP32). UE5M3 is E4M3 with an exponent bit in place of the sign: all ones is NaN, and there
is no infinity.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cache, cached_property
from typing import Final

import torch

ALL: Final = 1 << 62
"""A block size that covers a whole dim. It is larger than any dim, so grid arithmetic needs no special case for it."""

FORMAT_NAME_BYTES: Final = 14
"""Maximum length of a format name in a checkpoint."""


@dataclass(frozen=True, slots=True)
class Encoding:
    """How the bits of one stored entry map to a number.

    max: the largest finite value.
    storage: dtype of the tensor that holds the values. FP8 and E8M0 are stored as uint8, because gloo cannot gather
        float8. E2M1 packs two values into a byte, the element of lower index in the low nibble.
    native: the torch dtype with the same bits, or None.
    """

    name: str
    bits: int
    exponent_bits: int
    mantissa_bits: int
    bias: int
    max: float
    storage: torch.dtype
    native: torch.dtype | None

    @property
    def is_signed(self) -> bool:
        """Whether the encoding has negative values. If not, negative inputs become zero."""
        return self.bits > self.exponent_bits + self.mantissa_bits

    @property
    def magnitude(self) -> int:
        """Mask of all bits of a code except the sign; as a code it is NaN, if there is a NaN and no infinity."""
        return (1 << (self.bits - self.is_signed)) - 1

    @property
    def gemm_dtype(self) -> torch.dtype:
        """The dtype that PyTorch's scaled matrix products expect."""
        return torch.float4_e2m1fn_x2 if self.native is None else self.native

    @property
    def relative_min(self) -> float:
        """Ratio of the smallest positive value to the largest: the range of values under one scale."""
        return 2.0 ** (1 - self.bias - self.mantissa_bits) / self.max

    @property
    def extended(self) -> Encoding:
        """The 16-bit encoding whose rounded high byte is a code of this 8-bit one (`numerics.split_codes.split`)."""
        assert self.bits == 8 and self.mantissa_bits > 0 and self.is_signed, self
        mantissa, top = self.mantissa_bits, math.frexp(self.max)[1] - 1
        largest = self.max + (127 / 256) * 2.0 ** (top - mantissa)
        name = f"E{self.exponent_bits}M{mantissa + 8}"
        return Encoding(name, 16, self.exponent_bits, mantissa + 8, self.bias, largest, torch.int16, None)


E4M3: Final = Encoding("E4M3", 8, 4, 3, 7, 448.0, torch.uint8, torch.float8_e4m3fn)
E5M2: Final = Encoding("E5M2", 8, 5, 2, 15, 57344.0, torch.uint8, torch.float8_e5m2)
UE5M3: Final = Encoding("UE5M3", 8, 5, 3, 15, 114688.0, torch.uint8, None)
E2M1: Final = Encoding("E2M1", 4, 2, 1, 1, 6.0, torch.uint8, None)
E8M0: Final = Encoding("E8M0", 8, 8, 0, 127, 2.0**127, torch.uint8, torch.float8_e8m0fnu)
FP16: Final = Encoding("FP16", 16, 5, 10, 15, 65504.0, torch.float16, torch.float16)
FP32: Final = Encoding("FP32", 32, 8, 23, 127, torch.finfo(torch.float32).max, torch.float32, torch.float32)


class Orientation(str, Enum):
    """The dim along which a quantized copy of the tensor is quantized: its rows or its columns."""

    ROWWISE = "rowwise"
    COLUMNWISE = "columnwise"


class Role(str, Enum):
    """The purpose of a component."""

    CODES = "codes"
    SCALE = "scale"  # multiplies the decoded codes
    AMAX = "amax"  # amax that determines the second, coarser scale


@dataclass(frozen=True, slots=True)
class Component:
    """One stored tensor of a format. Each entry covers `block_shape` logical elements of (dim 0, dim 1)."""

    name: str
    copy: Orientation
    role: Role
    encoding: Encoding
    block_shape: tuple[int, int]
    key_suffix: str = field(init=False, repr=False, compare=False)
    """Suffix that turns a weight's name into the state-dict key of this component."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "key_suffix", "" if self.name == "codes" else f"_{self.name}")


@dataclass(frozen=True, eq=False)  # compared by identity: plans of kernels are looked up by it
class OrientedCodes:
    """The components of one copy of a format: codes, their scale, and the amax of the second scale, if any."""

    codes: Component
    scale: Component
    amax: Component | None

    @property
    def block(self) -> tuple[int, int]:
        """Rows and columns of one scale block."""
        return self.scale.block_shape

    @property
    def is_per_tensor(self) -> bool:
        """Whether one scale belongs to a whole matrix, also in a stack of matrices."""
        return self.scale.block_shape[0] != 1 and self.scale.block_shape[1] == ALL

    @cached_property
    def by_rows(self) -> OrientedCodes:
        """The same codes with a scale for each row, as kernels read a stack with a scale for each matrix."""
        return replace(self, scale=replace(self.scale, block_shape=(1, ALL)))


@dataclass(frozen=True)
class Format:
    """A number format: a named row of components. Formats of one name and `matrix_rows` are equal.

    `matrix_rows`: 0, or for a stack of matrices [matrices, rows, columns], their rows. A stack is stored as one matrix
    of all rows, in which a block of `ALL` rows ends with its matrix (`stacked`).
    """

    name: str
    components: tuple[Component, ...] = field(compare=False)
    matrix_rows: int = 0

    def __hash__(self) -> int:
        """Hash the name only, which is unique: every GEMM looks up the formats of its operands."""
        return hash(self.name)

    @cached_property
    def by_name(self) -> dict[str, Component]:
        return {component.name: component for component in self.components}

    @cached_property
    def copies(self) -> dict[Orientation, OrientedCodes]:
        """The copies that the format stores. Every format has a rowwise one."""
        amax = next((c for c in self.components if c.role is Role.AMAX), None)
        copies = {}
        for orientation in Orientation:
            parts = {c.role: c for c in self.components if c.copy is orientation and c.role is not Role.AMAX}
            if parts:
                copies[orientation] = OrientedCodes(parts[Role.CODES], parts[Role.SCALE], amax)
        return copies

    @cached_property
    def transposable(self) -> bool:
        """True if transposing the one copy gives the quantized transpose, that is, if blocks are square."""
        rows, cols = self.copies[Orientation.ROWWISE].block
        return len(self.copies) == 1 and rows == cols

    @cached_property
    def serves_columns(self) -> bool:
        """True if products that sum along columns can read the codes: square blocks, or a columnwise copy."""
        return self.transposable or Orientation.COLUMNWISE in self.copies

    @cached_property
    def is_narrow(self) -> bool:
        """True if the format has one copy, of codes of at most 8 bits. Kernels quantize activations to such formats."""
        return len(self.copies) == 1 and self.copies[Orientation.ROWWISE].codes.encoding.bits <= 8

    @cached_property
    def is_local(self) -> bool:
        """True if the scales of the rowwise copy depend only on the values of a bounded block."""
        copy = self.copies[Orientation.ROWWISE]
        return ALL not in copy.block and copy.amax is None

    @cached_property
    def bytes_per_element(self) -> float:
        """Stored bytes per logical element of a large tensor, scales included."""
        per_entry = (c.encoding.storage.itemsize / (c.block_shape[0] * c.block_shape[1]) for c in self.components)
        return float(sum(per_entry))

    @property
    def of_matrix(self) -> Format:
        """The format of each matrix of a stack; of other tensors, the format itself."""
        return FORMATS[self.name] if self.matrix_rows else self

    def fits_stack(self, rows: int) -> bool:
        """Return whether no block would cross from one matrix of a stack, of `rows` rows each, into the next."""
        heights = {component.block_shape[0] for component in self.components}
        return all(height == ALL or rows % height == 0 for height in heights)


FORMATS: Final[dict[str, Format]] = {}
"""The table: every format by name."""


def _row(
    name: str, element: Encoding, scale: Encoding, *blocks: tuple[int, int], amax: bool = False,
    scale_name: str = "scale_inv",
) -> Format:  # fmt: skip
    assert len(name) <= FORMAT_NAME_BYTES, name
    # Codes are packed along dim 1, so that dim 0 can be cut anywhere.
    packed, parts = max(1, 8 // element.bits), []
    for which, block in zip(Orientation, blocks, strict=False):
        codes_name, prefix = ("codes", "") if which is Orientation.ROWWISE else (which.value, f"{which.value}_")
        parts.append(Component(codes_name, which, Role.CODES, element, (1, packed)))
        parts.append(Component(prefix + scale_name, which, Role.SCALE, scale, block))
    if amax:
        parts.append(Component("amax", Orientation.ROWWISE, Role.AMAX, FP32, (ALL, ALL)))
    row = FORMATS[name] = Format(name, tuple(parts))
    return row


@cache  # kernels look up plans by the identity of `OrientedCodes`
def stacked(fmt: Format, rows: int) -> Format:
    """Return the format of a stack of matrices with `rows` rows each, stored one below the other."""
    assert fmt.fits_stack(rows), (fmt.name, rows)
    parts = (replace(c, block_shape=(min(c.block_shape[0], rows), c.block_shape[1])) for c in fmt.components)
    return Format(fmt.name, tuple(parts), rows)


FP8_E4M3: Final = _row("fp8_e4m3", E4M3, FP32, (ALL, ALL))
FP8_E5M2: Final = _row("fp8_e5m2", E5M2, FP32, (ALL, ALL))
FP8_128X128: Final = _row("fp8_128x128", E4M3, FP32, (128, 128))
FP8_1XROW: Final = _row("fp8_1xrow", E4M3, FP32, (1, ALL))
FP8_1X128: Final = _row("fp8_1x128", E4M3, FP32, (1, 128))
FP16_1X128: Final = _row("fp16_1x128", FP16, FP32, (1, 128))
UE5M3_1X128: Final = _row("ue5m3_1x128", UE5M3, E8M0, (1, 128), scale_name="scale_e8m0")  # unlike other 8-bit states

# An E8M0 scale is the smallest power of two for which no amax saturates: TransformerEngine's rule for MXFP8, torchao's
# RCEIL, not the simplest rule of the OCP specification, floor(log2(amax)) minus the exponent of the largest code.
MXFP8_1X32: Final = _row("mxfp8_1x32", E4M3, E8M0, (1, 32))
MXFP8_32X1: Final = _row("mxfp8_32x1", E4M3, E8M0, (32, 1))
MXFP8_32X32: Final = _row("mxfp8_32x32", E4M3, E8M0, (32, 32))
MXFP8_BOTH: Final = _row("mxfp8_both", E4M3, E8M0, (1, 32), (32, 1))
MXFP4_1X32: Final = _row("mxfp4_1x32", E2M1, E8M0, (1, 32))
MXFP4_32X32: Final = _row("mxfp4_32x32", E2M1, E8M0, (32, 32))

NVFP4_1X16: Final = _row("nvfp4_1x16", E2M1, E4M3, (1, 16), amax=True)
NVFP4_16X16: Final = _row("nvfp4_16x16", E2M1, E4M3, (16, 16), amax=True)
NVFP4_BOTH: Final = _row("nvfp4_both", E2M1, E4M3, (1, 16), (16, 1), amax=True)


@dataclass(frozen=True, slots=True)
class Scaling:
    """How scales are chosen and values rounded when a tensor is quantized to a format.

    power_of_two: round the scale down to a power of two.
    margin: under delayed scaling, divide the scale by 2**margin.
    epsilon: the smallest amax.
    history: number of past amaxes that the scale is computed from. 0: the amax of the tensor itself ("current"
        scaling).
    most_recent: use the newest amax of the history instead of the maximum.
    stochastic_rounding: round stochastically, as in NVFP4 training.
    random_hadamard: apply the 16-point Hadamard transform along the quantized dim, as in NVFP4 training.
    """

    power_of_two: bool = False
    margin: int = 0
    epsilon: float = 0.0
    history: int = 0
    most_recent: bool = False
    stochastic_rounding: bool = False
    random_hadamard: bool = False
