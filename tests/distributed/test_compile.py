"""Compiled layers under FSDP2: losses, weights, amax histories, draws and optimizer states have the uncompiled bits.

Runs on 1, 2 and 3 ranks, and prints the table. Each layer is compiled, then sharded, as one does with FSDP2.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

import quantshard as qs
from quantshard import kernel_dispatch
from tests.covering import exhaustive
from tests.distributed.models import RECIPES, Case, batch, bits, mesh_of, optimizer_of, train
from tests.distributed.pool import run_ranks
from tests.interpreter import prepared_once
from tests.modules.cached_compile import steps_of_a_cache

pytestmark = pytest.mark.distributed

SHAPES = ((96, 33), (33, 1))  # some ranks hold nothing of the last
STEPS = 3


def build(case: Case, backend: str | None, blocks: bool, inside: bool) -> nn.Module:
    """Linear layers, maybe an MLP before the last, each compiled (`backend`) and sharded; autocast around or inside."""
    torch.manual_seed(case.seed)
    options: dict[str, Any] = {"params_dtype": torch.bfloat16}
    with qs.quantized_model_init(recipe=RECIPES[case.recipe]):
        layers: list[nn.Module] = [qs.Linear(a, b, **options) for a, b in case.shapes]
        if blocks:
            layers.insert(-1, qs.LayerNormMLP(33, 40, activation="swiglu", **options))
    model = nn.Sequential(*layers)
    mesh = mesh_of(case)
    for layer in model:
        if inside:
            layer.forward = within(layer.forward, case.recipe)
        if backend is not None:
            layer.compile(backend=backend, fullgraph="cpu" in kernel_dispatch.KERNEL_DEVICES)
        fully_shard(layer, mesh=mesh, reshard_after_forward=case.reshard)
    fully_shard(model, mesh=mesh, reshard_after_forward=case.reshard)
    return model


def within(forward: Any, recipe: str) -> Any:
    """A forward that enters autocast itself."""

    def autocasting(x: torch.Tensor) -> torch.Tensor:
        with qs.autocast(recipe=RECIPES[recipe]):
            return forward(x)

    return autocasting


def run(
    case: Case, backend: str | None, blocks: bool = False, inside: bool = False, steps: int = STEPS
) -> tuple[Any, ...]:
    torch._dynamo.reset()
    model = build(case, backend, blocks, inside)
    optimizer = optimizer_of(model, case)
    losses = train(model, optimizer, case, 0, steps)
    model.eval()
    with torch.no_grad(), qs.autocast(recipe=RECIPES[case.recipe]):
        evaluated = model(batch(9, case)[0])
    return losses, evaluated.float().tolist(), bits(model, optimizer)


SETTINGS: dict[str, dict[str, Any]] = {
    "linear layers": {},
    "a linear layer, gathered once": {"reshard": False, "shapes": ((33, 2),)},  # of 3 ranks, the last holds nothing
    "linear layers, gathered once": {"reshard": False},
    "autocast inside": {"inside": True},
    "with an MLP": {"blocks": True},
    "with an MLP on kernels": {"blocks": True, "steps": 2},  # Triton's interpreter takes seconds for a step
    "linear layers on kernels": {"steps": 2},
    "a linear layer on kernels": {"shapes": ((33, 2),), "steps": 2},
    "an MLP on kernels": {"blocks": True, "shapes": SHAPES[1:], "steps": 1},
}
"""What is compiled. Inductor sums the norm of the MLP in another order, so it is given the linear layers only."""


KEEPING = ("delayed", "nvfp4", "mxfp8 two copies")
"""Recipes with something to keep between or within steps."""


Cells = dict[tuple[str, int], list[str]]
"""(What is compiled, ranks) -> recipes."""


def cells(backend: str) -> Cells:
    """A recipe that keeps something: in graphs, and without kernels."""
    first = next(iter(SETTINGS))
    if backend == "inductor":  # it takes long
        return {(first, 1): ["delayed"]}
    return {("a linear layer on kernels", 2): ["mxfp8 two copies"], ("a linear layer, gathered once", 3): ["nvfp4"]}


def rest() -> Cells:
    """What is not tried above: linear layers with every recipe, the MLP with those that keep something and one more, on
    1, 2 and 3 ranks."""
    chosen, first = cells("aot_eager"), next(iter(SETTINGS))
    every = {(first, ranks): list(RECIPES) for ranks in (1, 2, 3)}
    labels = SETTINGS.keys() - {
        first,
        "a linear layer, gathered once",
        "a linear layer on kernels",
        "an MLP on kernels",
    }
    every |= {(label, ranks): [*KEEPING, "mxfp8"] for label in sorted(labels) for ranks in (1, 2, 3)}
    every["an MLP on kernels", 2] = ["nvfp4"]
    every |= {("linear layers on kernels", ranks): list(RECIPES) for ranks in (2, 3)}
    return {at: [name for name in recipes if name not in chosen.get(at, ())] for at, recipes in every.items()}


def compared(ranks: int, backend: str, label: str, recipe: str) -> str:
    """Whether a compiled and an uncompiled run have the same bits."""
    warnings.filterwarnings("ignore", category=DeprecationWarning)  # of Dynamo and inductor themselves
    options = dict(SETTINGS[label])
    of_case = {"reshard": options.pop("reshard", True), "shapes": options.pop("shapes", SHAPES)}
    case = Case(recipe, (ranks,), init="direct", **of_case)
    with ExitStack() as stack:
        if "kernels" in label:
            stack.enter_context(prepared_once())
            stack.enter_context(kernel_dispatch.kernels_only_on("cpu"))
        return "equal" if run(case, backend, **options) == run(case, None, **options) else "DIFFER"


@pytest.mark.parametrize(
    ("backend", "cells"),
    [
        ("aot_eager", cells("aot_eager")),
        pytest.param("inductor", cells("inductor"), marks=pytest.mark.exhaustive),
        pytest.param("aot_eager", rest(), marks=pytest.mark.exhaustive),
        pytest.param("inductor", {("linear layers", 2): ["nvfp4"]}, marks=pytest.mark.exhaustive),
    ],
    ids=["aot_eager", "inductor", "rest", "inductor on 2 ranks"],
)
def test_compiled_has_the_bits_of_uncompiled(backend: str, cells: Cells, show: Callable[[str], None]) -> None:
    rows = []
    for (label, ranks), recipes in cells.items():
        found = {}
        for recipe in recipes:
            if label == "autocast inside" and torch.__version__ < "2.12" and not isinstance(RECIPES[recipe], str):
                continue  # see tests/modules/test_compile.py: by name only
            found[recipe] = min(run_ranks(ranks, compared, ranks, backend, label, recipe))
        shown = "".join(f"{found.get(recipe, '-'):<18}" for recipe in RECIPES)
        rows.append(f"{ranks:<6}{backend:<11}{label:<30}" + shown)
    head = f"{'ranks':<6}{'backend':<11}{'compiled':<30}" + "".join(f"{recipe:<18}" for recipe in RECIPES)
    show("\n".join([head, *rows]))
    assert not any("DIFFER" in row for row in rows), "\n".join([head, *rows])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "other"),
    exhaustive([("rowwise", "block"), ("nvfp4", ""), ("current", "")], [("nvfp4", "")]),
)
def test_processes_that_share_a_compile_cache(recipe: str, other: str, tmp_path: Path) -> None:
    """A second process reads functions of the same recipe, and none of another one of the same name: 2 ranks."""
    (first,), (*others, alike) = run_ranks(2, steps_of_a_cache, str(tmp_path), recipe, other)
    assert {first, *others} == {(True, 0, 0)}
    assert alike == (True, 1, 2)
