"""What is wrong with an optimizer's parameters, numbers and gradients is said, by name, and what is right is not."""

import itertools
import math
import warnings

import pytest
import torch
from torch import nn

from quantshard import GroupedLinear, Linear, autocast, quantized_model_init
from quantshard.errors import ConfigurationError, NonFiniteGradientError
from quantshard.optimizers import FusedAdam, MasterWeights, clip_grad_norm_
from quantshard.tensor import components
from tests.tensor.test_tensor import same

OPTIMIZERS = {
    "FusedAdam": lambda params, **options: FusedAdam(params, lr=0.1, **options),
    "capturable": lambda params, **options: FusedAdam(params, lr=0.1, capturable=True, **options),
    "MasterWeights": lambda params, **options: MasterWeights(torch.optim.AdamW, params, lr=0.1, **options),
}
every_optimizer = pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)


def ones(*shape, dtype=torch.bfloat16):
    return nn.Parameter(torch.ones(*shape, dtype=dtype))


def give(value, *params):
    for param in params:
        param.grad = torch.full_like(param, value)


# ----------------------------------------------------------------------------------------------------- what it is given


@pytest.mark.parametrize("entry", [{"master_weights": False}, {"preset": "lean8"}, {"ema_decay": 0.9}])
@every_optimizer
def test_options_of_the_whole_optimizer_are_refused_in_a_group(make, entry):
    message = rf"param_groups\[\d\]: {next(iter(entry))} cannot be set for one group"
    with pytest.raises(ConfigurationError, match=message):
        make([{"params": [ones(2)], **entry}])
    optimizer = make([ones(2)])
    with pytest.raises(ConfigurationError, match=message):
        optimizer.add_param_group({"params": [ones(3)], **entry})


# --------------------------------------------------------------------------------------------------- numbers of a group


NUMBERS = [
    ("lr", math.inf), ("lr", math.nan), ("lr", -1e-3), ("lr", 3e38), ("lr", None), ("lr", "fast"),
    ("lr", torch.tensor(math.nan)), ("eps", math.nan), ("eps", -1.0), ("weight_decay", math.inf),
    ("weight_decay", 1e10), ("betas", (0.9, 1.0)), ("betas", (-0.1, 0.9)),
    ("betas", (0.9, math.nan)), ("betas", None), ("betas", (0.9, 1 - 1e-9)), ("betas", ("a", "b")),
    ("betas", ("0.9", "0.95")), ("lr", "1e-3"), ("eps", "1e-8"), ("weight_decay", "0.1"),
]  # fmt: skip


@pytest.mark.parametrize("name, value", NUMBERS)
def test_numbers_that_make_no_step_are_refused_at_once_and_in_a_step(name, value):
    """Nothing is changed by such a step."""
    with pytest.raises(ConfigurationError, match=rf"FusedAdam: param_groups\[0\]: {name}="):
        FusedAdam([ones(2)], **{"lr": 1e-3, name: value})
    param, other = ones(2), ones(3)
    optimizer = FusedAdam([{"params": [param]}, {"params": [other]}], lr=1e-3)
    give(1.0, param, other)
    optimizer.param_groups[1][name] = value
    with pytest.raises(ConfigurationError, match=rf"FusedAdam: param_groups\[1\]: {name}="):
        optimizer.step()
    assert (param == 1).all() and (other == 1).all() and optimizer.param_groups[0]["step"] == 0


@pytest.mark.parametrize("name, value", [
    ("lr", math.inf), ("lr", math.nan), ("lr", 3e38), ("weight_decay", math.nan), ("weight_decay", math.inf),
    ("lr", "1e-3"), ("weight_decay", "0.1"),
])  # fmt: skip
def test_numbers_of_any_optimizer(name, value):
    param = ones(2)
    optimizer = MasterWeights(torch.optim.AdamW, [param])
    give(1.0, param)
    optimizer.param_groups[0][name] = value
    with pytest.raises(ConfigurationError, match=rf"MasterWeights: param_groups\[0\]: {name}="):
        optimizer.step()
    assert (param == 1).all()


