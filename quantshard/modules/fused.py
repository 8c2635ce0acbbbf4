"""A normalization, the linear layers after it and the activation between them as one autograd function, run by kernels.

    [x, residual] -> z = x + residual -> normalization -> fc1 -> activation -> fc2

The kernel that computes the input of a GEMM also quantizes it, in forward and backward, so these inputs are never
written in high precision. Backward keeps z, the outputs of fc1 and the codes that wgrad of fc2 reads. It remakes the
codes that wgrad of fc1 reads from z, unless that would take two reads.

With recomputation, backward remakes all codes, and computes the gradients of fc1's outputs one after the other. The
outputs of fc1 can be kept as codes (`activation_storage`). Results have the same bits as the separate steps, except the
gradient of fc1's bias: another kernel sums it in float32, in another order.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from quantshard import kernel_dispatch, kernels, private_torch
from quantshard.gemm import operands
from quantshard.modules.activation_storage import AS_IS, STORAGES, ActivationStorage
from quantshard.modules.base.module import QuantizedModule
from quantshard.modules.contexts import settings
from quantshard.modules.fused_operands import (
    NO_NORM,
    ActivationInputs,
    NormBackward,
    NormInput,
    enter,
    through_activation,
)
from quantshard.modules.gemms import compiled, functional
from quantshard.modules.gemms.compiled import TracedLinear
from quantshard.modules.gemms.functional import LinearBackward, PreparedLinear
from quantshard.modules.gemms.linear_operands import WgradOperand
from quantshard.modules.norm import Normalization
from quantshard.recipe import Recipe, TensorRole
from quantshard.tensor.quantized_tensor import QuantizedTensor

if kernels.USABLE:
    from quantshard.gemm import producers


def front(module: QuantizedModule, norm: Normalization, x: Tensor, residual: Tensor | None = None) -> NormInput:
    """Return the input of a module's normalization, with the parameters "layer_norm_weight" and "layer_norm_bias"."""
    norm.check(x)
    weight, bias = module.whole_on_rows("layer_norm_weight", "layer_norm_bias")
    return NormInput(x, residual, weight, bias, norm)


def fits(front: NormInput, *layers: PreparedLinear | TracedLinear) -> bool:
    """Return True if `norm_linear` and `mlp` support these inputs and layers."""
    x, residual, weight, bias, _ = front
    if residual is not None and (residual.shape != x.shape or residual.dtype != x.dtype):
        return False
    first = layers[0]
    if isinstance(first, TracedLinear):  # all of them have one setting
        is_quantized = settings.quantizes(first.setting) and compiled.has_kernels(first.setting, x.dtype)
        return is_quantized and kernel_dispatch.kernels_read(x, residual, weight, bias)
    if not kernel_dispatch.has_float_kernels(x, residual, weight, bias):
        return False
    for layer in layers:
        assert isinstance(layer, PreparedLinear)
        if layer.state.tp.mode is not None and layer.state.tp.size > 1:
            # an operand is sharded, and a kernel cannot quantize a shard alone
            return False
        recipe = layer.call.recipe
        if not recipe.table or not all([producers.can_quantize(x.dtype, pair) for pair in recipe.activations.values()]):
            return False
    return True


def norm_linear(front: NormInput, layer: PreparedLinear | TracedLinear) -> tuple[Sequence[Tensor], Tensor | None]:
    """Apply a normalization and a linear layer. Returns outputs [..., out_features] and x + residual, or None."""
    if isinstance(layer, TracedLinear):
        *outputs, total = compiled.call_in_graph("norm_linear", [layer], *front.constituents())
        return outputs, total
    remakes = _remakes(layer.call.recipe, False, operands.is_large(front.x))
    arguments = (front.normalization, layer, functional.needs_wgrad(layer.weights), remakes)
    *outputs, total = _NormLinearFunction.apply(*front[:_FRONT], arguments, *layer.tensors)
    return outputs, total


