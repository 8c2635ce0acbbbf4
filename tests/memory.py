"""What kernels read and write in Triton's interpreter, compared with the memory that tensors have, as NVIDIA's
compute-sanitizer does on a GPU: a kernel that reads past the end of a tensor mostly finds something there, and a GPU
says nothing either where another tensor follows.
"""

from __future__ import annotations

import gc
from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Final

import numpy as np
import pytest
import torch

POINTERS: Final = {"create_masked_load": 0, "create_masked_store": 0, "create_atomic_rmw": 1, "create_atomic_cas": 0}
MASKS: Final = {"create_masked_load": 1, "create_masked_store": 2, "create_atomic_rmw": 3}
"""Of the methods of the interpreter that touch memory, which argument is what; loads without a mask call one with."""


class TensorMemory:
    """The first and one past the last address of each tensor's storage, and how many accesses were compared."""

    def __init__(self) -> None:
        self.accesses = 0
        self._before = _ranges()
        self.forget()

    def forget(self) -> None:
        """Before a launch, since tensors come and go."""
        self.starts: list[int] = []
        self.ends: list[int] = []

    def look(self) -> None:
        """Find all tensors that Python holds now. Those of before may be gone, and others lie where they were: what
        overlaps is one."""
        for start, end in sorted((self._before | _ranges()).items()):
            if self.ends and start < self.ends[-1]:
                self.ends[-1] = max(self.ends[-1], end)
            else:
                self.starts.append(start)
                self.ends.append(end)

    def outside(self, addresses: np.ndarray[Any, Any], size: int) -> str:
        """Of elements of `size` bytes: what lies in no tensor, in words; "" if all do."""
        self.accesses += 1
        if not self.starts:
            self.look()
        if not self.starts:
            return "there are no tensors"
        first, last = int(addresses.min()), int(addresses.max())
        place = bisect_right(self.starts, first) - 1
        if place >= 0 and last + size <= self.ends[place]:
            return ""
        places = np.searchsorted(np.array(self.starts, dtype=np.uint64), addresses, side="right").astype(np.int64) - 1
        ends = np.array(self.ends, dtype=np.uint64)[np.maximum(places, 0)]
        bad = addresses[(places < 0) | (addresses + np.uint64(size) > ends)]
        if bad.size == 0:
            return ""
        place = bisect_right(self.starts, int(bad[0])) - 1
        past = f"{int(bad[0]) + size - self.ends[place]} bytes past the end of a tensor" if place >= 0 else "before all"
        return f"{bad.size} of {addresses.size} elements of {size} bytes are in no tensor, the first {past}"


def _ranges() -> dict[int, int]:
    """Of the tensors that the garbage collector knows: the first address, and one past the last."""
    found: dict[int, int] = {}
    for each in gc.get_objects():
        if type(each) not in (torch.Tensor, torch.nn.Parameter) or each.device.type != "cpu":
            continue
        with suppress(RuntimeError, NotImplementedError):  # not every tensor has a storage
            storage = each.untyped_storage()
            found[storage.data_ptr()] = storage.data_ptr() + storage.nbytes()
    return found


@contextmanager
def memory_checked() -> Iterator[TensorMemory]:
    """Inside, a kernel that reads or writes outside of the tensors that there are raises an AssertionError, which the
    interpreter wraps. With a GPU nothing is compared."""
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    memory, builder = TensorMemory(), interpreter.InterpreterBuilder
    if torch.cuda.is_available():
        yield memory
        return

    def checked(name: str, access: Callable[..., Any]) -> Callable[..., Any]:
        def touch(self: Any, *arguments: Any, **options: Any) -> Any:
            pointers = arguments[POINTERS[name]]
            addresses = np.asarray(pointers.data).astype(np.uint64)
            if name in MASKS:
                mask = arguments[MASKS[name]]
                mask = mask if isinstance(mask, np.ndarray) else mask.data
                addresses = addresses[np.broadcast_to(mask, addresses.shape).astype(bool)]
            size = np.dtype(interpreter._get_np_dtype(pointers.get_element_ty())).itemsize
            outside = memory.outside(addresses.reshape(-1), size) if addresses.size else ""
            assert not outside, f"{name}: {outside}"
            return access(self, *arguments, **options)

        return touch

    launch = interpreter.GridExecutor.__call__

    def launched(self: Any, *arguments: Any, **options: Any) -> Any:
        memory.forget()
        return launch(self, *arguments, **options)

    gc.collect()
    gc.freeze()  # else each look would go through all that other tests have left; to thaw it would slow all later tests
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter.GridExecutor, "__call__", launched)
        for name in POINTERS:
            patch.setattr(builder, name, checked(name, getattr(builder, name)))
        yield memory
