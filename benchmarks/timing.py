"""Timing of calls on a device."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

WARMUP = 3
"""Number of calls that are not timed."""


def milliseconds(call: Callable[[], Any], repeats: int, device: str, warmup: int = WARMUP) -> list[float]:
    """Time `repeats` calls on a device of type `device`, after `warmup` calls that are not timed."""
    for _ in range(warmup):
        call()
    if device != "cuda":
        times = []
        for _ in range(repeats):
            start = time.perf_counter()
            call()
            times.append((time.perf_counter() - start) * 1e3)
        return times
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
    for start_event, end_event in events:
        start_event.record()
        call()
        end_event.record()
    torch.cuda.synchronize()
    return [start_event.elapsed_time(end_event) for start_event, end_event in events]


def bounded(call: Callable[[], Any], device: str, seconds: float = 1.0, most: int = 20) -> float:
    """Median time of a call in milliseconds, over as many calls as fit in about `seconds`; at least one."""
    first = milliseconds(call, 1, device, warmup=1)[0]
    repeats = min(most, int(seconds * 1e3 / max(first, 1e-3)) - 2)
    return statistics.median(milliseconds(call, repeats, device, warmup=0)) if repeats > 0 else first
