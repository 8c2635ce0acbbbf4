"""What tells sharded parameters apart: their addresses, by which libraries pair them, attributes, and the versions by
which optimizers with masters notice new weights.

Each test names its rank count.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import quantshard as qs
from quantshard import checkpoints, private_torch
from quantshard.errors import ConfigurationError, UnsupportedOperationError
from quantshard.optimizers import FusedAdam, MasterWeights
from quantshard.tensor import components
from tests.distributed.models import Case, build, set_gradients, sha
from tests.distributed.pool import run_ranks

pytestmark = pytest.mark.distributed
EXHAUSTIVE = pytest.mark.exhaustive

SHAPES = ((96, 150), (150, 67), (67, 1))
"""(in, out) of each layer: blocks are cut, and some ranks hold nothing of the last."""


def local(param: Tensor) -> Any:
    return private_torch.local_tensor(param)


def codes(param: Tensor) -> Tensor:
    return next(iter(components.storage_of(param).components.values()))


def held(model: nn.Module) -> dict[str, str]:
    """Hashes of the components of quantized parameters."""
    return {
        f"{name}.{part}": sha(value)
        for name, param in model.named_parameters()
        if components.quantized_local(param) is not None
        for part, value in components.storage_of(param).components.items()
    }


# Addresses ------------------------------------------------------------------------------------------------------------


def addresses(case: Case) -> None:
    model = build(case)
    shards = {name: local(param).data_ptr() for name, param in model.named_parameters() if "weight" in name}
    assert len(set(shards.values())) == len(shards) and 0 not in shards.values()
    sharded = {name: param for name, param in model.named_parameters() if isinstance(param, DTensor)}
    assert all(sharded[name].to_local().data_ptr() == shards[name] for name in shards.keys() & sharded.keys())
    if case.mesh is not None:
        model(torch.zeros(2, SHAPES[0][0], dtype=torch.bfloat16))  # FSDP2 pads and replaces what is uneven
        assert {name: local(p).data_ptr() for name, p in model.named_parameters() if "weight" in name} == shards or (
            case.mesh != (1,)
        )
        layer = model[0]
        layer.unshard()  # type: ignore[operator]
        assert layer.weight.data_ptr() == codes(layer.weight).data_ptr() != 0
        with (
            torch.no_grad(),
            pytest.raises(UnsupportedOperationError, match=r"copy_ .*FSDP gathered; call reshard\(\)"),
        ):
            layer.weight.copy_(layer.weight.clone())
        with pytest.raises(UnsupportedOperationError, match=r"as \.data of"):
            layer.weight.data = layer.weight.data.clone()
        layer.reshard()  # type: ignore[operator]


def test_addresses_of_shards_and_gathered_weights() -> None:
    """1 and 3 ranks: none of two shards is the same, also of those without rows; a gathered copy is not written to."""
    run_ranks(1, addresses, Case("mxfp8", shapes=SHAPES))
    run_ranks(3, addresses, Case("mxfp8", (3,), shapes=SHAPES))


def with_accelerate(mixed_precision: str) -> dict[str, tuple[int, torch.dtype]]:
    """How many codes of each weight a step changes, of a model and an optimizer that Accelerate has prepared."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState
    from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin

    variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}
    with mock.patch.dict(os.environ, variables), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            plugin = FullyShardedDataParallelPlugin(
                fsdp_version=2, auto_wrap_policy="size_based_wrap", min_num_params=100, cpu_ram_efficient_loading=False
            )
            accelerator = Accelerator(cpu=True, fsdp_plugin=plugin, mixed_precision=mixed_precision)
            # which it takes on a GPU only
            AcceleratorState._shared_state.update(distributed_type=DistributedType.FSDP, fsdp_plugin=plugin)
            if mixed_precision != "no":
                plugin.set_mixed_precision(mixed_precision)
            torch.manual_seed(0)
            with qs.quantized_model_init(recipe="mxfp8"):
                layers = [qs.Linear(64, 67 if i == 1 else 64, params_dtype=torch.bfloat16) for i in range(2)]
                layers += [
                    qs.Linear(67, 64, params_dtype=torch.bfloat16),
                    qs.Linear(64, 1, params_dtype=torch.bfloat16),
                ]
            model: Any = nn.Sequential(*layers)
            optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.1, eps=1e-3)
            model, optimizer = accelerator.prepare(model, optimizer)
            before = {name: codes(p).clone() for name, p in model.named_parameters() if "weight" in name}
            with qs.autocast(recipe="mxfp8"):
                loss = model(torch.randn(8, 64, dtype=torch.bfloat16)).float().square().mean()
            accelerator.backward(loss)
            optimizer.step()
            return {
                name: int((codes(p) != before[name]).sum()) for name, p in model.named_parameters() if name in before
            }
        finally:
            AcceleratorState._reset_state(True)
            GradientState._reset_state()


