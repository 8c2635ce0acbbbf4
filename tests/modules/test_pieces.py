"""Weights assigned piece by piece: by transformers' `from_pretrained`, and by hand with `setattr`.

A load gives every bit back, what the file lacks has its initial values, and what does not fit is refused by name.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import quantshard as qs
from quantshard.errors import CheckpointError, UnsupportedOperationError
from tests.tensor.test_tensor import differing

transformers = pytest.importorskip("transformers")

RECIPES = ["delayed", "current", "block", "rowwise", "mxfp8"]
"""Whose codes have the shape of their weight, which transformers compares."""


class Config(transformers.PretrainedConfig):
    model_type = "of_quantshard_modules"

    def __init__(self, recipe: str = "mxfp8", stored: bool = True, kind: str = "ours", **others: Any) -> None:
        super().__init__(**others)
        self.recipe, self.stored, self.kind = recipe, stored, kind


class Model(transformers.PreTrainedModel):
    """With PyTorch's layers beside ours."""

    config_class = Config
    base_model_prefix = "model"

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.first = nn.Linear(32, 32)
        with qs.quantized_model_init(enabled=config.stored and config.kind != "pytorch", recipe=config.recipe):
            self.linear = nn.Linear(32, 40) if config.kind == "pytorch" else qs.Linear(32, 40)
            if config.kind != "pytorch":
                self.entry = qs.LayerNormLinear(40, 33, parameters_split=["a", "b", "c"])
                self.norm = qs.RMSNorm(33, zero_centered_gamma=True)
            if config.kind == "all":
                self.mlp = qs.LayerNormMLP(33, 48, activation="swiglu")
                self.experts = qs.GroupedLinear(2, 33, 16, bias=False)
        self.post_init()


def build(seed: int = 1, trained: bool = True, **options: Any) -> Model:
    torch.manual_seed(seed)
    model = Model(Config(**options))
    if trained:  # stochastic rounding of weights without masters: draws are counted
        optimizer = qs.optimizers.FusedAdam(model.parameters(), lr=1e-2, master_weights=False)
        for param in model.parameters():
            param.grad = torch.randn(param.shape, generator=torch.Generator().manual_seed(param.numel()))
        optimizer.step()
        optimizer.zero_grad()
        for name, buffer in model.named_buffers():
            buffer.fill_(len(name))
    return model


def saved(model: Model, folder: Path, without: tuple[str, ...] = ()) -> Path:
    state = {key: value for key, value in model.state_dict().items() if not key.endswith(without)}
    model.save_pretrained(folder, state_dict=state)
    return folder


def loaded(folder: Path, seed: int = 2, **options: Any) -> tuple[Model, Any]:
    torch.manual_seed(seed)
    dtype = options.pop("dtype", None)
    config = Config(**options) if options else None
    return Model.from_pretrained(folder, config=config, dtype=dtype, output_loading_info=True)


def initial(seed: int, **options: Any) -> dict[str, torch.Tensor]:
    """What our modules hold that are built on the meta device and then filled."""
    torch.manual_seed(seed)
    with torch.device("meta"):
        model = Model(Config(**options))
    for module in model.modules():
        if isinstance(module, qs.modules.base.module.QuantizedModule):
            module.to_empty(device="cpu").reset_parameters()
    return model.state_dict()


@pytest.mark.parametrize("stored", [True, False])
@pytest.mark.parametrize("recipe", RECIPES)
def test_every_bit_comes_back(tmp_path: Path, recipe: str, stored: bool) -> None:
    before = build(recipe=recipe, stored=stored, kind="all")
    after, info = loaded(saved(before, tmp_path))
    assert not any(info.values())
    assert not differing(before.state_dict(), after.state_dict())
    assert [type(p) for p in before.parameters()] == [type(p) for p in after.parameters()]
    assert all(param.requires_grad for param in after.parameters())
    x = torch.randn(3, 40)
    for autocast in ("bf16", recipe):
        outs = []
        for model in (before, after):
            with qs.autocast(recipe=autocast):
                outs.append(model.train().entry(x)[0])  # from_pretrained leaves it in evaluation
        assert torch.equal(*outs)
    again = saved(after, tmp_path / "again")
    assert not differing(before.state_dict(), loaded(again, 3)[0].state_dict())


