"""MasterWeights in one process: masters are what the inner optimizer makes of them, weights are quantized masters."""

import copy
import io

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR

from quantshard import Linear, quantized_model_init
from quantshard.errors import CheckpointError, ConfigurationError, NonFiniteGradientError
from quantshard.optimizers import FusedAdam, MasterWeights
from tests.optimizers.test_fused_adam import parameters, set_grads, values
from tests.tensor.test_tensor import RECIPES, contents, differing, every_cell, random, same, write

OPTIMIZERS = {
    "AdamW": (torch.optim.AdamW, {"lr": 1e-2, "weight_decay": 0.1}),
    "AdamW foreach": (torch.optim.AdamW, {"lr": 1e-2, "weight_decay": 0.1, "foreach": True}),
    "AdamW fused": (torch.optim.AdamW, {"lr": 1e-2, "weight_decay": 0.1, "fused": True}),
    "AdamW amsgrad": (torch.optim.AdamW, {"amsgrad": True}),
    "Adam": (torch.optim.Adam, {"weight_decay": 0.1}),
    "SGD": (torch.optim.SGD, {"lr": 0.1}),
    "SGD momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.3}),
    "NAdam": (torch.optim.NAdam, {}),
    "RAdam": (torch.optim.RAdam, {}),
    "RMSprop": (torch.optim.RMSprop, {"momentum": 0.9, "centered": True}),
    "Adagrad": (torch.optim.Adagrad, {"initial_accumulator_value": 0.1}),
    "Adamax": (torch.optim.Adamax, {}),
    "Adadelta": (torch.optim.Adadelta, {}),
    "ASGD": (torch.optim.ASGD, {}),
    "Rprop": (torch.optim.Rprop, {}),
    "Adafactor": (torch.optim.Adafactor, {}),
}
every_optimizer = pytest.mark.parametrize("name", OPTIMIZERS)


class Lion(torch.optim.Optimizer):
    """A user's own: a state made lazily, a number in it, hyperparameters in groups and a counter in the instance."""

    def __init__(self, params, lr=1e-3, beta=0.9):
        super().__init__(params, {"lr": lr, "beta": beta})
        self.calls = 0

    @torch.no_grad()
    def step(self, closure=None):
        self.calls += 1
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if len(state) == 0:
                    state["momentum"], state["count"] = param.grad.clone(), 0
                state["momentum"] = state["momentum"] * group["beta"] + param.grad * (1 - group["beta"])
                state["count"] += 1
                param.sub_(state["momentum"].sign(), alpha=group["lr"] / state["count"])


def twins_of(params):
    """What the masters start from, as parameters of their own."""
    return {name: nn.Parameter(values(param)) for name, param in params.items()}


def step_both(optimizer, params, twin, twins, step):
    set_grads(params, step)
    for param, other in zip(params.values(), twins.values(), strict=True):
        other.grad = param.grad.float()
    optimizer.step()
    twin.step()


def nearest(param, master):
    """Does the parameter hold the nearest values to its master?"""
    if not hasattr(param, "quantized_storage"):
        return same(param, master.to(param.dtype))
    copied = param.detach().clone()
    copied.quantize_(master)
    return not differing(
        {k: v for k, v in contents(copied).items() if not k.startswith("state")},
        {k: v for k, v in contents(param).items() if not k.startswith("state")},
    )


def everything(optimizer):
    found = {}
    for index, (param, state) in enumerate(optimizer.state.items()):
        held = contents(param) if hasattr(param, "quantized_storage") else {"value": param.detach().clone()}
        held |= {k: v.clone() if isinstance(v, torch.Tensor) else torch.tensor(v) for k, v in state.items()}
        found |= {f"{index} {key}": value for key, value in held.items()}
    return found


# ----------------------------------------------------------------------------------------------------------- the step


@every_optimizer
def test_masters_are_the_inner_optimizers(name):
    """Bit for bit those that the optimizer makes of float32 parameters; weights are their nearest quantization."""
    cls, options = OPTIMIZERS[name]
    params = parameters(dtype=torch.bfloat16)
    twins = twins_of(params)
    optimizer, twin = MasterWeights(cls, params.values(), **options), cls(twins.values(), **options)
    for step in range(3):
        step_both(optimizer, params, twin, twins, step)
        for key, param in params.items():
            master = optimizer.state[param].get("master_param", param)
            assert same(master.detach(), twins[key].detach()), (key, step)
            assert ("master_param" in optimizer.state[param]) == (key not in ("fp32", "vector"))
            assert nearest(param, master)
            for entry, value in twin.state[twins[key]].items():
                assert same(torch.as_tensor(optimizer.state[param][entry]), torch.as_tensor(value)), (key, entry)
            assert optimizer.state[param]["updates"] == step + 1


