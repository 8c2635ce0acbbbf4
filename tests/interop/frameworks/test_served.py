"""Checkpoints that others have quantized for serving: their codes and scales are kept, trained and written back."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, CompressedTensorsConfig

import quantshard as qs
from quantshard.errors import CheckpointError
from quantshard.integrations.transformers import training_config
from quantshard.optimizers import FusedAdam
from quantshard.tensor import components
from tests.distributed.pool import run_ranks
from tests.pages import snippets

pytest.importorskip("compressed_tensors")
from tests.interop.frameworks import served

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning:compressed_tensors", "ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:save_pretrained.*(stacked experts|not multiples of 128):UserWarning"),
    pytest.mark.filterwarnings("ignore:.*quantization_config.*or equivalent parameters:UserWarning"),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
]
transformers.utils.logging.disable_progress_bar()

STYLES = {
    "deepseek": ("fp8-weights", "hf-fp8-block"),
    "FP8_BLOCK": ("fp8-weights", "compressed-tensors-fp8-block"),
    "FP8": ("current", "compressed-tensors-fp8"),
    "FP8_DYNAMIC": ("rowwise", "compressed-tensors-fp8-channel"),
    "NVFP4A16": ("nvfp4-weights", "compressed-tensors-nvfp4"),
    "NVFP4": ("nvfp4-weights", "compressed-tensors-nvfp4"),
    "MXFP8": ("mxfp8-weights", "compressed-tensors-mxfp8"),
}
"""Style -> recipe whose weights have its blocks, and our name of the layout."""
READ = {"deepseek", "FP8_DYNAMIC", "NVFP4A16"}
"""Styles of which transformers' values are compared; the others are read by the same code or not at all."""
CASES = [
    (served.DENSE, "deepseek"), (served.DENSE, "FP8_DYNAMIC"), (served.DENSE, "NVFP4A16"), (served.DENSE, "NVFP4"),
    (served.MIXTURE, "deepseek"),
    *[pytest.param(kind, style, marks=pytest.mark.exhaustive) for kind, style in (
        (served.DENSE, "FP8"), (served.DENSE, "FP8_BLOCK"), (served.DENSE, "MXFP8"), (served.MIXTURE, "FP8_DYNAMIC"),
        (served.MIXTURE, "NVFP4A16"), (served.MIXTURE, "MXFP8"),
    )],
]  # fmt: skip
TOKENS = torch.randint(3, 101, (4, 16), generator=torch.Generator().manual_seed(0))


def load(folder: Path, recipe: Any) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, config=training_config(str(folder), recipe))


def step(model: Any, optimizer: FusedAdam) -> float:
    loss = model(input_ids=TOKENS, labels=TOKENS).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach())


def train(model: Any, steps: int, lr: float = 1e-3) -> list[float]:
    optimizer = FusedAdam(model.named_parameters(), lr=lr)
    return [step(model, optimizer) for _ in range(steps)]


def values(model: Any) -> dict[str, Tensor]:
    return {
        name: param.dequantize(dtype=torch.float32)
        for name, param in model.named_parameters()
        if components.quantized_local(param) is not None
    }


def differing(files: dict[str, Tensor], others: dict[str, Tensor]) -> list[str]:
    def raw(tensors: dict[str, Tensor], name: str) -> Any:
        value = tensors.get(name)
        return None if value is None else (value.dtype, value.shape, value.reshape(-1).view(torch.uint8).tolist())

    return [name for name in sorted(files.keys() | others.keys()) if raw(files, name) != raw(others, name)]


@pytest.mark.parametrize(("kind", "style"), CASES, ids=lambda x: getattr(x, "model_type", x))
def test_codes_are_kept_trained_and_written_back(kind: Any, style: str, tmp_path: Path) -> None:
    recipe, layout = STYLES[style]
    files = served.publish(tmp_path / "served", style, kind)
    # without scales that were calibrated for activations
    weights = {name: value for name, value in files.items() if not name.endswith(("input_scale", "input_global_scale"))}
    model = load(tmp_path / "served", recipe)
    model.save_pretrained(tmp_path / "same", layout=layout)
    assert not differing(weights, load_file(tmp_path / "same" / served.FILE))

    other = AutoModelForCausalLM.from_config(kind, dtype=torch.bfloat16)
    qs.convert(other, recipe)
    done = qs.layouts.load(tmp_path / "served", other)
    assert not done.requantized and not done.quantized
    other_state = other.state_dict()
    assert all(torch.equal(value, other_state[name]) for name, value in model.state_dict().items())

    before = values(model)
    losses = train(model, 4)
    assert losses[-1] < losses[0] - 0.3
    trained = values(model)
    assert trained and not any(torch.equal(before[name], trained[name]) for name in trained)
    model.save_pretrained(tmp_path / "trained", layout=layout)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a single process
        qs.checkpoints.save(tmp_path / "checkpoint", model, None)
    qs.layouts.export(tmp_path / "checkpoint", layout, tmp_path / "exported", config=tmp_path / "served")
    written = load_file(tmp_path / "trained" / served.FILE)
    exported = list((tmp_path / "exported").glob("*.safetensors"))
    assert not differing(written, load_file(exported[0])) and written.keys() == weights.keys()
    if kind is served.DENSE and style in READ:
        check_values_read_by_transformers(tmp_path / "trained", style, trained)


