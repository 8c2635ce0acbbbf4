"""How matrices are put together of pieces, into buckets, and given to owners: bounded, and evenly."""

import pytest
import torch

from quantshard.optimizers.matrix_exchange import MatrixLayout, _owners, buckets


class Group:
    """Stands for a process group: only its identity counts here."""


def layout(rows, columns, ranks, group):
    step = -(-rows // ranks)
    pieces = {(at,): ((min(at * step, rows), min((at + 1) * step, rows)), (0, columns)) for at in range(ranks)}
    return MatrixLayout((rows, columns), (group,), pieces)


@pytest.mark.parametrize(
    ("pieces", "is_stacked"),
    [
        ({(0,): ((0, 2), (0, 3)), (1,): ((2, 3), (0, 3)), (2,): ((3, 3), (0, 3))}, True),
        ({(0,): ((0, 3), (0, 2)), (1,): ((0, 3), (2, 3))}, False),
        # tensor parallelism cuts first, so FSDP2's first ranks have rows of both halves
        (
            {(0, 0): ((0, 1), (0, 3)), (1, 0): ((1, 2), (0, 3)), (0, 1): ((2, 3), (0, 3)), (1, 1): ((3, 3), (0, 3))},
            True,
        ),
        (
            {(0, 0): ((0, 1), (0, 3)), (1, 0): ((2, 3), (0, 3)), (0, 1): ((1, 2), (0, 3)), (1, 1): ((3, 3), (0, 3))},
            False,
        ),
    ],
)
def test_a_matrix_is_put_together_and_taken_apart(pieces, is_stacked):
    matrix = torch.arange(9.0).view(3, 3)
    one = MatrixLayout((3, 3), (), pieces)
    assert one.is_stacked == is_stacked
    slowest_last = sorted(pieces, key=lambda at: tuple(reversed(at)))
    flat = [matrix[slice(*pieces[at][0]), slice(*pieces[at][1])].reshape(-1) for at in slowest_last]
    assert torch.equal(one.flat(matrix), torch.cat(flat)) and torch.equal(one.whole(torch.cat(flat)), matrix)
    assert torch.equal(one.flat(matrix.T), one.flat(matrix.T.contiguous()))


SIZES = [(4096, 1024)] * 5 + [(8192, 8192), (70, 50), (1, 1)] + [(1024, 4096)] * 9


@pytest.mark.parametrize("ranks", [1, 3, 8])
@pytest.mark.parametrize("most", [1, 1 << 20, 1 << 24, 1 << 40])
def test_buckets_are_bounded_and_their_owners_have_alike_much_to_do(ranks, most):
    groups = [Group(), Group()]
    layouts = [layout(*size, ranks, groups[number % 2]) for number, size in enumerate(SIZES)]
    found = buckets(layouts, most)
    assert sorted(number for numbers in found for number in numbers) == [*range(len(SIZES))]
    for numbers in found:
        chosen = [layouts[number] for number in numbers]
        assert len({one.groups for one in chosen}) == 1
        largest = max(2 * one.shape[0] * one.shape[1] for one in layouts if one.groups == chosen[0].groups)
        assert sum(2 * one.shape[0] * one.shape[1] for one in chosen) <= ranks * max(most, largest)
        loads = dict.fromkeys(range(ranks), 0)
        for one, (owner,) in zip(chosen, _owners(chosen, [ranks]), strict=True):
            loads[owner] += one.cost
        assert max(loads.values()) <= sum(loads.values()) / ranks + max(one.cost for one in chosen)
    if most == 1 << 40:
        assert len(found) == 2