@every_cell
def test_weights_are_quantized_masters_for_every_recipe(cell):
    params = parameters(cell)
    optimizer = MasterWeights(torch.optim.AdamW, params.values(), lr=1e-2)
    for step in range(3):
        set_grads(params, step)
        before = params["quantized"].detach().clone()
        optimizer.step()
        write(before, optimizer.state[params["quantized"]]["master_param"])
        assert not differing(contents(before), contents(params["quantized"]))


def test_adamw_is_near_fused_adam():
    """Both are AdamW on float32 masters; the order of operations, hence the last bits, differ."""
    ours, theirs = parameters(), parameters()
    optimizers = [
        MasterWeights(torch.optim.AdamW, ours.values(), lr=1e-2, weight_decay=0.1),
        FusedAdam(theirs.values(), lr=1e-2, weight_decay=0.1),
    ]
    for step in range(5):
        for params, optimizer in zip((ours, theirs), optimizers, strict=True):
            set_grads(params, step)
            optimizer.step()
    a, b = (o.state[p["quantized"]]["master_param"] for o, p in zip(optimizers, (ours, theirs), strict=True))
    torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_users_optimizer():
    params = parameters()
    twins = twins_of(params)
    optimizer = MasterWeights(Lion, params.values(), lr=1e-2)
    twin = Lion(twins.values(), lr=1e-2)
    for step in range(3):
        step_both(optimizer, params, twin, twins, step)
    for key, param in params.items():
        assert same(optimizer.state[param].get("master_param", param).detach(), twins[key].detach())
        assert optimizer.state[param]["count"] == 3


def test_muon_for_matrices_and_a_function():
    with quantized_model_init(recipe="mxfp8"):
        model = nn.Sequential(Linear(40, 48, params_dtype=torch.bfloat16, device="cpu"))
    optimizer = MasterWeights(lambda groups, lr: torch.optim.Muon(groups, lr=lr), [model[0].weight], lr=0.1)
    before = model[0].weight.dequantize().detach()
    model[0].weight.grad = random(48, 40).bfloat16()
    optimizer.step()
    assert (model[0].weight.dequantize() - before).abs().mean() > 1e-3


def test_seeded_from_the_initial_values_where_they_were_kept():
    with quantized_model_init(recipe="mxfp8", preserve_high_precision_init_val=True):
        kept = Linear(40, 48, device="cpu")
    initial = kept.weight.get_high_precision_init_val().float().clone()
    optimizer = MasterWeights(torch.optim.SGD, kept.parameters(), lr=0.0)
    assert same(optimizer.state[kept.weight]["master_param"], initial)
    kept.weight.grad = torch.zeros(48, 40)
    optimizer.step()
    assert kept.weight.get_high_precision_init_val() is None


def test_construction_changes_no_bit():
    params = parameters()
    before = {
        name: contents(p) if hasattr(p, "quantized_storage") else {"v": p.detach().clone()}
        for name, p in params.items()
    }
    random_state = torch.get_rng_state()
    for cls, options in OPTIMIZERS.values():
        MasterWeights(cls, params.values(), **options)
    for name, param in params.items():
        now = contents(param) if hasattr(param, "quantized_storage") else {"v": param.detach()}
        assert not differing(before[name], now)
        assert param.grad is None
    assert torch.equal(torch.get_rng_state(), random_state)


def test_schedulers_closures_and_zero_grad():
    params = parameters()
    optimizer = MasterWeights(torch.optim.AdamW, params.values(), lr=1.0)
    schedulers = [LambdaLR(optimizer, lambda step: 0.5**step), CosineAnnealingLR(optimizer, T_max=100)]
    for scheduler in schedulers:
        set_grads(params, 0)
        optimizer.step()
        scheduler.step()
    group = optimizer.param_groups[0]
    assert group["lr"] < 0.6
    group["lr"] = 0.0
    before = everything(optimizer)
    set_grads(params, 1)
    assert optimizer.step(lambda: torch.tensor(3.0)) == 3
    after = everything(optimizer)
    assert not [k for k in differing(before, after) if k.endswith(("master_param", "codes"))], (
        "the inner one saw lr = 0"
    )
    optimizer.zero_grad()
    assert all(param.grad is None for param in params.values())
    assert group["params"] == list(params.values())


def test_groups():
    params = parameters()
    optimizer = MasterWeights(torch.optim.SGD, [{"params": [params["quantized"]], "lr": 1.0}], lr=0.5)
    optimizer.add_param_group({"params": [params["bf16"]]})
    assert [group["lr"] for group in optimizer.param_groups] == [1.0, 0.5]
    with pytest.raises(ValueError, match="more than one parameter group"):
        optimizer.add_param_group({"params": [params["bf16"]]})
    masters = [optimizer.state[params[name]]["master_param"].clone() for name in ("quantized", "bf16")]
    set_grads(params, 0)
    optimizer.step()
    for name, lr, master in zip(("quantized", "bf16"), (1.0, 0.5), masters, strict=True):
        assert same(optimizer.state[params[name]]["master_param"], master - lr * params[name].grad.float())


