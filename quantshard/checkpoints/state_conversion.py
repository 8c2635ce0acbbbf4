"""Loading moments into an optimizer that keeps them in another dtype: each is read as it is stored, and rounded to
nearest as it is kept. (Masters, which weights are made of, are the matter of `requantize`.)

A rank reads its own part, in batches of `requantize.BATCH_ELEMENTS`.
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
from quantshard.state_cells import (
    FP8_NONNEGATIVE_STATE,
    FP8_STATE,
    STATE_SCALE_SUFFIXES,
    scaled_state,
    stored_state_cell,
)


@dataclass(frozen=True)
class StateConversion:
    """A state that is not loaded as it is stored: of which parameter, its role and key, and how it is stored there and
    kept here: a dtype, and a cell where it has scales."""

    param: Tensor
    role: str
    key: str
    saved: tuple[torch.dtype, QuantSpec | None]
    own: tuple[torch.dtype, QuantSpec | None]

    @property
    def is_earlier(self) -> bool:
        """Whether it is a second moment of 8 bits of before 2026-11-28, which has the same values here; but for scales
        that are no powers of two, of before 2026-11-22."""
        return (self.saved[1], self.own[1]) == (FP8_STATE, FP8_NONNEGATIVE_STATE)

    @property
    def keys(self) -> list[str]:
        """Those that the state may have, there or here."""
        return [self.key, *(self.key + suffix for suffix in STATE_SCALE_SUFFIXES)]


def state_conversions(metadata: Metadata, model: nn.Module, optimizer: Optimizer | None) -> list[StateConversion]:
    """The states of an optimizer of ours that the checkpoint has in another dtype. The same on every rank."""
    if optimizer is None or not hasattr(optimizer, "set_scaled_state"):
        return []
    stored, found = metadata.state_dict_metadata, []
    numbers = numbers_of(optimizer, ParameterNumbers.of(model, optimizer))
    for group in optimizer.param_groups:
        for param in group["params"]:
            live = optimizer.state.get(param, {})
            for role in _roles(live):
                key = f"optimizer.state.{numbers.get(id(param))}.{role}"
                entry = stored.get(key)
                if not isinstance(entry, TensorStorageMetadata) or entry.size != live[role].shape:
                    continue  # of another optimizer or model, as is told elsewhere
                saved = entry.properties.dtype, stored_state_cell(key, entry.properties.dtype, stored)
                own = live[role].dtype, stored_state_cell(role, live[role].dtype, live)
                if saved != own and _is_known(saved):
                    found.append(StateConversion(param, role, key, saved, own))
    return found


def _roles(live: Mapping[str, Any]) -> Iterator[str]:
    """The states among a parameter's entries, but for masters and averages."""
    for key, value in live.items():
        if isinstance(value, Tensor) and not key.startswith((MASTER, AVERAGE)) and not scaled_state(key):
            yield key


def _is_known(saved: tuple[torch.dtype, QuantSpec | None]) -> bool:
    dtype, cell = saved
    return cell is not None or dtype in (torch.float32, torch.bfloat16)


def write_states(path: Path_, metadata: Metadata, found: list[StateConversion], optimizer: Any) -> list[str]:
    """Read the states and give their values to the optimizer, batch by batch; the keys of those of earlier versions
    that were rounded, on any rank. A collective call.

    Raises:
        CheckpointError: a value is infinite or NaN, which the others under its scale would become too.
    """
    rounded = []
    for batch in batches(found, lambda change: change.param):
        tensors: dict[str, Tensor] = {}
        finish = [stored_values(change.param, change.key, *change.saved, tensors) for change in batch]
        read_into(path, metadata, dict(tensors))
        values = [done() for done in finish]
        agreement.alike(partial(_check_finite, path, batch, values))
        for change, value in zip(batch, values, strict=True):
            optimizer.set_scaled_state(change.param, change.role, value)
            now = private_torch.local_tensor(optimizer.get_unscaled_state(change.param, change.role))
            if change.is_earlier and not torch.equal(now, value):
                rounded.append(change.key)
    earlier = [change.key for change in found if change.is_earlier]  # the same on every rank
    anywhere = {key for keys in agreement.gathered(rounded) for key in keys} if earlier else set()
    return [key for key in earlier if key in anywhere]


def _check_finite(path: Path_, batch: list[StateConversion], values: list[Tensor]) -> None:
    for change, value in zip(batch, values, strict=True):
        if count := int(value.isfinite().logical_not().sum()):
            raise CheckpointError(
                f"{path}: {count} values of {change.key} are infinite or NaN, and rounded to another dtype they would "
                "spoil those that share a scale with them. The model is loaded in part: load another checkpoint"
            )


def told(found: list[StateConversion]) -> list[str]:
    """What is kept in another dtype here, of how many parameters, in words; nothing of earlier versions."""
    counts = Counter((c.role, _named(c.saved), _named(c.own)) for c in found if not c.is_earlier)
    lines = ", ".join(f"{n} {role} from {old} to {new}" for (role, old, new), n in counts.items())
    return [f"states are kept in other dtypes here: {lines}"] if lines else []


def told_of_earlier(rounded: list[str]) -> str:
    """What is said of states of earlier versions that were rounded, by key."""
    return (
        f"{len(rounded)} states of 8 bits (first: {rounded[0]}) were written before 2026-11-22, under scales that are "
        "no powers of two, and are rounded, by a sixteenth at most"
    )


def _named(kind: tuple[torch.dtype, QuantSpec | None]) -> str:
    dtype, cell = kind
    return str(dtype).removeprefix("torch.") if cell is None else cell.tag
