"""ATen operations that FSDP2 calls to split, fill and copy a quantized tensor; each rule names its callers.

`copy_rules`, `arithmetic` and `reads` have the other operations, and views other than FSDP2's. No rule communicates.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from quantshard import limits
from quantshard.errors import UnsupportedOperationError
from quantshard.tensor.quantized_tensor import RULES, QuantizedTensor, Rule
from quantshard.tensor.reads import read
from quantshard.tensor.storage import Placeholder

aten = torch.ops.aten


def rule(*operations: Any, needed_by: str) -> Callable[[Rule], Rule]:
    """Register the implementation of operations for quantized tensors. `needed_by`: the callers that need it."""
    assert needed_by

    def register(function: Rule) -> Rule:
        for operation in operations:
            RULES[operation] = function
        return function

    return register


def _handle(tensor: QuantizedTensor, shape: Sequence[int] | None = None) -> QuantizedTensor:
    return QuantizedTensor(tensor.quantized_storage, tensor.dtype, torch.Size(tensor.shape if shape is None else shape))


def refused(operation: str, tensor: QuantizedTensor, why: str) -> UnsupportedOperationError:
    return UnsupportedOperationError(f"{operation} on {tensor!r}: {why}")


@rule(aten.detach.default, aten.alias.default, needed_by="autograd, nn.Parameter, state_dict, DTensor")
def _detach(tensor: QuantizedTensor) -> QuantizedTensor:
    return _handle(tensor)


@rule(aten.view.default, aten._unsafe_view.default, needed_by="FSDP2: the flat handle of reset_sharded_param")
def _view(tensor: QuantizedTensor, size: Sequence[int]) -> Tensor:
    numel = tensor.numel()
    shape = list(size)
    if shape in ([-1], [numel]):
        return _handle(tensor, [numel])
    if shape == list(tensor.shape) or shape == list(tensor.quantized_storage.shape):
        return _handle(tensor, shape)
    return read(aten.view.default, tensor, shape)


@rule(aten.as_strided.default, needed_by="FSDP2: the unsharded parameter, always the identity")
def _as_strided(
    tensor: QuantizedTensor, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None
) -> Tensor:
    if list(size) != list(tensor.shape) or list(stride) != list(tensor.stride()) or storage_offset:
        return read(aten.as_strided.default, tensor, size, stride, storage_offset)
    return _handle(tensor)


@rule(aten.split.Tensor, needed_by="FSDP2: torch.chunk of the parameter in fully_shard")
def _split(tensor: QuantizedTensor, split_size: int, dim: int = 0) -> list[QuantizedTensor]:
    tensor.check_filled("split")
    if dim % tensor.ndim != 0:
        raise UnsupportedOperationError(limits.refusal("other placements", f"split of {tensor!r} along dim {dim}"))
    storage = tensor.quantized_storage
    chunk = split_size * (storage.spec.format.matrix_rows or 1)
    starts = range(0, max(storage.shard.shape[0], 1), max(chunk, 1))  # one piece of 0 rows, as in torch.split
    return [QuantizedTensor(storage.piece(0, start, chunk), tensor.dtype) for start in starts]


def _new(make: Callable[..., Tensor]) -> Rule:
    """A rule that makes a placeholder of a given size, or a plain tensor by `make` for other than floating dtypes."""

    def new(
        tensor: QuantizedTensor, size: Sequence[int], dtype: torch.dtype | None = None,
        device: torch.device | None = None, **_: Any,
    ) -> Tensor:  # fmt: skip
        target = torch.device(device) if device is not None else tensor.device
        if dtype is not None and not dtype.is_floating_point:
            return make(size, dtype=dtype, device=target)
        return QuantizedTensor(Placeholder(tensor.quantized_storage, target), dtype or tensor.dtype, torch.Size(size))

    return new


rule(aten.new_zeros.default, needed_by="FSDP2: the padded shard")(_new(torch.zeros))
rule(aten.new_empty.default, needed_by="FSDP2: the empty chunk")(_new(torch.empty))


@rule(aten.slice.Tensor, needed_by="FSDP2: the narrow of the padded shard that becomes the sharded parameter")
def _slice(
    tensor: QuantizedTensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Tensor:
    first, last, _ = slice(start, end).indices(tensor.shape[dim])
    shape = list(tensor.shape)
    shape[dim] = max(last - first, 0)
    storage = tensor.quantized_storage
    if isinstance(storage, Placeholder):
        if dim == 0 and first == 0 and last == 0 and storage.parent.shard.shape[0] != 0:
            # this rank's chunk is empty, so nothing was copied in: it is the piece past the parent's end
            parent = storage.parent
            chunk = tensor.shape[0] * (parent.spec.format.matrix_rows or 1)
            empty = parent.piece(0, parent.shard.shape[0], chunk)
            moved = empty.map(torch.clone) if empty.device == storage.target else empty.to(storage.target)
            return QuantizedTensor(moved, tensor.dtype)
        if dim == 0 and first == 0:
            return _handle(tensor, shape)
    elif step == 1 and dim == 0 and first == 0 and tuple(shape) in (tuple(tensor.shape), storage.shape):
        return _handle(tensor, shape)
    return read(aten.slice.Tensor, tensor, dim, start, end, step)


@rule(aten.copy_.default, needed_by="FSDP2: filling the padded shard; load_state_dict between quantized tensors")
def _copy_(destination: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    if not isinstance(source, QuantizedTensor):
        raise UnsupportedOperationError(limits.refusal("copied values", f"{source.dtype} into {destination!r}"))
    if not isinstance(destination, QuantizedTensor):
        return read(aten.copy_.default, destination, source, non_blocking)
    target = destination.quantized_storage
    if isinstance(target, Placeholder):
        target.fill(source.quantized_storage)
    elif target.gathered:
        raise refused("copy_", destination, "the copy that FSDP gathered; call reshard(), then copy into the shard")
    elif target is not source.quantized_storage:
        new = source.quantized_storage
        if target.spec != new.spec or target.shard != new.shard:
            names = f"{new.spec} {new.shard.extents} into {target.spec} {target.shard.extents}"
            raise UnsupportedOperationError(f"copy_ from {names}: quantized tensors must have one format and shard")
        for parts, new_parts in ((target.components, new.components), (target.state, new.state)):
            for name, part in parts.items():
                part.copy_(new_parts[name])
        target.mark_written()
    return destination
