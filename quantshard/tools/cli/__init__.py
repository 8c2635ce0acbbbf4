"""The command line. Each command is registered by the module that implements it."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from inspect import cleandoc
from typing import Annotated, Any

import typer

from quantshard.errors import QuantshardError
from quantshard.tools.cli import (
    convert,
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
    verify,
)
from quantshard.tools.cli.train import near_setting
from quantshard.tools.terminal.screen import complain, prepare_output, say
from quantshard.tools.trainer import launch
from quantshard.version import __version__

_MODULES: tuple[Any, ...] = (
    *(train, status, tokenize, report, demo, debug),
    *(explain, diff, inspect, verify, exchange, convert, doctor),
)
REGISTER: tuple[Callable[[typer.Typer], None], ...] = tuple(module.register for module in _MODULES)
"""What adds commands to the command line."""

_LIBRARIES = ("torchao", "torch.utils._pytree")
"""Loggers that warn of binaries which are of no use here, and of the libraries' own code, when transformers imports
torchao: in front of an answer that has nothing to do with them."""

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
"""The options of scripts of transformers, torchrun and accelerate, and ours that stand for them."""

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
    """What stands before a command."""


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
    line.callback(help=line.info.help)(_begin)  # commands stay subcommands, however few there are
    for register in REGISTER:
        register(line)
    for command in line.registered_commands:  # of a paragraph after the first, typer would keep the ends of lines
        paragraphs = cleandoc(getattr(command.callback, "__doc__", None) or "").split("\n\n")
        command.help = "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)
    return line


def _usage(line: str, error: Exception) -> str:
    """What is said of an error of usage: typer's own words, how an argument is given that stands here as an option,
    what `resume` takes from the run, and whose help it is."""
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
    own = name.lstrip("-").replace("-", "_")
    meant = arguments.get(own) or arguments.get(f"{own}s")
    synonym = _SYNONYMS.get(name.replace("_", "-"))
    near = near_setting(name) if command.endswith(" resume") else None
    if synonym in flags:
        line = f"No such option: {name} (here it is {synonym})"
    elif meant:
        line = f"No such option: {name} (give it alone: {command} {meant})"
    elif near and near not in flags:
        line = f"No such option: {name} ({near} is one of train; resume keeps what the run has)"
    return f"{line} (see {command} --help)"


def _command_given() -> str:
    """The command that was called, where an error does not say, as of an option without its value."""
    known: Any = typer.main.get_command(app())
    return " ".join(["quantshard", *(name for name in sys.argv[1:2] if name in known.commands)])


def main() -> None:
    """Run the command of `sys.argv`; a mistake of the user's ends in one line and exit code 2 (usage) or 1."""
    code: object = 0
    prepare_output()
    for name in _LIBRARIES:
        logging.getLogger(name).setLevel(logging.ERROR)
    try:
        code = app()(prog_name="quantshard", standalone_mode=False)
    except QuantshardError as error:
        complain(str(error))
        code = getattr(error, "exit_code", 1)
    except (KeyboardInterrupt, typer.Abort):  # of which some versions of typer make the other
        code = launch.INTERRUPTED
    except Exception as error:
        usage = getattr(error, "format_message", None)  # typer's errors of usage, in any of its versions
        if usage is None:
            raise
        if line := " ".join(usage().split()):  # empty where the help has just been printed instead
            complain(_usage(line, error))
        code = getattr(error, "exit_code", 2)
    sys.exit(code if isinstance(code, int) else 0)
