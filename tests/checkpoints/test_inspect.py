"""`verify` and `inspect_checkpoint`: what they find in checkpoints of every recipe, against counting by hand."""

from __future__ import annotations

import json
import pickle
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from typer.testing import CliRunner

import quantshard as qs
from quantshard.checkpoints import save
from quantshard.checkpoints.disk import manifest
from quantshard.checkpoints.inspection import inspect_checkpoint, verify
from quantshard.checkpoints.safe_read import SafeReader
from quantshard.errors import CheckpointError
from quantshard.formats import FORMATS, Role
from quantshard.optimizers import FusedAdam
from quantshard.tensor import components
from quantshard.tools.cli import app
from tests.checkpoints.small import SHAPES, built, written
from tests.checkpoints.test_untrusted import change_object
from tests.distributed.models import RECIPES, Case, build, optimizer_of
from tests.distributed.pool import run_ranks


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("inspect")
    return {name: written(folder / name, name, exp_avg_dtype=torch.uint8) for name in RECIPES}


def by_hand(weight: torch.Tensor) -> tuple[int, int, int]:
    """Codes, zero codes and largest codes of a weight's copies, by decoding each code alone."""
    storage = components.storage_of(weight)
    codes = zeros = largest = 0
    for copy in storage.spec.format.copies.values():
        encoding = copy.codes.encoding
        for byte in storage.components[copy.codes.name].flatten().tolist():
            for code in (byte,) if encoding.bits == 8 else (byte & 15, byte >> 4):
                magnitude = code & ((1 << encoding.bits - 1) - 1)
                codes, zeros = codes + 1, zeros + (magnitude == 0)
                largest += magnitude >= {"E4M3": 0x7E, "E5M2": 0x7B, "E2M1": 7}[encoding.name]
    return codes, zeros, largest


@pytest.mark.parametrize("recipe", RECIPES)
def test_figures_of_every_recipe(checkpoints: dict[str, Path], recipe: str) -> None:
    """The second layer is 18 wide and 5 high, so blocks and bytes are cut."""
    model, _ = built(recipe, exp_avg_dtype=torch.uint8)
    found = {row.name: row for row in inspect_checkpoint(checkpoints[recipe]).rows}
    for index, (cols, rows) in enumerate(SHAPES):
        weight, row = model[index].weight, found[f"model.{index}.weight"]
        storage = components.storage_of(weight)
        assert (row.format, row.shape, row.kind, row.quantized) == (storage.spec.tag, (rows, cols), "weight", True)
        assert (row.codes, row.zeros, row.saturated) == by_hand(weight)
        assert row.chunks == 1 and not row.wrong
        own = [*storage.components.values(), *storage.state.values()]
        assert row.bytes == sum(part.nbytes for part in own) + components.FORMAT_TAG_BYTES
        blocks = [c for c in storage.spec.format.components if c.role is Role.SCALE]
        assert row.scales is not None and 0 < row.scales[0] <= row.scales[1] and blocks
        moment = found[f"optimizer.state.{2 * index}.exp_avg"]
        assert (moment.format, moment.quantized, moment.shape) == ("fp8_1x128", True, (rows, cols))
        assert moment.codes == rows * cols
    one = found["model.0.weight"]
    assert one.scales is not None
    largest = model[0].weight.dequantize().float().abs().max()
    encoding = FORMATS[one.format.removesuffix("+hist")].by_name["codes"].encoding
    bound = one.scales[1] * encoding.max * (1 + 2**-8)  # the weight's nominal dtype is BF16
    assert largest <= bound and (not one.saturated or largest >= one.scales[0] * encoding.max * (1 - 2**-8))


def test_padding_is_not_counted(tmp_path: Path) -> None:
    """Rows of 21 codes of four bits: the last byte of each has half a byte that is none."""
    shapes = ((21, 6), (6, 3))
    row = next(
        r
        for r in inspect_checkpoint(written(tmp_path / "c", "nvfp4", shapes=shapes)).rows
        if r.name == "model.0.weight"
    )
    values = components.storage_of(built("nvfp4", shapes=shapes)[0][0].weight).dequantize()
    assert (row.shape, row.codes, row.zeros) == ((6, 21), 126, int((values == 0).sum()))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float16])
def test_states_in_blocks_are_those_of_matrices(tmp_path: Path, dtype: torch.dtype) -> None:
    """Those of all other parameters stay float32, without a scale."""
    shapes = [(), (1,), (5,), (200,), (0,), (3, 200), (300, 1), (2, 3, 200), (4, 2, 3, 3)]
    model = nn.ParameterList([nn.Parameter(torch.ones(shape)) for shape in shapes])
    optimizer = FusedAdam(model.parameters(), exp_avg_dtype=dtype, exp_avg_sq_dtype=dtype)
    for param in model:
        param.grad = torch.randn_like(param)
    optimizer.step()
    save(tmp_path / "c", model, optimizer)
    assert verify(tmp_path / "c").problems == ()
    rows = {row.name: row for row in inspect_checkpoint(tmp_path / "c").rows}
    for number, shape in enumerate(shapes):
        row = rows[f"optimizer.state.{number}.exp_avg"]
        assert row.shape == shape
        assert row.format.endswith("_1x128") is (len(shape) == 2) and (row.scales is not None) is (len(shape) == 2)


