"""Pieces on one axis of a mesh: what each rank keeps, what is refused, and where DTensor misplaces pieces.

Ranks of a mesh are tried one after the other, on torch's fake process group: nothing here communicates.
"""

import re

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import quantshard as qs
from quantshard import checkpoints, private_torch
from quantshard.distributed.module_meshes import empty_parameter, shard_parameter
from quantshard.errors import ConfigurationError
from quantshard.optimizers import FusedAdam, MasterWeights
from quantshard.tensor import components
from quantshard.tensor.parameter_state import RNG_DRAWS, RNG_KEY
from tests.covering import by_turns
from tests.tensor.test_tensor import CELLS, NVFP4, RECIPES, differing, every_cell, random
from tests.tools.observe.fake import fake_rank
from tests.weights import quantize_weight

SHAPE = (140, 152)
"""Blocks of all sizes straddle the pieces that 2 and 4 ranks make of either dim."""


def parameter(cell, shape=SHAPE, device="cpu"):
    torch.manual_seed(0)
    values = random(*shape).to(device)
    return nn.Parameter(
        quantize_weight(values, cell, dtype=torch.bfloat16, keep_high_precision=True), requires_grad=False
    )


def is_alone(tensor, others):
    """Neither a view of a larger memory nor of the same as one of the others."""
    storage = tensor.untyped_storage()
    return storage.nbytes() == tensor.nbytes and all(
        storage.data_ptr() != other.untyped_storage().data_ptr() for other in others
    )


@by_turns(2, cell=CELLS, dim=[0, 1], ranks=[1, 2, 4])
def test_a_quantized_piece_is_that_of_the_whole(cell, dim, ranks):
    for rank in range(ranks):
        with fake_rank({"dp": 1, "tp": ranks}, rank) as mesh:
            whole = parameter(cell)
            param = shard_parameter(whole, mesh["tp"], dim)
            assert isinstance(param, nn.Parameter) and not param.requires_grad
            assert (tuple(param.shape), param.dtype, param.placements) == (SHAPE, torch.bfloat16, (Shard(dim),))
            assert param.device_mesh == mesh["tp"]
            chunk = SHAPE[dim] // ranks
            piece, expected = components.storage_of(param), whole.quantized_storage.piece(dim, rank * chunk, chunk)
            assert piece.shard == expected.shard and tuple(param.to_local().shape) == piece.shard.shape
            assert not differing(piece.components, expected.components)
            assert all(
                is_alone(part, whole.quantized_storage.components.values()) for part in piece.components.values()
            )
            assert (
                piece.state[RNG_KEY] is whole.quantized_storage.state[RNG_KEY]
                and piece.state[RNG_DRAWS] is whole.quantized_storage.state[RNG_DRAWS]
            )
            assert torch.equal(piece.high_precision, expected.high_precision)
            assert is_alone(piece.high_precision, [whole.quantized_storage.high_precision])


@every_cell
@pytest.mark.parametrize("dim", [0, 1, None])
def test_an_empty_piece_is_like_it(cell, dim):
    """Also on the meta device, and without a whole."""
    with fake_rank({"tp": 2}, 1) as mesh:
        for device in ("cpu", "meta"):
            like = shard_parameter(parameter(cell, device=device), mesh, dim)
            torch.manual_seed(0)
            found = empty_parameter(SHAPE, mesh, dim, dtype=torch.bfloat16, device=device, spec=cell)
            pieces = [components.storage_of(param) for param in (like, found)]
            assert (found.placements, found.shape, found.dtype) == (like.placements, like.shape, like.dtype)
            assert pieces[0].shard == pieces[1].shard and pieces[0].mesh is pieces[1].mesh
            assert pieces[0].state.keys() == pieces[1].state.keys()
            for name, part in pieces[0].components.items():
                other = pieces[1].components[name]
                assert (part.shape, part.dtype, part.device) == (other.shape, other.dtype, other.device)


