"""Storage of checkpoints: a local folder, or a remote place that fsspec reaches by a URL.

Both classes have the file operations that quantshard needs and the interface of DCP's writer. Only local folders can be
renamed atomically. Transient errors of a remote store are retried by its client (s3fs, gcsfs, adlfs).
"""

from __future__ import annotations

import errno
import functools
import io
import os
import re
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePath
from typing import Any, BinaryIO, TypeVar, cast

from fsspec.core import url_to_fs
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemBase

from quantshard.errors import CheckpointError, ConfigurationError, QuantshardError

Path_ = str | os.PathLike[str]
F = TypeVar("F", bound=Callable[..., Any])

_ERRNO = {FileNotFoundError: errno.ENOENT, PermissionError: errno.EACCES, FileExistsError: errno.EEXIST}


_BLOB = re.compile(r"\.\./\.\./blobs/([0-9a-f]{40,64})")
"""Target of a link in the Hugging Face cache: from snapshots/REVISION/FILE to blobs/HASH."""


def open_regular(path: Path_, *, limit: int | None = None, follow: bool = False) -> BinaryIO:
    """Open a regular file of up to `limit` bytes for reading, or raise an OSError whose `strerror` gives the reason.
    `follow`: follow links, as for a path that the user named."""
    real_path, size = _regular(path, follow)
    if limit is not None and size > limit:
        raise OSError(errno.EFBIG, f"it has {size} bytes, and at most {limit} are read", path)
    no_follow = 0 if follow else getattr(os, "O_NOFOLLOW", 0)  # the file could have been replaced by a link
    return open(real_path, "rb", opener=lambda name, flags: os.open(name, flags | no_follow))


def regular_size(path: Path_) -> int:
    return _regular(path, follow=False)[1]


def _regular(path: Path_, follow: bool) -> tuple[str, int]:
    real_path = os.fspath(path) if follow else _blob(os.fspath(path)) or os.fspath(path)
    status = os.stat(real_path, follow_symlinks=follow)
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
    if stat.S_ISLNK(status.st_mode):
        raise OSError(errno.ELOOP, "it is a link, and links are not followed here", path)
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "it is no regular file but a pipe, a device or a socket", path)
    return real_path, status.st_size


def _blob(place: str) -> str | None:
    """Return the file that a link in the Hugging Face hub cache stands for, or None for all other paths."""
    if not os.path.islink(place):
        return None
    match = _BLOB.fullmatch(os.readlink(place).replace(os.sep, "/"))
    snapshots = os.path.dirname(os.path.dirname(os.path.abspath(place)))
    if match is None or os.path.basename(snapshots) != "snapshots":
        return None
    blobs = os.path.join(os.path.dirname(snapshots), "blobs")
    return None if os.path.islink(blobs) else os.path.join(blobs, match[1])


