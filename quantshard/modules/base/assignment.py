"""Assignment of weights one component at a time: `setattr(module, key, tensor)` for each key of a state dict.

transformers' `from_pretrained` loads like this. It builds the model on the meta device, then sets each tensor of the
file under its key and allocates missing ones as uninitialized memory. transformers marks loaded tensors with the
attribute `_is_hf_initialized`, and reads the same attribute of each module at the end; `finish_loading` then rejects
incomplete weights and initializes missing ones.
"""

from typing import Any

import torch
from torch import Tensor, nn

from quantshard import private_torch
from quantshard.errors import CheckpointError, UnsupportedOperationError
from quantshard.modules.base import initialization
from quantshard.modules.base.state_dict import state_keys
from quantshard.tensor import component_loading, components, moves
from quantshard.tensor.components import FORMAT_SUFFIX

LOADED = "_is_hf_initialized"
"""Attribute that transformers sets on tensors and modules which need no initialization."""

_NORMS = ("LayerNorm", "RMSNorm")
"""Parts of class names. transformers treats such a class as a normalization and sets its `weight` to ones."""


class AssignableModule(nn.Module):
    """Base of modules whose weights can be assigned one component at a time."""

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Register a parameter, or assign a component of a weight."""
        if param is None or not take(self, name, param):
            old = private_torch.registered_parameter(self, name)
            super().register_parameter(name, param)
            moves.carry_attributes(old, param)

    @property
    def _is_hf_initialized(self) -> bool:
        """Whether transformers should skip initializing this module. It reads this attribute after loading a file."""
        finish_loading(self)
        is_marked: bool = self.__dict__.get(LOADED, False)
        return is_marked or any(norm in type(self).__name__ for norm in _NORMS)

    @_is_hf_initialized.setter
    def _is_hf_initialized(self, value: bool) -> None:
        self.__dict__[LOADED] = value


def take(module: Any, name: str, value: Tensor) -> bool:
    """Assign `value` if `name` names a component or piece of state of a weight; return whether it does."""
    for weight in module.__dict__.get("_weights", ()):
        param = private_torch.registered_parameter(module, weight)
        if param is None or not name.startswith(weight):
            continue
        if name == weight:
            if not value.is_floating_point():
                _take_component(module, weight, param, "", value)
            elif components.quantized_local(param) is None and _look_like_codes(value):
                raise component_loading.codes_for_high_precision(f"{type(module).__name__}.{weight}", "cast")
            return not value.is_floating_point()
        suffix = name.removeprefix(weight)
        if suffix.startswith("_") and suffix in state_keys(module, weight):
            _take_piece(module, weight, param, suffix, value)
            return True
    return False


@torch.no_grad()
def finish_loading(module: Any) -> None:
    """Fill what has not been loaded with initial values, once."""
    for weight, pieces in _pieces(module).items():
        suffixes = [c.key_suffix for c in components.storage_of(getattr(module, weight)).spec.format.components]
        lacking = [weight + suffix for suffix in suffixes if suffix not in pieces]
        problem = f"{type(module).__name__}.{weight}: the file lacks {', '.join(lacking)}, or has another shape"
        raise CheckpointError(f"{problem}; for high-precision weights call quantshard.checkpoints.load_high_precision")
    if not module._awaits_values or any(param.is_meta for param in module.parameters(recurse=False)):
        return
    module._awaits_values = False
    for name in _attributes_in_the_way(module):
        del module.__dict__[name]  # uninitialized memory that transformers allocated
    initialization.materialize(module)
    params = dict(module.named_parameters(recurse=False))
    missing = [name for name in module._weights if name in params and not getattr(params[name], LOADED, False)]
    initialization.fill(module, missing)
    for name, fill in module._vectors.items():
        if not getattr(params[name], LOADED, False):
            private_torch.local_tensor(params[name]).fill_(fill)
    for buffer in module.buffers(recurse=False):
        if not getattr(buffer, LOADED, False):
            buffer.zero_()


def _attributes_in_the_way(module: Any) -> list[str]:
    """Names of plain attributes that hide a component or piece of state and that no code reads.
    Attributes named like a weight are left out: PyTorch's pruning and weight_norm set those."""
    beginnings = tuple(weight + "_" for weight in module._weights)
    likely = [name for name in module.__dict__ if name.startswith(beginnings)]
    pieces = {weight + suffix for weight in module._weights for suffix in state_keys(module, weight)} if likely else ()
    return [name for name in likely if name in pieces]


def _pieces(module: Any) -> dict[str, dict[str, Tensor]]:
    """Weight -> key suffix -> component, for weights on the meta device that still lack components."""
    pieces: dict[str, dict[str, Tensor]] = module.__dict__.setdefault("_given_pieces", {})
    return pieces


def _take_piece(module: Any, weight: str, own: Tensor, suffix: str, value: Tensor) -> None:
    name, live = f"{type(module).__name__}.{weight}", state_keys(module, weight)[suffix]
    if suffix == FORMAT_SUFFIX:
        component_loading.fitting_pairs(own, {suffix: value}, name)
        return
    state, key = module.weight_state(weight), suffix.removeprefix("_")
    if key not in state:
        _take_component(module, weight, own, suffix, value)
        return
    if value.shape != live.shape:
        raise CheckpointError(f"{name}{suffix}: shape {tuple(value.shape)}, here it is {tuple(live.shape)}")
    state[key] = component_loading.state_like(live.detach(), value.detach(), value.device)


def _take_component(module: Any, weight: str, own: Tensor, suffix: str, value: Tensor) -> None:
    name, quantized = f"{type(module).__name__}.{weight}", components.quantized_local(own)
    if quantized is None:
        raise component_loading.codes_for_high_precision(name, value.dtype)
    if not own.is_meta:
        raise UnsupportedOperationError(f"{name}{suffix} cannot be assigned alone; use load_state_dict")
    pieces = _pieces(module).setdefault(weight, {})
    pieces[suffix] = value
    if all(component.key_suffix in pieces for component in quantized.quantized_storage.spec.format.components):
        values = {key: piece.detach() for key, piece in pieces.items()}
        new = component_loading.assigned(own, component_loading.fitting_pairs(own, values, name))
        if all(getattr(piece, LOADED, False) for piece in pieces.values()):
            setattr(new, LOADED, True)
        nn.Module.register_parameter(module, weight, new)
        del _pieces(module)[weight]


def _look_like_codes(values: Tensor) -> bool:
    """Return whether loaded values are codes that were cast to a floating dtype: many integers from 0 to 255."""
    local = private_torch.local_tensor(values).detach()
    if not getattr(values, LOADED, False) or local.is_meta or local.numel() == 0:
        return False
    are_bytes = (local == local.round()) & (local >= 0) & (local <= 255)
    return bool(are_bytes.all()) and local.unique().numel() > 16
