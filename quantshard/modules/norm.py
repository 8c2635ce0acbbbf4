"""LayerNorm and RMSNorm, as modules and as the first part of fused modules.

    LayerNorm   y = (x - mean(x)) / sqrt(var(x) + eps) * gamma + beta
    RMSNorm     y = x / sqrt(mean(x**2) + eps) * gamma

Both run over the last dim, in float32 for all dtypes, and round once to the dtype of x. With `zero_centered_gamma` the
stored weight is gamma - 1, which starts at 0, so that weight decay pulls gamma towards 1. Weights and biases are never
quantized.

Backward keeps the input. Kernels also keep two statistics per row, which plain PyTorch recomputes. Second derivatives
always use the formulas in PyTorch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from quantshard import kernel_dispatch, kernels, private_torch
from quantshard.collectives.process_groups import world
from quantshard.distributed.module_meshes import TensorParallelConfig
from quantshard.errors import ConfigurationError
from quantshard.modules.base import checks
from quantshard.modules.base.composite import CompositeModule
from quantshard.modules.base.module import QuantizedModule

if kernels.USABLE:
    from quantshard.kernels.fused import epilogue, norm as norm_kernel

KINDS = ("LayerNorm", "RMSNorm")


def _unit(x: Tensor, eps: float, centered: bool) -> tuple[Tensor, Tensor]:
    """Scale each row of x (float32), if `centered` less its mean, to mean square 1. Also returns scales [..., 1]."""
    if centered:
        x = x - x.mean(-1, keepdim=True)
    scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return x * scale, scale


Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]
"""Gradients of x, weight and bias."""


def _gradients(
    dy: Tensor, x: Tensor, weight: Tensor, bias_dtype: torch.dtype | None, needs: Sequence[bool],
    eps: float, centered: bool, offset: float,
) -> Gradients:  # fmt: skip
    needs_x, needs_weight, needs_bias = needs
    unit, scale = _unit(x.float(), eps, centered)
    dy = dy.float()
    dx = dweight = dbias = None
    if needs_x:
        dunit = dy * (weight.float() + offset)
        dx = dunit - unit * (dunit * unit).mean(-1, keepdim=True)
        if centered:
            dx = dx - dunit.mean(-1, keepdim=True)
        dx = (dx * scale).to(x.dtype)
    if needs_weight:
        dweight = (dy * unit).reshape(-1, x.shape[-1]).sum(0).to(weight.dtype)
    if needs_bias and bias_dtype is not None:
        dbias = dy.reshape(-1, x.shape[-1]).sum(0).to(bias_dtype)
    return dx, dweight, dbias


class _OracleNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, centered: bool, offset: float
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.constants = eps, centered, offset
        ctx.bias_dtype = None if bias is None else bias.dtype
        out = _unit(x.float(), eps, centered)[0] * (weight.float() + offset)
        if bias is not None:
            out = out + bias.float()
        return private_torch.cast(out, x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None, None]:
        x, weight = ctx.saved_tensors
        input_grads = _gradients(grads[0], x, weight, ctx.bias_dtype, ctx.needs_input_grad[:3], *ctx.constants)
        return *input_grads, None, None, None


def parameters_of(weight: Tensor, bias: Tensor | None, norm: Normalization) -> norm_kernel.NormParameters:
    """Pack the parameters of a normalization for its kernels."""
    return norm_kernel.NormParameters(weight.contiguous(), None if bias is None else bias.contiguous(), norm.offset)


def kernel_gradients(
    dy: Tensor, z: Tensor, weight: Tensor, bias: Tensor | None, statistics: norm_kernel.NormStatistics,
    norm: Normalization, total_grad: Tensor | None, needs: Sequence[bool],
) -> Gradients:  # fmt: skip
    """Compute the needed gradients of z, weight and bias by a kernel. `total_grad`: added to the gradient of z."""
    dz, dweight, dbias = norm_kernel.norm_backward(
        private_torch.plain(dy), z, statistics, parameters_of(weight, bias, norm),
        residual_gradient=None if total_grad is None else private_torch.plain(total_grad),
        for_parameters=needs[1] or needs[2],
    )  # fmt: skip
    return (
        dz if needs[0] else None,
        kernel_dispatch.rounded(dweight, weight.dtype) if needs[1] and dweight is not None else None,
        kernel_dispatch.rounded(dbias, bias.dtype) if needs[2] and dbias is not None and bias is not None else None,
    )


class _KernelNorm(torch.autograd.Function):
    """Normalization by kernels: returns the normalized x, or x + residual, and that sum (None without residual).
    A residual connection reads the sum again, so the kernel of backward also adds the sum's gradient."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, norm: Normalization
    ) -> tuple[Tensor, Tensor | None]:
        ctx.set_materialize_grads(False)
        x = private_torch.plain(x)
        plain_residual = None if residual is None else private_torch.plain(residual)
        statistics, total = norm_kernel.norm_statistics(x, norm.eps, norm.centered, residual=plain_residual)
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        outputs = epilogue.KernelOutputs(high=epilogue.matrix(out))
        parameters = parameters_of(weight, bias, norm)
        norm_kernel.normalize_and_quantize(epilogue.matrix(total), statistics, parameters, outputs)
        ctx.save_for_backward(total, weight, bias, *statistics)
        ctx.norm = norm
        return out, None if residual is None else total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        dy, sum_grad = grads
        z, weight, bias, rstd, mean = ctx.saved_tensors
        needs = any(ctx.needs_input_grad[:2]), *ctx.needs_input_grad[2:4]
        if dy is None:
            dx, dweight, dbias = sum_grad, None, None
        elif torch.is_grad_enabled():
            # create_graph=True: kernels have no derivative
            bias_dtype = None if bias is None else bias.dtype
            dx, dweight, dbias = _gradients(dy, z, weight, bias_dtype, needs, *ctx.norm.constants)
            dx = dx if dx is None or sum_grad is None else dx + sum_grad
        else:
            statistics = norm_kernel.NormStatistics(rstd, mean)
            dx, dweight, dbias = kernel_gradients(dy, z, weight, bias, statistics, ctx.norm, sum_grad, needs)
        return dx, dx if ctx.needs_input_grad[1] else None, dweight, dbias, None


