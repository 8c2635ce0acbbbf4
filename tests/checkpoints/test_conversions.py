"""Loading into a model of another recipe: the weights are what one process makes of the masters, or it is refused."""

from __future__ import annotations

import itertools
import re
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import quantshard as qs
from quantshard import checkpoints, numerics
from quantshard.checkpoints.conversions import RequantizedWarning
from quantshard.errors import CheckpointError
from quantshard.optimizers import FusedAdam
from quantshard.recipe import DelayedScaling, Recipe
from quantshard.tensor import components
from quantshard.tensor.parameter_state import AMAX_HISTORY, RNG_DRAWS, RNG_KEY
from tests.checkpoints.small import built, written
from tests.distributed.models import RECIPES, Case, bits, mesh_of, optimizer_of
from tests.distributed.pool import run_ranks
from tests.tensor.test_tensor import differing, same

PAIRS = [
    *((one, other) for one, other in zip(RECIPES, [*list(RECIPES)[1:], "delayed"], strict=True)),
    (None, "nvfp4"),
    ("nvfp4", None),
    ("mxfp8", "nvfp4"),
]


def load_loudly(path: Path, *args: Any, **options: Any) -> str:
    """Load, and return what was warned of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        checkpoints.load(path, *args, requantize=True, **options)
    told = [str(w.message) for w in caught if w.category is RequantizedWarning]
    assert len(told) <= 1
    return told[0] if told else ""


def check(model: nn.Sequential, masters: dict[str, torch.Tensor]) -> None:
    """Weights are the nearest quantizations of these masters, on their own amaxes."""
    for name, master in masters.items():
        param = model.get_parameter(name)
        if components.quantized_local(param) is None:
            assert same(param.detach(), master.to(param.dtype))
            continue
        storage = components.storage_of(param)
        assert not differing(storage.components, numerics.quantize(master, storage.spec.format, storage.spec.scaling))


def masters_of(model: nn.Sequential, optimizer: FusedAdam) -> dict[str, torch.Tensor]:
    names = ("0.weight", "1.weight")
    return {n: optimizer.get_unscaled_state(model.get_parameter(n), "master_param").clone() for n in names}


@pytest.mark.parametrize(("old", "new"), PAIRS)
def test_from_masters(tmp_path: Path, old: str | None, new: str | None) -> None:
    source, states = built(old)
    path, masters = written(tmp_path / "c", old), masters_of(source, states)
    model, optimizer = built(new, seed=9)
    told = load_loudly(path, model, optimizer)
    assert re.search(r"2 from \S.* to \S.* by their masters$", told)
    check(model, masters)
    for name, master in masters.items():
        theirs, ours = source.get_parameter(name), model.get_parameter(name)
        assert same(optimizer.get_unscaled_state(ours, "master_param"), master)
        for moment in ("exp_avg", "exp_avg_sq"):
            assert same(optimizer.state[ours][moment], states.state[theirs][moment])
        prefix = name.removesuffix("weight")
        for state in (RNG_KEY, RNG_DRAWS):
            key = f"{prefix}weight_{state}"
            assert same(model.state_dict()[key], source.state_dict()[key])
    assert same(model[0].bias.detach(), source[0].bias.detach())
    assert optimizer.param_groups[0]["step"] == 1
    for param in model.parameters():
        param.grad = torch.zeros_like(param, dtype=param.dtype)
    optimizer.step()  # does not take the weights for those of somebody else


def test_without_asking_it_is_refused_with_what_to_do(tmp_path: Path) -> None:
    path = written(tmp_path / "c", "mxfp8")
    with pytest.raises(CheckpointError, match=r"0\.weight is stored as mxfp8_32x32 there.*requantize=True"):
        checkpoints.load(path, *built("nvfp4"))


def test_the_same_recipe_is_loaded_as_it_is(tmp_path: Path) -> None:
    path = written(tmp_path / "c", "nvfp4")
    model, optimizer = built("nvfp4", seed=9)
    assert load_loudly(path, model, optimizer) == ""
    assert not differing(model.state_dict(), built("nvfp4")[0].state_dict())


@pytest.mark.parametrize("new", ["delayed/dgrad:bf16/wgrad:bf16", DelayedScaling(amax_history_len=3)])
def test_histories_are_of_the_recipe(tmp_path: Path, new: str | Recipe) -> None:
    """A recipe of the same weights that scales fewer operands by histories, or by shorter ones, goes on with its own;
    unasked, it is told which, and not that the model is another."""

    def model_of(recipe: str | Recipe) -> nn.Sequential:
        with qs.quantized_model_init(recipe=recipe):
            return nn.Sequential(qs.Linear(32, 48, bias=False), qs.Linear(48, 32, bias=False))

    old = model_of("delayed")
    with qs.autocast(recipe="delayed"):
        old(torch.randn(4, 32)).square().mean().backward()
    checkpoints.save(tmp_path / "c", old, None)
    model = model_of(new)
    for buffer in model.buffers():
        buffer.fill_(7.0)  # as of another training
    with pytest.raises(CheckpointError, match=r"requantize=True, which clears amax histories"):
        checkpoints.load(tmp_path / "c", model)
    checkpoints.load(tmp_path / "c", model, requantize=True)
    for name, weight in model.named_parameters():
        assert torch.equal(weight.dequantize(), old.get_parameter(name).dequantize())
    theirs = dict(old.named_buffers())
    for name, buffer in model.named_buffers():
        alike = name in theirs and theirs[name].shape == buffer.shape
        assert torch.equal(buffer, theirs[name] if alike else torch.zeros_like(buffer)), name
        assert not name.endswith(AMAX_HISTORY) or not alike or buffer.any()
    assert any(name.endswith(AMAX_HISTORY) for name, _ in model.named_buffers())


def test_masters_that_are_not_finite_are_not_quantized(tmp_path: Path) -> None:
    """Codes would hide it; a weight that is kept in high precision shows it itself."""
    model, optimizer = built("block")
    optimizer.state[model[1].weight]["master_param"][2, 3] = float("inf")
    checkpoints.save(tmp_path / "c", model, optimizer)
    with pytest.raises(CheckpointError, match=r"1\.weight by their masters: 1 of 90 values.*first, inf, at \[2, 3\]"):
        load_loudly(tmp_path / "c", *built("mxfp8"))
    other, _ = kept = built(None)
    load_loudly(tmp_path / "c", *kept)
    assert other[1].weight[2, 3] == float("inf")


@pytest.mark.parametrize("master", [torch.float16, torch.bfloat16], ids=str)
def test_masters_of_other_dtypes(tmp_path: Path, master: torch.dtype) -> None:
    """16-bit masters, those in blocks too; into masters of the same kind and into float32 ones."""
    options = {"master_weight_dtype": master}
    path, masters = written(tmp_path / "c", "block", **options), masters_of(*built("block", **options))
    for own in (options, {}):
        model, optimizer = built("mxfp8", seed=9, **own)
        if not own:  # float32 masters need no random words
            optimizer.param_groups[0].pop("rounding_seed", None)
        load_loudly(path, model, optimizer)
        check(model, masters)
        assert all(same(value, masters[name]) for name, value in masters_of(model, optimizer).items())


@pytest.mark.parametrize(("old", "new"), [(None, "nvfp4"), ("nvfp4", None)])
def test_split_masters(tmp_path: Path, old: str | None, new: str | None) -> None:
    """A BF16 parameter and its low bits are a float32 master, on either side."""
    there, here = ({"store_param_remainders": recipe is None} for recipe in (old, new))
    path, masters = written(tmp_path / "c", old, **there), masters_of(*built(old, **there))
    model, optimizer = built(new, seed=9, **here)
    load_loudly(path, model, optimizer)
    assert all(same(value, masters[name]) for name, value in masters_of(model, optimizer).items())
    if new is not None:
        check(model, masters)


SPLIT = {"store_param_remainders": True, "master_weight_dtype": torch.float16}


@pytest.mark.parametrize("new", ["mxfp8", "delayed", "nvfp4", None])
def test_masters_beside_codes(tmp_path: Path, new: str | None) -> None:
    """The low bytes belong to the codes of the checkpoint: weights of another recipe are quantized from both, and
    beside these the master is kept to the bits that there are."""
    path, masters = written(tmp_path / "c", "block", **SPLIT), masters_of(*built("block", **SPLIT))
    assert any((master != 0).any() for master in masters.values())
    for own in ({}, SPLIT):
        model, optimizer = built(new, seed=9, **own)
        if not own:  # float32 masters need no random words
            optimizer.param_groups[0].pop("rounding_seed", None)
        load_loudly(path, model, optimizer)
        if new is not None or not own:  # a BF16 parameter beside a remainder is rounded away from zero at ties
            check(model, masters)
        for name, master in masters_of(model, optimizer).items():
            near = 2.0**-11 * masters[name].abs() + 2.0**-17 * masters[name].abs().max()  # the last of 16 bits
            assert (master - masters[name]).abs().le(near).all() and (own or same(master, masters[name]))
        for param in model.parameters():
            param.grad = torch.zeros_like(param, dtype=param.dtype)
        optimizer.step()


@pytest.mark.parametrize("whole", [{}, {"master_weight_dtype": torch.float16}], ids=["float32", "float16"])
@pytest.mark.parametrize("to_split", [True, False])
def test_masters_beside_codes_and_whole_ones(tmp_path: Path, whole: dict[str, Any], to_split: bool) -> None:
    """Into each other, of the same recipe: the weights stay, bit for bit. Unasked, it is refused."""
    there, here = (whole, SPLIT) if to_split else (SPLIT, whole)
    path, masters = written(tmp_path / "c", "block", **there), masters_of(*built("block", **there))
    model, optimizer = built("block", seed=9, **here)
    with pytest.raises(CheckpointError, match=r"first: .*master_param_low.*options that it was saved"):
        checkpoints.load(path, *built("block", seed=9, **here))
    if here == {}:
        optimizer.param_groups[0].pop("rounding_seed", None)
    elif there == {}:
        pytest.skip("a float32 master has no seed of rounding")
    told = load_loudly(path, model, optimizer)
    assert told.endswith("c: masters were made: 4 of the stored masters")
    before = built("block", **there)[0].state_dict()
    assert not differing(model.state_dict(), before)
    for name, master in masters_of(model, optimizer).items():
        near = 2.0**-10 * masters[name].abs() + 2.0**-17 * masters[name].abs().max()
        assert (master - masters[name]).abs().le(near).all() and (to_split or whole or same(master, masters[name]))


def test_without_masters(tmp_path: Path) -> None:
    path = written(tmp_path / "c", "block", master_weights=False)
    model, optimizer = built("mxfp8", seed=9, master_weights=False)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with pytest.raises(CheckpointError, match=r"2 weights.*first 0\.weight \(fp8_128x128\).*no masters.*lossy=True"):
        checkpoints.load(path, model, optimizer, requantize=True)
    assert not differing(before, model.state_dict())
    told = load_loudly(path, model, optimizer, lossy=True)
    assert "WITHOUT masters" in told
    source = built("block", master_weights=False)[0]
    values = {name: components.storage_of(source.get_parameter(name)).dequantize() for name in ("0.weight", "1.weight")}
    check(model, values)


def test_without_an_optimizer(tmp_path: Path) -> None:
    path = written(tmp_path / "c", "block")
    with pytest.raises(CheckpointError, match="no optimizer was given"):
        checkpoints.load(path, built("mxfp8")[0], requantize=True)
    load_loudly(path, built("mxfp8")[0], lossy=True)


# States

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "fp8": torch.uint8}


def moments_of(first: str, second: str) -> dict[str, torch.dtype]:
    return {"exp_avg_dtype": DTYPES[first], "exp_avg_sq_dtype": DTYPES[second]}


def states_of(model: nn.Module, optimizer: FusedAdam) -> dict[str, torch.Tensor]:
    """Of all parameters, float32."""
    return {
        f"{name} {role}": optimizer.get_unscaled_state(param, role).clone()
        for name, param in model.named_parameters()
        for role in ("exp_avg", "exp_avg_sq", "master_param")
        if role != "master_param" or any(key.startswith(role) for key in optimizer.state[param])
    }


@pytest.mark.parametrize(
    ("new", "old"),
    [
        pytest.param(new, old, marks=pytest.mark.exhaustive if (i + j) % 2 else ())
        for (i, new), (j, old) in itertools.product(enumerate(DTYPES), enumerate(DTYPES))
    ],
)
def test_moments_of_another_dtype(tmp_path: Path, old: str, new: str) -> None:
    """Those of the checkpoint, rounded to nearest as they are kept here; unasked they are refused."""
    others = moments_of(new, "float32" if new == "bfloat16" else "bfloat16")
    if new == "fp8":
        others = moments_of(new, new)
    source, states = built("current", **moments_of(old, old))
    path = written(tmp_path / "c", "current", **moments_of(old, old))
    wanted = states_of(source, states)
    model, optimizer = built("current", seed=9, **others)
    if dict(zip(("exp_avg_dtype", "exp_avg_sq_dtype"), [DTYPES[old]] * 2, strict=True)) != others:
        with pytest.raises(CheckpointError, match="of another optimizer"):
            checkpoints.load(path, model, optimizer)
        told = load_loudly(path, model, optimizer)
        assert re.search(r": states were converted: \d exp_avg", told)
    else:
        assert load_loudly(path, model, optimizer) == ""
    likewise, kept = built("current", seed=9, **others)
    for (name, param), own in zip(likewise.named_parameters(), model.parameters(), strict=True):
        for role in ("exp_avg", "exp_avg_sq"):
            kept.set_scaled_state(param, role, wanted[f"{name} {role}"])  # to nearest
            assert same(kept.get_unscaled_state(param, role), optimizer.get_unscaled_state(own, role)), (name, role)
        assert same(optimizer.get_unscaled_state(own, "master_param"), wanted[f"{name} master_param"])
    for param in model.parameters():
        param.grad = torch.ones_like(param, dtype=param.dtype)
    optimizer.step()
    saved = states_of(model, optimizer)
    checkpoints.save(tmp_path / "again", model, optimizer)
    model, optimizer = built("current", seed=4, **others)
    checkpoints.load(tmp_path / "again", model, optimizer)
    assert not differing(states_of(model, optimizer), saved)


@pytest.mark.parametrize(("old", "new"), [(None, "lean8"), ("lean8", None), ("lean6", "lean8")])
def test_states_of_another_preset(tmp_path: Path, old: str | None, new: str | None) -> None:
    """With another recipe in one load; all that was made anew is told in one warning."""
    source, states = built("current", preset=old)
    path, wanted = written(tmp_path / "c", "current", preset=old), states_of(source, states)
    model, optimizer = built("mxfp8", seed=9, preset=new)
    told = load_loudly(path, model, optimizer)
    of_biases = "masters were made: 2 of the stored masters; " if None in (old, new) else ""
    weights = "weights were requantized: 2 from fp8_e4m3 to mxfp8_32x32 by their masters; "
    assert f"{weights}{of_biases}states were converted: " in told
    for name, now in states_of(model, optimizer).items():
        off = (now - wanted[name]).abs()
        assert (off <= wanted[name].abs() / 16 + wanted[name].abs().amax() * 2.0**-18).all(), name
        assert now.any()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_state_that_is_not_finite_is_refused(tmp_path: Path, bad: float) -> None:
    """Its block of 128 would be it."""
    source, states = built("current")
    values = states.get_unscaled_state(source[0].weight, "exp_avg_sq").clone()
    values[1, 2] = bad
    states.set_scaled_state(source[0].weight, "exp_avg_sq", values)
    checkpoints.save(tmp_path / "c", source, states)
    model, optimizer = built("current", seed=9, preset="lean8")
    with pytest.raises(CheckpointError, match=r"1 values of optimizer\.state\.0\.exp_avg_sq are infinite or NaN"):
        checkpoints.load(tmp_path / "c", model, optimizer, requantize=True)


def test_masters_that_were_not_there_are_told(tmp_path: Path) -> None:
    """And not taken for the stored ones'; the refusal before it names what would take other states."""
    options = {"master_weights": False, "exp_avg_dtype": torch.bfloat16}
    path = written(tmp_path / "c", "current", **options)
    with pytest.raises(CheckpointError, match="load with requantize=True to convert states of other dtypes, or"):
        checkpoints.load(path, *built("current"))
    told = load_loudly(path, *built("current", seed=9))
    assert ": masters were made: 2 of their dequantized codes; states were converted: " in told
    told = load_loudly(path, *built("mxfp8", seed=9), lossy=True)
    assert "by their dequantized codes, WITHOUT masters; states were converted: " in told


