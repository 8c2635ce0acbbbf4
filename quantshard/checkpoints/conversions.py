"""Conversions of a load into another recipe: weights are quantized again, from the checkpoint's masters if possible.

A weight becomes the nearest quantization of its float32 master, bit-identical on all meshes. Each rank reads its own
shards in batches; if masters change their kind, it holds the values of all of them. Optimizer states that this
optimizer stores in another dtype are rounded to nearest.
"""

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
from quantshard.checkpoints.optimizer_states import STATES, ParameterNumbers, by_number, numbers_of
from quantshard.checkpoints.safe_read import SafeReader, dtype_of
from quantshard.errors import CheckpointError
from quantshard.formats import FORMATS, Format, Orientation
from quantshard.numerics import split_codes
from quantshard.numerics.states import AVERAGE, MASTER, REMAINDER_SUFFIX
from quantshard.recipe import QuantSpec
from quantshard.recipe_table import format_of_tag
from quantshard.state_storage import STATE_QUANT_SPECS, STATE_SCALE_SUFFIXES, scaled_state, stored_state_spec
from quantshard.tensor import components, requantize, storage as storages
from quantshard.tensor.parameter_state import AMAX_HISTORY, RNG_DRAWS, RNG_KEY
from quantshard.tensor.storage import QuantizedStorage

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


class RequantizedWarning(UserWarning):
    """Weights of a checkpoint were quantized again, to the formats of another recipe."""


@dataclass(frozen=True)
class ParameterConversion:
    """A parameter that is not loaded as it is stored.

    `index`: its number in the optimizer. `source`: the entries its values are read from: "master", "split master" or
    "codes" (also for plain values). `sets_master`: whether to write the optimizer's master too.
    """

    name: str
    param: Tensor
    index: int | None
    stored_format: str
    live_format: str
    source: str
    sets_master: bool

    @property
    def requantizes(self) -> bool:
        """Whether the weight itself is written from the values, and not only its master."""
        return self.stored_format != self.live_format

    def add_tensors(self, stored: Mapping[str, STORAGE_TYPES], tensors: dict[str, Tensor]) -> Callable[[], Tensor]:
        """Add the tensors to read to `tensors`, by key. Returns a function that computes the local float32 values."""
        param, state, fmt = self.param, f"{STATES}{self.index}.", format_of_tag(self.stored_format)[0]
        key = state + MASTER if self.source == "master" else f"model.{self.name}"
        if self.source == "split master" and fmt is not None:
            storage = _codes_of(param, key, _weight_spec(param, fmt), tensors)
            low_bytes = tensors[state + _LOW] = components.zeros_like(param, torch.uint8)
            copy, origin = storage.spec.format.copies[Orientation.ROWWISE], storage.shard.origin
            return lambda: split_codes.dequantize(
                copy, storage.touched(), private_torch.local_tensor(low_bytes).flatten(0, -2), origin
            )
        if self.source == "split master":
            high = tensors[key] = components.zeros_like(param, torch.bfloat16)
            low = tensors[state + _LOW] = components.zeros_like(param, torch.uint8, 2)
            parts = (private_torch.local_tensor(part) for part in (high, low))
            return lambda: numerics.join_bfloat16(next(parts), next(parts).view(torch.int16).squeeze(-1))
        dtype = dtype_of(stored[key]) or torch.float32
        is_scaled = self.source == "master" and key + _SCALE in stored
        spec = STATE_QUANT_SPECS[dtype] if is_scaled else None
        if self.source == "codes" and fmt is not None:
            spec = _weight_spec(param, fmt)
        return stored_values(param, key, dtype, spec, tensors)

    def problem(self, value: Tensor) -> str:
        if components.quantized_local(self.param) is None or not self.requantizes:
            return ""
        problem = requantize.non_finite(value, components.storage_of(self.param).shard.origin)
        return problem and f"{self.name} by {_described(self.source)}: {problem}; codes saturate, which would hide it"


def parameter_conversions(
    reader: SafeReader,
    model: nn.Module,
    optimizer: Optimizer | None,
    numbers: ParameterNumbers | None,
    formats: Mapping[str, tuple[str, str]],
    lossy: bool,
) -> list[ParameterConversion]:
    """The parameters that must be converted, by their `fit.weight_formats`. The same on every rank."""
    entries, number_by_id = reader.entries, {} if optimizer is None else numbers_of(optimizer, numbers)
    stored_states = by_number(entries)
    conversions, unconvertible = [], []
    seen_ids: set[int] = set()
    for name, param in components.named_parameters(model).items():
        stored_format, live_format = formats.get(name, (HIGH_PRECISION, HIGH_PRECISION))
        index = number_by_id.get(id(param))
        state = {} if optimizer is None else optimizer.state.get(param, {})
        roles = stored_states.get(index, {}).items()
        stored_masters = {role: dtype_of(entry) for role, entry in roles if role.startswith(MASTER)}
        live_masters = {key: value.dtype for key, value in state.items() if key.startswith(MASTER)}
        # A remainder belongs to the codes of one format.
        is_other_remainder = _LOW in live_masters and stored_format != live_format
        sets_master = bool(live_masters) and (live_masters != stored_masters or is_other_remainder)
        if id(param) in seen_ids or (stored_format == live_format and not sets_master):
            continue
        seen_ids.add(id(param))
        source = "master" if MASTER in stored_masters else "split master" if _LOW in stored_masters else "codes"
        if source == "codes" and stored_format != live_format and not (lossy or stored_format == HIGH_PRECISION):
            unconvertible.append(f"{name} ({stored_format})")
        if sets_master and not hasattr(optimizer, "seed_master"):
            raise CheckpointError(f"{reader.path}: this optimizer cannot convert the master of {name}; use FusedAdam")
        conversions.append(ParameterConversion(name, param, index, stored_format, live_format, source, sets_master))
    if unconvertible:
        reason = "no optimizer was given" if optimizer is None else "it has no masters"
        problem = f"{len(unconvertible)} weights are of another recipe, the first {unconvertible[0]}, and {reason}"
        remedy = "to quantize their dequantized codes, which is less precise, pass lossy=True (or --lossy)"
        raise CheckpointError(f"{reader.path}: {problem}; {remedy}")
    return conversions


