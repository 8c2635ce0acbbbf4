"""Locates infinite or NaN values: repeats the pass of a skipped step, which changed no weight, and checks it."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn

from quantshard import private_torch
from quantshard.checkpoints.disk import agreement
from quantshard.collectives.delayed_scaling import PendingAmaxes
from quantshard.modules.contexts import pending_amaxes
from quantshard.modules.graphs.recorder import states_preserved, tensors_in
from quantshard.tensor import components, observation

_WEIGHT, _FORWARD, _BACKWARD, _GRADIENT = range(4)
_WHAT: Final = {
    _WEIGHT: "the values of {} are",
    _FORWARD: "the output of {} is, the first in forward order,",
    _BACKWARD: "the gradient of the output of {} is, the first in backward order,",
    _GRADIENT: "the gradient of {} is, of all parameters' the first,",
}


@dataclass(frozen=True, order=True)
class NonfiniteValue:
    """The first infinite or NaN value of a pass: its phase, its position there, and the parameter or module."""

    when: int
    order: int
    name: str

    @property
    def text(self) -> str:
        """The finding as a sentence without its period."""
        return f"{_WHAT[self.when].format(self.name)} infinite or NaN"


class UnrecordedAmaxes(PendingAmaxes):
    """Pending amaxes of a pass outside training; no history records them."""

    def flush(self) -> None:
        self.drop()


def first_nonfinite(model: nn.Module, run: Callable[[], object]) -> NonfiniteValue | None:
    """Locate the first infinite or NaN value of a pass. A collective call of all ranks.

    The call restores draw counts of random words, gradients, buffers of the model and torch's generators; no amaxes are
    recorded. The pass is not bit-exact: it draws other random numbers, and histories of delayed scaling have advanced.

    Args:
        model: the model to check.
        run: runs forward and backward on the batch of the step.

    Returns:
        The first weight that is not finite; otherwise the first output in forward order; otherwise the first gradient
        of an output in backward order; otherwise the first gradient of a parameter; None if all are finite. All ranks
        return the value that is first over all ranks.
    """
    flags: list[tuple[int, str, Tensor]] = []

    def add(when: int, name: str, tensor: Tensor) -> None:
        local = private_torch.local_tensor(tensor.detach())
        if local.is_floating_point():
            flags.append((when, name, ~local.isfinite().all()))

    def check_output(name: str, module: nn.Module, args: Any, output: Any) -> None:
        for tensor in tensors_in(output):
            add(_FORWARD, name, tensor)
            if tensor.requires_grad:
                tensor.register_hook(partial(add, _BACKWARD, name))

    with ExitStack() as hooks:
        for name, module in model.named_modules():
            hooks.callback(module.register_forward_hook(partial(check_output, name or "the model")).remove)
        for name, param in model.named_parameters():
            storage = components.quantized_storage(param)
            add(_WEIGHT, name, private_torch.local_tensor(param) if storage is None else storage.dequantize())
        with _undone(model):
            run()
            for name, param in model.named_parameters():
                if param.grad is not None:
                    add(_GRADIENT, name, param.grad)
    # waits for the device
    nonfinite = [NonfiniteValue(when, order, name) for order, (when, name, flag) in enumerate(flags) if flag]
    of_ranks = agreement.all_gather_object(min(nonfinite, default=None))
    return min((value for value in of_ranks if value is not None), default=None)


def _buffers(model: nn.Module) -> Iterator[tuple[nn.Module, str, Tensor]]:
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False):
            yield module, name, buffer


@contextmanager
def _undone(model: nn.Module) -> Iterator[None]:
    grads = {param: param.grad for param in model.parameters()}
    buffers = {(module, name): buffer for module, name, buffer in _buffers(model)}
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    unrecorded, observer = (UnrecordedAmaxes(), UnrecordedAmaxes()), observation.active
    try:
        observation.active = None
        for param in grads:
            param.grad = None
        with states_preserved([model], device), pending_amaxes.amaxes_noted_in(*unrecorded):
            yield
    finally:
        observation.active = observer
        for module, name in {*buffers, *((module, name) for module, name, _ in _buffers(model))}:
            # None for a buffer that the pass created
            setattr(module, name, buffers.get((module, name)))
        for param, grad in grads.items():
            param.grad = grad
