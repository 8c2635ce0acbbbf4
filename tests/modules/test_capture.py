"""Draws counted in tensors, as a CUDA graph needs them: the bits of draws counted on the host. Graphs themselves:
tests/distributed/test_graphs.py."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import quantshard as qs
from quantshard import compute, kernels
from quantshard import storage as storages
from quantshard.errors import ConfigurationError, UnsupportedOperationError


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
@pytest.mark.parametrize("quantized", [True, False])
@pytest.mark.parametrize("devices", [set(), {"cpu"}], ids=["oracle", "kernels"])
def test_counts_in_tensors_give_the_bits_of_counts_on_the_host(devices, quantized, monkeypatch):
    if devices and not (kernels.USABLE and not torch.cuda.is_available()):
        pytest.skip("kernels run on the CPU under Triton's interpreter only")
    monkeypatch.setattr(compute, "KERNEL_DEVICES", devices)
    expected = trained(build(quantized))
    assert expected["0.weight_draws"].item() == 2
    model = build(quantized)
    monkeypatch.setattr(storages, "counts_on_host", lambda state: False)
    found = trained(model)
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found)


def test_what_draws_is_not_captured_with_counts_on_the_host(monkeypatch):
    model = build(True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(UnsupportedOperationError, match=r"call quantshard\.capturable_\(model\), run a step"):
        trained(model)
    with pytest.raises(UnsupportedOperationError, match=r"capturable_"), torch.no_grad():
        model[1].weight.add_(1.0)  # as stock optimizers do
    assert all(value.item() == 0 for name, value in model.state_dict().items() if name.endswith("_draws"))


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
