"""Linear layer with an optionally quantized weight: y = x @ weight^T + bias."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from quantshard.distributed.module_meshes import TensorParallelConfig
from quantshard.modules.base.initialization import InitMethod
from quantshard.modules.base.module import QuantizedModule, by_own_recipe
from quantshard.modules.base.projections import split_sizes


class Linear(QuantizedModule):
    """A linear layer that runs its three GEMMs by the recipe of the surrounding `autocast`.

    The weight is [out_features, in_features]. Under `quantized_model_init` it is stored quantized.

    Args:
        in_features: size of the last dim of the input.
        out_features: size of the last dim of the output.
        bias: add a bias [out_features], kept in high precision.
        init_method: function that fills the full (unsharded) weight in place. Default: N(0, 0.023**2), drawn by global
            element index.
        params_dtype: dtype of the parameters, nominal for a quantized weight. Default: torch's default dtype.
        return_bias: return (output without bias, bias) instead of adding the bias.
        parameters_split: split the weight into several parameters that read the same input: a dict of name ->
            out_features, or a sequence of names for equal parts. The part "query" has the parameters `query_weight` and
            `query_bias`.
        separate_outputs: return a tuple with the output of each part instead of one concatenated output.
        parallel_mode: dim that tensor parallelism shards: "column" (out_features; the output stays sharded) or "row"
            (in_features; the input must be sharded).
        device: device of the parameters; "meta" leaves the initialization to `reset_parameters`. Default: the current
            accelerator, or the CPU.
        name: name shown in printed tables and messages.
        fuse_wgrad_accumulation: add the weight's gradient to `weight.main_grad`, a tensor that you set, without
            rounding it before; `weight.grad` stays None. Optimizers of quantshard step by it.
        delay_wgrad_compute: keep what the weight's gradient is computed from until `backward_dw`.
        tp_group, tp_size, sequence_parallel, tp_mesh: see `module_meshes.TensorParallelConfig`.
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
        parameters_split: Sequence[str] | Mapping[str, int] | None = None,
        separate_outputs: bool = False,
        parallel_mode: str | None = None,
        tp_group: dist.ProcessGroup | None = None,
        tp_size: int = 1,
        sequence_parallel: bool = False,
        tp_mesh: DeviceMesh | None = None,
        device: torch.device | str | None = None,
        name: str | None = None,
        fuse_wgrad_accumulation: bool = False,
        delay_wgrad_compute: bool = False,
    ) -> None:
        super().__init__(device, params_dtype, TensorParallelConfig(tp_group, tp_size, sequence_parallel, tp_mesh))
        self.in_features, self.out_features = in_features, out_features
        self.use_bias, self.return_bias, self.name = bias, return_bias, name
        self.separate_outputs = separate_outputs
        sizes = split_sizes("Linear", out_features, parameters_split)
        self._layer = self._add_projection(sizes, in_features, init_method, bias, mode=parallel_mode)
        self._set_wgrad_options(fuse_wgrad_accumulation, delay_wgrad_compute)

    @by_own_recipe
    def forward(self, inp: Tensor) -> Any:
        """Apply the layer: [..., in_features] -> [..., out_features], in the input's dtype or the dtype of
        `torch.autocast`.

        `return_bias` and `separate_outputs` make the result a tuple.

        Raises:
            ConfigurationError: the input has another last dim, has no floating dtype, or is a DTensor.
            RecipeMismatchError: the weight is stored in another format than the recipe needs.
            FallbackError: `autocast` is strict and a GEMM would fall back.
        """
        outputs = self._project(inp, self._layer, with_bias=not self.return_bias)
        out = self._joined(outputs, self.separate_outputs)
        return (out, self._joined_bias(self._layer, outputs[0].dtype)) if self.return_bias else out

    def extra_repr(self) -> str:
        sizes = f"in_features={self.in_features}, out_features={self.out_features}"
        return f"{sizes}, bias={self.use_bias}{self._formats_repr()}"
