"""Where the modules of a model are referred to: as children, and in plain attributes, which PyTorch does not list.

    self.first = nn.Linear(8, 8)
    self.stages = [self.first, ...]  # what forward runs

A layer that is exchanged in one place alone would compute on in the other, and train in vain. Where else one is held
(an object, a closure) cannot be known before it computes: `optimizer_watch` tells then.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

Places = dict[int, list[Callable[[nn.Module], None]]]
"""By the identity of a module: what puts another into each of its places."""

_DEPTH = 4
"""How far lists, tuples, dicts and sets in each other are looked through."""

_LOOKED_INTO = (nn.Module, list, deque, dict, tuple, set)

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
    elif isinstance(value, list | deque | dict):
        for key, each in list(value.items() if isinstance(value, dict) else enumerate(value)):
            if isinstance(each, _LOOKED_INTO):
                _look_into(each, partial(value.__setitem__, key), found, depth - 1)
    elif isinstance(value, tuple):
        entries = list(value)
        for index, each in enumerate(value):
            if isinstance(each, _LOOKED_INTO):
                _look_into(each, partial(_put_into_tuple, value, entries, index, put), found, depth - 1)
    elif isinstance(value, set):
        for each in list(value):
            if isinstance(each, nn.Module):
                _look_into(each, partial(_put_into_set, value, each), found, depth - 1)


def _put_into_tuple(
    value: tuple[Any, ...], entries: list[Any], index: int, put: Callable[[Any], None], new: Any
) -> None:
    entries[index] = new
    made = getattr(value, "_make", None)  # of a namedtuple
    put(tuple(entries) if made is None else made(entries))


def _put_into_set(value: set[Any], old: nn.Module, new: nn.Module) -> None:
    value.discard(old)
    value.add(new)
