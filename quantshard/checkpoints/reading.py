"""Reading a checkpoint in one process, entry by entry, whatever processes and meshes wrote it."""

from __future__ import annotations

import io

import torch
from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem

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
        self.files.set_up_storage_reader(self.metadata, is_coordinator=True)

    def tensor(self, key: str, entry: TensorStorageMetadata) -> Tensor:
        """A whole tensor, on the CPU."""
        found = torch.empty(entry.size, dtype=entry.properties.dtype)
        self._read(key, found)
        return found

    def content(self, key: str) -> bytes:
        """The file content of an entry that is not a tensor."""
        return self._read(key, None).contents[key]

    def _read(self, key: str, into: Tensor | None) -> _Planner:
        planner = _Planner()
        try:
            planner.set_up_planner({key: into}, self.metadata, is_coordinator=True)
            self.files.read_data(planner.create_local_plan(), planner).wait()
        except (OSError, RuntimeError, ValueError, KeyError) as error:
            why = (str(error).strip() or type(error).__name__).splitlines()[0].removeprefix(f"{key} cannot be read: ")
            raise CheckpointError(f"{self.path} is damaged: {key} cannot be read ({why})") from error
        return planner


class _Planner(DefaultLoadPlanner):
    """Keeps the bytes of entries that are not tensors."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False)
        self.contents: dict[str, bytes] = {}

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self.contents[read_item.dest_index.fqn] = value.getvalue()
