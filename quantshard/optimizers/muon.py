"""Muon for quantized weights: matrices take their orthogonalized momentum as update, other parameters use AdamW.

A step first agrees on the gradients in one collective. Then, for each bucket of matrices, every rank updates the
momentum of its shards and sends them, as bfloat16, to the owners of the matrices. Owners orthogonalize and send the
shards back (`matrix_exchange`), and every rank updates its shards, in kernels or in PyTorch. `BUCKET_BYTES` bounds the
extra memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quantshard import private_torch
from quantshard.collectives.flat_max import FlatMax
from quantshard.numerics import adam, muon
from quantshard.numerics.adam import EXP_AVG, EXP_AVG_SQ
from quantshard.numerics.muon import MOMENTUM_BUFFER, MuonSettings
from quantshard.numerics.states import StateSpec
from quantshard.optimizers import guards, kernel_step, matrix_groups, options
from quantshard.optimizers.adam_optimizer import AdamOptimizer
from quantshard.optimizers.kernel_step import KernelStep, MatrixWorkspace
from quantshard.optimizers.matrix_exchange import MatrixExchange, MatrixLayout, buckets
from quantshard.optimizers.matrix_groups import ALGORITHM
from quantshard.optimizers.rounding import TensorRegion
from quantshard.optimizers.step import ParameterStep, Update, UpdateFormula
from quantshard.presets import MUON, chosen_options

BUCKET_BYTES = 1 << 27
"""Size of the bfloat16 shards that a rank sends at once; it receives about as much (see `matrix_exchange.buckets`)."""


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
        preset: "lean8" or "lean6" (`presets.PRESETS`), which sets the storage of masters, momentum and moments, as in
            `FusedAdam`; momentum is bfloat16.
        momentum_buffer_dtype: dtype of the momentum: float32 (default), float16, bfloat16, or uint8 (FP8). The rounding
            errors of FP8 are amplified together with the smallest singular values and raise the loss
            (docs/optimizers.md).
        exp_avg_dtype, exp_avg_sq_dtype: dtypes of the moments in "adamw" groups; float32 by default.
        capturable, master_weights, master_weight_dtype, use_decoupled_grad, store_param_remainders,
            max_skipped_in_a_row, ema_decay: as in `FusedAdam`, except that `capturable` keeps lr in a float64 tensor.

    Raises:
        ConfigurationError: an argument is invalid, or a "muon" group has a parameter that is not a matrix.
        RankMismatchError: ranks have different random keys for a weight, or different seeds.
    """

    states = (*muon.STATES, *adam.STATES)
    # Rates are multiplied before they are rounded.
    rate_dtype = torch.float64
    more_entries = (*matrix_groups.ADAMW_SETTINGS,)

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
        capturable: bool = False,
        preset: str | None = None,
        master_weights: bool | None = None,
        master_weight_dtype: torch.dtype | None = None,
        use_decoupled_grad: bool = False,
        store_param_remainders: bool | None = None,
        max_skipped_in_a_row: int = 10,
        ema_decay: float = 0.0,
    ) -> None:
        passed_options = {
            "momentum_buffer_dtype": momentum_buffer_dtype,
            "exp_avg_dtype": exp_avg_dtype,
            "exp_avg_sq_dtype": exp_avg_sq_dtype,
            "master_weights": master_weights,
            "master_weight_dtype": master_weight_dtype,
            "store_param_remainders": store_param_remainders,
        }
        storage = chosen_options(type(self).__name__, preset, passed_options)
        self._directions: dict[Tensor, Tensor] = {}
        self._buckets: list[MatrixBucket] = []
        self._bucketed: list[Tensor] = []
        self._captured: list[KernelStep] = []  # kept alive: CUDA graphs read their tables by address
        super().__init__(
            params,
            {
                "lr": lr,
                "weight_decay": weight_decay,
                "momentum": momentum,
                "nesterov": nesterov,
                "ns_coefficients": ns_coefficients,
                "eps": eps,
                "ns_steps": ns_steps,
                "adjust_lr_fn": adjust_lr_fn,
                ALGORITHM: MUON,
            },
            state_dtypes={
                MOMENTUM_BUFFER: storage.momentum_buffer_dtype,
                EXP_AVG: storage.exp_avg_dtype,
                EXP_AVG_SQ: storage.exp_avg_sq_dtype,
            },
            capturable=capturable,
            master_weights=storage.master_weights,
            master_weight_dtype=storage.master_weight_dtype,
            use_decoupled_grad=use_decoupled_grad,
            store_param_remainders=storage.store_param_remainders,
            max_skipped_in_a_row=max_skipped_in_a_row,
            ema_decay=ema_decay,
        )

    # Groups ----------------------------------------------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a "muon" or "adamw" group; see `MasterOptimizer.add_param_group`.

        Raises:
            ConfigurationError: also if a parameter of a "muon" group is not a matrix, or an "adamw" group has no lr.
        """
        number = len(self.param_groups)
        super().add_param_group(matrix_groups.completed(self.defaults, number, param_group))

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

    def check_group(self, where: str, group: Mapping[str, Any], reads_rate: bool = True) -> None:
        """Validate a group's hyperparameters with `options.check_muon` or `options.check_adam`.

        Raises:
            ConfigurationError: a value is invalid, or large enough to make weights infinite.
        """
        if group[ALGORITHM] == MUON:
            options.check_muon(where, group, reads_rate)
        else:
            super().check_group(where, group, reads_rate)

    # Step ------------------------------------------------------------------------------------------------------------

    def _muon_update(
        self, param: Tensor, grad: Tensor, master: Tensor, states: Mapping[str, Tensor], settings: MuonSettings
    ) -> Update:
        """Apply `numerics.muon` to one parameter, whose orthogonalized direction is in `_directions`."""
        buffer, _ = muon.momentum(grad, states[MOMENTUM_BUFFER], settings)
        new = muon.muon(master, self._directions[param], tuple(param.shape), settings)
        return new, {MOMENTUM_BUFFER: buffer}

    def _measured(self, work: list[ParameterStep]) -> tuple[guards.GradientFlags, list[ParameterStep]]:
        matrix_indices: list[int] = []
        adam_indices: list[int] = []
        for index, item in enumerate(work):
            (matrix_indices if isinstance(item.group.settings, MuonSettings) else adam_indices).append(index)
        buckets = self._buckets_of([work[index].param for index in matrix_indices])
        work_by_bucket = [[work[matrix_indices[number]] for number in bucket.numbers] for bucket in buckets]
        workspace = MatrixWorkspace(work_by_bucket)
        in_kernels = [
            bucket.kernels.take(bucket_work, self._seed, workspace=workspace)
            for bucket_work, bucket in zip(work_by_bucket, buckets, strict=True)
        ]
        adam_work = [work[index] for index in adam_indices]
        adam_in_kernels = self._has_kernels and self._kernels.take(adam_work, self._seed, self._is_bounded)
        parts = [
            *(
                ([matrix_indices[number] for number in bucket.numbers], bucket.kernels, uses_kernels)
                for bucket, uses_kernels in zip(buckets, in_kernels, strict=True)
            ),
            (adam_indices, self._kernels, adam_in_kernels),
        ]
        on_kernels = any(uses_kernels for _, _, uses_kernels in parts)
        flags = self._flags(work, FlatMax(), _exceeding(work, parts) if on_kernels else None)
        skips = _StepSkip(flags, on_kernels, self._capturable)
        if not on_kernels and not self._capturable and skips.on_host:
            # The caller reads the same flags, and warns.
            return flags, []
        for bucket_work, bucket, uses_kernels in zip(work_by_bucket, buckets, in_kernels, strict=True):
            self._step_matrices(bucket_work, bucket, skips, uses_kernels)
        if adam_in_kernels:
            return flags, self._kernels.update(skips.on_device)
        _measure(adam_work)
        return flags, adam_work

    def _step_matrices(
        self, work: list[ParameterStep], bucket: MatrixBucket, skips: _StepSkip, on_kernels: bool
    ) -> None:
        """Orthogonalize the momentum of a bucket and update its parameters; a skipped step leaves them unchanged or
        restores them.

        A collective call if the matrices are sharded.
        """
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
        for bucket in self._buckets:
            bucket.kernels.finished(applied)

    def _buckets_of(self, params: list[Tensor]) -> Sequence[MatrixBucket]:
        """Return the buckets of `params`, reusing the ones of the last step if the parameters are the same."""
        if [*map(id, params)] != [*map(id, self._bucketed)]:
            self._captured += [bucket.kernels for bucket in self._buckets if bucket.kernels.is_captured]
            layouts = [MatrixLayout.of(param) for param in params]
            layouts_by_bucket = [
                (numbers, [layouts[number] for number in numbers]) for numbers in buckets(layouts, BUCKET_BYTES)
            ]
            self._buckets = [
                MatrixBucket(numbers, MatrixExchange(bucket_layouts), KernelStep())
                for numbers, bucket_layouts in layouts_by_bucket
            ]
            for bucket in self._buckets:
                for position, number in enumerate(bucket.numbers):
                    bucket.exchange.check_part(position, TensorRegion.of_local(params[number]))
            self._bucketed = params
        return self._buckets


class MatrixBucket(NamedTuple):
    """Matrices that are orthogonalized together.

    `numbers`: indices among all matrices of the step. `exchange`: gathers and scatters them. `kernels`: updates them.
    """

    numbers: list[int]
    exchange: MatrixExchange
    kernels: KernelStep


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