def test_parameters_without_gradient_are_left_alone():
    params = parameters()
    optimizer = MasterWeights(torch.optim.AdamW, params.values(), lr=1e-2)
    before = everything(optimizer)
    set_grads(params, 0)
    params["quantized"].grad = None
    optimizer.step()
    changed = differing(before, everything(optimizer))
    assert changed
    assert not [key for key in changed if key.startswith("0 ")]
    set_grads(params, 1)
    optimizer.step()
    assert optimizer.state[params["quantized"]]["step"] == 1, "its first update starts afresh"
    assert optimizer.state[params["bf16"]]["step"] == 2


def test_frozen_parameters():
    params = parameters()
    params["bf16"].requires_grad_(False)
    optimizer = MasterWeights(torch.optim.AdamW, params.items(), lr=1e-2)
    before = params["bf16"].detach().clone()
    set_grads(params, 0)
    with pytest.raises(ConfigurationError, match=r"bf16 was frozen.*initialize_state"):
        optimizer.step()
    params["bf16"].grad = None
    optimizer.step()
    assert same(params["bf16"].detach(), before)
    params["bf16"].requires_grad_()
    optimizer.initialize_state(params["bf16"])
    set_grads(params, 1)
    optimizer.step()
    assert not same(params["bf16"].detach(), before)


# -------------------------------------------------------------------------------------------------- bad steps, refusals


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_non_finite_gradients_are_skipped(value):
    params = parameters()
    optimizer = MasterWeights(torch.optim.AdamW, params.items(), lr=1e-2, max_skipped_in_a_row=3)
    set_grads(params, 0)
    optimizer.step()
    before = everything(optimizer)
    for _ in range(2):
        set_grads(params, 1)
        params["quantized"].grad[47, 39] = value
        optimizer.step()
    assert not differing(before, everything(optimizer))
    assert optimizer.skipped_steps == 2
    with pytest.raises(NonFiniteGradientError, match=r"3 steps in a row.*first in quantized"):
        optimizer.step()
    set_grads(params, 1)
    optimizer.step()
    assert optimizer.param_groups[0]["skipped_in_a_row"] == 0
    assert optimizer.skipped_steps == 3


def test_an_infinite_float16_gradient_is_skipped():
    """A limit beyond float16's range would itself become infinite."""
    param = nn.Parameter(torch.ones(3, dtype=torch.float16))
    optimizer = MasterWeights(torch.optim.SGD, [param], lr=1.0)
    param.grad = torch.tensor([1.0, float("inf"), 1.0], dtype=torch.float16)
    optimizer.step()
    assert optimizer.skipped_steps == 1
    assert same(param.detach(), torch.ones(3, dtype=torch.float16))
    param.grad = torch.full((3,), torch.finfo(torch.float16).max, dtype=torch.float16)
    optimizer.step()
    assert optimizer.skipped_steps == 1, "the largest number is finite"


def test_new_values_from_elsewhere_are_noticed():
    params = parameters()
    optimizer = MasterWeights(torch.optim.AdamW, params.items(), lr=1e-2)
    for change in (lambda w: w.quantize_(torch.ones(48, 40)), lambda w: w.detach().mul_(0.5)):
        change(params["quantized"])
        set_grads(params, 0)
        with pytest.raises(ConfigurationError, match="quantized was given new values"):
            optimizer.step()
        optimizer.reseed_masters()
        assert same(optimizer.state[params["quantized"]]["master_param"], values(params["quantized"]))
        optimizer.step()


def test_refusals():
    params = parameters()
    with pytest.raises(TypeError, match="closure"):
        MasterWeights(torch.optim.LBFGS, [params["quantized"]])
    with pytest.raises(ConfigurationError, match="meta device"):
        MasterWeights(torch.optim.SGD, [nn.Parameter(params["quantized"].detach().to("meta"))])
    with pytest.raises(TypeError, match="unexpected keyword"):
        MasterWeights(torch.optim.SGD, params.values(), betas=(0.9, 0.95))


@pytest.mark.parametrize("dtype", [torch.complex64, torch.float8_e4m3fn], ids=str)
def test_parameters_that_no_master_holds_are_refused(dtype):
    params = {"fp32": nn.Parameter(random(3, 4)), "other": nn.Parameter(torch.ones(3, dtype=dtype))}
    with pytest.raises(ConfigurationError, match=rf"MasterWeights: other is {dtype}"):
        MasterWeights(torch.optim.SGD, params.items())
    optimizer = MasterWeights(torch.optim.SGD, [params["fp32"]])
    with pytest.raises(ConfigurationError, match=rf"parameter 1 is {dtype}"):
        optimizer.add_param_group({"params": [params["other"]]})


