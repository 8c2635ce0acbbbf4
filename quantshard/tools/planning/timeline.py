"""When the memory of a step is taken and given back: each allocation with its beginning, its end and what it is for.

Allocations are the storages of tensors that operations return. Tensors on the meta device have storages too, with a
size and without memory, so a step can be counted that would fit on no device here.
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
"""What PyTorch's allocator of CUDA memory rounds each allocation up to a multiple of."""

STILL = sys.maxsize
"""The end of an allocation that lasts."""


@dataclass(eq=False)
class Allocation:
    """Bytes, rounded up, from one moment up to another; `kind`: what they are for, "" if nobody said so."""

    bytes: int
    born: int
    died: int = STILL
    kind: str = ""

    def lives(self, moment: int) -> bool:
        """Whether it is there at a moment."""
        return self.born <= moment < self.died


@dataclass
class MemoryTimeline:
    """The allocations of all operations that run within `recorded`, but for the storages of `given` tensors.

    Moments are numbers; each operation is one.
    """

    given: Iterable[Tensor] = ()
    now: int = 0
    kind: str = ""
    allocations: list[Allocation] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._live: dict[int, tuple[Any, Allocation]] = {}
        self._held = [tensor.untyped_storage() for tensor in self.given]  # held: an id is another's later
        self._known = set(map(id, self._held))

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Within it operations are recorded."""
        with private_torch.answer_operations(self.operation):
            yield

    @contextmanager
    def labelled(self, kind: str) -> Iterator[None]:
        """Within it allocations are of a kind."""
        before, self.kind = self.kind, kind
        try:
            yield
        finally:
            self.kind = before

    def operation(self, function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run one and record it."""
        out = function(*args, **kwargs)
        self.now += 1
        for tensor in tensors_in(out):
            self._add(tensor)
        return out

    def tick(self) -> int:
        """A moment without an operation, at which what ended since the last one is gone."""
        self.now += 1
        return self.now

    def reserve(self, size: int) -> None:
        """Bytes that are taken and given back within one operation, the next one to be recorded."""
        moment = self.now + 1
        self.allocations.append(Allocation(size, moment, moment + 1, self.kind))

    def label(self, tensor: Tensor, kind: str) -> None:
        """Say what the allocation of a tensor is for."""
        found = self._live.get(id(tensor.untyped_storage()))
        if found is not None:
            found[1].kind = kind

    def _add(self, tensor: Tensor) -> None:
        if isinstance(tensor, QuantizedTensor):  # has no memory but that of its components
            return
        storage = tensor.untyped_storage()
        key = id(storage)
        if key in self._live or key in self._known or not storage.nbytes():
            return
        allocation = Allocation(GRANULE * ceil_div(storage.nbytes(), GRANULE), self.now, kind=self.kind)
        self.allocations.append(allocation)

        def end(_: Any) -> None:
            allocation.died = self.now + 1  # it was there while the operation now running took its memory
            self._live.pop(key, None)

        self._live[key] = weakref.ref(storage, end), allocation  # lives as long as the memory, whoever holds that

    def held(self, moment: int) -> int:
        """Bytes that are taken at a moment."""
        return sum(each.bytes for each in self.allocations if each.lives(moment))

    def highest(self, begin: int, end: int) -> int:
        """The moment from `begin` to `end`, which counts too, at which most bytes are taken; the first of several."""
        changes: Counter[int] = Counter()
        for each in self.allocations:
            changes[max(each.born, begin)] += each.bytes * (each.died > begin)
            changes[each.died] -= each.bytes * (each.died > begin)
        highest, most, held = begin, -1, 0
        for moment in sorted({*changes, begin}):
            if moment > end:
                break
            held += changes[moment]
            if held > most:
                highest, most = moment, held
        return highest


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors in nested tuples, lists and mappings, as functions return them."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        yield from tensors_in(tuple(value.values()))
    elif isinstance(value, (tuple, list)):
        for each in value:
            yield from tensors_in(each)


def meta_bytes(size: int) -> Tensor:
    """A tensor of that many bytes, without memory."""
    return torch.empty(size, dtype=torch.uint8, device="meta")
