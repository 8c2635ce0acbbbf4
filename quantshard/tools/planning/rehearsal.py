"""A training step without values: its forward and backward run on the meta device, and their memory is counted.

The modules take the way that they take on a GPU (`gemm.described_gpu`), so what is counted is what they would allocate,
whatever they are: quantshard's modules, converted ones, or plain PyTorch. What a GPU's operations allocate for
themselves and give back at once is unseen, but for attention's backward, which sums gradients of queries in float32.
"""

from __future__ import annotations

import copy
import inspect
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from quantshard import kernels, private_torch
from quantshard.argument_kinds import suggests_names
from quantshard.errors import ConfigurationError
from quantshard.gemm.described_gpu import described_gpu
from quantshard.kernels import tables, workspace
from quantshard.modules import autocast, checkpoint
from quantshard.recipe import Recipe
from quantshard.tensor import components
from quantshard.tensor.quantized_tensor import QuantizedTensor
from quantshard.tools.observe.step_memory import KINDS, PhaseMemory
from quantshard.tools.planning.gpu_operations import GpuTimeline, gpu_attention
from quantshard.tools.planning.sharded_passes import GRADIENTS, ShardedPasses, ShardedUnit, UnitSizes
from quantshard.tools.planning.timeline import Allocation, tensors_in

_ACTIVATIONS, _HEAD, _TEMPORARY = "activations", "head and loss", "temporary"

Loss = Callable[[nn.Module, Tensor, Tensor], Tensor]
"""Model, tokens and targets, int64 [batch, seq_length] -> what backward begins with; of several elements, with ones."""


@dataclass(frozen=True)
class TrainingStep:
    """What one rank does in a step, for `plan` to tell its memory.

    Args:
        batch: sequences of a micro-batch on this rank.
        seq_length: tokens of a sequence.
        micro_batches: forwards and backwards of a step.
        recipe: what `autocast` runs the forward with; None for models that enter it themselves, as converted ones do,
            and for those without quantized weights.
        loss: how the model is called, on the meta device. By default as a language model: with `labels` if its forward
            has them, else the mean cross-entropy of the logits that it returns.
        checkpoint_activations: each of the layers is recomputed in backward.
        forward_prefetch: each layer begins to gather the next one's weights, by `set_modules_to_forward_prefetch`.
        reduce_dtype: of FSDP2's `MixedPrecisionPolicy`.
        norm_dtype: in which squares of gradients are taken between backward and optimizer, one gradient after another;
            None: nothing of their size is taken (as by `torch.nn.utils.clip_grad_norm_`).
        capability: compute capability of the GPU, which says what products it has.
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
    capability: tuple[int, int] = (9, 0)

    def check(self) -> None:
        """Refuse what is no step.

        Raises:
            ConfigurationError: a count is no positive number; Triton is missing.
        """
        for name in ("batch", "seq_length", "micro_batches"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ConfigurationError(f"TrainingStep({name}={value!r}): give a number from 1 on")
        if not kernels.USABLE:
            raise ConfigurationError(
                "plan: what a step takes is counted with the kernels, for which Triton must be installed (no GPU is "
                "needed): pip install triton"
            )

    def __str__(self) -> str:
        parts = f"{self.micro_batches} micro-batches of " if self.micro_batches > 1 else ""
        again = ", layers recomputed" if self.checkpoint_activations else ""
        gpu = "compute capability {}.{}".format(*self.capability)
        return f"{parts}{self.batch} x {self.seq_length} tokens{again} on {gpu}"


TrainingStep.__init__ = suggests_names(TrainingStep.__init__)  # type: ignore[method-assign]


@dataclass(frozen=True)
class StepSharding:
    """How `fully_shard` wraps a model: for each of its layers, and for the model itself, what that call handles; over
    how many ranks, and replicas of these."""

    layers: Sequence[tuple[nn.Module, UnitSizes]]
    root: UnitSizes
    ranks: int
    replicas: int


def rehearse(
    model: nn.Module, layers: Sequence[nn.Module], step: TrainingStep, sharding: StepSharding | None
) -> list[PhaseMemory]:
    """The memory of forward, of backward, and of what is left behind them, without that of weights and optimizer.

    `sharding`: None for a model that `fully_shard` does not wrap.

    Raises:
        ConfigurationError: the model cannot run without values.
    """
    step.check()
    for lasting in (workspace, tables):  # a plan is the same whatever was planned before
        lasting.discard(torch.device("meta"))
    twins = _Twins(model, layers, step.checkpoint_activations)
    recording = _Recording(twins, GpuTimeline(twins.held()))
    autocasting = partial(autocast, recipe=step.recipe) if step.recipe is not None else nullcontext
    with described_gpu(step.capability), recording.timeline.recorded(), gpu_attention(), torch.enable_grad():
        passes = None if sharding is None else twins.sharded_passes(recording.timeline, sharding, step)
        size = (step.batch, step.seq_length)
        tokens, targets = (torch.empty(size, dtype=torch.int64, device="meta") for _ in range(2))
        forward = partial(step.loss or _language_loss, twins.model, tokens, targets)
        try:
            for number in range(min(step.micro_batches, 2)):  # from the second on they are alike
                if passes is not None:
                    passes.reduces = step.micro_batches == 1 or number == 1
                recording.run(forward, autocasting, passes)
        except (NotImplementedError, RuntimeError, TypeError, ValueError, AttributeError) as error:
            line = " ".join(str(error).split())
            raise ConfigurationError(
                f"plan: {type(model).__name__} does not run without values, as the memory of a step is counted: "
                f"{type(error).__name__}: {line:.300}; leave the step out to plan weights and optimizer alone"
            ) from error
        return recording.phases()


class _Twins:
    """A copy of a model on the meta device, and of its layers, in training mode."""

    def __init__(self, model: nn.Module, layers: Sequence[nn.Module], checkpointed: bool) -> None:
        memo: dict[int, Any] = {id(param): _twin(param) for param in model.parameters()}
        memo |= {id(buffer): torch.empty_like(buffer, device="meta") for buffer in model.buffers()}
        names = {id(module): name for name, module in model.named_modules()}
        self.model = copy.deepcopy(model, memo).train()
        self.layers = [self.model.get_submodule(names[id(layer)]) for layer in layers]
        for layer in self.layers if checkpointed else ():
            layer.forward = partial(checkpoint, layer.forward)
        self._names = names

    def held(self) -> list[Tensor]:
        """Tensors that are there before the step."""
        found = [*self.model.buffers()]
        for param in self.model.parameters():
            quantized = components.quantized_local(param)
            parts = [param] if quantized is None else [*quantized.quantized_storage.components.values()]
            found += parts if quantized is None else [*parts, *quantized.quantized_storage.state.values()]
        return found

    def sharded_passes(self, timeline: GpuTimeline, sharding: StepSharding, step: TrainingStep) -> ShardedPasses:
        """FSDP2's memory around them."""
        units, taken = [], set[int]()
        for layer, (_, sizes) in zip(self.layers, sharding.layers, strict=True):
            params = [param for param in layer.parameters() if id(param) not in taken]
            taken.update(map(id, params))
            units.append(ShardedUnit(layer, params, sizes))
        rest = [param for param in self.model.parameters() if id(param) not in taken]
        root = ShardedUnit(self.model, rest, sharding.root)
        return ShardedPasses(
            timeline, units, root, sharding.ranks, sharding.replicas, step.reduce_dtype, step.forward_prefetch
        )


