"""Muon for quantized weights: matrices take their orthogonalized momentum as update, other parameters use AdamW.

A step first agrees on the gradients. Then, for each bucket of matrices, every rank updates the momentum of its shards
and sends them, as bfloat16, to the owners of the matrices, which orthogonalize and send them back (`matrix_exchange`),
and every rank updates its shards. `BUCKET_BYTES` bounds the extra memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from quantshard.collectives.flat_max import FlatMax
from quantshard.errors import ConfigurationError
from quantshard.numerics import adam, muon
from quantshard.numerics.adam import EXP_AVG, EXP_AVG_SQ
from quantshard.numerics.muon import MOMENTUM_BUFFER, RATE_FACTORS, MuonSettings
from quantshard.numerics.states import EMA_DECAY, StateSpec
from quantshard.optimizers.base import check_ranges
from quantshard.optimizers.elementwise import AdamOptimizer
from quantshard.optimizers.guards import FlagLayout, GradientFlags, in_order
from quantshard.optimizers.kernel_step import KernelStep, ParameterStep, StepPlan, Update, padded_size
from quantshard.optimizers.matrix_exchange import MatrixExchange, MatrixLayout, buckets
from quantshard.state_storage import ADAMW, MUON, CommonOptions, storage_arguments
from quantshard.tensor import components

BUCKET_BYTES = 1 << 27
"""Size of the bfloat16 shards that a rank sends at once; it receives about as much (see `matrix_exchange.buckets`)."""

SMALLEST_EPS = 2.0**-126
"""Smallest eps of the orthogonalization: in bfloat16 smaller values are zero on some GPUs, and make zeros NaN."""

ALGORITHM = "algorithm"
ADAMW_SETTINGS = {"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, "bias_correction": True, "adam_w_mode": True}

MUON_ENTRIES = ("momentum", "nesterov", "ns_coefficients", "ns_steps", "adjust_lr_fn")
ADAMW_ENTRIES = ("betas", "bias_correction", "adam_w_mode")
"""`MUON_ENTRIES` have no effect in "adamw" groups, and `ADAMW_ENTRIES` none in "muon" groups."""


class Muon(AdamOptimizer):
    """Muon (Jordan et al., 2024) for the matrices of hidden layers and AdamW for all other parameters.

        optimizer = Muon(muon_groups(model, adamw={"lr": 3e-4}), lr=0.02)

    Takes the arguments of `torch.optim.Muon` and updates masters as that optimizer updates float32 matrices. The
    momentum of a whole matrix is orthogonalized, so results are bitwise the same under FSDP2, HSDP and tensor
    parallelism on any number of ranks of the same hardware, software and number of CPU threads.

    Each rank orthogonalizes its share of the matrices (`matrix_exchange`). A step needs up to about 8 times 128 MiB of
    extra memory per rank, or 8 times the rank's largest whole matrix in bfloat16 if that is larger.

    The entry `algorithm` of a group chooses "muon" (default) or "adamw"; the latter takes `betas`, `eps` and
    `weight_decay` as in `FusedAdam` (`ADAMW_SETTINGS`) and its own lr. Masters, low-precision states, stochastic
    rounding, skipped steps, loading and GPU kernels work as in `FusedAdam`.

    Args:
        params: parameters, (name, parameter) pairs or groups, as in `FusedAdam`; `muon_groups` builds the groups of a
            model. "muon" groups take only matrices [rows, columns] of linear layers. Put embeddings and output heads in
            an "adamw" group.
        lr: learning rate. `group["lr"]` can be set between steps, as LR schedulers do.
        weight_decay: decoupled weight decay.
        momentum, nesterov: settings of the mean of gradients; see `numerics.muon.momentum`.
        ns_coefficients, eps, ns_steps: settings of the Newton-Schulz iteration; see `numerics.muon.orthogonalized`.
        adjust_lr_fn: how the shape of a matrix scales the learning rate. "original" (same as None), or
            "match_rms_adamw", which makes lr and weight decay values suited to AdamW valid here, and lets "adamw"
            groups inherit this lr.
        preset: "lean8" or "lean6" (`PRESETS`), which sets the storage of masters, momentum and moments, as in
            `FusedAdam`; momentum is bfloat16.
        momentum_buffer_dtype: dtype of the momentum: float32 (default), float16, bfloat16, or uint8 (FP8), which raises
            the loss (docs/optimizers.md).
        exp_avg_dtype, exp_avg_sq_dtype: dtypes of the moments in "adamw" groups; float32 by default.

    Other arguments are those of `FusedAdam`; `capturable` keeps lr in a float64 tensor.
    """

    states = (*muon.STATES, *adam.STATES)
    # Rates are multiplied before they are rounded.
    rate_dtype = torch.float64

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = muon.COEFFICIENTS,
        eps: float = muon.EPS,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
        *,
        momentum_buffer_dtype: torch.dtype | None = None,
        exp_avg_dtype: torch.dtype | None = None,
        exp_avg_sq_dtype: torch.dtype | None = None,
        **common: Unpack[CommonOptions],
    ) -> None:
        self._directions: dict[Tensor, Tensor] = {}
        defaults = dict(
            lr=lr, weight_decay=weight_decay, momentum=momentum, nesterov=nesterov, ns_coefficients=ns_coefficients,
            eps=eps, ns_steps=ns_steps, adjust_lr_fn=adjust_lr_fn, algorithm=MUON,
        )  # fmt: skip
        state_dtypes = {MOMENTUM_BUFFER: momentum_buffer_dtype, EXP_AVG: exp_avg_dtype, EXP_AVG_SQ: exp_avg_sq_dtype}
        super().__init__(params, defaults, **storage_arguments(type(self).__name__, state_dtypes, common))

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        group = _completed(self.defaults, len(self.param_groups), self._checked_group(param_group))
        super().add_param_group(group)

    def group_states(self, group: Mapping[str, Any]) -> tuple[StateSpec, ...]:
        return muon.STATES if group[ALGORITHM] == MUON else adam.STATES

    def settings(self, group: dict[str, Any]) -> Any:
        if group[ALGORITHM] != MUON:
            return super().settings(group)
        a, b, c = map(float, group["ns_coefficients"])
        return MuonSettings(
            lr=group["lr"] if self._capturable else float(group["lr"]), momentum=float(group["momentum"]),
            nesterov=group["nesterov"], weight_decay=float(group["weight_decay"]), ns_coefficients=(a, b, c),
            ns_steps=group["ns_steps"], eps=float(group["eps"]), adjust_lr_fn=group["adjust_lr_fn"] or "original",
        )  # fmt: skip

    def check_group(self, where: str, group: Mapping[str, Any]) -> None:
        if group[ALGORITHM] != MUON:
            super().check_group(where, group)
            return
        check_ranges(where, group, ("weight_decay", "momentum", EMA_DECAY, *(() if self._capturable else ("lr",))))
        if group["adjust_lr_fn"] not in (None, *RATE_FACTORS):
            raise ConfigurationError(f"{where}: adjust_lr_fn={group['adjust_lr_fn']!r}: use {', '.join(RATE_FACTORS)}")
        if not SMALLEST_EPS <= group["eps"] < math.inf:
            raise ConfigurationError(f"{where}: eps={group['eps']} is invalid: use at least {SMALLEST_EPS:g}")
        if not 0 < group["ns_steps"] < 100 or not all(map(math.isfinite, group["ns_coefficients"])):
            raise ConfigurationError(f"{where}: ns_steps={group['ns_steps']}: use 1 to 99, and finite coefficients")

    def update(
        self, param: Tensor, grad: Tensor, master: Tensor, states: Mapping[str, Tensor], settings: Any
    ) -> Update:
        """Apply Adam, or `numerics.muon` to a parameter whose orthogonalized direction is in `_directions`."""
        if not isinstance(settings, MuonSettings):
            return super().update(param, grad, master, states, settings)
        buffer, _ = muon.momentum(grad, states[MOMENTUM_BUFFER], settings)
        new = muon.muon(master, self._directions[param], tuple(param.shape[-2:]), settings)
        return new, {MOMENTUM_BUFFER: buffer}

    kernel_formula = update

    def _start_updates(self, plan: StepPlan) -> tuple[GradientFlags, list[ParameterStep]]:
        assert isinstance(plan, MatrixPlan)
        size = plan.workspace_size

        @cache
        def workspace(device: torch.device) -> Tensor:
            return torch.empty(size, dtype=torch.bfloat16, device=device)

        in_kernels = [bucket.kernels.take(self._seed, workspace) for bucket in plan.buckets]
        in_kernels.append(plan.kernels.take(self._seed))
        exceeding = None
        if any(in_kernels):
            parts = [(bucket.indices, bucket.kernels.exceeding()) for bucket in plan.buckets]
            if plan.other_indices:
                parts.append((plan.other_indices, plan.kernels.exceeding()))
            exceeding = in_order(parts, len(plan.items), plan.items[0].local.device)
        flags = self._reduce_flags(plan, FlatMax(), exceeding)
        bad = flags.send() if any(in_kernels) and not self._capturable else flags.bad()
        undone_on_device = self._capturable or (flags.deferred and self._master_weights)
        if not any(in_kernels) and not self._capturable and bad:
            # The caller reads the same flags, and warns.
            return flags, []
        for bucket in plan.buckets:
            self._step_matrices(bucket, bad, undone_on_device)
        return flags, plan.kernels.update(bad)

    def _step_matrices(self, bucket: MatrixBucket, bad: Tensor, undone_on_device: bool) -> None:
        """Orthogonalize the momentum of a bucket and update its parameters, unless `bad`. A collective call.

        `undone_on_device`: the host does not read `bad`, and the device undoes updates in PyTorch. Otherwise they are
        not run at all, because a write that is undone still counts as a write.
        """
        work, in_kernels = bucket.work, bucket.kernels.make_directions()
        shards = (in_kernels[i] if i in in_kernels else _to_orthogonalize(item) for i, item in enumerate(work))
        owned = {
            number: matrix if work[number].grad is None else _orthogonalized(matrix, work[number])
            for number, matrix in bucket.exchange.gather(shards)
        }
        scattered = bucket.exchange.scatter(owned)
        directions = [shard.to(item.local.device) for item, shard in zip(work, scattered, strict=True)]
        self._directions = dict(zip((item.param for item in bucket.work), directions, strict=True))
        bucket.kernels.set_directions(directions)
        remaining = bucket.kernels.update(bad)
        if remaining and (undone_on_device or not bad):
            for item in remaining:
                item.finish(bad if undone_on_device else None)
        self._directions = {}

    def _new_plan(self, items: list[ParameterStep], flags: FlagLayout) -> MatrixPlan:
        matrices = [index for index, item in enumerate(items) if item.specs is muon.STATES]
        elementwise = [index for index, item in enumerate(items) if item.specs is not muon.STATES]
        layouts = [MatrixLayout.of(items[index].param) for index in matrices]
        result = []
        for numbers in buckets(layouts, BUCKET_BYTES):
            indices, exchange = [matrices[number] for number in numbers], MatrixExchange([layouts[n] for n in numbers])
            work = [items[index] for index in indices]
            result.append(MatrixBucket(indices, work, exchange, KernelStep(work, self._uses_kernels)))
        sizes = [sum(padded_size(item.local.numel()) for item in bucket.work) for bucket in result]
        kernels = KernelStep([items[index] for index in elementwise], self._uses_kernels)
        return MatrixPlan(items, flags, kernels, result, max(sizes, default=0), elementwise)


class MatrixBucket(NamedTuple):
    """Matrices that are orthogonalized together. `indices`: their indices among the parameters of the step."""

    indices: list[int]
    work: list[ParameterStep]
    exchange: MatrixExchange
    kernels: KernelStep


@dataclass(frozen=True)
class MatrixPlan(StepPlan):
    """A step's buckets of matrices, which use one workspace in turn, and other parameters, which Adam steps."""

    buckets: list[MatrixBucket]
    workspace_size: int
    other_indices: list[int]

    @property
    def is_captured(self) -> bool:
        return any(kernels.is_captured for kernels in (self.kernels, *(bucket.kernels for bucket in self.buckets)))


