"""Stock optimizers, and MasterWeights around them, over FSDP2: one step's bits are those of every other mesh.

Each test names its rank count.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.optim.lr_scheduler import LambdaLR

import quantshard as qs
from quantshard.errors import NonFiniteGradientError, RankMismatchError, UnsupportedOperationError
from quantshard.optimizers import MasterWeights
from quantshard.tensor import components
from tests.covering import exhaustive
from tests.distributed.models import RECIPES, Case, bits, build, mesh_of, set_gradients, sha, train
from tests.distributed.pool import run_ranks

pytestmark = pytest.mark.distributed

STOCK: dict[str, tuple[str, dict[str, Any]]] = {
    "AdamW": ("AdamW", {"lr": 1e-2, "weight_decay": 0.1, "foreach": False}),
    "AdamW foreach": ("AdamW", {"lr": 1e-2, "weight_decay": 0.1, "foreach": True}),
    "Adam": ("Adam", {"lr": 1e-2, "weight_decay": 0.1, "foreach": False}),
    "Adam foreach": ("Adam", {"lr": 1e-2, "weight_decay": 0.1, "foreach": True}),
    "SGD": ("SGD", {"lr": 0.1, "momentum": 0.9, "foreach": False}),
    "SGD foreach": ("SGD", {"lr": 0.1, "momentum": 0.9, "foreach": True}),
}
OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "AdamW amsgrad": ("AdamW", {"amsgrad": True}),
    "SGD nesterov": ("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    "NAdam": ("NAdam", {}),
    "RAdam": ("RAdam", {"foreach": True}),
    "RMSprop": ("RMSprop", {}),
    "Adagrad": ("Adagrad", {}),
    "Adamax": ("Adamax", {}),
    "Adadelta": ("Adadelta", {"foreach": True}),
}
FUSED: dict[str, tuple[str, dict[str, Any]]] = {"AdamW fused": ("AdamW", {"lr": 1e-2, "fused": True})}
"""On CPUs PyTorch's own kernel rounds the last elements of a tensor otherwise, so bits depend on the mesh."""

ON_MASTERS: dict[str, tuple[str, dict[str, Any]]] = {
    **STOCK,
    "SGD plain": ("SGD", {"lr": 0.1}),
    "Adagrad": ("Adagrad", {}),
}
SHAPES = ((96, 150), (150, 67), (67, 1))
"""(in, out) of each layer: blocks are cut, and some ranks hold nothing of the last."""

Meshes = Sequence[tuple[int, ...]]
MESHES: Meshes = ((1,), (2, 2))
"""1 rank, and HSDP on 4."""


def make(model: nn.Module, name: str, masters: bool) -> torch.optim.Optimizer:
    kind, options = {**STOCK, **OTHERS, **FUSED, **ON_MASTERS}[name]
    cls = getattr(torch.optim, kind)
    if masters:
        return MasterWeights(cls, model.named_parameters(), **options)
    return cls(model.named_parameters(), **options)


def born(case: Case, dtype: torch.dtype) -> nn.Sequential:
    """`models.build` with another dtype."""
    if dtype is torch.bfloat16:
        return build(case)
    torch.manual_seed(case.seed)
    with qs.quantized_model_init(recipe=RECIPES[case.recipe]):
        model = nn.Sequential(*[qs.Linear(a, b, params_dtype=dtype, device="cpu") for a, b in case.shapes])
    if case.mesh is not None:
        for layer in [*model, model]:
            fully_shard(layer, mesh=mesh_of(case))
    return model


def steps(case: Case, names: list[str], masters: bool, dtype: torch.dtype) -> dict[str, dict[str, str]]:
    """Bits after two steps with each optimizer."""
    found = {}
    for name in names:
        model = born(case, dtype)
        optimizer = make(model, name, masters)
        for step in range(2):
            set_gradients(model, step)
            optimizer.step()
        found[name] = bits(model, optimizer)
    return found


def differing(
    recipe: str, names: list[str], masters: bool, meshes: Meshes, dtype: torch.dtype | None = None
) -> dict[str, list[str]]:
    """For each optimizer, which meshes gave other bits than one process without FSDP2, and of what."""
    dtype = dtype or (torch.bfloat16 if masters else torch.float32)
    wanted: dict[str, dict[str, str]] = {}
    wrong: dict[str, list[str]] = {}
    for mesh in (None, *meshes):
        case = Case(recipe, mesh, shapes=SHAPES)
        for rank, found in enumerate(run_ranks(case.ranks, steps, case, names, masters, dtype)):
            wanted = wanted or found
            for name in names:
                keys = [key for key in wanted[name] if wanted[name][key] != found[name].get(key)]
                if keys or found[name].keys() != wanted[name].keys():
                    wrong.setdefault(name, []).append(f"{mesh} rank {rank}: {keys[:4]}")
    return wrong


