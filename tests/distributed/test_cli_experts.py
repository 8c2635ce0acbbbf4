"""`quantshard train --mesh ep=N`: experts spread over processes learn as in one, and a run goes on on any mesh."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from quantshard.checkpoints.comparison import compare
from tests.distributed.commands import quantshard
from tests.distributed.test_cli import losses

pytestmark = pytest.mark.distributed

SIZES = (
    "--hidden 32 --heads 2 --layers 2 --ffn 48 --experts 6 --seq-length 16 --global-batch 12 --eval-sequences 4 "
    "--warmup 1 --steps 4 --save-every 2 --ema 0.5"
)
CASES = {
    "ep=2": ("layers.0=nvfp4,*=delayed --preset lean8", {"dp_shard=3": 3, "ep=2": 2}),
    "dp_shard=1": ("mxfp8", {"ep=2": 2, "ep=3": 3}),
    "dp_shard=2,ep=2": ("delayed --optimizer muon", {"dp_replicate=2,ep=2": 4, "ep=2": 2}),
}
"""By the mesh of a run: its recipe and other flags, and the meshes that it goes on on, with their processes."""


@pytest.mark.exhaustive  # tests/distributed/test_experts.py loads checkpoints on other meshes
@pytest.mark.parametrize("mesh", CASES)
def test_runs_go_on_on_any_mesh(tmp_path: Path, mesh: str) -> None:
    """1 to 4 ranks: what is loaded has the bits of what was saved; on the same mesh the run has the same end."""
    (flags, others), text, whole = CASES[mesh], tmp_path / "text.txt", tmp_path / "whole"
    text.write_text(Path(__file__).read_text() * 2)
    done = quantshard(
        "train", "--run", whole, "--data", text, "--mesh", mesh, *SIZES.split(), "--recipe", *flags.split()
    )
    assert done.returncode == 0, done.stderr
    for other, ranks in others.items():
        run, copied = tmp_path / other, tmp_path / f"loaded {other}"
        shutil.copytree(whole, run)
        shutil.rmtree(run / "checkpoints" / "step-000004")
        done = quantshard("resume", run, "--nproc-per-node", ranks, "--mesh", other, "--copy-to", copied)
        assert done.returncode == 0, done.stderr
        assert compare(whole / "checkpoints" / "step-000002", copied).equal, other
        ends = [losses(each)[-1]["heldout_loss"] for each in (whole, run)]
        if other == mesh:
            assert losses(run) == losses(whole)
            assert compare(*(each / "checkpoints" / "step-000004" for each in (whole, run))).equal
        assert ends[0] == pytest.approx(ends[1], rel=0.01)  # sums in another order, activations scaled by process


def test_as_in_one_process(tmp_path: Path) -> None:
    """1 and 2 ranks: losses and norms of gradients, clipped, in float32; and statistics. A
    gradient outside experts is of the mean loss of a process's own tokens, of which there are half as many."""
    text, found, samples = tmp_path / "text.txt", [], []
    text.write_text(Path(__file__).read_text() * 2)
    for mesh in ("dp_shard=1", "ep=2"):
        run = tmp_path / mesh
        flags = f"--mesh {mesh} {SIZES} --recipe bf16 --params-dtype float32 --clip 0.5 --statistics-every 2"
        done = quantshard("train", "--run", run, "--data", text, *flags.split())
        assert done.returncode == 0, done.stderr
        found.append([(each["loss"], each["grad_norm"]) for each in losses(run)])
        samples.append([json.loads(line) for line in (run / "statistics.jsonl").read_text().splitlines()])
    one, spread = found
    assert len(one) == 4 and all(norm > 0.5 for _, norm in one)
    for a, b in zip(one, spread, strict=True):
        assert a == pytest.approx(b, rel=1e-4)
    for one, spread in zip(*samples, strict=True):
        assert one["step"] == spread["step"] and not one["alarms"] + spread["alarms"]
        for row, other in zip(one["rows"], spread["rows"], strict=True):
            place, _ = [(each.pop("name"), each.pop("role")) for each in (row, other)]
            if place[1] == "grad_output" and not place[0].rpartition(".")[0].endswith(("gate", "up", "down")):
                row["amax"] *= 2
            assert row.pop("load", None) == other.pop("load", None), place
            assert row == pytest.approx(other, rel=1e-3), place
