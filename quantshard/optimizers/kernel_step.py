"""A step of Adam, Lion or Muon in multi-tensor kernels, and the bases of these optimizers.

A plan per device holds the addresses of the tensors that a step reads and writes, and is rebuilt if one changes. It
also keeps the tensors alive, so that no address is reused. `elementwise.ParameterStep` handles what the kernels do not
support: gradients other than float32, bfloat16 and float16, tensors that are not contiguous, and shards with more than
two dims that are cut along another dim than the first.

Kernels write new values as they compute them, so ranks must agree beforehand on whether the step is skipped. If ranks
share blocks, that is one collective more than in `elementwise`, but one pass less over states and weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, TypedDict

import torch
from torch import Tensor

from quantshard import kernel_dispatch, kernels, numerics
from quantshard.collectives.flat_max import FlatMax
from quantshard.collectives.process_groups import Groups
from quantshard.errors import ConfigurationError
from quantshard.kernels.optimizer.stored import Algorithm, SettingsRow, StepParameter
from quantshard.numerics import adam
from quantshard.numerics.adam import EXP_AVG, EXP_AVG_SQ, Bound, Hyperparameters, float32
from quantshard.numerics.lion import LionSettings
from quantshard.numerics.muon import MuonSettings
from quantshard.numerics.states import AVERAGE, EMA_DECAY, WEIGHT, StateSpec
from quantshard.optimizers.elementwise import ElementwiseOptimizer, ParameterStep, StepPlan, Update
from quantshard.optimizers.guards import LARGEST_GRADIENT, GradientFlags, in_order
from quantshard.optimizers.state import TensorRegion
from quantshard.state_storage import chosen_options, floor_of
from quantshard.tensor import storage as storages
from quantshard.tensor.storage import DRAWS, KEY, WEIGHT_STREAM, QuantizedStorage

if TYPE_CHECKING:
    from typing_extensions import Unpack

if kernels.USABLE:
    from quantshard.kernels.optimizer.plan import GRADIENT_DTYPES, StepLaunchPlan


@dataclass
class _DevicePlan:
    """The launch plan of one device.

    `indices`: the parameters, by index in the step's work. `shared`: amaxes shared between ranks, with their process
    groups, by index.
    """

    launches: StepLaunchPlan
    indices: list[int]
    shared: dict[int, list[tuple[Tensor, Groups]]]


class KernelStep:
    """The parameters of an optimizer that kernels update.

    Each step calls `take`, `exceeding` and `update`, and for matrices of Muon `make_directions` and `set_directions`
    before `update`. Plans are made again if the work or the address of a tensor has changed.

    Args:
        enabled: False leaves all parameters to PyTorch.
    """

    def __init__(self, enabled: bool = True) -> None:
        self.enabled = enabled
        self._plans: list[_DevicePlan] = []
        self._work: Sequence[ParameterStep] = ()
        self._tensors: list[Tensor] = []
        self._storages: list[QuantizedStorage] = []
        self._addresses: list[int] = []
        self._rows: dict[tuple[int, tuple[int, ...]], ParameterStep] = {}
        self._captured: list[StepLaunchPlan] = []  # kept alive: CUDA graphs read their tables by address
        self._directions: dict[int, Tensor] = {}

    @property
    def is_captured(self) -> bool:
        """Whether a CUDA graph reads tables of this object, so that it must stay alive."""
        return bool(self._captured) or any(plan.launches.is_captured for plan in self._plans)

    def take(
        self,
        work: Sequence[ParameterStep],
        seed: int | None,
        bound: Callable[[Tensor], Bound] | None = None,
        workspace: Callable[[torch.device], Tensor] | None = None,
    ) -> bool:
        """Begin a step. Return True if the device of any parameter has kernels, which is the same on every rank.

        `seed`: seed of the optimizer's random bits. `bound`: argument `bound` of `numerics.adam.adam`, by parameter.
        `workspace`: returns a device's memory for the directions of Muon's matrices, flat bfloat16.
        """
        if not self.enabled:
            self._work = work
            return False
        is_new = work is not self._work
        if is_new:
            states = [state for item in work for state in item.targets.values()]
            self._tensors = [tensor for state in states for tensor in state.live()]
            self._storages = [state.storage for state in states if state.storage is not None]
        addresses = self._current_addresses(work)
        if is_new or addresses != self._addresses:
            self._work, self._addresses = (), []  # in case that a plan cannot be made
            self._make_plans(work, bound)
            self._work, self._addresses = work, addresses
        if not self._rows:
            return False
        rows = [
            settings_row(item.group.settings, item.group.step, item.group.ema_decay, shape)
            for (_, shape), item in self._rows.items()
        ]
        self._directions = {}
        for plan in self._plans:
            grads, rng_counters, directions, offset = [], [], [], 0
            for index in plan.indices:
                item = work[index]
                grad, direction = item.grad, None
                item.in_kernels = grad is None or (
                    grad.dtype in GRADIENT_DTYPES and grad.device == plan.launches.device
                )
                if item.in_kernels and grad is not None and isinstance(item.group.settings, MuonSettings):
                    assert workspace is not None
                    direction = workspace(grad.device)[offset : offset + grad.numel()].view(grad.shape)
                    self._directions[index] = direction
                    offset += padded_size(grad.numel())
                grads.append(grad if item.in_kernels else None)
                storage = item.storage if item.has_draws else None
                rng_counters.append(0 if storage is None else int(storage.state[DRAWS]))
                directions.append(direction)
            plan.launches.take(grads, rows, seed, rng_counters, directions)
        return True

    def _current_addresses(self, work: Sequence[ParameterStep]) -> list[int]:
        """Addresses of all tensors, and the keys of weights with random draws, which a load writes in place."""
        tensors = [*self._tensors]
        for storage in self._storages:  # their entries can be replaced
            tensors += storage.components.values()
            tensors += storage.state.values()
        keys = [int(item.storage.state[KEY]) for item in work if item.has_draws and item.storage is not None]
        return [tensor.data_ptr() for tensor in tensors] + keys

    def _make_plans(self, work: Sequence[ParameterStep], bound: Callable[[Tensor], Bound] | None) -> None:
        self._captured += [plan.launches for plan in self._plans if plan.launches.is_captured]
        self._plans, self._rows = [], {}
        if not any(kernel_dispatch.has_kernels(item.local) for item in work):
            return
        by_device: dict[torch.device, dict[int, StepParameter]] = {}
        for index, item in enumerate(work):
            shape = tuple(item.param.shape) if isinstance(item.group.settings, MuonSettings) else ()
            self._rows.setdefault((item.group_index, shape), item)
            row = [*self._rows].index((item.group_index, shape))
            limit = Bound.NONE if bound is None else bound(item.param)
            if kernel_dispatch.has_kernels(item.local) and (parameter := _parameter(item, row, limit)) is not None:
                by_device.setdefault(item.local.device, {})[index] = parameter
        for device, parameters in by_device.items():
            launches = StepLaunchPlan([*parameters.values()], len(self._rows), device)
            numbers = {index: number for number, index in enumerate(parameters)}
            shared = {index: list(_shared(work[index], number, launches.amaxes)) for index, number in numbers.items()}
            self._plans.append(_DevicePlan(launches, [*parameters], shared))

    def exceeding(self) -> Tensor:
        """Return `numerics.exceeds` of each gradient of the step, float32 [parameters]; 0 for a missing gradient."""
        parts = [(plan.indices, plan.launches.exceeding(LARGEST_GRADIENT)) for plan in self._plans]
        remaining = self._remaining()
        if len(parts) == 1 and not remaining and len(parts[0][0]) == len(self._work):
            return parts[0][1]
        device = self._work[0].local.device
        grads = {index: grad for index in remaining if (grad := self._work[index].grad) is not None}
        if grads:
            flags = [numerics.exceeds(grad, LARGEST_GRADIENT).to(device) for grad in grads.values()]
            parts.append(([*grads], torch.stack(flags)))
        return in_order(parts, len(self._work), device)

    def _remaining(self) -> list[int]:
        """Indices of the parameters that PyTorch updates in this step."""
        return [index for index, item in enumerate(self._work) if not item.in_kernels]

    def make_directions(self) -> dict[int, Tensor]:
        """Return this rank's shards of the matrices to orthogonalize, bfloat16, by index in the work."""
        for plan in self._plans:
            plan.launches.make_directions()
        return self._directions

    def set_directions(self, parts: Sequence[Tensor]) -> None:
        """Store the orthogonalized shards, one per parameter of the work."""
        for index, direction in self._directions.items():
            direction.copy_(parts[index])

    def update(self, skip: Tensor) -> list[ParameterStep]:
        """Update the parameters unless `skip`, a bool scalar tensor, is true. A collective call if ranks share blocks.

        Returns the parameter steps that are still to be finished: those measured here in PyTorch, and averages without
        a gradient.
        """
        for plan in self._plans:
            plan.launches.update(skip.to(plan.launches.device))
        remaining = self._remaining()
        amaxes = {index: entries for plan in self._plans for index, entries in plan.shared.items() if entries}
        reduction = FlatMax()
        # All ranks need the same order, even if kernels take different parameters on each.
        for index in sorted({*remaining, *amaxes}):
            if not self._work[index].in_kernels:
                self._work[index].measure(reduction)
                continue
            for values, groups in amaxes[index]:
                reduction.add(values, groups)
        if remaining or amaxes:
            reduction.reduce()
        for plan in self._plans:
            plan.launches.finish()
        self._directions = {}  # frees their memory
        return [item for item in self._work if not item.in_kernels or (item.grad is None and AVERAGE in item.targets)]


