"""Weights that are tied in a model and not in the checkpoint, and the reverse."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

import quantshard as qs
from quantshard import checkpoints
from quantshard.errors import CheckpointError
from quantshard.optimizers import FusedAdam
from tests.distributed.pool import run_ranks


def built(recipe: str | None, tied: bool) -> nn.Sequential:
    """A quantized pair and a plain one."""
    torch.manual_seed(0)
    pair = nn.Sequential(*[nn.Linear(48, 48) for _ in range(2)])
    if recipe is not None:
        qs.convert(pair, recipe)
    model = nn.Sequential(*pair, *[nn.Linear(5, 5) for _ in range(2)])
    if tied:
        model[1].weight, model[3].weight = model[0].weight, model[2].weight
    return model


@pytest.mark.parametrize("recipe", [None, "mxfp8", "delayed"])
def test_weights_that_are_not_tied_there_are_refused(tmp_path: Path, recipe: str | None) -> None:
    untied, tied = built(recipe, False), built(recipe, True)
    checkpoints.save(tmp_path / "untied", untied, None)
    before = {name: param.detach().clone() for name, param in tied.named_parameters()}
    with pytest.raises(CheckpointError, match=r"1\.weight and 0\.weight, which are tied"):
        checkpoints.load(tmp_path / "untied", tied)
    assert all(torch.equal(values_of(param), values_of(before[name])) for name, param in tied.named_parameters())
    with torch.no_grad():
        untied[1].weight.copy_(untied[0].weight)
        untied[3].weight.copy_(untied[2].weight)
    checkpoints.save(tmp_path / "alike", untied, None)
    checkpoints.load(tmp_path / "alike", tied)  # as good as tied
    assert torch.equal(values_of(tied[1].weight), values_of(untied[1].weight))


def values_of(param: torch.Tensor) -> torch.Tensor:
    return param.dequantize() if hasattr(param, "quantized_storage") else param


def test_tied_weights_are_loaded_where_they_are_tied_and_where_they_are_not(tmp_path: Path) -> None:
    model = built("mxfp8", True)
    checkpoints.save(tmp_path / "tied", model, None)
    for tied in (True, False):
        checkpoints.load(tmp_path / "tied", found := built("mxfp8", tied))
        assert all(torch.equal(values_of(found[n].weight), values_of(model[n].weight)) for n in range(4))


def test_with_an_optimizer_its_states_tell(tmp_path: Path) -> None:
    untied, tied = built("mxfp8", False), built("mxfp8", True)
    checkpoints.save(tmp_path / "untied", untied, FusedAdam(untied.named_parameters()))
    with pytest.raises(CheckpointError, match="has states of 8 parameters and this one of 6"):
        checkpoints.load(tmp_path / "untied", tied, FusedAdam(tied.named_parameters()))


def test_an_optimizer_of_other_weights_does_not_tell(tmp_path: Path) -> None:
    untied, tied = built("mxfp8", False), built("mxfp8", True)
    biases = lambda model: FusedAdam([layer.bias for layer in model])  # noqa: E731
    checkpoints.save(tmp_path / "untied", untied, biases(untied))
    with pytest.raises(CheckpointError, match="which are tied in this model"):
        checkpoints.load(tmp_path / "untied", tied, biases(tied))


def sharded(folder: str) -> list[str]:
    untied, tied = built("mxfp8", False), built("mxfp8", True)
    for model in (untied, tied):
        fully_shard(model)
    checkpoints.save(folder, untied, None)
    with pytest.raises(CheckpointError) as refused:
        checkpoints.load(folder, tied)
    checkpoints.load(folder, built("mxfp8", False))
    return [str(refused.value)]


@pytest.mark.distributed
def test_every_rank_refuses(tmp_path: Path) -> None:
    """1 and 3 ranks; of these, each compares some."""
    for ranks in (1, 3):
        for (told,) in run_ranks(ranks, sharded, str(tmp_path / str(ranks))):
            assert "which are tied in this model" in told
