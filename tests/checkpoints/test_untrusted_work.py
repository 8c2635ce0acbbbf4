"""Small files that would take hours, or all memory: what is read of them takes time and memory linear in their size.

Each was measured to take more than 15 seconds where its rule is missing, most take hours at a size of some megabytes.
"""

from __future__ import annotations

import functools
import io
import itertools
import json
import os
import pickle
import re
import shutil
import struct
import time
import zipfile
from collections.abc import Callable, Iterable, Iterator
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
from quantshard.checkpoints.disk import manifest
from quantshard.checkpoints.inspect.compare import compare
from quantshard.checkpoints.inspect.verify import verify
from quantshard.checkpoints.untrusted import entries, pickles
from quantshard.checkpoints.untrusted.metadata import read_metadata, uncovered
from quantshard.checkpoints.untrusted.reader import SafeReader
from quantshard.errors import CheckpointError, ConfigurationError
from quantshard.interop.layouts.inspection import inspect
from tests.checkpoints.small import built, written
from tests.fuzz.judge import READ, REFUSED, judge

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
    return entries.read_entry(io.BytesIO(content), 0, len(content))


def saved(value: object) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


class Set:
    """Is pickled as a set that is never made."""

    def __init__(self, values: Iterable[Any]) -> None:
        self.values = list(values)

    def __reduce__(self) -> Any:
        return set, (self.values,)


def archived(content: bytes) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("archive/data.pkl", content)
    return file.getvalue()


# Keys that collide ----------------------------------------------------------------------------------------------------

MERSENNE = (1 << 61) - 1
"""Hashes of integers are remainders by it."""


def colliding_sizes(count: int) -> list[tuple[int, int]]:
    """Pairs of numbers whose tuples have one hash: of the first any, the second is solved for."""
    one, two, five, word = 11400714785074694791, 14029467366897019727, 2870177450012600261, (1 << 64) - 1
    inverse, found, first = pow(two, -1, 1 << 64), [], 0
    while len(found) < count:
        first += 1
        sum_ = (five + first * two) & word
        after = ((sum_ << 31 | sum_ >> 33) & word) * one & word
        second = (1234567 - after) * inverse & word
        if second < MERSENNE:
            found.append((first, second))
    return found


def test_the_pairs_collide() -> None:
    assert len({hash(pair) for pair in colliding_sizes(50)}) == 1


def pickled_sizes(sizes: list[tuple[int, int]]) -> bytes:
    """A dict with these as keys, each a call of `torch.Size`."""
    keys = b"".join(b"ctorch\nSize\n" + pickle.dumps(size, 2)[2:-1] + b"\x85RN" for size in sizes)
    return b"\x80\x02}(" + keys + b"u."


def text_of(count: int, length: int) -> bytes:
    """One text that is made bytes many times."""
    call = b"c_codecs\nencode\nh\x00X\x06\x00\x00\x00latin1\x86R"
    return b"\x80\x02](X" + struct.pack("<I", length) + b"x" * length + b"q\x00" + call * count + b"e."


COLLIDING: dict[str, tuple[Callable[[], bytes], str]] = {
    "integers": (lambda: saved(Set(n * MERSENNE for n in range(40_000))), "more than 16384 numbers as keys"),
    "fewer integers": (lambda: saved(Set(n * MERSENNE for n in range(16_000))), "made to have one hash"),
    "tuples": (lambda: saved(Set(colliding_sizes(12_000))), "made to have one hash"),
    "nested tuples": (lambda: saved(Set(((pair,), "x") for pair in colliding_sizes(12_000))), "made to have one hash"),
    "sizes": (lambda: archived(pickled_sizes(colliding_sizes(12_000))), "made to have one hash"),
    "numbers of any kind": (lambda: saved({n: None for n in range(20_000)}), "more than 16384 numbers as keys"),
}


@pytest.mark.parametrize("kind", COLLIDING)
def test_keys_made_to_collide(kind: str) -> None:
    make, said = COLLIDING[kind]
    content = make()
    with in_time(), pytest.raises(CheckpointError, match=said):
        read(content)


def test_keys_that_do_not_collide_are_many() -> None:
    values: list[Any] = [
        {str(n): n for n in range(50_000)}, set(range(0, 16_000_000, 1000)), {-1, -2, 0, 2.5, (1, "a", None)},
        {n: {n} for n in range(5000)}, {2.0**n for n in range(-1000, 1000)},
        b"x" * 100_000, {f"{n}".encode() for n in range(20_000)},
    ]  # fmt: skip
    for value in values:
        assert read(saved(value)) == value


def test_one_text_that_is_made_bytes_many_times() -> None:
    with in_time():
        values = read(archived(text_of(4000, 100_000)))
    assert len(set(map(id, values[1:]))) == 1


# Small files that take much memory ------------------------------------------------------------------------------------

SIZE = 4 << 20
"""Of a file whose objects take 256 MiB at most, which are a gigabyte where nothing bounds them."""


