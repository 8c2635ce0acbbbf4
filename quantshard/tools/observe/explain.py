"""Reports what a model costs on this rank, and why: one row per parameter.

Nothing here communicates or reads a value, so `explain` works on the meta device, before or after the first step, and
on a single rank. Bytes of codes and scales come from the live components; all-gather bytes come from the slots that
FSDP2 sends (`sharding.gather_slots`). The BF16 figures are for the same model on the same mesh with BF16 weights,
float32 masters and float32 moments.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from quantshard import private_torch, recipe as recipes
from quantshard.errors import FallbackError, warn_user
from quantshard.formats import Role
from quantshard.gemm import predictions
from quantshard.modules.chunked_loss import DESCRIPTION
from quantshard.modules.contexts.context import autocast
from quantshard.private_torch import FsdpGather
from quantshard.recipe import Recipe
from quantshard.sharding import Shard
from quantshard.state_storage import scaled_state
from quantshard.tensor import components
from quantshard.tensor.storage import QuantizedStorage
from quantshard.tools.observe import costs
from quantshard.tools.observe.table import Report

_REMAINDER_SUFFIX = "_low"
"""Suffix of the state with the low bits of a master; the parameter has the high bits."""

_FEW = 4


def explain(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    recipe: str | Recipe | None = None,
    *,
    strict: bool = False,
) -> Report:
    """Report what each parameter of a model costs on this rank, and how its GEMMs run.

    Warns about trained parameters that the optimizer lacks, and about parameters of the optimizer that the model lacks.

    Args:
        model: any module on any device, wrapped by `fully_shard` or not. If wrapped: the outermost module.
        optimizer: `FusedAdam`, or any other optimizer that keeps tensors in `optimizer.state`.
        recipe: the recipe of autocast; layers with a recipe of their own use that one. Without `recipe`, quantized
            weights use the recipe that quantized them, and others run in high precision.
        strict: raise a `FallbackError` if anything falls back.
    """
    base_recipe = None if recipe is None else recipes.resolve(recipe)
    gathers = private_torch.fsdp_gathers(model)
    compiled = {part for module in model.modules() if private_torch.is_compiled(module) for part in module.modules()}
    states = _OptimizerStates(optimizer)
    rows, names, optimized = [], dict[Tensor, str](), 0
    losses = {text: None for module in model.modules() if (text := getattr(module, DESCRIPTION, ""))}
    attention: list[tuple[str, str]] = []
    first_param = next(model.parameters(), None)
    for prefix, module in model.named_modules():
        if first_param is not None and hasattr(module, "describe_backend"):
            backend = module.describe_backend(_device(first_param), first_param.dtype)
            attention.append((prefix, f"attention by {backend}"))
        for param_name, registered in module.named_parameters(recurse=False):
            gathered = gathers.get((id(module), param_name))
            # FSDP2 may have registered the unsharded parameter.
            param = registered if gathered is None else gathered.param
            if param not in names:
                name = names[param] = f"{prefix}.{param_name}" if prefix else param_name
                rows.append(_row(name, param_name, module, param, gathered, states, base_recipe, module in compiled))
                optimized += private_torch.local_tensor(param).numel() if param in states.params else 0
    if optimizer is not None:
        _warn_of_differences(names, optimizer)
    report = Report.of(rows, optimized * costs.BF16_OPTIMIZER_BYTES, attention, losses)
    if strict and report.fallbacks:
        raise FallbackError("strict: " + "\n".join(report.fallbacks))
    return report


def _warn_of_differences(names: Mapping[Tensor, str], optimizer: torch.optim.Optimizer) -> None:
    """Warn about trained parameters that the optimizer lacks, and about its parameters that `names` lacks."""
    kind = type(optimizer).__name__
    optimized = {param for group in optimizer.param_groups for param in group["params"]}
    if strange := len(optimized - names.keys()):
        advice = "build it after convert and fully_shard"
        warn_user(f"{strange} of the {len(optimized)} parameters of {kind} are not in this model; {advice}")
    missing = [name for param, name in names.items() if param.requires_grad and param not in optimized]
    if missing and strange < len(optimized):
        more = f" and {len(missing) - _FEW} more" if len(missing) > _FEW else ""
        warn_user(f"{', '.join(missing[:_FEW])}{more}: trained, but not in this {kind}; pass model.named_parameters()")


def _row(
    name: str,
    leaf: str,
    module: nn.Module,
    param: Tensor,
    gathers: FsdpGather | None,
    states: _OptimizerStates,
    chosen: Recipe | None,
    is_compiled: bool,
) -> costs.Row:
    local = private_torch.local_tensor(param)
    storage = components.quantized_storage(param)
    if chosen is not None:
        chosen = recipe_in(module, chosen)
    gather_count, plain_sent, numel = 0, 0, local.numel()
    if gathers is not None:
        gather_count = (2 if gathers.in_backward else 1) if gathers.ranks > 1 else 0
        # FSDP2 keeps the sizes of the first gather.
        plain_sent = gathers.padded_numel * (gathers.dtype or local.dtype).itemsize
        # a high-precision tensor in the weight's place, which FSDP2 pads to the largest shard
        cut = None if storage is None else storage.shard.cut
        numel = gathers.padded_numel if cut is None else cut.chunk * cut.parent.shape[1]
    mesh, placements = _placed(param)
    recipe, is_traced = recipe_in(module, chosen), getattr(module, "is_traced", None)
    gemm = gemm_of(leaf, module, param, recipe)
    if is_compiled and gemm.path and is_traced is not None:
        setting = autocast(enabled=recipe is not None, recipe=recipe).setting
        if not is_traced(setting, torch.empty(0, dtype=param.dtype, device=_device(param))):
            gemm = gemm._replace(fallbacks=(*gemm.fallbacks, "between graphs"))
    return row_of(
        name,
        param,
        storage,
        gemm,
        states.of(param),
        stored=(numel * local.itemsize, 0) if storage is None else _resident(storage),
        numel=numel,
        plain_sent=plain_sent,
        gather_count=gather_count,
        shard=None if storage is None else storage.shard,
        elements=local.numel() if storage is None else math.prod(storage.shard.shape),
        mesh=mesh,
        placements=placements,
        local_rows=_local_rows(param, storage),
    )


def row_of(
    name: str,
    param: Tensor,
    storage: QuantizedStorage | None,
    gemm: GemmPath,
    optimizer: tuple[dict[str, str], dict[str, int], bool],
    *,
    stored: tuple[int, int],
    numel: int,
    plain_sent: int,
    gather_count: int,
    shard: Shard | None,
    elements: int,
    mesh: dict[str, int],
    placements: tuple[str, ...],
    local_rows: tuple[int, int],
) -> costs.Row:
    """Build the row of a parameter.

    Args:
        optimizer: state -> format, state -> bytes, and whether states stay float32 although scaled ones were requested.
        stored: bytes of codes and of scales.
        numel: number of local elements, with FSDP2's padding.
        plain_sent: bytes sent in one all-gather of a plain parameter.
        gather_count: number of all-gathers in a forward and a backward.
        shard: what this rank stores of a quantized parameter.
    """
    states, sizes, has_float32 = optimizer
    shared, sent = costs.SharedScaleCost(), plain_sent if gather_count else 0
    if storage is not None and shard is not None:
        shared = costs.shared(storage.spec.format, shard, mesh, placements)
        if gather_count:
            sent = costs.gather_bytes(storage.spec.format, shard, in_backward=gather_count == 2)
    return costs.Row(
        name=name,
        shape=tuple(param.shape),
        dtype=dtype_name(param.dtype),
        format=dtype_name(param.dtype) if storage is None else storage.spec.tag,
        code_bytes=stored[0],
        scale_bytes=stored[1],
        shared_scale_bytes=shared.scale_bytes,
        bf16_bytes=numel * costs.BF16_BYTES,
        forward_gather_bytes=sent,
        backward_gather_bytes=sent if gather_count == 2 else 0,
        bf16_gather_bytes=numel * costs.BF16_BYTES * gather_count,
        reduced_bytes=shared.reduced_bytes,
        gemm=gemm.path,
        gemm_reason=gemm.reason,
        optimizer=states,
        optimizer_bytes=sum(sizes.values()),
        state_sizes=sizes,
        elements=elements,
        mesh=mesh,
        placements=placements,
        local_rows=local_rows,
        fallbacks=(*gemm.fallbacks, *["replicated scales"] * bool(shared.warning), *["float32 states"] * has_float32),
        notes=(shared.note,) if shared.note else (),
        warnings=(shared.warning,) if shared.warning else (),
    )


def _resident(storage: QuantizedStorage) -> tuple[int, int]:
    roles = {name: storage.spec.format.by_name[name].role for name in storage.components}
    codes = sum(part.nbytes for name, part in storage.components.items() if roles[name] is Role.CODES)
    return codes, sum(part.nbytes for part in storage.components.values()) - codes


class GemmPath(NamedTuple):
    """How a parameter's GEMMs run: "native", "emulated" or "" (no GEMM), the reason, and the fallbacks they use."""

    path: str = ""
    reason: str = ""
    fallbacks: tuple[str, ...] = ()


