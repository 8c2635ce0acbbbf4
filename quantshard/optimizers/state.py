"""Optimizer states and parameters with one interface: read in float32, write in the stored format.

A state is allocated like its parameter and appears in checkpoints as plain (D)Tensors. Each `StateKind` has a class:
`FloatState`, `RemainderState`, `SplitState`, `QuantizedState`. `make_weight` wraps a parameter in the same interface.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from quantshard import kernel_dispatch, numerics, private_torch
from quantshard.collectives.flat_max import FlatMax
from quantshard.formats import FP16, Orientation, OrientedCodes
from quantshard.kernels.optimizer.stored import MatrixRegion, PlainTensor, ScaledTensor, StoredTensor
from quantshard.numerics import RandomBits, split_codes
from quantshard.numerics.states import MASTER, REMAINDER_SUFFIX, WEIGHT, StateKind
from quantshard.recipe import QuantSpec
from quantshard.sharding import Shard
from quantshard.state_storage import needs_master, splits, state_quant_spec, stored_dtype
from quantshard.tensor import components, parameter_state, requantize
from quantshard.tensor import storage as storages
from quantshard.tensor.parameter_state import AMAX_HISTORY
from quantshard.tensor.requantize import Requantization
from quantshard.tensor.storage import QuantizedStorage, Remainder


@dataclass(frozen=True)
class TensorRegion:
    """Position of a local tensor in the global one.

    `global_shape`: shape of the global tensor. `origin`: global index of the first local element. `shape`: local shape.
    """

    global_shape: tuple[int, ...]
    origin: tuple[int, ...]
    shape: tuple[int, ...]

    @staticmethod
    def of_local(param: Tensor) -> TensorRegion:
        """Return the region of a parameter's local shard."""
        quantized = components.quantized_local(param)
        if quantized is not None:
            return TensorRegion.of_shard(quantized.quantized_storage.shard)
        shape = tuple(private_torch.local_tensor(param).shape)
        return TensorRegion(tuple(param.shape), private_torch.global_offset(param), shape)

    @staticmethod
    def of_shard(shard: Shard) -> TensorRegion:
        """Return the region of a `Shard`."""
        return TensorRegion(shard.global_shape, shard.origin, shard.shape)

    def matrix(self) -> MatrixRegion | None:
        """Return the region as a rectangle of a matrix; None if it is not one. A vector has one row; further dims than
        two are flattened into the columns."""
        if len(self.shape) < 2:
            return MatrixRegion((1, math.prod(self.global_shape)), (0, sum(self.origin)), (1, math.prod(self.shape)))
        if len(self.shape) > 2 and self.shape[1:] != self.global_shape[1:]:
            return None
        return MatrixRegion(
            (self.global_shape[0], math.prod(self.global_shape[1:])),
            (self.origin[0], sum(self.origin[1:])),
            (self.shape[0], math.prod(self.shape[1:])),
        )


class StateDraw(NamedTuple):
    """Identifies the random bits of one state in one step: the optimizer's seed, the step, and the stream number of the
    state. They depend on the index in the global tensor, so results are the same on any mesh.

    `swapped`: swap the high and low 16 bits of each number. Rounding uses the high bits, so two states can share one
    stream.
    """

    seed: int
    step: int | Tensor
    stream: int
    swapped: bool = False

    def random_bits(self, region: TensorRegion, device: torch.device) -> Tensor:
        """Return int64 in [0, 2**32), of the region's shape: one number per element, in row-major order of the global
        tensor."""
        matrix = region.matrix()
        if matrix is None:  # whole rows, which are then cut along the other dims
            trailing_dims = region.global_shape[1:]
            rows = TensorRegion(
                region.global_shape,
                (region.origin[0], *(0 for _ in trailing_dims)),
                (region.shape[0], *trailing_dims),
            )
            bits = self.random_bits(rows, device)
            for dim in range(1, len(region.shape)):
                bits = bits.narrow(dim, region.origin[dim], region.shape[dim])
            return bits
        request = RandomBits(self.seed, self.step, self.stream, *matrix)
        bits = kernel_dispatch.random_words(request, device).view(region.shape)
        return numerics.swap_halves(bits) if self.swapped else bits


