"""What `quantshard inspect` shows of safetensors files: weights by the names, dtypes and scales of any layout.

No configuration is asked for, so that a file alone can be looked into; data are read some rows at a time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from quantshard import numerics
from quantshard.argument_kinds import PATH, check_arguments, suggests_names
from quantshard.checkpoints.disk.commit import is_complete
from quantshard.checkpoints.disk.store import Path_, local, locate, why
from quantshard.checkpoints.inspect import inspection
from quantshard.checkpoints.inspect.contents import TensorStatistics, count_codes
from quantshard.checkpoints.inspect.inspection import WEIGHT, Inspection, TensorSummary
from quantshard.errors import CheckpointError
from quantshard.formats import E2M1, E4M3, E5M2, E8M0, Encoding
from quantshard.interop.layouts.files import SUFFIX, SafetensorsFiles
from quantshard.interop.layouts.table import LAYOUTS

_ELEMENTS: Final = {torch.float8_e4m3fn: E4M3, torch.float8_e5m2: E5M2, torch.uint8: E2M1}
_BYTES_AT_ONCE = 1 << 22


@dataclass(frozen=True)
class _KeySuffixes:
    """How the names of a weight's codes, scales and second scale end; the second one divides or multiplies."""

    codes: str
    scale: str
    second: str | None = None
    divides: bool = False


def _names_of_layouts() -> tuple[_KeySuffixes, ...]:
    found = {_KeySuffixes("_qdata", "_scale"): None}  # torchao's: l._weight_qdata, l._weight_scale
    for layout in LAYOUTS.values():
        if not layout.is_plain:
            codes, scale = layout.codes_key.removeprefix("weight"), layout.scale_key.removeprefix("weight")
            second = (layout.second.key.removeprefix("weight"), layout.second.divides) if layout.second else ()
            found[_KeySuffixes(codes, scale, *second)] = None
    return tuple(sorted(found, key=lambda names: names.second is None))  # whoever has two scales has a first one, too


_NAMES: Final = _names_of_layouts()


@dataclass(frozen=True)
class _StoredWeight:
    """The keys of a tensor and of its scales. `encoding`: that of its codes, None for a tensor in high precision."""

    codes: str
    encoding: Encoding | None = None
    scale: str | None = None
    second: str | None = None
    divides: bool = False

    @property
    def keys(self) -> tuple[str, ...]:
        return tuple(key for key in (self.codes, self.scale, self.second) if key is not None)


@suggests_names
def inspect(path: Path_, data: bool = True) -> Inspection:
    """Look into a checkpoint directory, or into safetensors files: one, or those of a directory.

    Not a collective call; nothing in the files is run, and one chunk, or some rows, are in memory at a time.

    Args:
        data: whether to read scales and codes; else metadata, headers and tags alone are read.

    Raises:
        CheckpointError: it is none of these, or damaged.
    """
    check_arguments("inspect", PATH, path=path)
    if _is_exported(path):
        return _SafetensorsInspector(SafetensorsFiles(local(path, "safetensors files"), any_dtype=True)).inspection(
            str(path), data
        )
    return inspection.inspect_checkpoint(path, data)


def _is_exported(path: Path_) -> bool:
    store, place = locate(path)
    if place.endswith(SUFFIX):
        return True
    try:
        return not is_complete(path) and any(name.endswith(SUFFIX) for name in store.names(place))
    except NotADirectoryError:
        raise CheckpointError(f"{path} is a file, and no checkpoint, which is a folder, nor {SUFFIX}") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be looked at ({why(error)}); see that it can") from error


