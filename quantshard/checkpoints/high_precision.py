"""Loading high-precision weights into a quantized model: an explicit, batched, sharded call."""

from __future__ import annotations

from collections.abc import Mapping
from operator import attrgetter

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from quantshard import amax, components, private_torch
from quantshard.errors import CheckpointError
from quantshard.storage import AMAX_HISTORY, DRAWS, KEY


@torch.no_grad()
def load_high_precision(model: nn.Module, state_dict: Mapping[str, Tensor]) -> None:
    """Quantize high-precision weights into a model's parameters, and copy the others. A collective call.

    Each rank reads only its part of each tensor, and all amaxes are reduced in one collective. Nothing is written
    before everything fits. Build the optimizer afterwards: its masters are seeded from the parameters, and from the
    loaded high-precision values where `preserve_high_precision_init_val` asked to keep them.

    Args:
        model: whole or wrapped by `fully_shard`, not on the meta device.
        state_dict: for every parameter of the model its values: a whole tensor, or a DTensor sharded as the parameter
            is. Entries for buffers, random keys and draw counts are copied; entries of the quantized form
            (`X_scale_inv`, ...) are errors.

    Raises:
        CheckpointError: a tensor is missing, unknown, quantized, or of another shape; on every rank, if so on one.
        ConfigurationError: the pieces of a parameter are not where their offsets say.
    """
    components.check_offsets(model.named_parameters())
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()  # else a forward without backward may have left the gathered copies in place
    params = dict(model.named_parameters(remove_duplicate=False))
    error: CheckpointError | None = None
    try:
        others = _other_entries(model, params, state_dict)
        parts = {name: _local_part(name, param, state_dict[name]) for name, param in params.items()}
    except CheckpointError as found:
        error = found
    if amax.any_rank(error is not None, amax.world()):
        raise error or CheckpointError(
            "load_high_precision: the state dict of another rank does not fit; see its error"
        )
    for tensor, value in others:
        tensor.copy_(value)
    quantized: list[tuple[Tensor, Tensor]] = []
    kept: dict[str, Tensor] = {}
    for name, param in params.items():
        local = components.quantized(param)
        if local is None:
            private_torch.local_tensor(param).copy_(parts[name])
            continue
        if local.get_high_precision_init_val() is not None:
            kept[name] = parts[name].cpu().clone()
        if AMAX_HISTORY in local._storage.state:
            local._storage.state[AMAX_HISTORY].zero_()  # of the weight that was there before
        quantized.append((param, parts[name].to(local.device)))
    amax.requantize_(quantized)
    for name, values in kept.items():
        components.storage_of(params[name]).high_precision = values


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
    unknown = sorted(given.keys() - params.keys() - live.keys() - components.held_elsewhere(model, given))
    if missing or unknown:
        raise CheckpointError(
            f"load_high_precision: {len(missing)} parameters have no entry in the state dict (first: "
            f"{missing[:1] or '-'}) and {len(unknown)} entries fit no parameter (first: {unknown[:1] or '-'}); a "
            "quantized checkpoint is loaded with dcp.load and load_state_dict instead"
        )
    for name in live.keys() & given.keys():
        if live[name].shape != given[name].shape:
            raise CheckpointError(
                f"load_high_precision: {name} has shape {tuple(given[name].shape)} in the state dict, "
                f"{tuple(live[name].shape)} in the model"
            )
    return [(live[name], given[name]) for name in sorted(live.keys() & given.keys())]


def _by_attributes(model: nn.Module, name: str) -> Tensor | None:
    try:
        found = attrgetter(name)(model)
    except AttributeError:
        return None
    return found if isinstance(found, Tensor) else None


def _local_part(name: str, param: Tensor, value: Tensor) -> Tensor:
    if param.is_meta:
        raise CheckpointError(
            f"load_high_precision: {name} is on the meta device; call reset_parameters() on the modules first"
        )
    if not value.is_floating_point():
        raise CheckpointError(f"load_high_precision: {name} is {value.dtype}, not a floating-point tensor")
    if value.shape != param.shape:
        raise CheckpointError(
            f"load_high_precision: {name} has shape {tuple(value.shape)} in the state dict, {tuple(param.shape)} in "
            "the model"
        )
    local = private_torch.local_tensor(param)
    if isinstance(value, DTensor):
        if not isinstance(param, DTensor) or param.placements != value.placements:
            raise CheckpointError(
                f"load_high_precision: {name} is a DTensor with placements {value.placements}, the parameter is not; "
                "pass whole tensors, or DTensors sharded as the parameters are"
            )
        return private_torch.local_tensor(value)
    quantized = components.quantized(param)
    first = private_torch.global_offset(param) if quantized is None else quantized._storage.shard.origin
    return value[tuple(slice(start, start + size) for start, size in zip(first, local.shape, strict=True))]
