"""Experts spread over ranks, beside all of them in one process; prints mesh x recipe.

An expert's tokens come in the order that they have in one process, its gradients are means over the ranks of the axis,
and its random words are those of the axis's batch. So births, outputs, gradients, amax histories, counts of draws, and
weights and states after three steps are bitwise those of one process, for every number of ranks that is a power of
two: the division by three is rounded. With several data-parallel ranks they are those of as many ranks without `ep`.

Whole models differ by the order of sums over ranks (1e-6 of the norm, see test_tensor_parallel.py) where a recipe's
scales do not depend on which other tokens a rank has, as in BF16 and MXFP8.
"""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from tests.distributed.experts import (
    OPTIMIZERS,
    Case,
    both_skipped,
    clipped,
    cuts,
    dispatches,
    errors,
    loaded,
    losses_and_gradients,
    off,
    run_snippets,
    saved,
    table,
    unknown_axes,
    whole_loaded,
)
from tests.distributed.models import RECIPES
from tests.distributed.pool import run_ranks

pytestmark = pytest.mark.distributed

ORDER_OF_SUMS = 1e-6
EVERY = ["bf16", *RECIPES]
MESHES: dict[str, list[Case]] = {
    "1 rank, FSDP2": [Case("delayed", 1, 1, sharded=True)],
    "ep 2": [Case(recipe, 1, 2) for recipe in ("bf16", "nvfp4")],
    "ep 2, FSDP2 from meta": [Case("mxfp8 two copies", 1, 2, sharded=True, meta=True)],
    "ep 2, recomputed": [Case("nvfp4", 1, 2, sharded=True, recompute=True)],
    "dp 2, ep 2, FSDP2": [Case("delayed", 2, 2, sharded=True, meta=True)],
}
MORE = {
    "ep 2": [Case(recipe, 1, 2) for recipe in EVERY if recipe not in ("bf16", "nvfp4")],
    "ep 2, FSDP2 from meta": [Case("delayed", 1, 2, sharded=True, meta=True)],
    "ep 2, recomputed": [Case("delayed", 1, 2, sharded=True, recompute=True)],
    "1 rank, FSDP2": [Case("nvfp4", 1, 1, sharded=True)],
    "ep 4": [Case(recipe, 1, 4) for recipe in ("current", "delayed", "nvfp4")],
    "dp 2, FSDP2": [Case(recipe, 2, 1, sharded=True) for recipe in ("nvfp4", "block")],
    "dp 2, ep 2": [Case(recipe, 2, 2) for recipe in ("nvfp4", "delayed")],
    "dp 2, ep 2, FSDP2": [Case(recipe, 2, 2, sharded=True, meta=True) for recipe in ("nvfp4", "block")],
}
"""Recipes that meet these meshes in other forms above."""


@pytest.mark.parametrize("meshes", [MESHES, pytest.param(MORE, marks=pytest.mark.exhaustive)], ids=["some", "more"])
def test_experts_have_the_bits_of_one_process(meshes: dict[str, list[Case]], show: object) -> None:
    """1, 2 and 4 ranks: everything that three steps leave, for uneven tokens, empty experts and a single token."""
    wanted = {}
    for dp in (1, 2):
        recipes = {case.recipe for cases in meshes.values() for case in cases if case.dp == dp}
        cases = [Case(recipe, dp, 1) for recipe in sorted(recipes)]
        wanted |= {(dp, case.recipe): bits for case, bits in zip(cases, run_ranks(dp, table, cases)[0], strict=True)}
    lines, wrong = [f"{'mesh':<24}{'recipe':<18}{'values':<8}equal"], []
    for mesh, cases in meshes.items():
        for case, bits in zip(cases, run_ranks(cases[0].ranks, table, cases)[0], strict=True):
            reference = wanted[case.dp, case.recipe]
            differ = [name for name in reference if bits.get(name) != reference[name]]
            same = not differ and bits.keys() == reference.keys()
            lines.append(f"{mesh:<24}{case.recipe:<18}{len(bits):<8}{'all' if same else f'all but {len(differ)}'}")
            if not same:
                wrong.append((case, differ[:5]))
    show("\n".join(lines))  # type: ignore[operator]
    assert not wrong


STACKED = [
    Case("current", 1, 1, sharded=True, stacked=True),
    Case("nvfp4", 1, 2, stacked=True),
    Case("current", 1, 2, recompute=True, sharded=True, stacked=True),
    Case("mxfp8 two copies", 2, 1, recompute=True, sharded=True, stacked=True),
    Case("mxfp8", 1, 2, recompute=True, sharded=True, stacked=True),
    Case("block", 1, 2, sharded=True, stacked=True),
    Case("nvfp4", 2, 2, sharded=True, stacked=True),
    Case("rowwise", 2, 2, sharded=True, stacked=True),
]


