"""The command line."""

import logging
import sys
from collections.abc import Callable
from inspect import cleandoc

import typer
from typer import Option

from quantshard.errors import QuantshardError
from quantshard.tools.cli import debug, demo, doctor, exchange, explain, inspect, report, train
from quantshard.tools.terminal.screen import complain, prepare_output, say
from quantshard.tools.trainer import launch
from quantshard.version import __version__

COMMANDS: dict[str, Callable[..., None]] = {
    "train": train.with_flags(train.train),
    "resume": train.resume,
    "status": report.status,
    "tokenize": train.tokenize,
    "report": report.report,
    "watch": report.watch,
    "demo": demo.demo,
    "debug": debug.debug,
    "explain": explain.explain,
    "plan": explain.plan,
    "diff": inspect.diff,
    "inspect": inspect.inspect,
    "verify": inspect.verify,
    "export": exchange.export,
    "import": exchange.import_,
    "convert-te": exchange.convert_te,
    "doctor": doctor.doctor,
}

__all__ = ["app", "main"]


def _version(asked: bool) -> None:
    if asked:
        say(f"quantshard {__version__}")
        raise typer.Exit


def _begin(
    version: bool = Option(False, "--version", callback=_version, is_eager=True, help="show the version, and exit"),
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
    for name, command in COMMANDS.items():
        # typer would keep the line breaks of all paragraphs except the first.
        paragraphs = cleandoc(command.__doc__ or "").split("\n\n")
        text = "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)
        line.command(name, no_args_is_help=name not in ("demo", "doctor"), help=text)(command)
    line.command("worker", hidden=True)(train.work)
    return line


def main() -> None:
    """Run the command in `sys.argv`. A user error prints one line and exits with code 2 (usage) or 1."""
    code: object = 0
    prepare_output()
    # irrelevant warnings when transformers imports torchao
    for name in ("torchao", "torch.utils._pytree"):
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
        if message := " ".join(usage().split()):
            complain(f"{message} (see --help)")
        code = getattr(error, "exit_code", 2)
    sys.exit(code if isinstance(code, int) else 0)
