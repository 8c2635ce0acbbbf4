"""Plans what a model would cost on a rank of any mesh, by arithmetic: no process group, no data, no second process.

`plan` gives for an unsharded model the report that `explain` gives for live shards. `plan` cuts rectangles
(`sharding.Shard`), `explain` reads what FSDP2 and DTensor made; tests compare both. With a `TrainingStep`, the report
includes the peak memory of the step (`planning.rehearsal`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from quantshard import sharding, state_storage
from quantshard.errors import ConfigurationError
from quantshard.gemm.predictions import described_gpu
from quantshard.numerics.adam import EXP_AVG_SQ
from quantshard.numerics.states import AVERAGE, MASTER
from quantshard.optimizers.muon import ALGORITHM, muon_groups
from quantshard.sharding import Shard
from quantshard.state_storage import StateOptions
from quantshard.tensor import components
from quantshard.tensor.storage import QuantizedStorage
from quantshard.tools.observe import costs
from quantshard.tools.observe.explain import GemmPath, dtype_name, gemm_of, recipe_in, row_of
from quantshard.tools.observe.table import Report
from quantshard.tools.planning.rehearsal import ParameterShare, TrainingStep, step_memory

TP = "tp"

_ALONE = "alone"
"""Name of the single axis that represents an empty mesh."""


def plan(
    model: nn.Module,
    mesh: Mapping[str, int],
    *,
    layers: Iterable[nn.Module] = (),
    rank: int = 0,
    tensor_parallel: Mapping[str, int] | None = None,
    reshard_after_forward: bool | None = None,
    optimizer: str = state_storage.ADAMW,
    head: str | Iterable[str] | None = None,
    preset: str | None = None,
    ema: bool = False,
    step: TrainingStep | None = None,
    memory: int | None = None,
    capability: tuple[int, int] | None = None,
    **state_options: Any,
) -> Report:
    """Report what each parameter costs on one rank of a mesh, with optimizer states and the peak of a training step.

    Rank 0, the default, stores and sends at least as much of every parameter as any other rank.

    Args:
        model: the whole model, not wrapped; on the meta device it needs no memory. Weights are planned as they are
            stored, so build the model under `quantized_model_init`.
        mesh: axis -> size, outermost first. An axis named "tp" cuts first and stands last. The last of the others is
            the one that `fully_shard` shards over, and one before it replicates (HSDP): {"dp_replicate": 16,
            "dp_shard": 64} is 1024 ranks. An empty mesh is one process that does not call `fully_shard`.
        layers: modules that `fully_shard` wraps individually, before it wraps the model.
        rank: rank in the mesh, in row-major order.
        tensor_parallel: suffix of a parameter's name -> the dim that "tp" cuts: 0 for column-parallel weights, 1 for
            row-parallel ones. All other parameters are replicated over "tp".
        reshard_after_forward: as for `fully_shard`, for all of its calls. None frees the layers after forward, but not
            parameters outside the layers.
        optimizer: "adamw" (the states of `FusedAdam`), "lion", or "muon" for hidden matrices with AdamW for the rest.
            Muon's exchange buffers, a few hundred MiB (`optimizers.Muon`), are not counted.
        head: the head that Muon leaves to AdamW, as for `muon_groups`.
        preset: how masters and moments are stored, as for the optimizer.
        ema: whether the optimizer averages the weights (`ema_decay`).
        step: adds the peak memory of each phase of this step as `Report.memory`. Runs the model once, without values.
            Not supported with tensor parallelism.
        memory: bytes of the GPU; the report then states the largest batch that fits.
        capability: compute capability of the GPU, which determines how GEMMs run. By default the one of `step`, or
            without a step, the one of the model's device.
        state_options: `master_weights`, `master_weight_dtype`, `exp_avg_dtype`, `exp_avg_sq_dtype`,
            `momentum_buffer_dtype` and `store_param_remainders`, as for the optimizer.
    """
    mesh_rank, layers = _MeshRank.of(mesh, rank), list(layers)
    cut_by_tp = dict(tensor_parallel or {})
    layer_of = {id(module): layer for layer in layers for module in layer.modules()}
    groups = muon_groups(model, head=head) if optimizer == state_storage.MUON else []
    algorithms = {id(param): group[ALGORITHM] for group in groups for _, param in group["params"]}
    options = state_storage.chosen_options("plan", preset, state_options)
    _check_model(model, mesh_rank, cut_by_tp)
    if step is None and memory is not None:
        raise ConfigurationError("plan(memory=...) needs a step, whose batch is to fit")
    if step is not None and (tp_ranks := mesh_rank.mesh.get(TP, 1)) > 1:
        raise ConfigurationError(f"plan: a step's memory is unknown under {TP!r} of {tp_ranks}; leave the step out")
    rows, shares = [], []
    capability = capability or (None if step is None else step.capability)
    device = None if capability is None else torch.device("meta")
    with nullcontext() if capability is None else described_gpu(capability):
        for name, param in model.named_parameters():
            owner, _, leaf = name.rpartition(".")
            module = model.get_submodule(owner)
            gemm = gemm_of(leaf, module, param, recipe_in(module, None), device)
            dim = next((dim for suffix, dim in cut_by_tp.items() if name.endswith(suffix)), None)
            regathered = id(module) in layer_of if reshard_after_forward is None else reshard_after_forward
            states_of = partial(_optimizer_states, options, algorithms.get(id(param), optimizer), ema)
            rows.append(_row(name, param, gemm, mesh_rank, dim, regathered, states_of))
            shares.append(ParameterShare(layer_of.get(id(module)), param, rows[-1], regathered))
    optimized = sum(share.row.elements for share in shares if share.param.requires_grad)
    report = Report.of(rows, optimized * costs.BF16_OPTIMIZER_BYTES)
    if step is None:
        return report
    peak_memory = step_memory(model, layers, report.totals, shares, mesh_rank.fsdp_ranks, step, memory)
    return replace(report, memory=peak_memory)


_States = tuple[dict[str, str], dict[str, int], bool]
"""State -> format, state -> local bytes, and whether states stay float32."""


@dataclass(frozen=True)
class _MeshRank:
    """One rank of a mesh. `at`: axis -> coordinate. `is_wrapped`: whether `fully_shard` wraps the model."""

    mesh: dict[str, int]
    at: dict[str, int]
    is_wrapped: bool = True

    @classmethod
    def of(cls, mesh: Mapping[str, int], rank: int) -> _MeshRank:
        if not mesh and rank == 0:
            return cls({_ALONE: 1}, {_ALONE: 0}, is_wrapped=False)
        ranks = math.prod(mesh.values())
        sharding_axes = [axis for axis in mesh if axis != TP]
        if not 1 <= len(sharding_axes) <= 2 or TP in list(mesh)[:-1]:
            raise ConfigurationError(f"plan: mesh {dict(mesh)} needs one or two axes for fully_shard; {TP!r} only last")
        if not 0 <= rank < ranks:
            raise ConfigurationError(f"plan: there is no rank {rank} in mesh {dict(mesh)} of {ranks} ranks")
        coordinates: dict[str, int] = {}
        for axis, size in reversed(list(mesh.items())):
            rank, coordinates[axis] = divmod(rank, size)
        return cls(dict(mesh), coordinates)

    @property
    def fsdp_ranks(self) -> tuple[int, int] | None:
        """Number of ranks that FSDP shards over, and of replicas of each shard; None without FSDP."""
        replicas = math.prod(size for axis, size in self.mesh.items() if axis not in (TP, self.shard_axis))
        return (self.mesh[self.shard_axis], replicas) if self.is_wrapped else None

    @property
    def shard_axis(self) -> str:
        return [axis for axis in self.mesh if axis != TP][-1]

    def piece(self, shard: Shard, dim: int, axis: str, unit: int = 1) -> Shard:
        """This rank's chunk when `axis` cuts `dim`, in multiples of `unit`, as torch.chunk does."""
        chunk = sharding.ceil_div(shard.shape[dim], unit * self.mesh[axis]) * unit
        return shard.piece(dim, self.at[axis] * chunk, chunk)

    def placements(self, tp_dim: int | None) -> dict[str, str]:
        """Axis -> placement of a parameter on the mesh that FSDP2 gives it."""
        if not self.is_wrapped:
            return {}
        strided = tp_dim == 0 and self.mesh[TP] > 1
        placements = {axis: costs.REPLICATED for axis in self.mesh if axis != TP}
        placements[self.shard_axis] = "StridedShard(0)" if strided else "Shard(0)"
        return placements if tp_dim is None else placements | {TP: f"Shard({tp_dim})"}


