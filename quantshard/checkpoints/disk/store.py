"""Where checkpoints lie: a folder of this machine, or what fsspec reaches by a URL.

Both are as much of a file system as we need, and what DCP's writer takes for one. They differ in one fact that matters:
whether a folder can be renamed in one move, which is how a checkpoint is committed where it can.
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
from pathlib import Path, PurePath, PurePosixPath
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
"""What pathlib makes of a URL."""

_ERRNO = {FileNotFoundError: errno.ENOENT, PermissionError: errno.EACCES, FileExistsError: errno.EEXIST}


class LocalStore(FileSystem):
    """A folder on a file system of this machine, or one that it has mounted. What is read are regular files alone."""

    renames = True
    """Whether a folder is renamed in one move."""

    @contextmanager
    def create_stream(self, path: Path_, mode: str) -> Iterator[io.IOBase]:
        """A file, open while the context lasts."""
        with open_regular(path) if mode == "rb" else super().create_stream(path, mode) as stream:
            yield cast(io.IOBase, stream)

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
        """True for a regular file."""
        try:
            return regular_size(path) >= 0
        except OSError:
            return False

    def leads_out(self, path: Path_, folder: Path_) -> bool:
        """True if links make of a folder in a folder one outside. A file that is a link itself is not read anyway."""
        try:
            parent = Path(path).parent
            os.lstat(parent)  # resolving takes much longer, and a manifest may name many folders that are missing
            return parent != Path(folder) and not parent.resolve().is_relative_to(Path(folder).resolve())
        except FileNotFoundError:
            return False
        except (OSError, RuntimeError, ValueError):  # a link to itself, no name of a file
            return True

    def size(self, path: Path_) -> int:
        """The length of a regular file."""
        return regular_size(path)

    def read(self, path: Path_, limit: int) -> bytes:
        """The content of a regular file of at most `limit` bytes."""
        return regular_content(path, limit)

    def read_range(self, path: Path_, start: int, stop: int) -> bytes:
        """The bytes of a regular file from `start` to before `stop`, or to its end."""
        with open_regular(path) as file:
            file.seek(start)
            return file.read(stop - start)

    def write(self, path: Path_, content: bytes) -> None:
        """Write a file, durably."""
        with open(path, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())

    def remove(self, path: Path_) -> None:
        """Remove a folder with all that is in it; of a link to one, the link."""
        if os.path.islink(path):
            os.unlink(path)
        else:
            shutil.rmtree(path)

    def make(self, path: Path_) -> None:
        """Make a folder, and those that it is in, durably."""
        folder = os.path.abspath(os.fspath(path))
        if not os.path.isdir(folder):
            if (parent := os.path.dirname(folder)) != folder:
                self.make(parent)
            self.mkdir(Path(folder))
            self.sync(os.path.dirname(folder))

    def sync(self, path: Path_) -> None:
        """Make a folder's entries durable, where a folder can be opened."""
        if os.name == "nt":
            return
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def why(error: BaseException) -> str:
    """What went wrong, without a number or a path; clients of stores often give no `strerror`."""
    words = error.strerror if isinstance(error, OSError) else None
    return words or (str(error).strip() or type(error).__name__).splitlines()[0]


def told(error: BaseException, path: Path_) -> OSError:
    """A client's error as one of the system's: with a number, words and the path."""
    if isinstance(error, OSError) and error.strerror and error.filename:
        return error
    kinds = (number for kind, number in _ERRNO.items() if isinstance(error, kind))
    number = next(kinds, getattr(error, "errno", None) or errno.EIO)
    return OSError(number, os.strerror(number) if number == errno.ENOENT else why(error), os.fspath(path))


