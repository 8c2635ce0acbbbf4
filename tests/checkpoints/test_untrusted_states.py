"""What each rank has for itself in a checkpoint: nothing of it runs, what is no state of it is refused in one line."""

from __future__ import annotations

import os
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex

from quantshard.checkpoints import Manager, load, rank_states, save
from quantshard.checkpoints.disk.manifest import MANIFEST, METADATA_FILE
from quantshard.checkpoints.rank_states import RandomGenerators
from quantshard.checkpoints.safe_read import SafeReader
from quantshard.errors import CheckpointError
from quantshard.optimizers import MasterWeights
from tests.checkpoints.small import built, written
from tests.checkpoints.test_untrusted import Call, change_object, saved


def bytes_of(value: object) -> torch.Tensor:
    return torch.frombuffer(bytearray(saved(value)), dtype=torch.uint8)


def generators(position: int) -> dict[str, Any]:
    """NumPy itself takes any position, and reads there."""
    _, version, keys, *rest = ("", *RandomGenerators().state_dict()["numpy"])
    return {**RandomGenerators().state_dict(), "numpy": (version, keys, position, *rest[1:])}


FORGED_STATES: dict[str, tuple[Callable[[Path], object], str]] = {
    "code": (
        lambda mark: bytes_of(Call(os.mkdir, str(mark))),
        r"ranks\.0\.random cannot be read: it names posix\.mkdir",
    ),
    "no archive": (
        lambda mark: torch.zeros(400, dtype=torch.uint8),
        r"random cannot be read: it is not a complete archive",
    ),
    "nothing": (lambda mark: torch.zeros(0, dtype=torch.uint8), r"random cannot be read: it is not a complete archive"),
    "other numbers": (lambda mark: torch.zeros(4), r"is damaged: ranks\.0\.random is not a tensor of bytes"),
    "a matrix": (lambda mark: bytes_of(1).unsqueeze(0), r"ranks\.0\.random cannot be loaded into 'random'"),
    "no tensor": (lambda mark: "text", r"is damaged: ranks\.0\.random is not a tensor of bytes"),
    "an object that runs code": (lambda mark: Call(os.mkdir, str(mark)), r"ranks\.0\.random is not a tensor of bytes"),
    "another state": (lambda mark: bytes_of({"numpy": 1}), r"ranks\.0\.random cannot be loaded into 'random'"),
    "no state": (lambda mark: bytes_of([1]), r"ranks\.0\.random cannot be loaded into 'random'"),
    "a far position": (lambda mark: bytes_of(generators(1 << 20)), "position 1048576 is not within NumPy's 624 keys"),
}


@pytest.mark.parametrize("forgery", FORGED_STATES)
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_forged_states_of_a_rank(tmp_path: Path, forgery: str) -> None:
    make, said = FORGED_STATES[forgery]
    mark = tmp_path / "ran"
    model, optimizer = built("mxfp8")
    with Manager(tmp_path / "run") as manager:
        with mock.patch.object(rank_states, "_packed", lambda name, state: make(mark)):
            manager.save(1, model, optimizer)
        before = repr(RandomGenerators().state_dict())
        with pytest.raises(CheckpointError, match=said) as raised:
            manager.restore(model, optimizer)
    assert "\n" not in str(raised.value) and not mark.exists()
    assert repr(RandomGenerators().state_dict()) == before