def test_stacked_experts_have_the_bits_of_one_process() -> None:
    """1, 2 and 4 ranks, where FSDP2 and expert parallelism cut stacks by experts."""
    for case in STACKED:
        (reference,) = run_ranks(case.dp, table, [Case(case.recipe, case.dp, 1, stacked=True)])[0]
        (bits,) = run_ranks(case.ranks, table, [case])[0]
        assert bits.keys() == reference.keys()
        assert [name for name in reference if bits[name] != reference[name]] == [], case


def test_three_ranks_are_born_and_compute_forward_alike() -> None:
    """3 ranks and 1, of 6 experts: births and the first output bitwise."""
    cases = [Case(recipe, 1, 1, experts=6) for recipe in ("delayed", "mxfp8")]
    alone = run_ranks(1, table, cases)[0]
    spread = run_ranks(3, table, [Case(case.recipe, 1, 3, experts=6, sharded=True) for case in cases])[0]
    for one, three in zip(alone, spread, strict=True):
        assert one.keys() == three.keys()
        assert all(three[name] == one[name] for name in one if name.startswith("born ") or name == "0 y")


def test_four_stacked_experts_over_three_ranks() -> None:
    """FSDP2 leaves the last rank without experts: births bitwise, and the first output if scales are of blocks."""
    recipes = ("mxfp8", "current", "nvfp4")
    alone = run_ranks(1, table, [Case(recipe, 1, 1, stacked=True) for recipe in recipes])[0]
    spread = run_ranks(3, table, [Case(recipe, 3, 1, sharded=True, stacked=True) for recipe in recipes])[0]
    for recipe, one, three in zip(recipes, alone, spread, strict=True):
        assert one.keys() == three.keys()
        equal = {name for name in one if name.startswith("born ") or (name == "0 y" and recipe == "mxfp8")}
        assert all(three[name] == one[name] for name in equal)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_dispatch_and_combine(ranks: int) -> None:
    """1 to 4 ranks: as one process with all tokens, in its order; ranks and experts without any."""
    cases = [
        ([5] * ranks, 12, 2, False),
        ([0] * (ranks - 1) + [1], 12, 3, False),
        ([7, *range(ranks - 1)], 12, 1, False),
        ([3] * ranks, 12, 2, True),
        ([0] * ranks, 12, 2, False),
    ]
    bound = 0.0 if ranks != 3 else 2e-6
    for results in run_ranks(ranks, dispatches, cases):
        for outputs, of_tokens, of_weights, in_order in results:
            assert outputs == of_weights == 0.0 and of_tokens <= bound and in_order


EVERY_MODE = [(mode, recipe) for mode in ("column", "row") for recipe in EVERY]
TENSOR_PARALLEL: dict[tuple[int, int], list[tuple[str, str]]] = {
    (1, 1): [(mode, recipe) for mode, recipe in EVERY_MODE if recipe in ("delayed", "nvfp4")]
    + [("column", "bf16"), ("row", "current")],
    (1, 2): [("column", "delayed")],
    (2, 1): [("row", "block")],
}
"""(dp, ep) -> modes and recipes, each with tp 2."""
REST = {
    (1, 1): [each for each in EVERY_MODE if each not in TENSOR_PARALLEL[1, 1]],
    (1, 2): [("row", "delayed"), *(each for each in EVERY_MODE if each[1] in ("bf16", "nvfp4"))],
    (2, 1): [("column", "block"), ("column", "mxfp8"), ("row", "mxfp8")],
}


@pytest.mark.parametrize(
    "tried", [TENSOR_PARALLEL, pytest.param(REST, marks=pytest.mark.exhaustive)], ids=["some", "rest"]
)
def test_tensor_parallelism(tried: dict[tuple[int, int], list[tuple[str, str]]]) -> None:
    """2 and 4 ranks, tp 2 alone, with ep 2, and with FSDP2 over dp 2: recipes, by columns and rows."""
    for (dp, ep), ways in tried.items():
        cases = [(mode, recipe, dp, ep, recipe != "bf16") for mode, recipe in ways]
        for results in run_ranks(2 * dp * ep, cuts, cases):
            for case, (unequal, worst, where) in zip(cases, results, strict=True):
                assert not unequal and worst <= ORDER_OF_SUMS, (case, unequal, worst, where)


SAVED = {(1, 1): "delayed", (1, 2): "nvfp4", (2, 2): "mxfp8", (1, 4): "block"}
"""Mesh (dp, ep) that saves -> recipe; all have FP8 moments."""
LOADED = {(1, 1): [(1, 2)], (1, 2): [(1, 2), (1, 1)]}
"""Mesh that loads -> meshes that saved; one that loads its own trains on. `make test-all` has four ranks."""


