"""The benchmarks of whole blocks and of what a device allows, small and on the CPU; what is wrong is told."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from benchmarks import block_step as bench
from benchmarks import roofline
from benchmarks.block_step import Shape
from tests.modules.graphed import rerun

__all__ = ["rerun"]

pytestmark = pytest.mark.filterwarnings("ignore")  # torchao's and Dynamo's
SMALL = Shape(layers=2, hidden=64, ffn=96, heads=4, kv_heads=2, batch=2, tokens=24, device="cpu")
FLAGS = [f"--{name}={value}" for name, value in vars(SMALL).items() if name != "kv_heads"]
FLAGS += ["--kv-heads=2", "--repeats=3", "--compiler=aot_eager"]
SHORT = ("--layers=1", "--repeats=1")  # the last flag counts


def run(*flags: str) -> int:
    return bench.main([*FLAGS, *flags])


def test_captured_layers(rerun, capsys) -> None:
    """Their graphs are run again here."""
    only = "bf16-eager,ours-current,ours-current-graphed,ours-current-fp8-activations"
    assert run(f"--only={only}", "--graph-ours", "--store-ours", "--same-attention=none", *SHORT) == 0
    told = {
        line.split(":")[0]: line.split("off by")[1] for line in capsys.readouterr().out.splitlines() if "off" in line
    }
    assert told["- ours-current"] == told["- ours-current-graphed"]
    assert told["- ours-current-fp8-activations"] != told["- ours-current"]


@pytest.mark.parametrize(
    "lost", ["weights", *(pytest.param(name, marks=pytest.mark.exhaustive) for name in ("gradient", "rotation"))]
)
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


# roofline.py


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
