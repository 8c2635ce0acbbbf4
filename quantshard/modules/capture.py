"""CUDA graphs: what a captured step of a model must count where it runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from quantshard import private_torch
from quantshard.argument_kinds import MODULE, check_arguments, suggests_names
from quantshard.errors import ConfigurationError
from quantshard.modules.base.module import QuantizedModule
from quantshard.tensor import components
from quantshard.tensor.storage import DRAWS, KEY


@suggests_names
def capturable_(model: nn.Module) -> None:
    """Count the random draws of all weights on their own devices, so that a CUDA graph can hold a backward that draws.

    Recipes with stochastic rounding (NVFP4) draw random words in each backward pass. Draws are counted on the host,
    which a graph does not see: without this call, capturing such a pass raises. With it the bits stay the same, also of
    checkpoints, which load either way. Other recipes need no such call; the optimizer's is `capturable=True`.

    Call it once before the capture, and run a step between the two: kernels that read a count are compiled then. A
    model that goes through a CPU counts on the host again. What changes quantized weights without masters (stock
    `torch.optim` optimizers, `FusedAdam(master_weights=False)`) is not captured, and reads counts back from then on.

    Args:
        model: weights, quantized or not, on any devices; those on CPUs stay as they are.

    Raises:
        ConfigurationError: a weight is on the meta device still.
    """
    check_arguments("capturable_", MODULE, model=model)
    found = _states(model)
    for name, (param, _) in found.items():
        if param.is_meta:
            raise ConfigurationError(f"capturable_: {name} is on the meta device; materialize the model first")
    for param, state in found.values():
        state[DRAWS] = state[DRAWS].to(param.device)


@contextmanager
def capturable_unless_failed(models: Sequence[nn.Module]) -> Iterator[None]:
    """`capturable_`, undone if what is inside fails; draws inside must be undone by then (`states_preserved`)."""
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
    """What forwards and backwards inside change besides gradients is afterwards as it was before: buffers, counts of
    draws, amax histories, and the random generators of the CPU and of `device`."""
    live = [buffer for model in models for buffer in model.buffers()]
    for model in models:
        for _, state in _states(model).values():
            live += [value for name, value in state.items() if name != KEY]
    kept = [(tensor, tensor.detach().clone()) for tensor in live]
    with torch.random.fork_rng(devices=[] if device.type == "cpu" else [device], device_type=device.type):
        try:
            yield
        finally:
            with torch.no_grad():
                for tensor, before in kept:
                    tensor.copy_(before)


def draw_counts(models: Sequence[nn.Module]) -> list[int]:
    """How many draws each weight has taken."""
    return [int(state[DRAWS]) for model in models for _, state in _states(model).values()]


def _states(model: nn.Module) -> dict[str, tuple[Tensor, dict[str, Tensor]]]:
    """Name of each weight that draws -> its local tensor and state."""
    found: dict[str, tuple[Tensor, dict[str, Tensor]]] = {}
    for prefix, module in model.named_modules():
        for name, state in module.plain_states.items() if isinstance(module, QuantizedModule) else ():
            param = private_torch.local_tensor(module.get_parameter(name))
            found[f"{prefix}.{name}" if prefix else name] = param, state
    for name, parameter in model.named_parameters():
        quantized = components.quantized_local(parameter)
        if quantized is not None:
            found[name] = quantized, quantized.quantized_storage.state
    return found
