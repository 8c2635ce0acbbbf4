"""CUDA graphs: what a captured step of a model must count where it runs."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn

from quantshard import components, private_torch
from quantshard.errors import ConfigurationError
from quantshard.modules.base import QuantizedModule
from quantshard.storage import DRAWS


def capturable_(model: nn.Module) -> None:
    """Count the random draws of all weights on their own devices, so that a CUDA graph can hold a step that draws.

    Recipes with stochastic rounding (NVFP4) draw random words in each backward pass. Draws are counted on the host,
    which a graph does not see: without this call, capturing such a step raises. With it the bits stay the same, also of
    checkpoints, which load either way. Other recipes need no such call; the optimizer's is `capturable=True`.

    Call it once before the capture, and run a step between the two: kernels that read a count are compiled then. What
    draws outside of backward (stock `torch.optim` optimizers) reads counts back from the GPU from then on.

    Args:
        model: weights, quantized or not, on any devices; those on CPUs stay as they are.

    Raises:
        ConfigurationError: a weight is on the meta device still.
    """
    found = list(_states(model))
    for name, param, _ in found:
        if param.is_meta:
            raise ConfigurationError(f"capturable_: {name} is on the meta device; materialize the model first")
    for _, param, state in found:
        state[DRAWS] = state[DRAWS].to(param.device)


def _states(model: nn.Module) -> Iterator[tuple[str, Tensor, dict[str, Tensor]]]:
    """Each weight that draws: its name, local tensor and state."""
    for prefix, module in model.named_modules():
        for name in module._weights if isinstance(module, QuantizedModule) else ():
            param = private_torch.local_tensor(module.get_parameter(name))
            yield f"{prefix}.{name}".lstrip("."), param, module.weight_state(name)
    for name, parameter in model.named_parameters():
        quantized = components.quantized(parameter)
        if quantized is not None:
            yield name, quantized, quantized._storage.state
