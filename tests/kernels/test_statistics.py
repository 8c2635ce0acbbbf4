"""Statistics where kernels run: the numbers that the oracle has, and training keeps its bits."""

from __future__ import annotations

import pytest
import torch
from torch import nn

pytest.importorskip("triton")

import quantshard as qs
from quantshard import kernel_dispatch
from quantshard.optimizers import FusedAdam
from tests.covering import exhaustive

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, in the interpreter
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def trained(recipe, every, kernels, monkeypatch):
    """State and samples of two steps of layers whose inputs and gradients are quantized by fused kernels."""
    monkeypatch.setattr(kernel_dispatch, "KERNEL_DEVICES", {DEVICE} if kernels else set())
    torch.manual_seed(0)
    with qs.quantized_model_init(recipe=recipe):
        model = nn.Sequential(
            qs.LayerNormMLP(32, 48, activation="swiglu", params_dtype=torch.bfloat16, device=DEVICE),
            qs.LayerNormMLP(32, 32, activation="gelu", params_dtype=torch.bfloat16, device=DEVICE),
        )
    optimizer, found = FusedAdam(model.parameters(), lr=1e-3), []
    with qs.Statistics(model, optimizer, every=every, saturation=1) as statistics:
        for step in range(2):
            x = torch.randn(32, 32, generator=torch.Generator().manual_seed(step)).bfloat16().to(DEVICE)
            with qs.autocast(recipe=recipe):
                model(x).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            found += statistics.step()
        found += statistics.close()
    return [value for value in model.state_dict().values() if isinstance(value, torch.Tensor)], found


RECIPES = ("delayed", "current", "block", "mxfp8", "nvfp4")


@pytest.mark.parametrize("recipe", exhaustive([(name,) for name in RECIPES], [("mxfp8",)]))
def test_kernels_tell_what_the_oracle_does(recipe, monkeypatch):
    plain, _ = trained(recipe, 0, True, monkeypatch)
    bits, samples = trained(recipe, 1, True, monkeypatch)
    assert all(
        torch.equal(one.view(torch.uint8), other.view(torch.uint8)) for one, other in zip(plain, bits, strict=True)
    )
    _, wanted = trained(recipe, 1, False, monkeypatch)
    assert len(samples) == len(wanted) == 2
    for row, other in zip(samples[0].rows, wanted[0].rows, strict=True):  # of the second, weights differ by sums
        found, exact = row.to_dict(), other.to_dict()
        assert found.keys() == exact.keys()
        for part, whole in ((found, exact), (found.get("wgrad", {}), exact.get("wgrad", {}))):
            for key in part.keys() - {"name", "role", "wgrad"}:
                assert part[key] == pytest.approx(whole[key], rel=1e-3, abs=1e-6), (row.name, row.role, key)
