"""Reads a model's weights from a checkpoint: formats, shapes, values and masters, one weight at a time."""

import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from quantshard import numerics
from quantshard.checkpoints import inspection
from quantshard.checkpoints.safe_read import SafeReader
from quantshard.errors import CheckpointError
from quantshard.formats import Format, Orientation, Role, stacked
from quantshard.interop.layouts.names import is_stack, matrix_shape
from quantshard.interop.layouts.table import spec_of_tag
from quantshard.numerics import join_bfloat16, split_codes
from quantshard.numerics.states import AVERAGE, MASTER, REMAINDER_SUFFIX
from quantshard.optimizers.state import make_state
from quantshard.recipe import QuantSpec
from quantshard.state_storage import STATE_QUANT_SPECS
from quantshard.tensor import components
from quantshard.tensor.components import FORMAT_SUFFIX
from quantshard.tensor.parameter_state import AMAX_HISTORY, RNG_DRAWS, RNG_KEY

MODEL, OPTIMIZER = "model.", "optimizer."
_STATES: Final = tuple(f"_{name}" for name in (RNG_KEY, RNG_DRAWS, AMAX_HISTORY))
_INPUT_HISTORY: Final = f"input_{AMAX_HISTORY}"


@dataclass(frozen=True)
class ModelWeight:
    """A weight of a model: name, shape, format and scaling (None: high precision), and stored dtype."""

    name: str
    shape: tuple[int, ...]
    spec: QuantSpec | None
    dtype: torch.dtype

    @property
    def tag(self) -> str | None:
        """The format's name in checkpoints, or None."""
        return None if self.spec is None else self.spec.tag

    @property
    def rows(self) -> int:
        """Rows of the weight as a matrix: size of the first dim; 1 for a scalar."""
        return self.matrix[0] if self.shape else 1

    @property
    def is_stack(self) -> bool:
        return is_stack(self.name, self.shape)

    @property
    def matrix(self) -> tuple[int, ...]:
        """Shape of the weight, that of a stack of matrices as one matrix."""
        return matrix_shape(self.shape) if self.is_stack else self.shape

    @property
    def format(self) -> Format:
        assert self.spec is not None
        return stacked(self.spec.format, self.shape[1]) if self.is_stack else self.spec.format


class WeightReader:
    """Where an export reads a model's weights, one at a time. `masters`, `averages`: weights that have them."""

    path: str | os.PathLike[str]
    weights: Mapping[str, ModelWeight]
    masters: Collection[str] = ()
    averages: Collection[str] = ()

    def parts(self, weight: ModelWeight) -> Mapping[str, Tensor]:
        """Return a weight's tensors by component name ("" in high precision)."""
        raise NotImplementedError

    def scales(self, weight: ModelWeight) -> Mapping[str, Tensor]:
        """Return the components that are not codes."""
        raise NotImplementedError

    def values(self, weight: ModelWeight) -> Tensor:
        """Return a weight's values: float32 if quantized, otherwise in its stored dtype."""
        if weight.tag is None:
            return self.parts(weight)[""]
        shape = (weight.rows, weight.shape[-1])
        return numerics.dequantize(weight.format.copies[Orientation.ROWWISE], self.parts(weight), shape)

    def is_same(self, weight: ModelWeight, other: ModelWeight) -> bool:
        return torch.equal(self.values(weight).clone(), self.values(other))

    def master(self, weight: ModelWeight) -> Tensor:
        raise NotImplementedError

    def average(self, weight: ModelWeight) -> Tensor:
        raise NotImplementedError

    def input_amax(self, name: str) -> float | None:
        """Return the largest amax in delayed scaling's history for the input of a weight's layer, or None."""
        raise NotImplementedError


