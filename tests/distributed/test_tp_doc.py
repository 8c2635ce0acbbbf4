"""The chapter on tensor parallelism: its snippets run unchanged on 4 ranks, and its table agrees with the modules."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

import quantshard as qs
from tests.distributed.models import bits
from tests.distributed.pool import run_ranks
from tests.pages import section, snippets

pytestmark = pytest.mark.distributed
CHAPTER = "docs/distributed.md#tensor-parallelism"
SIZES = {
    "LayerNormMLP": (8, 16),
    "GroupedLinear": (2, 8, 6),
    "MultiheadAttention": (8, 2),
    "LayerNorm": (8,),
    "RMSNorm": (8,),
}
COLUMNS: tuple[Placement, ...] = (Shard(0), Shard(1), Replicate())


def run_snippets(folder: str) -> dict[str, Any]:
    here, names = Path.cwd(), dict[str, Any]()
    os.chdir(folder)
    try:
        for snippet in snippets(CHAPTER):
            exec(snippet, names)
    finally:
        os.chdir(here)
    tied = names["head"].weight
    return {
        "saved": bits(names["layer"], names["optimizer"]),
        "loaded": bits(names["other"], names["optimizer_of_other"]),
        "set later": [tuple(map(str, param.placements)) for param in names["later"].parameters()],
        "at once": [tuple(map(str, param.placements)) for param in names["layer"].parameters()],
        "tied": tied is names["embedding"].weight and tied.grad is not None and bool(tied.grad.full_tensor().any()),
        "loss": names["loss"].full_tensor().item(),
    }


def test_the_snippets_run(tmp_path: Path) -> None:
    """4 ranks."""
    for found in run_ranks(4, run_snippets, str(tmp_path)):
        assert found["loaded"] == found["saved"]
        assert found["set later"] == found["at once"]
        assert found["tied"] and abs(found["loss"] - 5.55) < 0.1  # log 256


def table() -> dict[str, list[set[str]]]:
    """Module -> names of parameters by column."""
    rows = re.findall(r"^\| `(\w+\(.*?\))` \| (.*?) \| (.*?) \| (.*?) \|$", section(CHAPTER), flags=re.M)
    return {row[0]: [set(cell.split(", ")) - {"-"} for cell in row[1:]] for row in rows}


def built(modules: list[str]) -> dict[str, list[set[str]]]:
    tp = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    found = {}
    for module in modules:
        name = module.partition("(")[0]
        sizes = ", ".join(map(str, SIZES.get(name, (8, 6))))
        with torch.device("meta"):
            made = eval(f"qs.{module.replace('(', f'({sizes}, tp_mesh=tp, ', 1)}", {"qs": qs, "tp": tp})
        named = dict(made.named_parameters())
        assert all(isinstance(param, DTensor) for param in named.values())
        found[module] = [{n for n, p in named.items() if p.placements == (placement,)} for placement in COLUMNS]
    return found


def test_the_table_is_what_modules_do() -> None:
    """2 ranks."""
    written = table()
    assert len(written) == 12
    assert run_ranks(2, built, list(written)) == [written] * 2
