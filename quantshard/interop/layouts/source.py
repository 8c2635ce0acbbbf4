"""What a checkpoint holds of a model's weights: formats, shapes, values, masters; read one weight at a time."""

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
from quantshard.checkpoints.untrusted.metadata import read_metadata
from quantshard.checkpoints.untrusted.reader import SafeReader, decoded
from quantshard.errors import CheckpointError
from quantshard.formats import Format, Orientation, Role
from quantshard.interop.layouts.table import cell_of_tag
from quantshard.numerics import join_bfloat16, split_codes
from quantshard.numerics.states import AVERAGE, MASTER, REMAINDER_SUFFIX
from quantshard.state_cells import STATE_CELLS
from quantshard.tensor import components
from quantshard.tensor.components import FORMAT_SUFFIX, FORMAT_TAG_BYTES
from quantshard.tensor.storage import AMAX_HISTORY, DRAWS, KEY

MODEL, OPTIMIZER = "model.", "optimizer."
_STATES: Final = tuple(f"_{name}" for name in (KEY, DRAWS, AMAX_HISTORY))
_INPUT_HISTORY: Final = f"input_{AMAX_HISTORY}"


@dataclass(frozen=True)
class CheckpointWeight:
    """A weight of a checkpoint: its name in the model, shape, format tag (None: in high precision) and stored dtype."""

    name: str
    shape: tuple[int, ...]
    tag: str | None
    dtype: torch.dtype

    @property
    def rows(self) -> int:
        """Its first dim; 1 for a number."""
        return self.shape[0] if self.shape else 1

    @property
    def format(self) -> Format:
        """The format of one that is quantized."""
        assert self.tag is not None
        return cell_of_tag(self.tag).format


