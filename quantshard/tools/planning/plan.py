"""What a model would cost on a rank of any mesh, by arithmetic: no process group, no data, no second process.

`plan` gives for a model that nobody has cut yet the report that `explain` gives for its live pieces. The two take
different ways: `plan` cuts rectangles (`sharding.Shard`), `explain` reads what FSDP2 and DTensor made. The tests hold
them to each other. Given a `TrainingStep`, it adds what that takes of memory (`planning.peak`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from quantshard import sharding
from quantshard.argument_kinds import (
    MAPPING,
    MODULE,
    WHOLE_NUMBER,
    check_arguments,
    meant,
    shown_argument,
    suggests_names,
)
from quantshard.errors import ConfigurationError
from quantshard.gemm.described_gpu import described_gpu
from quantshard.numerics.adam import NONNEGATIVE
from quantshard.numerics.states import AVERAGE, MASTER
from quantshard.optimizers.matrix_groups import ALGORITHM, muon_groups
from quantshard.optimizers.state import check_dtype, needs_master, splits, stored_dtype
from quantshard.presets import ADAMW, ALGORITHMS, MUON, UNUSED_OPTIONS, StateOptions, check_remainders, chosen_options
from quantshard.sharding import Shard
from quantshard.state_cells import state_cell
from quantshard.tensor import components
from quantshard.tensor.storage import QuantizedStorage
from quantshard.tools.observe import costs
from quantshard.tools.observe.costs import BF16_BYTES, BF16_OPTIMIZER_BYTES, REPLICATED, SharedScaleCost
from quantshard.tools.observe.explain import GemmPath, dtype_name, fallbacks_of, gemm_of, recipe_in
from quantshard.tools.observe.parameter_bytes import REMAINDER, SHORT_DTYPES, SPLIT
from quantshard.tools.observe.table import Report, Row
from quantshard.tools.planning.peak import ParameterShare, step_memory
from quantshard.tools.planning.rehearsal import TrainingStep

TP = "tp"
"""The name of the mesh axis of tensor parallelism."""

_ALONE = "alone"
"""The axis that stands for none."""


@suggests_names
def plan(
    model: nn.Module,
    mesh: Mapping[str, int],
    *,
    layers: Iterable[nn.Module] = (),
    rank: int = 0,
    tensor_parallel: Mapping[str, int] | None = None,
    reshard_after_forward: bool | None = None,
    optimizer: str = ADAMW,
    head: str | Iterable[str] | None = None,
    preset: str | None = None,
    master_weights: bool | None = None,
    master_weight_dtype: torch.dtype | None = None,
    exp_avg_dtype: torch.dtype | None = None,
    exp_avg_sq_dtype: torch.dtype | None = None,
    momentum_buffer_dtype: torch.dtype | None = None,
    store_param_remainders: bool | None = None,
    ema: bool = False,
    step: TrainingStep | None = None,
    memory: int | None = None,
    capability: tuple[int, int] | None = None,
) -> Report:
    """What each parameter of a model costs on one rank of a mesh: memory, traffic, reductions, and an optimizer's
    states; and the peak of a training step.

    Rank 0, the default, holds and sends at least as much as any other, of every parameter.

    Args:
        model: the whole model, not wrapped; on the meta device it takes no memory. Its weights are planned as they are
            stored, so build it under `quantized_model_init`.
        mesh: axis -> size, outermost first. An axis named "tp" cuts first and stands last. Of the others the last is
            the one that `fully_shard` shards over, and one before it replicates (HSDP): {"dp_replicate": 16,
            "dp_shard": 64} is 1024 ranks. Without any axis it is one process that does not call `fully_shard`.
        layers: the modules that `fully_shard` wraps on their own, before it wraps the model.
        rank: which rank of the mesh, counted row by row.
        tensor_parallel: end of a parameter's name -> the dim that "tp" cuts: 0 for column-parallel weights, 1 for
            row-parallel ones. Parameters that are not named are whole on every rank of "tp".
        reshard_after_forward: as for `fully_shard`, for all of its calls: None frees the layers after forward, but not
            what belongs to no layer.
        optimizer: "adamw", whose states are those of `FusedAdam`; "lion"; or "muon", of hidden matrices, with AdamW for
            the rest. What Muon exchanges in a step, some hundred MiB (`optimizers.Muon`), is not counted.
        head: of Muon, as `muon_groups` takes it.
        preset, master_weights, master_weight_dtype, exp_avg_dtype, exp_avg_sq_dtype, momentum_buffer_dtype,
            store_param_remainders: how masters and moments are kept, as the optimizer takes it.
        ema: whether it keeps an average of the weights (`ema_decay`).
        step: of which the report gets `memory`, the most that its phases take. The model runs once for it, without
            values. Not under tensor parallelism.
        memory: bytes of the GPU; with it the report says how large a batch fits.
        capability: compute capability of the GPU, which says how GEMMs run; by default that of the step, and without
            one of the device that the model is on.

    Raises:
        ConfigurationError: an argument does not fit the others, the model is sharded already, or it cannot run without
            values.
    """
    check_arguments("plan", MODULE, model=model)
    check_arguments("plan", MAPPING.or_none, tensor_parallel=tensor_parallel)
    check_arguments("plan", WHOLE_NUMBER, rank=rank)
    if not isinstance(mesh, Mapping) or not all(isinstance(size, WHOLE_NUMBER.types) for size in mesh.values()):
        raise ConfigurationError(f"plan(mesh={mesh!r}): give sizes by the names of axes, such as {{'dp_shard': 4}}")
    if not isinstance(layers, Iterable):
        raise ConfigurationError(f"plan(layers={type(layers).__name__}): give a list of the modules")
    place, layers = _MeshRank.of(mesh, rank), list(layers)
    for layer in layers:
        check_arguments("plan", MODULE, layers=layer)
    cut_by_tp, inner = (
        dict(tensor_parallel or {}),
        {id(module): layer for layer in layers for module in layer.modules()},
    )
    given = {
        "master_weights": master_weights,
        "master_weight_dtype": master_weight_dtype,
        "exp_avg_dtype": exp_avg_dtype,
        "exp_avg_sq_dtype": exp_avg_sq_dtype,
        "momentum_buffer_dtype": momentum_buffer_dtype,
        "store_param_remainders": store_param_remainders,
    }
    _check_optimizer(optimizer, given)
    states = chosen_options("plan", preset, given)
    spec = _OptimizerSpec(states, ema, optimizer, _matrices(model, optimizer, head))
    _check_arguments(model, place, cut_by_tp, spec)
    _check_step(step, place, memory)
    _check_capability(capability)
    rows, shares, optimized = [], [], 0
    capability = capability or (None if step is None else step.capability)
    device = None if capability is None else torch.device("meta")
    with nullcontext() if capability is None else described_gpu(capability):
        gemms = [
            gemm_of(leaf, module, param, None if stored is None else stored.quantized_storage, recipe, device)
            for _, leaf, module, param in _parameters(model)
            for stored, recipe in ((components.quantized_local(param), recipe_in(module, None)),)
        ]
    for gemm, (name, _, module, param) in zip(gemms, _parameters(model), strict=True):
        dim = next((dim for end, dim in cut_by_tp.items() if name.endswith(end)), None)
        again = id(module) in inner if reshard_after_forward is None else reshard_after_forward
        row, numel = _row(name, param, gemm, place, dim, again, spec)
        rows.append(row)
        shares.append(ParameterShare(inner.get(id(module)), param, row, again))
        optimized += numel
    report = Report.of(rows, optimized * BF16_OPTIMIZER_BYTES)
    if step is None:
        return report
    sharding = (place.ranks, place.replicas) if place.is_wrapped else None
    return replace(report, memory=step_memory(model, layers, report.totals, shares, sharding, step, memory))


@dataclass(frozen=True)
class _OptimizerSpec:
    """How the optimizer keeps masters and moments, and whether it keeps averages of weights.

    `matrices`: the parameters, by id, that Muon orthogonalizes the momentum of; the rest of its model is AdamW's.
    """

    states: StateOptions
    ema: bool
    algorithm: str
    matrices: frozenset[int]

    def dtypes(self, param: Tensor) -> dict[str, torch.dtype]:
        """State -> dtype, as it would be of a large quantized weight."""
        if self.algorithm != MUON:
            return self.states.dtypes(self.algorithm)
        return self.states.dtypes(MUON if id(param) in self.matrices else ADAMW)


def _check_optimizer(optimizer: str, given: Mapping[str, Any]) -> None:
    """Refuse an optimizer whose states are not known, and options that say nothing of those of one that is."""
    if optimizer not in ALGORITHMS:
        raise ConfigurationError(
            f"plan(optimizer={shown_argument(optimizer)}): {meant(optimizer, ALGORITHMS)}there are "
            f"{', '.join(ALGORITHMS)}; a live one of any class is described by explain(model, optimizer)"
        )
    for name in UNUSED_OPTIONS[optimizer]:
        if given[name] is not None:
            raise ConfigurationError(
                f"plan(optimizer={optimizer!r}, {name}={given[name]}) would do nothing, since {optimizer} has no such "
                "state; leave it out"
            )


def _matrices(model: nn.Module, optimizer: str, head: str | Iterable[str] | None) -> frozenset[int]:
    """The parameters, by id, that Muon orthogonalizes the momentum of.

    Raises:
        ConfigurationError: the head is not known, or told of another optimizer.
    """
    if optimizer != MUON and head is not None:
        raise ConfigurationError(f"plan(optimizer={optimizer!r}, head={head!r}): the head is told to Muon alone")
    groups = muon_groups(model, head=head) if optimizer == MUON else []
    chosen = [group["params"] for group in groups if group[ALGORITHM] == MUON]
    return frozenset(id(param) for params in chosen for _, param in params)


def _is_tensor_parallel(axis: object) -> bool:
    """Whether an axis is named like one of tensor parallelism, as others call it."""
    name = str(axis).lower().replace("-", "_")
    return name.startswith(TP) or name in ("tensor", "tensor_parallel")


@dataclass(frozen=True)
class _MeshRank:
    """One rank of a mesh."""

    mesh: dict[str, int]
    at: dict[str, int]
    is_wrapped: bool = True

    @classmethod
    def of(cls, mesh: Mapping[str, int], rank: int) -> _MeshRank:
        if not mesh and rank == 0:
            return cls({_ALONE: 1}, {_ALONE: 0}, is_wrapped=False)
        ranks = math.prod(mesh.values())
        sharding_axes = [axis for axis in mesh if axis != TP]
        if taken := [axis for axis in sharding_axes if _is_tensor_parallel(axis)]:
            raise ConfigurationError(
                f"plan: mesh axis {taken[0]!r} would shard or replicate, as every axis but {TP!r} does; name the one "
                f"of tensor parallelism {TP!r}, and others by what they are, such as 'dp_shard'"
            )
        if not 1 <= len(sharding_axes) <= 2 or TP in list(mesh)[:-1]:
            raise ConfigurationError(
                f"plan: mesh {dict(mesh)} must have the axis that fully_shard shards over, at most one before it "
                f"(HSDP), and {TP!r} only as the last"
            )
        if min(mesh.values()) < 1 or not 0 <= rank < ranks:
            raise ConfigurationError(
                f"plan: there is no rank {rank} in a mesh of {dict(mesh)}, which has {ranks} ranks"
            )
        at: dict[str, int] = {}
        for axis, size in reversed(list(mesh.items())):
            rank, at[axis] = divmod(rank, size)
        return cls(dict(mesh), at)

    @property
    def ranks(self) -> int:
        """Over which FSDP shards."""
        return self.mesh[self.shard_axis]

    @property
    def replicas(self) -> int:
        """That each hold all of FSDP's shards."""
        return math.prod(size for axis, size in self.mesh.items() if axis not in (TP, self.shard_axis))

    @property
    def shard_axis(self) -> str:
        """The axis that FSDP shards over."""
        return [axis for axis in self.mesh if axis != TP][-1]

    def piece(self, shard: Shard, dim: int, axis: str) -> Shard:
        """What this rank gets when `axis` cuts `dim`, as torch.chunk does."""
        chunk = sharding.ceil_div(shard.shape[dim], self.mesh[axis])
        return shard.piece(dim, self.at[axis] * chunk, chunk)

    def placements(self, tp_dim: int | None) -> dict[str, str]:
        """Axis -> what it does to a parameter, of the mesh that FSDP2 gives it."""
        if not self.is_wrapped:
            return {}
        strided = tp_dim == 0 and self.mesh[TP] > 1
        told = {axis: REPLICATED for axis in self.mesh if axis != TP}
        told[self.shard_axis] = "StridedShard(0)" if strided else "Shard(0)"
        return told if tp_dim is None else told | {TP: f"Shard({tp_dim})"}


