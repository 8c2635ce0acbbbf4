"""Amax histories, the flat reduction and what is pending, in one process; the collectives are in tests/distributed."""

import gc
import weakref

import pytest
import torch
from hypothesis import given, settings, strategies as st

from quantshard import QuantizedTensor, kernel_dispatch, requantize_
from quantshard.collectives import flat_max as flat
from quantshard.collectives.delayed_scaling import (
    MISMATCHES,
    PendingAmaxes,
    history_amax,
    record_amax_,
    record_amaxes_,
)
from quantshard.collectives.flags import MismatchRecord
from quantshard.collectives.flat_max import FlatMax
from quantshard.collectives.process_groups import sharding_group, united
from quantshard.collectives.rank_checks import check_equal_on_ranks
from quantshard.errors import ConfigurationError, RankMismatchError
from quantshard.kernels.workspace import launch_queue
from quantshard.modules.graphs.module_graph import AmaxRecord
from quantshard.optimizers import FusedAdam, MasterWeights
from quantshard.tensor import requantize
from quantshard.tensor.parameter_state import AMAX_HISTORY
from quantshard.tensor.requantize import Requantization, shared_scales
from tests.tensor.test_tensor import MXFP8, RECIPES, contents, differing, every_cell, flat_max, random, same, weight
from tests.weights import quantize_weight

INF, NAN = float("inf"), float("nan")
amaxes = st.floats(width=32, min_value=0) | st.just(NAN)


QUEUE = torch.device("cpu"), 0, False


def history(*values):
    return torch.tensor(values, dtype=torch.float32)


@pytest.fixture(autouse=True)
def groups_are_names(monkeypatch):
    """No process group exists here, so none has a device."""
    monkeypatch.setattr(flat, "collective_device", lambda group: torch.device("cpu"))


# ----------------------------------------------------------------------------------------------------------- histories


@pytest.mark.parametrize(
    ("values", "largest", "newest"),
    [((0, 0, 0), 0, 0), ((0, 0, 3), 3, 3), ((5, 1, 2), 5, 2), ((4,), 4, 4), ((2, 8, 0.5), 8, 0.5)],
)
def test_what_a_history_stands_for(values, largest, newest):
    kept = history(*values)
    assert history_amax(kept, most_recent=False) == largest
    assert history_amax(kept, most_recent=True) == newest
    assert history_amax(kept, most_recent=True).shape == history_amax(kept, most_recent=False).shape == ()


@pytest.mark.parametrize("most_recent", [True, False])
def test_what_a_history_stands_for_is_a_copy(most_recent):
    """The scale in use must not change when the next amax is recorded."""
    kept = history(1, 2)
    found = history_amax(kept, most_recent)
    kept.fill_(9)
    assert found == 2


@pytest.mark.parametrize("length", [1, 2, 3, 5])
def test_the_newest_are_kept_in_order(length):
    kept = torch.zeros(length)
    for value in (1.0, 5.0, 2.0, 4.0):
        record_amax_(kept, torch.tensor(value))
    assert kept.tolist() == [0, 1, 5, 2, 4][-length:]


@pytest.mark.parametrize("by_kernel", [False, True])
def test_histories_of_several_lengths_are_recorded_together(by_kernel, monkeypatch):
    if by_kernel:
        pytest.importorskip("triton")
        monkeypatch.setattr(kernel_dispatch, "KERNEL_DEVICES", {"cpu"})
        if torch.cuda.is_available():
            pytest.skip("kernels are compiled, and these tensors are on the CPU")
    kept = [history(1, 2), history(3, 4, 5), history(6, 7), history(8)]
    addresses = [each.data_ptr() for each in kept]
    record_amaxes_(kept, torch.tensor([10.0, 11.0, NAN, 12.0]))
    assert [each.tolist() for each in kept] == [[2, 10], [4, 5, 11], [6, 7], [12]]
    assert [each.data_ptr() for each in kept] == addresses


@pytest.mark.parametrize("bad", [0.0, -0.0, INF, NAN])
def test_zero_and_non_finite_amaxes_are_not_recorded(bad):
    kept = history(1, 2, 3)
    record_amax_(kept, torch.tensor(bad))
    assert kept.tolist() == [1, 2, 3]


def test_recording_is_in_place():
    kept = history(1, 2)
    address, amax_ = kept.data_ptr(), torch.tensor(3.0)
    assert record_amax_(kept, amax_) is None
    assert kept.data_ptr() == address and kept.tolist() == [2, 3] and amax_ == 3


