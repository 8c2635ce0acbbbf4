"""The data files of a run, their kind, which follows from names, and the texts in them; nothing is downloaded."""

import codecs
import gzip
import importlib
import io
import os
import re
import stat
import sysconfig
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from quantshard import foreign
from quantshard.checkpoints.disk.store import open_regular
from quantshard.errors import ConfigurationError, shown
from quantshard.tools.terminal import screen

LINE_BYTES = 32 << 20
"""Maximum bytes of a line of JSON, because a line is read whole. A document of this length is longer than any book."""

TEXT, JSONL, PARQUET, DATASET, RAW, SHARDS = "text", "JSON lines", "parquet", "dataset", "raw tokens", "token shards"

INDEX = "quantshard_tokens.json"

_SUFFIXES = {
    ".jsonl": JSONL, ".jsonl.gz": JSONL, ".jsonl.zst": JSONL, ".ndjson": JSONL, ".parquet": PARQUET, ".bin": RAW,
}  # fmt: skip

_SAVED = ("state.json", "dataset_dict.json")
_ABOUT = ("readme.md", "license", "license.md", "license.txt", "dataset_infos.json")
"""Files of a dataset repository that are not data."""

_SPLIT = re.compile(r"(?:^|[^a-z])(train|test|validation|valid|val|dev)(?:$|[^a-z])")
"""A split in the name of a file, such as data/train-00000-of-00002.parquet."""

_SPLITS = {"valid": "validation", "val": "validation", "dev": "validation"}
_LEFT_OUT = {"test", "tests", "idlelib", "site-packages", "dist-packages"}
"""Folders of Python's library that are left out of the default text."""

_PIECE = 1 << 20
_HEAD_BYTES = 1 << 16
_ROWS = 1000


class TextOptions(NamedTuple):
    """Location of texts: the key or column in JSON lines, parquet and datasets, and the split of a folder."""

    field: str = "text"
    split: str = "train"


@dataclass(frozen=True)
class Chat:
    """A row with `messages`, or with `prompt` and `completion`; `where` names it in messages to the user."""

    where: str
    row: dict[str, Any]

    def __len__(self) -> int:
        return len(str(self.row))


Text: TypeAlias = str | Chat

_CHAT_COLUMNS = (("messages",), ("prompt", "completion"))


@dataclass(frozen=True)
class DataSource:
    """The data at one path: kind, and files with their lengths, in order."""

    path: Path
    kind: str
    files: tuple[tuple[Path, int], ...]

    @property
    def size(self) -> int:
        return sum(size for _, size in self.files)


def find(paths: Sequence[str], data_format: str = "auto", split: str = "train") -> list[DataSource]:
    """Find the data at each path, in the given order. Without paths: the source of Python's standard library.

    A folder contributes every file below it, sorted, except hidden and empty files. With `data_format` "text", each
    file is a text.
    """
    if not paths:
        library = Path(sysconfig.get_paths()["stdlib"])
        relative_paths = (path.relative_to(library) for path in library.rglob("*.py"))
        scripts = [library / path for path in relative_paths if not _LEFT_OUT.intersection(path.parts)]
        return [_source(library, TEXT, sorted(scripts, key=Path.as_posix))]
    sources = [_at(Path(path).absolute(), data_format, split) for path in paths]
    for source in sources if data_format == "auto" else ():
        for file, _ in source.files if source.kind == TEXT else ():
            _check_text(file)
    return sources


def distinct(sources: list[DataSource]) -> list[DataSource]:
    """Return the sources, after checking that no two contain the same file."""
    counts = Counter(path for source in sources for path in ([file for file, _ in source.files] or [source.path]))
    for path in [path for path, count in counts.items() if count > 1]:
        raise ConfigurationError(f"{path} is named twice; name it once, or set shares with --data-weights")
    return sources


def joined(sources: Sequence[DataSource]) -> DataSource:
    first = sources[0]
    for other in sources[1:]:
        if other.kind != first.kind or other.kind == DATASET:
            raise ConfigurationError(f"{first.path} is {first.kind} and {other.path} {other.kind}; make shards of each")
    return DataSource(first.path, first.kind, tuple(file for source in sources for file in source.files))


