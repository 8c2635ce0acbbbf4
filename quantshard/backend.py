"""The one place that asks "kernel or oracle, native or emulated?".

On every device today the answers are: the oracle quantizes (`numerics`), and a GEMM of quantized operands is emulated:
both are dequantized and multiplied in float32, so that each product is exact and the sums are those of a float32
accumulator. What is emulated says so: `gemm_path` gives the reason, `explain` prints it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quantshard import numerics, sharding
from quantshard.formats import Copy
from quantshard.recipe import Cell, Recipe
from quantshard.storage import QuantizedStorage, scale_names

Operand = Tensor | QuantizedStorage
"""A matrix of a GEMM: in high precision, or quantized."""


def quantize(
    values: Tensor, cell: Cell, *, amax: Tensor | None = None, words: Tensor | None = None
) -> QuantizedStorage:
    """Quantize an activation or gradient [R, C] along its last dim.

    Args:
        values: [R, C], any floating dtype. With the cell's `random_hadamard` it is transformed first, and C is padded
            to a multiple of 16.
        amax: a float32 scalar to scale by instead of the tensor's own amax (delayed scaling).
        words: random words for stochastic rounding, int64 [R, C] (padded likewise), from `numerics.random_words`.
    """
    if cell.scaling.random_hadamard:
        values = numerics.hadamard16(values)
    fmt = cell.format
    if amax is None:
        amaxes = numerics.amaxes(values, fmt)
    else:
        (name,) = scale_names(cell)
        amaxes = {name: amax.view(1, 1)}
    components = numerics.scales(amaxes, fmt, cell.scaling, values.dtype)
    multipliers = numerics.encode_scales(amaxes, fmt, cell.scaling, values.dtype)
    for copy in fmt.copies.values():
        components[copy.codes.name] = numerics.quantize_codes(values, copy, multipliers, words=words)
    return QuantizedStorage(cell, sharding.whole((values.shape[0], values.shape[1])), components)


def matmul(
    a: Operand,
    b: Operand,
    out_dtype: torch.dtype,
    *,
    transpose_a: bool = False,
    transpose_b: bool = False,
    bias: Tensor | None = None,
) -> Tensor:
    """op(a) @ op(b) + bias, accumulated in float32 and rounded once to `out_dtype`.

    A quantized operand is read from the copy that was quantized along the summed dim, where its format keeps two.
    """
    left = _values(a, Copy.COLUMNWISE if transpose_a else Copy.ROWWISE)
    right = _values(b, Copy.ROWWISE if transpose_b else Copy.COLUMNWISE)
    out = torch.matmul(left.t() if transpose_a else left, right.t() if transpose_b else right)
    if bias is not None:
        out = out + bias.float()
    return out.to(out_dtype)


def _values(operand: Operand, wanted: Copy) -> Tensor:
    if isinstance(operand, Tensor):
        return operand.float()
    which = wanted if wanted in operand.cell.format.copies else Copy.ROWWISE
    return operand.dequantize(which)


def fallbacks(stored: QuantizedStorage | None, recipe: Recipe | None, device: torch.device) -> tuple[str, ...]:
    """Which of `limits.FALLBACKS` the GEMMs of one linear layer take.

    `stored`: the weight, None where it is stored in high precision. `recipe`: of autocast; None if it is not known, and
    taken to be one that fits the weight.
    """
    if recipe is not None and not recipe.table:
        return () if stored is None else ("dequantized",)
    cell = stored.cell if stored is not None else recipe.weight if recipe is not None else None
    taken = ["emulated"] if gemm_path(cell, device)[0] == "emulated" else []
    if stored is None:
        return (*taken, "quantized each forward") if cell is not None else ()
    fmt = stored.cell.format
    if not fmt.transposable and Copy.COLUMNWISE not in fmt.copies:
        taken.append("turned")
    if stored.gathered and not stored.has(Copy.ROWWISE):
        taken.append("fetched")
    return tuple(taken)


def gemm_path(cell: Cell | None, device: torch.device) -> tuple[str, str]:
    """How a weight's GEMMs run on a device, and why: ("native" or "emulated", reason)."""
    if cell is None:
        return "native", "high precision"
    where = "a CPU has" if device.type == "cpu" else f"{device.type}: quantshard has as yet"
    return "emulated", f"{where} no {cell.format.copies[Copy.ROWWISE].codes.encoding.name} matrix product"
