"""ATen operations that copy, move or allocate a whole quantized tensor."""

import copyreg
from typing import Any

import torch
from torch import Tensor

from quantshard import limits
from quantshard.errors import UnsupportedOperationError
from quantshard.tensor import parameter_state, storage as storages
from quantshard.tensor.aten_rules import refused, rule
from quantshard.tensor.parameter_state import AMAX_HISTORY
from quantshard.tensor.quantized_tensor import QuantizedTensor
from quantshard.tensor.reads import read
from quantshard.tensor.storage import Placeholder, QuantizedStorage

aten = torch.ops.aten


@rule(aten.clone.default, needed_by="users, deepcopy")
def _clone(tensor: QuantizedTensor, memory_format: Any = None) -> QuantizedTensor:
    tensor.check_filled("clone")
    return QuantizedTensor(tensor.quantized_storage.clone(), tensor.dtype, tensor.shape)


@rule(aten._to_copy.default, needed_by="module.to(), .cpu(), .cuda(), FSDP2's CPU offload")
def _to_copy(
    tensor: QuantizedTensor, dtype: torch.dtype | None = None, device: torch.device | None = None,
    non_blocking: bool = False, **_: Any,
) -> Tensor:  # fmt: skip
    if dtype is not None and dtype.is_complex:
        raise refused("to", tensor, f"({dtype}); the nominal dtype of a quantized tensor is a floating one")
    if dtype is not None and not dtype.is_floating_point:
        return read(aten._to_copy.default, tensor, dtype=dtype, device=device, non_blocking=non_blocking)
    moved = tensor.quantized_storage.to(device, non_blocking=non_blocking)
    return QuantizedTensor(moved, dtype or tensor.dtype, tensor.shape)


@rule(aten.empty_like.default, needed_by="module.to_empty")
def _empty_like(
    tensor: QuantizedTensor, dtype: torch.dtype | None = None, device: torch.device | None = None, **_: Any
) -> Tensor:
    tensor.check_filled("empty_like")
    target = torch.device(device) if device is not None else tensor.device
    if dtype is not None and not dtype.is_floating_point:
        return torch.empty(tensor.shape, dtype=dtype, device=target)
    state = dict(tensor.quantized_storage.state)
    if AMAX_HISTORY in state:
        state[AMAX_HISTORY] = torch.zeros_like(state[AMAX_HISTORY], device=target)
    parameter_state.move_draws(state, target)
    storage = storages.empty(tensor.quantized_storage.spec, tensor.quantized_storage.shard, target, state)
    storage.mesh = tensor.quantized_storage.mesh
    return QuantizedTensor(storage, dtype or tensor.dtype, tensor.shape)


@rule(aten.is_pinned.default, needed_by="FSDP2's CPU offload")
def _is_pinned(tensor: QuantizedTensor, device: Any = None) -> bool:
    parts = tensor.quantized_storage.components.values()
    return bool(parts) and all(part.is_pinned() for part in parts)


@rule(aten._has_compatible_shallow_copy_type.default, needed_by="module.to_empty() in inference mode")
def _is_set_in_place(tensor: Tensor, other: Tensor) -> bool:
    return False  # modules swap tensors of subclasses


@rule(aten._pin_memory.default, needed_by="FSDP2's CPU offload")
def _pin_memory(tensor: QuantizedTensor, device: Any = None) -> QuantizedTensor:
    if isinstance(tensor.quantized_storage, Placeholder):
        return tensor  # still empty
    return QuantizedTensor(tensor.quantized_storage.map(Tensor.pin_memory), tensor.dtype, tensor.shape)


def _pickled(tensor: QuantizedTensor) -> tuple[Any, ...]:
    tensor.check_filled("pickle")
    storage = tensor.quantized_storage
    if storage.shard.cut is not None or storage.gathered:
        raise UnsupportedOperationError(limits.refusal("pickle", tensor))
    parts = storage.spec, storage.shard, storage.components, storage.state, storage.initial_values()
    attributes = {name: value for name, value in vars(tensor).items() if name != "quantized_storage"}
    return _unpickled, (parts, (tensor.dtype, tensor.shape, tensor.requires_grad), attributes)


def _unpickled(parts: tuple[Any, ...], facts: tuple[Any, ...], attributes: dict[str, Any]) -> QuantizedTensor:
    storage = QuantizedStorage(*parts[:-1])
    storage.mark_written()
    storage.keep_initial_values(parts[-1])
    tensor = QuantizedTensor(storage, *facts)
    vars(tensor).update(attributes)
    return tensor


copyreg.pickle(QuantizedTensor, _pickled)  # type: ignore[arg-type]
