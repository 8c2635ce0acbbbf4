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

_PRODUCTS = frozenset(("mm", "addmm", "bmm", "baddbmm"))


def _outside_autocast() -> bool:
    return False


is_strict: Callable[[], bool] = _outside_autocast
"""Returns whether reads raise. `modules.contexts.context` replaces it."""


class ReadableTensor(Tensor):
    """The base class of tensor subclasses without data of their own, whose values operations read."""

    # all rules are in __torch_dispatch__: __torch_function__ would slow down every operation
    __torch_function__ = private_torch.disabled_torch_function  # type: ignore[assignment]

    def read_values(self) -> Tensor:
        """Return the values as a plain tensor, without a gradient."""
        raise NotImplementedError

    def numpy(self, *, force: bool = False) -> Any:
        """The dequantized values, a copy."""
        return self.dequantize().numpy(force=force)

    def tolist(self) -> Any:
        """The dequantized values."""
        return self.dequantize().tolist()

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return read(func, *args, **(kwargs or {}))


class ReadOnlyView(ReadableTensor):
    """A view of dequantized values, such as `weight.T` or `weight[0]`. `clone()` returns a plain tensor."""

    values_read: Tensor

    def __new__(cls, values: Tensor) -> ReadOnlyView:
        self: ReadOnlyView = private_torch.make_wrapper(
            cls, values.shape, values.dtype, values.device, strides=values.stride()
        )
        self.values_read = values
        return self

    def read_values(self) -> Tensor:
        return self.values_read

    def dequantize(self) -> Tensor:
        return self.clone()

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


def read(operation: Any, *args: Any, **kwargs: Any) -> Any:
    """Run an ATen operation on the values of quantized arguments; raise if the operation writes to such an argument."""
    name, is_composite, written, is_view = private_torch.operator_facts(operation)
    if any(_holds_quantized(args[index] if index < len(args) else kwargs.get(key)) for index, key in written):
        raise UnsupportedOperationError(limits.unsupported(operation))
    if is_composite:  # arrives undecomposed in inference mode; its parts may have rules
        return operation.decompose(*args, **kwargs)
    if is_strict():
        raise limits.fallback_error(("read",), f"{operation} on a quantized tensor")
    if name in _PRODUCTS and torch.is_grad_enabled():
        limits.warn(
            "read", f"{operation} on a quantized tensor", "warnings.filterwarnings('ignore', '.*reads the dequ')"
        )
    is_like = name.startswith("new_") or name.endswith("_like")
    arguments = [_plain(value, is_like) for value in args]
    result = operation(*arguments, **{key: _plain(value, is_like) for key, value in kwargs.items()})
    if not is_view:
        return result
    return ReadOnlyView(result) if isinstance(result, Tensor) else [ReadOnlyView(part) for part in result]


def _holds_quantized(value: Any) -> bool:
    return any(isinstance(entry, ReadableTensor) for entry in (value if isinstance(value, (list, tuple)) else [value]))


def _plain(value: Any, is_like: bool) -> Any:
    """An argument with its values. `is_like`: the operation reads only shape, dtype and device."""
    if isinstance(value, (list, tuple)):
        return [_plain(entry, is_like) for entry in value]
    if not isinstance(value, ReadableTensor):
        return value
    return torch.empty(value.shape, dtype=value.dtype, device=value.device) if is_like else value.read_values()
