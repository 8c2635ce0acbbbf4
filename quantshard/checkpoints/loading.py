"""Loads a model and its optimizer: read what planning needs, plan, agree on all ranks, then apply the plan.

A checkpoint that is damaged, or of another model or recipe, raises one error on every rank before anything is written.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import BytesStorageMetadata
from torch.distributed.checkpoint.stateful import Stateful

from quantshard import private_torch
from quantshard.checkpoints import conversions, fit, optimizer_states, rank_states
from quantshard.checkpoints.conversions import ParameterConversion, RequantizedWarning, StateConversion
from quantshard.checkpoints.disk import agreement
from quantshard.checkpoints.disk.manifest import MANIFEST
from quantshard.checkpoints.disk.store import Path_, why
from quantshard.checkpoints.optimizer_states import ParameterNumbers
from quantshard.checkpoints.safe_read import NoManifestWarning, SafeReader, empty
from quantshard.checkpoints.saving import EXTRA
from quantshard.errors import CheckpointError, warn_user
from quantshard.optimizers.loading import PARAMETER_ENTRIES, as_setting
from quantshard.tensor import components

_TAG_SIZE = torch.Size([components.FORMAT_TAG_BYTES])


def load(
    path: Path_,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    requantize: bool = False,
    lossy: bool = False,
    verify: bool = True,
) -> dict[str, Any]:
    """Load a checkpoint written on any number of ranks into a model and its optimizer. A collective call.

    Args:
        path: the directory. It can be untrusted: no code in it is executed (docs/security.md).
        requantize: quantize weights of another recipe again, rounding the checkpoint's masters to nearest, and round
            masters and moments to the dtypes of this optimizer, with a warning. Not supported for states of
            `MasterWeights` and of PyTorch's optimizers.
        lossy: with `requantize`, also quantize weights without masters, from their dequantized codes, and cast plain
            tensors of another dtype.
        verify: first compare the files with the manifest's checksums, which reads the files twice. A checkpoint without
            a manifest is loaded with a NoManifestWarning.

    Returns:
        The saved `extra` entries.

    Raises:
        CheckpointError: the checkpoint is incomplete, damaged, or of another model, recipe or optimizer. Nothing has
            changed, unless the message says that the model is partly loaded (no manifest, a failing disk).
    """
    extra, _, _ = load_checkpoint(LoadRequest(path, model, optimizer, requantize, lossy, verify))
    return extra


@dataclass(frozen=True)
class LoadRequest:
    """The arguments of `checkpoints.load`. `objects`: the objects of `Manager(state=)`, by name."""

    path: Path_
    model: nn.Module
    optimizer: torch.optim.Optimizer | None = None
    requantize: bool = False
    lossy: bool = False
    verify: bool = True
    objects: Mapping[str, Stateful] = field(default_factory=dict)

    @cached_property
    def numbers(self) -> ParameterNumbers | None:
        """The checkpoint's numbers for the optimizer's parameters; None if they are the optimizer's own."""
        return None if self.optimizer is None else ParameterNumbers.of(self.model, self.optimizer)


@dataclass(frozen=True)
class LoadPlan:
    """The action of a load for each entry, by the checkpoint's keys.

    `state_dicts`: of the model and the optimizer, with `paths` of the entries in them. `targets`: entries to read as
    they are stored: tensors in place, with a cast if the dtype differs. `settings`: new values of the optimizer's
    entries that are not tensors. `ignored_keys`: keys of either side that are converted, or keep their live value.
    `rank_states`: see `states_to_load`.
    """

    request: LoadRequest
    reader: SafeReader
    state_dicts: dict[str, Any]
    paths: Mapping[str, Sequence[str | int]]
    targets: Mapping[str, Any]
    settings: Mapping[str, Any]
    weight_conversions: list[ParameterConversion]
    state_conversions: list[StateConversion]
    ignored_keys: Collection[str]
    rank_states: Mapping[str, tuple[str, Any]]


