"""The formula of an exponential moving average (EMA) of weights: the update of one step.

    a = a + share (w - a),   share = (1 - decay) / (1 - decay^step)

This is the average with Adam's bias correction already applied, so reading it needs no division. After n steps from the
first on, w_i has the weight decay^(n - i) (1 - decay) / (1 - decay^n), and the values before the first step have none.
An average that starts after step n starts with the values of that time, which count for all n steps: their weight after
k more steps is (decay^k - decay^(n + k)) / (1 - decay^(n + k)). Once an average equals a weight that no longer changes,
the average keeps its exact bits.
"""

from __future__ import annotations

import struct

import torch
from torch import Tensor

from quantshard.numerics.adam import power


def share(decay: float, step: int | Tensor) -> float | Tensor:
    """Return the share of the new values in the average at `step`, counted from 1.

    The result is a float32 number, or a float32 scalar on the device of `step` if `step` is an int64 tensor. The share
    is computed in float64, with operations that give the same bits on every device.
    """
    rest = 1.0 - power(decay, step)
    if isinstance(rest, Tensor):
        return (torch.full_like(rest, 1.0 - decay) / rest).float()
    (rounded,) = struct.unpack("f", struct.pack("f", (1.0 - decay) / rest))
    return float(rounded)


def moved(average: Tensor, values: Tensor, share: float | Tensor) -> Tensor:
    """Return the average after a step, in float32, out of place.

    Uses three operations that IEEE 754 rounds correctly, so every device and every shard computes the same bits. `lerp`
    and `add(alpha=)` would fuse them on some devices.
    """
    return average + (values - average) * share