class LocalStore(FileSystem):
    """A folder on a local or mounted file system. Only regular files are read."""

    renames = True
    """Whether renaming a folder is atomic."""

    @contextmanager
    def create_stream(self, path: Path_, mode: str) -> Iterator[io.IOBase]:
        with open_regular(path) if mode == "rb" else super().create_stream(path, mode) as stream:
            yield cast(io.IOBase, stream)

    def join(self, path: Path_, name: str) -> str:
        return os.path.join(os.fspath(path), name)

    def parent(self, path: Path_) -> str:
        return os.path.dirname(os.path.abspath(os.fspath(path)))

    def names(self, path: Path_) -> list[str]:
        """The sorted entries of a folder; empty if the folder does not exist."""
        try:
            return sorted(os.listdir(path))
        except FileNotFoundError:
            return []

    def is_file(self, path: Path_) -> bool:
        try:
            return regular_size(path) >= 0
        except OSError:
            return False

    size = staticmethod(regular_size)

    def read(self, path: Path_, limit: int) -> bytes:
        with open_regular(path, limit=limit) as file:
            return file.read(limit)

    def read_range(self, path: Path_, start: int, stop: int) -> bytes:
        with open_regular(path) as file:
            file.seek(start)
            return file.read(stop - start)

    def write(self, path: Path_, content: bytes) -> None:
        """Write or replace a file atomically and durably. A link is replaced, not followed."""
        new = Path(f"{os.fspath(path)}.tmp")
        new.unlink(missing_ok=True)
        with open(new, "xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(new, path)

    def remove(self, path: Path_) -> None:
        """Remove a folder and its content; a symbolic link is removed instead of its target."""
        if os.path.islink(path):
            os.unlink(path)
        else:
            shutil.rmtree(path)

    def make(self, path: Path_) -> None:
        """Create a folder and its parents, and make them durable."""
        folder = os.path.abspath(os.fspath(path))
        if not os.path.isdir(folder):
            if (parent := os.path.dirname(folder)) != folder:
                self.make(parent)
            self.mkdir(Path(folder))
            self.sync(os.path.dirname(folder))

    def sync(self, path: Path_) -> None:
        """Make the entries of a folder durable, if the platform can open folders."""
        if os.name == "nt":
            return
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def why(error: BaseException) -> str:
    """The reason of an error, without errno and path. Remote clients often set no `strerror`."""
    words = error.strerror if isinstance(error, OSError) else None
    return words or (str(error).strip() or type(error).__name__).splitlines()[0]


@contextmanager
def _os_errors(path: Path_) -> Iterator[None]:
    try:
        yield
    except QuantshardError:
        raise
    except Exception as error:
        if isinstance(error, OSError) and error.strerror and error.filename:
            raise
        numbers = (number for kind, number in _ERRNO.items() if isinstance(error, kind))
        number = next(numbers, getattr(error, "errno", None) or errno.EIO)
        reason = os.strerror(number) if number == errno.ENOENT else why(error)
        raise OSError(number, reason, os.fspath(path)) from error


def _remote(method: F) -> F:
    """Decorate a method on a remote path: it raises only OSErrors, and drops cached listings of what others write."""

    @functools.wraps(method)
    def call(self: FsspecStore, path: Path_, *args: Any) -> Any:
        with _os_errors(path):
            self.fs.invalidate_cache()
            return method(self, os.fspath(path), *args)

    return call  # type: ignore[return-value]


class FsspecStore(FileSystemBase):
    """A remote place behind a URL, such as s3://bucket/run, with the operations and OSErrors of `LocalStore`."""

    renames = False

    def __init__(self, url: str) -> None:
        try:
            self.fs: Any = url_to_fs(url)[0]
        except Exception as error:  # fsspec's backends raise their own classes
            raise CheckpointError(f"{url} cannot be reached by fsspec: {why(error)}") from error

    @contextmanager
    def create_stream(self, path: Path_, mode: str) -> Iterator[io.IOBase]:
        # an error of the client inside the context becomes an OSError too
        with _os_errors(path), self.fs.open(os.fspath(path), mode) as stream:
            yield stream

    def init_path(self, path: Path_) -> str:
        return os.fspath(path)

    @_remote
    def rename(self, path: Path_, new_path: Path_) -> None:
        self.fs.mv(path, os.fspath(new_path))

    @_remote
    def make(self, path: Path_) -> None:
        self.fs.makedirs(path, exist_ok=True)

    mkdir = make

    @_remote
    def exists(self, path: Path_) -> bool:
        return self._kind(path) is not None

    @_remote
    def rm_file(self, path: Path_) -> None:
        self.fs.rm_file(path)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Path_) -> bool:
        return "://" in os.fspath(checkpoint_id)

    def _kind(self, path: Path_) -> str | None:
        """ "file", "directory" or None for nothing. Unlike fsspec's `isfile`, errors of the store are raised."""
        try:
            return str(self.fs.info(path)["type"])
        except (FileNotFoundError, NotADirectoryError):
            return None

    def join(self, path: Path_, name: str) -> str:
        return f"{os.fspath(path).rstrip('/')}/{name}"

    def concat_path(self, path: Path_, suffix: str) -> str:
        return self.join(path, suffix)

    def parent(self, path: Path_) -> str:
        return os.fspath(path).rstrip("/").rpartition("/")[0]

    @_remote
    def names(self, path: Path_) -> list[str]:
        try:
            entries = self.fs.ls(path, detail=False)
        except FileNotFoundError:
            return []
        return sorted(entry.rstrip("/").rpartition("/")[2] for entry in entries)

    @_remote
    def is_file(self, path: Path_) -> bool:
        return self._kind(path) == "file"

    @_remote
    def size(self, path: Path_) -> int:
        return int(self.fs.size(path))

    @_remote
    def read(self, path: Path_, limit: int) -> bytes:
        length = int(self.fs.size(path) or 0)
        if length > limit:
            raise OSError(errno.EFBIG, f"it has {length} bytes, and at most {limit} are read", path)
        return bytes(self.fs.cat_file(path))

    @_remote
    def read_range(self, path: Path_, start: int, stop: int) -> bytes:
        """The bytes of a file from `start` up to `stop`, or to its end, also if the server ignores the range."""
        data = bytes(self.fs.cat_file(path, start=start, end=stop))
        return data[start:stop] if len(data) > stop - start else data

    @_remote
    def write(self, path: Path_, content: bytes) -> None:
        self.fs.pipe_file(path, content)

    @_remote
    def remove(self, path: Path_) -> None:
        self.fs.rm(path, recursive=True)


