"""A run that is started again and again by the same command, as torchrun, SLURM and Kubernetes do; and its checkpoints
in another place than its folder.
"""

from __future__ import annotations

import json
import os
import shutil

import pytest

from quantshard.checkpoints.comparison import compare
from quantshard.checkpoints.manager import Manager
from quantshard.tools.trainer.run_dir import RunDir
from tests.distributed.commands import quantshard
from tests.distributed.shelf import SCHEME, Shelf
from tests.distributed.test_cli import SIZES, losses, one_line, text, train  # noqa: F401 (a fixture)

pytestmark = pytest.mark.distributed

TINY = [*SIZES.split(), "--layers", 1, "--save-every", 2, "--eval-every", 0]
NOT_DONE = 75


@pytest.fixture(scope="module")
def whole(text, tmp_path_factory):  # noqa: F811
    """A run of 6 steps that was not stopped, started as all of this file are."""
    run = tmp_path_factory.mktemp("whole") / "run"
    result = quantshard(*train(run, text, *TINY, "--decay-steps", 6, "--auto-resume"))
    assert result.returncode == 0 and not result.stderr and "resumed" not in result.stdout, result.stderr
    return run


def test_started_again_by_the_same_command(whole, text, tmp_path):  # noqa: F811
    run = tmp_path / "run"

    def again(*arguments, steps=6):
        return quantshard(*train(run, text, *TINY, "--decay-steps", 6, "--auto-resume", *arguments, steps=steps))

    shutil.copytree(whole, run)
    for step in (2, 4, 6):  # killed before its first checkpoint
        shutil.rmtree(run / "checkpoints" / f"step-{step:06d}")
    told = quantshard("status", run)
    assert told.returncode == NOT_DONE and f"{run}: not done, 0 of 6 steps are saved" in told.stdout
    result = again(steps=3)
    assert result.returncode == 0 and "has no complete checkpoint, so it begins again" in result.stdout, result.stderr
    assert losses(run)[:2] == losses(whole)[:2] and [record["step"] for record in losses(run)] == [1, 2, 3]
    assert quantshard("status", run).returncode == 0
    result = again()  # more steps
    assert result.returncode == 0 and "resumed after step 3" in result.stdout, result.stderr
    figures = [{k: v for k, v in record.items() if k != "heldout_loss"} for record in losses(run)]
    assert figures == [{k: v for k, v in record.items() if k != "heldout_loss"} for record in losses(whole)]
    assert compare(run / "checkpoints" / "step-000006", whole / "checkpoints" / "step-000006").equal
    told = quantshard("status", run, "--json")
    assert told.returncode == 0 and json.loads(told.stdout) == {"done": True, "step": 6, "steps": 6, "damaged": []}
    assert "done: 6 of 6 steps" in again().stdout
    one_line(again("--lr", 0.5), r"was started with lr = 0\.001, but lr = 0\.5 is")
    one_line(quantshard(*train(run, text, *TINY)), r"exists: go on with it by `quantshard resume .*` or --auto-resume")
    one_line(quantshard("status", tmp_path / "rum"), "there is no run in .*rum: it has no config.toml")


def test_what_failed_before_its_first_step(text, tmp_path):  # noqa: F811
    """2 ranks: an error that only the optimizer finds, and the same folder again."""
    run = tmp_path / "run"
    moments = ["--exp-avg-dtype", "fp8", "--beta1", 0.99, "--beta2"]
    one_line(quantshard(*train(run, text, *TINY, *moments, 0.9)), r"needs beta1\*\*2 < beta2")
    assert not RunDir(run).is_begun() and (run / "logs").is_dir()
    assert quantshard(*train(run, text, *TINY, *moments, 0.99, steps=4)).returncode == 0


@pytest.mark.exhaustive
def test_a_mesh_of_another_size_is_left(whole, text, tmp_path):  # noqa: F811
    """The processes that are left go on, in dp_shard; with as many as before the mesh is back."""
    run = tmp_path / "run"

    def started(processes, steps):
        mesh = ["--mesh", "dp_replicate=2", "--nproc-per-node", processes, "--decay-steps", 6]
        result = quantshard(*train(run, text, *TINY, *mesh, "--auto-resume", steps=steps))
        assert result.returncode == 0, result.stderr
        return result.stdout, RunDir(run).read_config()[0].mesh

    assert started(2, 2)[1] == "dp_replicate=2,dp_shard=1"
    said, mesh = started(1, 4)
    assert "the run had mesh = dp_replicate=2,dp_shard=1, which is not of 1 processes" in said and mesh == ""
    assert started(2, 6)[1] == "dp_replicate=2,dp_shard=1"
    for here, there in zip(losses(run), losses(whole), strict=True):
        assert abs(here["loss"] - there["loss"]) < 0.02  # bf16 activations, other order of sums


@pytest.mark.parametrize("kind", ["url", pytest.param("folder", marks=pytest.mark.exhaustive)])
def test_checkpoints_elsewhere(whole, text, tmp_path, kind):  # noqa: F811
    run, folder = tmp_path / "run", tmp_path / "there"
    place = f"{SCHEME}{folder}" if kind == "url" else str(folder)
    assert place not in ("", str(run))
    named = ["--checkpoints", place, "--decay-steps", 6, "--keep-last", 2]
    result = quantshard(*train(run, text, *TINY, *named, steps=3))
    assert result.returncode == 0 and f"saved in {place}/step-000003" in result.stdout, result.stderr
    assert not (run / "checkpoints").exists() and Manager(place, read_only=True).steps() == [2, 3]
    assert json.loads((folder / "of-run.json").read_text()) == {"run": str(run)}
    if kind == "url":  # as a kill leaves it between metadata and manifest
        (folder / "step-000003" / "manifest.json").write_bytes(b"")
    else:
        (folder / "step-000003" / ".metadata").unlink()
    assert quantshard("status", run, "--checkpoints", place).returncode == NOT_DONE
    if kind == "url":
        one_line(quantshard("status", run), "pass --checkpoints")
    result = quantshard("resume", run, "--steps", 6)
    assert result.returncode == 0 and f"resumed after step 2, from {place}/step-000002" in result.stdout, result.stderr
    assert f"skipped the incomplete checkpoint {place}/step-000003" in result.stdout
    assert compare(f"{place}/step-000006", whole / "checkpoints" / "step-000006").equal
    assert Manager(place, read_only=True).steps() == [4, 6]
    other = tmp_path / "other"
    shutil.copytree(run, other)  # somebody else's settings, which name these checkpoints
    says = f"is not known as this run's: of-run.json there names {run}; if it is, pass"
    one_line(quantshard("resume", other, "--steps", 8), says)
    one_line(quantshard(*train(tmp_path / "new", text, *TINY, *named)), f"holds checkpoints of {run}; name another")
    assert not (tmp_path / "new").exists()
    moved = f"{place}-moved"
    os.rename(folder, f"{folder}-moved")
    one_line(quantshard("resume", run, "--steps", 8), "is not known as this run's: of-run.json there is not there")
    result = quantshard("resume", other, "--steps", 7, "--checkpoints", moved)
    assert result.returncode == 0 and f"resumed after step 6, from {moved}/step-000006" in result.stdout, result.stderr
    assert quantshard("resume", other, "--steps", 7).returncode == 0  # it is its own now
    if kind == "url":
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(Shelf, "fails_at", ("read",))
            told = quantshard("status", other, "--checkpoints", moved)
            one_line(told, f"{moved} cannot be read .403: you may not read.")
