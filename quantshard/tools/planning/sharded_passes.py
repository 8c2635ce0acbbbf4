"""What FSDP2 takes of memory in a step: gathered weights, what a reduction reads and writes, and when it lets go.

The passes of a model that nobody has wrapped take the memory, on the meta device, that `fully_shard` would take around
them: each call of it is a `ShardedUnit`. This is what torch 2.13 does:

- A forward gathers a unit into one buffer and copies that into the weights. The buffer stays until the next unit has
  copied its own; in backward it goes at once. A unit with `reshard_after_forward` frees its weights after its forward.
- Backward gathers while it computes the unit before, and frees after the unit. Its gradients are copied into a buffer
  of the dtype of the reduction, which stays until the next unit's are; the reduced shard is cast to the parameters'
  dtype. Over replicas (HSDP) the reduced shard stays as long, before it is cast.
- Of one rank there is nothing to gather, but plain weights are copied and gradients go through the same buffers.
- Micro-batches before the last reduce nothing: gradients add up, whole, in the dtype of the reduction.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from quantshard import private_torch
from quantshard.tools.planning.timeline import MemoryTimeline, meta_bytes, tensors_in

GATHERED, GRADIENTS = "gathered weights", "gradients"
"""Kinds of memory."""


@dataclass(frozen=True)
class UnitSizes:
    """What one call of `fully_shard` handles: bytes of the buffer of an all-gather and of the weights that are made of
    it, elements of its gradients with what fills them up, and whether a forward frees the weights."""

    gathered: int = 0
    weights: int = 0
    gradients: int = 0
    reshards: bool = True

    def with_parameter(self, gathered: int, weights: int, gradients: int) -> UnitSizes:
        """These sizes and those of one more parameter."""
        return UnitSizes(self.gathered + gathered, self.weights + weights, self.gradients + gradients, self.reshards)


@dataclass
class ShardedUnit:
    """A module that `fully_shard` wraps, with the parameters that are in no unit within it."""

    module: nn.Module
    params: list[nn.Parameter]
    sizes: UnitSizes
    follows: ShardedUnit | None = None
    buffer: Tensor | None = None
    weights: Tensor | None = None
    shard: Tensor | None = None
    whole: list[Tensor] = field(default_factory=list)
    passed: list[int] = field(default_factory=list)
    is_reduced: bool = True

    @property
    def dtype(self) -> torch.dtype:
        """Of its gradients; FSDP2 wants one."""
        return next((param.dtype for param in self.params if param.requires_grad), torch.float32)

    def add_up(self) -> None:
        """Add gradients to those of micro-batches before, where these have a dtype of their own."""
        if self.whole:
            self._drop()

    def keep_whole(self, dtype: torch.dtype) -> None:
        """Keep gradients for a later micro-batch, in the dtype of the reduction."""
        for param in self.params:
            if param.grad is not None and param.grad.dtype != dtype:
                self.whole.append(param.grad.to(dtype))
                param.grad = None

    def clear(self) -> None:
        """Let go of whole gradients."""
        self.whole.clear()
        self._drop()

    def _drop(self) -> None:
        for param in self.params:
            param.grad = None


class ShardedPasses:
    """Takes FSDP2's memory around the forward and backward of modules, by hooks.

    `ranks`: over which units are sharded. `replicas`: of which each has all shards. `reduce_dtype`: None for the
    gradients' own. `prefetches`: a unit's forward begins to gather the next one.
    """

    def __init__(
        self,
        timeline: MemoryTimeline,
        units: list[ShardedUnit],
        root: ShardedUnit,
        ranks: int,
        replicas: int,
        reduce_dtype: torch.dtype | None,
        prefetches: bool,
    ) -> None:
        self.timeline, self.units, self.ranks, self.replicas = timeline, [root, *units], ranks, replicas
        self.reduce_dtype, self.reduces = reduce_dtype, True
        self._order: list[ShardedUnit] = []
        self._last_buffer: Tensor | None = None
        self._reducing: list[Tensor] = []
        if prefetches:
            for unit, following in pairwise(units):
                unit.follows = following
        for unit in self.units:
            unit.module.register_forward_pre_hook(self._before(unit), prepend=True, with_kwargs=True)
            unit.module.register_forward_hook(self._after(unit))

    def finish(self) -> None:
        """End a backward: reduce what no gradient of an input told of, and let go of buffers."""
        for unit in self.units:
            self._post_backward(unit)
            unit.passed.clear()
        self._reducing.clear()
        self._order.clear()

    # The four hooks --------------------------------------------------------------------------------------------------

    def _before(self, unit: ShardedUnit) -> Callable[..., Any]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if private_torch.in_backward():  # a recomputation, whose unit is gathered
                return None
            self._gather(unit)
            self._unpack(unit, forward=True)
            if unit.follows is not None:
                self._gather(unit.follows)
            return _with_node(lambda: self._post_backward(unit), args, kwargs)

        return hook

    def _after(self, unit: ShardedUnit) -> Callable[..., Any]:
        def hook(module: nn.Module, args: tuple[Any, ...], out: Any) -> None:
            if private_torch.in_backward():
                return
            if unit is self.units[0]:
                self._last_buffer = None
            if unit.sizes.reshards:
                unit.weights = None
            unit.passed.append(len(self._order))
            self._order.append(unit)
            unit.is_reduced = False
            for tensor in tensors_in(out):
                if tensor.requires_grad:
                    tensor.register_hook(lambda gradient: self._pre_backward(unit))

        return hook

    def _pre_backward(self, unit: ShardedUnit) -> None:
        self._gather(unit)
        self._unpack(unit, forward=False)
        if unit.passed and (place := unit.passed.pop()) > 0:
            self._gather(self._order[place - 1])

    def _post_backward(self, unit: ShardedUnit) -> None:
        if unit.is_reduced:
            return
        unit.is_reduced, unit.weights = True, None
        with self.timeline.labelled(GRADIENTS), torch.no_grad():
            unit.add_up()
            if not self.reduces:
                unit.keep_whole(self.reduce_dtype or unit.dtype)
                return
            self._reducing.clear()
            buffer = torch.empty(unit.sizes.gradients, dtype=self.reduce_dtype or unit.dtype, device="meta")
            unit.clear()
            reduced = buffer.new_empty(unit.sizes.gradients // self.ranks)
            self._reducing = [buffer, *[reduced] * (self.replicas > 1)]
            unit.shard = reduced.to(unit.dtype)

    # What they take and give back ------------------------------------------------------------------------------------

    def _gather(self, unit: ShardedUnit) -> None:
        if unit.buffer is None and unit.weights is None:
            with self.timeline.labelled(GATHERED):
                unit.buffer = meta_bytes(unit.sizes.gathered)

    def _unpack(self, unit: ShardedUnit, forward: bool) -> None:
        if unit.buffer is None:
            return
        if forward:
            self._last_buffer = None
        with self.timeline.labelled(GATHERED):
            unit.weights = meta_bytes(unit.sizes.weights)
        if forward:
            self._last_buffer = unit.buffer
        unit.buffer = None


def _with_node(called: Callable[[], None], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Arguments of a module whose gradients tell when its backward is through; None where none has a gradient."""
    inputs: list[Tensor] = []

    def noted(tensor: Tensor) -> Tensor:
        if tensor.requires_grad:
            inputs.append(tensor)
        return tensor

    _changed((args, kwargs), noted)
    if not inputs or not torch.is_grad_enabled():
        return None
    results = iter(_Node.apply(called, *inputs))  # type: ignore[no-untyped-call]
    return _changed((args, kwargs), lambda tensor: next(results) if tensor.requires_grad else tensor)


def _changed(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Nested tuples, lists and dicts with their tensors changed."""
    if isinstance(value, Tensor):
        return change(value)
    if type(value) in (tuple, list):
        return type(value)(_changed(each, change) for each in value)
    if type(value) is dict:
        return {key: _changed(each, change) for key, each in value.items()}
    return value


class _Node(torch.autograd.Function):
    """Calls a function where backward has the gradients of some inputs of a module."""

    @staticmethod
    def forward(ctx: Any, called: Callable[[], None], *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.called = called
        return inputs

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        ctx.called()
        return None, *gradients
