"""The sharding of a model of 70 billion parameters over 1024 ranks: planned by arithmetic, and beside it made by FSDP2.

Nothing is trained. The model is on the meta device, and one rank at a time sees the other 1023 as torch's fake process
group. `python -m tests.tools.observe.test_paper_scale` measures the table of docs/performance.md and prints it.
"""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache
from multiprocessing import get_context
from pathlib import Path

import pytest
import torch
from torch import nn

import quantshard as qs
from quantshard.formats import ALL, Format, Role
from quantshard.recipe import MXFP8BlockScaling, Recipe, resolve
from quantshard.tools.observe import Report, Row
from quantshard.tools.observe.costs import SCALES_WARNING
from tests.covering import by_turns
from tests.pages import section
from tests.tools.observe.fake import fake_rank, wrap
from tests.tools.observe.test_plan import without_optimizer

HIDDEN, FFN, LAYERS, HEADS, KV_HEADS, VOCABULARY = 8192, 28672, 80, 64, 8, 128256
RANKS = 1024
CHAPTER = "docs/performance.md#a-model-of-70-billion-parameters-on-1024-ranks"

RECIPES: dict[str, Recipe] = {
    **{name: resolve(name) for name in ("delayed", "current", "block", "mxfp8", "nvfp4")},
    "mxfp8 two copies": MXFP8BlockScaling(enable_2d_quantization=False),
}
MESHES = {
    "FSDP 1024": {"dp_shard": 1024},
    "HSDP 16 x 64": {"dp_replicate": 16, "dp_shard": 64},
    "FSDP 128 x TP 8": {"dp_shard": 128, "tp": 8},
}
TP_CUTS = {
    "embedding.weight": 0, "layernorm_qkv.weight": 0, "proj.weight": 1, "fc1_gate_weight": 0, "fc1_up_weight": 0,
    "fc2_weight": 1, "head.weight": 0,
}  # fmt: skip

every_recipe = pytest.mark.parametrize("recipe", RECIPES)
every_mesh = pytest.mark.parametrize("mesh", MESHES)


class Model(nn.Module):
    """Shaped as Llama 3 70B; never computed with."""

    def __init__(self, recipe: Recipe, layers: int = LAYERS) -> None:
        super().__init__()
        dtype, device = torch.bfloat16, "meta"
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN, dtype=dtype, device=device)
        with qs.quantized_model_init(recipe=recipe):
            self.layers = nn.ModuleList(
                qs.TransformerLayer(
                    HIDDEN, FFN, HEADS, KV_HEADS, hidden_dropout=0, attention_dropout=0, params_dtype=dtype, bias=False,
                    activation="swiglu", normalization="RMSNorm", fuse_qkv_params=True, device=device,
                )
                for _ in range(layers)
            )  # fmt: skip
        self.norm = qs.RMSNorm(HIDDEN, params_dtype=dtype, device=device)
        with qs.quantized_model_init(enabled=False):
            self.head = qs.Linear(HIDDEN, VOCABULARY, bias=False, params_dtype=dtype, device=device)


@cache
def model_of(recipe: str, layers: int = LAYERS) -> Model:
    return Model(RECIPES[recipe], layers)


def plan_of(recipe: str, mesh: Mapping[str, int], rank: int = 0, layers: int = LAYERS) -> Report:
    return planned(recipe, tuple(mesh.items()), rank, layers)


@cache
def planned(recipe: str, axes: tuple[tuple[str, int], ...], rank: int, layers: int) -> Report:
    model, mesh = model_of(recipe, layers), dict(axes)
    return qs.plan(model, mesh, layers=model.layers, rank=rank, tensor_parallel=TP_CUTS if "tp" in mesh else None)


def format_of(recipe: str) -> Format:
    cell = RECIPES[recipe].weight
    assert cell is not None
    return cell.format


def quantized(report: Report) -> list[Row]:
    return [row for row in report.rows if row.scale_bytes]


# ------------------------------------------------------------------------------------------------------- the two ways


