"""Weights that are tied in a model and not in the checkpoint, and the reverse."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import quantshard as qs
from quantshard import checkpoints
from quantshard.errors import CheckpointError
from quantshard.optimizers import FusedAdam


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
