"""Keeps the identity, attributes and gradient of parameters that `Module.to()`, `to_empty()` and FSDP2 replace."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from quantshard import private_torch
from quantshard.tensor.parameter_state import RNG_KEY
from quantshard.tensor.quantized_tensor import QuantizedTensor


@torch.no_grad()
def move_parameter(param: Tensor, change: Callable[[Tensor], Tensor]) -> None:
    """Move or cast a quantized parameter by `change`, as `nn.Module` does, keeping the object, attributes and grad.
    Hooks survive too, except on the way to or from the meta device, where PyTorch can only swap tensors."""
    changed, grad = change(param), param.grad
    if private_torch.takes_data(param, changed):
        param.data = changed
        if grad is not None:
            grad.data = change(grad)
        return
    # as in `nn.Module._apply`: a gradient that has a Python object prevents the swap
    param.grad = None
    with attributes_kept([param]):
        torch.utils.swap_tensors(param, nn.Parameter(changed, requires_grad=param.requires_grad))
    if grad is not None:
        param.grad = change(grad)


@contextmanager
def attributes_kept(params: Iterable[Tensor]) -> Iterator[None]:
    """Restore, on exit, tensor attributes that PyTorch removed by swapping tensors."""
    attributes_before = [(param, dict(vars(param))) for param in params]
    yield
    for param, attributes in attributes_before:
        vars(param).update({name: value for name, value in attributes.items() if name not in vars(param)})


_OWN_ATTRIBUTES = ("quantized_storage", "_is_param", "_fsdp_", "quantshard_", "_quantshard_", "_is_hf_initialized")
"""Prefixes of attributes that are not copied: quantshard's, PyTorch's, and the loading marks of transformers."""

_UNMARKED = {"quantized_storage", "_is_param", "_fsdp_orig_uid", "_quantshard_others"}
"""Attributes of a parameter on which users have set none."""


def set_attributes(param: Tensor) -> dict[str, Any]:
    return {name: value for name, value in vars(param).items() if not name.startswith(_OWN_ATTRIBUTES)}


def carry_attributes(old: Tensor | None, new: Tensor | None) -> None:
    """Copy user attributes from a parameter to its replacement, if both have the same quantized weight.
    An unsharded parameter receives the attributes of its shard and passes none back."""
    # the last condition is a fast path: each gather calls this function
    if old is None or new is None or old is new or vars(old).keys() <= _UNMARKED:
        return
    if user_attributes := set_attributes(old):
        before, after = private_torch.local_tensor(old), private_torch.local_tensor(new)
        if not (isinstance(before, QuantizedTensor) and isinstance(after, QuantizedTensor)):
            return
        is_same_weight = before.quantized_storage.state.get(RNG_KEY) is after.quantized_storage.state.get(RNG_KEY)
        if is_same_weight and not before.quantized_storage.gathered:
            vars(new).update(user_attributes)
