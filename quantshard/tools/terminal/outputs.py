"""Safe file output: the only module that creates, replaces or extends the files of commands.

An attacker can prepare the output folder (a received run, an archive, a checkout) with a link in place of an output
file, so that a plain write would overwrite another file of the user. Therefore:

- `write_file` creates a file under a random name and renames it; it replaces only regular files. `create_file` requires
  that the name is free.
- `append_text` and `cut_after` modify only regular files without a second hard link.
- A folder is opened once, and its files are opened relative to that descriptor.
- With `within`, no link below a run's folder is followed, and every folder must belong to this user.

Links in the path of the run itself, or in a path that the user typed, are followed.
"""

from __future__ import annotations

import os
import re
import secrets
import stat
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, TextIO

from quantshard.errors import ConfigurationError
from quantshard.foreign import open_regular

_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_MORE = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_CHANGED = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_ROOT = 0
_HEAD_BYTES = 4096
_TAIL_BYTES = 1 << 20
_UNFINISHED = re.compile(r"\.[0-9a-f]{16}\.new")
_KINDS = {
    stat.S_IFREG: "a file",
    stat.S_IFLNK: "a link",
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
}


def null_stream() -> TextIO:
    """Open a stream that discards its input."""
    return open(os.devnull, "w", encoding="utf-8")


def write_file(path: Path, content: str | bytes, *, within: Path | None = None) -> None:
    """Atomically write a file, replacing a regular one.

    Args:
        within: folder of the run that contains the file; missing folders below it are created.

    Raises:
        ConfigurationError: `path` is not a regular file, its folder is unsafe, or writing fails.
    """
    with written_file(path, within=within) as file, _told(path):
        file.write(content.encode("utf-8") if isinstance(content, str) else content)


@contextmanager
def written_file(path: Path, *, within: Path | None = None) -> Iterator[BinaryIO]:
    """Open a file for incremental writing, and rename it to `path` at the end of the block.

    After an error the temporary file is removed.

    Raises:
        ConfigurationError: as `write_file`.
    """
    with ExitStack() as stack:
        with _told(path):
            folder = stack.enter_context(_opened(path.parent, within))
            mode = _replaceable(path, folder)
            new = f".{secrets.token_hex(8)}.new"
            handle = os.open(new, _NEW, 0o666, dir_fd=folder)
        # Closed explicitly below: on a full disk, close() raises again.
        file = open(handle, "wb")
        try:
            yield file
            with _told(path):
                if mode is not None:
                    os.fchmod(handle, mode)
                file.flush()
                os.fsync(handle)
                file.close()
            with _told(path):
                os.replace(new, path.name, src_dir_fd=folder, dst_dir_fd=folder)
        except BaseException:
            with suppress(OSError):
                os.unlink(new, dir_fd=folder)
            with suppress(OSError):
                file.close()
            raise


def remove_unfinished(folder: Path, *names: str) -> None:
    """Remove temporary files that a killed process left in `folder`, and the files `names`.

    The caller must hold the folder's lock.

    Raises:
        ConfigurationError: the folder belongs to another user, or a file cannot be removed.
    """
    with _told(folder), _opened(folder, folder) as handle:
        for name in os.listdir(handle):
            if name in names or _UNFINISHED.fullmatch(name):
                os.unlink(name, dir_fd=handle)


def create_file(path: Path, *, within: Path | None = None) -> BinaryIO:
    """Create a new file and open it for writing.

    Raises:
        ConfigurationError: the file exists or cannot be created.
    """
    with _told(path), _opened(path.parent, within) as folder:
        return open(os.open(path.name, _NEW, 0o666, dir_fd=folder), "wb")


def check_writable(path: Path) -> None:
    """Check that `write_file` can write `path`, before its content is computed.

    Raises:
        ConfigurationError: `path` is not a regular file, or its folder cannot be opened.
    """
    with _told(path), _opened(path.parent, None) as folder:
        _replaceable(path, folder)


def check_replaceable(path: Path, is_ours: Callable[[bytes], bool], what: str, advice: str) -> None:
    """Check that `path` is writable and, if it exists, has the expected kind of content.

    Args:
        is_ours: predicate on the first 4096 bytes of the existing file.
        what: name of the kind of file, for the error message.
        advice: option that selects another path, for the error message.

    Raises:
        ConfigurationError: as `check_writable`, or the existing file is of another kind.
    """
    check_writable(path)
    try:
        with open_regular(path) as file:
            head = file.read(_HEAD_BYTES)
    except FileNotFoundError:
        return
    except OSError as error:
        raise ConfigurationError(f"cannot read {path}, which would be replaced: {error.strerror or error}") from None
    if not is_ours(head):
        raise ConfigurationError(f"{path} exists and is no {what}; name another place with {advice}")


def append_text(path: Path, text: str, *, within: Path | None = None) -> None:
    """Append a text to a file, creating the file if it is missing.

    Raises:
        ConfigurationError: `path` is not a regular file or has several hard links, its folder is unsafe, or writing
            fails.
    """
    with _told(path), _opened(path.parent, within) as folder:
        _continuable(path, folder)
        with open(os.open(path.name, _MORE, 0o666, dir_fd=folder), "ab") as file:
            # Checked again, because another process could have replaced the file since.
            _check_single(path, os.fstat(file.fileno()))
            file.write(text.encode("utf-8"))


def cut_after(path: Path, is_last: Callable[[bytes], bool], *, within: Path | None = None) -> None:
    """Truncate a file after its last line for which `is_last` is true, searching from the end.

    If there is no such line, the file becomes empty.

    Raises:
        ConfigurationError: as `append_text`.
    """
    with _told(path), _opened(path.parent, within) as folder:
        with open(os.open(path.name, _CHANGED, dir_fd=folder), "r+b") as file:
            _check_single(path, os.fstat(file.fileno()))
            file.truncate(_end_of_last(file, is_last))


