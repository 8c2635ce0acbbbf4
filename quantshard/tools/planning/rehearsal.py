"""Peak memory of a training step on one rank: a step without values.

Forward and backward run on the meta device while their memory is counted. Modules take their GPU path
(`predictions.described_gpu`), so allocations match a GPU for quantshard's modules, converted models and plain PyTorch.
Temporaries inside GPU operations are not seen, except for attention's backward, which accumulates gradients of queries
in float32, and for the chunks of logits in a chunked loss.

Not counted: the CUDA context and NCCL buffers, which are outside PyTorch's allocator; cuBLAS workspaces, up to 32 MiB;
fragmentation of the allocator. `RESERVE` is the share of memory that `plan` sets aside for them.
"""

import copy
import inspect
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from quantshard import kernels, private_torch
from quantshard.errors import ConfigurationError
from quantshard.gemm.predictions import described_gpu
from quantshard.kernels import workspace
from quantshard.modules import autocast, checkpoint
from quantshard.modules.graphs.recorder import tensors_in
from quantshard.optimizers.gradient_release import UNIT_ELEMENTS
from quantshard.readable import human_bytes
from quantshard.recipe import Recipe
from quantshard.tensor import components
from quantshard.tensor.quantized_tensor import QuantizedTensor
from quantshard.tools.observe.costs import KINDS, PhaseMemory, Row, StepMemory, Totals
from quantshard.tools.planning.sharded_passes import GRADIENTS, ShardedPasses, ShardedUnit, UnitSizes
from quantshard.tools.planning.timeline import Allocation, MemoryTimeline, gpu_attention

RESERVE = 0.07

Loss = Callable[[nn.Module, Tensor, Tensor], Tensor]
"""(model, tokens, targets), int64 [batch, seq_length] each -> the loss; backward starts with ones of its shape."""


@dataclass(frozen=True)
class TrainingStep:
    """The work of one rank in a training step, for `plan(step=)`.

    Args:
        batch: sequences in a micro-batch on this rank.
        seq_length: tokens in a sequence.
        micro_batches: forwards and backwards in a step.
        recipe: recipe of the `autocast` around forward. None for models that enter autocast themselves, such as
            converted ones, and for models without quantized weights.
        loss: how to call the model on the meta device. By default as a language model: with `labels` if forward has
            that argument, otherwise the mean cross-entropy of the returned logits.
        checkpoint_activations: recompute each of the layers in backward.
        forward_prefetch: each layer starts the all-gather of the next layer's weights (FSDP2's
            `set_modules_to_forward_prefetch`).
        reduce_dtype: `reduce_dtype` of FSDP2's `MixedPrecisionPolicy`.
        norm_dtype: dtype in which gradients are squared, one at a time, between backward and optimizer. None: no memory
            of a gradient's size is allocated there (as in `torch.nn.utils.clip_grad_norm_`).
        release_gradients: the optimizer updates weights during backward (`FusedAdam(release_gradients=True)`).
        capability: compute capability of the GPU, which determines the native GEMMs.
    """

    batch: int
    seq_length: int
    micro_batches: int = 1
    recipe: str | Recipe | None = None
    loss: Loss | None = None
    checkpoint_activations: bool = False
    forward_prefetch: bool = False
    reduce_dtype: torch.dtype | None = None
    norm_dtype: torch.dtype | None = None
    release_gradients: bool = False
    capability: tuple[int, int] = (9, 0)

    def __str__(self) -> str:
        parts = f"{self.micro_batches} micro-batches of " if self.micro_batches > 1 else ""
        recomputed = ", layers recomputed" if self.checkpoint_activations else ""
        gpu = "compute capability {}.{}".format(*self.capability)
        return f"{parts}{self.batch} x {self.seq_length} tokens{recomputed} on {gpu}"


