"""Operands of GEMMs: quantizing an activation or a gradient, whole or as a shard, and gathering it.

Under tensor parallelism, activations are split over the ranks of a process group. Each rank then quantizes its shard
and gets the shard of the quantized whole, bit for bit. So gathering codes instead of values saves bytes and changes no
result.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from quantshard import kernel_dispatch, numerics, private_torch, sharding
from quantshard.collectives.flat_max import FlatMax
from quantshard.collectives.process_groups import Group
from quantshard.errors import ConfigurationError
from quantshard.formats import ALL, Orientation
from quantshard.kernel_dispatch import RandomWords
from quantshard.numerics import RandomBits
from quantshard.numerics.transforms import HADAMARD_SIGNS
from quantshard.recipe import QuantSpec, Recipe, TensorRole
from quantshard.recipe_table import SpecPair
from quantshard.sharding import Shard
from quantshard.tensor import storage as storages
from quantshard.tensor.storage import QuantizedStorage, scale_names

Operand = Tensor | QuantizedStorage
"""A matrix of a GEMM: in high precision, or quantized."""

RandomBitsFn = Callable[[Shard], RandomBits]
"""Returns the random words of a rectangle, by its global shape and origin."""


class OperandUsage(NamedTuple):
    """The uses of an input or output gradient: in its first GEMM (fprop or dgrad), in wgrad, and for a bias gradient.
    `num_transient`: how many of the two operands are dropped right after their GEMM, so that they may be values."""

    for_first_gemm: bool
    for_wgrad: bool
    sums: bool = False
    num_transient: int = 0


class OperandPlan:
    """How a layer's inputs or output gradients are quantized, without kernels or under tensor parallelism.

    Attributes:
        quantized, transposed: specs for the matrix and for its transpose; None if it is not quantized that way.
        shared: both GEMMs read the quantized matrix.
        by_one_amax: an input is quantized by its amax alone, which backward takes over from forward.
        products: the native products of the first GEMM and of wgrad, see `backend.find_product`.
    """

    on_kernels = False

    def __init__(self, recipe: Recipe, role: TensorRole, usage: OperandUsage) -> None:
        first, second = self.specs = recipe.activations[role]
        self.is_gradient, self.usage = role is TensorRole.GRAD_OUTPUT, usage
        self.shared = usage.for_wgrad and serves_both(first, second)
        self.quantized = first if usage.for_first_gemm or self.shared else None
        self.transposed = second if usage.for_wgrad and not self.shared else None
        self.by_one_amax = not self.is_gradient and scales_by_one_amax(self.specs) and needs_amax(*self.specs)
        self.products: tuple[list[Any], list[Any]] = [], []


LARGE: Final = 1 << 22
"""Elements from which an extra kernel launch is worth it if it saves memory: a pass over as many bytes of codes takes
a GPU a few microseconds, about as long as a launch takes the host."""


def is_large(x: Tensor) -> bool:
    """True if saving memory for x is worth an extra kernel launch."""
    return x.numel() >= LARGE


def scales_by_one_amax(specs: SpecPair) -> bool:
    """True if quantizing a matrix by these specs needs no statistic except the amax of the whole matrix."""
    return not any(
        spec.scaling.random_hadamard
        or not (spec.format.is_local or spec.format.copies[Orientation.ROWWISE].block == (ALL, ALL))
        for spec in specs
        if spec is not None
    )


def needs_amax(*specs: QuantSpec | None) -> bool:
    """True if one of these specs needs an amax before it quantizes: the matrix's own or a past one."""
    return any(spec is not None and not spec.format.is_local for spec in specs)


def whole_amax(values: Tensor, split: OperandSplit | None) -> Tensor:
    """The amax of a matrix, float32 scalar. A collective call if `values` is this rank's shard of a `split` matrix."""
    amax = kernel_dispatch.block_amax(values, (ALL, ALL))
    if split is not None:
        reduction = FlatMax()
        reduction.add(amax, split.group)
        reduction.reduce()
    return amax.view(())


def serves_both(first: QuantSpec | None, second: QuantSpec | None) -> bool:
    """True if both GEMMs can read one quantization: they have the same spec, with square blocks."""
    return first == second and first is not None and first.format.transposable


@dataclass(frozen=True)
class OperandSplit:
    """A matrix cut along `dim`, 0 or 1, into equal shards, one per rank of `group`; without a group it is not cut."""

    dim: int
    group: Group

    @property
    def size(self) -> int:
        return 1 if self.group is None else dist.get_world_size(self.group)

    @property
    def rank(self) -> int:
        return 0 if self.group is None else dist.get_rank(self.group)

    @property
    def transposed(self) -> OperandSplit:
        return OperandSplit(1 - self.dim, self.group)

    def shard(self, shape: tuple[int, int]) -> Shard:
        """The rectangle of this rank's shard, of shape [R, C], in the whole matrix."""
        if self.size == 1:
            return sharding.whole(shape)
        chunk = shape[self.dim]
        sizes = (chunk * self.size, shape[1]) if self.dim == 0 else (shape[0], chunk * self.size)
        return sharding.whole(sizes).piece(self.dim, self.rank * chunk, chunk)


_MIXED = len(HADAMARD_SIGNS)  # adjacent elements of a row that the Hadamard transform mixes


