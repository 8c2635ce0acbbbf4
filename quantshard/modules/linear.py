"""Linear: y = x @ weight^T + bias, with a weight that may be stored quantized."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from quantshard.modules.base.module import InitMethod, QuantizedModule
from quantshard.modules.base.own_recipe import by_own_recipe
from quantshard.modules.base.projections import joined, split_sizes
from quantshard.modules.base.shared_arguments import parallelism, shows_parallelism
from quantshard.modules.contexts import unsupported


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
        parameters_split: make several weights instead of one, which read the same input: names and out_features of
            each (a dict), or names of equal parts. "query" has the parameters `query_weight` and `query_bias`.
        separate_outputs: return a tuple of the parts' outputs instead of one concatenated output.
        parallel_mode: how tensor parallelism cuts the weight: "column" (out_features; the output stays cut) or "row"
            (in_features; the input is cut).
        device: where the parameters are made; "meta" leaves them to `reset_parameters`. Default: the current
            accelerator, or the CPU.
        name: shown in printed tables and messages.
        **others: tensor parallelism's (`module_meshes.TensorParallelConfig`) and TransformerEngine's (`unsupported`).
    """

    @shows_parallelism(before="device")
    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool = True,
        init_method: InitMethod | None = None,
        params_dtype: torch.dtype | None = None,
        return_bias: bool = False,
        parameters_split: Sequence[str] | Mapping[str, int] | None = None,
        separate_outputs: bool = False,
        parallel_mode: str | None = None,
        device: torch.device | str | None = None,
        name: str | None = None,
        **others: Any,
    ) -> None:
        super().__init__(device, params_dtype, parallelism("Linear", others))
        self.in_features, self.out_features = in_features, out_features
        self.use_bias, self.return_bias, self.name = bias, return_bias, name
        self.separate_outputs = separate_outputs
        sizes = split_sizes("Linear", out_features, parameters_split)
        self._layer = self._add_projection(sizes, in_features, init_method, bias, mode=parallel_mode)

    @by_own_recipe
    def forward(self, inp: Tensor, **others: Any) -> Any:
        """Input [..., in_features] -> [..., out_features], in the input's dtype, or that of `torch.autocast`.

        See the arguments for tuples.
        """
        unsupported.refuse("Linear.forward", others)
        outputs = self._project(inp, self._layer, with_bias=not self.return_bias)
        out = outputs if self.separate_outputs else joined(outputs)
        return (out, self._joined_bias(self._layer, outputs[0].dtype)) if self.return_bias else out

    def extra_repr(self) -> str:
        sizes = f"in_features={self.in_features}, out_features={self.out_features}"
        return f"{sizes}, bias={self.use_bias}{self._formats_repr()}"
