"""The normalization before fused layers: its inputs, kernels and backward."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor

from quantshard import kernels, private_torch
from quantshard.kernels import workspace
from quantshard.modules.gemms.functional import LinearBackward
from quantshard.modules.gemms.linear_operands import WgradOperand
from quantshard.modules.norm import Normalization, NormConfig, parameters_of
from quantshard.recipe import Recipe, TensorRole

if kernels.USABLE:
    from quantshard.gemm import producers
    from quantshard.gemm.producers import OperandProducer, TensorSource
    from quantshard.kernels.fused import epilogue
    from quantshard.kernels.fused import norm as norm_kernels


class NormInput(NamedTuple):
    """Inputs of a normalization: x [..., size], the residual that is added to x first, and the parameters.

    With x alone there is no normalization, which `mlp` supports.
    """

    x: Tensor
    residual: Tensor | None = None
    weight: Tensor | None = None
    bias: Tensor | None = None
    normalization: Normalization | None = None

    def normalized(self) -> tuple[Tensor, Tensor | None]:
        """Return the normalized rows and x + residual (None without residual), computed without fusion."""
        if self.normalization is None or self.weight is None:
            return self.x, None
        if self.residual is None:
            return self.normalization(self.x, self.weight, self.bias), None
        return self.normalization.with_residual(self.x, self.weight, self.bias, self.residual)


class NormBackward(NamedTuple):
    """A normalization in backward: z = x + residual, the parameters, and the statistics of the rows of z.

    Without a normalization all fields are None, and fc1 keeps the operand that wgrad reads.
    """

    z: Tensor
    weight: Tensor
    bias: Tensor | None
    rstd: Tensor
    mean: Tensor | None

    @staticmethod
    def of(front: NormInput, amax: Tensor | None, of_rows: producers.BothAmaxes) -> NormBackward:
        """Compute z, which is x if there is no residual, and its statistics. The kernel raises `amax` and `of_rows` to
        the amaxes of the normalized rows."""
        if front.normalization is None or front.weight is None:
            return NO_NORM
        x, residual, rule = private_torch.plain(front.x), front.residual, front.normalization.rule
        plain_residual = None if residual is None else private_torch.plain(residual)
        plain = amax is None and of_rows[0] is None
        parameters = None if plain else parameters_of(front.weight, front.bias, rule)
        statistics, total = norm_kernels.norm_statistics(
            x, rule.eps, rule.centered, residual=plain_residual, parameters=parameters, amax=amax, of_rows=of_rows
        )
        return NormBackward(total, front.weight, front.bias, *statistics)

    def normalized(self, rule: NormConfig) -> OperandProducer:
        """Return the normalized rows as an operand source."""
        rows, parameters = epilogue.matrix(self.z), parameters_of(self.weight, self.bias, rule)
        statistics = norm_kernels.NormStatistics(self.rstd, self.mean)
        return OperandProducer(rows, partial(norm_kernels.normalize_and_quantize, rows, statistics, parameters))

    def again(self, layer: LinearBackward, rule: NormConfig | None) -> WgradOperand | None:
        """Return the operand of a layer's wgrad, or None if forward kept it."""
        return None if rule is None else layer.reread(lambda: self.normalized(rule))

    def gradients(
        self, rule: NormConfig | None, dy: Tensor | None, of_total: Tensor | None, needs: Sequence[bool]
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Return the gradients of z, weight and bias that `needs` selects; `dy`, `of_total`: gradients of the
        normalized rows and of z."""
        if rule is None:
            return dy if needs[0] else None, None, None
        if dy is None:
            return of_total if needs[0] else None, None, None
        dz, dweight, dbias = norm_kernels.norm_backward(
            dy, self.z, norm_kernels.NormStatistics(self.rstd, self.mean),
            parameters_of(self.weight, self.bias, rule),
            residual_gradient=None if of_total is None else private_torch.plain(of_total),
            for_parameters=needs[1] or needs[2],
        )  # fmt: skip
        return (
            dz if needs[0] else None,
            None if dweight is None or not needs[1] else dweight.to(self.weight.dtype),
            None if dbias is None or self.bias is None or not needs[2] else dbias.to(self.bias.dtype),
        )


NO_NORM: Any = NormBackward(*[None] * len(NormBackward._fields))  # type: ignore[arg-type]
"""The value without a normalization."""


def enter(front: NormInput, recipe: Recipe, keeps: bool) -> tuple[NormBackward, OperandProducer]:
    """Start a normalization; returns its state for backward and the operand source of the next layer (x without
    normalization).

    The kernel that computes the statistics also takes the amaxes that quantizing needs: of all results, or of each row
    and, if wgrad's operand is kept (`keeps`), of each column.
    """
    if front.normalization is None:
        return NO_NORM, TensorSource(epilogue.matrix(private_torch.plain(front.x)))
    specs = recipe.activations[TensorRole.INPUT]
    amax = workspace.zero(front.x.device) if producers.are_by_amax(specs) else None
    of_rows = producers.row_amaxes(specs, front.x, keeps)
    norm = NormBackward.of(front, amax, of_rows)
    source = norm.normalized(front.normalization.rule)
    source.amax, source.of_rows = amax, of_rows
    return norm, source
