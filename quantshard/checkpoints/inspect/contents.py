"""What is inside a checkpoint, tensor by tensor: formats, shapes, bytes, scales, and what the codes say.

The components of a quantized weight are found by its `X_format`, those of an optimizer state in blocks by its scale.
Data are read a chunk at a time, so that memory is that of the largest chunk.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import STORAGE_TYPES, TensorStorageMetadata

from quantshard import numerics, sharding
from quantshard.checkpoints.untrusted.reader import SafeReader
from quantshard.errors import CheckpointError
from quantshard.formats import FORMATS, Component, Encoding, Format, Role
from quantshard.recipe import format_of_tag
from quantshard.state_cells import stored_state_cell
from quantshard.tensor.components import FORMAT_SUFFIX, FORMAT_TAG_BYTES, read_format_tag
from quantshard.tensor.storage import AMAX_HISTORY, DRAWS, KEY

STATE_MARK = ".state."
"""Part of the key of every optimizer state."""

_AT_ONCE = 1 << 20
"""Elements looked at at a time."""


@dataclass(frozen=True)
class TensorGroup:
    """The entries of one tensor: `tag` names its format, or its dtype; `format` is the row, None for a plain tensor.

    `shape`: of the tensor, None where its components do not say one. `parts`: key of each component by its name (of a
    plain tensor `codes` alone). `others`: keys of its random key, draws, history and tag. `wrong`: what is wrong.
    """

    name: str
    tag: str
    format: Format | None
    shape: tuple[int, ...] | None
    parts: Mapping[str, str]
    others: tuple[str, ...] = ()
    wrong: tuple[str, ...] = ()


@dataclass
class TensorStatistics:
    """What the data of one tensor say: of its codes how many are zero, and how many of the largest magnitude; the
    smallest and largest scale (times the second scale, where there is one); and whether a scale is not finite."""

    elements: int = 0
    zeros: int = 0
    saturated: int = 0
    scales: tuple[float, float] | None = None
    wrong: list[str] = field(default_factory=list)


def groups(reader: SafeReader) -> list[TensorGroup]:
    """The tensors of a checkpoint, in the order of their names.

    Raises:
        CheckpointError: a tag cannot be read from its file.
    """
    entries = reader.read_metadata().state_dict_metadata
    found: dict[str, TensorGroup] = {}
    for key, entry in entries.items():
        weight = key.removesuffix(FORMAT_SUFFIX)
        if key.endswith(FORMAT_SUFFIX) and _is_tag(entry) and weight in entries:
            found[weight] = _weight(weight, reader.tensor(key), entries)
    for key, entry in entries.items():
        if STATE_MARK in key and isinstance(entry, TensorStorageMetadata):
            cell = stored_state_cell(key, entry.properties.dtype, entries)
            if cell is not None:
                shape = tuple(entry.size)
                found[key] = _with_parts(key, cell.tag, cell.format, shape, entries, ())
    taken = {key for group in found.values() for key in (*group.parts.values(), *group.others)}
    for key, entry in entries.items():
        if key not in taken and isinstance(entry, TensorStorageMetadata):
            dtype = str(entry.properties.dtype).removeprefix("torch.")
            found[key] = TensorGroup(key, dtype, None, tuple(entry.size), {"codes": key})
    return [found[name] for name in sorted(found)]


def _is_tag(entry: STORAGE_TYPES) -> bool:
    return isinstance(entry, TensorStorageMetadata) and entry.size == (FORMAT_TAG_BYTES,)


def _weight(name: str, tag: Tensor, entries: Mapping[str, STORAGE_TYPES]) -> TensorGroup:
    others = [f"{name}{FORMAT_SUFFIX}", *(f"{name}_{state}" for state in (KEY, DRAWS, AMAX_HISTORY))]
    there = tuple(key for key in others if isinstance(entries.get(key), TensorStorageMetadata))
    try:
        text = read_format_tag(tag)
    except CheckpointError as error:
        what = f"version {int(tag[0])}" if tag.dtype == torch.uint8 else str(tag.dtype)
        return TensorGroup(name, what, None, None, _codes_alone(name, entries), there, (str(error),))
    fmt, keeps_amaxes = format_of_tag(text)
    if fmt is None:
        unknown = f"its format {text!r:.40} is none that this quantshard knows"
        return TensorGroup(name, repr(text)[:40], None, None, _codes_alone(name, entries), there, (unknown,))
    lacking = [key for key in others[: 4 if keeps_amaxes else 3] if key not in there]
    codes = entries[name]
    size = codes.size if isinstance(codes, TensorStorageMetadata) else torch.Size([])
    packed, padding = fmt.by_name["codes"].block_shape[1], int(tag[-1])
    if len(size) != 2 or padding > min(size[1], 1) * (packed - 1):
        line = f"its codes have the shape {list(size)}, and its format tag says {padding} of padding"
        return TensorGroup(name, text, None, None, _codes_alone(name, entries), there, (line,))
    shape = (size[0], size[1] * packed - padding)
    wrong = tuple(f"{key} is missing" for key in lacking)
    return _with_parts(name, text, fmt, shape, entries, there, wrong)


def _codes_alone(name: str, entries: Mapping[str, STORAGE_TYPES]) -> dict[str, str]:
    """The parts of a weight whose format is not known."""
    return {"codes": name} if isinstance(entries[name], TensorStorageMetadata) else {}


def _with_parts(
    name: str,
    tag: str,
    fmt: Format,
    shape: tuple[int, ...],
    entries: Mapping[str, STORAGE_TYPES],
    others: tuple[str, ...],
    wrong: tuple[str, ...] = (),
) -> TensorGroup:
    """A group with those components that are there, and a line for each that is missing or does not fit."""
    parts, lines = {}, list(wrong)
    for component in fmt.components:
        key = name + component.key_suffix
        entry = entries.get(key)
        if not isinstance(entry, TensorStorageMetadata):
            lines.append(f"{key} is missing")
            continue
        parts[component.name] = key
        wanted = sharding.whole((shape[0], shape[1])).component_shape(component) if len(shape) == 2 else None
        found, dtype = tuple(entry.size), entry.properties.dtype
        if wanted is None:  # a state; those of ours that are of no matrix have no scales
            lines.append(
                f"{key} is {dtype} {list(found)}, and {tag} has blocks of matrices, which {list(shape)} is not"
            )
        elif found != wanted or dtype != component.encoding.storage:
            lines.append(
                f"{key} is {dtype} {list(found)}, and {tag} of {list(shape)} has {component.encoding.storage} "
                f"{list(wanted)} there"
            )
    return TensorGroup(name, tag, fmt, tuple(shape), parts, others, tuple(lines))


# Data


def figures(reader: SafeReader, group: TensorGroup) -> TensorStatistics:
    """What the data of a tensor say; of a plain one only that they can be read.

    Raises:
        CheckpointError: naming the entry that cannot be read.
    """
    found = TensorStatistics()
    for key in group.others:
        for _ in reader.pieces(key):
            pass
    second = 1.0
    for component, key in _components(group):
        if component is None:
            for _ in reader.pieces(key):
                pass
        elif component.role is Role.CODES:
            _count(found, component, reader, key)
        else:
            second *= _measure(found, component, reader, key)
    if group.format is not None and group.shape is not None and found.elements and not group.wrong:
        copies = len(group.format.copies)
        padding = found.elements - copies * math.prod(group.shape)
        found.elements, found.zeros = found.elements - padding, found.zeros - padding  # pads are codes of zero
    if found.scales is not None:
        found.scales = (found.scales[0] * second, found.scales[1] * second)
    return found


def _components(group: TensorGroup) -> Iterator[tuple[Component | None, str]]:
    for name, key in group.parts.items():
        yield (None if group.format is None else group.format.by_name[name]), key


def _count(found: TensorStatistics, component: Component, reader: SafeReader, key: str) -> None:
    for _, codes in reader.pieces(key):
        if codes.dtype == component.encoding.storage:
            elements, zeros, saturated = count_codes(codes, component.encoding)
            found.elements, found.zeros = found.elements + elements, found.zeros + zeros
            found.saturated += saturated


def count_codes(codes: Tensor, encoding: Encoding) -> tuple[int, int, int]:
    """How many codes there are, how many of them are zero, and how many have the largest magnitude or more."""
    per_byte = max(1, 8 // encoding.bits)
    elements = zeros = saturated = 0
    for part in codes.reshape(-1).split(_AT_ONCE):
        if encoding.bits > 8:
            magnitudes = part.float().abs()
            zeros += int((magnitudes == 0).sum())
            saturated += int((magnitudes < encoding.max).logical_not().sum())
        else:
            counts = torch.bincount(part.int(), minlength=256)
            bytes_ = torch.arange(256, dtype=torch.uint8, device="cpu").unsqueeze(1)
            values = numerics.decode(numerics.unpack(bytes_, encoding, per_byte), encoding).abs()
            zeros += int((counts * (values == 0).sum(1)).sum())
            saturated += int((counts * (values < encoding.max).logical_not().sum(1)).sum())
        elements += part.numel() * per_byte
    return elements, zeros, saturated


def _measure(found: TensorStatistics, component: Component, reader: SafeReader, key: str) -> float:
    """Note the range of a scale, or give the factor of a second one."""
    factor = 1.0
    for _, stored in reader.pieces(key):
        if stored.dtype != component.encoding.storage or not stored.numel():
            continue
        values = numerics.decode(stored, component.encoding)
        bad = int((~values.isfinite() | (values < 0)).sum())
        if bad:
            found.wrong.append(f"{key}: {bad} of {values.numel()} {component.role.value} entries are not finite")
        elif component.role is Role.SCALE:
            low, high = float(values.min()), float(values.max())
            before = found.scales or (low, high)
            found.scales = (min(before[0], low), max(before[1], high))
        else:
            factor = float(values.max())
    return factor / _second_divisor(component) if component.role is Role.AMAX else 1.0


def _second_divisor(component: Component) -> float:
    """What the amax is divided by to give the second scale: the largest product of a scale and a code."""
    copies = (copy for fmt in FORMATS.values() for copy in fmt.copies.values() if copy.amax == component)
    copy = next(copies)
    return copy.scale.encoding.max * copy.codes.encoding.max


def group_bytes(reader: SafeReader, group: TensorGroup) -> int:
    """Bytes of the values of a group's entries."""
    entries, total = reader.read_metadata().state_dict_metadata, 0
    for key in (*group.parts.values(), *group.others):
        entry = entries[key]
        if isinstance(entry, TensorStorageMetadata):
            total += entry.size.numel() * entry.properties.dtype.itemsize
    return total


def chunks(reader: SafeReader, group: TensorGroup) -> int:
    """In how many pieces the codes, or the values, are stored."""
    entry = reader.read_metadata().state_dict_metadata[group.parts.get("codes", group.name)]
    return len(entry.chunks) if isinstance(entry, TensorStorageMetadata) else 0


def opened(path: str | os.PathLike[str]) -> SafeReader:
    """A reader of a checkpoint whose metadata have been read.

    Raises:
        CheckpointError: they cannot be read.
    """
    reader = SafeReader(path)
    reader.read_metadata()
    return reader
