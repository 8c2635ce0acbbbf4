"""`checkpoints.high_precision_state_dict`: the values of one process on any mesh, and nothing that needs quantshard.

Each test names its rank count.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import quantshard as qs
from quantshard import checkpoints, private_torch, recipe
from quantshard.checkpoints import high_precision_state_dict
from quantshard.errors import ConfigurationError
from quantshard.optimizers import FusedAdam, MasterWeights
from quantshard.tensor import components
from quantshard.tools.trainer.models import model as models
from quantshard.tools.trainer.settings.config import TrainSettings
from quantshard.tools.trainer.settings.values import MeshSpec
from tests.distributed.models import RECIPES, Case
from tests.distributed.pool import run_ranks
from tests.distributed.saving import SHAPES, new_run, on_rank_0
from tests.pages import snippets

pytestmark = pytest.mark.distributed

MESHES = {1: (1,), 3: (3,), 4: (2, 2)}
ON_RANKS = {1: ["current", "rowwise", "mxfp8 two copies"], 3: ["block", "nvfp4"], 4: ["delayed"]}
LEFT = {
    1: ["delayed", "mxfp8"],
    3: ["delayed", "current", "rowwise", "mxfp8", "mxfp8 two copies"],
    4: ["current", "mxfp8"],
}


def same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) and a[k].dtype == b[k].dtype for k in a)


def whole(values: dict[str, Any]) -> dict[str, Any]:
    return {key: value.full_tensor() if isinstance(value, DTensor) else value for key, value in values.items()}


def on_a_mesh(case: Case, folder: str, recipes: list[str]) -> list[str]:
    """What differs from the values of one process, that holds what was saved from this mesh."""
    wrong = []
    for name in recipes:
        its_case = replace(case, recipe=name)
        run, path = new_run(its_case, folder), Path(folder, name)
        run.train(1)
        checkpoints.save(path, run.model, run.optimizer)
        alone = new_run(replace(its_case, mesh=None, seed=99), folder)
        checkpoints.load(path, alone.model, alone.optimizer)
        for optimizers in ((None, None), (run.optimizer, alone.optimizer)):
            expected = high_precision_state_dict(alone.model, optimizers[1])
            for key, param in components.named_parameters(alone.model).items():
                local = components.quantized_local(param)
                plain = param.detach().float() if local is None else local.quantized_storage.dequantize()
                if optimizers[1] is not None:
                    plain = optimizers[1].get_unscaled_state(param, "master_param")
                if not torch.equal(expected[key], plain):
                    wrong.append(f"{name}: {key}")
            before = run.held()
            found = {
                "sharded": whole(high_precision_state_dict(run.model, optimizers[0])),
                "full": high_precision_state_dict(run.model, optimizers[0], full=True),
            }
            first = high_precision_state_dict(run.model, optimizers[0], full=True, cpu_offload=True)
            wrong += [f"{name}: {kind}" for kind, values in found.items() if not same(values, expected)]
            wrong += [] if (same(first, expected) if dist.get_rank() == 0 else first == {}) else [f"{name}: rank 0"]
            narrow = high_precision_state_dict(run.model, optimizers[0], full=True, dtype=torch.bfloat16)
            rounded = {k: v.bfloat16() if k in dict(alone.model.named_parameters()) else v for k, v in expected.items()}
            wrong += [] if same(narrow, rounded) else [f"{name}: bfloat16"]
            for value in [*found["full"].values(), *high_precision_state_dict(run.model, dtype=None).values()]:
                private_torch.local_tensor(value).fill_(3)
            wrong += [] if run.held() == before else [f"{name}: they are no copies"]
        left = [k for k in expected if k.endswith(("_key", "_draws", "_scale_inv", "_format", "weight_amax_history"))]
        wrong += [f"{name}: {left}"] if left else []
        if name in ("mxfp8", "block", "nvfp4"):
            wrong += round_trip(run.model, run.optimizer, its_case, folder)
    return wrong


def round_trip(model: nn.Module, optimizer: FusedAdam, case: Case, folder: str) -> list[str]:
    """The codes are the nearest to the masters, so masters that are loaded give them again."""
    wrong = []
    for full in (False, True):
        target = new_run(replace(case, seed=99), folder)
        values = high_precision_state_dict(model, optimizer, full=full)
        checkpoints.load_high_precision(target.model, values)
        for (key, ours), theirs in zip(model.state_dict().items(), target.model.state_dict().values(), strict=True):
            parts = private_torch.local_tensor(ours), private_torch.local_tensor(theirs)
            if not key.endswith(("_key", "_draws")) and not torch.equal(*parts):
                wrong.append(f"{case.recipe}: {key} after the round trip, {full=}")
    return wrong


@pytest.mark.parametrize(
    ("ranks", "recipes"),
    [*ON_RANKS.items(), *(pytest.param(*each, marks=pytest.mark.exhaustive) for each in LEFT.items())],
)
def test_values_are_those_of_one_process(ranks: int, recipes: list[str], tmp_path: Path) -> None:
    """1, 3 and 4 ranks, FSDP2 and HSDP, uneven shards; loaded again they give the codes."""
    case = Case("mxfp8", MESHES[ranks], shapes=SHAPES)
    assert run_ranks(ranks, on_a_mesh, case, str(tmp_path), recipes) == [[]] * ranks


def tensor_parallel(recipes: list[str]) -> list[str]:
    """What differs between tensor parallelism, alone and under FSDP2, and one process."""
    found = []
    sizes = {"hidden": 64, "heads": 2, "kv_heads": 2, "ffn": 96, "layers": 1, "seq_length": 8}
    for name in recipes:
        for mesh in ("dp_shard=4", "dp_shard=2,tp=2"):
            settings = TrainSettings(**sizes, mesh=mesh, global_batch=4).resolved()  # type: ignore[arg-type]
            torch.manual_seed(3)
            with mock.patch.object(models, "recipes_of", return_value=recipe.resolve(RECIPES[name])):
                model = models.build(models.ModelSpec(settings), MeshSpec.parse(mesh).device_mesh("cpu"))
            optimizer = FusedAdam(model.named_parameters())
            found += [(name, high_precision_state_dict(model, full=True))]
            found += [(name, high_precision_state_dict(model, optimizer, full=True))]
    names = [name for name, _ in found]
    wrong = [f"{a}: {i}" for i, (a, b) in enumerate(zip(names, names[2:], strict=False)) if i % 4 < 2 and a != b]
    return wrong + [
        f"{found[i][0]} {i % 4}" for i in range(len(found)) if i % 4 < 2 and not same(found[i][1], found[i + 2][1])
    ]


@pytest.mark.parametrize(
    "recipes", [["nvfp4"], pytest.param(["delayed", "mxfp8"], marks=pytest.mark.exhaustive)], ids=["some", "rest"]
)
def test_values_under_tensor_parallelism(recipes: list[str]) -> None:
    """4 ranks: FSDP2 over 4, and over 2 with tensor parallelism over 2."""
    assert run_ranks(4, tensor_parallel, recipes) == [[]] * 4


def mixed_model(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    with qs.quantized_model_init(recipe="mxfp8"):
        model = nn.Sequential(qs.Linear(40, 33), nn.Linear(33, 16, bias=False), nn.BatchNorm1d(16))
    with qs.quantized_model_init(enabled=False):
        model.append(qs.Linear(16, 8))
    return model


def mixed(folder: str) -> list[Any]:
    """Keys and dtypes of plain modules among ours; optimizers; a file of safetensors; and what is refused."""
    model = mixed_model()
    expected = nn.Sequential(nn.Linear(40, 33), nn.Linear(33, 16, bias=False), nn.BatchNorm1d(16), nn.Linear(16, 8))
    for layer in (model[0], model[1], model[3]):
        fully_shard(layer)
    fully_shard(model)
    master_weights = MasterWeights(torch.optim.AdamW, model.named_parameters(), lr=1e-2)
    split = FusedAdam(model.named_parameters(), store_param_remainders=True)
    bare = FusedAdam(model.named_parameters(), master_weights=False)
    wrong: list[Any] = []
    for optimizer in (None, master_weights, split):
        values = high_precision_state_dict(model, optimizer, full=True)
        wrong += [] if values.keys() == expected.state_dict().keys() else [sorted(values)]
        expected.load_state_dict(values)
        wrong += [] if values["2.num_batches_tracked"].dtype == torch.int64 else ["the buffer was cast"]
    if importlib.util.find_spec("safetensors") is not None:
        from safetensors.torch import load_file, save_file

        values = high_precision_state_dict(model, full=True, cpu_offload=True)
        on_rank_0(save_file, values, Path(folder, "model.safetensors"))
        again = mixed_model(1)
        checkpoints.load_high_precision(again, load_file(Path(folder, "model.safetensors")))
        wrong += [] if same(high_precision_state_dict(again), high_precision_state_dict(model, full=True)) else ["file"]
    refused: list[Callable[[], object]] = [
        lambda: high_precision_state_dict(model, bare),
        lambda: high_precision_state_dict(model, dtype=torch.uint8),
        lambda: (qs.requantize_([(model[0].weight, torch.zeros_like(local_values(model[0].weight)))]),),
        lambda: high_precision_state_dict(model, split),
    ]
    for action in refused:
        try:
            action()
        except ConfigurationError as error:
            wrong.append(str(error))
    return wrong


def local_values(param: Tensor) -> Tensor:
    found = components.quantized_local(param)
    assert found is not None
    return found.dequantize()


@pytest.mark.parametrize("ranks", [1, 3])
def test_plain_modules_optimizers_and_files(ranks: int, tmp_path: Path) -> None:
    """1 and 3 ranks."""
    for no_masters, dtype, behind in run_ranks(ranks, mixed, str(tmp_path)):
        assert "0.weight has no master; omit the optimizer" in no_masters
        assert "dtype=torch.uint8): choose one of torch.float32" in dtype
        assert "0.weight was changed after its master in this FusedAdam" in behind


def documented(folder: str) -> list[Any]:
    """What docs/checkpoints.md's snippet gives, beside the masters that it saved."""
    start = snippets("docs/checkpoints.md")[0]
    (snippet,) = snippets("docs/checkpoints.md#high-precision-values", "py")
    save, load = snippet.replace("values.safetensors", f"{folder}/values.safetensors").split("# in a new process\n")
    names: dict[str, Any] = {}
    exec(start, names)
    torch.manual_seed(0)
    names["model"], names["optimizer"] = names["build"]()
    expected = high_precision_state_dict(names["model"], names["optimizer"], full=True, dtype=torch.bfloat16)
    exec(save, names)
    torch.manual_seed(1)
    names["model"], names["optimizer"] = names["build"]()
    exec(load, names)
    loaded = high_precision_state_dict(names["model"], full=True)
    with qs.quantized_model_init():
        wanted = nn.Sequential(*[qs.Linear(100, 100, params_dtype=torch.bfloat16) for _ in range(2)])
    checkpoints.load_high_precision(wanted, expected)
    return [key for key, value in high_precision_state_dict(wanted).items() if not torch.equal(loaded[key], value)]


@pytest.mark.skipif(importlib.util.find_spec("safetensors") is None, reason="no safetensors")
def test_the_snippet_of_the_documentation(tmp_path: Path) -> None:
    """2 ranks."""
    assert run_ranks(2, documented, str(tmp_path)) == [[]] * 2
