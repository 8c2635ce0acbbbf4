"""Every option of FusedAdam beside Adam in float64, with bounds that follow from how the states are stored.

A write picks one of the two numbers of the state's format around the exact one, so a state is within one *gap*, the
distance between the two, of what float64 makes of the states that were read (and within float32's own rounding of it).
Where a gap says nothing, because updates are smaller, the mean over many elements must be exact: it is compared within
5 standard errors, which are derived from the gap too: rounding with probability f at a gap of g has variance
g**2 f (1 - f) <= g**2 / 4.
"""

import itertools
import math
from functools import lru_cache

import pytest
import torch
from torch import nn

from quantshard import checkpoints, numerics
from quantshard.errors import CheckpointError
from quantshard.formats import FORMATS, FP16, Orientation
from quantshard.numerics.adam import Hyperparameters, adam
from quantshard.optimizers import FusedAdam
from quantshard.optimizers.state import RemainderState
from quantshard.tensor import components
from quantshard.tensor.parameter_state import RNG_DRAWS
from tests.covering import exhaustive
from tests.tensor.test_tensor import RECIPES, contents, differing, every_cell, random, same
from tests.weights import quantize_weight

LR, EPS, DECAY = 1e-2, 1e-8, 0.1
BETAS = tuple(torch.tensor((0.9, 0.999)).tolist())
UNIT = 2.0**-24  # largest relative error of one float32 operation
MOMENTS = ("exp_avg", "exp_avg_sq")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.uint8}

MASTERS = {
    "fp32": {},
    "fp16": {"master_weight_dtype": torch.float16},
    "bf16": {"master_weight_dtype": torch.bfloat16},
    "remainder": {"store_param_remainders": True},
    "split": {"store_param_remainders": True, "master_weight_dtype": torch.float16},
    "none": {"master_weights": False},
}
every_master = pytest.mark.parametrize("masters", MASTERS.values(), ids=MASTERS)
PAIRS = {"-".join(pair): pair for pair in zip(list(DTYPES) * 2, [*DTYPES, "bf16", "fp16", "fp8", "fp32"], strict=True)}
"""Each dtype with itself, and each beside another."""


def half_of(rows, columns):
    """Parameters of a test: a table, of which `make test` has every second cell."""
    table = list(itertools.product(enumerate(rows), enumerate(columns)))
    return exhaustive([(a, b) for (_, a), (_, b) in table], [(a, b) for (i, a), (j, b) in table if (i + j) % 2 == 0])


def build(cell, **options):
    """One parameter of each kind, in blocks that end in the middle, and their optimizer."""
    torch.manual_seed(3)
    params = {
        "quantized": nn.Parameter(quantize_weight(random(40, 150), cell, dtype=torch.bfloat16)),
        "bf16": nn.Parameter(random(6, 140, seed=1).bfloat16()),
        "fp16": nn.Parameter(random(5, 130, seed=2).half()),
        "fp32": nn.Parameter(random(4, 130, seed=3)),
        "vector": nn.Parameter(random(1, 33, seed=4).view(-1).bfloat16()),
    }
    return params, FusedAdam(params.items(), lr=LR, weight_decay=DECAY, **options)


def set_grads(params, step):
    for index, param in enumerate(params.values()):
        param.grad = random(param.numel(), 1, seed=100 * step + index).view(param.shape).to(param.dtype)


def values(param):
    return (
        (param.dequantize(dtype=torch.float32) if hasattr(param, "quantized_storage") else param.float())
        .detach()
        .clone()
    )


def gap_of_float(x, mantissa, lowest):
    """Distance between the neighbours of |x|: 2**(exponent - mantissa), the exponent at least that of the normals."""
    exponent = x.abs().clamp(min=2.0 ** (lowest - 10)).log2().floor().clamp(min=lowest)
    return (exponent - mantissa).exp2()


@lru_cache
def numbers_of(encoding):
    """The finite numbers of an encoding that are not negative, in order."""
    every = torch.arange(1 << encoding.bits, dtype=torch.int32)
    every = every.to(torch.int16).view(torch.float16) if encoding == FP16 else every.to(torch.uint8)
    numbers = numerics.decode(every, encoding).double()
    return numbers[numbers.isfinite() & (numbers >= 0)].unique()


