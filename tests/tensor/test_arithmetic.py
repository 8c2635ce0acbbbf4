"""In-place arithmetic on quantized weights, in one process, by which stock optimizers move them."""

import copy
import warnings
from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.optim import swa_utils

from quantshard import Linear, quantized_model_init, requantize_
from quantshard.collectives.flat_max import FlatMax
from quantshard.errors import NonFiniteGradientError, UnsupportedOperationError
from quantshard.tensor import parameter_state
from quantshard.tensor.parameter_state import AMAX_HISTORY, RNG_DRAWS, RNG_KEY
from quantshard.tensor.requantize import Requantization
from tests.covering import by_turns
from tests.tensor.test_tensor import CELLS, MXFP8, RECIPES, contents, cut, differing, every_cell, random, same, weight

SHAPE = (48, 40)
A, B = random(*SHAPE, seed=11) * 1e-2, random(*SHAPE, seed=12).abs() + 0.5

SINGLE = {
    # the operation, and the same in float32 on the values
    "add_": (lambda w: w.add_(A, alpha=-0.3), lambda x: x + -0.3 * A),
    "add_ number": (lambda w: w.add_(0.25), lambda x: x + 0.25),
    "sub_": (lambda w: w.sub_(A, alpha=0.3), lambda x: x - 0.3 * A),
    "-=": (lambda w: w.__isub__(0.1 * A), lambda x: x - 0.1 * A),
    "mul_": (lambda w: w.mul_(0.99), lambda x: x * 0.99),
    "mul_ scalar tensor": (lambda w: w.mul_(torch.tensor(0.99)), lambda x: x * 0.99),
    "mul_ tensor": (lambda w: w.mul_(B), lambda x: x * B),
    "div_": (lambda w: w.div_(3), lambda x: x / torch.tensor(3.0)),
    "div_ tensor": (lambda w: w.div_(B), lambda x: x / B),
    "addcmul_": (lambda w: w.addcmul_(A, B, value=-0.3), lambda x: x + -0.3 * A * B),
    "addcdiv_": (lambda w: w.addcdiv_(A, B, value=-0.3), lambda x: x + -0.3 * A / B),
    "lerp_": (lambda w: w.lerp_(A, 0.3), lambda x: x + 0.3 * (A - x)),
    "lerp_ tensor": (lambda w: w.lerp_(A, torch.tensor(0.3)), lambda x: x + 0.3 * (A - x)),
    "flat handle": (lambda w: w.view(-1).add_(A.view(-1)), lambda x: x + A),
    "a row": (lambda w: w.add_(A[0]), lambda x: x + A[0]),
    "bf16": (lambda w: w.add_(A.bfloat16(), alpha=-0.3), lambda x: x + -0.3 * A.bfloat16().float()),
    "another weight": (lambda w: w.add_(weight(MXFP8, seed=9)), lambda x: x + weight(MXFP8, seed=9).dequantize()),
}
LISTS = {
    "add_ list": (lambda ws: torch._foreach_add_(ws, [A, A], alpha=-0.3), SINGLE["add_"][0]),
    "add_ number": (lambda ws: torch._foreach_add_(ws, 0.25), SINGLE["add_ number"][0]),
    "sub_ list": (lambda ws: torch._foreach_sub_(ws, [A, A], alpha=0.3), SINGLE["sub_"][0]),
    "mul_ number": (lambda ws: torch._foreach_mul_(ws, 0.99), SINGLE["mul_"][0]),
    "mul_ numbers": (lambda ws: torch._foreach_mul_(ws, [0.99, 0.99]), SINGLE["mul_"][0]),
    "mul_ scalar tensor": (lambda ws: torch._foreach_mul_(ws, torch.tensor(0.99)), SINGLE["mul_"][0]),
    "mul_ list": (lambda ws: torch._foreach_mul_(ws, [B, B]), SINGLE["mul_ tensor"][0]),
    "div_ number": (lambda ws: torch._foreach_div_(ws, 3), SINGLE["div_"][0]),
    "div_ list": (lambda ws: torch._foreach_div_(ws, [B, B]), SINGLE["div_ tensor"][0]),
    "addcmul_": (lambda ws: torch._foreach_addcmul_(ws, [A, A], [B, B], value=-0.3), SINGLE["addcmul_"][0]),
    "addcdiv_": (lambda ws: torch._foreach_addcdiv_(ws, [A, A], [B, B], value=-0.3), SINGLE["addcdiv_"][0]),
    "addcdiv_ numbers": (
        lambda ws: torch._foreach_addcdiv_(ws, [A, A], [B, B], [-0.3, -0.3]),
        SINGLE["addcdiv_"][0],
    ),
    "addcdiv_ tensor": (
        lambda ws: torch._foreach_addcdiv_(ws, [A, A], [B, B], torch.tensor([-0.3, -0.3])),
        SINGLE["addcdiv_"][0],
    ),
    "lerp_": (lambda ws: torch._foreach_lerp_(ws, [A, A], 0.3), SINGLE["lerp_"][0]),
}

