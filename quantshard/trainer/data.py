"""The text that a run learns from: documents of bytes, cut into windows in an order that no process count changes.

A document is a file. A token is a byte, or END_OF_DOCUMENT, which follows each document; all documents, one after the
other, are the stream. Its last part is held out: training windows lie wholly before the boundary, evaluated ones wholly
after it.

The windows of a step are a pure function of (seed, step, index in the global batch): each starts where the counter
generator says. A process computes the indices that are its share, so 1 and 4 processes see the same global batch, and
a resumed run goes on where it would have been.

Only the list of documents is held in memory; windows are read from the files. The list has a SHA-256 of each document,
and of the whole: the digest of the lines "<sha256> <size>", one a document. `resume` compares them.

A run that is resumed may come from somebody else, and name any file as its data. So lengths are compared before a file
is read, nothing is trained on whose SHA-256 is not the one in the run's `config.toml`, and what was read for the
comparison is not told: of a file it says at most whether it is the one that the writer of the run had.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
import sysconfig
import warnings
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quantshard import numerics
from quantshard.errors import ConfigurationError
from quantshard.foreign import open_regular
from quantshard.terminal import inputs
from quantshard.trainer.schema import shown_value

END_OF_DOCUMENT = 256
VOCABULARY = 257

_ORDER_STREAM = 0
_CHUNK_BYTES = 1 << 20
_ENTRY = re.compile(r"([0-9a-f]{64}) ([0-9]{1,18}) (/[^\0]*)", re.DOTALL)
_RESTORE = "restore it, or name the unchanged files with --data"
_LEFT_OUT = {"test", "tests", "idlelib", "site-packages", "dist-packages"}
"""Folders of Python's library that are not part of the default text: what is not its source, and tests."""


@dataclass(frozen=True)
class Document:
    """One file: where it is, its size in bytes, and their SHA-256."""

    path: Path
    size: int
    sha256: str


@dataclass(frozen=True)
class Corpus:
    """All documents, in order."""

    documents: tuple[Document, ...]

    @property
    def tokens(self) -> int:
        """Length of the stream."""
        return sum(document.size + 1 for document in self.documents)

    @property
    def sha256(self) -> str:
        """Digest of the whole: of sizes and contents, not of names."""
        lines = "".join(f"{document.sha256} {document.size}\n" for document in self.documents)
        return hashlib.sha256(lines.encode("ascii")).hexdigest()

    def table(self) -> dict[str, Any]:
        """What `config.toml` records."""
        return {
            "sha256": self.sha256,
            "bytes": sum(document.size for document in self.documents),
            "files": [f"{document.sha256} {document.size} {document.path}" for document in self.documents],
        }


def from_table(recorded: Mapping[str, Any]) -> Corpus:
    """The corpus that a table of `config.toml` describes, without reading the files again.

    Raises:
        ConfigurationError: it describes none.
    """
    documents = []
    for entry in recorded["files"]:
        found = _ENTRY.fullmatch(entry)
        if found is None:
            raise ConfigurationError(
                f"config.toml: {shown_value(entry)} in [corpus] is not a SHA-256, a length and a path"
            )
        documents.append(Document(Path(found[3]), int(found[2]), found[1]))
    corpus = Corpus(tuple(documents))
    if not documents or corpus.sha256 != recorded["sha256"]:
        raise ConfigurationError("config.toml: the sha256 in [corpus] is not that of its files; restore the file")
    return corpus


def collect(paths: Sequence[str]) -> Corpus:
    """The documents of files and folders, in the order given; of a folder: every file below it, sorted, hidden ones and
    empty ones apart. Without paths: the source text of Python's standard library.

    Raises:
        ConfigurationError: a path is missing or cannot be read, is no regular file, or there is no text at all.
    """
    return Corpus(tuple(_document(path, size) for path, size in _find(paths)))


