"""FusedAdam in one process: masters follow `adam` exactly, weights are quantized masters, bad steps change nothing."""

import copy
import io

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR

from quantshard import Linear, numerics, quantized_model_init, recipe
from quantshard.errors import CheckpointError, ConfigurationError, NonFiniteGradientError
from quantshard.formats import Orientation
from quantshard.numerics.adam import Hyperparameters, adam
from quantshard.optimizers import FusedAdam, clip_grad_norm_
from quantshard.tensor.parameter_state import AMAX_HISTORY, RNG_DRAWS
from tests.covering import by_turns
from tests.tensor.test_tensor import (
    CELLS,
    MXFP8,
    RECIPES,
    contents,
    differing,
    every_cell,
    every_recipe,
    random,
    same,
    weight,
    write,
)
from tests.weights import quantize_weight

MOMENTS = ("exp_avg", "exp_avg_sq")
FP8 = dict.fromkeys(("exp_avg_dtype", "exp_avg_sq_dtype"), torch.uint8)
STATE_DTYPES = {"fp32": {}, "fp8": FP8}
state_dtypes = pytest.mark.parametrize("dtypes", STATE_DTYPES.values(), ids=STATE_DTYPES)
VARIANTS = ("mxfp8 twice", "nvfp4 twice", "delayed newest", "current pow2")
SOME_RECIPES = [
    pytest.param(recipe, id=name, marks=pytest.mark.exhaustive if name in VARIANTS else ())
    for name, recipe in RECIPES.items()
]
"""All, the variants of another in `make test-all` only."""
LR = 1e-2


def parameters(cell=MXFP8, **options):
    """One of each kind: quantized, float32, bfloat16, and a vector."""
    return {
        "quantized": nn.Parameter(weight(cell, **options)),
        "fp32": nn.Parameter(random(6, 200, seed=1)),
        "bf16": nn.Parameter(random(6, 130, seed=2).bfloat16()),
        "vector": nn.Parameter(random(1, 40, seed=3).view(-1)),
    }


def grad_of(param, step, scale=1.0):
    return (random(1, param.numel(), seed=1000 + step) * scale).view(param.shape).to(param.dtype)


def set_grads(params, step, scale=1.0):
    for index, param in enumerate(params.values()):
        param.grad = grad_of(param, 10 * step + index, scale)


def values(param):
    """A copy of a parameter's values, float32."""
    return (
        (param.dequantize(dtype=torch.float32) if hasattr(param, "quantized_storage") else param.float())
        .detach()
        .clone()
    )


def hyperparameters(step, lr=LR, weight_decay=0.0, decoupled=True, bias_correction=True):
    return Hyperparameters(step, lr, 0.9, 0.999, 1e-8, weight_decay, decoupled, bias_correction)


def everything(optimizer):
    """Copies of all that a step may change, by name: parameters, their state, optimizer states and group entries."""
    found = {}
    for name, param in zip(names(optimizer), params_of(optimizer), strict=True):
        held = contents(param) if hasattr(param, "quantized_storage") else {"value": param.detach().clone()}
        found |= {f"{name} {key}": value for key, value in held.items()}
        found |= {f"{name} {key}": value.clone() for key, value in optimizer.state[param].items()}
    for index, group in enumerate(optimizer.param_groups):
        found[f"group {index} step"] = torch.tensor(group["step"])
    return found


def params_of(optimizer):
    return [param for group in optimizer.param_groups for param in group["params"]]


def names(optimizer):
    return [f"{index}" for index, _ in enumerate(params_of(optimizer))]


# ---------------------------------------------------------------------------------------------------------- the numbers


@by_turns(2, cell=CELLS, decoupled={"AdamW": True, "L2": False}, bias_correction=[True, False])
def test_masters_follow_adam_exactly(cell, decoupled, bias_correction):
    """Given the same gradients, to the last bit; parameters are the masters in their own format."""
    params = parameters(cell)
    options = {"weight_decay": 0.1, "bias_correction": bias_correction}
    optimizer = FusedAdam(params.values(), lr=LR, adam_w_mode=decoupled, **options)
    expected = {name: [values(p), torch.zeros(p.shape), torch.zeros(p.shape)] for name, p in params.items()}
    twin = copy.deepcopy(params["quantized"])
    for step in range(1, 5):
        set_grads(params, step)
        optimizer.step()
        for name, param in params.items():
            h = hyperparameters(step, decoupled=decoupled, **options)
            expected[name] = list(adam(param.grad, *expected[name], h))
            found = [optimizer.state[param].get("master_param", param.detach())]
            found += [optimizer.state[param][moment] for moment in MOMENTS]
            assert all(same(a, b) for a, b in zip(found, expected[name], strict=True)), (name, step)
        write(twin, expected["quantized"][0])
        assert not differing(contents(params["quantized"]), contents(twin))
        assert same(params["bf16"], expected["bf16"][0].bfloat16())


