"""A model whose forward enters a recipe by itself, so that no training loop needs an autocast."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn

from quantshard.conversion import optimizer_watch
from quantshard.modules import autocast
from quantshard.modules.contexts import context
from quantshard.recipe import Recipe

RECIPE = "quantshard_recipe"
"""The model's attribute with the recipe that its forward enters."""

_PLAIN = "_quantshard_plain_class"
_CLASSES: dict[type[nn.Module], type[nn.Module]] = {}


def enter_recipe(model: nn.Module, recipe: Recipe) -> None:
    """Make `model.forward` run under `autocast(recipe)`, unless its caller is in an autocast.

    The model's class becomes a subclass of the same name: an attribute `forward` would be bound to this very object,
    and a copy of the model would call it. FSDP2 changes classes in the same way.
    """
    setattr(model, RECIPE, recipe)
    if not hasattr(type(model), _PLAIN):
        model.__class__ = _entering(type(model))


def leave_recipe(model: nn.Module) -> None:
    """Undo `enter_recipe`."""
    plain = getattr(type(model), _PLAIN, None)
    if plain is not None:
        model.__class__ = plain
        delattr(model, RECIPE)


def _entering(plain: type[nn.Module]) -> type[nn.Module]:
    """The subclass that enters a recipe; one for each class, so that copies have the class of their original."""
    if plain in _CLASSES:
        return _CLASSES[plain]

    @functools.wraps(plain.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if self.training and not torch.compiler.is_compiling() and torch.is_grad_enabled():
            optimizer_watch.note_forward(self)
        if context.in_autocast():  # the caller's: its recipe, its strictness, its group of ranks
            return plain.forward(self, *args, **kwargs)
        with autocast(recipe=getattr(self, RECIPE)):
            return plain.forward(self, *args, **kwargs)

    def reduce(self: nn.Module, protocol: int) -> Any:
        """Pickled and copied by the plain class, which can be imported."""
        return _blank, (plain,), self.__dict__

    names = {"forward": forward, "__reduce_ex__": reduce, _PLAIN: plain, "__doc__": plain.__doc__}
    entering = type(plain.__name__, (plain,), names)
    entering.__module__, entering.__qualname__ = plain.__module__, plain.__qualname__
    _CLASSES[plain] = entering
    return entering


def _blank(plain: type[nn.Module]) -> nn.Module:
    """Without state, which copying sets later: a module may hold itself."""
    entering = _entering(plain)
    return entering.__new__(entering)
