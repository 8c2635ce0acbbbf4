"""The peak of a training step on a rank: what it holds between steps, and what the step adds (`planning.rehearsal`).

Not in it: the context of CUDA and the buffers of NCCL, which are outside PyTorch's allocator; the workspace of cuBLAS,
up to 32 MiB; what is lost between the allocator's blocks. `RESERVE` is what `plan` keeps for them where it says how
large a batch fits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from torch import Tensor, nn

from quantshard.readable import human_bytes
from quantshard.tools.observe.step_memory import PhaseMemory, StepMemory
from quantshard.tools.observe.table import Row, Totals
from quantshard.tools.planning.rehearsal import StepSharding, TrainingStep, rehearse
from quantshard.tools.planning.sharded_passes import UnitSizes

RESERVE = 0.07
"""The share of a GPU's memory that is kept for what is not counted."""

_MOST_TRIES = 8


@dataclass(frozen=True)
class ParameterShare:
    """A parameter as `plan` found it: the layer that it is wrapped with, None for the model itself, its row, and
    whether it is gathered again in backward."""

    layer: nn.Module | None
    param: Tensor
    row: Row
    again: bool

    @property
    def held(self) -> int:
        """Elements on this rank, with those that FSDP2 fills up."""
        return self.row.bf16_bytes // 2

    def sizes(self, ranks: int) -> tuple[int, int, int]:
        """What `UnitSizes.with_parameter` takes."""
        gradients = ranks * self.held if self.param.requires_grad else 0
        if ranks == 1:  # FSDP2 copies plain weights; a quantized one is its shard
            is_plain = self.row.scale_bytes == 0 and self.row.format == self.row.dtype
            return 0, self.row.code_bytes if is_plain else 0, gradients
        gathered = ranks * self.row.forward_gather_bytes
        return gathered, gathered + self.row.shared_scale_bytes, gradients


def step_memory(
    model: nn.Module,
    layers: Sequence[nn.Module],
    totals: Totals,
    shares: Sequence[ParameterShare],
    mesh: tuple[int, int] | None,
    step: TrainingStep,
    limit: int | None,
) -> StepMemory:
    """What the phases of a step take at most.

    `mesh`: ranks that share parameters, and replicas; None without `fully_shard`. `limit`: bytes of the GPU, of which
    the result says how large a batch fits.
    """
    sharding = None if mesh is None else _sharding(layers, shares, *mesh)
    held = {"weights": totals.bytes, "optimizer states": totals.optimizer_bytes}
    if step.norm_dtype is not None:  # values and squares
        largest = max((share.held for share in shares if share.param.requires_grad), default=0)
        norm = 2 * step.norm_dtype.itemsize * largest
    else:
        norm = 0

    def found(step: TrainingStep) -> StepMemory:
        phases = rehearse(model, layers, step, sharding)
        added = [Counter(held), Counter(held), Counter({**held, "temporary": norm})]
        together = [
            PhaseMemory(each.phase, {kind: size + more[kind] for kind, size in each.bytes.items()})
            for each, more in zip(phases, added, strict=True)
        ]
        return StepMemory(tuple(together), str(step))

    memory = found(step)
    if limit is None:
        return memory
    return replace(
        memory, fits=_fitting(step, memory.peak, limit, lambda batch: found(replace(step, batch=batch)).peak)
    )


def _sharding(layers: Sequence[nn.Module], shares: Sequence[ParameterShare], ranks: int, replicas: int) -> StepSharding:
    units = {id(layer): UnitSizes() for layer in (None, *layers)}
    for share in shares:
        sizes = units[id(share.layer)].with_parameter(*share.sizes(ranks))
        units[id(share.layer)] = replace(sizes, reshards=share.again)
    return StepSharding([(layer, units[id(layer)]) for layer in layers], units[id(None)], ranks, replicas)


def _fitting(step: TrainingStep, peak: int, limit: int, peak_of: Callable[[int], int]) -> str:
    """The largest batch whose peak leaves the reserve, in words. Peaks grow with the batch, nearly by as
    much for each sequence."""
    allowed = int(limit * (1 - RESERVE))
    fits, fails = {0: 0}, dict[int, int]()
    (fits if peak <= allowed else fails)[step.batch] = peak
    other = max(1, step.batch // 2) if fails and step.batch > 1 else 2 * step.batch
    for _ in range(_MOST_TRIES):
        if fails and min(fails) - max(fits) == 1:
            break
        found = peak_of(other)
        (fits if found <= allowed else fails)[other] = found
        other = _next_batch({**fits, **fails}, fits, fails, allowed)
    batch = max(fits)
    size = f"{human_bytes(limit)}, of which {RESERVE:.0%} are kept for what is not counted"
    if not batch:
        return f"not even a batch of 1 fits in {size}"
    at_least = "at least " if not fails or min(fails) - batch > 1 else ""
    return f"{at_least}{batch} x {step.seq_length} tokens fit in {size} ({human_bytes(fits[batch])})"


def _next_batch(known: dict[int, int], fits: dict[int, int], fails: dict[int, int], allowed: int) -> int:
    """The batch to try next: where a line through the two largest that are known meets the limit, within what is
    open."""
    (one, low), (two, high) = sorted((batch, peak) for batch, peak in known.items() if batch)[-2:]
    guess = one + (allowed - low) * (two - one) // max(high - low, 1)
    lowest, highest = max(fits) + 1, min(fails) - 1 if fails else 1 << 20
    return min(max(guess, lowest), highest)
