"""`plan` beside what exists: storages that are really cut, and what `explain` reads from a model that FSDP2 cut."""

from dataclasses import fields, replace
from itertools import product
from math import prod

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import nn

import quantshard as qs
from quantshard.errors import ConfigurationError
from quantshard.formats import Role
from quantshard.modules.base.module import QuantizedModule
from quantshard.recipe import MXFP8BlockScaling, NVFP4BlockScaling, Recipe
from quantshard.sharding import ceil_div
from quantshard.tools.observe.costs import Row
from tests.covering import by_turns
from tests.tools.observe.fake import fake_rank, wrap

RECIPES: dict[str, str | Recipe] = {
    **{name: name for name in ("delayed", "current", "block", "mxfp8", "nvfp4", "bf16")},
    "mxfp8 two copies": MXFP8BlockScaling(enable_2d_quantization=False),
    "nvfp4 two copies": NVFP4BlockScaling(disable_2d_quantization=True),
}
every_recipe = pytest.mark.parametrize("recipe", RECIPES)

MESHES = [
    {"dp_shard": 1},
    {"dp_shard": 3},
    {"rows of hosts": 2, "hosts": 3},
    {"dp_shard": 1, "tp": 2},
    {"dp_shard": 2, "tp": 3},
    {"dp_replicate": 2, "dp_shard": 5, "tp": 2},
]
TP_CUTS = {"a.weight": 0, "b.weight": 1, "first.weight": 0}


class Model(nn.Module):
    """Shapes that no size here divides; some ranks hold nothing of the last layer."""

    def __init__(self, recipe: str | Recipe, device: str = "meta") -> None:
        super().__init__()
        self.first = nn.Linear(40, 97, dtype=torch.bfloat16, device=device)
        with qs.quantized_model_init(enabled=recipe != "bf16", recipe=recipe):
            self.a = qs.Linear(96, 310, params_dtype=torch.bfloat16, device=device)
            self.b = qs.Linear(312, 100, bias=False, params_dtype=torch.bfloat16, device=device)
        self.norm = nn.LayerNorm(7, dtype=torch.float32 if device == "meta" else torch.bfloat16, device=device)
        self.last = nn.Linear(96, 3, dtype=torch.bfloat16, device=device)

    def layers(self) -> list[nn.Module]:
        return [self.a, self.b, self.norm]


def single(recipe: str, rows: int, cols: int) -> qs.Linear:
    with qs.quantized_model_init(enabled=recipe != "bf16", recipe=RECIPES[recipe]):
        return qs.Linear(cols, rows, bias=False, params_dtype=torch.bfloat16, device="meta")


def without_optimizer(rows: tuple[Row, ...]) -> list[Row]:
    return [replace(row, optimizer={}, optimizer_bytes=0, state_sizes={}) for row in rows]


# ----------------------------------------------------------------------------------------- beside storages that are cut

sizes = st.one_of(st.integers(1, 40), st.sampled_from([64, 96, 127, 128, 129, 160, 256, 300, 384, 385]))
axes = st.tuples(st.integers(1, 2), st.integers(1, 6), st.integers(1, 3), st.sampled_from([0, 1]))


@every_recipe
@settings(max_examples=15)
@given(rows=sizes, cols=sizes, axes=axes)
def test_bytes_are_those_of_storages_that_are_cut(recipe, rows, cols, axes):
    replicas, shards, tp, dim = axes
    cols = 2 * cols if dim else cols  # two 4-bit codes share a byte
    chunk = ceil_div(cols if dim else rows, tp)
    tp = 1 if chunk % 2 else tp
    model = single(recipe, rows, cols)
    mesh = {"dp_replicate": replicas, "dp_shard": shards, "tp": tp}
    planned = [
        qs.plan(model, mesh, rank=r, tensor_parallel={"weight": dim}).rows[0] for r in range(prod(mesh.values()))
    ]
    if recipe == "bf16":
        assert all(row.code_bytes == row.bf16_bytes for row in planned)
        return
    whole = model.weight.quantized_storage
    by_name = whole.spec.format.by_name
    tp_pieces = [whole.piece(dim, i * chunk, chunk) for i in range(tp)] if tp > 1 else [whole.piece(dim, 0, 10**6)]
    rest = [ceil_div(piece.shard.shape[0], shards) for piece in tp_pieces]
    cut = [piece.piece(0, s * n, n) for s in range(shards) for piece, n in zip(tp_pieces, rest, strict=True)]
    for row, storage in zip(planned, cut * replicas, strict=True):
        held = {name: part.nbytes for name, part in storage.components.items()}
        codes = sum(size for name, size in held.items() if by_name[name].role is Role.CODES)
        assert (row.code_bytes, row.scale_bytes) == (codes, sum(held.values()) - codes)
        assert row.local_rows == storage.shard.extents[0]
    everything = {name: part.nbytes for name, part in whole.components.items()}
    one_replica = planned[: shards * tp]
    assert sum(row.code_bytes for row in one_replica) == sum(
        size for name, size in everything.items() if by_name[name].role is Role.CODES
    )
    own = sum(row.scale_bytes - row.shared_scale_bytes for row in one_replica)
    sharded = [
        n for n in everything if by_name[n].role is not Role.CODES and not cut[0].shard.shares_blocks(by_name[n])
    ]
    assert own == sum(everything[name] for name in sharded)


