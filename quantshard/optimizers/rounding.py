"""Rounding float32 to 16 bits, stochastically or to nearest.

Stochastic rounding goes up with a probability proportional to the remainder. Small updates then add up correctly on
average; rounding to nearest would lose all of them. The random bits depend on the element's index in the global tensor
and on the step, so results are the same on any mesh.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from quantshard import kernel_dispatch, numerics, private_torch
from quantshard.formats import FP16
from quantshard.numerics import Pair, RandomBits
from quantshard.sharding import Shard
from quantshard.tensor import components


@dataclass(frozen=True)
class TensorRegion:
    """Position of a local tensor in the global one.

    `global_shape`: shape of the global tensor. `origin`: global index of the first local element. `shape`: local shape.
    """

    global_shape: tuple[int, ...]
    origin: tuple[int, ...]
    shape: tuple[int, ...]

    @staticmethod
    def of(param: Tensor) -> TensorRegion:
        """Return the region of a plain parameter's local shard."""
        shape = tuple(private_torch.local_tensor(param).shape)
        return TensorRegion(tuple(param.shape), private_torch.global_offset(param), shape)

    @staticmethod
    def of_local(param: Tensor) -> TensorRegion:
        """Return the region of any parameter's local shard, quantized or not."""
        quantized = components.quantized_local(param)
        return TensorRegion.of(param) if quantized is None else TensorRegion.of_shard(quantized.quantized_storage.shard)

    @staticmethod
    def of_shard(shard: Shard) -> TensorRegion:
        """Return the region of a `Shard`."""
        return TensorRegion(shard.global_shape, shard.origin, shard.shape)


class StateDraw(NamedTuple):
    """Identifies the random bits of one state in one step: the optimizer's seed, the step, and the stream number of the
    state.

    `swapped`: swap the high and low 16 bits of each word. Rounding uses the high bits, so two states can share one
    stream.
    """

    seed: int
    step: int | Tensor
    stream: int
    swapped: bool = False

    def words(self, place: TensorRegion, device: torch.device) -> Tensor:
        """Return int64 in [0, 2**32), of the region's shape: one word per element, in row-major order of the global
        tensor."""
        words = self._words(place, device)
        return numerics.swap_halves(words) if self.swapped else words

    def _words(self, place: TensorRegion, device: torch.device) -> Tensor:
        if len(place.shape) == 2:
            return self._rectangle(place.global_shape, place.origin, place.shape, device)  # type: ignore[arg-type]
        rows, first_row = (place.shape[0], place.origin[0]) if place.shape else (1, 0)
        trailing_dims = place.global_shape[1:]
        matrix_shape = (place.global_shape[0] if place.shape else 1, math.prod(trailing_dims))
        words = self._rectangle(matrix_shape, (first_row, 0), (rows, matrix_shape[1]), device)
        words = words.view(rows, *trailing_dims) if place.shape else words.view(())
        for dim in range(1, len(place.shape)):
            words = words.narrow(dim, place.origin[dim], place.shape[dim])
        return words

    def _rectangle(self, whole: Pair, origin: Pair, shape: Pair, device: torch.device) -> Tensor:
        bits = RandomBits(self.seed, self.step, self.stream, whole, origin, shape)
        return kernel_dispatch.random_words(bits, device)


def adopt(master: Tensor, param: Tensor, written: Tensor) -> None:
    """Copy elements of a plain parameter that others changed into its float32 master.

    `written`: the master rounded to the parameter's dtype. Elements that differ from it were changed.
    """
    master.copy_(torch.where(param == written, master, param.to(master.dtype)))


def round_to(values: Tensor, dtype: torch.dtype, words: Tensor | None) -> Tensor:
    """Round float32 to `dtype`: stochastically if `words` are given, otherwise to nearest (as `numerics.split_bfloat16`
    does).

    Stochastic rounding saturates at the largest finite value. Dtypes other than bfloat16 and float16 are cast.
    """
    if dtype is torch.bfloat16:
        return numerics.split_bfloat16(values)[0] if words is None else _stochastic_bfloat16(values, words)
    if dtype is torch.float16 and words is not None:
        return numerics.encode_stochastic(values, FP16, words)
    return values.to(dtype)


def _stochastic_bfloat16(values: Tensor, words: Tensor) -> Tensor:
    """Add 16 random bits to the low 16 bits, which are the fraction of the way to the next bfloat16; a carry rounds up.
    Exact.

    NaN becomes one fixed NaN: a GPU's NaN has all bits set, and a carry would turn it into zero.
    """
    bits = values.clamp(-torch.finfo(torch.bfloat16).max, torch.finfo(torch.bfloat16).max).view(torch.int32)
    high = torch.where(values.isnan(), 0x7FC0, (bits + (words >> 16)) >> 16)
    return high.to(torch.int16).view(torch.bfloat16)
