"""Operands of the GEMMs of one linear layer, quantized from its input, its weights and its output gradients.

fprop reads an input and dgrad an output gradient; wgrad reads both, quantized along tokens. One kernel quantizes both
forms in one pass over the values. Without kernels, and for pieces under tensor parallelism, they are quantized one
after the other.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quantshard import kernels, private_torch
from quantshard.collectives.flat_max import FlatMax
from quantshard.gemm import operands
from quantshard.gemm.backend import WeightOperands
from quantshard.gemm.operands import Operand, OperandSplit, OperandUsage, RandomBitsFn
from quantshard.kernels import workspace
from quantshard.modules.contexts import pending_amaxes
from quantshard.modules.contexts.recompute import LinearContext
from quantshard.modules.gemms.linear_state import DelayedScale, GradientRandomBits, LinearState
from quantshard.recipe import QuantSpec, TensorRole
from quantshard.tensor import observation
from quantshard.tensor.observation import STACK_KEY, OperandWatch
from quantshard.tensor.parameter_state import RNG_KEY
from quantshard.tensor.quantized_tensor import QuantizedTensor
from quantshard.tensor.storage import QuantizedStorage

if kernels.USABLE:
    from quantshard.gemm import producers
    from quantshard.gemm.producers import NanFlag, OperandProducer
    from quantshard.kernels.fused.epilogue import KernelOutputs


@dataclass
class WgradOperand:
    """An operand of wgrad: [tokens, features], or its transpose if it is quantized along tokens.

    `split`: split along tokens, of which this rank keeps its piece until `whole` gathers the pieces; None: not split.
    `spec`, `words`: quantization and random bits of a piece that is still in high precision, because the split cuts a
    Hadamard block or a byte of codes (`operands.gathers_codes`).
    """

    operand: Operand
    transposed: bool
    split: OperandSplit | None = None
    spec: QuantSpec | None = None
    words: RandomBitsFn | None = None

    def whole(self) -> WgradOperand:
        """Gather the pieces of all ranks. A collective call if the operand is split."""
        if self.split is None:
            return self
        whole = operands.gather(self.operand, self.split)
        if self.spec is not None:
            whole = operands.quantize_operand(whole, self.spec, words=self.words)
        return WgradOperand(whole, self.transposed)


class GemmOperands(NamedTuple):
    """Operands of an input [tokens, features], for fprop and wgrad, or of an output gradient, for dgrad and wgrad.

    `sums`: sums over tokens, float32. `nan_flag`: float32 scalar, NaN if not all values are finite, otherwise 0. Codes
    saturate, so an infinite gradient would come out finite, and the optimizer would not skip the step.
    """

    for_first_gemm: Operand
    for_wgrad: WgradOperand
    sums: Tensor | None = None
    nan_flag: Tensor | None = None


def gemm_operands(
    values: Tensor | OperandProducer,
    role: TensorRole,
    call: LinearContext,
    state: LinearState,
    usage: OperandUsage,
    weight_index: int = 0,
    weight_operands: WeightOperands | None = None,
) -> GemmOperands:
    """Quantize an input or output gradient [tokens, features] for its two GEMMs, once if that serves both.

    An input whose tokens are split over ranks is not gathered for wgrad yet. `weight_operands`: the weights of the
    first GEMM, which the same kernel may swizzle.
    """
    if isinstance(values, Tensor):
        like = values = values if type(values) is Tensor else private_torch.plain(values)
    else:
        like = values.prototype
    return OperandRequest(role, call, state, usage, weight_index, like).run(values, weight_operands)


def gradient_operands(
    grads: Sequence[Tensor],
    call: LinearContext,
    state: LinearState,
    usages: Sequence[OperandUsage],
    weight_operands: WeightOperands | None = None,
) -> Iterator[GemmOperands]:
    """Call `gemm_operands` for each weight's output gradient. One kernel quantizes adjacent gradients of one kind."""
    role = TensorRole.GRAD_OUTPUT
    if len(grads) == 1:
        yield gemm_operands(grads[0], role, call, state, usages[0], weight_operands=weight_operands)
        return

    def kind(index: int) -> Hashable:
        grad = grads[index]
        return grad.shape, grad.stride(), grad.dtype, usages[index]

    for _, group in groupby(range(len(grads)), kind):
        indices = list(group)
        values = [private_torch.plain(grads[index]) for index in indices]
        requests = requests_of(role, call, state, [(index, usages[index]) for index in indices], values[0])
        if len(indices) > 1 and requests[0].plan.on_kernels:
            weights = weight_operands if len(indices) == len(grads) else None
            yield from operands_together(requests, [OperandProducer(value) for value in values], weights)
            continue
        for request, value in zip(requests, values, strict=True):
            yield request.run(value)


