"""Checks that tied weights of a model have equal values in the checkpoint; otherwise a load would lose one of them."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from quantshard.checkpoints.disk import agreement
from quantshard.checkpoints.safe_read import SafeReader
from quantshard.errors import CheckpointError
from quantshard.formats import FORMATS

_SUFFIXES = {"", *(part.key_suffix for fmt in FORMATS.values() for part in fmt.components)}
"""Key suffixes of the entries that determine a weight's values."""


def check_ties(reader: SafeReader, model: nn.Module, stepped: Iterable[Tensor] = ()) -> None:
    """Compare the entries of tied weights bit for bit.

    Each rank compares some of the pairs, so the caller must raise errors on all ranks. `stepped`: parameters whose
    optimizer states are loaded too. They need no check: if the weights were not tied in the checkpoint, the number of
    states differs.

    Raises:
        CheckpointError: two names that share one weight in this model have different values in the checkpoint.
    """
    stepped_ids = {id(param) for param in stepped}
    pairs = [(first, alias) for param, first, alias in tied_pairs(model) if id(param) not in stepped_ids]
    for first, alias in pairs[agreement.rank() :: agreement.rank_count()]:
        entries, alias_entries = (_entries(reader, name) for name in (first, alias))
        if entries and alias_entries and not _alike(entries, alias_entries):
            raise CheckpointError(
                f"{reader.path} has other values for {alias} than for {first}, one tied weight in this model; "
                "load it into a model where they are not tied"
            )


def tied_pairs(model: nn.Module) -> list[tuple[nn.Parameter, str, str]]:
    """(parameter, first name, other name) for each additional name of a parameter."""
    first: dict[nn.Parameter, str] = {}
    named = model.named_parameters(remove_duplicate=False)
    return [(param, first[param], name) for name, param in named if first.setdefault(param, name) != name]


def _entries(reader: SafeReader, name: str) -> dict[str, Tensor]:
    """The checkpoint's entries that determine a weight's values, by key suffix."""
    keys = {f"model.{name}{suffix}": suffix for suffix in _SUFFIXES}
    return {keys[key]: value for key, value in reader.read(keys.keys() & reader.entries.keys()).items()}


def _alike(one: dict[str, Tensor], two: dict[str, Tensor]) -> bool:
    return one.keys() == two.keys() and all(
        value.dtype == two[suffix].dtype and torch.equal(_bytes(value), _bytes(two[suffix]))
        for suffix, value in one.items()
    )


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)