@pytest.mark.parametrize("shape", [(12,), (12, 20), (12, 20, 8)])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_pieces_of_plain_parameters(shape, device):
    for dim in (*range(len(shape)), None):
        for rank in range(4):
            with fake_rank({"tp": 4}, rank) as mesh:
                whole = nn.Parameter(torch.randn(shape, device=device))
                for param in (
                    shard_parameter(whole, mesh, dim),
                    empty_parameter(shape, mesh, dim, dtype=torch.float32, device=device),
                ):
                    placement = Replicate() if dim is None else Shard(dim)
                    assert (tuple(param.shape), param.placements) == (shape, (placement,)) and param.requires_grad
                    local = private_torch.local_tensor(param)
                    expected = whole if dim is None else whole.chunk(4, dim)[rank]
                    assert local.shape == expected.shape and local.is_contiguous() and local.device.type == device
                    if device == "cpu" and dim is not None:
                        assert is_alone(local, [whole])
                if device == "cpu":
                    kept = private_torch.local_tensor(shard_parameter(whole, mesh, dim))
                    assert torch.equal(kept, expected) and (dim is not None or kept.data_ptr() == whole.data_ptr())


def test_a_replicated_parameter_keeps_its_memory():
    with fake_rank({"tp": 2}, 0) as mesh:
        whole = parameter(NVFP4)
        param = shard_parameter(whole, mesh, None)
        assert components.storage_of(param) is whole.quantized_storage and param.placements == (Replicate(),)


