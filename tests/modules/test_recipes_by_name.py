"""`quantize_` with recipes by the names of layers: the same model as one context around each layer, and errors."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import quantshard as qs
from quantshard.errors import ConfigurationError, FallbackError
from quantshard.gemm import hardware
from quantshard.recipe import Recipe
from quantshard.tensor import components
from tests.pages import snippets

BF16 = torch.bfloat16
SHORT_HISTORY = qs.recipe.DelayedScaling(amax_history_len=3)
RECIPES: dict[str, str | Recipe] = {
    "blocks.0.*": "bf16", "*.down": SHORT_HISTORY, "mlp": "nvfp4", "*.experts": "block", "head": "bf16", "*": "mxfp8",
}  # fmt: skip
EXPECTED: dict[str, str | Recipe] = {
    "blocks.0.up": "bf16", "blocks.0.down": "bf16", "blocks.1.up": "mxfp8", "blocks.1.down": SHORT_HISTORY,
    "mlp": "nvfp4", "mixture.experts": "block", "head": "bf16",
}  # fmt: skip
X = torch.randn(6, 48, generator=torch.Generator().manual_seed(0)).to(BF16)


def within(recipe: str | Recipe | None) -> qs.quantized_model_init | torch.no_grad:
    """A context of one recipe; of None none that matters."""
    return torch.enable_grad() if recipe is None else qs.quantized_model_init(recipe=recipe)


class Block(nn.Module):
    def __init__(self, up: str | Recipe | None, down: str | Recipe | None, device: str) -> None:
        super().__init__()
        with within(up):
            self.up = qs.Linear(48, 80, params_dtype=BF16, device=device)
        with within(down):
            self.down = qs.Linear(80, 48, bias=False, params_dtype=BF16, device=device)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).relu())


class Model(nn.Module):
    """One of each kind of layer; `recipes`: of each, by name, or none."""

    def __init__(self, recipes: dict[str, str | Recipe] | None = None, device: str = "cpu") -> None:
        super().__init__()
        of = (recipes or {}).get
        self.embedding = nn.Embedding(30, 48, dtype=BF16)
        self.blocks = nn.ModuleList(
            Block(of(f"blocks.{number}.up"), of(f"blocks.{number}.down"), device) for number in range(2)
        )
        with within(of("mlp")):
            self.mlp = qs.LayerNormMLP(48, 64, activation="swiglu", params_dtype=BF16, device=device)
        self.mixture = nn.Module()
        with within(of("mixture.experts")):
            self.mixture.experts = qs.GroupedLinear(2, 48, 48, params_dtype=BF16, device=device)
        with within(of("head")):
            self.head = qs.LayerNormLinear(48, 30, bias=False, params_dtype=BF16, device=device)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        x = self.mixture.experts(self.mlp(x), [x.shape[0] - 2, 2])
        return self.head(x)


def born(recipe: object = RECIPES, seed: int = 3, build: Callable[[], nn.Module] = Model, **options: bool) -> nn.Module:
    torch.manual_seed(seed)
    model = build()
    qs.quantize_(model, recipe, **options)
    return model


def one_by_one(**options: str) -> Model:
    torch.manual_seed(3)
    return Model(EXPECTED, **options)


def own_recipes(model: nn.Module) -> dict[str, object]:
    return {name: layer.recipe for name, layer in model.named_modules() if getattr(layer, "recipe", None) is not None}


def same_state(one: nn.Module, two: nn.Module) -> bool:
    ours, theirs = one.state_dict(), two.state_dict()
    return ours.keys() == theirs.keys() and all(torch.equal(value, theirs[key]) for key, value in ours.items())


def by_table(module: nn.Module, name: str) -> str | Recipe:
    return EXPECTED[name]


@pytest.mark.parametrize("recipes", [RECIPES, by_table], ids=["mapping", "function"])
def test_the_model_is_that_of_a_context_around_each_layer(recipes: object) -> None:
    model = born(recipes)
    assert own_recipes(model) == EXPECTED
    assert same_state(model, one_by_one())


def test_from_the_meta_device() -> None:
    """Filled by `reset_parameters`, which keeps high-precision values where that was asked for."""
    torch.manual_seed(3)
    model = Model(device="meta")
    qs.quantize_(model, RECIPES, preserve_high_precision_init_val=True)
    assert model.mlp.fc1_gate_weight.is_meta and model.blocks[1].down.input_amax_history.is_meta
    twin = born(RECIPES, preserve_high_precision_init_val=True)
    for module in model.modules():
        if hasattr(module, "reset_parameters") and not isinstance(module, nn.Embedding):
            module.reset_parameters()
    torch.manual_seed(0)
    assert same_state(model, twin) and same_state(model, one_by_one())
    for layer in (model.mlp, twin.mlp):
        kept, weight = layer.fc2_weight.get_high_precision_init_val(), layer.fc2_weight
        assert kept.dtype == BF16 and torch.equal(kept, twin.mlp.fc2_weight.get_high_precision_init_val())
        assert 0 < (weight.dequantize() - kept).abs().max() < 0.05


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of Dynamo itself
@pytest.mark.parametrize("how", ["eager", "compiled", "recomputed"])
def test_each_layer_runs_by_its_own_recipe(how: str) -> None:
    """In an autocast of any; the output and the gradients of a forward that enters one around each layer."""
    model, twin = born(), one_by_one()
    wanted = X
    for module, name in ((twin.blocks[0], "blocks.0"), (twin.blocks[1], "blocks.1")):
        with qs.autocast(recipe=EXPECTED[f"{name}.up"]):
            hidden = module.up(wanted).relu()
        with qs.autocast(recipe=EXPECTED[f"{name}.down"]):
            wanted = wanted + module.down(hidden)
    with qs.autocast(recipe="nvfp4"):
        wanted = twin.mlp(wanted)
    with qs.autocast(recipe="block"):
        wanted = twin.mixture.experts(wanted, [4, 2])
    wanted = twin.head(wanted)
    wanted.float().square().mean().backward()
    with qs.autocast(recipe="current"):
        if how == "recomputed":
            out = qs.checkpoint(model, X)
        else:
            out = (torch.compile(model, backend="aot_eager") if how == "compiled" else model)(X)
    out.float().square().mean().backward()
    assert torch.equal(out, wanted)
    for (name, one), two in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert name == "embedding.weight" or torch.equal(one.grad, two.grad), name
    histories = [module.blocks[1].down.input_amax_history for module in (model, twin)]
    assert torch.equal(*histories) and histories[0].count_nonzero() == 1


def test_outside_of_an_autocast_that_quantizes_nothing_is() -> None:
    """Weights are dequantized, as those of a model of one recipe are."""
    found = []
    for model in (born(), one_by_one()):
        with qs.autocast(enabled=False):
            found.append(model(X))
    with torch.no_grad():
        found.append(born()(X))
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


def test_strict_is_of_the_layers_own_recipe() -> None:
    model = born({"head": "bf16", "*": "mxfp8"})
    with qs.autocast(recipe="mxfp8", strict=True):
        model.head(X)
        with pytest.raises(FallbackError, match="no matrix product"):
            model.blocks[0].up(X)


def test_values_that_the_model_gives_itself_stay() -> None:
    class Ones(Model):
        def __init__(self) -> None:
            super().__init__()
            nn.init.ones_(self.blocks[1].up.weight)
            self.blocks[1].up.weight.requires_grad_(False)
            self.blocks[1].up.weight.mark = "mine"

    weight = born(build=Ones).blocks[1].up.weight
    assert components.storage_of(weight).spec.format.name == "mxfp8_32x32"
    assert torch.equal(weight.dequantize(), torch.ones(80, 48, dtype=BF16))
    assert not weight.requires_grad and weight.mark == "mine"


def test_one_recipe_leaves_layers_to_the_autocast() -> None:
    model = born("mxfp8", build=lambda: Block(None, None, "cpu"))
    assert own_recipes(model) == {} and components.storage_of(model.up.weight).spec.format.name == "mxfp8_32x32"


def test_layers_that_were_built_in_a_context_keep_its_recipe() -> None:
    def build() -> nn.Module:
        inner = Block("block", None, "cpu")
        with qs.quantized_model_init(enabled=False):
            head = qs.Linear(48, 30)
        return nn.Sequential(inner, head)

    model = born({"down": "mxfp8"}, build=build)
    assert own_recipes(model) == {"0.down": "mxfp8"}
    assert components.storage_of(model[0].up.weight).spec == qs.recipe.resolve("block").weight
    assert components.quantized_local(model[1].weight) is None


def test_values_that_are_to_come_are_asked_for() -> None:
    """What left the meta device inside has memory as it was: it is not quantized as if it were values."""
    model = born({"*": "mxfp8"}, build=lambda: nn.Sequential(qs.Linear(48, 48, device="meta")).to_empty(device="cpu"))
    with pytest.raises(ConfigurationError, match="was never given values"), qs.autocast(recipe="mxfp8"):
        model(X)


def test_explain_goes_by_the_layers_own_recipes() -> None:
    model = born()
    model.embedding.recipe = {"of": "another kind"}  # an attribute of the user's
    rows = {row.name: row for row in qs.explain(model, recipe="mxfp8").rows}
    assert not any(row.warnings for row in rows.values())
    assert {name: row.format for name, row in rows.items() if "weight" in name and "norm" not in name} == {
        "embedding.weight": "bfloat16",
        "blocks.0.up.weight": "bfloat16", "blocks.0.down.weight": "bfloat16", "blocks.1.up.weight": "mxfp8_32x32",
        "blocks.1.down.weight": "fp8_e4m3+hist", "mlp.fc1_gate_weight": "nvfp4_16x16",
        "mlp.fc1_up_weight": "nvfp4_16x16", "mlp.fc2_weight": "nvfp4_16x16", "head.weight": "bfloat16",
        **{f"mixture.experts.weight{number}": components.storage_of(born().mixture.experts.weight0).spec.tag
           for number in (0, 1)},
    }  # fmt: skip
    assert "quantized for each forward" not in rows["head.weight"].gemm_reason


@pytest.mark.parametrize("by_name", [False, True])
def test_explain_and_plan_go_by_what_a_layer_was_quantized_by(by_name: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """FP8 whose wgrad no product of Hopper computes: by the format of its weight alone it would be native."""
    name = "current/wgrad:mxfp8"
    with within(None if by_name else name):
        model = nn.Sequential(*[qs.Linear(64, 64, bias=False, device="meta") for _ in range(2)])
    if by_name:
        qs.quantize_(model, {"0": name, "1": "current"})
    emulated = ["emulated", "native" if by_name else "emulated"]
    planned = qs.plan(model, {"dp": 2}, capability=(9, 0)).rows
    assert [row.gemm for row in planned] == emulated and "wgrad" in planned[0].gemm_reason
    assert all("emulated" in row.fallbacks for row in planned if row.gemm == "emulated")
    monkeypatch.setattr(hardware, "capability_of", lambda device: (9, 0))
    assert [row.gemm for row in qs.explain(model).rows] == emulated
    around = qs.explain(model, recipe="current").rows  # decides for layers without a recipe of their own
    assert [row.gemm for row in around] == (emulated if by_name else ["native"] * 2)
    assert not any("emulated" in row.fallbacks for row in qs.explain(model, recipe="bf16").rows)


def test_the_examples_of_the_docs(capsys: pytest.CaptureFixture[str]) -> None:
    """docs/recipes.md: recipes by GEMM, then by name."""
    by_gemm, by_name = snippets("docs/recipes.md")
    exec(by_gemm, {})
    assert capsys.readouterr().out == "nvfp4/dgrad:current/wgrad:current\n"
    exec(by_name, {})
    shown = capsys.readouterr().out
    assert re.search(r"0\.weight .*bfloat16 ", shown) and re.search(r"3\.weight .*mxfp8_32x32 ", shown)


def tied() -> Model:
    model = Model()
    model.head.weight = model.embedding.weight
    return model


def normed() -> Model:
    model = Model()
    for layer in (model.blocks[0].up, model.blocks[0].down):  # the second has no parameter of its own then
        parametrizations.weight_norm(layer)
    return model


def test_tied_computed_and_hooked_weights_may_stay_in_high_precision() -> None:
    model = born({"head": "bf16", "*": "mxfp8"}, build=tied)
    assert model.head.weight is model.embedding.weight
    model = born({"up": "bf16", "*": "mxfp8"}, build=partial(hooked, "register_hook"))
    assert model.up.weight._backward_hooks
    model = born({"blocks.0.*": "bf16", "*": "mxfp8"}, build=normed)
    with qs.autocast(recipe="mxfp8"):
        assert model(X).isfinite().all()


def hooked(how: str) -> nn.Module:
    block = Block(None, None, "cpu")
    getattr(block.up.weight, how)(lambda _: None)
    return block


WRONG: dict[str, tuple[object, Callable[[], nn.Module], str]] = {
    "a typo": (
        {"*.dwn": "block", "*": "mxfp8"}, Model, r"'\*\.dwn'\) .*none of the 7 linear layers \(blocks\.0\.up",
    ),
    "another number": (
        {"blocks.7.up": "bf16", "*": "mxfp8"}, Model, r"'blocks\.7\.up'\) matches none.*\(blocks\.0\.up",
    ),
    "a recipe": ({"*": "mxfp7"}, Model, "unknown recipe 'mxfp7'"),
    "no recipe": ({"head": None, "*": "mxfp8"}, Model, "'head' has None, .*'bf16' is high precision"),
    "a function that forgets": (lambda module, name: None, Model, r"blocks\.0\.up has None"),
    "no entry": ({}, Model, "give an entry"),
    "no layer": ({"*": "mxfp8"}, lambda: nn.Linear(3, 3), "no quantshard layer to quantize.*convert"),
    "tied": ({"*": "mxfp8"}, tied, r"head\.weight is a parameter of embedding and head.*or give it 'bf16'"),
    "computed": ({"*": "mxfp8"}, normed, r"blocks\.0\.up\.weight is computed from other parameters"),
    "hooked": ({"up": "mxfp8", "*": "bf16"}, partial(hooked, "register_hook"), r"up\.weight has hooks already"),
    "hooked where it is accumulated": (
        {"*": "mxfp8"}, partial(hooked, "register_post_accumulate_grad_hook"), r"up\.weight has hooks already",
    ),
}  # fmt: skip


@pytest.mark.parametrize("context", [qs.autocast, qs.quantized_model_init])
def test_a_context_has_one_recipe(context: Callable[..., object]) -> None:
    with pytest.raises(ConfigurationError, match="unknown recipe"):
        context(recipe=RECIPES)


@pytest.mark.parametrize("case", WRONG)
def test_what_is_refused_is_said_in_a_line(case: str) -> None:
    recipes, build, says = WRONG[case]
    with pytest.raises(ConfigurationError, match=says) as caught:
        born(recipes, build=build)
    assert "\n" not in str(caught.value)
