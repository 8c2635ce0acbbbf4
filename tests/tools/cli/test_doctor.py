"""`quantshard doctor`: what it reports of a CPU, that it tells wrong kernels, and that no error ends it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

from benchmarks import hardware
from quantshard import kernels, private_torch
from quantshard.formats import FORMATS
from quantshard.gemm import hardware as gemm_hardware
from quantshard.tools import cli
from quantshard.tools.doctor import cases, checks, gemms, probes, products, quantize
from quantshard.tools.doctor.results import UnavailableError, first_line, outcome_of
from tests.gemm.test_backend import BLACKWELL, HOPPER, stand_in

DOCS = Path(__file__).parents[3] / "docs"
CPU = torch.device("cpu")
EVERY = checks.kernel_checks


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.fixture
def few(monkeypatch):
    """Three of the checks, run by the interpreter."""
    pytest.importorskip("triton")
    if not kernels.INTERPRETED:
        pytest.skip("kernels do not run on this CPU")
    names = ("amax fp8_e4m3", "dequantize fp8_e4m3", "transpose of bytes")
    monkeypatch.setattr(checks, "kernel_checks", lambda: [check for check in EVERY() if check.name in names])


def doctor(monkeypatch, capsys, *arguments):
    """Exit code, standard output, and lines of standard error."""
    monkeypatch.setattr("sys.argv", ["quantshard", "doctor", *map(str, arguments)])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    out, err = capsys.readouterr()
    return caught.value.code, out, err.splitlines()


def states(report):
    return {check["name"]: (check["state"], check["reason"]) for check in report["checks"]}


def test_a_cpu_without_kernels(monkeypatch, capsys):
    monkeypatch.setattr(kernels, "INTERPRETED", False)
    code, out, _ = doctor(monkeypatch, capsys, "--json", "--quick")
    report = json.loads(out)
    assert code == 0 and report["ok"] and report["version"] == 1 and report["probes"] is None
    assert report["device"]["type"] == "cpu" and report["kernels"]["run"] == "no"
    assert {check["state"] for check in report["checks"]} == {"not here"}
    assert "do not run on a CPU" in states(report)["quantize fp8_e4m3"][1]
    assert "compute capability 10.0" in states(report)["native GEMM nvfp4_1x16 by nvfp4_16x16"][1]
    assert len(report["checks"]) == len(states(report)) > 100
    assert {row["gemm"] for row in report["formats"]} == {"emulated"} and report["recipes"]["bf16"] == "native"
    _, out, _ = doctor(monkeypatch, capsys, "--quick")
    assert f"{len(report['checks'])} not here; nothing was tested, since there is no GPU here" in " ".join(out.split())
    page = (DOCS / "doctor.md").read_text(encoding="utf-8")
    keys = [*report, *report["device"], *report["collectives"], *report["kernels"], *report["formats"][0]]
    assert [key for key in (*keys, *report["checks"][0]) if f"`{key}`" not in page] == []


def test_a_report_in_a_file_beside_tables(monkeypatch, capsys, tmp_path, few):
    code, out, _ = doctor(monkeypatch, capsys, "--json", tmp_path / "report.json", "--quick")
    report = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))
    assert code == 0 and report["ok"] and report["kernels"]["run"] == "interpreted"
    assert [state for state, _ in states(report).values()][:3] == ["ok"] * 3
    assert "self-test: 3 ok, 0 WRONG, 16 not here" in out and "this machine" in out


def test_a_report_replaces_none_but_a_report(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(kernels, "INTERPRETED", False)
    (tmp_path / "data.json").write_text('{"text": "of mine"}')
    code, out, err = doctor(monkeypatch, capsys, "--json", tmp_path / "data.json", "--quick")
    wanted = f"quantshard: {tmp_path}/data.json exists and is no report of doctor; name another place with --json"
    assert (code, out, err) == (1, "", [wanted])
    assert (tmp_path / "data.json").read_text() == '{"text": "of mine"}'
    for _ in range(2):
        assert doctor(monkeypatch, capsys, "--json", tmp_path / "report.json", "--quick")[0] == 0


def test_a_log_says_at_once_what_runs_and_how_long_it_took(monkeypatch, capsys, few):
    """Also of what never ends."""
    first = quantize.amax.block_amax
    seen = []

    def watched(*arguments):
        seen.append(capsys.readouterr().err)
        return first(*arguments)

    monkeypatch.setattr(quantize.amax, "block_amax", watched)
    _, _, lines = doctor(monkeypatch, capsys, "--json", "--quick")
    assert re.fullmatch(r"1 of 19, \d+ s: amax fp8_e4m3 \.\.\. ", seen[0])
    assert re.fullmatch(r"ok, \d+\.\d s", lines[0])
    assert re.fullmatch(r"2 of 19, \d+ s: dequantize fp8_e4m3 \.\.\. ok, \d+\.\d s", lines[1])
    assert len(lines) == 19 and "native GEMM" in lines[-1] and "not here" in lines[-1]


def test_wrong_bits_are_told(monkeypatch, capsys, few):
    right = quantize.transpose.transpose
    monkeypatch.setattr(quantize.transpose, "transpose", lambda codes: right(codes) ^ (codes.shape[1] == 64))
    code, out, _ = doctor(monkeypatch, capsys, "--json", "--quick")
    report = json.loads(out)
    assert code == 1 and not report["ok"]
    assert states(report)["transpose of bytes"] == ("WRONG", "other bits than the oracle's, of shape 16 x 64")
    assert states(report)["amax fp8_e4m3"] == ("ok", "")
    code, out, _ = doctor(monkeypatch, capsys, "--quick")
    assert code == 1 and "self-test: 2 ok, 1 WRONG, 16 not here" in out


def test_an_error_is_told_and_the_rest_goes_on(monkeypatch, capsys, few):
    def broken(*_, **__):
        raise RuntimeError("no such instruction in /home/someone/kernel.ptx\nof which the second line is long")

    monkeypatch.setattr(quantize.amax, "block_amax", broken)
    code, out, _ = doctor(monkeypatch, capsys, "--json", "--quick")
    assert code == 1
    assert states(json.loads(out)) | {} == {
        **states(json.loads(out)),
        "amax fp8_e4m3": ("WRONG", "RuntimeError: no such instruction in <path>"),
        "dequantize fp8_e4m3": ("ok", ""),
        "transpose of bytes": ("ok", ""),
    }
    assert "someone" not in out


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("", "ValueError: "),
        ("a/b of 1x128/2 TFLOP/s", "ValueError: a/b of 1x128/2 TFLOP/s"),
        ("'/tmp/x y' and ~/me, C:\\Users\\me", "ValueError: '<path> y' and <path>, <path>"),
        ("at 12:8:\n  x = tl.load(y)\n  ^\nno such type", "ValueError: at 12:8: ... no such type"),
    ],
)
def test_errors_are_one_line_without_paths(text, line):
    assert first_line(ValueError(text)) == line


def test_what_is_not_here_is_not_wrong():
    def absent():
        raise UnavailableError("too old")

    def full():
        raise torch.cuda.OutOfMemoryError("tried to allocate")

    assert outcome_of("x", full).state == "not here"
    assert outcome_of("x", absent).state == "not here" and outcome_of("x", lambda: "off").state == "WRONG"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [(["report.json"], "with --json report.json"), (["--dir", "none"], "there is no folder none"),
     (["--json", "none/report.json", "--quick"], "cannot write none/report.json")],
)  # fmt: skip
def test_refused_in_one_line(monkeypatch, capsys, tmp_path, arguments, says):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(checks, "kernel_checks", list)
    code, _, lines = doctor(monkeypatch, capsys, *arguments)
    assert code == 1 and says in lines[-1] and lines[-1].startswith("quantshard: ")


def test_probes(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(checks, "kernel_checks", list)
    monkeypatch.setattr(kernels, "INTERPRETED", False)
    for name, value in (
        ("ON_CPU", probes.ProbeSizes(16, 64, 128)),
        ("SECONDS", 0.01),
        ("FILE", 3 << 12),
        ("PIECE", 1 << 12),
    ):
        monkeypatch.setattr(probes, name, value)
    code, out, _ = doctor(monkeypatch, capsys, "--json", "--dir", tmp_path)
    measured = {probe["name"]: probe for probe in json.loads(out)["probes"]}
    assert code == 0 and list(tmp_path.iterdir()) == [] and str(tmp_path) not in out
    for name, unit in (
        ("copy", "GB/s"), ("quantize, mxfp8 weight", "GB/s"), ("GEMM BF16", "TFLOP/s"), ("disk read", "GB/s"),
        ("disk write", "GB/s"),
    ):  # fmt: skip
        assert measured[name]["value"] > 0 and measured[name]["unit"] == unit and measured[name]["state"] == "ok"
    assert measured["GEMM FP8 1x128 by 1x128"]["state"] == "not here"
    bf16 = products.KINDS["BF16"]
    off = {"BF16": lambda *a: bf16(*a)._replace(expected=bf16(*a).expected * 1.1)}
    monkeypatch.setattr(products, "KINDS", off)
    code, out, _ = doctor(monkeypatch, capsys, "--dir", tmp_path)
    assert code == 1 and "another product" in out


@pytest.mark.parametrize("capability", [HOPPER, BLACKWELL])
def test_native_products(monkeypatch, capability):
    """By the stand-in of tests/gemm/test_backend.py, right and with one row in sixty wrong by a tenth."""
    monkeypatch.setattr(gemm_hardware, "capability_of", lambda device: capability)
    monkeypatch.setattr(private_torch, "scaled_mm", stand_in)
    on = [(left, right) for left, right, native in gemms.pairs() if native.is_of(capability)]
    assert len(on) == (8 if capability == HOPPER else 11)
    for left, right in on:
        assert gemms.is_right_product((37, 60, 72), CPU, left, right), (left.name, right.name)

    def wrong(*arguments, **options):
        out = stand_in(*arguments, **options)
        out[7] *= 1.1
        return out

    monkeypatch.setattr(private_torch, "scaled_mm", wrong)
    assert not gemms.is_right_product((37, 60, 72), CPU, *on[0])


# The table of docs/hardware.md

REPORT = {
    "version": 1, "date": "2026-11-21", "torch": "2.11.0", "triton": "3.6.0",
    "device": {"type": "cuda", "name": "NVIDIA H200", "count": 2, "capability": [9, 0]},
    "recipes": {"current": "native", "mxfp8": "emulated", "bf16": "native"},
    "checks": [
        {"name": "a", "state": "ok"}, {"name": "b", "state": "not here"}, {"name": "c", "state": "WRONG"},
    ],
    "probes": [
        {"name": "copy", "value": 4240.1, "unit": "GB/s"}, {"name": "GEMM BF16", "value": 712.34, "unit": "TFLOP/s"},
        {"name": "GEMM FP8 by rows", "value": None, "unit": "TFLOP/s"},
    ],
}  # fmt: skip


def test_hardware_table():
    lines = hardware.table([REPORT]).splitlines()
    assert lines[2] == (
        "| 2 x NVIDIA H200 (9.0) | torch 2.11.0, Triton 3.6.0, 2026-11-21 | current | mxfp8 | 1 of 2 right; WRONG: c | "
        "4.24e+03 GB/s | 712 TFLOP/s | - |"
    )
    rest = "\n".join(lines[3:])
    assert (
        "H200" not in rest
        and "| NVIDIA H100 (9.0) | not run | delayed, current, block, rowwise | mxfp8, nvfp4 |" in rest
    )
    assert "run on no hardware: mxfp8, nvfp4 | block, rowwise | not run" in rest and "| CPU | not run |" in rest
    cpu = {**REPORT, "device": {"type": "cpu", "name": "A100 of no GPU"}, "probes": None}
    assert "| CPU |" not in hardware.table([cpu]) and "NVIDIA A100 (8.0) | not run" in hardware.table([cpu])


def test_the_page_has_the_table_of_the_reports():
    text = hardware.PAGE.read_text(encoding="utf-8")
    assert hardware.written(text, hardware.table(hardware.reports())) == text, "run: python benchmarks/hardware.py"


def test_the_table_is_put_between_the_marks():
    text = f"a\n{hardware.BEGIN}\nold\n{hardware.END}\nb\n"
    assert hardware.written(text, "| new |") == f"a\n{hardware.BEGIN}\n\n| new |\n\n{hardware.END}\nb\n"


def test_names_of_recipes_and_formats():
    assert cases.recipe_names() == ["delayed", "current", "block", "rowwise", "mxfp8", "nvfp4", "bf16"]
    listed = " ".join(check.name for check in (*EVERY(), *checks.product_checks()))
    assert all(name in listed for name in FORMATS)