def settings_row(settings: Any, step: int | Tensor, ema_decay: float, shape: tuple[int, ...] = ()) -> SettingsRow:
    """Return a group's settings as kernels read them. `shape`: global shape of the matrices, for Muon."""
    if isinstance(settings, MuonSettings):
        columns = {**_weights(1 - settings.momentum, settings.momentum), "nesterov": float(settings.nesterov)}
        return SettingsRow(step, settings.adjusted_lr(shape), columns, settings.kept, ema_decay=ema_decay)
    if isinstance(settings, LionSettings):
        columns = {**_weights(float32(settings.beta1), float32(settings.beta2)), "decay": settings.weight_decay}
        return SettingsRow(step, settings.lr, columns, ema_decay=ema_decay)
    assert isinstance(settings, Hyperparameters)
    betas = float32(settings.beta1), float32(settings.beta2)
    l2, decay = (0.0, settings.weight_decay) if settings.decoupled else (settings.weight_decay, 0.0)
    columns = {**_weights(*betas), "eps": settings.eps, "l2": l2, "decay": decay, "ratio": settings.largest_ratio}
    if not isinstance(step, Tensor):
        corrected = (*settings.corrections, settings.largest_update)
        columns |= dict(zip(("correction1", "correction2", "most"), map(float, corrected), strict=True))
    return SettingsRow(step, settings.lr, columns, betas=betas, corrects=settings.bias_correction, ema_decay=ema_decay)


