"""Commits a checkpoint atomically: after a save, either all of it is visible or nothing.

If directories can be renamed, all ranks write into a hidden directory next to the target. The coordinator adds
`.metadata` and `manifest.json`, makes everything durable, and renames the directory. Otherwise the files are written in
place, and writing the manifest last is the commit.

Each rank computes the checksums of its files while it writes them. So a save reads nothing, and the checksums also
reveal damage on the way to the disk.
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

from quantshard.checkpoints.disk import agreement, manifest, retries, transfer
from quantshard.checkpoints.disk.manifest import MANIFEST, METADATA_FILE, FileEntry, Manifest
from quantshard.checkpoints.disk.ownership import OwnershipToken
from quantshard.checkpoints.disk.store import LocalStore, Path_, Store, describe_error, locate, why
from quantshard.errors import CheckpointError, warn_user

T = TypeVar("T")

_DIGESTS = "quantshard: digests"
_HIDDEN = re.compile(r"\.(?P<name>.+)\.[0-9a-f]{16}\.(tmp|old)")
_OURS = re.compile(r"\.metadata(\.tmp)?|__\d+_\d+\.distcp|" + re.escape(MANIFEST))


@dataclass(frozen=True)
class SaveTarget:
    """The destination of a save.

    `token`: a random id of this attempt, equal on all ranks. `replace`: allow replacing a complete checkpoint. `owner`:
    proves that the run still owns the directory, if the directory belongs to a run.
    """

    path: str
    token: str
    replace: bool = False
    owner: OwnershipToken | None = None

    @property
    def store(self) -> Store:
        """The store that holds `path`."""
        return locate(self.path)[0]

    def hidden(self, kind: str) -> str:
        """The path of a hidden directory next to `path`: "tmp" for new files, "old" for the replaced checkpoint."""
        store = self.store
        name = os.path.basename(self.path.rstrip("/"))
        return store.join(store.parent(self.path), f".{name}.{self.token}.{kind}")

    @property
    def written_in(self) -> str:
        """The directory that the ranks write to."""
        return self.hidden("tmp") if self.store.renames else self.path


def is_complete(path: Path_) -> bool:
    """Whether a checkpoint was written completely: DCP writes its metadata after all data, and the manifest follows.

    Raises:
        CheckpointError: the path cannot be accessed.
    """
    store, store_path = locate(path)
    try:
        return store.is_file(store.join(store_path, METADATA_FILE))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be looked at ({why(error)}); see that it can") from error


def begin(path: Path_, replace: bool = False) -> SaveTarget:
    """Check that a checkpoint can be written to `path`, and remove the files of killed saves. A collective call.

    Raises:
        CheckpointError: the directory holds a complete checkpoint or other files; the same on every rank.
    """
    return agreement.from_rank0(lambda: prepare_target(path, replace))


def prepare_target(path: Path_, replace: bool = False) -> SaveTarget:
    """`begin` on a single rank; not a collective call."""
    try:
        return _prepared(path, replace)
    except OSError as error:
        raise CheckpointError(said_of(path, error)) from error


def _prepared(path: Path_, replace: bool) -> SaveTarget:
    store, store_path = locate(path)
    if is_complete(path) and not replace:
        raise CheckpointError(f"{path} holds a complete checkpoint and is not overwritten; save to another directory")
    _check_link(path, replace)
    if store.exists(store_path):
        try:
            names = store.names(store_path)
        except NotADirectoryError as error:
            raise CheckpointError(f"{path} could not be written: {why(error)}: it is no directory") from None
        if foreign_names := [name for name in names if not _OURS.fullmatch(name)]:
            raise CheckpointError(f"{path} holds other files ({foreign_names[0]}); save to a directory of its own")
        if names and not store.renames:
            store.remove(store_path)
    if isinstance(store, LocalStore):
        store.make(store.parent(store_path))
    clean(store.parent(store_path), os.path.basename(store_path.rstrip("/")))
    return SaveTarget(store_path, secrets.token_hex(8), replace)


def _check_link(path: Path_, replace: bool) -> None:
    """Refuse a symbolic link as a target, since a save would replace the link and not the checkpoint it leads to.

    With `replace`, a link to a complete checkpoint is accepted.
    """
    store, store_path = locate(path)
    link = store_path.rstrip("/")  # with a trailing slash, the link would be followed
    if isinstance(store, LocalStore) and os.path.islink(link) and not (replace and is_complete(path)):
        raise CheckpointError(
            f"{path} is a symbolic link to {os.readlink(link)}, and a checkpoint takes the place of what has its name; "
            "remove the link, or save to where it leads"
        )


def clean(folder: Path_, only: str = "") -> list[str]:
    """Remove what killed saves left in a folder. Returns the removed names.

    `only`: the name of a checkpoint, to remove only the remains of its saves.
    """
    store, store_path = locate(folder)
    removed = []
    for name in store.names(store_path):
        match = _HIDDEN.fullmatch(name)
        if match and only in ("", match["name"]):
            with suppress(OSError):  # harmless if it stays
                store.remove(store.join(store_path, name))
                removed.append(name)
    return removed


def clean_remnants(paths: Iterable[str]) -> None:
    """Remove the remains of killed saves and removals at `paths`, in stores without renames."""
    for path in paths:
        store, store_path = locate(path)
        if store.renames:
            return
        names = store.names(store_path)
        if not {MANIFEST, METADATA_FILE} & set(names) and all(_OURS.fullmatch(name) for name in names):
            with suppress(OSError):  # harmless if it stays
                store.remove(store_path)


def remove(path: Path_) -> None:
    """Remove a checkpoint atomically, or at least make it incomplete first.

    A symbolic link is removed instead of its target.

    Raises:
        CheckpointError: not everything could be removed.
    """
    store, store_path = locate(path)
    try:
        if isinstance(store, LocalStore):
            moved_path = SaveTarget(store_path, secrets.token_hex(8)).hidden("old")
            os.rename(store_path.rstrip("/"), moved_path)
            store.remove(moved_path)
            return
        for name in (MANIFEST, METADATA_FILE):
            with suppress(FileNotFoundError):
                store.rm_file(store.join(store_path, name))
        store.remove(store_path)
    except OSError as error:
        raise CheckpointError(
            f"{path} could not be removed: {agreement.words(error)}; see that this process may write in the folder "
            "that it is in, or remove it yourself"
        ) from error


@contextmanager
def abandoned_if_it_fails(target: SaveTarget) -> Iterator[None]:
    """On an error in the context, remove on rank 0 what the failed save wrote.

    A rank that is still writing cannot commit without these files. What such a rank adds later is removed by the next
    save, which starts only when no rank writes any more.
    """
    try:
        yield
    except BaseException:  # also KeyboardInterrupt; if other ranks still write there, the next save removes the rest
        if agreement.rank() == 0:
            abandon(target)
        raise


def abandon(target: SaveTarget) -> None:
    """Remove what a failed save wrote, with a warning if that fails. On the coordinator.

    Without renames, a newer run writes to the same place, so a run that has lost the directory removes nothing.
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
    """The error message of a failed save: cause, rank, file, what is intact, and a remedy."""
    if isinstance(error, CheckpointError):
        return str(error)
    number, first = agreement.first_failed(error)
    where = "" if number == 0 else f"on rank {number}: "
    remedy = _REMEDIES.get(first.errno or 0) if isinstance(first, OSError) else None
    intact = "nothing of it is kept, and other checkpoints are as they were"
    return f"{path} could not be written: {where}{'; '.join(filter(None, (agreement.words(first), intact, remedy)))}"


