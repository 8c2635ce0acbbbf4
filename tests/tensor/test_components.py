"""The state dict: plain tensors under the keys of the specification, aliasing the live components, loaded as bytes."""

import copy

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from quantshard import LayerNormMLP, Linear, numerics, private_torch, quantized_model_init
from quantshard.errors import CheckpointError, ConfigurationError
from quantshard.formats import FORMATS
from quantshard.sharding import whole
from quantshard.tensor import component_loading, components
from tests.covering import by_turns
from tests.tensor.test_tensor import RECIPES, contents, differing, every_recipe, random, same
from tests.test_sharding import pieces_of

KEYS = {  # of a [48, 40] weight, by hand from the specification: X and X_scale_inv, then what else the recipe needs
    "current": {"": (48, 40), "_scale_inv": (1, 1)},
    "current pow2": {"": (48, 40), "_scale_inv": (1, 1)},
    "delayed": {"": (48, 40), "_scale_inv": (1, 1), "_amax_history": (1024,)},
    "delayed newest": {"": (48, 40), "_scale_inv": (1, 1), "_amax_history": (2,)},
    "block": {"": (48, 40), "_scale_inv": (1, 1)},
    "rowwise": {"": (48, 40), "_scale_inv": (48, 1)},
    "mxfp8": {"": (48, 40), "_scale_inv": (2, 2)},
    "mxfp8 twice": {"": (48, 40), "_scale_inv": (48, 2), "_columnwise": (48, 40), "_columnwise_scale_inv": (2, 40)},
    "nvfp4": {"": (48, 20), "_scale_inv": (3, 3), "_amax": (1, 1)},
    "fp8-weights": {"": (48, 40), "_scale_inv": (1, 1)},
    "mxfp8-weights": {"": (48, 40), "_scale_inv": (48, 2)},
    "nvfp4-weights": {"": (48, 20), "_scale_inv": (48, 3), "_amax": (1, 1)},
    "nvfp4 twice": {
        "": (48, 20),
        "_scale_inv": (48, 3),
        "_columnwise": (48, 20),
        "_columnwise_scale_inv": (3, 40),
        "_amax": (1, 1),
    },
}
EVERY_WEIGHT = {"_key": (1,), "_draws": (1,), "_format": (16,)}
FLOAT32 = {"_amax_history", "_amax"}
FLOAT32_SCALES = {"current", "current pow2", "delayed", "delayed newest", "block", "rowwise", "fp8-weights"}


def linear(recipe, seed=0, **options):
    torch.manual_seed(seed)
    with quantized_model_init(recipe=recipe, **options):
        return Linear(40, 48)


def plain_linear(recipe=None, seed=0):
    torch.manual_seed(seed)
    with quantized_model_init(enabled=False, recipe=recipe):
        return Linear(40, 48)


def of_weight(state):
    return {key.removeprefix("weight"): value for key, value in state.items() if key.startswith("weight")}


def bits(module):
    return {key: value.detach().clone() for key, value in module.state_dict().items()}


# --------------------------------------------------------------------------------------------------------------- keys


def test_every_recipe_has_its_keys_here():
    assert KEYS.keys() == RECIPES.keys()


@pytest.mark.parametrize("name", KEYS)
def test_keys_shapes_and_dtypes(name):
    state = of_weight(linear(RECIPES[name]).state_dict())
    assert {suffix: tuple(value.shape) for suffix, value in state.items()} == KEYS[name] | EVERY_WEIGHT
    expected = dict.fromkeys(state, torch.uint8) | dict.fromkeys(FLOAT32 & state.keys(), torch.float32)
    expected |= {"_key": torch.int64, "_draws": torch.int64}
    expected |= {"_scale_inv": torch.float32} if name in FLOAT32_SCALES else {}
    assert {suffix: value.dtype for suffix, value in state.items()} == expected


@pytest.mark.parametrize("name", KEYS)
@pytest.mark.parametrize("make", [linear, plain_linear])
def test_keys_besides_the_weight(name, make):
    """The bias, and under delayed scaling the histories of the activations."""
    keys = {key for key in make(RECIPES[name]).state_dict() if not key.startswith("weight")}
    histories = {"input_amax_history", "grad_output_amax_history"} if name.startswith("delayed") else set()
    assert keys == {"bias"} | histories