def _parameters(model: nn.Module) -> Iterator[tuple[str, str, nn.Module, Tensor]]:
    """Name, name in its module, module and parameter; a shared parameter once."""
    seen = set()
    for prefix, module in model.named_modules():
        for leaf, param in module.named_parameters(recurse=False):
            if param not in seen:
                seen.add(param)
                yield f"{prefix}.{leaf}" if prefix else leaf, leaf, module, param


def _check_arguments(model: nn.Module, place: _MeshRank, cut_by_tp: Mapping[str, int], spec: _OptimizerSpec) -> None:
    named = dict(model.named_parameters())
    if any(isinstance(param, DTensor) for param in named.values()):
        raise ConfigurationError(
            "plan: the model is sharded already; plan it before, or describe it with explain(model)"
        )
    for end, dim in cut_by_tp.items():
        if TP not in place.mesh or dim not in (0, 1) or not any(name.endswith(end) for name in named):
            raise ConfigurationError(
                f"plan: tensor_parallel={{{end!r}: {dim}}} needs a mesh axis {TP!r}, dim 0 or 1, and a parameter whose "
                f"name ends so; the mesh is {place.mesh}"
            )
    for algorithm in (ADAMW, MUON) if spec.algorithm == MUON else (spec.algorithm,):
        for state, dtype in spec.states.dtypes(algorithm).items():
            check_dtype("plan", state, dtype)
    if spec.states.store_param_remainders:
        check_remainders("plan", spec.states.master_weights, spec.states.master_weight_dtype)


