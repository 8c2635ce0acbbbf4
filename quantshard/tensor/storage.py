"""Quantized data without a tensor around it: the components of one format, and where they lie in the global tensor.

A weight's `QuantizedTensor` is a handle to such a storage, as a `torch.Tensor` is to its own; quantized activations are
storages alone. Nothing here communicates.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import count
from typing import NamedTuple
from weakref import ReferenceType, ref

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from quantshard import kernel_dispatch, limits, numerics, private_torch
from quantshard.errors import ConfigurationError, UnsupportedOperationError
from quantshard.formats import Format, Orientation, Role
from quantshard.kernel_dispatch import RandomWords
from quantshard.numerics import RandomBits, split_codes
from quantshard.recipe import QuantSpec
from quantshard.sharding import Shard, ceil_div

KEY, DRAWS, AMAX_HISTORY = "key", "draws", "amax_history"
"""Names of the state that a weight carries besides its components; see `weight_state`."""

SECOND_SCALE = "second_scale"
"""Name of what an operand that a kernel made for a product has besides its components, if these have an amax."""

INIT_STREAM, GRADIENT_STREAM, WEIGHT_STREAM, SEED_STREAM, STREAMS_PER_RANK = 0, 1, 3, 4, 16
"""What the random words of one draw are for: the streams of `numerics.random_words` under a parameter's key. A tensor
that differs between ranks adds rank * STREAMS_PER_RANK."""


_versions = count(1)  # one count for all storages: no two writes of a process share a version


class GemmKey:
    """What a product must know of an operand before its values: format and rectangle. There is one for all operands
    that are alike, and so caches find it by its identity, without asking formats and shards for hashes.

    `narrow_scales`: scales have 8 bits.
    """

    __slots__ = ("format", "narrow_scales", "shard")

    def __init__(self, fmt: Format, shard: Shard) -> None:
        self.format, self.shard = fmt, shard
        self.narrow_scales = fmt.copies[Orientation.ROWWISE].scale.encoding.bits == 8


operand_layout = lru_cache(4096)(GemmKey)
"""The one layout of a format and a rectangle."""


class Remainder(NamedTuple):
    """Of a weight whose rowwise codes are the high bytes of 16 bits: where the low bytes go, uint8 of its shape, and
    the words of rounding to these 16 bits stochastically; None: to nearest."""

    low: Tensor
    words: Tensor | None


@dataclass(eq=False)  # compared and hashed by identity: storages are keys of weak dictionaries
class QuantizedStorage:
    """Components of a rectangle of a 2-D tensor.

    `cell`: the format row and its scaling. `shard`: which rectangle. `components`: each component's resident entries;
    of an operand that was made for a product perhaps as that reads them (`kernel_dispatch.as_stored`).
    `state`: small tensors, equal on all ranks, that later quantizations need: the 64-bit `key` of the parameter's
    random bits, its count of `draws`, and, for delayed scaling, the `amax_history`. `high_precision`: the values
    that the weight was initialized with, on the CPU, if they were asked to be kept; read by `initial_values`.
    `version`: a number that no other write has; the last write or load of new values gave it to this storage, or to
    the one that this is a copy of. `gathered`: this is FSDP2's copy of the whole weight, which lasts until a
    reshard; it may hold only the quantized copy that the pass needs, and `fetch` then gathers the components of
    another, a collective call. `captured`: that copy is one that a CUDA graph gathers in each replay. `source`: for
    a copy made by a gather or a move, the storage that it was made from. `mesh`: the axis of tensor parallelism, of
    a piece that this alone cut. Pieces that FSDP2 cuts have none: their DTensors are found among FSDP2's
    parameters. `layout`: once a product has asked for it (`gemm_key`), until `take`.
    """

    cell: QuantSpec
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
    layout: GemmKey | None = field(default=None, repr=False)
    _in_place: int | None = field(default=None, init=False, repr=False)  # PyTorch's count of writes
    _views: dict[tuple[str, Callable[[Tensor], Tensor]], Tensor] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def gemm_key(self) -> GemmKey:
        """The layout that it has as an operand."""
        self.layout = operand_layout(self.cell.format, self.shard)
        return self.layout

    def mark_written(self) -> None:
        """Note that there are new values, and no initial ones: by `version` optimizers find their masters outdated, and
        modules a gathered copy."""
        self.version, self._in_place, self.high_precision = next(_versions), None, None

    def seen_version(self) -> int:
        """`version`, which is a new one if the components were written in place since the last such look.

        `dcp.load` writes them so, as the tensors of a state dict, and nobody calls `mark_written`.
        """
        changes = private_torch.count_in_place_changes(self.components.values())
        if self._in_place not in (None, changes):
            self.mark_written()
        self._in_place = changes
        return self.version

    def initial_values(self) -> Tensor | None:
        """The values that the weight was initialized with, if they were kept and it was given no others since."""
        if self.high_precision is not None:
            self.seen_version()
        return self.high_precision

    def keep_initial_values(self, values: Tensor | None) -> None:
        """Have these be the values that `initial_values` returns, until others are written."""
        self.seen_version()
        self.high_precision = values

    def _watched(self) -> QuantizedStorage:
        """Itself, new, from now on with an eye on writes that would outdate its initial values."""
        if self.high_precision is not None:  # not in __post_init__: each operand of a GEMM is a storage
            self.seen_version()
        return self

    def forget_amaxes(self) -> None:
        """Empty the amax history, before or after a write of values that did not come from those here."""
        if AMAX_HISTORY in self.state:
            self.state[AMAX_HISTORY].zero_()

    @property
    def home(self) -> QuantizedStorage:
        """The storage that this one is a passing copy of, if that still exists; else itself."""
        found = None if self.source is None else self.source()
        return self if found is None else found

    @property
    def is_stale(self) -> bool:
        """True if new values were written to the shard since this copy was gathered from it."""
        return self.gathered and self.version != self.home.version

    def check_captured(self, owner: str) -> None:
        """Of a gathered copy: raise unless a CUDA graph that is captured now, and no other, gathers it.

        Raises:
            ConfigurationError: naming the weight, `owner`.
        """
        if self.captured is (is_capturing := kernel_dispatch.is_capturing()):
            return
        if self.captured:
            raise ConfigurationError(
                f"{owner} was gathered by FSDP while a CUDA graph was captured, so it has values in replays only; "
                "capture forward and backward in one graph, or call reshard() on the FSDP-wrapped module after it"
            )
        if is_capturing and torch.is_grad_enabled():
            raise ConfigurationError(
                f"{owner} was gathered by FSDP before the capture of this CUDA graph, so all replays would use its "
                "values of now; call reshard() on the FSDP-wrapped module before the capture: a forward without a "
                "backward leaves weights gathered"
            )

    @property
    def is_unwritten(self) -> bool:
        """True if nothing has given it values since its memory was allocated, as `to_empty` does; not of a shard
        without entries, which nothing is ever written to."""
        home = self.home
        return (
            home.version == 0
            and 0 not in home.shard.shape
            and not private_torch.count_in_place_changes(home.components.values())
        )

    @property
    def device(self) -> torch.device:
        """Device of the components."""
        return next(iter(self.components.values())).device

    def view(self, name: str, how: Callable[[Tensor], Tensor]) -> Tensor:
        """A component seen in another way, or a copy of it; a view is kept for the next who asks."""
        part, asked = self.components[name], (name, how)
        found, at = self._views.get(asked), part.data_ptr()
        if found is None or found.data_ptr() != at:
            found = how(part)
            if found.data_ptr() == at:
                self._views[asked] = found
        return found

    def has(self, which: Orientation) -> bool:
        """True if the codes of that copy are here (a gather may bring only the copy that a pass needs)."""
        copy = self.cell.format.copies.get(which)
        return copy is not None and copy.codes.name in self.components

    def touched(self) -> dict[str, Tensor]:
        """Views of the components' entries that this rectangle touches."""
        return self._touched(self.components)

    def _touched(self, resident: dict[str, Tensor]) -> dict[str, Tensor]:
        if self.shard.cut is None:  # each GEMM asks this of its operands
            return resident
        by_name = self.cell.format.by_name
        return {name: part[self.shard.touched(by_name[name])] for name, part in resident.items()}

    def map(self, change: Callable[[Tensor], Tensor]) -> QuantizedStorage:
        """A storage whose components are `change(component)`; the state is shared."""
        # what `dcp.load` wrote is noticed before the copy takes the version: later the copy would seem stale
        if self.version == 0 and private_torch.count_in_place_changes(self.components.values()):
            self.mark_written()
        version = self.version if self._in_place is None else self.seen_version()
        components = {name: change(part) for name, part in self.components.items()}
        return replace(self, components=components, version=version)._watched()

    def clone(self) -> QuantizedStorage:
        """An independent copy, of the state too."""
        state = {name: value.clone() for name, value in self.state.items()}
        new = replace(self.map(torch.clone), state=state, gathered=False, captured=False, fetch=None, source=None)
        return new._watched()

    def to(self, device: torch.device | None, *, non_blocking: bool = False) -> QuantizedStorage:
        """An independent copy on another device (None: the same one). The key stays on the CPU, which reads it."""
        state = {name: value.clone() for name, value in self.state.items()}
        if AMAX_HISTORY in state:
            state[AMAX_HISTORY] = state[AMAX_HISTORY].to(device)
        move_draws(state, device)
        moved = self.map(lambda part: part.to(device, non_blocking=non_blocking, copy=True))
        return replace(moved, state=state, source=ref(self))._watched()

    def piece(self, dim: int, start: int, chunk: int) -> QuantizedStorage:
        """Views of the entries that stay resident for one piece of a cut of this storage."""
        shard = self.shard.piece(dim, start, chunk)
        components = {}
        for name, part in self.components.items():
            component = self.cell.format.by_name[name]
            slices = (
                slice(new[0] - old[0], new[1] - old[0])
                for new, old in zip(shard.resident(component), self.shard.resident(component), strict=True)
            )
            components[name] = part[tuple(slices)]
        kept = self.initial_values()
        if kept is not None:
            kept = kept.narrow(dim, min(start, kept.shape[dim]), shard.shape[dim])  # min: an empty piece past the end
        return QuantizedStorage(self.cell, shard, components, self.state, kept, self.version)._watched()

    def split(self, dim: int, chunk: int) -> list[QuantizedStorage]:
        """All pieces of a cut, as `piece` gives them, but made together: a cut over a thousand ranks has a thousand."""
        size = self.shard.shape[dim]  # 0 gives one empty piece, as in torch.split
        shards = [self.shard.piece(dim, start, chunk) for start in range(0, max(size, 1), max(chunk, 1))]
        by_name, columns = self.cell.format.by_name, {}
        for name, part in self.components.items():
            if shards[0].replicates(by_name[name], dim):
                columns[name] = [part] * len(shards)  # blocks straddle pieces, so each keeps all entries
            else:
                columns[name] = list(part.split(max(ceil_div(chunk, by_name[name].block_shape[dim]), 1), dim))
        parts = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
        initial = self.initial_values()
        kept = [None] * len(shards) if initial is None else initial.split(max(chunk, 1), dim)
        return [
            QuantizedStorage(self.cell, shard, part, self.state, values, self.version)._watched()
            for shard, part, values in zip(shards, parts, kept, strict=True)
        ]

    def take(self, source: QuantizedStorage) -> None:
        """Become another handle to what `source` holds now."""
        self.cell, self.shard, self.components = source.cell, source.shard, source.components
        self.state, self.high_precision = source.state, source.high_precision
        self.version, self.gathered, self.captured = source.version, source.gathered, source.captured
        self.fetch, self.source, self.mesh, self._in_place = source.fetch, source.source, source.mesh, source._in_place
        self._views, self.layout = source._views, None

    @torch.no_grad()
    def write(
        self,
        values: Tensor,
        amaxes: dict[str, Tensor],
        words: RandomWords | None = None,
        remainder: Remainder | None = None,
    ) -> None:
        """Quantize `values`, the high-precision rectangle, into the components, in place.

        Args:
            amaxes: for every scale and amax component its resident grid, already reduced over the ranks that share it.
            words: of stochastic rounding.
            remainder: of the rowwise codes, which then are rounded as it says.
        """
        self.mark_written()
        fmt, scaling = self.cell.format, self.cell.scaling
        stored, multipliers = numerics.scales_and_multipliers(amaxes, fmt, scaling, values.dtype)
        for name, scale in stored.items():  # of all resident blocks: the state dict says that ranks replicate them
            self.components[name].copy_(scale)
        multipliers = self._touched(multipliers)
        for which, copy in fmt.copies.items():
            if remainder is not None and which is Orientation.ROWWISE:
                codes, low = split_codes.quantize(values, copy, multipliers, self.shard.origin, remainder.words)
                remainder.low.copy_(low)
            else:
                codes = kernel_dispatch.quantize_codes(values, copy, multipliers, self.shard.origin, words)
            self.components[copy.codes.name].copy_(codes)

    @torch.no_grad()
    def write_whole(self, values: Tensor, words: RandomBits | None = None) -> None:
        """`write` a whole matrix by its own amaxes, in one pass; only where `kernel_dispatch.sees_blocks`."""
        self.mark_written()
        # not in place: it is for operands, whose new components nobody else holds
        self.components.update(kernel_dispatch.quantize(values, self.cell.format, self.cell.scaling, words))

    @torch.no_grad()
    def measure(self, values: Tensor) -> dict[str, Tensor]:
        """Amaxes of `values` over the resident grids, zero in entries that this rectangle does not touch."""
        fmt = self.cell.format
        found = kernel_dispatch.amaxes(values, fmt, self.shard.origin)
        if self.shard.cut is None:
            return found
        grids = {}
        for name, grid in found.items():
            component = fmt.by_name[name]
            resident = grid.new_zeros(self.shard.component_shape(component))  # zeros lose against other ranks in MAX
            resident[self.shard.touched(component)] = grid
            grids[name] = resident
        return grids

    def dequantize(
        self, which: Orientation | None = None, dtype: torch.dtype = torch.float32, nan_flag: Tensor | None = None
    ) -> Tensor:
        """The rectangle's values, from the given copy or from whichever is here, rounded once to `dtype`; all NaN if
        `nan_flag` is, a float32 scalar that else is 0."""
        which = which or (Orientation.ROWWISE if self.has(Orientation.ROWWISE) else Orientation.COLUMNWISE)
        if not self.has(which):
            return self.with_copy(which).dequantize(which, dtype, nan_flag)  # a gathered weight: a collective call
        copy = self.cell.format.copies[which]
        return kernel_dispatch.dequantize(copy, self.touched(), self.shard.shape, self.shard.origin, dtype, nan_flag)

    def with_copy(self, which: Orientation) -> QuantizedStorage:
        """This storage if it holds that copy; else one with the copy fetched, which is not kept here."""
        if self.has(which):
            return self
        assert self.fetch is not None, "only a gathered weight lacks a copy"
        return replace(self, components=self.components | self.fetch(which))


