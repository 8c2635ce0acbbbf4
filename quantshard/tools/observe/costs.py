"""Costs of one shard of a quantized weight: resident bytes, all-gather bytes, the price of straddling blocks, and
bytes per parameter.

All figures are arithmetic over a format row and a `Shard`. `explain` applies it to the shards of a live model, `plan`
to shards of a hypothetical mesh.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from quantshard import sharding
from quantshard.formats import ALL, Component, Format, Orientation, Role
from quantshard.numerics.states import AVERAGE, MASTER
from quantshard.readable import human_bytes
from quantshard.sharding import Shard
from quantshard.state_storage import preset_of

BF16_BYTES = 2
BF16_OPTIMIZER_BYTES = 12
"""Bytes per element of a float32 master and two float32 moments."""

SCALES_WARNING = 0.1
"""Warn if the scales that stay whole because blocks straddle ranks exceed this share of the local codes."""

REPLICATED = "Replicate"
"""How a mesh axis that does not shard a parameter is printed."""

_AMAX_BYTES = 4


def resident_bytes(fmt: Format, shard: Shard) -> tuple[int, int]:
    """Bytes of codes and of scales that the rank of `shard` stores."""
    return _codes_and(fmt, shard, _scales(fmt))


def gather_bytes(fmt: Format, shard: Shard, *, in_backward: bool) -> int:
    """Bytes that a rank sends in one all-gather. `in_backward`: the weight is all-gathered again for backward."""
    copies = tuple(fmt.copies)
    passes: tuple[tuple[Orientation, ...], ...] = (copies,)
    if len(copies) > 1 and in_backward:
        passes = tuple((copy,) for copy in copies)
    slots = sharding.gather_slots(fmt, shard, passes[0], passes)
    # A slot that the forward leaves empty has the dtype of the codes.
    codes = fmt.components[0].name
    return sum(slot.numel * fmt.by_name[slot.name or codes].encoding.storage.itemsize for slot in slots)


@dataclass(frozen=True)
class SharedScaleCost:
    """Cost on one rank of the scale blocks of a weight that straddle ranks.

    `scale_bytes`: bytes of the scales that other ranks store as well. `blocks`: number of blocks that extend beyond the
    rank's shard. `reduced_bytes`: bytes of amaxes that the rank reduces in a step. `note`: the cost in words.
    `warning`: advice on a better mesh, "" if the cost is small.
    """

    scale_bytes: int = 0
    blocks: int = 0
    reduced_bytes: int = 0
    note: str = ""
    warning: str = ""


def shared(fmt: Format, shard: Shard, mesh: Mapping[str, int], placements: Sequence[str]) -> SharedScaleCost:
    """Cost of straddling blocks for the rank of `shard`. `mesh`: axis -> size; `placements`: one for each axis."""
    parts = [part for part in _scales(fmt) if shard.shares_blocks(part)]
    shapes = [shard.component_shape(part) for part in parts]
    is_sharded = any(
        size > 1 for size, placement in zip(mesh.values(), placements, strict=True) if placement != REPLICATED
    )
    reduced = sum(rows * cols * _AMAX_BYTES for rows, cols in shapes) if is_sharded else 0
    # A scale of the whole tensor is no block.
    blocks = [part for part in parts if ALL not in part.block_shape]
    note = warning = ""
    if blocks:
        codes, scales = _codes_and(fmt, shard, blocks)
        share = scales / codes if codes else float("inf")
        of_codes = f"{share:.1%} of the local codes" if codes else "this rank has no codes at all"
        note = f"{_who_keeps(shard, blocks)}: {human_bytes(scales)} ({of_codes}), and {human_bytes(reduced)} of amaxes "
        note += "are reduced in a step"
        if share > SCALES_WARNING:
            warning = f"scales weigh {of_codes}: {_way_out(fmt, shard, mesh, placements)}"
    straddling = sum(shard.straddling(part) for part in blocks)
    return SharedScaleCost(_codes_and(fmt, shard, parts)[1], straddling, reduced, note, warning)


def _who_keeps(shard: Shard, parts: list[Component]) -> str:
    unsharded = sharding.whole(shard.global_shape)
    is_whole = all(shard.resident(part) == unsharded.resident(part) for part in parts)
    sizes = " and ".join(dict.fromkeys(f"{rows}x{cols}" for rows, cols in (part.block_shape for part in parts)))
    names = " and ".join(part.name for part in parts)
    if is_whole:
        extent = "the whole weight"
    elif not all(shard.gathers(part) for part in parts):
        extent = "the whole tensor-parallel piece"
    else:
        extent = "its rows in all tensor-parallel pieces"
    return f"blocks of {sizes} straddle ranks, so each keeps {names} of {extent}"


def _way_out(fmt: Format, shard: Shard, mesh: Mapping[str, int], placements: Sequence[str]) -> str:
    """Advise on the largest smaller shard axis, a divisor of the current one, that keeps scales below the limit."""
    cut = shard.cut
    assert cut is not None
    axis, ranks = next(
        (item for item, p in zip(mesh.items(), placements, strict=True) if p != REPLICATED),
        ("", 1),
    )
    rows = cut.parent.shape[cut.dim]
    for divisor in (n for n in range(ranks - 1, 1, -1) if ranks % n == 0):
        piece = cut.parent.piece(cut.dim, 0, sharding.ceil_div(rows, divisor))
        blocks = [part for part in _scales(fmt) if piece.shares_blocks(part) and ALL not in part.block_shape]
        codes, scales = _codes_and(fmt, piece, blocks)
        if scales <= SCALES_WARNING * codes:
            return f"shard {axis} over {divisor} ranks instead of {ranks} and replicate over the others (HSDP)"
    return f"{axis} of {ranks} ranks is too large for {rows} rows: replicate this weight, or leave its layer unsharded"


def _scales(fmt: Format) -> list[Component]:
    return [part for part in fmt.components if part.role is not Role.CODES]


def _codes_and(fmt: Format, shard: Shard, parts: list[Component]) -> tuple[int, int]:
    """Bytes of all codes, and bytes of the components `parts`."""
    sizes = sharding.stored_bytes(fmt, shard)
    return sum(sizes[p.name] for p in fmt.components if p.role is Role.CODES), sum(sizes[p.name] for p in parts)


def float_states(states: Sequence[str], asked: str) -> str:
    """A note on optimizer states that stay in float32 despite a requested scaled format; "" without such states."""
    if not states:
        return ""
    return f"{' and '.join(states)} stay fp32 although {asked} was asked for: scaled states are for 2-D parameters"


# Bytes per parameter

SHORT_DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "uint8": "FP8"}
"""Dtypes of optimizer states as `Row` spells them."""

SPLIT, REMAINDER = "FP8+8", "bf16+16"
"""How `Row` spells a master if the parameter is its high bytes."""

_DTYPES = {short: getattr(torch, name) for name, short in SHORT_DTYPES.items()} | {SPLIT: torch.float16}


class ParameterPart(NamedTuple):
    """One parameter on this rank: number of elements, bytes of the weight, state -> bytes, and state -> format."""

    elements: int
    weight: int
    states: Mapping[str, int]
    formats: Mapping[str, str]
    is_quantized: bool


@dataclass(frozen=True)
class ParameterBytes:
    """Bytes per parameter on this rank, averaged over `weights` trained tensors: the quantized ones if there are any.

    `preset`: name of the preset that all of these tensors match, or "". `moments`: all states except master and
    average.
    """

    preset: str
    weights: int
    is_quantized: bool
    weight: float
    master: float
    moments: float
    average: float

    @classmethod
    def of(cls, parameters: Iterable[ParameterPart]) -> ParameterBytes | None:
        """Average over these parameters; None if no optimizer has state for any of them on this rank."""
        trained = [part for part in parameters if part.states and part.elements]
        is_quantized = any(part.is_quantized for part in trained)
        parts = [part for part in trained if part.is_quantized == is_quantized]
        if not parts:
            return None
        count = sum(part.elements for part in parts)
        states: dict[str, int] = {}
        for part in parts:
            for state, size in part.states.items():
                states[state] = states.get(state, 0) + size
        master, average = states.pop(MASTER, 0), states.pop(AVERAGE, 0)
        return cls(
            preset=_preset(parts),
            weights=len(parts),
            is_quantized=is_quantized,
            weight=sum(part.weight for part in parts) / count,
            master=master / count,
            moments=sum(states.values()) / count,
            average=average / count,
        )

    @property
    def together(self) -> float:
        """Sum of weight, master, moments and average."""
        return self.weight + self.master + self.moments + self.average

    def __str__(self) -> str:
        parts = {"weight": self.weight, "master": self.master, "moments": self.moments}
        parts |= {"average": self.average} if self.average else {}
        sizes = " + ".join(f"{name} {size:.2f}" for name, size in parts.items())
        preset = f" (preset {self.preset})" if self.preset else ""
        kind = "quantized parameter" if self.is_quantized else "parameter"
        return f"bytes a {kind}: {sizes} = {self.together:.2f}{preset}"


def _preset(chosen: Iterable[ParameterPart]) -> str:
    presets = {
        preset_of(
            {state: _DTYPES[short] for state, short in part.formats.items() if state != AVERAGE},
            # codes of less than a byte cannot be half of a master
            None if part.weight < part.elements else part.formats.get(MASTER) == SPLIT,
        )
        if part.is_quantized and set(part.formats.values()) <= _DTYPES.keys()
        else ""
        for part in chosen
    }
    return presets.pop() if len(presets) == 1 else ""
