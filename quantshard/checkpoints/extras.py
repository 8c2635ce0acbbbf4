"""The caller's own entries of a checkpoint (`extra`): plain data, equal on all ranks, returned as it was saved.

Each entry is stored whole under `extra.KEY`: a tensor as a tensor, anything else, even if nested, as one object. DCP
would flatten dicts and lists, convert their keys to strings and drop empty ones.
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
from quantshard.checkpoints.safe_read import checked_entry
from quantshard.errors import ConfigurationError, RankMismatchError

EXTRA = "extra"


def checked_extra(extra: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the entries as they will be read: live tensors, and copies of everything else. A collective call.

    Both errors are raised on every rank.

    Raises:
        ConfigurationError: an entry could not be read back.
        RankMismatchError: an entry is not equal on all ranks.
    """
    items, digests = agreement.run_on_all_ranks(lambda: _readable(extra or {}))
    first, *other_digests = agreement.all_gather_object(digests)
    for rank, rank_digests in enumerate(other_digests, 1):
        differing = [key for key in sorted({*first, *rank_digests}) if first.get(key) != rank_digests.get(key)]
        if differing:
            raise RankMismatchError(
                f"extra[{differing[0]!r}] is not the same on rank {rank} as on rank 0; save what is equal on all "
                "ranks, and what each has for itself through Manager(state=)"
            )
    return items


def _readable(extra: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, bytes]]:
    items = {key: _read_again(key, value) for key, value in extra.items()}
    return items, {key: _digest(value) for key, value in items.items()}


def _read_again(key: object, value: Any) -> Any:
    if type(key) is not str:
        raise ConfigurationError(f"extra: the key {key!r} is a {type(key).__name__}; keys of entries must be strings")
    # Whether a tensor can be read depends on its kind only, so check an empty one.
    if isinstance(value, Tensor):
        checked_entry(f"extra[{key!r}]", private_torch.local_tensor(value).new_empty(0))
        return value if isinstance(value, DTensor) else value.resolve_conj().resolve_neg()
    return checked_entry(f"extra[{key!r}]", value)[1]


def _digest(value: Any) -> bytes:
    """Hash a value, independent of the order of sets and dicts; for a DTensor only its dtype and global shape."""
    if isinstance(value, DTensor):
        parts = [repr((value.dtype, value.shape)).encode()]
    elif isinstance(value, Tensor):
        content = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        parts = [repr((value.dtype, value.shape)).encode(), content]
    elif isinstance(value, dict):
        parts = sorted(_digest(key) + _digest(item) for key, item in value.items())
    elif isinstance(value, list | tuple | set):
        parts = [_digest(item) for item in value]
        parts = sorted(parts) if isinstance(value, set) else parts
    else:
        parts = [repr(value).encode()]
    return xxhash.xxh3_128(b"".join([type(value).__name__.encode(), *parts])).digest()


class ExtraSavePlanner(DefaultSavePlanner):
    """DCP's default planner, except that each entry of `extra` is saved whole."""

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        """See DCP's planner."""
        without_extra = {key: value for key, value in state_dict.items() if key != EXTRA}
        super().set_up_planner(without_extra, storage_meta, is_coordinator)
        for key, value in state_dict.get(EXTRA, {}).items():
            self.state_dict[f"{EXTRA}.{key}"] = value
            self.mappings[f"{EXTRA}.{key}"] = (EXTRA, key)
