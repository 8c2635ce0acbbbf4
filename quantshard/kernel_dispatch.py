"""The one place that chooses between kernel and oracle: the operations of `numerics`, on either implementation.

Kernels run on GPUs if Triton is installed. The oracle runs everywhere else, while a graph is traced, and for inputs
that no kernel handles: 16-bit codes, random words passed as a tensor, and float64.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from quantshard import kernels, numerics, private_torch
from quantshard.formats import ALL, Encoding, Format, OrientedCodes, Role, Scaling
from quantshard.numerics import Grids, Pair, RandomBits, cross_entropy, gemm_layouts, quantization_error
from quantshard.numerics.gemm_layouts import StoredMatrix as StoredMatrix, SwizzledMatrix as SwizzledMatrix

if kernels.USABLE:
    from quantshard.kernels.fused import cross_entropy as cross_entropy_kernel, rounded_sum as sum_kernel
    from quantshard.kernels.optimizer import multi_tensor
    from quantshard.kernels.quantize import (
        amax as amax_kernel,
        dequantize as dequantize_kernel,
        error as error_kernel,
        matrix as quantize_kernel,
        random_words as words_kernel,
        swizzle as swizzle_kernel,
        transpose as transpose_kernel,
    )
    from quantshard.kernels.quantize.targets import QuantizeRequest, QuantizeSpec

RandomWords = Tensor | RandomBits
"""Random words of a rectangle: an int64 tensor of its shape, or the arguments that generate it."""

KERNEL_DEVICES = {"cuda"}
"""Device types on which kernels process tensors."""

KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def kernels_on(device: torch.device) -> bool:
    """True if kernels run on this device."""
    return kernels.USABLE and device.type in KERNEL_DEVICES


@contextmanager
def kernels_only_on(*types: str) -> Iterator[None]:
    """Within this context, run kernels only on devices of these types, to compare kernels with the oracle."""
    global KERNEL_DEVICES
    previous, KERNEL_DEVICES = KERNEL_DEVICES, set(types)
    try:
        yield
    finally:
        KERNEL_DEVICES = previous


def has_kernels(x: Tensor) -> bool:
    """True if kernels process this tensor."""
    return kernels_on(x.device) and (kernels.tracing.on or not private_torch.is_traced(x))


def rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x.to(dtype), also in a compiled graph, where Inductor would not round between operations that it fuses."""
    result: Tensor = torch.ops.quantshard.rounded(x, dtype) if kernels.tracing.on else x.to(dtype)
    return result


def has_float_kernels(*tensors: Tensor | None) -> bool:
    """True if float kernels process all of these tensors: they are on one device and none is float64."""
    return kernels_read(*tensors) and (kernels.tracing.on or not private_torch.is_traced(*tensors))


def kernels_read(*tensors: Tensor | None) -> bool:
    """Like `has_float_kernels`, but ignore tracing: predict the answer for the values that will be computed."""
    device = None
    for t in tensors:  # a loop is faster than comprehensions, and each layer calls this
        if t is None:
            continue
        if t.dtype not in KERNEL_DTYPES or t.device != (device or t.device):
            return False
        device = t.device
    return device is not None and kernels_on(device)


