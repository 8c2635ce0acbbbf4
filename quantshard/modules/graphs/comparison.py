"""A captured step against the eager steps before it: attention masks, operations, and the time it takes."""

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final
from unittest import mock

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from quantshard import private_torch
from quantshard.errors import warn_user

MODULE = "transformers.masking_utils"
SHOWN: Final = 4
"""Maximum number of operations in a warning."""
REPLAYS: Final = 3
"""Replays whose times are compared with an eager step."""
SLOWER: Final = 1.05
"""Ratio of times from which on a graph is called slower."""

_COUNTED: Final = {*flop_registry, torch.ops.aten._scaled_mm_v2.default.overloadpacket}


@contextmanager
def as_in_eager_steps(arguments: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Make transformers build the attention masks of eager steps during a capture of a step with these arguments.

    In a capture, transformers may not read values. It would build explicit masks where eager steps rely on causal
    attention, which is several times slower. Masks that depend on the values of an argument stay explicit, because each
    replay may have other values. Position ids that the step makes itself are taken as one sequence per row, as in
    training without packing. The yielded list gets a flag for each of them, which a replay sets if rows do contain
    several sequences.
    """
    module: Any = sys.modules.get(MODULE)
    is_tracing, packed = getattr(module, "is_tracing", None), getattr(module, "find_packed_sequence_indices", None)
    flags: list[Tensor] = []
    if is_tracing is None or packed is None:
        yield flags
        return
    memory = {tensor.untyped_storage().data_ptr() for tensor in arguments}

    def traces(tensor: Tensor | None = None) -> bool:
        # without a mask there are no values to read
        return False if tensor is None and not torch.compiler.is_compiling() else bool(is_tracing(tensor))

    def indices(position_ids: Tensor) -> Tensor | None:
        sequences: Tensor | None = packed(position_ids)
        if sequences is None or position_ids.untyped_storage().data_ptr() in memory:
            return sequences
        flags.append((sequences[:, -1] != 0).any())
        return None

    with mock.patch.multiple(module, is_tracing=traces, find_packed_sequence_indices=indices):
        yield flags


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
        remedy = "find the code that asks whether a graph is captured or traced, or use enabled=False"
        warn_user(f"StepGraph captured other operations than eager steps run: {'; '.join(texts)}; {remedy}")


Events = tuple[torch.cuda.Event, torch.cuda.Event]


class EagerStep:
    """The last eager step for one kind of arguments, which the captured step and its first replays are compared with.

    Attributes:
        count: number of eager steps so far.
        operations: products and attention calls of the last one.
        has_compiled: whether torch.compile compiled something in it.
    """

    def __init__(self, device: torch.device) -> None:
        self.count, self.operations, self.has_compiled = 0, Counter[str](), False
        self._has_clock = device.type == "cuda"
        self._eager: Events | None = None
        self._replays: list[Any] = []

    def run(self, step: Callable[[], Any]) -> Any:
        before = private_torch.num_compilations()
        with counted_operations() as self.operations:
            results, self._eager = self._timed(step)
        self.has_compiled = private_torch.num_compilations() != before
        return results

    def run_replay(self, replay: Callable[[], Any]) -> Any:
        """Run a replay, and warn once if the first ones took longer than the eager step. Never waits for the device."""
        if self._eager is None:
            return replay()
        if len(self._replays) < REPLAYS:
            results, events = self._timed(replay)
            self._replays.append(events)
            return results
        if self._replays[-1][1].query():
            eager, *times = (begin.elapsed_time(end) for begin, end in (self._eager, *self._replays))
            self._eager = None
            if min(times) > SLOWER * eager:
                warn_user(f"StepGraph: replays take {min(times):.1f} ms, eager steps {eager:.1f} ms; use enabled=False")
        return replay()

    def _timed(self, work: Callable[[], Any]) -> tuple[Any, Events | None]:
        if not self._has_clock:
            return work(), None
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        results = work()
        end.record()
        return results, (begin, end)
