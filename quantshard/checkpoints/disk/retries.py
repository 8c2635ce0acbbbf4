"""Trying again, behind a URL, what failed for a reason that passes: throttling, errors of servers, lost connections.

The clients of stores have retries of their own, each in its way, or none. These are around whatever client it is, and
only where a call can be made again: an upload that broke off is begun anew by who has the data.
"""

from __future__ import annotations

import asyncio
import errno
import io
import random
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from fsspec.config import conf

from quantshard.errors import ConfigurationError

T = TypeVar("T")

SECTION = "quantshard"
"""Of fsspec's configuration: FSSPEC_QUANTSHARD_ATTEMPTS=8, or a file in ~/.config/fsspec."""

_FINAL = (FileNotFoundError, PermissionError, FileExistsError, NotADirectoryError, IsADirectoryError)
_BUSY_CLIENT = (408, 425, 429)
"""Statuses of a client's error that pass: timeout, too early, too many requests."""
_SERVER = 500
_NUMBERS = {
    errno.EAGAIN, errno.EBUSY, errno.EPIPE, errno.ECONNRESET, errno.ECONNABORTED, errno.ECONNREFUSED, errno.ETIMEDOUT,
    errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ENETRESET,
}  # fmt: skip
_NAMES = {
    "ClientConnectionError", "ClientPayloadError",  # aiohttp
    "HTTPClientError", "EndpointConnectionError", "ConnectTimeoutError", "ResponseStreamingError",  # botocore
    "ConnectionError", "Timeout", "ChunkedEncodingError",  # requests
    "ProtocolError", "IncompleteRead", "IncompleteReadError",  # urllib3, http.client, asyncio
    "ServiceRequestError", "ServiceResponseError",  # azure
}  # fmt: skip
"""Classes of clients that need not be installed; subclasses count."""
_DEPTH = 12
"""How far causes of errors are followed."""

_random = random.SystemRandom()  # ranks have one seed, and a run's generators are saved with it


class SpentError(OSError):
    """It was tried often enough: who has called tries nothing again."""


class RetryWarning(UserWarning):
    """Something behind a URL failed and is tried again."""


@dataclass(frozen=True)
class RetryPolicy:
    """How often something is tried, at most, and for how long; the waits between, in seconds, double up to `longest`,
    and are cut by up to half at random."""

    attempts: int = 6
    seconds: float = 300.0
    first: float = 0.5
    longest: float = 30.0


def policy() -> RetryPolicy:
    """What fsspec's configuration says, in the section `SECTION`, over the defaults.

    Raises:
        ConfigurationError: a key is unknown, or a value is no number in its range.
    """
    given: dict[str, Any] = dict(conf.get(SECTION, {}))
    known: dict[str, type[int] | type[float]] = {name: type(value) for name, value in asdict(RetryPolicy()).items()}
    where = f"fsspec's configuration of {SECTION} (FSSPEC_{SECTION.upper()}_...)"
    for name, value in given.items():
        if name not in known:
            raise ConfigurationError(f"{where} has {name!r}; it may have {', '.join(known)}")
        try:
            given[name] = number = known[name](value)
        except (TypeError, ValueError):
            raise ConfigurationError(f"{where}: {name} = {value!r} is no {known[name].__name__}") from None
        if not (name == "attempts") <= number < 1e6:
            raise ConfigurationError(f"{where}: {name} = {value!r} must be {int(name == 'attempts')} to a million")
    return RetryPolicy(**given)


def tried(
    action: Callable[[], T], told: Callable[[BaseException], OSError], rules: RetryPolicy, *, gone: T | None = None
) -> T:
    """What a call returns that is made again while it fails for a reason that passes, each time with a `RetryWarning`.

    `told`: an error as one of the system's, with the path. `gone`: what is returned where a call that is made again
    finds nothing any more, since the one before had removed it; None to raise.

    Raises:
        OSError: what `told` makes of an error that does not pass.
        SpentError: of the last of those that do; it says how often it was tried.
    """
    began, attempt = time.monotonic(), 1
    while True:
        try:
            return action()
        except Exception as error:
            if attempt > 1 and gone is not None and isinstance(error, FileNotFoundError):
                return gone
            said, spent = told(error), time.monotonic() - began
            if not passes(error):
                if said is error:
                    raise
                raise said from error
            wait = min(rules.longest, rules.first * 2 ** (attempt - 1)) * _random.uniform(0.5, 1)
            if attempt >= rules.attempts or spent + wait > rules.seconds:
                often = f"{said.strerror} (tried {attempt} times in {spent:.0f} s)"
                raise SpentError(said.errno, often, said.filename) from error
            _warn(said, attempt, wait, rules)
        time.sleep(wait)
        attempt += 1


