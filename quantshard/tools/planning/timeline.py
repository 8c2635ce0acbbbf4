"""Timeline of a step's memory: each allocation with its begin, its end and its kind.

Allocations are the storages of tensors that operations return. Tensors on the meta device have storages with a size but
no memory, so a step can be measured that fits on no local device.
"""

from __future__ import annotations

import sys
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from quantshard import private_torch
from quantshard.sharding import ceil_div
from quantshard.tensor.quantized_tensor import QuantizedTensor

GRANULE = 512
"""PyTorch's CUDA allocator rounds each allocation up to a multiple of this many bytes."""

STILL = sys.maxsize
"""End of an allocation that is never freed."""


@dataclass(eq=False)
class Allocation:
    """Bytes, rounded up, that are allocated from moment `born` up to `died`. `kind`: the purpose, "" if unlabelled."""

    bytes: int
    born: int
    died: int = STILL
    kind: str = ""

    def lives(self, moment: int) -> bool:
        """Whether the allocation exists at a moment."""
        return self.born <= moment < self.died


@dataclass
class MemoryTimeline:
    """Allocations of all operations that run within `recorded`, except the storages of `given` tensors.

    Moments are numbers; each operation is one moment.
    """

    given: Iterable[Tensor] = ()
    now: int = 0
    kind: str = ""
    allocations: list[Allocation] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._live: dict[int, tuple[Any, Allocation]] = {}
        # References keep the ids of these storages from being reused.
        self._held = [tensor.untyped_storage() for tensor in self.given]
        self._known = set(map(id, self._held))

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Record the operations of the block."""
        with private_torch.answer_operations(self.operation):
            yield

    @contextmanager
    def labelled(self, kind: str) -> Iterator[None]:
        """Label the allocations of the block as `kind`."""
        outer_kind, self.kind = self.kind, kind
        try:
            yield
        finally:
            self.kind = outer_kind

    def operation(self, function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run one operation and record its outputs."""
        out = function(*args, **kwargs)
        self.now += 1
        for tensor in tensors_in(out):
            self._add(tensor)
        return out

    def tick(self) -> int:
        """Advance by a moment without an operation, so that what has been freed no longer counts."""
        self.now += 1
        return self.now

    def reserve(self, size: int) -> None:
        """Record bytes that the next operation allocates and frees internally."""
        moment = self.now + 1
        self.allocations.append(Allocation(size, moment, moment + 1, self.kind))

    def label(self, tensor: Tensor, kind: str) -> None:
        """Set the kind of a tensor's allocation."""
        entry = self._live.get(id(tensor.untyped_storage()))
        if entry is not None:
            entry[1].kind = kind

    def _add(self, tensor: Tensor) -> None:
        # The components of a quantized tensor are recorded; the wrapper has no memory.
        if isinstance(tensor, QuantizedTensor):
            return
        storage = tensor.untyped_storage()
        key = id(storage)
        if key in self._live or key in self._known or not storage.nbytes():
            return
        allocation = Allocation(GRANULE * ceil_div(storage.nbytes(), GRANULE), self.now, kind=self.kind)
        self.allocations.append(allocation)

        def end(_: Any) -> None:
            # The storage still existed while the running operation allocated.
            allocation.died = self.now + 1
            self._live.pop(key, None)

        # The storage object lives as long as its memory.
        self._live[key] = weakref.ref(storage, end), allocation

    def held(self, moment: int) -> int:
        """Bytes allocated at a moment."""
        return sum(allocation.bytes for allocation in self.allocations if allocation.lives(moment))

    def highest(self, begin: int, end: int) -> int:
        """The first moment in `begin`..`end` (inclusive) with the most allocated bytes."""
        changes: Counter[int] = Counter()
        for allocation in self.allocations:
            changes[max(allocation.born, begin)] += allocation.bytes * (allocation.died > begin)
            changes[allocation.died] -= allocation.bytes * (allocation.died > begin)
        highest, most, total = begin, -1, 0
        for moment in sorted({*changes, begin}):
            if moment > end:
                break
            total += changes[moment]
            if total > most:
                highest, most = moment, total
        return highest


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Iterate over the tensors in nested tuples, lists and mappings."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        yield from tensors_in(tuple(value.values()))
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors_in(item)


def meta_bytes(size: int) -> Tensor:
    """Create a tensor of `size` bytes on the meta device."""
    return torch.empty(size, dtype=torch.uint8, device="meta")
