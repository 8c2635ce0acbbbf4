"""Custom operators for torch.compile: linear layers and the operations fused with them, running the eager code.

With `TRACES_KERNELS`, a graph has the operations and kernel launches of an operator. Otherwise quantizing stays out of
the compiled graph, so a compiled layer has the bits of an eager one; torch.compile compiles the code between operators.
An operator takes tensors, numbers and a key (see `operator_arguments`) and returns its outputs, the tensors that
backward needs and, under delayed scaling, the new amaxes. It computes on nothing but its arguments, on one device:
`operator_state` reads past amaxes and random draws before it, and records new amaxes. `register_step` registers four
operators per step:

    NAME, NAME_backward                     forward and backward
    NAME_drawing, NAME_backward_drawing     the same for passes that draw random bits; not captured in a CUDA graph,
                                            because the key is on the CPU
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quantshard import kernel_dispatch, kernels, private_torch
from quantshard.kernels import workspace
from quantshard.modules.activation_storage import STORAGES
from quantshard.modules.gemms import functional, operator_state
from quantshard.modules.gemms.functional import LinearBackward, LinearGradMask, PreparedLinear
from quantshard.modules.gemms.linear_operands import WgradOperand
from quantshard.modules.gemms.operator_arguments import (
    BACKWARD,
    FORWARD,
    SavedInput,
    StepArguments,
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
    calls, states, new_amaxes = operator_state.layers_of(step, False)
    biases, layers = iter(step.biases), []
    for structure, weights, call, state in zip(step.structure.layers, step.weights(), calls, states, strict=True):
        added = [None if dtype is None else next(biases) for dtype in structure.biases]
        layers.append(PreparedLinear(weights, added, call, state))
    results = body(step, layers)
    tensors = [*results.outputs]
    for index, (layer, x_wgrad) in enumerate(zip(layers, results.inputs, strict=True)):
        saved_input = SavedInput.of(step, index, step.x)
        tensors += [] if saved_input is None else saved_input.tensors(x_wgrad)
        # cloned, because no result may be an argument
        tensors += [layer.call.amaxes[key].clone() for key in step.amaxes(index)]
    tensors += [*results.others, *([torch.stack(new_amaxes)] if new_amaxes else [])]
    # a native GEMM can return padded rows
    return [tensor.contiguous() for tensor in tensors]


def _forward_shapes(*arguments: Any) -> list[Tensor]:
    step = StepArguments(*arguments)
    x, structure = step.x, step.structure
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
    return fakes + _new_amax_shapes(step, False)


def _new_amax_shapes(step: StepArguments, backward: bool) -> list[Tensor]:
    is_recorded = operator_state.records(step.structure, backward)
    return [torch.empty_like(step.state[0])] if is_recorded else []


# Backward ------------------------------------------------------------------------------------------------------------


def _keep(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    step = StepArguments(*inputs)
    structure, is_added = step.structure, step.residual is not None
    outputs = len(structure.layers[-1].weights)
    x = output[outputs] if is_added else step.x
    reads_x = structure.layers[0].keeps and SavedInput.of(step, 0, step.x) is None
    end = len(output) - operator_state.records(structure, False)
    tensors = [x if structure.normalization or reads_x else None, *step.plain, *output[outputs + is_added : end]]
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
        state = []
        if count := operator_state.tensors_read(structure, True):
            needs = [any(need_front), *need.plain]
            state = torch.ops.quantshard.read_state(module, ctx.key, needs, of_outputs[0])
        suffix = "_backward_drawing" if operator_state.draws(structure, True) else "_backward"
        results = getattr(torch.ops.quantshard, name + suffix)(
            weights, [], module, ctx.key, state[:count], ctx.out_features, norm_weight, norm_bias, ctx.eps,
            x, of_outputs, saved_tensors, of_total, ctx.x_shape, need_front, need.plain, need_biases,
        )  # fmt: skip
        if operator_state.records(structure, True):
            *results, amaxes = results
            torch.ops.quantshard.record_amaxes(module, ctx.key, True, state[1], amaxes)
    remaining = iter(results)
    of_x, of_norm_weight, of_norm_bias = (next(remaining, None) if is_needed else None for is_needed in need_front)
    of_weights = [next(remaining, None) if is_needed else None for is_needed in need.plain]
    of_biases = [next(remaining, None) if is_needed else None for is_needed in need.biases]
    of_layers: tuple[Any, ...] = (
        of_weights,
        [],
        None,
        None,
        [None] * len(need.state),
        None,
        of_norm_weight,
        of_norm_bias,
        None,
    )
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
    layers, other_tensors, new_amaxes = _saved(step)
    front, layer_grads = body(step, layers, other_tensors)
    weights = chain.from_iterable(tensor_grads[: len(tensor_grads) // 2] for tensor_grads in layer_grads)
    biases = chain.from_iterable(tensor_grads[len(tensor_grads) // 2 :] for tensor_grads in layer_grads)
    results = [gradient.contiguous() for gradient in (*front, *weights, *biases) if gradient is not None]
    return [*results, torch.stack(new_amaxes)] if new_amaxes else results


def _saved(step: StepArguments) -> tuple[list[LinearBackward], list[Tensor], list[Tensor]]:
    """Rebuild the layers; also return the tensors of `ForwardResults.others`, and the slots of new amaxes."""
    structure, like, saved_tensors = step.structure, step.grads[0], iter(step.saved)
    calls, states, new_amaxes = operator_state.layers_of(step, True)
    saved_layers = []
    need_weights, need_biases = structure.by_layer(step.need_weights), structure.by_layer(step.need_biases)
    for index, weights in enumerate(step.weights()):
        layer, saved_input = structure.layers[index], SavedInput.of(step, index, like)
        x_wgrad = WgradOperand(like.new_empty(0), False)
        if saved_input is not None:
            x_wgrad = saved_input.operand(saved_tensors)
        elif step.x is not None and not structure.normalization:
            x_wgrad = WgradOperand(step.x.reshape(-1, step.x.shape[-1]), False)
        calls[index].amaxes.update((key, next(saved_tensors)) for key in step.amaxes(index))
        operand_metadata, tensors = functional.to_saved(x_wgrad)
        needed = LinearGradMask(index > 0 or any(step.need_front), need_weights[index], need_biases[index])
        saved_layers.append(LinearBackward(
            calls[index], states[index], operand_metadata, len(weights), layer.biases, step.input_shape(index),
            like.dtype, layer.remakes, [*weights, *tensors], needed,
        ))  # fmt: skip
    return saved_layers, list(saved_tensors), new_amaxes


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
    return fakes + _new_amax_shapes(step, True)


TRACES_KERNELS = os.environ.get("QUANTSHARD_TRACE_KERNELS", "1") == "1"
"""Whether compiled graphs contain the insides of operators."""

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
    if not kernel_dispatch.kernels_on(values[-1].device) or any(value.dtype is torch.float64 for value in values):
        return None
    if any(isinstance(size, torch.SymInt) for value in values for size in value.shape):
        return None
    with graph_launch.traced_launches():
        return body(*arguments)


# Registration --------------------------------------------------------------------------------------------------------


def register_step(name: str, forward: ForwardOf, backward: BackwardOf) -> None:
    """Register the four operators of a step."""
    for kind, schema, body, shapes in (
        ("", FORWARD, partial(_forward, forward), _forward_shapes),
        ("_backward", BACKWARD, partial(_backward, backward), _backward_shapes),
    ):
        for draws in (False, True):
            full = f"quantshard::{name}{kind}" + ("_drawing" if draws else "")
            torch.library.define(full, schema, tags=(torch.Tag.cudagraph_unsafe,) if draws else ())
            torch.library.impl(full, "default", body)
            torch.library.register_fake(full, shapes)
            private_torch.trace_through(full, partial(_traced, body))
            _with_components(getattr(torch.ops.quantshard, full.removeprefix("quantshard::")).default)
            if not kind:
                torch.library.register_autograd(full, partial(_gradients, name), setup_context=_keep)


def _with_components(operator: Any) -> None:
    """Register the ATen rule that passes quantized weights to the operator as components."""

    @aten_rules.rule(operator, needed_by="torch.compile")
    def apart(weights: Sequence[QuantizedTensor], _: Any, *others: Any) -> list[Tensor]:
        module, key, *more = others
        results: list[Tensor] = operator([], components_of(weights), module, stored_key(key, weights), *more)
        return results
