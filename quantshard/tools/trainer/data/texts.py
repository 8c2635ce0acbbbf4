"""The texts of a source, divided into parts of similar size; each part becomes a token shard.

The division depends only on the source's files and the part size, not on the number of processes. A part is a list of
pieces: whole text files, byte ranges of JSON lines, row groups of parquet, or rows of a saved dataset. Long texts are
read in chunks, which bounds memory.
"""

from __future__ import annotations

import gzip
import io
import json
import math
import zlib
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from quantshard import foreign
from quantshard.errors import ConfigurationError
from quantshard.foreign import open_regular, shown
from quantshard.read_limits import LINE_BYTES, UNPACKED_BYTES, UNPACKED_RATIO
from quantshard.tools.trainer.data.dataset_folders import check_column, open_dataset, reading_dataset
from quantshard.tools.trainer.data.documents import unreadable
from quantshard.tools.trainer.data.finding import DATASET, JSONL, PARQUET, TEXT, DataSource
from quantshard.tools.trainer.data.tokenizer import library

CHUNK_CHARACTERS = 1 << 20
"""The most characters of a text file in one chunk."""

OVERLAP = 1 << 12
"""Characters of its neighbours that a chunk repeats on each side."""

_ROWS = 1024


class Piece(NamedTuple):
    """A part of one file.

    `first`, `last`: range of bytes (JSON lines), row groups (parquet), rows (dataset) or shards (streamed dataset); the
    whole file for texts. `size`: approximate number of bytes.
    """

    file: str
    first: int
    last: int
    size: int


class Chunk(NamedTuple):
    """A document's text, or a part of it.

    Args:
        text: characters, including the overlaps.
        ends: whether the document ends here.
        before: number of characters at the start that belong to the previous chunks.
        after: number of characters at the end that belong to the next chunks.
    """

    text: str
    ends: bool
    before: int = 0
    after: int = 0


class TextOptions(NamedTuple):
    """Location of texts: the key or column in JSON lines, parquet and datasets, and the split of a dataset."""

    field: str = "text"
    split: str = "train"


def divide(source: DataSource, size: int, options: TextOptions) -> list[list[Piece]]:
    """Divide a source into parts of about `size` bytes each, in order.

    Raises:
        ConfigurationError: the source cannot be read, or lacks the column or split.
    """
    parts: list[list[Piece]] = []
    remaining = 0
    for piece in _pieces(source, size, options):
        if not parts or piece.size > remaining:
            parts.append([])
            remaining = size
        parts[-1].append(piece)
        remaining -= piece.size
    return parts


def _pieces(source: DataSource, size: int, options: TextOptions) -> Iterator[Piece]:
    if source.kind == DATASET:
        yield from _dataset_pieces(source, size, options)
        return
    for path, length in source.files:
        if source.kind == TEXT or _is_packed(path):
            yield Piece(str(path), 0, length, length)
        elif source.kind == JSONL:
            yield from (
                Piece(str(path), offset, min(offset + size, length), min(size, length - offset))
                for offset in range(0, length, size)
            )
        else:
            assert source.kind == PARQUET, source.kind
            with _parquet(path, options) as file:
                for group in range(file.num_row_groups):
                    yield Piece(str(path), group, group + 1, file.metadata.row_group(group).total_byte_size)


def chunks(kind: str, piece: Piece, options: TextOptions) -> Iterator[Chunk]:
    """Yield the texts of a piece; empty documents are skipped.

    Raises:
        ConfigurationError: the piece cannot be read, or a document has no text; the message names it.
    """
    reader = {TEXT: _text_chunks, JSONL: _line_chunks, PARQUET: _parquet_chunks, DATASET: _dataset_chunks}[kind]
    return reader(piece, options)


# Text files -----------------------------------------------------------------------------------------------------------


def _text_chunks(piece: Piece, options: TextOptions) -> Iterator[Chunk]:
    """Split a file, which is one document, into overlapping chunks, between lines if possible."""
    path, text, begin = Path(piece.file), "", 0
    try:
        with open_regular(path, follow=True) as file:
            characters = io.TextIOWrapper(file, encoding="utf-8-sig", newline="")
            while True:
                target = begin + CHUNK_CHARACTERS + OVERLAP
                while len(text) < target and (addition := characters.read(target - len(text))):
                    text += addition
                if len(text) <= begin + CHUNK_CHARACTERS:
                    break
                line_start = text.rfind("\n", begin, begin + CHUNK_CHARACTERS) + 1
                end = line_start or begin + CHUNK_CHARACTERS
                yield Chunk(text[: end + OVERLAP], False, begin, len(text[end : end + OVERLAP]))
                next_start = max(0, end - OVERLAP)
                text, begin = text[next_start:], end - next_start
    except UnicodeDecodeError:
        raise ConfigurationError(
            f"the data file {path} is not UTF-8, as a tokenizer's text must be; convert it, or train on its bytes, "
            "without --tokenizer and by --data-format text"
        ) from None
    except OSError as error:
        raise unreadable(path, error) from None
    yield Chunk(text, True, begin)


# JSON lines -----------------------------------------------------------------------------------------------------------


def _is_packed(path: Path) -> bool:
    return path.name.lower().endswith((".gz", ".zst"))