def test_another_dtype_is_that_of_what_is_in_high_precision(tmp_path: Path) -> None:
    before = build()
    after, _ = loaded(saved(before, tmp_path), dtype=torch.bfloat16)
    want = {
        k: v.bfloat16() if v.is_floating_point() and "scale" not in k else v for k, v in before.state_dict().items()
    }
    assert not differing(want, after.state_dict())
    assert after.linear.weight.dtype == torch.bfloat16


def test_it_goes_on_training(tmp_path: Path) -> None:
    """With the same random words."""
    before = build(recipe="delayed")
    after, _ = loaded(saved(before, tmp_path))
    for model in (before, after):
        optimizer = qs.optimizers.FusedAdam(model.parameters(), lr=1e-2, master_weights=False)
        with qs.autocast(recipe="delayed"):
            model.train().entry(torch.ones(16, 40)).square().sum().backward()
        optimizer.step()
    assert not differing(before.state_dict(), after.state_dict())


@pytest.mark.parametrize(
    ("without", "options"),
    [
        (("_key", "_draws"), {}),
        (("_key", "_draws", "_amax_history"), {"recipe": "delayed"}),
        (("_key", "_draws", "_amax_history"), {"recipe": "delayed", "stored": False}),
        (("norm.weight", "a_bias", "linear.bias"), {}),
        (("weight", "scale_inv", "_key", "_draws", "_format"), {}),
        (("weight", "_key", "_draws"), {"stored": False}),
    ],
)  # fmt: skip
def test_what_the_file_lacks_has_its_initial_values(
    tmp_path: Path, without: tuple[str, ...], options: dict[str, Any]
) -> None:
    before = build(**options)
    after, info = loaded(saved(before, tmp_path, without))
    lacking = {key for key in before.state_dict() if key.endswith(without)}
    assert info["missing_keys"] == lacking
    born, had = initial(2, **options), before.state_dict()
    for key in born:
        if key.endswith("weight_amax_history"):  # of amaxes before those of the loaded codes
            born[key].zero_()
    of_pytorch = {key for key in lacking if key.startswith("first.")}  # initialized by transformers
    found = {key: value for key, value in after.state_dict().items() if key not in of_pytorch}
    want = {key: born[key] if key in lacking else had[key] for key in found}
    assert not differing(want, found)


def test_a_file_of_pytorchs_layers(tmp_path: Path) -> None:
    """Which knows nothing of keys and draws."""
    before = build(kind="pytorch")
    after, _ = loaded(saved(before, tmp_path), stored=False)
    assert not differing(initial(2, stored=False) | before.state_dict(), after.state_dict())


@pytest.mark.parametrize(
    ("of", "into", "match"),
    [
        ({}, {"stored": False}, r"LayerNormLinear\.a_weight: the state dict holds cast codes.*quantized_model_init"),
        ({"stored": False}, {}, r"lacks weight_scale_inv.*load_high_precision"),
        ({"kind": "pytorch"}, {}, r"Linear\.weight: the file lacks weight_scale_inv"),
        ({"recipe": "block"}, {}, r"'fp8_128x128', but this model's weight is 'mxfp8_32x32'"),
        ({"recipe": "delayed"}, {"recipe": "current"}, r"'fp8_e4m3\+hist', but this model's weight is 'fp8_e4m3'"),
    ],
)
def test_what_does_not_fit_is_refused(tmp_path: Path, of: dict[str, Any], into: dict[str, Any], match: str) -> None:
    with pytest.raises(CheckpointError, match=match):
        loaded(saved(build(**of), tmp_path), **{"recipe": "mxfp8", **into})


def test_a_lacking_scale_is_refused(tmp_path: Path) -> None:
    folder = saved(build(), tmp_path, ("b_weight_scale_inv",))
    with pytest.raises(CheckpointError, match=r"LayerNormLinear\.b_weight: .*lacks b_weight_scale_inv"):
        loaded(folder)


def test_packed_codes_are_refused(tmp_path: Path) -> None:
    """Their shape is not that of the weight, so transformers does not take them."""
    folder = saved(build(recipe="nvfp4"), tmp_path)
    with pytest.raises(RuntimeError, match="ignore_mismatched_sizes") as raised:
        loaded(folder)
    assert isinstance(raised.value.__context__, CheckpointError)
    with pytest.raises(CheckpointError, match=r"the file lacks weight, or has another shape"):
        Model.from_pretrained(folder, ignore_mismatched_sizes=True)


