"""Loads high-precision weights into a quantized model: an explicit call that quantizes them in one batch."""

from __future__ import annotations

from collections.abc import Mapping
from operator import attrgetter

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from quantshard import private_torch
from quantshard.checkpoints.disk import agreement
from quantshard.errors import CheckpointError
from quantshard.tensor import components, requantize
from quantshard.tensor.storage import DRAWS, KEY


@torch.no_grad()
def load_high_precision(model: nn.Module, state_dict: Mapping[str, Tensor]) -> None:
    """Quantize high-precision weights into a model's parameters, and copy the other parameters. A collective call.

    Each rank reads only its shards, all amaxes are reduced in one collective, and everything is checked before the
    first write. Build the optimizer afterwards, so that its masters start from the loaded values. Trainable weights
    keep these values on the CPU until the first step (a weight's `clear_high_precision_init_val` frees them earlier).

    Args:
        model: unsharded, or sharded by `fully_shard`; not on the meta device.
        state_dict: the values of every parameter: a full tensor, or a DTensor sharded like the parameter. Entries of
            buffers, RNG keys and draw counts are copied; entries of the quantized form (`X_scale_inv`, ...) are errors.

    Raises:
        CheckpointError: a tensor is missing, unknown, quantized, or of another shape; an entry is not a tensor or
            cannot be read; or values to be quantized are infinite or NaN. If one rank fails, all do.
        ConfigurationError: a shard of a parameter is not at its recorded offset.
    """
    components.check_offsets(model.named_parameters())
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()  # a forward without backward can leave parameters unsharded
    params = dict(model.named_parameters(remove_duplicate=False))
    other_entries, parts = agreement.run_on_all_ranks(lambda: _fitting(model, params, state_dict))
    for tensor, value in other_entries:
        tensor.copy_(value)
    quantized: list[tuple[Tensor, Tensor]] = []
    initial_values: dict[str, Tensor] = {}
    for name, param in params.items():
        local = components.quantized_local(param)
        if local is None:
            private_torch.local_tensor(param).copy_(parts[name])
            continue
        if param.requires_grad:
            initial_values[name] = parts[name].cpu().clone()
        quantized.append((param, parts[name].to(local.device)))
    requantize.requantize_(quantized, assume_finite=True)
    for name, values in initial_values.items():
        components.storage_of(params[name]).keep_initial_values(values)


def _fitting(
    model: nn.Module, params: Mapping[str, Tensor], state_dict: Mapping[str, Tensor]
) -> tuple[list[tuple[Tensor, Tensor]], dict[str, Tensor]]:
    """Return this rank's checked values: entries that belong to no parameter, and its shard of each parameter."""
    state_dict = components.split_stacked(model, state_dict)
    other_entries = _other_entries(model, params, state_dict)
    parts = {name: _local_part(name, param, state_dict[name]) for name, param in params.items()}
    for name, part in parts.items():
        local = components.quantized_local(params[name])
        problem = "" if local is None else requantize.non_finite(part, local.quantized_storage.shard.origin)
        if problem:
            raise CheckpointError(f"load_high_precision: {name}: {problem}; codes saturate, which would hide it")
    return other_entries, parts


def _other_entries(
    model: nn.Module, params: Mapping[str, Tensor], state_dict: Mapping[str, Tensor]
) -> list[tuple[Tensor, Tensor]]:
    """(live tensor, value) of each buffer, RNG key and draw count in the state dict."""
    live = dict(model.named_buffers())
    for name in state_dict.keys() - params.keys() - live.keys():
        tensor = _by_attributes(model, name) if name.endswith((f"_{KEY}", f"_{DRAWS}")) else None
        if tensor is not None:
            live[name] = tensor
    missing = sorted(params.keys() - state_dict.keys())
    unknown = sorted(state_dict.keys() - params.keys() - live.keys() - components.held_elsewhere(model, state_dict))
    if missing or unknown:
        raise CheckpointError(
            f"load_high_precision: {len(missing)} parameters have no entry in the state dict (first: "
            f"{missing[:1] or '-'}) and {len(unknown)} entries fit no parameter (first: {unknown[:1] or '-'}); a "
            "quantized checkpoint is loaded with dcp.load and load_state_dict instead"
        )
    return [
        (live[name], _value(name, state_dict[name], live[name])) for name in sorted(live.keys() & state_dict.keys())
    ]


def _by_attributes(model: nn.Module, name: str) -> Tensor | None:
    try:
        value = attrgetter(name)(model)
    except AttributeError:
        return None
    return value if isinstance(value, Tensor) else None


def _local_part(name: str, param: Tensor, entry: Tensor) -> Tensor:
    if param.is_meta:
        raise CheckpointError(
            f"load_high_precision: {name} is on the meta device; call reset_parameters() on the modules first"
        )
    if isinstance(entry, Tensor) and not entry.is_floating_point():
        raise CheckpointError(f"load_high_precision: {name} is {entry.dtype}, not a floating-point tensor")
    value = _value(name, entry, param)
    if isinstance(value, DTensor):
        return private_torch.local_tensor(value)
    local, quantized = private_torch.local_tensor(param), components.quantized_local(param)
    offsets = private_torch.global_offset(param) if quantized is None else quantized.quantized_storage.shard.origin
    return value[tuple(slice(start, start + size) for start, size in zip(offsets, local.shape, strict=True))]


def _value(name: str, value: object, live: Tensor) -> Tensor:
    """An entry of the state dict, after checks that it can be copied to a live tensor."""
    if not isinstance(value, Tensor) or value.is_meta:
        raise CheckpointError(f"load_high_precision: {name} is no tensor with values in the state dict")
    if value.shape != live.shape:
        raise CheckpointError(
            f"load_high_precision: {name} has shape {tuple(value.shape)} in the state dict, {tuple(live.shape)} in "
            "the model"
        )
    if isinstance(value, DTensor) and (not isinstance(live, DTensor) or live.placements != value.placements):
        raise CheckpointError(
            f"load_high_precision: {name} is a DTensor with placements {value.placements}, the model's is not; "
            "pass whole tensors, or DTensors sharded as the parameters are"
        )
    return value