def _to_orthogonalize(item: ParameterStep) -> Tensor:
    """Return this rank's shard of the matrix to orthogonalize, bfloat16; zeros without a gradient."""
    buffer = item.targets[MOMENTUM_BUFFER].read()
    if item.grad is None:
        return torch.zeros_like(buffer, dtype=torch.bfloat16)
    return muon.momentum(item.grad, buffer, item.group.settings)[1].to(torch.bfloat16)


def _orthogonalized(matrix: Tensor, item: ParameterStep) -> Tensor:
    """Orthogonalize a matrix, or each matrix of a stack."""
    rows = item.storage.spec.format.matrix_rows if item.storage is not None else 0
    parts = [muon.orthogonalized(part, item.group.settings) for part in matrix.split(rows or len(matrix))]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _is_matrix(param: Tensor) -> bool:
    """Whether Muon can update a parameter: a matrix, or a quantized stack of matrices."""
    return param.ndim == 2 or components.quantized_local(param) is not None


def muon_groups(
    model: nn.Module, *, head: str | Iterable[str] | None = None, adamw: Mapping[str, Any] | None = None
) -> list[dict[str, Any]]:
    """Split a model's named parameters into groups for `Muon`: matrices of hidden layers, and everything else for
    AdamW.

    AdamW gets embeddings (weights of `nn.Embedding` and parameters tied to them), the output head, and all parameters
    that are not 2-D: norms, biases, stacked experts in high precision. Vectors get no weight decay.

        optimizer = Muon(muon_groups(model, head="lm_head", adamw={"lr": 3e-4, "betas": (0.9, 0.95)}), lr=0.02)

    Args:
        model: the model, already sharded if it will be.
        head: names or patterns (such as `*.gate.weight`) of modules or parameters for AdamW: the layer that computes
            the logits, and any others. () means that there is none. By default the head is detected from
            `get_output_embeddings` (transformers models) or from being tied to an embedding.
        adamw: entries of the "adamw" groups: lr, betas, eps, weight_decay (for parameters with two dims or more).
    """
    if unknown := sorted({*(adamw or {})} - {"lr", *ADAMW_SETTINGS}):
        raise ConfigurationError(f"muon_groups(adamw={unknown}): use lr, {', '.join(ADAMW_SETTINGS)}")
    named = list(model.named_parameters())
    embedded = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    adamw_ids = embedded | (_found_head(model, embedded) if head is None else _matching(named, head))
    matrices, embeddings, vectors = list[Any](), list[Any](), list[Any]()
    for name, param in named:
        is_muon = _is_matrix(param) and id(param) not in adamw_ids
        (matrices if is_muon else embeddings if param.ndim > 1 else vectors).append((name, param))
    settings = {ALGORITHM: ADAMW, **(adamw or {})}
    result: list[dict[str, Any]] = [
        {"params": matrices, ALGORITHM: MUON},
        {"params": embeddings, **settings},
        {"params": vectors, **settings, "weight_decay": 0.0},
    ]
    return [group for group in result if group["params"]]


