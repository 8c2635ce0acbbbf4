"""Memory per parameter between steps: bytes of weights, masters and moments."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch

from quantshard.numerics.states import AVERAGE, MASTER
from quantshard.state_storage import preset_of

SHORT_DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "uint8": "FP8"}
"""Dtypes of optimizer states as `Row` spells them."""

SPLIT, REMAINDER = "FP8+8", "bf16+16"
"""How `Row` spells a master if the parameter is its high bytes."""

_DTYPES = {short: getattr(torch, name) for name, short in SHORT_DTYPES.items()} | {SPLIT: torch.float16}


class ParameterPart(NamedTuple):
    """One parameter on this rank: number of elements, bytes of the weight, state -> bytes, and state -> format."""

    elements: int
    weight: int
    states: Mapping[str, int]
    formats: Mapping[str, str]
    is_quantized: bool


@dataclass(frozen=True)
class ParameterBytes:
    """Bytes per parameter on this rank, averaged over `weights` trained tensors: the quantized ones if there are any.

    `preset`: name of the preset that all of these tensors match, or "". `moments`: all states except master and
    average.
    """

    preset: str
    weights: int
    is_quantized: bool
    weight: float
    master: float
    moments: float
    average: float

    @classmethod
    def of(cls, parameters: Iterable[ParameterPart]) -> ParameterBytes | None:
        """Average over these parameters; None if no optimizer has state for any of them on this rank."""
        trained = [part for part in parameters if part.states and part.elements]
        is_quantized = any(part.is_quantized for part in trained)
        parts = [part for part in trained if part.is_quantized == is_quantized]
        if not parts:
            return None
        count = sum(part.elements for part in parts)
        states: dict[str, int] = {}
        for part in parts:
            for state, size in part.states.items():
                states[state] = states.get(state, 0) + size
        master, average = states.pop(MASTER, 0), states.pop(AVERAGE, 0)
        return cls(
            preset=_preset(parts),
            weights=len(parts),
            is_quantized=is_quantized,
            weight=sum(part.weight for part in parts) / count,
            master=master / count,
            moments=sum(states.values()) / count,
            average=average / count,
        )

    @property
    def together(self) -> float:
        """Sum of weight, master, moments and average."""
        return self.weight + self.master + self.moments + self.average

    def __str__(self) -> str:
        parts = {"weight": self.weight, "master": self.master, "moments": self.moments}
        parts |= {"average": self.average} if self.average else {}
        sizes = " + ".join(f"{name} {size:.2f}" for name, size in parts.items())
        preset = f" (preset {self.preset})" if self.preset else ""
        kind = "quantized parameter" if self.is_quantized else "parameter"
        return f"bytes a {kind}: {sizes} = {self.together:.2f}{preset}"


def _preset(chosen: Iterable[ParameterPart]) -> str:
    presets = {
        preset_of(
            {state: _DTYPES[short] for state, short in part.formats.items() if state != AVERAGE},
            # codes of less than a byte cannot be half of a master
            None if part.weight < part.elements else part.formats.get(MASTER) == SPLIT,
        )
        if part.is_quantized and set(part.formats.values()) <= _DTYPES.keys()
        else ""
        for part in chosen
    }
    return presets.pop() if len(presets) == 1 else ""
