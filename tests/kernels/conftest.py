"""Triton's interpreter, faster."""

import pytest
import torch

from quantshard import kernel_dispatch
from tests.interpreter import prepared_once


@pytest.fixture(autouse=True, scope="session")
def _prepare_once():
    with prepared_once():
        yield


@pytest.fixture
def kernels_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU kernels run on the CPU, interpreted."""
    if not torch.cuda.is_available():
        monkeypatch.setattr(kernel_dispatch, "KERNEL_DEVICES", {"cpu"})