class CheckpointModel(WeightReader):
    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = path
        self._reader = SafeReader(path)
        self._stored = self._reader.entries
        tensors = {k: v for k, v in self._stored.items() if isinstance(v, TensorStorageMetadata)}
        prefix = self._prefix = MODEL if any(key.startswith(MODEL) for key in tensors) else ""
        self._entries = {key.removeprefix(prefix): tensors[key] for key in tensors if key.startswith(prefix)}
        self.weights = self._weights()
        # for parameters that the optimizer recorded by name: name -> key prefix of its states, and key of its master
        self._states = {
            components.canonical_name(name): f"{OPTIMIZER}state.{number}."
            for number, name, _ in optimizer_parameters(self._reader)
        }
        masters = {name: f"{start}{MASTER}" for name, start in self._states.items()}
        keys = self._stored.keys()
        self._masters = {name: key for name, key in masters.items() if {key, key + REMAINDER_SUFFIX} & keys}
        self.masters = self._masters.keys()
        self.averages = {name for name, start in self._states.items() if start + AVERAGE in self._stored}
        self._last: tuple[str, dict[str, Tensor]] | None = None

    def _weights(self) -> dict[str, ModelWeight]:
        weights = {}
        groups = {group.name: group for group in inspection.groups(self._reader)}
        for name, entry in self._entries.items():
            group = groups.get(self._prefix + name)
            if group is None or (not self._prefix and name.startswith(OPTIMIZER)):
                continue
            if group.wrong or name.endswith(FORMAT_SUFFIX):
                problem = group.wrong[0] if group.wrong else f"{name} is the format of a weight without codes"
                raise CheckpointError(f"{self.path} is damaged: {problem}")
            dtype = entry.properties.dtype
            if group.format is not None and group.shape is not None:
                assert group.tag is not None
                weights[name] = ModelWeight(name, group.shape, spec_of_tag(group.tag), dtype)
            elif not is_state(name, dtype):
                weights[name] = ModelWeight(name, tuple(entry.size), None, dtype)
        return weights

    def parts(self, weight: ModelWeight) -> Mapping[str, Tensor]:
        if self._last is None or self._last[0] != weight.name:
            # free the last weight before reading the next, so that only one is in memory
            self._last = None
            plain = {"": self._tensor(self._prefix + weight.name)} if weight.tag is None else {}
            self._last = weight.name, plain or self._read(weight, frozenset(Role))
        return self._last[1]

    def scales(self, weight: ModelWeight) -> Mapping[str, Tensor]:
        return self._read(weight, frozenset(Role) - {Role.CODES})

    def _read(self, weight: ModelWeight, roles: frozenset[Role]) -> dict[str, Tensor]:
        """Read components of a weight. Components of a stack of matrices are joined to one matrix along the rows."""
        keys = {c.name: self._prefix + weight.name + c.key_suffix for c in weight.format.components if c.role in roles}
        return {name: self._tensor(key).flatten(0, -2) for name, key in keys.items()}

    def master(self, weight: ModelWeight) -> Tensor:
        start = self._masters[weight.name]
        if start not in self._stored and weight.tag is not None:
            # the weight's codes are the high bytes
            low = self._expected(start + REMAINDER_SUFFIX, weight.shape, torch.uint8).flatten(0, -2)
            return split_codes.dequantize(weight.format.copies[Orientation.ROWWISE], self.parts(weight), low)
        if start not in self._stored:
            # the weight itself is the upper half
            low = self._expected(start + REMAINDER_SUFFIX, (*weight.shape, 2), torch.uint8)
            high = self._expected(self._prefix + weight.name, weight.shape, torch.bfloat16)
            return join_bfloat16(high, low.contiguous().view(torch.int16).reshape(weight.shape))
        entry = self._stored[start]
        if not isinstance(entry, TensorStorageMetadata) or entry.properties.dtype not in STATE_QUANT_SPECS:
            raise CheckpointError(f"{self.path} is damaged: {start} has no dtype of an optimizer state")
        # masters of stacks are stored as stacks, with the blocks of matrices
        is_quantized = weight.tag is not None
        empty = torch.empty(weight.matrix if is_quantized else weight.shape, dtype=torch.float32, device="cpu")
        state = make_state(empty, entry.properties.dtype)
        for key, tensor in state.tensors(start).items():
            shape = (*weight.shape[:-1], tensor.shape[-1]) if is_quantized else tuple(tensor.shape)
            tensor.copy_(self._expected(key, shape, tensor.dtype).reshape(tensor.shape))
        return state.read().float()

    def average(self, weight: ModelWeight) -> Tensor:
        return self._expected(self._states[weight.name] + AVERAGE, weight.shape).float()

    def input_amax(self, name: str) -> float | None:
        key = input_history(name)
        if key not in self._entries:
            return None
        history = self._tensor(self._prefix + key)
        if not history.numel() or not history.is_floating_point():
            raise CheckpointError(f"{self.path} is damaged: {key} is {history.dtype} {list(history.shape)}")
        return float(history.max()) or None

    def _expected(self, key: str, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> Tensor:
        """Read a tensor and check its shape and dtype (None: any floating-point dtype)."""
        tensor = self._tensor(key)
        fits = tensor.is_floating_point() if dtype is None else tensor.dtype == dtype
        if tuple(tensor.shape) != tuple(shape) or not fits:
            raise CheckpointError(f"{self.path} is damaged: {key} is {tensor.dtype} {list(tensor.shape)}")
        return tensor

    def _tensor(self, key: str) -> Tensor:
        if not isinstance(self._stored.get(key), TensorStorageMetadata):
            raise CheckpointError(f"{self.path} is damaged: it has no tensor {key}")
        return self._reader.value(key)


def is_state(name: str, dtype: torch.dtype) -> bool:
    """Return whether a state dict entry is a random key, a draw count or an amax history, and no weight."""
    return name.endswith(_STATES) and (dtype == torch.int64 or name.endswith(AMAX_HISTORY))


def input_history(weight: str) -> str:
    """Return the state dict key of the amax history of the input of a weight's layer, under delayed scaling."""
    module, _, name = weight.rpartition(".")
    layer = name.split("_")[0] + "_" if name.startswith("fc") else ""
    return f"{module}.{layer}{_INPUT_HISTORY}" if module else f"{layer}{_INPUT_HISTORY}"


def optimizer_parameters(reader: SafeReader) -> list[tuple[int | str, str, str]]:
    """Return the optimizer's parameters that were recorded by name: number, name, and key of the parameter group."""
    parameters: list[tuple[int | str, str, str]] = []
    for key in reader.entries:
        group = key.removesuffix(".param_names")
        if group == key or not key.startswith(f"{OPTIMIZER}param_groups."):
            continue
        names: Any = reader.value(key)
        numbers: Any = reader.value(f"{group}.params") if f"{group}.params" in reader.entries else None
        are_lists = isinstance(names, list) and isinstance(numbers, list) and len(names) == len(numbers)
        if not are_lists or {type(name) for name in names} - {str} or {type(n) for n in numbers} - {int, str}:
            raise CheckpointError(f"{reader.path} is damaged: {key} does not name the parameters of its group")
        parameters += [(number, name, group) for number, name in zip(numbers, names, strict=True)]
    return parameters
