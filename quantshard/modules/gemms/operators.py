"""Operators for torch.compile: linear layers, and what is fused with them, by the code that runs without it too.

Quantizing, noting amaxes and counting random draws stay out of the compiled graph, so a compiled layer has the bits of
an uncompiled one by construction, and what lies between operators is what is compiled. An operator takes tensors and
numbers: so the module goes in as a handle, what is fixed by a key, a quantized weight as its components. What backward
needs it returns behind its results. Of each step that `register_step` makes known there are four:

    NAME                      forward; it may run again in backward where a compiled function checkpoints
    NAME_recording            the same where it notes amaxes, as under delayed scaling, or draws random words: never
                              twice, nor once for two calls, nor out of order, nor in a CUDA graph, whose replays would
                              scale by the amaxes of the capture and note none
    NAME_backward             backward
    NAME_backward_recording   the same where it notes amaxes or draws random words: likewise

What does not record computes of tensors that it is given, on their device: a CUDA graph may hold it
(`mode="reduce-overhead"`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quantshard import private_torch
from quantshard.errors import UnsupportedOperationError
from quantshard.kernels import workspace
from quantshard.modules.activation_storage import STORAGES
from quantshard.modules.contexts import context, context_warnings, recompute
from quantshard.modules.contexts.recompute import LinearContext
from quantshard.modules.gemms import functional
from quantshard.modules.gemms.functional import LinearBackward, LinearGradMask, PreparedLinear, SavedLinear
from quantshard.modules.gemms.linear_operands import WgradOperand
from quantshard.modules.gemms.operator_arguments import (
    BACKWARD,
    FORWARD,
    BackwardArguments,
    ForwardArguments,
    LayerArguments,
    SavedInput,
    components_of,
)
from quantshard.tensor import aten_rules
from quantshard.tensor.quantized_tensor import QuantizedTensor

# Forward -------------------------------------------------------------------------------------------------------------


class ForwardResults(NamedTuple):
    """What a step's forward gives: its outputs, with x + residual behind them if there is a residual.

    `inputs`: what wgrad reads of the input of each layer. `others`: what backward needs besides, the statistics of a
    normalization [tokens], float32, and the outputs [tokens, out_features] of all layers but the last, as they are
    stored.
    """

    outputs: Sequence[Tensor]
    inputs: Sequence[WgradOperand]
    others: Sequence[Tensor] = ()


ForwardOf = Callable[[ForwardArguments, list[PreparedLinear]], ForwardResults]
"""Computes a step, of layers that are ready."""


@workspace.separate_allocations()
def _forward(body: ForwardOf, *arguments: Any) -> list[Tensor]:
    asked = ForwardArguments.of(arguments)
    layers = asked.layers
    ready = _ready(asked)
    context.drop_failed_backward()  # autocast does it on entering, but where that is compiled nothing is left of it
    results = body(asked, ready)
    found = [*results.outputs]
    for index, (layer, x_wgrad) in enumerate(zip(ready, results.inputs, strict=True)):
        kept = SavedInput.of(layers, index, asked.x.shape, asked.x)
        found += [] if kept is None else kept.tensors(x_wgrad)
        # the call keeps its own
        found += [layer.call.amaxes[key].clone() for key in layers.amaxes(index)]
    # a native product may have filled its rows up
    return [tensor.contiguous() for tensor in (*found, *results.others)]


def _ready(asked: ForwardArguments) -> list[PreparedLinear]:
    layers, structure = asked.layers, asked.layers.structure
    module, states = layers.states()
    biases, ready, weights = iter(asked.biases), [], layers.weights_of(module)
    if structure.setting == context.NO_AUTOCAST and not layers.plain and structure.is_trained:
        context_warnings.warn_of_training_outside(module, structure.layers[0].weights[0])
    for index, layer in enumerate(structure.layers):
        names = id(module), ",".join(layer.weights)
        call = recompute.linear_context(names, not layers.plain, structure.record, structure.setting)
        for name in layer.weights:
            module.weight_operand(name, call, asked.x.device)
        added = [None if dtype is None else next(biases) for dtype in layer.biases]
        ready.append(PreparedLinear(weights[index], added, call, states[index]))
    return ready


def _forward_shapes(*arguments: Any) -> list[Tensor]:
    private_torch.check_order_is_kept()
    asked = ForwardArguments.of(arguments)
    x, layers, structure = asked.x, asked.layers, asked.layers.structure
    if context.is_delayed(structure.setting) and private_torch.is_recomputed_in_graph():
        raise UnsupportedOperationError(
            f"activation checkpointing inside a compiled function around the layer of {structure.names!r}: under "
            "delayed scaling its second forward must scale by the amaxes of the first, which a graph does not keep; "
            "compile the checkpointed function and enter autocast in it, or use a recipe without past amaxes"
        )
    *inner, last = structure.by_layer(layers.out_features)
    found = [x.new_empty((*x.shape[:-1], features)) for features in last]
    if asked.residual is not None:
        found.append(torch.empty_like(x, memory_format=torch.contiguous_format))
    for index in range(len(structure.layers)):
        kept = SavedInput.of(layers, index, x.shape, x)
        found += [] if kept is None else kept.empty(x)
        found += [x.new_empty((), dtype=torch.float32) for _ in layers.amaxes(index)]
    rows = x.reshape(-1, x.shape[-1]).shape[0]
    statistics = {"": 0, "RMSNorm": 1, "LayerNorm": 2}[structure.normalization]
    found += [x.new_empty((rows,), dtype=torch.float32) for _ in range(statistics)]
    storage = STORAGES[structure.activation_storage]
    for features in chain.from_iterable(inner):
        found += storage.empty(x.new_empty((rows, features)))
    return found


# Backward ------------------------------------------------------------------------------------------------------------


def _keep(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    asked = ForwardArguments.of(inputs)
    layers, structure, is_added = asked.layers, asked.layers.structure, asked.residual is not None
    outputs = len(structure.layers[-1].weights)
    x = output[outputs] if is_added else asked.x
    reads_x = structure.layers[0].keeps and SavedInput.of(layers, 0, asked.x.shape, asked.x) is None
    saved = [x if structure.normalization or reads_x else None, *layers.plain, *output[outputs + is_added :]]
    ctx.save_for_backward(layers.module, layers.norm_weight, layers.norm_bias, *saved)
    ctx.key, ctx.out_features, ctx.eps = layers.key, layers.out_features, layers.eps
    ctx.x_shape, ctx.parts, ctx.is_added = asked.x.shape, len(layers.plain), is_added
    ctx.set_materialize_grads(False)  # of what is kept for backward there are none


def _gradients(step: str, ctx: Any, grads: list[Tensor | None]) -> tuple[Any, ...]:
    module, norm_weight, norm_bias, x, *saved = ctx.saved_tensors
    weights, saved = saved[: ctx.parts], saved[ctx.parts :]
    layers = LayerArguments(weights, [], module, ctx.key, ctx.out_features, norm_weight, norm_bias, ctx.eps)
    need: Any = ForwardArguments.of(ctx.needs_input_grad)
    need_front = [need.x or need.residual, need.layers.norm_weight, need.layers.norm_bias]
    biases = iter(need.biases)
    need_biases = [dtype is not None and next(biases) for each in layers.structure.layers for dtype in each.biases]
    last = layers.structure.by_layer(layers.out_features)[-1]
    of_outputs, of_total = functional.filled(grads[: len(last)], last), grads[len(last)] if ctx.is_added else None
    found = [of_total] if need_front[0] else []
    if of_outputs:
        suffix = "_backward_recording" if context.counts_backwards(layers.structure.setting) else "_backward"
        found = getattr(torch.ops.quantshard, step + suffix)(
            of_outputs, *layers, x, saved, of_total, ctx.x_shape, need_front, need.layers.plain, need_biases
        )
    left = iter(found)
    of_x, of_norm_weight, of_norm_bias = (next(left, None) if needed else None for needed in need_front)
    of_weights = [next(left, None) if needed else None for needed in need.layers.plain]
    of_biases = [next(left, None) if needed else None for needed in need.biases]
    of_layers: dict[str, Any] = dict.fromkeys(LayerArguments._fields)
    of_layers |= {"plain": of_weights, "components": [], "norm_weight": of_norm_weight, "norm_bias": of_norm_bias}
    return (of_x if need.x else None, *of_layers.values(), of_x if need.residual else None, of_biases)


class StepGradients(NamedTuple):
    """Those of x and of the normalization's weight and bias; and of each layer's weights, then biases.

    None for what is not needed.
    """

    front: Sequence[Tensor | None]
    layers: Sequence[Sequence[Tensor | None]]


BackwardOf = Callable[[BackwardArguments, list[SavedLinear], list[Tensor]], StepGradients]
"""Computes the gradients, with the `others` of `ForwardResults`."""


@workspace.separate_allocations()
def _backward(body: BackwardOf, *arguments: Any) -> list[Tensor]:
    asked = BackwardArguments.of(arguments)
    layers, others = _saved(asked)
    front, of_layers = body(asked, layers, others)
    weights = chain.from_iterable(found[: len(found) // 2] for found in of_layers)
    biases = chain.from_iterable(found[len(found) // 2 :] for found in of_layers)
    return [gradient.contiguous() for gradient in (*front, *weights, *biases) if gradient is not None]


def _saved(asked: BackwardArguments) -> tuple[list[SavedLinear], list[Tensor]]:
    """The layers, and what forward saved besides for them."""
    layers, structure, like, left = asked.layers, asked.layers.structure, asked.grads[0], iter(asked.saved)
    module, states = layers.states()
    now, found = context.setting(structure.setting), []
    need_weights, need_biases = structure.by_layer(asked.need_weights), structure.by_layer(asked.need_biases)
    for index, weights in enumerate(layers.weights_of(module)):
        kept = SavedInput.of(layers, index, asked.x_shape, like)
        x_wgrad = WgradOperand(like.new_empty(0), False)
        if kept is not None:
            x_wgrad = kept.operand(left)
        elif asked.x is not None and not structure.normalization:
            x_wgrad = WgradOperand(asked.x.reshape(-1, asked.x.shape[-1]), False)
        call = LinearContext(now.recipe, now.amax_reduction_group, now.strict)
        call.amaxes.update((key, next(left)) for key in layers.amaxes(index))
        rebuild, tensors = functional.to_saved(x_wgrad)
        saved = LinearBackward(
            call, states[index], rebuild, len(weights), structure.layers[index].biases,
            layers.input_shape(asked.x_shape, index), like.dtype, structure.layers[index].remakes,
        )  # fmt: skip
        needed = LinearGradMask(index > 0 or asked.reads_gradient_of_x, need_weights[index], need_biases[index])
        found.append(SavedLinear(saved, [*weights, *tensors], needed))
    return found, list(left)


def _backward_shapes(*arguments: Any) -> list[Tensor]:
    asked = BackwardArguments.of(arguments)
    layers, structure, like = asked.layers, asked.layers.structure, asked.grads[0]
    need_x, *need_parameters = asked.need_front
    found = [like.new_empty(asked.x_shape)] if need_x else []
    parameters = zip((layers.norm_weight, layers.norm_bias), need_parameters, strict=True)
    found += [torch.empty_like(parameter) for parameter, needed in parameters if needed and parameter is not None]
    inputs = [
        layers.input_shape(asked.x_shape, index) for index, each in enumerate(structure.layers) for _ in each.weights
    ]
    shapes = [(features, shape[-1]) for features, shape in zip(layers.out_features, inputs, strict=True)]
    for shape, needed in zip(shapes, asked.need_weights, strict=True):
        found += [like.new_empty(shape, dtype=structure.dtype)] if needed else []
    dtypes = chain.from_iterable(each.biases for each in structure.layers)
    for features, dtype, needed in zip(layers.out_features, dtypes, asked.need_biases, strict=True):
        found += [like.new_empty((features,), dtype=dtype)] if needed else []
    return found


# Registration --------------------------------------------------------------------------------------------------------


def register_step(name: str, forward: ForwardOf, backward: BackwardOf) -> None:
    """Make the operators of a step known."""
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
            _with_components(operator)
            if not kind:
                torch.library.register_autograd(full, partial(_gradients, name), setup_context=_keep)
            if records:
                private_torch.keep_order(operator)


def _with_components(operator: Any) -> None:
    """Quantized weights go to the same operator as their components."""

    @aten_rules.rule(operator, needed_by="torch.compile")
    def apart(first: Any, weights: Sequence[QuantizedTensor], *others: Any) -> list[Tensor]:
        found: list[Tensor] = operator(first, [], components_of(weights), *others[1:])
        return found
