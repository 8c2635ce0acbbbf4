"""The tensor class: its values are the oracle's; cutting it and giving it new values can be done in either order."""

import copy
import io
import itertools
import pickle
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings, strategies as st

from quantshard import QuantizedTensor, numerics, recipe, requantize_
from quantshard.collectives.flat_max import FlatMax
from quantshard.errors import UnsupportedOperationError
from quantshard.formats import FORMATS, FP8_E4M3, Orientation, Scaling
from quantshard.recipe import NAMES, QuantSpec
from quantshard.sharding import ceil_div, pieces_outermost_first, whole
from quantshard.tensor import parameter_state, storage as storages
from quantshard.tensor.parameter_state import AMAX_HISTORY, RNG_DRAWS, RNG_KEY
from quantshard.tensor.requantize import Requantization
from tests.covering import by_turns, exhaustive, in_turns
from tests.weights import quantize_weight

RECIPES = {
    **{kind().name: kind() for kind in NAMES.values() if kind().weight is not None},
    "mxfp8 twice": recipe.MXFP8BlockScaling(enable_2d_quantization=False),
    "nvfp4 twice": recipe.NVFP4BlockScaling(disable_2d_quantization=True),
    "delayed newest": recipe.DelayedScaling(margin=1, amax_history_len=2, amax_compute_algo="most_recent"),
    "current pow2": recipe.Float8CurrentScaling(use_power_2_scales=True),
}
"""Every recipe that quantizes weights, and variants that store or scale them differently."""

every_recipe = pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
CELLS = {name: r.weight for name, r in RECIPES.items()}
every_cell = pytest.mark.parametrize("cell", CELLS.values(), ids=CELLS)
ROWS = {r.weight: name for name, r in RECIPES.items()} | {QuantSpec(fmt): fmt.name for fmt in FORMATS.values()}
every_row = pytest.mark.parametrize("cell", ROWS, ids=ROWS.values())

MXFP8 = RECIPES["mxfp8"].weight
NVFP4 = RECIPES["nvfp4"].weight


def random(*shape, seed=0, dtype=torch.float32):
    """Normal numbers, with rows of different magnitude."""
    generator = torch.Generator().manual_seed(seed)
    magnitude = torch.randn(shape[0], 1, generator=generator).mul(3).exp2()
    return (torch.randn(shape, generator=generator) * magnitude).to(dtype)


def weight(cell, rows=48, cols=40, seed=0, dtype=torch.float32, **options):
    torch.manual_seed(seed)
    return quantize_weight(random(rows, cols, seed=seed), cell, dtype=dtype, **options)


def write(tensor, values):
    """What an optimizer does: unlike `quantize_` it keeps the amax history of delayed scaling."""
    Requantization(tensor.quantized_storage, values, {}, FlatMax()).commit(values)


