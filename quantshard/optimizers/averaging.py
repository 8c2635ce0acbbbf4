"""Evaluation with the averages of weights, which replace the weights for the duration of a context."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from quantshard import private_torch
from quantshard.errors import ConfigurationError, warn_user
from quantshard.numerics.states import AVERAGE, EMA_DECAY
from quantshard.optimizers.base import ParameterOptimizer, check_ranges, weight_version
from quantshard.optimizers.state import OptimizerState, make_weight
from quantshard.tensor import requantize
from quantshard.tensor.parameter_state import RNG_DRAWS, RNG_KEY

_averaged: set[int] = set()
"""Ids of the parameters that have their averages' values now."""


def has_averages(model: nn.Module) -> bool:
    """Return whether the call is inside `averaged_weights` of this model."""
    return any(id(param) in _averaged for param in model.parameters())


@contextmanager
def averaged_weights(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Swap the averages of the weights into the model, and restore the weights on exit, also after an exception.

        with averaged_weights(model, optimizer):
            evaluate(model)

    Quantized weights become the nearest quantization of their float32 averages, bitwise the same on any number of
    ranks; other weights are rounded to nearest in their dtype. Buffers and parameters without an average (frozen ones)
    do not change. On exit codes, scales, amax histories and plain values are restored bit for bit, so the next step
    sees no change. FSDP2 modules are resharded on entry and on exit.

    Inside, you can evaluate the model and take its state dict, but not step, read, save or load the optimizer. Loading
    into the model inside is undone with a warning. Entering is a collective call if parameters are sharded. Each rank
    holds a copy of its shards of the weights until the exit. `model` must have all parameters that are averaged.
    """
    reshard(model)  # so that model.parameters() yields the sharded parameters
    owner: Any = optimizer
    copies = [_WeightCopy(param, owner) for param in _with_averages(model, optimizer)]
    versions: dict[Tensor, int] = {}
    succeeded = False
    try:
        owner._averages_swapped_in = True
        _write_averages(copies, owner)
        _averaged.update(id(copy.param) for copy in copies)
        versions = {copy.param: weight_version(copy.param) for copy in copies}
        yield
        succeeded = True
    finally:
        _averaged.difference_update(id(copy.param) for copy in copies)
        overwritten = [owner._names[param] for param, version in versions.items() if weight_version(param) != version]
        with torch.no_grad():
            for copy in copies:
                copy.put_back()
        reshard(model)
        owner._averages_swapped_in = False
        owner._versions |= {copy.param: weight_version(copy.param) for copy in copies if copy.is_known}
        if overwritten and succeeded:  # an exception must not be hidden by a warning
            first = overwritten[0] + (f" and {len(overwritten) - 1} more" if len(overwritten) > 1 else "")
            warn_user(f"averaged_weights: {first} got new values inside, which were undone; load outside")


class _WeightCopy:
    """Copies of a parameter's values. `is_known`: the optimizer has seen the latest write to the parameter."""

    def __init__(self, param: Tensor, optimizer: Any) -> None:
        self.param, self.weight, version = param, make_weight(param), weight_version(param)
        self.values = [tensor.detach().clone() for tensor in _tensors_of(self.weight)]
        self.high_precision = None if self.weight.storage is None else self.weight.storage.initial_values()
        self.is_known = optimizer._versions.get(param, version) == version

    def put_back(self) -> None:
        for tensor, value in zip(_tensors_of(self.weight), self.values, strict=True):
            tensor.detach().copy_(value)
        if self.weight.storage is not None:
            torch.autograd.graph.increment_version(private_torch.local_tensor(self.param))
            self.weight.storage.mark_written()
            self.weight.storage.keep_initial_values(self.high_precision)


def _tensors_of(weight: OptimizerState) -> list[Tensor]:
    """Return every local tensor that a write or a load of the parameter changes."""
    state = {} if weight.storage is None else weight.storage.state
    return [*weight.live(), *(state[name] for name in (RNG_KEY, RNG_DRAWS) if name in state)]


def _with_averages(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    name = type(optimizer).__name__
    if isinstance(optimizer, ParameterOptimizer):
        optimizer._adopt_replaced_parameters()
    params = [param for group in optimizer.param_groups for param in group["params"]]
    averaged = [param for param in params if AVERAGE in optimizer.state.get(param, {})]
    if not averaged:
        raise ConfigurationError(f"averaged_weights: this {name} keeps no averages; call its begin_average(0.999)")
    model_ids = {id(param) for param in model.parameters()}
    if missing := [param for param in averaged if id(param) not in model_ids]:
        problem = f"{len(missing)} of the {len(averaged)} parameters that this {name} averages are not the model's"
        raise ConfigurationError(f"averaged_weights: {problem}; pass the whole model")
    return averaged


@torch.no_grad()
def _write_averages(copies: list[_WeightCopy], optimizer: Any) -> None:
    values = {copy.param: private_torch.local_tensor(optimizer.state[copy.param][AVERAGE]) for copy in copies}
    quantized = [copy.param for copy in copies if copy.weight.storage is not None]
    names = [optimizer._names[param] for param in quantized]
    requantize.requantize_([(param, values[param]) for param in quantized], names=names)
    for copy in copies:
        if copy.weight.storage is None:
            copy.weight.write(values[copy.param], None)


def reshard(model: nn.Module) -> None:
    """Free what FSDP2 has gathered, also in a forward without backward; the next forward gathers current values."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def check_begins(optimizer: ParameterOptimizer, decay: float) -> None:
    where = f"{type(optimizer).__name__}.begin_average({decay})"
    check_ranges(where, {EMA_DECAY: decay}, (EMA_DECAY,))
    if optimizer._is_averaging or not decay:
        raise ConfigurationError(f"{where}: use a decay above 0, once; change group['ema_decay'] later")
