"""A step of Adam, Lion or Muon in multi-tensor kernels, and the base of these optimizers.

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

from quantshard import kernel_dispatch, kernels, numerics, private_torch
from quantshard.collectives.flat_max import FlatMax
from quantshard.collectives.process_groups import Groups
from quantshard.kernels.optimizer.stored import (
    Algorithm,
    MatrixRegion,
    SettingsRow,
    StepParameter,
)
from quantshard.numerics.adam import Hyperparameters, float32
from quantshard.numerics.lion import LionSettings
from quantshard.numerics.muon import MuonSettings
from quantshard.numerics.states import WEIGHT
from quantshard.optimizers.elementwise import ElementwiseOptimizer, ParameterStep, StepPlan
from quantshard.optimizers.guards import LARGEST_GRADIENT, GradientFlags, in_order
from quantshard.optimizers.state import TensorRegion
from quantshard.state_storage import chosen_options
from quantshard.tensor import storage as storages
from quantshard.tensor.storage import DRAWS, KEY, WEIGHT_STREAM, QuantizedStorage

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from quantshard.optimizers.matrix_exchange import MatrixWorkspace

if kernels.USABLE:
    from quantshard.kernels.optimizer.plan import GRADIENT_DTYPES, StepLaunchPlan


@dataclass
class _DevicePlan:
    """The plan of one device.

    `places`: index in the step's work of each parameter. `shared`: amaxes shared between ranks, with their process
    groups, by index. `sizes`: local shapes of the parameters to orthogonalize, by index.
    """

    plan: StepLaunchPlan
    places: list[int]
    shared: dict[int, list[tuple[Tensor, Groups]]]
    sizes: dict[int, tuple[int, int]]


class KernelStep:
    """The parameters of an optimizer that kernels update.

    Each step calls `take`, `exceeding`, `update` and `finished`, and for matrices of Muon `make_directions` and
    `set_directions` before `update`. Plans are made again if the work or the address of a tensor has changed.
    """

    def __init__(self) -> None:
        self._planned: list[_DevicePlan] = []
        self._planned_work: Sequence[ParameterStep] = ()
        self._tensors: list[Tensor] = []
        self._storages: list[QuantizedStorage] = []
        self._drawing: list[QuantizedStorage] = []
        self._addresses: list[int] = []
        self._rows: dict[tuple[int, tuple[int, ...]], ParameterStep] = {}
        self._captured: list[StepLaunchPlan] = []  # kept alive: CUDA graphs read their tables by address
        self._work: Sequence[ParameterStep] = ()
        self._remaining: set[int] = set()
        self._directions: dict[int, Tensor] = {}

    @property
    def is_captured(self) -> bool:
        """Whether a CUDA graph reads tables of this object, so that it must stay alive."""
        return bool(self._captured) or any(device_plan.plan.is_captured for device_plan in self._planned)

    def take(
        self,
        work: Sequence[ParameterStep],
        seed: int | None,
        is_bounded: Callable[[Tensor], bool] | None = None,
        workspace: MatrixWorkspace | None = None,
    ) -> bool:
        """Begin a step. Return True if the device of any parameter has kernels, which is the same on every rank.

        `seed`: seed of the optimizer's random bits. `is_bounded`: argument `bounded` of `numerics.adam.adam`, by
        parameter. `workspace`: memory for the directions of Muon's matrices.

        Raises:
            UnsupportedOperationError: the step is being captured in a CUDA graph, and there is no plan for it yet.
        """
        self._work = ()
        if work is not self._planned_work:
            states = [state for item in work for state in item.targets.values()]
            self._tensors = [tensor for state in states for tensor in state.live()]
            self._storages = [state.storage for state in states if state.storage is not None]
            self._drawing = [item.storage for item in work if item.storage is not None and item.has_draws]
        if work is not self._planned_work or self._addresses != self._current_addresses():
            self._make_plans(work, is_bounded)
        if not self._rows:
            return False
        rows = [
            settings_row(item.group.settings, item.group.step, item.group.ema_decay, shape)
            for (_, shape), item in self._rows.items()
        ]
        self._work, self._remaining, self._directions = work, set(range(len(work))), {}
        for device_plan in self._planned:
            grads, draws, sizes = [], [], {}
            for index in device_plan.places:
                item, grad = work[index], work[index].grad
                if grad is None or (grad.dtype in GRADIENT_DTYPES and grad.device == device_plan.plan.device):
                    self._remaining.remove(index)
                else:
                    grad = None
                grads.append(grad)
                # the next random draw of a quantized weight without a master
                storage = item.storage if item.has_draws and grad is not None else None
                draws.append(0 if storage is None else int(storage.state[DRAWS]))
                if grad is not None and index in device_plan.sizes:
                    sizes[index] = device_plan.sizes[index]
            if sizes:
                assert workspace is not None
                self._directions |= workspace.views(device_plan.plan.device, sizes)
            directions = [self._directions.get(index) for index in device_plan.places]
            device_plan.plan.take(grads, rows, seed, draws, directions)
        return True

    def _current_addresses(self) -> list[int]:
        """Addresses of all tensors, and the keys of weights with random draws, which a load writes in place."""
        tensors = [*self._tensors]
        for storage in self._storages:  # their entries can be replaced
            tensors += storage.components.values()
            tensors += storage.state.values()
        return [tensor.data_ptr() for tensor in tensors] + [int(storage.state[KEY]) for storage in self._drawing]

    def _make_plans(self, work: Sequence[ParameterStep], is_bounded: Callable[[Tensor], bool] | None) -> None:
        self._captured += [device_plan.plan for device_plan in self._planned if device_plan.plan.is_captured]
        self._planned, self._rows = [], {}
        if any(kernel_dispatch.has_kernels(item.local) for item in work):
            by_device: dict[torch.device, dict[int, StepParameter]] = {}
            for index, item in enumerate(work):
                shape = tuple(item.param.shape) if isinstance(item.group.settings, MuonSettings) else ()
                self._rows.setdefault((item.number, shape), item)
                row = [*self._rows].index((item.number, shape))
                bounded = is_bounded is not None and is_bounded(item.param)
                parameter = _parameter(item, row, bounded) if kernel_dispatch.has_kernels(item.local) else None
                if parameter is not None:
                    by_device.setdefault(item.local.device, {})[index] = parameter
            self._planned = [self._device_plan(work, *entry) for entry in by_device.items()]
        self._planned_work, self._addresses = work, self._current_addresses()

    def _device_plan(
        self, work: Sequence[ParameterStep], device: torch.device, parameters: dict[int, StepParameter]
    ) -> _DevicePlan:
        plan = StepLaunchPlan([*parameters.values()], len(self._rows), device)
        grids = {(amax.parameter, amax.role, amax.component): amax.values for amax in plan.amaxes}
        shared = {index: list(_shared(work[index], number, grids)) for number, index in enumerate(parameters)}
        sizes = {i: entry.rectangle.shape for i, entry in parameters.items() if entry.algorithm is Algorithm.MUON}
        return _DevicePlan(plan, [*parameters], {index: amaxes for index, amaxes in shared.items() if amaxes}, sizes)

    def exceeding(self) -> Tensor:
        """Return `numerics.exceeds` of each gradient of the step, float32 [parameters]."""
        flags = [device_plan.plan.exceeding(LARGEST_GRADIENT) for device_plan in self._planned]
        if len(flags) == 1 and not self._remaining and len(flags[0]) == len(self._work):
            return flags[0]
        device, remaining = private_torch.local_tensor(self._work[0].param).device, sorted(self._remaining)
        parts = [(device_plan.places, part) for device_plan, part in zip(self._planned, flags, strict=True)]
        parts.append((remaining, exceeding([self._work[index].grad for index in remaining], device)))
        return in_order(parts, len(self._work), device)

    def make_directions(self) -> dict[int, Tensor]:
        """Return this rank's shards of the matrices to orthogonalize, bfloat16, by index in the work."""
        for device_plan in self._planned:
            device_plan.plan.make_directions()
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
        for device_plan in self._planned:
            device_plan.plan.update(skip.to(device_plan.plan.device))
        reduction = FlatMax()
        shared = {index: amaxes for device_plan in self._planned for index, amaxes in device_plan.shared.items()}
        # All ranks need the same order, even if kernels take different parameters on each.
        for index in sorted(self._remaining | shared.keys()):
            if index in self._remaining:
                self._work[index].measure(reduction)
                continue
            for values, groups in shared[index]:
                reduction.add(values, groups)
        reduction.reduce()
        for device_plan in self._planned:
            device_plan.plan.finish()
        averaged = {index for index, item in enumerate(self._work) if item.grad is None and item.average is not None}
        return [self._work[index] for index in sorted(self._remaining | averaged)]

    def finished(self, applied: bool) -> None:
        """Release the work and its gradients. If the step was applied, record the parameters that kernels wrote."""
        for index, item in enumerate(self._work if applied else ()):
            if index not in self._remaining and item.grad is not None:
                item.mark_written()
        self._work, self._directions = (), {}