@pytest.mark.parametrize(
    ("recipe", "masters"),
    exhaustive(product(RECIPES, (False, True)), ((name, turn % 2 == 1) for turn, name in enumerate(RECIPES))),
)
def test_the_same_bits_with_every_recipe(recipe: str, masters: bool) -> None:
    """3 ranks and one process: weights, draws, masters and states after two steps, from the same gradients."""
    assert not differing(recipe, ["AdamW"] if masters else ["AdamW", "AdamW foreach"], masters, [(3,)])


@pytest.mark.parametrize(
    ("name", "masters"),
    exhaustive(product(("AdamW", "SGD foreach"), (False, True)), [("AdamW", True)]),
)
def test_the_same_bits_on_every_mesh(name: str, masters: bool) -> None:
    """1 rank, and HSDP on 4; 3 ranks are in the test of every recipe, and 2 in that of every optimizer."""
    assert not differing("mxfp8", [name], masters, MESHES)


@pytest.mark.parametrize(
    ("recipe", "names", "masters"),
    [
        ("block", list(OTHERS), False),
        ("nvfp4", list(STOCK), False),
        ("mxfp8", list(ON_MASTERS), True),
        pytest.param("block", list(STOCK), False, marks=pytest.mark.exhaustive),
    ],
    ids=["others, block", "stock, nvfp4", "masters", "stock, block"],
)
def test_the_same_bits_with_every_optimizer(recipe: str, names: list[str], masters: bool) -> None:
    """2 ranks: those of torch.optim, but for those that DTensor or the op table refuse."""
    assert not differing(recipe, names, masters, [(2,)])


def test_the_same_bits_of_bfloat16_models() -> None:
    """3 ranks. AdamW alone: the others add bfloat16 tensors with alpha, and on CPUs PyTorch's own kernel rounds the
    last elements of a tensor otherwise; biases differ too."""
    assert not differing("current", ["AdamW", "AdamW foreach"], False, [(3,)], torch.bfloat16)


# What a step sends


def reductions(case: Case, name: str, masters: bool) -> list[int]:
    """Bytes of each all-reduce in a step, which autograd notices too."""
    model = build(case)
    optimizer = make(model, name, masters)
    set_gradients(model, 0)
    locals_ = [layer.weight._local_tensor for layer in model]
    versions = [local._version for local in locals_]
    with mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as seen:
        optimizer.step()
    assert all(local._version > version for local, version in zip(locals_, versions, strict=True))
    return [call.args[0].nbytes for call in seen.call_args_list]


def test_collectives() -> None:
    """3 ranks: one collective for a list, one for a weight; MasterWeights: flags, and one for all amaxes."""
    case = Case("mxfp8", (3,), shapes=SHAPES)
    updates = 2  # weight decay, and the step itself
    assert run_ranks(3, reductions, case, "AdamW foreach", False) == [[4096] * updates] * 3
    assert run_ranks(3, reductions, case, "AdamW", False) == [[4096] * updates * len(SHAPES)] * 3
    for flags, _ in run_ranks(3, reductions, case, "AdamW", True):
        assert flags == 4 * 3 * 2 * len(SHAPES), "three for each weight and bias"


# Training, saving, resuming


def fit(case: Case, name: str, masters: bool) -> list[float]:
    model = build(case)
    optimizer = make(model, name, masters)
    scheduler = LambdaLR(optimizer, lambda step: 1 / (1 + 0.01 * step))
    losses: list[float] = []
    for step in range(20):
        losses += train(model, optimizer, case, step % 2, step % 2 + 1)  # type: ignore[arg-type]
        scheduler.step()
    return losses


FITTED = [("AdamW foreach", False), ("AdamW fused", True), ("SGD", True)]


@pytest.mark.parametrize(("name", "masters"), exhaustive(FITTED, FITTED[:1]))
def test_training_lowers_the_loss(name: str, masters: bool) -> None:
    """2 ranks: on two batches seen again and again."""
    case = Case("mxfp8", (2,), shapes=((96, 70), (70, 33)))
    for losses in run_ranks(2, fit, case, name, masters):
        assert sum(losses[-4:]) < 0.75 * sum(losses[:4]), (name, losses)


def save(case: Case, path: str, name: str, masters: bool, flatten: bool) -> tuple[dict[str, str], dict[str, str]]:
    """Bits when saved, and after two more steps."""
    model = build(case)
    optimizer = make(model, name, masters)
    for step in range(2):
        set_gradients(model, step)
        optimizer.step()
    optimizer.param_groups[0]["lr"] = 3e-3
    optimizer.zero_grad()
    options = StateDictOptions(flatten_optimizer_state_dict=flatten)
    model_state, optimizer_state = get_state_dict(model, optimizer, options=options)
    dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=path)
    saved = bits(model, optimizer)
    for step in range(2, 4):
        set_gradients(model, step)
        optimizer.step()
    return saved, bits(model, optimizer)


