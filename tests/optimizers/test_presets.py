"""Presets of FusedAdam, Lion and Muon: each is its options spelled out, and takes the bytes that it says."""

import copy
from dataclasses import fields

import pytest
import torch
from torch import nn

import quantshard as qs
from benchmarks.convergence_table import bytes_of
from quantshard.errors import ConfigurationError
from quantshard.numerics.states import StateSpec
from quantshard.optimizers import ElementwiseOptimizer, FusedAdam, Lion, Muon, muon_groups
from quantshard.recipe import resolve
from quantshard.state_storage import PRESETS, STATE_ARGUMENTS, StateOptions, chosen_options
from tests.optimizers.test_states import build, set_grads, values
from tests.tensor.test_tensor import RECIPES, same

FP16, BF16, FP8 = torch.float16, torch.bfloat16, torch.uint8
SPLIT = {"master_weight_dtype": FP16, "store_param_remainders": True}
SPELLED = {
    "lean8": {**SPLIT, "exp_avg_dtype": FP8, "exp_avg_sq_dtype": FP8},
    "lean6": {**SPLIT, "exp_avg_dtype": FP8, "exp_avg_sq_dtype": BF16},
}
every_preset = pytest.mark.parametrize("preset", PRESETS)


def stepped(params, optimizer, steps):
    for step in steps:
        set_grads(params, step)
        optimizer.step()
    return {key: values(param) for key, param in params.items()}, copy.deepcopy(optimizer.state_dict())


def equal(one, other):
    (values_, state), (others, state_) = one, other
    assert all(same(values_[key], others[key]) for key in values_)
    assert state["param_groups"] == state_["param_groups"]
    assert state["state"].keys() == state_["state"].keys()
    for index, entries in state["state"].items():
        assert entries.keys() == state_["state"][index].keys()
        assert all(same(tensor, state_["state"][index][key]) for key, tensor in entries.items())


@every_preset
def test_a_preset_is_its_options_spelled_out(preset):
    """The same bits and entries; and a checkpoint of one goes on as the other, as if it had never stopped."""
    cell = RECIPES["mxfp8"].weight
    named, spelled = build(cell, preset=preset), build(cell, **SPELLED[preset])
    equal(stepped(*named, range(2)), stepped(*spelled, range(2)))
    params, optimizer = build(cell, **SPELLED[preset])
    with torch.no_grad():
        for key, param in params.items():
            param.copy_(named[0][key])
    optimizer.load_state_dict(copy.deepcopy(named[1].state_dict()))
    equal(stepped(params, optimizer, range(2, 4)), stepped(*named, range(2, 4)))


@every_preset
@pytest.mark.parametrize("recipe", ["current", "block", "mxfp8", "nvfp4"])
def test_the_bytes_are_those_that_are_allocated(preset, recipe):
    with qs.quantized_model_init(recipe=recipe):
        layer = qs.Linear(256, 256, bias=False)
    optimizer = FusedAdam(layer.parameters(), preset=preset)
    elements = 256 * 256
    told = bytes_of(PRESETS[preset], resolve(recipe).weight.format)
    held = optimizer.state[layer.weight]
    of_master = sum(each.nbytes for key, each in held.items() if key.startswith("master"))
    of_moments = sum(each.nbytes for key, each in held.items() if key.startswith("exp_avg"))
    of_weight = sum(each.nbytes for each in layer.weight.quantized_storage.components.values())
    assert (of_master, of_moments) == (told.master * elements, told.moments * elements)
    assert of_weight == pytest.approx(told.weight * elements, abs=4)  # the scale of a whole tensor


def test_the_bytes_by_hand():
    """Codes of 1 or 2 bytes, and a scale of 4 for 128 elements, of 1 where they are of a second moment in FP8. Beside
    FP8 codes a master is one byte more, beside FP4 ones whole."""
    scale = 4 / 128
    weight = resolve("current").weight.format
    assert bytes_of(PRESETS["lean8"], weight) == pytest.approx((1, 1, 1 + scale + 1 + 1 / 128))
    assert bytes_of(PRESETS["lean6"], weight) == pytest.approx((1, 1, 1 + scale + 2))
    assert bytes_of(PRESETS["lean8"], weight).together == pytest.approx(4.0390625)
    assert bytes_of(PRESETS["lean6"], weight).together == pytest.approx(5.03125)
    assert bytes_of(PRESETS["lean8"], resolve("nvfp4").weight.format).master == pytest.approx(2 + scale)
    assert bytes_of(StateOptions(master_weights=False), weight) == pytest.approx((1, 0, 8))


@every_preset
@pytest.mark.parametrize(
    "option", [field.name for field in fields(StateOptions) if field.name != "momentum_buffer_dtype"]
)
def test_an_option_that_contradicts_is_refused_and_one_that_agrees_is_not(preset, option):
    own = getattr(PRESETS[preset], option)
    other = (not own) if isinstance(own, bool) else torch.float32
    param = nn.Parameter(torch.ones(2, 2))
    with pytest.raises(ConfigurationError, match=rf"preset='{preset}', {option}={other}\): .*has {option}={own}"):
        FusedAdam([param], preset=preset, **{option: other})
    FusedAdam([param], preset=preset, **{option: own})


def test_an_unknown_preset_names_the_known():
    with pytest.raises(ConfigurationError, match=r"did you mean 'lean8'.*lean8, lean6"):
        FusedAdam([nn.Parameter(torch.ones(2, 2))], preset="lean_8")
    for other in (8, "", "x" * 10**5):
        with pytest.raises(ConfigurationError, match="no such preset; there are lean8, lean6"):
            chosen_options("FusedAdam", other, {})


