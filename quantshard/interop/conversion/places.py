"""Finds all references to a model's modules: children, and plain attributes, which PyTorch does not list.

    self.first = nn.Linear(8, 8)
    self.stages = [self.first, ...]  # what forward runs

A layer replaced in only one place would still compute in the other, and train in vain. References from elsewhere (an
object, a closure) are not found; the replaced layer then keeps computing there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

Places = dict[int, list[Callable[[nn.Module], None]]]
"""Module identity -> functions that put another module into each of its places."""

_DEPTH = 4
"""Maximum nesting of lists, tuples, dicts and sets that is searched."""

_LOOKED_INTO = (nn.Module, list, deque, dict, tuple, set)

_OF_MODULES = frozenset(vars(nn.Module()))
"""Attributes in which PyTorch stores children, parameters and hooks."""


def places_of(model: nn.Module) -> Places:
    """Find the places of all modules below a model; a module can have several."""
    places: Places = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if name:
            parent, _, child = name.rpartition(".")
            places.setdefault(id(module), []).append(partial(setattr, model.get_submodule(parent), child))
    for module in list(model.modules()):
        attributes = vars(module)
        for name in attributes.keys() - _OF_MODULES:
            _look_into(attributes[name], partial(attributes.__setitem__, name), places, _DEPTH)
    return places


def _look_into(value: Any, put: Callable[[Any], None], found: Places, depth: int) -> None:
    """Record the modules in `value`. `put`: function that replaces `value` in its container."""
    if isinstance(value, nn.Module):
        found.setdefault(id(value), []).append(put)
    elif depth == 0:
        return
    elif isinstance(value, list | deque | dict):
        for key, entry in list(value.items() if isinstance(value, dict) else enumerate(value)):
            if isinstance(entry, _LOOKED_INTO):
                _look_into(entry, partial(value.__setitem__, key), found, depth - 1)
    elif isinstance(value, tuple):
        entries = list(value)
        for index, entry in enumerate(value):
            if isinstance(entry, _LOOKED_INTO):
                _look_into(entry, partial(_put_into_tuple, value, entries, index, put), found, depth - 1)
    elif isinstance(value, set):
        for entry in list(value):
            if isinstance(entry, nn.Module):
                _look_into(entry, partial(_put_into_set, value, entry), found, depth - 1)


def _put_into_tuple(
    value: tuple[Any, ...], entries: list[Any], index: int, put: Callable[[Any], None], new: Any
) -> None:
    entries[index] = new
    make_namedtuple = getattr(value, "_make", None)
    put(tuple(entries) if make_namedtuple is None else make_namedtuple(entries))


def _put_into_set(value: set[Any], old: nn.Module, new: nn.Module) -> None:
    value.discard(old)
    value.add(new)