def _weights(beta1: float, beta2: float) -> dict[str, float]:
    return {"beta1": beta1, "rest1": 1 - beta1, "beta2": beta2, "rest2": 1 - beta2}


def padded_size(count: int) -> int:
    """Return the number of elements that a matrix of `count` elements occupies in the workspace of directions."""
    return -(count // -16) * 16


# Plans ------------------------------------------------------------------------------------------------------------


def _shared(
    item: ParameterStep, number: int, grids: dict[tuple[int, str, str], Tensor]
) -> Iterator[tuple[Tensor, Groups]]:
    """Yield the amaxes of a parameter that ranks share, in the order of `ParameterStep.measure`."""
    for target, state in item.targets.items():
        if state.storage is None:
            continue
        role = WEIGHT if state.writes_weight else target
        for name in storages.scale_names(state.storage.spec):
            if name in state.shared:
                yield grids[number, role, name], state.shared[name]


def _parameter(item: ParameterStep, row: int, bound: Bound) -> StepParameter | None:
    """Describe a parameter for a plan; None if kernels do not support it."""
    states = {**item.targets, WEIGHT: item.weight}
    for_kernels = {role: tensors for role, state in states.items() if (tensors := state.for_kernels()) is not None}
    rectangle = TensorRegion.of_local(item.param).matrix()
    if rectangle is None or len(for_kernels) < len(states):
        return None
    rng_key = 0 if item.storage is None else int(item.storage.state[KEY])
    algorithm = {MuonSettings: Algorithm.MUON, LionSettings: Algorithm.LION}.get(
        type(item.group.settings), Algorithm.ADAM
    )
    return StepParameter(for_kernels, rectangle, row, item.stream, rng_key, WEIGHT_STREAM, bound, algorithm)


# Optimizers -------------------------------------------------------------------------------------------------------


class CommonOptions(TypedDict, total=False):
    """Keyword arguments of `FusedAdam`, `Lion` and `Muon` with their defaults; `FusedAdam` describes them."""

    preset: str | None  # None
    master_weights: bool | None  # True
    master_weight_dtype: torch.dtype | None  # float32
    store_param_remainders: bool | None  # False
    use_decoupled_grad: bool  # False
    capturable: bool  # False
    max_skipped_in_a_row: int  # 10
    ema_decay: float  # 0.0


class KernelOptimizer(ElementwiseOptimizer):
    """Base of `FusedAdam`, `Lion` and `Muon`. Steps run in kernels where possible, with the bits of `update`.

    `state_dtypes`: dtype of each state, by role; None for the preset's, or float32.
    """

    kernel_formula: ClassVar[Any] = None
    """The `update` that the kernels implement. A subclass that overrides `update` runs in PyTorch."""

    def __init__(
        self,
        params: Iterable[Any],
        defaults: dict[str, Any],
        state_dtypes: Mapping[str, torch.dtype | None],
        **common: Unpack[CommonOptions],
    ) -> None:
        options: dict[str, Any] = dict(common)
        explicit = {f"{role}_dtype": dtype for role, dtype in state_dtypes.items()}
        for name in ("master_weights", "master_weight_dtype", "store_param_remainders"):
            explicit[name] = options.pop(name, None)
        storage = chosen_options(type(self).__name__, options.pop("preset", None), explicit)
        super().__init__(
            params,
            defaults,
            state_dtypes={role: getattr(storage, f"{role}_dtype") for role in state_dtypes},
            master_weights=storage.master_weights,
            master_weight_dtype=storage.master_weight_dtype,
            store_param_remainders=storage.store_param_remainders,
            **options,
        )

    @cached_property
    def _kernels(self) -> KernelStep:
        return KernelStep(enabled=type(self).update is type(self).kernel_formula)

    def _bound(self, param: Tensor) -> Bound:
        """Return the argument `bound` of `numerics.adam.adam` for a parameter."""
        return Bound.NONE

    def _start_updates(self, plan: StepPlan) -> tuple[GradientFlags, list[ParameterStep]]:
        if not self._kernels.take(plan.items, self._seed, self._bound):
            return super()._start_updates(plan)
        flags = self._reduce_flags(plan, FlatMax(), self._kernels.exceeding())
        return flags, self._kernels.update(flags.bad() if self._capturable else flags.send())


class AdamOptimizer(KernelOptimizer):
    """Adam's update rule, for all groups of `FusedAdam` and the "adamw" groups of `Muon`."""

    states: ClassVar[tuple[StateSpec, ...]] = adam.STATES
    checked_numbers = ("lr", "weight_decay", "betas", "eps", EMA_DECAY)

    def update(
        self, param: Tensor, grad: Tensor, master: Tensor, states: Mapping[str, Tensor], settings: Any
    ) -> Update:
        """Apply `numerics.adam.adam` to one parameter."""
        new = adam.adam(grad, master, states[EXP_AVG], states[EXP_AVG_SQ], settings, self._bound(param))
        return new.master, {EXP_AVG: new.exp_avg, EXP_AVG_SQ: new.exp_avg_sq}

    kernel_formula = update

    def settings(self, group: dict[str, Any]) -> Any:
        """Return the hyperparameters of a group for this step."""
        beta1, beta2 = map(float, group["betas"])
        return Hyperparameters(
            step=group["step"] + 1,
            lr=group["lr"] if self._capturable else float(group["lr"]),
            beta1=beta1,
            beta2=beta2,
            eps=float(group["eps"]),
            weight_decay=float(group["weight_decay"]),
            decoupled=group["adam_w_mode"],
            bias_correction=group["bias_correction"],
            ema_decay=float(group.get(EMA_DECAY, 0.0)),
        )

    def check_group(self, where: str, group: Mapping[str, Any]) -> None:
        """Validate a group's values, and whether updates that need a bound have one."""
        super().check_group(where, group)
        if self._bounds_ratio and adam.largest_ratio(*map(float, group["betas"])) == math.inf:
            raise ConfigurationError(
                f"{where}: betas={group['betas']}: with beta1**2 >= beta2 updates have no bound, which they need if "
                "exp_avg_dtype is coarser than exp_avg_sq_dtype; use a larger beta2 or the same dtype"
            )

    @cached_property
    def _bounds_ratio(self) -> bool:
        """Whether updates need a bound: scaled first moments are much coarser than second moments, which hold
        squares."""
        return floor_of(self._dtypes[EXP_AVG]) ** 2 > floor_of(self._dtypes[EXP_AVG_SQ], nonnegative=True)

    def _bound(self, param: Tensor) -> Bound:
        if self._states[param][EXP_AVG].storage is None:
            return Bound.NONE
        return Bound.RATIO if self._bounds_ratio else Bound.UPDATE
