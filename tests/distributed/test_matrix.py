"""Every recipe on every mesh: born as on one process, and saved, loaded there and on another mesh, and resumed.

Runs on 1, 2, 3 and 4 ranks, and prints the table. `make test` has each recipe on one of four meshes, in turns; `make
test-all` every pair of recipe, mesh, mesh of the loading run, way to be born and kind of moments.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from tests.distributed.models import MESHES, RECIPES, Case, bits, build, gathered_bits, optimizer_of, train
from tests.distributed.pool import run_ranks

pytestmark = pytest.mark.distributed

MOMENTS = (torch.float32, torch.uint8)

SOME = ("FSDP2 x1", "FSDP2 x3", "HSDP 2x2", "HSDP 2x1")
"""Meshes: one rank, one that cuts unevenly, replicas, and replicas of the whole."""

SHAPES = ((300, 257), (257, 1))
"""Blocks are cut, no number of ranks divides the rows, and all ranks but one hold nothing of the last layer."""


@dataclass(frozen=True)
class QuantSpec:
    """Of the table: where a model is trained and saved, and where else it is loaded."""

    case: Case
    elsewhere: str

    def path(self, folder: str) -> str:
        return f"{folder}/{self.case.recipe} {self.case.mesh}"

    @property
    def there(self) -> Case:
        return replace(
            self.case, mesh=MESHES[self.elsewhere], init={"meta": "direct", "direct": "meta"}[self.case.init]
        )


Cells = dict[tuple[str, str], QuantSpec]
"""By recipe and mesh."""


def cells(meshes: Sequence[str]) -> Cells:
    """Every recipe on each of all meshes, or on one of some, in turns."""
    found = {}
    for row, recipe in enumerate(RECIPES):
        for column, mesh in enumerate(meshes):
            if len(meshes) < len(MESHES) and column != (row + row // 2) % len(meshes):
                continue
            init, moments = ("meta", "direct")[(row + column) % 2], MOMENTS[(row + column // 2) % 2]
            case = Case(recipe, MESHES[mesh], init, moments=moments, shapes=SHAPES)
            found[recipe, mesh] = QuantSpec(case, meshes[(column + 1 + row % (len(meshes) - 1)) % len(meshes)])
    return found


def reference(case: Case) -> tuple[dict[str, str], dict[str, str]]:
    """One process, no FSDP: the weights at birth, and the rest of the state dict."""
    model = build(case)
    return gathered_bits(model), bits(model, optimizer_of(model, case))


def first_run(case: Case, path: str) -> tuple[dict[str, str], dict[str, str], dict[str, str], list[float]]:
    """Train a step, save with the plain idiom, train two more."""
    model = build(case)
    gathered = gathered_bits(model)
    optimizer = optimizer_of(model, case)
    born = bits(model, optimizer)
    train(model, optimizer, case, 0, 1)
    saved = bits(model, optimizer)
    dcp.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, checkpoint_id=path)
    return gathered, born, saved, train(model, optimizer, case, 1, 3)


def second_run(case: Case, path: str, steps: int = 2) -> tuple[dict[str, str], list[float]]:
    """A new process, seeded differently: load with the plain idiom, train on."""
    case = replace(case, seed=99)
    model = build(case)
    optimizer = optimizer_of(model, case)
    before = bits(model)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    dcp.load(state, checkpoint_id=path)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    after = bits(model, optimizer)
    assert before.items() - after.items(), "the model held these bits before it was loaded"
    return after, train(model, optimizer, case, 1, 1 + steps)


def references(cases: list[Case]) -> dict[Case, tuple[dict[str, str], dict[str, str]]]:
    return {case: reference(case) for case in cases}


def first_runs(
    cells: list[QuantSpec], folder: str
) -> list[tuple[dict[str, str], dict[str, str], dict[str, str], list[float]]]:
    return [first_run(cell.case, cell.path(folder)) for cell in cells]


def second_runs(cells: list[QuantSpec], folder: str) -> list[tuple[dict[str, str], list[float]]]:
    return [second_run(cell.case, cell.path(folder)) for cell in cells]


def runs_elsewhere(cells: list[QuantSpec], folder: str) -> list[tuple[dict[str, str], list[float]]]:
    """On the mesh that is to load what another has saved."""
    return [second_run(cell.there, cell.path(folder), steps=0) for cell in cells]


def on_ranks(
    function: Callable[..., Any], cells: Cells, folder: str, elsewhere: bool = False
) -> dict[QuantSpec, list[Any]]:
    """What each rank of its mesh finds for each cell; one call for each mesh."""
    found: dict[QuantSpec, list[Any]] = {}
    for mesh in {mesh: None for _, mesh in cells}:
        mine = [cell for (_, of), cell in cells.items() if (cell.elsewhere if elsewhere else of) == mesh]
        ranks = Case("current", MESHES[mesh]).ranks
        for cell, *by_rank in zip(mine, *run_ranks(ranks, function, mine, folder), strict=True):
            found[cell] = by_rank
    return found


some_and_every_mesh = pytest.mark.parametrize(
    "meshes", [SOME, pytest.param(tuple(MESHES), marks=pytest.mark.exhaustive)], ids=["some", "every"]
)


def rows_of(meshes: tuple[str, ...]) -> list[tuple[Any, ...]]:
    return [(recipe, mesh, c.elsewhere, c.case.init, c.case.moments) for (recipe, mesh), c in cells(meshes).items()]


def test_every_value_is_tried_by_some() -> None:
    recipes, *meshes, inits, moments = (set(column) for column in zip(*rows_of(SOME), strict=True))
    assert recipes == RECIPES.keys() and meshes == [{*SOME}] * 2 and (len(inits), len(moments)) == (2, 2)


def test_every_pair_is_tried() -> None:
    meshes = tuple(MESHES)
    rows = rows_of(meshes)
    factors = [set(column) for column in zip(*rows, strict=True)]
    for a, first in enumerate(factors):
        for b, second in enumerate(factors[:a]):
            same_mesh = len(meshes) * ({a, b} == {1, 2})
            assert len({(row[a], row[b]) for row in rows}) == len(first) * len(second) - same_mesh, (a, b)


@some_and_every_mesh
def test_table(meshes: tuple[str, ...], tmp_path: Path, show: Callable[[str], None]) -> None:
    """1, 2, 3 and 4 ranks."""
    folder, table = str(tmp_path), cells(meshes)
    alone = {
        (recipe, cell.case.moments): replace(cell.case, mesh=None, init="direct") for (recipe, _), cell in table.items()
    }
    [expected] = run_ranks(1, references, list(alone.values()))
    ran, again = on_ranks(first_runs, table, folder), on_ranks(second_runs, table, folder)
    moved = on_ranks(runs_elsewhere, table, folder, elsewhere=True)
    rows = [f"{'recipe':<18}{'mesh':<11}{'init':<8}{'born':<7}{'gathered':<10}{'loaded':<8}{'resumed':<9}elsewhere"]
    wrong = 0
    for (recipe, mesh), cell in table.items():
        whole, whole_state = expected[alone[recipe, cell.case.moments]]
        firsts, seconds, others = ran[cell], again[cell], moved[cell]
        saved = firsts[0][2]
        checks = (
            all(born == whole_state for _, born, _, _ in firsts),
            # a forward of the two-copy format gathers one of the copies
            all(gathered.items() <= whole.items() and gathered for gathered, _, _, _ in firsts),
            all(new == old for (new, _), (_, _, old, _) in zip(seconds, firsts, strict=True)),
            all(new == old for (_, new), (_, _, _, old) in zip(seconds, firsts, strict=True)),
            all(new == saved for new, _ in others),
        )
        wrong += len(checks) - sum(checks)
        born, gathered, loaded, resumed, other = ("equal" if check else "DIFFER" for check in checks)
        rows.append(
            f"{recipe:<18}{mesh:<11}{cell.case.init:<8}{born:<7}{gathered:<10}{loaded:<8}{resumed:<9}"
            f"{other} on {cell.elsewhere}"
        )
    show("\n".join(rows))
    assert not wrong, "\n".join(rows)
