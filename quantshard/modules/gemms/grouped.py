"""Linear layers of many experts in a few kernel launches, equivalent to `functional.linear` for each expert.

The rows of all experts form one matrix, in which each expert's rows are contiguous. One launch quantizes all rows, to
the same codes and scales as quantizing each expert's rows alone; another multiplies them with the weights, which stay
separate tensors. `grouped_linear.block_together` lists the supported recipes.

Experts in high precision use PyTorch's grouped product. In both cases row counts can stay on the device; a loop over
experts would copy them to the host.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeGuard, cast
from weakref import ReferenceType, ref

import torch
from torch import Tensor
from torch.nn import functional as F

from quantshard import kernel_dispatch, kernels, limits, private_torch
from quantshard.collectives import delayed_scaling, process_groups
from quantshard.collectives.delayed_scaling import check_same_stage
from quantshard.errors import UnsupportedOperationError
from quantshard.formats import ALL, Orientation
from quantshard.gemm import hardware, operands
from quantshard.modules.contexts import pending_amaxes
from quantshard.modules.contexts.recompute import LinearContext
from quantshard.modules.gemms.linear_operands import watch
from quantshard.modules.gemms.linear_state import AMAX_NUMBERS, amaxes_of
from quantshard.modules.gemms.row_exchange import NO_EXCHANGE, ExpertCodes, RowExchange
from quantshard.modules.gemms.weight_gradients import WeightGradients, in_two_passes, weight_gradients
from quantshard.recipe import Gemm, QuantSpec, TensorRole
from quantshard.tensor import observation
from quantshard.tensor.parameter_state import RNG_KEY
from quantshard.tensor.quantized_tensor import QuantizedTensor
from quantshard.tensor.storage import QuantizedStorage

if kernels.USABLE:
    from quantshard.kernels.experts import grouped as grouped_kernel, grouped_matmul
    from quantshard.kernels.experts.grouped_matmul import EncodedRows, ExpertBias, ExpertWeights
    from quantshard.kernels.experts.segments import FEW_ROWS, MANY_ROWS, ExpertSegments
    from quantshard.kernels.quantize.amax import scales
    from quantshard.kernels.quantize.targets import QuantizeRequest, QuantizeSpec


class ExpertsReader:
    """Cache of the addresses of a layer's expert weights, for kernels, while the storages are the same objects."""

    def __init__(self) -> None:
        self._storages: list[ReferenceType[QuantizedStorage]] = []
        self._weight_spec: QuantSpec | None = None
        self._expert_weights: ExpertWeights | None = None

    def __reduce__(self) -> Any:
        return ExpertsReader, ()  # a copied module has other weights

    def read(self, storages: list[QuantizedStorage], spec: QuantSpec | None) -> ExpertWeights | None:
        """Weights in the form that kernels read; None unless all are quantized by `spec`, split equally, resident."""
        is_same = self._weight_spec == spec and [reference() for reference in self._storages] == storages
        if self._expert_weights is not None and is_same:
            return self._expert_weights
        self._expert_weights = None
        expert_weights = None if spec is None else _as_kernels_read(storages, spec)
        # weights that FSDP2 has gathered move
        if not any([storage.gathered for storage in storages]):
            self._storages, self._weight_spec, self._expert_weights = list(map(ref, storages)), spec, expert_weights
        return expert_weights


def _as_kernels_read(storages: Sequence[QuantizedStorage], spec: QuantSpec) -> ExpertWeights | None:
    copy, extents = spec.format.copies[Orientation.ROWWISE], storages[0].shard.extents
    for storage in storages:
        if storage.shard.extents != extents or (storage.spec is not spec and storage.spec.of_matrix != spec):
            return None
    codes, scales = (
        [expert_storage.components[name] for expert_storage in storages] for name in (copy.codes.name, copy.scale.name)
    )
    if not _lie_together(codes + scales, codes[0].get_device()):
        return None
    square, encoding = 0 if copy.block[0] == ALL else copy.block[0], copy.codes.encoding
    if storages[0].spec.format.matrix_rows:
        experts = storages[0].shape[0]
        code_stack, scale_stack = (part.view(experts, -1, part.shape[1]) for part in (codes[0], scales[0]))
        return ExpertWeights.of(code_stack, scale_stack, encoding, square)
    return ExpertWeights.of(codes, scales, encoding, square)