def load_checkpoint(request: LoadRequest) -> tuple[dict[str, Any], tuple[str, ...], str]:
    """Read, plan, agree and apply: the implementation of `load` and `Manager.restore`. A collective call.

    Returns the caller's entries, the names of the objects that kept their state, and what was converted, in words.
    """
    components.check_offsets(request.model.named_parameters())
    # All ranks read before one of them plans: making the states of a stock optimizer can be a collective call.
    (reader, format_tags), have_manifest = agreement.exchange_results(
        lambda: read_contents(request), lambda contents: contents[0].manifest is not None
    )
    if request.verify and not all(have_manifest) and any(have_manifest):
        raise CheckpointError(f"{request.path}: rank {have_manifest.index(False)} sees no {MANIFEST}; share the files")
    # Once every rank has a plan, a load fails only while it writes.
    plan, digests = agreement.exchange_results(
        lambda: plan_load(request, reader, format_tags),
        lambda _: None if request.numbers is None else request.numbers.digest,
    )
    optimizer_states.check_alike(digests, request.optimizer)
    if plan.reader.manifest is None and agreement.rank() == 0:
        warn_user(
            f"{request.path} has no {MANIFEST}: its files may be damaged or from several saves; `quantshard verify "
            f"{request.path}` checks what it can, and checkpoints.save writes a manifest",
            NoManifestWarning,
        )
    with agreement.writing_into("the model"):
        extra = _apply(plan)
    converted = ""
    if request.requantize and (description := conversions.description(plan.weight_conversions, plan.state_conversions)):
        converted = f"{request.path}: {description}"
        warn_user(converted, RequantizedWarning)
    return extra, tuple(name for name in request.objects if name not in plan.rank_states), converted


def read_contents(request: LoadRequest) -> tuple[SafeReader, dict[str, str]]:
    """Verify this rank's share of a checkpoint's files, and read the formats of its quantized weights."""
    reader = SafeReader(request.path)
    if request.verify:
        reader.check_files()
    entries, params = reader.entries, components.named_parameters(request.model)
    names = {f"model.{name}{components.FORMAT_SUFFIX}": name for name in params if f"model.{name}" in entries}
    tag_keys = [key for key in names if getattr(entries.get(key), "size", None) == _TAG_SIZE]
    return reader, {names[key]: components.read_format_tag(tag) for key, tag in reader.read(tag_keys).items()}


def plan_load(request: LoadRequest, reader: SafeReader, format_tags: Mapping[str, str]) -> LoadPlan:
    """Plan this rank's part of a load, and check that the checkpoint fits. Communicates with no other rank."""
    optimizer = request.optimizer
    state_dicts: dict[str, Any] = {"model": request.model.state_dict()}
    if optimizer is not None:
        optimizer_states.check_members("load", request.model, optimizer)
        state_dicts["optimizer"] = optimizer_states.to_load(optimizer, reader.entries, request.numbers)
    formats = fit.weight_formats(request.model, reader.entries, format_tags)
    weight_conversions, state_conversions = [], []
    if request.requantize:
        weight_conversions = conversions.parameter_conversions(
            reader, request.model, optimizer, request.numbers, formats, request.lossy
        )
        state_conversions = conversions.state_conversions(reader, optimizer, request.numbers)
    elif different := next((entry for entry in formats.items() if entry[1][0] != entry[1][1]), None):
        weight, (old, new) = different
        problem = f"{request.path} is of another recipe: {weight} is stored as {old} there and as {new} in this model"
        raise CheckpointError(f"{problem}; build it with the checkpoint's recipe, or load with requantize=True")
    live, paths = private_torch.flatten_state_dict(state_dicts)
    other_ranks_keys = fit.keys_of_other_ranks(reader.entries, request.model, request.numbers)
    own_entries = {key: reader.entries[key] for key in reader.entries if key.startswith(("model.", "optimizer."))}
    stored = {key: entry for key, entry in own_entries.items() if key not in other_ranks_keys}
    ignored = fit.unsaved_settings(stored, live, optimizer, own_seed=request.requantize)
    ignored |= {key for conversion in state_conversions for key in conversion.keys}
    if request.requantize:
        ignored |= conversions.converted_keys(weight_conversions, stored, live)
    stored = {key: entry for key, entry in stored.items() if key not in ignored}
    live = {key: value for key, value in live.items() if key not in ignored}
    casts = {f"model.{conversion.name}" for conversion in weight_conversions if conversion.sets_master}
    fit.check_model(request.path, stored, live, None if request.requantize and request.lossy else casts)
    if optimizer is not None:
        fit.check_optimizer(request.path, stored, live, optimizer)
    fit.check_ties(reader, request.model, optimizer)
    object_keys, settings = _settings(request, reader, live)
    targets = {key: value for key, value in live.items() if key not in object_keys}
    ignored |= (stored.keys() - live.keys()) | (object_keys - settings.keys())
    states = rank_states.states_to_load(reader, request.objects) if request.objects else {}
    return LoadPlan(
        request, reader, state_dicts, paths, targets, settings, weight_conversions, state_conversions, ignored, states
    )


