"""How matrices are put into buckets and given to owners: bounded, and evenly."""

import pytest

from quantshard.optimizers.matrix_exchange import MatrixLayout, _owners, buckets


class Group:
    """Stands for a process group: only its identity counts here."""


def layout(rows, columns, ranks, group):
    step = -(-rows // ranks)
    pieces = {(at,): ((min(at * step, rows), min((at + 1) * step, rows)), (0, columns)) for at in range(ranks)}
    return MatrixLayout((rows, columns), (group,), pieces)


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