def _lie_together(tensors: Sequence[Tensor], device: int) -> bool:
    """Return whether all tensors are contiguous and on `device`."""
    return set(map(Tensor.get_device, tensors)) == {device} and all(map(Tensor.is_contiguous, tensors))


class ExpertsLayer(NamedTuple):
    """The linear layers of all experts, ready to be called.

    `biases`: bias of each expert, or empty. `counts`: number of rows of each expert, or an integer tensor of these on
    the device. `block`: elements per scale along the summed dim; 0: one scale per expert. `histories`: role -> amax
    history of each expert (delayed scaling). `record`: whether amaxes are recorded (in training). `amax_group`: ranks
    that amaxes are reduced over. `reader`: cache of the weights' addresses. `wgrads`: see `LinearState`. `is_stack`:
    the only weight is a stack of all experts' weights, and the only bias, if any, a stack of biases. `is_transposed`:
    it holds [in_features, out_features] of each. `exchange`: exchange of rows with other ranks, before or after the
    product. `is_native`: see `multiplies_codes`.
    """

    weights: Sequence[QuantizedTensor]
    biases: Sequence[Tensor]
    counts: Sequence[int] | Tensor
    block: int
    call: LinearContext
    histories: Mapping[TensorRole, Sequence[Tensor]]
    record: bool
    amax_group: process_groups.Groups
    reader: ExpertsReader
    wgrads: WeightGradients | None = None
    is_stack: bool = False
    is_transposed: bool = False
    exchange: RowExchange = NO_EXCHANGE
    is_native: bool = False

    def past(self, role: TensorRole) -> Tensor | None:
        """Amaxes to scale by under delayed scaling, float32 [experts]; None otherwise. Recomputed inputs reuse them."""
        spec, _ = self.call.recipe.activations[role]
        assert spec is not None
        if not spec.scaling.history:
            return None
        amaxes = self.call.amaxes.get((role, 0))
        if amaxes is None:
            amaxes = delayed_scaling.history_amaxes(self.histories[role], spec.scaling.most_recent)
        if role is TensorRole.INPUT:
            self.call.amaxes[role, 0] = amaxes
        return amaxes

    def segments(self, x: Tensor) -> ExpertSegments:
        """Map rows of x to experts."""
        return _segments(self.counts, x, MANY_ROWS if self.block or self.is_native else 1)

    def quantized(
        self, values: Tensor | ExpertCodes, role: TensorRole, segments: ExpertSegments, second: bool
    ) -> tuple[EncodedRows, EncodedRows]:
        """Quantize an input or output gradient [tokens, features] for its first GEMM and, if `second`, for wgrad.

        A gradient that is not finite sets a scale of its expert to NaN, because codes saturate.
        """
        if isinstance(values, ExpertCodes):
            encoding = values.spec.format.copies[Orientation.ROWWISE].codes.encoding
            codes = EncodedRows(values.codes, values.scales, encoding)
            return codes, self._for_wgrad(codes, segments, second)
        # a captured step cannot read counts on the device
        if observation.active is not None and not (isinstance(self.counts, Tensor) and kernel_dispatch.is_capturing()):
            self._show(values, role, second)
        if not self.block:
            codes = self._by_experts(values, role, segments)
            return codes, self._for_wgrad(codes, segments, second)
        nan_flag = None
        if role is TensorRole.GRAD_OUTPUT:
            nan_flag = torch.ones(len(segments), dtype=torch.float32, device=values.device)
        specs = [spec for spec in self.call.recipe.activations[role] if spec is not None]
        first_request, *more = [
            QuantizeRequest(QuantizeSpec(spec.format.copies[Orientation.ROWWISE], spec.scaling)) for spec in specs
        ]
        targets = grouped_kernel.quantize_expert_blocks(
            values, segments, first_request, more[0] if second else None, nan_flag
        )
        encoding = first_request.spec.copy.codes.encoding
        rows = [
            EncodedRows(target.codes, target.scale, encoding, self.block, nan_flag)
            for target in targets
            if target is not None and target.scale is not None
        ]
        return rows[0], rows[-1]

    def _for_wgrad(self, rows: EncodedRows, segments: ExpertSegments, is_needed: bool) -> EncodedRows:
        if not (self.is_native and is_needed):
            return rows
        return rows._replace(codes=grouped_kernel.turned_rows(rows.codes, segments))

    def _show(self, values: Tensor, role: TensorRole, second: bool) -> None:
        """Report operands to the observer: quantize each expert's rows again, to the same codes as for all together."""
        first, transposed = self.call.recipe.activations[role]
        assert first is not None
        counts = list(self.counts) if not isinstance(self.counts, Tensor) else self.counts.tolist()
        amaxes: Sequence[Tensor | None] = [None] * len(counts)
        if first.scaling.history:
            past = self.call.amaxes.get((role, 0))
            if past is None:  # not `self.past`, which would mark the amaxes as recorded
                past = delayed_scaling.history_amaxes(self.histories[role], first.scaling.most_recent)
            amaxes = past.unbind()
        weights = list(self.weights) * len(counts) if self.is_stack else self.weights
        for rows, weight, amax in zip(values.split(counts), weights, amaxes, strict=True):
            watching = watch(role, self.call, self.record, weight.quantized_storage.state)
            if watching is None or not len(rows):
                continue
            watching.see(rows, operands.quantize_operand(rows, first, amax=amax))
            if self.block and second and transposed is not None:
                watching.see(rows.t(), operands.quantize_operand(rows.t(), transposed), for_wgrad=True)

    def _by_experts(self, values: Tensor, role: TensorRole, segments: ExpertSegments) -> EncodedRows:
        """Quantize rows with one scale per expert."""
        spec, _ = self.call.recipe.activations[role]
        assert spec is not None
        copy = spec.format.copies[Orientation.ROWWISE]
        notes = bool(spec.scaling.history) and self.record and (role, 0) not in self.call.amaxes
        amaxes = self.past(role)
        if amaxes is None:
            amaxes = grouped_kernel.expert_amaxes(values, segments)
        stored_scales, multipliers = scales(amaxes, copy, spec.scaling, values.dtype)
        new_amaxes = torch.zeros_like(stored_scales) if notes else None
        has_nan = stored_scales if role is TensorRole.GRAD_OUTPUT else None
        codes = grouped_kernel.quantize_expert_rows(
            values, segments, copy.codes.encoding, multipliers, new_amaxes, has_nan
        )
        if new_amaxes is not None:
            keys = [weight.quantized_storage.state[RNG_KEY] for weight in self.weights]
            amaxes_of(role).note_all(keys, AMAX_NUMBERS[role], self.histories[role], new_amaxes, self.amax_group)
        return EncodedRows(codes, stored_scales, copy.codes.encoding)

    def operands(self) -> ExpertWeights:
        """Weights in the form that kernels read."""
        spec = self.call.recipe.weight
        storages = [weight.quantized_storage for weight in self.weights]
        weights = self.reader.read(storages, spec)
        assert weights is not None and spec is not None, "`are_readable` said so"
        if not self.is_native:
            return weights
        name = spec.format.copies[Orientation.ROWWISE].codes.name
        codes = [storage.components[name] for storage in storages]
        # tiles are loaded from an address that is a multiple of 16
        stack = codes[0] if self.is_stack and weights.aligned else torch.cat(codes)
        return weights._replace(codes=stack)


