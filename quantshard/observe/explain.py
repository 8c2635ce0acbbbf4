"""What a model costs on this rank, and why: one row a parameter.

Nothing falls back in silence: for each parameter `explain` says how it is stored and in how many bytes, what this rank
sends to the all-gathers of one step, how its GEMMs run and why, in which formats the optimizer keeps its state, and how
it is sharded. The figures beside BF16 are those of the same model, on the same mesh, with BF16 weights, float32 masters
and float32 moments.

Nothing here communicates or reads a value, so it works on the meta device, before the first step and after it, and on
one rank alone. Bytes of codes and scales are those of the live components; bytes on the wire are derived from the same
slots that the all-gather is made of (`sharding.gather_slots`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from quantshard import backend, components, private_torch, sharding
from quantshard import recipe as recipes
from quantshard.formats import ALL, Component, Copy, Role
from quantshard.observe.table import Report, Row, Totals, human_bytes
from quantshard.private_torch import FsdpGather
from quantshard.recipe import Recipe
from quantshard.sharding import Shard
from quantshard.storage import QuantizedStorage

BF16_BYTES = 2
BF16_OPTIMIZER_BYTES = 12
"""An element's float32 master and two float32 moments."""

SCALES_WARNING = 0.1
"""Scales that stay whole because blocks straddle are warned of when they pass this share of the local codes."""

_AMAX_BYTES = 4
_SCALE_SUFFIX = "_scale_inv"
_SHORT_DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "uint8": "FP8"}


def explain(
    model: nn.Module, optimizer: torch.optim.Optimizer | None = None, recipe: str | Recipe | None = None
) -> Report:
    """What each parameter of a model costs on this rank, and how it is computed with.

    Args:
        model: any module, on any device, wrapped by `fully_shard` or not; if it is wrapped, the outermost module.
        optimizer: whose state to describe: `FusedAdam`, or any other that keeps tensors in `optimizer.state`.
        recipe: what autocast will run with. Without it, weights in high precision are taken to be computed with as
            they are, and quantized ones by their own format.
    """
    chosen = None if recipe is None else recipes.resolve(recipe)
    gathers = private_torch.fsdp_gathers(model)
    states = _States(optimizer)
    rows, seen, optimized = [], set(), 0
    for prefix, module in model.named_modules():
        for leaf, registered in module.named_parameters(recurse=False):
            found = gathers.get((id(module), leaf))
            param = registered if found is None else found.param  # FSDP2 may have registered the gathered one
            if param not in seen:
                seen.add(param)
                name = f"{prefix}.{leaf}" if prefix else leaf
                rows.append(_row(name, leaf, module, param, found, states, chosen))
                optimized += private_torch.local_tensor(param).numel() if param in states.params else 0
    return Report(tuple(rows), _totals(rows, optimized))


def _row(
    name: str,
    leaf: str,
    module: nn.Module,
    param: Tensor,
    gathers: FsdpGather | None,
    states: _States,
    chosen: Recipe | None,
) -> Row:
    local = private_torch.local_tensor(param)
    quantized = components.quantized(param)
    storage = None if quantized is None else quantized._storage
    codes, scales = _resident(local, storage, gathers)
    forward, backward = _wire(storage, local, gathers)
    gemm, reason = _gemm(leaf, module, param, storage, chosen)
    mesh, placements = _placed(param)
    note, warning = _straddling(storage, param)
    return Row(
        name=name,
        shape=tuple(param.shape),
        dtype=_dtype_name(param.dtype),
        format=_dtype_name(param.dtype) if storage is None else storage.cell.tag,
        code_bytes=codes,
        scale_bytes=scales,
        bf16_bytes=_held_numel(storage, local, gathers) * BF16_BYTES,
        forward_gather_bytes=forward,
        backward_gather_bytes=backward,
        bf16_gather_bytes=_bf16_wire(storage, local, gathers),
        reduced_bytes=0 if storage is None else _reduced(storage),
        gemm=gemm,
        gemm_reason=reason,
        optimizer=states.formats(param),
        optimizer_bytes=states.bytes(param),
        mesh=mesh,
        placements=placements,
        local_rows=_local_rows(param, storage),
        notes=tuple(filter(None, (note, states.note(param)))),
        warnings=tuple(filter(None, (warning, _mismatch(storage, chosen)))),
    )


def _resident(local: Tensor, storage: QuantizedStorage | None, gathers: FsdpGather | None) -> tuple[int, int]:
    """Bytes of codes and of scales."""
    if storage is None:
        return _held_numel(storage, local, gathers) * local.itemsize, 0
    roles = {name: storage.cell.format.by_name[name].role for name in storage.components}
    codes = sum(_nbytes(part) for name, part in storage.components.items() if roles[name] is Role.CODES)
    return codes, sum(map(_nbytes, storage.components.values())) - codes


