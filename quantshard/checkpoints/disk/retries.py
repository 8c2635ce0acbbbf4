"""Retries for remote stores after transient errors: throttling, server errors, lost connections.

Some clients of stores have retries of their own, and others have none. The retries here work with any client, for calls
that can be repeated. An upload that broke off is restarted by the caller, who has the data.
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
"""Section of fsspec's configuration: FSSPEC_QUANTSHARD_ATTEMPTS=8, or a file in ~/.config/fsspec."""

_FINAL = (FileNotFoundError, PermissionError, FileExistsError, NotADirectoryError, IsADirectoryError)
_BUSY_CLIENT = (408, 425, 429)
"""Transient HTTP statuses among the client errors: timeout, too early, too many requests."""
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
"""Transient error classes of clients, which need not be installed; subclasses count too."""
_DEPTH = 12
"""Maximum length of a chain of causes."""

# not the global generator: its seed is the same on all ranks, and its state belongs to the run
_random = random.SystemRandom()


class SpentError(OSError):
    """The last error after all attempts. Callers further out do not retry it."""


class RetryWarning(UserWarning):
    """A call to a remote store failed and is retried."""


@dataclass(frozen=True)
class RetryPolicy:
    """Limits of retries.

    `attempts`: maximum number of calls. `seconds`: maximum total time. `first`, `longest`: first and maximum wait in
    seconds. The wait doubles after each attempt and is reduced by a random factor of up to 2.
    """

    attempts: int = 6
    seconds: float = 300.0
    first: float = 0.5
    longest: float = 30.0


def policy() -> RetryPolicy:
    """The retry policy: fsspec's configuration (section `SECTION`) over the defaults.

    Raises:
        ConfigurationError: a key is unknown, or a value is not a number in its range.
    """
    settings: dict[str, Any] = dict(conf.get(SECTION, {}))
    types: dict[str, type[int] | type[float]] = {name: type(value) for name, value in asdict(RetryPolicy()).items()}
    where = f"fsspec's configuration of {SECTION} (FSSPEC_{SECTION.upper()}_...)"
    for name, value in settings.items():
        if name not in types:
            raise ConfigurationError(f"{where} has {name!r}; it may have {', '.join(types)}")
        try:
            settings[name] = number = types[name](value)
        except (TypeError, ValueError):
            raise ConfigurationError(f"{where}: {name} = {value!r} is no {types[name].__name__}") from None
        if not (name == "attempts") <= number < 1e6:
            raise ConfigurationError(f"{where}: {name} = {value!r} must be {int(name == 'attempts')} to a million")
    return RetryPolicy(**settings)


def retry(
    action: Callable[[], T],
    describe: Callable[[BaseException], OSError],
    policy: RetryPolicy,
    *,
    if_missing: T | None = None,
) -> T:
    """Return the result of `action`, which is retried after transient errors, each time with a `RetryWarning`.

    `describe`: converts an error to an OSError with the path. `if_missing`: the result if a retry raises
    FileNotFoundError because an earlier attempt removed the file; None to raise.

    Raises:
        OSError: the converted error, if it is not transient.
        SpentError: the last transient error, with the number of attempts.
    """
    start, attempt = time.monotonic(), 1
    while True:
        try:
            return action()
        except Exception as error:
            if attempt > 1 and if_missing is not None and isinstance(error, FileNotFoundError):
                return if_missing
            os_error, elapsed = describe(error), time.monotonic() - start
            if not passes(error):
                if os_error is error:
                    raise
                raise os_error from error
            wait = min(policy.longest, policy.first * 2 ** (attempt - 1)) * _random.uniform(0.5, 1)
            if attempt >= policy.attempts or elapsed + wait > policy.seconds:
                message = f"{os_error.strerror} (tried {attempt} times in {elapsed:.0f} s)"
                raise SpentError(os_error.errno, message, os_error.filename) from error
            _warn(os_error, attempt, wait, policy)
        time.sleep(wait)
        attempt += 1


def _warn(said: OSError, attempt: int, wait: float, rules: RetryPolicy) -> None:
    warnings.warn(
        f"{said.filename}: {said.strerror}; attempt {attempt + 1} of {rules.attempts} in {wait:.1f} s",
        RetryWarning,
        stacklevel=4,
    )


def passes(error: BaseException) -> bool:
    """Whether an error is transient, judging by class, errno or HTTP status of the error or of its causes."""
    if isinstance(error, _FINAL):
        return False
    chain = list(_chain(error))
    if any(isinstance(cause, SpentError) for cause in chain):
        return False
    statuses = [status for cause in chain if (status := _status(cause)) is not None]
    if statuses:
        return statuses[0] >= _SERVER or statuses[0] in _BUSY_CLIENT
    return any(_is_of_connection(cause) for cause in chain)


def _chain(error: BaseException) -> Iterator[BaseException]:
    """An error and its causes, the outermost first."""
    cause: BaseException | None = error
    for _ in range(_DEPTH):
        if cause is None:
            return
        yield cause
        cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)


def _status(error: BaseException) -> int | None:
    """The HTTP status of an error, in the attribute that its client uses."""
    response = getattr(error, "response", None)
    if isinstance(response, dict):  # botocore's
        status = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
    else:
        attributes = (getattr(error, name, None) for name in ("status", "status_code", "code"))
        status = next((value for value in attributes if value is not None), getattr(response, "status_code", None))
    text = str(status)
    return int(text) if text.isascii() and text.isdigit() and 100 <= int(text[:4]) < 600 else None


def _is_of_connection(error: BaseException) -> bool:
    names = {kind.__name__ for kind in type(error).__mro__}
    if any("SSL" in name or "Certificate" in name for name in names):
        return False  # mostly an invalid certificate, which does not pass
    if isinstance(error, ConnectionError | TimeoutError | asyncio.TimeoutError):
        return True
    return bool(names & _NAMES) or (isinstance(error, OSError) and error.errno in _NUMBERS)


class RetriedReader(io.RawIOBase):
    """A file opened for reading that is reopened after transient errors and continues at the same position."""

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

        return retry(attempt, self._told, self._rules)

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
        """The position of the next byte."""
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        """Set the position. Only a seek from the end accesses the file."""
        if whence == io.SEEK_END:
            self._at = self._try(lambda file: int(file.seek(offset, whence)))
        else:
            self._at = max(0, offset + (self._at if whence == io.SEEK_CUR else 0))
        return self._at

    def read(self, size: int = -1, /) -> bytes:
        """Read the next bytes, as many as the client's file returns for `size`."""
        data = self._try(lambda file: bytes(file.read(size)))
        self._at += len(data)
        return data

    def readinto(self, buffer: Any, /) -> int:
        """Read into a buffer."""
        count = self._try(lambda file: int(file.readinto(buffer)))
        self._at += count
        return count

    def close(self) -> None:
        """Close the client's file."""
        if not self.closed:
            self._drop()
        super().close()
