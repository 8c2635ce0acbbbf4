"""A model's values in high precision, as a plain state dict: what its weights stand for, or the masters behind them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from quantshard import private_torch
from quantshard.argument_kinds import MODULE, OPTIMIZER, check_arguments, suggests_names
from quantshard.checkpoints.disk import agreement
from quantshard.collectives import process_groups
from quantshard.errors import CheckpointError, ConfigurationError
from quantshard.numerics.states import MASTER, has_master
from quantshard.tensor import components
from quantshard.tensor.storage import AMAX_HISTORY, DRAWS, KEY

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_STATES = tuple(f"_{name}" for name in (KEY, DRAWS, AMAX_HISTORY))


@suggests_names
@torch.no_grad()
def high_precision_state_dict(
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    dtype: torch.dtype | None = torch.float32,
    full: bool = False,
    cpu_offload: bool = False,
) -> dict[str, Any]:
    """The state dict of a model as if its weights were in high precision: nothing in it needs quantshard.

    For each parameter its values, rounded once to `dtype`: those that the codes of a quantized one stand for, or its
    float32 master. Random keys, draw counts, scales, amax histories of weights and format tags are left out; buffers
    and other entries are as they are. All tensors are copies; a tied weight is one tensor under each of its names.

    A collective call if `full` and parameters are sharded. Beside the result a rank holds one whole tensor.

    Args:
        model: whole, or sharded over any mesh (FSDP2, HSDP, tensor parallelism).
        optimizer: a FusedAdam or MasterWeights, from whose masters the values are taken instead, also those of plain
            parameters that have one. What is frozen has none and is taken from the model.
        dtype: of the values of all floating-point parameters; None for each parameter's own.
        full: whole tensors; otherwise DTensors, sharded as the parameters are.
        cpu_offload: on the CPU; if `full` too, on rank 0 alone, and {} on the others, as `StateDictOptions` has it.

    Raises:
        ConfigurationError: `dtype` is not float32, bfloat16, float16 or float64; a trained weight has no master in the
            optimizer, or was given new values since; the pieces of a parameter are not where their offsets say; `full`
            of experts that are spread over ranks. The same on every rank.
        CheckpointError: a parameter is on the meta device, or a load into the model has failed half way.
    """
    live, params = agreement.alike(lambda: _checked(model, optimizer, dtype, full))
    buffers = {components.canonical_name(name) for name, _ in model.named_buffers()}
    left_out = _entries_of_weights(params, live.keys()) - buffers
    is_here = not (full and cpu_offload) or agreement.rank() == 0
    found: dict[str, Any] = {}
    made: dict[int, Tensor] = {}
    for key, value in live.items():
        if key in left_out:
            continue
        param = params.get(key)
        if param is None:
            entry = _placed(value.detach().clone() if isinstance(value, Tensor) else value, full, cpu_offload, is_here)
        elif id(param) in made:
            entry = made[id(param)]
        else:
            entry = made[id(param)] = _placed(_values(param, optimizer, dtype), full, cpu_offload, is_here)
        if is_here:
            found[key] = entry
    return found


def _checked(
    model: nn.Module, optimizer: Optimizer | None, dtype: torch.dtype | None, full: bool
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The live state dict, and the parameters by its keys.

    Raises:
        ConfigurationError, CheckpointError: as of `high_precision_state_dict`.
    """
    check_arguments("high_precision_state_dict", MODULE, model=model)
    check_arguments("high_precision_state_dict", OPTIMIZER.or_none, optimizer=optimizer)
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
    live = dict(model.state_dict())  # after which FSDP2 has put the shards in place
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
    """Whether a parameter was given other values since the optimizer last wrote or read it, as a step would find."""
    quantized = components.quantized_local(param)
    now = private_torch.in_place_changes(param) if quantized is None else quantized.quantized_storage.seen_version()
    return bool(getattr(optimizer, "_versions", {}).get(param, now) != now)


def _entries_of_weights(params: dict[str, Tensor], keys: Any) -> set[str]:
    """The keys of what a state dict has of weights besides their values."""
    found = set()
    for name, param in params.items():
        suffixes = (
            _STATES if components.quantized_local(param) is None else [s for s in components.suffixes(param) if s]
        )
        found |= {name + suffix for suffix in suffixes}
    return (found & set(keys)) - params.keys()


def _values(param: Tensor, optimizer: Optimizer | None, dtype: torch.dtype | None) -> Tensor:
    """A new tensor; a DTensor where the parameter is one."""
    quantized, local = components.quantized_local(param), private_torch.local_tensor(param).detach()
    wanted = dtype if dtype is not None and param.dtype.is_floating_point else param.dtype
    master = None
    if optimizer is not None and _has_master(param, optimizer) and not _is_behind(param, optimizer):
        read = getattr(optimizer, "get_unscaled_state", None)  # it may be split, or scaled
        master = optimizer.state[param][MASTER] if read is None else read(param, MASTER)
    if master is not None:
        values = private_torch.local_tensor(master).detach().to(wanted, copy=True)
    elif quantized is not None:
        values = quantized.quantized_storage.dequantize(dtype=wanted).reshape(local.shape)
    else:
        values = local.to(wanted, copy=True)
    if not isinstance(param, DTensor):
        return values
    return components.as_dtensor(values, param, list(param.placements), tuple(param.shape))


def _placed(value: Any, full: bool, cpu_offload: bool, is_here: bool) -> Any:
    """A tensor where it is wanted; another entry as it is."""
    if not isinstance(value, Tensor):
        return value
    if full and isinstance(value, DTensor):
        value = value.full_tensor()  # a collective call, of those too that do not keep it
    return value.cpu() if cpu_offload and is_here else value if is_here else value.new_empty(0)
