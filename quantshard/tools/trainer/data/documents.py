"""The corpus that a run learns from: documents of bytes, or of tokens, with what `config.toml` records of them.

A document of text is a file: its tokens are its bytes, and an END_OF_DOCUMENT follows. A file of tokens holds whole
numbers one after the other, ends of documents among them. The documents of a source, one after the other, are its
stream.

Only the list of documents is held in memory; windows are read from the files. The list has a SHA-256 of each document,
and of the whole: the digest of the lines "<sha256> <size>", one a document. `resume` compares them.

A run that is resumed may come from somebody else, and name any file as its data. So lengths are compared before a file
is read, nothing is trained on whose SHA-256 is not the one in the run's `config.toml`, and what was read for the
comparison is not told: of a file it says at most whether it is the one that the writer of the run had.
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
"""How token files store a token, little endian."""

CHUNK_BYTES = 1 << 20
_LOOKED_AT = 1 << 16
_PACKED = {b"\x1f\x8b": "gzip", b"(\xb5/\xfd": "zstd", b"PK\x03\x04": "zip", b"BZh": "bzip2", b"\xfd7zXZ": "xz"}
"""What files of packers begin with."""

_ENTRY = re.compile(r"([0-9a-f]{64}) ([0-9]{1,18}) (?:(uint16|uint32|text)\+([0-9]{1,6}) )?(/[^\0]*)", re.DOTALL)
_SOURCE = re.compile(r"([0-9]{1,9}) files?, weight ([0-9.e+-]{1,30})")


def token_dtype(vocabulary: int) -> str:
    """How tokens of a vocabulary are stored: by two bytes where these are enough."""
    return "uint16" if vocabulary <= 1 << 16 else "uint32"


@dataclass(frozen=True)
class Document:
    """One file: where it is, its size in bytes, and their SHA-256.

    `dtype`: one of `TOKEN_DTYPES`; "" of a text. `header`: bytes before the first token, such as a byte order mark.
    """

    path: Path
    size: int
    sha256: str
    dtype: str = ""
    header: int = 0

    @property
    def stored(self) -> int:
        """Tokens that the file holds; the end of a text is not among them."""
        return (self.size - self.header) // (TOKEN_DTYPES[self.dtype].itemsize if self.dtype else 1)

    @property
    def tokens(self) -> int:
        """Tokens of the stream."""
        return self.stored + (not self.dtype)

    @property
    def line(self) -> str:
        """What identifies it, its name apart."""
        return f"{self.sha256} {self.size}" + (
            f" {self.dtype or 'text'}+{self.header}" if self.dtype or self.header else ""
        )


def _more(found: Sequence[object]) -> str:
    return f" (as {len(found) - 1} more)" if len(found) > 1 else ""


@dataclass(frozen=True)
class Corpus:
    """All documents, in order: those of each source, then those that are held out.

    `counts`, `weights`: documents of each source, and its share of the windows, where there are weights; else one
    stream is made of all. `heldout_files`: how many of the last documents are only evaluated on. `tokenizer`: its
    digest; "" where tokens are bytes, or nobody said whose they are. `vocabulary`: tokens are below it.
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
        """Whether tokens are bytes, and their end of a document."""
        return not self.tokenizer and self.end_of_document == END_OF_DOCUMENT

    @cached_property
    def sources(self) -> list[tuple[Document, ...]]:
        """The documents of each source that is trained on."""
        trained = self.documents[: len(self.documents) - self.heldout_files]
        if not self.weights:
            return [trained]
        ends = np.cumsum(self.counts).tolist()
        return [trained[end - count : end] for end, count in zip(ends, self.counts, strict=True)]

    @property
    def heldout(self) -> tuple[Document, ...]:
        """The documents that are only evaluated on."""
        return self.documents[len(self.documents) - self.heldout_files :]

    def repeated(self) -> list[str]:
        """Lines on documents that are evaluated on though they are trained on, and on files that are read twice."""
        trained = self.documents[: len(self.documents) - self.heldout_files]
        by_content = {document.line: document.path for document in trained if document.size}
        both = [(each.path, by_content[each.line]) for each in self.heldout if each.line in by_content]
        twice = [path for path, count in Counter(document.path for document in trained).items() if count > 1]
        found = []
        if both:
            found.append(
                f"WARNING: {both[0][0]} is evaluated on and trained on{_more(both)}: it has the contents of "
                f"{both[0][1]}, so held-out losses do not tell how well the model does on other texts"
            )
        if twice:
            found.append(f"WARNING: {twice[0]} is named twice by --data{_more(twice)}, so it is trained on twice")
        return found

    @property
    def tokens(self) -> int:
        """Tokens of all documents."""
        return sum(document.tokens for document in self.documents)

    @property
    def sha256(self) -> str:
        """Digest of the whole: of sizes and contents, not of names."""
        lines = "".join(f"{document.line}\n" for document in self.documents)
        return hashlib.sha256(lines.encode("ascii")).hexdigest()

    def table(self) -> dict[str, Any]:
        """What `config.toml` records."""
        found: dict[str, Any] = {
            "sha256": self.sha256,
            "bytes": sum(document.size for document in self.documents),
            "files": [f"{document.line} {document.path}" for document in self.documents],
        }
        if self.weights:
            found["sources"] = [
                f"{count} files, weight {weight!r}" for count, weight in zip(self.counts, self.weights, strict=True)
            ]
        if self.heldout_files:
            found["heldout_files"] = self.heldout_files
        if (self.tokenizer, self.vocabulary, self.end_of_document) != ("", VOCABULARY, END_OF_DOCUMENT):
            found["vocabulary"], found["end_of_document"] = self.vocabulary, self.end_of_document
        if self.tokenizer:
            found["tokenizer"] = self.tokenizer
        return found


