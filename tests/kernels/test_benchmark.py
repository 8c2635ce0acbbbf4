"""What benchmarks/kernels.py times is right, on a small matrix whose shape divides by nothing."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from benchmarks import kernels

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, of zeros in the interpreter
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.slow
def test_each_case_has_the_oracles_bits() -> None:
    x = torch.randn(35, 50, generator=torch.Generator().manual_seed(0)).bfloat16().to(DEVICE)
    names = []
    for make in kernels.cases(x):
        case = make()
        assert case.is_right(case.call()) and case.moved > 0, case.name
        names.append(case.name)
    assert len(set(names)) == len(names) >= 20


def test_wrong_bits_are_told() -> None:
    x = torch.randn(5, 6).bfloat16().to(DEVICE)
    case = kernels.turn(x)
    assert not case.is_right(case.call() ^ 1)
