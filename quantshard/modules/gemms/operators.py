"""Custom operators for torch.compile: linear layers and the operations fused with them, running the eager code.

Quantizing, recording amaxes and drawing random bits stay out of the compiled graph, so a compiled layer has the same
bits as an eager one; torch.compile compiles the code between operators. With `TRACES_KERNELS`, the graph has the
operations and kernel launches of operators that do not record. An operator takes tensors, numbers and a key
(see `operator_arguments`) and returns its outputs, followed by the tensors that backward needs. `register_step`
registers four operators per step:

    NAME                      forward; can run again in backward if a compiled function checkpoints
    NAME_recording            forward that records amaxes (delayed scaling) or draws random bits. Calls are not
                              repeated, merged or reordered, and not captured in a CUDA graph, whose replays would
                              scale by the amaxes of the capture and record none
    NAME_backward             backward
    NAME_backward_recording   backward that records amaxes or draws random bits, with the same restrictions

Operators that do not record compute on nothing but their tensor arguments, on one device, so a CUDA graph can hold them
(`mode="reduce-overhead"`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quantshard import kernel_dispatch, kernels, limits, private_torch
from quantshard.errors import UnsupportedOperationError
from quantshard.kernels import workspace
from quantshard.modules.activation_storage import STORAGES
from quantshard.modules.contexts import pending_amaxes, recompute, settings
from quantshard.modules.contexts.recompute import LinearContext
from quantshard.modules.gemms import functional
from quantshard.modules.gemms.functional import LinearBackward, LinearGradMask, PreparedLinear
from quantshard.modules.gemms.linear_operands import WgradOperand
from quantshard.modules.gemms.linear_state import LinearState
from quantshard.modules.gemms.operator_arguments import (
    BACKWARD,
    FORWARD,
    SavedInput,
    StepArguments,
    StepStructure,
    components_of,
    stored_key,
    structure_of,
)
from quantshard.tensor import aten_rules
from quantshard.tensor.quantized_tensor import QuantizedTensor

if kernels.USABLE:
    from quantshard.kernels import graph_launch

# Forward -------------------------------------------------------------------------------------------------------------


class ForwardResults(NamedTuple):
    """Results of a step's forward.

    `outputs`: outputs of the last layer, then x + residual if there is a residual. `inputs`: wgrad's operand of each
    layer's input. `others`: other tensors for backward: statistics [tokens] of a normalization, float32, and outputs
    [tokens, out_features] of all layers except the last, in their storage format.
    """

    outputs: Sequence[Tensor]
    inputs: Sequence[WgradOperand]
    others: Sequence[Tensor] = ()


ForwardOf = Callable[[StepArguments, list[PreparedLinear]], ForwardResults]
"""Forward of a step, given its prepared layers."""


@workspace.separate_allocations()
def _forward(body: ForwardOf, *arguments: Any) -> list[Tensor]:
    step = StepArguments(*arguments)
    layers = _ready(step)
    pending_amaxes.drop_failed_backward()  # entering autocast does this in eager code, but leaves no trace in a graph
    results = body(step, layers)
    tensors = [*results.outputs]
    for index, (layer, x_wgrad) in enumerate(zip(layers, results.inputs, strict=True)):
        saved_input = SavedInput.of(step, index, step.x)
        tensors += [] if saved_input is None else saved_input.tensors(x_wgrad)
        # cloned, because the call keeps its own amax
        tensors += [layer.call.amaxes[key].clone() for key in step.amaxes(index)]
    # a native GEMM can return padded rows
    return [tensor.contiguous() for tensor in (*tensors, *results.others)]


def _ready(step: StepArguments) -> list[PreparedLinear]:
    structure, biases, ready = step.structure, iter(step.biases), []
    if kernels.tracing.on:
        for layer, layer_weights in zip(structure.layers, step.weights_of(None), strict=True):
            added = [None if dtype is None else next(biases) for dtype in layer.biases]
            call, state = _traced_call(structure), _traced_state(layer_weights)
            ready.append(PreparedLinear(layer_weights, added, call, state))
        return ready
    module, states = step.states()
    weights = step.weights_of(module)
    if structure.setting == settings.NO_AUTOCAST and not step.plain and structure.is_trained:
        limits.warn("dequantized", module.label(structure.layers[0].weights[0]), "autocast(enabled=False)")
    for index, layer in enumerate(structure.layers):
        names = id(module), layer.weights
        call = recompute.linear_context(names, not step.plain, structure.record, structure.setting)
        for name in layer.weights:
            module.weight_operand(name, call, step.x.device)
        added = [None if dtype is None else next(biases) for dtype in layer.biases]
        ready.append(PreparedLinear(weights[index], added, call, states[index]))
    return ready


def _forward_shapes(*arguments: Any) -> list[Tensor]:
    private_torch.check_order_is_kept()
    step = StepArguments(*arguments)
    x, structure = step.x, step.structure
    if settings.is_delayed(structure.setting) and private_torch.is_recomputed_in_graph():
        raise UnsupportedOperationError(
            f"activation checkpointing inside a compiled function around the layer of {structure.names!r}: under "
            "delayed scaling its second forward must scale by the amaxes of the first, which a graph does not keep; "
            "compile the checkpointed function and enter autocast in it, or use a recipe without past amaxes"
        )
    *inner, last = structure.by_layer(step.out_features)
    fakes = [x.new_empty((*x.shape[:-1], features)) for features in last]
    if step.residual is not None:
        fakes.append(torch.empty_like(x, memory_format=torch.contiguous_format))
    for index in range(len(structure.layers)):
        saved_input = SavedInput.of(step, index, x)
        fakes += [] if saved_input is None else saved_input.empty(x)
        fakes += [x.new_empty((), dtype=torch.float32) for _ in step.amaxes(index)]
    rows = x.reshape(-1, x.shape[-1]).shape[0]
    statistics = {"": 0, "RMSNorm": 1, "LayerNorm": 2}[structure.normalization]
    fakes += [x.new_empty((rows,), dtype=torch.float32) for _ in range(statistics)]
    storage = STORAGES[structure.activation_storage]
    for features in chain.from_iterable(inner):
        fakes += storage.empty(x.new_empty((rows, features)))
    return fakes


# Backward ------------------------------------------------------------------------------------------------------------


def _keep(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    step = StepArguments(*inputs)
    structure, is_added = step.structure, step.residual is not None
    outputs = len(structure.layers[-1].weights)
    x = output[outputs] if is_added else step.x
    reads_x = structure.layers[0].keeps and SavedInput.of(step, 0, step.x) is None
    tensors = [x if structure.normalization or reads_x else None, *step.plain, *output[outputs + is_added :]]
    ctx.save_for_backward(step.module, step.norm_weight, step.norm_bias, *tensors)
    ctx.key, ctx.out_features, ctx.eps = step.key, step.out_features, step.eps
    ctx.x_shape, ctx.parts, ctx.is_added = step.x.shape, len(step.plain), is_added
    ctx.set_materialize_grads(False)  # tensors that are kept for backward have no gradients


def _gradients(name: str, ctx: Any, grads: list[Tensor | None]) -> tuple[Any, ...]:
    module, norm_weight, norm_bias, x, *saved_tensors = ctx.saved_tensors
    weights, saved_tensors = saved_tensors[: ctx.parts], saved_tensors[ctx.parts :]
    structure, need = structure_of(ctx.key), StepArguments(*ctx.needs_input_grad)
    need_front = [need.x or need.residual, need.norm_weight, need.norm_bias]
    biases = iter(need.biases)
    need_biases = [dtype is not None and next(biases) for layer in structure.layers for dtype in layer.biases]
    last = structure.by_layer(ctx.out_features)[-1]
    of_outputs, of_total = functional.filled(grads[: len(last)], last), grads[len(last)] if ctx.is_added else None
    results = [of_total] if need_front[0] else []
    if of_outputs:
        suffix = "_backward_recording" if settings.counts_backwards(structure.setting) else "_backward"
        results = getattr(torch.ops.quantshard, name + suffix)(
            weights, [], module, ctx.key, ctx.out_features, norm_weight, norm_bias, ctx.eps,
            x, of_outputs, saved_tensors, of_total, ctx.x_shape, need_front, need.plain, need_biases,
        )  # fmt: skip
    remaining = iter(results)
    of_x, of_norm_weight, of_norm_bias = (next(remaining, None) if is_needed else None for is_needed in need_front)
    of_weights = [next(remaining, None) if is_needed else None for is_needed in need.plain]
    of_biases = [next(remaining, None) if is_needed else None for is_needed in need.biases]
    of_layers: tuple[Any, ...] = (of_weights, [], None, None, None, of_norm_weight, of_norm_bias, None)
    return (*of_layers, of_x if need.x else None, of_x if need.residual else None, of_biases)


class StepGradients(NamedTuple):
    """Gradients of a step; None where a gradient is not needed.

    `front`: gradients of x and of the normalization's weight and bias. `layers`: gradients of each layer's weights,
    then biases.
    """

    front: Sequence[Tensor | None]
    layers: Sequence[Sequence[Tensor | None]]


BackwardOf = Callable[[StepArguments, list[LinearBackward], list[Tensor]], StepGradients]
"""Backward of a step, given its saved layers and `ForwardResults.others`."""


@workspace.separate_allocations()
def _backward(body: BackwardOf, *arguments: Any) -> list[Tensor]:
    step = StepArguments.of_backward(arguments)
    layers, other_tensors = _saved(step)
    front, layer_grads = body(step, layers, other_tensors)
    weights = chain.from_iterable(tensor_grads[: len(tensor_grads) // 2] for tensor_grads in layer_grads)
    biases = chain.from_iterable(tensor_grads[len(tensor_grads) // 2 :] for tensor_grads in layer_grads)
    return [gradient.contiguous() for gradient in (*front, *weights, *biases) if gradient is not None]


def _saved(step: StepArguments) -> tuple[list[LinearBackward], list[Tensor]]:
    """Rebuild the layers; also return the tensors of `ForwardResults.others`."""
    structure, like, saved_tensors = step.structure, step.grads[0], iter(step.saved)
    is_traced = kernels.tracing.on
    module, states = (None, []) if is_traced else step.states()
    setting, saved_layers = settings.registered[structure.setting], []
    need_weights, need_biases = structure.by_layer(step.need_weights), structure.by_layer(step.need_biases)
    for index, weights in enumerate(step.weights_of(module)):
        layer, saved_input = structure.layers[index], SavedInput.of(step, index, like)
        x_wgrad = WgradOperand(like.new_empty(0), False)
        if saved_input is not None:
            x_wgrad = saved_input.operand(saved_tensors)
        elif step.x is not None and not structure.normalization:
            x_wgrad = WgradOperand(step.x.reshape(-1, step.x.shape[-1]), False)
        call = LinearContext(setting.recipe, setting.amax_reduction_group, setting.strict)
        call.amaxes.update((key, next(saved_tensors)) for key in step.amaxes(index))
        operand_metadata, tensors = functional.to_saved(x_wgrad)
        needed = LinearGradMask(index > 0 or any(step.need_front), need_weights[index], need_biases[index])
        state = _traced_state(weights) if is_traced else states[index]
        saved_layers.append(LinearBackward(
            call, state, operand_metadata, len(weights), layer.biases, step.input_shape(index), like.dtype,
            layer.remakes, [*weights, *tensors], needed,
        ))  # fmt: skip
    return saved_layers, list(saved_tensors)


def _backward_shapes(*arguments: Any) -> list[Tensor]:
    step = StepArguments.of_backward(arguments)
    structure, like = step.structure, step.grads[0]
    need_x, *need_parameters = step.need_front
    fakes = [like.new_empty(step.x_shape)] if need_x else []
    parameters = zip((step.norm_weight, step.norm_bias), need_parameters, strict=True)
    fakes += [torch.empty_like(parameter) for parameter, is_needed in parameters if is_needed and parameter is not None]
    inputs = [step.input_shape(index) for index, layer in enumerate(structure.layers) for _ in layer.weights]
    shapes = [(features, shape[-1]) for features, shape in zip(step.out_features, inputs, strict=True)]
    for shape, is_needed in zip(shapes, step.need_weights, strict=True):
        fakes += [like.new_empty(shape, dtype=structure.dtype)] if is_needed else []
    dtypes = chain.from_iterable(layer.biases for layer in structure.layers)
    for features, dtype, is_needed in zip(step.out_features, dtypes, step.need_biases, strict=True):
        fakes += [like.new_empty((features,), dtype=dtype)] if is_needed else []
    return fakes


TRACES_KERNELS = os.environ.get("QUANTSHARD_TRACE_KERNELS", "1") == "1"
"""Whether compiled graphs contain the insides of operators that do not record."""

# Tracing -------------------------------------------------------------------------------------------------------------


def _traced(body: Callable[..., list[Tensor]], *arguments: Any) -> list[Tensor] | None:
    """Run the body of an operator while AOTAutograd traces, so that the graph has its insides.

    Return None if the graph should have the operator as it is: without `TRACES_KERNELS`, without kernels, with an
    observer, or if a size is symbolic.
    """
    key = arguments[3]
    if not TRACES_KERNELS or structure_of(key).is_observed:
        return None
    tensors = [item for argument in arguments for item in (argument if isinstance(argument, list) else [argument])]
    values = [item for item in tensors if isinstance(item, Tensor)]
    if not kernel_dispatch.kernels_on(values[-1].device):
        return None
    if any(isinstance(size, torch.SymInt) for value in values for size in value.shape):
        return None
    with graph_launch.traced_launches():
        return body(*arguments)


def _traced_call(structure: StepStructure) -> LinearContext:
    setting = settings.registered[structure.setting]
    return LinearContext(setting.recipe, setting.amax_reduction_group, setting.strict, record=False)


def _traced_state(weights: Sequence[Tensor]) -> LinearState:
    return LinearState([{} for _ in weights], None, None, False)


# Registration --------------------------------------------------------------------------------------------------------


def register_step(name: str, forward: ForwardOf, backward: BackwardOf) -> None:
    """Register the four operators of a step."""
    for kind, schema, body, shapes in (
        ("", FORWARD, partial(_forward, forward), _forward_shapes),
        ("_backward", BACKWARD, partial(_backward, backward), _backward_shapes),
    ):
        for records in (False, True):
            full = f"quantshard::{name}{kind}" + ("_recording" if records else "")
            torch.library.define(full, schema, tags=(torch.Tag.cudagraph_unsafe,) if records else ())
            torch.library.impl(full, "default", body)
            torch.library.register_fake(full, shapes)
            operator = getattr(torch.ops.quantshard, full.removeprefix("quantshard::")).default
            if not records:
                private_torch.trace_through(full, partial(_traced, body))
            _with_components(operator)
            if not kind:
                torch.library.register_autograd(full, partial(_gradients, name), setup_context=_keep)
            if records:
                private_torch.keep_order(operator)


def _with_components(operator: Any) -> None:
    """Register the ATen rule that passes quantized weights to the operator as components."""

    @aten_rules.rule(operator, needed_by="torch.compile")
    def apart(weights: Sequence[QuantizedTensor], _: Any, *others: Any) -> list[Tensor]:
        module, key, *more = others
        results: list[Tensor] = operator([], components_of(weights), module, stored_key(key, weights), *more)
        return results
