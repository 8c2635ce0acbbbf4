"""What a training step sends and launches: collectives with their bytes, kernels, and communication that is exposed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

NAMESPACES = ("c10d", "_c10d_functional")
NO_RESULTS = {"wait_tensor", "_wrap_tensor_autograd", "barrier", "monitored_barrier_", "check_for_nan", "send", "isend"}
"""Operators there that give no other rank's values."""

Span = tuple[float, float]


class Collectives(TorchDispatchMode):
    """Counts what is communicated: calls, and the bytes of their results on this rank.

    Operators of c10d write their results into their first argument, functional ones return theirs.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.bytes = 0, 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = function(*args, **(kwargs or {}))
        if function.namespace in NAMESPACES and function.overloadpacket.__name__ not in NO_RESULTS:
            results = [args[0]] if function.namespace == "c10d" else [found]
            self.calls += 1
            self.bytes += sum(each.nbytes for each in tree_leaves(results) if isinstance(each, torch.Tensor))
        return found


def kernels(step: Callable[[], None]) -> dict[str, float]:
    """Of one step, by the profiler, of this GPU: kernels and copies, the time in which any runs, those of NCCL, and the
    time in which one of these runs while nothing else does."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        step()
        torch.cuda.synchronize()
    spans: dict[bool, list[Span]] = {True: [], False: []}
    for event in seen.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            spans["nccl" in event.name.lower()].append((event.time_range.start, event.time_range.end))
    everything = [*spans[True], *spans[False]]
    return {
        "kernels": len(everything),
        "busy ms": length(everything) / 1e3,
        "NCCL kernels": len(spans[True]),
        "exposed ms": exposed(spans[True], spans[False]) / 1e3,
    }


def exposed(those: list[Span], others: list[Span]) -> float:
    """How long any of the first spans lasts while none of the others does."""
    return length([*those, *others]) - length(others)


def length(spans: list[Span]) -> float:
    """How long any of some spans lasts."""
    total, until = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total