@pytest.mark.parametrize("value", [math.inf, math.nan, -1.0, 3e38])
def test_a_rate_on_the_device_that_makes_no_step(value):
    """It is not read in a step, which is then undone there and said later."""
    param = ones(2)
    optimizer = FusedAdam([param], capturable=True)
    give(1.0, param)
    optimizer.param_groups[0]["lr"].fill_(value)
    optimizer.step()
    assert (param == 1).all() and not optimizer.state[param]["exp_avg"].any()
    with pytest.raises(ConfigurationError, match=r"step was skipped: .* rate was not in"):
        optimizer.state_dict()
    optimizer.param_groups[0]["lr"].fill_(0.5)
    optimizer.step()
    assert (param < 1).all() and optimizer.skipped_steps == 1


def test_numbers_in_tensors_are_numbers():
    tensors = {"lr": torch.tensor(0.5), "betas": (torch.tensor(0.5), torch.tensor(0.75)), "eps": torch.tensor(0.25)}
    params = [ones(2, dtype=torch.float32) for _ in range(2)]
    optimizers = [
        FusedAdam(params[:1], **tensors),
        FusedAdam(params[1:], **{k: tuple(map(float, v)) if k == "betas" else float(v) for k, v in tensors.items()}),
    ]
    for param, optimizer in zip(params, optimizers, strict=True):
        give(3.0, param)
        optimizer.step()
    assert same(*(param.detach() for param in params))


def test_a_first_moment_that_needs_a_bound_where_there_is_none():
    with pytest.raises(ConfigurationError, match=r"exp_avg_dtype coarser .*beta1\*\*2 < beta2"):
        FusedAdam([ones(2)], betas=(0.9, 0.8), exp_avg_dtype=torch.uint8)
    optimizer = FusedAdam([param := ones(2)], exp_avg_dtype=torch.float16)
    optimizer.param_groups[0]["betas"] = (0.99, 0.9)
    give(1.0, param)
    with pytest.raises(ConfigurationError, match=r"beta1\*\*2 < beta2"):
        optimizer.step()
    for dtypes in ({}, {"exp_avg_dtype": torch.uint8, "exp_avg_sq_dtype": torch.uint8}):
        FusedAdam([ones(2)], betas=(0.9, 0.8), **dtypes)


@pytest.mark.parametrize("eps", [0.0, 1e-30, 1e-8])
def test_no_eps_and_no_gradient_is_no_update(eps):
    """Neither of zero gradients nor of those whose squares vanish; the others are updated as always."""
    param = nn.Parameter(torch.ones(5))
    optimizer = FusedAdam([param], lr=0.5, eps=eps)
    for _ in range(3):
        param.grad = torch.tensor([0.0, -0.0, 1e-25, 1e-10, 1.0])
        optimizer.step()
    assert torch.equal(param[:3].detach(), torch.ones(3))
    param = param.detach()
    assert float(param[4]) == pytest.approx(1 - 3 * 0.5, abs=1e-6)
    assert float(param[3]) == pytest.approx(float(param[4]), abs=1e-5) or eps == 1e-8


@pytest.mark.parametrize("decay", [1e-2, 2e9])
def test_the_largest_numbers_make_no_weight_infinite(decay):
    param = ones(4, dtype=torch.float32)
    optimizer = FusedAdam([param], lr=1e30 if decay < 1 else 1e-9, weight_decay=0.0 if decay < 1 else 1e9)
    for sign in (1, -1, 1):
        give(sign * 1e19, param)
        optimizer.step()
    assert param.isfinite().all() and optimizer.skipped_steps == 0


def test_masters_that_an_update_made_infinite_are_said_at_the_next_step():
    """Of an optimizer that is not known: what it will do cannot be told before."""
    params = [ones(2), ones(3)]
    optimizer = MasterWeights(torch.optim.SGD, [("a", params[0]), ("b", params[1])], lr=1e29)
    params[1].grad = torch.full((3,), 1e10, dtype=torch.bfloat16)
    params[0].grad = torch.zeros(2, dtype=torch.bfloat16)
    optimizer.step()
    assert optimizer.state[params[1]]["master_param"].isinf().all()
    with pytest.raises(NonFiniteGradientError, match=r"made the master of b infinite or NaN.*older checkpoint"):
        optimizer.step()
    with torch.no_grad():
        params[1].fill_(1.0)
    optimizer.reseed_masters()
    optimizer.param_groups[0]["lr"] = 1e-11
    optimizer.step()
    assert params[1].isfinite().all()


# ------------------------------------------------------------------------------------------------------ large gradients


