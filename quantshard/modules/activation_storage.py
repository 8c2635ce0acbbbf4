"""Formats in which backward keeps the inputs of an MLP's activation, the outputs of its first linear layer.

"high_precision" keeps them unchanged. "fp8" keeps E4M3 codes with a float32 scale for each 128 features of a token:

    scale = 1 / 2**e,  2**e the largest power of two that is at most 448 / amax of the block
    code  = x * 2**e to nearest even
    x'    = code * scale                                          what backward reads in place of x
    |x' - x| <= max(2**-4 |x|, 2**-10 / 224 amax of the block)

The first bound is for normal codes, which have 3 mantissa bits; the second is half the distance of subnormal codes,
with 2**e > 224 / amax. Forward results are exact. Codes saturate, so each input also keeps a NaN flag, which makes all
of x' NaN if any element of x was infinite or NaN. In float16, x' can be infinite if |x| > 63488; the optimizer then
skips the step.

Under tensor parallelism each rank keeps its own features. If a shard boundary crosses a block of 128, the ranks that
share the block agree on its amax, in one collective per input, so that sharding does not change the codes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from quantshard import kernel_dispatch, kernels, private_torch
from quantshard.errors import ConfigurationError
from quantshard.formats import Orientation
from quantshard.gemm import operands
from quantshard.gemm.operands import OperandSplit
from quantshard.kernels import workspace
from quantshard.recipe import QuantSpec
from quantshard.state_storage import FP8_STATE
from quantshard.tensor.storage import QuantizedStorage

if kernels.USABLE:
    from quantshard.kernels.fused.activation import quantize_gradients
    from quantshard.kernels.quantize.targets import KernelOutputs, QuantizeRequest, QuantizeSpec

HIGH_PRECISION: Final = "high_precision"
ACTIVATION_SPECS: Final[dict[str, QuantSpec | None]] = {HIGH_PRECISION: None, "fp8": FP8_STATE}
"""Values of `activation_storage`, and the format in which an activation saves its inputs [tokens, features]."""
_PARTS = 3  # codes, scales and NaN flag of an input


def check_storage(owner: str, name: object) -> None:
    """Raise ConfigurationError if `name` is no format in which activation inputs can be kept."""
    # a tuple, because `name` can be unhashable
    if name not in tuple(ACTIVATION_SPECS):
        raise ConfigurationError(f"{owner}(activation_storage={name!r}): use one of: {', '.join(ACTIVATION_SPECS)}")


class ActivationStorage(NamedTuple):
    """One of `STORAGES`.

    `spec`: how inputs are quantized; None keeps them unchanged. `split`: how features are sharded over ranks; None if
    they are not.
    """

    name: str
    spec: QuantSpec | None
    split: OperandSplit | None = None

    def for_backward(self, *tensors: Any) -> ActivationStorage:
        """Return this storage if autograd records an activation of these tensors (or Nones), otherwise `AS_IS`."""
        differentiates = torch.is_grad_enabled() and any([t is not None and t.requires_grad for t in tensors])
        return self if differentiates else AS_IS

    def keep(self, inputs: Sequence[Tensor | None]) -> list[Tensor]:
        """Return the tensors to keep for inputs [..., features] of one shape and dtype. A collective call if ranks
        share blocks.

        Unchanged inputs are returned as they are, None included. Otherwise each input gives codes uint8 [tokens,
        features], scales float32 [tokens, features / 128, rounded up] and a NaN flag float32 [1, 1].
        """
        spec = self.spec
        if spec is None:
            return [*inputs]  # type: ignore[list-item]
        rows = [private_torch.plain(x.detach()).reshape(-1, x.shape[-1]) for x in inputs if x is not None]
        split = self._across(spec, rows[0].shape[1])
        if split is None and kernel_dispatch.has_float_kernels(*rows):
            return _by_kernels(spec, rows)
        tensors = []
        for x in rows:
            storage = operands.quantize_operand(x, spec, split=split)
            zero = torch.zeros((1, 1), dtype=torch.float32, device=x.device)
            nan_flag = torch.where(torch.isfinite(x).all(), zero, torch.nan)
            tensors += [*(storage.components[part.name] for part in spec.format.components), nan_flag]
        return tensors

    def values(self, kept: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
        """Return the inputs for backward, decoded to [tokens, features] of `dtype`. Empties `kept` meanwhile."""
        spec = self.spec
        if spec is None:
            return kept
        values = []
        while kept:
            *parts, nan_flag = kept[:_PARTS]
            del kept[:_PARTS]
            components = dict(zip((part.name for part in spec.format.components), parts, strict=True))
            tokens, features = parts[0].shape
            shard = operands.operand_shard((tokens, features), spec, self._across(spec, features))
            storage = QuantizedStorage(spec, shard, components)
            values.append(storage.dequantize(Orientation.ROWWISE, dtype, nan_flag))
            # free the codes before the next input is decoded
            del parts, components, storage
        return values

    def _across(self, spec: QuantSpec, features: int) -> OperandSplit | None:
        """Return the split if ranks share a block, otherwise None."""
        block_features = spec.format.copies[Orientation.ROWWISE].block[1]
        return None if self.split is None or features % block_features == 0 else self.split


STORAGES: Final = {name: ActivationStorage(name, spec) for name, spec in ACTIVATION_SPECS.items()}
"""Storages by the value of `activation_storage`."""
AS_IS: Final = STORAGES[HIGH_PRECISION]


def _by_kernels(spec: QuantSpec, rows: Sequence[Tensor]) -> list[Tensor]:
    """Quantize all inputs with the same strides in one kernel."""
    if any(x.stride() != rows[0].stride() for x in rows):
        return [part for x in rows for part in _by_kernels(spec, [x])]
    kernel_spec = QuantizeSpec(spec.format.copies[Orientation.ROWWISE], spec.scaling)
    requests = [KernelOutputs(QuantizeRequest(kernel_spec), nan_flag=workspace.zero(x.device)) for x in rows]
    tensors: list[Tensor] = []
    for (output, _), request in zip(quantize_gradients(rows, requests), requests, strict=True):
        assert output is not None and request.nan_flag is not None
        tensors += [output.codes, output.scale, request.nan_flag]
    return tensors
