"""Kernels of many experts: codes, scales and amaxes are the oracle's for each expert's rows, products are in bounds."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from quantshard.collectives import delayed_scaling
from quantshard.formats import E4M3, E5M2, FORMATS, Encoding, Orientation, Scaling
from quantshard.gemm import operands
from quantshard.recipe import QuantSpec
from quantshard.tensor.storage import QuantizedStorage

pytest.importorskip("triton")

from quantshard.kernels.experts import grouped, grouped_matmul
from quantshard.kernels.experts.grouped_matmul import EncodedRows, ExpertBias, ExpertWeights
from quantshard.kernels.experts.segments import MANY_ROWS, ExpertSegments
from quantshard.kernels.optimizer import multi_tensor
from quantshard.kernels.quantize.amax import scales
from tests.kernels.asked import request_of

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


def quantized(x: Tensor, counts: Sequence[int], encoding: Encoding) -> EncodedRows:
    segments = ExpertSegments.of(counts, DEVICE)
    stored, multipliers = scales(
        grouped.expert_amaxes(x.to(DEVICE), segments), ROWS[encoding].copies[Orientation.ROWWISE], Scaling(), x.dtype
    )
    return EncodedRows(grouped.quantize_expert_rows(x.to(DEVICE), segments, encoding, multipliers), stored, encoding)


def one_by_one(x: Tensor, counts: Sequence[int], encoding: Encoding) -> list[QuantizedStorage]:
    return [operands.quantize_operand(part, QuantSpec(ROWS[encoding])) for part in x.split(list(counts))]


@pytest.mark.parametrize("unit", [1, MANY_ROWS])
@pytest.mark.parametrize("counts", [*COUNTS.values(), [300, 0, 0, 5, 128, 129, 0, 1], [3] * 40])
def test_tables_of_counts_on_the_device_are_those_of_the_host(counts: list[int], unit: int) -> None:
    """Spans, and tiles, behind which are some that have no rows and are of an expert that there is."""
    wanted = ExpertSegments.of(counts, DEVICE, unit)
    for dtype in (torch.int64, torch.int32):
        found = ExpertSegments.of_tensor(torch.tensor(counts, dtype=dtype, device=DEVICE), sum(counts), unit)
        assert (found.rows, found.values) == (wanted.rows, wanted.values) and found.total >= wanted.total
        assert torch.equal(found.spans, wanted.spans)
        tiles, more = found.tiles.split([len(wanted.tiles), len(found.tiles) - len(wanted.tiles)])
        assert tiles.tolist() == wanted.tiles.tolist()
        assert (more[:, 1] >= more[:, 2]).all() and (more[:, 0] < len(counts)).all() and (more >= 0).all()


@pytest.mark.skipif(ON_GPU, reason="what a device asserts ends the process")
@pytest.mark.parametrize("counts", [[3, 4], [9, -1], [0, 9]])
def test_counts_that_do_not_fit_are_told(counts: list[int]) -> None:
    with pytest.raises(RuntimeError, match="m_splits has an entry below 0, or does not sum to the 8 rows of the input"):
        ExpertSegments.of_tensor(torch.tensor(counts), 8)


@pytest.mark.skipif(ON_GPU, reason="what a device asserts ends the process")
@pytest.mark.parametrize("counts", [[-30000, 30100], [1 << 50, 100 - (1 << 50)], [300, 200]])
def test_wrong_counts_write_nothing_beside_the_tables(counts: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Until the assertion is seen."""
    memory, at = torch.full((40000,), -7, dtype=torch.int64), 20000
    taken: list[Tensor] = []
    real = torch.empty

    def within(*args: Any, **kwargs: Any) -> Tensor:
        if kwargs.get("dtype") is not torch.int64:
            return real(*args, **kwargs)
        rows, columns = args[0]
        taken.append(memory[at : at + rows * columns].view(rows, columns))
        return taken[-1]

    monkeypatch.setattr(torch, "empty", within)
    with pytest.raises(RuntimeError, match="does not sum to the 100 rows"):
        ExpertSegments.of_tensor(torch.tensor(counts), 100)
    monkeypatch.undo()
    end = at + taken[0].numel()
    assert (memory[:at] == -7).all() and (memory[end:] == -7).all()


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
    x, segments = values(sum(rows), 2 * IN).bfloat16().to(DEVICE)[:, :IN], ExpertSegments.of(rows, DEVICE)
    seen = torch.tensor([0.0, 3.0, 100.0, 0.0], device=DEVICE)
    codes = grouped.quantize_expert_rows(x, segments, E4M3, torch.ones(4, device=DEVICE), seen)
    assert torch.equal(
        codes, grouped.quantize_expert_rows(x.contiguous(), segments, E4M3, torch.ones(4, device=DEVICE))
    )
    alone = [float(part.abs().max()) if len(part) else 0.0 for part in x.split(rows)]
    assert seen.tolist() == [max(pair) for pair in zip(alone, [0.0, 3.0, 100.0, 0.0], strict=True)]
    assert grouped.expert_amaxes(x, segments).tolist() == alone


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_the_scale_of_an_expert_that_is_not_finite_is_poisoned(bad: float) -> None:
    rows = COUNTS["few rows"]
    x, segments = values(sum(rows), IN).to(DEVICE), ExpertSegments.of(rows, DEVICE)
    x[7, 3] = bad  # the third expert's
    has_nan = torch.ones(4, device=DEVICE)
    grouped.quantize_expert_rows(x, segments, E5M2, torch.ones(4, device=DEVICE), has_nan=has_nan)
    assert has_nan.isnan().tolist() == [False, False, True, False]
    found = grouped.expert_amaxes(x, segments)
    assert found.isfinite().tolist() == [True, True, False, True] and found[2].isnan() == (bad != bad)