@pytest.mark.parametrize("name", [None, *KEYS])
def test_keys_of_a_high_precision_weight(name):
    state = of_weight(plain_linear(name and RECIPES[name]).state_dict())
    history = {"_amax_history"} if (name or "").startswith("delayed") else set()
    assert state.keys() == {"", "_key", "_draws"} | history
    assert state[""].dtype == torch.float32 and state[""].shape == (48, 40)


@by_turns(2, recipe=RECIPES, keep_vars=[False, True])
def test_state_dict_holds_plain_tensors_that_alias_the_live_ones(recipe, keep_vars):
    layer = linear(recipe)
    state = layer.state_dict(keep_vars=keep_vars)
    assert all(type(value) in (torch.Tensor, nn.Parameter) for value in state.values())
    storage = layer.weight.quantized_storage
    by_name = storage.spec.format.by_name
    live = {f"weight{by_name[name].key_suffix}": part for name, part in storage.components.items()}
    live |= {f"weight_{name}": value for name, value in storage.state.items()}
    assert {key for key in state if key.startswith("weight")} == {*live, "weight_format"}
    assert {key for key, part in live.items() if state[key].data_ptr() != part.data_ptr()} == set()


def test_keys_have_the_prefix_of_their_module():
    model = nn.ModuleDict({"a": nn.Sequential(nn.ReLU(), linear("nvfp4"))})
    state = model.state_dict()
    assert {f"a.1.weight{suffix}" for suffix in KEYS["nvfp4"] | EVERY_WEIGHT} | {"a.1.bias"} == state.keys()


@every_recipe
def test_every_key_is_an_attribute(recipe):
    """torch.distributed.checkpoint.state_dict walks them with getattr."""
    layer = linear(recipe)
    for key, value in layer.state_dict().items():
        found = getattr(layer, key)
        if key == "weight":
            assert isinstance(found, nn.Parameter)
        else:
            assert same(found, value)
            assert key == "weight_format" or found.data_ptr() == value.data_ptr()


@pytest.mark.parametrize("make", [lambda: linear("mxfp8"), plain_linear])
@pytest.mark.parametrize("name", ["weight_amax", "weight_", "weightscale_inv", "bias_key", "key", "no_such_thing"])
def test_other_attributes_are_missing(make, name):
    with pytest.raises(AttributeError, match=name):
        getattr(make(), name)


# ---------------------------------------------------------------------------------------------------------------- tags


def test_the_format_tag_by_hand():
    tag = linear("mxfp8").state_dict()["weight_format"]
    assert bytes(tag.tolist()) == b"\x01mxfp8_32x32\0\0\0\0"
    assert bytes(linear("delayed").state_dict()["weight_format"].tolist()) == b"\x01fp8_e4m3+hist\0\0"


@pytest.mark.parametrize("name", FORMATS)
def test_format_tags_are_read_back(name):
    tag = components.format_tag(name)
    assert tag.shape == (16,) and tag.dtype == torch.uint8
    assert components.read_format_tag(tag) == name


@pytest.mark.parametrize("version", [0, 2, 255])
def test_an_unknown_version_is_refused(version):
    tag = components.format_tag("mxfp8_32x32")
    tag[0] = version
    with pytest.raises(CheckpointError, match=rf"version {version}, not 1"):
        components.read_format_tag(tag)
    layer = linear("mxfp8")
    before, state = bits(layer), linear("mxfp8", seed=1).state_dict()
    state["weight_format"] = tag
    with pytest.raises(RuntimeError, match=rf"version {version}"):
        layer.load_state_dict(state)
    assert not differing(of_weight(before), of_weight(bits(layer)))


# ---------------------------------------------------------------------------------------------------------- round trip


@every_recipe
def test_loading_gives_the_same_bits_in_the_same_tensors(recipe, monkeypatch):
    """Key, draws and history too, whatever the loading model was seeded with. Nothing is dequantized on the way."""
    saved, loaded = linear(recipe, seed=1), linear(recipe, seed=2)
    saved.weight.quantized_storage.state["draws"].fill_(5)
    live = dict(loaded.state_dict())
    monkeypatch.setattr(numerics, "dequantize", None)
    monkeypatch.setattr(numerics, "quantize_codes", None)
    assert differing(bits(saved), bits(loaded))
    loaded.load_state_dict(saved.state_dict())
    assert not differing(bits(saved), bits(loaded))
    assert loaded.state_dict()["weight_draws"].item() == 5
    assert all(loaded.state_dict()[key].data_ptr() == live[key].data_ptr() for key in live if key != "weight_format")


