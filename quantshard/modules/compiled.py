"""torch.compile: a linear layer as an operator, whose body is the code that runs without compiling.

Quantizing, noting amaxes and counting random draws stay out of the compiled graph, so a compiled layer has the bits of
an uncompiled one by construction, and what lies between linear layers is what is compiled. An operator takes tensors
and names: so the module goes in as a handle, the setting of autocast by its name, a quantized weight as its components.

    linear             forward; it may run again in backward where a compiled function checkpoints
    linear_recording   the same under delayed scaling, which notes amaxes: never twice, nor out of order
    linear_backward    backward, which notes amaxes and takes random draws: likewise
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import count
from typing import Any, NamedTuple, Protocol
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from quantshard import ops, private_torch, sharding
from quantshard.errors import UnsupportedOperationError
from quantshard.formats import ALL
from quantshard.modules import context, functional, recompute
from quantshard.modules.functional import Needed
from quantshard.modules.linear_operands import LinearState, WgradOperand, keeps_transposed
from quantshard.modules.recompute import Call
from quantshard.recipe import Cell, Gemm, Recipe, TensorRole
from quantshard.storage import QuantizedStorage
from quantshard.tensor import QuantizedTensor


class Owner(Protocol):
    """What is asked of the module of a linear layer: a `QuantizedModule`."""

    def _linear_state(self, weights: Sequence[str], recipe: Recipe, prefix: str = "") -> LinearState: ...

    def _operand(self, name: str, call: Call, device: torch.device) -> Tensor: ...


_modules: WeakValueDictionary[int, Owner] = WeakValueDictionary()
_numbers = count()


def handle(module: Owner) -> Tensor:
    """A number for a module, as an int64 tensor: one graph serves all values of a tensor, but not of an int."""
    number = next(_numbers)
    _modules[number] = module
    return torch.tensor(number, dtype=torch.int64, device="cpu")


class Weights(NamedTuple):
    """The weights of a layer as operators take them: `plain`, or none and the `components` of quantized ones.

    `names`: those of the components, with commas, each behind the number of its weight and a colon.
    """

    plain: Sequence[Tensor]
    components: Sequence[Tensor]
    names: str
    dtype: torch.dtype


class Layer(NamedTuple):
    """Which linear layer of a module: its handle, the names of its weights (with commas), the prefix of its histories'
    names, and the setting of autocast.

    `record`: whether amaxes seen now are recorded (in training).
    """

    module: Tensor
    weights: str
    prefix: str
    record: bool
    setting: str

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the weights."""
        return tuple(self.weights.split(","))

    def find(self) -> tuple[Owner, LinearState]:
        """The module, and the state of this layer."""
        module, recipe = _modules[int(self.module)], context.setting(self.setting).recipe
        return module, replace(module._linear_state(self.names, recipe, self.prefix), record=self.record)

    def weights_of(self, module: Owner, given: Weights) -> list[Tensor]:
        """The weights put together again; a copy that was not given is that of the live one."""
        if given.plain:
            return list(given.plain)
        components: dict[str, dict[str, Tensor]] = {str(part): {} for part in range(len(self.names))}
        for name, component in zip(given.names.split(","), given.components, strict=True):
            part, _, component_name = name.partition(":")
            components[part][component_name] = component
        return [
            _rebuilt(getattr(module, name), found, given.dtype)
            for name, found in zip(self.names, components.values(), strict=True)
        ]


def _rebuilt(weight: Tensor, components: dict[str, Tensor], dtype: torch.dtype) -> Tensor:
    live: Any = private_torch.local_tensor(weight)
    storage: QuantizedStorage = live._storage
    whole = replace(storage, components=components, fetch=lambda which: storage.with_copy(which).components)
    return QuantizedTensor(whole, dtype)


_WEIGHTS = "Tensor[] plain, Tensor[] components, str names, ScalarType dtype"
_LAYER = "Tensor module, str weights, str prefix, bool record, str setting"
_FORWARD = f"(Tensor x, {_WEIGHTS}, {_LAYER}, Tensor[] biases, SymInt[] out_features, bool keeps_input) -> Tensor[]"
_BACKWARD = (
    f"(Tensor[] grads, {_WEIGHTS}, {_LAYER}, Tensor[] saved, SymInt[] x_shape, bool need_x, bool[] need_weights, "
    "bool[] need_biases, ScalarType bias_dtype) -> Tensor[]"
)