def is_inside(name: object) -> bool:
    """Whether a name is a plain file name, without a path, on every platform."""
    if type(name) is not str or not name.isprintable():
        return False
    return name not in ("", ".", "..") and not {"/", "\\", ":"}.intersection(name)


Store = LocalStore | FsspecStore


def locate(path: Path_) -> tuple[Store, str]:
    if (local_path := _local_path(path)) is not None:
        return LocalStore(), local_path
    if isinstance(path, PurePath):
        raise ConfigurationError(f"{path} is a URL that pathlib changed; pass it as a string")
    return FsspecStore(os.fspath(path)), os.fspath(path)


def is_taken(path: Path_) -> bool:
    """Whether a file, a folder or a symbolic link (even a dangling one) exists at a path or URL."""
    store, store_path = locate(path)
    try:
        return os.path.lexists(store_path) if isinstance(store, LocalStore) else store.exists(store_path)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be reached ({why(error)}); name another place") from error


def is_local(path: Path_) -> bool:
    """Whether a path is on a local file system, judging by its name only; no store is accessed."""
    return _local_path(path) is not None


def local(path: Path_, what: str) -> Path:
    """A local path; the URL of a remote store raises. `what`: the name of the argument in the error."""
    if (local_path := _local_path(path)) is None:
        raise ConfigurationError(f"{path}: {what} cannot be behind a URL; name a path on this machine")
    return Path(local_path)


def _local_path(path: Path_) -> str | None:
    """The path of a local file or folder, without file://; None for the URL of a remote store."""
    text = os.fspath(path)
    for scheme in ("file://", "local://"):
        if text.startswith(scheme):
            return text.removeprefix(scheme)
    # pathlib turns s3://bucket into s3:/bucket
    is_url = re.match(r"[a-z][a-z0-9+.-]+:/", text) if isinstance(path, PurePath) else "://" in text
    return None if is_url else text


_watches: list[Any] = []


@contextmanager
def watch_transfers(watch: Any) -> Iterator[None]:
    """In the context, let any thread call `watch.expect(count)` before and `watch.moved(count)` after bytes move."""
    _watches.append(watch)
    try:
        yield
    finally:
        _watches.remove(watch)


def expect_transfer(count: int) -> None:
    for watch in _watches:
        watch.expect(count)


def report_transfer(count: int) -> None:
    for watch in _watches:
        watch.moved(count)
