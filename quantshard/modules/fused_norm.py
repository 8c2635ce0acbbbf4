"""The normalization in front of layers that are fused with it: what it works on, its kernels, and its backward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from quantshard import kernels, private_torch
from quantshard.kernels import workspace
from quantshard.modules.gemms.functional import LinearBackward, LinearGradMask
from quantshard.modules.gemms.linear_operands import WgradOperand
from quantshard.modules.norm import Normalization, NormConfig, parameters_of
from quantshard.recipe import Recipe, TensorRole

if kernels.USABLE:
    from quantshard.gemm import producers
    from quantshard.gemm.producers import NormProducer, OperandProducer, TensorSource
    from quantshard.kernels.fused import epilogue
    from quantshard.kernels.fused import norm as norm_kernels


class NormInput(NamedTuple):
    """What a normalization works on: x [..., size], what is added to it before, and its parameters.

    Of x alone there is no normalization, for `mlp`.
    """

    x: Tensor
    residual: Tensor | None = None
    weight: Tensor | None = None
    bias: Tensor | None = None
    normalization: Normalization | None = None

    def normalized(self) -> tuple[Tensor, Tensor | None]:
        """The normalized rows, and x + residual, if that is there, in steps of their own."""
        if self.normalization is None or self.weight is None:
            return self.x, None
        if self.residual is None:
            return self.normalization(self.x, self.weight, self.bias), None
        return self.normalization.with_residual(self.x, self.weight, self.bias, self.residual)


class NormBackward(NamedTuple):
    """A normalization in backward: z = x + residual, the parameters, and the statistics of the rows of z.

    Where there is none, there are no tensors: what wgrad reads of x is kept by fc1.
    """

    z: Tensor
    weight: Tensor
    bias: Tensor | None
    rstd: Tensor
    mean: Tensor | None

    @staticmethod
    def of(front: NormInput, amax: Tensor | None, of_rows: producers.BothAmaxes) -> NormBackward:
        """With z of the shape of x: x itself if there is no residual. Normalized rows raise `amax` and `of_rows`."""
        if front.normalization is None or front.weight is None:
            return NO_NORM
        x, residual, rule = private_torch.plain(front.x), front.residual, front.normalization.rule
        other = None if residual is None else private_torch.plain(residual)
        plain = amax is None and of_rows[0] is None
        parameters = None if plain else parameters_of(front.weight, front.bias, rule)
        statistics, total = norm_kernels.norm_statistics(
            x, rule.eps, rule.centered, residual=other, parameters=parameters, amax=amax, of_rows=of_rows
        )
        return NormBackward(total, front.weight, front.bias, *statistics)

    def normalized(self, rule: NormConfig) -> NormProducer:
        """The normalized rows as a source, if there is a normalization."""
        parameters = parameters_of(self.weight, self.bias, rule)
        statistics = norm_kernels.NormStatistics(self.rstd, self.mean)
        return NormProducer(epilogue.matrix(self.z), statistics, parameters)

    def again(self, layer: LinearBackward, rule: NormConfig | None, needed: LinearGradMask) -> WgradOperand | None:
        """What wgrad of a layer reads of them, if backward is to make it."""
        return None if rule is None else layer.reread(lambda: self.normalized(rule), needed)

    def gradients(
        self, rule: NormConfig | None, dy: Tensor | None, of_total: Tensor | None, needs: Sequence[bool]
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Of z, weight and bias, from those of the normalized rows and of z; `needs`: of which."""
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
"""Where there is none."""


def enter(front: NormInput, recipe: Recipe, keeps: bool) -> tuple[NormBackward, OperandProducer]:
    """A normalization, and the source that it is for the layer behind it; without one, x is.

    Amaxes of all its results, or of rows and, if it `keeps` wgrad's operand, columns, are taken with the statistics.
    """
    if front.normalization is None:
        return NO_NORM, TensorSource(epilogue.matrix(private_torch.plain(front.x)))
    by = recipe.activations[TensorRole.INPUT]
    amax = workspace.zero(front.x.device) if producers.are_by_amax(by) else None
    of_rows = producers.row_amaxes(by, front.x, keeps)
    entered = NormBackward.of(front, amax, of_rows)
    source = entered.normalized(front.normalization.rule)
    source.amax, source.of_rows = amax, of_rows
    return entered, source
