"""The manifest of a checkpoint: which files it consists of, how long each is, and its checksum.

`manifest.json` is written last, after DCP's `.metadata`, so it is also the mark of a checkpoint that is whole where a
directory cannot be renamed into place. A checkpoint written by plain `dcp.save` has none and stays loadable.

    {"quantshard": 1, "files": {"__0_0.distcp": {"bytes": 4096, "xxh3_128": "9f0c..."}, ".metadata": {...}},
     "step": 50, "mesh": {"dp_shard": 2}, "recipe": "mxfp8", "world_size": 2, "torch": "2.13.0", "saved_at": "2026-...",
     "zero_centered": []}

Checksums are XXH3 of 128 bits (Y. Collet): they find damage, at the speed of memory, and are no proof against forgery.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import xxhash

from quantshard.checkpoints.disk import transfer
from quantshard.checkpoints.disk.store import Path_, is_inside, locate, why
from quantshard.errors import CheckpointError
from quantshard.foreign import json_object
from quantshard.read_limits import FILE_BYTES, TEXT_LENGTH

MANIFEST, METADATA_FILE = "manifest.json", ".metadata"
VERSION = 1
"""The version of the manifest that is written; a newer one is refused."""

_AT_ONCE = 1 << 22  # bytes read at a time
_HEX = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True)
class FileEntry:
    """One file: its length, and XXH3 of its content as 32 hexadecimal digits."""

    bytes: int
    xxh3_128: str


@dataclass(frozen=True)
class Manifest:
    """What `manifest.json` says.

    `files`: by name, relative to the checkpoint, with "/" between folders; the manifest itself is not among them.
    `step`, `mesh` (sizes by axis), `recipe`: of the run, where they were known. `saved_at`: ISO 8601, in UTC.
    `zero_centered`: names of the normalization weights that are stored as gamma - 1; None if it is not recorded.
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
        """The bytes of all files together."""
        return sum(entry.bytes for entry in self.files.values())

    def to_json(self) -> str:
        """The text of `manifest.json`."""
        content = {"quantshard": VERSION, **asdict(self)}
        content["files"] = {name: asdict(entry) for name, entry in sorted(self.files.items())}
        return json.dumps(content, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str, where: str = MANIFEST) -> Manifest:
        """Read the text of a manifest; `where`: its path, for the error.

        Raises:
            CheckpointError: it is damaged, or of a newer version, which is named by its number.
        """
        content = json_object(text.encode("utf-8", "surrogatepass"), f"{where} is damaged: it", CheckpointError)
        version = content.get("quantshard")
        if _is_count(version, VERSION + 1):
            raise CheckpointError(
                f"{where} is of version {version}, and this quantshard reads versions up to {VERSION}; install a newer "
                "quantshard"
            )
        if wrong := _wrong_field(content):
            raise CheckpointError(f"{where} is damaged: {wrong}; choose another checkpoint")
        files = {name: FileEntry(entry["bytes"], entry["xxh3_128"]) for name, entry in content["files"].items()}
        rest: dict[str, Any] = {name: content.get(name) for name in _FIELDS}
        return cls(files, **rest)


_MOST = {"world_size": 1 << 31, "step": 1 << 62}

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
    """What is wrong with the fields of a manifest; None if nothing is."""
    if not _is_count(content.get("quantshard"), least=1):
        return f"its version is {content.get('quantshard')!r:.80}, not a number"
    for name, types in _FIELDS.items():
        value = content.get(name)
        is_count = type(value) is not int or _is_count(value, most=_MOST.get(name, 0))
        is_text = type(value) is not str or len(value) <= TEXT_LENGTH
        if type(value) not in types or not is_count or not is_text:
            return f"{name} is {value!r:.80}"
    for axis, size in (content.get("mesh") or {}).items():
        if len(axis) > TEXT_LENGTH or not _is_count(size, most=_MOST["world_size"]):
            return f"mesh is {content['mesh']!r:.80}"
    for gamma in content.get("zero_centered") or ():
        if type(gamma) is not str or len(gamma) > TEXT_LENGTH:
            return f"zero_centered has {gamma!r:.80}"
    files = content.get("files")
    if not isinstance(files, dict):
        return f"files is {files!r:.80}"
    for name, entry in files.items():
        if not is_inside(name) or name == MANIFEST:
            return f"it names the file {name!r:.200}, which is not inside the checkpoint"
        if not isinstance(entry, dict) or not _is_count(entry.get("bytes")):
            return f"the entry of {name!r:.200} has no length"
        if not isinstance(entry.get("xxh3_128"), str) or not _HEX.fullmatch(entry["xxh3_128"]):
            return f"the entry of {name!r:.200} has no checksum"
    return None


def _is_count(value: object, least: int = 0, most: int = 1 << 62) -> bool:
    return type(value) is int and least <= value <= most


def digest(content: bytes) -> tuple[int, str]:
    """The length and the checksum of the content of a file."""
    return len(content), xxhash.xxh3_128(content).hexdigest()


def digest_of(path: Path_) -> tuple[int, str]:
    """The length and the checksum of a file, read in pieces.

    Raises:
        OSError: it cannot be read.
    """
    digest, length = xxhash.xxh3_128(), 0
    store, place = locate(path)
    with store.create_stream(place, "rb") as file:
        while piece := file.read(_AT_ONCE):
            digest.update(piece)
            length += len(piece)
            transfer.moved(len(piece))
    return length, digest.hexdigest()


def read_manifest(path: Path_) -> Manifest | None:
    """The manifest of the checkpoint in directory `path`; None if it has none.

    Raises:
        CheckpointError: it cannot be read, is damaged, or of a newer version.
    """
    store, folder = locate(path)
    file = store.join(folder, MANIFEST)
    try:
        text = store.read(file, FILE_BYTES["manifest"]).decode("utf-8")
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{file} cannot be read ({why(error)}); choose another checkpoint") from error
    return Manifest.from_json(text, file)


def problems(path: Path_, contents: bool = True) -> list[str]:
    """What is wrong with the files of the checkpoint in directory `path`, a line each. Reads every byte of it, or,
    without `contents`, the manifest alone.

    A missing file, a wrong length, a wrong checksum, a file that the manifest does not name, a manifest that cannot be
    read. Empty for a checkpoint without a manifest, of which nothing can be said.
    """
    try:
        manifest = read_manifest(path)
    except CheckpointError as error:
        return [str(error)]
    if manifest is None:
        return []
    if contents:
        transfer.expect(manifest.bytes)
    store, folder = locate(path)
    checked = (wrong_file(path, name, entry, contents) for name, entry in sorted(manifest.files.items()))
    found = [wrong for wrong in checked if wrong]
    try:
        unnamed = sorted(set(store.files(folder)) - manifest.files.keys() - {MANIFEST})
    except OSError as error:
        return [*found, f"{path} cannot be listed ({why(error)})"]
    return found + [f"{store.join(folder, name)} is not named in {MANIFEST}" for name in unnamed]


def wrong_file(path: Path_, name: str, entry: FileEntry, contents: bool = True) -> str | None:
    """What is wrong with one file of the checkpoint in `path`; None if nothing is. `contents`: whether it is read."""
    store, folder = locate(path)
    file = store.join(folder, name)
    try:
        if store.leads_out(file, folder):
            return f"{file} is a link out of the checkpoint"
        length, digest = store.size(file), entry.xxh3_128
        if contents and length == entry.bytes:  # else its content says no more
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
