"""What a run's bits depend on beside its settings: found, and compared with what was found before."""

import json
import sys

import pytest
import torch

from quantshard import deterministic
from quantshard.trainer import environment
from quantshard.trainer.environment import differences
from quantshard.trainer.settings.config import TrainSettings

CPU = torch.device("cpu")


@pytest.fixture
def kept():
    with deterministic(False):
        yield


def test_found_on_a_cpu(kept, monkeypatch):
    for name in ("NCCL_PROTO", "MKL_CBWR", "CUBLASLT_WORKSPACE_SIZE", "NCCL_DEBUG", "TORCHINDUCTOR_CACHE_DIR"):
        monkeypatch.setenv(name, "x")
    found = environment.current_environment(TrainSettings(), CPU)
    assert json.loads(json.dumps(found)) == found
    assert found["deterministic"] is False and found["torch"] == torch.__version__ and "cuda" not in found
    assert found["python"].startswith(f"{sys.version_info.major}.{sys.version_info.minor}.")
    assert {"NCCL_PROTO", "MKL_CBWR", "CUBLASLT_WORKSPACE_SIZE"} <= set(found["variables"])
    assert not {"NCCL_DEBUG", "TORCHINDUCTOR_CACHE_DIR"} & set(found["variables"])
    with deterministic():
        assert differences(found, environment.current_environment(TrainSettings(), CPU)) == [
            "deterministic was off, is on"
        ]


def test_found_on_a_gpu(kept, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91002)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 28, 9))
    device = torch.device("cuda", 0)
    found = environment.current_environment(TrainSettings(), device)
    assert (found["device"], found["cuda"], found["cudnn"], found["nccl"]) == ("NVIDIA H200", "13.0", "91002", "2.28.9")
    assert found["triton"] and found["attention"] == "cudnn, else flash, efficient, math"
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    with deterministic():
        on = environment.current_environment(TrainSettings(), device)
    assert on["attention"] == "flash, else efficient, math"


def test_differences_are_named():
    before = {"torch": "2.11", "deterministic": True, "gone": "a", "variables": {"NCCL_ALGO": "Ring", "MKL_CBWR": "A"}}
    now = {"torch": "2.12", "deterministic": True, "variables": {"NCCL_ALGO": "Tree", "NCCL_PROTO": "LL"}}
    assert differences(before, before) == []
    assert differences(before, now) == [
        "torch was 2.11, is 2.12",
        "gone was a, is not set",
        "NCCL_ALGO was Ring, is Tree",
        "MKL_CBWR was A, is not set",
        "NCCL_PROTO was not set, is LL",
    ]
