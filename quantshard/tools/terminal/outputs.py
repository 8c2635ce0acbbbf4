"""What commands write: the one place that makes, replaces and continues their files.

Somebody else may have prepared the folder that is written into: a run that was sent, an archive, a checkout. A link in
it with the name of a file of ours could lead to any file of the user's. So

- a new file is made under a name that nobody can guess, and moved to its own (`write_file`), or must not be there yet
  (`create_file`); only a regular file is replaced;
- only a regular file that has no second name is continued (`append_text`), or cut (`cut_after`);
- a folder is opened once, and its files are opened relative to what was opened;
- below a run's folder no link is followed, and the folder must be this user's (`within`).

The path of a run, or of a file that the user has named, may lead through links: they are the user's.
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
    """Open a stream that drops what is written."""
    return open(os.devnull, "w", encoding="utf-8")


def write_file(path: Path, content: str | bytes, *, within: Path | None = None) -> None:
    """Write a file, or replace a regular one, in one move.

    `within`: the folder of a run that the file is in; folders below it are made where they are missing.

    Raises:
        ConfigurationError: something else has the name, the folder is not to be written into, or cannot be.
    """
    with written_file(path, within=within) as file, _told(path):
        file.write(content.encode("utf-8") if isinstance(content, str) else content)


@contextmanager
def written_file(path: Path, *, within: Path | None = None) -> Iterator[BinaryIO]:
    """A file to be written piece by piece, which gets its name at the end, in one move, as `write_file` does it; after
    an error nothing is left of it.

    Raises:
        ConfigurationError: as `write_file`.
    """
    with ExitStack() as stack:
        with _told(path):
            folder = stack.enter_context(_opened(path.parent, within))
            mode = _replaceable(path, folder)
            new = f".{secrets.token_hex(8)}.new"
            handle = os.open(new, _NEW, 0o666, dir_fd=folder)
        file = open(handle, "wb")  # closed below: a full disk makes closing raise once more
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
    """Remove what a process that was killed left of `written_file` in a folder of this user's, and files of these
    names. Whoever calls it holds the folder's lock.

    Raises:
        ConfigurationError: it is another user's, or one cannot be removed.
    """
    with _told(folder), _opened(folder, folder) as handle:
        for name in os.listdir(handle):
            if name in names or _UNFINISHED.fullmatch(name):
                os.unlink(name, dir_fd=handle)


def create_file(path: Path, *, within: Path | None = None) -> BinaryIO:
    """Open a file for writing that is not there yet.

    Raises:
        ConfigurationError: it is there, or cannot be written.
    """
    with _told(path), _opened(path.parent, within) as folder:
        return open(os.open(path.name, _NEW, 0o666, dir_fd=folder), "wb")


def check_writable(path: Path) -> None:
    """See that `write_file` would make a file or replace one, before what is to be written there is computed.

    Raises:
        ConfigurationError: something else has the name, or its folder cannot be opened.
    """
    with _told(path), _opened(path.parent, None) as folder:
        _replaceable(path, folder)


def check_replaceable(path: Path, is_ours: Callable[[bytes], bool], what: str, advice: str) -> None:
    """As `check_writable`, of a file that replaces none but one of its kind. `is_ours`: tells it by how it begins;
    `what`: in words; `advice`: which argument names another place.

    Raises:
        ConfigurationError: as `check_writable`, or the file is of another kind.
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
    """Write a text after what a file has, or into a new one.

    Raises:
        ConfigurationError: it is no regular file or has a second name, the folder is not to be written into, or it
            cannot be written.
    """
    with _told(path), _opened(path.parent, within) as folder:
        _continuable(path, folder)
        with open(os.open(path.name, _MORE, 0o666, dir_fd=folder), "ab") as file:
            _check_single(path, os.fstat(file.fileno()))  # it may be another one by now
            file.write(text.encode("utf-8"))


def cut_after(path: Path, is_last: Callable[[bytes], bool], *, within: Path | None = None) -> None:
    """Cut a file behind the last line that is said to be the last, which is looked for from the end; if none is, to
    nothing.

    Raises:
        ConfigurationError: as of `append_text`.
    """
    with _told(path), _opened(path.parent, within) as folder:
        with open(os.open(path.name, _CHANGED, dir_fd=folder), "r+b") as file:
            _check_single(path, os.fstat(file.fileno()))
            file.truncate(_end_of_last(file, is_last))


def _end_of_last(file: BinaryIO, is_last: Callable[[bytes], bool]) -> int:
    """Where the last such line ends; `held` is what of the file is looked at, from `start` on."""
    start, held = file.seek(0, os.SEEK_END), b""
    while True:
        end = held.rfind(b"\n")
        before = held.rfind(b"\n", 0, max(end, 0))
        if end >= 0 and (before >= 0 or start == 0):
            if is_last(held[before + 1 : end]):
                return start + end + 1
            held = held[: before + 1]
        elif start == 0:
            return 0
        else:
            size = min(_TAIL_BYTES, start)
            start = file.seek(start - size)
            held = file.read(size) + held


def make_folder(path: Path) -> None:
    """Make a folder, and those above it, that files are to be written `within`.

    Raises:
        ConfigurationError: it cannot be made, or is another user's.
    """
    with _told(path):
        path.mkdir(parents=True, exist_ok=True)
        with _opened(path, path):
            pass


def check_folder(path: Path, names: tuple[str, ...]) -> None:
    """See that a folder is this user's, and of the names (paths in it) those that are there, too: those that end in a
    slash are folders, the others regular files of no second name.

    Raises:
        ConfigurationError: naming the first that is not.
    """
    with _told(path), _opened(path, path) as folder:
        ours = {os.geteuid(), _ROOT, os.fstat(folder).st_uid}
        for name in names:
            try:
                found = os.stat(name.removesuffix("/"), dir_fd=folder, follow_symlinks=False)
            except FileNotFoundError:
                continue
            (_check_is_folder if name.endswith("/") else _check_single)(path / name, found)
            if found.st_uid not in ours:
                raise _of_another(path / name, found.st_uid)


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
    """A folder, as a number for `dir_fd`; with `within`, each from there on is this user's and no link."""
    handle = os.open(path if within is None else within, _FOLDER)
    try:
        if within is not None:
            _check_ours(within, handle)
            at = within
            for name in path.relative_to(within).parts:
                at = at / name
                with suppress(FileExistsError):
                    os.mkdir(name, dir_fd=handle)
                below = _folder_below(at, handle)
                os.close(handle)
                handle = below
                _check_ours(at, handle)
        yield handle
    finally:
        os.close(handle)


def _folder_below(path: Path, folder: int) -> int:
    _check_is_folder(path, os.stat(path.name, dir_fd=folder, follow_symlinks=False))
    return os.open(path.name, _FOLDER | os.O_NOFOLLOW, dir_fd=folder)


def _check_ours(path: Path, folder: int) -> None:
    """On a file system that gives all files one owner, such as some network shares, that one counts as this user."""
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
    """The permissions of the regular file that has the name; None if there is none."""
    try:
        found = os.stat(path.name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return None
    if not stat.S_ISREG(found.st_mode):
        raise ConfigurationError(f"{path} is {_kind(found)}, and only a file is replaced; {_elsewhere(found)}")
    return stat.S_IMODE(found.st_mode) & 0o777


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
