"""torch.compile where kernels run: a normalization and the layers behind it are one operator, with the eager bits.

Inductor is held to the same bits: it makes nothing here that rounds, but additions of two tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import quantshard as qs
from quantshard.modules import context, fused
from tests.distributed.models import RECIPES

pytest.importorskip("triton")
pytestmark = [
    pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning"),  # NumPy's, in the interpreter
    pytest.mark.filterwarnings("ignore:.*Function'> should not be instantiated:DeprecationWarning"),  # Dynamo's
]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SIZE, FFN, TOKENS = 24, 40, 5

Compiler = Callable[[Callable[..., Any]], Callable[..., Any]] 

MODULES: dict[str, Callable[..., nn.Module]] = {
    "norm and linear": lambda **o: qs.LayerNormLinear(SIZE, FFN, bias=False, normalization="RMSNorm", **o),
    "norm and three linears": lambda **o: qs.LayerNormLinear(SIZE, FFN, parameters_split=dict(a=20, b=12, c=8), **o),
    "mlp": lambda **o: qs.LayerNormMLP(SIZE, FFN, zero_centered_gamma=True, **o),
    "gated mlp": lambda **o: qs.LayerNormMLP(SIZE, FFN, bias=False, activation="swiglu", eps=1e-6, **o),
    "recomputing mlp": lambda **o: qs.LayerNormMLP(SIZE, FFN, recompute_activation=True, return_bias=True, **o),
    "layer": lambda **o: qs.TransformerLayer(
        SIZE, FFN, 4, 2, hidden_dropout=0.0, attention_dropout=0.0, normalization="RMSNorm", activation="swiglu",
        fuse_qkv_params=True, qkv_weight_interleaved=False, attention_backend="math", **o,
    ),
}  # fmt: skip


def build(name: str, recipe: str, stored: bool = True) -> nn.Module:
    torch.manual_seed(3)
    with qs.quantized_model_init(enabled=stored, recipe=RECIPES[recipe]):
        return MODULES[name](params_dtype=torch.bfloat16, device="cpu").to(DEVICE)


def aot_eager(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, fullgraph=True, backend="aot_eager")


def trained(module: nn.Module, recipe: str, compiler=None, inside=False) -> dict[str, Tensor]:
    found = {}

    def within(x):
        with qs.autocast(recipe=RECIPES[recipe]):
            return module(x)
    function = within if inside else module
    if compiler: function = compiler(function)
    for step in range(3):
        x = torch.randn(TOKENS, 2, SIZE, generator=torch.Generator().manual_seed(step)).to(DEVICE, torch.bfloat16).requires_grad_()
        with qs.autocast(recipe=RECIPES[recipe]):
            y = function(x)
        y = y if isinstance(y, tuple) else (y,)
        sum(each.float().sin().sum() for each in y).backward()
        found |= {f"y{step}.{i}": each.detach() for i, each in enumerate(y)} | {f"dx{step}": x.grad}
        found |= {f"d{name}{step}": p.grad for name, p in module.named_parameters() if p.grad is not None}
        module.zero_grad()
    return found | {name: t.clone() for name, t in module.state_dict().items()}


@pytest.mark.parametrize("stored", [True, False])
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", MODULES)
def test_bits(name, recipe, stored, kernels_on_cpu, monkeypatch):
    torch._dynamo.reset()
    used = []
    for function in ("_run_mlp", "_run_norm_linear"):
        real = getattr(fused, function)
        monkeypatch.setattr(fused, function, lambda *a, real=real: used.append(real) or real(*a))
    eager = trained(build(name, recipe, stored), recipe)
    n = len(used)
    assert n
    torch._dynamo.utils.counters.clear()
    compiled = trained(build(name, recipe, stored), recipe, aot_eager)
    assert len(used) == 2 * n
    assert [k for k in eager if not torch.equal(eager[k], compiled[k])] == []
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
