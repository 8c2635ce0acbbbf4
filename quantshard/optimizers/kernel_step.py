"""One parameter's part of an optimizer step: in PyTorch, or in multi-tensor kernels for many parameters at once.

Kernels need gradients in float32, bfloat16 or float16, contiguous tensors, and shards that are parts of a matrix. They
write new values as they compute them, so ranks must agree beforehand on whether the step is skipped. If ranks share
blocks, that is one collective more than in PyTorch, but one pass less over states and weights.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quantshard import kernel_dispatch, kernels, private_torch
from quantshard.collectives.flat_max import FlatMax
from quantshard.collectives.process_groups import Groups
from quantshard.errors import ConfigurationError
from quantshard.kernels.optimizer.stored import Algorithm, StepParameter
from quantshard.numerics import adam
from quantshard.numerics.adam import Bound, Hyperparameters
from quantshard.numerics.lion import LionSettings
from quantshard.numerics.muon import MuonSettings
from quantshard.numerics.states import AVERAGE, MASTER, WEIGHT, StateSpec
from quantshard.optimizers.guards import LARGEST_GRADIENT, FlagLayout, in_order
from quantshard.optimizers.state import OptimizerState, TensorRegion, ndim_of_states, rounded_roles
from quantshard.tensor import storage as storages
from quantshard.tensor.parameter_state import RNG_DRAWS, RNG_KEY, WEIGHT_STREAM
from quantshard.tensor.requantize import Requantization

if kernels.USABLE:
    from quantshard.kernels.optimizer.plan import GRADIENT_DTYPES, StepLaunchPlan, settings_row

Update = tuple[Tensor, Mapping[str, Tensor]]
"""New values of a master, and new values of its states by role."""


@dataclass(frozen=True)
class GroupSettings:
    """A group's step number, from 1, the argument `settings` of `update`, and the decay of its averages (0: none)."""

    step: int | Tensor
    settings: Any
    ema_decay: float = 0.0

    @cached_property
    def average_share(self) -> float | Tensor:
        return adam.average_share(self.ema_decay, self.step)


class ParameterStep:
    """One parameter's part of a step: set `grad`, `group` and `seed`, call `measure`, run the reduction, call `finish`.

    Args:
        states: the parameter's states by role, including the parameter itself as `WEIGHT`.
        specs: the states that `update` reads and returns.
        stream: stream number of the first role's random bits; the other roles follow.

    Attributes:
        source: the state that the formula reads as master: a master, or the weight.
        targets: the states to write, by role, including the weight unless its master writes it.
        streams: stream number of each role's random bits, and whether the two halves of each number are swapped.
    """

    group: GroupSettings

    def __init__(
        self, param: Tensor, states: Mapping[str, OptimizerState], specs: tuple[StateSpec, ...],
        update: Callable[..., Update], group_index: int, stream: int,
    ) -> None:  # fmt: skip
        self.param, self.local, self.region = param, private_torch.local_tensor(param), TensorRegion.of_local(param)
        self.specs, self.update, self.group_index, self.stream = specs, update, group_index, stream
        self.weight, self.source = states[WEIGHT], states.get(MASTER, states[WEIGHT])
        self.targets = {role: state for role, state in states.items() if role != WEIGHT}
        if not self.source.writes_weight:
            self.targets[WEIGHT] = self.weight
        roles = [*(spec.role for spec in specs), MASTER, WEIGHT]
        shared_with = {spec.role: spec.words_of for spec in specs if spec.words_of is not None}
        self.streams = {
            role: (stream + roles.index(shared_with.get(role, role)), role in shared_with) for role in roles
        }
        self.storage = self.weight.storage
        self.has_draws = self.storage is not None and self.source is self.weight
        self.is_stack = param.ndim == 3 and self.storage is not None
        self.grad: Tensor | None = None
        self.seed: int | None = None
        self.in_kernels = False
        self.requantizations: dict[str, Requantization | None] = {}

    def version(self) -> int:
        if self.storage is None:
            return private_torch.in_place_changes(self.param)
        return self.storage.seen_version()

    def record_kernel_write(self) -> None:
        if self.grad is None or not self.in_kernels:
            return
        torch.autograd.graph.increment_version(self.local)
        if self.storage is not None:
            self.storage.mark_written()
            if self.has_draws:
                self.storage.state[RNG_DRAWS].add_(1)

    def measure(self, reduction: FlatMax) -> None:
        """Register the amaxes of blocks shared with other ranks."""
        if any(state.shared for state in self.targets.values()):
            # All ranks must register the same shapes, so a missing gradient counts as zeros.
            self._measure(self._new_values(), reduction)

    def _measure(self, values: dict[str, Tensor], reduction: FlatMax) -> None:
        self.requantizations = {role: state.measure(values[role], reduction) for role, state in self.targets.items()}

    def _new_values(self) -> dict[str, Tensor]:
        master = self.source.read()
        grad = torch.zeros_like(master) if self.grad is None else self.grad.float()
        states = {spec.role: self.targets[spec.role].read() for spec in self.specs}
        master, updated = self.update(self.param, grad, master, states, self.group.settings)
        if updated.keys() != states.keys():
            raise ConfigurationError(f"update returned the states {[*updated]}; `states` declares {[*states]}")
        new = dict.fromkeys(self.targets, master) | {role: updated[role] for role in states}
        if AVERAGE in self.targets:
            new[AVERAGE] = adam.moved_average(self.targets[AVERAGE].read(), master, self.group.average_share)
        return new

    def finish(self, skip: Tensor | None = None) -> None:
        """Write states and parameter. Where `skip` (a bool scalar tensor) is true, nothing changes."""
        if self.grad is None:
            if AVERAGE in self.targets:
                # the weight stays, and the average approaches it
                average = self.targets[AVERAGE].read()
                moved = adam.moved_average(average, self.source.read(), self.group.average_share)
                self.targets[AVERAGE].write(moved if skip is None else torch.where(skip, average, moved), None)
            return
        live = [tensor for state in self.targets.values() for tensor in state.live()]
        before = [] if skip is None else [tensor.clone() for tensor in live]
        values = self._new_values()
        if not self.requantizations:
            self._measure(values, FlatMax())
        rounded = [] if self.seed is None else rounded_roles(self.targets)
        for role, state in self.targets.items():
            draw = None
            if role in rounded and self.seed is not None:
                stream = self.streams[role]
                draw = partial(self.region.random_bits, self.seed, self.group.step, *stream, self.local.device)
            state.write(values[role], self.requantizations[role], draw)
        if skip is not None:
            for tensor, old in zip(live, before, strict=True):
                tensor.copy_(torch.where(skip.to(old.device), old, tensor))


