"""States that each rank has on its own: RNG states, and the caller's objects, stored as plain tensors.

Each state is one uint8 tensor under `ranks.RANK.NAME`: a torch.save file, which is read like other entries, without
executing code. "random" holds the RNG states; all other names belong to the caller's objects with `state_dict` and
`load_state_dict` (a data loader, a scheduler). Their tensors are loaded to the CPU.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.checkpoint.stateful import Stateful

from quantshard.checkpoints.disk import agreement
from quantshard.checkpoints.disk.store import why
from quantshard.checkpoints.safe_read import checked_entry, decoded
from quantshard.errors import CheckpointError, ConfigurationError

RANKS = "ranks"
RANDOM = "random"


class RandomGenerators:
    """The random generators of this process: torch's on the CPU and its GPU, Python's and NumPy's."""

    def state_dict(self) -> dict[str, Any]:
        """The RNG states, in plain types."""
        name, keys, *rest = np.random.get_state(legacy=True)
        state = {
            "torch": torch.get_rng_state(),
            "python": random.getstate(),
            "numpy": (str(name), [int(key) for key in keys], *(x.item() if hasattr(x, "item") else x for x in rest)),
        }
        return state | ({"cuda": torch.cuda.get_rng_state()} if torch.cuda.is_available() else {})

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Set the RNG states. A generator without a state keeps its own."""
        name, keys, position, *rest = state_dict["numpy"]
        if not 0 <= position <= len(keys):  # NumPy would read out of bounds
            raise ValueError(f"position {position} is not within NumPy's {len(keys)} keys")
        torch.set_rng_state(state_dict["torch"])
        random.setstate(state_dict["python"])
        np.random.set_state((name, np.array(keys, dtype=np.uint32), position, *rest))
        if "cuda" in state_dict and torch.cuda.is_available():
            torch.cuda.set_rng_state(state_dict["cuda"])


def with_generators(objects: Mapping[str, Stateful]) -> dict[str, Stateful]:
    """The caller's objects and the random generators, by name.

    Raises:
        ConfigurationError: a name cannot be part of a key, or an object has no state_dict.
    """
    for name, value in objects.items():
        if not name.isidentifier() or name == RANDOM:
            raise ConfigurationError(f"state: {name!r} cannot be the name of an entry; take an identifier that is free")
        if not isinstance(value, Stateful):
            raise ConfigurationError(f"state: {name!r} is a {type(value).__name__}, which has no state_dict to save")
    return {RANDOM: RandomGenerators(), **objects}


def entries(objects: Mapping[str, Stateful]) -> dict[str, dict[str, Tensor]]:
    """This rank's entries, to be stored under `ranks`.

    Raises:
        ConfigurationError: a state needs code to be read.
    """
    return {str(agreement.rank()): {name: _packed(name, value.state_dict()) for name, value in objects.items()}}


def writers(stored: Iterable[str]) -> int:
    """The number of ranks that wrote a state of their own, by the keys of a checkpoint."""
    return len(_by_rank(stored))


def wanted_keys(stored: Iterable[str]) -> list[str]:
    """The keys this rank must read: its own, or all keys if another number of ranks wrote the checkpoint."""
    keys_by_rank = _by_rank(stored)
    if len(keys_by_rank) == agreement.rank_count():
        return list(keys_by_rank.get(str(agreement.rank()), {}).values())
    return [key for keys in keys_by_rank.values() for key in keys.values()]


def to_load(
    objects: Mapping[str, Stateful], values: Mapping[str, Tensor], written_by: int
) -> tuple[dict[str, tuple[str, Any]], tuple[str, ...]]:
    """The key and the state that each object loads, by its name, and the names of the objects that keep their state.

    If another number of ranks wrote the checkpoint, only states that were equal on all of them are loaded, on every
    rank. RNG states written by a single rank are not loaded on several ranks, which would all draw the same numbers.

    Raises:
        CheckpointError: an entry cannot be decoded.
    """
    keys_by_rank, states, unloaded = _by_rank(values), {}, []
    skipped = {RANDOM} if written_by == 1 and agreement.rank_count() > 1 else set()
    for name in objects:
        candidates = [keys[name] for keys in keys_by_rank.values() if name in keys and name not in skipped]
        if not candidates or not all(torch.equal(values[candidates[0]], values[key]) for key in candidates):
            unloaded.append(name)
            continue
        states[name] = candidates[0], decoded(candidates[0], values[candidates[0]].numpy().tobytes())
    return states, tuple(unloaded)


def load_states(objects: Mapping[str, Stateful], states: Mapping[str, tuple[str, Any]]) -> None:
    """Load the states of `to_load` into the objects.

    Raises:
        CheckpointError: an object cannot load its state.
    """
    for name, (key, state) in states.items():
        try:
            objects[name].load_state_dict(state)
        except Exception as error:  # user code can raise anything, and the other ranks wait
            raise CheckpointError(f"{key} cannot be loaded into {name!r}: {why(error)}") from error


def _by_rank(keys: Iterable[str]) -> dict[str, dict[str, str]]:
    """{rank: {name: key}}."""
    result: dict[str, dict[str, str]] = {}
    for key in keys:
        head, _, tail = key.partition(".")
        rank, _, name = tail.partition(".")
        if head == RANKS and rank.isdecimal() and name:
            result.setdefault(rank, {})[name] = key
    return result


def _packed(name: str, state: Any) -> Tensor:
    content, _ = checked_entry(f"the state of {name!r}", state)
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)
