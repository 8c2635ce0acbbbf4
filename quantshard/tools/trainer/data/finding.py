"""Finds data files and their kind: texts, JSON lines, parquet, a saved Hugging Face dataset, or tokens.

The kind of a path follows from names, not from file contents. Only names and lengths are read here, except to check
whether a folder's README describes a dataset and whether a file starts like text.
"""

from __future__ import annotations

import os
import re
import stat
import sysconfig
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from quantshard.errors import ConfigurationError
from quantshard.foreign import open_regular
from quantshard.tools.terminal import inputs
from quantshard.tools.trainer.data.documents import check_text, unreadable

TEXT, JSONL, PARQUET, DATASET, RAW, SHARDS = "text", "JSON lines", "parquet", "dataset", "raw tokens", "token shards"
"""The kinds of sources."""

INDEX = "quantshard_tokens.json"
"""The file that marks a folder of token shards."""

JOURNAL = "quantshard_tokens.unfinished.jsonl"
"""The file in place of the index while shards are missing."""

FORMATS = ("auto", "text")
"""Valid values of `data_format`."""

_SUFFIXES = {
    ".jsonl": JSONL, ".jsonl.gz": JSONL, ".jsonl.zst": JSONL, ".ndjson": JSONL, ".parquet": PARQUET, ".bin": RAW,
}  # fmt: skip
_RECORDS = {".json", ".csv", ".tsv"}
"""Suffixes of text files that contain records, not prose."""

_SAVED = ("state.json", "dataset_dict.json")
_README_BYTES = 1 << 20
_FRONT_MATTER = re.compile(rb"---\r?\n(.*?)\r?\n---", re.DOTALL)
_DESCRIBED = re.compile(rb"^(configs|dataset_info):", re.MULTILINE)
_LEFT_OUT = {"test", "tests", "idlelib", "site-packages", "dist-packages"}
"""Folders of Python's library that are left out of the default text: tests, and code that is not part of the
library."""


@dataclass(frozen=True)
class DataSource:
    """The data at one path: kind, and files with their lengths, in order."""

    path: Path
    kind: str
    files: tuple[tuple[Path, int], ...]

    @property
    def size(self) -> int:
        """Total size of the files in bytes."""
        return sum(size for _, size in self.files)


def find(paths: Sequence[str], data_format: str = "auto") -> list[DataSource]:
    """Find the data at each path, in the given order. A folder contributes every file below it, sorted, except hidden
    and empty files. Without paths: the source of Python's standard library. With `data_format` "text", each file is
    a text.

    Raises:
        ConfigurationError: a path is missing, unreadable, empty or not a regular file, a folder mixes kinds, or a text
            file is not text.
    """
    if not paths:
        library = Path(sysconfig.get_paths()["stdlib"])
        return [_source(library, TEXT, _library_sources(library))]
    sources = [_found(Path(path).absolute(), data_format) for path in paths]
    for source in sources if data_format == "auto" else ():
        _check_prose(source)
        for file, _ in source.files if source.kind == TEXT else ():
            check_text(file)
    return sources


def _check_prose(source: DataSource) -> None:
    """Refuse text files that are all in a record format, because a model would be trained on the syntax."""
    suffixes = {file.suffix.lower() for file, _ in source.files}
    if source.kind == TEXT and suffixes <= _RECORDS:
        raise ConfigurationError(
            f"{source.path} holds records ({', '.join(sorted(suffixes))}), whose syntax would be trained on; write "
            "JSON lines (.jsonl) of them, or give --data-format text"
        )


def joined(sources: Sequence[DataSource]) -> DataSource:
    """Merge several sources of one kind.

    Raises:
        ConfigurationError: the sources are of several kinds, or are several datasets.
    """
    first = sources[0]
    for other in sources[1:]:
        if other.kind != first.kind or other.kind == DATASET:
            raise ConfigurationError(
                f"{first.path} is {first.kind} and {other.path} {other.kind}; make shards of each by itself, and name "
                "both folders with train --data"
            )
    return DataSource(first.path, first.kind, tuple(file for source in sources for file in source.files))


