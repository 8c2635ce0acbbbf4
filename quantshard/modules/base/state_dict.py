"""State dicts of modules with quantized weights: saving and loading as plain components."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from quantshard import private_torch
from quantshard.collectives.delayed_scaling import MISMATCHES
from quantshard.errors import CheckpointError
from quantshard.tensor import component_loading, components

_NOT_LOADED = torch.empty((), dtype=torch.float32, device="cpu")
"""Placeholder that `set_model_state_dict` fills in for a component missing from a full state dict.

It has no dims, so that `set_model_state_dict` does not infer a target device from it."""

_EXTRA_STATE = "_extra_state"


def state_keys(module: Any, name: str) -> dict[str, Tensor]:
    """Key suffix -> live tensor, for all state-dict entries of a weight."""
    param = getattr(module, name)
    assert param is not None
    if components.quantized_local(param) is not None:
        return components.state_of(param)
    return {"": param, **{f"_{key}": value for key, value in module._born_states[name].items()}}


def component_buffers(module: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield the component keys of all weights as buffers, whose names `set_model_state_dict` prefixes for wrappers."""
    if private_torch.collects_state_dict_keys():
        for name in module._weights:
            yield from ((name + suffix, _NOT_LOADED) for suffix in state_keys(module, name) if suffix)


def save_weights(module: Any, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
    """Put the components of all weights in the place of the weights, and detach the module's other entries."""
    if MISMATCHES.flags:
        MISMATCHES.settle()
    if not keep_vars:
        params = module.named_parameters(recurse=False, remove_duplicate=False)
        # without the placeholders of `component_buffers`
        buffers = nn.Module.named_buffers(module, recurse=False, remove_duplicate=False)
        for name, value in (*params, *buffers):
            if name not in module._weights and prefix + name in destination:
                destination[prefix + name] = value.detach()
    for name in module._weights:
        for suffix, value in state_keys(module, name).items():
            # masters detect writes by the version counter, which a DTensor's `detach` does not share
            destination[prefix + name + suffix] = value.detach() if value.requires_grad and not keep_vars else value


def load_weights(
    module: Any, state_dict: Mapping[str, Any], prefix: str, local_metadata: Any, missing_keys: list[str],
    error_msgs: list[str],
) -> dict[str, Any] | None:  # fmt: skip
    """Load the weights, and return the other entries; None if a weight does not fit, so that nothing is loaded."""
    rest = dict(state_dict)
    extra = rest.get(prefix + _EXTRA_STATE)
    if isinstance(extra, Tensor) and extra.numel() == 0:  # in every state dict of TransformerEngine's modules
        del rest[prefix + _EXTRA_STATE]
    assign = bool(local_metadata.get("assign_to_params_buffers"))
    ready = []
    for name in module._weights:
        keys = state_keys(module, name)
        entries = {s: rest.pop(prefix + name + s) for s in keys if prefix + name + s in rest}
        param = getattr(module, name)
        _drop_placeholders(param, entries)
        is_quantized = components.quantized_local(param) is not None
        try:
            ready.append((name, _fitting(param, keys, entries, prefix + name, is_quantized, assign)))
        except CheckpointError as error:
            error_msgs.append(str(error))
            continue
        missing_keys += [prefix + name + s for s in keys if s not in entries and (is_quantized or s == "")]
    if len(ready) < len(module._weights):
        return None
    for name, pairs in ready:
        if assign:
            value = _assign(module, name, pairs)
            rest.update({} if value is None else {prefix + name: value})
        else:
            component_loading.write_components(getattr(module, name), pairs.values())
    return rest


def _assign(module: Any, name: str, pairs: component_loading.Pairs) -> Tensor | None:
    """Replace a weight's tensors by loaded ones; return the value if PyTorch is to assign it (high precision)."""
    param, state = getattr(module, name), module._born_states[name]
    if components.quantized_local(param) is not None:
        if pairs:
            setattr(module, name, component_loading.assigned(param, pairs))
        return None
    loaded = {suffix: source for suffix, (_, source) in pairs.items()}
    value = loaded.get("")
    device = private_torch.local_tensor(param if value is None else value).device
    for key, old in state.items():
        state[key] = component_loading.state_like(old, loaded.get(f"_{key}"), device)
    return value


def _drop_placeholders(param: Tensor, entries: dict[str, Tensor]) -> None:
    """Remove the placeholders that torch.distributed.checkpoint.state_dict has for missing weights.
    With `full_state_dict` it fills in what it collected; `ignore_frozen_params` drops only the codes."""
    for suffix in [suffix for suffix, value in entries.items() if value is _NOT_LOADED]:
        del entries[suffix]
    storage = components.quantized_storage(param)
    if storage is None:
        return
    if components.quantized_storage(entries.get("")) is storage:
        del entries[""]
    if "" not in entries and not param.requires_grad:
        entries.clear()


def _fitting(
    param: Tensor, live: Mapping[str, Tensor], entries: dict[str, Tensor], name: str, is_quantized: bool, assign: bool
) -> component_loading.Pairs:
    """Check the entries of one weight and return (target, source) pairs by key suffix; write nothing."""
    if param.is_meta and entries and not assign:
        raise CheckpointError(f"{name} is on the meta device; call to_empty() first, or load_state_dict(assign=True)")
    if is_quantized:
        return component_loading.fitting_pairs(param, entries, name)
    for suffix, value in entries.items():
        if suffix == "" and not value.is_floating_point():
            raise component_loading.codes_for_high_precision(name, value.dtype)
        if value.shape != live[suffix].shape:
            raise CheckpointError(f"{name}{suffix}: shape {tuple(value.shape)}, not {tuple(live[suffix].shape)}")
    return {suffix: (live[suffix], value) for suffix, value in entries.items()}
