"""The corpus of a run: documents of bytes or tokens, read, described in `config.toml`, and compared at a resume.

A text document is a file: its tokens are its bytes, followed by END_OF_DOCUMENT. A token file contains integers,
including ends of documents. The stream of a source is the concatenation of its documents. Only the list of documents is
in memory; windows are read from the files.

A resumed run is untrusted and could name any file as its data. Lengths are therefore compared before a file is read,
and a file is trained on only if its SHA-256 matches `config.toml`.
"""

import codecs
import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np

from quantshard.checkpoints.disk.store import open_regular
from quantshard.errors import ConfigurationError, shown
from quantshard.tools.terminal import screen
from quantshard.tools.trainer.data import shards
from quantshard.tools.trainer.data.packing import MASKED, TOKEN
from quantshard.tools.trainer.data.sources import (
    INDEX,
    RAW,
    SHARDS,
    TEXT,
    DataSource,
    TextOptions,
    distinct,
    find,
    read_head,
    reading,
)
from quantshard.tools.trainer.data.tokenizer import (
    BYTES_DIGEST,
    END_OF_DOCUMENT,
    VOCABULARY,
    Tokenizer,
    end_text,
    load_tokenizer,
)
from quantshard.tools.trainer.settings.config import TrainSettings
from quantshard.tools.trainer.settings.values import BEST_FIT, STREAM

_MULTIPLE = 128
"""Multiple for the vocabulary of built-in models. cuBLAS multiplies by a head of 50257 rows in kernels that read one
element at a time: 125 TFLOP/s on an H200, where large BF16 products reach 790 (benchmarks/RESULTS.md)."""

_RESTORE = "restore it, or name the unchanged files with --data"

_ENTRY = re.compile(r"([0-9a-f]{64}) ([0-9]{1,18}) (?:(uint16|uint32|masked|text)\+([0-9]{1,6}) )?(/[^\0]*)", re.DOTALL)
_SOURCE = re.compile(r"([1-9][0-9]{0,8}) files?, weight ([0-9]{1,20}(?:\.[0-9]{1,20})?(?:e-[0-9]{1,3})?)")


@dataclass(frozen=True)
class Document:
    """One file. `dtype`: one of `TOKEN_DTYPES`; "" for text. `header`: bytes before the data, as a byte order mark."""

    path: Path
    size: int
    sha256: str
    dtype: str = ""
    header: int = 0

    @property
    def itemsize(self) -> int:
        return shards.TOKEN_DTYPES[self.dtype].itemsize if self.dtype else 1

    @property
    def stored(self) -> int:
        """Number of tokens in the file; excludes the end of a text document."""
        return (self.size - self.header) // self.itemsize

    @property
    def tokens(self) -> int:
        return self.stored + (not self.dtype)

    @property
    def line(self) -> str:
        """Identity of the document, without its name."""
        layout = f" {self.dtype or 'text'}+{self.header}" if self.dtype or self.header else ""
        return f"{self.sha256} {self.size}{layout}"


