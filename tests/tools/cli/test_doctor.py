"""`quantshard doctor`: what it reports of a CPU, that it detects faults, and that no error ends it."""

from __future__ import annotations

import json

import pytest
import torch

from benchmarks import hardware
from quantshard import kernel_dispatch, kernels
from quantshard.gemm import backend, predictions
from quantshard.recipe import resolve
from quantshard.tools import cli
from quantshard.tools.cli import doctor
from tests.interpreter import prepared_once
from tests.pages import section

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of NumPy, in the interpreter
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.fixture
def interpreted():
    pytest.importorskip("triton")
    if not kernels.INTERPRETED:
        pytest.skip("kernels do not run on this CPU")
    with prepared_once():
        yield


def run(monkeypatch, capsys, *arguments):
    """Exit code and standard output."""
    monkeypatch.setattr("sys.argv", ["quantshard", "doctor", *arguments])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    return caught.value.code, capsys.readouterr().out


def only(monkeypatch, *recipes):
    monkeypatch.setattr(doctor, "recipe_names", lambda: list(recipes))


def states(report):
    return {check["name"]: (check["state"], check["reason"]) for check in report["checks"]}


def test_a_cpu_without_kernels(monkeypatch, capsys):
    monkeypatch.setattr(kernels, "INTERPRETED", False)
    code, out = run(monkeypatch, capsys, "--json")
    report = json.loads(out)
    assert code == 0 and report["ok"] and report["device"]["type"] == "cpu" and report["kernels"]["run"] == "no"
    assert (
        states(report)["current: quantize"] == states(report)["bf16: optimizer step"] == ("not here", "needs kernels")
    )
    for name in doctor.recipe_names():
        assert states(report).get(f"{name}: GEMMs") == (
            ("ok", "") if predictions.quantized_gemms(resolve(name)) else None
        )
    assert report["recipes"]["nvfp4"] == "emulated" and "E2M1" in report["reasons"]["nvfp4"]
    chapter = section("docs/command-line.md#quantshard-doctor")
    keys = [*report, *report["device"], *report["collectives"], *report["kernels"], *report["checks"][0]]
    assert [key for key in keys if f"`{key}`" not in chapter] == []


def test_tables(monkeypatch, capsys, interpreted):
    only(monkeypatch, "delayed", "nvfp4", "bf16")
    code, out = run(monkeypatch, capsys)
    assert code == 0 and "this machine" in out and "self-test: 7 ok, 0 WRONG, 0 not here" in out


def test_wrong_codes(monkeypatch, capsys, interpreted):
    only(monkeypatch, "current")
    right = doctor.operands.quantize_operand

    def wrong(*arguments, **options):
        storage = right(*arguments, **options)
        if kernel_dispatch.KERNEL_DEVICES:
            storage.components["codes"][-1, -1] ^= 1
        return storage

    monkeypatch.setattr(doctor.operands, "quantize_operand", wrong)
    code, out = run(monkeypatch, capsys, "--json")
    assert code == 1 and not json.loads(out)["ok"]
    assert states(json.loads(out)) == {
        "current: quantize": ("WRONG", "differs from the oracle"),
        "current: GEMMs": ("ok", ""),
        "current: optimizer step": ("ok", ""),
    }


def test_wrong_products_and_steps(monkeypatch, capsys, interpreted):
    only(monkeypatch, "block")
    multiply, step = backend.matmul, doctor.FusedAdam.step

    def wrong_step(optimizer):
        step(optimizer)
        if kernel_dispatch.KERNEL_DEVICES:
            next(iter(optimizer.state.values()))["exp_avg"].mul_(1.001)

    monkeypatch.setattr(backend, "matmul", lambda *a, **options: multiply(*a, **options) * 1.1)
    monkeypatch.setattr(doctor.FusedAdam, "step", wrong_step)
    code, out = run(monkeypatch, capsys, "--json")
    assert code == 1
    assert [state for state, _ in states(json.loads(out)).values()] == ["ok", "WRONG", "WRONG"]


def test_errors_are_named_without_paths(monkeypatch, capsys):
    def broken(*_):
        raise ValueError("/home/me")

    only(monkeypatch, "current")
    monkeypatch.setattr(doctor, "is_multiplied_right", broken)
    code, out = run(monkeypatch, capsys, "--json")
    assert code == 1 and states(json.loads(out))["current: GEMMs"] == ("WRONG", "ValueError")
    assert states(json.loads(out))["current: optimizer step"][0] in ("ok", "not here")


def test_too_little_memory_is_not_wrong(monkeypatch, capsys):
    def full(*_):
        raise torch.cuda.OutOfMemoryError("tried to allocate")

    only(monkeypatch, "current")
    monkeypatch.setattr(doctor, "is_multiplied_right", full)
    code, out = run(monkeypatch, capsys, "--json")
    assert code == 0 and states(json.loads(out))["current: GEMMs"][0] == "not here"


# The table of docs/hardware.md

REPORT = {
    "version": 1, "date": "2026-11-21", "torch": "2.11.0", "triton": "3.6.0",
    "device": {"type": "cuda", "name": "NVIDIA H200", "count": 2, "capability": [9, 0]},
    "recipes": {"current": "native", "mxfp8": "emulated", "bf16": "native"},
    "checks": [
        {"name": "a", "state": "ok"}, {"name": "b", "state": "not here"}, {"name": "c", "state": "WRONG"},
    ],
}  # fmt: skip


def test_hardware_table():
    lines = hardware.table([REPORT]).splitlines()
    assert lines[2] == (
        "| 2 x NVIDIA H200 (9.0) | torch 2.11.0, Triton 3.6.0, 2026-11-21 | current | mxfp8 | 1 of 2 right; WRONG: c |"
    )
    rest = "\n".join(lines[3:])
    assert (
        "H200" not in rest
        and "| NVIDIA H100 (9.0) | not run | delayed, current, block, rowwise | mxfp8, nvfp4 |" in rest
    )
    assert "run on no hardware: mxfp8, nvfp4 | block, rowwise | not run" in rest and "| CPU | not run |" in rest
    cpu = {**REPORT, "device": {"type": "cpu", "name": "A100 of no GPU"}}
    assert "| CPU |" not in hardware.table([cpu]) and "NVIDIA A100 (8.0) | not run" in hardware.table([cpu])


def test_the_page_has_the_table_of_the_reports():
    text = hardware.PAGE.read_text(encoding="utf-8")
    assert hardware.insert_table(text, hardware.table(hardware.reports())) == text, "run: python benchmarks/hardware.py"


def test_the_table_is_put_between_the_marks():
    text = f"a\n{hardware.BEGIN}\nold\n{hardware.END}\nb\n"
    assert hardware.insert_table(text, "| new |") == f"a\n{hardware.BEGIN}\n\n| new |\n\n{hardware.END}\nb\n"


def test_names_of_recipes():
    assert doctor.recipe_names() == [
        "delayed", "current", "block", "rowwise", "mxfp8", "nvfp4",
        "fp8-weights", "mxfp8-weights", "nvfp4-weights", "bf16",
    ]  # fmt: skip
