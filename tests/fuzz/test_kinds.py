"""A few mutants of every kind of file (`make fuzz` tries thousands), and that what they would show is seen."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import strategies as st

from quantshard.errors import CheckpointError
from tests.fuzz import judge as judging, run
from tests.fuzz.judge import READ, REFUSED, judge
from tests.fuzz.kinds import Kind, built
from tests.fuzz.mutations import at, deep, places, put, replaced, without

MUTANTS = 6
"""Of every sixteenth kind."""

SEED = 20


@pytest.fixture(scope="module")
def kinds() -> Iterator[list[Kind]]:
    with tempfile.TemporaryDirectory() as folder:
        yield built(Path(folder, "whole"))


@pytest.mark.parametrize(("mutants", "every"), [(MUTANTS, 16), pytest.param(MUTANTS, 1, marks=pytest.mark.exhaustive)])
def test_mutants_of_every_kind(mutants: int, every: int, kinds: list[Kind], tmp_path: Path) -> None:
    refused, chosen = 0, kinds[::every]
    for kind in chosen:
        score = run.Score()
        run.try_kind(kind, mutants, SEED, tmp_path, score)
        assert score.mutants == mutants
        assert not score.faults, (kind.name, score.faults)
        refused += score.counts[REFUSED]
    assert refused > len(chosen) * mutants * 0.4


def raising(error: BaseException) -> Callable[[], Any]:
    def read() -> None:
        raise error

    return read


def hoard() -> None:
    torch.empty(1 << 40, dtype=torch.uint8).zero_()


def hoard_and_hide() -> None:
    try:
        hoard()
    except RuntimeError as error:
        raise CheckpointError("it is damaged") from error


SEEN: dict[str, tuple[Callable[[], Any], str]] = {
    "an error of ours": (raising(CheckpointError("x: it is damaged (KeyError)")), REFUSED),
    "another error": (raising(KeyError("x")), "traceback"),
    "another error, told to all ranks": (raising(CheckpointError("KeyError: 'x'")), "traceback"),
    "a message without an end": (raising(CheckpointError("x" * 4001)), REFUSED),
    "all memory": (hoard, "traceback"),
    "all memory, hidden": (hoard_and_hide, "memory"),
    "out of memory": (raising(MemoryError()), "memory"),
    "what was saved": (lambda: 1, READ),
    "something else": (lambda: 2, "wrong"),
}


@pytest.mark.parametrize("what", SEEN)
def test_what_is_seen(what: str) -> None:
    read, kind = SEEN[what]
    assert judge(read, 1).kind == kind


def test_what_takes_too_long_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def endless() -> None:
        while True:
            pass

    monkeypatch.setattr(judging, "ALARM_SECONDS", 1)
    assert judge(endless).kind == "slow"


def test_a_fault_is_kept_and_counted(kinds: list[Kind], tmp_path: Path) -> None:
    whole = kinds[0].whole
    readings = lambda path, mutant: [("read", raising(KeyError("x")) if mutant else int, None)]  # noqa: E731
    score = run.Score()
    run.try_kind(Kind("x", whole, st.just({"new": b"here"}), readings), 1, 0, tmp_path, score)
    assert score.counts["traceback"] == 1
    assert [(name, (kept / "new").read_bytes()) for name, _, kept in score.faults] == [("read", b"here")]
    assert "traceback" in run.table({"x": score})[0]


def test_trees_are_changed() -> None:
    tree = {"r": {"s": (1, ["x"])}, "t": (b"x", "\ud800", -(2**70))}
    assert ("r", "s", 1, 0) in places(tree) and at(tree, ("r", "s", 1, 0)) == "x"
    changed = put(tree, ("r", "s", 1, 0), lambda parent, by: replaced(parent, by, 7))
    assert changed["r"]["s"] == (1, [7]) and tree["r"] == {"s": (1, ["x"])}
    assert put(tree, ("t", 1), without)["t"] == (b"x", -(2**70))
    assert repr(deep(3)) == "[[[1]]]"
