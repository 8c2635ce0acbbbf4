"""Committing a checkpoint: it is there wholly, or not at all.

Where folders can be renamed, all ranks write into a hidden folder beside the target; the coordinator adds `.metadata`
and `manifest.json`, makes all of it durable, and renames it. Elsewhere the files are written in place, and the
manifest, written last, is the commit. A rank digests what it writes while it writes it: nothing is read again, and what
is damaged on its way to the disk is found.
"""

from __future__ import annotations

import errno
import io
import multiprocessing
import os
import re
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
import xxhash
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemBase
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from quantshard.argument_kinds import PATH, check_arguments, suggests_names
from quantshard.checkpoints.disk import agreement, manifest, retries, transfer
from quantshard.checkpoints.disk.manifest import MANIFEST, METADATA_FILE, FileEntry, Manifest
from quantshard.checkpoints.disk.ownership import OwnershipToken
from quantshard.checkpoints.disk.store import LocalStore, Path_, Store, locate, told, why
from quantshard.errors import CheckpointError, warn_user

T = TypeVar("T")

_DIGESTS = "quantshard: digests"
_HIDDEN = re.compile(r"\.(?P<name>.+)\.[0-9a-f]{16}\.(tmp|old)")
_OURS = re.compile(r"\.metadata(\.tmp)?|__\d+_\d+\.distcp|" + re.escape(MANIFEST))


@dataclass(frozen=True)
class SaveTarget:
    """Where a checkpoint is to stand, and the token that names this attempt on all ranks.

    `replace`: whether one that is complete may be replaced by it. `owner`: what shows that the run which saves has the
    directory still, if one run has it.
    """

    path: str
    token: str
    replace: bool = False
    owner: OwnershipToken | None = None

    @property
    def store(self) -> Store:
        """The store that it is in."""
        return locate(self.path)[0]

    def hidden(self, kind: str) -> str:
        """The folder beside it: "tmp", where it is written, or "old", which it replaces."""
        store = self.store
        name = os.path.basename(self.path.rstrip("/"))
        return store.join(store.parent(self.path), f".{name}.{self.token}.{kind}")

    @property
    def written_in(self) -> str:
        """The folder that the ranks write into."""
        return self.hidden("tmp") if self.store.renames else self.path


@suggests_names
def is_complete(path: Path_) -> bool:
    """True if the checkpoint was written to its end: DCP writes its metadata last, and a manifest comes after them.

    Raises:
        CheckpointError: nobody can tell.
    """
    check_arguments("is_complete", PATH, path=path)
    store, place = locate(path)
    try:
        return store.is_file(store.join(place, METADATA_FILE))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be looked at ({why(error)}); see that it can") from error


def begin(path: Path_, replace: bool = False) -> SaveTarget:
    """See that a checkpoint can be written here, and remove what a killed attempt left. A collective call.

    Raises:
        CheckpointError: there is a complete one already, or other files; the same on every rank.
    """
    return agreement.from_rank0(lambda: prepare_target(path, replace))


def prepare_target(path: Path_, replace: bool = False) -> SaveTarget:
    """What `begin` does, on the one rank that looks."""
    try:
        return _prepared(path, replace)
    except OSError as error:
        raise CheckpointError(said_of(path, error)) from error


def _prepared(path: Path_, replace: bool) -> SaveTarget:
    store, place = locate(path)
    if is_complete(path) and not replace:
        raise CheckpointError(f"{path} holds a complete checkpoint and is not overwritten; save to another directory")
    _check_link(path, replace)
    if store.exists(place):
        try:
            there = store.names(place)
        except NotADirectoryError as error:
            raise CheckpointError(f"{path} could not be written: {why(error)}: it is no directory") from None
        if others := [name for name in there if not _OURS.fullmatch(name)]:
            raise CheckpointError(f"{path} holds other files ({others[0]}); save to a directory of its own")
        if there and not store.renames:
            store.remove(place)
    if isinstance(store, LocalStore):
        store.make(store.parent(place))
    clean(store.parent(place), os.path.basename(place.rstrip("/")))
    return SaveTarget(place, secrets.token_hex(8), replace)


def _check_link(path: Path_, replace: bool) -> None:
    """Refuse a link in the place of a checkpoint, unless it leads to one that may be replaced; then the link is."""
    store, place = locate(path)
    link = place.rstrip("/")  # behind which a system follows it
    if isinstance(store, LocalStore) and os.path.islink(link) and not (replace and is_complete(path)):
        raise CheckpointError(
            f"{path} is a symbolic link to {os.readlink(link)}, and a checkpoint takes the place of what has its name; "
            "remove the link, or save to where it leads"
        )


def clean(folder: Path_, only: str = "") -> list[str]:
    """Remove what killed attempts left in a folder; of one checkpoint `only`, if one is named. Their names."""
    store, place = locate(folder)
    removed = []
    for name in store.names(place):
        found = _HIDDEN.fullmatch(name)
        if found and only in ("", found["name"]):
            with suppress(OSError):  # it is in nobody's way
                store.remove(store.join(place, name))
                removed.append(name)
    return removed


