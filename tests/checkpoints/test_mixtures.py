"""Checkpoints of models with stacks of experts: inspected, compared, loaded in high precision and by other recipes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import quantshard as qs
from quantshard import checkpoints
from quantshard.checkpoints import conversions
from quantshard.checkpoints.comparison import compare
from quantshard.checkpoints.inspection import inspect_checkpoint, verify
from quantshard.errors import CheckpointError
from quantshard.numerics.states import MASTER
from quantshard.optimizers import FusedAdam
from quantshard.tensor import components

pytest.importorskip("transformers", "5.0")

from tests.covering import by_turns
from tests.interop.conversion.mixtures import mixture, stacks, tokens

NAMES = ("Qwen3-MoE", "gpt-oss")


def built(name: str, recipe: str | None, seed: int = 0, **options: Any) -> tuple[Any, FusedAdam]:
    model = mixture(name, seed)
    if recipe is not None:
        qs.convert(model, recipe)
    return model, FusedAdam(model.named_parameters(), lr=1e-2, **options)


def step(model: Any, optimizer: FusedAdam) -> None:
    model(input_ids=tokens(), labels=tokens()).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def values(model: Any) -> dict[str, torch.Tensor]:
    """Of the stacks, in float32."""
    found = {}
    for name, param in stacks(model).items():
        local = components.quantized_local(param)
        found[name] = (
            param.detach().float() if local is None else local.quantized_storage.dequantize().view(param.shape)
        )
    return found


@pytest.mark.parametrize(("name", "recipe", "options"), [
    ("Qwen3-MoE", "nvfp4", {}), ("gpt-oss", "current", {"exp_avg_dtype": torch.uint8}),
])  # fmt: skip
def test_stacks_are_inspected_and_compared(name: str, recipe: str, options: Any, tmp_path: Path) -> None:
    """A stack is one row with the shape of its values, whose padding and scales are those of its matrices."""
    model, optimizer = built(name, recipe, **options)
    checkpoints.save(tmp_path / "a", model, optimizer)
    step(model, optimizer)
    checkpoints.save(tmp_path / "b", model, optimizer)
    rows = {row.name.removeprefix("model."): row for row in inspect_checkpoint(tmp_path / "b").rows}
    for key, param in stacks(model).items():
        row, storage = rows[key], components.storage_of(param)
        assert (row.shape, row.quantized, row.wrong) == (tuple(param.shape), True, ())
        assert row.format == storage.spec.tag and row.codes == param.numel() and row.scales is not None
        largest = param.dequantize().abs().max().item()
        assert row.scales[1] <= largest <= row.scales[1] * storage.spec.format.components[0].encoding.max
    assert verify(tmp_path / "b").problems == () and verify(tmp_path / "b").quantized >= 12
    differing = {difference.key for difference in compare(tmp_path / "a", tmp_path / "b").differences}
    assert {f"model.{key}" for key in stacks(model)} <= differing
    assert compare(tmp_path / "a", tmp_path / "a").equal


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_scales_of_another_shape_are_reported(tmp_path: Path) -> None:
    model, _ = built("Qwen3-MoE", "current")
    entries = {f"model.{key}": value for key, value in model.state_dict().items()}
    key = next(key for key in entries if key.endswith("gate_up_proj_scale_inv"))
    entries[key] = torch.ones(1, 1)
    torch.distributed.checkpoint.save(entries, checkpoint_id=tmp_path / "c", no_dist=True)
    (problem,) = verify(tmp_path / "c").problems
    assert f"{key} is torch.float32 [1, 1], not torch.float32 [4, 1, 1]" in problem


@pytest.mark.parametrize("name", NAMES)
def test_high_precision_values_are_loaded_as_convert_quantizes_them(name: str) -> None:
    plain = mixture(name, 1)
    wanted = mixture(name, 1)
    qs.convert(wanted, "nvfp4")
    model, _ = built(name, "nvfp4")
    checkpoints.load_high_precision(model, plain.state_dict())
    found, expected = model.state_dict(), wanted.state_dict()
    assert [key for key in expected if not key.endswith("_draws") and not torch.equal(found[key], expected[key])] == []
    for key, param in stacks(model).items():
        assert torch.equal(param.get_high_precision_init_val(), stacks(plain)[key])
    again = checkpoints.high_precision_state_dict(model, dtype=torch.float32)
    assert all(torch.equal(again[key], value) for key, value in values(model).items())


@by_turns(2, change=[("current", "mxfp8"), ("nvfp4", "current"), ("mxfp8", None), (None, "nvfp4")], name=NAMES)
def test_stacks_change_their_recipe_with_masters(
    name: str, change: tuple[str | None, str | None], tmp_path: Path
) -> None:
    """From masters, each stack becomes their nearest quantization: what `convert` makes of the same values."""
    old, new = change
    model, optimizer = built(name, old, master_weights=True)
    step(model, optimizer)
    checkpoints.save(tmp_path / "c", model, optimizer)
    other, its_optimizer = built(name, new, seed=1, master_weights=True)
    with pytest.raises(CheckpointError, match="is of another recipe"):
        checkpoints.load(tmp_path / "c", other, its_optimizer)
    with pytest.warns(conversions.RequantizedWarning, match="requantized"):
        checkpoints.load(tmp_path / "c", other, its_optimizer, requantize=True)
    wanted, _ = built(name, new, seed=2)
    masters = {key: optimizer.state[param].get(MASTER, param).detach() for key, param in stacks(model).items()}
    for key, param in stacks(wanted).items():
        if new is None:
            param.data.copy_(masters[key])
        else:
            param.quantize_(masters[key])
    assert all(torch.equal(values(other)[key], value) for key, value in values(wanted).items())
    step(other, its_optimizer)


@pytest.mark.parametrize("name", NAMES)
def test_stacks_without_masters_change_their_recipe_if_asked(name: str, tmp_path: Path) -> None:
    model, _ = built(name, "current")
    checkpoints.save(tmp_path / "c", model, None)
    other, _ = built(name, "mxfp8", seed=1)
    with pytest.raises(CheckpointError, match=r"pass lossy=True"):
        checkpoints.load(tmp_path / "c", other, requantize=True)
    with pytest.warns(conversions.RequantizedWarning, match="WITHOUT masters"):
        checkpoints.load(tmp_path / "c", other, requantize=True, lossy=True)
    wanted, _ = built(name, "mxfp8", seed=2)
    for key, param in stacks(wanted).items():
        param.quantize_(values(model)[key])
    assert all(torch.equal(values(other)[key], value) for key, value in values(wanted).items())
    plain = mixture(name, 1)
    with pytest.warns(conversions.RequantizedWarning):
        checkpoints.load(tmp_path / "c", plain, requantize=True, lossy=True)
    assert all(torch.equal(value, values(model)[key].bfloat16().float()) for key, value in values(plain).items())
