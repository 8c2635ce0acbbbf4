"""Files that were made to do harm: nothing of them runs, and each gives one line.

Each attack that stock PyTorch falls for is shown to work there (`pickle.load`, `dcp.load`), so that no test passes
because its attack is none.
"""

from __future__ import annotations

import dataclasses
import functools
import io
import os
import pickle
import re
import shutil
import struct
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)

from quantshard.checkpoints import load
from quantshard.checkpoints.comparison import compare
from quantshard.checkpoints.inspection import verify
from quantshard.checkpoints.safe_read import SafeReader, decoded
from quantshard.errors import CheckpointError
from tests.checkpoints.small import built, written

WEIGHT = "model.0.weight"


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory.mktemp("untrusted") / "c", "nvfp4")


@pytest.fixture
def forged(original: Path, tmp_path: Path) -> Path:
    """A copy, to be changed."""
    return Path(shutil.copytree(original, tmp_path / "c"))


def refused(path: Path, match: str, reads: tuple[str, ...] = ("load", "compare")) -> None:
    """One line from everything that reads."""
    model, optimizer = built("nvfp4", seed=9)
    calls: dict[str, Callable[[], Any]] = {
        "load": lambda: load(path, model, optimizer),
        "compare": lambda: compare(path, path),
    }
    for name in reads:
        with pytest.raises(CheckpointError, match=match) as raised:
            calls[name]()
        assert "\n" not in str(raised.value)
        assert len(str(raised.value)) < 600


# Metadata that run code -----------------------------------------------------------------------------------------------


class Call:
    """Whatever unpickles it calls a function."""

    def __init__(self, function: Any, *args: Any) -> None:
        self.function, self.args = function, args

    def __reduce__(self) -> Any:
        return self.function, self.args


def attacks(mark: Path) -> dict[str, tuple[Any, str]]:
    """What unpickles to a folder at `mark`, and what is said."""
    code = f"__import__('os').mkdir({str(mark)!r})"
    file = mark.parent / "gadget"
    if mark.name:
        torch.save(Call(os.mkdir, str(mark)), file)
    gadget = functools.partial(torch.load, weights_only=False)
    return {
        "os.mkdir": (Call(os.mkdir, str(mark)), r"it names posix\.mkdir"),
        "os.system": (Call(os.system, f"mkdir {mark}"), r"it names posix\.system"),
        "eval": (Call(eval, code), r"it names builtins\.eval"),
        "exec": (Call(exec, code), r"it names builtins\.exec"),
        "torch.load": (Call(gadget, str(file)), r"it names functools\.partial"),
    }


@pytest.mark.parametrize("attack", attacks(Path()))
@pytest.mark.parametrize("place", ["whole", "version", "storage_meta", "planner_data", "entry"])
def test_metadata_that_run_code(forged: Path, tmp_path: Path, attack: str, place: str) -> None:
    mark = tmp_path / "ran"
    payload, said = attacks(mark)[attack]
    found: Any = payload
    if place != "whole":
        found = SafeReader(forged).metadata
        if place == "entry":
            found.state_dict_metadata[WEIGHT] = payload
        else:
            setattr(found, place, payload)
    content = pickle.dumps(found)
    (forged / ".metadata").write_bytes(content)
    refused(forged, said)
    assert not mark.exists()
    pickle.loads(content)
    assert mark.exists(), "the attack is none"


def test_attributes_of_allowed_classes_are_not_set(forged: Path) -> None:
    """BUILD with slot state on a class sets its attributes when `pickle.load` reads it, whoever lists the class."""
    names = b"".join(b"\x8c" + bytes([len(text)]) + text.encode() for text in (Metadata.__module__, "Metadata"))
    content = b"\x80\x04" + names + b"\x93N}\x8c\x04harmK\x01s\x86b."
    (forged / ".metadata").write_bytes(content)
    refused(forged, "is damaged")
    assert not hasattr(Metadata, "harm")
    pickle.loads(content)
    assert Metadata.harm == 1, "the attack is none"  # type: ignore[attr-defined]
    del Metadata.harm  # type: ignore[attr-defined]


BOMBS = {
    "a long string": b"\x8d" + struct.pack("<Q", 1 << 40),
    "a long byte array": b"\x96" + struct.pack("<Q", 1 << 40),
    "a long unicode": b"X" + struct.pack("<I", 0xFFFFFFFF),
    "a far place in the memo": b"Nr" + struct.pack("<I", 0xFFFFFFFF) + b".",
    "a long integer": b"\x8b" + struct.pack("<I", 0x7FFFFFFF),
    "no end": b"",
    "an empty stack": b".",
    "a mark that is none": b"t.",
    "an endless line": b"c" + b"a" * 1000,
    "an extension": b"\x82\x01.",
    "an instance": b"(i__builtin__\neval\n.",
    "a persistent id in text": b"Pabc\n.",
}


