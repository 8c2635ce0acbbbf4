"""Linear layers under torch.compile: Dynamo leaves the call of an eager function in its graph as it is.

AOTAutograd then runs that function, and the backward of its autograd functions, on tensors without values. The graph
gets their operations and kernel launches (`kernels/graph_launch.py`), so compiled layers have the bits of eager ones.
Layers that `can_trace` excludes run eagerly between two graphs.
"""

import functools
import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quantshard import kernel_dispatch, kernels, limits, private_torch
from quantshard.errors import RecipeMismatchError, UnsupportedOperationError
from quantshard.gemm import predictions
from quantshard.modules.contexts import context, recompute, settings
from quantshard.modules.contexts.recompute import LinearContext
from quantshard.modules.gemms import functional
from quantshard.modules.gemms.functional import PreparedLinear
from quantshard.modules.gemms.graph_state import GraphStep, LayerStructure, live_module, of_fixed_size
from quantshard.modules.gemms.shared_input import InputReader, SharedInput
from quantshard.tensor import observation
from quantshard.tensor.quantized_tensor import QuantizedTensor

if kernels.USABLE:
    from quantshard.gemm import producers


class TracedLinear(NamedTuple):
    """A linear layer while Dynamo traces, in values that its graphs can hold.

    `module`: handle of the module, in which the weights have `names` and amax histories a `prefix`. `record`: whether
    amaxes of this call are recorded (in training). `setting`: name of the autocast setting.
    """

    weights: Sequence[Tensor]
    biases: Sequence[Tensor | None]
    module: Tensor
    names: Sequence[str]
    prefix: str
    record: bool
    setting: str


def can_trace(setting: str, x: Tensor, weights: Sequence[Tensor | None]) -> bool:
    """Return whether a layer with this input is traced. If not, Inductor could fuse, and so change, its roundings."""
    if observation.active is not None or not is_quantized(setting, weights):
        return observation.active is None
    return kernel_dispatch.kernels_read(x, *weights) and has_kernels(setting, x.dtype)


def setting_in(own_autocast: context.autocast | None) -> str:
    """Return the name of the setting inside an autocast that a module enters, or of the current one."""
    return context.current_setting() if own_autocast is None else own_autocast.setting


def is_quantized(setting: str, weights: Sequence[Tensor | None]) -> bool:
    """Return whether a layer with these weights is quantized in an autocast or in memory."""
    return settings.quantizes(setting) or any([isinstance(weight, QuantizedTensor) for weight in weights])


