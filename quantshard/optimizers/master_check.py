"""Masters that were loaded beside other weights than theirs: half of a checkpoint, which a step would not show."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import torch
from torch import Tensor

from quantshard.errors import warn_user

FARTHEST: Final = 0.5
"""How far weights may be from their masters, of the larger norm. FP4 with scales of blocks, the coarsest format,
rounds normal numbers to within 0.15; two independent tensors of one norm are 1.4 apart."""


def warn_of_other_weights(optimizer: str, held: Iterable[tuple[str, Tensor, Tensor]]) -> None:
    """Warn of weights that are not those of their masters: names, values and masters of this rank's parts, float32.

    Called by a `step`, whose caller is named. It waits for the device.
    """
    names, distances = [], []
    for name, weight, master in held:
        names.append(name)
        size = weight.norm()
        # NaN, so no distance, of weights that are zeros: a part of a tensor may lie below what its scale reaches
        distances.append((weight - master).norm() / torch.maximum(size, master.norm()) * (size / size))
    found = [float(distance) for distance in distances]  # of several devices
    far = {name: distance for name, distance in zip(names, found, strict=True) if distance > FARTHEST}
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
