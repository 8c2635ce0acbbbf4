"""The one place that asks "kernel or oracle?": the operations of `numerics` on whichever runs where the tensors are.

Kernels run on GPUs, if Triton is there; the oracle everywhere else, while a graph is traced, and for what no kernel is
written for: 16-bit codes, random words that are given as a tensor, and float64.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from quantshard import kernels, numerics, private_torch
from quantshard.formats import ALL, Encoding, Format, OrientedCodes, Role, Scaling
from quantshard.kernels.workspace import launch_queue as launch_queue
from quantshard.numerics import Grids, Pair, RandomBits, cross_entropy, quantization_error, swizzling

if kernels.USABLE:
    from quantshard.kernels.fused import cross_entropy as cross_entropy_kernel
    from quantshard.kernels.fused import rounded_sum as sum_kernel
    from quantshard.kernels.optimizer import history as history_kernel
    from quantshard.kernels.optimizer import multi_tensor
    from quantshard.kernels.quantize import amax as amax_kernel
    from quantshard.kernels.quantize import dequantize as dequantize_kernel
    from quantshard.kernels.quantize import error as error_kernel
    from quantshard.kernels.quantize import matrix as quantize_kernel
    from quantshard.kernels.quantize import swizzle as swizzle_kernel
    from quantshard.kernels.quantize import transpose as transpose_kernel
    from quantshard.kernels.quantize import words as words_kernel
    from quantshard.kernels.quantize.targets import QuantizeRequest, QuantizeSpec

RandomWords = Tensor | RandomBits
"""Random words of a rectangle: int64 of its shape, or which they are."""

KERNEL_DEVICES = {"cuda"}
"""Types of the devices whose tensors go to kernels."""

KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def kernels_on(device: torch.device) -> bool:
    """True if kernels run on this device."""
    return kernels.USABLE and device.type in KERNEL_DEVICES


@contextmanager
def kernels_only_on(*types: str) -> Iterator[None]:
    """Within it kernels run on devices of these types alone: to compare them with the oracle, where both could run."""
    global KERNEL_DEVICES
    before, KERNEL_DEVICES = KERNEL_DEVICES, set(types)
    try:
        yield
    finally:
        KERNEL_DEVICES = before


def has_kernels(x: Tensor) -> bool:
    """True if kernels work on this tensor."""
    return kernels.USABLE and x.device.type in KERNEL_DEVICES and not private_torch.is_traced(x)


def has_float_kernels(*tensors: Tensor | None) -> bool:
    """True if kernels that read all of these as floats work on them: on one device; they know no float64."""
    return kernels_read(*tensors) and not private_torch.is_traced(*tensors)


def kernels_read(*tensors: Tensor | None) -> bool:
    """`has_float_kernels` of tensors that may be traced now: whether it will be true of their values."""
    device = None
    for t in tensors:
        if t is None:
            continue
        if t.dtype not in KERNEL_DTYPES or t.device != (device or t.device):
            return False
        device = t.device
    return device is not None and kernels_on(device)


def is_capturing() -> bool:
    """True if a CUDA graph is being captured: what the host counts or reads now would be the same in every replay."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def lacks_kernels(device: torch.device) -> bool:
    """True for a GPU whose tensors the oracle works on, since no kernel can be imported."""
    return device.type in KERNEL_DEVICES and not kernels.USABLE


def random_words(bits: RandomBits, device: torch.device) -> Tensor:
    """`numerics.random_words` of these."""
    return words_kernel.random_words(bits, device) if kernels_on(device) else bits.tensor(device)


def block_amax(x: Tensor, block_shape: Pair, origin: Pair = (0, 0)) -> Tensor:
    """`numerics.block_amax`."""
    if has_kernels(x) and x.dtype in KERNEL_DTYPES:
        return amax_kernel.block_amax(x, block_shape, origin)
    return numerics.block_amax(x, block_shape, origin)