@every_recipe
def test_loaded_values_are_copies(recipe):
    saved, loaded = linear(recipe, seed=1), linear(recipe, seed=2)
    loaded.load_state_dict(saved.state_dict())
    before = bits(loaded)
    saved.weight.quantize_(torch.ones(48, 40))
    assert not differing(before, bits(loaded))


@by_turns(2, recipe=RECIPES, mmap=[False, True])
def test_torch_save_and_weights_only_load(recipe, mmap, tmp_path):
    saved, loaded = linear(recipe, seed=1), linear(recipe, seed=2)
    torch.save(saved.state_dict(), tmp_path / "model.pt")
    state = torch.load(tmp_path / "model.pt", weights_only=True, mmap=mmap)
    assert all(type(value) is torch.Tensor for value in state.values())
    assert list(state) == list(saved.state_dict())
    loaded.load_state_dict(state)
    assert not differing(bits(saved), bits(loaded))


@every_recipe
def test_loading_with_assign(recipe):
    saved, loaded = linear(recipe, seed=1), linear(recipe, seed=2)
    loaded.load_state_dict(copy.deepcopy(saved.state_dict()), assign=True)
    assert not differing(bits(saved), bits(loaded))


def test_loading_drops_kept_initial_values():
    """Else an optimizer built afterwards would start from the old ones."""
    loaded = linear("mxfp8", preserve_high_precision_init_val=True)
    assert loaded.weight.get_high_precision_init_val() is not None
    loaded.load_state_dict(linear("mxfp8", seed=1).state_dict())
    assert loaded.weight.get_high_precision_init_val() is None


def test_loading_nothing_leaves_the_kept_initial_values():
    layer = linear("mxfp8", preserve_high_precision_init_val=True)
    kept, version = layer.weight.get_high_precision_init_val(), layer.weight.quantized_storage.version
    layer.load_state_dict({}, strict=False)
    assert layer.weight.get_high_precision_init_val() is kept and layer.weight.quantized_storage.version == version


def test_a_refused_module_keeps_its_biases_too():
    for recipe in ("current", "mxfp8", "nvfp4"):
        layer, state = linear(recipe, seed=1), linear("block", seed=2).state_dict()
        before = bits(layer)
        state["bias"].add_(1)
        with pytest.raises(RuntimeError, match="'fp8_128x128'"):
            layer.load_state_dict(state)
        assert not differing(before, bits(layer))


def test_a_module_of_two_weights_loads_both_or_none():
    torch.manual_seed(1)
    with quantized_model_init(recipe="mxfp8"):
        mlp, other = LayerNormMLP(32, 64), LayerNormMLP(32, 64)
    before, state = bits(mlp), other.state_dict()
    del state["fc2_weight_scale_inv"]
    with pytest.raises(RuntimeError, match="lacks fc2_weight_scale_inv"):
        mlp.load_state_dict(state)
    assert not differing(before, bits(mlp))


@pytest.mark.parametrize("recipe", [None, "current"])
def test_plain_weights_round_trip(recipe):
    saved, loaded = plain_linear(recipe, seed=1), plain_linear(recipe, seed=2)
    saved.weight_draws.fill_(5)
    loaded.load_state_dict(saved.state_dict())
    assert not differing(bits(saved), bits(loaded))


def test_plain_weights_of_other_libraries_need_no_key():
    layer, other = plain_linear(), nn.Linear(40, 48)
    key = layer.weight_key.clone()
    layer.load_state_dict(other.state_dict())
    assert same(layer.weight, other.weight) and same(layer.bias, other.bias) and same(layer.weight_key, key)


# -------------------------------------------------------------------------------------------------------------- errors


def refused(layer, state, *parts, **options):
    """Loading raises one error with all of `parts` in it; the weight keeps its bits."""
    before = of_weight(bits(layer))
    with pytest.raises(RuntimeError) as error:
        layer.load_state_dict(state, **options)
    missing = [part for part in parts if part not in str(error.value)]
    assert not missing, f"{missing} not in: {error.value}"
    assert not differing(before, of_weight(bits(layer)))


