"""A quantized weight as one tensor of bytes, for files whose readers take a tensor for a weight.

The bytes are those of `components.state_of`: the format tag first, then codes, scales and state in its order. They are
one-dimensional, so that a reader that does not know them finds a wrong shape, not wrong values; and one tensor, so that
no file parts codes from their scales.
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
    """uint8 [n]: what a state dict holds of a weight, whole, by key suffix in the order of `components.state_of`."""
    ordered = [entries[FORMAT_SUFFIX], *(value for suffix, value in entries.items() if suffix != FORMAT_SUFFIX)]
    return torch.cat([value.detach().cpu().contiguous().reshape(-1).view(torch.uint8) for value in ordered])


def is_packed(value: Tensor) -> bool:
    """Whether an entry of a state dict is what `pack` makes: codes have two dims."""
    return value.dtype == torch.uint8 and value.ndim == 1


def unpack(param: Tensor, packed: Tensor, name: str) -> dict[str, Tensor]:
    """Key suffix -> whole tensor, of a packed weight that goes into this parameter, which may be sharded.

    Raises:
        CheckpointError: it is of another format or shape.
    """
    live = components.state_of(param)
    tag, own = packed[:FORMAT_TAG_BYTES], components.storage_of(param).cell.tag
    if len(tag) == FORMAT_TAG_BYTES and components.read_format_tag(tag) != own:
        raise CheckpointError(
            f"{name} is stored as {components.read_format_tag(tag)!r}, but this model's weight is {own!r}; load it "
            "with the recipe that it was saved with"
        )
    sizes = {s: math.prod(v.shape) * v.element_size() for s, v in live.items() if s != FORMAT_SUFFIX}
    if len(packed) != FORMAT_TAG_BYTES + sum(sizes.values()):
        raise CheckpointError(
            f"{name} has {len(packed)} bytes, and a {own!r} weight {list(param.shape)} takes "
            f"{FORMAT_TAG_BYTES + sum(sizes.values())}; the file is of another model"
        )
    pieces = packed[FORMAT_TAG_BYTES:].split(list(sizes.values()))
    # a piece may begin anywhere among the bytes; a view as int64 needs an aligned copy
    found = {
        s: piece.clone().view(live[s].dtype).reshape(live[s].shape) for s, piece in zip(sizes, pieces, strict=True)
    }
    return {FORMAT_SUFFIX: tag, **found}
