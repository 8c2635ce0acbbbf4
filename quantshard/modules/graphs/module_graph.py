"""A callable as two CUDA graphs: its forward and its backward, recorded once, with fixed tensors, and replayed.

A graph holds launches and addresses, and nothing of what Python did while it was recorded. So what a pass leaves with
this package (amaxes for histories, the count of layers that ran) is recorded beside the graphs and left anew by each
replay, and what the graphs took for constant (inputs that are no tensors, addresses, who needs a gradient, the recipe)
is compared before each.
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
from quantshard.modules.contexts import context, context_warnings
from quantshard.modules.graphs.addresses import GraphAddresses, surroundings
from quantshard.modules.graphs.arguments import CONSTANTS, GraphArguments, leaves, mapped
from quantshard.tensor.quantized_tensor import QuantizedTensor

# What a pass leaves with the package ---------------------------------------------------------------------------------


class AmaxNotes(NamedTuple):
    """Amaxes [n] that a pass notes for n different histories, of one `number` and to be reduced over one group."""

    keys: Sequence[Tensor]
    number: int
    histories: Sequence[Tensor]
    amaxes: Tensor
    group: Groups


class AmaxRecord(PendingAmaxes):
    """Amaxes that a captured pass notes; none is recorded in a history, since a replay notes its own."""

    def flush(self) -> None:
        """Keep them: the pass has left autocast, and `notes` comes later."""

    def _keep(self, slot: Tensor, histories: Sequence[Tensor]) -> None:
        """Nothing: one graph alone has its slots, in memory that is the graph's."""

    def notes(self) -> list[AmaxNotes]:
        """All of them, those of a number and a group in one tensor, which a replay of the graph writes."""
        alike: dict[tuple[int, Groups], list[PendingHistory]] = {}
        joint = self.take_joint()
        for each in self.histories():
            alike.setdefault((each.number, each.group), []).append(each)
        return [AmaxNotes(each.keys, each.number, each.histories, each.amaxes[0], each.group) for each in joint] + [
            AmaxNotes(
                [each.key for each in found], number, [each.history for each in found],
                torch.stack(merged_slots([each.slots for each in found])), group,
            )
            for (number, group), found in alike.items()
        ]  # fmt: skip


class GradientCopy:
    """Copies of gradients that each replay writes anew, one for all that are the parts of one tensor: those of a layer
    of many experts are."""

    def __init__(self, grads: Sequence[Tensor | None]) -> None:
        self._count, self._joint = len(grads), []
        self._alone = {index: grad for index, grad in enumerate(grads) if grad is not None}
        alike: dict[int, list[int]] = {}
        for index, grad in self._alone.items():
            if type(grad) is Tensor and grad.numel() > 0:  # a DTensor has no memory to look at
                alike.setdefault(grad.untyped_storage().data_ptr(), []).append(index)
        for members in alike.values():
            whole = _joined([self._alone[index] for index in members])
            if whole is not None:
                self._joint.append((whole, members))
                for index in members:
                    del self._alone[index]

    def copies(self) -> list[Tensor | None]:
        """As they are now, None where there is none."""
        found: list[Tensor | None] = [None] * self._count
        for whole, members in self._joint:
            for index, part in zip(members, whole.clone().unbind(), strict=True):
                found[index] = part
        for index, grad in self._alone.items():
            found[index] = grad.clone()
        return found


def _joined(parts: Sequence[Tensor]) -> Tensor | None:
    """The tensor [parts, ...] that several tensors of one memory are the parts of, in order; None if they are not."""
    first = parts[0]
    if len(parts) == 1 or not first.is_contiguous():
        return None
    for index, part in enumerate(parts):
        alike = (part.shape, part.dtype, part.stride()) == (first.shape, first.dtype, first.stride())
        if not alike or part.storage_offset() != first.storage_offset() + index * first.numel():
            return None
    return first.as_strided((len(parts), *first.shape), (first.numel(), *first.stride()))


@dataclass
class PassRecord:
    """What a pass gives: tensors that each replay writes anew, and the amaxes that it notes."""

    tensors: list[Tensor | None]
    notes: list[AmaxNotes]

    def note(self, pending: PendingAmaxes) -> None:
        """Note the amaxes of a replay, as they are now: the next one may come before they are recorded."""
        for keys, number, histories, amaxes, group in self.notes:
            pending.note_all(keys, number, histories, amaxes.clone(), group)


