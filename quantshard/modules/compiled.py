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
from quantshard.modules.functional import LinearState, WgradOperand
from quantshard.modules.recompute import Call
from quantshard.recipe import Cell, Gemm, Recipe, TensorRole
from quantshard.storage import QuantizedStorage
from quantshard.tensor import QuantizedTensor


class Owner(Protocol):
    """What is asked of the module of a linear layer: a `QuantizedModule`."""

    def _linear_state(self, weight: str, recipe: Recipe, prefix: str = "") -> LinearState: ...

    def _operand(self, name: str, call: Call, device: torch.device) -> Tensor: ...


_modules: WeakValueDictionary[int, Owner] = WeakValueDictionary()
_numbers = count()


def handle(module: Owner) -> Tensor:
    """A number for a module, as an int64 tensor: one graph serves all values of a tensor, but not of an int."""
    number = next(_numbers)
    _modules[number] = module
    return torch.tensor(number, dtype=torch.int64, device="cpu")


class Weight(NamedTuple):
    """A weight as operators take it: `plain`, or None and the `components` of a quantized one, named with commas."""

    plain: Tensor | None
    components: Sequence[Tensor]
    names: str
    dtype: torch.dtype


class Layer(NamedTuple):
    """Which linear layer of a module: its handle, the names of the weight and of the histories, and the setting.

    `record`: whether amaxes seen now are recorded (in training).
    """

    module: Tensor
    weight: str
    prefix: str
    record: bool
    setting: str

    def find(self) -> tuple[Owner, LinearState]:
        """The module, and the state of this layer."""
        module, recipe = _modules[int(self.module)], context.setting(self.setting).recipe
        return module, replace(module._linear_state(self.weight, recipe, self.prefix), record=self.record)

    def weight_of(self, module: Owner, given: Weight) -> Tensor:
        """The weight put together again; a copy that was not given is that of the live one."""
        if given.plain is not None:
            return given.plain
        live: Any = private_torch.local_tensor(getattr(module, self.weight))
        storage: QuantizedStorage = live._storage
        components = dict(zip(given.names.split(","), given.components, strict=True))
        whole = replace(storage, components=components, fetch=lambda which: storage.with_copy(which).components)
        return QuantizedTensor(whole, given.dtype)


_WEIGHT = "Tensor? plain, Tensor[] components, str names, ScalarType dtype"
_LAYER = "Tensor module, str weight, str prefix, bool record, str setting"
_FORWARD = f"(Tensor x, {_WEIGHT}, {_LAYER}, Tensor? bias, SymInt out_features, bool keeps_input) -> Tensor[]"
_BACKWARD = (
    f"(Tensor grad, {_WEIGHT}, {_LAYER}, "
    "Tensor[] saved, SymInt[] x_shape, bool[] needed, ScalarType bias_dtype) -> Tensor[]"
)


class _Forward(NamedTuple):
    """Arguments of `linear`, grouped."""

    x: Tensor
    weight: Weight
    layer: Layer
    bias: Tensor | None
    out_features: int
    keeps_input: bool

    @staticmethod
    def of(arguments: Sequence[Any]) -> _Forward:
        return _Forward(arguments[0], Weight(*arguments[1:5]), Layer(*arguments[5:10]), *arguments[10:])


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, module: Tensor, name: str, prefix: str, record: bool
) -> Tensor:
    """What `QuantizedModule._linear` computes, as a step of the graph that is being traced."""
    setting = context.current_setting()
    if not context.quantizes(setting) and not isinstance(weight, QuantizedTensor):
        return functional.plain_linear(x, weight, bias)
    operator = torch.ops.quantshard.linear_recording if context.is_delayed(setting) else torch.ops.quantshard.linear
    keeps_input = torch.is_grad_enabled() and weight.requires_grad
    out: Tensor = operator(
        x, weight, [], "", weight.dtype, module, name, prefix, record, setting, bias, weight.shape[0], keeps_input
    )[0]
    return out


# Forward -------------------------------------------------------------------------------------------------------------


def _forward(*arguments: Any) -> list[Tensor]:
    """The output, and what backward needs: the input as wgrad reads it, and the amax that a plain weight scales by."""
    x, given, layer, bias, _, keeps_input = _Forward.of(arguments)
    module, state = layer.find()
    call = recompute.call((id(module), layer.weight), given.plain is None, layer.setting)
    module._operand(layer.weight, call, x.device)
    context.drop_failed_backward()  # autocast does it on entering, but where that is compiled nothing is left of it
    y, x_wgrad = functional.forward(x, layer.weight_of(module, given), bias, call, state, keeps_input)
    saved = [y]
    if keeps_input and isinstance(x_wgrad.operand, QuantizedStorage):
        kept = x_wgrad.operand
        saved += [kept.components[component.name].contiguous() for component in kept.cell.format.components]
    if given.plain is not None and TensorRole.WEIGHT in call.amaxes:
        saved.append(call.amaxes[TensorRole.WEIGHT].clone())  # the call keeps its own
    return saved


def _forward_shapes(*arguments: Any) -> list[Tensor]:
    x, weight, layer, _, out_features, keeps_input = _Forward.of(arguments)
    if context.is_delayed(layer.setting) and private_torch.is_recomputed_in_graph():
        raise UnsupportedOperationError(
            f"activation checkpointing inside a compiled function around the layer of {layer.weight!r}: under delayed "
            "scaling its second forward must scale by the amaxes of the first, which a graph does not keep; compile "
            "the checkpointed function and enter autocast in it, or use a recipe without past amaxes"
        )
    outputs = [x.new_empty((*x.shape[:-1], out_features))]
    kept, transposed = _kept_input(layer.setting)
    if keeps_input and kept is not None:
        for component in kept.format.components:
            grid = [
                1 if cover == ALL else sharding.ceil_div(size, cover)
                for size, cover in zip(_kept_shape(x.shape, kept, transposed), component.covers, strict=True)
            ]
            outputs.append(x.new_empty(grid, dtype=component.encoding.storage))
    if _scales_by_past(weight.plain, layer.setting):
        outputs.append(x.new_empty((), dtype=torch.float32))
    return outputs


