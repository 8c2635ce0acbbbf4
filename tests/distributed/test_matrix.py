"""Every recipe on every mesh: weights as one process holds them, and a resumed run equal to one that never stopped.

Runs on 1, 2, 3 and 4 ranks, and prints the table.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed.checkpoint as dcp

from tests.distributed.models import MESHES, RECIPES, Case, bits, build, gathered_bits, optimizer_of, train
from tests.distributed.pool import run_ranks

pytestmark = pytest.mark.distributed


def reference(case: Case) -> tuple[dict[str, str], dict[str, str]]:
    """One process, no FSDP: the weights at birth, and the rest of the state dict."""
    model = build(case)
    return gathered_bits(model), bits(model, optimizer_of(model, case))


def first_run(case: Case, path: str) -> tuple[dict[str, str], dict[str, str], dict[str, str], list[float]]:
    """Train three steps, save with the plain idiom, train two more."""
    model = build(case)
    gathered = gathered_bits(model)
    optimizer = optimizer_of(model, case)
    born = bits(model, optimizer)
    train(model, optimizer, case, 0, 3)
    saved = bits(model, optimizer)
    dcp.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, checkpoint_id=path)
    return gathered, born, saved, train(model, optimizer, case, 3, 5)


def second_run(case: Case, path: str) -> tuple[dict[str, str], list[float]]:
    """A new process, seeded differently: load with the plain idiom, train two steps."""
    model = build(case)
    optimizer = optimizer_of(model, case)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    dcp.load(state, checkpoint_id=path)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return bits(model, optimizer), train(model, optimizer, case, 3, 5)


def test_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [f"{'recipe':<18}{'mesh':<11}{'init':<8}{'born':<8}{'gathered':<10}{'loaded':<8}resumed losses"]
    wrong = 0
    for recipe in RECIPES:
        [(whole, whole_state)] = run_ranks(1, reference, Case(recipe, init="direct"))
        for mesh, shape in MESHES.items():
            for init in ("meta", "direct"):
                path = str(tmp_path / f"{recipe} {mesh} {init}")
                case = Case(recipe, shape, init)
                ran = run_ranks(case.ranks, first_run, case, path)
                resumed = run_ranks(case.ranks, second_run, Case(recipe, shape, init, seed=99), path)
                # a forward of the two-copy format gathers one of the copies
                gathered = all(gathered.items() <= whole.items() and gathered for gathered, _, _, _ in ran)
                checks = (
                    all(born == whole_state for _, born, _, _ in ran),
                    gathered,
                    all(new == old for (new, _), (_, _, old, _) in zip(resumed, ran, strict=True)),
                    all(new == old for (_, new), (_, _, _, old) in zip(resumed, ran, strict=True)),
                )
                wrong += len(checks) - sum(checks)
                words = ["equal" if check else "DIFFER" for check in checks]
                rows.append(f"{recipe:<18}{mesh:<11}{init:<8}{words[0]:<8}{words[1]:<10}{words[2]:<8}{words[3]}")
    with capsys.disabled():
        print("\n" + "\n".join(rows))
    assert not wrong, "\n".join(rows)