def round_to(values: Tensor, dtype: torch.dtype, random_bits: Tensor | None) -> Tensor:
    """Round float32 to `dtype`: stochastically if there are `random_bits`, otherwise to nearest (as
    `numerics.split_bfloat16` does).

    Stochastic rounding goes up with a probability proportional to the remainder, so small updates add up on average. It
    saturates at the largest finite value. Dtypes other than bfloat16 and float16 are cast.
    """
    if dtype is torch.bfloat16:
        if random_bits is None:
            return numerics.split_bfloat16(values)[0]
        # The low 16 bits are the fraction of the way to the next bfloat16; a carry rounds up. NaN becomes one fixed
        # NaN: a GPU's NaN has all bits set, and a carry would turn it into zero.
        bits = values.clamp(-torch.finfo(dtype).max, torch.finfo(dtype).max).view(torch.int32)
        high = torch.where(values.isnan(), 0x7FC0, (bits + (random_bits >> 16)) >> 16)
        return high.to(torch.int16).view(torch.bfloat16)
    if dtype is torch.float16 and random_bits is not None:
        return numerics.encode_stochastic(values, FP16, random_bits)
    return values.to(dtype)


def adopt(master: Tensor, param: Tensor, rounded_master: Tensor) -> None:
    """Copy elements of a plain parameter that others changed into its float32 master.

    `rounded_master`: the master rounded to the parameter's dtype. Elements that differ from it were changed.
    """
    master.copy_(torch.where(param == rounded_master, master, param.to(master.dtype)))


class OptimizerState(ABC):
    """One state of one parameter (or the parameter itself) on this rank, read and written in float32."""

    owner: Tensor

    @property
    def storage(self) -> QuantizedStorage | None:
        """The quantized storage, or None if the state is not quantized."""
        return None

    @property
    def rounds(self) -> bool:
        """False if every float32 value fits, so that writing needs no random bits."""
        return True

    writes_weight = False
    """True for a master that also writes the parameter."""

    @abstractmethod
    def tensors(self, name: str) -> dict[str, Tensor]:
        """Return the live tensors under their keys in the optimizer's state dict."""

    @abstractmethod
    def live(self) -> list[Tensor]:
        """Return every local tensor that `write` changes."""

    @abstractmethod
    def for_kernels(self) -> StoredTensor | None:
        """Return the tensors as multi-tensor kernels read them, or None if their layout is not supported."""

    @property
    def shared(self) -> Mapping[str, tuple[dist.ProcessGroup, ...]]:
        """Components with blocks that several ranks share, and the process groups of these ranks."""
        return {}

    @abstractmethod
    def read(self) -> Tensor:
        """Return the local values in float32."""

    def adopt(self) -> None:
        """Copy the elements that others changed in a plain parameter into this master, if changes can be detected: the
        master is neither rounded itself nor stored in part by the parameter."""
        return

    def measure(self, values: Tensor, reduction: FlatMax) -> Requantization | None:
        """Register the reductions that writing `values` needs, and return them for `write`."""
        return None

    @abstractmethod
    def write(self, values: Tensor, requantization: Requantization | None, draw: StateDraw | None = None) -> None:
        """Write the local values. `requantization`: result of `measure`. `draw`: random bits for stochastic rounding
        (None: to nearest)."""

    def seed(self, values: Tensor) -> None:
        """Initialize this master from local float32 values, rounded to nearest, without changing the parameter.

        A collective call if ranks share blocks.
        """
        assign(self, values)


class FloatState(OptimizerState):
    """A state in float32, bfloat16 or float16: one tensor of the parameter's shape. `nonnegative`: see `StateSpec`."""

    def __init__(self, param: Tensor, dtype: torch.dtype, nonnegative: bool = False) -> None:
        self.owner = param
        self.tensor = components.zeros_like(param, dtype)
        self.nonnegative = nonnegative

    @property
    def local(self) -> Tensor:
        """The local tensor."""
        return private_torch.local_tensor(self.tensor)

    @property
    def rounds(self) -> bool:
        return torch.finfo(self.local.dtype).eps > torch.finfo(torch.float32).eps

    @cached_property
    def region(self) -> TensorRegion:
        """Position of the local shard in the global tensor."""
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
        adopt(self.local, param, round_to(self.local, param.dtype, None))

    def write(self, values: Tensor, requantization: Requantization | None, draw: StateDraw | None = None) -> None:
        dtype = self.local.dtype
        new = round_to(values, dtype, None if draw is None else draw.random_bits(self.region, values.device))
        if self.nonnegative and self.rounds:
            limits = torch.finfo(dtype)
            new.masked_fill_((new == 0) & (values > 0), limits.smallest_normal * limits.eps)
        self.local.copy_(new)


