"""Loads into a model of another recipe: weights are quantized again, from the checkpoint's masters if it has any.

A weight whose format differs becomes the nearest quantization of its float32 master, bit-identical to the result of one
process, whatever meshes the checkpoint was written and loaded on. Each rank reads its own shards in batches. In
addition to the model and the optimizer, a rank holds float32 values of `BATCH_ELEMENTS` / ranks elements or of its
largest weight; if the masters are of another kind than the stored ones, it holds the values of all of them.

Optimizer states that this optimizer keeps in another dtype are read as stored, in the same batches, and rounded to
nearest.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import STORAGE_TYPES, TensorStorageMetadata
from torch.optim import Optimizer

from quantshard import numerics, private_torch
from quantshard.checkpoints.disk import agreement
from quantshard.checkpoints.optimizer_states import ParameterNumbers, numbers_of
from quantshard.checkpoints.safe_read import SafeReader
from quantshard.errors import CheckpointError
from quantshard.formats import FORMATS, Orientation
from quantshard.numerics import split_codes
from quantshard.numerics.states import AVERAGE, MASTER, REMAINDER_SUFFIX
from quantshard.recipe import QuantSpec, format_of_tag
from quantshard.state_storage import STATE_CELLS, STATE_SCALE_SUFFIXES, scaled_state, stored_state_cell
from quantshard.tensor import components, requantize
from quantshard.tensor import storage as storages
from quantshard.tensor.storage import AMAX_HISTORY, DRAWS, KEY, QuantizedStorage

BATCH_ELEMENTS = 1 << 26
"""Elements of a batch, over all ranks: the number of float32 values in memory at a time."""

HIGH_PRECISION = "high precision"
"""Stands for the format of a weight that is not quantized."""

_LOW, _SCALE = MASTER + REMAINDER_SUFFIX, "_scale_inv"
_SUFFIXES = {
    "",
    components.FORMAT_SUFFIX,
    f"_{AMAX_HISTORY}",
    *(part.key_suffix for fmt in FORMATS.values() for part in fmt.components),
}
"""Key suffixes of a weight's entries that depend on its format."""


class RequantizedWarning(UserWarning):
    """Weights of a checkpoint were quantized again, to the formats of another recipe."""


@dataclass(frozen=True)
class ParameterConversion:
    """A parameter that is not loaded as it is stored.

    `index`: its number in the optimizer. `saved`, `own`: the stored and the live format. `source`: the entries its
    values are read from: "master", "split master" or "codes" (also for plain values). `sets_master`: whether to write
    the optimizer's master too, because it is of another kind than the stored one, or is a remainder of another format.
    """

    name: str
    param: Tensor
    index: int | None
    saved: str
    own: str
    source: str
    sets_master: bool

    @property
    def requantizes(self) -> bool:
        """Whether the weight itself is written from the values, and not only its master."""
        return self.saved != self.own


def changes(
    reader: SafeReader,
    model: nn.Module,
    optimizer: Optimizer | None,
    numbers: ParameterNumbers | None,
    formats: Mapping[str, tuple[str, str]],
    lossy: bool,
) -> list[ParameterConversion]:
    """The parameters that must be converted. The same on every rank.

    Args:
        formats: (stored format, live format) of each weight that is quantized on either side.

    Raises:
        CheckpointError: `lossy` is false, and a weight has no master in the checkpoint, or no optimizer was given; or
            masters of another kind must be set, and the optimizer has no `seed_master` (FusedAdam has one).
    """
    entries, number_by_id = reader.entries, {} if optimizer is None else numbers_of(optimizer, numbers)
    conversions, unconvertible = [], []
    seen_ids: set[int] = set()
    for name, param in components.named_parameters(model).items():
        stored_format, live_format = formats.get(name, (HIGH_PRECISION, HIGH_PRECISION))
        index = number_by_id.get(id(param))
        sets_master = _sets_master(optimizer, param, index, entries, stored_format, live_format)
        if id(param) in seen_ids or (stored_format == live_format and not sets_master):
            continue
        seen_ids.add(id(param))
        source = _source(index, entries, stored_format)
        if source == "codes" and stored_format != live_format and not (lossy or stored_format == HIGH_PRECISION):
            unconvertible.append(f"{name} ({stored_format})")
        if sets_master and not hasattr(optimizer, "seed_master"):
            raise CheckpointError(
                f"the master of {name} is of another kind in the checkpoint, and a {type(optimizer).__name__} cannot "
                "take it; use FusedAdam, or what it was saved with"
            )
        conversions.append(ParameterConversion(name, param, index, stored_format, live_format, source, sets_master))
    if unconvertible:
        reason = "no optimizer was given to tell which masters are whose" if optimizer is None else "it has no masters"
        raise CheckpointError(
            f"{len(unconvertible)} weights are of another recipe, the first {unconvertible[0]}, and {reason}; allow "
            "it (lossy=True, or --lossy) to quantize their dequantized codes, which loses what the masters kept"
        )
    return conversions


