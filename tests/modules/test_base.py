"""What all modules share, where one process shows it: ties and casts."""

import pytest
import torch
from torch import nn

from quantshard import recipe as recipes
from quantshard.modules import Linear, autocast, quantized_model_init


@pytest.mark.parametrize("quantized", [True, False])
def test_a_tied_weight_stays_tied_when_it_is_filled(quantized):
    built = []
    for device in ("cpu", "meta"):
        torch.manual_seed(0)
        with quantized_model_init(quantized, "mxfp8"):
            model = nn.Sequential(Linear(40, 40, device=device), Linear(40, 40, device=device))
        model[1].weight = model[0].weight
        for layer in model:
            layer.reset_parameters()
        assert model[0].weight is model[1].weight and not model[0].weight.is_meta
        built.append(model)
    direct, filled = (model.state_dict() for model in built)
    assert all(torch.equal(direct[name], filled[name]) for name in direct)


@pytest.mark.parametrize("cast", [nn.Module.half, nn.Module.bfloat16, lambda m: m.to(torch.float16)])
def test_casting_a_module_changes_the_nominal_dtype_and_no_code_or_history(cast):
    recipe = recipes.DelayedScaling(amax_history_len=3)
    with quantized_model_init(recipe=recipe):
        layer = Linear(40, 40, params_dtype=torch.float32)
    with autocast(recipe=recipe):
        layer(torch.full((2, 40), 1 / 3)).sum().backward()
    before = {name: value.clone() for name, value in layer.state_dict().items() if name != "bias"}
    cast(layer)
    assert layer.weight.dtype == layer.bias.dtype != torch.float32
    after = layer.state_dict()
    assert all(value.dtype == after[name].dtype and torch.equal(value, after[name]) for name, value in before.items())
