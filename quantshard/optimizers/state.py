"""Optimizer states and parameters with one interface: read in float32, write in the stored format.

Each `StateKind` has a class; in checkpoints states are plain (D)Tensors. `make_weight` wraps a parameter likewise.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from quantshard import kernel_dispatch, numerics, private_torch
from quantshard.collectives.flat_max import FlatMax
from quantshard.formats import FP16, Orientation
from quantshard.kernels.optimizer.stored import STACK_ROWS, MatrixRegion, PlainTensor, ScaledTensor, StoredTensor
from quantshard.numerics import RandomBits, split_codes
from quantshard.numerics.states import MASTER, REMAINDER_SUFFIX, WEIGHT, StateKind, StateSpec
from quantshard.recipe import QuantSpec
from quantshard.state_storage import needs_master, splits, state_quant_spec, stored_dtype
from quantshard.tensor import components, parameter_state, requantize, storage as storages
from quantshard.tensor.parameter_state import AMAX_HISTORY
from quantshard.tensor.requantize import Requantization
from quantshard.tensor.storage import QuantizedStorage, Remainder

Draw = Callable[[], Tensor] | None
"""Returns random bits for stochastic rounding, int64 in [0, 2**32), one number per element; None rounds to nearest."""


class TensorRegion(NamedTuple):
    """Position of a local tensor in the global one. `origin`: global index of the first local element."""

    global_shape: tuple[int, ...]
    origin: tuple[int, ...]
    shape: tuple[int, ...]

    @staticmethod
    def of_local(param: Tensor) -> TensorRegion:
        storage = components.quantized_storage(param)
        if storage is not None:
            shard = storage.shard
            return TensorRegion(shard.global_shape, shard.origin, shard.shape)
        shape = tuple(private_torch.local_tensor(param).shape)
        return TensorRegion(tuple(param.shape), private_torch.global_offset(param), shape)

    def matrix(self) -> MatrixRegion | None:
        """Return the region as part of a matrix, or None. A vector has one row; later dims are columns."""
        if len(self.shape) < 2:
            return MatrixRegion((1, math.prod(self.global_shape)), (0, sum(self.origin)), (1, math.prod(self.shape)))
        if len(self.shape) > 2 and self.shape[1:] != self.global_shape[1:]:
            return None
        return MatrixRegion(
            (self.global_shape[0], math.prod(self.global_shape[1:])),
            (self.origin[0], sum(self.origin[1:])),
            (self.shape[0], math.prod(self.shape[1:])),
        )

    def random_bits(self, seed: int, step: int | Tensor, stream: int, swapped: bool, device: torch.device) -> Tensor:
        """Return int64 in [0, 2**32): a number per element, which depends only on its index in the global tensor.
        `swapped`: swap the high and low 16 bits. Rounding uses the high ones, so two states can share one stream."""
        matrix = self.matrix()
        if matrix is None:  # whole rows, which are then cut along the other dims
            trailing = self.global_shape[1:]
            rows = TensorRegion(self.global_shape, (self.origin[0], *(0 for _ in trailing)), (self.shape[0], *trailing))
            bits = rows.random_bits(seed, step, stream, swapped, device)
            for dim, (start, size) in enumerate(zip(self.origin[1:], self.shape[1:], strict=True), start=1):
                bits = bits.narrow(dim, start, size)
            return bits
        bits = kernel_dispatch.random_words(RandomBits(seed, step, stream, *matrix), device).view(self.shape)
        return numerics.swap_halves(bits) if swapped else bits


def round_to(values: Tensor, dtype: torch.dtype, random_bits: Tensor | None) -> Tensor:
    """Round float32 to `dtype`: to nearest, or by `random_bits` stochastically, saturating at the largest finite value.
    Dtypes other than bfloat16 and float16 are cast."""
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
    """Copy elements of a plain parameter that others changed (they differ from `rounded_master`) into its master."""
    master.copy_(torch.where(param == rounded_master, master, param.to(master.dtype)))


class OptimizerState(ABC):
    """One state of one parameter (or the parameter itself) on this rank, read and written in float32."""

    owner: Tensor

    writes_weight = False
    """True for a master that also writes the parameter."""

    @property
    def storage(self) -> QuantizedStorage | None:
        return None

    @property
    def rounds(self) -> bool:
        """False if every float32 value fits, so that writing needs no random bits."""
        return True

    @property
    def shared(self) -> Mapping[str, tuple[dist.ProcessGroup, ...]]:
        """Components with blocks that several ranks share, and the process groups of these ranks."""
        return {}

    @abstractmethod
    def tensors(self, name: str) -> dict[str, Tensor]:
        """Return the live tensors under their keys in the optimizer's state dict."""

    @abstractmethod
    def live(self) -> list[Tensor]:
        """Return every local tensor that `write` changes."""

    @abstractmethod
    def for_kernels(self) -> StoredTensor | None:
        """Return the tensors as multi-tensor kernels read them, or None if their layout is not supported."""

    @abstractmethod
    def read(self) -> Tensor:
        """Return the local values in float32."""

    def adopt(self) -> None:
        """Copy the elements that others changed in a plain parameter into this master, if changes can be detected."""
        return

    def measure(self, values: Tensor, reduction: FlatMax) -> Requantization | None:
        """Register the reductions that writing `values` needs, and return them for `write`."""
        return None

    @abstractmethod
    def write(self, values: Tensor, requantization: Requantization | None, draw: Draw = None) -> None:
        """Write the local values. `requantization`: result of `measure`."""

    def seed(self, values: Tensor) -> None:
        """Set this master from local float32 values, rounded to nearest. A collective call if ranks share blocks."""
        assign(self, values)


