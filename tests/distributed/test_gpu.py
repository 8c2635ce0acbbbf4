"""The same on GPUs over NCCL. Skipped without a GPU; mesh cases run where there is one for each rank."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import quantshard as qs
from quantshard import numerics
from quantshard.formats import FORMATS, Scaling
from quantshard.numerics import distributions
from quantshard.optimizers import FusedAdam
from tests.distributed import parallel, test_parallel
from tests.distributed.models import MESHES, RECIPES, Case, bits, build, mesh_of, optimizer_of, train
from tests.distributed.pool import run_ranks
from tests.distributed.test_fused_adam import MASTERS, MOMENTS as OPTIMIZER_MOMENTS
from tests.distributed.test_manager import saved_beside_training
from tests.distributed.test_matrix import first_run, reference, second_run
from tests.distributed.test_recompute import runs as recomputed

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal bits; of NaN, which a GPU spells with other bits, that both are NaN."""
    if a.is_floating_point():
        a, b = a.float(), b.float()
        a, b = (torch.where(torch.isnan(t), torch.full_like(t, torch.nan), t).view(torch.int32) for t in (a, b))
    return torch.equal(a, b)


@pytest.mark.parametrize("name", FORMATS)
def test_the_oracle_gives_the_same_bits_as_on_a_cpu(name: str) -> None:
    """1 process: quantizing and dequantizing, zeros, infinities, NaN and tiny values included."""
    torch.manual_seed(0)
    values = torch.randn(300, 257) * torch.randn(300, 1).exp2()
    values[0, :5] = torch.tensor([0.0, float("inf"), float("nan"), 1e-40, -0.0])
    for x in (values, values[1:].clone(), torch.zeros(33, 65), values.bfloat16()):
        on_cpu = numerics.quantize(x, FORMATS[name], Scaling())
        on_gpu = numerics.quantize(x.cuda(), FORMATS[name], Scaling())
        for part, expected in on_cpu.items():
            assert same_bits(on_gpu[part].cpu(), expected), part
        for copy in FORMATS[name].copies.values():
            here = numerics.dequantize(copy, on_cpu, (x.shape[0], x.shape[1]))
            there = numerics.dequantize(copy, on_gpu, (x.shape[0], x.shape[1])).cpu()
            assert same_bits(there, here)


def test_random_words_and_normals_are_those_of_a_cpu() -> None:
    """1 process."""
    words = numerics.random_words(12345678901234567, 3, 1, (257, 129))
    assert torch.equal(numerics.random_words(12345678901234567, 3, 1, (257, 129), device="cuda").cpu(), words)
    assert torch.equal(distributions.normal(words.cuda()).cpu(), distributions.normal(words))


@pytest.mark.parametrize("recipe", RECIPES)
def test_born_gathered_saved_and_resumed(recipe: str, tmp_path: Path) -> None:
    """1 to 4 ranks: weights are those of one CPU process; a resumed run equals the one that never stopped."""
    [(whole, whole_state)] = run_ranks(1, reference, Case(recipe, init="direct"))
    for mesh, shape in MESHES.items():
        case = Case(recipe, shape, device="cuda")
        if case.ranks > torch.cuda.device_count():
            continue
        for init in ("meta", "direct"):
            path = str(tmp_path / f"{mesh} {init}")
            ran = run_ranks(case.ranks, first_run, Case(recipe, shape, init, device="cuda"), path)
            resumed = run_ranks(case.ranks, second_run, Case(recipe, shape, init, device="cuda"), path)
            for (gathered, born, saved, losses), (loaded, again) in zip(ran, resumed, strict=True):
                assert born == whole_state, (mesh, init)
                assert gathered, (mesh, init)
                assert gathered.items() <= whole.items(), (mesh, init)
                assert loaded == saved, (mesh, init)
                assert again == losses, (mesh, init)
            if init == "meta":
                # and on the CPU, from the same files
                [(on_cpu, _)] = run_ranks(1, second_run, Case(recipe, (1,)), path)
                assert on_cpu == ran[0][2], mesh


def run_once(options: dict[str, Any], recipe: str, device: str, capture: bool = False) -> dict[str, str]:
    """Bits after three FusedAdam steps with the same gradients, the last two replayed from a CUDA graph if asked."""
    torch.manual_seed(7)
    with qs.quantized_model_init(recipe=RECIPES[recipe]):
        layers = [qs.Linear(a, b, params_dtype=torch.bfloat16, device="cpu") for a, b in ((70, 131), (131, 3))]
    model = torch.nn.Sequential(*layers, torch.nn.Linear(3, 7, dtype=torch.bfloat16)).to(device)
    optimizer = FusedAdam(model.parameters(), lr=1e-3, weight_decay=0.1, **options)
    for param in model.parameters():
        param.grad = torch.zeros(param.shape, dtype=param.dtype, device=device)
    graph = torch.cuda.CUDAGraph() if capture else None
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        for param in model.parameters():
            param.grad.copy_(torch.randn(param.shape, generator=generator))
        if graph is None or step == 0:
            optimizer.step()
            continue
        if step == 1:
            with torch.cuda.graph(graph):
                optimizer.step()
        graph.replay()
    return bits(model, optimizer)


