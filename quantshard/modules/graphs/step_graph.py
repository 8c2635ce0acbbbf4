"""StepGraph: a whole training step as one CUDA graph, also under FSDP2."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from quantshard.collectives.flags import PendingFlag
from quantshard.errors import ConfigurationError, warn_user
from quantshard.modules.contexts import settings
from quantshard.modules.graphs import recorder
from quantshard.modules.graphs.comparison import EagerStep, as_in_eager_steps, counted_operations, warn_of_operations

StepContext = Callable[[], AbstractContextManager[Any]]
"""Function that creates a context around a step, which adds device work."""

WARMUP = 2
"""Eager steps before a capture, which compile kernels and let FSDP2 record the order of its all-gathers."""

MOST_COMPILING = 8
"""Maximum number of additional eager steps while torch.compile still compiles something in each step."""

MOST_GRAPHS = 8
"""Maximum number of graphs; each has its own memory."""

MOST_KINDS = 32
"""Maximum number of argument kinds with counted eager steps. One more clears all counts."""

EVERY = 10
"""One in this many replays checks all tensors. For a small model the check takes the host as long as a step takes the
GPU."""


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
    model's GPU. New shapes, dtypes or constants get another graph, after two or three more eager steps. Results are
    copies too, detached from autograd.

    Compiled layers are captured as they are, after a step in which nothing is compiled any more. The first steps are
    compared: a captured step must run the products and attention calls of the eager step before it, and a warning says
    if not, or if replays are slower.

    A graph repeats device work and runs no Python: host values that the step reads (`if loss > 3`, a schedule's
    numbers) stay as they were at the capture. Schedulers must write into the learning rates, which `capturable=True`
    makes tensors. Forward and backward must be in the same step, under FSDP2 together with all their all-gathers. Only
    one thread at a time can call the step.

    Args:
        step: function that runs forward, backward, the optimizer's step and zero_grad, and does not synchronize with
            the device.
        model: module with all parameters that the step trains, on the current GPU. From now on the GPU counts its
            random draws (`capturable_`).
        optimizer: one optimizer or several, each with `capturable=True`, and with masters if its weights are quantized.
        enabled: if False, run each step eagerly on the arguments themselves, also without a GPU.

    Raises:
        ConfigurationError: the model is not on the current GPU, or an optimizer is not capturable.
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
        settings.check_flags("StepGraph", enabled=enabled)
        self._optimizers: list[Any] = list(optimizer) if isinstance(optimizer, list | tuple) else [optimizer]
        self._step, self._model, self.enabled = step, model, enabled
        self._eager: dict[Any, EagerStep] = {}
        self._replays: dict[Any, StepReplay] = {}
        self._warned = self._has_captured = False
        if enabled:
            recorder.check_not_replicated(model, "the model")
            self._device = _device(model)
            for item in self._optimizers:
                _check_capturable(item, self._device)
            recorder.capturable_(model)

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
        if not self.enabled:
            return recorder.mapped(_run(self._step, around, args, kwargs), Tensor.detach)
        arguments = args, dict(sorted(kwargs.items()))
        key = around, recorder.kind_of("StepGraph", arguments, _tensor_kind)
        replay = self._replays.get(key)
        if replay is not None:
            return replay(list(recorder.tensors_in(arguments)))
        is_eager, static = self._is_to_be_eager(key, arguments), recorder.copied(arguments, self._device)
        step, eager_step = self._step, self._eager[key]
        if is_eager:

            def run_eagerly() -> Any:
                return recorder.copied(_run(step, around, *static), self._device)

            # without a capture to come there is nothing to compare
            return eager_step.run(run_eagerly) if len(self._replays) < MOST_GRAPHS else run_eagerly()
        recorder.check_autocast_cache("StepGraph")
        inputs = list(recorder.tensors_in(static))
        is_violated = torch.zeros((), dtype=torch.bool, device=self._device)

        def work() -> Any:
            with as_in_eager_steps(inputs) as flags, counted_operations() as counts:
                # detached, or the results would keep the autograd graph alive
                results = recorder.mapped(_run(step, around, *static), Tensor.detach)
            warn_of_operations(eager_step.operations, counts)
            for flag in flags:
                is_violated.logical_or_(flag)
            return results

        launch = _recorded(work, self._model, self._device)
        replay = self._replays[key] = StepReplay(
            launch, inputs, is_violated, eager_step, self._device, self._model, self._optimizers
        )
        self._has_captured = True
        return replay(list(recorder.tensors_in(arguments)))

    def _is_to_be_eager(self, key: Any, arguments: tuple[Any, dict[str, Any]]) -> bool:
        """Return whether a step without a graph runs eagerly instead of being captured."""
        has_all_graphs = len(self._replays) >= MOST_GRAPHS
        has_all_kinds = key not in self._eager and len(self._eager) >= MOST_KINDS
        if (has_all_graphs or has_all_kinds) and not self._warned:
            self._warned = True
            values = ", ".join(f"{name} = {text}" for name, text in recorder.described(*arguments).items())
            problem = f"StepGraph has {len(self._replays)} graphs; other shapes or values run eagerly ({values})"
            warn_user(f"{problem}; pad batches, and pass numbers that change as tensors", is_counted=True)
        if has_all_kinds:
            self._eager.clear()
        last = self._eager.setdefault(key, EagerStep(self._device))
        is_compiling = last.has_compiled and last.count < WARMUP + MOST_COMPILING
        # an eager step allocates the optimizer's state for its graph, so there must be one between two captures
        if last.count >= WARMUP and not self._has_captured and not has_all_graphs and not is_compiling:
            return False
        last.count, self._has_captured = last.count + 1, False
        return True

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


def _run(step: Callable[..., Any], around: StepContext, args: Any, kwargs: Any) -> Any:
    with around():
        result = step(*args, **kwargs)
    # raises for types whose tensors would be missed
    recorder.kind_of("StepGraph", result)
    return result


def _device(model: nn.Module) -> torch.device:
    device = recorder.graph_device("StepGraph", model.parameters())
    if device.index != torch.cuda.current_device():
        raise ConfigurationError(f"StepGraph: the model is on {device}; torch.cuda.set_device({device.index}) first")
    return device


def _check_capturable(optimizer: Optimizer, device: torch.device) -> None:
    name = type(optimizer).__name__
    for number, group in enumerate(optimizer.param_groups):
        lr = group.get("lr")
        if group.get("capturable") is False or not isinstance(lr, Tensor) or lr.device != device:
            remedy = f"{name}(..., capturable=True), for torch.optim also lr=torch.tensor(..., device='{device}')"
            raise ConfigurationError(f"StepGraph: a graph keeps lr of group {number}, {lr!r}, for ever; use {remedy}")


def _tensor_kind(tensor: Tensor) -> Any:
    if tensor.requires_grad:
        raise ConfigurationError("StepGraph: an argument requires a gradient, and a replay gives none; detach it")
    return tensor.shape, tensor.dtype, tensor.stride()


def _recorded(work: Callable[[], Any], model: nn.Module, device: torch.device) -> Callable[[], Any]:
    """Record a step that leaves no gradients except those it recreated itself, and return a function that replays it.
    After an error, all gradients are restored."""
    before = {name: param.grad for name, param in model.named_parameters()}
    try:
        # batches are pinned by another thread
        launch, _ = recorder.GraphRecorder(device, error_mode="thread_local").record("StepGraph: the step", work)
        for name, param in model.named_parameters():
            if param.grad is not None and (before[name] is None or param.grad is before[name]):
                remedy = "call optimizer.step() and optimizer.zero_grad() in the step"
                raise ConfigurationError(f"StepGraph: the step leaves a gradient of {name}; {remedy}")
    except BaseException:
        for name, param in model.named_parameters():
            # gradients left by a capture were never computed
            param.grad = before[name]
        raise
    return launch


class StepReplay:
    """The graph for one kind of arguments, and the facts it relies on.

    Replays neither read nor write tensors that moved after the capture, and would not report that, so the addresses are
    compared. `launch`: replays the graph. `static`: the tensors that it reads the arguments from. `is_violated`: bool
    scalar, set by a replay with several sequences in a row (`as_in_eager_steps`).
    """

    def __init__(
        self, launch: Callable[[], Any], static: list[Tensor], is_violated: Tensor, eager: EagerStep,
        device: torch.device, model: nn.Module, optimizers: Sequence[Optimizer],
    ) -> None:  # fmt: skip
        self._launch, self._static, self._device, self._eager = launch, static, device, eager
        self._is_violated, self._sent = is_violated, PendingFlag(is_violated)
        self._addresses, self._surroundings = recorder.GraphAddresses(model, draws=True), recorder.surroundings()
        self._optimizers = [(item, _group_facts(item), _state_addresses(item)) for item in optimizers]
        self._model, self._is_training, self._count = model, model.training, 0
        # keeps the memory of replaced tensors alive until a replay reports the change, even if `.data` is replaced
        tensors = [*model.parameters(), *model.buffers()]
        for optimizer in optimizers:
            values = [value for group in optimizer.param_groups for value in group.values()]
            tensors += [value for value in values if isinstance(value, Tensor)]
            tensors += _state_tensors(optimizer)
        self._memory = [part.detach() for tensor in tensors for part in recorder.memory_of(tensor)]

    def __call__(self, tensors: Sequence[Tensor]) -> Any:
        """Replay the step on these arguments, and return copies of its results."""
        recorder.check_surroundings("StepGraph: the step", self._surroundings)
        for static, value in zip(self._static, tensors, strict=True):
            # copies from the host block, so that the caller can overwrite the batch
            static.copy_(value)
        result = recorder.copied(self._eager.run_replay(self._launch), self._device)
        # checked after the launch, while the GPU works
        if (changed := self._changed()) is not None:
            remedy = "change values in place (lr.fill_(1e-4)), or call close() before the change"
            raise ConfigurationError(f"StepGraph: {changed} since the capture, so steps used the old one; {remedy}")
        if self._count % EVERY == 1:
            # copied to the host some replays ago, so that reading it does not wait
            if self._sent:
                remedy = "pass position_ids as an argument of the step"
                raise ConfigurationError(f"StepGraph: replays ignored that rows have several sequences; {remedy}")
            self._sent = PendingFlag(self._is_violated)
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
            current = _group_facts(optimizer)
            for what, fact in options.items():
                if current.get(what) != fact:
                    return f"{what} of {type(optimizer).__name__} was replaced"
            if checks_tensors and _state_addresses(optimizer) != states:
                return f"a state of {type(optimizer).__name__} was replaced"
        return None


def _group_facts(optimizer: Optimizer) -> dict[str, Any]:
    """Return what a captured step relies on in an optimizer's groups: parameters, and options by value or address."""
    facts: dict[str, Any] = {"the number of groups": len(optimizer.param_groups)}
    for number, group in enumerate(optimizer.param_groups):
        facts[f"the parameters of group {number}"] = [id(param) for param in group["params"]]
        for name, value in group.items():
            if name not in ("params", "param_names"):
                facts[f"{name} of group {number}"] = _addresses(value) if isinstance(value, Tensor) else repr(value)
    return facts


def _state_tensors(optimizer: Optimizer) -> Iterator[Tensor]:
    for entries in optimizer.state.values():
        if isinstance(entries, dict):
            yield from (value for value in entries.values() if isinstance(value, Tensor))


def _state_addresses(optimizer: Optimizer) -> list[Any]:
    return [_addresses(value) for value in _state_tensors(optimizer)]


def _addresses(tensor: Tensor) -> list[int]:
    return [part.data_ptr() for part in recorder.memory_of(tensor)]
