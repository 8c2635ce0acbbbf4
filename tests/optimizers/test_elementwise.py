"""What `ElementwiseOptimizer` gives to any formula, and what it refuses; FusedAdam has tests of its own for it all."""

import pytest
import torch
from torch import nn

from quantshard import Linear, quantized_model_init
from quantshard.errors import ConfigurationError
from quantshard.optimizers import ElementwiseOptimizer, StateSpec
from tests.distributed.models import bits, set_gradients
from tests.tensor.test_tensor import random

SETTINGS = {"lr": 1e-2, "momentum": 0.9}
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.uint8]


class Momentum(ElementwiseOptimizer):
    states = (StateSpec("momentum_buffer"),)

    def update(self, param, grad, master, states, settings):
        momentum = settings["momentum"] * states["momentum_buffer"] + grad
        return master - settings["lr"] * momentum, {"momentum_buffer": momentum}


def trained(recipe="mxfp8", **options):
    torch.manual_seed(1)
    with quantized_model_init(recipe=recipe):
        model = Linear(150, 70, params_dtype=torch.bfloat16)
    optimizer = Momentum(model.named_parameters(), SETTINGS, **options)
    for step in range(4):
        set_gradients(model, step)
        if step == 2:
            model.bias.grad[3] = torch.inf
        optimizer.step()
    assert optimizer.skipped_steps == 1
    return model, optimizer


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_step_from_which_nothing_is_read_has_the_same_bits(dtype):
    """States of fewer bits are rounded with random words; `step` and `lr` are tensors then."""
    options = {"state_dtypes": {"momentum_buffer": dtype}}
    assert bits(*trained(**options)) == bits(*trained(capturable=True, **options))


def test_remainders_are_the_same_training():
    model, optimizer = trained()
    other, halves = trained(store_param_remainders=True)
    assert bits(model) == bits(other)
    master = halves.get_unscaled_state(other.bias, "master_param")
    assert torch.equal(master, optimizer.state[model.bias]["master_param"])
    assert list(halves.state[other.bias]) == ["momentum_buffer", "master_param_low"]


def test_without_masters_weights_are_rounded_stochastically():
    """Updates below the precision of the weights add up on average."""
    param = nn.Parameter(torch.ones(64, 512, dtype=torch.bfloat16))
    optimizer = Momentum([param], {"lr": 2.0**-12, "momentum": 0.0}, master_weights=False)
    assert list(optimizer.state[param]) == ["momentum_buffer"]
    for _ in range(8):
        param.grad = torch.ones_like(param)
        optimizer.step()
    gap, count = 2.0**-8, param.numel()  # below 1; each of 8 roundings has a variance of at most gap**2 / 4
    assert abs(param.float().mean().item() - (1 - 2.0**-9)) < 5 * gap * (8 / 4 / count) ** 0.5
    assert param.unique().numel() > 1


@pytest.mark.parametrize(
    ("states", "defaults", "options", "message"),
    [
        ([StateSpec("a"), StateSpec("a")], SETTINGS, {}, "roles must differ"),
        ([StateSpec("master_param")], SETTINGS, {}, "roles must differ"),
        ([StateSpec("a")], {"lr": -1.0}, {}, "at least 0"),
        ([StateSpec("a")], SETTINGS, {"state_dtypes": {"b": torch.uint8}}, r"it has no state \['b'\], but \['a'\]"),
        ([StateSpec("a")], SETTINGS, {"state_dtypes": {"a": torch.int8}}, r"Formula\(a_dtype=torch.int8\)"),
    ],
)
def test_what_is_declared_wrongly_is_refused(states, defaults, options, message):
    formula = type("Formula", (Momentum,), {"states": tuple(states)})
    with pytest.raises(ConfigurationError, match=message):
        formula([nn.Parameter(random(4, 4))], defaults, **options)


def test_a_formula_that_forgets_a_state_is_refused():
    forgetful = type("Forgetful", (Momentum,), {"update": lambda self, param, grad, master, states, _: (master, {})})
    param = nn.Parameter(random(4, 4))
    param.grad = torch.ones_like(param)
    with pytest.raises(ConfigurationError, match="momentum_buffer"):
        forgetful([param], SETTINGS).step()


class Squares(ElementwiseOptimizer):
    """Gradient descent by a mean of squares of its own name."""

    states = (StateSpec("energy", nonnegative=True),)

    def update(self, param, grad, master, states, settings):
        energy = 0.9 * states["energy"] + 0.1 * grad * grad
        return master - settings["lr"] * grad, {"energy": energy}


def test_nonnegative_states_of_8_bits():
    """They have no sign; a positive one never becomes zero, and a negative one is zero."""
    param = torch.nn.Parameter(torch.ones(3, 200))
    optimizer = Squares([param], {"lr": 0.1}, state_dtypes={"energy": torch.uint8})
    assert set(optimizer.state[param]) == {"energy", "energy_scale_e8m0"}
    param.grad = torch.full((3, 200), 1e-12)
    param.grad[:, 0] = 1.0
    optimizer.step()
    assert (optimizer.get_unscaled_state(param, "energy") > 0).all()
    optimizer.set_scaled_state(param, "energy", -torch.ones(3, 200))
    assert not optimizer.get_unscaled_state(param, "energy").any()
