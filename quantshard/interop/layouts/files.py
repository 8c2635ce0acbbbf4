"""Safetensors files: written as a stream, read slice by slice, and not believed.

A file is 8 bytes, the length of the header (little endian); the header, JSON: name -> dtype, shape and the range of
bytes that holds the tensor; and these bytes. The `safetensors` library refuses headers that are too long, not JSON, or
whose ranges overlap, have gaps or are of another length than dtype and shape say (tests/interop/layouts/test_files.py
holds it to that); names of files in an index are checked here.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from quantshard import foreign
from quantshard.checkpoints.disk import transfer
from quantshard.checkpoints.disk.store import is_inside, why
from quantshard.checkpoints.untrusted.entries import is_shape
from quantshard.errors import CheckpointError
from quantshard.read_limits import FILE_BYTES

SUFFIX: Final = ".safetensors"
INDEX: Final = "model.safetensors.index.json"
SINGLE: Final = "model.safetensors"

DTYPES: Final = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.uint8: "U8",
    torch.float8_e4m3fn: "F8_E4M3",
}
"""The dtypes that layouts have, as a header says them."""

_COMPANIONS: Final = (
    "generation_config.json", "tokenizer*", "special_tokens_map.json", "added_tokens.json", "merges.txt", "vocab.*",
    "chat_template*",
)  # fmt: skip

_OTHER_DTYPES: Final = {
    torch.float64: "F64", torch.float8_e5m2: "F8_E5M2", torch.float8_e8m0fnu: "F8_E8M0", torch.bool: "BOOL",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint64: "U64", torch.uint32: "U32", torch.uint16: "U16",
}  # fmt: skip
_BY_NAME: Final = {name: dtype for dtype, name in (DTYPES | _OTHER_DTYPES).items()}

Described = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]


@dataclass(frozen=True)
class TensorBatch:
    """Tensors that lie in one file and are made together: their dtypes and shapes, and what makes them."""

    tensors: Described
    make: Callable[[], Mapping[str, Tensor]]

    @property
    def nbytes(self) -> int:
        """Bytes of all of them."""
        return sum(_nbytes(*described) for described in self.tensors.values())


def _nbytes(dtype: torch.dtype, shape: Sequence[int]) -> int:
    count = dtype.itemsize
    for size in shape:
        count *= size
    return count


def write_safetensors(
    folder: Path, groups: Sequence[TensorBatch], max_shard_bytes: int, metadata: Mapping[str, str]
) -> int:
    """Write groups as sharded safetensors with their index; one group is in memory at a time. Returns the bytes.

    `metadata`: strings for the headers.
    """
    shards: list[list[TensorBatch]] = [[]]
    for group in groups:
        if shards[-1] and sum(g.nbytes for g in shards[-1]) + group.nbytes > max_shard_bytes:
            shards.append([])
        shards[-1].append(group)
    weight_map = {}
    total = sum(group.nbytes for group in groups)
    transfer.expect(total)
    for number, shard in enumerate(shards, start=1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        _write_file(folder / name, shard, metadata)
        weight_map.update({tensor: name for group in shard for tensor in group.tensors})
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    write_json(folder / INDEX, index)
    return total


def _write_file(path: Path, groups: Sequence[TensorBatch], metadata: Mapping[str, str]) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt", **metadata}}
    at = 0
    for group in groups:
        for name, (dtype, shape) in group.tensors.items():
            end = at + _nbytes(dtype, shape)
            header[name] = {"dtype": DTYPES[dtype], "shape": list(shape), "data_offsets": [at, end]}
            at = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # tensors begin at a multiple of 8 bytes, as the library writes them
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for group in groups:
            made = group.make()
            for name, (dtype, shape) in group.tensors.items():
                tensor = made[name]
                assert (tensor.dtype, tuple(tensor.shape)) == (dtype, shape), (name, tensor.dtype, tensor.shape)
                file.write(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
                transfer.moved(tensor.nbytes)
        file.flush()
        os.fsync(file.fileno())


def companions(folder: Path, *names: str) -> list[Path]:
    """The files of a model's folder that describe it beside its weights: tokenizer, templates, how it generates; and
    those of these names."""
    wanted = (*names, *_COMPANIONS)
    return [path for path in sorted(folder.iterdir()) if any(fnmatchcase(path.name, name) for name in wanted)
            and (path.is_symlink() or not path.is_dir())]  # fmt: skip


def copied_lines(copied: Sequence[Path]) -> list[str]:
    """What is said of files that were copied."""
    return [f"copied beside the weights: {', '.join(path.name for path in copied)}"] if copied else []


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON file to disk."""
    with open(path, "w", encoding="utf-8") as file:
        file.write(json.dumps(content, indent=2) + "\n")
        file.flush()
        os.fsync(file.fileno())


