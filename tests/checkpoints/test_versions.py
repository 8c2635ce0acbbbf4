"""Checkpoints that earlier releases wrote load bit for bit; those of later ones are refused by their number."""

from __future__ import annotations

import json
import pickle
import tarfile
from pathlib import Path
from typing import Any

import pytest
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorProperties

from quantshard import checkpoints
from quantshard.checkpoints.disk.manifest import MANIFEST
from quantshard.checkpoints.inspect.verify import verify
from quantshard.checkpoints.untrusted.metadata import read_metadata
from quantshard.errors import CheckpointError
from quantshard.tensor.components import CHECKPOINT_VERSION
from tests.checkpoints.small import built, written
from tests.checkpoints.test_untrusted import change_object
from tests.distributed.models import RECIPES
from tests.golden.make_checkpoints import archive, digest, options

DIGESTS = {
    1: {
        "delayed": "8f4064a882a1980cb077fcf11ca3eee3",
        "current": "6b09a9e48b7fdc429bcb2a79c0ce0955",
        "block": "a768a319da47e793fd469ef9ab5156c6",
        "rowwise": "2f447985971836a9e3d42f3dfb4a3e1d",
        "mxfp8": "15869d973d73edb31759d08cbfbc6564",
        "nvfp4": "d4e5b7178ee7170b404b4cb1cd7b8604",
        "mxfp8 two copies": "ef10d3e20b2e44d67a338fc125869ebb",
    },
}
"""Of each version and recipe: `digest` of what was saved. Those of versions that were released never change."""


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    found = {}
    for version in DIGESTS:
        found[version] = tmp_path_factory.mktemp(f"v{version}")
        with tarfile.open(archive(version)) as tar:
            tar.extractall(found[version], filter="data")
    return found


def test_the_present_version_is_kept() -> None:
    assert max(DIGESTS) == CHECKPOINT_VERSION, "run python -m tests.golden.make_checkpoints"
    assert DIGESTS[CHECKPOINT_VERSION].keys() == RECIPES.keys()


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("version", DIGESTS)
def test_every_version_loads_bit_for_bit(unpacked: dict[int, Path], version: int, recipe: str) -> None:
    path = unpacked[version] / recipe
    model, optimizer = built(recipe, seed=9, **options(recipe))
    born = digest(model, optimizer)
    extra = checkpoints.load(path, model, optimizer)
    assert digest(model, optimizer) == DIGESTS[version][recipe] != born
    assert (extra["step"], extra["name"], extra["words"].tolist()) == (1, "run", [0, 1, 2, 3, 4])
    assert verify(path).ok


@pytest.mark.parametrize("recipe", RECIPES)
def test_stock_dcp_loads_them_too(unpacked: dict[int, Path], recipe: str) -> None:
    path = unpacked[CHECKPOINT_VERSION] / recipe
    model, optimizer = built(recipe, seed=9, **options(recipe))
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    with pytest.warns(UserWarning, match="torch.distributed is disabled"):
        dcp.load(state, checkpoint_id=path)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    assert digest(model, optimizer) == DIGESTS[CHECKPOINT_VERSION][recipe]


def test_a_newer_format_is_refused_by_number(tmp_path: Path) -> None:
    path = written(tmp_path / "c", "mxfp8")
    tag = built("mxfp8")[0].state_dict()["1.weight_format"]
    tag[0] = CHECKPOINT_VERSION + 1
    change_object(path, "model.1.weight_format", tag)
    for requantize in (False, True):
        with pytest.raises(CheckpointError, match=r"version 2, this release .* reads version 1; install") as raised:
            checkpoints.load(path, *built("mxfp8"), requantize=requantize)
        assert "\n" not in str(raised.value)


def test_a_newer_manifest_is_refused_by_number(tmp_path: Path) -> None:
    path = written(tmp_path / "c", "mxfp8")
    (path / MANIFEST).write_text(json.dumps({"quantshard": 2, "what": "nobody knows yet"}))
    with pytest.raises(CheckpointError, match=r"is of version 2, and this quantshard reads versions up to 1; install"):
        checkpoints.load(path, *built("mxfp8"))


def test_metadata_with_new_fields_are_refused_by_name(tmp_path: Path) -> None:
    """Of a later PyTorch: better than to overlook what they mean."""
    path = written(tmp_path / "c", "mxfp8")
    found = read_metadata(path)
    found.surprise = 3  # type: ignore[attr-defined]
    (path / ".metadata").write_bytes(pickle.dumps(found))
    with pytest.raises(CheckpointError, match="a Metadata has other fields"):
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


@pytest.mark.parametrize("strides", [(None, None), ("18",), ((18, 1.0),)])
def test_other_metadata_of_tensors_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, strides: tuple[Any, ...]
) -> None:
    state = TensorProperties.__getstate__
    monkeypatch.setattr(TensorProperties, "__getstate__", lambda properties: (*state(properties)[:5], *strides))
    path = written(tmp_path / "c", "mxfp8")
    with pytest.raises(CheckpointError, match="TensorProperties stands where a tensor's dtype should"):
        checkpoints.load(path, *built("mxfp8"))
