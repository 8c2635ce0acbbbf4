"""LayerNorm and RMSNorm, as modules and as the first part of a fused one.

    LayerNorm   y = (x - mean(x)) / sqrt(var(x) + eps) * gamma + beta
    RMSNorm     y = x / sqrt(mean(x**2) + eps) * gamma

over the last dim, in float32 whatever the dtypes, rounded once to the dtype of x. With `zero_centered_gamma` the stored
weight is gamma - 1, so that it starts at 0 and weight decay pulls gamma towards 1. Weights and biases are never
quantized. For backward only the input is kept, and by kernels its statistics, two numbers a row, which plain PyTorch
takes again.

A second derivative is always that of the formulas in PyTorch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor

from quantshard import kernel_dispatch, kernels, private_torch
from quantshard.argument_kinds import NUMBER, SIZES, check_arguments
from quantshard.collectives.process_groups import world
from quantshard.errors import ConfigurationError
from quantshard.modules.base.module import QuantizedModule
from quantshard.modules.base.shared_arguments import parallelism, shows_parallelism

if kernels.USABLE:
    from quantshard.kernels.fused import epilogue
    from quantshard.kernels.fused import norm as norm_kernel

KINDS = ("LayerNorm", "RMSNorm")


class NormConfig(NamedTuple):
    """Which normalization: with centering LayerNorm, without it RMSNorm; gamma is the weight plus `offset`."""

    eps: float
    centered: bool
    offset: float


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, zero_centered_gamma: bool = False) -> Tensor:
    """LayerNorm over the last dim of x [..., size]; weight and bias are [size]."""
    return _normalize(x, weight, bias, NormConfig(eps, True, float(zero_centered_gamma)))


def rms_norm(x: Tensor, weight: Tensor, eps: float, zero_centered_gamma: bool = False) -> Tensor:
    """RMSNorm over the last dim of x [..., size]; weight is [size]."""
    return _normalize(x, weight, None, NormConfig(eps, False, float(zero_centered_gamma)))


def _normalize(x: Tensor, weight: Tensor, bias: Tensor | None, rule: NormConfig) -> Tensor:
    if kernel_dispatch.has_float_kernels(x, weight, bias):
        out, _ = _KernelNorm.apply(x, None, weight, bias, rule)
    else:
        out = _OracleNorm.apply(x, weight, bias, *rule)
    return cast(Tensor, out)


def _add_and_normalize(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, rule: NormConfig
) -> tuple[Tensor, Tensor]:
    """The normalized sum, and the sum."""
    alike = x.shape == residual.shape and x.dtype == residual.dtype
    if alike and kernel_dispatch.has_float_kernels(x, residual, weight, bias):
        out, total = _KernelNorm.apply(x, residual, weight, bias, rule)
        return out, total
    total = residual + x
    return _normalize(total, weight, bias, rule), total


def _unit(x: Tensor, eps: float, centered: bool) -> tuple[Tensor, Tensor]:
    """x of float32 with its rows centered (LayerNorm only) and scaled to mean square 1, and the scales [..., 1]."""
    if centered:
        x = x - x.mean(-1, keepdim=True)
    scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return x * scale, scale


class NormGradMask(NamedTuple):
    """Of which inputs gradients are needed."""

    x: bool
    weight: bool
    bias: bool


Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]
"""Of x, weight and bias."""


def _gradients(
    dy: Tensor, x: Tensor, weight: Tensor, bias_dtype: torch.dtype | None, rule: NormConfig, needed: NormGradMask
) -> Gradients:
    unit, scale = _unit(x.float(), rule.eps, rule.centered)
    dy = dy.float()
    dx = dweight = dbias = None
    if needed.x:
        dunit = dy * (weight.float() + rule.offset)
        dx = dunit - unit * (dunit * unit).mean(-1, keepdim=True)
        if rule.centered:
            dx = dx - dunit.mean(-1, keepdim=True)
        dx = (dx * scale).to(x.dtype)
    if needed.weight:
        dweight = (dy * unit).reshape(-1, x.shape[-1]).sum(0).to(weight.dtype)
    if needed.bias and bias_dtype is not None:
        dbias = dy.reshape(-1, x.shape[-1]).sum(0).to(bias_dtype)
    return dx, dweight, dbias


class _OracleNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, centered: bool, offset: float
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.rule = NormConfig(eps, centered, offset)
        ctx.bias_dtype = None if bias is None else bias.dtype
        out = _unit(x.float(), eps, centered)[0] * (weight.float() + offset)
        if bias is not None:
            out = out + bias.float()
        return private_torch.cast(out, x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None, None]:
        x, weight = ctx.saved_tensors
        found = _gradients(grads[0], x, weight, ctx.bias_dtype, ctx.rule, NormGradMask(*ctx.needs_input_grad[:3]))
        return *found, None, None, None


def parameters_of(weight: Tensor, bias: Tensor | None, rule: NormConfig) -> norm_kernel.NormParameters:
    """The parameters of a normalization as its kernels take them."""
    return norm_kernel.NormParameters(weight.contiguous(), None if bias is None else bias.contiguous(), rule.offset)


class _KernelNorm(torch.autograd.Function):
    """The same by kernels: x, or x + residual, normalized; and that sum, or None.

    The gradient of the sum, which a residual connection reads again, is added in the kernel of backward.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, rule: NormConfig
    ) -> tuple[Tensor, Tensor | None]:
        ctx.set_materialize_grads(False)
        x = private_torch.plain(x)
        other = None if residual is None else private_torch.plain(residual)
        statistics, total = norm_kernel.norm_statistics(x, rule.eps, rule.centered, residual=other)
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        outputs = epilogue.KernelOutputs(high=epilogue.matrix(out))
        parameters = parameters_of(weight, bias, rule)
        norm_kernel.normalize_and_quantize(epilogue.matrix(total), statistics, parameters, outputs)
        ctx.save_for_backward(total, weight, bias, *statistics)
        ctx.rule = rule
        return out, None if residual is None else total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        dy, of_sum = grads
        z, weight, bias, *statistics = ctx.saved_tensors
        needed = NormGradMask(any(ctx.needs_input_grad[:2]), *ctx.needs_input_grad[2:4])
        bias_dtype = None if bias is None else bias.dtype
        if dy is None:
            dx, dweight, dbias = of_sum, None, None
        elif torch.is_grad_enabled():  # create_graph=True: kernels have no derivative
            dx, dweight, dbias = _gradients(dy, z, weight, bias_dtype, ctx.rule, needed)
            dx = dx if dx is None or of_sum is None else dx + of_sum
        else:
            dx, dweight, dbias = norm_kernel.norm_backward(
                private_torch.plain(dy),
                z,
                norm_kernel.NormStatistics(*statistics),
                parameters_of(weight, bias, ctx.rule),
                residual_gradient=None if of_sum is None else private_torch.plain(of_sum),
                for_parameters=needed.weight or needed.bias,
            )
            dweight = None if dweight is None else dweight.to(weight.dtype)
            dbias = None if dbias is None else dbias.to(bias_dtype)
        return dx, dx if ctx.needs_input_grad[1] else None, dweight, dbias, None


