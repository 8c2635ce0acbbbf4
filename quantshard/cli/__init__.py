"""The command line. Each command is registered by the module that implements it."""

from __future__ import annotations

import sys
from collections.abc import Callable

import typer

from quantshard.cli import commands, convert, demo, diff, doctor, exchange, inspect, verify
from quantshard.cli.screen import complain, prepare
from quantshard.errors import QuantshardError

REGISTER: tuple[Callable[[typer.Typer], None], ...] = (
    *(module.register for module in (commands, demo, diff, inspect, verify, exchange, convert, doctor)),
)
"""What adds commands to the command line."""

__all__ = ["app", "main"]


def app() -> typer.Typer:
    """The command line with all its commands."""
    line = typer.Typer(
        name="quantshard",
        help="Train PyTorch models whose weights are low-precision numbers, sharded, and resume them bit for bit.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode="rich",
    )
    line.callback()(lambda: None)  # commands stay subcommands, however few there are
    for register in REGISTER:
        register(line)
    return line


def main() -> None:
    """Run the command of `sys.argv`; a mistake of the user's ends in one line and exit code 2 (usage) or 1."""
    code: object = 0
    prepare()
    try:
        code = app()(prog_name="quantshard", standalone_mode=False)
    except QuantshardError as error:
        complain(str(error))
        code = 1
    except KeyboardInterrupt:
        code = 130
    except Exception as error:
        usage = getattr(error, "format_message", None)  # typer's errors of usage, in any of its versions
        if usage is None:
            raise
        if line := " ".join(usage().split()):  # empty where the help has just been printed instead
            complain(f"{line} (see quantshard --help)")
        code = getattr(error, "exit_code", 2)
    sys.exit(code if isinstance(code, int) else 0)
