"""Optimizers that were built before their model was sharded, as accelerate has it, and masters that were set by hand.

accelerate swaps the entries of `param_groups` after FSDP2 has replaced the model's parameters. Here its order of calls
is followed, with its own function for the last of them, on 1, 2 and 3 ranks; no dimension divides by anything.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import quantshard as qs
from quantshard import private_torch
from quantshard.errors import ConfigurationError, RankMismatchError
from quantshard.optimizers import FusedAdam, MasterWeights
from quantshard.tensor import components
from tests.distributed.models import RECIPES, bits
from tests.distributed.pool import run_ranks
from tests.distributed.test_fused_adam import cut_like, message_of

pytestmark = pytest.mark.distributed
pytest.importorskip("accelerate")

Make = Callable[[Any], torch.optim.Optimizer]
OPTIMIZERS: dict[str, tuple[str, Make]] = {
    "FusedAdam": ("mxfp8", lambda params: FusedAdam(params, lr=1e-2, weight_decay=0.1)),
    "capturable": ("current", lambda params: FusedAdam(params, lr=1e-2, capturable=True)),
    "FP8 moments, BF16 masters": (
        "nvfp4",
        lambda params: FusedAdam(
            params, lr=1e-2, exp_avg_dtype=torch.uint8, exp_avg_sq_dtype=torch.uint8,
            master_weight_dtype=torch.bfloat16,
        ),
    ),
    "no masters": ("delayed", lambda params: FusedAdam(params, lr=1e-2, master_weights=False)),
    "MasterWeights": ("block", lambda params: MasterWeights(torch.optim.AdamW, params, lr=1e-2)),
    "MasterWeights, SGD": ("mxfp8", lambda params: MasterWeights(torch.optim.SGD, params, lr=1e-2, momentum=0.9)),
}  # fmt: skip
STEPS = 2


def build(recipe: str) -> nn.Sequential:
    torch.manual_seed(7)
    with qs.quantized_model_init(recipe=RECIPES[recipe], preserve_high_precision_init_val=True):
        layers: list[nn.Module] = [qs.Linear(a, b, params_dtype=torch.bfloat16) for a, b in ((70, 131), (131, 1))]
    return nn.Sequential(*layers, nn.Linear(1, 7, dtype=torch.bfloat16))


def shard(model: nn.Module) -> None:
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    for layer in model.children():
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


def prepare(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """`Accelerator._prepare_fsdp2`, but for names in the place of addresses."""
    from accelerate.utils.fsdp_utils import fsdp2_switch_optimizer_parameters

    optimizer.load_state_dict(optimizer.state_dict())  # AcceleratedOptimizer.__init__
    names = {param: name for name, param in model.named_parameters()}
    for group in optimizer.param_groups:
        for position, param in enumerate(group["params"]):
            group["params"][position] = torch.empty(1, dtype=param.dtype, device=param.device)
            group["params"][position].data_ptr = names[param]
    shard(model)
    fsdp2_switch_optimizer_parameters(optimizer, dict(model.named_parameters()))


def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    for index, param in enumerate(model.parameters()):
        generator = torch.Generator().manual_seed(100 * number + index)
        param.grad = cut_like(param, torch.randn(param.shape, generator=generator))
    optimizer.step()


def trained(before: bool) -> list[dict[str, str]]:
    """Bits of each optimizer's run, built before or after its model is sharded."""
    found = []
    for recipe, make in OPTIMIZERS.values():
        model = build(recipe)
        if before:
            optimizer = make(model.named_parameters())
            prepare(model, optimizer)
        else:
            shard(model)
            optimizer = make(model.named_parameters())
        born = bits(model)
        for number in range(STEPS):
            optimizer.zero_grad()
            step(model, optimizer, number)
        found.append(bits(model, optimizer))
        now = bits(model)
        same = [key for key in born if key.endswith(("weight", "bias")) and born[key] == now[key]]
        assert not same, f"not trained: {same}"
    return found


def swaps() -> tuple[list[dict[str, str]], list[dict[str, str]], dict[str, str]]:
    return trained(True), trained(False), refused()


def refused() -> dict[str, str]:
    """What each rank is told of parameters that are replaced when something would be lost, if only on one rank."""
    rank, told = torch.distributed.get_rank(), {}
    for name in ("FusedAdam", "MasterWeights"):
        recipe, make = OPTIMIZERS[name]
        model = build(recipe)
        optimizer = make(model.named_parameters())
        step_plain(model, optimizer)
        shard(model)
        optimizer.param_groups[0]["params"] = list(model.parameters())
        told[name] = message_of(optimizer.step, ConfigurationError)
    model = build("mxfp8")
    shard(model)
    optimizer = FusedAdam(model.named_parameters())
    if rank == 0:
        model[2].bias.grad = cut_like(model[2].bias, torch.ones(7))
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "none of this optimizer's")  # one has, on another rank
        if torch.distributed.get_world_size() > 1:
            message_of(optimizer.step, RankMismatchError)
    return told


