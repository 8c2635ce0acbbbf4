"""Loading state-dict entries into quantized weights: checks that they fit, and copies."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from quantshard import private_torch
from quantshard.errors import CheckpointError
from quantshard.formats import Component
from quantshard.sharding import Shard
from quantshard.tensor import components, moves
from quantshard.tensor.quantized_tensor import QuantizedTensor

Pairs = dict[str, tuple[Tensor, Tensor]]
"""Key suffix of an entry -> live local tensor, loaded value."""


def load_components(param: Tensor, values: Mapping[str, Tensor], name: str) -> None:
    """Copy loaded components and state, by key suffix, into a quantized parameter, or raise and write nothing.
    Each loaded value is a DTensor like the live one, or a plain tensor: the local part or the whole component."""
    write_components(param, fitting_pairs(param, values, name).values())


def codes_for_high_precision(name: str, codes: object) -> CheckpointError:
    """The error for codes that are loaded into a weight in high precision. `codes`: their dtype or format."""
    problem = f"{name}: the state dict holds {codes} codes, but this model's weight is in high precision"
    return CheckpointError(f"{problem}; build the model under quantized_model_init with the checkpoint's recipe")


def fitting_pairs(param: Tensor, values: Mapping[str, Tensor], name: str) -> Pairs:
    """Live local tensors and their loaded values, as `load_components` copies them, by key suffix."""
    storage = components.storage_of(param)
    tag = values.get(components.FORMAT_SUFFIX)
    if tag is not None and (saved_tag := components.read_format_tag(tag)) != storage.spec.tag:
        problem = f"the state dict holds {saved_tag!r}, but this model's weight is {storage.spec.tag!r}"
        raise CheckpointError(f"{name}: {problem}; build the model with the checkpoint's recipe")
    pairs: Pairs = {}
    for suffix, live in components.state_of(param).items():
        if suffix != components.FORMAT_SUFFIX and suffix in values:
            component = next((c for c in storage.spec.format.components if c.key_suffix == suffix), None)
            pairs[suffix] = _checked(live, values[suffix], f"{name}{suffix}", storage.shard, component)
    lacking = [c.key_suffix for c in storage.spec.format.components if c.key_suffix not in values]
    if pairs and lacking:
        raise CheckpointError(f"{name}: the state dict lacks {name}{lacking[0]}; load all components or none")
    return pairs


def _checked(live: Tensor, value: Tensor, key: str, shard: Shard, component: Component | None) -> tuple[Tensor, Tensor]:
    target, source = private_torch.local_tensor(live), private_torch.local_tensor(value)
    # a whole component from rank 0 or another program is a plain tensor: take this rank's entries
    if component is not None and not isinstance(value, DTensor) and source.shape == live.shape != target.shape:
        (r0, r1), (c0, c1) = shard.resident(component)
        source = source.flatten(0, -2)[r0:r1, c0:c1].reshape(target.shape)
    if component is not None and source.dtype != target.dtype:
        dtype = str(source.dtype).removeprefix("torch.")
        problem = f"a {dtype} tensor cannot be loaded as {component.encoding.name} {component.role.value}"
        remedy = "for high-precision weights call quantshard.checkpoints.load_high_precision(model, state_dict)"
        raise CheckpointError(f"{key}: {problem}; {remedy}")
    if source.shape != target.shape or (isinstance(value, DTensor) and value.shape != live.shape):
        actual = f"{tuple(value.shape)} (local {tuple(source.shape)}) in the state dict"
        expected = f"{tuple(live.shape)} (local {tuple(target.shape)}) in this model"
        raise CheckpointError(f"{key}: shape {actual}, {expected}; load a state dict of this model and mesh")
    return target, source


@torch.no_grad()
def write_components(param: Tensor, pairs: Collection[tuple[Tensor, Tensor]]) -> None:
    for target, source in pairs:
        target.copy_(source)
    local = components.quantized_local(param)
    if local is not None and pairs:
        local.quantized_storage.mark_written()


def assigned(param: Tensor, pairs: Pairs) -> nn.Parameter:
    """A parameter like `param` around the loaded components; state is copied. `pairs`: see `fitting_pairs`."""
    storage, loaded = components.storage_of(param), {suffix: source for suffix, (_, source) in pairs.items()}
    by_name = storage.spec.format.by_name
    parts = {name: loaded[by_name[name].key_suffix].flatten(0, -2) for name in storage.components}
    device = next(iter(parts.values())).device
    for name, part in parts.items():
        # a view of a whole component would keep all of it alive
        is_cut = isinstance(param, DTensor) and part.untyped_storage().nbytes() > part.nbytes
        parts[name] = part.to(device, copy=is_cut).contiguous()
    state = {name: state_like(value, loaded.get(f"_{name}"), device) for name, value in storage.state.items()}
    new = replace(storage, components=parts, state=state, high_precision=None)
    new.mark_written()
    tensor: Tensor = QuantizedTensor(new, param.dtype)
    if isinstance(param, DTensor):
        tensor = components.as_dtensor(tensor, param, list(param.placements), tuple(param.shape))
    loaded_param = nn.Parameter(tensor, requires_grad=param.requires_grad)
    vars(loaded_param).update(moves.set_attributes(param))
    return loaded_param


def state_like(own: Tensor, loaded: Tensor | None, device: torch.device) -> Tensor:
    """A copy of a weight's loaded state on the device of `own` (of meta: on `device`), or of `own` (of meta: zeros)."""
    where = device if own.is_meta else own.device
    if loaded is None:
        return torch.zeros_like(own, device=where) if own.is_meta else own.clone()
    return loaded.to(where, own.dtype, copy=True)


def split_stacked(module: nn.Module, state_dict: Mapping[str, Any], prefix: str = "") -> Mapping[str, Any]:
    """Split state dict entries that stack the rows of several parameters, as TransformerEngine's gated `fc1_weight`.

    Entries with a row count that does not divide stay as they are. A state dict without stacked entries is returned
    itself, since it may read a file at each access.
    """
    stacked: dict[str, list[str]] = {}
    for path, owner in module.named_modules():
        start = prefix + (f"{components.canonical_name(path)}." if path else "")
        for name, parts in getattr(owner, "stacked_names", {}).items():
            if start + name in state_dict:
                stacked[start + name] = [start + part for part in parts]
    if not stacked:
        return state_dict
    entries = dict(state_dict)
    for name, parts in stacked.items():
        value = entries[name]
        if isinstance(value, Tensor) and value.ndim and value.shape[0] % len(parts) == 0:
            entries.update(zip(parts, entries.pop(name).chunk(len(parts)), strict=True))
    return entries


def held_elsewhere(model: nn.Module, keys: Iterable[str]) -> set[str]:
    """The state dict keys, of the whole model, of experts that live on other ranks (`GroupedLinear`)."""
    result: set[str] = set()
    for prefix, module in model.named_modules():
        # duck typing: `GroupedLinear` is in a higher layer of the package, so it cannot be imported here
        is_held_elsewhere = getattr(module, "is_held_elsewhere", None)
        if is_held_elsewhere is not None:
            start = f"{components.canonical_name(prefix)}." if prefix else ""
            result |= {key for key in keys if key.startswith(start) and is_held_elsewhere(key.removeprefix(start))}
    return result


def is_same_name(name: str, other: str) -> bool:
    """Whether two names, taken before and after DDP, torch.compile or `checkpoint_wrapper`, mean one parameter."""
    first, second = (
        [part for part in components.canonical_name(path).split(".") if part not in ("module", "_orig_mod")]
        for path in (name, other)
    )
    return first == second
