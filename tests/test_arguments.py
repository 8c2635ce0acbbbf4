"""Wrong arguments that Python alone would accept, and values of unusual types that are accepted."""

import pytest
import torch
from torch import nn

import quantshard
from quantshard import checkpoints, optimizers
from quantshard.errors import ConfigurationError


def layers():
    with quantshard.quantized_model_init(recipe="current"):
        return nn.Sequential(quantshard.Linear(32, 32))


@pytest.mark.parametrize("call", [quantshard.autocast, quantshard.quantized_model_init])
def test_a_recipe_is_no_flag(call):
    """It would count as true, and the default recipe would run."""
    with pytest.raises(ConfigurationError, match=r"enabled='current'\): it must be True or False"):
        call("current")


@pytest.mark.parametrize(
    "call",
    [
        lambda name: quantshard.autocast(recipe=name),
        lambda name: quantshard.quantized_model_init(recipe=name),
        lambda name: quantshard.convert(nn.Sequential(nn.Linear(32, 32)), name),
        lambda name: quantshard.quantize_(nn.Sequential(quantshard.Linear(32, 32)), name),
        lambda name: quantshard.explain(layers(), recipe=name),
    ],
)
def test_an_unknown_recipe_is_answered_with_the_names(call):
    with pytest.raises(ConfigurationError, match=r"unknown recipe 'mxfp9'; did you mean 'mxfp8'\? choose one of: auto"):
        call("mxfp9")


@pytest.mark.parametrize("call", [quantshard.Linear, optimizers.FusedAdam, quantshard.convert, checkpoints.Manager])
def test_an_unknown_name_is_a_type_error(call):
    with pytest.raises(TypeError, match="unexpected keyword argument 'no_such'"):
        call(4, 4, no_such=1)


def test_numbers_of_checkpoints_to_keep():
    with pytest.raises(ConfigurationError, match=r"^keep_last = 0: must be 1 or more, "):
        checkpoints.Manager("new", keep_last=0)


def test_numbers_of_numpy_are_numbers():
    four = torch.tensor(4).numpy()[()]
    assert quantshard.MultiheadAttention(four * 8, four).kv_channels == 8
    assert quantshard.Statistics(layers(), every=four).every == 4
    assert quantshard.plan(layers(), {"dp_shard": four}).rows
    assert not quantshard.RMSNorm(8, zero_centered_gamma=1).weight.any()


def test_values_to_load_may_come_from_a_reader_that_is_no_mapping():
    class Reader:
        def __init__(self, values):
            self.values = values

        def keys(self):
            return self.values.keys()

        def __getitem__(self, name):
            return self.values[name]

    model = nn.Linear(2, 2)
    checkpoints.load_high_precision(model, Reader({"weight": torch.eye(2), "bias": torch.ones(2)}))
    assert torch.equal(model.weight, torch.eye(2))
