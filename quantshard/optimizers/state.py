"""Optimizer states and parameters behind one interface: read in float32, written in what they are stored in.

A state is allocated like its parameter and visible to checkpoints as plain (D)Tensors. Each `StateKind` has its class:
`FloatState`, `RemainderState`, `SplitState`, `QuantizedState`. A parameter itself is read and written in the same way
(`make_weight`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from functools import cached_property

import torch
import torch.distributed as dist
from torch import Tensor

from quantshard import numerics, private_torch
from quantshard.collectives.flat_max import FlatMax
from quantshard.errors import ConfigurationError
from quantshard.formats import Format, Orientation, OrientedCodes
from quantshard.kernels.optimizer.stored import PlainTensor, ScaledTensor, StoredTensor
from quantshard.numerics import split_codes
from quantshard.numerics.states import MASTER, REMAINDER_SUFFIX, StateKind
from quantshard.optimizers import rounding
from quantshard.optimizers.rounding import StateDraw, TensorRegion
from quantshard.presets import is_split
from quantshard.recipe import QuantSpec
from quantshard.state_cells import STATE_CELLS, state_cell
from quantshard.tensor import components, requantize
from quantshard.tensor import storage as storages
from quantshard.tensor.requantize import Requantization
from quantshard.tensor.storage import AMAX_HISTORY, DRAWS, KEY, QuantizedStorage, Remainder

PLAIN_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
"""Of masters, and of parameters that are not quantized: float32, in which all arithmetic is, holds their values."""


class OptimizerState(ABC):
    """One state of one parameter, local to this rank, or the parameter itself: read and written in float32."""

    owner: Tensor

    @property
    def storage(self) -> QuantizedStorage | None:
        """Where it is quantized, its components."""
        return None

    @property
    def shares_blocks(self) -> bool:
        """True if writing needs amaxes of other ranks."""
        return bool(self.shared)

    @property
    def rounds(self) -> bool:
        """False if every float32 fits, so that writing needs no random words."""
        return True

    @property
    def writes_weight(self) -> bool:
        """True of a master whose write is the parameter's too."""
        return False

    @abstractmethod
    def tensors(self, name: str) -> dict[str, Tensor]:
        """The state's entries in the optimizer's state dict, live."""

    @abstractmethod
    def live(self) -> list[Tensor]:
        """Every local tensor that `write` changes."""

    @abstractmethod
    def for_kernels(self) -> StoredTensor | None:
        """What kernels over many tensors are told of it; None if they do not take it as it lies."""

    @property
    def shared(self) -> Mapping[str, tuple[dist.ProcessGroup, ...]]:
        """The components with amaxes of blocks that ranks share, each with these ranks."""
        return {}

    def signature(self) -> list[int]:
        """What kernels are told of it once for many steps: where its tensors are."""
        return [tensor.data_ptr() for tensor in self.live()]

    def written(self, drawn: bool) -> None:
        """Count that kernels gave the parameter new values; `drawn`: rounded stochastically."""
        torch.autograd.graph.increment_version(private_torch.local_tensor(self.owner))

    @abstractmethod
    def read(self) -> Tensor:
        """The local values, float32."""

    def adopt(self) -> None:
        """As a master, take the elements over that others changed of the parameter, which is not quantized.

        By default nothing is done: it cannot be known of a master that was rounded itself, nor need it be of one whose
        high half is the parameter.
        """
        return

    def begin(self, values: Tensor, reduction: FlatMax) -> Requantization | None:
        """Register what writing these values needs reduced."""
        return None

    @abstractmethod
    def write(self, values: Tensor, begun: Requantization | None, draw: StateDraw | None = None) -> None:
        """Write the local values: rounded stochastically with the words of `draw`, without one to nearest.

        `begun` is what `begin` returned.
        """

    def seed(self, values: Tensor) -> None:
        """As a master, take the local values, float32, that its parameter was given: rounded to nearest, and the
        parameter stays as it is. A collective call where it shares blocks with ranks."""
        assign(self, values)


