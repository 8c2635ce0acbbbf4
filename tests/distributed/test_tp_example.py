"""examples/train_fsdp2_tp.py runs; and its tied weight, an embedding's by PyTorch and a head's by quantshard.

That both of its uses give the gradients of one process is in test_parity.py, whose model is the same. Each test names
its rank count.
"""

from __future__ import annotations

import argparse
import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

import quantshard as qs
from quantshard.errors import ConfigurationError
from tests.distributed.forked import STARTS
from tests.distributed.models import bits
from tests.distributed.parity import Case, as_asked, example, text
from tests.distributed.pool import run_ranks

pytestmark = pytest.mark.distributed
ROOT = Path(__file__).parents[2]


@pytest.mark.exhaustive
@pytest.mark.parametrize("start", STARTS)
def test_the_example_runs(tmp_path: Path, start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """2 ranks, tp 2, started by torchrun: it compares bits, saves, resumes, and goes on from there."""
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    script = [str(ROOT / "examples" / "train_fsdp2_tp.py"), "--recipe", "mxfp8", "--tp", "2"]
    options = ["--sequence-parallel", "--steps", "2", "--check", "--resume"]
    monkeypatch.chdir(tmp_path)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    process = start([*command, *script, *options], environment)
    out, err = process.communicate(timeout=400)
    assert process.returncode == 0, err[-3000:]
    assert sorted(out.splitlines())[:2] == [f"rank {rank}: every bit agrees" for rank in range(2)]
    losses = [float(line.split()[-1]) for line in out.splitlines() if line.startswith("step")]
    assert len(losses) == 2 and losses[1] < losses[0] < 5
    assert [path.name for path in sorted((tmp_path / "checkpoints").iterdir())] == ["000002", "000004"]


def checked(folder: Path) -> int:
    """Its check on (dp 2, tp 2); the step that it saved."""
    with as_asked(Case("")):
        args = argparse.Namespace(recipe="mxfp8", sequence_parallel=True, steps=2, checkpoint=folder)
        model, optimizer, mesh = started((1, 2, 2), "mxfp8")
        example.check(args, mesh, text())
        return example.load(folder, model, optimizer)


@pytest.mark.exhaustive
def test_its_check_on_two_axes(tmp_path: Path) -> None:
    """4 ranks, (dp 2, tp 2)."""
    assert run_ranks(4, checked, tmp_path) == [2] * 4


def differing() -> tuple[list[str], list[str]]:
    """What its check says on (dp 2, tp 1), and what once a byte of one rank is another."""
    with as_asked(Case("")):
        model, _, mesh = started((1, 2, 1), "block")
        alone, _ = example.build(argparse.Namespace(recipe="block", sequence_parallel=False), None)
        before = example.differences(model, alone, mesh["tp"])
        if dist.get_rank() == 1:
            model.layers[0].layernorm_mlp.fc2_weight.to_local().quantized_storage.components["codes"][0, 0] += 1
        return before, example.differences(model, alone, mesh["tp"])


def test_its_check_sees_one_byte() -> None:
    """2 ranks, both."""
    name = "layernorm_mlp.fc2_weight"
    assert run_ranks(2, differing) == [([], [f"layers.0.{name}", f"gathered {name}"])] * 2


# The tied weight

AXES = ("dp_replicate", "dp_shard", "tp")


def started(sizes: tuple[int, int, int], recipe: str) -> tuple[Any, ...]:
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=AXES)
    return (*example.build(argparse.Namespace(recipe=recipe, sequence_parallel=sizes[2] > 1), mesh), mesh)


def saved(folder: Path) -> dict[str, str]:
    """Trained for a step on (dp 2, tp 2)."""
    with as_asked(Case("")):
        model, optimizer, mesh = started((1, 2, 2), "delayed")
        example.train(model, optimizer, "delayed", mesh, text(), range(1))
        example.save(folder, model, optimizer, 1)
        assert model.head.weight is model.embedding.weight
        return bits(model, optimizer)


def loaded(folder: Path, sizes: tuple[int, int, int]) -> tuple[dict[str, str], dict[str, str]]:
    """Before and after a load."""
    with as_asked(Case("")):
        model, optimizer, _ = started(sizes, "delayed")
        before = bits(model, optimizer)
        assert example.load(folder, model, optimizer) == 1
        assert model.head.weight is model.embedding.weight
        return before, bits(model, optimizer)


def test_a_tied_head_is_saved_and_loaded_on_other_meshes(tmp_path: Path) -> None:
    """4 ranks save; 1 and 3 load."""
    held = run_ranks(4, saved, tmp_path)[0]
    of_the_weight = {"head.weight", "head.weight_key", "head.weight_draws", "head.weight_amax_history"}
    of_activations = {"head.input_amax_history", "head.grad_output_amax_history"}
    assert {name for name in held if "head." in name} == of_the_weight | of_activations
    assert held["head.weight"] == held["embedding.weight"]
    for sizes in ((1, 1, 1), (1, 3, 1)):
        for before, after in run_ranks(math.prod(sizes), loaded, tmp_path, sizes):
            assert after == held and after["head.weight"] != before["head.weight"]


def tied(mesh: DeviceMesh, style: ParallelStyle | None) -> str:
    """What a head says that shares the weight of an embedding that is cut so."""
    embedding = nn.Embedding(8, 6)
    if style is not None:
        parallelize_module(embedding, mesh, style)
    head = qs.Linear(6, 8, bias=False, parallel_mode="column", tp_mesh=mesh)
    head.weight = embedding.weight
    try:
        return str(list(head(torch.ones(2, 6)).shape))
    except ConfigurationError as error:
        return str(error)


def refusals() -> list[str]:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    rows = RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(0))
    return [tied(mesh, style) for style in (rows, ColwiseParallel(), None)]


def test_a_weight_that_is_cut_otherwise_is_refused() -> None:
    """2 ranks, without FSDP2."""
    for fits, columns, plain in run_ranks(2, refusals):
        assert fits == "[2, 4]"
        assert (
            "Linear.weight is (Shard(dim=1),) on tp_mesh, but tensor parallelism over 2 ranks cuts its dim 0" in columns
        )
        assert "Linear.weight is whole on every rank, but tensor parallelism over 2 ranks cuts its dim 0" in plain