def _check_model(model: nn.Module, place: _MeshRank, cut_by_tp: Mapping[str, int]) -> None:
    params = dict(model.named_parameters())
    if any(isinstance(param, DTensor) for param in params.values()):
        raise ConfigurationError("plan: the model is sharded already; plan it before, or use explain(model)")
    for end, dim in cut_by_tp.items():
        if TP not in place.mesh or dim not in (0, 1) or not any(name.endswith(end) for name in params):
            cut = f"tensor_parallel={{{end!r}: {dim}}}"
            raise ConfigurationError(f"plan: {cut} needs the axis {TP!r}, dim 0 or 1, and a parameter of this name")


def _row(
    name: str,
    param: Tensor,
    gemm: GemmPath,
    place: _MeshRank,
    tp_dim: int | None,
    gathered_again: bool,
    states_of: Callable[[Tensor, QuantizedStorage | None, Shard], _States],
) -> costs.Row:
    storage = components.quantized_storage(param)
    shard = _cut(name, param, storage, place, tp_dim)
    assert shard.cut is not None
    placements = place.placements(tp_dim)
    mesh = {axis: place.mesh[axis] for axis in placements}
    # FSDP2 pads plain tensors to the largest shard.
    numel = shard.cut.chunk * shard.cut.parent.shape[1]
    plain_bytes = numel * param.itemsize
    return row_of(
        name,
        param,
        storage,
        gemm,
        states_of(param, storage, shard),
        stored=(plain_bytes, 0) if storage is None else costs.resident_bytes(storage.spec.format, shard),
        numel=numel,
        plain_sent=plain_bytes,
        gather_count=(2 if gathered_again else 1) if place.mesh[place.shard_axis] > 1 else 0,
        shard=shard,
        elements=math.prod(shard.shape),
        mesh=mesh,
        placements=tuple(placements.values()),
        local_rows=shard.extents[0],
    )


