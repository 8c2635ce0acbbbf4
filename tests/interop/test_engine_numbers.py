"""vLLM quantizes activations to the codes and scales of a recipe: bit for bit, or up to a stated difference."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from quantshard import numerics
from quantshard.formats import E8M0, Orientation
from quantshard.recipe import resolve
from quantshard.recipe_table import TensorRole
from tests.interop.test_vllm import PYTHON, ROOT

pytestmark = pytest.mark.skipif(not PYTHON.exists(), reason=f"{PYTHON} does not exist; see `make test-serving`")

SMALLEST = 2.0**-9
"""vLLM has no scale below 1 / (448 * 512), so smaller amaxes give other codes."""


def inputs() -> list[Tensor]:
    """Rows of very different sizes, zeros, values of the largest code and ties."""
    found = []
    for seed in range(8):
        generator = torch.Generator().manual_seed(seed)
        rows = torch.randn(256, 1, generator=generator).mul_(3).exp2_()
        x = torch.randn(256, 512, generator=generator) * rows
        x[3], x[5, :128], x[7], x[9, 0] = 0, 0, 448 * 2.0 ** (seed - 4), 30000.0 / 2**seed
        x[11] = torch.arange(512) / 8
        found.append(x.bfloat16())
    return found


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[tuple[Tensor, Tensor]]]:
    folder = tmp_path_factory.mktemp("engine")
    torch.save(inputs(), folder / "inputs.pt")
    program = ROOT / "tests/interop/vllm_quantizers.py"
    command = [str(PYTHON), str(program), str(folder / "inputs.pt"), str(folder / "outputs.pt")]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    found: dict[str, list[tuple[Tensor, Tensor]]] = torch.load(folder / "outputs.pt")
    return found


def quantized(x: Tensor, recipe: str, power_of_two: bool | None) -> tuple[Any, Tensor, Tensor]:
    """The stored scales [rows, blocks], and decoded codes."""
    spec = resolve(recipe).activations[TensorRole.INPUT][0]
    assert spec is not None
    scaling = spec.scaling if power_of_two is None else replace(spec.scaling, power_of_two=power_of_two)
    parts = numerics.quantize(x, spec.format, scaling)
    copy = spec.format.copies[Orientation.ROWWISE]
    codes = numerics.unpack(parts[copy.codes.name], copy.codes.encoding, x.shape[1])
    scales = numerics.decode(parts[copy.scale.name], copy.scale.encoding)
    return copy, scales, numerics.decode(codes, copy.codes.encoding)


@pytest.mark.parametrize(("recipe", "name"), [("block", "1x128, E8M0"), ("mxfp8", "MXFP8")])
def test_equal_bits(engine: dict[str, list[tuple[Tensor, Tensor]]], recipe: str, name: str) -> None:
    for x, (codes, scales) in zip(inputs(), engine[name], strict=True):
        copy, our_scales, ours = quantized(x, recipe, None)
        scales = numerics.decode(scales, E8M0) if scales.dtype is torch.uint8 else scales
        width = copy.block[1]
        amaxes = x.float().abs().view(len(x), -1, width).amax(-1)
        compared = amaxes >= SMALLEST
        assert compared.float().mean() > 0.8
        assert our_scales[compared].equal(scales[compared])
        values = compared.repeat_interleave(width, 1)
        assert ours[values].equal(codes.float()[values])


@pytest.mark.parametrize(("recipe", "name"), [("current", "per tensor"), ("rowwise", "per token"), ("block", "1x128")])
def test_scales_within_one_ulp(engine: dict[str, list[tuple[Tensor, Tensor]]], recipe: str, name: str) -> None:
    """Float32 scales: vLLM divides by amax / 448, and quantshard multiplies by 448 / amax."""
    different = count = 0
    for x, (codes, scales) in zip(inputs(), engine[name], strict=True):
        _, our_scales, ours = quantized(x, recipe, False)
        theirs, scales = codes.float(), scales.view(our_scales.shape)
        amaxes = (our_scales * 448).expand(len(x), -1) if recipe == "current" else our_scales * 448
        compared = ours.abs().view(len(x), amaxes.shape[1], -1).amax(-1) > 0
        compared &= amaxes >= SMALLEST
        differences = (our_scales - scales).abs() / scales
        assert differences.expand(amaxes.shape)[compared].max() <= 2.0**-23
        values = compared.repeat_interleave(x.shape[1] // compared.shape[1], 1)
        different += int((ours != theirs)[values].sum())
        count += int(values.sum())
    assert different < 1e-3 * count


def test_nvfp4_up_to_the_rounding_of_block_scales(engine: dict[str, list[tuple[Tensor, Tensor]]]) -> None:
    """With the tensor's own amax as vLLM's input scale. vLLM multiplies by 1/6 before, and quantshard after."""
    different = count = 0
    for x, (codes, scales) in zip(inputs(), engine["NVFP4"], strict=True):
        _, our_scales, ours = quantized(x, "nvfp4", None)
        assert ((our_scales - scales).abs() <= scales / 8 + 2.0**-9).all()
        equal = our_scales == scales
        different, count = different + int((~equal).sum()), count + equal.numel()
        compared = (equal & (scales > 0)).repeat_interleave(16, 1)
        # ties, since multipliers differ in their last bit
        assert (ours != codes)[compared].float().mean() < 5e-3
    assert different < 0.02 * count
