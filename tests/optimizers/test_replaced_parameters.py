"""Parameters that others put into an optimizer's groups: adopted before the first step, refused after it, by name."""

import copy

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict

from quantshard.errors import CheckpointError, ConfigurationError
from quantshard.optimizers import FusedAdam, MasterWeights
from tests.tensor.test_tensor import RECIPES, contents, differing, random, same
from tests.weights import quantize_weight

OPTIMIZERS = {
    "FusedAdam": lambda params: FusedAdam(params, lr=0.1),
    "capturable": lambda params: FusedAdam(params, lr=0.1, capturable=True),
    "FP8 moments": lambda params: FusedAdam(params, lr=0.1, exp_avg_dtype=torch.uint8, exp_avg_sq_dtype=torch.uint8),
    "no masters": lambda params: FusedAdam(params, lr=0.1, master_weights=False),
    "MasterWeights": lambda params: MasterWeights(torch.optim.AdamW, params, lr=0.1),
}
every_optimizer = pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)


def parameters(seed=0):
    torch.manual_seed(seed)
    return {
        "quantized": nn.Parameter(
            quantize_weight(random(40, 150, seed=seed), RECIPES["mxfp8"].weight, dtype=torch.bfloat16)
        ),
        "bf16": nn.Parameter(random(6, 140, seed=seed + 1).bfloat16()),
        "fp32": nn.Parameter(random(4, 33, seed=seed + 2)),
    }


def groups_of(params):
    named = list(params.items())
    return [{"params": named[:2]}, {"params": named[2:], "lr": 0.2}]


def step(optimizer, params, number=0):
    for index, param in enumerate(params.values()):
        param.grad = random(param.numel(), 1, seed=100 * number + index).view(param.shape).to(param.dtype)
    optimizer.step()
    optimizer.zero_grad()


def put(optimizer, params, one_by_one):
    """As accelerate does: entries one by one first, then new lists."""
    values = iter(params.values())
    for group in optimizer.param_groups:
        if one_by_one:
            for position in range(len(group["params"])):
                group["params"][position] = next(values)
        else:
            group["params"] = [next(values) for _ in group["params"]]


def everything(optimizer, params):
    held = {f"{name} {key}": value for name, p in params.items() for key, value in optimizer.state[p].items()}
    return {**{name: p.detach() for name, p in params.items() if name != "quantized"}, **held,
            **contents(params["quantized"].data)}  # fmt: skip


TOUCHES = {
    "step": lambda optimizer: None,
    "state_dict": lambda optimizer: optimizer.state_dict(),
    "load_state_dict": lambda optimizer: optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict())),
    "reseed_masters": lambda optimizer: optimizer.reseed_masters(),
    "initialize_state": lambda optimizer: optimizer.initialize_state(optimizer.param_groups[0]["params"][1]),
}


@every_optimizer
@pytest.mark.parametrize("one_by_one", [True, False], ids=["entries", "lists"])
@pytest.mark.parametrize("touch", TOUCHES)
def test_those_that_took_their_places_before_the_first_step_are_trained(make, one_by_one, touch):
    """To the bits of an optimizer that was built over them, whatever is called first."""
    first, others, twins = parameters(), parameters(7), parameters(7)
    optimizer, reference = make(groups_of(first)), make(groups_of(twins))
    optimizer.load_state_dict(optimizer.state_dict())  # as accelerate does when it wraps an optimizer
    put(optimizer, others, one_by_one)
    first["fp32"].data = torch.empty(0)  # freed
    TOUCHES[touch](optimizer)
    for number in range(2):
        step(optimizer, others, number)
        step(reference, twins, number)
    assert not differing(everything(optimizer, others), everything(reference, twins))
    assert len(optimizer.state) == 3
    saved, expected = optimizer.state_dict(), reference.state_dict()
    assert saved["param_groups"] == expected["param_groups"]
    assert all(same(value, expected["state"][i][k]) for i, s in saved["state"].items() for k, value in s.items()
               if isinstance(value, torch.Tensor))  # fmt: skip


