"""Values that others give a parameter that is not quantized survive the next step, and its other elements keep the bits
of a run without them.
"""

import pytest
import torch
from torch import nn

from quantshard import Linear, autocast, quantized_model_init
from quantshard.errors import ConfigurationError
from quantshard.optimizers import FusedAdam, Lion, MasterWeights, Muon, master_weights

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


def test_a_master_that_is_rounded_itself_stays_until_it_is_seeded_anew():
    """It does not tell what the parameter was."""
    params, optimizers = [weight(), weight()], []
    for param in params:
        torch.manual_seed(0)  # that of the random words
        optimizers.append(FusedAdam([param], lr=1e-3, master_weight_dtype=torch.float16))
    changed, untouched = params
    for number in (1, 2):
        for optimizer, param in zip(optimizers, params, strict=True):
            step(optimizer, param, number)
        with torch.no_grad():
            assert torch.equal(changed, untouched)
            changed.mul_(2)
    optimizers[0].reseed_masters()
    step(optimizers[0], changed, 3)
    assert (changed.float() / untouched.float() - 2).abs().median() < 0.1


def test_what_was_adopted_is_not_adopted_again(monkeypatch):
    """Neither where there is no gradient, nor of a parameter that is its own master."""
    params = [weight(), weight(), weight(torch.float32)]
    optimizer, adopted = MasterWeights(torch.optim.AdamW, params, lr=1e-3), []
    adopt = master_weights.adopt
    monkeypatch.setattr(master_weights, "adopt", lambda *args: (adopted.append(args[0].shape), adopt(*args)))
    with torch.no_grad():
        params[1].mul_(2)
    for number in range(4):
        step(optimizer, params[0], number)
        params[2].grad = torch.ones_like(params[2])
    assert len(adopted) == 1


CAST = {
    **OPTIMIZERS,
    "lean8": lambda params: FusedAdam(params, lr=1e-3, preset="lean8"),
    "Muon": lambda params: Muon(params, lr=1e-3),
    "Lion by remainders": lambda params: Lion(params, lr=1e-3, store_param_remainders=True),
    "without masters": lambda params: FusedAdam(params, lr=1e-3, master_weights=False),
}
NEEDS_DTYPE = {"remainders", "lean8", "Lion by remainders"}


@pytest.mark.parametrize("steps_before", [0, 2])
@pytest.mark.parametrize("how", CAST)
def test_a_model_that_is_cast_keeps_its_masters_or_is_refused(how, steps_before):
    """A remainder is of the bits of a BF16 weight: joined to those of an FP16 one it made weights of 1 into 0.007."""
    model = nn.Linear(9, 7, bias=False, device=DEVICE, dtype=torch.bfloat16)
    optimizer = CAST[how](model.named_parameters())
    for number in range(steps_before):
        step(optimizer, model.weight, number)
    before = model.weight.detach().clone()
    model.half()
    if how in NEEDS_DTYPE:
        with pytest.raises(ConfigurationError, match=r"weight was torch.bfloat16 .* now torch.float16"):
            step(optimizer, model.weight, 9)
        assert torch.equal(model.weight, before.half())
        model.bfloat16()
    step(optimizer, model.weight, 9)
    assert torch.equal(model.weight, master_of(optimizer, model.weight).to(model.weight.dtype)) or how in NEEDS_DTYPE
    assert 0 < (model.weight.float() - before.float()).abs().max() < 0.01


@pytest.mark.parametrize("how", CAST)
def test_what_is_not_stepped_any_more_may_be_cast(how):
    """A part that was frozen, and a model that is exported."""
    model = nn.Sequential(*(nn.Linear(9, 9, bias=False, device=DEVICE, dtype=torch.bfloat16) for _ in range(2)))
    optimizer = CAST[how](model.named_parameters())
    for layer in model:
        step(optimizer, layer.weight, 0)
        optimizer.zero_grad()
    model[0].half().requires_grad_(False)
    before = model[1].weight.detach().clone()
    step(optimizer, model[1].weight, 1)
    assert not torch.equal(model[1].weight, before)
    optimizer.zero_grad()
    model.half()
    assert len(optimizer.state_dict()["state"]) == 2


@pytest.mark.parametrize("how", CAST)
def test_a_parameter_that_is_given_another_shape_is_refused(how):
    """transformers' `resize_token_embeddings` keeps the parameter."""
    model = nn.Linear(9, 7, bias=False, device=DEVICE, dtype=torch.bfloat16)
    optimizer = CAST[how](model.named_parameters())
    step(optimizer, model.weight, 0)
    model.weight.data = torch.ones(8, 9, device=DEVICE, dtype=torch.bfloat16)
    model.weight.grad = None
    with pytest.raises(
        ConfigurationError,
        match=r"weight was torch.bfloat16 \(7, 9\) when its states were made, now torch.bfloat16 \(8, 9\)",
    ):
        step(optimizer, model.weight, 1)


@pytest.mark.parametrize("how", CAST)
def test_a_frozen_parameter_may_be_cast_before_it_is_trained(how):
    model = nn.Linear(9, 7, bias=False, device=DEVICE, dtype=torch.float32).requires_grad_(False)
    optimizer = CAST[how](model.named_parameters())
    model.bfloat16().requires_grad_()
    optimizer.initialize_state(model.weight)
    before = model.weight.detach().clone()
    step(optimizer, model.weight, 1)
    assert 0 < (model.weight.float() - before.float()).abs().max() < 0.01


@pytest.mark.parametrize("make", [FusedAdam, Lion, lambda params: MasterWeights(torch.optim.AdamW, params)])
def test_a_parameter_without_a_master_may_not_be_cast(make):
    """In 16 bits it would lose small updates."""
    model = nn.LayerNorm(64, bias=False, device=DEVICE, dtype=torch.float32)
    optimizer = make(model.named_parameters())
    model.bfloat16()
    with pytest.raises(ConfigurationError, match=r"weight was torch.float32 .* build the optimizer after the model is"):
        step(optimizer, model.weight, 0)


def test_a_parameter_that_became_float64_is_refused() -> None:
    """Its states lack the digits."""
    param = nn.Parameter(torch.ones(4, 3))
    optimizer = FusedAdam([("weight", param)], lr=1e-2)
    param.data = param.data.double()
    param.grad = torch.ones_like(param)
    with pytest.raises(ConfigurationError, match=r"weight was torch.float32 .* now torch.float64"):
        optimizer.step()
