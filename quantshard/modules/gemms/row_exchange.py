"""Exchange of rows with the ranks of their experts, before or after a product of experts.

Rows are sent as codes if an expert has one scale for all its rows: the ranks reduce the amaxes of all experts first.
On request, rows with scales of their own are sent as codes too. Other rows are sent in their own dtype.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from quantshard import kernel_dispatch, kernels, numerics
from quantshard.collectives.flat_max import FlatMax
from quantshard.distributed.experts import TokenRoute
from quantshard.formats import ALL, Orientation
from quantshard.gemm import operands
from quantshard.modules.contexts.recompute import LinearContext
from quantshard.recipe import QuantSpec, TensorRole
from quantshard.tensor import observation

if kernels.USABLE:
    from quantshard.kernels.experts import grouped as grouped_kernel
    from quantshard.kernels.experts.segments import ExpertSegments
    from quantshard.kernels.quantize.amax import scales as scales_by_kernel


class ExpertCodes(NamedTuple):
    """Codes of the rows of this rank's experts, uint8 [rows, features], and the scale of each, float32 (may be NaN)."""

    codes: Tensor
    scales: Tensor
    spec: QuantSpec


class RowExchange(NamedTuple):
    """The exchange of rows before or after a product of experts, along a route.

    `role`: INPUT: the input has the tokens of this rank, which are sent to their experts before the product.
    GRAD_OUTPUT: outputs are sent back after the product, and in backward their gradients to the experts.
    `as_codes`: whether rows with scales of their own are sent as codes; see `distribute_experts`.
    """

    route: TokenRoute | None
    role: TensorRole
    as_codes: bool = False

    def receive(
        self, values: Tensor, role: TensorRole, call: LinearContext, needs_values: bool = False
    ) -> Tensor | ExpertCodes:
        """Return the operand of this role, with the rows of this rank's experts. A collective call."""
        route = self.route
        if route is None or role is not self.role:
            return values
        index = route.order // route.choices if role is TensorRole.INPUT else None
        values = values / len(route.sent) if index is None else values
        spec = None if needs_values or len(route.sent) == 1 else _spec_of_codes(call, role)
        if spec is not None:
            return _exchanged_codes(values, index, spec, role, route)
        spec = None if needs_values or not self.as_codes else _spec_of_rows(call, role, values.dtype)
        if spec is not None:
            return _rounded_rows(values, index, spec, role, route)
        return route.exchange(values if index is None else values[index], True)

    def send_back(self, values: Tensor, role: TensorRole) -> Tensor:
        """Return the result of the product that reads the operand of this role. A collective call."""
        if self.route is None or role is self.role:
            return values
        if role is TensorRole.INPUT:
            return self.route.exchange(values, False)
        return self.route.sums_of(self.route.exchange(values * len(self.route.sent), False))


NO_EXCHANGE: Final = RowExchange(None, TensorRole.INPUT)


def _spec_of_codes(call: LinearContext, role: TensorRole) -> QuantSpec | None:
    """Return how rows of this role are quantized if the sender gets the same bits; otherwise None."""
    spec, second = call.recipe.activations[role]
    # observers compare codes with values, and context parallelism shares amaxes with other ranks
    if spec is None or observation.active is not None or call.sequence_group is not None:
        return None
    copy, scaling = spec.format.copies[Orientation.ROWWISE], spec.scaling
    has_one_scale = copy.block == (ALL, ALL) and copy.codes.encoding.bits == 8 and operands.serves_both(spec, second)
    needs_rows = scaling.history or scaling.stochastic_rounding or scaling.random_hadamard
    return spec if has_one_scale and not needs_rows else None


def _spec_of_rows(call: LinearContext, role: TensorRole, dtype: torch.dtype) -> QuantSpec | None:
    """Return how rows of this role are quantized, if with scales of their own, and exactly in `dtype`; or None."""
    spec, _ = call.recipe.activations[role]
    if spec is None or dtype not in (torch.bfloat16, torch.float32):
        return None
    copy, scaling = spec.format.copies[Orientation.ROWWISE], spec.scaling
    has_powers = scaling.power_of_two or copy.scale.encoding.bits == 8
    fits = copy.block[0] == 1 and copy.amax is None and copy.codes.encoding.bits == 8 and has_powers
    return spec if fits and not (scaling.stochastic_rounding or scaling.random_hadamard) else None


def _rounded_rows(values: Tensor, index: Tensor | None, spec: QuantSpec, role: TensorRole, route: TokenRoute) -> Tensor:
    """Send the rows `values[index]` as codes and scales, and return the rows that these represent."""
    copy, parts = spec.format.copies[Orientation.ROWWISE], operands.quantize_operand(values, spec).components
    if role is TensorRole.GRAD_OUTPUT:
        # codes saturate, which would hide a gradient that is not finite
        scales, is_finite = parts[copy.scale.name], values.isfinite().all(1, keepdim=True)
        parts[copy.scale.name] = scales.masked_fill(~is_finite, torch.nan if scales.is_floating_point() else 255)
    parts = {name: route.exchange(part if index is None else part[index], True) for name, part in parts.items()}
    shape = parts[copy.codes.name].shape[0], values.shape[1]
    return kernel_dispatch.dequantize(copy, parts, shape, dtype=values.dtype)


def _exchanged_codes(
    values: Tensor, index: Tensor | None, spec: QuantSpec, role: TensorRole, route: TokenRoute
) -> ExpertCodes:
    """Quantize the rows `values[index]` with a scale for each expert over all ranks, and send the codes."""
    copy, on_kernels = spec.format.copies[Orientation.ROWWISE], kernel_dispatch.has_float_kernels(values)
    if on_kernels:
        segments = ExpertSegments.of(route.counts, values.device)
        amaxes = grouped_kernel.expert_amaxes(values, segments, index)
    else:
        parts = (values if index is None else values[index]).split(route.counts)
        amaxes = torch.cat([numerics.block_amax(part, (ALL, ALL)).view(1) for part in parts])
    reduction = FlatMax()
    reduction.add(amaxes, route.group)
    reduction.reduce()
    if on_kernels:
        scales, multipliers = scales_by_kernel(amaxes, copy, spec.scaling, values.dtype)
        codes = grouped_kernel.quantize_expert_rows(values, segments, copy.codes.encoding, multipliers, index=index)
    else:
        storages = [operands.quantize_operand(part, spec, amax=amax) for part, amax in zip(parts, amaxes, strict=True)]
        codes, scales = (torch.cat([part.components[c.name] for part in storages]) for c in (copy.codes, copy.scale))
    del values
    if role is TensorRole.GRAD_OUTPUT:
        scales = torch.where(amaxes.isfinite(), scales.view(-1), torch.nan)
    local_scales = scales.view(len(route.sent), -1)[dist.get_rank(route.group)]
    return ExpertCodes(route.exchange(codes, True), local_scales, spec)
