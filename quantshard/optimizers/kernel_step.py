"""A step of Adam, Lion or Muon in multi-tensor kernels.

A plan per device holds the addresses of the tensors that a step reads and writes, and is rebuilt if one changes. It
also keeps the tensors alive, so that no address is reused. `step.ParameterStep` handles what the kernels do not
support: gradients other than float32, bfloat16 and float16, tensors that are not contiguous, and shards with more than
two dims that are cut along another dim than the first.

Kernels write new values as they compute them, so ranks must agree beforehand on whether the step is skipped. If ranks
share blocks, that is one collective more than in `step`, but one pass less over states and weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quantshard import kernel_dispatch, kernels, numerics, private_torch
from quantshard.collectives.flat_max import FlatMax
from quantshard.collectives.process_groups import Groups
from quantshard.kernels.optimizer.settings import SettingsRow, adam_row, lion_row, muon_row
from quantshard.kernels.optimizer.stored import Algorithm, MatrixRegion, StepParameter
from quantshard.numerics.adam import Hyperparameters
from quantshard.numerics.lion import LionSettings
from quantshard.numerics.muon import MuonSettings
from quantshard.numerics.states import WEIGHT
from quantshard.optimizers.guards import LARGEST_GRADIENT
from quantshard.optimizers.rounding import TensorRegion
from quantshard.optimizers.step import GroupSettings, ParameterStep
from quantshard.tensor import storage as storages
from quantshard.tensor.storage import DRAWS, KEY, WEIGHT_STREAM

if kernels.USABLE:
    from quantshard.kernels.optimizer.plan import GRADIENT_DTYPES, StepLaunchPlan


class MatrixWorkspace:
    """bfloat16 memory for shards to orthogonalize. Buckets use it in turn, so its size is that of the largest one.

    `works`: the parameter steps of each bucket.
    """

    def __init__(self, works: Iterable[Sequence[ParameterStep]]) -> None:
        locals_of = ([private_torch.local_tensor(item.param) for item in work] for work in works)
        self._most = max(
            (sum(_rounded_up(local.numel()) for local in local_tensors) for local_tensors in locals_of), default=0
        )
        self._flat: dict[torch.device, Tensor] = {}

    def views(self, device: torch.device, sizes: Mapping[int, tuple[int, int]]) -> dict[int, Tensor]:
        """Return a bfloat16 matrix of each size, aligned to 16 elements."""
        if device not in self._flat:
            self._flat[device] = torch.empty(self._most, dtype=torch.bfloat16, device=device)
        matrices, offset = {}, 0
        for index, size in sizes.items():
            count = math.prod(size)
            matrices[index] = self._flat[device][offset : offset + count].view(size)
            offset += _rounded_up(count)
        return matrices


def _rounded_up(count: int) -> int:
    return -(count // -16) * 16


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

    Each step calls `take`, `exceeding`, `update` and `finished`, and for matrices of Muon `made_directions` and
    `give_directions` before `update`.
    """

    def __init__(self) -> None:
        self._planned: list[_DevicePlan] = []
        self._signature: list[int] = []
        self._captured: list[StepLaunchPlan] = []  # kept alive: CUDA graphs read their tables by address
        self._work: Sequence[ParameterStep] = ()
        self._left: set[int] = set()
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
        if not any(kernel_dispatch.has_kernels(private_torch.local_tensor(item.param)) for item in work):
            return False
        rows, numbers = _rows(work)
        signature = _signature(work, numbers)
        if signature != self._signature:
            self._captured += [device_plan.plan for device_plan in self._planned if device_plan.plan.is_captured]
            self._planned = self._plans(work, numbers, len(rows), is_bounded)
            self._signature = signature
        self._work, self._left, self._directions = work, set(range(len(work))), {}
        for device_plan in self._planned:
            items = [work[index] for index in device_plan.places]
            grads = [item.grad if _fits(item.grad, device_plan.plan.device) else None for item in items]
            self._left.difference_update(
                index
                for index, item, grad in zip(device_plan.places, items, grads, strict=True)
                if grad is not None or item.grad is None
            )
            draws = [_draw(item) if grad is not None else 0 for item, grad in zip(items, grads, strict=True)]
            grads_by_index = dict(zip(device_plan.places, grads, strict=True))
            with_grads = [index for index in device_plan.sizes if grads_by_index[index] is not None]
            if with_grads:
                assert workspace is not None
                self._directions |= workspace.views(
                    device_plan.plan.device, {index: device_plan.sizes[index] for index in with_grads}
                )
            device_plan.plan.take(
                grads, rows, seed, draws, [self._directions.get(index) for index in device_plan.places]
            )
        return True

    @staticmethod
    def _plans(
        work: Sequence[ParameterStep],
        numbers: Sequence[int],
        rows: int,
        is_bounded: Callable[[Tensor], bool] | None,
    ) -> list[_DevicePlan]:
        parameters_by_device: dict[torch.device, list[tuple[int, StepParameter]]] = {}
        for index, item in enumerate(work):
            local = private_torch.local_tensor(item.param)
            bounded = is_bounded is not None and is_bounded(item.param)
            parameter = _parameter(item, numbers[index], bounded) if kernel_dispatch.has_kernels(local) else None
            if parameter is not None:
                parameters_by_device.setdefault(local.device, []).append((index, parameter))
        device_plans = []
        for device, pairs in parameters_by_device.items():
            plan, indices = (
                StepLaunchPlan([parameter for _, parameter in pairs], rows, device),
                [index for index, _ in pairs],
            )
            grids = {(amax.parameter, amax.role, amax.component): amax.values for amax in plan.amaxes}
            shared = {index: list(_shared(work[index], number, grids)) for number, index in enumerate(indices)}
            shared = {index: amaxes for index, amaxes in shared.items() if amaxes}
            sizes = {index: entry.rectangle.shape for index, entry in pairs if entry.algorithm is Algorithm.MUON}
            device_plans.append(_DevicePlan(plan, indices, shared, sizes))
        return device_plans

    def exceeding(self) -> Tensor:
        """Return `numerics.exceeds` of each gradient of the step, float32 [parameters]."""
        flags = [device_plan.plan.exceeding(LARGEST_GRADIENT) for device_plan in self._planned]
        if len(flags) == 1 and not self._left and len(flags[0]) == len(self._work):
            return flags[0]
        device = private_torch.local_tensor(self._work[0].param).device
        columns = [torch.zeros((), dtype=torch.float32, device=device)] * len(self._work)
        for device_plan, device_flags in zip(self._planned, flags, strict=True):
            for index, flag in zip(device_plan.places, device_flags.to(device).unbind(), strict=True):
                columns[index] = flag
        remaining = sorted(self._left)
        for index, flag in zip(
            remaining, exceeding([self._work[number].grad for number in remaining], device).unbind(), strict=True
        ):
            columns[index] = flag
        return torch.stack(columns)

    def made_directions(self) -> dict[int, Tensor]:
        """Return this rank's shards of the matrices to orthogonalize, bfloat16, by index in the work."""
        for device_plan in self._planned:
            device_plan.plan.make_directions()
        return self._directions

    def give_directions(self, parts: Sequence[Tensor]) -> None:
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
        for index in sorted(self._left | shared.keys()):
            if index in self._left:
                self._work[index].measure(reduction)
                continue
            for values, groups in shared[index]:
                reduction.add(values, groups)
        reduction.reduce()
        for device_plan in self._planned:
            device_plan.plan.finish()
        averaged = {index for index, item in enumerate(self._work) if item.grad is None and item.average is not None}
        return [self._work[index] for index in sorted(self._left | averaged)]

    def finished(self, applied: bool) -> None:
        """Release the work and its gradients. If the step was applied, record the parameters that kernels wrote."""
        for index, item in enumerate(self._work if applied else ()):
            if index not in self._left and item.grad is not None:
                item.weight.written(drawn=item.source is item.weight)
        self._work, self._directions = (), {}


