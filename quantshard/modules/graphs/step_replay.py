"""One captured training step: the graph, and what it has of its arguments, the model, the optimizers and around it.

A graph has addresses. What lies elsewhere since the capture is neither read nor written by a replay, and nothing would
say so; hence they look whether all is where it was.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from quantshard import private_torch
from quantshard.errors import ConfigurationError, QuantshardError, UnsupportedOperationError
from quantshard.modules.graphs.addresses import GraphAddresses, surroundings
from quantshard.modules.graphs.arguments import CONSTANTS, leaves, mapped
from quantshard.tensor import components

StepContext = Callable[[], AbstractContextManager[Any]]
"""A context that is entered around a step, in which the device does more."""

_NOT_OPTIONS = ("params", "param_names")

EVERY = 10
"""Replays, of which one looks at all tensors: of a small model that takes the host as long as a step takes the GPU."""


def named_arguments(args: Any, kwargs: Any) -> Iterator[tuple[str, Any]]:
    """The tensors and constants of a call, each with a name for messages."""
    for index, each in enumerate(args):
        yield from leaves(each, f"argument {index}")
    for name in sorted(kwargs):
        yield from leaves(kwargs[name], name)


def copied(value: Any, device: torch.device) -> Any:
    """Arguments or results with copies of the tensors on a device, without a graph of autograd."""
    return mapped(value, lambda each: each.detach().to(device, copy=True))


def check_results(result: Any) -> None:
    """See that every tensor in what a step returns is found.

    Raises:
        ConfigurationError: it is something else than tensors and constants.
    """
    for name, value in leaves(result, "result"):
        if not isinstance(value, (Tensor, *CONSTANTS)):
            raise ConfigurationError(
                f"StepGraph: the {name} of the step is a {type(value).__name__}; return tensors and constants, alone "
                "or in tuples, lists and dicts"
            )


class StepReplay:
    """A graph of one kind of arguments; what it returns are copies."""

    def __init__(
        self,
        step: Callable[..., Any],
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        around: StepContext,
        arguments: tuple[Any, Any],
        device: torch.device,
    ) -> None:
        if torch.is_autocast_enabled("cuda") and torch.is_autocast_cache_enabled():
            raise ConfigurationError(
                "StepGraph is called within torch.autocast, which keeps casts of weights, and a graph would read those "
                "of the first steps; enter it in the step, or with cache_enabled=False"
            )
        self._device = device
        held_args, held_kwargs = copied(arguments, device)
        self._static = [each for _, each in named_arguments(held_args, held_kwargs) if isinstance(each, Tensor)]

        def work() -> Any:
            with around():
                result = step(*held_args, **held_kwargs)
            check_results(result)
            return mapped(result, Tensor.detach)  # a graph of autograd would be kept with it

        self._replay = _recorded_without_gradients(work, model)
        self._addresses, self._surroundings = GraphAddresses(model, draws=True), surroundings()
        self._optimizers = [(each, group_facts(each), state_addresses(each)) for each in optimizers]
        self._model, self._is_training, self._count = model, model.training, 0
        self._kept = list(_memory(model, optimizers))  # that of what is replaced, until a replay has told of it

    def __call__(self, args: Any, kwargs: Any) -> Any:
        if surroundings() != self._surroundings:
            raise ConfigurationError(
                "StepGraph: the step was captured in another autocast or process group than it is called in now, and a "
                "graph repeats what was captured; enter autocast in the step"
            )
        given = [value for _, value in named_arguments(args, kwargs) if isinstance(value, Tensor)]
        for static, value in zip(self._static, given, strict=True):
            static.copy_(value)  # from the host it waits, so that the caller may write to the batch again
        result = copied(self._replay(), self._device)
        if (changed := self._changed()) is not None:  # looked for while the GPU works
            raise ConfigurationError(
                f"StepGraph: {changed} since the capture, and a graph has what was there, with which steps were made "
                "until now; change values in place, as lr.fill_(1e-4), or call close() before, after which steps run "
                "eagerly and are captured again"
            )
        return result

    def _changed(self) -> str | None:
        """What is no longer what it was at the capture: of options and the model's mode at once, of tensors and of what
        is in the model within `EVERY` replays."""
        looks, self._count = self._count % EVERY == 0, self._count + 1
        if self._model.training is not self._is_training:
            return "the mode of the model (train or eval) was switched"
        if looks and (name := self._addresses.changed()) is not None:
            return f"{name} was replaced, frozen, switched or hooked"
        for optimizer, options, states in self._optimizers:
            now = group_facts(optimizer)
            for what, fact in options.items():
                if now.get(what) != fact:
                    return f"{what} of {type(optimizer).__name__} was replaced"
            if looks and state_addresses(optimizer) != states:
                return f"a state of {type(optimizer).__name__} was replaced"
        return None


def group_facts(optimizer: Optimizer) -> dict[str, Any]:
    """What a captured step has of an optimizer's groups: which parameters, and options, by value or address."""
    found: dict[str, Any] = {}
    for number, group in enumerate(optimizer.param_groups):
        found[f"the parameters of group {number}"] = [id(param) for param in group["params"]]
        options = {name: value for name, value in group.items() if name not in _NOT_OPTIONS}
        found |= {f"{name} of group {number}": _fact(value) for name, value in options.items()}
    return found | {"the number of groups": len(optimizer.param_groups)}


