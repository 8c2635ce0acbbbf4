"""Saved on any mesh, loaded on any other: codes, scales, masters, moments, histories, keys and draws, bit for bit.

Runs on 1, 2, 3 and 4 ranks.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from tests.distributed.models import MESHES, RECIPES, Case, bits, build, optimizer_of, train
from tests.distributed.pool import run_ranks

pytestmark = pytest.mark.distributed


def save(case: Case, path: str) -> dict[str, str]:
    model = build(case)
    optimizer = optimizer_of(model, case)
    train(model, optimizer, case, 0, 2)
    dcp.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, checkpoint_id=path)
    return bits(model, optimizer)


def load(case: Case, path: str) -> tuple[dict[str, str], list[float]]:
    model = build(case)
    optimizer = optimizer_of(model, case)
    before = bits(model)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    dcp.load(state, checkpoint_id=path)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    after = bits(model, optimizer)
    assert before.items() - after.items(), "the model held these bits before it was loaded"
    return after, train(model, optimizer, case, 2, 3)


@pytest.mark.parametrize("recipe", RECIPES)
def test_any_mesh_to_any_other(recipe: str, tmp_path: Path) -> None:
    # FP8 moments on every other recipe: their blocks must move as the weights' do
    moments = torch.uint8 if list(RECIPES).index(recipe) % 2 else torch.float32
    for old, old_shape in MESHES.items():
        path = str(tmp_path / old)
        case = Case(recipe, old_shape, moments=moments)
        saved = run_ranks(case.ranks, save, case, path)[0]
        for new, new_shape in MESHES.items():
            if new != old:
                target = Case(recipe, new_shape, seed=99, moments=moments)
                for loaded, losses in run_ranks(target.ranks, load, target, path):
                    different = [name for name in saved if loaded[name] != saved[name]]
                    assert not different, f"{recipe}: {old} -> {new}: {different}"
                    assert all(loss == loss for loss in losses)
