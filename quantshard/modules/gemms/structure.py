"""What is fixed about linear layers in a compiled graph: values under keys, since an operator takes no such value.

A key is a digest of its value. So a graph that another process reads from a compile cache names the same value there,
or one that is not known, and never another.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from quantshard import private_torch
from quantshard.errors import UnsupportedOperationError
from quantshard.modules.activation_storage import HIGH_PRECISION
from quantshard.modules.contexts import context
from quantshard.recipe import Recipe

T = TypeVar("T")


@dataclass(frozen=True)
class LayerStructure:
    """One linear layer of a module, with one weight or several that read the same input.

    `weights`: their names there; `prefix`: what stands before the names of the histories. `biases`: the dtype of each
    weight's bias, None without. `keeps`, `remakes`: whether what wgrad reads of the input is kept by forward, or made
    again by backward; neither if no backward comes.
    """

    weights: tuple[str, ...]
    prefix: str
    biases: tuple[torch.dtype | None, ...]
    keeps: bool
    remakes: bool


@dataclass(frozen=True)
class StepStructure:
    """Linear layers of one module, one behind the other, and what is fused with them; "" for none.

    `dtype`: of the weights, nominal if they are quantized. `record`: whether amaxes seen now are recorded (in
    training). `setting`: the name of autocast's. `normalization`, `zero_centered_gamma`: in front of the first layer.
    `activation`: between two; `activation_storage`: how its inputs are kept for backward.
    """

    layers: tuple[LayerStructure, ...]
    dtype: torch.dtype
    record: bool
    setting: str
    normalization: str = ""
    zero_centered_gamma: bool = False
    activation: str = ""
    activation_storage: str = HIGH_PRECISION

    @property
    def recipe(self) -> Recipe:
        """That of the setting."""
        return context.setting(self.setting).recipe

    @property
    def is_trained(self) -> bool:
        """True if the module was in training and a backward comes that needs the input."""
        return self.record and any(layer.keeps or layer.remakes for layer in self.layers)

    @property
    def names(self) -> str:
        """The names of all weights, to be shown."""
        return ", ".join(name for layer in self.layers for name in layer.weights)

    def by_layer(self, values: Sequence[T]) -> list[list[T]]:
        """Values, one for each weight, as those of each layer."""
        left = iter(values)
        return [[next(left) for _ in layer.weights] for layer in self.layers]


_structures: dict[str, StepStructure] = {}


@private_torch.constant_in_graphs
def structure_key(layers: Sequence[Sequence[Any]], *others: Any) -> str:
    """The key of the structure with these fields, which from now on is known by it in this process.

    Dynamo, which calls it, hands on values that Python has itself: so `layers` are the fields of each.
    """
    structure = StepStructure(tuple(LayerStructure(*layer) for layer in layers), *others)
    key = hashlib.sha256(repr(structure).encode()).hexdigest()
    assert _structures.setdefault(key, structure) == structure
    return key


def structure_of(key: str) -> StepStructure:
    """The structure that a graph was traced for.

    Raises:
        UnsupportedOperationError: this process has not traced the function, so that it does not know the key.
    """
    if key not in _structures:
        raise UnsupportedOperationError(
            f"a compiled layer of structure {key} was traced by another process and not by this one; call here what "
            "torch.compile returns, which traces it and may then read compiled code from a cache"
        )
    return _structures[key]
