"""The subclass given to a converted model. Its forward enters a recipe, so training loops need no autocast.

Framework methods that would write codes as if they were values raise until the framework's integration is imported.
"""

import functools
import importlib
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from torch import nn

from quantshard.errors import ConfigurationError
from quantshard.interop.conversion.head_loss import deferring_logits
from quantshard.interop.conversion.linear import ConvertedLinear
from quantshard.modules import autocast
from quantshard.modules.contexts import context
from quantshard.modules.stacked_experts import StackedExperts
from quantshard.recipe import Recipe, stock_name

RECIPE = "quantshard_recipe"
"""Attribute of the model: the recipe of most layers, or its name."""

ENTERS = "quantshard_enters_recipe"
"""Attribute of the model: whether its forward enters the recipe."""

SAVE = "save_pretrained"
"""Method of transformers' models that writes the state dict's entries as values."""

SAVERS: list[tuple[type, Callable[..., Any]]] = []
"""Base classes of models, each with the function that replaces `SAVE`. The function takes the model, the plain class's
method and that method's arguments. Integrations register themselves when they are imported."""

_INTEGRATION = ("transformers.modeling_utils", "quantshard.integrations.transformers")
"""A framework's module, and the integration that `guard_saving` imports if that module is already imported."""

_PLAIN = "_quantshard_plain_class"
_GUARDED = "_quantshard_guarded"


def enter_recipe(model: nn.Module, recipe: Recipe, enters: bool = True) -> None:
    """Make `model.forward` run under `autocast(recipe)`, unless the caller is in an autocast or `enters` is False.

    The model gets a subclass with the same name, because copies would share an instance attribute `forward`. So do
    submodules that can be saved and used on their own, such as the decoder of a language model.
    """
    guard_saving()
    for module in model.modules():
        if module is model or hasattr(type(module), SAVE):
            setattr(module, RECIPE, stock_name(recipe) or recipe)
            setattr(module, ENTERS, enters)
            if not hasattr(type(module), _PLAIN):
                module.__class__ = _entering(type(module))  # type: ignore[arg-type]  # mypy takes its class for unhashable


def leave_recipe(model: nn.Module) -> None:
    for module in model.modules():
        if (plain := getattr(type(module), _PLAIN, None)) is not None:
            module.__class__ = plain
            delattr(module, RECIPE)
            delattr(module, ENTERS)


def guard_saving() -> None:
    """Enable the transformers integration if transformers is imported, and guard partly converted models."""
    framework, integration = _INTEGRATION
    if not SAVERS and framework in sys.modules:
        # integrations import this package, so import dynamically and ignore failures
        with suppress(ImportError):
            importlib.import_module(integration)
    kind = getattr(sys.modules.get(framework), "PreTrainedModel", None)
    if kind is not None and not hasattr(getattr(kind, SAVE), _GUARDED):
        setattr(kind, SAVE, _saving_partly_converted(getattr(kind, SAVE)))


def same_named_subclass(
    plain: type[nn.Module], bases: tuple[type, ...], names: dict[str, Any], create: Callable[[type[nn.Module]], Any]
) -> type[nn.Module]:
    """Create a subclass with the name of `plain`. It pickles and copies by `create(plain)`, which can be imported."""

    def reduce(self: nn.Module, protocol: int) -> Any:
        return create, (plain,), self.__dict__

    own = {"__doc__": plain.__doc__, "__module__": plain.__module__, "__qualname__": plain.__qualname__}
    return type(plain.__name__, bases, {**names, **own, "__reduce_ex__": reduce})


@functools.cache
def subclass_with(base: type[nn.Module], marker: str, plain: type[nn.Module]) -> type[nn.Module]:
    """Return a subclass of `plain` (its attribute `marker`) with the methods of `base`; copies have the same class."""
    create = functools.partial(_instance_with, base, marker)
    return same_named_subclass(plain, (base, plain), {marker: plain}, create)


def _instance_with(base: type[nn.Module], marker: str, plain: type[nn.Module]) -> nn.Module:
    kind = subclass_with(base, marker, plain)  # type: ignore[arg-type]  # mypy takes classes for unhashable
    return kind.__new__(kind)


@functools.cache
def _entering(plain: type[nn.Module]) -> type[nn.Module]:
    """Return the subclass that enters a recipe, cached so that copies have the same class as their original."""

    @functools.wraps(plain.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with deferring_logits(self, kwargs):
            # the caller's autocast takes precedence: its recipe, strictness and reduction group
            if context.in_autocast() or not getattr(self, ENTERS, False):
                return plain.forward(self, *args, **kwargs)
            with autocast(recipe=getattr(self, RECIPE)):
                return plain.forward(self, *args, **kwargs)

    names: dict[str, Any] = {"forward": forward, _PLAIN: plain}
    if hasattr(plain, SAVE):
        names[SAVE] = _saving(getattr(plain, SAVE))
    return same_named_subclass(plain, (plain,), names, _blank)


def _saving_partly_converted(plain: Callable[..., Any]) -> Callable[..., Any]:
    guarded = _saving(plain)

    @functools.wraps(plain)
    def save(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        # classes that enter a recipe have already run their own guard
        are_converted = (isinstance(module, ConvertedLinear | StackedExperts) for module in self.modules())
        is_partial = not hasattr(type(self), _PLAIN) and any(are_converted)
        return (guarded if is_partial else plain)(self, *args, **kwargs)

    setattr(save, _GUARDED, True)
    return save


def _saving(plain: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(plain)
    def save(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        saver = next((saver for kind, saver in SAVERS if isinstance(self, kind)), None)
        if saver is None:
            problem = f"{type(self).__name__}.{SAVE} would write codes as if they were values"
            remedy = "call quantshard.revert, or import quantshard.integrations.transformers"
            raise ConfigurationError(f"{problem}; {remedy}")
        return saver(self, functools.partial(plain, self), *args, **kwargs)

    return save


def _blank(plain: type[nn.Module]) -> nn.Module:
    """Create an instance without state, which copying sets later, because a module can refer to itself."""
    guard_saving()
    subclass = _entering(plain)  # type: ignore[arg-type]
    return subclass.__new__(subclass)
