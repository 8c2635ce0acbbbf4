"""The mathematics of Adam, against the textbook in float64 and against torch's own."""

import math

import pytest
import torch

from quantshard.numerics.adam import Hyperparameters, adam

UNIT = 2.0**-24  # largest relative error of one float32 operation
STEPS, LR, EPS = 20, 1e-2, 1e-8
BETAS = tuple(
    torch.tensor((0.9, 0.999)).tolist()
)  # float32 numbers, which `adam` makes of any, as TransformerEngine does

variants = pytest.mark.parametrize("decoupled", [True, False], ids=["AdamW", "L2"])
decays = pytest.mark.parametrize("weight_decay", [0.0, 0.1])
corrections = pytest.mark.parametrize("bias_correction", [True, False])


def normal(*shape, seed=0, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def gradients(shape=(64, 32)):
    """Of normal size, float32 values, one for each step."""
    return [normal(*shape, seed=100 + step, dtype=torch.float32) for step in range(STEPS)]


def hyperparameters(step, weight_decay=0.1, decoupled=True, bias_correction=True):
    return Hyperparameters(step, LR, *BETAS, EPS, weight_decay, decoupled, bias_correction)


def textbook(weight, grads, weight_decay, decoupled, bias_correction):
    """Kingma & Ba (2015), algorithm 1, and Loshchilov & Hutter (2019), algorithm 2, in float64."""
    weight, m, v = weight.double(), 0.0, 0.0
    for t, grad in enumerate(grads, start=1):
        g = grad.double() + (0 if decoupled else weight_decay * weight)
        m = BETAS[0] * m + (1 - BETAS[0]) * g
        v = BETAS[1] * v + (1 - BETAS[1]) * g**2
        c1, c2 = (1 - BETAS[0] ** t, 1 - BETAS[1] ** t) if bias_correction else (1, 1)
        step = (m / c1) / ((v / c2).sqrt() + EPS)
        weight = weight - LR * (step + (weight_decay * weight if decoupled else 0))
    return weight, m, v


def train(weight, grads, **options):
    """The same with `adam`, in float32."""
    state = [weight, torch.zeros_like(weight), torch.zeros_like(weight)]
    for t, grad in enumerate(grads, start=1):
        state = list(adam(grad, *state, hyperparameters(t, **options)))
    return state


def bounds(grads, largest_weight, bias_correction, largest_grad):
    """How far float32 may be from float64 after all steps: (weight, exp_avg, exp_avg_sq).

    Each step rounds a moment about 4 times (scalars included). exp_avg forgets it in 1 / (1 - beta1) steps; exp_avg_sq
    is a sum of positive terms, so its relative error is at most 4 a step. A step of the weight adds 2 roundings of
    itself, and lr times the error of m / sqrt(v): of m over the root mean square of the gradients, which is at least
    largest / sqrt(steps), plus of v, 2 a step, times |m / sqrt(v)| <= sqrt(steps); 8 for the operations after it.
    """
    n = len(grads)
    of_m = 4 * UNIT / (1 - BETAS[0]) * largest_grad
    of_v = 4 * UNIT * n * largest_grad**2
    gain = 1.0 if bias_correction else 1 / math.sqrt(1 - BETAS[1])  # of m / sqrt(v), where v is not corrected
    of_ratio = gain * math.sqrt(n) * (4 / (1 - BETAS[0]) + 2 * n + 8) * UNIT
    return n * (2 * UNIT * largest_weight + LR * of_ratio), of_m, of_v


@variants
@decays
@corrections
def test_many_steps_are_the_textbooks(decoupled, weight_decay, bias_correction):
    options = {"decoupled": decoupled, "weight_decay": weight_decay, "bias_correction": bias_correction}
    weight, grads = normal(64, 32, dtype=torch.float32), gradients()
    expected = textbook(weight, grads, **options)
    found = train(weight, grads, **options)
    allowed = bounds(
        grads, expected[0].abs().max().item(), bias_correction, max(g.abs().max().item() for g in grads) + 0.5
    )
    for value, reference, bound in zip(found, expected, allowed, strict=True):
        assert value.dtype == torch.float32
        assert (value.double() - reference).abs().max().item() < bound
    assert allowed[0] < 1e-3 * (found[0] - weight).abs().mean().item()  # the bound is small beside what was learnt


@variants
@decays
def test_the_textbook_is_torchs(decoupled, weight_decay):
    """The reference above, held to torch.optim in float64, where rounding plays no part."""
    parameter, grads = torch.nn.Parameter(normal(8, 8)), gradients((8, 8))
    expected = textbook(parameter.detach(), grads, weight_decay, decoupled, True)[0]
    kind = torch.optim.AdamW if decoupled else torch.optim.Adam
    optimizer = kind([parameter], lr=LR, betas=BETAS, eps=EPS, weight_decay=weight_decay, foreach=False)
    for grad in grads:
        parameter.grad = grad.double()
        optimizer.step()
    torch.testing.assert_close(parameter.detach(), expected, rtol=1e-13, atol=1e-15)


@variants
@decays
def test_torch_in_float32_is_as_close(decoupled, weight_decay):
    """Side by side with torch.optim in float32: within twice the bound, each having its own rounding."""
    weight, grads = normal(64, 32, dtype=torch.float32), gradients()
    parameter = torch.nn.Parameter(weight.clone())
    kind = torch.optim.AdamW if decoupled else torch.optim.Adam
    optimizer = kind([parameter], lr=LR, betas=BETAS, eps=EPS, weight_decay=weight_decay, foreach=False)
    for grad in grads:
        parameter.grad = grad
        optimizer.step()
    found = train(weight, grads, decoupled=decoupled, weight_decay=weight_decay)
    states = (parameter.detach(), optimizer.state[parameter]["exp_avg"], optimizer.state[parameter]["exp_avg_sq"])
    allowed = bounds(grads, weight.abs().max().item() + 0.5, True, max(g.abs().max().item() for g in grads) + 0.5)
    for value, other, bound in zip(found, states, allowed, strict=True):
        assert (value - other).abs().max().item() < 2 * bound


def test_one_step_by_hand():
    """g = 2, w = 1, m = v = 0: the corrected ratio is 1 in the first step, so w moves by lr (1 + wd w)."""
    one, zero = torch.ones(1), torch.zeros(1)
    updated = adam(2 * one, one, zero, zero, hyperparameters(1))
    assert updated.exp_avg.item() == pytest.approx(0.2, rel=1e-6)
    # the float32 0.999 is off by up to 2**-25, which is more of 1 - 0.999; the bias correction has the same factor
    assert updated.exp_avg_sq.item() == pytest.approx(0.004, rel=2**-25 / 0.001)
    assert updated.master.item() == pytest.approx(1 - LR * 1.1, rel=1e-6)
    l2 = adam(2 * one, one, zero, zero, hyperparameters(1, decoupled=False))
    assert l2.exp_avg.item() == pytest.approx(0.21, rel=1e-6) and l2.master.item() == pytest.approx(1 - LR, rel=1e-6)
    uncorrected = adam(2 * one, one, zero, zero, hyperparameters(1, weight_decay=0, bias_correction=False))
    assert uncorrected.master.item() == pytest.approx(1 - LR * 0.2 / 0.004**0.5, rel=1e-6)


@variants
def test_arguments_are_not_changed(decoupled):
    given = [normal(4, 4, seed=seed, dtype=torch.float32).abs() for seed in range(4)]
    before = [tensor.clone() for tensor in given]
    updated = adam(*given, hyperparameters(3, decoupled=decoupled))
    assert all(torch.equal(a, b) for a, b in zip(given, before, strict=True))
    assert not {t.data_ptr() for t in updated} & {t.data_ptr() for t in given}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_gradients_of_16_bits_are_read_exactly(dtype):
    grad = normal(4, 4).to(dtype)
    state = [normal(4, 4, seed=seed, dtype=torch.float32).abs() for seed in (1, 2, 3)]
    low, full = (adam(g, *state, hyperparameters(2)) for g in (grad, grad.float()))
    assert all(torch.equal(a, b) and a.dtype == torch.float32 for a, b in zip(low, full, strict=True))


@pytest.mark.parametrize("shape", [(), (0,), (7,), (0, 5), (2, 3, 4)])
def test_any_shape(shape):
    tensors = [torch.ones(shape) for _ in range(4)]
    assert all(t.shape == shape for t in adam(*tensors, hyperparameters(1)))


@corrections
def test_nothing_moves_without_gradients_or_decay(bias_correction):
    weight, zero = normal(4, 4, dtype=torch.float32), torch.zeros(4, 4)
    updated = adam(zero, weight, zero, zero, hyperparameters(1, weight_decay=0.0, bias_correction=bias_correction))
    assert torch.equal(updated.master, weight) and not updated.exp_avg.any() and not updated.exp_avg_sq.any()


def test_the_step_number_matters():
    tensors = [normal(4, 4, seed=seed, dtype=torch.float32).abs() for seed in range(4)]
    first, second = (adam(*tensors, hyperparameters(step)) for step in (1, 2))
    assert not torch.equal(first.master, second.master) and torch.equal(first.exp_avg, second.exp_avg)