def requests_of(
    role: TensorRole, call: LinearContext, state: LinearState, parts: Sequence[tuple[int, OperandUsage]], like: Tensor
) -> list[OperandRequest]:
    """Requests for matrices like `like`, one for each (weight index, usage) of `parts`. Equal ones share a plan."""
    requests: list[OperandRequest] = []
    for weight_index, usage in parts:
        # an observer may watch one matrix and not the next, which changes the plan
        is_equal = requests and usage == requests[0].usage and observation.active is None
        requests.append(
            OperandRequest(role, call, state, usage, weight_index, like, requests[0].plan if is_equal else None)
        )
    return requests


def operands_together(
    requests: Sequence[OperandRequest],
    sources: Sequence[OperandProducer],
    weight_operands: WeightOperands | None = None,
) -> list[GemmOperands]:
    """Run equal requests on several matrices of equal layout by one kernel, or two if amaxes must be measured first."""
    first, plan = requests[0], requests[0].plan
    amaxes: Sequence[producers.BothAmaxes | None] = [None] * len(sources)
    nan_flags: Sequence[Tensor | None] = [None] * len(sources)
    if plan.reads_values:
        nan_flags = [
            workspace.zero(first.device) if plan.has_scalar and source.nan_flag is None else source.nan_flag
            for source in sources
        ]
        amaxes = plan.measure(sources, first.known, nan_flags)
        if first.call.sequence_group is not None:
            first.share(*[amax for pair in amaxes for amax in pair or ()])
    outputs = [
        request.outputs(amax_pair, nan_flag)
        for request, amax_pair, nan_flag in zip(requests, amaxes, nan_flags, strict=True)
    ]
    swizzle = plan.swizzle_request(weight_operands)
    all_targets = plan.quantize([source.prototype for source in sources], outputs, swizzle)
    return list(map(OperandRequest.finish, requests, sources, outputs, all_targets))


