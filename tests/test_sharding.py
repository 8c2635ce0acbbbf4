"""The sharding arithmetic: in every format, shape and cut, pieces hold what the whole does, and all ranks agree."""

from itertools import pairwise

import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st

from quantshard import sharding
from quantshard.errors import ConfigurationError
from quantshard.formats import ALL, FORMATS, MXFP8_32X32, MXFP8_BOTH, NVFP4_16X16, Orientation, Role
from quantshard.recipe import QuantSpec
from quantshard.sharding import ceil_div, whole
from quantshard.tensor import storage as storages

every_format = pytest.mark.parametrize("fmt", FORMATS.values(), ids=lambda fmt: fmt.name)
few = settings(max_examples=10, suppress_health_check=[HealthCheck.too_slow])  # of each format
sizes = st.one_of(st.integers(1, 40), st.sampled_from([64, 96, 127, 128, 129, 160, 256, 300, 384, 385, 512]))
shapes = st.tuples(sizes, sizes)
worlds = st.integers(1, 5)
cuts = st.lists(st.tuples(st.sampled_from([0, 1]), worlds), min_size=1, max_size=2).map(
    lambda axes: [*axes[:-1], (0, axes[-1][1])]  # tensor parallelism cuts either dim first, FSDP cuts dim 0 last
)
"""How many pieces each mesh axis makes of which dim, in the order of the cuts."""


def pieces_of(shard, dim, world):
    """The piece of each rank of one mesh axis, cut as `torch.chunk` cuts."""
    chunk = ceil_div(shard.shape[dim], world)
    return [shard.piece(dim, rank * chunk, chunk) for rank in range(world)]


def all_pieces(shape, axes):
    """Every rank's shard of a tensor that is cut along each of `axes` in turn."""
    shards = [whole(shape)]
    for dim, world in axes:
        shards = [piece for shard in shards for piece in pieces_of(shard, dim, world)]
    return shards


def parents(shape, axes):
    """(parent, its pieces) of every cut that `axes` make."""
    shards = [whole(shape)]
    for dim, world in axes:
        cut = [(shard, pieces_of(shard, dim, world)) for shard in shards]
        yield from cut
        shards = [piece for _, pieces in cut for piece in pieces]


def covered(extents, inside):
    """How often each element of the rectangle `inside` is in one of the rectangles `extents`; none leaves it."""
    (top, bottom), (left, right) = inside
    counts = torch.zeros(bottom - top, right - left, dtype=torch.int32)
    for (r0, r1), (c0, c1) in extents:
        assert top <= r0 <= r1 <= bottom and left <= c0 <= c1 <= right
        counts[r0 - top : r1 - top, c0 - left : c1 - left] += 1
    return counts


def touched_entries(shard, component):
    """Extents of the entries that a shard's elements lie in."""
    return [sharding.grid_extent(e, cover) for e, cover in zip(shard.extents, component.block_shape, strict=True)]


# ------------------------------------------------------------------------------------------------------------- grids


