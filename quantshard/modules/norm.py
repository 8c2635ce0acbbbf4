"""LayerNorm and RMSNorm, as modules and as the first part of a fused one.

    LayerNorm   y = (x - mean(x)) / sqrt(var(x) + eps) * gamma + beta
    RMSNorm     y = x / sqrt(mean(x**2) + eps) * gamma

over the last dim, in float32 whatever the dtypes, rounded once to the dtype of x. With `zero_centered_gamma` the stored
weight is gamma - 1, so that it starts at 0 and weight decay pulls gamma towards 1. Weights and biases are never
quantized. For backward only the input is kept; its statistics, two sums a row, are taken again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from quantshard import private_torch
from quantshard.amax import world
from quantshard.errors import ConfigurationError
from quantshard.modules.base import QuantizedModule
from quantshard.modules.meshes import Parallelism

KINDS = ("LayerNorm", "RMSNorm")


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, zero_centered_gamma: bool = False) -> Tensor:
    """LayerNorm over the last dim of x [..., size]; weight and bias are [size]."""
    out: Tensor = _Norm.apply(x, weight, bias, eps, True, float(zero_centered_gamma))
    return out


def rms_norm(x: Tensor, weight: Tensor, eps: float, zero_centered_gamma: bool = False) -> Tensor:
    """RMSNorm over the last dim of x [..., size]; weight is [size]."""
    out: Tensor = _Norm.apply(x, weight, None, eps, False, float(zero_centered_gamma))
    return out


def _unit(x: Tensor, eps: float, centered: bool) -> tuple[Tensor, Tensor]:
    """x of float32 with its rows centered (LayerNorm only) and scaled to mean square 1, and the scales [..., 1]."""
    if centered:
        x = x - x.mean(-1, keepdim=True)
    scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return x * scale, scale


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, centered: bool, offset: float
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.eps, ctx.centered, ctx.offset = eps, centered, offset
        ctx.bias_dtype = None if bias is None else bias.dtype
        out = _unit(x.float(), eps, centered)[0] * (weight.float() + offset)
        if bias is not None:
            out = out + bias.float()
        return private_torch.cast(out, x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None, None]:
        x, weight = ctx.saved_tensors
        need_x, need_weight, need_bias = ctx.needs_input_grad[:3]
        unit, scale = _unit(x.float(), ctx.eps, ctx.centered)
        dy = grads[0].float()
        dx = dweight = dbias = None
        if need_x:
            dunit = dy * (weight.float() + ctx.offset)
            dx = dunit - unit * (dunit * unit).mean(-1, keepdim=True)
            if ctx.centered:
                dx = dx - dunit.mean(-1, keepdim=True)
            dx = (dx * scale).to(x.dtype)
        if need_weight:
            dweight = (dy * unit).reshape(-1, x.shape[-1]).sum(0).to(weight.dtype)
        if need_bias and ctx.bias_dtype is not None:
            dbias = dy.reshape(-1, x.shape[-1]).sum(0).to(ctx.bias_dtype)
        return dx, dweight, dbias, None, None, None


@dataclass(frozen=True)
class Normalization:
    """How a module normalizes rows of `size` elements, with parameters that the module owns.

    Raises:
        ConfigurationError: `kind` is not one of `KINDS`.
    """

    kind: str
    size: int
    eps: float
    zero_centered_gamma: bool

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ConfigurationError(f"normalization={self.kind!r} is not known; use {' or '.join(map(repr, KINDS))}")

    def add_parameters(self, module: QuantizedModule, prefix: str = "") -> None:
        """Register `weight` and, for LayerNorm, `bias` (else None), their names behind `prefix`."""
        module._add_vector(prefix + "weight", self.size, 0.0 if self.zero_centered_gamma else 1.0)
        if self.kind == "LayerNorm":
            module._add_vector(prefix + "bias", self.size, 0.0)
        else:
            module.register_parameter(prefix + "bias", None)

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """x [..., size] normalized, in its dtype."""
        if x.shape[-1] != self.size:  # else a last dim of 1 would be broadcast
            raise ConfigurationError(
                f"{self.kind} of {self.size} elements got an input of shape {tuple(x.shape)}; its last dim must be "
                f"{self.size}"
            )
        if self.kind == "RMSNorm":
            return rms_norm(x, weight, self.eps, self.zero_centered_gamma)
        return layer_norm(x, weight, bias, self.eps, self.zero_centered_gamma)

    def __str__(self) -> str:
        centered = ", zero_centered_gamma=True" if self.zero_centered_gamma else ""
        return f"{self.kind}({self.size}, eps={self.eps:g}{centered})"


class _NormModule(QuantizedModule):
    """What LayerNorm and RMSNorm share; the class's name is the kind."""

    def __init__(
        self,
        normalized_shape: int | Sequence[int] | None = None,
        eps: float = 1e-5,
        sequence_parallel: bool | None = None,
        params_dtype: torch.dtype | None = None,
        zero_centered_gamma: bool = False,
        hidden_size: int | Sequence[int] | None = None,
        *,
        tp_group: dist.ProcessGroup | None = None,
        tp_size: int = 1,
        tp_mesh: DeviceMesh | None = None,
        weight_mesh: DeviceMesh | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        kind = "LayerNorm" if isinstance(self, LayerNorm) else "RMSNorm"
        if None not in (params_dtype, dtype) and params_dtype != dtype:
            raise ConfigurationError(
                f"{kind}(params_dtype={params_dtype}, dtype={dtype}): they mean the same; give one"
            )
        asked = Parallelism(tp_group, tp_size, bool(sequence_parallel), tp_mesh, weight_mesh)
        super().__init__(device, params_dtype or dtype, asked)
        self.normalization = Normalization(kind, _size(kind, normalized_shape, hidden_size), eps, zero_centered_gamma)
        self.normalization.add_parameters(self)

    def forward(self, inp: Tensor) -> Tensor:
        """Input [..., size] -> the same shape and dtype.

        Raises:
            ConfigurationError: rows are spread over ranks (`sequence_parallel`), but it is not known which.
        """
        if self.sequence_parallel and self.tp_mesh is None and world() is not None and dist.get_world_size() > 1:
            raise ConfigurationError(
                f"{self.normalization.kind}(sequence_parallel=True) sums its parameters' gradients over the ranks that "
                "have the other rows, and was not told which; give tp_mesh or tp_group, "
                "or leave sequence_parallel out"
            )
        return self._normalized(self.normalization, inp)

    def extra_repr(self) -> str:
        return str(self.normalization).partition("(")[2].removesuffix(")")


class LayerNorm(_NormModule):
    """y = (x - mean) / sqrt(var + eps) * weight + bias over the last dim, in float32.

    Args:
        normalized_shape: size of the last dim.
        eps: added to the variance.
        params_dtype: dtype of the parameters; default: torch's default dtype. `dtype` is the same.
        zero_centered_gamma: multiply by 1 + weight, with a weight that starts at 0.
        hidden_size: TransformerEngine's old name for `normalized_shape`.
        sequence_parallel: the input's rows (dim 0) are spread over the ranks of tensor parallelism, so that the
            gradients of the parameters are summed over them.
        tp_group, tp_size, tp_mesh, weight_mesh: see `meshes.Parallelism`; the parameters are whole on every rank.
        device: where the parameters are made; "meta" leaves them to `reset_parameters`.
    """


class RMSNorm(_NormModule):
    """y = x / sqrt(mean(x**2) + eps) * weight over the last dim, in float32. Arguments: those of `LayerNorm`."""


def _size(kind: str, shape: int | Sequence[int] | None, hidden_size: int | Sequence[int] | None) -> int:
    if (shape is None) == (hidden_size is None):
        raise ConfigurationError(f"{kind} needs the size of the last dim, once: normalized_shape or hidden_size")
    given = hidden_size if shape is None else shape
    sizes = [given] if isinstance(given, int) else list(given or ())
    if len(sizes) != 1:
        raise ConfigurationError(
            f"{kind}({given}): only the last dim is normalized; flatten the last {len(sizes)} dims"
        )
    return sizes[0]
