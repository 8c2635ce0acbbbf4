"""Small kernels over many tensors at once: amaxes, scales from amaxes, and histories of delayed scaling.

    amax[n] = max |x_n|,  NaN if x_n has one
    history = history[1:] + [amax]         if 0 < amax < infinity, else unchanged
    past    = max(history)                 or the newest amax

Each kernel reads a table on the device, int64, with a row of addresses for each tensor. The oracles of histories are
`delayed_scaling.record_amaxes_` and `delayed_scaling.history_amaxes`.
"""

from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from quantshard.kernels import scale_rule as sr
from quantshard.kernels.launch import launch_kernel
from quantshard.kernels.workspace import device_table, lasting_table

TYPES: Final = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
"""Dtypes that kernels can read from an address."""

TILE: Final = 8192
TILES_PER_PROGRAM: Final = 4


@lru_cache(maxsize=32)  # depends only on sizes, so all steps share it
def entry_of_program(programs: tuple[int, ...], device: torch.device) -> Tensor:
    """Return the entry that each program works on, int32; `programs`: number of programs of each entry."""
    counts = torch.tensor(programs, dtype=torch.int64, device="cpu")
    return torch.repeat_interleave(torch.arange(len(programs), dtype=torch.int32, device="cpu"), counts).to(device)