def gap_of_codes(x, storage):
    """The same for a format row: of the encoding's numbers, found in a table of them all, times the block's scale."""
    copy = storage.spec.format.copies[Orientation.ROWWISE]
    encoding = copy.codes.encoding
    numbers = numbers_of(encoding)
    scale = numerics.decode(storage.components[copy.scale.name], copy.scale.encoding).double()
    if copy.amax is not None:
        scale = scale * storage.components[copy.amax.name].double() / (encoding.max * copy.scale.encoding.max)
    for dim, block in enumerate(copy.block):
        scale = scale.repeat_interleave(min(block, x.shape[dim]), dim).narrow(dim, 0, x.shape[dim])
    above = torch.searchsorted(numbers, (x.abs() / scale).contiguous()).clamp(1, len(numbers) - 1)
    clipped = (x.abs() - numbers[-1] * scale).clamp(min=0)  # by a scale of past amaxes, or one rounded down
    return (numbers[above] - numbers[above - 1]) * scale + clipped


def gap(state, x, error):
    """Of a state or parameter at x, which is known up to `error`: the larger of those at both ends."""
    if state.storage is not None:
        return torch.maximum(gap_of_codes(x.abs() + error, state.storage), gap_of_codes(x.abs() - error, state.storage))
    local = state.live()[0]
    if local.dtype is torch.float32:
        return torch.zeros_like(x)
    info = torch.finfo(local.dtype)
    mantissa, lowest = round(-math.log2(info.eps)), round(math.log2(info.smallest_normal))
    return gap_of_float(x.abs() + error, mantissa, lowest)


def in_float64(grad, master, m, v, step, bounded):
    """One step of AdamW, and how far float32 may be from it; `bounded`: m is first brought within its bound by v.

    Each moment is a product and a sum: 4 roundings of its two terms. The update is m / sqrt(v): the error of m over
    sqrt(v), half the relative error of v, and 8 roundings after that; the weight rounds itself twice.
    """
    g, master, m, v = grad.double(), master.double(), m.double(), v.double()
    if bounded:
        limit = (1 - BETAS[0]) / math.sqrt((1 - BETAS[1]) * (1 - BETAS[0] ** 2 / BETAS[1])) * v.sqrt()
        m = m.clamp(-limit, limit)
    of_m = 4 * UNIT * (BETAS[0] * m.abs() + (1 - BETAS[0]) * g.abs())
    m = BETAS[0] * m + (1 - BETAS[0]) * g
    v = BETAS[1] * v + (1 - BETAS[1]) * g**2
    c1, c2 = 1 - BETAS[0] ** step, 1 - BETAS[1] ** step
    root = (v / c2).sqrt() + EPS
    update = m / c1 / root + DECAY * master
    of_master = 2 * UNIT * master.abs() + LR * (
        of_m / c1 / root + 12 * UNIT * update.abs() + DECAY * UNIT * master.abs()
    )
    return (master - LR * update, m, v), (of_master, of_m, 4 * UNIT * v)


def check_against_float64(recipe, masters, pair, steps=2):
    """Each step is compared with what float64 makes of the states that were there before it."""
    dtypes = dict(zip(("exp_avg_dtype", "exp_avg_sq_dtype"), map(DTYPES.get, pair), strict=True))
    params, optimizer = build(RECIPES[recipe].weight, **MASTERS[masters], **dtypes)
    for step in range(1, steps + 1):
        set_grads(params, step)
        held = {}
        for key, param in params.items():
            states = optimizer._states[param]
            held[key] = [states.get("master_param", states["param"]), *(states[m] for m in MOMENTS)]
        read = {key: [state.read().clone() for state in states] for key, states in held.items()}
        optimizer.step()
        for key, param in params.items():
            first, second = (optimizer._states[param][moment].storage for moment in MOMENTS)
            bounded = first is not None and (second is None or pair == ("fp8", "fp16"))
            exact, errors = in_float64(param.grad, *read[key], step, bounded)
            for role, state, x, error in zip(("weight", *MOMENTS), held[key], exact, errors, strict=True):
                off = (state.read().double() - x).abs()
                bound = error if isinstance(state, RemainderState) else gap(state, x, error) + error
                assert (off <= bound).all(), (key, role, step, (off / bound).max())


@pytest.mark.parametrize(("pair", "masters"), half_of(PAIRS, MASTERS))
def test_masters_and_moments_of_every_kind_beside_float64(masters, pair):
    """The recipes take turns: they meet the states in the weight only, where the next test has them all."""
    turn = list(PAIRS).index(pair) + list(MASTERS).index(masters)
    check_against_float64(list(RECIPES)[turn % len(RECIPES)], masters, PAIRS[pair])


@pytest.mark.parametrize(("recipe", "masters"), half_of(RECIPES, MASTERS))
def test_every_recipe_beside_float64(recipe, masters):
    check_against_float64(recipe, masters, ("fp32", "fp32"), steps=3)