class OperandRequest:
    """Request to quantize the input, or the output gradient of one weight, of a layer.

    `like`: tensor with the shape and dtype of the values; no reference to it is kept. `plan`: the kernel plan of an
    equal request, or None to look one up in the layer's plans. `known`: the amax to scale by, from the amax history or,
    if backward quantizes an input again, from forward; None to measure it.
    """

    plan: Any  # a KernelPlan, except in `run_oracle`

    def __init__(
        self, role: TensorRole, call: LinearContext, state: LinearState, usage: OperandUsage, weight_index: int,
        like: Tensor, plan: Any = None,
    ) -> None:  # fmt: skip
        self.role, self.call, self.state, self.weight_index = role, call, state, weight_index
        self.watching: OperandWatch | None = None
        if observation.active is not None:
            self.watching = watch(role, call, state.record, state.weights[weight_index])
            if self.watching is not None:
                usage = usage._replace(num_transient=0)  # observers need codes, not dequantized values
        self.delayed: DelayedScale | None = None
        self.known: Tensor | None = None
        if call.recipe.is_delayed:
            first, second = call.recipe.activations[role]
            self.delayed = DelayedScale.of(role, first or second, call, state, weight_index)
        if self.delayed is not None:
            self.known = self.delayed.amax
        elif role is TensorRole.INPUT and not usage.for_first_gemm:
            self.known = call.amaxes.get((role, weight_index))
        # graphs keep operands as the format stores them
        stored = self.watching is not None or kernels.tracing.on
        self.split = state.split(role)
        self.plan = plan or state.plans.operand(
            call.recipe, role, like, usage, self.known is not None, stored, self.split is None
        )
        self.usage, self.device, self.features = usage, like.device, like.shape[1]

    def run(self, values: Tensor | OperandProducer, weight_operands: WeightOperands | None = None) -> GemmOperands:
        """Quantize values, by kernels if they can. A producer writes its values only if a GEMM or amax reads them."""
        if isinstance(values, Tensor) and not self.plan.on_kernels:
            return self.run_oracle(values)
        source = OperandProducer(values) if isinstance(values, Tensor) else values
        if source.launch is None:
            return operands_together([self], [source], weight_operands)[0]
        amaxes = source.known_amaxes(self.plan)
        if self.call.sequence_group is not None:
            self.share(*amaxes or ())
        if self.plan.reads_values and amaxes is None:
            return operands_together([self], [source.in_memory(self.plan)], weight_operands)[0]
        outputs = self.outputs(amaxes)
        return self.finish(source, outputs, source.launch(outputs))

    def share(self, *amaxes: Tensor | None) -> None:
        """Replace amaxes of whole matrices by their maxima over the ranks that share sequences."""
        if self.delayed is not None or not operands.scales_by_one_amax(self.call.recipe.activations[self.role]):
            return
        reduction = FlatMax()
        for amax in {id(amax): amax for amax in amaxes if amax is not None and amax.numel() == 1}.values():
            reduction.add(amax, self.call.sequence_group)
        reduction.reduce()

    def finish(self, source: OperandProducer, outputs: KernelOutputs, targets: producers.Targets) -> GemmOperands:
        """Wrap what a kernel made of a source as operands, and report them to the observer, if any."""
        if source.amax is not None and self.plan.by_one_amax and self.delayed is None:
            # backward may quantize the input again
            self.call.amaxes[self.role, 0] = source.amax.view(())
        result = self.operands(outputs, targets, source.prototype if self.plan.keeps_values else None)
        if self.watching is not None:
            self.show(source, result)
        return result

    def outputs(
        self, amaxes: producers.BothAmaxes | None = None, measured_nan_flag: Tensor | None = None
    ) -> KernelOutputs:
        """Kernel arguments. `amaxes`: measured ones (None: `self.known`). `measured_nan_flag`: set while measuring."""
        plan, device = self.plan, self.device
        amax, other_amax = (self.known, self.known) if amaxes is None else amaxes
        nan_flag = workspace.zero(device) if plan.has_scalar and measured_nan_flag is None else measured_nan_flag
        by_rows = by_columns = sums = amax_slot = None
        if plan.draws:
            random_bits = GradientRandomBits(self.state, self.weight_index)
            by_rows, by_columns = random_bits.by_rows, random_bits.by_columns
        if self.delayed is not None and self.delayed.notes:
            amax_slot = self.delayed.slot(device)
        if self.usage.sums:
            sums = torch.empty(self.features, dtype=torch.float32, device=device)
        return KernelOutputs(
            None if plan.rowwise is None else plan.rowwise.request(amax, by_rows, nan_flag),
            None if plan.columnwise is None else plan.columnwise.request(other_amax, by_columns, nan_flag),
            amax=amax_slot, nan_flag=nan_flag if plan.sets_flag else None, sums=sums,
        )  # fmt: skip

    def operands(
        self, outputs: KernelOutputs, targets: producers.Targets, values: Tensor | None = None
    ) -> GemmOperands:
        """Wrap a kernel's outputs as operands. `values`: the values themselves, for a GEMM in high precision."""
        plan, (target, transposed_target) = self.plan, targets
        first = second = None
        if target is not None:
            first = plan.rowwise.operand(target)
            if target.transposed is not None:
                second = plan.rowwise.operand(target, transposed=True)
        if transposed_target is not None:
            second = plan.columnwise.operand(transposed_target)
        transposed = second is not None
        if second is None and self.usage.for_wgrad:
            second = values
        # an operand that no GEMM reads is empty
        if first is None:
            first = torch.empty(0, dtype=torch.float32, device="cpu") if values is None else values
        if second is None:
            second = torch.empty(0, dtype=torch.float32, device="cpu")
        nan_flag = outputs.nan_flag if plan.nan_flag is NanFlag.PRODUCTS else None
        return GemmOperands(first, WgradOperand(second, transposed), outputs.sums, nan_flag)

    def show(self, source: OperandProducer, result: GemmOperands) -> None:
        """Report the operands to the observer, which exists."""
        assert self.watching is not None
        values = source.in_memory().prototype
        self.watching.see_both(values, result.for_first_gemm, result.for_wgrad.operand, result.for_wgrad.transposed)

    def run_oracle(self, values: Tensor) -> GemmOperands:
        """Quantize values in plain PyTorch, also a tensor-parallel piece of them."""
        plan, usage, call = self.plan, self.usage, self.call
        if self.delayed is not None and self.delayed.notes:
            self.delayed.note(values)
        is_shared = call.sequence_group is not None and operands.scales_by_one_amax(plan.specs)
        if self.delayed is None and (plan.by_one_amax or is_shared):
            if usage.for_first_gemm or plan.is_gradient:
                call.amaxes[self.role, 0] = amax = operands.whole_amax(values, self.split)
                if is_shared:
                    self.share(amax)
            self.known = call.amaxes.get((self.role, 0))
        sums = values.float().sum(0) if usage.sums else None
        nan_flag = None
        if plan.is_gradient:
            zero = torch.zeros((), dtype=torch.float32, device=values.device)
            nan_flag = torch.where(torch.isfinite(values).all(), zero, torch.nan)
        first, second = self._in_pieces(values)
        if isinstance(first, QuantizedStorage):
            first.products = plan.products[0]
        if isinstance(second.operand, QuantizedStorage) and second.operand is not first:
            second.operand.products = plan.products[1]
        return GemmOperands(first, second, sums, nan_flag)

    def _in_pieces(self, values: Tensor) -> tuple[Operand, WgradOperand]:
        plan, usage, split = self.plan, self.usage, self.split
        token_split = split if split is not None and split.dim == 0 else None
        random_bits = GradientRandomBits(self.state, self.weight_index)
        piece: Operand = values
        if plan.quantized is not None:
            piece = self._quantized(values, plan.quantized, split, random_bits.by_rows)
        if self.watching is not None and (usage.for_first_gemm or plan.quantized is not None):
            self.watching.see(values, piece)
        first_operand = piece
        if token_split is not None and (usage.for_first_gemm or (plan.shared and plan.is_gradient)):
            first_operand = operands.gather(piece, token_split)
        if not usage.for_wgrad:
            # not values[:0]: a view keeps all values alive
            return first_operand, WgradOperand(values.new_empty(0), False)
        if plan.transposed is None:
            wgrad_operand = WgradOperand(piece if plan.shared else values, False, token_split)
        else:
            wgrad_operand = self._transposed(values.t(), plan.transposed, random_bits.by_columns)
            if self.watching is not None:
                self.watching.see(values.t(), wgrad_operand.operand, for_wgrad=True)
        return first_operand, wgrad_operand.whole() if plan.is_gradient else wgrad_operand

    def _quantized(
        self, values: Tensor, spec: QuantSpec, split: OperandSplit | None, words: RandomBitsFn
    ) -> QuantizedStorage:
        amax = None if spec.format.is_local else self.known
        return operands.quantize_operand(values, spec, amax=amax, words=words, split=split)

    def _transposed(self, values: Tensor, spec: QuantSpec, words: RandomBitsFn) -> WgradOperand:
        """Build an operand of wgrad from transposed values [features, tokens]."""
        if self.split is None or self.split.dim == 1:  # pieces along features are not gathered
            return WgradOperand(self._quantized(values, spec, self.split and self.split.transposed, words), True)
        tokens = self.split.transposed
        if not operands.gathers_codes(spec, (values.shape[0], values.shape[1]), tokens):
            return WgradOperand(values, True, tokens, spec, words)
        return WgradOperand(self._quantized(values, spec, tokens, words), True, tokens)


