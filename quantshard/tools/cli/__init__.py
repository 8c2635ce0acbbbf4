"""The command line; every command is registered by the module that implements it."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from inspect import cleandoc
from typing import Annotated, Any

import typer

from quantshard.errors import QuantshardError
from quantshard.tools.cli import (
    debug,
    demo,
    diff,
    doctor,
    exchange,
    explain,
    inspect,
    report,
    status,
    tokenize,
    train,
)
from quantshard.tools.cli.train import near_setting
from quantshard.tools.terminal.screen import complain, prepare_output, say
from quantshard.tools.trainer import launch
from quantshard.version import __version__

_MODULES: tuple[Any, ...] = (
    *(train, status, tokenize, report, demo, debug),
    *(explain, diff, inspect, exchange, doctor),
)
REGISTER: tuple[Callable[[typer.Typer], None], ...] = tuple(module.register for module in _MODULES)
"""Functions that add commands to the command line."""

_LIBRARIES = ("torchao", "torch.utils._pytree")
"""Loggers silenced below ERROR, because they print irrelevant warnings when transformers imports torchao."""

_SYNONYMS = {
    "--output-dir": "--run", "--out-dir": "--run", "--learning-rate": "--lr", "--min-lr": "--lr-floor",
    "--batch-size": "--global-batch", "--train-batch-size": "--global-batch",
    "--per-device-train-batch-size": "--micro-batch", "--micro-batch-size": "--micro-batch",
    "--gradient-accumulation-steps": "--micro-batches", "--max-steps": "--steps", "--num-steps": "--steps",
    "--max-length": "--seq-length", "--max-seq-length": "--seq-length", "--block-size": "--seq-length",
    "--warmup-steps": "--warmup", "--lr-scheduler-type": "--schedule", "--save-steps": "--save-every",
    "--eval-steps": "--eval-every", "--save-total-limit": "--keep-last", "--optim": "--optimizer",
    "--model-name-or-path": "--model", "--tokenizer-name": "--tokenizer", "--train-file": "--data",
    "--dataset": "--data", "--dataset-name": "--data", "--validation-file": "--heldout-data",
    "--nproc": "--nproc-per-node", "--num-processes": "--nproc-per-node",
}  # fmt: skip
"""Options of transformers, torchrun and accelerate scripts -> the equivalent quantshard option."""


def _letters(option: str) -> str:
    return option.replace("-", "").replace("_", "")


_SYNONYMS_BY_LETTERS = {_letters(option): synonym for option, synonym in _SYNONYMS.items()}

__all__ = ["app", "main"]


def _version(asked: bool) -> None:
    if asked:
        say(f"quantshard {__version__}")
        raise typer.Exit


def _begin(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="show the version, and exit")
    ] = False,
) -> None:
    """Callback for the options before a command."""


def app() -> typer.Typer:
    """Build the command line with all commands."""
    line = typer.Typer(
        name="quantshard",
        help="Train PyTorch models with low-precision weights, sharded, and resume them bit for bit.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode="rich",
    )
    # With a callback, typer keeps a single command as a subcommand.
    line.callback(help=line.info.help)(_begin)
    for register in REGISTER:
        register(line)
    # typer would keep the line breaks of all paragraphs except the first.
    for command in line.registered_commands:
        paragraphs = cleandoc(getattr(command.callback, "__doc__", None) or "").split("\n\n")
        command.help = "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)
    return line


def _usage(line: str, error: Exception) -> str:
    """Extend typer's message of a usage error with a hint and the help command.

    The hint covers an option with another name here, an argument given as an option, and a setting of `train` that
    `resume` takes from the run.
    """
    context: Any = getattr(error, "ctx", None)
    command = context.command_path if context else _command_given()
    name = getattr(error, "option_name", None)
    params = context.command.params if context else []
    flags = {flag for param in params for flag in (*param.opts, *param.secondary_opts)}
    if not context or not isinstance(name, str) or name in flags:
        return f"{line} (see {command} --help)"
    arguments = {
        param.name: getattr(param, "metavar", None) or str(param.name).upper()
        for param in params
        if not any(flag.startswith("-") for flag in param.opts)
    }
    argument_name = name.lstrip("-").replace("-", "_")
    metavar = arguments.get(argument_name) or arguments.get(f"{argument_name}s")
    synonym = _SYNONYMS_BY_LETTERS.get(_letters(name))
    near_flag = near_setting(name) if command.endswith(" resume") else None
    if synonym in flags:
        line = f"No such option: {name} (here it is {synonym})"
    elif metavar:
        line = f"No such option: {name} (give it alone: {command} {metavar})"
    elif near_flag and near_flag not in flags:
        line = f"No such option: {name} ({near_flag} is one of train; resume keeps what the run has)"
    return f"{line} (see {command} --help)"


def _command_given() -> str:
    """The command in `sys.argv`, for errors without a context, such as an option without its value."""
    command_line: Any = typer.main.get_command(app())
    return " ".join(["quantshard", *(name for name in sys.argv[1:2] if name in command_line.commands)])


def main() -> None:
    """Run the command in `sys.argv`. A user error prints one line and exits with code 2 (usage) or 1."""
    code: object = 0
    prepare_output()
    for name in _LIBRARIES:
        logging.getLogger(name).setLevel(logging.ERROR)
    try:
        code = app()(prog_name="quantshard", standalone_mode=False)
    except QuantshardError as error:
        complain(str(error))
        code = getattr(error, "exit_code", 1)
    except (KeyboardInterrupt, typer.Abort):  # some versions of typer convert an interrupt to Abort
        code = launch.INTERRUPTED
    except Exception as error:
        # Identifies usage errors in any version of typer.
        usage = getattr(error, "format_message", None)
        if usage is None:
            raise
        # The message is empty if typer printed the help instead.
        if line := " ".join(usage().split()):
            complain(_usage(line, error))
        code = getattr(error, "exit_code", 2)
    sys.exit(code if isinstance(code, int) else 0)
