"""Builds a corpus from files: reads them for their digests at the start of a run, and verifies them at a resume."""

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
    """A file of the data before it is read: path, size, dtype and header of its tokens, and SHA-256 from an index (""
    without one)."""

    path: Path
    size: int
    dtype: str = ""
    header: int = 0
    sha256: str = ""


def collect(
    paths: Sequence[str], heldout: Sequence[str] = (), *, like: Corpus | None = None, data_format: str = "auto"
) -> Corpus:
    """Read the documents of text and token files and folders, in the given order; see `finding.find`.

    `heldout`: paths for evaluation only. `like`: a corpus without documents that has the weights of the paths and the
    properties of the tokens; default: bytes.

    Raises:
        ConfigurationError: as `finding.find`; or a file cannot be read, or contains tokens out of range.
    """
    like = like or Corpus(())
    sources = [_layouts(source, like.vocabulary, data_format) for source in find(paths, data_format)]
    heldout_sources = (
        [_layouts(source, like.vocabulary, data_format) for source in find(heldout, data_format)] if heldout else []
    )
    documents = [_read(layout, like.vocabulary) for layouts in [*sources, *heldout_sources] for layout in layouts]
    corpus = replace(
        like,
        documents=tuple(documents),
        counts=tuple(map(len, sources)) if like.weights else (),
        heldout_files=sum(map(len, heldout_sources)),
    )
    check_vocabulary(corpus)
    return corpus


def collect_recorded(
    paths: Sequence[str], recorded: Corpus, begun: Callable[[], None] = lambda: None, heldout: Sequence[str] = ()
) -> Corpus:
    """Read the documents at `paths` and check that they are the ones that the run started with. Lengths of all
    documents are compared first, then `begun` is called, then contents are read up to the first difference.

    Raises:
        ConfigurationError: as `collect`, or naming the first document that differs.
    """
    data_format = "auto" if any(document.dtype for document in recorded.documents) else "text"
    sources = [*find(paths, data_format), *(find(heldout, data_format) if heldout else ())]
    layouts = [layout for source in sources for layout in _layouts(source, recorded.vocabulary)]
    _check_lengths(layouts, recorded)
    begun()
    documents = []
    for layout, old in zip(layouts, recorded.documents, strict=True):
        expected = FileLayout(layout.path, layout.size, old.dtype, old.header)
        documents.append(_read(expected, recorded.vocabulary))
        if documents[-1].sha256 != old.sha256:
            raise _changed(layout.path, old, "content")
    return replace(recorded, documents=tuple(documents))


def _layouts(source: DataSource, vocabulary: int, data_format: str = "") -> list[FileLayout]:
    """List the files of a source. With `data_format` "", files without an index are not opened to find their header."""
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
    documents = recorded.documents
    for layout, document in zip(found, documents, strict=False):
        if layout.size != document.size:
            raise _changed(layout.path, document, "length")
    if len(found) < len(documents):
        raise ConfigurationError(f"the data have changed: {documents[len(found)].path} is missing; {_RESTORE}")
    if len(found) > len(documents):
        raise ConfigurationError(
            f"the data have changed: {found[len(documents)].path} was not there at the start; {_RESTORE}"
        )


def _changed(path: Path, before: Document, what: str) -> ConfigurationError:
    return ConfigurationError(
        f"the data have changed: {path} is not the {before.path} that the run was started with ({before.size} bytes, "
        f"SHA-256 {before.sha256[:12]}...), its {what} is another; {_RESTORE}"
    )