@given(st.lists(amaxes, max_size=8), st.integers(1, 4))
def test_histories_hold_the_last_good_amaxes(values, length):
    kept = torch.zeros(length)
    for value in values:
        record_amax_(kept, torch.tensor(value))
    good = [value for value in values if 0 < value < INF]
    assert kept.tolist() == ([0.0] * length + good)[-length:]


# ------------------------------------------------------------------------------------------------------------- FlatMax


def test_without_a_group_nothing_changes():
    """Nor is there a collective: torch.distributed is not initialized here."""
    reduction, grid = FlatMax(), history(1, NAN, INF)
    before = grid.clone()
    reduction.add(grid, None)
    reduction.reduce()
    assert same(grid, before)


def test_empty_tensors_are_not_sent():
    reduction = FlatMax()
    reduction.add(torch.zeros(0, 4), "a group")
    reduction.reduce()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.int32])
def test_other_dtypes_than_float32_are_refused(dtype):
    """Their bits would be compared two by two, or half by half."""
    with pytest.raises(AssertionError, match=f"not of {dtype}"):
        FlatMax().add(torch.zeros(2, dtype=dtype), "a group")


def test_reduce_is_one_collective_a_group_and_begins_anew(monkeypatch):
    calls = []
    monkeypatch.setattr(
        torch.distributed, "all_reduce", lambda flat, op, group: calls.append((group, flat.numel(), op))
    )
    reduction = FlatMax()
    for shape, group in (((2, 3), "a"), ((4,), "b"), ((0, 5), "a"), ((), "a"), ((1, 2), "b")):
        reduction.add(torch.ones(shape), group)
    reduction.reduce()
    highest = torch.distributed.ReduceOp.MAX
    assert calls == [("a", 7, highest), ("b", 6, highest)]
    reduction.reduce()
    assert len(calls) == 2


def test_several_groups_are_reduced_one_after_the_other(monkeypatch):
    """What needs both gets the second maximum of the first; the order is that of the groups, empty tensors included."""
    calls = []

    def all_reduce(flat, op, group):
        calls.append((group, flat.view(torch.float32).tolist()))
        flat.view(torch.float32).mul_(10)

    monkeypatch.setattr(torch.distributed, "all_reduce", all_reduce)
    reduction, rows, both, columns = FlatMax(), torch.ones(1), torch.full((2,), 2.0), torch.full((1,), 3.0)
    for tensor, group in ((torch.zeros(0), "rows"), (columns, "columns"), (both, ("rows", "columns")), (rows, "rows")):
        reduction.add(tensor, group)
    reduction.reduce()
    assert calls == [("rows", [2, 2, 1]), ("columns", [3, 20, 20])]
    assert (rows.tolist(), both.tolist(), columns.tolist()) == ([10], [200, 200], [30])


def test_padded_to_a_power_of_two(monkeypatch):
    sizes = []
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda flat, op, group: sizes.append(flat.numel()))
    for numel in (1, 1024, 1025):
        reduction, tensor = FlatMax(padded=True), torch.ones(numel)
        reduction.add(tensor, "a")
        reduction.reduce()
        assert tensor.eq(1).all()
    assert sizes == [1024, 1024, 2048]


def test_united_groups_have_each_member_once():
    assert united([("a", "b"), None, "c", ("b",), ()]) == ("a", "b", "c")


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize(
    ("values", "highest"),
    [
        ((1, 2), 2),
        ((0, 0), 0),
        ((1, INF), INF),
        ((0, 1e-45), 1e-45),
        ((1, NAN), NAN),
        ((INF, NAN), NAN),
        ((1, -NAN), NAN),
    ],
)
def test_the_order_of_values(values, highest, order):
    """NaN is above infinity, whatever its sign: torch's vectorized amax gives negative ones."""
    grids = [torch.tensor([[float(value)]]) for value in values[::order]]
    flat_max(grids)
    for grid in grids:
        torch.testing.assert_close(grid, torch.tensor([[float(highest)]]), rtol=0, atol=0, equal_nan=True)


def test_a_negative_nan_survives():
    grids = [history(1.0), history(0.0)]
    grids[1].view(torch.int32).fill_(-1)  # what amax over dim 0 gives
    assert torch.isnan(grids[1]).all()
    flat_max(grids)
    assert torch.isnan(torch.cat(grids)).all()


