"""Muon over quantized weights: matrices move by their orthogonalized momentum, all other parameters by AdamW.

A step agrees on the gradients first, in one collective. Then, bucket by bucket: every rank brings the momentum of its
parts up to date and sends what is to be orthogonalized, in bfloat16, to the owners of the matrices; owners do so and
send the parts back (`matrix_exchange`); and each rank updates its parts, by kernels or as in any step. What a
rank holds for it at a time is bounded by `BUCKET_BYTES`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quantshard import private_torch
from quantshard.argument_kinds import suggests_names
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
"""Of the bfloat16 parts that a rank sends at once, and of about as much as it receives (`matrix_exchange.buckets`)."""


class Muon(AdamOptimizer):
    """Muon (Jordan et al., 2024) for models with quantized weights, with AdamW for what is no matrix of a hidden layer.

        optimizer = Muon(muon_groups(model, adamw={"lr": 3e-4}), lr=0.02)

    It takes the arguments of `torch.optim.Muon` and does what that does to float32 matrices, from the masters. The
    momentum of a whole matrix is orthogonalized, so the bits are the same under FSDP2, HSDP and tensor parallelism, on
    any number of ranks, for uneven and empty shards too. Each rank does so for its share of the matrices of a step:
    parts go to their owner and back in one all-to-all per mesh axis and bucket, bfloat16 both ways. For that a rank
    holds, at some time in a step, up to about 8 times 128 MiB more, or 8 times its largest whole matrix in bfloat16 if
    that is larger. Replicas (HSDP, DDP) each do it for themselves.

    A group says by its entry `algorithm` how it is stepped: "muon", the default, or "adamw", with `betas`, `eps` and
    `weight_decay` as of `FusedAdam` (`ADAMW_SETTINGS`) and an lr of its own. It is one optimizer: a step is taken or
    skipped for all groups, and one state dict has all states: for matrices master and momentum, 8 bytes a parameter in
    float32. Masters, states of fewer bits, stochastic rounding, skipped steps and loading are those of `FusedAdam`, and
    so are the kernels on GPUs; only the orthogonalization is PyTorch's products.

    Orthogonalized matrices have the same bits on the same hardware, software and number of CPU threads.

    Args:
        params: parameters, (name, parameter) pairs or groups, as of `FusedAdam`; `muon_groups` makes groups of a model.
            Those of groups of Muon's are matrices [rows, columns], of linear layers; give embeddings and output heads
            to AdamW.
        lr: learning rate; `group["lr"]` may be set between steps, as LR schedulers do.
        weight_decay: decoupled.
        momentum, nesterov: of the mean of gradients; see `numerics.muon.momentum`.
        ns_coefficients, eps, ns_steps: of the iteration; see `numerics.muon.orthogonalized`.
        adjust_lr_fn: how a matrix's shape changes the learning rate: "original" (None too), or "match_rms_adamw", with
            which lr and weight decay are those that suit AdamW, and groups of AdamW's may take this lr.
        preset: a name of `presets.PRESETS`, "lean8" or "lean6", in place of the next options that say how masters and
            moments are kept; as of `FusedAdam`, and with momentum in bfloat16.
        momentum_buffer_dtype: how momentum is stored: float32 (the default), float16, bfloat16, or uint8 (FP8), whose
            rounding is amplified with the smallest singular values and costs loss (docs/optimizers.md).
        exp_avg_dtype, exp_avg_sq_dtype: of groups of AdamW's; float32 by default.
        capturable, master_weights, master_weight_dtype, use_decoupled_grad, store_param_remainders,
            max_skipped_in_a_row, ema_decay: as of `FusedAdam`, but that a rate of `capturable` is a float64 tensor.

    Raises:
        ConfigurationError: an argument does not fit, or a parameter of Muon's is no matrix; the message says which.
        RankMismatchError: ranks have different random keys for one weight, or different seeds.
    """

    states = (*muon.STATES, *adam.STATES)
    rate_dtype = torch.float64  # rates are multiplied before they are rounded
    more_entries = (*matrix_groups.ADAMW_SETTINGS,)

    @suggests_names
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
        given = {
            "momentum_buffer_dtype": momentum_buffer_dtype,
            "exp_avg_dtype": exp_avg_dtype,
            "exp_avg_sq_dtype": exp_avg_sq_dtype,
            "master_weights": master_weights,
            "master_weight_dtype": master_weight_dtype,
            "store_param_remainders": store_param_remainders,
        }
        kept = chosen_options(type(self).__name__, preset, given)
        self._directions: dict[Tensor, Tensor] = {}
        self._buckets: list[MatrixBucket] = []
        self._bucketed: list[Tensor] = []
        self._captured: list[KernelStep] = []  # CUDA graphs hold the addresses of their tables
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
                MOMENTUM_BUFFER: kept.momentum_buffer_dtype,
                EXP_AVG: kept.exp_avg_dtype,
                EXP_AVG_SQ: kept.exp_avg_sq_dtype,
            },
            capturable=capturable,
            master_weights=kept.master_weights,
            master_weight_dtype=kept.master_weight_dtype,
            use_decoupled_grad=use_decoupled_grad,
            store_param_remainders=kept.store_param_remainders,
            max_skipped_in_a_row=max_skipped_in_a_row,
            ema_decay=ema_decay,
        )

    # Groups ----------------------------------------------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, of Muon's or AdamW's; see `MasterOptimizer.add_param_group`.

        Raises:
            ConfigurationError: besides, a parameter of Muon's is no matrix, or a group of AdamW's has no lr.
        """
        number = len(self.param_groups)
        super().add_param_group(matrix_groups.completed(self.defaults, number, param_group))

    def group_states(self, group: Mapping[str, Any]) -> tuple[StateSpec, ...]:
        """Momentum, or the moments of Adam."""
        return muon.STATES if group[ALGORITHM] == MUON else adam.STATES

    def _formula(self, group: Mapping[str, Any]) -> UpdateFormula:
        if group[ALGORITHM] == MUON:
            return UpdateFormula(self._name, muon.STATES, self._muon_update)
        return super()._formula(group)

    def settings(self, group: dict[str, Any]) -> Any:
        """The numbers of a group in this step, of Muon or of Adam."""
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
        """Check that the numbers of a group make a step; see `options.check_muon` and `options.check_adam`.

        Raises:
            ConfigurationError: they make none, or would make weights infinite.
        """
        if group[ALGORITHM] == MUON:
            options.check_muon(where, group, reads_rate)
        else:
            super().check_group(where, group, reads_rate)

    # Step ------------------------------------------------------------------------------------------------------------

    def _muon_update(
        self, param: Tensor, grad: Tensor, master: Tensor, states: Mapping[str, Tensor], settings: MuonSettings
    ) -> Update:
        """See `numerics.muon`; what was orthogonalized is at hand."""
        buffer, _ = muon.momentum(grad, states[MOMENTUM_BUFFER], settings)
        new = muon.muon(master, self._directions[param], tuple(param.shape), settings)
        return new, {MOMENTUM_BUFFER: buffer}

    def _measured(self, work: list[ParameterStep]) -> tuple[guards.GradientFlags, list[ParameterStep]]:
        matrices: list[int] = []
        others: list[int] = []
        for place, item in enumerate(work):
            (matrices if isinstance(item.group.settings, MuonSettings) else others).append(place)
        buckets = self._buckets_of([work[place].param for place in matrices])
        bucketed = [[work[matrices[number]] for number in bucket.numbers] for bucket in buckets]
        workspace = MatrixWorkspace(bucketed)
        taken = [
            bucket.kernels.take(held, self._seed, workspace=workspace)
            for held, bucket in zip(bucketed, buckets, strict=True)
        ]
        left = [work[place] for place in others]
        takes_others = self._has_kernels and self._kernels.take(left, self._seed, self._is_bounded)
        parts = [
            *(
                ([matrices[number] for number in bucket.numbers], bucket.kernels, is_taken)
                for bucket, is_taken in zip(buckets, taken, strict=True)
            ),
            (others, self._kernels, takes_others),
        ]
        on_kernels = any(is_taken for _, _, is_taken in parts)
        flags = self._flags(work, FlatMax(), _exceeding(work, parts) if on_kernels else None)
        skips = _StepSkip(flags, on_kernels, self._capturable)
        if not on_kernels and not self._capturable and skips.on_host:
            return flags, []  # which the caller finds too, and says
        for held, bucket, is_taken in zip(bucketed, buckets, taken, strict=True):
            self._step_matrices(held, bucket, skips, is_taken)
        if takes_others:
            return flags, self._kernels.update(skips.on_device)
        _measure(left)
        return flags, left

    def _step_matrices(
        self, work: list[ParameterStep], bucket: MatrixBucket, skips: _StepSkip, on_kernels: bool
    ) -> None:
        """Orthogonalize and write, or, where the step is skipped, leave or write what was there. A collective call
        where they are sharded."""
        made = bucket.kernels.made_directions() if on_kernels else {}
        directions = self._orthogonalized(work, bucket.exchange, made)
        self._directions = dict(zip((item.param for item in work), directions, strict=True))
        left = work
        if on_kernels:
            bucket.kernels.give_directions(directions)
            left = bucket.kernels.update(skips.on_device)
        else:
            _measure(work)
        by_device = self._capturable or (skips.deferred and self._master_weights)
        if left and (by_device or not skips.on_host):
            for item in left:
                item.finish(skips.on_device if by_device else None)
        self._directions = {}

    @staticmethod
    def _orthogonalized(
        work: list[ParameterStep], exchange: MatrixExchange, made: Mapping[int, Tensor]
    ) -> list[Tensor]:
        """Of each parameter this rank's part of its orthogonalized momentum, bfloat16; `made`: by place, what kernels
        have made of it. A collective call."""
        parts = (made[at] if at in made else _to_orthogonalize(item) for at, item in enumerate(work))
        whole = exchange.gather(parts)
        owned = {
            number: matrix if work[number].grad is None else muon.orthogonalized(matrix, work[number].group.settings)
            for number, matrix in whole
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
        """The buckets of some parameters, by their numbers; those of the step before, where they are the same."""
        if [*map(id, params)] != [*map(id, self._bucketed)]:
            self._captured += [bucket.kernels for bucket in self._buckets if bucket.kernels.is_captured]
            layouts = [MatrixLayout.of(param) for param in params]
            found = [(numbers, [layouts[number] for number in numbers]) for numbers in buckets(layouts, BUCKET_BYTES)]
            self._buckets = [MatrixBucket(numbers, MatrixExchange(chosen), KernelStep()) for numbers, chosen in found]
            for bucket in self._buckets:
                for place, number in enumerate(bucket.numbers):
                    bucket.exchange.check_part(place, TensorRegion.of_local(params[number]))
            self._bucketed = params
        return self._buckets


class MatrixBucket(NamedTuple):
    """Matrices that are orthogonalized together, by their numbers among all of them, what brings them together, and
    what steps them."""

    numbers: list[int]
    exchange: MatrixExchange
    kernels: KernelStep


class _StepSkip:
    """Whether a step is skipped: a bool scalar on the device; and for the host, which waits for it, where it is asked.

    Kernels are told by the device. What PyTorch writes beside them is not written at all where the host knows already,
    since a write that is undone still counts as one. `is_late`: the host would have to wait.
    """

    def __init__(self, flags: guards.GradientFlags, is_sent: bool, capturable: bool) -> None:
        self._flags = flags
        self._sent = flags.send() if is_sent and not capturable else None
        self.deferred = flags.deferred

    @cached_property
    def on_device(self) -> Tensor:
        """As kernels are given it."""
        return self._flags.bad() if self._sent is None else self._sent

    @cached_property
    def on_host(self) -> bool:
        """Of a step that is not captured."""
        return bool(self.on_device)


def _exceeding(work: Sequence[ParameterStep], parts: Iterable[tuple[list[int], KernelStep, bool]]) -> Tensor:
    """`numerics.exceeds` of each gradient, float32 [parameters]; of each part whether kernels take it."""
    device = private_torch.local_tensor(work[0].param).device
    columns = [torch.zeros((), dtype=torch.float32, device=device)] * len(work)
    for places, kernels, is_taken in parts:
        found = kernels.exceeding() if is_taken else kernel_step.exceeding([work[at].grad for at in places], device)
        for place, flag in zip(places, found.to(device).unbind(), strict=True):
            columns[place] = flag
    return torch.stack(columns)


def _measure(work: Iterable[ParameterStep]) -> None:
    """One collective, where ranks share blocks of what they write."""
    reduction = FlatMax()
    for item in work:
        item.measure(reduction)
    reduction.reduce()


def _to_orthogonalize(item: ParameterStep) -> Tensor:
    """This rank's part of what is orthogonalized, bfloat16: rounded before it is sent, as it would be after; zeros
    without a gradient, as ranks may differ in which they have, and learn of it in this step."""
    buffer = item.targets[MOMENTUM_BUFFER].read()
    if item.grad is None:
        return torch.zeros_like(buffer, dtype=torch.bfloat16)
    return muon.momentum(item.grad, buffer, item.group.settings).update.to(torch.bfloat16)
