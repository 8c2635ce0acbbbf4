"""Reads DCP's metadata, a pickle, as an untrusted file. No other module reads `.metadata`.

`torch.distributed.checkpoint` unpickles `.metadata` with `pickle.load`, which executes what the file contains. Here the
file becomes records (`pickles`), which are checked field by field, against each other and against the files, before
DCP's classes are built. File names cannot leave the directory, the chunks of a tensor cover it exactly once, and no
tensor is larger than its stored bytes, so allocations are bounded by the size of the files.
"""

from __future__ import annotations

import hashlib
import math
import secrets
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from quantshard import private_torch
from quantshard.checkpoints.disk import manifest
from quantshard.checkpoints.disk.manifest import METADATA_FILE, Manifest
from quantshard.checkpoints.disk.store import Path_, Store, is_inside, locate, why
from quantshard.checkpoints.untrusted import pickles
from quantshard.checkpoints.untrusted.entries import DTYPES, NO_TENSORS, is_shape, size_of
from quantshard.checkpoints.untrusted.pickles import PickleRecord
from quantshard.errors import CheckpointError
from quantshard.read_limits import FILE_BYTES, METADATA_BYTES_PER_CONTAINER

_MODULE = "torch.distributed.checkpoint.metadata."
_METADATA, _TENSOR, _BYTES, _CHUNK, _PROPERTIES, _INDEX, _META, _MEMORY_FORMAT = (
    f"{_MODULE}{name}"
    for name in (
        "Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata", "TensorProperties",
        "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING",
    )
)  # fmt: skip
_INFO = "torch.distributed.checkpoint.filesystem._StorageInfo"
_LAYOUT = "torch.serialization._get_layout"
_PATHS = {f"pathlib.{local}{kind}Path" for local in ("", "_local.") for kind in ("Posix", "Windows")}
"""Classes of paths (Python 3.13 writes the second module); the path of the original save is ignored."""

_NAMES = {
    _METADATA, _TENSOR, _BYTES, _CHUNK, _PROPERTIES, _INDEX, _META, _MEMORY_FORMAT, _INFO, _LAYOUT, "torch.Size",
    *_PATHS, *DTYPES,
}  # fmt: skip
# Largest depth of a nested state dict.
_PATH_PARTS = 64
_PRIME = (1 << 127) - 1


class NoMetadataError(CheckpointError):
    """The checkpoint does not exist or is incomplete."""


class _MetadataError(ValueError):
    """An error in the metadata; its text follows ".metadata cannot be read: "."""


class _MetadataFileError(_MetadataError):
    """An error in a file that the metadata name."""

    def __init__(self, name: str, what: str) -> None:
        super().__init__(f"its file {_shown(name)} {what}")
        self.name = name


