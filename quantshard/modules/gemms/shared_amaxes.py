"""Amaxes of matrices whose tokens are spread over ranks by context parallelism, which scale them alike."""

from typing import Any

from torch import Tensor

from quantshard.collectives.flat_max import FlatMax
from quantshard.gemm import operands


def share(request: Any, *amaxes: Tensor | None) -> None:
    """Replace amaxes of whole matrices by their maxima over the ranks of an `OperandRequest`."""
    specs = request.call.recipe.activations[request.role]
    if request.delayed is not None or not operands.scales_by_one_amax(specs):
        return
    reduction = FlatMax()
    for amax in {id(amax): amax for amax in amaxes if amax is not None and amax.numel() == 1}.values():
        reduction.add(amax, request.call.sequence_group)
    reduction.reduce()