def _settings(request: LoadRequest, reader: SafeReader, live: Mapping[str, Any]) -> tuple[set[str], dict[str, Any]]:
    """The keys of the optimizer's entries that are not tensors, and the new values, except the groups' parameters."""
    if request.optimizer is None:
        return set(), {}
    entries = reader.entries
    keys = [key for key in live if key.startswith("optimizer.") and isinstance(entries[key], BytesStorageMetadata)]
    objects = reader.read(keys)
    fit.check_groups(request.path, objects, live, request.optimizer, request.numbers)
    settings = {
        key: as_setting(value, live[key])
        for key, value in objects.items()
        if not key.startswith(optimizer_states.GROUPS) or key.split(".", 3)[3] not in PARAMETER_ENTRIES
    }
    return {*objects}, settings


def _apply(plan: LoadPlan) -> dict[str, Any]:
    """Carry out a plan, and return the caller's entries. A collective call."""
    extra = {key: empty(entry) for key, entry in plan.reader.entries.items() if key.startswith(f"{EXTRA}.")}
    values = {**plan.targets, **extra}
    # DCP exchanges the ranks' read plans and their failures, so a disk error is raised on all ranks. Each batch of
    # requantized weights does the same, and checks its values on all ranks before it writes weights.
    plan.reader.read_into(values)
    objects = {key: values[key] for key, target in plan.targets.items() if values[key] is not target}
    for key, value in {**plan.settings, **objects}.items():
        _put(plan.state_dicts, plan.paths[key], value)
    masters: list[tuple[ParameterConversion, Tensor]] = []
    if plan.request.requantize:
        masters = list(conversions.write_weights(plan.reader, plan.weight_conversions))
        conversions.write_states(plan.reader, plan.state_conversions, plan.request.optimizer)
    # The caller's modules, optimizers and objects can fail on one rank only, and no plan can predict that.
    agreement.run_on_all_ranks(lambda: _load_states(plan, masters))
    return {key.removeprefix(f"{EXTRA}."): values[key] for key in extra}


def _put(root: Any, path: Sequence[str | int], value: Any) -> None:
    """Store a value at a path of a state dict. DCP's paths have strings for the integer keys of optimizer states."""
    for part in path:
        key = part if isinstance(root, list) or part in root else int(part)
        holder, root = root, root[key]
    holder[key] = value


def _load_states(plan: LoadPlan, masters: list[tuple[ParameterConversion, Tensor]]) -> None:
    request = plan.request
    try:
        request.model.load_state_dict(plan.state_dicts["model"])
    except RuntimeError as error:
        raise CheckpointError(f"{request.path}: {error}") from error
    if request.requantize:
        conversions.begin_histories(request.model, plan.ignored_keys)
    if request.optimizer is not None:
        optimizer_states.load_optimizer(request.optimizer, plan.state_dicts["optimizer"], request.numbers)
    seed_master: Any = getattr(request.optimizer, "seed_master", None)
    for conversion, master in masters:
        seed_master(conversion.param, master)
    for name, (key, state) in plan.rank_states.items():
        try:
            request.objects[name].load_state_dict(state)
        except Exception as error:  # user code can raise anything, and the other ranks wait
            raise CheckpointError(f"{key} cannot be loaded into {name!r}: {why(error)}") from error
