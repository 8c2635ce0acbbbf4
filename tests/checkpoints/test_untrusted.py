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
from quantshard.checkpoints.inspect.compare import compare
from quantshard.checkpoints.inspect.verify import verify
from quantshard.checkpoints.untrusted import entries, metadata, pickles
from quantshard.checkpoints.untrusted.metadata import read_metadata, uncovered
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
        found = read_metadata(forged)
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
    target = f"c{Metadata.__module__}\nMetadata\n".encode()
    content = b"\x80\x04" + target + b"N}\x8c\x04harmK\x01s\x86b."
    (forged / ".metadata").write_bytes(content)
    refused(forged, "no whole pickle")
    assert not hasattr(Metadata, "harm")
    pickle.loads(content)
    assert Metadata.harm == 1, "the attack is none"  # type: ignore[attr-defined]
    del Metadata.harm  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", sorted({*metadata._NAMES, *entries._NAMES}))
def test_listed_names_are_never_called(name: str) -> None:
    """A call of anything that is listed is a record."""
    module, _, attribute = name.rpartition(".")
    called = b"c" + f"{module}\n{attribute}\n".encode() + b"(lp0\n"[:1] + b"K\x07tR."
    found = pickles.load_pickle(called, {name})
    assert type(found) is pickles.PickleRecord
    assert (found.name, found.args) == (name, (7,))


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
    "a deep key": b"}" + b")" + b"\x85" * 100_000 + b"Ns.",
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
    refused(forged, "extra.name cannot be read: its objects are nested too deeply", ("load",))


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
    entry.chunks.append(ChunkStorageMetadata(torch.Size((1, 0)), entry.chunks[0].sizes))


LIES: dict[str, tuple[Callable[[Metadata], None], str]] = {
    "out of the directory": (lambda m: moved(m, relative_path="../c/__0_0.distcp"), "not inside the directory"),
    "and in again": (lambda m: moved(m, relative_path="x/../__0_0.distcp"), "not inside the directory"),
    "absolute": (lambda m: moved(m, relative_path="/etc/passwd"), "'/etc/passwd', which is not inside"),
    "a drive": (lambda m: moved(m, relative_path="C:\\x"), "not inside the directory"),
    "no name": (lambda m: moved(m, relative_path=""), "not inside the directory"),
    "a line": (lambda m: moved(m, relative_path="a\nb"), "not inside the directory"),
    "the directory": (lambda m: moved(m, relative_path="."), "not inside the directory"),
    "a missing file": (lambda m: moved(m, relative_path="__7_0.distcp"), "'__7_0.distcp' is missing"),
    "no string": (lambda m: moved(m, relative_path=7), "not inside the directory"),
    "a negative offset": (lambda m: moved(m, offset=-1), "no place in its file"),
    "an offset that is none": (lambda m: moved(m, offset=1.5), "no place in its file"),
    "behind the end": (lambda m: moved(m, offset=1 << 40), "is cut short"),
    "a long piece": (lambda m: moved(m, length=1 << 40), "is cut short|two pieces lie"),
    "compressed": (lambda m: moved(m, transform_descriptors=["zstd"]), "compressed by an extension"),
    "a huge shape": (lambda m: resized(m, (1 << 20, 1 << 20)), "takes 1099511627776 bytes"),
    "a shape that overflows": (lambda m: resized(m, (1 << 61, 1 << 61)), "which no tensor has"),
    "an empty shape that overflows": (lambda m: resized(m, (1 << 61, 1 << 61, 0)), "which no tensor has"),
    "an endless empty shape": (lambda m: resized(m, (1 << 40, 0)), "which no tensor has"),
    "a negative shape": (lambda m: resized(m, (-1, 4)), "a size is a torch.Size that is none"),
    "a chunk that is smaller": (lambda m: resized(m, (18, 12), (17, 12)), "its shards hold 204 of its 216 elements"),
    "a chunk that is larger": (lambda m: resized(m, (18, 12), (18, 13)), "is not inside it"),
    "other dims": (lambda m: resized(m, (18, 12), (18, 12, 1)), "other dims"),
    "many dims": (lambda m: resized(m, (1,) * 100), "a size is a torch.Size that is none"),
    "one place for two": (in_one_place, "two pieces lie in the same bytes"),
    "chunks that overlap": (doubled, "its 2 chunks overlap"),
    "one list of many": (shared_chunks, "more or fewer pieces"),
    "no place": (lambda m: m.storage_data.pop(MetadataIndex(WEIGHT, (0, 0))), "more or fewer pieces"),
    "another place": (
        lambda m: m.storage_data.update({MetadataIndex("y"): m.storage_data.pop(MetadataIndex(WEIGHT, (0, 0)))}),
        f"does not say where the chunk of '{WEIGHT}'",
    ),
    "no dtype": (lambda m: setattr(m.state_dict_metadata[WEIGHT].properties, "dtype", 3), "tensor's dtype"),
    "no entries": (lambda m: setattr(m, "state_dict_metadata", []), "has no entries"),
    "keys": (lambda m: m.state_dict_metadata.update({3: BytesStorageMetadata()}), "has no entries"),
    "no place for any": (lambda m: setattr(m, "storage_data", None), "has no entries"),
    "an entry of another kind": (
        lambda m: m.state_dict_metadata.update({WEIGHT: torch.Size([1])}),
        "torch.Size stands where a TensorStorageMetadata should",
    ),
    "a path": (lambda m: m.planner_data.update({WEIGHT: ("model", 1.5)}), "planner data do not say"),
}


