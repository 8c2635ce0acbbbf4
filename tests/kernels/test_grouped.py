"""Kernels of many experts: codes, scales and amaxes are the oracle's for each expert's rows, products are in bounds."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from quantshard import amax, operands
from quantshard.formats import E4M3, E5M2, FORMATS, Copy, Encoding, Scaling
from quantshard.recipe import Cell
from quantshard.storage import QuantizedStorage

pytest.importorskip("triton")

from quantshard.kernels import grouped, grouped_matmul, history, scales
from quantshard.kernels.grouped import Segments
from quantshard.kernels.grouped_matmul import Codes, Weights

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ON_GPU = DEVICE.type == "cuda"
ROWS = {E4M3: FORMATS["fp8_e4m3"], E5M2: FORMATS["fp8_e5m2"]}
COUNTS = {
    "few rows": [7, 0, 1, 20],
    "many rows": [1, 130, 0],  # two tiles of an expert
    "a tile": [64],
    "no rows": [0, 0],
}
IN, OUT = 33, 140  # divide by nothing; more than a tile
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, in the interpreter


def values(rows: int, cols: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, cols, generator=generator) * torch.exp(torch.randn(rows, 1, generator=generator))


def quantized(x: Tensor, counts: Sequence[int], encoding: Encoding) -> Codes:
    segments = Segments.of(counts, DEVICE)
    stored, multipliers = scales.scales(
        grouped.amaxes(x.to(DEVICE), segments), ROWS[encoding].copies[Copy.ROWWISE], Scaling(), x.dtype
    )
    return Codes(grouped.quantize(x.to(DEVICE), segments, encoding, multipliers), stored, encoding)


def one_by_one(x: Tensor, counts: Sequence[int], encoding: Encoding) -> list[QuantizedStorage]:
    return [operands.quantize(part, Cell(ROWS[encoding])) for part in x.split(list(counts))]


@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize("encoding", ROWS, ids=lambda encoding: encoding.name)
def test_codes_and_scales_are_those_of_each_expert_alone(counts: str, encoding: Encoding) -> None:
    for dtype, rows in itertools.product((torch.bfloat16, torch.float32, torch.float16), [COUNTS[counts]]):
        x = values(sum(rows), IN).to(dtype)
        found, wanted = quantized(x, rows, encoding), one_by_one(x, rows, encoding)
        assert torch.equal(found.codes.cpu(), torch.cat([part.components["codes"] for part in wanted]))
        assert torch.equal(found.scales.cpu(), torch.cat([part.components["scale_inv"].view(1) for part in wanted]))


def test_rows_may_be_a_view_and_amaxes_are_taken_in_the_same_pass() -> None:
    rows = COUNTS["few rows"]
    x, segments = values(sum(rows), 2 * IN).bfloat16().to(DEVICE)[:, :IN], Segments.of(rows, DEVICE)
    seen = torch.tensor([0.0, 3.0, 100.0, 0.0], device=DEVICE)
    codes = grouped.quantize(x, segments, E4M3, torch.ones(4, device=DEVICE), seen)
    assert torch.equal(codes, grouped.quantize(x.contiguous(), segments, E4M3, torch.ones(4, device=DEVICE)))
    alone = [float(part.abs().max()) if len(part) else 0.0 for part in x.split(rows)]
    assert seen.tolist() == [max(pair) for pair in zip(alone, [0.0, 3.0, 100.0, 0.0], strict=True)]
    assert grouped.amaxes(x, segments).tolist() == alone


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_the_scale_of_an_expert_that_is_not_finite_is_poisoned(bad: float) -> None:
    rows = COUNTS["few rows"]
    x, segments = values(sum(rows), IN).to(DEVICE), Segments.of(rows, DEVICE)
    x[7, 3] = bad  # the third expert's
    poisoned = torch.ones(4, device=DEVICE)
    grouped.quantize(x, segments, E5M2, torch.ones(4, device=DEVICE), poisoned=poisoned)
    assert poisoned.isnan().tolist() == [False, False, True, False]
    found = grouped.amaxes(x, segments)
    assert found.isfinite().tolist() == [True, True, False, True] and found[2].isnan() == (bad != bad)


@pytest.mark.parametrize("counts", COUNTS)
def test_sums_over_the_rows_of_each_expert(counts: str) -> None:
    rows = COUNTS[counts]
    x = values(sum(rows), OUT).bfloat16()
    found = grouped.sums(x.to(DEVICE), Segments.of(rows, DEVICE)).cpu()
    wanted = torch.stack([part.double().sum(0) for part in x.split(rows)])
    room = torch.stack([part.double().abs().sum(0) for part in x.split(rows)]) * max(rows) * 2.0**-24
    assert found.dtype is torch.float32 and ((found - wanted).abs() <= room).all()


def in_double(parts: Sequence[QuantizedStorage]) -> list[Tensor]:
    return [part.dequantize().double() for part in parts]


def close(
    found: Tensor, parts: Sequence[tuple[Tensor, Tensor]], join: Callable[[list[Tensor]], Tensor] = torch.cat
) -> None:
    """Of products that are exact, within what float32 sums can be off (of tensor cores: 2**-13 of each), and one
    rounding."""
    exact = join([a @ b for a, b in parts])
    room = (2.0**-13 if ON_GPU else 2.0**-20) * join([a.abs() @ b.abs() for a, b in parts])
    assert found.shape == exact.shape
    assert ((found.cpu().double() - exact).abs() <= room + torch.finfo(found.dtype).eps * exact.abs() + 1e-30).all()


def weights(experts: int, biases: Sequence[Tensor] = (), shift: int = 0) -> tuple[Weights, list[Tensor]]:
    """`shift`: bytes from a multiple of 16 to the codes of a weight."""
    stored = [operands.quantize(values(OUT, IN, 9 + e), Cell(ROWS[E4M3])) for e in range(experts)]
    codes = []
    for part in stored:
        held = torch.empty(OUT * IN + shift, dtype=torch.uint8, device=DEVICE)[shift:].view(OUT, IN)
        codes.append(held.copy_(part.components["codes"]))
    scale = [part.components["scale_inv"].to(DEVICE) for part in stored]
    return Weights(codes, scale, [bias.to(DEVICE) for bias in biases], E4M3), in_double(stored)


@pytest.mark.parametrize("counts", COUNTS)
def test_products(counts: str) -> None:
    """fprop, dgrad and wgrad, of an E4M3 input and an E5M2 gradient."""
    rows = COUNTS[counts]
    segments, dtype = Segments.of(rows, DEVICE), torch.bfloat16 if len(rows) > 3 else torch.float32
    x, dy = values(sum(rows), IN, 1), values(sum(rows), OUT, 2)
    a, b = quantized(x, rows, E4M3), quantized(dy, rows, E5M2)
    x_of, dy_of = in_double(one_by_one(x, rows, E4M3)), in_double(one_by_one(dy, rows, E5M2))
    held, w_of = weights(len(rows))
    y = grouped_matmul.rows_times_weights(a, held, segments, dtype, turned=True)
    close(y, [(part, w.t()) for part, w in zip(x_of, w_of, strict=True)])
    dx = grouped_matmul.rows_times_weights(b, held, segments, dtype, turned=False)
    close(dx, list(zip(dy_of, w_of, strict=True)))
    dw = grouped_matmul.weight_gradients(b, a, segments, dtype)
    close(dw, [(part.t(), other) for part, other in zip(dy_of, x_of, strict=True)], torch.stack)
    assert all(count or not dw[expert].count_nonzero() for expert, count in enumerate(rows))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_biases_are_added_and_weights_may_lie_anywhere(dtype: torch.dtype) -> None:
    rows = COUNTS["few rows"]
    a, segments = quantized(values(sum(rows), IN, 1), rows, E4M3), Segments.of(rows, DEVICE)
    biases = list(values(4, OUT, 5).to(dtype))
    plain = grouped_matmul.rows_times_weights(a, weights(4)[0], segments, torch.float32, turned=True)
    held, _ = weights(4, biases, shift=1)
    assert held.codes[0].data_ptr() % 16
    found = grouped_matmul.rows_times_weights(a, held, segments, torch.float32, turned=True)
    added = torch.cat([bias.float().expand(count, -1) for bias, count in zip(biases, rows, strict=True)])
    wanted = plain.cpu() + added
    assert torch.allclose(found.cpu(), wanted, rtol=2.0**-22, atol=2.0**-22 * float(plain.abs().max()))  # fused or not


@pytest.mark.parametrize("most_recent", [True, False])
def test_past_amaxes_of_many_histories(most_recent: bool) -> None:
    histories = [torch.tensor(seen, device=DEVICE) for seen in ([1.0, 5.0, 2.0], [0.0], [0.0, 0.0, 3.0, 2.5, 0.5])]
    wanted = torch.stack([amax.history_amax(seen, most_recent) for seen in histories])
    assert torch.equal(history.pasts(histories, most_recent), wanted)