class PlainWeight(FloatState):
    """An unquantized parameter."""

    def __init__(self, param: Tensor) -> None:
        self.owner = self.tensor = param
        self.nonnegative = False


class LowBytesState(OptimizerState):
    """A master stored as the bytes that its parameter lacks. Writing it writes the parameter too."""

    kind: StateKind

    def __init__(self, param: Tensor, *trailing_dims: int) -> None:
        self.owner = param
        self.bytes = components.zeros_like(param, torch.uint8, *trailing_dims)

    writes_weight = True

    @property
    def low(self) -> Tensor:
        """The bytes of this rank's shard."""
        return private_torch.local_tensor(self.bytes)

    def tensors(self, name: str) -> dict[str, Tensor]:
        return {name + REMAINDER_SUFFIX: self.bytes}

    def for_kernels(self) -> StoredTensor | None:
        return PlainTensor(self.low, self.kind) if self.low.is_contiguous() else None


class RemainderState(LowBytesState):
    """The float32 master of a bfloat16 parameter, stored as the 16 bits that the parameter lacks.

    The bits are uint8 [..., 2], low byte first, because neither gloo nor NCCL can gather int16.
    """

    kind = StateKind.REMAINDER

    def __init__(self, param: Tensor) -> None:
        super().__init__(param, 2)

    @property
    def rounds(self) -> bool:
        return False

    @property
    def low(self) -> Tensor:
        return super().low.view(torch.int16).squeeze(-1)

    def live(self) -> list[Tensor]:
        return [private_torch.local_tensor(self.owner), self.low]

    def read(self) -> Tensor:
        return numerics.join_bfloat16(*self.live())

    def write(self, values: Tensor, requantization: Requantization | None, draw: StateDraw | None = None) -> None:
        for target, half in zip(self.live(), numerics.split_bfloat16(values), strict=True):
            target.copy_(half)


