"""Assignment of weights one component at a time: `setattr(module, key, tensor)` for each key of a state dict.

transformers' `from_pretrained` loads like this. It builds the model on the meta device, then sets each tensor of the
file under its key and allocates missing ones as uninitialized memory. transformers marks loaded tensors with the
attribute `_is_hf_initialized`, and reads the same attribute of each module at the end; `finish_loading` then rejects
incomplete weights and initializes missing ones.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from quantshard import private_torch
from quantshard.errors import CheckpointError, UnsupportedOperationError, warn_once
from quantshard.modules.base import initialization
from quantshard.modules.base.state_dict import state_keys
from quantshard.tensor import components
from quantshard.tensor.components import FORMAT_SUFFIX

LOADED = "_is_hf_initialized"
"""Attribute that transformers sets on tensors and modules which need no initialization."""

_NORMS = ("LayerNorm", "RMSNorm")
"""Parts of class names. transformers treats such a class as a normalization and sets its `weight` to ones."""

_REPLACED = "replaced weight"
"""Topic of a warning."""

_FEW = 16
"""More distinct values than this, all of them integers from 0 to 255, and a weight is taken for codes."""


def take(module: Any, name: str, value: Tensor) -> bool:
    """Assign `value` if `name` names a component or piece of state of a weight; return whether it does.

    Raises:
        CheckpointError: the weight is in high precision, or the component does not fit.
        UnsupportedOperationError: codes or scales are assigned alone to a weight that already has values.
    """
    for weight in module.__dict__.get("_weights", ()):
        param = private_torch.registered_parameter(module, weight)
        if param is None or not name.startswith(weight):
            continue
        if name == weight:
            if value.is_floating_point():
                _check_values(f"{type(module).__name__}.{weight}", param, value)
                return False
            _take_component(module, weight, param, "", value)
            return True
        suffix = name.removeprefix(weight)
        if suffix.startswith("_") and suffix in state_keys(module, weight):
            _take_piece(module, weight, param, suffix, value)
            return True
    return False


def is_initialized(module: Any) -> bool:
    """Whether transformers should skip initializing a module, after what was not loaded has been filled."""
    finish_loading(module)
    is_marked: bool = module.__dict__.get(LOADED, False)
    return is_marked or any(norm in type(module).__name__ for norm in _NORMS)


@torch.no_grad()
def finish_loading(module: Any) -> None:
    """Fill what has not been loaded with initial values, once.

    Raises:
        CheckpointError: only some components of a quantized weight were loaded.
    """
    for weight, pieces in _pieces(module).items():
        suffixes = [c.key_suffix for c in components.storage_of(getattr(module, weight)).spec.format.components]
        lacking = [weight + suffix for suffix in suffixes if suffix not in pieces]
        raise CheckpointError(
            f"{type(module).__name__}.{weight}: {', '.join(weight + suffix for suffix in pieces)} was loaded, but not "
            f"{', '.join(lacking)}, which the file lacks or has in another shape (packed codes have that of their "
            "bytes): codes mean nothing without their scales; load by load_state_dict, or high-precision weights by "
            "quantshard.checkpoints.load_high_precision(model, state_dict)"
        )
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

    Attributes named like a weight are left out: PyTorch's pruning and weight_norm set those.
    """
    beginnings = tuple(weight + "_" for weight in module._weights)
    likely = [name for name in module.__dict__ if name.startswith(beginnings)]
    pieces = {weight + suffix for weight in module._weights for suffix in state_keys(module, weight)} if likely else ()
    return [name for name in likely if name in pieces]


def _pieces(module: Any) -> dict[str, dict[str, Tensor]]:
    """Weight -> key suffix -> component, for weights on the meta device that still lack components."""
    pieces: dict[str, dict[str, Tensor]] = module.__dict__.setdefault("_given_pieces", {})
    return pieces


def _check_values(name: str, own: Tensor, value: Tensor) -> None:
    """Reject codes that were cast to a weight's dtype, and warn if values replace a quantized weight."""
    quantized, is_loaded = components.quantized_local(own), getattr(value, LOADED, False)
    if quantized is not None and not is_loaded and components.quantized_local(value) is None:
        was, leaf = quantized.quantized_storage.spec.tag, name.rpartition(".")[2]
        warn_once(
            _REPLACED,
            f"{name} was {was} and is now a plain {value.dtype} parameter, which is not stored quantized; to set its "
            f"values, call {leaf}.quantize_(values)",
        )
    if is_loaded and quantized is None and _look_like_codes(value):
        raise CheckpointError(
            f"{name}: the checkpoint has whole numbers from 0 to 255 for it, which are codes of a quantized weight and "
            "not values, but this model's weight is in high precision; build the model under quantized_model_init with "
            "the checkpoint's recipe"
        )


def _take_piece(module: Any, weight: str, own: Tensor, suffix: str, value: Tensor) -> None:
    name, live = f"{type(module).__name__}.{weight}", state_keys(module, weight)[suffix]
    if suffix == FORMAT_SUFFIX:
        components.fitting_pairs(own, {suffix: value}, name)
        return
    state, key = module.weight_state(weight), suffix.removeprefix("_")
    if key not in state:
        _take_component(module, weight, own, suffix, value)
        return
    if value.shape != live.shape:
        raise CheckpointError(f"{name}{suffix}: shape {tuple(value.shape)}, here it is {tuple(live.shape)}")
    state[key] = components.state_like(live.detach(), value.detach(), value.device)


def _take_component(module: Any, weight: str, own: Tensor, suffix: str, value: Tensor) -> None:
    name, quantized = f"{type(module).__name__}.{weight}", components.quantized_local(own)
    if quantized is None:
        raise CheckpointError(
            f"{name}: it was given quantized codes ({value.dtype}), but this model's weight is in high precision; "
            "build the model under quantized_model_init with the checkpoint's recipe"
        )
    if not own.is_meta:
        raise UnsupportedOperationError(
            f"{name}{suffix} cannot be assigned alone: codes mean nothing without their scales; use load_state_dict, "
            "or quantize_ of the weight to give it other values"
        )
    pieces = _pieces(module).setdefault(weight, {})
    pieces[suffix] = value
    if all(component.key_suffix in pieces for component in quantized.quantized_storage.spec.format.components):
        values = {key: piece.detach() for key, piece in pieces.items()}
        new = components.assigned(own, components.fitting_pairs(own, values, name))
        if all(getattr(piece, LOADED, False) for piece in pieces.values()):
            setattr(new, LOADED, True)
        torch.nn.Module.register_parameter(module, weight, new)
        del _pieces(module)[weight]


def _look_like_codes(values: Tensor) -> bool:
    local = private_torch.local_tensor(values).detach()
    if local.is_meta or local.numel() == 0 or float(local.min()) < 0 or float(local.max()) > 255:
        return False
    return bool((local == local.round()).all()) and local.unique().numel() > _FEW
