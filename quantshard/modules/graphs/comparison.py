"""Comparison of a captured step with the eager steps before it: the operations it runs, and the time it takes."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from quantshard import private_torch
from quantshard.errors import warn_user

SHOWN: Final = 4
"""Maximum number of operations in a warning."""
REPLAYS: Final = 3
"""Replays whose times are compared with an eager step."""
SLOWER: Final = 1.05
"""Ratio of times from which on a graph is called slower."""

_COUNTED: Final = {*flop_registry, torch.ops.aten._scaled_mm_v2.default.overloadpacket}


@contextmanager
def counted_operations() -> Iterator[Counter[str]]:
    """Count the matrix products, convolutions and attention calls within the context, by name and argument shapes."""
    counts = Counter[str]()

    def count(operation: Any, args: Any, kwargs: Any) -> Any:
        if operation.overloadpacket in _COUNTED:
            shapes = ", ".join(str(list(arg.shape)) for arg in args if isinstance(arg, Tensor))
            counts[f"{operation.overloadpacket.__name__}({shapes})"] += 1
        return operation(*args, **kwargs)

    with private_torch.answer_operations(count):
        yield counts


def warn_of_operations(eager: Counter[str], captured: Counter[str]) -> None:
    """Warn if a captured step runs other operations than the eager step before it."""
    texts = [
        f"{count} {name} only in {where}"
        for where, counts in (("the graph", captured - eager), ("eager steps", eager - captured))
        for name, count in counts.most_common(SHOWN)
    ]
    if texts:
        warn_user(
            f"StepGraph captured other operations than eager steps run: {'; '.join(texts)}; find the code that asks "
            "whether a graph is captured or traced, or use enabled=False"
        )


class StepTimer:
    """Compares the device times of an eager step and of the first replays, without waiting for the device."""

    def __init__(self, device: torch.device) -> None:
        self._has_clock, self._has_compared = device.type == "cuda", False
        self._eager: tuple[torch.cuda.Event, torch.cuda.Event] | None = None
        self._replays: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def run_eager(self, step: Callable[[], Any]) -> Any:
        """Run an eager step; the last one counts."""
        results, self._eager = self._timed(step)
        return results

    def run_replay(self, replay: Callable[[], Any]) -> Any:
        """Run a replay, and warn once if the first ones took longer than the eager step."""
        if self._eager is None or self._has_compared:
            return replay()
        if len(self._replays) < REPLAYS:
            results, events = self._timed(replay)
            if events is not None:
                self._replays.append(events)
            return results
        if self._replays[-1][1].query():
            self._has_compared = True
            self._warn_if_slower(self._eager)
        return replay()

    def _timed(self, work: Callable[[], Any]) -> tuple[Any, tuple[torch.cuda.Event, torch.cuda.Event] | None]:
        if not self._has_clock:
            return work(), None
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        results = work()
        end.record()
        return results, (begin, end)

    def _warn_if_slower(self, eager_events: tuple[torch.cuda.Event, torch.cuda.Event]) -> None:
        eager = eager_events[0].elapsed_time(eager_events[1])
        replay = min(begin.elapsed_time(end) for begin, end in self._replays)
        if replay > SLOWER * eager:
            warn_user(f"StepGraph: replays take {replay:.1f} ms, eager steps {eager:.1f} ms; use enabled=False")
