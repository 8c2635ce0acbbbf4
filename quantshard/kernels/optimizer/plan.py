"""A step of Adam, Lion or Muon over many tensors: planned once, cheap to launch.

    plan = StepLaunchPlan(parameters, rows, device)

    plan.take(gradients, rows, seed)                 every step
    plan.exceeding(limit)                            which gradients are too large or not finite, if that is asked
    plan.make_directions()                           of Muon's matrices alone: what is orthogonalized, in place
    plan.update(skip)
    (reduce the tensors of plan.amaxes with MAX over the ranks that share them)
    plan.finish()

Which launches these are, `parameters` says.
"""

from __future__ import annotations

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
from quantshard.kernels.optimizer.parameters import StepPasses, is_aligned, passes_of, step_kernel_config
from quantshard.kernels.optimizer.settings import SETTINGS, SettingsRow, table_of
from quantshard.kernels.optimizer.stored import Algorithm, ScaledTensor, StepParameter, StoredTensor
from quantshard.kernels.tables import device_table
from quantshard.numerics.states import AVERAGE, WEIGHT

GRADIENT_DTYPES: Final = tuple(km.TYPES)
"""Dtypes of gradients; others are cast to float32."""

WARPS: Final = 8
REDO_PROGRAMS: Final = 64


class AmaxGrid(NamedTuple):
    """Amaxes to be reduced: of which parameter (by number), role and component; float32, of its resident grid."""

    parameter: int
    role: str
    component: str
    values: Tensor


@dataclass
class _KernelLaunch:
    """One kernel launch: which kernel, its table, and which parameters it is for."""

    kernel: Any
    how: ks.StepKernelConfig
    members: list[int]
    table: Tensor
    entries: Tensor
    programs: int
    redo: bool = False


class _AmaxWorkspace:
    """Where amaxes of a step lie: one flat float32 tensor, zeroed before each."""

    def __init__(self) -> None:
        self.places: dict[tuple[int, str, str], tuple[int, tuple[int, int]]] = {}
        self.size = 0

    def add(self, number: int, role: str, name: str, shape: tuple[int, int]) -> None:
        """Reserve a grid."""
        self.places[number, role, name] = (self.size, shape)
        self.size += shape[0] * shape[1]

    def allocate(self, device: torch.device) -> None:
        """Make the tensor."""
        self.flat = torch.zeros(self.size, dtype=torch.float32, device=device)

    def view(self, key: tuple[int, str, str]) -> Tensor:
        """A grid."""
        at, shape = self.places[key]
        return self.flat[at : at + shape[0] * shape[1]].view(shape)

    def address(self, number: int, role: str, name: str) -> int:
        """Of a grid; 0 if there is none."""
        place = self.places.get((number, role, name))
        return 0 if place is None else self.flat.data_ptr() + 4 * place[0]


_USED, _REDO = "used", "redo"  # of delayed scaling: the amax that the scale derives from; whether to quantize again


