"""Storage of checkpoints: a local folder, or a remote place that fsspec reaches by a URL.

Both classes implement the file operations that quantshard needs, and the interface of DCP's writer. They differ in
whether a folder can be renamed atomically, which is how a local checkpoint is committed.
"""

from __future__ import annotations

import errno
import functools
import io
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePath
from typing import Any, TypeVar, cast

from fsspec.core import url_to_fs
from fsspec.registry import available_protocols
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemBase

from quantshard.checkpoints.disk import retries
from quantshard.errors import CheckpointError, ConfigurationError, QuantshardError
from quantshard.foreign import open_regular, regular_content, regular_size
from quantshard.read_limits import NAME_LENGTH

Path_ = str | os.PathLike[str]
F = TypeVar("F", bound=Callable[..., Any])

_HERE = ("file://", "local://")
_COLLAPSED = re.compile(r"(?P<scheme>[a-z][a-z0-9+.-]+):/(?!/)(?P<rest>.*)", re.DOTALL)
"""A URL after pathlib has removed one of its slashes."""

_ERRNO = {FileNotFoundError: errno.ENOENT, PermissionError: errno.EACCES, FileExistsError: errno.EEXIST}


class LocalStore(FileSystem):
    """A folder on a local or mounted file system. Only regular files are read."""

    renames = True
    """Whether renaming a folder is atomic."""

    @contextmanager
    def create_stream(self, path: Path_, mode: str) -> Iterator[io.IOBase]:
        """Open a file for the duration of the context."""
        with open_regular(path) if mode == "rb" else super().create_stream(path, mode) as stream:
            yield cast(io.IOBase, stream)

    def join(self, path: Path_, name: str) -> str:
        """The path of entry `name` of a folder."""
        return os.path.join(os.fspath(path), name)

    def parent(self, path: Path_) -> str:
        """The folder that contains a path."""
        return os.path.dirname(os.path.abspath(os.fspath(path)))

    def names(self, path: Path_) -> list[str]:
        """The sorted entries of a folder; empty if the folder does not exist."""
        try:
            return sorted(os.listdir(path))
        except FileNotFoundError:
            return []

    def files(self, path: Path_) -> list[str]:
        """All files below a folder, as relative paths."""
        return [file.relative_to(path).as_posix() for file in Path(path).rglob("*") if not file.is_dir()]

    def is_file(self, path: Path_) -> bool:
        """Whether a path is a regular file."""
        try:
            return regular_size(path) >= 0
        except OSError:
            return False

    def leads_out(self, path: Path_, folder: Path_) -> bool:
        """Whether symbolic links place a subfolder outside of `folder`.

        Links to files need no check, since only regular files are read.
        """
        try:
            parent = os.path.dirname(path)
            if parent == os.fspath(folder):
                return False
            os.lstat(parent)  # much faster than resolving, and a manifest can name many missing folders
            return not Path(parent).resolve().is_relative_to(Path(folder).resolve())
        except FileNotFoundError:
            return False
        except (OSError, RuntimeError, ValueError):  # e.g. a link to itself, an invalid name
            return True

    def size(self, path: Path_) -> int:
        """The length of a regular file in bytes."""
        return regular_size(path)

    def read(self, path: Path_, limit: int) -> bytes:
        """The content of a regular file of at most `limit` bytes."""
        return regular_content(path, limit)

    def read_range(self, path: Path_, start: int, stop: int) -> bytes:
        """The bytes of a regular file from `start` up to `stop`, or to its end."""
        with open_regular(path) as file:
            file.seek(start)
            return file.read(stop - start)

    def write(self, path: Path_, content: bytes) -> None:
        """Write a file and make it durable."""
        with open(path, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())

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


def describe_error(error: BaseException, path: Path_) -> OSError:
    """A client's error as an OSError with errno, message and path."""
    if isinstance(error, OSError) and error.strerror and error.filename:
        return error
    kinds = (number for kind, number in _ERRNO.items() if isinstance(error, kind))
    number = next(kinds, getattr(error, "errno", None) or errno.EIO)
    return OSError(number, os.strerror(number) if number == errno.ENOENT else why(error), os.fspath(path))


