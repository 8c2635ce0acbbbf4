"""The memory of a training step on a rank, at its highest in each of the step's phases, by what it is for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

KINDS = (
    "weights",
    "optimizer states",
    "gathered weights",
    "gradients",
    "activations",
    "head and loss",
    "temporary",
)
"""What memory is for. Activations are kept by a forward for its backward; head and loss are what lies behind the
repeated layers: logits, their gradient, and what belongs to them."""


@dataclass(frozen=True)
class PhaseMemory:
    """Bytes by kind where a phase ("forward", "backward" or "optimizer step") takes most."""

    phase: str
    bytes: Mapping[str, int]

    @property
    def total(self) -> int:
        """Of all kinds."""
        return sum(self.bytes.values())


@dataclass(frozen=True)
class StepMemory:
    """The phases of a step in their order. `step`: of which batch and the like. `fits`: an answer to how large a batch
    fits, "" if nobody asked."""

    phases: tuple[PhaseMemory, ...]
    step: str
    fits: str = ""

    @property
    def highest(self) -> PhaseMemory:
        """The phase that takes most."""
        return max(self.phases, key=lambda phase: phase.total)

    @property
    def peak(self) -> int:
        """The most bytes of the step."""
        return self.highest.total

    def to_dict(self) -> dict[str, Any]:
        """As JSON can write it."""
        phases = {each.phase: {**each.bytes, "total": each.total} for each in self.phases}
        found = {"step": self.step, "peak_bytes": self.peak, "reached_in": self.highest.phase, "phases": phases}
        return found | ({"fits": self.fits} if self.fits else {})