def _live_masters(optimizer: Optimizer | None, param: Tensor) -> dict[str, Tensor]:
    state = {} if optimizer is None else optimizer.state.get(param, {})
    return {key: value for key, value in state.items() if key.startswith(MASTER)}


def _sets_master(
    optimizer: Optimizer | None,
    param: Tensor,
    index: int | None,
    stored: Mapping[str, STORAGE_TYPES],
    saved: str,
    own: str,
) -> bool:
    """Whether the optimizer has a master of this parameter, of another kind than the checkpoint's."""
    live = _live_masters(optimizer, param)
    if _LOW in live and saved != own:  # a remainder belongs to the codes of one format
        return True
    prefix = f"optimizer.state.{index}."
    stored_keys = {key.removeprefix(prefix) for key in stored if key.startswith(prefix + MASTER)}
    if not live or stored_keys != live.keys():
        return bool(live)
    return any(dtype_of(stored[prefix + key]) != value.dtype for key, value in live.items())


def dtype_of(entry: STORAGE_TYPES | None) -> torch.dtype | None:
    """The dtype of a stored tensor; None for another entry."""
    return entry.properties.dtype if isinstance(entry, TensorStorageMetadata) else None


def _source(index: int | None, stored: Mapping[str, STORAGE_TYPES], saved: str) -> str:
    if f"optimizer.state.{index}.{MASTER}" in stored:
        return "master"
    if f"optimizer.state.{index}.{_LOW}" in stored:
        return "split master"
    return "codes"


def is_history(key: str) -> bool:
    """Whether an entry is an amax history, which only delayed scaling has."""
    return key.endswith(AMAX_HISTORY)


def left_out(found: list[ParameterConversion], key: str, there: STORAGE_TYPES | None, here: Any) -> bool:
    """Whether a load does not read an entry of either side, because it is converted or keeps its live value.

    `there`, `here`: the entry in the checkpoint and in this model, or None. RNG keys and draw counts are read if both
    sides have them. An amax history belongs to its recipe: it is left out if one side lacks it, or if the lengths
    differ.
    """
    for change in found:
        prefix = f"model.{change.name}"
        if change.requantizes and key.startswith(prefix):
            suffix = key.removeprefix(prefix)
            if suffix in _SUFFIXES or (suffix in (f"_{KEY}", f"_{DRAWS}") and (there is None or here is None)):
                return True
        if change.index is not None and key.startswith(f"optimizer.state.{change.index}.{MASTER}"):
            return change.sets_master or here is None
    return is_history(key) and (there is None or here is None or getattr(there, "size", None) != here.shape)


@torch.no_grad()
def begin_histories(model: nn.Module, ignored: Collection[str]) -> None:
    """Zero the model's amax histories that a load ignores, given by their keys in the checkpoint."""
    histories = dict(model.named_buffers())
    for name, param in components.named_parameters(model).items():
        local = components.quantized_local(param)
        if local is not None and AMAX_HISTORY in local.quantized_storage.state:
            histories[f"{name}_{AMAX_HISTORY}"] = local.quantized_storage.state[AMAX_HISTORY]
    for name, history in histories.items():
        if is_history(name) and f"model.{name}" in ignored:
            history.zero_()