class GraphOrder:
    """Which forwards of callables that share memory still have what their backward reads.

    Memory is given out in the order of capture: all forwards, then all backwards from the last to the first. What a
    callable keeps for backward is overwritten by a forward of it or of an earlier one, and by the backward of an
    earlier one; not by those of later ones. What was captured in another call, into the same `pool`, may lie anywhere
    in that memory, so each replay of one call takes what the others kept.
    """

    _in_pool: ClassVar[dict[Hashable, weakref.WeakSet[GraphOrder]]] = {}

    def __init__(self, count: int, pool: Hashable = None) -> None:
        self._kept: list[object | None] = [None] * count
        self._sharing = (
            weakref.WeakSet[GraphOrder]() if pool is None else self._in_pool.setdefault(pool, weakref.WeakSet())
        )
        self._sharing.add(self)

    def begin(self, index: int) -> object:
        """A forward runs; what `end` must be given."""
        self._overwrite_others()
        token = object()
        self._kept[index:] = [token] + [None] * (len(self._kept) - index - 1)
        return token

    def end(self, index: int, token: object, owner: str) -> None:
        """Its backward runs.

        Raises:
            UnsupportedOperationError: what it reads was overwritten, or read by a backward before.
        """
        if self._kept[index] is not token:
            raise UnsupportedOperationError(limits.refusal("overwritten activations", owner))
        self._overwrite_others()
        self._kept[index:] = [None] * (len(self._kept) - index)

    def _overwrite_others(self) -> None:
        for other in self._sharing:
            if other is not self:
                other._kept = [None] * len(other._kept)


# The graphs ----------------------------------------------------------------------------------------------------------


@cache
def _warming_stream(device: torch.device) -> torch.cuda.Stream:
    """The same for all captures: what is kept for a stream, as cuBLAS' workspaces and zeroed scalars, is never given
    back to others. On the current device, which is `device`."""
    return torch.cuda.Stream()


class GraphRecorder:
    """Records work on one device into CUDA graphs that share memory."""

    def __init__(self, device: torch.device, pool: Any = None) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle() if pool is None else pool

    @contextmanager
    def warming(self) -> Iterator[None]:
        """Where work runs before it is recorded, so that what is made once is made: not on the stream of others."""
        with torch.cuda.device(self._device):
            torch.cuda.synchronize()
            with torch.cuda.stream(_warming_stream(self._device)):
                yield
            torch.cuda.synchronize()

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Around calls of `record`: no garbage is collected meanwhile, since it may hold graphs that end there."""
        gc.collect()
        collects = gc.isenabled()
        gc.disable()
        try:
            with torch.cuda.device(self._device):
                yield
        finally:
            if collects:
                gc.enable()

    def record(self, work: Callable[[], PassRecord]) -> tuple[Any, PassRecord]:
        """Run work once, which computes nothing, and give the graph that computes it with what it returned."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            found = work()
        return graph, found


