"""In-place arithmetic on quantized weights, as `torch.optim` optimizers and users' loops apply it to parameters.

A weight is dequantized, the arithmetic runs in float32, and the result is rounded stochastically to new codes:
rounding to nearest would lose small updates. All ranks with pieces of the weights must make the same calls in the same
order. Each call is one flat reduction, however many weights its lists hold. The reduction carries the amaxes of shared
blocks and two decisions that all ranks must agree on:

- A result equal to the present values leaves codes, draws and amax history unchanged, so a hidden `step()` with lr = 0
  changes no bit.
- A result that is infinite or NaN anywhere is not written on any rank, and the call raises.
"""

import operator
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.placement_types import Placement

from quantshard import private_torch
from quantshard.collectives import process_groups, rank_checks
from quantshard.collectives.flat_max import FlatMax
from quantshard.collectives.process_groups import Groups
from quantshard.errors import NonFiniteGradientError, RankMismatchError, UnsupportedOperationError, warn_user
from quantshard.tensor import parameter_state, requantize
from quantshard.tensor.aten_rules import rule
from quantshard.tensor.parameter_state import AMAX_HISTORY, RNG_DRAWS, RNG_KEY
from quantshard.tensor.quantized_tensor import QuantizedTensor
from quantshard.tensor.reads import read
from quantshard.tensor.requantize import Requantization
from quantshard.tensor.storage import QuantizedStorage

aten = torch.ops.aten

SHRINKAGE = 64.0
"""Under delayed scaling, a result whose amax is smaller than the past ones by more than this factor forgets them. Steps
of optimizers change amaxes far less."""

Formula = Callable[..., Tensor]

# Each operation rounds separately, in torch's order, so that every shard gets the same bits: torch's own kernels may
# fuse some elements and not others, and GPUs would multiply by the inverse of a number.
IN_PLACE: dict[str, Formula] = {
    "add": lambda x, other, alpha=1: x + alpha * other,
    "sub": lambda x, other, alpha=1: x - alpha * other,
    "mul": operator.mul,
    "div": lambda x, other: x / torch.as_tensor(other, dtype=x.dtype, device=x.device),
    "addcmul": lambda x, first, second, value=1: x + value * first * second,
    "addcdiv": lambda x, first, second, value=1: x + value * first / second,
    "lerp": lambda x, end, weight: x + weight * (end - x),
}
"""The operations that change weights in place, such as `aten.add_` and `aten._foreach_add_`, and their formulas, of the
values x and of operands: float32 tensors or numbers."""


def _register() -> None:
    for name, formula in IN_PLACE.items():
        for overload in {"Tensor", "Scalar", "default"}.intersection(getattr(aten, f"{name}_").overloads()):
            operation = getattr(getattr(aten, f"{name}_"), overload)
            rule(operation, needed_by="torch.optim with foreach=False, users' loops")(_one(operation, formula))
        packet = getattr(aten, f"_foreach_{name}_")
        for overload in packet.overloads():
            if not overload.endswith("out"):
                operation = getattr(packet, overload)
                rule(operation, needed_by="torch.optim with foreach=True")(_many(operation, formula))


def _one(operation: Any, formula: Formula) -> Callable[..., Tensor]:
    def in_place(target: Tensor, *operands: Any, **options: Any) -> Tensor:
        if isinstance(target, QuantizedTensor):
            _update([target], [_result(formula, target, operands, options)], str(operation))
            return target
        return read(operation, target, *operands, **options)

    return in_place


def _many(operation: Any, formula: Formula) -> Callable[..., None]:
    def in_place(targets: Sequence[Tensor], *operands: Any, **options: Any) -> None:
        quantized = [i for i, target in enumerate(targets) if isinstance(target, QuantizedTensor)]
        plain = [i for i, target in enumerate(targets) if not isinstance(target, QuantizedTensor)]
        weights: list[Any] = [targets[i] for i in quantized]
        results = [
            _result(formula, weight, [operand[i] if _is_list(operand) else operand for operand in operands], options)
            for i, weight in zip(quantized, weights, strict=True)
        ]
        if weights:
            _update(weights, results, str(operation))  # first, so that an error leaves plain tensors unchanged too
        if plain:
            read(operation, [targets[i] for i in plain], *[_pick(operand, plain) for operand in operands], **options)

    return in_place


def _is_list(operand: Any) -> bool:
    """True for an operand with one entry per target: a list, or a tensor [targets] of scalars."""
    return isinstance(operand, (list, tuple)) or (isinstance(operand, Tensor) and operand.ndim == 1)


def _pick(operand: Any, indices: list[int]) -> Any:
    if not _is_list(operand):
        return operand
    return operand[indices] if isinstance(operand, Tensor) else [operand[i] for i in indices]


def _result(formula: Formula, target: Any, operands: Sequence[Any], options: dict[str, Any]) -> Tensor:
    """The weight's new values, float32, in the shape of its rectangle."""
    target.check_filled("in-place arithmetic")
    if target.quantized_storage.gathered:
        raise UnsupportedOperationError(
            f"FSDP gathered {target!r}, so a change would be lost; call reshard() and change the shard"
        )
    shape = target.quantized_storage.shard.shape
    x = target.quantized_storage.dequantize().reshape(target.shape)
    return formula(x, *map(_operand, operands), **options).float().reshape(shape)