@pytest.mark.parametrize("name", [name for name, r in RECIPES.items() if not r.weight.scaling.history])
def test_weights_are_the_oracles_of_the_masters(name):
    cell = RECIPES[name].weight
    params = parameters(cell)
    optimizer = FusedAdam(params.values(), lr=LR)
    for step in range(3):
        set_grads(params, step)
        optimizer.step()
    master = optimizer.state[params["quantized"]]["master_param"]
    parts = numerics.quantize(master, cell.format, cell.scaling)
    assert not differing(params["quantized"].quantized_storage.components, parts)


def test_delayed_weights_have_the_scale_of_past_amaxes():
    """The scale of a step is from the amaxes up to the one before, or the new one if it is larger, so that no weight is
    clipped; then the new one is recorded."""
    cell = recipe.DelayedScaling(amax_history_len=3).weight
    param = nn.Parameter(quantize_weight(random(8, 8), cell))
    optimizer = FusedAdam([param], lr=0.5)
    storage = param.quantized_storage
    recorded = [random(8, 8).abs().amax().item()]
    for step in range(5):
        param.grad = grad_of(param, step)
        optimizer.step()
        new = optimizer.state[param]["master_param"].abs().amax().item()
        used = torch.tensor(max(*recorded[-3:], new))
        assert storage.components["scale_inv"].item() == (1 / (torch.tensor(448.0) / used)).item()
        recorded.append(new)
        assert storage.state[AMAX_HISTORY].tolist() == ([0.0, 0.0, *recorded])[-3:]
    assert len(set(recorded)) == 6
    assert storage.state[RNG_DRAWS].item() == 0  # masters are rounded to nearest: no random bits are used


def test_learns():
    """A least squares problem over MXFP8 weights, as far as the weights' precision goes."""
    torch.manual_seed(0)
    with quantized_model_init(recipe="mxfp8"):
        layer = Linear(32, 16)
    target, x = torch.randn(16, 32) * 0.1, torch.randn(256, 32)
    optimizer = FusedAdam(layer.parameters(), lr=1e-2)
    losses = []
    for _ in range(60):
        loss = (layer(x) - x @ target.t()).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.01 * losses[0]
    assert (optimizer.state[layer.weight]["master_param"] - target).abs().max() < 0.02


@every_cell
def test_masters_keep_what_codes_cannot(cell):
    """Updates far below a code's spacing add up in the master: without it the weight would never move."""
    param = nn.Parameter(quantize_weight(torch.ones(32, 32), cell))
    optimizer = FusedAdam([param], lr=1e-4)
    for _ in range(10):
        param.grad = torch.ones(32, 32)
        optimizer.step()
    torch.testing.assert_close(
        optimizer.state[param]["master_param"], torch.full((32, 32), 1 - 1e-3), rtol=1e-6, atol=0
    )


@pytest.mark.parametrize("betas", [(0.9, 1.0), (1.0, 0.9), (0.9, 1 - 1e-12), (-0.1, 0.9), (0.9, float("nan"))])
def test_betas_that_would_divide_by_zero_are_refused(betas):
    param = nn.Parameter(torch.ones(4))
    with pytest.raises(ConfigurationError, match="less than 1"):
        FusedAdam([param], betas=betas)
    optimizer = FusedAdam([param], betas=(0.0, 0.9))
    with pytest.raises(ConfigurationError, match="less than 1"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(4))], "betas": betas})
    assert len(optimizer.param_groups) == 1


def test_groups_of_pytorchs_optimizers_that_ask_for_no_more_are_taken(recwarn):
    for kind in (torch.optim.AdamW, torch.optim.SGD):
        FusedAdam(kind([nn.Parameter(torch.ones(4))], lr=0.1).param_groups)
    assert not recwarn


@pytest.mark.parametrize("option", ["lr", "eps", "weight_decay"])
@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf")])
def test_numbers_that_make_no_step_are_refused(option, value):
    param = nn.Parameter(torch.ones(4))
    with pytest.raises(ConfigurationError, match=rf"FusedAdam: param_groups\[0\]: {option}={value} .*finite"):
        FusedAdam([param], **{option: value})
    optimizer = FusedAdam([param], **{option: 0.0})
    with pytest.raises(ConfigurationError, match="finite"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(4))], option: value})
    assert len(optimizer.param_groups) == 1


def test_clipping_takes_a_model_and_says_so():
    with pytest.raises(ConfigurationError, match=r"model=list\): pass the model"):
        clip_grad_norm_([nn.Parameter(torch.ones(4))], 1.0)


