"""A state dict that rank 0 alone has reaches every rank's shard bit by bit, or is refused everywhere alike.

Runs on 1, 2, 3 and 4 ranks (HSDP 2x2), on 3 unsharded replicas, and on one process without process groups.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard

from quantshard import Linear, private_torch, quantized_model_init
from quantshard.checkpoints import load_from_rank0
from quantshard.errors import CheckpointError
from quantshard.tensor import components
from tests.distributed.models import RECIPES, Case, batch, build, mesh_of, sha
from tests.distributed.pool import run_ranks
from tests.distributed.saving import ON_RANK_0, SHAPES, new_run, to_all

pytestmark = pytest.mark.distributed

REPLICATED = ["delayed", "nvfp4", "mxfp8 two copies"]
"""Of their recipes: a history, stochastic rounding, two copies."""
RUNS = [
    ((3,), ["delayed", "mxfp8 two copies", "nvfp4"]),
    ((2, 2), REPLICATED[-1:]),
    *(pytest.param(mesh, [*RECIPES], marks=pytest.mark.exhaustive) for mesh in ((1,), (2,), (3,), (2, 2))),
]


def held(model: nn.Module) -> dict[str, str]:
    """Hashes of all that this rank holds of a model."""
    local = {key: private_torch.local_tensor(value) for key, value in model.state_dict().items()}
    return {key: f"{tuple(value.shape)} {sha(value.reshape(-1))}" for key, value in local.items() if not value.is_meta}


def differing(found: dict[str, str], expected: dict[str, str]) -> list[str]:
    return sorted(key for key in found.keys() | expected.keys() if found.get(key) != expected.get(key))


def on_rank_0(state: dict[str, Tensor]) -> dict[str, Tensor] | None:
    return state if dist.get_rank() == 0 else None


def trained_on(mesh: tuple[int, ...], recipes: list[str]) -> dict[str, list[str]]:
    """For each recipe what is not as in the run whose state rank 0 sent: after loading, and after training on."""
    wrong = {}
    for recipe in recipes:
        case = Case(recipe, mesh, shapes=SHAPES)
        source, target = new_run(case, ""), new_run(replace(case, seed=99), "")
        source.train(1)
        saved, before, sent = source.named_state(ON_RANK_0), source.held(), []
        broadcast = dist.broadcast

        def counted(buffer: Tensor, *args: Any, _sent: list[int] = sent, _real: Any = broadcast, **kwargs: Any) -> Any:
            _sent.append(buffer.numel())
            return _real(buffer, *args, **kwargs)

        with mock.patch.object(dist, "broadcast", counted):
            result = load_from_rank0(target.model, on_rank_0(saved["model"]))
        set_optimizer_state_dict(
            target.model,
            target.optimizer,
            saved["optimizer"],
            options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True),
        )
        wrong[recipe] = [*result.missing_keys, *result.unexpected_keys, *differing(target.held(), before)]
        largest = max(value.nbytes for value in source.model.state_dict().values())
        if source.train(1) != target.train(1) or differing(target.held(), source.held()):
            wrong[recipe].append("trains on differently")
        if len(sent) < 4 or max(sent) > largest:
            wrong[recipe].append(f"broadcasts of {sent} bytes")
    return wrong


@pytest.mark.parametrize(("mesh", "recipes"), RUNS, ids=lambda value: str(value) if isinstance(value, tuple) else "")
def test_every_rank_ends_with_the_bits_and_trains_on(mesh: tuple[int, ...], recipes: list[str]) -> None:
    """3 and 2x2 ranks, and 1 and 2 in `make test-all`."""
    found = run_ranks(Case("current", mesh).ranks, trained_on, mesh, recipes)
    assert found == [{recipe: [] for recipe in recipes}] * len(found)


def replicated() -> list[str]:
    wrong = []
    for recipe in RECIPES:
        source, target = (build(Case(recipe, seed=dist.get_rank() + more, shapes=SHAPES)) for more in (0, 10))
        load_from_rank0(target, on_rank_0(source.state_dict()))
        wrong += differing(held(target), to_all(held(source)))
    return wrong


def test_unsharded_replicas_all_get_the_whole() -> None:
    """3 ranks, each with weights of its own; rank 0's state dict is that of a live model."""
    assert run_ranks(3, replicated) == [[]] * 3


class Mixed(nn.Module):
    """Beside a quantized layer, plain ones: scalar and integer buffers, uneven and empty shards, a tied weight."""

    def __init__(self) -> None:
        super().__init__()
        with quantized_model_init(recipe="nvfp4"):
            self.quantized = Linear(33, 7, params_dtype=torch.float32)
        self.norm = nn.BatchNorm1d(7)
        self.plain = nn.Linear(7, 7)
        self.tied = nn.Linear(7, 7)
        self.tied.weight = self.plain.weight
        self.scalar = nn.Parameter(torch.randn(1))
        self.register_buffer("flags", torch.rand(5) < 0.5)
        self.register_buffer("nothing", torch.empty(0, 3, dtype=torch.complex64))


