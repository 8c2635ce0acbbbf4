"""Sharding arithmetic: which part of the global tensor, and of each component's grid, a rank holds.

A `Shard` is a rectangle of the global tensor together with the cuts that produced it. These determine which entries of
each component are resident, what an all-gather must carry and where amaxes must be reduced. This file uses no process
group and no tensor.

One rule decides everything: *a cut that crosses blocks leaves the grid whole*. If every boundary of a cut falls on a
block boundary, each rank keeps the entries of its own rows, so the component is sharded like the weight. If any
boundary falls inside a block, all ranks of that mesh axis keep all entries that they had before the cut, so the
component is replicated on that axis. A block that straddles ranks therefore has one scale, which all of them hold. The
rule depends on the cut and never on one rank's piece, so all ranks reach the same decision, including ranks with an
empty piece. For 6 rows on two ranks:

    rows                    0   1   2  |  3   4   5
    blocks of three rows   [    a    ] | [    b    ]    sharded: rank 0 holds the scale of a, rank 1 that of b
    blocks of two rows     [  a  ][  b   |   ][  c  ]   replicated: both hold all scales, and reduce all amaxes
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import zip_longest
from math import prod

from quantshard.errors import ConfigurationError
from quantshard.formats import ALL, Component, Format, Orientation

Extent = tuple[int, int]
"""Half-open range of indices along one dim: first, last + 1."""


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def grid_extent(extent: Extent, cover: int) -> Extent:
    """Return the grid entries along one dim that the elements of `extent` touch, at `cover` elements per entry.
    An entry that covers the whole dim (ALL) exists on every rank, even if the extent is empty."""
    start, stop = extent
    if cover == ALL:
        return (0, 1)
    first = start // cover
    return (first, ceil_div(stop, cover) if stop > start else first)


@dataclass(frozen=True, slots=True)
class Cut:
    """One split of `parent` along `dim` into pieces of `chunk` elements. The last pieces can be shorter or empty."""

    parent: Shard
    dim: int
    chunk: int

    def is_clean(self, component: Component) -> bool:
        """True if no boundary of this cut falls inside a block of the component."""
        cover = component.block_shape[self.dim]
        start, stop = self.parent.extents[self.dim]
        if cover == ALL:
            return False
        # A chunk that spans the whole parent has no boundary inside it.
        return self.chunk >= stop - start or (start % cover == 0 and self.chunk % cover == 0)


@dataclass(frozen=True, slots=True)
class Shard:
    """A rectangle of a 2-D global tensor: its rows and columns, and the cut that produced it, if any."""

    global_shape: tuple[int, int]
    extents: tuple[Extent, Extent]
    cut: Cut | None = None

    def __hash__(self) -> int:
        """Hash the extents only, which distinguish most shards: every GEMM looks up the shards of its operands."""
        return hash(self.extents)

    @property
    def origin(self) -> tuple[int, int]:
        """Global index of the first element."""
        return (self.extents[0][0], self.extents[1][0])

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of the rectangle."""
        (r0, r1), (c0, c1) = self.extents
        return (r1 - r0, c1 - c0)

    def piece(self, dim: int, start: int, chunk: int) -> Shard:
        """Return the piece that starts at local index `start` when `dim` is cut into pieces of `chunk` elements."""
        first, last = self.extents[dim]
        extent = (min(first + start, last), min(first + start + chunk, last))
        extents = (extent, self.extents[1]) if dim == 0 else (self.extents[0], extent)
        return Shard(self.global_shape, extents, Cut(self, dim, chunk))

    def before_cut(self) -> Shard:
        """Return the shard that this one was cut from, which is the result of gathering all pieces."""
        assert self.cut is not None, "a whole tensor was not cut from anything"
        return self.cut.parent

    def replicates(self, component: Component, dim: int) -> bool:
        """True if any cut along `dim`, tensor parallelism's or FSDP2's, left the grid whole: ranks share entries."""
        cut = self.cut
        if cut is None:
            return False
        return (cut.dim == dim and not cut.is_clean(component)) or cut.parent.replicates(component, dim)

    def shares_blocks(self, component: Component) -> bool:
        """True if several pieces hold the same entries of the component, so amaxes must be reduced over the ranks."""
        return self.replicates(component, 0) or self.replicates(component, 1)

    def resident(self, component: Component) -> tuple[Extent, Extent]:
        """Return the component's entries that this shard holds, as extents of the component's global grid."""
        return _resident(self, component)

    def touched(self, component: Component) -> tuple[slice, slice]:
        """Return the slices of the resident entries that the rectangle itself touches."""
        slices = []
        for dim, (first, _) in enumerate(self.resident(component)):
            start, stop = grid_extent(self.extents[dim], component.block_shape[dim])
            slices.append(slice(start - first, stop - first))
        return (slices[0], slices[1])

    def component_shape(self, component: Component) -> tuple[int, int]:
        """Return the shape of the component's resident tensor."""
        (r0, r1), (c0, c1) = self.resident(component)
        return (r1 - r0, c1 - c0)

    def gathers(self, component: Component) -> bool:
        """True if undoing the last cut needs the component from other ranks. If False, every rank has all of it."""
        assert self.cut is not None
        return not self.replicates(component, self.cut.dim)


