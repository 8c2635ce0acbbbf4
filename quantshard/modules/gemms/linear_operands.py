"""Operands of the GEMMs of one linear layer, quantized from its input, its weights and its output gradients.

fprop reads an input and dgrad an output gradient; wgrad reads both, quantized along tokens. One kernel quantizes both
forms in one pass over the values. Without kernels, and for pieces under tensor parallelism, they are quantized one
after the other.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor

from quantshard import kernel_dispatch, kernels, private_torch
from quantshard.gemm import operands, scaled_products
from quantshard.gemm.operands import Operand, OperandSplit, OperandUsage, quantized_cells, serves_both
from quantshard.gemm.weight_operands import WeightOperands
from quantshard.kernels import workspace
from quantshard.modules.contexts.recompute import LinearContext
from quantshard.modules.gemms.input_amax import input_amax
from quantshard.modules.gemms.linear_state import DelayedScale, GradientRandomBits, LinearState
from quantshard.modules.gemms.operand_watch import OperandWatch, watch
from quantshard.recipe import CellPair, QuantSpec, Recipe, TensorRole
from quantshard.tensor import observation
from quantshard.tensor.quantized_tensor import QuantizedTensor
from quantshard.tensor.storage import QuantizedStorage

if kernels.USABLE:
    from quantshard.gemm import producers
    from quantshard.gemm.producers import TensorSource
    from quantshard.kernels.fused.epilogue import KernelOutputs


@dataclass
class WgradOperand:
    """An operand of wgrad: [tokens, features], or its transpose if it is quantized along tokens.

    `split`: split along tokens, of which this rank keeps its piece until `whole` gathers the pieces; None: not split.
    `cell`, `words`: quantization and random bits of a piece that is still in high precision, because the split cuts a
    Hadamard block or a byte of codes (`operands.gathers_codes`).
    """

    operand: Operand
    transposed: bool
    split: OperandSplit | None = None
    cell: QuantSpec | None = None
    words: operands.RandomBitsFn | None = None

    def whole(self) -> WgradOperand:
        """Gather the pieces of all ranks. A collective call if the operand is split."""
        if self.split is None:
            return self
        if isinstance(self.operand, QuantizedStorage):
            return WgradOperand(operands.gather(self.operand, self.split), self.transposed)
        if self.cell is None:
            return WgradOperand(operands.gather_values(self.operand, self.split), self.transposed)
        whole = operands.quantize_and_gather(self.operand, self.cell, self.split, words=self.words)
        return WgradOperand(whole, self.transposed)


class GemmOperands(NamedTuple):
    """Operands of an input or output gradient [tokens, features]: `first` for fprop or dgrad, `second` for wgrad.

    `sums`: sums over tokens, float32. `nan_flag`: float32 scalar, NaN if not all values are finite, otherwise 0. Codes
    saturate, so an infinite gradient would come out finite, and the optimizer would not skip the step.
    """

    first: Operand
    second: WgradOperand
    sums: Tensor | None = None
    nan_flag: Tensor | None = None


def gemm_operands(
    values: Tensor | producers.OperandProducer,
    role: TensorRole,
    call: LinearContext,
    state: LinearState,
    wanted: OperandUsage,
    part: int = 0,
    weight_operands: WeightOperands | None = None,
) -> GemmOperands:
    """Quantize an input or output gradient [tokens, features] for its two GEMMs.

    If one quantization serves both GEMMs (square blocks, round to nearest), it runs once. An input whose tokens are
    split over ranks is not gathered for wgrad yet.

    `part`: index of the weight. `weight_operands`: the weights of the first GEMM, which the same kernel may swizzle.
    """
    if not isinstance(values, Tensor):
        return OperandRequest(role, call, state, wanted, part, values.like).of(values, weight_operands)
    values, pair = private_torch.plain(values), call.recipe.activations[role]
    split = state.split(role)
    if _fits_kernels(values, split, pair):
        return OperandRequest(role, call, state, wanted, part, values).of(TensorSource(values), weight_operands)
    first, second = pair
    delayed = DelayedScale.of(role, first or second, call, state, part)
    if delayed is not None and delayed.notes:
        delayed.note(values)
    amax = input_amax(values, role, call, split, wanted) if delayed is None else delayed.amax
    zero = torch.zeros((), dtype=torch.float32, device=values.device)
    nan_flag = torch.where(torch.isfinite(values).all(), zero, torch.nan) if wanted.nan_flag else None
    sums = values.float().sum(0) if wanted.sums else None
    random_bits = GradientRandomBits(state, part)
    watching = None if observation.active is None else watch(role, call, state.record, state.weights[part])
    first_operand, wgrad_operand = _in_pieces(values, role, first, second, split, amax, random_bits, wanted, watching)
    return GemmOperands(first_operand, wgrad_operand, sums, nan_flag)


def gradient_operands(
    grads: Sequence[Tensor],
    call: LinearContext,
    state: LinearState,
    wanted: Sequence[OperandUsage],
    weight_operands: WeightOperands | None = None,
) -> Iterator[GemmOperands]:
    """Quantize the output gradients [tokens, features] of a layer, one for each weight.

    One kernel quantizes adjacent gradients of equal shape, strides, dtype and usage. `weight_operands`: as in
    `gemm_operands`.
    """
    if len(grads) == 1:
        yield gemm_operands(grads[0], TensorRole.GRAD_OUTPUT, call, state, wanted[0], weight_operands=weight_operands)
        return
    pair = cells(call.recipe, TensorRole.GRAD_OUTPUT)

    def kind(part: int) -> Hashable:
        grad = grads[part]
        return grad.shape, grad.stride(), grad.dtype, wanted[part]

    for _, group in groupby(range(len(grads)), kind):
        parts = list(group)
        values = [private_torch.plain(grads[part]) for part in parts]
        if len(parts) == 1 or not _fits_kernels(values[0], state.split(TensorRole.GRAD_OUTPUT), pair):
            for part, value in zip(parts, values, strict=True):
                yield gemm_operands(value, TensorRole.GRAD_OUTPUT, call, state, wanted[part], part)
            continue
        requests = [
            OperandRequest(TensorRole.GRAD_OUTPUT, call, state, wanted[part], part, grads[part]) for part in parts
        ]
        yield from operands_together(
            requests, [TensorSource(value) for value in values], weight_operands if len(parts) == len(grads) else None
        )


def operands_together(
    asked: Sequence[OperandRequest], given: Sequence[TensorSource], weight_operands: WeightOperands | None = None
) -> list[GemmOperands]:
    """Run equal requests on several matrices of equal layout by one kernel, or two if amaxes must be measured first."""
    plan = asked[0].plan
    if weight_operands is not None and weight_operands.reads_together:
        given[0].swizzle = plan.swizzle_request(weight_operands)
    outputs = outputs_of(asked, given)
    all_targets = TensorSource.emit_all(given, outputs)
    value_sources: Sequence[TensorSource | None] = (
        given if plan.reads_values and not plan.by_amax else [None] * len(given)
    )
    results = [
        request.taken(kernel_outputs, targets, values)
        for request, kernel_outputs, targets, values in zip(asked, outputs, all_targets, value_sources, strict=True)
    ]
    for request, source, result in zip(asked, given, results, strict=True):
        if request.watching is not None:
            request.watching.see_both(source.values, result.first, result.second.operand, result.second.transposed)
    return results


def outputs_of(asked: Sequence[OperandRequest], given: Sequence[TensorSource]) -> list[KernelOutputs]:
    """Kernel arguments for several matrices in memory; amaxes that the plan needs are measured here."""
    plan = asked[0].plan
    if not plan.reads_values:
        return [request.outputs() for request in asked]
    nan_flags = [
        workspace.zero(request.device) if plan.raised and source.nan_flag is None else source.nan_flag
        for request, source in zip(asked, given, strict=True)
    ]
    amaxes = plan.measure(given, asked[0].known, nan_flags)
    return [
        request.outputs(amax_pair, nan_flag)
        for request, amax_pair, nan_flag in zip(asked, amaxes, nan_flags, strict=True)
    ]


def _fits_kernels(values: Tensor, split: OperandSplit | None, by: CellPair) -> bool:
    return split is None and kernel_dispatch.has_kernels(values) and producers.can_quantize(values.dtype, by)


def cells(recipe: Recipe, role: TensorRole) -> CellPair:
    """Quantization of an input or output gradient: for its first GEMM, and for wgrad."""
    return recipe.activations[role]


class OperandRequest:
    """Request to quantize an input or output gradient by kernels, for weight `part` of a layer.

    `like`: tensor with the shape and dtype of the values; no reference to it is kept.
    """

    def __init__(
        self, role: TensorRole, call: LinearContext, state: LinearState, wanted: OperandUsage, part: int, like: Tensor
    ) -> None:
        pair = call.recipe.activations[role]
        self.watching: OperandWatch | None = None
        if observation.active is not None:
            self.watching = watch(role, call, state.record, state.weights[part])
            if self.watching is not None:
                wanted = wanted._replace(passing=0)  # observers need codes, not dequantized values
        cell = pair[0] or pair[1]
        self.delayed = DelayedScale.of(role, cell, call, state, part) if call.recipe.is_delayed else None
        self.amaxes: dict[tuple[TensorRole, int], Tensor] | None = None
        amax = None if self.delayed is None else self.delayed.amax
        if role is TensorRole.INPUT and amax is None and operands.scales_by_one_amax(pair):
            self.amaxes = call.amaxes
            amax = None if wanted.first else call.amaxes.get((role, part))  # in backward: as measured by forward
        self.known = amax
        if (weight := call.recipe.weight) is None:  # the weight may have another dtype
            wanted = wanted._replace(passing=0)
        turned = role is TensorRole.GRAD_OUTPUT and weight is not None and not weight.format.serves_columns
        # a custom operator returns the components that the format stores
        as_stored = weight is None or self.watching is not None or workspace.separate.on
        kind = producers.operand_kind(like.dtype, scaled_products.capability_of(like.device), as_stored, turned)
        self.plan = producers.plan_operand(pair, wanted, amax is not None, like.shape, kind)
        self.wanted, self.device, self.features = wanted, like.device, like.shape[1]
        self.words = GradientRandomBits(state, part) if self.plan.draws else None

    def of(self, source: producers.OperandProducer, weight_operands: WeightOperands | None = None) -> GemmOperands:
        """Quantize a source in one pass, or in two if an amax must be measured first."""
        amaxes = source.known(self.plan)
        measured_source = source.measured(self.plan) if self.plan.reads_values and amaxes is None else None
        if measured_source is None:
            outputs = self.outputs(amaxes)
        else:
            (outputs,) = outputs_of([self], [measured_source])
        amax = (amaxes and amaxes[0]) if measured_source is None else measured_source.amax
        if self.amaxes is not None and amax is not None:
            self.amaxes[TensorRole.INPUT, 0] = amax.view(())
        emitter = source if measured_source is None else measured_source
        if weight_operands is not None and weight_operands.reads_together and isinstance(emitter, TensorSource):
            emitter.swizzle = self.plan.swizzle_request(weight_operands)
        result = self.taken(outputs, emitter.emit(outputs), measured_source)
        if self.watching is not None:
            values = (source.measured() if measured_source is None else measured_source).values
            self.watching.see_both(values, result.first, result.second.operand, result.second.transposed)
        return result

    def outputs(
        self, amaxes: producers.BothAmaxes | None = None, measured_nan_flag: Tensor | None = None
    ) -> KernelOutputs:
        """Kernel arguments. `amaxes`: measured ones (None: `self.known`). `measured_nan_flag`: set while measuring."""
        (first_plan, second_plan, *_, raised, _), delayed, device, random_bits = (
            self.plan,
            self.delayed,
            self.device,
            self.words,
        )
        amax, other_amax = (self.known, self.known) if amaxes is None else amaxes
        nan_flag = workspace.zero(device) if raised and measured_nan_flag is None else measured_nan_flag
        sums = amax_slot = first = second = None
        if delayed is not None and delayed.notes:
            amax_slot = delayed.slot(device)
        if self.wanted.sums:
            sums = torch.empty(self.features, dtype=torch.float32, device=device)
        if first_plan is not None:
            first = first_plan.request(amax, None if random_bits is None else random_bits.by_rows, nan_flag)
        if second_plan is not None:
            second = second_plan.request(other_amax, None if random_bits is None else random_bits.by_columns, nan_flag)
        return KernelOutputs(first, second, None, amax_slot, nan_flag if raised == "quantizing" else None, sums)

    def taken(
        self, outputs: KernelOutputs, targets: producers.Targets, given: TensorSource | None = None
    ) -> GemmOperands:
        """Wrap a kernel's outputs as operands. `given`: the input values, for a GEMM in high precision."""
        (first_plan, second_plan, *_, nan_flag, _, _), (target, transposed_target), wanted = (
            self.plan,
            targets,
            self.wanted,
        )
        values = None if given is None else given.values
        first: Operand | None = None if first_plan is None or target is None else first_plan.operand(target)
        second: Operand | None = (
            None if second_plan is None or transposed_target is None else second_plan.operand(transposed_target)
        )
        if first_plan is not None and target is not None and target.transposed is not None:
            second = first_plan.operand(target, transposed=True)
        wgrad_values = values if second is None and wanted.second else second
        if wgrad_values is None:
            wgrad_values = torch.empty(0, dtype=torch.float32, device="cpu")
        if first is None:  # two results of a custom operator may not alias
            first = torch.empty(0, dtype=torch.float32, device="cpu") if values is None else values
        return GemmOperands(
            first, WgradOperand(wgrad_values, second is not None),
            outputs.sums, outputs.nan_flag if nan_flag == "scalar" else None,
        )  # fmt: skip


