"""Operands of one linear layer's GEMMs: how its input, its weights and the gradients of its outputs are quantized.

An input is read by fprop and, quantized along tokens, by wgrad; an output gradient by dgrad and wgrad. Where kernels
run, both forms come from one read of the values; else, and for pieces under tensor parallelism, step by step.
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
    """An operand of wgrad: [tokens, features], or its transpose where it had to be quantized along tokens.

    `split`: this rank has a piece, cut along tokens, which `whole` gathers; only that is kept for backward. `cell`,
    `words`: the piece is in high precision still, since it can be quantized as a part of the whole only.
    """

    operand: Operand
    transposed: bool
    split: OperandSplit | None = None
    cell: QuantSpec | None = None
    words: operands.RandomBitsFn | None = None

    def whole(self) -> WgradOperand:
        """This operand with the pieces of all ranks: a collective call if it is split."""
        if self.split is None:
            return self
        if isinstance(self.operand, QuantizedStorage):
            return WgradOperand(operands.gather(self.operand, self.split), self.transposed)
        if self.cell is None:
            return WgradOperand(operands.gather_values(self.operand, self.split), self.transposed)
        whole = operands.quantize_and_gather(self.operand, self.cell, self.split, words=self.words)
        return WgradOperand(whole, self.transposed)


class GemmOperands(NamedTuple):
    """An input or output gradient [tokens, features] for its two GEMMs: as it stands, and for wgrad.

    `sums`: over tokens, float32. `nan_flag`: float32 scalar, NaN if not all values are finite, otherwise 0. Codes
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
    """An input or output gradient [tokens, features] for its two GEMMs.

    `part`: of which weight. Where one quantization serves both (square blocks, plain rounding), it is made once. An
    input whose tokens are spread over ranks is not gathered for wgrad yet. `rights`: the weights that the first of its
    operands is multiplied with, which the same kernel may lay out.
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
    words = GradientRandomBits(state, part)
    watching = None if observation.active is None else watch(role, call, state.record, state.weights[part])
    as_is, kept = _in_pieces(values, role, first, second, split, amax, words, wanted, watching)
    return GemmOperands(as_is, kept, sums, nan_flag)


def gradient_operands(
    grads: Sequence[Tensor],
    call: LinearContext,
    state: LinearState,
    wanted: Sequence[OperandUsage],
    weight_operands: WeightOperands | None = None,
) -> Iterator[GemmOperands]:
    """Gradients [tokens, features] of the outputs of a layer's weights, one for each: by one kernel those beside each
    other that are alike, else one at a time. `rights`: the weights, as of `gemm_operands`."""
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
        asked = [OperandRequest(TensorRole.GRAD_OUTPUT, call, state, wanted[part], part, grads[part]) for part in parts]
        yield from operands_together(
            asked, [TensorSource(value) for value in values], weight_operands if len(parts) == len(grads) else None
        )


def operands_together(
    asked: Sequence[OperandRequest], given: Sequence[TensorSource], weight_operands: WeightOperands | None = None
) -> list[GemmOperands]:
    """What is asked alike of several matrices that are alike: by one kernel, or two where amaxes must be known."""
    plan = asked[0].plan
    if weight_operands is not None and weight_operands.reads_together:
        given[0].swizzle = plan.swizzle_request(weight_operands)
    outputs = outputs_of(asked, given)
    found = TensorSource.emit_all(given, outputs)
    kept: Sequence[TensorSource | None] = given if plan.reads_values and not plan.by_amax else [None] * len(given)
    taken = [
        each.taken(told, targets, values)
        for each, told, targets, values in zip(asked, outputs, found, kept, strict=True)
    ]
    for each, source, made in zip(asked, given, taken, strict=True):
        if each.watching is not None:
            each.watching.see_both(source.values, made.first, made.second.operand, made.second.transposed)
    return taken


def outputs_of(asked: Sequence[OperandRequest], given: Sequence[TensorSource]) -> list[KernelOutputs]:
    """What a kernel is told for several matrices whose values are there, and whose amaxes are taken here if need be."""
    plan = asked[0].plan
    if not plan.reads_values:
        return [each.outputs() for each in asked]
    nan_flags = [
        workspace.zero(each.device) if plan.raised and source.nan_flag is None else source.nan_flag
        for each, source in zip(asked, given, strict=True)
    ]
    amaxes = plan.measure(given, asked[0].known, nan_flags)
    return [each.outputs(both, nan_flag) for each, both, nan_flag in zip(asked, amaxes, nan_flags, strict=True)]


def _fits_kernels(values: Tensor, split: OperandSplit | None, by: CellPair) -> bool:
    return split is None and kernel_dispatch.has_kernels(values) and producers.can_quantize(values.dtype, by)


def cells(recipe: Recipe, role: TensorRole) -> CellPair:
    """How an input or output gradient is quantized: as it stands, and for wgrad."""
    return recipe.activations[role]


class OperandRequest:
    """What kernels are asked for of an input or output gradient of one weight, part `part` of a layer.

    `like`: a tensor of its shape and dtype, which is not held.
    """

    def __init__(
        self, role: TensorRole, call: LinearContext, state: LinearState, wanted: OperandUsage, part: int, like: Tensor
    ) -> None:
        pair = call.recipe.activations[role]
        self.watching: OperandWatch | None = None
        if observation.active is not None:
            self.watching = watch(role, call, state.record, state.weights[part])
            if self.watching is not None:
                wanted = wanted._replace(passing=0)  # codes are looked at, not their values
        cell = pair[0] or pair[1]
        self.delayed = DelayedScale.of(role, cell, call, state, part) if call.recipe.is_delayed else None
        self.amaxes: dict[tuple[TensorRole, int], Tensor] | None = None
        known = None if self.delayed is None else self.delayed.amax
        if role is TensorRole.INPUT and known is None and operands.scales_by_one_amax(pair):
            self.amaxes = call.amaxes
            known = None if wanted.first else call.amaxes.get((role, part))  # backward: forward has measured it
        self.known = known
        if (weight := call.recipe.weight) is None:  # it may be of another dtype
            wanted = wanted._replace(passing=0)
        turned = role is TensorRole.GRAD_OUTPUT and weight is not None and not weight.format.serves_columns
        # an operator's results are what formats store
        stored = weight is None or self.watching is not None or workspace.separate.on
        kind = producers.operand_kind(like.dtype, scaled_products.capability_of(like.device), stored, turned)
        self.plan = producers.plan_operand(pair, wanted, known is not None, like.shape, kind)
        self.wanted, self.device, self.features = wanted, like.device, like.shape[1]
        self.words = GradientRandomBits(state, part) if self.plan.draws else None

    def of(self, source: producers.OperandProducer, weight_operands: WeightOperands | None = None) -> GemmOperands:
        """All that is wanted, from one read of the source, or from two where an amax must be known first."""
        known = source.known(self.plan)
        given = source.measured(self.plan) if self.plan.reads_values and known is None else None
        if given is None:
            outputs = self.outputs(known)
        else:
            (outputs,) = outputs_of([self], [given])
        measured = (known and known[0]) if given is None else given.amax
        if self.amaxes is not None and measured is not None:
            self.amaxes[TensorRole.INPUT, 0] = measured.view(())
        emitter = source if given is None else given
        if weight_operands is not None and weight_operands.reads_together and isinstance(emitter, TensorSource):
            emitter.swizzle = self.plan.swizzle_request(weight_operands)
        taken = self.taken(outputs, emitter.emit(outputs), given)
        if self.watching is not None:
            values = (source.measured() if given is None else given).values
            self.watching.see_both(values, taken.first, taken.second.operand, taken.second.transposed)
        return taken

    def outputs(
        self, amaxes: producers.BothAmaxes | None = None, measured_nan_flag: Tensor | None = None
    ) -> KernelOutputs:
        """Kernel arguments. `amaxes`: current ones (None: delayed scaling). `measured_nan_flag`: set while they were
        measured."""
        (one, two, *_, raised, _), delayed, device, words = self.plan, self.delayed, self.device, self.words
        amax, other_amax = (self.known, self.known) if amaxes is None else amaxes
        nan_flag = workspace.zero(device) if raised and measured_nan_flag is None else measured_nan_flag
        sums = noted = first = second = None
        if delayed is not None and delayed.notes:
            noted = delayed.slot(device)
        if self.wanted.sums:
            sums = torch.empty(self.features, dtype=torch.float32, device=device)
        if one is not None:
            first = one.request(amax, None if words is None else words.by_rows, nan_flag)
        if two is not None:
            second = two.request(other_amax, None if words is None else words.by_columns, nan_flag)
        return KernelOutputs(first, second, None, noted, nan_flag if raised == "quantizing" else None, sums)

    def taken(
        self, outputs: KernelOutputs, targets: producers.Targets, given: TensorSource | None = None
    ) -> GemmOperands:
        """What a kernel has made of a source; `given`: its values, where a GEMM takes them as they are."""
        (one, two, *_, nan_flag, _, _), (found, turned), wanted = self.plan, targets, self.wanted
        values = None if given is None else given.values
        first: Operand | None = None if one is None or found is None else one.operand(found)
        second: Operand | None = None if two is None or turned is None else two.operand(turned)
        if one is not None and found is not None and found.transposed is not None:
            second = one.operand(found, transposed=True)
        kept = values if second is None and wanted.second else second
        if kept is None:
            kept = torch.empty(0, dtype=torch.float32, device="cpu")
        if first is None:  # of an operator no two results may be one
            first = torch.empty(0, dtype=torch.float32, device="cpu") if values is None else values
        return GemmOperands(
            first, WgradOperand(kept, second is not None),
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
    """The same step by step, of a piece too."""
    quantized, _, shared = quantized_cells(first, second, wanted)
    spread = split if split is not None and split.dim == 0 else None
    piece: Operand = values
    if quantized is not None:
        piece = _quantized(values, quantized, split, amax, words.by_rows)
    if watching is not None and (wanted.first or quantized is not None):
        watching.see(values, piece)
    as_is = piece
    if spread is not None and (wanted.first or (shared and role is not TensorRole.INPUT)):
        as_is = _gathered(piece, spread)
    if not wanted.second:
        return as_is, WgradOperand(values.new_empty(0), False)  # not values[:0]: a view keeps all of them alive
    if second is None or shared:
        kept = WgradOperand(piece if shared else values, False, spread)
    else:
        kept = _transposed_operand(values.t(), second, split, amax, words.by_columns)
        if watching is not None:
            watching.see(values.t(), kept.operand, for_wgrad=True)
    return as_is, kept if role is TensorRole.INPUT else kept.whole()


def _quantized(
    values: Tensor, cell: QuantSpec, split: OperandSplit | None, amax: Tensor | None, words: operands.RandomBitsFn
) -> QuantizedStorage:
    """This rank's piece of an operand."""
    shape = (values.shape[0], values.shape[1])
    drawn = words(operands.operand_shard(shape, cell, split)) if cell.scaling.stochastic_rounding else None
    given = None if cell.format.is_local else amax
    return operands.quantize_operand(values, cell, amax=given, words=drawn, split=split)