class FloatState(OptimizerState):
    """A state in float32, bfloat16 or float16, or an unquantized parameter. `nonnegative`: see `StateSpec`."""

    def __init__(self, owner: Tensor, tensor: Tensor, nonnegative: bool = False) -> None:
        self.owner, self.tensor, self.nonnegative = owner, tensor, nonnegative
        self.is_stack = owner.ndim == 3 and components.quantized_local(owner) is not None

    @property
    def local(self) -> Tensor:
        local = private_torch.local_tensor(self.tensor)
        return local.flatten(0, 1) if self.is_stack else local

    @property
    def rounds(self) -> bool:
        return torch.finfo(self.local.dtype).eps > torch.finfo(torch.float32).eps

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

    def write(self, values: Tensor, requantization: Requantization | None, draw: Draw = None) -> None:
        limits = torch.finfo(self.local.dtype)
        new = round_to(values, self.local.dtype, None if draw is None else draw())
        if self.nonnegative and self.rounds:
            new.masked_fill_((new == 0) & (values > 0), limits.smallest_normal * limits.eps)
        self.local.copy_(new)


class QuantizedState(OptimizerState):
    """A state in the components of a format row, in blocks of the global tensor. `nonnegative`: see `StateSpec`."""

    def __init__(self, param: Tensor, spec: QuantSpec, nonnegative: bool = False) -> None:
        self.owner, self.nonnegative = param, nonnegative
        device = private_torch.local_tensor(param).device
        self._storage = storages.empty(spec, components.shard_of(param), device).map(torch.zero_)

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
        history = self.storage.state.get(AMAX_HISTORY)
        return [*self.storage.components.values(), *([] if history is None else [history])]

    def for_kernels(self) -> StoredTensor | None:
        storage = self.storage
        fmt, shard, parts = storage.spec.format, storage.shard, storage.components
        packed = fmt.copies[Orientation.ROWWISE].codes.block_shape[1]
        if fmt.matrix_rows % STACK_ROWS or (fmt.matrix_rows and fmt.copies[Orientation.ROWWISE].amax is not None):
            return None
        if shard.origin[1] % packed or not all(part.is_contiguous() for part in parts.values()):
            return None
        history = storage.state.get(AMAX_HISTORY)
        return ScaledTensor(fmt, storage.spec.scaling, shard, parts, history, frozenset(self.shared))

    def read(self) -> Tensor:
        return self.storage.dequantize()

    def measure(self, values: Tensor, reduction: FlatMax) -> Requantization | None:
        return Requantization(self.storage, values, self.shared, reduction)

    def write(self, values: Tensor, requantization: Requantization | None, draw: Draw = None) -> None:
        assert requantization is not None
        requantization.commit(values, None if draw is None else draw())
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

    def write(self, values: Tensor, requantization: Requantization | None, draw: Draw = None) -> None:
        assert requantization is not None
        words = None if draw is None else parameter_state.rounding_words(self.storage.state, self.storage.shard)
        requantization.commit(values, words)
        torch.autograd.graph.increment_version(private_torch.local_tensor(self.owner))


class LowBytesState(OptimizerState):
    """A master stored as the bytes that its parameter lacks. Writing it writes the parameter too."""

    kind: StateKind
    writes_weight = True

    def __init__(self, param: Tensor, *trailing_dims: int) -> None:
        self.owner = param
        self.bytes = components.zeros_like(param, torch.uint8, *trailing_dims)

    @property
    def low(self) -> Tensor:
        local = private_torch.local_tensor(self.bytes)
        return components.as_matrix(local, self.storage) if local.ndim == 3 else local

    def tensors(self, name: str) -> dict[str, Tensor]:
        return {name + REMAINDER_SUFFIX: self.bytes}

    def for_kernels(self) -> StoredTensor | None:
        return PlainTensor(self.low, self.kind) if self.low.is_contiguous() else None