@every_recipe
@settings(max_examples=15)
@given(rows=sizes, cols=sizes, axes=axes)
def test_no_rank_holds_or_sends_more_than_the_first(recipe, rows, cols, axes):
    replicas, shards, tp, dim = axes
    tp = 1 if ceil_div(cols, tp) % 2 else tp
    model, mesh = single(recipe, rows, cols), {"dp_replicate": replicas, "dp_shard": shards, "tp": tp}
    figures = [f.name for f in fields(Row) if f.name.endswith("_bytes")]
    first, *others = [
        qs.plan(model, mesh, rank=r, tensor_parallel={"weight": dim}, exp_avg_dtype=torch.uint8).rows[0]
        for r in range(prod(mesh.values()))
    ]
    for other, figure in product(others, figures):
        assert getattr(other, figure) <= getattr(first, figure), figure


# --------------------------------------------------------------------------------------- beside FSDP2 on a fake rank


@by_turns(2, recipe={name: name for name in RECIPES}, mesh={"x".join(map(str, mesh.values())): mesh for mesh in MESHES})
def test_plan_is_what_explain_reads_from_the_sharded_model(recipe, mesh):
    cuts = TP_CUTS if "tp" in mesh else None
    world = prod(mesh.values())
    for rank in sorted({0, world // 2, world - 1}):
        model = Model(RECIPES[recipe])
        planned = qs.plan(model, mesh, layers=model.layers(), rank=rank, tensor_parallel=cuts)
        with fake_rank(mesh, rank) as devices:
            wrap(model, devices, model.layers(), cuts)
            found = qs.explain(model)
        assert without_optimizer(planned.rows) == list(found.rows)
        assert planned.warnings == found.warnings


@by_turns(
    2,
    recipe=["nvfp4", "bf16"],
    options=[
        {},
        {"exp_avg_dtype": torch.uint8},
        {"preset": "lean8"},
        {"preset": "lean6"},
        {"master_weight_dtype": torch.bfloat16},
        {"master_weights": False, "exp_avg_sq_dtype": torch.uint8},
    ],
    ema=[False, True],
)
def test_optimizer_state_is_what_fused_adam_allocates(recipe, options, ema):
    mesh = {"dp_replicate": 2, "dp_shard": 4}
    for rank in (0, 3, 5):
        model = Model(recipe, "cpu")
        model.norm.requires_grad_(False)
        planned = qs.plan(model, mesh, layers=model.layers(), rank=rank, ema=ema, **options)
        with fake_rank(mesh, rank) as devices:
            wrap(model, devices, model.layers())
            trained = [param for param in model.parameters() if param.requires_grad]
            found = qs.explain(model, qs.optimizers.FusedAdam(trained, ema_decay=0.9 * ema, **options))
        assert planned == found


@by_turns(
    2,
    optimizer=["muon", "lion"],
    recipe=["nvfp4", "bf16"],
    options=[{}, {"preset": "lean8"}, {"master_weight_dtype": torch.bfloat16}],
)
def test_optimizer_state_is_what_muon_and_lion_allocate(optimizer, recipe, options):
    if optimizer == "lion" and "preset" in options:
        options = {"exp_avg_dtype": torch.uint8}
    mesh = {"dp_shard": 3}
    for rank in (0, 2):
        model = Model(recipe, "cpu")
        planned = qs.plan(
            model, mesh, layers=model.layers(), rank=rank, optimizer=optimizer, head={"muon": "last"}.get(optimizer),
            **options,
        )  # fmt: skip
        with fake_rank(mesh, rank) as devices:
            wrap(model, devices, model.layers())
            if optimizer == "muon":
                groups = qs.optimizers.muon_groups(model, head="last", adamw={"lr": 1e-3})
                live = qs.optimizers.Muon(groups, lr=0.02, **options)
            else:
                live = qs.optimizers.Lion(model.parameters(), **options)
            found = qs.explain(model, live)
        assert planned == found
        moments = {"muon": "momentum_buffer", "lion": "exp_avg"}[optimizer]
        states = {row.name: {*row.optimizer} - {"master_param"} for row in planned.rows}
        assert states["a.weight"] == {moments}
        assert states["last.weight"] == {"exp_avg", "exp_avg_sq"} or optimizer == "lion"


@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("recipe", ["mxfp8", "mxfp8 two copies"])
def test_reshard_after_forward(recipe, reshard):
    model = Model(RECIPES[recipe])
    planned = qs.plan(model, {"dp_shard": 3}, layers=model.layers(), reshard_after_forward=reshard)
    with fake_rank({"dp_shard": 3}, 0) as devices:
        for module in (*model.layers(), model):
            torch.distributed.fsdp.fully_shard(module, mesh=devices, reshard_after_forward=reshard)
        assert without_optimizer(planned.rows) == list(qs.explain(model).rows)
    assert all((row.backward_gather_bytes > 0) == reshard for row in planned.rows)


# ------------------------------------------------------------------------------------------------- by hand, and errors


def test_one_rank_reduces_no_amaxes():
    for mesh, reduced in (({}, 0), ({"dp_shard": 1}, 0), ({"dp_replicate": 2, "dp_shard": 1}, 0), ({"dp_shard": 2}, 4)):
        assert qs.plan(single("current", 64, 64), mesh).rows[0].reduced_bytes == reduced


def test_a_weight_by_hand():
    """256 x 64 in blocks of 32 x 32 over 16 ranks: 16 rows each, so two ranks share each of the 8 x 2 blocks."""
    report = qs.plan(single("mxfp8", 256, 64), {"dp_shard": 16}, rank=5)
    (row,) = report.rows
    assert (row.code_bytes, row.bf16_bytes, row.local_rows) == (16 * 64, 2 * 16 * 64, (80, 96))
    assert (row.scale_bytes, row.shared_scale_bytes, row.reduced_bytes) == (16, 16, 64)
    assert (row.forward_gather_bytes, row.backward_gather_bytes, row.bf16_gather_bytes) == (16 * 64, 0, 2 * 16 * 64)
    assert (row.optimizer_bytes, row.optimizer) == (
        12 * 16 * 64,
        {"exp_avg": "fp32", "exp_avg_sq": "fp32", "master_param": "fp32"},
    )
    assert report.warnings == ()
    assert "blocks of 32x32 straddle ranks, which share scale_inv: each keeps" in " ".join(str(report).split())


def test_a_tensor_parallel_weight_by_hand():
    """640 x 64: tp cuts 320 rows, FSDP 5 of those. A rank keeps the 10 x 2 scales of its tp piece, not all 20 x 2."""
    report = qs.plan(single("mxfp8", 640, 64), {"dp_shard": 64, "tp": 2}, rank=3, tensor_parallel={"weight": 0})
    (row,) = report.rows
    assert row.local_rows == (325, 330)
    assert (row.code_bytes, row.scale_bytes, row.placements) == (320, 20, ("StridedShard(0)", "Shard(0)"))
    assert "each keeps 20 B (6.2% of the local codes)" in row.notes[0]


def test_shared_and_plain_parameters_are_planned_once():
    model = Model("mxfp8")
    model.last.weight = model.first.weight
    assert [row.name for row in qs.plan(model, {"x": 2}).rows] == [name for name, _ in model.named_parameters()]


def initialized(model: nn.Module) -> nn.Module:
    for module in model.modules():
        if isinstance(module, QuantizedModule):
            module.reset_parameters()
    return model


@pytest.mark.parametrize("axis", ["data_parallel", "dp", "fsdp", "shard", "x", "batch"])
def test_an_axis_has_any_name_but_one_for_tensor_parallelism(axis):
    model = Model("mxfp8", "meta")
    assert qs.plan(model, {axis: 4}).totals == qs.plan(model, {"dp_shard": 4}).totals


def test_planning_leaves_the_model_as_it_is():
    torch.manual_seed(1)
    model = initialized(Model("mxfp8", "cpu"))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    qs.plan(model, {"dp_shard": 4, "tp": 2}, tensor_parallel=TP_CUTS)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"mesh": {"tp": 2}}, "needs one or two axes for fully_shard"),
        ({"mesh": {"a": 2, "b": 2, "c": 2}}, "one or two axes for fully_shard"),
        ({"mesh": {"tp": 2, "dp_shard": 2}}, "'tp' only last"),
        ({"mesh": {"dp_shard": 4}, "rank": 4}, "no rank 4 in mesh {'dp_shard': 4} of 4 ranks"),
        ({"mesh": {"dp_shard": 4}, "tensor_parallel": {"a.weight": 0}}, "needs the axis 'tp'"),
        ({"mesh": {"dp_shard": 4, "tp": 2}, "tensor_parallel": {"c.weight": 0}}, "'c.weight': 0"),
        ({"mesh": {"dp_shard": 4, "tp": 2}, "tensor_parallel": {"a.weight": 2}}, "dim 0 or 1"),
        ({"mesh": {}, "optimizer": "muon"}, "the layer that computes the logits is not known"),
        (
            {"mesh": {"dp_shard": 4, "tp": 8}, "tensor_parallel": {"b.weight": 1}},
            r"b.weight: tp of 8 cuts dim 1 of \(100, 312\) into pieces of 39",
        ),
    ],
)
def test_arguments_that_do_not_fit(arguments, message):
    with pytest.raises(ConfigurationError, match=message):
        qs.plan(Model("nvfp4"), **arguments)


def test_a_sharded_model_is_refused():
    model = Model("mxfp8")
    with fake_rank({"dp_shard": 2}, 0) as devices:
        wrap(model, devices, model.layers())
        with pytest.raises(ConfigurationError, match=r"sharded already.*explain\(model\)"):
            qs.plan(model, {"dp_shard": 2})