def _telling(method: F) -> F:
    """A method of a path whose errors are OSErrors: clients have classes of their own, of credentials and connections.
    It is called again where the reason may pass (`retries`).

    What was listed before is not trusted, for other ranks and other runs write there too.
    """

    @functools.wraps(method)
    def telling(self: FsspecStore, path: Path_, *args: Any) -> Any:
        def attempt() -> Any:
            self.fs.invalidate_cache()
            return method(self, path, *args)

        gone = True if method.__name__ in _REMOVE else None
        return retries.tried(attempt, lambda error: told(error, path), self.retry, gone=gone)

    return telling  # type: ignore[return-value]


_REMOVE = ("rm_file", "remove")
"""Methods that have done their work if what they are about is gone at a second attempt."""


class FsspecStore(FileSystemBase):
    """A place behind a URL, such as s3://bucket/run or memory://run. What fails there is an OSError with the path.
    `retry`: how often and for how long it is tried again first.

    Raises:
        CheckpointError: fsspec knows no such place, or lacks the package for it.
    """

    renames = False

    def __init__(self, url: str) -> None:
        self.retry = retries.policy()
        try:
            self.fs: Any = url_to_fs(url)[0]
        except Exception as error:  # of the packages behind fsspec
            raise CheckpointError(f"{url} cannot be reached by fsspec: {why(error)}") from error

    # What DCP's writer asks for

    @contextmanager
    def create_stream(self, path: Path_, mode: str) -> Iterator[io.IOBase]:
        """A file, open while the context lasts; what the client raises meanwhile is told as an OSError too.

        Reading goes on after what passes; what was being written is lost, and `CommitWriter` writes it again.
        """
        try:
            with self._opened(path, mode) as stream:
                yield stream
        except QuantshardError:
            raise
        except Exception as error:
            raise told(error, path) from error

    def _opened(self, path: Path_, mode: str) -> Any:
        if mode != "rb":
            return self.fs.open(os.fspath(path), mode)
        return retries.RetriedReader(
            lambda: self.fs.open(os.fspath(path), mode), lambda error: told(error, path), self.retry
        )

    def concat_path(self, path: Path_, suffix: str) -> str:
        """The path of an entry of a folder."""
        return self.join(path, suffix)

    def init_path(self, path: Path_) -> str:
        """The path as it is."""
        return os.fspath(path)

    @_telling
    def rename(self, path: Path_, new_path: Path_) -> None:
        """Rename a file; not in one move, so that a second attempt may find it done but for the last part."""
        if self._kind(path) is not None or self._kind(new_path) is None:
            self.fs.mv(os.fspath(path), os.fspath(new_path))

    @_telling
    def mkdir(self, path: Path_) -> None:
        """Make a folder, where the place has such a thing."""
        self.fs.makedirs(os.fspath(path), exist_ok=True)

    @_telling
    def exists(self, path: Path_) -> bool:
        """True if there is a file or folder."""
        return self._kind(path) is not None

    @_telling
    def rm_file(self, path: Path_) -> None:
        """Remove a file."""
        self.fs.rm_file(os.fspath(path))

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Path_) -> bool:
        """True for a URL."""
        return "://" in os.fspath(checkpoint_id)

    # What we ask for

    def _kind(self, path: Path_) -> str | None:
        """ "file" or "directory"; None for nothing. fsspec's own `isfile` takes a store that fails for an empty one."""
        try:
            return str(self.fs.info(os.fspath(path))["type"])
        except (FileNotFoundError, NotADirectoryError):
            return None

    def join(self, path: Path_, name: str) -> str:
        """The path of an entry of a folder."""
        return f"{os.fspath(path).rstrip('/')}/{name}"

    def parent(self, path: Path_) -> str:
        """The folder that a path is in."""
        return os.fspath(path).rstrip("/").rpartition("/")[0]

    @_telling
    def names(self, path: Path_) -> list[str]:
        """The entries of a folder, in order; none if it does not exist."""
        try:
            found = self.fs.ls(os.fspath(path), detail=False)
        except FileNotFoundError:
            return []
        return sorted(entry.rstrip("/").rpartition("/")[2] for entry in found)

    @_telling
    def files(self, path: Path_) -> list[str]:
        """All files below a folder, by their paths within it."""
        root = url_to_fs(os.fspath(path))[1].rstrip("/") + "/"
        return [file.removeprefix(root) for file in self.fs.find(os.fspath(path))]

    def leads_out(self, path: Path_, folder: Path_) -> bool:
        """False: there are no links."""
        return False

    @_telling
    def is_file(self, path: Path_) -> bool:
        """True for a file that exists."""
        return self._kind(path) == "file"

    @_telling
    def size(self, path: Path_) -> int:
        """The length of a file."""
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
        """The bytes of a file from `start` to before `stop`, or to its end.

        A server may send the whole file whatever it is asked for, as Python's `http.server` does.
        """
        found = bytes(self.fs.cat_file(os.fspath(path), start=start, end=stop))
        return found[start:stop] if len(found) > stop - start else found

    @_telling
    def write(self, path: Path_, content: bytes) -> None:
        """Write a file; durable when the place says that it is written."""
        with self.fs.open(os.fspath(path), "wb") as file:
            file.write(content)

    @_telling
    def remove(self, path: Path_) -> None:
        """Remove a folder with all that is in it."""
        self.fs.rm(os.fspath(path), recursive=True)

    def sync(self, path: Path_) -> None:
        """Nothing: there are no folders to make durable."""


