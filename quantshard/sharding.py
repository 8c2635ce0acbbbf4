"""Where the sharding arithmetic is: which part of the global tensor, and of each component's grid, a rank holds.

A `Shard` is a rectangle of the global tensor together with the cuts that led to it. From these alone follow the
entries of every component that are resident, which of them the rectangle touches, what an all-gather must carry and
where amaxes must be reduced. There is no process group and no tensor in this file.

One rule decides everything: *a cut that crosses blocks leaves the grid whole*. If every boundary of a cut falls on a
block boundary, each rank keeps the entries of its own rows (the component is sharded like the weight). If any boundary
falls inside a block, all ranks of that mesh axis keep all entries that stood there before the cut (the component is
replicated on that axis), so a block that straddles ranks has one scale, known to all of them. The rule looks at the
cut, never at one rank's piece of it, so all ranks decide alike, those with an empty piece included.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from quantshard.errors import ConfigurationError
from quantshard.formats import ALL, Component, Format, Orientation

Extent = tuple[int, int]
"""First and one past the last index along one dim."""


def ceil_div(a: int, b: int) -> int:
    """a / b rounded up."""
    return -(-a // b)


def grid_extent(extent: Extent, cover: int) -> Extent:
    """The grid entries along one dim that elements `extent` touch, each entry covering `cover` elements.

    A whole-dim entry (ALL) exists on every rank, also where the extent is empty.
    """
    start, stop = extent
    if cover == ALL:
        return (0, 1)
    first = start // cover
    return (first, ceil_div(stop, cover) if stop > start else first)


@dataclass(frozen=True, slots=True)
class Cut:
    """One split of `parent` along `dim` into pieces of `chunk` elements; the last pieces may be shorter or empty."""

    parent: Shard
    dim: int
    chunk: int

    def is_clean(self, component: Component) -> bool:
        """True if no boundary of this cut falls inside a block of the component."""
        cover = component.block_shape[self.dim]
        start, stop = self.parent.extents[self.dim]
        if cover == ALL:
            return False
        # a chunk as large as what is cut has no boundary inside
        return self.chunk >= stop - start or (start % cover == 0 and self.chunk % cover == 0)


@dataclass(frozen=True, slots=True)
class Shard:
    """A rectangle of a 2-D global tensor: its rows and columns there, and the cut that it came from, if any."""

    global_shape: tuple[int, int]
    extents: tuple[Extent, Extent]
    cut: Cut | None = None

    def __hash__(self) -> int:
        """The hash of what tells most shards apart: each GEMM looks its operands' up."""
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
        """The piece that begins at local index `start` when `dim` is cut into pieces of `chunk` elements."""
        first, last = self.extents[dim]
        extent = (min(first + start, last), min(first + start + chunk, last))
        extents = (extent, self.extents[1]) if dim == 0 else (self.extents[0], extent)
        return Shard(self.global_shape, extents, Cut(self, dim, chunk))

    def before_cut(self) -> Shard:
        """What this shard was cut from: the result of gathering all pieces."""
        assert self.cut is not None, "a whole tensor was not cut from anything"
        return self.cut.parent

    def replicates(self, component: Component, dim: int) -> bool:
        """True if some cut along `dim`, the last or an earlier one (tensor parallelism's, before FSDP2's), left the
        component's grid whole, so that ranks share its entries."""
        cut = self.cut
        if cut is None:
            return False
        return (cut.dim == dim and not cut.is_clean(component)) or cut.parent.replicates(component, dim)

    def shares_blocks(self, component: Component) -> bool:
        """True if entries of the component are held by several pieces: their amaxes must be reduced over the ranks."""
        return self.replicates(component, 0) or self.replicates(component, 1)

    def resident(self, component: Component) -> tuple[Extent, Extent]:
        """The component's entries that this shard holds, as extents of the component's global grid."""
        return _resident(self, component)

    def touched(self, component: Component) -> tuple[slice, slice]:
        """Where, within the resident entries, lie those that the rectangle itself touches."""
        slices = []
        for dim, (first, _) in enumerate(self.resident(component)):
            start, stop = grid_extent(self.extents[dim], component.block_shape[dim])
            slices.append(slice(start - first, stop - first))
        return (slices[0], slices[1])

    def component_shape(self, component: Component) -> tuple[int, int]:
        """Shape of the component's resident tensor."""
        (r0, r1), (c0, c1) = self.resident(component)
        return (r1 - r0, c1 - c0)

    def straddling(self, component: Component) -> int:
        """How many of the blocks that the rectangle touches reach beyond it, into other pieces."""
        touched = inside = 1
        for (start, stop), cover, size in zip(self.extents, component.block_shape, self.global_shape, strict=True):
            first, last = grid_extent((start, stop), cover)
            touched *= last - first
            complete = ceil_div(stop, cover) if stop == size else stop // cover  # the tensor ends its last block
            inside *= max(complete - ceil_div(start, cover), 0)
        return touched - inside

    def gathers(self, component: Component) -> bool:
        """True if undoing the last cut needs the component from other ranks; else every rank has it whole already."""
        assert self.cut is not None
        return not self.replicates(component, self.cut.dim)

    def padded_rows(self, component: Component) -> int:
        """Rows of the component in the largest piece of the last cut: what every rank sends to an all-gather."""
        assert self.cut is not None
        assert self.cut.dim == 0  # FSDP2 gathers tensor subclasses along dim 0 alone (`limits.REFUSALS`)
        return ceil_div(self.cut.chunk, component.block_shape[0])


