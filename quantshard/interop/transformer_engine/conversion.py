"""Converts TransformerEngine checkpoints: weights, masters, moments and step counts, with a list of inexact entries.

A new checkpoint of the quantshard model serves as a template. Each of its entries gets its value from
TransformerEngine's checkpoint or is listed in the report. Codes and scales are copied; a weight is requantized, with a
reason in the report, only if its format here cannot hold the stored values.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, TensorStorageMetadata

from quantshard import numerics, recipe
from quantshard.checkpoints import saving
from quantshard.checkpoints.disk import commit, manifest
from quantshard.checkpoints.disk.commit import CommitWriter
from quantshard.checkpoints.disk.store import Path_
from quantshard.checkpoints.inspection import TensorGroup
from quantshard.checkpoints.saving import EXTRA
from quantshard.errors import CheckpointError
from quantshard.formats import Format, Scaling
from quantshard.interop.layouts.conversion import InexactConversionError
from quantshard.interop.transformer_engine import stored
from quantshard.interop.transformer_engine.pieces import WeightPiece, components_of, values_of
from quantshard.numerics.states import MASTER, REMAINDER_SUFFIX
from quantshard.tensor.parameter_state import AMAX_HISTORY, RNG_DRAWS, RNG_KEY

_MODEL, _STATE = "model.", "optimizer.state."

_FAR = 0.5
"""Largest plausible distance of a weight from its master, in norms of it: four bits give 0.1, another weight 1.4."""


@dataclass
class Conversion:
    """The result of `convert`.

    `exact`: names of tensors converted bit for bit. `inexact`: name of each other tensor -> reason. `own`: entries
    taken from the new model -> reason. `left`: entries not converted -> reason.
    """

    source: str
    out: str
    exact: list[str] = field(default_factory=list)
    inexact: dict[str, str] = field(default_factory=dict)
    own: dict[str, str] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)

    def lines(self) -> list[str]:
        """Format the report, with a line for every tensor that is not exact."""
        return [
            f"{len(self.exact)} tensors bit for bit, {len(self.inexact)} not exactly",
            *(f"  not exact: {name}: {why}" for name, why in sorted(self.inexact.items())),
            *(f"  new: {name}: {why}" for name, why in sorted(self.own.items())),
            *(f"  not converted: {name}: {why}" for name, why in sorted(self.left.items())),
        ]


def convert(
    source: Path_, like: Path_, out: Path_, *, model: str = "model", optimizer: str = "optimizer", lossy: bool = False
) -> Conversion:
    """Convert a TransformerEngine DCP checkpoint to quantshard's format. Needs one process and no process group or GPU.

    TransformerEngine need not be installed, and no code from the files is run. The whole checkpoint is held in memory.
    Optimizer states are written in float32, which `checkpoints.load(requantize=True)` converts to other storages.

    Args:
        source: a `torch.distributed.checkpoint` directory, written with TransformerEngine 2.17 or later on any number
            of ranks.
        like: a checkpoint of the same model built from quantshard modules, written by `checkpoints.save`. It determines
            names and formats. Its optimizer must be `FusedAdam(model.named_parameters(), ...)`.
        out: a directory that does not exist yet.
        model: prefix of the model's state dict in `source` ("": the root).
        optimizer: prefix of the state dict of TransformerEngine's FusedAdam in `source`, if it has one.
        lossy: whether to write the result even if some tensors are not exact.
    """
    if Path(out).exists():
        raise CheckpointError(f"{out} exists and is not overwritten; convert to another directory")
    job = _CheckpointConverter(
        stored.TransformerEngineCheckpoint(source, model, optimizer),
        stored.TargetCheckpoint(like),
        Conversion(str(source), str(out)),
    )
    state = job.run()
    inexact = job.report.inexact
    if inexact and not lossy:
        name, why = next(iter(sorted(inexact.items())))
        raise CheckpointError(f"{source}: {len(inexact)} inexact tensors ({name}: {why}); pass lossy=True (--lossy)")
    saving.write_checkpoint(state, CommitWriter(commit.prepare_target(out), job.facts()))
    return job.report


class _CheckpointConverter:
    def __init__(
        self, source: stored.TransformerEngineCheckpoint, like: stored.TargetCheckpoint, report: Conversion
    ) -> None:
        self.source, self.like, self.report = source, like, report
        source.split_gates(name.removeprefix(_MODEL) for name in like.groups if name.startswith(_MODEL))
        self.has_optimizer = source.has_optimizer and any(key.startswith(_STATE) for key in like.entries)
        self.own_names = [name for _, name, _ in like.parameters] if self.has_optimizer else []
        self.states = source.states(self.own_names) if self.has_optimizer else {}
        # numbered states are matched by the model's order, which `_check_master` verifies
        self.is_numbered = self.has_optimizer and bool(source.numbered(self.own_names))
        self.made: dict[str, Any] = {}
        self.state_paths: dict[str, tuple[str | int, ...]] = {}

    def run(self) -> dict[str, Any]:
        self._check_same_model()
        for name, group in self.like.groups.items():
            if name.startswith(_MODEL):
                self.made.update(self._parameter(group))
        if self.has_optimizer:
            for number, name, _ in self.like.parameters:
                for role in stored.STATE_ROLES:
                    self.made.update(self._state(number, name, role))
            self.made.update(self._settings())
        self._copy_own()
        self._report_omitted()
        paths = {**self.like.paths, **self.state_paths}
        return _nested({paths[key]: value for key, value in self.made.items()})

    def facts(self) -> dict[str, Any]:
        groups = {group for _, _, group in self.like.parameters} if self.has_optimizer else set()
        steps = {self.made[f"{group}.step"] for group in groups}
        like = manifest.read_manifest(self.like.path)
        facts = {} if like is None else {"recipe": like.recipe, "zero_centered": like.zero_centered}
        return {"step": steps.pop() if len(steps) == 1 else None, **facts}

    def _check_same_model(self) -> None:
        like, source = self.like, self.source
        names = {name.removeprefix(_MODEL) for name in like.groups if name.startswith(_MODEL)}
        missing = sorted(name for name in names - set(source.names) if not self._is_own(name))
        # TransformerEngine's modules save an `_extra_state`, empty or a pickle, which `_report_omitted` reports
        unknown = sorted(name for name in set(source.names) - names if not name.endswith(stored.EXTRA_STATE))
        if missing or unknown:
            counts = f"{len(missing)} tensors are missing in the first ({missing[:1]}), {len(unknown)} in the second"
            raise CheckpointError(f"{source.path} and {like.path} are different models: {counts} ({unknown[:1]})")
        for name in sorted(names & set(source.names)):
            actual, expected = source.size(source.model + name), like.groups[_MODEL + name].shape
            if tuple(actual) != expected:
                raise CheckpointError(f"{source.path}: {name} has shape {list(actual)}, not {list(expected or ())}")

    def _is_own(self, name: str) -> bool:
        """Return whether a tensor is specific to quantshard: random keys, draw counts and amax histories."""
        weight = name.removesuffix(f"_{RNG_KEY}").removesuffix(f"_{RNG_DRAWS}")
        return name.endswith(AMAX_HISTORY) or (weight != name and _MODEL + weight in self.like.groups)

    def _parameter(self, group: TensorGroup) -> dict[str, Any]:
        name, shape = group.name.removeprefix(_MODEL), group.shape
        if self._is_own(name) and name not in self.source.names:
            return {}
        assert shape is not None
        pieces = self.source.pieces(self.source.model + name)
        self._check_master(name, pieces, shape)
        if group.format is None:
            return {group.name: self._plain(name, pieces, shape, getattr(torch, group.tag))}
        parts = self._components(name, pieces, group.format, (shape[0], shape[1]))
        return {group.parts[part]: value for part, value in parts.items()}

    def _check_master(self, name: str, pieces: list[Any], shape: tuple[int, ...]) -> None:
        """Check a numbered state's match with its parameter: a master must be close to its weight."""
        master = self._master(name) if self.is_numbered else None
        if master is None:
            return
        distance, norm = (values_of(pieces, shape).float() - master).norm(), master.norm()
        if distance > _FAR * norm:
            problem = f"the numbered master of {name} is far from its weight"
            raise CheckpointError(f"{self.source.path}: {problem}; {stored.NAMED}")

    def _components(self, name: str, pieces: list[Any], fmt: Format, shape: tuple[int, int]) -> dict[str, Tensor]:
        # TransformerEngine dequantizes shards it cannot quantize (MXFP8: rows not divisible by 32)
        quantized = [piece for piece in pieces if isinstance(piece, WeightPiece)]
        try:
            if len(quantized) < len(pieces):
                count = f"{len(pieces) - len(quantized)} of its {len(pieces)} shards"
                raise InexactConversionError(f"{count} are not quantized, or mix gate and up")
            parts, omitted = components_of(quantized, fmt, shape)
        except InexactConversionError as error:
            master = self._master(name)
            values = values_of(pieces, shape).float() if master is None else master
            value_source = "its codes" if master is None else "its master"
            self.report.inexact[name] = f"{error}; requantized to {fmt.name}, from {value_source}"
            return numerics.quantize(values, fmt, _scaling_of(fmt))
        notes = sorted({note for piece in quantized for note in piece.notes})
        self.report.left.update({name: "; ".join(omitted)} if omitted else {})
        self._note(name, "; ".join(notes))
        return parts

    def _plain(self, name: str, pieces: list[Any], shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        values = values_of(pieces, shape)
        result = values.to(dtype)
        kinds = {piece.kind for piece in pieces if isinstance(piece, WeightPiece)}
        origin = ", ".join(kinds) or str(values.dtype)
        self._note(name, "" if torch.equal(result.to(values.dtype), values) else f"{origin}, rounded to {dtype}")
        return result

    def _note(self, name: str, why: str) -> None:
        if why:
            self.report.inexact[name] = why
        else:
            self.report.exact.append(name)

    def _stored_state(self, name: str, role: str) -> Tensor | None:
        """Read a state as stored. FusedAdam's `state_dict` converts all states to float32 except master remainders."""
        key, source = self.states.get(name, {}).get(role), self.source
        if key is None:
            return None
        # a wrong match by number usually shows as a wrong shape
        sizes = source.size(key), source.size(source.model + name)
        if sizes[0] != sizes[1]:
            problem = f"{key} has shape {list(sizes[0])}, not {list(sizes[1])}"
            raise CheckpointError(f"{source.path}: {problem}; {stored.NAMED}")
        return source.value(key)

    def _master(self, name: str) -> Tensor | None:
        """The float32 master of a parameter, or None. An int16 state is the low half, the parameter the high."""
        state = self._stored_state(name, MASTER)
        if state is None or state.dtype != torch.int16:
            return None if state is None else state.float()
        high = self.source.value(self.source.model + name)
        if high.dtype != torch.bfloat16:
            raise CheckpointError(f"{self.source.path}: {name} is {high.dtype}, but its master is a remainder")
        return numerics.join_bfloat16(high, state)

    def _state(self, number: int | str, name: str, role: str) -> dict[str, Any]:
        """Return one state of one parameter, in float32. `checkpoints.load(requantize=True)` converts it further."""
        key, label = f"{_STATE}{number}.{role}", f"{name} {role}"
        values = self._master(name) if role == MASTER else self._stored_state(name, role)
        entry = self.like.entries.get(key)
        if entry is None and key + REMAINDER_SUFFIX not in self.like.entries:
            # nothing is lost if the weight has the values of its master
            if values is not None and not (role == MASTER and torch.equal(self._values_here(name), values)):
                self.report.inexact[label] = "not converted: the optimizer of --like has none for this parameter"
            return {}
        if not isinstance(entry, TensorStorageMetadata) or entry.properties.dtype != torch.float32:
            self.report.own["optimizer states"] = "float32, also where --like has others; load with requantize=True"
        if values is None:
            values = self._values_here(name)
            values = values if role == MASTER else torch.zeros_like(values)
            self.report.own[label] = "seeded from the weight" if role == MASTER else "zero"
        else:
            self.report.exact.append(label)
        self.state_paths[key] = ("optimizer", "state", number, role)
        return {key: values.float()}

    def _values_here(self, name: str) -> Tensor:
        group = self.like.groups[_MODEL + name]
        if group.format is None:
            return self.made[group.name].float()
        parts = {part: self.made[key] for part, key in group.parts.items()}
        copy = next(iter(group.format.copies.values()))
        assert group.shape is not None
        return numerics.dequantize(copy, parts, (group.shape[0], group.shape[1]))

    def _settings(self) -> dict[str, Any]:
        """Convert TransformerEngine's settings to those of our groups; raise if parameters of one group differ."""
        source_settings, entries = self.source.settings(self.own_names), dict[str, Any]()
        for _, name, group in self.like.parameters:
            for setting in stored.SETTINGS:
                key = f"{group}.{setting}"
                if setting not in source_settings.get(name, {}) or key not in self.like.entries:
                    continue
                value = _plain_setting(source_settings[name][setting])
                if not _is_setting(setting, value):
                    raise CheckpointError(f"{self.source.path}: {name}: invalid {setting} {value!r:.60}")
                if entries.setdefault(key, value) != value:
                    problem = f"{name} has {setting} {value!r}, others of {group} have {entries[key]!r}"
                    raise CheckpointError(f"{self.source.path}: {problem}")
        for group in dict.fromkeys(group for _, _, group in self.like.parameters):
            if f"{group}.step" not in entries:
                raise CheckpointError(f"{self.source.path}: its optimizer has no step; it was saved before the first")
        return entries

    def _copy_own(self) -> None:
        """Take the remaining entries from --like, because TransformerEngine does not save them."""
        for key, entry in self.like.entries.items():
            is_state = key.startswith(_STATE) and not isinstance(entry, BytesStorageMetadata)
            if key in self.made or is_state or (key.startswith("optimizer.") and not self.has_optimizer):
                continue
            value = self.like.reader.value(key)
            if key.endswith(AMAX_HISTORY) and isinstance(value, Tensor):
                # the template's history has the amaxes of its initial weights
                value = torch.zeros_like(value)
                self.report.own["amax histories"] = "empty, so the first steps use other scales"
            elif key.endswith((f"_{RNG_KEY}", f"_{RNG_DRAWS}")):
                self.report.own["random keys and draw counts"] = "from --like"
            elif key.startswith(f"{EXTRA}."):
                self.report.own[key] = "from --like"
            elif key.startswith("optimizer.param_groups.") and not key.endswith((".params", ".param_names")):
                self.report.own[f"optimizer setting {key.rpartition('.')[2]}"] = "from --like"
            self.made[key] = value

    def _report_omitted(self) -> None:
        source, omitted = self.source, self.report.left
        for name in source.names:
            entry = source.entries.get(source.model + name)
            is_empty = isinstance(entry, TensorStorageMetadata) and not entry.size.numel()
            if name.endswith(stored.EXTRA_STATE) and not is_empty:
                omitted[name] = "a pickle of amax histories and scales, which is not read"
        if not self.has_optimizer:
            omitted["optimizer"] = "one of the checkpoints has no optimizer states"
        for key in source.entries:
            if not key.startswith((source.model, source.optimizer)):
                omitted[key] = "not part of the model or the optimizer"


def _nested(made: Mapping[tuple[str | int, ...], Any]) -> dict[str, Any]:
    """Build a state dict from entries by path. Numbers are dict keys, except that the optimizer's groups are a list."""
    root: dict[Any, Any] = {"model": {}, EXTRA: {}}
    for path, value in made.items():
        node = root
        # an entry of `extra` is one object, even if its key contains dots (docs/format.md)
        if path[0] == EXTRA:
            path = (EXTRA, ".".join(map(str, path[1:])))
        for part in path[:-1]:
            node = node.setdefault(part, {})
            if not isinstance(node, dict):
                raise CheckpointError(f"the checkpoint of --like is damaged: {part} is both an entry and a dict")
        node[path[-1]] = value
    optimizer = root.get("optimizer")
    groups = optimizer.get("param_groups") if isinstance(optimizer, dict) else None
    if isinstance(optimizer, dict) and isinstance(groups, dict) and all(type(number) is int for number in groups):
        optimizer["param_groups"] = [groups[number] for number in sorted(groups)]
    return root


def _plain_setting(value: Any) -> Any:
    """Convert a setting to our groups' type. With `capturable`, TransformerEngine stores tensors."""
    plain = value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
    return tuple(plain) if isinstance(plain, list) else plain


def _is_setting(name: str, value: Any) -> bool:
    if name == "betas":
        return isinstance(value, tuple) and len(value) == 2 and all(isinstance(beta, float) for beta in value)
    if name == "step":  # not isinstance: a bool is an int
        return type(value) is int and 0 <= value < 1 << 62
    return isinstance(value, bool | int | float)


def _scaling_of(fmt: Format) -> Scaling:
    """Return the scaling of the first named recipe with this weight format; without powers of two if there is none."""
    specs = (kind().weight for kind in dict.fromkeys(recipe.NAMES.values()))
    match = next((spec for spec in specs if spec is not None and spec.format == fmt), None)
    return Scaling(power_of_two=False) if match is None else Scaling(power_of_two=match.scaling.power_of_two)
