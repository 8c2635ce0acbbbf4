"""Every kind of master and moment has the same bits on any number of ranks, and after a load on fewer of them.

Runs on 1, 2 and 3 ranks, one call each, and prints the table. Gradients are set by hand, by global index, so that the
sums of data parallelism play no part; no dimension divides by anything.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import quantshard as qs
from quantshard import private_torch
from quantshard.errors import CheckpointError, ConfigurationError, NonFiniteGradientError, RankMismatchError
from quantshard.optimizers import FusedAdam, Lion
from quantshard.tensor import components
from tests.distributed.models import RECIPES, bits
from tests.distributed.pool import run_ranks

pytestmark = pytest.mark.distributed

MASTERS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "fp16": {"master_weight_dtype": torch.float16},
    "bf16": {"master_weight_dtype": torch.bfloat16},
    "remainder": {"store_param_remainders": True},
    "split": {"store_param_remainders": True, "master_weight_dtype": torch.float16},
    "none": {"master_weights": False},
}
MOMENTS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.uint8}

Case = tuple[str, str, str, bool]
"""Recipe, masters, moments, capturable."""

TURNS = ("mxfp8", "current", "nvfp4", "block", "delayed")
CASES: list[Case] = [
    *((TURNS[(i + j) % 5], a, b, False) for i, a in enumerate(MASTERS) for j, b in enumerate(MOMENTS)),
    *((recipe, "none", "fp32", False) for recipe in list(RECIPES)[1:]),  # weights are rounded stochastically
    *(("current", masters, "bf16", True) for masters in ("fp16", "remainder")),
]
STEPS = 2


def build(
    case: Case, seed: int = 7, sizes: tuple[int, int] = (70, 131), by: type[FusedAdam | Lion] = FusedAdam
) -> tuple[nn.Sequential, FusedAdam | Lion]:
    """Quantized and plain layers, matrices and vectors, some ranks without rows; sharded over all ranks.

    `sizes`: what the first layer takes and gives.
    """
    into, out = sizes
    recipe, masters, moments, capturable = case
    torch.manual_seed(seed)
    with qs.quantized_model_init(recipe=RECIPES[recipe], preserve_high_precision_init_val=True):
        layers: list[nn.Module] = [qs.Linear(a, b, params_dtype=torch.bfloat16) for a, b in ((into, out), (out, 1))]
    layers += [nn.Linear(1, 7, dtype=torch.bfloat16), nn.Linear(7, out, bias=False, dtype=torch.bfloat16)]
    model = nn.Sequential(*layers)
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    kept = {"exp_avg_dtype": MOMENTS[moments]} | ({"exp_avg_sq_dtype": MOMENTS[moments]} if by is FusedAdam else {})
    optimizer = by(
        model.named_parameters(), lr=1e-2, weight_decay=0.1, capturable=capturable, **kept, **MASTERS[masters]
    )
    return model, optimizer


def cut_like(param: Tensor, whole: Tensor) -> DTensor:
    """This rank's part of a global tensor, as FSDP2 has this rank's part of the parameter."""
    assert isinstance(param, DTensor)
    quantized = components.quantized_local(param)
    first = private_torch.global_offset(param)[0] if quantized is None else quantized.quantized_storage.shard.origin[0]
    local = whole.narrow(0, first, private_torch.local_tensor(param).shape[0]).to(param.dtype)
    return components.as_dtensor(local, param, list(param.placements), tuple(param.shape))


def step(model: nn.Module, optimizer: FusedAdam | Lion, number: int) -> None:
    for index, param in enumerate(model.parameters()):
        generator = torch.Generator().manual_seed(100 * number + index)
        param.grad = cut_like(param, torch.randn(param.shape, generator=generator))
    optimizer.step()


def run(cases: dict[int, Case], saves: bool, folder: str) -> dict[int, tuple[dict[str, str], dict[str, str]]]:
    """Two steps, maybe saved before the last: the bits then and at the end."""
    found = {}
    for number, case in cases.items():
        model, optimizer = build(case)
        for i in range(STEPS - 1):
            step(model, optimizer, i)
        if saves:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            dcp.save(state, checkpoint_id=f"{folder}/{number}")
        saved = bits(model, optimizer)
        model.unshard()  # which makes FSDP2 replace the local tensors
        model.reshard()
        step(model, optimizer, STEPS - 1)
        found[number] = saved, bits(model, optimizer)
    return found


def resume(cases: dict[int, Case], folder: str) -> dict[int, tuple[dict[str, str], dict[str, str]]]:
    """The same after a load: seeded otherwise, and the last step only."""
    found = {}
    for number, case in cases.items():
        model, optimizer = build(case, seed=99)
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        dcp.load(state, checkpoint_id=f"{folder}/{number}")
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        loaded = bits(model, optimizer)
        step(model, optimizer, STEPS - 1)
        found[number] = loaded, bits(model, optimizer)
    return found


def chosen(all_of_them: bool) -> dict[int, Case]:
    """By number; some: masters and moments in turns, and capturable."""
    pairs = len(MASTERS) * len(MOMENTS)
    turns = {number for number in range(pairs) if sum(divmod(number, len(MOMENTS))) % 4 == 0}
    return {n: case for n, case in enumerate(CASES) if all_of_them or n in turns or case[3]}


@pytest.mark.parametrize(
    "cases", [chosen(False), pytest.param(chosen(True), marks=pytest.mark.exhaustive)], ids=["some", "all"]
)
def test_the_same_bits_on_any_number_of_ranks(
    cases: dict[int, Case], tmp_path: Path, show: Callable[[str], None]
) -> None:
    on3 = run_ranks(3, run, cases, True, str(tmp_path))
    on2 = run_ranks(2, resume, cases, str(tmp_path))
    [on1] = run_ranks(1, run, cases, False, str(tmp_path))
    rows = [f"{'recipe':<18}{'masters':<11}{'moments':<9}{'capturable':<12}{'1 = 3':<11}{'3 -> 2':<8}resumed"]
    wrong = 0
    for number, (recipe, masters, moments, capturable) in cases.items():
        saved, final = on1[number]
        assert saved != final
        checks = (
            all(ran[number] == (saved, final) for ran in on3),
            *(all(resumed[number][i] == (saved, final)[i] for resumed in on2) for i in range(2)),
        )
        wrong += len(checks) - sum(checks)
        words = ["equal" if check else "DIFFER" for check in checks]
        rows.append(
            f"{recipe:<18}{masters:<11}{moments:<9}{'yes' if capturable else 'no':<12}"
            f"{words[0]:<11}{words[1]:<8}{words[2]}"
        )
    show("\n".join(rows))
    assert not wrong, "\n".join(rows)


def change_and_step() -> list[tuple[dict[str, str], float]]:
    """Others give vectors and matrices that are not quantized new values between two steps, on every rank."""
    found = []
    for masters in ("fp32", "remainder"):
        model, optimizer = build(("mxfp8", masters, "fp32", False))
        step(model, optimizer, 0)
        with torch.no_grad():
            model[0].bias.fill_(9.0)
            model[2].weight.mul_(3.0)
        model.unshard()
        model.reshard()
        step(model, optimizer, 1)
        found.append((bits(model, optimizer), float(model[0].bias.full_tensor().mean())))
    return found


def test_new_values_of_parameters_that_are_not_quantized_stay() -> None:
    """1 and 3 ranks: they and their masters have the same bits."""
    [alone] = run_ranks(1, change_and_step)
    assert all(abs(mean - 9) < 0.1 for _, mean in alone), [mean for _, mean in alone]
    assert run_ranks(3, change_and_step) == [alone] * 3


def message_of(call: Any, kind: type[Exception]) -> str:
    try:
        call()
    except kind as error:
        return str(error)
    raise AssertionError(f"no {kind.__name__}")


def refusals() -> dict[str, str]:
    """What each rank is told, where ranks disagree or tensors are of two kinds."""
    rank, found = torch.distributed.get_rank(), {}
    case: Case = ("mxfp8", "fp32", "fp32", False)
    model, optimizer = build(case)
    whole = {k: v for k, v in optimizer.state_dict().items()}
    whole["state"] = {i: {k: t.full_tensor() for k, t in s.items()} for i, s in whole["state"].items()}
    found["plain state"] = message_of(lambda: optimizer.load_state_dict(whole), CheckpointError)
    bias = model[0].bias
    optimizer = FusedAdam(model.named_parameters(), use_decoupled_grad=True)
    bias.decoupled_grad = torch.zeros(131)
    found["plain gradient"] = message_of(optimizer.step, ConfigurationError)
    torch.manual_seed(rank)
    plain = list(model[2:].named_parameters())  # without a quantized weight, whose key would give the seed
    found["seed"] = message_of(lambda: FusedAdam(plain, exp_avg_dtype=torch.bfloat16), RankMismatchError)
    torch.manual_seed(0)

    optimizer = FusedAdam(model.named_parameters(), capturable=True, max_skipped_in_a_row=1)
    if rank == 0:
        bias.grad = cut_like(bias, torch.zeros(131))
    optimizer.step()
    found["missing, captured"] = message_of(optimizer.state_dict, RankMismatchError)
    bias.grad = cut_like(bias, torch.tensor([*[0.0] * 130, float("nan")]))  # on the last rank alone
    optimizer.step()
    found["bad, captured"] = message_of(lambda: optimizer.skipped_steps, NonFiniteGradientError)
    bias.grad = cut_like(bias, torch.ones(131))
    optimizer.step()
    assert optimizer.skipped_steps == 2 and optimizer.state_dict()["param_groups"][0]["step"] == 1
    return found


def test_refusals_name_the_parameter_on_every_rank() -> None:
    told = run_ranks(3, refusals)
    for found in told:
        assert "0.weight: optimizer state" in found["plain state"] and "a plain tensor" in found["plain state"]
        assert "0.bias is a DTensor" in found["plain gradient"]
        assert "but its decoupled_grad is a plain tensor" in found["plain gradient"]
        assert "rounding_seed" in found["seed"] and "differs between ranks" in found["seed"]
        assert "0.bias has a gradient on some ranks only" in found["missing, captured"]
        assert "2 steps in a row" in found["bad, captured"] and "first in 0.bias" in found["bad, captured"]
