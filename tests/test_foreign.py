"""Files from anybody: what is opened, how much of it is read, and how what they say is shown."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from quantshard.errors import CheckpointError, ConfigurationError, FallbackError, QuantshardError, printable
from quantshard.foreign import read_json, read_regular, read_toml


def listening(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))


def hole(path: Path) -> None:
    path.touch()
    os.truncate(path, 1 << 40)


ODD: dict[str, tuple[Callable[[Path], object], str]] = {
    "a pipe": (os.mkfifo, "no regular file but a pipe"),
    "a link to a device": (lambda path: path.symlink_to("/dev/zero"), "it is a link"),
    "a link to itself": (lambda path: path.symlink_to(path), "it is a link"),
    "a link to a file": (lambda path: path.symlink_to(__file__), "it is a link"),
    "a link to nothing": (lambda path: path.symlink_to("nothing"), "it is a link"),
    "a socket": (listening, "no regular file"),
    "a folder": (Path.mkdir, "Is a directory"),
    "nothing": (lambda path: None, "No such file"),
    "too long": (lambda path: path.write_bytes(bytes(101)), "it has 101 bytes, and at most 100 are read"),
    "a hole": (hole, "it has 1099511627776 bytes"),
}


@pytest.mark.parametrize("odd", ODD)
def test_what_is_not_read(tmp_path: Path, odd: str) -> None:
    make, said = ODD[odd]
    make(tmp_path / "file")
    with pytest.raises(CheckpointError, match=f"cannot read {tmp_path}/file: .*{said}"):
        read_regular(tmp_path / "file", 100, raising=CheckpointError)


@pytest.mark.parametrize("device", ["/dev/zero", "/dev/stdin"])
def test_links_that_the_user_names_lead_to_regular_files_only(tmp_path: Path, device: str) -> None:
    (tmp_path / "file").write_bytes(b"here")
    (tmp_path / "link").symlink_to("file")
    assert read_regular(tmp_path / "link", 100, follow=True) == b"here"
    (tmp_path / "device").symlink_to(device)
    with pytest.raises(ConfigurationError, match="cannot read"):
        read_regular(tmp_path / "device", 100, follow=True)


def test_links_of_the_cache_of_hugging_face(tmp_path: Path) -> None:
    """They lead to ../../blobs/HASH, and to a file there alone."""
    blobs, snapshot = tmp_path / "models--x" / "blobs", tmp_path / "models--x" / "snapshots" / "main"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    digest = "0123456789abcdef" * 4
    (blobs / digest).write_bytes(b"weights")
    (snapshot / "file").symlink_to(f"../../blobs/{digest}")
    assert read_regular(snapshot / "file", 100) == b"weights"
    (blobs / digest).unlink()
    (blobs / digest).symlink_to(__file__)
    with pytest.raises(ConfigurationError, match="it is a link"):
        read_regular(snapshot / "file", 10**6)
    elsewhere = tmp_path / "models--x" / "other" / "main"
    elsewhere.mkdir(parents=True)
    (elsewhere / "file").symlink_to(f"../../blobs/{digest}")
    with pytest.raises(ConfigurationError, match="it is a link"):
        read_regular(elsewhere / "file", 10**6)


TEXTS = {
    "plain": "plain",
    "größe 模型 \\n [bold]": "größe 模型 \\n [bold]",
    "\x1b]0;title\x07\x1b[2J": "\\x1b]0;title\\x07\\x1b[2J",
    "a\nb\rc\td\x85\u2028": "a\\nb\\rc\\td\\x85\\u2028",
    "\u202egnp.exe\u2066\u200b": "\\u202egnp.exe\\u2066\\u200b",
    "\ud800\udcff\x7f\x9b": "\\ud800\\udcff\\x7f\\x9b",
}


@pytest.mark.parametrize("text", TEXTS, ids=ascii)
def test_texts_are_printable(text: str) -> None:
    shown = printable(text)
    assert shown == TEXTS[text] == printable(shown)
    assert shown.isprintable()
    shown.encode()
    assert str(CheckpointError(text)) == shown


def test_errors_keep_their_lines() -> None:
    assert str(FallbackError("one\ntwo\x1b")) == "one\ntwo\\x1b"
    assert QuantshardError(3, "x").args == (3, "x")


JSON = {
    b'{"a": 1': "is not JSON",
    b"\xff": "is not JSON",
    b"[" * 100_000: "is not JSON",
    b'{"a": ' + b"9" * 5000 + b"}": "is not JSON",
    b"[1]": "is not a JSON object",
}


@pytest.mark.parametrize("content", JSON, ids=lambda content: content[:20])
def test_json_that_is_none(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=JSON[content]):
        read_json(tmp_path / "x.json", 10**6, raising=CheckpointError)


TOML = {
    b"a = ": "is not TOML",
    b"\xff": "is not TOML",
    b"a = " + b"[" * 100_000: "is not TOML",
    b"a = " + b"9" * 5000: "is not TOML",
}


@pytest.mark.parametrize("content", TOML, ids=lambda content: content[:20])
def test_toml_that_is_none(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x.toml").write_bytes(content)
    with pytest.raises(ConfigurationError, match=TOML[content]):
        read_toml(tmp_path / "x.toml", 2 << 20)


def test_plain_files_are_read(tmp_path: Path) -> None:
    (tmp_path / "x.toml").write_text('a.b = 1\n["x.y"]\nc = [1, 2]\nd = "a.b.c"\n')
    assert read_toml(tmp_path / "x.toml", 100) == {"a": {"b": 1}, "x.y": {"c": [1, 2], "d": "a.b.c"}}
    (tmp_path / "x.json").write_text('{"a": [1, {"b": null}]}')
    assert read_json(tmp_path / "x.json", 100) == {"a": [1, {"b": None}]}
