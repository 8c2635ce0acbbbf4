"""Checkpoints of every released layout load bit for bit; those of later ones are refused by their number."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path
from typing import Any

import pytest
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorProperties

from quantshard import checkpoints
from quantshard.checkpoints.disk.manifest import MANIFEST
from quantshard.checkpoints.inspection import verify
from quantshard.errors import CheckpointError
from quantshard.tensor.components import CHECKPOINT_VERSION
from tests.checkpoints.small import built, written
from tests.checkpoints.test_untrusted import change_object
from tests.distributed.models import RECIPES
from tests.golden.make_checkpoints import LAYOUT, archive, digest, options

DIGESTS = {
    "v1": {
        "delayed": "590656a0450ad37422a9746f8c04d53a",
        "current": "5687272a394328efbebd0cc0822fd0d4",
        "block": "365b3615f2e8cec8cad9067a37eb7011",
        "rowwise": "980a7fd1b5ec574a5e52de7bdfa9a80a",
        "mxfp8": "f3e0f417a686cdea40f2f9bc70b6b8ab",
        "nvfp4": "e3c1fe3e0bb92c87f99884c518ca129d",
        "mxfp8 two copies": "520203c12a85f1c03859635bbb8b210e",
    },
}
"""Of each layout and recipe: `digest` of what was saved, which never changes."""


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    found = {}
    for layout in DIGESTS:
        found[layout] = tmp_path_factory.mktemp(layout)
        with tarfile.open(archive(layout)) as tar:
            tar.extractall(found[layout], filter="data")
    return found


def test_the_present_layout_is_kept() -> None:
    assert list(DIGESTS)[-1] == LAYOUT, "run python -m tests.golden.make_checkpoints"
    assert LAYOUT.startswith(f"v{CHECKPOINT_VERSION}") and DIGESTS[LAYOUT].keys() == RECIPES.keys()


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("layout", DIGESTS)
def test_every_layout_loads_bit_for_bit(unpacked: dict[str, Path], layout: str, recipe: str) -> None:
    path = unpacked[layout] / recipe
    model, optimizer = built(recipe, seed=9, **options(recipe))
    born = digest(model, optimizer)
    extra = checkpoints.load(path, model, optimizer)
    assert digest(model, optimizer) == DIGESTS[layout][recipe] != born
    assert (extra["step"], extra["name"], extra["words"].tolist()) == (1, "run", [0, 1, 2, 3, 4])
    assert verify(path).ok


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("layout", DIGESTS)
def test_stock_dcp_loads_them_too(unpacked: dict[str, Path], layout: str, recipe: str) -> None:
    path = unpacked[layout] / recipe
    model, optimizer = built(recipe, seed=9, **options(recipe))
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    with pytest.warns(UserWarning, match="torch.distributed is disabled"):
        dcp.load(state, checkpoint_id=path)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    assert digest(model, optimizer) == DIGESTS[layout][recipe]


def test_a_newer_format_is_refused_by_number(tmp_path: Path) -> None:
    path = written(tmp_path / "c", "mxfp8")
    tag = built("mxfp8")[0].state_dict()["1.weight_format"]
    tag[0] = CHECKPOINT_VERSION + 1
    change_object(path, "model.1.weight_format", tag)
    for requantize in (False, True):
        with pytest.raises(CheckpointError, match=r"version 2, not 1; update quantshard") as raised:
            checkpoints.load(path, *built("mxfp8"), requantize=requantize)
        assert "\n" not in str(raised.value)


def test_a_newer_manifest_is_refused_by_number(tmp_path: Path) -> None:
    path = written(tmp_path / "c", "mxfp8")
    (path / MANIFEST).write_text(json.dumps({"quantshard": 2, "what": "nobody knows yet"}))
    with pytest.raises(CheckpointError, match=r"has version 2, not 1"):
        checkpoints.load(path, *built("mxfp8"))


@pytest.mark.parametrize("strides", [(), (None,), ((18, 1),)], ids=["before 2.15", "unknown", "known"])
def test_metadata_of_every_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, strides: tuple[Any, ...]) -> None:
    """torch 2.15 saves strides too, and earlier ones cannot unpickle what it wrote; here all read both."""
    state = TensorProperties.__getstate__
    monkeypatch.setattr(TensorProperties, "__getstate__", lambda properties: (*state(properties)[:5], *strides))
    path = written(tmp_path / "c", "mxfp8")
    model, optimizer = built("mxfp8", seed=9)
    born = digest(model, optimizer)
    checkpoints.load(path, model, optimizer)
    assert digest(model, optimizer) == digest(*built("mxfp8")) != born