def recipe_in(module: nn.Module, around: Recipe | None) -> Recipe | None:
    """The recipe of a module's GEMMs in an autocast of `around`; None: the recipe that the module was built for."""
    module_recipe_in: Any = getattr(module, "recipe_in", None)
    return around if module_recipe_in is None else module_recipe_in(around)


def gemm_of(
    leaf: str, module: nn.Module, param: Tensor, chosen: Recipe | None = None, device: torch.device | None = None
) -> GemmPath:
    """Describe how the GEMMs of a module's parameter `leaf` run under a recipe on `device` (default: its own)."""
    # fully_shard replaces a module's class by FSDPLinear(FSDPModule, Linear)
    kind = next(base for base in type(module).__mro__ if not issubclass(base, FSDPModule))
    is_quantshard = kind.__module__.split(".")[:2] == [__name__.split(".")[0], "modules"]
    is_operand = not is_quantshard or leaf in getattr(module, "_weights", ())
    storage = components.quantized_storage(param)
    if (param.ndim != 2 and storage is None) or "Embedding" in kind.__name__ or not is_operand:
        return GemmPath()
    device = device or _device(param)
    describe: Any = getattr(module, "joint_fallbacks", None)
    joint = () if describe is None else describe(chosen, device)
    if storage is not None:
        if storage.spec.format.matrix_rows:
            if 0 in storage.shape:
                return GemmPath()
            storage = storage.matrix(0)
        return GemmPath(
            *predictions.gemm_path(storage.spec, device, chosen),
            (*predictions.fallbacks(storage, chosen, device), *joint),
        )
    if not is_quantshard:
        path, reason = predictions.gemm_path(None, device)
        fallbacks = ("foreign module",) if chosen is not None and chosen.table else ()
        gemm_reason = getattr(module, "gemm_reason", f"{kind.__name__} is not one of quantshard's modules")
        return GemmPath(path, f"{reason}: {gemm_reason}", fallbacks)
    path, reason = predictions.gemm_path(None if chosen is None else chosen.weight, device, chosen)
    if chosen is not None and chosen.table:
        reason = f"quantized for each forward under autocast(recipe={chosen.name!r}): {reason}"
    return GemmPath(path, reason, (*predictions.fallbacks(None, chosen, device), *joint))


