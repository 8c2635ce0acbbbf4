"""Inspection of safetensors files for `quantshard inspect`. Recognizes weights by the names, dtypes and scales of any
layout.

Needs no configuration, so a single file can be inspected. Tensors are read in batches of rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from quantshard import numerics
from quantshard.checkpoints import inspection
from quantshard.checkpoints.disk.commit import is_complete
from quantshard.checkpoints.disk.store import Path_, local, locate, why
from quantshard.checkpoints.inspection import WEIGHT, Inspection, TensorStatistics, TensorSummary, count_codes
from quantshard.errors import CheckpointError
from quantshard.formats import E2M1, E4M3, E5M2, E8M0, Encoding
from quantshard.interop.layouts.files import SUFFIX, SafetensorsFiles
from quantshard.interop.layouts.table import LAYOUTS

_ELEMENTS: Final = {torch.float8_e4m3fn: E4M3, torch.float8_e5m2: E5M2, torch.uint8: E2M1}
_BYTES_AT_ONCE = 1 << 22


@dataclass(frozen=True)
class _KeySuffixes:
    """Suffixes of the keys of a weight's codes, scales and second scale, and whether the second scale divides."""

    codes: str
    scale: str
    second: str | None = None
    divides: bool = False


def _names_of_layouts() -> tuple[_KeySuffixes, ...]:
    suffixes = {_KeySuffixes("_qdata", "_scale"): None}  # torchao's: l._weight_qdata, l._weight_scale
    for layout in LAYOUTS.values():
        if not layout.is_plain:
            codes, scale = layout.codes_key.removeprefix("weight"), layout.scale_key.removeprefix("weight")
            second = (layout.second.key.removeprefix("weight"), layout.second.divides) if layout.second else ()
            suffixes[_KeySuffixes(codes, scale, *second)] = None
    # layouts with a second scale first, because their weights also match the suffixes of layouts without one
    return tuple(sorted(suffixes, key=lambda names: names.second is None))


_NAMES: Final = _names_of_layouts()


@dataclass(frozen=True)
class _StoredWeight:
    """The keys of a tensor and its scales. `encoding`: encoding of the codes; None for a tensor in high precision."""

    codes: str
    encoding: Encoding | None = None
    scale: str | None = None
    second: str | None = None
    divides: bool = False

    @property
    def keys(self) -> tuple[str, ...]:
        return tuple(key for key in (self.codes, self.scale, self.second) if key is not None)


def inspect(path: Path_, data: bool = True) -> Inspection:
    """Inspect a checkpoint directory, a safetensors file, or a directory of safetensors files.

    Not a collective call. Runs no code from the files and holds one chunk, or a batch of rows, in memory at a time.

    Args:
        path: the directory or file.
        data: whether to read scales and codes, not only metadata, headers and tags.

    Raises:
        CheckpointError: `path` is neither a checkpoint nor safetensors, or is damaged.
    """
    if _is_exported(path):
        return _SafetensorsInspector(SafetensorsFiles(local(path, "safetensors files"), any_dtype=True)).inspection(
            str(path), data
        )
    return inspection.inspect_checkpoint(path, data)


def _is_exported(path: Path_) -> bool:
    store, location = locate(path)
    if location.endswith(SUFFIX):
        return True
    try:
        return not is_complete(path) and any(name.endswith(SUFFIX) for name in store.names(location))
    except NotADirectoryError:
        raise CheckpointError(f"{path} is neither a checkpoint folder nor a {SUFFIX} file") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {why(error)}") from error