# ------------------------------------------------------------------------------------------------------- the exact mean


def mean_is(found, expected, variance, what):
    """The mean of `found` is `expected` within 5 standard errors."""
    error = 5 * math.sqrt(variance / found.numel())
    assert abs(found.double().mean().item() - expected) <= error, (what, found.double().mean().item(), expected, error)
    return error


@pytest.mark.parametrize("name", ["bf16", "fp16", "fp8"])
@pytest.mark.parametrize("moment", MOMENTS)
def test_moments_follow_float64_on_average(name, moment):
    """Fifty steps of one gradient g: v climbs to (1 - b**50) g**2 by steps that to nearest are often too small.

    A column of larger gradients sets the scales, so the others lie anywhere between two numbers of the format. A write
    adds a variance of gap**2 / 4 at most, of which b**2 a step is left; gaps grow with the moment.
    """
    param = nn.Parameter(torch.zeros(64, 256))
    torch.manual_seed(5)
    optimizer = FusedAdam([param], lr=0.0, **dict.fromkeys(("exp_avg_dtype", "exp_avg_sq_dtype"), DTYPES[name]))
    param.grad = torch.full((64, 256), 0.3)
    param.grad[:, ::128] = 1.7
    beta = BETAS[MOMENTS.index(moment)]
    g = 0.3 if moment == "exp_avg" else torch.tensor(0.3).double().item() ** 2
    held, variance = None, 0.0
    for _ in range(50):
        optimizer.step()
        held = optimizer._states[param][moment]
        others = held.read()[param.grad < 1].double()
        widest = gap(held, held.read().double(), 0.0)[param.grad < 1].max().item()
        variance = beta**2 * variance + widest**2 / 4
    exact = (1 - beta**50) * g
    error = mean_is(others, exact, variance, name)
    assert error < 0.02 * exact  # sharp enough to notice what rounding to nearest loses


@pytest.mark.parametrize("recipe", [*RECIPES, "bf16", "fp16", "master bf16", "master fp16"])
def test_small_updates_move_weights_on_average(recipe):
    """Twenty steps, each far below half a gap, against the sign of the weight: to nearest not one would move it.

    A step of Adam with a constant gradient is lr. The variance of n writes is n gap**2 / 4 at most. Weights that are
    zero and, under NVFP4 and delayed scaling, the largest of a block are left out: the scale may clip the latter.
    """
    steps = 20
    torch.manual_seed(5)
    start = torch.randn(192, 192).clamp(-2, 2)
    options, dtype = {"master_weights": False}, torch.float32
    if recipe in RECIPES:
        param = nn.Parameter(quantize_weight(start * 2.0**-2, RECIPES[recipe].weight))
    elif "master" in recipe:
        options = {"master_weight_dtype": DTYPES[recipe.removeprefix("master ")]}
        param = nn.Parameter(quantize_weight(start, RECIPES["mxfp8"].weight))
    else:
        dtype = DTYPES[recipe]
        param = nn.Parameter(start.to(dtype))
    lr = 2.0**-14 if "fp16" in recipe else 2.0**-11
    optimizer = FusedAdam([param], lr=lr, **options)
    state = optimizer._states[param].get("master_param", optimizer._states[param]["param"])
    before = state.read().double()
    grad = before.sign()
    chosen = (before != 0) & (before.abs() < 0.6 * before.abs().amax())
    variance = 0.0
    for _ in range(steps):
        param.grad = grad.to(param.dtype)
        optimizer.step()
        variance += gap(state, state.read().double(), 0.0)[chosen].square().mean().item() / 4
    moved = ((before - state.read().double()) * grad)[chosen]
    error = mean_is(moved, steps * lr, variance, recipe)
    assert error < 0.5 * steps * lr


@every_cell
def test_weights_without_masters_draw_from_their_own_key(cell):
    """One draw a step; and the weight is one of the two numbers around the result, so some are not the nearest."""
    params, optimizer = build(cell, master_weights=False)
    assert not any("master_param" in state for state in optimizer.state.values())
    storage = params["quantized"].quantized_storage
    for step in range(1, 4):
        set_grads(params, step)
        before = values(params["quantized"])
        m, v = (optimizer.get_unscaled_state(params["quantized"], moment).clone() for moment in MOMENTS)
        nearest = quantize_weight(torch.zeros(40, 150), cell, state={k: t.clone() for k, t in storage.state.items()})
        h = Hyperparameters(step, LR, 0.9, 0.999, EPS, DECAY, True, True)
        optimizer.step()
        nearest.quantize_(adam(params["quantized"].grad, before, m, v, h).master)
        assert storage.state[RNG_DRAWS].item() == step
        own = contents(params["quantized"])
        assert differing(own, contents(nearest))


