"""The kernels compile for Hopper GPUs, which this machine need not have, into what they were written to become."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

triton = pytest.importorskip("triton")

from tests.kernels import cases as table  # noqa: E402

ROOT = Path(__file__).parents[2]
BOTH = "both directions"
ROUNDED = f"{BOTH} + stochastic_rounding + random_hadamard"
CHOSEN = [
    *(row.timed[0] for row in table.ROWS),
    "quantize fp8_e4m3 + transpose + next amax", "quantize fp8_128x128 + transpose", f"quantize fp8_1x128, {BOTH}",
    f"quantize mxfp8_1x32, {BOTH}", "quantize nvfp4_1x16", f"quantize nvfp4_1x16, {ROUNDED}",
    "dequantize mxfp8_32x32", "dequantize nvfp4_16x16", "activation + quantize mxfp8_1x32",
    f"quantize mxfp8_1x32, {BOTH}, decoded", f"quantize nvfp4_1x16, {ROUNDED}, decoded",
    "activation + quantize mxfp8_1x32, decoded", "gradient + quantize nvfp4_1x16, decoded",
    "Adam, delayed, FP8 moments", "Muon, current",
]  # fmt: skip
"""A case of each row, and more of those that could spill; the program without arguments compiles all that are timed."""

BYTES = {
    "amax_kernel": (16, 0), "tensor_amax_kernel": (16, 0), "scales_kernel": (4, 4), "tensor_scales_kernel": (8, 4),
    "error_kernel": (16, 0), "values_kernel": (16, 0), "cross_entropy_kernel": (16, 4), "swizzle mxfp8_32x32": (4, 2),
    "statistics_kernel": (16, 4), "sums_kernel": (16, 4), "requantize_kernel": (16, 4), "rows_kernel": (8, 16),
    "record_kernel": (8, 4), "past_kernel": (8, 4), "tensor_past_kernel": (8, 4), "tensor_record_kernel": (8, 4),
    "quantize nvfp4_1x16": (16, 8), f"quantize nvfp4_1x16, {ROUNDED}": (8, 8), "dequantize nvfp4_16x16": (4, 16),
    f"quantize nvfp4_1x16, {ROUNDED}, decoded": (8, 16), "segments_kernel": (8, 8), "words_kernel": (0, 8),
    "momentum_kernel": (16, 8), "expert_amax_kernel": (16, 0),
}  # fmt: skip
"""Of the widest load and store of a thread, by case or kernel, where these are not 16: what is left of a row or a
block is a number, half a byte a code, four columns a thread."""

FUSED = {"error_kernel": 24}
"""Multiply-adds that a kernel asks for, within the bound of its docstring; three for each of a thread's values here."""

SPILLED = {
    "3.6": {
        f"quantize nvfp4_1x16, {ROUNDED}": 40, "activation + quantize mxfp8_1x32": 8, "Adam, delayed, FP8 moments": 60,
    },
    "3.7": {
        f"quantize fp8_1x128, {BOTH}": 8, "activation + quantize fp8_e4m3": 4, "Adam, delayed, FP8 moments": 16,
        "values and amaxes of rows and columns": 4, f"quantize mxfp8_1x32, {BOTH}": 20,
    },
    "3.8": {
        f"quantize fp8_1xrow, {BOTH}": 460, f"quantize fp8_1x128, {BOTH}": 20, "quantize nvfp4_1x16": 8,
        "Adam, delayed, FP8 moments": 12,
    },
    "3.9": {
        f"quantize fp8_1xrow, {BOTH}": 464, f"quantize fp8_1x128, {BOTH}": 24, f"quantize mxfp8_1x32, {BOTH}": 28,
        "Adam, delayed, FP8 moments": 12,
    },
}  # fmt: skip
"""Bytes, by version of Triton; more programs beside each other are worth them."""