@settings(max_examples=50)
@given(st.lists(st.lists(amaxes, min_size=3, max_size=3), min_size=1, max_size=4))
def test_all_ranks_get_the_maximum(ranks):
    grids = [torch.tensor(values).view(3, 1) for values in ranks]
    expected = torch.stack(grids).amax(0)
    flat_max(grids)
    for grid in grids:
        torch.testing.assert_close(grid, expected, rtol=0, atol=0, equal_nan=True)
        assert same(grid, grids[0])


# ------------------------------------------------------------------------------------------------------ requantization


@every_cell
def test_measuring_writes_nothing(cell):
    tensor, values = weight(cell), random(48, 40, seed=1)
    before = contents(tensor)
    begun = Requantization(tensor.quantized_storage, values, {}, FlatMax())
    assert not differing(before, contents(tensor))
    begun.commit(values)
    assert differing(before, contents(tensor))


def test_requantize_of_several_weights_registers_all_before_it_writes(monkeypatch):
    tensors, log = [weight(MXFP8), weight(RECIPES["delayed"].weight)], []
    before = [contents(tensor) for tensor in tensors]

    def reduce(self):
        log.append([bool(differing(old, contents(t))) for old, t in zip(before, tensors, strict=True)])

    monkeypatch.setattr(FlatMax, "reduce", reduce)
    requantize_((tensor, random(48, 40, seed=1)) for tensor in tensors)
    assert log == [[False, False]]
    assert all(differing(old, contents(t)) for old, t in zip(before, tensors, strict=True))


def test_requantize_of_nothing():
    requantize_([])


@pytest.mark.parametrize("first", [0.0, INF, NAN])
def test_a_weight_without_a_usable_amax_records_none(first):
    """Delayed scaling begins with the first amax that can be used; until then the scale is 1.

    Whoever writes infinities unjudged, as an optimizer that skipped no step, finds them gone.
    """
    tensor = weight(RECIPES["delayed"].weight, 4, 4)
    tensor.quantized_storage.state[AMAX_HISTORY].zero_()
    requantize.requantize_([(tensor, torch.full((4, 4), first))], assume_finite=True)
    assert not tensor.quantized_storage.state[AMAX_HISTORY].any()
    assert tensor.quantized_storage.components["scale_inv"].item() == 1.0


@pytest.mark.parametrize("tensor", [torch.zeros(2), torch.nn.Parameter(torch.zeros(2))])
def test_plain_tensors_have_no_group(tensor):
    assert sharding_group(tensor) == ()


def test_quantized_tensors_have_no_group_of_their_own():
    assert sharding_group(weight(MXFP8)) == () and shared_scales(weight(MXFP8), weight(MXFP8).quantized_storage) == {}


def test_keys_need_no_check_without_a_group():
    check_equal_on_ranks({"w": torch.zeros(1, dtype=torch.int64)}, None, "the key")
    check_equal_on_ranks({}, "a group", "the key")


# ------------------------------------------------------------------------------------------------------------- pending


def key(number):
    return torch.tensor([number], dtype=torch.int64)


def note(pending, key, number, history, amax, group):
    slot = pending.slot([key], number, [history], group, launch_queue(amax.device))
    torch.maximum(slot, amax, out=slot)


def test_pending_amaxes_are_recorded_at_flush():
    pending, one, two = PendingAmaxes(), torch.zeros(3), torch.zeros(2)
    assert not pending
    note(pending, key(1), 0, one, torch.tensor(5.0), None)
    note(pending, key(2), 0, two, torch.tensor(7.0), None)
    assert pending and not one.any() and not two.any()
    pending.flush()
    assert one.tolist() == [0, 0, 5] and two.tolist() == [0, 7] and not pending
    pending.flush()
    assert one.tolist() == [0, 0, 5]


@pytest.mark.parametrize(
    ("values", "kept"), [((2, 5, 3), 5), ((5, 2), 5), ((2, 2), 2), ((0, 3), 3), ((3, INF), 0), ((NAN, 3), 0)]
)
def test_amaxes_of_one_history_are_merged(values, kept):
    """Micro-batches of one step make one entry: their maximum, or none if one of them was not finite."""
    pending, seen = PendingAmaxes(), torch.zeros(3)
    for value in values:
        note(pending, key(1), 0, seen, torch.tensor(float(value)), None)
    pending.flush()
    assert seen.tolist() == [0, 0, kept]


def test_equal_histories_are_told_apart():
    """By identity, not by value."""
    pending, first, second = PendingAmaxes(), torch.zeros(2), torch.zeros(2)
    note(pending, key(1), 0, first, torch.tensor(1.0), None)
    note(pending, key(2), 0, second, torch.tensor(2.0), None)
    pending.flush()
    assert (first.tolist(), second.tolist()) == ([0, 1], [0, 2])


