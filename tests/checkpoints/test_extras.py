"""The caller's own entries: they come back as they were saved, or are refused before anything is written."""

from __future__ import annotations

import argparse
import collections
import dataclasses
import datetime
import enum
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

from quantshard.checkpoints import Manager, load, save, saving
from quantshard.checkpoints.inspection import verify
from quantshard.errors import CheckpointError, ConfigurationError, RankMismatchError
from tests.checkpoints.small import built

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


class Colour(enum.Enum):
    RED = 1


@dataclasses.dataclass
class Config:
    lr: float = 1e-3


def schedule(kind: Callable[..., Any], *args: Any) -> dict[str, Any]:
    optimizer = torch.optim.AdamW([torch.zeros(3, requires_grad=True)])
    state: dict[str, Any] = kind(optimizer, *args).state_dict()
    return state


def described(value: Any) -> Any:
    """A value with the types of its containers and the bits of its tensors, to be compared."""
    if isinstance(value, Tensor):
        return value.dtype, value.shape, value.resolve_conj().reshape(-1).contiguous().view(torch.uint8).tolist()
    if isinstance(value, dict):
        return type(value), [(described(key), described(part)) for key, part in value.items()]
    if isinstance(value, list | tuple):
        return type(value), [described(part) for part in value]
    if isinstance(value, set):
        return set, sorted(map(repr, value))
    return type(value), repr(value)


KEPT: dict[str, Any] = {
    "nested": {"a": {"b": [1, [2, 3], {"c": torch.ones(2)}, (torch.zeros(1), None)]}},
    "empty": {"metrics": {}, "history": [], "none": (), "set": set()},
    "keys that are no strings": {1: "one", False: "no", None: 0, b"b": {2: 3}},
    "keys with dots": {"a.b": 1, "a": {"b": 2}},
    "a schedule": schedule(torch.optim.lr_scheduler.CosineAnnealingLR, 10),
    "another": schedule(torch.optim.lr_scheduler.OneCycleLR, 1.0, 10),
    "a module's": nn.Linear(2, 2).state_dict(),
    "plain": [True, 3, 2**80, 0.5, float("nan"), "x", b"\xff", torch.Size([2]), torch.bfloat16, {1, 2}],
    "views": [torch.arange(6.0).view(2, 3).t(), torch.arange(4)[1:2], torch.ones((), dtype=torch.float8_e4m3fn)],
    "a tensor": torch.arange(4.0)[::2],
    "a conjugate": torch.tensor([1 + 2j]).conj(),
}


@pytest.mark.parametrize("name", KEPT)
def test_entries_come_back_as_they_were_saved(name: str, tmp_path: Path) -> None:
    """Under a key with a dot, too, and beside one of which it would be a part."""
    extra = {"a": KEPT[name], "a.b": 1}
    save(tmp_path / "c", *built("mxfp8"), extra)
    assert described(load(tmp_path / "c", *built("mxfp8"))) == described(extra)
    assert verify(tmp_path / "c").ok
    stock: dict[str, Any] = {"extra": {"a": torch.empty_like(KEPT[name]) if isinstance(KEPT[name], Tensor) else None}}
    dcp.load(stock, checkpoint_id=tmp_path / "c")
    assert described(stock["extra"]["a"]) == described(KEPT[name])


def test_entries_are_those_at_the_call(tmp_path: Path) -> None:
    """In the background: also lists and tensors within them that change before they are written."""
    model, optimizer = built("mxfp8")
    history, mean = [1, 2], torch.ones(2)
    with Manager(tmp_path, async_="thread") as manager:
        assert manager._background is not None
        stage = manager._background.start

        def changed(*args: Any) -> Any:
            history.append(3)
            mean.fill_(9)
            return stage(*args)

        with mock.patch.object(manager._background, "start", changed):
            manager.save(1, model, optimizer, {"history": {"losses": history, "mean": mean}})
        found = manager.restore(model, optimizer)
    assert found is not None
    assert described(found.extra) == described({"history": {"losses": [1, 2], "mean": torch.ones(2)}})


ENDLESS: list[Any] = []
ENDLESS.append(ENDLESS)

