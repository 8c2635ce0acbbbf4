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

LINE_BYTES: Final = 32 * _MIB
"""Maximum bytes of a line of JSON, because a line is read whole. A document of this length is longer than any book."""

LOG_BYTES: Final = 1 << 30
"""Bytes of `metrics.jsonl` that a report reads: five million steps. Of a longer file parts are read, evenly over it."""

BROKEN_LINES: Final = 10_000
"""Lines of such a file that are no records, after which some hundred lines are read only if all are: each costs an
exception."""

OBJECT_BYTES: Final = 16 * _MIB
"""Maximum bytes of a pickled object in a checkpoint, without its tensors, which are stored separately."""

OBJECT_VALUES: Final = 1 << 21
OBJECT_DEPTH: Final = 32
"""Maximum number of values in such an object, and of containers inside each other. Repeated containers have more values
than bytes."""

NAME_LENGTH: Final = 1024
"""Maximum characters of a file name inside a checkpoint."""
