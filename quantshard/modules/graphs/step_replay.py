"""One captured training step: the graph, and the facts it relies on (arguments, model, optimizers, contexts).

A graph contains addresses. Replays neither read nor write tensors that moved after the capture, and would not report
that, so the addresses are compared.
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
"""Function that creates a context around a step, which adds device work."""

_NOT_OPTIONS = ("params", "param_names")

EVERY = 10
"""One in this many replays checks all tensors. For a small model the check takes the host as long as a step takes the
GPU."""


def named_arguments(args: Any, kwargs: Any) -> Iterator[tuple[str, Any]]:
    """Yield the tensors and constants of a call, each with a name for messages."""
    for index, arg in enumerate(args):
        yield from leaves(arg, f"argument {index}")
    for name in sorted(kwargs):
        yield from leaves(kwargs[name], name)


def copied(value: Any, device: torch.device) -> Any:
    """Copy the tensors in arguments or results to a device, detached from autograd."""
    return mapped(value, lambda tensor: tensor.detach().to(device, copy=True))


def check_results(result: Any) -> None:
    """Check that the results of a step are tensors and constants, so that no tensor is missed.

    Raises:
        ConfigurationError: a result has another type.
    """
    for name, value in leaves(result, "result"):
        if not isinstance(value, (Tensor, *CONSTANTS)):
            raise ConfigurationError(
                f"StepGraph: the {name} of the step is a {type(value).__name__}; return tensors and constants, alone "
                "or in tuples, lists and dicts"
            )


class StepReplay:
    """The graph for one kind of arguments. It returns copies of its results."""

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
        static_args, static_kwargs = copied(arguments, device)
        self._static = [item for _, item in named_arguments(static_args, static_kwargs) if isinstance(item, Tensor)]

        def work() -> Any:
            with around():
                result = step(*static_args, **static_kwargs)
            check_results(result)
            # detached, or the results would keep the autograd graph alive
            return mapped(result, Tensor.detach)

        self._replay = _recorded_without_gradients(work, model)
        self._addresses, self._surroundings = GraphAddresses(model, draws=True), surroundings()
        self._optimizers = [(item, group_facts(item), state_addresses(item)) for item in optimizers]
        self._model, self._is_training, self._count = model, model.training, 0
        # keeps the memory of replaced tensors alive until a replay reports the change
        self._kept = list(_memory(model, optimizers))

    def __call__(self, args: Any, kwargs: Any) -> Any:
        if surroundings() != self._surroundings:
            raise ConfigurationError(
                "StepGraph: the step was captured in another autocast or process group than it is called in now, and a "
                "graph repeats what was captured; enter autocast in the step"
            )
        tensors = [value for _, value in named_arguments(args, kwargs) if isinstance(value, Tensor)]
        for static, value in zip(self._static, tensors, strict=True):
            # copies from the host block, so that the caller can overwrite the batch
            static.copy_(value)
        result = copied(self._replay(), self._device)
        # checked after the launch, while the GPU works
        if (changed := self._changed()) is not None:
            raise ConfigurationError(
                f"StepGraph: {changed} since the capture, and a graph has what was there, with which steps were made "
                "until now; change values in place, as lr.fill_(1e-4), or call close() before, after which steps run "
                "eagerly and are captured again"
            )
        return result

    def _changed(self) -> str | None:
        """Describe a change since the capture, or return None. Optimizer options and the model's mode are checked each
        time, tensors and submodules once in `EVERY` replays."""
        checks_tensors, self._count = self._count % EVERY == 0, self._count + 1
        if self._model.training is not self._is_training:
            return "the mode of the model (train or eval) was switched"
        if checks_tensors and (name := self._addresses.changed()) is not None:
            return f"{name} was replaced, frozen, switched or hooked"
        for optimizer, options, states in self._optimizers:
            current = group_facts(optimizer)
            for what, fact in options.items():
                if current.get(what) != fact:
                    return f"{what} of {type(optimizer).__name__} was replaced"
            if checks_tensors and state_addresses(optimizer) != states:
                return f"a state of {type(optimizer).__name__} was replaced"
        return None


def group_facts(optimizer: Optimizer) -> dict[str, Any]:
    """Return what a captured step relies on in an optimizer's groups: parameters, and options by value or address."""
    facts: dict[str, Any] = {}
    for number, group in enumerate(optimizer.param_groups):
        facts[f"the parameters of group {number}"] = [id(param) for param in group["params"]]
        options = {name: value for name, value in group.items() if name not in _NOT_OPTIONS}
        facts |= {f"{name} of group {number}": _fact(value) for name, value in options.items()}
    return facts | {"the number of groups": len(optimizer.param_groups)}


def state_addresses(optimizer: Optimizer) -> list[Any]:
    """Return the addresses of an optimizer's states."""
    states = (entries for entries in optimizer.state.values() if isinstance(entries, dict))
    return [_fact(value) for entries in states for value in entries.values() if isinstance(value, Tensor)]


def _fact(value: Any) -> Any:
    return [part.data_ptr() for part in _parts(value)] if isinstance(value, Tensor) else repr(value)


def _parts(tensor: Tensor) -> list[Tensor]:
    """Return the plain local tensors that a tensor consists of."""
    quantized = components.quantized_local(tensor)
    if quantized is not None:
        return list(quantized.quantized_storage.components.values())
    return [private_torch.local_tensor(tensor)]


def _memory(model: nn.Module, optimizers: Sequence[Optimizer]) -> Iterator[Tensor]:
    """Yield the tensors that a captured step reads and writes. They are detached, so they keep the memory even if
    `.data` of the original is replaced."""
    tensors = [*model.parameters(), *model.buffers()]
    for optimizer in optimizers:
        tensors += [value for group in optimizer.param_groups for value in group.values() if isinstance(value, Tensor)]
        states = (entries for entries in optimizer.state.values() if isinstance(entries, dict))
        tensors += [value for entries in states for value in entries.values() if isinstance(value, Tensor)]
    for tensor in tensors:
        yield from (part.detach() for part in _parts(tensor))


def _recorded_without_gradients(work: Callable[[], Any], model: nn.Module) -> Callable[[], Any]:
    """Call `recorded` for a step that leaves no gradients except those it recreated itself. After an error, all
    gradients are restored.

    Raises:
        ConfigurationError: the step leaves a gradient for a parameter that had none, or keeps a gradient from before.
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
            # gradients left by a capture were never computed
            param.grad = before[name]
        raise
    return replay


def recorded(work: Callable[[], Any]) -> Callable[[], Any]:
    """Record work into a CUDA graph and return a function that replays it. The work is not run now.

    Raises:
        UnsupportedOperationError: an operation in it cannot be captured. Other errors of the work are raised unchanged.
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
        lines = str(cause).strip().splitlines() or [type(cause).__name__]
        raise UnsupportedOperationError(
            f"StepGraph: the step cannot be captured ({lines[0]}); what waits for the device (item, print, a copy to "
            "the host) does not belong into it"
        ) from cause

    def replay() -> Any:
        graph.replay()
        return result

    return replay