class FloatState(OptimizerState):
    """A float32 or bfloat16 state: one tensor of the parameter's shape.

    `nonnegative`: see `StateSpec`.
    """

    def __init__(self, param: Tensor, dtype: torch.dtype, nonnegative: bool = False) -> None:
        self.owner = param
        self.tensor = components.zeros_like(param, dtype)
        self.nonnegative = nonnegative

    @property
    def local(self) -> Tensor:
        """The tensor that is read and written."""
        return private_torch.local_tensor(self.tensor)

    @property
    def rounds(self) -> bool:
        return torch.finfo(self.local.dtype).eps > torch.finfo(torch.float32).eps

    @cached_property
    def place(self) -> TensorRegion:
        """Which part of the global tensor it is."""
        return TensorRegion.of_local(self.owner)

    def tensors(self, name: str) -> dict[str, Tensor]:
        return {name: self.tensor}

    def live(self) -> list[Tensor]:
        return [self.local]

    def for_kernels(self) -> StoredTensor | None:
        return PlainTensor(self.local) if self.local.is_contiguous() else None

    def read(self) -> Tensor:
        return self.local.float()

    def adopt(self) -> None:
        param = private_torch.local_tensor(self.owner).detach()
        rounding.adopt(self.local, param, rounding.round_to(self.local, param.dtype, None))

    def write(self, values: Tensor, begun: Requantization | None, draw: StateDraw | None = None) -> None:
        dtype = self.local.dtype
        words = None if draw is None else draw.words(self.place, values.device)
        new = rounding.round_to(values, dtype, words)
        if self.nonnegative and self.rounds:
            limits = torch.finfo(dtype)
            new.masked_fill_((new == 0) & (values > 0), limits.smallest_normal * limits.eps)
        self.local.copy_(new)


class PlainWeight(FloatState):
    """A parameter of a plain dtype."""

    def __init__(self, param: Tensor) -> None:
        self.owner = self.tensor = param
        self.nonnegative = False


class RemainderState(OptimizerState):
    """The float32 master of a bfloat16 parameter: the parameter, and here the 16 bits that it lacks. It writes both.

    They are kept as uint8 [..., 2], low byte first, since neither gloo nor NCCL can gather int16.
    """

    def __init__(self, param: Tensor) -> None:
        self.owner = param
        self.bytes = components.zeros_like(param, torch.uint8, 2)

    @property
    def rounds(self) -> bool:
        return False

    @property
    def writes_weight(self) -> bool:
        return True

    def tensors(self, name: str) -> dict[str, Tensor]:
        return {name + REMAINDER_SUFFIX: self.bytes}

    def live(self) -> list[Tensor]:
        low = private_torch.local_tensor(self.bytes).view(torch.int16).squeeze(-1)
        return [private_torch.local_tensor(self.owner), low]

    def for_kernels(self) -> StoredTensor | None:
        low = self.live()[-1]
        return PlainTensor(low, StateKind.REMAINDER) if low.is_contiguous() else None

    def read(self) -> Tensor:
        return numerics.join_bfloat16(*self.live())

    def write(self, values: Tensor, begun: Requantization | None, draw: StateDraw | None = None) -> None:
        for target, half in zip(self.live(), numerics.split_bfloat16(values), strict=True):
            target.copy_(half)