def raw(tensor):
    """The bytes of a plain tensor, so that NaNs and zeros of either sign compare as what they are."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def same(a, b):
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(raw(a), raw(b))


def differing(a, b):
    """Names of the tensors of two dicts that are not bitwise equal."""
    return sorted(n for n in a.keys() | b.keys() if n not in a or n not in b or not same(a[n], b[n]))


def contents(tensor):
    """Copies of all that a quantized tensor holds: components and state."""
    held = tensor.quantized_storage.components | {
        f"state {name}": t for name, t in tensor.quantized_storage.state.items()
    }
    return {name: t.clone() for name, t in held.items()}


def oracle(values, cell):
    return numerics.quantize(values, cell.format, cell.scaling)


# ------------------------------------------------------------------------------------------------------------- values


@by_turns(
    2,
    cell={name: cell for cell, name in ROWS.items()},
    shape=[(1, 1), (33, 47), (48, 40), (130, 257)],
    dtype=[torch.float32, torch.bfloat16],
)
def test_quantize_and_dequantize_are_the_oracle(cell, shape, dtype):
    values = random(*shape, dtype=dtype)
    tensor = quantize_weight(values, cell)
    parts = oracle(values, cell)
    assert tensor.shape == shape and tensor.dtype == dtype
    assert not differing(tensor.quantized_storage.components, parts)
    for copy_ in cell.format.copies.values():
        expected = numerics.dequantize(copy_, parts, shape)
        assert same(tensor.quantized_storage.dequantize(copy_.codes.copy), expected)
    first = cell.format.copies[Orientation.ROWWISE]
    assert same(tensor.dequantize(), numerics.dequantize(first, parts, shape).to(dtype))


@every_cell
def test_dtype_is_nominal(cell):
    values = random(48, 40)
    tensor = quantize_weight(values, cell, dtype=torch.bfloat16)
    assert tensor.dtype == tensor.dequantize().dtype == torch.bfloat16
    assert not differing(tensor.quantized_storage.components, oracle(values, cell))
    assert same(tensor.dequantize(dtype=torch.float32).bfloat16(), tensor.dequantize())


def test_delayed_scales_are_those_of_past_amaxes():
    cell = recipe.DelayedScaling(amax_history_len=2, margin=1).weight
    tensor = quantize_weight(torch.tensor([[1.0, -4.0]]), cell)
    history, scale = tensor.quantized_storage.state[AMAX_HISTORY], tensor.quantized_storage.components["scale_inv"]
    scales, histories = [scale.item()], [history.tolist()]
    for amax in (2.0, 1.0, 0.0, float("inf"), 8.0, 0.5):
        write(tensor, torch.tensor([[amax, 0.25]]).clamp(max=amax))
        scales.append(scale.item())
        histories.append(history.tolist())
    used = [4, 4, 4, 2, 2, 8, 8]  # of the tensor itself, then the largest of the last two and its own if that is finite
    assert scales == [pytest.approx(amax / 224, rel=1e-6) for amax in used]
    assert histories == [[0, 4], [4, 2], [2, 1], [2, 1], [2, 1], [1, 8], [8, 0.5]]  # no zero, no infinity


def test_delayed_scale_of_the_newest_amax():
    tensor = quantize_weight(torch.full((2, 2), 4.0), RECIPES["delayed newest"].weight)
    for amax, used in ((2.0, 4), (1.0, 2), (3.0, 3)):
        write(tensor, torch.full((2, 2), amax))
        assert tensor.quantized_storage.components["scale_inv"].item() == pytest.approx(used / 224, rel=1e-6)


@every_cell
def test_gradients_flow_through_dequantize(cell):
    parameter = torch.nn.Parameter(weight(cell, dtype=torch.bfloat16))
    upstream = random(48, 40, seed=1)
    (parameter.dequantize(dtype=torch.float32) * upstream).sum().backward()
    assert type(parameter.grad) is torch.Tensor
    assert same(parameter.grad, upstream.bfloat16())


@every_cell
def test_quantize_in_place(cell):
    """As if born with the new values; in the same components."""
    values, tensor = random(48, 40, seed=1), weight(cell)
    held = dict(tensor.quantized_storage.components)
    assert tensor.quantize_(values.bfloat16()) is tensor
    assert not differing(held, oracle(values.bfloat16(), cell))
    assert all(tensor.quantized_storage.components[name] is part for name, part in held.items())


@by_turns(3, cell=CELLS, flag=[torch.ones(1), torch.tensor(2), torch.tensor([True])])
def test_noop_flag_changes_nothing(cell, flag):
    tensor = weight(cell)
    before = contents(tensor)
    tensor.quantize_(random(48, 40, seed=1), noop_flag=flag)
    assert not differing(before, contents(tensor))
    tensor.quantize_(random(48, 40, seed=1), noop_flag=torch.zeros_like(flag))
    assert differing(before, contents(tensor))


@by_turns(2, cell=CELLS, shape=[(40, 48), (48, 39), (1, 40), (1,), (48 * 40,)])
def test_quantize_in_place_of_another_shape(cell, shape):
    tensor = weight(cell)
    before = contents(tensor)
    with pytest.raises(UnsupportedOperationError, match=r"48, 40"):
        tensor.quantize_(torch.ones(shape))
    assert not differing(before, contents(tensor))


@pytest.mark.parametrize("values", [torch.ones(4), torch.ones(4, 4, dtype=torch.int64), torch.ones(2, 2).bool()])
def test_what_is_no_matrix_of_floats_is_refused(values):
    with pytest.raises(UnsupportedOperationError, match="quantize_ needs floats"):
        quantize_weight(
            torch.ones(values.shape if values.ndim == 2 else (2, 2)), recipe.resolve("block").weight
        ).quantize_(values)


def test_quantize_in_place_through_the_flat_handle():
    values, tensor = random(48, 40, seed=1), weight(MXFP8)
    tensor.view(-1).quantize_(values.view(-1))
    assert not differing(tensor.quantized_storage.components, oracle(values, MXFP8))
    with pytest.raises(UnsupportedOperationError, match="1920"):
        tensor.view(-1).quantize_(values)


@every_row
def test_quantize_in_place_of_a_shard(cell):
    """Refused, and by name, where a block straddles shards; else it is what the whole would hold."""
    values = random(256, 40, seed=1)
    for world in (2, 5):
        torch.manual_seed(0)
        for shard in torch.chunk(weight(cell, 256), world):
            rows = slice(*shard.quantized_storage.shard.extents[0])
            before = contents(shard)
            if any(shard.quantized_storage.shard.shares_blocks(c) for c in cell.format.components):
                with pytest.raises(UnsupportedOperationError, match=r"share its scales.*requantize_"):
                    shard.quantize_(values[rows])
                assert not differing(before, contents(shard))
            else:
                shard.quantize_(values[rows])
                assert not differing(resident(oracle(values, cell), shard), shard.quantized_storage.components)


def test_straddling_shards_are_found():
    """The two sides of the test above, by hand: 256 rows in 2 and in 5 pieces."""
    shares = {
        (cell.format.name, world): torch.chunk(weight(cell, 256), world)[0].quantized_storage.shard.shares_blocks(
            cell.format.by_name["scale_inv"]
        )
        for cell in (MXFP8, RECIPES["block"].weight, RECIPES["current"].weight)
        for world in (2, 5)
    }
    assert list(shares.values()) == [False, True, False, True, True, True]


# ------------------------------------------------------------------------------------------- cut, then give new values


def resident(parts, shard):
    """The entries of whole components that one shard holds."""
    by_name = shard.quantized_storage.spec.format.by_name
    slices = {name: shard.quantized_storage.shard.resident(by_name[name]) for name in parts}
    return {name: part[slice(*slices[name][0]), slice(*slices[name][1])] for name, part in parts.items()}


def cut(tensor, axes):
    """The storages of all ranks, each with its own tensors and state, after cutting by (dim, pieces) in turn."""
    shards = [tensor.quantized_storage]
    for dim, world in axes:
        chunks = [(s, ceil_div(s.shard.shape[dim], world)) for s in shards]
        shards = [s.piece(dim, rank * chunk, chunk) for s, chunk in chunks for rank in range(world)]
    return [QuantizedTensor(storage.clone(), tensor.dtype) for storage in shards]


class Registered:
    """Stands for the collective of one rank: keeps what `Requantization` registers for it."""

    def __init__(self):
        self.grids = []

    def add(self, grid, group):
        self.grids += [] if group is None else [grid]


def flat_max(grids):
    """What `FlatMax` makes of the grids of ranks, all of them in this process."""
    sent, highest = [], None

    def all_reduce(flat, op, group):
        sent.append(flat.clone())
        if highest is not None:
            flat.copy_(highest)

    nowhere = mock.patch("quantshard.collectives.flat_max.collective_device", lambda group: torch.device("cpu"))
    with nowhere, mock.patch.object(torch.distributed, "all_reduce", all_reduce):
        for _ in range(2):  # to see what every rank sends, then to answer
            for grid in grids:
                reduction = FlatMax()
                reduction.add(grid, "a group")
                reduction.reduce()
            highest = torch.stack(sent).amax(0)


def reduce_on_ranks(shards, registered):
    """The collectives: every grid is reduced over the ranks that hold it."""
    by_place = {}
    for shard, own in zip(shards, registered, strict=True):
        for name, grid in zip(shared_names(shard), own.grids, strict=True):
            place = (name, shard.quantized_storage.shard.resident(shard.quantized_storage.spec.format.by_name[name]))
            by_place.setdefault(place, []).append(grid)
    for grids in by_place.values():
        if grids[0].numel():
            flat_max(grids)


def shared_names(shard):
    storage = shard.quantized_storage
    by_name = storage.spec.format.by_name
    return [n for n in storages.scale_names(storage.spec) if storage.shard.shares_blocks(by_name[n])]


def requantize_on_ranks(shards, values):
    """What `requantize_` does, with all ranks in this process."""
    parts = [values[tuple(slice(*extent) for extent in shard.quantized_storage.shard.extents)] for shard in shards]
    registered = [Registered() for _ in shards]
    begun = [
        Requantization(shard.quantized_storage, part, dict.fromkeys(shared_names(shard), "those that hold it"), own)
        for shard, part, own in zip(shards, parts, registered, strict=True)
    ]
    reduce_on_ranks(shards, registered)
    for requantization, part in zip(begun, parts, strict=True):
        requantization.commit(part)


SPECIALS = [0.0, -0.0, float("inf"), -float("inf"), float("nan"), 1e-45, 1e-30, 3e38, 448.0, 6.0]
sizes = st.one_of(st.integers(1, 40), st.sampled_from([64, 96, 127, 128, 129, 160, 256]))


@st.composite
def problems(draw):
    """A tensor with a few special values (a part of them zeros), and cuts of it: at most one of either dim, then dim 0.

    Cuts of dim 1 fall on whole bytes of packed codes.
    """
    rows, cols = draw(sizes), draw(sizes)
    axes = [(0, draw(st.integers(1, 5)))]
    if draw(st.booleans()):
        dim, world = draw(st.integers(0, 1)), draw(st.integers(1, 3))
        cols = ceil_div(cols, 2 * world) * 2 * world if dim else cols
        axes.insert(0, (dim, world))
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16]))
    values = random(rows, cols, seed=draw(st.integers(0, 99)), dtype=dtype)
    for special in draw(st.lists(st.sampled_from(SPECIALS), max_size=3)):
        at = draw(st.integers(0, rows * cols - 1))
        length = draw(st.sampled_from([1, 1, 50, rows * cols]))
        values.view(-1)[at : at + length] = special
    return values, axes


@every_row
@settings(max_examples=10, suppress_health_check=[HealthCheck.too_slow])
@given(problem=problems())
@example(problem=(torch.full((1, 40), 3.0), [(0, 3)]))  # fewer rows than ranks
@example(problem=(torch.full((33, 64), float("nan")).neg(), [(0, 2)]))
def test_cut_then_requantize_is_requantize_then_cut(cell, problem):
    values, axes = problem
    tensor = quantize_weight(torch.zeros(values.shape), cell, dtype=values.dtype)
    shards = cut(tensor, axes)
    requantize_([(tensor, values)], assume_finite=True)  # as they are, finite or not
    requantize_on_ranks(shards, values)
    state = tensor.quantized_storage.state
    for shard in shards:
        assert not differing(shard.quantized_storage.components, resident(tensor.quantized_storage.components, shard))
        assert not differing(shard.quantized_storage.state, state)
        rectangle = tuple(slice(*extent) for extent in shard.quantized_storage.shard.extents)
        torch.testing.assert_close(shard.dequantize(), tensor.dequantize()[rectangle], rtol=0, atol=0, equal_nan=True)


def test_the_reduction_is_needed():
    """Without it the test above must fail: a straddling block would have two scales."""
    values = random(33, 64)
    shards = cut(weight(MXFP8, 33, 64), [(0, 2)])
    for shard in shards:
        part = values[slice(*shard.quantized_storage.shard.extents[0])]
        shard.quantized_storage.write(part, shard.quantized_storage.measure(part))
    whole_parts = oracle(values, MXFP8)
    assert any(differing(shard.quantized_storage.components, resident(whole_parts, shard)) for shard in shards)


@every_row
def test_measure_is_zero_outside_the_shard(cell):
    for shard in cut(weight(cell), [(0, 3)]):
        storage = shard.quantized_storage
        part = torch.ones(storage.shard.shape)
        for name, grid in storage.measure(part).items():
            component = cell.format.by_name[name]
            assert grid.shape == storage.components[name].shape
            expected = torch.zeros_like(grid)
            expected[storage.shard.touched(component)] = float(part.numel() > 0)
            assert same(grid, expected)


@every_cell
def test_requantize_of_whole_weights_is_quantize_in_place(cell):
    one, two = weight(cell), weight(cell, 5, 64)
    twins = copy.deepcopy([one, two])
    values = [random(48, 40, seed=1), random(5, 64, seed=2)]
    requantize_(zip([one, two], values, strict=True))
    for tensor, twin, new in zip([one, two], twins, values, strict=True):
        assert not differing(contents(tensor), contents(twin.quantize_(new)))


# ------------------------------------------------------------------------------------------------------- FSDP2's hooks


def gather(shards, **options):
    """FSDP2's all-gather with all ranks in this process: what every rank then has."""
    mesh = SimpleNamespace(size=lambda: len(shards))
    sent = [shard.fsdp_pre_all_gather(mesh) for shard in shards]
    outputs = tuple(torch.cat(parts) for parts in zip(*(inputs for inputs, _ in sent), strict=True))
    dtype = shards[0].dtype
    return [s.fsdp_post_all_gather(outputs, m, dtype, **options) for s, (_, m) in zip(shards, sent, strict=True)]