def mlp(
    front: NormInput, fc1: PreparedLinear | TracedLinear, activation: str, fc2: PreparedLinear | TracedLinear,
    recomputes: bool = False, storage: ActivationStorage = AS_IS,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Apply a normalization, two linear layers and the activation between them. Returns the output and x + residual
    (None without residual).

    `recomputes`: backward remakes the operands of wgrad. `storage`: format of the activation's inputs that backward
    keeps.
    """
    if isinstance(fc1, TracedLinear):
        assert isinstance(fc2, TracedLinear)
        options = activation, recomputes, storage.name
        out, total = compiled.call_in_graph("mlp", [fc1, fc2], *options, *front.constituents())
        return out, total
    assert isinstance(fc2, PreparedLinear)
    if storage is not AS_IS:
        storage = storage.for_backward(*front[:_FRONT], *fc1.weights, *fc1.biases, *fc2.weights, *fc2.biases)
    has_norm, is_large = front.normalization is not None, operands.is_large(front.x)
    remakes = [
        has_norm and _remakes(fc1.call.recipe, recomputes, is_large), _remakes(fc2.call.recipe, recomputes, False)
    ]  # fmt: skip
    have_wgrad = [functional.needs_wgrad(fc.weights) for fc in (fc1, fc2)]
    arguments = (front.normalization, fc1, activation, fc2, have_wgrad, remakes, storage)
    out, total = _MLPFunction.apply(*front[:_FRONT], arguments, *fc1.tensors, *fc2.tensors)
    return out, total


def _remakes(recipe: Recipe, recomputes: bool, cheap: bool) -> bool:
    """Return True if backward quantizes normalized rows or an activation again.

    `recomputes`: recomputation was requested. `cheap`: there are many normalized rows. If forward's amax is enough to
    quantize them again in one read, that is always done, because it costs less than keeping the codes until backward.
    """
    pair = recipe.activations[TensorRole.INPUT]
    is_free = cheap and None not in pair and operands.scales_by_one_amax(pair)
    return (recomputes or is_free) and not recipe.input_draws


def _norm_linear_step(layer: PreparedLinear, *constituents: Any) -> tuple[Tensor | None, ...]:
    outputs, total = norm_linear(NormInput.of(*constituents), layer)
    return (*outputs, total)


def _mlp_step(
    fc1: PreparedLinear, fc2: PreparedLinear, activation: str, recomputes: bool, storage: str, *constituents: Any
) -> tuple[Tensor, Tensor | None]:
    return mlp(NormInput.of(*constituents), fc1, activation, fc2, recomputes, STORAGES[storage])


compiled.STEPS |= {"norm_linear": _norm_linear_step, "mlp": _mlp_step}

# Forward and backward ------------------------------------------------------------------------------------------------


_FRONT = 4  # tensors of a NormInput that can need a gradient
_FRONT_SAVED = len(NormBackward._fields) - 1  # tensors of a NormBackward


def _front_needs(ctx: Any) -> list[bool]:
    """Return whether gradients of z, weight and bias are needed."""
    x, residual, weight, bias = ctx.needs_input_grad[:_FRONT]
    return [x or residual, weight, bias]


def _front_in_backward(ctx: Any, tensors: Sequence[Any]) -> NormBackward:
    return NO_NORM if ctx.normalization is None else NormBackward(ctx.normalization, *tensors)


def _of_front(ctx: Any, dz: Tensor | None, dweight: Tensor | None, dbias: Tensor | None) -> list[Tensor | None]:
    """Return the gradients of x, residual, weight and bias."""
    x, residual = ctx.needs_input_grad[:2]
    return [dz if x else None, dz if residual else None, dweight, dbias]


def _run_norm_linear(
    front: NormInput, layer: PreparedLinear, keeps: bool
) -> tuple[list[Tensor], NormBackward, WgradOperand]:
    """Return the outputs, and the tensors that backward needs."""
    norm, source = enter(front, layer.call.recipe, keeps)
    outputs, wgrad_operand = functional.forward_gemms(source, front.x.shape, layer, keeps)
    return outputs, norm, wgrad_operand


class _NormLinearFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None,
        others: tuple[Normalization, PreparedLinear, bool, bool], *tensors: Tensor | None,
    ) -> tuple[Tensor | None, ...]:  # fmt: skip
        ctx.set_materialize_grads(False)
        normalization, layer, has_wgrad, remakes = others  # from `norm_linear`
        front = NormInput(x, residual, weight, bias, normalization)
        outputs, norm, wgrad_operand = _run_norm_linear(front, layer, has_wgrad and not remakes)
        ctx.normalization = normalization
        ctx.layer, layer_tensors = layer.saved(wgrad_operand, x.shape, x.dtype, has_wgrad and remakes)
        ctx.step, ctx.num_inputs = kernels.tracing.step, 1 if residual is None else 2
        ctx.save_for_backward(*norm[1:], *layer_tensors)
        return (*outputs, None if residual is None else norm.z)

    @staticmethod
    @functional.in_step_of_forward
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        *output_grads, total_grad = grads
        norm_tensors, layer_tensors = _split(ctx.saved_tensors, _FRONT_SAVED)
        front, needs = _front_in_backward(ctx, norm_tensors), _front_needs(ctx)
        saved: LinearBackward = ctx.layer
        layer = saved.with_saved(layer_tensors, any(needs), ctx.needs_input_grad[_FRONT + 1 :])
        filled_grads = _filled(output_grads, [weight.shape[0] for weight in layer_tensors[: layer.num_weights]])
        dy: Tensor | None = None
        tensor_grads: list[Tensor | None] = [None] * layer.num_parameters
        if filled_grads:
            dy, tensor_grads = layer.backward(filled_grads, front.requantized(layer))
        return (*_of_front(ctx, *front.gradients(dy, total_grad, needs)), None, *tensor_grads)


def _run_mlp(
    front: NormInput, fc1: PreparedLinear, activation: str, fc2: PreparedLinear, keeps: Sequence[bool]
) -> tuple[Tensor, NormBackward, ActivationInputs, list[WgradOperand]]:
    """Return the output, and the tensors that backward needs."""
    norm, source = enter(front, fc1.call.recipe, keeps[0])
    inner, wgrad1 = functional.forward_gemms(source, None, fc1, keeps[0])
    between = ActivationInputs(*inner)
    (out,), wgrad2 = functional.forward_gemms(between.activated(activation), front.x.shape, fc2, keeps[1])
    return out, norm, between, [wgrad1, wgrad2]


def _mlp_gradients(
    dout: Tensor, front: NormBackward, inner: list[Tensor], storage: ActivationStorage, activation: str,
    layers: Sequence[LinearBackward],
) -> tuple[Tensor | None, list[Tensor | None], list[Tensor | None]]:  # fmt: skip
    """Return the gradients of the normalized rows, and of the weights and biases of both layers.

    `inner`: the inputs of the activation as `storage` kept them. The tensors kept for an MLP are most of a block's
    memory, so the lists `inner` and `fc2.tensors` are emptied after their last use.
    """
    fc1, fc2 = layers

    def read() -> ActivationInputs:
        nonlocal storage
        if storage.spec is not None:
            inner[:] = storage.values(inner, fc1.dtype)
            storage = AS_IS
        return ActivationInputs(*inner)

    hidden = fc2.requantize_input(lambda: read().activated(activation))
    dh, fc2_grads = fc2.backward([dout], hidden)
    assert dh is not None
    del hidden
    fc2.tensors.clear()
    weight_operands = None
    # the codes of plain weights are made after dh is freed
    if fc1.needed.x and isinstance(fc1.tensors[0], QuantizedTensor):
        weight_operands = fc1.weight_operands()
    out_grads = through_activation(dh, read(), activation, fc1, fc2.requantizes, weight_operands)
    del dh
    inner.clear()
    x_wgrad = front.requantized(fc1)
    dy, fc1_grads = fc1.gradients(out_grads, x_wgrad, weight_operands)
    return dy, fc1_grads, fc2_grads


class _MLPFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None,
        others: tuple[Any, ...], *tensors: Tensor | None,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        ctx.set_materialize_grads(False)
        normalization, fc1, activation, fc2, have_wgrad, remakes, storage = others  # from `mlp`
        front = NormInput(x, residual, weight, bias, normalization)
        keeps = [needs and not remake for needs, remake in zip(have_wgrad, remakes, strict=True)]
        requantizes = [needs and remake for needs, remake in zip(have_wgrad, remakes, strict=True)]
        out, norm, between, wgrad_operands = _run_mlp(front, fc1, activation, fc2, keeps)
        ctx.normalization, ctx.activation, ctx.step = normalization, activation, kernels.tracing.step
        ctx.num_inputs = 1 if residual is None else 2
        ctx.fc1, saved1 = fc1.saved(wgrad_operands[0], x.shape, x.dtype, requantizes[0])
        ctx.fc2, saved2 = fc2.saved(wgrad_operands[1], between.gate.shape, x.dtype, requantizes[1])
        inner = storage.keep(between)
        ctx.storage, ctx.sizes = storage, (_FRONT_SAVED, len(inner), len(saved1))
        ctx.save_for_backward(*norm[1:], *inner, *saved1, *saved2)
        return out, None if residual is None else norm.z

    @staticmethod
    @functional.in_step_of_forward
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        dout, total_grad = grads
        fc1: LinearBackward = ctx.fc1
        fc2: LinearBackward = ctx.fc2
        front, inner, saved1, saved2 = _split(private_torch.take_saved(ctx), *ctx.sizes)
        norm, needs = _front_in_backward(ctx, front), _front_needs(ctx)
        need_tensors = ctx.needs_input_grad[_FRONT + 1 :]
        dy: Tensor | None = None
        num_fc1 = fc1.num_parameters
        fc1_grads: list[Tensor | None] = [None] * num_fc1
        fc2_grads: list[Tensor | None] = [None] * fc2.num_parameters
        if dout is not None:
            fc1 = fc1.with_saved(saved1, any(needs), need_tensors[:num_fc1])
            fc2 = fc2.with_saved(saved2, True, need_tensors[num_fc1:])
            # only the layers hold their tensors, and release them after the last use
            saved1.clear()
            saved2.clear()
            dy, fc1_grads, fc2_grads = _mlp_gradients(dout, norm, inner, ctx.storage, ctx.activation, (fc1, fc2))
        return (*_of_front(ctx, *norm.gradients(dy, total_grad, needs)), None, *fc1_grads, *fc2_grads)


def _filled(grads: Sequence[Tensor | None], out_features: Sequence[int]) -> list[Tensor]:
    """Replace missing gradients of outputs [..., out_features] by zeros; return [] if all are missing."""
    first = next((grad for grad in grads if grad is not None), None)
    if first is None:
        return []
    return [
        first.new_zeros((*first.shape[:-1], size)) if grad is None else grad
        for grad, size in zip(grads, out_features, strict=True)
    ]


def _split(tensors: Sequence[Any], *sizes: int) -> list[list[Any]]:
    parts, start = [], 0
    for size in (*sizes, len(tensors)):
        parts.append(list(tensors[start : start + size]))
        start += size
    return parts
