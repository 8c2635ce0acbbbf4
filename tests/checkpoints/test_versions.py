"""Checkpoints that earlier releases wrote load bit for bit; those of later ones are refused by their number."""

from __future__ import annotations

import json
import pickle
import tarfile
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorProperties

from quantshard import checkpoints
from quantshard.checkpoints.disk.manifest import MANIFEST
from quantshard.checkpoints.inspect.verify import verify
from quantshard.checkpoints.requantize import RequantizedWarning
from quantshard.checkpoints.untrusted.metadata import read_metadata
from quantshard.errors import CheckpointError
from quantshard.optimizers import FusedAdam
from quantshard.state_cells import STATE_CELLS
from quantshard.tensor.components import CHECKPOINT_VERSION
from tests.checkpoints.small import built, written
from tests.checkpoints.test_untrusted import change_object
from tests.distributed.models import RECIPES
from tests.golden.make_checkpoints import LAYOUT, archive, digest, options

DIGESTS = {
    "v1": {
        "delayed": "8f4064a882a1980cb077fcf11ca3eee3",
        "current": "6b09a9e48b7fdc429bcb2a79c0ce0955",
        "block": "a768a319da47e793fd469ef9ab5156c6",
        "rowwise": "2f447985971836a9e3d42f3dfb4a3e1d",
        "mxfp8": "15869d973d73edb31759d08cbfbc6564",
        "nvfp4": "d4e5b7178ee7170b404b4cb1cd7b8604",
        "mxfp8 two copies": "ef10d3e20b2e44d67a338fc125869ebb",
    },
    "v1-ue5m3": {
        "delayed": "590656a0450ad37422a9746f8c04d53a",
        "current": "5687272a394328efbebd0cc0822fd0d4",
        "block": "365b3615f2e8cec8cad9067a37eb7011",
        "rowwise": "980a7fd1b5ec574a5e52de7bdfa9a80a",
        "mxfp8": "f3e0f417a686cdea40f2f9bc70b6b8ab",
        "nvfp4": "e3c1fe3e0bb92c87f99884c518ca129d",
        "mxfp8 two copies": "520203c12a85f1c03859635bbb8b210e",
    },
}
"""Of each layout and recipe: `digest` of what was saved. Those that were released never change; of v1's moments of 8
bits see `saved_digest`."""

EARLIER_MOMENTS = ("current", "rowwise", "nvfp4")
"""The recipes of v1 with second moments in E4M3."""


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


def saved_digest(path: Path, model: nn.Module, optimizer: FusedAdam) -> str:
    """`digest`, with the second moments of 8 bits as the checkpoint has them, after these were compared by value."""
    states = optimizer.state_dict()["state"]
    for index, param in enumerate(model.parameters()):
        key = f"optimizer.state.{index}.exp_avg_sq"
        if "exp_avg_sq_scale_e8m0" not in states[index]:
            continue
        codes, scale = plain_tensors(path, **{key: param.shape, f"{key}_scale_inv": (len(param), 1)})
        values = codes.view(torch.float8_e4m3fn).float() * scale
        off = (optimizer.get_unscaled_state(param, "exp_avg_sq") - values).abs()
        assert (off <= values / 16).all() and values.any()  # half of a gap: these scales are no powers of two
        del states[index]["exp_avg_sq_scale_e8m0"]
        states[index] |= {"exp_avg_sq": codes, "exp_avg_sq_scale_inv": scale}
    return digest(model, optimizer, states)


def plain_tensors(path: Path, **shapes: tuple[int, ...]) -> list[torch.Tensor]:
    """Codes and float32 scales of a checkpoint, by key, as stock DCP reads them."""
    dtypes = (torch.float32 if key.endswith("_scale_inv") else torch.uint8 for key in shapes)
    found = {key: torch.empty(shape, dtype=dtype) for (key, shape), dtype in zip(shapes.items(), dtypes, strict=True)}
    with pytest.warns(UserWarning, match="torch.distributed is disabled"):
        dcp.load(found, checkpoint_id=path)
    return list(found.values())


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("layout", DIGESTS)
def test_every_layout_loads_bit_for_bit(unpacked: dict[str, Path], layout: str, recipe: str) -> None:
    path = unpacked[layout] / recipe
    model, optimizer = built(recipe, seed=9, **options(recipe))
    born = digest(model, optimizer)
    rounds = layout == "v1" and recipe in EARLIER_MOMENTS
    says = r"2 states of 8 bits .*state\.0\.exp_avg_sq"
    with pytest.warns(RequantizedWarning, match=says) if rounds else nullcontext():
        extra = checkpoints.load(path, model, optimizer)
    of_all = saved_digest(path, model, optimizer) if layout == "v1" else digest(model, optimizer)
    assert of_all == DIGESTS[layout][recipe] != born
    assert (extra["step"], extra["name"], extra["words"].tolist()) == (1, "run", [0, 1, 2, 3, 4])
    assert verify(path).ok


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("layout", DIGESTS)
def test_stock_dcp_loads_them_too(unpacked: dict[str, Path], layout: str, recipe: str) -> None:
    """But for the second moments of 8 bits of v1, which it does not find: it would read them as something else."""
    path = unpacked[layout] / recipe
    model, optimizer = built(recipe, seed=9, **options(recipe))
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    if layout == "v1" and recipe in EARLIER_MOMENTS:
        with pytest.warns(UserWarning, match="torch.distributed is disabled"):
            with pytest.raises(CheckpointException, match=r"Missing key .*exp_avg_sq_scale_e8m0"):
                dcp.load(state, checkpoint_id=path)
        return
    with pytest.warns(UserWarning, match="torch.distributed is disabled"):
        dcp.load(state, checkpoint_id=path)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    assert digest(model, optimizer) == DIGESTS[layout][recipe]


def test_earlier_moments_keep_their_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of scales that are powers of two, as they were before UE5M3, down to the smallest: every bit of every value."""
    monkeypatch.setattr("quantshard.optimizers.state.state_cell", lambda dtype, nonnegative: STATE_CELLS[dtype])
    model, optimizer = built("current", shapes=((5, 300), (300, 6)), exp_avg_sq_dtype=torch.uint8)
    for param, size in zip(model.parameters(), (1.0, 1.0, 1e-20, 1.0), strict=True):
        drawn = torch.randn(param.shape, generator=torch.Generator().manual_seed(len(param)))
        optimizer.set_scaled_state(param, "exp_avg_sq", drawn.pow(8) * size * size)
    values = [optimizer.get_unscaled_state(param, "exp_avg_sq").clone() for param in model.parameters()]
    checkpoints.save(tmp_path / "c", model, optimizer)
    monkeypatch.undo()
    model, optimizer = built("current", seed=9, shapes=((5, 300), (300, 6)), exp_avg_sq_dtype=torch.uint8)
    checkpoints.load(tmp_path / "c", model, optimizer)
    found = [optimizer.get_unscaled_state(param, "exp_avg_sq") for param in model.parameters()]
    assert all(map(torch.equal, found, values))


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
