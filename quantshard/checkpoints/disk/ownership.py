"""Ensures that only one run writes to a directory, with a lock or with a file that names the owner.

A lock is held until the process that took it ends, in whatever way; its forked children do not hold the lock. A store
without locks cannot detect whether an owner is alive. There the newest run owns the directory, and an older run that is
still alive notices at its next save.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import sys
import time
import warnings
import weakref
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

from quantshard.checkpoints.disk.store import LocalStore, Path_, Store, locate, why
from quantshard.errors import CheckpointError
from quantshard.foreign import json_object, open_regular, regular_content

if sys.platform != "win32":
    import fcntl

LOCK_FILE = ".lock"
OWNER_FILE = "owner.json"
_TOLD_BYTES = 4096
LOCK_SECONDS = 5.0
"""How long to wait for another run that is ending."""


class LockHandle:
    """An open file of this process, used for locks.

    A lock belongs to the open file, which forked children share. A DataLoader worker can outlive a killed run by
    seconds and would keep the lock. So children close their handles, which does not unlock the file.
    """

    def __init__(self, path: str, flags: int) -> None:
        self.number = os.open(path, flags | os.O_CLOEXEC, 0o666)
        _handles.add(self)

    def file(self) -> tuple[int, int]:
        """Device and inode number of the file."""
        status = os.fstat(self.number)
        return status.st_dev, status.st_ino

    def tell(self) -> None:
        """Write the owner of the lock into the file."""
        since = datetime.now(timezone.utc).isoformat(timespec="seconds")
        content = json.dumps({"pid": os.getpid(), "host": socket.gethostname(), "since": since}).encode()
        with suppress(OSError):  # the disk can be full; the lock works anyway
            os.ftruncate(self.number, 0)
            os.pwrite(self.number, content, 0)

    def close(self) -> None:
        """Close the file once. A second close could hit another file with the same descriptor."""
        with suppress(KeyError):
            _handles.remove(self)
            os.close(self.number)


_handles: set[LockHandle] = set()


def _close_all() -> None:
    for handle in list(_handles):
        handle.close()


if sys.platform != "win32":
    os.register_at_fork(after_in_child=_close_all)


@dataclass(frozen=True)
class OwnershipToken:
    """A proof, usable in any process of a run, that the run still owns a directory.

    `file`: device and inode number of the lock file; None without locks.
    """

    folder: str
    token: str
    file: tuple[int, int] | None = None

    def check(self) -> None:
        """Check that no other run has taken the directory, and that it is still the same directory.

        Raises:
            CheckpointError: a newer run owns the directory, the directory was replaced, or the owner cannot be read.
        """
        store, folder = locate(self.folder)
        if store.renames:  # a lock, which is valid while its file exists
            self._check_file()
            return
        file = store.join(folder, OWNER_FILE)
        try:
            owner = json.loads(store.read(file, 1 << 16))
        except (OSError, ValueError) as error:
            raise CheckpointError(
                f"{file}, which says whose {folder} is, cannot be read ({why(error)}); start the run again to own it"
            ) from None
        if not isinstance(owner, dict) or owner.get("token") != self.token:
            fields = {} if not isinstance(owner, dict) else owner
            raise CheckpointError(
                f"{folder} is in use by another run, which was started later (on {fields.get('host')}, process "
                f"{fields.get('pid')}); stop one of them, or give each a directory of its own"
            )

    def _check_file(self) -> None:
        file = os.path.join(self.folder, LOCK_FILE)
        if self.file is None:
            if not os.path.isdir(self.folder):
                raise CheckpointError(f"{self.folder}, the directory of this run, is gone; {_START_AGAIN}")
            return
        try:
            status = os.stat(file)
        except OSError as error:
            what = "is gone" if not os.path.isdir(self.folder) else f"has lost its {LOCK_FILE} ({why(error)})"
            raise CheckpointError(f"{self.folder}, the directory of this run, {what}; {_START_AGAIN}") from None
        if (status.st_dev, status.st_ino) != self.file:
            raise CheckpointError(
                f"{self.folder} is not the directory that this run has locked: it was removed and made again, or "
                f"replaced; {_START_AGAIN}"
            )


_START_AGAIN = (
    "nothing is written there, since another run may be using it: put it back, or make another Manager (start the run "
    "again)"
)


class Ownership:
    """The ownership of a directory, from construction to `release` or the end of the process.

    Raises:
        CheckpointError: another run owns the directory.
    """

    def __init__(self, store: Store, folder: str) -> None:
        token = secrets.token_hex(8)
        if isinstance(store, LocalStore):
            store.make(folder)
        else:
            store.mkdir(folder)
        handle = _locked(folder) if isinstance(store, LocalStore) else None
        self.proof = OwnershipToken(folder, token, None if handle is None else handle.file())
        self._close = None if handle is None else weakref.finalize(self, handle.close)
        if not store.renames:
            owner = {"token": self.proof.token, "host": socket.gethostname(), "pid": os.getpid()}
            store.write(store.join(folder, OWNER_FILE), json.dumps({**owner, "since": int(time.time())}).encode())

    def release(self) -> None:
        """Let another run take the directory."""
        if self._close is not None:
            self._close()


def _locked(folder: str) -> LockHandle | None:
    try:
        return lock(folder)
    except BlockingIOError:
        raise CheckpointError(
            f"{folder} is in use by {holder(folder)}; stop that one, or give each a directory of its own"
        ) from None


def holder(folder: Path_) -> str:
    """Describe the process that holds the lock of a folder."""
    try:
        fields = json_object(regular_content(Path(folder, LOCK_FILE), _TOLD_BYTES), LOCK_FILE)
        pid, host, since = int(fields["pid"]), str(fields["host"]), str(fields["since"])
    except (OSError, ValueError, TypeError, KeyError, OverflowError):
        return "another run"
    if pid == os.getpid() and host == socket.gethostname():
        return f"another run, which is this very process ({pid}): a Manager that is not closed, or is still saving"
    return f"another run (process {pid} on {host}, since {since}), which may have ended but for its last save"


def lock(folder: Path_) -> LockHandle | None:
    """Lock a local folder. The lock is held until the returned handle is closed or this process ends.

    The caller need not keep a reference to the handle. Without locks on this system, warn and return None.

    Raises:
        BlockingIOError: another process holds the lock, and did not end within `LOCK_SECONDS`.
        OSError: the folder cannot be written.
    """
    if sys.platform == "win32":
        _warn_of(folder, "on this system")
        return None
    handle = LockHandle(os.path.join(folder, LOCK_FILE), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW)
    deadline = time.monotonic() + LOCK_SECONDS
    while True:
        try:
            fcntl.flock(handle.number, fcntl.LOCK_EX | fcntl.LOCK_NB)
            handle.tell()
            return handle
        except BlockingIOError:
            if time.monotonic() > deadline:
                handle.close()
                raise
            time.sleep(0.1)
        except OSError as error:  # e.g. on some network file systems
            handle.close()
            _warn_of(folder, f"there ({why(error)})")
            return None


def _warn_of(folder: Path_, where: str) -> None:
    warnings.warn(
        f"{os.fspath(folder)} is not locked against a second run, for there are no locks {where}; see to it that no "
        "other run writes to it",
        stacklevel=3,
    )


@contextmanager
def being_read(store: Store, file: str) -> Iterator[None]:
    """Mark a checkpoint as being read, for the duration of the context. `file` is one of its files."""
    if sys.platform == "win32" or not isinstance(store, LocalStore) or not os.path.isfile(file):
        yield
        return
    with closing(LockHandle(file, os.O_RDONLY)) as handle:
        with suppress(OSError):
            fcntl.flock(handle.number, fcntl.LOCK_SH)
        yield


def is_being_read(store: Store, file: str) -> bool:
    """Whether a process on this file system is reading the checkpoint of `file`; False if that is unknown."""
    if sys.platform == "win32" or not isinstance(store, LocalStore) or not os.path.isfile(file):
        return False
    with closing(LockHandle(file, os.O_RDONLY)) as handle:
        try:
            fcntl.flock(handle.number, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            return isinstance(error, BlockingIOError)
    return False


def is_locked(folder: Path_) -> bool | None:
    """Whether a process holds the lock of a folder; None if the file system or the platform has no locks.

    The check takes a shared lock for a moment; a run that starts at that time waits for it.
    """
    if sys.platform == "win32":
        return None
    try:
        with open_regular(os.path.join(folder, LOCK_FILE)) as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except FileNotFoundError:
        return False
    except OSError:
        return None
    return False