# -------------------------------------------------------------------------------------------------------- the remainder


def test_remainders_train_as_float32_masters_do():
    """Bit for bit: parameters, moments and masters, in half of the masters' memory."""
    twins = [build(RECIPES["current"].weight, **options) for options in ({}, MASTERS["remainder"])]
    for step in range(30):
        for params, optimizer in twins:
            set_grads(params, step)
            if step % 7 == 3:
                params["bf16"].grad.fill_(float("inf"))
            optimizer.step()
    (plain, plain_optimizer), (halves, optimizer) = twins
    for key, param in halves.items():
        own, other = optimizer.state[param], plain_optimizer.state[plain[key]]
        assert same(values(param), values(plain[key]))
        assert all(same(own[moment], other[moment]) for moment in MOMENTS)
        if "master_param" in other:
            assert same(optimizer.get_unscaled_state(param, "master_param"), other["master_param"])
            halves_kept = param.dtype is torch.bfloat16 and key != "quantized"
            kept = own["master_param_low" if halves_kept else "master_param"]
            assert kept.nbytes == other["master_param"].nbytes // (2 if halves_kept else 1)
    assert optimizer.skipped_steps == 4


def test_setting_a_master_with_a_remainder_sets_the_parameter():
    params, optimizer = build(RECIPES["current"].weight, **MASTERS["remainder"])
    new = random(6, 140, seed=9)
    optimizer.set_scaled_state(params["bf16"], "master_param", new)
    assert same(optimizer.get_unscaled_state(params["bf16"], "master_param"), new)
    assert (params["bf16"].float() - new).abs().max() <= (new.abs() * 2.0**-8).max()
    optimizer.reseed_masters()
    assert same(optimizer.get_unscaled_state(params["bf16"], "master_param"), params["bf16"].detach().float())


def test_one_parameter_alone_may_have_a_remainder():
    params, optimizer = build(RECIPES["current"].weight)
    optimizer.initialize_state(params["bf16"], store_param_remainders=True)
    optimizer.initialize_state(params["fp16"], store_param_remainders=True)
    kinds = {key: sorted(optimizer.state[params[key]])[-1] for key in ("bf16", "fp16", "vector")}
    assert kinds == {"bf16": "master_param_low", "fp16": "master_param", "vector": "master_param"}


# --------------------------------------------------------------------------------------------------------- what is kept


@pytest.mark.parametrize("name", ["bf16", "fp16", "fp8"])
def test_a_positive_second_moment_never_becomes_zero(name):
    """Neither where a block's largest is far above, nor at the lower end of the format."""
    param = nn.Parameter(torch.zeros(2, 256))
    optimizer = FusedAdam([param], lr=LR, exp_avg_sq_dtype=DTYPES[name])
    param.grad = torch.full((2, 256), 1e-12)
    param.grad[:, 0], param.grad[1, 1], param.grad[0, 128:] = 1.0, 0.0, 1e-19
    for _ in range(5):
        optimizer.step()
        second = optimizer.get_unscaled_state(param, "exp_avg_sq")
        assert (second[param.grad != 0] > 0).all() and second[1, 1] == 0
    assert param.isfinite().all() and param.abs().max() < 0.1


@pytest.mark.parametrize("masters", MASTERS)
def test_which_parameters_have_masters_and_of_what(masters):
    """Those that are coarser than the master's dtype; scaled states are for matrices, so a vector's are float32."""
    params, optimizer = build(RECIPES["mxfp8"].weight, **MASTERS[masters])
    found = {key: optimizer.state[param].get("master_param") for key, param in params.items()}
    kinds = {key: str(t.dtype).removeprefix("torch.") for key, t in found.items() if t is not None}
    expected = {
        "fp32": dict.fromkeys(("quantized", "bf16", "fp16", "vector"), "float32"),
        "fp16": {"quantized": "float16", "bf16": "float16", "vector": "float32"},
        "bf16": {"quantized": "bfloat16"},
        "remainder": {"quantized": "float32", "fp16": "float32"},
        "split": {},
        "none": {},
    }
    assert kinds == expected[masters]
    scaled = {key for key, param in params.items() if "master_param_scale_inv" in optimizer.state[param]}
    assert scaled == ({"quantized", "bf16"} if masters == "fp16" else set())
    low = {key: tuple(optimizer.state[p].get("master_param_low", torch.empty(0)).shape) for key, p in params.items()}
    halves = {"bf16": (6, 140, 2), "vector": (33, 2)}
    expected = {"remainder": halves, "split": {**halves, "quantized": tuple(params["quantized"].shape)}}
    assert low == dict.fromkeys(params, (0,)) | expected.get(masters, {})


