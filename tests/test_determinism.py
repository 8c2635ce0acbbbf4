"""Deterministic mode: what it sets, what it refuses, that it ends, and that layers and compiled layers run under it."""

from __future__ import annotations

import ast
import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import quantshard as qs
from quantshard import determinism, kernel_dispatch
from quantshard.determinism import CUBLAS, NCCL, OFF, ON, _TorchSettings
from quantshard.errors import ConfigurationError
from quantshard.modules.attention_backends import AUTO, backend_order


@pytest.fixture(autouse=True)
def as_before(monkeypatch):
    """Settings of the process are put back, whatever a test does; it begins without the variables."""
    before = _TorchSettings.now()
    for name in (CUBLAS, NCCL):
        monkeypatch.delenv(name, raising=False)
    yield
    before.put()


@pytest.fixture
def gpu(monkeypatch):
    """A GPU that is there and not yet in use."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)


def test_plain_call_stays():
    OFF.put()
    qs.deterministic()
    assert _TorchSettings.now() == ON
    assert torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled()
    assert not torch.utils.deterministic.fill_uninitialized_memory and not torch.backends.cudnn.benchmark
    assert (os.environ[CUBLAS], os.environ[NCCL]) == (":4096:8", "Ring")
    qs.deterministic(False)
    assert _TorchSettings.now() == OFF


@pytest.mark.parametrize("mode", [True, False])
def test_context_puts_back_what_was(mode):
    own = _TorchSettings(enabled=True, warn_only=True, fill=True, cudnn=False, cudnn_benchmark=True)
    own.put()
    with pytest.raises(KeyError), qs.deterministic(mode):
        assert _TorchSettings.now() == (ON if mode else OFF)
        with qs.deterministic(not mode):
            assert _TorchSettings.now() == (OFF if mode else ON)
        assert _TorchSettings.now() == (ON if mode else OFF)
        raise KeyError
    assert _TorchSettings.now() == own


def test_variables_that_are_set_stay(gpu, monkeypatch):
    monkeypatch.setenv(CUBLAS, ":16:8")
    monkeypatch.setenv(NCCL, "allreduce:tree")
    with qs.deterministic():
        assert (os.environ[CUBLAS], os.environ[NCCL]) == (":16:8", "allreduce:tree")


@pytest.mark.parametrize(
    ("name", "value", "fine"),
    [
        (CUBLAS, ":0:0", False), (CUBLAS, "", False), (CUBLAS, ":4096:8", True),
        (NCCL, "NVLS", False), (NCCL, "ring,nvlstree", False), (NCCL, "^Tree", False), (NCCL, "^NVLS", True),
        (NCCL, "^nvls,nvlstree", True), (NCCL, "Ring", True),
    ],
)  # fmt: skip
def test_variables_that_are_not_deterministic(name, value, fine, gpu, monkeypatch):
    monkeypatch.setenv(name, value)
    if fine:
        qs.deterministic()
        return
    OFF.put()
    with pytest.raises(ConfigurationError, match=name):
        qs.deterministic()
    assert _TorchSettings.now() == OFF
    qs.deterministic(False)  # asks for nothing
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    qs.deterministic()  # on a CPU the variable decides nothing


def test_too_late_for_cublas(gpu, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(ConfigurationError, match=f"before the GPU is used, or {CUBLAS}=:4096:8"):
        qs.deterministic()
    assert CUBLAS not in os.environ
    monkeypatch.setenv(CUBLAS, ":4096:8")
    qs.deterministic()


@pytest.mark.parametrize(("backend", "late"), [("cpu:gloo,cuda:nccl", True), ("cpu:gloo", False)])
def test_too_late_for_nccl(backend, late, gpu, monkeypatch):
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_backend_config", lambda: backend)
    if late:
        with pytest.raises(ConfigurationError, match="before init_process_group"):
            qs.deterministic()
        monkeypatch.setenv(NCCL, "Ring")
    qs.deterministic()


def test_attention_is_never_cudnn(gpu, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.version, "hip", None)
    device = torch.device("cuda", 0)
    qs.deterministic(False)
    assert backend_order(AUTO, device, torch.bfloat16, 128, True)[0] == "cudnn"
    with qs.deterministic():
        assert backend_order(AUTO, device, torch.bfloat16, 128, True) == ("flash", "efficient", "math")
    assert backend_order(AUTO, device, torch.bfloat16, 128, True)[0] == "cudnn"


def gradients(layer, x):
    layer.zero_grad(set_to_none=True)
    with qs.autocast(recipe="mxfp8"):
        layer(x).float().square().mean().backward()
    return [param.grad.clone() for param in layer.parameters()]


@pytest.mark.filterwarnings("ignore:.*Function'> should not be instantiated:DeprecationWarning")  # by Dynamo
def test_compiled_layer_is_compiled_anew_under_it():
    torch.manual_seed(0)
    with qs.quantized_model_init(recipe="mxfp8"):
        layer = qs.LayerNormMLP(64, 96, params_dtype=torch.bfloat16)
    x = torch.randn(32, 64, dtype=torch.bfloat16)
    seen = []

    def backend(graph, inputs):
        seen.append(torch.are_deterministic_algorithms_enabled())
        return graph.forward

    torch._dynamo.reset()
    compiled = torch.compile(layer, backend=backend, fullgraph=True)
    with kernel_dispatch.kernels_only_on("cpu"):
        with qs.deterministic(False):
            plain = gradients(compiled, x)
        with qs.deterministic():
            first, second, eager = gradients(compiled, x), gradients(compiled, x), gradients(layer, x)
    assert seen[0] is False and seen[-1] is True and len(seen) == 2 * seen.count(True)
    assert all(map(torch.equal, first, second)) and all(map(torch.equal, first, eager))
    assert all(map(torch.equal, first, plain))


def test_kernels_hold_no_tuning_and_no_sums_by_atomics():
    """What the docs say of them: the only atomics are maxima, and nothing is chosen by measurement; statistics of
    quantization are sums by atomics, which nothing is trained by."""
    names, folder = set(), Path(determinism.__file__).parent / "kernels"
    for path in set(folder.rglob("*.py")) - {folder / "quantize" / "error.py"}:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        names |= {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    chosen = ("autotune", "do_bench", "multi_processor_count")
    assert {name for name in names if name.startswith("atomic") or name in chosen} == {"atomic_max"}
