"""What a piece of a quantized weight costs: bytes kept and sent, and what it adds that ranks share blocks.

Arithmetic over a format row and a `Shard` alone. `explain` applies it to the pieces that a live model holds, `plan` to
those of a mesh that need not exist.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from quantshard import sharding
from quantshard.formats import ALL, Component, Format, Orientation, Role
from quantshard.readable import human_bytes
from quantshard.sharding import Shard

BF16_BYTES = 2
BF16_OPTIMIZER_BYTES = 12
"""An element's float32 master and two float32 moments."""

SCALES_WARNING = 0.1
"""Scales that stay whole because blocks straddle are warned of when they pass this share of the local codes."""

REPLICATED = "Replicate"
"""How a mesh axis that does not shard a parameter is printed."""

_AMAX_BYTES = 4


def resident_bytes(fmt: Format, shard: Shard) -> tuple[int, int]:
    """Bytes of codes and of scales that the rank of `shard` keeps."""
    return _codes_and(fmt, shard, _scales(fmt))


def gather_bytes(fmt: Format, shard: Shard, *, in_backward: bool) -> int:
    """Bytes that a rank gives to one all-gather; `in_backward`: the weight is gathered again for backward."""
    copies = tuple(fmt.copies)
    passes: tuple[tuple[Orientation, ...], ...] = (copies,)
    if len(copies) > 1 and in_backward:
        passes = tuple((which,) for which in copies)
    slots = sharding.gather_slots(fmt, shard, passes[0], passes)
    codes = fmt.components[0].name  # the dtype of a slot that the forward leaves empty
    return sum(slot.numel * fmt.by_name[slot.name or codes].encoding.storage.itemsize for slot in slots)


@dataclass(frozen=True)
class SharedScaleCost:
    """What a rank pays for scale blocks of one weight that other ranks hold parts of.

    `scale_bytes`: the scales that other ranks keep too. `blocks`: the blocks that reach beyond the rank's piece.
    `reduced_bytes`: its part of a step's amax reduction. `note` says so; `warning`, where it weighs, names the way out.
    """

    scale_bytes: int = 0
    blocks: int = 0
    reduced_bytes: int = 0
    note: str = ""
    warning: str = ""


def shared(fmt: Format, shard: Shard, mesh: Mapping[str, int], placements: Sequence[str]) -> SharedScaleCost:
    """What sharing blocks costs the rank of `shard`; `mesh`: axis -> size, with one entry of `placements` each."""
    parts = [part for part in _scales(fmt) if shard.shares_blocks(part)]
    shapes = [shard.component_shape(part) for part in parts]
    others = any(size > 1 for size, place in zip(mesh.values(), placements, strict=True) if place != REPLICATED)
    reduced = sum(rows * cols * _AMAX_BYTES for rows, cols in shapes) if others else 0
    blocks = [
        part for part in parts if ALL not in part.block_shape
    ]  # the scale of a whole tensor is one, and no block's
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
    everything = sharding.whole(shard.global_shape)
    whole = all(shard.resident(part) == everything.resident(part) for part in parts)
    sizes = " and ".join(dict.fromkeys(f"{rows}x{cols}" for rows, cols in (part.block_shape for part in parts)))
    names = " and ".join(part.name for part in parts)
    if whole:
        of = "the whole weight"
    elif not all(shard.gathers(part) for part in parts):
        of = "the whole tensor-parallel piece"
    else:
        of = "its rows in all tensor-parallel pieces"
    return f"blocks of {sizes} straddle ranks, so each keeps {names} of {of}"


def _way_out(fmt: Format, shard: Shard, mesh: Mapping[str, int], placements: Sequence[str]) -> str:
    """The largest smaller shard axis, of a size that divides the present one, that keeps the scales below the limit."""
    cut = shard.cut
    assert cut is not None
    axis, ranks = next((a for a, p in zip(mesh.items(), placements, strict=True) if p != REPLICATED), ("", 1))
    rows = cut.parent.shape[cut.dim]
    for fewer in (n for n in range(ranks - 1, 1, -1) if ranks % n == 0):
        piece = cut.parent.piece(cut.dim, 0, sharding.ceil_div(rows, fewer))
        blocks = [part for part in _scales(fmt) if piece.shares_blocks(part) and ALL not in part.block_shape]
        codes, scales = _codes_and(fmt, piece, blocks)
        if scales <= SCALES_WARNING * codes:
            return f"shard {axis} over {fewer} ranks instead of {ranks} and replicate over the others (HSDP)"
    return f"{axis} of {ranks} ranks is too large for {rows} rows: replicate this weight, or leave its layer unsharded"


def _scales(fmt: Format) -> list[Component]:
    return [part for part in fmt.components if part.role is not Role.CODES]


def _codes_and(fmt: Format, shard: Shard, parts: list[Component]) -> tuple[int, int]:
    """Bytes of all codes, and of the components `parts`."""
    sizes = sharding.stored_bytes(fmt, shard)
    return sum(sizes[p.name] for p in fmt.components if p.role is Role.CODES), sum(sizes[p.name] for p in parts)


def float_states(states: Sequence[str], asked: str) -> str:
    """A note on the optimizer states that stay in float32 although a format with scales was asked; "" for none."""
    if not states:
        return ""
    return f"{' and '.join(states)} stay fp32 although {asked} was asked for: scaled states are for 2-D parameters"