def _segments(counts: Sequence[int] | Tensor, x: Tensor, unit: int) -> ExpertSegments:
    if isinstance(counts, Tensor):
        return ExpertSegments.of_tensor(counts, x.shape[0], unit)
    return ExpertSegments.of(counts, x.device, unit)


def multiplies_codes(block: int, experts: int, shape: Sequence[int], device: torch.device, rows: int | None) -> bool:
    """Return whether a kernel multiplies the codes of weights of such a shape as they are; see `ExpertsLayer.block`.

    The codes of all experts are copied first, which few rows do not repay. `rows`: their number in evaluation; None in
    training and with expert parallelism, where it differs between ranks that must compute the same bits.
    """
    capability = hardware.capability_of(device)
    # from Hopper on, or interpreted
    has_tensor_cores = device.type == "cpu" or (capability is not None and capability >= (9, 0))
    # tiles are loaded from rows of a multiple of 16 bytes, and offsets in a gradient have 32 bits
    fits = not any([size % 16 for size in shape]) and shape[0] * shape[1] < 1 << 31
    return block == 0 and has_tensor_cores and fits and (rows is None or rows > FEW_ROWS * experts)


def are_readable(
    weights: Sequence[Tensor | None], biases: Sequence[Tensor], spec: QuantSpec | None, x: Tensor, reader: ExpertsReader
) -> TypeGuard[Sequence[QuantizedTensor]]:
    """Return whether kernels can read these weights and biases: quantized by `spec`, equally split, on x's device."""
    if set(map(type, weights)) != {QuantizedTensor}:
        return False
    quantized = cast("Sequence[QuantizedTensor]", weights)
    dtypes, bias_dtypes = {weight.dtype for weight in quantized}, {bias.dtype for bias in biases}
    if len(dtypes) > 1 or len(bias_dtypes) > 1 or not (dtypes | bias_dtypes).issubset(kernel_dispatch.KERNEL_DTYPES):
        return False
    if biases and not _lie_together(biases, x.get_device()):
        return False
    storages = [weight.quantized_storage for weight in quantized]
    if any([storage.gathered and storage.is_stale for storage in storages]):
        return False
    expert_weights = reader.read(storages, spec)
    return expert_weights is not None and expert_weights.table.device == x.device


