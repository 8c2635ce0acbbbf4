"""High-precision values of a quantized model: its plain state dict, and loading such values into it."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from quantshard import private_torch
from quantshard.checkpoints import optimizer_states
from quantshard.checkpoints.disk import agreement
from quantshard.errors import CheckpointError, ConfigurationError
from quantshard.numerics.states import MASTER, has_master
from quantshard.optimizers import averaging
from quantshard.optimizers.base import weight_version
from quantshard.tensor import component_loading, components, requantize
from quantshard.tensor.parameter_state import AMAX_HISTORY, RNG_DRAWS, RNG_KEY

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_STATES = tuple(f"_{name}" for name in (RNG_KEY, RNG_DRAWS, AMAX_HISTORY))


@torch.no_grad()
def high_precision_state_dict(
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    dtype: torch.dtype | None = torch.float32,
    full: bool = False,
    cpu_offload: bool = False,
) -> dict[str, Any]:
    """The state dict of a model as if its weights were in high precision. Nothing in it needs quantshard.

    Each parameter is rounded once to `dtype`, from its dequantized codes or its float32 master. RNG keys, draw counts,
    scales, amax histories of weights and format tags are left out; buffers and other entries are unchanged. All tensors
    are copies; a tied weight is one tensor under each of its names.

    This is a collective call if `full` and parameters are sharded. In addition to the result, a rank holds one
    unsharded tensor.

    Args:
        model: unsharded, or sharded over any mesh (FSDP2, HSDP, tensor parallelism).
        optimizer: a FusedAdam or MasterWeights whose masters are used for the values, also for plain parameters with a
            master. Frozen parameters have no master and are taken from the model.
        dtype: dtype of all floating-point parameters; None for each parameter's own.
        full: return unsharded tensors instead of DTensors that are sharded like the parameters.
        cpu_offload: return tensors on the CPU. With `full`, only rank 0 gets them, and the others get {}, as with
            `StateDictOptions`.
    """
    live, params = agreement.run_on_all_ranks(lambda: _checked(model, optimizer, dtype, full))
    left_out: set[str] = set()
    for name, param in params.items():
        is_plain = components.quantized_local(param) is None
        left_out |= {name + suffix for suffix in (_STATES if is_plain else components.suffixes(param))}
    left_out -= {*params, *(components.canonical_name(name) for name, _ in model.named_buffers())}
    is_kept = not (full and cpu_offload) or agreement.rank() == 0
    result: dict[str, Any] = {}
    values_by_id: dict[int, Tensor] = {}
    for key, value in live.items():
        if key in left_out:
            continue
        weight = params.get(key)
        if weight is None:
            entry = _placed(value.detach().clone() if isinstance(value, Tensor) else value, full, cpu_offload, is_kept)
        elif id(weight) in values_by_id:
            entry = values_by_id[id(weight)]
        else:
            entry = values_by_id[id(weight)] = _placed(_values(weight, optimizer, dtype), full, cpu_offload, is_kept)
        if is_kept:
            result[key] = entry
    return result


def _checked(
    model: nn.Module, optimizer: Optimizer | None, dtype: torch.dtype | None, full: bool
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The live state dict, and the parameters by its keys, after checks of the arguments."""
    if dtype is not None and dtype not in _DTYPES:
        raise ConfigurationError(f"high_precision_state_dict({dtype=}): choose one of {', '.join(map(str, _DTYPES))}")
    if full and optimizer_states.expert_layers(model):
        raise ConfigurationError("high_precision_state_dict: experts are on several ranks; pass full=False")
    live = dict(model.state_dict())  # also reshards FSDP2's parameters
    params = components.named_parameters(model)
    components.check_offsets(params.items())
    for name, param in params.items():
        if param.is_meta:
            raise CheckpointError(f"high_precision_state_dict: {name} is on the meta device; reset_parameters() first")
        if optimizer is not None:
            _check_master(name, param, optimizer)
    return live, params


def _check_master(name: str, param: Tensor, optimizer: Optimizer) -> None:
    if components.quantized_local(param) is None or not param.requires_grad:
        return
    if not has_master(optimizer.state.get(param, {})):
        raise ConfigurationError(f"high_precision_state_dict: {name} has no master; omit the optimizer to dequantize")
    if _is_behind(param, optimizer):
        problem = f"high_precision_state_dict: {name} was changed after its master in this {type(optimizer).__name__}"
        raise ConfigurationError(f"{problem}; load the optimizer too, call reseed_masters(), or omit the optimizer")


