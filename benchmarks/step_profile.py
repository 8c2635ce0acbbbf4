"""Profile a training step: collectives and their bytes, kernels, exposed communication, and GPU power."""

from __future__ import annotations

import math
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

NAMESPACES = ("c10d", "_c10d_functional")
NO_RESULTS = {"wait_tensor", "_wrap_tensor_autograd", "barrier", "monitored_barrier_", "check_for_nan", "send", "isend"}
"""Operators of these namespaces that return no values of other ranks."""

Span = tuple[float, float]


class Collectives(TorchDispatchMode):
    """Counts collective calls and the bytes of their results on this rank.

    Operators of c10d write results into their first argument; functional ones return them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.bytes = 0, 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = function(*args, **(kwargs or {}))
        if function.namespace in NAMESPACES and function.overloadpacket.__name__ not in NO_RESULTS:
            results = [args[0]] if function.namespace == "c10d" else [output]
            self.calls += 1
            self.bytes += sum(leaf.nbytes for leaf in tree_leaves(results) if isinstance(leaf, torch.Tensor))
        return output


def kernels(step: Callable[[], None]) -> dict[str, float]:
    """Profile the kernels and copies of one step on this GPU.

    "busy ms" is the time in which any of them runs, "exposed ms" the time in which only NCCL's do.
    """
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        step()
        torch.cuda.synchronize()
    nccl: list[Span] = []
    compute: list[Span] = []
    for event in profiler.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            spans = nccl if "nccl" in event.name.lower() else compute
            spans.append((event.time_range.start, event.time_range.end))
    return {
        "kernels": len(nccl) + len(compute),
        "busy ms": length([*nccl, *compute]) / 1e3,
        "NCCL kernels": len(nccl),
        "exposed ms": exposed(nccl, compute) / 1e3,
    }


def exposed(spans: list[Span], others: list[Span]) -> float:
    """Return the time covered by `spans` but not by `others`."""
    return length([*spans, *others]) - length(others)


def length(spans: list[Span]) -> float:
    """Return the time covered by at least one span."""
    total, end_so_far = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, end_so_far))
        end_so_far = max(end_so_far, end)
    return total


# Power ----------------------------------------------------------------------------------------------------------------

SETTLE_SECONDS = 1.0
"""Time until clocks have settled, which is not measured."""
PERIOD_MS = 100
"""Time between two readings of nvidia-smi."""


class Reading(NamedTuple):
    """One line of nvidia-smi."""

    watts: float
    megahertz: float


@contextmanager
def power_readings() -> Iterator[list[Reading]]:
    """Yield a list that is filled with nvidia-smi's readings when the block exits."""
    device = f"--id=GPU-{torch.cuda.get_device_properties(torch.cuda.current_device()).uuid}"
    query = "--query-gpu=power.draw.instant,clocks.sm"
    process = subprocess.Popen(
        ["nvidia-smi", device, query, "--format=csv,noheader,nounits", f"--loop-ms={PERIOD_MS}"],
        stdout=subprocess.PIPE,
        text=True,
    )
    readings: list[Reading] = []
    try:
        yield readings
    finally:
        process.terminate()
        complete_lines = process.communicate()[0].rpartition("\n")[0].splitlines()
        readings += [Reading(*map(float, line.split(","))) for line in complete_lines]


def power(
    step: Callable[[], None], seconds: float, step_seconds: float, agree: Callable[[int], int] = int
) -> dict[str, float]:
    """Measure watts and MHz (medians) and joules per step while the GPU steps without a pause.

    Args:
        step_seconds: roughly the time of one step.
        agree: makes the number of steps the same on all ranks.

    Raises:
        OSError: nvidia-smi is missing.
        ValueError: nvidia-smi printed nothing.
    """
    run_steps(step, agree(math.ceil(SETTLE_SECONDS / step_seconds)))
    count = agree(math.ceil(seconds / step_seconds))
    with power_readings() as readings:
        step_seconds = run_steps(step, count)
    if not readings:
        raise ValueError(f"nvidia-smi printed nothing in {seconds:g} s")
    watts, megahertz = (statistics.median(values) for values in zip(*readings, strict=True))
    joules = statistics.mean(reading.watts for reading in readings) * step_seconds
    return {"W": watts, "MHz": megahertz, "J": joules}


def run_steps(step: Callable[[], None], count: int) -> float:
    """Run steps without waiting between them, and return the mean seconds per step."""
    start = time.perf_counter()
    for _ in range(count):
        step()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / count
