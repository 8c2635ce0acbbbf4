"""Forward and backward of a callable as two CUDA graphs, recorded once with fixed tensors and replayed.

Side effects of a pass (amaxes for histories, the count of layers that ran) are recorded separately, and each replay
repeats them. Everything that the graphs treat as constant is compared before each replay.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor

from quantshard import kernel_dispatch, limits, private_torch
from quantshard.collectives.delayed_scaling import PendingAmaxes, PendingHistory, merged_slots
from quantshard.collectives.process_groups import Groups
from quantshard.errors import ConfigurationError, UnsupportedOperationError
from quantshard.modules.contexts import context, pending_amaxes, recompute
from quantshard.modules.graphs import recorder as recorders
from quantshard.modules.graphs.recorder import GraphAddresses, GraphRecorder

# Side effects of a pass ----------------------------------------------------------------------------------------------


class AmaxNotes(NamedTuple):
    """Amaxes [n] that a pass records for n histories: arguments of `PendingAmaxes.note_all`."""

    keys: Sequence[Tensor]
    number: int
    histories: Sequence[Tensor]
    amaxes: Tensor
    group: Groups


class AmaxRecord(PendingAmaxes):
    """Collects the amaxes of a captured pass. It writes no histories, since each replay records its own amaxes."""

    def flush(self) -> None:
        """Keep the amaxes when the pass leaves autocast; `notes` reads them later."""

    def _keep(self, slot: Tensor, histories: Sequence[Tensor]) -> None:
        """Do nothing, because the slots are in the graph's own memory and no other pass has them."""

    def notes(self) -> list[AmaxNotes]:
        """Return all amaxes, with one tensor per number and group, which each replay of the graph writes."""
        pending_by_key: dict[tuple[int, Groups], list[PendingHistory]] = {}
        for item in self.histories():
            pending_by_key.setdefault((item.number, item.group), []).append(item)
        return [
            AmaxNotes(
                [item.key for item in group_members], number, [item.history for item in group_members],
                torch.stack(merged_slots([item.slots for item in group_members])), group,
            )
            for (number, group), group_members in pending_by_key.items()
        ]  # fmt: skip