def _in_pieces(
    values: Tensor,
    role: TensorRole,
    first: QuantSpec | None,
    second: QuantSpec | None,
    split: OperandSplit | None,
    amax: Tensor | None,
    words: GradientRandomBits,
    wanted: OperandUsage,
    watching: OperandWatch | None,
) -> tuple[Operand, WgradOperand]:
    """Run `gemm_operands` in plain PyTorch, also on a tensor-parallel piece."""
    quantized, _, shared = quantized_cells(first, second, wanted)
    token_split = split if split is not None and split.dim == 0 else None
    piece: Operand = values
    if quantized is not None:
        piece = _quantized(values, quantized, split, amax, words.by_rows)
    if watching is not None and (wanted.first or quantized is not None):
        watching.see(values, piece)
    first_operand = piece
    if token_split is not None and (wanted.first or (shared and role is not TensorRole.INPUT)):
        first_operand = _gathered(piece, token_split)
    if not wanted.second:
        return first_operand, WgradOperand(values.new_empty(0), False)  # not values[:0]: a view keeps all values alive
    if second is None or shared:
        wgrad_operand = WgradOperand(piece if shared else values, False, token_split)
    else:
        wgrad_operand = _transposed_operand(values.t(), second, split, amax, words.by_columns)
        if watching is not None:
            watching.see(values.t(), wgrad_operand.operand, for_wgrad=True)
    return first_operand, wgrad_operand if role is TensorRole.INPUT else wgrad_operand.whole()


