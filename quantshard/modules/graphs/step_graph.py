"""StepGraph: a whole training step as one CUDA graph, also under FSDP2."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from quantshard import limits, private_torch
from quantshard.errors import ConfigurationError, UnsupportedOperationError, warn_user
from quantshard.modules.capture import capturable_
from quantshard.modules.contexts import context
from quantshard.modules.graphs.arguments import CONSTANTS, mapped
from quantshard.modules.graphs.step_replay import StepContext, StepReplay, check_results, copied, named_arguments

WARMUP = 2
"""Eager steps before a capture, which compile kernels and let FSDP2 record the order of its all-gathers."""

MOST_GRAPHS = 8
"""Maximum number of graphs; each has its own memory."""

MOST_KINDS = 32
"""Maximum number of argument kinds with counted eager steps. One more clears all counts."""


class StepGraph:
    """A training step that runs eagerly twice, is then captured as a CUDA graph, and is replayed from then on.

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

    The host makes one launch per step, and results keep the same bits. The model can be on one GPU, sharded by FSDP2,
    or tensor parallel: collectives are part of the graph.

    Arguments are tensors and constants, alone or in tuples, lists and dicts. The step gets copies of the tensors on the
    model's GPU. Copies from the host wait for the previous step, so batches on the GPU are faster. New shapes, dtypes
    or constants get another graph, after two or three more eager steps. Results are copies too, detached from autograd
    and not changed by later steps.

    A graph repeats device work and runs no Python: host values that the step reads (`if loss > 3`, a schedule's
    numbers) stay as they were at the capture. Learning rates must be tensors, as `capturable=True` makes them, and
    schedulers must write into these tensors. Forward and backward must be in the same step, under FSDP2 together with
    all their all-gathers. Only one thread at a time can call the step.

    Args:
        step: function that runs forward, backward, the optimizer's step and zero_grad, and does not synchronize with
            the device.
        model: module with all parameters that the step trains, on the current GPU. From now on the GPU counts its
            random draws (`capturable_`).
        optimizer: one optimizer or several, each with `capturable=True`, and with masters if its weights are quantized.
        enabled: if False, run each step eagerly on the arguments themselves, also without a GPU.

    Raises:
        ConfigurationError: an optimizer has no parameter of the model. If enabled: the model is not on the current GPU,
            or an optimizer is not capturable.
        UnsupportedOperationError: the model is wrapped in DistributedDataParallel.
    """

    def __init__(
        self,
        step: Callable[..., Any],
        model: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer],
        *,
        enabled: bool = True,
    ) -> None:
        self._optimizers: list[Any] = list(optimizer) if isinstance(optimizer, list | tuple) else [optimizer]
        context.check_flags("StepGraph", enabled=enabled)
        for item in self._optimizers:
            _check_members(item, model)
        self._step, self._model, self.enabled = step, model, enabled
        self._eager: dict[Any, int] = {}
        self._replays: dict[Any, StepReplay] = {}
        self._warned = self._has_captured = self._is_over = False
        if enabled:
            _check_unwrapped(model)
            self._device = _device(model)
            for item in self._optimizers:
                _check_capturable(item, self._device)
            capturable_(model)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run a step and return its results.

        Raises:
            UnsupportedOperationError: the step cannot be captured.
            ConfigurationError: after the capture, a tensor of the model or the optimizers or a surrounding context was
                replaced; the step leaves gradients; or an argument or a result is neither a tensor nor a constant.
        """
        return self.within(nullcontext, *args, **kwargs)

    def within(self, around: StepContext, *args: Any, **kwargs: Any) -> Any:
        """Run a step in a context that adds device work, such as `statistics.whole_step`. Each context has its own
        graph.

        `around`: function that creates the context; calls with an equal function share a graph. The context is entered
        for eager steps and captures.
        """
        if isinstance(around, AbstractContextManager):
            raise ConfigurationError(
                "StepGraph.within: give what makes a context, as statistics.whole_step, and not the context: it is "
                "entered again in other steps"
            )
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
            args_on_device, kwargs_on_device = copied((args, kwargs), self._device)
            with around():
                result = self._step(*args_on_device, **kwargs_on_device)
            check_results(result)
            return copied(result, self._device)
        if replay is None:
            replay = StepReplay(self._step, self._model, self._optimizers, around, (args, kwargs), self._device)
            self._replays[key], self._has_captured = replay, True
        return replay(args, kwargs)

    def _is_to_be_eager(self, key: Any, args: Any, kwargs: Any) -> bool:
        """Return whether a step without a graph runs eagerly instead of being captured."""
        if key not in self._eager and len(self._eager) >= MOST_KINDS:
            self._warn_of_many(args, kwargs)
            self._eager.clear()
        count = self._eager.get(key, 0)
        if len(self._replays) >= MOST_GRAPHS:
            self._warn_of_many(args, kwargs)
        # an eager step allocates the optimizer's state for its graph, so there must be one between two captures
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
        """Free the graphs. Later calls run eagerly and are captured again. Destroying an NCCL communicator waits until
        no graph contains its collectives."""
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
    ids = {id(param) for param in model.parameters()}
    if not any(id(param) in ids for group in optimizer.param_groups for param in group["params"]):
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
        lr = group.get("lr")
        if group.get("capturable") is False or not isinstance(lr, Tensor) or lr.device != device:
            raise ConfigurationError(
                f"StepGraph: lr of group {number} of {name} is {lr!r}, which a graph would keep for ever; make it "
                f"{name}(..., capturable=True), of torch.optim with lr=torch.tensor(..., device='{device}') besides"
            )


def _kind(value: Any, name: str) -> Any:
    """Return the key that selects a graph: shapes, dtypes and strides of tensors, values of constants, and their
    nesting."""
    if isinstance(value, Tensor):
        if value.requires_grad:
            raise ConfigurationError(
                f"StepGraph: {name} require a gradient, and a replay gives none to arguments; detach them, and let the "
                "step return what it needs"
            )
        return value.shape, value.dtype, value.stride()
    if isinstance(value, tuple | list) and value:
        return type(value), *(_kind(item, f"{name}[{index}]") for index, item in enumerate(value))
    if isinstance(value, dict) and value:
        # in insertion order
        return type(value), *((key, _kind(item, f"{name}[{key!r}]")) for key, item in value.items())
    if isinstance(value, CONSTANTS):
        return type(value), repr(value)
    raise ConfigurationError(
        f"StepGraph: {name} is a {type(value).__name__}; a step takes tensors and constants (numbers, strings, None), "
        "alone or in tuples, lists and dicts"
    )


def _shown(value: Any) -> str:
    return f"{list(value.shape)}" if isinstance(value, Tensor) else repr(value)
