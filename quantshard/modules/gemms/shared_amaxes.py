"""Amaxes of matrices whose tokens are spread over ranks by context parallelism, which scale them alike."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from quantshard.collectives.flat_max import FlatMax
from quantshard.gemm import operands


def share(request: Any, *amaxes: Tensor | None) -> None:
    """Replace the amaxes that an `OperandRequest` scales whole matrices by by their maxima over the ranks."""
    group, specs = request.call.sequence_group, request.call.recipe.activations[request.role]
    if group is None or request.delayed is not None or not operands.scales_by_one_amax(specs):
        return
    reduction = FlatMax()
    for amax in {id(amax): amax for amax in amaxes if amax is not None and amax.numel() == 1}.values():
        reduction.add(amax, group)
    reduction.reduce()
