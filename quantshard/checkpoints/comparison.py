"""Bitwise comparison of two checkpoints, whatever processes and meshes wrote them, in one process.

Tensors are compared by their bytes: NaNs with equal bits are equal, and 0 differs from -0. Other entries are compared
by value, and states of single ranks only if the same number of ranks wrote both checkpoints.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import STORAGE_TYPES, BytesStorageMetadata, TensorStorageMetadata

from quantshard.checkpoints.disk.store import Path_
from quantshard.checkpoints.rank_states import RANKS, keys_by_rank
from quantshard.checkpoints.safe_read import SafeReader
from quantshard.checkpoints.saving import digest
from quantshard.errors import CheckpointError, shown

_OBJECT = "not a tensor"
_SLICE_ELEMENTS = 1 << 24


@dataclass(frozen=True)
class Difference:
    """One entry that differs, described by `what`.

    `index`: the first index that differs in the global tensor, for tensors of one shape and dtype. `count`: number of
    differing elements, out of `elements`. `largest`: largest difference of two floating-point values, infinite for NaN;
    None for codes and other entries. `only_in`: "A" or "B" if the other checkpoint lacks the entry.
    """

    key: str
    what: str
    index: tuple[int, ...] | None = None
    count: int = 0
    elements: int = 0
    largest: float | None = None
    only_in: str = ""

    def __str__(self) -> str:
        return f"{self.key}: {self.what}"


@dataclass(frozen=True)
class Comparison:
    """The result of `compare`: numbers of compared `tensors` and `others`, and `bytes` of tensors of one kind."""

    path_a: str
    path_b: str
    differences: tuple[Difference, ...]
    tensors: int
    others: int
    bytes: int
    keys: tuple[str, ...] = ()

    @property
    def equal(self) -> bool:
        """Whether nothing differs."""
        return not self.differences

    @property
    def first(self) -> Difference | None:
        """The first difference, or None."""
        return self.differences[0] if self.differences else None


def compare(path_a: Path_, path_b: Path_) -> Comparison:
    """Compare two checkpoints of `torch.distributed.checkpoint` bit by bit, in one process."""
    a, b = (SafeReader(path) for path in (path_a, path_b))
    keys = sorted(a.entries.keys() | b.entries.keys())
    if len(keys_by_rank(a.entries)) != len(keys_by_rank(b.entries)):
        keys = [key for key in keys if not key.startswith(f"{RANKS}.")]
    differences: list[Difference] = []
    num_tensors = num_objects = num_bytes = 0
    for key in keys:
        entry, other, difference = a.entries.get(key), b.entries.get(key), _difference(key, a, b)
        if difference is not None:
            differences.append(difference)
        num_objects += type(entry) is type(other) is BytesStorageMetadata
        if isinstance(entry, TensorStorageMetadata) and isinstance(other, TensorStorageMetadata):
            num_tensors += 1
            if difference is None or difference.count:
                num_bytes += entry.size.numel() * entry.properties.dtype.itemsize
    return Comparison(str(path_a), str(path_b), tuple(differences), num_tensors, num_objects, num_bytes, tuple(keys))


def _difference(key: str, a: SafeReader, b: SafeReader) -> Difference | None:
    for side, reader, other in (("A", a, b), ("B", b, a)):
        if key not in other.entries:
            return Difference(key, f"only in {reader.path}, not in {other.path}", only_in=side)
    kinds = _kind(a.entries[key]), _kind(b.entries[key])
    if kinds[0] != kinds[1]:
        return Difference(key, f"{kinds[0]} and {kinds[1]}")
    if kinds[0] != _OBJECT:
        return _bits(key, a.value(key), b.value(key))
    try:
        values = a.value(key), b.value(key)
    except CheckpointError as error:
        return Difference(key, f"they cannot be compared: {error}")
    if digest(values[0]) == digest(values[1]):
        return None
    return Difference(key, f"{shown(values[0])} and {shown(values[1])}")


def _kind(entry: STORAGE_TYPES) -> str:
    if not isinstance(entry, TensorStorageMetadata):
        return _OBJECT
    return f"{str(entry.properties.dtype).removeprefix('torch.')} {tuple(entry.size)}"


def _bits(key: str, a: Tensor, b: Tensor) -> Difference | None:
    flat_a, flat_b = a.reshape(-1), b.reshape(-1)
    count, first, largest = 0, -1, 0.0
    for start in range(0, a.numel(), _SLICE_ELEMENTS):
        parts = [flat[start : start + _SLICE_ELEMENTS] for flat in (flat_a, flat_b)]
        bytes_a, bytes_b = (part.view(torch.uint8).view(part.numel(), -1) for part in parts)
        if torch.equal(bytes_a, bytes_b):
            continue
        differs = (bytes_a != bytes_b).any(dim=1)
        count += int(differs.sum())
        if a.is_floating_point():
            largest = max(largest, largest_difference(*(part[differs] for part in parts)))
        if first < 0:
            first = start + int(differs.to(torch.uint8).argmax())
    if not count:
        return None
    coordinates = torch.unravel_index(torch.tensor(first, dtype=torch.int64, device="cpu"), a.shape) if a.ndim else ()
    index = tuple(map(int, coordinates))
    position = f" at {list(index)}" if index else ""
    what = f"{_element(flat_a, first)} and {_element(flat_b, first)}{position}; {count} of {a.numel()} elements differ"
    return Difference(key, what, index, count, a.numel(), largest if a.is_floating_point() else None)


def largest_difference(a: Tensor, b: Tensor) -> float:
    """The largest difference of two tensors; infinite if either value is NaN, or only one is infinite."""
    if not a.numel():
        return 0.0
    distance = (a.double() - b.double()).abs().nan_to_num(nan=math.inf, posinf=math.inf)
    return float(distance.where(a.double() != b.double(), 0.0).max())


def _element(flat: Tensor, at: int) -> str:
    part = flat[at : at + 1]
    bits = bytes(part.view(torch.uint8).tolist())[::-1].hex()
    value = part.float() if part.is_floating_point() and part.itemsize == 1 else part
    return f"{value.item()!r} (0x{bits})"