@dataclass(frozen=True)
class ParameterShare:
    """A parameter with its row. `layer`: what `fully_shard` wraps it with. `regathered`: all-gathered for backward."""

    layer: nn.Module | None
    param: Tensor
    row: Row
    regathered: bool

    @property
    def numel(self) -> int:
        """Number of elements on this rank, including FSDP2's padding."""
        return self.row.bf16_bytes // 2

    def unit_sizes(self, ranks: int) -> UnitSizes:
        gradients = ranks * self.numel if self.param.requires_grad else 0
        if ranks == 1:  # FSDP2 copies plain weights; a quantized one is its shard
            is_plain = self.row.scale_bytes == 0 and not self.row.is_quantized
            return UnitSizes(0, self.row.code_bytes if is_plain else 0, gradients, self.regathered)
        gathered = ranks * self.row.forward_gather_bytes
        return UnitSizes(gathered, gathered + self.row.shared_scale_bytes, gradients, self.regathered)


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
    sizes: dict[int, UnitSizes] = {}
    if mesh is not None:
        for share in shares:
            sizes[id(share.layer)] = share.unit_sizes(mesh[0]) + sizes.get(id(share.layer), UnitSizes())
    resident = Counter({"weights": totals.bytes, "optimizer states": totals.optimizer_bytes})
    at_step = Counter(resident)
    if step.norm_dtype is not None:  # values and squares
        largest = max((share.numel for share in shares if share.param.requires_grad), default=0)
        at_step["temporary"] = 2 * step.norm_dtype.itemsize * largest

    def peaks_of(step: TrainingStep) -> StepMemory:
        phases = rehearse(model, layers, step, sizes, mesh)
        return StepMemory(
            tuple(
                PhaseMemory(phase.phase, {kind: size + extra[kind] for kind, size in phase.bytes.items()})
                for phase, extra in zip(phases, (resident, resident, at_step), strict=True)
            ),
            str(step),
        )

    memory = peaks_of(step)
    if limit is None:
        return memory
    return replace(memory, fits=_fitting(step, memory.peak, limit, lambda n: peaks_of(replace(step, batch=n)).peak))


