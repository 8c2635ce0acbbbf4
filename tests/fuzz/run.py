"""Change files of every kind at random and read them (`make fuzz ARGS="--seed 7 --seconds 120"`).

Prints a table, and exits with 1 if anything was read wrongly, ended in a traceback, or took too much time or memory.
The file of each fault is kept.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hypothesis import HealthCheck, Phase, given, seed as seeded, settings

from tests.fuzz.heavy import HEAVY, heavy
from tests.fuzz.judge import FAULTS, READ, REFUSED, Verdict, judge
from tests.fuzz.kinds import Kind, Mutant, built

BATCH = 50
"""Mutants of one kind between two looks at the clock."""


@dataclass
class Score:
    """What became of the mutants of one kind. `faults`: what each was, and where the mutant is kept."""

    mutants: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    faults: list[tuple[str, Verdict, Path]] = field(default_factory=list)
    slowest: float = 0.0


def try_kind(kind: Kind, examples: int, seed: int, folder: Path, score: Score) -> None:
    """Read some mutants of a kind. The whole has to be read without an error first."""
    if not score.mutants:
        for name, read, expected in kind.readings(kind.whole, {}):
            with contextlib.redirect_stdout(io.StringIO()):
                found = judge(read, expected)
            assert found.kind == READ, f"{kind.name}, {name}: whole files are not read: {found}"

    @seeded(seed)
    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(kind.mutants)
    def one(mutant: Mutant) -> None:
        path = kind.whole.parent / "mutant"
        shutil.rmtree(path, ignore_errors=True)
        shutil.copytree(kind.whole, path)
        for name, content in mutant.items():
            (path / name).unlink(missing_ok=True)
            if content is not None:
                (path / name).write_bytes(content if isinstance(content, bytes) else b"")
            if isinstance(content, int):
                os.truncate(path / name, content)
        score.mutants += 1
        worst = READ
        for name, read, expected in kind.readings(path, mutant):
            start = time.process_time()
            with contextlib.redirect_stdout(io.StringIO()):
                found = judge(read, expected)
            score.slowest = max(score.slowest, time.process_time() - start)
            if found.kind in FAULTS:
                kept = folder / f"{len(list(folder.iterdir())):04d}-{found.kind}"
                subprocess.run(["cp", "-a", path, kept], check=True)  # keeps holes, which copytree fills
                score.faults.append((name, found, kept))
                what = found.what.strip()
                print(f"{kind.name}, {name}: {found.kind}, kept in {kept}\n{what}\n", file=sys.stderr, flush=True)
            worst = max(worst, found.kind, key=(READ, REFUSED, *FAULTS).index)
        score.counts[worst] += 1

    one()


def table(scores: dict[str, Score]) -> list[str]:
    """The scores, a line for each kind."""
    heads = ["kind", "mutants", READ, REFUSED, *FAULTS, "slowest"]
    rows = [
        [name, str(s.mutants), *(str(s.counts[key]) for key in (READ, REFUSED, *FAULTS)), f"{s.slowest:.2f} s"]
        for name, s in scores.items()
    ]
    widths = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in [heads, *rows]]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run it; 1 if there are faults."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=None, help="go on that long (default: until --mutants)")
    parser.add_argument("--mutants", type=int, default=500, help="of each kind, where no --seconds are given")
    parser.add_argument("--kinds", default="", help="only those whose names have this in them")
    parser.add_argument("--keep", type=Path, default=None, help="a folder for the mutants that show a fault")
    given_ = parser.parse_args(arguments)
    kept = given_.keep or Path(tempfile.mkdtemp(prefix="quantshard-fuzz-"))
    kept.mkdir(parents=True, exist_ok=True)
    end = None if given_.seconds is None else time.monotonic() + given_.seconds
    with tempfile.TemporaryDirectory() as folder:
        kinds = built(Path(folder, "whole"))
        kinds = [kind for kind in [*kinds, *heavy(kinds)] if given_.kinds in kind.name]
        scores = {kind.name: Score() for kind in kinds}
        batch = 0
        while (batch * BATCH < given_.mutants) if end is None else (time.monotonic() < end):
            for kind in kinds if batch == 0 else [kind for kind in kinds if not kind.name.endswith(HEAVY)]:
                if end is None or time.monotonic() < end:
                    try_kind(kind, min(BATCH, given_.mutants), given_.seed * 1_000_003 + batch, kept, scores[kind.name])
            batch += 1
    faults = sum(len(score.faults) for score in scores.values())
    print("\n".join(table(scores)))
    print(f"seed {given_.seed}: {sum(s.mutants for s in scores.values())} mutants, {faults} faults")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