def read_layout_json(path: Path, kind: str = "configuration") -> dict[str, Any]:
    """An object from a JSON file. `kind`: of the file, for its limit.

    Raises:
        CheckpointError: it is missing, longer than `FILE_BYTES` says or not a JSON object.
    """
    return foreign.read_json(path, FILE_BYTES[kind], raising=CheckpointError, wide=True)


class SafetensorsFiles:
    """Safetensors files, a single one or those of a folder, as one table of tensors of which slices are read.

    Args:
        any_dtype: whether tensors may be of dtypes that no layout has, too.

    Raises:
        CheckpointError: there is none, an index names a file outside the folder or a tensor that is not in its file, a
            header is not one, or a dtype is none of `DTYPES`.
    """

    def __init__(self, path: str | os.PathLike[str], any_dtype: bool = False) -> None:
        single = Path(path) if Path(path).name.endswith(SUFFIX) else None
        self._follows = single is not None  # a link that the user has named
        self.folder = Path(path) if single is None else single.parent
        self._dtypes = set(DTYPES) | (set(_OTHER_DTYPES) if any_dtype else set())
        self._index: dict[str, str] = {}
        self._open: dict[str, Any] = {}
        self.metadata: dict[str, str] = {}
        self.tensors: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
        self._file_of: dict[str, str] = {}
        for file in self._names() if single is None else [single.name]:
            self._describe(file)
        self._check_index()

    def _names(self) -> list[str]:
        if not os.path.lexists(self.folder / INDEX):
            names = sorted(path.name for path in self.folder.glob(f"*{SUFFIX}"))
            if not names:
                raise CheckpointError(f"{self.folder} holds no safetensors files")
            return names
        weight_map = read_layout_json(self.folder / INDEX, "index").get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise CheckpointError(f"{self.folder / INDEX} has no weight_map")
        for tensor, file in weight_map.items():
            if not is_inside(file) or "/" in file or not file.endswith(SUFFIX):
                raise CheckpointError(
                    f"{self.folder / INDEX}: {tensor} is said to lie in {file!r}, which is not the name of a "
                    "safetensors file beside it"
                )
        self._index = weight_map
        return sorted(set(weight_map.values()))

    def _describe(self, file: str) -> None:
        try:
            foreign.regular_size(self.folder / file, follow=self._follows)  # a pipe would be waited for
            opened = self._open[file] = safe_open(self.folder / file, framework="pt", device="cpu")
            found = {name: opened.get_slice(name) for name in opened.keys()}
            described = {name: (part.get_dtype(), tuple(part.get_shape())) for name, part in found.items()}
            self.metadata.update(opened.metadata() or {})
        except (SafetensorError, OSError, ValueError, OverflowError) as error:
            raise CheckpointError(f"{self.folder / file} cannot be read as safetensors: {why(error)}") from None
        for name, (dtype, shape) in described.items():
            if _BY_NAME.get(dtype) not in self._dtypes:
                raise CheckpointError(f"{self.folder / file}: {name} is of dtype {dtype}, which no layout has")
            if not is_shape(shape):
                raise CheckpointError(f"{self.folder / file}: {name} has the shape {list(shape)}, which no tensor has")
            if name in self.tensors:
                raise CheckpointError(f"{name} lies in {self._file_of[name]} and in {file} of {self.folder}")
            self.tensors[name], self._file_of[name] = (_BY_NAME[dtype], shape), file

    def _check_index(self) -> None:
        for tensor, file in self._index.items():
            if self._file_of.get(tensor) != file:
                raise CheckpointError(f"{self.folder / INDEX}: {tensor} is not in {file}")

    def __contains__(self, name: str) -> bool:
        return name in self.tensors

    def names(self) -> Iterator[str]:
        """Names of all tensors."""
        return iter(self.tensors)

    def read(self, name: str, *slices: slice) -> Tensor:
        """A slice of a tensor; the rest is not read."""
        try:
            opened = self._open[self._file_of[name]]
            shape = self.tensors[name][1]
            found = opened.get_slice(name)[tuple(slices)] if slices and shape else opened.get_tensor(name)
        except (SafetensorError, OSError, ValueError, IndexError) as error:
            raise CheckpointError(f"{self.folder}: {name} cannot be read: {why(error)}") from None
        assert isinstance(found, Tensor)
        transfer.moved(found.nbytes)
        return found

    def nbytes(self) -> int:
        """The bytes of all tensors."""
        return sum(_nbytes(dtype, shape) for dtype, shape in self.tensors.values())
