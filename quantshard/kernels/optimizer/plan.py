"""A step of Adam, Lion or Muon over many tensors: planned once, then cheap to launch.

    plan = StepLaunchPlan(parameters, rows, device)

    plan.take(gradients, rows, seed)                 every step
    plan.exceeding(limit)                            optional: gradients that are too large or not finite
    plan.make_directions()                           Muon only: the matrices to orthogonalize, in place
    plan.update(skip)
    (reduce the tensors of plan.amaxes with MAX over the ranks that share them)
    plan.finish()

`parameters` decides which launches a parameter needs.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any, Final, NamedTuple

import torch
import triton
from torch import Tensor

from quantshard.errors import UnsupportedOperationError
from quantshard.formats import Component, Orientation
from quantshard.kernels import scale_rule as sr
from quantshard.kernels.launch import launch_kernel
from quantshard.kernels.optimizer import multi_tensor as km
from quantshard.kernels.optimizer import states as ks
from quantshard.kernels.optimizer import step as kp
from quantshard.kernels.optimizer.parameters import (
    REDO,
    USED,
    AmaxWorkspace,
    StepPasses,
    is_aligned,
    passes_of,
    step_kernel_config,
)
from quantshard.kernels.optimizer.stored import (
    SETTINGS,
    Algorithm,
    ScaledTensor,
    SettingsRow,
    StepParameter,
    StoredTensor,
)
from quantshard.kernels.tables import device_table
from quantshard.numerics import adam
from quantshard.numerics.states import AVERAGE, WEIGHT

GRADIENT_DTYPES: Final = tuple(km.TYPES)
"""Dtypes of gradients that kernels read; other gradients are cast to float32."""

WARPS: Final = 8
REDO_PROGRAMS: Final = 64


class AmaxGrid(NamedTuple):
    """Amaxes to reduce: parameter number, role, component, and the float32 values of its resident grid."""

    parameter: int
    role: str
    component: str
    values: Tensor


@dataclass
class _KernelLaunch:
    """One kernel launch: kernel, constants, table, the numbers of its parameters, and options of the compiler."""

    kernel: Any
    how: ks.StepKernelConfig
    members: list[int]
    table: Tensor
    entries: Tensor
    programs: int
    options: dict[str, Any]
    redo: bool = False


class StepLaunchPlan:
    """Launch plan of a step; see the head of this file. It stores addresses: make a new plan if a tensor was replaced.

    Args:
        parameters: all on `device`; which of them have gradients can differ from step to step.
        rows: number of rows of settings.

    Attributes:
        amaxes: grids to reduce between `update` and `finish` if ranks share them, in the order of parameters.
    """

    def __init__(self, parameters: Sequence[StepParameter], rows: int, device: torch.device) -> None:
        self.parameters, self.rows, self.device = list(parameters), rows, device
        if self._is_capturing:
            raise UnsupportedOperationError(
                "an optimizer's step in a CUDA graph: its tables cannot be made while it is captured; run a step "
                "before, and none of its tensors may be replaced between the two"
            )
        self._ways = [passes_of(parameter) for parameter in self.parameters]
        self._workspace = workspace = AmaxWorkspace(self.parameters, device)
        self.amaxes = [AmaxGrid(*key, workspace.view(key)) for key in workspace.places if key[2] not in (USED, REDO)]
        aligned = [is_aligned(parameter) for parameter in self.parameters]
        self._aligned = aligned
        self._first, self._last = self._launches()
        self._scales = self._scale_tables()
        self._histories = self._history_tables()
        numels = [parameter.rectangle.shape[0] * parameter.rectangle.shape[1] for parameter in self.parameters]
        self._reading = km.TensorReader(numels, len(ks.GRADIENT), device)
        count = len(self.parameters) * len(ks.GRADIENT) + rows * (len(ks.GROUP) + 4)
        count += -(rows * len(SETTINGS) // -2)
        self._table = torch.zeros(count, dtype=torch.int64, device=device)
        self._sent: list[int] | None = None
        self._spare = self._pinned()
        self._captured: list[Tensor] = []  # CUDA graphs copy from these at every replay
        self._held: list[Tensor] = []
        self._one = torch.ones((), dtype=torch.float32, device=device)
        self._skip: Tensor | None = None

    # Tables ----------------------------------------------------------------------------------------------------------

    def _launches(self) -> tuple[list[_KernelLaunch], list[_KernelLaunch]]:
        """Launches of `update` and of `finish`; parameters with equal constants share a launch."""
        first: dict[tuple[Any, ks.StepKernelConfig, bool], list[int]] = {}
        last: dict[tuple[Any, ks.StepKernelConfig, bool], list[int]] = {}
        for number, (parameter, passes, aligned) in enumerate(
            zip(self.parameters, self._ways, self._aligned, strict=True)
        ):
            once, twice = passes is StepPasses.ONCE, passes is StepPasses.TWICE
            delayed = isinstance(parameter.weight, ScaledTensor) and parameter.weight.history is not None
            measures = not once or delayed
            first_config = step_kernel_config(parameter, aligned, measures, not twice, once)
            first.setdefault((kp.step_kernel, first_config, False), []).append(number)
            if twice:
                last.setdefault(
                    (kp.step_kernel, step_kernel_config(parameter, aligned, False, True, True), False), []
                ).append(number)
            elif not once or delayed:
                config = step_kernel_config(parameter, aligned, False, False, True)
                last.setdefault((kp.requantize_kernel, config, once), []).append(number)
        return tuple(
            [self._launch(kernel, config, members, redo) for (kernel, config, redo), members in groups.items()]
            for groups in (first, last)
        )  # type: ignore[return-value]

    def _launch(self, kernel: Any, how: ks.StepKernelConfig, members: list[int], redo: bool) -> _KernelLaunch:
        programs, across = [], []
        for number in members:
            _, origin, shape = self.parameters[number].rectangle
            height = how.rows * how.chunks
            tiles = [-((o + n) // -t) - o // t for o, n, t in zip(origin, shape, (height, how.cols), strict=True)]
            across.append(max(tiles[1], 1))
            programs.append(tiles[0] * tiles[1] if min(shape) > 0 else 0)
        firsts = (0, *accumulate(programs))
        table = [self._row(*row) for row in zip(members, across, firsts, strict=False)]
        entries = km.entry_of_program(tuple(programs), self.device)
        return _KernelLaunch(
            kernel, how, members, device_table(table, self.device), entries, firsts[-1], launch_options(how), redo
        )

    def _row(self, number: int, across: int, first: int) -> list[int]:
        parameter = self.parameters[number]
        redo = self._workspace.address(number, WEIGHT, REDO)
        row = [
            number, parameter.group, *parameter.rectangle.shape, *parameter.rectangle.origin,
            parameter.rectangle.global_shape[1], across, first,
            parameter.stream, parameter.key, parameter.key_stream, redo,
        ]  # fmt: skip
        for role in parameter.roles:
            row += self._slot(number, role, parameter.stored.get(role), Orientation.ROWWISE)
        row += self._slot(number, WEIGHT, parameter.weight, Orientation.COLUMNWISE)
        return row + self._slot(number, AVERAGE, parameter.stored.get(AVERAGE), Orientation.ROWWISE)

    def _slot(self, number: int, role: str, thing: StoredTensor | None, which: Orientation) -> list[int]:
        """Addresses for the `ks.SLOT` columns."""
        if not isinstance(thing, ScaledTensor):
            is_stored = thing is not None and which is Orientation.ROWWISE
            return [thing.tensor.data_ptr() if is_stored and thing is not None else 0] + [0] * (len(ks.SLOT) - 1)
        copy = thing.fmt.copies.get(which)
        if copy is None:
            return [0] * len(ks.SLOT)
        (row, _), (col, _) = ((s.start, s.stop) for s in thing.shard.touched(copy.scale))
        stride = thing.shard.component_shape(copy.scale)[1]
        first = row * stride + col

        def of(component: Component | None) -> int:
            return 0 if component is None else self._workspace.address(number, role, component.name)

        measured = of(copy.scale) and of(copy.scale) + 4 * first
        used_amax = self._workspace.address(number, role, USED)
        codes, scale = thing.components[copy.codes.name], thing.components[copy.scale.name]
        return [
            codes.data_ptr(), scale.data_ptr() + first * scale.element_size(), stride,
            0 if copy.amax is None else thing.components[copy.amax.name].data_ptr(),
            measured, used_amax or measured, of(copy.amax),
        ]  # fmt: skip

    def _scale_tables(self) -> list[tuple[sr.ScaleRule, int, Tensor]]:
        """Rule, number of entries and table of each launch of `km.tensor_scales_kernel`."""
        rows: dict[sr.ScaleRule, list[list[int]]] = {}
        for number, parameter in enumerate(self.parameters):
            for role, state in parameter.scaled.items():
                for copy in state.fmt.copies.values():
                    if not state.is_later(copy):
                        continue
                    grid = copy.scale.name if state.history is None else USED
                    address = self._workspace.address
                    scale, second = state.components[copy.scale.name], copy.amax
                    rule = sr.scale_rule(copy, state.scaling, torch.float32, self.device)
                    rows.setdefault(rule, []).append([
                        number, address(number, role, grid), scale.data_ptr(),
                        scale.numel() if state.is_given(copy) else 0,
                        0 if second is None else address(number, role, second.name),
                        0 if second is None else state.components[second.name].data_ptr(),
                    ])  # fmt: skip
        return [(rule, len(table), device_table(table, self.device)) for rule, table in rows.items()]

    def _history_tables(self) -> list[tuple[bool, int, Tensor]]:
        """For delayed scaling: whether to use only the newest amax, the longest history, and the table."""
        rows: dict[bool, list[list[int]]] = {}
        for number, parameter in enumerate(self.parameters):
            for role, state in parameter.scaled.items():
                if state.history is None:
                    continue
                (copy,) = state.fmt.copies.values()
                address = self._workspace.address
                rows.setdefault(state.scaling.most_recent, []).append([
                    number, state.history.data_ptr(), state.history.numel(), address(number, role, USED),
                    address(number, role, copy.scale.name), address(number, role, REDO),
                ])  # fmt: skip
        return [(key, max(row[2] for row in table), device_table(table, self.device)) for key, table in rows.items()]

    # A step ----------------------------------------------------------------------------------------------------------

    def take(
        self,
        gradients: Sequence[Tensor | None],
        rows: Sequence[SettingsRow],
        seed: int | None,
        draws: Sequence[int] | None = None,
        directions: Sequence[Tensor | None] | None = None,
    ) -> None:
        """Copy the inputs of a step to the device.

        Args:
            gradients: gradient of each parameter's rectangle; None leaves the parameter unchanged.
            rows: rows of settings. If step and lr are tensors, their values are not read back.
            seed: seed of the optimizer's random words; None if nothing is rounded stochastically.
            draws: for each parameter, the draw number of its own random words.
            directions: for each Muon matrix, contiguous bfloat16 of its shape: `make_directions` writes the matrix to
                orthogonalize, and `update` reads the orthogonalized one.

        Raises:
            UnsupportedOperationError: under CUDA graph capture, if no step has run since the last capture.
        """
        grads = self._gradients(gradients)
        codes = [0 if grad is None else GRADIENT_DTYPES.index(grad.dtype) + 1 for grad in grads]
        addresses = [0 if grad is None else grad.data_ptr() for grad in grads]
        zeros = [0] * len(codes)
        direction_addresses = (
            zeros
            if directions is None
            else [0 if direction is None else direction.data_ptr() for direction in directions]
        )
        columns = zip(codes, addresses, draws or zeros, direction_addresses, strict=True)
        self._upload([value for parameter in columns for value in parameter] + _settings_table(rows, seed))
        self._present = codes
        self._correct(rows)

    def exceeding(self, largest: float) -> Tensor:
        """Return `numerics.exceeds` of each gradient, float32 [parameters]; 0 for a missing gradient."""
        return self._reading.exceeding(self._parts[0], self._present, largest)

    def make_directions(self) -> None:
        """Write Muon's matrices to orthogonalize into the `directions` passed to `take`. States do not change."""
        gradient_table, _, _, _, settings = self._parts
        for launch in self._first:
            if launch.how.algorithm != Algorithm.MUON or launch.programs == 0:
                continue
            for code in self._codes_of(launch):
                launch_kernel(
                    kp.momentum_kernel, (launch.programs,), self.device,
                    launch.table, launch.entries, gradient_table, settings, km.TYPES[GRADIENT_DTYPES[code - 1]], code,
                    launch.how, num_warps=WARPS, enable_fp_fusion=False,
                )  # fmt: skip

    def update(self, skip: Tensor | None = None) -> None:
        """Run the first part of a step: everything that needs no reduced amaxes.

        `skip`: bool scalar on the device; if it is true, `update` and `finish` change nothing.
        """
        self._skip = None if skip is None else skip.view(torch.uint8)
        self._workspace.flat.zero_()
        for most_recent, length, table in self._histories:
            launch_kernel(
                km.tensor_past_kernel, (len(table),), self.device,
                table, most_recent, triton.next_power_of_2(length), num_warps=1,
            )  # fmt: skip
        for launch in self._first:
            self._run(launch)

    def finish(self) -> None:
        """Run the second part of a step, which uses the reduced `amaxes`."""
        gradient_table, stride = self._parts[0], len(ks.GRADIENT)
        for most_recent, length, table in self._histories:
            launch_kernel(
                km.tensor_record_kernel, (len(table),), self.device,
                table, gradient_table, self._skip, stride, most_recent, triton.next_power_of_2(length), num_warps=1,
            )  # fmt: skip
        for launch in self._last:
            self._run(launch)
        for rule, count, table in self._scales:  # last, because the launches above still read the old scales
            launch_kernel(
                km.tensor_scales_kernel, (count, 4), self.device,
                table, gradient_table, self._skip, stride, 512, rule, num_warps=4, enable_fp_fusion=False,
            )  # fmt: skip
        self._held = []

    def _gradients(self, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Convert gradients to a dtype and layout that kernels read."""
        grads: list[Tensor | None] = []
        for grad, aligned in zip(gradients, self._aligned, strict=True):
            if grad is not None:
                if grad.dtype not in GRADIENT_DTYPES:
                    grad = grad.float()
                grad = grad.contiguous()
                if aligned and grad.data_ptr() % 16:  # kernels read 16 bytes at once
                    grad = grad.clone()
            grads.append(grad)
        self._held = [grad for grad in grads if grad is not None]
        return grads

    @cached_property
    def _parts(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Views of the step's table: gradients, groups, decays (two betas, averages), bias correction flags,
        settings."""
        sizes = (len(self.parameters) * len(ks.GRADIENT), self.rows * len(ks.GROUP), self.rows * 3, self.rows)
        *parts, settings = self._table.split([*sizes, len(self._table) - sum(sizes)])
        return parts[0], parts[1], parts[2].view(torch.float64), parts[3], settings.view(torch.float32)

    def _correct(self, rows: Sequence[SettingsRow]) -> None:
        """Compute bias corrections on the device, if step and lr are tensors there."""
        steps = [row.step for row in rows if isinstance(row.step, Tensor)]
        if not steps:
            return
        _, groups, decays, corrected, settings = self._parts
        rates = [self._float32(number) for row in rows for number in (row.lr, row.kept)]
        launch_kernel(
            km.corrections_kernel, (self.rows,), self.device,
            torch.stack(steps).to(self.device), torch.stack(rates), decays, corrected, groups, settings,
            len(ks.GROUP), len(SETTINGS), *map(SETTINGS.index, ("correction1", "share", "kept")),
            num_warps=1, enable_fp_fusion=False,
        )  # fmt: skip

    def _float32(self, number: float | Tensor) -> Tensor:
        if isinstance(number, Tensor):
            return number.to(self.device, torch.float32)
        if number == 1.0:
            return self._one
        return torch.full((), number, dtype=torch.float32, device=self.device)  # a copy from the host would synchronize

    def _codes_of(self, launch: _KernelLaunch) -> list[int]:
        """Codes of the dtypes of the gradients in this launch."""
        return sorted({self._present[number] for number in launch.members} - {0})

    def _run(self, launch: _KernelLaunch) -> None:
        if launch.programs == 0:
            return
        gradient_table, groups, _, _, settings = self._parts
        options = launch.options
        if launch.kernel is kp.requantize_kernel:
            grid = (len(launch.members), REDO_PROGRAMS) if launch.redo else (launch.programs,)
            launch_kernel(
                launch.kernel, grid, self.device,
                launch.table, launch.entries, gradient_table, self._skip, launch.how, launch.redo, **options,
            )  # fmt: skip
            return
        for code in self._codes_of(launch):
            launch_kernel(
                launch.kernel, (launch.programs,), self.device,
                launch.table, launch.entries, gradient_table, groups, settings, self._skip,
                km.TYPES[GRADIENT_DTYPES[code - 1]], code, launch.how, **options,
            )  # fmt: skip

    # The table of a step ---------------------------------------------------------------------------------------------

    def _pinned(self) -> Tensor | None:
        return (
            torch.empty(self._table.shape, dtype=torch.int64, pin_memory=True, device="cpu") if self._is_cuda else None
        )

    @property
    def _is_cuda(self) -> bool:
        return self.device.type == "cuda"

    @property
    def _is_capturing(self) -> bool:
        return self._is_cuda and torch.cuda.is_current_stream_capturing()

    @property
    def is_captured(self) -> bool:
        """True if a CUDA graph has captured a step, and with it the addresses of the tables."""
        return bool(self._captured)

    def _upload(self, values: list[int]) -> None:
        """Copy the table of a step to the device if it has changed, without synchronizing."""
        capturing = self._is_capturing
        if values == self._sent and not capturing and not self.is_captured:  # a replayed graph overwrites the table
            return
        host = torch.tensor(values, dtype=torch.int64, device="cpu")
        if capturing:  # the graph's source must outlive it, and pinned memory cannot be allocated during capture
            if self._spare is None:
                raise UnsupportedOperationError("an optimizer's step in a CUDA graph: run a step between two captures")
            host, self._spare = self._spare.copy_(host), None
            self._captured.append(host)
        elif self._is_cuda:
            host = host.pin_memory()
            self._spare = self._pinned() if self._spare is None else self._spare
        self._table.copy_(host, non_blocking=True)
        self._sent = None if capturing else values


def launch_options(how: ks.StepKernelConfig) -> dict[str, Any]:
    """Return the number of warps and the register limit, so that several programs share a multiprocessor and hide
    latency.

    There is no limit where it would leave too few registers. With random words each thread has 16 elements, which share
    part of the generator's work.
    """
    options: dict[str, Any] = {"num_warps": WARPS, "enable_fp_fusion": False}
    words = any(config.stochastic and config.writes for config in how if isinstance(config, ks.StateConfig))
    if words and how.aligned:
        options["num_warps"] = how.rows * how.cols // (16 * 32)
    if (how.high and not how.rereads) or (words and not how.aligned):
        return options
    options["maxnreg"] = 128 if words or how.rows > 16 or not how.aligned else 80
    return options


def _settings_table(rows: Sequence[SettingsRow], seed: int | None) -> list[int]:
    """Return the part of a step's table, int64, that rows fill: seeds and steps, decays, bias correction flags, and
    columns.

    Two float32 columns share an int64. Values that are tensors are filled in on the device.
    """
    table: list[int] = []
    decays: list[float] = []
    floats: list[float] = []
    for row in rows:
        columns, step = dict(row.columns), 0
        if not isinstance(row.step, Tensor):
            assert not isinstance(row.lr, Tensor) and not isinstance(row.kept, Tensor)
            step = row.step
            columns |= {"lr": float(row.lr), "kept": float(row.kept)}
            columns["share"] = float(adam.average_share(row.ema_decay, step)) if row.ema_decay else 0.0
        table += [seed or 0, step]
        decays += [*row.betas, row.ema_decay]
        floats += [columns.get(name, 0.0) for name in SETTINGS]
    floats += [0.0] * (len(floats) % 2)
    return [*table, *_as_int64("d", decays), *[int(row.corrects) for row in rows], *_as_int64("f", floats)]


def _as_int64(kind: str, values: Sequence[float]) -> tuple[int, ...]:
    data = struct.pack(f"<{len(values)}{kind}", *values)
    return struct.unpack(f"<{len(data) // 8}q", data)
