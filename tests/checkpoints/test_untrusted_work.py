"""Small files that would take much memory, or never end: sizes are bounded before memory is taken."""

from __future__ import annotations

import io
import json
import os
import pickle
import re
import shutil
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from quantshard.checkpoints import load
from quantshard.checkpoints.comparison import compare
from quantshard.checkpoints.disk import manifest
from quantshard.checkpoints.inspection import inspect_checkpoint, verify
from quantshard.checkpoints.safe_read import checked_entry, decoded
from quantshard.errors import CheckpointError, ConfigurationError
from quantshard.interop.layouts.files import SafetensorsFiles
from tests.checkpoints.small import built, written
from tests.fuzz.judge import REFUSED, judge
from tests.fuzz.mutations import deep

WEIGHT = "model.0.weight"
SECONDS = 8.0
"""Far more than any of these takes, and far less than without the rule that it is about."""


@contextmanager
def in_time() -> Iterator[None]:
    start = time.process_time()
    yield
    assert time.process_time() - start < SECONDS


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory.mktemp("untrusted") / "c", "nvfp4")


@pytest.fixture
def forged(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "c"))


def read(content: bytes) -> Any:
    return decoded("x", content)


def saved(value: object) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


# Small files that take much memory ------------------------------------------------------------------------------------


def shared_lists() -> bytes:
    """A list of 1000 lists of 1000 lists of 1000 numbers, which are the same ones."""
    value: list[Any] = [0] * 1000
    for _ in range(2):
        value = [value] * 1000
    return saved(value)


OBJECTS: dict[str, tuple[Callable[[], bytes], str]] = {
    "shared lists": (shared_lists, "contain each other, or are too many"),
    "nested lists": (lambda: saved(deep(40)), "nested too deeply"),
    "a text": (lambda: saved("x" * (17 << 20)), "data.pkl has more than"),
}


@pytest.mark.parametrize("kind", OBJECTS)
def test_objects_that_take_much_memory(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make, said = OBJECTS[kind]
    content = make()
    monkeypatch.setattr("tests.fuzz.judge.HEADROOM", 256 << 20)
    monkeypatch.setattr("quantshard.checkpoints.safe_read.OBJECT_VALUES", 1 << 18)  # an eighth, which is read sooner
    verdict = judge(lambda: read(content))
    assert verdict.kind == REFUSED
    assert re.search(said, verdict.what)


def test_an_object_that_would_be_too_large_is_not_saved() -> None:
    with pytest.raises(ConfigurationError, match=r"extra, a str, cannot be saved .*what is large as tensors"):
        checked_entry("extra", "x" * (17 << 20))


def test_a_manifest_of_many_missing_files(forged: Path) -> None:
    files = {f"d{n}": {"bytes": 1, "xxh3_128": "0" * 32} for n in range(50_000)}
    content = {"quantshard": 1, "files": files, "world_size": 1, "torch": "2", "saved_at": "x"}
    (forged / "manifest.json").write_text(json.dumps(content))
    with in_time():
        problems = manifest.problems(forged)
    assert sum(line.endswith(" is missing") for line in problems) == 50_000


def chunk(offsets: tuple[int, ...], sizes: tuple[int, ...]) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))


def of_chunks(path: Path, size: tuple[int, ...], chunks: list[ChunkStorageMetadata]) -> Path:
    """A checkpoint of one tensor, uint8, in chunks that lie one behind the other."""
    content, where, end = saved(torch.zeros(tuple(chunks[-1].sizes), dtype=torch.uint8)), {}, 0
    with open(path / "data.distcp", "wb") as file:
        for one in chunks:
            where[MetadataIndex("model.x", one.offsets)] = _StorageInfo("data.distcp", end, len(content))
            end += file.write(content)
    properties = TensorProperties(dtype=torch.uint8)
    found = Metadata({"model.x": TensorStorageMetadata(properties, torch.Size(size), chunks)})
    found.storage_data = where
    (path / ".metadata").write_bytes(pickle.dumps(found))
    return path


def test_many_chunks_side_by_side(tmp_path: Path) -> None:
    path = of_chunks(tmp_path, (2, 300), [chunk((0, n), (2, 1)) for n in range(300)])
    assert verify(path).ok
    assert compare(path, path).equal
    assert [row.chunks for row in inspect_checkpoint(path).rows] == [300]


# Files that never end -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("odd", ["a pipe", "a device", "a hole", "a link"])
@pytest.mark.parametrize("name", ["manifest.json", ".metadata", "__0_0.distcp"])
def test_files_that_never_end(forged: Path, tmp_path: Path, name: str, odd: str) -> None:
    if name == "manifest.json" or odd != "a link":
        (forged / name).unlink(missing_ok=True)
    if odd == "a pipe":
        os.mkfifo(forged / name)
    elif odd == "a hole":
        with open(forged / name, "wb") as file:
            os.truncate(file.fileno(), 1 << 40)
    else:
        (tmp_path / "elsewhere").write_text("{}")
        (forged / name).unlink(missing_ok=True)
        (forged / name).symlink_to("/dev/zero" if odd == "a device" else tmp_path / "elsewhere")
    if (name, odd) == ("__0_0.distcp", "a hole"):
        return  # its length is what it says
    said = {"a pipe": "no regular file but a pipe", "a hole": "and at most [0-9]+ are read"}.get(odd, "it is a link")
    model, optimizer = built("nvfp4")
    calls: list[Callable[[], Any]] = [
        lambda: load(forged, model, optimizer),
        lambda: compare(forged, forged),
        lambda: inspect_checkpoint(forged),
    ]
    for call in calls:
        with pytest.raises(CheckpointError, match=said):
            call()
    assert re.search(said, "".join(verify(forged).problems))


def test_links_that_a_manifest_names(forged: Path, tmp_path: Path) -> None:
    """The length of a file elsewhere is not told."""
    (tmp_path / "secret").write_bytes(bytes(12345))
    (forged / "link").symlink_to(tmp_path / "secret")
    (forged / "loop").symlink_to("loop")
    entry = {"bytes": 1, "xxh3_128": "0" * 32}
    names = ("link", "loop", "gone")
    content = {"quantshard": 1, "files": dict.fromkeys(names, entry), "world_size": 1, "torch": "2", "saved_at": "x"}
    (forged / "manifest.json").write_text(json.dumps(content))
    problems = manifest.problems(forged)
    assert "12345" not in "".join(problems)
    for name, said in zip(names, ("is a link", "is a link", "is missing"), strict=True):
        assert any(f"/{name} " in line and said in line for line in problems), (name, problems)


def safetensors(header: dict[str, Any], data: bytes = b"") -> bytes:
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [([2**60, 0], "F8_E4M3"), ([0, 2**60], "F8_E4M3"), ([2**40, 2**20, 0], "U8"), ([2**30, 0], "F32")],
)
def test_safetensors_of_empty_shapes(tmp_path: Path, shape: list[int], dtype: str) -> None:
    """179 bytes that were read in 2**38 steps."""
    entry = {"dtype": dtype, "shape": shape, "data_offsets": [0, 0]}
    scale = {"dtype": "F32", "shape": [], "data_offsets": [0, 4]}
    (tmp_path / "x.safetensors").write_bytes(safetensors({"l.weight": entry, "l.weight_scale": scale}, b"\0\0\x80?"))
    with in_time(), pytest.raises(CheckpointError, match=r"has the shape .* which no tensor has|cannot be read as"):
        SafetensorsFiles(tmp_path)