def from_table(recorded: Mapping[str, Any]) -> Corpus:
    """The corpus that a table of `config.toml` describes, without reading the files again.

    Raises:
        ConfigurationError: it describes none.
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
    """See that texts have tokens enough, and an end of a document is a token.

    Raises:
        ConfigurationError: with the numbers.
    """
    of_bytes = any(not document.dtype for document in corpus.documents)
    if of_bytes and (corpus.vocabulary < VOCABULARY or corpus.end_of_document != END_OF_DOCUMENT):
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
    found = _ENTRY.fullmatch(entry)
    if found is None:
        raise ConfigurationError(f"config.toml: {shown_value(entry)} in [corpus] is not a SHA-256, a length and a path")
    dtype = "" if found[3] == "text" else found[3] or ""
    document = Document(Path(found[5]), int(found[2]), found[1], dtype, int(found[4] or 0))
    if document.size < document.header or not _is_even(document):
        raise ConfigurationError(f"config.toml: {shown_value(entry)} in [corpus] is of no whole number of tokens")
    return document


def _is_even(document: Document) -> bool:
    return not document.dtype or (document.size - document.header) % TOKEN_DTYPES[document.dtype].itemsize == 0


def _source(entry: str) -> tuple[int, float]:
    found = _SOURCE.fullmatch(entry)
    try:
        count, weight = (int(found[1]), float(found[2])) if found else (0, 0.0)
    except ValueError:
        count, weight = 0, 0.0
    if count < 1 or not (0 < weight <= 1 and math.isfinite(weight)):
        raise ConfigurationError(
            f"config.toml: {shown_value(entry)} in [corpus] is not a number of files and a weight of more than 0"
        )
    return count, weight


def read_document(path: Path, size: int, dtype: str = "", header: int = 0, vocabulary: int = 0) -> Document:
    """Read a file whole, for its digest; of tokens, see that each is below `vocabulary` (0: whatever they are).

    Raises:
        ConfigurationError: it cannot be read, changes, or holds a token that is not one, at which position.
    """
    digest, left = hashlib.sha256(), size
    limit = vocabulary if dtype else 0
    try:
        with open_regular(path, follow=True) as file:
            while left and (content := file.read(min(left, CHUNK_BYTES))):
                digest.update(content)
                if limit:
                    _check_tokens(path, content, size - left, dtype, header, limit)
                left -= len(content)
            changed = bool(left or file.read(1))
    except OSError as error:
        raise unreadable(path, error) from None
    if changed:
        raise ConfigurationError(f"the data file {path} changed while it was read; try again when nothing writes to it")
    return Document(path, size, digest.hexdigest(), dtype, header)


def byte_order_mark(path: Path) -> int:
    """The length of the byte order mark that a text file begins with, or 0.

    Raises:
        ConfigurationError: the file cannot be read.
    """
    try:
        with open_regular(path, follow=True) as file:
            return len(codecs.BOM_UTF8) if file.read(len(codecs.BOM_UTF8)) == codecs.BOM_UTF8 else 0
    except OSError as error:
        raise unreadable(path, error) from None


def check_text(path: Path) -> None:
    """See that a file looks like text in UTF-8, by its first bytes: what is packed, or made for a program, would be
    trained on byte by byte.

    Raises:
        ConfigurationError: it does not, or cannot be read.
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
    """`at`: where the content begins in the file; a multiple of the width of a token, as the header is."""
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
    """The error that says why a file of the data cannot be read."""
    return ConfigurationError(f"cannot read the data file {path}: {getattr(error, 'strerror', None) or error}")
