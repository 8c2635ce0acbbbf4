"""The corpus of a run: documents of bytes or tokens, and their description in `config.toml`.

A text document is a file: its tokens are its bytes, followed by END_OF_DOCUMENT. A token file contains integers,
including ends of documents. The stream of a source is the concatenation of its documents.

Only the list of documents is in memory; windows are read from the files. The list has a SHA-256 per document, and one
of the whole: the digest of the lines "<sha256> <size>", one per document. `resume` compares them.

A resumed run is untrusted and could name any file as its data. Lengths are therefore compared before a file is read,
and a file is trained on only if its SHA-256 matches `config.toml`. Error messages reveal nothing about a file except
whether it matches.
"""

from __future__ import annotations

import codecs
import hashlib
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from quantshard.errors import ConfigurationError
from quantshard.foreign import open_regular
from quantshard.tools.trainer.data.tokenizer import END_OF_DOCUMENT, VOCABULARY
from quantshard.tools.trainer.settings.schema import shown_value

TOKEN_DTYPES: dict[str, np.dtype[Any]] = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}
"""Little-endian dtypes of token files."""

CHUNK_BYTES = 1 << 20
_LOOKED_AT = 1 << 16
_PACKED = {b"\x1f\x8b": "gzip", b"(\xb5/\xfd": "zstd", b"PK\x03\x04": "zip", b"BZh": "bzip2", b"\xfd7zXZ": "xz"}
"""The first bytes of compressed files."""

_ENTRY = re.compile(r"([0-9a-f]{64}) ([0-9]{1,18}) (?:(uint16|uint32|text)\+([0-9]{1,6}) )?(/[^\0]*)", re.DOTALL)
_SOURCE = re.compile(r"([0-9]{1,9}) files?, weight ([0-9.e+-]{1,30})")


def token_dtype(vocabulary: int) -> str:
    """Return the storage dtype of a vocabulary's tokens: two bytes if they suffice."""
    return "uint16" if vocabulary <= 1 << 16 else "uint32"


@dataclass(frozen=True)
class Document:
    """One file: path, size in bytes, and SHA-256.

    `dtype`: one of `TOKEN_DTYPES`; "" for text. `header`: bytes before the first token, such as a byte order mark.
    """

    path: Path
    size: int
    sha256: str
    dtype: str = ""
    header: int = 0

    @property
    def stored(self) -> int:
        """Number of tokens in the file; excludes the end of a text document."""
        return (self.size - self.header) // (TOKEN_DTYPES[self.dtype].itemsize if self.dtype else 1)

    @property
    def tokens(self) -> int:
        """Number of tokens in the stream."""
        return self.stored + (not self.dtype)

    @property
    def line(self) -> str:
        """Identity of the document, without its name."""
        return f"{self.sha256} {self.size}" + (
            f" {self.dtype or 'text'}+{self.header}" if self.dtype or self.header else ""
        )


def _more(found: Sequence[object]) -> str:
    return f" (as {len(found) - 1} more)" if len(found) > 1 else ""


