"""The manifest of a checkpoint: its files with their lengths and checksums.

`manifest.json` is written last, after DCP's `.metadata`. So the manifest also marks a complete checkpoint in stores
that cannot rename folders. Checkpoints of plain `dcp.save` have no manifest, and can be loaded too.

    {"quantshard": 1, "files": {"__0_0.distcp": {"bytes": 4096, "xxh3_128": "9f0c..."}, ".metadata": {...}},
     "step": 50, "mesh": {"dp_shard": 2}, "recipe": "mxfp8", "world_size": 2, "torch": "2.13.0", "saved_at": "2026-...",
     "zero_centered": []}

Checksums are 128-bit XXH3 (Y. Collet). They detect damage at the speed of memory, but do not prevent forgery.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import xxhash

from quantshard.checkpoints.disk.store import Path_, expect_transfer, is_inside, locate, report_transfer, why
from quantshard.errors import CheckpointError
from quantshard.foreign import FILE_BYTES, json_object

MANIFEST, METADATA_FILE = "manifest.json", ".metadata"
VERSION = 1
"""The version of manifests that are written and read."""

_AT_ONCE = 1 << 22  # bytes read at a time
_HEX = re.compile(r"[0-9a-f]{32}")


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

    @property
    def bytes(self) -> int:
        """The total length of all files."""
        return sum(entry.bytes for entry in self.files.values())

    def to_json(self) -> str:
        """The text of `manifest.json`."""
        content = {"quantshard": VERSION, **asdict(self)}
        content["files"] = {name: asdict(entry) for name, entry in sorted(self.files.items())}
        return json.dumps(content, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str, where: str = MANIFEST) -> Manifest:
        """Parse the text of a manifest, which must be of this version. `where`: its path, for errors."""
        if not text:
            raise CheckpointError(f"{where} is empty: the save has not ended; choose another checkpoint")
        content = json_object(text.encode("utf-8", "surrogatepass"), f"{where} is damaged: it", CheckpointError)
        version = content.get("quantshard")
        if version != VERSION:
            raise CheckpointError(
                f"{where} has version {version!r:.80}, and this quantshard reads version {VERSION}; install another "
                "quantshard"
            )
        if wrong := _wrong_field(content):
            raise CheckpointError(f"{where} is damaged: {wrong}; choose another checkpoint")
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
    """The length and the checksum of a file's content."""
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
    """Read the manifest of the checkpoint in directory `path`; None if there is no manifest."""
    store, folder = locate(path)
    file = store.join(folder, MANIFEST)
    try:
        text = store.read(file, FILE_BYTES["manifest"]).decode("utf-8")
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{file} cannot be read ({why(error)}); choose another checkpoint") from error
    return Manifest.from_json(text, file)


def exists(path: Path_) -> bool:
    """Whether the checkpoint in directory `path` has a manifest, readable or not."""
    store, folder = locate(path)
    return store.is_file(store.join(folder, MANIFEST))


def problems(path: Path_, contents: bool = True) -> list[str]:
    """Describe each problem of the files of the checkpoint in directory `path`.

    Problems are missing files, wrong lengths and checksums, files that the manifest does not name, and an unreadable
    manifest. A checkpoint without a manifest has none. Every byte is read, or without `contents` only the manifest.
    """
    try:
        manifest = read_manifest(path)
    except CheckpointError as error:
        return [str(error)]
    if manifest is None:
        return []
    if contents:
        expect_transfer(manifest.bytes)
    store, folder = locate(path)
    results = (wrong_file(path, name, entry, contents) for name, entry in sorted(manifest.files.items()))
    lines = [wrong for wrong in results if wrong]
    try:
        unlisted = sorted(set(store.names(folder)) - manifest.files.keys() - {MANIFEST})
    except OSError as error:
        return [*lines, f"{path} cannot be listed ({why(error)})"]
    return lines + [f"{store.join(folder, name)} is not named in {MANIFEST}" for name in unlisted]


def wrong_file(path: Path_, name: str, entry: FileEntry, contents: bool = True) -> str | None:
    """Describe the problem of one file of a checkpoint, or return None.

    `contents`: also compare the checksum, which reads the file.
    """
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
