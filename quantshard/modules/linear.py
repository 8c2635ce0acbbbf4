"""Linear: y = x @ weight^T + bias, with a weight that may be stored quantized."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from quantshard.modules import unsupported
from quantshard.modules.base import InitMethod, QuantizedModule, WeightSpec


class Linear(QuantizedModule):
    """A linear layer whose three GEMMs are quantized by the recipe of the surrounding `autocast`.

    The weight is [out_features, in_features], stored quantized if built under `quantized_model_init`.

    Args:
        in_features: size of the last dim of the input.
        out_features: size of the last dim of the output.
        bias: add a bias [out_features], kept in high precision.
        init_method: fills the whole weight in place (default: N(0, 0.023**2) by the counter generator).
        params_dtype: (nominal) dtype of the parameters; default: torch's default dtype.
        return_bias: return (output without bias, bias) instead of adding it.
        device: where the parameters are made; "meta" leaves them to `reset_parameters`. Default: the current
            accelerator, or the CPU.
        name: shown in printed tables and messages.
        **others: TransformerEngine's other arguments; see `unsupported`.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool = True,
        init_method: InitMethod | None = None,
        params_dtype: torch.dtype | None = None,
        return_bias: bool = False,
        device: torch.device | str | None = None,
        name: str | None = None,
        **others: Any,
    ) -> None:
        unsupported.refuse("Linear", others)
        super().__init__(device, params_dtype)
        self.in_features, self.out_features = in_features, out_features
        self.use_bias, self.return_bias, self.name = bias, return_bias, name
        self._add_weight("weight", WeightSpec((out_features, in_features), init_method))
        if bias:
            self._add_vector("bias", out_features, 0.0)
        else:
            self.register_parameter("bias", None)
        self._add_histories()

    def forward(self, inp: Tensor, **others: Any) -> Tensor | tuple[Tensor, Tensor | None]:
        """Input [..., in_features] -> [..., out_features], in the input's dtype."""
        unsupported.refuse("Linear.forward", others)
        out = self._linear(inp, "weight", None if self.return_bias else self.bias)
        return (out, self.bias) if self.return_bias else out

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.use_bias}"