def read_metadata(path: Path_, packed: bool = False) -> Metadata:
    """Read and validate the metadata of the checkpoint at `path` (a directory or URL), without executing anything.

    `packed`: tensors can take fewer bytes than their dtype implies, down to half a byte per element, as from libraries
    that save quantized tensors with their nominal dtype.

    Raises:
        CheckpointError: the metadata are missing, unreadable, name an unexpected class, or contradict themselves or the
            manifest; or files are missing, too short, or outside the directory.
    """
    store, folder = locate(path)
    whole, result = manifest.read_manifest(path), None
    try:
        content = _content(store, folder)
        if content is not None:
            _check_content(content, whole)
            result = _metadata(pickles.load_pickle(content, _NAMES, len(content) // METADATA_BYTES_PER_CONTAINER))
            _check_stored(result, file_sizes(path, result, whole), packed)
    except _MetadataFileError as error:
        assert result is not None
        raise CheckpointError(
            f"{path}: {error}; {_described(whole, result, error.name)}; restore that file, or choose another checkpoint"
        ) from error
    except (CheckpointError, _MetadataError, OSError) as error:
        reason = why(error) if isinstance(error, OSError) else error
        raise CheckpointError(f"{path}: its {METADATA_FILE} cannot be read: {reason}; choose another checkpoint") from (
            error
        )
    if result is None:
        raise NoMetadataError(f"{path} is not a complete checkpoint: {_why_none(store, folder)}")
    return result


def _content(store: Store, place: str) -> bytes | None:
    try:
        return store.read(store.join(place, METADATA_FILE), FILE_BYTES["metadata"])
    except (FileNotFoundError, NotADirectoryError):
        return None


def _check_content(content: bytes, whole: Manifest | None) -> None:
    """Compare the metadata with the manifest, because a changed byte could swap the locations of chunks."""
    if whole is None:
        return
    entry = whole.files.get(METADATA_FILE)
    if entry is None or (entry.bytes, entry.xxh3_128) != manifest.digest(content):
        raise _MetadataError(f"it is damaged: it is not the file that {manifest.MANIFEST} describes")


def _why_none(store: Store, place: str) -> str:
    """Explain why a place has no metadata; for a folder of checkpoints, suggest its last one."""
    try:
        if not store.exists(place):
            return "there is no such directory"
        # Listing names is cheap only in stores that can rename.
        for folder in (place, store.join(place, "checkpoints")) if store.renames else ():
            for name in reversed(store.names(folder)):
                inner = store.join(folder, name)
                if not name.startswith(".") and store.is_file(store.join(inner, METADATA_FILE)):
                    return f"it is a folder of checkpoints; name one of them, e.g. {inner}"
    except OSError:
        # A file, or a folder that cannot be listed.
        pass
    return f"it has no {METADATA_FILE}, which is written last; choose another"


def _described(whole: Manifest | None, metadata: Metadata, name: str) -> str:
    """Describe a file: its expected length, by the manifest or else by its pieces, and its entries."""
    pieces = [(index.fqn, info) for index, info in metadata.storage_data.items() if info.relative_path == name]
    end = max((info.offset + info.length for _, info in pieces), default=0)
    length = f"{end} bytes or more" if whole is None or name not in whole.files else f"{whole.files[name].bytes} bytes"
    keys = sorted({key for key, _ in pieces})
    more = f" and {len(keys) - 3} more" if len(keys) > 3 else ""
    return f"it should have {length}, of {', '.join(map(_shown, keys[:3]))}{more}"


def file_sizes(path: Path_, metadata: Metadata, whole: Manifest | None = None) -> dict[str, int]:
    """Sizes in bytes of the files that the metadata name, checked against the manifest."""
    store, folder = locate(path)
    sizes = {}
    for name in sorted({info.relative_path for info in metadata.storage_data.values()}):
        file = store.join(folder, name)
        if store.leads_out(file, folder):
            raise _MetadataFileError(name, "is a link out of the directory")
        try:
            sizes[name] = store.size(file)
        except OSError as error:
            problem = "is missing" if isinstance(error, FileNotFoundError) else f"cannot be read: {why(error)}"
            raise _MetadataFileError(name, problem) from error
        entry = None if whole is None else whole.files.get(name)
        if whole is not None and entry is None:
            raise _MetadataFileError(name, f"has {sizes[name]} bytes, and {manifest.MANIFEST} does not name it")
        if entry is not None and sizes[name] < entry.bytes:
            raise _MetadataFileError(name, f"is cut short: {sizes[name]} bytes of {entry.bytes}")
        if entry is not None and sizes[name] > entry.bytes:
            raise _MetadataFileError(name, f"has {sizes[name]} bytes, and {manifest.MANIFEST} says {entry.bytes}")
    return sizes


# Records to DCP's classes ---------------------------------------------------------------------------------------------


def _metadata(raw: object) -> Metadata:
    fields = _fields(raw, _METADATA, "state_dict_metadata", "planner_data", "storage_data", "storage_meta", "version")
    entries, storage = fields["state_dict_metadata"], fields["storage_data"]
    if type(entries) is not dict or type(storage) is not dict or not all(type(key) is str for key in entries):
        raise _MetadataError("it has no entries, or does not say where they are")
    if sum(_chunk_count(entry) for entry in entries.values()) != len(storage):
        raise _MetadataError("it has more or fewer pieces of entries than it says where they are")
    entries_by_key = {key: _entry(key, entry) for key, entry in entries.items()}
    pieces = [(_index(key), _info(value)) for key, value in storage.items()]
    # A file can choose the numbers of pieces so that their hashes collide.
    if pickles.has_many_equal(hash(index) for index, _ in pieces):
        raise _MetadataError("it has pieces at places made to have one hash, which would take hours to look up")
    info_of_piece = dict(pieces)
    if len(info_of_piece) != len(storage):
        raise _MetadataError("it says twice where one piece is")
    version = fields["version"]
    return Metadata(
        entries_by_key,
        planner_data=_planner_data(fields["planner_data"]),
        storage_data=info_of_piece,
        storage_meta=StorageMeta(),
        version=version if type(version) is str else None,
    )


def _chunk_count(entry: object) -> int:
    """Number of pieces of an entry.

    Counted before chunks are decoded, because many entries can refer to one long list.
    """
    state = entry.state if isinstance(entry, PickleRecord) and entry.name == _TENSOR else None
    chunks = state.get("chunks") if isinstance(state, dict) else None
    return len(chunks) if isinstance(chunks, list) else 1


def _fields(raw: object, name: str, *fields: str) -> Mapping[str, Any]:
    """Fields of a dataclass record; missing fields are None."""
    if type(raw) is not PickleRecord or raw.name != name or raw.args != ():
        raise _MetadataError(f"{_kind(raw)} stands where a {name.rpartition('.')[2]} should")
    state: Any = {} if raw.state is None else raw.state
    if type(state) is not dict or not set(state) <= set(fields):
        raise _MetadataError(f"a {name.rpartition('.')[2]} has other fields")
    return dict.fromkeys(fields) | state


def _kind(raw: object) -> str:
    return raw.name if isinstance(raw, PickleRecord) else f"a {type(raw).__name__}"


def _size(raw: object) -> torch.Size:
    try:
        return size_of(raw)
    except ValueError as error:
        raise _MetadataError(f"a size is {error}") from None


def _entry(key: str, raw: object) -> TensorStorageMetadata | BytesStorageMetadata:
    if type(raw) is PickleRecord and raw.name == _BYTES:
        _fields(raw, _BYTES)
        return BytesStorageMetadata()
    fields = _fields(raw, _TENSOR, "properties", "size", "chunks")
    size, chunks = _size(fields["size"]), []
    if not is_shape(size):
        raise _MetadataError(f"{_shown(key)} has the shape {list(size)}, which no tensor has")
    if type(fields["chunks"]) is not list:
        raise _MetadataError(f"{_shown(key)} has no list of chunks")
    for chunk in fields["chunks"]:
        chunk_fields = _fields(chunk, _CHUNK, "offsets", "sizes")
        chunks.append(ChunkStorageMetadata(_size(chunk_fields["offsets"]), _size(chunk_fields["sizes"])))
    properties = _properties(fields["properties"])
    if properties.dtype in NO_TENSORS:
        raise _MetadataError(f"{_shown(key)} is of {properties.dtype}, which is not read here")
    if problem := uncovered(size, chunks):
        raise _MetadataError(f"{_shown(key)} {list(size)}: {problem}")
    return TensorStorageMetadata(properties, size, chunks)


def _properties(raw: object) -> TensorProperties:
    """The dtype of a tensor. Strides, which torch 2.15 saves too, do not describe the files and are ignored."""
    state: Any = raw.state if isinstance(raw, PickleRecord) and raw.name == _PROPERTIES and raw.args == () else None
    is_known = isinstance(state, tuple) and (len(state) == 5 or (len(state) == 6 and _are_strides(state[5])))
    if not is_known or type(state[0]) is not PickleRecord or state[0].name not in DTYPES:
        raise _MetadataError(f"{_kind(raw)} stands where a tensor's dtype should")
    layout = state[1]
    if type(layout) is not PickleRecord or layout.name != _LAYOUT or layout.args != ("torch.strided",):
        raise _MetadataError("a tensor is sparse")
    return TensorProperties(dtype=DTYPES[state[0].name])


def _are_strides(raw: object) -> bool:
    return raw is None or (type(raw) is tuple and all(type(stride) is int for stride in raw))


def _index(raw: object) -> MetadataIndex:
    fields = _fields(raw, _INDEX, "fqn", "offset", "index")
    index, offset = fields["index"], fields["offset"]
    if type(fields["fqn"]) is not str or type(index) not in (int, type(None)):
        raise _MetadataError("a piece has no name")
    return MetadataIndex(fields["fqn"], None if offset is None else _size(offset), index)


def _info(raw: object) -> Any:
    fields = _fields(raw, _INFO, "relative_path", "offset", "length", "transform_descriptors")
    name, offset, length = fields["relative_path"], fields["offset"], fields["length"]
    if not is_inside(name):
        raise _MetadataError(f"it names the file {_shown(name)}, which is not inside the directory")
    if not all(type(value) is int and 0 <= value < 1 << 62 for value in (offset, length)):
        raise _MetadataError("a piece has no place in its file")
    if fields["transform_descriptors"]:
        raise _MetadataError("its files are compressed by an extension of DCP, which is not supported here")
    return private_torch.storage_info(name, offset, length)


def _planner_data(raw: object) -> dict[str, tuple[str | int, ...]] | None:
    """Path of each entry in the nested state dict."""
    if raw is None:
        return None
    if type(raw) is not dict:
        raise _MetadataError("its planner data are no dict")
    for key, parts in raw.items():
        if type(key) is not str or type(parts) is not tuple or len(parts) > _PATH_PARTS:
            raise _MetadataError("its planner data do not say where entries stand")
        if not all(type(part) in (str, int) for part in parts):
            raise _MetadataError(f"its planner data do not say where {_shown(key)} stands")
    return raw


def _shown(value: object) -> str:
    text = repr(value) if type(value) is str else f"a {type(value).__name__}"
    return text if len(text) <= 120 else text[:117] + "..."


# Consistency with the files -------------------------------------------------------------------------------------------


def uncovered(size: Sequence[int], chunks: Iterable[ChunkStorageMetadata]) -> str | None:
    """Explain why chunks do not cover a tensor exactly once; None if they do. Time is linear in their number."""
    covered, boxes = 0, []
    for chunk in chunks:
        if not len(chunk.offsets) == len(chunk.sizes) == len(size):
            return "its chunks have other dims"
        if any(start + n > length for start, n, length in zip(chunk.offsets, chunk.sizes, size, strict=True)):
            return f"a chunk of {list(chunk.sizes)} at {list(chunk.offsets)} is not inside it"
        if elements := math.prod(chunk.sizes):
            covered += elements
            boxes.append((tuple(chunk.offsets), tuple(chunk.sizes)))
    if covered != math.prod(size):
        return f"its shards hold {covered} of its {math.prod(size)} elements"
    if len(boxes) > 1 and _overlap(size, boxes):
        return f"its {len(boxes)} chunks overlap"
    return None


def _overlap(size: Sequence[int], boxes: list[tuple[tuple[int, ...], tuple[int, ...]]]) -> bool:
    """Whether boxes inside `size`, with as many elements in total, fail to cover each element once.

    Each row, column and so on gets a random weight; the weight of an element is the product over its dims. If boxes
    cover each element once, their weights add up to the total weight. Modulo a 127-bit prime, other boxes reach the
    total by chance once in 2**120 times.

    The sum of weights from 0 to a border is drawn directly, by a hash with a secret key, so that no file can be crafted
    to match.
    """
    key = secrets.token_bytes(32)

    def prefix_weight(dim: int, border: int) -> int:
        text = b"%d:%d" % (dim, border)
        return int.from_bytes(hashlib.blake2b(text, key=key, digest_size=24).digest(), "little") % _PRIME

    def weight(offsets: Sequence[int], sizes: Sequence[int]) -> int:
        product = 1
        for dim, (start, length) in enumerate(zip(offsets, sizes, strict=True)):
            product = product * (prefix_weight(dim, start + length) - prefix_weight(dim, start)) % _PRIME
        return product

    return (sum(weight(*box) for box in boxes) - weight([0] * len(size), size)) % _PRIME != 0


def _check_stored(metadata: Metadata, sizes: Mapping[str, int], packed: bool) -> None:
    """Check that every piece has a range of its own, inside its file and large enough."""
    info_of_piece, ends = metadata.storage_data, dict.fromkeys(sizes, 0)
    for key, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, BytesStorageMetadata):
            if MetadataIndex(key) not in info_of_piece:
                raise _MetadataError(f"it does not say where {_shown(key)} is")
            continue
        for chunk in entry.chunks:
            info = info_of_piece.get(MetadataIndex(key, chunk.offsets))
            elements = math.prod(chunk.sizes)
            minimum = elements // 2 if packed else elements * entry.properties.dtype.itemsize
            if info is None:
                raise _MetadataError(f"it does not say where the chunk of {_shown(key)} at {list(chunk.offsets)} is")
            if info.length < minimum:
                raise _MetadataError(
                    f"{_shown(key)}: a chunk of {list(chunk.sizes)} takes {minimum} bytes, and {info.length} are stored"
                )
    for info in sorted(info_of_piece.values(), key=lambda info: (info.relative_path, info.offset, info.length)):
        name = info.relative_path
        if info.offset < ends[name] and info.length:
            raise _MetadataError(f"two pieces lie in the same bytes of {_shown(name)}")
        ends[name] = max(ends[name], info.offset + info.length)
    for name, end in ends.items():
        if end > sizes[name]:
            raise _MetadataFileError(name, f"is cut short: {sizes[name]} bytes of {end}")
