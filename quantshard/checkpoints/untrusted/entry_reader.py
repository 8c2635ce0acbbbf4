"""Reading a checkpoint in one process, entry by entry, whatever processes and meshes wrote it."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from quantshard.checkpoints.disk.store import Path_
from quantshard.checkpoints.untrusted.metadata import read_metadata
from quantshard.checkpoints.untrusted.pickles import NeedsCodeError
from quantshard.checkpoints.untrusted.reader import SafeReader, decoded
from quantshard.errors import CheckpointError


class CheckpointReader:
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

    def decoded(self, key: str, content: bytes) -> Any:
        """The plain object in such content.

        Raises:
            NeedsCodeError: it is no plain value, which is no damage.
            CheckpointError: it is damaged.
        """
        try:
            return decoded(key, content)
        except NeedsCodeError:
            raise
        except CheckpointError as error:
            raise self._damaged(key, error) from error

    def _damaged(self, key: str, error: CheckpointError) -> CheckpointError:
        return CheckpointError(f"{self.path} is damaged: {key} cannot be read ({why_unread(key, error)})")


def why_unread(key: str, error: CheckpointError) -> str:
    """What was wrong with an entry, without its name."""
    return str(error).removeprefix(f"{key} cannot be read: ")
