"""A step of Adam, Lion or Muon in the kernels over many tensors, for parameters where kernels run.

A plan for each device holds the addresses of what a step reads and writes, and lasts until one of them changes; it also
holds the tensors, so that no address is given to another tensor meanwhile. What no kernel takes is left to
`step.ParameterStep`: gradients of other dtypes than float32, bfloat16 and float16, tensors that are not contiguous,
pieces of more than two dims that are cut along another than the first.

The kernels write new values as they compute them, so ranks agree before on whether a step is skipped: where they share
blocks that is one collective more than in `step`, and a pass over states and weights less.
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
    """Where what is orthogonalized of some matrices lies, and then of others: as large as for the most at once.

    `works`: those that are there at once, each with the local parts of its parameters.
    """

    def __init__(self, works: Iterable[Sequence[ParameterStep]]) -> None:
        locals_of = ([private_torch.local_tensor(item.param) for item in work] for work in works)
        self._most = max((sum(_rounded_up(local.numel()) for local in found) for found in locals_of), default=0)
        self._flat: dict[torch.device, Tensor] = {}

    def views(self, device: torch.device, sizes: Mapping[int, tuple[int, int]]) -> dict[int, Tensor]:
        """A matrix of each size, bfloat16, at a multiple of 16 elements."""
        if device not in self._flat:
            self._flat[device] = torch.empty(self._most, dtype=torch.bfloat16, device=device)
        found, first = {}, 0
        for place, size in sizes.items():
            count = math.prod(size)
            found[place] = self._flat[device][first : first + count].view(size)
            first += _rounded_up(count)
        return found


def _rounded_up(count: int) -> int:
    return -(count // -16) * 16


@dataclass
class _DevicePlan:
    """What is planned on one device: for each parameter its place in the work, and by place the amaxes that ranks
    share, each with these ranks. `sizes`: of the parameters whose updates are orthogonalized, elements, by place."""

    plan: StepLaunchPlan
    places: list[int]
    shared: dict[int, list[tuple[Tensor, Groups]]]
    sizes: dict[int, tuple[int, int]]


class KernelStep:
    """The parameters of an optimizer that kernels take, step by step: `take`, `exceeding`, `update`, `finished`; of
    matrices of Muon's `made_directions` and `give_directions` before `update`."""

    def __init__(self) -> None:
        self._planned: list[_DevicePlan] = []
        self._signature: list[int] = []
        self._captured: list[StepLaunchPlan] = []  # CUDA graphs hold the addresses of their tables
        self._work: Sequence[ParameterStep] = ()
        self._left: set[int] = set()
        self._directions: dict[int, Tensor] = {}

    @property
    def is_captured(self) -> bool:
        """True if a CUDA graph holds tables of it, so that it must live on."""
        return bool(self._captured) or any(planned.plan.is_captured for planned in self._planned)

    def take(
        self,
        work: Sequence[ParameterStep],
        seed: int | None,
        is_bounded: Callable[[Tensor], bool] | None = None,
        workspace: MatrixWorkspace | None = None,
    ) -> bool:
        """Begin a step: True if kernels run where any of its parameters is, and so on every rank.

        `seed`: of the optimizer's random words. `is_bounded`: of a parameter, as for `numerics.adam.adam`.
        `workspace`: for the directions of matrices of Muon's.

        Raises:
            UnsupportedOperationError: the step is captured in a CUDA graph, and there is no plan for it yet.
        """
        self._work = ()
        if not any(kernel_dispatch.has_kernels(private_torch.local_tensor(item.param)) for item in work):
            return False
        rows, numbers = _rows(work)
        signature = _signature(work, numbers)
        if signature != self._signature:
            self._captured += [planned.plan for planned in self._planned if planned.plan.is_captured]
            self._planned = self._plans(work, numbers, len(rows), is_bounded)
            self._signature = signature
        self._work, self._left, self._directions = work, set(range(len(work))), {}
        for planned in self._planned:
            items = [work[place] for place in planned.places]
            grads = [item.grad if _fits(item.grad, planned.plan.device) else None for item in items]
            self._left.difference_update(
                place
                for place, item, grad in zip(planned.places, items, grads, strict=True)
                if grad is not None or item.grad is None
            )
            draws = [_draw(item) if grad is not None else 0 for item, grad in zip(items, grads, strict=True)]
            held = dict(zip(planned.places, grads, strict=True))
            moved = [place for place in planned.sizes if held[place] is not None]
            if moved:
                assert workspace is not None
                self._directions |= workspace.views(
                    planned.plan.device, {place: planned.sizes[place] for place in moved}
                )
            planned.plan.take(grads, rows, seed, draws, [self._directions.get(place) for place in planned.places])
        return True

    @staticmethod
    def _plans(
        work: Sequence[ParameterStep],
        numbers: Sequence[int],
        rows: int,
        is_bounded: Callable[[Tensor], bool] | None,
    ) -> list[_DevicePlan]:
        found: dict[torch.device, list[tuple[int, StepParameter]]] = {}
        for place, item in enumerate(work):
            local = private_torch.local_tensor(item.param)
            bounded = is_bounded is not None and is_bounded(item.param)
            parameter = _parameter(item, numbers[place], bounded) if kernel_dispatch.has_kernels(local) else None
            if parameter is not None:
                found.setdefault(local.device, []).append((place, parameter))
        planned = []
        for device, pairs in found.items():
            plan, places = (
                StepLaunchPlan([parameter for _, parameter in pairs], rows, device),
                [place for place, _ in pairs],
            )
            grids = {(amax.parameter, amax.role, amax.component): amax.values for amax in plan.amaxes}
            shared = {place: list(_shared(work[place], number, grids)) for number, place in enumerate(places)}
            shared = {place: amaxes for place, amaxes in shared.items() if amaxes}
            sizes = {place: each.rectangle.shape for place, each in pairs if each.algorithm is Algorithm.MUON}
            planned.append(_DevicePlan(plan, places, shared, sizes))
        return planned

    def exceeding(self) -> Tensor:
        """`numerics.exceeds` of each gradient of the step, float32 [parameters]."""
        flags = [planned.plan.exceeding(LARGEST_GRADIENT) for planned in self._planned]
        if len(flags) == 1 and not self._left and len(flags[0]) == len(self._work):
            return flags[0]
        device = private_torch.local_tensor(self._work[0].param).device
        columns = [torch.zeros((), dtype=torch.float32, device=device)] * len(self._work)
        for planned, found in zip(self._planned, flags, strict=True):
            for place, flag in zip(planned.places, found.to(device).unbind(), strict=True):
                columns[place] = flag
        left = sorted(self._left)
        for place, flag in zip(left, exceeding([self._work[at].grad for at in left], device).unbind(), strict=True):
            columns[place] = flag
        return torch.stack(columns)

    def made_directions(self) -> dict[int, Tensor]:
        """By place in the work: what is to be orthogonalized of matrices of Muon's, bfloat16, this rank's part."""
        for planned in self._planned:
            planned.plan.make_directions()
        return self._directions

    def give_directions(self, parts: Sequence[Tensor]) -> None:
        """What became of it, of each of the work."""
        for place, direction in self._directions.items():
            direction.copy_(parts[place])

    def update(self, skip: Tensor) -> list[ParameterStep]:
        """Make the step where `skip`, a bool scalar, is false; a collective call where ranks share blocks.

        Returns what is left to be finished: it is measured, or has an average and no gradient.
        """
        for planned in self._planned:
            planned.plan.update(skip.to(planned.plan.device))
        reduction = FlatMax()
        shared = {place: amaxes for planned in self._planned for place, amaxes in planned.shared.items()}
        for place in sorted(self._left | shared.keys()):  # the same order on all ranks, whatever is left to which
            if place in self._left:
                self._work[place].measure(reduction)
                continue
            for values, groups in shared[place]:
                reduction.add(values, groups)
        reduction.reduce()
        for planned in self._planned:
            planned.plan.finish()
        moved = {place for place, item in enumerate(self._work) if item.grad is None and item.average is not None}
        return [self._work[place] for place in sorted(self._left | moved)]

    def finished(self, applied: bool) -> None:
        """Let go of the work, whose gradients else would live until the next step; if it was made, count that, with the
        parameters that kernels wrote."""
        for place, item in enumerate(self._work if applied else ()):
            if place not in self._left and item.grad is not None:
                item.weight.written(drawn=item.source is item.weight)
        self._work, self._directions = (), {}