WAITS = {"Adam, delayed, FP8 moments": (18, 18, 20), "Adam, delayed, lean8": (10, 10, 15, 20, 20, 20)}
"""At most, of the kernels of a step: of aligned tensors in wide tiles and in narrow ones, and of others; with masters
beside codes of the pass that measures and then of the one that stores. With a comparison for each value that is decoded
the last of these wait 22 and 25 times, and 23 to 33: a step with FP8 moments took 1.36 times as long on an H200."""


def compiled(cache: Path, *options: str, cases: Iterable[str] = CHOSEN) -> list[dict[str, Any]]:
    """What the kernels of some cases become, by a program without the interpreter."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": str(ROOT), "TRITON_CACHE_DIR": str(cache)}
    script = str(ROOT / "tests" / "kernels" / "hopper.py")
    done = subprocess.run(
        [sys.executable, script, *options, *dict.fromkeys(cases)],
        env=environment, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize("recipe", ["block", pytest.param("fp8-weights", marks=pytest.mark.exhaustive)])
def test_kernels_of_128x128_blocks_repeat_a_step_at_most_twice(tmp_path: Path, recipe: str) -> None:
    """Triton takes minutes to compile a kernel that updates the 8 tiles of a block one after another without a loop.

    The kernel for `mxfp8` updates one tile.
    """
    blocks, tile = f"Adam, {recipe}, lean8", "Adam, mxfp8, lean8"
    found = compiled(tmp_path, "--count", cases=(blocks, tile))
    counts = {
        case: [line["operations"] for line in found if (line["case"], line["kernel"]) == (case, "step_kernel")]
        for case in (blocks, tile)
    }
    assert counts[tile] and max(counts[blocks]) <= 2 * min(counts[tile]), counts


@pytest.mark.exhaustive
def test_sizes_of_one_compile(tmp_path: Path) -> None:
    """Triton makes constants of them, on which less can be called than on numbers; its interpreter does not."""
    assert {line["kernel"] for line in compiled(tmp_path, "--once", "--shape", "1", "1")} >= {
        "error_kernel",
        "values_kernel",
    }


@pytest.mark.exhaustive
def test_no_spills_no_fusion_and_wide_accesses(tmp_path: Path, show: Callable[[str], None]) -> None:
    """Registers that spill would cost bandwidth; a fused multiply-add or a quick division would cost the oracle's bits.

    Every kernel of the registry is among them, but for those that long rows, other blocks and other steps take.
    """
    found = compiled(tmp_path, "--once")
    spilled = SPILLED.get(".".join(triton.__version__.split(".")[:2]), {})
    show("\n".join(f"{line['case']}: {line['kernel']}, {line['registers']} registers" for line in found))
    for line in found:
        case, kernel = line["case"], line["kernel"]
        assert line["spilled"] <= spilled.get(case, 0), (case, kernel)
        assert line["fused multiply-adds"] == FUSED.get(kernel, 0), (case, kernel)
        assert line["approximate divisions"] == 0, (case, kernel)
        widths = BYTES.get(case) or BYTES.get(kernel, (16, 16))
        assert (line["bytes of a load"], line["bytes of a store"]) == widths, (case, kernel)
    assert next(line["casts"] for line in found if line["case"].endswith("next amax")) > 0
    missing = {name for row in table.ROWS for name in row.kernels} - {line["kernel"] for line in found}
    assert missing == {
        "backward_pieces_kernel", "corrections_kernel", "quantize_blocks_kernel", "weights_by_blocks_kernel",
    }  # fmt: skip


@pytest.mark.exhaustive
def test_a_step_loads_all_that_it_reads_before_it_waits(tmp_path: Path, show: Callable[[str], None]) -> None:
    """But for the addresses of it, and what a pass reads after it has drawn random words."""
    found = compiled(tmp_path, cases=WAITS)
    waits = {
        case: [each["waits"] for each in found if (each["case"], each["kernel"]) == (case, "step_kernel")]
        for case in WAITS
    }
    show("\n".join(f"{case}: {', '.join(map(str, counts))} waits" for case, counts in waits.items()))
    for case, bounds in WAITS.items():
        assert len(waits[case]) == len(bounds) and all(map(int.__le__, waits[case], bounds)), (case, waits[case])
