"""The lines of benchmarks/kernel_speed.py and adam.py say what was timed and whether it is right."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from benchmarks import adam, kernel_speed
from quantshard.kernels.quantize import transpose
from quantshard.optimizers import kernel_step
from tests.interpreter import kernels_on

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, of zeros in the interpreter
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def test_a_line_for_each_case(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """With whether it is right; the time of a launch is a stand-in's."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(kernel_speed, "milliseconds", lambda call, repeats, device: [2.0] * repeats)
    monkeypatch.setattr(kernel_speed, "DEVICE", DEVICE)
    real = transpose.by_columns
    monkeypatch.setattr(transpose, "by_columns", lambda matrices: [(out ^ 1, scales) for out, scales in real(matrices)])
    monkeypatch.setattr(
        "sys.argv", ["kernel_speed.py", "--rows", "3", "--cols", "34", "--repeats", "2", "--only", "of "]
    )
    kernel_speed.main()
    found = [line.split(" | ") for line in capsys.readouterr().out.splitlines() if line.startswith("| ")][1:]
    told = {line[0].lstrip("| "): line[-1] for line in found}
    several = ("error of ", "values and amaxes of ")
    errors = [told.pop(name) for name in list(told) if name.startswith(several)]
    assert told == {
        "transpose of bytes": "False |", "sum of gradients": "True |", "counts and amax of values": "True |",
        "experts' rows of tokens": "True |", "codes of experts, current": "True |",
        "codes of experts, delayed": "True |",
    }  # fmt: skip
    assert len(errors) > 5 and set(errors) == {"True |"}


def test_wrong_bits_of_optimizers_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adam, "SMALL", [(2, 5)])
    monkeypatch.setattr(kernel_step.KernelStep, "update", lambda self, skip: [])
    with kernels_on(DEVICE):
        assert not adam.ours("current", [(2, 5)], DEVICE).is_right