class ModuleGraph:
    """The two graphs of a callable. `call` runs eagerly; `entered` gives the context that it is captured in."""

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
        self._ends: list[Tensor] = []  # outputs with their graph of autograd, between a forward and its backward
        self._grad_outputs: list[Tensor | None] = []
        self._backward_graph: Any = None

    # Capture

    def warm(self, times: int) -> None:
        """Run forward and backward eagerly."""
        for _ in range(times):
            self._forward()
            self._check_reached()
            self._grad_outputs = [torch.zeros_like(end) if end.requires_grad else None for end in self._ends]
            if any(grad is not None for grad in self._grad_outputs):
                self._backward()

    def capture_forward(self, recorder: GraphRecorder, order: GraphOrder, index: int, draws: bool) -> None:
        """Record the forward. `draws`: random words are drawn, by keys of which the graph has the values."""
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
            found = dict(zip((id(tensor) for _, tensor in self._trained()), self._grads.tensors, strict=True))
            named = (*self.arguments.named, *self._params)
            self._copies = GradientCopy([found.get(id(tensor)) for _, tensor in named])
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
            found = torch.autograd.grad(
                [end for end, _ in pairs], [tensor for _, tensor in inputs], [grad for _, grad in pairs],
                allow_unused=True,
            )  # fmt: skip
        unused = [name for (name, _), grad in zip(inputs, found, strict=True) if grad is None]
        if unused and not self._allow_unused:
            raise ConfigurationError(
                f"make_graphed_callables: the outputs of {self.owner} do not depend on {', '.join(unused)}; freeze "
                "what is not used, or give allow_unused_input=True"
            )
        return PassRecord(list(found), record.notes())

    def _results(self) -> list[Tensor]:
        """The outputs that a replay writes: all but those that are parameters or buffers, or parts of them."""
        owned = [] if self._module is None else [*self._module.parameters(), *self._module.buffers()]
        held = {_memory(each) for each in owned}
        return [each for each in self._outputs.tensors if each is not None and _memory(each) not in held]

    def _trained(self) -> list[tuple[str, Tensor]]:
        """What gradients are computed for."""
        return [(name, tensor) for name, tensor in self.arguments.named if tensor.requires_grad] + self._params

    def _check_reached(self) -> None:
        """Raise for a leaf that is trained, but would get no gradient from the graphs."""
        known = {id(tensor) for _, tensor in self._trained()}
        ends = [end for end in self._ends if end.requires_grad]
        if any(id(leaf) not in known for leaf in _leaf_tensors(ends)):
            raise ConfigurationError(
                f"make_graphed_callables: {self.owner} uses a tensor that requires gradients and is none of its "
                "parameters or arguments, so it would get none; give the module itself, or the tensor as an argument"
            )

    # Replay

    def __call__(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """What the callable returns, in memory that the next call writes to."""
        found = surroundings()
        if found != self._surroundings:
            raise ConfigurationError(self._elsewhere(found))
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
        """Copy the inputs, run the forward, and note what it saw."""
        for (_, static), given in zip(self.arguments.named, tensors, strict=False):
            static.copy_(given)
        token = self._order.begin(self._index)
        self._forward_graph.replay()
        increment_version(self._written)  # which autograd, and what else keeps an older result, must know
        context_warnings.counts.run += 1
        self._outputs.note(context.forward_amaxes())
        if not context.in_autocast():  # one that the callable itself enters ends in it
            context.forward_amaxes().flush()
        return token, [output.detach() for output in self._outputs.tensors if output is not None]

    def constant_outputs(self, outputs: Sequence[Tensor]) -> list[Tensor]:
        """Those that have no gradient."""
        return [output for output, trained in zip(outputs, self._differentiable, strict=True) if not trained]

    def in_place_changes(self) -> list[int]:
        """How often each output was changed in place."""
        return [private_torch.in_place_changes(each) for each in self._outputs.tensors if each is not None]

    def replay_backward(self, token: object, grads: Sequence[Tensor | None], changes: list[int]) -> list[Tensor | None]:
        """The gradients of inputs and of parameters, in memory of their own.

        `changes`: `in_place_changes` after the forward.
        """
        self._order.end(self._index, token, self.owner)
        if self.in_place_changes() != changes:
            raise UnsupportedOperationError(limits.refusal("changed outputs", self.owner))
        for static, given in zip(self._grad_outputs, grads, strict=True):
            if static is not None:
                static.zero_() if given is None else static.copy_(given)
        self._backward_graph.replay()
        if self._grads.notes:
            context.flush_after_backward()
            self._grads.note(context.backward_amaxes)
        # autograd takes them for .grad, of leaves further up too, where the nodes between hand gradients on
        return self._copies.copies()


def _memory(tensor: Tensor) -> int:
    """Where the memory that a tensor is a part of begins."""
    local = private_torch.local_tensor(tensor)
    held = next(iter(local.quantized_storage.components.values())) if isinstance(local, QuantizedTensor) else local
    return held.untyped_storage().data_ptr()


def _leaf_tensors(ends: Sequence[Tensor]) -> Iterator[Tensor]:
    """The leaves of the graphs of autograd behind some tensors."""
    waiting: list[Any] = [end.grad_fn for end in ends]
    seen = set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            yield node.variable
        waiting += [before for before, _ in node.next_functions]


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
