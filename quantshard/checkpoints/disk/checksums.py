"""Checksums of files, computed while they are written: a save reads nothing, and damage on the way shows."""

import errno
import io
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import xxhash

from quantshard.checkpoints.disk.manifest import FileEntry
from quantshard.checkpoints.disk.store import Path_, Store, report_transfer, why

_BUFFER_BYTES = 1 << 20


class ChecksumStore:
    """A store that records the length and the checksum of each file written through it, by name."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.digests: dict[str, FileEntry] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.store, name)

    @contextmanager
    def create_stream(self, path: Path_, mode: str) -> Iterator[io.IOBase]:
        file: ChecksumFile | None = None
        try:
            with self.store.create_stream(path, mode) as stream:
                file = ChecksumFile(stream, syncs=self.store.renames)
                writer = io.BufferedWriter(file, _BUFFER_BYTES)
                try:
                    yield writer
                    writer.close()
                finally:
                    file.abandon()
        except Exception as error:
            # torch.save replaces the errors of a file
            cause = error if file is None or file.failure is None else file.failure
            if not isinstance(cause, OSError):
                raise
            raise OSError(cause.errno or errno.EIO, why(cause), os.fspath(path)) from cause
        self.digests[os.path.basename(path)] = FileEntry(file.length, file.digest.hexdigest())

    def rename(self, path: Path_, new_path: Path_) -> None:
        self.store.rename(path, new_path)
        self.digests[os.path.basename(new_path)] = self.digests.pop(os.path.basename(path))


class ChecksumFile(io.RawIOBase):
    """A file that computes the checksum of the bytes written to it. `syncs`: make it durable when it is closed."""

    def __init__(self, stream: Any, syncs: bool) -> None:
        self.stream, self.syncs, self.length, self.digest = stream, syncs, 0, xxhash.xxh3_128()
        self.failure: OSError | None = None

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        try:
            self.stream.write(data)
        except OSError as error:
            self.failure = error
            raise
        self.digest.update(data)
        size = memoryview(data).nbytes
        self.length += size
        report_transfer(size)
        return size

    def tell(self) -> int:
        return self.length

    def close(self) -> None:
        if not self.closed:
            super().close()
            if self.syncs:
                self.stream.flush()
                os.fsync(self.stream.fileno())
            self.stream.close()

    def abandon(self) -> None:
        """Close without writing what is still buffered."""
        super().close()
