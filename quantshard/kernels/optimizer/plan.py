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

import struct
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any, Final

import torch
import triton
from torch import Tensor

from quantshard.errors import UnsupportedOperationError
from quantshard.formats import Orientation
from quantshard.kernels import scale_rule as sr
from quantshard.kernels.launch import launch_kernel
from quantshard.kernels.optimizer import multi_tensor as km, parameters as kq, states as ks, step as kp
from quantshard.kernels.optimizer.stored import SETTINGS, PlainTensor, ScaledTensor, SettingsRow, StepParameter
from quantshard.kernels.quantize.targets import touched
from quantshard.kernels.workspace import device_table
from quantshard.numerics import adam, lion, muon
from quantshard.numerics.states import AVERAGE, WEIGHT

GRADIENT_DTYPES: Final = tuple(km.TYPES)

WARPS: Final = 8
REDO_PROGRAMS: Final = 64


@dataclass
class _KernelLaunch:
    kernel: Any
    config: ks.StepKernelConfig
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
        amaxes: grids to reduce between `update` and `finish` if ranks share them, by parameter number, role and
            component.
    """

    def __init__(self, parameters: Sequence[StepParameter], rows: int, device: torch.device) -> None:
        self.parameters, self.rows, self.device = list(parameters), rows, device
        if self._is_capturing:
            raise UnsupportedOperationError("a captured optimizer step makes new tables; run a step before the capture")
        self._workspace = kq.AmaxWorkspace(self.parameters, device)
        self.amaxes = {key: grid for key, grid in self._workspace.grids.items() if key[2] not in (kq.USED, kq.REDO)}
        self._aligned = [kq.is_aligned(parameter) for parameter in self.parameters]
        self._first, self._last = self._launches()
        self._scales = self._scale_tables()
        self._histories = self._history_tables()
        numels = [parameter.rectangle.shape[0] * parameter.rectangle.shape[1] for parameter in self.parameters]
        self._reader = km.TensorReader(numels, ks.GRADIENT_COLUMNS.value, device)
        count = len(self.parameters) * ks.GRADIENT_COLUMNS.value + rows * (ks.GROUP_COLUMNS.value + 4)
        count += -(rows * len(SETTINGS) // -2)
        self._table = torch.zeros(count, dtype=torch.int64, device=device)
        self._uploaded: list[int] | None = None
        self._spare = self._pinned()
        self._captured: list[Tensor] = []  # CUDA graphs copy from these at every replay
        self._grads: list[Tensor | None] = []
        self._skip: Tensor | None = None
        self._compiled_codes = {0}  # of gradients' dtypes; see `take`

    def _launches(self) -> tuple[list[_KernelLaunch], list[_KernelLaunch]]:
        """Launches of `update` and of `finish`; parameters with equal constants share a launch."""
        first: dict[tuple[Any, ks.StepKernelConfig, bool], list[int]] = defaultdict(list)
        last: dict[tuple[Any, ks.StepKernelConfig, bool], list[int]] = defaultdict(list)
        for number, (parameter, aligned) in enumerate(zip(self.parameters, self._aligned, strict=True)):
            passes = kq.passes_of(parameter)
            once, twice = passes is kq.StepPasses.ONCE, passes is kq.StepPasses.TWICE
            delayed = isinstance(parameter.weight, ScaledTensor) and parameter.weight.history is not None
            first_config = kq.step_kernel_config(parameter, aligned, not once or delayed, not twice, once)
            first[kp.step_kernel, first_config, False].append(number)
            if twice:
                config = kq.step_kernel_config(parameter, aligned, False, True, True)
                last[kp.step_kernel, config, False].append(number)
            elif not once or delayed:
                config = kq.step_kernel_config(parameter, aligned, False, False, True)
                last[kp.requantize_kernel, config, once].append(number)
        return tuple(
            [self._launch(kernel, config, members, redo) for (kernel, config, redo), members in groups.items()]
            for groups in (first, last)
        )  # type: ignore[return-value]

    def _launch(self, kernel: Any, config: ks.StepKernelConfig, members: list[int], redo: bool) -> _KernelLaunch:
        tile = config.rows * config.chunks, config.cols
        rectangles = [self.parameters[number].rectangle for number in members]
        tiles = [touched(rectangle.origin, rectangle.shape, tile) for rectangle in rectangles]
        programs = [down * across for down, across in tiles]
        firsts = (0, *accumulate(programs))
        table = [self._row(n, max(wide, 1), first) for n, (_, wide), first in zip(members, tiles, firsts, strict=False)]
        entries = km.entry_of_program(tuple(programs), self.device)
        return _KernelLaunch(
            kernel, config, members, device_table(table, self.device), entries, firsts[-1], launch_options(config), redo
        )

    def _row(self, number: int, across: int, first: int) -> list[int]:
        """The row of a parameter in the table of tensors; see `states`."""
        parameter = self.parameters[number]
        row = [
            number, parameter.group, *parameter.rectangle.shape, *parameter.rectangle.origin,
            parameter.rectangle.global_shape[1], across, first, parameter.stream, parameter.rng_key,
            parameter.weight_stream, self._workspace.address(number, WEIGHT, kq.REDO),
        ]  # fmt: skip
        for role in parameter.roles:
            row += self._pointers(number, role, Orientation.ROWWISE)
        row += self._pointers(number, WEIGHT, Orientation.COLUMNWISE)
        row += self._pointers(number, AVERAGE, Orientation.ROWWISE)
        return row

    def _pointers(self, number: int, role: str, which: Orientation) -> tuple[int, ...]:
        stored = self.parameters[number].stored.get(role)
        if isinstance(stored, PlainTensor) and which is Orientation.ROWWISE:
            return ks.StatePointers(stored.tensor.data_ptr(), 0, 0, 0, 0, 0, 0)
        if not isinstance(stored, ScaledTensor) or which not in stored.fmt.copies:
            return ks.StatePointers(0, 0, 0, 0, 0, 0, 0)
        copy = stored.fmt.copies[which]
        rows, cols = stored.shard.touched(copy.scale)
        stride = stored.shard.component_shape(copy.scale)[1]
        first = rows.start * stride + cols.start
        measured = self._workspace.address(number, role, copy.scale.name)
        measured = measured and measured + 4 * first
        scale = stored.components[copy.scale.name]
        return ks.StatePointers(
            codes=stored.components[copy.codes.name].data_ptr(),
            scale=scale.data_ptr() + first * scale.element_size(),
            stride=stride,
            second=0 if copy.amax is None else stored.components[copy.amax.name].data_ptr(),
            measured=measured,
            given=self._workspace.address(number, role, kq.USED) or measured,
            new_second=0 if copy.amax is None else self._workspace.address(number, role, copy.amax.name),
        )

    def _scale_tables(self) -> list[tuple[sr.ScaleRule, int, Tensor]]:
        """Rule, number of entries and table of each launch of `km.tensor_scales_kernel`."""
        rows: dict[sr.ScaleRule, list[list[int]]] = {}
        for number, parameter in enumerate(self.parameters):
            for role, state in parameter.scaled.items():
                for copy in state.fmt.copies.values():
                    given, second = state.is_given(copy), copy.amax
                    if not given and second is None:
                        continue
                    scale = state.components[copy.scale.name]
                    rule = sr.scale_rule(copy, state.scaling, torch.float32, self.device)
                    name = copy.scale.name if state.history is None else kq.USED
                    rows.setdefault(rule, []).append([
                        number, self._workspace.address(number, role, name), scale.data_ptr(),
                        scale.numel() if given else 0,
                        0 if second is None else self._workspace.address(number, role, second.name),
                        0 if second is None else state.components[second.name].data_ptr(),
                    ])  # fmt: skip
        return [(rule, len(table), device_table(table, self.device)) for rule, table in rows.items()]

    def _history_tables(self) -> list[tuple[bool, int, Tensor]]:
        """For delayed scaling: whether to use only the newest amax, the longest history, and the table."""
        rows: dict[bool, list[list[int]]] = {}
        for number, parameter in enumerate(self.parameters):
            for role, state in parameter.scaled.items():
                if state.history is not None:
                    (copy,) = state.fmt.copies.values()
                    addresses = [self._workspace.address(number, role, n) for n in (kq.USED, copy.scale.name, kq.REDO)]
                    rows.setdefault(state.scaling.most_recent, []).append(
                        [number, state.history.data_ptr(), state.history.numel(), *addresses]
                    )
        return [(key, max(row[2] for row in table), device_table(table, self.device)) for key, table in rows.items()]

    def take(
        self, gradients: Sequence[Tensor | None], rows: Sequence[SettingsRow], seed: int | None,
        rng_counters: Sequence[int], directions: Sequence[Tensor | None] | None = None,
    ) -> None:  # fmt: skip
        """Copy the inputs of a step to the device.

        Args:
            gradients: gradient of each rectangle, of `GRADIENT_DTYPES`; None leaves the parameter unchanged.
            rows: rows of settings. If step and lr are tensors, their values are not read back.
            seed, rng_counters: of the optimizer's random bits, if any, and of each parameter's own random bits.
            directions: for each Muon matrix, contiguous bfloat16 that `make_directions` writes and `update` reads.
        """
        self._grads = []
        for grad, aligned in zip(gradients, self._aligned, strict=True):
            if grad is not None:
                grad = grad.contiguous()
                if aligned and grad.data_ptr() % 16:  # kernels read 16 bytes at once
                    grad = grad.clone()
            self._grads.append(grad)
        self._codes = [0 if grad is None else GRADIENT_DTYPES.index(grad.dtype) + 1 for grad in self._grads]
        addresses, direction_addresses = (
            [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
            for tensors in (self._grads, directions or [None] * len(self._grads))
        )
        columns = zip(self._codes, addresses, rng_counters, direction_addresses, strict=True)
        self._upload([value for parameter in columns for value in parameter] + _settings_table(rows, seed))
        self._correct(rows)

    def exceeding(self, largest: float) -> Tensor:
        """Return `numerics.exceeds` of each gradient, float32 [parameters]; 0 for a missing gradient."""
        return self._reader.exceeding(self._parts[0], self._codes, largest)

    def make_directions(self) -> None:
        """Write Muon's matrices to orthogonalize into the `directions` passed to `take`. States do not change."""
        gradient_table, _, _, _, settings = self._parts
        for launch in self._first:
            if launch.config.algorithm != ks.MUON.value or launch.programs == 0:
                continue
            for code in self._codes_of(launch):
                launch_kernel(
                    kp.momentum_kernel, (launch.programs,), self.device,
                    launch.table, launch.entries, gradient_table, settings, km.TYPES[GRADIENT_DTYPES[code - 1]], code,
                    launch.config, num_warps=WARPS, enable_fp_fusion=False,
                )  # fmt: skip

    def update(self, skip: Tensor | None = None) -> None:
        """Run what needs no reduced amaxes. `skip`: bool scalar; if true, `update` and `finish` change nothing."""
        self._skip = None if skip is None else skip.view(torch.uint8)
        if self.device.type == "cuda" and not self._compiled_codes.issuperset(self._codes) and not self._is_capturing:
            copy_context().run(self._compile)  # Triton before 3.9 leaves its mode on after an error
        self._workspace.flat.zero_()
        for most_recent, length, table in self._histories:
            launch_kernel(
                km.tensor_past_kernel, (len(table),), self.device,
                table, most_recent, triton.next_power_of_2(length), num_warps=1,
            )  # fmt: skip
        for launch in self._first:
            self._run(launch)

    def finish(self) -> None:
        gradient_table, stride = self._parts[0], ks.GRADIENT_COLUMNS.value
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
        self._grads = []

    @cached_property
    def _parts(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """The step's table: gradients, groups, decays (two betas, averages), bias correction flags, settings."""
        gradients = len(self.parameters) * ks.GRADIENT_COLUMNS.value
        sizes = (gradients, self.rows * ks.GROUP_COLUMNS.value, self.rows * 3, self.rows)
        *parts, settings = self._table.split([*sizes, len(self._table) - sum(sizes)])
        return parts[0], parts[1], parts[2].view(torch.float64), parts[3], settings.view(torch.float32)

    def _correct(self, rows: Sequence[SettingsRow]) -> None:
        """Compute bias corrections on the device, if step and lr are tensors there."""
        steps = [row.step for row in rows if isinstance(row.step, Tensor)]
        if not steps:
            return
        _, groups, decays, corrected, settings = self._parts
        # Filling runs on the device; a copy from the host would synchronize.
        rates = [
            number.to(self.device, torch.float32)
            if isinstance(number, Tensor)
            else torch.full((), number, dtype=torch.float32, device=self.device)
            for row in rows
            for number in (row.lr, row.kept)
        ]
        launch_kernel(
            km.corrections_kernel, (self.rows,), self.device,
            torch.stack(steps).to(self.device), torch.stack(rates), decays, corrected, groups, settings,
            ks.GROUP_COLUMNS.value, len(SETTINGS),
            *map(SETTINGS.index, ("correction1", "ratio", "most", "share", "kept")),
            num_warps=1, enable_fp_fusion=False,
        )  # fmt: skip

    def _codes_of(self, launch: _KernelLaunch) -> list[int]:
        return sorted({self._codes[number] for number in launch.members} - {0})

    def _compile(self) -> None:
        """Compile the kernels of this step at the same time. Each takes about a second, mostly outside of Python."""

        def compile_kernel(kernel: Any, grid: tuple[int, ...], _: torch.device, *args: Any, **options: Any) -> None:
            kernel.warmup(*args, grid=grid, **options)

        with torch.cuda.device(self.device), ThreadPoolExecutor() as threads, triton.AsyncCompileMode(threads):
            for launch in (*self._first, *self._last):
                self._run(launch, compile_kernel)
        self._compiled_codes.update(self._codes)

    def _run(self, launch: _KernelLaunch, run_kernel: Callable[..., Any] | None = None) -> None:
        """Call `run_kernel`, or by default `launch_kernel`, with the arguments of a launch."""
        run_kernel = run_kernel or launch_kernel
        if launch.programs == 0:
            return
        gradient_table, groups, _, _, settings = self._parts
        options = launch.options
        if launch.kernel is kp.requantize_kernel:
            grid = (len(launch.members), REDO_PROGRAMS) if launch.redo else (launch.programs,)
            run_kernel(
                launch.kernel, grid, self.device,
                launch.table, launch.entries, gradient_table, self._skip, launch.config, launch.redo, **options,
            )  # fmt: skip
            return
        for code in self._codes_of(launch):
            run_kernel(
                launch.kernel, (launch.programs,), self.device,
                launch.table, launch.entries, gradient_table, groups, settings, self._skip,
                km.TYPES[GRADIENT_DTYPES[code - 1]], code, launch.config, **options,
            )  # fmt: skip

    def _pinned(self) -> Tensor | None:
        is_cuda = self.device.type == "cuda"
        return torch.empty(self._table.shape, dtype=torch.int64, pin_memory=True, device="cpu") if is_cuda else None

    @property
    def _is_capturing(self) -> bool:
        return self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()

    @property
    def is_captured(self) -> bool:
        """True if a CUDA graph has captured a step, and with it the addresses of the tables."""
        return bool(self._captured)

    def _upload(self, values: list[int]) -> None:
        capturing = self._is_capturing
        if values == self._uploaded and not capturing and not self.is_captured:  # a replayed graph overwrites the table
            return
        host = torch.tensor(values, dtype=torch.int64, device="cpu")
        if capturing:  # the graph's source must outlive it, and pinned memory cannot be allocated during capture
            if self._spare is None:
                raise UnsupportedOperationError("an optimizer's step in a CUDA graph: run a step between two captures")
            host, self._spare = self._spare.copy_(host), None
            self._captured.append(host)
        elif self.device.type == "cuda":
            host = host.pin_memory()
            self._spare = self._pinned() if self._spare is None else self._spare
        self._table.copy_(host, non_blocking=True)
        self._uploaded = None if capturing else values


def launch_options(config: ks.StepKernelConfig) -> dict[str, Any]:
    """Return warps and a register limit for several programs on a multiprocessor; none if too few would remain."""
    options: dict[str, Any] = {"num_warps": WARPS, "enable_fp_fusion": False}
    draws = any(state.stochastic and state.writes for state in config if isinstance(state, ks.StateConfig))
    if draws and config.aligned:
        options["num_warps"] = config.rows * config.cols // (16 * 32)
    if config.aligned or not draws:
        options["maxnreg"] = 128 if draws or config.rows > 16 or not config.aligned else 80
    return options


def settings_row(settings: Any, step: int | Tensor, ema_decay: float, shape: tuple[int, ...] = ()) -> SettingsRow:
    """Return a group's settings as kernels read them. `shape`: global shape of the matrices, for Muon."""
    if isinstance(settings, muon.MuonSettings):
        columns = {**_weights(1 - settings.momentum, settings.momentum), "nesterov": float(settings.nesterov)}
        return SettingsRow(step, settings.adjusted_lr(shape), columns, settings.kept, ema_decay=ema_decay)
    betas = adam.float32(settings.beta1), adam.float32(settings.beta2)
    if isinstance(settings, lion.LionSettings):
        columns = {**_weights(*betas), "decay": settings.weight_decay}
        return SettingsRow(step, settings.lr, columns, ema_decay=ema_decay)
    assert isinstance(settings, adam.Hyperparameters)
    l2, decay = (0.0, settings.weight_decay) if settings.decoupled else (settings.weight_decay, 0.0)
    columns = {**_weights(*betas), "eps": settings.eps, "l2": l2, "decay": decay, "ratio": settings.largest_ratio}
    if not isinstance(step, Tensor):
        corrected = (*settings.corrections, settings.largest_update)
        columns |= dict(zip(("correction1", "correction2", "most"), map(float, corrected), strict=True))
    return SettingsRow(step, settings.lr, columns, 1.0, betas, settings.bias_correction, ema_decay)


def _weights(beta1: float, beta2: float) -> dict[str, float]:
    return {"beta1": beta1, "rest1": 1 - beta1, "beta2": beta2, "rest2": 1 - beta2}


def _settings_table(rows: Sequence[SettingsRow], seed: int | None) -> list[int]:
    """Return the part of a step's table, int64, that rows fill: seeds and steps, decays, flags, and float32 columns."""
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