def step_plain(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for param in model.parameters():
        param.grad = torch.ones(param.shape, dtype=torch.bfloat16)
    optimizer.step()


def test_an_optimizer_from_before_trains_as_one_from_after() -> None:
    """1 and 3 ranks: all weights move, to the same bits everywhere."""
    runs = {ranks: run_ranks(ranks, swaps) for ranks in (1, 3)}
    for name, *found in zip(OPTIMIZERS, *(run[i] for runs_of in runs.values() for run in runs_of for i in (0, 1)),
                            strict=True):  # fmt: skip
        assert all(one == found[0] for one in found), name
    for ranks, of_ranks in runs.items():
        for rank, (_, _, told) in enumerate(of_ranks):
            for name in ("FusedAdam", "MasterWeights"):
                assert "before the first step" in told[name], (ranks, rank)


# --------------------------------------------------------------------------------------- masters that are set by hand


def seeded(way: str) -> tuple[dict[str, str], dict[str, str]]:
    """Bits at birth and after a step, with masters of what the weights were initialized with: taken by the optimizer
    itself, or set as TransformerEngine's example does, from local tensors or from DTensors."""
    model = build("mxfp8")
    shard(model)
    kept = {name: local_of(param).get_high_precision_init_val() for name, param in quantized_of(model)}
    if way != "taken":
        for _, param in quantized_of(model):
            local_of(param).clear_high_precision_init_val()
    optimizer = FusedAdam(model.named_parameters(), lr=1e-2, master_weights=True)
    for name, param in quantized_of(model) if way != "taken" else ():
        optimizer.initialize_state(param, False)
        value = kept[name].to("cpu").float()
        if way == "DTensor":
            value = components.as_dtensor(value, param, list(param.placements), tuple(param.shape))
        optimizer.set_scaled_state(param, "master_param", value)
        found = optimizer.get_unscaled_state(param, "master_param")
        assert torch.equal(found.to_local(), private_torch.local_tensor(value)), name
        wrong = torch.zeros(value.shape[0] + 1, param.shape[1])
        told = message_of(lambda p=param, w=wrong: optimizer.set_scaled_state(p, "master_param", w), ConfigurationError)
        assert f"{name} is" in told and "its master_param is" in told, told
        told = message_of(lambda p=param: optimizer.get_unscaled_state(local_of(p), "exp_avg"), ConfigurationError)
        assert "not parts" in told, told
    for param in model.parameters():
        if components.quantized_local(param) is not None:
            local_of(param).clear_high_precision_init_val()
    born = bits(model, optimizer)
    step(model, optimizer, 0)
    return born, bits(model, optimizer)


def quantized_of(model: nn.Module) -> list[tuple[str, Any]]:
    return [(name, p) for name, p in model.named_parameters() if components.quantized_local(p) is not None]


def local_of(param: Tensor) -> Any:
    return private_torch.local_tensor(param)


def seeded_in_every_way() -> list[tuple[dict[str, str], dict[str, str]]]:
    return [seeded(way) for way in ("taken", "local", "DTensor")]


def loaded_by_dcp(recipe: str, folder: str) -> tuple[Tensor, Tensor, bool]:
    """A rank's values of a weight that was saved, and what came of them in a step of almost no length, in a model whose
    initial values were kept; and whether those of what was not loaded are still there."""
    source, model = build(recipe), build(recipe)
    local_of(source[0].weight).quantize_(torch.randn(131, 70))
    for each in (source, model):
        shard(each)
    dcp.save({"model": source[:1].state_dict()}, checkpoint_id=folder)
    dcp.load({"model": model[:1].state_dict()}, checkpoint_id=folder)  # writes the tensors of the state dict themselves
    optimizer = FusedAdam(model.named_parameters(), lr=1e-9)
    others = [local_of(param).get_high_precision_init_val() is not None for name, param in quantized_of(model[1:])]
    step(model, optimizer, 0)
    saved, found = (local_of(each[0].weight).dequantize().detach() for each in (source, model))
    return saved, found, all(others)


def test_values_that_dcp_wrote_seed_masters(tmp_path: Path) -> None:
    """1 and 3 ranks: kept initial values do not come back, as they did in the first step. Codes that are quantized
    again have the same values, if perhaps under another scale."""
    for ranks in (1, 3):
        for recipe in ("mxfp8", "current"):
            for saved, found, others in run_ranks(ranks, loaded_by_dcp, recipe, str(tmp_path / f"{recipe}-{ranks}")):
                assert torch.equal(found, saved) and others


def test_masters_are_set_from_local_tensors() -> None:
    """1, 2 and 3 ranks, of which all but one hold nothing of the second weight."""
    found = [one for ranks in (1, 2, 3) for ways in run_ranks(ranks, seeded_in_every_way) for one in ways]
    assert all(one == found[0] for one in found) and found[0][0] != found[0][1]
