"""Modules on tensor-parallel meshes beside the same module in one process; prints module x mesh x recipe.

Born bitwise equal everywhere. Two steps, or one where nothing is kept, then differ by the order of sums: activations
are quantized to the same bits, since amaxes of one activation are reduced over the ranks that hold pieces of it. In
float32 a sum of n products in another order is off by at most n * 2**-24 of the sum of magnitudes, about 2**-24 *
sqrt(n) of the norm: 1e-6 leaves a factor of 3 for the n of up to 336 here, and for the few layers that such a
difference runs through. Behind a second quantization such a difference can move a value over a rounding boundary to the
next code, a relative step of 2**-3 at most. With values off by 2**-23 that happens to one of 2**20 elements, or one of
the few thousand here, and moves the norm by 2**-3 / sqrt(10**3) at most: 4e-3. Data-parallel ranks scale their own
activations, so there only BF16, MXFP8 (power-of-two scales of blocks within a token) and delayed scaling (scales of the
past) are compared.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate

import quantshard as qs
from quantshard.errors import ConfigurationError, RankMismatchError
from tests.distributed.models import RECIPES, sha
from tests.distributed.pool import run_ranks
from tests.distributed.tensor_parallel import BLOCKS, FFN, HIDDEN, LINEARS, MESHES, MODULES, Case, recomputed, table

pytestmark = pytest.mark.distributed

ORDER_OF_SUMS, ONE_CODE = 1e-6, 4e-3
ALIKE_ON_DATA = ("bf16", "mxfp8", "delayed", "mxfp8 two copies")
"""Recipes whose scales of activations do not depend on the other tokens of a step."""


def kept(mesh: str, module: str, row: int, column: int) -> bool:
    """Every module meets every recipe where it is cut, on 2 ranks or on 4; on several axes in turns."""
    if mesh == "tp 1":
        return row == column % len(MODULES)
    if len(MESHES[mesh]) > 1:
        return (row + column + list(MESHES).index(mesh)) % len(ALIKE_ON_DATA) == 0
    if module == "TransformerLayer":  # of 2 groups of keys
        return mesh == "tp 2"
    return ((row + column) % 3 == 2) == (mesh == "tp 4")


def covering(mesh: str) -> list[Case]:
    """Cases of one mesh, see `kept`; sequence parallelism and births alternate."""
    recipes = ["bf16", *RECIPES] if len(MESHES[mesh]) == 1 else list(ALIKE_ON_DATA)
    cases = []
    for (row, module), (column, recipe) in itertools.product(enumerate(MODULES), enumerate(recipes)):
        if kept(mesh, module, row, column):
            sequence, meta = (row + column // 2) % 2 == 0, row % 3 != 0
            cases.append(Case(module, recipe, mesh, sequence, "meta" if meta else "direct"))
    return cases


@pytest.mark.parametrize(
    ("mesh", "third"),
    [
        ("tp 1", None),
        ("tp 2", True),
        *(pytest.param(mesh, False if mesh == "tp 2" else None, marks=pytest.mark.exhaustive) for mesh in MESHES
          if mesh != "tp 1"),
    ],
)  # fmt: skip
def test_modules_are_those_of_one_process(mesh: str, third: bool | None, show: Callable[[str], None]) -> None:
    """1, 2 and 4 ranks: births bitwise, steps within the bounds above; a third of the cases in `make test`."""
    cases = covering(mesh)
    if third is not None:
        cases = [case for number, case in enumerate(cases) if (number % 3 == 0) == third]
    lines, wrong = [], []
    for case, results in zip(cases, zip(*run_ranks(cases[0].ranks, table, cases), strict=True), strict=True):
        # rank 0 alone rounds NVFP4's gradients with the words of one process
        (unequal, worst, where), *others = results
        unequal = sum((other[0] for other in others), unequal)
        bound = ORDER_OF_SUMS if case.recipe == "bf16" or case.module in LINEARS else ONE_CODE
        fits = not unequal and worst <= bound
        sequence = "sequence" if case.sequence_parallel else "-"
        born = "equal" if not unequal else "DIFFER"
        off = f"{worst:.1e}  {'ok' if fits else 'WRONG'}"
        lines.append(f"{mesh:<28}{case.module:<22}{case.recipe:<18}{sequence:<10}{born:<8}{off}")
        if not fits:
            wrong.append((case, unequal, worst, where))
    head = f"{'mesh':<28}{'module':<22}{'recipe':<18}{'parallel':<10}{'born':<8}off"
    show("\n".join([head, *lines]))
    assert not wrong


def test_every_pair_is_tried() -> None:
    """Of module and recipe, module and mesh, recipe and sequence parallelism."""
    cases = [case for mesh in MESHES for case in covering(mesh)]
    cut = {(case.module, case.recipe) for case in cases if case.mesh in ("tp 2", "tp 4")}
    assert cut == set(itertools.product(MODULES, ["bf16", *RECIPES]))
    several = {(case.module, case.recipe) for case in cases if len(MESHES[case.mesh]) > 1}
    assert several == set(itertools.product(MODULES, ALIKE_ON_DATA))
    missing = set(itertools.product(MODULES, MESHES)) - {(case.module, case.mesh) for case in cases}
    assert missing == {("TransformerLayer", "tp 4")}
    assert len({(case.recipe, case.sequence_parallel) for case in cases}) == 2 * (len(RECIPES) + 1)
    assert len({(case.mesh, case.sequence_parallel) for case in cases}) == 2 * len(MESHES)
    assert len({(case.module, case.sequence_parallel) for case in cases}) == 2 * len(MODULES)


RECOMPUTING = ("LayerNormMLP gelu", "LayerNormMLP swiglu", "TransformerLayer")


@pytest.mark.parametrize(
    ("mesh", "half"),
    [
        ("tp 2", None),
        *(pytest.param(*cell, marks=pytest.mark.exhaustive) for cell in (("tp 1", 0), ("tp 2", 0), ("tp 2", 1))),
    ],
)
def test_a_recomputed_activation_changes_no_bit(mesh: str, half: int | None) -> None:
    """1 and 2 ranks, these with sequence parallelism in turns: what backward quantizes again has the scale of all
    ranks. Without a half, each module with one recipe."""
    recipes = ("delayed", "block", "nvfp4")
    cases = [
        Case(module, recipe, mesh, mesh != "tp 1" and (i + j) % 2 == (half or 0))
        for (i, module), (j, recipe) in itertools.product(enumerate(RECOMPUTING), enumerate(recipes))
        if half is not None or (i + j) % 3 == 1
    ]
    for results in run_ranks(cases[0].ranks, recomputed, cases):
        for case, (differing, fewer_bytes) in zip(cases, results, strict=True):
            assert not differing, (case, differing)
            assert fewer_bytes > 0, case


def message(function: object) -> str:
    try:
        function()  # type: ignore[operator]
    except ConfigurationError as error:
        return str(error)
    return "nothing was raised"


def refusals() -> list[str]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    tp = mesh["tp"]
    on_tp = {"tp_mesh": tp, "device": "cpu"}
    sharded = torch.distributed.fsdp.fully_shard(qs.Linear(HIDDEN, FFN, parallel_mode="column"), mesh=mesh["dp"])
    placed = qs.Linear(HIDDEN, FFN, parallel_mode="column", **on_tp)
    rows = qs.Linear(HIDDEN, FFN, parallel_mode="column", sequence_parallel=True, **on_tp)
    scattering = qs.Linear(HIDDEN // 2, FFN, parallel_mode="row", sequence_parallel=True, **on_tp)
    with qs.quantized_model_init(recipe="nvfp4"):
        odd = [lambda: qs.Linear(2 * 9, 8, parallel_mode="row", **on_tp)]
        odd_message = message(odd[0])
    by_group = qs.TransformerLayer(HIDDEN, FFN, 4, set_parallel_mode=True, tp_size=2, device="cpu")
    by_group.set_tensor_parallel_group(mesh.get_group("tp"))
    alone = qs.RMSNorm(HIDDEN, sequence_parallel=True, device="cpu")
    whole = DTensor.from_local(torch.ones(3, HIDDEN), tp, [Replicate()])
    assert rows is not None
    return [
        message(lambda: qs.LayerNormMLP(HIDDEN, FFN + 1, set_parallel_mode=True, **on_tp)),
        message(lambda: qs.MultiheadAttention(HIDDEN, 4, num_gqa_groups=1, set_parallel_mode=True, **on_tp)),
        message(lambda: qs.Linear(HIDDEN, FFN, parallel_mode="column", tp_mesh=mesh)),
        message(lambda: sharded.set_device_mesh(tp)),
        message(lambda: placed.set_device_mesh(mesh["dp"])),
        message(lambda: scattering(torch.ones(7, 3, HIDDEN // 4))),
        odd_message,
        message(lambda: qs.LayerNormLinear(HIDDEN, FFN, parallel_mode="row", **on_tp)),
        message(lambda: alone(torch.ones(3, HIDDEN))),
        message(lambda: placed(whole)),
        message(lambda: by_group.set_device_mesh(tp)),
        message(lambda: scattering(torch.ones(8, 3, HIDDEN // 2))),
    ]


WANTED = [
    "LayerNormMLP.fc1_weight [113, 80]: tensor parallelism needs a multiple of 2 in dim 0",
    "tp_size 2 must divide num_attention_heads and num_gqa_groups; choose a divisor of 1",
    "the tensor-parallel mesh has ('dp', 'tp')",
    "call it once",
    "call it once",
    "cannot divide the 7 rows",
    "9",
    "a norm needs all features; use 'column'",
    "RMSNorm(sequence_parallel=True) needs tp_mesh or tp_group",
    "the input is a DTensor [3, 80] of (Replicate(),)",
    "nothing was raised",
    "Linear.weight: an input [8, 3, 40] must have the 20 features that the weight takes here, its part of them over 2",
]


def test_refused_on_every_rank() -> None:
    """4 ranks: one sentence with the numbers, on each."""
    for messages in run_ranks(4, refusals):
        for found, wanted in zip(messages, WANTED, strict=True):
            assert wanted in found, messages


def delayed(over: str | None) -> list[torch.Tensor]:
    """Third step of a column-parallel layer whose rows have other sizes on each rank; amaxes reduced over one axis."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    with qs.quantized_model_init(enabled=False, recipe="delayed"):
        layer = qs.Linear(64, 64, parallel_mode="column", sequence_parallel=True, tp_mesh=mesh["tp"], device="cpu")
    x = torch.randn(8, 64) * torch.tensor([1.0, 50.0]).repeat_interleave(4)[:, None]
    for _ in range(3):
        layer.zero_grad()
        with qs.autocast(recipe="delayed", amax_reduction_group=None if over is None else mesh[over].get_group()):
            y = layer(x.chunk(2)[mesh.get_local_rank("tp")])
        y.square().sum().backward()
    return [
        y.detach(),
        layer.weight.grad.to_local(),
        layer.input_amax_history,
        layer.weight_state("weight")["amax_history"],
    ]


