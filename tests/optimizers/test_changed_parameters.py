"""Values that others give a parameter that is not quantized survive the next step, and its other elements keep the bits
of a run without them.
"""

import pytest
import torch
from torch import nn

from quantshard import Linear, autocast, quantized_model_init
from quantshard.optimizers import FusedAdam, MasterWeights

OPTIMIZERS = {
    "masters": lambda params: FusedAdam(params, lr=1e-3),
    "remainders": lambda params: FusedAdam(params, lr=1e-3, store_param_remainders=True),
    "MasterWeights": lambda params: MasterWeights(torch.optim.AdamW, params, lr=1e-3, weight_decay=0.0),
}
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
every_optimizer = pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)


def weight(dtype=torch.bfloat16):
    return nn.Parameter(torch.randn(7, 9, generator=torch.Generator().manual_seed(0)).to(DEVICE, dtype))


def step(optimizer, param, number):
    generator = torch.Generator().manual_seed(number)
    param.grad = torch.randn(param.shape, generator=generator).to(DEVICE, param.dtype)
    optimizer.step()


def master_of(optimizer, param):
    found = optimizer.state[param].get("master_param")
    return param.detach().float().clone() if found is None else found.clone()


@every_optimizer
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_elements_that_were_changed_and_those_that_were_not(make, dtype):
    changed, untouched = weight(dtype), weight(dtype)
    optimizers = [make([param]) for param in (changed, untouched)]
    for optimizer, param in zip(optimizers, (changed, untouched), strict=True):
        step(optimizer, param, 1)
        step(optimizer, param, 2)
    with torch.no_grad():
        changed[3] = 100.0
        changed[4, 2] = float("nan")
    for optimizer, param in zip(optimizers, (changed, untouched), strict=True):
        step(optimizer, param, 3)
    others = torch.ones(7, 9, dtype=torch.bool, device=DEVICE)
    others[3], others[4, 2] = False, False
    assert torch.equal(changed[others], untouched[others])
    masters = [master_of(*pair) for pair in zip(optimizers, (changed, untouched), strict=True)]
    assert torch.equal(masters[0][others], masters[1][others])
    assert (changed[3].float() - 100).abs().max() <= 0.5 and changed[4, 2].isnan()
    if make is not OPTIMIZERS["remainders"]:
        assert (masters[0][3] - 100).abs().max() < 0.01 and not (masters[0][3] == 100).any()


@every_optimizer
def test_an_embedding_that_renormalizes_itself(make):
    torch.manual_seed(0)
    with quantized_model_init(recipe="mxfp8"):
        model = nn.Sequential(nn.Embedding(10, 64, max_norm=1.0, dtype=torch.bfloat16), Linear(64, 64))
    model.to(DEVICE, torch.bfloat16)
    optimizer = make(model.parameters())
    for _ in range(5):
        with autocast(recipe="mxfp8"):
            model(torch.arange(10, device=DEVICE)).float().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert model[0].weight.float().norm(dim=1).max() < 1.02


@every_optimizer
@pytest.mark.parametrize("order", ["model first", "optimizer first"])
def test_a_resumed_run_is_the_one_that_never_stopped(make, order):
    """Its parameters were given new values too, those of their masters."""
    whole = weight()
    optimizer = make([whole])
    for number in (1, 2):
        step(optimizer, whole, number)
    saved, states = whole.detach().clone(), optimizer.state_dict()
    resumed = weight()
    later = make([resumed])
    loads = [lambda: resumed.detach().copy_(saved), lambda: later.load_state_dict(states)]
    for load in loads if order == "model first" else reversed(loads):
        load()
    for optimizer_of, param in ((optimizer, whole), (later, resumed)):
        step(optimizer_of, param, 3)
    assert torch.equal(resumed, whole) and torch.equal(master_of(later, resumed), master_of(optimizer, whole))


@every_optimizer
def test_a_row_that_is_added_between_a_load_and_the_first_step(make):
    before, param = weight(), weight()
    states = make([before]).state_dict()
    optimizer = make([param])
    optimizer.load_state_dict(states)
    with torch.no_grad():
        param[6] = 8.0
    step(optimizer, param, 1)
    assert (param[6].float() - 8).abs().max() <= 0.0625


def test_a_master_that_is_rounded_itself_stays():
    """It does not tell what the parameter was; so it must be told."""
    param = weight()
    optimizer = FusedAdam([param], lr=1e-3, master_weight_dtype=torch.float16)
    step(optimizer, param, 1)
    before = optimizer.state[param]["master_param"].clone()
    with torch.no_grad():
        param.mul_(2)
    optimizer.reseed_masters()
    assert not torch.equal(optimizer.state[param]["master_param"], before)
    step(optimizer, param, 2)
    assert (param.float() / weight().float() - 2).abs().median() < 0.1
