"""Writes safetensors files, and reads untrusted ones by slices; `safetensors` itself rejects invalid headers."""

import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from quantshard import foreign
from quantshard.checkpoints.conversions import in_batches
from quantshard.checkpoints.disk.manifest import is_shape
from quantshard.checkpoints.disk.store import expect_transfer, is_inside, local, regular_size, report_transfer, why
from quantshard.errors import CheckpointError
from quantshard.foreign import FILE_BYTES, FieldReader
from quantshard.interop.layouts.names import HeadCounts

SUFFIX: Final = ".safetensors"
INDEX: Final = "model.safetensors.index.json"

CONFIGURATION: Final = "config.json"
MOST, MOST_HEADS = 1 << 30, 1 << 16
"""Largest size and largest number of heads accepted in a configuration, which is untrusted input."""

_CENTERED_FAMILIES: Final = frozenset(
    "gemma gemma2 gemma3 gemma3_text nemotron qwen3_5 qwen3_5_text qwen3_5_moe qwen3_5_moe_text qwen3_next "
    "recurrent_gemma vaultgemma".split()
)
"""Families (model_type) of transformers with norms that multiply by 1 + weight."""

DTYPES: Final = {
    "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "U8": torch.uint8,
    "F8_E4M3": torch.float8_e4m3fn,
}  # fmt: skip

_COMPANIONS: Final = (
    "generation_config.json", "tokenizer*", "special_tokens_map.json", "added_tokens.json", "merges.txt", "vocab.*",
    "chat_template*",
)  # fmt: skip


@dataclass(frozen=True)
class TensorBatch:
    """Tensors of one file that are computed together from our `weight`: dtypes and shapes, and the function."""

    weight: str
    tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]
    make: Callable[[], Mapping[str, Tensor]]

    @property
    def nbytes(self) -> int:
        return sum(nbytes(*spec) for spec in self.tensors.values())


def nbytes(dtype: torch.dtype, shape: Sequence[int]) -> int:
    return dtype.itemsize * math.prod(shape)


def write_safetensors(
    folder: Path, groups: Sequence[TensorBatch], max_shard_bytes: int, metadata: Mapping[str, str]
) -> int:
    """Write groups as sharded safetensors with an index, one file in memory at a time. Returns the bytes."""
    shards = list(in_batches(groups, lambda group: group.nbytes, max_shard_bytes)) or [[]]
    weight_map = {}
    total = sum(group.nbytes for group in groups)
    expect_transfer(total)
    for number, shard in enumerate(shards, start=1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        tensors: dict[str, Tensor] = {}
        for group in shard:
            tensors |= {key: value.contiguous() for key, value in group.make().items()}
            report_transfer(group.nbytes)
        # save_file lets only the owner read the file
        (folder / name).touch()
        mode = (folder / name).stat().st_mode
        save_file(tensors, folder / name, {"format": "pt", **metadata})
        (folder / name).chmod(mode)
        weight_map.update(dict.fromkeys(tensors, name))
    write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})
    return total


def companions(folder: Path, *names: str) -> list[Path]:
    """List files that belong to a model's weights (tokenizer, generation settings), and files that match `names`."""
    patterns = (*names, *_COMPANIONS)
    return [path for path in sorted(folder.iterdir()) if any(fnmatchcase(path.name, name) for name in patterns)
            and (path.is_symlink() or not path.is_dir())]  # fmt: skip


def copied_lines(copied: Sequence[Path]) -> list[str]:
    return [f"copied: {', '.join(path.name for path in copied)}"] if copied else []


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def read_layout_json(path: Path, kind: str = "configuration") -> dict[str, Any]:
    return foreign.read_json(path, FILE_BYTES[kind], raising=CheckpointError)


def read_config(config: Mapping[str, Any] | str | os.PathLike[str] | None) -> dict[str, Any]:
    if config is None:
        return {}
    if isinstance(config, Mapping):
        return dict(config)
    path = local(config, "a configuration")
    return read_layout_json(path / CONFIGURATION if path.is_dir() else path)


def heads_of(config: Mapping[str, Any]) -> HeadCounts | None:
    fields = FieldReader(config, CONFIGURATION)
    queries = fields.integer("num_attention_heads", 1, MOST_HEADS)
    groups = fields.integer("num_key_value_heads", 1, MOST_HEADS) or queries
    return None if queries is None or groups is None else HeadCounts(queries, groups)


def is_tied(config: Mapping[str, Any]) -> bool:
    return FieldReader(config, CONFIGURATION).flag("tie_word_embeddings")


def files_center_gamma(config: Mapping[str, Any]) -> bool:
    """Return whether a Hugging Face configuration belongs to a family that stores norm weights as gamma - 1."""
    return FieldReader(config, CONFIGURATION).text("model_type") in _CENTERED_FAMILIES


class SafetensorsFiles:
    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        self._index: dict[str, str] = {}
        self._open: dict[str, Any] = {}
        self.metadata: dict[str, str] = {}
        self.tensors: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
        self._file_of: dict[str, str] = {}
        for file in self._names():
            self._describe(file)
        for tensor, file in self._index.items():
            if self._file_of.get(tensor) != file:
                raise CheckpointError(f"{self.folder / INDEX}: {tensor} is not in {file}")

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
            if not is_inside(file) or not file.endswith(SUFFIX):
                raise CheckpointError(f"{self.folder / INDEX}: {file!r} of {tensor} is no safetensors file beside it")
        self._index = weight_map
        return sorted(set(weight_map.values()))

    def _describe(self, file: str) -> None:
        try:
            # opening a pipe would block
            regular_size(self.folder / file)
            reader = self._open[file] = safe_open(self.folder / file, framework="pt", device="cpu")
            slices = {name: reader.get_slice(name) for name in reader.keys()}
            headers = {name: (part.get_dtype(), tuple(part.get_shape())) for name, part in slices.items()}
            self.metadata.update(reader.metadata() or {})
        except (SafetensorError, OSError, ValueError, OverflowError) as error:
            raise CheckpointError(f"{self.folder / file} cannot be read as safetensors: {why(error)}") from None
        for name, (dtype, shape) in headers.items():
            if dtype not in DTYPES:
                raise CheckpointError(f"{self.folder / file}: {name} is of dtype {dtype}, which no layout has")
            if not is_shape(shape):
                raise CheckpointError(f"{self.folder / file}: {name} has the shape {list(shape)}, which no tensor has")
            if name in self.tensors:
                raise CheckpointError(f"{self.folder}: {name} is in {self._file_of[name]} and in {file}")
            self.tensors[name], self._file_of[name] = (DTYPES[dtype], shape), file

    def __contains__(self, name: str) -> bool:
        return name in self.tensors

    def read(self, name: str, *slices: slice) -> Tensor:
        try:
            reader = self._open[self._file_of[name]]
            shape = self.tensors[name][1]
            values = reader.get_slice(name)[tuple(slices)] if slices and shape else reader.get_tensor(name)
        except (SafetensorError, OSError, ValueError, IndexError) as error:
            raise CheckpointError(f"{self.folder}: {name} cannot be read: {why(error)}") from None
        assert isinstance(values, Tensor)
        report_transfer(values.nbytes)
        return values

    def nbytes(self) -> int:
        return sum(nbytes(dtype, shape) for dtype, shape in self.tensors.values())
