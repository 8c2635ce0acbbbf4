"""Preparation of models for CUDA graphs, and the state that a capture must restore."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from quantshard import private_torch
from quantshard.errors import ConfigurationError
from quantshard.modules.base.module import QuantizedModule
from quantshard.tensor import components
from quantshard.tensor.storage import DRAWS, KEY


def capturable_(model: nn.Module) -> None:
    """Move the random draw counters of all weights to the weights' devices, so that a CUDA graph can hold a backward
    that draws.

    Recipes with stochastic rounding (NVFP4) draw random words in each backward pass. By default the host counts the
    draws, which a graph cannot see, and capturing such a pass raises. With this call the bits stay the same, and
    checkpoints load either way. Other recipes do not need it; the optimizer's counterpart is `capturable=True`.

    Call it once before the capture, and run one step in between, which compiles the kernels that read a counter. If the
    model moves through a CPU, the host counts again. Optimizers that change quantized weights without masters (stock
    `torch.optim`, `FusedAdam(master_weights=False)`) cannot be captured, and then read the counters back.

    Args:
        model: weights, quantized or not, on any devices; weights on a CPU are left unchanged.

    Raises:
        ConfigurationError: a weight is still on the meta device.
    """
    states = _states(model)
    for name, (param, _) in states.items():
        if param.is_meta:
            raise ConfigurationError(f"capturable_: {name} is on the meta device; materialize the model first")
    for param, state in states.values():
        state[DRAWS] = state[DRAWS].to(param.device)


@contextmanager
def capturable_unless_failed(models: Sequence[nn.Module]) -> Iterator[None]:
    """Call `capturable_`, and undo it if the block raises. By then `states_preserved` must have undone the draws of the
    block."""
    states = [state for model in models for _, state in _states(model).values()]
    before = [state[DRAWS] for state in states]
    try:
        for model in models:
            capturable_(model)
        yield
    except BaseException:
        for state, draws in zip(states, before, strict=True):
            state[DRAWS] = draws
        raise


@contextmanager
def states_preserved(models: Sequence[nn.Module], device: torch.device) -> Iterator[None]:
    """Restore after the block the state other than gradients that forward and backward change: buffers, draw counters,
    amax histories, and the random generators of the CPU and `device`."""
    tensors = [buffer for model in models for buffer in model.buffers()]
    for model in models:
        for _, state in _states(model).values():
            tensors += [value for name, value in state.items() if name != KEY]
    copies = [(tensor, tensor.detach().clone()) for tensor in tensors]
    with torch.random.fork_rng(devices=[] if device.type == "cpu" else [device], device_type=device.type):
        try:
            yield
        finally:
            with torch.no_grad():
                for tensor, before in copies:
                    tensor.copy_(before)


def draw_counts(models: Sequence[nn.Module]) -> list[int]:
    """Return the number of random draws of each weight."""
    return [int(state[DRAWS]) for model in models for _, state in _states(model).values()]


def _states(model: nn.Module) -> dict[str, tuple[Tensor, dict[str, Tensor]]]:
    """Return name -> (local tensor, state) of each weight that draws."""
    states: dict[str, tuple[Tensor, dict[str, Tensor]]] = {}
    for prefix, module in model.named_modules():
        for name, state in module.plain_states.items() if isinstance(module, QuantizedModule) else ():
            param = private_torch.local_tensor(module.get_parameter(name))
            states[f"{prefix}.{name}" if prefix else name] = param, state
    for name, parameter in model.named_parameters():
        quantized = components.quantized_local(parameter)
        if quantized is not None:
            states[name] = quantized, quantized.quantized_storage.state
    return states
