"""From files to a corpus: what is read for its digest when a run starts, and compared when it is resumed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from quantshard.errors import ConfigurationError
from quantshard.tools.trainer.data.documents import (
    Corpus,
    Document,
    byte_order_mark,
    check_vocabulary,
    read_document,
    token_dtype,
)
from quantshard.tools.trainer.data.finding import INDEX, RAW, SHARDS, TEXT, DataSource, find
from quantshard.tools.trainer.data.shards import raw_layout, read_index

_RESTORE = "restore it, or name the unchanged files with --data"


class FileLayout(NamedTuple):
    """A file of the data before it is read: where it is, its length, how tokens lie in it, and the SHA-256 that an
    index says; "" where none does."""

    path: Path
    size: int
    dtype: str = ""
    header: int = 0
    sha256: str = ""


def collect(
    paths: Sequence[str], heldout: Sequence[str] = (), *, like: Corpus | None = None, data_format: str = "auto"
) -> Corpus:
    """The documents of files and folders of text, and of token files, in the order given; see `finding.find`.

    `heldout`: those that are only evaluated on. `like`: a corpus without documents, with the weights of the paths and
    what is known of tokens; by default they are bytes.

    Raises:
        ConfigurationError: as `finding.find`; or a file cannot be read, or holds tokens that are none.
    """
    like = like or Corpus(())
    sources = [_layouts(source, like.vocabulary, data_format) for source in find(paths, data_format)]
    kept = [_layouts(source, like.vocabulary, data_format) for source in find(heldout, data_format)] if heldout else []
    documents = [_read(layout, like.vocabulary) for layouts in [*sources, *kept] for layout in layouts]
    corpus = replace(
        like,
        documents=tuple(documents),
        counts=tuple(map(len, sources)) if like.weights else (),
        heldout_files=sum(map(len, kept)),
    )
    check_vocabulary(corpus)
    return corpus


def collect_recorded(
    paths: Sequence[str], recorded: Corpus, begun: Callable[[], None] = lambda: None, heldout: Sequence[str] = ()
) -> Corpus:
    """The documents of files and folders, which must be those that a run was started with. No document is read before
    the lengths of all are found to be right and `begun` is called, and none after one that differs.

    Raises:
        ConfigurationError: as `collect`, and naming the first document that differs.
    """
    data_format = "auto" if any(document.dtype for document in recorded.documents) else "text"
    sources = [*find(paths, data_format), *(find(heldout, data_format) if heldout else ())]
    found = [layout for source in sources for layout in _layouts(source, recorded.vocabulary)]
    _check_lengths(found, recorded)
    begun()
    documents = []
    for layout, before in zip(found, recorded.documents, strict=True):
        as_before = FileLayout(layout.path, layout.size, before.dtype, before.header)
        documents.append(_read(as_before, recorded.vocabulary))
        if documents[-1].sha256 != before.sha256:
            raise _changed(layout.path, before, "content")
    return replace(recorded, documents=tuple(documents))


def _layouts(source: DataSource, vocabulary: int, data_format: str = "") -> list[FileLayout]:
    """The files of a source. Files without an index are not read for a header if `data_format` is ""."""
    if source.kind == SHARDS:
        index = read_index(source.path)
        digests = {source.path / shard.file: shard.sha256 for shard in index.shards}
        sizes = index.sizes(source.path)
        if not sizes:
            raise ConfigurationError(f"there are no tokens in {source.path}")
        return [FileLayout(path, size, index.dtype, 0, digests[path]) for path, size in sizes]
    if source.kind == TEXT and data_format == "auto":
        return [FileLayout(path, size, "", byte_order_mark(path)) for path, size in source.files]
    if source.kind == RAW and data_format:
        dtype = token_dtype(vocabulary)
        return [FileLayout(path, size, *raw_layout(path, size, dtype)) for path, size in source.files]
    return [FileLayout(path, size) for path, size in source.files]


def _read(layout: FileLayout, vocabulary: int) -> Document:
    document = read_document(layout.path, layout.size, layout.dtype, layout.header, vocabulary)
    if layout.sha256 not in ("", document.sha256):
        raise ConfigurationError(
            f"{layout.path} is not what {INDEX} beside it says: its SHA-256 is another; make the shards anew by "
            "quantshard tokenize"
        )
    return document


def _check_lengths(found: Sequence[FileLayout], recorded: Corpus) -> None:
    then = recorded.documents
    for layout, before in zip(found, then, strict=False):
        if layout.size != before.size:
            raise _changed(layout.path, before, "length")
    if len(found) < len(then):
        raise ConfigurationError(f"the data have changed: {then[len(found)].path} is missing; {_RESTORE}")
    if len(found) > len(then):
        raise ConfigurationError(
            f"the data have changed: {found[len(then)].path} was not there at the start; {_RESTORE}"
        )


def _changed(path: Path, before: Document, what: str) -> ConfigurationError:
    return ConfigurationError(
        f"the data have changed: {path} is not the {before.path} that the run was started with ({before.size} bytes, "
        f"SHA-256 {before.sha256[:12]}...), its {what} is another; {_RESTORE}"
    )