def exceeding(gradients: Sequence[Tensor | None], device: torch.device) -> Tensor:
    """`numerics.exceeds` of gradients that no kernel takes, float32; 0 where there is none."""
    none = torch.zeros((), dtype=torch.float32, device=device)
    found = [none if grad is None else numerics.exceeds(grad, LARGEST_GRADIENT).to(device) for grad in gradients]
    return torch.stack(found) if found else none.new_empty(0)


def _rows(work: Sequence[ParameterStep]) -> tuple[list[SettingsRow], list[int]]:
    """The settings of a step, and of each of the work the number of its row."""
    rows: dict[tuple[int, tuple[int, ...]], SettingsRow] = {}
    numbers: list[int] = []
    places: dict[tuple[int, tuple[int, ...]], int] = {}
    for item in work:
        of, settings = item.group, item.group.settings
        shape = tuple(item.param.shape) if isinstance(settings, MuonSettings) else ()
        key = of.number, shape
        if key not in places:
            places[key] = len(places)
            rows[key] = _row(settings, of, shape)
        numbers.append(places[key])
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
    """What plans depend on, but for what is fixed when a state is made."""
    found: list[int] = []
    for item, number in zip(work, numbers, strict=True):
        found.append(number)
        for state in item.targets.values():
            found += state.signature()
    return found


