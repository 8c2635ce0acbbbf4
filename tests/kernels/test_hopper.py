"""The kernels compile for Hopper GPUs, which this machine need not have, into what they were written to become."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

triton = pytest.importorskip("triton")
ROOT = Path(__file__).parents[2]
CHOSEN = [
    "per tensor, transpose, next amax", "128x128, transpose", "1x128, both directions",
    "MXFP8, both directions", "NVFP4", "NVFP4, both directions, random",
    "amax", "dequantize MXFP8", "dequantize NVFP4", "transpose", "activation, per tensor",
    "activation, backward MXFP8", "norm, per tensor", "norm, statistics, 4096", "norm, backward, RMSNorm, 4096",
    "rotary", "experts, per tensor", "Adam, delayed", "Adam, delayed, FP8 moments",
]  # fmt: skip
"""Of each file some; the program without arguments compiles all."""

BYTES = {"NVFP4": (16, 8), "NVFP4, both directions, random": (8, 8), "dequantize NVFP4": (4, 16), "amax": (16, 0)}
"""Of the widest load and store of a thread, where these are not 16: half a byte a code, four columns a thread."""

SPILLED = {
    "3.6": {
        "NVFP4, both directions, random": 40, "activation, backward MXFP8": 48, "Adam, delayed, FP8 moments": 60,
    },
    "3.7": {
        "1x128, both directions": 8, "MXFP8, both directions": 24, "activation, backward MXFP8": 48,
        "Adam, delayed, FP8 moments": 16,
    },
    "3.8": {"1x128, both directions": 20, "NVFP4": 8, "Adam, delayed, FP8 moments": 12},
    "3.9": {"1x128, both directions": 24, "MXFP8, both directions": 28, "Adam, delayed, FP8 moments": 12},
}  # fmt: skip
"""Bytes, by version of Triton; more programs beside each other are worth them."""


def test_no_spills_no_fusion_and_wide_accesses(tmp_path: Path, show: Callable[[str], None]) -> None:
    """Registers that spill would cost bandwidth; a fused multiply-add or a quick division would cost the oracle's bits.

    Activations promise a bound, not bits, before they are rounded.
    """
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": str(ROOT), "TRITON_CACHE_DIR": str(tmp_path)}
    script = str(ROOT / "tests" / "kernels" / "hopper.py")
    done = subprocess.run(
        [sys.executable, script, *CHOSEN], env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    spilled = SPILLED.get(".".join(triton.__version__.split(".")[:2]), {})
    found = {line.pop("kernel"): line for line in map(json.loads, done.stdout.splitlines())}
    show("\n".join(f"{name:32} {kernel['registers']:3} registers" for name, kernel in found.items()))
    for name, kernel in found.items():
        assert kernel["spilled"] <= spilled.get(name, 0), name
        assert kernel["fused multiply-adds"] == 0, name
        assert kernel["approximate divisions"] == 0 or name.startswith("activation"), name
        assert (kernel["bytes of a load"], kernel["bytes of a store"]) == BYTES.get(name, (16, 16)), name
    assert found["per tensor, transpose, next amax"]["casts"] > 0