def grouped_linear(x: Tensor, layer: ExpertsLayer) -> Tensor:
    """Compute x [tokens, in_features] @ w^T [in_features, out_features] + b with each row's expert, in x's dtype."""
    if layer.record and (stage := private_torch.running_stage()) is not None:
        if layer.histories:
            check_same_stage(layer.amax_group, stage)
        layer = layer._replace(record=not stage.infers)
    keeps_input = torch.is_grad_enabled() and any(weight.requires_grad for weight in layer.weights)
    out: Tensor = _ExpertsFunction.apply(x, layer, keeps_input, *layer.weights, *layer.biases)
    return out


class _ExpertsFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: ExpertsLayer, keeps_input: bool, *tensors: Tensor) -> Tensor:
        if layer.call.repeated:
            pending_amaxes.flush_after_backward()
        x = private_torch.plain(x)
        rows = layer.exchange.receive(x, TensorRole.INPUT, layer.call)
        segments = layer.segments(rows if isinstance(rows, Tensor) else x)
        fprop_rows, wgrad_rows = layer.quantized(rows, TensorRole.INPUT, segments, keeps_input)
        del rows
        biases = ExpertBias.of(layer.biases[0] if layer.is_stack else layer.biases) if layer.biases else None
        y = grouped_matmul.rows_times_weights(
            fprop_rows, layer.operands(), segments, x.dtype, transposed=not layer.is_transposed, biases=biases,
            fast=Gemm.FPROP in layer.call.recipe.fast_gemms,
        )  # fmt: skip
        ctx.layer, ctx.segments, ctx.dtype = layer._replace(weights=(), biases=()), segments, x.dtype
        ctx.x_encoding, ctx.bias_dtype = wgrad_rows.encoding, layer.biases[0].dtype if layer.biases else None
        parts = (wgrad_rows.codes, wgrad_rows.scales) if keeps_input else (x.new_empty(0), x.new_empty(0))
        ctx.save_for_backward(*parts, *layer.weights)
        return layer.exchange.send_back(y, TensorRole.INPUT)

    @staticmethod
    @in_two_passes
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise UnsupportedOperationError(limits.refusal("second derivative", "a linear layer"))
        codes, scale, *weights = ctx.saved_tensors
        layer: ExpertsLayer = ctx.layer._replace(weights=weights)
        segments, count, fast_gemms = ctx.segments, len(weights), layer.call.recipe.fast_gemms
        grad, (needs_x, _, _, *needs) = private_torch.plain(grads[0]), ctx.needs_input_grad
        rows = layer.exchange.receive(grad, TensorRole.GRAD_OUTPUT, layer.call, any(needs[count:]))
        dgrad_rows, wgrad_rows = layer.quantized(rows, TensorRole.GRAD_OUTPUT, segments, any(needs[:count]))
        dx = None
        if needs_x:
            dx = grouped_matmul.rows_times_weights(
                dgrad_rows, layer.operands(), segments, ctx.dtype, transposed=layer.is_transposed,
                fast=Gemm.DGRAD in fast_gemms,
            )  # fmt: skip
            dx = layer.exchange.send_back(dx, TensorRole.GRAD_OUTPUT)
        param_grads: list[Tensor | None] = [None] * len(needs)
        if any(needs[:count]):
            x = EncodedRows(codes, scale, ctx.x_encoding, layer.block)
            pair = (x, wgrad_rows) if layer.is_transposed else (wgrad_rows, x)
            compute = partial(
                grouped_matmul.weight_gradients, *pair, segments, turned=layer.is_native, fast=Gemm.WGRAD in fast_gemms
            )
            param_grads[:count] = weight_gradients(compute, layer.wgrads, range(count), weights[0].dtype)
        if any(needs[count:]):
            assert isinstance(rows, Tensor)
            sums = grouped_kernel.expert_sums(rows, segments).to(ctx.bias_dtype)
            param_grads[count:] = (sums,) if layer.is_stack else sums.unbind()
        return dx, None, None, *param_grads


