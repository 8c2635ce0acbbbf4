"""Activation recomputation: the same gradients, weights and histories as without, bit for bit.

Runs on 1 and 2 ranks, and prints the table.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._composable import checkpoint as composable_checkpoint
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

import quantshard as qs
from quantshard import private_torch
from tests.distributed.models import RECIPES, Case, batch, bits, mesh_of, optimizer_of
from tests.distributed.pool import run_ranks

pytestmark = pytest.mark.distributed


class Block(nn.Module):
    """Modules of each kind; if `twice`, one of them is used twice, by two recipes."""

    def __init__(self, width: int, twice: bool, **options: Any) -> None:
        super().__init__()
        self.twice = twice
        self.norm_linear = qs.LayerNormLinear(width, width, **options)
        self.mlp = qs.LayerNormMLP(width, 40, activation="swiglu", **options)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mlp(self.norm_linear(x))
        with qs.autocast(enabled=False):
            return x + self.norm_linear(x) if self.twice else x


class Recomputing(nn.Module):
    """A module whose forward is called through a checkpointing function."""

    def __init__(self, module: nn.Module, how: Callable[..., Any], **options: Any) -> None:
        super().__init__()
        self.module, self.how, self.options = module, how, options

    def forward(self, x: Tensor) -> Tensor:
        return self.how(self.module, x, **self.options)


def nested(module: nn.Module) -> nn.Module:
    assert isinstance(module, Block)
    module.mlp = Recomputing(module.mlp, checkpoint, use_reentrant=False)
    return Recomputing(module, checkpoint, use_reentrant=False)


def nested_mixed(module: nn.Module) -> nn.Module:
    assert isinstance(module, Block)
    module.mlp = Recomputing(module.mlp, checkpoint, use_reentrant=True)
    return Recomputing(module, checkpoint, use_reentrant=False)


WAYS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "not reentrant": lambda m: Recomputing(m, checkpoint, use_reentrant=False),
    "reentrant": lambda m: Recomputing(m, checkpoint, use_reentrant=True),
    "quantshard.checkpoint": lambda m: Recomputing(m, qs.checkpoint),
    "wrapper": lambda m: checkpoint_wrapper(m, checkpoint_impl=CheckpointImpl.NO_REENTRANT),
    "wrapper reentrant": lambda m: checkpoint_wrapper(m, checkpoint_impl=CheckpointImpl.REENTRANT),
    "composable": lambda m: composable_checkpoint(m),
    "nested": nested,
    "nested mixed": nested_mixed,
}

SETTINGS = (
    (1, "none", "of each"),
    (1, "none", "of each after both"),
    (2, "outside", "of each"),
    (2, "inside", "of each"),
    (1, "none", "of the sum"),
)
"""Ranks, where FSDP is, and of what backward is called: of each of two micro-batches at once, of each after both
forwards, or of their sum. The last takes the turns of the first, for not all ways are tried in it."""

KEEPING = ("delayed", "nvfp4", "mxfp8 two copies")
"""Recipes with something to keep: the scales of past amaxes, random draws, which copy is gathered."""

WIDTH = 33  # divides by nothing


def built(case: Case, way: Callable[[nn.Module], nn.Module] | None, fsdp: str) -> nn.Module:
    torch.manual_seed(case.seed)
    with qs.quantized_model_init(recipe=RECIPES[case.recipe]):
        first = qs.Linear(96, WIDTH, params_dtype=torch.bfloat16, device=case.device)
        blocks: list[nn.Module] = [
            Block(WIDTH, twice, params_dtype=torch.bfloat16, device=case.device) for twice in (False, True)
        ]
    mesh = mesh_of(case)
    if fsdp == "inside":
        for block in blocks:
            fully_shard(block, mesh=mesh)
    if way is not None:
        blocks = [way(block) for block in blocks]
    if fsdp == "outside":
        for block in blocks:
            fully_shard(block, mesh=mesh)
    last = nn.Linear(WIDTH, 1, dtype=torch.bfloat16, device=case.device)
    model = nn.Sequential(first, *blocks, last)
    if fsdp != "none":
        fully_shard(model, mesh=mesh)
    return model


def run(case: Case, way: str | None, fsdp: str, backward: str, steps: int) -> tuple[list[str], list[Any]]:
    """Some steps; hashes of everything, by position since wrappers rename, and the gradients of each step."""
    model = built(case, None if way is None else WAYS[way], fsdp)
    optimizer = optimizer_of(model, case)
    seen = []
    for step in range(steps):
        x, y = (part.to(case.device) for part in batch(step, case))
        losses = []
        for part, target in zip(x.chunk(2), y.chunk(2), strict=True):
            with qs.autocast(recipe=RECIPES[case.recipe]):
                losses.append(((model(part).float() - target) ** 2).mean())
            if backward == "of each":
                losses.pop().backward()
        for loss in [sum(losses)] if backward == "of the sum" else losses:
            loss.backward()
        for param in model.parameters():
            assert param.grad is not None
            seen.append(private_torch.local_tensor(param.grad).clone())
            if fsdp == "none":
                dist.all_reduce(param.grad)
        optimizer.step()
        optimizer.zero_grad()
    return list(bits(model, optimizer).values()), seen


def ways_of(recipe: str, setting: int) -> list[str]:
    """In turns: each setting meets every way, a fourth of them for each recipe that keeps something, so that in four
    settings each of these meets every way; the last fourth goes to one of the others."""
    others = [name for name in RECIPES if name not in KEEPING]
    places = [*KEEPING, others[setting % len(others)]]
    if recipe not in places:
        return []
    first = 2 * ((places.index(recipe) + setting) % 4)
    return list(WAYS)[first : first + 2]


def few_of(ways: list[str], recipe: str, setting: int) -> list[str]:
    """One of two in turns in the third and fourth setting: every way with FSDP; tests/modules has those without."""
    if setting not in (2, 3):
        return []
    return ways[KEEPING.index(recipe) % 2 :: 2] if recipe in KEEPING else ways[1::2]


def reorders(way: str, backward: str) -> bool:
    """It runs a backward pass for each region, so that sums are taken in another order."""
    return "reentrant" in way.split() and "not" not in way and backward == "of the sum"


def runs(
    ranks: int, device: str = "cpu", long: Sequence[str] = tuple(RECIPES), few: bool = False
) -> dict[tuple[str, str], str]:
    """What differs from the run without recomputation, by (recipe, way and where FSDP is).

    `long`: recipes of which two steps are run. One step has two forwards and backwards, and draws for each; scales of
    past amaxes, and layers that are used again, need one more."""
    found = {}
    for (number, (of, fsdp, backward)), recipe in itertools.product(enumerate(SETTINGS), RECIPES):
        tried = few_of(ways_of(recipe, number), recipe, number) if few else ways_of(recipe, number)
        ways = [way for way in tried if of == ranks and not reorders(way, backward)]
        case = Case(recipe, (ranks,), init="direct", device=device)
        steps = 2 if recipe in long else 1
        plain, plain_grads = run(case, None, fsdp, backward, steps) if ways else ([], [])
        for way in ways:
            again, grads = run(case, way, fsdp, backward, steps)
            alike = all(torch.equal(a, b) for a, b in zip(plain_grads, grads, strict=True))
            label = f"{way}, FSDP {fsdp}, backward {backward}"
            found[recipe, label] = "equal" if alike and again == plain else "DIFFER"
    return found


def test_every_way_and_recipe_is_tried() -> None:
    """Whatever keeps something with every way, and with and without FSDP; every way in every setting; all else once."""
    tried = {
        (recipe, way, number)
        for number, (_, _, backward) in enumerate(SETTINGS)
        for recipe in RECIPES
        for way in ways_of(recipe, number)
        if not reorders(way, backward)
    }
    assert {(recipe, way) for recipe in KEEPING for way in WAYS} <= {(recipe, way) for recipe, way, _ in tried}
    settings = {(way, number) for number, (_, _, backward) in enumerate(SETTINGS) for way in WAYS
                if not reorders(way, backward)}  # fmt: skip
    assert settings == {(way, number) for _, way, number in tried}
    assert {(recipe, number) for recipe in KEEPING for number in range(4)} <= {(r, number) for r, _, number in tried}
    assert {recipe for recipe, _, _ in tried} == set(RECIPES)


def test_a_few_of_them_are_every_way_and_recipe() -> None:
    """Every way with FSDP; each recipe that keeps something, and others in turns."""
    tried = {
        (recipe, way, number)
        for number in range(len(SETTINGS))
        for recipe in RECIPES
        for way in few_of(ways_of(recipe, number), recipe, number)
    }
    assert {way for _, way, _ in tried} == set(WAYS)
    assert {recipe for recipe, _, _ in tried} >= {*KEEPING}


@pytest.mark.parametrize(
    ("long", "few"),
    [(("delayed",), True), pytest.param(tuple(RECIPES), False, marks=pytest.mark.exhaustive)],
    ids=["", "every recipe"],
)
def test_gradients_weights_and_histories_are_those_without(
    long: tuple[str, ...], few: bool, show: Callable[[str], None]
) -> None:
    """2 ranks, and 1 in `make test-all`."""
    rows, wrong = [], []
    for ranks in (2,) if few else (1, 2):
        results = run_ranks(ranks, runs, ranks, "cpu", long, few)
        for label in sorted({label for _, label in results[0]}):
            cells = [min(found.get((recipe, label), "-") for found in results) for recipe in RECIPES]
            rows.append(f"{ranks:<6}{label:<58}" + "".join(f"{cell:<18}" for cell in cells))
            wrong += [rows[-1]] if "DIFFER" in cells else []
    head = f"{'ranks':<6}{'recomputation':<58}" + "".join(f"{recipe:<18}" for recipe in RECIPES)
    show("\n".join([head, *rows]))
    assert not wrong, "\n".join([head, *wrong])