def _end_of_last(file: BinaryIO, is_last: Callable[[bytes], bool]) -> int:
    """Byte offset after the last line for which `is_last` is true, or 0. `tail` holds the bytes from `start` on."""
    start, tail = file.seek(0, os.SEEK_END), b""
    while True:
        end = tail.rfind(b"\n")
        previous_end = tail.rfind(b"\n", 0, max(end, 0))
        if end >= 0 and (previous_end >= 0 or start == 0):
            if is_last(tail[previous_end + 1 : end]):
                return start + end + 1
            tail = tail[: previous_end + 1]
        elif start == 0:
            return 0
        else:
            size = min(_TAIL_BYTES, start)
            start = file.seek(start - size)
            tail = file.read(size) + tail


def make_folder(path: Path) -> None:
    """Create a folder and its parents, for files written `within` it.

    Raises:
        ConfigurationError: the folder cannot be created, or belongs to another user.
    """
    with _told(path):
        path.mkdir(parents=True, exist_ok=True)
        with _opened(path, path):
            pass


def check_folder(path: Path, names: tuple[str, ...]) -> None:
    """Check that a folder belongs to this user, and that existing entries `names` in it are safe to write.

    Their owner must be this user, root or the owner of the folder. A name that ends in a slash must be a folder; any
    other name, a regular file with one hard link.

    Raises:
        ConfigurationError: names the first path that fails the check.
    """
    with _told(path), _opened(path, path) as folder:
        allowed_owners = {os.geteuid(), _ROOT, os.fstat(folder).st_uid}
        for name in names:
            try:
                status = os.stat(name.removesuffix("/"), dir_fd=folder, follow_symlinks=False)
            except FileNotFoundError:
                continue
            (_check_is_folder if name.endswith("/") else _check_single)(path / name, status)
            if status.st_uid not in allowed_owners:
                raise _of_another(path / name, status.st_uid)


@contextmanager
def _told(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigurationError(f"cannot write {path}: {error.strerror or error}") from None
    except UnicodeEncodeError as error:
        raise ConfigurationError(f"cannot write {path}: it would hold {error.object[error.start]!r}") from None


@contextmanager
def _opened(path: Path, within: Path | None) -> Iterator[int]:
    """Open a folder and yield its file descriptor, for `dir_fd`.

    With `within`, every folder from there on must belong to this user and must not be a link.
    """
    handle = os.open(path if within is None else within, _FOLDER)
    try:
        if within is not None:
            _check_ours(within, handle)
            current = within
            for name in path.relative_to(within).parts:
                current = current / name
                with suppress(FileExistsError):
                    os.mkdir(name, dir_fd=handle)
                child = _folder_below(current, handle)
                os.close(handle)
                handle = child
                _check_ours(current, handle)
        yield handle
    finally:
        os.close(handle)


def _folder_below(path: Path, folder: int) -> int:
    _check_is_folder(path, os.stat(path.name, dir_fd=folder, follow_symlinks=False))
    return os.open(path.name, _FOLDER | os.O_NOFOLLOW, dir_fd=folder)


def _check_ours(path: Path, folder: int) -> None:
    """Raise if another user owns the folder.

    Some network shares give all files one owner; that owner counts as this user.
    """
    owner = os.fstat(folder).st_uid
    if owner not in (os.geteuid(), _ROOT) and owner != _owner_of_new_files(folder):
        raise _of_another(path, owner)


def _of_another(path: Path, owner: int) -> ConfigurationError:
    return ConfigurationError(
        f"{path} belongs to another user (number {owner}), who could have what is written there go elsewhere; copy the "
        "folder with cp -r, and use the copy"
    )


def _owner_of_new_files(folder: int) -> int | None:
    name = f".{secrets.token_hex(8)}.new"
    try:
        handle = os.open(name, _NEW, 0o600, dir_fd=folder)
    except OSError:
        return None
    try:
        return os.fstat(handle).st_uid
    finally:
        os.close(handle)
        os.unlink(name, dir_fd=folder)


def _replaceable(path: Path, folder: int) -> int | None:
    """Permission bits of the regular file at `path`, or None if it does not exist."""
    try:
        status = os.stat(path.name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return None
    if not stat.S_ISREG(status.st_mode):
        raise ConfigurationError(f"{path} is {_kind(status)}, and only a file is replaced; {_elsewhere(status)}")
    return stat.S_IMODE(status.st_mode) & 0o777


def _continuable(path: Path, folder: int) -> None:
    with suppress(FileNotFoundError):
        _check_single(path, os.stat(path.name, dir_fd=folder, follow_symlinks=False))


def _check_is_folder(path: Path, found: os.stat_result) -> None:
    if not stat.S_ISDIR(found.st_mode):
        raise ConfigurationError(f"{path} is {_kind(found)}, where the run has a folder; {_elsewhere(found)}")


def _check_single(path: Path, found: os.stat_result) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise ConfigurationError(f"{path} is {_kind(found)}, where the run has a file; {_elsewhere(found)}")
    if found.st_nlink > 1:
        raise ConfigurationError(
            f"{path} has {found.st_nlink} names (hard links), and under the others it would change too; put a copy in "
            "its place"
        )


def _kind(found: os.stat_result) -> str:
    return _KINDS.get(stat.S_IFMT(found.st_mode), "a device")


def _elsewhere(found: os.stat_result) -> str:
    if stat.S_ISLNK(found.st_mode):
        return "links are not followed there, so put what it leads to in its place"
    return "remove it, or name another place" if stat.S_IFMT(found.st_mode) in _KINDS else "name another place"
