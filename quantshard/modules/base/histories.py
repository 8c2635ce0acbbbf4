"""Amax histories of a linear layer, and the state of its next forward."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from quantshard import limits, private_torch
from quantshard.errors import RecipeMismatchError
from quantshard.modules.base import checks
from quantshard.modules.contexts import context
from quantshard.modules.gemms.linear_state import LinearState
from quantshard.recipe import Recipe, TensorRole
from quantshard.tensor import observation
from quantshard.tensor.storage import AMAX_HISTORY

HISTORIES = {TensorRole.INPUT: "input_amax_history", TensorRole.GRAD_OUTPUT: "grad_output_amax_history"}
"""Role -> name of the amax-history buffer of a layer."""


def make_histories(module: Any, recipe: Recipe, prefix: str) -> None:
    """Register the amax histories of a layer's activations that a recipe needs (delayed scaling)."""
    for role, length in recipe.histories.items():
        # of the original tensor, if the weight is parametrized
        device = private_torch.local_tensor(next(module.parameters())).device
        zeros = torch.zeros(length, dtype=torch.float32, device=device)
        module.register_buffer(prefix + HISTORIES[role], zeros)


def linear_state(module: Any, weights: Sequence[str], recipe: Recipe, prefix: str) -> LinearState:
    """State of one linear layer of a module. Missing histories that the recipe needs are created."""
    activations = {}
    for role, length in recipe.histories.items():
        activations[role] = activation_history(module, prefix + HISTORIES[role], length, weights[0], recipe)
    states, cell = module._states(weights), recipe.weight
    if cell is not None and cell.scaling.history:
        for weight, state in zip(weights, states, strict=True):
            _check_weight_history(module, weight, state, cell.scaling.history, recipe)
    is_delayed = bool(activations) or (cell is not None and cell.scaling.history > 0)
    is_recorded = module.training and (is_delayed or observation.active is not None)
    stage = private_torch.running_stage() if is_recorded else None
    record = module.training and not (stage is not None and stage.infers)
    input_history, grad_output_history = activations.get(TensorRole.INPUT), activations.get(TensorRole.GRAD_OUTPUT)
    return LinearState(states, input_history, grad_output_history, record, stage=stage, plans=module.gemm_plans)


def activation_history(module: Any, name: str, length: int, weight: str, recipe: Recipe) -> Tensor:
    """Return an amax history of the length that `recipe` needs; create a missing one."""
    history = private_torch.registered_buffer(module, name)
    if history is None:
        if module.training and context.is_strict():
            checks.refuse_fallbacks(module.label(name), ("late amax history",))
        if module.training:
            warnings.warn(f"{module.label(name)}: {limits.FALLBACKS['late amax history']}", stacklevel=2)
        device = private_torch.local_tensor(module.get_parameter(weight)).device
        module.register_buffer(name, history := _empty_history(length, device))
    if history.numel() != length:
        raise _wrong_length(module.label(name), history, length, recipe)
    return history


def _check_weight_history(module: Any, weight: str, state: dict[str, Tensor], length: int, recipe: Recipe) -> None:
    """Ensure that a weight's state has the amax history that the recipe needs, on the weight's device."""
    history = state.get(AMAX_HISTORY)
    if history is not None and history.numel() != length:
        raise _wrong_length(module.label(weight), history, length, recipe)
    if history is None or state is module._born_states.get(weight):
        device = private_torch.local_tensor(getattr(module, weight)).device
        if history is None:
            state[AMAX_HISTORY] = _empty_history(length, device)
        elif history.device != device:  # Module.to moves only parameters and buffers
            state[AMAX_HISTORY] = history.to(device)


def _wrong_length(name: str, history: Tensor, length: int, recipe: Recipe) -> RecipeMismatchError:
    return RecipeMismatchError(
        f"{name} holds {history.numel()} past amaxes, but autocast's recipe {recipe.name!r} asks for {length}; use one "
        "recipe object for training and evaluation"
    )


def _empty_history(length: int, device: torch.device) -> Tensor:
    """A zeroed float32 history, created outside of inference mode so that training can update it later."""
    with torch.inference_mode(False):
        return torch.zeros(length, dtype=torch.float32, device=device)
