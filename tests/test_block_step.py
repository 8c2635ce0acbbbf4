"""The benchmark of whole blocks, small and on the CPU: its variants compute the same, and a wrong one is told."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
import torch

from benchmarks import block_step as bench
from benchmarks.block_step import Shape, Subject, Variant

pytestmark = pytest.mark.filterwarnings("ignore")  # torchao's and Dynamo's
SMALL = Shape(layers=2, hidden=64, ffn=96, heads=4, kv_heads=2, batch=2, tokens=24, device="cpu")
FLAGS = [f"--{name}={value}" for name, value in vars(SMALL).items() if name != "kv_heads"]
FLAGS += ["--kv-heads=2", "--repeats=3", "--compiler=aot_eager"]


def run(*flags: str) -> int:
    return bench.main([*FLAGS, *flags])


def test_ours_compute_what_a_plain_model_does(tmp_path, capsys) -> None:
    file = tmp_path / "results.json"
    assert run("--only=bf16-eager,ours-*", f"--json={file}", "--same-attention=none") == 0
    (found,) = json.loads(file.read_text())["tables"].values()
    names = ["bf16-eager", *(f"ours-{recipe}" for recipe in bench.RECIPES)]
    assert list(found) == names
    assert all(len(each["ms"]) == 4 and each["right"] for each in found.values())  # turns of two steps
    assert 0 < found["ours-bf16"]["errors"]["dw"] < 0.02 < found["ours-current"]["errors"]["dw"]
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    assert [line.split(" | ")[0].removeprefix("| ") for line in lines] == ["variant", *names]


def test_the_second_table_has_one_attention(tmp_path) -> None:
    file = tmp_path / "results.json"
    assert run("--only=bf16-eager,ours-bf16", "--same-attention=flash", f"--json={file}") == 0
    tables = json.loads(file.read_text())["tables"]
    assert [(title, list(found)) for title, found in tables.items()] == [
        (title, ["bf16-eager", "ours-bf16"]) for title in ("as shipped", "flash")
    ]


@pytest.mark.slow
def test_peers_and_compiled_variants_run(capsys) -> None:
    """torchao under emulation."""
    pytest.importorskip("torchao")
    only = "bf16-compiled,torchao-*,ours-delayed*"
    assert run(f"--only={only}", "--compile-ours", "--same-attention=none") == 0
    out = capsys.readouterr().out
    assert "speed / bf16-compiled | speed / torchao-tensorwise" in out
    for name in ("bf16-compiled", "torchao-tensorwise", "torchao-rowwise", "ours-delayed", "ours-delayed-compiled"):
        assert f"| {name} | " in out


def test_without_torchao_its_variants_are_skipped(monkeypatch, capsys) -> None:
    def absent(*_: object) -> None:
        raise ImportError("no torchao")

    monkeypatch.setattr(bench, "to_float8", absent)
    assert run("--only=torchao-tensorwise,bf16-eager", "--same-attention=none") == 0
    out = capsys.readouterr().out
    assert "torchao-tensorwise: skipped, no torchao" in out and "| torchao" not in out


@pytest.mark.parametrize("lost", ["weights", "gradient", "rotation"])
def test_wrong_numbers_are_told(lost: str, monkeypatch, capsys) -> None:
    if lost == "weights":
        monkeypatch.setitem(bench.PARTS, "self_attention.layernorm_qkv.weight", ("q", "v", "k"))
    elif lost == "gradient":
        real: Callable[..., torch.Tensor] = bench.gradient
        monkeypatch.setattr(bench, "gradient", lambda model, *a: real(model, *a) * (1 - isinstance(model, bench.Ours)))
    else:
        monkeypatch.setattr(bench, "rotated", lambda t, cos, sin: t)
    assert run("--only=ours-bf16", "--same-attention=none") == 1
    assert "WRONG" in capsys.readouterr().out


def test_nan_is_wrong() -> None:
    reference = {"y": torch.ones(2), "dx": torch.ones(2), "w": torch.ones(2), "v": torch.ones(2)}
    found = bench.errors(reference | {"w": torch.full((2,), torch.nan)}, reference)
    assert found["y"] == 0 and not found["dw"] <= 1


def test_the_profile_names_what_takes_the_time(capsys) -> None:
    assert run("--profile=ours-current") == 0
    out = capsys.readouterr().out
    assert "ours-current: " in out and "aten::" in out and len(out.splitlines()) < 40


def test_memory_and_time_are_of_every_step() -> None:
    subject = Subject(Variant("ours", "bf16", False), SMALL, None, "eager")
    assert subject.x.grad is None and all(p.grad is None for p in subject.model.parameters())
    found = bench.turn(subject, 3)
    assert len(found["ms"]) == len(found["host ms"]) == 3 and found["added"] == [0.0]
    assert subject.x.grad is None and all(p.grad is None for p in subject.model.parameters())