@by_turns(4, source=list(RECIPES), target=list(RECIPES), strict=[True, False])
def test_another_format_names_both(source, target, strict):
    saved, loaded = linear(RECIPES[source], seed=1), linear(RECIPES[target], seed=2)
    tags = [module.weight.quantized_storage.spec.tag for module in (saved, loaded)]
    if tags[0] != tags[1]:
        refused(loaded, saved.state_dict(), "weight: ", *(f"'{tag}'" for tag in tags), "recipe", strict=strict)


def test_another_history_length_is_refused():
    state = linear(RECIPES["delayed"], seed=1).state_dict()
    refused(
        linear(RECIPES["delayed newest"], seed=2),
        state,
        "weight_amax_history",
        "shape (1024,) (local (1024,)) in the state dict, (2,) (local (2,)) in this model",
    )


@by_turns(2, recipe=RECIPES, make=[plain_linear, lambda seed: nn.Linear(40, 48)], strict=[True, False])
def test_high_precision_into_quantized_names_the_call(recipe, make, strict):
    state = make(seed=1).state_dict()
    refused(linear(recipe), state, "weight", "float32", "checkpoints.load_high_precision(", strict=strict)


@by_turns(2, recipe=RECIPES, strict=[True, False])
def test_quantized_into_high_precision_names_the_context(recipe, strict):
    state = linear(recipe, seed=1).state_dict()
    refused(plain_linear(), state, "weight", "uint8", "quantized_model_init", strict=strict)


@every_recipe
def test_another_shape_is_refused(recipe):
    torch.manual_seed(1)
    with quantized_model_init(recipe=recipe):
        state = Linear(40, 64, bias=False).state_dict() | {"bias": torch.zeros(48)}
    refused(linear(recipe), state, "weight", "(64, ", "(48, ", "this model and mesh")


def test_another_shape_of_a_plain_weight_is_refused():
    refused(plain_linear(), {"weight": torch.ones(48, 1), "bias": torch.zeros(48)}, "weight", "(48, 1)", "(48, 40)")


@pytest.mark.parametrize("name", KEYS)
def test_missing_keys_under_strict(name):
    for suffix in KEYS[name] | EVERY_WEIGHT:
        state = linear(RECIPES[name]).state_dict()
        del state["weight" + suffix]
        target = linear(RECIPES[name])
        if suffix in {c.key_suffix for c in target.weight.quantized_storage.spec.format.components}:
            for strict in (True, False):  # codes under another weight's scales
                refused(
                    target,
                    state,
                    f"weight: the state dict lacks weight{suffix};",
                    strict=strict,
                )
            continue
        with pytest.raises(RuntimeError, match=rf'Missing key.*"weight{suffix}"'):
            linear(RECIPES[name]).load_state_dict(state)
        result = target.load_state_dict(state, strict=False)
        assert result.missing_keys == ["weight" + suffix] and not result.unexpected_keys


def test_missing_and_unexpected_keys_are_named_once():
    model = nn.ModuleDict({"a": linear("mxfp8")})
    state = model.state_dict()
    state["a.weight_columnwise"] = state.pop("a.weight_draws")
    state["a.surprise"] = state.pop("a.bias")
    result = model.load_state_dict(state, strict=False)
    assert sorted(result.missing_keys) == ["a.bias", "a.weight_draws"]
    assert sorted(result.unexpected_keys) == ["a.surprise", "a.weight_columnwise"]


def test_a_plain_weight_misses_only_itself():
    result = plain_linear().load_state_dict({}, strict=False)
    assert sorted(result.missing_keys) == ["bias", "weight"]


@every_recipe
def test_loading_into_a_meta_module_is_not_silent(recipe):
    """Nothing would be loaded; PyTorch's own modules warn."""
    state = linear(recipe).state_dict()
    torch.manual_seed(0)
    with quantized_model_init(recipe=recipe):
        described = Linear(40, 48, bias=False, device="meta")
    del state["bias"]
    with pytest.raises((RuntimeError, UserWarning), match="meta"):
        described.load_state_dict(state, strict=False)


