"""The ATen rules: what FSDP2 and users do to a quantized tensor moves handles or bytes. Other writes raise."""

import copy
import re

import numpy as np
import pytest
import torch
from torch import nn

from quantshard import Linear, QuantizedTensor, quantized_model_init
from quantshard.errors import UnsupportedOperationError
from quantshard.sharding import ceil_div
from quantshard.tensor.aten_rules import rule
from quantshard.tensor.parameter_state import AMAX_HISTORY, RNG_DRAWS, RNG_KEY
from quantshard.tensor.reads import ReadOnlyView
from tests.covering import by_turns
from tests.tensor.test_tensor import (
    CELLS,
    MXFP8,
    NVFP4,
    RECIPES,
    contents,
    cut,
    differing,
    every_cell,
    every_recipe,
    random,
    same,
    weight,
)


def raises(message):
    return pytest.raises(UnsupportedOperationError, match=message)


def is_handle(a, b):
    """Do both stand for the same components?"""
    return type(a) is QuantizedTensor and a.quantized_storage is b.quantized_storage


# ------------------------------------------------------------------------------------------------------------ handles


@by_turns(
    3,
    cell=CELLS,
    look=[
        lambda t: t.detach(),
        lambda t: t.data,
        lambda t: torch.ops.aten.alias(t),
        lambda t: t.view(-1),
        lambda t: t.view(48 * 40),
        lambda t: t.view(48, 40),
        lambda t: t.view(-1).view(48, 40),
        lambda t: t.reshape(-1),
        lambda t: t.as_strided((48, 40), (40, 1)),
        lambda t: t.as_strided((48, 40), (40, 1), 0),
        lambda t: t[:],
        lambda t: t.narrow(0, 0, 48),
        lambda t: t.contiguous(),
        lambda t: t.to("cpu"),
        lambda t: t.to(torch.bfloat16),
    ],
)
def test_looking_shares_the_storage(cell, look):
    tensor = weight(cell, dtype=torch.bfloat16)
    seen = look(tensor)
    assert is_handle(seen, tensor) and seen.dtype == torch.bfloat16
    assert seen.numel() == 48 * 40 and seen.shape in ((48, 40), (48 * 40,))


def test_the_flat_handle_sees_new_values():
    tensor = weight(MXFP8)
    flat = tensor.view(-1)
    tensor.quantize_(torch.ones(48, 40))
    assert torch.equal(flat.dequantize(), torch.ones(48 * 40))


@pytest.mark.parametrize(
    "look",
    [
        lambda t: t.view(40, 48),
        lambda t: t.view(48, 40, 1),
        lambda t: t.view(2, 24, 40),
        lambda t: t.view(torch.uint8),
        lambda t: t.as_strided((40, 48), (1, 40)),
        lambda t: t.as_strided((47, 40), (40, 1), 40),
        lambda t: t[1:],
        lambda t: t[:24],
        lambda t: t[::2],
        lambda t: t[:, :20],
        lambda t: t[:, ::2],
        lambda t: t[3],
        lambda t: t[[1, 2]],
        lambda t: t.narrow(0, 0, 24),
        lambda t: t.narrow(0, 0, 0),
        lambda t: t.t(),
        lambda t: t.mT,
        lambda t: t.unsqueeze(0),
        lambda t: t.expand(2, 48, 40),
        lambda t: t.split([24, 24]),
        lambda t: t.unbind(),
    ],
)
def test_other_views_are_of_values(look):
    """A part has no grid of its own, and a transpose none along its dims."""
    tensor = weight(MXFP8)
    views, expected = look(tensor), look(tensor.dequantize())
    if isinstance(expected, torch.Tensor):
        views, expected = [views], [expected]
    for view, plain in zip(views, expected, strict=True):
        assert type(view) in (ReadOnlyView, torch.Tensor) and same(view.clone(), plain)


