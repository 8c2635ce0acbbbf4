"""Adam, Lion and Muon in kernels on several ranks: the bits of one rank in plain PyTorch, where ranks share blocks too.

Experts at once, spread over ranks: the bits of one process.

Triton's interpreter runs the kernels in each rank; on GPUs `test_gpu.py` compares the two. No dimension divides.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

pytest.importorskip("triton")

from quantshard.errors import RankMismatchError
from quantshard.modules.gemms import grouped
from quantshard.optimizers import FusedAdam, Lion
from tests.distributed import experts as experts_case, test_muon as muon_case
from tests.distributed.models import bits
from tests.distributed.pool import run_ranks
from tests.distributed.test_fused_adam import Case, build, cut_like, message_of
from tests.interpreter import kernels_on, prepared_once
from tests.late_flags import flags_come_late

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.skipif(torch.cuda.is_available(), reason="its ranks are on the CPU, where the interpreter runs then"),
]

CASES: list[Case] = [
    ("delayed", "fp32", "fp32", False),
    ("current", "remainder", "fp8", True),
    ("block", "none", "bf16", False),
    ("nvfp4", "fp32", "fp32", True),
    ("mxfp8", "fp16", "fp16", False),
    ("current", "split", "fp8", True),
    ("block", "split", "bf16", False),
    ("mxfp8 two copies", "bf16", "fp8", False),
]

LION: list[Case] = [("mxfp8", "split", "fp8", False), ("delayed", "fp32", "bf16", True)]

SIZES = (18, 11)
STEPS, LAYERS = 3, 2
"""Of `experts.trained`."""


def step(
    model: nn.Module, optimizer: FusedAdam | Lion, number: int, changed: Callable[[int, Tensor], Tensor | None]
) -> None:
    for index, param in enumerate(model.parameters()):
        generator = torch.Generator().manual_seed(100 * number + index)
        whole = changed(index, torch.randn(param.shape, generator=generator))
        param.grad = None if whole is None else cut_like(param, whole)
    optimizer.step()


def with_nan(index: int, grad: Tensor) -> Tensor:
    """Of the last row of one weight, which is on one rank alone."""
    if index == 0:
        grad[-1, 3] = float("nan")
    return grad


def run(cases: list[tuple[type[FusedAdam | Lion], Case]], kernels: bool) -> list[dict[str, str]]:
    """Bits after three steps: of the first one gradient is not finite, of the second one is missing; before the last
    FSDP2 replaces the local tensors."""
    found = []
    for by, case in cases:
        model, optimizer = build(case, sizes=SIZES, by=by)
        with prepared_once(), kernels_on(*(["cpu"] if kernels else [])):
            step(model, optimizer, 0, with_nan)
            step(model, optimizer, 1, lambda index, grad: None if index == 2 else grad)
        model.unshard()
        model.reshard()
        with prepared_once(), kernels_on(*(["cpu"] if kernels else [])):
            step(model, optimizer, 2, lambda index, grad: grad)
        assert bool(optimizer._plans[None].kernels._plans) == kernels and not (
            kernels and optimizer._plans[None].kernels._remaining()
        )
        assert optimizer.skipped_steps == 1
        found.append(bits(model, optimizer))
    return found


EVERY = [*((FusedAdam, case) for case in CASES), *((Lion, case) for case in LION)]


@pytest.mark.parametrize(
    ("ranks", "every"),
    [(2, [*EVERY[:2], EVERY[8]]), pytest.param(3, EVERY, marks=pytest.mark.exhaustive)],
    ids=["some", "all"],
)
def test_the_bits_of_one_rank_without_kernels(ranks: int, every: list[tuple[type[FusedAdam | Lion], Case]]) -> None:
    [expected] = run_ranks(1, run, every, False)
    for found in run_ranks(ranks, run, every, True):
        assert [case for case, a, b in zip(every, found, expected, strict=True) if a != b] == []


def by_muon(axes: dict[str, int], kernels: bool, cases: list[str]) -> list[dict[str, str]]:
    """Bits after two steps of some cases of Muon's, with parts of matrices that are orthogonalized whole."""
    found = []
    for case in cases:
        model, optimizer = muon_case.build(case, axes, seed=3)
        with prepared_once(), kernels_on(*(["cpu"] if kernels else [])):
            for number in range(2):
                muon_case.step(model, optimizer, number)
        steps = [optimizer._plans[None].kernels, *(bucket.kernels for bucket in optimizer._plans[None].buckets)]
        assert all(bool(each._plans) == kernels and not (kernels and each._remaining()) for each in steps)
        found.append(bits(model, optimizer))
    return found


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("cases", "meshes"),
    [
        (["FP8 momentum"], [(2, {"tp": 2})]),
        (["FP8 momentum"], [(3, {"dp": 3})]),
        (["block", "NVFP4, an average"], [(3, {"dp": 3}), (2, {"tp": 2})]),
    ],
)
def test_muon_has_the_bits_of_one_rank_without_kernels(
    cases: list[str], meshes: list[tuple[int, dict[str, int]]]
) -> None:
    """FSDP2 and tensor parallelism: a scale of a state is shared by ranks where they cut columns."""
    [expected] = run_ranks(1, by_muon, {"dp": 1}, False, cases)
    for ranks, axes in meshes:
        assert run_ranks(ranks, by_muon, axes, True, cases) == [expected] * ranks


