"""Tensor parallelism over ranks: operands quantized in pieces, what goes over the wire, and the sums around GEMMs.

Each test names its rank count.
"""

from __future__ import annotations

import pytest
import torch

from quantshard import formats, recipe
from quantshard.formats import Scaling
from quantshard.recipe import QuantSpec
from tests.distributed.parallel import (
    CELLS,
    OPERATIONS,
    Piece,
    gradient_of,
    layers_cut,
    one_by_one,
    oracle,
    quantized_in_pieces,
    refusals,
    rounded_by_group,
    stream_of,
    wire_of,
    words_of,
)
from tests.distributed.pool import run_ranks

pytestmark = pytest.mark.distributed

BF16, F32 = torch.bfloat16, torch.float32

PIECES = [
    # shape, dim, dtype, with NaN and infinity
    ((7, 40), 0, BF16, False),  # 7 tokens a rank: they divide by no block
    ((7, 33), 0, F32, True),
    ((64, 48), 0, BF16, False),
    ((0, 40), 0, BF16, False),
    ((24, 7), 1, BF16, False),  # the same, transposed for wgrad
    ((24, 10), 1, BF16, True),
    ((24, 16), 1, F32, False),
    ((130, 128), 1, BF16, False),
    ((24, 144), 1, F32, True),
    ((24, 0), 1, BF16, False),
]

ALL_PIECES = [Piece(cell, *piece) for cell in CELLS for piece in PIECES]
HALVES = [
    [Piece(cell, *piece) for i, cell in enumerate(CELLS) for j, piece in enumerate(PIECES) if (i + j) % 2 == half]
    for half in (0, 1)
]
"""Each has every cell, and every piece."""


@pytest.mark.parametrize(
    ("ranks", "pieces"),
    [
        (1, HALVES[0]),
        (3, HALVES[1]),
        *(pytest.param(n, ALL_PIECES, marks=pytest.mark.exhaustive) for n in (1, 2, 3, 4)),
    ],
    ids=["1, half", "3, half", "1", "2", "3", "4"],
)
def test_pieces_and_what_is_gathered_are_those_of_the_whole(ranks: int, pieces: list[Piece]) -> None:
    """1 to 4 ranks: every cell of every recipe; one reduction and one gather at most, none on one rank."""
    for wrong in run_ranks(ranks, quantized_in_pieces, pieces):
        assert not wrong, "\n".join(wrong[:20])


CURRENT, BLOCK = QuantSpec(formats.FP8_E4M3), QuantSpec(formats.FP8_1X128)
MXFP8, NVFP4 = QuantSpec(formats.MXFP8_1X32), QuantSpec(formats.NVFP4_1X16)
RHT = QuantSpec(formats.NVFP4_1X16, Scaling(random_hadamard=True, stochastic_rounding=True))


@pytest.mark.parametrize(
    ("cell", "shape", "dim", "reduced", "gathered"),
    [
        # 64 x 256 elements, 32768 bytes as bfloat16
        (CURRENT, (64, 256), 0, 4, 64 * 256),
        (BLOCK, (64, 256), 0, 0, 64 * 256 + 64 * 2 * 4),
        (MXFP8, (64, 256), 0, 0, 64 * 256 + 64 * 8),
        (NVFP4, (64, 256), 0, 4, 64 * 128 + 64 * 16),
        # transposed, 64 tokens a rank: blocks of 128 tokens are shared by two
        (CURRENT, (256, 64), 1, 4, 64 * 256),
        (BLOCK, (256, 64), 1, 256 * 4, 64 * 256),
        (MXFP8, (256, 64), 1, 0, 64 * 256 + 256 * 2),
        (RHT, (256, 64), 1, 4, 64 * 128 + 256 * 4),
        # the transform crosses the cut: values are sent
        (RHT, (256, 8), 1, 0, 256 * 8 * 2),
    ],
)
def test_bytes_sent(cell: QuantSpec, shape: tuple[int, int], dim: int, reduced: int, gathered: int) -> None:
    """2 ranks."""
    expected = [("allreduce", reduced)] * (reduced > 0) + [("allgather_base", gathered)]
    assert run_ranks(2, wire_of, cell, shape, dim) == [expected] * 2