class RemainderState(LowBytesState):
    """The float32 master of a bfloat16 parameter, stored as the 16 bits that the parameter lacks: uint8 [..., 2]."""

    kind = StateKind.REMAINDER
    rounds = False

    def __init__(self, param: Tensor) -> None:
        super().__init__(param, 2)

    @property
    def low(self) -> Tensor:
        return super().low.view(torch.int16).squeeze(-1)

    def live(self) -> list[Tensor]:
        return [private_torch.local_tensor(self.owner), self.low]

    def read(self) -> Tensor:
        return numerics.join_bfloat16(*self.live())

    def write(self, values: Tensor, requantization: Requantization | None, draw: Draw = None) -> None:
        for target, half in zip(self.live(), numerics.split_bfloat16(values), strict=True):
            target.copy_(half)


class SplitState(LowBytesState, QuantizedWeight):
    """The 16-bit master of an FP8 weight, under the weight's scales: the codes plus the low bytes stored here."""

    kind = StateKind.SPLIT

    def live(self) -> list[Tensor]:
        return [*super().live(), self.low]

    def read(self) -> Tensor:
        storage = self.storage
        copy = storage.spec.format.copies[Orientation.ROWWISE]
        return split_codes.dequantize(copy, storage.touched(), self.low, storage.shard.origin)

    def write(self, values: Tensor, requantization: Requantization | None, draw: Draw = None) -> None:
        assert requantization is not None
        remainder = Remainder(self.low, None if draw is None else draw())
        requantization.commit(values, remainder=remainder)
        torch.autograd.graph.increment_version(private_torch.local_tensor(self.owner))

    def seed(self, values: Tensor) -> None:
        storage = self.storage
        copy = storage.spec.format.copies[Orientation.ROWWISE]
        self.low.copy_(split_codes.low_bytes(values, copy, storage.touched(), storage.shard.origin))


def rounded_roles(targets: Mapping[str, OptimizerState]) -> list[str]:
    """Return the roles that are rounded stochastically. A parameter with a master is rounded to nearest."""
    return [role for role, state in targets.items() if state.rounds and not (role == WEIGHT and MASTER in targets)]


def ndim_of_states(param: Tensor) -> int:
    """Return the number of dims of a parameter's states. Those of a quantized stack of matrices are one matrix."""
    return 2 if param.ndim == 3 and components.quantized_local(param) is not None else param.ndim


def make_state(param: Tensor, dtype: torch.dtype, nonnegative: bool = False) -> OptimizerState:
    dtype = stored_dtype(dtype, ndim_of_states(param))
    spec = state_quant_spec(dtype, nonnegative)
    if spec is not None:
        return QuantizedState(param, spec, nonnegative)
    return FloatState(param, components.zeros_like(param, dtype), nonnegative)


def make_weight(param: Tensor) -> OptimizerState:
    return FloatState(param, param) if components.quantized_local(param) is None else QuantizedWeight(param)


def initial_master(param: Tensor) -> Tensor:
    """Return new local float32 values of a master: the initial values if they were kept, otherwise the present ones."""
    local = private_torch.local_tensor(param).detach()
    storage = components.quantized_storage(param)
    if storage is None:
        return local.to(torch.float32, copy=True)
    initial_values = storage.initial_values()
    if initial_values is None:
        return storage.dequantize()
    return initial_values.to(local.device, torch.float32, copy=True)


def make_states(
    param: Tensor, specs: Iterable[StateSpec], dtypes: Mapping[str, torch.dtype], has_master: bool, remainders: bool
) -> dict[str, OptimizerState]:
    """Return a parameter's states by role, zeros; a master if it needs one; and the parameter itself as `WEIGHT`.
    `dtypes`: of each role and of `MASTER`. `remainders`: see `state_storage.splits`."""
    states = {spec.role: make_state(param, dtypes[spec.role], spec.nonnegative) for spec in specs}
    states[WEIGHT] = make_weight(param)
    storage, dtype = states[WEIGHT].storage, dtypes[MASTER]
    if has_master and needs_master(storage is not None, param.dtype, dtype):
        if not (remainders and splits(None if storage is None else storage.spec.format, param.dtype, dtype)):
            states[MASTER] = make_state(param, dtype)
        else:
            states[MASTER] = RemainderState(param) if storage is None else SplitState(param)
        states[MASTER].seed(initial_master(param))
    return states


def make_average(param: Tensor, source: OptimizerState) -> OptimizerState:
    """Allocate the float32 average of a parameter, starting from `source`, its master or the parameter itself."""
    average = make_state(param, torch.float32)
    average.write(source.read(), None)
    return average


def assign(state: OptimizerState, values: Tensor) -> None:
    """Set a state from local float32 values, rounded to nearest. A collective call if ranks share blocks."""
    reduction = FlatMax()
    requantization = state.measure(values, reduction)
    reduction.reduce()
    state.write(values, requantization)
