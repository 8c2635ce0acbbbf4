"""Scales from amaxes that are known before values are quantized: `numerics.scales_and_multipliers`.

(stored scale, multiplier of values) = rule(amax)               (`scale_rule.scales`)
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from quantshard.formats import OrientedCodes, Scaling
from quantshard.kernels import scale_rule as sr
from quantshard.kernels.graph_launch import writes
from quantshard.kernels.launch import launch_kernel

SIZE = 1024


@triton.jit
def scales_kernel(amax_ptr, stored_ptr, multiplier_ptr, numel, R: tl.constexpr, SIZE: tl.constexpr):
    index = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    valued = index < numel
    stored_scale, multiplier = sr.scales(tl.load(amax_ptr + index, mask=valued, other=0.0), 0.0, R)
    tl.store(stored_ptr + index, stored_scale, mask=valued)
    tl.store(multiplier_ptr + index, multiplier, mask=valued)


writes(scales_kernel, "stored_ptr", "multiplier_ptr")


def scales(amax: Tensor, copy: OrientedCodes, scaling: Scaling, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the scales to store and the float32 multipliers for values of `dtype`, of the shape of the grid `amax`.

    Only for copies with one scale. With two, the multiplier also depends on the amax of the whole tensor.
    """
    assert copy.amax is None, "a scale under a second one"
    amax = amax.contiguous()
    stored_scales = torch.empty(amax.shape, dtype=copy.scale.encoding.storage, device=amax.device)
    multiplier = torch.empty_like(amax)
    if amax.numel() > 0:
        rule = sr.scale_rule(copy, scaling, dtype, amax.device)
        launch_kernel(
            scales_kernel, (-(amax.numel() // -SIZE),), amax.device,
            amax, stored_scales, multiplier, amax.numel(), rule, SIZE, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    return stored_scales, multiplier