@pytest.mark.parametrize("mixed_precision", [pytest.param("no", marks=EXHAUSTIVE), "bf16"])
def test_every_weight_trains_that_accelerate_has_sharded(mixed_precision: str) -> None:
    """2 ranks. It pairs the parameters of an optimizer with the sharded ones by address; and raises their precision by
    `.data`, if it is to be mixed. Of the last weight, the second rank has nothing."""
    pytest.importorskip("accelerate")
    first, second = run_ranks(2, with_accelerate, mixed_precision)
    assert min(first.values()) > 0 and len(first) == 4
    assert all(second[name] > 0 for name in list(second)[:-1]) and not second["3.weight"]


# Attributes -----------------------------------------------------------------------------------------------------------


class Plain(nn.Module):
    """A module of PyTorch's own beside quantshard's."""

    def __init__(self) -> None:
        super().__init__()
        self.quantized = qs.Linear(96, 150, params_dtype=torch.bfloat16, device="cpu")
        self.plain = nn.Linear(150, 67, dtype=torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        return self.plain(self.quantized(x))


def noted(model: nn.Module) -> dict[str, bool]:
    return {name: getattr(param, "noted", None) == name for name, param in model.named_parameters()}


def states_to(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Moves the states where the parameters are, which nobody does for an optimizer."""
    for param in model.parameters():
        for name, state in optimizer.state[param].items():
            if state.ndim:
                optimizer.state[param][name] = state.to(param.device)


def moved() -> list[str]:
    """What differs from what it must be of a sharded model that is moved after a step of a stock optimizer."""
    wrong = []
    for name, move in (
        ("cpu", nn.Module.cpu),
        ("device", lambda model: model.to("cpu")),
        ("empty", lambda model: model.to("meta").to_empty(device="cpu")),
    ):
        torch.manual_seed(0)
        with qs.quantized_model_init(recipe="mxfp8"):
            model = Plain()
        for module in (model.quantized, model.plain, model):
            fully_shard(module, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
        for key, param in model.named_parameters():
            param.noted = key  # type: ignore[attr-defined]
        before = dict(model.named_parameters())
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, eps=1e-3)
        steps = []
        for step in range(2):
            old = codes(model.quantized.weight).clone()
            set_gradients(model, step)
            optimizer.step()
            steps.append(bool((codes(model.quantized.weight) != old).any()) or not old.numel())
            if not step:
                move(model)
                states_to(model, optimizer)
                if name == "empty":
                    model.quantized.reset_parameters()
                    model.plain.reset_parameters()
        if steps != [True, True] or any(param is not before[key] for key, param in model.named_parameters()):
            wrong.append(f"{name}: trains {steps}, or other parameters")
        if not noted(model)["quantized.weight"] or not noted(model)["quantized.bias"]:
            wrong.append(f"{name}: {noted(model)}")
    return wrong


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=EXHAUSTIVE), 3])
def test_a_sharded_model_may_be_moved(ranks: int) -> None:
    """1 and 3 ranks, after a step of AdamW: parameters remain, with their attributes, and train on."""
    assert run_ranks(ranks, moved) == [[]] * ranks


# Versions -------------------------------------------------------------------------------------------------------------

Way = Callable[[nn.Module, nn.Module, Path], Any]
"""To give a model the weights of another one, which is saved at a path too; the optimizer knows nothing of it."""


def dcp_load(model: nn.Module, path: Path) -> dict[str, Any]:
    state = {"model": get_model_state_dict(model)}
    dcp.load(state, checkpoint_id=path / "dcp")
    return state


def copied(model: nn.Module, other: nn.Module) -> None:
    with torch.no_grad():
        for param, source in zip(model.parameters(), other.parameters(), strict=True):
            param.copy_(source)


def scaled(model: nn.Module) -> None:
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(0.5)


WAYS: dict[str, Way] = {
    "load_state_dict": lambda model, other, path: model.load_state_dict(other.state_dict()),
    "set_model_state_dict": lambda model, other, path: set_model_state_dict(model, get_model_state_dict(other)),
    "dcp.load": lambda model, other, path: dcp_load(model, path),
    "dcp.load, load_state_dict": lambda model, other, path: model.load_state_dict(dcp_load(model, path)["model"]),
    "checkpoints.load": lambda model, other, path: checkpoints.load(path / "ours", model, optimizer=None),
    "copy_": lambda model, other, path: copied(model, other),
    "arithmetic": lambda model, other, path: scaled(model),
    "reset_parameters": lambda model, other, path: [layer.reset_parameters() for layer in model],  # type: ignore
    "to_empty": lambda model, other, path: model.to_empty(device="cpu").load_state_dict(other.state_dict()),
}


MAKERS: tuple[Callable[..., Any], ...] = (
    FusedAdam,
    lambda params, **options: MasterWeights(torch.optim.AdamW, params, **options),
)


def undone(case: Case, folder: str, turns: tuple[int, ...]) -> list[str]:
    """The ways after which an optimizer with masters steps from the weights of before; one of two with each way where
    there is one turn."""
    path, wrong = Path(folder), []
    other = build(replace(case, seed=8))
    dcp.save({"model": get_model_state_dict(other)}, checkpoint_id=path / "dcp")
    checkpoints.save(path / "ours", other, None)
    for i, (name, way) in enumerate(WAYS.items()):
        for make in (make for j, make in enumerate(MAKERS) if (i + j) % 2 in turns):
            model = build(case)
            optimizer = make(model.named_parameters(), lr=1e-2)
            for step in range(2):
                set_gradients(model, step)
                optimizer.step()
            before = held(model)
            way(model, other, path)
            loaded = held(model)
            assert any(local(param).numel() and loaded != before for param in model.parameters()), name
            set_gradients(model, 2)
            label = f"{name} with {type(optimizer).__name__}"
            try:
                optimizer.step()
                wrong.append(f"{label}: stepped")
            except ConfigurationError as error:
                assert "was given new values" in str(error), error
            if held(model) != loaded:
                wrong.append(f"{label}: undone")
            optimizer.reseed_masters()
            optimizer.param_groups[0].update(lr=0.0, weight_decay=0.0)
            optimizer.step()
            if held(model) != loaded:
                wrong.append(f"{label}: undone after reseed_masters()")
    return wrong


@pytest.mark.parametrize(
    ("mesh", "turns"),
    [
        (None, (1,)),
        ((2,), (0,)),
        pytest.param(None, (0,), marks=EXHAUSTIVE),
        pytest.param((3,), (1,), marks=EXHAUSTIVE),
        pytest.param((1,), (0, 1), marks=EXHAUSTIVE),
    ],
    ids=["whole", "2 ranks", "whole, in turn", "3 ranks, in turn", "1 rank"],
)
def test_masters_notice_new_weights(mesh: tuple[int, ...] | None, turns: tuple[int, ...], tmp_path: Path) -> None:
    """1, 2 and 3 ranks: whichever way a model alone is given weights, the next step does not undo it."""
    case = Case("mxfp8", mesh, init="cpu", shapes=SHAPES)
    assert run_ranks(case.ranks, undone, case, str(tmp_path), turns) == [[]] * case.ranks


def broadcast() -> None:
    rank = torch.distributed.get_rank()
    model = build(Case("mxfp8", shapes=SHAPES, seed=rank))
    optimizer = FusedAdam(model.named_parameters(), lr=1e-2)
    versions = [components.storage_of(layer.weight).version for layer in model]
    qs.broadcast_(model)
    assert not {components.storage_of(layer.weight).version for layer in model} & {*versions}
    set_gradients(model, 0)
    with pytest.raises(ConfigurationError, match="was given new values"):
        optimizer.step()


def test_masters_notice_a_broadcast() -> None:
    """3 ranks, with whole weights."""
    run_ranks(3, broadcast)