def test_what_is_cut_has_one_delayed_scale() -> None:
    """4 ranks, with the same tokens on both data-parallel ones: over dp alone the scales of all ranks."""
    for everywhere, over_dp in zip(run_ranks(4, delayed, None), run_ranks(4, delayed, "dp"), strict=True):
        assert all(map(torch.equal, everywhere, over_dp))


LATE = {**BLOCKS, "RMSNorm": lambda **options: qs.RMSNorm(HIDDEN, sequence_parallel=True, **options)}


def late() -> list[str]:
    """Differences of modules that got their mesh after construction, by a mesh or by a group."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    wrong = []
    for name, make in LATE.items():
        with qs.quantized_model_init(recipe="block"):
            modules = []
            for options in ({"tp_mesh": mesh["tp"]}, {"tp_group": mesh.get_group("tp")}, {}, {"tp_size": 2}):
                torch.manual_seed(0)
                modules.append(make(**options, device="cpu"))
        modules[2].set_device_mesh(mesh["tp"], weight_mesh=mesh["tp"])
        modules[3].set_tensor_parallel_group(mesh.get_group("tp"))
        modules[1].set_device_mesh(mesh["tp"])
        x = torch.randn(4, 2, HIDDEN)
        with qs.autocast(recipe="block"):
            outputs = [module(x) for module in modules]
        for module, y in zip(modules, outputs, strict=True):
            same = all(
                torch.equal(a.to_local(), b.to_local())
                for a, b in zip(modules[0].state_dict().values(), module.state_dict().values(), strict=True)
                if hasattr(a, "to_local")
            )
            if not same or not torch.equal(y, outputs[0]):
                wrong.append(name)
    return wrong


def test_a_mesh_or_a_group_at_construction_or_later() -> None:
    """2 ranks: the same pieces and outputs."""
    assert run_ranks(2, late) == [[], []]


def dropped(sequence_parallel: bool) -> tuple[bool, float]:
    """Whether ranks dropped what one process with that key drops, and how much."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    from quantshard.distributed import tensor_parallel

    tp = tensor_parallel.TensorParallel.of(mesh.get_group(), None, sequence_parallel)
    x = torch.ones(40, 3, 50)
    torch.manual_seed(5)
    y = tensor_parallel.dropout(x.chunk(2)[tp.rank] if sequence_parallel else x, 0.3, tp)
    whole = tensor_parallel.join_rows(y, tp) if sequence_parallel else y
    torch.manual_seed(5)
    wanted = tensor_parallel.dropout(x, 0.3, tensor_parallel.TensorParallel.of(mesh.get_group()))
    return torch.equal(whole, wanted), float((whole == 0).float().mean())