def _fitting(step: TrainingStep, peak: int, limit: int, peak_of: Callable[[int], int]) -> str:
    """Describe the largest batch that leaves the reserve free.

    Peaks grow with the batch, by nearly the same amount for each sequence. The next batch to try is therefore where a
    line through the peaks of the two largest tried ones meets the limit, between what fits and what does not.
    """
    allowed = int(limit * (1 - RESERVE))
    peaks = {step.batch: peak}
    candidate = max(1, step.batch // 2) if peak > allowed and step.batch > 1 else 2 * step.batch
    for _ in range(8):
        peaks[candidate] = peak_of(candidate)
        largest = max((batch for batch, size in peaks.items() if size <= allowed), default=0)
        too_large = min((batch for batch, size in peaks.items() if size > allowed), default=1 << 20)
        if too_large - largest == 1:
            break
        (low, low_peak), (high, high_peak) = sorted(peaks.items())[-2:]
        guess = low + (allowed - low_peak) * (high - low) // max(high_peak - low_peak, 1)
        candidate = min(max(guess, largest + 1), too_large - 1)
    size = f"{human_bytes(limit)} with {RESERVE:.0%} in reserve"
    if not largest:
        return f"not even a batch of 1 fits in {size}"
    at_least = "at least " if too_large - largest > 1 else ""
    return f"{at_least}{largest} x {step.seq_length} tokens fit in {size} ({human_bytes(peaks[largest])})"


def rehearse(
    model: nn.Module,
    layers: Sequence[nn.Module],
    step: TrainingStep,
    sizes: Mapping[int, UnitSizes],
    mesh: tuple[int, int] | None,
) -> list[PhaseMemory]:
    """Memory of each phase without weights and optimizer states. `sizes`: by the id of a layer; of None: the rest."""
    if not kernels.USABLE:
        raise ConfigurationError("plan: the memory of a step needs the kernels' code; pip install triton")
    # Drop caches, so that a plan does not depend on earlier ones.
    workspace.discard(torch.device("meta"))
    twins = _Twins(model, layers, step.checkpoint_activations)
    recording = _Recording(twins, MemoryTimeline(twins.resident_tensors()), step.release_gradients and mesh is None)
    autocasting = partial(autocast, recipe=step.recipe) if step.recipe is not None else nullcontext
    with described_gpu(step.capability), recording.timeline.recorded(), gpu_attention(), torch.enable_grad():
        passes = None if mesh is None else twins.sharded_passes(recording.timeline, sizes, mesh, step)
        size = (step.batch, step.seq_length)
        tokens, targets = (torch.empty(size, dtype=torch.int64, device="meta") for _ in range(2))
        forward = partial(step.loss or _language_loss, twins.model, tokens, targets)
        try:
            # Later micro-batches have the memory of the second.
            for number in range(min(step.micro_batches, 2)):
                if passes is not None:
                    passes.reduces = step.micro_batches == 1 or number == 1
                recording.run(forward, autocasting, passes)
        except (NotImplementedError, RuntimeError, TypeError, ValueError, AttributeError) as error:
            line = " ".join(str(error).split())
            raise ConfigurationError(
                f"plan: {type(model).__name__} does not run without values: {type(error).__name__}: {line:.300}; leave "
                "the step out to plan weights and optimizer only"
            ) from error
        return recording.phases()


class _Twins:
    """Copies of a model and its layers on the meta device, in training mode."""

    def __init__(self, model: nn.Module, layers: Sequence[nn.Module], checkpointed: bool) -> None:
        memo: dict[int, Any] = {}
        for param in model.parameters():
            quantized = components.quantized_local(param)
            value = torch.empty_like(param, device="meta") if quantized is None else _without_values(quantized)
            memo[id(param)] = nn.Parameter(value, requires_grad=param.requires_grad)
        memo |= {id(buffer): torch.empty_like(buffer, device="meta") for buffer in model.buffers()}
        names = {id(module): name for name, module in model.named_modules()}
        self.model = copy.deepcopy(model, memo).train()
        config: Any = getattr(self.model, "config", None)
        if hasattr(config, "use_cache"):
            config.use_cache = False  # as in training; a cache would keep what layers compute again
        self.layers = [self.model.get_submodule(names[id(layer)]) for layer in layers]
        for layer in self.layers if checkpointed else ():
            layer.forward = partial(checkpoint, layer.forward)
        self._layer_ids = [id(layer) for layer in layers]

    def resident_tensors(self) -> list[Tensor]:
        tensors = [*self.model.buffers()]
        for param in self.model.parameters():
            storage = components.quantized_storage(param)
            tensors += [param] if storage is None else [*storage.components.values(), *storage.state.values()]
        return tensors

    def sharded_passes(
        self, timeline: MemoryTimeline, sizes: Mapping[int, UnitSizes], mesh: tuple[int, int], step: TrainingStep
    ) -> ShardedPasses:
        """Add FSDP2's memory to passes of the copied model."""
        units, assigned = [], set[int]()
        modules = [*zip(self.layers, self._layer_ids, strict=True), (self.model, id(None))]
        for module, key in modules:
            params = [param for param in module.parameters() if id(param) not in assigned]
            assigned.update(map(id, params))
            units.append(ShardedUnit(module, params, sizes.get(key, UnitSizes())))
        units = [units[-1], *units[:-1]]
        return ShardedPasses(timeline, units, *mesh, step.reduce_dtype, step.forward_prefetch, step.release_gradients)


def _without_values(weight: QuantizedTensor) -> QuantizedTensor:
    """Copy a weight's shape and format to the meta device. Its draw count stays on the CPU."""
    storage = weight.quantized_storage
    state = {name: value.clone() if value.is_cpu else torch.empty_like(value) for name, value in storage.state.items()}
    parts = {name: torch.empty_like(part, device="meta") for name, part in storage.components.items()}
    return QuantizedTensor(replace(storage, components=parts, state=state, high_precision=None), weight.dtype)


def _language_loss(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    """The model's own loss if its forward takes `labels`, otherwise the mean cross-entropy of its logits."""
    if "labels" in inspect.signature(model.forward).parameters:
        return model(input_ids=tokens, labels=targets).loss
    return F.cross_entropy(model(tokens).flatten(0, -2), targets.flatten())


@dataclass
class _PassMoments:
    """Moments of one forward and backward: the end of each, and when the head (what follows the layers) runs."""

    begin: int
    forward_end: int = 0
    backward_end: int = 0
    head_begin: int | None = None
    head_end: int | None = None

    def kind_of(self, allocation: Allocation) -> str:
        if allocation.kind:
            return allocation.kind
        if self.head_begin is not None and self.head_begin < allocation.born <= (self.head_end or self.backward_end):
            return "head and loss"
        return "activations" if allocation.born <= self.forward_end < allocation.died else "temporary"


class _Recording:
    """Runs the passes of a step and computes the memory of each phase."""

    def __init__(self, twins: _Twins, timeline: MemoryTimeline, releases_gradients: bool) -> None:
        self.timeline, self._passes = timeline, list[_PassMoments]()
        self._releases_gradients, self._unreleased = releases_gradients, list[Tensor]()
        for param in twins.model.parameters():
            if param.requires_grad:
                param.register_post_accumulate_grad_hook(self._label)
        if twins.layers:
            twins.layers[-1].register_forward_hook(self._behind_layers)

    def run(self, forward: Callable[[], Tensor], autocasting: Callable[[], Any], passes: ShardedPasses | None) -> None:
        moments = _PassMoments(self.timeline.now)
        self._passes.append(moments)
        with autocasting():
            loss = forward()
        moments.forward_end = self.timeline.tick()
        loss.backward(torch.ones_like(loss))
        if passes is not None:
            passes.finish()
        del loss
        moments.backward_end = self.timeline.tick()

    def phases(self) -> list[PhaseMemory]:
        """Peaks of forward and of backward over all passes, and what remains at the end."""
        forwards = [self.timeline.highest(pass_.begin, pass_.forward_end) for pass_ in self._passes]
        backwards = [self.timeline.highest(pass_.forward_end, pass_.backward_end) for pass_ in self._passes]
        peaks = [max(map(self._at, moments), key=lambda bytes_: bytes_.total()) for moments in (forwards, backwards)]
        names = ("forward", "backward", "optimizer step")
        return [
            PhaseMemory(name, {kind: bytes_[kind] for kind in KINDS})
            for name, bytes_ in zip(names, [*peaks, self._at(self.timeline.now)], strict=True)
        ]

    def _at(self, moment: int) -> Counter[str]:
        bytes_by_kind: Counter[str] = Counter()
        for allocation in self.timeline.allocations:
            if allocation.lives(moment):
                pass_ = next(p for p in reversed(self._passes) if p.begin < allocation.born or p is self._passes[0])
                bytes_by_kind[pass_.kind_of(allocation)] += allocation.bytes
        return bytes_by_kind

    def _label(self, param: Tensor) -> None:
        assert param.grad is not None
        self.timeline.label(param.grad, GRADIENTS)
        if self._releases_gradients:
            self._unreleased.append(param)
            if sum(param.numel() for param in self._unreleased) >= UNIT_ELEMENTS:
                while self._unreleased:
                    self._unreleased.pop().grad = None

    def _behind_layers(self, module: nn.Module, args: tuple[Any, ...], out: Any) -> None:
        if private_torch.in_backward():
            return
        moments = self._passes[-1]
        moments.head_begin = self.timeline.now

        def mark_head_end(gradient: Tensor) -> None:
            moments.head_end = moments.head_end or self.timeline.now

        for tensor in tensors_in(out):
            if tensor.requires_grad:
                tensor.register_hook(mark_head_end)