NOTHING = {
    "mul_": lambda w: w.mul_(1.0),
    "add_": lambda w: w.add_(A, alpha=0.0),
    "addcdiv_": lambda w: w.addcdiv_(A, B, value=-0.0),
    "lists": lambda w: torch._foreach_addcdiv_([w], [A], [B], value=0.0),
    "smaller than float32 sees": lambda w: w.mul_(1 + 2**-30),
}


def raises(message):
    return pytest.raises(UnsupportedOperationError, match=message)


def rounded(tensor, values):
    """A copy of a weight after `values` were rounded stochastically into it."""
    copied = tensor.detach().clone()
    storage = copied.quantized_storage
    Requantization(storage, values, {}, FlatMax()).commit(
        values, parameter_state.rounding_words(storage.state, storage.shard)
    )
    return copied


# ------------------------------------------------------------------------------------------------------ what it does


@by_turns(3, cell=CELLS, name=list(SINGLE))
def test_is_the_rounded_float32_result(cell, name):
    operation, formula = SINGLE[name]
    tensor = weight(cell, dtype=torch.bfloat16)
    expected = rounded(tensor, formula(tensor.dequantize(dtype=torch.float32)))
    version, written = tensor._version, tensor.quantized_storage.version
    operation(tensor)
    assert not differing(contents(tensor), contents(expected))
    assert tensor._version > version, "autograd must notice"
    assert tensor.quantized_storage.version != written, "and so must optimizers with masters"


@by_turns(3, cell=CELLS, name=list(LISTS))
def test_lists_are_one_by_one(cell, name):
    lists, single = LISTS[name]
    weights = [weight(cell, seed=seed, dtype=torch.bfloat16) for seed in (0, 1)]
    expected = [single(w.detach().clone()) for w in weights]
    lists(weights)
    for found, alone in zip(weights, expected, strict=True):
        assert not differing(contents(found), contents(alone))


@by_turns(2, cell=CELLS, name=list(NOTHING))
def test_an_equal_result_changes_nothing(cell, name):
    tensor = weight(cell, dtype=torch.bfloat16)
    before, written = contents(tensor), tensor.quantized_storage.version
    NOTHING[name](tensor)
    assert not differing(contents(tensor), before)
    assert tensor.quantized_storage.version == written


def test_only_changed_weights_of_a_list_draw():
    weights = [weight(MXFP8, seed=seed) for seed in (0, 1)]
    torch._foreach_mul_(weights, [1.0, 0.5])
    assert [int(w.quantized_storage.state[RNG_DRAWS]) for w in weights] == [0, 1]


def test_lists_may_mix_quantized_and_plain():
    quantized, plain = weight(MXFP8), random(5, 3)
    expected = plain * 0.5 + 1 * torch.ones(5, 3)
    torch._foreach_mul_([plain, quantized], 0.5)
    torch._foreach_add_([quantized, plain], [A, torch.ones(5, 3)])
    assert torch.equal(plain, expected)
    assert int(quantized.quantized_storage.state[RNG_DRAWS]) == 2


@every_cell
def test_rounding_is_right_on_average(cell):
    """Each result is one of two neighbours of the exact one, and their mean over many keys is the exact one.

    A rounding has variance at most (step / 2)**2 for two neighbours a step apart; the bound is 5 standard deviations.
    """
    tensor = weight(cell, dtype=torch.bfloat16)
    tensor.quantized_storage.state.pop(AMAX_HISTORY, None)  # the scale of the past has other neighbours
    factors = 1 - 0.1 * torch.rand(SHAPE)
    exact = tensor.dequantize(dtype=torch.float32) * factors
    found = []
    for key in range(40):
        one = tensor.detach().clone()
        one.quantized_storage.state[RNG_KEY].fill_(key)
        found.append(one.mul_(factors).dequantize(dtype=torch.float32))
    found = torch.stack(found)
    low, high = found.amin(0), found.amax(0)
    rows = exact.abs().amax(1, keepdim=True).clamp(min=1e-6 * exact.abs().max())  # tiny rows are zeros in some formats
    slack = 1e-5 * exact.abs().amax()  # the scale of a block is not exact in float32
    either = (low <= exact + slack) & (exact <= high + slack)
    assert (either | (low == high)).all(), "an unlikely neighbour may not have been drawn in 40 times"
    error, step = ((found.mean(0) - exact) / rows).mean(), ((high - low) / rows).square().mean().sqrt()
    assert step > 0
    assert error.abs() <= 5 * (step / 2) / (40 * exact.numel()) ** 0.5 + 1e-5