class _SafetensorsInspector:
    """Safetensors files, weight by weight."""

    def __init__(self, files: SafetensorsFiles) -> None:
        self.files = files

    def inspection(self, path: str, data: bool) -> Inspection:
        """A row for each weight of the files. `data`: whether codes and scales are read, for figures of them.

        Raises:
            CheckpointError: the files hold no tensors, or cannot be read.
        """
        rows = tuple(self._row(weight, data) for weight in self._weights())
        if not rows:
            raise CheckpointError(f"{path} holds no tensors")
        return Inspection(path, rows, (), None)

    def _weights(self) -> list[_StoredWeight]:
        """Tensors, each with its scales, in the order of their names."""
        found = [weight for key in self.files.names() if (weight := self._with_scales(key)) is not None]
        taken = {key for weight in found for key in weight.keys}
        found += [_StoredWeight(key) for key in self.files.names() if key not in taken]
        return sorted(found, key=lambda weight: weight.codes)

    def _with_scales(self, key: str) -> _StoredWeight | None:
        """The quantized weight whose codes have this key; None if they are no codes."""
        encoding = _ELEMENTS.get(self.files.tensors[key][0])
        if encoding is None:
            return None
        for names in _NAMES:
            base = key.removesuffix(names.codes)
            scale, second = base + names.scale, None if names.second is None else base + names.second
            there = key.endswith(names.codes) and scale in self.files and (second is None or second in self.files)
            fits = there and self._is_grid(scale, key) and (second is None or self._bytes(second) > 0)
            if fits and (encoding is E2M1) <= (second is not None):
                return _StoredWeight(key, encoding, scale, second, names.divides)
        return None

    def _is_grid(self, scale: str, codes: str) -> bool:
        """Whether the shape of a tensor can be that of scales of codes."""
        dims = len(self.files.tensors[scale][1])
        return dims <= 1 or dims <= len(self.files.tensors[codes][1])

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
        """The shape of a weight's values: a byte holds two codes of four bits."""
        shape = self.files.tensors[weight.codes][1]
        if weight.encoding is None or not shape:
            return shape
        return (*shape[:-1], shape[-1] * (8 // weight.encoding.bits))

    def _tag(self, weight: _StoredWeight) -> str:
        """How a weight is stored, in words: its dtype, or its encoding, its scales' and their block."""
        if weight.encoding is None or weight.scale is None:
            return _said(self.files.tensors[weight.codes][0])
        dtype, grid = self.files.tensors[weight.scale]
        scale = E8M0.name if dtype in (torch.uint8, torch.float8_e8m0fnu) else _said(dtype)
        return f"{weight.encoding.name}, {scale} a {_block(self._shape(weight), grid)}"

    def _figures(self, weight: _StoredWeight) -> TensorStatistics:
        """Figures from the codes and scales of a quantized weight.

        Raises:
            CheckpointError: they cannot be read.
        """
        assert weight.encoding is not None and weight.scale is not None
        found = TensorStatistics()
        for codes in self._rows(weight.codes):
            elements, zeros, saturated = count_codes(codes.view(torch.uint8), weight.encoding)
            found.elements, found.zeros = found.elements + elements, found.zeros + zeros
            found.saturated += saturated
        second = self._second(weight)
        for stored in self._rows(weight.scale):
            values = (numerics.decode(stored, E8M0) if stored.dtype == torch.uint8 else stored.float()) * second
            if values.numel():
                bad = int((~values.isfinite() | (values < 0)).sum())
                if bad:
                    found.wrong.append(f"{weight.scale}: {bad} of {values.numel()} scales are not finite")
                low, high = float(values.min()), float(values.max())
                before = found.scales or (low, high)
                found.scales = (min(before[0], low), max(before[1], high))
        return found

    def _second(self, weight: _StoredWeight) -> float:
        if weight.second is None:
            return 1.0
        value = float(torch.cat([part.reshape(-1).float() for part in self._rows(weight.second)]).max())
        if weight.divides:
            return 1 / value if value else math.inf
        return value

    def _rows(self, key: str) -> Iterator[Tensor]:
        """The values of a tensor, some rows at a time."""
        shape = self.files.tensors[key][1]
        if not shape or 0 in shape:  # of rows without columns there may be very many
            yield self.files.read(key)
            return
        step = max(1, _BYTES_AT_ONCE // max(self._bytes(key) // max(shape[0], 1), 1))
        for start in range(0, shape[0], step):
            yield self.files.read(key, slice(start, start + step))


def _block(shape: tuple[int, ...], grid: tuple[int, ...]) -> str:
    """What one scale is for, from the shapes of values and scales."""
    if all(n == 1 for n in grid):
        return "tensor"
    if len(grid) == 1:
        return "row"
    rows, cols = (math.ceil(n / max(m, 1)) for n, m in zip(shape[-2:], grid[-2:], strict=True))
    return "row" if (rows, cols) == (1, shape[-1]) else f"{rows}x{cols} block"


def _said(dtype: torch.dtype) -> str:
    return E4M3.name if dtype == E4M3.native else str(dtype).removeprefix("torch.")
