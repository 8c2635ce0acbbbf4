"""`quantshard convert-te`: DCP checkpoints of TransformerEngine's tensors, written by two ranks, become ours.

The files of `golden/make_transformer_engine_checkpoints.py` were written by TransformerEngine's own classes; those that
are written here have plain tensors alone.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import tarfile
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.fsdp import fully_shard
from typer.testing import CliRunner

import quantshard as qs
import quantshard.tools.cli as command_line
from quantshard import checkpoints, numerics, recipe, transformer_engine
from quantshard.checkpoints.comparison import compare
from quantshard.checkpoints.disk import manifest
from quantshard.checkpoints.inspection import inspect_checkpoint, verify
from quantshard.errors import CheckpointError
from quantshard.formats import E4M3, FP32, Orientation
from quantshard.interop.transformer_engine.pieces import CopyPiece, WeightPiece, rows_of
from quantshard.optimizers import FusedAdam
from quantshard.tensor.parameter_state import AMAX_HISTORY, RNG_DRAWS, RNG_KEY
from tests.checkpoints.test_untrusted import Call, change_object
from tests.covering import by_turns
from tests.distributed.pool import run_ranks
from tests.golden.make_transformer_engine_checkpoints import ARCHIVE, RECIPES, SETTINGS, states, weight
from tests.pages import snippets
from tests.tensor.test_tensor import differing, same

STORED: dict[str, Any] = {name: name for name in RECIPES} | {
    "mxfp8": recipe.MXFP8BlockScaling(enable_2d_quantization=False)
}
"""The recipe that keeps weights as TransformerEngine stored them."""

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("te")
    with tarfile.open(ARCHIVE) as tar:
        tar.extractall(folder, filter="data")
    return folder


def size_of(name: str) -> int:
    return weight(name)[1]["codes"].shape[0]


def built(chosen: Any, size: int, *, layers: int = 1, seed: int = 7, **options: Any) -> tuple[nn.Sequential, FusedAdam]:
    torch.manual_seed(seed)
    with qs.quantized_model_init(enabled=chosen is not None, recipe=chosen):
        model = nn.Sequential(*[qs.Linear(size, size, params_dtype=torch.bfloat16) for _ in range(layers)])
    return model, FusedAdam(model.named_parameters(), **options)


def like(path: Path, chosen: Any, size: int, **options: Any) -> Path:
    checkpoints.save(path, *built(chosen, size, **options))
    return path


def trains(model: nn.Sequential, optimizer: FusedAdam, chosen: Any, size: int) -> None:
    step, before = optimizer.param_groups[0]["step"], model[0].weight.dequantize().clone()
    x = torch.randn(8, size, generator=torch.Generator().manual_seed(1)).bfloat16()
    with qs.autocast(enabled=chosen is not None, recipe=chosen):
        model(x).float().square().mean().backward()
    optimizer.step()
    assert optimizer.param_groups[0]["step"] == step + 1
    assert not same(before, model[0].weight.dequantize())


# The files that TransformerEngine's classes wrote


@pytest.mark.parametrize("name", RECIPES)
def test_bit_for_bit(stored: Path, tmp_path: Path, name: str) -> None:
    """Codes, scales, masters, moments and settings; then the model loads and goes on."""
    size, (fmt, parts), kept = size_of(name), weight(name), states(name)
    new = like(tmp_path / "new", STORED[name], size)
    done = transformer_engine.convert(stored / name, new, tmp_path / "out")
    assert not done.inexact and not done.left and len(done.exact) == 8
    assert verify(tmp_path / "out").ok and verify(tmp_path / "out").checksums
    assert any(fmt.name in str(row) for row in inspect_checkpoint(tmp_path / "out").rows)
    model, optimizer = built(STORED[name], size)
    checkpoints.load(tmp_path / "out", model, optimizer)
    storage = model[0].weight.quantized_storage
    assert storage.spec.format == fmt and not differing(storage.components, parts)
    assert same(model[0].bias.detach(), kept["values"]["0.bias"])
    for key, param in model.named_parameters():
        for role, value in kept[key].items():
            held = value if role != "master_param" else value.reshape(param.shape)
            assert same(optimizer.get_unscaled_state(param, role), held), (key, role)
    group = optimizer.param_groups[0]
    assert {setting: group[setting] for setting in SETTINGS} == SETTINGS and group["adam_w_mode"] is True
    trains(model, optimizer, STORED[name], size)


def test_one_step_is_that_of_the_oracle(stored: Path, tmp_path: Path) -> None:
    """The step count and the masters are used: bias corrections are those of step 4."""
    new = like(tmp_path / "new", "current", 128, lr=1.0)
    transformer_engine.convert(stored / "current", new, tmp_path / "out")
    model, optimizer = built("current", 128)
    checkpoints.load(tmp_path / "out", model, optimizer)
    kept, param = states("current")["0.weight"], model[0].weight
    param.grad = torch.full(param.shape, 0.5, dtype=param.dtype)
    optimizer.step()
    b1, b2 = (torch.tensor(beta).double() for beta in SETTINGS["betas"])
    old = {role: value.double() for role, value in kept.items()}
    m, v = b1 * old["exp_avg"] + (1 - b1) * 0.5, b2 * old["exp_avg_sq"] + (1 - b2) * 0.25
    update = m / (1 - b1**4) / ((v / (1 - b2**4)).sqrt() + SETTINGS["eps"]) + 0.01 * old["master_param"]
    wanted = old["master_param"] - SETTINGS["lr"] * update
    assert torch.allclose(optimizer.get_unscaled_state(param, "master_param").double(), wanted, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize(
    ("name", "chosen"),
    [("mxfp8", "mxfp8"), ("current", "nvfp4"), pytest.param("nvfp4", "block", marks=pytest.mark.exhaustive)],
)
def test_another_recipe_is_quantized_from_the_masters(stored: Path, tmp_path: Path, name: str, chosen: str) -> None:
    size = size_of(name)
    new = like(tmp_path / "new", chosen, size)
    with pytest.raises(CheckpointError, match=r"1 inexact tensors \(0\.weight: .*lossy=True"):
        transformer_engine.convert(stored / name, new, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    done = transformer_engine.convert(stored / name, new, tmp_path / "out", lossy=True)
    assert list(done.inexact) == ["0.weight"] and done.inexact["0.weight"].endswith("from its master")
    model, optimizer = built(chosen, size)
    checkpoints.load(tmp_path / "out", model, optimizer)
    cell = model[0].weight.quantized_storage.spec
    wanted = numerics.quantize(states(name)["0.weight"]["master_param"], cell.format, cell.scaling)
    assert not differing(model[0].weight.quantized_storage.components, wanted)
    trains(model, optimizer, chosen, size)


def test_a_model_in_high_precision(stored: Path, tmp_path: Path) -> None:
    """Four bits of an E4M3 times a power of two are a BF16."""
    done = transformer_engine.convert(stored / "mxfp8", like(tmp_path / "new", None, 128), tmp_path / "out")
    assert "0.weight" in done.exact
    fmt, parts = weight("mxfp8")
    values = numerics.dequantize(fmt.copies[Orientation.ROWWISE], parts, (128, 128))
    model, optimizer = built(None, 128)
    checkpoints.load(tmp_path / "out", model, optimizer)
    assert same(model[0].weight.detach(), values.bfloat16())
    new = like(tmp_path / "new 2", None, 128)
    done = transformer_engine.convert(stored / "current", new, tmp_path / "out 2", lossy=True)
    assert done.inexact == {"0.weight": "Float8Tensor, rounded to torch.bfloat16"}


def test_delayed_scaling_starts_with_empty_histories(stored: Path, tmp_path: Path) -> None:
    chosen = recipe.DelayedScaling(amax_history_len=4)
    new = like(tmp_path / "new", chosen, 128)
    done = transformer_engine.convert(stored / "current", new, tmp_path / "out")
    assert not done.inexact and "empty" in done.own["amax histories"]
    model, optimizer = built(chosen, 128)
    checkpoints.load(tmp_path / "out", model, optimizer)
    storage = model[0].weight.quantized_storage
    assert not differing(storage.components, weight("current")[1])
    assert not storage.state[AMAX_HISTORY].any()
    trains(model, optimizer, chosen, 128)


REQUANTIZES = pytest.mark.filterwarnings("ignore::quantshard.checkpoints.conversions.RequantizedWarning")


@REQUANTIZES
def test_states_of_fewer_bits(stored: Path, tmp_path: Path) -> None:
    """They are written in float32, and rounded to nearest as they are loaded."""
    options = {"exp_avg_dtype": torch.bfloat16, "exp_avg_sq_dtype": torch.uint8}
    new = like(tmp_path / "new", "current", 128, **options)
    done = transformer_engine.convert(stored / "current", new, tmp_path / "out")
    assert not done.inexact and "load with requantize=True" in done.own["optimizer states"]
    model, optimizer = built("current", 128, **options)
    checkpoints.load(tmp_path / "out", model, optimizer, requantize=True)
    exact = states("current")["0.weight"]["exp_avg_sq"]
    held = optimizer.get_unscaled_state(model[0].weight, "exp_avg_sq")
    assert ((held - exact).abs() <= exact / 16 + exact.max() * 2**-9).all() and ((held > 0) == (exact > 0)).all()
    trains(model, optimizer, "current", 128)


def test_without_masters(stored: Path, tmp_path: Path) -> None:
    new = like(tmp_path / "new", "current", 128, master_weights=False)
    done = transformer_engine.convert(stored / "current", new, tmp_path / "out", lossy=True)
    left = "not converted: the optimizer of --like has none for this parameter"
    assert done.inexact == {"0.weight master_param": left, "0.bias master_param": left}


@REQUANTIZES
def test_remainders(stored: Path, tmp_path: Path) -> None:
    """A BF16 parameter becomes the upper half of its master."""
    new = like(tmp_path / "new", "current", 128, store_param_remainders=True)
    transformer_engine.convert(stored / "current", new, tmp_path / "out")
    model, optimizer = built("current", 128, store_param_remainders=True)
    checkpoints.load(tmp_path / "out", model, optimizer, requantize=True)
    wanted = states("current")["0.bias"]["master_param"]
    assert same(optimizer.get_unscaled_state(model[0].bias, "master_param"), wanted)


@REQUANTIZES
def test_masters_beside_codes(stored: Path, tmp_path: Path) -> None:
    """The weight keeps its codes, and its master what 16 bits with them can say."""
    options = {"store_param_remainders": True, "master_weight_dtype": torch.float16}
    new = like(tmp_path / "new", "current", 128, **options)
    transformer_engine.convert(stored / "current", new, tmp_path / "out")
    model, optimizer = built("current", 128, **options)
    checkpoints.load(tmp_path / "out", model, optimizer, requantize=True)
    found, wanted = optimizer.get_unscaled_state(model[0].weight, "master_param"), states("current")["0.weight"]
    off, gap = (found - wanted["master_param"]).abs(), wanted["master_param"].abs() * 2.0**-11 + 1e-7
    codes = model[0].weight.quantized_storage.dequantize()
    inside = (wanted["master_param"] - codes).abs() < codes.abs() / 17  # else it is not the weight's own master
    assert inside.float().mean() > 0.5 and (off <= gap)[inside].all()


def test_the_rest_is_as_the_new_model_has_it(stored: Path, tmp_path: Path) -> None:
    checkpoints.save(tmp_path / "new", *built("current", 128), {"recipe": "current", "step": 0})
    done = transformer_engine.convert(stored / "current", tmp_path / "new", tmp_path / "out")
    assert {key for key in done.own if key.startswith("extra.")} == {"extra.recipe", "extra.step"}
    assert checkpoints.load(tmp_path / "out", *built("current", 128)) == {"recipe": "current", "step": 0}
    found = manifest.read_manifest(tmp_path / "out")
    assert found is not None and (found.step, found.recipe) == (3, "current")
    (model, _), (other, _) = built("current", 128), built("current", 128, seed=8)
    checkpoints.load(tmp_path / "out", other)
    born, loaded = (each[0].weight.quantized_storage.state for each in (model, other))
    assert same(born[RNG_KEY], loaded[RNG_KEY]) and same(born[RNG_DRAWS], loaded[RNG_DRAWS])


@pytest.mark.parametrize("flat", [False, True])
def test_nested_entries_go_over(stored: Path, tmp_path: Path, flat: bool) -> None:
    """Whole, or flat where a release that pulled them apart saved the new model."""
    (model, optimizer), extra = built("current", 128), {"schedule": {"last": 3, "seen": [1, {"at": 2}], 4: {}}}
    if flat:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "extra": extra}
        dcp.save(state, checkpoint_id=tmp_path / "new")
    else:
        checkpoints.save(tmp_path / "new", model, optimizer, extra)
    transformer_engine.convert(stored / "current", tmp_path / "new", tmp_path / "out")
    found = checkpoints.load(tmp_path / "out", *built("current", 128))
    assert found == ({"schedule.last": 3, "schedule.seen.0": 1, "schedule.seen.1.at": 2} if flat else extra)


def test_the_model_alone(stored: Path, tmp_path: Path) -> None:
    checkpoints.save(tmp_path / "new", built("current", 128)[0], None)
    done = transformer_engine.convert(stored / "current", tmp_path / "new", tmp_path / "out")
    assert "optimizer" in done.left
    model, _ = built("current", 128)
    checkpoints.load(tmp_path / "out", model)
    assert not differing(model[0].weight.quantized_storage.components, weight("current")[1])


def test_a_model_at_the_top(tmp_path: Path) -> None:
    """`dcp.save(model.state_dict())`: the new model's optimizer has no states there, and is left out."""
    values = {"0.weight": torch.randn(24, 24).bfloat16(), "0.bias": torch.randn(24).bfloat16()}
    dcp.save(dict(values), checkpoint_id=tmp_path / "te")
    done = transformer_engine.convert(tmp_path / "te", like(tmp_path / "new", None, 24), tmp_path / "out", model="")
    assert done.left.keys() == {"optimizer"} and sorted(done.exact) == sorted(values)
    model, _ = built(None, 24)
    checkpoints.load(tmp_path / "out", model)
    assert all(same(param.detach(), values[name]) for name, param in model.named_parameters())
    assert verify(tmp_path / "out").ok


