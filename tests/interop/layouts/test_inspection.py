"""What `inspect` finds in safetensors files, whatever layout they are of."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

from quantshard.errors import CheckpointError
from quantshard.interop.layouts.inspection import inspect
from quantshard.tools.cli import app


def layouts() -> dict[str, tuple[dict[str, torch.Tensor], str, tuple[int, int]]]:
    """Of each layout: tensors, what it is called and its shape."""
    e4m3 = torch.arange(256 * 200).remainder(256).to(torch.uint8).view(256, 200)
    e4m3[e4m3 & 127 == 127] = 0
    packed, codes = torch.full((64, 32), 0x7F, dtype=torch.uint8), e4m3.view(torch.float8_e4m3fn)
    blocks = torch.full((64, 4), 2.0).to(torch.float8_e4m3fn)
    e8m0 = torch.full((256, 7), 129, dtype=torch.uint8)
    return {
        "HF block": ({"l.weight": codes, "l.weight_scale_inv": torch.full((2, 2), 4.0)}, "128x", (256, 200)),
        "HF tensor": ({"l.weight": codes, "l.weight_scale": torch.tensor(3.0)}, "a tensor", (256, 200)),
        "CT tensor": ({"l.weight": codes, "l.weight_scale": torch.tensor([3.0])}, "a tensor", (256, 200)),
        "CT channel": ({"l.weight": codes, "l.weight_scale": torch.ones(256, 1)}, "a row", (256, 200)),
        "ModelOpt channel": ({"l.weight": codes, "l.weight_scale": torch.ones(256)}, "a row", (256, 200)),
        "CT MXFP8": ({"l.weight": codes, "l.weight_scale": e8m0}, "E8M0", (256, 200)),
        "SGLang MXFP8": ({"l.weight": codes, "l.weight_scale_inv": e8m0}, "E8M0", (256, 200)),
        "CT NVFP4": (
            {"l.weight_packed": packed, "l.weight_scale": blocks, "l.weight_global_scale": torch.tensor([8.0])},
            "E2M1, E4M3 a 1x16 block",
            (64, 64),
        ),
        "ModelOpt NVFP4": (
            {"l.weight": packed, "l.weight_scale": blocks, "l.weight_scale_2": torch.tensor(0.125)},
            "E2M1, E4M3 a 1x16 block",
            (64, 64),
        ),
        "torchao": ({"l._weight_qdata": codes, "l._weight_scale": torch.ones(256, 1)}, "a row", (256, 200)),
    }


@pytest.mark.parametrize("layout", layouts())
def test_exported_files(tmp_path: Path, layout: str) -> None:
    tensors, called, shape = layouts()[layout]
    save_file(tensors, tmp_path / "a.safetensors")
    save_file({"norm.weight": torch.ones(5, dtype=torch.bfloat16)}, tmp_path / "b.safetensors")
    row, plain = inspect(tmp_path).rows
    assert row.quantized and called in row.format and row.shape == shape
    assert row.bytes == sum(value.nbytes for value in tensors.values())
    assert (plain.name, plain.format, plain.quantized, plain.codes) == ("norm.weight", "bfloat16", False, None)
    assert inspect(tmp_path / "a.safetensors").rows == (row,)
    result = CliRunner().invoke(app(), ["inspect", str(tmp_path)])
    assert result.exit_code == 0 and row.format in result.stdout


HEADERS = {
    "a huge header": (1 << 60).to_bytes(8, "little") + b"{}",
    "half a header": b"\x08\x00",
    "no JSON": (4).to_bytes(8, "little") + b"abcd",
    "behind the end": b'{"x":{"dtype":"F32","shape":[4],"data_offsets":[0,16]}}',
    "overlapping": b'{"x":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},'
    b'"y":{"dtype":"U8","shape":[4],"data_offsets":[2,6]}}',
    "negative": b'{"x":{"dtype":"U8","shape":[-4],"data_offsets":[0,4]}}',
    "another length": b'{"x":{"dtype":"F32","shape":[9],"data_offsets":[0,4]}}',
    "huge": b'{"x":{"dtype":"F32","shape":[4611686018427387904,4],"data_offsets":[0,4]}}',
    "deep": b"[" * 100_000,
    "unknown": b'{"x":{"dtype":"F5","shape":[4],"data_offsets":[0,4]}}',
}  # fmt: skip


@pytest.mark.parametrize("header", HEADERS)
def test_headers_of_safetensors(tmp_path: Path, header: str) -> None:
    content = HEADERS[header]
    if content.startswith((b"{", b"[")):
        content = len(content).to_bytes(8, "little") + content + b"\0" * 6
    (tmp_path / "m.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"m\.safetensors cannot be read as safetensors") as raised:
        inspect(tmp_path)
    assert "\n" not in str(raised.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"nowhere\.safetensors cannot be read as safetensors: No such file"):
        inspect(tmp_path / "nowhere.safetensors")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "m.safetensors")
    with pytest.raises(CheckpointError, match="it is no regular file but a pipe"):
        inspect(tmp_path)


SHAPES = {
    "a grid beside a vector": ((16,), (4, 4), (1,)),
    "no second scale": ((4, 8), (4, 1), (0,)),
    "none": ((4, 8), (4, 1), (1, 0)),
}


@pytest.mark.parametrize("shapes", SHAPES)
def test_shapes_that_are_no_scales(tmp_path: Path, shapes: str) -> None:
    codes, grid, second = SHAPES[shapes]
    tensors = {"l.weight": torch.zeros(codes, dtype=torch.uint8), "l.weight_scale": torch.ones(grid)}
    save_file(tensors | {"l.weight_scale_2": torch.ones(second)}, tmp_path / "m.safetensors")
    eight = {"e.weight": torch.zeros(codes).to(torch.float8_e4m3fn), "e.weight_scale": torch.ones(grid)}
    save_file(eight, tmp_path / "e.safetensors")
    found = {row.name: row.quantized for row in inspect(tmp_path).rows}
    assert not found["l.weight"] and found["e.weight"] == (len(codes) == 2)