class CommitWriter(FileSystemWriter):
    """DCP's file writer, with a `finish` that commits the checkpoint.

    `target`: the same on all ranks. `facts`: `step`, `mesh` and `recipe` of the manifest.
    """

    def __init__(self, target: SaveTarget, facts: Mapping[str, Any]) -> None:
        store = target.store
        super().__init__(target.written_in, sync_files=store.renames)
        self.target, self.facts = target, dict(facts)
        self.recorder = _DigestingFileSystem(store)
        self.fs = cast(FileSystem, self.recorder)
        self.path = cast(Path, store.init_path(target.written_in))

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's files. Their checksums are sent to the coordinator with the results."""
        transfer.expect(sum(_tensor_bytes(item) for item in plan.items))
        write = super().write_data
        results = self._tried(lambda: write(plan, planner).wait())
        future: Future[list[WriteResult]] = Future()
        future.set_result([*results, WriteResult(MetadataIndex(_DIGESTS), 0, self.recorder.digests)])
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the metadata and the manifest, and commit. On the coordinator."""
        files: dict[str, FileEntry] = {}
        for rank_results in results:
            files.update(rank_results[-1].storage_data)
        finish = super().finish
        self._tried(lambda: finish(metadata, [rank_results[:-1] for rank_results in results]))
        files[METADATA_FILE] = self.recorder.digests[METADATA_FILE]
        self._check(files)
        new_manifest = Manifest(
            files=files,
            world_size=len(results),
            torch=torch.__version__,
            saved_at=datetime.now(timezone.utc).isoformat(timespec="seconds"),
            **self.facts,
        )
        commit(self.target, new_manifest)

    def _tried(self, action: Callable[[], T]) -> T:
        """Write whole files, with retries in a remote store.

        Nothing is visible before the commit, so a repeated write is safe.
        """
        store = self.target.store
        if isinstance(store, LocalStore):
            return action()
        return retries.retry(action, lambda error: describe_error(error, self.target.path), store.retry)

    def _check(self, files: Mapping[str, FileEntry]) -> None:
        """Check that this process sees all files that the ranks wrote."""
        store = self.target.store
        for name, entry in files.items():
            path = store.join(self.target.written_in, name)
            size = store.size(path) if store.is_file(path) else None
            if size != entry.bytes:
                raise CheckpointError(
                    f"{path} was written with {entry.bytes} bytes and has {size} as the first rank sees it; save to a "
                    "directory that all ranks share"
                )


def _tensor_bytes(item: WriteItem) -> int:
    """The bytes of a tensor to write; 0 for objects, which are small."""
    data = item.tensor_data
    return 0 if data is None else data.chunk.sizes.numel() * data.properties.dtype.itemsize


def commit(target: SaveTarget, described: Manifest) -> None:
    """Write the manifest, and make the checkpoint visible."""
    parent = multiprocessing.parent_process()
    if parent is not None and not parent.is_alive():
        if target.store.renames:  # otherwise a newer run might already write to this place
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
    """Rename the hidden directory to its final name. An existing directory is moved aside first, then removed."""
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
        with suppress(OSError):  # harmless if it stays; the next save removes it
            store.remove(old)


class _DigestingFileSystem(FileSystemBase):
    """A store that records the checksum of each file written through it, by name."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.digests: dict[str, FileEntry] = {}

    @contextmanager
    def create_stream(self, path: Path_, mode: str) -> Iterator[io.IOBase]:
        """Open a file for the duration of the context."""
        digest_stream: _DigestStream | None = None
        try:
            with self.store.create_stream(path, mode) as stream:
                digest_stream = _DigestStream(stream) if mode == "wb" else None
                yield digest_stream or stream
        except Exception as error:  # torch.save replaces the errors of a stream
            cause = error if digest_stream is None or digest_stream.failure is None else digest_stream.failure
            if not isinstance(error, OSError) and cause is error:
                raise
            number = getattr(cause, "errno", None) or getattr(error, "errno", None) or errno.EIO
            raise OSError(number, why(cause), os.fspath(path)) from cause
        if digest_stream is not None:
            self.digests[os.path.basename(path)] = digest_stream.entry()

    def rename(self, path: Path_, new_path: Path_) -> None:
        """Rename a file and its checksum entry."""
        self.store.rename(path, new_path)
        self.digests[os.path.basename(new_path)] = self.digests.pop(os.path.basename(path))

    def concat_path(self, path: Path_, suffix: str) -> Path_:
        """The path of entry `suffix` of a folder."""
        return self.store.concat_path(path, suffix)

    def init_path(self, path: Path_) -> Path_:
        """The path in the store's form."""
        return self.store.init_path(path)

    def mkdir(self, path: Path_) -> None:
        """Create a folder."""
        self.store.mkdir(path)

    def exists(self, path: Path_) -> bool:
        """Whether a file or folder exists."""
        return self.store.exists(path)

    def rm_file(self, path: Path_) -> None:
        """Remove a file."""
        self.store.rm_file(path)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Path_) -> bool:
        """True: any path is accepted."""
        return True


class _DigestStream(io.IOBase):
    """A stream that computes the checksum of the bytes written to it."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream
        self.digest, self.length = xxhash.xxh3_128(), 0
        self.failure: Exception | None = None

    def write(self, data: Any) -> int:
        """Write all bytes."""
        try:
            self.stream.write(data)
        except Exception as error:  # clients raise their own classes
            self.failure = error
            raise
        self.digest.update(data)
        size = memoryview(data).nbytes
        self.length += size
        transfer.moved(size)
        return size

    def entry(self) -> FileEntry:
        """Length and checksum of the bytes written so far."""
        return FileEntry(self.length, self.digest.hexdigest())

    def tell(self) -> int:
        """The number of bytes written so far."""
        return self.length

    def fileno(self) -> int:
        """The file descriptor, for fsync. Buffered bytes are flushed to it first."""
        self.stream.flush()
        return int(self.stream.fileno())

    def flush(self) -> None:
        """Flush buffered bytes."""
        if not self.stream.closed:
            self.stream.flush()

    def close(self) -> None:
        """Close the underlying file too."""
        self.stream.close()
        super().close()