GATHERED = ROWS.values(), [(1, 40), (5, 16), (33, 47), (96, 64), (300, 40)], [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("row", "shape", "world"), exhaustive(itertools.product(*GATHERED), in_turns(*GATHERED)), ids=str
)
def test_gathered_is_what_one_process_holds(row, shape, world):
    tensor = weight({name: cell for cell, name in ROWS.items()}[row], *shape)
    for gathered, inner in gather(cut(tensor, [(0, world)])):
        assert gathered.shape == shape and inner == ()
        assert gathered.quantized_storage.shard == whole(shape)
        assert not differing(contents(gathered), contents(tensor))


@every_cell
def test_the_next_gather_fills_the_first_ones_tensor(cell):
    first, second = weight(cell), weight(cell, seed=1)
    gathered = gather(cut(first, [(0, 3)]))[0][0]
    assert gather(cut(second, [(0, 3)]), out=gathered) == [None] * 3
    assert not differing(contents(gathered), contents(second))


@every_cell
def test_a_gather_sends_codes_and_scales_that_others_lack(cell):
    """In bytes: a rank sends its part (or the padded part) of every copy, and of scales only if they are not shared."""
    shards = cut(weight(cell, 256, 64), [(0, 2)])
    for shard in shards:
        inputs, _ = shard.fsdp_pre_all_gather(SimpleNamespace(size=lambda: 2))
        own = shard.quantized_storage.components
        shared = shared_names(shard)
        assert sum(t.nbytes for t in inputs) == sum(part.nbytes for n, part in own.items() if n not in shared)
        assert len(inputs) == len(own) - len(shared)