def _kept_input(setting: str) -> tuple[Cell | None, bool]:
    """How the input is quantized for wgrad, if it is, and whether that is done to its transpose."""
    recipe = context.setting(setting).recipe
    first, second = (recipe.cell(TensorRole.INPUT, gemm) for gemm in (Gemm.FPROP, Gemm.WGRAD))
    return second, second is not None and not functional.serves_both(first, second)


def _kept_shape(x_shape: Sequence[int], cell: Cell, transposed: bool) -> tuple[int, int]:
    """Rows and columns of the input as wgrad reads it; the Hadamard transform pads the summed dim."""
    features, tokens = x_shape[-1], 1
    for size in x_shape[:-1]:
        tokens = tokens * size
    if not transposed:
        return tokens, features
    return features, tokens + (-tokens % 16 if cell.scaling.random_hadamard else 0)


def _scales_by_past(weight: Tensor | None, setting: str) -> bool:
    """True for a high-precision weight under delayed scaling."""
    cell = context.setting(setting).recipe.weight
    return weight is not None and not isinstance(weight, QuantizedTensor) and bool(cell and cell.scaling.history)


# Backward ------------------------------------------------------------------------------------------------------------


def _keep(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    forward = _Forward.of(inputs)
    kept, _ = _kept_input(forward.layer.setting)
    high_precision = [forward.x] if kept is None and forward.keeps_input else []
    ctx.save_for_backward(forward.weight.plain, forward.layer.module, *high_precision, *output[1:])
    ctx.dtype, ctx.layer, ctx.x_shape = forward.weight.dtype, forward.layer[1:], forward.x.shape
    ctx.bias_dtype = forward.weight.dtype if forward.bias is None else forward.bias.dtype
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, grads: list[Tensor | None]) -> tuple[Any, ...]:
    gradients: list[Any] = [None] * len(ctx.needs_input_grad)
    gradients[2] = []  # of the components
    if grads[0] is None:
        return tuple(gradients)
    weight, module, *saved = ctx.saved_tensors
    needed = [ctx.needs_input_grad[index] for index in (0, 1, 10)]
    found = torch.ops.quantshard.linear_backward(
        grads[0], weight, [], "", ctx.dtype, module, *ctx.layer, saved, ctx.x_shape, needed, ctx.bias_dtype
    )
    for index, need in zip((10, 1, 0), reversed(needed), strict=True):
        gradients[index] = found.pop() if need else None
    return tuple(gradients)


class _Backward(NamedTuple):
    """Arguments of `linear_backward`, grouped."""

    grad: Tensor
    weight: Weight
    layer: Layer
    saved: Sequence[Tensor]
    x_shape: Sequence[int]
    needed: Sequence[bool]
    bias_dtype: torch.dtype

    @staticmethod
    def of(arguments: Sequence[Any]) -> _Backward:
        return _Backward(arguments[0], Weight(*arguments[1:5]), Layer(*arguments[5:10]), *arguments[10:])


def _backward(*arguments: Any) -> list[Tensor]:
    """The gradients that are needed, of input, weight and bias."""
    grad, given, layer, saved, x_shape, needed, bias_dtype = _Backward.of(arguments)
    module, state = layer.find()
    asked = context.setting(layer.setting)
    call = Call(asked.recipe, asked.amax_reduction_group, asked.strict)
    if _scales_by_past(given.plain, layer.setting):
        *saved, call.amaxes[TensorRole.WEIGHT] = saved
    kept, transposed = _kept_input(layer.setting)
    x_wgrad = WgradOperand(grad, False)
    if saved and kept is None:
        x_wgrad = WgradOperand(saved[0].reshape(-1, x_shape[-1]), False)
    elif saved and kept is not None:
        names = [component.name for component in kept.format.components]
        shard = sharding.whole(_kept_shape(x_shape, kept, transposed))
        x_wgrad = WgradOperand(QuantizedStorage(kept, shard, dict(zip(names, saved, strict=True))), transposed)
    weight = layer.weight_of(module, given)
    found = functional.backward(grad, weight, x_wgrad, call, state, x_shape, bias_dtype, needed)
    return [each.contiguous() for each in found if each is not None]


def _backward_shapes(*arguments: Any) -> list[Tensor]:
    grad, weight, _, _, x_shape, needed, bias_dtype = _Backward.of(arguments)
    out_features = grad.shape[-1]
    like = (
        (x_shape, grad.dtype),
        ((out_features, x_shape[-1]), weight.dtype),
        ((out_features,), bias_dtype),
    )
    return [grad.new_empty(shape, dtype=dtype) for (shape, dtype), need in zip(like, needed, strict=True) if need]


# Registration --------------------------------------------------------------------------------------------------------


def _with_components(operator: Any) -> None:
    """A quantized weight goes to the same operator as its components."""

    @ops.rule(operator, needed_by="torch.compile")
    def apart(first: Tensor, weight: QuantizedTensor, *others: Any) -> list[Tensor]:
        parts = weight._storage.components
        found: list[Tensor] = operator(first, None, list(parts.values()), ",".join(parts), *others[2:])
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
