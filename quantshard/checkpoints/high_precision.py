"""Loading high-precision weights into a quantized model: an explicit, batched, sharded call."""

from __future__ import annotations

from collections.abc import Mapping
from operator import attrgetter

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from quantshard import private_torch
from quantshard.argument_kinds import MODULE, STATE_DICT, check_arguments, suggests_names
from quantshard.checkpoints.disk import agreement
from quantshard.checkpoints.partial_load import covers_buffers, loading
from quantshard.errors import CheckpointError
from quantshard.tensor import components, requantize, state_keys
from quantshard.tensor.storage import DRAWS, KEY


@suggests_names
@torch.no_grad()
def load_high_precision(model: nn.Module, state_dict: Mapping[str, Tensor]) -> None:
    """Quantize high-precision weights into a model's parameters, and copy the others. A collective call.

    Each rank reads only its part of each tensor, and all amaxes are reduced in one collective. Nothing is written
    before everything fits. Build the optimizer afterwards: its masters start from the loaded values, which trainable
    weights keep on the CPU until the first step (`clear_high_precision_init_val` of a weight frees them earlier).

    Args:
        model: whole or wrapped by `fully_shard`, not on the meta device.
        state_dict: for every parameter of the model its values: a whole tensor, or a DTensor sharded as the parameter
            is. Entries for buffers, random keys and draw counts are copied; entries of the quantized form
            (`X_scale_inv`, ...) are errors.

    Raises:
        CheckpointError: a tensor is missing, unknown, quantized, or of another shape, or an entry is none or cannot be
            read, or values that are to be quantized are infinite or NaN; on every rank, if so on one.
        ConfigurationError: the pieces of a parameter are not where their offsets say.
    """
    agreement.alike(lambda: check_arguments("load_high_precision", MODULE, model=model))
    with loading("load_high_precision", model) as load:
        components.check_offsets(model.named_parameters())
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()  # else a forward without backward may have left the gathered copies in place
        params = dict(model.named_parameters(remove_duplicate=False))
        others, parts = agreement.alike(lambda: _fitting(model, params, state_dict))
        load.writes = True
        for tensor, value in others:
            tensor.copy_(value)
        quantized: list[tuple[Tensor, Tensor]] = []
        kept: dict[str, Tensor] = {}
        for name, param in params.items():
            local = components.quantized_local(param)
            if local is None:
                private_torch.local_tensor(param).copy_(parts[name])
                continue
            if param.requires_grad:
                kept[name] = parts[name].cpu().clone()
            quantized.append((param, parts[name].to(local.device)))
        requantize.requantize_(quantized, assume_finite=True)
        for name, values in kept.items():
            components.storage_of(params[name]).keep_initial_values(values)
        load.mends = not load.is_mixed or covers_buffers(model, state_dict.keys())


def _fitting(
    model: nn.Module, params: Mapping[str, Tensor], given: Mapping[str, Tensor]
) -> tuple[list[tuple[Tensor, Tensor]], dict[str, Tensor]]:
    """What this rank will write: the entries that belong to no parameter, and its part of each parameter."""
    check_arguments("load_high_precision", STATE_DICT, state_dict=given)  # here, where other ranks are told of it
    given = state_keys.split_stacked(model, given)
    others = _other_entries(model, params, given)
    parts = {name: _local_part(name, param, given[name]) for name, param in params.items()}
    for name, part in parts.items():
        local = components.quantized_local(params[name])
        told = "" if local is None else requantize.non_finite(part, local.quantized_storage.shard.origin)
        if told:
            raise CheckpointError(f"load_high_precision: {name}: {told}; codes saturate, which would hide it")
    return others, parts


def _other_entries(
    model: nn.Module, params: Mapping[str, Tensor], given: Mapping[str, Tensor]
) -> list[tuple[Tensor, Tensor]]:
    """Entries that belong to no parameter: (live tensor, value) of each buffer, random key and count of draws."""
    live = dict(model.named_buffers())
    for name in given.keys() - params.keys() - live.keys():
        tensor = _by_attributes(model, name) if name.endswith((f"_{KEY}", f"_{DRAWS}")) else None
        if tensor is not None:
            live[name] = tensor
    missing = sorted(params.keys() - given.keys())
    unknown = sorted(given.keys() - params.keys() - live.keys() - state_keys.held_elsewhere(model, given))
    if missing or unknown:
        raise CheckpointError(
            f"load_high_precision: {len(missing)} parameters have no entry in the state dict (first: "
            f"{missing[:1] or '-'}) and {len(unknown)} entries fit no parameter (first: {unknown[:1] or '-'}); a "
            "quantized checkpoint is loaded with dcp.load and load_state_dict instead"
        )
    return [(live[name], _value(name, given[name], live[name])) for name in sorted(live.keys() & given.keys())]


def _by_attributes(model: nn.Module, name: str) -> Tensor | None:
    try:
        found = attrgetter(name)(model)
    except AttributeError:
        return None
    return found if isinstance(found, Tensor) else None


def _local_part(name: str, param: Tensor, given: Tensor) -> Tensor:
    if param.is_meta:
        raise CheckpointError(
            f"load_high_precision: {name} is on the meta device; call reset_parameters() on the modules first"
        )
    if isinstance(given, Tensor) and not given.is_floating_point():
        raise CheckpointError(f"load_high_precision: {name} is {given.dtype}, not a floating-point tensor")
    value = _value(name, given, param)
    if isinstance(value, DTensor):
        return private_torch.local_tensor(value)
    local, quantized = private_torch.local_tensor(param), components.quantized_local(param)
    first = private_torch.global_offset(param) if quantized is None else quantized.quantized_storage.shard.origin
    return value[tuple(slice(start, start + size) for start, size in zip(first, local.shape, strict=True))]


def _value(name: str, value: object, live: Tensor) -> Tensor:
    """An entry of the state dict, shown to hold values for a live tensor."""
    if not isinstance(value, Tensor):
        raise CheckpointError(f"load_high_precision: {name} is a {type(value).__name__}, not a tensor")
    if value.is_meta:
        raise CheckpointError(
            f"load_high_precision: {name} is on the meta device in the state dict, where it has no values"
        )
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
