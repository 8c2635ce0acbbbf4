"""Loading into a model of another recipe: weights are quantized anew, from the masters of the checkpoint if it has any.

A weight whose format differs gets the nearest quantization of its float32 master, bit for bit that of one process,
whatever meshes the checkpoint was written on and is loaded on. A rank reads its own part, in batches: beside the
model and the optimizer it holds float32 values of `BATCH_ELEMENTS`, divided by the ranks, or of the largest weight;
where masters are to be of another kind than the stored ones, those of all of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import STORAGE_TYPES, Metadata, TensorStorageMetadata
from torch.optim import Optimizer

from quantshard import numerics, private_torch
from quantshard.checkpoints.disk import agreement
from quantshard.checkpoints.parameter_numbers import ParameterNumbers, numbers_of
from quantshard.checkpoints.untrusted.reader import Path_, read_into
from quantshard.errors import CheckpointError
from quantshard.formats import FORMATS, Orientation
from quantshard.numerics import split_codes
from quantshard.numerics.states import MASTER, REMAINDER_SUFFIX
from quantshard.recipe import QuantSpec, format_of_tag
from quantshard.state_cells import STATE_CELLS
from quantshard.tensor import components, requantize
from quantshard.tensor import storage as storages
from quantshard.tensor.storage import AMAX_HISTORY, DRAWS, KEY, QuantizedStorage

BATCH_ELEMENTS = 1 << 26
"""Elements, of all ranks together, whose float32 values are held at a time."""

HIGH_PRECISION = "high precision"
"""In place of a format's name."""

_LOW, _SCALE = MASTER + REMAINDER_SUFFIX, "_scale_inv"
_SUFFIXES = {
    "",
    components.FORMAT_SUFFIX,
    f"_{AMAX_HISTORY}",
    *(part.key_suffix for fmt in FORMATS.values() for part in fmt.components),
}
"""What a weight's entries that depend on its format end with."""


class RequantizedWarning(UserWarning):
    """Weights of a checkpoint were quantized anew, into the formats of another recipe."""


