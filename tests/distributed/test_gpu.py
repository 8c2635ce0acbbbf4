"""The same on GPUs over NCCL. Skipped without a GPU; mesh cases run where there is one for each rank."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from quantshard import numerics
from quantshard.formats import FORMATS, Scaling
from tests.distributed.models import MESHES, RECIPES, Case, bits
from tests.distributed.pool import run_ranks
from tests.distributed.test_matrix import first_run, reference, second_run
from tests.distributed.test_reshard import load

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal bits; of NaN, which a GPU spells with other bits, that both are NaN."""
    if a.is_floating_point():
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
    assert torch.equal(numerics.normal(words.cuda()).cpu(), numerics.normal(words))


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
            resumed = run_ranks(case.ranks, second_run, Case(recipe, shape, init, seed=99, device="cuda"), path)
            for (gathered, born, saved, losses), (loaded, again) in zip(ran, resumed, strict=True):
                assert born == whole_state, (mesh, init)
                assert gathered, (mesh, init)
                assert gathered.items() <= whole.items(), (mesh, init)
                assert loaded == saved, (mesh, init)
                assert again == losses, (mesh, init)
            if init == "meta":
                # and on the CPU, from the same files
                [(on_cpu, _)] = run_ranks(1, load, Case(recipe, (1,), seed=99), path)
                assert on_cpu == ran[0][2], mesh


def test_bits_are_of_the_state_dict() -> None:
    """1 process: the helper above sees every key (a guard against an empty comparison)."""
    assert bits(torch.nn.Linear(2, 2)).keys() == {"weight", "bias"}