def mixed() -> list[str]:
    models = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        model = Mixed()
        model.norm(torch.randn(4, 7))
        models.append(fully_shard(model))
    source, target = models
    state = get_model_state_dict(source, options=ON_RANK_0)
    before = held(target)
    load_from_rank0(target, on_rank_0(state))
    unchanged = [key for key, value in held(target).items() if value == before[key]]
    assert len(unchanged) < len(before) // 2
    return differing(held(target), held(source))


@pytest.mark.parametrize("ranks", [1, 3])
def test_plain_modules_beside_quantized_ones(ranks: int) -> None:
    """1 and 3 ranks."""
    assert run_ranks(ranks, mixed) == [[]] * ranks


def gathered(case: Case) -> list[str]:
    """A forward without backward leaves FSDP2's outermost weights gathered."""
    source, target = new_run(case, ""), build(replace(case, seed=99, reshard=False))
    with torch.no_grad():
        target(batch(0, case)[0])
    load_from_rank0(target, on_rank_0(source.named_state(ON_RANK_0)["model"]))
    with torch.no_grad():
        out, expected = (model(batch(0, case)[0]) for model in (target, source.model))
    assert torch.equal(out, expected)
    return differing(held(target), held(source.model))


def test_weights_that_fsdp_left_gathered() -> None:
    """3 ranks."""
    assert run_ranks(3, gathered, Case("block", (3,), shapes=SHAPES)) == [[]] * 3


def test_without_process_groups() -> None:
    """One process, and no process group."""
    source, target = (build(Case("mxfp8", seed=seed, shapes=SHAPES)) for seed in (1, 2))
    before = components.storage_of(target[0].weight).version
    load_from_rank0(target, source.state_dict())
    assert held(target) == held(source)
    assert components.storage_of(target[0].weight).version > before
    with pytest.raises(CheckpointError, match="rank 0 has no state dict"):
        load_from_rank0(target, None)


# What is refused ------------------------------------------------------------------------------------------------------


class Refuses(Linear):
    """Lets nothing in on the last rank."""

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        if dist.get_rank() == dist.get_world_size() - 1:
            raise KeyError("something of its own")
        super()._load_from_state_dict(*args, **kwargs)


def refusals(ranks: int) -> dict[str, str]:
    """The message of each refused load, and which bits are not as they were before it."""
    case = Case("mxfp8", (ranks,), shapes=SHAPES)
    source, target, other = (
        build(replace(case, recipe=recipe, seed=seed)) for recipe, seed in (("mxfp8", 1), ("mxfp8", 2), ("block", 3))
    )
    plain = nn.Sequential(*[Linear(a, b, params_dtype=torch.bfloat16) for a, b in SHAPES])
    fully_shard(plain, mesh=mesh_of(case))
    with quantized_model_init(recipe="mxfp8"):
        meta = nn.Sequential(*[Linear(a, b, params_dtype=torch.bfloat16, device="meta") for a, b in SHAPES])
        refusing = fully_shard(nn.Sequential(*[Refuses(a, b, params_dtype=torch.bfloat16) for a, b in SHAPES]))
    state = get_model_state_dict(source, options=ON_RANK_0)
    foreign = get_model_state_dict(other, options=ON_RANK_0)
    found: dict[str, str] = {}

    def attempt(name: str, sent: Any, model: nn.Module = target, strict: bool = True) -> None:
        before = held(model)
        try:
            load_from_rank0(model, on_rank_0(sent), strict=strict)
            found[name] = "nothing was raised"
        except CheckpointError as error:
            found[name] = str(error)
        changed = differing(held(model), before) if model is not refusing else []
        found[name] += f" CHANGED {changed}" if changed else ""

    def without(*keys: str) -> dict[str, Tensor]:
        return {key: value for key, value in state.items() if key not in keys}

    def but(key: str, change: Callable[[Tensor], Any]) -> dict[str, Any]:
        return {**state, key: change(state[key])} if state else {}

    attempt("another recipe", foreign)
    attempt("another recipe, loosely", foreign, strict=False)
    attempt("no quantized model", state, plain)
    attempt("high precision", {name: torch.zeros(p.shape) for name, p in target.named_parameters()})
    attempt("missing scale", without("1.weight_scale_inv"))
    attempt("missing scale, loosely", without("1.weight_scale_inv"), strict=False)
    attempt("missing bias", without("2.bias"))
    attempt("missing key", without("2.weight_key"))
    attempt("unknown", {**state, "3.weight": torch.zeros(3)})
    attempt("key", {**state, 3: torch.zeros(3)})
    attempt("shape of a bias", but("1.bias", lambda value: value[:-1]))
    attempt("shape of codes", but("1.weight", lambda value: value[:-1]))
    attempt("shape of a tag", but("1.weight_format", lambda value: value[:-1]))
    attempt("dtype", but("1.bias", Tensor.float))
    attempt("dtype, loosely", but("1.bias", Tensor.float), strict=False)
    attempt("version", but("1.weight_format", lambda value: value + 1))
    attempt("none", None)
    attempt("empty", {})
    attempt("no tensor", but("1.bias", lambda value: value.tolist()))
    attempt("sharded", source.state_dict())
    attempt("described", but("1.bias", lambda value: value.to("meta")))
    attempt("meta", state, meta)
    half = nn.Sequential(*build(replace(case, mesh=None)), nn.LayerNorm(1, device="meta"))
    attempt("half on meta", state | {"3.weight": torch.ones(1), "3.bias": torch.ones(1)}, half)
    odd = target if dist.get_rank() != ranks - 1 else plain
    attempt("a rank with another model", state, odd)
    attempt("refused by a module", state, refusing)
    return found


