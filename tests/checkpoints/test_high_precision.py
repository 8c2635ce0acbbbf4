"""load_high_precision in one process: values are quantized as the oracle does, or nothing is touched."""

import pytest
import torch
from torch import nn

from quantshard import Linear, checkpoints, convert, numerics, quantized_model_init
from quantshard.errors import CheckpointError
from quantshard.optimizers import FusedAdam
from tests.tensor.test_tensor import MXFP8, differing, every_recipe, random, same


def model(recipe=None, seed=0, **options):
    """Two quantized layers (high-precision ones without a recipe), and a plain one of torch's with a buffer."""
    torch.manual_seed(seed)
    with quantized_model_init(enabled=recipe is not None, recipe=recipe, **options):
        layers = [Linear(40, 48), Linear(48, 16, bias=False)]
    return nn.Sequential(*layers, nn.BatchNorm1d(16))


def high_precision(dtype=torch.float32):
    """A state dict as another library writes it."""
    torch.manual_seed(7)
    other = nn.Sequential(nn.Linear(40, 48), nn.Linear(48, 16, bias=False), nn.BatchNorm1d(16))
    other[2].running_mean.uniform_()
    return {key: value.to(dtype) if value.is_floating_point() else value for key, value in other.state_dict().items()}


def bits(module):
    return {key: value.detach().clone() for key, value in module.state_dict().items()}


@every_recipe
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_values_are_quantized_as_the_oracle_does(recipe, dtype):
    """By their own amaxes, under delayed scaling too: the history is of the weights that were there before."""
    loaded, state = model(recipe), high_precision(dtype)
    live = {key: value.data_ptr() for key, value in loaded.state_dict().items() if not key.endswith("_format")}
    checkpoints.load_high_precision(loaded, state)
    cell = recipe.weight
    for index in (0, 1):
        history = loaded[index].weight.quantized_storage.state.get("amax_history")
        assert history is None or history.nonzero().flatten().tolist() == [len(history) - 1]
        parts = numerics.quantize(state[f"{index}.weight"].float(), cell.format, cell.scaling)
        assert not differing(loaded[index].weight.quantized_storage.components, parts)
    for key in ("0.bias", "2.weight", "2.running_mean", "2.num_batches_tracked"):
        assert same(loaded.state_dict()[key], state[key].to(loaded.state_dict()[key].dtype))
    assert live == {key: v.data_ptr() for key, v in loaded.state_dict().items() if not key.endswith("_format")}


@every_recipe
def test_keys_and_draws_stay(recipe):
    loaded = model(recipe)
    before = bits(loaded)
    checkpoints.load_high_precision(loaded, high_precision())
    changed = differing(before, bits(loaded))
    assert not [key for key in changed if key.endswith(("_key", "_draws", "_format"))] and "0.weight" in changed


def test_the_state_dict_is_not_changed():
    state = high_precision()
    before = {key: value.clone() for key, value in state.items()}
    checkpoints.load_high_precision(model("mxfp8"), state)
    assert not differing(before, state)


def test_a_model_without_quantized_weights():
    loaded, state = model(), high_precision()
    checkpoints.load_high_precision(loaded, state)
    assert not differing({key: bits(loaded)[key] for key in state}, state)


@every_recipe
def test_a_model_of_our_own_modules_in_high_precision(recipe):
    """Their state dict has keys and draws besides the weights; loading it into quantized ones is what errors advise."""
    source, loaded = model(seed=3), model(recipe)
    with pytest.raises(RuntimeError, match=r"checkpoints\.load_high_precision"):
        loaded.load_state_dict(source.state_dict())
    checkpoints.load_high_precision(loaded, source.state_dict())
    fresh = model(recipe, seed=3)
    assert not differing(loaded[0].weight.quantized_storage.components, fresh[0].weight.quantized_storage.components)


@pytest.mark.parametrize("made", ["with values", "converted on meta", "emptied"])
def test_masters_are_seeded_from_what_was_loaded(made):
    state = high_precision()
    if made == "with values":
        loaded = model("mxfp8")
    else:
        with torch.device("meta"):
            plain = [nn.Linear(40, 48), nn.Linear(48, 16, bias=False), nn.BatchNorm1d(16)]
            loaded = model("mxfp8") if made == "emptied" else nn.Sequential(*plain)
        if made == "converted on meta":
            convert(loaded, "mxfp8", filter=lambda module, name: True)
        loaded.to_empty(device="cpu")
    checkpoints.load_high_precision(loaded, state)
    expected = state["0.weight"].clone()
    state["0.weight"].zero_()
    optimizer = FusedAdam(loaded.parameters())
    assert same(optimizer.state[loaded[0].weight]["master_param"], expected)
    for param in loaded.parameters():
        param.grad = torch.zeros_like(param)
    optimizer.step()
    assert loaded[0].weight.get_high_precision_init_val() is None


def test_frozen_weights_keep_no_values():
    loaded = model("mxfp8").requires_grad_(False)
    checkpoints.load_high_precision(loaded, high_precision())
    assert loaded[0].weight.get_high_precision_init_val() is None