class QuantizedState(OptimizerState):
    """A state in components of a format row, blocked by index in the global tensor.

    `nonnegative`: see `StateSpec`.
    """

    def __init__(self, param: Tensor, cell: QuantSpec, nonnegative: bool = False) -> None:
        self.owner = param
        self._storage = storages.empty(cell, components.shard_of(param), private_torch.local_tensor(param).device).map(
            torch.zero_
        )
        self.nonnegative = nonnegative

    @property
    def storage(self) -> QuantizedStorage:
        return self._storage

    @cached_property
    def shared(self) -> Mapping[str, tuple[dist.ProcessGroup, ...]]:
        return requantize.shared_scales(self.owner, self.storage)

    def tensors(self, name: str) -> dict[str, Tensor]:
        by_name = self.storage.cell.format.by_name
        parts = components.storage_tensors(self.storage, self.owner)
        return {name + by_name[part].key_suffix: tensor for part, tensor in parts.items()}

    def live(self) -> list[Tensor]:
        return list(self.storage.components.values())

    def for_kernels(self) -> StoredTensor | None:
        storage = self.storage
        fmt, shard, parts = storage.cell.format, storage.shard, storage.components
        packed = fmt.copies[Orientation.ROWWISE].codes.block_shape[1]
        if shard.origin[1] % packed or not all(part.is_contiguous() for part in parts.values()):
            return None
        history = storage.state.get(AMAX_HISTORY)
        return ScaledTensor(fmt, storage.cell.scaling, shard, parts, history, frozenset(self.shared))

    def read(self) -> Tensor:
        return self.storage.dequantize()

    def begin(self, values: Tensor, reduction: FlatMax) -> Requantization | None:
        return Requantization(self.storage, values, self.shared, reduction)

    def write(self, values: Tensor, begun: Requantization | None, draw: StateDraw | None = None) -> None:
        assert begun is not None
        begun.commit(
            values, None if draw is None else draw.words(TensorRegion.of_shard(self.storage.shard), values.device)
        )
        if self.nonnegative:
            for copy in self.storage.cell.format.copies.values():
                codes = self.storage.components[copy.codes.name]
                bits = codes.view(torch.uint8 if codes.itemsize == 1 else torch.int16)
                bits.masked_fill_((bits == 0) & (values > 0), 1)  # the smallest positive code


class QuantizedWeight(QuantizedState):
    """A quantized parameter. Its random words are not the optimizer's but a draw of its own key."""

    def __init__(self, param: Tensor) -> None:
        self.owner = param

    @property
    def storage(self) -> QuantizedStorage:
        return components.storage_of(self.owner)

    def live(self) -> list[Tensor]:
        history = self.storage.state.get(AMAX_HISTORY)
        return [*self.storage.components.values(), *([] if history is None else [history])]

    def signature(self) -> list[int]:
        return [*super().signature(), int(self.storage.state[KEY])]  # which a load writes in place

    def written(self, drawn: bool) -> None:
        super().written(drawn)
        self.storage.mark_written()
        if drawn:
            self.storage.state[DRAWS].add_(1)

    def write(self, values: Tensor, begun: Requantization | None, draw: StateDraw | None = None) -> None:
        assert begun is not None
        begun.commit(values, None if draw is None else storages.rounding_words(self.storage))
        torch.autograd.graph.increment_version(private_torch.local_tensor(self.owner))


class SplitState(OptimizerState):
    """The master of a weight of FP8 codes, 16 bits under the weight's own scales: the codes, and here the low bytes,
    uint8 of the parameter's shape (`Encoding.extended`). It writes both.
    """

    def __init__(self, param: Tensor) -> None:
        self.owner = param
        self.weight = QuantizedWeight(param)
        self.bytes = components.zeros_like(param, torch.uint8)

    @property
    def storage(self) -> QuantizedStorage:
        return self.weight.storage

    @property
    def shared(self) -> Mapping[str, tuple[dist.ProcessGroup, ...]]:
        return self.weight.shared

    @property
    def writes_weight(self) -> bool:
        return True

    @property
    def low(self) -> Tensor:
        """The low bytes of this rank's part."""
        return private_torch.local_tensor(self.bytes)

    @property
    def _codes(self) -> OrientedCodes:
        return self.storage.cell.format.copies[Orientation.ROWWISE]

    def tensors(self, name: str) -> dict[str, Tensor]:
        return {name + REMAINDER_SUFFIX: self.bytes}

    def live(self) -> list[Tensor]:
        return [*self.weight.live(), self.low]

    def for_kernels(self) -> StoredTensor | None:
        return PlainTensor(self.low, StateKind.SPLIT) if self.low.is_contiguous() else None

    def read(self) -> Tensor:
        storage = self.storage
        return split_codes.dequantize(self._codes, storage.touched(), self.low, storage.shard.origin)

    def begin(self, values: Tensor, reduction: FlatMax) -> Requantization | None:
        return self.weight.begin(values, reduction)

    def write(self, values: Tensor, begun: Requantization | None, draw: StateDraw | None = None) -> None:
        assert begun is not None
        place = TensorRegion.of_shard(self.storage.shard)
        begun.commit(values, remainder=Remainder(self.low, None if draw is None else draw.words(place, values.device)))
        torch.autograd.graph.increment_version(private_torch.local_tensor(self.owner))

    def seed(self, values: Tensor) -> None:
        storage = self.storage
        self.low.copy_(split_codes.low_bytes(values, self._codes, storage.touched(), storage.shard.origin))