@torch.no_grad()
def write_weights(reader: SafeReader, found: list[ParameterConversion]) -> Iterator[tuple[ParameterConversion, Tensor]]:
    """Read the values of the converted parameters in batches, and quantize them. Yields the values of new masters.

    A collective call of every rank, which must exhaust the iterator.
    """
    for batch in batches(found, lambda change: change.param):
        tensors: dict[str, Tensor] = {}
        value_readers = [_reading(change, reader.entries, tensors) for change in batch]
        reader.read_into(dict(tensors))
        values = [compute() for compute in value_readers]
        agreement.run_on_all_ranks(partial(_check_finite, reader.path, batch, values))
        updates = []
        for change, value in zip(batch, values, strict=True):
            if not change.requantizes:
                continue
            local = components.quantized_local(change.param)
            if local is None:
                private_torch.local_tensor(change.param).copy_(value)
                continue
            updates.append((change.param, value))
        requantize.requantize_(updates, assume_finite=True)
        yield from ((c, value) for c, value in zip(batch, values, strict=True) if c.sets_master)


def _check_finite(path: object, batch: list[ParameterConversion], values: list[Tensor]) -> None:
    for change, value in zip(batch, values, strict=True):
        local = components.quantized_local(change.param)
        problem = (
            ""
            if local is None or not change.requantizes
            else requantize.non_finite(value, local.quantized_storage.shard.origin)
        )
        if problem:
            raise CheckpointError(
                f"{path}: {change.name} by {_told(change.source)}: {problem}; codes saturate, which would hide it"
            )


Change = TypeVar("Change")


def batches(found: Iterable[Change], param_of: Callable[[Change], Tensor]) -> Iterator[list[Change]]:
    """Group changes of parameters into batches of up to `BATCH_ELEMENTS` elements, or of one larger parameter."""
    batch: list[Change] = []
    for change in found:
        if batch and sum(param_of(batch_change).numel() for batch_change in (*batch, change)) > BATCH_ELEMENTS:
            yield batch
            batch = []
        batch.append(change)
    if batch:
        yield batch


def _reading(
    change: ParameterConversion, stored: Mapping[str, STORAGE_TYPES], tensors: dict[str, Tensor]
) -> Callable[[], Tensor]:
    """Add the tensors to read to `tensors`, by key. Returns a function that computes the local float32 values."""
    weight, state = f"model.{change.name}", f"optimizer.state.{change.index}."
    if change.source == "split master" and change.saved != HIGH_PRECISION:
        fmt, _ = format_of_tag(change.saved)
        assert fmt is not None, change.saved
        storage = _codes_of(change.param, weight, QuantSpec(fmt), tensors)
        low_bytes = tensors[state + _LOW] = components.zeros_like(change.param, torch.uint8)
        copy, origin = fmt.copies[Orientation.ROWWISE], storage.shard.origin
        return lambda: split_codes.dequantize(copy, storage.touched(), private_torch.local_tensor(low_bytes), origin)
    if change.source == "split master":
        high = tensors[weight] = components.zeros_like(change.param, torch.bfloat16)
        low = tensors[state + _LOW] = components.zeros_like(change.param, torch.uint8, 2)
        parts = (private_torch.local_tensor(part) for part in (high, low))
        return lambda: numerics.join_bfloat16(next(parts), next(parts).view(torch.int16).squeeze(-1))
    key = state + MASTER if change.source == "master" else weight
    dtype = dtype_of(stored[key])
    cell: QuantSpec | None = None
    if change.source == "master" and key + _SCALE in stored and dtype is not None:
        cell = STATE_CELLS[dtype]
    elif change.source == "codes" and change.saved != HIGH_PRECISION:
        fmt, _ = format_of_tag(change.saved)
        assert fmt is not None, change.saved
        cell = QuantSpec(fmt)
    return stored_values(change.param, key, dtype or torch.float32, cell, tensors)


def stored_values(
    param: Tensor, key: str, dtype: torch.dtype, cell: QuantSpec | None, tensors: dict[str, Tensor]
) -> Callable[[], Tensor]:
    """Add the tensors to read for one stored tensor of a parameter's shape to `tensors`, by key.

    The tensor is stored under `key`, as plain numbers of `dtype` or as codes and scales of `cell`. Returns a function
    that computes this rank's float32 values from the tensors that were read.
    """
    if cell is not None:
        return _codes_of(param, key, cell, tensors).dequantize
    plain = tensors[key] = components.zeros_like(param, dtype)
    return lambda: private_torch.local_tensor(plain).float()


def _codes_of(param: Tensor, key: str, cell: QuantSpec, tensors: dict[str, Tensor]) -> QuantizedStorage:
    """An empty storage whose components are added to `tensors`, to be read from the entries of `key`."""
    device = private_torch.local_tensor(param).device
    storage = storages.empty(cell, components.shard_of(param), device)
    for name, part in components.storage_tensors(storage, param).items():
        tensors[key + cell.format.by_name[name].key_suffix] = part
    return storage