def is_capturing() -> bool:
    """True if a CUDA graph is being captured. Anything the host counts or reads now is frozen for every replay."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def random_words(bits: RandomBits, device: torch.device) -> Tensor:
    """Generate `numerics.random_words` with these arguments."""
    return words_kernel.random_words(bits, device) if kernels_on(device) else bits.tensor(device)


def block_amax(x: Tensor, block_shape: Pair, origin: Pair = (0, 0)) -> Tensor:
    """`numerics.block_amax`."""
    if has_kernels(x) and x.dtype in KERNEL_DTYPES:
        rows, cols = block_shape
        if cols == ALL and rows not in (1, ALL):  # the matrices of a stack
            return amax_kernel.block_amax(x, (1, ALL)).view(len(x) // rows, rows, 1).amax(1)
        return amax_kernel.block_amax(x, block_shape, origin)
    return numerics.block_amax(x, block_shape, origin)


def amaxes(x: Tensor, fmt: Format, origin: Pair = (0, 0)) -> dict[str, Tensor]:
    """`numerics.amaxes`."""
    return {c.name: block_amax(x, c.block_shape, origin) for c in fmt.components if c.role is not Role.CODES}


def quantize_codes(
    x: Tensor, copy: OrientedCodes, multipliers: Grids, origin: Pair = (0, 0), words: RandomWords | None = None
) -> Tensor:
    """`numerics.quantize_codes`."""
    if not isinstance(words, Tensor) and _has_kernel(x, copy):
        if copy.scale.block_shape[1] == ALL:
            copy, multipliers = _by_rows(copy, multipliers)
        spec = QuantizeSpec(copy, Scaling(), origin, given="multipliers")
        request = QuantizeRequest(spec, multipliers[copy.scale.name], words=words)
        return quantize_kernel.quantize_matrix(x, request)[0].codes
    word_tensor = words.tensor(x.device) if isinstance(words, RandomBits) else words
    return numerics.quantize_codes(x, copy, multipliers, origin, word_tensor)


def quantizes(x: Tensor, fmt: Format) -> bool:
    """True if `quantize` can quantize x."""
    return x.numel() > 0 and all(_has_kernel(x, copy) for copy in fmt.copies.values())


def quantize(
    x: Tensor, fmt: Format, scaling: Scaling, words: RandomBits | None = None, amax: Tensor | None = None
) -> dict[str, Tensor]:
    """Quantize a whole matrix [R, C] by kernels, like `numerics.quantize` after any Hadamard transform.

    The kernels also compute the scales: PyTorch's arithmetic could have other bits in a compiled graph. `amax`: float32
    scalar to scale by instead of the amax of x, for formats with one scale.
    """
    parts = {c.name: block_amax(x, c.block_shape) for c in fmt.components if c.role is Role.AMAX}
    scaling = Scaling(scaling.power_of_two, scaling.margin, scaling.epsilon)
    for copy in fmt.copies.values():
        second = None if copy.amax is None else parts[copy.amax.name]
        given = None
        if ALL in copy.block:  # a block exceeds the tile of a kernel
            given = block_amax(x, copy.block) if amax is None else amax.view(1, 1)
        spec = QuantizeSpec(copy, scaling, given="" if given is None else "amaxes")
        result, _ = quantize_kernel.quantize_matrix(x, QuantizeRequest(spec, given, second, words))
        assert result.scale is not None
        parts |= {copy.codes.name: result.codes, copy.scale.name: result.scale}
    return parts


def _has_kernel(x: Tensor, copy: OrientedCodes) -> bool:
    return x.dtype in KERNEL_DTYPES and copy.codes.encoding.bits <= 8 and has_kernels(x)


def dequantize(
    copy: OrientedCodes, parts: Mapping[str, Tensor], shape: Pair, origin: Pair = (0, 0),
    dtype: torch.dtype = torch.float32, nan_flag: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """`numerics.dequantize`, rounded once to `dtype`. If `nan_flag` (float32 scalar, 0 or NaN) is NaN, so is all."""
    parts = as_stored(copy, parts, shape)
    codes = parts[copy.codes.name]
    # no kernel dequantizes stacks whose matrices have second scales
    has_kernel = copy.codes.encoding.bits <= 8 and (copy.amax is None or copy.amax.block_shape[0] == ALL)
    if has_kernel and has_kernels(codes):
        if copy.scale.block_shape[1] == ALL:
            copy, parts = _by_rows(copy, parts)
        return dequantize_kernel.dequantize_matrices(copy, [(parts, shape, origin)], dtype, nan_flag)[0]
    values = numerics.dequantize(copy, parts, shape, origin)
    return (values if nan_flag is None else values + nan_flag).to(dtype)


def _by_rows(copy: OrientedCodes, grids: Grids) -> tuple[OrientedCodes, Grids]:
    """Give each row of a stack the scale of its matrix."""
    name, rows = copy.scale.name, copy.scale.block_shape[0]
    if rows in (1, ALL):
        return copy, grids
    return copy.by_rows, {**grids, name: grids[name].repeat_interleave(rows, 0)}


def dequantize_together(
    copy: OrientedCodes, stored: Sequence[tuple[Mapping[str, Tensor], Pair, Pair]], dtype: torch.dtype
) -> Sequence[Tensor]:
    """`dequantize` of several matrices, each given by its components, shape and origin."""
    matrices = [(as_stored(copy, parts, shape), shape, origin) for parts, shape, origin in stored]
    if has_kernels(matrices[0][0][copy.codes.name]) and copy.codes.encoding.bits <= 8:
        return dequantize_kernel.dequantize_matrices(copy, matrices, dtype)
    return [numerics.dequantize(copy, *matrix).to(dtype) for matrix in matrices]


def as_stored(copy: OrientedCodes, parts: Mapping[str, Tensor], shape: Pair) -> Mapping[str, Tensor]:
    """Convert components in the layout of a scaled product (`QuantizeSpec.ready`), if any, to the stored layout."""
    codes, scale = parts[copy.codes.name], parts[copy.scale.name]
    if codes.dtype is copy.codes.encoding.storage:
        return parts
    if scale.ndim == 1:
        grid = [-(size // -cover) for size, cover in zip(shape, copy.block, strict=True)]
        scale = numerics.unswizzled(scale.view(copy.scale.encoding.storage), (grid[0], grid[1]))
    return {**parts, copy.codes.name: codes.view(copy.codes.encoding.storage), copy.scale.name: scale}


def quantization_error_of(x: Tensor, copy: OrientedCodes | None = None) -> Any:
    """The module with the functions of `numerics.quantization_error` for x and its codes: kernels or oracle."""
    has_kernel = has_float_kernels(x) if copy is None else _has_kernel(x, copy)
    return error_kernel if has_kernel else quantization_error


def cross_entropy_of(logits: Tensor) -> Any:
    """The module with the functions of `numerics.cross_entropy` for these logits: with kernels, or the oracle."""
    return cross_entropy_kernel if has_float_kernels(logits) else cross_entropy


def transpose_codes(codes: Tensor, encoding: Encoding, cols: int) -> Tensor:
    """`gemm_layouts.transpose_codes`."""
    if encoding.bits == 8:
        return by_columns([(codes, None, None)], torch.uint8)[0][0].t()
    return gemm_layouts.transpose_codes(codes, encoding, cols)


def by_columns(
    matrices: Sequence[tuple[Tensor, Tensor | None, Tensor | None]], dtype: torch.dtype
) -> list[tuple[Tensor, Tensor | None]]:
    """`gemm_layouts.by_columns`."""
    return (transpose_kernel if has_kernels(matrices[0][0]) else gemm_layouts).by_columns(matrices, dtype)


def swizzle(copy: OrientedCodes, matrices: Sequence[StoredMatrix], turned: bool) -> Sequence[SwizzledMatrix]:
    """`gemm_layouts.swizzle` of several matrices."""
    if has_kernels(matrices[0][1]):
        return swizzle_kernel.SwizzleRequest(copy, matrices, turned).finish()
    return [gemm_layouts.swizzle(copy, matrix, turned) for matrix in matrices]


def rounded_sum(parts: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Sum tensors of one shape and dtype in order, in float32 or float64, rounded once. Can overwrite the first."""
    if dtype in KERNEL_DTYPES and has_float_kernels(*parts):
        return sum_kernel.rounded_sum(parts, dtype)
    total = parts[0].to(torch.promote_types(parts[0].dtype, torch.float32))
    for part in parts[1:]:
        total = total.add_(part)
    return total.to(dtype)