# High precision -------------------------------------------------------------------------------------------------------


def multiplies_plain(x: Tensor, weights: Sequence[Tensor]) -> bool:
    """Return whether the grouped product supports x [tokens, in_features] and the values of these weights."""
    kinds = {(matrix.dtype, matrix.device) for matrix in (x, *weights)}
    return kinds == {(torch.bfloat16, x.device)} and not any(size * x.itemsize % 16 for size in weights[0].shape[-2:])


class PlainExperts(NamedTuple):
    """Experts in high precision; see `ExpertsLayer`. `weights`, `biases`: of each, or a stack of all [experts, ...]."""

    weights: Sequence[Tensor]
    biases: Sequence[Tensor]
    counts: Sequence[int] | Tensor
    is_transposed: bool = False
    wgrads: WeightGradients | None = None


def plain_grouped_linear(x: Tensor, layer: PlainExperts) -> Tensor:
    """Compute `grouped_linear` in high precision; quantized weights are dequantized in each pass."""
    out: Tensor = _PlainExpertsFunction.apply(x, layer, *layer.weights, *layer.biases)
    return out


def _stack(parts: Sequence[Tensor], ndim: int) -> Tensor:
    """The values of all experts as one tensor of `ndim` dims."""
    values = [
        part.quantized_storage.dequantize(dtype=part.dtype).view(part.shape)
        if isinstance(part, QuantizedTensor)
        else part
        for part in parts
    ]
    return values[0] if values[0].ndim == ndim else torch.stack(values)


class _PlainExpertsFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: PlainExperts, *tensors: Tensor) -> Tensor:
        ctx.layer = layer._replace(weights=(), biases=())
        x, biases = private_torch.plain(x), layer.biases
        ctx.segments = segments = _segments(layer.counts, x, 1)
        ctx.bias_dtype = biases[0].dtype if biases else None
        ctx.save_for_backward(x, *layer.weights)
        ctx.ends = ends = segments.spans[:, 2].to(torch.int32)
        values = _stack(layer.weights, 3)
        y = F.grouped_mm(x, values if layer.is_transposed else values.mT, offs=ends)
        if not biases:
            return y
        rows = torch.arange(x.shape[0], device=x.device, dtype=ends.dtype)
        y_biases = _stack(biases, 2)[torch.searchsorted(ends, rows, right=True)].to(y.dtype)
        return y + y_biases

    @staticmethod
    @in_two_passes
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (x, *weights), ends, layer = ctx.saved_tensors, ctx.ends, ctx.layer
        dy, (needs_x, _, *needs), count = private_torch.plain(grads[0]).contiguous(), ctx.needs_input_grad, len(weights)
        dx = None
        if needs_x:
            values = _stack(weights, 3)
            dx = F.grouped_mm(dy, values.mT if layer.is_transposed else values, offs=ends)
        param_grads: list[Tensor | None] = [None] * len(needs)
        if any(needs[:count]):
            a, b = (x, dy) if layer.is_transposed else (dy, x)
            # always in bfloat16
            compute = lambda _: F.grouped_mm(a.mT, b, offs=ends)  # noqa: E731
            param_grads[:count] = weight_gradients(compute, layer.wgrads, range(count), dy.dtype)
        if any(needs[count:]):
            sums = grouped_kernel.expert_sums(dy, ctx.segments).to(ctx.bias_dtype)
            param_grads[count:] = (sums,) if len(needs) == 2 and weights[0].ndim == 3 else sums.unbind()
        return dx, None, *param_grads
