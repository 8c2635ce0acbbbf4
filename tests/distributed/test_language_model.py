"""A whole language model of shapes that divide by nothing: hidden 96, 3 heads, ffn 200, vocabulary 257.

Runs on 1, 2 and 3 ranks.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from quantshard import checkpoints
from quantshard.optimizers import ElementwiseOptimizer
from quantshard.tools.trainer.models import model as models
from quantshard.tools.trainer.optimizer import make_optimizer
from quantshard.tools.trainer.settings.config import TrainSettings
from tests.covering import exhaustive
from tests.distributed.models import bits
from tests.distributed.pool import run_ranks

pytestmark = pytest.mark.distributed

SETTINGS = TrainSettings(
    hidden=96, heads=3, ffn=200, layers=2, seq_length=24, global_batch=6, lr=1e-2, weight_decay=0.1
)
RECIPES = ("delayed", "current", "block", "rowwise", "mxfp8", "nvfp4")
"""Each with one of the architectures, in turns."""


def build(settings: TrainSettings) -> tuple[models.LanguageModel, ElementwiseOptimizer]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp_shard",))
    model = models.build(models.ModelSpec(settings.resolved()), mesh)
    return model, make_optimizer(model, settings.resolved())


def train(model: models.LanguageModel, optimizer: ElementwiseOptimizer, steps: range) -> list[float]:
    losses = []
    for step in steps:
        tokens = torch.randint(0, 257, (6, 25), generator=torch.Generator().manual_seed(step))
        mine = tokens.chunk(dist.get_world_size())[dist.get_rank()]
        loss = models.loss(model(mine[:, :-1]), mine[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def born(settings: TrainSettings) -> dict[str, str]:
    return bits(*build(settings))


def first_run(settings: TrainSettings, path: str) -> tuple[dict[str, str], tuple[dict[str, str], list[float]]]:
    """Bits when born, and when saved; losses after that."""
    model, optimizer = build(settings)
    born = bits(model, optimizer)
    train(model, optimizer, range(1))
    checkpoints.save(path, model, optimizer)
    return born, (bits(model, optimizer), train(model, optimizer, range(1, 3)))


def second_run(settings: TrainSettings, path: str, steps: int) -> tuple[dict[str, str], list[float]]:
    model, optimizer = build(replace(settings, seed=99))
    checkpoints.load(path, model, optimizer)
    return bits(model, optimizer), train(model, optimizer, range(1, 1 + steps))


@pytest.mark.exhaustive
@pytest.mark.parametrize("optimizer", ["lion", "muon"])
def test_other_optimizers_have_the_same_bits_resharded_and_resumed(optimizer: str, tmp_path: Path) -> None:
    settings = replace(SETTINGS, layers=1, optimizer=optimizer, lr=1e-3, exp_avg_dtype="fp8", recipe="block")
    path = str(tmp_path / "c")
    births, ran = zip(*run_ranks(3, first_run, settings, path), strict=True)
    assert [*births] == run_ranks(1, born, settings) * 3 and births[0] != ran[0][0]
    assert run_ranks(3, second_run, settings, path, 2) == [*ran]
    assert all(loaded == ran[0][0] for loaded, _ in run_ranks(1, second_run, settings, path, 1))


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("name", "architecture"),
    exhaustive(
        [(name, ("llama", "gpt")[turn % 2]) for turn, name in enumerate(RECIPES)],
        [("nvfp4", "gpt")],  # test_cli.py has mxfp8 and llama
    ),
)
def test_born_trained_saved_resharded_and_resumed(name: str, architecture: str, tmp_path: Path) -> None:
    settings = replace(SETTINGS, recipe=name, architecture=architecture, kv_heads=1 if architecture == "llama" else 0)
    path = str(tmp_path / "c")
    [alone] = run_ranks(1, born, settings)
    births, ran = zip(*run_ranks(3, first_run, settings, path), strict=True)
    assert births == (alone,) * 3
    assert run_ranks(3, second_run, settings, path, 2) == [*ran]
    assert all(loaded == ran[0][0] for loaded, _ in run_ranks(2, second_run, settings, path, 1))
    assert ran[0][0].keys() == alone.keys()
    assert ran[0][0] != alone