def converted_keys(
    conversions: list[ParameterConversion], stored: Mapping[str, STORAGE_TYPES], live: Mapping[str, Any]
) -> set[str]:
    """The keys of either side that a load does not read, because they are converted or keep their live value."""
    keys = stored.keys() | live.keys()
    on_both_sides = stored.keys() & live.keys()
    states = by_number(dict.fromkeys(keys))
    # RNG keys and draw counts are read if both sides have them, and amax histories if the lengths are equal too
    histories = {key for key in keys if key.endswith(AMAX_HISTORY)}
    converted = {k for k in histories if getattr(stored.get(k), "size", None) != getattr(live.get(k), "shape", None)}
    for conversion in conversions:
        if conversion.requantizes:
            weight = f"model.{conversion.name}"
            converted |= {weight + suffix for suffix in _SUFFIXES}
            converted |= {f"{weight}_{RNG_KEY}", f"{weight}_{RNG_DRAWS}"} - on_both_sides
        names = states.get(conversion.index, {})
        masters = {f"{STATES}{conversion.index}.{name}" for name in names if name.startswith(MASTER)}
        converted |= masters if conversion.sets_master else masters - live.keys()
    return converted & keys


@torch.no_grad()
def begin_histories(model: nn.Module, ignored: Collection[str]) -> None:
    """Zero the model's amax histories that a load ignores, given by their keys in the checkpoint."""
    histories = dict(model.named_buffers())
    for name, param in components.named_parameters(model).items():
        storage = components.quantized_storage(param)
        if storage is not None and AMAX_HISTORY in storage.state:
            histories[f"{name}_{AMAX_HISTORY}"] = storage.state[AMAX_HISTORY]
    for name, history in histories.items():
        if name.endswith(AMAX_HISTORY) and f"model.{name}" in ignored:
            history.zero_()


@torch.no_grad()
def write_weights(
    reader: SafeReader, conversions: list[ParameterConversion]
) -> Iterator[tuple[ParameterConversion, Tensor]]:
    """Quantize the converted weights in batches. Yields the values of new masters; all ranks must exhaust it."""
    for batch in _read_in_batches(reader, conversions):
        updates = []
        for conversion, value in batch:
            if not conversion.requantizes:
                continue
            if components.quantized_local(conversion.param) is None:
                local = private_torch.local_tensor(conversion.param)
                local.copy_(value.view(local.shape))
            else:
                updates.append((conversion.param, value))
        requantize.requantize_(updates, assume_finite=True)
        yield from ((conversion, value) for conversion, value in batch if conversion.sets_master)


T = TypeVar("T")
Conversion = TypeVar("Conversion", bound="ParameterConversion | StateConversion")


def _read_in_batches(
    reader: SafeReader, conversions: Iterable[Conversion]
) -> Iterator[list[tuple[Conversion, Tensor]]]:
    """Read the float32 values of a batch of conversions at a time, and check them on all ranks. A collective call."""
    for batch in in_batches(conversions, lambda conversion: conversion.param.numel(), BATCH_ELEMENTS):
        tensors: dict[str, Tensor] = {}
        computations = [conversion.add_tensors(reader.entries, tensors) for conversion in batch]
        reader.read_into(dict(tensors))
        pairs = [(conversion, compute()) for conversion, compute in zip(batch, computations, strict=True)]
        agreement.run_on_all_ranks(partial(_check_finite, reader.path, pairs))
        yield pairs


def _check_finite(path: object, pairs: Iterable[tuple[Conversion, Tensor]]) -> None:
    for conversion, value in pairs:
        if problem := conversion.problem(value):
            raise CheckpointError(f"{path}: {problem}")


def in_batches(items: Iterable[T], size_of: Callable[[T], int], limit: int) -> Iterator[list[T]]:
    """Group consecutive items into batches of up to `limit` in total size, or of one larger item."""
    batch: list[T] = []
    total = 0
    for item in items:
        size = size_of(item)
        if batch and total + size > limit:
            yield batch
            batch, total = [], 0
        batch.append(item)
        total += size
    if batch:
        yield batch