class _SafetensorsInspector:
    """Inspects safetensors files weight by weight."""

    def __init__(self, files: SafetensorsFiles) -> None:
        self.files = files

    def inspection(self, path: str, data: bool) -> Inspection:
        """Return one row per weight. `data`: whether to read codes and scales for statistics."""
        rows = tuple(self._row(weight, data) for weight in self._weights())
        if not rows:
            raise CheckpointError(f"{path} holds no tensors")
        return Inspection(path, rows, (), None)

    def _weights(self) -> list[_StoredWeight]:
        """Return all tensors, grouped with their scales and sorted by name."""
        weights = [weight for key in self.files.tensors if (weight := self._with_scales(key)) is not None]
        used_keys = {key for weight in weights for key in weight.keys}
        weights += [_StoredWeight(key) for key in self.files.tensors if key not in used_keys]
        return sorted(weights, key=lambda weight: weight.codes)

    def _with_scales(self, key: str) -> _StoredWeight | None:
        """Return the quantized weight that has this key for its codes, or None if the tensor does not hold codes."""
        tensors = self.files.tensors
        encoding = _ELEMENTS.get(tensors[key][0])
        if encoding is None:
            return None
        for names in _NAMES:
            base = key.removesuffix(names.codes)
            scale, second = base + names.scale, None if names.second is None else base + names.second
            has_keys = key.endswith(names.codes) and scale in self.files and (second is None or second in self.files)
            fits = (
                has_keys
                and (len(tensors[scale][1]) <= max(1, len(tensors[key][1])))
                and (second is None or self._bytes(second) > 0)
            )
            if fits and (encoding is E2M1) <= (second is not None):
                return _StoredWeight(key, encoding, scale, second, names.divides)
        return None

    def _row(self, weight: _StoredWeight, data: bool) -> TensorSummary:
        figures = self._figures(weight) if data and weight.scale is not None else None
        return TensorSummary(
            weight.codes,
            WEIGHT,
            self._tag(weight),
            weight.encoding is not None,
            self._shape(weight),
            sum(self._bytes(key) for key in weight.keys),
            1,
            **inspection.counted(figures),
        )

    def _bytes(self, key: str) -> int:
        dtype, shape = self.files.tensors[key]
        return math.prod(shape) * dtype.itemsize

    def _shape(self, weight: _StoredWeight) -> tuple[int, ...]:
        """Return the shape of a weight's values; one byte holds two 4-bit codes."""
        shape = self.files.tensors[weight.codes][1]
        if weight.encoding is None or not shape:
            return shape
        return (*shape[:-1], shape[-1] * (8 // weight.encoding.bits))

    def _tag(self, weight: _StoredWeight) -> str:
        """Describe how a weight is stored: its dtype, or the encodings of its codes and scales and the block size."""
        if weight.encoding is None or weight.scale is None:
            return _said(self.files.tensors[weight.codes][0])
        dtype, grid = self.files.tensors[weight.scale]
        scale = E8M0.name if dtype in (torch.uint8, torch.float8_e8m0fnu) else _said(dtype)
        return f"{weight.encoding.name}, {scale} a {_block(self._shape(weight), grid)}"

    def _figures(self, weight: _StoredWeight) -> TensorStatistics:
        """Compute statistics of a quantized weight's codes and scales."""
        assert weight.encoding is not None and weight.scale is not None
        statistics = TensorStatistics()
        for codes in self._rows(weight.codes):
            elements, zeros, saturated = count_codes(codes.view(torch.uint8), weight.encoding)
            statistics.elements, statistics.zeros = statistics.elements + elements, statistics.zeros + zeros
            statistics.saturated += saturated
        second = self._second(weight)
        for scales in self._rows(weight.scale):
            values = (numerics.decode(scales, E8M0) if scales.dtype == torch.uint8 else scales.float()) * second
            if values.numel():
                bad = int((~values.isfinite() | (values < 0)).sum())
                if bad:
                    statistics.wrong.append(f"{weight.scale}: {bad} of {values.numel()} scales are not finite")
                low, high = float(values.min()), float(values.max())
                scale_range = statistics.scales or (low, high)
                statistics.scales = (min(scale_range[0], low), max(scale_range[1], high))
        return statistics

    def _second(self, weight: _StoredWeight) -> float:
        if weight.second is None:
            return 1.0
        value = float(torch.cat([part.reshape(-1).float() for part in self._rows(weight.second)]).max())
        if weight.divides:
            return 1 / value if value else math.inf
        return value

    def _rows(self, key: str) -> Iterator[Tensor]:
        """Yield a tensor's values in batches of rows."""
        shape = self.files.tensors[key][1]
        # a tensor without columns can have a huge number of rows
        if not shape or 0 in shape:
            yield self.files.read(key)
            return
        step = max(1, _BYTES_AT_ONCE // max(self._bytes(key) // max(shape[0], 1), 1))
        for start in range(0, shape[0], step):
            yield self.files.read(key, slice(start, start + step))


def _block(shape: tuple[int, ...], grid: tuple[int, ...]) -> str:
    """Name the block that one scale covers, from the shapes of values and scales."""
    if all(n == 1 for n in grid):
        return "tensor"
    if len(grid) == 1:
        return "row"
    rows, cols = (math.ceil(n / max(m, 1)) for n, m in zip(shape[-2:], grid[-2:], strict=True))
    return "row" if (rows, cols) == (1, shape[-1]) else f"{rows}x{cols} block"


def _said(dtype: torch.dtype) -> str:
    return E4M3.name if dtype == E4M3.native else str(dtype).removeprefix("torch.")
