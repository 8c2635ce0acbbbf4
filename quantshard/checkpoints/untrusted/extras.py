"""The caller's own entries of a checkpoint, `extra`: plain data, equal on all ranks, that comes back as it was saved.

An entry is stored whole under `extra.KEY`: a tensor as a tensor, anything else, however it is nested, as one object.
DCP would pull dicts and lists apart, make strings of their keys and forget the empty ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import xxhash
from torch import Tensor
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import StorageMeta
from torch.distributed.tensor import DTensor

from quantshard import private_torch
from quantshard.checkpoints.disk import agreement
from quantshard.checkpoints.untrusted import entries
from quantshard.errors import ConfigurationError, RankMismatchError

EXTRA = "extra"


def checked_extra(extra: Mapping[str, Any] | None) -> dict[str, Any]:
    """The entries as they will be read: tensors the live ones, of anything else a copy. A collective call.

    Raises:
        ConfigurationError: one would not be read again; the same on every rank.
        RankMismatchError: one is not equal on all ranks; the same on every rank.
    """
    found, digests = agreement.alike(lambda: _readable(extra or {}))
    first, *others = agreement.gathered(digests)
    for number, other in enumerate(others, 1):
        differing = [key for key in sorted({*first, *other}) if first.get(key) != other.get(key)]
        if differing:
            raise RankMismatchError(
                f"extra[{differing[0]!r}] is not the same on rank {number} as on rank 0; save what is equal on all "
                "ranks, and what each has for itself through Manager(state=)"
            )
    return found


def _readable(extra: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, bytes]]:
    found = {key: _read_again(key, value) for key, value in extra.items()}
    return found, {key: _digest(value) for key, value in found.items()}


def _read_again(key: object, value: Any) -> Any:
    if type(key) is not str:
        raise ConfigurationError(f"extra: the key {key!r} is a {type(key).__name__}; keys of entries must be strings")
    if isinstance(value, Tensor):  # whether it can be read depends on its kind, for which an empty one stands
        entries.checked_entry(f"extra[{key!r}]", private_torch.local_tensor(value).new_empty(0))
        return value if isinstance(value, DTensor) else value.resolve_conj().resolve_neg()
    return entries.checked_entry(f"extra[{key!r}]", value)[1]


def _digest(value: Any) -> bytes:
    """Equal for equal values, in whatever order sets and dicts have them; of a DTensor, which is cut, of its whole."""
    if isinstance(value, DTensor):
        parts = [repr((value.dtype, value.shape)).encode()]
    elif isinstance(value, Tensor):
        content = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        parts = [repr((value.dtype, value.shape)).encode(), content]
    elif isinstance(value, dict):
        parts = sorted(_digest(key) + _digest(held) for key, held in value.items())
    elif isinstance(value, list | tuple | set):
        parts = [_digest(held) for held in value]
        parts = sorted(parts) if isinstance(value, set) else parts
    else:
        parts = [repr(value).encode()]
    return xxhash.xxh3_128(b"".join([type(value).__name__.encode(), *parts])).digest()


class ExtraSavePlanner(DefaultSavePlanner):
    """DCP's own, but for `extra`, whose entries it takes whole."""

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        """As DCP's."""
        others = {key: value for key, value in state_dict.items() if key != EXTRA}
        super().set_up_planner(others, storage_meta, is_coordinator)
        for key, value in state_dict.get(EXTRA, {}).items():
            self.state_dict[f"{EXTRA}.{key}"] = value
            self.mappings[f"{EXTRA}.{key}"] = (EXTRA, key)
