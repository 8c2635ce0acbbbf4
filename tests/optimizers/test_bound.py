"""No update is larger than the gradients allow, whatever the moments are stored in."""

import itertools
import math
from contextlib import nullcontext

import pytest
import torch
from torch import nn

from quantshard.errors import ConfigurationError
from quantshard.numerics.adam import Bound, Hyperparameters, adam, largest_ratio
from quantshard.optimizers import FusedAdam
from quantshard.recipe import resolve
from tests.covering import exhaustive
from tests.weights import quantize_weight

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.uint8}
ROWS, COLS, STEPS = 4, 256, 60

STEP_OF_CODE = {"fp32": 0.0, "bf16": 2.0**-7, "fp16": 2.0**-10, "fp8": 2.0**-3}
"""How far a value may be from the code that it is rounded to, beside itself, where it is not below the smallest."""


def gradients(kind, step):
    generator = torch.Generator().manual_seed(step)
    normal = torch.randn(ROWS, COLS, generator=generator)
    scale = 10 ** (torch.rand(ROWS, COLS, generator=torch.Generator().manual_seed(5)) * 18 - 12)
    outlier = torch.where(torch.arange(COLS) % 128 == 0, 1e6, 1.0)
    return {
        "decades": lambda: normal * scale,
        "outliers": lambda: normal * outlier,
        "sparse": lambda: normal * scale * (torch.rand(ROWS, COLS, generator=generator) < 0.05),
        "bursts": lambda: normal * 10 ** (torch.rand(ROWS, COLS, generator=generator) * 18 - 12),
        "constant": lambda: scale,
        "signs": lambda: scale * (-1) ** (step // 7),
        "late": lambda: scale * (step > STEPS // 2),
    }[kind]()


KINDS = ("decades", "outliers", "sparse", "bursts", "constant", "signs", "late")


def largest_update(moments, kind, betas, **options):
    """Over all elements and steps, in learning rates, beside the bound of its step."""
    param = nn.Parameter(torch.zeros(ROWS, COLS))
    torch.manual_seed(0)
    dtypes = dict(zip(("exp_avg_dtype", "exp_avg_sq_dtype"), map(DTYPES.get, moments), strict=True))
    optimizer, worst = FusedAdam([param], lr=1.0, betas=betas, **dtypes, **options), 0.0
    for step in range(1, STEPS + 1):
        param.data.zero_()
        param.grad = gradients(kind, step)
        optimizer.step()
        worst = max(worst, float(param.detach().abs().max()) / bound(betas, step))
    return worst


def bound(betas, step):
    """C c1 / sqrt(c2)."""
    return largest_ratio(*betas) * math.sqrt(1 - betas[1] ** step) / (1 - betas[0] ** step)


PAIRS = list(itertools.product(DTYPES, DTYPES))
SOME = [pair for number, pair in enumerate(PAIRS) if (number // 4 - number) % 4 == 1 and number // 4 % 2]
"""Each dtype once."""


@pytest.mark.parametrize(("first", "second"), exhaustive(PAIRS, SOME))
def test_no_update_is_beyond_the_bound(first, second):
    """By more than stored moments are off: each by a step of its codes, where the first is not brought within it.

    A second moment under a shared scale, with a first that is no coarser, may lag behind: where it is n times the
    smallest code, that code is still stored with probability exp(1 - n), and the update is sqrt(n) times too large. Of
    a million elements and steps hardly one has n > 16.
    """
    within = (first, second) in {("fp8", "fp16"), *itertools.product(("fp8", "fp16"), ("bf16", "fp32"))}
    allowed = 1.0 if within else (1 + STEP_OF_CODE[first]) * (4 if second in ("fp16", "fp8") else 1 + 2.0**-7)
    allowed = min(allowed, 2.0) if first in ("fp8", "fp16") else allowed
    allowed += 1e-5
    turn = (list(DTYPES).index(first) + list(DTYPES).index(second)) % 2
    for number, kind in enumerate(KINDS):
        betas = ((0.9, 0.999), (0.9, 0.95))[(number + turn) % 2]
        assert largest_update((first, second), kind, betas) <= allowed, (kind, betas)


def test_stacks_of_matrices_are_within_the_bound():
    values = torch.zeros(2, ROWS // 2, COLS)
    param = nn.Parameter(quantize_weight(values, resolve("current").weight))
    optimizer = FusedAdam([param], lr=1.0, exp_avg_dtype=torch.uint8, exp_avg_sq_dtype=torch.bfloat16)
    master = values
    for step in range(1, STEPS + 1):
        param.grad = gradients("outliers", step).view(values.shape)
        optimizer.step()
        before, master = master, optimizer.get_unscaled_state(param, "master_param").clone().view(values.shape)
        assert float((master - before).abs().max()) <= bound((0.9, 0.999), step) + 1e-5, step


def test_the_bound_is_reached():
    """By gradients of the proportions for which Cauchy and Schwarz's inequality is an equality: g_i ~ (b1 / b2)^i."""
    betas = tuple(torch.tensor((0.9, 0.999)).tolist())
    m = v = 0.0
    for age in reversed(range(400)):
        g = (betas[0] / betas[1]) ** age
        m, v = betas[0] * m + (1 - betas[0]) * g, betas[1] * v + (1 - betas[1]) * g * g
    assert m / math.sqrt(v) == pytest.approx(largest_ratio(*betas), rel=1e-6)
    assert largest_ratio(*betas) == pytest.approx(7.2706, abs=1e-3)


def test_the_bound_of_other_betas():
    assert largest_ratio(0.0, 0.0) == 1 and largest_ratio(0.0, 0.75) == 2
    assert largest_ratio(0.95, 0.95) == pytest.approx(1, rel=1e-5)
    assert largest_ratio(0.9, 0.81) > 900 and largest_ratio(0.9, 0.8) == largest_ratio(0.9, 0.0) == math.inf


def test_what_is_within_keeps_its_bits_and_what_is_not_is_brought_to_the_edge():
    h = Hyperparameters(5, 1.0, 0.9, 0.999, 1e-8, 0.0, True, True)
    v = torch.rand(1000, generator=torch.Generator().manual_seed(0))
    edge = h.largest_ratio * v.double().sqrt().float()
    grad, master = torch.zeros(1000), torch.zeros(1000)
    for sign in (1, -1):
        inside = adam(grad, master, sign * edge, v, h)
        assert all(map(torch.equal, adam(grad, master, sign * edge, v, h, Bound.RATIO), inside))
        assert all(map(torch.equal, adam(grad, master, sign * 2 * edge, v, h, Bound.RATIO), inside))
    nothing = adam(grad, master, torch.full((1000,), 0.5), torch.zeros(1000), h, Bound.RATIO)
    assert not nothing.exp_avg.any() and not nothing.master.any()


def test_updates_beyond_twice_the_largest_exact_one_are_clamped():
    h = Hyperparameters(5, 1.0, 0.9, 0.999, 1e-8, 0.1, True, True)
    v = torch.rand(1000, generator=torch.Generator().manual_seed(0))
    m = 1.9 * h.largest_ratio * v.sqrt()
    grad, master = torch.zeros(1000), torch.ones(1000)
    for sign in (1, -1):
        assert all(
            map(torch.equal, adam(grad, master, sign * m, v, h, Bound.UPDATE), adam(grad, master, sign * m, v, h))
        )
        new = adam(grad, master, 4 * sign * m, v, h, Bound.UPDATE)
        assert torch.equal(new.master, master - (sign * h.largest_update + 0.1 * master))
        assert torch.equal(new.exp_avg, adam(grad, master, 4 * sign * m, v, h).exp_avg)
    nan = adam(grad, master, torch.full((1000,), torch.nan), v, h, Bound.UPDATE)
    assert nan.master.isnan().all()


@pytest.mark.parametrize(("first", "second"), PAIRS)
def test_which_pairs_are_brought_within_it(first, second):
    """Those whose first moment is the coarser one: they have no use for betas without a bound, others have."""
    dtypes = {"exp_avg_dtype": DTYPES[first], "exp_avg_sq_dtype": DTYPES[second]}
    needs_bound = (first, second) in {("fp8", "fp16"), *itertools.product(("fp8", "fp16"), ("bf16", "fp32"))}
    with pytest.raises(ConfigurationError, match="needs beta1") if needs_bound else nullcontext():
        FusedAdam([nn.Parameter(torch.ones(2, 2))], betas=(0.99, 0.9), **dtypes)