DTYPES = [torch.float32, torch.bfloat16, torch.float64]


@every_optimizer
def test_gradients_that_are_not_finite_are_told_once_in_a_row(make):
    """A capturable optimizer's are told where it is asked."""
    param = ones(2, 3, dtype=torch.float32)
    optimizer = make([("weight", param)], max_skipped_in_a_row=4)
    said = []
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for value in (math.nan, math.inf, 1.0, math.nan):
            give(value, param)
            optimizer.step()
            said.append(len(told))
    assert said == ([0] * 4 if make is OPTIMIZERS["capturable"] else [1, 1, 1, 2])
    for each in told:
        assert "gradient of weight is infinite or NaN; this step is skipped, and nothing changed" in str(each.message)
        assert "4 in a row are an error" in str(each.message)


def test_a_rate_in_the_place_of_a_capturable_optimizers_tensor_is_refused():
    param = ones(2, 3, dtype=torch.float32)
    optimizer = OPTIMIZERS["capturable"]([("weight", param)])
    give(1.0, param)
    optimizer.param_groups[0]["lr"] = 5e-4
    with pytest.raises(TypeError, match="expected Tensor"):
        optimizer.step()
    assert torch.equal(param, torch.ones_like(param))


@every_optimizer
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@pytest.mark.parametrize("value", [1e20, -3e38])
def test_finite_gradients_whose_squares_overflow_are_called_so(make, dtype, value):
    param = ones(2, 3, dtype=dtype)
    optimizer = make([("weight", param)], max_skipped_in_a_row=2)
    give(value, param)
    late = pytest.warns(UserWarning, match="gradient of weight is finite, but above 1e\\+19.* step is skipped")
    with warnings.catch_warnings() if make is OPTIMIZERS["capturable"] else late:
        optimizer.step()
    message = "2 steps in a row were skipped: the gradient of weight is finite, but above.*clip_grad_norm_"
    if make is OPTIMIZERS["capturable"]:
        optimizer.step()
        with pytest.raises(NonFiniteGradientError, match=message):
            optimizer.state_dict()
    else:
        with pytest.raises(NonFiniteGradientError, match=message):
            optimizer.step()
    assert (param == 1).all()
    give(1e18, param)
    optimizer.step()
    assert (param < 1).all() and optimizer.skipped_steps == 2
    give(math.inf, param)
    optimizer.step()
    with pytest.raises(NonFiniteGradientError, match="infinite or NaN gradients, first in weight"):
        optimizer.step()
        optimizer.state_dict()


def test_float64_has_the_same_limit():
    param = ones(3, dtype=torch.float64)
    optimizer = MasterWeights(torch.optim.AdamW, [param], lr=0.1)
    give(1e18, param)
    optimizer.step()
    assert (param < 1).all() and optimizer.skipped_steps == 0
    give(1e100, param)
    with pytest.warns(UserWarning, match=r"above 1e\+19"):
        optimizer.step()
    assert optimizer.skipped_steps == 1


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("norm_type", [2.0, 1.0, 3.0, math.inf])
def test_large_gradients_are_clipped_and_train(dtype, norm_type):
    """A norm of 1e20 is what it is, and its gradients keep their direction."""
    model = nn.Linear(8, 4, bias=False, dtype=dtype)
    model.weight.grad = torch.full((4, 8), 1e20, dtype=dtype)
    model.weight.grad[0, 0] = -2e20
    total = clip_grad_norm_(model, 1.0, norm_type)
    values = torch.tensor([2e20] + [1e20] * 31, dtype=torch.float64)
    assert total.dtype is torch.float32
    assert float(total) == pytest.approx(float(torch.linalg.vector_norm(values, norm_type)), rel=2**-8)
    left = model.weight.grad.double()
    assert float(torch.linalg.vector_norm(left, norm_type)) == pytest.approx(1, rel=2**-7)
    assert float(left[0, 0] / left[1, 1]) == pytest.approx(-2, rel=2**-7)
    optimizer = FusedAdam(model.parameters()) if dtype is not torch.float64 else torch.optim.AdamW(model.parameters())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step()


@pytest.mark.parametrize("max_norm", [-1.0, math.nan])
def test_a_norm_that_cannot_be_clipped_to(max_norm):
    with pytest.raises(ConfigurationError, match=r"clip_grad_norm_\(max_norm="):
        clip_grad_norm_(nn.Linear(2, 2), max_norm)