@private_torch.eager_in_graphs(f"quantshard: {limits.FALLBACKS['between graphs']} (so do sampled steps of statistics)")
def run_eagerly(forward: Callable[..., Any], module: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a module's forward between two graphs, unless autocast is strict. Steps with an observer are exempt."""
    if context.is_strict() and observation.active is None:
        raise limits.fallback_error(("between graphs",), getattr(module, "name", None) or type(module).__name__)
    step, kernels.tracing.step = kernels.tracing.step, functional.BETWEEN_GRAPHS
    try:
        return forward(module, *args, **kwargs)
    finally:
        kernels.tracing.step = step


@private_torch.constant_in_graphs
def has_kernels(setting: str, dtype: torch.dtype) -> bool:
    """Return whether kernels quantize by a setting whatever it quantizes."""
    recipe = settings.registered[setting].recipe
    copies = () if recipe.weight is None else recipe.weight.format.copies.values()
    is_narrow = all(copy.codes.encoding.bits <= 8 for copy in copies)
    return is_narrow and all(producers.can_quantize(dtype, pair) for pair in recipe.activations.values())


def traced_linear(x: Tensor, layer: TracedLinear) -> Sequence[Tensor]:
    """`functional.linear` while Dynamo traces."""
    if not is_quantized(layer.setting, layer.weights):
        pairs = zip(layer.weights, layer.biases, strict=True)
        return [functional.plain_linear(x, weight, bias) for weight, bias in pairs]
    outputs: Sequence[Tensor] = call_in_graph("linear", [layer], x)
    return outputs


def call_in_graph(name: str, layers: Sequence[TracedLinear], *arguments: Any) -> Any:
    """Put the call of a function of `STEPS` into the graph; `arguments`: its others, of tensors and constants."""
    _allow()
    return _call(name, [tuple(layer) for layer in layers], *arguments)


@private_torch.constant_in_graphs
def _allow() -> None:
    private_torch.put_in_graphs(_call)
    private_torch.keep_in_caches(_call, _code_version())
    private_torch.write_inputs_once(torch.ops.quantshard.launch.default)


@functools.cache
def _code_version() -> str:
    """Digest of this package's code, because graphs in a compile cache contain what it traced."""
    digest = hashlib.sha256(str(kernels.INTERPRETED).encode())
    for path in sorted(Path(__file__).parents[2].rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _call(name: str, layers: Sequence[Any], *arguments: Any) -> Any:
    traced = [TracedLinear(*layer) for layer in layers]
    if type(traced[0].module) is Tensor:  # not of a trace: `backend="eager"` runs Dynamo's graph as it is
        return STEPS[name](*map(_live, traced), *arguments)
    step = GraphStep()
    with step.traced():
        prepared = [_prepared(step, layer) for layer in traced]
        return STEPS[name](*prepared, *map(of_fixed_size, arguments))


def _live(layer: TracedLinear) -> PreparedLinear:
    module, is_stored = live_module(layer.module, layer.names), isinstance(layer.weights[0], QuantizedTensor)
    call = recompute.linear_context((id(module), layer.names), is_stored, layer.record, layer.setting)
    state = module._linear_state(layer.names, call.recipe, layer.prefix)
    state.record = call.record and state.record
    return PreparedLinear(layer.weights, layer.biases, call, state)


def _prepared(step: GraphStep, layer: TracedLinear) -> PreparedLinear:
    setting, formats = settings.registered[layer.setting], list[Any]()
    for name, weight in zip(layer.names, layer.weights, strict=True):
        storage = weight.quantized_storage if isinstance(weight, QuantizedTensor) else None
        formats.append(None if storage is None else (storage.spec, storage.shard))
        if storage is not None and setting.recipe.table and storage.spec != setting.recipe.weight:
            raise RecipeMismatchError(
                f"{name} of a compiled layer is stored as {storage.spec}, but autocast's recipe is "
                f"{setting.recipe.name!r}; enter autocast with the recipe of the weights"
            )
        if setting.strict:
            fallbacks = predictions.fallbacks(storage, setting.recipe, weight.device)
            if fallbacks:
                raise limits.fallback_error(fallbacks, name)
    is_outside = layer.setting == settings.NO_AUTOCAST and any(formats)
    if is_outside and layer.record and functional.needs_wgrad(layer.weights):
        if recompute.is_repeated():
            raise UnsupportedOperationError(
                f"activation recomputation of a compiled function calls the layer of {', '.join(layer.names)!r} "
                "outside of the autocast that its first forward ran in; enter autocast inside the checkpointed "
                "function, or compile the function that checkpoints"
            )
        limits.warn("dequantized", layer.names[0], "autocast(enabled=False)")
    structure = LayerStructure(tuple(layer.names), layer.prefix, layer.record, layer.setting, tuple(formats))
    state = step.state(layer.module, structure, layer.weights)
    call = LinearContext(setting.recipe, setting.amax_reduction_group, setting.strict, record=layer.record)
    return PreparedLinear(layer.weights, layer.biases, call, state)


_LAST_INPUT = SharedInput()
"""The last input in the graph that is being traced, which several layers may read, such as queries, keys and values."""


def _linear(layer: PreparedLinear, x: Tensor) -> Sequence[Tensor]:
    return functional.linear(x, layer, shared=InputReader(_LAST_INPUT) if kernels.tracing.on else None)


STEPS: dict[str, Callable[..., Any]] = {"linear": _linear}
"""Eager functions of layers and other arguments, whose calls graphs contain."""
