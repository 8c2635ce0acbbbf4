"""Reads a model's weights from a checkpoint: formats, shapes, values and masters, one weight at a time."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from quantshard import numerics, sharding
from quantshard.checkpoints.safe_read import SafeReader
from quantshard.errors import CheckpointError
from quantshard.formats import Format, Orientation, Role
from quantshard.interop.layouts.table import spec_of_tag
from quantshard.numerics import join_bfloat16, split_codes
from quantshard.numerics.states import AVERAGE, MASTER, REMAINDER_SUFFIX
from quantshard.state_storage import STATE_QUANT_SPECS
from quantshard.tensor import components
from quantshard.tensor.components import FORMAT_SUFFIX, FORMAT_TAG_BYTES
from quantshard.tensor.storage import AMAX_HISTORY, DRAWS, KEY

MODEL, OPTIMIZER = "model.", "optimizer."
_STATES: Final = tuple(f"_{name}" for name in (KEY, DRAWS, AMAX_HISTORY))
_INPUT_HISTORY: Final = f"input_{AMAX_HISTORY}"


@dataclass(frozen=True)
class CheckpointWeight:
    """A weight of a checkpoint: name in the model, shape, format tag (None: high precision) and stored dtype."""

    name: str
    shape: tuple[int, ...]
    tag: str | None
    dtype: torch.dtype

    @property
    def rows(self) -> int:
        """Size of the first dim; 1 for a scalar."""
        return self.shape[0] if self.shape else 1

    @property
    def format(self) -> Format:
        """Format of a quantized weight."""
        assert self.tag is not None
        return spec_of_tag(self.tag).format


class CheckpointModel:
    """The model stored in a checkpoint."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = path
        self._reader = SafeReader(path)
        self._stored = self._reader.entries
        tensors = {k: v for k, v in self._stored.items() if isinstance(v, TensorStorageMetadata)}
        self._prefix = MODEL if any(key.startswith(MODEL) for key in tensors) else ""
        self._entries = {
            key.removeprefix(self._prefix): tensors[key] for key in tensors if key.startswith(self._prefix)
        }
        self.weights = self._weights()
        self._states = self._state_keys()
        self._masters = self._master_keys()
        self._last: tuple[str, dict[str, Tensor]] | None = None

    # Contents ---------------------------------------------------------------------------------------------------------

    def _weights(self) -> dict[str, CheckpointWeight]:
        weights, components_seen = {}, set[str]()
        for key, entry in self._entries.items():
            is_tag = key.endswith(FORMAT_SUFFIX) and tuple(entry.size) == (FORMAT_TAG_BYTES,)
            if is_tag and entry.properties.dtype == torch.uint8:
                name = key.removesuffix(FORMAT_SUFFIX)
                weights[name] = self._quantized(name, components_seen)
        if not self._prefix:
            components_seen |= {key for key in self._entries if key.startswith(OPTIMIZER)}
        for key, entry in self._entries.items():
            is_state = key.endswith(_STATES) and (key.endswith(AMAX_HISTORY) or entry.properties.dtype == torch.int64)
            if key not in components_seen and key not in weights and not is_state:
                weights[key] = CheckpointWeight(key, tuple(entry.size), None, entry.properties.dtype)
        return {key: weights[key] for key in self._entries if key in weights}

    def _quantized(self, name: str, taken: set[str]) -> CheckpointWeight:
        tag = self._tensor(name + FORMAT_SUFFIX)
        text = components.read_format_tag(tag)
        fmt = spec_of_tag(text).format
        codes_per_byte, padding = fmt.copies[Orientation.ROWWISE].codes.block_shape[1], int(tag[-1])
        size = self._entries[name].size if name in self._entries else ()
        if len(size) != 2 or padding > min(size[1], 1) * (codes_per_byte - 1):
            raise CheckpointError(f"{self.path} is damaged: {name} [{text}] has codes of shape {list(size)}")
        shape = (size[0], size[1] * codes_per_byte - padding)
        for component in fmt.components:
            key = name + component.key_suffix
            entry = self._entries.get(key)
            expected = sharding.whole(shape).component_shape(component)
            if entry is None or tuple(entry.size) != expected or entry.properties.dtype != component.encoding.storage:
                actual = "missing" if entry is None else f"{entry.properties.dtype} {tuple(entry.size)}"
                raise CheckpointError(
                    f"{self.path} is damaged: {key} is {actual}, not {component.encoding.storage} {expected}"
                )
            taken.add(key)
        taken.add(name + FORMAT_SUFFIX)
        return CheckpointWeight(name, shape, text, torch.uint8)

    def _master_keys(self) -> dict[str, str]:
        """Map parameter names to the keys of their masters, for parameters that the optimizer recorded by name."""
        states = {name: f"{state}{MASTER}" for name, state in self._states.items()}
        keys = self._stored.keys()
        return {name: key for name, key in states.items() if not keys.isdisjoint((key, key + REMAINDER_SUFFIX))}

    def _state_keys(self) -> dict[str, str]:
        """Map parameter names to the key prefix of their states, for parameters that the optimizer recorded by name."""
        prefixes: dict[str, str] = {}
        for key in self._stored:
            if not key.startswith(f"{OPTIMIZER}param_groups.") or not key.endswith(".param_names"):
                continue
            names, numbers = self._object(key), self._object(key.removesuffix("param_names") + "params")
            if not are_named(names, numbers):
                raise CheckpointError(f"{self.path} is damaged: {key} does not name the parameters of its group")
            states = [f"{OPTIMIZER}state.{number}." for number in numbers]
            prefixes.update(zip(map(components.canonical_name, names), states, strict=True))
        return prefixes

    def states(self) -> dict[str, dict[str, tuple[torch.dtype, tuple[int, ...]]]]:
        """Map parameter names to dtype and shape of each optimizer state, for parameters recorded by name."""
        keys = {start: name for name, start in self._states.items()}
        states_by_name: dict[str, dict[str, tuple[torch.dtype, tuple[int, ...]]]] = {}
        for key, entry in self._stored.items():
            start, _, state = key.rpartition(".")
            if f"{start}." in keys and isinstance(entry, TensorStorageMetadata):
                spec = entry.properties.dtype, tuple(entry.size)
                states_by_name.setdefault(keys[f"{start}."], {})[state] = spec
        return states_by_name

    def state_key(self, name: str, state: str) -> str:
        """Return the checkpoint key of one of the states listed by `states`."""
        return self._states[name] + state

    def _object(self, key: str) -> Any:
        return self._reader.value(key) if key in self._stored else None

    def has_master(self, name: str) -> bool:
        """Return whether the optimizer kept a master of this weight and recorded its name."""
        return name in self._masters

    def has_average(self, name: str) -> bool:
        """Return whether the optimizer kept an average of this weight and recorded its name."""
        return self._states.get(name, "") + AVERAGE in self._stored

    # Reading ---------------------------------------------------------------------------------------------------------

    def parts(self, weight: CheckpointWeight) -> Mapping[str, Tensor]:
        """Return the components of a quantized weight by name. Those of the last weight stay cached."""
        if self._last is None or self._last[0] != weight.name:
            # free the last weight before reading the next, so that only one is in memory
            self._last = None
            parts = weight.format.components
            self._last = (weight.name, {c.name: self._tensor(weight.name + c.key_suffix) for c in parts})
        return self._last[1]

    def scales(self, weight: CheckpointWeight) -> Mapping[str, Tensor]:
        """Return the components of a quantized weight except its codes."""
        parts = [c for c in weight.format.components if c.role is not Role.CODES]
        return {c.name: self._tensor(weight.name + c.key_suffix) for c in parts}

    def plain(self, weight: CheckpointWeight) -> Tensor:
        """Return a high-precision weight in its stored dtype."""
        if self._last is None or self._last[0] != weight.name:
            self._last = None
            self._last = (weight.name, {"": self._tensor(weight.name)})
        return self._last[1][""]

    def values(self, weight: CheckpointWeight) -> Tensor:
        """Return a weight's values: float32 if quantized, otherwise in its stored dtype."""
        if weight.tag is None:
            return self.plain(weight)
        shape = (weight.shape[0], weight.shape[1])
        return numerics.dequantize(weight.format.copies[Orientation.ROWWISE], self.parts(weight), shape)

    def master(self, weight: CheckpointWeight) -> Tensor:
        """Return the float32 master; see `has_master`."""
        start = self._masters[weight.name]
        if start not in self._stored and weight.tag is not None:
            # the weight's codes are the high bytes
            low = self._expected(start + REMAINDER_SUFFIX, weight.shape, torch.uint8)
            return split_codes.dequantize(weight.format.copies[Orientation.ROWWISE], self.parts(weight), low)
        if start not in self._stored:
            # the weight itself is the upper half
            low = self._expected(start + REMAINDER_SUFFIX, (*weight.shape, 2), torch.uint8)
            high = self._expected(self._prefix + weight.name, weight.shape, torch.bfloat16)
            return join_bfloat16(high, low.contiguous().view(torch.int16).reshape(weight.shape))
        state = self._expected(start, weight.shape)
        spec = STATE_QUANT_SPECS.get(state.dtype)
        if spec is None:
            return state.float()
        scale = spec.format.copies[Orientation.ROWWISE].scale
        flat = weight.shape if len(weight.shape) == 2 else (1, state.numel())
        grid = sharding.whole((flat[0], flat[1])).component_shape(scale)
        scales = self._any(f"{start}_scale_inv")
        if scales.dtype != scale.encoding.storage or scales.numel() != math.prod(grid):
            raise CheckpointError(
                f"{self.path} is damaged: {start}_scale_inv is {scales.dtype} {list(scales.shape)}, not "
                f"{scale.encoding.storage} {list(grid)}"
            )
        return _scaled(state, scales, spec.format).float()

    def average(self, weight: CheckpointWeight) -> Tensor:
        """Return the float32 average; see `has_average`."""
        key = self._states[weight.name] + AVERAGE
        average = self._expected(key, weight.shape)
        if not average.is_floating_point():
            raise CheckpointError(f"{self.path} is damaged: {key} is {average.dtype}")
        return average.float()

    def input_amax(self, name: str) -> float | None:
        """Return the largest amax in delayed scaling's history for the input of a weight's layer, or None."""
        module, _, weight = name.rpartition(".")
        layer = weight.split("_")[0] + "_" if weight.startswith("fc") else ""
        key = f"{module}.{layer}{_INPUT_HISTORY}" if module else f"{layer}{_INPUT_HISTORY}"
        if key not in self._entries:
            return None
        history = self._tensor(key)
        if not history.numel() or not history.is_floating_point():
            raise CheckpointError(f"{self.path} is damaged: {key} is {history.dtype} {list(history.shape)}")
        return float(history.max()) or None

    def _expected(self, key: str, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> Tensor:
        """Read a tensor and check its shape and dtype (None: any floating-point dtype)."""
        tensor = self._any(key)
        fits = tensor.is_floating_point() if dtype is None else tensor.dtype == dtype
        if tuple(tensor.shape) != tuple(shape) or not (fits or tensor.dtype in STATE_QUANT_SPECS):
            raise CheckpointError(
                f"{self.path} is damaged: {key} is {tensor.dtype} {list(tensor.shape)}, not {dtype or 'of numbers'} "
                f"{list(shape)}"
            )
        return tensor

    def _tensor(self, key: str) -> Tensor:
        return self._any(self._prefix + key)

    def _any(self, key: str) -> Tensor:
        if not isinstance(self._stored.get(key), TensorStorageMetadata):
            raise CheckpointError(f"{self.path} is damaged: it has no tensor {key}")
        tensor: Tensor = self._reader.value(key)
        return tensor


def are_named(names: object, numbers: object) -> bool:
    """Return whether a parameter group of an optimizer's state dict has a name for each of its parameter numbers."""
    lists = isinstance(names, list) and isinstance(numbers, list) and len(names) == len(numbers)
    return lists and all(type(n) is str for n in names) and all(type(n) in (int, str) for n in numbers)  # type: ignore[attr-defined]


def _scaled(stored: Tensor, scale: Tensor, fmt: Format) -> Tensor:
    """Dequantize a state with blocks along its rows to float32 of its shape."""
    copy = fmt.copies[Orientation.ROWWISE]
    flat = stored.reshape(1, -1) if stored.ndim != 2 else stored
    parts = {copy.codes.name: flat, copy.scale.name: scale.reshape(flat.shape[0], -1)}
    return numerics.dequantize(copy, parts, (flat.shape[0], flat.shape[1])).reshape(stored.shape)