class Order:
    """Of data, drawn by NumPy's default generator, whose state is two integers of 128 bits."""

    def __init__(self, seed: int) -> None:
        self.generator = np.random.default_rng(seed)

    def state_dict(self) -> dict[str, Any]:
        return dict(self.generator.bit_generator.state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.generator.bit_generator.state = state


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_long_integers_come_back(tmp_path: Path) -> None:
    model, optimizer = built("mxfp8")
    for seed in range(4):
        order = Order(seed)
        with Manager(tmp_path / str(seed), state={"order": order}) as manager:
            manager.save(1, model, optimizer)
            drawn = order.generator.random(3).tolist()
            order.load_state_dict(Order(9).state_dict())
            manager.restore(model, optimizer)
        assert order.generator.random(3).tolist() == drawn


SETTINGS: list[tuple[str, Any]] = [
    ("lr", "fast"), ("lr", [1e-3]), ("lr", 1 << 80), ("betas", True), ("betas", (0.9,)), ("betas", (0.9, "x")),
    ("betas", 0.9), ("step", {}), ("step", torch.zeros(2)), ("adam_w_mode", "yes"), ("initial_lr", "fast"),
]  # fmt: skip
STOCK_SETTINGS: list[tuple[str, str, Any]] = [
    ("AdamW", "lr", None), ("AdamW", "betas", (None, None)), ("AdamW", "initial_lr", None),
    ("masters, AdamW", "betas", None),
    *(("AdamW", name, value) for name, value in SETTINGS if name in ("lr", "betas", "initial_lr")),
    ("AdamW", "amsgrad", "yes"), ("AdamW", "betas", torch.zeros(2)), ("SGD", "lr", "fast"), ("SGD", "nesterov", []),
    ("SGD", "momentum", torch.zeros(2)), ("AdamW with a rate in a tensor", "lr", "fast"),
    ("AdamW with a rate in a tensor", "lr", torch.zeros(2)), ("masters, AdamW", "eps", "small"),
    ("AdamW with a rate in a tensor", "lr", None),
]  # fmt: skip
STOCK: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": lambda params: torch.optim.AdamW(params, lr=1e-2),
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "AdamW with a rate in a tensor": lambda params: torch.optim.AdamW(params, lr=torch.tensor(0.5)),
    "masters, AdamW": lambda params: MasterWeights(torch.optim.AdamW, params, lr=1e-2),
}


def whole(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, bytes]:
    """All that a load writes, by its bytes."""
    states = optimizer.state_dict()["state"]
    held = {f"{number}.{name}": value for number, state in states.items() for name, value in state.items()}
    groups = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    return {name: saved(value) for name, value in (model.state_dict() | held | {"groups": groups}).items()}


def stepped(make: Callable[[Any], torch.optim.Optimizer], steps: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """With what a schedule and a user add to groups."""
    torch.manual_seed(steps)
    model = nn.Linear(4, 3)
    optimizer = make(model.parameters())
    mine = {"mine": "a text", "also mine": [1] * steps, "a tuple": (1,), "a tensor": torch.full((2,), float(steps))}
    optimizer.param_groups[0] |= {"initial_lr": 0.5, **mine}
    for _ in range(steps):
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
    return model, optimizer


@pytest.mark.parametrize(("name", "value"), SETTINGS, ids=lambda value: repr(value)[:20])
def test_settings_of_another_type(tmp_path: Path, name: str, value: Any) -> None:
    """They would be found at a step, or never; and are before anything is written."""
    path = tmp_path / "c"
    model, optimizer = built("mxfp8")
    optimizer.param_groups[0]["initial_lr"] = 0.5
    save(path, model, optimizer)
    (path / MANIFEST).unlink()
    model, optimizer = built("mxfp8", seed=4)
    optimizer.param_groups[0]["initial_lr"] = 0.25
    before = whole(model, optimizer)
    change_object(path, f"optimizer.param_groups.0.{name}", value)
    with pytest.raises(CheckpointError, match=rf"has {name} = .* and this optimizer has"):
        load(path, model, optimizer)
    assert whole(model, optimizer) == before


@pytest.mark.parametrize(("kind", "name", "value"), STOCK_SETTINGS, ids=lambda value: repr(value)[:20])
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_settings_of_another_type_for_stock_optimizers(tmp_path: Path, kind: str, name: str, value: Any) -> None:
    path = tmp_path / "c"
    save(path, *stepped(lambda params: STOCK[kind.partition(" with")[0]](params), 2))
    (path / MANIFEST).unlink()
    change_object(path, f"optimizer.param_groups.0.{name}", value)
    model, optimizer = stepped(STOCK[kind], 3)
    before = whole(model, optimizer)
    with pytest.raises(CheckpointError, match=rf"has {name} = .* and this optimizer has"):
        load(path, model, optimizer)
    assert whole(model, optimizer) == before


TAKEN: list[tuple[str, str, Any, Any]] = [
    ("AdamW", "amsgrad", False, False), ("AdamW", "foreach", True, True), ("AdamW", "fused", None, None),
    ("AdamW", "lr", 1, 1), ("AdamW", "lr", torch.tensor(0.25), 0.25), ("AdamW", "betas", [0.5, 0.75], [0.5, 0.75]),
    ("AdamW", "mine", 3, 3), ("AdamW", "also mine", [7, 7, 7], [7, 7, 7]),
    ("AdamW with a rate in a tensor", "lr", 0.25, 0.25), ("masters, AdamW", "skipped_steps", torch.tensor(5), 5),
    ("masters, AdamW", "also mine", [7, 7, 7], [7, 7, 7]), ("masters, AdamW", "mine", 3, 3),
    ("masters, AdamW", "a tuple", "text", "text"),
    ("masters, AdamW", "betas", [0.5, 0.75], (0.5, 0.75)),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "name", "value", "found"), TAKEN, ids=lambda value: repr(value)[:20])
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_settings_that_can_stand_there(tmp_path: Path, kind: str, name: str, value: Any, found: Any) -> None:
    """Numbers in an object that is a tensor come as numbers; what a user added may have become anything."""
    path = tmp_path / "c"
    save(path, *stepped(STOCK[kind.partition(" with")[0]], 2))
    (path / MANIFEST).unlink()
    change_object(path, f"optimizer.param_groups.0.{name}", value)
    model, optimizer = stepped(STOCK[kind], 3)
    load(path, model, optimizer)
    taken = optimizer.param_groups[0][name]
    assert taken == found and type(taken) is type(found)
    assert torch.equal(optimizer.param_groups[0]["a tensor"], torch.full((2,), 2.0))