@pytest.mark.parametrize(
    "loads",
    [LOADED, pytest.param({mesh: list(SAVED) for mesh in SAVED}, marks=pytest.mark.exhaustive)],
    ids=["some", "every"],
)
def test_checkpoints_load_on_any_mesh_and_resume_on_the_same(
    loads: dict[tuple[int, int], list[tuple[int, int]]], tmp_path: Path
) -> None:
    """1, 2 and 4 ranks, the example's language model: parameters, states and groups bitwise, losses after too."""
    before, paths = {}, {mesh: str(tmp_path / f"{mesh[0]}{mesh[1]}") for mesh in loads}
    by_ranks = [meshes for ranks in (1, 2, 4) if (meshes := [mesh for mesh in loads if math.prod(mesh) == ranks])]
    for meshes in by_ranks:
        saves = [(paths[mesh], SAVED[mesh], *mesh, mesh in loads[mesh]) for mesh in meshes]
        before |= dict(zip(meshes, run_ranks(math.prod(meshes[0]), saved, saves)[0], strict=True))
    for meshes in by_ranks:
        jobs = [({paths[of]: SAVED[of] for of in loads[mesh]}, *mesh, paths[mesh]) for mesh in meshes]
        for mesh, found in zip(meshes, run_ranks(math.prod(meshes[0]), loaded, jobs)[0], strict=True):
            for of, (bits, losses, after) in zip(loads[mesh], found, strict=True):
                assert bits == before[of][0], (of, mesh)
                if of == mesh:
                    assert (losses, after) == before[mesh][1:]


@pytest.mark.exhaustive
def test_the_example_learns_as_in_one_process() -> None:
    """1, 2 and 4 ranks."""
    for recipe, dp, ep, steps in (("bf16", 1, 2, 4), ("mxfp8", 2, 2, 2)):
        losses, gradients = run_ranks(1, losses_and_gradients, recipe, 1, 1, 7)[0]
        assert losses[-1] < losses[0] - 1
        found = run_ranks(dp * ep, losses_and_gradients, recipe, dp, ep, steps)[0]
        assert found[0] == pytest.approx(losses[:steps], rel=1e-5)
        assert max(off(found[1][name], gradients[name]) for name in gradients) <= ORDER_OF_SUMS


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.exhaustive)])
def test_a_step_is_skipped_by_all_ranks_if_one_experts_gradient_is_infinite(ranks: int) -> None:
    """2 and 4 ranks; FP8 moments, whose rounding has one seed although ranks have other weights. Sharded or plain."""
    wanted = {name: (True, 1) for name in OPTIMIZERS}
    wanted |= {f"{name}, norm": float("inf") for name in OPTIMIZERS}
    wanted |= {f"{name}, after it": (True, 1) for name in OPTIMIZERS}
    assert run_ranks(ranks, both_skipped) == [((False, 1, True), wanted)] * ranks


def test_the_norm_of_a_gradient_over_several_meshes() -> None:
    """1, 2 and 4 ranks: of all experts, sum, Euclidean and maximum; PyTorch's where that takes the model."""
    (alone,) = run_ranks(1, clipped, 1, 1)
    assert alone["2.0"] > 3 and alone["after"] == alone["still"] == pytest.approx(3.0)
    assert alone["of a router"] == 2.0
    assert alone["of PyTorch"] == pytest.approx(alone["still"])
    for dp, ep in ((1, 2), (2, 2), (3, 1)):
        first, *others = run_ranks(dp * ep, clipped, dp, ep)
        assert all(other == first for other in others)
        assert first == pytest.approx({name: value for name, value in alone.items() if name != "of PyTorch"})


@pytest.mark.parametrize("recipe", ["delayed", "nvfp4"])
def test_a_state_dict_of_all_experts(recipe: str) -> None:
    """2 ranks: each takes its own of it; keys that no rank knows are still errors."""
    for found in run_ranks(2, whole_loaded, recipe):
        assert all(found.values()), found


MESSAGES = {
    "index": "1 entries of experts are not in 0 to",
    "shapes": "must be [tokens, hidden] and int64 [tokens, choices]",
    "division": "choose a multiple of",
    "combine": "do not fit the",
    "splits": "m_splits has",
    "save": "do not take this optimizer of a model with expert parallelism",
    "load": "its states have numbers instead of names",
    "frozen": "its states have numbers instead of names",
    "others": "use FusedAdam, Lion, Muon or MasterWeights over named_parameters()",
}


def test_errors_are_clear_and_on_all_ranks() -> None:
    """2 and 3 ranks; one of them has a wrong index."""
    for ranks in (2, 3):
        for found in run_ranks(ranks, errors):
            assert {name: text for name, text in MESSAGES.items() if text not in found.get(name, "")} == {}


def test_delayed_scaling_must_know_which_ranks_hold_the_same_experts() -> None:
    """4 ranks, a mesh of 2 of them."""
    for message in run_ranks(4, unknown_axes):
        assert "is not an axis of a mesh of all processes" in message


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.exhaustive)])
def test_the_snippets_of_the_document_run(ranks: int, tmp_path: Path) -> None:
    for found in run_ranks(ranks, run_snippets, str(tmp_path)):
        assert all(found.values()), found