def exceeding(tensors: Sequence[Tensor], largest: float) -> Tensor:
    """Apply `numerics.exceeds` to each tensor: float32 [tensors], on the device of the first."""
    devices = {x.device for x in tensors}
    if len(devices) == 1 and all(has_kernels(x) and x.dtype in KERNEL_DTYPES for x in tensors):
        return multi_tensor.exceeding(tensors, largest)
    return torch.stack([numerics.exceeds(x, largest).to(tensors[0].device) for x in tensors])


def record_amaxes(histories: Sequence[Tensor], amaxes: Tensor) -> bool:
    """Append amaxes [n] to n histories with a kernel. Return False, without recording, if no kernel can run."""
    if not _have_kernels(histories, amaxes):
        return False
    multi_tensor.record_amaxes(histories, amaxes.contiguous())
    return True


def past_amaxes(histories: Sequence[Tensor], most_recent: bool, stride: int = 1) -> Tensor | None:
    """Compute `delayed_scaling.history_amaxes` with a kernel. Return None if no kernel can run."""
    return multi_tensor.past_amaxes(histories, most_recent, stride) if _have_kernels(histories, histories[0]) else None


def _have_kernels(histories: Sequence[Tensor], like: Tensor) -> bool:
    """True if kernels process all histories, on the device of `like`."""
    if not has_kernels(like) or histories[0].device != like.device:
        return False
    # map: there can be hundreds of experts' histories
    is_on_device = set(map(Tensor.get_device, histories)) == {like.get_device()}
    return is_on_device and all(map(Tensor.is_contiguous, histories))
