"""Converted mixtures of transformers under FSDP2 and expert parallelism, beside one process and BF16."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import quantshard as qs
from quantshard.checkpoints.comparison import compare
from quantshard.checkpoints.conversions import RequantizedWarning
from tests.distributed.experts import hashes, merged
from tests.distributed.pool import run_ranks

pytest.importorskip("transformers", "5.0")

from transformers import AutoModelForCausalLM

from tests.interop.conversion.mixtures import mixture, stacks, tokens

pytestmark = pytest.mark.distributed

STEPS = 5


def built(name: str, recipe: Any, ep: int, seed: int = 0, keep: bool = False) -> Any:
    """A model under FSDP2 on all ranks, with its experts distributed over `ep` of them."""
    model = mixture(name, seed)
    if recipe != "bf16":
        qs.convert(model, recipe, preserve_high_precision_init_val=keep)
    mesh = init_device_mesh("cpu", (dist.get_world_size() // ep, ep), mesh_dim_names=("dp", "ep"))
    every = mesh["dp", "ep"]._flatten("every")
    if ep > 1:
        qs.distribute_experts(model, mesh["ep"])
    for layer in model.model.layers:
        if ep > 1:
            fully_shard(layer.mlp.experts, mesh=mesh["dp"])
        fully_shard(layer, mesh=every)
    fully_shard(model, mesh=every)
    return model


def state(model: Any, optimizer: Any) -> dict[str, str]:
    names = {param: name for name, param in model.named_parameters()}
    found = dict(model.state_dict())
    for param, entries in optimizer.state.items():
        found |= {f"{names[param]}.{key}": value for key, value in entries.items()}
    return merged(hashes(found))


def optimizer_of(model: Any, kind: str) -> Any:
    if kind == "Muon":
        return qs.optimizers.Muon(qs.optimizers.muon_groups(model, adamw={"lr": 1e-2}), lr=0.02)
    return qs.optimizers.FusedAdam(model.parameters(), lr=1e-2)


def train(name: str, recipe: str, ep: int, folder: str | None, kind: str) -> tuple[list[float], int, dict[str, str]]:
    """Losses of five steps, how many stacks changed, and hashes of all that is saved."""
    model = built(name, recipe, ep)
    before = hashes({key: param.detach() for key, param in model.state_dict().items() if key in stacks(model)})
    optimizer = optimizer_of(model, kind)
    losses, ranks = [], dist.get_world_size()
    ids = tokens(0, 12)[dist.get_rank() :: ranks]
    for _ in range(STEPS):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        qs.optimizers.clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(total.item() / ranks)
    after = hashes({key: param.detach() for key, param in model.state_dict().items() if key in before})
    if folder is not None:
        qs.checkpoints.save(folder, model, optimizer)
    return losses, sum(before[key] != after[key] for key in before), state(model, optimizer)


@functools.cache
def losses_in_bf16(name: str, kind: str) -> list[float]:
    losses: list[float] = run_ranks(2, train, name, "bf16", 1, None, kind)[0][0]
    return losses


def loaded(name: str, recipe: str, ep: int, folder: str, kind: str) -> dict[str, str]:
    model = built(name, recipe, ep, seed=1)
    optimizer = optimizer_of(model, kind)
    qs.checkpoints.load(folder, model, optimizer)
    return state(model, optimizer)


@pytest.mark.parametrize(
    ("name", "recipe", "ep", "kind"),
    [
        pytest.param("Qwen3-MoE", "current", 2, "Adam", marks=pytest.mark.exhaustive),
        ("gpt-oss", "mxfp8", 2, "Adam"),
        ("gpt-oss", "current", 1, "Muon"),
        ("Qwen3-MoE", "nvfp4", 1, "Adam"),
        ("Qwen3-MoE", "nvfp4-weights", 2, "Adam"),
    ],
)
def test_five_steps_on_two_processes(name: str, recipe: str, ep: int, kind: str, tmp_path: Path) -> None:
    """Losses near BF16's; every stack trains; saved on 2 processes and loaded on 1, 2 and 3 with equal bits."""
    folder = str(tmp_path / "saved")
    (losses, changed, saved), *others = run_ranks(2, train, name, recipe, ep, folder, kind)
    assert all(each == (losses, changed, saved) for each in others)
    assert changed == 4 and losses[-1] < losses[0]
    plain = losses_in_bf16(name, kind)
    # the first losses differ by the rounding of weights and activations, later ones also by the steps taken since
    assert abs(losses[0] - plain[0]) < 2**-5 and abs(losses[-1] - plain[-1]) < 2**-2
    for ranks, ep_loaded in ((1, 1), (2, 3 - ep), (3, 1)):
        for found in run_ranks(ranks, loaded, name, recipe, ep_loaded, folder, kind):
            assert found.keys() == saved.keys()
            assert [key for key in saved if found[key] != saved[key]] == [], (ranks, ep_loaded)


def test_expert_parallelism_changes_no_bit_of_the_first_loss() -> None:
    """MXFP8 scales blocks of a token, whichever other tokens an expert gets."""
    assert run_ranks(2, first_loss, 2) == run_ranks(2, first_loss, 1)


def first_loss(ep: int) -> float:
    ids = tokens(0, 12)[dist.get_rank() :: dist.get_world_size()]
    loss: float = built("Qwen3-MoE", "mxfp8", ep)(input_ids=ids, labels=ids).loss.item()
    return loss