def test_states_of_another_model_are_refused(tmp_path: Path) -> None:
    path = written(tmp_path / "c", "current")
    model, optimizer = built("current", shapes=((24, 18), (18, 7)), exp_avg_dtype=torch.uint8)
    with pytest.raises(CheckpointError, match="of another model"):
        checkpoints.load(path, model, optimizer, requantize=True)
    with pytest.raises(CheckpointError, match="of another optimizer"):
        model = built("current")[0]
        checkpoints.load(path, model, torch.optim.AdamW(model.parameters()), requantize=True)


# On ranks


def wrapped(case: Case) -> tuple[nn.Sequential, FusedAdam]:
    """Born and stepped alike on any mesh."""
    torch.manual_seed(case.seed)
    recipe = RECIPES.get(case.recipe)
    with qs.quantized_model_init(enabled=recipe is not None, recipe=recipe):
        model = nn.Sequential(*[qs.Linear(a, b, params_dtype=torch.bfloat16) for a, b in case.shapes])
    for layer in model:
        fully_shard(layer, mesh=mesh_of(case))
    fully_shard(model, mesh=mesh_of(case))
    return model, optimizer_of(model, case)


def save_on_ranks(cases: list[Case], path: str) -> None:
    for case in cases:
        model, optimizer = wrapped(case)
        with torch.no_grad():
            for param in model.parameters():  # masters are what no code can say
                held = optimizer.get_unscaled_state(param, "master_param")
                optimizer.set_scaled_state(param, "master_param", held * 1.01 + 1e-4)
                optimizer.set_scaled_state(param, "exp_avg", held * 0.1)
                optimizer.set_scaled_state(param, "exp_avg_sq", held * held)
        checkpoints.save(f"{path}/{case.recipe}", model, optimizer)


