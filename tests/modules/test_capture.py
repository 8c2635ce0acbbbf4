"""Draws counted in tensors, as a CUDA graph needs them: the bits of draws counted on the host. Graphs themselves:
tests/distributed/test_graphs.py."""

from __future__ import annotations

import copy
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import quantshard as qs
from quantshard import kernel_dispatch, kernels
from quantshard.errors import ConfigurationError, UnsupportedOperationError
from quantshard.modules.graphs import recorder
from quantshard.tensor import parameter_state
from tests.interpreter import prepared_once


def build(quantized: bool) -> nn.Module:
    torch.manual_seed(2)
    with qs.quantized_model_init(quantized, "nvfp4"):
        return nn.Sequential(
            qs.LayerNormLinear(40, 70, params_dtype=torch.bfloat16, device="cpu"),
            qs.Linear(70, 33, params_dtype=torch.bfloat16, device="cpu"),
        )


def trained(model: nn.Module, steps: int = 2) -> dict[str, Tensor]:
    """Gradients of some steps, and what a checkpoint holds after them."""
    found = {}
    for step in range(steps):
        x = torch.randn(21, 40, generator=torch.Generator().manual_seed(step)).bfloat16().requires_grad_()
        with qs.autocast(recipe="nvfp4"):
            model(x).float().sin().sum().backward()
        found |= {f"{step} {name}": p.grad.clone() for name, p in model.named_parameters()} | {f"{step} x": x.grad}
        model.zero_grad()
    return found | {name: value.clone() for name, value in model.state_dict().items()}


@pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")  # NumPy's, in the interpreter
@pytest.mark.parametrize(
    ("devices", "quantized"),
    [
        ({"cpu"}, True),
        (set(), False),
        pytest.param(set(), True, marks=pytest.mark.exhaustive),
        pytest.param({"cpu"}, False, marks=pytest.mark.exhaustive),
    ],
    ids=["kernels, quantized", "oracle", "oracle, quantized", "kernels"],
)
def test_counts_in_tensors_give_the_bits_of_counts_on_the_host(devices, quantized, monkeypatch):
    if devices and not (kernels.USABLE and not torch.cuda.is_available()):
        pytest.skip("kernels run on the CPU under Triton's interpreter only")
    monkeypatch.setattr(kernel_dispatch, "KERNEL_DEVICES", devices)
    with prepared_once() if devices else nullcontext():
        expected = trained(build(quantized))
        assert expected["0.weight_draws"].item() == 2
        model = build(quantized)
        monkeypatch.setattr(parameter_state, "counts_on_host", lambda state: False)
        found = trained(model)
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found)


def test_what_draws_is_not_captured_with_counts_on_the_host(monkeypatch):
    model = build(True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(UnsupportedOperationError, match=r"call quantshard\.capturable_\(model\), run a step"):
        trained(model)
    monkeypatch.setattr(parameter_state, "counts_on_host", lambda state: False)
    trained(model, steps=1)
    assert all(value.item() == 1 for name, value in model.state_dict().items() if name.endswith("_draws"))


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor:UserWarning")  # deepcopy's
@pytest.mark.parametrize("quantized", [True, False])
def test_counts_go_where_the_weights_go(quantized):
    """A fake tensor stands for one on a GPU."""
    layer = build(quantized)[1]
    state = layer.weight_state("weight")
    with FakeTensorMode():
        state[parameter_state.RNG_DRAWS] = torch.zeros(1, dtype=torch.int64, device="cuda")
    before = state[parameter_state.RNG_DRAWS]
    copied = copy.deepcopy(layer).weight_state("weight")[parameter_state.RNG_DRAWS]
    assert copied is not before and copied.device.type == "cuda"
    for move in (lambda: layer.to("meta"), lambda: layer.to_empty(device="cpu")):
        move()
        assert layer.weight_state("weight")[parameter_state.RNG_DRAWS].device.type == "cpu"
    with FakeTensorMode():
        layer.weight_state("weight")[parameter_state.RNG_DRAWS] = torch.zeros(1, dtype=torch.int64, device="cuda")
    layer.to_empty(device="cpu")
    assert layer.weight_state("weight")[parameter_state.RNG_DRAWS].device.type == "cpu"


def test_every_weight_that_draws_is_counted():
    """As those that a checkpoint holds draws of."""
    model = nn.Sequential(build(False), build(True), nn.Linear(4, 4))
    with qs.quantized_model_init(recipe="nvfp4"):
        model.append(qs.GroupedLinear(2, 40, 40, device="cpu"))
    assert {f"{name}_draws" for name in recorder._states(model)} == {n for n in model.state_dict() if "_draws" in n}


def test_weights_on_the_meta_device_are_refused_and_others_on_a_cpu_are_left_alone():
    with torch.device("meta"):
        abstract = nn.Sequential(nn.Linear(4, 4), qs.Linear(40, 40))
    with pytest.raises(ConfigurationError, match=r"1\.weight is on the meta device"):
        qs.capturable_(abstract)
    model = build(False)
    before = trained(model, steps=1)
    qs.capturable_(model)
    after = model.state_dict()
    assert all(after[name].device.type == "cpu" for name in after)
    assert all(torch.equal(after[name], before[name]) for name in after)