@pytest.mark.parametrize("dim", [1, -1])
def test_split_along_columns_names_fsdps_argument(dim):
    with raises(r"dim -?1.*shard_placement_fn"):
        torch.chunk(weight(MXFP8), 2, dim=dim)


@by_turns(2, cell=CELLS, sizes=[(48, 24), (48, 32), (5, 2), (1, 1), (5, 9)])
def test_split(cell, sizes):
    rows, size = sizes
    tensor = weight(cell, rows, dtype=torch.bfloat16)
    values = tensor.dequantize()
    parts = tensor.split(size)
    assert [part.shape[0] for part in parts] == [len(part) for part in values.split(size)]
    assert all(part.dtype == torch.bfloat16 for part in parts)
    assert torch.equal(torch.cat([part.dequantize() for part in parts]), values)
    assert [part.quantized_storage.shard.origin for part in parts] == [(i * size, 0) for i in range(len(parts))]


# -------------------------------------------------------------------------------------------------- what FSDP2 does


def fsdp_chunks(weight, world):
    chunks = list(torch.chunk(weight, world))
    return chunks + [chunks[0].new_empty(0) for _ in range(world - len(chunks))]


def fsdp_init(weight, rank, world):
    """FSDPParam._init_sharded_param: (sharded local tensor, its flat handle, padded size)."""
    chunks = fsdp_chunks(weight.detach(), world)
    chunk, padded_size = chunks[rank], chunks[0].size()
    padded = weight.detach().new_zeros(padded_size)
    if chunk.numel() > 0:
        padded.narrow(dim=0, start=0, length=chunk.size(0)).copy_(chunk)
    flat = padded.view(-1)
    length = chunk.size(0) if chunk.numel() > 0 else 0
    return padded.narrow(dim=0, start=0, length=length), flat, padded_size


def fsdp_reset(local, padded_size):
    """FSDPParam.reset_sharded_param: (sharded local tensor, its flat handle)."""
    if local.is_meta or local.size() == padded_size:
        return local, local.view(-1)
    length = local.size(0) if local.numel() > 0 else 0
    padded = local.new_zeros(padded_size)
    padded.narrow(dim=0, start=0, length=length).copy_(local)
    flat = padded.view(-1)
    return padded.narrow(dim=0, start=0, length=length), flat


@by_turns(4, cell=CELLS, rows=[1, 5, 33, 48], world=[1, 2, 3, 4])
def test_fully_shard(cell, rows, world):
    """Even, padded and empty chunks: each rank ends with its piece of the weight, in memory of its own."""
    tensor = weight(cell, rows, dtype=torch.bfloat16)
    expected = cut(tensor, [(0, world)])
    for rank in range(world):
        local, flat, padded_size = fsdp_init(tensor, rank, world)
        assert padded_size == (ceil_div(rows, world), 40)
        assert local.shape == expected[rank].shape and local.dtype == torch.bfloat16 and local.is_contiguous()
        assert local.quantized_storage.shard == expected[rank].quantized_storage.shard
        assert not differing(contents(local), contents(expected[rank]))
        assert type(flat) is QuantizedTensor  # else FSDP2 asks for a data pointer
        before = {t.untyped_storage().data_ptr() for t in tensor.quantized_storage.components.values()}
        after = {t.untyped_storage().data_ptr() for t in local.quantized_storage.components.values() if t.numel()}
        assert not before & after


@by_turns(2, cell=CELLS, world=[1, 2, 3, 4])
def test_resetting_the_sharded_parameter_keeps_the_components(cell, world):
    """FSDP2 pads again at the first forward (and after each load): optimizers and checkpoints hold the live tensors."""
    tensor = weight(cell, 5)
    for rank in range(world):
        local, _, padded_size = fsdp_init(tensor, rank, world)
        live, state, before = dict(local.quantized_storage.components), local.quantized_storage.state, contents(local)
        for _ in range(2):
            local, _ = fsdp_reset(local, padded_size)
            assert local.quantized_storage.components.keys() == live.keys()
            assert all(local.quantized_storage.components[name] is part for name, part in live.items())
            assert local.quantized_storage.state is state
            assert local.shape == local.quantized_storage.shard.shape
        assert not differing(before, contents(local))


