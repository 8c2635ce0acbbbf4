"""Triton's interpreter, faster: it prepares Triton's module anew for each call of a device function, which takes longer
than the function."""

import pytest
import torch

from quantshard import compute


@pytest.fixture(autouse=True, scope="session")
def _prepare_once():
    """The call of a kernel prepares the module; a device function finds it so, but for a part that stays as it is."""
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

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter.InterpretedFunction, "__call__", call)
        yield


@pytest.fixture
def kernels_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU kernels run on the CPU, interpreted."""
    if not torch.cuda.is_available():
        monkeypatch.setattr(compute, "KERNEL_DEVICES", {"cpu"})