class StepLaunchPlan:
    """See the head of this file. It holds the addresses of the tensors given: make another when one was replaced.

    Args:
        parameters: all on `device`; whether they have gradients may differ from step to step.
        rows: how many rows of settings there are.

    Attributes:
        amaxes: what must be reduced between `update` and `finish` where ranks share it, in the order of parameters.
    """

    def __init__(self, parameters: Sequence[StepParameter], rows: int, device: torch.device) -> None:
        self.parameters, self.rows, self.device = list(parameters), rows, device
        if self._is_capturing:
            raise UnsupportedOperationError(
                "an optimizer's step in a CUDA graph: its tables cannot be made while it is captured; run a step "
                "before, and none of its tensors may be replaced between the two"
            )
        self._ways = [passes_of(p) for p in self.parameters]
        self._workspace = self._reserved()
        self._workspace.allocate(device)
        w = self._workspace
        self.amaxes = [AmaxGrid(*key, w.view(key)) for key in w.places if key[2] not in (_USED, _REDO)]
        aligned = [is_aligned(p) for p in self.parameters]
        self._aligned = aligned
        self._first, self._last = self._launches()
        self._scales = self._scale_tables()
        self._histories = self._history_tables()
        numels = [p.rectangle.shape[0] * p.rectangle.shape[1] for p in self.parameters]
        self._reading = km.TensorReader(numels, len(ks.GRADIENT), device)
        count = len(self.parameters) * len(ks.GRADIENT) + rows * (len(ks.GROUP) + 4)
        count += -(rows * len(SETTINGS) // -2)
        self._table = torch.zeros(count, dtype=torch.int64, device=device)
        self._sent: list[int] | None = None
        self._spare = self._pinned()
        self._captured: list[Tensor] = []  # a CUDA graph copies from these whenever it runs
        self._held: list[Tensor] = []
        self._one = torch.ones((), dtype=torch.float32, device=device)
        self._skip: Tensor | None = None

    # Tables ----------------------------------------------------------------------------------------------------------

    def _reserved(self) -> _AmaxWorkspace:
        workspace = _AmaxWorkspace()
        for number, p in enumerate(self.parameters):
            for role, thing in p.scaled.items():
                for copy in thing.fmt.copies.values():
                    if thing.is_given(copy):
                        shape = thing.shard.component_shape(copy.scale)
                        workspace.add(number, role, copy.scale.name, shape)
                    if copy.amax is not None and (number, role, copy.amax.name) not in workspace.places:
                        workspace.add(number, role, copy.amax.name, (1, 1))
                if thing.history is not None:
                    workspace.add(number, role, _USED, (1, 1))
                    workspace.add(number, role, _REDO, (1, 1))
        return workspace

    def _launches(self) -> tuple[list[_KernelLaunch], list[_KernelLaunch]]:
        """Those of `update` and of `finish`: parameters with equal constants go together."""
        first: dict[tuple[Any, ks.StepKernelConfig, bool], list[int]] = {}
        last: dict[tuple[Any, ks.StepKernelConfig, bool], list[int]] = {}
        for number, (p, way, aligned) in enumerate(zip(self.parameters, self._ways, self._aligned, strict=True)):
            once, twice = way is StepPasses.ONCE, way is StepPasses.TWICE
            delayed = isinstance(p.weight, ScaledTensor) and p.weight.history is not None
            measures = not once or delayed
            before = step_kernel_config(p, aligned, measures, not twice, once)
            first.setdefault((kp.step_kernel, before, False), []).append(number)
            if twice:
                last.setdefault((kp.step_kernel, step_kernel_config(p, aligned, False, True, True), False), []).append(
                    number
                )
            elif not once or delayed:
                how = step_kernel_config(p, aligned, False, False, True)
                last.setdefault((kp.requantize_kernel, how, once), []).append(number)
        return tuple(
            [self._launch(kernel, how, members, redo) for (kernel, how, redo), members in found.items()]
            for found in (first, last)
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
        return _KernelLaunch(kernel, how, members, device_table(table, self.device), entries, firsts[-1], redo)

    def _row(self, number: int, across: int, first: int) -> list[int]:
        p = self.parameters[number]
        redo = self._workspace.address(number, WEIGHT, _REDO)
        row = [
            number, p.group, *p.rectangle.shape, *p.rectangle.origin, p.rectangle.global_shape[1], across, first,
            p.stream, p.key, p.key_stream, redo,
        ]  # fmt: skip
        for role in p.roles:
            row += self._slot(number, role, p.stored.get(role), Orientation.ROWWISE)
        row += self._slot(number, WEIGHT, p.weight, Orientation.COLUMNWISE)
        return row + self._slot(number, AVERAGE, p.stored.get(AVERAGE), Orientation.ROWWISE)

    def _slot(self, number: int, role: str, thing: StoredTensor | None, which: Orientation) -> list[int]:
        """Addresses of `ks.SLOT`."""
        if not isinstance(thing, ScaledTensor):
            present = thing is not None and which is Orientation.ROWWISE
            return [thing.tensor.data_ptr() if present and thing is not None else 0] + [0] * (len(ks.SLOT) - 1)
        copy = thing.fmt.copies.get(which)
        if copy is None:
            return [0] * len(ks.SLOT)
        (row, _), (col, _) = ((s.start, s.stop) for s in thing.shard.touched(copy.scale))
        stride = thing.shard.component_shape(copy.scale)[1]
        first = row * stride + col

        def of(component: Component | None) -> int:
            return 0 if component is None else self._workspace.address(number, role, component.name)

        measured = of(copy.scale) and of(copy.scale) + 4 * first
        used = self._workspace.address(number, role, _USED)
        codes, scale = thing.components[copy.codes.name], thing.components[copy.scale.name]
        return [
            codes.data_ptr(), scale.data_ptr() + first * scale.element_size(), stride,
            0 if copy.amax is None else thing.components[copy.amax.name].data_ptr(),
            measured, used or measured, of(copy.amax),
        ]  # fmt: skip

    def _scale_tables(self) -> list[tuple[sr.ScaleRule, int, Tensor]]:
        """For each rule of scales: how many entries and the table of `km.scales_kernel`."""
        rows: dict[sr.ScaleRule, list[list[int]]] = {}
        for number, p in enumerate(self.parameters):
            for role, thing in p.scaled.items():
                for copy in thing.fmt.copies.values():
                    if not thing.is_later(copy):
                        continue
                    grid = copy.scale.name if thing.history is None else _USED
                    address = self._workspace.address
                    scale, second = thing.components[copy.scale.name], copy.amax
                    rule = sr.scale_rule(copy, thing.scaling, torch.float32, self.device)
                    rows.setdefault(rule, []).append([
                        number, address(number, role, grid), scale.data_ptr(),
                        scale.numel() if thing.is_given(copy) else 0,
                        0 if second is None else address(number, role, second.name),
                        0 if second is None else thing.components[second.name].data_ptr(),
                    ])  # fmt: skip
        return [(rule, len(table), device_table(table, self.device)) for rule, table in rows.items()]

    def _history_tables(self) -> list[tuple[bool, int, Tensor]]:
        """Of delayed scaling: whether the newest amax counts, the longest history, and the table."""
        rows: dict[bool, list[list[int]]] = {}
        for number, p in enumerate(self.parameters):
            for role, thing in p.scaled.items():
                if thing.history is None:
                    continue
                (copy,) = thing.fmt.copies.values()
                address = self._workspace.address
                rows.setdefault(thing.scaling.most_recent, []).append([
                    number, thing.history.data_ptr(), thing.history.numel(), address(number, role, _USED),
                    address(number, role, copy.scale.name), address(number, role, _REDO),
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
        """Bring what a step works with to the device.

        Args:
            gradients: of each parameter's rectangle; None leaves the parameter as it is.
            rows: of settings. If step and lr are tensors, nothing is read back from them.
            seed: of the optimizer's random words; None if nothing is rounded with them.
            draws: of each parameter, the number of the draw of its own words.
            directions: of each of Muon's, bfloat16 of its shape, contiguous: `make_directions` writes what is
                orthogonalized, and `update` reads what became of it.

        Raises:
            UnsupportedOperationError: it is captured in a CUDA graph, and no step has run since the last was.
        """
        given = self._gradients(gradients)
        codes = [0 if grad is None else GRADIENT_DTYPES.index(grad.dtype) + 1 for grad in given]
        addresses = [0 if grad is None else grad.data_ptr() for grad in given]
        none = [0] * len(codes)
        directed = none if directions is None else [0 if each is None else each.data_ptr() for each in directions]
        told = zip(codes, addresses, draws or none, directed, strict=True)
        self._upload([value for parameter in told for value in parameter] + table_of(rows, seed))
        self._present = codes
        self._correct(rows)

    def exceeding(self, largest: float) -> Tensor:
        """`numerics.exceeds` of each gradient, float32 [parameters]; 0 where there is none."""
        return self._reading.exceeding(self._parts[0], self._present, largest)

    def make_directions(self) -> None:
        """Write what is orthogonalized of Muon's matrices into the `directions` that were taken. No state changes."""
        present, _, _, _, settings = self._parts
        for launch in self._first:
            if launch.how.algorithm != Algorithm.MUON or launch.programs == 0:
                continue
            for code in self._codes_of(launch):
                launch_kernel(
                    kp.momentum_kernel, (launch.programs,), self.device,
                    launch.table, launch.entries, present, settings, km.TYPES[GRADIENT_DTYPES[code - 1]], code,
                    launch.how, num_warps=WARPS, enable_fp_fusion=False,
                )  # fmt: skip

    def update(self, skip: Tensor | None = None) -> None:
        """The first part of a step: everything that needs no reduced amaxes.

        `skip`: bool scalar on the device; where it is true nothing changes, here and in `finish`.
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
        """The second part: what derives from `amaxes`."""
        present, stride = self._parts[0], len(ks.GRADIENT)
        for most_recent, length, table in self._histories:
            launch_kernel(
                km.tensor_record_kernel, (len(table),), self.device,
                table, present, self._skip, stride, most_recent, triton.next_power_of_2(length), num_warps=1,
            )  # fmt: skip
        for launch in self._last:
            self._run(launch)
        for rule, count, table in self._scales:  # last, for a state or weight is read with its old scales before
            launch_kernel(
                km.tensor_scales_kernel, (count, 4), self.device,
                table, present, self._skip, stride, 512, rule, num_warps=4, enable_fp_fusion=False,
            )  # fmt: skip
        self._held = []

    def _gradients(self, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Of a dtype and layout that kernels read."""
        found: list[Tensor | None] = []
        for grad, aligned in zip(gradients, self._aligned, strict=True):
            if grad is not None:
                if grad.dtype not in GRADIENT_DTYPES:
                    grad = grad.float()
                grad = km.contiguous(grad) if aligned else grad.contiguous()
            found.append(grad)
        self._held = [grad for grad in found if grad is not None]
        return found

    @cached_property
    def _parts(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """The table of a step: gradients, groups, decays (both betas, then that of averages), whether the bias is
        corrected, settings."""
        sizes = (len(self.parameters) * len(ks.GRADIENT), self.rows * len(ks.GROUP), self.rows * 3, self.rows)
        *parts, settings = self._table.split([*sizes, len(self._table) - sum(sizes)])
        return parts[0], parts[1], parts[2].view(torch.float64), parts[3], settings.view(torch.float32)

    def _correct(self, rows: Sequence[SettingsRow]) -> None:
        """Where step and lr are on the device, fill in what follows from them there."""
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
        return torch.full((), number, dtype=torch.float32, device=self.device)  # a copy from the host would wait

    def _codes_of(self, launch: _KernelLaunch) -> list[int]:
        """Of the dtypes of the gradients that there are."""
        return sorted({self._present[number] for number in launch.members} - {0})

    def _run(self, launch: _KernelLaunch) -> None:
        if launch.programs == 0:
            return
        present, groups, _, _, settings = self._parts
        options = launch_options(launch.how)
        if launch.kernel is kp.requantize_kernel:
            grid = (len(launch.members), REDO_PROGRAMS) if launch.redo else (launch.programs,)
            launch_kernel(
                launch.kernel, grid, self.device,
                launch.table, launch.entries, present, self._skip, launch.how, launch.redo, **options,
            )  # fmt: skip
            return
        for code in self._codes_of(launch):
            launch_kernel(
                launch.kernel, (launch.programs,), self.device,
                launch.table, launch.entries, present, groups, settings, self._skip,
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
        """True if a CUDA graph holds a step, and so the addresses of the tables."""
        return bool(self._captured)

    def _upload(self, values: list[int]) -> None:
        """Bring the table of a step to the device, if it is not there; without waiting for it."""
        capturing = self._is_capturing
        if values == self._sent and not capturing and not self.is_captured:  # a graph writes its own table
            return
        host = torch.tensor(values, dtype=torch.int64, device="cpu")
        if capturing:  # what a graph copies from must live as long as it does, and cannot be allocated now
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
    """Warps, and the most registers that a thread may use, so that several programs share a multiprocessor and one
    computes while another waits; there is no such bound where it would be too few.

    Where random words are drawn, each thread has 16 elements, among which it shares what it computes for all of them.
    """
    options: dict[str, Any] = {"num_warps": WARPS, "enable_fp_fusion": False}
    words = any(thing.stochastic and thing.writes for thing in how if isinstance(thing, ks.StateConfig))
    if words and how.aligned:
        options["num_warps"] = how.rows * how.cols // (16 * 32)
    if (how.high and not how.rereads) or (words and not how.aligned):
        return options
    options["maxnreg"] = 128 if words or how.rows > 16 or not how.aligned else 80
    return options