# ---------------------------------------------------------------------------------------- kept high-precision values


@every_cell
def test_kept_initial_values(cell):
    values = random(48, 40)
    tensor = quantize_weight(values, cell, dtype=torch.bfloat16, keep_high_precision=True)
    values.mul_(2)  # what is kept is a copy
    assert same(tensor.get_high_precision_init_val(), random(48, 40))
    assert same(tensor.detach().get_high_precision_init_val(), random(48, 40))
    tensor.clear_high_precision_init_val()
    assert tensor.get_high_precision_init_val() is None
    assert weight(cell).get_high_precision_init_val() is None


@pytest.mark.parametrize("world", [1, 2, 5, 50])
def test_kept_initial_values_are_cut_with_the_weight(world):
    values = random(48, 40)
    tensor = quantize_weight(values, MXFP8, keep_high_precision=True)
    chunks = torch.chunk(tensor, world)
    kept = [chunk.get_high_precision_init_val() for chunk in chunks]
    assert [k.shape for k in kept] == [chunk.shape for chunk in chunks]
    assert same(torch.cat(kept), values)
    chunks[0].clear_high_precision_init_val()
    assert tensor.get_high_precision_init_val() is not None
    past_the_end = tensor.quantized_storage.piece(0, 48, 24)
    assert past_the_end.high_precision.shape == (0, 40)


