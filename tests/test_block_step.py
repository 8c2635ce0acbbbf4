"""The benchmarks of whole blocks and of what a device allows, small and on the CPU; what is wrong is told."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
import torch

from benchmarks import block_step as bench
from benchmarks import roofline
from benchmarks.block_step import Shape, Subject, Variant
from tests.modules.graphed import rerun

__all__ = ["rerun"]

pytestmark = pytest.mark.filterwarnings("ignore")  # torchao's and Dynamo's
SMALL = Shape(layers=2, hidden=64, ffn=96, heads=4, kv_heads=2, batch=2, tokens=24, device="cpu")
FLAGS = [f"--{name}={value}" for name, value in vars(SMALL).items() if name != "kv_heads"]
FLAGS += ["--kv-heads=2", "--repeats=3", "--compiler=aot_eager"]
SHORT = ("--layers=1", "--repeats=1")  # the last flag counts


def run(*flags: str) -> int:
    return bench.main([*FLAGS, *flags])


@pytest.mark.exhaustive
def test_ours_compute_what_a_plain_model_does(tmp_path, capsys) -> None:
    file = tmp_path / "results.json"
    assert run("--only=bf16-eager,ours-*", f"--json={file}", "--same-attention=none", "--layers=1") == 0
    (found,) = json.loads(file.read_text())["tables"].values()
    names = ["bf16-eager", *(f"ours-{recipe}" for recipe in bench.RECIPES)]
    assert list(found) == names
    assert all(len(each["ms"]) == 4 and each["right"] for each in found.values())  # turns of two steps
    assert 0 < found["ours-bf16"]["errors"]["dw"] < 0.02 < found["ours-current"]["errors"]["dw"]
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    assert [line.split(" | ")[0].removeprefix("| ") for line in lines] == ["variant", *names]


def test_captured_layers(rerun, capsys) -> None:
    """Their graphs are run again here."""
    only = "bf16-eager,ours-current,ours-current-graphed,ours-current-fp8-activations"
    assert run(f"--only={only}", "--graph-ours", "--store-ours", "--same-attention=none", *SHORT) == 0
    told = {
        line.split(":")[0]: line.split("off by")[1] for line in capsys.readouterr().out.splitlines() if "off" in line
    }
    assert told["- ours-current"] == told["- ours-current-graphed"]
    assert told["- ours-current-fp8-activations"] != told["- ours-current"]


def test_the_second_table_has_one_attention(tmp_path) -> None:
    file = tmp_path / "results.json"
    assert run("--only=bf16-eager,ours-bf16", "--same-attention=flash", f"--json={file}", *SHORT) == 0
    tables = json.loads(file.read_text())["tables"]
    assert [(title, list(found)) for title, found in tables.items()] == [
        (title, ["bf16-eager", "ours-bf16"]) for title in ("as shipped", "flash")
    ]


@pytest.mark.slow
@pytest.mark.exhaustive
def test_peers_and_compiled_variants_run(capsys) -> None:
    """torchao under emulation."""
    pytest.importorskip("torchao")
    only = "bf16-compiled,torchao-*,ours-delayed*"
    assert run(f"--only={only}", "--compile-ours", "--same-attention=none", *SHORT) == 0
    out = capsys.readouterr().out
    assert "speed / bf16-compiled | speed / torchao-tensorwise" in out
    for name in ("bf16-compiled", "torchao-tensorwise", "torchao-rowwise", "ours-delayed", "ours-delayed-compiled"):
        assert f"| {name} | " in out


def test_without_torchao_its_variants_are_skipped(monkeypatch, capsys) -> None:
    def absent(*_: object) -> None:
        raise ImportError("no torchao")

    monkeypatch.setattr(bench, "to_float8", absent)
    assert run("--only=torchao-tensorwise,bf16-eager", "--same-attention=none", *SHORT) == 0
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
    assert run("--only=ours-bf16", "--same-attention=none", *SHORT) == 1
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


# roofline.py

TINY = ["--layers=2", "--hidden=128", "--ffn=256", "--heads=2", "--kv-heads=1", "--batch=1", "--tokens=128"]
TINY += ["--repeats=1", "--device=cpu"]


def test_the_roofline_times_what_is_there(tmp_path, capsys) -> None:
    """The CPU has BF16 products, and two backends of attention; what it lacks is named."""
    file = tmp_path / "results.json"
    roofline.main([*TINY, f"--json={file}"])
    found, out = json.loads(file.read_text()), capsys.readouterr().out
    assert set(found["products ms"]) == set(roofline.KINDS)
    assert all(took > 0 for took in found["products ms"]["BF16"].values())
    assert all(rate > 0 for rate in found["memory TB/s"].values())
    assert min(found["attention ms"]["math"]) > 0
    assert "attention by cudnn is not available" in found["attention ms"]["cudnn"]
    assert "| BF16 | " in out and "FP8 1x128 by 1x128: " in out


def test_a_block_has_two_products_of_the_gate(capsys) -> None:
    sizes = roofline.Sizes(layers=3)
    roofline.print_limits({"BF16": dict.fromkeys(sizes.products(), 1.0)}, {"flash": (1.0, 2.0)}, sizes)
    assert "| BF16 | 45 | 51 |" in capsys.readouterr().out  # 3 * (4 + 1) products in a block, and 3 * 2 ms


def test_wrong_products_are_told(monkeypatch) -> None:
    right = roofline.KINDS["BF16"]
    wrong = {"BF16": lambda *a: right(*a)._replace(expected=right(*a).expected * 1.1)}
    monkeypatch.setattr(roofline, "KINDS", wrong)
    found = roofline.products(roofline.Sizes(1, 32, 32, 1, 1, 1, 32), "cpu", 1)
    assert set(found["BF16"].values()) == {"wrong"}


@pytest.mark.parametrize("kind", [kind for kind in roofline.KINDS if kind != "BF16"])
def test_scales_are_laid_out_as_the_product_expects(kind: str, monkeypatch) -> None:
    """Shapes and strides of PyTorch's CUDA kernels, and the values that the check compares with."""
    m, n, k, seen = 256, 384, 640, []
    monkeypatch.setattr(torch.nn.functional, "scaled_mm", lambda *a, **_: seen.append(a) or torch.zeros(m, n))
    product = roofline.KINDS[kind](m, n, k, "cpu")
    product.call()
    x, y, by_x, _, by_y, _ = seen[0]
    layouts = [(tuple(scales.shape), scales.stride()) for scales in (by_x, by_y)]
    vector = ((m, 5), (1, m))
    assert (
        layouts
        == {
            "FP8 per tensor": [((), ()), ((), ())],
            "FP8 per tensor, fast accumulation": [((), ()), ((), ())],
            "FP8 by rows": [((m, 1), (1, 1)), ((1, n), (1, 1))],
            "FP8 1x128 by 128x128": [vector, ((8, 3), (1, 8))],
            "FP8 1x128 by 1x128": [vector, ((n, 5), (1, n))],
        }[kind]
    )
    of_x = by_x.reshape(-1, 1) if by_x.ndim == 0 else by_x
    if kind == "FP8 1x128 by 128x128":
        of_y = by_y.t()[:, :5].repeat_interleave(128, 0)
    else:
        of_y = by_y.reshape(-1, 1) if by_y.numel() in (1, n) else by_y
    wide = [s.repeat_interleave(k // s.shape[1], 1) for s in (of_x, of_y)]
    expected = (x.double() * wide[0]) @ (y.t().double() * wide[1]).t()
    assert torch.allclose(product.expected.double(), expected[: roofline.CHECKED_ROWS], rtol=1e-3, atol=1e-2)
