"""Files that are not believed: what the safetensors library refuses by itself, and what is refused here."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from quantshard.errors import CheckpointError
from quantshard.interop.layouts.files import INDEX, SafetensorsFiles, TensorBatch, write_safetensors


def raw(path: Path, header: Any, data: bytes = b"", length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return path


def entry(start: int, stop: int, shape: list[int], dtype: str = "U8") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}


DAMAGED: dict[str, tuple[Any, bytes, int | None]] = {
    "overlapping ranges": ({"a": entry(0, 4, [4]), "b": entry(2, 6, [4])}, b"123456", None),
    "a gap": ({"a": entry(0, 2, [2]), "b": entry(4, 6, [2])}, b"123456", None),
    "bytes behind the last": ({"a": entry(0, 2, [2])}, b"123456", None),
    "a range beyond the file": ({"a": entry(0, 8, [8])}, b"1234", None),
    "a range backwards": ({"a": entry(4, 0, [4])}, b"1234", None),
    "a range of another length than the shape": ({"a": entry(0, 4, [5])}, b"1234", None),
    "a shape whose product overflows": ({"a": entry(0, 4, [2**33, 2**33])}, b"1234", None),
    "a negative size": ({"a": entry(0, 4, [-4])}, b"1234", None),
    "a dtype that is none": ({"a": entry(0, 4, [4], "PICKLE")}, b"1234", None),
    "a header that is not JSON": (b"{]", b"", None),
    "a header longer than the file": ({"a": entry(0, 4, [4])}, b"1234", 10**6),
    "a header of 2**63 bytes": ({"a": entry(0, 4, [4])}, b"1234", 2**63),
    "a pickle": (b"\x80\x02.", b"", None),
}


@pytest.mark.parametrize("damage", DAMAGED)
def test_library_refuses(tmp_path, damage):
    header, data, length = DAMAGED[damage]
    raw(tmp_path / "model.safetensors", header, data, length)
    with pytest.raises(CheckpointError, match=r"model.safetensors cannot be read as safetensors") as raised:
        SafetensorsFiles(tmp_path)
    assert "\n" not in str(raised.value) and len(str(raised.value)) < 500


def test_undamaged_is_read(tmp_path):
    raw(tmp_path / "model.safetensors", {"a": entry(0, 2, [2]), "b": entry(2, 6, [2, 2])}, b"123456")
    assert SafetensorsFiles(tmp_path).read("b", slice(1, 2), slice(0, 1)).tolist() == [[ord("5")]]


def test_a_dtype_of_no_layout(tmp_path):
    save_file({"a": torch.zeros(2, dtype=torch.int16)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="a is of dtype I16"):
        SafetensorsFiles(tmp_path)


@pytest.mark.parametrize(
    "name", ["../secret.safetensors", "/etc/x.safetensors", "a/b.safetensors", "..", "", "x.bin", 3, "a\\b.safetensors"]
)
def test_index_names_only_files_beside_it(tmp_path, name):
    folder = tmp_path / "model"
    folder.mkdir()
    save_file({"a": torch.zeros(2)}, tmp_path / "secret.safetensors")
    (folder / INDEX).write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(CheckpointError, match="is no safetensors file beside it"):
        SafetensorsFiles(folder)


@pytest.mark.parametrize(
    ("index", "match"),
    [
        ('{"weight_map": {"b": "x.safetensors"}}', "b is not in x.safetensors"),
        ('{"weight_map": {"a": "gone.safetensors"}}', "gone.safetensors cannot be read"),
        ('{"weight_map": []}', "has no weight_map"),
        ("[]", "is not a JSON object"),
        ("{", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
    ],
)
def test_index_is_checked(tmp_path, index, match):
    save_file({"a": torch.zeros(2)}, tmp_path / "x.safetensors")
    (tmp_path / INDEX).write_text(index)
    with pytest.raises(CheckpointError, match=match):
        SafetensorsFiles(tmp_path)


def test_a_tensor_in_two_files(tmp_path):
    for name in "xy":
        save_file({"a": torch.zeros(2)}, tmp_path / f"{name}.safetensors")
    with pytest.raises(CheckpointError, match=r"a is in x.safetensors and in y.safetensors"):
        SafetensorsFiles(tmp_path)


def test_no_files(tmp_path):
    with pytest.raises(CheckpointError, match="holds no safetensors"):
        SafetensorsFiles(tmp_path)


def test_write_keeps_a_group_in_one_file(tmp_path):
    def group(number: int) -> TensorBatch:
        made = {f"{number}.a": torch.full((3,), number, dtype=torch.uint8), f"{number}.b": torch.tensor(1.5)}
        return TensorBatch("", {f"{number}.a": (torch.uint8, (3,)), f"{number}.b": (torch.float32, ())}, lambda: made)

    assert write_safetensors(tmp_path, [group(n) for n in range(5)], 15, {"note": "x"}) == 35
    files = SafetensorsFiles(tmp_path)
    assert len(list(tmp_path.glob("*.safetensors"))) == 3 and files.metadata["note"] == "x"
    assert files.read("4.a").tolist() == [4, 4, 4] and files.read("4.b").item() == 1.5
    placed = json.loads((tmp_path / INDEX).read_text())["weight_map"]
    assert all(placed[f"{n}.a"] == placed[f"{n}.b"] for n in range(5))