def test_new_values_replace_the_kept_ones():
    """Else an optimizer built later would seed its master from values that the weight no longer has."""
    tensor = quantize_weight(random(48, 40), MXFP8, keep_high_precision=True)
    tensor.quantize_(random(48, 40, seed=1))
    kept = tensor.get_high_precision_init_val()
    assert kept is None or same(kept, random(48, 40, seed=1))


# ---------------------------------------------------------------------------------------------------- Python protocol


@every_cell
@pytest.mark.parametrize("world", [1, 3])
def test_flatten_and_unflatten(cell, world):
    for tensor in cut(weight(cell, dtype=torch.bfloat16), [(0, world)]):
        names, meta = tensor.__tensor_flatten__()
        hash(meta)  # torch.compile guards on it
        inner = {name: getattr(tensor, name) for name in names}
        assert {id(t) for t in inner.values()} == {
            id(t) for t in (tensor.quantized_storage.components | tensor.quantized_storage.state).values()
        }
        again = QuantizedTensor.__tensor_unflatten__(inner, meta, tensor.shape, tensor.stride())
        assert again.shape == tensor.shape and again.dtype == tensor.dtype
        assert (again.quantized_storage.spec, again.quantized_storage.shard) == (
            tensor.quantized_storage.spec,
            tensor.quantized_storage.shard,
        )
        assert not differing(contents(again), contents(tensor))