@dataclass(frozen=True)
class Corpus:
    """All documents, in order: the documents of each source, then the held-out ones.

    Args:
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

    @cached_property
    def sources(self) -> list[tuple[Document, ...]]:
        trained = self.documents[: len(self.documents) - self.heldout_files]
        if not self.weights:
            return [trained]
        ends = np.cumsum(self.counts).tolist()
        return [trained[end - count : end] for end, count in zip(ends, self.counts, strict=True)]

    @property
    def is_masked(self) -> bool:
        return any(document.dtype == MASKED for document in self.documents)

    @property
    def heldout(self) -> tuple[Document, ...]:
        return self.documents[len(self.documents) - self.heldout_files :]

    def leaks(self) -> str:
        """Return a warning if a document is both trained and evaluated on; otherwise an empty text."""
        trained = {document.line: document.path for source in self.sources for document in source if document.size}
        leaked = next((document for document in self.heldout if document.line in trained), None)
        if leaked is None:
            return ""
        return f"WARNING: {leaked.path} is evaluated on and trained on: {trained[leaked.line]} has the same contents"

    @property
    def tokens(self) -> int:
        return sum(document.tokens for document in self.documents)

    @property
    def sha256(self) -> str:
        """Digest of sizes and contents of all documents, without names."""
        lines = "".join(f"{document.line}\n" for document in self.documents)
        return hashlib.sha256(lines.encode("ascii")).hexdigest()

    def table(self) -> dict[str, Any]:
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
    names = ("heldout_files", "tokenizer", "vocabulary", "end_of_document")
    values = {name: recorded[name] for name in names if name in recorded}
    corpus = Corpus(documents, tuple(count for count, _ in sources), tuple(weight for _, weight in sources), **values)
    trained = len(documents) - corpus.heldout_files
    if corpus.sha256 != recorded["sha256"] or trained < 1 or (sources and sum(corpus.counts) != trained):
        raise ConfigurationError("config.toml: [corpus] contradicts itself; restore the file")
    check_vocabulary(corpus)
    return corpus


def check_vocabulary(corpus: Corpus) -> None:
    """Check that the vocabulary covers bytes (if there are texts) and the end of a document."""
    has_texts = any(not document.dtype for document in corpus.documents)
    if has_texts and (corpus.vocabulary < VOCABULARY or corpus.end_of_document != END_OF_DOCUMENT):
        raise ConfigurationError(f"vocabulary = {corpus.vocabulary}, but bytes have {VOCABULARY} tokens; leave it out")
    if not 0 <= corpus.end_of_document < corpus.vocabulary:
        raise ConfigurationError(f"vocabulary = {corpus.vocabulary} lacks end_of_document = {corpus.end_of_document}")


def _entry(entry: str) -> Document:
    match = _ENTRY.fullmatch(entry)
    if match is None:
        raise ConfigurationError(f"config.toml: {shown(entry)} in [corpus] is not a SHA-256, a length and a path")
    dtype = "" if match[3] == "text" else match[3] or ""
    document = Document(Path(match[5]), int(match[2]), match[1], dtype, int(match[4] or 0))
    if document.size < document.header or (document.size - document.header) % document.itemsize:
        raise ConfigurationError(f"config.toml: {shown(entry)} in [corpus] is of no whole number of tokens")
    return document


def _source(entry: str) -> tuple[int, float]:
    match = _SOURCE.fullmatch(entry)
    if match is None or not 0 < float(match[2]) <= 1:
        raise ConfigurationError(f"config.toml: {shown(entry)} in [corpus] is not a number of files and a weight")
    return int(match[1]), float(match[2])


def collect(
    paths: Sequence[str], heldout: Sequence[str] = (), *, like: Corpus | None = None, data_format: str = "auto"
) -> Corpus:
    """Read the documents at these paths. `like`: a corpus with the weights and token properties; default: bytes."""
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


def collect_recorded(paths: Sequence[str], recorded: Corpus, heldout: Sequence[str] = ()) -> Corpus:
    """Read the documents at `paths`, and check lengths, then contents: they must be those of the run's start."""
    data_format = "auto" if any(document.dtype for document in recorded.documents) else "text"
    sources = [*find(paths, data_format), *(find(heldout, data_format) if heldout else ())]
    unread = [document for source in sources for document in _unread(source, recorded.vocabulary)]
    for document, old in zip_longest(unread, recorded.documents):
        if document is None or old is None:
            change = f"{old.path} is missing" if document is None else f"{document.path} was not there at the start"
            raise ConfigurationError(f"the data have changed: {change}; {_RESTORE}")
        if document.size != old.size:
            raise _changed(document.path, old, "length")
    documents = []
    for document, old in zip(unread, recorded.documents, strict=True):
        documents.append(_read(replace(document, sha256="", dtype=old.dtype, header=old.header), recorded.vocabulary))
        if documents[-1].sha256 != old.sha256:
            raise _changed(document.path, old, "content")
    return replace(recorded, documents=tuple(documents))


