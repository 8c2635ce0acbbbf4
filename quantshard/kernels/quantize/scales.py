"""Scales from amaxes, where these are known before values are quantized: `numerics.scales` and `encode_scales`.

(stored scale, multiplier of values) = rule(amax)               (`language.scales`)
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quantshard.formats import OrientedCodes, Scaling
from quantshard.kernels import scale_rule as sr
from quantshard.kernels.launch import launch_kernel

SIZE = 1024


@triton.jit
def scales_kernel(amax_ptr, stored_ptr, multiplier_ptr, numel, R: tl.constexpr, SIZE: tl.constexpr):
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    valued = at < numel
    stored, multiplier = sr.scales(tl.load(amax_ptr + at, mask=valued, other=0.0), 0.0, R)
    tl.store(stored_ptr + at, stored, mask=valued)
    tl.store(multiplier_ptr + at, multiplier, mask=valued)


def scales(amax: Tensor, copy: OrientedCodes, scaling: Scaling, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The scales to store, and the multipliers (float32) of values of `dtype`, both of the shape of the grid `amax`.

    Only for copies with one scale: with two, the multiplier depends on the amax of the whole tensor as well.
    """
    assert copy.amax is None, "a scale under a second one"
    amax = amax.contiguous()
    stored = torch.empty(amax.shape, dtype=copy.scale.encoding.storage, device=amax.device)
    multiplier = torch.empty_like(amax)
    if amax.numel() > 0:
        rule = sr.scale_rule(copy, scaling, dtype, amax.device)
        launch_kernel(
            scales_kernel, (-(amax.numel() // -SIZE),), amax.device,
            amax, stored, multiplier, amax.numel(), rule, SIZE, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    return stored, multiplier