def test_a_state_of_a_vector_that_has_scales_is_wrong(tmp_path: Path) -> None:
    """Nothing of ours writes such, and none of them could be loaded."""
    path = tmp_path / "c"
    entries = {"exp_avg": torch.zeros(200, dtype=torch.uint8), "exp_avg_scale_inv": torch.ones(2)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"optimizer": {"state": {"0": entries}}}, checkpoint_id=path)
    assert verify(path).problems == (
        "optimizer.state.0.exp_avg is torch.uint8 [200], and fp8_1x128 has blocks of matrices, which [200] is not",
        "optimizer.state.0.exp_avg_scale_inv is torch.float32 [2], and fp8_1x128 has blocks of matrices, which [200] "
        "is not",
    )
    inspect_checkpoint(path)


def test_totals(checkpoints: dict[str, Path]) -> None:
    totals = {
        (total.kind, total.format): total for total in inspect_checkpoint(checkpoints["mxfp8"], data=False).totals
    }
    weights = totals["weight", "mxfp8_32x32"]
    assert (weights.tensors, weights.numel) == (2, 24 * 18 + 18 * 5)
    assert weights.bytes_per_element == weights.bytes / weights.numel
    assert totals["exp_avg", "fp8_1x128"].tensors == 2
    assert totals["exp_avg", "float32"].tensors == 2  # of the biases
    assert totals["master_param", "float32"].numel == 24 * 18 + 18 * 5 + 18 + 5
    assert totals["extra", "int64"].numel == 5


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # a single process, which is meant
def test_random_state_and_what_ranks_saved_are_no_weights(tmp_path: Path) -> None:
    """Nor what modules remember; a parameter of such a name, of no weight, is one."""
    model = {
        "w": torch.zeros(3),
        "w_key": torch.zeros(1),
        "own_key": torch.zeros(2),
        "gemm_amax_history": torch.zeros(4),
    }
    dcp.save({"model": model, "ranks": {"0": {"random": torch.zeros(6)}}}, checkpoint_id=tmp_path / "c")
    totals = {total.kind: total.numel for total in inspect_checkpoint(tmp_path / "c").totals}
    assert totals == {"weight": 5, "random state": 1, "amax history": 4, "rank state": 6}


def sharded(path: str) -> None:
    case = Case("block", (3,), shapes=((40, 30),))
    model = build(case)
    qs.checkpoints.save(path, model, optimizer_of(model, case))


@pytest.mark.distributed
def test_a_sharded_checkpoint(tmp_path: Path) -> None:
    """3 ranks: pieces are counted, and the figures are those of the whole."""
    run_ranks(3, sharded, str(tmp_path / "c"))
    row = next(row for row in inspect_checkpoint(tmp_path / "c").rows if row.name == "model.0.weight")
    assert (row.chunks, row.shape, row.codes) == (3, (30, 40), 1200)
    assert verify(tmp_path / "c").ok


# Verify


@pytest.mark.parametrize("recipe", RECIPES)
def test_whole_checkpoints(checkpoints: dict[str, Path], recipe: str) -> None:
    found = verify(checkpoints[recipe])
    assert found.ok, found.problems
    assert not found.checksums
    assert found.quantized == 4  # two weights and their first moments
    result = command("verify", checkpoints[recipe])
    assert result.exit_code == 0
    assert "there is no manifest" in result.stdout
    assert "whole: " in result.stdout


def with_manifest(path: Path) -> None:
    names = [file.name for file in path.iterdir()]
    digests = {name: manifest.FileEntry(*manifest.digest_of(path / name)) for name in names}
    told = manifest.Manifest(digests, 1, torch.__version__, "2026-11-22T00:00:00Z", 7, {"dp_shard": 1}, "nvfp4")
    (path / manifest.MANIFEST).write_text(told.to_json())


