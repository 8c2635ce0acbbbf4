"""Assignment of weights one component at a time: `setattr(module, key, tensor)` for each key of a state dict.

transformers' `from_pretrained` loads like this. It builds the model on the meta device, then sets each tensor of the
file under its key and allocates missing ones as uninitialized memory. transformers marks loaded tensors with the
attribute `_is_hf_initialized`, and reads the same attribute of each module at the end; `PiecewiseAssignment` then
rejects incomplete weights and initializes missing ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from quantshard import private_torch
from quantshard.errors import CheckpointError, ConfigurationError, UnsupportedOperationError, warn_once
from quantshard.modules.base.state_dict import ComponentStateDict
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


class PiecewiseAssignment(ComponentStateDict):
    """A module that accepts the codes, scales and state of its weights one at a time.

    `_awaits_values`: whether the module was built on the meta device and has no values yet.
    """

    _vectors: dict[str, float]
    _awaits_values = False

    def _fill(self, names: Iterable[str]) -> None:
        raise NotImplementedError

    def _materialize(self) -> None:
        raise NotImplementedError

    # One piece -------------------------------------------------------------------------------------------------------

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Register a parameter, or assign a component or piece of state to the weight that it belongs to.

        Raises:
            CheckpointError: the weight is in high precision, or the component does not fit.
            UnsupportedOperationError: codes or scales are assigned alone to a weight that already has values.
        """
        if param is None or not self._takes(name, param):
            old = private_torch.registered_parameter(self, name)
            super().register_parameter(name, param)
            components.carry_attributes(old, param)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute; when FSDP2 swaps a sharded parameter for an unsharded one or back, keep its attributes.

        FSDP2 calls this method several times a step because the class defines it, so swaps take a short path.
        """
        old = self.__dict__.get("_parameters", {}).get(name)
        sharded = isinstance(value, DTensor) or isinstance(old, DTensor)
        if old is None or not sharded or not isinstance(value, nn.Parameter) or not self._stands_for(name, value):
            super().__setattr__(name, value)
            return
        private_torch.put_parameter(self, name, value)
        components.carry_attributes(old, value)

    def _stands_for(self, name: str, value: Tensor) -> bool:
        """Return whether `value` is a complete parameter and not a component of one."""
        return name not in self._weights or components.quantized_local(value) is not None

    def _takes(self, name: str, value: Tensor) -> bool:
        """Assign `value` if `name` names a component or piece of state of a weight; return whether it does."""
        for weight in self.__dict__.get("_weights", ()):
            param = private_torch.registered_parameter(self, weight)
            if param is None or not name.startswith(weight):
                continue
            if name == weight:
                if value.is_floating_point():
                    self._check_values(weight, param, value)
                    return False
                self._take_component(weight, param, "", value)
                return True
            suffix = name.removeprefix(weight)
            if suffix.startswith("_") and suffix in self._state_keys(weight):
                self._take(weight, param, suffix, value)
                return True
        return False

    def _check_values(self, weight: str, own: Tensor, value: Tensor) -> None:
        """Reject codes that were cast to a weight's dtype, and warn if values replace a quantized weight."""
        quantized, is_loaded = components.quantized_local(own), getattr(value, LOADED, False)
        if quantized is not None and not is_loaded and components.quantized_local(value) is None:
            was, name = quantized.quantized_storage.cell.tag, f"{type(self).__name__}.{weight}"
            warn_once(
                _REPLACED,
                f"{name} was {was} and is now a plain {value.dtype} parameter, which is not stored quantized; to set "
                f"its values, call {weight}.quantize_(values)",
            )
        if is_loaded and quantized is None and _look_like_codes(value):
            raise CheckpointError(
                f"{type(self).__name__}.{weight}: the checkpoint has whole numbers from 0 to 255 for it, which are "
                "codes of a quantized weight and not values, but this model's weight is in high precision; build the "
                "model under quantized_model_init with the checkpoint's recipe"
            )

    def _take(self, weight: str, own: Tensor, suffix: str, value: Tensor) -> None:
        name, live = f"{type(self).__name__}.{weight}", self._state_keys(weight)[suffix]
        if suffix == FORMAT_SUFFIX:
            components.fitting_pairs(own, {suffix: value}, name)
            return
        state, key = self.weight_state(weight), suffix.removeprefix("_")
        if key not in state:
            self._take_component(weight, own, suffix, value)
            return
        if value.shape != live.shape:
            raise CheckpointError(f"{name}{suffix}: shape {tuple(value.shape)}, here it is {tuple(live.shape)}")
        state[key] = components.state_like(live.detach(), value.detach(), value.device)

    def _take_component(self, weight: str, own: Tensor, suffix: str, value: Tensor) -> None:
        name, quantized = f"{type(self).__name__}.{weight}", components.quantized_local(own)
        if quantized is None:
            raise CheckpointError(
                f"{name}: it was given quantized codes ({value.dtype}), but this model's weight is in high precision; "
                "build the model under quantized_model_init with the checkpoint's recipe"
            )
        if not own.is_meta:
            raise UnsupportedOperationError(
                f"{name}{suffix} cannot be assigned alone: codes mean nothing without their scales; use "
                "load_state_dict, or quantize_ of the weight to give it other values"
            )
        pieces = self._given.setdefault(weight, {})
        pieces[suffix] = value
        if all(component.key_suffix in pieces for component in quantized.quantized_storage.cell.format.components):
            values = {key: piece.detach() for key, piece in pieces.items()}
            new = components.assigned(own, components.fitting_pairs(own, values, name))
            if all(getattr(piece, LOADED, False) for piece in pieces.values()):
                setattr(new, LOADED, True)
            super().register_parameter(weight, new)
            del self._given[weight]

    @property
    def _given(self) -> dict[str, dict[str, Tensor]]:
        """Weight -> key suffix -> component, for weights on the meta device that still lack components."""
        pieces: dict[str, dict[str, Tensor]] = self.__dict__.setdefault("_given_pieces", {})
        return pieces

    # All of them -----------------------------------------------------------------------------------------------------

    @property
    def _is_hf_initialized(self) -> bool:
        """Whether transformers should skip initializing this module; transformers reads it after loading the file."""
        self._finish_loading()
        is_marked: bool = self.__dict__.get(LOADED, False)
        return is_marked or any(norm in type(self).__name__ for norm in _NORMS)

    @_is_hf_initialized.setter
    def _is_hf_initialized(self, value: bool) -> None:
        self.__dict__[LOADED] = value

    @torch.no_grad()
    def _finish_loading(self) -> None:
        """Fill what has not been loaded with initial values, once.

        Raises:
            CheckpointError: only some components of a quantized weight were loaded.
        """
        for weight, pieces in self._given.items():
            suffixes = [c.key_suffix for c in components.storage_of(getattr(self, weight)).cell.format.components]
            lacking = [weight + suffix for suffix in suffixes if suffix not in pieces]
            raise CheckpointError(
                f"{type(self).__name__}.{weight}: {', '.join(weight + suffix for suffix in pieces)} was loaded, but "
                f"not {', '.join(lacking)}, which the file lacks or has in another shape (packed codes have that of "
                "their bytes): codes mean nothing without their scales; load by load_state_dict, or high-precision "
                "weights by quantshard.checkpoints.load_high_precision(model, state_dict)"
            )
        if not self._awaits_values or any(param.is_meta for param in self.parameters(recurse=False)):
            return
        self._awaits_values = False
        for name in self._attributes_in_the_way():
            del self.__dict__[name]  # uninitialized memory that transformers allocated
        self._materialize()
        params = dict(self.named_parameters(recurse=False))
        self._fill([name for name in self._weights if name in params and not getattr(params[name], LOADED, False)])
        for name, fill in self._vectors.items():
            if not getattr(params[name], LOADED, False):
                private_torch.local_tensor(params[name]).fill_(fill)
        for buffer in self.buffers(recurse=False):
            if not getattr(buffer, LOADED, False):
                buffer.zero_()

    def _attributes_in_the_way(self) -> list[str]:
        """Names of plain attributes that hide a component or piece of state and that no code reads.

        Attributes named like a weight are left out: PyTorch's pruning and weight_norm set those.
        """
        beginnings = tuple(weight + "_" for weight in self._weights)
        likely = [name for name in self.__dict__ if name.startswith(beginnings)]
        pieces = (
            {weight + suffix for weight in self._weights for suffix in self._state_keys(weight)} if likely else set()
        )
        return [name for name in likely if name in pieces]

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        wrong = self._attributes_in_the_way()
        if wrong:
            raise ConfigurationError(
                f"{prefix}{wrong[0]} was set to a tensor, which changes nothing of the weight that it belongs to: "
                f"delete that attribute, and load a state dict, or set it to an nn.Parameter(..., requires_grad=False)"
            )
        super()._save_to_state_dict(destination, prefix, keep_vars)

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *args: Any) -> None:
        super()._load_from_state_dict(state_dict, prefix, *args)
        self._awaits_values = False


def _look_like_codes(values: Tensor) -> bool:
    local = private_torch.local_tensor(values).detach()
    if local.is_meta or local.numel() == 0 or float(local.min()) < 0 or float(local.max()) > 255:
        return False
    return bool((local == local.round()).all()) and local.unique().numel() > _FEW
