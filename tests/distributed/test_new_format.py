"""A format costs a row: one that the package does not have trains, is sharded, saved and loaded; 1, 2 and 3 ranks."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from torch import nn

import quantshard as qs
from quantshard.errors import FallbackError
from quantshard.formats import E5M2, E8M0, FORMATS
from quantshard.gemm import hardware, predictions
from quantshard.gemm.operands import quantize_operand
from quantshard.numerics import decode
from quantshard.recipe import QuantSpec
from quantshard.tools.observe import explain
from tests.distributed import models
from tests.distributed.models import Case, bits, build, optimizer_of, set_gradients, train
from tests.distributed.pool import run_ranks
from tests.new_format import SQUARES, VECTORS, added

BLACKWELL = (10, 0)
ROOT = Path(__file__).parents[2]
TABLES = "formats numerics sharding tensor components backend compute limits".split()
COUNTED_BY_HAND = (
    "test_which_are_transposable",
    "test_table_is_complete",
    "test_bytes_per_element_are_what_is_stored",
)


def saved(world: int, folder: Path) -> tuple[dict[str, str], list[float]]:
    """Bits after a step of gradients that are the same on every mesh, saved, and losses from there."""
    case = Case("new", (world,))
    with added() as recipe, pytest.MonkeyPatch.context() as patch:
        patch.setitem(models.OTHERS, "new", recipe)
        model = build(case)
        optimizer = optimizer_of(model, case)
        set_gradients(model, 0)
        optimizer.step()
        optimizer.zero_grad()
        stepped = bits(model, optimizer)
        qs.checkpoints.save(folder, model, optimizer)
        return stepped, train(model, optimizer, case, 0, 1) + train(model, optimizer, case, 0, 9)


def loaded(world: int, folder: Path) -> dict[str, str]:
    case = Case("new", (world,), seed=8)
    with added() as recipe, pytest.MonkeyPatch.context() as patch:
        patch.setitem(models.OTHERS, "new", recipe)
        model = build(case)
        optimizer = optimizer_of(model, case)
        qs.checkpoints.load(folder, model, optimizer)
        return bits(model, optimizer)


@pytest.mark.distributed
def test_it_trains_is_sharded_saved_and_loaded(tmp_path: Path) -> None:
    found = {n: run_ranks(n, saved, n, tmp_path / str(n)) for n in (1, 3)}
    stepped = found[1][0][0]
    for ranks in found.values():
        for each, losses in ranks:
            assert each == stepped
            assert losses[-1] < 0.9 * losses[0]
    for saved_by, loaded_by in ((1, 3), (3, 2), (3, 1)):
        assert run_ranks(loaded_by, loaded, loaded_by, tmp_path / str(saved_by)) == [stepped] * loaded_by


def test_codes_are_what_the_row_says() -> None:
    """One block, by hand: a power of two under which the largest is not beyond E5M2's largest, and nearest codes."""
    x = torch.tensor([[-70000.0, 1.0, 2.0**-20, 0.0, *[3.3] * 28]])
    with added():
        components = quantize_operand(x, QuantSpec(FORMATS[VECTORS])).components
    assert components["scale_inv"].tolist() == [[128]]  # 2**1, in E8M0 biased by 127
    assert torch.equal(decode(components["scale_inv"], E8M0), torch.tensor([[2.0]]))
    nearest = (x / 2).to(torch.float8_e5m2).view(torch.uint8)
    assert torch.equal(components["codes"], nearest) and decode(nearest, E5M2)[0, 0] == -32768


def test_its_native_product_is_another_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """On hardware that multiplies MXFP8 of E4M3 it is emulated, and says so, until the table of products has it."""
    monkeypatch.setattr(hardware, "capability_of", lambda device: BLACKWELL)
    gpu = torch.device("cuda", 0)
    with added() as recipe:
        assert predictions.gemm_path(qs.recipe.resolve("mxfp8").weight, gpu)[0] == "native"
        path, why = predictions.gemm_path(recipe.weight, gpu)
        assert path == "emulated" and why == f"PyTorch has no E5M2 matrix product with the scales of {SQUARES}"
        pair = hardware.stored_kind(FORMATS[VECTORS]), hardware.stored_kind(FORMATS[SQUARES])
        assert hardware.product_of_kinds(*pair) is None
        kind, mxfp8 = pair[0], hardware.NATIVE[(hardware.stored_kind(FORMATS["mxfp8_1x32"]),) * 2]
        monkeypatch.setitem(hardware.NATIVE, (kind, kind), mxfp8)
        assert hardware.product_of_kinds(*pair) is mxfp8 and predictions.gemm_path(recipe.weight, gpu)[0] == "native"


def test_strict_and_explain_name_it() -> None:
    with added() as recipe:
        with qs.quantized_model_init(recipe=recipe):
            model = nn.Sequential(qs.Linear(40, 24, bias=False))
        assert SQUARES in str(explain(model))
        with pytest.raises(FallbackError, match="dequantize both"), qs.autocast(recipe=recipe, strict=True):
            model(torch.ones(3, 40, dtype=torch.bfloat16))


@pytest.mark.exhaustive
def test_the_tables_of_the_tests_take_it(tmp_path: Path) -> None:
    """Every test that goes through all formats, but for those whose lists are written by hand."""
    files = [str(path) for path in ROOT.glob("tests/**/test_*.py") if path.stem.removeprefix("test_") in TABLES]
    assert len(files) >= len(TABLES)
    options = ["-p", "tests.new_format", f"--junitxml={tmp_path / 'found.xml'}"]
    options += ["-k", " and ".join(f"not {name}" for name in COUNTED_BY_HAND)]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *files], cwd=ROOT, text=True, capture_output=True, timeout=1800
    )
    assert done.returncode == 0, done.stdout[-5000:]
    cases = [case.get("name", "") for case in ElementTree.parse(tmp_path / "found.xml").iter("testcase")]
    assert sum(VECTORS in case for case in cases) > 50
