"""A training step as a CUDA graph: the host makes one call for its thousands of launches, under FSDP2 too."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from quantshard import limits, private_torch
from quantshard.argument_kinds import CALLABLE, MODULE, OPTIMIZER, check_arguments, suggests_names
from quantshard.errors import ConfigurationError, UnsupportedOperationError, warn_user
from quantshard.modules.capture import capturable_
from quantshard.modules.contexts import context
from quantshard.modules.graphs.arguments import CONSTANTS, mapped
from quantshard.modules.graphs.step_replay import StepContext, StepReplay, check_results, copied, named_arguments

WARMUP = 2
"""Eager steps before a capture, in which kernels are compiled and FSDP2 finds the order of its gathers."""

MOST_GRAPHS = 8
"""Each has memory of its own."""

MOST_KINDS = 32
"""Kinds of arguments that came once or twice. Before one more is counted, all are forgotten."""


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
    tensors and constants, alone or in tuples, lists and dicts. The step is given copies of the tensors on the model's
    GPU; of those on the host the copy waits for the step before, so batches that are on the GPU go faster. Of other
    shapes, dtypes or constants there is another graph, after two or three more eager steps. What the step returns are
    copies too, without a graph of autograd, which later steps do not change.

    A graph repeats what the device was given, and no Python: what the step reads of the host (numbers of a schedule,
    `if loss > 3`) is as it was at the capture. Learning rates must be tensors, as `capturable=True` makes them; a
    scheduler writes into these. Forward and backward belong into one step, under FSDP2 with all that is gathered. One
    thread at a time may call it.

    Args:
        step: runs forward, backward, the optimizer's step and zero_grad, and reads nothing back from the device.
        model: all whose parameters it trains, on the current GPU; draws of random words are counted there from now on
            (`capturable_`).
        optimizer: one or several, each with `capturable=True` and masters, if its weights are quantized.
        enabled: False runs each step eagerly, with the arguments themselves, as on a machine without a GPU.

    Raises:
        ConfigurationError: an optimizer has no parameter of the model; or, if enabled, the model is not on the current
            GPU, or an optimizer is not capturable.
        UnsupportedOperationError: DistributedDataParallel wraps the model.
    """

    @suggests_names
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
        self._optimizers: list[Any] = list(optimizer) if isinstance(optimizer, list | tuple) else [optimizer]
        context.check_flags("StepGraph", enabled=enabled)
        for each in self._optimizers:
            check_arguments("StepGraph", OPTIMIZER, optimizer=each)
            _check_members(each, model)
        self._step, self._model, self.enabled = step, model, enabled
        self._eager: dict[Any, int] = {}
        self._replays: dict[Any, StepReplay] = {}
        self._warned = self._has_captured = self._is_over = False
        if enabled:
            _check_unwrapped(model)
            self._device = _device(model)
            for each in self._optimizers:
                _check_capturable(each, self._device)
            capturable_(model)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """A step, and what it returns.

        Raises:
            UnsupportedOperationError: it cannot be captured.
            ConfigurationError: it was captured, and something that the graph has of the model, the optimizers or the
                contexts around is no longer what it was; it leaves gradients, or an argument or a result is neither a
                tensor nor a constant.
        """
        return self.within(nullcontext, *args, **kwargs)

    def within(self, around: StepContext, *args: Any, **kwargs: Any) -> Any:
        """A step in a context in which the device does more, as `statistics.whole_step`: a graph of its own.

        `around`: makes the context, equal at each call for the same; it is entered for eager steps and captures.
        """
        if isinstance(around, AbstractContextManager):
            raise ConfigurationError(
                "StepGraph.within: give what makes a context, as statistics.whole_step, and not the context: it is "
                "entered again in other steps"
            )
        check_arguments("StepGraph.within", CALLABLE, around=around)
        if self._is_over:
            raise ConfigurationError("StepGraph: its with block has ended, and its graphs are gone; make another one")
        key = around, _kind(args, "arguments"), _kind(dict(sorted(kwargs.items())), "arguments")
        if not self.enabled:
            with around():
                result = self._step(*args, **kwargs)
            check_results(result)
            return mapped(result, Tensor.detach)
        replay = self._replays.get(key)
        if replay is None and self._is_to_be_eager(key, args, kwargs):
            given_args, given_kwargs = copied((args, kwargs), self._device)
            with around():
                result = self._step(*given_args, **given_kwargs)
            check_results(result)
            return copied(result, self._device)
        if replay is None:
            replay = StepReplay(self._step, self._model, self._optimizers, around, (args, kwargs), self._device)
            self._replays[key], self._has_captured = replay, True
        return replay(args, kwargs)

    def _is_to_be_eager(self, key: Any, args: Any, kwargs: Any) -> bool:
        """Whether a step of which there is no graph is not captured now."""
        if key not in self._eager and len(self._eager) >= MOST_KINDS:
            self._warn_of_many(args, kwargs)
            self._eager.clear()
        count = self._eager.get(key, 0)
        if len(self._replays) >= MOST_GRAPHS:
            self._warn_of_many(args, kwargs)
        # what an optimizer's graph holds is allocated by an eager step, so one must come between two captures
        elif count >= WARMUP and not self._has_captured:
            return False
        self._eager[key], self._has_captured = count + 1, False
        return True

    def _warn_of_many(self, args: Any, kwargs: Any) -> None:
        if self._warned:
            return
        self._warned = True
        last = ", ".join(f"{name} = {_shown(value)}" for name, value in named_arguments(args, kwargs))
        warn_user(
            f"StepGraph has {len(self._replays)} graphs, and steps run eagerly whose arguments have other shapes or "
            f"values (last: {last}); pad batches to a few lengths, and give numbers that change as tensors",
            is_counted=True,
        )

    def close(self) -> None:
        """Let go of the graphs; later calls run eagerly and are captured anew. A communicator of NCCL waits, when it
        is destroyed, until no graph has its collectives any more."""
        self._replays.clear()
        self._eager.clear()
        self._has_captured = False

    def __enter__(self) -> StepGraph:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
        self._is_over = True


