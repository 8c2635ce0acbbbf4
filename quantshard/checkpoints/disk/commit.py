"""Commits a checkpoint atomically: after a save, either all of it is visible or nothing.

If directories can be renamed, all ranks write into a hidden one, which the coordinator completes and renames. Otherwise
files are written in place: first an empty manifest, which marks the checkpoint as incomplete, and last the manifest.
"""

import os
import re
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, cast

import torch
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from quantshard.checkpoints.disk import agreement
from quantshard.checkpoints.disk.checksums import ChecksumStore
from quantshard.checkpoints.disk.manifest import MANIFEST, METADATA_FILE, FileEntry, Manifest
from quantshard.checkpoints.disk.ownership import OwnershipToken
from quantshard.checkpoints.disk.store import FsspecStore, LocalStore, Path_, Store, expect_transfer, locate, why
from quantshard.errors import CheckpointError, warn_user

_DIGESTS = "quantshard: digests"
_HIDDEN = re.compile(r"\.(?P<name>.+)\.[0-9a-f]{16}\.(?P<kind>tmp|old)")
CHECKPOINT_FILE = re.compile(r"\.metadata(\.tmp)?|__\d+_\d+\.distcp|" + re.escape(MANIFEST))


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
    """Whether a checkpoint was written completely, by quantshard or by plain DCP, which writes `.metadata` last."""
    store, store_path = locate(path)
    try:
        if not store.is_file(store.join(store_path, METADATA_FILE)):
            return False
        manifest_file = store.join(store_path, MANIFEST)
        return store.renames or not store.is_file(manifest_file) or store.size(manifest_file) > 0
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({why(error)})") from error


def prepare_target(path: Path_, replace: bool = False, owner: OwnershipToken | None = None) -> SaveTarget:
    """Check that a checkpoint can be written to `path`, and remove the files of killed saves. On the coordinator."""
    try:
        store, store_path = locate(path)
        clean(store.parent(store_path), os.path.basename(store_path.rstrip("/")))
        names = store.names(store_path)
        if not replace and METADATA_FILE in names and is_complete(path):
            raise CheckpointError(f"{path} holds a complete checkpoint; save to another directory")
        # with a trailing slash, the link would be followed
        if not replace and isinstance(store, LocalStore) and os.path.islink(store_path.rstrip("/")):
            raise CheckpointError(f"{path} is a symbolic link; remove it, or save to its target")
        if foreign_names := [name for name in names if not CHECKPOINT_FILE.fullmatch(name)]:
            raise CheckpointError(f"{path} holds other files ({foreign_names[0]}); save to a new directory")
        if store.renames:
            store.make(store.parent(store_path))
        else:
            if store.exists(store_path):
                remove_folder(store, store_path)
            store.make(store_path)
            store.write(store.join(store_path, MANIFEST), b"")
        return SaveTarget(store_path, secrets.token_hex(8), replace, owner)
    except OSError as error:
        raise CheckpointError(save_failure(path, error)) from error


def clean(folder: Path_, only: str = "") -> None:
    """Finish the renames of killed saves in a folder, of one checkpoint or of all, and remove what else they left."""
    store, store_path = locate(folder)
    if not isinstance(store, LocalStore):
        return
    names = store.names(store_path)
    visible = set(names)
    for name in names:  # sorted, so the old checkpoint comes before the new one
        match = _HIDDEN.fullmatch(name)
        if match is None or only not in ("", match["name"]):
            continue
        new = name.removesuffix("old") + "tmp"
        if match["kind"] == "old" and match["name"] not in visible and new in visible:
            # killed between the two renames of `put_in_place`: the new checkpoint is complete
            store.rename(store.join(store_path, new), store.join(store_path, match["name"]))
            visible.add(match["name"])
        with suppress(OSError):  # harmless if it stays, or has its name now
            store.remove(store.join(store_path, name))


