"""FusedAdam's other options: decoupled gradients, zero_grad, loads into another configuration, tensors of two kinds."""

import copy

import pytest
import torch
from torch import nn

from quantshard.errors import CheckpointError, ConfigurationError
from quantshard.optimizers import FusedAdam
from quantshard.tensor import components
from quantshard.tensor.parameter_state import RNG_KEY
from tests.optimizers.test_states import MASTERS, build, set_grads, values
from tests.tensor.test_tensor import RECIPES, same

MXFP8 = RECIPES["mxfp8"].weight


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_decoupled_gradients_are_read_instead(dtype):
    """Of any dtype, exactly; `.grad` plays no part, not even one that is not finite."""
    (params, optimizer), (twins, twin) = build(MXFP8, use_decoupled_grad=True), build(MXFP8)
    for step in range(3):
        set_grads(twins, step)
        for key, param in params.items():
            twins[key].grad = twins[key].grad.to(dtype).to(twins[key].dtype)
            param.decoupled_grad = twins[key].grad.to(torch.promote_types(dtype, twins[key].dtype))
            param.grad = torch.full(param.shape, float("nan"), dtype=param.dtype)
        optimizer.step()
        twin.step()
    assert optimizer.skipped_steps == 0
    assert all(same(values(params[key]), values(twins[key])) for key in params)


def test_a_parameter_without_decoupled_gradient_stays():
    params, optimizer = build(MXFP8, use_decoupled_grad=True)
    before = {key: values(param) for key, param in params.items()}
    set_grads(params, 1)
    params["fp32"].decoupled_grad = torch.ones(4, 130)
    optimizer.step()
    assert [key for key in params if not same(before[key], values(params[key]))] == ["fp32"]


def test_a_decoupled_gradient_of_another_shape_is_refused():
    params, optimizer = build(MXFP8, use_decoupled_grad=True)
    params["vector"].decoupled_grad = torch.ones(32)
    with pytest.raises(ConfigurationError, match=r"vector .*\(33,\).* decoupled_grad .*\(32,\)"):
        optimizer.step()


@pytest.mark.parametrize("decoupled", [True, False])
@pytest.mark.parametrize("none", [True, False, None])
def test_zero_grad_clears_both(decoupled, none):
    param = nn.Parameter(torch.ones(3))
    optimizer = FusedAdam([param], use_decoupled_grad=decoupled)
    param.grad, param.decoupled_grad = torch.ones(3), torch.ones(3)
    given = param.grad, param.decoupled_grad
    optimizer.zero_grad(none) if none is not None else optimizer.zero_grad()
    if none is False:
        assert param.grad is given[0] and not param.grad.any()
        assert param.decoupled_grad is given[1] and bool(param.decoupled_grad.any()) != decoupled
    else:
        assert param.grad is None and (param.decoupled_grad is None) == decoupled


CONFIGURATIONS = {
    "BF16 moment": {"exp_avg_dtype": torch.bfloat16},
    "FP16 moment": {"exp_avg_dtype": torch.float16},
    "FP8 second moment": {"exp_avg_sq_dtype": torch.uint8},
    "FP16 second moment": {"exp_avg_sq_dtype": torch.float16},
    "BF16 masters": MASTERS["bf16"],
    "FP16 masters": MASTERS["fp16"],
    "remainders": MASTERS["remainder"],
    "no masters": MASTERS["none"],
}


@pytest.mark.parametrize("option", CONFIGURATIONS)
def test_a_state_of_another_configuration_is_refused(option):
    """Both ways, and nothing is loaded."""
    configured, plain = CONFIGURATIONS[option], {}
    for saved, own in ((configured, plain), (plain, configured)):
        state = copy.deepcopy(build(MXFP8, **saved)[1].state_dict())
        params, optimizer = build(MXFP8, **own)
        set_grads(params, 1)
        optimizer.step()
        before = copy.deepcopy(optimizer.state_dict())
        with pytest.raises(CheckpointError, match="build it with the options that it was saved with"):
            optimizer.load_state_dict(state)
        after = optimizer.state_dict()
        for index, entries in before["state"].items():
            assert all(same(t, after["state"][index][key]) for key, t in entries.items())


@pytest.mark.parametrize("masters", MASTERS)
@pytest.mark.parametrize("name", ["bfloat16", "float16", "uint8"])
def test_loading_gives_the_same_future(masters, name):
    """Of every kind of state; the seed goes along, so an optimizer that was seeded otherwise rounds alike."""
    dtypes = dict.fromkeys(("exp_avg_dtype", "exp_avg_sq_dtype"), getattr(torch, name))
    params, optimizer = build(MXFP8, **MASTERS[masters], **dtypes)
    for step in range(2):
        set_grads(params, step)
        optimizer.step()
    others, _ = build(MXFP8)
    for weight in map(components.quantized_local, others.values()):
        if weight is not None:
            weight.quantized_storage.state[RNG_KEY].add_(1)  # the seed derives from it
    other = FusedAdam(others.items(), **MASTERS[masters], **dtypes)
    assert other.param_groups[0]["rounding_seed"] != optimizer.param_groups[0]["rounding_seed"]
    for key, param in others.items():
        param.data.copy_(params[key].data)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for step in (3, 4):
        for run, on in ((params, optimizer), (others, other)):
            set_grads(run, step)
            on.step()
    for key, param in params.items():
        assert same(values(param), values(others[key]))
        assert all(same(t, other.state[others[key]][k]) for k, t in optimizer.state[param].items())


def test_the_seed_does_not_depend_on_torchs_generator():
    """Replicas under DDP seed their data apart and build the optimizer then; their weights must be rounded alike."""
    params, _ = build(MXFP8)
    seeds = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        seeds.append(FusedAdam(params.items(), exp_avg_dtype=torch.bfloat16).param_groups[0]["rounding_seed"])
    assert seeds[0] == seeds[1]


@pytest.mark.parametrize("set_grad_none", [None, True, False])
def test_set_grad_none_is_the_default_of_zero_grad(set_grad_none):
    param = nn.Parameter(torch.ones(2, 2))
    optimizer = FusedAdam([param], set_grad_none=set_grad_none)
    for argument, becomes_none in ((None, set_grad_none is not False), (True, True), (False, False)):
        param.grad = torch.ones(2, 2)
        optimizer.zero_grad(argument)
        assert param.grad is None if becomes_none else not param.grad.any()