@given(extent=st.tuples(sizes, sizes).map(sorted), cover=st.sampled_from([1, 2, 16, 32, 128]))
def test_grid_extent_is_the_entries_that_elements_touch(extent, cover):
    touched = {i // cover for i in range(*extent)}
    assert set(range(*sharding.grid_extent(tuple(extent), cover))) == touched


@pytest.mark.parametrize("extent", [(0, 0), (0, 7), (5, 5)])
def test_an_entry_that_covers_all_is_everywhere(extent):
    assert sharding.grid_extent(extent, ALL) == (0, 1)


# -------------------------------------------------------------------------------------------------------------- cuts


@given(shape=shapes, axes=cuts)
def test_pieces_tile_the_tensor(shape, axes):
    shards = all_pieces(shape, axes)
    assert covered([shard.extents for shard in shards], whole(shape).extents).eq(1).all()
    assert all(shard.global_shape == shape for shard in shards)


@given(size=sizes, world=worlds)
def test_pieces_are_those_of_torch_chunk(size, world):
    pieces = [piece.extents[0] for piece in pieces_of(whole((size, 3)), 0, world)]
    chunks = [(int(c[0]), int(c[-1]) + 1) for c in torch.arange(size).chunk(world)]
    assert pieces == chunks + [(size, size)] * (world - len(chunks))


@every_format
@few
@given(shape=shapes, axes=cuts)
def test_a_clean_cut_shards_the_grid_and_another_leaves_it_whole(fmt, shape, axes):
    for parent, pieces in parents(shape, axes):
        for component in fmt.components:
            held = [piece.resident(component) for piece in pieces]
            if pieces[0].replicates(component, pieces[0].cut.dim):
                assert held == [parent.resident(component)] * len(pieces)
            else:
                assert covered(held, parent.resident(component)).eq(1).all()


@every_format
@few
@given(shape=shapes, world=worlds, dim=st.sampled_from([0, 1]))
def test_clean_means_that_no_block_straddles(fmt, shape, world, dim):
    """By definition, element by element: no grid entry is touched by two pieces, unless it covers the whole dim."""
    pieces = pieces_of(whole(shape), dim, world)
    for component in fmt.components:
        cover = component.block_shape[dim]
        touched = [{i // cover for i in range(*piece.extents[dim])} for piece in pieces]
        straddles = sum(map(len, touched)) > len(set().union(*touched))
        assert pieces[0].cut.is_clean(component) == (cover != ALL and not straddles)


@every_format
@few
@given(shape=shapes, axes=cuts)
def test_what_a_shard_touches_is_resident(fmt, shape, axes):
    for shard in all_pieces(shape, axes):
        for component in fmt.components:
            resident, slices = shard.resident(component), shard.touched(component)
            covered([touched_entries(shard, component)], resident)
            held_rows, held_cols = shard.component_shape(component)
            ids = torch.arange(held_rows * held_cols).view(held_rows, held_cols)
            rows, cols = (
                [i - first for i in range(*extent)]
                for extent, (first, _) in zip(touched_entries(shard, component), resident, strict=True)
            )
            assert torch.equal(ids[slices], ids[rows][:, cols])


@every_format
@few
@given(shape=shapes, axes=cuts)
def test_every_block_is_shared_or_on_one_rank(fmt, shape, axes):
    """Where `shares_blocks` is False, no two ranks touch one entry; so a reduction is never left out."""
    shards = all_pieces(shape, axes)
    for component in fmt.components:
        if not shards[0].shares_blocks(component):
            grid = whole(shape).resident(component)
            assert covered([touched_entries(shard, component) for shard in shards], grid).max() == 1


@every_format
@few
@given(shape=shapes, axes=cuts)
def test_all_ranks_of_a_cut_decide_alike(fmt, shape, axes):
    """Empty pieces too: a rank that decided otherwise would hang the collective or misplace a component."""
    for _, pieces in parents(shape, axes):
        for component in fmt.components:
            assert len({tuple(piece.replicates(component, dim) for dim in (0, 1)) for piece in pieces}) == 1
            assert len({piece.shares_blocks(component) for piece in pieces}) == 1
            assert len({piece.gathers(component) for piece in pieces}) == 1


@every_format
@few
@given(shape=shapes, axes=cuts, before=st.integers(0, 3))
def test_amaxes_are_reduced_over_exactly_the_ranks_that_hold_the_entries(fmt, shape, axes, before):
    """Not over fewer, and not over ranks with other entries; a replicating axis stands anywhere among the others.

    The first axis divides its dim: else pieces differ in size, and the next cut may be clean for some of them only.
    """
    first, ranks = axes[0]
    shape = tuple(size * ranks if dim == first else size for dim, size in enumerate(shape))
    at = [((), whole(shape))]
    for dim, world in axes:
        at = [((rank, *index), piece) for index, shard in at for rank, piece in enumerate(pieces_of(shard, dim, world))]
    dims = [dim for dim, _ in reversed(axes)]
    dims.insert(min(before, len(dims)), None)
    replicating = dims.index(None)
    for component in fmt.components:
        groups = {}
        for index, shard in at:
            place = (*index[:replicating], 0, *index[replicating:])
            over = sharding.whole_axes(shard, component, dims)
            assert replicating not in over
            outside = tuple((axis, i) for axis, i in enumerate(place) if axis not in over)
            groups.setdefault(outside, []).append(shard.resident(component))
        assert all(len(set(held)) == 1 for held in groups.values())
        assert covered([held[0] for held in groups.values()], whole(shape).resident(component)).eq(1).all()


@pytest.mark.parametrize("dims", [(), (1,), (0, 1), (0, None, 0)])
def test_cuts_that_are_not_those_of_the_mesh(dims):
    piece = pieces_of(whole((64, 64)), 0, 2)[0]
    with pytest.raises(ConfigurationError, match=r"\(64, 64\).*was cut along dims \[0\]"):
        sharding.whole_axes(piece, MXFP8_32X32.by_name["scale_inv"], dims)


@every_format
def test_one_row_on_three_ranks(fmt):
    """The cut of one row is clean for every block: the first rank has it all, the others an empty piece."""
    first, *others = pieces_of(whole((1, 40)), 0, 3)
    for component in fmt.components:
        if component.block_shape[0] == ALL:
            assert all(piece.shares_blocks(component) and not piece.gathers(component) for piece in (first, *others))
            assert {piece.component_shape(component) for piece in (first, *others)} == {(1, 1)}
        else:
            assert not any(piece.shares_blocks(component) for piece in (first, *others))
            assert first.resident(component) == whole((1, 40)).resident(component)
            assert all(piece.component_shape(component)[0] == 0 for piece in others)
    assert all(piece.shape == (0, 40) and piece.origin == (1, 0) for piece in others)


@pytest.mark.parametrize(
    ("rows", "world", "shared"),
    [(64, 2, False), (96, 3, False), (96, 2, True), (65, 2, True), (33, 1, False), (3, 3, True)],
)
def test_cuts_of_32x32_blocks_by_hand(rows, world, shared):
    scale = MXFP8_32X32.by_name["scale_inv"]
    pieces = pieces_of(whole((rows, 64)), 0, world)
    assert [piece.shares_blocks(scale) for piece in pieces] == [shared] * world
    entries = [piece.component_shape(scale)[0] for piece in pieces]
    assert entries == ([ceil_div(rows, 32)] * world if shared else [ceil_div(p.shape[0], 32) for p in pieces])


def test_an_unclean_cut_stays_so_below():
    """TP cuts 48 rows into 2 x 24, across a block; the FSDP cut below cannot undo that, whatever its own boundaries."""
    scale = NVFP4_16X16.by_name["scale_inv"]
    for tp in pieces_of(whole((48, 32)), 0, 2):
        for piece in pieces_of(tp, 0, 1):
            assert piece.cut.is_clean(scale)
            assert piece.shares_blocks(scale) and not piece.gathers(scale)
            assert piece.resident(scale) == ((0, 3), (0, 2))


# ----------------------------------------------------------------------------------------------------------- tensors


@every_format
@few
@given(shape=shapes, axes=cuts)
def test_storages_have_the_shapes_and_bytes_that_are_promised(fmt, shape, axes):
    for shard in all_pieces(shape, axes):
        made = storages.empty(QuantSpec(fmt), shard, "meta").components
        assert {n: tuple(t.shape) for n, t in made.items()} == {
            c.name: shard.component_shape(c) for c in fmt.components
        }
        assert {n: t.nbytes for n, t in made.items()} == sharding.stored_bytes(fmt, shard)


@every_format
@few
@given(shape=shapes, axes=cuts, world=worlds, dim=st.sampled_from([0, 1]), data=st.data())
def test_pieces_of_a_storage_are_views_of_its_resident_entries(fmt, shape, axes, world, dim, data):
    """Also of one that was cut before; the kept values are cut too."""
    shard = data.draw(st.sampled_from(all_pieces(shape, axes)))
    codes = {which: copy.codes.block_shape[dim] for which, copy in fmt.copies.items()}
    chunk = ceil_div(shard.shape[dim], world * max(codes.values())) * max(codes.values())
    storage = storages.empty(QuantSpec(fmt), shard, "cpu")
    for index, part in enumerate(storage.components.values()):
        part.copy_(torch.arange(part.numel()).view(part.shape) + index)
    values = storage.high_precision = torch.arange(shard.shape[0] * shard.shape[1]).view(shard.shape)
    for start in range(0, max(shard.shape[dim], 1), max(chunk, 1)):
        piece = storage.piece(dim, start, chunk)
        assert piece.shard == shard.piece(dim, start, chunk) and piece.state is storage.state
        assert piece.components.keys() == storage.components.keys()
        for name, part in piece.components.items():
            whole_part, component = storage.components[name], fmt.by_name[name]
            spans = zip(piece.shard.resident(component), shard.resident(component), strict=True)
            rows, cols = (slice(new[0] - old[0], new[1] - old[0]) for new, old in spans)
            assert torch.equal(part, whole_part[rows, cols])
            assert part.untyped_storage().data_ptr() == whole_part.untyped_storage().data_ptr()
        end = min(start + chunk, shard.shape[dim])
        assert torch.equal(piece.high_precision, values.narrow(dim, start, end - start))


@every_format
@few
@given(shape=shapes, axes=cuts)
def test_dtensor_cuts_the_grid_where_a_clean_cut_does(fmt, shape, axes):
    """There a component's DTensor has the weight's placements, so `torch.chunk` of the grid must give what is held."""
    for parent, pieces in parents(shape, axes):
        dim = pieces[0].cut.dim
        for component in fmt.components:
            if pieces[0].replicates(component, dim):
                continue
            first, last = parent.resident(component)[dim]
            held = [piece.resident(component)[dim] for piece in pieces]
            chunks = torch.arange(first, last).chunk(len(pieces))
            expected = [list(chunk) for chunk in chunks] + [[]] * (len(pieces) - len(chunks))
            assert [list(range(*extent)) for extent in held] == expected


@given(shape=shapes, axes=cuts)
def test_history_of_cuts(shape, axes):
    for shard in all_pieces(shape, axes):
        trail = sharding.pieces_outermost_first(shard)
        assert [piece.cut.dim for piece in trail] == [dim for dim, _ in axes]
        assert trail[-1] is shard and trail[0].before_cut() == whole(shape)
        assert all(piece.before_cut() is above for above, piece in pairwise(trail))


# ------------------------------------------------------------------------------------------------------------ gather


def passes_of(fmt):
    """What may be asked of the all-gathers of one weight: all copies each time, or one copy a pass."""
    every = tuple(fmt.copies)
    return [(every,)] if len(every) == 1 else [(every,), tuple((which,) for which in every)]


def sent(part, slot):
    """What a rank puts into one slot, as FSDP2 needs it: flat and padded."""
    flat = torch.full((slot.numel,), -1, dtype=torch.int64)
    flat[: part.numel()] = part.reshape(-1)
    return flat


@every_format
@few
@given(shape=shapes, axes=cuts, data=st.data())
def test_gathered_slots_make_the_parent(fmt, shape, axes, data):
    """Number and sizes of the slots are equal on all ranks and in all passes; taken together they are the parent's."""
    passes = data.draw(st.sampled_from(passes_of(fmt)))
    parent, pieces = data.draw(st.sampled_from([p for p in parents(shape, axes) if p[1][0].cut.dim == 0]))
    layouts = set()
    for this_pass in passes:
        slots = [sharding.gather_slots(fmt, piece, this_pass, passes) for piece in pieces]
        layouts |= {tuple(slot.numel for slot in each) for each in slots}
        assert all(each == slots[0] for each in slots)
        for i, slot in enumerate(slots[0]):
            if slot.name is None:
                continue
            component = fmt.by_name[slot.name]
            rows, cols = parent.component_shape(component)
            ids = torch.arange(rows * cols).view(rows, cols)
            top = parent.resident(component)[0][0]
            held = [piece.resident(component)[0] for piece in pieces]
            outputs = [sent(ids[a - top : b - top], each[i]) for (a, b), each in zip(held, slots, strict=True)]
            gathered = torch.stack(outputs)[:, : slot.rows * slot.cols]
            gathered = gathered.reshape(len(pieces) * slot.rows, slot.cols)[:rows]
            assert torch.equal(gathered, ids)
    assert len(layouts) == 1


@every_format
@few
@given(shape=shapes, axes=cuts)
def test_a_pass_gets_all_it_needs_and_no_more(fmt, shape, axes):
    for shard in all_pieces(shape, axes):
        for passes in passes_of(fmt):
            for this_pass in passes:
                names = {slot.name for slot in sharding.gather_slots(fmt, shard, this_pass, passes)} - {None}
                of_pass = {c.name for c in fmt.components if c.copy in this_pass and c.role is not Role.AMAX}
                assert names == {n for n in of_pass if shard.gathers(fmt.by_name[n])}
                assert {fmt.copies[which].codes.name for which in this_pass} <= names  # codes are never replicated


def test_slots_of_two_passes_share_their_sizes_by_hand():
    """Rows of 32x1 scales are shared when 48 rows are cut in two, so the columnwise pass has one slot less to fill."""
    fmt, shard = MXFP8_BOTH, pieces_of(whole((48, 64)), 0, 2)[1]
    passes = ((Orientation.ROWWISE,), (Orientation.COLUMNWISE,))
    forward, backward = (sharding.gather_slots(fmt, shard, p, passes) for p in passes)
    assert [(s.name, s.numel) for s in forward] == [("codes", 24 * 64), ("scale_inv", 24 * 2)]
    assert [(s.name, s.numel) for s in backward] == [("columnwise", 24 * 64), (None, 24 * 2)]
