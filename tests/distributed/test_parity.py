"""Ten steps on each mesh against one process with the same global batch: embedding, layers and tied head.

Each test names its rank count.

**Birth.** Bitwise, on every mesh.

**In high precision** (the recipe "bf16", float32 parameters) a mesh changes the order of sums and nothing else. A sum
of n float32 terms has n - 1 roundings, each off by at most u = 2**-24 of a partial sum: about sqrt(n) * u of the norm
of the terms, for they are independent. No sum has more than 96 terms (tokens). A gradient comes out of 14 of them, one
behind the other: those of attention's two products, its two projections, the MLP's two and the head's, forward and
backward. So ORDER = sqrt(14 * 96) * u = 2.2e-6 bounds first gradients and losses; and parameters after 10 steps of an
optimizer that is linear in gradients, which moved by less than they are long. (What is found is 2e-7 to 4e-7.)

**Quantized**, a difference of 1e-7 now and then carries a value over the boundary between two codes, which are 2**-3 of
it apart: two runs whose sums differ in order drift apart as far as rounding itself goes. So here sums are taken in
float64, where no boundary is crossed. Pure tensor parallelism must then give the same masters bit for bit, for
activation amaxes are reduced over its ranks; also the random words of stochastic rounding are those of the whole
gradient. Delayed scaling reduces amaxes over data-parallel ranks too, so there as well. Current scaling scales each
data-parallel rank's activations by their own amax; with amaxes over all ranks it gives the same masters too.

**Rank-local scales** are what is left. Rounding to E4M3 is off by 2**-4 / sqrt(3) * 0.74 = 2.7% in the root mean square
(0.74: that of 1 / mantissa), E5M2, of gradients, by twice as much; two runs that round on other grids differ by sqrt(2)
times that. Between the tokens and the gradient of a weight five inputs of GEMMs are rounded one behind the other, of
qkv, proj, fc1, fc2 and head, and five gradients: SCALES = sqrt(2 * 5 * (1 + 2**2)) * 2.7% = 0.19 of the gradient. And
were all of it to pull one way, losses would fall by so much less or more.
"""

from __future__ import annotations

import pytest
import torch

from tests.distributed.parity import Case, Run, off, run, run_alone
from tests.distributed.pool import run_ranks

pytestmark = pytest.mark.distributed

ORDER = (14 * 96) ** 0.5 * 2**-24
SCALES = (2 * 5 * (1 + 2**2)) ** 0.5 * 2**-4 / 3**0.5 * 0.74

IN_HIGH_PRECISION = [Case("bf16", mesh) for mesh in ("tp 2", "tp 4", "dp 2, tp 2", "dp_replicate 2, tp 2", "dp 3")]
BITWISE = [
    Case("nvfp4", "tp 2", exact=True),
    Case("mxfp8", "tp 4", exact=True),
    Case("current", "dp 2, tp 2", exact=True, global_amaxes=True),
    Case("delayed", "dp_replicate 2, tp 2", exact=True),
    Case("current", "dp 3", exact=True, global_amaxes=True),
]
LEFT = (*IN_HIGH_PRECISION, *BITWISE[1:])
"""To `make test-all`."""
LOCAL_SCALES = Case("current", "dp 3", exact=True)


@pytest.fixture(scope="module")
def alone(request: pytest.FixtureRequest) -> dict[Case, Run]:
    """What one process does; two take turns. Those of `make test-all` may not run."""
    asked = [
        item.callspec.params
        for item in request.session.items
        if item.path == request.path and hasattr(item, "callspec")
    ]
    cases = dict.fromkeys([each["case"].alone for each in asked if "case" in each] + [LOCAL_SCALES.alone])
    return run_ranks(2, run_alone, list(cases))[0]


def trained(case: Case, reference: Run) -> Run:
    """On the mesh; born with the same bits."""
    found = run_ranks(case.ranks, run, case)
    assert all(each.losses == found[0].losses for each in found)
    assert found[0].born.keys() == reference.born.keys()
    unequal = [name for name, value in reference.born.items() if not torch.equal(found[0].born[name], value)]
    assert not unequal
    return found[0]


def some(cases: list[Case]) -> list[object]:
    return [pytest.param(case, marks=pytest.mark.exhaustive) if case in LEFT else case for case in cases]


def loss_off(found: Run, reference: Run) -> float:
    return max(abs(a - b) for a, b in zip(found.losses, reference.losses, strict=True))


@pytest.mark.parametrize("case", some(IN_HIGH_PRECISION), ids=lambda case: case.mesh)
def test_in_high_precision_only_the_order_of_sums_differs(case: Case, alone: dict[Case, Run]) -> None:
    """2, 3 and 4 ranks."""
    reference = alone[case.alone]
    found = trained(case, reference)
    assert reference.losses[-1] < reference.losses[0] - 0.5
    apart = {
        "losses": loss_off(found, reference) / reference.losses[-1],
        "gradients": off(found.gradients, reference.gradients),
        "parameters": off(found.trained, reference.trained),
    }
    assert max(apart.values()) < ORDER, apart


@pytest.mark.parametrize("case", some(BITWISE), ids=lambda case: f"{case.recipe} {case.mesh}")
def test_with_exact_sums_and_global_amaxes_nothing_differs(case: Case, alone: dict[Case, Run]) -> None:
    """2, 3 and 4 ranks."""
    reference = alone[case.alone]
    found = trained(case, reference)
    assert reference.losses[-1] < reference.losses[0] - 0.5
    unequal = [name for name, value in reference.trained.items() if not torch.equal(found.trained[name], value)]
    assert not unequal, off(found.trained, reference.trained)
    assert loss_off(found, reference) < 1e-13


def test_rank_local_scales_differ_by_rounding(alone: dict[Case, Run]) -> None:
    """3 ranks."""
    reference = alone[LOCAL_SCALES.alone]
    found = trained(LOCAL_SCALES, reference)
    assert 1e-3 < off(found.gradients, reference.gradients) < SCALES
    assert loss_off(found, reference) < SCALES * (reference.losses[0] - min(reference.losses))
