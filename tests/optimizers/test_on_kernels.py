"""A FusedAdam whose steps run in kernels has the bits, counts and errors of one in plain PyTorch, whatever its options.

On a machine without a GPU Triton's interpreter runs the kernels.
"""

from __future__ import annotations

import copy
import itertools
import sys
import types
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("triton")

from quantshard import private_torch
from quantshard.errors import ConfigurationError, NonFiniteGradientError, UnsupportedOperationError
from quantshard.kernels.optimizer import multi_tensor, plan as step_plan
from quantshard.optimizers import FusedAdam, Muon, kernel_step
from quantshard.recipe import resolve
from quantshard.tensor.parameter_state import AMAX_HISTORY, RNG_DRAWS, RNG_KEY
from quantshard.tensor.storage import QuantizedStorage
from tests.covering import by_turns, exhaustive
from tests.distributed.models import RECIPES
from tests.distributed.test_fused_adam import MASTERS, MOMENTS
from tests.interpreter import kernels_on, prepared_once
from tests.kernels.cases import steps
from tests.weights import quantize_weight

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, of overflows, in the interpreter

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(autouse=True, scope="module")
def _fast() -> Iterator[None]:
    with prepared_once():
        yield


WRITES: WeakKeyDictionary[QuantizedStorage, int] = WeakKeyDictionary()
"""How often storages were marked as written; their versions are alike in no two runs."""


@pytest.fixture(autouse=True)
def _count_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    mark = QuantizedStorage.mark_written

    def count(storage: QuantizedStorage) -> None:
        WRITES[storage] = WRITES.get(storage, 0) + 1
        mark(storage)

    monkeypatch.setattr(QuantizedStorage, "mark_written", count)


def random(*shape: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator) * torch.randn(shape, generator=generator).exp2()


def build(recipe: str, **options: Any) -> tuple[dict[str, nn.Parameter], FusedAdam]:
    """A parameter of each kind, of shapes that divide by nothing, in two groups: AdamW, and with L2."""
    torch.manual_seed(3)
    cell = resolve(RECIPES[recipe]).weight
    params = {
        "quantized": nn.Parameter(quantize_weight(random(3, 34, seed=0).to(DEVICE), cell, dtype=torch.bfloat16)),
        "bf16": random(2, 9, seed=1).bfloat16(),
        "fp16": random(2, 5, seed=2).half(),
        "fp32": random(3, 2, seed=3),
        "vector": random(7, seed=4).bfloat16(),
        "cube": random(2, 2, 3, seed=5).bfloat16(),
        "scalar": random(seed=6),
        "again": nn.Parameter(quantize_weight(random(2, 17, seed=7).to(DEVICE), cell, dtype=torch.bfloat16)),
    }
    params = {key: p if isinstance(p, nn.Parameter) else nn.Parameter(p.to(DEVICE)) for key, p in params.items()}
    named = list(params.items())
    groups = [
        {"params": named[:5], "weight_decay": 0.1},
        {"params": named[5:], "lr": 0.05, "weight_decay": 0.2, "adam_w_mode": False, "betas": (0.5, 0.9)},
    ]
    return params, FusedAdam(groups, lr=0.01, **options)


def set_grads(params: dict[str, nn.Parameter], step: int, name: str = "grad") -> None:
    for index, param in enumerate(params.values()):
        grad = random(*param.shape, seed=100 * step + index).to(param.dtype).to(DEVICE)
        setattr(param, name, grad)


def everything(params: dict[str, nn.Parameter], optimizer: FusedAdam) -> dict[str, Any]:
    """Copies of all tensors, and all counts; a step that a GPU skips counts as a write of all parameters."""
    found: dict[str, Any] = {}
    deferred = DEVICE == "cuda" and optimizer._master_weights and not optimizer._capturable
    is_planned = None in optimizer._plans and bool(optimizer._plans[None].kernels._plans)
    late = optimizer.skipped_steps if deferred and is_planned else 0
    for key, param in params.items():
        local: Any = private_torch.local_tensor(param)
        if hasattr(local, "quantized_storage"):
            storage = local.quantized_storage
            parts = {**storage.components, **storage.state}
            found |= {f"{key} {part}": t.clone() for part, t in parts.items()}
            found[f"{key} writes"] = WRITES.get(storage, 0) - late
        else:
            found[key] = param.detach().clone()
        found |= {f"{key} {name}": t.clone() for name, t in optimizer.state[param].items()}
    for number, group in enumerate(optimizer.param_groups):
        found |= {f"{number} {name}": v for name, v in group.items() if not name.startswith("param")}
    return found