def _found_head(model: nn.Module, embedded: set[int]) -> set[int]:
    output = getattr(model, "get_output_embeddings", lambda: None)()
    if isinstance(output, nn.Module):
        return {id(param) for param in output.parameters(recurse=False)}
    layers = [module for module in model.modules() if not isinstance(module, nn.Embedding)]
    if any(id(param) in embedded for layer in layers for param in layer.parameters(recurse=False)):
        return set()  # tied to an embedding
    weighted_modules = [name for name, module in model.named_modules() if getattr(module, "weight", None) is not None]
    last = weighted_modules[-1] if weighted_modules else "lm_head"
    remedy = f"name it, as head={last!r}, or give head=() if there is none"
    raise ConfigurationError(f"muon_groups(model): the layer that computes the logits is not known; {remedy}")


def _matching(named: Sequence[tuple[str, Tensor]], patterns: str | Iterable[str]) -> set[int]:
    """Return the ids of the parameters whose name, or the name of a module around them, matches a pattern."""
    matched = set()
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        paths = {id(param): accumulate(name.split("."), "{}.{}".format) for name, param in named}
        ids = [key for key, names in paths.items() if any(fnmatchcase(path, pattern) for path in names)]
        if not ids:
            first_names = ", ".join(name for name, _ in named[:5])
            problem = f"no module or parameter has that name; parameters are {first_names}, ..."
            raise ConfigurationError(f"muon_groups(head={pattern!r}): {problem}")
        matched.update(ids)
    return matched


