"""A training step as a CUDA graph: the host makes one call for its thousands of launches, under FSDP2 too."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from quantshard import limits, private_torch
from quantshard.argument_kinds import CALLABLE, MODULE, OPTIMIZER, check_arguments
from quantshard.errors import ConfigurationError, UnsupportedOperationError
from quantshard.modules.capture import capturable_
from quantshard.modules.graphs.addresses import GraphAddresses, surroundings
from quantshard.modules.graphs.arguments import CONSTANTS, leaves, mapped

WARMUP = 2
"""Eager steps before a capture, in which kernels are compiled and FSDP2 finds the order of its gathers."""

MOST_GRAPHS = 8
"""Each has memory of its own."""

StepContext = Callable[[], AbstractContextManager[Any]]
"""What is entered around a step, in which the device does more then."""


class StepGraph:
    """A training step that runs eagerly twice, is captured as a CUDA graph, and replayed from then on, with the same
    bits. The host makes one call for it, so that a step takes what the GPU needs.

        optimizer = FusedAdam(model.named_parameters(), lr=1e-3, capturable=True)

        def train_step(x, y):
            with quantshard.autocast(recipe="current"):
                loss = loss_of(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        with quantshard.StepGraph(train_step, model, optimizer) as step:
            for x, y in batches:
                loss = step(x, y)

    The model may be on one GPU, sharded by FSDP2, or tensor parallel: collectives are in the graph. Arguments are
    tensors and constants, alone or in tuples, lists and dicts; tensors are copied to where the graph reads them, those
    of the host once the step before has run, so batches that are on the GPU go faster. Of other shapes, dtypes or
    constants there is another graph, after two or three more eager steps. Tensors that the step returns are copies, without a graph of autograd, which later steps do not change.

    A graph repeats what the device was given, and no Python: what the step reads of the host (numbers of a schedule,
    `if loss > 3`) is as it was at the capture. Learning rates must be tensors, as `capturable=True` makes them; a
    scheduler writes into these. Forward and backward belong into one step, under FSDP2 with all that is gathered.

    Args:
        step: runs forward, backward and the optimizer's step, and reads nothing back from the device.
        model: all whose parameters it trains; draws of random words are counted on the GPU from now on
            (`capturable_`).
        optimizer: one or several, each with `capturable=True` and masters, if its weights are quantized.
        enabled: False calls the step itself, as on a machine without a GPU.

    Raises:
        ConfigurationError: the model is not on a GPU, or an optimizer is not capturable.
        UnsupportedOperationError: DistributedDataParallel wraps the model.
    """

    def __init__(
        self,
        step: Callable[..., Any],
        model: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer],
        *,
        enabled: bool = True,
    ) -> None:
        check_arguments("StepGraph", CALLABLE, step=step)
        check_arguments("StepGraph", MODULE, model=model)
        optimizers: list[Any] = list(optimizer) if isinstance(optimizer, list | tuple) else [optimizer]
        for each in optimizers:
            check_arguments("StepGraph", OPTIMIZER, optimizer=each)
        self._step, self._model, self.enabled = step, model, enabled
        self._eager: dict[Any, int] = {}
        self._replays: dict[Any, StepReplay] = {}
        self._warned = self._has_captured = False
        if enabled:
            _check_unwrapped(model)
            self._device = _device(model)
            for each in optimizers:
                _check_capturable(each)
            capturable_(model)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """A step, and what it returns.

        Raises:
            UnsupportedOperationError: it cannot be captured.
            ConfigurationError: it was captured, and what it holds of the model or around it is another since; or it
                leaves gradients that its replays would not.
        """
        return self.within(nullcontext, *args, **kwargs)

    def within(self, around: StepContext, *args: Any, **kwargs: Any) -> Any:
        """A step in a context, as `statistics.whole_step`, in which the device does more: a graph of its own.

        `around`: equal at each call for the same; is entered for an eager step and for a capture.
        """
        if not self.enabled:
            with around():
                return self._step(*args, **kwargs)
        key = around, tuple(_kinds(args, kwargs))
        replay = self._replays.get(key)
        if replay is None:
            count = self._eager.get(key, 0)
            # what an optimizer's graph holds is allocated by an eager step, so one must come between two captures
            if count < WARMUP or self._has_captured or len(self._replays) >= MOST_GRAPHS:
                self._eager[key], self._has_captured = count + 1, False
                self._warn_of_many(args, kwargs)
                with around():
                    return self._step(*args, **kwargs)
            replay = self._replays[key] = StepReplay(self._step, self._model, around, args, kwargs, self._device)
            self._has_captured = True
        return replay(args, kwargs)

    def _warn_of_many(self, args: Any, kwargs: Any) -> None:
        if len(self._replays) < MOST_GRAPHS or self._warned:
            return
        self._warned = True
        last = ", ".join(f"{name} = {_shown(value)}" for name, value in _named(args, kwargs))
        warnings.warn(
            f"StepGraph has {MOST_GRAPHS} graphs, of arguments of other shapes or values, and steps of further ones "
            f"({last}) run eagerly; pad batches to a few lengths",
            stacklevel=4,
        )

    def close(self) -> None:
        """Let go of the graphs; a later call captures anew. A communicator of NCCL waits, when it is destroyed, until
        no graph has its collectives any more."""
        self._replays.clear()

    def __enter__(self) -> StepGraph:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class StepReplay:
    """A graph of one kind of arguments, and what it has of them, of the model and of what was around."""

    def __init__(
        self, step: Callable[..., Any], model: nn.Module, around: StepContext, args: Any, kwargs: Any,
        device: torch.device,
    ) -> None:  # fmt: skip
        if torch.is_autocast_enabled("cuda") and torch.is_autocast_cache_enabled():
            raise ConfigurationError(
                "StepGraph is called within torch.autocast, which keeps casts of weights, and a graph would read those "
                "of the first steps; enter it in the step, or with cache_enabled=False"
            )
        self._held = mapped((tuple(args), dict(kwargs)), lambda each: each.detach().to(device, copy=True))
        self._static = _tensors(*self._held)
        held_args, held_kwargs = self._held

        def work() -> Any:
            with around():
                return step(*held_args, **held_kwargs)

        before = {name: param.grad for name, param in model.named_parameters()}
        self._replay = recorded(work)
        for name, param in model.named_parameters():
            if before[name] is None and param.grad is not None:
                raise ConfigurationError(
                    f"StepGraph: the step leaves a gradient of {name}, where none was before, and a replay would not "
                    "put it there; call optimizer.step() and optimizer.zero_grad() in the step"
                )
        self._addresses, self._surroundings = GraphAddresses(model, draws=True), surroundings()

    def __call__(self, args: Any, kwargs: Any) -> Any:
        if surroundings() != self._surroundings:
            raise ConfigurationError(
                "StepGraph: the step was captured in another autocast or process group than it is called in now, and a "
                "graph repeats what was captured; enter autocast in the step"
            )
        if (changed := self._addresses.changed()) is not None:
            raise ConfigurationError(
                f"StepGraph: {changed} was replaced, frozen, switched or hooked since the capture, and a graph has the "
                "address of what was there; change values in place, or call close(), after which steps are captured "
                "again"
            )
        for static, value in zip(self._static, _tensors(args, kwargs), strict=True):
            static.copy_(value)  # from the host it waits, so that the caller may write to the batch again
        return mapped(self._replay(), lambda each: each.detach().clone())


def recorded(work: Callable[[], Any]) -> Callable[[], Any]:
    """The replay of a CUDA graph of some work, which is not run now.

    Raises:
        UnsupportedOperationError: something in it cannot be captured.
    """
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # batches are pinned by another thread
            result = work()
    except RuntimeError as error:
        cause = error.__context__ or error  # the end of a capture raises too
        raise UnsupportedOperationError(
            f"StepGraph: the step cannot be captured ({str(cause).splitlines()[0]}); what waits for the device (item, "
            "print, a copy to the host) does not belong into it"
        ) from error

    def replay() -> Any:
        graph.replay()
        return result

    return replay


def _check_unwrapped(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if isinstance(module, DistributedDataParallel):
            raise UnsupportedOperationError(limits.refusal("captured replicas", name or "the model"))


def _device(model: nn.Module) -> torch.device:
    devices = {private_torch.local_tensor(param).device for param in model.parameters()}
    device = next(iter(devices), torch.device("cpu"))
    if len(devices) > 1 or device.type != "cuda":
        where = " and ".join(sorted(map(str, devices))) or "no device"
        raise ConfigurationError(
            f"StepGraph: the model's parameters are on {where}, and a CUDA graph is of one GPU; on others give "
            "enabled=False, which calls the step itself"
        )
    return device


def _check_capturable(optimizer: Optimizer) -> None:
    name = type(optimizer).__name__
    for number, group in enumerate(optimizer.param_groups):
        if group.get("capturable") is False or not isinstance(group.get("lr", None), Tensor):
            raise ConfigurationError(
                f"StepGraph: lr of group {number} of {name} is {group.get('lr')!r}, which a graph would keep for ever; "
                f"make it {name}(..., capturable=True), of torch.optim with lr=torch.tensor(...) on the GPU besides"
            )


def _named(args: Any, kwargs: Any) -> Iterator[tuple[str, Any]]:
    for index, each in enumerate(args):
        yield from leaves(each, f"argument {index}")
    for name in sorted(kwargs):
        yield from leaves(kwargs[name], name)


def _tensors(args: Any, kwargs: Any) -> list[Tensor]:
    return [value for _, value in _named(args, kwargs) if isinstance(value, Tensor)]


def _kinds(args: Any, kwargs: Any) -> Iterator[tuple[Any, ...]]:
    """What tells graphs apart: shapes and dtypes of tensors, and values of constants."""
    for name, value in _named(args, kwargs):
        if isinstance(value, Tensor):
            if value.requires_grad:
                raise ConfigurationError(
                    f"StepGraph: {name} requires a gradient, which a replay would leave nowhere; give it detached, and "
                    "let the step return what it needs of it"
                )
            yield name, value.shape, value.dtype
        elif isinstance(value, CONSTANTS):
            yield name, type(value), repr(value)
        else:
            raise ConfigurationError(
                f"StepGraph: {name} is a {type(value).__name__}; a step takes tensors and constants (numbers, strings, "
                "None), alone or in tuples, lists and dicts"
            )


def _shown(value: Any) -> str:
    return f"{list(value.shape)}" if isinstance(value, Tensor) else repr(value)