def exceeding(gradients: Sequence[Tensor | None], device: torch.device) -> Tensor:
    """Return `numerics.exceeds` of gradients that no kernel takes, float32 [gradients]; 0 for a missing gradient."""
    zero = torch.zeros((), dtype=torch.float32, device=device)
    flags = [zero if grad is None else numerics.exceeds(grad, LARGEST_GRADIENT).to(device) for grad in gradients]
    return torch.stack(flags) if flags else zero.new_empty(0)


def settings_row(settings: Any, step: int | Tensor, ema_decay: float, shape: tuple[int, ...] = ()) -> SettingsRow:
    """Return a group's settings as kernels read them. `shape`: global shape of the matrices, for Muon."""
    if isinstance(settings, MuonSettings):
        columns = {**_shares(1 - settings.momentum, settings.momentum), "nesterov": float(settings.nesterov)}
        return SettingsRow(step, settings.adjusted_lr(shape), columns, settings.kept, ema_decay=ema_decay)
    if isinstance(settings, LionSettings):
        columns = {**_shares(float32(settings.beta1), float32(settings.beta2)), "decay": settings.weight_decay}
        return SettingsRow(step, settings.lr, columns, ema_decay=ema_decay)
    assert isinstance(settings, Hyperparameters)
    betas = float32(settings.beta1), float32(settings.beta2)
    l2, decay = (0.0, settings.weight_decay) if settings.decoupled else (settings.weight_decay, 0.0)
    columns = {**_shares(*betas), "eps": settings.eps, "l2": l2, "decay": decay, "ratio": settings.largest_ratio}
    if not isinstance(step, Tensor):
        columns |= dict(zip(("correction1", "correction2"), map(float, settings.corrections), strict=True))
    return SettingsRow(step, settings.lr, columns, betas=betas, corrects=settings.bias_correction, ema_decay=ema_decay)