@by_turns(2, cell=CELLS, world=[2, 4])
def test_fully_shard_on_meta_then_to_empty(cell, world):
    tensor = weight(cell, 5)
    described = tensor.to("meta")
    for rank in range(world):
        local, _, padded_size = fsdp_init(described, rank, world)
        assert local.is_meta
        real, _ = fsdp_reset(torch.empty_like(local, device="cpu"), padded_size)
        twin, _, _ = fsdp_init(tensor, rank, world)
        assert real.device.type == "cpu" and real.quantized_storage.shard == twin.quantized_storage.shard
        shapes = [{n: (t.shape, t.dtype) for n, t in x.quantized_storage.components.items()} for x in (real, twin)]
        assert shapes[0] == shapes[1]
        assert torch.equal(real.quantized_storage.state[RNG_KEY], twin.quantized_storage.state[RNG_KEY])


def test_kept_initial_values_survive_sharding():
    tensor = weight(MXFP8, 5, keep_high_precision=True)
    kept = []
    for rank in range(4):
        local, _, padded_size = fsdp_init(tensor, rank, 4)
        kept.append(fsdp_reset(local, padded_size)[0].get_high_precision_init_val())
    assert [len(part) for part in kept] == [2, 2, 1, 0]
    assert torch.equal(torch.cat(kept), tensor.get_high_precision_init_val())


@every_cell
@pytest.mark.parametrize(
    "make", [lambda t: t.new_zeros(24, 40), lambda t: t.new_empty(0), lambda t: t.new_zeros(48, 40)]
)
def test_a_placeholder_holds_nothing(cell, make):
    tensor = weight(cell)
    placeholder = make(tensor)
    assert type(placeholder) is QuantizedTensor and placeholder.device == tensor.device
    assert placeholder.quantized_storage.components == {}
    for use in (
        lambda p: p.dequantize(),
        lambda p: p.quantize_(torch.zeros(p.shape)),
        lambda p: p.clone(),
        lambda p: torch.empty_like(p),
        lambda p: p.split(1),
        lambda p: p.__tensor_flatten__(),
    ):
        with raises("placeholder"):
            use(placeholder)


@every_cell
def test_a_placeholder_moves_as_the_empty_chunk_of_cpu_offload_does(cell):
    placeholder = weight(cell).new_zeros(24, 40)
    assert not placeholder.is_pinned()
    moved = placeholder.to("meta")
    with raises("placeholder"):
        moved.dequantize()
    empty = moved.narrow(0, 0, 0)
    assert empty.shape == (0, 40) and empty.device.type == "meta" and placeholder.device.type == "cpu"
    assert {part.device.type for part in empty.quantized_storage.components.values()} == {"meta"}
    assert is_handle(moved.pin_memory(), moved)  # nothing is in it yet


@every_cell
def test_what_data_parallel_would_do_is_refused_with_the_way_out(cell):
    tensor = weight(cell)
    flat = torch.cat([torch.zeros(3), tensor.view(-1)])
    with raises("init_sync=False"):
        tensor.copy_(flat[3:].view(48, 40))


@pytest.mark.parametrize("size", [24, 48])
def test_a_placeholder_never_takes_part_of_the_shard(size):
    """Only the whole shard, or nothing, is put into it."""
    tensor = weight(MXFP8)
    with raises("placeholder"):
        tensor.new_zeros(size, 40).narrow(0, 1, 3)


# ---------------------------------------------------------------------------------------------------------------- copy_


