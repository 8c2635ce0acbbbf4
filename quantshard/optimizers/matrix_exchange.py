"""Exchange of Muon's sharded matrices: each is gathered whole on one rank, its owner, and scattered again.

The bits of a matrix product depend on its shape, so updates are computed from whole matrices. Shards travel in one
all-to-all per mesh axis that cuts them, for many matrices at once, and each axis forwards what arrived before.
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

Coordinate = tuple[int, ...]
"""A rank, as its index in each process group."""

Rectangle = tuple[tuple[int, int], tuple[int, int]]
"""Half-open ranges (start, end) of rows and of columns."""


@dataclass(frozen=True)
class MatrixLayout:
    """The global shape of a matrix, and the shard of each rank, by coordinate in the process groups that cut it."""

    shape: tuple[int, int]
    groups: tuple[dist.ProcessGroup, ...]
    pieces: Mapping[Coordinate, Rectangle]

    @staticmethod
    def of(param: Tensor) -> MatrixLayout:
        if param.ndim == 3:  # a stack is cut between its matrices, so nothing is exchanged
            local = private_torch.local_tensor(param)
            rows, columns = local.shape[0] * local.shape[1], local.shape[2]
        else:
            rows, columns = param.shape
        if param.ndim == 3 or not isinstance(param, DTensor):
            return MatrixLayout((rows, columns), (), {(): ((0, rows), (0, columns))})
        pieces = _pieces((rows, columns), tuple(param.device_mesh.shape), tuple(param.placements))
        return MatrixLayout((rows, columns), process_groups.sharding_group(param), pieces)

    @property
    def cost(self) -> int:
        """Cost of products with the Gram matrix of the shorter side."""
        short, long = sorted(self.shape)
        return short * short * (2 * long + short)

    @cached_property
    def ordered(self) -> list[Rectangle]:
        """The shards in order of arrival: the index in the last group varies slowest."""
        return [self.pieces[coordinate] for coordinate in sorted(self.pieces, key=lambda coordinate: coordinate[::-1])]

    @cached_property
    def is_stacked(self) -> bool:
        """Whether the shards, in order of arrival, are consecutive rows of the matrix, as under FSDP2 alone."""
        ends = [0, *(bottom for (_, bottom), _ in self.ordered)]
        return all(
            _area(piece) == 0 or piece == ((end, piece[0][1]), (0, self.shape[1]))
            for end, piece in zip(ends[:-1], self.ordered, strict=True)
        )

    def whole(self, flat: Tensor) -> Tensor:
        if self.is_stacked:
            return flat.view(self.shape)
        matrix = flat.new_empty(self.shape)
        parts = flat.split([*map(_area, self.ordered)])
        for ((row, row_end), (col, col_end)), part in zip(self.ordered, parts, strict=True):
            matrix[row:row_end, col:col_end] = part.view(row_end - row, col_end - col)
        return matrix

    def flat(self, whole: Tensor) -> Tensor:
        """Concatenate the shards of a matrix; the inverse of `whole`."""
        if self.is_stacked:
            return whole.reshape(-1)
        parts = [whole[row:row_end, col:col_end].reshape(-1) for (row, row_end), (col, col_end) in self.ordered]
        return torch.cat(parts)


@lru_cache(maxsize=1024)
def _pieces(
    shape: tuple[int, int], mesh_shape: tuple[int, ...], placements: tuple[Placement, ...]
) -> dict[Coordinate, Rectangle]:
    dims = private_torch.cut_dims(placements)
    axes = [axis for axis, dim in enumerate(dims) if dim is not None and mesh_shape[axis] > 1]
    pieces = {}
    for indices in product(*(range(mesh_shape[axis]) for axis in axes)):
        coordinate = [0] * len(mesh_shape)  # on the other axes are replicas
        for axis, index in zip(axes, indices, strict=True):
            coordinate[axis] = index
        rows, columns = private_torch.dtensor_extents(shape, mesh_shape, placements, tuple(coordinate))
        pieces[indices] = (rows, columns)
    assert sum(map(_area, pieces.values())) == shape[0] * shape[1], f"{shape} on {mesh_shape}: pieces {pieces}"
    return pieces


def _area(piece: Rectangle) -> int:
    (row, row_end), (col, col_end) = piece
    return (row_end - row) * (col_end - col)


def buckets(layouts: Sequence[MatrixLayout], most_bytes: int) -> list[list[int]]:
    """Group matrices, by number, that are exchanged together: those cut over the same process groups.

    A bucket has at most `most_bytes` per rank in bfloat16, or the size of its largest matrix; owners can get one more.
    """
    result: list[list[int]] = []
    by_groups: dict[tuple[dist.ProcessGroup, ...], list[int]] = {}
    for number, layout in enumerate(layouts):
        by_groups.setdefault(layout.groups, []).append(number)
    for numbers in by_groups.values():
        sizes = [2 * math.prod(layouts[number].shape) for number in numbers]
        limit, size_so_far = max(most_bytes, *sizes) * len(layouts[numbers[0]].pieces), 0
        for position, (number, size) in enumerate(zip(numbers, sizes, strict=True)):
            if position == 0 or size_so_far + size > limit:
                result.append([])
                size_so_far = 0
            result[-1].append(number)
            size_so_far += size
    return result


@dataclass(frozen=True)
class _AxisExchange:
    """One all-to-all along a mesh axis, of (matrix, elements) pairs to and from each rank of the group, in order."""

    group: dist.ProcessGroup
    sent: list[list[tuple[int, int]]]
    received: list[list[tuple[int, int]]]

    def forth(self, shards: Mapping[int, Tensor]) -> dict[int, Tensor]:
        """Send flat shards toward the owners: each rank then has fewer matrices and more of each."""
        outgoing = [shards[number] for peer in self.sent for number, _ in peer]
        received_parts = self._exchanged(outgoing, self.sent, self.received)
        parts_by_matrix: dict[int, list[Tensor]] = {}
        for (number, _), part in zip((pair for peer in self.received for pair in peer), received_parts, strict=True):
            parts_by_matrix.setdefault(number, []).append(part)
        return {number: torch.cat(parts) for number, parts in parts_by_matrix.items()}

    def back(self, shards: Mapping[int, Tensor]) -> dict[int, Tensor]:
        """Send flat shards back; the inverse of `forth`."""
        sizes: dict[int, list[int]] = {number: [] for number in shards}
        for peer in self.received:
            for number, size in peer:
                sizes[number].append(size)
        parts = {number: iter(tensor.split(sizes[number])) for number, tensor in shards.items()}
        outgoing = [next(parts[number]) for peer in self.received for number, _ in peer]
        received_parts = self._exchanged(outgoing, self.received, self.sent)
        return dict(zip((number for peer in self.sent for number, _ in peer), received_parts, strict=True))

    def _exchanged(
        self, outgoing: list[Tensor], sent: list[list[tuple[int, int]]], received: list[list[tuple[int, int]]]
    ) -> tuple[Tensor, ...]:
        device = process_groups.collective_device(self.group)  # differs from the tensors' device under CPU offload
        empty = torch.empty(0, dtype=torch.bfloat16, device=device)
        send_buffer = torch.cat([empty, *(part.to(device) for part in outgoing)])
        recv_buffer = send_buffer.new_empty(sum(size for peer in received for _, size in peer))
        recv_sizes, send_sizes = ([2 * sum(size for _, size in peer) for peer in peers] for peers in (received, sent))
        # Every backend supports uint8.
        received_bytes, sent_bytes = recv_buffer.view(torch.uint8), send_buffer.view(torch.uint8)
        dist.all_to_all_single(received_bytes, sent_bytes, recv_sizes, send_sizes, group=self.group)
        return recv_buffer.split([size for peer in received for _, size in peer])


class MatrixExchange:
    """Gathers and scatters matrices that are cut over the same process groups, the same on all of their ranks."""

    def __init__(self, layouts: Sequence[MatrixLayout]) -> None:
        self._layouts = layouts
        self._groups = layouts[0].groups
        self._here = tuple(dist.get_rank(group) for group in self._groups)
        self._owners = _owners(layouts, [group.size() for group in self._groups])
        self._exchanges = [self._along(axis) for axis in range(len(self._groups))]

    def _along(self, axis: int) -> _AxisExchange:
        peers = range(self._groups[axis].size())
        candidates = [number for number, owner in enumerate(self._owners) if owner[:axis] == self._here[:axis]]
        sizes = {number: self._elements(number, axis, self._here[axis]) for number in candidates}
        sent = [[(number, sizes[number]) for number in candidates if self._owners[number][axis] == q] for q in peers]
        owned = [number for number in candidates if self._owners[number][axis] == self._here[axis]]
        received = [[(number, self._elements(number, axis, q)) for number in owned] for q in peers]
        return _AxisExchange(self._groups[axis], sent, received)

    def _elements(self, number: int, axis: int, peer: int) -> int:
        """Return how many elements of a matrix a rank of this axis holds before the exchange along it."""
        tail = (peer, *self._here[axis + 1 :])
        pieces = self._layouts[number].pieces.items()
        return sum(_area(piece) for coordinate, piece in pieces if coordinate[axis:] == tail)

    def gather(self, parts: Iterable[Tensor]) -> Iterator[tuple[int, Tensor]]:
        """Yield the whole matrices that this rank owns, with their numbers, from all shards. A collective call."""
        tensors = {number: part.reshape(-1) for number, part in enumerate(parts)}
        for exchange in self._exchanges:
            tensors = exchange.forth(tensors)
        for number in list(tensors):
            yield number, self._layouts[number].whole(tensors.pop(number))

    def scatter(self, wholes: dict[int, Tensor]) -> list[Tensor]:
        """Return this rank's shard of every matrix. A collective call. `wholes`: this rank's matrices; emptied."""
        tensors = {number: self._layouts[number].flat(wholes.pop(number)) for number in list(wholes)}
        for exchange in reversed(self._exchanges):
            tensors = exchange.back(tensors)
        parts = []
        for number, layout in enumerate(self._layouts):
            (row, row_end), (col, col_end) = layout.pieces[self._here]
            parts.append(tensors[number].view(row_end - row, col_end - col))
        return parts


def _owners(layouts: Sequence[MatrixLayout], sizes: Sequence[int]) -> list[Coordinate]:
    """Assign an owner to each matrix: the costliest matrix first, always to the rank with the least load."""
    loads = dict.fromkeys(product(*map(range, sizes)), 0)
    owners: dict[int, Coordinate] = {}
    for number in sorted(range(len(layouts)), key=lambda number: -layouts[number].cost):
        owner = min(loads, key=lambda rank: loads[rank])
        owners[number] = owner
        loads[owner] += layouts[number].cost
    return [owners[number] for number in range(len(layouts))]
