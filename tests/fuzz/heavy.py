"""Small or sparse files that would take hours or all memory without limits. They are slow to read: `make fuzz` only."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pyarrow
from hypothesis import strategies as st

from quantshard.checkpoints.disk.manifest import MANIFEST
from quantshard.tools.trainer.data import texts
from quantshard.tools.trainer.data.dataset_folders import open_dataset
from quantshard.tools.trainer.data.finding import JSONL
from tests.fuzz.kinds import CONFIG, Kind, Mutant, Reading
from tests.tools.cli import sources

HEAVY = ", heavy"
"""How the names of these kinds end. They have few mutants, which one batch exhausts."""

_MIB = 1 << 20
_FILE = {"bytes": 1, "xxh3_128": "0" * 32}
_MANY_FILES = {"quantshard": 1, "files": {f"f{n}": _FILE for n in range(200_000)}, "world_size": 1, "torch": "2",
               "saved_at": "x"}  # fmt: skip
_ALIASES = "\n".join(["a0: &a0 [x]", *(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 12))])
_TOML = [
    b"".join(b"k%d = 1\n" % n for n in range(1_300_000)), b"a." * (8 * _MIB - 8) + b"a = 1\n",
    b"a = " + b"[" * 100_000, b"[" + b"a." * 100_000 + b"a]\n", b'a = "' + b"\\n" * (8 * _MIB - 8) + b'"\n',
]  # fmt: skip
_BOMBS = [
    b"\n" * (64 * _MIB),
    b'{"text": "a"}\n' * (4 * _MIB),
    b'{"text": ' + b"[" * (64 * _MIB),
    b"[[]" + b",[]" * (5 * _MIB) + b"]",
]

MUTANTS: dict[str, list[Mutant]] = {
    "metrics.jsonl": [{"metrics.jsonl": 20 << 30}],
    "statistics.jsonl": [{"statistics.jsonl": 20 << 30}],
    "manifest.json, mxfp8": [{MANIFEST: json.dumps(_MANY_FILES).encode()}, {MANIFEST: None}],
    "config.json": [{"config.json": json.dumps(CONFIG | {"num_hidden_layers": 10**n}).encode()} for n in (6, 12)],
    "config.toml": [{"config.toml": content} for content in _TOML],
}
"""Mutants by the name of the kind whose readings read them."""


def _text_readings(path: Path, mutant: Mutant) -> list[Reading]:
    (file,) = path.iterdir()
    size = file.stat().st_size
    piece = texts.Piece(str(file), 0, size, size)
    return [("tokenize", lambda: sum(1 for _ in texts.chunks(JSONL, piece, texts.TextOptions())) and None, None)]


def _dataset_readings(path: Path, mutant: Mutant) -> list[Reading]:
    return [("dataset", lambda: open_dataset(path, "train", "text") and None, None)]


def heavy(kinds: Sequence[Kind], folder: Path) -> list[Kind]:
    """The heavy kinds: those of `built` with other mutants, compressed texts, and descriptions of datasets."""
    packed, described = folder / "packed", folder / "described"
    for path in (packed, described):
        path.mkdir(parents=True)
    sources.jsonl(packed / "a.jsonl", sources.texts(10))
    sources.parquet(described / "train.parquet", sources.texts(10))
    bombs: list[Mutant] = [
        {"a.jsonl": None, name: content}
        for bomb in _BOMBS
        for name, content in (
            ("a.jsonl.gz", gzip.compress(bomb)), ("a.jsonl.zst", pyarrow.compress(bomb, "zstd", asbytes=True)),
        )
    ]  # fmt: skip
    readme = f"---\nconfigs:\n- config_name: default\n  data_files: x\n{_ALIASES}\n---\n".encode()
    return [
        *(
            replace(kind, name=kind.name + HEAVY, mutants=st.sampled_from(MUTANTS[kind.name]))
            for kind in kinds
            if kind.name in MUTANTS
        ),
        Kind("compressed texts, heavy", packed, st.sampled_from(bombs), _text_readings),
        Kind("dataset, heavy", described, st.just({"README.md": readme}), _dataset_readings),
    ]