class Momentum(ElementwiseOptimizer):
    """A user's own."""

    states = (StateSpec("trace"),)

    def update(self, param, grad, master, states, settings):
        return master - settings["lr"] * grad, states


@pytest.mark.parametrize("kind", [FusedAdam, Lion, Muon, Momentum])
@pytest.mark.parametrize("option", STATE_ARGUMENTS)
def test_a_group_has_no_states_of_its_own(kind, option):
    """They would be kept in the group, and do nothing; nor does a group that is added later."""
    param, other = (nn.Parameter(torch.ones(2, 2)) for _ in range(2))
    defaults = [{"lr": 0.1}] if kind is Momentum else []
    refused = rf"^{kind.__name__}: param_groups\[\d\]: {option} cannot be set for one group"
    with pytest.raises(ConfigurationError, match=refused):
        kind([{"params": [param], option: BF16}], *defaults)
    optimizer = kind([param], *defaults)
    with pytest.raises(ConfigurationError, match=refused):
        optimizer.add_param_group({"params": [other], option: BF16})
    assert len(optimizer.param_groups) == 1 and other not in optimizer.state


@pytest.mark.parametrize("kind", [FusedAdam, Lion, Muon])
@pytest.mark.parametrize("switch", ["capturable", "amsgrad", "maximize", "differentiable"])
def test_a_group_does_not_switch_how_all_groups_step(kind, switch):
    """Groups of PyTorch's AdamW have both, off."""
    param = nn.Parameter(torch.ones(2, 2))
    with pytest.raises(ConfigurationError, match=rf"^{kind.__name__}: param_groups\[0\]: {switch} cannot"):
        kind([{"params": [param], switch: True}])
    kind([{"params": [param], switch: False}])


@every_preset
def test_a_preset_of_lion_is_its_options_spelled_out(preset):
    """Its only moment in FP8, and masters of 16 bits; a checkpoint of one goes on as the other."""

    def made(**options):
        torch.manual_seed(0)
        with qs.quantized_model_init(recipe="current"):
            params = dict(nn.Sequential(qs.Linear(48, 33), qs.Linear(33, 16)).named_parameters())
        torch.manual_seed(1)
        return params, Lion(params.values(), lr=1e-3, **options)

    spelled = {name: value for name, value in SPELLED[preset].items() if name != "exp_avg_sq_dtype"}
    named, by_hand = made(preset=preset), made(**spelled)
    equal(stepped(*named, range(2)), stepped(*by_hand, range(2)))
    held = named[1].state[named[0]["0.weight"]]
    assert held["exp_avg"].dtype is FP8 and "master_param" not in held
    assert held["master_param_low"].shape == named[0]["0.weight"].shape
    by_hand[1].load_state_dict(copy.deepcopy(named[1].state_dict()))
    equal(stepped(*named, range(2, 4)), stepped(*by_hand, range(2, 4)))
    made(preset=preset, **PRESETS[preset].arguments("lion"))  # options that agree
    for option, value in (
        {"exp_avg_dtype": torch.float32, "master_weights": False, "store_param_remainders": False}
    ).items():
        own = getattr(PRESETS[preset], option)
        with pytest.raises(
            ConfigurationError, match=rf"^Lion\(preset='{preset}', {option}={value}\): .*has {option}={own}"
        ):
            made(preset=preset, **{option: value})
    with pytest.raises(ConfigurationError, match=r"^Lion\(preset='lean_8'\): .*did you mean 'lean8'"):
        made(preset="lean_8")


@every_preset
def test_a_preset_of_muon_is_its_options_spelled_out(preset):
    """With momentum in BF16, which FP8 would spoil; a checkpoint of one goes on as the other."""

    def made(**options):
        with qs.quantized_model_init(recipe="current"):
            torch.manual_seed(0)
            model = nn.Sequential(qs.Linear(48, 33), qs.Linear(33, 16))
        params = dict(model.named_parameters())
        return params, Muon(muon_groups(model, head="1", adamw={"lr": 1e-3}), lr=0.02, **options)

    spelled = SPELLED[preset] | {"momentum_buffer_dtype": BF16}
    torch.manual_seed(1)
    first = made(preset=preset)
    torch.manual_seed(1)
    second = made(**spelled)
    equal(stepped(*first, range(2)), stepped(*second, range(2)))
    [matrix] = first[1].param_groups[0]["params"]
    held = first[1].state[matrix]
    assert held["momentum_buffer"].dtype is BF16 and held["master_param_low"].shape == matrix.shape
    assert first[1].state[first[0]["1.weight"]]["exp_avg"].dtype is FP8
    second[1].load_state_dict(copy.deepcopy(first[1].state_dict()))
    equal(stepped(*first, range(2, 4)), stepped(*second, range(2, 4)))
    with pytest.raises(ConfigurationError, match=rf"Muon\(preset='{preset}', momentum_buffer_dtype=torch.uint8\)"):
        made(preset=preset, momentum_buffer_dtype=FP8)


@every_preset
def test_presets_keep_a_master(preset):
    """The train command relies on it: a switch cannot say that it was not given."""
    assert PRESETS[preset].master_weights


def test_masters_that_do_not_exist_have_no_dtype():
    with pytest.raises(ConfigurationError, match=r"master_weights=False has no masters of torch.float16; leave one"):
        chosen_options("FusedAdam", None, {"master_weights": False, "master_weight_dtype": torch.float16})