@every_cell
def test_small_updates_do_not_vanish(cell):
    """Updates far below a code's step move a weight as far as float32 would, on average, and not at all if rounded."""
    tensor = weight(cell, dtype=torch.bfloat16)
    start = tensor.dequantize(dtype=torch.float32).clone()
    size = start.abs().amax() * 1e-3
    tensor.quantize_(torch.ones(SHAPE) * size * 300)
    start = tensor.dequantize(dtype=torch.float32).clone()
    for _ in range(20):
        tensor.sub_(torch.full(SHAPE, float(size)))
    moved = (start - tensor.dequantize(dtype=torch.float32)).mean() / size
    # a random walk of 1920 elements: 20 steps of at most (300 / 4 / 2)**2 variance each
    assert moved == pytest.approx(20, abs=5 * 37.5 * (20 / start.numel()) ** 0.5)


@pytest.mark.parametrize("cell", [CELLS["delayed"], CELLS["delayed newest"]], ids=["max", "newest"])
@pytest.mark.parametrize("change", ["mul_", "sub_", "quantize_", "requantize_"])
def test_values_beyond_past_amaxes_are_not_clipped(cell, change):
    """E4M3 rounds to 2**-4 of a value; clipped to the scale of the values before, the error is two thirds."""
    tensor = weight(cell)
    wanted = 3 * tensor.dequantize(dtype=torch.float32)
    if change == "mul_":
        tensor.mul_(3)
    elif change == "sub_":
        tensor.sub_(tensor.dequantize(dtype=torch.float32) * -2)
    elif change == "quantize_":
        tensor.quantize_(wanted)
    else:
        requantize_([(tensor, wanted)])
    error = (tensor.dequantize(dtype=torch.float32) - wanted).norm() / wanted.norm()
    assert error < 0.06
    assert tensor.quantized_storage.state[AMAX_HISTORY][-1] == wanted.abs().max()


def test_the_largest_weights_move_as_fast_as_others():
    tensor = weight(CELLS["delayed"]).quantize_(torch.full(SHAPE, 0.5))
    optimizer = torch.optim.SGD([param := nn.Parameter(tensor)], lr=1e-3)
    param.grad = torch.full(SHAPE, -1.0)
    for _ in range(200):
        optimizer.step()
    # each of 1920 values is rounded by at most 1 / 32 of itself up or down, 200 times
    assert param.detach().dequantize(dtype=torch.float32).mean() == pytest.approx(
        0.7, abs=5 * 0.022 * (200 / 1920) ** 0.5
    )


def test_new_values_have_the_scale_of_their_own():
    """They may be far smaller than those before, which the history of these would make zeros."""
    tensor = weight(CELLS["delayed"])
    small = tensor.dequantize(dtype=torch.float32) * 1e-6
    tensor.quantize_(small)
    fresh = weight(CELLS["delayed"]).quantize_(small)
    state = tensor.quantized_storage.state[AMAX_HISTORY]
    assert state[-1] == small.abs().max() and not state[:-1].any()
    assert (tensor.dequantize(dtype=torch.float32) - small).norm() < 0.06 * small.norm()
    assert not differing(contents(tensor), contents(fresh))


@pytest.mark.parametrize("change", ["mul_", "lerp_", "foreach"])
def test_small_results_of_a_users_loop_have_the_scale_of_their_own(change):
    tensor = weight(CELLS["delayed"])
    wanted = tensor.dequantize(dtype=torch.float32) * 1e-6
    if change == "mul_":
        tensor.mul_(1e-6)
    elif change == "lerp_":
        tensor.lerp_(wanted, 1.0)
    else:
        torch._foreach_mul_([tensor], 1e-6)
    assert (tensor.dequantize(dtype=torch.float32) - wanted).norm() < 0.06 * wanted.norm()
    assert not tensor.quantized_storage.state[AMAX_HISTORY][:-1].any()


