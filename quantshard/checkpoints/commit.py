"""Committing a checkpoint: it is there wholly, or not at all.

Where folders can be renamed, all ranks write into a hidden folder beside the target; the coordinator adds `.metadata`
and `manifest.json`, makes all of it durable, and renames it. Elsewhere the files are written in place, and the
manifest, written last, is the commit. A rank digests what it writes while it writes it: nothing is read again, and what
is damaged on its way to the disk is found.
"""

from __future__ import annotations

import io
import multiprocessing
import os
import re
import secrets
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, cast

import torch
import xxhash
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemBase
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from quantshard.checkpoints import ranks
from quantshard.checkpoints.manifest import MANIFEST, Entry, Manifest
from quantshard.checkpoints.metadata import METADATA_FILE
from quantshard.checkpoints.ownership import Proof
from quantshard.checkpoints.store import LocalStore, Path_, Store, locate, why
from quantshard.errors import CheckpointError

_DIGESTS = "quantshard: digests"
_HIDDEN = re.compile(r"\.(?P<name>.+)\.[0-9a-f]{16}\.(tmp|old)")
_OURS = re.compile(r"\.metadata(\.tmp)?|__\d+_\d+\.distcp|" + re.escape(MANIFEST))


@dataclass(frozen=True)
class Target:
    """Where a checkpoint is to stand, and the token that names this attempt on all ranks.

    `replace`: whether one that is complete may be replaced by it. `owner`: what shows that the run which saves has the
    directory still, if one run has it.
    """

    path: str
    token: str
    replace: bool = False
    owner: Proof | None = None

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


def is_complete(path: Path_) -> bool:
    """True if the checkpoint was written to its end: DCP writes its metadata last, and a manifest comes after them.

    Raises:
        CheckpointError: nobody can tell.
    """
    store, place = locate(path)
    try:
        return store.is_file(store.join(place, METADATA_FILE))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be looked at ({why(error)}); see that it can") from error


def begin(path: Path_, replace: bool = False) -> Target:
    """See that a checkpoint can be written here, and remove what a killed attempt left. A collective call.

    Raises:
        CheckpointError: there is a complete one already, or other files; the same on every rank.
    """
    return ranks.from_rank0(lambda: prepare(path, replace))


def prepare(path: Path_, replace: bool = False) -> Target:
    """What `begin` does, on the one rank that looks."""
    store, place = locate(path)
    if is_complete(path) and not replace:
        raise CheckpointError(f"{path} holds a complete checkpoint and is not overwritten; save to another directory")
    if store.exists(place):
        try:
            there = store.names(place)
        except NotADirectoryError as error:
            raise CheckpointError(f"{path} could not be written: {why(error)}: it is no directory") from None
        if others := [name for name in there if not _OURS.fullmatch(name)]:
            raise CheckpointError(f"{path} holds other files ({others[0]}); save to a directory of its own")
        if there and not store.renames:
            store.remove(place)
    clean(store.parent(place), os.path.basename(place.rstrip("/")))
    return Target(place, secrets.token_hex(8), replace)


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
    """Remove a checkpoint: it is gone at once, or first of all no longer complete."""
    store, place = locate(path)
    if isinstance(store, LocalStore):
        aside = Target(place, secrets.token_hex(8)).hidden("old")
        os.rename(place, aside)
        store.remove(aside)
        return
    for name in (MANIFEST, METADATA_FILE):
        with suppress(FileNotFoundError):
            store.rm_file(store.join(place, name))
    store.remove(place)


def abandon(target: Target) -> None:
    """Remove what a failed attempt wrote, if it can be. On the coordinator, when no rank writes any more.

    Without renames the next run writes in the same place: a run that has lost the directory leaves it alone.
    """
    with suppress(OSError, CheckpointError):
        if target.owner is not None and not target.store.renames:
            target.owner.check()
        target.store.remove(target.written_in)


class CommitWriter(FileSystemWriter):
    """DCP's writer of files, whose `finish` commits them.

    `facts`: `step`, `mesh` and `recipe` of the manifest. All ranks are given one target.
    """

    def __init__(self, target: Target, facts: Mapping[str, Any]) -> None:
        store = target.store
        super().__init__(target.written_in, sync_files=store.renames)
        self.target, self.facts = target, dict(facts)
        self.recorder = _Recorder(store)
        self.fs = cast(FileSystem, self.recorder)
        self.path = cast(Path, store.init_path(target.written_in))

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's files; their digests go to the coordinator with the results."""
        results = super().write_data(plan, planner).wait()
        future: Future[list[WriteResult]] = Future()
        future.set_result([*results, WriteResult(MetadataIndex(_DIGESTS), 0, self.recorder.digests)])
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the metadata and the manifest, and commit. On the coordinator."""
        files: dict[str, Entry] = {}
        for of_rank in results:
            files.update(of_rank[-1].storage_data)
        super().finish(metadata, [of_rank[:-1] for of_rank in results])
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

    def _check(self, files: Mapping[str, Entry]) -> None:
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


def commit(target: Target, manifest: Manifest) -> None:
    """Write the manifest, and make the checkpoint appear."""
    parent = multiprocessing.parent_process()
    if parent is not None and not parent.is_alive():
        if target.store.renames:  # elsewhere the next run may write in this place by now
            abandon(target)
        raise CheckpointError(f"{target.path} is not committed: the process that trains is gone")
    if target.owner is not None:
        target.owner.check()
    store, folder = target.store, target.written_in
    store.write(store.join(folder, MANIFEST), manifest.to_json().encode())
    if isinstance(store, LocalStore):
        store.sync(folder)
        put_in_place(store, target)


def put_in_place(store: LocalStore, target: Target) -> None:
    """Rename the folder to its name. What stands there is moved aside first, and removed."""
    old, parent = target.hidden("old"), store.parent(target.path)
    if os.path.isdir(target.path) and (target.replace or not is_complete(target.path)):
        os.rename(target.path, old)
    os.rename(target.written_in, target.path)
    store.sync(parent)
    if os.path.isdir(old):
        store.remove(old)


class _Recorder(FileSystemBase):
    """A store that notes the digest of each file written through it, by name."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.digests: dict[str, Entry] = {}

    @contextmanager
    def create_stream(self, path: Path_, mode: str) -> Iterator[io.IOBase]:
        """A file, open while the context lasts."""
        with self.store.create_stream(path, mode) as stream:
            if mode != "wb":
                yield stream
                return
            written = _Written(stream)
            yield written
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


class _Written(io.IOBase):
    """A stream that digests what goes through it."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream
        self.digest, self.length = xxhash.xxh3_128(), 0

    def write(self, data: Any) -> int:
        """Write all of it."""
        self.stream.write(data)
        self.digest.update(data)
        size = memoryview(data).nbytes
        self.length += size
        return size

    def entry(self) -> Entry:
        """What was written so far."""
        return Entry(self.length, self.digest.hexdigest())

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