@pytest.mark.parametrize("value", [None, "fast", torch.zeros(2)])
def test_settings_that_stay_on_the_device(tmp_path: Path, value: Any) -> None:
    path = written(tmp_path / "c", "mxfp8")
    change_object(path, "optimizer.param_groups.0.lr", value)
    model, optimizer = built("mxfp8", seed=4, capturable=True)
    before = whole(model, optimizer)
    with pytest.raises(CheckpointError, match=r"has lr = .* and this optimizer has tensor"):
        load(path, model, optimizer)
    assert whole(model, optimizer) == before
    change_object(path, "optimizer.param_groups.0.lr", torch.tensor([0.25]))
    load(path, model, optimizer)
    assert isinstance(optimizer.param_groups[0]["lr"], torch.Tensor) and optimizer.param_groups[0]["lr"] == 0.25


@pytest.mark.parametrize("step", [torch.tensor(5), torch.tensor([5])])
def test_a_count_in_a_tensor_is_loaded_as_a_number(tmp_path: Path, step: torch.Tensor) -> None:
    path = written(tmp_path / "c", "mxfp8")
    change_object(path, "optimizer.param_groups.0.step", step)
    model, optimizer = built("mxfp8", seed=4)
    load(path, model, optimizer)
    count = optimizer.param_groups[0]["step"]
    assert count == 5 and type(count) is int
    optimizer.load_state_dict({**(state := optimizer.state_dict()), "param_groups": [
        {**state["param_groups"][0], "step": step + 1}
    ]})  # fmt: skip
    count = optimizer.param_groups[0]["step"]
    assert count == 6 and type(count) is int


def make_object(path: Path, key: str, value: object) -> None:
    """Put an object in the place of a tensor."""
    change_object(path, key, value)
    with open(path / METADATA_FILE, "rb") as file:
        metadata = pickle.load(file)
    (index,) = (index for index in metadata.storage_data if index.fqn == key)
    metadata.storage_data[MetadataIndex(key)] = metadata.storage_data.pop(index)
    metadata.state_dict_metadata[key] = BytesStorageMetadata()
    (path / METADATA_FILE).write_bytes(pickle.dumps(metadata))


@pytest.mark.parametrize("steps", [0, 3])
@pytest.mark.parametrize("name", ["step", "exp_avg"])
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_states_of_stock_optimizers_in_objects(tmp_path: Path, steps: int, name: str) -> None:
    path, key = tmp_path / "c", f"optimizer.state.0.{name}"
    save(path, *stepped(STOCK["AdamW"], 2))
    (path / MANIFEST).unlink()
    make_object(path, key, SafeReader(path).value(key))
    model, optimizer = stepped(STOCK["AdamW"], steps)
    before = whole(model, optimizer)
    with pytest.raises(CheckpointError, match=rf"{re.escape(key)} is not a tensor there and torch.float32 .* here"):
        load(path, model, optimizer)
    assert whole(model, optimizer) == before


@pytest.mark.parametrize("key", ["model.0.weight", "model.0.bias", "optimizer.state.0.exp_avg"])
def test_a_tensor_in_an_object_is_not_passed_over(tmp_path: Path, key: str) -> None:
    path = written(tmp_path / "c", "mxfp8")
    model, optimizer = built("mxfp8", seed=4)
    make_object(path, key, SafeReader(path).value(key))
    before = whole(model, optimizer)
    with pytest.raises(CheckpointError, match=rf"{re.escape(key)} is not a tensor there and torch\.\S+ \[.*\] here"):
        load(path, model, optimizer)
    assert whole(model, optimizer) == before
