"""Write small checkpoints of TransformerEngine's tensors by its own Python code, with DCP, on two ranks of a CPU.

    pip download --no-deps transformer_engine==2.20.2 && unzip -d TE transformer_engine-2.20.2-*.whl
    python -m tests.golden.make_transformer_engine_checkpoints TE

writes `transformer-engine-2.20.2-dcp.tar.xz` beside this file. The tensor classes, their quantizers and how they pickle
are TransformerEngine's; its compiled part, which needs a GPU, is replaced by an enum and mocks, so nothing is quantized
there: codes and scales are those recorded on an H200 (`current`, `block`; see make_compact.py), or the oracle's
(`mxfp8`, `nvfp4`). Its modules, FSDP2 and FusedAdam did not run: the state dicts have the shape that these give them,
with each shard a tensor of its own, whose scales are padded, here with rubbish.
"""

from __future__ import annotations

import enum
import os
import sys
import tarfile
import tempfile
import types
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard, init_device_mesh
from torch.multiprocessing import spawn
from torch.nn.functional import pad

from quantshard import formats, numerics
from quantshard.formats import Orientation
from tests.golden.make_compact import COMPACT, load

ARCHIVE = Path(__file__).with_name("transformer-engine-2.20.2-dcp.tar.xz")
RECIPES = ("current", "block", "mxfp8", "nvfp4")
SETTINGS = {"lr": 1e-2, "bias_correction": True, "betas": (0.9, 0.99), "eps": 1e-7, "weight_decay": 0.01, "step": 3}
RANKS, RUBBISH = 2, 119


def weight(recipe: str) -> tuple[formats.Format, dict[str, Tensor]]:
    """The weight's format and components, as they are here."""
    golden = load(COMPACT)
    if recipe == "current":
        found = golden["quantize"]["current_e4m3/randn"]
        return formats.FP8_E4M3, {"codes": found["data"], "scale_inv": found["scale_inv"].reshape(1, 1)}
    if recipe == "block":
        found = golden["quantize"]["block2d_pow2True/zeros"]
        return formats.FP8_128X128, {"codes": found["rowwise_data"], "scale_inv": found["rowwise_scale_inv"][:, :2]}
    fmt = {"mxfp8": formats.MXFP8_BOTH, "nvfp4": formats.NVFP4_16X16}[recipe]
    return fmt, numerics.quantize(golden["inputs"]["randn"], fmt)


def states(recipe: str) -> dict[str, dict[str, Tensor]]:
    """Of weight and bias: the plain values of the bias, and FusedAdam's states."""
    fmt, parts = weight(recipe)
    rows = parts["codes"].shape[0]
    values = numerics.dequantize(fmt.copies[Orientation.ROWWISE], parts, (rows, rows))
    bias = (torch.arange(rows) % 7 / 8).bfloat16()
    return {
        name: {
            "exp_avg": (steps := torch.arange(start.numel()).reshape(start.shape)) % 97 * 2.0**-10,
            "exp_avg_sq": steps % 89 * 2.0**-20,
            "master_param": start * (1 + 2.0**-18),
        }
        for name, start in (("0.weight", values), ("0.bias", bias.float()))
    } | {"values": {"0.bias": bias}}


def padded(grid: Tensor, rows: int, cols: int) -> Tensor:
    """Scales with rubbish up to multiples of rows and cols."""
    return pad(grid, (0, -grid.shape[1] % cols, 0, -grid.shape[0] % rows), value=RUBBISH)


