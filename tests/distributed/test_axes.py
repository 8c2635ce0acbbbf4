"""Several sharding axes: on every mesh the pieces are those of the weight, states and checkpoint of one process.

Every rank computes the model of one process too, and compares its own pieces with the same places there, bit by bit.
Gradients are set by global index, so that the sums of data parallelism play no part. Runs on 1, 2, 3 and 4 ranks, one
call each, and prints two tables.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Partial, Replicate

from quantshard import checkpoints, private_torch
from quantshard.errors import ConfigurationError, NonFiniteGradientError, RankMismatchError
from quantshard.formats import Orientation
from quantshard.optimizers import FusedAdam, MasterWeights, clip_grad_norm_
from quantshard.optimizers.state import TensorRegion
from quantshard.tensor import components
from quantshard.tensor.storage import QuantizedStorage
from tests.distributed.axes import CUTS, MESHES, MORE_MESHES, Axes, build, quantized_layers, whole
from tests.distributed.models import RECIPES, set_gradients
from tests.distributed.pool import run_ranks

pytestmark = pytest.mark.distributed

OPTIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"exp_avg_dtype": torch.bfloat16, "exp_avg_sq_dtype": torch.bfloat16},
    "fp8": {"exp_avg_dtype": torch.uint8, "exp_avg_sq_dtype": torch.uint8},
    "remainder, fp8": {"exp_avg_dtype": torch.uint8, "store_param_remainders": True},
    "lean8": {"preset": "lean8"},
    "fp16": {"exp_avg_sq_dtype": torch.float16, "master_weight_dtype": torch.float16},
    "no masters, fp8": {"master_weights": False, "exp_avg_sq_dtype": torch.uint8},
}
"""Masters and moments of FusedAdam. Scaled ones have blocks of 128 columns, which cuts of dim 1 cross."""

EVERY = MESHES | MORE_MESHES
FULL = StateDictOptions(full_state_dict=True)

Job = tuple[Any, ...]
"""The name of a mesh, and what else a function takes."""

Held = dict[str, tuple[Tensor, tuple[slice, ...]]]
"""A local tensor, and where it lies in that of one process."""


def optimizer_of(model: nn.Module, option: str) -> FusedAdam:
    return FusedAdam(model.named_parameters(), lr=1e-2, weight_decay=0.1, **OPTIONS[option])


def at(extents: Any) -> tuple[slice, ...]:
    return tuple(slice(*extent) for extent in extents)


def held(model: nn.Module, optimizer: FusedAdam | None = None) -> Held:
    """All that this rank holds, by our own account of where it is."""
    found: Held = {}
    for name, param in model.named_parameters():
        local = components.quantized_local(param)
        if local is None:
            place = TensorRegion.of_local(param)
            here = at((start, start + size) for start, size in zip(place.origin, place.shape, strict=True))
            found[name] = (private_torch.local_tensor(param), here)
        else:
            storage = local.quantized_storage
            here = at(storage.shard.extents)
            for part in storage.spec.format.components:
                found[f"{name}.{part.name}"] = (storage.components[part.name], at(storage.shard.resident(part)))
            found |= {f"{name}.{key}": (value, ()) for key, value in storage.state.items()}
        for role, state in (optimizer._states[param] if optimizer else {}).items():
            fmt = state.storage.spec.format if state.storage else None
            for key, tensor in state.tensors(role).items():
                part = next((p for p in fmt.components if role + p.key_suffix == key), None) if fmt else None
                where = here if part is None else at(state.storage.shard.resident(part))
                found[f"{name}.{key}"] = (private_torch.local_tensor(tensor), where)
    return found


def different(here: Held, there: dict[str, Tensor]) -> list[str]:
    """What is not, bit by bit, the piece of what one process holds."""
    wrong = sorted(here.keys() ^ there.keys())
    for key in here.keys() & there.keys():
        local, where = here[key]
        piece = there[key][where]
        same = local.shape == piece.shape and local.dtype == piece.dtype
        if not same or not torch.equal(*(t.detach().contiguous().view(-1).view(torch.uint8) for t in (local, piece))):
            wrong.append(key)
    return wrong


def step(model: nn.Module, optimizer: torch.optim.Optimizer, first: int, last: int) -> None:
    for number in range(first, last):
        set_gradients(model, number)
        optimizer.step()


@cache
def of_one_process(recipe: str, option: str) -> list[dict[str, Tensor]]:
    """At birth, after one step and after two."""
    model = whole(recipe)
    optimizer = optimizer_of(model, option)
    found = []
    for first, last in ((0, 0), (0, 1), (1, 2)):
        step(model, optimizer, first, last)
        found.append({key: tensor.detach().clone() for key, (tensor, _) in held(model, optimizer).items()})
    return found


def runs(function: Callable[..., Any], jobs: list[Job], *args: Any) -> dict[Job, list[Any]]:
    """`function(*job)` of each job, whose first entry names its mesh, on the ranks of that mesh; one call each."""
    found = {}
    for ranks in sorted({EVERY[job[0]].ranks for job in jobs}):
        mine = [job for job in jobs if EVERY[job[0]].ranks == ranks]
        for job, *results in zip(mine, *run_ranks(ranks, each, function, mine, *args), strict=True):
            found[job] = results
    return found


def each(function: Callable[..., Any], jobs: list[Job], *args: Any) -> list[Any]:
    return [function(*args, *job) for job in jobs]


def table(rows: dict[str, list[str]], head: list[str]) -> str:
    first, width = max(map(len, rows)) + 2, max(map(len, head)) + 2
    lines = [f"{'':<{first}}" + "".join(f"{word:<{width}}" for word in head)]
    lines += [f"{name:<{first}}" + "".join(f"{word:<{width}}" for word in words) for name, words in rows.items()]
    return "\n".join(lines)


# Checkpoints


def save(folder: str, source: str, recipe: str, option: str) -> list[list[str]]:
    """A step, then saved; what differed at birth and then."""
    model = build(EVERY[source], recipe)
    optimizer = optimizer_of(model, option)
    born, trained, _ = of_one_process(recipe, option)
    wrong = [different(held(model, optimizer), born)]
    step(model, optimizer, 0, 1)
    wrong.append(different(held(model, optimizer), trained))
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    dcp.save(state, checkpoint_id=f"{folder}/{source} {recipe}")
    return wrong


def load(folder: str, target: str, source: str, recipe: str, option: str) -> list[list[str]]:
    """Loaded into a model that was seeded otherwise, then a step more; what differed after each."""
    path = f"{folder}/{source} {recipe}"
    model = build(EVERY[target], recipe, seed=99)
    optimizer = optimizer_of(model, option)
    _, trained, later = of_one_process(recipe, option)
    assert different(held(model, optimizer), trained)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    dcp.load(state, checkpoint_id=path)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    wrong = [different(held(model, optimizer), trained)]
    step(model, optimizer, 1, 2)
    return [*wrong, different(held(model, optimizer), later)]


@pytest.mark.parametrize("turns", [(3,), pytest.param(range(7), marks=pytest.mark.exhaustive)], ids=["some", "all"])
def test_saved_on_any_mesh_and_loaded_on_any_other(
    turns: Sequence[int], tmp_path: Path, show: Callable[[str], None]
) -> None:
    """Each recipe, with states of its kind, is saved and loaded on every mesh, and every mesh loads every other's.

    Some: two meshes load those of two others, of one recipe; tests/distributed/test_matrix.py has all recipes."""
    names, recipes = list(MESHES), list(RECIPES)
    saves, loads = [], []
    for (i, source), (j, target) in itertools.permutations(enumerate(names), 2):
        turn = (j - i - 1) % len(names)
        if turn not in turns or (len(turns) < len(recipes) and i % 4 != 2):
            continue
        kind = turn if len(turns) == len(recipes) else (turn + i) % len(recipes)
        job = (source, recipes[kind], list(OPTIONS)[kind % len(OPTIONS)])
        saves.append(job)
        loads.append((target, *job))
    if len(turns) == len(recipes):
        assert {(target, recipe) for target, _, recipe, _ in loads} == {(a, b) for a in names for b in recipes}
    saved, loaded = runs(save, saves, str(tmp_path)), runs(load, loads, str(tmp_path))
    wrong = {job: keys for job in loads for ways in (*saved[job[1:]], *loaded[job]) for keys in ways if keys}
    bad, tried = {job[:2] for job in wrong}, {job[:2] for job in loads}
    rows = {
        f"{number}: {source}": [
            "DIFFERS" if (target, source) in bad else "equal" if (target, source) in tried else "-" for target in names
        ]
        for number, source in enumerate(names)
    }
    show(table(rows, [f"loaded on {number}" for number in range(len(names))]))
    assert not wrong


def full(name: str, recipe: str, option: str) -> list[list[str]]:
    """get_state_dict and set_state_dict with whole tensors; what differed in them, and after the load."""
    model = build(EVERY[name], recipe)
    optimizer = optimizer_of(model, option)
    _, trained, later = of_one_process(recipe, option)
    step(model, optimizer, 0, 1)
    state = get_state_dict(model, optimizer, options=FULL)
    one = whole(recipe)
    wrong = [unequal(state, get_state_dict(one, stepped(one, option), options=FULL))]
    other = build(EVERY[name], recipe, seed=99)
    loaded = optimizer_of(other, option)
    set_state_dict(other, loaded, model_state_dict=state[0], optim_state_dict=state[1], options=FULL)
    wrong.append(different(held(other, loaded), trained))
    step(other, loaded, 1, 2)
    return [*wrong, different(held(other, loaded), later)]


def stepped(model: nn.Module, option: str) -> FusedAdam:
    optimizer = optimizer_of(model, option)
    step(model, optimizer, 0, 1)
    return optimizer


def unequal(one: Any, two: Any, where: str = "") -> list[str]:
    """Where two nested state dicts differ."""
    if isinstance(one, dict) and isinstance(two, dict) and one.keys() == two.keys():
        return [found for key in one for found in unequal(one[key], two[key], f"{where}.{key}")]
    if isinstance(one, list | tuple) and len(one) == len(two):
        return [found for a, b in zip(one, two, strict=True) for found in unequal(a, b, where)]
    if isinstance(one, Tensor):
        return [] if type(one) is type(two) is Tensor and torch.equal(one, two) else [where]
    return [] if one == two else [where]


SOME = ("nvfp4",)


@pytest.mark.parametrize(
    "recipes",
    [SOME, pytest.param([name for name in RECIPES if name not in SOME], marks=pytest.mark.exhaustive)],
    ids=["some", "others"],
)
def test_whole_state_dicts(recipes: Sequence[str]) -> None:
    """Recipes, each on a mesh of another kind: what is gathered is what one process has, and loads again."""
    names = [name for name, axes in EVERY.items() if axes.tp]
    places = {recipe: names[i % len(names)] for i, recipe in enumerate(RECIPES)} | {SOME[0]: "dp_shard 1, tp 2"}
    every = [(places[recipe], recipe, list(OPTIONS)[i % len(OPTIONS)]) for i, recipe in enumerate(RECIPES)]
    jobs = [job for job in every if job[1] in recipes]
    found = runs(full, jobs)
    assert {job: results for job, results in found.items() if any(any(rank) for rank in results)} == {}


def ours(folder: str, name: str) -> list[str]:
    """`checkpoints.save` and `load`, `load_from_rank0`, and new values from a high-precision checkpoint."""
    recipe, option = "mxfp8", "fp8"
    model = build(EVERY[name], recipe)
    optimizer = stepped(model, option)
    checkpoints.save(f"{folder}/{name}", model, optimizer, {"step": 1})
    _, trained, _ = of_one_process(recipe, option)
    other = build(EVERY[name], recipe, seed=99)
    loaded = optimizer_of(other, option)
    assert checkpoints.load(f"{folder}/{name}", other, loaded) == {"step": 1}
    wrong = different(held(other, loaded), trained)

    one = whole(recipe)
    stepped(one, option)
    third = build(EVERY[name], recipe, seed=99)
    checkpoints.load_from_rank0(third, one.state_dict() if dist.get_rank() == 0 else None)
    wrong += different(held(third), {key: tensor for key, (tensor, _) in held(one).items()})

    values = {key: torch.randn(param.shape) for key, param in one.named_parameters()}
    one, fourth = whole(recipe), build(EVERY[name], recipe)
    for model in (one, fourth):
        checkpoints.load_high_precision(model, values)
    wrong += different(held(fourth), {key: tensor for key, (tensor, _) in held(one).items()})
    storage = components.storage_of(fourth.row.weight)
    assert torch.equal(storage.high_precision, values["row.weight"][at(storage.shard.extents)])
    return wrong


@pytest.mark.parametrize(
    "meshes",
    [["dp 2, tp 2"], pytest.param(["tp 4", "dp_shard 1, tp 2"], marks=pytest.mark.exhaustive)],
    ids=["some", "rest"],
)
def test_our_own_ways_to_save_and_load(meshes: list[str], tmp_path: Path) -> None:
    """2 and 4 ranks."""
    found = runs(ours, [(mesh,) for mesh in meshes], str(tmp_path))
    assert {job: results for job, results in found.items() if any(results)} == {}


# Births and gathers


def born(name: str, recipe: str, meta: bool) -> dict[str, list[str]]:
    """What differs from one process: born of whole parameters or on meta, and gathered by FSDP2."""
    one, model = whole(recipe), build(EVERY[name], recipe, meta=meta)
    wrong = {"born": different(held(model), {key: tensor for key, (tensor, _) in held(one).items()})}
    for _, param in model.named_parameters():
        kept = components.quantized_local(param)
        assert kept is None or kept.get_high_precision_init_val().shape == kept.shape
    wrong["gathered"] = [
        key
        for layer, module in quantized_layers(model)
        for key in gathered(EVERY[name], layer, module, components.storage_of(one.get_submodule(layer).weight))
    ]
    return wrong


def gathered(axes: Axes, name: str, layer: Any, expected: QuantizedStorage) -> list[str]:
    """What of an unsharded weight, codes and scales, is not the tensor-parallel piece of that of one process."""
    if isinstance(layer, FSDPModule):
        layer.unshard()
    dim = CUTS[f"{name}.weight"]
    if axes.tp and dim is not None:
        tp = layer.weight.device_mesh
        assert tp.mesh_dim_names == (axes.tp,)
        chunk = expected.shard.shape[dim] // tp.size()
        expected = expected.piece(dim, tp.get_local_rank() * chunk, chunk)
    found = components.storage_of(layer.weight)
    assert found.shard == expected.shard
    wrong = []
    for which, copy in found.spec.format.copies.items():  # a gather brings only the copy that the pass needs
        parts = found.with_copy(Orientation(which)).components
        for part in filter(None, (copy.codes, copy.scale, copy.amax)):
            if not torch.equal(parts[part.name], expected.components[part.name]):
                wrong.append(f"{name}.{part.name}")
    if isinstance(layer, FSDPModule):
        layer.reshard()
    return wrong


@pytest.mark.parametrize(
    "eighths", [(0,), pytest.param(range(1, 8), marks=pytest.mark.exhaustive)], ids=["some", "rest"]
)
def test_born_and_gathered_as_on_one_process(eighths: Sequence[int], show: Callable[[str], None]) -> None:
    """Every recipe on a mesh with tensor parallelism, then on the others; they take turns in being born on meta."""
    names = [name for name, axes in EVERY.items() if axes.tp]
    turns = itertools.product(enumerate(names), enumerate(RECIPES))
    jobs = [(name, recipe, (i + j) // 8 % 2 == 0) for (i, name), (j, recipe) in turns if (i + j) % 8 in eighths]
    assert {recipe for _, recipe, _ in jobs} == RECIPES.keys()
    found = runs(born, jobs)
    rows = {name: dict.fromkeys(RECIPES, "-") for name in names}
    for (name, recipe, _), results in found.items():
        differs = sorted({way for rank in results for way, keys in rank.items() if keys})
        rows[name][recipe] = f"DIFFERS: {', '.join(differs)}" if differs else "equal"
    show(table({name: list(words.values()) for name, words in rows.items()}, list(RECIPES)))
    assert {job: results for job, results in found.items() if any(any(rank.values()) for rank in results)} == {}


# Other optimizers, and what a step sends


def other_optimizer(name: str, recipe: str, masters: bool, foreach: bool) -> list[str]:
    found = []
    for model in (whole(recipe, dtype=torch.float32), build(EVERY[name], recipe, dtype=torch.float32)):
        params = [(key, param) for key, param in model.named_parameters() if key != "norm.weight"]
        options = {"lr": 1e-2, "weight_decay": 0.1, "foreach": foreach}
        adam = torch.optim.AdamW
        optimizer = MasterWeights(adam, params, **options) if masters else adam(params, **options)
        step(model, optimizer, 0, 2)
        pieces = held(model)
        states = {f"{key}.{entry}": value for key, param in params for entry, value in optimizer.state[param].items()}
        for key, value in states.items():
            param = model.get_parameter(key.rpartition(".")[0])
            place = TensorRegion.of_local(param)
            here = at((start, start + size) for start, size in zip(place.origin, place.shape, strict=True))
            pieces[key] = (private_torch.local_tensor(value), here if value.ndim else ())
        found.append(pieces)
    return different(found[1], {key: tensor for key, (tensor, _) in found[0].items()})


OF_STOCK = {"dp 2, tp 2": (2,), "dp_shard 1, tp 2": (0,)}
"""Mesh -> which of the ways of `test_stock_optimizers_and_masters` `make test` has."""


@pytest.mark.parametrize("chosen", [True, pytest.param(False, marks=pytest.mark.exhaustive)], ids=["some", "rest"])
def test_stock_optimizers_and_masters(chosen: bool) -> None:
    """2 and 4 ranks: torch.optim's AdamW, one by one and as lists, by itself and on masters; tensor parallelism alone
    too, where nothing but the weight itself knows its ranks."""
    meshes = ["dp 2, tp 2", "tp 4", "tp 2, dp 2", "dp_shard 1, tp 2"]
    ways = list(itertools.product((False, True), (False, True)))
    jobs = [
        (mesh, list(RECIPES)[(i + 4 * j) % len(RECIPES)], masters, foreach)
        for i, mesh in enumerate(meshes)
        for j, (masters, foreach) in enumerate(ways)
        if (j in OF_STOCK.get(mesh, ())) == chosen
    ]
    found = runs(other_optimizer, jobs)
    assert {job: results for job, results in found.items() if any(results)} == {}


def reductions(name: str, recipe: str, option: str) -> list[tuple[int, int]]:
    """Ranks and elements of each all-reduce of a step."""
    model = build(EVERY[name], recipe)
    optimizer = optimizer_of(model, option)
    set_gradients(model, 0)
    with mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as seen:
        optimizer.step()
    return [(call.kwargs["group"].size(), call.args[0].numel()) for call in seen.call_args_list]


def test_one_collective_for_each_axis() -> None:
    """4 ranks: flags and amaxes of both axes, of dp and of tp. In a second round, since not all parameters are sharded
    over the same axes, goes one column of flags."""
    both, data = 3 * 4, 3 * 3  # flags of the parameters that both axes cut, and of those that dp alone does
    expected = {
        "block": [both + data + 4 + 4, both + 4 + 4, 3, 3],  # 2 x 2 blocks of each large weight straddle all cuts
        "current": [both + data + 1 + 1 + 1, both + 1 + 1, 3, 3],  # the weight of one row is cut by dp alone
        "rowwise": [both + 70, both + data, 3, 3],  # tp cuts rows; registered first, it goes first
    }
    for (_, recipe, _), results in runs(reductions, [("dp 2, tp 2", recipe, "fp32") for recipe in expected]).items():
        assert results == [[(2, numel) for numel in expected[recipe]]] * 4


# Errors


def bad_gradient(name: str, *bad_ranks: int) -> list[str]:
    """Some ranks have a bad gradient, or none: every rank does the same."""
    errors = []
    # the norm is on the data-parallel mesh alone, so replicas that both lack its gradient lack it on all of that mesh
    leaves = ("row.weight", "norm.weight") if len(bad_ranks) == 1 else ("row.weight",)
    for kind, leaf in itertools.product(("nan", "missing"), leaves):
        model = build(EVERY[name], "mxfp8")
        optimizer = FusedAdam(model.named_parameters(), max_skipped_in_a_row=1)
        stock = torch.optim.SGD([model.row.weight], foreach=True)
        for chosen in (optimizer, stock) if leaf == "row.weight" and kind == "nan" else (optimizer,):
            before = {key: tensor.clone() for key, (tensor, _) in held(model).items()}
            set_gradients(model, 0)
            if dist.get_rank() in bad_ranks:
                param = model.get_parameter(leaf)
                if kind == "missing":
                    param.grad = None
                else:
                    private_torch.local_tensor(param.grad).view(-1)[:1] = float("nan")
            with pytest.raises((NonFiniteGradientError, RankMismatchError)) as error:
                chosen.step()
            errors.append(f"{kind}: {type(error.value).__name__}")
            now = held(model)
            assert all(torch.equal(now[key][0], tensor) for key, tensor in before.items() if not key.startswith("norm"))
    return errors


def test_a_bad_gradient_is_bad_on_every_rank() -> None:
    """4 ranks; of the replicas, which have the sums of their gradients, both."""
    jobs = [("dp 2, tp 2", 1), ("x 2, y 1, z 2", 1, 3)]
    for leaves, results in zip((2, 1), runs(bad_gradient, jobs).values(), strict=True):
        wanted = ["nan: NonFiniteGradientError"] * (leaves + 1) + ["missing: RankMismatchError"] * leaves
        assert results == [wanted] * 4


def other_gradients(name: str) -> list[str]:
    """Gradients that are not laid out as their parameter is."""
    model = build(EVERY[name], "mxfp8")
    weight = model.row.weight
    optimizer = FusedAdam([("weight", weight)], use_decoupled_grad=True)
    set_gradients(model, 0)
    errors = []
    whole_grad = weight.grad.full_tensor()
    weight.grad = DTensor.from_local(whole_grad / 4, weight.device_mesh, [Partial(), Partial()])
    with pytest.raises(ConfigurationError, match=r"row\.weight is a DTensor .* but its gradient is .*\(Partial"):
        clip_grad_norm_(model, 1.0)
    for grad in (weight.grad.redistribute(placements=[Replicate(), Replicate()]), whole_grad):
        weight.decoupled_grad = grad
        with pytest.raises(ConfigurationError) as error:
            optimizer.step()
        errors.append(str(error.value))
    return errors


def test_gradients_must_be_laid_out_as_parameters() -> None:
    """4 ranks: one that is still to be reduced would have the right shape."""
    for laid, kind in run_ranks(4, other_gradients, "dp 2, tp 2"):
        assert "with placements (Shard(dim=0), Shard(dim=1))" in laid and "but its decoupled_grad is a DTensor" in laid
        assert kind.startswith("weight is a DTensor") and "but its decoupled_grad is a plain tensor" in kind
