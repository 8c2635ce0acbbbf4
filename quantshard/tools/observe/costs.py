"""Costs of one shard of a weight in bytes, by arithmetic over a format and a `Shard`, for `explain` and `plan`."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quantshard import sharding
from quantshard.formats import ALL, Component, Format, Orientation, Role
from quantshard.numerics.states import AVERAGE, MASTER
from quantshard.readable import human_bytes
from quantshard.sharding import Shard

BF16_BYTES = 2
BF16_OPTIMIZER_BYTES = 12
"""Bytes per element of a float32 master and two float32 moments."""

SCALES_WARNING = 0.1
"""Warn if the scales that stay whole because blocks straddle ranks exceed this share of the local codes."""

REPLICATED = "Replicate"
"""How a mesh axis that does not shard a parameter is printed."""


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

    `scale_bytes`: bytes of scales that other ranks store as well. `reduced_bytes`: bytes of amaxes that the rank
    reduces in a step. `note`: the cost in words. `warning`: advice on a better mesh; "" if the cost is small.
    """

    scale_bytes: int = 0
    reduced_bytes: int = 0
    note: str = ""
    warning: str = ""


def shared(fmt: Format, shard: Shard, mesh: Mapping[str, int], placements: Sequence[str]) -> SharedScaleCost:
    """Cost of straddling blocks for the rank of `shard`. `mesh`: axis -> size; `placements`: one for each axis."""
    parts = [part for part in _scales(fmt) if shard.shares_blocks(part)]
    shapes = [shard.component_shape(part) for part in parts]
    is_sharded = any(size > 1 for size, kind in zip(mesh.values(), placements, strict=True) if kind != REPLICATED)
    # an amax has 4 bytes
    reduced = 4 * sum(rows * cols for rows, cols in shapes) if is_sharded else 0
    # A scale of the whole tensor is no block.
    blocks = [part for part in parts if ALL not in part.block_shape]
    note = warning = ""
    if blocks:
        codes, scales = _codes_and(fmt, shard, blocks)
        share = scales / codes if codes else float("inf")
        of_codes = f"{share:.1%} of the local codes" if codes else "this rank has no codes at all"
        sizes = " and ".join(dict.fromkeys("x".join(map(str, part.block_shape)) for part in blocks))
        names = " and ".join(part.name for part in blocks)
        note = (
            f"blocks of {sizes} straddle ranks, which share {names}: each keeps {human_bytes(scales)} ({of_codes}), "
            f"and {human_bytes(reduced)} of amaxes are reduced in a step"
        )
        if share > SCALES_WARNING:
            warning = f"scales weigh {of_codes}: shard over fewer ranks, and replicate over the others (HSDP)"
    return SharedScaleCost(_codes_and(fmt, shard, parts)[1], reduced, note, warning)


def _scales(fmt: Format) -> list[Component]:
    return [part for part in fmt.components if part.role is not Role.CODES]


def _codes_and(fmt: Format, shard: Shard, parts: list[Component]) -> tuple[int, int]:
    sizes = sharding.stored_bytes(fmt, shard)
    return sum(sizes[p.name] for p in fmt.components if p.role is Role.CODES), sum(sizes[p.name] for p in parts)


@dataclass(frozen=True)
class Costs:
    """Bytes on this rank, of one parameter or of all.

    `shared_scale_bytes`: scales that other ranks store as well. `forward_gather_bytes`, `backward_gather_bytes`: sent
    to the all-gathers of one forward and one backward, padding included. `reduced_bytes`: amaxes reduced in a step.
    Fields that begin with `bf16` are those of the same elements with BF16 weights.
    """

    code_bytes: int
    scale_bytes: int
    shared_scale_bytes: int
    bf16_bytes: int
    forward_gather_bytes: int
    backward_gather_bytes: int
    bf16_gather_bytes: int
    reduced_bytes: int
    optimizer_bytes: int

    @property
    def bytes(self) -> int:
        return self.code_bytes + self.scale_bytes


