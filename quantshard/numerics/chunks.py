"""Chunked evaluation of elementwise operations on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor

_CPU_CHUNK: Final = 1 << 15  # elements per thread: the working set fits in the cache


def in_chunks(chain: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    """Return `chain(*inputs)`, elementwise over inputs of one shape. On a CPU, chunks are several times faster."""
    shape, size = inputs[0].shape, _CPU_CHUNK * torch.get_num_threads()
    if inputs[0].device.type != "cpu" or inputs[0].numel() <= size:
        return chain(*inputs)
    pieces = [chain(*chunk) for chunk in zip(*(x.reshape(-1).split(size) for x in inputs), strict=True)]
    return torch.cat(pieces).unflatten(0, shape)