def _cut(name: str, param: Tensor, storage: QuantizedStorage | None, place: _MeshRank, tp_dim: int | None) -> Shard:
    shape = (*param.shape, 1)[0], math.prod(param.shape[1:])
    shard = sharding.whole(shape) if storage is None else storage.shard
    if tp_dim is not None:
        shard = place.piece(shard, tp_dim, TP)
        codes = [] if storage is None else [copy.codes for copy in storage.spec.format.copies.values()]
        if shard.cut is not None and not all(shard.cut.is_clean(part) for part in codes):
            raise ConfigurationError(
                f"plan: {name}: {TP} of {place.mesh[TP]} cuts dim {tp_dim} of {tuple(param.shape)} into pieces of "
                f"{shard.cut.chunk}, between codes that share a byte; choose a size that gives even pieces"
            )
    rows = 1 if storage is None else storage.spec.format.matrix_rows or 1  # experts are cut between each other
    return place.piece(shard, 0, place.shard_axis, rows)


def _optimizer_states(
    options: StateOptions, algorithm: str, ema: bool, param: Tensor, storage: QuantizedStorage | None, shard: Shard
) -> _States:
    """Compute the states of a parameter as the optimizer allocates them."""
    if not param.requires_grad:
        return {}, {}, False
    requested = options.dtypes(algorithm)
    if MASTER in requested and not state_storage.needs_master(storage is not None, param.dtype, requested[MASTER]):
        del requested[MASTER]
    states, sizes, elements = {}, {}, math.prod(shard.shape)
    fmt = None if storage is None else storage.spec.format
    master = requested.get(MASTER) if options.store_param_remainders else None
    if master is not None and state_storage.splits(fmt, param.dtype, master):
        states[MASTER], sizes[MASTER] = (costs.REMAINDER, 2 * elements) if fmt is None else (costs.SPLIT, elements)
        del requested[MASTER]
    ndim = param.ndim if storage is None else 2
    dtypes = {state: state_storage.stored_dtype(dtype, ndim) for state, dtype in requested.items()}
    has_float32 = dtypes != requested
    if ema:
        dtypes[AVERAGE] = torch.float32
    for state, dtype in dtypes.items():
        spec = state_storage.state_quant_spec(dtype, nonnegative=state == EXP_AVG_SQ)
        sizes[state] = elements * dtype.itemsize if spec is None else sum(costs.resident_bytes(spec.format, shard))
        states[state] = costs.SHORT_DTYPES[dtype_name(dtype)]
    return states, sizes, has_float32