def is_inside(name: object) -> bool:
    """True for the name of a file below a folder: a relative path of plain parts, the same on every system."""
    if type(name) is not str or len(name) > NAME_LENGTH or not name.isprintable() or "\\" in name or ":" in name:
        return False
    parts = PurePosixPath(name).parts
    return bool(parts) and "/".join(parts) == name and not {".", ".."} & set(parts) and not name.startswith("/")


Store = LocalStore | FsspecStore


def locate(path: Path_) -> tuple[Store, str]:
    """The store that a path or URL is in, and what to call the path there.

    Raises:
        CheckpointError: fsspec cannot reach the URL.
        ConfigurationError: it is a URL that pathlib has spoilt.
    """
    if url := _spoilt_url(path):
        raise ConfigurationError(f"{path} was the URL {url}, of which pathlib took a slash; pass it as a string")
    text = os.fspath(path)
    for scheme in _HERE:
        if text.startswith(scheme):
            return LocalStore(), text.removeprefix(scheme)
    return (FsspecStore(text), text) if "://" in text else (LocalStore(), text)


def is_taken(path: Path_) -> bool:
    """True if there is a file or folder at a path or behind a URL, or a link, wherever that leads.

    Raises:
        CheckpointError: nobody can tell.
    """
    store, place = locate(path)
    try:
        return store.exists(place) or (isinstance(store, LocalStore) and os.path.islink(place))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be reached ({why(error)}); name another place") from error


def is_local(path: Path_) -> bool:
    """True for what is on a file system of this machine, by its name alone: no URL of another place is asked."""
    text = os.fspath(path)
    return text.startswith(_HERE) or ("://" not in text and not _spoilt_url(path))


def local(path: Path_, what: str) -> Path:
    """The path of something that has to be on a file system of this machine.

    Raises:
        ConfigurationError: it is a URL of another place; `what` it is is said.
    """
    text = os.fspath(path)
    place = next((text.removeprefix(scheme) for scheme in _HERE if text.startswith(scheme)), text)
    if "://" in place or _spoilt_url(path):
        raise ConfigurationError(f"{path}: {what} cannot be behind a URL; name a path on this machine")
    return Path(place)


def _spoilt_url(path: Path_) -> str | None:
    """The URL that a path was before pathlib took a slash from it."""
    found = _COLLAPSED.fullmatch(str(path)) if isinstance(path, PurePath) else None
    return f"{found['scheme']}://{found['rest']}" if found and found["scheme"] in available_protocols() else None
