"""Evaluating with the averages of weights: for a while they stand in a model in the places of its weights."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from quantshard import private_torch
from quantshard.argument_kinds import MODULE, OPTIMIZER, check_arguments, suggests_names
from quantshard.errors import ConfigurationError, warn_user
from quantshard.numerics.states import AVERAGE
from quantshard.optimizers import guards
from quantshard.optimizers.state import OptimizerState, make_weight
from quantshard.tensor import requantize
from quantshard.tensor.storage import DRAWS, KEY


@suggests_names
@contextmanager
def averaged_weights(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Give a model the averages of its weights, and put the weights back at the end, also after an exception.

        with averaged_weights(model, optimizer):
            evaluate(model)

    Quantized weights become the nearest quantization of their float32 averages, with the bits of one process on any
    number of ranks; others are rounded to nearest into their dtype. Afterwards codes, scales, amax histories and plain
    values are what they were, bit for bit, and a step finds nothing changed. What FSDP2 has gathered is freed at both
    ends. Parameters without an average (frozen ones) and buffers stay as they are. Inside, the model may be evaluated
    and its state dict be taken; the optimizer neither steps nor is read, saved or loaded. Values that are written
    into weights inside, as by `load_state_dict`, are undone too, with a warning. Of weights that are replaced, as by
    `load_state_dict(assign=True)`, another warning says that they stay, and are no longer the optimizer's.

    A collective call at its beginning where parameters are sharded, with one reduction of amaxes for all of them. A
    rank holds a copy of its parts of the weights meanwhile.

    Args:
        model: it has all parameters that the optimizer keeps averages of.
        optimizer: a FusedAdam, ElementwiseOptimizer or MasterWeights with `ema_decay`.

    Raises:
        ConfigurationError: the optimizer keeps no averages, or of another model; averages already stand in; or one is
            infinite or NaN, and nothing was changed.
    """
    check_arguments("averaged_weights", MODULE, model=model)
    check_arguments("averaged_weights", OPTIMIZER, optimizer=optimizer)
    _reshard(model)  # after which the model's parameters are those that are sharded
    owner: Any = optimizer
    kept = [_WeightCopy.of(param, owner) for param in _with_averages(model, optimizer)]
    written: dict[Tensor, int] = {}
    is_done = False
    try:
        owner._averages_swapped_in = True
        _write_averages(kept, owner)
        written = {weight.param: guards.weight_version(weight.param) for weight in kept}
        yield
        is_done = True
    finally:
        lost = [owner._names[param] for param, version in written.items() if guards.weight_version(param) != version]
        with torch.no_grad():
            for weight in kept:
                weight.put_back()
        _reshard(model)
        owner._averages_swapped_in = False
        owner._versions |= {weight.param: guards.weight_version(weight.param) for weight in kept if weight.is_known}
        if is_done:  # else an exception is told
            _warn_of_changes(lost, [owner._names[param] for param in _not_of(model, written)])


def _warn_of_changes(written: Sequence[str], replaced: Sequence[str]) -> None:
    """Tell of weights by name that were not left alone inside."""
    if written:
        warn_user(
            f"averaged_weights: {_first_of(written)} got new values inside, as by load_state_dict, which are undone at "
            "its end, when the weights of before come back; load outside"
        )
    if replaced:
        warn_user(
            f"averaged_weights: {_first_of(replaced)} became another parameter of the model inside, as by "
            "load_state_dict(assign=True): the model keeps it, and the weights of before, which the optimizer steps, "
            "are its no more; load outside, and build the optimizer anew after a load by assign=True"
        )


def _first_of(names: Sequence[str]) -> str:
    return names[0] + (f" and {len(names) - 1} more" if len(names) > 1 else "")


def _not_of(model: nn.Module, params: Iterable[Tensor]) -> list[Tensor]:
    """Those that are no parameters of a model."""
    own = {id(param) for param in model.parameters()}
    return [param for param in params if id(param) not in own]


@dataclass(frozen=True)
class _WeightCopy:
    """A parameter's local tensors, and copies of what was in them.

    `is_known`: no one has given it values that the optimizer does not know of.
    """

    param: Tensor
    weight: OptimizerState
    before: list[Tensor]
    high_precision: Tensor | None
    is_known: bool

    @classmethod
    def of(cls, param: Tensor, optimizer: Any) -> _WeightCopy:
        weight, version = make_weight(param), guards.weight_version(param)
        before = [tensor.detach().clone() for tensor in _tensors_of(weight)]
        values = None if weight.storage is None else weight.storage.initial_values()
        return cls(param, weight, before, values, optimizer._versions.get(param, version) == version)

    def put_back(self) -> None:
        for tensor, old in zip(_tensors_of(self.weight), self.before, strict=True):
            tensor.detach().copy_(old)
        if self.weight.storage is not None:
            self.weight.written(drawn=False)
            self.weight.storage.keep_initial_values(self.high_precision)


def _tensors_of(weight: OptimizerState) -> list[Tensor]:
    """What a write or a load changes of a parameter here."""
    state = {} if weight.storage is None else weight.storage.state
    return [*weight.live(), *(state[name] for name in (KEY, DRAWS) if name in state)]


def _with_averages(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """The parameters that have an average, checked to be the model's.

    Raises:
        ConfigurationError: there are none, or the model lacks one.
    """
    guards.check_own_weights(type(optimizer).__name__, getattr(optimizer, "_averages_swapped_in", False))
    params = [param for group in optimizer.param_groups for param in group["params"]]
    found = [param for param in params if AVERAGE in optimizer.state.get(param, {})]
    if not found:
        raise ConfigurationError(
            f"averaged_weights: this {type(optimizer).__name__} keeps no averages of weights; build a FusedAdam or "
            "MasterWeights with ema_decay=0.999, or call its begin_average(0.999)"
        )
    if lacking := _not_of(model, found):
        raise ConfigurationError(
            f"averaged_weights: {len(lacking)} of the {len(found)} parameters that this {type(optimizer).__name__} "
            f"averages are not the model's (the first of shape {tuple(lacking[0].shape)}); give the whole model that "
            "the optimizer was built over"
        )
    return found


@torch.no_grad()
def _write_averages(kept: list[_WeightCopy], optimizer: Any) -> None:
    """Round the averages to the nearest values that the parameters can hold."""
    values = {weight.param: private_torch.local_tensor(optimizer.state[weight.param][AVERAGE]) for weight in kept}
    quantized = [weight.param for weight in kept if weight.weight.storage is not None]
    plain = [weight.param for weight in kept if weight.weight.storage is None]
    requantize.requantize_(
        [(param, values[param]) for param in quantized],
        plain=[(param, values[param]) for param in plain],
        names=[optimizer._names[param] for param in (*quantized, *plain)],
    )
    for weight in kept:
        if weight.weight.storage is None:
            weight.weight.write(values[weight.param], None)


def _reshard(model: nn.Module) -> None:
    """Free what FSDP2 has gathered, so that the next forward gathers the weights of its time."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