def expected_refusals(ranks: int) -> dict[str, tuple[str, ...]]:
    last = "" if ranks == 1 else f"on rank {ranks - 1}: "
    return {
        "another recipe": ("0.weight: the state dict holds 'fp8_128x128'", "is 'mxfp8_32x32'; build the model"),
        "no quantized model": ("0.weight: the state dict holds 'mxfp8_32x32'", "high precision; build the model under"),
        "high precision": ("0.weight: a float32 tensor", "call quantshard.checkpoints.load_high_precision("),
        "missing scale": ("1.weight: ", "the state dict lacks 1.weight_scale_inv;"),
        "missing bias": ("lacks 1 of this model's entries (first: ['2.bias']) and has 0 that", "strict=False"),
        "missing key": ("lacks 1 of this model's entries (first: ['2.weight_key'])",),
        "unknown": ("lacks 0", "has 1 that this one lacks (first: ['3.weight'])"),
        "key": ("has 1 that this one lacks (first: [3])",),
        "shape of a bias": ("1.bias: bfloat16 of shape (32,) in rank 0's", "bfloat16 of shape (33,) in this model"),
        "shape of codes": ("1.weight: shape (32, 150)", "(33, 150)"),
        "shape of a tag": ("1.weight_format: uint8 of shape (15,)", "uint8 of shape (16,)"),
        "dtype": ("1.bias: float32 of shape (33,) in rank 0's", "bfloat16 of shape (33,) in this model"),
        "version": ("it has format version 2",),
        "none": ("rank 0 has no state dict; pass get_model_state_dict(",),
        "empty": ("rank 0 has no state dict",),
        "no tensor": ("1.bias is a list on rank 0, not a plain tensor; pass",),
        "sharded": ("0.weight is a DTensor on rank 0, not a plain tensor; pass",),
        "described": ("1.bias is on the meta device on rank 0",),
        "meta": ("0.weight is on the meta device", "reset_parameters()"),
        "half on meta": ("3.weight is on the meta device",),
        "a rank with another model": (f"{last}0.weight: the state dict holds 'mxfp8_32x32'", "in high precision"),
        "refused by a module": (f"{last}'something of its own'",),
    }


@pytest.mark.parametrize("ranks", [1, 3])
def test_refused_with_one_sentence_on_every_rank(ranks: int) -> None:
    """1 and 3 ranks: and no bit changed, except where a module's own code refuses on one rank what fits."""
    found, *others = run_ranks(ranks, refusals, ranks)
    expected = expected_refusals(ranks)
    assert {name.removesuffix(", loosely") for name in found} == expected.keys()
    for name, message in found.items():
        assert "CHANGED" not in message and message.startswith("load_from_rank0: "), (name, message)
        assert all(part in message for part in expected[name.removesuffix(", loosely")]), (name, message)
    assert others == [found] * (ranks - 1)


def loosely(ranks: int) -> list[str]:
    """A layer and a bias that rank 0 lacks, and one that the model lacks."""
    case = Case("nvfp4", (ranks,), shapes=SHAPES)
    source, target = build(case), build(replace(case, seed=99))
    born, whole = held(target), held(source)
    state = get_model_state_dict(source, options=ON_RANK_0)
    lacking = sorted(key for key in whole if key.startswith("2.") or key == "0.bias")
    sent = {key: value for key, value in state.items() if key not in lacking} | {"3.weight": torch.ones(3)}
    result = load_from_rank0(target, on_rank_0(sent), strict=False)
    expected = {key: (born if key in lacking else whole)[key] for key in whole}
    wrong = [] if result.unexpected_keys == ["3.weight"] else ["unexpected"]
    wrong += [] if sorted(result.missing_keys) == lacking else ["missing"]
    return wrong + differing(held(target), expected)


@pytest.mark.parametrize("ranks", [1, 3])
def test_loosely_what_both_have_is_loaded(ranks: int) -> None:
    """1 and 3 ranks."""
    assert run_ranks(ranks, loosely, ranks) == [[]] * ranks
