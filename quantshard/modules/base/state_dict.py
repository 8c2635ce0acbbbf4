"""State dicts of modules with quantized weights: saving and loading as plain components."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from quantshard import private_torch
from quantshard.collectives.delayed_scaling import MISMATCHES
from quantshard.errors import CheckpointError
from quantshard.tensor import components

_NOT_LOADED = torch.empty((), dtype=torch.float32, device="cpu")
"""Placeholder that `set_model_state_dict` fills in for a component missing from a full state dict.

It has no dims, so that `set_model_state_dict` does not infer a target device from it."""

_EXTRA_STATE = "_extra_state"


class ComponentStateDict(nn.Module):
    """A module that saves its `_weights` as components and state.

    `_born_states`: the initial state of each weight. A high-precision weight keeps it, also one that replaces a
    quantized weight; a quantized weight has its state in its storage.
    """

    _weights: dict[str, Any]
    _born_states: dict[str, dict[str, Tensor]]

    @property
    def plain_states(self) -> dict[str, dict[str, Tensor]]:
        """Live state of the weights that are not quantized."""
        return {
            name: s for name, s in self._born_states.items() if components.quantized_local(getattr(self, name)) is None
        }

    def weight_state(self, name: str) -> dict[str, Tensor]:
        """Live RNG key, RNG counter and amax history of a weight."""
        return self._states((name,))[0]

    def _states(self, names: Sequence[str]) -> list[dict[str, Tensor]]:
        """`weight_state` of several weights."""
        params = private_torch.parameters_or_values(self, names)
        states = []
        for name, param in zip(names, params, strict=True):
            local = components.quantized_local(param)
            states.append(self._born_states[name] if local is None else local.quantized_storage.state)
        return states

    def _state_keys(self, name: str) -> dict[str, Tensor]:
        """Key suffix -> live tensor, for all state-dict entries of a weight."""
        param = getattr(self, name)
        assert param is not None
        if components.quantized_local(param) is not None:
            return components.state_of(param)
        return {"": param, **{f"_{key}": value for key, value in self._born_states[name].items()}}

    def _state_entry(self, name: str, suffix: str) -> Tensor | None:
        """The entry of `_state_keys` under `suffix`, looked up alone because callers do so for every state-dict key."""
        param = getattr(self, name)
        if components.quantized_local(param) is not None:
            return components.state_entry(param, suffix)
        return self._state_keys(name).get(suffix)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Tensor]]:
        """Yield the buffers; to `set_model_state_dict` also the component keys, which it then prefixes for DDP and
        torch.compile."""
        yielded = super().named_buffers(*args, **kwargs)
        if not private_torch.collects_state_dict_keys():
            return yielded
        suffixes = {name: [suffix for suffix in self._state_keys(name) if suffix] for name in self._weights}
        return chain(yielded, ((name + suffix, _NOT_LOADED) for name in suffixes for suffix in suffixes[name]))

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        MISMATCHES.settle()
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for name in self._weights:
            for suffix, value in self._state_keys(name).items():
                # masters detect writes by the version counter, which a DTensor's `detach` does not share
                destination[prefix + name + suffix] = value.detach() if value.requires_grad and not keep_vars else value

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        rest = dict(state_dict)
        extra = rest.get(prefix + _EXTRA_STATE)
        if isinstance(extra, Tensor) and extra.numel() == 0:  # in every state dict of TransformerEngine's modules
            del rest[prefix + _EXTRA_STATE]
        assign = bool(local_metadata.get("assign_to_params_buffers"))
        ready = []
        for name in self._weights:
            keys = self._state_keys(name)
            entries = {s: rest.pop(prefix + name + s) for s in keys if prefix + name + s in rest}
            self._drop_placeholders(name, entries)
            is_quantized = components.quantized_local(getattr(self, name)) is not None
            try:
                ready.append((name, self._fitting(name, entries, prefix, is_quantized, assign)))
            except CheckpointError as error:
                error_msgs.append(str(error))
                continue
            missing_keys += [prefix + name + s for s in keys if s not in entries and (is_quantized or s == "")]
        if len(ready) < len(self._weights):
            return  # if a weight does not fit, the biases and histories are not loaded either
        for name, pairs in ready:
            if assign:
                value = self._assign(name, pairs)
                rest.update({} if value is None else {prefix + name: value})
            else:
                components.write_components(getattr(self, name), pairs)
        other_missing: list[str] = []
        super()._load_from_state_dict(rest, prefix, local_metadata, strict, other_missing, unexpected_keys, error_msgs)
        missing_keys += [key for key in other_missing if key.removeprefix(prefix) not in self._weights]

    def _assign(self, name: str, pairs: list[tuple[Tensor, Tensor]]) -> Tensor | None:
        """Replace a weight's tensors by loaded ones; return the value if PyTorch is to assign it (high precision)."""
        param, state = getattr(self, name), self._born_states[name]
        if components.quantized_local(param) is not None:
            if pairs:
                setattr(self, name, components.assigned(param, pairs))
            return None
        loaded = {id(target): source for target, source in pairs}
        value = loaded.pop(id(param), None)
        device = private_torch.local_tensor(param if value is None else value).device
        for key, old in state.items():
            state[key] = components.state_like(old, loaded.get(id(old)), device)
        return value

    def _drop_placeholders(self, name: str, found: dict[str, Tensor]) -> None:
        """Remove from `found` the placeholders that torch.distributed.checkpoint.state_dict has for missing weights.

        With `full_state_dict` it fills in what it collected; `ignore_frozen_params` drops only the codes.
        """
        for suffix in [suffix for suffix, value in found.items() if value is _NOT_LOADED]:
            del found[suffix]
        local = components.quantized_local(getattr(self, name))
        if local is None:
            return
        placeholder = components.quantized_local(found.get(""))
        if placeholder is not None and placeholder.quantized_storage is local.quantized_storage:
            del found[""]
        if "" not in found and not getattr(self, name).requires_grad:
            found.clear()

    def _fitting(
        self, name: str, found: dict[str, Tensor], prefix: str, is_quantized: bool, assign: bool
    ) -> list[tuple[Tensor, Tensor]]:
        """Check the entries of one weight and return (target, source) pairs; write nothing."""
        param = getattr(self, name)
        assert param is not None
        if param.is_meta and found and not assign:
            raise CheckpointError(
                f"{prefix}{name} is on the meta device, where loading does nothing; call reset_parameters() or "
                "to_empty() first, or load_state_dict(assign=True)"
            )
        if is_quantized:
            return components.fitting_pairs(param, found, prefix + name)
        live = self._state_keys(name)
        for suffix, value in found.items():
            if suffix == "" and not value.is_floating_point():
                raise CheckpointError(
                    f"{prefix}{name}: the state dict holds quantized codes ({value.dtype}), but this model's weight is "
                    "in high precision; build the model under quantized_model_init with the checkpoint's recipe"
                )
            if value.shape != live[suffix].shape:
                raise CheckpointError(
                    f"{prefix}{name}{suffix}: shape {tuple(value.shape)} in the state dict, "
                    f"{tuple(live[suffix].shape)} in this model"
                )
        return [(live[suffix], value) for suffix, value in found.items()]

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            # torch.distributed.checkpoint.state_dict resolves every state-dict key by attributes, and so does
            # transformers' get_parameter, which returns only instances of nn.Parameter
            for weight in self.__dict__.get("_weights", ()):
                if name.startswith(weight + "_"):
                    entry = self._state_entry(weight, name.removeprefix(weight))
                    if entry is not None:
                        return entry if isinstance(entry, nn.Parameter) else nn.Parameter(entry, requires_grad=False)
            raise
