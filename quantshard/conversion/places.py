"""Where the modules of a model are referred to: as children, and in plain attributes, which PyTorch does not list.

    self.first = nn.Linear(8, 8)
    self.stages = [self.first, ...]  # what forward runs

A layer that is exchanged in one place alone would compute on in the other, and train in vain.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

Places = dict[int, list[Callable[[nn.Module], None]]]
"""By the identity of a module: what puts another into each of its places."""

_DEPTH = 4
"""How far lists, tuples and dicts in each other are looked through."""

_OF_MODULES = frozenset(vars(nn.Module()))
"""Attributes that PyTorch keeps children, parameters and hooks in."""


def places_of(model: nn.Module) -> Places:
    """The places of all modules below a model; one may stand in several."""
    found: Places = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if name:
            parent, _, child = name.rpartition(".")
            found.setdefault(id(module), []).append(partial(setattr, model.get_submodule(parent), child))
    for module in list(model.modules()):
        attributes = vars(module)
        for name in attributes.keys() - _OF_MODULES:
            _look_into(attributes[name], partial(attributes.__setitem__, name), found, _DEPTH)
    return found


def _look_into(value: Any, put: Callable[[Any], None], found: Places, depth: int) -> None:
    """`put`: what puts another value into the place of this one."""
    if isinstance(value, nn.Module):
        found.setdefault(id(value), []).append(put)
    elif depth == 0:
        return
    elif type(value) in (list, dict):
        for key, each in list(value.items() if isinstance(value, dict) else enumerate(value)):
            _look_into(each, partial(value.__setitem__, key), found, depth - 1)
    elif type(value) is tuple:
        entries = list(value)
        for index, each in enumerate(value):
            _look_into(each, partial(_put_into_tuple, entries, index, put), found, depth - 1)


def _put_into_tuple(entries: list[Any], index: int, put: Callable[[Any], None], new: Any) -> None:
    entries[index] = new
    put(tuple(entries))