def _found(path: Path, data_format: str) -> DataSource:
    if not os.path.isdir(path):
        size = _length(path)
        if not size:
            raise ConfigurationError(
                f"there is no text in {path}: the file is empty, or has no length as those in /proc"
            )
        return DataSource(path, _kind_of(path, data_format), ((path, size),))
    if data_format == "auto":
        if os.path.lexists(path / INDEX):
            return DataSource(path, SHARDS, ())
        if os.path.lexists(path / JOURNAL):
            raise ConfigurationError(
                f"{path} holds tokens that were not finished; give the same quantshard tokenize command again, which "
                "goes on with them"
            )
        if any(os.path.lexists(path / name) for name in _SAVED) or _is_described(path):
            return _source(path, DATASET, _files_below(path))
    return _of_folder(path, data_format)


def _of_folder(folder: Path, data_format: str) -> DataSource:
    files = [(file, size) for file in _files_below(folder) if (size := _length(file))]
    kinds: dict[str, Path] = {}
    for file, _ in files:
        kinds.setdefault(_kind_of(file, data_format), file)
    if len(kinds) > 1:
        mix = " and ".join(f"{kind} ({file.relative_to(folder)})" for kind, file in list(kinds.items())[:3])
        raise ConfigurationError(
            f"{folder} holds {mix}; name the files of one kind with --data, or say --data-format text to read the "
            "bytes of all"
        )
    return _source(folder, next(iter(kinds), TEXT), [file for file, _ in files])


def _source(path: Path, kind: str, files: Sequence[Path]) -> DataSource:
    sizes = tuple((file, size) for file in files if (size := _length(file)))
    if not sizes:
        raise ConfigurationError(f"there is no text in {path}")
    return DataSource(path, kind, sizes)


def _kind_of(path: Path, data_format: str) -> str:
    name = path.name.lower()
    if data_format == "text":
        return TEXT
    return next((kind for suffix, kind in _SUFFIXES.items() if name.endswith(suffix)), TEXT)


def _is_described(folder: Path) -> bool:
    """Return True if a folder is a copy of a dataset repository with a README that lists splits."""
    try:
        with open_regular(folder / "README.md") as file:
            front_matter = _FRONT_MATTER.match(file.read(_README_BYTES))
    except OSError:
        return False
    return front_matter is not None and _DESCRIBED.search(front_matter[1]) is not None


def _length(path: Path) -> int:
    """Return the length of a regular file; follows links."""
    try:
        str(path).encode("utf-8")
        status = path.stat()
    except FileNotFoundError:
        raise ConfigurationError(f"there is no data file or folder {path}{inputs.meant_path(path)}") from None
    except UnicodeEncodeError:
        raise ConfigurationError(
            f"the name of the data file {path} is not UTF-8, as the run's config.toml is, which lists it; rename it"
        ) from None
    except (OSError, ValueError) as error:
        raise unreadable(path, error) from None
    if not stat.S_ISREG(status.st_mode):
        raise ConfigurationError(f"the data file {path} is no regular file but a pipe, a device or a socket")
    return status.st_size


def _files_below(folder: Path) -> list[Path]:
    paths = []

    def stop(error: OSError) -> None:
        raise unreadable(Path(error.filename or folder), error)

    for root, folders, names in os.walk(folder, onerror=stop):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in folders:
            if os.path.islink(os.path.join(root, name)):
                warnings.warn(
                    f"{os.path.join(root, name)} is a link to a folder, whose files are not read; name the folder with "
                    "--data if they are data",
                    stacklevel=2,
                )
        paths += [Path(root, name) for name in names if not name.startswith(".")]
    return sorted(paths, key=lambda path: path.relative_to(folder).as_posix())


def _library_sources(library: Path) -> list[Path]:
    relative_paths = (path.relative_to(library) for path in library.rglob("*.py"))
    sources = [path for path in relative_paths if not _LEFT_OUT.intersection(path.parts)]
    return [library / path for path in sorted(sources, key=Path.as_posix)]