def _fits(grad: Tensor | None, device: torch.device) -> bool:
    return grad is not None and grad.dtype in GRADIENT_DTYPES and grad.device == device


def _draw(item: ParameterStep) -> int:
    """The number of the draw of a quantized weight's own words, where it has no master."""
    storage = item.weight.storage
    return int(storage.state[DRAWS]) if storage is not None and item.source is item.weight else 0


def _shared(
    item: ParameterStep, number: int, grids: dict[tuple[int, str, str], Tensor]
) -> Iterator[tuple[Tensor, Groups]]:
    """The amaxes of a parameter that ranks share, in the order of `ParameterStep.measure`."""
    for target, state in item.targets.items():
        if state.storage is None:
            continue
        role = WEIGHT if state.writes_weight else target
        for name in storages.scale_names(state.storage.cell):
            if name in state.shared:
                yield grids[number, role, name], state.shared[name]


# ------------------------------------------------------------------------------------------------ what a plan is told


def _parameter(item: ParameterStep, row: int, bounded: bool) -> StepParameter | None:
    """What a plan is told of a parameter; None if kernels do not take it."""
    states = {**item.targets, WEIGHT: item.weight}
    stored = {role: found for role, state in states.items() if (found := state.for_kernels()) is not None}
    rectangle, storage = _rectangle(item.param), item.weight.storage
    if rectangle is None or len(stored) < len(states):
        return None
    key = 0 if storage is None else int(storage.state[KEY])
    algorithm = _algorithm(item.group.settings)
    return StepParameter(stored, rectangle, row, item.stream, key, WEIGHT_STREAM, bounded, algorithm)


def _rectangle(param: Tensor) -> MatrixRegion | None:
    """Which part of a global matrix the local elements are; None for a piece that is none. See `StateDraw.words`."""
    place = TensorRegion.of_local(param)
    whole, origin, shape = place.global_shape, place.origin, place.shape
    if len(shape) < 2:
        return MatrixRegion((1, math.prod(whole)), (0, sum(origin)), (1, math.prod(shape)))
    if len(shape) > 2 and shape[1:] != whole[1:]:
        return None
    return MatrixRegion(
        (whole[0], math.prod(whole[1:])), (origin[0], sum(origin[1:])), (shape[0], math.prod(shape[1:]))
    )
