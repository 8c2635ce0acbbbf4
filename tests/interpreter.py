"""Kernels in tests: for which tensors, and in Triton's interpreter, faster than Triton has it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch

from quantshard import compute


@contextmanager
def prepared_once() -> Iterator[None]:
    """The interpreter prepares Triton's module anew for each call of a device function, which takes longer than the
    function. The call of a kernel prepares it; a device function finds it so, but for a part that stays as it is."""
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    if torch.cuda.is_available():
        yield
        return
    prepared = set()

    def call(self, *args, **kwargs):
        if "core" in self.fn.__globals__ and self.fn not in prepared:
            prepared.add(self.fn)
            interpreter._patch_lang(self.fn)
        return self.rewrite()(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch, np.errstate(all="ignore"):
        patch.setattr(interpreter.InterpretedFunction, "__call__", call)
        yield


@contextmanager
def kernels_on(*devices: str) -> Iterator[None]:
    """Tensors on devices of these types go to kernels, and no others."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compute, "KERNEL_DEVICES", set(devices))
        yield