def weight_operand(weight: Tensor, weight_index: int, call: LinearContext, state: LinearState) -> Operand:
    """Operand of a weight: its stored components, or a high-precision weight quantized now."""
    if isinstance(weight, QuantizedTensor):
        return weight.quantized_storage
    spec = call.recipe.weight
    if spec is None:
        return weight
    delayed = DelayedScale.of(TensorRole.WEIGHT, spec, call, state, weight_index)
    if delayed is not None and delayed.notes:
        delayed.note(weight.detach())
    amax = None if delayed is None else delayed.amax
    quantized = operands.quantize_operand(weight, spec, amax=amax, split=state.split(TensorRole.WEIGHT))
    if observation.active is not None:
        watching = watch(TensorRole.WEIGHT, call, state.record, state.weights[weight_index])
        if watching is not None:
            watching.see(weight.detach(), quantized)
    return quantized


def watch(role: TensorRole, call: LinearContext, record: bool, state: Mapping[str, Tensor]) -> OperandWatch | None:
    """Return a watch, or None without an observer and outside of a training step (as in a recomputation)."""
    observer = observation.active
    is_second = call.repeated and role is not TensorRole.GRAD_OUTPUT
    if observer is None or not record or is_second or pending_amaxes.is_rehearsed():
        return None
    return OperandWatch(observer, state.get(STACK_KEY, state[RNG_KEY]), role)