def test_command(stored: Path, tmp_path: Path) -> None:
    new = like(tmp_path / "new", "block", 256)
    arguments = ["convert-te", stored / "block", "--like", new, "--out", tmp_path / "out"]
    result = CliRunner().invoke(command_line.app(), list(map(str, arguments)), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    assert "8 tensors bit for bit, 0 not exactly" in result.output
    assert "new: random keys and draw counts: from --like" in result.output
    with pytest.raises(CheckpointError, match="exists and is not overwritten"):
        transformer_engine.convert(stored / "block", new, tmp_path / "out")


def step_on_ranks(path: Path, out: Path) -> None:
    """Load, take a step with a gradient that all ranks agree on, and save."""
    model, optimizer = built("block", 256)
    if dist.is_initialized():
        fully_shard(model)
        optimizer = FusedAdam(model.named_parameters())
    checkpoints.load(path, model, optimizer)
    with qs.autocast(recipe="block"):
        model(torch.ones(256, 256).bfloat16()).float().sum().backward()
    optimizer.step()
    checkpoints.save(out, model, optimizer)


def test_it_goes_on_on_2_ranks(stored: Path, tmp_path: Path) -> None:
    transformer_engine.convert(stored / "block", like(tmp_path / "new", "block", 256), tmp_path / "out")
    run_ranks(2, step_on_ranks, tmp_path / "out", tmp_path / "two")
    step_on_ranks(tmp_path / "out", tmp_path / "one")
    assert not compare(tmp_path / "one", tmp_path / "two").differences
    assert compare(tmp_path / "out", tmp_path / "two").differences


def test_the_page_runs(stored: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The block and the command of the chapter run."""
    chapter = "docs/checkpoints.md#going-on-from-a-transformerengine-checkpoint"
    monkeypatch.chdir(tmp_path)
    (tmp_path / "te").mkdir()
    (tmp_path / "te" / "step_3").symlink_to(stored / "mxfp8")
    (block,), (command,) = (snippets(chapter, language) for language in ("python", "sh"))
    exec(compile(block, chapter, "exec"), {})
    result = CliRunner().invoke(command_line.app(), shlex.split(command)[1:], catch_exceptions=False)
    assert result.exit_code == 0 and "8 tensors bit for bit, 0 not exactly" in result.output


# Plain tensors: how states are named


def plain(
    path: Path,
    *,
    groups: list[dict[str, Any]],
    named: bool,
    prefix: str = "",
    split: bool = False,
    order: Sequence[int] = range(4),
    drift: float = 1,
) -> Path:
    """A BF16 model of TransformerEngine's, as `state_dict` of the optimizer or as `get_optimizer_state_dict` has it.

    `split`: with `store_param_remainders`. `order`: the numbers of the parameters. `drift`: masters, of the weights.
    The last bias never had a gradient.
    """
    generator = torch.Generator().manual_seed(4)
    masters = {name: torch.randn((24, 24)[: 2 - name.endswith("bias")], generator=generator) for name in NAMES}
    halves = {name: numerics.split_bfloat16(master) for name, master in masters.items()}
    masters = {name: master * drift for name, master in masters.items()}
    model = {name: high for name, (high, _) in halves.items()}
    state = {
        name if named else number: {
            "exp_avg": master * 2,
            "exp_avg_sq": master.square(),
            "master_param": halves[name][1] if split else master,
        }
        for number, (name, master) in zip(order, masters.items(), strict=True)
        if name != "1.bias"
    }
    model["0._extra_state"] = torch.arange(9, dtype=torch.uint8)
    optimizer = {"state": state, "param_groups": groups}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(
            {f"{prefix}model": model, f"{prefix}optimizer": optimizer, "scheduler": {"seen": 5}}, checkpoint_id=path
        )
    return path


def group(*params: object, **changed: Any) -> dict[str, Any]:
    return {**SETTINGS, **changed, "params": list(params)}


NAMES = ["0.weight", "0.bias", "1.weight", "1.bias"]


@by_turns(2, split=[True, False], named=[True, False])
def test_states_by_name_and_by_number(tmp_path: Path, named: bool, split: bool) -> None:
    source = plain(tmp_path / "te", groups=[group(*(NAMES if named else range(4)))], named=named, split=split)
    new = like(tmp_path / "new", None, 24, layers=2)
    done = transformer_engine.convert(source, new, tmp_path / "out")
    assert not done.inexact and done.left.keys() == {"scheduler.seen", "0._extra_state"}
    assert "amax histories and scales, which is not read" in done.left["0._extra_state"]
    assert done.own["1.bias master_param"] == "seeded from the weight"
    assert done.own["1.bias exp_avg"] == "zero"
    model, optimizer = built(None, 24, layers=2)
    checkpoints.load(tmp_path / "out", model, optimizer)
    generator = torch.Generator().manual_seed(4)
    for name, param in model.named_parameters():
        master = torch.randn(param.shape, generator=generator)
        wanted = {"exp_avg": master * 2, "exp_avg_sq": master.square(), "master_param": master}
        if name == "1.bias":
            wanted = {**dict.fromkeys(wanted, torch.zeros(24)), "master_param": param.detach().float()}
        for role, value in wanted.items():
            assert same(optimizer.get_unscaled_state(param, role), value), (name, role)


def test_numbers_in_another_order_are_noticed(tmp_path: Path) -> None:
    """By the masters: two weights of one shape look alike."""
    source = plain(tmp_path / "te", groups=[group(*range(4))], named=False, order=[2, 1, 0, 3])
    with pytest.raises(CheckpointError, match=r"the numbered master of 0\.weight is far from its weight"):
        transformer_engine.convert(source, like(tmp_path / "new", None, 24, layers=2), tmp_path / "out")
    source = plain(tmp_path / "other", groups=[group(*range(4))], named=False, order=[1, 0, 2, 3])
    with pytest.raises(CheckpointError, match=r"1\.master_param has shape \[24, 24\], not \[24\]"):
        transformer_engine.convert(source, tmp_path / "new", tmp_path / "out")


@REQUANTIZES
def test_a_weight_that_is_not_the_upper_half_of_its_master(tmp_path: Path) -> None:
    source = plain(tmp_path / "te", groups=[group(*NAMES)], named=True, drift=1.01)
    new = like(tmp_path / "new", None, 24, layers=2, store_param_remainders=True)
    assert not transformer_engine.convert(source, new, tmp_path / "out").inexact
    model, optimizer = built(None, 24, layers=2, store_param_remainders=True)
    checkpoints.load(tmp_path / "out", model, optimizer, requantize=True)
    master = torch.randn(24, 24, generator=torch.Generator().manual_seed(4)) * 1.01
    assert same(optimizer.get_unscaled_state(model[0].weight, "master_param"), master)
    assert same(model[0].weight.detach(), numerics.split_bfloat16(master)[0])


def test_groups(tmp_path: Path) -> None:
    """Two groups go over where --like has them too; numbers of two groups do not say whose they are."""
    two = [group("0.weight", "1.weight"), group("0.bias", "1.bias", weight_decay=0.0)]
    source = plain(tmp_path / "te", groups=two, named=True)
    with pytest.raises(CheckpointError, match=r"0\.bias has weight_decay 0\.0, others of .*have"):
        transformer_engine.convert(source, like(tmp_path / "one", None, 24, layers=2), tmp_path / "out")
    model, _ = built(None, 24, layers=2)
    every = dict(model.named_parameters())
    ours = [{"params": [(n, p) for n, p in every.items() if n.endswith(end)]} for end in ("weight", "bias")]
    optimizer = FusedAdam(ours)
    checkpoints.save(tmp_path / "two", model, optimizer)
    transformer_engine.convert(source, tmp_path / "two", tmp_path / "out")
    checkpoints.load(tmp_path / "out", model, optimizer)
    assert [found["weight_decay"] for found in optimizer.param_groups] == [0.01, 0.0]
    numbered = plain(tmp_path / "numbered", groups=[group(0, 2), group(1, 3)], named=False)
    with pytest.raises(CheckpointError, match="has 2 groups without names"):
        transformer_engine.convert(numbered, tmp_path / "two", tmp_path / "never")


def test_quantized_from_high_precision(tmp_path: Path) -> None:
    source = plain(tmp_path / "te", groups=[group(*NAMES)], named=True)
    done = transformer_engine.convert(
        source, like(tmp_path / "new", "mxfp8", 24, layers=2), tmp_path / "out", lossy=True
    )
    assert set(done.inexact) == {"0.weight", "1.weight"}
    assert "1 of its 1 shards are not quantized" in done.inexact["0.weight"]


def test_prefixes(tmp_path: Path) -> None:
    source = plain(tmp_path / "te", groups=[group(*NAMES)], named=True, prefix="app.")
    new = like(tmp_path / "new", None, 24, layers=2)
    with pytest.raises(CheckpointError, match=re.escape("has no model.*, but app, scheduler; pass model=")):
        transformer_engine.convert(source, new, tmp_path / "out")
    transformer_engine.convert(source, new, tmp_path / "out", model="app.model", optimizer="app.optimizer")


# What is refused


def test_another_model(stored: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"2 tensors are missing in the first \(\['1.bias'\]\)"):
        new = like(tmp_path / "two", "current", 128, layers=2)
        transformer_engine.convert(stored / "current", new, tmp_path / "out")
    with pytest.raises(CheckpointError, match=re.escape("0.bias has shape [128], not [64]")):
        transformer_engine.convert(stored / "current", like(tmp_path / "small", "current", 64), tmp_path / "out")
    model, _ = built("current", 128)
    checkpoints.save(tmp_path / "unnamed", model, FusedAdam(model.parameters()))
    with pytest.raises(CheckpointError, match="its optimizer has no parameter names"):
        transformer_engine.convert(stored / "current", tmp_path / "unnamed", tmp_path / "out")
    assert not (tmp_path / "out").exists()


LONG = bytes(40000)
"""An entry is not looked at if it is shorter than its tensor."""


@pytest.mark.parametrize("key", ["model.0.weight", "optimizer.state.0.exp_avg", "optimizer.param_groups.0.lr"])
def test_nothing_is_run(stored: Path, tmp_path: Path, key: str) -> None:
    forged = Path(shutil.copytree(stored / "current", tmp_path / "te"))
    change_object(forged, key, [Call(os.mkdir, str(tmp_path / "mark")), LONG])
    with pytest.raises(CheckpointError, match=r"it names (posix|nt)\.mkdir, which needs code"):
        transformer_engine.convert(forged, like(tmp_path / "new", "current", 128), tmp_path / "out")
    assert not (tmp_path / "mark").exists() and not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("setting", "value"),
    [("lr", "text"), ("betas", 0.9), ("betas", (0.9, "x")), ("step", 1.5), ("eps", [1]), ("params", 3)],
)
def test_forged_settings(stored: Path, tmp_path: Path, setting: str, value: object) -> None:
    forged = Path(shutil.copytree(stored / "current", tmp_path / "te"))
    change_object(forged, f"optimizer.param_groups.0.{setting}", value)
    with pytest.raises(CheckpointError, match=r": invalid |is not a list"):
        transformer_engine.convert(forged, like(tmp_path / "new", "current", 128), tmp_path / "out")


def test_capturable(stored: Path, tmp_path: Path) -> None:
    """Learning rate and step are tensors there."""
    source = plain(
        tmp_path / "te",
        groups=[group(*NAMES, lr=torch.tensor(0.5), step=torch.tensor([9], dtype=torch.int32))],
        named=True,
    )
    transformer_engine.convert(source, like(tmp_path / "new", None, 24, layers=2), tmp_path / "out")
    model, optimizer = built(None, 24, layers=2)
    checkpoints.load(tmp_path / "out", model, optimizer)
    assert (optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["step"]) == (0.5, 9)


def test_earlier_releases_are_named(stored: Path, tmp_path: Path) -> None:
    """They pickled a method of the class, which is `getattr` of it."""
    old = Path(shutil.copytree(stored / "current", tmp_path / "te"))
    change_object(old, "model.0.weight", [Call(getattr, "Float8Tensor", "_make_in_reduce_ex"), LONG])
    with pytest.raises(CheckpointError, match=r"written before TransformerEngine 2\.17: save it again with 2\.17"):
        transformer_engine.convert(old, like(tmp_path / "new", "current", 128), tmp_path / "out")


# A gated LayerNormMLP, whose fc1 is one tensor there


def gated() -> tuple[nn.Sequential, FusedAdam]:
    options: dict[str, Any] = {"activation": "swiglu", "zero_centered_gamma": True, "params_dtype": torch.bfloat16}
    model = nn.Sequential(qs.LayerNormMLP(32, 48, **options))
    return model, FusedAdam(model.named_parameters())


@pytest.mark.parametrize("named", [True, False])
def test_a_gated_fc1(tmp_path: Path, named: bool) -> None:
    generator = torch.Generator().manual_seed(3)
    sizes = {"layer_norm_weight": (32,), "layer_norm_bias": (32,), "fc1_weight": (96, 32), "fc1_bias": (96,),
             "fc2_weight": (32, 48), "fc2_bias": (32,)}  # fmt: skip
    values = {f"0.{name}": torch.randn(size, generator=generator).bfloat16() for name, size in sizes.items()}
    state = {
        name if named else number: {"exp_avg": value.float() * 2, "exp_avg_sq": value.float() ** 2,
                                    "master_param": value.float() * (1 + 2.0**-12)}
        for number, (name, value) in enumerate(values.items())
    }  # fmt: skip
    optimizer = {"state": state, "param_groups": [group(*(values if named else range(6)))]}
    dcp.save({"model": values, "optimizer": optimizer}, checkpoint_id=tmp_path / "te", no_dist=True)
    checkpoints.save(tmp_path / "new", *gated())
    done = transformer_engine.convert(tmp_path / "te", tmp_path / "new", tmp_path / "out")
    assert not done.inexact
    described = manifest.read_manifest(tmp_path / "out")
    assert described is not None and described.zero_centered == ["0.layer_norm_weight"]
    model, adam = gated()
    checkpoints.load(tmp_path / "out", model, adam)
    for name, param in model.named_parameters():
        half = slice(0, 48) if "gate" in name else slice(48, 96) if "up" in name else slice(None)
        whole = values[name.replace("gate_", "").replace("up_", "")][half]
        assert same(param.detach(), whole), name
        assert same(adam.get_unscaled_state(param, "exp_avg"), whole.float() * 2), name
        assert same(adam.get_unscaled_state(param, "master_param"), whole.float() * (1 + 2.0**-12)), name


@pytest.mark.parametrize(("height", "exact"), [(32, True), (128, False)])
def test_rows_of_a_quantized_fc1(height: int, exact: bool) -> None:
    """Scales are cut with the rows; a block of gate and up rows is dequantized."""
    codes = torch.randint(0, 120, (192, 128), dtype=torch.uint8)
    scales = torch.rand(-(-192 // height), 1) + 0.5
    plane = CopyPiece(codes, scales, (height, 128))
    piece = WeightPiece("Float8BlockwiseQTensor", (0, 0), (192, 128), E4M3, FP32, {Orientation.ROWWISE: plane})
    values = numerics.decode(codes, E4M3) * scales.repeat_interleave(height, 0)[:192]
    for start in (0, 96):
        (part,) = rows_of([piece], start, start + 96)
        if exact:
            assert isinstance(part, WeightPiece) and part.origin == (0, 0) and part.shape == (96, 128)
            kept = part.planes[Orientation.ROWWISE]
            assert same(kept.codes, codes[start : start + 96])
            assert same(kept.scales, scales[start // height : start // height + 3])
        else:
            assert same(part[1], values[start : start + 96])
