"""What the processes of a run log: each into a file of its own, the first one to the terminal too.

`logs/rank-N.log` has a line a message: when, "[rank N]", how grave, from which logger. Warnings of Python's are among
them. The level is that of --log-level, else of QUANTSHARD_LOG, else info; the terminal gets warnings, and what else
only if a level was asked for.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from quantshard.errors import ConfigurationError, QuantshardError, printable
from quantshard.tools.terminal import outputs
from quantshard.tools.terminal.screen import complain
from quantshard.tools.trainer.monitoring import progress
from quantshard.tools.trainer.settings.config import CHOICES, TrainSettings
from quantshard.tools.trainer.settings.schema import shown_value

VARIABLE = "QUANTSHARD_LOG"
"""The variable of the environment that says the level where no setting does."""

_LOGGERS = ("quantshard", "py.warnings")
_FORMAT = "%(asctime)s [rank %(rank)s] %(levelname)s %(name)s: %(text)s"
_SHOWN_WARNING = "quantshard: WARNING: "
"""How `terminal.screen` has Python begin a warning."""

_log = logging.getLogger(__name__)


def asked_level(settings: TrainSettings) -> int | None:
    """The level that was asked for; None for none.

    Raises:
        ConfigurationError: `QUANTSHARD_LOG` is no level.
    """
    name = settings.log_level if settings.log_level != "auto" else os.environ.get(VARIABLE) or "auto"
    if name not in CHOICES["log_level"]:
        raise ConfigurationError(f"{VARIABLE} = {shown_value(name)}: choose one of: {', '.join(CHOICES['log_level'])}")
    return None if name == "auto" else int(getattr(logging, name.upper()))


@contextmanager
def logged(settings: TrainSettings, rank: int, run: Path) -> Iterator[None]:
    """While it lasts, log into the folder of a run, and of rank 0 to the terminal."""
    level = asked_level(settings)
    file = RunFileHandler(run / "logs" / f"rank-{rank}.log", run, rank)
    handlers: list[logging.Handler] = [file]
    if rank == 0:
        handlers.append(ScreenHandler(level or logging.WARNING))
    loggers = [logging.getLogger(name) for name in _LOGGERS]
    before = [(logger.level, logger.propagate) for logger in loggers]
    logging.captureWarnings(True)
    for logger in loggers:
        logger.setLevel(level or logging.INFO)
        logger.propagate = False
        for handler in handlers:
            logger.addHandler(handler)
    try:
        yield
    except BaseException as error:  # of which the launcher shows a line
        trace = None if isinstance(error, QuantshardError) else (type(error), error, error.__traceback__)
        file.handle(_log.makeRecord(_log.name, logging.ERROR, __file__, 0, str(error), (), trace))
        raise
    finally:
        logging.captureWarnings(False)
        for logger, (level, propagates) in zip(loggers, before, strict=True):
            logger.setLevel(level)
            logger.propagate = propagates
            for handler in handlers:
                logger.removeHandler(handler)


class RunFileHandler(logging.Handler):
    """Appends to a file of a run, which may be on a disk that is full: then the training goes on, and is told once."""

    def __init__(self, file: Path, run: Path, rank: int) -> None:
        super().__init__()
        self.file, self.run, self.rank, self.told = file, run, rank, False
        self.setFormatter(logging.Formatter(_FORMAT))

    def emit(self, record: logging.LogRecord) -> None:
        """Write a line."""
        record.rank, record.text = self.rank, _text(record)
        try:
            outputs.append_text(self.file, printable(self.format(record), but="\n\t") + "\n", within=self.run)
        except ConfigurationError as error:
            if not self.told:
                complain(f"[rank {self.rank}] WARNING: {error}; nothing more is logged there")
            self.told = True


class ScreenHandler(logging.Handler):
    """Shows a line on standard error: a warning as without this handler, anything else with its rank. Notes of the
    progress are not among them, which are on the terminal anyhow."""

    def emit(self, record: logging.LogRecord) -> None:
        """Show a line."""
        if record.name == progress.__name__:
            return
        grave = record.levelname if record.levelno >= logging.WARNING else f"[rank 0] {record.levelname.lower()}"
        complain(f"{grave}: {_text(record)}")


def _text(record: logging.LogRecord) -> str:
    return record.getMessage().strip().removeprefix(_SHOWN_WARNING)