def _held_numel(storage: QuantizedStorage | None, local: Tensor, gathers: FsdpGather | None) -> int:
    """Elements of a plain tensor, or of one in a weight's place: FSDP2 pads it to the largest shard."""
    if gathers is None:
        return local.numel()
    cut = None if storage is None else storage.shard.cut
    return gathers.padded_numel if cut is None else cut.chunk * cut.parent.shape[1]


def _wire(storage: QuantizedStorage | None, local: Tensor, gathers: FsdpGather | None) -> tuple[int, int]:
    """Bytes that this rank gives to the all-gathers of a forward and of a backward."""
    if gathers is None or gathers.ranks == 1:
        return 0, 0
    if storage is None:
        size = gathers.padded_numel * (gathers.dtype or local.dtype).itemsize
        return size, size if gathers.in_backward else 0
    copies = tuple(storage.cell.format.copies)
    passes: tuple[tuple[Copy, ...], ...] = (copies,)
    if len(copies) > 1 and gathers.in_backward:
        passes = tuple((which,) for which in copies)
    slots = sharding.gather_slots(storage.cell.format, storage.shard, passes[0], passes)
    codes = next(iter(storage.components))  # the dtype of a slot that the forward leaves empty
    size = sum(slot.numel * storage.components[slot.name or codes].itemsize for slot in slots)
    return size, size if gathers.in_backward else 0  # FSDP2 keeps the sizes of the first gather


def _bf16_wire(storage: QuantizedStorage | None, local: Tensor, gathers: FsdpGather | None) -> int:
    if gathers is None or gathers.ranks == 1:
        return 0
    return _held_numel(storage, local, gathers) * BF16_BYTES * (2 if gathers.in_backward else 1)


def _reduced(storage: QuantizedStorage) -> int:
    shapes = [storage.shard.component_shape(part) for part in _scales(storage) if storage.shard.shares_blocks(part)]
    return sum(rows * cols * _AMAX_BYTES for rows, cols in shapes)


def _scales(storage: QuantizedStorage) -> Iterator[Component]:
    return (part for part in storage.cell.format.components if part.role is not Role.CODES)


def _gemm(
    leaf: str, module: nn.Module, param: Tensor, storage: QuantizedStorage | None, chosen: Recipe | None
) -> tuple[str, str]:
    ours = type(module).__module__.split(".")[:2] == [__name__.split(".")[0], "modules"]
    if (
        param.ndim != 2
        or "Embedding" in type(module).__name__
        or (ours and leaf not in getattr(module, "_weights", ()))
    ):
        return "", ""
    device = _device(param)
    if storage is not None:
        return backend.gemm_path(storage.cell, device)
    if not ours:
        path, reason = backend.gemm_path(None, device)
        return path, f"{reason}: {type(module).__name__} is not one of quantshard's modules"
    cell = None if chosen is None else chosen.weight
    path, reason = backend.gemm_path(cell, device)
    if chosen is not None and chosen.table:
        reason = f"quantized for each forward under autocast(recipe={chosen.name!r}): {reason}"
    return path, reason


def _device(param: Tensor) -> torch.device:
    if not param.is_meta:
        return param.device
    return torch.device(param.device_mesh.device_type if isinstance(param, DTensor) else "cpu")


def _mismatch(storage: QuantizedStorage | None, chosen: Recipe | None) -> str:
    if storage is None or chosen is None or not chosen.table or storage.cell == chosen.weight:
        return ""
    stored, wanted = storage.cell.tag, "high precision" if chosen.weight is None else chosen.weight.tag
    if chosen.weight is not None and stored == wanted:
        stored, wanted = f"{stored} by {storage.cell.scaling}", str(chosen.weight.scaling)
    return (
        f"stored as {stored}, but recipe {chosen.name!r} wants {wanted}: forward will raise; use one recipe for "
        "quantized_model_init and autocast"
    )


# Sharding


def _placed(param: Tensor) -> tuple[dict[str, int], tuple[str, ...]]:
    if not isinstance(param, DTensor):
        return {}, ()
    names = param.device_mesh.mesh_dim_names or tuple(f"axis {axis}" for axis in range(param.device_mesh.ndim))
    sizes = {name: param.device_mesh.size(axis) for axis, name in enumerate(names)}
    return sizes, tuple(_placement_name(placement) for placement in param.placements)


def _placement_name(placement: Any) -> str:
    if placement.is_replicate():
        return "Replicate"
    return f"{'Shard' if placement.is_shard() else 'StridedShard'}({placement.dim})"


def _local_rows(param: Tensor, storage: QuantizedStorage | None) -> tuple[int, int]:
    if storage is not None:
        return storage.shard.extents[0]
    if param.ndim == 0:
        return (0, 1)
    first = private_torch.global_offset(param)[0]
    return (first, first + private_torch.local_tensor(param).shape[0])


