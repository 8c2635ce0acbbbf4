"""Operands of GEMMs: how an activation or a gradient is quantized, whole or in pieces, and gathered.

An operand may be split over the ranks of a process group, as activations are under tensor parallelism. Each rank then
quantizes its piece, and gets the piece of what quantizing the whole gives, bit for bit; so gathering codes in place of
values saves bytes and changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, NamedTuple

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
from quantshard.numerics.hadamard import HADAMARD_SIGNS
from quantshard.recipe import CellPair, QuantSpec
from quantshard.sharding import Shard
from quantshard.tensor import storage as storages
from quantshard.tensor.storage import QuantizedStorage, scale_names

Operand = Tensor | QuantizedStorage
"""A matrix of a GEMM: in high precision, or quantized."""

RandomBitsFn = Callable[[Shard], RandomBits]
"""Gives the random words of a rectangle, by its global shape and origin."""


class OperandUsage(NamedTuple):
    """What is wanted of an input or output gradient: an operand of its first GEMM, one of wgrad, and of a gradient its
    sum over tokens and a poison.

    `passing`: the operands that nobody keeps, neither, the first or both. A kernel may give their values in place of
    codes.
    """

    first: bool
    second: bool
    sums: bool = False
    nan_flag: bool = False
    passing: int = 0


operand_usage = lru_cache(OperandUsage)
"""It is one of few."""


def quantized_cells(
    first: QuantSpec | None, second: QuantSpec | None, wanted: OperandUsage
) -> tuple[QuantSpec | None, QuantSpec | None, bool]:
    """By which cells a matrix is quantized, and its transpose, for two GEMMs, of `first` and `second`; and whether both
    read the first quantization."""
    shared = wanted.second and serves_both(first, second)
    return first if wanted.first or shared else None, second if wanted.second and not shared else None, shared


LARGE: Final = 1 << 22
"""Elements from which on a matrix is worth a launch more, if less of it is kept: its codes are as many bytes, and a
pass over them takes a GPU a few microseconds, about as long as a launch takes the host."""


def is_large(x: Tensor) -> bool:
    """True if memory counts more than the host's time where a matrix is made again, or apart from others."""
    return x.numel() >= LARGE


@lru_cache
def scales_by_one_amax(cells: CellPair) -> bool:
    """True if nothing but the amax of a whole matrix need be known of it before it is quantized by these cells."""
    blocks = [
        cell.format.copies[Orientation.ROWWISE].block for cell in cells if cell is not None and not cell.format.is_local
    ]
    plain = not any(cell is not None and cell.scaling.random_hadamard for cell in cells)
    return plain and all(block == (ALL, ALL) for block in blocks)


def needs_amax(*cells: QuantSpec | None) -> bool:
    """True if an amax must be known before values are quantized by these cells: theirs, or under delayed scaling one of
    the past."""
    return any(cell is not None and not cell.format.is_local for cell in cells)


def whole_amax(values: Tensor, split: OperandSplit | None) -> Tensor:
    """The amax of a matrix, float32 scalar, of which this rank has all or a piece. A collective call if it is split."""
    found = kernel_dispatch.block_amax(values, (ALL, ALL))
    if split is not None:
        reduction = FlatMax()
        reduction.add(found, split.group)
        reduction.reduce()
    return found.view(())


def serves_both(first: QuantSpec | None, second: QuantSpec | None) -> bool:
    """True if one quantization can be read in both GEMMs: by the same cell, of square blocks."""
    return first == second and first is not None and first.format.transposable