def amaxes(x: Tensor, fmt: Format, origin: Pair = (0, 0)) -> dict[str, Tensor]:
    """`numerics.amaxes`."""
    return {c.name: block_amax(x, c.block_shape, origin) for c in fmt.components if c.role is not Role.CODES}


def quantize_codes(
    x: Tensor, copy: OrientedCodes, encode_scales: Grids, origin: Pair = (0, 0), words: RandomWords | None = None
) -> Tensor:
    """`numerics.quantize_codes`."""
    if not isinstance(words, Tensor) and _has_kernel(x, copy):
        spec = QuantizeSpec(copy, Scaling(), origin, given="multipliers")
        request = QuantizeRequest(spec, encode_scales[copy.scale.name], words=words)
        return quantize_kernel.quantize_matrix(x, request)[0].codes
    drawn = words.tensor(x.device) if isinstance(words, RandomBits) else words
    return numerics.quantize_codes(x, copy, encode_scales, origin, drawn)


def _has_kernel(x: Tensor, copy: OrientedCodes) -> bool:
    return x.dtype in KERNEL_DTYPES and copy.codes.encoding.bits <= 8 and has_kernels(x)


def sees_blocks(x: Tensor, fmt: Format, words: RandomWords | None) -> bool:
    """True if `quantize` works: a kernel then measures and quantizes x in one pass, with each block in one tile."""
    if isinstance(words, Tensor):
        return False
    return all(_has_kernel(x, copy) and ALL not in copy.block for copy in fmt.copies.values())


def quantize(x: Tensor, fmt: Format, scaling: Scaling, words: RandomBits | None = None) -> dict[str, Tensor]:
    """`numerics.quantize` of a whole matrix [R, C] that was transformed already; see `sees_blocks`."""
    parts = {c.name: block_amax(x, c.block_shape) for c in fmt.components if c.role is Role.AMAX}
    scaling = Scaling(scaling.power_of_two, scaling.margin, scaling.epsilon)
    for copy in fmt.copies.values():
        second = None if copy.amax is None else parts[copy.amax.name]
        request = QuantizeRequest(QuantizeSpec(copy, scaling), second_amax=second, words=words)
        found, _ = quantize_kernel.quantize_matrix(x, request)
        assert found.scale is not None
        parts |= {copy.codes.name: found.codes, copy.scale.name: found.scale}
    return parts


def dequantize(
    copy: OrientedCodes,
    parts: Mapping[str, Tensor],
    shape: Pair,
    origin: Pair = (0, 0),
    dtype: torch.dtype = torch.float32,
    nan_flag: Tensor | None = None,
) -> Tensor:
    """`numerics.dequantize`, rounded once to `dtype`; all NaN if `nan_flag` is, a float32 scalar that else is 0."""
    parts = as_stored(copy, parts, shape)
    codes = parts[copy.codes.name]
    if has_kernels(codes) and copy.codes.encoding.bits <= 8:
        return dequantize_kernel.dequantize(copy, parts, shape, origin, dtype, nan_flag)
    values = numerics.dequantize(copy, parts, shape, origin)
    return (values if nan_flag is None else values + nan_flag).to(dtype)


def dequantize_together(
    copy: OrientedCodes, stored: Sequence[tuple[Mapping[str, Tensor], Pair, Pair]], dtype: torch.dtype
) -> Sequence[Tensor]:
    """`dequantize` of several, each by its components, shape and origin."""
    given = [(as_stored(copy, parts, shape), shape, origin) for parts, shape, origin in stored]
    if has_kernels(given[0][0][copy.codes.name]) and copy.codes.encoding.bits <= 8:
        return dequantize_kernel.dequantize_matrices(copy, given, dtype)
    return [numerics.dequantize(copy, *each).to(dtype) for each in given]


