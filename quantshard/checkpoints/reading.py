"""Reading a checkpoint in one process, entry by entry, whatever processes and meshes wrote it."""

from __future__ import annotations

from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from quantshard.checkpoints.metadata import read_metadata
from quantshard.checkpoints.reader import SafeReader
from quantshard.checkpoints.store import Path_
from quantshard.errors import CheckpointError


class Reader:
    """One checkpoint, read entry by entry."""

    def __init__(self, path: Path_) -> None:
        self.path = path
        self.metadata = read_metadata(path)
        self.entries = dict(self.metadata.state_dict_metadata)
        self.files = SafeReader(path, self.metadata)

    def tensor(self, key: str, entry: TensorStorageMetadata) -> Tensor:
        """A whole tensor, on the CPU."""
        try:
            return self.files.tensor(key)
        except CheckpointError as error:
            raise self._damaged(key, error) from error

    def content(self, key: str) -> bytes:
        """The file content of an entry that is not a tensor."""
        try:
            return self.files.content(key)
        except CheckpointError as error:
            raise self._damaged(key, error) from error

    def _damaged(self, key: str, error: CheckpointError) -> CheckpointError:
        why = str(error).removeprefix(f"{key} cannot be read: ")
        return CheckpointError(f"{self.path} is damaged: {key} cannot be read ({why})")
