"""State dict entries that differ from the module's parameters: other names, other ranks or other values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from quantshard.tensor.components import canonical_name


def zero_centered_gammas(model: nn.Module) -> list[str]:
    """Names of the normalization weights that are stored as gamma - 1 (`zero_centered_gamma`)."""
    names = (
        canonical_name(f"{prefix}.{name}" if prefix else name)
        for prefix, module in model.named_modules()
        for name in getattr(module, "zero_centered_gammas", ())
    )
    return list(dict.fromkeys(names))  # wrappers expose the attributes of the module inside, so names repeat


def split_stacked(module: nn.Module, state_dict: Mapping[str, Any], prefix: str = "") -> Mapping[str, Any]:
    """Split state dict entries that stack the rows of several parameters of a module.

    TransformerEngine stores the gated `fc1_weight` as gate over up. Entries with a row count that does not divide stay
    as they are. A state dict without stacked entries is returned itself, since it may read a file at each access.
    """
    stacked: dict[str, list[str]] = {}
    for path, owner in module.named_modules():
        start = prefix + (f"{canonical_name(path)}." if path else "")
        for name, parts in getattr(owner, "stacked_names", {}).items():
            if start + name in state_dict:
                stacked[start + name] = [start + part for part in parts]
    if not stacked:
        return state_dict
    entries = dict(state_dict)
    for name, parts in stacked.items():
        value = entries[name]
        if isinstance(value, Tensor) and value.ndim and value.shape[0] % len(parts) == 0:
            entries.update(zip(parts, entries.pop(name).chunk(len(parts)), strict=True))
    return entries


def held_elsewhere(model: nn.Module, keys: Iterable[str]) -> set[str]:
    """The state dict keys, of the whole model, of experts that live on other ranks (`GroupedLinear`)."""
    result: set[str] = set()
    for prefix, module in model.named_modules():
        # duck typing: `GroupedLinear` is in a higher layer of the package, so it cannot be imported here
        is_held_elsewhere = getattr(module, "is_held_elsewhere", None)
        if is_held_elsewhere is not None:
            start = f"{canonical_name(prefix)}." if prefix else ""
            result |= {key for key in keys if key.startswith(start) and is_held_elsewhere(key.removeprefix(start))}
    return result