def measured(ep: int) -> dict[tuple[str, str], dict[str, Any]]:
    """Statistics of a step that changes no weight."""
    model = built("Qwen3-MoE", "current", ep, keep=True)
    optimizer = qs.optimizers.FusedAdam(model.parameters(), lr=0.0)
    ids = tokens(0, 12)[dist.get_rank() :: dist.get_world_size()]
    with qs.Statistics(model, optimizer, every=1, saturation=1) as statistics:
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        statistics.step()
        (sample,) = statistics.close()
    return {(row.name, row.role): row.to_dict() for row in sample.rows if row.name.endswith("_proj")}


@pytest.mark.parametrize(("ranks", "ep"), [(2, 2), (3, 1)])
def test_statistics_of_stacks_have_the_numbers_of_one_process(ranks: int, ep: int) -> None:
    """Three ranks hold 2, 2 and 0 of four experts."""
    (wanted,), (found, *others) = run_ranks(1, measured, 1), run_ranks(ranks, measured, ep)
    assert all(rows == found for rows in others) and found.keys() == wanted.keys()
    assert len(found) == 4 * 3
    for place, row in wanted.items():
        if place[1] == "weight":
            # sums of squares in float64 are added in another order; gradients also depend on activations
            assert found[place].pop("sqnr_db") == pytest.approx(row.pop("sqnr_db"), rel=1e-9)
            assert found[place].pop("grad_norm") == pytest.approx(row.pop("grad_norm"), rel=0.05)
            assert found[place] == row
        else:
            # each rank scales its own rows of an expert
            assert found[place]["sqnr_db"] == pytest.approx(row["sqnr_db"], abs=1)
            # E5M2 rounds by up to 2**-3; FSDP2 divides gradients later, the exchange of tokens at once
            size = ranks // ep if place[1] == "grad_output" else 1
            assert found[place]["amax"] / size == pytest.approx(row["amax"], rel=0.2)


def saved_by_transformers(name: str, recipe: str, folder: str) -> None:
    """Gathered to rank 0, which writes."""
    model = built(name, recipe, 1)
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    entries = get_model_state_dict(model, options=options)
    if dist.get_rank() == 0:
        model.save_pretrained(folder, state_dict=entries)
        model.save_pretrained(f"{folder}-plain", state_dict=entries, layout="plain-bf16")


@pytest.mark.parametrize(("name", "recipe"), [("Qwen3-MoE", "current"), ("gpt-oss", "mxfp8")])
def test_sharded_mixtures_are_saved_by_transformers(name: str, recipe: str, tmp_path: Path) -> None:
    run_ranks(2, saved_by_transformers, name, recipe, str(tmp_path / "saved"))
    wanted = mixture(name)
    qs.convert(wanted, recipe)
    found, plain = (AutoModelForCausalLM.from_pretrained(tmp_path / folder) for folder in ("saved", "saved-plain"))
    for model in (found, plain):
        entries, expected = model.state_dict(), wanted.state_dict()
        assert entries.keys() == expected.keys()
        assert [key for key in expected if not torch.equal(entries[key], expected[key])] == []
        if model is found:
            qs.revert(wanted)


def loaded_in_high_precision(name: str, recipe: str, folder: str) -> dict[str, str]:
    """And, with the checkpoint of one process: loaded, saved again by all of these, and converted."""
    model = built(name, recipe, 1, seed=1)
    qs.checkpoints.load_high_precision(model, mixture(name).state_dict())
    values = state(model, qs.optimizers.FusedAdam(model.parameters()))
    qs.checkpoints.load(folder, model)
    qs.checkpoints.save(f"{folder}-{dist.get_world_size()}", model, None)
    for new in ("bf16", "nvfp4" if recipe != "nvfp4" else "current"):
        other = built(name, new, 1, seed=2)
        with pytest.warns(RequantizedWarning):
            qs.checkpoints.load(folder, other, requantize=True, lossy=True)
        values |= {f"{new}.{key}": value for key, value in merged(hashes(dict(other.state_dict()))).items()}
    return {key: value for key, value in values.items() if not key.endswith("_draws")}


@pytest.mark.parametrize(("name", "recipe"), [("Qwen3-MoE", "nvfp4"), ("gpt-oss", "current")])
def test_four_experts_on_three_ranks_have_the_bits_of_one(name: str, recipe: str, tmp_path: Path) -> None:
    """High-precision values, a checkpoint of one process and another recipe; what three save is equal to the first."""
    folder = str(tmp_path / "saved")
    model = mixture(name)
    qs.convert(model, recipe)
    qs.checkpoints.save(folder, model, None)
    (wanted,) = run_ranks(1, loaded_in_high_precision, name, recipe, folder)
    for found in run_ranks(3, loaded_in_high_precision, name, recipe, folder):
        assert [key for key in wanted | found if wanted.get(key) != found.get(key)] == []
    for ranks in (1, 3):
        assert compare(folder, f"{folder}-{ranks}").differences == ()


@pytest.mark.parametrize("ranks", [1, 3])
def test_recomputed_experts_fetch_the_copy_that_fsdp2_did_not_gather(ranks: int) -> None:
    """MXFP8 weights in two copies: backward gathers one, and recomputing forward reads the other."""
    assert run_ranks(ranks, gradients, True) == run_ranks(ranks, gradients, False)


def gradients(recomputes: bool) -> dict[str, str]:
    model = built("Qwen3-MoE", qs.recipe.MXFP8BlockScaling(enable_2d_quantization=False), 1).train()
    if recomputes:
        for layer in model.model.layers:
            layer.forward = functools.partial(qs.checkpoint, layer.forward)
    ids = tokens(0, 12)[dist.get_rank() :: dist.get_world_size()]
    model(input_ids=ids, labels=ids).loss.backward()
    return hashes({name: param.grad for name, param in model.named_parameters()})