@dataclass(frozen=True)
class Normalization:
    """How a module normalizes rows of `size` elements, with parameters that the module owns.

    `rule`: the numbers that it is computed by.

    Raises:
        ConfigurationError: `kind` is not one of `KINDS`.
    """

    kind: str
    size: int
    eps: float
    zero_centered_gamma: bool
    rule: NormConfig = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if self.kind not in tuple(KINDS):
            raise ConfigurationError(f"normalization={self.kind!r} is not known; use {' or '.join(map(repr, KINDS))}")
        check_arguments(self.kind, NUMBER, eps=self.eps)
        rule = NormConfig(self.eps, self.kind == "LayerNorm", float(self.zero_centered_gamma))
        object.__setattr__(self, "rule", rule)  # no cached property: Dynamo cannot trace one on Python 3.11

    def add_parameters(self, module: QuantizedModule, prefix: str = "") -> None:
        """Register `weight` and, for LayerNorm, `bias` (else None), their names behind `prefix`."""
        module.add_vector(prefix + "weight", self.size, 0.0 if self.zero_centered_gamma else 1.0)
        if self.zero_centered_gamma:
            module.zero_centered_gammas = (prefix + "weight",)
        if self.kind == "LayerNorm":
            module.add_vector(prefix + "bias", self.size, 0.0)
        else:
            module.register_parameter(prefix + "bias", None)

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """x [..., size] normalized, in its dtype."""
        self.check(x)
        return _normalize(x, weight, bias, self.rule)

    def with_residual(self, x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor) -> tuple[Tensor, Tensor]:
        """residual + x [..., size], normalized; and that sum."""
        self.check(x)
        return _add_and_normalize(x, residual, weight, bias, self.rule)

    def check(self, x: Tensor) -> None:
        """Raise ConfigurationError if the rows of x are not of `size` elements."""
        if x.shape[-1] != self.size:  # else a last dim of 1 would be broadcast
            raise ConfigurationError(
                f"{self.kind} of {self.size} elements got an input of shape {tuple(x.shape)}; its last dim must be "
                f"{self.size}"
            )

    def __str__(self) -> str:
        centered = ", zero_centered_gamma=True" if self.zero_centered_gamma else ""
        return f"{self.kind}({self.size}, eps={self.eps:g}{centered})"