@dataclass(frozen=True)
class OperandSplit:
    """A matrix that is cut along `dim`, 0 or 1, into equal pieces, one for each rank of `group` in the group's order.

    Without a group, or with a group of one rank, this rank has all of it, and nothing communicates.
    """

    dim: int
    group: Group

    @property
    def size(self) -> int:
        """Number of pieces."""
        return 1 if self.group is None else dist.get_world_size(self.group)

    @property
    def rank(self) -> int:
        """Which piece this rank holds."""
        return 0 if self.group is None else dist.get_rank(self.group)

    @property
    def transposed(self) -> OperandSplit:
        """How the transposed matrix is split."""
        return OperandSplit(1 - self.dim, self.group)

    def shard(self, shape: tuple[int, int]) -> Shard:
        """Where this rank's piece, of shape [R, C], lies in the whole."""
        if self.size == 1:
            return sharding.whole(shape)
        chunk = shape[self.dim]
        sizes = (chunk * self.size, shape[1]) if self.dim == 0 else (shape[0], chunk * self.size)
        return sharding.whole(sizes).piece(self.dim, self.rank * chunk, chunk)


_MIXED = len(HADAMARD_SIGNS)  # elements of a row that the Hadamard transform mixes


def quantize_operand(
    values: Tensor,
    cell: QuantSpec,
    *,
    amax: Tensor | None = None,
    words: RandomWords | None = None,
    split: OperandSplit | None = None,
) -> QuantizedStorage:
    """Quantize an activation or gradient [R, C] along its last dim.

    With `split` it is a collective call: the amaxes of blocks that ranks share, those of the whole tensor too, are
    reduced in one collective; there is none if no block is shared or `amax` is given.

    Args:
        values: [R, C], any floating dtype. With the cell's `random_hadamard` it is transformed first, and C is padded
            to a multiple of 16.
        amax: a float32 scalar to scale by instead of the tensor's own amax (delayed scaling).
        words: random words for stochastic rounding, of [R, C] (padded likewise).
        split: `values` is this rank's piece of a matrix that is split so; of the same shape on every rank. The result
            is the piece of the quantized whole, and `words` are those of the piece (see `operand_shard`).

    Raises:
        ConfigurationError: on every rank, if pieces of this shape cannot be quantized apart; see `gathers_codes`.
    """
    shape = (values.shape[0], values.shape[1])
    shard = operand_shard(shape, cell, split)
    if split is not None and not gathers_codes(cell, shape, split):
        raise ConfigurationError(_inseparable(cell, shape, split))
    if cell.scaling.random_hadamard:
        values = numerics.hadamard16(values)
    storage = storages.empty(cell, shard, values.device)
    alone = amax is None and not any(shard.shares_blocks(part) for part in cell.format.components)
    if alone and shard.cut is None and kernel_dispatch.sees_blocks(values, cell.format, words):
        assert not isinstance(words, Tensor)
        storage.write_whole(values, words)
    else:
        storage.write(values, _amaxes(storage, values, amax, split), words)
    return storage


def _amaxes(
    storage: QuantizedStorage, values: Tensor, amax: Tensor | None, split: OperandSplit | None
) -> dict[str, Tensor]:
    if amax is not None:
        (name,) = scale_names(storage.cell)
        return {name: amax.view(1, 1)}
    amaxes = storage.measure(values)
    if split is not None:
        reduction = FlatMax()
        for name, grid in amaxes.items():
            if storage.shard.shares_blocks(storage.cell.format.by_name[name]):
                reduction.add(grid, split.group)
        reduction.reduce()
    return amaxes


def operand_shard(shape: tuple[int, int], cell: QuantSpec, split: OperandSplit | None = None) -> Shard:
    """The rectangle that `quantize_operand` writes for values of `shape` [R, C]: C is padded where the cell transforms
    it."""
    padded = (shape[0], shape[1] + (-shape[1] % _MIXED if cell.scaling.random_hadamard else 0))
    return sharding.whole(padded) if split is None else split.shard(padded)


def gathers_codes(cell: QuantSpec, shape: tuple[int, int], split: OperandSplit) -> bool:
    """True if pieces of `shape` [R, C] can be quantized apart, and gathering their codes gives the quantized whole.

    They cannot where the cut crosses something finer than a scale block: 16 elements that a Hadamard transform mixes,
    or two codes of 4 bits that share a byte. Every rank gives the same answer.
    """
    if split.size == 1:
        return True
    shard = split.shard(shape)
    mixes = cell.scaling.random_hadamard and split.dim == 1 and shape[1] % _MIXED != 0
    return not mixes and all(shard.gathers(copy.codes) for copy in cell.format.copies.values())


