"""Muon for quantized weights: matrices take their orthogonalized momentum as update, other parameters use AdamW.

A step first agrees on the gradients in one collective. Then, for each bucket of matrices, every rank updates the
momentum of its shards and sends them, as bfloat16, to the owners of the matrices. Owners orthogonalize and send the
shards back (`matrix_exchange`), and every rank updates its shards, in kernels or in PyTorch. `BUCKET_BYTES` bounds the
extra memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from quantshard import private_torch
from quantshard.collectives.flat_max import FlatMax
from quantshard.errors import ConfigurationError
from quantshard.numerics import adam, muon
from quantshard.numerics.adam import EXP_AVG, EXP_AVG_SQ
from quantshard.numerics.muon import MOMENTUM_BUFFER, RATE_FACTORS, MuonSettings
from quantshard.numerics.states import EMA_DECAY, StateSpec
from quantshard.optimizers import guards, kernel_step, matrix_groups
from quantshard.optimizers.adam_optimizer import AdamOptimizer
from quantshard.optimizers.base import check_ranges
from quantshard.optimizers.kernel_step import CommonOptions, KernelStep, MatrixWorkspace, rounded_up
from quantshard.optimizers.matrix_exchange import MatrixExchange, MatrixLayout, buckets
from quantshard.optimizers.matrix_groups import ALGORITHM
from quantshard.optimizers.rounding import TensorRegion
from quantshard.optimizers.step import ParameterStep, StepPlan, Update, UpdateFormula
from quantshard.state_storage import MUON

if TYPE_CHECKING:
    from typing_extensions import Unpack

BUCKET_BYTES = 1 << 27
"""Size of the bfloat16 shards that a rank sends at once; it receives about as much (see `matrix_exchange.buckets`)."""


SMALLEST_EPS = 2.0**-126
"""Smallest eps of the orthogonalization: in bfloat16 smaller values are zero on some GPUs, and make zeros NaN."""


class Muon(AdamOptimizer):
    """Muon (Jordan et al., 2024) for the matrices of hidden layers and AdamW for all other parameters.

        optimizer = Muon(muon_groups(model, adamw={"lr": 3e-4}), lr=0.02)

    Takes the arguments of `torch.optim.Muon` and updates masters as that optimizer updates float32 matrices. The
    momentum of a whole matrix is orthogonalized, so results are bitwise the same under FSDP2, HSDP and tensor
    parallelism on any number of ranks, including uneven and empty shards. They also depend on the hardware, the
    software versions and the number of CPU threads.

    Each rank orthogonalizes its share of the matrices. Shards travel to the owner of a matrix and back in one bfloat16
    all-to-all per mesh axis and bucket. A step needs up to about 8 times 128 MiB of extra memory per rank, or 8 times
    the rank's largest whole matrix in bfloat16 if that is larger. Replicas (HSDP, DDP) each repeat the work.

    The entry `algorithm` of a group chooses "muon" (default) or "adamw"; the latter takes `betas`, `eps` and
    `weight_decay` as in `FusedAdam` (`ADAMW_SETTINGS`) and its own lr. All groups form one optimizer: a step is taken
    or skipped for all of them, and one state dict holds all states. A matrix keeps a master and the momentum: 8 bytes
    per parameter in float32. Masters, low-precision states, stochastic rounding, skipped steps, loading and GPU kernels
    work as in `FusedAdam`; only the orthogonalization runs as PyTorch matrix products.

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
        momentum_buffer_dtype: dtype of the momentum: float32 (default), float16, bfloat16, or uint8 (FP8). The rounding
            errors of FP8 are amplified together with the smallest singular values and raise the loss
            (docs/optimizers.md).
        exp_avg_dtype, exp_avg_sq_dtype: dtypes of the moments in "adamw" groups; float32 by default.

    Other arguments are those of `FusedAdam`; `capturable` keeps lr in a float64 tensor.

    Raises:
        ConfigurationError: an argument is invalid, or a "muon" group has a parameter that is not a matrix.
        RankMismatchError: ranks have different random keys for a weight, or different seeds.
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
        self._matrix_plan: MatrixPlan | None = None
        self._captured: list[KernelStep] = []  # kept alive: CUDA graphs read their tables by address
        defaults = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_coefficients": ns_coefficients,
            "eps": eps,
            "ns_steps": ns_steps,
            "adjust_lr_fn": adjust_lr_fn,
            ALGORITHM: MUON,
        }
        state_dtypes = {MOMENTUM_BUFFER: momentum_buffer_dtype, EXP_AVG: exp_avg_dtype, EXP_AVG_SQ: exp_avg_sq_dtype}
        super().__init__(params, defaults, state_dtypes, **common)

    # Groups ----------------------------------------------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a "muon" or "adamw" group; see `MasterOptimizer.add_param_group`.

        Raises:
            ConfigurationError: also if a parameter of a "muon" group is not a matrix, or an "adamw" group has no lr.
        """
        group = matrix_groups.completed(self.defaults, len(self.param_groups), self._checked_group(param_group))
        super().add_param_group(group)

    def group_states(self, group: Mapping[str, Any]) -> tuple[StateSpec, ...]:
        """Return the states of a group's parameters: momentum, or Adam's moments."""
        return muon.STATES if group[ALGORITHM] == MUON else adam.STATES

    def _formula(self, group: Mapping[str, Any]) -> UpdateFormula:
        if group[ALGORITHM] == MUON:
            return UpdateFormula(self._name, muon.STATES, self._muon_update)
        return super()._formula(group)

    def settings(self, group: dict[str, Any]) -> Any:
        """Return the hyperparameters of a group for this step: MuonSettings or Adam's Hyperparameters."""
        if group[ALGORITHM] != MUON:
            return super().settings(group)
        a, b, c = map(float, group["ns_coefficients"])
        return MuonSettings(
            lr=group["lr"] if self._capturable else float(group["lr"]),
            momentum=float(group["momentum"]),
            nesterov=group["nesterov"],
            weight_decay=float(group["weight_decay"]),
            ns_coefficients=(a, b, c),
            ns_steps=group["ns_steps"],
            eps=float(group["eps"]),
            adjust_lr_fn=group["adjust_lr_fn"] or "original",
        )

    def check_group(self, where: str, group: Mapping[str, Any]) -> None:
        """Validate a group's values.

        Raises:
            ConfigurationError: a value is invalid.
        """
        if group[ALGORITHM] != MUON:
            super().check_group(where, group)
            return
        check_ranges(where, group, ("weight_decay", "momentum", EMA_DECAY, *(() if self._capturable else ("lr",))))
        if group["adjust_lr_fn"] not in (None, *RATE_FACTORS):
            raise ConfigurationError(
                f"{where}: adjust_lr_fn={group['adjust_lr_fn']!r} is invalid: use {', '.join(RATE_FACTORS)} or None"
            )
        if not SMALLEST_EPS <= group["eps"] < math.inf:
            raise ConfigurationError(f"{where}: eps={group['eps']} is invalid: use at least {SMALLEST_EPS:g}")
        if not 0 < group["ns_steps"] < 100 or not all(map(math.isfinite, group["ns_coefficients"])):
            raise ConfigurationError(
                f"{where}: ns_steps={group['ns_steps']}, ns_coefficients={group['ns_coefficients']}: use 1 to 99 steps "
                "and finite coefficients"
            )

    # Step ------------------------------------------------------------------------------------------------------------

    def _muon_update(
        self, param: Tensor, grad: Tensor, master: Tensor, states: Mapping[str, Tensor], settings: MuonSettings
    ) -> Update:
        """Apply `numerics.muon` to one parameter, whose orthogonalized direction is in `_directions`."""
        buffer, _ = muon.momentum(grad, states[MOMENTUM_BUFFER], settings)
        new = muon.muon(master, self._directions[param], tuple(param.shape), settings)
        return new, {MOMENTUM_BUFFER: buffer}

    def _measured(self, plan: StepPlan) -> tuple[guards.GradientFlags, list[ParameterStep]]:
        matrices = self._current_matrix_plan(plan)
        workspace = MatrixWorkspace(matrices.workspace_size)
        in_kernels = [bucket.kernels.take(bucket.work, self._seed, workspace=workspace) for bucket in matrices.buckets]
        adam_in_kernels = self._has_kernels and self._kernels.take(matrices.others, self._seed, self._is_bounded)
        parts = [
            *[(each.indices, each.kernels, used) for each, used in zip(matrices.buckets, in_kernels, strict=True)],
            (matrices.other_indices, self._kernels, adam_in_kernels),
        ]
        on_kernels = any(uses_kernels for _, _, uses_kernels in parts)
        flags = self._flags(plan, FlatMax(), _exceeding(plan.items, parts) if on_kernels else None)
        skips = _StepSkip(flags, on_kernels, self._capturable)
        if not on_kernels and not self._capturable and skips.on_host:
            # The caller reads the same flags, and warns.
            return flags, []
        for bucket, uses_kernels in zip(matrices.buckets, in_kernels, strict=True):
            self._step_matrices(bucket, skips, uses_kernels)
        if adam_in_kernels:
            return flags, self._kernels.update(skips.on_device)
        _measure(matrices.others)
        return flags, matrices.others

    def _step_matrices(self, bucket: MatrixBucket, skips: _StepSkip, on_kernels: bool) -> None:
        """Orthogonalize the momentum of a bucket and update its parameters; a skipped step leaves them unchanged or
        restores them.

        A collective call if the matrices are sharded.
        """
        work = bucket.work
        kernel_directions = bucket.kernels.made_directions() if on_kernels else {}
        directions = self._orthogonalized(work, bucket.exchange, kernel_directions)
        self._directions = dict(zip((item.param for item in work), directions, strict=True))
        remaining = work
        if on_kernels:
            bucket.kernels.give_directions(directions)
            remaining = bucket.kernels.update(skips.on_device)
        else:
            _measure(work)
        by_device = self._capturable or (skips.deferred and self._master_weights)
        if remaining and (by_device or not skips.on_host):
            for item in remaining:
                item.finish(skips.on_device if by_device else None)
        self._directions = {}

    @staticmethod
    def _orthogonalized(
        work: list[ParameterStep], exchange: MatrixExchange, made: Mapping[int, Tensor]
    ) -> list[Tensor]:
        """Return this rank's shard of the orthogonalized momentum of each parameter, as bfloat16. A collective call.

        `made`: momentum shards that kernels already computed, by index in `work`.
        """
        parts = (made[index] if index in made else _to_orthogonalize(item) for index, item in enumerate(work))
        matrices = exchange.gather(parts)
        owned = {
            number: matrix if work[number].grad is None else muon.orthogonalized(matrix, work[number].group.settings)
            for number, matrix in matrices
        }
        return [
            part.to(private_torch.local_tensor(item.param).device)
            for item, part in zip(work, exchange.scatter(owned), strict=True)
        ]

    def _finished(self, applied: bool) -> None:
        super()._finished(applied)
        for bucket in () if self._matrix_plan is None else self._matrix_plan.buckets:
            bucket.kernels.finished(applied)

    def _current_matrix_plan(self, plan: StepPlan) -> MatrixPlan:
        """Return the buckets of a step's matrices; made again if the plan of the step was."""
        if self._matrix_plan is None or self._matrix_plan.plan is not plan:
            if self._matrix_plan is not None:
                self._captured += [bucket.kernels for bucket in self._matrix_plan.buckets if bucket.kernels.is_captured]
            self._matrix_plan = MatrixPlan.of(plan)
        return self._matrix_plan