def quantize_operand(
    values: Tensor, spec: QuantSpec, *, amax: Tensor | None = None,
    words: Callable[[Shard], RandomWords] | None = None, split: OperandSplit | None = None,
) -> QuantizedStorage:  # fmt: skip
    """Quantize an activation or gradient [R, C] along its last dim.

    Args:
        values: [R, C], any floating dtype. If the spec has `random_hadamard`, values are transformed first, and C is
            padded to a multiple of 16.
        amax: a float32 scalar to scale by instead of the tensor's own amax (delayed scaling).
        words: returns the random words of the rectangle that this rank quantizes, with the same padding.
        split: `values` is this rank's shard of a matrix split in this way, with the same shape on every rank. The
            result is the shard of the quantized whole. A collective call, unless no block is shared or `amax` is given.
    """
    shape = (values.shape[0], values.shape[1])
    shard = operand_shard(shape, spec, split)
    if split is not None and not gathers_codes(spec, shape, split):
        multiple = _MIXED if spec.scaling.random_hadamard else 2
        raise ConfigurationError(f"{spec}: {split.size} shards {list(shape)} need a multiple of {multiple} columns")
    if spec.scaling.random_hadamard:
        values = numerics.hadamard16(values)
    bits = words(shard) if words is not None and spec.scaling.stochastic_rounding else None
    if shard.cut is None and not isinstance(bits, Tensor) and kernel_dispatch.quantizes(values, spec.format):
        parts = kernel_dispatch.quantize(values, spec.format, spec.scaling, bits, amax)
        return QuantizedStorage(spec, shard, parts)
    storage = storages.empty(spec, shard, values.device)
    storage.write(values, _amaxes(storage, values, amax, split), bits)
    return storage


def _amaxes(
    storage: QuantizedStorage, values: Tensor, amax: Tensor | None, split: OperandSplit | None
) -> dict[str, Tensor]:
    if amax is not None:
        (name,) = scale_names(storage.spec)
        return {name: amax.view(1, 1)}
    amaxes = storage.measure(values)
    if split is not None:
        reduction = FlatMax()
        for name, grid in amaxes.items():
            if storage.shard.shares_blocks(storage.spec.format.by_name[name]):
                reduction.add(grid, split.group)
        reduction.reduce()
    return amaxes


def operand_shard(shape: tuple[int, int], spec: QuantSpec, split: OperandSplit | None = None) -> Shard:
    """The rectangle that `quantize_operand` writes for values [R, C]; C is padded if the spec transforms rows."""
    padded = (shape[0], shape[1] + (-shape[1] % _MIXED if spec.scaling.random_hadamard else 0))
    return sharding.whole(padded) if split is None else split.shard(padded)


def gathers_codes(spec: QuantSpec, shape: tuple[int, int], split: OperandSplit) -> bool:
    """True if shards of `shape` [R, C] can be quantized separately and gathered codes equal the quantized whole.
    This fails if the cut crosses 16 elements that a Hadamard transform mixes, or two 4-bit codes in a byte."""
    if split.size == 1:
        return True
    shard = split.shard(shape)
    mixes = spec.scaling.random_hadamard and split.dim == 1 and shape[1] % _MIXED != 0
    return not mixes and all(shard.gathers(copy.codes) for copy in spec.format.copies.values())


def gather(operand: Operand, split: OperandSplit) -> Any:
    """Gather the whole matrix from shards of values [R, C] or of a quantized operand. One collective call."""
    if split.size == 1:
        return operand
    if isinstance(operand, Tensor):
        return _all_gather([operand], split)[0]
    storage, shard = operand, operand.shard
    assert shard.cut is not None and shard.cut.dim == split.dim, (shard, split.dim)
    by_name = storage.spec.format.by_name
    sent = [name for name in storage.components if shard.gathers(by_name[name])]
    wholes = _all_gather([storage.components[name] for name in sent], split)
    components = storage.components | dict(zip(sent, wholes, strict=True))
    return QuantizedStorage(storage.spec, shard.before_cut(), components)


def _all_gather(pieces: list[Tensor], split: OperandSplit) -> list[Tensor]:
    """Gather several matrices with one collective of their bytes, or without one if they have no bytes."""
    parts = [piece.reshape(-1).view(torch.uint8) for piece in pieces]
    sent = torch.cat(parts) if len(parts) > 1 else parts[0]
    flat = sent.new_empty(split.size * sent.numel())
    if sent.numel() > 0:
        private_torch.all_gather_single(flat, sent, group=split.group)
    received = flat.view(split.size, sent.numel()).split([part.numel() for part in parts], dim=1)
    return [_joined(of_ranks, piece, split.dim) for of_ranks, piece in zip(received, pieces, strict=True)]


def _joined(received: Tensor, piece: Tensor, dim: int) -> Tensor:
    """Bytes [ranks, bytes of a shard] -> the whole, contiguous, of the dtype of `piece`."""
    rows, cols = piece.shape
    by_rank = received.unflatten(1, (rows, cols * piece.itemsize))
    flat = (by_rank if dim == 0 else by_rank.transpose(0, 1)).reshape(-1).view(piece.dtype)
    ranks = received.shape[0]
    return flat.view(rows * ranks, cols) if dim == 0 else flat.view(rows, cols * ranks)
