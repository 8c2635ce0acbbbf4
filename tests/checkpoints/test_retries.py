"""Which errors behind a URL are tried again, how often, and for how long; and files that are read on."""

from __future__ import annotations

import asyncio
import errno
import io
import ssl
from unittest import mock

import pytest
from fsspec.config import conf

from quantshard.checkpoints.disk import retries
from quantshard.checkpoints.disk.retries import (
    RetriedReader,
    RetryPolicy,
    RetryWarning,
    SpentError,
    passes,
    policy,
    retry,
)
from quantshard.checkpoints.disk.store import describe_error, locate
from quantshard.errors import ConfigurationError

FAST = RetryPolicy(attempts=4, first=0.001)


class ClientError(Exception):
    """As botocore's."""

    def __init__(self, status):
        super().__init__(f"an error occurred ({status})")
        self.response = {"ResponseMetadata": {"HTTPStatusCode": status}, "Error": {"Code": "SlowDown"}}


class HttpError(Exception):
    """As gcsfs's, whose code may be a text."""

    def __init__(self, code):
        super().__init__("backendError")
        self.code = code


class HTTPClientError(Exception):
    """As botocore's, of which those of connections are subclasses."""


class ReadTimeoutError(HTTPClientError):
    pass


class ClientConnectorCertificateError(ConnectionError):
    """As aiohttp's."""


def caused(error, cause):
    error.__cause__ = cause
    return error


PASSING = [
    ConnectionResetError(errno.ECONNRESET, "reset"),
    TimeoutError(),
    asyncio.TimeoutError(),
    OSError(errno.EBUSY, "Please reduce your request rate"),  # what s3fs makes of SlowDown
    caused(OSError(errno.EIO, "We encountered an internal error"), ClientError(500)),
    caused(RuntimeError("writing failed"), BrokenPipeError()),
    *map(ClientError, (408, 429, 500, 503)),
    *map(HttpError, (502, "503")),
    ReadTimeoutError("read timed out"),
]
STAYING = [
    FileNotFoundError(errno.ENOENT, "no such key"),
    caused(PermissionError("Access Denied"), ClientError(403)),
    *map(ClientError, (400, 401, 403, 404, 412)),
    HttpError("403"),
    caused(OSError(errno.EIO, "bad request"), ClientError(400)),
    caused(ConnectionResetError(), ClientError(403)),
    ssl.SSLCertVerificationError(1, "certificate verify failed"),
    ClientConnectorCertificateError("certificate"),
    OSError(errno.ENOSPC, "no space left on device"),
    ValueError("no credentials"),
]


@pytest.mark.parametrize(("errors", "answer"), [(PASSING, True), (STAYING, False)], ids=["passing", "staying"])
def test_what_is_tried_again(errors, answer):
    assert [passes(error) for error in errors] == [answer] * len(errors)


def failing(*errors):
    """A call that raises each of the errors, then returns how often it was called."""
    left, calls = list(errors), []

    def call():
        calls.append(1)
        if left:
            raise left.pop(0)
        return len(calls)

    return call


def of_place(error):
    return describe_error(error, "s3://bucket/file")


def test_tried_until_it_passes_or_too_often(monkeypatch):
    waits = []
    monkeypatch.setattr(retries.time, "sleep", waits.append)
    rules = RetryPolicy(attempts=4, first=1, longest=3)
    with pytest.warns(RetryWarning) as caught:
        assert retry(failing(TimeoutError("slow"), ConnectionError("gone")), of_place, rules) == 3
    told_of = [str(warning.message) for warning in caught]
    assert len(told_of) == 2 and told_of[0].startswith("s3://bucket/file: slow; attempt 2 of 4 in ")
    assert 0.5 <= waits[0] <= 1 and 1 <= waits[1] <= 2
    with pytest.warns(RetryWarning), pytest.raises(SpentError, match=r"slow \(tried 4 times in 0 s\).*bucket/file"):
        retry(failing(*[OSError(errno.ETIMEDOUT, "slow")] * 9), of_place, rules)
    assert 1.5 <= waits[-1] <= 3 and len(waits) == 5
    with pytest.raises(OSError, match=r"slow \(tried 1 times in 0 s\): 's3://bucket/file'"):  # no time for another
        retry(failing(TimeoutError("slow")), of_place, RetryPolicy(seconds=0))
    with pytest.raises(PermissionError, match=r"403: 's3://bucket/file'"):
        retry(failing(PermissionError("403")), of_place, rules)
    with pytest.warns(RetryWarning):
        assert retry(failing(TimeoutError("slow"), FileNotFoundError()), of_place, rules, if_missing=True) is True
    with pytest.warns(RetryWarning), pytest.raises(FileNotFoundError):
        retry(failing(TimeoutError("slow"), FileNotFoundError()), of_place, rules)
    with pytest.raises(FileNotFoundError):
        retry(failing(FileNotFoundError()), of_place, rules, if_missing=True)


def test_settings_are_fsspecs_own():
    def of(**given):
        with mock.patch.dict(conf, {retries.SECTION: given}):
            return locate("memory://run")[0].retry

    assert policy() == RetryPolicy() == of() and of(attempts="8", seconds="20.5") == RetryPolicy(8, 20.5)
    wrong = {"attempt": 3}, {"attempts": "many"}, {"attempts": 0}, {"seconds": "nan"}, {"seconds": -1}
    for given in wrong:
        with pytest.raises(ConfigurationError, match=f"FSSPEC_QUANTSHARD_.*{next(iter(given))}"):
            of(**given)


class Breaking(io.BytesIO):
    """Breaks at each third call."""

    calls = opened = 0

    def __init__(self, content):
        super().__init__(content)
        Breaking.opened += 1

    def _count(self):
        Breaking.calls += 1
        if Breaking.calls % 3 == 0:
            raise ConnectionResetError(errno.ECONNRESET, "reset")

    def read(self, size=-1):
        self._count()
        return super().read(size)

    def readinto(self, buffer):
        self._count()
        return super().readinto(buffer)


def test_a_file_is_read_on():
    content = bytes(range(256)) * 4
    with pytest.warns(RetryWarning), RetriedReader(lambda: Breaking(content), of_place, FAST) as file:
        pieces = []
        while piece := file.read(100):
            pieces.append(piece)
        assert b"".join(pieces) == content and file.tell() == 1024 and Breaking.opened > 3
        assert file.seek(-24, io.SEEK_END) == 1000 and file.read() == content[1000:]
        buffer = bytearray(10)
        assert (file.seek(3), file.readinto(buffer), file.seek(2, io.SEEK_CUR)) == (3, 10, 15)
        assert bytes(buffer) == content[3:13]