def check_values_read_by_transformers(folder: Path, style: str, expected: dict[str, Tensor]) -> None:
    options = {} if style == "deepseek" else {"quantization_config": CompressedTensorsConfig(dequantize=True)}
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options)
    # compressed-tensors reads NVFP4 in BF16, from a quotient that float32 rounds otherwise than our product
    bound = 2**-8 + 2**-20 if style == "NVFP4A16" else 0.0
    for name, value in expected.items():
        assert ((plain.get_parameter(name).float() - value).abs() <= bound * value.abs()).all(), name


def loaded_shards(folder: str) -> dict[str, Tensor]:
    """Converted, sharded, then loaded; codes and scales gathered from all ranks, and buffers."""
    model = AutoModelForCausalLM.from_config(served.MIXTURE, dtype=torch.bfloat16)
    qs.convert(model, "nvfp4-weights")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    done = qs.layouts.load(folder, model)
    assert not done.requantized and not done.quantized
    state = model.state_dict().items()
    return {name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in state}


@pytest.mark.distributed
def test_shards_are_those_of_the_files(tmp_path: Path) -> None:
    """3 ranks, with uneven shards of blocks of 1x16 and of stacked experts."""
    served.publish(tmp_path, "NVFP4A16", served.MIXTURE)
    whole = load(tmp_path, "nvfp4-weights").state_dict()
    for shards in run_ranks(3, loaded_shards, str(tmp_path)):
        assert [name for name, value in shards.items() if not torch.equal(value, whole[name])] == []
        assert shards.keys() == whole.keys()


def test_the_snippet_of_the_page(tmp_path: Path) -> None:
    (snippet,) = (text for text in snippets("docs/existing-models.md", "py") if "training_config(served" in text)
    files = served.publish(tmp_path / "served", "deepseek")
    names: dict[str, Any] = {"served": tmp_path / "served", "tuned": tmp_path / "tuned"}
    exec(snippet, names | {"train": step})
    assert load_file(tmp_path / "tuned" / served.FILE).keys() == files.keys()
    assert len(snippet.splitlines()) <= 8


@pytest.mark.parametrize("style", ["deepseek", "NVFP4A16"])
def test_steps_that_change_no_master_keep_the_values(style: str, tmp_path: Path) -> None:
    """Weights are not rounded once more: the scales are those that their own values give."""
    served.publish(tmp_path, style)
    model = load(tmp_path, STYLES[style][0])
    before = values(model)
    train(model, 1, lr=0.0)
    for name, value in values(model).items():
        # layers whose second scale is larger than their own values need (see `served.publish`)
        if style == "deepseek" or name.split(".")[-2] in ("o_proj", "down_proj"):
            assert torch.allclose(value, before[name], rtol=2**-22, atol=0), name


@pytest.mark.parametrize(("style", "recipe"), [("NVFP4A16", "nvfp4"), ("deepseek", "current")])
def test_the_error_names_the_recipe(style: str, recipe: str, tmp_path: Path) -> None:
    served.publish(tmp_path, style)
    name = {"NVFP4A16": "nvfp4-weights", "deepseek": "fp8-weights"}[style]
    with pytest.raises(CheckpointError, match=f"cannot be copied .*; use recipe '{name}'"):
        load(tmp_path, recipe)
    model = AutoModelForCausalLM.from_config(served.DENSE, dtype=torch.bfloat16)
    qs.convert(model, recipe)
    with pytest.raises(CheckpointError, match=f"cannot be copied .*; use recipe '{name}', or pass lossy=True"):
        qs.layouts.load(tmp_path, model)