@dataclass(frozen=True)
class Made:
    """One rank's model: CPU seconds of `fully_shard` and of `explain`, and the peak memory of the process, and by how
    much that grew meanwhile."""

    report: Report
    shard_seconds: float
    explain_seconds: float
    peak_mib: float
    grown_mib: float


def make(recipe: str, mesh: str, rank: int, layers: int = LAYERS) -> Made:
    before = peak_mib()
    model = Model(RECIPES[recipe], layers)
    with fake_rank(MESHES[mesh], rank) as devices:
        start = time.process_time()
        wrap(model, devices, model.layers, TP_CUTS)
        sharded = time.process_time()
        report = qs.explain(model)
        explained = time.process_time()
    peak = peak_mib()
    return Made(report, sharded - start, explained - sharded, peak, peak - before)


def peak_mib() -> float:
    """Of this process. What `getrusage` says can be the peak of the one that started it."""
    status = Path("/proc/self/status")
    if not status.exists():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    peak = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM:"))
    return int(peak.split()[1]) / 1024


def make_alone(recipe: str, mesh: str, rank: int, layers: int = LAYERS, *, start: str = "spawn") -> Made:
    """In a process of its own, so that the peak memory is of this alone; a fork begins with what this process has."""
    with ProcessPoolExecutor(1, mp_context=get_context(start)) as pool:
        return pool.submit(make, recipe, mesh, rank, layers).result()