def _telling(method: F) -> F:
    """Decorate a method on a path so that it raises only OSErrors, and is retried after transient errors (`retries`).

    Clients raise their own classes for e.g. credentials and connections. Cached listings are dropped before each
    attempt, because other ranks and runs write to the same place.
    """

    @functools.wraps(method)
    def telling(self: FsspecStore, path: Path_, *args: Any) -> Any:
        def attempt() -> Any:
            self.fs.invalidate_cache()
            return method(self, path, *args)

        if_missing = True if method.__name__ in _REMOVE else None
        return retries.retry(attempt, lambda error: describe_error(error, path), self.retry, if_missing=if_missing)

    return telling  # type: ignore[return-value]


_REMOVE = ("rm_file", "remove")
"""Methods whose retry succeeds if the file or folder is already gone."""


class FsspecStore(FileSystemBase):
    """A remote place behind a URL, such as s3://bucket/run or memory://run. Failures are OSErrors with the path.

    `retry`: the policy for transient errors.

    Raises:
        CheckpointError: fsspec cannot reach the place, or lacks the package for it.
    """

    renames = False

    def __init__(self, url: str) -> None:
        self.retry = retries.policy()
        try:
            self.fs: Any = url_to_fs(url)[0]
        except Exception as error:  # fsspec's backends raise their own classes
            raise CheckpointError(f"{url} cannot be reached by fsspec: {why(error)}") from error

    # The interface of DCP's writer

    @contextmanager
    def create_stream(self, path: Path_, mode: str) -> Iterator[io.IOBase]:
        """Open a file for the duration of the context. Errors of the client inside the context become OSErrors.

        Reads continue after transient errors. A failed write is lost, and `CommitWriter` repeats it.
        """
        try:
            with self._opened(path, mode) as stream:
                yield stream
        except QuantshardError:
            raise
        except Exception as error:
            raise describe_error(error, path) from error

    def _opened(self, path: Path_, mode: str) -> Any:
        if mode != "rb":
            return self.fs.open(os.fspath(path), mode)
        return retries.RetriedReader(
            lambda: self.fs.open(os.fspath(path), mode), lambda error: describe_error(error, path), self.retry
        )

    def concat_path(self, path: Path_, suffix: str) -> str:
        """The path of entry `suffix` of a folder."""
        return self.join(path, suffix)

    def init_path(self, path: Path_) -> str:
        """The path, unchanged."""
        return os.fspath(path)

    @_telling
    def rename(self, path: Path_, new_path: Path_) -> None:
        """Rename a file; not atomic. A retry first checks whether an earlier attempt has completed."""
        if self._kind(path) is not None or self._kind(new_path) is None:
            self.fs.mv(os.fspath(path), os.fspath(new_path))

    @_telling
    def mkdir(self, path: Path_) -> None:
        """Create a folder, if the store has folders."""
        self.fs.makedirs(os.fspath(path), exist_ok=True)

    @_telling
    def exists(self, path: Path_) -> bool:
        """Whether a file or folder exists."""
        return self._kind(path) is not None

    @_telling
    def rm_file(self, path: Path_) -> None:
        """Remove a file."""
        self.fs.rm_file(os.fspath(path))

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Path_) -> bool:
        """Whether the path is a URL."""
        return "://" in os.fspath(checkpoint_id)

    # Operations of LocalStore

    def _kind(self, path: Path_) -> str | None:
        """ "file", "directory" or None for nothing. Unlike fsspec's `isfile`, errors of the store are raised."""
        try:
            return str(self.fs.info(os.fspath(path))["type"])
        except (FileNotFoundError, NotADirectoryError):
            return None

    def join(self, path: Path_, name: str) -> str:
        """The path of entry `name` of a folder."""
        return f"{os.fspath(path).rstrip('/')}/{name}"

    def parent(self, path: Path_) -> str:
        """The folder that contains a path."""
        return os.fspath(path).rstrip("/").rpartition("/")[0]

    @_telling
    def names(self, path: Path_) -> list[str]:
        """The sorted entries of a folder; empty if the folder does not exist."""
        try:
            entries = self.fs.ls(os.fspath(path), detail=False)
        except FileNotFoundError:
            return []
        return sorted(entry.rstrip("/").rpartition("/")[2] for entry in entries)

    @_telling
    def files(self, path: Path_) -> list[str]:
        """All files below a folder, as relative paths."""
        root = url_to_fs(os.fspath(path))[1].rstrip("/") + "/"
        return [file.removeprefix(root) for file in self.fs.find(os.fspath(path))]

    def leads_out(self, path: Path_, folder: Path_) -> bool:
        """False: remote stores have no links."""
        return False

    @_telling
    def is_file(self, path: Path_) -> bool:
        """Whether the path is an existing file."""
        return self._kind(path) == "file"

    @_telling
    def size(self, path: Path_) -> int:
        """The length of a file in bytes."""
        return int(self.fs.size(os.fspath(path)))

    @_telling
    def read(self, path: Path_, limit: int) -> bytes:
        """The content of a file of at most `limit` bytes."""
        length = int(self.fs.size(os.fspath(path)) or 0)
        if length > limit:
            raise OSError(errno.EFBIG, f"it has {length} bytes, and at most {limit} are read", os.fspath(path))
        return bytes(self.fs.cat_file(os.fspath(path)))

    @_telling
    def read_range(self, path: Path_, start: int, stop: int) -> bytes:
        """The bytes of a file from `start` up to `stop`, or to its end.

        Some servers ignore the range and send the whole file, e.g. Python's `http.server`; the result is then cut.
        """
        data = bytes(self.fs.cat_file(os.fspath(path), start=start, end=stop))
        return data[start:stop] if len(data) > stop - start else data

    @_telling
    def write(self, path: Path_, content: bytes) -> None:
        """Write a file, which is durable when the store confirms the write."""
        with self.fs.open(os.fspath(path), "wb") as file:
            file.write(content)

    @_telling
    def remove(self, path: Path_) -> None:
        """Remove a folder and its content."""
        self.fs.rm(os.fspath(path), recursive=True)

    def sync(self, path: Path_) -> None:
        """Do nothing: there are no folders to make durable."""