@pytest.mark.parametrize("made", ["itself", "a copy", "a piece"])
def test_initial_values_are_dropped_where_others_wrote_codes(made):
    """As `dcp.load` writes the tensors of a state dict, which tells nobody; also before a copy or a cut is made."""
    source, loaded = model("mxfp8", seed=1), model("mxfp8", preserve_high_precision_init_val=True)
    storage = loaded[0].weight.quantized_storage
    assert same(storage.clone().initial_values(), storage.initial_values())
    assert same(storage.piece(0, 0, 16).initial_values(), storage.initial_values()[:16])
    with torch.no_grad():
        for key, value in loaded[0].state_dict().items():
            if isinstance(value, torch.Tensor):
                value.copy_(source[0].state_dict()[key])
    storage = {"itself": storage, "a copy": storage.clone(), "a piece": storage.piece(0, 32, 32)}[made]
    assert storage.initial_values() is None
    assert loaded[0].weight.get_high_precision_init_val() is None
    assert loaded[1].weight.get_high_precision_init_val() is not None
    master = FusedAdam(loaded.parameters()).state[loaded[0].weight]["master_param"]
    assert same(master, source[0].weight.dequantize().detach())


@pytest.mark.parametrize("made", ["a clone", "a moved one", "mapped components", "a piece", "a later piece"])
def test_initial_values_of_what_was_made_of_a_weight_are_dropped_too(made):
    """A write after a copy or a cut; a copy's is none of the weight's, and a cut has the memory of the whole."""
    storage = model("mxfp8", preserve_high_precision_init_val=True)[0].weight.quantized_storage
    ways = {
        "a clone": storage.clone,
        "a moved one": lambda: storage.to(None),
        "mapped components": lambda: storage.map(torch.clone),  # as `fully_shard` and `distribute` let go of a whole
        "a piece": lambda: storage.piece(0, 0, 32),
        "a later piece": lambda: storage.piece(0, 32, 32),
    }
    new = ways[made]()
    assert new.high_precision is not None  # not by `initial_values`, a look of which the next tells what was written
    new.components["codes"].zero_()
    assert new.initial_values() is None
    assert (storage.initial_values() is None) == (made in ("a piece", "a later piece"))


def refused(loaded, state, match):
    """Raises, and leaves every bit of the model as it was."""
    before = bits(loaded)
    with pytest.raises(CheckpointError, match=match):
        checkpoints.load_high_precision(loaded, state)
    assert not differing(before, bits(loaded))


@pytest.mark.parametrize("key", ["0.weight", "0.bias", "1.weight", "2.weight"])
def test_a_missing_entry(key):
    state = high_precision()
    del state[key]
    refused(model("mxfp8"), state, rf"1 parameters have no entry.*{key}")


def test_buffers_may_be_missing():
    loaded, state = model("mxfp8"), high_precision()
    before = loaded[2].running_mean.clone()
    for key in [key for key in state if key.startswith("2.") and key not in ("2.weight", "2.bias")]:
        del state[key]
    checkpoints.load_high_precision(loaded, state)
    assert same(loaded[2].running_mean, before)


@pytest.mark.parametrize("key", ["surprise", "0.surprise", "3.weight"])
def test_an_unknown_entry(key):
    refused(model("mxfp8"), high_precision() | {key: torch.zeros(1)}, rf"1 entries fit no parameter.*{key}")


@every_recipe
def test_a_quantized_state_dict(recipe):
    refused(model(recipe), model(recipe, seed=1).state_dict(), r"0\.weight.*load_state_dict")


@pytest.mark.parametrize("value", [torch.zeros(48, 40, dtype=torch.uint8), torch.zeros(48, 40, dtype=torch.int64)])
def test_integers(value):
    refused(model("mxfp8"), high_precision() | {"1.weight": value}, r"1\.weight is torch\.\w*int")


@pytest.mark.parametrize("key", ["0.weight", "0.bias", "2.running_mean"])
def test_what_has_no_values(key):
    """Of parameters and of buffers."""
    state = high_precision()
    for value in (state[key].numpy(), state[key].to("meta")):
        refused(model("mxfp8"), state | {key: value}, rf"{key} is not a tensor with values")


@pytest.mark.parametrize("key", ["0.weight", "1.weight", "0.bias", "2.bias"])
@pytest.mark.parametrize("shape", [(48, 41), (40, 48), (1,), ()], ids=str)
def test_another_shape(key, shape):
    """The last of several too: nothing is written before everything fits."""
    refused(model("mxfp8"), high_precision() | {key: torch.zeros(shape)}, rf"{key} has shape")


def test_another_shape_of_a_buffer():
    state = high_precision() | {"2.running_mean": torch.zeros(3)}
    refused(model("mxfp8"), state, r"2\.running_mean has shape")


def test_tied_weights():
    """One parameter under two names: both entries are there, as state dicts have them."""
    loaded = model("mxfp8")
    loaded.append(loaded[1])
    state = high_precision()
    checkpoints.load_high_precision(loaded, state | {"3.weight": state["1.weight"]})
    parts = numerics.quantize(state["1.weight"], MXFP8.format, MXFP8.scaling)
    assert not differing(loaded[3].weight.quantized_storage.components, parts)


def test_a_meta_model_is_refused():
    """Its parameters have no memory: nothing would be loaded."""
    described = model("mxfp8").to("meta")
    with pytest.raises(CheckpointError, match=r"meta.*reset_parameters"):
        checkpoints.load_high_precision(described, high_precision())


def test_loaded_values_do_not_depend_on_what_was_there():
    one, two = model("nvfp4"), model("nvfp4", seed=5)
    for loaded in (one, two):
        checkpoints.load_high_precision(loaded, high_precision())
    assert {key for key in differing(bits(one), bits(two)) if not key.endswith("_key")} == set()
    assert same(random(3, 3), random(3, 3))
