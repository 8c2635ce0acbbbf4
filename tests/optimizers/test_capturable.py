"""Steps that read nothing back from the device: the same bits as others, bad steps included, found out when asked."""

import copy
import itertools
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils._python_dispatch import TorchDispatchMode

from quantshard.errors import NonFiniteGradientError
from quantshard.numerics.adam import power
from quantshard.optimizers import FusedAdam, Lion, Muon
from quantshard.tensor.parameter_state import AMAX_HISTORY, RNG_KEY
from tests.covering import exhaustive
from tests.interpreter import kernels_on, prepared_once
from tests.optimizers.test_states import MASTERS, build, set_grads, values
from tests.tensor.test_tensor import RECIPES, contents, differing, same

FP8 = {"exp_avg_dtype": torch.uint8, "exp_avg_sq_dtype": torch.bfloat16}
COUNTERS = ("step", "skipped_steps", "skipped_in_a_row")

READS_BACK = {
    torch.ops.aten._local_scalar_dense.default,
    torch.ops.aten.nonzero.default,
    torch.ops.aten.masked_select.default,
    torch.ops.aten.equal.default,
    torch.ops.aten.is_nonzero.default,
    torch.ops.aten.unique_dim.default,
    torch.ops.aten._unique2.default,
}
"""What a device must be waited for; and indexing by booleans, below."""


class NothingReadBack(TorchDispatchMode):
    """Raises where a value or a size that depends on values would have to come from the device.

    `of_host`: tensors that are the host's on any machine.
    """

    def __init__(self, of_host=()):
        super().__init__()
        self.of_host = {tensor.data_ptr() for tensor in of_host}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        by_booleans = func is torch.ops.aten.index.Tensor and any(
            t is not None and t.dtype == torch.bool for t in args[1]
        )
        is_host = func is torch.ops.aten._local_scalar_dense.default and args[0].data_ptr() in self.of_host
        assert is_host or (func not in READS_BACK and not by_booleans), func
        return func(*args, **(kwargs or {}))


def everything(params, optimizer):
    found = {key: values(param) for key, param in params.items()}
    for key, param in params.items():
        found |= {f"{key} {name}": t.clone() for name, t in optimizer.state[param].items()}
    weight = params.get("quantized")
    return found | ({} if weight is None else {f"quantized {k}": t for k, t in contents(weight).items()})


def plain(params):
    """Without the quantized weight, for masterless steps, which must count their draws on the host for it."""
    return {key: param for key, param in params.items() if key != "quantized"}