def _check_unwrapped(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if isinstance(module, DistributedDataParallel):
            raise UnsupportedOperationError(limits.refusal("captured replicas", name or "the model"))


def _check_members(optimizer: Optimizer, model: nn.Module) -> None:
    own = {id(param) for param in model.parameters()}
    if not any(id(param) in own for group in optimizer.param_groups for param in group["params"]):
        raise ConfigurationError(
            f"StepGraph: no parameter of {type(optimizer).__name__} is the model's; build it over this model, after "
            "convert and fully_shard, which put others in their place"
        )


def _device(model: nn.Module) -> torch.device:
    devices = {private_torch.local_tensor(param).device for param in model.parameters()}
    device = next(iter(devices), torch.device("cpu"))
    if len(devices) > 1 or device.type != "cuda":
        where = " and ".join(sorted(map(str, devices))) or "no device"
        raise ConfigurationError(
            f"StepGraph: the model's parameters are on {where}, and a CUDA graph is of one GPU; on others give "
            "enabled=False, which calls the step itself"
        )
    if device.index != torch.cuda.current_device():
        raise ConfigurationError(
            f"StepGraph: the model is on {device}, and the current GPU, on which launches are captured, is "
            f"cuda:{torch.cuda.current_device()}; call torch.cuda.set_device({device.index}) first"
        )
    return device


def _check_capturable(optimizer: Optimizer, device: torch.device) -> None:
    name = type(optimizer).__name__
    for number, group in enumerate(optimizer.param_groups):
        rate = group.get("lr")
        if group.get("capturable") is False or not isinstance(rate, Tensor) or rate.device != device:
            raise ConfigurationError(
                f"StepGraph: lr of group {number} of {name} is {rate!r}, which a graph would keep for ever; make it "
                f"{name}(..., capturable=True), of torch.optim with lr=torch.tensor(..., device='{device}') besides"
            )


def _kind(value: Any, name: str) -> Any:
    """What tells graphs apart: how tensors are laid out, values of constants, and what they stand in."""
    if isinstance(value, Tensor):
        if value.requires_grad:
            raise ConfigurationError(
                f"StepGraph: {name} require a gradient, and a replay gives none to arguments; detach them, and let the "
                "step return what it needs"
            )
        return value.shape, value.dtype, value.stride()
    if isinstance(value, tuple | list) and value:
        return type(value), *(_kind(each, f"{name}[{index}]") for index, each in enumerate(value))
    if isinstance(value, dict) and value:
        return type(value), *((key, _kind(each, f"{name}[{key!r}]")) for key, each in value.items())  # in their order
    if isinstance(value, CONSTANTS):
        return type(value), repr(value)
    raise ConfigurationError(
        f"StepGraph: {name} is a {type(value).__name__}; a step takes tensors and constants (numbers, strings, None), "
        "alone or in tuples, lists and dicts"
    )


def _shown(value: Any) -> str:
    return f"{list(value.shape)}" if isinstance(value, Tensor) else repr(value)
