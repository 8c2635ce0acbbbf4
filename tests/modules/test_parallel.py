"""Tensor parallelism without ranks: the numbers of groups, the arithmetic of rows, and what one rank costs.

What needs ranks is in tests/distributed/test_parallel.py.
"""

import math

import pytest
import torch
import torch.distributed as dist

from quantshard.distributed import tensor_parallel
from quantshard.distributed.tensor_parallel import TensorParallel, stream_base
from quantshard.errors import ConfigurationError

OPERATIONS = [
    tensor_parallel.copy_to_group,
    tensor_parallel.reduce_from_group,
    tensor_parallel.gather_rows,
    tensor_parallel.scatter_rows,
    tensor_parallel.split_rows,
    tensor_parallel.join_rows,
    tensor_parallel.all_reduce_gradient,
]


@pytest.fixture
def world(monkeypatch):
    """Makes a group be the list of its ranks."""
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda group: group)
    monkeypatch.setattr(dist, "get_world_size", lambda: 24)
    monkeypatch.setattr(dist, "get_rank", lambda: 5)


@pytest.mark.parametrize("shape", [(24,), (1, 24), (24, 1), (2, 12), (12, 2), (2, 3, 4), (4, 3, 2), (2, 2, 3, 2)])
def test_groups_of_a_mesh_axis_are_numbered_in_their_order(world, shape):
    """As `dist.get_rank` numbers the ranks of the mesh without that axis."""
    mesh = torch.arange(math.prod(shape)).view(shape)
    for axis, size in enumerate(shape):
        groups = mesh.movedim(axis, -1).reshape(-1, size).tolist()
        assert [stream_base(group) for group in groups] == list(range(24 // size))


def test_other_groups_have_numbers_of_their_own(world):
    """Such groups are no axis of a mesh: `first % period` is not below the stride, or there is none."""
    groups = [[0, 1], [4, 2], [3, 5], [6, 7], [8, 10, 13]]
    assert [stream_base(group) for group in groups] == [0, 26, 27, 3, 32]


def test_without_a_group_each_rank_has_its_number(world):
    assert stream_base(None) == 5


def test_without_processes_there_is_one_number():
    assert stream_base(None) == 0


@pytest.mark.parametrize("operation", OPERATIONS)
def test_one_rank_costs_nothing(operation):
    """No copy, no autograd node, and no collective: torch.distributed is not initialized here."""
    x = torch.randn(7, 2, 3, requires_grad=True)
    for mode in tensor_parallel.MODES:
        tp = TensorParallel.of(None, mode, sequence_parallel=True)
        assert (tp.size, tp.rank, tp.split(1).size) == (1, 0, 1)
        assert operation(x, tp) is x


@pytest.mark.parametrize(("rows", "said"), [(7, "pad to a multiple of 3"), (2, "pad to a multiple of 3")])
@pytest.mark.parametrize("operation", [tensor_parallel.scatter_rows, tensor_parallel.split_rows])
def test_rows_that_cannot_be_divided_are_refused(operation, rows, said):
    tp = TensorParallel(object(), size=3)
    with pytest.raises(ConfigurationError, match=rf"the {rows} rows .* \[{rows}, 2, 64\] .* 3 ranks.*{said}"):
        operation(torch.zeros(rows, 2, 64), tp)


def test_rows_per_rank():
    tp = TensorParallel(object(), size=3)
    assert tensor_parallel.rows_per_rank(torch.Size([12, 5]), tp) == 4
    assert tensor_parallel.rows_per_rank(torch.Size([0, 5]), tp) == 0
    assert tensor_parallel.rows_per_rank(torch.Size([7]), TensorParallel()) == 7


def test_a_group_that_this_rank_is_not_in_is_refused(monkeypatch):
    monkeypatch.setattr(dist, "get_rank", lambda group=None: 5 if group is None else -1)
    with pytest.raises(ConfigurationError, match="rank 5 is not in its tensor-parallel group"):
        TensorParallel.of(object(), "row")