class _NormModule(QuantizedModule):
    """What LayerNorm and RMSNorm share; the class's name is the kind."""

    @shows_parallelism(before="device")
    def __init__(
        self,
        normalized_shape: int | Sequence[int] | None = None,
        eps: float = 1e-5,
        sequence_parallel: bool | None = None,
        params_dtype: torch.dtype | None = None,
        zero_centered_gamma: bool = False,
        hidden_size: int | Sequence[int] | None = None,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **others: Any,
    ) -> None:
        kind = "LayerNorm" if isinstance(self, LayerNorm) else "RMSNorm"
        if None not in (params_dtype, dtype) and params_dtype != dtype:
            raise ConfigurationError(
                f"{kind}(params_dtype={params_dtype}, dtype={dtype}): they mean the same; give one"
            )
        asked = parallelism(kind, {**others, "sequence_parallel": bool(sequence_parallel)}, "_NormModule")
        super().__init__(device, params_dtype or dtype, asked)
        self.normalization = Normalization(kind, _size(kind, normalized_shape, hidden_size), eps, zero_centered_gamma)
        self.normalization.add_parameters(self)

    def forward(self, inp: Tensor) -> Tensor:
        """Input [..., size] -> the same shape and dtype, or that of `torch.autocast`.

        Raises:
            ConfigurationError: rows are spread over ranks (`sequence_parallel`), but it is not known which; or the
                input is a DTensor, or not of a floating dtype.
        """
        inp = self._input(inp)
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
        tp_group, tp_size, tp_mesh, weight_mesh: see `module_meshes.TensorParallelConfig`; the parameters are whole on
            every rank.
        device: where the parameters are made; "meta" leaves them to `reset_parameters`.
    """


class RMSNorm(_NormModule):
    """y = x / sqrt(mean(x**2) + eps) * weight over the last dim, in float32. Arguments: those of `LayerNorm`."""


def _size(kind: str, shape: int | Sequence[int] | None, hidden_size: int | Sequence[int] | None) -> int:
    if (shape is None) == (hidden_size is None):
        raise ConfigurationError(f"{kind} needs the size of the last dim, once: normalized_shape or hidden_size")
    given = hidden_size if shape is None else shape
    check_arguments(kind, SIZES, **{"hidden_size" if shape is None else "normalized_shape": given})
    sizes: list[Any] = list(given) if isinstance(given, Iterable) else [given]
    if len(sizes) != 1:
        raise ConfigurationError(
            f"{kind}({given}): only the last dim is normalized; flatten the last {len(sizes)} dims"
        )
    size: int = sizes[0]
    return size
