"""The benchmark of training steps: arms, small and on CPUs, rows of several calls, failures, and what is counted."""

from __future__ import annotations

import os
import re
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.distributed.device_mesh import DeviceMesh

from benchmarks import step_profile, train_step, training_arms
from benchmarks.block_step import Shape
from benchmarks.ranks import OutOfTime, RankFailure, Ranks
from benchmarks.training_arms import ARMS, TrainingArm
from tests.distributed.models import bits
from tests.distributed.pool import run_ranks
from tests.modules.graphed import rerun

__all__ = ["rerun"]

SMALL = Shape(layers=2, hidden=64, ffn=96, heads=2, kv_heads=1, batch=1, tokens=32, device="cpu")


def after_steps(name: str, mesh: DeviceMesh | None = None) -> dict[str, str]:
    """The bits of an arm's model and optimizer."""
    trained = TrainingArm(ARMS[name], SMALL, mesh)
    trained.warm_up()
    trained.record()
    for _ in range(2):
        trained.run()
    assert trained.x.grad is None and all(param.grad is None for param in trained.model.parameters())
    return bits(trained.model, trained.optimizer)


@pytest.mark.parametrize(
    "way",
    [
        "captured-step",
        "graphed-fp8-activations",
        *(pytest.param(way, marks=pytest.mark.exhaustive) for way in ("graphed", "recomputed")),
    ],
)
def test_arms_train_what_the_eager_one_does(way: str, rerun: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs are run again here."""
    monkeypatch.setattr(training_arms, "capture", lambda step: step)
    stored = "-fp8-activations" * way.endswith("-fp8-activations")
    eager, found = (after_steps(f"ours-delayed-lean{end}") for end in (stored, f"-{way}"))
    assert eager.keys() <= found.keys() and all(found[name] == eager[name] for name in eager)


@pytest.mark.exhaustive
def test_rows_are_kept_and_gone_on_with(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An arm that fails has a row; another call measures what is missing, or asked for again."""
    file = tmp_path / "rows.jsonl"
    fixed = "--shapes tiny --batches 1x16 --layers 1 --steps 1 --device cpu".split()

    def called(*more: str) -> tuple[list[str], str]:
        """The arms of the file's rows, with what failed, and what was printed."""
        train_step.main([*fixed, "--jsonl", str(file), *more])
        rows = train_step.read(file)
        assert all(("failed" in row) != ("ms" in row) and row["sizes"]["layers"] == 1 for row in rows)
        return [row["arm"] + "!" * ("failed" in row) for row in rows], capsys.readouterr().out

    broken = "ours-block-captured-step"  # there is no GPU
    arms, out = called("--arms", f"{broken},ours-block-lean,ours-block-graphed-ddp")
    assert arms == [f"{broken}!", "ours-block-lean"]
    assert "1 x ours-block-graphed-ddp: left out, one GPU has no replicas" in out
    assert re.search(rf"\| tiny \| 1 \| 1x16 \| 1 \| {broken}: (Runtime|Accelerator)Error: ", out)
    with file.open("a") as opened:
        opened.write('{"shape": "ti')  # cut off
    rest = "ours-block-lean,ours-block-bf16"
    arms, out = called("--arms", rest, "--minutes", "0")
    assert len(arms) == 2 and "1 of 2 are left for another call" not in out and "1 of 1 are left" in out
    arms, out = called("--arms", f"{broken},{rest}", "--again", "*-lean")
    assert arms == [f"{broken}!", "ours-block-lean", "ours-block-lean", "ours-block-bf16"]
    assert "; 1 rows are there" in out and out.count("| ours-block-lean |") == 2


# Processes --------------------------------------------------------------------------------------------------------


def doing(mesh: DeviceMesh | None, what: str) -> dict[str, Any]:
    """What one of two ranks does while the other waits for it."""
    assert mesh is not None
    first = mesh.get_rank() == 0
    if what == "fail" and first:
        raise ValueError("a line\nand more")
    if what == "end" and first:
        os._exit(3)
    if what == "hang" and first:
        time.sleep(1000)
    dist.all_reduce(torch.ones(1))
    return {"process": os.getpid()}


@pytest.mark.distributed
@pytest.mark.exhaustive
def test_a_rank_that_fails_ends_them_all() -> None:
    """2 ranks, of which one waits for the other; the next has others, as each has."""
    ranks = Ranks(2, "cpu", doing)

    def processes(what: str = "") -> list[int]:
        return [row["process"] for row in ranks.run(60, what)]

    try:
        assert set(processes()).isdisjoint(processes())
        for what, told in {"fail": "ValueError: a line$", "end": "process 0 ended with 3"}.items():
            with pytest.raises(RankFailure, match=told):
                ranks.run(60, what)
        with pytest.raises(OutOfTime):
            ranks.run(8, "hang")
        assert not ranks.ranks and len(processes()) == 2
    finally:
        ranks.stop()


# What is counted --------------------------------------------------------------------------------------------------


def counted_collectives() -> dict[str, tuple[int, int]]:
    """Calls and bytes of collective calls, of 6 float32 of this rank, by name."""
    x, found = torch.ones(6), {}
    group, of_two = dist.group.WORLD, [torch.empty(6), torch.empty(6)]
    for name, call in {
        "all_gather": lambda: dist.all_gather(of_two, x),
        "all_gather_into_tensor": lambda: dist.all_gather_into_tensor(torch.empty(12), x),
        "reduce_scatter": lambda: dist.reduce_scatter(torch.empty(6), [x, x]),
        "reduce_scatter_tensor": lambda: dist.reduce_scatter_tensor(torch.empty(3), x),
        "all_reduce": lambda: dist.all_reduce(torch.ones(6)),
        "all_to_all_single": lambda: dist.all_to_all_single(torch.empty(6), x),
        "all_to_all": lambda: dist.all_to_all([torch.empty(3), torch.empty(3)], list(x.split(3))),
        "broadcast": lambda: dist.broadcast(torch.ones(6), 0),
        "barrier": lambda: dist.barrier(),
        "functional all_gather": lambda: functional.all_gather_tensor(x, 0, group) + 0,
        "functional reduce_scatter": lambda: functional.reduce_scatter_tensor(x, "sum", 0, group) + 0,
        "functional all_reduce": lambda: functional.all_reduce(x, "sum", group) + 0,
        "functional all_gather of two": lambda: [
            y + 0 for y in functional.all_gather_into_tensor_coalesced([x, x], group)
        ],
        "functional all_to_all": lambda: functional.all_to_all_single(x, None, None, group) + 0,
    }.items():
        with warnings.catch_warnings(), step_profile.Collectives() as seen:
            warnings.simplefilter("ignore")
            call()
        found[name] = (seen.calls, seen.bytes)
    return found


@pytest.mark.distributed
def test_collectives_are_counted_with_their_results():
    """2 ranks; of 6 float32 each, of whatever operator."""
    wanted = {
        "all_gather": (1, 48), "all_gather_into_tensor": (1, 48), "reduce_scatter": (1, 24),
        "reduce_scatter_tensor": (1, 12), "all_reduce": (1, 24), "all_to_all_single": (1, 24), "all_to_all": (1, 24),
        "broadcast": (1, 24), "barrier": (0, 0), "functional all_gather": (1, 48),
        "functional reduce_scatter": (1, 12), "functional all_reduce": (1, 24),
        "functional all_gather of two": (1, 96), "functional all_to_all": (1, 24),
    }  # fmt: skip
    assert run_ranks(2, counted_collectives) == [wanted, wanted]


def test_what_of_communication_is_exposed():
    assert step_profile.exposed([(0, 4), (6, 8), (3, 5)], [(1, 2), (4, 7)]) == 1 + 2 + 1
    assert step_profile.exposed([], [(0, 1)]) == 0 and step_profile.exposed([(0, 2)], []) == 2