def load_on_ranks(cases: list[tuple[str, Case]], path: str) -> list[dict[str, str]]:
    found = []
    for old, case in cases:
        model, optimizer = wrapped(case)
        load_loudly(Path(path) / old, model, optimizer)
        found.append(bits(model, optimizer))
    return found


CROSSINGS = {
    ("bf16", "nvfp4"): (torch.float32, torch.uint8),
    ("nvfp4", "block"): (torch.uint8, torch.bfloat16),
    ("block", "delayed"): (torch.float16, torch.float16),
    ("mxfp8", "bf16"): (torch.bfloat16, torch.float16),
    ("delayed", "mxfp8"): (torch.uint8, torch.float32),
}
"""Recipes, there and here, and dtypes of moments."""


@pytest.mark.distributed
def test_any_mesh_to_any_mesh(tmp_path: Path) -> None:
    """Saved on 2 ranks, loaded on 1 and 3: all bits are those of one rank, which are those of the masters; of moments
    too, which are kept in other dtypes."""
    shapes = ((40, 150), (150, 1))
    saved = [Case(old, (2,), shapes=shapes, moments=of_old) for (old, _), (of_old, _) in CROSSINGS.items()]
    run_ranks(2, save_on_ranks, saved, str(tmp_path))
    on = {}
    for ranks in (1, 3):
        cases = [
            (old, Case(new, (ranks,), shapes=shapes, seed=9, moments=of_new))
            for (old, new), (_, of_new) in CROSSINGS.items()
        ]
        every = run_ranks(ranks, load_on_ranks, cases, str(tmp_path))
        assert all(found == every[0] for found in every)
        on[ranks] = every[0]
    assert on[1] == on[3]