def _operand(operand: Any) -> Any:
    if isinstance(operand, QuantizedTensor):
        return operand.dequantize(dtype=torch.float32)
    return operand.float() if isinstance(operand, Tensor) else operand


def _update(weights: Sequence[QuantizedTensor], results: Sequence[Tensor], operation: str) -> None:
    """Write new values, rounded stochastically, into all weights, or into none if a value is not finite on any rank."""
    if "addcdiv" in operation:  # the last operation of Adam and its relatives
        remedy = "use quantshard.optimizers.MasterWeights(torch.optim.AdamW, params, lr=...)"
        warn_user(f"torch.optim trains quantized weights without masters, so it loses small updates; {remedy}")
    owners, storages = [_owner_of(weight) for weight in weights], [weight.quantized_storage for weight in weights]
    by_group: dict[Groups, list[int]] = {}
    for index, owner in enumerate(owners):
        by_group.setdefault(process_groups.sharding_group(owner), []).append(index)
    reduction = FlatMax(padded=True)
    flags = {
        group: _flags([storages[i] for i in members], [results[i] for i in members], operation)
        for group, members in by_group.items()
    }
    for group, flag in flags.items():
        reduction.add(flag, group)
    non_finite = torch.stack([~torch.isfinite(result).all() for result in results]).float()
    reduction.add(non_finite, process_groups.united(by_group))
    requantizations = [
        Requantization(storage, result, requantize.shared_scales(owner, storage), reduction)
        for storage, owner, result in zip(storages, owners, results, strict=True)
    ]
    reduction.reduce()
    changed = [i for group, members in by_group.items() for i in _changed(members, flags[group], operation)]
    _check_finite(weights, non_finite, operation)
    for i in changed:
        storage = storages[i]
        history = storage.state.get(AMAX_HISTORY)
        if history is not None:  # whose scale could round new values to zeros, see `SHRINKAGE`
            (amax,) = requantizations[i].amaxes.values()
            history.mul_(amax.view(()) * SHRINKAGE >= history.max())
        requantizations[i].commit(results[i], parameter_state.rounding_words(storage.state, storage.shard))
        torch.autograd.graph.increment_version(weights[i])


def _flags(quantized: Sequence[QuantizedStorage], results: Sequence[Tensor], operation: str) -> Tensor:
    """Float32 [2 + n]: a digest of the operation and the weights, and for each of n weights whether it changes."""
    identity = [operation, *((int(storage.state[RNG_KEY]), int(storage.state[RNG_DRAWS])) for storage in quantized)]
    change = [(result != storage.dequantize()).any() for storage, result in zip(quantized, results, strict=True)]
    return torch.cat([rank_checks.rank_digest(identity, results[0].device), torch.stack(change).float()])


def _changed(members: list[int], flags: Tensor, operation: str) -> list[int]:
    highest, complement, *change = flags.tolist()
    if not rank_checks.was_alike(highest, complement):
        remedy = "use the same modules in every step (is a gradient None on some?), and seed torch alike before"
        raise RankMismatchError(f"{operation}: ranks update different weights, or have different random keys; {remedy}")
    return [i for i, changes in zip(members, change, strict=True) if changes]


def _check_finite(weights: Sequence[QuantizedTensor], non_finite: Tensor, operation: str) -> None:
    for weight, bad in zip(weights, non_finite.tolist(), strict=True):
        if bad:
            remedy = "lower the learning rate, or use MasterWeights or FusedAdam, which skip such a step"
            raise NonFiniteGradientError(f"{operation} would give {weight!r} infinite or NaN values; {remedy}")


_places: WeakKeyDictionary[QuantizedStorage, tuple[DeviceMesh, list[Placement], torch.Size]] = WeakKeyDictionary()
"""Mesh, placements and global shape of sharded parameters: PyTorch moves no DTensor that has a weak reference."""


def _owner_of(weight: QuantizedTensor) -> Tensor:
    """A DTensor like the parameter that `weight` is the local tensor of; the weight itself if it is not cut."""
    storage = weight.quantized_storage
    cut = storage.shard.cut
    if cut is None:
        return weight
    if storage.mesh is not None:  # tensor parallelism alone
        _places[storage] = storage.mesh, [Shard(cut.dim)], torch.Size(storage.shard.global_shape)
    if storage not in _places:
        for parameter in private_torch.sharded_parameters():
            local: Any = private_torch.local_tensor(parameter)
            if isinstance(local, QuantizedTensor):
                _places[local.quantized_storage] = parameter.device_mesh, list(parameter.placements), parameter.shape
    if storage not in _places:
        remedy = "change the module's own parameter, or for averages give the optimizer ema_decay (docs/optimizers.md)"
        raise UnsupportedOperationError(f"arithmetic on {weight!r}, not of a fully_shard-ed module; {remedy}")
    return private_torch.dtensor_around(weight, *_places[storage])


_register()
