"""Export of checkpoints that several ranks wrote, and import on meshes that cut blocks. Each test names its ranks."""

from __future__ import annotations

import json
import os
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from quantshard import checkpoints
from quantshard.errors import CheckpointError
from quantshard.interop.layouts import export, load, loading
from quantshard.interop.layouts.files import SafetensorsFiles
from quantshard.interop.layouts.source import CheckpointModel
from quantshard.optimizers import FusedAdam
from quantshard.tools.trainer.models import model as models
from quantshard.tools.trainer.settings.config import TrainSettings
from quantshard.tools.trainer.settings.values import MeshSpec
from tests.distributed.pool import run_ranks
from tests.interop.layouts.models import CONFIG, RECIPES

pytestmark = pytest.mark.distributed

SETTINGS: dict[str, Any] = {
    "hidden": 160, "layers": 1, "heads": 4, "kv_heads": 2, "ffn": 352, "seq_length": 16, "global_batch": 4,
}  # fmt: skip
HF = {**CONFIG, "hidden_size": 160, "intermediate_size": 352, "num_hidden_layers": 1}
LAYOUTS = {
    "delayed": "modelopt-fp8", "block": "hf-fp8-block", "rowwise": "compressed-tensors", "mxfp8": "sglang-mxfp8",
    "nvfp4": "modelopt",
}  # fmt: skip
"""By recipe: the layout through which its weights must come back as they were."""
TWO = ["mxfp8", "nvfp4"]
"""Of one scale for a block and of two; tests/interop/layouts has every recipe on one process."""


def build(recipe: str, mesh: str, seed: int) -> models.LanguageModel:
    axes = MeshSpec.parse(mesh)
    settings = TrainSettings(**SETTINGS, seed=seed, mesh=mesh).resolved()
    with mock.patch.object(models, "recipes_of", return_value=RECIPES[recipe]):
        return models.build(models.ModelSpec(settings), axes.device_mesh("cpu"))


def step(model: models.LanguageModel, optimizer: FusedAdam) -> float:
    tokens = torch.randint(0, 257, (2, 17), generator=torch.Generator().manual_seed(0))
    loss = models.loss(model(tokens[:, :-1]), tokens[:, 1:])
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def write(path: str, mesh: str, recipes: list[str]) -> None:
    for recipe in recipes:
        model = build(recipe, mesh, seed=0)
        optimizer = FusedAdam(model.named_parameters(), lr=1e-2)
        step(model, optimizer)
        checkpoints.save(f"{path}/{recipe}", model, optimizer)


class Counted(SafetensorsFiles):
    """Counts the bytes that are read."""

    read_bytes = 0

    def read(self, name: str, *slices: slice) -> torch.Tensor:
        found = super().read(name, *slices)
        Counted.read_bytes += found.nbytes
        return found


def read(folder: str, out: str, mesh: str, recipes: list[str]) -> dict[str, tuple[int, list[str], float]]:
    """Load each export into a model of its recipe, save that, and train on: bytes read, what was copied, the loss."""
    found = {}
    loading.SafetensorsFiles = Counted
    for recipe in recipes:
        model = build("mxfp8" if recipe == "bf16" else recipe, mesh, seed=1)
        Counted.read_bytes = 0
        done = load(f"{folder}/{recipe}", model)
        read_bytes = Counted.read_bytes
        optimizer = FusedAdam(model.named_parameters(), lr=1e-2)
        checkpoints.save(f"{out}/{recipe}", model, optimizer)
        found[recipe] = (read_bytes, done.copied, step(model, optimizer))
    loading.SafetensorsFiles = SafetensorsFiles
    return found


def exported(path: Path, out: Path, recipes: list[str]) -> tuple[Path, Path]:
    """Checkpoints written on 3 ranks, none of whose parts ends where a block does; and their exports."""
    run_ranks(3, write, str(path), "dp_shard=3", recipes)
    for recipe in recipes:
        export(path / recipe, {**LAYOUTS, "bf16": "plain"}[recipe], out / recipe, config=HF)
    return path, out


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return exported(tmp_path_factory.mktemp("checkpoints"), tmp_path_factory.mktemp("exports"), [*TWO, "bf16"])


