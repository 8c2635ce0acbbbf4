"""Loading a model and its optimizer: a checkpoint is read and planned, all ranks agree, then the plan is applied.

It does what the plain idiom does (state dicts, DCP's load, `load_state_dict`), and looks first, so that a checkpoint of
another model or recipe, or a damaged one, ends in one sentence on every rank before anything is written.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from quantshard.argument_kinds import MODULE, OPTIMIZER, check_kinds, suggests_names
from quantshard.checkpoints import fit, optimizer_states, rank_state, state_conversion
from quantshard.checkpoints import requantize as requantization
from quantshard.checkpoints.disk import agreement
from quantshard.checkpoints.disk.manifest import MANIFEST
from quantshard.checkpoints.disk.store import Path_
from quantshard.checkpoints.load_plan import CheckpointContents, LoadPlan, LoadRequest, plan_load, read_contents
from quantshard.checkpoints.parameter_numbers import check_alike
from quantshard.checkpoints.partial_load import loading
from quantshard.checkpoints.requantize import ParameterConversion, RequantizedWarning
from quantshard.checkpoints.untrusted import checksums
from quantshard.checkpoints.untrusted.extras import EXTRA
from quantshard.checkpoints.untrusted.reader import read_into
from quantshard.errors import CheckpointError, warn_user
from quantshard.tensor import components


@suggests_names
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
        path: the directory. It may come from anybody: nothing in it is run (docs/security.md).
        requantize: whether weights of another recipe are quantized anew, to the nearest, from the masters that the
            checkpoint has, and masters and moments that the optimizer keeps in another dtype rounded to it (those of
            `MasterWeights` and PyTorch's optimizers are not); warns of it.
        lossy: whether those without masters are quantized from what their codes stand for, and plain tensors of
            another dtype cast.
        verify: whether the files that ranks will read are compared with the checksums of the manifest first, which
            reads them once more. A checkpoint without a manifest is loaded with a NoManifestWarning.

    Returns:
        The `extra` entries that were saved. One that needs code to be read, which an earlier version or another library
        saved, is left out with a warning that names it.

    Raises:
        CheckpointError: it is incomplete, damaged, or of another model, recipe or optimizer; the same on every rank.
            Nothing was written, or, where it fails later (no manifest, a disk that fails), the model and the optimizer
            refuse to run, step and be saved until a load succeeds.
        ConfigurationError: the pieces of a parameter are not where PyTorch would load them to, or the optimizer is
            of other weights than the model's.
        UnsupportedOperationError: as of `save`.
    """
    check_kinds("load", model=(MODULE, model), optimizer=(OPTIMIZER.or_none, optimizer))
    return load_checkpoint(LoadRequest(path, model, optimizer, requantize, lossy, verify)).extra


@dataclass(frozen=True)
class LoadResult:
    """What a load gives: the caller's entries, the names of the objects that were left as they are, and which weights
    were quantized anew, in words."""

    extra: dict[str, Any]
    left: tuple[str, ...]
    requantized: str


def load_checkpoint(request: LoadRequest) -> LoadResult:
    """The one way in which `load` and `Manager.restore` load: read, plan, agree, apply. A collective call.

    Raises:
        CheckpointError, ConfigurationError, UnsupportedOperationError: as `load` does.
    """
    path = request.path
    with loading(f"the load of {path}", request.model, request.optimizer) as guard:
        fit.check_places(request.model)
        plan = _agreed_plan(request)
        if plan.manifest is None:
            checksums.warn_of_none(path, plan.metadata)
        guard.writes = True
        extra, left_out, rounded = _apply(plan)
    if left_out and agreement.rank() == 0:
        warn_user(f"{path} is loaded without entries of `extra`: {'; '.join(left_out.values())}")
    if rounded:
        warn_user(f"{path}: {state_conversion.told_of_earlier(rounded)}", RequantizedWarning)
    told = [*requantization.told(plan.conversions), *state_conversion.told(plan.states)]
    requantized = f"{path}: {'; '.join(told)}" if told else ""
    if requantized:
        warn_user(requantized, RequantizedWarning)
    return LoadResult(extra, plan.left, requantized)