def test_dropped_amaxes_are_forgotten():
    pending, seen = PendingAmaxes(), torch.zeros(3)
    note(pending, key(1), 0, seen, torch.tensor(5.0), None)
    pending.drop()
    assert not pending
    note(pending, key(1), 0, seen, torch.tensor(2.0), None)
    pending.flush()
    assert seen.tolist() == [0, 0, 2]


def test_pending_amaxes_of_a_group_are_one_collective(monkeypatch):
    calls = []

    def all_reduce(flat, op, group):
        calls.append(group)
        flat.view(torch.float32)[2:4] = 9.0  # before them stands the digest of their identities

    monkeypatch.setattr(torch.distributed, "all_reduce", all_reduce)
    pending, one, two, alone = PendingAmaxes(), torch.zeros(2), torch.zeros(2), torch.zeros(2)
    for number, (seen, group) in enumerate(((one, "a"), (two, "a"), (alone, None))):
        note(pending, key(number), 0, seen, torch.tensor(1.0), group)
    pending.flush()
    assert calls == ["a"] and [seen.tolist() for seen in (one, two, alone)] == [[0, 9], [0, 9], [0, 1]]


def test_modules_that_share_a_weight_record_into_their_own_histories():
    pending, one, two = PendingAmaxes(), torch.zeros(2), torch.zeros(2)
    for seen, value in ((one, 1.0), (two, 5.0), (one, 3.0)):
        note(pending, key(7), 0, seen, torch.tensor(value), None)
    pending.flush()
    assert one.tolist() == [0.0, 3.0] and two.tolist() == [0.0, 5.0]


def test_a_history_noted_alone_and_with_others_gets_the_largest():
    """As where an input is read by a layer, and by several at once."""
    pending, one, two = PendingAmaxes(), torch.zeros(2), torch.zeros(2)
    for seen, value in (([one], 3.0), ([one, two], 2.0), ([one], 1.0), ([two], 1.0)):
        slot = pending.slot([key(1)] * len(seen), 0, seen, None, QUEUE)
        torch.maximum(slot, torch.tensor(value), out=slot)
    pending.note_all([key(1), key(2)], 0, [one, two], torch.tensor([2.5, 2.5]), None)
    pending.flush()
    assert (one.tolist(), two.tolist()) == ([0, 3], [0, 2.5])


@pytest.mark.parametrize("others", [["a", "b", "c"], ["c", "d"], []], ids=["the same", "some of them", "none"])
def test_amaxes_that_are_noted_together_again_are_merged(others):
    """As where a layer of experts is called twice: each history gets the largest, once."""
    histories = {name: torch.zeros(2) for name in "abcd"}
    keys = dict(zip("abcd", map(key, range(4)), strict=True))
    pending = PendingAmaxes()
    for names, amaxes in ((["a", "b", "c"], [1.0, 5.0, 3.0]), (others, [4.0, 2.0, 3.5])):
        if names:
            given = torch.tensor(amaxes[: len(names)])
            pending.note_all([keys[n] for n in names], 0, [histories[n] for n in names], given, None)
    assert pending
    pending.flush()
    assert not pending
    wanted = {"a": 1.0, "b": 5.0, "c": 3.0} | {"d": 0.0}
    for name, amax in zip(others, [4.0, 2.0, 3.5], strict=False):
        wanted[name] = max(wanted[name], amax)
    assert {name: history.tolist() for name, history in histories.items()} == {n: [0.0, a] for n, a in wanted.items()}


def test_many_slots_are_aligned_and_apart():
    pending, histories = PendingAmaxes(), [torch.zeros(1) for _ in range(150)]
    slots = [pending.slot([key(n)], 0, [seen], None, QUEUE) for n, seen in enumerate(histories)]
    assert len({slot.data_ptr() for slot in slots}) == 150 and all(slot.data_ptr() % 16 == 0 for slot in slots)
    assert slots[3] is pending.slot([key(3)], 0, [histories[3]], None, QUEUE)
    for value, slot in enumerate(slots, 1):
        slot.fill_(value)
    pending.flush()
    assert [seen.item() for seen in histories] == list(range(1, 151))


# --------------------------------------------------------------------------------------------------- past, of one pass


