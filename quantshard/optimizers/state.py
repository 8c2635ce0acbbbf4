"""Optimizer states: float32 or 8-bit, allocated like their parameter, visible to checkpoints as plain (D)Tensors."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from quantshard import amax, components, private_torch, sharding
from quantshard import storage as storages
from quantshard.amax import FlatMax, Requantization
from quantshard.errors import ConfigurationError
from quantshard.recipe import FP8_STATE, Cell
from quantshard.sharding import Shard
from quantshard.storage import QuantizedStorage

STATE_CELLS: dict[torch.dtype, Cell | None] = {torch.float32: None, torch.uint8: FP8_STATE}
"""Moment dtypes, spelled as TransformerEngine does (`torch.uint8` means FP8), and how each is stored."""


def shard_of(param: Tensor) -> Shard:
    """Which rectangle of the global tensor a 2-D parameter's local tensor is."""
    local = components.quantized(param)
    if local is not None:
        return local._storage.shard
    shard = sharding.whole((param.shape[0], param.shape[1]))
    if isinstance(param, DTensor):
        mesh, coordinate = param.device_mesh, param.device_mesh.get_coordinate()
        assert coordinate is not None
        for axis in reversed(range(mesh.ndim)):  # tensor parallelism, whose axes stand last, cuts first
            placement = param.placements[axis]
            if not placement.is_replicate():
                dim = int(placement.dim)  # type: ignore[attr-defined]
                chunk = sharding.ceil_div(shard.shape[dim], mesh.size(axis))
                shard = shard.piece(dim, coordinate[axis] * chunk, chunk)
    return shard


class State(ABC):
    """One state of one parameter, local to this rank: read and written in float32."""

    storage: QuantizedStorage | None = None
    """Where it is quantized, its components."""

    @abstractmethod
    def tensors(self, name: str) -> dict[str, Tensor]:
        """The state's entries in the optimizer's state dict, live."""

    @abstractmethod
    def read(self) -> Tensor:
        """The local values, float32."""

    @abstractmethod
    def begin(self, values: Tensor, reduction: FlatMax) -> Requantization | None:
        """Register what writing these values needs reduced."""

    @abstractmethod
    def write(self, values: Tensor, begun: Requantization | None) -> None:
        """Write the local values; `begun` is what `begin` returned."""


class FloatState(State):
    """A float32 state: one tensor of the parameter's shape."""

    def __init__(self, param: Tensor) -> None:
        local = private_torch.local_tensor(param)
        self.local = torch.zeros(local.shape, dtype=torch.float32, device=local.device)
        self.owner = param

    def tensors(self, name: str) -> dict[str, Tensor]:
        if not isinstance(self.owner, DTensor):
            return {name: self.local}
        placements = list(self.owner.placements)
        return {name: components.as_dtensor(self.local, self.owner, placements, tuple(self.owner.shape))}

    def read(self) -> Tensor:
        return self.local

    def begin(self, values: Tensor, reduction: FlatMax) -> Requantization | None:
        return None

    def write(self, values: Tensor, begun: Requantization | None) -> None:
        self.local.copy_(values)


class QuantizedState(State):
    """An 8-bit state: components of a format row, blocked by index in the global tensor.

    `keep_positive`: a positive value never becomes zero. For the second moment: a zero under the square root would
    blow up the step of an element whose first moment survived.
    """

    storage: QuantizedStorage

    def __init__(self, param: Tensor, cell: Cell, keep_positive: bool) -> None:
        self.group = amax.sharding_group(param)
        self.storage = storages.empty(cell, shard_of(param), private_torch.local_tensor(param).device)
        self.storage = self.storage.map(torch.zero_)
        self.owner = param
        self.keep_positive = keep_positive

    def tensors(self, name: str) -> dict[str, Tensor]:
        by_name = self.storage.cell.format.by_name
        parts = components.storage_tensors(self.storage, self.owner)
        return {name + by_name[part].key_suffix: tensor for part, tensor in parts.items()}

    def read(self) -> Tensor:
        return self.storage.dequantize()

    def begin(self, values: Tensor, reduction: FlatMax) -> Requantization | None:
        return Requantization(self.storage, values, self.group, reduction)

    def write(self, values: Tensor, begun: Requantization | None) -> None:
        assert begun is not None
        begun.commit(values)
        if self.keep_positive:
            for copy in self.storage.cell.format.copies.values():
                codes = self.storage.components[copy.codes.name]
                codes[(codes == 0) & (values > 0)] = 1  # the smallest positive code


def make_state(param: Tensor, dtype: torch.dtype, *, keep_positive: bool) -> State:
    """A zero state for a parameter. 8-bit states are for 2-D parameters; the few others stay float32.

    Raises:
        ConfigurationError: the dtype is not one of `STATE_CELLS`.
    """
    if dtype not in STATE_CELLS:
        raise ConfigurationError(
            f"moments of dtype {dtype} are not supported; use one of {', '.join(map(str, STATE_CELLS))} (uint8: FP8)"
        )
    cell = STATE_CELLS[dtype]
    if cell is None or param.ndim != 2:
        return FloatState(param)
    return QuantizedState(param, cell, keep_positive)