def _completed(defaults: Mapping[str, Any], number: int, group: dict[str, Any]) -> dict[str, Any]:
    """Return the group to add as number `number`, with the defaults of "adamw" groups filled in if it is one."""
    where, algorithm = f"Muon: param_groups[{number}]", group.setdefault(ALGORITHM, defaults[ALGORITHM])
    if algorithm not in (MUON, ADAMW):
        raise ConfigurationError(f"{where}: {ALGORITHM}={algorithm!r}; use {MUON!r} or {ADAMW!r}")
    if unused := [name for name in (ADAMW_ENTRIES if algorithm == MUON else MUON_ENTRIES) if name in group]:
        raise ConfigurationError(f"{where}: {', '.join(unused)} has no effect with {algorithm=}; remove it")
    if algorithm == ADAMW:
        if "lr" not in group and defaults["adjust_lr_fn"] != "match_rms_adamw":
            raise ConfigurationError(f"{where}: set lr; only adjust_lr_fn='match_rms_adamw' makes Muon's suit AdamW")
        return {**ADAMW_SETTINGS, **group}
    named = [item if isinstance(item, tuple) else (f"parameter {i}", item) for i, item in enumerate(group["params"])]
    invalid = [f"{name} {tuple(param.shape)}" for name, param in named if not _is_matrix(param)]
    if invalid:
        remedy = f"put all {len(invalid)} such parameters into an {ADAMW!r} group, as muon_groups does"
        raise ConfigurationError(f"{where}: not 2-D: {', '.join(invalid[:3])}; {remedy}")
    return group
