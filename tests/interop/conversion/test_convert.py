"""`convert` and `revert`: which layers change, what stays, and what is said of a model that cannot be converted."""

from __future__ import annotations

import contextlib
import copy
import inspect
import json
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import quantshard as qs
from quantshard.errors import ConfigurationError, FallbackError
from quantshard.formats import FORMATS
from quantshard.gemm.operands import quantize_operand
from quantshard.interop.conversion.linear import ConvertedLinear
from quantshard.modules.contexts import context, settings
from quantshard.optimizers import FusedAdam
from quantshard.readable import by_pattern
from quantshard.recipe import QuantSpec
from quantshard.tensor.quantized_tensor import QuantizedTensor

RECIPES = ["current", "delayed", "block", "rowwise", "mxfp8", "nvfp4"]


class Block(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self.up = nn.Linear(48, 80, dtype=dtype)
        self.gate = nn.Linear(48, 4, bias=False, dtype=dtype)
        self.down = nn.Linear(80, 48, bias=False, dtype=dtype)

    def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        return x + self.down(self.up(x).relu()) * self.gate(x).softmax(-1).amax() * scale


class Model(nn.Module):
    """Two blocks, a router in each, and a tied head."""

    def __init__(self, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self.embedding = nn.Embedding(30, 48, dtype=dtype)
        self.blocks = nn.ModuleList(Block(dtype) for _ in range(2))
        self.norm = nn.RMSNorm(48, dtype=dtype)
        self.lm_head = nn.Linear(48, 30, bias=False, dtype=dtype)
        self.lm_head.weight = self.embedding.weight

    def forward(self, tokens: Tensor, shift: int = 0) -> Tensor:
        """Logits."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.lm_head(self.norm(x)) + shift


def born(dtype: torch.dtype = torch.bfloat16) -> Model:
    torch.manual_seed(3)
    return Model(dtype)


TOKENS = torch.arange(14).view(2, 7)


def test_what_changes_and_what_stays() -> None:
    model, plain = born(), born()
    report = qs.convert(model, "mxfp8")
    assert [layer.name for layer in report.converted] == [f"blocks.{i}.{n}" for i in (0, 1) for n in ("up", "down")]
    assert {layer.name: layer.reason for layer in report.left} == {
        "blocks.0.gate": "a router; a filter that matches it converts it",
        "blocks.1.gate": "a router; a filter that matches it converts it",
        "lm_head": "its weight is also that of embedding",
    }
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in plain.named_parameters()]
    for name, parameter in model.named_parameters():
        is_converted = name.endswith(("up.weight", "down.weight"))
        assert isinstance(parameter, QuantizedTensor) is is_converted, name
        if not is_converted:
            assert torch.equal(parameter, plain.get_parameter(name))
    for name in ("blocks.0.up", "blocks.1.down"):
        found = model.get_submodule(name)
        wanted = quantize_operand(plain.get_submodule(name).weight.detach(), QuantSpec(FORMATS["mxfp8_32x32"]))
        assert isinstance(found, nn.Linear) and isinstance(found, ConvertedLinear)
        assert torch.equal(found.weight.quantized_storage.components["codes"], wanted.components["codes"])
    assert report.bytes_before == 2 * 2 * (48 * 80 + 80 * 48)
    assert report.bytes_after == sum(
        part.numel() * part.element_size()
        for name in ("up", "down") for block in model.blocks
        for part in getattr(block, name).weight.quantized_storage.components.values()
    )  # fmt: skip
    json.dumps(report.to_dict())
    assert asdict(report) == report.to_dict()


@pytest.mark.parametrize("recipe", RECIPES)
def test_it_trains_without_an_autocast(recipe: str) -> None:
    """Losses are those of the same layers under `autocast`; all quantized weights change; gradients reach them all."""
    losses: dict[bool, list[float]] = {}
    for by_itself in (True, False):
        model = born()
        qs.convert(model, recipe, autocast=by_itself)
        optimizer = FusedAdam(model.named_parameters(), lr=1e-2)
        weights = [p for p in model.parameters() if isinstance(p, QuantizedTensor)]
        before = [p.detach().dequantize() for p in weights]
        losses[by_itself] = []
        for _ in range(5):
            with contextlib.nullcontext() if by_itself else qs.autocast(recipe=recipe):
                logits = model(TOKENS)
            loss = nn.functional.cross_entropy(logits.float().flatten(0, 1), TOKENS.flatten().roll(1))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[by_itself].append(loss.item())
        assert len(weights) == 4
        assert not any(torch.equal(a, p.detach().dequantize()) for a, p in zip(before, weights, strict=True))
    assert losses[True] == losses[False] and losses[True][-1] < losses[True][0]


def test_the_model_is_still_what_it_was() -> None:
    model = born()
    model.blocks[0].up.weight.requires_grad_(False)
    model.blocks[0].up.weight.mark = 7
    model.eval()
    seen: list[str] = []
    model.blocks[0].down.register_forward_hook(lambda *_: seen.append("hook"))
    bias = model.blocks[0].up.bias
    qs.convert(model, "mxfp8")
    up = model.blocks[0].up
    assert type(model).__name__ == "Model" and isinstance(model, Model) and model.forward.__doc__ == "Logits."
    assert str(inspect.signature(model.forward)) == "(tokens: 'Tensor', shift: 'int' = 0) -> 'Tensor'"
    assert not up.weight.requires_grad and up.weight.mark == 7 and up.bias is bias and not up.training
    twin = copy.deepcopy(model)
    assert torch.equal(model(TOKENS, shift=2), twin(TOKENS, shift=2)) and seen == ["hook"] * 2
    with torch.no_grad():
        twin.blocks[0].up.bias.add_(1)
    assert not torch.equal(model(TOKENS), twin(TOKENS))  # the copy's forward is the copy's


def test_an_autocast_around_decides() -> None:
    """Its strictness and its being off, also for layers with a recipe of their own."""
    model = born()
    qs.convert(model, {"down": "block", "*": "mxfp8"})
    with pytest.raises(FallbackError), qs.autocast(recipe="mxfp8", strict=True):
        model(TOKENS)
    with qs.autocast(enabled=False):
        off = model(TOKENS)
    assert not torch.equal(off, model(TOKENS))
    qs.revert(model)
    assert torch.allclose(off.float(), model(TOKENS).float(), rtol=2**-5, atol=2**-3)  # sums of bfloat16 layers


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # Dynamo looks at inputs of blocks
@pytest.mark.parametrize("part", [pytest.param("model", marks=pytest.mark.exhaustive), "blocks"])
def test_compiled(part: str) -> None:
    """With a layer of another recipe; the loss and the gradients of the model as it is. A block that is compiled by
    itself runs in an autocast that the model's forward entered, outside of the graph."""
    model = born()
    qs.convert(model, {"down": "block", "*": "mxfp8"})
    found = []
    for compiled in (False, True):
        if compiled:
            for module in model.blocks if part == "blocks" else [model]:
                module.compile(backend="aot_eager")
        model.zero_grad()
        model(TOKENS).float().square().mean().backward()
        found.append([parameter.grad.clone() for parameter in model.parameters()])
    assert all(map(torch.equal, *found))


def test_a_model_that_holds_itself_is_copied() -> None:
    model = born()
    qs.convert(model, "mxfp8")
    model.__dict__["root"] = model
    twin = copy.deepcopy(model)
    assert twin.__dict__["root"] is twin and torch.equal(twin(TOKENS), model(TOKENS))


def by_function(module: nn.Module, name: str) -> str:
    """The recipes of the mapping of `test_recipes_by_name`."""
    assert isinstance(module, nn.Linear)
    return "bf16" if name == "blocks.1.down" else "block" if module.out_features == 48 else "mxfp8"


@pytest.mark.parametrize("recipes", [{"*.1.down": "bf16", "down": "block", "*": "mxfp8"}, by_function])
def test_recipes_by_name(recipes: object) -> None:
    model = born()
    report = qs.convert(model, recipes)
    assert {layer.name: layer.recipe for layer in report.converted} == {
        "blocks.0.up": "mxfp8", "blocks.0.down": "block", "blocks.1.up": "mxfp8",
    }  # fmt: skip
    assert {layer.name: layer.reason for layer in report.left}["blocks.1.down"] == "recipe bf16"
    seen: dict[str, str] = {}
    for name in ("blocks.0.up", "blocks.0.down", "blocks.1.up"):
        layer = model.get_submodule(name)
        layer._project = partial(noted, seen, name, layer._project)
    model(TOKENS)
    assert not any(row.warnings for row in qs.explain(model, recipe="mxfp8").rows)
    assert seen == {layer.name: layer.recipe for layer in report.converted}
    seen.clear()
    with qs.autocast(recipe="current"):  # which decides for none of them, those of the commonest recipe neither
        model(TOKENS)
    assert seen == {layer.name: layer.recipe for layer in report.converted}


def noted(seen: dict[str, str], name: str, project: Callable[..., object], *args: object, **kwargs: object) -> object:
    """A call of a layer, and by which recipe."""
    seen[name] = settings.registered[context.current_setting()].recipe.name
    return project(*args, **kwargs)


@pytest.mark.parametrize("filter", ["up", ["*.up"], ["blocks.*.up"], lambda module, name: name.endswith("up")])
def test_filters(filter: object) -> None:
    report = qs.convert(born(), "mxfp8", filter=filter)
    assert [layer.name for layer in report.converted] == ["blocks.0.up", "blocks.1.up"]
    assert {layer.reason for layer in report.left if layer.name.endswith("down")} == {"not chosen by the filter"}


def test_a_recipe_by_its_very_name_reaches_a_head() -> None:
    """A pattern that matches it among others does not."""
    for recipe, is_converted in (
        ({"lm_head": "mxfp8", "*": "bf16"}, True),
        ({"*head": "mxfp8", "*.up": "block"}, False),
    ):
        model = born()
        model.lm_head.weight = nn.Parameter(torch.randn(30, 48, dtype=torch.bfloat16))
        names = [layer.name for layer in qs.convert(model, recipe).converted]
        assert ("lm_head" in names) is is_converted


def test_a_filter_reaches_routers_and_heads() -> None:
    model = born()
    model.lm_head.weight = nn.Parameter(torch.randn(30, 48, dtype=torch.bfloat16))
    report = qs.convert(model, "mxfp8", filter=["gate", "lm_head"])
    assert [layer.name for layer in report.converted] == ["blocks.0.gate", "blocks.1.gate", "lm_head"]


def test_keys_come_from_names() -> None:
    """Ranks that drew different numbers before convert alike, and convert draws none itself."""
    models = []
    for seed in (0, 1):
        model = born()
        torch.manual_seed(seed)
        before = torch.get_rng_state()
        qs.convert(model, "nvfp4")
        assert torch.equal(torch.get_rng_state(), before)
        models.append(model)
    one, two = (model.state_dict() for model in models)
    keys = [name for name in one if name.endswith("_key")]
    assert len({int(one[name]) for name in keys}) == 4 and all(torch.equal(one[name], two[name]) for name in keys)


def test_histories_and_counts_begin_at_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever lay in the memory that they got."""
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    torch.use_deterministic_algorithms(True)
    try:
        model = born()
        qs.convert(model, "delayed")
    finally:
        torch.use_deterministic_algorithms(False)
    entries = {name: value for name, value in model.state_dict().items() if name.endswith(("history", "draws"))}
    assert len(entries) == 4 * 4 and not any(
        value.any() for name, value in entries.items() if "weight_amax" not in name
    )
    assert all(value.isfinite().all() for value in entries.values())


def test_histories_of_a_meta_model_begin_at_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    """`to_empty` and a load that has none."""
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    torch.use_deterministic_algorithms(True)
    try:
        with qs.quantized_model_init(recipe="delayed"):
            model = nn.Sequential(qs.Linear(8, 8, device="meta"))
        model.to_empty(device="cpu")
        qs.checkpoints.load_high_precision(model, {"0.weight": torch.randn(8, 8), "0.bias": torch.zeros(8)})
    finally:
        torch.use_deterministic_algorithms(False)
    entries = {
        name: value
        for name, value in model.state_dict().items()
        if name.endswith(("input_amax_history", "output_amax_history"))
    }
    assert len(entries) == 2 and not any(value.any() for value in entries.values())


def test_on_the_meta_device() -> None:
    """Converted before the weights are there, and filled by what is loaded."""
    with torch.device("meta"):
        model = Model()
    qs.convert(model, "block")
    assert all(parameter.is_meta for parameter in model.parameters())
    model.to_empty(device="cpu")
    model.lm_head.weight = model.embedding.weight
    source, twin = born(), born()
    qs.checkpoints.load_high_precision(model, source.state_dict())
    qs.convert(twin, "block")
    assert torch.equal(model(TOKENS), twin(TOKENS))


def test_masters_begin_with_the_values() -> None:
    model, plain = born(torch.float32), born(torch.float32)
    qs.convert(model, "nvfp4", preserve_high_precision_init_val=True)
    optimizer = FusedAdam(model.named_parameters())
    weight = model.blocks[0].up.weight
    assert torch.equal(optimizer.get_unscaled_state(weight, "master_param"), plain.blocks[0].up.weight)


def test_revert() -> None:
    model = born()
    qs.convert(model, "mxfp8")
    values = model.blocks[0].up.weight.detach().dequantize()
    with qs.autocast(enabled=False):
        expected = model(TOKENS)
    assert qs.revert(model) == 4
    assert type(model) is Model and all(type(block.up) is nn.Linear for block in model.blocks)
    assert torch.equal(model.blocks[0].up.weight, values) and expected.shape == model(TOKENS).shape
    qs.convert(model, "block")
    with pytest.raises(ConfigurationError, match="no layer made by quantshard"):
        qs.revert(born())


def test_weights_tied_after_convert_stay_so_in_revert() -> None:
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 32))
    qs.convert(model, "mxfp8")
    model[2].weight = model[0].weight
    qs.revert(model)
    assert model[2].weight is model[0].weight is not model[1].weight and len(list(model.parameters())) == 5


def test_a_layer_that_another_model_computes_with_is_trained_after_revert(recwarn: pytest.WarningsRecorder) -> None:
    model = nn.Sequential(nn.Linear(32, 32), nn.ReLU())
    qs.convert(model, "mxfp8")
    other = nn.Sequential(model[0], nn.ReLU())
    optimizer = FusedAdam(other.parameters(), lr=1e-3)
    qs.revert(model)
    other(torch.ones(2, 32)).sum().backward()
    optimizer.step()
    assert not recwarn and type(model[0]) is nn.Linear


def test_a_layer_by_itself_is_not_reverted() -> None:
    model = nn.Sequential(nn.Linear(32, 32))
    qs.convert(model, "mxfp8")
    with pytest.raises(ConfigurationError, match="call it on the model around this layer"):
        qs.revert(model[0])


def test_modules_in_several_places() -> None:
    shared = nn.Linear(48, 48)
    model = nn.Sequential(shared, nn.ReLU(), shared)
    assert len(qs.convert(model, "mxfp8").converted) == 1
    assert model[0] is model[2] and isinstance(model[0], ConvertedLinear)


class Own(nn.Linear):
    pass


def test_layers_that_compute_otherwise_are_left() -> None:
    model = nn.ModuleDict({
        "own": Own(4, 4), "plain": nn.Linear(4, 4), "attention": nn.MultiheadAttention(8, 2),
        "normed": parametrizations.weight_norm(nn.Linear(4, 4)),
    })  # fmt: skip
    report = qs.convert(model, "mxfp8")
    reasons = {layer.name: layer.reason for layer in report.left}
    assert [layer.name for layer in report.converted] == ["plain"]
    assert reasons["own"].endswith("Own, which computes in its own way")
    assert reasons["attention.out_proj"].startswith("a torch.NonDynamicallyQuantizableLinear")
    assert reasons["normed"] == "its weight is computed from other parameters"


def converted() -> Model:
    model = born()
    qs.convert(model, "mxfp8")
    return model


WRONG: dict[str, tuple[Callable[[], object], str]] = {
    "no linear layer": (
        lambda: qs.convert(nn.Sequential(nn.Conv2d(1, 2, 3)), "mxfp8"),
        "it has no torch.nn.Linear",
    ),
    "itself a linear layer": (lambda: qs.convert(nn.Linear(3, 3), "mxfp8"), "layers inside a model.*nn.Sequential"),
    "a filter with a typo": (
        lambda: qs.convert(born(), "mxfp8", filter="dwn"),
        "'dwn'.*none of the 7 .*down",
    ),
    "a filter of nothing": (lambda: qs.convert(born(), "mxfp8", filter=lambda *_: False), "not chosen by the filter"),
    "a recipe for no name": (lambda: qs.convert(born(), {"*.q_proj": "mxfp8"}), "q_proj.*none of the 7"),
    "an unknown recipe": (lambda: qs.convert(born(), "mxpf8"), "unknown recipe 'mxpf8'"),
    "nothing quantized": (lambda: qs.convert(born(), "bf16"), "can be converted: recipe bf16"),
    "no recipe": (lambda: qs.convert(born(), {}), "give an entry"),
    "None in a mapping": (lambda: qs.convert(born(), {"up": None, "*": "block"}), "'up' has None.*'bf16' is"),
    "a function of None": (lambda: qs.convert(born(), lambda *_: None), r"blocks\.0\.up has None.*'bf16' is"),
    "converted already": (lambda: qs.convert(converted(), "block"), "already quantized; .*revert"),
    "modules": (lambda: qs.convert(born(), "mxfp8", modules="fussed"), "modules='fussed'.*linear"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_cannot_be_converted_is_said_in_a_line(case: str) -> None:
    run, words = WRONG[case]
    with pytest.raises(ConfigurationError, match=words) as caught:
        run()
    assert "\n" not in str(caught.value)


def test_the_report_fits_a_terminal() -> None:
    model = nn.Module()
    model.layers = nn.ModuleList(Block() for _ in range(12))
    lines = str(qs.convert(model, "mxfp8")).splitlines()
    assert lines == [
        "converted 24 linear layers: 180.0 KiB of weights are 90.1 KiB now",
        "  layers.{0-11}.up [80, 48] x12: mxfp8: mxfp8_32x32",
        "  layers.{0-11}.down [48, 80] x12: mxfp8: mxfp8_32x32",
        "not converted: 12 linear layers",
        "  layers.{0-11}.gate [4, 48] x12: a router; a filter that matches it converts it",
    ]


class Experts(nn.Module):
    """As those of transformers 5."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.zeros(4, 96, 32))
        self.down_proj = nn.Parameter(torch.zeros(4, 32, 48, dtype=torch.bfloat16))
        self.token = nn.Parameter(torch.zeros(1, 9, 32))


def test_stacked_experts_are_listed_as_left() -> None:
    """By name, with shape and bytes; not convolutions, nor what only has three dims."""
    model = nn.Module()
    model.layers = nn.ModuleList(nn.Sequential(nn.Linear(32, 32), Experts(), nn.Conv1d(2, 3, 4)) for _ in range(3))
    report = qs.convert(model, "mxfp8")
    assert len(report.left) == 6 and json.dumps(report.to_dict())
    assert str(report).splitlines()[-3:] == [
        "not converted: 6 linear layers",
        "  layers.{0-2}.1.gate_up_proj [4, 96, 32] x3: stacked experts, 48.0 KiB in high precision",
        "  layers.{0-2}.1.down_proj [4, 32, 48] x3: stacked experts, 12.0 KiB in high precision",
    ]


def test_patterns_of_names() -> None:
    names = ["a.0.w", "a.1.w", "a.3.w", "b", "a.2.v", "h.0.e.7.w", "h.1.e.7.w", "fc1", "fc2"]
    assert by_pattern([(name, "x") for name in names]) == [
        ("a.{0-1,3}.w", 3, "x"), ("b", 1, "x"), ("a.2.v", 1, "x"), ("h.{0-1}.e.7.w", 2, "x"), ("fc1", 1, "x"),
        ("fc2", 1, "x"),
    ]  # fmt: skip


def test_recipes_of_one_name_that_differ_by_arguments_are_two():
    """A layer whose recipe has arguments runs by it, in the autocast of the others, which have its name."""
    own = qs.recipe.Float8CurrentScaling(fp8_format="E4M3")
    model = nn.Sequential(*[nn.Linear(32, 32, bias=False) for _ in range(3)]).bfloat16()
    qs.convert(model, {"0": own, "*": "current"})
    x, dy = (torch.randn(8, 32, generator=torch.Generator().manual_seed(seed)).bfloat16() for seed in (1, 2))
    found = []
    for recipe in ("current", own):
        x.requires_grad_().grad = None
        with qs.autocast(recipe=recipe):
            model[0](x).backward(dy)
        found.append(x.grad.clone())
    assert torch.equal(*found)


@pytest.mark.parametrize("recipe", ["current/wgrad:bf16", {"*": "current/wgrad:bf16"}])
def test_an_autocast_of_like_weights_decides_where_one_recipe_was_given(recipe: object) -> None:
    """A mixture's weights fit its first recipe: by name each layer keeps its gradients in BF16 there."""
    found = []
    for around in ("current/wgrad:bf16", "current"):
        model = nn.Sequential(*[nn.Linear(32, 32, bias=False) for _ in range(2)]).bfloat16()
        with torch.no_grad():
            for layer in model:
                layer.weight.copy_(torch.linspace(-1, 1, 1024).view(32, 32))
        qs.convert(model, recipe)
        x = torch.randn(8, 32, generator=torch.Generator().manual_seed(1)).bfloat16()
        with qs.autocast(recipe=around):
            model(x).square().sum().backward()
        found.append([layer.weight.grad for layer in model])
    assert all(map(torch.equal, *found)) == isinstance(recipe, dict)


class DirectReader(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mixer = nn.ModuleDict({"inner": nn.Linear(32, 32), "outer": nn.Linear(32, 32)})

    def forward(self, x: Tensor) -> Tensor:
        return self.mixer["outer"](x) @ self.mixer["inner"].weight.t()


def test_a_layer_that_the_model_reads_directly_can_be_left_out() -> None:
    model = nn.Sequential(DirectReader())
    qs.convert(model, "mxfp8")
    with pytest.warns(UserWarning, match=r"aten\.mm\.default .* high precision with convert\(filter=\.\.\.\)"):
        model(torch.randn(2, 32)).sum().backward()
    assert model[0].mixer["inner"].weight.grad.any()
    model = nn.Sequential(DirectReader())
    qs.convert(model, {"*.inner": "bf16", "*": "mxfp8"})
    model(torch.randn(2, 32)).sum().backward()


@pytest.mark.parametrize("kind", ["Mamba", "FalconMamba"])
def test_mamba_keeps_the_layer_that_it_reads_directly(kind: str) -> None:
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "vocab_size": 64, "state_size": 4}
    model = getattr(transformers, f"{kind}ForCausalLM")(getattr(transformers, f"{kind}Config")(**sizes))
    found = qs.convert(model, "mxfp8")
    assert [layer.name for layer in found.converted] == [
        f"backbone.layers.0.mixer.{name}" for name in ("in_proj", "x_proj", "out_proj")
    ]
    [(name, reason)] = [(layer.name, layer.reason) for layer in found.left if layer.name != "lm_head"]
    assert name.endswith("dt_proj") and reason.startswith("the model reads its weight directly")
    model(torch.arange(12).view(1, 12)).logits.sum().backward()


@pytest.mark.parametrize("masters", [False, True])
def test_an_optimizer_built_before_is_named(masters: bool) -> None:
    """It would train the norms and embeddings alone; revert replaces the weights, too."""
    model = born()
    params = dict(model.named_parameters())

    def built() -> Any:
        if masters:
            return qs.optimizers.MasterWeights(torch.optim.AdamW, model.named_parameters(), lr=1e-3)
        return qs.optimizers.FusedAdam(model.named_parameters(), lr=1e-3)

    optimizer = built()
    qs.convert(model, "mxfp8")
    replaced = len(params) - sum(any(param is own for own in model.parameters()) for param in params.values())
    model(TOKENS).float().sum().backward()
    with pytest.warns(UserWarning, match=rf"convert or revert replaced {replaced} of its parameters"):
        optimizer.step()
    optimizer = built()
    model(TOKENS).float().sum().backward()
    optimizer.step()
