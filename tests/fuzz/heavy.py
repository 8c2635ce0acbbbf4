"""Small or sparse files that would take hours or all memory without limits. They are slow to read: `make fuzz` only."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace

from hypothesis import strategies as st

from quantshard.checkpoints.disk.manifest import MANIFEST
from tests.fuzz.kinds import CONFIG, Kind, Mutant

HEAVY = ", heavy"
"""How the names of these kinds end. They have few mutants, which one batch exhausts."""

_MIB = 1 << 20
_FILE = {"bytes": 1, "xxh3_128": "0" * 32}


def mutants() -> dict[str, list[Mutant]]:
    """By the name of the kind whose readings read them."""
    files = {f"f{n}": _FILE for n in range(200_000)}
    many_files = {"quantshard": 1, "files": files, "world_size": 1, "torch": "2", "saved_at": "x"}
    toml = [
        b"".join(b"k%d = 1\n" % n for n in range(1_300_000)), b"a." * (8 * _MIB - 8) + b"a = 1\n",
        b"a = " + b"[" * 100_000, b"[" + b"a." * 100_000 + b"a]\n", b'a = "' + b"\\n" * (8 * _MIB - 8) + b'"\n',
    ]  # fmt: skip
    return {
        "metrics.jsonl": [{"metrics.jsonl": 20 << 30}],
        "statistics.jsonl": [{"statistics.jsonl": 20 << 30}],
        "manifest.json, mxfp8": [{MANIFEST: json.dumps(many_files).encode()}, {MANIFEST: None}],
        "config.json": [{"config.json": json.dumps(CONFIG | {"num_hidden_layers": 10**n}).encode()} for n in (6, 12)],
        "config.toml": [{"config.toml": content} for content in toml],
    }


def heavy(kinds: Sequence[Kind]) -> list[Kind]:
    """The heavy kinds: those of `kinds` with other mutants."""
    by_name = mutants()
    return [
        replace(kind, name=kind.name + HEAVY, mutants=st.sampled_from(by_name[kind.name]))
        for kind in kinds
        if kind.name in by_name
    ]
