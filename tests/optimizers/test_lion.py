"""An optimizer of one's own on `ElementwiseOptimizer`: Lion is its formula, and all else comes with the base."""

import pytest
import torch

from quantshard import Linear, quantized_model_init
from quantshard.optimizers import ElementwiseOptimizer, StateSpec
from tests.distributed.models import set_gradients
from tests.tensor.test_tensor import contents, differing, same

SETTINGS = {"lr": 1e-2, "betas": (0.9, 0.99), "weight_decay": 0.1}


class Lion(ElementwiseOptimizer):
    states = (StateSpec("exp_avg"),)  # Chen et al., 2023

    def update(self, param, grad, master, states, settings):
        (b1, b2), lr, m = settings["betas"], settings["lr"], states["exp_avg"]
        direction = (b1 * m + (1 - b1) * grad).sign() + settings["weight_decay"] * master
        return master - lr * direction, {"exp_avg": b2 * m + (1 - b2) * grad}


@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8], ids=["fp32", "fp8"])
@pytest.mark.parametrize("recipe", ["block", "mxfp8"])
def test_masters_follow_lion_exactly(recipe, dtype):
    with quantized_model_init(recipe=recipe):
        model = Linear(150, 70, params_dtype=torch.bfloat16)  # of which the bias is no matrix: its states stay float32
    optimizer, twin = Lion(model.parameters(), SETTINGS, state_dtypes={"exp_avg": dtype}), model.weight.detach().clone()
    p, m = ([optimizer.state[q]["master_param"].clone() for q in model.parameters()], [0.0, 0.0])
    for step in range(4):
        set_gradients(model, step)
        m[0] = m[0] if dtype is torch.float32 else optimizer.get_unscaled_state(model.weight, "exp_avg")
        for i, q in enumerate(model.parameters()):
            p[i] = p[i] - 1e-2 * ((m[i] * 0.9 + q.grad.float() * (1 - 0.9)).sign() + p[i] * 0.1)
            m[i] = m[i] * 0.99 + q.grad.float() * (1 - 0.99)
        optimizer.step()
        twin.quantize_(p[0])
        assert all(same(optimizer.state[q]["master_param"], x) for q, x in zip(model.parameters(), p, strict=True))
        assert not differing(contents(model.weight), contents(twin)) and same(model.bias.data, p[1].bfloat16())
