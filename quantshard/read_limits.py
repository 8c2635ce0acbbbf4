"""Limits on how much is read from untrusted files, for all readers, each with its reason.

A file over a limit is rejected before memory is allocated for it. Each limit is far above what honest files need. If a
save could exceed a limit, the save raises too.
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
"""Maximum bytes of whole files.

DCP's `.metadata` has about 140 bytes per chunk of a tensor, `manifest.json` 90 per file, a safetensors index 130 per
tensor, and a run's `config.toml` 150 per data file. `config.json` and similar files, and a user's TOML, are written by
hand. The largest tokenizers have 256,000 tokens and 35 MB.
"""

JSON_VALUES: Final = 1 << 20
"""Maximum number of values in one JSON text. One byte can take 64 of memory. The largest safetensors index has some
200,000."""

TOML_MARKS: Final = 1 << 19
"""Maximum number of dots, commas, brackets, equal signs, backslashes and lines in a TOML text. Python's parser reads
200,000 per second. A run's `config.toml` has 4 for each of up to 100,000 files."""

LINE_BYTES: Final = 32 * _MIB
"""Maximum bytes of a line of JSON, because a line is read whole. A document of this length is longer than any book."""

LOG_BYTES: Final = 1 << 30
"""Bytes of `metrics.jsonl` and `statistics.jsonl` that a report reads: five million steps, or 50,000 samples of a large
model. Of a longer file parts are read, evenly over it."""

BROKEN_LINES: Final = 10_000
"""Lines of such a file that are no records, after which some hundred lines are read only if all are: each costs an
exception."""

METADATA_BYTES_PER_CONTAINER: Final = 4
"""Bytes of `.metadata` for each list, tuple and record in it; a dict counts as three. DCP's have 5.7 to 11."""

OBJECT_BYTES: Final = 16 * _MIB
"""Maximum bytes of a pickled object in a checkpoint, without its tensors, which are stored separately."""

PICKLED_CONTAINERS: Final = 1 << 20
"""Lists, tuples and records of such a pickle; a set or dict counts as three. Each may take 100 bytes of memory, for one
of the file."""

OBJECT_VALUES: Final = 1 << 21
"""Maximum number of values created from such a pickle. Repeated containers create more values than bytes."""

RECORDS_BYTES: Final = 4 * _MIB
"""Maximum bytes of the record list of a `torch.save` archive: about 80 per tensor, for which Python allocates 800."""

NUMBER_KEYS: Final = 1 << 14
"""Maximum number of keys of one dict or set that are not strings.

String hashes depend on a secret of the process. Hashes of numbers and tuples of numbers do not, so an attacker could
write keys that all collide. Limiting the number of keys bounds the time per lookup; limiting keys per hash would not.
"""

NAME_LENGTH: Final = 1024
"""Maximum characters of a file name inside a checkpoint."""

TEXT_LENGTH: Final = 200
"""Maximum characters of a text in `manifest.json`, such as PyTorch's version."""
