"""Reads the entries of checkpoints that anyone can have written: no code in a file runs, and sizes are bounded.

Tensors and objects are `torch.save` archives, which `torch.load(weights_only=True)` reads after a check that no record
expands. Damaged bytes are detected by the checksums of the manifest only.
"""

import io
import pickle
import re
import zipfile
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader, metadata as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner
from torch.futures import Future

from quantshard import private_torch
from quantshard.checkpoints.disk import agreement, manifest
from quantshard.checkpoints.disk.manifest import METADATA_FILE, DamagedError, read_metadata
from quantshard.checkpoints.disk.store import Path_, expect_transfer, locate, report_transfer, why
from quantshard.errors import CheckpointError, ConfigurationError, LostRankError, printable

T = TypeVar("T")

OBJECT_BYTES = 16 << 20
"""Maximum bytes of a pickled object in a checkpoint, without its tensors, which are stored separately."""

OBJECT_VALUES, OBJECT_DEPTH = 1 << 21, 32
"""Maximum number of values in such an object (containers can repeat), and of containers inside each other."""


@contextmanager
def named(key: str) -> Iterator[None]:
    """Begin the errors of the block with the name of an entry."""
    try:
        yield
    except (CheckpointError, OSError) as error:
        reason = why(error) if isinstance(error, OSError) else error
        raise CheckpointError(f"{key} cannot be read: {reason}") from error


def read_entry(file: BinaryIO, offset: int, length: int) -> Any:
    """Load the `torch.save` archive in a range of a file, if it is not damaged and needs no code to be read."""
    file.seek(offset)
    part = io.BytesIO(file.read(length))
    try:
        total = 0
        for record in zipfile.ZipFile(part).infolist():
            total += record.file_size
            # A compressed record could expand to any size.
            if record.file_size != record.compress_size or total > length:
                raise CheckpointError(f"its records claim more than its {length} bytes")
            if record.file_size > OBJECT_BYTES and record.filename.endswith("/data.pkl"):
                raise CheckpointError(f"its data.pkl has more than {OBJECT_BYTES} bytes; save what is large as tensors")
        part.seek(0)
        return torch.load(part, map_location="cpu", weights_only=True)
    except (CheckpointError, MemoryError, OSError):
        raise
    except Exception as error:  # zipfile and torch.load raise many kinds for damaged files
        name = re.search(r"GLOBAL (\S+)", str(error))
        if isinstance(error, pickle.UnpicklingError) and name is not None:
            reason = f"it names {printable(name[1][:120])}, which needs code to be read; nothing was run"
        else:
            reason = f"it is not a complete archive of plain data ({type(error).__name__})"
        raise CheckpointError(reason) from error


def decoded(key: str, content: bytes) -> Any:
    with named(key):
        return _plain_object(content)


def _plain_object(content: bytes) -> Any:
    value = read_entry(io.BytesIO(content), 0, len(content))
    pending, count = [(value, 0)], 0
    while pending:
        part, depth = pending.pop()
        count += 1
        if count > OBJECT_VALUES or depth > OBJECT_DEPTH:
            raise CheckpointError("its values are nested too deeply, contain each other, or are too many")
        if isinstance(part, dict):
            pending += [(inner, depth + 1) for inner in (*part, *part.values())]
        elif isinstance(part, list | tuple | set):
            pending += [(inner, depth + 1) for inner in part]
        elif isinstance(part, Tensor):
            plain_tensor(part)
        elif not isinstance(part, int | float | complex | str | bytes | torch.dtype | torch.device | None):
            raise CheckpointError(f"it has a {type(part).__name__}, which is not plain data")
    return value


def plain_tensor(value: Any) -> Tensor:
    """Check that a value is a plain tensor; `torch.load` has checked that it lies within its bytes."""
    if type(value) not in (Tensor, nn.Parameter) or value.layout != torch.strided or value.device.type != "cpu":
        raise CheckpointError(f"it has a {type(value).__name__}, which is not a plain tensor")
    return cast(Tensor, value)