def _shares(beta1: float, beta2: float) -> dict[str, float]:
    return {"beta1": beta1, "rest1": 1 - beta1, "beta2": beta2, "rest2": 1 - beta2}


def _algorithm(settings: Any) -> Algorithm:
    if isinstance(settings, MuonSettings):
        return Algorithm.MUON
    return Algorithm.LION if isinstance(settings, LionSettings) else Algorithm.ADAM


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


# -------------------------------------------------------------------------------------------- parameters of a plan


def _parameter(item: ParameterStep, row: int, bounded: bool) -> StepParameter | None:
    """Describe a parameter for a plan; None if kernels do not support it."""
    states = {**item.targets, WEIGHT: item.weight}
    for_kernels = {role: tensors for role, state in states.items() if (tensors := state.for_kernels()) is not None}
    rectangle, storage = _rectangle(item.param), item.weight.storage
    if rectangle is None or len(for_kernels) < len(states):
        return None
    key = 0 if storage is None else int(storage.state[KEY])
    algorithm = _algorithm(item.group.settings)
    return StepParameter(for_kernels, rectangle, row, item.stream, key, WEIGHT_STREAM, bounded, algorithm)


def _rectangle(param: Tensor) -> MatrixRegion | None:
    """Return the local elements as a rectangle of a global matrix; None if they are not a rectangle. See
    `StateDraw.words`."""
    region = TensorRegion.of_local(param)
    global_shape, origin, shape = region.global_shape, region.origin, region.shape
    if len(shape) < 2:
        return MatrixRegion((1, math.prod(global_shape)), (0, sum(origin)), (1, math.prod(shape)))
    if len(shape) > 2 and shape[1:] != global_shape[1:]:
        return None
    return MatrixRegion(
        (global_shape[0], math.prod(global_shape[1:])), (origin[0], sum(origin[1:])), (shape[0], math.prod(shape[1:]))
    )


# ------------------------------------------------------------------------------------------------------- optimizers


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

    Args:
        params: parameters, (name, parameter) pairs or groups.
        defaults: group entries for groups that do not set them.
        state_dtypes: dtype of each state, by role; None for the preset's, or float32.
        common: see `CommonOptions`.
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
        return KernelStep()

    @property
    def _has_kernels(self) -> bool:
        return type(self).update is type(self).kernel_formula

    def _is_bounded(self, param: Tensor) -> bool:
        """Return the argument `bounded` of `numerics.adam.adam` for a parameter."""
        return False

    def _reduce_flags_and_launch(self, plan: StepPlan) -> tuple[GradientFlags, list[ParameterStep]]:
        if not self._has_kernels or not self._kernels.take(plan.items, self._seed, self._is_bounded):
            return super()._reduce_flags_and_launch(plan)
        flags = self._flags(plan, FlatMax(), self._kernels.exceeding())
        return flags, self._kernels.update(flags.bad() if self._capturable else flags.send())

    def _post_step(self, applied: bool) -> None:
        self._kernels.finished(applied)