def _at(path: Path, data_format: str, split: str) -> DataSource:
    if not os.path.isdir(path):
        return _source(path, _kind(path, data_format), [path])
    if data_format == "auto" and os.path.lexists(path / INDEX):
        return DataSource(path, SHARDS, ())
    files = _files_below(path)
    if data_format == "auto" and any(os.path.lexists(path / name) for name in _SAVED):
        return _source(path, DATASET, files)
    kinds = {file: _kind(file, data_format) for file in files if _length(file)}
    if set(kinds.values()) - {TEXT}:
        kinds = {file: kind for file, kind in kinds.items() if file.name.lower() not in _ABOUT}
    if len(set(kinds.values())) > 1:
        examples = {kind: file.relative_to(path) for file, kind in reversed(kinds.items())}
        mix = " and ".join(f"{kind} ({file})" for kind, file in sorted(examples.items()))
        raise ConfigurationError(f"{path} holds {mix}; name the files of one kind, or give --data-format text")
    kind = next(iter(kinds.values()), TEXT)
    return _source(path, kind, _of_split(path, list(kinds), split) if kind in (JSONL, PARQUET) else list(kinds))


def _of_split(folder: Path, files: list[Path], split: str) -> list[Path]:
    """Select the files of a split if all names contain a split, as in a copy of a dataset repository."""
    names = [_SPLIT.search(file.relative_to(folder).as_posix().lower()) for file in files]
    splits = [_SPLITS.get(name[1], name[1]) if name else "" for name in names]
    if "" in splits or len(set(splits)) < 2:
        return files
    selected = [file for file, name in zip(files, splits, strict=True) if name == _SPLITS.get(split, split)]
    if not selected:
        raise _no_split(folder, split, sorted(set(splits)))
    screen.say(f"{folder}: reading the split {split}, {len(selected)} of {len(files)} files")
    return selected


def _no_split(path: Path, split: str, splits: Iterable[str]) -> ConfigurationError:
    return ConfigurationError(f"{path} has no split {split!r}, only {', '.join(splits)}; name one with --data-split")


def _source(path: Path, kind: str, files: Iterable[Path]) -> DataSource:
    sizes = tuple((file, size) for file in files if (size := _length(file)))
    if not sizes:
        raise ConfigurationError(f"there is no text in {path}")
    return DataSource(path, kind, sizes)


def _kind(path: Path, data_format: str) -> str:
    suffixes = _SUFFIXES if data_format == "auto" else {}
    return next((kind for suffix, kind in suffixes.items() if path.name.lower().endswith(suffix)), TEXT)


def _length(path: Path) -> int:
    try:
        status = path.stat()
    except FileNotFoundError:
        raise ConfigurationError(f"there is no data file or folder {path}") from None
    except (OSError, ValueError) as error:
        raise unreadable(path, error) from None
    if not stat.S_ISREG(status.st_mode):
        raise ConfigurationError(f"the data file {path} is no regular file")
    return status.st_size


def _files_below(folder: Path) -> list[Path]:
    paths = []

    def stop(error: OSError) -> None:
        raise unreadable(Path(error.filename or folder), error)

    for root, folders, names in os.walk(folder, onerror=stop):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for link in filter(os.path.islink, (os.path.join(root, name) for name in folders)):
            warnings.warn(f"{link} is a link to a folder and not read; name the folder with --data", stacklevel=2)
        paths += [Path(root, name) for name in names if not name.startswith(".")]
    return sorted(paths, key=lambda path: path.relative_to(folder).as_posix())


def _check_text(path: Path) -> None:
    """Check that the start of a file is UTF-8, so that compressed or binary files are not trained on by mistake."""
    head = read_head(path, _HEAD_BYTES)
    try:
        # a character may continue after the head
        is_text = "\0" not in codecs.getincrementaldecoder("utf-8")().decode(head, final=len(head) < _HEAD_BYTES)
    except UnicodeDecodeError:
        is_text = False
    if not is_text:
        raise ConfigurationError(f"the data file {path} is no text in UTF-8; convert it, or give --data-format text")


def read_head(path: Path, size: int) -> bytes:
    with reading(path), open_regular(path, follow=True) as file:
        return file.read(size)