@pytest.fixture
def launches(monkeypatch):
    """How many histories each launch of the kernel that reads them has read."""
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        pytest.skip("kernels are compiled, and these tensors are on the CPU")
    monkeypatch.setattr(kernel_dispatch, "KERNEL_DEVICES", {"cpu"})
    counted, real = [], kernel_dispatch.past_amaxes

    def past_amaxes(histories, *options):
        counted.append(len(histories))
        return real(histories, *options)

    monkeypatch.setattr(kernel_dispatch, "past_amaxes", past_amaxes)
    return counted


def read(pending, kept, most_recent=False):
    queue = launch_queue(kept[0].device)
    return [pending.past(each, most_recent, queue) for each in kept]


@pytest.mark.parametrize("most_recent", [False, True])
def test_all_histories_of_a_pass_are_read_by_one_launch(launches, most_recent):
    pending, kept = PendingAmaxes(), [history(5, 1), history(2, 3, 4), history(7)]
    for number, expected in enumerate(([], [3], [3])):
        launches.clear()
        found = [*read(pending, kept, most_recent), *read(pending, kept, most_recent)]
        assert launches == expected
        assert found[:3] == [history_amax(each, most_recent) for each in kept] and found[:3] == found[3:]
        assert all(amax.data_ptr() % 16 == 0 for amax in found)
        for seen in kept:
            note(pending, key(1), 0, seen, torch.tensor(10.0 + number), None)
        pending.flush()


def test_a_history_that_was_written_in_a_pass_is_read_again(launches):
    """As by a load within an autocast. What was read before stays, for backward and recomputation."""
    pending, kept = PendingAmaxes(), [history(5, 1), history(2, 3)]
    before = read(pending, kept)
    kept[0].copy_(history(9, 9))
    assert read(pending, kept) == [9, 3] and before == [5, 3]


@pytest.mark.parametrize("end", ["flush", "drop"])
def test_histories_are_read_again_in_the_next_pass(launches, end):
    """Also where nobody counted a write, as of a kernel."""
    pending, kept = PendingAmaxes(), [history(5, 1), history(2, 3)]
    for value in (5.0, 8.0):
        kept[0].data[0] = value
        assert read(pending, kept) == [value, 3]
        getattr(pending, end)()


def test_passes_of_two_models_and_of_one_that_is_gone(launches):
    pending, one, two = PendingAmaxes(), [history(1), history(2)], [history(3), history(4)]
    for model in (one, two, one, two):
        launches.clear()
        assert read(pending, model) == [each.item() for each in model]
        pending.flush()
    assert launches == [2]
    del one[1], model, two
    launches.clear()
    assert read(pending, one) == [1] and not launches


def test_each_stream_reads_and_notes_for_itself(launches, monkeypatch):
    """What another one has launched may not have run."""
    pending, kept = PendingAmaxes(), [history(1), history(2)]
    for queue, expected in (("one", [1, 1]), ("other", [2, 2])):
        monkeypatch.setitem(globals(), "launch_queue", lambda device, queue=queue: (device, queue, False))
        assert read(pending, kept) == [1, 2] and len(pending._past) == 2 * (1 + (queue == "other"))
        note(pending, key(1), 0, kept[0], torch.tensor(float(expected[0])), None)
    assert len(pending._slots) == 2
    pending.flush()
    assert kept[0].item() == 2


def test_a_captured_graph_reads_each_history_by_itself(launches, monkeypatch):
    """It may be replayed without what was captured or launched before."""
    pending, kept = PendingAmaxes(), [history(1), history(2)]
    monkeypatch.setitem(globals(), "launch_queue", lambda device: (device, 0, True))
    assert read(pending, kept) == [1, 2] and not launches and not pending._past


# ------------------------------------------------------------------------------------------------ ranks that disagree


def told(function):
    try:
        function()
    except RankMismatchError as error:
        return str(error)
    return ""


def test_a_mismatch_is_told_once():
    record, yes, no = MismatchRecord("they differ"), torch.tensor(True), torch.tensor(False)
    record.add(no)
    assert told(record.check) == ""
    record.add(yes)
    record.add(no)
    assert [told(record.check), told(record.check), told(record.settle)] == ["they differ", "", ""]