REFUSED = {
    "uneven": (
        lambda mesh: shard_parameter(nn.Parameter(torch.ones(7, 4)), mesh["tp"], 0),
        r"a parameter \(7, 4\), dim 0 of 7 over 2 ranks.*a multiple of the axis, or replicate",
    ),
    "uneven, 1-D": (
        lambda mesh: empty_parameter((7,), mesh["tp"], 0, dtype=torch.float32, device="meta"),
        r"a parameter \(7,\), dim 0 of 7 over 2 ranks",
    ),
    "a byte": (
        lambda mesh: shard_parameter(parameter(NVFP4, (4, 6)), mesh["tp"], 1),
        r"\(4, 6\), dim 1 in pieces of 3 over 2 ranks, 2 codes a byte.*2 \* tp",
    ),
    "a byte, without the whole": (
        lambda mesh: empty_parameter((4, 6), mesh["tp"], 1, dtype=torch.float32, device="cpu", spec=NVFP4),
        r"in pieces of 3 over 2 ranks",
    ),
    "two axes": (
        lambda mesh: shard_parameter(nn.Parameter(torch.ones(4)), mesh, 0),
        r"has \('dp', 'tp'\); pass one axis, as mesh\[\"tp\"\]",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_alike_on_all_ranks(name):
    call, message = REFUSED[name]
    texts = set()
    for rank in range(4):
        with fake_rank({"dp": 2, "tp": 2}, rank) as mesh, pytest.raises(ConfigurationError, match=message) as error:
            call(mesh)
        texts.add(str(error.value))
    assert len(texts) == 1


def test_an_odd_number_of_packed_columns_is_whole_on_one_rank():
    with fake_rank({"tp": 1}, 0) as mesh:
        assert components.storage_of(shard_parameter(parameter(NVFP4, (4, 7)), mesh, 1)).shard.shape == (4, 7)


def test_a_tied_weight_that_is_cut_twice_is_noticed():
    with fake_rank({"tp": 2}, 0) as mesh:
        whole = parameter(RECIPES["current"].weight).requires_grad_()
        twice = [("a", shard_parameter(whole, mesh, 0)), ("b", shard_parameter(whole, mesh, 0))]
        with pytest.raises(ConfigurationError, match="fully_shard has cut the tied a and b twice"):
            FusedAdam(twice)


# ----------------------------------------------------------------------------------------------------- misplaced pieces


class Rows(nn.Module):
    """A plain parameter whose values are their own indices along its first dim."""

    def __init__(self, rows, *columns):
        super().__init__()
        index = torch.arange(float(rows)).view(rows, *[1] * len(columns))
        self.weight = nn.Parameter(index.expand(rows, *columns).contiguous())

    def forward(self):
        return self.weight


def fsdp_over_tp(rows, mesh, *columns):
    """Cut by tensor parallelism as `distribute_tensor` does, unevenly if need be, and then by FSDP2."""
    model = Rows(rows, *columns)
    model.weight = nn.Parameter(distribute_tensor(model.weight.detach(), mesh["tp"], [Shard(0)], src_data_rank=None))
    fully_shard(model, mesh=mesh["dp"])
    return model


def is_refused(weight):
    try:
        components.check_offsets([("w", weight)])
    except ConfigurationError:
        return True
    return False


@pytest.mark.parametrize("sizes", [(2, 2), (3, 2), pytest.param((4, 3), marks=pytest.mark.exhaustive)], ids=str)
def test_what_is_refused_is_what_pytorch_misplaces(sizes):
    """Size by size, and alike on all ranks: where DTensor's offsets are not those of the values that FSDP2 left."""
    sizes = dict(zip(("dp", "tp"), sizes, strict=True))
    told, refused = {}, {}
    for rank in range(sizes["dp"] * sizes["tp"]):
        with fake_rank(sizes, rank) as mesh:
            for rows in range(1, 27):
                weight = fsdp_over_tp(rows, mesh).weight
                held, first = weight.to_local().tolist(), private_torch.global_offset(weight)[0]
                told[rows] = told.get(rows, True) and held == [float(i) for i in range(first, first + len(held))]
                refused.setdefault(rows, set()).add(is_refused(weight))
    assert refused == {rows: {not right} for rows, right in told.items()}
    wrong = [rows for rows, right in told.items() if not right]
    assert bool(wrong) == (sizes["dp"] > 2) and all(rows % sizes["tp"] for rows in wrong)


def steps_that_refuse(model, path):
    named = list(model.named_parameters())
    return {
        "FusedAdam": lambda: FusedAdam(named),
        "MasterWeights": lambda: MasterWeights(torch.optim.SGD, named),
        "checkpoints.save": lambda: checkpoints.save(path, model, torch.optim.SGD(model.parameters())),
        "load_from_rank0": lambda: checkpoints.load_from_rank0(model, {"weight": torch.ones(7)}),
        "load_high_precision": lambda: checkpoints.load_high_precision(model, {"weight": torch.ones(7)}),
    }


@pytest.mark.parametrize("columns", [(), (3,)])
def test_misplaced_pieces_are_refused_early_and_alike(columns, tmp_path):
    """dp 3 over tp 2 of 7 rows, also of a bias: before anything is made, saved or sent."""
    texts = set()
    for rank in range(6):
        with fake_rank({"dp": 3, "tp": 2}, rank) as mesh:
            model = fsdp_over_tp(7, mesh, *columns)
            for call in steps_that_refuse(model, tmp_path).values():
                with pytest.raises(ConfigurationError) as error:
                    call()
                texts.add(str(error.value))
    [text] = texts
    shape = re.escape(str((7, *columns)))
    assert re.match(
        rf"weight {shape} on a mesh \(3, 2\): of dim 0 the rank at \(2, 0\) holds \[4:4\], DTensor says \[6:7\]: a",
        text,
    )


def test_misplaced_pieces_of_a_quantized_weight_are_refused_by_its_state_dict():
    """Made by hand: `shard_parameter` makes none."""
    with fake_rank({"dp": 3, "tp": 2}, 0) as mesh:
        with qs.quantized_model_init(recipe="mxfp8"):
            layer = qs.Linear(32, 7, bias=False)
        piece = qs.QuantizedTensor(
            layer.weight.quantized_storage.piece(0, 4 * mesh["tp"].get_local_rank(), 4), torch.float32
        )
        shape = layer.weight.shape
        layer.weight = nn.Parameter(private_torch.dtensor_around(piece, mesh["tp"], [Shard(0)], shape))
        fully_shard(layer, mesh=mesh["dp"])
        assert isinstance(layer.weight, DTensor)
        with pytest.raises(ConfigurationError, match=r"the mxfp8_32x32 weight \(7, 32\) on a mesh \(3, 2\)"):
            layer.state_dict()