def shard(recipe: str, rank: int) -> Any:
    """This rank's rows of the weight, as a tensor of TransformerEngine's."""
    from transformer_engine.pytorch import tensor as te
    from transformer_engine.pytorch.constants import DType

    parts = weight(recipe)[1]
    size, cols = parts["codes"].shape[0] // RANKS, parts["codes"].shape[0]
    given = {"shape": (size, cols), "dtype": torch.bfloat16, "device": "cpu"}
    codes = parts["codes"][rank * size : (rank + 1) * size].contiguous()

    def grid(name: str, rows: int) -> Tensor:
        return parts[name][rank * size // rows : (rank + 1) * size // rows]

    if recipe == "current":
        quantizer = te.Float8CurrentScalingQuantizer(DType.kFloat8E4M3, torch.device("cpu"))
        scale = parts["scale_inv"].reshape(1)
        return te.Float8Tensor(data=codes, fp8_scale_inv=scale, fp8_dtype=quantizer.dtype, quantizer=quantizer, **given)
    element = DType.kFloat4E2M1 if recipe == "nvfp4" else DType.kFloat8E4M3
    given["rowwise_data"] = codes
    if recipe == "block":
        scales = grid("scale_inv", 128)
        return te.Float8BlockwiseQTensor(
            rowwise_scale_inv=padded(scales, 1, 4), columnwise_data=codes.t().contiguous(),
            columnwise_scale_inv=padded(scales.t(), 1, 4), fp8_dtype=element, is_2D_scaled=True,
            quantizer=te.Float8BlockQuantizer(element, rowwise=True, columnwise=True), **given,
        )  # fmt: skip
    if recipe == "mxfp8":
        return te.MXFP8Tensor(
            rowwise_scale_inv=padded(grid("scale_inv", 1), 128, 4),
            columnwise_data=parts["columnwise"][rank * size : (rank + 1) * size].contiguous(),
            columnwise_scale_inv=padded(grid("columnwise_scale_inv", 32), 4, 128), fp8_dtype=element,
            quantizer=te.MXFP8Quantizer(element), with_gemm_swizzled_scales=False, **given,
        )  # fmt: skip
    turned = numerics.pack(numerics.unpack(codes, formats.E2M1, cols).t().contiguous(), formats.E2M1)
    tiles, amax = grid("scale_inv", 16), parts["amax"].reshape(1)
    return te.NVFP4Tensor(
        rowwise_scale_inv=padded(tiles.repeat_interleave(16, 0), 128, 4), columnwise_data=turned,
        columnwise_scale_inv=padded(tiles.t().repeat_interleave(16, 0), 128, 4), amax_rowwise=amax,
        amax_columnwise=amax.clone(), fp4_dtype=element, quantizer=te.NVFP4Quantizer(with_2d_quantization=True),
        with_gemm_swizzled_scales=False, **given,
    )  # fmt: skip


def save(rank: int, package: str, folder: str) -> None:
    """One rank."""
    stand_in(Path(package))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29611")
    dist.init_process_group("gloo", rank=rank, world_size=RANKS)
    mesh = init_device_mesh("cpu", (RANKS,))

    def sharded(whole: Tensor) -> DTensor:
        local = whole.chunk(RANKS)[rank].contiguous()
        return DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=whole.shape, stride=whole.stride())

    for recipe in RECIPES:
        kept = states(recipe)
        local, size = shard(recipe, rank), weight(recipe)[1]["codes"].shape[0]
        param = DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=(size, size), stride=(size, 1))
        optimizer = {
            "state": {
                number: {role: sharded(value) for role, value in kept[name].items()}
                for number, name in enumerate(("0.weight", "0.bias"))
            },
            "param_groups": [{**SETTINGS, "params": [0, 1]}],
        }
        model = {
            "0.weight": param,
            "0.bias": sharded(kept["values"]["0.bias"]),
            "0._extra_state": torch.empty(0, dtype=torch.uint8),
        }
        dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=Path(folder) / recipe)
    dist.destroy_process_group()


def stand_in(package: Path) -> None:
    """Make TransformerEngine's Python files importable without its compiled part."""
    for name in ("transformer_engine", "transformer_engine.common", "transformer_engine.pytorch"):
        module = types.ModuleType(name)
        module.__path__ = [str(package / name.replace(".", "/"))]
        sys.modules[name] = module
    sys.modules["transformer_engine.common"].decode_cudnn_version = lambda *_: (9, 0, 0)  # type: ignore[attr-defined]
    numbers = {"kByte": 0, "kInt32": 2, "kFloat32": 4, "kFloat16": 5, "kBFloat16": 6, "kFloat8E4M3": 7,
               "kFloat8E5M2": 8, "kFloat4E2M1": 10}  # fmt: skip
    compiled = mock.MagicMock(__spec__=None)
    compiled.DType = enum.IntEnum("DType", numbers)
    for kind in ("FP8FwdTensors", "FP8BwdTensors"):
        setattr(compiled, kind, mock.MagicMock(**dict.fromkeys(
            [f"GEMM{n}_{what}" for n in (1, 2, 3) for what in ("INPUT", "WEIGHT", "OUTPUT")]
            + [f"GRAD_{what}{n}" for n in (1, 2, 3) for what in ("INPUT", "OUTPUT")], 0)))  # fmt: skip
    sys.modules["transformer_engine_torch"] = compiled
    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment, return-value]
    torch.cuda.get_device_capability = lambda *_: (9, 0)


def main(package: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        spawn(save, (package, folder), nprocs=RANKS)
        with tarfile.open(ARCHIVE, "w:xz") as tar:
            for recipe in RECIPES:
                tar.add(Path(folder) / recipe, recipe)
    print(f"{ARCHIVE}: {ARCHIVE.stat().st_size} bytes")


if __name__ == "__main__":
    main(sys.argv[1])