def row_parallel(ranks: int, **options: Any) -> tuple[nn.Module, FusedAdam]:
    """A layer whose 160 inputs two ranks cut at 80, in the midst of a block of 128."""
    torch.manual_seed(3)
    with qs.quantized_model_init(recipe="current"):
        layer = qs.Linear(
            160, 9, bias=False, parallel_mode="row", tp_mesh=init_device_mesh("cpu", (ranks,), mesh_dim_names=("tp",))
        )
    return layer, FusedAdam(layer.named_parameters(), **options)


def global_states(ranks: int, path: str, **options: Any) -> dict[str, torch.Tensor]:
    """Load a checkpoint into the layer on so many ranks; the whole states."""
    layer, optimizer = row_parallel(ranks, **options)
    load_loudly(Path(path), layer, optimizer)
    held = {role: optimizer.get_unscaled_state(layer.weight, role) for role in ("exp_avg", "exp_avg_sq")}
    return {role: value.full_tensor() if isinstance(value, DTensor) else value for role, value in held.items()}


def save_filled(path: str) -> None:
    layer, optimizer = row_parallel(1)
    drawn = torch.randn(9, 160, generator=torch.Generator().manual_seed(2)) ** 3
    for role, value in (("exp_avg", drawn), ("exp_avg_sq", drawn.square())):
        optimizer.set_scaled_state(layer.weight, role, value)
    checkpoints.save(path, layer, optimizer)


@pytest.mark.distributed
def test_blocks_that_ranks_share(tmp_path: Path) -> None:
    """1 and 2 ranks of tensor parallelism: moments of 8 bits have the scale of the whole block."""
    run_ranks(1, save_filled, str(tmp_path / "c"))
    on = {n: run_ranks(n, partial(global_states, preset="lean8"), n, str(tmp_path / "c")) for n in (1, 2)}
    assert all(not differing(found, on[1][0]) for found in on[2])
    assert all(value.unique().numel() > 100 for value in on[1][0].values())