@triton.jit
def tensor_amax_kernel(
    table, entries, addresses, out, limit, STRIDE: tl.constexpr, DTYPE: tl.constexpr, CODE: tl.constexpr,
    SIZE: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """Raise out [tensors] to the bits of the amax or, with a limit, to 1.0 if the amax exceeds it, 2.0 if not finite.

    `addresses`: int64 [tensors, STRIDE], code of a dtype and address. Only tensors with code CODE count.
    """
    row = table + tl.load(entries + tl.program_id(0)) * 3
    number = tl.load(row)
    address_row = addresses + number * STRIDE
    if tl.load(address_row) != CODE:
        return
    address = tl.load(address_row + 1)
    numel = tl.load(row + 1)
    start = (tl.program_id(0) - tl.load(row + 2)) * (SIZE * TILES)
    index = tl.arange(0, SIZE)
    top = tl.zeros((SIZE,), tl.int32)  # bits, in which NaN is largest
    if (start + SIZE * TILES <= numel) & (address % 16 == 0):  # unmasked loads read 16 bytes at once
        x = tl.multiple_of(address.to(tl.pointer_type(DTYPE)), 16)
        for tile in tl.static_range(TILES):
            values = tl.load(x + start + tile * SIZE + index).to(tl.float32)
            top = tl.maximum(top, tl.abs(values).to(tl.int32, bitcast=True))
    else:
        x = address.to(tl.pointer_type(DTYPE))
        for tile in range(TILES):
            rest = numel - start - tile * SIZE
            values = tl.load(x + start + tile * SIZE + index, mask=index < rest, other=0.0).to(tl.float32)
            top = tl.maximum(top, tl.abs(values).to(tl.int32, bitcast=True))
    amax = tl.max(top, 0)
    if limit is None:
        tl.atomic_max(out.to(tl.pointer_type(tl.int32)) + number, amax, sem="relaxed")
    elif amax > limit:  # both are bits: 2.0 for infinity and NaN, else 1.0
        beyond = tl.where(amax >= 0x7F800000, 0x40000000, 0x3F800000)
        tl.atomic_max(out.to(tl.pointer_type(tl.int32)) + number, beyond, sem="relaxed")


class TensorReader:
    """Amaxes of tensors of fixed sizes on one device: planned once, launched with a table of their addresses.

    `stride`: columns of that table, int64 [tensors, stride], which starts with the code of a dtype (its index in
    `TYPES` plus one; 0 means no tensor) and an address.
    """

    def __init__(self, numels: Sequence[int], stride: int, device: torch.device) -> None:
        self.stride, self.device, self.count = stride, device, len(numels)
        programs = tuple(-(numel // -(TILE * TILES_PER_PROGRAM)) for numel in numels)
        firsts = (0, *accumulate(programs))
        self._programs = firsts[-1]
        self._table = device_table([(n, *row) for n, row in enumerate(zip(numels, firsts, strict=False))], device)
        self._entries = entry_of_program(programs, device)

    def exceeding(self, addresses: Tensor, codes: Iterable[int], largest: float | None) -> Tensor:
        """Return `numerics.exceeds` of each tensor, float32 [tensors], or their amaxes if `largest` is None."""
        out = torch.zeros(self.count, dtype=torch.float32, device=self.device)
        for code in sorted(set(codes) - {0} if self._programs else ()):
            dtype = tuple(TYPES)[code - 1]
            limit = None if largest is None else _bits_of_limit(largest, dtype)
            launch_kernel(
                tensor_amax_kernel, (self._programs,), self.device,
                self._table, self._entries, addresses, out, limit, self.stride, TYPES[dtype], code, TILE,
                TILES_PER_PROGRAM, num_warps=8,
            )  # fmt: skip
        return out


@lru_cache
def _bits_of_limit(largest: float, dtype: torch.dtype) -> int:
    """Bits of the limit, rounded to that dtype, as float32; bits of positive numbers sort like the numbers."""
    limit = torch.tensor(min(largest, torch.finfo(dtype).max), dtype=dtype, device="cpu")
    return int(limit.float().view(torch.int32))


def exceeding(tensors: Sequence[Tensor], largest: float | None) -> Tensor:
    """Return `numerics.exceeds` of each tensor, float32, or (`largest` is None) amaxes: 0 if empty; NaN wins."""
    device = tensors[0].device if tensors else torch.device("cpu")
    inputs = [tensor.contiguous() for tensor in tensors]
    codes = [tuple(TYPES).index(tensor.dtype) + 1 for tensor in inputs]
    addresses = device_table(list(zip(codes, [tensor.data_ptr() for tensor in inputs], strict=True)), device)
    return TensorReader([tensor.numel() for tensor in inputs], 2, device).exceeding(addresses, codes, largest)


@triton.jit
def tensor_scales_kernel(table, gradients, skip, STRIDE: tl.constexpr, SIZE: tl.constexpr, RULE: tl.constexpr):
    """Store the scales of amax grids, and the amax of the whole tensor if the format has a second scale.

    `table` columns: parameter, amax grid, scale, number of scales, new and stored amax of the whole tensor.
    """
    if skip is not None:
        if tl.load(skip) != 0:
            return
    row = table + tl.program_id(0) * 6
    if tl.load(gradients + tl.load(row) * STRIDE) == 0:
        return
    amax = tl.load(row + 1).to(tl.pointer_type(tl.float32))
    numel = tl.load(row + 3)
    second = 0.0
    if RULE.kind == 2:
        second = tl.load(tl.load(row + 4).to(tl.pointer_type(tl.float32)))
        if tl.program_id(1) == 0:
            tl.store(tl.load(row + 5).to(tl.pointer_type(tl.float32)), second)
    dtype: tl.constexpr = tl.float32 if RULE.kind == 0 else tl.uint8
    scale = tl.load(row + 2).to(tl.pointer_type(dtype))
    start = tl.program_id(1).to(tl.int64) * SIZE
    while start < numel:
        index = start + tl.arange(0, SIZE)
        stored_scale, _ = sr.scales(tl.load(amax + index, mask=index < numel, other=0.0), second, RULE)
        tl.store(scale + index, stored_scale, mask=index < numel)
        start += tl.num_programs(1) * SIZE


@triton.jit
def push_amax(history, length, amax, LENGTH: tl.constexpr):
    """Shift a history by one and append the amax, if it is positive and finite. LENGTH: a power of two >= length."""
    index = tl.arange(0, LENGTH)
    rolled = tl.load(history + index + 1, mask=index < length - 1, other=0.0)
    rolled = tl.where(index == length - 1, amax, rolled)
    tl.debug_barrier()  # all threads read before any writes
    recorded = tl.where((amax > 0) & (amax < float("inf")), length, 0)
    tl.store(history + index, rolled, mask=index < recorded)


@triton.jit
def history_of(table):
    row = table + tl.program_id(0)
    return tl.load(row).to(tl.pointer_type(tl.float32)), tl.load(row + tl.num_programs(0))


@triton.jit
def record_kernel(table, amaxes_ptr, LENGTH: tl.constexpr):
    history, length = history_of(table)
    push_amax(history, length, tl.load(amaxes_ptr + tl.program_id(0)), LENGTH)


@triton.jit
def past(history, length, MOST_RECENT: tl.constexpr, LENGTH: tl.constexpr):
    """`delayed_scaling.history_amax` of a history. LENGTH: a power of two >= length."""
    if MOST_RECENT:
        return tl.load(history + length - 1)
    else:
        index = tl.arange(0, LENGTH)
        recorded = tl.load(history + index, mask=index < length, other=0.0)
        return tl.max(recorded.to(tl.int32, bitcast=True), 0).to(tl.float32, bitcast=True)


@triton.jit
def past_kernel(table, amaxes_ptr, STRIDE: tl.constexpr, MOST_RECENT: tl.constexpr, LENGTH: tl.constexpr):
    history, length = history_of(table)
    tl.store(amaxes_ptr + tl.program_id(0) * STRIDE, past(history, length, MOST_RECENT, LENGTH))


def record_amaxes(histories: Sequence[Tensor], amaxes: Tensor) -> None:
    """Append amaxes [n], float32, to n different histories: float32, contiguous, on the device of the amaxes."""
    table, longest = _history_rows(histories, amaxes.device)
    launch_kernel(record_kernel, (len(histories),), amaxes.device, table, amaxes, longest, num_warps=4)


def past_amaxes(histories: Sequence[Tensor], most_recent: bool, stride: int = 1) -> Tensor:
    """Return the amax that each of n histories stands for, float32 [n], with this stride between results."""
    table, longest = _history_rows(histories, histories[0].device)
    amaxes = torch.empty(len(histories), stride, dtype=torch.float32, device=histories[0].device)
    launch_kernel(
        past_kernel, (len(histories),), amaxes.device, table, amaxes, stride, most_recent, longest, num_warps=1
    )
    return amaxes[:, 0]


def _history_rows(histories: Sequence[Tensor], device: torch.device) -> tuple[Tensor, int]:
    """Addresses and lengths, int64 [2, n] on the device, and a power of two >= all lengths."""
    # map, because experts have hundreds of histories
    rows = tuple(map(Tensor.data_ptr, histories)), tuple(map(Tensor.numel, histories))
    return lasting_table(rows, device).tensor(), triton.next_power_of_2(max(rows[1]))


@triton.jit
def tensor_past_kernel(table, MOST_RECENT: tl.constexpr, LENGTH: tl.constexpr):
    """Before a step, write the amax that each history stands for; 0 if the history is empty.

    `table` columns: parameter, history, its length, amax to use, new amax, redo flag.
    """
    row = table + tl.program_id(0) * 6
    history = tl.load(row + 1).to(tl.pointer_type(tl.float32))
    amax = past(history, tl.load(row + 2), MOST_RECENT, LENGTH)
    tl.store(tl.load(row + 3).to(tl.pointer_type(tl.float32)), amax)


@triton.jit
def tensor_record_kernel(table, gradients, skip, STRIDE: tl.constexpr, MOST_RECENT: tl.constexpr, LENGTH: tl.constexpr):
    """After the reduction of amaxes, write the amax to use, whether it is the new one, and the new history.

    See `requantize.Requantization.commit` and `delayed_scaling.record_amax_`. `table`: as in `tensor_past_kernel`.
    """
    if skip is not None:
        if tl.load(skip) != 0:
            return
    row = table + tl.program_id(0) * 6
    if tl.load(gradients + tl.load(row) * STRIDE) == 0:
        return
    history = tl.load(row + 1).to(tl.pointer_type(tl.float32))
    length = tl.load(row + 2)
    past_amax = past(history, length, MOST_RECENT, LENGTH)
    amax = tl.load(tl.load(row + 4).to(tl.pointer_type(tl.float32)))
    used_amax = tl.where(amax < float("inf"), tl.maximum(past_amax, amax), past_amax)  # NaN: the past amax
    tl.store(tl.load(row + 3).to(tl.pointer_type(tl.float32)), used_amax)
    tl.store(tl.load(row + 5).to(tl.pointer_type(tl.float32)), tl.where(used_amax > past_amax, 1.0, 0.0))
    push_amax(history, length, amax, LENGTH)


@triton.jit
def corrections_kernel(
    steps, rates, decays, corrected, groups, settings, GROUP: tl.constexpr, SETTINGS: tl.constexpr,
    CORRECTION: tl.constexpr, RATIO: tl.constexpr, MOST: tl.constexpr, SHARE: tl.constexpr, KEPT: tl.constexpr,
):  # fmt: skip
    """Write into a step's table, per group: step, lr, the factor of weight decay, and what follows from betas and step.

    `steps`: int64 [groups]. `rates`: float32 [groups, 2], lr and that factor. `decays`: float64 [groups, 3], both betas
    and the decay of averages. `corrected`: int64 [groups], bias correction flags.
    """
    group = tl.program_id(0)
    step = tl.load(steps + group)
    tl.store(groups + group * GROUP + 1, step)
    tl.store(settings + group * SETTINGS, tl.load(rates + group * 2))
    tl.store(settings + group * SETTINGS + KEPT, tl.load(rates + group * 2 + 1))
    for index in tl.static_range(3):
        decay = tl.load(decays + group * 3 + index)
        base = decay
        power = base * 0.0 + 1.0
        for bit in tl.static_range(32):
            power = tl.where(((step >> bit) & 1) != 0, power * base, power)
            base = base * base
        if index == 2:
            tl.store(settings + group * SETTINGS + SHARE, ((1.0 - decay) / (1.0 - power)).to(tl.float32))
        else:
            correction = tl.where(tl.load(corrected + group) != 0, (1.0 / (1.0 - power)).to(tl.float32), 1.0)
            tl.store(settings + group * SETTINGS + CORRECTION + index, correction)
            if index == 0:
                most = 2.0 * tl.load(settings + group * SETTINGS + RATIO) * correction
            else:
                tl.store(settings + group * SETTINGS + MOST, tl.div_rn(most, tl.sqrt_rn(correction)))
