"""Every way to save and load a model and its optimizer, bit for bit: a table of ways and recipes for each mesh.

Runs on one process without FSDP2, and on 1, 2, 3 and 4 ranks. `equal` says that saving and loading changed no bit of
the saved model, and that a differently seeded new one has them all afterwards: codes, scales, histories, random keys
and draw counts, masters, moments, and the values and types of the optimizer's groups. Every way meets
every recipe and every mesh. One way of each column then trains on beside the saved model.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from quantshard import Linear, quantized_model_init
from quantshard.errors import QuantshardError
from tests.distributed.models import RECIPES, Case, bits, build, sha
from tests.distributed.pool import run_ranks
from tests.distributed.saving import (
    FLAT,
    FULL,
    ON_RANK_0,
    SHAPES,
    WAYS,
    Load,
    load_named,
    load_ours,
    load_plain,
    load_torch,
    new_run,
    on_rank_0,
    save_named,
    save_ours,
    save_plain,
    save_torch,
    save_torch_to_dcp,
)
from tests.distributed.wraps import data_parallel

pytestmark = pytest.mark.distributed

MESHES: dict[str, tuple[int, ...] | None] = {
    "alone": None,
    "FSDP2 x1": (1,),
    "FSDP2 x3": (3,),
    "FSDP2 x2": (2,),
    "HSDP 2x2": (2, 2),
}
TRAINS = {"dcp.async_save while training", "  with a FileSystemWriter"}
WITHOUT_FSDP2_ONLY = {"  assign"}  # FSDP2 keeps the tensors it has


def column(case: Case, folder: str, chosen: list[str], trained: str) -> dict[str, str]:
    """What each of the chosen ways does, for one recipe and mesh. `trained`: the one that trains on."""
    source, words = new_run(case, folder), {}
    source.train(1)
    for index, name in enumerate(chosen):
        save, load = WAYS[name]
        before = source.held()
        saved = save(source, source.folder / str(index))
        kept = name in TRAINS or source.held() == before
        with torch.random.fork_rng():
            target = new_run(replace(case, seed=99), folder)
        born = target.held()
        assert len([key for key in born if born[key] != before[key]]) > len(born) // 4, "nothing was left to load"
        load(target, saved)
        same = target.held() == before
        if same and name == trained:
            same = source.train(1) == target.train(1) and source.held() == target.held()
        words[name] = "equal" if kept and same else "DIFFER"
    return words


TURNS = ("alone", "FSDP2 x1", "FSDP2 x3", "FSDP2 x2", "HSDP 2x2", "alone", "FSDP2 x1")
"""Of the meshes, one for each recipe; what few ranks do is soon done, so they have two."""


def ways_of(mesh: str, recipe: str) -> tuple[list[str], str]:
    """The ways whose turn it is, others for the next mesh or recipe; and the one of them that trains on."""
    number, recipe_number = list(MESHES).index(mesh), list(RECIPES).index(recipe)
    chosen = [way for place, way in enumerate(WAYS) if TURNS[(place + recipe_number) % len(TURNS)] == mesh]
    if MESHES[mesh] is None:
        chosen += sorted(WITHOUT_FSDP2_ONLY - {*chosen})
    else:
        chosen = [name for name in chosen if name not in WITHOUT_FSDP2_ONLY]
    may_train = [name for name in chosen if name not in TRAINS]
    return chosen, may_train[number % len(may_train)]


def test_every_way_meets_every_recipe_and_mesh() -> None:
    tried = {(way, recipe, mesh) for recipe in RECIPES for mesh in MESHES for way in ways_of(mesh, recipe)[0]}
    assert {(way, recipe) for way, recipe, _ in tried} == {(way, recipe) for way in WAYS for recipe in RECIPES}
    everywhere = WAYS.keys() - WITHOUT_FSDP2_ONLY
    assert {(way, mesh) for way, _, mesh in tried} >= {(way, mesh) for way in everywhere for mesh in MESHES}
    trained = {ways_of(mesh, recipe)[1] for recipe in RECIPES for mesh in MESHES}
    assert trained >= everywhere - TRAINS


def table(mesh: str, recipes: list[str], folder: str) -> dict[str, dict[str, str]]:
    columns = {}
    for index, recipe in enumerate(RECIPES):
        if recipe not in recipes:
            continue
        # FP8 moments on every other recipe
        case = Case(recipe, MESHES[mesh], moments=torch.uint8 if index % 2 else torch.float32, shapes=SHAPES)
        inner = f"{folder}/{recipe}"
        on_rank_0(Path(inner).mkdir)
        columns[recipe] = column(case, inner, *ways_of(mesh, recipe))
    return columns


CHOSEN = {
    "alone": [recipe for number, recipe in enumerate(RECIPES) if number in (0, 3, 4, 6)],
    "FSDP2 x2": list(RECIPES),
}
"""Columns whose ways are all there are; `make test-all` has the others."""
COLUMNS = [(mesh, recipes) for mesh, recipes in CHOSEN.items()]
LEFT = [(mesh, [recipe for recipe in RECIPES if recipe not in CHOSEN.get(mesh, ())]) for mesh in MESHES]


def test_the_chosen_columns_have_every_way() -> None:
    found = {(way, mesh) for mesh, recipes in CHOSEN.items() for recipe in recipes for way in ways_of(mesh, recipe)[0]}
    assert {way for way, mesh in found if mesh != "alone"} == WAYS.keys() - WITHOUT_FSDP2_ONLY
    assert {way for way, mesh in found if mesh == "alone"} == WAYS.keys()


@pytest.mark.parametrize(
    ("mesh", "recipes"),
    COLUMNS + [pytest.param(mesh, recipes, marks=pytest.mark.exhaustive) for mesh, recipes in LEFT if recipes],
    ids=[mesh for mesh, _ in COLUMNS] + [f"{mesh}, the others" for mesh, recipes in LEFT if recipes],
)
def test_table(mesh: str, recipes: list[str], tmp_path: Path, show: Callable[[str], None]) -> None:
    """1 to 4 ranks."""
    by_rank = run_ranks(Case("current", MESHES[mesh]).ranks, table, mesh, recipes, str(tmp_path))
    rows = [f"{mesh:<42}" + "  ".join(RECIPES)]
    wrong = False
    for way in WAYS:
        row = f"{way:<42}"
        for recipe in RECIPES:
            found = {columns.get(recipe, {}).get(way, "-") for columns in by_rank}
            wrong = wrong or not found <= {"equal", "-"} or len(found) > 1
            row += f"{found.pop() if len(found) == 1 else 'DIFFER':<{len(recipe) + 2}}"
        rows.append(row.rstrip())
    show("\n".join(rows))
    assert not wrong, "\n".join(rows)


# Parts, and other meshes ----------------------------------------------------------------------------------------------


def saved_everywhere(case: Case, folder: str) -> dict[str, str]:
    """One model, saved in five ways; the last from a run that had one parameter frozen."""
    run = new_run(case, folder)
    run.train(1)
    save_plain(run, run.folder / "plain")
    save_ours(run, run.folder / "ours")
    save_named()(run, run.folder / "named")
    save_named(FLAT)(run, run.folder / "flat")
    save_torch(run, run.folder / "file.pt")
    save_torch_to_dcp(run, run.folder / "from file")
    on_rank_0(dcp_to_torch_save, run.folder / "named", run.folder / "from dcp.pt")
    return bits(run.model, run.optimizer)


CROSSINGS: dict[str, tuple[Load, str]] = {
    "dcp.load of checkpoints.save's": (load_plain, "ours"),
    "checkpoints.load of dcp.save's": (load_ours, "plain"),
    "a Stateful's": (load_named(), "named"),
    "flattened": (load_named(FLAT), "flat"),
    "a file of torch.save": (load_torch(mmap=True), "file.pt"),
    "a checkpoint made from it": (load_named(), "from file"),
    "a file made from a checkpoint": (load_torch(mmap=False), "from dcp.pt"),
}


def loaded_everywhere(case: Case, folder: str) -> dict[str, dict[str, str]]:
    found = {}
    for name, (load, saved) in CROSSINGS.items():
        run = new_run(case, folder)
        load(run, run.folder / saved)
        found[name] = bits(run.model, run.optimizer)
    return found


@pytest.mark.parametrize(
    "recipe", ["nvfp4", *(pytest.param(name, marks=pytest.mark.exhaustive) for name in ("delayed", "block"))]
)
def test_saved_in_one_way_and_loaded_in_another(recipe: str, tmp_path: Path) -> None:
    """Saved on 3 ranks, loaded on 2."""
    saved = run_ranks(3, saved_everywhere, Case(recipe, (3,), shapes=SHAPES, moments=torch.uint8), str(tmp_path))[0]
    target = Case(recipe, (2,), shapes=SHAPES, moments=torch.uint8, seed=99)
    for found in run_ranks(2, loaded_everywhere, target, str(tmp_path)):
        assert found == dict.fromkeys(CROSSINGS, saved)


def parts(case: Case, folder: str) -> list[str]:
    """What is wrong with loading only the model, only the optimizer, and all but a frozen weight."""
    source = new_run(case, folder)
    source.train(1)
    whole, wrong = source.held(), []
    for options in (None, FULL):
        state = source.named_state(options)
        model_only, optimizer_only = (new_run(replace(case, seed=99), folder) for _ in range(2))
        born = model_only.held()
        set_model_state_dict(model_only.model, state["model"], options=options)
        set_optimizer_state_dict(optimizer_only.model, optimizer_only.optimizer, state["optimizer"], options=options)
        for run, loaded in ((model_only, "model."), (optimizer_only, ("optimizer.", "group "))):
            expected = {key: (whole if key.startswith(loaded) else born)[key] for key in whole}
            wrong += [f"{loaded}: {key}" for key, value in run.held().items() if value != expected[key]]
        try:
            model_only.train(1)
        except QuantshardError as error:
            wrong += [] if "reseed_masters" in str(error) else [str(error)]
        else:
            wrong.append("masters of other weights were not noticed")
    for options in (StateDictOptions(ignore_frozen_params=True), replace(FULL, ignore_frozen_params=True)):
        frozen, target = (new_run(replace(case, seed=seed), folder) for seed in (case.seed, 99))
        for run in (frozen, target):
            run.model[1].weight.requires_grad_(False)
        before, expected = target.held(), frozen.held()
        state = get_model_state_dict(frozen.model, options=options)
        set_model_state_dict(target.model, state, options=replace(options, strict=False))
        for key, value in target.held().items():
            if key.startswith("model.") and value != (before if "model.1.weight" in key else expected)[key]:
                wrong.append(f"{options}: {key}")
    return wrong


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.exhaustive), 3])
def test_only_the_model_only_the_optimizer_and_frozen_weights(ranks: int, tmp_path: Path) -> None:
    """1 and 3 ranks."""
    recipe = {1: "mxfp8", 3: "nvfp4"}[ranks]
    assert run_ranks(ranks, parts, Case(recipe, (ranks,), shapes=SHAPES), str(tmp_path)) == [[]] * ranks


# What is refused ------------------------------------------------------------------------------------------------------


def build_on_meta(case: Case) -> nn.Sequential:
    with quantized_model_init(recipe=RECIPES[case.recipe]):
        return nn.Sequential(*[Linear(a, b, params_dtype=torch.bfloat16, device="meta") for a, b in case.shapes])


def refusals(case: Case, folder: str) -> dict[str, str]:
    """The message of each refused load; every bit is as it was after it."""
    source, other = new_run(case, folder), new_run(replace(case, recipe="block"), folder)
    source.train(1)
    other.train(1)
    target, described = new_run(replace(case, seed=99), folder), build_on_meta(case)
    found, before = {}, target.held()

    def attempt(name: str, load: Callable[[], object]) -> None:
        try:
            load()
            found[name] = "nothing was raised"
        except RuntimeError as error:
            found[name] = str(error)
        changed = [key for key, value in target.held().items() if value != before[key]]
        found[name] += f" CHANGED {changed}" if changed else ""

    for options in (None, FULL):
        kind = "sharded" if options is None else "full"
        loosely = replace(options or StateDictOptions(), strict=False)
        state = source.named_state(options)

        def set_model(state: dict[str, Any], options: StateDictOptions | None = options) -> None:
            set_model_state_dict(target.model, state, options=options)

        def set_optimizer(state: dict[str, Any], options: StateDictOptions | None = options) -> None:
            set_optimizer_state_dict(target.model, target.optimizer, state, options=options)

        foreign = get_model_state_dict(other.model, options=options)
        high_precision = {name: torch.zeros(param.shape) for name, param in target.model.named_parameters()}
        first = {key: value for key, value in state["model"].items() if key.startswith("0.")}
        moments = {key: value for key, value in state["optimizer"]["state"].items() if key != "1.bias"}
        attempt(f"{kind}, another recipe", lambda: set_model(foreign))  # noqa: B023
        attempt(f"{kind}, high precision", lambda: set_model(high_precision))  # noqa: B023
        for lacking in ("0.weight", "0.weight_scale_inv"):
            short = {key: value for key, value in first.items() if key != lacking}
            attempt(f"{kind}, without {lacking}", lambda: set_model(short, loosely))  # noqa: B023
        attempt(f"{kind}, without 1.bias", lambda: set_optimizer({**state["optimizer"], "state": moments}))  # noqa: B023
    on_rank_0_alone = source.named_state(ON_RANK_0)["model"]
    broadcast = replace(FULL, broadcast_from_rank0=True)
    attempt("broadcast", lambda: set_model_state_dict(target.model, on_rank_0_alone, options=broadcast))
    whole = source.named_state(FULL)["model"]
    attempt("meta", lambda: described.load_state_dict(whole))
    set_model_state_dict(described, dict(whole), options=FULL)  # which assigns
    differing = [key for key, value in described.state_dict().items() if not torch.equal(value, whole[key])]
    assert not differing and len(whole) == len(described.state_dict()), differing
    return found


REFUSED = {
    "another recipe": ("0.weight: the state dict holds 'fp8_128x128'", "is 'mxfp8_32x32'", "2.weight:"),
    "high precision": ("0.weight: a float32 tensor", "call quantshard.checkpoints.load_high_precision(", "2.weight:"),
    "without 0.weight": ("the state dict lacks 0.weight;", "load all components or none"),
    "without 0.weight_scale_inv": ("the state dict lacks 0.weight_scale_inv;", "load all components or none"),
    "without 1.bias": ("Missing optimizer state for parameter '1.bias'",),
    "broadcast": ("checkpoints.load_high_precision", "load_from_rank0"),
    "meta": ("0.weight is on the meta device", "call to_empty() first"),
}


@pytest.mark.parametrize("ranks", [1, 3])
def test_refused_on_every_rank_and_nothing_changed(ranks: int, tmp_path: Path) -> None:
    """1 and 3 ranks."""
    by_rank = run_ranks(ranks, refusals, Case("mxfp8", (ranks,), shapes=SHAPES), str(tmp_path))
    assert len(by_rank[0]) == 2 * 5 + 2
    for found in by_rank:
        for name, message in found.items():
            assert "CHANGED" not in message, (name, message)
            for part in REFUSED[name.split(", ")[-1]]:
                assert part in message, (name, message)


def without_a_layer(case: Case, folder: str) -> list[tuple[str, list[str]]]:
    """For a strict load of a state dict without the last layer: the message, and what is neither old nor loaded."""
    source, found = new_run(case, folder), []
    source.train(1)
    whole = source.held()
    for options in (None, FULL):
        target = new_run(replace(case, seed=99), folder)
        born = target.held()
        state = get_model_state_dict(source.model, options=options)
        short = {key: value for key, value in state.items() if not key.startswith("2.")}
        try:
            set_model_state_dict(target.model, short, options=options)
            message = "nothing was raised"
        except RuntimeError as error:
            message = str(error)
        loaded = ("model.0.", "model.1.")
        half = [k for k, v in target.held().items() if v != (whole if k.startswith(loaded) else born)[k]]
        found.append((message, half))
    return found


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_missing_layer_is_an_error_on_every_rank(ranks: int, tmp_path: Path) -> None:
    """1 and 3 ranks: and the others are loaded whole. PyTorch itself fills in what a full state dict lacks."""
    for found in run_ranks(ranks, without_a_layer, Case("nvfp4", (ranks,), shapes=SHAPES), str(tmp_path)):
        for message, half in found:
            assert "Missing key(s)" in message and '"2.weight", "2.weight_scale_inv"' in message
            assert not half


def compile_blocks(model: nn.Sequential) -> nn.Sequential:
    return nn.Sequential(*(torch.compile(block, backend="eager") for block in model))


WRAPPINGS: dict[str, Callable[[nn.Sequential], nn.Module]] = {
    "none": nn.Sequential.train,
    "DDP": data_parallel,
    "compile": partial(torch.compile, backend="eager"),
    "compiled blocks": compile_blocks,
}
SHARDED_WRAPPINGS: dict[str, Callable[[nn.Sequential], nn.Module]] = {
    "none": nn.Sequential.train,
    "compile": partial(torch.compile, backend="eager"),
    "compiled blocks": compile_blocks,
}


def wrapped_loads(case: Case) -> list[str]:
    """The wrappings whose `set_model_state_dict` lost bits, or did not miss a key."""
    wrong, (source, other) = [], (build(replace(case, seed=seed)) for seed in (7, 99))
    expected = bits(source), bits(other)
    wrappings = WRAPPINGS if case.mesh is None else SHARDED_WRAPPINGS
    for number, (name, wrap) in enumerate(wrappings.items()):
        options = (FULL, None)[number % 2]
        target = build(replace(case, seed=5))
        wrapped = wrap(target)
        set_model_state_dict(wrapped, get_model_state_dict(source, options=options), options=options)
        found = [bits(target)]
        set_model_state_dict(wrapped, get_model_state_dict(wrap(other), options=options), options=options)
        found.append(bits(target))
        set_model_state_dict(other, get_model_state_dict(wrap(source), options=options), options=options)
        found.append(bits(other))
        set_model_state_dict(other, get_model_state_dict(wrapped, options=options), options=options)
        found.append(bits(other))
        state = get_model_state_dict(source, options=options)
        del state["0.weight_scale_inv"]
        try:
            set_model_state_dict(wrapped, state, options=options)
            wrong.append(f"{name}: nothing was missing")
        except RuntimeError as error:
            wrong += [] if "0.weight_scale_inv" in str(error) else [str(error)]
        wrong += [] if found == [*expected, *expected] else [f"{name}: other bits"]
    return wrong


@pytest.mark.parametrize(("recipe", "mesh"), [("delayed", None), ("nvfp4", (2,))])
def test_set_model_state_dict_of_wrapped_models(recipe: str, mesh: tuple[int, ...] | None) -> None:
    """Saved and loaded under DDP and torch.compile, or under one of them alone."""
    assert run_ranks(2, wrapped_loads, Case(recipe, mesh, shapes=SHAPES)) == [[], []]


def broadcast_to_replicas(case: Case, wrap: Callable[[nn.Sequential], nn.Module]) -> list[str]:
    """The keys whose bits `broadcast_from_rank0` did not bring to this rank."""
    source, target = (build(replace(case, seed=seed)) for seed in (1, 2))
    state = get_model_state_dict(source, options=ON_RANK_0)
    set_model_state_dict(wrap(target), state, options=replace(FULL, broadcast_from_rank0=True))
    expected = bits(source)
    return [key for key, value in bits(target).items() if value != expected[key]]


@pytest.mark.parametrize("wrapping", ["none", "DDP"])
def test_broadcast_to_unsharded_replicas(wrapping: str) -> None:
    assert run_ranks(3, broadcast_to_replicas, Case("block", None, shapes=SHAPES), WRAPPINGS[wrapping]) == [[]] * 3


# In a process that knows nothing of quantshard ------------------------------------------------------------------------

READ = """
import hashlib, sys, torch
def walk(value, at=""):
    if isinstance(value, torch.Tensor):
        assert type(value) in (torch.Tensor, torch.nn.Parameter), (at, type(value))
        content = value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        return {at: hashlib.sha256(content).hexdigest()[:16]}
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, (list, tuple)) else ()
    return {k: v for key, inner in items for k, v in walk(inner, f"{at}.{key}").items()}
