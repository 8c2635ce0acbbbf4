"""Second moments in FP8 as earlier versions stored them, E4M3 under float32 scales, made of the format of now.

E4M3's values are those of UE5M3 over 256, so of codes `c` under a scale `S` that is a power of two, as it was since
2026-11-22, the scale becomes `S / 256`, the codes those of `256 c`, and each keeps its value.
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
    """A parameter's loaded states, those of before in the format of the live ones; and which of them were rounded
    (to nearest, by a sixteenth at most), their scales being no powers of two."""
    found, rounded = dict(loaded), []
    for role in _earlier(live, loaded):
        keys = {_OLD.codes.name: role, _OLD.scale.name: role + _OLD.scale.key_suffix}
        device = private_torch.local_tensor(live[role]).device
        old, new = (
            storages.empty(cell, components.shard_of(param), device) for cell in (FP8_STATE, FP8_NONNEGATIVE_STATE)
        )
        given = {name: private_torch.local_tensor(loaded[key]) for name, key in keys.items()}
        if any(
            part.shape != given[name].shape or part.dtype != given[name].dtype for name, part in old.components.items()
        ):
            continue  # of another model or mesh, which the comparison with the live ones tells
        old.components.update({name: part.to(device) for name, part in given.items()})
        scale = old.components[_OLD.scale.name]
        if not numerics.are_powers_of_two(scale):
            rounded.append(role)
        new.components[_NEW.scale.name] = numerics.encode(scale * (1 / _RATIO), _NEW.scale.encoding)
        grid = numerics.decode(new.touched()[_NEW.scale.name], _NEW.scale.encoding).reciprocal()
        codes = numerics.quantize_codes(old.dequantize(), _NEW, {_NEW.scale.name: grid}, new.shard.origin)
        new.components[_NEW.codes.name] = codes
        suffixes = {part.name: part.key_suffix for part in new.cell.format.components}
        for key in keys.values():
            del found[key]
        found |= {role + suffixes[name]: part for name, part in components.storage_tensors(new, param).items()}
    return found, rounded


def _earlier(live: Mapping[str, Any], stored: Mapping[str, Any]) -> list[str]:
    """The roles of states that are stored as before, where the live ones are not."""
    new, old = _NEW.scale.key_suffix, _OLD.scale.key_suffix
    roles = [key.removesuffix(new) for key in live if key.endswith(new)]
    return [role for role in roles if role + old in stored]