@dataclass(frozen=True)
class Corpus:
    """All documents, in order: the documents of each source, then the held-out ones.

    Args:
        documents: the documents.
        counts: number of documents per source; empty if all documents form one stream.
        weights: share of the windows per source; empty like `counts`.
        heldout_files: number of documents at the end that are only evaluated on.
        tokenizer: digest of the tokenizer; "" if tokens are bytes or the tokenizer is unknown.
        vocabulary: number of tokens.
        end_of_document: token that ends documents.
    """

    documents: tuple[Document, ...]
    counts: tuple[int, ...] = ()
    weights: tuple[float, ...] = ()
    heldout_files: int = 0
    tokenizer: str = ""
    vocabulary: int = VOCABULARY
    end_of_document: int = END_OF_DOCUMENT

    @property
    def is_bytes(self) -> bool:
        """Whether tokens are bytes and END_OF_DOCUMENT."""
        return not self.tokenizer and self.end_of_document == END_OF_DOCUMENT

    @cached_property
    def sources(self) -> list[tuple[Document, ...]]:
        """Training documents of each source."""
        trained = self.documents[: len(self.documents) - self.heldout_files]
        if not self.weights:
            return [trained]
        ends = np.cumsum(self.counts).tolist()
        return [trained[end - count : end] for end, count in zip(ends, self.counts, strict=True)]

    @property
    def heldout(self) -> tuple[Document, ...]:
        """Documents for evaluation only."""
        return self.documents[len(self.documents) - self.heldout_files :]

    def repeated(self) -> list[str]:
        """Return warnings about documents that are both trained and evaluated on, and about files that are read
        twice."""
        trained = self.documents[: len(self.documents) - self.heldout_files]
        by_content = {document.line: document.path for document in trained if document.size}
        leaked = [
            (held_out.path, by_content[held_out.line]) for held_out in self.heldout if held_out.line in by_content
        ]
        duplicates = [path for path, count in Counter(document.path for document in trained).items() if count > 1]
        messages = []
        if leaked:
            messages.append(
                f"WARNING: {leaked[0][0]} is evaluated on and trained on{_more(leaked)}: it has the contents of "
                f"{leaked[0][1]}, so held-out losses do not tell how well the model does on other texts"
            )
        if duplicates:
            messages.append(
                f"WARNING: {duplicates[0]} is named twice by --data{_more(duplicates)}, so it is trained on twice"
            )
        return messages

    @property
    def tokens(self) -> int:
        """Number of tokens in all documents."""
        return sum(document.tokens for document in self.documents)

    @property
    def sha256(self) -> str:
        """Digest of sizes and contents of all documents, without names."""
        lines = "".join(f"{document.line}\n" for document in self.documents)
        return hashlib.sha256(lines.encode("ascii")).hexdigest()

    def table(self) -> dict[str, Any]:
        """Return the table that `config.toml` records."""
        table: dict[str, Any] = {
            "sha256": self.sha256,
            "bytes": sum(document.size for document in self.documents),
            "files": [f"{document.line} {document.path}" for document in self.documents],
        }
        if self.weights:
            table["sources"] = [
                f"{count} files, weight {weight!r}" for count, weight in zip(self.counts, self.weights, strict=True)
            ]
        if self.heldout_files:
            table["heldout_files"] = self.heldout_files
        if (self.tokenizer, self.vocabulary, self.end_of_document) != ("", VOCABULARY, END_OF_DOCUMENT):
            table["vocabulary"], table["end_of_document"] = self.vocabulary, self.end_of_document
        if self.tokenizer:
            table["tokenizer"] = self.tokenizer
        return table


def from_table(recorded: Mapping[str, Any]) -> Corpus:
    """Rebuild a corpus from its table in `config.toml`, without reading the files.

    Raises:
        ConfigurationError: the table is inconsistent.
    """
    documents = tuple(map(_entry, recorded["files"]))
    sources = [_source(entry) for entry in recorded.get("sources", ())]
    corpus = Corpus(
        documents,
        tuple(count for count, _ in sources),
        tuple(weight for _, weight in sources),
        recorded.get("heldout_files", 0),
        recorded.get("tokenizer", ""),
        recorded.get("vocabulary", VOCABULARY),
        recorded.get("end_of_document", END_OF_DOCUMENT),
    )
    if not documents or corpus.sha256 != recorded["sha256"]:
        raise ConfigurationError("config.toml: the sha256 in [corpus] is not that of its files; restore the file")
    trained = len(documents) - corpus.heldout_files
    if trained < 1 or (sources and sum(corpus.counts) != trained):
        raise ConfigurationError(
            f"config.toml: [corpus] has {len(documents)} files, which are not those of its sources and held-out files; "
            "restore the file"
        )
    check_vocabulary(corpus)
    return corpus


def check_vocabulary(corpus: Corpus) -> None:
    """Check that the vocabulary covers bytes (if there are texts) and the end of a document.

    Raises:
        ConfigurationError: the vocabulary is too small, or the end of a document differs from the one of bytes.
    """
    has_texts = any(not document.dtype for document in corpus.documents)
    if has_texts and (corpus.vocabulary < VOCABULARY or corpus.end_of_document != END_OF_DOCUMENT):
        raise ConfigurationError(
            f"vocabulary = {corpus.vocabulary}, but there are {VOCABULARY} tokens of bytes, the last of them the end "
            "of a document; leave it out, or make it larger"
        )
    if not 0 <= corpus.end_of_document < corpus.vocabulary:
        raise ConfigurationError(
            f"the end of a document is token {corpus.end_of_document}, but vocabulary = {corpus.vocabulary}; make it "
            "larger"
        )