class MatrixBucket(NamedTuple):
    """Matrices that are orthogonalized together.

    `indices`: indices among the parameters of the step. `work`: their steps. `exchange`: gathers and scatters them.
    `kernels`: updates them.
    """

    indices: list[int]
    work: list[ParameterStep]
    exchange: MatrixExchange
    kernels: KernelStep


class MatrixPlan(NamedTuple):
    """The parameters of a step: buckets of matrices, and the others, which Adam steps.

    `workspace_size`: number of elements of the largest bucket; see `MatrixWorkspace`.
    """

    plan: StepPlan
    buckets: list[MatrixBucket]
    workspace_size: int
    other_indices: list[int]
    others: list[ParameterStep]

    @staticmethod
    def of(plan: StepPlan) -> MatrixPlan:
        """Divide the parameters of a step into buckets."""
        items = plan.items
        matrices = [i for i, item in enumerate(items) if isinstance(item.group.settings, MuonSettings)]
        others = [i for i, item in enumerate(items) if not isinstance(item.group.settings, MuonSettings)]
        layouts = [MatrixLayout.of(items[i].param) for i in matrices]
        result = []
        for numbers in buckets(layouts, BUCKET_BYTES):
            indices = [matrices[number] for number in numbers]
            exchange = MatrixExchange([layouts[number] for number in numbers])
            for position, index in enumerate(indices):
                exchange.check_part(position, TensorRegion.of_local(items[index].param))
            result.append(MatrixBucket(indices, [items[index] for index in indices], exchange, KernelStep()))
        sizes = [sum(rounded_up(item.local.numel()) for item in bucket.work) for bucket in result]
        return MatrixPlan(plan, result, max(sizes, default=0), others, [items[i] for i in others])