def remove_folder(store: Store, folder: str) -> None:
    """Remove a checkpoint's folder, first the file without which it is incomplete: a kill can stop the rest."""
    if isinstance(store, FsspecStore):
        with suppress(FileNotFoundError):
            store.rm_file(store.join(folder, METADATA_FILE))
    store.remove(folder)


@contextmanager
def abandoned_if_it_fails(target: SaveTarget) -> Iterator[None]:
    """On an error in the context, remove on rank 0 what the failed save wrote, with a warning if that fails."""
    try:
        yield
    except BaseException:
        # a rank that is still writing cannot commit without these files, and the next save removes what it adds
        if agreement.rank() == 0:
            _abandon(target)
        raise


def _abandon(target: SaveTarget) -> None:
    store, folder = target.store, target.written_in
    try:
        if not store.renames:  # a newer run may write to the same place
            if target.owner is not None:
                target.owner.check()
            if is_complete(folder):
                return
        if store.exists(folder):
            remove_folder(store, folder)
    except (OSError, CheckpointError) as error:
        warn_user(f"{folder}, from a failed save, could not be removed ({why(error)})")


def save_failure(path: Path_, error: BaseException) -> str:
    if isinstance(error, CheckpointError):
        return str(error)
    number, first = agreement.first_failed(error)
    where = "" if number == 0 else f"on rank {number}: "
    return f"{path} could not be written: {where}{agreement.reason(first)}; other checkpoints are unchanged"


class CommitWriter(FileSystemWriter):
    """DCP's file writer, whose `finish` commits the checkpoint. `facts`: entries of the manifest about the run."""

    def __init__(self, target: SaveTarget, facts: Mapping[str, Any]) -> None:
        super().__init__(target.written_in, sync_files=False)  # each file is synced when it is closed
        self.target, self.facts = target, dict(facts)
        self.recorder = ChecksumStore(target.store)
        self.fs = cast(FileSystem, self.recorder)
        self.path = cast(Path, target.store.init_path(target.written_in))

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's files. Their checksums are sent to the coordinator with the results."""
        tensors = [item.tensor_data for item in plan.items if item.tensor_data is not None]  # objects are small
        expect_transfer(sum(data.chunk.sizes.numel() * data.properties.dtype.itemsize for data in tensors))
        results = super().write_data(plan, planner).wait()
        future: Future[list[WriteResult]] = Future()
        future.set_result([*results, WriteResult(MetadataIndex(_DIGESTS), 0, self.recorder.digests)])
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the metadata and the manifest, and commit. On the coordinator."""
        files: dict[str, FileEntry] = {}
        for rank_results in results:
            files.update(rank_results[-1].storage_data)
        super().finish(metadata, [rank_results[:-1] for rank_results in results])
        files[METADATA_FILE] = self.recorder.digests[METADATA_FILE]
        self._check(files)
        manifest = Manifest(
            files=files,
            world_size=len(results),
            torch=torch.__version__,
            saved_at=datetime.now(timezone.utc).isoformat(timespec="seconds"),
            **self.facts,
        )
        commit(self.target, manifest)

    def _check(self, files: Mapping[str, FileEntry]) -> None:
        store, folder = self.recorder.store, self.target.written_in
        for name, entry in files.items():
            path = store.join(folder, name)
            size = store.size(path) if store.is_file(path) else None
            if size != entry.bytes:
                raise CheckpointError(f"{path} has {entry.bytes} bytes, but {size} on the first rank; share the files")


def commit(target: SaveTarget, manifest: Manifest) -> None:
    if target.owner is not None:
        target.owner.check()
    store, folder = target.store, target.written_in
    store.write(store.join(folder, MANIFEST), manifest.to_json().encode())
    if isinstance(store, LocalStore):
        store.sync(folder)
        put_in_place(store, target)


def put_in_place(store: LocalStore, target: SaveTarget) -> None:
    """Rename the hidden directory to its final name. An existing directory is moved aside first, then removed."""
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
