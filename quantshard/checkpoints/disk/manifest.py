"""The two files that describe a checkpoint: quantshard's `manifest.json` and DCP's `.metadata`.

`manifest.json`, written last, has the files with their lengths and 128-bit XXH3 checksums (Y. Collet), which detect
damage but no forgery. Checkpoints of plain `dcp.save` have no manifest, and can be loaded too.

`.metadata` is a pickle that anyone can have written. Only plain values and instances of DCP's classes are created from
it, and checked: file names cannot leave the directory, and no tensor is larger than its stored bytes.
"""

from __future__ import annotations

import io
import json
import math
import pickle
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import torch
import xxhash
from torch.distributed.checkpoint import metadata as dcp

from quantshard import private_torch
from quantshard.checkpoints.disk.store import Path_, expect_transfer, is_inside, locate, report_transfer, why
from quantshard.errors import CheckpointError, QuantshardError, printable

MANIFEST, METADATA_FILE = "manifest.json", ".metadata"
VERSION = 1

MANIFEST_BYTES, METADATA_BYTES = 16 << 20, 256 << 20
"""Maximum bytes of the two files: they have about 90 bytes per file, and 140 per chunk of a tensor."""

_AT_ONCE = 1 << 22  # bytes read at a time
_HEX = re.compile(r"[0-9a-f]{32}")


class DamagedError(CheckpointError):
    """A checkpoint is missing or incomplete, or its files cannot be read by any model; the next older one is tried."""


@dataclass(frozen=True)
class FileEntry:
    """A file's length in bytes, and the XXH3 of its content as 32 hexadecimal digits."""

    bytes: int
    xxh3_128: str


@dataclass(frozen=True)
class Manifest:
    """The content of `manifest.json`.

    `files`: entries by name, without the manifest itself.
    `step`, `mesh` (sizes by axis), `recipe`: facts of the run, or None if unknown. `saved_at`: time in ISO 8601, UTC.
    `zero_centered`: names of the normalization weights that are stored as gamma - 1; None if not recorded.
    """

    files: Mapping[str, FileEntry]
    world_size: int
    torch: str
    saved_at: str
    step: int | None = None
    mesh: Mapping[str, int] | None = None
    recipe: str | None = None
    zero_centered: list[str] | None = None

    def to_json(self) -> str:
        content = {"quantshard": VERSION, **asdict(self)}
        content["files"] = {name: asdict(entry) for name, entry in sorted(self.files.items())}
        return json.dumps(content, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str, where: str = MANIFEST) -> Manifest:
        """Parse the text of a manifest, which must be of this version. `where`: its path, for errors."""
        if not text:
            raise DamagedError(f"{where} is empty: the save has not ended; choose another checkpoint")
        try:
            content = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise DamagedError(f"{where} is damaged: it is not JSON: {why(error)}") from None
        if not isinstance(content, dict):
            raise DamagedError(f"{where} is damaged: it is not a JSON object")
        version = content.get("quantshard")
        if version != VERSION:
            raise DamagedError(f"{where} has version {version!r:.80}, not {VERSION}; use the quantshard that wrote it")
        if wrong := _wrong_field(content):
            raise DamagedError(f"{where} is damaged: {wrong}; choose another checkpoint")
        files = {name: FileEntry(entry["bytes"], entry["xxh3_128"]) for name, entry in content["files"].items()}
        rest: dict[str, Any] = {name: content.get(name) for name in _FIELDS}
        return cls(files, **rest)


_FIELDS: dict[str, tuple[type, ...]] = {
    "world_size": (int,),
    "torch": (str,),
    "saved_at": (str,),
    "step": (int, type(None)),
    "mesh": (dict, type(None)),
    "recipe": (str, type(None)),
    "zero_centered": (list, type(None)),
}


def _wrong_field(content: Mapping[str, Any]) -> str | None:
    """The first invalid field of a manifest, in words; None if all are valid."""
    for name, types in _FIELDS.items():
        if type(content.get(name)) not in types:
            return f"{name} is {content.get(name)!r:.80}"
    for axis, size in (content.get("mesh") or {}).items():
        if type(size) is not int:
            return f"mesh[{axis!r:.80}] is {size!r:.80}"
    files = content.get("files")
    if not isinstance(files, dict):
        return f"files is {files!r:.80}"
    for name, entry in files.items():
        if not is_inside(name) or name == MANIFEST:
            return f"it names the file {name!r:.200}, which is not inside the checkpoint"
        if not isinstance(entry, dict) or type(entry.get("bytes")) is not int or entry["bytes"] < 0:
            return f"the entry of {name!r:.200} has no length"
        if not isinstance(entry.get("xxh3_128"), str) or not _HEX.fullmatch(entry["xxh3_128"]):
            return f"the entry of {name!r:.200} has no checksum"
    return None


