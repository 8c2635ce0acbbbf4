"""Reading a checkpoint's entries from files that anybody may have written: nothing in them is run.

`SafeReader` reads for DCP, which loads a rank's part of many entries with it and `SafePlanner` (`read_into`), and entry
by entry for one process that looks at a checkpoint, whatever processes and meshes wrote it.
"""

from __future__ import annotations

import io
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from quantshard import private_torch
from quantshard.checkpoints.disk import agreement, transfer
from quantshard.checkpoints.disk.store import Path_, locate, why
from quantshard.checkpoints.untrusted import entries
from quantshard.checkpoints.untrusted.entries import RecordedCall
from quantshard.checkpoints.untrusted.extras import EXTRA
from quantshard.checkpoints.untrusted.metadata import read_metadata
from quantshard.checkpoints.untrusted.pickles import NeedsCodeError
from quantshard.collectives import process_groups
from quantshard.errors import CheckpointError, LostRankError


class DamagedError(CheckpointError):
    """The files of a checkpoint cannot be read, whatever the model."""


class MissingError(DamagedError):
    """There is no checkpoint, or an incomplete one; the next older one is looked for as in the place of a damaged."""


class SafeReader(FileSystemReader):
    """Reads a checkpoint in a directory by its checked metadata; entries are decoded by `entries`, not by `torch.load`.

    Args:
        path: the directory, or its URL.
        metadata: what `read_metadata(path)` gave, if that was called before.
    """

    def __init__(self, path: Path_, metadata: Metadata | None = None) -> None:
        super().__init__(path)
        self.given = path
        self.store, self.place = locate(path)
        self._metadata = metadata

    def read_metadata(self) -> Metadata:
        """The checked metadata. Without DCP's keywords: there are no metadata of single ranks to fall back on."""
        if self._metadata is None:
            self._metadata = read_metadata(self.place)
        return self._metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """As DCP's."""
        super().set_up_storage_reader(metadata, is_coordinator, *args, **kwargs)
        self._metadata = metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read the items of a plan, each file opened once and from its beginning to its end.

        Raises:
            CheckpointError: naming the entry that is damaged or is not what the metadata say.
        """
        transfer.expect(sum(self.storage_data[item.storage_index].length for item in plan.items))
        by_file: dict[str, list[ReadItem]] = defaultdict(list)
        for item in plan.items:
            by_file[self.storage_data[item.storage_index].relative_path].append(item)
        for name, items in by_file.items():
            with self._open(name) as file:
                for item in sorted(items, key=lambda item: self.storage_data[item.storage_index].offset):
                    self._read_item(file, item, planner)
                    transfer.moved(self.storage_data[item.storage_index].length)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def pieces(self, key: str) -> Iterator[tuple[ChunkStorageMetadata, Tensor]]:
        """Each chunk of a tensor with its values, one at a time in memory.

        Raises:
            CheckpointError: naming the entry; it is damaged, or not what the metadata say.
        """
        for chunk, found in self.stored(key):
            assert isinstance(found, Tensor)
            yield chunk, found

    def stored(
        self, key: str, calls: Collection[str] = ()
    ) -> Iterator[tuple[ChunkStorageMetadata, Tensor | RecordedCall]]:
        """`pieces`, of which some may be what the `calls` of another library would make; see `entries.read_entry`."""
        metadata = self.read_metadata()
        entry = metadata.state_dict_metadata[key]
        assert isinstance(entry, TensorStorageMetadata)
        for chunk in entry.chunks:
            info = metadata.storage_data[MetadataIndex(key, chunk.offsets)]
            with self._open(info.relative_path) as file:
                yield chunk, self._tensor(file, key, chunk.sizes, info, calls)

    def tensor(self, key: str) -> Tensor:
        """A whole tensor, put together of its chunks, on the CPU.

        Raises:
            CheckpointError: naming the entry; it is none, damaged, or not what the metadata say.
        """
        entry = self.read_metadata().state_dict_metadata.get(key)
        if not isinstance(entry, TensorStorageMetadata):
            raise CheckpointError(f"it has no tensor {key}")
        found = torch.empty(entry.size, dtype=entry.properties.dtype, device="cpu")
        for chunk, values in self.pieces(key):
            found[tuple(slice(o, o + n) for o, n in zip(chunk.offsets, chunk.sizes, strict=True))] = values
        return found

    def content(self, key: str) -> bytes:
        """The bytes of an entry that is no tensor.

        Raises:
            CheckpointError: naming the entry; it is a tensor, or cannot be read.
        """
        metadata = self.read_metadata()
        if not isinstance(metadata.state_dict_metadata.get(key), BytesStorageMetadata):
            raise CheckpointError(f"it has no entry {key} but a tensor")
        info = metadata.storage_data[MetadataIndex(key)]
        with self._open(info.relative_path) as file:
            file.seek(info.offset)
            return file.read(info.length)

    def object(self, key: str) -> Any:
        """The plain object in an entry that is no tensor.

        Raises:
            CheckpointError: naming the entry; it is damaged, or no plain value.
        """
        return decoded(key, self.content(key))

    @contextmanager
    def damage_named(self, key: str) -> Iterator[None]:
        """While it lasts, errors of reading an entry say that the checkpoint is damaged, and which: for who reads
        several. That an object needs code to be read is no damage.

        Raises:
            NeedsCodeError: as it is.
            CheckpointError: any other, with the checkpoint's path.
        """
        try:
            yield
        except NeedsCodeError:
            raise
        except CheckpointError as error:
            raise CheckpointError(
                f"{self.given} is damaged: {key} cannot be read ({why_unread(key, error)})"
            ) from error

    @contextmanager
    def _open(self, name: str) -> Iterator[BinaryIO]:
        try:
            with self.store.create_stream(self.store.join(self.place, name), "rb") as file:
                yield cast(BinaryIO, file)
        except OSError as error:
            raise CheckpointError(f"{name} cannot be read ({why(error)})") from error

    def _read_item(self, file: BinaryIO, item: ReadItem, planner: LoadPlanner) -> None:
        info, key = self.storage_data[item.storage_index], item.storage_index.fqn
        if item.type == LoadItemType.BYTE_IO:
            file.seek(info.offset)
            planner.load_bytes(item, io.BytesIO(file.read(info.length)))
            return
        found = self._tensor(file, key, self._sizes(item.storage_index), info)
        assert isinstance(found, Tensor)
        target = planner.resolve_tensor(item).detach()
        part = found[tuple(slice(o, o + n) for o, n in zip(item.storage_offsets, item.lengths, strict=True))]
        if part.shape != target.shape:
            raise CheckpointError(f"{key} has {tuple(part.shape)} here where {tuple(target.shape)} are wanted")
        target.copy_(part)
        planner.commit_tensor(item, target)

    def _sizes(self, index: MetadataIndex) -> torch.Size:
        """The sizes of a chunk, which an index hints at."""
        entry = self.read_metadata().state_dict_metadata[index.fqn]
        assert isinstance(entry, TensorStorageMetadata)
        at = index.index
        hinted = entry.chunks[at : at + 1] if at is not None and at >= 0 else []
        return next(chunk.sizes for chunk in (*hinted, *entry.chunks) if chunk.offsets == index.offset)

    def _tensor(
        self, file: BinaryIO, key: str, size: torch.Size, info: Any, calls: Collection[str] = ()
    ) -> Tensor | RecordedCall:
        """A chunk, shown to be the tensor that the metadata describe: DCP would cast or cut another."""
        entry = self.read_metadata().state_dict_metadata[key]
        assert isinstance(entry, TensorStorageMetadata)
        dtype = entry.properties.dtype
        try:
            found = entries.read_entry(file, info.offset, info.length, calls)
            if isinstance(found, RecordedCall):
                return found
            if not isinstance(found, Tensor) or found.dtype != dtype or found.shape != size:
                what = f"{getattr(found, 'dtype', type(found).__name__)} {list(getattr(found, 'shape', ()))}"
                raise CheckpointError(f"it is {what}, and the metadata say {dtype} {list(size)}")
        except CheckpointError as error:
            raise CheckpointError(f"{key} cannot be read: {error}") from error
        return found


class SafePlanner(DefaultLoadPlanner):
    """Decodes entries that are not tensors by `entries`; DCP's own planner would unpickle them.

    `left_out`: of the caller's own entries those that need code to be read, each with what is said of it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.left_out: dict[str, str] = {}

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Put an object where it belongs in the state dict.

        Raises:
            CheckpointError: it is damaged, or no plain value and not the caller's own.
        """
        key = read_item.dest_index.fqn
        try:
            found = decoded(key, value.getvalue())
        except NeedsCodeError as error:
            if not key.startswith(f"{EXTRA}."):
                raise
            self.left_out[key] = str(error)
            return
        if self.flatten_state_dict:
            private_torch.set_element(self.original_state_dict, self.mappings[key], found)
        else:
            self.state_dict[key] = found


def decoded(key: str, content: bytes) -> Any:
    """The plain object in an entry that is no tensor.

    Raises:
        NeedsCodeError: naming the entry; it is no plain value.
        CheckpointError: naming the entry; it is damaged.
    """
    try:
        return entries.read_entry(io.BytesIO(content), 0, len(content))
    except CheckpointError as error:
        raise type(error)(f"{key} cannot be read: {error}") from error


def why_unread(key: str, error: CheckpointError) -> str:
    """What was wrong with an entry, without its name."""
    return str(error).removeprefix(f"{key} cannot be read: ")


def placeholder(stored: TensorStorageMetadata | BytesStorageMetadata) -> Tensor | None:
    """What `read_into` reads a whole entry into: an empty tensor on the CPU, or None, which an object replaces."""
    if isinstance(stored, TensorStorageMetadata):
        return torch.empty(stored.size, dtype=stored.properties.dtype, device="cpu")
    return None


def read_whole(path: Path_, metadata: Metadata, keys: Iterable[str]) -> dict[str, Any]:
    """Entries of a checkpoint, tensors whole and on the CPU; each rank reads for itself.

    Raises:
        CheckpointError: as of `read_into`.
    """
    state: dict[str, Any] = {key: placeholder(metadata.state_dict_metadata[key]) for key in keys}
    if state:
        read_into(path, metadata, state, no_dist=True)
    return state


def read_into(path: Path_, metadata: Metadata, state: dict[str, Any], no_dist: bool = False) -> dict[str, str]:
    """Read entries into a state dict: tensors in place, a rank its own part. A collective call unless `no_dist`.

    Returns:
        The caller's own entries that were left out, since they need code to be read: what is said of each, by its key.

    Raises:
        DamagedError: on every rank, with the first failure of any.
        CheckpointError: no damage, but a rank has no memory for it, or was interrupted.
        KeyboardInterrupt, SystemExit: it was this rank.
    """
    planner, alone = SafePlanner(), no_dist or process_groups.world() is None
    try:
        reader = SafeReader(path, metadata)
        private_torch.load_checkpoint(state, storage_reader=reader, planner=planner, no_dist=alone)
    except (CheckpointException, OSError, RuntimeError, ValueError, KeyError) as error:
        if isinstance(error, CheckpointException):
            agreement.raise_interrupt(error, 0 if alone else agreement.rank())
        why = agreement.first_failure(error)
        if _lacks_memory(error):
            raise CheckpointError(f"{path} cannot be read into the memory that there is: {why}") from error
        if agreement.is_loss_of_a_rank(error):
            raise LostRankError(f"{path} could not be read: another rank ended, or did not come: {why}") from error
        raise DamagedError(
            f"{path} is damaged or incomplete: {why}; restore its files or choose another checkpoint"
        ) from error
    return planner.left_out


def _lacks_memory(error: BaseException) -> bool:
    found = [f for f, _ in error.failures.values()] if isinstance(error, CheckpointException) else [error]
    return any(isinstance(each, MemoryError | torch.OutOfMemoryError) for each in found)