def _unread(source: DataSource, vocabulary: int, data_format: str = "") -> list[Document]:
    """List the documents of a source, with SHA-256 only from an index. `data_format`: "" reads no headers."""
    if source.kind == SHARDS:
        index = shards.read_index(source.path)
        documents = [
            Document(path, size, shard.sha256, index.dtype)
            for shard, (path, size) in zip(index.shards, index.sizes(source.path), strict=True)
            if size
        ]
        if not documents:
            raise ConfigurationError(f"there are no tokens in {source.path}")
        return documents
    if source.kind == TEXT and data_format == "auto":
        mark = codecs.BOM_UTF8
        headers = {path: len(mark) if read_head(path, len(mark)) == mark else 0 for path, _ in source.files}
        return [Document(path, size, sha256="", header=headers[path]) for path, size in source.files]
    if source.kind == RAW and data_format:
        dtype = shards.token_dtype(vocabulary)
        return [Document(path, size, "", *shards.raw_layout(path, size, dtype)) for path, size in source.files]
    return [Document(path, size, "") for path, size in source.files]


def _read(document: Document, vocabulary: int) -> Document:
    """Read a whole file for its digest, and check that each token is in the vocabulary."""
    path, digest, kind = document.path, hashlib.sha256(), shards.TOKEN_DTYPES.get(document.dtype)
    with reading(path), open_regular(path, follow=True) as file:
        digest.update(file.read(document.header))
        while content := file.read(1 << 20):
            digest.update(content)
            if kind is None:
                continue
            ids = np.frombuffer(content, kind)
            if (largest := int((ids & TOKEN if document.dtype == MASKED else ids).max())) >= vocabulary:
                raise ConfigurationError(
                    f"{path} has the token {largest}, but vocabulary = {vocabulary} (read as {document.dtype}); "
                    "name the right --tokenizer or --vocabulary"
                )
    if document.sha256 not in ("", digest.hexdigest()):
        raise ConfigurationError(f"{path}: its SHA-256 is not the one in {INDEX}; make the shards again")
    return replace(document, sha256=digest.hexdigest())


def _changed(path: Path, before: Document, what: str) -> ConfigurationError:
    return ConfigurationError(
        f"the data have changed: {path} is not the {before.path} that the run was started with ({before.size} bytes, "
        f"SHA-256 {before.sha256[:12]}...), its {what} is another; {_RESTORE}"
    )