class _DevicePlan(NamedTuple):
    """The launch plan of one device, the indices of its parameters, and their amaxes that ranks share, by index."""

    launches: StepLaunchPlan
    indices: list[int]
    shared: dict[int, list[tuple[Tensor, Groups]]]


class KernelStep:
    """The parameters of an optimizer that kernels update, unless `enabled` is False.

    Each step calls `take`, `exceeding` and `update`; for Muon also `make_directions` and `set_directions` in between.
    """

    def __init__(self, work: Sequence[ParameterStep], enabled: bool) -> None:
        self._work, self._enabled = work, enabled
        states = [state for item in work for state in item.targets.values()]
        self._tensors = [tensor for state in states for tensor in state.live()]
        self._storages = [state.storage for state in states if state.storage is not None]
        self._plans: list[_DevicePlan] = []
        self._addresses: list[int] = []
        self._rows: dict[tuple[int, tuple[int, ...]], ParameterStep] = {}
        self._captured: list[StepLaunchPlan] = []  # kept alive: CUDA graphs read their tables by address
        self._directions: dict[int, Tensor] = {}

    @property
    def is_captured(self) -> bool:
        """Whether a CUDA graph reads tables of this object, so that it must stay alive."""
        return bool(self._captured) or any(plan.launches.is_captured for plan in self._plans)

    def take(self, seed: int | None, workspace: Callable[[torch.device], Tensor] | None = None) -> bool:
        """Begin a step. Return True if the device of any parameter has kernels, which is the same on every rank."""
        if not self._enabled:
            return False
        addresses = self._current_addresses()
        if addresses != self._addresses:
            self._addresses = []  # in case that a plan cannot be made
            self._make_plans()
            self._addresses = addresses
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
                item = self._work[index]
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
                rng_counters.append(0 if storage is None else int(storage.state[RNG_DRAWS]))
                directions.append(direction)
            plan.launches.take(grads, rows, seed, rng_counters, directions)
        return True

    def _current_addresses(self) -> list[int]:
        """Addresses of all tensors, and the keys of weights with random draws, which a load writes in place."""
        tensors = [*self._tensors]
        for storage in self._storages:  # their entries can be replaced
            tensors += storage.components.values()
            tensors += storage.state.values()
        keys = [int(item.storage.state[RNG_KEY]) for item in self._work if item.has_draws and item.storage is not None]
        return [tensor.data_ptr() for tensor in tensors] + keys

    def _make_plans(self) -> None:
        self._captured += [plan.launches for plan in self._plans if plan.launches.is_captured]
        self._plans, self._rows = [], {}
        if not any(kernel_dispatch.has_kernels(item.local) for item in self._work):
            return
        by_device: dict[torch.device, dict[int, StepParameter]] = {}
        for index, item in enumerate(self._work):
            shape = tuple(item.param.shape[-2:]) if isinstance(item.group.settings, MuonSettings) else ()
            self._rows.setdefault((item.group_index, shape), item)
            row = [*self._rows].index((item.group_index, shape))
            if kernel_dispatch.has_kernels(item.local) and (parameter := _parameter(item, row)) is not None:
                by_device.setdefault(item.local.device, {})[index] = parameter
        for device, parameters in by_device.items():
            launches = StepLaunchPlan([*parameters.values()], len(self._rows), device)
            numbers = {index: number for number, index in enumerate(parameters)}
            shared = {
                index: list(_shared(self._work[index], number, launches.amaxes)) for index, number in numbers.items()
            }
            self._plans.append(_DevicePlan(launches, [*parameters], shared))

    def exceeding(self) -> Tensor:
        """Return `numerics.exceeds` of each gradient of the step, float32 [parameters]; 0 for a missing gradient."""
        parts = [(plan.indices, plan.launches.exceeding(LARGEST_GRADIENT)) for plan in self._plans]
        remaining = self._remaining()
        if len(parts) == 1 and not remaining and len(parts[0][0]) == len(self._work):
            return parts[0][1]
        grads = {index: grad for index in remaining if (grad := self._work[index].grad) is not None}
        if grads:
            parts.append(([*grads], kernel_dispatch.exceeding([*grads.values()], LARGEST_GRADIENT)))
        return in_order(parts, len(self._work), self._work[0].local.device)

    def _remaining(self) -> list[int]:
        return [index for index, item in enumerate(self._work) if not item.in_kernels]

    def make_directions(self) -> dict[int, Tensor]:
        """Return this rank's shards of the matrices to orthogonalize, bfloat16, by index in the work."""
        for plan in self._plans:
            plan.launches.make_directions()
        return self._directions

    def set_directions(self, parts: Sequence[Tensor]) -> None:
        for index, direction in self._directions.items():
            direction.copy_(parts[index])

    def update(self, skip: Tensor) -> list[ParameterStep]:
        """Update the parameters unless `skip` is true, and return the parameter steps that are still to be finished.
        Those are measured here in PyTorch, or averages without a gradient. A collective call if ranks share blocks."""
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