@every_cell
def test_copy_moves_bytes(cell):
    source, target = weight(cell, seed=1), weight(cell)
    source.quantized_storage.state[RNG_DRAWS].add_(3)
    held = target.quantized_storage.components | target.quantized_storage.state
    assert target.copy_(source) is target
    assert not differing(contents(target), contents(source))
    assert all(
        (target.quantized_storage.components | target.quantized_storage.state)[name] is part
        for name, part in held.items()
    )
    source.quantize_(torch.ones(48, 40))
    assert differing(contents(target), contents(source))


@every_cell
def test_copy_drops_kept_initial_values(cell):
    """Of the target: they are no longer its own; those of the source may come along."""
    source, target = weight(cell, seed=1), weight(cell, keep_high_precision=True)
    target.copy_(source)
    assert target.get_high_precision_init_val() is None


@every_cell
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.uint8], ids=str)
def test_copy_of_plain_values_names_the_way_out(cell, dtype):
    tensor = weight(cell)
    before = contents(tensor)
    for target in (tensor, nn.Parameter(tensor, requires_grad=False), tensor.view(-1), tensor.new_zeros(48, 40)):
        with raises(rf"{dtype}.*checkpoints\.load_high_precision.*load_from_rank0"):
            target.copy_(torch.ones(target.shape).to(dtype))
    assert not differing(before, contents(tensor))


PAIRS = [
    (a, b, (i + j) % 3 == 0 or CELLS[a].format == CELLS[b].format)
    for i, a in enumerate(CELLS)
    for j, b in enumerate(CELLS)
    if CELLS[a] != CELLS[b]
]
"""And whether `make test` has them, too."""


@pytest.mark.parametrize(
    ("source", "target"),
    [pytest.param(a, b, marks=() if stays else pytest.mark.exhaustive) for a, b, stays in PAIRS],
)
def test_copy_between_formats_names_both(source, target):
    """Other scaling is another format, too: amax histories of two lengths, or scales of powers of two."""
    one, two = (weight(RECIPES[name].weight) for name in (source, target))
    before = contents(two)
    with raises(".*".join(re.escape(t.quantized_storage.spec.format.name) for t in (one, two))):
        two.copy_(one)
    assert not differing(before, contents(two))


def test_copy_between_different_places():
    first, second = torch.chunk(weight(MXFP8, 64), 2)
    before = contents(second)
    for source in (first, weight(MXFP8, 32), weight(MXFP8, 64)):
        with raises(r"\(\(32, 64\), \(0, 40\)\).*one format and shard"):
            second.copy_(source)
    assert not differing(before, contents(second))


# ------------------------------------------------------------------------------------------------ independent copies


def altered(tensor):
    """Change everything that a tensor holds."""
    for part in (tensor.quantized_storage.components | tensor.quantized_storage.state).values():
        part.add_(1)
    return tensor


COPIES = {
    "clone": torch.clone,
    "deepcopy": copy.deepcopy,
    "to a device": lambda t: t.to("cpu", copy=True),
    "to a dtype": lambda t: t.to(torch.float64),
    "half": lambda t: t.to(torch.half),
    "to a device and dtype": lambda t: t.to("cpu", torch.float16, copy=True),
}


@by_turns(2, cell=CELLS, world=[1, 3], make=COPIES)
def test_copies_are_equal_and_independent(cell, world, make):
    """Of whole weights and shards: components, key, draws and history."""
    for tensor in cut(weight(cell, keep_high_precision=True), [(0, world)]):
        tensor.quantized_storage.state[RNG_DRAWS].add_(7)
        before = contents(tensor)
        made = make(tensor)
        assert made.shape == tensor.shape and made.quantized_storage.shard == tensor.quantized_storage.shard
        assert not differing(before, contents(made))
        assert torch.equal(made.get_high_precision_init_val(), tensor.get_high_precision_init_val())
        altered(made)
        made.clear_high_precision_init_val()
        assert not differing(before, contents(tensor))
        assert tensor.get_high_precision_init_val() is not None


