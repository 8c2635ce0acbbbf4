"""Saving in the background beside training, in one process: what training sees of it."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from quantshard.checkpoints import Manager
from quantshard.checkpoints.commit import CommitWriter
from quantshard.optimizers import FusedAdam


@pytest.fixture
def trained() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(4, 4)
    return model, FusedAdam(model.named_parameters(), lr=1e-3)


@contextmanager
def held_back() -> Iterator[tuple[threading.Event, threading.Event]]:
    """Writers say that they have begun, and write when they may."""
    begun, may_write, write = threading.Event(), threading.Event(), CommitWriter.write_data

    def late(*args: Any) -> Any:
        begun.set()
        assert may_write.wait(60)
        return write(*args)

    with mock.patch.object(CommitWriter, "write_data", late):
        yield begun, may_write


def test_the_warnings_of_training_are_its_own(tmp_path: Path, trained: Any) -> None:
    """Filters are of the whole process: while a save runs, and after it, they are those that training has set."""
    with held_back() as (begun, may_write), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with Manager(tmp_path, async_="thread") as manager:
            manager.save(1, *trained)
            assert begun.wait(60)
            warnings.warn("of training", FutureWarning, stacklevel=1)
            warnings.filterwarnings("error", message="training set this")
            may_write.set()
            manager.wait()
            with pytest.raises(UserWarning, match="training set this"):
                warnings.warn("training set this", stacklevel=1)
            manager.restore(*trained)
    assert [str(warning.message) for warning in caught] == ["of training"]