def empty(
    cell: QuantSpec, shard: Shard, device: torch.device | str, state: dict[str, Tensor] | None = None
) -> QuantizedStorage:
    """A storage with uninitialized components."""
    components = {
        c.name: torch.empty(shard.component_shape(c), dtype=c.encoding.storage, device=device)
        for c in cell.format.components
    }
    return QuantizedStorage(cell, shard, components, state if state is not None else {})


def scale_names(cell: QuantSpec) -> list[str]:
    """Names of the components that derive from amaxes."""
    return [c.name for c in cell.format.components if c.role is not Role.CODES]


def weight_state(cell: QuantSpec | None, device: torch.device | str) -> dict[str, Tensor]:
    """New state of a parameter: a key drawn from torch's CPU generator, no draws yet, and an empty amax history.

    The key is drawn on the CPU whatever the parameter's device, "meta" included, so that equally seeded ranks get
    equal keys. `device`: where the amax history lies.
    """
    state = {
        KEY: random_key(),
        DRAWS: torch.zeros(1, dtype=torch.int64, device="cpu"),
    }
    if cell is not None and cell.scaling.history:
        state[AMAX_HISTORY] = torch.zeros(cell.scaling.history, dtype=torch.float32, device=device)
    return state


def random_key() -> Tensor:
    """A key for the counter generator: int64 [1] from torch's CPU generator, on the CPU."""
    info = torch.iinfo(torch.int64)
    return torch.randint(info.min, info.max, (1,), dtype=torch.int64, device="cpu")


