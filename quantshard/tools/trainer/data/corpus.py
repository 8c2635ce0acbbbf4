"""The corpus of a run: documents of bytes or tokens, read, described in `config.toml`, and compared at a resume.

A text document is a file: its tokens are its bytes, followed by END_OF_DOCUMENT. A token file contains integers,
including ends of documents. The stream of a source is the concatenation of its documents. Only the list of documents is
in memory; windows are read from the files.

A resumed run is untrusted and could name any file as its data. Lengths are therefore compared before a file is read,
and a file is trained on only if its SHA-256 matches `config.toml`.
"""

from __future__ import annotations

import codecs
import hashlib
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from quantshard.errors import ConfigurationError
from quantshard.foreign import open_regular
from quantshard.tools.trainer.data.shards import TOKEN_DTYPES, raw_layout, read_index, token_dtype
from quantshard.tools.trainer.data.sources import INDEX, RAW, SHARDS, TEXT, DataSource, find, unreadable
from quantshard.tools.trainer.data.tokenizer import END_OF_DOCUMENT, VOCABULARY
from quantshard.tools.trainer.settings.schema import shown_value

_CHUNK_BYTES = 1 << 20
_RESTORE = "restore it, or name the unchanged files with --data"

_ENTRY = re.compile(r"([0-9a-f]{64}) ([0-9]{1,18}) (?:(uint16|uint32|text)\+([0-9]{1,6}) )?(/[^\0]*)", re.DOTALL)
_SOURCE = re.compile(r"([0-9]{1,9}) files?, weight ([0-9.e+-]{1,30})")


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

    def leaks(self) -> list[str]:
        """Return a warning if a document is both trained and evaluated on."""
        trained = self.documents[: len(self.documents) - self.heldout_files]
        paths = {document.line: document.path for document in trained if document.size}
        leaked = [document for document in self.heldout if document.line in paths]
        if not leaked:
            return []
        return [
            f"WARNING: {leaked[0].path}, and {len(leaked) - 1} more, is evaluated on and trained on: its contents are "
            f"those of {paths[leaked[0].line]}, so held-out losses say nothing about other texts"
        ]

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
    """Rebuild a corpus from its table in `config.toml`, without reading the files."""
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
    """Check that the vocabulary covers bytes (if there are texts) and the end of a document."""
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


# Reading --------------------------------------------------------------------------------------------------------------


def collect(
    paths: Sequence[str], heldout: Sequence[str] = (), *, like: Corpus | None = None, data_format: str = "auto"
) -> Corpus:
    """Read the documents of text and token files and folders, in the given order; see `sources.find`.

    `heldout`: paths for evaluation only. `like`: a corpus without documents that has the weights of the paths and the
    properties of the tokens; default: bytes.
    """
    like = like or Corpus(())
    sources = [_unread(source, like.vocabulary, data_format) for source in find(paths, data_format)]
    apart = [_unread(source, like.vocabulary, data_format) for source in find(heldout, data_format)] if heldout else []
    corpus = replace(
        like,
        documents=tuple(_read(document, like.vocabulary) for source in [*sources, *apart] for document in source),
        counts=tuple(map(len, sources)) if like.weights else (),
        heldout_files=sum(map(len, apart)),
    )
    check_vocabulary(corpus)
    return corpus


def collect_recorded(
    paths: Sequence[str], recorded: Corpus, begun: Callable[[], None] = lambda: None, heldout: Sequence[str] = ()
) -> Corpus:
    """Read the documents at `paths` and check that they are the ones that the run started with. Lengths of all
    documents are compared first, then `begun` is called, then contents are read up to the first difference.
    """
    data_format = "auto" if any(document.dtype for document in recorded.documents) else "text"
    sources = [*find(paths, data_format), *(find(heldout, data_format) if heldout else ())]
    unread = [document for source in sources for document in _unread(source, recorded.vocabulary)]
    for document, old in zip(unread, recorded.documents, strict=False):
        if document.size != old.size:
            raise _changed(document.path, old, "length")
    if len(unread) != len(recorded.documents):
        is_missing = len(unread) < len(recorded.documents)
        path = recorded.documents[len(unread)].path if is_missing else unread[len(recorded.documents)].path
        what = "is missing" if is_missing else "was not there at the start"
        raise ConfigurationError(f"the data have changed: {path} {what}; {_RESTORE}")
    begun()
    documents = []
    for document, old in zip(unread, recorded.documents, strict=True):
        documents.append(_read(replace(document, sha256="", dtype=old.dtype, header=old.header), recorded.vocabulary))
        if documents[-1].sha256 != old.sha256:
            raise _changed(document.path, old, "content")
    return replace(recorded, documents=tuple(documents))


