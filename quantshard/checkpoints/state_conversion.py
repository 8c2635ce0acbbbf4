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
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.optim import Optimizer

from quantshard import private_torch
from quantshard.checkpoints.disk import agreement
from quantshard.checkpoints.parameter_numbers import ParameterNumbers, numbers_of
from quantshard.checkpoints.requantize import batches, stored_values
from quantshard.checkpoints.untrusted.reader import Path_, read_into
from quantshard.errors import CheckpointError
from quantshard.numerics.states import AVERAGE, MASTER
from quantshard.recipe import QuantSpec
from quantshard.state_storage import (
    FP8_NONNEGATIVE_STATE,
    FP8_STATE,
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
    def is_earlier(self) -> bool:
        """Whether this is an 8-bit second moment written before 2026-11-28.

        Its values are representable here, except under scales that are not powers of two (written before 2026-11-22).
        """
        return (self.saved[1], self.own[1]) == (FP8_STATE, FP8_NONNEGATIVE_STATE)

    @property
    def keys(self) -> list[str]:
        """The keys that the state can have in the checkpoint or in this optimizer."""
        return [self.key, *(self.key + suffix for suffix in STATE_SCALE_SUFFIXES)]


def state_conversions(metadata: Metadata, model: nn.Module, optimizer: Optimizer | None) -> list[StateConversion]:
    """The states of a quantshard optimizer that the checkpoint has in another dtype. The same on every rank."""
    if optimizer is None or not hasattr(optimizer, "set_scaled_state"):
        return []
    entries, conversions = metadata.state_dict_metadata, []
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


def write_states(path: Path_, metadata: Metadata, found: list[StateConversion], optimizer: Any) -> list[str]:
    """Read the states and write their values into the optimizer, in batches. A collective call.

    Returns:
        The keys of the `is_earlier` states that were rounded on any rank.

    Raises:
        CheckpointError: a value is infinite or NaN, which would spoil all values under the same scale.
    """
    rounded = []
    for batch in batches(found, lambda change: change.param):
        tensors: dict[str, Tensor] = {}
        value_readers = [stored_values(change.param, change.key, *change.saved, tensors) for change in batch]
        read_into(path, metadata, dict(tensors))
        values = [reader() for reader in value_readers]
        agreement.run_on_all_ranks(partial(_check_finite, path, batch, values))
        for change, value in zip(batch, values, strict=True):
            optimizer.set_scaled_state(change.param, change.role, value)
            written = private_torch.local_tensor(optimizer.get_unscaled_state(change.param, change.role))
            if change.is_earlier and not torch.equal(written, value):
                rounded.append(change.key)
    earlier_keys = [change.key for change in found if change.is_earlier]  # same on every rank
    rounded_keys = {key for keys in agreement.all_gather_object(rounded) for key in keys} if earlier_keys else set()
    return [key for key in earlier_keys if key in rounded_keys]


def _check_finite(path: Path_, batch: list[StateConversion], values: list[Tensor]) -> None:
    for change, value in zip(batch, values, strict=True):
        if count := int(value.isfinite().logical_not().sum()):
            raise CheckpointError(
                f"{path}: {count} values of {change.key} are infinite or NaN, and rounded to another dtype they would "
                "spoil those that share a scale with them. The model is loaded in part: load another checkpoint"
            )


def conversion_notices(found: list[StateConversion]) -> list[str]:
    """Sentences about the converted states: counts, names and dtypes. States of earlier versions are not counted."""
    counts = Counter((c.role, _named(c.saved), _named(c.own)) for c in found if not c.is_earlier)
    lines = ", ".join(f"{n} {role} from {old} to {new}" for (role, old, new), n in counts.items())
    return [f"states are kept in other dtypes here: {lines}"] if lines else []


def rounding_notice(rounded: list[str]) -> str:
    """The warning about 8-bit states of earlier versions that were rounded, given their keys."""
    return (
        f"{len(rounded)} states of 8 bits (first: {rounded[0]}) were written before 2026-11-22, under scales that are "
        "no powers of two, and are rounded, by a sixteenth at most"
    )


def _named(kind: tuple[torch.dtype, QuantSpec | None]) -> str:
    dtype, cell = kind
    return str(dtype).removeprefix("torch.") if cell is None else cell.tag