def _device(param: Tensor) -> torch.device:
    if not param.is_meta:
        return param.device
    return torch.device(param.device_mesh.device_type if isinstance(param, DTensor) else "cpu")


def _placed(param: Tensor) -> tuple[dict[str, int], tuple[str, ...]]:
    if not isinstance(param, DTensor):
        return {}, ()
    mesh = param.device_mesh
    names = mesh.mesh_dim_names or tuple(f"axis {axis}" for axis in range(mesh.ndim))
    placements = tuple(
        costs.REPLICATED if p.is_replicate() else f"{'Shard' if p.is_shard() else 'StridedShard'}({p.dim})"  # type: ignore[attr-defined]
        for p in param.placements
    )
    return {name: mesh.size(axis) for axis, name in enumerate(names)}, placements


def _local_rows(param: Tensor, storage: QuantizedStorage | None) -> tuple[int, int]:
    if storage is not None:
        return storage.shard.extents[0]
    if param.ndim == 0:
        return (0, 1)
    first = private_torch.global_offset(param)[0]
    return (first, first + private_torch.local_tensor(param).shape[0])


class _OptimizerStates:
    """States that an optimizer of any class has for each parameter, read from `optimizer.state`."""

    def __init__(self, optimizer: torch.optim.Optimizer | None) -> None:
        self.by_param: Mapping[Tensor, Mapping[str, Any]] = {} if optimizer is None else optimizer.state
        groups = [] if optimizer is None else optimizer.param_groups
        self.params = {param for group in groups for param in group["params"]}
        self.scaled = {scaled_state(key) for param in self.params for key in self.tensors(param)}

    def tensors(self, param: Tensor) -> dict[str, Tensor]:
        """Local tensors of a parameter's state, without scalars such as a step count."""
        states = self.by_param.get(param, {})
        return {
            key: private_torch.local_tensor(value)
            for key, value in states.items()
            if isinstance(value, Tensor) and (value.ndim > 0 or param.ndim == 0)
        }

    def of(self, param: Tensor) -> tuple[dict[str, str], dict[str, int], bool]:
        """Return formats and bytes of states, as `row_of` takes them; scales and remainders count for their state."""
        formats: dict[str, str] = {}
        sizes: Counter[str] = Counter()
        for key, value in self.tensors(param).items():
            state = scaled_state(key) or key.removesuffix(_REMAINDER_SUFFIX)
            sizes[state] += value.nbytes
            if key.endswith(_REMAINDER_SUFFIX):
                formats[state] = costs.SPLIT if value.ndim == param.ndim else costs.REMAINDER
            elif not scaled_state(key):
                formats[state] = costs.SHORT_DTYPES.get(name := dtype_name(value.dtype), name)
        return formats, dict(sizes), any(state in self.scaled and fmt == "fp32" for state, fmt in formats.items())


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