@every_optimizer
def test_a_group_may_be_added_after_they_took_their_places(make):
    others = parameters(7)
    optimizer = make(groups_of(parameters()))
    put(optimizer, others, False)
    more = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    optimizer.add_param_group({"params": [("more", more)]})
    step(optimizer, {**others, "more": more})
    assert (more != 1).all() and len(optimizer.state) == 4


@every_optimizer
@pytest.mark.parametrize("touch", TOUCHES)
def test_after_the_first_step_they_are_refused_by_name(make, touch):
    params = parameters()
    optimizer = make(groups_of(params))
    step(optimizer, params)
    optimizer.param_groups[0]["params"][1] = nn.Parameter(torch.zeros(3, 140, dtype=torch.bfloat16))
    act = optimizer.step if touch == "step" else lambda: TOUCHES[touch](optimizer)
    for _ in range(2):  # and again
        with pytest.raises(
            ConfigurationError,
            match="its states were made for other parameters",
        ):
            act()


@every_optimizer
def test_states_that_were_loaded_are_not_lost(make):
    trained = parameters()
    first = make(groups_of(trained))
    step(first, trained)
    state = copy.deepcopy(first.state_dict())
    optimizer = make(groups_of(parameters()))
    optimizer.load_state_dict(state)
    put(optimizer, parameters(7), False)
    with pytest.raises(ConfigurationError, match="states were made for other parameters"):
        optimizer.step()


def test_masters_that_were_set_or_loaded_are_not_lost():
    params = parameters()
    optimizer = FusedAdam(groups_of(params))
    untouched = copy.deepcopy(optimizer.state_dict())
    optimizer.set_scaled_state(params["bf16"], "master_param", torch.ones(6, 140))
    state = copy.deepcopy(optimizer.state_dict())
    put(optimizer, parameters(7), False)
    with pytest.raises(ConfigurationError, match="states were made for other parameters"):
        optimizer.step()
    optimizer = FusedAdam(groups_of(parameters()))
    optimizer.load_state_dict(untouched)
    put(optimizer, parameters(7), False)
    optimizer.state_dict()
    optimizer.load_state_dict(state)
    put(optimizer, parameters(), False)
    with pytest.raises(ConfigurationError, match="states were made for other parameters"):
        optimizer.state_dict()


@every_optimizer
def test_one_that_was_replaced_in_the_model_alone_gets_no_gradient_which_is_said(make):
    model = nn.Linear(3, 4, bias=False, dtype=torch.bfloat16)
    optimizer = make(model.named_parameters())
    model.weight = nn.Parameter(torch.ones(4, 3, dtype=torch.bfloat16))
    model(torch.ones(2, 3, dtype=torch.bfloat16)).sum().backward()
    with pytest.warns(UserWarning, match=r"none of this optimizer's 1 parameters \(weight, .*replaced in the model"):
        optimizer.step()


@every_optimizer
@pytest.mark.parametrize("options", [{}, {"full_state_dict": True}, {"flatten_optimizer_state_dict": True}])
def test_the_states_of_a_frozen_parameter_are_refused_by_name(make, options):
    """PyTorch drops them, or passes the live ones as if they were loaded."""
    options, runs = StateDictOptions(**options), []
    for seed in (0, 5):
        model = nn.ParameterDict(parameters(seed))
        runs.append((model, make(model.named_parameters())))
        model["quantized"].requires_grad_(False)
    (trained, optimizer), (model, other) = runs
    state = copy.deepcopy(get_optimizer_state_dict(trained, optimizer, options=options))
    refusal = r"^quantized is frozen, .* freeze it after"
    with pytest.raises(CheckpointError, match=refusal):
        set_optimizer_state_dict(model, other, dict(state), options=options)
    model["quantized"].requires_grad_(True)
    set_optimizer_state_dict(model, other, dict(state), options=options)
    own, loaded = other.state[model["quantized"]], optimizer.state[trained["quantized"]]
    assert own and not [key for key in loaded if not torch.equal(own[key], loaded[key])]