class _Forward(NamedTuple):
    """Arguments of `linear`, grouped. `biases`: one for each weight, or none at all."""

    x: Tensor
    weights: Weights
    layer: Layer
    biases: Sequence[Tensor]
    out_features: Sequence[int]
    keeps_input: bool

    @staticmethod
    def of(arguments: Sequence[Any]) -> _Forward:
        return _Forward(arguments[0], Weights(*arguments[1:5]), Layer(*arguments[5:10]), *arguments[10:])


def linear(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    module: Tensor,
    names: Sequence[str],
    prefix: str,
    record: bool,
) -> list[Tensor]:
    """What `QuantizedModule._linears` computes, as a step of the graph that is being traced."""
    setting = context.current_setting()
    stored = [isinstance(weight, QuantizedTensor) for weight in weights]
    if any(stored) and not all(stored):
        raise UnsupportedOperationError(
            f"torch.compile of a layer whose weights {', '.join(names)} are quantized in part; store all or none "
            "quantized, or leave this layer out of the compiled function"
        )
    if not context.quantizes(setting) and not any(stored):
        return [functional.plain_linear(x, weight, bias) for weight, bias in zip(weights, biases, strict=True)]
    operator = torch.ops.quantshard.linear_recording if context.is_delayed(setting) else torch.ops.quantshard.linear
    keeps_input = torch.is_grad_enabled() and any(weight.requires_grad for weight in weights)
    given = [bias for bias in biases if bias is not None]
    out: list[Tensor] = operator(
        x, weights, [], "", weights[0].dtype, module, ",".join(names), prefix, record, setting, given,
        [weight.shape[0] for weight in weights], keeps_input,
    )  # fmt: skip
    return out[: len(weights)]


# Forward -------------------------------------------------------------------------------------------------------------


def _forward(*arguments: Any) -> list[Tensor]:
    """The outputs, and what backward needs: the input as wgrad reads it, and the amaxes that plain weights scale by."""
    x, given, layer, biases, _, keeps_input = _Forward.of(arguments)
    module, state = layer.find()
    call = recompute.call((id(module), layer.weights), not given.plain, layer.setting)
    for name in layer.names:
        module._operand(name, call, x.device)
    context.drop_failed_backward()  # autocast does it on entering, but where that is compiled nothing is left of it
    weights = layer.weights_of(module, given)
    outputs, x_wgrad = functional.forward(
        x.reshape(-1, x.shape[-1]), x.shape, weights, biases or [None] * len(weights), call, state, keeps_input
    )
    saved = [y.contiguous() for y in outputs]  # a native product may have filled its rows up
    if keeps_input and isinstance(x_wgrad.operand, QuantizedStorage):
        kept = x_wgrad.operand
        saved += [kept.components[component.name].contiguous() for component in kept.cell.format.components]
    if _scales_by_past(given, layer.setting):
        # the call keeps its own
        saved += [call.amaxes[TensorRole.WEIGHT, part].clone() for part in range(len(weights))]
    return saved


def _forward_shapes(*arguments: Any) -> list[Tensor]:
    x, weights, layer, _, out_features, keeps_input = _Forward.of(arguments)
    if context.is_delayed(layer.setting) and private_torch.is_recomputed_in_graph():
        raise UnsupportedOperationError(
            f"activation checkpointing inside a compiled function around the layer of {layer.weights!r}: under delayed "
            "scaling its second forward must scale by the amaxes of the first, which a graph does not keep; compile "
            "the checkpointed function and enter autocast in it, or use a recipe without past amaxes"
        )
    outputs = [x.new_empty((*x.shape[:-1], features)) for features in out_features]
    kept, transposed = _kept_input(layer.setting, x)
    if keeps_input and kept is not None:
        for component in kept.format.components:
            grid = [
                1 if cover == ALL else sharding.ceil_div(size, cover)
                for size, cover in zip(_kept_shape(x.shape, kept, transposed), component.covers, strict=True)
            ]
            outputs.append(x.new_empty(grid, dtype=component.encoding.storage))
    if _scales_by_past(weights, layer.setting):
        outputs += [x.new_empty((), dtype=torch.float32) for _ in out_features]
    return outputs


