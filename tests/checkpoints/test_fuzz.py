"""Checkpoints changed at random: whatever reads them says so in one line, or what it reads is what was written.

Seeds are fixed; each recipe gets its own mutants. Memory is bounded by the limit on the address space of the reading.
"""

from __future__ import annotations

import hashlib
import pickle
import random
import resource
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quantshard import checkpoints
from quantshard.checkpoints.inspect.compare import compare
from quantshard.checkpoints.inspect.inspection import inspect_checkpoint
from quantshard.checkpoints.inspect.verify import verify
from quantshard.checkpoints.untrusted import entries, metadata, pickles
from quantshard.checkpoints.untrusted.metadata import read_metadata
from quantshard.errors import CheckpointError
from tests.checkpoints.small import built, written
from tests.distributed.models import RECIPES

MUTANTS, MORE_MUTANTS = 30, 60
"""Of each recipe, a multiple of the kinds of mutations."""

SECONDS, HEADROOM = 10.0, 1 << 30

Mutation = Callable[[random.Random, Path, Path], None]


def some_file(chosen: random.Random, path: Path) -> Path:
    return chosen.choice(sorted(path.iterdir()))


def flip(chosen: random.Random, path: Path, other: Path) -> None:
    file = some_file(chosen, path)
    content = bytearray(file.read_bytes())
    for _ in range(chosen.choice((1, 1, 8, 64))):
        content[chosen.randrange(len(content))] ^= 1 << chosen.randrange(8)
    file.write_bytes(content)


def truncate(chosen: random.Random, path: Path, other: Path) -> None:
    file = some_file(chosen, path)
    file.write_bytes(file.read_bytes()[: chosen.randrange(file.stat().st_size)])


def remove(chosen: random.Random, path: Path, other: Path) -> None:
    some_file(chosen, path).unlink()


def swap(chosen: random.Random, path: Path, other: Path) -> None:
    """A file of another checkpoint."""
    file = some_file(chosen, path)
    file.write_bytes((other / file.name).read_bytes())


def garble(chosen: random.Random, path: Path, other: Path) -> None:
    """A stretch of other bytes, of another length."""
    file = some_file(chosen, path)
    content = file.read_bytes()
    start = chosen.randrange(len(content))
    put = chosen.randbytes(chosen.choice((0, 1, 7, 100, 3000)))
    file.write_bytes(content[:start] + put + content[start + chosen.choice((0, 1, 9, 500)) :])


def reshape(chosen: random.Random, path: Path, other: Path) -> None:
    """Sizes of any magnitude in metadata that are whole."""
    found = read_metadata(path)
    tensors = [entry for entry in found.state_dict_metadata.values() if hasattr(entry, "chunks")]
    for entry in chosen.sample(tensors, 3):
        size = torch.Size(chosen.choice((0, 1, 5, 1 << 20, 1 << 40)) for _ in range(chosen.choice((0, 1, 2, 5))))
        entry.size = size
        if chosen.random() < 0.7:
            entry.chunks[0].sizes = size
            entry.chunks[0].offsets = torch.Size([0] * len(size))
    (path / ".metadata").write_bytes(pickle.dumps(found))


def mix(chosen: random.Random, path: Path, other: Path) -> None:
    """Entries stand in the places of others."""
    found = read_metadata(path)
    indices = list(found.storage_data)
    for _ in range(3):
        a, b = chosen.sample(indices, 2)
        found.storage_data[a], found.storage_data[b] = found.storage_data[b], found.storage_data[a]
    (path / ".metadata").write_bytes(pickle.dumps(found))


MUTATIONS: tuple[Mutation, ...] = (flip, flip, flip, truncate, remove, swap, garble, garble, reshape, mix)


@contextmanager
def little_memory() -> Iterator[None]:
    """Allocations beyond what is there and some headroom fail."""
    pages = int(Path("/proc/self/statm").read_text().split()[0]) if Path("/proc/self/statm").exists() else None
    before = resource.getrlimit(resource.RLIMIT_AS)
    if pages is not None:
        resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + HEADROOM, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def digest(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> str:
    found = hashlib.sha256()
    for value in [*model.state_dict().values(), *(v for s in optimizer.state.values() for v in s.values())]:
        found.update(value.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest() + repr(optimizer.state_dict()["param_groups"])


READERS: dict[str, Callable[[Path], Any]] = {
    "compare": lambda path: compare(path, path),
    "verify": verify,
    "inspect": inspect_checkpoint,
}


@pytest.mark.parametrize("mutants", [MUTANTS, pytest.param(MORE_MUTANTS, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("recipe", RECIPES)
def test_mutants(recipe: str, mutants: int, tmp_path: Path) -> None:
    """Each ends in CheckpointError of one line from `load`, or in the very bits that were saved."""
    whole, other = written(tmp_path / "whole", recipe), written(tmp_path / "other", recipe, seed=8)
    model, optimizer = built(recipe, seed=5)
    checkpoints.load(whole, model, optimizer)
    expected = digest(model, optimizer)
    checkpoints.load(other, model, optimizer)
    others, refused = digest(model, optimizer), 0
    for number in range(mutants):
        chosen = random.Random(f"{recipe} {number}")
        mutation, path = MUTATIONS[number % len(MUTATIONS)], tmp_path / "mutant"
        shutil.rmtree(path, ignore_errors=True)
        shutil.copytree(whole, path)
        mutation(chosen, path, other)
        start = time.process_time()
        with little_memory():
            try:
                checkpoints.load(path, model, optimizer)
            except CheckpointError as error:
                refused += 1
                assert "\n" not in str(error), (number, error)
                assert len(str(error)) < 1000
            else:
                assert mutation in (flip, swap, garble, reshape), (number, mutation)
                assert digest(model, optimizer) in (expected, others), (number, mutation)
            for name, read in READERS.items():
                try:
                    read(path)
                except CheckpointError as error:
                    assert "\n" not in str(error), (name, number, error)
        assert time.process_time() - start < SECONDS, (number, mutation)
    assert refused > mutants * 0.7


@settings(max_examples=150, deadline=2000, derandomize=True, database=None)
@given(st.binary(max_size=200))
def test_any_bytes_are_no_pickle(content: bytes) -> None:
    """Or one of plain values."""
    for names in (metadata._NAMES, entries._NAMES):
        try:
            pickles.load_pickle(content, names)
        except CheckpointError as error:
            assert "\n" not in str(error)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=4) | st.tuples(inner, inner) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


@settings(max_examples=30, deadline=2000, derandomize=True, database=None)
@given(VALUES, st.sampled_from((2, 3, 4, 5)))
def test_plain_values_are_what_pickle_gives(value: Any, protocol: int) -> None:
    names = {"_codecs.encode", "builtins.bytes", "__builtin__.bytes"}
    found = pickles.load_pickle(pickle.dumps(value, protocol), names)
    if protocol > 2:  # bytes are calls before
        assert found == value
        assert repr(found) == repr(value)
