"""Quantized weights outside of modules."""

from __future__ import annotations

import torch
from torch import Tensor

from quantshard import sharding
from quantshard.recipe import QuantSpec
from quantshard.tensor import parameter_state, storage as storages
from quantshard.tensor.quantized_tensor import QuantizedTensor


def quantize_weight(
    values: Tensor,
    spec: QuantSpec,
    *,
    dtype: torch.dtype | None = None,
    state: dict[str, Tensor] | None = None,
    keep_high_precision: bool = False,
) -> QuantizedTensor:
    """Quantize a whole tensor [R, C], or a stack [matrices, R, C], of any floating dtype.

    On the meta device the result has no values. `dtype`: the nominal dtype. `state`: see `parameter_state`; by default
    a new one. `keep_high_precision`: keep the values on the CPU for `get_high_precision_init_val`.
    """
    state = state if state is not None else parameter_state.weight_state(spec, values.device)
    shard = sharding.whole((values.numel() // values.shape[-1], values.shape[-1]))
    storage = storages.empty(spec.stacked(values.shape[1]) if values.ndim == 3 else spec, shard, values.device, state)
    tensor = QuantizedTensor(storage, dtype or values.dtype)
    if values.device.type != "meta":
        tensor.quantize_(values)
        if keep_high_precision:
            storage.keep_initial_values(values.detach().cpu().clone())
    return tensor
