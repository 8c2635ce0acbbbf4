"""Ensures that only one run writes to a directory: a lock in a local one, and everywhere a file that names the owner.

The lock is held until its process ends, but not by forked children. Without locks the newest run owns the directory,
and an older run that is still alive notices at its next save.
"""

import errno
import json
import os
import secrets
import socket
import sys
import warnings
from dataclasses import dataclass
from datetime import datetime, timezone

from filelock import BaseFileLock, FileLock

from quantshard.checkpoints.disk.store import LocalStore, Path_, Store, locate, open_regular, why
from quantshard.errors import CheckpointError

if sys.platform != "win32":
    import fcntl

LOCK_FILE = ".lock"
OWNER_FILE = "owner.json"
_OWNER_BYTES = 4096
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
"""Errors of file systems without locks, e.g. of some network shares."""
LOCK_SECONDS = 5.0


@dataclass(frozen=True)
class OwnershipToken:
    """A proof that a run still owns a directory. It is sent to all ranks."""

    folder: str
    token: str

    def check(self) -> None:
        try:
            owner = _read_owner(self.folder)
        except OSError as error:
            raise CheckpointError(f"the owner of {self.folder} cannot be read ({why(error)})") from error
        if not owner:
            raise CheckpointError(f"{self.folder} was removed or replaced while this run used it; start the run again")
        if owner.get("token") != self.token:
            raise CheckpointError(f"{self.folder} is in use by another run, {_described(owner)}; stop one of them")


class Ownership:
    """The ownership of a directory, from construction to `release` or the end of the process."""

    def __init__(self, store: Store, folder: str) -> None:
        store.make(folder)
        try:
            self._lock = lock(folder) if isinstance(store, LocalStore) else None
        except TimeoutError:
            raise CheckpointError(f"{folder} is in use by another run, {_described(_read_owner(folder))}") from None
        self.proof = OwnershipToken(folder, secrets.token_hex(8))
        since = datetime.now(timezone.utc).isoformat(timespec="seconds")
        owner = {"token": self.proof.token, "host": socket.gethostname(), "pid": os.getpid(), "since": since}
        store.write(store.join(folder, OWNER_FILE), json.dumps(owner).encode())

    def release(self) -> None:
        if self._lock is not None:
            self._lock.release()


def _read_owner(folder: str) -> dict[str, object]:
    store, store_path = locate(folder)
    try:
        owner = json.loads(store.read(store.join(store_path, OWNER_FILE), _OWNER_BYTES))
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return {}
    return owner if isinstance(owner, dict) else {}


def _described(owner: dict[str, object]) -> str:
    return f"process {owner.get('pid')} on {owner.get('host')} since {owner.get('since')}"


def lock(folder: Path_) -> BaseFileLock | None:
    """Lock a local folder until the result is released or garbage; TimeoutError if it is locked, None without locks."""
    # not thread-local: a background save releases it from its own thread
    file_lock = FileLock(os.path.join(folder, LOCK_FILE), timeout=LOCK_SECONDS, thread_local=False)
    try:
        file_lock.acquire()
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        warnings.warn(f"{folder} cannot be locked ({why(error)}); make sure no other run writes to it", stacklevel=3)
        return None
    return file_lock


def is_locked(folder: Path_) -> bool | None:
    """Whether a process holds a folder's lock; None if there are no locks. A run that starts meanwhile waits."""
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
