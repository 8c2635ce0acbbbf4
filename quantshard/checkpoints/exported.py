"""What is inside safetensors files of any of the layouts that others read: weights by their names, dtypes and scales.

Headers are read by the safetensors library, which checks them against the file; data are read some rows at a time.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from quantshard import numerics
from quantshard.checkpoints.contents import Figures, count
from quantshard.errors import CheckpointError
from quantshard.formats import E2M1, E4M3, E5M2, E8M0, Encoding

SUFFIX = ".safetensors"

_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
_ELEMENTS = {torch.float8_e4m3fn: E4M3, torch.float8_e5m2: E5M2}
_SCALES = ("_scale_inv", "_scale")
_SECONDS = ("_global_scale", "_scale_2")
"""A divisor (compressed-tensors) and a multiplier (ModelOpt)."""

_CODES = {"weight": "weight", "weight_packed": "weight", "_weight_qdata": "_weight"}
"""How the key of codes ends, and what the keys of their scales begin with in its place."""

_BYTES_AT_ONCE = 1 << 22


@dataclass(frozen=True)
class Stored:
    """One tensor of a file."""

    key: str
    file: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """Of its values."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Weight:
    """A tensor with its scales. `encoding`: that of its codes, None for a tensor in high precision."""

    codes: Stored
    encoding: Encoding | None
    scale: Stored | None
    second: Stored | None

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the values: two codes of four bits are a byte."""
        if self.encoding is None or self.encoding.bits >= 8:
            return self.codes.shape
        return (*self.codes.shape[:-1], self.codes.shape[-1] * (8 // self.encoding.bits))

    @property
    def tag(self) -> str:
        """What it is stored as."""
        dtype = str(self.codes.dtype).removeprefix("torch.")
        if self.encoding is None or self.scale is None:
            return dtype
        scale = E8M0.name if self.scale.dtype in (torch.uint8, torch.float8_e8m0fnu) else _name(self.scale.dtype)
        return f"{self.encoding.name}, {scale} a {self._block()}"

    def _block(self) -> str:
        assert self.scale is not None
        grid = [n for n in self.scale.shape if n != 1] or [1]
        if grid == [1]:
            return "tensor"
        if len(self.scale.shape) == 1:
            return "row"
        rows, cols = (math.ceil(n / max(m, 1)) for n, m in zip(self.shape[-2:], self.scale.shape[-2:], strict=True))
        return "row" if (rows, cols) == (1, self.shape[-1]) else f"{rows}x{cols} block"


def _name(dtype: torch.dtype) -> str:
    return E4M3.name if dtype == E4M3.native else str(dtype).removeprefix("torch.")


class Files:
    """The safetensors files at a path, opened; use it in a `with` statement.

    Raises:
        CheckpointError: there are none, or the header of one is damaged.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._stack = ExitStack()
        self._open: dict[str, Any] = {}
        self.tensors: dict[str, Stored] = {}

    def __enter__(self) -> Files:
        files = sorted(self.path.glob(f"*{SUFFIX}")) if self.path.is_dir() else [self.path]
        if not files:
            raise CheckpointError(f"{self.path} holds no {SUFFIX} files")
        try:
            for file in files:
                self._read_header(file)
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def _read_header(self, file: Path) -> None:
        if not file.is_file():
            raise CheckpointError(f"{file} is no file")
        try:
            opened = self._open[file.name] = self._stack.enter_context(safe_open(file, framework="pt"))
            for key in opened.keys():
                part = opened.get_slice(key)
                dtype = _DTYPES.get(part.get_dtype())
                if dtype is None:
                    raise CheckpointError(f"{file}: {key} is {part.get_dtype()}, which is not supported here")
                if key in self.tensors:
                    raise CheckpointError(f"{key} is in {self.tensors[key].file} and in {file.name}")
                self.tensors[key] = Stored(key, file.name, dtype, tuple(part.get_shape()))
        except (SafetensorError, OSError, ValueError, OverflowError) as error:
            raise CheckpointError(f"{file} is damaged: {' '.join(str(error).split())[:300]}") from error

    def weights(self) -> list[Weight]:
        """Its tensors, each with its scales, in the order of their names."""
        found, taken = [], set()
        for key in self.tensors:
            weight = self._with_scales(key)
            if weight is not None:
                found.append(weight)
                taken |= {part.key for part in (weight.codes, weight.scale, weight.second) if part is not None}
        found += [Weight(tensor, None, None, None) for key, tensor in self.tensors.items() if key not in taken]
        return sorted(found, key=lambda weight: weight.codes.key)

    def _with_scales(self, key: str) -> Weight | None:
        """The quantized weight whose codes have this key; None if they are no codes."""
        prefix, _, last = key.rpartition(".")
        base = ".".join(filter(None, (prefix, _CODES.get(last, last))))
        scales = [self.tensors[base + suffix] for suffix in _SCALES if base + suffix in self.tensors]
        seconds = [self.tensors[base + suffix] for suffix in _SECONDS if base + suffix in self.tensors]
        codes = self.tensors[key]
        packed = E2M1 if codes.dtype == torch.uint8 and seconds else None
        encoding = _ELEMENTS.get(codes.dtype, packed)
        if encoding is None or not scales:
            return None
        return Weight(codes, encoding, scales[0], seconds[0] if seconds else None)

    def figures(self, weight: Weight) -> Figures:
        """What the data of a weight say.

        Raises:
            CheckpointError: they cannot be read.
        """
        found = Figures()
        if weight.encoding is None or weight.scale is None:
            return found
        for codes in self._rows(weight.codes):
            elements, zeros, saturated = count(codes.view(torch.uint8), weight.encoding)
            found.elements, found.zeros = found.elements + elements, found.zeros + zeros
            found.saturated += saturated
        second = self._second(weight)
        for stored in self._rows(weight.scale):
            values = _decoded(stored) * second
            if values.numel():
                bad = int((~values.isfinite() | (values < 0)).sum())
                if bad:
                    found.wrong.append(f"{weight.scale.key}: {bad} of {values.numel()} scales are not finite")
                low, high = float(values.min()), float(values.max())
                before = found.scales or (low, high)
                found.scales = (min(before[0], low), max(before[1], high))
        return found

    def _second(self, weight: Weight) -> float:
        if weight.second is None:
            return 1.0
        value = float(torch.cat([part.reshape(-1).float() for part in self._rows(weight.second)]).max())
        if weight.second.key.endswith(_SECONDS[0]):
            return 1 / value if value else math.inf
        return value

    def _rows(self, stored: Stored) -> Iterator[Tensor]:
        """The values of a tensor, some rows at a time."""
        if not stored.shape:
            yield self._open[stored.file].get_tensor(stored.key)
            return
        part = self._open[stored.file].get_slice(stored.key)
        step = max(1, _BYTES_AT_ONCE // max(stored.bytes // max(stored.shape[0], 1), 1))
        for start in range(0, stored.shape[0], step):
            try:
                yield part[start : start + step]
            except (SafetensorError, OSError, RuntimeError) as error:
                raise CheckpointError(f"{stored.key} cannot be read from {self.path / stored.file}") from error


def _decoded(scale: Tensor) -> Tensor:
    return numerics.decode(scale, E8M0) if scale.dtype == torch.uint8 else scale.float()
