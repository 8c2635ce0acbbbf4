"""torch.compile: linear layers in a graph that is being traced are operators, whose bodies run without compiling too.

`operators` tells what these take and give.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from quantshard.errors import UnsupportedOperationError
from quantshard.modules.activation_storage import HIGH_PRECISION
from quantshard.modules.contexts import context
from quantshard.modules.gemms import functional, operators
from quantshard.modules.gemms.functional import PreparedLinear, SavedLinear
from quantshard.modules.gemms.operator_arguments import BackwardArguments, ForwardArguments
from quantshard.modules.gemms.operators import ForwardResults, StepGradients
from quantshard.modules.gemms.structure import structure_key
from quantshard.tensor.quantized_tensor import QuantizedTensor


class TracedLinear(NamedTuple):
    """A linear layer in a graph that is being traced: its weights and biases, and how an operator finds the rest.

    `module`: the handle of its module; `names`: of the weights there; `prefix`: what stands before the names of the
    histories. `record`: whether amaxes seen now are recorded (in training). `setting`: that of autocast.
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
        """True if the weights are stored quantized.

        Raises:
            UnsupportedOperationError: some of them are.
        """
        stored = [isinstance(weight, QuantizedTensor) for weight in self.weights]
        if any(stored) and not all(stored):
            raise UnsupportedOperationError(
                f"torch.compile of a layer whose weights {', '.join(self.names)} are quantized in part; store all or "
                "none quantized, or leave this layer out of the compiled function"
            )
        return any(stored)


def traced_linear(x: Tensor, layer: TracedLinear) -> list[Tensor]:
    """What `functional.linear` computes, as a step of the graph that is being traced."""
    if not context.quantizes(layer.setting) and not layer.stored:
        pairs = zip(layer.weights, layer.biases, strict=True)
        return [functional.plain_linear(x, weight, bias) for weight, bias in pairs]
    return call_operator("linear", x, [layer], [False])


class FusedSteps(NamedTuple):
    """What an operator does besides linear layers: a normalization in front, an activation between two; "" for none.

    `norm_weight`, `norm_bias`, `eps`, `zero_centered_gamma`: of the normalization. `activation_storage`: how the inputs
    of the activation are kept for backward.
    """

    norm_weight: Tensor | None = None
    norm_bias: Tensor | None = None
    normalization: str = ""
    eps: float = 0.0
    zero_centered_gamma: bool = False
    activation: str = ""
    activation_storage: str = HIGH_PRECISION


def call_operator(
    step: str,
    x: Tensor,
    layers: Sequence[TracedLinear],
    remakes: Sequence[bool],
    fused: FusedSteps = FusedSteps(),  # noqa: B008 (immutable)
    residual: Tensor | None = None,
) -> list[Tensor]:
    """The outputs of the last of some layers of one module, each reading what the one before gives; and x + residual.

    `remakes`: for each layer, whether backward makes its input again, rather than that forward keeps it.
    """
    first, described = layers[0], []
    for layer, again in zip(layers, remakes, strict=True):
        needed = functional.keeps_input(layer.weights)
        dtypes = tuple(None if bias is None else bias.dtype for bias in layer.biases)
        described.append((layer.names, layer.prefix, dtypes, needed and not again, needed and again))
    weights = [weight for layer in layers for weight in layer.weights]
    key = structure_key(
        tuple(described), weights[0].dtype, first.record, first.setting,
        fused.normalization, fused.zero_centered_gamma, fused.activation, fused.activation_storage,
    )  # fmt: skip
    name = f"{step}_recording" if context.counts_calls(first.setting) else step
    found: list[Tensor] = getattr(torch.ops.quantshard, name)(
        x, weights, [], first.module, key, [weight.shape[0] for weight in weights],
        fused.norm_weight, fused.norm_bias, fused.eps, residual,
        [bias for layer in layers for bias in layer.biases if bias is not None],
    )  # fmt: skip
    return found[: len(layers[-1].weights) + (residual is not None)]


def _linear(asked: ForwardArguments, ready: list[PreparedLinear]) -> ForwardResults:
    x, (layer,) = asked.x, ready
    keeps = asked.layers.structure.layers[0].keeps
    outputs, x_wgrad = functional.forward_gemms(x.reshape(-1, x.shape[-1]), x.shape, *layer, keeps)
    return ForwardResults(outputs, [x_wgrad])


def _linear_backward(asked: BackwardArguments, layers: list[SavedLinear], _: list[Tensor]) -> StepGradients:
    (layer,) = layers
    dx, of_tensors = layer.saved.backward(asked.grads, layer.tensors, layer.needed)
    return StepGradients([dx], [of_tensors])


operators.register_step("linear", _linear, _linear_backward)