def test_unknown_attributes():
    tensor = weight(MXFP8)
    for name in ("component_amax", "state_amax_history", "scale_inv"):
        assert not hasattr(tensor, name)


@pytest.mark.parametrize(
    "write",
    [
        pickle.dumps,
        lambda t: torch.save(t, io.BytesIO()),
        lambda t: torch.save({"x": torch.nn.Parameter(t)}, io.BytesIO()),
    ],
)
def test_pickling_a_shard_names_the_way_out(write):
    with pytest.raises(UnsupportedOperationError, match=r"QuantizedTensor\(mxfp8.*state_dict\(\)"):
        write(cut(weight(MXFP8), [(0, 2)])[1])


@every_cell
def test_repr(cell):
    tensor = weight(cell, dtype=torch.bfloat16)
    expected = f"QuantizedTensor({cell.tag}, shape=(48, 40), dtype=torch.bfloat16, device=cpu"
    assert repr(tensor) == str(tensor) == f"{expected})"
    assert cell.tag in repr(torch.nn.Parameter(tensor))
    piece = torch.chunk(tensor, 2)[1]
    assert repr(piece) == f"{expected.replace('48', '24')}, origin=(24, 0) of (48, 40))"
    assert "placeholder" in repr(tensor.new_zeros(24, 40))