def test_dropout_belongs_to_the_whole_activation() -> None:
    """2 ranks: with the tokens spread or not; 6000 elements, a share of 0.3 within 4 standard errors."""
    for sequence_parallel in (False, True):
        for same, share in run_ranks(2, dropped, sequence_parallel):
            assert same
            assert abs(share - 0.3) <= 4 * (0.3 * 0.7 / 6000) ** 0.5


class Whole(nn.Module):
    """A user's attention: each rank has all of it."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = qs.Linear(64, 64, device="cpu")

    def set_device_mesh(self, *_: object) -> None:
        pass

    def forward(self, x: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
        out: torch.Tensor = self.proj(x)
        return out


def dropped_behind_another_module() -> tuple[str, str]:
    """With generators in step, and not."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    torch.manual_seed(0)
    options = {"set_parallel_mode": True, "tp_size": 2, "device": "cpu"}
    layer = qs.TransformerLayer(64, 128, 4, hidden_dropout=0.5, **options)
    layer.self_attention = Whole()
    layer.set_device_mesh(mesh)
    torch.manual_seed(1)
    found = sha(layer(torch.ones(8, 2, 64)))
    torch.manual_seed(dist.get_rank())
    try:
        layer(torch.ones(8, 2, 64))
    except RankMismatchError as error:
        return found, str(error)
    return found, "no error"


def test_dropout_behind_a_module_that_is_not_cut() -> None:
    """2 ranks drop the same elements, or say that they would not."""
    (one, told), (other, also_told) = run_ranks(2, dropped_behind_another_module)
    assert one == other and "the random key" in told and "the random key" in also_told
