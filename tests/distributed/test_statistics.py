"""Statistics on ranks: the numbers of the global tensors, whoever holds what of them.

Each test names its rank count. Counts and amaxes are compared exactly where what is quantized has the same bits on any
number of ranks: given inputs and gradients, and weights. Squares are summed in another order: n float64 numbers, off by
n 2**-53 of their sum, of which a logarithm and a root are well within 1e-9.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.distributed.commands import quantshard
from tests.distributed.pool import run_ranks
from tests.distributed.statistics import cut, sharded, spoiled, spread_experts
from tests.distributed.test_cli import SIZES, losses

pytestmark = pytest.mark.distributed

SQUARES = ("sqnr_db", "grad_norm", "update_ratio")


def agree(found: dict[str, Any], wanted: dict[str, Any], but: tuple[str, ...] = ()) -> None:
    assert found.keys() == wanted.keys()
    for key, value in wanted.items():
        if key not in but:
            assert found[key] == (pytest.approx(value, rel=1e-9) if key in SQUARES else value), (key, found, wanted)


def alike(found: list[Any]) -> Any:
    assert all(rows == found[0] for rows in found), "every rank tells the same"
    return found[0]


@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4"])
def test_uneven_shards_have_the_numbers_of_one_rank(recipe):
    """1, 2 and 3 ranks. For wgrad tokens are quantized in blocks of 32, of which each rank has some. NVFP4's second
    scale of an activation is of a rank's own tokens, so there only weights are compared."""
    one, two, three = (alike(run_ranks(ranks, sharded, recipe, 0.0)) for ranks in (1, 2, 3))
    given = {("0.weight", "input"), ("1.weight", "grad_output")}
    exact = {(name, "weight") for name in ("0.weight", "1.weight")} | (given if recipe == "mxfp8" else set())
    for ranks, rows in ((2, two), (3, three)):
        assert (
            rows.keys()
            == one.keys()
            == {(f"{i}.weight", r) for i in (0, 1) for r in ("weight", "input", "grad_output")}
        )
        for place in exact:
            agree(rows[place], one[place], but=("wgrad", "grad_norm"))
            if "wgrad" in one[place]:
                agree(rows[place]["wgrad"], one[place]["wgrad"])
        for name in ("0.weight", "1.weight"):
            norm = rows[name, "weight"]["grad_norm"] * ranks  # FSDP2 takes means
            assert norm == pytest.approx(one[name, "weight"]["grad_norm"], rel=1e-2)


def test_updates_on_ranks():
    """1 and 3 ranks: sums of gradients are rounded in another order, so codes change that lie at a boundary."""
    one, three = (alike(run_ranks(ranks, sharded, "mxfp8", 1e-3)) for ranks in (1, 3))
    for name in ("0.weight", "1.weight"):
        row, wanted = three[name, "weight"], one[name, "weight"]
        assert row["update_ratio"] == pytest.approx(wanted["update_ratio"], rel=1e-3)
        assert row["changed"] == pytest.approx(wanted["changed"], abs=2e-3) and row["changed"] > 0.1


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_tensor_parallel_pieces_have_the_numbers_of_one_rank(sequence_parallel):
    """1 and 2 ranks: inputs whole and cut along tokens, gradients too, weights by rows and by columns."""
    one, two = (alike(run_ranks(ranks, cut, sequence_parallel)) for ranks in (1, 2))
    for place in (("0.weight", "input"), ("1.weight", "grad_output"), ("0.weight", "weight"), ("1.weight", "weight")):
        agree(two[place], one[place], but=("wgrad",))
        if "wgrad" in one[place]:
            agree(two[place]["wgrad"], one[place]["wgrad"])


def test_experts_of_other_ranks_are_told_too():
    """1, 2 and 4 ranks: every rank tells of all experts, in the order of one process."""
    one, two, four = (alike([rows for rows, _ in run_ranks(ranks, spread_experts)]) for ranks in (1, 2, 4))
    assert {f"experts.{leaf}{number}" for number in range(4) for leaf in ("weight", "bias")} < {name for name, _ in two}
    assert list(one) == list(two) == list(four)
    for place in (place for place in one if place[0].startswith("experts.weight")):
        for more in (two, four):
            agree(more[place], one[place], but=("wgrad",))


def test_what_an_expert_of_another_rank_has_spoiled_is_named():
    """1 and 2 ranks: not the layer behind it, which all ranks see."""
    for ranks in (1, 2):
        for _, alarms in run_ranks(ranks, spread_experts, 3):
            assert alarms == ["experts.weight3"]


def test_a_nan_of_one_rank_is_named_on_all():
    """3 ranks."""
    (told,) = {tuple(each) for each in run_ranks(3, spoiled)}
    assert told == (
        "None",
        "the output of 1 is, the first in forward order, infinite or NaN",
        "the gradient of the output of 1 is, the first in backward order, infinite or NaN",
    )


def test_a_run_writes_them_and_forgets_them_on_resume(tmp_path):
    """2 ranks, resumed on 1: losses are those of a run without; what was written after the checkpoint is gone."""
    text = tmp_path / "text.txt"
    text.write_text("statistics of a run, and what a resume forgets of them\n" * 400)
    options = ["--data", text, "--steps", 4, *SIZES.split(), "--save-every", 2]
    plain, run = tmp_path / "plain", tmp_path / "run"
    assert quantshard("train", "--run", plain, "--nproc-per-node", 2, *options).returncode == 0
    told = quantshard("train", "--run", run, "--nproc-per-node", 2, *options, "--statistics-every", 2)
    assert told.returncode == 0, told.stderr
    assert losses(run) == losses(plain)
    lines = [json.loads(line) for line in (run / "statistics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [2, 4]
    row = next(
        row for row in lines[1]["rows"] if (row["name"], row["role"]) == ("layers.1.layernorm_mlp.fc2_weight", "input")
    )
    assert row["sqnr_db"] > 25 and lines[1]["alarms"] == []
    with open(run / "statistics.jsonl", "a") as file:
        file.write('{"step": 5, "rows": [], "alarms": []}\n{"step": 6, "ro')
    told = quantshard("resume", run, "--nproc-per-node", 1, "--steps", 6)
    assert told.returncode == 0, told.stderr
    lines = [json.loads(line) for line in (run / "statistics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [2, 4, 6]
