"""Bitwise comparison of two checkpoints, whatever processes and meshes wrote them.

One process reads both, one entry at a time. Tensors are assembled from their shards as by stock DCP, and compared by
their bytes instead of their values: NaNs with equal bits are equal, and 0 differs from -0. Entries that are not tensors
(an optimizer's groups, the step) are compared by value, and their floats by bits; no code of the files is executed.
States of single ranks (RNG states) are compared only if the same number of ranks wrote both checkpoints.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from quantshard.checkpoints.disk.store import Path_
from quantshard.checkpoints.safe_read import SafeReader
from quantshard.checkpoints.saving import RANKS, keys_by_rank
from quantshard.errors import CheckpointError

_SLICE_ELEMENTS = 1 << 24
"""Elements compared at a time, which limits the memory needed in addition to the two tensors."""


@dataclass(frozen=True)
class Difference:
    """One entry that differs.

    `what`: description, with the first index that differs and both of its values. `index`: the first index that differs
    in the global tensor, for tensors of one shape and dtype. `count`: number of differing elements, out of `elements`.
    `largest`: largest difference of two floating-point values, infinite for NaN; None for codes and other entries.
    `only_in`: "A" or "B" if the other checkpoint lacks the entry.
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
    """The result of `compare`.

    `differences`: in the order of keys. `tensors`, `others`: number of compared tensors and of other entries. `bytes`:
    size of the compared tensors. `keys`: the keys of all entries in the comparison.
    """

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
    """Compare two checkpoints of `torch.distributed.checkpoint` bit by bit, whether quantshard wrote them or not.

    Not a collective call: one process compares, with two tensors in memory at a time.
    """
    a, b = (SafeReader(path) for path in (path_a, path_b))
    entries_a, entries_b = a.entries, b.entries
    differences: list[Difference] = []
    num_tensors = num_objects = num_bytes = 0
    keys = sorted(entries_a.keys() | entries_b.keys())
    if len(keys_by_rank(entries_a)) != len(keys_by_rank(entries_b)):
        keys = [key for key in keys if not key.startswith(f"{RANKS}.")]
    for key in keys:
        if key not in entries_a or key not in entries_b:
            holder, other_path = (path_a, path_b) if key in entries_a else (path_b, path_a)
            side = "A" if key in entries_a else "B"
            differences.append(Difference(key, f"only in {holder}, not in {other_path}", only_in=side))
            continue
        entry_a, entry_b = entries_a[key], entries_b[key]
        difference: Difference | None
        if isinstance(entry_a, TensorStorageMetadata) and isinstance(entry_b, TensorStorageMetadata):
            num_tensors += 1
            difference = _described(key, entry_a, entry_b)
            if difference is None:
                num_bytes += entry_a.size.numel() * entry_a.properties.dtype.itemsize
                difference = _bits(key, a.value(key), b.value(key))
        elif type(entry_a) is type(entry_b):
            num_objects += 1
            try:
                what = _first_unequal(a.value(key), b.value(key), "")
            except CheckpointError as error:
                what = f"they cannot be compared: {error}"
            difference = None if what is None else Difference(key, what)
        else:
            kinds = [
                "a tensor" if isinstance(entry, TensorStorageMetadata) else "not a tensor"
                for entry in (entry_a, entry_b)
            ]
            difference = Difference(key, f"{kinds[0]} in {path_a}, {kinds[1]} in {path_b}")
        if difference is not None:
            differences.append(difference)
    return Comparison(str(path_a), str(path_b), tuple(differences), num_tensors, num_objects, num_bytes, tuple(keys))


def _described(key: str, a: TensorStorageMetadata, b: TensorStorageMetadata) -> Difference | None:
    if a.size == b.size and a.properties.dtype == b.properties.dtype:
        return None
    texts = [f"{str(entry.properties.dtype).removeprefix('torch.')} {tuple(entry.size)}" for entry in (a, b)]
    return Difference(key, f"{texts[0]} and {texts[1]}")


def _bits(key: str, a: Tensor, b: Tensor) -> Difference | None:
    flat_a, flat_b = a.reshape(-1), b.reshape(-1)
    count, first, largest = 0, -1, 0.0
    for start in range(0, a.numel(), _SLICE_ELEMENTS):
        parts = (flat[start : start + _SLICE_ELEMENTS] for flat in (flat_a, flat_b))
        bytes_a, bytes_b = (part.view(torch.uint8).view(part.numel(), -1) for part in parts)
        if torch.equal(bytes_a, bytes_b):
            continue
        differs = (bytes_a != bytes_b).any(dim=1)
        count += int(differs.sum())
        if a.is_floating_point():
            stop = start + _SLICE_ELEMENTS
            largest = max(largest, largest_difference(*(flat[start:stop][differs] for flat in (flat_a, flat_b))))
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
    """An element as a value, and as its bits with the most significant byte first."""
    part = flat[at : at + 1]
    bits = bytes(part.view(torch.uint8).tolist())[::-1].hex()
    value = part.float() if part.is_floating_point() and part.itemsize == 1 else part
    return f"{value.item()!r} (0x{bits})"


def _first_unequal(a: Any, b: Any, where: str) -> str | None:
    """Describe the first difference of two plain objects; None if they are equal."""
    prefix = f"{where}: " if where else ""
    if type(a) is not type(b):
        return f"{prefix}{_short(a)} and {_short(b)}, a {type(a).__name__} and a {type(b).__name__}"
    if isinstance(a, Mapping):
        for key in sorted({*a, *b}, key=repr):
            if key not in a or key not in b:
                return f"{prefix}{key!r} is in one of them only"
            if (difference := _first_unequal(a[key], b[key], f"{where}[{key!r}]")) is not None:
                return difference
        return None
    if isinstance(a, list | tuple):
        if len(a) != len(b):
            return f"{prefix}{len(a)} and {len(b)} entries"
        for number, (item_a, item_b) in enumerate(zip(a, b, strict=True)):
            if (difference := _first_unequal(item_a, item_b, f"{where}[{number}]")) is not None:
                return difference
        return None
    if isinstance(a, Tensor):
        if a.dtype != b.dtype or a.shape != b.shape:
            return f"{prefix}{a.dtype} {tuple(a.shape)} and {b.dtype} {tuple(b.shape)}"
        differs = _bits("", a.contiguous(), b.contiguous())
        return None if differs is None else prefix + differs.what
    is_equal = struct.pack("d", a) == struct.pack("d", b) if isinstance(a, float) else a == b
    return None if is_equal else f"{prefix}{_short(a)} and {_short(b)}"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
