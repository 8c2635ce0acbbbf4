"""High-precision values of a model as a plain state dict, from its dequantized weights or their masters."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from quantshard import private_torch
from quantshard.checkpoints.disk import agreement
from quantshard.collectives import process_groups
from quantshard.errors import CheckpointError, ConfigurationError
from quantshard.numerics.states import MASTER, has_master
from quantshard.tensor import components
from quantshard.tensor.storage import AMAX_HISTORY, DRAWS, KEY

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_STATES = tuple(f"_{name}" for name in (KEY, DRAWS, AMAX_HISTORY))


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

    Raises:
        ConfigurationError: `dtype` is not float32, bfloat16, float16 or float64; a trained weight has no master in the
            optimizer, or was changed since the optimizer read it; a shard of a parameter is not at its recorded offset;
            `full` with expert parallelism. The same on every rank.
        CheckpointError: a parameter is on the meta device.
    """
    live, params = agreement.run_on_all_ranks(lambda: _checked(model, optimizer, dtype, full))
    buffers = {components.canonical_name(name) for name, _ in model.named_buffers()}
    left_out = _entries_of_weights(params, live.keys()) - buffers
    is_kept = not (full and cpu_offload) or agreement.rank() == 0
    result: dict[str, Any] = {}
    values_by_id: dict[int, Tensor] = {}
    for key, value in live.items():
        if key in left_out:
            continue
        param = params.get(key)
        if param is None:
            entry = _placed(value.detach().clone() if isinstance(value, Tensor) else value, full, cpu_offload, is_kept)
        elif id(param) in values_by_id:
            entry = values_by_id[id(param)]
        else:
            entry = values_by_id[id(param)] = _placed(_values(param, optimizer, dtype), full, cpu_offload, is_kept)
        if is_kept:
            result[key] = entry
    return result


def _checked(
    model: nn.Module, optimizer: Optimizer | None, dtype: torch.dtype | None, full: bool
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The live state dict, and the parameters by its keys, after checks of the arguments.

    Raises:
        ConfigurationError, CheckpointError: see `high_precision_state_dict`.
    """
    if dtype is not None and dtype not in _DTYPES:
        raise ConfigurationError(
            f"high_precision_state_dict(dtype={dtype}): choose one of {', '.join(map(str, _DTYPES))}; the codes are in "
            "model.state_dict()"
        )
    for name, module in model.named_modules():
        if full and process_groups.expert_axis(module) is not None:
            raise ConfigurationError(
                f"high_precision_state_dict(full=True): the experts of {name or type(module).__name__} are spread over "
                "ranks, of which none has all names; take full=False, which gives each rank its own"
            )
    live = dict(model.state_dict())  # also reshards FSDP2's parameters
    params = components.named_parameters(model)
    components.check_offsets(params.items())
    for name, param in params.items():
        if param.is_meta:
            raise CheckpointError(
                f"high_precision_state_dict: {name} is on the meta device, where it has no values; call "
                "reset_parameters() on the modules first"
            )
        if optimizer is not None:
            _check_master(name, param, optimizer)
    return live, params


def _check_master(name: str, param: Tensor, optimizer: Optimizer) -> None:
    quantized = components.quantized_local(param)
    if quantized is None or not param.requires_grad:
        return
    if not _has_master(param, optimizer):
        raise ConfigurationError(
            f"high_precision_state_dict: {name} has no master in this {type(optimizer).__name__}; leave the optimizer "
            "out to take what the codes stand for"
        )
    if _is_behind(param, optimizer):
        raise ConfigurationError(
            f"high_precision_state_dict: {name} was given new values that its master in this "
            f"{type(optimizer).__name__} does not have; load the optimizer's state too, call reseed_masters(), or "
            "leave the optimizer out"
        )


def _has_master(param: Tensor, optimizer: Optimizer) -> bool:
    return has_master(optimizer.state.get(param, {}))


def _is_behind(param: Tensor, optimizer: Optimizer) -> bool:
    """Whether a parameter was changed since the optimizer last wrote or read it; a step makes the same check."""
    quantized = components.quantized_local(param)
    version = private_torch.in_place_changes(param) if quantized is None else quantized.quantized_storage.seen_version()
    return bool(getattr(optimizer, "_versions", {}).get(param, version) != version)


def _entries_of_weights(params: dict[str, Tensor], keys: Any) -> set[str]:
    """The keys of a state dict that belong to weights but are not their values."""
    keys_of_weights = set()
    for name, param in params.items():
        suffixes = (
            _STATES if components.quantized_local(param) is None else [s for s in components.suffixes(param) if s]
        )
        keys_of_weights |= {name + suffix for suffix in suffixes}
    return (keys_of_weights & set(keys)) - params.keys()


def _values(param: Tensor, optimizer: Optimizer | None, dtype: torch.dtype | None) -> Tensor:
    """A parameter's values as a new tensor; a DTensor if the parameter is one."""
    quantized, local = components.quantized_local(param), private_torch.local_tensor(param).detach()
    target_dtype = dtype if dtype is not None and param.dtype.is_floating_point else param.dtype
    master = None
    if optimizer is not None and _has_master(param, optimizer) and not _is_behind(param, optimizer):
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
    """Gather and move a tensor as requested; other values are returned unchanged."""
    if not isinstance(value, Tensor):
        return value
    if full and isinstance(value, DTensor):
        value = value.full_tensor()  # a collective call, also on ranks that drop the result
    return value.cpu() if cpu_offload and is_here else value if is_here else value.new_empty(0)