@dataclass(frozen=True)
class Normalization:
    """A normalization of rows of `size` elements. The module that uses it owns the parameters."""

    kind: str
    size: int
    eps: float
    zero_centered_gamma: bool

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ConfigurationError(f"normalization={self.kind!r} is not known; use {' or '.join(map(repr, KINDS))}")

    @property
    def centered(self) -> bool:
        return self.kind == "LayerNorm"

    @property
    def offset(self) -> float:
        """Gamma minus the stored weight."""
        return float(self.zero_centered_gamma)

    @property
    def constants(self) -> tuple[float, bool, float]:
        return self.eps, self.centered, self.offset

    def add_parameters(self, module: QuantizedModule, prefix: str = "") -> None:
        """Register `weight` and `bias` (None for RMSNorm) on a module, with names that start with `prefix`."""
        module.add_vector(prefix + "weight", self.size, 0.0 if self.zero_centered_gamma else 1.0)
        if self.zero_centered_gamma:
            module.zero_centered_gammas = (prefix + "weight",)
        if self.kind == "LayerNorm":
            module.add_vector(prefix + "bias", self.size, 0.0)
        else:
            module.register_parameter(prefix + "bias", None)

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Normalize x [..., size], in its dtype."""
        self.check(x)
        if kernel_dispatch.has_float_kernels(x, weight, bias):
            out, _ = _KernelNorm.apply(x, None, weight, bias, self)
        else:
            out = _OracleNorm.apply(x, weight, bias, *self.constants)
        return cast(Tensor, out)

    def with_residual(self, x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Return residual + x [..., size] normalized, and the sum."""
        self.check(x)
        same_layout = x.shape == residual.shape and x.dtype == residual.dtype
        if same_layout and kernel_dispatch.has_float_kernels(x, residual, weight, bias):
            out, total = _KernelNorm.apply(x, residual, weight, bias, self)
            return out, total
        total = residual + x
        return self(total, weight, bias), total

    def check(self, x: Tensor) -> None:
        """Raise ConfigurationError if the last dim of x is not `size`."""
        # a last dim of 1 would be broadcast
        if x.shape[-1] != self.size:
            raise ConfigurationError(f"{self.kind}: the last dim of an input {tuple(x.shape)} must be {self.size}")

    def __str__(self) -> str:
        centered = ", zero_centered_gamma=True" if self.zero_centered_gamma else ""
        return f"{self.kind}({self.size}, eps={self.eps:g}{centered})"