def copied_gradients(grads: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Copy gradients that each replay overwrites, in one launch if all have one dtype and none is a DTensor."""
    sources = [grad for grad in grads if grad is not None]
    if not sources or any(isinstance(grad, DTensor) for grad in sources):
        copies = [grad.clone() for grad in sources]
    else:
        copies = [torch.empty_like(grad) for grad in sources]
        torch.ops.aten._foreach_copy_.default(copies, sources)
    remaining = iter(copies)
    return [None if grad is None else next(remaining) for grad in grads]


@dataclass
class PassRecord:
    """Outputs of a captured pass: tensors that each replay overwrites, and the amaxes it records."""

    tensors: list[Tensor | None]
    notes: list[AmaxNotes]

    def note(self, pending: PendingAmaxes) -> None:
        """Record a replay's amaxes, cloned, since the next replay can run before they reach the histories."""
        for keys, number, histories, amaxes, group in self.notes:
            pending.note_all(keys, number, histories, amaxes.clone(), group)


class GraphOrder:
    """Tracks which forwards of callables with shared memory still have their saved activations.

    Memory is assigned in the order of capture: all forwards, then all backwards from last to first. The activations of
    a callable are overwritten by its own forward and by forwards and backwards of earlier callables, but not by later
    ones. Callables from another capture with the same `pool` can use any part of the memory, so a replay invalidates
    the activations of all of them.
    """

    _in_pool: ClassVar[dict[Hashable, weakref.WeakSet[GraphOrder]]] = {}

    def __init__(self, count: int, pool: Hashable = None) -> None:
        self._tokens: list[object | None] = [None] * count
        alone = weakref.WeakSet[GraphOrder]()
        self._sharing = alone if pool is None else self._in_pool.setdefault(pool, alone)
        self._sharing.add(self)

    def begin(self, index: int) -> object:
        """Register a forward. Returns a token to pass to `end`."""
        self._overwrite(index)
        self._tokens[index] = token = object()
        return token

    def end(self, index: int, token: object, owner: str) -> None:
        """Register the backward of a forward. Raise if another replay overwrote the activations, or a backward ran."""
        if self._tokens[index] is not token:
            raise UnsupportedOperationError(limits.refusal("overwritten activations", owner))
        self._overwrite(index)

    def _overwrite(self, index: int) -> None:
        for order in self._sharing:
            start = index if order is self else 0
            order._tokens[start:] = [None] * (len(order._tokens) - start)


# Graphs ---------------------------------------------------------------------------------------------------------------

_HINTS = ("is_first_microbatch",)
"""Arguments that change no result, so that a call can pass another value than the sample."""


class ModuleGraph:
    """Takes the place of a module's `forward`, or of a function, and replays its forward and backward graphs.

    It calls the original in eval mode, without gradients, under torch.compile, and during another capture. `entered`
    creates the context of the capture. Calls must have the arguments of the capture.
    """

    def __init__(
        self, subject: Callable[..., Any], owner: str, arguments: tuple[tuple[Any, ...], dict[str, Any]],
        entered: Callable[[], AbstractContextManager[Any]], allow_unused: bool,
    ) -> None:  # fmt: skip
        self.subject, self.owner, self.eager = subject, owner, eager_forward(subject)
        self._module = subject if isinstance(subject, nn.Module) else None
        self._entered, self._allow_unused = entered, allow_unused
        self._kind = self._kind_of(_compared(*arguments))
        # at fixed addresses, which each replay copies new values to
        self._static = recorders.mapped(arguments, lambda x: x.detach().clone().requires_grad_(x.requires_grad))
        self._inputs = list(recorders.tensors_in(_compared(*self._static)))
        params = [] if self._module is None else self._module.parameters()
        self._params = [param for param in params if param.requires_grad]
        self._trained = [tensor for tensor in (*self._inputs, *self._params) if tensor.requires_grad]
        # outputs with their autograd graph, between a forward and its backward
        self._ends: list[Tensor] = []
        self._grad_outputs: list[Tensor | None] = []
        self._launch_backward: Any = None

    def reset(self) -> None:
        """Restore the module's own forward. The graphs and their memory are freed when nothing else refers to them."""
        if self._module is not None and vars(self._module).get("forward") is self:
            del self._module.forward

    def __reduce__(self) -> Any:
        # a copy has other parameters than the graphs
        return eager_forward, (self.subject,)

    # Capture

    def warm(self, times: int) -> None:
        """Run forward and backward eagerly, `times` times."""
        for _ in range(times):
            self._forward()
            self._check_reached()
            self._grad_outputs = [torch.zeros_like(end) if end.requires_grad else None for end in self._ends]
            if any(grad is not None for grad in self._grad_outputs):
                self._backward()

    def capture_forward(self, recorder: GraphRecorder, order: GraphOrder, index: int, draws: bool) -> None:
        """Record the forward. `draws`: the callable draws random words, by keys that the graph fixes by value."""
        self._order, self._index = order, index
        with self._entered():
            self._surroundings = recorders.surroundings()
        self._launch_forward, self._outputs = recorder.record(self.owner, self._forward)
        self._differentiable = [end.requires_grad for end in self._ends]
        # without parameters, buffers and views of them, which a replay does not write
        owned = [] if self._module is None else [*self._module.parameters(), *self._module.buffers()]
        owned_memory = {_storage_address(tensor) for tensor in owned}
        outputs = (tensor for tensor in self._outputs.tensors if tensor is not None)
        self._written = [tensor for tensor in outputs if _storage_address(tensor) not in owned_memory]
        self._addresses = GraphAddresses(self._module, draws)

    def capture_backward(self, recorder: GraphRecorder) -> None:
        if any(grad is not None for grad in self._grad_outputs):
            self._launch_backward, self._grads = recorder.record(self.owner, self._backward)
            grads = dict(zip(map(id, self._trained), self._grads.tensors, strict=True))
            self._sources = [grads.get(id(tensor)) for tensor in (*self._inputs, *self._params)]
        self._ends = []

    def _forward(self) -> PassRecord:
        record = AmaxRecord()
        with pending_amaxes.amaxes_noted_in(record, AmaxRecord()), torch.enable_grad(), self._entered():
            args, kwargs = self._static
            returned = self.eager(*args, **kwargs)
        # raises for types whose tensors would be missed
        recorders.kind_of(self.owner, returned)
        self._ends = list(recorders.tensors_in(returned))
        self._returned = recorders.mapped(returned, Tensor.detach)
        return PassRecord([end.detach() for end in self._ends], record.notes())

    def _backward(self) -> PassRecord:
        record = AmaxRecord()
        pairs = [(e, g) for e, g in zip(self._ends, self._grad_outputs, strict=True) if g is not None]
        self._ends = []
        with pending_amaxes.amaxes_noted_in(AmaxRecord(), record):
            grads = torch.autograd.grad(
                [end for end, _ in pairs], self._trained, [grad for _, grad in pairs], allow_unused=self._allow_unused
            )
        return PassRecord(list(grads), record.notes())

    def _check_reached(self) -> None:
        """Raise if a leaf requires a gradient that the graphs would not compute."""
        trained_ids, visited = set(map(id, self._trained)), set()
        pending: list[Any] = [end.grad_fn for end in self._ends]
        while pending:
            node = pending.pop()
            if node is None or node in visited:
                continue
            visited.add(node)
            if hasattr(node, "variable") and id(node.variable) not in trained_ids:
                raise ConfigurationError(f"{self.owner}: pass each tensor that requires gradients as an argument")
            pending += [before for before, _ in node.next_functions]

    # Replay

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Replay the forward. The results are in memory that the next call overwrites."""
        if torch.compiler.is_compiling() or not torch.is_grad_enabled() or kernel_dispatch.is_capturing():
            return self.eager(*args, **kwargs)
        if self._module is not None and not self._module.training:
            return self.eager(*args, **kwargs)
        if recompute.in_region():
            raise UnsupportedOperationError(limits.refusal("captured region", self.owner))
        recorders.check_surroundings(self.owner, self._surroundings)
        arguments = _compared(args, kwargs)
        tensors = list(recorders.tensors_in(arguments))
        pairs = zip(tensors, self._inputs, strict=False)
        if self._kind_of(arguments) != self._kind or any(x.requires_grad and not own.requires_grad for x, own in pairs):
            raise ConfigurationError(self._differences(*arguments))
        if (changed := self._addresses.changed()) is not None:
            raise ConfigurationError(f"{self.owner}: {changed} was replaced; call forward.reset(), and capture again")
        outputs = iter(_Replay.apply(self, *tensors, *self._params))
        return recorders.mapped(self._returned, lambda _: next(outputs))

    def _kind_of(self, arguments: Any) -> Hashable:
        return recorders.kind_of(self.owner, arguments, lambda tensor: (tensor.shape, tensor.dtype, tensor.device))

    def _differences(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
        called, captured = recorders.described(args, kwargs), recorders.described(*_compared(*self._static))
        names = [name for name in {**called, **captured} if called.get(name) != captured.get(name)]
        differences = [f"{name} = {called.get(name)}, but captured with {captured.get(name)}" for name in names]
        problem = "; ".join(differences) or "other tuples, lists or dicts"
        return f"{self.owner} was called with {problem}; capture a callable for each kind of input"

    def replay_forward(self, ctx: Any, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Copy the inputs, replay the forward, and record its amaxes. Returns the outputs."""
        # parameters follow the inputs
        for static, tensor in zip(self._inputs, tensors, strict=False):
            static.copy_(tensor)
        ctx.token = self._order.begin(self._index)
        self._launch_forward()
        # so that autograd notices that older results were overwritten
        increment_version(self._written)
        self._outputs.note(pending_amaxes.forward_amaxes())
        if not context.in_autocast():
            # an autocast that the callable enters ended within the graph, which cannot flush
            pending_amaxes.forward_amaxes().flush()
        outputs = [output.detach() for output in self._outputs.tensors if output is not None]
        ctx.changes = self._in_place_changes()
        pairs = zip(outputs, self._differentiable, strict=True)
        ctx.mark_non_differentiable(*[output for output, differentiable in pairs if not differentiable])
        return tuple(outputs)

    def replay_backward(self, ctx: Any, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Replay the backward. Returns copies of the gradients of inputs and parameters."""
        self._order.end(self._index, ctx.token, self.owner)
        if self._in_place_changes() != ctx.changes:
            raise UnsupportedOperationError(limits.refusal("changed outputs", self.owner))
        for static, grad in zip(self._grad_outputs, grads, strict=True):
            if static is not None:
                static.zero_() if grad is None else static.copy_(grad)
        self._launch_backward()
        if self._grads.notes:
            pending_amaxes.flush_after_backward()
            self._grads.note(pending_amaxes.backward_amaxes)
        # copies, because autograd can store them in .grad, even of leaves before other nodes that pass gradients on
        return copied_gradients(self._sources)

    def _in_place_changes(self) -> list[int]:
        return [private_torch.in_place_changes(output) for output in self._outputs.tensors if output is not None]


def eager_forward(subject: Callable[..., Any]) -> Callable[..., Any]:
    """Return a module's `forward`, or a function itself."""
    return subject.forward if isinstance(subject, nn.Module) else subject


def _compared(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments that must equal the captured ones, keywords sorted by name."""
    return tuple(args), {name: kwargs[name] for name in sorted(kwargs) if name not in _HINTS}


def _storage_address(tensor: Tensor) -> int:
    return recorders.memory_of(tensor)[0].untyped_storage().data_ptr()


class _Replay(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, graph: ModuleGraph, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.graph = graph
        ctx.set_materialize_grads(False)
        return graph.replay_forward(ctx, tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return None, *ctx.graph.replay_backward(ctx, grads)