def _check_capability(capability: object) -> None:
    is_pair = isinstance(capability, tuple) and len(capability) == 2 and all(type(each) is int for each in capability)
    if capability is not None and not is_pair:
        raise ConfigurationError(
            f"plan(capability={capability!r}): give two numbers, such as (9, 0) of an H100 or H200"
        )


def _check_step(step: TrainingStep | None, place: _MeshRank, memory: int | None) -> None:
    if step is None:
        if memory is not None:
            raise ConfigurationError("plan(memory=...): give a step too, whose batch is to fit")
        return
    if not isinstance(step, TrainingStep):
        raise ConfigurationError(f"plan(step={step!r}): give a quantshard.TrainingStep")
    if place.mesh.get(TP, 1) > 1:
        raise ConfigurationError(
            f"plan: the memory of a step is not counted under tensor parallelism ({TP!r} of {place.mesh[TP]}); "
            "leave the step out, or plan the mesh without that axis"
        )


def _row(
    name: str,
    param: Tensor,
    gemm: GemmPath,
    place: _MeshRank,
    tp_dim: int | None,
    gathered_again: bool,
    optimizer: _OptimizerSpec,
) -> tuple[Row, int]:
    """The row of one parameter, and how many of its elements the optimizer has here."""
    quantized = components.quantized_local(param)
    storage = None if quantized is None else quantized.quantized_storage
    shard = _cut(name, param, storage, place, tp_dim)
    assert shard.cut is not None
    placements = place.placements(tp_dim)
    mesh = {axis: place.mesh[axis] for axis in placements}
    held = shard.cut.chunk * shard.cut.parent.shape[1]  # FSDP2 pads plain tensors to the largest piece
    forward = bf16_forward = 0
    if storage is None:
        codes, scales, shared = held * param.itemsize, 0, SharedScaleCost()
    else:
        fmt = storage.cell.format
        (codes, scales), shared = (
            costs.resident_bytes(fmt, shard),
            costs.shared(fmt, shard, mesh, [*placements.values()]),
        )
    if place.mesh[place.shard_axis] > 1:
        bf16_forward = held * BF16_BYTES
        forward = codes if storage is None else costs.gather_bytes(fmt, shard, in_backward=gathered_again)
    states, sizes, note = _optimizer(param, storage, shard, optimizer)
    row = Row(
        name=name,
        shape=tuple(param.shape),
        dtype=dtype_name(param.dtype),
        format=dtype_name(param.dtype) if storage is None else storage.cell.tag,
        code_bytes=codes,
        scale_bytes=scales,
        shared_scale_bytes=shared.scale_bytes,
        straddling_blocks=shared.blocks,
        bf16_bytes=held * BF16_BYTES,
        forward_gather_bytes=forward,
        backward_gather_bytes=forward if gathered_again else 0,
        bf16_gather_bytes=bf16_forward * (2 if gathered_again else 1),
        reduced_bytes=shared.reduced_bytes,
        gemm=gemm.path,
        gemm_reason=gemm.reason,
        optimizer=states,
        optimizer_bytes=sum(sizes.values()),
        state_sizes=sizes,
        elements=math.prod(shard.shape),
        mesh=mesh,
        placements=tuple(placements.values()),
        local_rows=shard.extents[0],
        fallbacks=fallbacks_of(gemm, shared, note),
        notes=tuple(filter(None, (shared.note, note))),
        warnings=tuple(filter(None, (shared.warning,))),
    )
    return row, math.prod(shard.shape) if param.requires_grad else 0


