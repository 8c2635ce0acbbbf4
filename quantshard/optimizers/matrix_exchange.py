"""Matrices that ranks hold in parts, brought together whole: each on one rank, its owner, and back in parts.

An update that needs a whole matrix has the same bits on any mesh only if it is computed from the whole matrix, since
the bits of a matrix product depend on shapes. So that not every rank computes every matrix, each has an owner. Parts
travel in one all-to-all for each mesh axis that cuts the matrices, for many of them at once, and back in as many: over
the last axis go what the ranks of the axes before have sent, so that no process group is needed but those of the mesh.

Where the parts of all ranks lie is arithmetic over the mesh, of DTensor's metadata, which `components.check_offsets`
has compared with how tensors are really cut.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import product

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Placement

from quantshard import private_torch
from quantshard.collectives import process_groups
from quantshard.optimizers.rounding import TensorRegion

Coordinate = tuple[int, ...]
"""A rank, by its index in each process group."""

Rectangle = tuple[tuple[int, int], tuple[int, int]]
"""First and one past the last row, and column."""


@dataclass(frozen=True)
class MatrixLayout:
    """A matrix of a global shape [rows, columns], and which part each rank holds.

    `groups`: the process groups of the mesh axes that cut it. `pieces`: by coordinate in them; of a whole matrix, the
    one of the coordinate ().
    """

    shape: tuple[int, int]
    groups: tuple[dist.ProcessGroup, ...]
    pieces: Mapping[Coordinate, Rectangle]

    @staticmethod
    def of(param: Tensor) -> MatrixLayout:
        """That of a 2-D parameter."""
        rows, columns = param.shape
        if not isinstance(param, DTensor):
            return MatrixLayout((rows, columns), (), {(): ((0, rows), (0, columns))})
        pieces = _pieces((rows, columns), tuple(param.device_mesh.shape), tuple(param.placements))
        return MatrixLayout((rows, columns), process_groups.sharding_group(param), pieces)

    @property
    def cost(self) -> int:
        """Of products with its Gram matrix, which is that of its shorter side."""
        short, long = sorted(self.shape)
        return short * short * (2 * long + short)

    @cached_property
    def ordered(self) -> list[Rectangle]:
        """The pieces in the order in which they arrive: the last group goes slowest."""
        return [self.pieces[at] for at in sorted(self.pieces, key=lambda at: at[::-1])]

    @cached_property
    def is_stacked(self) -> bool:
        """Whether the pieces, in this order, are the matrix's rows one after the other, as of FSDP2's alone."""
        ends = [0, *(bottom for (_, bottom), _ in self.ordered)]
        return all(
            _area(piece) == 0 or piece == ((end, piece[0][1]), (0, self.shape[1]))
            for end, piece in zip(ends[:-1], self.ordered, strict=True)
        )

    def whole(self, flat: Tensor) -> Tensor:
        """The matrix of its pieces, that follow each other; contiguous."""
        if self.is_stacked:
            return flat.view(self.shape)
        matrix = flat.new_empty(self.shape)
        parts = flat.split([*map(_area, self.ordered)])
        for ((top, bottom), (left, right)), part in zip(self.ordered, parts, strict=True):
            matrix[top:bottom, left:right] = part.view(bottom - top, right - left)
        return matrix

    def flat(self, whole: Tensor) -> Tensor:
        """The reverse."""
        if self.is_stacked:
            return whole.reshape(-1)
        parts = [whole[top:bottom, left:right].reshape(-1) for (top, bottom), (left, right) in self.ordered]
        return torch.cat(parts)


@lru_cache(maxsize=1024)
def _pieces(
    shape: tuple[int, int], mesh_shape: tuple[int, ...], placements: tuple[Placement, ...]
) -> dict[Coordinate, Rectangle]:
    dims = private_torch.cut_dims(placements)
    axes = [axis for axis, dim in enumerate(dims) if dim is not None and mesh_shape[axis] > 1]
    found = {}
    for at in product(*(range(mesh_shape[axis]) for axis in axes)):
        coordinate = [0] * len(mesh_shape)  # on the other axes are replicas
        for axis, index in zip(axes, at, strict=True):
            coordinate[axis] = index
        rows, columns = private_torch.dtensor_extents(shape, mesh_shape, placements, tuple(coordinate))
        found[at] = (rows, columns)
    assert sum(map(_area, found.values())) == shape[0] * shape[1], f"{shape} on {mesh_shape}: pieces {found}"
    return found


def _area(piece: Rectangle) -> int:
    (top, bottom), (left, right) = piece
    return (bottom - top) * (right - left)


def buckets(layouts: Sequence[MatrixLayout], most_bytes: int) -> list[list[int]]:
    """The matrices, by number, that are exchanged together: cut over the same ranks, and in bfloat16 of at most so many
    bytes a rank, or as many as the largest has, so that every rank may own one. An owner may get one more.
    """
    found: list[list[int]] = []
    by_groups: dict[tuple[dist.ProcessGroup, ...], list[int]] = {}
    for number, layout in enumerate(layouts):
        by_groups.setdefault(layout.groups, []).append(number)
    for numbers in by_groups.values():
        sizes = [2 * math.prod(layouts[number].shape) for number in numbers]
        most, held = max(most_bytes, *sizes) * len(layouts[numbers[0]].pieces), 0
        for position, (number, size) in enumerate(zip(numbers, sizes, strict=True)):
            if position == 0 or held + size > most:
                found.append([])
                held = 0
            found[-1].append(number)
            held += size
    return found


@dataclass(frozen=True)
class _AxisExchange:
    """One all-to-all: what goes to each rank of a group and what comes from it, as (matrix, elements) in order."""

    group: dist.ProcessGroup
    sent: list[list[tuple[int, int]]]
    received: list[list[tuple[int, int]]]

    def forth(self, held: Mapping[int, Tensor]) -> dict[int, Tensor]:
        """The matrices' parts, flat, of which ranks now have fewer, and more of each."""
        arrived = self._exchanged([held[number] for peer in self.sent for number, _ in peer], self.sent, self.received)
        found: dict[int, list[Tensor]] = {}
        for (number, _), part in zip((pair for peer in self.received for pair in peer), arrived, strict=True):
            found.setdefault(number, []).append(part)
        return {number: torch.cat(parts) for number, parts in found.items()}

    def back(self, held: Mapping[int, Tensor]) -> dict[int, Tensor]:
        """The reverse."""
        sizes: dict[int, list[int]] = {number: [] for number in held}
        for peer in self.received:
            for number, size in peer:
                sizes[number].append(size)
        parts = {number: iter(tensor.split(sizes[number])) for number, tensor in held.items()}
        leaving = [next(parts[number]) for peer in self.received for number, _ in peer]
        arrived = self._exchanged(leaving, self.received, self.sent)
        return dict(zip((number for peer in self.sent for number, _ in peer), arrived, strict=True))

    def _exchanged(
        self, leaving: list[Tensor], sent: list[list[tuple[int, int]]], received: list[list[tuple[int, int]]]
    ) -> tuple[Tensor, ...]:
        device = process_groups.collective_device(self.group)  # parameters that FSDP2 offloaded are on the CPU
        empty = torch.empty(0, dtype=torch.bfloat16, device=device)
        out = torch.cat([empty, *(part.to(device) for part in leaving)])
        into = out.new_empty(sum(size for peer in received for _, size in peer))
        arriving, departing = ([2 * sum(size for _, size in peer) for peer in peers] for peers in (received, sent))
        # as bytes, which every backend moves
        dist.all_to_all_single(into.view(torch.uint8), out.view(torch.uint8), arriving, departing, group=self.group)
        return into.split([size for peer in received for _, size in peer])