@pytest.mark.parametrize("lie", LIES)
def test_metadata_that_lie(forged: Path, lie: str) -> None:
    change, said = LIES[lie]
    found = read_metadata(forged)
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


def test_covered_exactly_once() -> None:
    def chunk(offsets: tuple[int, ...], sizes: tuple[int, ...]) -> ChunkStorageMetadata:
        return ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))

    grid = [chunk((r, c), (2, 3)) for r in range(0, 8, 2) for c in range(0, 9, 3)]
    assert uncovered((8, 9), grid) is None
    assert uncovered((8, 9), [*grid, chunk((8, 0), (0, 9))]) is None
    assert uncovered((), [chunk((), ())]) is None
    assert "hold 66 of" in str(uncovered((8, 9), grid[1:]))
    assert "overlap" in str(uncovered((8, 9), [*grid[1:], grid[1]]))
    assert "overlap" in str(uncovered((8, 9), [*grid[2:], chunk((1, 2), (2, 3)), grid[0]]))
    assert "other dims" in str(uncovered((), [chunk((), ()), chunk((0,), (0,))]))


# Entries --------------------------------------------------------------------------------------------------------------


def change_entry(path: Path, key: str, content: bytes) -> None:
    """Put other bytes in the place of an entry, at the end of its file."""
    found = read_metadata(path, packed=True)
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


CODES = torch.zeros(18, 12, dtype=torch.uint8)
FORGED_TENSORS: dict[str, tuple[Callable[[], bytes], str]] = {
    "another dtype": (lambda: saved(torch.zeros(18, 12)), r"it is torch.float32 \[18, 12\], and the metadata say"),
    "another shape": (lambda: saved(torch.zeros(12, 18, dtype=torch.uint8)), r"it is torch.uint8 \[12, 18\]"),
    "no tensor": (lambda: saved([1] * 300), r"it is list \[\]"),
    "sparse": (lambda: saved(torch.eye(300, dtype=torch.uint8).to_sparse()), "it names torch._utils._rebuild_sparse"),
    "on no device": (lambda: saved(CODES.to("meta")) + b" " * 300, "it names torch._utils._rebuild_meta|no whole arch"),
    "outside its storage": (
        lambda: changed_pickle(CODES, b"K\x12K\x0c\x86", b"K\xffK\xff\x86"),
        r"shape \[255, 255\] does not lie within its 216 bytes",
    ),
    "a negative stride": (
        lambda: changed_pickle(CODES, b"K\x0cK\x01\x86", b"J\xff\xff\xff\xffK\x01\x86"),
        "is damaged",
    ),
    "all of one element": (
        lambda: changed_pickle(CODES, b"K\x12K\x0c\x86", b"J\xff\xff\xff\x7fJ\xff\xff\xff\x7f\x86").replace(
            b"K\x0cK\x01\x86", b"K\x00K\x00\x86"
        ),
        "does not lie within|is damaged",
    ),
    "no archive": (lambda: b"\0" * 400, "it is no whole archive"),
    "no pickle": (lambda: zipped(data_0=b"1" * 300), "no record 'data.pkl'"),
    "no storage": (lambda: zipped(pkl=tensor_pickle(CODES), x=b"1" * 300), "no record 'data/0'"),
    "compressed": (
        lambda: zipped(zipfile.ZIP_DEFLATED, pkl=tensor_pickle(CODES), data_0=os.urandom(216)),
        "compressed",
    ),
    "a bomb": (
        lambda: zipped(zipfile.ZIP_DEFLATED, pkl=tensor_pickle(CODES), data_0=b"\0" * (1 << 24)),
        "claim more than",
    ),
    "big-endian": (
        lambda: zipped(pkl=tensor_pickle(CODES), byteorder=b"big", data_0=bytes(216)),
        "big-endian",
    ),
    "code": (lambda: saved(Call(os.mkdir, "/nonexistent/x")) + b"", r"it names posix\.mkdir|are stored"),
}