def _straddling(storage: QuantizedStorage | None, param: Tensor) -> tuple[str, str]:
    """A note on the scales that stay whole because blocks straddle ranks, and a warning where they weigh."""
    if storage is None or storage.shard.cut is None:
        return "", ""
    shard = storage.shard
    parts = [p for p in _scales(storage) if shard.shares_blocks(p) and ALL not in p.covers]
    if not parts:
        return "", ""
    scale_bytes, code_bytes = _weights_of(storage, shard, parts)
    share = scale_bytes / code_bytes if code_bytes else float("inf")
    blocks = " and ".join(dict.fromkeys(f"{rows}x{cols}" for rows, cols in (p.covers for p in parts)))
    of_codes = f"{share:.1%} of the local codes" if code_bytes else "this rank has no codes at all"
    text = (
        f"blocks of {blocks} straddle ranks, so each keeps {' and '.join(p.name for p in parts)} of the whole weight: "
        f"{human_bytes(scale_bytes)} ({of_codes}), and {human_bytes(_reduced(storage))} of amaxes are reduced in a step"
    )
    if share <= SCALES_WARNING:
        return text, ""
    return text, f"scales weigh {of_codes}: {_way_out(storage, param, parts)}"


def _weights_of(storage: QuantizedStorage, shard: Shard, parts: list[Component]) -> tuple[int, int]:
    sizes = sharding.stored_bytes(storage.cell.format, shard)
    codes = sum(sizes[p.name] for p in storage.cell.format.components if p.role is Role.CODES)
    return sum(sizes[p.name] for p in parts), codes


def _way_out(storage: QuantizedStorage, param: Tensor, parts: list[Component]) -> str:
    """The largest smaller shard axis, of a size that divides the present one, that keeps the scales below the limit."""
    cut = storage.shard.cut
    assert cut is not None
    sizes, placements = _placed(param)
    axis, ranks = next(
        ((a, n) for (a, n), p in zip(sizes.items(), placements, strict=True) if p != "Replicate"), ("", 1)
    )
    rows = cut.parent.shape[cut.dim]
    for fewer in (n for n in range(ranks - 1, 1, -1) if ranks % n == 0):
        shard = cut.parent.piece(cut.dim, 0, sharding.ceil_div(rows, fewer))
        shared = [p for p in parts if shard.shares_blocks(p)]
        scale_bytes, code_bytes = _weights_of(storage, shard, shared)
        if scale_bytes <= SCALES_WARNING * code_bytes:
            return f"shard {axis} over {fewer} ranks instead of {ranks} and replicate over the others (HSDP)"
    return f"{axis} of {ranks} ranks is too large for {rows} rows: replicate this weight, or leave its layer unsharded"


# Optimizer


class _States:
    """The states that an optimizer keeps for each parameter: read, not asked for, so any optimizer will do."""

    def __init__(self, optimizer: torch.optim.Optimizer | None) -> None:
        self.by_param: Mapping[Tensor, Mapping[str, Any]] = {} if optimizer is None else optimizer.state
        groups = [] if optimizer is None else optimizer.param_groups
        self.params = {param for group in groups for param in group["params"]}
        every = [self.formats(param) for param in self.params]
        self.in_8_bits = {state for formats in every for state, fmt in formats.items() if fmt == _SHORT_DTYPES["uint8"]}

    def tensors(self, param: Tensor) -> dict[str, Tensor]:
        """The local tensors of a parameter's state; without scalars beside it, such as a count of steps."""
        found = self.by_param.get(param, {})
        return {
            key: private_torch.local_tensor(value)
            for key, value in found.items()
            if isinstance(value, Tensor) and (value.ndim > 0 or param.ndim == 0)
        }

    def formats(self, param: Tensor) -> dict[str, str]:
        """State -> format. A state with scales of its own is 8-bit; the scales are part of it."""
        held = self.tensors(param)
        return {
            key: _SHORT_DTYPES.get(name := _dtype_name(value.dtype), name)
            for key, value in held.items()
            if not key.endswith(_SCALE_SUFFIX)
        }

    def bytes(self, param: Tensor) -> int:
        """Bytes of a parameter's state on this rank."""
        return sum(map(_nbytes, self.tensors(param).values()))

    def note(self, param: Tensor) -> str:
        """Which states stay in float32 although those of other parameters are 8-bit."""
        kept = [state for state, fmt in self.formats(param).items() if state in self.in_8_bits and fmt == "fp32"]
        if not kept:
            return ""
        return f"{' and '.join(kept)} stay fp32 although FP8 was asked for: 8-bit states are for 2-D parameters"


def _totals(rows: list[Row], optimized: int) -> Totals:
    summed = {
        f.name: sum(getattr(row, f.name) for row in rows) for f in fields(Totals) if f.name in Row.__annotations__
    }
    count = sum(math.prod(row.shape) for row in rows)
    return Totals(parameters=count, bf16_optimizer_bytes=optimized * BF16_OPTIMIZER_BYTES, **summed)


def _nbytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.itemsize


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
