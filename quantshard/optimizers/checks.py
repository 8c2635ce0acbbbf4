"""Checks when an optimizer is built or plans a step: its options, its parameters, and whether ranks agree on them."""

from collections.abc import Container, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from quantshard import limits, private_torch
from quantshard.collectives import rank_checks
from quantshard.errors import ConfigurationError, warn_user
from quantshard.numerics.states import EMA_DECAY, ROUNDING_SEED
from quantshard.state_storage import STATE_ARGUMENTS
from quantshard.tensor import components
from quantshard.tensor.parameter_state import RNG_KEY

SWITCHES = ("capturable", "amsgrad", "maximize", "differentiable")
"""Options of PyTorch's optimizers that have no effect in a group here, where PyTorch puts them when they are off."""

REPLACED = "_replaced_by_quantshard"
"""Attribute of a parameter that `convert` or `revert` took out of its model."""


def layout(value: Any) -> str:
    if not isinstance(value, Tensor):
        return type(value).__name__
    if not isinstance(value, DTensor):
        return f"a plain tensor {tuple(value.shape)}"
    local_shape, placements = tuple(private_torch.local_tensor(value).shape), tuple(value.placements)
    return f"a DTensor {tuple(value.shape)} (local {local_shape}) with placements {placements} on {value.device_mesh}"


def check_group_options(where: str, group: Mapping[str, Any], allowed: Container[str], is_averaging: bool) -> None:
    invalid = [name for name in STATE_ARGUMENTS if name in group and name not in allowed]
    invalid += [name for name in SWITCHES if group.get(name) and name not in allowed]
    if group.get(EMA_DECAY) and not is_averaging:
        invalid.append(EMA_DECAY)
    if invalid:
        raise ConfigurationError(f"{where}: {', '.join(invalid)} cannot be set for one group, but only for all")


def check_release(where: str, is_releasing: bool, decoupled: bool, max_norm: float, max_value: float) -> None:
    if not isinstance(is_releasing, bool):
        raise ConfigurationError(f"{where}(release_gradients={is_releasing!r}): use True or False")
    if is_releasing and decoupled:
        raise ConfigurationError(f"{where}: release_gradients reads gradients; it cannot use_decoupled_grad")
    for name, value in (("max_grad_norm", max_norm), ("max_grad_value", max_value)):
        if not isinstance(value, int | float):
            raise ConfigurationError(f"{where}({name}={value!r}): use a number")
        if value and not is_releasing:
            raise ConfigurationError(f"{where}({name}) needs release_gradients; otherwise clip before step()")


def check_trainable(where: str, param: Tensor, dtypes: tuple[torch.dtype, ...]) -> None:
    if param.is_meta:
        raise ConfigurationError(f"{where} is on the meta device; call reset_parameters() on the modules first")
    if components.quantized_local(param) is None and param.dtype not in dtypes:
        raise ConfigurationError(limits.refusal("parameter dtype", f"{where} is {param.dtype}"))


def check_parameters(optimizer: str, names: Mapping[Tensor, str], seed: int | None) -> None:
    """Check random keys, the seed and the places of shards, with one collective per axis of each mesh."""
    seeds = {}
    if seed is not None:
        seeds[f"{optimizer}'s {ROUNDING_SEED}"] = torch.tensor([seed], dtype=torch.int64, device="cpu")
    components.check_offsets([(name, param) for param, name in names.items()])
    keys: dict[tuple[dist.ProcessGroup, ...], dict[str, Tensor]] = {}
    owners: dict[int, str] = {}
    for param, name in names.items():
        checked = keys.setdefault(private_torch.mesh_group(param), dict(seeds))
        storage = components.quantized_storage(param)
        if storage is None:
            continue
        key = checked[name] = storage.state[RNG_KEY]
        owner = owners.setdefault(id(key), name)
        if owner != name:
            raise ConfigurationError(f"fully_shard has cut the tied {owner} and {name} twice; call fully_shard([a, b])")
    for group, checked in keys.items():
        rank_checks.check_equal_on_ranks(checked, group, "the random key")


def warn_of_replaced_parameters(optimizer: str, names: Mapping[Tensor, str]) -> None:
    # A parameter with a gradient is in another model, too.
    replaced = [name for param, name in names.items() if param.grad is None and getattr(param, REPLACED, False)]
    if replaced:
        problem = f"convert or revert replaced {len(replaced)} of its parameters ({replaced[0]}, ...)"
        warn_user(f"{optimizer}: {problem}; build the optimizer after them")
