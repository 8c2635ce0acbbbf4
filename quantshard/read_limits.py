"""How much is read of files that anybody may have written: the limits of all readers, each with its reason.

A file that is over a limit is refused before the memory is taken. Each limit is far above what honest files need; where
the caller of a save could go over one, the save refuses it too.
"""

from __future__ import annotations

from typing import Final

_MIB: Final = 1 << 20

FILE_BYTES: Final = {
    "metadata": 256 * _MIB,
    "manifest": 16 * _MIB,
    "index": 64 * _MIB,
    "configuration": _MIB,
    "settings": _MIB,
    "run": 16 * _MIB,
    "tokenizer": 256 * _MIB,
}
"""Bytes of whole files. DCP's `.metadata` has about 140 a chunk of a tensor, `manifest.json` 90 a file, the index of
safetensors 130 a tensor, a run's `config.toml` 150 a file of its data; `config.json` and its like and a user's TOML are
written by hand. The largest tokenizers have 256,000 tokens and 35 MB."""

JSON_VALUES: Final = 1 << 20
"""Values of one JSON text: one byte of it can take 64 of memory. The largest index of safetensors has some 200,000."""

TOML_MARKS: Final = 1 << 19
"""Dots, commas, brackets, equal signs, backslashes and lines of a TOML text, of which Python's parser reads 200,000 a
second. A run's `config.toml` has 4 for each of up to 100,000 files."""

DESCRIPTION_VALUES: Final = 1 << 17
"""Values of the YAML that describes a dataset, and labels of one of its columns. PyYAML reads 25,000 a second; the
description of a dataset of 2,000 languages has some 40,000."""

LINE_BYTES: Final = 32 * _MIB
"""Bytes of a line of JSON, which is held whole; a document of so many is longer than any book."""

LOG_BYTES: Final = 1 << 30
"""Bytes of `metrics.jsonl` and `statistics.jsonl` that a report reads: five million steps, or 50,000 samples of a large
model. Of a longer file parts are read, evenly over it."""

BROKEN_LINES: Final = 10_000
"""Lines of such a file that are no records, after which some hundred lines are read only if all are: each costs an
exception."""

UNPACKED_BYTES: Final = 16 * _MIB
UNPACKED_RATIO: Final = 100
"""A packed file may unpack to so many bytes, and beyond to so many times its own. Texts pack to a third or a tenth;
zstd packs 30,000 line ends into one byte."""

METADATA_BYTES_PER_CONTAINER: Final = 4
"""Bytes of `.metadata` for each list, tuple and record in it; a dict counts as three. DCP's have 5.7 to 11."""

OBJECT_BYTES: Final = 16 * _MIB
"""Bytes of the pickle of an object in a checkpoint, tensors apart, which lie beside it."""

PICKLED_CONTAINERS: Final = 1 << 20
"""Lists, tuples and records of such a pickle; a set or dict counts as three. Each may take 100 bytes of memory, for one
of the file."""

OBJECT_VALUES: Final = 1 << 21
"""Values that are made of such a pickle. There are more than it has bytes if containers hold each other many times."""

RECORDS_BYTES: Final = 4 * _MIB
"""Bytes of the list of records of an archive of `torch.save`, about 80 for a tensor; Python takes 800 for each."""

NUMBER_KEYS: Final = 1 << 14
"""Keys of one dict or set that may be other than strings. The hash of a string depends on a secret of the process; that
of a number or a tuple of numbers does not, so that whoever writes a file can have each key tried at the place of all
others. Few keys, not many of one hash: then that takes a bounded time for each."""

NAME_LENGTH: Final = 1024
"""Characters of the name of a file within a checkpoint."""

TEXT_LENGTH: Final = 200
"""Characters of a text in `manifest.json`, such as PyTorch's version."""