class _StepSkip:
    """Whether a step is skipped: a bool scalar for the device and, if the host reads it, a bool for the host.

    Kernels read the device's flag. Updates in PyTorch are not run at all if the host already knows the flag, because a
    write that is undone still counts as a write. `deferred`: reading the flag on the host would wait for the device.
    """

    def __init__(self, flags: guards.GradientFlags, is_sent: bool, capturable: bool) -> None:
        self._flags = flags
        self._sent = flags.send() if is_sent and not capturable else None
        self.deferred = flags.deferred

    @cached_property
    def on_device(self) -> Tensor:
        return self._flags.bad() if self._sent is None else self._sent

    @cached_property
    def on_host(self) -> bool:
        # Not called while a CUDA graph is captured.
        return bool(self.on_device)


def _exceeding(work: Sequence[ParameterStep], parts: Iterable[tuple[list[int], KernelStep, bool]]) -> Tensor:
    """Return `numerics.exceeds` of each gradient, float32 [parameters]; `parts` says which ones kernels process."""
    device = private_torch.local_tensor(work[0].param).device
    columns = [torch.zeros((), dtype=torch.float32, device=device)] * len(work)
    for indices, kernels, uses_kernels in parts:
        flags = (
            kernels.exceeding()
            if uses_kernels
            else kernel_step.exceeding([work[number].grad for number in indices], device)
        )
        for index, flag in zip(indices, flags.to(device).unbind(), strict=True):
            columns[index] = flag
    return torch.stack(columns)


def _measure(work: Iterable[ParameterStep]) -> None:
    """Agree on the amaxes of blocks that ranks share, in one collective."""
    reduction = FlatMax()
    for item in work:
        item.measure(reduction)
    reduction.reduce()


def _to_orthogonalize(item: ParameterStep) -> Tensor:
    """Return this rank's shard of the matrix to orthogonalize, rounded to bfloat16 before sending as it would be after.

    Without a gradient it is zeros: ranks can differ in which gradients they have, and learn about that only in this
    step.
    """
    buffer = item.targets[MOMENTUM_BUFFER].read()
    if item.grad is None:
        return torch.zeros_like(buffer, dtype=torch.bfloat16)
    return muon.momentum(item.grad, buffer, item.group.settings).update.to(torch.bfloat16)
