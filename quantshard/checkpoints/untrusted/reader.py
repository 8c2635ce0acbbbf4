"""Reads entries of untrusted checkpoints; no code in a file is executed.

`SafeReader` serves DCP, which loads a rank's part of many entries with `SafePlanner` (`read_into`). It also reads
single entries in one process, whatever mesh wrote the checkpoint.
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
    """The files of a checkpoint cannot be read by any model."""


class MissingError(DamagedError):
    """A checkpoint does not exist or is incomplete. As for a damaged one, the next older checkpoint is tried."""


class SafeReader(FileSystemReader):
    """Reads a checkpoint with validated metadata; `entries` decodes its entries instead of `torch.load`.

    Args:
        path: a directory or URL.
        metadata: the result of `read_metadata(path)`; None to read it.
    """

    def __init__(self, path: Path_, metadata: Metadata | None = None) -> None:
        super().__init__(path)
        self.given = path
        self.store, self.place = locate(path)
        self._metadata = metadata

    def read_metadata(self) -> Metadata:
        """Return the validated metadata. DCP's keywords are not supported: ranks have no metadata of their own."""
        if self._metadata is None:
            self._metadata = read_metadata(self.place)
        return self._metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """See DCP's reader."""
        super().set_up_storage_reader(metadata, is_coordinator, *args, **kwargs)
        self._metadata = metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read the items of a plan; each file is opened once and read in order.

        Raises:
            CheckpointError: an entry is damaged or contradicts the metadata; the message names the entry.
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
        """Iterate over the chunks of a tensor with their values; one chunk is in memory at a time.

        Raises:
            CheckpointError: the entry is damaged or contradicts the metadata; the message names the entry.
        """
        for chunk, values in self.stored(key):
            assert isinstance(values, Tensor)
            yield chunk, values

    def stored(
        self, key: str, calls: Collection[str] = ()
    ) -> Iterator[tuple[ChunkStorageMetadata, Tensor | RecordedCall]]:
        """Like `pieces`, but values can be a `RecordedCall` of a name in `calls` (see `entries.read_entry`)."""
        metadata = self.read_metadata()
        entry = metadata.state_dict_metadata[key]
        assert isinstance(entry, TensorStorageMetadata)
        for chunk in entry.chunks:
            info = metadata.storage_data[MetadataIndex(key, chunk.offsets)]
            with self._open(info.relative_path) as file:
                yield chunk, self._tensor(file, key, chunk.sizes, info, calls)

    def tensor(self, key: str) -> Tensor:
        """Read a whole tensor, assembled from its chunks, on the CPU.

        Raises:
            CheckpointError: the entry is not a tensor, is damaged, or contradicts the metadata; the message names the
                entry.
        """
        entry = self.read_metadata().state_dict_metadata.get(key)
        if not isinstance(entry, TensorStorageMetadata):
            raise CheckpointError(f"it has no tensor {key}")
        result = torch.empty(entry.size, dtype=entry.properties.dtype, device="cpu")
        for chunk, values in self.pieces(key):
            result[tuple(slice(o, o + n) for o, n in zip(chunk.offsets, chunk.sizes, strict=True))] = values
        return result

    def content(self, key: str) -> bytes:
        """Read the bytes of an entry that is not a tensor.

        Raises:
            CheckpointError: the entry is a tensor, or cannot be read; the message names the entry.
        """
        metadata = self.read_metadata()
        if not isinstance(metadata.state_dict_metadata.get(key), BytesStorageMetadata):
            raise CheckpointError(f"it has no entry {key} but a tensor")
        info = metadata.storage_data[MetadataIndex(key)]
        with self._open(info.relative_path) as file:
            file.seek(info.offset)
            return file.read(info.length)

    def object(self, key: str) -> Any:
        """Read the plain object in an entry that is not a tensor.

        Raises:
            CheckpointError: the entry is damaged, or not a plain value; the message names the entry.
        """
        return decoded(key, self.content(key))

    @contextmanager
    def damage_named(self, key: str) -> Iterator[None]:
        """Report errors in the block as damage of the entry `key`, with the checkpoint's path.

        Use it to read several entries. A value that needs code to be read is not damage.

        Raises:
            NeedsCodeError: unchanged.
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
        chunk = self._tensor(file, key, self._sizes(item.storage_index), info)
        assert isinstance(chunk, Tensor)
        target = planner.resolve_tensor(item).detach()
        part = chunk[tuple(slice(o, o + n) for o, n in zip(item.storage_offsets, item.lengths, strict=True))]
        if part.shape != target.shape:
            raise CheckpointError(f"{key} has {tuple(part.shape)} here where {tuple(target.shape)} are wanted")
        target.copy_(part)
        planner.commit_tensor(item, target)

    def _sizes(self, index: MetadataIndex) -> torch.Size:
        """Sizes of a chunk; the index of a `MetadataIndex` is only a hint."""
        entry = self.read_metadata().state_dict_metadata[index.fqn]
        assert isinstance(entry, TensorStorageMetadata)
        position = index.index
        first_guess = entry.chunks[position : position + 1] if position is not None and position >= 0 else []
        return next(chunk.sizes for chunk in (*first_guess, *entry.chunks) if chunk.offsets == index.offset)

    def _tensor(
        self, file: BinaryIO, key: str, size: torch.Size, info: Any, calls: Collection[str] = ()
    ) -> Tensor | RecordedCall:
        """Read a chunk and check it against the metadata; DCP would cast or slice a different tensor."""
        entry = self.read_metadata().state_dict_metadata[key]
        assert isinstance(entry, TensorStorageMetadata)
        dtype = entry.properties.dtype
        try:
            value = entries.read_entry(file, info.offset, info.length, calls)
            if isinstance(value, RecordedCall):
                return value
            if not isinstance(value, Tensor) or value.dtype != dtype or value.shape != size:
                description = f"{getattr(value, 'dtype', type(value).__name__)} {list(getattr(value, 'shape', ()))}"
                raise CheckpointError(f"it is {description}, and the metadata say {dtype} {list(size)}")
        except CheckpointError as error:
            raise CheckpointError(f"{key} cannot be read: {error}") from error
        return value


class SafePlanner(DefaultLoadPlanner):
    """Decodes entries that are not tensors by `entries`; DCP's default planner would unpickle them.

    `left_out`: the caller's own entries that need code to be read -> error text.
    """

    def __init__(self) -> None:
        super().__init__()
        self.left_out: dict[str, str] = {}

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Put an object into the state dict.

        Raises:
            CheckpointError: the object is damaged, or needs code to be read and is not the caller's own.
        """
        key = read_item.dest_index.fqn
        try:
            decoded_value = decoded(key, value.getvalue())
        except NeedsCodeError as error:
            if not key.startswith(f"{EXTRA}."):
                raise
            self.left_out[key] = str(error)
            return
        if self.flatten_state_dict:
            private_torch.set_element(self.original_state_dict, self.mappings[key], decoded_value)
        else:
            self.state_dict[key] = decoded_value