def unreadable(path: Path, error: Exception) -> ConfigurationError:
    reason = getattr(error, "strerror", None) or " ".join(str(error).split())[:200]
    return ConfigurationError(f"cannot read the data file {path}: {reason}")


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Convert errors of reading a data file to a `ConfigurationError`."""
    try:
        yield
    except OSError as error:
        raise unreadable(path, error) from None


def library(name: str, what: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        extra = name if name == "transformers" else "train"
        raise ConfigurationError(f"{what} needs the package {name}; run: pip install 'quantshard[{extra}]'") from None


def texts(source: DataSource, options: TextOptions) -> Iterator[tuple[Text, bool]]:
    """Yield texts, and whether a document ends after each. A text file is one document, in pieces; others are whole."""
    for path, _ in source.files if source.kind in (TEXT, JSONL) else [(source.path, 0)]:
        try:
            if source.kind == TEXT:
                yield from _pieces(path)
            elif source.kind == JSONL:
                yield from ((text, True) for text in _lines(path, options.field) if text)
            else:
                yield from ((text, True) for text in _rows(source, options) if text)
        except (ConfigurationError, KeyboardInterrupt):
            raise
        except UnicodeDecodeError:
            raise ConfigurationError(f"{path} is not UTF-8; convert it, or read bytes by --data-format text") from None
        # the libraries raise errors of any type
        except Exception as error:
            raise unreadable(path, error) from None


def _pieces(path: Path) -> Iterator[tuple[str, bool]]:
    with io.TextIOWrapper(open_regular(path, follow=True), encoding="utf-8-sig", newline="") as file:
        piece = file.read(_PIECE)
        while piece:
            piece += file.readline(_PIECE)
            following = file.read(_PIECE)
            yield piece, not following
            piece = following


def _lines(path: Path, field: str) -> Iterator[Text]:
    # `datasets` cannot read lines whose other keys differ
    with open_regular(path, follow=True) as packed:
        file: Any = packed
        if path.suffix.lower() == ".gz":
            file = gzip.GzipFile(fileobj=packed)
        elif path.suffix.lower() == ".zst":
            arrow = library("pyarrow", f"the packed file {path}")
            file = io.BufferedReader(arrow.CompressedInputStream(arrow.PythonFile(packed), "zstd"))
        for number, line in enumerate(iter(lambda: file.readline(LINE_BYTES + 1), b""), 1):
            where = f"{path}, line {number}"
            if len(line) > LINE_BYTES:
                raise ConfigurationError(f"{where} has more than {LINE_BYTES} bytes")
            if line.strip():
                record = foreign.json_object(line.removeprefix(codecs.BOM_UTF8), where)
                yield _text(record, where, field, _columns(record, where, field))


def _rows(source: DataSource, options: TextOptions) -> Iterator[Text]:
    """Yield the texts of parquet files or of a dataset that `save_to_disk` saved."""
    datasets = library("datasets", f"the {source.kind} in {source.path}")
    with foreign.hub_offline():
        if source.kind == PARQUET:
            files = [str(path) for path, _ in source.files]
            data = datasets.load_dataset("parquet", data_files=files, split="train", streaming=True)
        else:
            data = datasets.load_from_disk(str(source.path))
        if isinstance(data, dict):
            if options.split not in data:
                raise _no_split(source.path, options.split, map(shown, list(data)[:8]))
            data = data[options.split]
        columns = _columns(data.column_names, str(source.path), options.field)
        # other columns, such as images, are not decoded
        batches = data.select_columns(list(columns)).iter(_ROWS)
        rows = chain.from_iterable(zip(*(batch[name] for name in columns), strict=True) for batch in batches)
        for number, row in enumerate(rows):
            record = dict(zip(columns, row, strict=True))
            yield _text(record, f"{source.path}, row {number}", options.field, columns)


def _columns(names: Iterable[str], where: str, field: str) -> tuple[str, ...]:
    """Choose the columns to read: the text, or those of a chat."""
    names = list(names)
    columns = next((columns for columns in ((field,), *_CHAT_COLUMNS) if set(columns) <= set(names)), None)
    if columns is None:
        raise ConfigurationError(f"{where} has no {field!r}, only {', '.join(map(shown, names[:8]))}; see --text-field")
    return columns


def _text(record: dict[str, Any], where: str, field: str, columns: tuple[str, ...]) -> Text:
    value = record[columns[0]]
    if len(columns) > 1 or columns == _CHAT_COLUMNS[0]:
        return Chat(where, {name: record[name] for name in columns})
    if not isinstance(value, str):
        kind = "null" if value is None else shown(value)
        raise ConfigurationError(f"{where}: {field!r} is {kind}, and must be a text; remove the row")
    # halves of surrogate pairs, which no encoding has
    return value.encode("utf-8", "replace").decode("utf-8")