@every_row
def test_meta(cell):
    """Described only: shapes, dtypes and a key, which is that of the same tensor made on the CPU."""
    torch.manual_seed(5)
    tensor = quantize_weight(torch.empty(48, 40, dtype=torch.bfloat16, device="meta"), cell)
    torch.manual_seed(5)
    real = quantize_weight(random(48, 40, dtype=torch.bfloat16), cell)
    assert tensor.is_meta and tensor.dtype == torch.bfloat16 and tensor.shape == (48, 40)
    described = {n: (t.shape, t.dtype, t.device.type) for n, t in tensor.quantized_storage.components.items()}
    assert described == {n: (t.shape, t.dtype, "meta") for n, t in real.quantized_storage.components.items()}
    state = tensor.quantized_storage.state
    assert state.keys() == real.quantized_storage.state.keys()
    assert same(state[RNG_KEY], real.quantized_storage.state[RNG_KEY]) and same(
        state[RNG_DRAWS], real.quantized_storage.state[RNG_DRAWS]
    )
    chunks = torch.chunk(tensor, 3)
    assert [chunk.shape for chunk in chunks] == [(16, 40)] * 3 and all(chunk.is_meta for chunk in chunks)


def test_keys_come_from_torchs_seed():
    tensors = [
        weight(MXFP8, seed=1),
        weight(MXFP8, seed=2),
        weight(MXFP8, seed=1),
        quantize_weight(random(2, 2), MXFP8),
    ]
    keys = [t.quantized_storage.state[RNG_KEY] for t in tensors]
    assert all(key.dtype == torch.int64 and key.shape == (1,) for key in keys)
    assert same(keys[0], keys[2])
    assert len({key.item() for key in keys}) == 3  # the last two were drawn one after the other


def test_a_given_state_is_used():
    state = parameter_state.weight_state(MXFP8, "cpu")
    assert weight(MXFP8, state=state).quantized_storage.state is state


# ------------------------------------------------------------------------------------------------------ torch.compile


@pytest.mark.parametrize("name", [pytest.param("mxfp8", marks=pytest.mark.exhaustive), "nvfp4", "delayed"])
def test_compiled_dequantize(name):
    parameter = torch.nn.Parameter(weight(RECIPES[name].weight))
    before = contents(parameter)

    def doubled(p):
        return p.dequantize() * 2

    result = torch.compile(doubled, fullgraph=True, backend="aot_eager")(parameter)
    assert same(result, doubled(parameter))
    result.sum().backward()
    assert same(parameter.grad, torch.full((48, 40), 2.0))
    assert not differing(before, contents(parameter))


# --------------------------------------------------------------------------------------------------- the storage alone


@every_row
def test_pieces_are_views(cell):
    """Cutting copies nothing: each piece's components are parts of the whole's memory."""
    tensor = weight(cell, 256, 64)
    for piece in torch.chunk(tensor, 3):
        for name, part in piece.quantized_storage.components.items():
            whole_part = tensor.quantized_storage.components[name]
            assert part.untyped_storage().data_ptr() == whole_part.untyped_storage().data_ptr()
        assert piece.quantized_storage.state is tensor.quantized_storage.state
        assert pieces_outermost_first(piece.quantized_storage.shard) == [piece.quantized_storage.shard]


@every_row
def test_storage_knows_its_copies(cell):
    storage = weight(cell).quantized_storage
    assert [which for which in Orientation if storage.has(which)] == list(cell.format.copies)
    assert storage.device.type == "cpu"


@pytest.mark.parametrize(("scaling", "entries"), [(Scaling(), None), (Scaling(history=3), 3)])
def test_weight_state(scaling, entries):
    state = parameter_state.weight_state(QuantSpec(FP8_E4M3, scaling), "cpu")
    assert state[RNG_DRAWS].tolist() == [0] and state[RNG_DRAWS].dtype == torch.int64
    assert (AMAX_HISTORY in state) == (entries is not None)
    if entries:
        assert same(state[AMAX_HISTORY], torch.zeros(entries))
    assert parameter_state.weight_state(None, "cpu").keys() == {RNG_KEY, RNG_DRAWS}