def decoded(key: str, content: bytes) -> Any:
    """Decode the plain object in an entry that is not a tensor.

    Raises:
        NeedsCodeError: the entry is not a plain value; the message names the entry.
        CheckpointError: the entry is damaged; the message names the entry.
    """
    try:
        return entries.read_entry(io.BytesIO(content), 0, len(content))
    except CheckpointError as error:
        raise type(error)(f"{key} cannot be read: {error}") from error


def why_unread(key: str, error: CheckpointError) -> str:
    """The problem with an entry, without its name."""
    return str(error).removeprefix(f"{key} cannot be read: ")


def placeholder(stored: TensorStorageMetadata | BytesStorageMetadata) -> Tensor | None:
    """Target for `read_into` to read a whole entry: an empty CPU tensor, or None to be replaced by an object."""
    if isinstance(stored, TensorStorageMetadata):
        return torch.empty(stored.size, dtype=stored.properties.dtype, device="cpu")
    return None


def read_whole(path: Path_, metadata: Metadata, keys: Iterable[str]) -> dict[str, Any]:
    """Read entries of a checkpoint, tensors whole and on the CPU; each rank reads independently.

    Raises:
        CheckpointError: see `read_into`.
    """
    state: dict[str, Any] = {key: placeholder(metadata.state_dict_metadata[key]) for key in keys}
    if state:
        read_into(path, metadata, state, no_dist=True)
    return state


def read_into(path: Path_, metadata: Metadata, state: dict[str, Any], no_dist: bool = False) -> dict[str, str]:
    """Read entries into a state dict: tensors in place, for each rank its own part. A collective call unless `no_dist`.

    Returns:
        The caller's own entries that were left out because they need code to be read: key -> error text.

    Raises:
        DamagedError: an entry could not be read; raised on every rank, with the first failure of any rank.
        CheckpointError: a rank ran out of memory, or was lost or interrupted.
        KeyboardInterrupt, SystemExit: this rank was interrupted.
    """
    planner, is_local = SafePlanner(), no_dist or process_groups.world() is None
    try:
        reader = SafeReader(path, metadata)
        private_torch.load_checkpoint(state, storage_reader=reader, planner=planner, no_dist=is_local)
    except (CheckpointException, OSError, RuntimeError, ValueError, KeyError) as error:
        if isinstance(error, CheckpointException):
            agreement.raise_interrupt(error, 0 if is_local else agreement.rank())
        reason = agreement.first_failure(error)
        if _lacks_memory(error):
            raise CheckpointError(f"{path} cannot be read into the memory that there is: {reason}") from error
        if agreement.is_loss_of_a_rank(error):
            raise LostRankError(f"{path} could not be read: another rank ended, or did not come: {reason}") from error
        raise DamagedError(
            f"{path} is damaged or incomplete: {reason}; restore its files or choose another checkpoint"
        ) from error
    return planner.left_out


def _lacks_memory(error: BaseException) -> bool:
    errors = [f for f, _ in error.failures.values()] if isinstance(error, CheckpointException) else [error]
    return any(isinstance(cause, MemoryError | torch.OutOfMemoryError) for cause in errors)