class MatrixExchange:
    """Brings some matrices together and takes them apart; all of them are cut over the same process groups.

    All ranks of these make it of the same matrices, in the same order.
    """

    def __init__(self, layouts: Sequence[MatrixLayout]) -> None:
        self._layouts = layouts
        self._groups = layouts[0].groups
        self._here = tuple(dist.get_rank(group) for group in self._groups)
        self._owners = _owners(layouts, [group.size() for group in self._groups])
        self._exchanges = [self._along(axis) for axis in range(len(self._groups))]

    def _along(self, axis: int) -> _AxisExchange:
        peers = range(self._groups[axis].size())
        here = [number for number, owner in enumerate(self._owners) if owner[:axis] == self._here[:axis]]
        sent = [
            [(number, self._held(number, axis, self._here[axis])) for number in here if self._owners[number][axis] == q]
            for q in peers
        ]
        mine = [number for number in here if self._owners[number][axis] == self._here[axis]]
        received = [[(number, self._held(number, axis, q)) for number in mine] for q in peers]
        return _AxisExchange(self._groups[axis], sent, received)

    def _held(self, number: int, axis: int, peer: int) -> int:
        """How many elements of a matrix a rank of this axis has before the exchange along it: of all axes before."""
        tail = (peer, *self._here[axis + 1 :])
        return sum(_area(piece) for at, piece in self._layouts[number].pieces.items() if at[axis:] == tail)

    def check_part(self, number: int, held: TensorRegion) -> None:
        """What this rank holds of a matrix is what all ranks take it to hold."""
        (top, bottom), (left, right) = self._layouts[number].pieces[self._here]
        same = (held.origin, held.shape) == ((top, left), (bottom - top, right - left))
        assert same or 0 == bottom - top == held.shape[0], f"{held} is held, rows {top}:{bottom} are told"

    def gather(self, parts: Iterable[Tensor]) -> Iterator[tuple[int, Tensor]]:
        """The whole matrices that this rank owns, with their numbers, one after the other. A collective call.

        `parts`: bfloat16, what this rank holds of each matrix. Each whole matrix is a tensor of its own, contiguous.
        """
        held = {number: part.reshape(-1) for number, part in enumerate(parts)}
        for exchange in self._exchanges:
            held = exchange.forth(held)
        for number in list(held):
            yield number, self._layouts[number].whole(held.pop(number))

    def scatter(self, wholes: dict[int, Tensor]) -> list[Tensor]:
        """This rank's part of every matrix, of the `wholes` that their owners have made. A collective call.

        `wholes` is empty afterwards, so that their memory is free.
        """
        held = {number: self._layouts[number].flat(wholes.pop(number)) for number in list(wholes)}
        for exchange in reversed(self._exchanges):
            held = exchange.back(held)
        parts = []
        for number, layout in enumerate(self._layouts):
            (top, bottom), (left, right) = layout.pieces[self._here]
            parts.append(held[number].view(bottom - top, right - left))
        return parts


def _owners(layouts: Sequence[MatrixLayout], sizes: Sequence[int]) -> list[Coordinate]:
    """The owner of each matrix: the costliest first, each to the rank with the least to do."""
    loads = dict.fromkeys(product(*map(range, sizes)), 0)
    found: dict[int, Coordinate] = {}
    for number in sorted(range(len(layouts)), key=lambda number: -layouts[number].cost):
        owner = min(loads, key=lambda at: loads[at])
        found[number] = owner
        loads[owner] += layouts[number].cost
    return [found[number] for number in range(len(layouts))]