class CheckpointModel:
    """A checkpoint's model.

    Raises:
        CheckpointError: it is incomplete or damaged, or a weight's components do not fit each other.
        ConfigurationError: a weight is of a format that this release does not know.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = path
        metadata = read_metadata(path)
        self._reader, self._stored = SafeReader(path, metadata), metadata.state_dict_metadata
        tensors = {k: v for k, v in self._stored.items() if isinstance(v, TensorStorageMetadata)}
        self._prefix = MODEL if any(key.startswith(MODEL) for key in tensors) else ""
        self._entries = {
            key.removeprefix(self._prefix): tensors[key] for key in tensors if key.startswith(self._prefix)
        }
        self.weights = self._weights()
        self._states = self._state_keys()
        self._masters = self._master_keys()
        self._last: tuple[str, dict[str, Tensor]] | None = None

    # What there is ---------------------------------------------------------------------------------------------------

    def _weights(self) -> dict[str, CheckpointWeight]:
        found, taken = {}, set[str]()
        for key, entry in self._entries.items():
            is_tag = key.endswith(FORMAT_SUFFIX) and tuple(entry.size) == (FORMAT_TAG_BYTES,)
            if is_tag and entry.properties.dtype == torch.uint8:
                name = key.removesuffix(FORMAT_SUFFIX)
                found[name] = self._quantized(name, taken)
        if not self._prefix:
            taken |= {key for key in self._entries if key.startswith(OPTIMIZER)}
        for key, entry in self._entries.items():
            is_state = key.endswith(_STATES) and (key.endswith(AMAX_HISTORY) or entry.properties.dtype == torch.int64)
            if key not in taken and key not in found and not is_state:
                found[key] = CheckpointWeight(key, tuple(entry.size), None, entry.properties.dtype)
        return {key: found[key] for key in self._entries if key in found}

    def _quantized(self, name: str, taken: set[str]) -> CheckpointWeight:
        tag = self._tensor(name + FORMAT_SUFFIX)
        text = components.read_format_tag(tag)
        fmt = cell_of_tag(text).format
        packed, padding = fmt.copies[Orientation.ROWWISE].codes.block_shape[1], int(tag[-1])
        size = self._entries[name].size if name in self._entries else ()
        if len(size) != 2 or padding > min(size[1], 1) * (packed - 1):
            raise CheckpointError(
                f"{self.path} is damaged: {name} is tagged {text!r}, with {padding} of padding, and has no codes "
                f"[rows, columns] but {list(size)}"
            )
        shape = (size[0], size[1] * packed - padding)
        for component in fmt.components:
            key = name + component.key_suffix
            entry = self._entries.get(key)
            wanted = sharding.whole(shape).component_shape(component)
            if entry is None or tuple(entry.size) != wanted or entry.properties.dtype != component.encoding.storage:
                found = "missing" if entry is None else f"{entry.properties.dtype} {tuple(entry.size)}"
                raise CheckpointError(
                    f"{self.path} is damaged: {key} is {found}, and a {text} weight {shape} has "
                    f"{component.encoding.storage} {wanted}"
                )
            taken.add(key)
        taken.add(name + FORMAT_SUFFIX)
        return CheckpointWeight(name, shape, text, torch.uint8)

    def _master_keys(self) -> dict[str, str]:
        """Name of a parameter -> the key of its master, where the optimizer has one and was told names."""
        states = {name: f"{state}{MASTER}" for name, state in self._states.items()}
        held = self._stored.keys()
        return {name: key for name, key in states.items() if not held.isdisjoint((key, key + REMAINDER_SUFFIX))}

    def _state_keys(self) -> dict[str, str]:
        """Name of a parameter -> how the keys of its states begin, where the optimizer was told names."""
        found: dict[str, str] = {}
        for key in self._stored:
            if not key.startswith(f"{OPTIMIZER}param_groups.") or not key.endswith(".param_names"):
                continue
            names, numbers = self._object(key), self._object(key.removesuffix("param_names") + "params")
            if not are_named(names, numbers):
                raise CheckpointError(f"{self.path} is damaged: {key} does not name the parameters of its group")
            states = [f"{OPTIMIZER}state.{number}." for number in numbers]
            found.update(zip(map(components.canonical_name, names), states, strict=True))
        return found

    def states(self) -> dict[str, dict[str, tuple[torch.dtype, tuple[int, ...]]]]:
        """Name of a parameter -> dtype and shape of each state that the optimizer has of it, where it was told names.

        Raises:
            CheckpointError: a list of names is damaged.
        """
        keys = {start: name for name, start in self._states.items()}
        found: dict[str, dict[str, tuple[torch.dtype, tuple[int, ...]]]] = {}
        for key, entry in self._stored.items():
            start, _, state = key.rpartition(".")
            if f"{start}." in keys and isinstance(entry, TensorStorageMetadata):
                described = entry.properties.dtype, tuple(entry.size)
                found.setdefault(keys[f"{start}."], {})[state] = described
        return found

    def state_key(self, name: str, state: str) -> str:
        """The key of a state of a parameter, of those that `states` has."""
        return self._states[name] + state

    def _object(self, key: str) -> Any:
        if key not in self._stored:
            return None
        with self._reader.damage_named(key):
            content = self._reader.content(key)
        return decoded(key, content)

    def has_master(self, name: str) -> bool:
        """Whether the optimizer kept a high-precision master of a weight, and was told the weight's name."""
        return name in self._masters

    def has_average(self, name: str) -> bool:
        """Whether the optimizer kept an average of a weight, and was told the weight's name."""
        return self._states.get(name, "") + AVERAGE in self._stored

    # Reading ---------------------------------------------------------------------------------------------------------

    def parts(self, weight: CheckpointWeight) -> Mapping[str, Tensor]:
        """The components of a quantized weight by name; of the last one asked for they are kept."""
        if self._last is None or self._last[0] != weight.name:
            self._last = None  # before the next is read, so that there is one at a time
            wanted = weight.format.components
            self._last = (weight.name, {c.name: self._tensor(weight.name + c.key_suffix) for c in wanted})
        return self._last[1]

    def scales(self, weight: CheckpointWeight) -> Mapping[str, Tensor]:
        """The components of a quantized weight but its codes."""
        wanted = [c for c in weight.format.components if c.role is not Role.CODES]
        return {c.name: self._tensor(weight.name + c.key_suffix) for c in wanted}

    def plain(self, weight: CheckpointWeight) -> Tensor:
        """A weight in high precision, in its stored dtype."""
        if self._last is None or self._last[0] != weight.name:
            self._last = None
            self._last = (weight.name, {"": self._tensor(weight.name)})
        return self._last[1][""]

    def values(self, weight: CheckpointWeight) -> Tensor:
        """A weight's own values: float32, or in its stored dtype if it is in high precision."""
        if weight.tag is None:
            return self.plain(weight)
        shape = (weight.shape[0], weight.shape[1])
        return numerics.dequantize(weight.format.copies[Orientation.ROWWISE], self.parts(weight), shape)

    def master(self, weight: CheckpointWeight) -> Tensor:
        """The master, float32; see `has_master`.

        Raises:
            CheckpointError: it is not of the weight's shape.
        """
        start = self._masters[weight.name]
        if start not in self._stored and weight.tag is not None:  # the high bytes are the weight's codes
            low = self._expected(start + REMAINDER_SUFFIX, weight.shape, torch.uint8)
            return split_codes.dequantize(weight.format.copies[Orientation.ROWWISE], self.parts(weight), low)
        if start not in self._stored:  # the upper halves are the weight itself
            low = self._expected(start + REMAINDER_SUFFIX, (*weight.shape, 2), torch.uint8)
            high = self._expected(self._prefix + weight.name, weight.shape, torch.bfloat16)
            return join_bfloat16(high, low.contiguous().view(torch.int16).reshape(weight.shape))
        stored = self._expected(start, weight.shape)
        cell = STATE_CELLS.get(stored.dtype)
        if cell is None:
            return stored.float()
        scale = cell.format.copies[Orientation.ROWWISE].scale
        flat = weight.shape if len(weight.shape) == 2 else (1, stored.numel())
        grid = sharding.whole((flat[0], flat[1])).component_shape(scale)
        found = self._any(f"{start}_scale_inv")
        if found.dtype != scale.encoding.storage or found.numel() != math.prod(grid):
            raise CheckpointError(
                f"{self.path} is damaged: {start}_scale_inv is {found.dtype} {list(found.shape)}, of which "
                f"{scale.encoding.storage} {list(grid)} are needed"
            )
        return _scaled(stored, found, cell.format).float()

    def average(self, weight: CheckpointWeight) -> Tensor:
        """The average, float32; see `has_average`.

        Raises:
            CheckpointError: it is not of the weight's shape.
        """
        key = self._states[weight.name] + AVERAGE
        found = self._expected(key, weight.shape)
        if not found.is_floating_point():
            raise CheckpointError(f"{self.path} is damaged: {key} is {found.dtype}, no average")
        return found.float()

    def input_amax(self, name: str) -> float | None:
        """The largest amax that delayed scaling remembers of the input of a weight's layer; None if it knows none."""
        module, _, weight = name.rpartition(".")
        layer = weight.split("_")[0] + "_" if weight.startswith("fc") else ""
        key = f"{module}.{layer}{_INPUT_HISTORY}" if module else f"{layer}{_INPUT_HISTORY}"
        if key not in self._entries:
            return None
        found = self._tensor(key)
        if not found.numel() or not found.is_floating_point():
            raise CheckpointError(f"{self.path} is damaged: {key} is {found.dtype} {list(found.shape)}, no amaxes")
        return float(found.max()) or None

    def _expected(self, key: str, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> Tensor:
        """A tensor that has this shape, and this dtype or any of numbers."""
        found = self._any(key)
        fits = found.is_floating_point() if dtype is None else found.dtype == dtype
        if tuple(found.shape) != tuple(shape) or not (fits or found.dtype in STATE_CELLS):
            raise CheckpointError(
                f"{self.path} is damaged: {key} is {found.dtype} {list(found.shape)}, not {dtype or 'of numbers'} "
                f"{list(shape)}"
            )
        return found

    def _tensor(self, key: str) -> Tensor:
        return self._any(self._prefix + key)

    def _any(self, key: str) -> Tensor:
        if not isinstance(self._stored.get(key), TensorStorageMetadata):
            raise CheckpointError(f"{self.path} is damaged: it has no tensor {key}")
        with self._reader.damage_named(key):
            return self._reader.tensor(key)


def are_named(names: object, numbers: object) -> bool:
    """Whether a group of parameters, as an optimizer's state dict describes it, has a name for each of its numbers."""
    lists = isinstance(names, list) and isinstance(numbers, list) and len(names) == len(numbers)
    return lists and all(type(n) is str for n in names) and all(type(n) in (int, str) for n in numbers)  # type: ignore[attr-defined]


def _scaled(stored: Tensor, scale: Tensor, fmt: Format) -> Tensor:
    """A state in blocks along its rows -> float32 of its shape."""
    copy = fmt.copies[Orientation.ROWWISE]
    flat = stored.reshape(1, -1) if stored.ndim != 2 else stored
    parts = {copy.codes.name: flat, copy.scale.name: scale.reshape(flat.shape[0], -1)}
    return numerics.dequantize(copy, parts, (flat.shape[0], flat.shape[1])).reshape(stored.shape)