def state_addresses(optimizer: Optimizer) -> list[Any]:
    """Where the states of an optimizer lie."""
    states = (entries for entries in optimizer.state.values() if isinstance(entries, dict))
    return [_fact(value) for entries in states for value in entries.values() if isinstance(value, Tensor)]


def _fact(value: Any) -> Any:
    return [part.data_ptr() for part in _parts(value)] if isinstance(value, Tensor) else repr(value)


def _parts(tensor: Tensor) -> list[Tensor]:
    """The tensors here that a tensor is made of."""
    quantized = components.quantized_local(tensor)
    if quantized is not None:
        return list(quantized.quantized_storage.components.values())
    return [private_torch.local_tensor(tensor)]


def _memory(model: nn.Module, optimizers: Sequence[Optimizer]) -> Iterator[Tensor]:
    """What a captured step reads and writes, each as a tensor that has the memory, whatever is assigned to the
    other."""
    held = [*model.parameters(), *model.buffers()]
    for optimizer in optimizers:
        held += [value for group in optimizer.param_groups for value in group.values() if isinstance(value, Tensor)]
        states = (entries for entries in optimizer.state.values() if isinstance(entries, dict))
        held += [value for entries in states for value in entries.values() if isinstance(value, Tensor)]
    for tensor in held:
        yield from (part.detach() for part in _parts(tensor))


def _recorded_without_gradients(work: Callable[[], Any], model: nn.Module) -> Callable[[], Any]:
    """`recorded`, of a step that leaves no gradients but those that it made itself; after an error all are as before.

    Raises:
        ConfigurationError: it leaves others.
    """
    before = {name: param.grad for name, param in model.named_parameters()}
    try:
        replay = recorded(work)
        for name, param in model.named_parameters():
            if param.grad is not None and (before[name] is None or param.grad is before[name]):
                raise ConfigurationError(
                    f"StepGraph: the step leaves a gradient of {name} that optimizer.zero_grad() is called on outside, "
                    "if at all, and a replay would neither put it there nor see it go; call optimizer.step() and "
                    "optimizer.zero_grad() in the step"
                )
    except BaseException:
        for name, param in model.named_parameters():
            param.grad = before[name]  # what a capture leaves was never computed
        raise
    return replay


def recorded(work: Callable[[], Any]) -> Callable[[], Any]:
    """The replay of a CUDA graph of some work, which is not run now.

    Raises:
        UnsupportedOperationError: something in it cannot be captured. What the work itself raises is raised.
    """
    graph, failed = torch.cuda.CUDAGraph(), list[BaseException]()
    try:
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # batches are pinned by another thread
            try:
                result = work()
            except BaseException as error:
                failed.append(error)
                raise
    except Exception as error:
        cause = failed[0] if failed else error  # the end of a capture raises too
        if isinstance(cause, torch.OutOfMemoryError | QuantshardError) or not isinstance(cause, RuntimeError):
            raise cause from None
        told = str(cause).strip().splitlines() or [type(cause).__name__]
        raise UnsupportedOperationError(
            f"StepGraph: the step cannot be captured ({told[0]}); what waits for the device (item, print, a copy to "
            "the host) does not belong into it"
        ) from cause

    def replay() -> Any:
        graph.replay()
        return result

    return replay