for file in sys.argv[1:]:
    print(sorted(walk(torch.load(file, weights_only=True)).items()))
assert "quantshard" not in sys.modules
"""
"""Prints hashes of all tensors in files of `torch.save`."""


def save_files(cases: dict[str, Case], folder: str) -> dict[str, list[tuple[str, str]]]:
    """Of each recipe a file of the whole state; what must be read from it."""
    found = {}
    for name, case in cases.items():
        run = new_run(case, folder)
        run.train(1)
        state = run.state() if case.mesh is None else run.named_state(ON_RANK_0)
        held = {f".model.{key}": value for key, value in state["model"].items()} | {
            f".optimizer.state.{index}.{key}": value
            for index, entries in state["optimizer"].get("state", {}).items()
            for key, value in entries.items()
        }
        found[name] = sorted((key, sha(value)) for key, value in held.items())
        on_rank_0(torch.save, state, Path(folder) / f"{name}.pt")
    return found


@pytest.mark.parametrize(
    ("ranks", "recipes"),
    [(2, ["delayed", "nvfp4"]), *(pytest.param(n, [*RECIPES], marks=pytest.mark.exhaustive) for n in (1, 2))],
    ids=["2, some", "1", "2"],
)
def test_files_are_read_where_quantshard_is_not(ranks: int, recipes: list[str], tmp_path: Path) -> None:
    """1 process without FSDP2, and full state dicts of 2 ranks; FP8 moments on every other recipe."""
    cases = {
        name: Case(name, None if ranks == 1 else (ranks,), shapes=SHAPES, moments=(torch.float32, torch.uint8)[i % 2])
        for i, name in enumerate(recipes)
    }
    saved = run_ranks(ranks, save_files, cases, str(tmp_path))[0]
    files = [str(tmp_path / f"{name}.pt") for name in cases]
    result = subprocess.run([sys.executable, "-I", "-c", READ, *files], capture_output=True, text=True, check=True)
    for name, line in zip(cases, result.stdout.splitlines(), strict=True):
        assert ast.literal_eval(line) == saved[name]
        assert any(key.endswith("_scale_inv") for key, _ in saved[name])
