"""Loads a model and its optimizer: read the checkpoint and plan the load, agree on all ranks, then apply the plan.

`load` does the same as state dicts, `dcp.load` and `load_state_dict`, but checks everything first. A checkpoint that is
damaged, or of another model or recipe, raises the same short error on every rank before anything is written.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from quantshard.checkpoints import checksums, optimizer_states, rank_state, state_conversion
from quantshard.checkpoints import requantize as requantization
from quantshard.checkpoints.disk import agreement
from quantshard.checkpoints.disk.manifest import MANIFEST
from quantshard.checkpoints.disk.store import Path_
from quantshard.checkpoints.extras import EXTRA
from quantshard.checkpoints.load_plan import CheckpointContents, LoadPlan, LoadRequest, plan_load, read_contents
from quantshard.checkpoints.parameter_numbers import check_alike
from quantshard.checkpoints.requantize import ParameterConversion, RequantizedWarning
from quantshard.errors import CheckpointError, warn_user
from quantshard.tensor import components


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
        lossy: also quantize weights without masters, from their dequantized codes, and cast plain tensors of another
            dtype.
        verify: first compare the files that ranks will read with the manifest's checksums, which reads the files twice.
            A checkpoint without a manifest is loaded with a NoManifestWarning.

    Returns:
        The saved `extra` entries.

    Raises:
        CheckpointError: the checkpoint is incomplete, damaged, or of another model, recipe or optimizer; the same on
            every rank. The model and the optimizer are unchanged, unless the message says that the model is partly
            loaded (no manifest, a failing disk).
        ConfigurationError: a shard of a parameter is not at the offset where PyTorch would load it, or the optimizer's
            parameters are not the model's.
        UnsupportedOperationError: see `save`.
    """
    return load_checkpoint(LoadRequest(path, model, optimizer, requantize, lossy, verify)).extra


@dataclass(frozen=True)
class LoadResult:
    """The result of a load.

    `extra`: the caller's entries. `left`: names of the objects that kept their state. `requantized`: a description of
    the weights that were quantized again, or "".
    """

    extra: dict[str, Any]
    left: tuple[str, ...]
    requantized: str


def load_checkpoint(request: LoadRequest) -> LoadResult:
    """Read, plan, agree and apply: the implementation of `load` and `Manager.restore`. A collective call.

    Raises:
        CheckpointError, ConfigurationError, UnsupportedOperationError: see `load`.
    """
    path = request.path
    components.check_offsets(request.model.named_parameters())
    plan = _agreed_plan(request)
    if plan.reader.manifest is None:
        checksums.warn_of_none(plan.reader)
    with agreement.writing_into("the model"):
        extra = _apply(plan)
    notices = [*requantization.conversion_notices(plan.conversions), *state_conversion.conversion_notices(plan.states)]
    requantized = f"{path}: {'; '.join(notices)}" if notices else ""
    if requantized:
        warn_user(requantized, RequantizedWarning)
    return LoadResult(extra, plan.left, requantized)


def _agreed_plan(request: LoadRequest) -> LoadPlan:
    """This rank's plan, returned once every rank has a plan. After that, a load fails only while it writes.

    Raises:
        CheckpointError: the error of the first rank that failed; the same on every rank.
    """
    contents = _shared_contents(request) if _plans_together(request) else None

    def own() -> tuple[LoadPlan, str | None]:
        numbers = request.numbers
        return plan_load(request, contents or read_contents(request)), None if numbers is None else numbers.digest

    (plan, _), summaries = agreement.exchange_results(
        own, lambda result: (result[0].reader.manifest is not None, result[1])
    )
    check_alike([digest for _, digest in summaries], request.optimizer)
    have_manifest = [has for has, _ in summaries]
    if request.verify and not all(have_manifest) and any(have_manifest):
        raise CheckpointError(
            f"{request.path}: rank {have_manifest.index(False)} finds no {MANIFEST} there and others do; load from a "
            "directory that all ranks share"
        )
    return plan


def _plans_together(request: LoadRequest) -> bool:
    """Whether all ranks must have read the checkpoint before one of them can plan. The same on every rank.

    - Scales that must be powers of two: each rank reads only some of them.
    - States of a stock optimizer: they are created by one of its steps, which can contain a collective call. A rank
      with a failed read would not join that call.
    """
    makes_states = request.optimizer is not None and not optimizer_states.allocates(request.optimizer)
    return makes_states or any(map(components.power_of_two_scales, request.model.parameters()))


def _shared_contents(request: LoadRequest) -> CheckpointContents:
    """This rank's `CheckpointContents`, with the `other_scales` of all ranks. A collective call."""
    contents, names_by_rank = agreement.exchange_results(
        lambda: read_contents(request), lambda contents: contents.other_scales
    )
    return replace(contents, other_scales=[name for names in names_by_rank for name in names])


def _apply(plan: LoadPlan) -> dict[str, Any]:
    """Carry out a plan, and return the caller's entries. A collective call."""
    reading = {**plan.reading, **{f"{EXTRA}.{key}": value for key, value in plan.extra.items()}}
    # DCP exchanges the ranks' read plans and their failures, so a disk error is raised on all ranks. Each batch of
    # requantized weights does the same, and checks its values on all ranks before it writes weights.
    plan.reader.read_into(reading)
    extra = {key: reading.pop(f"{EXTRA}.{key}") for key in plan.extra}
    objects = {key: value for key, value in reading.items() if value is not plan.reading[key]}  # tensors: in place
    for key, value in {**plan.settings, **objects}.items():
        _put(plan.state, plan.places[key], value)
    masters = list(requantization.write_weights(plan.reader, plan.conversions))
    state_conversion.write_states(plan.reader, plan.states, plan.request.optimizer)
    # The caller's modules, optimizers and objects can fail on one rank only, and no plan can predict that.
    agreement.run_on_all_ranks(lambda: _load_states(plan, masters))
    return extra


def _put(root: Any, path: Sequence[str | int], value: Any) -> None:
    """Store a value at a path of a state dict. DCP's paths have strings for the integer keys of optimizer states."""
    for part in path:
        key = part if isinstance(root, list) or part in root else int(part)
        holder, root = root, root[key]
    holder[key] = value


def _load_states(plan: LoadPlan, masters: list[tuple[ParameterConversion, Tensor]]) -> None:
    """Load what was read into the model, the optimizer and this rank's objects."""
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