def test_float64_parameters_are_the_inner_optimizers():
    """To the last bit: no float32 stands between."""
    param, twin = (nn.Parameter(torch.full((3,), 1 / 3, dtype=torch.float64)) for _ in range(2))
    optimizer, inner = MasterWeights(torch.optim.AdamW, [param], lr=1e-12), torch.optim.AdamW([twin], lr=1e-12)
    for step in range(2):
        for own in (param, twin):
            own.grad = torch.full((3,), 1 / (3 + step), dtype=torch.float64)
        optimizer.step()
        inner.step()
    assert torch.equal(param, twin) and not torch.equal(param, torch.full((3,), 1 / 3, dtype=torch.float64))


# -------------------------------------------------------------------------------------------------------- state dicts


def trained(name, steps, **options):
    cls, defaults = OPTIMIZERS[name]
    params = parameters(**options)
    optimizer = MasterWeights(cls, params.items(), **defaults)
    for step in range(steps):
        set_grads(params, step)
        optimizer.step()
    return params, optimizer


@every_optimizer
@pytest.mark.parametrize("steps", [0, 2])
def test_resume(name, steps):
    """A fresh optimizer has every entry before its first step, and goes on from a loaded one with the same bits."""
    params, optimizer = trained(name, steps)
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    others, other = trained(name, 0)
    assert {k: v.shape for k, v in everything(other).items()} == {k: v.shape for k, v in everything(optimizer).items()}
    with torch.no_grad():
        for key, param in params.items():
            others[key].copy_(param)
    file.seek(0)
    other.load_state_dict(torch.load(file, weights_only=True))
    for step in range(steps, steps + 2):
        for each, its_optimizer in ((params, optimizer), (others, other)):
            set_grads(each, step)
            its_optimizer.step()
    assert not differing(everything(optimizer), everything(other))


def test_a_checkpoint_from_before_the_first_step_starts_afresh():
    params, optimizer = trained("SGD momentum", 0)
    state = copy.deepcopy(optimizer.state_dict())
    set_grads(params, 0)
    optimizer.step()
    first = optimizer.state[params["fp32"]]["momentum_buffer"].clone()
    optimizer.load_state_dict(state)
    set_grads(params, 0)
    optimizer.step()
    assert same(optimizer.state[params["fp32"]]["momentum_buffer"], first), "the gradient itself, not dampened"


@pytest.mark.parametrize("flatten", [False, True])
def test_state_dict_functions_of_torch(flatten):
    options = StateDictOptions(flatten_optimizer_state_dict=flatten)
    models = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        with quantized_model_init(recipe=RECIPES["nvfp4"]):
            models.append(nn.Sequential(Linear(40, 48, device="cpu"), Linear(48, 5, device="cpu")))
    optimizers = [MasterWeights(torch.optim.AdamW, model.parameters(), lr=1e-2) for model in models]
    for param in models[0].parameters():
        param.grad = torch.ones(param.shape)
    optimizers[0].step()
    optimizers[0].param_groups[0]["lr"] = 1e-4
    state = get_optimizer_state_dict(models[0], optimizers[0], options=options)
    models[1].load_state_dict(models[0].state_dict())
    set_optimizer_state_dict(models[1], optimizers[1], state, options=options)
    assert optimizers[1].param_groups[0]["lr"] == 1e-4
    assert not differing(everything(optimizers[0]), everything(optimizers[1]))


def test_what_does_not_fit_is_refused():
    params, optimizer = trained("AdamW", 1)
    state = optimizer.state_dict()
    with pytest.raises(CheckpointError, match=r"quantized: state holds.*exp_avg.*this optimizer.*master"):
        trained("SGD", 0)[1].load_state_dict(state)
    with pytest.raises(CheckpointError, match="group 0 has 4 parameters"):
        MasterWeights(torch.optim.AdamW, [params["fp32"]]).load_state_dict(state)
    renamed = MasterWeights(torch.optim.AdamW, [(name + "x", param) for name, param in params.items()])
    with pytest.raises(CheckpointError, match=r"'quantized'.*'quantizedx'"):
        renamed.load_state_dict(state)
    state["state"][0] = {**state["state"][0], "exp_avg": torch.zeros(48, 40, dtype=torch.bfloat16)}
    before = everything(optimizer)
    with pytest.raises(CheckpointError, match=r"quantized: optimizer state exp_avg is torch.bfloat16"):
        optimizer.load_state_dict(state)
    assert not differing(before, everything(optimizer))