def _inseparable(cell: QuantSpec, shape: tuple[int, int], split: OperandSplit) -> str:
    together = _MIXED if cell.scaling.random_hadamard else 2
    why = "are transformed together" if cell.scaling.random_hadamard else "share a byte"
    return (
        f"pieces [{shape[0]}, {shape[1]}] of a matrix that is cut along its columns over {split.size} ranks cannot be "
        f"quantized apart to {cell}, where {together} elements of a row {why}; make the {shape[1]} columns a multiple "
        f"of {together}, or gather the values first, as quantize_and_gather does"
    )


def quantize_and_gather(
    values: Tensor,
    cell: QuantSpec,
    split: OperandSplit,
    *,
    amax: Tensor | None = None,
    words: RandomBitsFn | None = None,
) -> QuantizedStorage:
    """Quantize a matrix of which this rank has the piece `values` [R, C], and return the whole. A collective call.

    Codes are sent where that gives the same bits as sending values, else values (`gathers_codes`).

    Args:
        values, amax, split: as in `quantize_operand`.
        words: gives the random words of the rectangle that is quantized here, the piece or the whole; asked only if
            the cell rounds stochastically.
    """
    rounds = words if cell.scaling.stochastic_rounding else None
    here: OperandSplit | None = split
    if not gathers_codes(cell, (values.shape[0], values.shape[1]), split):
        values, here = gather_values(values, split), None
    drawn = None if rounds is None else rounds(operand_shard((values.shape[0], values.shape[1]), cell, here))
    storage = quantize_operand(values, cell, amax=amax, words=drawn, split=here)
    return storage if here is None else gather(storage, here)


def gather(storage: QuantizedStorage, split: OperandSplit) -> QuantizedStorage:
    """The whole of a matrix of which each rank has the piece that `quantize_operand` gave for `split`. A collective
    call.

    One all-gather carries the codes and those scales that the cut parts; the others are whole already.
    """
    if split.size == 1:
        return storage
    shard = storage.shard
    assert shard.cut is not None and shard.cut.dim == split.dim, (shard, split.dim)
    by_name = storage.cell.format.by_name
    sent = [name for name in storage.components if shard.gathers(by_name[name])]
    wholes = _all_gather([storage.components[name] for name in sent], split)
    components = storage.components | dict(zip(sent, wholes, strict=True))
    return QuantizedStorage(storage.cell, shard.before_cut(), components)


def gather_values(values: Tensor, split: OperandSplit) -> Tensor:
    """The whole of a matrix of which each rank has a piece [R, C] of any dtype. A collective call, not differentiable.

    It is contiguous, unless it is `values` itself, where that is the whole.
    """
    return values if split.size == 1 else _all_gather([values], split)[0]


def _all_gather(pieces: list[Tensor], split: OperandSplit) -> list[Tensor]:
    """The wholes of several matrices, from one collective of their bytes; none if they have no bytes."""
    parts = [piece.reshape(-1).view(torch.uint8) for piece in pieces]
    sent = torch.cat(parts) if len(parts) > 1 else parts[0]
    flat = sent.new_empty(split.size * sent.numel())
    if sent.numel() > 0:
        private_torch.all_gather_single(flat, sent, group=split.group)
    received = flat.view(split.size, sent.numel()).split([part.numel() for part in parts], dim=1)
    return [_joined(of_ranks, piece, split.dim) for of_ranks, piece in zip(received, pieces, strict=True)]


def _joined(received: Tensor, piece: Tensor, dim: int) -> Tensor:
    """Bytes [ranks, bytes of a piece] -> the whole, contiguous, of the dtype of `piece`."""
    rows, cols = piece.shape
    by_rank = received.unflatten(1, (rows, cols * piece.itemsize))
    flat = (by_rank if dim == 0 else by_rank.transpose(0, 1)).reshape(-1).view(piece.dtype)
    ranks = received.shape[0]
    return flat.view(rows * ranks, cols) if dim == 0 else flat.view(rows, cols * ranks)