def digest(content: bytes) -> tuple[int, str]:
    return len(content), xxhash.xxh3_128(content).hexdigest()


def digest_of(path: Path_) -> tuple[int, str]:
    """The length and the checksum of a file, which is read in pieces."""
    digest, length = xxhash.xxh3_128(), 0
    store, store_path = locate(path)
    with store.create_stream(store_path, "rb") as file:
        while piece := file.read(_AT_ONCE):
            digest.update(piece)
            length += len(piece)
            report_transfer(len(piece))
    return length, digest.hexdigest()


def read_manifest(path: Path_) -> Manifest | None:
    store, folder = locate(path)
    file = store.join(folder, MANIFEST)
    try:
        text = store.read(file, MANIFEST_BYTES).decode("utf-8")
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise DamagedError(f"{file} cannot be read ({why(error)}); choose another checkpoint") from error
    return Manifest.from_json(text, file)


def exists(path: Path_) -> bool:
    store, folder = locate(path)
    return store.is_file(store.join(folder, MANIFEST))


def problems(path: Path_, contents: bool = True) -> list[str]:
    """Describe each problem of a checkpoint's files, by its manifest, if any. `contents`: read every byte."""
    try:
        manifest = read_manifest(path)
    except CheckpointError as error:
        return [str(error)]
    if manifest is None:
        return []
    if contents:
        expect_transfer(sum(entry.bytes for entry in manifest.files.values()))
    store, folder = locate(path)
    results = (wrong_file(path, name, entry, contents) for name, entry in sorted(manifest.files.items()))
    lines = [wrong for wrong in results if wrong]
    try:
        unlisted = sorted(set(store.names(folder)) - manifest.files.keys() - {MANIFEST})
    except OSError as error:
        return [*lines, f"{path} cannot be listed ({why(error)})"]
    return lines + [f"{store.join(folder, name)} is not named in {MANIFEST}" for name in unlisted]


def wrong_file(path: Path_, name: str, entry: FileEntry, contents: bool = True) -> str | None:
    """Describe the problem of one file of a checkpoint, or return None. `contents`: also read it for its checksum."""
    store, folder = locate(path)
    file = store.join(folder, name)
    try:
        length, digest = store.size(file), entry.xxh3_128
        if contents and length == entry.bytes:  # a wrong length is reported without reading the file
            length, digest = digest_of(file)
    except FileNotFoundError:
        return f"{file} is missing"
    except OSError as error:
        return f"{file} cannot be read ({why(error)})"
    if length != entry.bytes:
        return f"{file} has {length} bytes, and {MANIFEST} says {entry.bytes}"
    if digest != entry.xxh3_128:
        return f"{file} is damaged: its checksum is {digest}, and {MANIFEST} says {entry.xxh3_128}"
    return None


_MOST_DIMS, _MOST_ELEMENTS = 64, 1 << 62
_EMPTY_EXTENT = 1 << 24
"""Upper bound on the product of the nonzero dims of a tensor without elements."""

_DTYPES = {str(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)}
_NO_TENSORS = {dtype for name, dtype in _DTYPES.items() if re.fullmatch(r"torch\.(q\w+|u?int[1-7])", name)}
"""Dtypes that a plain copy of a tensor does not support: quantized integers, and integers below 8 bits."""


class _Properties:
    """Stands for TensorProperties, whose `__setstate__` fails for what another version of PyTorch saved."""

    def __setstate__(self, values: Any) -> None:
        self.values = values


_DCP = "torch.distributed.checkpoint."
_ENTRIES = "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata"
_CLASSES: dict[str, type] = {
    f"{_DCP}metadata.{name}": getattr(dcp, name) for name in ("Metadata", "MetadataIndex", "StorageMeta", *_ENTRIES)
}
_CLASSES[f"{_DCP}metadata.TensorProperties"] = _Properties
_CALLS = {
    f"{_DCP}metadata._MEM_FORMAT_ENCODING",
    "torch.serialization._get_layout",
    *(f"pathlib.{module}{kind}Path" for module in ("", "_local.") for kind in ("Posix", "Windows")),
}
"""The classes and functions in DCP's metadata. A call of a function becomes the tuple of its arguments."""