REFUSED: dict[str, tuple[Any, str]] = {
    "a namespace": (argparse.Namespace(lr=1), r"extra\['x'\], a Namespace, cannot .* names argparse\.Namespace"),
    "a path": (Path("x"), r"extra\['x'\], a PosixPath, "),
    "NumPy's number": (np.float64(1.5), r"extra\['x'\], a float64, "),
    "NumPy's array": ({"a": [1, np.arange(3)]}, r"extra\['x'\], a dict, .*numpy"),
    "a dataclass": (Config(), r"extra\['x'\], a Config, "),
    "an enum": ([Colour.RED], r"extra\['x'\], a list, .*Colour"),
    "a date": (datetime.date(2026, 1, 2), r"extra\['x'\], a date, "),
    "a defaultdict": (collections.defaultdict(int), r"extra\['x'\], a defaultdict, "),
    "a function": ({"f": lambda: 0}, r"extra\['x'\], a dict, .*pickle"),
    "a sequence": (collections.UserList([1]), r"extra\['x'\], a UserList, "),
    "a sparse tensor": (torch.eye(3).to_sparse(), r"extra\['x'\], a Tensor, .*not a plain tensor"),
    "a quantized weight": ([built("mxfp8")[0][0].weight], r"extra\['x'\], a list, cannot be saved as plain data"),
    "a quantized weight by itself": (built("mxfp8")[0][0].weight, r"extra\['x'\], a QuantizedTensor, "),
    "too deep": (eval("[" * 40 + "]" * 40), "nested too deeply"),
    "itself": (ENDLESS, "nested too deeply, contain each other, or are too many"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_not_be_read_again_is_refused_before_anything_is_written(name: str, tmp_path: Path) -> None:
    """With its key and its kind; in the background by the call itself."""
    value, said = REFUSED[name]
    model, optimizer = built("mxfp8")
    with pytest.raises(ConfigurationError, match=said):
        save(tmp_path / "c", model, optimizer, {"step": 1, "x": value})
    assert not list(tmp_path.iterdir())
    for mode in (None, "thread"):
        with Manager(tmp_path / str(mode), async_=mode) as manager:
            with pytest.raises(ConfigurationError, match=said):
                manager.save(1, model, optimizer, {"step": 1, "x": value})
            assert manager.wait() is None and manager.steps() == []


def test_keys_are_strings(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="the key 1 is a int; use strings as keys"):
        save(tmp_path / "c", *built("mxfp8"), {1: 2})  # type: ignore[dict-item]


def test_an_entry_that_needs_code_is_refused_by_name(tmp_path: Path) -> None:
    """Of another library: nothing is loaded, and `verify` says why."""
    path, (model, optimizer) = tmp_path / "c", built("mxfp8")
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    dcp.save({**state, "extra": {"step": 10, "args": argparse.Namespace(lr=1)}}, checkpoint_id=path)
    said = r"extra\.args cannot be read: it names argparse\.Namespace, which needs code"
    with pytest.raises(CheckpointError, match=said):
        load(path, *built("mxfp8", seed=8))
    assert [line for line in verify(path).problems if "extra.args cannot be read" in line]


# Equal on all ranks ---------------------------------------------------------------------------------------------------


def on_two_ranks(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    entries = [saving.readable(extra) for extra in (first, second)]
    saving.check_equal([{key: saving.digest(value) for key, value in extra.items()} for extra in entries])
    return entries[1]


def test_equal_values_are_equal_however_they_were_made() -> None:
    """Not by the bytes of their pickles, in which it shows what shares an object, and the order of a set."""
    word = "".join(["wo", "rd"])
    first = {"x": [word, word, {"b": 2, "a": 1}, {0, 8}], "t": torch.ones(2, 2)}
    second = {"t": torch.ones(2, 2).t(), "x": ["word", "".join(["wo", "rd"]), {"a": 1, "b": 2}, {8, 0}]}
    assert described(on_two_ranks(first, second)["x"]) == described(second["x"])


DIFFERING: list[tuple[Any, Any]] = [
    (1, 2), (1, 1.0), (1, True), ([1, 2], [2, 1]), ([1], (1,)), ({"a": 1}, {"a": 2}), ({"a": 1}, {"b": 1}), ({}, []),
    (torch.zeros(2), torch.tensor([0.0, -0.0])), (torch.zeros(2), torch.zeros(1, 2)),
    ([torch.zeros(2)], [torch.zeros(2, dtype=torch.int32)]), ({1}, {2}), ("1", b"1"),
]  # fmt: skip


@pytest.mark.parametrize("pair", DIFFERING, ids=repr)
def test_other_values_are_told_apart(pair: tuple[Any, Any]) -> None:
    with pytest.raises(RankMismatchError, match=r"extra\['x'\] differs on rank 1"):
        on_two_ranks({"a": 1, "x": pair[0]}, {"a": 1, "x": pair[1]})


def test_an_entry_of_one_rank_alone() -> None:
    for first, second in (({}, {"x": 1}), ({"x": 1}, {})):
        with pytest.raises(RankMismatchError, match=r"extra\['x'\]"):
            on_two_ranks(first, second)
