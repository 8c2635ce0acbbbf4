"""Kernels in tests: for which tensors, and in Triton's interpreter, faster than Triton has it."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from quantshard import kernel_dispatch

_is_prepared = False


@contextmanager
def prepared_once() -> Iterator[None]:
    """Patch Triton's interpreter, which repeats most of its work.

    It patches `triton.language` in each call of a kernel or device function, checks integers for overflow, computes
    types and shapes again for each operation, and calls the function of a reduction for each element.
    """
    global _is_prepared
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    if torch.cuda.is_available() or _is_prepared:
        yield
        return
    builder, patch_language = interpreter.interpreter_builder, interpreter._patch_lang
    assert not builder.options.debug
    patched, never_restored = dict[int, Any](), SimpleNamespace(restore=lambda: None)

    def patch_once(function: Any) -> Any:
        key = id(function.__globals__)
        if key not in patched:
            patched[key] = patch_language(function)
        return never_restored

    def patch_builtin(owner: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        function, semantic = inspect.unwrap(member), interpreter.interpreter_semantic

        def call(*args: Any, **kwargs: Any) -> Any:
            kwargs["_semantic"] = semantic
            return function(*args, **kwargs)

        scope.set_attr(owner, name, call)

    def call(self, *args, **kwargs):
        patch_once(self.fn)
        return self.rewrite()(*args, **kwargs)

    def run(self: Any, *args: Any, **kwargs: Any) -> None:
        with np.errstate(all="ignore"):
            run_grid(self, *args, **kwargs)

    run_grid = interpreter.GridExecutor.__call__
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter.GridExecutor, "__call__", run)
        patch.setattr(interpreter, "_patch_lang", patch_once)
        patch.setattr(interpreter, "_patch_attr", patch_builtin)
        patch.setattr(interpreter.InterpretedFunction, "__call__", call)
        patch.setattr(builder, "options", replace(builder.options, sanitize_overflow=False))
        patch.setattr(interpreter.ReduceOps, "generic_reduce", _by_slices(interpreter.ReduceOps.generic_reduce))
        for name, place in (("create_masked_load", 1), ("create_masked_store", 2)):
            patch.setattr(interpreter.InterpreterBuilder, name, _masked(interpreter.InterpreterBuilder, name, place))
        for owner, name, function in _found_once(interpreter):
            patch.setattr(owner, name, function)
        _is_prepared = True
        try:
            yield
        finally:
            _is_prepared = False
            for scope in reversed(patched.values()):
                scope.restore()


def _masked(builder: Any, name: str, place: int) -> Callable[..., Any]:
    """Return the method of Triton's builder with a check that its mask is of booleans.

    Triton 3.9 requires booleans, and earlier versions do not.
    """
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
    """Cache what Triton computes of types and shapes: (owner, name, replacement)."""
    core, semantic = interpreter.tl.core, type(interpreter.interpreter_semantic)
    numpy_of, unwrap = cache(interpreter._get_np_dtype), core._unwrap_if_constexpr
    make_block_type, operands = core.block_type.__init__, semantic.binary_op_type_checking_impl
    broadcast_blocks = semantic.broadcast_impl_value
    block_types: dict[Any, dict[str, Any]] = {}
    constants: dict[Any, tuple[Any, ...]] = {}
    types = {core.dtype, core.block_type, core.pointer_type}
    plain_types = {int, float, bool, str, type(None), core.tensor, *types}

    @cache
    def sizes(*shape: int) -> tuple[Any, Any]:
        return core.tuple([core.constexpr(size) for size in shape]), core.constexpr(math.prod(shape))

    def tensor(self, handle, type):
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = sizes(*type.shape.values) if type.is_block() else sizes()

    def numpy_type(dtype):
        return numpy_of(core.uint64 if dtype.scalar.is_ptr() else dtype.scalar)

    def plain(value):
        kind = type(value)
        if kind in plain_types:
            return value
        return value.value if kind is core.constexpr else unwrap(value)

    def equal(self, other):
        if self is other:
            return True
        other = plain(other)
        return type(other) in types and self.name == other.name

    def block_type(self, element_ty, shape):
        key = element_ty.name, *map(plain, shape.values if type(shape) is core.tuple else shape)
        if key not in block_types:
            make_block_type(self, element_ty, shape)
            block_types[key] = vars(self)
        vars(self).update(block_types[key])

    def splat(scalar, shape):
        data = np.full(tuple(shape.values), scalar.handle.data, dtype=numpy_type(scalar.dtype))
        return core.tensor(interpreter.TensorHandle(data, scalar.dtype), core.block_type(scalar.dtype, shape))

    def broadcast(self, lhs, rhs):
        if lhs.type.is_block() and not rhs.type.is_block():
            return lhs, splat(rhs, lhs.type.shape)
        if rhs.type.is_block() and not lhs.type.is_block():
            return splat(lhs, rhs.type.shape), rhs
        return broadcast_blocks(self, lhs, rhs)

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
        (core.dtype, "__eq__", equal),
        (semantic, "broadcast_impl_value", broadcast),
        (semantic, "binary_op_type_checking_impl", of_one_type),
        (interpreter.TensorHandle, "__post_init__", lambda self: None),
    ]


@contextmanager
def kernels_on(*devices: str) -> Iterator[None]:
    """Tensors on devices of these types go to kernels, and no others."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernel_dispatch, "KERNEL_DEVICES", set(devices))
        yield
