"""Tables that a `TableRecipe` refuses, and that it does not follow; recipes of which GEMMs go by others."""

import pickle
from dataclasses import replace
from functools import cached_property

import pytest
import torch
from torch import Tensor

from quantshard import Linear, autocast, convert, quantized_model_init
from quantshard.errors import ConfigurationError
from quantshard.recipe import (
    DelayedScaling,
    Float8CurrentScaling,
    Gemm,
    MixedRecipe,
    MMParams,
    QuantSpec,
    Recipe,
    Table,
    TableRecipe,
    TensorRole,
    resolve,
    stock_name,
)

DELAYED, CURRENT = DelayedScaling().table, Float8CurrentScaling().table
INPUT, GRADIENT = TensorRole.INPUT, TensorRole.GRAD_OUTPUT


def transformed(cell: QuantSpec) -> QuantSpec:
    return replace(cell, scaling=replace(cell.scaling, random_hadamard=True))


@pytest.mark.parametrize("at", [(INPUT, Gemm.WGRAD), (GRADIENT, Gemm.DGRAD)])
def test_one_history_scales_both_operands_or_none(at):
    with pytest.raises(ConfigurationError, match=f"role {at[0].value} needs one amax history, not history=0"):
        TableRecipe("mixed", {**DELAYED, at: CURRENT[at]})


@pytest.mark.parametrize("at", [(INPUT, Gemm.FPROP), (GRADIENT, Gemm.DGRAD), (INPUT, Gemm.WGRAD)])
def test_a_transform_that_does_not_cancel(at):
    with pytest.raises(ConfigurationError, match="no others"):
        TableRecipe("transformed", {**CURRENT, at: transformed(CURRENT[at])})
    both = {at: transformed(CURRENT[at]) for at in ((INPUT, Gemm.WGRAD), (GRADIENT, Gemm.WGRAD))}
    assert TableRecipe("cancels", {**CURRENT, **both}).table[INPUT, Gemm.WGRAD].scaling.random_hadamard


def test_an_entry_of_an_operand_that_no_gemm_reads():
    """Which would do nothing."""
    for at in ((TensorRole.WEIGHT, Gemm.WGRAD), (INPUT, Gemm.DGRAD)):
        with pytest.raises(ConfigurationError, match=f"'mine': {at[1].value} reads no {at[0].value}"):
            TableRecipe("mine", {**CURRENT, at: CURRENT[INPUT, Gemm.FPROP]})


def test_a_recipe_does_not_follow_the_dict_that_it_was_made_of():
    cells = dict(CURRENT)
    recipe = TableRecipe("mine", cells)
    cells.clear()
    assert recipe.table == CURRENT


def test_a_pickle_holds_no_more_than_the_arguments():
    recipe = DelayedScaling()
    before = pickle.dumps(DelayedScaling())
    assert recipe.table and recipe.weight and pickle.dumps(recipe) == before
    assert pickle.loads(before) == recipe and pickle.loads(before).table == recipe.table


class NotedRecipe(Recipe):
    """A user's, which is no dataclass of its own."""

    name = "noted"

    def __init__(self, note: str) -> None:
        object.__setattr__(self, "note", note)

    @cached_property
    def table(self) -> Table:
        return CURRENT


def test_a_pickle_holds_what_a_recipe_of_a_users_was_made_with():
    recipe = NotedRecipe("mine")
    assert recipe.table and vars(pickle.loads(pickle.dumps(recipe))) == {"note": "mine"}


# Recipes that take operands of some GEMMs from others ----------------------------------------------------------------

MIXTURES = ["nvfp4/wgrad:current", "rowwise/wgrad:bf16", "block/dgrad:bf16/wgrad:mxfp8", "current/fprop:bf16"]


@pytest.mark.parametrize("name", MIXTURES)
def test_a_mixture_is_made_of_its_names(name):
    first, *others = name.split("/")
    recipe, of_gemm = resolve(name), dict(each.split(":") for each in others)
    assert recipe == MixedRecipe(first, **of_gemm)
    assert (recipe.name, stock_name(recipe)) == (name, name) and resolve(name.upper()) is recipe
    for (role, gemm), cell in resolve(first).table.items():
        by = first if role is TensorRole.WEIGHT else of_gemm.get(gemm.value, first)
        assert recipe.table.get((role, gemm)) == resolve(by).table.get((role, gemm)), (role, gemm, cell)
    assert recipe.weight == resolve(first).weight
    assert pickle.loads(pickle.dumps(recipe)) == recipe