class _MetadataUnpickler(pickle._Unpickler):
    """Unpickles `.metadata`. It creates plain values and instances of DCP's classes, and calls nothing else."""

    # The memo of the unpickler in Python is a dict; in C it is an array as long as the file requests. BYTEARRAY8 is
    # removed: no other operation allocates memory before it reads the bytes that fill it.
    dispatch: ClassVar[Any] = {
        code: load for code, load in pickle._Unpickler.dispatch.items() if code != pickle.BYTEARRAY8[0]
    }

    def find_class(self, module: str, name: str) -> Any:
        # A pickle can set attributes of what is returned, so all classes and functions are new ones.
        full_name = f"{module}.{name}"
        if full_name in _CLASSES:
            return _factory(_CLASSES[full_name])
        if full_name == f"{_DCP}filesystem._StorageInfo":
            return _factory(type(private_torch.storage_info("", 0, 0)))  # raises if this PyTorch has no such class
        if full_name in _CALLS:
            return lambda *args: args
        if full_name in _DTYPES or full_name == "torch.Size":
            return _DTYPES.get(full_name, torch.Size)
        raise CheckpointError(f"it names {printable(full_name[:120])}, which no checkpoint needs; nothing was run")


def _factory(kind: type) -> type:
    return type(kind.__name__, (), {"__new__": lambda _: object.__new__(kind)})


def read_metadata(path: Path_, described: Manifest | None, packed: bool = False) -> dcp.Metadata:
    """Read and check a checkpoint's metadata, also against its manifest, if any. For `packed` see `SafeReader`."""
    store, folder = locate(path)
    what = f"its {METADATA_FILE} cannot be read: "
    try:
        content = store.read(store.join(folder, METADATA_FILE), METADATA_BYTES)
        if described is not None and described.files.get(METADATA_FILE) != FileEntry(*digest(content)):
            raise CheckpointError(f"it is damaged: it is not the file that {MANIFEST} describes")
        metadata, what = _unpickled(content), ""
        _check_pieces(metadata, _file_sizes(path, metadata, described), packed)
    except (FileNotFoundError, NotADirectoryError):
        raise DamagedError(f"{path} is not a complete checkpoint: it has no {METADATA_FILE}; choose another") from None
    except (CheckpointError, OSError) as error:
        reason = why(error) if isinstance(error, OSError) else error
        raise DamagedError(f"{path}: {what}{reason}; restore its files or choose another checkpoint") from error
    return metadata


def _unpickled(content: bytes) -> dcp.Metadata:
    try:
        metadata: dcp.Metadata = _MetadataUnpickler(io.BytesIO(content)).load()
        _check_types(metadata)
        return metadata
    except (QuantshardError, MemoryError):
        raise
    except Exception as error:  # pickle raises many kinds, and a class can lack any attribute
        raise CheckpointError(f"it is damaged ({type(error).__name__})") from error


def _check_types(metadata: dcp.Metadata) -> None:
    """Check everything that is read of the metadata, and replace `_Properties` by TensorProperties."""
    entries, paths = metadata.state_dict_metadata, metadata.planner_data
    if type(metadata) is not dcp.Metadata or {type(key) for key in entries} - {str}:
        raise CheckpointError("it has no entries")
    tensors = [entry for entry in entries.values() if type(entry) is dcp.TensorStorageMetadata]
    # Many entries could refer to one long list.
    if sum(len(entry.chunks) for entry in tensors) + len(entries) - len(tensors) != len(metadata.storage_data):
        raise CheckpointError("it has more or fewer pieces of entries than it says where they are")
    for key, entry in entries.items():
        if type(entry) is dcp.TensorStorageMetadata:
            _check_tensor_entry(key, entry)
        elif type(entry) is not dcp.BytesStorageMetadata:
            raise CheckpointError(f"{key!r:.120} is a {type(entry).__name__}")
    for index, location in metadata.storage_data.items():
        if type(index) is not dcp.MetadataIndex or type(location) is not private_torch.storage_info:
            raise CheckpointError("it does not say where entries are")
        if not is_inside(location.relative_path):
            raise CheckpointError(f"it names the file {location.relative_path!r:.120}, which is not in the directory")
        if not _are_counts((location.offset, location.length)):
            raise CheckpointError("a piece has no place in its file")
        if location.transform_descriptors:
            raise CheckpointError("its files are compressed by an extension of DCP, which is not supported here")
    for key, parts in ({} if paths is None else paths).items():
        if type(key) is not str or type(parts) is not tuple or {type(part) for part in parts} - {str, int}:
            raise CheckpointError("its planner data do not say where entries are")
    metadata.storage_meta = dcp.StorageMeta()


