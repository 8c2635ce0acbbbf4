"""Compile kernels for a Hopper GPU on a machine without one, and print what they became: one JSON object for each.

Run as a program: Triton must not have been imported under the interpreter.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas

ROWS, COLS = 4096, 4096


class Hopper:
    """What Triton asks of the driver of a GPU before it compiles."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


triton.runtime.driver.set_active(Hopper())
torch.version.cuda = "13.0"  # the kernels may be imported
torch.cuda.get_device_capability = lambda device=None: (9, 0)

from quantshard import sharding  # noqa: E402
from quantshard.formats import ALL, E4M3, E5M2, FORMATS, Copy, Scaling  # noqa: E402
from quantshard.gemm import producers  # noqa: E402
from quantshard.kernels import language  # noqa: E402
from quantshard.kernels.experts import grouped, grouped_matmul  # noqa: E402
from quantshard.kernels.fused import activation, epilogue, norm, rotary, rounded_sum  # noqa: E402
from quantshard.kernels.fused.epilogue import EpilogueRequest  # noqa: E402
from quantshard.kernels.optimizer import adam  # noqa: E402
from quantshard.kernels.optimizer.parameters import AdamPasses, adam_kernel_config, passes_of  # noqa: E402
from quantshard.kernels.optimizer.plan import launch_options  # noqa: E402
from quantshard.kernels.optimizer.stored import AdamParameter, MatrixRegion, PlainTensor, ScaledTensor  # noqa: E402
from quantshard.kernels.quantize import amax, dequantize, targets, transpose  # noqa: E402
from quantshard.kernels.quantize import matrix as quantize  # noqa: E402
from quantshard.kernels.quantize.targets import QuantizeRequest, Region  # noqa: E402
from quantshard.numerics import RandomBits  # noqa: E402
from quantshard.numerics.adam import ROLES  # noqa: E402
from quantshard.recipe import FP8_STATE, Cell, resolve  # noqa: E402
from quantshard.tensor import storage as storages  # noqa: E402


