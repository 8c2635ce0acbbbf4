"""Deterministic mode of `quantshard train` and `resume`: set in each process, recorded, and missed when changed."""

import json
import re
import shutil
from pathlib import Path

import pytest

from quantshard.checkpoints.comparison import compare
from quantshard.determinism import VARIABLES
from quantshard.tools.trainer.run_dir import RunDir
from tests.distributed.commands import quantshard
from tests.distributed.forked import STARTS
from tests.distributed.test_cli import ROOT, SECONDS, SIZES, command, environment, losses

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    folder = tmp_path_factory.mktemp("texts")
    shutil.copy(ROOT / "LICENSE", folder / "text.txt")
    return folder


def train(run, text, *arguments):
    options = ["--nproc-per-node", 2, "--steps", 4, "--save-every", 2, "--eval-every", 0]
    return ["train", "--run", run, "--data", text, *options, *SIZES.split(), *arguments]


def starts(run):
    return [json.loads(line) for line in (run / "starts.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module", params=STARTS)
def trained(text, tmp_path_factory, request) -> Path:
    """A run in processes of its own, which begin without the variables; each tells what it has at its end."""
    folder = tmp_path_factory.mktemp("runs")
    (folder / "site").mkdir()
    (folder / "site" / "sitecustomize.py").write_text(TELL)
    begun = environment(first=str(folder / "site"), TOLD=str(folder))
    begun = {name: value for name, value in begun.items() if name not in VARIABLES}
    process = request.param(command(*train(folder / "run", text, "--deterministic")), begun)
    out, err = process.communicate(timeout=SECONDS)
    assert process.returncode == 0 and "deterministic mode is on" in out, err
    assert "WARNING" not in out
    return folder / "run"


TELL = """
import json, os

def told():
    found = {name: os.environ.get(name) for name in ("CUBLAS_WORKSPACE_CONFIG", "NCCL_ALGO")}
    found["on"] = torch.are_deterministic_algorithms_enabled()
    found["filled"] = torch.utils.deterministic.fill_uninitialized_memory
    with open(os.path.join(os.environ["TOLD"], f"rank-{os.environ['RANK']}.json"), "w") as file:
        json.dump(found, file)
    end()

if "RANK" in os.environ:
    import torch, torch.distributed
    end, torch.distributed.destroy_process_group = torch.distributed.destroy_process_group, told
"""


def test_it_is_set_in_every_process(trained):
    for rank in (0, 1):
        told = json.loads((trained.parent / f"rank-{rank}.json").read_text())
        assert told == {**VARIABLES, "on": True, "filled": False}


def test_it_is_recorded(trained):
    assert RunDir(trained).read_config()[0].deterministic is True
    (start,) = starts(trained)
    assert (start["step"], start["processes"], start["mesh"]) == (0, 2, "dp_shard=2")
    assert start["environment"]["deterministic"] is True


def resumed(trained, run, *arguments):
    """From step 2 on."""
    if not run.exists():
        shutil.copytree(trained, run)
    shutil.rmtree(run / "checkpoints" / "step-000004")
    result = quantshard("resume", run, *arguments)
    assert result.returncode == 0 and "resumed after step 2" in result.stdout, result.stderr
    return re.findall(r"WARNING: .*", result.stdout.replace("\n", " "))


def test_same_bits_and_no_warning(trained, tmp_path):
    assert resumed(trained, tmp_path / "run") == []
    assert losses(tmp_path / "run") == losses(trained)
    assert compare(*(run / "checkpoints" / "step-000004" for run in (trained, tmp_path / "run"))).equal
    assert [start["step"] for start in starts(tmp_path / "run")] == [0, 2]


@pytest.mark.exhaustive
def test_another_version_is_missed(trained, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(trained, run)
    (start,) = starts(run)
    start["environment"] |= {"torch": "2.0.1", "variables": {**VARIABLES, "NCCL_PROTO": "LL"}}
    (run / "starts.jsonl").write_text(json.dumps(start) + "\n" + '{"step": 0, "proc')  # cut off by a kill
    (warning,) = resumed(trained, run)
    assert re.search(r"losses may differ .* because torch was 2\.0\.1, is \S+; NCCL_PROTO was LL, is not set", warning)
    assert resumed(trained, run) == []  # the change has become what was before


@pytest.mark.exhaustive
def test_turned_off_and_on(trained, tmp_path):
    run = tmp_path / "run"
    (warning,) = resumed(trained, run, "--no-deterministic")
    assert "deterministic was on, is off" in warning
    assert RunDir(run).read_config()[0].deterministic is False
    assert resumed(trained, run) == []  # it stays off
    (warning,) = resumed(trained, run, "--deterministic")
    assert "deterministic was off, is on" in warning


@pytest.mark.exhaustive
def test_never_on(text, tmp_path):
    result = quantshard(*train(tmp_path / "run", text, "--no-deterministic"))
    assert result.returncode == 0 and "deterministic mode is off" in result.stdout, result.stderr
    assert starts(tmp_path / "run")[0]["environment"]["deterministic"] is False
    result = quantshard("resume", tmp_path / "run", "--steps", 5)
    assert "deterministic mode is off" in result.stdout and "WARNING" not in result.stdout
