"""Recipes that quantize weights only, on meshes: resumed bit for bit, and within the order of sums of one process."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import quantshard as qs
from quantshard.checkpoints import compare
from quantshard.tensor import components
from tests.distributed.commands import quantshard
from tests.distributed.models import MESHES, OF_WEIGHTS, Case, build, recipe_of
from tests.distributed.pool import run_ranks
from tests.distributed.tensor_parallel import Case as TensorParallelCase, table
from tests.distributed.test_matrix import SHAPES, QuantSpec, first_runs, references, runs_elsewhere, second_runs
from tests.distributed.test_tensor_parallel import ORDER_OF_SUMS

pytestmark = pytest.mark.distributed


def test_runs_are_born_alike_and_resumed_bit_for_bit(tmp_path: Path) -> None:
    """3 ranks with uneven shards, and 1 rank that loads what these have saved."""
    cells = [QuantSpec(Case(name, MESHES["FSDP2 x3"], shapes=SHAPES), "FSDP2 x1") for name in OF_WEIGHTS]
    [expected] = run_ranks(1, references, [Case(name, shapes=SHAPES) for name in OF_WEIGHTS])
    firsts = run_ranks(3, first_runs, cells, str(tmp_path))
    seconds = run_ranks(3, second_runs, cells, str(tmp_path))
    [others] = run_ranks(1, runs_elsewhere, cells, str(tmp_path))
    for index, (gathered, born) in enumerate(expected.values()):
        for first, second in zip(firsts, seconds, strict=True):
            assert first[index][:2] == (gathered, born)
            assert second[index] == first[index][2:]
        assert others[index][0] == firsts[0][index][2]


def sent_and_stored(names: tuple[str, ...]) -> list[tuple[int, int, tuple[str, ...]]]:
    """Bytes that a rank sends of the first weight, bytes of its codes and scales, and all fallbacks."""
    found = []
    for name in names:
        case = Case(name, MESHES["FSDP2 x2"], shapes=((256, 512),))
        model = build(case)
        report = qs.explain(model, recipe=recipe_of(case), strict=True)
        storage = components.storage_of(model[0].weight)
        found.append(
            (
                report.rows[0].forward_gather_bytes,
                sum(part.nbytes for part in storage.components.values()),
                report.fallbacks,
            )
        )
    return found


def test_codes_and_scales_are_gathered() -> None:
    """2 ranks."""
    for by_rank in run_ranks(2, sent_and_stored, OF_WEIGHTS):
        for sent, stored, fallbacks in by_rank:
            assert 0 < sent <= stored and not fallbacks


def test_tensor_parallel_modules_are_those_of_one_process(show: Callable[[str], None]) -> None:
    """2 ranks. In forward and backward nothing is quantized, so only the order of sums differs, also across layers."""
    modules = ("Linear column", "Linear row", "LayerNormMLP swiglu", "TransformerLayer")
    cases = [
        TensorParallelCase(modules[(row + column) % 4], name, "tp 2", sequence_parallel=row % 2 == 0)
        for row, name in enumerate(OF_WEIGHTS)
        for column in (0, 2, 3)
    ]
    for case, results in zip(cases, zip(*run_ranks(2, table, cases), strict=True), strict=True):
        (unequal, worst, where), *_ = results
        show(f"{case.module} {case.recipe} {worst}")
        assert not unequal and worst <= ORDER_OF_SUMS, (case, unequal, worst, where)


def test_a_run_is_resumed_exported_and_imported(tmp_path: Path) -> None:
    """`quantshard train` on 2 processes; nothing is a fallback."""
    (tmp_path / "text.txt").write_text("weights as engines store them, " * 200)
    run, copy, served = tmp_path / "run", tmp_path / "copy", tmp_path / "served"
    sizes = "--hidden 64 --heads 2 --ffn 128 --layers 1 --seq-length 32 --global-batch 4 --eval-sequences 2".split()
    options = ["--recipe", "nvfp4-weights", "--data", tmp_path / "text.txt", "--nproc-per-node", 2, *sizes]
    result = quantshard("train", "--run", run, "--steps", 4, "--save-every", 2, *options)
    assert result.returncode == 0, result.stderr
    assert "nvfp4_1x16" in result.stdout and "fallback" not in result.stdout + result.stderr
    last = run / "checkpoints" / "step-000004"
    shutil.move(last, copy)
    result = quantshard("resume", run)
    assert result.returncode == 0 and "resumed after step 2" in result.stdout, result.stderr
    assert compare(last, copy).equal
    result = quantshard("export", last, "--layout", "compressed-tensors", "--out", served)
    assert result.returncode == 0 and "7 weights exact, 0 requantized" in result.stdout, result.stderr
    result = quantshard("import", served, "--out", tmp_path / "imported", "--recipe", "nvfp4-weights")
    assert result.returncode == 0 and "0 weights quantized, 0 requantized" in result.stdout, result.stderr
