"""Peak memory of a training step on one rank, by phase and by kind."""

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
"""Kinds of memory. Activations are what a forward saves for its backward. Head and loss are what follows the repeated
layers: logits, their gradient, and related buffers."""


@dataclass(frozen=True)
class PhaseMemory:
    """Bytes by kind at the peak of a phase ("forward", "backward" or "optimizer step")."""

    phase: str
    bytes: Mapping[str, int]

    @property
    def total(self) -> int:
        """Sum over all kinds."""
        return sum(self.bytes.values())


@dataclass(frozen=True)
class StepMemory:
    """The phases of a step, in order.

    `step`: a description of the step (batch, sequence length and so on). `fits`: the largest batch that fits, in words;
    "" if no memory size was given.
    """

    phases: tuple[PhaseMemory, ...]
    step: str
    fits: str = ""

    @property
    def highest(self) -> PhaseMemory:
        """The phase with the highest peak."""
        return max(self.phases, key=lambda phase: phase.total)

    @property
    def peak(self) -> int:
        """Peak bytes of the step."""
        return self.highest.total

    def to_dict(self) -> dict[str, Any]:
        """Return the phases as a dict that JSON can represent."""
        phases = {phase.phase: {**phase.bytes, "total": phase.total} for phase in self.phases}
        result = {"step": self.step, "peak_bytes": self.peak, "reached_in": self.highest.phase, "phases": phases}
        return result | ({"fits": self.fits} if self.fits else {})
