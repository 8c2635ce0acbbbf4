"""Operations without a rule of their own read a quantized tensor: they compute with its values.

Results are plain tensors. Views are read-only, because a write to a view would not reach the codes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from quantshard import limits, private_torch
from quantshard.errors import UnsupportedOperationError

is_strict: Callable[[], bool] = bool
"""Returns whether reads raise. `modules.base.checks` replaces this function, which returns False."""


class ReadableTensor(Tensor):
    """The base class of tensors without data of their own. `read_values` returns the values, without a gradient."""

    read_values: Callable[[], Tensor]

    # all rules are in __torch_dispatch__: __torch_function__ would slow down every operation
    __torch_function__ = private_torch.disabled_torch_function  # type: ignore[assignment]

    def numpy(self, *, force: bool = False) -> Any:
        return self.dequantize().numpy(force=force)

    def tolist(self) -> Any:
        return self.dequantize().tolist()


class ReadOnlyView(ReadableTensor):
    """A view of dequantized values, such as `weight.T` or `weight[0]`. `clone()` returns a plain tensor."""

    values_read: Tensor
    dequantize = Tensor.clone

    def __new__(cls, values: Tensor) -> ReadOnlyView:
        self: ReadOnlyView = private_torch.make_wrapper(cls, values.shape, values.dtype, values.device, values.stride())
        self.values_read, self.read_values = values, lambda: values
        return self

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        return f"ReadOnlyView({self.values_read!r})"

    def __deepcopy__(self, memo: Any) -> Tensor:
        return self.clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.values_read.clone().__reduce_ex__(protocol)

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["values_read"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], meta: None, outer_size: Any, outer_stride: Any) -> ReadOnlyView:
        return ReadOnlyView(inner["values_read"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return read(func, *args, **(kwargs or {}))


def cast_to(dtype: torch.dtype) -> Callable[[Any], Tensor]:
    """A method such as `float` that returns the values as a plain tensor, as in TransformerEngine.
    A parameter stays quantized and changes its nominal dtype, because `nn.Module.float()` calls the same method."""

    def cast(self: Any) -> Tensor:
        result: Tensor = self.to(dtype) if isinstance(self, torch.nn.Parameter) else self.dequantize(dtype=dtype)
        return result

    return cast


def read(operation: Any, *args: Any, **kwargs: Any) -> Any:
    """Run an ATen operation on the values of quantized arguments; raise if the operation writes to such an argument."""
    writes, is_view, is_composite = private_torch.operator_facts(operation)
    if any(_quantized(args[index] if index < len(args) else kwargs.get(name)) for index, name in writes):
        raise UnsupportedOperationError(limits.unsupported(operation))
    if is_composite:
        return operation.decompose(*args, **kwargs)
    name = operation.__name__.partition(".")[0]
    is_like = name.startswith("new_") or name.endswith("_like")
    if is_strict() and not is_like:
        raise limits.fallback_error(("read",), f"{operation} on a quantized tensor")
    is_product = name in ("mm", "addmm", "bmm", "baddbmm")
    if is_product and torch.is_grad_enabled() and any(weight.requires_grad for weight in _quantized(args)):
        limits.warn("read", f"{operation} on a quantized tensor", "ignore this warning")
    keywords = {key: _plain(value, is_like) for key, value in kwargs.items()}
    result = operation(*_plain(args, is_like), **keywords)
    if not is_view:
        return result
    return ReadOnlyView(result) if isinstance(result, Tensor) else [ReadOnlyView(part) for part in result]


def _quantized(value: Any) -> list[ReadableTensor]:
    if isinstance(value, (list, tuple)):
        return [tensor for entry in value for tensor in _quantized(entry)]
    return [value] if isinstance(value, ReadableTensor) else []


def _plain(value: Any, is_like: bool) -> Any:
    """An argument with its values. `is_like`: the operation reads only shape, dtype and device."""
    if isinstance(value, (list, tuple)):
        return [_plain(entry, is_like) for entry in value]
    if not isinstance(value, ReadableTensor):
        return value
    return torch.empty(value.shape, dtype=value.dtype, device=value.device) if is_like else value.read_values()