def test_dtype_of_copies():
    tensor = weight(MXFP8, dtype=torch.bfloat16)
    assert tensor.clone().dtype == copy.deepcopy(tensor).dtype == torch.bfloat16
    assert tensor.float().dtype == tensor.float().dequantize().dtype == torch.float32
    with raises("complex64"):
        tensor.to(torch.complex64)


def test_cpu_of_a_cpu_tensor_is_itself():
    tensor = weight(MXFP8)
    assert tensor.cpu() is tensor


@every_cell
def test_to_meta_and_back_has_the_same_form(cell):
    tensor = weight(cell)
    meta = tensor.to("meta")
    assert all(part.is_meta for part in meta.quantized_storage.components.values())
    history = meta.quantized_storage.state.get(AMAX_HISTORY)
    assert history is None or history.is_meta
    empty = torch.empty_like(meta, device="cpu")
    assert {n: (t.shape, t.dtype) for n, t in contents(empty).items()} == {
        n: (t.shape, t.dtype) for n, t in contents(tensor).items()
    }


@pytest.mark.parametrize("requires_grad", [True, False])
def test_deepcopy_of_a_parameter(requires_grad):
    parameter = nn.Parameter(weight(NVFP4), requires_grad=requires_grad)
    twin = copy.deepcopy([parameter, parameter])
    assert isinstance(twin[0], nn.Parameter) and isinstance(twin[0], QuantizedTensor)
    assert twin[0] is twin[1] and twin[0].requires_grad == requires_grad
    assert twin[0].quantized_storage is not parameter.quantized_storage


@every_cell
def test_empty_like(cell):
    """As module.to_empty wants it: the form and the key of the tensor, in memory of its own."""
    tensor = weight(cell, dtype=torch.bfloat16)
    made = torch.empty_like(tensor)
    assert type(made) is QuantizedTensor and made.dtype == torch.bfloat16
    before = contents(tensor)
    for part in made.quantized_storage.components.values():
        part.zero_()
    assert not differing(before, contents(tensor))
    assert torch.equal(made.quantized_storage.state[RNG_KEY], tensor.quantized_storage.state[RNG_KEY])
    if AMAX_HISTORY in made.quantized_storage.state:
        assert (
            not made.quantized_storage.state[AMAX_HISTORY].any() and tensor.quantized_storage.state[AMAX_HISTORY].any()
        )


@pytest.mark.parametrize(("make", "fill"), [(torch.zeros_like, 0.0), (torch.ones_like, 1.0)])
def test_zeros_and_ones_are_plain(make, fill):
    tensor = weight(MXFP8, dtype=torch.bfloat16)
    made = make(tensor)
    assert type(made) is torch.Tensor and torch.equal(made, torch.full((48, 40), fill, dtype=torch.bfloat16))
    assert make(tensor, dtype=torch.float64).dtype == torch.float64
    assert make(tensor, device="meta").is_meta


@every_cell
def test_is_not_pinned(cell):
    assert not weight(cell).is_pinned()


# ------------------------------------------------------------------------------------------------------------ modules


@every_recipe
def test_module_moves(recipe):
    """module.to(dtype), to(device), to_empty and deepcopy keep quantized parameters quantized, with their bits."""
    with quantized_model_init(recipe=recipe):
        layer = Linear(40, 48)
    before = contents(layer.weight)
    for moved in (copy.deepcopy(layer).to(torch.bfloat16), copy.deepcopy(layer).half(), copy.deepcopy(layer).cpu()):
        assert isinstance(moved.weight, nn.Parameter) and isinstance(moved.weight, QuantizedTensor)
        assert moved.weight.dtype == moved.bias.dtype and moved.weight.requires_grad
        assert not differing(before, contents(moved.weight))
    again = copy.deepcopy(layer).to("meta").to_empty(device="cpu")
    again.reset_parameters()
    assert not differing(before, contents(again.weight))


