"""LayerNormLinear: a normalization followed by a linear layer, in one module."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from quantshard.distributed.module_meshes import TensorParallelConfig
from quantshard.errors import ConfigurationError
from quantshard.modules import fused
from quantshard.modules.base.initialization import InitMethod
from quantshard.modules.base.module import QuantizedModule, by_own_recipe
from quantshard.modules.base.projections import split_sizes
from quantshard.modules.norm import Normalization


class LayerNormLinear(QuantizedModule):
    """A normalization followed by a linear layer: y = norm(x) @ weight^T + bias.

    The normalization runs in high precision, the GEMMs run as in `Linear`. Parameters: `layer_norm_weight`,
    `layer_norm_bias` (None for RMSNorm), `weight` [out_features, in_features], stored quantized under
    `quantized_model_init`, and `bias` (None without bias).

    Args:
        eps: constant added to the variance (LayerNorm) or the mean square (RMSNorm).
        normalization: "LayerNorm" or "RMSNorm".
        return_bias: return the bias after the output instead of adding it.
        return_layernorm_output: also return the normalized input, as the last result.
        return_layernorm_output_gathered: under sequence parallelism, gather the returned normalized input.
        parallel_mode: "column" or None; see `Linear`.
        zero_centered_gamma: multiply by 1 + layer_norm_weight, with a weight initialized to 0.
        in_features, out_features, init_method, bias, params_dtype, parameters_split, separate_outputs, device, name:
            see `Linear`.
        tp_group, tp_size, sequence_parallel, tp_mesh: see `module_meshes.TensorParallelConfig`.

    Raises:
        ConfigurationError: `normalization` is unknown, `parallel_mode` is "row", or an argument of `Linear` is invalid.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        eps: float = 1e-5,
        *,
        init_method: InitMethod | None = None,
        bias: bool = True,
        normalization: str = "LayerNorm",
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        return_layernorm_output: bool = False,
        parameters_split: Sequence[str] | Mapping[str, int] | None = None,
        separate_outputs: bool = False,
        zero_centered_gamma: bool = False,
        return_layernorm_output_gathered: bool = False,
        parallel_mode: str | None = None,
        tp_group: dist.ProcessGroup | None = None,
        tp_size: int = 1,
        sequence_parallel: bool = False,
        tp_mesh: DeviceMesh | None = None,
        device: torch.device | str | None = None,
        name: str | None = None,
    ) -> None:
        if parallel_mode == "row":
            raise ConfigurationError(
                "LayerNormLinear(parallel_mode='row') would take a part of the features, but a normalization needs all "
                "of them; use 'column', or a LayerNorm or RMSNorm and a Linear(parallel_mode='row')"
            )
        super().__init__(device, params_dtype, TensorParallelConfig(tp_group, tp_size, sequence_parallel, tp_mesh))
        self.in_features, self.out_features, self.name = in_features, out_features, name
        self.use_bias, self.return_bias = bias, return_bias
        self.return_layernorm_output, self.separate_outputs = return_layernorm_output, separate_outputs
        self.return_layernorm_output_gathered = return_layernorm_output_gathered
        self.normalization = Normalization(normalization, in_features, eps, zero_centered_gamma)
        self.normalization.add_parameters(self, "layer_norm_")
        sizes = split_sizes("LayerNormLinear", out_features, parameters_split)
        self._layer = self._add_projection(sizes, in_features, init_method, bias, mode=parallel_mode)

    @by_own_recipe
    def forward(self, inp: Tensor) -> Any:
        """Apply the layer: [..., in_features] -> [..., out_features], in the input's dtype or the dtype of
        `torch.autocast`.

        With `return_bias` or `return_layernorm_output` the result is a tuple: output, bias, normalized input. Errors:
        see `Linear.forward`.
        """
        inp = self._input(inp)
        front, normed = fused.front(self, self.normalization, inp), None
        layer = self._ready(self._layer, inp.shape, inp.device, with_bias=not self.return_bias)
        if not self.return_layernorm_output and fused.fits(front, layer):
            outputs: Sequence[Tensor] = fused.norm_linear(front, layer)[0]
        else:
            normed, _ = front.normalized()
            outputs = self._project(normed, self._layer, with_bias=not self.return_bias, ready=layer)
        out = (
            outputs if self.separate_outputs else outputs[0] if len(outputs) == 1 else torch.cat(tuple(outputs), dim=-1)
        )
        extras: tuple[Tensor | None, ...] = (self._joined_bias(self._layer, inp.dtype),) if self.return_bias else ()
        if self.return_layernorm_output:
            assert normed is not None
            extras += (self._gathered(normed) if self.return_layernorm_output_gathered else normed,)
        return (out, *extras) if extras else out

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.use_bias}, "
            f"normalization={self.normalization}{self._formats_repr()}"
        )
