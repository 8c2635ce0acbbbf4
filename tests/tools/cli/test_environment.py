"""What a run's bits depend on beside its settings: found, and compared with what was found before."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from quantshard import deterministic
from quantshard.tools.trainer import launch, restarts
from quantshard.tools.trainer.restarts import differences
from quantshard.tools.trainer.settings.config import TrainSettings

ROOT = Path(__file__).parents[3]
CPU = torch.device("cpu")


@pytest.fixture
def kept():
    with deterministic(False):
        yield


def test_found_on_a_cpu(kept):
    found = restarts.current_environment(TrainSettings(), CPU)
    assert json.loads(json.dumps(found)) == found
    assert found["deterministic"] is False and found["torch"] == torch.__version__
    assert found["python"].startswith(f"{sys.version_info.major}.{sys.version_info.minor}.")
    with deterministic():
        assert differences(found, restarts.current_environment(TrainSettings(), CPU)) == [
            "deterministic was False, is True"
        ]


def test_found_on_a_gpu(kept, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91002)
    device = torch.device("cuda", 0)
    found = restarts.current_environment(TrainSettings(), device)
    assert found["device"] == "NVIDIA H200" and found["attention"] == "cudnn, else flash, efficient, math"
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    with deterministic():
        on = restarts.current_environment(TrainSettings(), device)
    assert on["attention"] == "flash, else efficient, math"


def test_differences_are_named():
    before = {"torch": "2.11", "deterministic": True, "gone": "a"}
    assert differences(before, {"torch": "2.11"}) == []
    assert differences(before, {"torch": "2.12", "new": 1}) == ["torch was '2.11', is '2.12'", "new was None, is 1"]


def run_command(line, redirected="", **variables):
    """The exit code, and the lines of standard error, of a command in a shell."""
    shell = f'exec "$0" -m quantshard {line} {redirected}'
    # With an unbuffered standard output nothing is left to flush at exit.
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": ""} | variables
    done = subprocess.run(
        ["sh", "-c", shell, sys.executable], env=environment, capture_output=True, text=True, timeout=120
    )
    return done.returncode, done.stderr.splitlines()


@pytest.mark.exhaustive
def test_a_closed_output_is_nowhere():
    assert run_command("--version", ">&-") == (0, [])


def test_a_missing_local_rank_is_the_rank(monkeypatch):
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    assert launch.process_numbers() == (1, 2, 1)
