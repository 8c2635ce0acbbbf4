"""Scales that are no powers of two are not loaded into weights whose recipe wants such; the other way round they are.

The format tag is the same for both, so the values tell.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import quantshard as qs
from quantshard import checkpoints, numerics
from quantshard.checkpoints import Manager
from quantshard.checkpoints.disk.manifest import DamagedError
from quantshard.errors import CheckpointError
from quantshard.optimizers import FusedAdam
from quantshard.recipe import Float8BlockScaling, Float8CurrentScaling, Float8RowwiseScaling, Recipe
from quantshard.tensor import components
from tests.distributed.models import RECIPES, Case, bits, build, sha, whole
from tests.distributed.pool import run_ranks
from tests.tensor.test_tensor import differing

PAIRS: dict[str, tuple[Recipe, Recipe]] = {
    "block": (Float8BlockScaling(use_f32_scales=True), Float8BlockScaling(use_f32_scales=False)),
    "current": (Float8CurrentScaling(), Float8CurrentScaling(use_power_2_scales=True)),
    "rowwise": (Float8RowwiseScaling(use_power_2_scales=False), Float8RowwiseScaling()),
}
"""Of each the recipe with scales of any value, and that with powers of two."""


def built(recipe: Recipe, seed: int = 3) -> tuple[nn.Sequential, FusedAdam]:
    torch.manual_seed(seed)
    with qs.quantized_model_init(recipe=recipe):
        model = nn.Sequential(*[qs.Linear(130, 130, params_dtype=torch.bfloat16) for _ in range(2)])
    return model, FusedAdam(model.named_parameters())


@pytest.mark.parametrize("kind", PAIRS)
def test_it_is_refused_by_name(kind: str, tmp_path: Path) -> None:
    """Nothing is written, and no older checkpoint is taken in its place."""
    there, here = PAIRS[kind]
    with Manager(tmp_path) as manager:
        for step in (1, 2):
            manager.save(step, *built(there))
        model, optimizer = built(here, seed=4)
        before = {key: value.clone() for key, value in model.state_dict().items()}
        says = r"step-000002 is of another recipe: 0\.weight is .* here|in this model; .* requantize=True"
        with pytest.raises(CheckpointError, match=says) as caught:
            manager.restore(model, optimizer)
    assert "(power_of_two=True)" in str(caught.value) and not isinstance(caught.value, DamagedError)
    assert not differing(before, model.state_dict())


@pytest.mark.parametrize("kind", PAIRS)
def test_a_state_dict_is_refused_by_name(kind: str) -> None:
    there, here = PAIRS[kind]
    (source, _), (model, _) = built(there), built(here, seed=4)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    says = r"0\.weight_scale_inv: the state dict holds scales that are not powers of two, but .*power_of_two=True"
    with pytest.raises(RuntimeError, match=says):
        model.load_state_dict(source.state_dict())
    with pytest.raises(CheckpointError, match=says):
        checkpoints.load_from_rank0(model, source.state_dict())
    assert not differing(before, model.state_dict())


def test_a_later_weight_is_found_before_the_first_is_written() -> None:
    there, here = PAIRS["block"]
    (sent, _), (source, _), (model, _) = built(here), built(there), built(here, seed=4)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    sent = {key: value for key, value in sent.state_dict().items() if key.startswith("0.")} | {
        key: value for key, value in source.state_dict().items() if key.startswith("1.")
    }
    with pytest.raises(CheckpointError, match=r"load_from_rank0: 1\.weight_scale_inv: .* not powers of two"):
        checkpoints.load_from_rank0(model, sent)
    assert not differing(before, model.state_dict())


@pytest.mark.parametrize("kind", PAIRS)
def test_powers_of_two_fit_any_recipe(kind: str, tmp_path: Path) -> None:
    there, here = PAIRS[kind]
    source, states = built(here)
    checkpoints.save(tmp_path / "c", source, states)
    for recipe in (there, here):
        model, optimizer = built(recipe, seed=4)
        checkpoints.load(tmp_path / "c", model, optimizer)
        assert not differing(source.state_dict(), model.state_dict())
        model.load_state_dict(source.state_dict())


@pytest.mark.parametrize("kind", PAIRS)
def test_it_is_quantized_anew_if_asked_to(kind: str, tmp_path: Path) -> None:
    there, here = PAIRS[kind]
    source, states = built(there)
    checkpoints.save(tmp_path / "c", source, states)
    model, optimizer = built(here, seed=4)
    with pytest.warns(match=r"2 from (\w+) to \1 \(power_of_two=True\) by their masters"):
        checkpoints.load(tmp_path / "c", model, optimizer, requantize=True)
    assert numerics.are_powers_of_two(model.state_dict()["0.weight_scale_inv"])
    master = optimizer.get_unscaled_state(model[0].weight, "master_param")
    cell = components.storage_of(model[0].weight).spec
    assert not differing(
        components.storage_of(model[0].weight).components, numerics.quantize(master, cell.format, cell.scaling)
    )


def test_which_numbers_are_powers_of_two() -> None:
    for exponent in (-149, -127, -126, -3, 0, 5, 127):
        assert numerics.are_powers_of_two(torch.tensor([2.0**exponent, 0.0]))
        assert not numerics.are_powers_of_two(torch.tensor([1.0, 3 * 2.0 ** max(exponent - 2, -149)]))
    assert not numerics.are_powers_of_two(torch.tensor(float("inf")))


def refusals(folder: str) -> list[str]:
    """What each of two loads says of a checkpoint of which one block on the last rank is another's."""
    case = Case("block", (3,), init="eager", shapes=((130, 384), (384, 7)))
    source = build(case)
    scale: Tensor = source.state_dict()["0.weight_scale_inv"]
    scale = scale.to_local() if hasattr(scale, "to_local") else scale
    if torch.distributed.get_rank() == 2:
        scale[-1, -1] *= 1.5
    checkpoints.save(f"{folder}/c", source, None)
    model, found = build(replace(case, seed=8)), []
    before = bits(model)
    try:
        checkpoints.load(f"{folder}/c", model)
    except CheckpointError as error:
        found.append(str(error))
    assert bits(model) == before
    checkpoints.load(f"{folder}/c", model, requantize=True, lossy=True)
    now = whole(model.state_dict())
    assert all(numerics.are_powers_of_two(now[f"{n}.weight_scale_inv"]) for n in (0, 1))
    assert sha(now["1.weight"]) == sha(whole(source.state_dict())["1.weight"])  # loaded as it is
    return found


@pytest.mark.distributed
def test_all_ranks_refuse_what_one_of_them_would_load(tmp_path: Path) -> None:
    """3 ranks."""
    assert RECIPES["block"] == "block"  # whose scales are powers of two
    (said,), *others = run_ranks(3, refusals, str(tmp_path))
    assert "c is of another recipe: 0.weight is stored as" in said
    assert others == [[said], [said]]