@lru_cache(maxsize=65536)  # called for every operand component of each GEMM
def _resident(shard: Shard, component: Component) -> tuple[Extent, Extent]:
    if shard.cut is None:
        whole = [grid_extent(shard.extents[d], component.block_shape[d]) for d in (0, 1)]
        return (whole[0], whole[1])
    extents = list(_resident(shard.cut.parent, component))
    dim = shard.cut.dim
    if not shard.replicates(component, dim):
        extents[dim] = grid_extent(shard.extents[dim], component.block_shape[dim])
    return (extents[0], extents[1])


@lru_cache(maxsize=4096)
def whole(shape: tuple[int, int]) -> Shard:
    """Return the shard that covers the whole global tensor."""
    return Shard(shape, ((0, shape[0]), (0, shape[1])))


def stored_bytes(fmt: Format, shard: Shard) -> dict[str, int]:
    """Return the bytes of each component that are resident on the rank of `shard`."""
    return {c.name: prod(shard.component_shape(c)) * c.encoding.storage.itemsize for c in fmt.components}


def pieces_outermost_first(shard: Shard) -> list[Shard]:
    """Return the results of the cuts that led to `shard`, in the order of the cuts. The last one is `shard`."""
    return [] if shard.cut is None else [*pieces_outermost_first(shard.cut.parent), shard]


def whole_axes(shard: Shard, component: Component, dims: Sequence[int | None]) -> list[int]:
    """Return the mesh axes whose cuts left the component's grid whole: entries are replicated, and amaxes reduced, over
    exactly these.

    Axes cut from the last to the first: the tensor-parallel axes, which are last in the mesh, cut before FSDP. `dims`:
    the dim that each mesh axis cuts, or None.
    """
    pieces = pieces_outermost_first(shard)
    axes = [axis for axis in reversed(range(len(dims))) if dims[axis] is not None]
    cuts = [piece.cut.dim for piece in pieces if piece.cut is not None]
    if cuts != (expected := [dims[axis] for axis in axes]):
        problem = f"a weight {shard.global_shape} whose mesh axes shard dims {expected} was cut along dims {cuts}"
        raise ConfigurationError(f"{problem}; apply tensor parallelism and then fully_shard only once each")
    return [axis for axis, piece in zip(axes, pieces, strict=True) if piece.replicates(component, dims[axis] or 0)]


@dataclass(frozen=True, slots=True)
class GatherSlot:
    """One all-gather input: `rows` x `cols` entries of a component, or None, padded to `numel` entries."""

    name: str | None
    rows: int
    cols: int
    numel: int


def gather_slots(
    fmt: Format, shard: Shard, this_pass: tuple[Orientation, ...], passes: tuple[tuple[Orientation, ...], ...]
) -> list[GatherSlot]:
    """Return the all-gather inputs of one rank, for a pass that reads the copies `this_pass`.

    FSDP2 fixes its buffers at the first all-gather, so each slot is padded to the largest component of any pass, in the
    largest piece of the cut.
    """
    assert shard.cut is not None
    assert shard.cut.dim == 0  # FSDP2 gathers tensor subclasses only along dim 0 (`limits.REFUSALS`)
    chunk = shard.cut.chunk

    def sent_components(copies: tuple[Orientation, ...]) -> list[tuple[str | None, int, int]]:
        parts = [part for copy in copies for part in (fmt.copies[copy].codes, fmt.copies[copy].scale)]
        amax = fmt.copies[copies[0]].amax  # which every rank has, except of a stack
        return [
            (part.name, ceil_div(chunk, part.block_shape[0]), shard.component_shape(part)[1])
            for part in (*parts, amax)
            if part is not None and shard.gathers(part)
        ]

    slots = zip_longest(*(sent_components(copies) for copies in passes))
    sizes = [max(rows * cols for _, rows, cols in filter(None, slot)) for slot in slots]
    sent = sent_components(this_pass)
    sent += [(None, 0, 0)] * (len(sizes) - len(sent))
    return [GatherSlot(*component, numel) for component, numel in zip(sent, sizes, strict=True)]
