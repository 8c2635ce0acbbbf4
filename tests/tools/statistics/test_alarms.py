"""Alarms: when a loss is a spike, and where infinite and NaN values came from."""

import math

import pytest
import torch
from torch import nn

import quantshard as qs
from quantshard.optimizers import FusedAdam
from quantshard.statistics import Statistics, first_nonfinite
from quantshard.tensor.parameter_state import RNG_DRAWS
from quantshard.tools.statistics.rows import LossHistory
from tests.tools.statistics.models import loss_of, perceptron
from tests.tools.statistics.test_recorder import bits


def spikes(losses, limit=10.0):
    history = LossHistory(limit)
    return [step for step, loss in enumerate(losses, 1) if history.add(step, loss) is not None]


NOISE = [2 + 0.01 * math.sin(7 * i) for i in range(60)]


def test_when_a_loss_is_a_spike():
    assert spikes([*NOISE, 2.5, *NOISE]) == [61]
    assert spikes([*NOISE, 2.5, 2.5, *NOISE]) == [61, 62], "the second is compared with what was before the first"
    assert spikes([*NOISE, 1.0, *NOISE]) == [], "a loss may fall"
    assert spikes([*NOISE, math.nan, 2.0]) == [61]
    assert spikes([5 * 0.97**i + 1 for i in range(200)]) == [], "nor does one that falls spike"
    assert spikes([1.0] * 30 + [1.049] + [1.051]) == [32], "of losses that do not move, by 10 times half a percent"
    assert spikes([1.0] * 19 + [9.0]) == [], "of few losses nothing is said"
    assert spikes([*NOISE, 2.5], limit=0) == []
    assert spikes([*NOISE, *[3.0] * 60]) == list(range(61, 81)), "after 20 it is the new level"


def test_alarms_are_told_at_once_and_once():
    model, told = perceptron(), []
    statistics = Statistics(model, None, every=0, on_alarm=told.append)
    found = [sample for loss in [*NOISE[:30], 99.0, 2.0] for sample in statistics.step(loss)]
    assert [(sample.step, sample.rows, len(sample.alarms)) for sample in found] == [(31, (), 1)]
    assert [alarm.kind for alarm in told] == ["loss spike"]
    assert found[0].to_dict()["alarms"][0]["value"] == 99.0


def test_alarms_warn_without_a_function_and_raise_with_one_that_does():
    statistics = Statistics(perceptron(), None, every=0)
    with pytest.warns(UserWarning, match="step 1: the loss is nan"):
        statistics.step(math.nan)

    def stop(alarm):
        raise FloatingPointError(alarm.text)

    with pytest.raises(FloatingPointError, match="the loss is inf"):
        Statistics(perceptron(), None, every=0, on_alarm=stop).step(math.inf)


def blocks():
    torch.manual_seed(0)
    with qs.quantized_model_init(recipe="nvfp4"):
        layers = [qs.LayerNormMLP(48, 64, params_dtype=torch.bfloat16, device="cpu") for _ in range(4)]
    return nn.Sequential(*layers)


class Spoiler(torch.autograd.Function):
    """Nothing, forward; backward an infinite gradient."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        grad[0, 0] = math.inf
        return grad


@pytest.mark.parametrize("layer", range(4))
def test_where_a_nan_came_from(layer):
    """Put into a layer's output, into the gradient that it gives back, and into its weight."""
    model = blocks()

    def run():
        loss_of(model, 0, "nvfp4").backward()

    assert first_nonfinite(model, run) is None
    hook = model[layer].register_forward_hook(lambda *a: a[2] * math.nan)
    found = first_nonfinite(model, run)
    hook.remove()
    assert found is not None and found.name == str(layer)
    assert found.text == f"the output of {layer} is, the first in forward order, infinite or NaN"
    if layer:  # the gradient of the input of the first is nobody's
        hook = model[layer].register_forward_pre_hook(lambda _, args: Spoiler.apply(args[0]))
        found = first_nonfinite(model, run)
        hook.remove()
        assert found is not None and found.name == str(layer - 1) and "in backward order" in found.text
    with torch.no_grad():
        model[layer].layer_norm_weight[5] = math.nan
    found = first_nonfinite(model, run)
    assert found is not None
    assert found.text == f"the values of {layer}.layer_norm_weight are infinite or NaN"


class Counting(nn.Module):
    """Its buffers are changed in place, put in the place of others, made by the first call, and removed by it."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(1))
        self.register_buffer("last", None)
        self.register_buffer("first", torch.ones(2))
        self.norm = nn.BatchNorm1d(48)

    def forward(self, x):
        self.calls = self.calls + 1
        self.last = x.detach()
        self.first = None
        return self.norm(x.float()).to(x.dtype)


def test_looking_for_it_puts_buffers_back():
    """After an error in the pass, too."""
    model = nn.Sequential(*perceptron(), Counting())
    loss_of(model, 0).backward()
    model[3].last, model[3].first = None, torch.ones(2)
    held = dict(model.named_buffers())
    before = {name: buffer.clone() for name, buffer in held.items()}
    assert first_nonfinite(model, lambda: loss_of(model, 1).backward()) is None
    with pytest.raises(ZeroDivisionError):
        first_nonfinite(model, lambda: loss_of(model, 2).backward() or 1 / 0)
    assert model[3].last is None and all(getattr(model[3], name) is held[f"3.{name}"] for name in ("calls", "first"))
    assert all(torch.equal(buffer, before[name]) for name, buffer in model.named_buffers())


def test_looking_for_it_changes_nothing():
    """Random words, histories, gradients and torch's generator are as before."""
    for recipe in ("nvfp4", qs.recipe.DelayedScaling(amax_history_len=3)):
        model = perceptron(recipe)
        optimizer = FusedAdam(model.parameters(), lr=1e-3)
        loss_of(model, 0, recipe).backward()
        grads = [param.grad for param in model.parameters()]
        before, state = bits(model), torch.get_rng_state()
        first_nonfinite(model, lambda model=model, recipe=recipe: (torch.rand(3), loss_of(model, 1, recipe).backward()))
        assert bits(model) == before and torch.equal(torch.get_rng_state(), state)
        assert all(param.grad is grad for param, grad in zip(model.parameters(), grads, strict=True))
        optimizer.step()
    assert int(model[1].weight_state("weight")[RNG_DRAWS]) >= 0
