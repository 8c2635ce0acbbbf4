"""Conversion of FP8 second moments from the format of earlier versions (E4M3 codes with float32 scales).

E4M3's values are UE5M3's divided by 256. So for codes `c` and a power-of-two scale `S` (used since 2026-11-22), the new
scale is `S / 256`, the new codes represent `256 c`, and every value is exact.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from torch import Tensor

from quantshard import numerics, private_torch
from quantshard.formats import Orientation
from quantshard.state_cells import FP8_NONNEGATIVE_STATE, FP8_STATE
from quantshard.tensor import components
from quantshard.tensor import storage as storages

_OLD, _NEW = (cell.format.copies[Orientation.ROWWISE] for cell in (FP8_STATE, FP8_NONNEGATIVE_STATE))
_RATIO: Final = _NEW.codes.encoding.max / _OLD.codes.encoding.max


def converted(param: Tensor, live: Mapping[str, Any], loaded: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return a parameter's loaded states in the live format, and the roles that had to be rounded.

    Values are rounded to nearest, by at most a sixteenth, if their scales are not powers of two.
    """
    states, rounded = dict(loaded), []
    for role in _earlier(live, loaded):
        keys = {_OLD.codes.name: role, _OLD.scale.name: role + _OLD.scale.key_suffix}
        device = private_torch.local_tensor(live[role]).device
        old, new = (
            storages.empty(cell, components.shard_of(param), device) for cell in (FP8_STATE, FP8_NONNEGATIVE_STATE)
        )
        loaded_parts = {name: private_torch.local_tensor(loaded[key]) for name, key in keys.items()}
        if any(
            part.shape != loaded_parts[name].shape or part.dtype != loaded_parts[name].dtype
            for name, part in old.components.items()
        ):
            continue  # from another model or mesh; the caller's comparison raises
        old.components.update({name: part.to(device) for name, part in loaded_parts.items()})
        scale = old.components[_OLD.scale.name]
        if not numerics.are_powers_of_two(scale):
            rounded.append(role)
        new.components[_NEW.scale.name] = numerics.encode(scale * (1 / _RATIO), _NEW.scale.encoding)
        grid = numerics.decode(new.touched()[_NEW.scale.name], _NEW.scale.encoding).reciprocal()
        codes = numerics.quantize_codes(old.dequantize(), _NEW, {_NEW.scale.name: grid}, new.shard.origin)
        new.components[_NEW.codes.name] = codes
        suffixes = {part.name: part.key_suffix for part in new.cell.format.components}
        for key in keys.values():
            del states[key]
        states |= {role + suffixes[name]: part for name, part in components.storage_tensors(new, param).items()}
    return states, rounded


def _earlier(live: Mapping[str, Any], stored: Mapping[str, Any]) -> list[str]:
    """Return the roles of states stored in the earlier format whose live state is in the new one."""
    new, old = _NEW.scale.key_suffix, _OLD.scale.key_suffix
    roles = [key.removesuffix(new) for key in live if key.endswith(new)]
    return [role for role in roles if role + old in stored]
