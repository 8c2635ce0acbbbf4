"""The benchmark of whole blocks, small and on the CPU; it reports wrong gradients."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from benchmarks import block_step as bench
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
        monkeypatch.setattr(bench, "rotate", lambda t, cos, sin: t)
    assert run("--only=ours-bf16", "--same-attention=none", *SHORT) == 1
    assert "WRONG" in capsys.readouterr().out
