"""Rounding float32 to 16 bits: stochastically, with words of the global element, or to nearest.

What does not fit is rounded up or down in proportion to the distance, so that small updates add up as they should on
average; to nearest they would vanish, every one of them. The random words belong to the element of the global tensor
and to the step, so the bits are those of any other mesh.
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
    """Where a local tensor lies in the global one: the global shape, the index of its first element, its own shape."""

    global_shape: tuple[int, ...]
    origin: tuple[int, ...]
    shape: tuple[int, ...]

    @staticmethod
    def of(param: Tensor) -> TensorRegion:
        """The place of the local part of a plain parameter."""
        shape = tuple(private_torch.local_tensor(param).shape)
        return TensorRegion(tuple(param.shape), private_torch.global_offset(param), shape)

    @staticmethod
    def of_local(param: Tensor) -> TensorRegion:
        """The place of the local part of any parameter, quantized or not."""
        quantized = components.quantized_local(param)
        return TensorRegion.of(param) if quantized is None else TensorRegion.of_shard(quantized.quantized_storage.shard)

    @staticmethod
    def of_shard(shard: Shard) -> TensorRegion:
        """The place of a rectangle."""
        return TensorRegion(shard.global_shape, shard.origin, shard.shape)


class StateDraw(NamedTuple):
    """Names the random words of one state in one step: the optimizer's seed, the step and the number of the state.

    `swapped`: the 16 highest and lowest bits of each word change places. So two states can share a stream: what decides
    are the highest bits.
    """

    seed: int
    step: int | Tensor
    stream: int
    swapped: bool = False

    def words(self, place: TensorRegion, device: torch.device) -> Tensor:
        """Int64 in [0, 2**32), of the place's shape: one for each element of the global tensor, in row-major order."""
        words = self._words(place, device)
        return numerics.swap_halves(words) if self.swapped else words

    def _words(self, place: TensorRegion, device: torch.device) -> Tensor:
        if len(place.shape) == 2:
            return self._rectangle(place.global_shape, place.origin, place.shape, device)  # type: ignore[arg-type]
        rows, first = (place.shape[0], place.origin[0]) if place.shape else (1, 0)
        rest = place.global_shape[1:]
        whole = (place.global_shape[0] if place.shape else 1, math.prod(rest))
        words = self._rectangle(whole, (first, 0), (rows, whole[1]), device)
        words = words.view(rows, *rest) if place.shape else words.view(())
        for dim in range(1, len(place.shape)):
            words = words.narrow(dim, place.origin[dim], place.shape[dim])
        return words

    def _rectangle(self, whole: Pair, origin: Pair, shape: Pair, device: torch.device) -> Tensor:
        bits = RandomBits(self.seed, self.step, self.stream, whole, origin, shape)
        return kernel_dispatch.random_words(bits, device)


def adopt(master: Tensor, param: Tensor, written: Tensor) -> None:
    """Give a float32 master the elements of its parameter that others changed: all that are not as they were `written`,
    which is the master as the optimizer rounds it.
    """
    master.copy_(torch.where(param == written, master, param.to(master.dtype)))


def round_to(values: Tensor, dtype: torch.dtype, words: Tensor | None) -> Tensor:
    """Float32 -> `dtype`, stochastically if there are words, else to nearest (as `numerics.split_bfloat16` does).

    Stochastic rounding saturates at the largest finite value of the dtype. Other dtypes than bfloat16 and float16 are
    cast.
    """
    if dtype is torch.bfloat16:
        return numerics.split_bfloat16(values)[0] if words is None else _stochastic_bfloat16(values, words)
    if dtype is torch.float16 and words is not None:
        return numerics.encode_stochastic(values, FP16, words)
    return values.to(dtype)


def _stochastic_bfloat16(values: Tensor, words: Tensor) -> Tensor:
    """The low 16 bits are the fraction of the way to the next bfloat16: up if they and 16 random bits carry. Exact.

    A NaN stays some NaN: those of GPUs have all bits set, which a step up would turn into a zero.
    """
    bits = values.clamp(-torch.finfo(torch.bfloat16).max, torch.finfo(torch.bfloat16).max).view(torch.int32)
    high = torch.where(values.isnan(), 0x7FC0, (bits + (words >> 16)) >> 16)
    return high.to(torch.int16).view(torch.bfloat16)
