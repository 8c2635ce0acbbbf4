"""What each rank has for itself in a checkpoint: nothing of it runs, what is no state of it is refused in one line."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from quantshard.checkpoints import Manager, load, rank_state
from quantshard.checkpoints.rank_state import Generators
from quantshard.errors import CheckpointError
from tests.checkpoints.small import built, written
from tests.checkpoints.test_untrusted import Call, change_object, saved


def bytes_of(value: object) -> torch.Tensor:
    return torch.frombuffer(bytearray(saved(value)), dtype=torch.uint8)


def generators(position: int) -> dict[str, Any]:
    """NumPy itself takes any position, and reads there."""
    _, version, keys, *rest = ("", *Generators().state_dict()["numpy"])
    return {**Generators().state_dict(), "numpy": (version, keys, position, *rest[1:])}


FORGED_STATES: dict[str, tuple[Callable[[Path], object], str]] = {
    "code": (
        lambda mark: bytes_of(Call(os.mkdir, str(mark))),
        r"ranks\.0\.random cannot be read: it names posix\.mkdir",
    ),
    "no archive": (lambda mark: torch.zeros(400, dtype=torch.uint8), r"random cannot be read: it is no whole archive"),
    "nothing": (lambda mark: torch.zeros(0, dtype=torch.uint8), r"random cannot be read: it is no whole archive"),
    "other numbers": (lambda mark: torch.zeros(4), r"ranks\.0\.random is torch\.float32 \[4\], not the bytes"),
    "a matrix": (lambda mark: bytes_of(1).unsqueeze(0), r"random is torch\.uint8 \[1, \d+\], not the bytes"),
    "no tensor": (lambda mark: "text", r"is damaged: ranks\.0\.random is no tensor there"),
    "an object that runs code": (lambda mark: Call(os.mkdir, str(mark)), r"ranks\.0\.random is no tensor there"),
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
        with mock.patch.object(rank_state, "_packed", lambda name, state: make(mark)):
            manager.save(1, model, optimizer)
        before = repr(Generators().state_dict())
        with pytest.raises(CheckpointError, match=said) as raised:
            manager.restore(model, optimizer)
    assert "\n" not in str(raised.value) and not mark.exists()
    assert repr(Generators().state_dict()) == before


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
    ("betas", 0.9), ("step", {}), ("adam_w_mode", "yes"),
]  # fmt: skip


def settings(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    return [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]


@pytest.mark.parametrize(("name", "value"), SETTINGS, ids=lambda value: repr(value)[:20])
def test_settings_of_another_type(tmp_path: Path, name: str, value: Any) -> None:
    """They would be found at a step, or never."""
    path = written(tmp_path / "c", "mxfp8")
    model, optimizer = built("mxfp8", seed=4)
    before = settings(optimizer)
    change_object(path, f"optimizer.param_groups.0.{name}", value)
    with pytest.raises(CheckpointError, match=rf"says {name} = .* where this optimizer has"):
        load(path, model, optimizer)
    assert settings(optimizer) == before
