"""Weights that are one in a model, under several names, must be alike in the checkpoint: else one of them is lost."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import Metadata

from quantshard.checkpoints.disk import agreement
from quantshard.checkpoints.disk.store import Path_
from quantshard.checkpoints.untrusted.reader import read_whole
from quantshard.errors import CheckpointError
from quantshard.formats import FORMATS

_SUFFIXES = {"", *(part.key_suffix for fmt in FORMATS.values() for part in fmt.components)}
"""What the entries of a weight end with that its values follow from."""


def check_ties(path: Path_, metadata: Metadata, model: nn.Module, stepped: Iterable[Tensor] = ()) -> None:
    """Compare the entries of tied weights, bit for bit; each rank reads some, whole. Another rank must be told.

    `stepped`: parameters whose states are loaded too; the number of these tells of weights that are not tied there.

    Raises:
        CheckpointError: two that are one weight here have other values there.
    """
    known = {id(param) for param in stepped}
    pairs = [(first, other) for param, first, other in tied_pairs(model) if id(param) not in known]
    for first, other in pairs[agreement.rank() :: agreement.rank_count()]:
        one, two = (_entries(path, metadata, name) for name in (first, other))
        if one and two and not _alike(one, two):
            raise CheckpointError(
                f"{path} has other values for {other} than for {first}, which are one tied weight in this model, so "
                "one of the two would be lost; load it into a model where they are not tied"
            )


def tied_pairs(model: nn.Module) -> list[tuple[nn.Parameter, str, str]]:
    """Each parameter that has several names: it, its first name, and each other one."""
    first: dict[nn.Parameter, str] = {}
    named = model.named_parameters(remove_duplicate=False)
    return [(param, first[param], name) for name, param in named if first.setdefault(param, name) != name]


def _entries(path: Path_, metadata: Metadata, name: str) -> dict[str, Tensor]:
    """What the checkpoint has of a weight's values, by the end of the key."""
    keys = {f"model.{name}{suffix}": suffix for suffix in _SUFFIXES}
    found = read_whole(path, metadata, [key for key in keys if key in metadata.state_dict_metadata])
    return {keys[key]: value for key, value in found.items()}


def _alike(one: dict[str, Tensor], two: dict[str, Tensor]) -> bool:
    return one.keys() == two.keys() and all(
        value.dtype == two[suffix].dtype and torch.equal(_bytes(value), _bytes(two[suffix]))
        for suffix, value in one.items()
    )


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)