def check_dtype(optimizer: str, role: str, dtype: torch.dtype) -> None:
    """Raise ConfigurationError if states of this role cannot have the dtype."""
    allowed = PLAIN_DTYPES if role == MASTER else tuple(STATE_CELLS)
    if dtype not in allowed:
        option = "master_weight_dtype" if role == MASTER else f"{role}_dtype"
        raise ConfigurationError(
            f"{optimizer}({option}={dtype}) is not supported; use one of {', '.join(map(str, allowed))}"
            + (" (uint8: FP8)" if torch.uint8 in allowed else "")
        )


def floor_of(dtype: torch.dtype, nonnegative: bool = False) -> float:
    """How small a value can be beside others under one scale (`Encoding.floor`), of the states of matrices that this
    dtype asks for; 0 where each has an exponent of its own. `nonnegative`: see `StateSpec`."""
    cell = state_cell(dtype, nonnegative)
    return 0.0 if cell is None else cell.format.copies[Orientation.ROWWISE].codes.encoding.floor


def stored_dtype(dtype: torch.dtype, ndim: int) -> torch.dtype:
    """The dtype that a state has which `dtype` is asked for: scaled states are for 2-D parameters; the few others stay
    float32."""
    return torch.float32 if STATE_CELLS[dtype] is not None and ndim != 2 else dtype


def needs_master(is_quantized: bool, dtype: torch.dtype, master: torch.dtype) -> bool:
    """Whether a parameter is coarser than a master would be."""
    return is_quantized or torch.finfo(dtype).eps > torch.finfo(master).eps


def splits(weight: Format | None, dtype: torch.dtype, master: torch.dtype) -> bool:
    """Whether a master can be what its parameter lacks alone (`store_param_remainders`).

    A bfloat16 parameter lacks 16 bits of a float32, whatever the master's dtype; a quantized weight of 8 bits, of a
    master of 16 bits, the low 8. `weight`: its format; None: it is of `dtype`, and not quantized.
    """
    return dtype is torch.bfloat16 if weight is None else is_split(weight, master)


def make_state(param: Tensor, dtype: torch.dtype, nonnegative: bool = False) -> OptimizerState:
    """A zero state for a parameter, of its `stored_dtype`."""
    dtype = stored_dtype(dtype, param.ndim)
    cell = state_cell(dtype, nonnegative)
    return FloatState(param, dtype, nonnegative) if cell is None else QuantizedState(param, cell, nonnegative)


def make_weight(param: Tensor) -> OptimizerState:
    """A parameter, to be read and written as its states are."""
    return PlainWeight(param) if components.quantized_local(param) is None else QuantizedWeight(param)


def make_master(param: Tensor, dtype: torch.dtype, remainders: bool) -> OptimizerState | None:
    """A master for a parameter that is coarser than `dtype`, holding nothing yet; None for others, which need none.

    `remainders`: of parameters that `splits`, it is what they lack alone.
    """
    quantized = components.quantized_local(param)
    if not needs_master(quantized is not None, param.dtype, dtype):
        return None
    weight = None if quantized is None else quantized.quantized_storage.cell.format
    if remainders and splits(weight, param.dtype, dtype):
        return RemainderState(param) if weight is None else SplitState(param)
    return make_state(param, dtype)


def make_average(param: Tensor, source: OptimizerState) -> OptimizerState:
    """The average of a parameter, float32, which begins with the values of `source`: its master, or it itself."""
    average = FloatState(param, torch.float32)
    average.write(source.read(), None)
    return average


def assign(state: OptimizerState, values: Tensor) -> None:
    """Give a state local values, float32, rounded to nearest; a collective call where it shares blocks with ranks."""
    reduction = FlatMax()
    begun = state.begin(values, reduction)
    reduction.reduce()
    state.write(values, begun)