def _check_tensor_entry(key: str, entry: dcp.TensorStorageMetadata) -> None:
    size, elements, starts = entry.size, 0, set()
    # (dtype, layout, requires_grad, memory format, pinned), and from torch 2.15 the strides
    values = entry.properties.values  # type: ignore[attr-defined]
    if len(values) not in (5, 6) or not isinstance(values[0], torch.dtype) or values[1] != ("torch.strided",):
        raise CheckpointError(f"{key!r:.120} is sparse, or has no dtype")
    if values[0] in _NO_TENSORS or not is_shape(size):
        raise CheckpointError(f"{key!r:.120} is {values[0]} {list(size)}, which no tensor here is")
    entry.properties = dcp.TensorProperties(dtype=values[0])
    for chunk in entry.chunks:
        offsets, sizes = chunk.offsets, chunk.sizes
        is_chunk = type(chunk) is dcp.ChunkStorageMetadata and _are_counts(offsets) and _are_counts(sizes)
        if not is_chunk or any(start + n > end for start, n, end in zip(offsets, sizes, size, strict=True)):
            raise CheckpointError(f"{key!r:.120} {list(size)}: a chunk is not inside it")
        elements += sizes.numel()
        if sizes.numel() and offsets in starts:
            raise CheckpointError(f"{key!r:.120}: two chunks begin at {list(offsets)}")
        starts.add(offsets)
    if elements != size.numel():
        raise CheckpointError(f"{key!r:.120}: its chunks hold {elements} of its {size.numel()} elements")


def _are_counts(values: Any) -> bool:
    if not isinstance(values, tuple) or len(values) > _MOST_DIMS or not set(map(type, values)) <= {int}:
        return False
    return not values or (min(values) >= 0 and max(values) < _MOST_ELEMENTS)


def is_shape(value: Any) -> bool:
    """Whether sizes of any type are a tensor's shape; without elements, small enough to iterate over the other dims."""
    if not _are_counts(value):
        return False
    extent = math.prod(filter(None, value))
    return extent <= (_EMPTY_EXTENT if 0 in value else _MOST_ELEMENTS)


def _file_sizes(path: Path_, metadata: dcp.Metadata, described: Manifest | None) -> dict[str, int]:
    store, folder = locate(path)
    sizes = {}
    for name in sorted({location.relative_path for location in metadata.storage_data.values()}):
        if described is not None:
            if name not in described.files:
                raise CheckpointError(f"{MANIFEST} does not name its file {name}")
            if problem := wrong_file(path, name, described.files[name], contents=False):
                raise CheckpointError(problem)
        try:
            sizes[name] = store.size(store.join(folder, name))
        except OSError as error:
            problem = "is missing" if isinstance(error, FileNotFoundError) else f"cannot be read ({why(error)})"
            raise CheckpointError(f"its file {name} {problem}") from error
    return sizes


def _check_pieces(metadata: dcp.Metadata, sizes: Mapping[str, int], packed: bool) -> None:
    """Check that every piece has a range of its own, inside its file and large enough."""
    locations, ends = metadata.storage_data, dict.fromkeys(sizes, 0)
    for key, entry in metadata.state_dict_metadata.items():
        pieces: list[tuple[torch.Size | None, int]] = [(None, 0)]
        if isinstance(entry, dcp.TensorStorageMetadata):
            itemsize = 0.5 if packed else entry.properties.dtype.itemsize
            pieces = [(chunk.offsets, int(chunk.sizes.numel() * itemsize)) for chunk in entry.chunks]
        for offsets, minimum in pieces:
            location = locations.get(dcp.MetadataIndex(key, offsets))
            if location is None:
                raise CheckpointError(f"it does not say where {key!r:.120} is")
            if location.length < minimum:
                raise CheckpointError(f"{key!r:.120} takes {minimum} bytes, and {location.length} are stored")
    for location in sorted(locations.values(), key=lambda one: (one.relative_path, one.offset, one.length)):
        name, end = location.relative_path, location.offset + location.length
        if location.offset < ends[name] and location.length:
            raise CheckpointError(f"two pieces lie in the same bytes of {name}")
        ends[name] = max(ends[name], end)
        if end > sizes[name]:
            raise CheckpointError(f"its file {name} is cut short: {sizes[name]} bytes of {end}")
