"""The checkpoints that a conversion reads: TransformerEngine's, and a template. No code in them is run."""

from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, TensorStorageMetadata

from quantshard.checkpoints import inspection
from quantshard.checkpoints.disk.store import Path_
from quantshard.checkpoints.inspection import TensorGroup
from quantshard.checkpoints.safe_read import SafeReader
from quantshard.errors import CheckpointError
from quantshard.interop.layouts.source import optimizer_parameters
from quantshard.interop.transformer_engine.pieces import (
    PlainPiece,
    RecordedCall,
    WeightPiece,
    piece_of,
    recorded_calls,
    rows_of,
    values_of,
)
from quantshard.numerics.adam import EXP_AVG, EXP_AVG_SQ
from quantshard.numerics.states import MASTER

STATE_ROLES = (EXP_AVG, EXP_AVG_SQ, MASTER)
SETTINGS = ("lr", "betas", "eps", "weight_decay", "bias_correction", "step")

EXTRA_STATE = "_extra_state"

NAMED = "save the optimizer with torch.distributed.checkpoint.state_dict.get_optimizer_state_dict"
"""Advice for errors about optimizer states that cannot be matched to parameters."""


class TransformerEngineCheckpoint:
    """A TransformerEngine checkpoint: the trees under two prefixes ("": the root), and other entries."""

    def __init__(self, path: Path_, model: str, optimizer: str) -> None:
        self.path, self.model, self.optimizer = path, f"{model}." if model else "", f"{optimizer}."
        self.reader = SafeReader(path, packed=True)
        self.entries = self.reader.entries
        # planner_data has the order of the state dict, regardless of which rank wrote an entry
        order = self.reader.metadata.planner_data or self.entries
        self.names = [
            key.removeprefix(self.model)
            for key in order
            if key.startswith(self.model) and not key.startswith(self.optimizer) and key in self.entries
        ]
        self.stored_names = self.names
        self._halves: dict[str, tuple[str, int]] = {}
        if not self.names:
            tops = sorted({key.partition(".")[0] for key in self.entries})
            raise CheckpointError(f"{path} has no {model}.*, but {', '.join(tops)}; pass model= (--model)")

    def split_gates(self, own: Iterable[str]) -> None:
        """Present gated `fc1_weight` and `fc1_bias` (gate rows before up rows) as the two tensors named in `own`."""
        source_names = {name: name.replace("fc1_gate_", "fc1_").replace("fc1_up_", "fc1_") for name in own}
        halves: dict[str, list[str]] = {}
        for name, theirs in source_names.items():
            if name not in self.names and theirs in self.names and not self.size(self.model + theirs)[0] % 2:
                halves.setdefault(theirs, []).append(name)
                self._halves[self.model + name] = (self.model + theirs, int("fc1_up_" in name))
        self.names = [part for name in self.names for part in halves.get(name, [name])]

    def _stored_name(self, name: str) -> str:
        return self._halves.get(self.model + name, (self.model + name, 0))[0].removeprefix(self.model)

    def pieces(self, key: str) -> list[WeightPiece | PlainPiece]:
        """Return the shards that contain a tensor: quantized pieces, or (origin, values)."""
        if key in self._halves:
            source_key, half_index = self._halves[key]
            rows = self.size(key)[0]
            return rows_of(self.pieces(source_key), half_index * rows, (half_index + 1) * rows)
        pieces: list[WeightPiece | PlainPiece] = []
        try:
            with recorded_calls():
                for chunk, value in self.reader.chunks(key):
                    origin = tuple(chunk.offsets)
                    if isinstance(value, RecordedCall) and chunk.sizes.numel():
                        pieces.append(piece_of(value, origin, tuple(chunk.sizes)))
                    elif chunk.sizes.numel():
                        pieces.append((origin, self.reader.checked(key, chunk, value)))
        except CheckpointError as error:
            old = "getattr" in str(error)
            hint = "; written before TransformerEngine 2.17: save it again with 2.17" if old else ""
            reason = str(error).removeprefix(f"{key} cannot be read: ")
            raise CheckpointError(f"{self.path}: {key}: {reason}{hint}") from error
        return pieces

    def size(self, key: str) -> torch.Size:
        if key in self._halves:
            rows, *dims = self.size(self._halves[key][0])
            return torch.Size((rows // 2, *dims))
        entry = self.entries[key]
        if not isinstance(entry, TensorStorageMetadata):
            raise CheckpointError(f"{self.path}: {key} is not a tensor")
        return entry.size

    def value(self, key: str) -> Any:
        if isinstance(self.entries.get(key), BytesStorageMetadata):
            return self.reader.value(key)
        return values_of(self.pieces(key), self.size(key))

    @cached_property
    def has_optimizer(self) -> bool:
        return any(key.startswith(f"{self.optimizer}state.") for key in self.entries)

    def states(self, own: list[str]) -> dict[str, dict[str, str]]:
        """Return the keys of the optimizer's states by parameter name and role. `own`: names of all parameters."""
        start, numbered = f"{self.optimizer}state.", self.numbered(own)
        source_names = {self._stored_name(name) for name in own}
        keys: dict[str, dict[str, str]] = {}
        for key in self.entries:
            if not key.startswith(start):
                continue
            parameter, _, role = key.removeprefix(start).rpartition(".")
            name = numbered.get(parameter, parameter)
            if name not in source_names or role not in STATE_ROLES:
                raise CheckpointError(f"{self.path}: {key} is not a FusedAdam state of a parameter of this model")
            keys.setdefault(name, {})[role] = key
        for name in own:
            half = self._halves.get(self.model + name)
            if half is not None:
                states = keys.get(self._stored_name(name), {})
                keys[name] = {role: f"{start}{name}.{role}" for role in states}
                self._halves.update({keys[name][role]: (key, half[1]) for role, key in states.items()})
        return keys

    def settings(self, own: list[str]) -> dict[str, dict[str, Any]]:
        numbered, fields_by_name = self.numbered(own), {}
        for group in self._groups:
            fields = {field: self.value(key) for field, key in self._groups[group].items() if field in SETTINGS}
            members = self._list(self._groups[group].get("params"))
            for member in [group] if members is None else members:
                fields_by_name[numbered.get(str(member), str(member))] = fields
        source_names = {name: self._stored_name(name) for name in own}
        return {name: fields_by_name[theirs] for name, theirs in source_names.items() if theirs in fields_by_name}

    @cached_property
    def _groups(self) -> dict[str, dict[str, str]]:
        """Entries of each group, by its number or, in a flattened state dict, by a parameter's name."""
        start, groups = f"{self.optimizer}param_groups.", dict[str, dict[str, str]]()
        for key in self.entries:
            if key.startswith(start):
                group, _, field = key.removeprefix(start).rpartition(".")
                groups.setdefault(group, {})[field] = key
        return groups

    def _list(self, key: str | None) -> list[Any] | None:
        if key is None:
            return None
        members = self.value(key)
        if not isinstance(members, list | tuple) or not all(type(member) in (int, str) for member in members):
            raise CheckpointError(f"{self.path}: {key} is not a list of numbers or names")
        return list(members)

    def numbered(self, own: list[str]) -> dict[str, str]:
        """Map state numbers to names, by the groups' names or the model's order. Empty: not numbered."""
        fields = self._groups.values()
        groups = [(self._list(group.get("params")), self._list(group.get("param_names"))) for group in fields]
        numbers = [str(member) for members, _ in groups for member in members or ()]
        if not numbers or not all(number.isdigit() for number in numbers):
            return {}
        if all(names is not None for _, names in groups):
            names = [str(name) for _, group_names in groups for name in group_names or ()]
        else:
            source_names = {self._stored_name(name) for name in own}
            names = [name for name in self.stored_names if name in source_names]
            if len(groups) > 1:
                raise CheckpointError(f"{self.path}: its optimizer has {len(groups)} groups without names; {NAMED}")
        if len(names) != len(numbers):
            raise CheckpointError(f"{self.path}: {len(numbers)} parameters in its optimizer, not {len(names)}; {NAMED}")
        return dict(zip(numbers, names, strict=True))


class TargetCheckpoint:
    """A checkpoint of the model to train: defines the entries and formats of the converted checkpoint."""

    def __init__(self, path: Path_) -> None:
        self.path, self.reader = path, SafeReader(path)
        self.entries = self.reader.entries
        self.groups: Mapping[str, TensorGroup] = {group.name: group for group in inspection.groups(self.reader)}
        problems = [line for group in self.groups.values() for line in group.wrong]
        self.paths: Mapping[str, tuple[str | int, ...]] = self.reader.metadata.planner_data or {}
        if not problems and not all(".".join(map(str, self.paths.get(key, ()))) == key for key in self.entries):
            problems = ["its metadata has no paths of entries"]
        if problems:
            raise CheckpointError(f"{path} cannot serve as --like: {problems[0]}")

    @cached_property
    def parameters(self) -> list[tuple[int | str, str, str]]:
        """The optimizer's parameters: number, name, and key of the parameter group."""
        parameters = optimizer_parameters(self.reader)
        groups = {key.removesuffix(".params") for key in self.entries if key.startswith("optimizer.param_groups.")
                  and key.endswith(".params")}  # fmt: skip
        if any(f"{group}.param_names" not in self.entries for group in groups):
            raise CheckpointError(f"{self.path}: its optimizer has no parameter names; pass model.named_parameters()")
        if unknown := [name for _, name, _ in parameters if f"model.{name}" not in self.groups]:
            raise CheckpointError(f"{self.path}: its model lacks {unknown[0]}, a parameter of its optimizer")
        return parameters
