"""`quantshard train --mesh cp=N`: the losses of a run whose sequences are whole, also after it resumed without cp."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.commands import quantshard
from tests.tools.cli import sources

pytestmark = pytest.mark.distributed

SIZES = "--hidden 64 --heads 4 --kv-heads 2 --layers 2 --seq-length 48 --global-batch 4 --eval-sequences 6".split()
TOLERANCE = 3e-6
"""Relative, of float32 losses and norms after at most 4 steps: sums over tokens in another order, 48 to 192 of them."""
FP8_TOLERANCE = 1e-3
"""Relative: a last bit of attention changes a code in ten thousand, by a step of 2**-4 or 2**-3."""


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("data") / "texts.jsonl"
    sources.jsonl(path, sources.texts(80))
    return path


def train(run: Path, text: Path, mesh: str, *more: Any) -> list[dict[str, float]]:
    options = ["--mesh", mesh, "--save-every", 2, "--eval-every", 2, "--device", "cpu", *SIZES, *more]
    result = quantshard("train", "--run", run, "--data", text, "--steps", 4, *options)
    assert result.returncode == 0 and not result.stderr, result.stderr
    return records(run)


def records(run: Path) -> list[dict[str, float]]:
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [{key: line[key] for key in ("step", "loss", "grad_norm", "heldout_loss") if key in line} for line in lines]


def check_close(found: list[dict[str, float]], wanted: list[dict[str, float]]) -> None:
    assert [record["step"] for record in found] == [1, 2, 3, 4]
    for record, other in zip(found, wanted, strict=True):
        assert record == pytest.approx(other, rel=TOLERANCE, abs=0), (record, other)


@pytest.mark.parametrize("packing", ["stream", "documents", "best-fit"])
def test_losses_are_those_of_whole_sequences(text: Path, tmp_path: Path, packing: str) -> None:
    options = ["--packing", packing, "--recipe", "bf16", "--params-dtype", "float32"]
    whole = train(tmp_path / "whole", text, "dp_shard=1", *options)
    assert sum("heldout_loss" in record for record in whole) == 2
    meshes = {"stream": ["cp=2", "cp=3", "dp_shard=2,cp=2"], "documents": ["cp=2"], "best-fit": ["cp=2,tp=2"]}
    for number, mesh in enumerate(meshes[packing]):
        rotation = ["--rotate-method", "alltoall"] if mesh == "cp=3" else []
        check_close(train(tmp_path / str(number), text, mesh, *options, *rotation), whole)


def test_experts_get_the_tokens_of_all_ranks(text: Path, tmp_path: Path) -> None:
    options = ["--recipe", "bf16", "--params-dtype", "float32", "--experts", 4, "--heldout", 0]
    whole = train(tmp_path / "whole", text, "dp_shard=1", *options)
    check_close(train(tmp_path / "shared", text, "cp=2", *options), whole)


def test_resumes_with_and_without_cp(text: Path, tmp_path: Path) -> None:
    """On the same mesh of two ranks the losses have the same bits; tests/distributed/test_cli.py has other meshes."""
    options = ["--recipe", "current", "--params-dtype", "float32"]
    found = {mesh: train(tmp_path / mesh, text, mesh, *options) for mesh in ("cp=2", "dp_shard=1")}
    for before, after in (("cp=2", "cp=2"), ("cp=2", "dp_shard=1"), ("dp_shard=1", "cp=2")):
        run = tmp_path / f"{before},{after}"
        shutil.copytree(tmp_path / before, run)
        shutil.rmtree(run / "checkpoints" / "step-000004")
        result = quantshard("resume", run, "--mesh", after)
        assert result.returncode == 0, result.stderr
        resumed = records(run)
        assert resumed[:2] == found[before][:2]
        if before == after:
            assert resumed == found[before]
        for record, other in zip(resumed, found[before], strict=True):
            assert record == pytest.approx(other, rel=FP8_TOLERANCE)
    assert len({json.dumps(found[mesh]) for mesh in found}) == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--seq-length", 50], "seq_length = 50 is not divisible by 2 x cp = 4; choose a multiple"),
        (["--rotate-method", "alltoall"], "packing = 'documents' needs rotate_method = 'allgather'; change one"),
        (["--compile"], "cp in the mesh cannot be combined with compile; leave one out"),
        (
            ["--mesh", "ep=2,cp=2", "--experts", 4],
            "cp in the mesh cannot be combined with ep in the mesh; leave one out",
        ),
    ],
)
def test_what_is_not_supported_is_named(text: Path, tmp_path: Path, options: list[Any], message: str) -> None:
    result = quantshard("train", "--run", tmp_path / "run", "--data", text, "--mesh", "cp=2", *SIZES, *options)
    assert result.returncode == 1 and message in result.stderr, result.stderr
