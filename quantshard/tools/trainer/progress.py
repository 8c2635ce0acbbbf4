"""Output of a run: progress on the terminal, and a log file per rank.

Rank 0 prints lines. `logs/rank-N.log` also has Python's warnings. Its level comes from --log-level, then
QUANTSHARD_LOG, then info. The terminal shows warnings, and lower levels only if a level was set explicitly.
"""

import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

from quantshard.errors import ConfigurationError, QuantshardError, printable
from quantshard.tools.observe.table import Report
from quantshard.tools.report.history import step_line
from quantshard.tools.terminal import outputs
from quantshard.tools.terminal.screen import Screen, complain, transfer_bar
from quantshard.tools.trainer.settings.config import KINDS, TrainSettings
from quantshard.tools.trainer.settings.values import check_value

_log = logging.getLogger(__name__)


class Progress:
    """Prints steps and notes, and logs the notes. `shown`: whether this process prints."""

    def __init__(self, settings: TrainSettings, shown: bool) -> None:
        self.settings, self.shown = settings, shown
        self.console = Screen(soft_wrap=True)

    def step(self, entry: Mapping[str, Any]) -> None:
        if self.shown:
            self._lines(step_line(entry, self.settings.steps))

    def moving(self, what: str) -> AbstractContextManager[None]:
        """Show the transferred bytes while saving or loading, if standard error is a terminal."""
        return transfer_bar(what) if self.shown else nullcontext()

    def report(self, report: Report) -> None:
        """Show the report of `explain`; outside of a terminal without trailing blanks."""
        if self.shown:
            is_terminal = self.console.is_terminal
            self.console.print(report if is_terminal else str(report), soft_wrap=not is_terminal)

    def note(self, line: str, level: int = logging.INFO) -> None:
        """Show a line, and log it with `level`. Only this method writes the line to the terminal."""
        if self.shown:
            _log.log(level, "%s", line)
            self._lines(line)

    def _lines(self, line: str) -> None:
        self.console.lines(line)
        self.console.file.flush()


VARIABLE = "QUANTSHARD_LOG"
"""Environment variable with the log level, used if the setting is "auto"."""

_SHOWN_WARNING = "quantshard: WARNING: "


def explicit_level(settings: TrainSettings) -> int | None:
    """Return the explicitly set level; None if there is none."""
    name = settings.log_level if settings.log_level != "auto" else os.environ.get(VARIABLE) or "auto"
    check_value(VARIABLE, name, KINDS["log_level"])
    return None if name == "auto" else int(getattr(logging, name.upper()))


@contextmanager
def logged(settings: TrainSettings, rank: int, run: Path) -> Iterator[None]:
    """Log into the run's folder and, on rank 0, to the terminal while the context is active."""
    level = explicit_level(settings)
    path = run / "logs" / f"rank-{rank}.log"
    file: logging.Handler
    try:
        outputs.append_text(path, "", within=run)
        file = logging.FileHandler(path, encoding="utf-8")
    except ConfigurationError as error:
        file = logging.NullHandler()
        complain(f"[rank {rank}] WARNING: {error}; nothing is logged there")
    file.setFormatter(_LineFormatter(f"%(asctime)s [rank {rank}] %(levelname)s %(name)s: %(message)s"))
    handlers: list[logging.Handler] = [file]
    if rank == 0:
        handlers.append(ScreenHandler(level or logging.WARNING))
    with ExitStack() as stack:
        stack.callback(logging.captureWarnings, False)
        logging.captureWarnings(True)
        for logger in map(logging.getLogger, ("quantshard", "py.warnings")):
            stack.callback(logger.setLevel, logger.level)
            stack.callback(setattr, logger, "propagate", logger.propagate)
            logger.setLevel(level or logging.INFO)
            logger.propagate = False
            for handler in handlers:
                logger.addHandler(handler)
                stack.callback(logger.removeHandler, handler)
        stack.callback(file.close)
        try:
            yield
        # the launcher shows one line of the error
        except BaseException as error:
            trace = None if isinstance(error, QuantshardError) else (type(error), error, error.__traceback__)
            file.handle(_log.makeRecord(_log.name, logging.ERROR, __file__, 0, str(error), (), trace))
            raise


class _LineFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record).replace(_SHOWN_WARNING, "").strip(), but="\n\t")


class ScreenHandler(logging.Handler):
    """Shows records on standard error, except notes, which the progress output shows already."""

    def emit(self, record: logging.LogRecord) -> None:
        if record.name != __name__:
            complain(f"{record.levelname}: {record.getMessage().strip().removeprefix(_SHOWN_WARNING)}")
