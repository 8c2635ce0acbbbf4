"""States of single ranks: of random generators, and of the objects of `Manager(state=)`.

Each is a uint8 tensor that holds a torch.save file, under `ranks.RANK.NAME`; reading it executes no code.
"""

import random
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.checkpoint.stateful import Stateful

from quantshard.checkpoints.disk import agreement
from quantshard.checkpoints.safe_read import SafeReader, checked_entry, decoded, dtype_of
from quantshard.errors import CheckpointError, ConfigurationError

RANKS, RANDOM = "ranks", "random"


class RandomGenerators:
    """The random generators of this process: torch's on the CPU and its GPU, Python's and NumPy's."""

    def state_dict(self) -> dict[str, Any]:
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
    """The caller's objects and the random generators, by name. Names must be identifiers."""
    for name, value in objects.items():
        if not name.isidentifier() or name == RANDOM:
            raise ConfigurationError(f"state: {name!r} cannot be the name of an entry; take an identifier that is free")
        if not isinstance(value, Stateful):
            raise ConfigurationError(f"state: {name!r} is a {type(value).__name__}, which has no state_dict to save")
    return {RANDOM: RandomGenerators(), **objects}


def rank_states(objects: Mapping[str, Stateful]) -> dict[str, dict[str, Tensor]]:
    return {str(agreement.rank()): {name: _packed(name, value.state_dict()) for name, value in objects.items()}}


def _packed(name: str, state: Any) -> Tensor:
    content, _ = checked_entry(f"the state of {name!r}", state)
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


def keys_by_rank(stored: Iterable[str]) -> dict[str, dict[str, str]]:
    """The keys of a checkpoint's rank states: {rank: {name: key}}."""
    result: dict[str, dict[str, str]] = {}
    for key in stored:
        head, _, tail = key.partition(".")
        rank, _, name = tail.partition(".")
        if head == RANKS and rank.isdecimal() and name:
            result.setdefault(rank, {})[name] = key
    return result


def states_to_load(reader: SafeReader, names: Iterable[str]) -> dict[str, tuple[str, Any]]:
    """The key and the state that each of this rank's objects loads, by the object's name.

    If another number of ranks wrote the checkpoint, only states that were equal on all of them are loaded.
    """
    by_rank = keys_by_rank(reader.entries)
    # ranks that load the RNG states of a single one would all draw the same numbers
    skipped = {RANDOM} if len(by_rank) == 1 and agreement.rank_count() > 1 else set()
    if len(by_rank) == agreement.rank_count():
        rank = str(agreement.rank())
        by_rank = {rank: by_rank.get(rank, {})}
    keys = [key for keys_by_name in by_rank.values() for key in keys_by_name.values()]
    for key in keys:
        if dtype_of(reader.entries[key]) != torch.uint8:
            raise CheckpointError(f"{reader.path} is damaged: {key} is not a tensor of bytes; choose another")
    values, states = reader.read(keys), {}
    for name in names:
        candidates = [own[name] for own in by_rank.values() if name in own and name not in skipped]
        if candidates and all(torch.equal(values[candidates[0]], values[key]) for key in candidates):
            states[name] = candidates[0], decoded(candidates[0], values[candidates[0]].numpy().tobytes())
    return states
