"""What each rank has for itself: random generators, and the caller's objects, as plain tensors.

Each is one uint8 tensor under `ranks.RANK.NAME`, a file of torch.save that is read as other entries are, so that
nothing in it is run: "random" for the generators, and the caller's names for what has `state_dict` and
`load_state_dict` (the order of the data, a schedule). Tensors in it come back on the CPU.
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
from quantshard.checkpoints.untrusted import entries as entries_
from quantshard.checkpoints.untrusted.reader import decoded
from quantshard.errors import CheckpointError, ConfigurationError

RANKS = "ranks"
RANDOM = "random"


class RandomGenerators:
    """The random generators of this process: torch's on the CPU and on its GPU, Python's and NumPy's."""

    def state_dict(self) -> dict[str, Any]:
        """The state of each, in plain types."""
        name, keys, *rest = np.random.get_state(legacy=True)
        state = {
            "torch": torch.get_rng_state(),
            "python": random.getstate(),
            "numpy": (str(name), [int(key) for key in keys], *(x.item() if hasattr(x, "item") else x for x in rest)),
        }
        return state | ({"cuda": torch.cuda.get_rng_state()} if torch.cuda.is_available() else {})

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Set each to its state; one that is not there is left as it is."""
        name, keys, position, *rest = state_dict["numpy"]
        if not 0 <= position <= len(keys):  # NumPy would read there
            raise ValueError(f"position {position} is not within NumPy's {len(keys)} keys")
        torch.set_rng_state(state_dict["torch"])
        random.setstate(state_dict["python"])
        np.random.set_state((name, np.array(keys, dtype=np.uint32), position, *rest))
        if "cuda" in state_dict and torch.cuda.is_available():
            torch.cuda.set_rng_state(state_dict["cuda"])


def with_generators(objects: Mapping[str, Stateful]) -> dict[str, Stateful]:
    """The caller's objects and the generators, by name.

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
    """This rank's entries, below `ranks`.

    Raises:
        ConfigurationError: a state needs code to be read.
    """
    return {str(agreement.rank()): {name: _packed(name, value.state_dict()) for name, value in objects.items()}}


def writers(stored: Iterable[str]) -> int:
    """How many ranks wrote entries of their own, by the keys of a checkpoint."""
    return len(_by_rank(stored))


def wanted_keys(stored: Iterable[str]) -> list[str]:
    """Of the keys of a checkpoint, those that this rank needs: its own, or, if as many ranks did not write it, all."""
    found = _by_rank(stored)
    if len(found) == agreement.rank_count():
        return list(found.get(str(agreement.rank()), {}).values())
    return [key for keys in found.values() for key in keys.values()]


def to_load(
    objects: Mapping[str, Stateful], values: Mapping[str, Tensor], written_by: int
) -> tuple[dict[str, tuple[str, Any]], tuple[str, ...]]:
    """What each object is to load of the `wanted_keys`, by its name: the key and the state; and the names of those that
    are left as they are.

    Where another number of ranks wrote it, what was equal on all of them is loaded on all; the rest belongs to nobody.
    Nor do the generators of a single rank, which would make all alike.

    Raises:
        CheckpointError: an entry is no such state.
    """
    for key, entry in values.items():
        if not isinstance(entry, Tensor) or entry.dtype != torch.uint8 or entry.ndim != 1:
            what = f"{entry.dtype} {list(entry.shape)}" if isinstance(entry, Tensor) else f"a {type(entry).__name__}"
            raise CheckpointError(f"{key} is {what}, not the bytes of a state; choose another checkpoint")
    found, states, left = _by_rank(values), {}, []
    nobodys = {RANDOM} if written_by == 1 and agreement.rank_count() > 1 else set()
    for name in objects:
        held = [keys[name] for keys in found.values() if name in keys and name not in nobodys]
        if not held or not all(torch.equal(values[held[0]], values[key]) for key in held):
            left.append(name)
            continue
        states[name] = held[0], decoded(held[0], values[held[0]].numpy().tobytes())
    return states, tuple(left)


def load_states(objects: Mapping[str, Stateful], states: Mapping[str, tuple[str, Any]]) -> None:
    """Load what `to_load` found.

    Raises:
        CheckpointError: an object cannot load its state.
    """
    for name, (key, state) in states.items():
        try:
            objects[name].load_state_dict(state)
        except Exception as error:  # an object of the user's can refuse in any way, and the other ranks wait
            raise CheckpointError(f"{key} cannot be loaded into {name!r}: {why(error)}") from error


def _by_rank(keys: Iterable[str]) -> dict[str, dict[str, str]]:
    """{rank: {name: key}}."""
    found: dict[str, dict[str, str]] = {}
    for key in keys:
        head, _, rest = key.partition(".")
        rank, _, name = rest.partition(".")
        if head == RANKS and rank.isdecimal() and name:
            found.setdefault(rank, {})[name] = key
    return found


def _packed(name: str, state: Any) -> Tensor:
    content, _ = entries_.checked_entry(f"the state of {name!r}", state)
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)