@dataclass(frozen=True)
class ParameterConversion:
    """A parameter that is not loaded as it is stored: its formats there and here, and what its values are read from.

    `index`: its number in the optimizer. `source`: "master", "split master" or "codes" (or plain values).
    `sets_master`: whether the optimizer's master is of another kind than the stored one, or what another format lacks,
    and so is written too.
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
        """Whether the weight, and not its master alone, is written from the values."""
        return self.saved != self.own


def changes(
    metadata: Metadata,
    model: nn.Module,
    optimizer: Optimizer | None,
    formats: Mapping[str, tuple[str, str]],
    lossy: bool,
) -> list[ParameterConversion]:
    """What must be made anew. The same on every rank.

    Args:
        formats: of each weight that is quantized there or here, its format there and here.

    Raises:
        CheckpointError: a weight has no master in the checkpoint, and `lossy` is false; or no optimizer was given, or
            one that has no `seed_master`, as FusedAdam has, for masters of another kind.
    """
    stored, numbers = metadata.state_dict_metadata, _numbers(model, optimizer)
    found, without = [], []
    seen: set[int] = set()
    for name, param in components.named_parameters(model).items():
        saved, own = formats.get(name, (HIGH_PRECISION, HIGH_PRECISION))
        index = numbers.get(id(param))
        sets_master = _sets_master(optimizer, param, index, stored, saved, own)
        if id(param) in seen or (saved == own and not sets_master):
            continue
        seen.add(id(param))
        source = _source(index, stored, saved)
        if source == "codes" and saved != own and not (lossy or saved == HIGH_PRECISION):
            without.append(f"{name} ({saved})")
        if sets_master and not hasattr(optimizer, "seed_master"):
            raise CheckpointError(
                f"the master of {name} is of another kind in the checkpoint, and a {type(optimizer).__name__} cannot "
                "take it; use FusedAdam, or what it was saved with"
            )
        found.append(ParameterConversion(name, param, index, saved, own, source, sets_master))
    if without:
        why = "no optimizer was given to tell which masters are whose" if optimizer is None else "it has no masters"
        raise CheckpointError(
            f"{len(without)} weights are of another recipe, the first {without[0]}, and {why}; allow "
            "it (lossy=True, or --lossy) to quantize their dequantized codes, which loses what the masters kept"
        )
    return found


def _numbers(model: nn.Module, optimizer: Optimizer | None) -> dict[int, int]:
    return {} if optimizer is None else numbers_of(optimizer, ParameterNumbers.of(model, optimizer))


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
    """Whether the optimizer has a master of this parameter, of another kind than the checkpoint."""
    live = _live_masters(optimizer, param)
    if _LOW in live and saved != own:  # it is beside codes that are not those of the checkpoint
        return True
    prefix = f"optimizer.state.{index}."
    theirs = {key.removeprefix(prefix) for key in stored if key.startswith(prefix + MASTER)}
    if not live or theirs != live.keys():
        return bool(live)
    return any(_dtype(stored[prefix + key]) != value.dtype for key, value in live.items())


def _dtype(entry: STORAGE_TYPES) -> torch.dtype | None:
    return entry.properties.dtype if isinstance(entry, TensorStorageMetadata) else None


def _source(index: int | None, stored: Mapping[str, STORAGE_TYPES], saved: str) -> str:
    if f"optimizer.state.{index}.{MASTER}" in stored:
        return "master"
    if f"optimizer.state.{index}.{_LOW}" in stored:
        return "split master"
    return "codes"


def is_history(key: str) -> bool:
    """Whether an entry is an amax history, which delayed recipes alone keep, of what they scale so."""
    return key.endswith(AMAX_HISTORY)


def left_out(found: list[ParameterConversion], key: str, there: STORAGE_TYPES | None, here: Any) -> bool:
    """Whether an entry, under its key in the checkpoint, is made anew or kept, and so not read.

    `there`, `here`: what the checkpoint and this model have under it; None: nothing. Random keys and draws are read
    where both have them; an amax history that one of them lacks, or has of another length, belongs to the recipe.
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
    """Clear the amax histories of a model that a load ignores, by their keys in the checkpoint."""
    found = dict(model.named_buffers())
    for name, param in components.named_parameters(model).items():
        local = components.quantized_local(param)
        if local is not None and AMAX_HISTORY in local.quantized_storage.state:
            found[f"{name}_{AMAX_HISTORY}"] = local.quantized_storage.state[AMAX_HISTORY]
    for name, history in found.items():
        if is_history(name) and f"model.{name}" in ignored:
            history.zero_()


@torch.no_grad()
def write_weights(
    path: Path_, metadata: Metadata, found: list[ParameterConversion]
) -> Iterator[tuple[ParameterConversion, Tensor]]:
    """Read the values of the changed parameters, batch by batch, and quantize them; gives those of new masters.

    A collective call of every rank, once it is run to its end.
    """
    for batch in batches(found, lambda change: change.param):
        tensors: dict[str, Tensor] = {}
        finish = [_reading(change, metadata.state_dict_metadata, tensors) for change in batch]
        read_into(path, metadata, dict(tensors))
        values = [done() for done in finish]
        agreement.alike(partial(_check_finite, path, batch, values))
        quantized = []
        for change, value in zip(batch, values, strict=True):
            if not change.requantizes:
                continue
            local = components.quantized_local(change.param)
            if local is None:
                private_torch.local_tensor(change.param).copy_(value)
                continue
            quantized.append((change.param, value))
        requantize.requantize_(quantized, assume_finite=True)
        yield from ((c, value) for c, value in zip(batch, values, strict=True) if c.sets_master)


def _check_finite(path: Path_, batch: list[ParameterConversion], values: list[Tensor]) -> None:
    for change, value in zip(batch, values, strict=True):
        local = components.quantized_local(change.param)
        told = (
            ""
            if local is None or not change.requantizes
            else requantize.non_finite(value, local.quantized_storage.shard.origin)
        )
        if told:
            raise CheckpointError(
                f"{path}: {change.name} by {_told(change.source)}: {told}; codes saturate, which would hide it. The "
                "model is loaded in part: load another checkpoint"
            )


