"""Inspection of safetensors files for `quantshard inspect`, from their headers alone.

Recognizes weights by the names, dtypes and scales of any layout. Needs no configuration, so a single file can be
inspected.
"""

from __future__ import annotations

import math
from typing import Final

import torch

from quantshard.checkpoints import inspection
from quantshard.checkpoints.disk.commit import is_complete
from quantshard.checkpoints.disk.store import Path_, local, locate, why
from quantshard.checkpoints.inspection import WEIGHT, Inspection, TensorSummary
from quantshard.errors import CheckpointError
from quantshard.formats import E2M1, E4M3, E5M2, E8M0
from quantshard.interop.layouts.files import SUFFIX, SafetensorsFiles, nbytes
from quantshard.interop.layouts.table import LAYOUTS

_ELEMENTS: Final = {torch.float8_e4m3fn: E4M3, torch.float8_e5m2: E5M2, torch.uint8: E2M1}


def _key_suffixes() -> tuple[tuple[str, ...], ...]:
    """Return the suffixes of the keys of a weight's codes, scales and second scale (if any) in each layout."""
    suffixes: set[tuple[str, ...]] = {("_qdata", "_scale")}  # torchao's: l._weight_qdata, l._weight_scale
    for layout in LAYOUTS.values():
        if not layout.is_plain:
            keys = (layout.codes_key, layout.scale_key, *([layout.second.key] if layout.second else []))
            suffixes.add(tuple(key.removeprefix("weight") for key in keys))
    # layouts with a second scale first, because their weights also match the suffixes of layouts without one
    return tuple(sorted(suffixes, key=len, reverse=True))


_SUFFIXES: Final = _key_suffixes()


def inspect(path: Path_, data: bool = True) -> Inspection:
    """Inspect a checkpoint directory, a safetensors file, or a directory of safetensors files.

    Not a collective call. Runs no code from the files and holds one chunk in memory at a time.

    Args:
        path: the directory or file.
        data: whether to read a checkpoint's scales and codes, not only metadata and tags. Of safetensors only headers
            are read.

    Raises:
        CheckpointError: `path` is neither a checkpoint nor safetensors, or is damaged.
    """
    if not _is_exported(path):
        return inspection.inspect_checkpoint(path, data)
    files = SafetensorsFiles(local(path, "safetensors files"), any_dtype=True)
    if not files.tensors:
        raise CheckpointError(f"{path} holds no tensors")
    weights = {key: keys for key in files.tensors if (keys := _keys_of_weight(files, key))}
    scales = {scale for keys in weights.values() for scale in keys[1:]}
    names = sorted(files.tensors.keys() - scales)
    return Inspection(str(path), tuple(_summary(files, weights.get(name, (name,))) for name in names), (), None)


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


def _keys_of_weight(files: SafetensorsFiles, key: str) -> tuple[str, ...]:
    """Return the keys of the quantized weight with this key for its codes. Empty: the tensor does not hold codes."""
    dtype, shape = files.tensors[key]
    if dtype not in _ELEMENTS:
        return ()
    for codes_suffix, *suffixes in _SUFFIXES:
        scales = [key.removesuffix(codes_suffix) + suffix for suffix in suffixes]
        is_stored = key.endswith(codes_suffix) and all(
            name in files and nbytes(*files.tensors[name]) for name in scales
        )
        # bytes are codes of 4 bits only next to a second scale
        has_scales = len(scales) > 1 or dtype != torch.uint8
        if is_stored and has_scales and len(files.tensors[scales[0]][1]) <= max(1, len(shape)):
            return (key, *scales)
    return ()


def _summary(files: SafetensorsFiles, keys: tuple[str, ...]) -> TensorSummary:
    """Describe a tensor and its scales: the encodings of codes and scales and the block size, or the dtype."""
    dtype, shape = files.tensors[keys[0]]
    tag = _said(dtype)
    if len(keys) > 1:
        encoding = _ELEMENTS[dtype]
        # one byte holds two 4-bit codes
        shape = (*shape[:-1], shape[-1] * (8 // encoding.bits)) if shape else shape
        scale_dtype, grid = files.tensors[keys[1]]
        scale = E8M0.name if scale_dtype in (torch.uint8, torch.float8_e8m0fnu) else _said(scale_dtype)
        tag = f"{encoding.name}, {scale} a {_block(shape, grid)}"
    size = sum(nbytes(*files.tensors[key]) for key in keys)
    return TensorSummary(keys[0], WEIGHT, tag, len(keys) > 1, shape, size, chunks=1)


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