def test_streams_are_those_of_the_data() -> None:
    """4 ranks, (dp 2, tp 2): as two ranks without tensor parallelism, each with its own data and its number."""
    cell = recipe.resolve("nvfp4").activations[recipe.TensorRole.GRAD_OUTPUT][0]
    assert cell is not None and cell.scaling.stochastic_rounding
    for found in run_ranks(4, rounded_by_group, cell):
        assert found["tp"] == found["data"] and found["dp"] == found["index in tp"] and found["world"] == 0
        alone = oracle(gradient_of(found["data"]), cell, None)
        words = words_of(alone.shard, stream_of(found["data"]))
        alone.write(gradient_of(found["data"]), alone.measure(gradient_of(found["data"])), words)
        assert torch.equal(found["codes"], alone.components["codes"])


# The sums around GEMMs


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_block_cut_over_ranks_has_the_gradients_of_a_whole_one(ranks: int) -> None:
    """1 to 3 ranks, with and without sequence parallelism; second derivatives too."""
    for wrong in run_ranks(ranks, layers_cut, [1, 3, 0]):
        assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_operations_one_by_one(ranks: int, dtype: torch.dtype) -> None:
    """1 to 3 ranks: values, gradients, the one collective of each, in the tensor's dtype; none on one rank.

    Gradients of parameters of 16 bits are summed in float32.
    """
    check_operations(run_ranks(ranks, one_by_one, dtype, 6), 6 * 2 * 3 * dtype.itemsize)


def check_operations(seen: list[dict], size: int) -> None:
    ranks, dtype = len(seen), seen[0]["copy"]["x"].dtype
    widens = ranks > 1 and dtype.itemsize == 2
    x = {name: [rank[name]["x"] for rank in seen] for name in OPERATIONS}
    given = {name: [rank[name]["given"] for rank in seen] for name in OPERATIONS}
    for number, rank in enumerate(seen):

        def mine(whole: torch.Tensor, number: int = number) -> torch.Tensor:
            return whole.chunk(ranks)[number]

        expected = {
            "copy": (x["copy"][number], sum(given["copy"])),
            "reduce": (sum(x["reduce"]), given["reduce"][number]),
            "gather_rows": (torch.cat(x["gather_rows"]), mine(sum(given["gather_rows"]))),
            "scatter_rows": (mine(sum(x["scatter_rows"])), torch.cat(given["scatter_rows"])),
            "split_rows": (mine(x["split_rows"][number]), torch.cat(given["split_rows"])),
            "join_rows": (torch.cat(x["join_rows"]), mine(given["join_rows"][number])),
            "all_reduce_gradient": (x["copy"][number].to(torch.float32 if widens else dtype), sum(given["copy"])),
        }
        wire = {
            "copy": ([], [("allreduce", size)]),
            "reduce": ([("allreduce", size)], []),
            "gather_rows": ([("allgather_base", size)], [("reduce_scatter_base", size * ranks)]),
            "scatter_rows": ([("reduce_scatter_base", size)], [("allgather_base", size // ranks)]),
            "split_rows": ([], [("allgather_base", size // ranks)]),
            "join_rows": ([("allgather_base", size)], []),
            "all_reduce_gradient": ([], [("allreduce", 2 * size if widens else size)]),
        }
        for name, (out, grad) in expected.items():
            assert torch.equal(rank[name]["out"], out) and rank[name]["out"].dtype == out.dtype, name
            assert torch.equal(rank[name]["grad"], grad) and rank[name]["grad"].dtype == grad.dtype, name
            calls = (rank[name]["forward"], rank[name]["backward"])
            assert calls == (wire[name] if ranks > 1 else ([], [])), name
            is_view = name == "copy" or (name == "all_reduce_gradient" and not widens)
            assert rank[name]["is a view"] == (ranks == 1 or is_view), name


def test_no_rows_no_collective() -> None:
    """3 ranks with nothing: results of the right shapes."""
    for rank in run_ranks(3, one_by_one, torch.float32, 0):
        for name in OPERATIONS:
            assert rank[name]["out"].shape == rank[name]["grad"].shape == (0, 2, 3)
            assert not rank[name]["forward"] and not rank[name]["backward"]


def test_rows_that_cannot_be_divided_are_refused_alike() -> None:
    """3 ranks: the same error on every one, and none waits."""
    said = run_ranks(3, refusals, 7)
    assert len(said[0]) == 2 and said[0] == said[1] == said[2]
    assert "7 rows (dim 0) of [7, 4]" in said[0][0] and "3 ranks" in said[0][0]