def check(path: Path, folder: Path, out: Path, mesh: str, recipes: list[str]) -> None:
    results = run_ranks(MeshSpec.parse(mesh).processes, read, str(folder), str(out), mesh, recipes)
    for recipe in recipes:
        one, two = CheckpointModel(path / recipe), CheckpointModel(out / recipe)
        assert one.weights == two.weights
        for name, weight in one.weights.items():
            other = two.parts(weight)
            for part, value in one.parts(weight).items():
                assert torch.equal(value, other[part]), (recipe, name, part)
        size = sum(os.path.getsize(file) for file in (folder / recipe).glob("*.safetensors"))
        for read_bytes, copied, loss in (result[recipe] for result in results):
            assert len(copied) == len(one.weights)
            # its third; or its half, embedding and head among them, of which each rank has a half at most
            assert 0.2 * size < read_bytes < 0.6 * size
            assert 0 < loss < 10


def test_imported_bits_are_those_exported(written: tuple[Path, Path], tmp_path: Path) -> None:
    """4 ranks."""
    check(*written, tmp_path, "dp_shard=2,tp=2", TWO)


@pytest.mark.exhaustive
@pytest.mark.parametrize("mesh", ["dp_shard=3", "dp_shard=2,tp=2"])
def test_imported_bits_of_every_recipe(tmp_path: Path, mesh: str) -> None:
    """3 and 4 ranks."""
    for name in ("checkpoints", "exports", "imported"):
        (tmp_path / name).mkdir()
    made = exported(tmp_path / "checkpoints", tmp_path / "exports", [*LAYOUTS])
    check(*made, tmp_path / "imported", mesh, [*LAYOUTS])


def load_alone(folder: str) -> list[dict[str, torch.Tensor]]:
    source_settings = TrainSettings(**SETTINGS, seed=1).resolved()
    model = models.LanguageModel(source_settings, RECIPES["mxfp8"], "cpu")
    load(folder, model)
    return [{name: value for name, value in model.state_dict().items() if not name.endswith(("_key", "_draws"))}]


def test_high_precision_is_quantized_as_on_one_rank(written: tuple[Path, Path], tmp_path: Path) -> None:
    """4 ranks: the bits do not depend on the sharding."""
    _, folder = written
    run_ranks(4, read, str(folder), str(tmp_path), "dp_shard=2,tp=2", ["bf16"])
    (alone,) = load_alone(str(folder / "bf16"))
    source = CheckpointModel(tmp_path / "bf16")
    for weight in source.weights.values():
        if weight.tag is not None:
            for component in weight.format.components:
                found = source.parts(weight)[component.name]
                assert torch.equal(found, alone[weight.name + component.key_suffix]), weight.name


def refused(folder: str) -> str:
    try:
        load(folder, build("mxfp8", "dp_shard=3", seed=1))
    except CheckpointError as error:
        return str(error)
    return "nothing was raised"


def failing_on_one_rank(folder: str) -> list[str]:
    """What nobody foresaw, while files are looked through and while they are copied."""
    found = []
    for owner, method in ((loading._LayoutLoader, "_why_not"), (loading.conversion, "write_copy")):
        fails = mock.patch.object(owner, method, side_effect=IndexError("index 7 is out of range"))
        with fails if dist.get_rank() == 1 else nullcontext():
            found.append(refused(folder))
    return found


def test_an_unforeseen_error_of_one_rank_is_raised_on_all(written: tuple[Path, Path]) -> None:
    """3 ranks: none waits for the others."""
    _, folder = written
    messages = run_ranks(3, failing_on_one_rank, str(folder / "mxfp8"))
    error = "on rank 1: IndexError: index 7 is out of range"
    assert messages == [[error, f"{error}; the model is partly loaded: load again, or build it again"]] * 3


def test_what_one_rank_finds_all_raise(written: tuple[Path, Path], tmp_path: Path) -> None:
    """3 ranks: two rows of one block, which only the last rank holds, have different scales; a file is damaged."""
    _, folder = written
    (file,) = (folder / "mxfp8").glob("*.safetensors")
    tensors = load_file(file)
    tensors["model.layers.0.mlp.up_proj.weight_scale_inv"][350, 0] += 1
    for name in ("config.json", "model.safetensors.index.json"):
        (tmp_path / name).write_bytes((folder / "mxfp8" / name).read_bytes())
    save_file(tensors, tmp_path / file.name)
    messages = run_ranks(3, refused, str(tmp_path))
    assert len(set(messages)) == 1 and "fc1_up_weight" in messages[0] and "different scales" in messages[0]
    (tmp_path / file.name).write_bytes(file.read_bytes()[:-1])
    messages = run_ranks(3, refused, str(tmp_path))
    assert len(set(messages)) == 1 and "cannot be read as safetensors" in messages[0]
    assert json.loads((tmp_path / "config.json").read_text())["hidden_size"] == 160