def _quantized(
    values: Tensor, cell: QuantSpec, split: OperandSplit | None, amax: Tensor | None, words: operands.RandomBitsFn
) -> QuantizedStorage:
    """Quantize this rank's piece of an operand."""
    shape = (values.shape[0], values.shape[1])
    random_bits = words(operands.operand_shard(shape, cell, split)) if cell.scaling.stochastic_rounding else None
    known_amax = None if cell.format.is_local else amax
    return operands.quantize_operand(values, cell, amax=known_amax, words=random_bits, split=split)


def _gathered(piece: Operand, split: OperandSplit) -> Operand:
    return operands.gather_values(piece, split) if isinstance(piece, Tensor) else operands.gather(piece, split)


def _transposed_operand(
    values: Tensor, cell: QuantSpec, split: OperandSplit | None, amax: Tensor | None, words: operands.RandomBitsFn
) -> WgradOperand:
    """Build an operand of wgrad from transposed values [features, tokens]; `split`: split before transposing."""
    if split is None or split.dim == 1:  # pieces along features are not gathered
        return WgradOperand(_quantized(values, cell, split and split.transposed, amax, words), True)
    tokens = split.transposed
    if not operands.gathers_codes(cell, (values.shape[0], values.shape[1]), tokens):
        return WgradOperand(values, True, tokens, cell, words)
    return WgradOperand(_quantized(values, cell, tokens, amax, words), True, tokens)


def keeps_transposed(pair: CellPair, values: Tensor) -> bool:
    """Return whether `gemm_operands` returns wgrad's operand transposed, for values that are not split.

    `values`: the values, or any tensor of their dtype and device, also a traced one.
    """
    first, second = pair
    if second is None or not serves_both(first, second):
        return second is not None
    return kernel_dispatch.kernels_on(values.device) and producers.can_quantize(values.dtype, pair)


def weight_operand(weight: Tensor, part: int, call: LinearContext, state: LinearState) -> Operand:
    """Operand of a weight: its stored components, or a high-precision weight quantized now."""
    if isinstance(weight, QuantizedTensor):
        return weight.quantized_storage
    cell = call.recipe.weight
    if cell is None:
        return weight
    delayed = DelayedScale.of(TensorRole.WEIGHT, cell, call, state, part)
    if delayed is not None and delayed.notes:
        delayed.note(weight.detach())
    amax = None if delayed is None else delayed.amax
    quantized = operands.quantize_operand(weight, cell, amax=amax, split=state.weight_split)
    if observation.active is not None:
        watching = watch(TensorRole.WEIGHT, call, state.record, state.weights[part])
        if watching is not None:
            watching.see(weight.detach(), quantized)
    return quantized