def exceeding(gradients: Sequence[Tensor | None], device: torch.device) -> Tensor:
    """Return `numerics.exceeds` of gradients that no kernel takes, float32 [gradients]; 0 for a missing gradient."""
    zero = torch.zeros((), dtype=torch.float32, device=device)
    flags = [zero if grad is None else numerics.exceeds(grad, LARGEST_GRADIENT).to(device) for grad in gradients]
    return torch.stack(flags) if flags else zero.new_empty(0)


def _rows(work: Sequence[ParameterStep]) -> tuple[list[SettingsRow], list[int]]:
    """Return the distinct settings of a step, and the row number of each parameter."""
    rows: dict[tuple[int, tuple[int, ...]], SettingsRow] = {}
    numbers: list[int] = []
    row_numbers: dict[tuple[int, tuple[int, ...]], int] = {}
    for item in work:
        group, settings = item.group, item.group.settings
        shape = tuple(item.param.shape) if isinstance(settings, MuonSettings) else ()
        key = group.number, shape
        if key not in row_numbers:
            row_numbers[key] = len(row_numbers)
            rows[key] = _row(settings, group, shape)
        numbers.append(row_numbers[key])
    return list(rows.values()), numbers


def _row(settings: Any, of: GroupSettings, shape: tuple[int, ...]) -> SettingsRow:
    if isinstance(settings, MuonSettings):
        return muon_row(settings, of.step, of.ema_decay, shape)
    if isinstance(settings, LionSettings):
        return lion_row(settings, of.step, of.ema_decay)
    assert isinstance(settings, Hyperparameters)
    return adam_row(settings)


def _algorithm(settings: Any) -> Algorithm:
    if isinstance(settings, MuonSettings):
        return Algorithm.MUON
    return Algorithm.LION if isinstance(settings, LionSettings) else Algorithm.ADAM


def _signature(work: Sequence[ParameterStep], numbers: Sequence[int]) -> list[int]:
    """Return the values that plans depend on and that can change after a state is created."""
    signature: list[int] = []
    for item, number in zip(work, numbers, strict=True):
        signature.append(number)
        for state in item.targets.values():
            signature += state.signature()
    return signature


def _fits(grad: Tensor | None, device: torch.device) -> bool:
    return grad is not None and grad.dtype in GRADIENT_DTYPES and grad.device == device


def _draw(item: ParameterStep) -> int:
    """Return the number of the next random draw of a quantized weight without a master; 0 for others."""
    storage = item.weight.storage
    return int(storage.state[DRAWS]) if storage is not None and item.source is item.weight else 0


def _shared(
    item: ParameterStep, number: int, grids: dict[tuple[int, str, str], Tensor]
) -> Iterator[tuple[Tensor, Groups]]:
    """Yield the amaxes of a parameter that ranks share, in the order of `ParameterStep.measure`."""
    for target, state in item.targets.items():
        if state.storage is None:
            continue
        role = WEIGHT if state.writes_weight else target
        for name in storages.scale_names(state.storage.cell):
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
