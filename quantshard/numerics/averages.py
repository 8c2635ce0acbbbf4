"""The mathematics of an exponential moving average of weights, once: what a step makes of it, and by which share.

    a = a + share (w - a),   share = (1 - decay) / (1 - decay^step)

This is the average with Adam's correction of the bias, kept so that nothing remains to be divided when it is read:
after n steps from the first on, w_i has the weight decay^(n - i) (1 - decay) / (1 - decay^n), and the values before the
first step have none. One that begins after step n begins with the values of then, which have the weight of all n steps:
(decay^k - decay^(n + k)) / (1 - decay^(n + k)) after k more. A weight that does not change any
more has, once they are equal, the very same average.
"""

from __future__ import annotations

import struct

import torch
from torch import Tensor

from quantshard.numerics.adam import power


def share(decay: float, step: int | Tensor) -> float | Tensor:
    """The share of the new values in the average of `step`, counted from 1: a number that is a float32, or a float32
    scalar on the device of `step` (int64).

    Computed in float64, by operations that have the same bits on every device.
    """
    rest = 1.0 - power(decay, step)
    if isinstance(rest, Tensor):
        return (torch.full_like(rest, 1.0 - decay) / rest).float()
    (rounded,) = struct.unpack("f", struct.pack("f", (1.0 - decay) / rest))
    return float(rounded)


def moved(average: Tensor, values: Tensor, share: float | Tensor) -> Tensor:
    """The average after a step, in float32; the arguments are not changed.

    Three operations that IEEE 754 rounds correctly, so that every device and every shard gets the same bits; none of
    them fused, as `lerp` and `add(alpha=)` are on some devices.
    """
    return average + (values - average) * share