@dataclass(frozen=True)
class Row(Costs):
    """One parameter.

    `elements`: number of local elements. `format`: the stored format as a checkpoint's `X_format` names it, or the
    dtype. `gemm`: "native", "emulated", or "" for a parameter that is not an operand of a GEMM. `optimizer`: state ->
    format. `state_sizes`: state -> bytes, which add up to `optimizer_bytes`. `mesh`: mesh axis -> size, with one entry
    of `placements` for each. `local_rows`: first global row on this rank and one past the last. `fallbacks`: names in
    `limits.FALLBACKS`.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    format: str
    gemm: str
    gemm_reason: str
    optimizer: dict[str, str]
    state_sizes: dict[str, int]
    elements: int
    mesh: dict[str, int]
    placements: tuple[str, ...]
    local_rows: tuple[int, int]
    fallbacks: tuple[str, ...]
    notes: tuple[str, ...]
    warnings: tuple[str, ...]

    @property
    def is_quantized(self) -> bool:
        return self.format != self.dtype


@dataclass(frozen=True)
class Totals(Costs):
    """Sums over the rows."""

    parameters: int
    bf16_optimizer_bytes: int

    @property
    def gather_bytes(self) -> int:
        """Bytes that this rank sends to the all-gathers of one forward and one backward."""
        return self.forward_gather_bytes + self.backward_gather_bytes


KINDS = ("weights", "optimizer states", "gathered weights", "gradients", "activations", "head and loss", "temporary")
"""Kinds of memory. Activations: saved for backward. Head and loss: all that follows the repeated layers."""


@dataclass(frozen=True)
class PhaseMemory:
    """Bytes by kind at the peak of a phase ("forward", "backward" or "optimizer step")."""

    phase: str
    bytes: Mapping[str, int]

    @property
    def total(self) -> int:
        return sum(self.bytes.values())


@dataclass(frozen=True)
class StepMemory:
    """The phases of a step, in order. `step`: its description. `fits`: the largest batch that fits, in words, or ""."""

    phases: tuple[PhaseMemory, ...]
    step: str
    fits: str = ""

    @property
    def highest(self) -> PhaseMemory:
        return max(self.phases, key=lambda phase: phase.total)

    @property
    def peak(self) -> int:
        return self.highest.total

    def to_dict(self) -> dict[str, Any]:
        """Return the phases as a dict that JSON can represent."""
        phases = {phase.phase: {**phase.bytes, "total": phase.total} for phase in self.phases}
        result = {"step": self.step, "peak_bytes": self.peak, "reached_in": self.highest.phase, "phases": phases}
        return result | ({"fits": self.fits} if self.fits else {})


SHORT_DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "uint8": "FP8"}
"""Dtypes of optimizer states as `Row` spells them."""

SPLIT, REMAINDER = "FP8+8", "bf16+16"
"""How `Row` spells a master if the parameter is its high bytes."""


def parameter_bytes(rows: Iterable[Row]) -> dict[str, Any]:
    """Bytes per parameter here, averaged over trained tensors (quantized ones, if any); empty without states."""
    trained_rows = [row for row in rows if row.state_sizes and row.elements]
    averaged = [row for row in trained_rows if row.is_quantized] or trained_rows
    if not averaged:
        return {}
    states: Counter[str] = Counter()
    for row in averaged:
        states.update(row.state_sizes)
    master, average = states.pop(MASTER, 0), states.pop(AVERAGE, 0)
    sizes = {"weight": sum(row.bytes for row in averaged), "master": master, "moments": sum(states.values())}
    count = sum(row.elements for row in averaged)
    per_parameter = {name: size / count for name, size in {**sizes, "average": average}.items()}
    facts = {"weights": len(averaged), "is_quantized": averaged[0].is_quantized}
    return {**facts, **per_parameter, "together": sum(per_parameter.values())}