def test_delayed_scaling_uses_past_amaxes_and_records_this_one():
    tensor = weight(RECIPES["delayed"].weight)
    scale, history = (
        tensor.quantized_storage.components["scale_inv"].clone(),
        tensor.quantized_storage.state[AMAX_HISTORY],
    )
    amax = float(tensor.dequantize().abs().max())
    optimizer = torch.optim.SGD([param := nn.Parameter(tensor)], lr=0.5)
    param.grad = tensor.dequantize()
    optimizer.step()
    assert torch.equal(tensor.quantized_storage.components["scale_inv"], scale), "of the amax before"
    assert history[-1] == amax * 0.5
    before = contents(tensor)
    tensor.mul_(1.0)
    assert not differing(contents(tensor), before)


# ---------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_a_non_finite_result_is_written_nowhere(value):
    weights, plain = [weight(MXFP8, seed=seed) for seed in (0, 1)], random(5, 3)
    before, plain_before = [contents(w) for w in weights], plain.clone()
    bad = A.clone()
    bad[47, 39] = value
    with pytest.raises(NonFiniteGradientError, match=r"QuantizedTensor\(mxfp8.*learning rate.*MasterWeights"):
        torch._foreach_add_([weights[0], plain, weights[1]], [A, torch.ones(5, 3), bad])
    for found, old in zip(weights, before, strict=True):
        assert not differing(contents(found), old)
    assert torch.equal(plain, plain_before)


READS = {
    "weight + x": lambda w: w + A,
    "weight + number": lambda w: w + 1.0,
    "x * weight": lambda w: A * w,
    "x - weight": lambda w: A - w,
    "x.mul_(weight)": lambda w: A.clone().mul_(w),
    "x.copy_(weight)": lambda w: A.clone().copy_(w),
    "another shape": lambda w: A.view(1, *SHAPE).add(w),
    "0-dim": lambda w: torch.tensor(1.0).add(w),
    "list": lambda w: torch._foreach_mul([A], [w]),
    "weights first": lambda w: torch._foreach_add([w], [A]),
    "in a list": lambda w: torch._foreach_sub_([A.clone()], [w]),
}


@pytest.mark.parametrize("name", READS)
def test_operands_are_read(name):
    tensor = weight(MXFP8)
    results, expected = READS[name](tensor), READS[name](tensor.dequantize())
    for result, values in zip(*([x] if isinstance(x, torch.Tensor) else x for x in (results, expected)), strict=True):
        assert same(result, values)


@every_cell
@torch.no_grad()
def test_weight_decay_reads_the_weight(cell):
    tensor = weight(cell, dtype=torch.bfloat16)
    before, grad = contents(tensor), A.bfloat16()
    expected = grad.add(tensor.dequantize(), alpha=0.1)
    in_place = grad.clone()
    assert torch.equal(grad.add(tensor, alpha=0.1), expected)
    [found] = torch._foreach_add([grad], [tensor], alpha=0.1)
    torch._foreach_add_([in_place], [tensor], alpha=0.1)
    assert torch.equal(found, expected)
    assert torch.equal(in_place, expected)
    assert not differing(contents(tensor), before)


def test_refused_targets():
    gathered = weight(MXFP8)
    gathered.quantized_storage.gathered = True
    with raises(r"would be lost; call reshard\(\) and change the shard"):
        gathered.mul_(0.5)
    with raises("placeholder"):
        weight(MXFP8).new_zeros(SHAPE).mul_(0.5)
    with raises("not of a fully_shard-ed module"):
        cut(weight(MXFP8), [(0, 3)])[0].mul_(0.5)
    with raises("would write no scales"):
        weight(MXFP8).pow_(2)


def test_averages_of_stock_torch_are_refused_with_what_to_do_instead():
    """`AveragedModel` with an `avg_fn` computes them out of place, and copies the values."""
    with quantized_model_init(recipe="mxfp8"):
        model = Linear(64, 64, bias=False)
    average = swa_utils.AveragedModel(model, avg_fn=swa_utils.get_ema_avg_fn(0.9))
    average.update_parameters(model)
    with raises(r"FusedAdam\(ema_decay=0\.999\) for averages"):
        average.update_parameters(model)
    with raises("for averages give the optimizer ema_decay"):
        cut(weight(MXFP8), [(0, 3)])[0].mul_(0.5)
    with raises("would write no scales") as other:
        weight(MXFP8).pow_(2)
    assert "ema_decay" not in str(other.value)