@pytest.mark.parametrize("bomb", BOMBS)
def test_pickles_that_take_memory_or_time(forged: Path, bomb: str) -> None:
    (forged / ".metadata").write_bytes(b"\x80\x04" + BOMBS[bomb])
    start = time.process_time()
    refused(forged, "cannot be read")
    assert time.process_time() - start < 5


def test_objects_that_hold_each_other(forged: Path) -> None:
    """2**60 values in a hundred bytes."""
    raw: Any = ["x"]
    for _ in range(60):
        raw = [raw, raw]
    change_object(forged, "extra.name", raw)
    refused(forged, "extra.name cannot be read: its values are nested too deeply", ("load",))


# Metadata that lie ----------------------------------------------------------------------------------------------------


def resized(found: Metadata, size: tuple[int, ...], chunk: tuple[int, ...] | None = None) -> None:
    entry = found.state_dict_metadata[WEIGHT]
    assert isinstance(entry, TensorStorageMetadata)
    entry.size = torch.Size(size)
    entry.chunks[0].sizes = torch.Size(chunk or size)


def moved(found: Metadata, **fields: Any) -> None:
    index = MetadataIndex(WEIGHT, (0, 0))
    found.storage_data[index] = dataclasses.replace(found.storage_data[index], **fields)


def shared_chunks(found: Metadata) -> None:
    """Many entries with one long list: linear in the file, quadratic for who copies it."""
    chunks = [ChunkStorageMetadata(torch.Size((i, 0)), torch.Size((1, 1))) for i in range(2000)]
    entry = found.state_dict_metadata[WEIGHT]
    assert isinstance(entry, TensorStorageMetadata)
    entry.chunks = chunks
    found.state_dict_metadata.update({f"model.x{i}": entry for i in range(2000)})


def in_one_place(found: Metadata) -> None:
    index, other = MetadataIndex(WEIGHT, (0, 0)), MetadataIndex("optimizer.state.0.exp_avg", (0, 0))
    found.storage_data[index] = found.storage_data[other]


def doubled(found: Metadata) -> None:
    """Two chunks over each other, and so many elements missing elsewhere."""
    entry = found.state_dict_metadata[WEIGHT]
    assert isinstance(entry, TensorStorageMetadata)
    entry.size = torch.Size((36, 12))
    found.storage_data[MetadataIndex(WEIGHT, (1, 0))] = found.storage_data[MetadataIndex(WEIGHT, (0, 0))]
    entry.chunks.append(ChunkStorageMetadata(torch.Size((0, 0)), entry.chunks[0].sizes))