def counts_on_host(state: dict[str, Tensor]) -> bool:
    """True if the host counts a parameter's draws, as it does unless `modules.capturable_` was called."""
    return state[DRAWS].is_cpu


def move_draws(state: dict[str, Tensor], device: torch.device | None) -> None:
    """Move the count of draws with a weight to its new device (None: it stays there), unless the host counts them.

    The meta device has no values: the count of a weight that goes there goes to the CPU, so that it is kept.
    """
    if device is not None and DRAWS in state and not counts_on_host(state):
        state[DRAWS] = state[DRAWS].to("cpu" if device.type == "meta" else device)


def next_draw(state: dict[str, Tensor]) -> int | Tensor:
    """Count one draw more of a parameter, and return its number: an int64 scalar if a GPU counts them.

    Raises:
        UnsupportedOperationError: the host counts them, and a CUDA graph is being captured.
    """
    draws = state[DRAWS]
    if not counts_on_host(state):
        number: int | Tensor = draws.view(()).clone()  # `add_` below would change a view
    elif kernel_dispatch.is_capturing():
        raise UnsupportedOperationError(limits.refusal("captured draws", "stochastic rounding"))
    else:
        number = int(draws)
    draws.add_(1)
    return number


def rounding_words(storage: QuantizedStorage) -> RandomBits:
    """Random words for the stochastic rounding of a weight's new values, by global index.

    It is one draw of the weight's counter, so every rank that holds a piece must take it in the same step.
    """
    draw = next_draw(storage.state)
    shard = storage.shard
    key = int(storage.state[KEY])
    return RandomBits(key, draw, WEIGHT_STREAM, shard.global_shape, shard.origin, shard.shape)
