"""Quantizing operands in one process, and which pieces of an operand can be quantized apart.

What needs ranks is in tests/distributed/test_parallel.py.
"""

import pytest
import torch

from quantshard import formats, numerics
from quantshard.errors import ConfigurationError
from quantshard.formats import Orientation, Scaling
from quantshard.gemm import operands
from quantshard.gemm.operands import OperandSplit
from quantshard.recipe import QuantSpec
from tests.distributed.models import RECIPES
from tests.distributed.parallel import CELLS

ROW = formats.NVFP4_1X16
NVFP4, RHT = QuantSpec(ROW), QuantSpec(ROW, Scaling(random_hadamard=True))
BLOCK, MX, TENSOR = QuantSpec(formats.FP8_1X128), QuantSpec(formats.MXFP8_BOTH), QuantSpec(formats.FP8_E4M3)


@pytest.fixture
def ranks(monkeypatch):
    """Makes every group have that many ranks; this one is the last."""

    def be(size):
        monkeypatch.setattr(torch.distributed, "get_world_size", lambda group: size)
        monkeypatch.setattr(torch.distributed, "get_rank", lambda group: size - 1)
        return object()

    return be


def test_cells_of_every_recipe_are_tested():
    assert {cell.format for cell in CELLS} >= {formats.FP8_E5M2, formats.MXFP8_BOTH, formats.NVFP4_16X16, ROW}
    assert {cell.scaling.stochastic_rounding for cell in CELLS if cell.scaling.random_hadamard} == {True, False}
    assert len(RECIPES) > 6 and any(cell.scaling.history for cell in CELLS)


@pytest.mark.parametrize("cell", CELLS, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(7, 33), (0, 40), (40, 0), (130, 257)])
def test_quantize_is_that_of_the_oracle(cell, dtype, shape):
    torch.manual_seed(0)
    values = torch.randn(shape).to(dtype)
    words = None
    if cell.scaling.stochastic_rounding:
        words = numerics.random_words(5, 0, 1, operands.operand_shard(shape, cell).shape)
    copies = None if words is None else dict.fromkeys(Orientation, words)
    expected = numerics.quantize(values, cell.format, cell.scaling, words=copies)
    found = operands.quantize_operand(values, cell, words=lambda _: words)
    assert found.components.keys() == expected.keys() and found.spec is cell
    assert all(torch.equal(found.components[name], part) for name, part in expected.items())
    assert found.shard == operands.operand_shard(shape, cell) and found.shard.cut is None
    assert found.components[cell.format.components[0].name].is_contiguous()


def test_a_given_amax_scales_instead_of_the_tensors_own():
    values = torch.tensor([[1.0, -2.0]])
    found = operands.quantize_operand(values, TENSOR, amax=torch.tensor(448.0))
    assert found.components["scale_inv"].tolist() == [[1.0]] and found.dequantize().tolist() == [[1.0, -2.0]]


def test_one_rank_has_all_and_needs_no_group(ranks):
    """Nor is torch.distributed initialized here: a collective would raise."""
    values = torch.randn(7, 33)
    for split in (OperandSplit(0, None), OperandSplit(1, None), OperandSplit(0, ranks(1)), OperandSplit(1, ranks(1))):
        assert split.size == 1 and split.rank == 0
        assert operands.gather(values, split) is values
        for cell in (NVFP4, RHT, MX, BLOCK, TENSOR):
            assert operands.gathers_codes(cell, (7, 33), split)
            found = operands.quantize_operand(values, cell, split=split)
            whole = operands.quantize_operand(values, cell)
            assert found.shard == whole.shard and operands.gather(found, split) is found
            assert all(torch.equal(found.components[name], part) for name, part in whole.components.items())


def test_where_a_piece_lies(ranks):
    group = ranks(3)
    assert OperandSplit(0, group).shard((7, 5)).extents == ((14, 21), (0, 5))
    assert OperandSplit(1, group).shard((7, 5)).extents == ((0, 7), (10, 15))
    assert OperandSplit(1, group).shard((7, 5)).global_shape == (7, 15)
    assert OperandSplit(1, group).transposed == OperandSplit(0, group)
    assert operands.operand_shard((7, 5), RHT, OperandSplit(0, group)).global_shape == (21, 16), (
        "padded for the transform"
    )
    assert operands.operand_shard((7, 5), RHT).shape == (7, 16) and operands.operand_shard((7, 5), NVFP4).shape == (
        7,
        5,
    )
    assert operands.operand_shard((7, 32), RHT, OperandSplit(1, group)).origin == (0, 64)


@pytest.mark.parametrize(
    ("cell", "shape", "dim", "apart"),
    [
        (RHT, (7, 32), 1, True),
        (RHT, (7, 24), 1, False),
        (RHT, (7, 24), 0, True),
        (RHT, (7, 0), 1, True),
        (NVFP4, (7, 6), 1, True),
        (NVFP4, (7, 5), 1, False),
        (NVFP4, (7, 5), 0, True),
        (NVFP4, (7, 0), 1, True),
        (BLOCK, (7, 5), 1, True),
        (MX, (7, 5), 1, True),
        (MX, (7, 5), 0, True),
        (TENSOR, (0, 5), 0, True),
    ],
)
def test_what_can_be_quantized_apart(ranks, cell, shape, dim, apart):
    split = OperandSplit(dim, ranks(2))
    assert operands.gathers_codes(cell, shape, split) == apart
    if not apart:
        together = 16 if cell is RHT else 2
        said = rf"nvfp4_1x16.*: 2 shards \[7, {shape[1]}\] .*multiple of {together} columns"
        with pytest.raises(ConfigurationError, match=said):
            operands.quantize_operand(torch.zeros(shape), cell, split=split)
