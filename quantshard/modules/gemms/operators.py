"""Operators for torch.compile: linear layers, and what is fused with them, by the code that runs without it too.

Quantizing, noting amaxes and counting random draws stay out of the compiled graph, so a compiled layer has the bits of
an uncompiled one by construction, and what lies between operators is what is compiled. An operator takes tensors and
names: so the module goes in as a handle, the setting of autocast by its name, a quantized weight as its components.
What backward needs it returns behind its results. Of each step that `register_step` makes known there are three:

    NAME             forward; it may run again in backward where a compiled function checkpoints
    NAME_recording   the same where it notes amaxes, as under delayed scaling, or draws random words: never twice, nor
                     once for two calls, nor out of order
    NAME_backward    backward, which notes amaxes and takes random draws: likewise
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
from quantshard.modules.contexts import context, recompute
from quantshard.modules.contexts.recompute import LinearContext
from quantshard.modules.gemms import functional
from quantshard.modules.gemms.functional import LinearBackward, LinearGradMask, PreparedLinear, SavedLinear
from quantshard.modules.gemms.linear_operands import WgradOperand
from quantshard.modules.gemms.operator_arguments import (
    BACKWARD,
    FORWARD,
    PLACES,
    BackwardArguments,
    ForwardArguments,
    LayerArguments,
    SavedInput,
)
from quantshard.tensor import aten_rules
from quantshard.tensor.quantized_tensor import QuantizedTensor

# Forward -------------------------------------------------------------------------------------------------------------


class ForwardResults(NamedTuple):
    """What a step's forward gives: its outputs, with x + residual behind them if there is a residual.

    `inputs`: what wgrad reads of the input of each layer. `others`: what backward needs besides, the statistics of a
    normalization [tokens], float32, and the outputs [tokens, out_features] of all layers but the last.
    """

    outputs: Sequence[Tensor]
    inputs: Sequence[WgradOperand]
    others: Sequence[Tensor] = ()


ForwardOf = Callable[[ForwardArguments, list[PreparedLinear]], ForwardResults]
"""Computes a step, of layers that are ready."""


def _forward(body: ForwardOf, *arguments: Any) -> list[Tensor]:
    asked = ForwardArguments.of(arguments)
    layers = asked.layers
    ready = _ready(asked)
    context.drop_failed_backward()  # autocast does it on entering, but where that is compiled nothing is left of it
    results = body(asked, ready)
    found = [*results.outputs]
    for index, (layer, x_wgrad) in enumerate(zip(ready, results.inputs, strict=True)):
        kept = SavedInput.of(layers, index, asked.fused, asked.x.shape, asked.x)
        found += [] if kept is None else kept.tensors(x_wgrad)
        # the call keeps its own
        found += [layer.call.amaxes[key].clone() for key in layers.amaxes(asked.weights, index)]
    # a native product may have filled its rows up
    return [tensor.contiguous() for tensor in (*found, *results.others)]


def _ready(asked: ForwardArguments) -> list[PreparedLinear]:
    layers, given = asked.layers, asked.weights
    module, states = layers.states()
    biases, ready = iter(asked.biases), []
    weights, biased = layers.weights_of(module, given), layers.by_layer(layers.biased)
    for index, names in enumerate(layers.names):
        call = recompute.linear_context((id(module), ",".join(names)), not given.plain, layers.setting)
        for name in names:
            module.weight_operand(name, call, asked.x.device)
        added = [next(biases) if adds else None for adds in biased[index]]
        ready.append(PreparedLinear(weights[index], added, call, states[index]))
    return ready


def _forward_shapes(*arguments: Any) -> list[Tensor]:
    private_torch.check_order_is_kept()
    asked = ForwardArguments.of(arguments)
    x, layers = asked.x, asked.layers
    if context.is_delayed(layers.setting) and private_torch.is_recomputed_in_graph():
        raise UnsupportedOperationError(
            f"activation checkpointing inside a compiled function around the layer of {layers.weights!r}: under "
            "delayed scaling its second forward must scale by the amaxes of the first, which a graph does not keep; "
            "compile the checkpointed function and enter autocast in it, or use a recipe without past amaxes"
        )
    *inner, last = layers.by_layer(layers.out_features)
    found = [x.new_empty((*x.shape[:-1], features)) for features in last]
    if asked.residual is not None:
        found.append(torch.empty_like(x, memory_format=torch.contiguous_format))
    for index in range(len(layers.names)):
        kept = SavedInput.of(layers, index, asked.fused, x.shape, x)
        found += [] if kept is None else kept.empty(x)
        found += [x.new_empty((), dtype=torch.float32) for _ in layers.amaxes(asked.weights, index)]
    rows = x.reshape(-1, x.shape[-1]).shape[0]
    statistics = {"": 0, "RMSNorm": 1, "LayerNorm": 2}[asked.fused.normalization]
    found += [x.new_empty((rows,), dtype=torch.float32) for _ in range(statistics)]
    return found + [x.new_empty((rows, features)) for features in chain.from_iterable(inner)]


# Backward ------------------------------------------------------------------------------------------------------------


def _keep(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    asked = ForwardArguments.of(inputs)
    _, weights, layers, fused, residual, biases = asked
    outputs, is_added = len(layers.names[-1]), residual is not None
    x = output[outputs] if is_added else asked.x
    reads_x = layers.keeps[0] and SavedInput.of(layers, 0, fused, asked.x.shape, asked.x) is None
    saved = [x if fused.normalization or reads_x else None, *weights.plain, *output[outputs + is_added :]]
    ctx.save_for_backward(layers.module, fused.norm_weight, fused.norm_bias, *saved)
    ctx.dtype, ctx.layers, ctx.fused, ctx.x_shape = weights.dtype, layers[1:], fused[2:], asked.x.shape
    ctx.parts, ctx.is_added = len(weights.plain), is_added
    ctx.bias_dtypes = ",".join(str(bias.dtype).removeprefix("torch.") for bias in biases)
    ctx.set_materialize_grads(False)  # of what is kept for backward there are none


def _gradients(step: str, ctx: Any, grads: list[Tensor | None]) -> tuple[Any, ...]:
    module, norm_weight, norm_bias, x, *saved = ctx.saved_tensors
    weights, saved = saved[: ctx.parts], saved[ctx.parts :]
    layers = LayerArguments(module, *ctx.layers)
    need = {name: ctx.needs_input_grad[place] for name, place in PLACES.items()}
    need_front = [need["x"] or need["residual"], need["norm_weight"], need["norm_bias"]]
    biases = iter(need["biases"])
    need_biases = [adds and next(biases) for adds in layers.biased]
    last = layers.by_layer(layers.out_features)[-1]
    of_outputs, of_total = functional.filled(grads[: len(last)], last), grads[len(last)] if ctx.is_added else None
    found = [of_total] if need_front[0] else []
    if of_outputs:
        found = getattr(torch.ops.quantshard, f"{step}_backward")(
            of_outputs, weights, [], "", ctx.dtype, *layers, norm_weight, norm_bias, *ctx.fused, x, saved, of_total,
            ctx.x_shape, need_front, need["plain"], need_biases, ctx.bias_dtypes,
        )  # fmt: skip
    left = iter(found)
    of_x, of_norm_weight, of_norm_bias = (next(left, None) if needed else None for needed in need_front)
    gradients: dict[str, Any] = dict.fromkeys(PLACES)
    gradients |= {"x": of_x if need["x"] else None, "residual": of_x if need["residual"] else None}
    gradients |= {"norm_weight": of_norm_weight, "norm_bias": of_norm_bias, "components": []}
    gradients["plain"] = [next(left, None) if needed else None for needed in need["plain"]]
    gradients["biases"] = [next(left, None) if needed else None for needed in need["biases"]]
    return tuple(gradients.values())


class StepGradients(NamedTuple):
    """Those of x and of the normalization's weight and bias; and of each layer's weights, then biases.

    None for what is not needed.
    """

    front: Sequence[Tensor | None]
    layers: Sequence[Sequence[Tensor | None]]


BackwardOf = Callable[[BackwardArguments, list[SavedLinear], list[Tensor]], StepGradients]
"""Computes the gradients, with the `others` of `ForwardResults`."""


def _backward(body: BackwardOf, *arguments: Any) -> list[Tensor]:
    asked = BackwardArguments.of(arguments)
    layers, others = _saved(asked)
    front, of_layers = body(asked, layers, others)
    weights = chain.from_iterable(found[: len(found) // 2] for found in of_layers)
    biases = chain.from_iterable(found[len(found) // 2 :] for found in of_layers)
    return [gradient.contiguous() for gradient in (*front, *weights, *biases) if gradient is not None]


def _saved(asked: BackwardArguments) -> tuple[list[SavedLinear], list[Tensor]]:
    """The layers, and what forward saved besides for them."""
    layers, like, left = asked.layers, asked.grads[0], iter(asked.saved)
    module, states = layers.states()
    now, bias_dtypes = context.setting(layers.setting), layers.by_layer(asked.dtypes_of_biases)
    need_weights, need_biases = layers.by_layer(asked.need_weights), layers.by_layer(asked.need_biases)
    found = []
    for index, weights in enumerate(layers.weights_of(module, asked.weights)):
        kept = SavedInput.of(layers, index, asked.fused, asked.x_shape, like)
        x_wgrad = WgradOperand(like.new_empty(0), False)
        if kept is not None:
            x_wgrad = kept.operand(left)
        elif asked.x is not None and not asked.fused.normalization:
            x_wgrad = WgradOperand(asked.x.reshape(-1, asked.x.shape[-1]), False)
        call = LinearContext(now.recipe, now.amax_reduction_group, now.strict)
        call.amaxes.update((key, next(left)) for key in layers.amaxes(asked.weights, index))
        rebuild, tensors = functional.to_saved(x_wgrad)
        saved = LinearBackward(
            call, states[index], rebuild, len(weights), bias_dtypes[index],
            layers.input_shape(asked.x_shape, index), like.dtype, layers.remakes[index],
        )  # fmt: skip
        needed = LinearGradMask(index > 0 or asked.reads_gradient_of_x, need_weights[index], need_biases[index])
        found.append(SavedLinear(saved, [*weights, *tensors], needed))
    return found, list(left)


def _backward_shapes(*arguments: Any) -> list[Tensor]:
    asked = BackwardArguments.of(arguments)
    layers, like, fused = asked.layers, asked.grads[0], asked.fused
    need_x, *need_parameters = asked.need_front
    found = [like.new_empty(asked.x_shape)] if need_x else []
    parameters = zip((fused.norm_weight, fused.norm_bias), need_parameters, strict=True)
    found += [torch.empty_like(parameter) for parameter, needed in parameters if needed and parameter is not None]
    in_features = [
        layers.input_shape(asked.x_shape, layer)[-1] for layer, names in enumerate(layers.names) for _ in names
    ]
    shapes = list(zip(layers.out_features, in_features, strict=True))
    for shape, needed in zip(shapes, asked.need_weights, strict=True):
        found += [like.new_empty(shape, dtype=asked.weights.dtype)] if needed else []
    for (features, _), dtype, needed in zip(shapes, asked.dtypes_of_biases, asked.need_biases, strict=True):
        found += [like.new_empty((features,), dtype=dtype)] if needed else []
    return found


# Registration --------------------------------------------------------------------------------------------------------


def register_step(name: str, forward: ForwardOf, backward: BackwardOf) -> None:
    """Make the operators of a step known."""
    for suffix, schema, body, shapes in (
        ("", FORWARD, partial(_forward, forward), _forward_shapes),
        ("_recording", FORWARD, partial(_forward, forward), _forward_shapes),
        ("_backward", BACKWARD, partial(_backward, backward), _backward_shapes),
    ):
        full = f"quantshard::{name}{suffix}"
        torch.library.define(full, schema)
        torch.library.impl(full, "default", body)
        torch.library.register_fake(full, shapes)
        operator = getattr(torch.ops.quantshard, name + suffix).default
        _with_components(operator)
        if suffix != "_backward":
            torch.library.register_autograd(full, partial(_gradients, name), setup_context=_keep)
        if suffix:
            private_torch.keep_order(operator)


def _with_components(operator: Any) -> None:
    """Quantized weights go to the same operator as their components."""

    @aten_rules.rule(operator, needed_by="torch.compile")
    def apart(first: Any, weights: Sequence[QuantizedTensor], *others: Any) -> list[Tensor]:
        parts = {
            f"{part}:{name}": component
            for part, weight in enumerate(weights)
            for name, component in weight.quantized_storage.components.items()
        }
        found: list[Tensor] = operator(first, [], list(parts.values()), ",".join(parts), *others[2:])
        return found
