"""What all modules share, where one process shows it: ties and casts."""

import pytest
import torch
from torch import nn

from quantshard import recipe as recipes
from quantshard.errors import ConfigurationError
from quantshard.modules import LayerNormLinear, LayerNormMLP, Linear, RMSNorm, autocast, quantized_model_init


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


@pytest.mark.parametrize("recipe", ["mxfp8", "delayed", "nvfp4"])
def test_a_plain_weight_may_take_the_place_of_a_quantized_one(recipe):
    """As a head's by that of an embedding: the bits of a head that was plain from the start."""
    found = []
    for quantized in (True, False):
        torch.manual_seed(0)
        embedding = nn.Embedding(40, 48)
        with quantized_model_init(quantized, recipe):
            head = Linear(48, 40, bias=False)
        head.weight = embedding.weight
        model = nn.Sequential(embedding, head)
        for _ in range(2):
            with autocast(recipe=recipe):
                model(torch.arange(16)).float().sin().sum().backward()
        state = {name: value.clone() for name, value in model.state_dict().items()}
        model.load_state_dict(state)
        found.append({"gradient": embedding.weight.grad, **state})
    direct, plain = found
    assert direct.keys() == plain.keys() and all(torch.equal(direct[name], plain[name]) for name in plain)


@pytest.mark.parametrize("module", [Linear, LayerNormLinear, LayerNormMLP, lambda n, _: RMSNorm(n)])
def test_an_input_of_integers_is_refused(module):
    layer = module(40, 40)
    for enabled in (True, False):
        with autocast(enabled, recipe="current"), pytest.raises(ConfigurationError, match=r"of torch.int64; give x.to"):
            layer(torch.ones(2, 40, dtype=torch.int64))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8])
def test_a_params_dtype_that_weights_cannot_stand_for(dtype):
    with pytest.raises(ConfigurationError, match=r"Linear\.params_dtype cannot be torch.*use torch.float32"):
        Linear(8, 8, params_dtype=dtype)