def collect_recorded(paths: Sequence[str], recorded: Corpus, begun: Callable[[], None] = lambda: None) -> Corpus:
    """The documents of files and folders, which must be those that a run was started with. No file is read before the
    lengths of all are found to be right and `begun` is called, and none after one that differs.

    Raises:
        ConfigurationError: as `collect`, and naming the first document that differs.
    """
    found = _find(paths)
    _check_lengths(found, recorded)
    begun()
    documents = []
    for (path, size), before in zip(found, recorded.documents, strict=True):
        documents.append(_document(path, size))
        _check_document(documents[-1], before)
    return Corpus(tuple(documents))


def _check_lengths(found: Sequence[tuple[Path, int]], recorded: Corpus) -> None:
    then = recorded.documents
    for (path, size), before in zip(found, then, strict=False):
        if size != before.size:
            raise _changed(path, before, "length")
    if len(found) < len(then):
        raise ConfigurationError(f"the data have changed: {then[len(found)].path} is missing; {_RESTORE}")
    if len(found) > len(then):
        raise ConfigurationError(f"the data have changed: {found[len(then)][0]} was not there at the start; {_RESTORE}")


def _check_document(now: Document, before: Document) -> None:
    if now.size != before.size:
        raise _changed(now.path, before, "length")
    if now.sha256 != before.sha256:
        raise _changed(now.path, before, "content")


def _changed(path: Path, before: Document, what: str) -> ConfigurationError:
    return ConfigurationError(
        f"the data have changed: {path} is not the {before.path} that the run was started with ({before.size} bytes, "
        f"SHA-256 {before.sha256[:12]}...), its {what} is another; {_RESTORE}"
    )


def _find(paths: Sequence[str]) -> list[tuple[Path, int]]:
    """The files that are the documents, and their lengths; none is read."""
    found = []
    for path in [Path(p).absolute() for p in paths]:
        if os.path.isdir(path):
            found += [(file, size) for file in _files_below(path) if (size := _length(file))]
        elif size := _length(path):
            found.append((path, size))
        else:
            raise ConfigurationError(
                f"there is no text in {path}: the file is empty, or has no length as those in /proc"
            )
    if not paths:
        library = Path(sysconfig.get_paths()["stdlib"])
        found = [(file, size) for file in _library_sources(library) if (size := _length(file))]
    if not found:
        raise ConfigurationError(f"there is no text in {', '.join(paths) or 'the standard library'}")
    return found


def _length(path: Path) -> int:
    """The length of a regular file, to which a link may lead."""
    try:
        str(path).encode("utf-8")
        found = path.stat()
    except FileNotFoundError:
        raise ConfigurationError(f"there is no data file or folder {path}{inputs.meant_path(path)}") from None
    except UnicodeEncodeError:
        raise ConfigurationError(
            f"the name of the data file {path} is not UTF-8, as the run's config.toml is, which lists it; rename it"
        ) from None
    except (OSError, ValueError) as error:
        raise _unreadable(path, error) from None
    if not stat.S_ISREG(found.st_mode):
        raise ConfigurationError(f"the data file {path} is no regular file but a pipe, a device or a socket")
    return found.st_size


def _files_below(folder: Path) -> list[Path]:
    found = []

    def stop(error: OSError) -> None:
        raise _unreadable(Path(error.filename or folder), error)

    for here, folders, names in os.walk(folder, onerror=stop):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in folders:
            if os.path.islink(os.path.join(here, name)):
                warnings.warn(
                    f"{os.path.join(here, name)} is a link to a folder, whose files are not read; name the folder with "
                    "--data if they are data",
                    stacklevel=2,
                )
        found += [Path(here, name) for name in names if not name.startswith(".")]
    return sorted(found, key=lambda path: path.relative_to(folder).as_posix())


def _library_sources(library: Path) -> list[Path]:
    below = (path.relative_to(library) for path in library.rglob("*.py"))
    kept = [path for path in below if not _LEFT_OUT.intersection(path.parts)]
    return [library / path for path in sorted(kept, key=Path.as_posix)]