def _twin(param: nn.Parameter) -> nn.Parameter:
    quantized = components.quantized_local(param)
    value = torch.empty_like(param, device="meta") if quantized is None else _without_values(quantized)
    return nn.Parameter(value, requires_grad=param.requires_grad)


def _without_values(weight: QuantizedTensor) -> QuantizedTensor:
    """A weight of the same shape and format, whose draws are its own; the CPU counts them, as on every device."""
    storage = weight.quantized_storage
    state = {name: value.clone() if value.is_cpu else torch.empty_like(value) for name, value in storage.state.items()}
    parts = {name: torch.empty_like(part, device="meta") for name, part in storage.components.items()}
    return QuantizedTensor(replace(storage, components=parts, state=state, high_precision=None), weight.dtype)


def _language_loss(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    """Of a language model: its own, where it takes labels, or the mean cross-entropy of its logits."""
    if "labels" in inspect.signature(model.forward).parameters:
        found: Tensor = model(input_ids=tokens, labels=targets).loss
        return found
    logits = model(tokens)
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten())


@dataclass
class _PassMoments:
    """The moments of one forward and backward: where each ends, and what lies behind the layers."""

    begin: int
    forward_end: int = 0
    backward_end: int = 0
    head_begin: int | None = None
    head_end: int | None = None

    def kind_of(self, allocation: Allocation) -> str:
        """What an allocation that was made in this pass is for."""
        if allocation.kind:
            return allocation.kind
        if self.head_begin is not None and self.head_begin < allocation.born <= (self.head_end or self.backward_end):
            return _HEAD
        return _ACTIVATIONS if allocation.born <= self.forward_end < allocation.died else _TEMPORARY


class _Recording:
    """Runs the passes of a step and tells what each phase takes."""

    def __init__(self, twins: _Twins, timeline: GpuTimeline) -> None:
        self.timeline, self._passes = timeline, list[_PassMoments]()
        for param in twins.model.parameters():
            if param.requires_grad:
                param.register_post_accumulate_grad_hook(self._label)
        if twins.layers:
            twins.layers[-1].register_forward_hook(self._behind_layers)

    def run(self, forward: Callable[[], Tensor], autocasting: Callable[[], Any], passes: ShardedPasses | None) -> None:
        """One forward and backward."""
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
        """Forward and backward at their highest, of all passes, and what is left in the end."""
        forwards = [self.timeline.highest(each.begin, each.forward_end) for each in self._passes]
        backwards = [self.timeline.highest(each.forward_end, each.backward_end) for each in self._passes]
        found = [max(map(self._at, moments), key=lambda bytes_: bytes_.total()) for moments in (forwards, backwards)]
        names = ("forward", "backward", "optimizer step")
        return [
            PhaseMemory(name, {kind: bytes_[kind] for kind in KINDS})
            for name, bytes_ in zip(names, [*found, self._at(self.timeline.now)], strict=True)
        ]

    def _at(self, moment: int) -> Counter[str]:
        found: Counter[str] = Counter()
        for each in self.timeline.allocations:
            if each.lives(moment):
                pass_ = next(p for p in reversed(self._passes) if p.begin < each.born or p is self._passes[0])
                found[pass_.kind_of(each)] += each.bytes
        return found

    def _label(self, param: Tensor) -> None:
        assert param.grad is not None
        self.timeline.label(param.grad, GRADIENTS)

    def _behind_layers(self, module: nn.Module, args: tuple[Any, ...], out: Any) -> None:
        if private_torch.in_backward():
            return
        moments = self._passes[-1]
        moments.head_begin = self.timeline.now

        def reached(gradient: Tensor) -> None:
            moments.head_end = moments.head_end or self.timeline.now

        for tensor in tensors_in(out):
            if tensor.requires_grad:
                tensor.register_hook(reached)