def test_fp16_states_that_do_not_change_keep_their_values():
    """Although the scale of their block does, in every step: it is a power of two."""
    param = nn.Parameter(random(2, 128, seed=1).bfloat16())
    optimizer = FusedAdam([param], lr=16.0, **MASTERS["fp16"])
    master = optimizer.get_unscaled_state(param, "master_param")
    assert same(master, param.detach().float())  # a bfloat16 fits
    param.grad = torch.zeros_like(param)
    scales = set()
    for _ in range(10):
        param.grad[:, 5] = -1.0
        optimizer.step()
        now = optimizer.get_unscaled_state(param, "master_param")
        scales.add(optimizer.state[param]["master_param_scale_inv"][1].item())
        moved = (now != master).any(dim=0).nonzero().flatten().tolist()
        assert moved == [5]
    assert len(scales) > 1 and all(math.frexp(scale)[0] == 0.5 for scale in scales)


@pytest.mark.parametrize("masters", ["fp16", "bf16"])
def test_parameters_are_rounded_from_the_result_not_from_the_master(masters):
    """The master is rounded once and so is the parameter, to nearest."""
    params, optimizer = build(RECIPES["block"].weight, **MASTERS[masters])
    set_grads(params, 1)
    param = params["quantized"]
    master = optimizer.get_unscaled_state(param, "master_param").clone()
    optimizer.step()
    h = Hyperparameters(1, LR, 0.9, 0.999, EPS, DECAY, True, True)
    result = adam(param.grad, master, torch.zeros_like(master), torch.zeros_like(master), h).master
    expected = quantize_weight(result, RECIPES["block"].weight)
    assert not differing(param.quantized_storage.components, expected.quantized_storage.components)


def test_the_seed_is_drawn_only_where_something_is_rounded():
    """So that an optimizer without rounding leaves torch's generator alone, and ranks need not agree on it."""
    before = torch.get_rng_state()
    assert "rounding_seed" not in FusedAdam([nn.Parameter(torch.zeros(2, 2))]).param_groups[0]
    assert torch.equal(before, torch.get_rng_state())
    seeds = set()
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        optimizer = FusedAdam([nn.Parameter(torch.zeros(2, 2))], exp_avg_dtype=torch.bfloat16)
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})
        assert len({group["rounding_seed"] for group in optimizer.param_groups}) == 1
        seeds.add(optimizer.param_groups[0]["rounding_seed"])
    assert len(seeds) == 2


def test_rows_of_states_are_rows_of_the_table():
    params, optimizer = build(RECIPES["mxfp8"].weight, exp_avg_dtype=torch.float16, exp_avg_sq_dtype=torch.uint8)
    for moment in MOMENTS:
        storage = optimizer._states[params["fp32"]][moment].storage
        assert storage.spec.format in FORMATS.values()
        exact = random(4, 130, seed=8).abs()
        optimizer.set_scaled_state(params["fp32"], moment, exact)
        parts = numerics.quantize(exact, storage.spec.format, storage.spec.scaling)
        assert not differing(storage.components, parts)
    assert components.quantized_local(params["fp32"]) is None


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "_orig_mod.module."])
def test_loads_states_of_parameters_named_under_a_wrapper(prefix, tmp_path):
    """An optimizer built before DDP or torch.compile, and one built after, load each other's states."""
    model, other = nn.Linear(4, 4), nn.Linear(4, 4)
    plain = FusedAdam(model.named_parameters())
    wrapped = FusedAdam([(prefix + name, param) for name, param in other.named_parameters()])
    model(torch.ones(1, 4)).sum().backward()
    plain.step()
    wrapped.load_state_dict(plain.state_dict())
    for first, second in zip(plain.state.values(), wrapped.state.values(), strict=True):
        assert all(torch.equal(first[key], second[key]) for key in MOMENTS)
    plain.load_state_dict(wrapped.state_dict())
    checkpoints.save(tmp_path / "saved", other, wrapped)
    checkpoints.load(tmp_path / "saved", model, plain)
    renamed = FusedAdam([("x." + name, param) for name, param in other.named_parameters()])
    with pytest.raises(CheckpointError, match="pass the same parameters"):
        renamed.load_state_dict(plain.state_dict())