def _document(path: Path, size: int) -> Document:
    digest, left = hashlib.sha256(), size
    try:
        with open_regular(path, follow=True) as file:
            while left and (content := file.read(min(left, _CHUNK_BYTES))):
                digest.update(content)
                left -= len(content)
            changed = bool(left or file.read(1))
    except OSError as error:
        raise _unreadable(path, error) from None
    if changed:
        raise ConfigurationError(f"the data file {path} changed while it was read; try again when nothing writes to it")
    return Document(path, size, digest.hexdigest())


def _unreadable(path: Path, error: Exception) -> ConfigurationError:
    return ConfigurationError(f"cannot read the data file {path}: {getattr(error, 'strerror', None) or error}")


class Windows:
    """Windows of seq_length + 1 tokens of a corpus: inputs, and the same moved by one as targets.

    Args:
        corpus: the documents.
        seq_length: tokens that the model reads at once.
        heldout: share of the stream, at its end, that is kept for evaluation; 0 keeps none.

    Raises:
        ConfigurationError: the text is too short.
    """

    def __init__(self, corpus: Corpus, seq_length: int, heldout: float) -> None:
        self.documents = corpus.documents
        self.width = seq_length + 1
        sizes = [document.size + 1 for document in corpus.documents]
        self._ends = list(accumulate(sizes))
        self.tokens = self._ends[-1]
        kept = max(self.width, round(self.tokens * heldout)) if heldout else 0
        self.boundary = self.tokens - kept
        if self.boundary < self.width:
            raise ConfigurationError(
                f"the text has {self.tokens} tokens, too few for seq_length = {seq_length} and {kept} held-out tokens; "
                "give more data, or a smaller seq_length or heldout"
            )

    def batch(self, seed: int, step: int, first: int, count: int) -> Tensor:
        """Windows `first` to `first + count` of the global batch of a step: int64 [count, seq_length + 1]."""
        places = self.boundary - self.width + 1
        words = numerics.random_words(seed, step, _ORDER_STREAM, (first + count, 2), (first, 0), (count, 2))
        starts = [(high << 32 | low) % places for low, high in words.tolist()]
        return torch.stack([self.window(start) for start in starts])

    def heldout(self, most: int) -> Tensor:
        """At most `most` windows, evenly spaced over the held-out part: int64 [n, seq_length + 1]."""
        room = self.tokens - self.boundary - self.width
        if room < 0:
            return torch.empty(0, self.width, dtype=torch.int64, device="cpu")
        count = min(most, room // self.width + 1)
        starts = [self.boundary + (room * i // (count - 1) if count > 1 else 0) for i in range(count)]
        return torch.stack([self.window(start) for start in starts])

    def window(self, start: int) -> Tensor:
        """Tokens [start, start + seq_length + 1) of the stream, int64."""
        pieces: list[Tensor] = []
        at, left = bisect_right(self._ends, start), self.width
        while left:
            document = self.documents[at]
            offset = start - (self._ends[at] - document.size - 1)
            length = min(left, document.size - offset)
            if length:
                pieces.append(_read(document, offset, length))
                left -= length
            if left:
                pieces.append(torch.tensor([END_OF_DOCUMENT], dtype=torch.int64, device="cpu"))
                left -= 1
            at, start = at + 1, self._ends[at]
        return torch.cat(pieces)


def _read(document: Document, offset: int, length: int) -> Tensor:
    try:
        with open_regular(document.path, follow=True) as file:
            file.seek(offset)
            content = file.read(length)
    except OSError as error:
        raise _unreadable(document.path, error) from None
    if len(content) != length:
        raise ConfigurationError(
            f"the data file {document.path} became shorter than the {document.size} bytes that the run was started with"
        )
    return torch.frombuffer(bytearray(content), dtype=torch.uint8).long()


def text(tokens: Iterable[int]) -> str:
    """Tokens as text to be shown: what is not printable, or not UTF-8, is replaced; an END_OF_DOCUMENT is a line."""
    out = bytearray()
    for token in tokens:
        out += b"\n<end of document>\n" if token == END_OF_DOCUMENT else bytes([token])
    decoded = out.decode("utf-8", errors="replace")
    return "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in decoded)