def clean_remnants(paths: Iterable[str]) -> None:
    """Of checkpoints where folders cannot be renamed, remove what a killed save or removal left of some."""
    for path in paths:
        store, place = locate(path)
        if store.renames:
            return
        names = store.names(place)
        if not {MANIFEST, METADATA_FILE} & set(names) and all(_OURS.fullmatch(name) for name in names):
            with suppress(OSError):  # it is in nobody's way
                store.remove(place)


def remove(path: Path_) -> None:
    """Remove a checkpoint: it is gone at once, or first of all no longer complete. Of a link, the link.

    Raises:
        CheckpointError: it could not be, or not all of it.
    """
    store, place = locate(path)
    try:
        if isinstance(store, LocalStore):
            aside = SaveTarget(place, secrets.token_hex(8)).hidden("old")
            os.rename(place.rstrip("/"), aside)
            store.remove(aside)
            return
        for name in (MANIFEST, METADATA_FILE):
            with suppress(FileNotFoundError):
                store.rm_file(store.join(place, name))
        store.remove(place)
    except OSError as error:
        raise CheckpointError(
            f"{path} could not be removed: {agreement.words(error)}; see that this process may write in the folder "
            "that it is in, or remove it yourself"
        ) from error


@contextmanager
def abandoned_if_it_fails(target: SaveTarget) -> Iterator[None]:
    """Rank 0 removes what a failed save wrote. A rank that still writes for it can commit nothing without these files,
    and what it adds the next save removes, which begins when none writes any more."""
    try:
        yield
    except BaseException:  # a Ctrl-C too: if others still write there, the next save removes the rest
        if agreement.rank() == 0:
            abandon(target)
        raise


def abandon(target: SaveTarget) -> None:
    """Remove what a failed attempt wrote; if that fails, warn of what is left. On the coordinator.

    Without renames the next run writes in the same place: a run that has lost the directory leaves it alone.
    """
    store, folder = target.store, target.written_in
    try:
        if not store.renames:
            if target.owner is not None:
                target.owner.check()
            if _is_committed(folder):
                return
        if store.exists(folder):
            store.remove(folder)
    except (OSError, CheckpointError) as error:
        warn_user(
            f"what the failed save of {target.path} wrote could not be removed ({why(error)}); remove {folder}, or "
            "leave it to the next save there",
        )


def _is_committed(path: str) -> bool:
    try:
        return manifest.read_manifest(path) is not None
    except CheckpointError:
        return False


_REMEDIES = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), "make room, or save to another place"),
    errno.EFBIG: "save to a place that takes larger files, or raise the limit (ulimit -f)",
    **dict.fromkeys(
        (errno.EROFS, errno.EACCES, errno.EPERM), "see that this process may write there, or save elsewhere"
    ),
    **dict.fromkeys(
        (errno.EIO, errno.ESTALE), "see that the disk and its file system are well, or save to another one"
    ),
}


def said_of(path: Path_, error: BaseException) -> str:
    """What is said of a save that failed: why, on which rank, with which file, what is intact, and what to do."""
    if isinstance(error, CheckpointError):
        return str(error)
    number, first = agreement.first_failed(error)
    where = "" if number == 0 else f"on rank {number}: "
    remedy = _REMEDIES.get(first.errno or 0) if isinstance(first, OSError) else None
    intact = "nothing of it is kept, and other checkpoints are as they were"
    return f"{path} could not be written: {where}{'; '.join(filter(None, (agreement.words(first), intact, remedy)))}"