def resume(case: Case, path: str, name: str, masters: bool, flatten: bool) -> tuple[dict[str, str], dict[str, str]]:
    model = build(replace(case, seed=9))
    optimizer = make(model, name, masters)
    before = bits(model)
    options = StateDictOptions(flatten_optimizer_state_dict=flatten)
    model_state, optimizer_state = get_state_dict(model, optimizer, options=options)
    assert bits(model) == before, "get_state_dict changes no bit"
    dcp.load({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=path)
    set_state_dict(
        model, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state, options=options
    )  # fmt: skip
    assert optimizer.param_groups[0]["lr"] == 3e-3
    loaded = bits(model, optimizer)
    for step in range(2, 4):
        set_gradients(model, step)
        optimizer.step()
    return loaded, bits(model, optimizer)


@pytest.mark.parametrize(
    ("recipe", "name", "masters", "flatten", "mesh"),
    [
        ("mxfp8", "AdamW foreach", False, True, (3,)),
        ("nvfp4", "SGD foreach", True, False, (1,)),
        *(
            pytest.param(*cell, marks=pytest.mark.exhaustive)
            for cell in (
                ("current", "AdamW", False, False, (2, 2)),
                ("nvfp4", "AdamW", False, True, (1,)),
                ("delayed", "AdamW", True, False, (3,)),
                ("mxfp8", "AdamW foreach", True, True, (2, 2)),
                ("block", "SGD plain", True, True, (3,)),
            )
        ),
    ],
)
def test_resume(recipe: str, name: str, masters: bool, flatten: bool, mesh: tuple[int, ...], tmp_path: Path) -> None:
    """2 ranks save; a fresh 1, 3 or HSDP on 4 load, and go on with the same bits as those that never stopped.

    `make test` has masters on HSDP in the test of every mesh, and flattened states of lists on 3 ranks."""
    path = str(tmp_path / "c")
    wanted = run_ranks(2, save, Case(recipe, (2,), shapes=SHAPES), path, name, masters, flatten)[0]
    case = Case(recipe, mesh, shapes=SHAPES)
    for found in run_ranks(case.ranks, resume, case, path, name, masters, flatten):
        assert found == wanted


def plain_idiom(case: Case, path: str) -> bool:
    """dcp.save and dcp.load of `state_dict()`s, before the first step and after."""
    for updates in (0, 2):
        model = build(case)
        optimizer = make(model, "SGD", True)
        for step in range(updates):
            set_gradients(model, step)
            optimizer.step()
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        dcp.save(state, checkpoint_id=f"{path}{updates}")
        other = build(replace(case, seed=9))
        other_optimizer = make(other, "SGD", True)
        state = {"model": other.state_dict(), "optimizer": other_optimizer.state_dict()}
        dcp.load(state, checkpoint_id=f"{path}{updates}")
        other.load_state_dict(state["model"])
        other_optimizer.load_state_dict(state["optimizer"])
        for step in range(updates, updates + 2):
            for each, its_optimizer in ((model, optimizer), (other, other_optimizer)):
                set_gradients(each, step)
                its_optimizer.step()
        if bits(model, optimizer) != bits(other, other_optimizer):
            return False
    return True


def test_plain_idiom(tmp_path: Path) -> None:
    """1 and 3 ranks: MasterWeights, whose momentum begins as the first gradient in both."""
    for ranks in (1, 3):
        assert all(run_ranks(ranks, plain_idiom, Case("block", (ranks,), shapes=SHAPES), str(tmp_path / str(ranks))))


# What cannot be done in step


def message_of(function: Any) -> str:
    try:
        function()
    except (NonFiniteGradientError, RankMismatchError, UnsupportedOperationError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def missing(case: Case, name: str, masters: bool, layer: int) -> str:
    model = build(case)
    optimizer = make(model, name, masters)
    set_gradients(model, 0)
    if dist.get_rank() == 1:
        model[layer].weight.grad = None
    return message_of(optimizer.step)


@pytest.mark.parametrize(
    ("name", "masters"),
    exhaustive(
        product(("AdamW", "AdamW foreach", "SGD"), (False, True)),
        [("AdamW", False), ("AdamW foreach", False), ("SGD", True)],
    ),
)
def test_a_gradient_missing_on_one_rank(name: str, masters: bool) -> None:
    """3 ranks: all raise; none hangs."""
    for recipe in ("current", "mxfp8"):
        for message in run_ranks(3, missing, Case(recipe, (3,), shapes=SHAPES), name, masters, 1):
            assert message.startswith("RankMismatchError")
            assert ("on some ranks only" if masters else "is a gradient None on some") in message


def nan_flag(case: Case, name: str, value: float) -> tuple[str, bool, bool]:
    model = build(case)
    train(model, make(model, "SGD", False), case, 0, 1)  # type: ignore[arg-type]  # FSDP2 learns names in a forward
    optimizer = make(model, name, False)
    set_gradients(model, 0)
    if dist.get_rank() == 2:
        model[1].weight.grad._local_tensor.view(-1)[5] = value
    before = bits(model)
    message = message_of(optimizer.step)
    after = bits(model)
    return message, before["1.weight"] == after["1.weight"], before == after


INFINITE, NAN = float("inf"), float("nan")


@pytest.mark.parametrize(
    ("name", "value"),
    exhaustive(product(("SGD", "SGD foreach"), (INFINITE, NAN)), [("SGD", INFINITE), ("SGD foreach", NAN)]),
)
def test_a_non_finite_gradient_reaches_no_weight(name: str, value: float) -> None:
    """3 ranks: one bad element on one rank; all raise with the format and shape, and with a list nothing is written."""
    case = Case("mxfp8", (3,), init="direct", shapes=SHAPES)
    for message, same, all_same in run_ranks(3, nan_flag, case, name, value):
        assert message.startswith("NonFiniteGradientError")
        assert "QuantizedTensor(mxfp8_32x32" in message
        assert same
        assert all_same or name == "SGD", "one by one, the weights before it have moved"


def skipped(case: Case) -> tuple[int, bool, bool]:
    model = build(case)
    optimizer = make(model, "AdamW", True)
    set_gradients(model, 0)
    optimizer.step()
    before = bits(model, optimizer)
    set_gradients(model, 1)
    if dist.get_rank() == 2:
        model[1].weight.grad._local_tensor.view(-1)[5] = float("nan")
    optimizer.step()
    same = bits(model, optimizer) == before
    set_gradients(model, 1)
    optimizer.step()
    return optimizer.skipped_steps, same, bits(model, optimizer) != before  # type: ignore[attr-defined]


def test_masters_skip_non_finite_gradients() -> None:
    """3 ranks: one bad element on one rank; nothing changes anywhere, and the next step does."""
    assert run_ranks(3, skipped, Case("mxfp8", (3,), shapes=SHAPES)) == [(1, True, True)] * 3


def refused(case: Case) -> list[str]:
    found = []
    model = build(case)
    set_gradients(model, 0)
    found.append(message_of(torch.optim.AdamW(model.parameters(), fused=True).step))
    with torch.no_grad():
        clone = model[0].weight.detach().clone()
        found.append(message_of(lambda: clone.mul_(0.5)))
        model[0].unshard()
        found.append(message_of(lambda: model[0].weight.mul_(0.5)))
        model[0].reshard()
    torch.manual_seed(dist.get_rank())
    with qs.quantized_model_init(recipe=RECIPES[case.recipe]):
        other = fully_shard(qs.Linear(96, 96, device="cpu"), mesh=mesh_of(case))
    set_gradients(other, 0)
    found.append(message_of(torch.optim.SGD(other.parameters()).step))
    return found


def test_refused_on_every_rank() -> None:
    """1 and 3 ranks: a sentence with the way out, on each."""
    ways_out = ["FusedAdam", "fully_shard-ed module", "reshard()", "seed torch alike"]
    for ranks in (1, 3):
        for messages in run_ranks(ranks, refused, Case("current", (ranks,), shapes=SHAPES)):
            for message, way_out in zip(messages, ways_out, strict=True):
                assert way_out in message or (ranks == 1 and way_out == "seed torch alike"), messages


def nearest(case: Case) -> bool:
    """After steps, every weight is the nearest quantization of its master, bit for bit."""
    model = build(case)
    optimizer = make(model, "AdamW", True)
    for step in range(3):
        set_gradients(model, step)
        optimizer.step()
    twin = build(replace(case, seed=9))
    pairs = []
    for param, other in zip(model.parameters(), twin.parameters(), strict=True):
        master = optimizer.state[param]["master_param"]
        if components.quantized_local(other) is not None:
            pairs.append((other, master._local_tensor))
        elif not torch.equal(param.full_tensor(), master.full_tensor().bfloat16()):
            return False
    qs.requantize_(pairs)
    return all(
        sha(value) == sha(twin.state_dict()[key])
        for key, value in model.state_dict().items()
        if not key.endswith(("_key", "_draws", "bias"))
    )


@pytest.mark.parametrize(
    "recipe",
    exhaustive([(name,) for name in RECIPES if name != "delayed"], [("current",), ("nvfp4",), ("mxfp8 two copies",)]),
)
def test_weights_are_the_nearest_to_their_masters(recipe: str) -> None:
    """3 ranks. Not under delayed scaling, whose scales are of the past."""
    assert all(run_ranks(3, nearest, Case(recipe, (3,), shapes=SHAPES)))