def differing(a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    """But for versions, which are stamps: no two writes have the same."""
    assert a.keys() == b.keys()
    return [
        key
        for key, value in a.items()
        if not key.endswith(" version")
        and not (
            torch.equal(*(x.reshape(-1).contiguous().view(torch.uint8) for x in (value, b[key])))
            if isinstance(value, Tensor)
            else value == b[key]
        )
    ]


def train(recipe: str, options: dict[str, Any], *devices: str) -> tuple[dict[str, Any], FusedAdam]:
    """Three steps: the second is skipped, the third lacks a gradient."""
    params, optimizer = build(recipe, **options)
    with kernels_on(*devices):
        for step in range(3):
            set_grads(params, step)
            if step == 1:
                params["vector"].grad[3] = float("nan")
            if step == 2:
                params["quantized"].grad = params["cube"].grad = None
            optimizer.step()
    return everything(params, optimizer), optimizer


def check(recipe: str, masters: str, moments: str, second: str | None = None, **options: Any) -> None:
    dtypes = {"exp_avg_dtype": MOMENTS[moments], "exp_avg_sq_dtype": MOMENTS[second or moments]}
    options = {**MASTERS[masters], **dtypes, **options}
    expected, _ = train(recipe, options)
    found, optimizer = train(recipe, options, DEVICE)
    [planned] = optimizer._plans[None].kernels._plans
    assert len(planned.indices) == 8 and not optimizer._plans[None].kernels._remaining()
    assert all(item.grad is None for item in optimizer._plans[None].kernels._work)
    assert not differing(found, expected)
    assert optimizer.skipped_steps == 1


EVERY = list(itertools.product(RECIPES, MASTERS, MOMENTS))
SOME = [
    ("delayed", "remainder", "fp8"), ("current", "fp16", "fp16"), ("block", "bf16", "fp32"), ("rowwise", "fp32", "fp8"),
    ("mxfp8", "split", "fp32"), ("nvfp4", "none", "fp16"), ("mxfp8 two copies", "remainder", "bf16"),
]  # fmt: skip
"""Every recipe, and every kind of masters and of moments."""


@pytest.mark.parametrize(("recipe", "masters", "moments"), exhaustive(EVERY, SOME))
def test_a_step_has_the_oracles_bits(recipe: str, masters: str, moments: str) -> None:
    """FP8 moments beside FP8 ones, and beside others."""
    second = "bf16" if moments == "fp8" and masters != "fp32" else None
    check(recipe, masters, moments, second)


@pytest.mark.parametrize("preset", ["lean8", pytest.param("lean6", marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("recipe", ["delayed", "rowwise", pytest.param("current", marks=pytest.mark.exhaustive)])
def test_wide_tiles_of_a_preset(recipe: str, preset: str) -> None:
    """Matrices that fill tiles of 512, 256 and 128 columns, masters beside codes among them."""
    assert steps.step_case(recipe, [(5, 416), (9, 240), (3, 128)], DEVICE, preset=preset).is_right()


@pytest.mark.parametrize(
    ("by", "options"),
    [
        ("Adam", {"preset": "lean8", "ema_decay": 0.9}),
        ("Adam", {"master_weights": False, "exp_avg_dtype": torch.uint8, "exp_avg_sq_dtype": torch.bfloat16}),
        ("Adam", {"preset": "lean6"}),
        ("Lion", {"preset": "lean8"}),
        ("Muon", {"preset": "lean8"}),
    ],
)
def test_blocks_that_are_computed_twice(by: str, options: dict[str, Any]) -> None:
    """Blocks of several tiles, whose masters are read under the old scales after the new ones are known.

    The learning rate changes every scale.
    """
    assert steps.step_case("fp8-weights", [(70, 150)], DEVICE, by=by, lr=0.02, **options).is_right()


@pytest.mark.parametrize(
    ("by", "lr"), exhaustive(itertools.product(("Adam", "Lion"), (1e-4, 0.02)), [("Adam", 0.02), ("Lion", 1e-4)])
)
def test_an_amax_has_the_oracles_bits_where_few_tiles_can_raise_it(by: str, lr: float) -> None:
    """Of 8 tiles one has the largest weight, and by large steps others overtake it."""
    results = []
    for devices in ((), (DEVICE,)):
        params, optimizer = steps.stepped("current", [(32, 512)], DEVICE, by, lr=lr, preset="lean8")
        with kernels_on(*devices):
            for step in range(4):
                params[0].grad.copy_(torch.randn(32, 512, generator=torch.Generator().manual_seed(step)))
                optimizer.step()
        results.append(params[0].quantized_storage.components | dict(optimizer.state[params[0]]))
    assert not differing(*results)


@pytest.mark.parametrize("masters", ["fp32", pytest.param("remainder", marks=pytest.mark.exhaustive)])
def test_counts_on_the_device(masters: str) -> None:
    check("delayed", masters, "bf16", capturable=True)


@pytest.mark.parametrize(
    ("recipe", "masters", "moments", "capturable"),
    [
        (
            "delayed",
            "fp32",
            "fp8",
            False,
        ),  # its scales are agreed before anything is written, and then all is once more
        ("mxfp8", "remainder", "fp32", True),
        pytest.param("nvfp4", "none", "bf16", False, marks=pytest.mark.exhaustive),
        pytest.param("block", "fp32", "fp32", False, marks=pytest.mark.exhaustive),
    ],
)
def test_averages_of_the_weights(recipe: str, masters: str, moments: str, capturable: bool) -> None:
    """A skipped step leaves them, and one without a gradient moves them."""
    check(recipe, masters, moments, ema_decay=0.9, capturable=capturable)


@by_turns(3, recipe=["current", "rowwise", "mxfp8"], preset=[None, "lean8", "lean6"], kind=[FusedAdam, Muon])
def test_stacks_of_matrices(recipe: str, preset: str | None, kind: Any) -> None:
    """Weights of experts: three steps with and without kernels, from a single plan."""
    found = []
    for devices in ((), (DEVICE,)):
        torch.manual_seed(3)
        values = random(3, 64, 48, seed=8).bfloat16().to(DEVICE)
        params = {"stack": nn.Parameter(quantize_weight(values, resolve(recipe).weight))}
        optimizer = kind(params.items(), lr=0.01, preset=preset)
        with kernels_on(*devices):
            for step in range(3):
                set_grads(params, step)
                optimizer.step()
        plan: Any = optimizer._plans[None]
        kernels = plan.kernels if kind is FusedAdam else plan.buckets[0].kernels
        assert not devices or len(kernels._plans) == 1
        assert params["stack"].shape == (3, 64, 48)
        found.append(everything(params, optimizer))
    assert differing(*found) == []


def test_muons_groups_of_adamw() -> None:
    """Kernels step these, also where a matrix lies between them; the matrices are PyTorch's."""
    results = []
    for devices in ((), (DEVICE,)):
        params, _ = build("block")
        named = list(params.items())
        adamw: dict[str, Any] = {"algorithm": "adamw", "lr": 0.01}
        groups = [{"params": named[4:7], **adamw}, {"params": named[:4]}, {"params": named[7:], **adamw, "eps": 1e-4}]
        dtypes = {"exp_avg_dtype": torch.uint8, "exp_avg_sq_dtype": torch.uint8}
        optimizer = Muon(groups, lr=0.02, momentum_buffer_dtype=torch.bfloat16, **dtypes)  # type: ignore[arg-type]
        with kernels_on(*devices):
            for step in range(3):
                set_grads(params, step)
                if step == 1:
                    params["fp32"].grad[1, 1] = float("nan")  # type: ignore[index]
                if step == 2:
                    params["vector"].grad = params["fp16"].grad = None
                optimizer.step()
        results.append(everything(params, optimizer))
        assert optimizer.skipped_steps == 1
        assert [planned.indices for planned in optimizer._plans[None].kernels._plans] == [[0, 1, 2, 3]] * len(devices)
    assert not differing(*results)


def test_histories_change() -> None:
    """A guard against an empty comparison above."""
    before, _ = build("delayed")
    found, _ = train("delayed", {}, DEVICE)
    assert found[f"quantized {AMAX_HISTORY}"].count_nonzero() > 0
    history = before["quantized"].quantized_storage.state[AMAX_HISTORY]
    assert not torch.equal(found[f"quantized {AMAX_HISTORY}"], history)


def test_decoupled_gradients_of_other_dtypes() -> None:
    """Kernels take float32, bfloat16 and float16; a float64 gradient goes to the oracle in this step."""
    results = []
    for devices in ((), (DEVICE,)):
        params, optimizer = build("current", use_decoupled_grad=True, master_weights=False)
        for step in range(2):
            set_grads(params, step, "decoupled_grad")
            for key, dtype in {"bf16": torch.float32, "quantized": torch.float16, "fp32": torch.bfloat16}.items():
                params[key].decoupled_grad = params[key].decoupled_grad.to(dtype)
            if step == 1:
                params["again"].decoupled_grad = params["again"].decoupled_grad.double()
            with kernels_on(*devices):
                optimizer.step()
        results.append(everything(params, optimizer))
        assert optimizer._plans[None].kernels._remaining() == ([7] if devices else [*range(8)])
    assert not differing(*results)


def test_what_kernels_do_not_take_goes_to_the_oracle() -> None:
    """A tensor that is not contiguous; and its gradient counts for all."""
    results = []
    for devices in ((), (DEVICE,)):
        torch.manual_seed(0)
        params = {
            "turned": nn.Parameter(random(3, 5, seed=2).bfloat16().to(DEVICE).t()),
            "plain": nn.Parameter(random(3, 5, seed=3).bfloat16().to(DEVICE)),
        }
        optimizer = FusedAdam(params.items(), exp_avg_dtype=torch.bfloat16)
        for step in range(3):
            set_grads(params, step)
            if step == 1:
                params["turned"].grad[0, 0] = float("inf")
            with kernels_on(*devices):
                optimizer.step()
        results.append(everything(params, optimizer))
        assert optimizer.skipped_steps == 1
        assert [planned.indices for planned in optimizer._plans[None].kernels._plans] == ([[1]] if devices else [])
    assert not differing(*results)


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> list[step_plan.StepLaunchPlan]:
    """All plans that are made from now on."""
    made: list[step_plan.StepLaunchPlan] = []
    real = kernel_step.StepLaunchPlan
    monkeypatch.setattr(kernel_step, "StepLaunchPlan", lambda *args: made.append(real(*args)) or made[-1])
    return made


def replaced(params: dict[str, nn.Parameter], optimizer: FusedAdam) -> None:
    params["bf16"].data = params["bf16"].data.clone()


def components_replaced(params: dict[str, nn.Parameter], optimizer: FusedAdam) -> None:
    storage = params["again"].quantized_storage
    storage.components = {name: part.clone() for name, part in storage.components.items()}


def state_replaced(params: dict[str, nn.Parameter], optimizer: FusedAdam) -> None:
    state = optimizer.state[params["vector"]]["exp_avg"]
    state.data = state.data.clone()


def unfrozen(params: dict[str, nn.Parameter], optimizer: FusedAdam) -> None:
    optimizer.initialize_state(params["fp16"])


def group_added(params: dict[str, nn.Parameter], optimizer: FusedAdam) -> None:
    params["new"] = nn.Parameter(random(3, 3, seed=9).to(DEVICE))
    optimizer.add_param_group({"params": [("new", params["new"])], "lr": 0.5})


def key_loaded(params: dict[str, nn.Parameter], optimizer: FusedAdam) -> None:
    params["quantized"].quantized_storage.state[RNG_KEY].fill_(12345)
    params["quantized"].quantized_storage.state[RNG_DRAWS].fill_(77)


def loaded(params: dict[str, nn.Parameter], optimizer: FusedAdam) -> None:
    state = copy.deepcopy(optimizer.state_dict())
    for held in state["state"].values():
        held["exp_avg"] += 0.5
    optimizer.load_state_dict(state)


@pytest.mark.parametrize(
    "change", [replaced, components_replaced, state_replaced, unfrozen, group_added, key_loaded, loaded]
)
def test_a_plan_lasts_until_something_is_replaced(change: Any, plans: list[step_plan.StepLaunchPlan]) -> None:
    results = []
    for devices in ((), (DEVICE,)):
        params, optimizer = build("mxfp8", master_weights=False)
        for step in range(2):
            if step == 1:
                change(params, optimizer)
            set_grads(params, step)
            with kernels_on(*devices):
                optimizer.step()
        results.append(everything(params, optimizer))
    assert len(plans) == (1 if change is loaded else 2)  # a load writes into what there is
    assert not differing(*results)


def test_a_plan_that_a_graph_holds_is_kept(plans: list[step_plan.StepLaunchPlan]) -> None:
    params, optimizer = build("current")
    with kernels_on(DEVICE):
        for step in range(3):
            replaced(params, optimizer)
            set_grads(params, step)
            optimizer.step()
            if step == 0:
                plans[0]._captured.append(torch.zeros(1))
    assert optimizer._plans[None].kernels._captured == [plans[0]]


def test_steps_in_a_row_that_are_skipped_raise() -> None:
    params, optimizer = build("current", max_skipped_in_a_row=2)
    before = everything(params, optimizer)
    with kernels_on(DEVICE):
        for step in range(2):
            set_grads(params, step)
            params["fp16"].grad.fill_(float("inf"))
            if step:
                with pytest.raises(NonFiniteGradientError, match=r"2 steps in a row .* first in fp16;"):
                    optimizer.step()
                    # A GPU that is behind the host raises in the next step.
                    optimizer.step()
            else:
                optimizer.step()
    after = everything(params, optimizer)
    assert set(differing(before, after)) == {
        f"{n} {key}" for n in (0, 1) for key in ("skipped_steps", "skipped_in_a_row")
    }
    assert all(before[key] == after[key] for key in before if key.endswith(" version"))


def test_changes_are_noticed_as_they_are_without_kernels() -> None:
    """A version counts every write: of others, which is an error, and of the step, which autograd must see."""
    params, optimizer = build("current")
    set_grads(params, 0)
    used = (params["bf16"] * params["bf16"]).sum()
    with kernels_on(DEVICE):
        optimizer.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            used.backward()
        set_grads(params, 1)
        optimizer.step()
        params["quantized"].quantize_(random(3, 34, seed=5).to(DEVICE))
        with pytest.raises(ConfigurationError, match="quantized was given new values"):
            optimizer.step()


def test_a_plan_is_not_made_while_a_graph_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    params, optimizer = build("current", capturable=True)
    set_grads(params, 0)
    monkeypatch.setattr(step_plan.StepLaunchPlan, "_is_capturing", property(lambda self: True))
    with kernels_on(DEVICE), pytest.raises(UnsupportedOperationError, match="run a step before"):
        optimizer.step()


def python_calls(count: int) -> Counter[str]:
    """Calls of quantshard's functions in a step of `count` weights, by file."""
    params = [
        nn.Parameter(quantize_weight(random(16, 32, seed=seed).to(DEVICE), resolve(RECIPES["current"]).weight))
        for seed in range(count)
    ]
    optimizer, calls = FusedAdam(params, lr=0.01), Counter[str]()
    root = str(Path(kernel_step.__file__).parents[1])

    def count_call(frame: types.FrameType, event: str, _: object) -> None:
        # a layer of another test that delayed its weight gradients watches the steps of all optimizers
        name = frame.f_code.co_filename
        if event == "call" and name.startswith(root) and not name.endswith("weight_gradients.py"):
            calls[name] += 1

    with kernels_on(DEVICE):
        for step in range(3):
            set_grads({str(index): param for index, param in enumerate(params)}, step)
            if step == 2:
                sys.setprofile(count_call)
            try:
                optimizer.step()
            finally:
                sys.setprofile(None)
    return calls


def test_a_planned_step_makes_few_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """For each further weight and in all, and in few files. Launches do nothing."""
    for module in (step_plan, multi_tensor):
        monkeypatch.setattr(module, "launch_kernel", lambda *args, **options: None)
    one, two = python_calls(1), python_calls(2)
    assert two.total() - one.total() <= 12
    assert one.total() <= 107 and len(one) <= 10