@contextmanager
def _opened_lines(path: Path) -> Iterator[BinaryIO]:
    """Open a file for reading bytes, decompressed if necessary."""
    with ExitStack() as stack:
        file: Any = stack.enter_context(open_regular(path, follow=True))
        if path.name.lower().endswith(".gz"):
            file = stack.enter_context(gzip.GzipFile(fileobj=file))
        elif path.name.lower().endswith(".zst"):
            arrow = library("pyarrow", f"the packed file {path}")
            file = io.BufferedReader(arrow.CompressedInputStream(arrow.PythonFile(file), "zstd"))
        yield file


def _line_chunks(piece: Piece, options: TextOptions) -> Iterator[Chunk]:
    """Yield the text under the key `options.field` from each line that starts in the piece."""
    path, is_packed = Path(piece.file), _is_packed(Path(piece.file))
    try:
        with _opened_lines(path) as file:
            offset, limit = piece.first, _most_bytes(path, is_packed)
            # a line that started in the previous piece belongs there
            if offset:
                file.seek(offset - 1)
                offset += len(_line(file, path, offset)) - 1
            while (is_packed or offset < piece.last) and (line := _line(file, path, offset)):
                if line.strip():
                    text = _field_of(line, f"{path}, byte {offset}", options.field)
                    if text:
                        yield Chunk(text, ends=True)
                offset += len(line)
                if offset > limit:
                    raise ConfigurationError(
                        f"{path} unpacks to more than {limit} bytes, {UNPACKED_RATIO} times its own; unpack it first"
                    )
    except (OSError, EOFError, ValueError, zlib.error) as error:
        if isinstance(error, ConfigurationError):
            raise
        raise unreadable(path, error) from None


def _most_bytes(path: Path, is_packed: bool) -> float:
    """Return the limit on bytes to read from a file."""
    return max(UNPACKED_BYTES, UNPACKED_RATIO * foreign.regular_size(path, follow=True)) if is_packed else math.inf


def _line(file: BinaryIO, path: Path, at: int) -> bytes:
    line = file.readline(LINE_BYTES + 1)
    if len(line) > LINE_BYTES:
        raise ConfigurationError(f"{path}: the line at byte {at} has more than {LINE_BYTES} bytes")
    return line


def _field_of(line: bytes, where: str, field: str) -> str:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigurationError(f"{where}: the line is not JSON: {str(error)[:200]}") from None
    if not isinstance(record, dict):
        raise ConfigurationError(f"{where}: the line is not a JSON object")
    if field not in record:
        keys = ", ".join(map(shown, list(record)[:8]))
        raise ConfigurationError(f"{where}: the object has no {field!r}, only {keys}; name the text with --text-field")
    return _checked_text(record[field], where, field)


def _checked_text(value: object, where: str, field: str) -> str:
    if not isinstance(value, str):
        raise ConfigurationError(
            f"{where}: {field!r} is {'null' if value is None else shown(value)}, and must be a text; remove the row"
        )
    return value


# Parquet --------------------------------------------------------------------------------------------------------------


@contextmanager
def _parquet(path: Path, options: TextOptions) -> Iterator[Any]:
    parquet = library("pyarrow.parquet", f"the data file {path}")
    try:
        with open_regular(path, follow=True) as stream, parquet.ParquetFile(stream) as file:
            check_column(file.schema_arrow.names, options.field, str(path))
            yield file
    # the types that pyarrow's errors derive from
    except (OSError, ValueError, NotImplementedError, KeyError) as error:
        if isinstance(error, ConfigurationError):
            raise
        raise ConfigurationError(f"cannot read the data file {path}: {' '.join(str(error).split())[:200]}") from None


def _parquet_chunks(piece: Piece, options: TextOptions) -> Iterator[Chunk]:
    with _parquet(Path(piece.file), options) as file:
        row = sum(file.metadata.row_group(group).num_rows for group in range(piece.first))
        for batch in file.iter_batches(_ROWS, list(range(piece.first, piece.last)), columns=[options.field]):
            yield from _column_chunks(batch.column(0).to_pylist(), piece.file, row, options.field)
            row += len(batch)


def _column_chunks(column: Iterable[Any], where: str, first_row: int, field: str) -> Iterator[Chunk]:
    for row, value in enumerate(column, first_row):
        if text := _checked_text(value, f"{where}, row {row}", field):
            yield Chunk(text, ends=True)


# Hugging Face datasets ------------------------------------------------------------------------------------------------


def _dataset_pieces(source: DataSource, size: int, options: TextOptions) -> Iterator[Piece]:
    data = open_dataset(source.path, options.split, options.field)
    if hasattr(data, "num_rows"):
        rows, num_bytes = data.num_rows, max(1, data.data.nbytes)
        step = max(1, rows * size // num_bytes)
        for first in range(0, rows, step):
            last = min(first + step, rows)
            yield Piece(str(source.path), first, last, num_bytes * (last - first) // rows)
    else:
        for number in range(data.num_shards):
            yield Piece(str(source.path), number, number + 1, size)


def _dataset_chunks(piece: Piece, options: TextOptions) -> Iterator[Chunk]:
    data, where = open_dataset(Path(piece.file), options.split, options.field), piece.file
    if hasattr(data, "num_rows"):
        batches = (data[first : min(first + _ROWS, piece.last)] for first in range(piece.first, piece.last, _ROWS))
        column = (value for rows in batches for value in rows[options.field])
        first_row = piece.first
    else:
        column = (row[options.field] for row in data.shard(data.num_shards, piece.first))
        first_row = 0
        if data.num_shards > 1:
            where = f"{where}, part {piece.first} of {data.num_shards}"
    with reading_dataset(piece.file):
        yield from _column_chunks(column, where, first_row, options.field)