def _cut(name: str, param: Tensor, storage: QuantizedStorage | None, place: _MeshRank, tp_dim: int | None) -> Shard:
    """This rank's piece of a parameter, whose dims after the first are taken together."""
    shape = (*param.shape, 1)[0], math.prod(param.shape[1:])
    shard = sharding.whole(shape) if storage is None else storage.shard
    if tp_dim is not None:
        shard = place.piece(shard, tp_dim, TP)
        codes = [] if storage is None else [copy.codes for copy in storage.cell.format.copies.values()]
        if shard.cut is not None and not all(shard.cut.is_clean(part) for part in codes):
            raise ConfigurationError(
                f"plan: {name}: {TP} of {place.mesh[TP]} cuts dim {tp_dim} of {tuple(param.shape)} into pieces of "
                f"{shard.cut.chunk}, between codes that share a byte; choose a size that gives even pieces"
            )
    return place.piece(shard, 0, place.shard_axis)


def _optimizer(
    param: Tensor, storage: QuantizedStorage | None, shard: Shard, optimizer: _OptimizerSpec
) -> tuple[dict[str, str], dict[str, int], str]:
    """State -> format, state -> bytes here, and a note on those that stay float32, as the optimizer allocates them."""
    if not param.requires_grad:
        return {}, {}, ""
    asked = optimizer.dtypes(param)
    if MASTER in asked and not needs_master(storage is not None, param.dtype, asked[MASTER]):
        del asked[MASTER]
    states, sizes, elements = {}, {}, math.prod(shard.shape)
    fmt = None if storage is None else storage.cell.format
    if MASTER in asked and optimizer.states.store_param_remainders and splits(fmt, param.dtype, asked[MASTER]):
        states[MASTER], sizes[MASTER] = (REMAINDER, 2 * elements) if fmt is None else (SPLIT, elements)
        del asked[MASTER]
    dtypes = {state: stored_dtype(dtype, param.ndim) for state, dtype in asked.items()}
    kept = [state for state, dtype in dtypes.items() if dtype is not asked[state]]
    if optimizer.ema:
        dtypes[AVERAGE] = torch.float32
    for state, dtype in dtypes.items():
        cell = state_cell(dtype, state in NONNEGATIVE)
        sizes[state] = elements * dtype.itemsize if cell is None else sum(costs.resident_bytes(cell.format, shard))
        states[state] = SHORT_DTYPES[dtype_name(dtype)]
    told = " and ".join(dict.fromkeys(SHORT_DTYPES[dtype_name(asked[state])] for state in kept))
    return states, sizes, costs.float_states(kept, told)
