"""Rows of stacked experts that ranks exchange as codes: the bits of BF16 rows and of one process, and the bytes."""

from __future__ import annotations

from contextlib import ExitStack
from itertools import product
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import quantshard as qs
from quantshard import kernel_dispatch
from quantshard.interop import conversion
from quantshard.modules.gemms import row_exchange
from tests.distributed.experts import Case, Stacks
from tests.distributed.models import sha
from tests.distributed.pool import run_ranks
from tests.interpreter import prepared_once

pytestmark = pytest.mark.distributed

EXPERTS, HIDDEN, CHOICES = 6, 128, 2
ROUTES = ("uneven", "an infinite gradient", "a rank without tokens", "all tokens to two experts", "no tokens")


class Biased(Stacks):
    has_bias = True

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self.gate_up_proj_bias, self.down_proj_bias = (
            nn.Parameter(torch.randn(EXPERTS, HIDDEN).bfloat16()) for _ in range(2)
        )


def batch(route: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Tokens of all ranks, their experts and weights, and the gradient of the output. Expert 3 has no tokens."""
    generator = torch.Generator().manual_seed(len(route))
    tokens = 0 if route == "no tokens" else 12
    x, dy = (torch.randn(tokens, HIDDEN, generator=generator).bfloat16() for _ in range(2))
    x *= torch.logspace(-3, 3, tokens).view(-1, 1)  # the ranks have other amaxes
    scores = torch.rand(tokens, EXPERTS, generator=generator)
    if route == "all tokens to two experts":
        scores[:] = torch.arange(float(EXPERTS))
    scores[:, 3] = -1.0
    if route == "an infinite gradient":
        dy[4, 5] = float("inf")
    return x, scores.topk(CHOICES).indices, torch.rand(tokens, CHOICES, generator=generator), dy


def share(route: str, tokens: int) -> slice:
    """The tokens of this rank: the last rank has four or none, and the others share the rest."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if ranks == 1:
        return slice(0, tokens)
    rest = tokens if route == "a rank without tokens" else max(tokens - 4, 0)
    starts = [round(rest * index / (ranks - 1)) for index in range(ranks)]
    return slice(starts[rank], [*starts, tokens][rank + 1])


def step(
    recipe: str, route: str, kernels: bool, biased: bool, fp8_dispatch: bool = False
) -> tuple[dict[str, str], list[int]]:
    """Hashes of what forward and backward return, of all ranks together, and the bytes that this rank sends each time:
    row counts, amaxes of an input, the input, outputs, amaxes of a gradient, the gradient, gradients of inputs."""
    ranks, case = dist.get_world_size(), Case(recipe, 1, 1, experts=EXPERTS, stacked=True)
    torch.manual_seed(5)
    module: Any = (Biased if biased else Stacks)(case)
    conversion.experts.convert_experts(module, "experts", qs.recipe.resolve(recipe), None, True, False)
    if ranks > 1 or fp8_dispatch:
        qs.distribute_experts(module, init_device_mesh("cpu", (ranks,), mesh_dim_names=("ep",)), fp8_dispatch)
    x, chosen, weights, dy = batch(route)
    here = share(route, len(x))
    x, weights = x[here].clone().requires_grad_(), weights[here].clone().requires_grad_()
    collectives, sizes = (dist.all_to_all_single, dist.all_reduce), list[int]()

    def all_to_all_single(out: Tensor, values: Tensor, *args: Any, **options: Any) -> Any:
        sizes.append(values.nbytes)
        return collectives[0](out, values, *args, **options)

    def all_reduce(values: Tensor, **options: Any) -> Any:
        sizes.append(values.nbytes)
        return collectives[1](values, **options)

    with ExitStack() as contexts:
        if kernels:
            contexts.enter_context(prepared_once())
            contexts.enter_context(kernel_dispatch.kernels_only_on("cpu"))
        contexts.enter_context(mock.patch.multiple(dist, all_to_all_single=all_to_all_single, all_reduce=all_reduce))
        contexts.enter_context(qs.autocast(recipe=recipe))
        y = module(x, chosen[here], weights)
        y.backward(dy[here] * ranks)
    assert x.grad is not None and weights.grad is not None
    local = {"y": y.detach(), "dx": x.grad / ranks, "dweights": weights.grad / ranks}
    for name, param in module.named_parameters():
        local[name] = param.grad._local_tensor if isinstance(param.grad, DTensor) else param.grad
    pieces: list[Any] = [None] * ranks
    dist.all_gather_object(pieces, local)
    return {name: sha(torch.cat([piece[name] for piece in pieces])) for name in local}, sizes


def steps(recipe: str, kernels: bool, biased: bool) -> list[Any]:
    """`step` for each route, fewer in the slow interpreter of kernels, with rows as codes and in BF16."""
    results = []
    for route in ROUTES[:3] if kernels else ROUTES:
        codes = step(recipe, route, kernels, biased)
        with mock.patch.object(row_exchange, "_spec_of_codes", lambda *_: None):
            results.append((route, codes, step(recipe, route, kernels, biased)))
    return results


@pytest.mark.parametrize(
    ("kernels", "biased"),
    [(False, False), (False, True), (True, False), pytest.param(True, True, marks=pytest.mark.exhaustive)],
)
def test_codes_have_the_bits_of_values(kernels: bool, biased: bool) -> None:
    """1, 2 and 3 ranks, experts one by one or, in kernels, all at once. Three ranks divide a gradient with rounding, so
    only their outputs equal those of one process."""
    alone = run_ranks(1, steps, "current", kernels, biased)[0]
    for ranks in (2, 3):
        for results in run_ranks(ranks, steps, "current", kernels, biased):
            for (route, (one, _), _), (_, (codes, sizes), (values, wide)) in zip(alone, results, strict=True):
                assert codes == values, route
                compared = codes if ranks == 2 else ["y"]
                assert [name for name in compared if codes[name] != one[name]] == [], route
                # the gradient of a bias is the sum of values
                assert len(sizes) == len(wide) + (1 if biased else 2)


def bytes_sent(recipes: list[str]) -> list[list[int]]:
    return [step(recipe, "uneven", False, False)[1] for recipe in recipes]


def test_bytes_sent() -> None:
    """2 ranks together, of which the first sends 8 and the second 4 of 12 tokens."""
    counts, amaxes, one = 2 * 8 * (EXPERTS + 2), 2 * 4 * EXPERTS, 12 * CHOICES * HIDDEN
    wanted = {
        "current": [counts, amaxes, one, 2 * one, amaxes, one, 2 * one],
        "current/dgrad:bf16": [counts, amaxes, one, 2 * one, 2 * one, 2 * one],
        "mxfp8": [counts, 2 * one, 2 * one, 2 * one, 2 * one],
    }
    found = run_ranks(2, bytes_sent, list(wanted))
    assert [list(map(sum, zip(*sizes, strict=True))) for sizes in zip(*found, strict=True)] == list(wanted.values())
    assert run_ranks(1, bytes_sent, ["current"]) == [[[]]]
    scales = one // 32
    found = run_ranks(2, step, "mxfp8", "uneven", False, False, True)
    wanted_sizes = [counts, one, scales, 2 * one, one, scales, 2 * one]
    assert [sum(sizes) for sizes in zip(*(sizes for _, sizes in found), strict=True)] == wanted_sizes


ON_REQUEST = list(product(["mxfp8", "block", "rowwise"], ROUTES))
SOME = [(recipe, route) for recipe, route in ON_REQUEST if recipe == "mxfp8" or route in ROUTES[:2]]


def with_and_without(kernels: bool, cells: list[tuple[str, str]]) -> list[Any]:
    """`step` with and without FP8 dispatch."""
    return [
        (recipe, route, *(step(recipe, route, kernels, False, fp8_dispatch)[0] for fp8_dispatch in (True, False)))
        for recipe, route in cells
    ]


@pytest.mark.parametrize(
    ("kernels", "cells"),
    [
        (False, SOME),
        pytest.param(False, [cell for cell in ON_REQUEST if cell not in SOME], marks=pytest.mark.exhaustive),
        pytest.param(True, ON_REQUEST, marks=pytest.mark.exhaustive),
    ],
    ids=["some", "rest", "kernels"],
)
def test_fp8_dispatch_changes_weight_gradients_only(kernels: bool, cells: list[tuple[str, str]]) -> None:
    """1, 2 and 3 ranks: all bits of one process; without the option equal outputs and gradients of inputs."""
    (alone,) = run_ranks(1, with_and_without, kernels, cells)
    for ranks in (2, 3):
        for results in run_ranks(ranks, with_and_without, kernels, cells):
            for (recipe, route, one, _), (*_, codes, values) in zip(alone, results, strict=True):
                compared = ["y"] if ranks == 3 else list(codes)
                assert [name for name in compared if codes[name] != one[name]] == [], (recipe, route)
                assert [name for name in ("y", "dx", "dweights") if codes[name] != values[name]] == [], (recipe, route)