@lru_cache(maxsize=65536)  # each GEMM asks for every component of its operands
def _resident(shard: Shard, component: Component) -> tuple[Extent, Extent]:
    if shard.cut is None:
        whole = [grid_extent(shard.extents[d], component.block_shape[d]) for d in (0, 1)]
        return (whole[0], whole[1])
    held = list(_resident(shard.cut.parent, component))
    dim = shard.cut.dim
    if not shard.replicates(component, dim):
        held[dim] = grid_extent(shard.extents[dim], component.block_shape[dim])
    return (held[0], held[1])


def chunk_of(extent: Extent, index: int, count: int) -> Extent:
    """The piece number `index` of `count` of an extent, cut as `torch.chunk` does; the last may be shorter or empty."""
    start, stop = extent
    chunk = ceil_div(stop - start, count)
    return (min(start + index * chunk, stop), min(start + (index + 1) * chunk, stop))


@lru_cache(maxsize=4096)
def whole(shape: tuple[int, int]) -> Shard:
    """The shard that is the global tensor itself."""
    return Shard(shape, ((0, shape[0]), (0, shape[1])))


def stored_bytes(fmt: Format, shard: Shard) -> dict[str, int]:
    """Bytes of each component that are resident on the rank of `shard`."""
    sizes = {}
    for component in fmt.components:
        rows, cols = shard.component_shape(component)
        sizes[component.name] = rows * cols * component.encoding.storage.itemsize
    return sizes


def pieces_outermost_first(shard: Shard) -> list[Shard]:
    """The results of the cuts that led to `shard`, in the order in which the cuts were made; the last is `shard`."""
    pieces: list[Shard] = []
    while shard.cut is not None:
        pieces.insert(0, shard)
        shard = shard.cut.parent
    return pieces


def whole_axes(shard: Shard, component: Component, dims: Sequence[int | None]) -> list[int]:
    """The mesh axes whose cuts left the component's grid whole. Over exactly these its entries are replicated and their
    amaxes reduced: along the other axes ranks hold different entries.

    `dims`: the dim that each mesh axis cuts, if any. Axes cut from the last to the first: tensor parallelism, whose
    axes stand last, before FSDP.

    Raises:
        ConfigurationError: the shard was not cut in this way.
    """
    pieces = pieces_outermost_first(shard)
    axes = [axis for axis in reversed(range(len(dims))) if dims[axis] is not None]
    cuts = [piece.cut.dim for piece in pieces if piece.cut is not None]
    if cuts != [dims[axis] for axis in axes]:
        raise ConfigurationError(
            f"a weight {shard.global_shape} whose mesh axes shard dims {[dims[axis] for axis in axes]} (None: no dim), "
            f"the last axis first, was cut {len(cuts)} times, along dims {cuts}; wrap it with tensor parallelism and "
            "then fully_shard only once each"
        )
    return [axis for axis, piece in zip(axes, pieces, strict=True) if piece.replicates(component, dims[axis] or 0)]


@dataclass(frozen=True, slots=True)
class GatherSlot:
    """One input of an all-gather: `rows` x `cols` entries of the component `name`, padded to `numel` entries.

    `name` is None where this pass has nothing to send in a slot that another pass fills.
    """

    name: str | None
    rows: int
    cols: int
    numel: int


def gather_slots(
    fmt: Format, shard: Shard, this_pass: tuple[Orientation, ...], passes: tuple[tuple[Orientation, ...], ...]
) -> list[GatherSlot]:
    """What one rank sends to the all-gather of a pass that needs the copies `this_pass`.

    FSDP2 allocates the outputs at the first gather and keeps their number and sizes, so where passes differ (`passes`
    lists what each may need) a slot is as large as the largest of them.
    """

    def wanted(copies: tuple[Orientation, ...]) -> list[tuple[str, int, int]]:
        # no amax: it is of the whole tensor, so every rank has it (`shard.gathers` would say the same)
        parts = [p for which in copies for p in (fmt.copies[which].codes, fmt.copies[which].scale)]
        return [(p.name, shard.padded_rows(p), shard.component_shape(p)[1]) for p in parts if shard.gathers(p)]

    every = [wanted(copies) for copies in passes]
    slots = []
    for i in range(max(len(w) for w in every)):
        numel = max(w[i][1] * w[i][2] for w in every if i < len(w))
        mine = wanted(this_pass)
        name, rows, cols = mine[i] if i < len(mine) else (None, 0, 0)
        slots.append(GatherSlot(name, rows, cols, numel))
    return slots
