"""Computes the rows, all numbers of ranks at the same time, and compares them with the files next to this one."""

from __future__ import annotations

import difflib
import hashlib
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from itertools import groupby
from multiprocessing import get_context
from pathlib import Path

import torch

from tests.bits.cells import CHOICES, WRAPPINGS, Cell, cells_of, rows
from tests.distributed import pool
from tests.distributed.pool import run_ranks

FOLDER = Path(__file__).parent
CHUNK = 24
"""Cells of one call of the ranks, which has a time limit."""
PROCESSES = 13
"""Processes that share a GPU."""


def joined(ranks: tuple[dict[str, str], ...]) -> str:
    """One hash of those of all ranks, kind by kind."""
    if len(ranks) == 1 or "refused" in ranks[0]:
        hashes = ranks[0]
    else:
        hashes = {kind: hashlib.sha256("".join(r[kind] for r in ranks).encode()).hexdigest() for kind in ranks[0]}
    return " ".join(f"{kind}={value[:16]}" for kind, value in hashes.items())


def of_world(cells: list[Cell]) -> dict[str, str]:
    lines: dict[str, str] = {}
    for start in range(0, len(cells), CHUNK):
        chunk = cells[start : start + CHUNK]
        ranks = run_ranks(WRAPPINGS[chunk[0].wrapping], rows, chunk)
        lines |= {" ".join(cell): joined(found) for cell, *found in zip(chunk, *ranks, strict=True)}
    return lines


def of_gpu(cell: Cell) -> dict[str, str]:
    pool.IMPORTED = pool.LIBRARY  # in this process of its own too
    try:
        return of_world([cell])
    finally:
        # This process would wait for its stopped ranks when it exits.
        pool._close()


def computed(cells: list[Cell]) -> dict[str, str]:
    """Cell -> its line of the ledger, in the order of `cells`."""
    on_gpu, on_cpu = [[cell for cell in cells if (cell.backend == "gpu") is gpu] for gpu in (True, False)]
    by_ranks = sorted(on_cpu, key=lambda cell: -WRAPPINGS[cell.wrapping])
    worlds = [list(group) for _, group in groupby(by_ranks, lambda cell: WRAPPINGS[cell.wrapping])]
    lines: dict[str, str] = {}
    with ThreadPoolExecutor() as threads, ProcessPoolExecutor(PROCESSES, get_context("spawn")) as processes:
        gpu_rows = processes.map(of_gpu, on_gpu)
        for rows_of_world in threads.map(of_world, worlds):
            lines |= rows_of_world
        for row in gpu_rows:
            # compilation takes minutes: a run that is cut off has printed what it computed
            print(*(f"{cell}: {line}" for cell, line in row.items()), flush=True)
            lines |= row
    return {" ".join(cell): lines[" ".join(cell)] for cell in cells}


def read(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


def changed_kinds(before: str, after: str) -> str:
    """The kinds of values whose hashes differ."""
    return " ".join(sorted({item.split("=")[0] for item in {*before.split()} ^ {*after.split()}}))


def compare_rows(cells: list[Cell], backends: list[str], is_part: bool, is_write: bool) -> list[str]:
    path = FOLDER / "ledger.txt"
    before = {cell: line for cell, _, line in (line.partition(": ") for line in read(path))}
    after = computed(cells)
    gone = [cell for cell in before if cell.split()[0] in backends and cell not in after and not is_part]
    if is_write:
        table = {cell: line for cell, line in (before | after).items() if cell not in gone}
        path.write_text("".join(f"{cell}: {line}\n" for cell, line in table.items()))
    different = [cell for cell, line in after.items() if before.get(cell) != line]
    return [f"{cell}: {changed_kinds(before.get(cell, ''), after[cell])}" for cell in different] + [
        f"{cell}: gone" for cell in gone
    ]


def compare(backends: list[str], choice: str | None, is_write: bool) -> tuple[list[str], int]:
    """Lines that say what differs from the files, which are written anew if asked, and the number of rows."""
    cells = [cell for backend in backends for cell in cells_of(backend, torch.cuda.device_count())]
    cells = CHOICES[choice](cells) if choice else cells
    differences = compare_rows(cells, backends, choice is not None, is_write)
    if "oracle" in backends:
        differences += compare_surface(is_write)
    return differences, len(cells)


def compare_surface(is_write: bool) -> list[str]:
    # needs the extra cli, which a machine with GPUs may lack
    from tests.bits.surface import FILES

    differences = []
    for name, lines_of in FILES.items():
        before, after = read(FOLDER / name), list(lines_of())
        if is_write:
            (FOLDER / name).write_text("\n".join(after) + "\n")
        changes = difflib.unified_diff(before, after, "", "", n=0, lineterm="")
        differences += [f"{name}: {line}" for line in changes if not line.startswith(("---", "+++", "@@"))]
    return differences