def widest(ptx: str, access: str) -> int:
    """Bytes of the widest global load (ld) or store (st) of a thread."""
    found = re.findall(access + r"\.global[.\w]*?(?:\.v(\d))?\.b(\d+)", ptx)
    return max((int(count or 1) * int(bits) // 8 for count, bits in found), default=0)


def became(kernel: Any) -> dict[str, Any]:
    """Registers and spilled bytes as ptxas counts them, and instructions that tell of speed or of wrong bits."""
    ptx = kernel.asm["ptx"]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.ptx"
        path.write_text(ptx)
        command = [get_ptxas(90).path, "-v", "-arch=sm_90a", str(path), "-o", str(path.with_suffix(".o"))]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    return {
        "registers": int(re.search(r"Used (\d+) registers", said)[1]),
        "spilled": int(re.search(r"(\d+) bytes spill stores", said)[1]),
        "bytes of a load": widest(ptx, "ld"),
        "bytes of a store": widest(ptx, "st"),
        "casts": ptx.count("cvt.rn.satfinite"),
        # but for that of `language.encode`, whose product is exact, and those that are written out in PTX
        "fused multiply-adds": len(re.findall(r"fma\.rn\.f32\s+%\w+, %\w+, (?!0f4A800006)", ptx)),
        "approximate divisions": len(re.findall(r"div\.(full|approx)", ptx)),
    }


def request(name: str, transposed: bool = False, words: bool = False, hadamard: bool = False) -> QuantizeRequest:
    copy = FORMATS[name].copies[Copy.ROWWISE]
    grid = torch.ones(1 if copy.block[0] == ALL else ROWS, 1) if ALL in copy.block else None
    drawn = RandomBits(1 << 40 | 5, 7, 3, (ROWS, COLS)) if words else None
    second = torch.ones(()) if copy.amax is not None else None
    by_columns = producers.read_by_columns(copy)
    return QuantizeRequest(copy, Scaling(random_hadamard=hadamard), (0, 0), grid, second, drawn, transposed, by_columns)


def quantized(one: QuantizeRequest, other: QuantizeRequest | None = None, next_amax: bool = False) -> Any:
    x = torch.empty(ROWS, COLS, dtype=torch.bfloat16)
    tile = targets.tile(one, other, x.dtype)
    first = targets.target((ROWS, COLS), x.dtype, x.device, one, tile, torch.zeros(()) if next_amax else None)
    second = other and targets.target((COLS, ROWS), x.dtype, x.device, other, tile, held_transposed=True)
    return quantize.quantize_kernel.warmup(
        x, COLS, 1, first.where, first.out, second and second.where, second and second.out,
        *targets.halves(first.words.key), first.words.draw, first.words.stream, first.words.global_shape[1],
        second and second.words.stream, second and second.words.global_shape[1],
        H=first.how, T=second and second.how, grid=(1,),
        **targets.quantize_launch_options(tile, other is not None, x.dtype),
    )  # fmt: skip


def measured() -> Any:
    x, grid = torch.empty(ROWS, COLS, dtype=torch.bfloat16), torch.empty(1, 1, dtype=torch.int32)
    return amax.amax_kernel.warmup(
        x, COLS, 1, Region(ROWS, COLS, COLS, 0, 0), grid, 1, 1, 1, H=amax._tiling((ALL, ALL), False), grid=(1,),
        num_warps=targets.WARPS,
    )  # fmt: skip


def dequantized(name: str) -> Any:
    copy = FORMATS[name].copies[Copy.ROWWISE]
    width = COLS * copy.codes.encoding.bits // 8
    codes, scale = torch.empty(ROWS, width, dtype=torch.uint8), torch.empty(128, 128, dtype=torch.uint8)
    how, out = dequantize.tiles_of(copy, codes.device), torch.empty(ROWS, COLS, dtype=torch.bfloat16)
    return dequantize.dequantize_kernel.warmup(
        codes, width, width, scale, torch.empty(()), 128, 1, 128, 128, out, COLS, Region(ROWS, COLS, COLS, 0, 0), H=how,
        grid=(1,), num_warps=targets.WARPS, enable_fp_fusion=False,
    )  # fmt: skip


def transposed() -> Any:
    x = torch.empty(ROWS, COLS, dtype=torch.uint8)
    return transpose.transpose_kernel.warmup(x, COLS, x, ROWS, ROWS, COLS, *transpose.TILE, grid=(1,), num_warps=8)


def activated(one: QuantizeRequest | None, other: QuantizeRequest | None = None, backward: bool = False) -> Any:
    x, scalar = torch.empty(ROWS, COLS, dtype=torch.bfloat16), torch.zeros(())
    sums = torch.empty(COLS) if backward else None
    outputs = EpilogueRequest(one, other, None, scalar, scalar if backward else None, sums)
    p = epilogue.plan_epilogue(outputs, x)
    inputs, rest = (x, COLS, x, COLS), (p.sink, *p.out, *p.words)
    if not backward:
        return activation.activate_kernel.warmup(
            *inputs, p.where, *rest, KIND="silu", TILE=p.tile, H=p.how[0], T=p.how[1], grid=(1,),
            **p.launch(), enable_fp_fusion=False,
        )  # fmt: skip
    return activation.activate_backward_kernel.warmup(
        x, COLS, *inputs, p.where, *rest, *rest, KIND="silu", TILE=p.tile, GATE_H=p.how[0], GATE_T=p.how[1],
        UP_H=p.how[0], UP_T=p.how[1], grid=(1,), **p.launch(backward=True), enable_fp_fusion=False,
    )  # fmt: skip


def normalized(one: QuantizeRequest | None, other: QuantizeRequest | None = None) -> Any:
    x, row, column = torch.empty(ROWS, COLS, dtype=torch.bfloat16), torch.empty(COLS), torch.empty(ROWS)
    p = epilogue.plan_epilogue(EpilogueRequest(one, other), x)
    return norm.normalize_kernel.warmup(
        x, COLS, column, column, row, row, p.where, p.sink, *p.out, *p.words, CENTERED=True, OFFSET=0.0, TILE=p.tile,
        H=p.how[0], T=p.how[1], grid=(1,), **p.launch(), enable_fp_fusion=False,
    )  # fmt: skip


def statistics(size: int) -> Any:
    x, row, column = torch.empty(ROWS, size, dtype=torch.bfloat16), torch.empty(size), torch.empty(ROWS)
    r, amax = norm.row_tiling(size), torch.zeros((), dtype=torch.int32)
    return norm.statistics_kernel.warmup(
        x, size, x, size, x, column, column, row, row, amax, ROWS, size, 1e-5, CENTERED=True, OFFSET=0.0, ROWS=r.rows,
        PIECE=r.piece, PIECES=r.pieces, grid=(1,), num_warps=r.warps, enable_fp_fusion=False,
    )  # fmt: skip


def normalized_backward(size: int, centered: bool) -> Any:
    x, row, column = torch.empty(ROWS, size, dtype=torch.bfloat16), torch.empty(size), torch.empty(ROWS)
    r, sums = norm.backward_row_tiling(size, centered), torch.empty(norm.PROGRAMS, size)
    kernel, layout = norm.backward_kernel, {"ROWS": r.rows}
    if r.pieces > 1:
        kernel, layout = norm.backward_pieces_kernel, {"PIECES": r.pieces}
    return kernel.warmup(
        x, size, x, size, column if centered else None, column, row, x, size, x, sums, sums if centered else None,
        ROWS, size, CENTERED=centered, OFFSET=0.0, PIECE=r.piece, grid=(1,), num_warps=r.warps,
        enable_fp_fusion=False, **layout,
    )  # fmt: skip


def rotated(interleaved: bool) -> Any:
    x, table = torch.empty(ROWS, 1, 32, 128, dtype=torch.bfloat16), torch.empty(ROWS, 128)
    return rotary.rotate_kernel.warmup(
        x, 4096, 4096, 128, x, 4096, 4096, 128, table, table, 128, 1, 32, 32, 64, 0, BACKWARD=False,
        INTERLEAVED=interleaved, HEADS=32, PLANES=64, REST=0, grid=(1,), num_warps=8, enable_fp_fusion=False,
    )  # fmt: skip


def added_up(parts: int) -> Any:
    x = torch.empty(ROWS, COLS)
    return rounded_sum.sum_kernel.warmup(
        (x,) * parts, x.bfloat16(), x.numel(), PARTS=parts, SIZE=rounded_sum.SIZE, grid=(1,), num_warps=8
    )


def experts_quantized(block: int) -> Any:
    x, table, scales = (
        torch.empty(ROWS, COLS, dtype=torch.bfloat16),
        torch.empty(8, 4, dtype=torch.int64),
        torch.ones(8),
    )
    if not block:
        element = language.element(E4M3, torch.device("cuda"))
        return grouped.expert_quantize_kernel.warmup(
            x, COLS, COLS, table, scales, torch.empty(ROWS, COLS, dtype=torch.uint8), None, scales, element,
            grouped.MANY_ROWS, grouped.COLS, grid=(1,), num_warps=grouped.WARPS, enable_fp_fusion=False,
        )  # fmt: skip
    one = request("fp8_1x128" if block == 128 else "mxfp8_1x32")
    tile = targets.tile(one, one, x.dtype)
    first = targets.target((ROWS, COLS), x.dtype, x.device, one, tile)
    second = targets.target((COLS, ROWS), x.dtype, x.device, one, tile, held_transposed=True)
    return grouped.quantize_blocks_kernel.warmup(
        x, COLS, table, first.where, first.out, second.where, second.out, scales, H=first.how, T=second.how,
        ROWS=grouped.MANY_ROWS, grid=(1,), **targets.quantize_launch_options(tile, True, x.dtype),
    )  # fmt: skip


def experts_multiplied(block: int, launch: Any, transposed: bool) -> Any:
    codes, table = torch.empty(ROWS, COLS, dtype=torch.uint8), torch.empty(8, 4, dtype=torch.int64)
    scales = torch.empty(ROWS, 32, dtype=torch.uint8 if block == 32 else torch.float32)
    element = language.element(E4M3, torch.device("cuda"))
    return grouped_matmul.rows_kernel.warmup(
        codes, scales, None, table, table, 8, torch.empty(ROWS, COLS, dtype=torch.bfloat16), COLS, COLS,
        TURNED=transposed, ALIGNED=True, BIAS=None, SCALE=grouped_matmul.scale_type(scales), BLOCK=block, A=element,
        B=element, ROWS=launch.rows, COLS=launch.cols, SUMMED=launch.summed, grid=(1,), num_warps=launch.warps,
        num_stages=launch.stages,
    )  # fmt: skip


def experts_weights(block: int) -> Any:
    codes, table = torch.empty(ROWS, COLS, dtype=torch.uint8), torch.empty(8, 4, dtype=torch.int64)
    scales = torch.empty(ROWS, 32, dtype=torch.uint8 if block == 32 else torch.float32)
    out, device = torch.empty(8, COLS, COLS, dtype=torch.bfloat16), torch.device("cuda")
    launch = grouped_matmul.WEIGHTS_LAUNCH[block]
    shared = {
        "A": language.element(E4M3 if block else E5M2, device), "B": language.element(E4M3, device),
        "ROWS": launch.rows, "COLS": launch.cols, "SUMMED": launch.summed, "grid": (1,), "num_warps": launch.warps,
        "num_stages": launch.stages,
    }  # fmt: skip
    if block:
        return grouped_matmul.weights_by_blocks_kernel.warmup(
            codes, codes, scales, scales, scales, table, out, COLS, COLS, ROWS, BLOCK=block, **shared
        )
    return grouped_matmul.weights_kernel.warmup(codes, codes, scales, scales, table, out, COLS, COLS, **shared)


def stepped(recipe: str, moments: bool) -> Any:
    """A step of Adam with float32 masters, and float32 moments or such of 8 bits."""
    shard = sharding.whole((ROWS, COLS))

    def scaled(cell: Cell, history: torch.Tensor | None = None) -> ScaledTensor:
        return ScaledTensor(cell.format, cell.scaling, shard, storages.empty(cell, shard, "cpu").components, history)

    cell = resolve(recipe).weight
    assert cell is not None
    weight = scaled(cell, torch.zeros(16) if cell.scaling.history else None)
    plain = PlainTensor(torch.empty(ROWS, COLS))
    state = scaled(FP8_STATE) if moments else plain
    stored = dict(zip(ROLES, (state, state, plain, weight), strict=True))
    p = AdamParameter(stored, MatrixRegion((ROWS, COLS), (0, 0), (ROWS, COLS)))
    once = passes_of(p) is AdamPasses.ONCE
    how, table = (
        adam_kernel_config(p, True, not once or weight.history is not None, True, once),
        torch.empty(8, dtype=torch.int64),
    )
    return adam.adam_kernel.warmup(
        table, table.int(), table, table, table.float(), None, tl.bfloat16, 2, how, grid=(1,), **launch_options(how)
    )


KERNELS = {
    "per tensor, transpose, next amax": lambda: quantized(request("fp8_e4m3", transposed=True), next_amax=True),
    "per tensor, E5M2": lambda: quantized(request("fp8_e5m2")),
    "per row": lambda: quantized(request("fp8_1xrow")),
    "128x128, transpose": lambda: quantized(request("fp8_128x128", transposed=True)),
    "1x128, both directions": lambda: quantized(request("fp8_1x128"), request("fp8_1x128")),
    "MXFP8, both directions": lambda: quantized(request("mxfp8_1x32"), request("mxfp8_1x32")),
    "NVFP4": lambda: quantized(request("nvfp4_1x16")),
    "NVFP4, both directions, random": lambda: quantized(
        request("nvfp4_1x16", words=True), request("nvfp4_1x16", words=True, hadamard=True)
    ),
    "amax": measured,
    "dequantize MXFP8": lambda: dequantized("mxfp8_32x32"),
    "dequantize NVFP4": lambda: dequantized("nvfp4_16x16"),
    "transpose": transposed,
    "activation, per tensor": lambda: activated(request("fp8_e4m3", transposed=True)),
    "activation, 128x128": lambda: activated(request("fp8_128x128", transposed=True)),
    "activation, 1x128 both ways": lambda: activated(request("fp8_1x128"), request("fp8_1x128")),
    "activation, backward per tensor": lambda: activated(request("fp8_e5m2", transposed=True), None, True),
    "activation, backward 128x128": lambda: activated(request("fp8_128x128", transposed=True), None, True),
    "activation, backward 1x128": lambda: activated(request("fp8_1x128"), request("fp8_1x128"), True),
    "activation, backward MXFP8": lambda: activated(request("mxfp8_1x32"), request("mxfp8_1x32"), True),
    "norm, per tensor": lambda: normalized(request("fp8_e4m3", transposed=True)),
    "norm, 1x128 both ways": lambda: normalized(request("fp8_1x128"), request("fp8_1x128")),
    "norm, MXFP8 both ways": lambda: normalized(request("mxfp8_1x32"), request("mxfp8_1x32")),
    "norm, statistics, 4096": lambda: statistics(4096),
    "norm, statistics, 16384": lambda: statistics(16384),
    "norm, backward, RMSNorm, 4096": lambda: normalized_backward(4096, False),
    "norm, backward, RMSNorm, 16384": lambda: normalized_backward(16384, False),
    "norm, backward, LayerNorm, 8192": lambda: normalized_backward(8192, True),
    "norm, backward, LayerNorm, 16384": lambda: normalized_backward(16384, True),
    "Adam, delayed": lambda: stepped("delayed", False),
    "Adam, block": lambda: stepped("block", False),
    "Adam, MXFP8": lambda: stepped("mxfp8", False),
    "Adam, delayed, FP8 moments": lambda: stepped("delayed", True),
    "Adam, MXFP8, FP8 moments": lambda: stepped("mxfp8", True),
    "sum of three": lambda: added_up(3),
    "rotary": lambda: rotated(False),
    "rotary, interleaved": lambda: rotated(True),
    "experts, per tensor": lambda: experts_quantized(0),
    "experts, 1x128 both ways": lambda: experts_quantized(128),
    "experts, MXFP8 both ways": lambda: experts_quantized(32),
    "product of few rows": lambda: experts_multiplied(0, grouped_matmul.FEW_ROWS_LAUNCH, True),
    "product of many rows": lambda: experts_multiplied(0, grouped_matmul.ROWS_LAUNCH[0], True),
    "product of many rows, dgrad": lambda: experts_multiplied(0, grouped_matmul.ROWS_LAUNCH[0], False),
    "product by 1x128": lambda: experts_multiplied(128, grouped_matmul.ROWS_LAUNCH[128], True),
    "product by 1x128, dgrad": lambda: experts_multiplied(128, grouped_matmul.ROWS_LAUNCH[128], False),
    "product by MXFP8": lambda: experts_multiplied(32, grouped_matmul.ROWS_LAUNCH[32], True),
    "weight gradients": lambda: experts_weights(0),
    "weight gradients by 1x128": lambda: experts_weights(128),
    "weight gradients by MXFP8": lambda: experts_weights(32),
}

if __name__ == "__main__":
    for name in sys.argv[1:] or KERNELS:
        print(json.dumps({"kernel": name, **became(KERNELS[name]())}), flush=True)