def test_with_a_manifest(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    path = Path(shutil.copytree(checkpoints["nvfp4"], tmp_path / "c"))
    with_manifest(path)
    found = verify(path)
    assert found.ok and found.checksums
    run = inspect_checkpoint(path, data=False).run
    assert run is not None and (run["recipe"], run["step"], run["mesh"]) == ("nvfp4", 7, {"dp_shard": 1})
    assert "recipe nvfp4" in command("inspect", path).stdout
    (path / "more").write_text("x")
    assert [line.endswith(f"more is not named in {manifest.MANIFEST}") for line in verify(path).problems] == [True]
    (path / manifest.MANIFEST).write_text(json.dumps({"quantshard": 9}))
    assert "has version 9" in verify(path).problems[0]


def forged(path: Path, **tensors: torch.Tensor) -> None:
    for key, value in tensors.items():
        name = "model.0.weight" + key.removeprefix("codes")
        change_object(path, name, value)
        found = read_changed(path, name, value)
        (path / ".metadata").write_bytes(pickle.dumps(found))


def read_changed(path: Path, key: str, value: torch.Tensor) -> Any:
    """Metadata in which an entry has the size and dtype of another value."""
    with open(path / ".metadata", "rb") as file:
        found = pickle.load(file)
    entry = found.state_dict_metadata[key]
    entry.size = entry.chunks[0].sizes = value.shape
    entry.properties.dtype = value.dtype
    return found


def without(key: str) -> Callable[[Path], None]:
    def remove(path: Path) -> None:
        found = SafeReader(path).metadata
        del found.state_dict_metadata[key]
        for index in [index for index in found.storage_data if index.fqn == key]:
            del found.storage_data[index]
        (path / ".metadata").write_bytes(pickle.dumps(found))

    return remove


TAG = torch.tensor([1, *b"nvfp4_16x16\0\0\0", 0], dtype=torch.uint8)
NEWER, UNKNOWN = TAG.clone(), TAG.clone()
NEWER[0], UNKNOWN[1] = 2, ord("x")
WRONG: dict[str, tuple[Callable[[Path], None], str]] = {
    "no scale": (without("model.0.weight_scale_inv"), "model.0.weight_scale_inv is missing"),
    "no amax": (without("model.0.weight_amax"), "model.0.weight_amax is missing"),
    "no key": (without("model.0.weight_key"), "model.0.weight_key is missing"),
    "no scale of a state": (without("optimizer.state.0.exp_avg_scale_inv"), ""),
    "NaN": (lambda p: forged(p, _amax=torch.tensor([[float("nan")]])), "1 of 1 amax entries are not finite"),
    "NaN in E4M3": (
        lambda p: forged(p, _scale_inv=torch.tensor([[1, 255], [127, 2]], dtype=torch.uint8)),
        "2 of 4 scale entries are not finite",
    ),
    "another shape": (lambda p: forged(p, _scale_inv=torch.ones(1, 2, dtype=torch.uint8)), r"\[18, 24\]\)"),
    "another dtype": (lambda p: forged(p, _scale_inv=torch.ones(2, 2)), "is torch.float32"),
    "a newer version": (lambda p: forged(p, _format=NEWER), "format version 2, not 1"),
    "an unknown format": (lambda p: forged(p, _format=UNKNOWN), "does not know its format 'xvfp4_16x16'"),
}


@pytest.mark.parametrize("damage", WRONG)
def test_what_is_wrong(checkpoints: dict[str, Path], tmp_path: Path, damage: str) -> None:
    path = Path(shutil.copytree(checkpoints["nvfp4"], tmp_path / "c"))
    change, said = WRONG[damage]
    change(path)
    found = verify(path)
    if said:
        with pytest.raises(AssertionError, match=said):
            assert not found.problems, "\n".join(found.problems)
        assert len(found.problems) == 1, found.problems
        result = command("verify", path)
        assert result.exit_code == 1
        assert result.stdout.startswith("wrong: model.0.weight")
    else:
        assert found.quantized == 3  # codes without a scale are a plain tensor
    inspect_checkpoint(path)


def test_what_is_no_checkpoint(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(CheckpointError, match="not a complete checkpoint"):
            inspect_checkpoint(path)
    assert not verify(tmp_path).ok


# Commands


def command(name: str, *arguments: Any) -> Any:
    return CliRunner().invoke(app(), [name, *map(str, arguments)])


def test_inspect_prints_tables_and_json(checkpoints: dict[str, Path]) -> None:
    result = command("inspect", checkpoints["nvfp4"])
    assert result.exit_code == 0, result.output
    for text in ("model.0.weight", "nvfp4_16x16", "18 x 24", "master_param", "bytes an element"):
        assert text in result.stdout
    told = json.loads(command("inspect", checkpoints["nvfp4"], "--json").stdout)
    row = next(row for row in told["rows"] if row["name"] == "model.0.weight")
    assert row["codes"] == 18 * 24 and row["scales"][0] > 0


def test_a_model_without_quantized_weights(tmp_path: Path) -> None:
    path = written(tmp_path / "c", None)
    assert verify(path).quantized == 0 and verify(path).ok
    assert {row.format for row in inspect_checkpoint(path).rows if row.kind == "weight"} == {"bfloat16"}
    kinds = {row.name: row.kind for row in inspect_checkpoint(path).rows}
    assert kinds["model.0.weight_key"] == kinds["model.0.weight_draws"] == "random state"
    assert isinstance(built(None)[0], nn.Sequential)