def test_transformers_initializes_none_of_ours() -> None:
    """It takes every class with LayerNorm in its name for a norm, and would set the weight behind to ones."""
    for stored in (True, False):
        model = build(trained=False, stored=stored, kind="all")
        torch.manual_seed(1)
        nn.Linear(32, 32)
        with qs.quantized_model_init(enabled=stored, recipe="mxfp8"):
            linear, entry = qs.Linear(32, 40), qs.LayerNormLinear(40, 33, parameters_split=["a", "b", "c"])
        assert not differing(linear.state_dict(), model.linear.state_dict())
        assert not differing(entry.state_dict(), model.entry.state_dict())
        assert not model.norm.weight.any()


def test_values_stay_where_they_were_given_otherwise() -> None:
    """A module of the meta device that was filled or loaded is not filled again when transformers asks."""
    source = build(3, trained=False).linear.state_dict()
    for how in ("reset_parameters", "load_state_dict", "assign"):
        torch.manual_seed(5)
        with qs.quantized_model_init(recipe="mxfp8"):
            module = qs.Linear(32, 40, device="meta")
        if how == "reset_parameters":
            module.reset_parameters()
        elif how == "assign":
            module.load_state_dict(source, assign=True)
        else:
            module.to_empty(device="cpu").load_state_dict(source)
        with torch.no_grad():
            module.bias.fill_(3)
        before = {key: value.clone() for key, value in module.state_dict().items()}
        assert module._is_hf_initialized is False
        assert not differing(before, module.state_dict())


# By hand


def meta(recipe: str = "mxfp8", stored: bool = True) -> qs.Linear:
    torch.manual_seed(4)
    with qs.quantized_model_init(enabled=stored, recipe=recipe):
        return qs.Linear(32, 40, device="meta")


@pytest.mark.parametrize("recipe", [*RECIPES, "nvfp4"])
def test_in_any_order(recipe: str) -> None:
    torch.manual_seed(3)
    with qs.quantized_model_init(recipe=recipe):
        source = qs.Linear(32, 40).state_dict()
    for order in range(3):
        module, items = meta(recipe), list(source.items())
        random.Random(order).shuffle(items)
        for key, value in items:
            is_buffer = key in dict(module.named_buffers())
            setattr(module, key, value if is_buffer else nn.Parameter(value, value.is_floating_point()))
        assert not differing(source, module.state_dict())
        assert set(dict(module.named_parameters())) == {"weight", "bias"}


def test_pieces_are_found_as_parameters() -> None:
    module = meta()
    for key in module.state_dict():
        assert isinstance(module.get_parameter(key), nn.Parameter)
    assert module.get_parameter("weight_key").data_ptr() == module.state_dict()["weight_key"].data_ptr()


def test_what_cannot_be_assigned_is_refused() -> None:
    def parameter(value: torch.Tensor) -> nn.Parameter:
        return nn.Parameter(value, requires_grad=False)

    torch.manual_seed(3)
    with qs.quantized_model_init(recipe="mxfp8"):
        real = qs.Linear(32, 40)
    state, plain = real.state_dict(), qs.Linear(32, 40)
    for key in ("weight", "weight_scale_inv"):
        with pytest.raises(UnsupportedOperationError, match=rf"Linear\.{key} cannot be assigned alone"):
            setattr(real, key, parameter(state[key].clone()))
    with pytest.raises(CheckpointError, match=r"Linear\.weight: the state dict holds torch.uint8 codes"):
        plain.weight = parameter(state["weight"])
    with pytest.raises(CheckpointError, match=r"Linear\.weight_key: shape \(2,\), here it is \(1,\)"):
        plain.weight_key = parameter(torch.zeros(2, dtype=torch.int64))
    plain.weight_key = parameter(torch.tensor([7]))
    assert plain.state_dict()["weight_key"] == 7
    plain.weight = nn.Parameter(torch.arange(32 * 40.0).reshape(40, 32) % 256)  # by hand whole numbers are values