@pytest.mark.parametrize("counts", COUNTS)
def test_sums_over_the_rows_of_each_expert(counts: str) -> None:
    rows = COUNTS[counts]
    x = values(sum(rows), OUT).bfloat16()
    found = grouped.expert_sums(x.to(DEVICE), ExpertSegments.of(rows, DEVICE)).cpu()
    wanted = torch.stack([part.double().sum(0) for part in x.split(rows)])
    room = torch.stack([part.double().abs().sum(0) for part in x.split(rows)]) * max(rows) * 2.0**-24
    assert found.dtype is torch.float32 and ((found - wanted).abs() <= room).all()


def in_double(parts: Sequence[QuantizedStorage]) -> list[Tensor]:
    return [part.dequantize().double() for part in parts]


def close(
    found: Tensor,
    parts: Sequence[tuple[Tensor, Tensor]],
    join: Callable[[list[Tensor]], Tensor] = torch.cat,
    on_gpu: float = 2.0**-13,
) -> None:
    """Of products that are exact, within what float32 sums can be off (of tensor cores: `on_gpu` of each), and one
    rounding."""
    exact = join([a @ b for a, b in parts])
    room = (on_gpu if ON_GPU else 2.0**-20) * join([a.abs() @ b.abs() for a, b in parts])
    assert found.shape == exact.shape
    assert ((found.cpu().double() - exact).abs() <= room + torch.finfo(found.dtype).eps * exact.abs() + 1e-30).all()


def weights(
    experts: int, shift: int = 0, sizes: tuple[int, int] = (OUT, IN)
) -> tuple[ExpertWeights, list[Tensor], list[Tensor]]:
    """With their values, and the tensors that they lie in. `shift`: bytes from a multiple of 16 to the codes of one."""
    stored = [operands.quantize_operand(values(*sizes, 9 + e), QuantSpec(ROWS[E4M3])) for e in range(experts)]
    codes = []
    for part in stored:
        held = torch.empty(sizes[0] * sizes[1] + shift, dtype=torch.uint8, device=DEVICE)[shift:].view(sizes)
        codes.append(held.copy_(part.components["codes"]))
    scale = [part.components["scale_inv"].to(DEVICE) for part in stored]
    return ExpertWeights.of(codes, scale, E4M3), in_double(stored), codes + scale


@pytest.mark.parametrize("counts", COUNTS)
def test_products(counts: str) -> None:
    """fprop, dgrad and wgrad, of an E4M3 input and an E5M2 gradient."""
    rows = COUNTS[counts]
    segments, dtype = ExpertSegments.of(rows, DEVICE), torch.bfloat16 if len(rows) > 3 else torch.float32
    x, dy = values(sum(rows), IN, 1), values(sum(rows), OUT, 2)
    a, b = quantized(x, rows, E4M3), quantized(dy, rows, E5M2)
    x_of, dy_of = in_double(one_by_one(x, rows, E4M3)), in_double(one_by_one(dy, rows, E5M2))
    held, w_of, _tensors = weights(len(rows))
    y = grouped_matmul.rows_times_weights(a, held, segments, dtype, transposed=True)
    close(y, [(part, w.t()) for part, w in zip(x_of, w_of, strict=True)])
    dx = grouped_matmul.rows_times_weights(b, held, segments, dtype, transposed=False)
    close(dx, list(zip(dy_of, w_of, strict=True)))
    dw = grouped_matmul.weight_gradients(b, a, segments, dtype)
    close(dw, [(part.t(), other) for part, other in zip(dy_of, x_of, strict=True)], torch.stack)
    assert all(count or not dw[expert].count_nonzero() for expert, count in enumerate(rows))


