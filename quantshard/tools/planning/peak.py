"""Peak memory of a training step on one rank: resident memory plus what the step adds (`planning.rehearsal`).

Not counted: the CUDA context and NCCL buffers, which are outside PyTorch's allocator; cuBLAS workspaces, up to 32 MiB;
fragmentation of the allocator. `RESERVE` is the share that `plan` sets aside for them when it computes the largest
batch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from torch import Tensor, nn

from quantshard.readable import human_bytes
from quantshard.tools.observe.table import PhaseMemory, Row, StepMemory, Totals
from quantshard.tools.planning.rehearsal import StepSharding, TrainingStep, rehearse
from quantshard.tools.planning.sharded_passes import UnitSizes

RESERVE = 0.07
"""Share of a GPU's memory set aside for memory that is not counted."""

_MOST_TRIES = 8


@dataclass(frozen=True)
class ParameterShare:
    """A parameter and its row in `plan`.

    `layer`: the layer that `fully_shard` wraps the parameter with; None for the model itself. `regathered`: whether the
    parameter is all-gathered again in backward.
    """

    layer: nn.Module | None
    param: Tensor
    row: Row
    regathered: bool

    @property
    def held(self) -> int:
        """Number of elements on this rank, including FSDP2's padding."""
        return self.row.bf16_bytes // 2

    def sizes(self, ranks: int) -> tuple[int, int, int]:
        """Arguments of `UnitSizes.with_parameter` for this parameter."""
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
    """Compute the peak memory of each phase of a step.

    Args:
        mesh: (ranks that share parameters, replicas); None without `fully_shard`.
        limit: bytes of the GPU, for which the result states the largest batch that fits; None to leave that out.
    """
    sharding = None if mesh is None else _sharding(layers, shares, *mesh)
    resident = {"weights": totals.bytes, "optimizer states": totals.optimizer_bytes}
    if step.norm_dtype is not None:  # values and squares
        largest = max((share.held for share in shares if share.param.requires_grad), default=0)
        norm = 2 * step.norm_dtype.itemsize * largest
    else:
        norm = 0

    def peaks_of(step: TrainingStep) -> StepMemory:
        phases = rehearse(model, layers, step, sharding)
        extra_bytes = [Counter(resident), Counter(resident), Counter({**resident, "temporary": norm})]
        totals_of_phases = [
            PhaseMemory(phase.phase, {kind: size + extra[kind] for kind, size in phase.bytes.items()})
            for phase, extra in zip(phases, extra_bytes, strict=True)
        ]
        return StepMemory(tuple(totals_of_phases), str(step))

    memory = peaks_of(step)
    if limit is None:
        return memory
    return replace(
        memory, fits=_fitting(step, memory.peak, limit, lambda batch: peaks_of(replace(step, batch=batch)).peak)
    )


def _sharding(layers: Sequence[nn.Module], shares: Sequence[ParameterShare], ranks: int, replicas: int) -> StepSharding:
    units = {id(layer): UnitSizes() for layer in (None, *layers)}
    for share in shares:
        sizes = units[id(share.layer)].with_parameter(*share.sizes(ranks))
        units[id(share.layer)] = replace(sizes, reshards=share.regathered)
    return StepSharding([(layer, units[id(layer)]) for layer in layers], units[id(None)], ranks, replicas)


def _fitting(step: TrainingStep, peak: int, limit: int, peak_of: Callable[[int], int]) -> str:
    """Describe the largest batch that leaves the reserve free.

    The search assumes that peaks grow with the batch, by nearly the same amount for each sequence.
    """
    allowed = int(limit * (1 - RESERVE))
    fits, fails = {0: 0}, dict[int, int]()
    (fits if peak <= allowed else fails)[step.batch] = peak
    candidate = max(1, step.batch // 2) if fails and step.batch > 1 else 2 * step.batch
    for _ in range(_MOST_TRIES):
        if fails and min(fails) - max(fits) == 1:
            break
        candidate_peak = peak_of(candidate)
        (fits if candidate_peak <= allowed else fails)[candidate] = candidate_peak
        candidate = _next_batch({**fits, **fails}, fits, fails, allowed)
    batch = max(fits)
    size = f"{human_bytes(limit)} with {RESERVE:.0%} in reserve"
    if not batch:
        return f"not even a batch of 1 fits in {size}"
    at_least = "at least " if not fails or min(fails) - batch > 1 else ""
    return f"{at_least}{batch} x {step.seq_length} tokens fit in {size} ({human_bytes(fits[batch])})"


def _next_batch(known: dict[int, int], fits: dict[int, int], fails: dict[int, int], allowed: int) -> int:
    """Choose the next batch to try, between the largest that fits and the smallest that does not.

    The guess is where a line through the peaks of the two largest measured batches meets the limit.
    """
    (low_batch, low_peak), (high_batch, high_peak) = sorted((batch, peak) for batch, peak in known.items() if batch)[
        -2:
    ]
    guess = low_batch + (allowed - low_peak) * (high_batch - low_batch) // max(high_peak - low_peak, 1)
    lowest, highest = max(fits) + 1, min(fails) - 1 if fails else 1 << 20
    return min(max(guess, lowest), highest)