def test_a_mismatch_in_a_captured_graph_is_told_when_the_state_is_read(monkeypatch):
    """Or at the first check after another was added; nothing is read while a graph is captured."""
    capturing = False
    monkeypatch.setattr(kernel_dispatch, "is_capturing", lambda: capturing)
    for tell in (lambda record: record.settle(), lambda record: (record.add(torch.tensor(False)), record.check())):
        record = MismatchRecord("they differ")
        record.add(torch.tensor(False))  # a step before the capture
        capturing = True
        record.add(torch.tensor(True))  # here it runs, as in a replay
        assert [told(record.check), told(record.settle)] == ["", ""]
        capturing = False
        assert told(record.check) == ""
        assert [told(lambda: tell(record)), told(record.settle)] == ["they differ", ""]  # noqa: B023


def test_what_is_captured_before_any_step_is_refused(monkeypatch):
    """Memory of a graph could not be asked: what its replays find would never be told."""
    monkeypatch.setattr(kernel_dispatch, "is_capturing", lambda: True)
    with pytest.raises(ConfigurationError, match="run a step before the capture"):
        MismatchRecord("they differ").add(torch.tensor(True))


@pytest.mark.parametrize("way", ["step", "step after a replay", "MasterWeights", "skipped_steps", "state_dict"])
def test_the_optimizer_tells_of_the_last_backward(monkeypatch, way):
    """Without another forward; of a captured step, who asks for what else its replays could not raise."""
    param = torch.nn.Parameter(torch.ones(4))
    if way == "MasterWeights":
        optimizer = MasterWeights(torch.optim.SGD, [param], lr=0.1)
    else:
        optimizer = FusedAdam([param], lr=0.1, capturable=way in ("skipped_steps", "state_dict"))
    param.grad = torch.ones(4)
    monkeypatch.setattr(MISMATCHES, "_is_captured", False)
    MISMATCHES.add(torch.tensor(False))
    MISMATCHES.check()
    with monkeypatch.context() as patch:
        patch.setattr(kernel_dispatch, "is_capturing", lambda: "step" != way != "MasterWeights")
        MISMATCHES.add(torch.tensor(True))
    tell = {"skipped_steps": lambda: optimizer.skipped_steps, "state_dict": optimizer.state_dict}.get(
        way, optimizer.step
    )
    with pytest.raises(RankMismatchError, match="different modules"):
        tell()
    assert torch.equal(param, torch.ones(4))
    tell()
    optimizer.step()
    assert not torch.equal(param, torch.ones(4))


def test_captured_slots_go_with_their_histories():
    """Their graphs may outlive the pass, but not the history; those of one graph alone are in its memory."""
    for kind, stays in ((PendingAmaxes, True), (AmaxRecord, False)):
        pending, seen = kind(), torch.zeros(3)
        slot = weakref.ref(
            pending.slot([torch.zeros(1, dtype=torch.int64)], 0, [seen], None, (torch.device("cpu"), 0, True))
        )
        assert slot() is not None
        pending.drop()
        gc.collect()
        assert (slot() is not None) == stays
        del seen
        gc.collect()
        assert slot() is None


# ---------------------------------------------------------------------------------------------------------- not finite


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("special", [INF, -INF, NAN])
def test_a_weight_takes_no_values_that_are_not_finite(name, special):
    """Codes saturate, and so would come out finite: raised with how many, and where the first is."""
    tensor, values = weight(RECIPES[name].weight), random(48, 40, seed=3)
    values[5, 7] = values[40, 2] = special
    before, state = contents(tensor), {name: part.clone() for name, part in tensor.quantized_storage.state.items()}
    for write in (
        lambda: tensor.quantize_(values),
        lambda: requantize_([(weight(MXFP8), random(48, 40)), (tensor, values)]),
        lambda: quantize_weight(values, tensor.quantized_storage.spec),
    ):
        with pytest.raises(ConfigurationError, match=rf"2 of 1920 values.*first, {special}, at \[5, 7\]"):
            write()
    assert not differing(before, contents(tensor)) and not differing(state, tensor.quantized_storage.state)


def test_a_piece_says_where_in_the_whole():
    tensor = weight(RECIPES["rowwise"].weight)
    piece = QuantizedTensor(tensor.quantized_storage.piece(0, 16, 16), tensor.dtype)
    values = torch.ones(16, 40)
    values[3, 4] = NAN
    with pytest.raises(ConfigurationError, match=r"1 of 640 values.*nan, at \[19, 4\]"):
        piece.quantize_(values)


def test_values_are_not_judged_while_a_graph_is_captured(monkeypatch):
    """The host would have to wait for them."""
    tensor = weight(MXFP8)
    monkeypatch.setattr(kernel_dispatch, "is_capturing", lambda: True)
    requantize.requantize_([(tensor, random(48, 40))], assume_finite=True)