@dataclass(frozen=True)
class StepPlan:
    """The parameters of an optimizer's steps; made again if a state, or a local tensor of a parameter, is replaced."""

    items: list[ParameterStep]
    flags: FlagLayout
    kernels: KernelStep

    @property
    def is_captured(self) -> bool:
        return self.kernels.is_captured

    def is_current(self) -> bool:
        for item in self.items:
            local = private_torch.local_tensor(item.param)
            if local is not item.local or getattr(local, "quantized_storage", None) is not item.storage:
                return False
        return True


def padded_size(count: int) -> int:
    """Return the number of elements that a matrix of `count` elements occupies in the workspace of directions."""
    return -(count // -16) * 16


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


def _parameter(item: ParameterStep, row: int) -> StepParameter | None:
    states, settings = {**item.targets, WEIGHT: item.weight}, item.group.settings
    for_kernels = {role: tensors for role, state in states.items() if (tensors := state.for_kernels()) is not None}
    rectangle = item.region.matrix()
    if rectangle is None or len(for_kernels) < len(states):
        return None
    rng_key = 0 if item.storage is None else int(item.storage.state[RNG_KEY])
    is_matrix = isinstance(settings, Hyperparameters) and ndim_of_states(item.param) == 2
    bound = settings.matrix_bound if is_matrix else Bound.NONE
    algorithm = {MuonSettings: Algorithm.MUON, LionSettings: Algorithm.LION}.get(type(settings), Algorithm.ADAM)
    return StepParameter(for_kernels, rectangle, row, item.stream, rng_key, WEIGHT_STREAM, bound, algorithm)