@pytest.mark.parametrize("forgery", FORGED_TENSORS)
def test_forged_tensors(forged: Path, forgery: str) -> None:
    make, said = FORGED_TENSORS[forgery]
    change_entry(forged, WEIGHT, make())
    refused(forged, said)


def test_flipped_bits_of_a_tensor(forged: Path) -> None:
    """`torch.load`, and so stock DCP, gives other weights in silence."""
    info = read_metadata(forged).storage_data[MetadataIndex(WEIGHT, (0, 0))]
    file = forged / info.relative_path
    content = bytearray(file.read_bytes())
    weight = built("nvfp4")[0].state_dict()["0.weight"]
    at = content.index(weight.numpy().tobytes(), info.offset)
    content[at + 5] ^= 1
    file.write_bytes(content)
    stock = {WEIGHT: torch.empty(18, 12, dtype=torch.uint8)}
    with pytest.warns(UserWarning, match="torch.distributed is disabled"):
        dcp.load(stock, checkpoint_id=forged)
    assert not torch.equal(stock[WEIGHT], weight), "the flip is none"
    refused(forged, f"{WEIGHT} cannot be read.* is damaged")


def test_objects_that_run_code(forged: Path, tmp_path: Path) -> None:
    """Entries that are no tensors: DCP's planner unpickles them."""
    mark = tmp_path / "ran"
    change_object(forged, "extra.name", Call(os.mkdir, str(mark)))
    model, optimizer = built("nvfp4", seed=9)
    with pytest.warns(
        UserWarning, match=r"without entries of `extra`: extra\.name cannot be read: it names posix\.mkdir"
    ):
        assert sorted(load(forged, model, optimizer)) == ["step", "words"]
    assert not mark.exists()
    with pytest.warns(UserWarning, match="torch.distributed is disabled"):
        dcp.load({"extra": {"name": ""}}, checkpoint_id=forged)
    assert mark.exists(), "the attack is none"


def test_only_entries_of_the_caller_are_left_out(forged: Path, tmp_path: Path) -> None:
    """What the optimizer needs is damage."""
    key = "optimizer.param_groups.0.weight_decay"
    change_object(forged, key, Call(os.mkdir, str(tmp_path / "ran")))
    refused(forged, rf"is damaged or incomplete: {re.escape(key)} cannot be read: it names posix\.mkdir", ("load",))
    assert not verify(forged).ok and not verify(forged).notes


PLAIN: list[Any] = [
    None, True, 3, -(2**40), 0.5, "x", b"xyz\xff", [1, [2]], (1, (2, "y")), {"a": 1, 2: None}, {1, 2},
    torch.Size([2, 3]), torch.float8_e4m3fn, torch.device("cpu"), float("nan"),
]  # fmt: skip


@pytest.mark.parametrize("value", PLAIN, ids=repr)
def test_plain_values_come_back(value: Any) -> None:
    content = saved(value)
    found = entries.read_entry(io.BytesIO(content), 0, len(content))
    assert type(found) is type(value)
    assert repr(found) == repr(value)


SAVED_DTYPES = [
    dtype
    for dtype in dict.fromkeys(entries.DTYPES.values())
    if dtype.itemsize and not re.search(r"\bq|complex32|bits|\du?int[1-7]$|int[1-7]$|fn_x2|bcomplex", str(dtype))
]


@pytest.mark.parametrize("dtype", SAVED_DTYPES, ids=str)
def test_tensors_of_every_dtype_come_back(dtype: torch.dtype) -> None:
    """Strided, shared and empty ones too."""
    words = torch.arange(6 * 4 * dtype.itemsize, dtype=torch.int64).to(torch.uint8)
    whole = words.remainder(2).bool().view(6, 4) if dtype == torch.bool else words.view(dtype).view(6, 4)
    content = saved({"t": whole.t(), "row": whole[2], "none": whole[:0], "p": [whole, whole]})
    found = entries.read_entry(io.BytesIO(content), 0, len(content))
    for a, b in ((found["t"], whole.t()), (found["row"], whole[2]), (found["none"], whole[:0])):
        assert (a.dtype, a.shape, a.stride()) == (b.dtype, b.shape, b.stride())
        assert a.contiguous().view(torch.uint8).tolist() == b.contiguous().view(torch.uint8).tolist()
    assert found["p"][0].data_ptr() == found["p"][1].data_ptr()


def test_without_checksums() -> None:
    """`torch.save` can be told to leave them out."""
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        content = saved(torch.arange(100))
    finally:
        torch.serialization.set_crc32_options(before)
    assert entries.read_entry(io.BytesIO(content), 0, len(content)).tolist() == list(range(100))