@pytest.mark.slow
@by_turns(2, mesh=list(MESHES), recipe=list(RECIPES))
def test_first_middle_and_last_rank_are_sharded_as_planned(mesh, recipe):
    """They take turns, so that each mesh meets all three, and in `make test-all` each recipe."""
    turn = list(MESHES).index(mesh) + list(RECIPES).index(recipe)
    rank = (0, RANKS // 2 + 5, RANKS - 1)[turn % 3]
    report, made = plan_of(recipe, MESHES[mesh], rank, layers=2), make(recipe, mesh, rank, layers=2).report
    assert without_optimizer(report.rows) == list(made.rows)
    assert report.warnings == made.warnings


@pytest.mark.slow
@pytest.mark.parametrize("layers", [8, pytest.param(LAYERS, marks=pytest.mark.exhaustive)])
def test_all_layers_are_sharded_as_planned(layers):
    """On two axes. Nothing of the 141 GB is allocated, nor of a tenth of the layers' 18 GB: the process grows by
    less than 0.75 GiB, and to less than 1 GiB where it is a new one, of which PyTorch itself is a quarter."""
    mesh, rank = "FSDP 128 x TP 8", RANKS // 2 + 5
    start = "fork" if layers < LAYERS and sys.platform == "linux" else "spawn"  # a new one imports longer than it cuts
    made = make_alone("mxfp8", mesh, rank, layers, start=start)
    assert without_optimizer(plan_of("mxfp8", MESHES[mesh], rank, layers).rows) == list(made.report.rows)
    assert made.grown_mib < 768
    assert start == "fork" or made.peak_mib < 1024
    seconds = f"fully_shard {made.shard_seconds:.1f} s, explain {made.explain_seconds:.3f} s"
    print(f"\n{mesh}: {seconds}, {made.peak_mib:.0f} MiB")


# --------------------------------------------------------------------------------------------------------- the limits


def seconds_to_plan(recipe: str, mesh: Mapping[str, int]) -> float:
    start = time.process_time()
    planned.__wrapped__(recipe, tuple(mesh.items()), 1, LAYERS)
    return time.process_time() - start


@by_turns(3, mesh=MESHES, recipe=list(RECIPES))
def test_a_plan_takes_well_under_a_second(mesh, recipe):
    model = model_of(recipe)
    assert sum(param.numel() for param in model.parameters()) == 70_553_706_496
    # once more where other processes have slowed the core down
    assert seconds_to_plan(recipe, mesh) < 1 or seconds_to_plan(recipe, mesh) < 1


@every_mesh
@every_recipe
def test_half_of_bf16_where_blocks_are_whole(mesh, recipe):
    """A weight of which no block straddles takes what its row says an element takes, in memory and in an all-gather.

    The design's half of BF16 is for one copy, and for its codes: the scales of the smallest blocks here, E8M0 for 32
    codes of one byte, come to 1/32 on top; those of a whole tensor to a few bytes on every rank.
    """
    fmt = format_of(recipe)
    of_tensor = sum(c.encoding.storage.itemsize for c in fmt.components if ALL in c.block_shape)
    half = 0.5 * (1 + 1 / 32)
    for row in quantized(plan_of(recipe, MESHES[mesh])):
        if row.shared_scale_bytes <= of_tensor:
            assert row.bytes == fmt.bytes_per_element * (row.bf16_bytes // 2) + of_tensor
            assert row.bytes - of_tensor <= half * len(fmt.copies) * row.bf16_bytes
        assert row.forward_gather_bytes == row.backward_gather_bytes <= half * row.bf16_gather_bytes / 2


@every_mesh
@every_recipe
def test_what_straddling_blocks_cost(mesh, recipe):
    """Scales to codes are (bytes of a scale) / (bytes of a block's codes), times the ranks that all keep them.

    All sizes here are multiples of the ranks, so this is exact. Where it passes the limit of the design there is a
    warning, and it names the largest smaller shard axis that keeps to the limit.
    """
    fmt, axes = format_of(recipe), MESHES[mesh]
    code_bytes = sum(c.encoding.bits / 8 for c in fmt.components if c.role is Role.CODES)
    for row in quantized(plan_of(recipe, axes)):
        rows = row.local_rows[1] - row.local_rows[0]
        share = amaxes = 0.0
        for part in fmt.components:
            height, width = part.block_shape
            if part.role is not Role.CODES and ALL not in part.block_shape and rows % height:
                share += axes["dp_shard"] * part.encoding.storage.itemsize / (height * width * code_bytes)
                amaxes += axes["dp_shard"] / (height * width * code_bytes)
        of_tensor = sum(ALL in part.block_shape for part in fmt.components)
        assert row.shared_scale_bytes == share * row.code_bytes + 4 * of_tensor
        assert row.reduced_bytes == 4 * amaxes * row.code_bytes + 4 * of_tensor
        assert bool(row.warnings) == (share > SCALES_WARNING)


def test_hsdp_of_64_needs_no_way_out():
    for recipe in RECIPES:
        assert plan_of(recipe, MESHES["HSDP 16 x 64"]).warnings == ()


# -------------------------------------------------------------------------------------------------------- the document


def cells(mesh: str, recipe: str) -> list[str]:
    """Cells of a row of the chapter's table: one mesh and recipe, for the quantized weights of rank 0."""
    report = plan_of(recipe, MESHES[mesh])
    rows = quantized(report)
    codes, scales, bf16, reduced = (
        sum(getattr(row, name) for row in rows) for name in ("code_bytes", "scale_bytes", "bf16_bytes", "reduced_bytes")
    )
    layer = sum(row.forward_gather_bytes for row in rows) / LAYERS
    bf16_layer = sum(row.bf16_gather_bytes for row in rows) / LAYERS / 2
    warned = sum(bool(row.warnings) for row in rows)
    assert len(rows) == 400
    name = "delayed, current" if recipe in ("delayed", "current") else recipe
    return [
        mesh, name, f"{(codes + scales) / bf16:.3f}", f"{layer / bf16_layer:.3f}", f"{reduced / 2**20:.1f}",
        str(warned),
    ]  # fmt: skip


def line(texts: list[str]) -> str:
    return "| " + " | ".join(texts) + " |"


@every_mesh
@every_recipe
def test_the_document_says_what_is_planned(mesh, recipe):
    assert "\n" + line(cells(mesh, recipe)) in section(CHAPTER)


if __name__ == "__main__":
    for mesh in MESHES:
        for recipe in RECIPES:
            started = time.process_time()
            texts = cells(mesh, recipe)
            seconds_planned = time.process_time() - started
            made = make_alone(recipe, mesh, RANKS // 2 + 5)
            seconds = [
                f"{seconds_planned:.2f}",
                f"{made.shard_seconds:.1f}",
                f"{made.explain_seconds:.3f}",
                f"{made.peak_mib:.0f}",
            ]
            print(line([*texts, *seconds]), flush=True)