def test_decoupled_gradients_are_clipped() -> None:
    """Which an FP16 parameter has in float32, with or without one of its own beside it, that no step reads."""
    model = nn.ModuleList([nn.Linear(4, 4, bias=False).half() for _ in range(2)] + [nn.Linear(4, 4, bias=False)])
    for number, layer in enumerate(model):
        layer.weight.grad = None if number == 0 else torch.full_like(layer.weight, 3.0)
        if number < 2:
            layer.weight.decoupled_grad = torch.full((4, 4), 4.0)
    assert clip_grad_norm_(model, 1.0) == 16 * (2 + 9 / 16) ** 0.5
    scaled = [model[0].weight.decoupled_grad, model[1].weight.decoupled_grad, model[2].weight.grad]
    assert torch.stack(scaled).norm().item() == pytest.approx(1.0, rel=1e-6)
    assert torch.equal(model[1].weight.grad, torch.full((4, 4), 3.0).half())


def test_betas_and_eps_are_used():
    param, twin = (nn.Parameter(random(6, 6)) for _ in range(2))
    optimizer = FusedAdam([param], lr=LR, betas=(0.5, 0.75), eps=0.25)
    reference = torch.optim.AdamW([twin], lr=LR, betas=(0.5, 0.75), eps=0.25, weight_decay=0.0)
    for step in range(3):
        param.grad = twin.grad = grad_of(param, step)
        optimizer.step()
        reference.step()
    torch.testing.assert_close(param, twin, rtol=1e-6, atol=1e-7)


# --------------------------------------------------------------------------------------------------------- 8-bit states


