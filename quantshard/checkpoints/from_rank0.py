"""Loads a state dict that only rank 0 has: describe and check it, then broadcast, shard and load it.

PyTorch's `set_model_state_dict(broadcast_from_rank0=True)` copies codes into a sharded weight without their scales.
"""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from quantshard import private_torch
from quantshard.checkpoints.disk import agreement
from quantshard.collectives import process_groups
from quantshard.errors import CheckpointError
from quantshard.tensor import component_loading, components
from quantshard.tensor.components import FORMAT_SUFFIX, FORMAT_TAG_BYTES

_CALL = "load_from_rank0: "


@torch.no_grad()
def load_from_rank0(model: nn.Module, state_dict: Mapping[str, Tensor] | None, strict: bool = True) -> Any:
    """Load rank 0's unsharded state dict into every rank's shards of a model. A collective call of all processes.

    Nothing is dequantized: codes, scales, RNG keys, draw counts, amax histories, plain parameters and buffers are
    copied bit for bit. During the call a rank holds a second copy of its shards, and one unsharded tensor.

    Args:
        model: sharded by `fully_shard`, or unsharded on every rank (under DDP pass its `.module`); not on the meta
            device.
        state_dict: on rank 0 plain tensors under the keys of `model.state_dict()`, as returned by
            `get_model_state_dict` with `full_state_dict` and `cpu_offload`, or read from a file of it. Ignored on other
            ranks.
        strict: raise if a key is missing on either side; otherwise such keys are skipped. In both cases a weight needs
            either all of its components or none.

    Returns:
        `missing_keys` and `unexpected_keys`, like `load_state_dict`.
    """
    components.check_offsets(model.named_parameters())
    description = agreement.from_rank0(lambda: _description(state_dict))
    sent = state_dict or {} if agreement.rank() == 0 else {}
    live = agreement.run_on_all_ranks(lambda: _fitting(model, description, strict), _CALL)
    parts = {}
    for key, like in description.items():
        value = _broadcast(like, sent.get(key))
        if key in live:
            parts[key] = _local_part(value, live[key])
    with agreement.writing_into("the model"):
        result = agreement.run_on_all_ranks(lambda: _loaded(model, parts, strict), _CALL)
    elsewhere = component_loading.held_elsewhere(model, description)
    result.unexpected_keys.extend(key for key in description if key not in live and key not in elsewhere)
    return result


def _loaded(model: nn.Module, parts: Mapping[str, Any], strict: bool) -> Any:
    try:
        return model.load_state_dict(parts, strict=strict)
    except Exception as error:  # user code can raise anything, and the other ranks wait
        raise CheckpointError(str(error)) from error


def _description(state_dict: Mapping[str, Tensor] | None) -> dict[str, Tensor]:
    """A state dict with the values of format tags, and meta tensors in place of all other tensors."""
    remedy = "pass get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))"
    if not isinstance(state_dict, Mapping) or not state_dict:
        raise CheckpointError(f"{_CALL}rank 0 has no state dict; {remedy}")
    description = {}
    for key, value in state_dict.items():
        if type(value) not in (Tensor, nn.Parameter):
            raise CheckpointError(f"{_CALL}{key} is a {type(value).__name__} on rank 0, not a plain tensor; {remedy}")
        if value.is_meta:
            raise CheckpointError(f"{_CALL}{key} is on the meta device on rank 0, so it has no data to send; {remedy}")
        is_tag = str(key).endswith(FORMAT_SUFFIX) and value.shape == (FORMAT_TAG_BYTES,) and value.dtype == torch.uint8
        description[key] = value.cpu().clone() if is_tag else torch.empty(value.shape, dtype=value.dtype, device="meta")
    return description


def _fitting(model: nn.Module, described: Mapping[str, Tensor], strict: bool) -> dict[str, Any]:
    live = model.state_dict()
    for key, live_value in live.items():
        if isinstance(live_value, Tensor) and live_value.is_meta and key in described:
            raise CheckpointError(f"{key} is on the meta device; call reset_parameters() or to_empty() first")
    _check_weights(model, live, described)
    missing = [key for key in live if key not in described]
    unexpected = sorted(described.keys() - live.keys() - component_loading.held_elsewhere(model, described))
    if strict and (missing or unexpected):
        lacking = f"lacks {len(missing)} of this model's entries (first: {missing[:1] or '-'})"
        problem = f"rank 0's state dict {lacking} and has {len(unexpected)} that this one lacks"
        raise CheckpointError(f"{problem} (first: {unexpected[:1] or '-'}); build that model, or pass strict=False")
    for key, value in described.items():
        if key in live and _kind(live[key]) != _kind(value):
            raise CheckpointError(f"{key}: {_kind(value)} in rank 0's state dict, {_kind(live[key])} in this model")
    return live


def _kind(value: object) -> str:
    if not isinstance(value, Tensor):
        return f"a {type(value).__name__}"
    return f"{str(value.dtype).removeprefix('torch.')} of shape {tuple(value.shape)}"


def _check_weights(model: nn.Module, live: Mapping[str, Any], described: Mapping[str, Tensor]) -> None:
    tags = {key: value for key, value in described.items() if str(key).endswith(FORMAT_SUFFIX) and not value.is_meta}
    for name, param in components.named_parameters(model).items():
        tag = tags.get(name + FORMAT_SUFFIX)
        if components.quantized_local(param) is not None:
            values = {s: described[name + s] for s in components.suffixes(param) if name + s in described}
            if tag is None:
                values.pop(FORMAT_SUFFIX, None)
            component_loading.fitting_pairs(param, values, name)
        elif tag is not None and name + FORMAT_SUFFIX not in live:
            raise component_loading.codes_for_high_precision(name, repr(components.read_format_tag(tag)))


def _broadcast(like: Tensor, value: Tensor | None) -> Tensor:
    """Rank 0's tensor, sent as bytes. `like`: its description. `value`: the tensor itself, on rank 0."""
    group = process_groups.world()
    if group is None:
        assert value is not None
        return value
    buffer = torch.empty(like.nbytes, dtype=torch.uint8, device=process_groups.collective_device(group))
    tensor = buffer.view(like.dtype).view(like.shape)
    if value is not None:
        tensor.copy_(value)
    if like.nbytes:
        dist.broadcast(buffer, src=0, group=group)
    return tensor


def _local_part(value: Tensor, live: Any) -> Tensor:
    """A copy of this rank's shard of a tensor, placed like the live tensor and cut at the offsets that DCP uses."""
    if not isinstance(live, DTensor):
        return value.to(live.device, copy=True)
    part = components.part_of_whole(live, value).to(private_torch.local_tensor(live).device, copy=True)
    return components.as_dtensor(part, live, list(live.placements), tuple(live.shape))