class Preparation:
    """The data of a new run. `settings`: with values of the tokenizer. `described`: corpus without documents."""

    def __init__(self, settings: TrainSettings) -> None:
        options = (settings.data_format, settings.data_split)
        self._sources = distinct(find(settings.data, *options))
        self._heldout = find(settings.heldout_data, *options) if settings.heldout_data else []
        self._tokenizer, path, tokens = _checked_tokenizer(settings, [*self._sources, *self._heldout])
        vocabulary = settings.vocabulary
        # 0 for bytes: the default
        if not vocabulary and (self._tokenizer is None or path):
            # padded if that is faster; existing weights are not
            pads = settings.is_by_sizes and not settings.init_from
            vocabulary = -(-tokens.vocabulary // _MULTIPLE) * _MULTIPLE if pads else tokens.vocabulary
        end = "" if self._tokenizer is None else end_text(self._tokenizer)
        packing = settings.packing
        if self._tokenizer is None and packing != STREAM:
            where = f"{self._sources[0].path}: the token that ends documents is unknown without --tokenizer"
            if packing == BEST_FIT:
                raise ConfigurationError(f"{where}; give it, or --packing stream")
            screen.say(f"{where}, so --packing is stream")
            packing = STREAM
        self.settings = replace(settings, tokenizer=path, end_of_document=end, vocabulary=vocabulary, packing=packing)
        weights, vocabulary = settings.weights, settings.vocabulary or tokens.vocabulary
        self.described = replace(tokens, weights=weights, vocabulary=vocabulary)

    def collected(self, folder: Path) -> tuple[TrainSettings, Corpus]:
        """Tokenize where necessary, by default into `folder`; return the settings to record and the corpus."""
        settings = self.settings
        cache = Path(settings.token_cache) if settings.token_cache else folder
        readable = [self._readable(source, cache) for source in self._sources]
        is_same = readable == [source.path for source in self._sources]
        data = settings.data if is_same else tuple(map(str, readable))
        heldout = tuple(str(self._readable(source, cache)) for source in self._heldout)
        # shards are not text
        data_format = settings.data_format if is_same else "auto"
        corpus = collect(data, heldout, like=self.described, data_format=data_format)
        return replace(settings, data=data, heldout_data=heldout, data_format=data_format), corpus

    def _readable(self, source: DataSource, cache: Path) -> Path:
        """Return the path that a run reads for a source: the source itself, or shards made from it."""
        settings = self.settings
        if source.kind in (RAW, SHARDS) or (source.kind == TEXT and not settings.tokenizer):
            return source.path
        assert self._tokenizer is not None, source
        options = TextOptions(settings.text_field, settings.data_split)
        sharded = shards.ShardedSource(source, self._tokenizer, settings.tokenizer, options)
        stem = re.sub(r"[^\w.-]", "_", source.path.name)[:80]
        folder = cache.absolute() / f"{stem}-{sharded.key[:16]}"
        index = sharded.write(folder)
        screen.say(f"{source.path}: {index.documents:,} documents, {index.tokens:,} tokens, in {folder}")
        return folder


def _checked_tokenizer(settings: TrainSettings, sources: Sequence[DataSource]) -> tuple[Tokenizer | None, str, Corpus]:
    """Return the tokenizer (None if unknown), the path of its files, and a corpus without documents."""
    indices = [(source.path, shards.read_index(source.path)) for source in sources if source.kind == SHARDS]
    tokenizer, path, tokens = _find_tokenizer(settings, sources, indices)
    for folder, index in indices:
        if index.tokenizer != (tokens.tokenizer or BYTES_DIGEST) or index.end_of_document != tokens.end_of_document:
            other = settings.tokenizer or indices[0][0]
            raise ConfigurationError(f"{folder} was tokenized otherwise than {other}; repeat quantshard tokenize")
    if settings.vocabulary and settings.vocabulary < tokens.vocabulary:
        raise ConfigurationError(f"vocabulary = {settings.vocabulary}, but the tokenizer has {tokens.vocabulary}")
    is_of_bytes = tokenizer is not None and not path
    if settings.init_from and is_of_bytes and settings.vocabulary not in (0, tokens.vocabulary):
        raise ConfigurationError(f"--init-from {settings.init_from} is not a model of bytes; name its --tokenizer")
    return tokenizer, path, tokens


def _find_tokenizer(
    settings: TrainSettings, sources: Sequence[DataSource], indices: Sequence[tuple[Path, shards.ShardIndex]]
) -> tuple[Tokenizer | None, str, Corpus]:
    """Return the tokenizer of the settings, else that of the shards, else unknown (raw tokens) or bytes."""
    path, end, digest = settings.tokenizer, settings.end_of_document, ""
    if not path and not end and indices and indices[0][1].tokenizer != BYTES_DIGEST:
        folder, index = indices[0]
        path, end, digest = str(folder / shards.TOKENIZER), index.end_text, index.tokenizer
        if Path(path).is_symlink():
            raise ConfigurationError(f"{path} is a link; name the tokenizer with --tokenizer")
    raw = [source.path for source in sources if source.kind == RAW]
    if path or end or indices or not raw:
        tokenizer = load_tokenizer(path, end, digest)
        digest = tokenizer.digest if path else ""
        return tokenizer, path, Corpus((), (), (), 0, digest, tokenizer.vocabulary, tokenizer.end_of_document)
    if not settings.vocabulary:
        raise ConfigurationError(f"{raw[0]} holds tokens; name their tokenizer with --tokenizer, or --vocabulary N")
    if len(raw) < len(sources):
        raise ConfigurationError(f"{raw[0]} holds tokens, and other data are texts; name the tokenizer of both")
    return None, "", Corpus((), vocabulary=settings.vocabulary, end_of_document=0)