def as_stored(copy: OrientedCodes, parts: Mapping[str, Tensor], shape: Pair) -> Mapping[str, Tensor]:
    """Components of a whole matrix that a kernel made for a scaled product (`QuantizeSpec.ready`), as formats store
    them; others as they are."""
    codes, scale = parts[copy.codes.name], parts[copy.scale.name]
    if codes.dtype is copy.codes.encoding.storage:
        return parts
    if scale.ndim == 1:
        grid = [-(size // -cover) for size, cover in zip(shape, copy.block, strict=True)]
        scale = swizzling.unswizzled(scale.view(copy.scale.encoding.storage), (grid[0], grid[1]))
    return {**parts, copy.codes.name: codes.view(copy.codes.encoding.storage), copy.scale.name: scale}


def add_quantization_error(
    sums: Tensor,
    extremes: Tensor,
    x: Tensor,
    copy: OrientedCodes,
    parts: Mapping[str, Tensor],
    origin: Pair = (0, 0),
    hadamard: bool = False,
    partial: bool = False,
) -> None:
    """`quantization_error.add_error_`, to one of several rows [copies, columns] that count together. `hadamard`: x was
    quantized after `numerics.hadamard16`. `partial`: a kernel may look at a part of a large matrix."""
    if _has_kernel(x, copy):
        error_kernel.add_error(sums, extremes, x, copy, parts, origin, hadamard, partial)
    else:
        x = numerics.hadamard16(x) if hadamard else x
        quantization_error.add_error_(sums[0], extremes[0], x, copy, parts, origin)


def add_values(sums: Tensor, extremes: Tensor, x: Tensor) -> None:
    """`quantization_error.add_values_`, to one of several rows [copies, columns] that count together."""
    if has_float_kernels(x):
        error_kernel.add_values(sums, extremes, x)
    else:
        quantization_error.add_values_(sums[0], extremes[0], x)


def cross_entropies(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """`cross_entropy.cross_entropies`."""
    where = cross_entropy_kernel if has_float_kernels(logits) else cross_entropy
    return where.cross_entropies(logits, targets)


def logits_gradient(
    logits: Tensor, targets: Tensor, log_z: Tensor, factors: Tensor, of_entropy: Tensor, out: Tensor | None = None
) -> Tensor:
    """`cross_entropy.logits_gradient`."""
    where = cross_entropy_kernel if has_float_kernels(logits) else cross_entropy
    return where.logits_gradient(logits, targets, log_z, factors, of_entropy, out)


def transpose_codes(codes: Tensor, encoding: Encoding, cols: int) -> Tensor:
    """Codes of a matrix [R, `cols`] as stored -> those of its transpose."""
    if encoding.bits == 8:
        return by_columns([(codes, None, None)], torch.uint8)[0][0].t()
    return numerics.pack(numerics.unpack(codes, encoding, cols).t().contiguous(), encoding)


def by_columns(
    matrices: Sequence[tuple[Tensor, Tensor | None, Tensor | None]], dtype: torch.dtype
) -> list[tuple[Tensor, Tensor | None]]:
    """Codes of 8 bits [R, C] of several matrices, laid out by columns, as a dtype of 8 bits.

    Scales of 128 x 128, if they are given, are laid out so too, plus a float32 scalar, if that is given, and filled up
    with rows of zeros to a multiple of 4.
    """
    if has_kernels(matrices[0][0]):
        return transpose_kernel.by_columns(matrices, dtype)
    found = []
    for codes, scales, nan_flag in matrices:
        laid = None
        if scales is not None:
            turned = scales.t() if nan_flag is None else scales.t() + nan_flag
            laid = torch.nn.functional.pad(turned, (0, -turned.shape[1] % 4)).contiguous().t()
        found.append((codes.t().contiguous().view(dtype).t(), laid))
    return found


StoredMatrix = tuple[Pair, Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]
"""Shape [R, C], codes and scales of one copy, uint8, and the amax that these are under, if there is one. A float32
scalar: all of it becomes NaN if that is; and swizzled scales E8M0 of R rows that become NaN then, too."""
SwizzledMatrix = tuple[Tensor | None, Tensor, Tensor | None]
"""Codes of the transpose [C, R], if it is asked for, flat scales, and the second scale, if there is one; of PyTorch's
dtypes."""


def swizzle(copy: OrientedCodes, matrices: Sequence[StoredMatrix], turned: bool) -> Sequence[SwizzledMatrix]:
    """Matrices, or their transposes, as scaled products read them: a scale of 8 bits for every row, `swizzled`."""
    if has_kernels(matrices[0][1]):
        return swizzle_kernel.SwizzleRequest(copy, matrices, turned).finish()
    return [_swizzle(copy, *each, turned) for each in matrices]


def _swizzle(
    copy: OrientedCodes, shape: Pair, codes: Tensor, scales: Tensor, amax: Tensor | None, nan_flag: Tensor | None,
    other: Tensor | None, turned: bool,
) -> SwizzledMatrix:  # fmt: skip
    high, encoding = copy.block[0], copy.codes.encoding
    made, second = None, None if amax is None else amax * (1.0 / (encoding.max * copy.scale.encoding.max))
    if nan_flag is not None and other is not None and nan_flag.isnan():
        other.view(torch.uint8).view(-(shape[0] // -128), -1)[:, :512:4] = 0xFF  # the first block of each row
    if turned:
        made = transpose_codes(codes, encoding, shape[1]).view(encoding.multiplied)
        scales, shape, high = scales.t(), shape[::-1], copy.block[1]
    grid = scales.repeat_interleave(high, 0)[: shape[0]]
    if nan_flag is not None and second is not None:
        second = second + nan_flag
    elif nan_flag is not None:
        grid = torch.where(nan_flag.isnan(), 0xFF, grid)
    return made, swizzling.swizzled(grid).view(copy.scale.encoding.multiplied), second


def rounded_sum(parts: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """The sum of tensors of one shape and dtype, taken in float32 (or wider, as they are) in their order, rounded once.

    The first may be overwritten.
    """
    if dtype in KERNEL_DTYPES and has_float_kernels(*parts):
        return sum_kernel.rounded_sum(parts, dtype)
    total = parts[0].to(torch.promote_types(parts[0].dtype, torch.float32))
    for part in parts[1:]:
        total = total.add_(part)
    return total.to(dtype)


def exceeding(tensors: Sequence[Tensor], largest: float) -> Tensor:
    """`numerics.exceeds` of each of some tensors: float32 [tensors], on the device of the first."""
    devices = {x.device for x in tensors}
    if len(devices) == 1 and all(has_kernels(x) and x.dtype in KERNEL_DTYPES for x in tensors):
        return multi_tensor.exceeding(tensors, largest)
    return torch.stack([numerics.exceeds(x, largest).to(tensors[0].device) for x in tensors])


def record_amaxes(histories: Sequence[Tensor], amaxes: Tensor) -> bool:
    """Append amaxes [n] to n histories by a kernel; False, and nothing done, where none runs."""
    if not has_kernels(amaxes) or not _lie_on(histories, amaxes.device):
        return False
    history_kernel.record(histories, amaxes.contiguous())
    return True


def past_amaxes(histories: Sequence[Tensor], most_recent: bool, stride: int = 1) -> Tensor | None:
    """`delayed_scaling.history_amaxes` by a kernel; None where none runs."""
    device = histories[0].device
    if not has_kernels(histories[0]) or not _lie_on(histories, device):
        return None
    return history_kernel.pasts(histories, most_recent, stride)


def _lie_on(histories: Sequence[Tensor], device: torch.device) -> bool:
    places = set(map(Tensor.get_device, histories))  # maps: an expert's history is one of hundreds
    return places == {histories[0].get_device()} and histories[0].device == device and _are_contiguous(histories)


def _are_contiguous(tensors: Sequence[Tensor]) -> bool:
    return all(map(Tensor.is_contiguous, tensors))