class QuantizedState(OptimizerState):
    """A state in the components of a format row, with blocks aligned to the global tensor. `nonnegative`: see
    `StateSpec`."""

    def __init__(self, param: Tensor, spec: QuantSpec, nonnegative: bool = False) -> None:
        self.owner = param
        self._storage = storages.empty(spec, components.shard_of(param), private_torch.local_tensor(param).device).map(
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
        by_name = self.storage.spec.format.by_name
        parts = components.storage_tensors(self.storage, self.owner)
        return {name + by_name[part].key_suffix: tensor for part, tensor in parts.items()}

    def live(self) -> list[Tensor]:
        return list(self.storage.components.values())

    def for_kernels(self) -> StoredTensor | None:
        storage = self.storage
        fmt, shard, parts = storage.spec.format, storage.shard, storage.components
        packed = fmt.copies[Orientation.ROWWISE].codes.block_shape[1]
        if shard.origin[1] % packed or not all(part.is_contiguous() for part in parts.values()):
            return None
        history = storage.state.get(AMAX_HISTORY)
        return ScaledTensor(fmt, storage.spec.scaling, shard, parts, history, frozenset(self.shared))

    def read(self) -> Tensor:
        return self.storage.dequantize()

    def measure(self, values: Tensor, reduction: FlatMax) -> Requantization | None:
        return Requantization(self.storage, values, self.shared, reduction)

    def write(self, values: Tensor, requantization: Requantization | None, draw: StateDraw | None = None) -> None:
        assert requantization is not None
        requantization.commit(
            values, None if draw is None else draw.random_bits(TensorRegion.of_shard(self.storage.shard), values.device)
        )
        if self.nonnegative:
            for copy in self.storage.spec.format.copies.values():
                codes = self.storage.components[copy.codes.name]
                bits = codes.view(torch.uint8 if codes.itemsize == 1 else torch.int16)
                bits.masked_fill_((bits == 0) & (values > 0), 1)  # the smallest positive code


class QuantizedWeight(QuantizedState):
    """A quantized parameter. Its random bits come from its own key instead of the optimizer's seed."""

    def __init__(self, param: Tensor) -> None:
        self.owner = param

    @property
    def storage(self) -> QuantizedStorage:
        return components.storage_of(self.owner)

    def live(self) -> list[Tensor]:
        history = self.storage.state.get(AMAX_HISTORY)
        return [*self.storage.components.values(), *([] if history is None else [history])]

    def write(self, values: Tensor, requantization: Requantization | None, draw: StateDraw | None = None) -> None:
        assert requantization is not None
        requantization.commit(
            values, None if draw is None else parameter_state.rounding_words(self.storage.state, self.storage.shard)
        )
        torch.autograd.graph.increment_version(private_torch.local_tensor(self.owner))


class SplitState(LowBytesState):
    """The 16-bit master of an FP8 weight, under the weight's scales: the codes plus the low bytes stored here.

    The low bytes are uint8 of the parameter's shape (`Encoding.extended`).
    """

    kind = StateKind.SPLIT

    def __init__(self, param: Tensor) -> None:
        super().__init__(param)
        self.weight = QuantizedWeight(param)

    @property
    def storage(self) -> QuantizedStorage:
        return self.weight.storage

    @property
    def shared(self) -> Mapping[str, tuple[dist.ProcessGroup, ...]]:
        return self.weight.shared

    @property
    def _codes(self) -> OrientedCodes:
        return self.storage.spec.format.copies[Orientation.ROWWISE]

    def live(self) -> list[Tensor]:
        return [*self.weight.live(), self.low]

    def read(self) -> Tensor:
        storage = self.storage
        return split_codes.dequantize(self._codes, storage.touched(), self.low, storage.shard.origin)

    def measure(self, values: Tensor, reduction: FlatMax) -> Requantization | None:
        return self.weight.measure(values, reduction)

    def write(self, values: Tensor, requantization: Requantization | None, draw: StateDraw | None = None) -> None:
        assert requantization is not None
        region = TensorRegion.of_shard(self.storage.shard)
        requantization.commit(
            values, remainder=Remainder(self.low, None if draw is None else draw.random_bits(region, values.device))
        )
        torch.autograd.graph.increment_version(private_torch.local_tensor(self.owner))

    def seed(self, values: Tensor) -> None:
        storage = self.storage
        self.low.copy_(split_codes.low_bytes(values, self._codes, storage.touched(), storage.shard.origin))


def rounded_roles(targets: Mapping[str, OptimizerState]) -> list[str]:
    """Return the roles (states, master or weight) that are rounded stochastically.

    Small updates must add up in the master, or in the parameter if it has no master. A parameter with a master is
    rounded to nearest.
    """
    return [role for role, state in targets.items() if state.rounds and not (role == WEIGHT and MASTER in targets)]


def make_state(param: Tensor, dtype: torch.dtype, nonnegative: bool = False) -> OptimizerState:
    """Allocate a zero state for a parameter, in its `stored_dtype`."""
    dtype = stored_dtype(dtype, param.ndim)
    spec = state_quant_spec(dtype, nonnegative)
    return FloatState(param, dtype, nonnegative) if spec is None else QuantizedState(param, spec, nonnegative)


def make_weight(param: Tensor) -> OptimizerState:
    """Wrap a parameter so that it is read and written like its states."""
    return PlainWeight(param) if components.quantized_local(param) is None else QuantizedWeight(param)


def make_master(param: Tensor, dtype: torch.dtype, remainders: bool) -> OptimizerState | None:
    """Allocate an empty master for a parameter coarser than `dtype`; None if the parameter needs none.

    `remainders`: store only the bits that the parameter lacks, if `splits` allows it.
    """
    quantized = components.quantized_local(param)
    if not needs_master(quantized is not None, param.dtype, dtype):
        return None
    weight = None if quantized is None else quantized.quantized_storage.spec.format
    if remainders and splits(weight, param.dtype, dtype):
        return RemainderState(param) if weight is None else SplitState(param)
    return make_state(param, dtype)


def make_average(param: Tensor, source: OptimizerState) -> OptimizerState:
    """Allocate the float32 average of a parameter, starting from `source`, its master or the parameter itself."""
    average = FloatState(param, torch.float32)
    average.write(source.read(), None)
    return average


def assign(state: OptimizerState, values: Tensor) -> None:
    """Set a state from local float32 values, rounded to nearest. A collective call if ranks share blocks."""
    reduction = FlatMax()
    requantization = state.measure(values, reduction)
    reduction.reduce()
    state.write(values, requantization)
