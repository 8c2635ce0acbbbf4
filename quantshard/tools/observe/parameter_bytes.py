"""What a parameter takes of memory between steps: bytes of its weight, its master and its moments."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch

from quantshard.numerics.states import AVERAGE, MASTER
from quantshard.presets import preset_of

SHORT_DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "uint8": "FP8"}
"""Dtypes of an optimizer's states as `Row` spells them."""

SPLIT, REMAINDER = "FP8+8", "bf16+16"
"""How it spells masters of which the parameter is the high bytes."""

_DTYPES = {short: getattr(torch, name) for name, short in SHORT_DTYPES.items()} | {SPLIT: torch.float16}


class ParameterPart(NamedTuple):
    """Of one parameter on this rank: how many elements, bytes of the weight, state -> bytes, and state -> format."""

    elements: int
    weight: int
    states: Mapping[str, int]
    formats: Mapping[str, str]
    is_quantized: bool


@dataclass(frozen=True)
class ParameterBytes:
    """Bytes a parameter on this rank, of the `weights` that an optimizer trains: the quantized ones, if there are any.

    `preset`: the name of the preset by which all of them are kept, "" if there is none. `moments`: all states but
    master and average.
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
        """Of these parameters; None if no optimizer keeps anything for any of them here."""
        trained = [each for each in parameters if each.states and each.elements]
        is_quantized = any(each.is_quantized for each in trained)
        chosen = [each for each in trained if each.is_quantized == is_quantized]
        if not chosen:
            return None
        count = sum(each.elements for each in chosen)
        states: dict[str, int] = {}
        for each in chosen:
            for state, size in each.states.items():
                states[state] = states.get(state, 0) + size
        master, average = states.pop(MASTER, 0), states.pop(AVERAGE, 0)
        return cls(
            preset=_preset(chosen),
            weights=len(chosen),
            is_quantized=is_quantized,
            weight=sum(each.weight for each in chosen) / count,
            master=master / count,
            moments=sum(states.values()) / count,
            average=average / count,
        )

    @property
    def together(self) -> float:
        """All of them."""
        return self.weight + self.master + self.moments + self.average

    def __str__(self) -> str:
        parts = {"weight": self.weight, "master": self.master, "moments": self.moments}
        parts |= {"average": self.average} if self.average else {}
        sizes = " + ".join(f"{name} {size:.2f}" for name, size in parts.items())
        preset = f" (preset {self.preset})" if self.preset else ""
        kind = "quantized parameter" if self.is_quantized else "parameter"
        return f"bytes a {kind}: {sizes} = {self.together:.2f}{preset}"


def _preset(chosen: Iterable[ParameterPart]) -> str:
    found = {
        preset_of(
            {state: _DTYPES[short] for state, short in each.formats.items() if state != AVERAGE},
            None if each.weight < each.elements else each.formats.get(MASTER) == SPLIT,  # codes of less than a byte
        )
        if each.is_quantized and set(each.formats.values()) <= _DTYPES.keys()
        else ""
        for each in chosen
    }
    return found.pop() if len(found) == 1 else ""
