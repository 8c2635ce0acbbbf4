"""Checkpoints that several files of tests read, saved once."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from quantshard.tools.trainer.models.decoder import LanguageModel
from tests.interop.layouts import models


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[LanguageModel, Path]]:
    """By recipe: a model that was trained, which no test changes, and its checkpoint."""
    return cache(lambda recipe: models.save(tmp_path_factory.mktemp("checkpoints"), recipe))
