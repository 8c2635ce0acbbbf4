"""Tables that a `TableRecipe` refuses, and that it does not follow."""

import pickle
from dataclasses import replace
from functools import cached_property

import pytest

from quantshard.errors import ConfigurationError
from quantshard.recipe import Cell, DelayedScaling, Float8CurrentScaling, Gemm, Recipe, Table, TableRecipe, TensorRole

DELAYED, CURRENT = DelayedScaling().table, Float8CurrentScaling().table
INPUT, GRADIENT = TensorRole.INPUT, TensorRole.GRAD_OUTPUT


def transformed(cell: Cell) -> Cell:
    return replace(cell, scaling=replace(cell.scaling, random_hadamard=True))


@pytest.mark.parametrize("at", [(INPUT, Gemm.WGRAD), (GRADIENT, Gemm.DGRAD)])
def test_one_history_scales_both_operands_or_none(at):
    with pytest.raises(ConfigurationError, match=f"role {at[0].value} .*{at[1].value} without"):
        TableRecipe("mixed", {**DELAYED, at: CURRENT[at]})


@pytest.mark.parametrize("at", [(INPUT, Gemm.FPROP), (GRADIENT, Gemm.DGRAD), (INPUT, Gemm.WGRAD)])
def test_a_transform_that_does_not_cancel(at):
    with pytest.raises(ConfigurationError, match="in no other GEMM"):
        TableRecipe("transformed", {**CURRENT, at: transformed(CURRENT[at])})
    both = {at: transformed(CURRENT[at]) for at in ((INPUT, Gemm.WGRAD), (GRADIENT, Gemm.WGRAD))}
    assert TableRecipe("cancels", {**CURRENT, **both}).table[INPUT, Gemm.WGRAD].scaling.random_hadamard


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