class CommitWriter(FileSystemWriter):
    """DCP's writer of files, whose `finish` commits them.

    `facts`: `step`, `mesh` and `recipe` of the manifest. All ranks are given one target.
    """

    def __init__(self, target: SaveTarget, facts: Mapping[str, Any]) -> None:
        store = target.store
        super().__init__(target.written_in, sync_files=store.renames)
        self.target, self.facts = target, dict(facts)
        self.recorder = _DigestingFileSystem(store)
        self.fs = cast(FileSystem, self.recorder)
        self.path = cast(Path, store.init_path(target.written_in))

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's files; their digests go to the coordinator with the results."""
        transfer.expect(sum(_tensor_bytes(item) for item in plan.items))
        write = super().write_data
        results = self._tried(lambda: write(plan, planner).wait())
        future: Future[list[WriteResult]] = Future()
        future.set_result([*results, WriteResult(MetadataIndex(_DIGESTS), 0, self.recorder.digests)])
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the metadata and the manifest, and commit. On the coordinator."""
        files: dict[str, FileEntry] = {}
        for of_rank in results:
            files.update(of_rank[-1].storage_data)
        finish = super().finish
        self._tried(lambda: finish(metadata, [of_rank[:-1] for of_rank in results]))
        files[METADATA_FILE] = self.recorder.digests[METADATA_FILE]
        self._check(files)
        described = Manifest(
            files=files,
            world_size=len(results),
            torch=torch.__version__,
            saved_at=datetime.now(timezone.utc).isoformat(timespec="seconds"),
            **self.facts,
        )
        commit(self.target, described)

    def _tried(self, action: Callable[[], T]) -> T:
        """A write of whole files, made again behind a URL where it fails for a reason that passes: nothing of it counts
        before the commit."""
        store = self.target.store
        if isinstance(store, LocalStore):
            return action()
        return retries.tried(action, lambda error: told(error, self.target.path), store.retry)

    def _check(self, files: Mapping[str, FileEntry]) -> None:
        """All that the ranks say they wrote is to be seen from here."""
        store = self.target.store
        for name, entry in files.items():
            path = store.join(self.target.written_in, name)
            found = store.size(path) if store.is_file(path) else None
            if found != entry.bytes:
                raise CheckpointError(
                    f"{path} was written with {entry.bytes} bytes and has {found} as the first rank sees it; save to a "
                    "directory that all ranks share"
                )


def _tensor_bytes(item: WriteItem) -> int:
    """The bytes of what is to be written; 0 of objects, which are small."""
    data = item.tensor_data
    return 0 if data is None else data.chunk.sizes.numel() * data.properties.dtype.itemsize


def commit(target: SaveTarget, described: Manifest) -> None:
    """Write the manifest, and make the checkpoint appear."""
    parent = multiprocessing.parent_process()
    if parent is not None and not parent.is_alive():
        if target.store.renames:  # elsewhere the next run may write in this place by now
            abandon(target)
        raise CheckpointError(f"{target.path} is not committed: the process that trains is gone")
    if target.owner is not None:
        target.owner.check()
    store, folder = target.store, target.written_in
    store.write(store.join(folder, MANIFEST), described.to_json().encode())
    if isinstance(store, LocalStore):
        store.sync(folder)
        put_in_place(store, target)


def put_in_place(store: LocalStore, target: SaveTarget) -> None:
    """Rename the folder to its name. What stands there is moved aside first, and removed."""
    _check_link(target.path, target.replace)
    old, parent = target.hidden("old"), store.parent(target.path)
    is_replaced = os.path.isdir(target.path) and (target.replace or not is_complete(target.path))
    if is_replaced:
        os.rename(target.path, old)
    try:
        os.rename(target.written_in, target.path)
    except BaseException:
        if is_replaced and not os.path.exists(target.path):
            os.rename(old, target.path)
        raise
    store.sync(parent)
    if is_replaced:
        with suppress(OSError):  # it is in nobody's way, and the next save removes it
            store.remove(old)


class _DigestingFileSystem(FileSystemBase):
    """A store that notes the digest of each file written through it, by name."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.digests: dict[str, FileEntry] = {}

    @contextmanager
    def create_stream(self, path: Path_, mode: str) -> Iterator[io.IOBase]:
        """A file, open while the context lasts."""
        written: _DigestStream | None = None
        try:
            with self.store.create_stream(path, mode) as stream:
                written = _DigestStream(stream) if mode == "wb" else None
                yield written or stream
        except Exception as error:  # torch.save makes another of what a stream raises
            cause = error if written is None or written.failure is None else written.failure
            if not isinstance(error, OSError) and cause is error:
                raise
            number = getattr(cause, "errno", None) or getattr(error, "errno", None) or errno.EIO
            raise OSError(number, why(cause), os.fspath(path)) from cause
        if written is not None:
            self.digests[os.path.basename(path)] = written.entry()

    def rename(self, path: Path_, new_path: Path_) -> None:
        """Rename a file, and what is known of it."""
        self.store.rename(path, new_path)
        self.digests[os.path.basename(new_path)] = self.digests.pop(os.path.basename(path))

    def concat_path(self, path: Path_, suffix: str) -> Path_:
        """The path of an entry of a folder."""
        return self.store.concat_path(path, suffix)

    def init_path(self, path: Path_) -> Path_:
        """The path as the store has it."""
        return self.store.init_path(path)

    def mkdir(self, path: Path_) -> None:
        """Make a folder."""
        self.store.mkdir(path)

    def exists(self, path: Path_) -> bool:
        """True if there is a file or folder."""
        return self.store.exists(path)

    def rm_file(self, path: Path_) -> None:
        """Remove a file."""
        self.store.rm_file(path)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Path_) -> bool:
        """Any path will do."""
        return True


class _DigestStream(io.IOBase):
    """A stream that digests what goes through it."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream
        self.digest, self.length = xxhash.xxh3_128(), 0
        self.failure: Exception | None = None

    def write(self, data: Any) -> int:
        """Write all of it."""
        try:
            self.stream.write(data)
        except Exception as error:  # clients have classes of their own
            self.failure = error
            raise
        self.digest.update(data)
        size = memoryview(data).nbytes
        self.length += size
        transfer.moved(size)
        return size

    def entry(self) -> FileEntry:
        """What was written so far."""
        return FileEntry(self.length, self.digest.hexdigest())

    def tell(self) -> int:
        """Bytes so far."""
        return self.length

    def fileno(self) -> int:
        """The system's number of the file, for fsync: what is buffered goes to it first."""
        self.stream.flush()
        return int(self.stream.fileno())

    def flush(self) -> None:
        """Hand on what is buffered."""
        if not self.stream.closed:
            self.stream.flush()

    def close(self) -> None:
        """Close the file too."""
        self.stream.close()
        super().close()
