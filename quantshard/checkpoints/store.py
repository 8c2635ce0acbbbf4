"""Where checkpoints lie: a folder of this machine, or what fsspec reaches by a URL.

Both are as much of a file system as we need, and what DCP's writer takes for one. They differ in one fact that matters:
whether a folder can be renamed in one move, which is how a checkpoint is committed where it can.
"""

from __future__ import annotations

import io
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any

from fsspec.core import url_to_fs
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemBase

Path_ = str | os.PathLike[str]

_HERE = ("file://", "local://")


class LocalStore(FileSystem):
    """A folder on a file system of this machine, or one that it has mounted."""

    renames = True
    """Whether a folder is renamed in one move."""

    def join(self, path: Path_, name: str) -> str:
        """The path of an entry of a folder."""
        return os.path.join(os.fspath(path), name)

    def parent(self, path: Path_) -> str:
        """The folder that a path is in."""
        return os.path.dirname(os.path.abspath(os.fspath(path)))

    def names(self, path: Path_) -> list[str]:
        """The entries of a folder, in order; none if it does not exist."""
        try:
            return sorted(os.listdir(path))
        except FileNotFoundError:
            return []

    def files(self, path: Path_) -> list[str]:
        """All files below a folder, by their paths within it."""
        return [file.relative_to(path).as_posix() for file in Path(path).rglob("*") if not file.is_dir()]

    def is_file(self, path: Path_) -> bool:
        """True for a file that exists."""
        return os.path.isfile(path)

    def leads_out(self, path: Path_, folder: Path_) -> bool:
        """True if links make of a path in a folder one outside."""
        return not Path(path).resolve().is_relative_to(Path(folder).resolve())

    def size(self, path: Path_) -> int:
        """The length of a file."""
        return os.stat(path).st_size

    def read(self, path: Path_) -> bytes:
        """The content of a file."""
        return Path(path).read_bytes()

    def write(self, path: Path_, content: bytes) -> None:
        """Write a file, durably."""
        with open(path, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())

    def remove(self, path: Path_) -> None:
        """Remove a folder with all that is in it."""
        shutil.rmtree(path)

    def sync(self, path: Path_) -> None:
        """Make a folder's entries durable, where a folder can be opened."""
        if os.name == "nt":
            return
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


class FsspecStore(FileSystemBase):
    """A place behind a URL, such as s3://bucket/run or memory://run."""

    renames = False

    def __init__(self, url: str) -> None:
        self.fs: Any = url_to_fs(url)[0]

    # What DCP's writer asks for

    @contextmanager
    def create_stream(self, path: Path_, mode: str) -> Iterator[io.IOBase]:
        """A file, open while the context lasts."""
        with self.fs.open(os.fspath(path), mode) as stream:
            yield stream

    def concat_path(self, path: Path_, suffix: str) -> str:
        """The path of an entry of a folder."""
        return self.join(path, suffix)

    def init_path(self, path: Path_) -> str:
        """The path as it is."""
        return os.fspath(path)

    def rename(self, path: Path_, new_path: Path_) -> None:
        """Rename a file; not in one move."""
        self.fs.mv(os.fspath(path), os.fspath(new_path))

    def mkdir(self, path: Path_) -> None:
        """Make a folder, where the place has such a thing."""
        self.fs.makedirs(os.fspath(path), exist_ok=True)

    def exists(self, path: Path_) -> bool:
        """True if there is a file or folder."""
        return bool(self.fs.exists(os.fspath(path)))

    def rm_file(self, path: Path_) -> None:
        """Remove a file."""
        self.fs.rm_file(os.fspath(path))

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Path_) -> bool:
        """True for a URL."""
        return "://" in os.fspath(checkpoint_id)

    # What we ask for

    def join(self, path: Path_, name: str) -> str:
        """The path of an entry of a folder."""
        return f"{os.fspath(path).rstrip('/')}/{name}"

    def parent(self, path: Path_) -> str:
        """The folder that a path is in."""
        return os.fspath(path).rstrip("/").rpartition("/")[0]

    def names(self, path: Path_) -> list[str]:
        """The entries of a folder, in order; none if it does not exist."""
        self.fs.invalidate_cache()
        try:
            found = self.fs.ls(os.fspath(path), detail=False)
        except FileNotFoundError:
            return []
        return sorted(entry.rstrip("/").rpartition("/")[2] for entry in found)

    def files(self, path: Path_) -> list[str]:
        """All files below a folder, by their paths within it."""
        self.fs.invalidate_cache()
        root = url_to_fs(os.fspath(path))[1].rstrip("/") + "/"
        return [file.removeprefix(root) for file in self.fs.find(os.fspath(path))]

    def leads_out(self, path: Path_, folder: Path_) -> bool:
        """False: there are no links."""
        return False

    def is_file(self, path: Path_) -> bool:
        """True for a file that exists."""
        return bool(self.fs.isfile(os.fspath(path)))

    def size(self, path: Path_) -> int:
        """The length of a file."""
        return int(self.fs.size(os.fspath(path)))

    def read(self, path: Path_) -> bytes:
        """The content of a file."""
        return bytes(self.fs.cat_file(os.fspath(path)))

    def write(self, path: Path_, content: bytes) -> None:
        """Write a file; durable when the place says that it is written."""
        with self.fs.open(os.fspath(path), "wb") as file:
            file.write(content)

    def remove(self, path: Path_) -> None:
        """Remove a folder with all that is in it."""
        self.fs.rm(os.fspath(path), recursive=True)

    def sync(self, path: Path_) -> None:
        """Nothing: there are no folders to make durable."""


def is_inside(name: object) -> bool:
    """True for the name of a file below a folder: a relative path of plain parts, the same on every system."""
    if type(name) is not str or any(c in name for c in "\\:\0\n\r"):
        return False
    parts = PurePosixPath(name).parts
    return bool(parts) and "/".join(parts) == name and not {".", ".."} & set(parts) and not name.startswith("/")


Store = LocalStore | FsspecStore


def locate(path: Path_) -> tuple[Store, str]:
    """The store that a path or URL is in, and what to call the path there."""
    text = os.fspath(path)
    for scheme in _HERE:
        if text.startswith(scheme):
            return LocalStore(), text.removeprefix(scheme)
    return (FsspecStore(text), text) if "://" in text else (LocalStore(), text)
