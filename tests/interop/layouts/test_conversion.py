"""Cutting fused weights, blocks that a cut would cross, and names."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from quantshard import numerics, sharding
from quantshard.errors import ConfigurationError
from quantshard.formats import FORMATS, NVFP4_1X16, Orientation
from quantshard.interop.layouts import LAYOUTS, Layout, conversion, names, table
from quantshard.interop.layouts.conversion import InexactConversionError
from quantshard.interop.layouts.names import HeadCounts, fused_runs
from quantshard.recipe import QuantSpec
from tests.interop.layouts import models

QUERIES, GROUPS = 4, 2


def fused(order: str, size: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """A fused weight with heads of `size` rows, and its queries, keys and values, as MultiheadAttention says."""
    parts = [torch.randn(heads, size, 128) for heads in (QUERIES, GROUPS, GROUPS)]
    if order == "stacked":
        rows = torch.cat([part.flatten(0, 1) for part in parts])
    else:
        per_group = [part.unflatten(0, (GROUPS, -1)) for part in parts]
        rows = torch.cat([torch.cat([part[group].flatten(0, 1) for part in per_group]) for group in range(GROUPS)])
    return rows, [part.flatten(0, 1) for part in parts]


@pytest.mark.parametrize("order", names.ORDERS)
def test_runs_cut_a_fused_weight(order):
    weight, wanted = fused(order, 6)
    runs = fused_runs("w", order, len(weight), HeadCounts(QUERIES, GROUPS))
    for part, value in zip(runs, wanted, strict=True):
        assert torch.equal(weight[conversion.our_rows(part)], value)


@pytest.mark.parametrize(
    ("fmt", "layout"),
    [("nvfp4_16x16", "modelopt-nvfp4"), ("mxfp8_32x32", "sglang-mxfp8"), ("fp8_e4m3", "hf-fp8-block")],
)
def test_a_cut_through_blocks_is_exact_where_rows_have_their_own_scales(fmt, layout):
    weight, wanted = fused("interleaved", 24)  # a head ends inside a block of 16 or 32 rows
    row, shape = FORMATS[fmt], (len(weight), 128)
    parts = numerics.quantize(weight, row)
    values = numerics.dequantize(row.copies[Orientation.ROWWISE], parts, shape)
    runs = fused_runs("w", "interleaved", len(weight), HeadCounts(QUERIES, GROUPS))
    for part, high in zip(runs, wanted, strict=True):
        rows = conversion.our_rows(part)
        tensors = conversion.to_layout(LAYOUTS[layout], row, parts, shape, rows)
        target = LAYOUTS[layout].row()
        scale = conversion.stored_scale(LAYOUTS[layout], tensors[LAYOUTS[layout].scale_key])
        components = {"codes": tensors["weight"].view(torch.uint8), "scale_inv": scale, "amax": parts.get("amax")}
        found = numerics.dequantize(target.copies[Orientation.ROWWISE], components, tuple(high.shape))
        assert torch.equal(found, values[rows])


def test_a_cut_inside_a_block_is_refused():
    weight, _ = fused("interleaved", 96)
    row = FORMATS["fp8_128x128"]
    parts = numerics.quantize(weight, row)
    runs = fused_runs("w", "interleaved", len(weight), HeadCounts(QUERIES, GROUPS))
    rows = conversion.our_rows(runs[1])  # keys: rows 192...287 and 576...671
    with pytest.raises(InexactConversionError, match="blocks of 128x128 have different scales inside one"):
        conversion.to_layout(LAYOUTS["hf-fp8-block"], row, parts, (len(weight), 128), rows)


def cells() -> dict[str, QuantSpec]:
    found = {name: recipe.weight for name, recipe in models.RECIPES.items()}
    return {name: cell for name, cell in found.items() if cell is not None}


QUANTIZED = [layout for layout in LAYOUTS.values() if not layout.is_plain]


@pytest.mark.parametrize("layout", QUANTIZED, ids=lambda layout: layout.name)
@pytest.mark.parametrize("ours", cells())
def test_the_matrix_of_exports_is_what_conversion_does(ours, layout):
    cell = cells()[ours]
    parts = numerics.quantize(torch.randn(160, 256), cell.format, replace(cell.scaling, history=0))
    try:
        tensors = conversion.to_layout(layout, cell.format, parts, (160, 256))
    except InexactConversionError:
        assert table.verdict(cell, layout, has_input_amax=True).kind != table.EXACT
        return
    assert torch.equal(tensors[layout.codes_key].view(torch.uint8), parts["codes"])
    for target_name, target in cells().items():
        check_import(layout, tensors, cell, target, values_of(cell, parts), (ours, target_name))


def values_of(cell: QuantSpec, parts: dict[str, torch.Tensor]) -> torch.Tensor:
    return numerics.dequantize(cell.format.copies[Orientation.ROWWISE], parts, (160, 256))


def check_import(
    layout: Layout,
    tensors: dict[str, torch.Tensor],
    source: QuantSpec,
    target: QuantSpec,
    values: torch.Tensor,
    case: object,
) -> None:
    """What `import_verdict` says of a layout and a cell is what becomes of these tensors."""
    found = table.import_verdict(target, layout)
    if found.kind != table.EXACT:
        return
    copy = target.format.copies[Orientation.ROWWISE]
    grid = conversion.stored_scale(layout, tensors[layout.scale_key])
    by_row = grid[torch.arange(160) // layout.block[0]]
    extents = sharding.whole((160, 256)).resident(copy.scale)
    holds = all(map(table.refines, copy.block, source.format.copies[Orientation.ROWWISE].block))
    try:
        scale = conversion.our_grid(by_row, layout, target.format, extents, 256)
    except InexactConversionError:
        assert found.why and not (holds and source.format == target.format), case
        return
    parts = {"codes": tensors[layout.codes_key].view(torch.uint8), "scale_inv": scale}
    if layout.second is not None:
        parts["amax"] = conversion.amax_of(tensors[layout.second.key], target.format, layout.second.divides)
    assert torch.allclose(values_of(target, parts), values, rtol=2**-21, atol=0), case


def test_columns_must_be_whole_blocks():
    with pytest.raises(ConfigurationError, match=r"sglang-mxfp8 needs multiples of 32 columns, not \[8, 40\]"):
        conversion.shapes(LAYOUTS["sglang-mxfp8"], 8, 40)
    assert conversion.shapes(LAYOUTS["hf-fp8-block"], 130, 40)["weight_scale_inv"][1] == (2, 1)


def test_an_amax_of_zero_has_a_finite_second_scale():
    row = FORMATS["nvfp4_16x16"]
    for divides in (False, True):
        second = conversion.second_scale(torch.zeros(()), row, divides)
        assert second == 1 and conversion.amax_of(second, row, divides, (0.0).hex()) == 0
        assert torch.equal(
            conversion.amax_of(second, row, divides, "damaged"), conversion.amax_of(second, row, divides)
        )


@pytest.mark.parametrize("rows", [0, 7, 100])
def test_rows_of_other_heads_are_refused(rows):
    if rows % (QUERIES + 2 * GROUPS) == 0:
        assert all(
            run.length == 0 for part in fused_runs("w", "stacked", rows, HeadCounts(QUERIES, GROUPS)) for run in part
        )
        return
    with pytest.raises(ConfigurationError, match=f"w: {rows} rows for 4 query, 2 key/value heads"):
        fused_runs("w", "stacked", rows, HeadCounts(QUERIES, GROUPS))


def test_a_map_is_read_from_toml(tmp_path):
    path = tmp_path / "names.toml"
    path.write_text(
        '[names]\n"blocks.{n}.fc.weight" = "h.{n}.mlp.weight"\n'
        '[fused]\n"blocks.{n}.qkv.weight" = { rows = "stacked", into = ["h.{n}.q", "h.{n}.k", "h.{n}.v"] }\n'
    )
    found = names.read_names(path)
    assert list(found.theirs("blocks.12.fc.weight", 4, None)) == ["h.12.mlp.weight"]
    assert list(found.theirs("blocks.3.qkv.weight", 8, HeadCounts(2, 1))) == ["h.3.q", "h.3.k", "h.3.v"]
    assert not found.theirs("other", 4, None)
    with pytest.raises(ConfigurationError, match="pass --config with numbers of heads"):
        found.theirs("blocks.3.qkv.weight", 8, None)


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("[names", "is not TOML"),
        ("[other]", "has only the tables"),
        ('[names]\n"a" = 3', "'a' must be a name"),
        ('[fused]\n"a" = { rows = "mixed", into = ["q", "k", "v"] }', "'a' needs"),
        ('[fused]\n"a" = { rows = "stacked", into = ["q"] }', "'a' needs"),
    ],
)
def test_a_wrong_map_is_refused(tmp_path, text, match):
    (tmp_path / "names.toml").write_text(text)
    with pytest.raises(ConfigurationError, match=match):
        names.read_names(tmp_path / "names.toml")


@pytest.mark.parametrize("divides", [True, False])
def test_second_scales_of_other_writers_are_restored(divides):
    """As they compute them from an amax: compressed-tensors by `2688 / amax`, a scalar divided by a tensor."""
    amaxes = torch.rand(2000, generator=torch.Generator().manual_seed(0)) * 10 + 1e-3
    for amax in (*amaxes, torch.tensor(0.0859375)):
        scale = 6.0 * 448.0 / amax if divides else amax / (6.0 * 448.0)
        found = conversion.amax_of(scale.reshape(1), NVFP4_1X16, divides)
        assert torch.equal(conversion.second_scale(found, NVFP4_1X16, divides).view(()), scale), amax


def test_every_quantized_layout_has_the_recipe_of_its_blocks() -> None:
    """What `train --init-from` takes where no recipe is given."""
    found = {name: table.recipe_of(layout) for name, layout in table.LAYOUTS.items()}
    ends = {"-fp8": "current", "-block": "block", "-channel": "rowwise", "-mxfp8": "mxfp8", "-nvfp4": "nvfp4"}
    assert found == {
        name: None if layout.is_plain else next(ends[end] for end in ends if name.endswith(end))
        for name, layout in table.LAYOUTS.items()
    }