@pytest.mark.parametrize("shape", [(6, 130), (3, 128), (1, 1), (4, 300)], ids=str)
def test_states_of_8_bits_take_a_quarter(shape):
    """A byte an element, and for each 128 of a row a scale: float32, of the second moment a byte; vectors keep
    float32."""
    param, vector = nn.Parameter(random(*shape)), nn.Parameter(torch.zeros(5))
    optimizer = FusedAdam([param, vector], **FP8)
    rows, cols = shape
    state = optimizer.state[param]
    scales = {"exp_avg_scale_inv": torch.float32, "exp_avg_sq_scale_e8m0": torch.uint8}
    assert {key: t.dtype for key, t in state.items()} == dict.fromkeys(MOMENTS, torch.uint8) | scales
    assert all(state[moment].shape == shape for moment in MOMENTS)
    assert all(state[scale].shape == (rows, -(-cols // 128)) for scale in scales)
    assert sum(t.nbytes for t in state.values()) == 2 * rows * cols + 5 * rows * -(-cols // 128)
    assert {key: t.dtype for key, t in optimizer.state[vector].items()} == dict.fromkeys(MOMENTS, torch.float32)


def spacings(exact, scale, moment):
    """The spacing around `exact` of E4M3, 3 bits of mantissa down to 2**-9, or of the second moment's UE5M3, as many
    down to 2**-17; and 4 roundings to float32."""
    lowest, highest = (2.0**-14, 114688.0) if moment == "exp_avg_sq" else (2.0**-6, 448.0)
    exponent = (exact.abs() / scale).clamp(min=lowest, max=highest).log2().floor()
    return (exponent - 3).exp2() * scale + 4 * 2.0**-24 * exact.abs()


def scale_of(optimizer, param, moment):
    state = optimizer.state[param]
    grid = state.get(f"{moment}_scale_inv")
    if moment == "exp_avg_sq":
        grid = (state["exp_avg_sq_scale_e8m0"].float() - 127).exp2()
    return grid.repeat_interleave(128, dim=1)[:, : param.shape[1]]


@every_cell
def test_moments_of_8_bits_are_within_a_spacing(cell):
    """Of what float32 makes of the moments that were read; masters follow exactly from the unrounded ones."""
    params = {name: p for name, p in parameters(cell).items() if p.ndim == 2}
    optimizer = FusedAdam(params.values(), lr=LR, **FP8)
    for step in range(1, 5):
        set_grads(params, step)
        before = {n: [optimizer.get_unscaled_state(p, m) for m in MOMENTS] for n, p in params.items()}
        masters = {n: optimizer.state[p].get("master_param", p.detach()).clone() for n, p in params.items()}
        optimizer.step()
        for name, param in params.items():
            exact = adam(param.grad, masters[name], *before[name], hyperparameters(step))
            assert same(optimizer.state[param].get("master_param", param.detach()), exact.master)
            for moment in MOMENTS:
                read, wanted = optimizer.get_unscaled_state(param, moment), getattr(exact, moment)
                allowed = spacings(wanted, scale_of(optimizer, param, moment), moment)
                assert ((read - wanted).abs() <= allowed).all(), (name, step, moment)


def test_the_second_moment_never_underflows_to_zero():
    """Beside a gradient of 1 one of 1e-12 is below E4M3; a zero under the root would blow its next step up."""
    param = nn.Parameter(torch.zeros(2, 128))
    optimizer = FusedAdam([param], lr=LR, **FP8)
    param.grad = torch.full((2, 128), 1e-12)
    param.grad[:, 0], param.grad[1, 1] = 1.0, 0.0
    for _ in range(3):
        optimizer.step()
        second = optimizer.get_unscaled_state(param, "exp_avg_sq")
        assert (second[param.grad != 0] > 0).all() and second[1, 1] == 0
    assert (optimizer.get_unscaled_state(param, "exp_avg")[0, 1:] == 0).all()  # the first moment may
    assert param.abs().max() < 0.1


@pytest.mark.parametrize("recipe", SOME_RECIPES)
def test_moments_of_8_bits_train_as_well(recipe):
    """Weights after ten steps differ from those with float32 moments by less than the steps made."""
    moved = {}
    for name, dtypes in (("fp32", {}), ("fp8", FP8)):
        params = parameters(recipe.weight)
        start = {n: values(p) for n, p in params.items()}
        optimizer = FusedAdam(params.values(), lr=1e-3, **dtypes)
        for step in range(10):
            set_grads(params, step)
            optimizer.step()
        moved[name] = optimizer.state[params["quantized"]]["master_param"] - start["quantized"]
    error = (moved["fp8"] - moved["fp32"]).norm() / moved["fp32"].norm()
    assert 0 < error < 0.1


# ----------------------------------------------------------------------------------------------- masters and allocation


@every_cell
@pytest.mark.parametrize("keep", [True, False])
def test_masters_are_seeded_from_kept_values_or_from_the_weight(cell, keep):
    exact = random(48, 40)
    tensor = quantize_weight(exact, cell, dtype=torch.bfloat16, keep_high_precision=keep)
    params = [nn.Parameter(tensor), nn.Parameter(random(3, 3).bfloat16()), nn.Parameter(random(3, 3))]
    optimizer = FusedAdam(params)
    master = optimizer.state[params[0]]["master_param"]
    assert master.dtype == torch.float32
    assert same(master, exact if keep else tensor.dequantize(dtype=torch.float32))
    assert same(optimizer.state[params[1]]["master_param"], params[1].detach().float())
    assert "master_param" not in optimizer.state[params[2]]


@every_cell
def test_a_second_optimizer_starts_from_the_trained_weight(cell):
    """Not from initial values that were kept: the weight no longer has them."""
    param = nn.Parameter(quantize_weight(random(48, 40), cell, keep_high_precision=True))
    first = FusedAdam([param], lr=0.5)
    param.grad = torch.ones(48, 40)
    first.step()
    second = FusedAdam([param])
    assert same(second.state[param]["master_param"], values(param))


@state_dtypes
def test_states_are_allocated_at_construction(dtypes):
    """Else a new process would have nothing to load a checkpoint into."""
    params = parameters()
    optimizer = FusedAdam(params.values(), **dtypes)
    before = everything(optimizer)
    assert set(optimizer.state) == set(params.values())
    assert all(not optimizer.get_unscaled_state(p, m).any() for p in params.values() for m in MOMENTS)
    addresses = {key: t.data_ptr() for p in params.values() for key, t in optimizer.state[p].items()}
    set_grads(params, 1)
    optimizer.step()
    assert differing(before, everything(optimizer))
    assert addresses == {key: t.data_ptr() for p in params.values() for key, t in optimizer.state[p].items()}


@state_dtypes
def test_initialize_state_begins_anew(dtypes):
    params = parameters()
    optimizer = FusedAdam(params.values(), **dtypes)
    set_grads(params, 1)
    optimizer.step()
    optimizer.initialize_state(params["quantized"])
    state = optimizer.state[params["quantized"]]
    assert same(state["master_param"], values(params["quantized"]))
    assert not any(optimizer.get_unscaled_state(params["quantized"], moment).any() for moment in MOMENTS)
    assert optimizer.get_unscaled_state(params["fp32"], "exp_avg").any()


@pytest.mark.parametrize("name", [*MOMENTS, "master_param"])
@state_dtypes
def test_set_and_get_states(name, dtypes):
    params = parameters()
    optimizer = FusedAdam(params.values(), **dtypes)
    for key in ("quantized", "bf16"):
        param = params[key]
        new, others = random(*param.shape, seed=9).abs(), everything(optimizer)
        optimizer.set_scaled_state(param, name, new)
        found = optimizer.get_unscaled_state(param, name)
        assert found.dtype == torch.float32
        if dtypes and name != "master_param":
            allowed = spacings(new, scale_of(optimizer, param, name), name) / 2  # to nearest
            assert ((found - new).abs() <= allowed).all()
            optimizer.set_scaled_state(param, name, found)
            assert same(optimizer.get_unscaled_state(param, name), found)  # the scale may be another power of two
        else:
            assert same(found, new)
        changed = differing(others, everything(optimizer))
        assert changed and {entry.split()[1].partition("_scale_")[0] for entry in changed} == {name}


@state_dtypes
@pytest.mark.parametrize("shape", [(1,), (48, 1), (40, 48), ()], ids=str)
def test_a_state_of_another_shape_is_refused(dtypes, shape):
    params = parameters()
    optimizer = FusedAdam(params.values(), **dtypes)
    before = everything(optimizer)
    with pytest.raises(ConfigurationError, match=r"48, 40"):
        optimizer.set_scaled_state(params["quantized"], "exp_avg", torch.ones(shape))
    assert not differing(before, everything(optimizer))


@pytest.mark.parametrize("options", [{}, {"master_weights": False}])
def test_float32_parameters_need_no_masters(options):
    param = nn.Parameter(random(3, 3))
    optimizer = FusedAdam([param], **options)
    assert set(optimizer.state[param]) == set(MOMENTS)


# ----------------------------------------------------------------------------------------------- schedules and clipping


@pytest.mark.parametrize(
    "schedule",
    [lambda o: LambdaLR(o, lambda t: 1 / (t + 1)), lambda o: CosineAnnealingLR(o, T_max=5, eta_min=1e-4)],
    ids=["LambdaLR", "CosineAnnealingLR"],
)
def test_learning_rate_schedules(schedule):
    """Each step uses the rate that torch's scheduler sets, as torch's own optimizer would be given."""
    params, reference = parameters(), torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=LR)
    optimizer = FusedAdam(params.values(), lr=LR)
    ours, theirs = schedule(optimizer), schedule(reference)
    expected = [values(params["quantized"]), torch.zeros(48, 40), torch.zeros(48, 40)]
    rates = set()
    for step in range(1, 6):
        rates.add(rate := reference.param_groups[0]["lr"])
        set_grads(params, step)
        optimizer.step()
        reference.step()
        ours.step()
        theirs.step()
        expected = list(adam(params["quantized"].grad, *expected, hyperparameters(step, lr=rate)))
        assert same(optimizer.state[params["quantized"]]["master_param"], expected[0])
    assert len(rates) == 5 and ours.get_last_lr() == theirs.get_last_lr()


@every_recipe
def test_gradient_clipping(recipe):
    params = parameters(recipe.weight)
    twins = [nn.Parameter(values(p).to(p.dtype)) for p in params.values()]
    set_grads(params, 1)
    for twin, param in zip(twins, params.values(), strict=True):
        twin.grad = param.grad.clone()
    norms = [nn.utils.clip_grad_norm_(list(group), 0.5) for group in (params.values(), twins)]
    assert same(*norms)
    assert all(same(a.grad, b.grad) for a, b in zip(params.values(), twins, strict=True))
    optimizer = FusedAdam(params.values(), lr=LR)
    optimizer.step()


def test_rates_of_groups():
    params = parameters()
    groups = [{"params": [params["quantized"]], "lr": 0.5}, {"params": [params["fp32"]], "weight_decay": 0.1}]
    optimizer = FusedAdam(groups, lr=LR)
    start = {name: values(p) for name, p in params.items()}
    set_grads(params, 1)
    optimizer.step()
    for name, h in (("quantized", hyperparameters(1, lr=0.5)), ("fp32", hyperparameters(1, weight_decay=0.1))):
        zero = torch.zeros_like(start[name])
        expected = adam(params[name].grad, start[name], zero, zero, h).master
        assert same(optimizer.state[params[name]].get("master_param", params[name].detach()), expected)


def test_a_tensor_as_learning_rate():
    params = parameters()
    optimizer = FusedAdam(params.values(), lr=torch.tensor(LR))
    set_grads(params, 1)
    optimizer.step()
    assert optimizer.param_groups[0]["step"] == 1


# -------------------------------------------------------------------------------------------------------- bad gradients


@by_turns(
    2,
    bad=[float("inf"), -float("inf"), float("nan")],
    where=["quantized", "fp32", "bf16", "vector"],
    dtypes=STATE_DTYPES,
)
def test_a_bad_gradient_changes_nothing(bad, where, dtypes):
    params = parameters(RECIPES["delayed"].weight)
    optimizer = FusedAdam(params.values(), lr=LR, **dtypes)
    set_grads(params, 1)
    optimizer.step()
    before = everything(optimizer)
    set_grads(params, 2)
    params[where].grad.view(-1)[-1] = bad
    optimizer.step()
    assert not differing(before, everything(optimizer))
    assert optimizer.skipped_steps == 1


@by_turns(2, cell=CELLS, dtypes=STATE_DTYPES)
def test_a_skipped_step_leaves_no_trace(cell, dtypes):
    """Steps after it are those of an optimizer that never saw it."""
    one = parameters(cell)  # which seeds torch
    first = FusedAdam(one.values(), lr=LR, **dtypes)
    two = parameters(cell)
    second = FusedAdam(two.values(), lr=LR, **dtypes)
    for step in range(3):
        set_grads(one, step)
        one["fp32"].grad.fill_(float("nan"))
        first.step()
        for params, optimizer in ((one, first), (two, second)):
            set_grads(params, step)
            optimizer.step()
    assert not differing(everything(first), everything(second))
    assert (first.skipped_steps, second.skipped_steps) == (3, 0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_bad_gradients_of_every_dtype_are_seen(dtype, bad):
    param = nn.Parameter(torch.ones(3))
    optimizer = FusedAdam([param], lr=0.5, use_decoupled_grad=True)
    param.decoupled_grad = torch.full((3,), bad, dtype=dtype)
    optimizer.step()
    assert optimizer.skipped_steps == 1 and torch.equal(param.detach(), torch.ones(3))
    param.decoupled_grad.fill_(6e4)
    optimizer.step()
    assert optimizer.skipped_steps == 1 and (param < 1).all()


def test_too_many_skipped_steps_name_the_parameter():
    params = parameters()
    optimizer = FusedAdam(list(params.items()), max_skipped_in_a_row=3)
    before = everything(optimizer)
    for attempt in range(4):
        set_grads(params, attempt)
        params["bf16"].grad.fill_(float("inf"))
        params["vector"].grad.fill_(float("inf"))
        if attempt < 2:
            optimizer.step()
            continue
        with pytest.raises(NonFiniteGradientError, match=rf"{attempt + 1} steps in a row.*first in bf16"):
            optimizer.step()
    assert optimizer.skipped_steps == 4
    assert not differing(before, everything(optimizer))


def test_a_good_step_resets_the_count():
    params = parameters()
    optimizer = FusedAdam(params.values(), max_skipped_in_a_row=2)
    for step in range(6):
        set_grads(params, step)
        if step % 2:
            params["fp32"].grad.fill_(float("nan"))
        optimizer.step()
    assert optimizer.skipped_steps == 3 and optimizer.param_groups[0]["step"] == 3


def test_huge_gradients_are_not_bad():
    """Finite ones are taken, though their square is not finite: the step is then zero, and no weight is lost."""
    param = nn.Parameter(random(4, 4))
    optimizer = FusedAdam([param])
    param.grad = torch.full((4, 4), 1e15)
    optimizer.step()
    assert optimizer.skipped_steps == 0 and torch.isfinite(param).all()


# ----------------------------------------------------------------------------------------------------------- state dict


def trained(cell=MXFP8, seed_shift=0, steps=2, **options):
    params = parameters(cell)
    optimizer = FusedAdam(params.values(), lr=LR, **options)
    for step in range(steps):
        set_grads(params, step + seed_shift)
        optimizer.step()
    return params, optimizer


@state_dtypes
def test_keys_of_the_state_dict(dtypes):
    _, optimizer = trained(**dtypes)
    moments = {*MOMENTS} | ({"exp_avg_scale_inv", "exp_avg_sq_scale_e8m0"} if dtypes else set())
    expected = {0: moments | {"master_param"}, 1: moments, 2: moments | {"master_param"}, 3: {*MOMENTS}}
    state = optimizer.state_dict()["state"]
    assert {index: set(entries) for index, entries in state.items()} == expected
    assert all(type(value) is torch.Tensor for entries in state.values() for value in entries.values())


@by_turns(2, cell=CELLS, dtypes=STATE_DTYPES)
def test_loading_gives_the_same_bits_and_the_same_future(cell, dtypes):
    saved_params, saved = trained(cell, **dtypes)
    loaded_params, loaded = trained(cell, seed_shift=50, steps=5, **dtypes)
    file = io.BytesIO()
    torch.save(saved.state_dict(), file)
    file.seek(0)
    live = {key: t.data_ptr() for p in loaded_params.values() for key, t in loaded.state[p].items()}
    loaded.load_state_dict(torch.load(file, weights_only=True))
    for own, other in zip(loaded_params.values(), saved_params.values(), strict=True):
        own.data.copy_(other.data)
        assert not differing(loaded.state[own], saved.state[other])
    assert live == {key: t.data_ptr() for p in loaded_params.values() for key, t in loaded.state[p].items()}
    assert not differing(everything(saved), everything(loaded))
    for step in (7, 8):
        for params, optimizer in ((saved_params, saved), (loaded_params, loaded)):
            set_grads(params, step)
            optimizer.step()
    assert not differing(everything(saved), everything(loaded))


def test_loading_restores_the_groups():
    _, saved = trained(weight_decay=0.1, betas=(0.5, 0.6))
    saved.param_groups[0]["lr"] = 0.125
    saved.param_groups[0]["skipped_steps"] = 4
    _, loaded = trained(steps=0)
    loaded.load_state_dict(state_dict=saved.state_dict())
    group = loaded.param_groups[0]
    assert (group["lr"], group["weight_decay"], tuple(group["betas"]), group["step"]) == (0.125, 0.1, (0.5, 0.6), 2)
    assert loaded.skipped_steps == 4
    assert len(group["params"]) == 4 and all(isinstance(param, nn.Parameter) for param in group["params"])


def test_what_is_loaded_is_a_copy():
    _, saved = trained()
    _, loaded = trained(steps=0)
    state = saved.state_dict()
    loaded.load_state_dict(state)
    before = everything(loaded)
    for entries in state["state"].values():
        for value in entries.values():
            value.zero_()
    state["param_groups"][0]["lr"] = 7.0
    assert not differing(before, everything(loaded)) and loaded.param_groups[0]["lr"] == LR


def refused(optimizer, state, match):
    before = everything(optimizer)
    with pytest.raises(CheckpointError, match=match):
        optimizer.load_state_dict(state)
    assert not differing(before, everything(optimizer))


def test_states_of_other_keys_or_dtypes_are_refused():
    (_, full), (_, small) = trained(), trained(**FP8)
    refused(full, small.state_dict(), r"parameter 0: .*exp_avg_scale_inv.*this optimizer")
    refused(small, full.state_dict(), r"parameter 0: .*this optimizer .*exp_avg_scale_inv")
    for key, dtype in (("master_param", torch.bfloat16), ("exp_avg", torch.float64)):
        state = copy.deepcopy(full.state_dict())
        state["state"][2][key] = state["state"][2][key].to(dtype)
        refused(full, state, rf"parameter 2: .*{key} is {dtype}.*torch.float32")


@pytest.mark.parametrize("index", [0, 3])
def test_missing_states_are_refused(index):
    _, optimizer = trained()
    state = copy.deepcopy(optimizer.state_dict())
    del state["state"][index]
    refused(optimizer, state, rf"parameter {index}: ")


def test_states_of_another_model_are_refused():
    params, optimizer = trained()
    fewer = FusedAdam(list(params.values())[:3])
    refused(optimizer, fewer.state_dict(), "has 3 parameters, not 4")
    swapped = FusedAdam([params["fp32"], *(params[name] for name in ("quantized", "bf16", "vector"))])
    refused(optimizer, swapped.state_dict(), "parameter 0")
    wider = parameters()
    wider["vector"] = nn.Parameter(torch.zeros(41))
    refused(optimizer, FusedAdam(wider.values()).state_dict(), r"parameter 3: .*\(41,\).*\(40,\)")


# -------------------------------------------------------------------------------------------------------- as in PyTorch


def test_add_param_group():
    params = parameters()
    optimizer = FusedAdam([params["fp32"]], lr=LR)
    set_grads(params, 1)
    optimizer.step()
    optimizer.add_param_group({"params": [params["quantized"], params["vector"]], "lr": 0.5})
    start = values(params["quantized"])
    assert same(optimizer.state[params["quantized"]]["master_param"], start)
    optimizer.step()
    zero = torch.zeros(48, 40)
    expected = adam(params["quantized"].grad, start, zero, zero, hyperparameters(1, lr=0.5))  # its first step
    assert same(optimizer.state[params["quantized"]]["master_param"], expected.master)
    assert [group["step"] for group in optimizer.param_groups] == [2, 1]


@pytest.mark.parametrize("named", [True, False])
def test_errors_name_parameters(named):
    """By their names where `named_parameters()` was passed, in groups too, else by their number."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    given = model.named_parameters() if named else model.parameters()
    optimizer = FusedAdam(given, max_skipped_in_a_row=1)
    extra = nn.Parameter(torch.zeros(2))
    optimizer.add_param_group({"params": [("extra", extra)] if named else [extra]})
    for param, name in (
        (model[1].bias, "1.bias" if named else "parameter 3"),
        (extra, "extra" if named else "parameter 4"),
    ):
        param.grad = torch.full(param.shape, float("nan"))
        with pytest.raises(NonFiniteGradientError, match=f"first in {name};"):
            optimizer.step()
        param.grad = None


@state_dtypes
def test_parameters_without_gradients_stay(dtypes):
    params = parameters(RECIPES["delayed"].weight)
    optimizer = FusedAdam(params.values(), lr=LR, weight_decay=0.1, **dtypes)
    for missing in params:
        set_grads(params, 1)
        params[missing].grad = None
        before = everything(optimizer)
        optimizer.step()
        changed = {entry.split()[0] for entry in differing(before, everything(optimizer))}
        assert changed == {"group", *(str(i) for i, name in enumerate(params) if name != missing)}
    optimizer.zero_grad()
    before = everything(optimizer)
    with pytest.warns(UserWarning, match=r"none of this optimizer's \d+ parameters .* build it after"):
        optimizer.step()
    assert differing(before, everything(optimizer)) == ["group 0 step"]


def test_frozen_parameters():
    params = parameters()
    params["quantized"].requires_grad_(False)
    optimizer = FusedAdam(params.values(), lr=LR)
    before = contents(params["quantized"])
    set_grads({name: p for name, p in params.items() if name != "quantized"}, 1)
    optimizer.step()
    assert not differing(before, contents(params["quantized"]))


def test_closure():
    param = nn.Parameter(random(4, 4))
    optimizer = FusedAdam([param], lr=LR)

    def closure():
        optimizer.zero_grad()
        loss = param.square().sum()
        loss.backward()
        return loss

    loss = optimizer.step(closure)
    assert loss.item() == pytest.approx(random(4, 4).square().sum().item())
    assert not same(param, random(4, 4))


def test_a_step_keeps_no_graph():
    params = parameters()
    optimizer = FusedAdam(params.values(), lr=LR)
    set_grads(params, 1)
    optimizer.step()
    assert all(p.requires_grad and p.is_leaf for p in params.values())
    assert not any(t.requires_grad for p in params.values() for t in optimizer.state[p].values())


def test_gradients_are_not_changed():
    params = parameters()
    optimizer = FusedAdam(params.values(), lr=LR, weight_decay=0.1, adam_w_mode=False)
    set_grads(params, 1)
    before = {name: p.grad.clone() for name, p in params.items()}
    optimizer.step()
    assert not differing(before, {name: p.grad for name, p in params.items()})


# ------------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"amsgrad": True}, "amsgrad=True"),
        ({"master_weight_dtype": torch.uint8}, r"master_weight_dtype=torch\.uint8.*torch\.float32.*torch\.bfloat16"),
        ({"exp_avg_dtype": torch.float64}, r"exp_avg_dtype=torch\.float64.*torch\.float32.*torch\.uint8"),
        ({"exp_avg_sq_dtype": torch.int8}, r"exp_avg_sq_dtype=torch\.int8.*torch\.float32.*torch\.uint8"),
        ({"store_param_remainders": True, "master_weights": False}, r"remainders=True.*master_weights=True"),
        ({"store_param_remainders": True, "master_weight_dtype": torch.bfloat16}, r"remainders=True.*torch\.bfloat16"),
        ({"capturable": True, "master_weights": False}, r"capturable.*parameter 0 needs master_weights=True"),
    ],
)
def test_refused_arguments(options, match):
    with pytest.raises(ConfigurationError, match=match):
        FusedAdam(parameters().values(), **options)


@pytest.mark.parametrize("name", ["fused", "foreach", "maximize", "differentiable"])
def test_arguments_that_mean_nothing_here_are_not_ignored(name):
    with pytest.raises(TypeError, match=name):
        FusedAdam(parameters().values(), **{name: True})


@every_recipe
def test_meta_parameters_are_refused(recipe):
    with quantized_model_init(recipe=recipe):
        layer = Linear(40, 48, device="meta")
    with pytest.raises(ConfigurationError, match=r"weight is on the meta device.*reset_parameters"):
        FusedAdam(layer.named_parameters())


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64, torch.float8_e4m3fn], ids=str)
def test_parameters_that_float32_does_not_hold_are_refused(dtype):
    """They were rounded, or lost their imaginary part, by a step of rate 0. Frozen ones are no matter."""
    params = parameters()
    params["wide"] = nn.Parameter(torch.ones(3, dtype=dtype), requires_grad=False)
    optimizer = FusedAdam(params.items())
    params["wide"].requires_grad_(True)
    refused = pytest.raises(ConfigurationError, match=rf"wide is {dtype}.*MasterWeights.*cast the parameter")
    with refused:
        FusedAdam(params.items())
    with refused:
        optimizer.initialize_state(params["wide"])
    with refused:
        FusedAdam([("fp32", params["fp32"])]).add_param_group({"params": [("wide", params["wide"])]})


def test_quantized_weights_may_stand_for_float64():
    with quantized_model_init(recipe="mxfp8"):
        layer = Linear(40, 48, bias=False, params_dtype=torch.float64)
    optimizer = FusedAdam(layer.parameters())
    layer.weight.grad = torch.ones(48, 40, dtype=torch.float64)
    optimizer.step()
    assert optimizer.state[layer.weight]["master_param"].dtype is torch.float32


def test_a_state_that_does_not_exist():
    params = parameters()
    with pytest.raises(
        ConfigurationError, match=r"parameter 1 has no state 'exp_avg_max', only \['exp_avg', 'exp_avg_sq"
    ):
        FusedAdam(params.values()).get_unscaled_state(params["fp32"], "exp_avg_max")


def test_no_parameters():
    with pytest.raises(ValueError, match="empty parameter list"):
        FusedAdam([])


def test_the_rows_of_states_are_those_of_the_format_table():
    """8-bit states are a row of the table like any other: codes and a scale for 128 elements of a row."""
    param = nn.Parameter(random(4, 300))
    optimizer = FusedAdam([param], **FP8)
    moment = random(4, 300, seed=5).abs()
    optimizer.set_scaled_state(param, "exp_avg", moment)
    row = optimizer._states[param]["exp_avg"].storage.spec
    parts = numerics.quantize(moment, row.format, row.scaling)
    assert row.format.copies[Orientation.ROWWISE].block == (1, 128)
    assert same(optimizer.state[param]["exp_avg"], parts["codes"])
    assert same(optimizer.state[param]["exp_avg_scale_inv"], parts["scale_inv"])