def _is_behind(param: Tensor, optimizer: Optimizer) -> bool:
    """Whether a parameter was changed since the optimizer last wrote or read it; a step makes the same check."""
    version = weight_version(param)
    return bool(getattr(optimizer, "_versions", {}).get(param, version) != version)


def _values(param: Tensor, optimizer: Optimizer | None, dtype: torch.dtype | None) -> Tensor:
    quantized, local = components.quantized_local(param), private_torch.local_tensor(param).detach()
    target_dtype = dtype if dtype is not None and param.dtype.is_floating_point else param.dtype
    master = None
    if optimizer is not None and has_master(optimizer.state.get(param, {})) and not _is_behind(param, optimizer):
        read_unscaled = getattr(optimizer, "get_unscaled_state", None)  # handles split and scaled masters
        master = optimizer.state[param][MASTER] if read_unscaled is None else read_unscaled(param, MASTER)
    if master is not None:
        values = private_torch.local_tensor(master).detach().to(target_dtype, copy=True)
    elif quantized is not None:
        values = quantized.quantized_storage.dequantize(dtype=target_dtype).reshape(local.shape)
    else:
        values = local.to(target_dtype, copy=True)
    if not isinstance(param, DTensor):
        return values
    return components.as_dtensor(values, param, list(param.placements), tuple(param.shape))


def _placed(value: Any, full: bool, cpu_offload: bool, is_here: bool) -> Any:
    if not isinstance(value, Tensor):
        return value
    if full and isinstance(value, DTensor):
        value = value.full_tensor()  # a collective call, also on ranks that drop the result
    return value.cpu() if cpu_offload and is_here else value if is_here else value.new_empty(0)


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
    """
    components.check_offsets(model.named_parameters())
    averaging.reshard(model)
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
    state_dict = component_loading.split_stacked(model, state_dict)
    other_entries = _other_entries(model, params, state_dict)
    parts = {name: _local_part(name, param, state_dict[name]) for name, param in params.items()}
    for name, part in parts.items():
        storage = components.quantized_storage(params[name])
        if problem := "" if storage is None else requantize.non_finite(part, storage.shard.origin):
            raise CheckpointError(f"load_high_precision: {name}: {problem}; codes saturate, which would hide it")
    return other_entries, parts


def _other_entries(
    model: nn.Module, params: Mapping[str, Tensor], state_dict: Mapping[str, Tensor]
) -> list[tuple[Tensor, Tensor]]:
    """(live tensor, value) of each buffer, RNG key and draw count in the state dict."""
    live = {key: value for key, value in model.state_dict().items() if key.endswith((f"_{RNG_KEY}", f"_{RNG_DRAWS}"))}
    live |= dict(model.named_buffers())
    missing = sorted(params.keys() - state_dict.keys())
    elsewhere = component_loading.held_elsewhere(model, state_dict)
    unknown = sorted(state_dict.keys() - params.keys() - live.keys() - elsewhere)
    if missing or unknown:
        problem = f"{len(missing)} parameters have no entry in the state dict (first: {missing[:1] or '-'})"
        surplus = f"{len(unknown)} entries fit no parameter (first: {unknown[:1] or '-'})"
        raise CheckpointError(f"load_high_precision: {problem} and {surplus}; load codes by load_state_dict")
    common = sorted(live.keys() & state_dict.keys())
    return [(live[name], _value(name, state_dict[name], live[name])) for name in common]


def _local_part(name: str, param: Tensor, entry: Tensor) -> Tensor:
    if param.is_meta:
        raise CheckpointError(f"load_high_precision: {name} is on the meta device; call reset_parameters() first")
    if isinstance(entry, Tensor) and not entry.is_floating_point():
        raise CheckpointError(f"load_high_precision: {name} is {entry.dtype}, not a floating-point tensor")
    value = _value(name, entry, param)
    if isinstance(value, DTensor):
        part = private_torch.local_tensor(value)
        return part if components.quantized_local(param) is None else part.flatten(0, -2)
    return components.part_of_whole(param, value)


def _value(name: str, value: object, live: Tensor) -> Tensor:
    if not isinstance(value, Tensor) or value.is_meta:
        raise CheckpointError(f"load_high_precision: {name} is not a tensor with values in the state dict")
    if value.shape != live.shape:
        raise CheckpointError(f"load_high_precision: {name} has shape {tuple(value.shape)}, not {tuple(live.shape)}")
    if isinstance(value, DTensor) and (not isinstance(live, DTensor) or live.placements != value.placements):
        raise CheckpointError(f"load_high_precision: {name} is a DTensor, the model's is not; pass whole tensors")
    return value
