"""Warning if loaded masters do not match the weights, as after loading half a checkpoint."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import torch
from torch import Tensor

from quantshard.errors import warn_user

FARTHEST: Final = 0.5
"""Largest distance between weights and masters, relative to the larger norm. FP4 with block scales, the coarsest
format, rounds normally distributed values to within 0.15; two independent tensors of equal norm are 1.4 apart."""


def warn_of_other_weights(optimizer: str, held: Iterable[tuple[str, Tensor, Tensor]]) -> None:
    """Warn if weights do not match their masters. Waits for the device.

    `held`: name, values and master of this rank's shards, float32. Call it from `step`, so that the warning points at
    the caller of `step`.
    """
    names, distances = [], []
    for name, weight, master in held:
        names.append(name)
        size = weight.norm()
        # A shard that underflowed to zeros gives NaN, which never exceeds the limit.
        distances.append((weight - master).norm() / torch.maximum(size, master.norm()) * (size / size))
    host_distances = [float(distance) for distance in distances]  # tensors can be on several devices
    far = {name: distance for name, distance in zip(names, host_distances, strict=True) if distance > FARTHEST}
    if not far:
        return
    first = next(iter(far))
    warn_user(
        f"{optimizer} was loaded with masters of other weights than the model has: {first} is {far[first]:.0%} of "
        f"their norm away from its master, and {len(far)} of {len(names)} are by more than {FARTHEST:.0%}; this step "
        "replaces these weights by what their masters become. Load the model's weights of the same checkpoint too "
        "(strict=False may have left its keys out in silence), or, to go on from the weights, call reseed_masters()",
        is_counted=True,
    )