@pytest.mark.parametrize(
    ("recipe", "masters", "dtypes"),
    [
        pytest.param(
            recipe,
            masters,
            ({}, FP8)[(i + j) % 2],
            id=f"{recipe}-{masters}-{('fp32', 'fp8-bf16')[(i + j) % 2]}",
            marks=pytest.mark.exhaustive if (i + j // 2) % 2 or (i // 2 + j) % 2 else (),
        )
        for i, recipe in enumerate(["delayed", "current", "mxfp8", "nvfp4"])
        for j, masters in enumerate(MASTERS)
    ],
)
def test_ten_steps_are_the_same_bits(recipe, masters, dtypes):
    """With bad gradients at some, a schedule, and a parameter that now and then has no gradient."""

    def made(capturable):
        params, _ = build(RECIPES[recipe].weight)
        params = plain(params) if masters == "none" else params
        torch.manual_seed(1)
        options = {**MASTERS[masters], **dtypes, "weight_decay": 0.1, "capturable": capturable}
        return params, FusedAdam(params.items(), lr=0.01, **options)

    ten_steps_agree(made)


def keys_of(params):
    """Those of random words, by which kernels' plans know a weight."""
    storages = [getattr(param, "quantized_storage", None) for param in params.values()]
    return [storage.state[RNG_KEY] for storage in storages if storage is not None]


def ten_steps_agree(made):
    """Of what is made capturable and not; the former reads nothing back."""
    runs = []
    for capturable in (False, True):
        params, optimizer = made(capturable)
        schedule = LambdaLR(optimizer, lambda t: 1 / (t + 1))
        for step in range(10):
            set_grads(params, step)
            if step in (0, 4, 5):
                params["vector"].grad[3] = float("nan")
            if step % 5 == 1:
                params["bf16"].grad = None
            with NothingReadBack(keys_of(params)) if capturable else nullcontext():
                optimizer.step()
            # a rate that a tensor has: a schedule multiplies what stands there
            schedule.step()
            for group in optimizer.param_groups:
                rate = torch.tensor(0.01 / (step + 2), dtype=optimizer.rate_dtype)
                group["lr"].fill_(rate) if capturable else group.update(lr=rate.item())
        runs.append((params, optimizer))
    (one, first), (two, second) = runs
    assert not differing(everything(one, first), everything(two, second))
    assert first.skipped_steps == second.skipped_steps == 3
    assert [first.param_groups[0][key] for key in COUNTERS] == [7, 3, 0]
    assert all(second.param_groups[0][key].item() == first.param_groups[0][key] for key in COUNTERS)


def lion_of(params, **options):
    return Lion(params.items(), lr=0.01, weight_decay=0.1, **options)


def muon_of(params, **options):
    """Its matrices, and the rest by AdamW."""
    matrices = {name: param for name, param in params.items() if name != "vector"}
    others = {"params": [("vector", params["vector"])], "algorithm": "adamw", "lr": 0.01}
    return Muon([{"params": list(matrices.items())}, others], lr=0.01, **options)


@pytest.mark.parametrize(
    ("optimizer_of", "states"),
    [
        (lion_of, {}),
        (lion_of, {"exp_avg_dtype": torch.uint8}),
        (muon_of, {}),
        (muon_of, {"momentum_buffer_dtype": torch.uint8, **FP8}),
        (muon_of, {"adjust_lr_fn": "match_rms_adamw", "ema_decay": 0.5}),
    ],
)
@pytest.mark.parametrize("recipe", ["nvfp4", pytest.param("delayed", marks=pytest.mark.exhaustive)])
def test_ten_steps_of_other_optimizers_are_the_same_bits(optimizer_of, states, recipe):
    def made(capturable):
        params, _ = build(RECIPES[recipe].weight)
        torch.manual_seed(1)
        return params, optimizer_of(params, capturable=capturable, **states)

    ten_steps_agree(made)


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled, and read no memory of the host")
@pytest.mark.parametrize(
    ("recipe", "optimizer_of"),
    exhaustive(itertools.product(("delayed", "nvfp4"), (lion_of, muon_of)), []),
)
def test_ten_steps_of_other_optimizers_on_kernels(recipe, optimizer_of):
    pytest.importorskip("triton")

    def made(capturable):
        params, _ = build(RECIPES[recipe].weight)
        torch.manual_seed(1)
        return params, optimizer_of(params, capturable=capturable)

    with prepared_once(), kernels_on("cpu"):
        ten_steps_agree(made)


def test_the_counts_and_the_rate_are_tensors_that_stay():
    """A captured step reads them where they are: a schedule, a step and a load write into them."""
    params, optimizer = build(RECIPES["mxfp8"].weight, capturable=True)
    group = optimizer.param_groups[0]
    before = {key: group[key] for key in (*COUNTERS, "lr")}
    assert all(t.ndim == 0 for t in before.values()) and group["lr"].dtype == torch.float32
    schedule = LambdaLR(optimizer, lambda t: 0.5**t)
    set_grads(params, 1)
    optimizer.step()
    schedule.step()
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert all(group[key] is t for key, t in before.items())
    assert group["step"].item() == 1 and group["lr"].item() == pytest.approx(0.005)


@pytest.mark.parametrize("capturable", [True, False])
def test_a_state_dict_is_that_of_any_other(capturable):
    """Numbers, not tensors; either kind loads the other's and goes on with the same bits."""
    params, optimizer = build(RECIPES["current"].weight, capturable=capturable, **FP8)
    for step in range(3):
        set_grads(params, step)
        optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    assert all(type(saved["param_groups"][0][key]) is int for key in COUNTERS)
    assert type(saved["param_groups"][0]["lr"]) is float
    others, other = build(RECIPES["current"].weight, capturable=not capturable, **FP8)
    for key, param in others.items():
        param.data.copy_(params[key].data)
    other.load_state_dict(saved)
    for run, on in ((params, optimizer), (others, other)):
        set_grads(run, 4)
        on.step()
    assert not differing(everything(params, optimizer), everything(others, other))


@pytest.mark.parametrize("ask", [lambda o: o.skipped_steps, lambda o: o.state_dict()], ids=["skipped", "state_dict"])
def test_too_many_bad_steps_are_found_out_when_asked(ask):
    params, optimizer = build(RECIPES["delayed"].weight, capturable=True, max_skipped_in_a_row=3)
    before = everything(params, optimizer)
    for step in range(4):
        set_grads(params, step)
        params["fp16"].grad.fill_(float("inf"))
        params["vector"].grad.fill_(float("inf"))
        optimizer.step()
        if step < 2:
            ask(optimizer)
    with pytest.raises(NonFiniteGradientError, match=r"4 steps in a row .* first in fp16;"):
        ask(optimizer)
    assert optimizer.state_dict()["param_groups"][0]["skipped_steps"] == 4  # for a load to fill
    assert not differing(before, everything(params, optimizer))
    set_grads(params, 9)
    optimizer.step()
    assert optimizer.skipped_steps == 4 and optimizer.state_dict()["param_groups"][0]["step"] == 1


def test_the_history_of_a_bad_step_is_not_recorded():
    params, optimizer = build(RECIPES["delayed"].weight, capturable=True)
    history = params["quantized"].quantized_storage.state[AMAX_HISTORY].clone()
    set_grads(params, 1)
    params["fp32"].grad[0, 0] = float("nan")
    optimizer.step()
    assert same(params["quantized"].quantized_storage.state[AMAX_HISTORY], history)


def test_plain_parameters_without_masters_may_be_captured():
    """Their random words come from the step, which is a tensor."""
    param = nn.Parameter(torch.ones(8, 8, dtype=torch.bfloat16))
    optimizer = FusedAdam([param], lr=1e-3, master_weights=False, capturable=True)
    seen = set()
    for _ in range(4):
        param.grad = torch.ones_like(param)
        with NothingReadBack():
            optimizer.step()
        seen.add(tuple(param.detach().float().flatten().tolist()))
    assert len(seen) == 4


@pytest.mark.parametrize("base", [0.9, 0.999, 0.5, 0.0, 1.0])
def test_powers_are_the_same_on_any_device(base):
    """A product of squares, of numbers and of tensors alike; within its roundings of the power."""
    for exponent in (0, 1, 2, 3, 17, 1000, 12345, 2**20 + 1):
        number, tensor = power(base, exponent), power(base, torch.tensor(exponent))
        assert isinstance(number, float) and tensor.dtype == torch.float64 and tensor.item() == number
        # each squaring doubles the relative error of the one before, and adds 2**-53: together `exponent` of them
        assert number == pytest.approx(base**exponent, rel=2 * max(exponent, 1) * 2.0**-53, abs=5e-324)