LIES: dict[str, tuple[Callable[[Metadata], None], str]] = {
    "out of the directory": (lambda m: moved(m, relative_path="../c/__0_0.distcp"), "not in the directory"),
    "and in again": (lambda m: moved(m, relative_path="x/../__0_0.distcp"), "not in the directory"),
    "absolute": (lambda m: moved(m, relative_path="/etc/passwd"), "'/etc/passwd', which is not in"),
    "a drive": (lambda m: moved(m, relative_path="C:\\x"), "not in the directory"),
    "no name": (lambda m: moved(m, relative_path=""), "not in the directory"),
    "a line": (lambda m: moved(m, relative_path="a\nb"), "not in the directory"),
    "the directory": (lambda m: moved(m, relative_path="."), "not in the directory"),
    "a missing file": (lambda m: moved(m, relative_path="__7_0.distcp"), "__7_0.distcp is missing"),
    "no string": (lambda m: moved(m, relative_path=7), "not in the directory"),
    "a negative offset": (lambda m: moved(m, offset=-1), "no place in its file"),
    "an offset that is none": (lambda m: moved(m, offset=1.5), "a piece has no place"),
    "behind the end": (lambda m: moved(m, offset=1 << 40), "is cut short"),
    "a long piece": (lambda m: moved(m, length=1 << 40), "is cut short|two pieces lie"),
    "compressed": (lambda m: moved(m, transform_descriptors=["zstd"]), "compressed by an extension"),
    "a huge shape": (lambda m: resized(m, (1 << 20, 1 << 20)), "takes 1099511627776 bytes"),
    "a shape that overflows": (lambda m: resized(m, (1 << 61, 1 << 61)), "which no tensor here is"),
    "an empty shape that overflows": (lambda m: resized(m, (1 << 61, 1 << 61, 0)), "which no tensor here is"),
    "an endless empty shape": (lambda m: resized(m, (1 << 40, 0)), "which no tensor here is"),
    "a negative shape": (lambda m: resized(m, (-1, 4)), "which no tensor here is"),
    "a chunk that is smaller": (lambda m: resized(m, (18, 12), (17, 12)), "its chunks hold 204 of its 216 elements"),
    "a chunk that is larger": (lambda m: resized(m, (18, 12), (18, 13)), "is not inside it"),
    "other dims": (lambda m: resized(m, (18, 12), (18, 12, 1)), "is damaged"),
    "many dims": (lambda m: resized(m, (1,) * 100), "which no tensor here is"),
    "one place for two": (in_one_place, "two pieces lie in the same bytes"),
    "two chunks at one place": (doubled, "two chunks begin at"),
    "one list of many": (shared_chunks, "more or fewer pieces"),
    "no place": (lambda m: m.storage_data.pop(MetadataIndex(WEIGHT, (0, 0))), "more or fewer pieces"),
    "another place": (
        lambda m: m.storage_data.update({MetadataIndex("y"): m.storage_data.pop(MetadataIndex(WEIGHT, (0, 0)))}),
        f"does not say where '{WEIGHT}'",
    ),
    "no dtype": (lambda m: setattr(m.state_dict_metadata[WEIGHT].properties, "dtype", 3), "has no dtype"),
    "no entries": (lambda m: setattr(m, "state_dict_metadata", []), "is damaged"),
    "keys": (lambda m: m.state_dict_metadata.update({3: BytesStorageMetadata()}), "has no entries"),
    "no place for any": (lambda m: setattr(m, "storage_data", None), "is damaged"),
    "an entry of another kind": (
        lambda m: m.state_dict_metadata.update({WEIGHT: torch.Size([1])}),
        "is a Size",
    ),
    "a path": (lambda m: m.planner_data.update({WEIGHT: ("model", None)}), "planner data do not say"),
}


@pytest.mark.parametrize("lie", LIES)
def test_metadata_that_lie(forged: Path, lie: str) -> None:
    change, said = LIES[lie]
    found = SafeReader(forged).metadata
    change(found)
    (forged / ".metadata").write_bytes(pickle.dumps(found))
    refused(forged, said)


def test_links_out_of_the_directory(forged: Path, tmp_path: Path) -> None:
    file = forged / "__0_0.distcp"
    file.rename(tmp_path / "elsewhere")
    file.symlink_to(tmp_path / "elsewhere")
    refused(forged, "it is a link, and links are not followed")


def test_a_pipe_is_not_waited_for(forged: Path) -> None:
    for name in ("__0_0.distcp", ".metadata"):
        (forged / name).unlink()
        os.mkfifo(forged / name)
        refused(forged, "it is no regular file but a pipe")


# Entries --------------------------------------------------------------------------------------------------------------


def change_entry(path: Path, key: str, content: bytes) -> None:
    """Put other bytes in the place of an entry, at the end of its file."""
    found = SafeReader(path, packed=True).metadata
    index = next(index for index in found.storage_data if index.fqn == key)
    info = found.storage_data[index]
    with open(path / info.relative_path, "ab") as file:
        offset = file.tell()
        file.write(content)
    found.storage_data[index] = _StorageInfo(info.relative_path, offset, len(content))
    (path / ".metadata").write_bytes(pickle.dumps(found))


def saved(value: object) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def change_object(path: Path, key: str, value: object) -> None:
    change_entry(path, key, saved(value))


def zipped(compression: int = zipfile.ZIP_STORED, twice: bool = False, **records: bytes) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", compression) as archive:
        for name, content in records.items():
            archive.writestr(f"archive/{name.replace('data_', 'data/').replace('pkl', 'data.pkl')}", content)
    return file.getvalue()


def tensor_pickle(like: torch.Tensor) -> bytes:
    with zipfile.ZipFile(io.BytesIO(saved(like))) as archive:
        return archive.read("archive/data.pkl")


def changed_pickle(like: torch.Tensor, old: bytes, new: bytes) -> bytes:
    content = tensor_pickle(like)
    assert old in content
    return zipped(pkl=content.replace(old, new, 1), data_0=like.contiguous().view(torch.uint8).numpy().tobytes())