# --------------------------------------------------------------------------------------------------------- all others

PLAIN = torch.ones(48, 40)
REFUSED = [
    ("zero_", lambda t: t.zero_()),
    ("fill_", lambda t: t.fill_(0)),
    ("normal_", lambda t: nn.init.normal_(t)),
    ("uniform_", lambda t: nn.init.kaiming_uniform_(t)),
    ("set_", lambda t: t.set_(PLAIN)),
    ("resize_", lambda t: t.resize_(2, 2)),
    ("index_(put|fill)_", lambda t: t.__setitem__(torch.tensor([0]), 1.0)),  # the second from torch 2.15 on
    ("fill_", lambda t: t.__setitem__(slice(0, 2), 1.0)),
    ("pow_", lambda t: t.pow_(2)),
    ("_foreach_sqrt_", lambda t: torch._foreach_sqrt_([t])),
    ("mul.out", lambda t: torch.mul(PLAIN, 2, out=t)),
]


@pytest.mark.parametrize(("name", "operate"), REFUSED, ids=[name for name, _ in REFUSED])
def test_other_writes_raise_and_name_the_operation(name, operate):
    tensor = weight(MXFP8)
    before = contents(tensor)
    with raises(rf"^[\w.]*{name}\b.* on (QuantizedTensor\(mxfp8|a quantized tensor)"):
        operate(tensor)
    assert not differing(before, contents(tensor))


@pytest.mark.parametrize(
    "read",
    [torch.Tensor.tolist, torch.from_dlpack, np.from_dlpack],
)
def test_there_is_no_memory_of_values(read):
    """Of DLPack's, the address would be null: to read from it ends the process."""
    with pytest.raises(RuntimeError, match=r"not supported|Cannot access data pointer"):
        read(weight(MXFP8))


@pytest.mark.parametrize("read", [torch.utils.dlpack.to_dlpack, torch.Tensor.data_ptr, lambda t: t.apply_(float)])
def test_compiled_code_that_would_read_a_null_pointer_raises(read):
    with pytest.raises(RuntimeError, match="Cannot access data pointer"):
        read(weight(MXFP8))


def test_the_message_names_the_way_out():
    with raises(r"write quantshard\.requantize_\(\[\(parameter, values\)\]\)"):
        weight(MXFP8).zero_()


@pytest.mark.parametrize("values", [torch.zeros(48, 40), torch.zeros(3, 3)])
def test_assigning_data_raises(values):
    """It would change shape and dtype of the handle, and no code."""
    parameter = nn.Parameter(weight(MXFP8))
    with raises(rf"torch.float32 \({values.shape[0]}, .* as .data of QuantizedTensor\(mxfp8.*requantize_"):
        parameter.data = values
    parameter.data = parameter.data  # what `parameter.data -= update` ends with


@pytest.mark.parametrize(
    "make",
    [
        lambda t, dtype: torch.empty_like(t, dtype=dtype),
        lambda t, dtype: t.new_zeros(48, 40, dtype=dtype),
        lambda t, dtype: t.new_empty(48, 40, dtype=dtype),
    ],
)
@pytest.mark.parametrize("dtype", [torch.int8, torch.bool, torch.complex64], ids=str)
def test_tensors_of_a_dtype_that_no_weight_stands_for_are_plain(make, dtype):
    made = make(weight(MXFP8), dtype)
    assert type(made) is torch.Tensor and made.dtype == dtype and made.shape == (48, 40)


def test_rules_say_who_needs_them():
    with pytest.raises(AssertionError):
        rule(torch.ops.aten.mul.Tensor, needed_by="")


def test_random_values_differ():
    """Of the helpers here: two seeds give different weights, so that equal bits mean something."""
    assert differing(contents(weight(MXFP8)), contents(weight(MXFP8, seed=1)))
    assert not torch.equal(random(4, 4), random(4, 4, seed=1))
