"""What turns texts into tokens and back: bytes by default, or a tokenizer of `tokenizers` or `transformers`.

A tokenizer is files, and files come from anybody: they are read with a limit, and of a run that is resumed nothing is
parsed before its digest is the recorded one. No code of a folder is run (`trust_remote_code` stays off) and nothing is
fetched. What looks like a special token in a text is text: ends of documents come from us alone.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from quantshard import foreign
from quantshard.errors import ConfigurationError
from quantshard.foreign import regular_content
from quantshard.interop.layouts.files import companions
from quantshard.read_limits import FILE_BYTES
from quantshard.tools.terminal import inputs, outputs

END_OF_DOCUMENT = 256
VOCABULARY = 257

BYTES_DIGEST = hashlib.sha256(b"bytes").hexdigest()
"""What stands for the tokenizer of bytes in the index of token shards."""

FAST = "tokenizer.json"
_MOST_TOKENS = 1 << 24
_SPECIAL = ("tokenizer_config.json", "special_tokens_map.json")
_TOLD = 8


class Tokenizer(Protocol):
    """Texts to tokens and back.

    `vocabulary`: tokens are below it. `end_of_document`: the token that follows a document. `digest`: of its files.
    """

    vocabulary: int
    end_of_document: int
    digest: str

    def encode(self, texts: Sequence[str]) -> list[Sequence[int]]:
        """The tokens of each text, without any at its begin or end that are not of the text."""

    def encode_with_starts(self, text: str) -> tuple[Sequence[int], Sequence[int]]:
        """The tokens of a text, and the character that each begins with."""

    def decode(self, tokens: Iterable[int]) -> str:
        """Tokens as text to be shown: what is not printable is replaced; an end of a document is a line."""


class ByteTokenizer:
    """Tokens are the bytes of UTF-8, and END_OF_DOCUMENT."""

    vocabulary, end_of_document, digest = VOCABULARY, END_OF_DOCUMENT, BYTES_DIGEST

    def encode(self, texts: Sequence[str]) -> list[Sequence[int]]:
        """The bytes of each text."""
        return [text.encode("utf-8") for text in texts]

    def encode_with_starts(self, text: str) -> tuple[Sequence[int], Sequence[int]]:
        """The bytes of a text, and the character that each is of."""
        encoded = text.encode("utf-8")
        is_first = (np.frombuffer(encoded, np.uint8) & 0xC0) != 0x80
        return encoded, (np.cumsum(is_first) - 1).tolist()

    def decode(self, tokens: Iterable[int]) -> str:
        """As `text`."""
        return text(tokens)


def text(tokens: Iterable[int]) -> str:
    """Tokens as text to be shown: what is not printable, or not UTF-8, is replaced; an END_OF_DOCUMENT is a line."""
    out = bytearray()
    for token in tokens:
        out += b"\n<end of document>\n" if token == END_OF_DOCUMENT else bytes([token]) if token < 256 else b"\xff"
    return _shown(out.decode("utf-8", errors="replace"))


def _shown(decoded: str) -> str:
    return "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in decoded)


class LibraryTokenizer:
    """A tokenizer of the `tokenizers` library.

    Args:
        backend: a `tokenizers.Tokenizer`.
        end_of_document: the token, by its text.
        digest: of its files.
    """

    def __init__(self, backend: Any, end_of_document: str, digest: str) -> None:
        backend.no_truncation()
        backend.no_padding()
        backend.encode_special_tokens = True
        self.backend, self.digest = backend, digest
        entries = backend.get_vocab(with_added_tokens=True)
        self.vocabulary = max(entries.values(), default=-1) + 1
        if not 0 < self.vocabulary <= _MOST_TOKENS:
            raise ConfigurationError(f"the tokenizer has {self.vocabulary} tokens; from 1 to {_MOST_TOKENS} may be")
        self.end_of_document = _token_of(entries, end_of_document)

    def encode(self, texts: Sequence[str]) -> list[Sequence[int]]:
        """The tokens of each text; the library takes as many threads as there are CPUs."""
        return [each.ids for each in self.backend.encode_batch_fast(list(texts), add_special_tokens=False)]

    def encode_with_starts(self, text: str) -> tuple[Sequence[int], Sequence[int]]:
        """The tokens of a text, and the character that each begins with."""
        encoding = self.backend.encode(text, add_special_tokens=False)
        return encoding.ids, [start for start, _ in encoding.offsets]

    def decode(self, tokens: Iterable[int]) -> str:
        """Tokens as text to be shown; one that the tokenizer has not is left out."""
        parts: list[list[int]] = [[]]
        for token in tokens:
            if token == self.end_of_document:
                parts.append([])
            elif token < self.vocabulary:
                parts[-1].append(token)
        decoded = (self.backend.decode(part, skip_special_tokens=False) for part in parts)
        return _shown("\n<end of document>\n".join(decoded))


def _token_of(entries: Mapping[str, int], text: str) -> int:
    if text not in entries:
        near = get_close_matches(text[:80], entries, 1) if len(entries) < 1 << 20 else []
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ConfigurationError(f"the tokenizer has no token {text[:80]!r} to end documents with{hint}")
    return entries[text]


# Reading --------------------------------------------------------------------------------------------------------------


def tokenizer_files(path: str) -> list[Path]:
    """The files that make up a tokenizer: a tokenizer.json, or what a folder has.

    Raises:
        ConfigurationError: there is none.
    """
    place = Path(inputs.existing(path, f"a folder with {FAST}"))
    if not place.is_dir():
        return [place]
    found = [file for file in companions(place, "*.model") if file.name != "generation_config.json"]
    if not found:
        raise ConfigurationError(f"--tokenizer {path} is a folder without {FAST} or the files of another tokenizer")
    return found


def has_tokenizer(folder: str) -> bool:
    """Whether a folder, as one of a model, holds a tokenizer too."""
    return any((Path(folder) / name).is_file() for name in (FAST, _SPECIAL[0]))


def tokenizer_digest(contents: Mapping[str, bytes]) -> str:
    """The digest of a tokenizer: of names and contents of its files."""
    lines = "".join(f"{hashlib.sha256(content).hexdigest()} {name}\n" for name, content in sorted(contents.items()))
    return hashlib.sha256(lines.encode("utf-8", "surrogateescape")).hexdigest()


def tokenizer_contents(path: str) -> dict[str, bytes]:
    """The files that make up a tokenizer, by name.

    Raises:
        ConfigurationError: one is missing, or has more bytes than such a file may have.
    """
    found = {}
    for file in tokenizer_files(path):
        try:
            name = FAST if file == Path(path) else file.name
            found[name] = regular_content(file, FILE_BYTES["tokenizer"], follow=file == Path(path))
        except OSError as error:
            raise ConfigurationError(f"cannot read the tokenizer's {file}: {error.strerror or error}") from None
    return found


def load_tokenizer(path: str, end_of_document: str = "", digest: str = "") -> Tokenizer:
    """The tokenizer of a folder, or of a tokenizer.json; "" is that of bytes.

    `end_of_document`: the token that follows a document, if it is not the one that the folder calls eos_token.
    `digest`: what the tokenizer's must be, if it is known; nothing is parsed if it is another.

    Raises:
        ConfigurationError: it is none, is another, needs a library that is missing, or has no such token.
    """
    if not path:
        if end_of_document:
            raise ConfigurationError(
                f"--end-of-document {end_of_document[:80]!r} is about --tokenizer, which is not given; leave it out"
            )
        return ByteTokenizer()
    contents = tokenizer_contents(path)
    found = tokenizer_digest(contents)
    if digest not in ("", found):
        raise ConfigurationError(
            f"{path} is not the tokenizer that the data were made with (its SHA-256 is {digest[:12]}...); name that "
            "one with --tokenizer"
        )
    backend = _backend(path, contents)
    return LibraryTokenizer(backend, end_of_document or end_token(path, contents, backend), found)


def end_token(path: str, contents: Mapping[str, bytes], backend: Any) -> str:
    """The token that a tokenizer's files call eos_token.

    Raises:
        ConfigurationError: they name none; which special tokens there are is said.
    """
    for name in _SPECIAL:
        content = foreign.json_object(contents[name], f"{path}: {name}", wide=True) if name in contents else {}
        token = content.get("eos_token")
        token = token.get("content") if isinstance(token, dict) else token
        if isinstance(token, str) and token:
            return token
    special = [each.content for each in backend.get_added_tokens_decoder().values() if each.special]
    known = f"; its special tokens are {', '.join(map(repr, special[:_TOLD]))}" if special else ""
    raise ConfigurationError(
        f"--tokenizer {path} does not say which token ends a document (eos_token in {_SPECIAL[0]}); name it with "
        f"--end-of-document TOKEN{known}"
    )


def end_text(tokenizer: Tokenizer) -> str:
    """The text of the token that ends a document; "" of bytes."""
    return (
        str(tokenizer.backend.id_to_token(tokenizer.end_of_document)) if isinstance(tokenizer, LibraryTokenizer) else ""
    )


def _backend(path: str, contents: Mapping[str, bytes]) -> Any:
    if FAST in contents:
        return _parsed(path, contents[FAST])
    transformers = library("transformers", f"the tokenizer of {path}, which has no {FAST}")
    with tempfile.TemporaryDirectory() as folder:  # what was digested is what is read
        for name, content in contents.items():
            outputs.write_file(Path(folder, name), content)
        try:
            with foreign.hub_offline():
                made = transformers.AutoTokenizer.from_pretrained(
                    folder, local_files_only=True, trust_remote_code=False
                )
            backend = getattr(made, "backend_tokenizer", None)
        except Exception as error:  # of whatever file it was
            raise _no_tokenizer(path, error) from None
    if backend is None:
        raise ConfigurationError(
            f"--tokenizer {path}: transformers reads it as {type(made).__name__}, which is not one of the tokenizers "
            f"library; convert it to a {FAST}"
        )
    return backend


def _parsed(path: str, content: bytes) -> Any:
    tokenizers = library("tokenizers", f"the tokenizer {path}")
    try:
        json.loads(content)  # before the library is given it: one that is deep, or none
        return tokenizers.Tokenizer.from_str(content.decode("utf-8"))
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a panic of Rust is no Exception
        raise _no_tokenizer(path, error) from None


def _no_tokenizer(path: str, error: BaseException) -> ConfigurationError:
    line = " ".join(str(error).split())[:200] or type(error).__name__
    return ConfigurationError(f"--tokenizer {path} cannot be read as a tokenizer: {line}")


def library(name: str, what: str) -> Any:
    """A library that reads some data and is not needed for others.

    Raises:
        ConfigurationError: it is not installed; what to install is said.
    """
    try:
        return importlib.import_module(name)
    except ImportError:
        package = name.partition(".")[0]
        raise ConfigurationError(f"{what} needs a missing package; run: pip install {package}") from None
