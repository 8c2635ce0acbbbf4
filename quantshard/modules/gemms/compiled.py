"""Linear layers under torch.compile: a traced layer becomes a custom operator, which runs the eager code, or while
AOTAutograd traces leaves its operations in the graph (`operators.TRACES_KERNELS`).

`operators` defines the operators.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quantshard.errors import UnsupportedOperationError
from quantshard.modules.contexts import settings
from quantshard.modules.gemms import functional, operator_state, operators
from quantshard.modules.gemms.functional import LinearBackward, PreparedLinear
from quantshard.modules.gemms.operator_arguments import StepArguments, structure_key
from quantshard.modules.gemms.operators import ForwardResults, StepGradients
from quantshard.tensor import observation
from quantshard.tensor.quantized_tensor import QuantizedTensor


class TracedLinear(NamedTuple):
    """A linear layer in a graph that is being traced.

    `module`: handle of the module. `names`: names of the weights in the module. `prefix`: prefix of the names of the
    amax histories. `record`: whether amaxes of this call are recorded (in training). `setting`: name of the autocast
    setting.
    """

    weights: Sequence[Tensor]
    biases: Sequence[Tensor | None]
    module: Tensor
    names: Sequence[str]
    prefix: str
    record: bool
    setting: str

    @property
    def stored(self) -> bool:
        """Whether the weights are stored quantized."""
        is_quantized = [isinstance(weight, QuantizedTensor) for weight in self.weights]
        if any(is_quantized) and not all(is_quantized):
            raise UnsupportedOperationError(
                f"torch.compile of a layer whose weights {', '.join(self.names)} are quantized in part; store all or "
                "none quantized, or leave this layer out of the compiled function"
            )
        return any(is_quantized)


def traced_linear(x: Tensor, layer: TracedLinear) -> list[Tensor]:
    """`functional.linear` as an operator of the graph that is being traced."""
    if not settings.quantizes(layer.setting) and not layer.stored:
        pairs = zip(layer.weights, layer.biases, strict=True)
        return [functional.plain_linear(x, weight, bias) for weight, bias in pairs]
    return call_operator("linear", x, [layer], [False])


def call_operator(
    name: str,
    x: Tensor,
    layers: Sequence[TracedLinear],
    remakes: Sequence[bool],
    *,
    residual: Tensor | None = None,
    norm_weight: Tensor | None = None,
    norm_bias: Tensor | None = None,
    eps: float = 0.0,
    **facts: Any,
) -> list[Tensor]:
    """Call the operator of a step: layers of one module, each of which reads the output of the one before.

    Returns the outputs of the last layer, then x + residual if there is a residual. `remakes`: for each layer, whether
    backward recomputes the input instead of forward keeping it. `facts`: fields of the `StepStructure` with defaults.
    """
    first, layer_fields = layers[0], []
    for layer, remake in zip(layers, remakes, strict=True):
        dtypes = tuple(None if bias is None else bias.dtype for bias in layer.biases)
        layer_fields.append((layer.names, layer.prefix, dtypes, *functional.saved_input_policy(layer.weights, remake)))
    weights = [weight for layer in layers for weight in layer.weights]
    # Dynamo compiles again when an observer starts or stops
    facts["is_observed"] = observation.active is not None
    key = structure_key(tuple(layer_fields), weights[0].dtype, first.stored, first.record, first.setting, **facts)
    state: list[Tensor] = []
    if count := operator_state.in_forward("tensors read", key):
        state = torch.ops.quantshard.read_state(first.module, key, [], None)
    biases = [bias for layer in layers for bias in layer.biases if bias is not None]
    full_name = f"{name}_drawing" if operator_state.in_forward("draws", key) else name
    outputs: list[Tensor] = getattr(torch.ops.quantshard, full_name)(
        weights, [], first.module, key, state[:count], [weight.shape[0] for weight in weights],
        norm_weight, norm_bias, eps, x, residual, biases,
    )  # fmt: skip
    if operator_state.in_forward("records", key):
        torch.ops.quantshard.record_amaxes(first.module, key, False, state[1], outputs[-1].detach())
    return outputs[: len(layers[-1].weights) + (residual is not None)]


def _linear(step: StepArguments, layers: list[PreparedLinear]) -> ForwardResults:
    keeps = step.structure.layers[0].keeps
    outputs, x_wgrad = functional.forward_gemms(step.x.reshape(-1, step.x.shape[-1]), step.x.shape, layers[0], keeps)
    return ForwardResults(outputs, [x_wgrad])


def _linear_backward(step: StepArguments, layers: list[LinearBackward], _: list[Tensor]) -> StepGradients:
    dx, tensor_grads = layers[0].backward(step.grads)
    return StepGradients([dx], [tensor_grads])


operators.register_step("linear", _linear, _linear_backward)
