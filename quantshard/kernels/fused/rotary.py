"""Rotary position embedding of queries or keys, forward and backward.

    (a, b)   -> (a cos - b sin, b cos + a sin)          each plane of a head's features, by its angle at the position
    backward    (da cos + db sin, db cos - da sin)      the rotation by the negative angle

in float32, rounded once. The layout of planes is as in `modules.rotary`: feature i with i + rotated / 2, or
interleaved. Cosines and sines come from tables that torch computed from the angles, so results equal the oracle's bit
for bit. Like the angles, a table has an entry for each feature; the two entries of a plane are loaded separately.
Features that are not rotated are copied.
"""

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from quantshard.kernels import language as ql
from quantshard.kernels.graph_launch import writes
from quantshard.kernels.launch import launch_kernel

LEAST_HEADS, MOST_HEADS = 8, 32
"""The fewest and the most heads of a token in one program, which loads their cosines and sines once."""


@triton.jit
def load_planes(ptr, valued, p, half, PLANES: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Load both features of planes p for each row of a tile: float32 [rows, PLANES]. ptr: first features, [rows, 1]."""
    if INTERLEAVED:  # one load for neighbours
        features = tl.arange(0, 2 * PLANES)[None, :]
        x = ql.widen(tl.load(ptr + features, mask=valued & (features < 2 * half), other=0.0))
        return tl.split(tl.reshape(x, (ptr.shape[0], PLANES, 2)))
    else:
        mask = valued & (p < half)
        return ql.widen(tl.load(ptr + p, mask=mask, other=0.0)), ql.widen(tl.load(ptr + p + half, mask=mask, other=0.0))


@triton.jit
def rotate_kernel(
    x_ptr, x_s, x_b, x_h, out_ptr, out_s, out_b, out_h, cos_ptr, sin_ptr, table_stride, batch, heads, rotated_heads,
    half, rest,
    BACKWARD: tl.constexpr, INTERLEAVED: tl.constexpr, HEADS: tl.constexpr, PLANES: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    s = (tl.program_id(0) // batch).to(tl.int64)
    b = (tl.program_id(0) % batch).to(tl.int64)
    h = (tl.program_id(1) * HEADS + tl.arange(0, HEADS))[:, None]
    p = tl.arange(0, PLANES)[None, :]
    valued = h < heads
    x_ptr += s * x_s + b * x_b + h.to(tl.int64) * x_h
    out_ptr += s * out_s + b * out_b + h.to(tl.int64) * out_h
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    first = tl.zeros((1, 1), tl.int64) + s * table_stride
    always = tl.full((1, 1), True, tl.int1)
    cos_a, cos_b = load_planes(cos_ptr + first, always, p, half, PLANES, INTERLEAVED)
    sin_a, sin_b = load_planes(sin_ptr + first, always, p, half, PLANES, INTERLEAVED)
    a, b = load_planes(x_ptr, valued, p, half, PLANES, INTERLEAVED)
    if BACKWARD:
        out_a, out_b = ql.narrow(a * cos_a + b * sin_b, dtype), ql.narrow(b * cos_b - a * sin_a, dtype)
    else:
        out_a, out_b = ql.narrow(a * cos_a - b * sin_a, dtype), ql.narrow(b * cos_b + a * sin_b, dtype)
    out_a = tl.where(h < rotated_heads, out_a, ql.narrow(a, dtype))
    out_b = tl.where(h < rotated_heads, out_b, ql.narrow(b, dtype))
    if INTERLEAVED:
        features = tl.arange(0, 2 * PLANES)[None, :]
        out = tl.reshape(tl.join(out_a, out_b), (HEADS, 2 * PLANES))
        tl.store(out_ptr + features, out, mask=valued & (features < 2 * half))
    else:
        tl.store(out_ptr + p, out_a, mask=valued & (p < half))
        tl.store(out_ptr + p + half, out_b, mask=valued & (p < half))
    if REST > 0:
        j = tl.arange(0, REST)[None, :]
        mask = valued & (j < rest)
        tl.store(out_ptr + 2 * half + j, tl.load(x_ptr + 2 * half + j, mask=mask, other=0.0), mask=mask)


writes(rotate_kernel, "out_ptr")


@lru_cache(maxsize=64)
def tile_constants(heads: int, rotated: int, dim: int) -> dict[str, int]:
    """Return a program's part of a token: heads, planes per head, unrotated features (powers of two), and warps."""
    program_heads = min(heads & -heads, MOST_HEADS)  # the largest power of two that divides `heads`
    if program_heads < LEAST_HEADS:
        program_heads = min(triton.next_power_of_2(max(heads, 1)), MOST_HEADS)
    planes = triton.next_power_of_2(max(rotated // 2, 1))
    rest = triton.next_power_of_2(dim - rotated) if dim > rotated else 0
    warps = min(max(program_heads * planes // 256, 1), 8)
    return {"HEADS": program_heads, "PLANES": planes, "REST": rest, "num_warps": warps}


def rotate(
    t: Tensor, cos: Tensor, sin: Tensor, tensor_format: str = "sbhd", *, interleaved: bool = False,
    backward: bool = False, out: Tensor | None = None, rotated_heads: int | None = None,
) -> Tensor:  # fmt: skip
    """Rotate the first features of every head; oracle: `modules.rotary.apply_rotary_pos_emb`.

    `t`: queries or keys, [s, b, h, d], or [b, s, h, d] for tensor_format "bshd", with adjacent features and otherwise
    any strides; for `backward` the gradient of the result. `cos`, `sin`: float32 [at least s, at most d], of each
    feature; dims of size 1 in between are allowed. `out`: memory for the result, of the shape and dtype of t; can be t
    itself. `rotated_heads`: number of heads to rotate; the rest are copied.
    """
    (length, batch), rotated = (t.shape[:2] if tensor_format == "sbhd" else (t.shape[1], t.shape[0])), cos.shape[-1]
    heads, dim = t.shape[2:]
    assert rotated % 2 == 0 and rotated <= dim and sin.shape == cos.shape, (cos.shape, sin.shape, t.shape)
    assert cos.numel() >= length * rotated, (cos.shape, t.shape)
    t = t if t.stride(-1) == 1 or dim == 1 else t.contiguous()
    cos, sin = cos.contiguous(), sin.contiguous()
    out = torch.empty(t.shape, dtype=t.dtype, device=t.device) if out is None else out
    order = (0, 1, 2) if tensor_format == "sbhd" else (1, 0, 2)
    constants = tile_constants(heads, rotated, dim)
    if t.numel() > 0:
        launch_kernel(
            rotate_kernel, (length * batch, -(heads // -constants["HEADS"])), t.device,
            t, *(t.stride(dim) for dim in order), out, *(out.stride(dim) for dim in order), cos, sin, rotated,
            batch, heads, heads if rotated_heads is None else rotated_heads, rotated // 2, dim - rotated,
            BACKWARD=backward, INTERLEAVED=interleaved, **constants, enable_fp_fusion=False,
        )  # fmt: skip
    return out