def _agreed_plan(request: LoadRequest) -> LoadPlan:
    """This rank's plan, once every rank has one: nothing that can fail before the first byte is written is left.

    Raises:
        CheckpointError: what failed on the first rank where something did; the same on every rank.
    """
    contents = _shared_contents(request) if _plans_together(request) else None

    def own() -> tuple[LoadPlan, str | None]:
        numbers = request.numbers
        return plan_load(request, contents or read_contents(request)), None if numbers is None else numbers.digest

    (plan, _), told = agreement.exchanged(own, lambda found: (found[0].manifest is not None, found[1]))
    check_alike([digest for _, digest in told], request.optimizer)
    have_manifest = [has for has, _ in told]
    if request.verify and not all(have_manifest) and any(have_manifest):
        raise CheckpointError(
            f"{request.path}: rank {have_manifest.index(False)} finds no {MANIFEST} there and others do; load from a "
            "directory that all ranks share"
        )
    return plan


def _plans_together(request: LoadRequest) -> bool:
    """Whether no rank can plan before all have read, as all ranks find alike.

    Scales may have to be looked at, of which each rank reads a part; and the states of a stock optimizer are made by a
    step of it, which may be a collective call that a rank whose reading failed would not come to.
    """
    makes_states = request.optimizer is not None and not optimizer_states.allocates(request.optimizer)
    return makes_states or any(map(components.power_of_two_scales, request.model.parameters()))


def _shared_contents(request: LoadRequest) -> CheckpointContents:
    """What this rank reads, with the scales that all ranks found. A collective call."""
    contents, found = agreement.exchanged(lambda: read_contents(request), lambda contents: contents.other_scales)
    return replace(contents, other_scales=[name for names in found for name in names])


def _apply(plan: LoadPlan) -> tuple[dict[str, Any], dict[str, str], list[str]]:
    """Write what is planned. A collective call.

    Returns:
        The caller's entries; what is said of those that are left out, by key; and what `write_states` rounded.
    """
    path = plan.request.path
    reading = {**plan.reading, EXTRA: dict(plan.extra)}
    # DCP gathers and scatters the ranks' lists of pieces, and gathers who could not read: where an error of the disk is
    # said on all ranks. Each batch that is made anew does so too, and agrees on its values before it writes weights.
    left_out = read_into(path, plan.metadata, reading)
    extra = {key: value for key, value in reading.pop(EXTRA).items() if f"{EXTRA}.{key}" not in left_out}
    objects = {key: value for key, value in reading.items() if value is not plan.reading[key]}  # tensors: in place
    for key, value in {**plan.settings, **objects}.items():
        _put(plan.state, plan.places[key], value)
    masters = list(requantization.write_weights(path, plan.metadata, plan.conversions))
    rounded = state_conversion.write_states(path, plan.metadata, plan.states, plan.request.optimizer)
    # Modules, optimizers and objects of the caller's can refuse on one rank alone, as no plan foresees.
    agreement.alike(lambda: _load_states(plan, masters))
    return extra, left_out, rounded


def _put(root: Any, path: Sequence[str | int], value: Any) -> None:
    """Put what was read where DCP's flattening found it; that makes strings of the numbers of an optimizer's states."""
    for part in path:
        at = part if isinstance(root, list) or part in root else int(part)
        holder, root = root, root[at]
    holder[at] = value


def _load_states(plan: LoadPlan, masters: list[tuple[ParameterConversion, Tensor]]) -> None:
    """Hand what was read to the model, the optimizer and the objects of this rank."""
    request = plan.request
    try:
        request.model.load_state_dict(plan.state["model"])
    except RuntimeError as error:
        raise CheckpointError(f"{request.path}: {error}") from error
    if request.requantize:
        requantization.begin_histories(request.model, plan.ignored)
    if request.optimizer is not None:
        optimizer_states.load_optimizer(request.optimizer, plan.state["optimizer"], request.numbers)
        requantization.set_masters(request.optimizer, masters)
    rank_state.load_states(request.objects, plan.rank_states)