@pytest.mark.parametrize("sizes", [(144, 48), (176, 272)])
@pytest.mark.parametrize("counts", COUNTS)
def test_products_of_codes(counts: str, sizes: tuple[int, int]) -> None:
    """fprop with biases, dgrad and wgrad, with counts on the host and on the device.

    FP8 tensor cores align 32 products and cut each to 13 bits of the largest one.
    """
    close_to = partial(close, on_gpu=32 * 2.0**-13)
    rows, (outputs, features) = COUNTS[counts], sizes
    x, dy = values(sum(rows), features, 1), values(sum(rows), outputs, 2)
    a, b = quantized(x, rows, E4M3), quantized(dy, rows, E5M2)
    x_of, dy_of = in_double(one_by_one(x, rows, E4M3)), in_double(one_by_one(dy, rows, E5M2))
    held, w_of, tensors = weights(len(rows), sizes=sizes)
    held = held._replace(codes=torch.cat(tensors[: len(rows)]))
    biases = values(len(rows), outputs, 5).to(DEVICE)
    added = torch.cat([bias.expand(count, -1) for bias, count in zip(biases.cpu().double(), rows, strict=True)])
    on_host = ExpertSegments.of(rows, DEVICE, MANY_ROWS)
    for segments in (on_host, ExpertSegments.of_tensor(torch.tensor(rows, device=DEVICE), sum(rows), MANY_ROWS)):
        y = grouped_matmul.rows_times_weights(a, held, segments, torch.float32, transposed=True)
        close_to(y, [(part, w.t()) for part, w in zip(x_of, w_of, strict=True)])
        z = grouped_matmul.rows_times_weights(
            a, held, segments, torch.float32, transposed=True, biases=ExpertBias.of(biases)
        )
        # float32 rounds by 2**-24 of a value, and the launches differ by a few roundings of values up to the largest
        room = 2.0**-20 * float(y.abs().max()) if y.numel() else 0.0
        assert torch.allclose(z.cpu().double(), y.cpu() + added, rtol=2.0**-22, atol=room)
        dx = grouped_matmul.rows_times_weights(b, held, segments, torch.bfloat16, transposed=False)
        close_to(dx, list(zip(dy_of, w_of, strict=True)))
        turned = [part._replace(codes=grouped.turned_rows(part.codes, segments)) for part in (b, a)]
        dw = grouped_matmul.weight_gradients(*turned, segments, torch.bfloat16, turned=True)
        close_to(dw, [(part.t(), other) for part, other in zip(dy_of, x_of, strict=True)], torch.stack)
        assert all(count or not dw[expert].count_nonzero() for expert, count in enumerate(rows))
        y = grouped_matmul.rows_times_weights(a, held, segments, torch.bfloat16, transposed=True, fast=True)
        close_to(y, [(part, w.t()) for part, w in zip(x_of, w_of, strict=True)])
        dw = grouped_matmul.weight_gradients(*turned, segments, torch.bfloat16, turned=True, fast=True)
        close_to(dw, [(part.t(), other) for part, other in zip(dy_of, x_of, strict=True)], torch.stack)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_biases_are_added_and_weights_may_lie_anywhere(dtype: torch.dtype) -> None:
    rows = COUNTS["few rows"]
    a, segments = quantized(values(sum(rows), IN, 1), rows, E4M3), ExpertSegments.of(rows, DEVICE)
    biases = list(values(4, OUT, 5).to(dtype).to(DEVICE))
    held, _, _tensors = weights(4)
    plain = grouped_matmul.rows_times_weights(a, held, segments, torch.float32, transposed=True)
    moved, _, _others = weights(4, shift=1)
    assert held.aligned and not moved.aligned
    found = grouped_matmul.rows_times_weights(
        a, moved, segments, torch.float32, transposed=True, biases=ExpertBias.of(biases)
    )
    added = torch.cat([bias.float().cpu().expand(count, -1) for bias, count in zip(biases, rows, strict=True)])
    wanted = plain.cpu() + added
    assert torch.allclose(found.cpu(), wanted, rtol=2.0**-22, atol=2.0**-22 * float(plain.abs().max()))  # fused or not


# Under a scale for each block

BLOCKS = {128: ("fp8_1x128", "fp8_128x128"), 32: ("mxfp8_1x32", "mxfp8_32x32")}
WIDE = {128: (140, 40), 32: (70, 35)}
"""Two blocks or three of a row, so that scales change within a sum."""


