"""What benchmarks/kernels.py and adam.py time is right, on small matrices whose shapes divide by nothing."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from benchmarks import adam, kernels
from quantshard.optimizers import kernel_step
from tests.interpreter import kernels_on

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
    case = kernels.transpose_case(x)
    assert not case.is_right(case.call() ^ 1)


def test_steps_of_optimizers(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Ours with the oracle's bits; the bytes of a step; one that cannot be imported is passed over by name."""
    monkeypatch.setattr(adam, "SMALL", [(3, 34)])
    monkeypatch.setattr(adam, "AdamWFp8", None)
    monkeypatch.setattr(adam, "AdamW8bit", None)
    with kernels_on(DEVICE):
        found = adam.measure([(3, 34), (2, 128)], DEVICE, 1, "ours mxfp8")
    found |= adam.measure([(3, 34), (2, 128)], DEVICE, 2, "torch")
    fp32, fp8, torch_adamw = found.values()
    assert fp32["right"] and fp8["right"] and torch_adamw["right"] is None
    scales = 2 + 4  # of 32x32 blocks
    assert fp32["bytes"] == 358 * (2 + 8 + 16 + 1) + scales and torch_adamw["bytes"] == 358 * (4 + 8 + 16) + 2 * 2 * 4
    assert fp8["bytes"] == 358 * (2 + 8 + 4 + 1) + scales + 2 * 2 * 4 * (3 + 2)
    assert [len(case["ms"]) for case in (fp32, torch_adamw)] == [1, 2]
    assert "| torchao AdamWFp8, bf16 | cannot be imported |" in capsys.readouterr().out


def test_wrong_bits_of_optimizers_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adam, "SMALL", [(2, 5)])
    monkeypatch.setattr(kernel_step.KernelStep, "update", lambda self, skip: [])
    with kernels_on(DEVICE):
        assert not adam.ours("current", [(2, 5)], DEVICE).is_right