Change = TypeVar("Change")


def batches(found: Iterable[Change], param_of: Callable[[Change], Tensor]) -> Iterator[list[Change]]:
    """As many changes of parameters at a time as have `BATCH_ELEMENTS` together, one at least."""
    batch: list[Change] = []
    for change in found:
        if batch and sum(param_of(each).numel() for each in (*batch, change)) > BATCH_ELEMENTS:
            yield batch
            batch = []
        batch.append(change)
    if batch:
        yield batch


def _reading(
    change: ParameterConversion, stored: Mapping[str, STORAGE_TYPES], tensors: dict[str, Tensor]
) -> Callable[[], Tensor]:
    """Add to `tensors` what must be read, by key; the function then gives the local float32 values."""
    weight, state = f"model.{change.name}", f"optimizer.state.{change.index}."
    if change.source == "split master" and change.saved != HIGH_PRECISION:
        fmt, _ = format_of_tag(change.saved)
        assert fmt is not None, change.saved
        storage = _codes_of(change.param, weight, QuantSpec(fmt), tensors)
        rest = tensors[state + _LOW] = components.zeros_like(change.param, torch.uint8)
        copy, origin = fmt.copies[Orientation.ROWWISE], storage.shard.origin
        return lambda: split_codes.dequantize(copy, storage.touched(), private_torch.local_tensor(rest), origin)
    if change.source == "split master":
        high = tensors[weight] = components.zeros_like(change.param, torch.bfloat16)
        low = tensors[state + _LOW] = components.zeros_like(change.param, torch.uint8, 2)
        parts = (private_torch.local_tensor(part) for part in (high, low))
        return lambda: numerics.join_bfloat16(next(parts), next(parts).view(torch.int16).squeeze(-1))
    key = state + MASTER if change.source == "master" else weight
    dtype = _dtype(stored[key])
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
    """Add to `tensors` what is read of a tensor of a parameter's shape, which is stored under a key as plain numbers of
    a dtype or by a cell; the function then gives this rank's values, float32."""
    if cell is not None:
        return _codes_of(param, key, cell, tensors).dequantize
    plain = tensors[key] = components.zeros_like(param, dtype)
    return lambda: private_torch.local_tensor(plain).float()


def _codes_of(param: Tensor, key: str, cell: QuantSpec, tensors: dict[str, Tensor]) -> QuantizedStorage:
    """What components under a key are read into; they are added to `tensors`."""
    device = private_torch.local_tensor(param).device
    storage = storages.empty(cell, components.shard_of(param), device)
    for name, part in components.storage_tensors(storage, param).items():
        tensors[key + cell.format.by_name[name].key_suffix] = part
    return storage


def set_masters(optimizer: Optimizer | None, values: list[tuple[ParameterConversion, Tensor]]) -> None:
    """Write values into masters of another kind than the stored ones."""
    write: Any = getattr(optimizer, "seed_master", None)
    for change, value in values:
        write(change.param, value)


def told(found: list[ParameterConversion]) -> list[str]:
    """What was quantized anew, in words: how many weights, from what to what, by which values; and of how many others
    the masters were made, of what. Nothing if nothing was."""
    counts = Counter((c.saved, c.own, c.source) for c in found if c.requantizes)
    lines = ", ".join(f"{n} from {old} to {new} by {_told(source)}" for (old, new, source), n in counts.items())
    others = [c for c in found if c.sets_master and not c.requantizes]
    kept = [c for c in others if c.own != HIGH_PRECISION or c.source != "codes"]  # plain values lose nothing
    new = sum(c.source == "codes" for c in kept)
    words = [f"weights were quantized anew: {lines}"] if lines else []
    if len(kept) > new:
        words.append(f"masters are kept otherwise here, and were made of the stored ones: {len(kept) - new}")
    if new:
        words.append(f"weights have masters here that had none, made of their codes: {new}")
    return words


def _told(source: str) -> str:
    return "their dequantized codes, WITHOUT masters" if source == "codes" else "their masters"