def _kept_input(setting: str, like: Tensor) -> tuple[Cell | None, bool]:
    """How the input is quantized for wgrad, if it is, and whether its transpose is kept; `like`: of its dtype."""
    recipe = context.setting(setting).recipe
    first, second = (recipe.cell(TensorRole.INPUT, gemm) for gemm in (Gemm.FPROP, Gemm.WGRAD))
    return second, keeps_transposed(first, second, like)


def _kept_shape(x_shape: Sequence[int], cell: Cell, transposed: bool) -> tuple[int, int]:
    """Rows and columns of the input as wgrad reads it; the Hadamard transform pads the summed dim."""
    features, tokens = x_shape[-1], 1
    for size in x_shape[:-1]:
        tokens = tokens * size
    if not transposed:
        return tokens, features
    return features, tokens + (-tokens % 16 if cell.scaling.random_hadamard else 0)


def _scales_by_past(weights: Weights, setting: str) -> bool:
    """True for high-precision weights under delayed scaling."""
    cell = context.setting(setting).recipe.weight
    plain = any(not isinstance(weight, QuantizedTensor) for weight in weights.plain)
    return plain and bool(cell and cell.scaling.history)


# Backward ------------------------------------------------------------------------------------------------------------


def _keep(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    forward = _Forward.of(inputs)
    kept, _ = _kept_input(forward.layer.setting, forward.x)
    high_precision = [forward.x] if kept is None and forward.keeps_input else []
    parts = len(forward.weights.plain)
    ctx.save_for_backward(forward.layer.module, *forward.weights.plain, *high_precision, *output[parts:])
    ctx.dtype, ctx.layer, ctx.x_shape, ctx.parts = forward.weights.dtype, forward.layer[1:], forward.x.shape, parts
    ctx.bias_dtype = forward.biases[0].dtype if forward.biases else forward.weights.dtype
    ctx.set_materialize_grads(False)  # of what is kept for backward there are none


def _gradients(ctx: Any, grads: list[Tensor | None]) -> tuple[Any, ...]:
    module, *saved = ctx.saved_tensors
    weights, saved = saved[: ctx.parts], saved[ctx.parts :]
    need_x, need_weights, need_biases = (ctx.needs_input_grad[index] for index in (0, 1, 10))
    gradients: list[Any] = [None] * len(ctx.needs_input_grad)
    gradients[1], gradients[2], gradients[10] = [None] * len(need_weights), [], [None] * len(need_biases)
    of_outputs = _filled(grads[: ctx.parts], weights, ctx.x_shape)
    if not of_outputs:
        return tuple(gradients)
    found = torch.ops.quantshard.linear_backward(
        of_outputs, weights, [], "", ctx.dtype, module, *ctx.layer, saved, ctx.x_shape, need_x, need_weights,
        need_biases, ctx.bias_dtype,
    )  # fmt: skip
    left = iter(found)
    gradients[0] = next(left) if need_x else None
    gradients[1] = [next(left) if need else None for need in need_weights]
    gradients[10] = [next(left) if need else None for need in need_biases]
    return tuple(gradients)


def _filled(grads: Sequence[Tensor | None], weights: Sequence[Tensor], x_shape: Sequence[int]) -> list[Tensor]:
    """Gradients of the outputs, zeros where one was not used; none if none was."""
    first = next((grad for grad in grads if grad is not None), None)
    if first is None:
        return []
    return [
        first.new_zeros((*x_shape[:-1], weight.shape[0])) if grad is None else grad
        for grad, weight in zip(grads, weights, strict=True)
    ]


class _Backward(NamedTuple):
    """Arguments of `linear_backward`, grouped."""

    grads: Sequence[Tensor]
    weights: Weights
    layer: Layer
    saved: Sequence[Tensor]
    x_shape: Sequence[int]
    needed: Needed
    bias_dtype: torch.dtype

    @staticmethod
    def of(arguments: Sequence[Any]) -> _Backward:
        grads, saved, x_shape, *needed, bias_dtype = arguments[0], *arguments[10:]
        return _Backward(
            grads, Weights(*arguments[1:5]), Layer(*arguments[5:10]), saved, x_shape, Needed(*needed), bias_dtype
        )


def _backward(*arguments: Any) -> list[Tensor]:
    """The gradients that are needed, of the input, the weights and the biases."""
    grads, given, layer, saved, x_shape, needed, bias_dtype = _Backward.of(arguments)
    module, state = layer.find()
    parts = len(layer.names)
    asked = context.setting(layer.setting)
    call = Call(asked.recipe, asked.amax_reduction_group, asked.strict)
    if _scales_by_past(given, layer.setting):
        call.amaxes |= {(TensorRole.WEIGHT, part): amax for part, amax in enumerate(saved[-parts:])}
        saved = saved[:-parts]
    kept, transposed = _kept_input(layer.setting, grads[0])
    x_wgrad = WgradOperand(grads[0], False)
    if saved and kept is None:
        x_wgrad = WgradOperand(saved[0].reshape(-1, x_shape[-1]), False)
    elif saved and kept is not None:
        names = [component.name for component in kept.format.components]
        shard = sharding.whole(_kept_shape(x_shape, kept, transposed))
        x_wgrad = WgradOperand(QuantizedStorage(kept, shard, dict(zip(names, saved, strict=True))), transposed)
    weights = layer.weights_of(module, given)
    needed = needed._replace(biases=needed.biases or [False] * parts)
    bias_dtypes = [bias_dtype] * parts
    ways = functional.quantized(grads, call, state, bias_dtypes, needed)
    dx, dws, dbs = functional.gradients(
        ways, weights, x_wgrad, call, state, x_shape, grads[0].dtype, bias_dtypes, needed
    )
    return [each.contiguous() for each in (dx, *dws, *dbs) if each is not None]


def _backward_shapes(*arguments: Any) -> list[Tensor]:
    grads, weights, _, _, x_shape, needed, bias_dtype = _Backward.of(arguments)
    outputs = [grads[0].new_empty(x_shape)] if needed.x else []
    for grad, need in zip(grads, needed.weights, strict=True):
        if need:
            outputs.append(grad.new_empty((grad.shape[-1], x_shape[-1]), dtype=weights.dtype))
    for grad, need in zip(grads, needed.biases or [False] * len(grads), strict=True):
        if need:
            outputs.append(grad.new_empty((grad.shape[-1],), dtype=bias_dtype))
    return outputs


# Registration --------------------------------------------------------------------------------------------------------


def _with_components(operator: Any) -> None:
    """Quantized weights go to the same operator as their components."""

    @ops.rule(operator, needed_by="torch.compile")
    def apart(first: Any, weights: Sequence[QuantizedTensor], *others: Any) -> list[Tensor]:
        parts = {
            f"{part}:{name}": component
            for part, weight in enumerate(weights)
            for name, component in weight._storage.components.items()
        }
        found: list[Tensor] = operator(first, [], list(parts.values()), ",".join(parts), *others[2:])
        return found


for _name, _schema, _body, _shapes in (
    ("linear", _FORWARD, _forward, _forward_shapes),
    ("linear_recording", _FORWARD, _forward, _forward_shapes),
    ("linear_backward", _BACKWARD, _backward, _backward_shapes),
):
    torch.library.define(f"quantshard::{_name}", _schema)
    torch.library.impl(f"quantshard::{_name}", "default", _body)
    torch.library.register_fake(f"quantshard::{_name}", _shapes)
    _with_components(getattr(torch.ops.quantshard, _name).default)
    if _name != "linear_backward":
        torch.library.register_autograd(f"quantshard::{_name}", _gradients, setup_context=_keep)
    if _name != "linear":
        private_torch.keep_order(getattr(torch.ops.quantshard, _name).default)