def test_autograd_guards_leaves():
    param = nn.Parameter(weight(MXFP8))
    with pytest.raises(RuntimeError, match="leaf Variable"):
        param.mul_(0.5)


# ---------------------------------------------------------------------------------------------------- torch.optim


def model_of(recipe, dtype=torch.bfloat16):
    torch.manual_seed(0)
    with quantized_model_init(recipe=recipe):
        return nn.Sequential(
            Linear(40, 48, params_dtype=dtype, device="cpu"), Linear(48, 5, params_dtype=dtype, device="cpu")
        )


def everything(model):
    return {
        f"{i} {key}": value
        for i, param in enumerate(model.parameters())
        for key, value in (
            contents(param).items() if hasattr(param, "quantized_storage") else [("", param.detach().clone())]
        )
    }  # fmt: skip


def run(model, optimizer, steps=3):
    for step in range(steps):
        for index, param in enumerate(model.parameters()):
            grad = random(1, param.numel(), seed=100 * step + index)
            param.grad = grad.view(param.shape).to(param.dtype)
        optimizer.step()
    return everything(model)


WORK = {
    "AdamW": {"weight_decay": 0.1},
    "AdamW amsgrad": {"amsgrad": True},
    "Adam": {"weight_decay": 0.1},
    "Adam maximize": {"weight_decay": 0.1, "maximize": True},
    "SGD": {"lr": 0.1},
    "SGD momentum": {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1},
    "SGD nesterov": {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
    "NAdam": {"weight_decay": 0.1},
    "RAdam": {"weight_decay": 0.1},
    "RMSprop": {"lr": 1e-3, "momentum": 0.9, "centered": True, "weight_decay": 0.1},
    "Adagrad": {"weight_decay": 0.1},
    "Adamax": {"weight_decay": 0.1},
    "Adadelta": {"weight_decay": 0.1},
    "Rprop": {},
}
"""Every optimizer of torch.optim that moves quantized weights, with `foreach` and without."""

SAME_ORDER = ("AdamW", "Adam", "SGD", "Adamax", "Rprop")
"""Those whose foreach form does the same operations in the same order (the others differ on plain tensors too)."""


@pytest.mark.parametrize("name", WORK)
def test_torch_optim_moves_weights(name):
    """As far as float32 weights with the same gradients would move, but for rounding; also where codes are few."""
    found = {}
    for foreach in (False, True):
        for recipe in (RECIPES["mxfp8"], RECIPES["nvfp4"]):
            model = model_of(recipe, torch.float32)
            before = [
                param.dequantize().detach() for param in model.parameters() if hasattr(param, "quantized_storage")
            ]
            twins = nn.ParameterList(
                [
                    p.dequantize().detach() if hasattr(p, "quantized_storage") else p.detach().clone()
                    for p in model.parameters()
                ]
            )
            make = getattr(torch.optim, name.split()[0])
            run(twins, make(twins.parameters(), foreach=foreach, **WORK[name]))
            found[foreach, recipe.name] = run(model, make(model.parameters(), foreach=foreach, **WORK[name]))
            weights = [param for param in model.parameters() if hasattr(param, "quantized_storage")]
            for old, twin, new in zip(before, [p for p in twins if p.ndim == 2], weights, strict=True):
                moved, wanted = new.dequantize().detach() - old, twin.detach() - old
                assert moved.abs().sum() > 0
                along = (moved * wanted).sum() / (wanted * wanted).sum()
                # moved = wanted + rounding noise of zero mean: its projection on wanted has this deviation
                noise = (moved - wanted).square().mean().sqrt() / wanted.square().sum().sqrt()
                assert along == pytest.approx(1, abs=float(5 * noise) + 0.02), (foreach, recipe.name)
    if name.split()[0] in SAME_ORDER:
        for recipe in ("mxfp8", "nvfp4"):
            assert not differing(found[False, recipe], found[True, recipe])


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.Muon(p, lr=0.1),
        lambda p: torch.optim.AdamW(p, lr=torch.tensor(1e-2)),
        *(partial(getattr(torch.optim, name), foreach=on) for name in ("ASGD", "Adafactor") for on in (False, True)),
    ],
)
def test_others_move_weights(make):
    """Muon, which takes matrices only, an lr that is a tensor, and optimizers that also read weights."""
    model = model_of(RECIPES["mxfp8"])
    before = [param.dequantize().detach().clone() for param in model.parameters() if param.ndim == 2]
    run(model, make([param for param in model.parameters() if param.ndim == 2]))
    for old, layer in zip(before, model, strict=True):
        assert (layer.weight.dequantize() - old).abs().mean() > 1e-4