def listed_records(size: int) -> bytes:
    """An archive with a list of records of so many bytes."""
    entry = struct.pack("<4s6H3L5H2L", b"PK\1\2", *[0] * 9, 1, *[0] * 6) + b"x"
    count = size // len(entry)
    return entry * count + struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, 0, 0, count * len(entry), 0, 0)


def shared_lists() -> bytes:
    """A list of 1000 lists of 1000 lists of 1000 numbers, which are the same ones."""
    value: list[Any] = [0] * 1000
    for _ in range(2):
        value = [value] * 1000
    return saved(value)


PICKLED = {
    "lists": b"]" * SIZE,
    "sets": b"\x8f" * SIZE,
    "dicts": b"}NNs" * (SIZE // 4),
    "dicts among other values": b"}NNsNN" * (SIZE // 6),
    "numbered dicts": b"}K\1Ns" * (SIZE // 5),
    "nested tuples": b"N" + b"\x85" * SIZE,
    "marks": b"N" * 1000 + b"(" * SIZE,
}


@pytest.mark.parametrize("kind", PICKLED)
def test_many_containers_in_metadata(forged: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (forged / ".metadata").write_bytes(b"\x80\x04" + PICKLED[kind] + b".")
    monkeypatch.setattr("tests.fuzz.judge.HEADROOM", 128 << 20)
    verdict = judge(lambda: inspect(forged))
    assert (verdict.kind, verdict.what.count(".metadata cannot be read")) == (REFUSED, 1), verdict
    assert judge(lambda: verify(forged).problems and None).kind == READ


OBJECTS: dict[str, tuple[Callable[[], bytes], str]] = {
    **{
        kind: (functools.partial(archived, b"\x80\x02" + content + b"."), "more lists|nested too deeply")
        for kind, content in PICKLED.items()
    },
    "shared lists": (shared_lists, "hold each other, or are too many"),
    "records": (lambda: listed_records(5 << 20), "list of records has more than"),
    "a text": (lambda: saved("x" * (17 << 20)), "data.pkl has more than"),
}


@pytest.mark.parametrize("kind", OBJECTS)
def test_objects_that_take_much_memory(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make, said = OBJECTS[kind]
    content = make()
    monkeypatch.setattr("tests.fuzz.judge.HEADROOM", 256 << 20)
    verdict = judge(lambda: read(content))
    assert verdict.kind == REFUSED
    assert re.search(said, verdict.what)


def test_an_object_that_would_be_too_large_is_not_saved() -> None:
    with pytest.raises(ConfigurationError, match=r"extra, a str, cannot be saved .*what is large as tensors"):
        entries.checked_entry("extra", "x" * (17 << 20))


def test_metadata_of_many_pieces_are_read(tmp_path: Path) -> None:
    """Those of DCP have few bytes for each container."""
    path = of_chunks(tmp_path, (8_000, 3), [chunk((n, 0), (1, 3)) for n in range(8_000)])
    with in_time():
        assert len(read_metadata(path).storage_data) == 8_000


def test_a_manifest_of_many_missing_files(forged: Path) -> None:
    files = {f"d{n}": {"bytes": 1, "xxh3_128": "0" * 32} for n in range(50_000)}
    content = {"quantshard": 1, "files": files, "world_size": 1, "torch": "2", "saved_at": "x"}
    (forged / "manifest.json").write_text(json.dumps(content))
    with in_time():
        problems = manifest.problems(forged)
    assert sum(line.endswith(" is missing") for line in problems) == 50_000


def test_the_memo_is_counted_up() -> None:
    """Numbers of a file's choice would be keys of a dict."""
    assert pickles.load_pickle(b"\x80\x02Nq\x00q\x01q\x00h\x01.", ()) is None
    with pytest.raises(CheckpointError, match="no whole pickle"):
        pickles.load_pickle(b"\x80\x02Nq\x01.", ())


# Metadata -------------------------------------------------------------------------------------------------------------


def chunk(offsets: tuple[int, ...], sizes: tuple[int, ...]) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))


class Index:
    """Is pickled as an index of a chunk, and has a hash of its own."""

    def __init__(self, name: str, offset: tuple[int, ...] | None) -> None:
        self.state = {"fqn": name, "offset": None if offset is None else torch.Size(offset), "index": None}

    def __reduce__(self) -> Any:
        return MetadataIndex, (), self.state


def of_chunks(
    path: Path, size: tuple[int, ...], chunks: list[ChunkStorageMetadata], at: list[Any] | None = None
) -> Path:
    """A checkpoint of one tensor, uint8, in chunks that lie one behind the other; `at`: where it is said they are."""
    content, where, end = saved(torch.zeros(tuple(chunks[-1].sizes), dtype=torch.uint8)), {}, 0
    with open(path / "data.distcp", "wb") as file:
        for number, one in enumerate(chunks):
            index = Index("model.x", one.offsets) if at is None else Index("model.x", at[number])
            where[index] = _StorageInfo("data.distcp", end, len(content))
            end += file.write(content)
    properties = TensorProperties(dtype=torch.uint8)
    found = Metadata({"model.x": TensorStorageMetadata(properties, torch.Size(size), chunks)})
    found.storage_data = where
    (path / ".metadata").write_bytes(pickle.dumps(found, protocol=3))
    return path


def test_chunks_of_equal_hash(tmp_path: Path) -> None:
    chunks = [chunk((0, 0), (0, 0))] * 5000
    path = of_chunks(tmp_path, (4, 0), chunks, colliding_sizes(5000))
    with in_time(), pytest.raises(CheckpointError, match="places made to have one hash"):
        read_metadata(path)


def test_many_chunks_side_by_side(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A chunk is not looked for among all others when each of them is read."""
    monkeypatch.delattr(SafeReader, "_sizes")
    path = of_chunks(tmp_path, (2, 300), [chunk((0, n), (2, 1)) for n in range(300)])
    assert verify(path).ok
    assert compare(path, path).equal
    assert [row.chunks for row in inspect(path).rows] == [300]


def test_chunks_that_are_all_open_at_once() -> None:
    """Along rows, of which each column has a long chunk that begins elsewhere, and two short ones around it."""
    count, found = 4000, []
    for col in range(count):
        found += [
            chunk((col, col), (count, 1)), chunk((0, col), (col, 1)), chunk((count + col, col), (count - col, 1)),
        ]  # fmt: skip
    with in_time():
        assert uncovered((2 * count, count), found) is None
        found[0] = chunk((count, 0), (count, 1))
        assert "chunks overlap" in str(uncovered((2 * count, count), found))


def test_overlaps_of_any_kind_are_found() -> None:
    """Each of all ways to cover a small box by as many elements as it has, compared with counting them."""
    boxes = [
        chunk((r, c), (m, n)) for r in range(3) for c in range(2) for m in range(1, 4 - r) for n in range(1, 3 - c)
    ]
    tried = 0
    for chosen in itertools.chain.from_iterable(itertools.combinations_with_replacement(boxes, k) for k in (1, 2, 3)):
        count = torch.zeros(3, 2, dtype=torch.int64)
        for box in chosen:
            count[box.offsets[0] : box.offsets[0] + box.sizes[0], box.offsets[1] : box.offsets[1] + box.sizes[1]] += 1
        tried += count.sum() == 6
        assert (uncovered((3, 2), chosen) is None) == bool((count == 1).all()), chosen
    assert tried > 100


def test_a_long_name_for_each_piece(tmp_path: Path) -> None:
    path = of_chunks(tmp_path, (2, 2000), [chunk((0, n), (2, 1)) for n in range(2000)])
    content, short = (path / ".metadata").read_bytes(), b"X" + struct.pack("<I", 11) + b"data.distcp"
    assert content.count(short) == 1, "the name is no longer shared"
    (path / ".metadata").write_bytes(
        content.replace(short, b"X" + struct.pack("<I", 1_000_000) + b"a/" * 499_999 + b"ab")
    )
    with in_time(), pytest.raises(CheckpointError, match="not inside the directory"):
        read_metadata(path)


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
        lambda: inspect(forged),
    ]
    for call in calls:
        with pytest.raises(CheckpointError, match=said):
            call()
    assert re.search(said, "".join(verify(forged).problems))


def test_links_that_a_manifest_names(forged: Path, tmp_path: Path) -> None:
    """The length of a file elsewhere is not told."""
    (tmp_path / "secret").write_bytes(bytes(12345))
    (forged / "link").symlink_to(tmp_path / "secret")
    (forged / "folder").symlink_to(tmp_path)
    (forged / "loop").symlink_to("loop")
    entry = {"bytes": 1, "xxh3_128": "0" * 32}
    names = ("link", "folder/secret", "loop", "loop/x", "gone")
    content = {"quantshard": 1, "files": dict.fromkeys(names, entry), "world_size": 1, "torch": "2", "saved_at": "x"}
    (forged / "manifest.json").write_text(json.dumps(content))
    problems = manifest.problems(forged)
    assert "12345" not in "".join(problems)
    for name, said in zip(names, ("is a link", "link out of", "is a link", "link out of", "is missing"), strict=True):
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
        inspect(tmp_path / "x.safetensors")


def test_empty_weights_are_shown(tmp_path: Path) -> None:
    entry = {"dtype": "F8_E4M3", "shape": [2**20, 0], "data_offsets": [0, 0]}
    scale = {"dtype": "F32", "shape": [], "data_offsets": [0, 4]}
    (tmp_path / "x.safetensors").write_bytes(safetensors({"l.weight": entry, "l.weight_scale": scale}, b"\0\0\x80?"))
    with in_time():
        (row,) = inspect(tmp_path / "x.safetensors").rows
    assert (row.shape, row.codes) == ((2**20, 0), None)
