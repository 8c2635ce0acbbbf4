"""Fixtures that run kernels on the CPU and record launches; without Triton, these tests are skipped."""

from math import prod
from typing import Any

import pytest
import torch

from quantshard import kernel_dispatch


@pytest.fixture(autouse=True, scope="session")
def _needs_triton() -> None:
    pytest.importorskip("triton")


@pytest.fixture
def kernels_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU kernels run on the CPU, interpreted."""
    if not torch.cuda.is_available():
        monkeypatch.setattr(kernel_dispatch, "KERNEL_DEVICES", {"cpu"})


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Name and programs of each kernel that is launched; by Triton itself, since that tells of each."""
    jit = pytest.importorskip("triton.runtime.jit")
    from quantshard.kernels import launch

    found: list[tuple[str, int]] = []
    real = jit.KernelInterface.__getitem__

    def launched(kernel: Any, grid: tuple[int, ...]) -> Any:
        found.append((kernel.fn.__name__, prod(grid)))
        return real(kernel, grid)

    monkeypatch.setattr(jit.KernelInterface, "__getitem__", launched)
    monkeypatch.setattr(launch, "KNOWN_TRITON", False)
    monkeypatch.setattr(launch, "_VARIANTS", {})
    return found