def by_blocks(x: Tensor, counts: Sequence[int], block: int) -> tuple[EncodedRows, EncodedRows, list[int]]:
    """Codes of the rows and of their transpose, and the first row of each expert."""
    segments = ExpertSegments.of(counts, DEVICE, grouped.MANY_ROWS)
    request = request_of(FORMATS[BLOCKS[block][0]].copies[Orientation.ROWWISE], Scaling())
    ones = torch.ones(len(counts), device=DEVICE)
    found = grouped.quantize_expert_blocks(x.to(DEVICE), segments, request, request)
    one, two = (EncodedRows(target.codes, target.scale, E4M3, block, ones) for target in found)
    return one, two, segments.spans[:, 1].tolist()


@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize("block", BLOCKS)
def test_codes_and_scales_of_blocks_are_those_of_each_expert_alone(counts: str, block: int) -> None:
    rows, cell = COUNTS[counts], QuantSpec(FORMATS[BLOCKS[block][0]])
    x = values(sum(rows), WIDE[block][0]).bfloat16()
    one, two, firsts = by_blocks(x, rows, block)
    for part, first in zip(x.split(rows), firsts, strict=True):
        here, blocks = slice(first, first + len(part)), slice(first // block, -((first + len(part)) // -block))
        wanted, transposed = (
            operands.quantize_operand(part, cell).components,
            operands.quantize_operand(part.t(), cell).components,
        )
        assert torch.equal(one.codes[here].cpu(), wanted["codes"])
        assert torch.equal(one.scales[here].cpu(), wanted["scale_inv"])
        assert torch.equal(two.codes[:, here].cpu(), transposed["codes"])
        assert torch.equal(two.scales[:, blocks].cpu(), transposed["scale_inv"])
        zeros = slice(first + len(part), -((first + len(part)) // -grouped.MANY_ROWS) * grouped.MANY_ROWS)
        assert not one.codes[zeros].count_nonzero() and not two.codes[:, zeros].count_nonzero()


@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize("block", BLOCKS)
def test_products_by_blocks(counts: str, block: int) -> None:
    rows, (features, outputs) = COUNTS[counts], WIDE[block]
    vector, square = (QuantSpec(FORMATS[name]) for name in BLOCKS[block])
    segments = ExpertSegments.of(rows, DEVICE, grouped.MANY_ROWS)
    x, dy = values(sum(rows), features, 1), values(sum(rows), outputs, 2)
    (a, a_transposed, _), (b, b_transposed, _) = by_blocks(x, rows, block), by_blocks(dy, rows, block)
    stored = [operands.quantize_operand(values(outputs, features, 9 + e), square) for e in range(len(rows))]
    parts = [[s.components[name].to(DEVICE) for s in stored] for name in ("codes", "scale_inv")]
    held, w_of = ExpertWeights.of(*parts, E4M3, block), in_double(stored)
    x_of, dy_of = (in_double([operands.quantize_operand(p, vector) for p in t.split(rows)]) for t in (x, dy))
    y = grouped_matmul.rows_times_weights(a, held, segments, torch.float32, transposed=True)
    close(y, [(part, w.t()) for part, w in zip(x_of, w_of, strict=True)])
    dx = grouped_matmul.rows_times_weights(b, held, segments, torch.float32, transposed=False)
    close(dx, list(zip(dy_of, w_of, strict=True)))
    x_of, dy_of = (in_double([operands.quantize_operand(p.t(), vector) for p in t.split(rows)]) for t in (x, dy))
    dw = grouped_matmul.weight_gradients(b_transposed, a_transposed, segments, torch.float32)
    close(dw, [(part, other.t()) for part, other in zip(dy_of, x_of, strict=True)], torch.stack)


def test_poison_of_blocks_is_their_experts() -> None:
    rows = COUNTS["few rows"]
    x, segments = values(sum(rows), IN).to(DEVICE), ExpertSegments.of(rows, DEVICE, grouped.MANY_ROWS)
    x[7, 3] = torch.inf  # the third expert's
    request, nan_flag = (
        request_of(FORMATS["fp8_1x128"].copies[Orientation.ROWWISE], Scaling()),
        torch.ones(4, device=DEVICE),
    )
    grouped.quantize_expert_blocks(x, segments, request, None, nan_flag)
    assert nan_flag.isnan().tolist() == [False, False, True, False]


@pytest.mark.parametrize("most_recent", [True, False])
def test_past_amaxes_of_many_histories(most_recent: bool) -> None:
    histories = [torch.tensor(seen, device=DEVICE) for seen in ([1.0, 5.0, 2.0], [0.0], [0.0, 0.0, 3.0, 2.5, 0.5])]
    wanted = torch.stack([delayed_scaling.history_amax(seen, most_recent) for seen in histories])
    assert torch.equal(multi_tensor.past_amaxes(histories, most_recent), wanted)
