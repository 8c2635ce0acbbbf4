"""Packs a quantized weight into one tensor of bytes, for file formats that expect one tensor per weight.

The format tag comes first, then codes, scales and state in the order of `components.state_of`. The result is
one-dimensional, so a reader that does not know the format sees a wrong shape instead of wrong values. A single tensor
also keeps codes and scales in the same file.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from quantshard.errors import CheckpointError
from quantshard.tensor import components
from quantshard.tensor.components import FORMAT_SUFFIX, FORMAT_TAG_BYTES


def pack(entries: Mapping[str, Tensor]) -> Tensor:
    """Pack a weight's unsharded state dict entries, keyed by suffix in the order of `components.state_of`: uint8
    [n]."""
    ordered = [entries[FORMAT_SUFFIX], *(value for suffix, value in entries.items() if suffix != FORMAT_SUFFIX)]
    return torch.cat([value.detach().cpu().contiguous().reshape(-1).view(torch.uint8) for value in ordered])


def is_packed(value: Tensor) -> bool:
    """Return whether a state dict entry was made by `pack`; unpacked codes have two dims."""
    return value.dtype == torch.uint8 and value.ndim == 1


def unpack(param: Tensor, packed: Tensor, name: str) -> dict[str, Tensor]:
    """Unpack a weight to its unsharded tensors, keyed by suffix. `param`: the destination, which can be sharded.

    Raises:
        CheckpointError: the packed weight has another format or shape.
    """
    live = components.state_of(param)
    tag, own_tag = packed[:FORMAT_TAG_BYTES], components.storage_of(param).cell.tag
    if len(tag) == FORMAT_TAG_BYTES and components.read_format_tag(tag) != own_tag:
        raise CheckpointError(
            f"{name} is stored as {components.read_format_tag(tag)!r}, but this model's weight is {own_tag!r}; load it "
            "with the recipe that it was saved with"
        )
    sizes = {s: math.prod(v.shape) * v.element_size() for s, v in live.items() if s != FORMAT_SUFFIX}
    if len(packed) != FORMAT_TAG_BYTES + sum(sizes.values()):
        raise CheckpointError(
            f"{name} has {len(packed)} bytes, and a {own_tag!r} weight {list(param.shape)} takes "
            f"{FORMAT_TAG_BYTES + sum(sizes.values())}; the file is of another model"
        )
    pieces = packed[FORMAT_TAG_BYTES:].split(list(sizes.values()))
    # pieces can start at any byte, but a view as int64 needs alignment: clone
    tensors = {
        s: piece.clone().view(live[s].dtype).reshape(live[s].shape) for s, piece in zip(sizes, pieces, strict=True)
    }
    return {FORMAT_SUFFIX: tag, **tensors}
