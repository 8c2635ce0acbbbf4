"""Kernels in tests: for which tensors, and in Triton's interpreter, faster than Triton has it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from quantshard import kernel_dispatch


@contextmanager
def prepared_once() -> Iterator[None]:
    """The interpreter prepares Triton's module anew for each call of a device function, which takes longer than the
    function. The call of a kernel prepares it; a device function finds it so, but for a part that stays as it is.

    Besides, of each sum and product of integers it computes whether it overflows, which it would say if `debug` were
    set, of each value it finds out anew what its type is in NumPy and what the sizes of its shape are, for each
    operation how its operands become of one type, and it calls the function of a reduction for each element.

    A mask is of booleans, which the interpreter of Triton 3.9 demands and the earlier ones do not.
    """
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    if torch.cuda.is_available():
        yield
        return
    prepared, builder = set(), interpreter.interpreter_builder
    assert not builder.options.debug

    def call(self, *args, **kwargs):
        if "core" in self.fn.__globals__ and self.fn not in prepared:
            prepared.add(self.fn)
            interpreter._patch_lang(self.fn)
        return self.rewrite()(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch, np.errstate(all="ignore"):
        patch.setattr(interpreter.InterpretedFunction, "__call__", call)
        patch.setattr(builder, "options", replace(builder.options, sanitize_overflow=False))
        patch.setattr(interpreter.ReduceOps, "generic_reduce", _by_slices(interpreter.ReduceOps.generic_reduce))
        for name, place in (("create_masked_load", 1), ("create_masked_store", 2)):
            patch.setattr(interpreter.InterpreterBuilder, name, _masked(interpreter.InterpreterBuilder, name, place))
        for owner, name, function in _found_once(interpreter):
            patch.setattr(owner, name, function)
        yield


def _masked(builder: Any, name: str, place: int) -> Callable[..., Any]:
    """The method of Triton's builder, which takes booleans alone as its mask."""
    access = getattr(builder, name)

    def checked(self: Any, *arguments: Any, **options: Any) -> Any:
        mask = arguments[place] if len(arguments) > place else options["mask"]
        found = mask.dtype if isinstance(mask, np.ndarray) else mask.data.dtype
        assert found == np.bool_, (
            f"a mask of {found}: `language.mask_where` makes one of a number's condition and a block"
        )
        return access(self, *arguments, **options)

    return checked


def _by_slices(slow: Callable[..., Any]) -> Callable[..., Any]:
    """`ReduceOps.generic_reduce` in the order of the slow one, which calls the combining function for each element.

    Here a call has a slice of each tensor.
    """

    def reduce(self: Any, inputs: tuple[Any, ...]) -> list[Any]:
        if self.axis is None or self.keep_dims:
            return slow(self, inputs)

        def tensors(arrays: Iterable[Any]) -> list[Any]:
            return [self.to_tensor(array, x.dtype) for array, x in zip(arrays, inputs, strict=True)]

        slices = [tensors(x.handle.data.take(i, self.axis) for x in inputs) for i in range(inputs[0].shape[self.axis])]
        found = slices[0]
        for more in slices[1:]:
            combined = self.combine_fn.fn(*found, *more)
            combined = combined if isinstance(combined, tuple) else (combined,)
            found = tensors(x.handle.data.reshape(of.shape) for x, of in zip(combined, found, strict=True))
        return found

    return reduce


def _found_once(interpreter: Any) -> list[tuple[Any, str, Callable[..., Any]]]:
    """What Triton computes of types and shapes, kept; what it is set on, its name, and the function."""
    core, semantic = interpreter.tl.core, type(interpreter.interpreter_semantic)
    numpy_of, unwrap = cache(interpreter._get_np_dtype), core._unwrap_if_constexpr
    make_block_type, operands = core.block_type.__init__, semantic.binary_op_type_checking_impl
    block_types: dict[Any, dict[str, Any]] = {}
    constants: dict[Any, tuple[Any, ...]] = {}

    @cache
    def sizes(*shape: int) -> tuple[Any, Any]:
        return core.tuple([core.constexpr(size) for size in shape]), core.constexpr(math.prod(shape))

    def tensor(self, handle, type):
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = sizes(*type.shape.values) if type.is_block() else sizes()

    def numpy_type(dtype):
        return numpy_of(core.uint64 if dtype.scalar.is_ptr() else dtype.scalar)

    def plain(value):
        return value if type(value) in (int, core.tensor) else unwrap(value)

    def block_type(self, element_ty, shape):
        key = element_ty.name, *map(plain, shape.values if type(shape) is core.tuple else shape)
        if key not in block_types:
            make_block_type(self, element_ty, shape)
            block_types[key] = vars(self)
        vars(self).update(block_types[key])

    def of_one_type(self, lhs, rhs, lhs_ptr=False, rhs_ptr=False, arithmetic=True, division=False):
        """Tensors of one type are returned as they are, and the block of a number is remembered."""
        if type(lhs) in (bool, int, float) and type(rhs) is core.tensor:
            return of_one_type(self, rhs, lhs, rhs_ptr, lhs_ptr, arithmetic, division)[::-1]
        flags, key = (lhs_ptr, rhs_ptr, arithmetic, division), None
        if type(lhs) is type(rhs) is core.tensor:
            is_rounded = division and lhs.dtype.name in ("fp16", "bf16")
            if lhs.type.name == rhs.type.name and not lhs.dtype.is_ptr() and not is_rounded:
                return lhs, rhs
        elif type(lhs) is core.tensor and type(rhs) in (bool, int, float):
            key = lhs.type.name, type(rhs), rhs, flags
            if key in constants:
                *handle, block = constants[key]
                return lhs, core.tensor(interpreter.TensorHandle(*handle), block)
        left, right = operands(self, lhs, rhs, *flags)
        if key is not None and left is lhs:
            constants[key] = right.handle.data, right.handle.dtype, right.type
        return left, right

    return [
        (core.tensor, "__init__", tensor),
        (interpreter, "_get_np_dtype", numpy_type),
        (core, "_unwrap_if_constexpr", plain),
        (core.block_type, "__init__", block_type),
        (semantic, "binary_op_type_checking_impl", of_one_type),
        (interpreter.TensorHandle, "__post_init__", lambda self: None),
    ]


@contextmanager
def kernels_on(*devices: str) -> Iterator[None]:
    """Tensors on devices of these types go to kernels, and no others."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernel_dispatch, "KERNEL_DEVICES", set(devices))
        yield