def checked_entry(what: str, value: Any) -> tuple[bytes, Any]:
    """Return the bytes of an entry to write, and the value that will be read from them. `what`: its name in errors."""
    try:
        file = io.BytesIO()
        torch.save(value, file)
        return file.getvalue(), _plain_object(file.getvalue())
    # The caller's objects can raise anything while they are saved.
    except Exception as error:
        problem = f"{what}, a {type(value).__name__}, cannot be saved as plain data ({why(error)})"
        remedy = "convert it to numbers, strings, tensors and containers (a DTensor must be an entry of `extra` itself)"
        raise ConfigurationError(f"{problem}; {remedy}") from error


def empty(entry: dcp.STORAGE_TYPES) -> Tensor | None:
    """A CPU tensor to read an entry into, or None for an object."""
    if isinstance(entry, dcp.TensorStorageMetadata):
        return torch.empty(entry.size, dtype=entry.properties.dtype, device="cpu")
    return None


def dtype_of(entry: dcp.STORAGE_TYPES | None) -> torch.dtype | None:
    return entry.properties.dtype if isinstance(entry, dcp.TensorStorageMetadata) else None


class NoManifestWarning(UserWarning):
    """A checkpoint without a manifest is loaded, so its files cannot be verified to be of one save."""


class SafeReader(FileSystemReader):
    """A checkpoint that is open for reading, by itself or by DCP. Its metadata are read and checked on construction.

    A DamagedError means that there is no complete checkpoint, or that the metadata cannot be read, or contradict
    themselves, the manifest or the files. `packed`: accept tensors with fewer bytes than their dtype implies, down to
    half a byte per element, as from libraries that save quantized tensors with a nominal dtype.
    """

    def __init__(self, path: Path_, packed: bool = False) -> None:
        super().__init__(path)
        self.path = path  # type: ignore[assignment]
        self.manifest = manifest.read_manifest(path)
        self.metadata = read_metadata(path, self.manifest, packed)
        self.entries: dict[str, dcp.STORAGE_TYPES] = self.metadata.state_dict_metadata
        self.objects: dict[str, Any] = {}

    def read_metadata(self) -> dcp.Metadata:
        """Return the metadata. DCP's keywords are not supported: ranks have no metadata of their own."""
        return self.metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read the items of a plan. Objects are kept in `objects`, because DCP's planner would unpickle them."""
        items = [(item.storage_index, item) for item in plan.items]
        expect_transfer(sum([self.metadata.storage_data[index].length for index, _ in items]))
        for file, index, item in self._located(items):
            location = self.metadata.storage_data[index]
            report_transfer(location.length)
            with named(index.fqn):
                if item.type == LoadItemType.BYTE_IO:
                    file.seek(location.offset)
                    self.objects[index.fqn] = _plain_object(file.read(location.length))
                    continue
                chunk = cast(dcp.TensorStorageMetadata, self.entries[index.fqn]).chunks[cast(int, index.index)]
                tensor = self.checked(index.fqn, chunk, read_entry(file, location.offset, location.length))
            target = planner.resolve_tensor(item).detach()
            part = tensor[tuple(slice(o, o + n) for o, n in zip(item.storage_offsets, item.lengths, strict=True))]
            if part.shape != target.shape:
                raise CheckpointError(f"{index.fqn} has {tuple(part.shape)}, not {tuple(target.shape)}")
            target.copy_(part)
            planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def read_into(self, state: dict[str, Any], no_dist: bool = False) -> None:
        """Read entries into a state dict of flat keys, tensors in place. A collective call unless `no_dist`."""
        planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        is_local = no_dist or not dist.is_initialized()
        try:
            private_torch.load_checkpoint(state, storage_reader=self, planner=planner, no_dist=is_local)
        except (CheckpointException, OSError, RuntimeError, ValueError, KeyError) as error:
            agreement.raise_interrupt(error, 0 if is_local else agreement.rank())
            raise self._load_error(error) from error
        state.update(self.objects)
        self.objects.clear()

    def _load_error(self, error: BaseException) -> CheckpointError:
        reason = agreement.reason(error)
        causes = [cause for cause, _ in error.failures.values()] if isinstance(error, CheckpointException) else [error]
        if any(isinstance(cause, MemoryError | torch.OutOfMemoryError) for cause in causes):
            return CheckpointError(f"{self.path} cannot be read, because memory is exhausted: {reason}")
        if agreement.is_loss_of_a_rank(error):
            return LostRankError(f"{self.path} could not be read: another rank exited or never joined: {reason}")
        remedy = "restore its files or choose another checkpoint"
        return DamagedError(f"{self.path} is damaged or incomplete: {reason}; {remedy}")

    def read(self, keys: Iterable[str]) -> dict[str, Any]:
        """Read whole entries: tensors on the CPU, assembled from their chunks, and objects. Each rank for itself."""
        values: dict[str, Any] = {key: empty(self.entries[key]) for key in keys}
        self.read_into(values, no_dist=True)
        return values

    def value(self, key: str) -> Any:
        return self.read([key])[key]

    def chunks(self, key: str) -> Iterator[tuple[dcp.ChunkStorageMetadata, Any]]:
        """Iterate over the chunks of a tensor with the stored objects; one is in memory at a time."""
        for chunk in cast(dcp.TensorStorageMetadata, self.entries[key]).chunks:
            for file, index, _ in self._located([(dcp.MetadataIndex(key, chunk.offsets), None)]):
                location = self.metadata.storage_data[index]
                with named(key):
                    value = read_entry(file, location.offset, location.length)
                yield chunk, value

    def pieces(self, key: str) -> Iterator[tuple[dcp.ChunkStorageMetadata, Tensor]]:
        for chunk, value in self.chunks(key):
            with named(key):
                tensor = self.checked(key, chunk, value)
            yield chunk, tensor

    def checked(self, key: str, chunk: dcp.ChunkStorageMetadata, value: Any) -> Tensor:
        """Check that a value of `chunks` has the chunk's shape and dtype; DCP would cast or slice other tensors."""
        dtype = cast(dcp.TensorStorageMetadata, self.entries[key]).properties.dtype
        tensor = plain_tensor(value)
        if tensor.dtype != dtype or tensor.shape != chunk.sizes:
            raise CheckpointError(f"it is {tensor.dtype} {list(tensor.shape)}, not {dtype} {list(chunk.sizes)}")
        return tensor

    def check_files(self) -> None:
        if self.manifest is None:
            return
        files = self.manifest.files
        # Under FSDP2, a rank then loads mostly the files that it compared, and finds them in the page cache.
        # DCP's file names are `__RANK_NUMBER.distcp`.
        names = sorted(files.keys() - {METADATA_FILE}, key=lambda name: ([*map(int, re.findall("[0-9]+", name))], name))
        share = names[agreement.rank() :: agreement.rank_count()]
        expect_transfer(sum([files[name].bytes for name in share]))
        for name in share:
            if (problem := manifest.wrong_file(self.path, name, files[name])) is not None:
                raise DamagedError(f"{self.path} is damaged: {problem}; nothing was loaded; choose another")

    def _located(self, items: Iterable[tuple[dcp.MetadataIndex, T]]) -> Iterator[tuple[BinaryIO, dcp.MetadataIndex, T]]:
        """Open each file once, and iterate over the items in the order of the file."""
        store, folder = locate(self.path)
        by_file: dict[str, list[tuple[dcp.MetadataIndex, T]]] = defaultdict(list)
        locations = self.metadata.storage_data
        for index, item in items:
            by_file[locations[index].relative_path].append((index, item))
        for name, of_file in by_file.items():
            try:
                with store.create_stream(store.join(folder, name), "rb") as file:
                    for index, item in sorted(of_file, key=lambda one: locations[one[0]].offset):
                        yield cast(BinaryIO, file), index, item
            except OSError as error:
                raise CheckpointError(f"{name} cannot be read ({why(error)})") from error
