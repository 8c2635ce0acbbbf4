"""The settings of autocasts by name: a compiled graph refers to a setting by its name, as a constant."""

import hashlib
import itertools
import weakref
from dataclasses import dataclass

import torch.distributed as dist

from quantshard import private_torch
from quantshard.collectives.process_groups import world
from quantshard.errors import ConfigurationError
from quantshard.recipe import HighPrecision, Recipe, resolve


@dataclass(frozen=True)
class AutocastSetting:
    """Settings of one autocast. They outlive it, but not the process group, which they reference weakly."""

    recipe: Recipe
    group: weakref.ReferenceType[dist.ProcessGroup] | None = None
    strict: bool = False

    @property
    def amax_reduction_group(self) -> dist.ProcessGroup | None:
        """The ranks to reduce amaxes over; None without delayed scaling or without process groups."""
        if not self.recipe.is_delayed:
            return None
        return world() if self.group is None else self.group()


_SettingKey = tuple[str | int | None, int, bool]
"""Recipe name (None: the default; "": disabled) or id of the recipe; id of the process group; strict.

Objects that are identified by id stay alive as long as the key is in a dict."""

NO_AUTOCAST = "no autocast"
_HIGH_PRECISION = HighPrecision()
registered: dict[str, AutocastSetting] = {NO_AUTOCAST: AutocastSetting(_HIGH_PRECISION)}
"""The settings by name."""

_names: dict[_SettingKey, str] = {}
_numbers = itertools.count(1)


@private_torch.constant_in_graphs
def setting_name(enabled: bool, recipe: str | Recipe | None, group: dist.ProcessGroup | None, strict: bool) -> str:
    """The name of a setting: equal settings have the same name, and no process reuses the name for another setting.

    The name contains a digest of all that graphs depend on, because a compile cache passes graphs to other processes.
    """
    resolved = resolve(recipe) if enabled else _HIGH_PRECISION
    recipe_name = recipe if enabled else ""
    key = (recipe_name if recipe_name is None or isinstance(recipe_name, str) else id(resolved), id(group), strict)
    if (name := _names.get(key, "")) != "":
        return name
    name = _registered_name(resolved, group, strict)
    if not isinstance(key[0], int) or registered[name].recipe is resolved:
        _names[key] = name
    return name


def _registered_name(recipe: Recipe, group: dist.ProcessGroup | None, strict: bool) -> str:
    new_setting = AutocastSetting(recipe, None if group is None else weakref.ref(group), strict)
    for name, old_setting in list(registered.items()):  # a copy, because other threads can add entries
        if old_setting == new_setting and name != NO_AUTOCAST:
            return name
    content = repr((recipe, list(recipe.table.items()), sorted(gemm.value for gemm in recipe.fast_gemms), strict))
    name = f"{recipe.name} {hashlib.sha256(content.encode()).hexdigest()[:32]}"
    if group is not None or name in registered:  # a custom recipe can have the same content as another
        name += f" {next(_numbers)}"
    if group is not None:

        def forget(_: weakref.ReferenceType[dist.ProcessGroup]) -> None:
            for key in [key for key, setting_name in _names.items() if setting_name == name]:
                _names.pop(key, None)
            registered.pop(name, None)

        new_setting = AutocastSetting(recipe, weakref.ref(group, forget), strict)
    registered[name] = new_setting
    return name


@private_torch.constant_in_graphs
def quantizes(name: str) -> bool:
    """Return whether the setting quantizes any operand."""
    return bool(registered[name].recipe.table)


def has_quantized() -> bool:
    """Return whether any autocast that this process has created quantizes."""
    return any(setting.recipe.table for setting in list(registered.values()))


@private_torch.constant_in_graphs
def is_delayed(name: str) -> bool:
    """Return whether the setting uses delayed scaling."""
    return registered[name].recipe.is_delayed


def check_flags(owner: str, **flags: object) -> None:
    """Check that flags are bools. A recipe passed as `enabled` would count as true and be ignored."""
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise ConfigurationError(f"{owner}({name}={value!r}): it must be True or False; a recipe is recipe=")