def set_masters(optimizer: Optimizer | None, values: list[tuple[ParameterConversion, Tensor]]) -> None:
    """Write values into masters of another kind than the stored ones."""
    seed_master: Any = getattr(optimizer, "seed_master", None)
    for change, value in values:
        seed_master(change.param, value)


def _weight_notices(found: list[ParameterConversion]) -> list[str]:
    """Sentences about the converted weights and masters: counts, formats and sources."""
    counts = Counter((c.saved, c.own, c.source) for c in found if c.requantizes)
    lines = ", ".join(f"{n} from {old} to {new} by {_told(source)}" for (old, new, source), n in counts.items())
    master_changes = [c for c in found if c.sets_master and not c.requantizes]
    # plain values are exact masters, so such changes are not reported
    reported_changes = [c for c in master_changes if c.own != HIGH_PRECISION or c.source != "codes"]
    new = sum(c.source == "codes" for c in reported_changes)
    sentences = [f"weights were requantized: {lines}"] if lines else []
    if len(reported_changes) > new:
        sentences.append(
            f"masters are kept otherwise here, and were made of the stored ones: {len(reported_changes) - new}"
        )
    if new:
        sentences.append(f"weights have masters here that had none, made of their codes: {new}")
    return sentences


def _told(source: str) -> str:
    return "their dequantized codes, WITHOUT masters" if source == "codes" else "their masters"


# Optimizer states


@dataclass(frozen=True)
class StateConversion:
    """An optimizer state that is not loaded as it is stored.

    `param`, `role`, `key`: its parameter, its name in the optimizer, and its key in the checkpoint. `stored_kind`,
    `live_kind`: the stored and the live dtype, each with the format of its codes and scales, or None for plain values.
    """

    param: Tensor
    role: str
    key: str
    stored_kind: tuple[torch.dtype, QuantSpec | None]
    live_kind: tuple[torch.dtype, QuantSpec | None]

    @property
    def keys(self) -> list[str]:
        """The keys that the state can have in the checkpoint or in this optimizer."""
        return [self.key, *(self.key + suffix for suffix in STATE_SCALE_SUFFIXES)]


def state_conversions(
    reader: SafeReader, optimizer: Optimizer | None, numbers: ParameterNumbers | None
) -> list[StateConversion]:
    """The states of a quantshard optimizer that the checkpoint has in another dtype. The same on every rank."""
    if optimizer is None or not hasattr(optimizer, "set_scaled_state"):
        return []
    entries, conversions = reader.entries, []
    number_by_id = numbers_of(optimizer, numbers)
    for group in optimizer.param_groups:
        for param in group["params"]:
            live = optimizer.state.get(param, {})
            for role in _roles(live):
                key = f"optimizer.state.{number_by_id.get(id(param))}.{role}"
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
        value_readers = [stored_values(change.param, change.key, *change.stored_kind, tensors) for change in batch]
        reader.read_into(dict(tensors))
        values = [compute() for compute in value_readers]
        agreement.run_on_all_ranks(partial(_check_finite_states, reader.path, batch, values))
        for change, value in zip(batch, values, strict=True):
            optimizer.set_scaled_state(change.param, change.role, value)


def _check_finite_states(path: object, batch: list[StateConversion], values: list[Tensor]) -> None:
    for change, value in zip(batch, values, strict=True):
        if count := int(value.isfinite().logical_not().sum()):
            raise CheckpointError(
                f"{path}: {count} values of {change.key} are infinite or NaN, and rounded to another dtype they would "
                "spoil those that share a scale with them"
            )


def notices(conversions: list[ParameterConversion], states: list[StateConversion]) -> list[str]:
    """Sentences about what was converted: counts, names, formats and sources."""
    counts = Counter((c.role, _named(c.stored_kind), _named(c.live_kind)) for c in states)
    lines = ", ".join(f"{n} {role} from {old} to {new}" for (role, old, new), n in counts.items())
    return [*_weight_notices(conversions), *([f"states are kept in other dtypes here: {lines}"] if lines else [])]


def _named(kind: tuple[torch.dtype, QuantSpec | None]) -> str:
    dtype, cell = kind
    return str(dtype).removeprefix("torch.") if cell is None else cell.tag