def _unread(source: DataSource, vocabulary: int, data_format: str = "") -> list[Document]:
    """List the documents of a source; their SHA-256 is "" except in an index. With `data_format` "", files without an
    index are not opened to find their header."""
    if source.kind == SHARDS:
        index = read_index(source.path)
        documents = [
            Document(path, size, shard.sha256, index.dtype)
            for shard, (path, size) in zip(index.shards, index.sizes(source.path), strict=True)
            if size
        ]
        if not documents:
            raise ConfigurationError(f"there are no tokens in {source.path}")
        return documents
    if source.kind == TEXT and data_format == "auto":
        return [Document(path, size, "", "", _byte_order_mark(path)) for path, size in source.files]
    if source.kind == RAW and data_format:
        dtype = token_dtype(vocabulary)
        return [Document(path, size, "", *raw_layout(path, size, dtype)) for path, size in source.files]
    return [Document(path, size, "") for path, size in source.files]


def _read(document: Document, vocabulary: int) -> Document:
    """Read a whole file for its digest, and check that each token is in the vocabulary."""
    path, digest, remaining = document.path, hashlib.sha256(), document.size
    try:
        with open_regular(path, follow=True) as file:
            while remaining and (content := file.read(min(remaining, _CHUNK_BYTES))):
                digest.update(content)
                if document.dtype:
                    _check_tokens(document, content, document.size - remaining, vocabulary)
                remaining -= len(content)
            changed = bool(remaining or file.read(1))
    except OSError as error:
        raise unreadable(path, error) from None
    if changed:
        raise ConfigurationError(f"the data file {path} changed while it was read; try again when nothing writes to it")
    if document.sha256 not in ("", digest.hexdigest()):
        raise ConfigurationError(
            f"{path} is not what {INDEX} beside it says: its SHA-256 is another; make the shards anew by "
            "quantshard tokenize"
        )
    return replace(document, sha256=digest.hexdigest())


def _check_tokens(document: Document, content: bytes, at: int, vocabulary: int) -> None:
    """Check the tokens in a part of a file. `at`: offset of the part; like the header, a multiple of the token's
    width."""
    skipped = min(len(content), max(0, document.header - at))
    kind = TOKEN_DTYPES[document.dtype]
    tokens = np.frombuffer(content, kind, (len(content) - skipped) // kind.itemsize, skipped)
    if tokens.size and int(tokens.max()) >= vocabulary:
        wrong = int((tokens >= vocabulary).argmax())
        position = (at + skipped - document.header) // kind.itemsize + wrong
        raise ConfigurationError(
            f"{document.path}: token {position} is {int(tokens[wrong])}, but vocabulary = {vocabulary} (read as "
            f"{document.dtype}); name the tokenizer it was made with by --tokenizer, or its size by --vocabulary"
        )


def _byte_order_mark(path: Path) -> int:
    """Return the length of a text file's byte order mark, or 0."""
    try:
        with open_regular(path, follow=True) as file:
            return len(codecs.BOM_UTF8) if file.read(len(codecs.BOM_UTF8)) == codecs.BOM_UTF8 else 0
    except OSError as error:
        raise unreadable(path, error) from None


def _changed(path: Path, before: Document, what: str) -> ConfigurationError:
    return ConfigurationError(
        f"the data have changed: {path} is not the {before.path} that the run was started with ({before.size} bytes, "
        f"SHA-256 {before.sha256[:12]}...), its {what} is another; {_RESTORE}"
    )
