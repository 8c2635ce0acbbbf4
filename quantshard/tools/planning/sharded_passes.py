"""FSDP2's memory in a training step: unsharded weights, reduce-scatter buffers, and when each is freed.

Passes of an unwrapped model on the meta device allocate the memory that `fully_shard` would allocate; each call of
`fully_shard` is a `ShardedUnit`. The model of torch 2.13:

- A forward all-gathers a unit into one buffer and copies the buffer into the weights. The buffer stays until the next
  unit has copied its own; in backward it is freed at once. A unit with `reshard_after_forward` frees its weights after
  its forward.
- Backward prefetches the all-gather of the previous unit and frees weights after the unit. Gradients are copied into a
  buffer of the reduce dtype, which stays until the next unit's gradients are copied; the reduced shard is cast to the
  parameters' dtype. With replicas (HSDP) the uncast reduced shard stays as long as the buffer.
- On one rank nothing is all-gathered, but plain weights are copied and gradients use the same buffers.
- Micro-batches before the last reduce nothing: unsharded gradients accumulate in the reduce dtype.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from quantshard import private_torch
from quantshard.modules.graphs.recorder import tensors_in
from quantshard.optimizers.gradient_release import UNIT_ELEMENTS
from quantshard.tools.planning.timeline import MemoryTimeline, meta_bytes

GATHERED, GRADIENTS = "gathered weights", "gradients"


@dataclass(frozen=True)
class UnitSizes:
    """Sizes of one call of `fully_shard`.

    `gathered`: bytes of the all-gather buffer. `weights`: bytes of the unsharded weights. `gradients`: elements of
    unsharded gradients, with padding. `reshards`: whether a forward frees the weights.
    """

    gathered: int = 0
    weights: int = 0
    gradients: int = 0
    reshards: bool = True

    def __add__(self, other: "UnitSizes") -> "UnitSizes":
        gathered, weights = self.gathered + other.gathered, self.weights + other.weights
        return UnitSizes(gathered, weights, self.gradients + other.gradients, self.reshards)


@dataclass
class ShardedUnit:
    """A module that `fully_shard` wraps, with the parameters that belong to no nested unit."""

    module: nn.Module
    params: list[nn.Parameter]
    sizes: UnitSizes
    follows: "ShardedUnit | None" = None
    buffer: Tensor | None = None
    weights: Tensor | None = None
    shard: Tensor | None = None
    accumulated: list[Tensor] = field(default_factory=list)
    passed: list[int] = field(default_factory=list)
    is_reduced: bool = True

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the gradients; FSDP2 requires a single one."""
        return next((param.dtype for param in self.params if param.requires_grad), torch.float32)

    def clear_gradients(self) -> None:
        for param in self.params:
            param.grad = None


class ShardedPasses:
    """Allocates FSDP2's memory around the forward and backward of modules, by hooks. The first unit is the whole model.

    `ranks`: number of ranks that units are sharded over. `replicas`: number of copies of all shards. `reduce_dtype`:
    None for the dtype of the gradients. `prefetches`: a unit's forward starts the all-gather of the next unit.
    `releases`: whether gradients are freed during backward (`optimizers.gradient_release`).
    """

    def __init__(
        self,
        timeline: MemoryTimeline,
        units: list[ShardedUnit],
        ranks: int,
        replicas: int,
        reduce_dtype: torch.dtype | None,
        prefetches: bool,
        releases: bool = False,
    ) -> None:
        self.timeline, self.units, self.ranks, self.replicas = timeline, units, ranks, replicas
        self.reduce_dtype, self.reduces, self.releases = reduce_dtype, True, releases
        self._order: list[ShardedUnit] = []
        self._last_buffer: Tensor | None = None
        self._reducing: list[Tensor] = []
        self._unreleased: list[ShardedUnit] = []
        if prefetches:
            for unit, following in pairwise(units[1:]):
                unit.follows = following
        for unit in self.units:
            unit.module.register_forward_pre_hook(partial(self._before, unit), prepend=True, with_kwargs=True)
            unit.module.register_forward_hook(partial(self._after, unit))

    def finish(self) -> None:
        """End a backward: reduce the units without a gradient of their inputs, and free buffers."""
        for unit in self.units:
            self._post_backward(unit)
            unit.passed.clear()
        self._reducing.clear()
        self._order.clear()

    def _before(self, unit: ShardedUnit, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # During recomputation the unit is already unsharded.
        if private_torch.in_backward():
            return None
        self._gather(unit)
        self._unpack(unit, forward=True)
        if unit.follows is not None:
            self._gather(unit.follows)
        return _with_node(partial(self._post_backward, unit), args, kwargs)

    def _after(self, unit: ShardedUnit, module: nn.Module, args: tuple[Any, ...], out: Any) -> None:
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
                tensor.register_hook(partial(self._pre_backward, unit))

    def _pre_backward(self, unit: ShardedUnit, gradient: Tensor) -> None:
        self._gather(unit)
        self._unpack(unit, forward=False)
        if unit.passed and (position := unit.passed.pop()) > 0:
            self._gather(self._order[position - 1])

    def _post_backward(self, unit: ShardedUnit) -> None:
        if unit.is_reduced:
            return
        unit.is_reduced, unit.weights = True, None
        with self.timeline.labelled(GRADIENTS), torch.no_grad():
            # Gradients are added to those that earlier micro-batches left in the reduce dtype.
            if unit.accumulated:
                unit.clear_gradients()
            dtype = self.reduce_dtype or unit.dtype
            if not self.reduces:
                for param in unit.params:
                    if param.grad is not None and param.grad.dtype != dtype:
                        unit.accumulated.append(param.grad.to(dtype))
                        param.grad = None
                return
            self._reducing.clear()
            buffer = torch.empty(unit.sizes.gradients, dtype=dtype, device="meta")
            unit.accumulated.clear()
            unit.clear_gradients()
            reduced = buffer.new_empty(unit.sizes.gradients // self.ranks)
            self._reducing = [buffer, *[reduced] * (self.replicas > 1)]
            unit.shard = reduced.to(unit.dtype)
            if self.releases:
                self._unreleased.append(unit)
                if sum(unit.sizes.gradients for unit in self._unreleased) >= UNIT_ELEMENTS:
                    while self._unreleased:
                        self._unreleased.pop().shard = None

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
    """Wrap a module's arguments so that its backward ends with `called`; None if no argument has a gradient."""
    values = [*args, *kwargs.values()]
    inputs = [value for value in values if isinstance(value, Tensor) and value.requires_grad]
    if not inputs or not torch.is_grad_enabled():
        return None
    results = iter(_Node.apply(called, *inputs))  # type: ignore[no-untyped-call]
    values = [next(results) if isinstance(value, Tensor) and value.requires_grad else value for value in values]
    return tuple(values[: len(args)]), dict(zip(kwargs, values[len(args) :], strict=True))


class _Node(torch.autograd.Function):
    """Identity that calls a function once backward has the gradients of a module's inputs."""

    @staticmethod
    def forward(ctx: Any, called: Callable[[], None], *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.called = called
        return inputs

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        ctx.called()
        return None, *gradients