def experts(cases: list[experts_case.Case]) -> tuple[list[dict[str, str]], int]:
    """Bits of three steps on kernels, and how many layers computed all experts at once."""
    found, calls, real = [], 0, grouped.grouped_linear

    def counted(*args: Any) -> Tensor:
        nonlocal calls
        calls += 1
        return real(*args)

    grouped.grouped_linear = counted
    try:
        for case in cases:
            with prepared_once(), kernels_on("cpu"):
                found.append(experts_case.trained(case))
    finally:
        grouped.grouped_linear = real
    return found, calls


@pytest.mark.exhaustive
@pytest.mark.parametrize("parallel", ["experts", "data"])
def test_experts_at_once_have_the_bits_of_one_process(parallel: str) -> None:
    """Spread over ranks; sharded and recomputed; and data parallel: scales, histories, outputs and gradients.

    `make test` has experts at once on kernels in one process, in tests/kernels/test_experts.py, and experts spread over
    ranks without kernels in test_experts.py."""
    spread = [
        experts_case.Case("block", 1, 2),
        experts_case.Case("delayed", 1, 2, sharded=True, recompute=True),
    ]
    both = [experts_case.Case("delayed", 2, 2, sharded=True)]
    ways = {"experts": (2, 1, spread, LAYERS + 2 * LAYERS), "data": (4, 2, both, LAYERS)}
    ranks, wanted_ranks, cases, times = ways[parallel]
    alone = [experts_case.Case(case.recipe, case.dp, 1) for case in cases]
    [(wanted, calls), *_] = run_ranks(wanted_ranks, experts, alone)
    assert calls == len(alone) * STEPS * LAYERS
    [(found, calls), *_] = run_ranks(ranks, experts, cases)
    assert calls == STEPS * times
    for case, bits_found, expected in zip(cases, found, wanted, strict=True):
        assert [name for name in expected if bits_found.get(name) != expected[name]] == [], case


def refused(late: bool) -> tuple[str, bool]:
    """What is told where a gradient is on one rank only, and whether all bits stayed. `late`: by the next step, as on a
    GPU, on all ranks."""
    model, optimizer = build(("current", "fp32", "fp32", False), sizes=SIZES)
    before = bits(model, optimizer)
    mine = dist.get_rank() == 0
    with prepared_once(), kernels_on("cpu"), flags_come_late() if late else nullcontext():

        def lacking(index: int, grad: Tensor) -> Tensor | None:
            return grad if mine or index != 1 else None

        if late:
            step(model, optimizer, 0, lacking)
        told = message_of(lambda: step(model, optimizer, 1, lacking), RankMismatchError)
    return told, bits(model, optimizer) == before


