"""Static facts about compiled linear layers, stored under string keys to pass them to custom operators.

A key is a digest of its value. A graph that another process reads from a compile cache therefore refers to the same
value, or to an unknown key, and never to another value.
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

    `weights`: names of the weights in the module. `prefix`: prefix of the names of the amax histories. `biases`: dtype
    of each weight's bias, or None. `keeps`: whether forward keeps wgrad's operand of the input. `remakes`: whether
    backward recomputes wgrad's operand; both are false if no backward follows.
    """

    weights: tuple[str, ...]
    prefix: str
    biases: tuple[torch.dtype | None, ...]
    keeps: bool
    remakes: bool


@dataclass(frozen=True)
class StepStructure:
    """Consecutive linear layers of one module, and the operations fused with them; "" for none.

    `dtype`: dtype of the weights, nominal if they are quantized. `record`: whether amaxes are recorded (in training).
    `setting`: name of the autocast setting. `normalization`, `zero_centered_gamma`: normalization before the first
    layer. `activation`: activation between two layers. `activation_storage`: storage format of the activation's inputs
    that are kept for backward.
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
        """The recipe of the autocast setting."""
        return context.setting(self.setting).recipe

    @property
    def is_trained(self) -> bool:
        """Whether the module was in training and backward needs the input of a layer."""
        return self.record and any(layer.keeps or layer.remakes for layer in self.layers)

    @property
    def names(self) -> str:
        """Names of all weights, for messages."""
        return ", ".join(name for layer in self.layers for name in layer.weights)

    def by_layer(self, values: Sequence[T]) -> list[list[T]]:
        """Group a list of values, one per weight, by layer."""
        remaining = iter(values)
        return [[next(remaining) for _ in layer.weights] for layer in self.layers]


_structures: dict[str, StepStructure] = {}


@private_torch.constant_in_graphs
def structure_key(layers: Sequence[Sequence[Any]], *others: Any) -> str:
    """Register the structure with these fields in this process and return its key.

    `layers` holds the fields of each layer as a sequence, because Dynamo passes only values of built-in types.
    """
    structure = StepStructure(tuple(LayerStructure(*layer) for layer in layers), *others)
    key = hashlib.sha256(repr(structure).encode()).hexdigest()
    assert _structures.setdefault(key, structure) == structure
    return key


def structure_of(key: str) -> StepStructure:
    """The structure that a graph was traced for.

    Raises:
        UnsupportedOperationError: this process has not traced the function, so the key is unknown.
    """
    if key not in _structures:
        raise UnsupportedOperationError(
            f"a compiled layer of structure {key} was traced by another process and not by this one; call here what "
            "torch.compile returns, which traces it and may then read compiled code from a cache"
        )
    return _structures[key]