@pytest.mark.parametrize("name", ["AdamW", "Adam", "SGD", "Adagrad"])
@pytest.mark.parametrize("lr", [1e-3, torch.tensor(1e-3)], ids=["number", "tensor"])
def test_fused_is_refused(name, lr):
    model = model_of(RECIPES["mxfp8"])
    before = everything(model)
    if name == "Adagrad" and isinstance(lr, torch.Tensor):
        pytest.skip("torch's own fused Adagrad takes no tensor here")
    with raises(r"fused=True.*FusedAdam \(for AdamW: weight_decay=0.01\).*MasterWeights"):
        run(model, getattr(torch.optim, name)(model.parameters(), lr=lr, fused=True))
    assert not differing(everything(model), before)


@by_turns(2, recipe=RECIPES, make=[torch.optim.AdamW, torch.optim.Adam], foreach=[False, True])
def test_the_hidden_step_of_get_state_dict_changes_no_bit(recipe, make, foreach):
    model = model_of(recipe)
    optimizer = make(model.parameters(), weight_decay=0.1, foreach=foreach)
    before = everything(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        state = get_optimizer_state_dict(model, optimizer)
    assert state["state"]["0.weight"]["exp_avg"].shape == (48, 40)
    assert not differing(everything(model), before)


def test_states_are_plain():
    model = model_of(RECIPES["mxfp8"])
    optimizer = torch.optim.AdamW(model.parameters())
    run(model, optimizer, 1)
    for param in model.parameters():
        for key in ("exp_avg", "exp_avg_sq"):
            assert type(optimizer.state[param][key]) is torch.Tensor
            assert optimizer.state[param][key].dtype == torch.bfloat16


def test_clipping_and_loss_scaling():
    models = [model_of(RECIPES["mxfp8"]) for _ in range(2)]
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-2) for model in models]
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for model, scale in zip(models, (1.0, 4.0), strict=True):
        for index, param in enumerate(model.parameters()):
            param.grad = random(1, param.numel(), seed=index).view(param.shape).to(param.dtype) * scale
    torch.nn.utils.clip_grad_norm_(models[0].parameters(), 1.0)
    optimizers[0].step()
    scaler.scale(torch.ones(()))
    scaler.unscale_(optimizers[1])
    torch.nn.utils.clip_grad_norm_(models[1].parameters(), 1.0)
    scaler.step(optimizers[1])
    assert not differing(everything(models[0]), everything(models[1]))
    before = everything(models[1])
    scaler.update()
    for param in models[1].parameters():
        param.grad = torch.full_like(param, float("inf")) if param.ndim == 1 else torch.zeros(param.shape).to(param)
    scaler.unscale_(optimizers[1])
    scaler.step(optimizers[1])
    assert not differing(everything(models[1]), before), "the scaler skips the step itself"


def test_users_loops():
    """Sign descent, written out."""
    model = model_of(RECIPES["nvfp4"])
    before = copy.deepcopy(model)
    with torch.no_grad():
        for param in model.parameters():
            param -= 1e-2 * torch.ones(param.shape).sign()
            param *= 0.999
            param.data -= 1e-3
    for old, new in zip(before.parameters(), model.parameters(), strict=True):
        if hasattr(new, "quantized_storage"):
            moved = (new.dequantize() - old.dequantize()).detach().float().mean()
            assert moved == pytest.approx(-1.1e-2, rel=0.1)


@pytest.mark.parametrize("foreach", [True, False])
def test_a_stock_optimizer_that_trains_quantized_weights_warns_once(foreach):
    model = model_of("mxfp8")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=foreach)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        run(model, optimizer, steps=3)
    (warning,) = [entry for entry in caught if "masters" in str(entry.message)]
    assert "use quantshard.optimizers.MasterWeights(torch.optim.AdamW, params, lr=...)" in str(warning.message)


def test_arithmetic_of_a_users_loop_does_not_warn():
    with warnings.catch_warnings(record=True) as caught, torch.no_grad():
        warnings.simplefilter("always")
        weight(MXFP8, 40, 150).mul_(0.5)
    assert not caught