@pytest.mark.parametrize("late", [False, True])
def test_a_gradient_on_some_ranks_only_is_an_error_and_changes_nothing(late: bool) -> None:
    for told, stayed in run_ranks(2, refused, late):
        assert "0.bias has a gradient on some ranks only" in told and stayed


def refused_by_muon(capturable: bool) -> tuple[str, bool]:
    """The same of a matrix of Muon's, of which ranks exchange parts; of a captured step it is told later."""
    muon_case.CASES["captured"] = ("block", {"capturable": capturable})
    model, optimizer = muon_case.build("captured", {"dp": dist.get_world_size()}, seed=3)
    before = bits(model, optimizer)
    lacks = dist.get_rank() == 1

    def stepped() -> None:
        muon_case.step(model, optimizer, 0, lambda param: lacks and param is model.layers[0].weight)
        optimizer.state_dict()

    with prepared_once(), kernels_on("cpu"):
        told = message_of(stepped, RankMismatchError)
    return told, bits(model, optimizer) == before


@pytest.mark.parametrize("capturable", [False, True])
def test_a_gradient_of_muons_on_some_ranks_only(capturable: bool) -> None:
    for told, stayed in run_ranks(3, refused_by_muon, capturable):
        assert "layers.0.weight has a gradient on some ranks only" in told and stayed


def mixed(late: bool = False) -> dict[str, str]:
    """A rank where the oracle takes the first gradient, beside ranks where kernels take them all. `late`: a step before
    is skipped, and the host hears of it as on a GPU."""
    model, optimizer = build(("current", "fp32", "fp32", False), sizes=SIZES)
    optimizer._use_decoupled_grad = True
    for index, param in enumerate(model.parameters()):
        grad = cut_like(param, torch.randn(param.shape, generator=torch.Generator().manual_seed(1)))
        param.decoupled_grad = grad.double() if dist.get_rank() == 1 and index == 0 else grad
    with prepared_once(), kernels_on("cpu"), flags_come_late() if late else nullcontext():
        if late:
            grads = [param.decoupled_grad for param in model.parameters()]
            for param, grad in zip(model.parameters(), grads, strict=True):
                param.decoupled_grad = grad * math.nan
            optimizer.step()
            assert optimizer._unread is not None
            for param, grad in zip(model.parameters(), grads, strict=True):
                param.decoupled_grad = grad
        optimizer.step()
        assert bool(optimizer._plans[None].kernels._remaining()) == (dist.get_rank() == 1)
        assert optimizer.skipped_steps == late
    for group in optimizer.param_groups:
        group["skipped_steps"] = 0
    return bits(model, optimizer)


def test_ranks_of_which_one_has_no_kernels_for_its_gradients() -> None:
    [expected] = run_ranks(1, mixed)
    for late in (False, True):
        assert run_ranks(3, mixed, late) == [expected] * 3


@pytest.mark.exhaustive
def test_experts_at_once_on_three_ranks() -> None:
    """A third of a gradient rounds, so only the first outputs are those of one process; the rest is that of the same
    ranks, sharded and recomputed or not."""
    cases = [experts_case.Case("delayed", 1, 3, experts=6, **way) for way in ({}, {"sharded": True, "recompute": True})]
    [([alone], _)] = run_ranks(1, experts, [experts_case.Case("delayed", 1, 1, experts=6)])
    [([plain, sharded], calls), *_] = run_ranks(3, experts, cases)
    assert calls == STEPS * (LAYERS + 2 * LAYERS)
    assert plain == sharded and len(plain) == len(alone)
    assert plain["0 y"] == alone["0 y"]