def is_inside(name: object) -> bool:
    """Whether a name is a valid path below a folder: relative, of plain parts, valid on every platform."""
    if type(name) is not str or len(name) > NAME_LENGTH or not name.isprintable() or "\\" in name or ":" in name:
        return False
    return not {"", ".", ".."}.intersection(name.split("/"))


Store = LocalStore | FsspecStore


def locate(path: Path_) -> tuple[Store, str]:
    """The store of a path or URL, and the path within that store.

    Raises:
        CheckpointError: fsspec cannot reach the URL.
        ConfigurationError: the path is a URL that pathlib has damaged.
    """
    if url := _spoilt_url(path):
        raise ConfigurationError(f"{path} was the URL {url}, of which pathlib took a slash; pass it as a string")
    text = os.fspath(path)
    for scheme in _HERE:
        if text.startswith(scheme):
            return LocalStore(), text.removeprefix(scheme)
    return (FsspecStore(text), text) if "://" in text else (LocalStore(), text)


def is_taken(path: Path_) -> bool:
    """Whether a file, a folder or a symbolic link (even a dangling one) exists at a path or URL.

    Raises:
        CheckpointError: the store cannot be reached.
    """
    store, store_path = locate(path)
    try:
        return store.exists(store_path) or (isinstance(store, LocalStore) and os.path.islink(store_path))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be reached ({why(error)}); name another place") from error


def is_local(path: Path_) -> bool:
    """Whether a path is on a local file system, judging by its name only; no store is accessed."""
    text = os.fspath(path)
    return text.startswith(_HERE) or ("://" not in text and not _spoilt_url(path))


def local(path: Path_, what: str) -> Path:
    """A local path. `what`: the name of the argument in the error.

    Raises:
        ConfigurationError: the path is the URL of a remote store.
    """
    text = os.fspath(path)
    local_path = next((text.removeprefix(scheme) for scheme in _HERE if text.startswith(scheme)), text)
    if "://" in local_path or _spoilt_url(path):
        raise ConfigurationError(f"{path}: {what} cannot be behind a URL; name a path on this machine")
    return Path(local_path)


def _spoilt_url(path: Path_) -> str | None:
    """The original URL of a path from which pathlib removed a slash; otherwise None."""
    match = _COLLAPSED.fullmatch(str(path)) if isinstance(path, PurePath) else None
    return f"{match['scheme']}://{match['rest']}" if match and match["scheme"] in available_protocols() else None