def _entry(entry: str) -> Document:
    match = _ENTRY.fullmatch(entry)
    if match is None:
        raise ConfigurationError(f"config.toml: {shown_value(entry)} in [corpus] is not a SHA-256, a length and a path")
    dtype = "" if match[3] == "text" else match[3] or ""
    document = Document(Path(match[5]), int(match[2]), match[1], dtype, int(match[4] or 0))
    if document.size < document.header or not _is_even(document):
        raise ConfigurationError(f"config.toml: {shown_value(entry)} in [corpus] is of no whole number of tokens")
    return document


def _is_even(document: Document) -> bool:
    return not document.dtype or (document.size - document.header) % TOKEN_DTYPES[document.dtype].itemsize == 0


def _source(entry: str) -> tuple[int, float]:
    match = _SOURCE.fullmatch(entry)
    try:
        count, weight = (int(match[1]), float(match[2])) if match else (0, 0.0)
    except ValueError:
        count, weight = 0, 0.0
    if count < 1 or not (0 < weight <= 1 and math.isfinite(weight)):
        raise ConfigurationError(
            f"config.toml: {shown_value(entry)} in [corpus] is not a number of files and a weight of more than 0"
        )
    return count, weight


def read_document(path: Path, size: int, dtype: str = "", header: int = 0, vocabulary: int = 0) -> Document:
    """Read a whole file for its digest, and check that each token is below `vocabulary` (0: no check).

    Raises:
        ConfigurationError: the file is unreadable, changes while it is read, or has a token out of range.
    """
    digest, remaining = hashlib.sha256(), size
    limit = vocabulary if dtype else 0
    try:
        with open_regular(path, follow=True) as file:
            while remaining and (content := file.read(min(remaining, CHUNK_BYTES))):
                digest.update(content)
                if limit:
                    _check_tokens(path, content, size - remaining, dtype, header, limit)
                remaining -= len(content)
            changed = bool(remaining or file.read(1))
    except OSError as error:
        raise unreadable(path, error) from None
    if changed:
        raise ConfigurationError(f"the data file {path} changed while it was read; try again when nothing writes to it")
    return Document(path, size, digest.hexdigest(), dtype, header)


def byte_order_mark(path: Path) -> int:
    """Return the length of a text file's byte order mark, or 0.

    Raises:
        ConfigurationError: the file cannot be read.
    """
    try:
        with open_regular(path, follow=True) as file:
            return len(codecs.BOM_UTF8) if file.read(len(codecs.BOM_UTF8)) == codecs.BOM_UTF8 else 0
    except OSError as error:
        raise unreadable(path, error) from None


def check_text(path: Path) -> None:
    """Check that the start of a file looks like UTF-8 text, so that compressed or binary files are not trained on by
    mistake.

    Raises:
        ConfigurationError: the file is not text, or cannot be read.
    """
    try:
        with open_regular(path, follow=True) as file:
            head = file.read(_LOOKED_AT)
    except OSError as error:
        raise unreadable(path, error) from None
    try:
        is_text = "\0" not in codecs.getincrementaldecoder("utf-8")().decode(head)
    except UnicodeDecodeError:
        is_text = False
    if not is_text:
        packer = next((packer for magic, packer in _PACKED.items() if head.startswith(magic)), "")
        raise ConfigurationError(
            f"the data file {path} is no text in UTF-8{f' but packed by {packer}: unpack it' if packer else ''}; to "
            "train on its bytes as they are, say --data-format text"
        )


def _check_tokens(path: Path, content: bytes, at: int, dtype: str, header: int, vocabulary: int) -> None:
    """Check the tokens in a part of a file. `at`: offset of the part; like the header, a multiple of the token's
    width."""
    skipped = min(len(content), max(0, header - at))
    kind = TOKEN_DTYPES[dtype]
    tokens = np.frombuffer(content, kind, (len(content) - skipped) // kind.itemsize, skipped)
    if tokens.size and int(tokens.max()) >= vocabulary:
        wrong = int((tokens >= vocabulary).argmax())
        position = (at + skipped - header) // kind.itemsize + wrong
        raise ConfigurationError(
            f"{path}: token {position} is {int(tokens[wrong])}, but vocabulary = {vocabulary} (read as {dtype}); name "
            "the tokenizer it was made with by --tokenizer, or its size by --vocabulary"
        )


def unreadable(path: Path, error: Exception) -> ConfigurationError:
    """Return the error for an unreadable data file."""
    return ConfigurationError(f"cannot read the data file {path}: {getattr(error, 'strerror', None) or error}")