@pytest.mark.parametrize("moments", OPTIMIZER_MOMENTS)
@pytest.mark.parametrize("masters", MASTERS)
def test_every_option_of_fused_adam_gives_the_bits_of_a_cpu(masters: str, moments: str) -> None:
    """1 process."""
    dtype = OPTIMIZER_MOMENTS[moments]
    options = {**MASTERS[masters], "exp_avg_dtype": dtype, "exp_avg_sq_dtype": dtype}
    for recipe in RECIPES:
        assert run_once(options, recipe, "cuda") == run_once(options, recipe, "cpu"), recipe


@pytest.mark.parametrize("moments", OPTIMIZER_MOMENTS)
@pytest.mark.parametrize("masters", [name for name in MASTERS if name != "none"])
def test_capturable_steps_are_replayed_from_a_graph(masters: str, moments: str) -> None:
    """1 process: the bits of steps that are not captured."""
    dtype = OPTIMIZER_MOMENTS[moments]
    options = {**MASTERS[masters], "exp_avg_dtype": dtype, "exp_avg_sq_dtype": dtype}
    for recipe in RECIPES:
        eager = run_once(options, recipe, "cuda")
        assert run_once({**options, "capturable": True}, recipe, "cuda") == eager, recipe
        assert run_once({**options, "capturable": True}, recipe, "cuda", capture=True) == eager, recipe


def test_recomputation() -> None:
    """1 to 3 ranks."""
    for ranks in range(1, min(torch.cuda.device_count(), 3) + 1):
        for found in run_ranks(ranks, recomputed, ranks, "cuda", ("delayed",), True):
            assert set(found.values()) == {"equal"}, {key: word for key, word in found.items() if word != "equal"}


def offloaded(recipe: str, policy: OffloadPolicy) -> tuple[list[float], dict[str, str]]:
    case = Case(recipe, (dist.get_world_size(),), init="direct", device="cuda")
    model = build(replace(case, mesh=None, device="cpu" if isinstance(policy, CPUOffloadPolicy) else "cuda"))
    mesh = mesh_of(case)
    for layer in model:
        fully_shard(layer, mesh=mesh, offload_policy=policy)
    fully_shard(model, mesh=mesh, offload_policy=policy)
    optimizer = optimizer_of(model, case)
    return train(model, optimizer, case, 0, 3), bits(model, optimizer)


@pytest.mark.parametrize("recipe", RECIPES)
def test_weights_offloaded_to_pinned_memory(recipe: str) -> None:
    """1 to 4 ranks: the bits of the run whose weights stay on the GPUs."""
    for ranks in range(1, min(torch.cuda.device_count(), 4) + 1):
        stayed = run_ranks(ranks, offloaded, recipe, OffloadPolicy())
        assert run_ranks(ranks, offloaded, recipe, CPUOffloadPolicy(pin_memory=True)) == stayed


def replicas(recipe: str) -> dict[str, str]:
    case = Case(recipe, None, device="cuda")
    model = build(case)
    qs.check_replicas(model)
    wrapped = DistributedDataParallel(model, init_sync=False)
    optimizer = optimizer_of(model, case)
    train(wrapped, optimizer, case, 0, 3)
    return bits(model, optimizer)


@pytest.mark.parametrize("recipe", RECIPES)
def test_replicas_stay_equal_under_ddp(recipe: str) -> None:
    """2 ranks."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    one, other = run_ranks(2, replicas, recipe)
    assert one == other


def test_operands_in_pieces() -> None:
    """1 to 4 ranks: of every cell, the bits and the collectives of the whole; sums around GEMMs that are cut."""
    pieces = [replace(piece, device="cuda") for piece in test_parallel.ALL_PIECES]
    for ranks in range(1, min(torch.cuda.device_count(), 4) + 1):
        for wrong in run_ranks(ranks, parallel.quantized_in_pieces, pieces):
            assert not wrong, "\n".join(wrong[:20])
        for wrong in run_ranks(ranks, parallel.layers_cut, [1, 3, 0], "cuda"):
            assert not wrong, "\n".join(wrong)
        test_parallel.check_operations(
            run_ranks(ranks, parallel.one_by_one, torch.bfloat16, 12, "cuda"), 12 * 2 * 3 * 2
        )


def test_bits_are_of_the_state_dict() -> None:
    """1 process: the helper above sees every key (a guard against an empty comparison)."""
    assert bits(torch.nn.Linear(2, 2)).keys() == {"weight", "bias"}


@pytest.mark.parametrize("recipe", RECIPES)
def test_saved_beside_training(recipe: str, tmp_path: Path) -> None:
    """1 and 2 ranks: staged in pinned memory by a thread, it is the state at the call."""
    for ranks in range(1, 1 + min(2, torch.cuda.device_count())):
        case = Case(recipe, (ranks,), device="cuda")
        for found in run_ranks(ranks, saved_beside_training, case, str(tmp_path / str(ranks))):
            assert found == [[], True, True, 2, True, True]