class _NormModule(QuantizedModule):
    """Base of LayerNorm and RMSNorm."""

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float = 1e-5,
        sequence_parallel: bool = False,
        params_dtype: torch.dtype | None = None,
        zero_centered_gamma: bool = False,
        *,
        tp_group: dist.ProcessGroup | None = None,
        tp_size: int = 1,
        tp_mesh: DeviceMesh | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        kind = "LayerNorm" if isinstance(self, LayerNorm) else "RMSNorm"
        super().__init__(device, params_dtype, TensorParallelConfig(tp_group, tp_size, sequence_parallel, tp_mesh))
        sizes = normalized_shape if isinstance(normalized_shape, Sequence) else [normalized_shape]
        if len(sizes) != 1:
            raise ConfigurationError(f"{kind}({normalized_shape}): only the last dim is normalized; flatten the others")
        self.normalization = Normalization(kind, sizes[0], eps, zero_centered_gamma)
        self.normalization.add_parameters(self)

    def forward(self, inp: Tensor) -> Tensor:
        """Normalize the input [..., size] -> the same shape and dtype, or the dtype of `torch.autocast`."""
        inp = self._input(inp)
        if self.sequence_parallel and self.tp_mesh is None and world() is not None and dist.get_world_size() > 1:
            raise ConfigurationError(f"{self.normalization.kind}(sequence_parallel=True) needs tp_mesh or tp_group")
        weight, bias = self.whole_on_rows("weight", "bias")
        if weight.is_meta and not inp.is_meta:
            raise checks.no_values(self.label("weight"))
        return self.normalization(inp, weight, bias)

    def extra_repr(self) -> str:
        return str(self.normalization).partition("(")[2].removesuffix(")")


class LayerNorm(_NormModule):
    """Layer normalization over the last dim: y = (x - mean) / sqrt(var + eps) * weight + bias, in float32.

    Args:
        normalized_shape: size of the last dim, or a sequence of that one size.
        eps: constant added to the variance.
        params_dtype: dtype of the parameters. Default: torch's default dtype.
        zero_centered_gamma: multiply by 1 + weight, with a weight initialized to 0.
        sequence_parallel: the input's rows (dim 0) are sharded over the tensor-parallel ranks, so the gradients of the
            parameters are summed over these ranks.
        tp_group, tp_size, tp_mesh: see `module_meshes.TensorParallelConfig`; the parameters are replicated.
        device: device of the parameters; "meta" leaves the initialization to `reset_parameters`.
    """


class RMSNorm(_NormModule):
    """Root mean square normalization over the last dim: y = x / sqrt(mean(x**2) + eps) * weight, in float32. Arguments:
    see `LayerNorm`."""


# Heads of queries and keys --------------------------------------------------------------------------------------------


class L2Normalization(CompositeModule):
    """L2 normalization over the last dim, in float32, rounded once: y = x / sqrt(sum(x**2) + eps)."""

    def __init__(self, eps: float) -> None:
        super().__init__()
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalize x [..., size], keeping its shape and dtype."""
        high = x.float()
        return (high * torch.rsqrt(high.square().sum(-1, keepdim=True) + self.eps)).to(x.dtype)

    def extra_repr(self) -> str:
        return f"eps={self.eps:g}"


def head_norm(owner: str, kind: str | None, size: int, eps: float, **options: Any) -> Any:
    """Create the normalization of queries or keys before the core attention, head by head; None if `kind` is None.
    "RMSNorm" and "LayerNorm" have one weight of `size` features for all heads. "L2Normalization" has none."""
    if kind is None:
        return None
    if kind == "L2Normalization":
        return L2Normalization(eps)
    if kind not in KINDS:
        raise ConfigurationError(f"{owner}(qk_norm_type={kind!r}): choose L2Normalization, RMSNorm, LayerNorm, or None")
    return (RMSNorm if kind == "RMSNorm" else LayerNorm)(size, eps, **options)