def _gathered(piece: Operand, split: OperandSplit) -> Operand:
    return operands.gather_values(piece, split) if isinstance(piece, Tensor) else operands.gather(piece, split)


def _transposed_operand(
    values: Tensor, cell: QuantSpec, split: OperandSplit | None, amax: Tensor | None, words: operands.RandomBitsFn
) -> WgradOperand:
    """An operand of wgrad from the transposed values [features, tokens], of which `split` says how they were cut."""
    if split is None or split.dim == 1:  # features stay apart
        return WgradOperand(_quantized(values, cell, split and split.transposed, amax, words), True)
    tokens = split.transposed
    if not operands.gathers_codes(cell, (values.shape[0], values.shape[1]), tokens):
        return WgradOperand(values, True, tokens, cell, words)
    return WgradOperand(_quantized(values, cell, tokens, amax, words), True, tokens)


def keeps_transposed(pair: CellPair, values: Tensor) -> bool:
    """True if what `gemm_operands` gives for wgrad is of the transposed values, where these are not cut.

    `values`: or a tensor of their dtype and device, also one that is traced.
    """
    first, second = pair
    if second is None or not serves_both(first, second):
        return second is not None
    return kernel_dispatch.kernels_on(values.device) and producers.can_quantize(values.dtype, pair)


def weight_operand(weight: Tensor, part: int, call: LinearContext, state: LinearState) -> Operand:
    """A weight for the GEMM: as it is stored, or quantized now from high precision."""
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