def padded(content: bytes) -> bytes:
    """An archive with a comment of 300 bytes, to be as long as the metadata want."""
    return content[:-2] + struct.pack("<H", 300) + b" " * 300


CODES = torch.zeros(18, 12, dtype=torch.uint8)
FORGED_TENSORS: dict[str, tuple[Callable[[], bytes], str]] = {
    "another dtype": (lambda: saved(torch.zeros(18, 12)), r"it is torch.float32 \[18, 12\], not"),
    "another shape": (lambda: saved(torch.zeros(12, 18, dtype=torch.uint8)), r"it is torch.uint8 \[12, 18\]"),
    "no tensor": (lambda: saved([1] * 300), r"it has a list, which is not a plain tensor"),
    "sparse": (lambda: saved(torch.eye(300, dtype=torch.uint8).to_sparse()), "it has a Tensor, which is not a plain"),
    "on no device": (lambda: padded(saved(CODES.to("meta"))), "it has a Tensor, which is not a plain tensor"),
    "outside its storage": (
        lambda: changed_pickle(CODES, b"K\x12K\x0c\x86", b"K\xffK\xff\x86"),
        "not a complete archive",
    ),
    "a negative stride": (
        lambda: changed_pickle(CODES, b"K\x0cK\x01\x86", b"J\xff\xff\xff\xffK\x01\x86"),
        "not a complete archive",
    ),
    "all of one element": (
        lambda: changed_pickle(CODES, b"K\x12K\x0c\x86", b"J\xff\xff\xff\x7fJ\xff\xff\xff\x7f\x86").replace(
            b"K\x0cK\x01\x86", b"K\x00K\x00\x86"
        ),
        "not a complete archive",
    ),
    "no archive": (lambda: b"\0" * 400, "it is not a complete archive"),
    "no pickle": (lambda: zipped(data_0=b"1" * 300), "not a complete archive"),
    "no storage": (lambda: zipped(pkl=tensor_pickle(CODES), x=b"1" * 300), "not a complete archive"),
    "compressed": (
        lambda: zipped(zipfile.ZIP_DEFLATED, pkl=tensor_pickle(CODES), data_0=os.urandom(216)),
        "claim more than",
    ),
    "a bomb": (
        lambda: zipped(zipfile.ZIP_DEFLATED, pkl=tensor_pickle(CODES), data_0=b"\0" * (1 << 24)),
        "claim more than",
    ),
    "code": (lambda: saved(Call(os.mkdir, "/nonexistent/x")) + b"", r"it names posix\.mkdir|are stored"),
}


@pytest.mark.parametrize("forgery", FORGED_TENSORS)
def test_forged_tensors(forged: Path, forgery: str) -> None:
    make, said = FORGED_TENSORS[forgery]
    change_entry(forged, WEIGHT, make())
    refused(forged, said)


def test_objects_that_run_code(forged: Path, tmp_path: Path) -> None:
    """Entries that are no tensors: DCP's planner unpickles them."""
    mark = tmp_path / "ran"
    change_object(forged, "extra.name", Call(os.mkdir, str(mark)))
    model, optimizer = built("nvfp4", seed=9)
    with pytest.raises(CheckpointError, match=r"extra\.name cannot be read: it names posix\.mkdir"):
        load(forged, model, optimizer)
    assert not mark.exists()
    with pytest.warns(UserWarning, match="torch.distributed is disabled"):
        dcp.load({"extra": {"name": ""}}, checkpoint_id=forged)
    assert mark.exists(), "the attack is none"


def test_settings_that_run_code(forged: Path, tmp_path: Path) -> None:
    key = "optimizer.param_groups.0.weight_decay"
    change_object(forged, key, Call(os.mkdir, str(tmp_path / "ran")))
    refused(forged, rf"is damaged or incomplete: {re.escape(key)} cannot be read: it names posix\.mkdir", ("load",))
    assert not verify(forged).ok


PLAIN: list[Any] = [
    None, True, 3, -(2**40), 0.5, "x", b"xyz\xff", [1, [2]], (1, (2, "y")), {"a": 1, 2: None}, {1, 2},
    torch.Size([2, 3]), torch.float8_e4m3fn, torch.device("cpu"), float("nan"),
]  # fmt: skip


@pytest.mark.parametrize("value", PLAIN, ids=repr)
def test_plain_values_come_back(value: Any) -> None:
    content = saved(value)
    found = decoded("x", content)
    assert type(found) is type(value)
    assert repr(found) == repr(value)
