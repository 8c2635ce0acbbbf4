"""What a process of tests makes once and then copies, which takes a tenth of their time if it is made each time."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode

from quantshard.modules.base.initialization import WeightSpec

LARGEST = 1 << 17
"""Elements of initial values that are kept."""


def draw_weights_once() -> None:
    """Return a copy of initial values where those of the same generator, key and rectangle were drawn before.

    They are drawn anew under a mode that watches or replaces operations, and by a function of the caller's.
    """
    real = WeightSpec.values
    kept = cache(lambda defaults, *arguments: real(*arguments))

    def values(self: WeightSpec, key: int, *place: Any) -> Tensor:
        shape = place[1]
        is_plain = self.init_method is None and _get_current_dispatch_mode() is None
        if not is_plain or shape[0] * shape[1] > LARGEST:
            return real(self, key, *place)
        return kept((torch.get_default_dtype(), torch.get_default_device()), self, key, *place).clone()

    WeightSpec.values = values  # type: ignore[method-assign]


def seed_cpu_only() -> None:
    """Keep `torch.manual_seed` from queueing seeds for devices that do not exist; each entry formats the stack."""
    if not torch.cuda.is_available():
        for device in (torch.cuda, torch.xpu, torch.mtia):
            device.manual_seed_all = lambda seed: None


def build_commands_once() -> None:
    """Return a copy of the parser where one of the same commands was built; a user's process has one command line."""
    import typer.testing

    real, kept = typer.main.get_command, dict[tuple[Callable[..., Any], ...], Any]()

    def get_command(line: typer.Typer) -> Any:
        callbacks = tuple(command.callback for command in line.registered_commands)
        if callbacks not in kept:
            kept[callbacks] = real(line)
        return copied(kept[callbacks])

    def copied(command: Any) -> Any:
        """With options of its own, of which `--help-all` shows the hidden ones."""
        found = copy(command)
        found.params = [copy(option) for option in command.params]
        if hasattr(command, "commands"):
            found.commands = {name: copied(each) for name, each in command.commands.items()}
        return found

    typer.main.get_command = typer.testing._get_command = get_command