# ------------------------------------------------------------------------------------------- steps that change nothing


NOTHING = "step changes nothing"


def warned(act):
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        act()
    return [str(w.message) for w in found if NOTHING in str(w.message)]


@every_optimizer
def test_a_step_before_any_backward_is_said_to_change_nothing(make):
    with quantized_model_init(recipe="mxfp8"):
        model = nn.Sequential(Linear(32, 32), nn.Linear(32, 2))
    optimizer = make(model.named_parameters())
    before = [p.detach().clone() for p in model[1].parameters()]
    (said,) = warned(optimizer.step)
    assert "none of this optimizer's 4 parameters (0.weight, ...) has a gradient" in said
    assert all(map(same, before, (p.detach() for p in model[1].parameters())))
    optimizer.zero_grad()
    assert warned(optimizer.step)
    with autocast(recipe="mxfp8"):
        model(torch.ones(3, 32)).sum().backward()
    assert not warned(optimizer.step)
    optimizer.zero_grad(set_to_none=False)
    assert not warned(optimizer.step)  # zeros are gradients: moments decay, and weights move on


@every_optimizer
def test_a_step_that_changes_anything_is_not(make):
    """A plain parameter alone, one group alone, lr = 0 (moments change), a closure, a step that is skipped."""
    quantized, plain = ones(2), ones(3)
    optimizer = make([{"params": [quantized]}, {"params": [plain]}])
    give(1.0, plain)
    assert not warned(optimizer.step)
    plain.grad = None

    def closure():
        give(1.0, quantized)

    assert not warned(lambda: optimizer.step(closure))
    give(math.nan, plain)
    quantized.grad = None
    assert not warned(optimizer.step)
    give(1.0, plain)
    for group in optimizer.param_groups:
        group["lr"] = torch.zeros(()) if isinstance(group["lr"], torch.Tensor) else 0.0
    assert not warned(optimizer.step)


@every_optimizer
def test_of_several_optimizers_each_speaks_for_itself(make):
    params = [ones(2), ones(3)]
    first, second = (make([param]) for param in params)
    give(1.0, params[0])
    assert not warned(first.step) and len(warned(second.step)) == 1


@every_optimizer
def test_experts_without_tokens(make):
    """All tokens go to one of three: it trains, and nothing is said of the others."""
    with quantized_model_init(recipe="mxfp8"):
        model = GroupedLinear(3, 32, 32, bias=False, params_dtype=torch.bfloat16)
    optimizer = make(model.named_parameters())
    before = [components.storage_of(p).dequantize() for p in model.parameters()]
    with autocast(recipe="mxfp8"):
        model(torch.randn(4, 32, dtype=torch.bfloat16), [0, 4, 0]).sum().backward()
    assert not warned(optimizer.step)
    moved = [
        not same(a, components.storage_of(p).dequantize()) for a, p in zip(before, model.parameters(), strict=True)
    ]
    assert moved[1]


@every_optimizer
def test_frozen_parameters_only(make):
    param = ones(2).requires_grad_(False)
    optimizer = make([param])
    assert warned(optimizer.step) == ["this optimizer has no parameter that is trained, so the " + NOTHING]
    param.requires_grad_()
    optimizer.initialize_state(param)
    give(1.0, param)
    assert not warned(optimizer.step) and (param != 1).all()
    param.requires_grad_(False)
    param.grad = None
    assert len(warned(optimizer.step)) == 1


@pytest.mark.parametrize("none, kind", list(itertools.product([True, False], ["FusedAdam", "MasterWeights"])))
def test_zero_grad_between_micro_batches(none, kind):
    param = ones(2)
    optimizer = OPTIMIZERS[kind]([param])
    for _ in range(3):
        param.sum().backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=none)
    assert param.grad is None if none else not param.grad.any()


@pytest.mark.parametrize(("name", "value"), [("lr", "1e-3"), ("weight_decay", "0.1"), ("lr", math.nan)])
def test_numbers_of_the_inner_optimizer_are_checked_before_it_is_built(name, value):
    with pytest.raises(ConfigurationError, match=rf"^MasterWeights: {name}="):
        MasterWeights(torch.optim.SGD, [nn.Parameter(torch.zeros(3))], **{name: value})
