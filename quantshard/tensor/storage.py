"""Quantized data without a tensor around it: the components of one format, and their place in the global tensor.

Quantized activations are bare storages. No function here communicates, except through `QuantizedStorage.fetch`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any, NamedTuple
from weakref import ReferenceType, ref

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from quantshard import kernel_dispatch, numerics, private_torch
from quantshard.formats import Orientation, Role
from quantshard.kernel_dispatch import RandomWords
from quantshard.numerics import split_codes
from quantshard.recipe import QuantSpec
from quantshard.sharding import Shard, whole
from quantshard.tensor import parameter_state
from quantshard.tensor.parameter_state import AMAX_HISTORY

SECOND_SCALE = "second_scale"
"""Name of the second scale that kernels add to operands of formats with an amax."""

_versions = count(1)  # one count for all storages: no two writes of a process share a version


class Remainder(NamedTuple):
    """Output for the low bytes of a 16-bit master, uint8. `words`: for stochastic rounding; None rounds to nearest."""

    low: Tensor
    words: Tensor | None


@dataclass(eq=False)  # compared and hashed by identity: storages are keys of weak dictionaries
class QuantizedStorage:
    """Components of a rectangle of a 2-D tensor.

    Args:
        shard: the rectangle, in the global tensor.
        components: resident entries of each component, in operands of a GEMM possibly as the GEMM reads them
            (`kernel_dispatch.as_stored`).
        state: see `parameter_state`. `high_precision`: see `initial_values`.
        version: number of the last write or load, unique in the process. A copy has the version of its source.
        gathered: whether this is FSDP2's unsharded copy, which may hold only the copy that the pass needs.
        captured: whether a CUDA graph gathers this unsharded copy in each replay.
        fetch: gathers the components of a copy that FSDP2 did not gather (a collective call).
        source: the storage that a gather or a move made this one from.
        mesh: the tensor-parallel axis of a shard that tensor parallelism alone cut.
        products: the native products with this operand on the left, shared by all operands of a layer's plan.
        gemm_views: views of components as GEMMs read them, see `gemm.backend`.
    """

    spec: QuantSpec
    shard: Shard
    components: dict[str, Tensor]
    state: dict[str, Tensor] = field(default_factory=dict)
    high_precision: Tensor | None = None
    version: int = 0
    gathered: bool = False
    captured: bool = False
    fetch: Callable[[Orientation], dict[str, Tensor]] | None = None
    source: ReferenceType[QuantizedStorage] | None = None
    mesh: DeviceMesh | None = None
    products: list[Any] | None = field(default=None, repr=False)
    _in_place: int | None = field(default=None, init=False, repr=False)  # PyTorch's version counters, summed
    gemm_views: dict[Any, Tensor] = field(default_factory=dict, init=False, repr=False)

    def mark_written(self) -> None:
        """Record that the components have new values, and drop the initial values."""
        self.version, self._in_place, self.high_precision = next(_versions), None, None

    def seen_version(self) -> int:
        """Return `version`, renewed if the components were written in place since the last call, as by `dcp.load`."""
        changes = private_torch.count_in_place_changes(self.components.values())
        if self._in_place not in (None, changes):
            self.mark_written()
        self._in_place = changes
        return self.version

    def initial_values(self) -> Tensor | None:
        """The values that the weight was initialized with, on the CPU, if kept and if nothing was written since."""
        if self.high_precision is not None:
            self.seen_version()
        return self.high_precision

    def keep_initial_values(self, values: Tensor | None) -> None:
        self.seen_version()
        self.high_precision = values if values is None or values.ndim == 2 else values.flatten(0, 1)

    def _watched(self) -> QuantizedStorage:
        """Return self, after a start to watch for in-place writes, which outdate the initial values."""
        if self.high_precision is not None:
            self.seen_version()
        return self

    def forget_amaxes(self) -> None:
        """Zero the amax history, before or after a write of values that do not derive from the present ones."""
        if AMAX_HISTORY in self.state:
            self.state[AMAX_HISTORY].zero_()

    @property
    def sharded_source(self) -> QuantizedStorage:
        """The shard that a gather, or a move under CPU offload, made this storage from; self if there is none."""
        source = None if self.source is None else self.source()
        return self if source is None else source

    @property
    def is_stale(self) -> bool:
        """True if the shard was written after this copy was gathered from it."""
        return self.gathered and self.version != self.sharded_source.version

    @property
    def device(self) -> torch.device:
        return next(iter(self.components.values())).device

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the values: that of the rectangle, or [matrices, rows, columns] of a stack."""
        rows = self.spec.format.matrix_rows
        return (self.shard.shape[0] // rows, rows, self.shard.shape[1]) if rows else self.shard.shape

    def has(self, which: Orientation) -> bool:
        """True if the codes of that copy are present: a gather may bring only the copy that the pass needs."""
        copy = self.spec.format.copies.get(which)
        return copy is not None and copy.codes.name in self.components

    def touched(self, grids: dict[str, Tensor] | None = None) -> dict[str, Tensor]:
        """Views of the entries that this rectangle touches, of resident `grids` or (None) of the components."""
        resident = self.components if grids is None else grids
        if self.shard.cut is None:  # a fast path: each GEMM calls this for its operands
            return resident
        by_name = self.spec.format.by_name
        return {name: part[self.shard.touched(by_name[name])] for name, part in resident.items()}

    def map(self, change: Callable[[Tensor], Tensor]) -> QuantizedStorage:
        """Apply `change` to each component. The new storage shares the state."""
        # notice writes of `dcp.load` before the copy takes the version: otherwise the copy would look stale later
        if self.version == 0 and private_torch.count_in_place_changes(self.components.values()):
            self.mark_written()
        version = self.version if self._in_place is None else self.seen_version()
        components = {name: change(part) for name, part in self.components.items()}
        return replace(self, components=components, version=version)._watched()

    def clone(self) -> QuantizedStorage:
        state = {name: value.clone() for name, value in self.state.items()}
        copy = replace(self.map(torch.clone), state=state, gathered=False, captured=False, fetch=None, source=None)
        return copy._watched()

    def to(self, device: torch.device | None, *, non_blocking: bool = False) -> QuantizedStorage:
        """An independent copy on `device` (None: the same one), including the state."""
        moved = self.map(lambda part: part.to(device, non_blocking=non_blocking, copy=True))
        return replace(moved, state=parameter_state.moved_state(self.state, device), source=ref(self))._watched()

    def matrix(self, index: int) -> QuantizedStorage:
        """Views of one matrix of a stack, in the format of a matrix. `index` counts the matrices of this rectangle."""
        fmt, rows = self.spec.format, self.spec.format.matrix_rows
        parts = {}
        for name, part in self.components.items():
            entries = rows // fmt.by_name[name].block_shape[0]
            parts[name] = part.narrow(0, index * entries, entries)
        state = parameter_state.state_of_matrix(self.state, self.shard.origin[0] // rows + index)
        return QuantizedStorage(
            self.spec.of_matrix, whole((rows, self.shard.shape[1])), parts, state, version=self.version
        )

    def piece(self, dim: int, start: int, chunk: int) -> QuantizedStorage:
        """Views of the entries that stay resident for one piece of a cut of this storage."""
        shard, components = self.shard.piece(dim, start, chunk), {}
        for name, part in self.components.items():
            component = self.spec.format.by_name[name]
            first, (begin, end) = self.shard.resident(component)[dim][0], shard.resident(component)[dim]
            components[name] = part.narrow(dim, begin - first, end - begin)
        initial = self.initial_values()
        if initial is not None:
            # min: for an empty piece past the end
            initial = initial.narrow(dim, min(start, initial.shape[dim]), shard.shape[dim])
        return QuantizedStorage(self.spec, shard, components, self.state, initial, self.version)._watched()

    def take(self, source: QuantizedStorage) -> None:
        """Become another handle to the data of `source`."""
        vars(self).update(vars(source))

    @torch.no_grad()
    def write(
        self, values: Tensor, amaxes: dict[str, Tensor], words: RandomWords | None = None,
        remainder: Remainder | None = None,
    ) -> None:  # fmt: skip
        """Quantize `values`, the high-precision rectangle, into the components, in place.

        Args:
            amaxes: the resident grid of every scale and amax component, already reduced over the ranks that share it.
            words: random words for stochastic rounding.
            remainder: output for the low bytes of 16-bit masters. Their rounding then also decides the rowwise codes.
        """
        self.mark_written()
        fmt, scaling = self.spec.format, self.spec.scaling
        scales, multipliers = numerics.scales_and_multipliers(amaxes, fmt, scaling, values.dtype)
        # scales of all resident blocks, since the state dict declares them replicated
        for name, scale in scales.items():
            self.components[name].copy_(scale)
        multipliers = self.touched(multipliers)
        for which, copy in fmt.copies.items():
            if remainder is not None and which is Orientation.ROWWISE:
                codes, low = split_codes.quantize(values, copy, multipliers, self.shard.origin, remainder.words)
                remainder.low.copy_(low)
            else:
                codes = kernel_dispatch.quantize_codes(values, copy, multipliers, self.shard.origin, words)
            self.components[copy.codes.name].copy_(codes)

    @torch.no_grad()
    def measure(self, values: Tensor) -> dict[str, Tensor]:
        """Amaxes of `values` over the resident grids; zero in entries that this rectangle does not touch."""
        fmt = self.spec.format
        amaxes = kernel_dispatch.amaxes(values, fmt, self.shard.origin)
        if self.shard.cut is None:
            return amaxes
        grids = {}
        for name, grid in amaxes.items():
            component = fmt.by_name[name]
            resident = grid.new_zeros(self.shard.component_shape(component))  # zeros do not change a MAX reduction
            resident[self.shard.touched(component)] = grid
            grids[name] = resident
        return grids

    def dequantize(
        self, which: Orientation | None = None, dtype: torch.dtype = torch.float32, nan_flag: Tensor | None = None
    ) -> Tensor:
        """The values of the rectangle, rounded once to `dtype`.

        Args:
            which: the copy to read; by default any copy that is present. Reading an absent one is a collective call.
            nan_flag: float32 scalar, 0 or NaN; NaN makes all values NaN.
        """
        which = which or (Orientation.ROWWISE if self.has(Orientation.ROWWISE) else Orientation.COLUMNWISE)
        copy, parts = self.spec.format.copies[which], self.with_copy(which).touched()
        return kernel_dispatch.dequantize(copy, parts, self.shard.shape, self.shard.origin, dtype, nan_flag)

    def with_copy(self, which: Orientation) -> QuantizedStorage:
        """This storage if it has that copy; otherwise a new storage with the copy fetched (a collective call)."""
        if self.has(which):
            return self
        assert self.fetch is not None, "only a gathered weight lacks a copy"
        return replace(self, components=self.components | self.fetch(which))


class Placeholder(QuantizedStorage):
    """The result of `new_zeros`: a storage without components, until a quantized tensor is copied into it.
    `fully_shard` pads a chunk by `new_zeros`, `copy_` into a narrow, and another narrow: the padding is never built."""

    def __init__(self, parent: QuantizedStorage, device: torch.device) -> None:
        super().__init__(parent.spec, parent.shard, {}, parent.state)
        self.parent = parent
        self.target = device

    @property
    def device(self) -> torch.device:
        return self.target

    def to(self, device: torch.device | None, *, non_blocking: bool = False) -> Placeholder:
        """A placeholder on another device, for CPU offload of a rank without rows."""
        return Placeholder(self.parent, self.target if device is None else torch.device(device))

    def fill(self, source: QuantizedStorage) -> None:
        """Become a real storage: the source itself if the placeholder was made from it, otherwise a copy."""
        # fully_shard pads a chunk, which is a view of the whole weight: a copy lets the whole be freed. At the first
        # forward and after loads reset_sharded_param pads the shard, whose tensors optimizers and state dicts have.
        filled = source if source is self.parent else source.map(lambda part: part.to(self.target, copy=True))
        if filled is not source and filled.high_precision is not None:
            filled.high_precision = filled.high_precision.clone()  # not a view of the whole
        self.__class__ = QuantizedStorage  # type: ignore[assignment]  # so that existing handles see it
        del self.parent, self.target
        self.take(filled)


def empty(
    spec: QuantSpec, shard: Shard, device: torch.device | str, state: dict[str, Tensor] | None = None
) -> QuantizedStorage:
    components = {
        c.name: torch.empty(shard.component_shape(c), dtype=c.encoding.storage, device=device)
        for c in spec.format.components
    }
    return QuantizedStorage(spec, shard, components, state if state is not None else {})


def scale_names(spec: QuantSpec) -> list[str]:
    """Names of the components that derive from amaxes."""
    return [c.name for c in spec.format.components if c.role is not Role.CODES]
