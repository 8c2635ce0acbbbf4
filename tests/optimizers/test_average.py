"""The average of the weights that an optimizer keeps (`ema_decay`), and a model that is evaluated with it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from quantshard import Linear, checkpoints, quantized_model_init
from quantshard.errors import CheckpointError, ConfigurationError
from quantshard.optimizers import FusedAdam, Lion, MasterWeights, averaged_weights
from tests.distributed.models import RECIPES, bits, set_gradients
from tests.optimizers.test_lion import SETTINGS
from tests.tensor.test_tensor import contents, differing, same

DECAY, STEPS = 0.9, 6
OPTIMIZERS: dict[str, Callable[..., Any]] = {
    "FusedAdam": lambda params, **ema: FusedAdam(params, lr=1e-2, **ema),
    "remainders": lambda params, **ema: FusedAdam(params, lr=1e-2, store_param_remainders=True, **ema),
    "capturable": lambda params, **ema: FusedAdam(params, lr=1e-2, capturable=True, **ema),
    "Lion": lambda params, **ema: Lion(params, **SETTINGS, **ema),
    "MasterWeights": lambda params, **ema: MasterWeights(torch.optim.SGD, params, lr=1e-2, **ema),
}
every_optimizer = pytest.mark.parametrize("kind", OPTIMIZERS)


def build(kind: str, recipe: str = "mxfp8", seed: int = 5, **options: Any) -> tuple[nn.Sequential, Any]:
    """A quantized weight, BF16 biases, a float32 vector; averaged unless the options say otherwise."""
    torch.manual_seed(seed)
    with quantized_model_init(recipe=RECIPES[recipe]):
        model = nn.Sequential(Linear(70, 50, params_dtype=torch.bfloat16), Linear(50, 9, params_dtype=torch.bfloat16))
    model.append(nn.LayerNorm(9))
    return model, OPTIMIZERS[kind](model.named_parameters(), **{"ema_decay": DECAY, **options})


def trained_values(optimizer: Any, param: Tensor) -> Tensor:
    """What is averaged: the master, or the parameter that has none."""
    read = getattr(optimizer, "get_unscaled_state", None)
    if read is None:
        return optimizer.state[param].get("master_param", param).detach().clone()
    has_master = any(key.startswith("master") for key in optimizer.state[param])
    return (read(param, "master_param") if has_master else param).detach().clone()


def step(model: nn.Module, optimizer: Any, number: int) -> None:
    set_gradients(model, number)
    optimizer.step()


@every_optimizer
def test_it_is_the_average_in_float64(kind: str) -> None:
    """Of the values after each step that was made, none of the first values; skipped steps change nothing, and a weight
    without a gradient is averaged as it is."""
    model, optimizer = build(kind)
    found: dict[str, list[Tensor]] = {name: [] for name, _ in model.named_parameters()}
    for number in range(STEPS):
        set_gradients(model, number)
        model[2].bias.grad = None
        if number == 2:
            model[0].bias.grad[3] = float("nan")
        if number in (1, 4):
            model[1].weight.grad = None
        before = bits(model, optimizer)
        optimizer.step()
        if number == 2:
            assert bits(model, optimizer) == before
            continue
        for name, param in model.named_parameters():
            found[name].append(trained_values(optimizer, param).double())
    for name, param in model.named_parameters():
        average, values = optimizer.state[param]["ema_param"], torch.stack(found[name])
        count = len(values)
        weights = torch.tensor([DECAY ** (count - i) for i in range(1, count + 1)], dtype=torch.float64)
        exact = torch.einsum("s,s...->...", weights / weights.sum(), values)
        # a step rounds a difference of at most 2 M, its product with the share, which is rounded too, and the sum
        bound = count * 2.0**-24 * values.abs().max() * 8
        assert average.dtype is torch.float32 and (average - exact).abs().max() <= bound, name
    unmoved = model[2].bias
    assert torch.equal(optimizer.state[unmoved]["ema_param"], unmoved) and optimizer.skipped_steps == 1


def test_without_masters_the_new_values_are_averaged_before_they_are_rounded() -> None:
    """A step from a known weight, by hand."""
    model, optimizer = build("FusedAdam", master_weights=False)
    weight = model[0].weight
    before, grad = weight.dequantize(dtype=torch.float32), torch.ones(50, 70, dtype=torch.bfloat16)
    weight.grad = grad
    optimizer.step()
    torch.testing.assert_close(optimizer.state[weight]["ema_param"], before - 1e-2, rtol=0, atol=1e-6)
    assert not torch.equal(optimizer.state[weight]["ema_param"], weight.dequantize(dtype=torch.float32))


@every_optimizer
@pytest.mark.parametrize("recipe", ["delayed", "nvfp4"])
def test_evaluating_leaves_every_bit(recipe: str, kind: str) -> None:
    """Inside are the nearest values of the averages; afterwards, and after an exception, all is as it was, and the
    next steps are those of a training that was never evaluated."""
    (model, optimizer), (twin, undisturbed) = build(kind, recipe), build(kind, recipe)
    for number in range(3):
        step(model, optimizer, number)
        step(twin, undisturbed, number)
    before, nearest = bits(model, optimizer), model[0].weight.detach().clone()
    if "amax_history" in nearest.quantized_storage.state:
        nearest.quantized_storage.state["amax_history"].zero_()
    nearest.quantize_(optimizer.state[model[0].weight]["ema_param"])
    with pytest.raises(ZeroDivisionError), averaged_weights(model, optimizer):
        assert differing(contents(model[0].weight), contents(nearest)) == []
        assert same(model[1].bias.data, optimizer.state[model[1].bias]["ema_param"].bfloat16())
        assert same(model[2].weight.data, optimizer.state[model[2].weight]["ema_param"])
        _ = 1 / 0
    assert bits(model, optimizer) == before
    step(model, optimizer, 3)
    step(twin, undisturbed, 3)
    assert bits(model, optimizer) == bits(twin, undisturbed) != before


@pytest.mark.parametrize("kind", ["FusedAdam", "MasterWeights"])
def test_while_averages_stand_in(kind: str) -> None:
    """Nothing can mistake them for weights; and a weight that others changed before is told of all the same."""
    model, optimizer = build(kind)
    step(model, optimizer, 0)
    step(model, optimizer, 1)
    with averaged_weights(model, optimizer):
        inside = bits(model)
        for wrong in (optimizer.step, optimizer.state_dict, optimizer.reseed_masters, optimizer.drop_average):
            with pytest.raises(ConfigurationError, match="do that after it"):
                wrong()
        with pytest.raises(ConfigurationError, match="do that after it"), averaged_weights(model, optimizer):
            pass
    assert inside != bits(model)
    step(model, optimizer, 2)
    model[0].weight.data.quantize_(torch.ones(50, 70))
    with averaged_weights(model, optimizer):
        pass
    with pytest.raises(ConfigurationError, match="was given new values"):
        optimizer.step()


def test_initial_values_are_kept() -> None:
    """Those of `preserve_high_precision_init_val`, which other writes drop."""
    with quantized_model_init(recipe="mxfp8", preserve_high_precision_init_val=True):
        layer = Linear(32, 32, params_dtype=torch.bfloat16)
    before = layer.weight.get_high_precision_init_val()
    with averaged_weights(layer, FusedAdam(layer.parameters(), ema_decay=DECAY)):
        pass
    assert before is not None and layer.weight.get_high_precision_init_val() is before


def test_what_cannot_be_averaged() -> None:
    model, optimizer = build("FusedAdam", ema_decay=0.0)
    with (
        pytest.raises(ConfigurationError, match=r"keeps no averages; call its begin_average"),
        averaged_weights(model, optimizer),
    ):
        pass
    model, optimizer = build("FusedAdam")
    with pytest.raises(ConfigurationError, match=r"6 of the 6 parameters .* not the model's"):
        with averaged_weights(build("FusedAdam")[0], optimizer):
            pass
    before = bits(model)
    optimizer.state[model[0].weight]["ema_param"][1, 2] = torch.inf
    with pytest.raises(ConfigurationError, match=r"infinite or NaN, the first, inf, at \[1, 2\]"):
        with averaged_weights(model, optimizer):
            pass
    assert bits(model) == before
    for decay in (1.0, -0.1, float("nan"), "fast"):
        for kind in ("FusedAdam", "MasterWeights"):
            with pytest.raises(ConfigurationError, match="ema_decay="):
                build(kind, ema_decay=decay)
    for kind in ("FusedAdam", "MasterWeights"):
        with pytest.raises(ConfigurationError, match="ema_decay cannot be set for one group"):
            OPTIMIZERS[kind]([{"params": [nn.Parameter(torch.ones(2))], "ema_decay": 0.5}])
    optimizer.param_groups[0]["ema_decay"] = 2.0
    with pytest.raises(ConfigurationError, match=r"param_groups\[0\]: ema_decay=2\.0"):
        step(model, optimizer, 0)


@pytest.mark.parametrize("kind", ["FusedAdam", "MasterWeights"])
def test_begun_and_dropped(kind: str, tmp_path: Any) -> None:
    """A checkpoint of either kind is refused by the other, with what to do about it, which then works."""
    (plain, without), (model, optimizer) = (build(kind, ema_decay=decay) for decay in (0.0, DECAY))
    for number in range(2):
        step(plain, without, number)
        step(model, optimizer, number)
    checkpoints.save(tmp_path / "without", plain, without)
    checkpoints.save(tmp_path / "with", model, optimizer)
    before = bits(model, optimizer)
    with pytest.raises(CheckpointError, match=r"of another optimizer: .* this one's tensors .*ema_param"):
        checkpoints.load(tmp_path / "without", model, optimizer)
    with pytest.raises(CheckpointError, match=r"of another optimizer: .* tensors that this one lacks .*ema_param"):
        checkpoints.load(tmp_path / "with", plain, without)
    assert bits(model, optimizer) == before
    for own, other in ((optimizer, without), (without, optimizer)):
        with pytest.raises(CheckpointError, match="build it with"):
            own.load_state_dict(copy.deepcopy(other.state_dict()))
    with pytest.raises(ConfigurationError, match="use a decay above 0, once"):
        optimizer.begin_average(DECAY)
    checkpoints.load(tmp_path / "without", plain, without)
    without.begin_average(DECAY)
    assert all(same(without.state[p]["ema_param"], trained_values(without, p).float()) for p in plain.parameters())
    step(plain, without, 2)
    checkpoints.load(tmp_path / "with", model, optimizer)
    assert bits(model, optimizer) == before
    optimizer.drop_average()
    step(model, optimizer, 2)
    assert bits(model) == bits(plain) and "ema_decay" not in optimizer.param_groups[0]
    without.drop_average()
    assert bits(model, optimizer) == bits(plain, without)


@every_optimizer
def test_one_begun_later_begins_with_the_values_of_then(kind: str) -> None:
    """By one formula in float64: they have the weight of all steps before, in a group that was added later of its own;
    a skipped step counts for nothing."""
    model, optimizer = build(kind, ema_decay=0.0)
    late = nn.Parameter(torch.ones(5))
    made: dict[Tensor, int] = dict.fromkeys(model.parameters(), 0)
    for number in range(4):
        if number == 2:
            optimizer.add_param_group({"params": [("late", late)]})
            made[late] = 0
        if late in made:
            late.grad = torch.full((5,), float(number))
        set_gradients(model, number)
        if number == 1:
            model[0].bias.grad[3] = float("nan")
        optimizer.step()
        made = {param: count + (number != 1) for param, count in made.items()}
    optimizer.begin_average(DECAY)
    exact = {param: trained_values(optimizer, param).double() for param in made}
    for number in range(4, 4 + STEPS):
        step(model, optimizer, number)
        for param in made:
            made[param] += 1
            share = (1 - DECAY) / (1 - DECAY ** made[param])
            exact[param] += share * (trained_values(optimizer, param).double() - exact[param])
    assert sorted(set(made.values())) == [2 + STEPS, 3 + STEPS]
    for param, wanted in exact.items():
        bound = STEPS * 2.0**-24 * 8 * (wanted.abs().max() + 1)  # as in test_it_is_the_average_in_float64
        assert (optimizer.state[param]["ema_param"] - wanted).abs().max() <= bound


@pytest.mark.parametrize("kind", ["FusedAdam", "MasterWeights"])
def test_reseeded_with_the_masters(kind: str) -> None:
    model, optimizer = build(kind)
    step(model, optimizer, 0)
    optimizer.reseed_masters()
    assert all(same(optimizer.state[p]["ema_param"], trained_values(optimizer, p)) for p in model.parameters())


@every_optimizer
def test_values_that_are_given_to_averages_are_undone_with_a_warning(kind: str) -> None:
    model, optimizer = build(kind)
    step(model, optimizer, 0)
    before = bits(model)
    loaded = build(kind, seed=6)[0].state_dict()
    with pytest.warns(UserWarning, match=r"averaged_weights: 0.weight and 5 more got new values inside.*load outside"):
        with averaged_weights(model, optimizer):
            model.load_state_dict(loaded)
    assert bits(model) == before
    with pytest.warns(UserWarning, match=r"averaged_weights: 1.bias got new values inside"):
        with averaged_weights(model, optimizer), torch.no_grad():
            model[1].bias.add_(1)
    assert bits(model) == before
    step(model, optimizer, 1)