@every_recipe
def test_the_whole_component_or_the_local_part_may_be_loaded(recipe):
    """Into a shard: `load` finds its entries in whole plain components by the shard's place."""
    saved = linear(recipe, seed=1)
    for piece in torch.chunk(linear(recipe, seed=2).weight.detach(), 3):
        before = {name: part.clone() for name, part in piece.quantized_storage.components.items()}
        twin = next(
            p
            for p in torch.chunk(saved.weight.detach(), 3)
            if p.quantized_storage.shard == piece.quantized_storage.shard
        )
        values = {suffix: value.clone() for suffix, value in components.state_of(twin).items()}
        component_loading.load_components(piece, values, "weight")
        assert differing(before, piece.quantized_storage.components)
        assert not differing(contents(piece), contents(twin))


# ---------------------------------------------------------------------------------------------------------- placements


@pytest.mark.parametrize(
    ("rows", "world", "scale"), [(64, 2, Shard(0)), (48, 2, Replicate()), (1, 3, Shard(0)), (33, 1, Shard(0))]
)
def test_placements_of_a_scale_on_one_axis(rows, world, scale):
    """As the weight where no block straddles ranks, else replicated; replicating axes (HSDP) stay so."""
    fmt = FORMATS["mxfp8_32x32"]
    for piece in pieces_of(whole((rows, 64)), 0, world):
        for before in ((), (Replicate(),)):
            placements = (*before, Shard(0))
            assert components.component_placements(piece, fmt.by_name["codes"], placements) == [*placements]
            assert components.component_placements(piece, fmt.by_name["scale_inv"], placements) == [*before, scale]


def test_placements_of_a_per_tensor_scale():
    scale = FORMATS["fp8_e4m3"].by_name["scale_inv"]
    for piece in pieces_of(whole((64, 64)), 0, 2):
        assert components.component_placements(piece, scale, (Replicate(), Shard(0))) == [Replicate(), Replicate()]


@pytest.mark.parametrize(("dim", "cols", "tp_scale"), [(1, 128, Shard(1)), (1, 96, Replicate()), (0, 64, Shard(0))])
def test_placements_on_two_axes(dim, cols, tp_scale):
    """Mesh axes cut from the last to the first: placements are (FSDP, TP)."""
    scale = FORMATS["mxfp8_32x32"].by_name["scale_inv"]
    for tp in pieces_of(whole((128, cols)), dim, 2):
        for piece in pieces_of(tp, 0, 2):
            found = components.component_placements(piece, scale, (Shard(0), Shard(dim)))
            assert found == [Shard(0), tp_scale]


def test_placements_that_do_not_fit_the_cuts():
    fmt, piece = FORMATS["mxfp8_32x32"], pieces_of(whole((64, 64)), 0, 2)[0]
    with pytest.raises(ConfigurationError, match=r"cut along dims \[0\].*fully_shard"):
        components.component_placements(piece, fmt.by_name["codes"], (Shard(0), Shard(0)))


def test_quantized_finds_quantized_tensors():
    layer = linear("mxfp8")
    assert components.quantized_local(layer.weight) is layer.weight
    assert all(components.quantized_local(other) is None for other in (layer.bias, None, 3, torch.ones(2)))
    assert not isinstance(components.storage_tensors(layer.weight.quantized_storage, layer.weight)["codes"], DTensor)


def test_random_layers_differ():
    assert differing(bits(linear("mxfp8", seed=1)), bits(linear("mxfp8", seed=2)))
    assert not differing(bits(linear("mxfp8", seed=1)), bits(linear("mxfp8", seed=1)))
    assert random(2, 2).dtype == torch.float32


def test_components_stay_where_they_are_on_a_mesh_of_another_device():
    """Under CPU offload the mesh is of GPUs: a component that moved there would be a copy, and a load into it lost."""
    mesh = DeviceMesh("cuda", torch.arange(2), _init_backend=False, _rank=0)
    local = torch.zeros(3, 4)
    found = private_torch.dtensor_around(local, mesh, [Shard(0)], torch.Size((6, 4)))
    assert found._local_tensor is local
    assert (found.device, tuple(found.shape), found.placements) == (local.device, (6, 4), (Shard(0),))


def test_an_average_of_a_state_dict_is_named():
    state = linear(RECIPES["current"], seed=1).state_dict()
    averaged = {name: 0.9 * value + 0.1 * value for name, value in state.items()}
    refused(linear(RECIPES["current"], seed=2), averaged, "its format tag is torch.float32")
