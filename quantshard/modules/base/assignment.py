"""Weights that are assigned piece by piece: `setattr(module, key, tensor)` for each key of a state dict.

So loads transformers' `from_pretrained`, which builds a model on the meta device, wraps each tensor of a file as a
parameter and sets it under its key; what the file lacks it makes of uninitialized memory, to be initialized behind.
What it has loaded it marks with an attribute, `_is_hf_initialized`, and asks each module for the same one at the end:
then what is not complete is refused here, and what was not loaded is filled with its initial values.
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
"""Attribute of a tensor, or a module, that transformers does not initialize."""

_NORMS = ("LayerNorm", "RMSNorm")
"""A class with one of these in its name transformers takes for a normalization, and sets its `weight` to ones."""

_REPLACED = "replaced weight"
"""Topic of a warning."""

_FEW = 16
"""As many different numbers a weight may have that are all whole, from 0 to 255, before they are taken for codes."""


class PiecewiseAssignment(ComponentStateDict):
    """A module whose weights take their codes, scales and state one by one.

    `_awaits_values`: it was made on the meta device and not filled since.
    """

    _vectors: dict[str, float]
    _awaits_values = False

    def _fill(self, names: Iterable[str]) -> None:
        raise NotImplementedError

    def _materialize(self) -> None:
        raise NotImplementedError

    # One piece -------------------------------------------------------------------------------------------------------

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """As of any module; but codes, scales and state of a weight go where the state dict has them from.

        Raises:
            CheckpointError: codes for a weight that is in high precision, or pieces that do not fit.
            UnsupportedOperationError: codes or scales alone, for a weight that has others.
        """
        if param is None or not self._takes(name, param):
            old = private_torch.registered_parameter(self, name)
            super().register_parameter(name, param)
            components.carry_attributes(old, param)

    def __setattr__(self, name: str, value: Any) -> None:
        """FSDP2 exchanges parameters, whole for sharded and back, by this method where a class has one of its own; so
        what was set on a weight stays with it. It does so several times a step, hence straight."""
        old = self.__dict__.get("_parameters", {}).get(name)
        sharded = isinstance(value, DTensor) or isinstance(old, DTensor)
        if old is None or not sharded or not isinstance(value, nn.Parameter) or not self._stands_for(name, value):
            super().__setattr__(name, value)
            return
        private_torch.put_parameter(self, name, value)
        components.carry_attributes(old, value)

    def _stands_for(self, name: str, value: Tensor) -> bool:
        """True if it is a whole parameter, and no piece of one."""
        return name not in self._weights or components.quantized_local(value) is not None

    def _takes(self, name: str, value: Tensor) -> bool:
        """True if it was a piece, and is where it belongs."""
        for weight in self.__dict__.get("_weights", ()):
            own = private_torch.registered_parameter(self, weight)
            if own is None or not name.startswith(weight):
                continue
            if name == weight:
                if value.is_floating_point():
                    self._check_values(weight, own, value)
                    return False
                self._take_component(weight, own, "", value)
                return True
            suffix = name.removeprefix(weight)
            if suffix.startswith("_") and suffix in self._state_keys(weight):
                self._take(weight, own, suffix, value)
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
        given = self._given.setdefault(weight, {})
        given[suffix] = value
        if all(component.key_suffix in given for component in quantized.quantized_storage.cell.format.components):
            values = {key: piece.detach() for key, piece in given.items()}
            new = components.assigned(own, components.fitting_pairs(own, values, name))
            if all(getattr(piece, LOADED, False) for piece in given.values()):
                setattr(new, LOADED, True)
            super().register_parameter(weight, new)
            del self._given[weight]

    @property
    def _given(self) -> dict[str, dict[str, Tensor]]:
        """By weight and key suffix, the components of weights on the meta device, until each has all of its own."""
        found: dict[str, dict[str, Tensor]] = self.__dict__.setdefault("_given_pieces", {})
        return found

    # All of them -----------------------------------------------------------------------------------------------------

    @property
    def _is_hf_initialized(self) -> bool:
        """transformers asks for this once it has loaded all that there was: if true, it initializes nothing here."""
        self._finish_loading()
        told: bool = self.__dict__.get(LOADED, False)
        return told or any(norm in type(self).__name__ for norm in _NORMS)

    @_is_hf_initialized.setter
    def _is_hf_initialized(self, value: bool) -> None:
        self.__dict__[LOADED] = value

    @torch.no_grad()
    def _finish_loading(self) -> None:
        """Fill what has not been loaded, once.

        Raises:
            CheckpointError: of a quantized weight some components were, and others not.
        """
        for weight, given in self._given.items():
            suffixes = [c.key_suffix for c in components.storage_of(getattr(self, weight)).cell.format.components]
            lacking = [weight + suffix for suffix in suffixes if suffix not in given]
            raise CheckpointError(
                f"{type(self).__name__}.{weight}: {', '.join(weight + suffix for suffix in given)} was loaded, but "
                f"not {', '.join(lacking)}, which the file lacks or has in another shape (packed codes have that of "
                "their bytes): codes mean nothing without their scales; load by load_state_dict, or high-precision "
                "weights by quantshard.checkpoints.load_high_precision(model, state_dict)"
            )
        if not self._awaits_values or any(param.is_meta for param in self.parameters(recurse=False)):
            return
        self._awaits_values = False
        for name in self._attributes_in_the_way():
            del self.__dict__[name]  # of uninitialized memory; the weight has its own
        self._materialize()
        own = dict(self.named_parameters(recurse=False))
        self._fill([name for name in self._weights if name in own and not getattr(own[name], LOADED, False)])
        for name, fill in self._vectors.items():
            if not getattr(own[name], LOADED, False):
                private_torch.local_tensor(own[name]).fill_(fill)
        for buffer in self.buffers(recurse=False):
            if not getattr(buffer, LOADED, False):
                buffer.zero_()

    def _attributes_in_the_way(self) -> list[str]:
        """Names of pieces under which a plain attribute was set, which no code reads; not those of weights themselves,
        which PyTorch's pruning and weight_norm set."""
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