def stored_values(
    param: Tensor, key: str, dtype: torch.dtype, spec: QuantSpec | None, tensors: dict[str, Tensor]
) -> Callable[[], Tensor]:
    """Add the tensors to read for `key`, plain or of `spec`. Returns a function of this rank's float32 values."""
    if spec is not None:
        return _codes_of(param, key, spec, tensors).dequantize
    plain = tensors[key] = components.zeros_like(param, dtype)
    storage = components.quantized_storage(param)
    return lambda: components.as_matrix(private_torch.local_tensor(plain).float(), storage)


def _weight_spec(param: Tensor, fmt: Format) -> QuantSpec:
    return QuantSpec(fmt).stacked(param.shape[1]) if param.ndim == 3 else QuantSpec(fmt)


def _codes_of(param: Tensor, key: str, spec: QuantSpec, tensors: dict[str, Tensor]) -> QuantizedStorage:
    device = private_torch.local_tensor(param).device
    storage = storages.empty(spec, components.shard_of(param), device)
    for name, part in components.storage_tensors(storage, param).items():
        tensors[key + spec.format.by_name[name].key_suffix] = part
    return storage


@dataclass(frozen=True)
class StateConversion:
    """An optimizer state that is not loaded as it is stored: its dtypes, with formats of codes and scales, if any."""

    param: Tensor
    role: str
    key: str
    stored_kind: tuple[torch.dtype, QuantSpec | None]
    live_kind: tuple[torch.dtype, QuantSpec | None]

    @property
    def keys(self) -> list[str]:
        return [self.key, *(self.key + suffix for suffix in STATE_SCALE_SUFFIXES)]

    def add_tensors(self, stored: Mapping[str, STORAGE_TYPES], tensors: dict[str, Tensor]) -> Callable[[], Tensor]:
        return stored_values(self.param, self.key, *self.stored_kind, tensors)

    def problem(self, value: Tensor) -> str:
        count = int(value.isfinite().logical_not().sum())
        return f"{count} values of {self.key} are infinite or NaN, and would spoil their blocks" if count else ""


def state_conversions(
    reader: SafeReader, optimizer: Optimizer | None, numbers: ParameterNumbers | None
) -> list[StateConversion]:
    if optimizer is None or not hasattr(optimizer, "set_scaled_state"):
        return []
    entries, conversions = reader.entries, []
    number_by_id = numbers_of(optimizer, numbers)
    for group in optimizer.param_groups:
        for param in group["params"]:
            live = optimizer.state.get(param, {})
            for role, value in live.items():
                if not isinstance(value, Tensor) or role.startswith((MASTER, AVERAGE)) or scaled_state(role):
                    continue
                key = f"optimizer.state.{number_by_id.get(id(param))}.{role}"
                entry = entries.get(key)
                if not isinstance(entry, TensorStorageMetadata) or entry.size != value.shape:
                    continue  # of another optimizer or model, which `fit` reports
                stored_kind = entry.properties.dtype, stored_state_spec(key, entry.properties.dtype, entries)
                live_kind = value.dtype, stored_state_spec(role, value.dtype, live)
                is_known = stored_kind[1] is not None or stored_kind[0] in (torch.float32, torch.bfloat16)
                if stored_kind != live_kind and is_known:
                    conversions.append(StateConversion(param, role, key, stored_kind, live_kind))
    return conversions


def write_states(reader: SafeReader, conversions: list[StateConversion], optimizer: Any) -> None:
    """Read the states and write their values into the optimizer, in batches. A collective call."""
    for batch in _read_in_batches(reader, conversions):
        for conversion, value in batch:
            optimizer.set_scaled_state(conversion.param, conversion.role, value)


def description(weights: list[ParameterConversion], states: list[StateConversion]) -> str:
    """A sentence about what was converted: counts, names, formats and sources. "" if nothing was."""
    requantized = Counter((c.stored_format, c.live_format, _described(c.source)) for c in weights if c.requantizes)
    # plain values are exact masters, so masters made of them are not reported
    masters = Counter(
        "their dequantized codes" if c.source == "codes" else "the stored masters"
        for c in weights
        if c.sets_master and not c.requantizes and (c.live_format != HIGH_PRECISION or c.source != "codes")
    )
    converted = Counter((c.role, _named(c.stored_kind), _named(c.live_kind)) for c in states)
    items = {
        "weights were requantized": [f"{n} from {old} to {new} by {by}" for (old, new, by), n in requantized.items()],
        "masters were made": [f"{n} of {source}" for source, n in sorted(masters.items(), reverse=True)],
        "states were converted": [f"{n} {role} from {old} to {new}" for (role, old, new), n in converted.items()],
    }
    return "; ".join(f"{title}: {', '.join(lines)}" for title, lines in items.items() if lines)


def _described(source: str) -> str:
    return "their dequantized codes, WITHOUT masters" if source == "codes" else "their masters"


def _named(kind: tuple[torch.dtype, QuantSpec | None]) -> str:
    dtype, spec = kind
    return str(dtype).removeprefix("torch.") if spec is None else spec.tag
