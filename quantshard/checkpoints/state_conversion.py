"""Loads states into an optimizer that keeps them in another dtype: they are read as stored, and rounded to nearest.

Each rank reads its own shards, in batches of `requantize.BATCH_ELEMENTS`. Masters, which also determine weights, are
converted by `requantize`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.optim import Optimizer

from quantshard.checkpoints.disk import agreement
from quantshard.checkpoints.parameter_numbers import ParameterNumbers, numbers_of
from quantshard.checkpoints.requantize import batches, stored_values
from quantshard.checkpoints.safe_read import SafeReader
from quantshard.errors import CheckpointError
from quantshard.numerics.states import AVERAGE, MASTER
from quantshard.recipe import QuantSpec
from quantshard.state_storage import (
    STATE_SCALE_SUFFIXES,
    scaled_state,
    stored_state_cell,
)


@dataclass(frozen=True)
class StateConversion:
    """An optimizer state that is not loaded as it is stored.

    `param`, `role`, `key`: its parameter, its name in the optimizer, and its key in the checkpoint. `saved`, `own`: the
    stored and the live dtype, each with the format of its codes and scales, or None for plain values.
    """

    param: Tensor
    role: str
    key: str
    saved: tuple[torch.dtype, QuantSpec | None]
    own: tuple[torch.dtype, QuantSpec | None]

    @property
    def keys(self) -> list[str]:
        """The keys that the state can have in the checkpoint or in this optimizer."""
        return [self.key, *(self.key + suffix for suffix in STATE_SCALE_SUFFIXES)]


def state_conversions(reader: SafeReader, model: nn.Module, optimizer: Optimizer | None) -> list[StateConversion]:
    """The states of a quantshard optimizer that the checkpoint has in another dtype. The same on every rank."""
    if optimizer is None or not hasattr(optimizer, "set_scaled_state"):
        return []
    entries, conversions = reader.entries, []
    numbers = numbers_of(optimizer, ParameterNumbers.of(model, optimizer))
    for group in optimizer.param_groups:
        for param in group["params"]:
            live = optimizer.state.get(param, {})
            for role in _roles(live):
                key = f"optimizer.state.{numbers.get(id(param))}.{role}"
                entry = entries.get(key)
                if not isinstance(entry, TensorStorageMetadata) or entry.size != live[role].shape:
                    continue  # of another optimizer or model, which `fit` reports
                stored_kind = entry.properties.dtype, stored_state_cell(key, entry.properties.dtype, entries)
                live_kind = live[role].dtype, stored_state_cell(role, live[role].dtype, live)
                if stored_kind != live_kind and _is_known(stored_kind):
                    conversions.append(StateConversion(param, role, key, stored_kind, live_kind))
    return conversions


def _roles(live: Mapping[str, Any]) -> Iterator[str]:
    """The names of a parameter's states, except masters, averages and scales."""
    for key, value in live.items():
        if isinstance(value, Tensor) and not key.startswith((MASTER, AVERAGE)) and not scaled_state(key):
            yield key


def _is_known(saved: tuple[torch.dtype, QuantSpec | None]) -> bool:
    dtype, cell = saved
    return cell is not None or dtype in (torch.float32, torch.bfloat16)


def write_states(reader: SafeReader, found: list[StateConversion], optimizer: Any) -> None:
    """Read the states and write their values into the optimizer, in batches. A collective call.

    Raises:
        CheckpointError: a value is infinite or NaN, which would spoil all values under the same scale.
    """
    for batch in batches(found, lambda change: change.param):
        tensors: dict[str, Tensor] = {}
        value_readers = [stored_values(change.param, change.key, *change.saved, tensors) for change in batch]
        reader.read_into(dict(tensors))
        values = [compute() for compute in value_readers]
        agreement.run_on_all_ranks(partial(_check_finite, reader.path, batch, values))
        for change, value in zip(batch, values, strict=True):
            optimizer.set_scaled_state(change.param, change.role, value)


def _check_finite(path: object, batch: list[StateConversion], values: list[Tensor]) -> None:
    for change, value in zip(batch, values, strict=True):
        if count := int(value.isfinite().logical_not().sum()):
            raise CheckpointError(
                f"{path}: {count} values of {change.key} are infinite or NaN, and rounded to another dtype they would "
                "spoil those that share a scale with them"
            )


def conversion_notices(found: list[StateConversion]) -> list[str]:
    """Sentences about the converted states: counts, names and dtypes."""
    counts = Counter((c.role, _named(c.saved), _named(c.own)) for c in found)
    lines = ", ".join(f"{n} {role} from {old} to {new}" for (role, old, new), n in counts.items())
    return [f"states are kept in other dtypes here: {lines}"] if lines else []


def _named(kind: tuple[torch.dtype, QuantSpec | None]) -> str:
    dtype, cell = kind
    return str(dtype).removeprefix("torch.") if cell is None else cell.tag