def _warn(said: OSError, attempt: int, wait: float, rules: RetryPolicy) -> None:
    warnings.warn(
        f"{said.filename}: {said.strerror}; attempt {attempt + 1} of {rules.attempts} in {wait:.1f} s",
        RetryWarning,
        stacklevel=4,
    )


def passes(error: BaseException) -> bool:
    """Whether an error may be gone in a moment, by its class, its number or the status of an answer, or those of what
    caused it."""
    if isinstance(error, _FINAL):
        return False
    chain = list(_chain(error))
    if any(isinstance(each, SpentError) for each in chain):
        return False
    statuses = [status for each in chain if (status := _status(each)) is not None]
    if statuses:
        return statuses[0] >= _SERVER or statuses[0] in _BUSY_CLIENT
    return any(_is_of_connection(each) for each in chain)


def _chain(error: BaseException) -> Iterator[BaseException]:
    """An error and its causes, the last first."""
    at: BaseException | None = error
    for _ in range(_DEPTH):
        if at is None:
            return
        yield at
        at = at.__cause__ or (None if at.__suppress_context__ else at.__context__)


def _status(error: BaseException) -> int | None:
    """The status of an answer over HTTP, as clients keep it."""
    response = getattr(error, "response", None)
    if isinstance(response, dict):  # botocore's
        found = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
    else:
        named = (getattr(error, name, None) for name in ("status", "status_code", "code"))
        found = next((value for value in named if value is not None), getattr(response, "status_code", None))
    text = str(found)
    return int(text) if text.isascii() and text.isdigit() and 100 <= int(text[:4]) < 600 else None


def _is_of_connection(error: BaseException) -> bool:
    names = {kind.__name__ for kind in type(error).__mro__}
    if any("SSL" in name or "Certificate" in name for name in names):
        return False  # of a certificate, mostly
    if isinstance(error, ConnectionError | TimeoutError | asyncio.TimeoutError):
        return True
    return bool(names & _NAMES) or (isinstance(error, OSError) and error.errno in _NUMBERS)


class RetriedReader(io.RawIOBase):
    """A file that is read: where reading fails for a reason that passes, it is opened anew and read on from there."""

    def __init__(self, opened: Callable[[], Any], told: Callable[[BaseException], OSError], rules: RetryPolicy) -> None:
        self._opened, self._told, self._rules = opened, told, rules
        self._file: Any = None
        self._at = 0
        self._try(lambda file: None)

    def _try(self, call: Callable[[Any], T]) -> T:
        def attempt() -> T:
            try:
                if self._file is None:
                    self._file = self._opened()
                self._file.seek(self._at)
                return call(self._file)
            except Exception:
                self._drop()
                raise

        return tried(attempt, self._told, self._rules)

    def _drop(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            with suppress(Exception):  # it is broken
                file.close()

    def readable(self) -> bool:
        """True."""
        return True

    def seekable(self) -> bool:
        """True."""
        return True

    def tell(self) -> int:
        """Where the next byte is read."""
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        """Go somewhere, in memory alone but for the end."""
        if whence == io.SEEK_END:
            self._at = self._try(lambda file: int(file.seek(offset, whence)))
        else:
            self._at = max(0, offset + (self._at if whence == io.SEEK_CUR else 0))
        return self._at

    def read(self, size: int = -1, /) -> bytes:
        """The next bytes, as many as the client's file gives for that."""
        data = self._try(lambda file: bytes(file.read(size)))
        self._at += len(data)
        return data

    def readinto(self, buffer: Any, /) -> int:
        """As `read`, into memory that is there."""
        count = self._try(lambda file: int(file.readinto(buffer)))
        self._at += count
        return count

    def close(self) -> None:
        """Close the client's file."""
        if not self.closed:
            self._drop()
        super().close()