@pytest.mark.parametrize("first", [Float8CurrentScaling(use_power_2_scales=True), TableRecipe("mine", CURRENT)])
def test_a_mixture_of_recipes_that_have_no_name_has_none(first):
    recipe = MixedRecipe(first, wgrad="bf16")
    assert stock_name(recipe) is None and recipe.weight == first.weight
    model = torch.nn.Sequential(torch.nn.Linear(32, 16)).bfloat16()
    convert(model, recipe)
    with autocast(recipe=recipe):
        model(torch.ones(4, 32, dtype=torch.bfloat16)).sum().backward()
    assert model[0].weight.grad.eq(4).all()


def test_a_mixture_of_mixtures_is_refused():
    for recipe, wgrad in (("nvfp4/dgrad:bf16", "current"), ("nvfp4", "current/dgrad:bf16")):
        with pytest.raises(ConfigurationError, match=r"mixture of mixtures; name the recipe of each GEMM"):
            MixedRecipe(recipe, wgrad=wgrad)


@pytest.mark.parametrize(
    "other", [DelayedScaling(amax_history_len=16), DelayedScaling(amax_compute_algo="most_recent")]
)
def test_one_history_is_read_in_one_way(other):
    """Which else both operands of a role would follow, as the first has it."""
    with pytest.raises(
        ConfigurationError, match=r"role input needs one amax history, not .*history=1024, most_recent="
    ):
        MixedRecipe("delayed", wgrad=other)
    assert MixedRecipe("delayed", wgrad=DelayedScaling(margin=1)).is_delayed


def test_sums_of_a_mixture_are_those_of_whose_operands_it_has():
    fast = Float8CurrentScaling(fp8_gemm_fprop=MMParams(False), fp8_gemm_wgrad=MMParams(False))
    assert MixedRecipe(fast, wgrad="current").fast_gemms == {Gemm.FPROP}
    assert MixedRecipe("current", wgrad=fast).fast_gemms == {Gemm.WGRAD}


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("nvpf4/wgrad:bf16", "unknown recipe 'nvpf4/wgrad:bf16'; did you mean 'nvfp4'"),
        ("nvfp4/wgrad:curent", "unknown recipe 'nvfp4/wgrad:curent': 'wgrad:curent'; did you mean 'current'"),
        ("nvfp4/wgrad", "unknown recipe 'nvfp4/wgrad': 'wgrad'; write each GEMM once"),
        ("nvfp4/wgard:bf16", "did you mean 'wgrad'"),
        ("nvfp4/backward:bf16", "'backward:bf16'; .*write each GEMM once, as in current/wgrad:bf16"),
        ("nvfp4/wgrad:bf16/wgrad:bf16", "'wgrad:bf16'; .*write each GEMM once"),
        ("bf16/wgrad:current", "begin with a recipe that quantizes weights"),
        (["current"], r"unknown recipe \['current'\]; choose one of"),
        ("delayed/wgrad:current", r"recipe 'delayed/wgrad:current': .* one amax history"),
    ],
)
def test_mixtures_that_are_refused(name, says):
    with pytest.raises(ConfigurationError, match=says):
        resolve(name)


def gradients_of(recipe: str) -> tuple[Tensor, ...]:
    """Output, and gradients of input and weight, of a layer whose weight is exact in every format."""
    torch.manual_seed(0)
    with quantized_model_init(recipe=recipe):
        layer = Linear(64, 32, bias=False, params_dtype=torch.bfloat16)
    layer.weight.data.quantize_(torch.ones(32, 64))
    x = torch.randn(48, 64, dtype=torch.bfloat16, requires_grad=True)
    with autocast(recipe=recipe):
        y = layer(x)
    y.backward(torch.randn(48, 32, generator=torch.Generator().manual_seed(1)).bfloat16())
    return y.detach(), x.grad, layer.weight.grad, x.detach()


def test_only_the_named_gemm_of_a_mixture_is_computed_otherwise():
    """The weight's gradient is then that of a plain layer, and all else as it was."""
    y, dx, dw, x = gradients_of("current/wgrad:bf16")
    plain_y, plain_dx, plain_dw, _ = gradients_of("current")
    dy = torch.randn(48, 32, generator=torch.Generator().manual_seed(1)).bfloat16()
    assert torch.equal(y, plain_y) and torch.equal(dx, plain_dx)
    assert torch.equal(dw, (dy.float().t() @ x.float()).bfloat16()) and not torch.equal(dw, plain_dw)
