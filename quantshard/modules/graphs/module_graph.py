"""Forward and backward of a callable as two CUDA graphs, recorded once with fixed tensors and replayed.

A graph contains launches and addresses, but nothing that Python did during the capture. Side effects of a pass (amaxes
for histories, the count of layers that ran) are recorded separately, and each replay repeats them. Everything that the
graphs treat as constant (non-tensor arguments, addresses, `requires_grad`, the recipe) is compared before each replay.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.autograd.graph import increment_version

from quantshard import limits, private_torch
from quantshard.collectives.delayed_scaling import PendingAmaxes, PendingHistory, merged_slots
from quantshard.collectives.process_groups import Groups
from quantshard.errors import ConfigurationError, UnsupportedOperationError
from quantshard.modules.contexts import context
from quantshard.modules.graphs.addresses import GraphAddresses, surroundings
from quantshard.modules.graphs.arguments import CONSTANTS, GraphArguments, leaves, mapped
from quantshard.tensor.quantized_tensor import QuantizedTensor

# Side effects of a pass ----------------------------------------------------------------------------------------------


class AmaxNotes(NamedTuple):
    """Amaxes [n] that a pass records for n histories with the same `number` and reduction group."""

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
        joint = self.take_joint()
        for item in self.histories():
            pending_by_key.setdefault((item.number, item.group), []).append(item)
        return [AmaxNotes(item.keys, item.number, item.histories, item.amaxes[0], item.group) for item in joint] + [
            AmaxNotes(
                [item.key for item in group_members], number, [item.history for item in group_members],
                torch.stack(merged_slots([item.slots for item in group_members])), group,
            )
            for (number, group), group_members in pending_by_key.items()
        ]  # fmt: skip


class GradientCopy:
    """Copies gradients that each replay overwrites. Gradients that are parts of one tensor, as in a layer of many
    experts, share one copy."""

    def __init__(self, grads: Sequence[Tensor | None]) -> None:
        self._count, self._joint = len(grads), []
        self._alone = {index: grad for index, grad in enumerate(grads) if grad is not None}
        indices_by_memory: dict[int, list[int]] = {}
        for index, grad in self._alone.items():
            # a DTensor has no memory of its own
            if type(grad) is Tensor and grad.numel() > 0:
                indices_by_memory.setdefault(grad.untyped_storage().data_ptr(), []).append(index)
        for members in indices_by_memory.values():
            joint = _joined([self._alone[index] for index in members])
            if joint is not None:
                self._joint.append((joint, members))
                for index in members:
                    del self._alone[index]

    def copies(self) -> list[Tensor | None]:
        """Return copies of the current gradients, None where there is no gradient."""
        copies: list[Tensor | None] = [None] * self._count
        for joint, members in self._joint:
            for index, part in zip(members, joint.clone().unbind(), strict=True):
                copies[index] = part
        for index, grad in self._alone.items():
            copies[index] = grad.clone()
        return copies


def _joined(parts: Sequence[Tensor]) -> Tensor | None:
    """Return the contiguous tensor [parts, ...] that the parts are consecutive slices of, or None."""
    first = parts[0]
    if len(parts) == 1 or not first.is_contiguous():
        return None
    for index, part in enumerate(parts):
        same_layout = (part.shape, part.dtype, part.stride()) == (first.shape, first.dtype, first.stride())
        if not same_layout or part.storage_offset() != first.storage_offset() + index * first.numel():
            return None
    return first.as_strided((len(parts), *first.shape), (first.numel(), *first.stride()))


@dataclass
class PassRecord:
    """Outputs of a captured pass: tensors that each replay overwrites, and the amaxes it records."""

    tensors: list[Tensor | None]
    notes: list[AmaxNotes]

    def note(self, pending: PendingAmaxes) -> None:
        """Record the current amaxes of a replay. They are cloned, because the next replay can run before they reach the
        histories."""
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
        self._kept: list[object | None] = [None] * count
        self._sharing = (
            weakref.WeakSet[GraphOrder]() if pool is None else self._in_pool.setdefault(pool, weakref.WeakSet())
        )
        self._sharing.add(self)

    def begin(self, index: int) -> object:
        """Register a forward. Returns a token to pass to `end`."""
        self._overwrite_others()
        token = object()
        self._kept[index:] = [token] + [None] * (len(self._kept) - index - 1)
        return token

    def end(self, index: int, token: object, owner: str) -> None:
        """Register the backward of a forward.

        Raises:
            UnsupportedOperationError: another replay overwrote the activations, or a backward already ran.
        """
        if self._kept[index] is not token:
            raise UnsupportedOperationError(limits.refusal("overwritten activations", owner))
        self._overwrite_others()
        self._kept[index:] = [None] * (len(self._kept) - index)

    def _overwrite_others(self) -> None:
        for order in self._sharing:
            if order is not self:
                order._kept = [None] * len(order._kept)


# Graphs ---------------------------------------------------------------------------------------------------------------


@cache
def _warming_stream(device: torch.device) -> torch.cuda.Stream:
    """Stream for all warmups, on the current device, which must be `device`. Allocations per stream, such as cuBLAS
    workspaces and zeroed scalars, are never reused by other streams."""
    return torch.cuda.Stream()


class GraphRecorder:
    """Records work on one device into CUDA graphs that share memory."""

    def __init__(self, device: torch.device, pool: Any = None) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle() if pool is None else pool

    @contextmanager
    def warming(self) -> Iterator[None]:
        """Run the block before a recording, on a separate stream, so that one-time allocations and compilations happen
        there."""
        with torch.cuda.device(self._device):
            torch.cuda.synchronize()
            with torch.cuda.stream(_warming_stream(self._device)):
                yield
            torch.cuda.synchronize()

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Surround calls of `record`. Disables garbage collection, which could destroy graphs during a capture."""
        gc.collect()
        gc_enabled = gc.isenabled()
        gc.disable()
        try:
            with torch.cuda.device(self._device):
                yield
        finally:
            if gc_enabled:
                gc.enable()

    def record(self, work: Callable[[], PassRecord]) -> tuple[Any, PassRecord]:
        """Record work into a graph without computing anything. Returns the graph and the result of `work`."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            result = work()
        return graph, result


class ModuleGraph:
    """The forward and backward graphs of a callable. `call` runs it eagerly; `entered` creates its context."""

    def __init__(
        self,
        call: Callable[..., Any],
        arguments: GraphArguments,
        module: nn.Module | None,
        entered: Callable[[], AbstractContextManager[Any]],
        allow_unused: bool,
    ) -> None:
        self.owner, self.call, self.arguments = arguments.owner, call, arguments
        self._module, self._entered, self._allow_unused = module, entered, allow_unused
        named = [] if module is None else list(module.named_parameters())
        self._params = [(name, param) for name, param in named if param.requires_grad]
        # outputs with their autograd graph, between a forward and its backward
        self._ends: list[Tensor] = []
        self._grad_outputs: list[Tensor | None] = []
        self._backward_graph: Any = None

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
            self._surroundings = surroundings()
        self._forward_graph, self._outputs = recorder.record(self._forward)
        self._differentiable = [end.requires_grad for end in self._ends]
        self._written = self._results()
        self._addresses = GraphAddresses(self._module, draws)

    def capture_backward(self, recorder: GraphRecorder) -> None:
        """Record the backward."""
        if any(grad is not None for grad in self._grad_outputs):
            self._backward_graph, self._grads = recorder.record(self._backward)
            grads_by_id = dict(zip((id(tensor) for _, tensor in self._trained()), self._grads.tensors, strict=True))
            inputs = (*self.arguments.named, *self._params)
            self._copies = GradientCopy([grads_by_id.get(id(tensor)) for _, tensor in inputs])
        self._ends = []

    def _forward(self) -> PassRecord:
        record = AmaxRecord()
        with context.amaxes_noted_in(record, AmaxRecord()), torch.enable_grad(), self._entered():
            returned = self.call(*self.arguments.args, **self.arguments.kwargs)
        for name, value in leaves(returned, "result"):
            if not isinstance(value, (Tensor, *CONSTANTS)):
                raise ConfigurationError(
                    f"make_graphed_callables: {name} of {self.owner} is a {type(value).__name__}; return tensors, "
                    "alone or in tuples, lists and dicts"
                )
        self._ends = [value for _, value in leaves(returned, "result") if isinstance(value, Tensor)]
        self._returned = mapped(returned, Tensor.detach)
        return PassRecord([end.detach() for end in self._ends], record.notes())

    def _backward(self) -> PassRecord:
        record = AmaxRecord()
        inputs = self._trained()
        pairs = [(e, g) for e, g in zip(self._ends, self._grad_outputs, strict=True) if g is not None]
        self._ends = []
        with context.amaxes_noted_in(AmaxRecord(), record):
            grads = torch.autograd.grad(
                [end for end, _ in pairs], [tensor for _, tensor in inputs], [grad for _, grad in pairs],
                allow_unused=True,
            )  # fmt: skip
        unused = [name for (name, _), grad in zip(inputs, grads, strict=True) if grad is None]
        if unused and not self._allow_unused:
            raise ConfigurationError(
                f"make_graphed_callables: the outputs of {self.owner} do not depend on {', '.join(unused)}; freeze "
                "what is not used, or give allow_unused_input=True"
            )
        return PassRecord(list(grads), record.notes())

    def _results(self) -> list[Tensor]:
        """Return the outputs that a replay writes: all except parameters, buffers and views of them."""
        owned = [] if self._module is None else [*self._module.parameters(), *self._module.buffers()]
        owned_memory = {_memory(tensor) for tensor in owned}
        return [
            tensor for tensor in self._outputs.tensors if tensor is not None and _memory(tensor) not in owned_memory
        ]

    def _trained(self) -> list[tuple[str, Tensor]]:
        """Return the names and tensors that get a gradient."""
        return [(name, tensor) for name, tensor in self.arguments.named if tensor.requires_grad] + self._params

    def _check_reached(self) -> None:
        """Raise if a leaf requires a gradient that the graphs would not compute."""
        trained_ids = {id(tensor) for _, tensor in self._trained()}
        ends = [end for end in self._ends if end.requires_grad]
        if any(id(leaf) not in trained_ids for leaf in _leaf_tensors(ends)):
            raise ConfigurationError(
                f"make_graphed_callables: {self.owner} uses a tensor that requires gradients and is none of its "
                "parameters or arguments, so it would get none; give the module itself, or the tensor as an argument"
            )

    # Replay

    def __call__(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Replay the forward. The results are in memory that the next call overwrites."""
        current = surroundings()
        if current != self._surroundings:
            raise ConfigurationError(self._elsewhere(current))
        tensors = self.arguments.tensors_of(args, kwargs)
        if (changed := self._addresses.changed()) is not None:
            raise ConfigurationError(
                f"{self.owner}: {changed} was replaced, frozen, switched or hooked since the capture, and a graph has "
                "the address of what was there; change values in place, or call reset() on its forward and capture it "
                "again"
            )
        outputs = iter(_Replay.apply(self, *tensors, *(param for _, param in self._params)))
        return mapped(self._returned, lambda _: next(outputs))

    def _elsewhere(self, found: tuple[Any, ...]) -> str:
        captured, called = (
            f"{context.setting(name).recipe.name!r} ({name}), torch.autocast of {dtype}"
            for name, dtype, _ in (self._surroundings, found)
        )
        return (
            f"{self.owner} was captured under autocast by {captured}, but called under {called}, or with other process "
            "groups; call it as it was captured: make_graphed_callables takes the arguments of quantshard.autocast"
        )

    def replay_forward(self, tensors: Sequence[Tensor]) -> tuple[object, list[Tensor]]:
        """Copy the inputs, replay the forward, and record its amaxes. Returns a token for the backward, and the
        outputs."""
        for (_, static), tensor in zip(self.arguments.named, tensors, strict=False):
            static.copy_(tensor)
        token = self._order.begin(self._index)
        self._forward_graph.replay()
        # so that autograd notices that older results were overwritten
        increment_version(self._written)
        self._outputs.note(context.forward_amaxes())
        if not context.in_autocast():
            # an autocast that the callable enters ended within the graph, which cannot flush
            context.forward_amaxes().flush()
        return token, [output.detach() for output in self._outputs.tensors if output is not None]

    def constant_outputs(self, outputs: Sequence[Tensor]) -> list[Tensor]:
        """Return the outputs that have no gradient."""
        return [output for output, trained in zip(outputs, self._differentiable, strict=True) if not trained]

    def in_place_changes(self) -> list[int]:
        """Return the version counter of each output."""
        return [private_torch.in_place_changes(output) for output in self._outputs.tensors if output is not None]

    def replay_backward(self, token: object, grads: Sequence[Tensor | None], changes: list[int]) -> list[Tensor | None]:
        """Replay the backward. Returns copies of the gradients of inputs and parameters.

        `changes`: `in_place_changes` after the forward.
        """
        self._order.end(self._index, token, self.owner)
        if self.in_place_changes() != changes:
            raise UnsupportedOperationError(limits.refusal("changed outputs", self.owner))
        for static, grad in zip(self._grad_outputs, grads, strict=True):
            if static is not None:
                static.zero_() if grad is None else static.copy_(grad)
        self._backward_graph.replay()
        if self._grads.notes:
            context.flush_after_backward()
            self._grads.note(context.backward_amaxes)
        # copies, because autograd can store them in .grad, even of leaves before other nodes that pass gradients on
        return self._copies.copies()


def _memory(tensor: Tensor) -> int:
    """Return the address of the storage of a tensor."""
    local = private_torch.local_tensor(tensor)
    component = next(iter(local.quantized_storage.components.values())) if isinstance(local, QuantizedTensor) else local
    return component.untyped_storage().data_ptr()


def _leaf_tensors(ends: Sequence[Tensor]) -> Iterator[Tensor]:
    """Yield the leaves of the autograd graphs of some tensors."""
    pending: list[Any] = [end.grad_fn for end in ends]
    visited = set()
    while pending:
        node = pending.pop()
        if node is None or node in visited:
            continue
        visited.add(node)
        if hasattr(node, "variable"):
            yield node.variable
        pending += [before for before, _ in node.next_functions]


class _Replay(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, graph: ModuleGraph, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.graph = graph
        ctx.set_materialize_grads(False)
        inputs = tensors[: len(graph.arguments.named)]
        ctx.token, outputs = graph.replay_forward(inputs)
        ctx.changes = graph.in_place_changes()
        ctx.mark_non_differentiable(*graph.constant_outputs(outputs))
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return (None, *ctx.graph.replay_backward(ctx.token, grads, ctx.changes))
