"""Where infinite or NaN values come from: a pass is run once more, with a look at what each module gives.

Nothing is watched while all is well. A step with such a gradient is skipped and changes no weight, so that its pass can
be run again from the same weights. Not bit for bit: forward and backward have moved random words and histories on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from quantshard import private_torch
from quantshard.argument_kinds import CALLABLE, MODULE, check_arguments, suggests_names
from quantshard.collectives import process_groups
from quantshard.collectives.delayed_scaling import PendingAmaxes
from quantshard.modules.base.module import QuantizedModule
from quantshard.modules.contexts import context
from quantshard.tensor import components, observation
from quantshard.tensor.storage import DRAWS

_WEIGHT, _FORWARD, _BACKWARD, _GRADIENT = range(4)
_WHAT: Final = {
    _WEIGHT: "the values of {} are",
    _FORWARD: "the output of {} is, the first in forward order,",
    _BACKWARD: "the gradient of the output of {} is, the first in backward order,",
    _GRADIENT: "the gradient of {} is, of all parameters' the first,",
}


@dataclass(frozen=True, order=True)
class NonfiniteValue:
    """The first infinite or NaN value of a pass: when it was there, and of what. `name`: of a parameter or a module."""

    when: int
    order: int
    name: str

    @property
    def text(self) -> str:
        """As a sentence without an end."""
        return f"{_WHAT[self.when].format(self.name)} infinite or NaN"


class UnrecordedAmaxes(PendingAmaxes):
    """Those of a pass that is no step: no history is told."""

    def flush(self) -> None:
        """Forget them."""
        self.drop()


class FlagRecorder:
    """Looks at the outputs of modules and at their gradients, without waiting for the device."""

    def __init__(self, model: nn.Module) -> None:
        self.flags: list[tuple[int, str, Tensor]] = []
        self._hooks = [
            module.register_forward_hook(self._look_at(name or "the model")) for name, module in model.named_modules()
        ]

    def _look_at(self, name: str) -> Callable[[nn.Module, Any, Any], None]:
        def look(_: nn.Module, __: Any, output: Any) -> None:
            for tensor in _tensors(output):
                self.add(_FORWARD, name, tensor)
                if tensor.requires_grad:
                    tensor.register_hook(lambda grad: self.add(_BACKWARD, name, grad))

        return look

    def add(self, when: int, name: str, tensor: Tensor) -> None:
        """Remember whether all of a tensor is finite."""
        local = private_torch.local_tensor(tensor.detach())
        if local.is_floating_point():
            self.flags.append((when, name, ~local.isfinite().all()))

    def stop(self) -> None:
        """Look at no more."""
        for hook in self._hooks:
            hook.remove()

    def first(self) -> NonfiniteValue | None:
        """The first that was not finite; waits for the device."""
        found = [NonfiniteValue(when, order, name) for order, (when, name, flag) in enumerate(self.flags) if bool(flag)]
        return min(found, default=None)


def _tensors(output: Any) -> Iterator[Tensor]:
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, dict):
        for value in output.values():
            yield from _tensors(value)
    elif isinstance(output, (tuple, list)):
        for value in output:
            yield from _tensors(value)


@suggests_names
def first_nonfinite(model: nn.Module, run: Callable[[], object]) -> NonfiniteValue | None:
    """Where the first infinite or NaN value of a pass is; None if there is none. A collective call of all ranks.

    Afterwards all is as before: no amaxes are recorded, and draw counts of random words, gradients and buffers of the
    model (running means of nn.BatchNorm) are put back, and so is torch's generator on the CPU and the current GPU.

    After a step, the pass is not bit for bit that of the step, which has moved on: words of stochastic rounding are the
    next ones, dropout's too; under delayed scaling histories have the finite amaxes of the step itself; nn.BatchNorm
    has its running means. Without these its numbers are those of the step. What only one word or one scale of the step
    made infinite is not found again, and the answer is None.

    Args:
        model: whose modules are looked at.
        run: makes the pass, forward and backward, of the same batch as the step.

    Returns:
        Of weights that are not finite themselves the first; else of outputs the first in forward order; of their
        gradients the first in backward order; or of gradients of parameters. On all ranks the same: that of the rank
        where it was first.
    """
    check_arguments("first_nonfinite", MODULE, model=model)
    check_arguments("first_nonfinite", CALLABLE, run=run)
    recorder = FlagRecorder(model)
    try:
        for name, param in model.named_parameters():
            quantized = components.quantized_local(param)
            values = private_torch.local_tensor(param)
            recorder.add(_WEIGHT, name, values if quantized is None else quantized.quantized_storage.dequantize())
        with _undone(model):
            run()
            for name, param in model.named_parameters():
                if param.grad is not None:
                    recorder.add(_GRADIENT, name, param.grad)
        found = recorder.first()
    finally:
        recorder.stop()
    group = process_groups.world()
    if group is not None:
        told: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(told, found, group=group)
        found = min((each for each in told if each is not None), default=None)
    return found


def _buffers(model: nn.Module) -> Iterator[tuple[nn.Module, str, Tensor]]:
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False):
            yield module, name, buffer


@contextmanager
def _undone(model: nn.Module) -> Iterator[None]:
    """What a pass leaves in a model is taken back."""
    grads = {param: param.grad for param in model.parameters()}
    draws = [
        module.weight_state(leaf)[DRAWS]
        for module in model.modules()
        if isinstance(module, QuantizedModule)
        for leaf in module._weights
    ]
    before, observer = [draw.clone() for draw in draws], observation.active
    buffers = {(module, name): (buffer, buffer.detach().clone()) for module, name, buffer in _buffers(model)}
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    try:
        observation.active = None
        for param in grads:
            param.grad = None
        with torch.random.fork_rng(devices=devices), context.amaxes_noted_in(UnrecordedAmaxes(), UnrecordedAmaxes()):
            yield
    finally:
        observation.active = observer
        for draw, value in zip(draws, before, strict=True):
            draw.copy_(value)
        with torch.no_grad():
            for module, name in [(module, name) for module, name, _ in _buffers(model)]:
                if (module, name) not in buffers:
                    setattr(module, name, None)  # a buffer that the pass was the first to make
            for (module, name), (buffer, values) in buffers.items():
                setattr(module, name, buffer)
                buffer.copy_(values)
        for param, grad in grads.items():
            param.grad = grad
