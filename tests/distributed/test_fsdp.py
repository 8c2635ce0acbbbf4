"""FSDP2 over quantized weights: what goes over the wire, what is refused, and that wrapping changes no gradient.

Each test names its rank count.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.utils._python_dispatch import TorchDispatchMode

import quantshard as qs
from quantshard import sharding
from quantshard.errors import ConfigurationError, RankMismatchError, UnsupportedOperationError
from quantshard.tensor import components
from tests.covering import exhaustive
from tests.distributed.models import RECIPES, Case, bits, build, mesh_of, optimizer_of, set_gradients, sha, train
from tests.distributed.pool import run_ranks

pytestmark = pytest.mark.distributed

DIFFERENT = ("delayed", "rowwise", "nvfp4", "mxfp8 two copies")
"""Recipes that differ in what is gathered: a history, scales of rows, random words, two copies."""


def some(recipes: Iterable[str]) -> list[Any]:
    """Every recipe, the others for `make test-all` only."""
    return exhaustive([(name,) for name in RECIPES], [(name,) for name in recipes])


class Wire(TorchDispatchMode):
    """Counts the collectives that this rank calls, and the bytes that it gives to each kind."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[str, list[int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        namespace, _, name = str(func).partition(".")
        if namespace in ("c10d", "_c10d_functional"):
            inputs = args[1] if "allgather" in name or "reduce_scatter" in name else args[0]
            tensors = inputs if isinstance(inputs, (list, tuple)) else [inputs]
            sizes = [t.numel() * t.itemsize for t in tensors if isinstance(t, torch.Tensor)]
            self.calls.setdefault(name.split(".")[0].strip("_"), []).append(sum(sizes))
        return func(*args, **(kwargs or {}))


# On the wire

ON_TWO = ("block", "mxfp8 two copies")
"""Recipes that `make test` tries on 2 ranks, the others on 3."""


def wire_of_one_step(case: Case) -> dict[str, Any]:
    model = build(case)
    optimizer = optimizer_of(model, case)
    train(model, optimizer, case, 0, 1)  # FSDP2's lazy initialization, and its buffers
    x = torch.randn(4, case.shapes[0][0], dtype=torch.bfloat16)
    with Wire() as forward, qs.autocast(recipe=RECIPES[case.recipe]):
        loss = model(x).float().sum()
    with Wire() as backward:
        loss.backward()
    with Wire() as step:
        optimizer.step()
    with Wire() as saving:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    with Wire() as loading:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    expected = []
    for layer in model:
        local = components.quantized_local(layer.weight)
        assert local is not None
        fmt, shard = local.quantized_storage.spec.format, local.quantized_storage.shard
        both = tuple(fmt.copies)
        passes = tuple((which,) for which in both) if case.reshard and len(both) > 1 else (both,)
        weight = [
            sum(s.numel * (fmt.by_name[s.name].encoding.storage.itemsize if s.name else 1) for s in slots)
            for slots in (sharding.gather_slots(fmt, shard, p, passes) for p in (passes[0], passes[-1]))
        ]
        bias = sharding.ceil_div(layer.out_features, case.ranks) * 2
        expected.append([w + bias for w in weight])
    return {
        "forward": forward.calls,
        "backward": backward.calls,
        "step": step.calls,
        "saving": saving.calls,
        "loading": loading.calls,
        "expected": expected,
        "rows": [sharding.ceil_div(layer.out_features, case.ranks) for layer in model],
    }


def gathered(calls: dict[str, list[int]]) -> list[int]:
    """The bytes of each gather among what `Wire` counted."""
    return [size for name, sizes in calls.items() if "allgather" in name for size in sizes]


@pytest.mark.parametrize(
    ("recipe", "ranks"),
    exhaustive(product(RECIPES, (2, 3)), [(name, 2 if name in ON_TWO else 3) for name in RECIPES]),
)
def test_bytes_and_collectives(recipe: str, ranks: int) -> None:
    """2 and 3 ranks: codes and scales of the needed copy only, one collective in a step, none in a state dict."""
    shapes = ((96, 384), (384, 192), (192, 128))  # whole 32-blocks on 2 ranks, not on 3
    case = Case(recipe, (ranks,), shapes=shapes)
    for seen in run_ranks(ranks, wire_of_one_step, case):
        assert gathered(seen["forward"]) == [forward for forward, _ in seen["expected"]]
        assert sorted(gathered(seen["backward"])) == sorted(backward for _, backward in seen["expected"])
        shared = recipe not in ("mxfp8", "mxfp8 two copies") or ranks == 3
        assert sum(map(len, seen["step"].values())) == 1, seen["step"]
        assert shared or seen["step"] == {"allreduce": [4 * 3 * 6]}, "flags only: no block is shared"
        assert not seen["saving"], seen["saving"]
        assert not seen["loading"], seen["loading"]
        delayed = recipe == "delayed"
        assert len(seen["forward"].get("allreduce", [])) == delayed, seen["forward"]
        assert len(seen["backward"].get("allreduce", [])) == delayed, seen["backward"]
        # and in figures, for the layer whose shards are whole blocks: codes of 8 or 4 bits, a few scales
        per_weight = {"nvfp4": 0.5}.get(recipe, 1.0)
        codes = seen["rows"][0] * 96 * per_weight
        assert codes <= seen["expected"][0][0] - seen["rows"][0] * 2 <= codes * 1.13


@pytest.mark.parametrize("recipe", ["block", "mxfp8 two copies"])
def test_what_is_kept_for_backward_is_gathered_once(recipe: str) -> None:
    """2 ranks, without resharding after forward: all copies in forward, and nothing in backward."""
    case = Case(recipe, (2,), shapes=((96, 384), (384, 192)), reshard=False)
    for seen in run_ranks(2, wire_of_one_step, case):
        assert gathered(seen["forward"]) == [both for both, _ in seen["expected"]]
        assert not gathered(seen["backward"]), seen["backward"]


# Wrapping changes nothing


def gradients(case: Case) -> tuple[list[str], list[float], dict[str, str]]:
    model = build(case)
    optimizer = optimizer_of(model, case)
    losses = train(model, optimizer, case, 0, 2)
    x = torch.ones(3, case.shapes[0][0], dtype=torch.bfloat16)
    with qs.autocast(recipe=RECIPES[case.recipe]):
        model(x).float().pow(2).sum().backward()
    return [sha(p.grad) for p in model.parameters()], losses, bits(model, optimizer)


@pytest.mark.parametrize("recipe", some(("mxfp8 two copies",)))
def test_resharding_changes_no_bit(recipe: str) -> None:
    """3 ranks: gradients, losses and weights are equal with and without resharding after forward."""
    kept = run_ranks(3, gradients, Case(recipe, (3,), reshard=False))
    freed = run_ranks(3, gradients, Case(recipe, (3,), reshard=True))
    assert kept == freed


@pytest.mark.parametrize("recipe", some(DIFFERENT))
def test_one_rank_equals_no_fsdp(recipe: str) -> None:
    """1 rank: fully_shard over a mesh of one changes no bit of gradients, losses, weights and states."""
    assert run_ranks(1, gradients, Case(recipe, (1,))) == run_ranks(1, gradients, Case(recipe, None))


def accumulate(case: Case) -> tuple[list[str], list[str]]:
    """Gradients of two micro-batches, synchronized each time and only at the end."""
    found = []
    for sync_always in (True, False):
        model = build(case)
        for index, scale in enumerate((1.0, 2.0)):
            model.set_requires_gradient_sync(sync_always or index == 1)
            x = torch.full((4, case.shapes[0][0]), scale, dtype=torch.bfloat16)
            with qs.autocast(recipe=RECIPES[case.recipe]):
                model(x).float().mean().backward()
        found.append([p.grad.full_tensor().float() for p in model.parameters()])
    worst = max(((a - b).norm() / a.norm().clamp(min=1e-12)).item() for a, b in zip(*found, strict=True))
    return [f"{worst:.3g}"], [str(worst < 2**-7)]


@pytest.mark.parametrize("recipe", ["current", pytest.param("mxfp8", marks=pytest.mark.exhaustive), "nvfp4"])
def test_gradient_accumulation(recipe: str) -> None:
    """2 ranks: accumulating locally differs from accumulating after each reduction by bf16 rounding only."""
    for worst, within in run_ranks(2, accumulate, Case(recipe, (2,))):
        assert within == ["True"], worst


def fp32_gradients(case: Case) -> tuple[set[torch.dtype], set[torch.dtype]]:
    torch.manual_seed(0)
    with qs.quantized_model_init(recipe=RECIPES[case.recipe]):
        model = nn.Sequential(*[qs.Linear(a, b, params_dtype=torch.float32) for a, b in case.shapes[:2]])
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model:
        fully_shard(layer, mesh=mesh_of(case), mp_policy=policy)
    fully_shard(model, mesh=mesh_of(case), mp_policy=policy)
    with qs.autocast(recipe=RECIPES[case.recipe]):
        out = model(torch.randn(3, 96))
    out.float().sum().backward()
    return {p.grad.dtype for p in model.parameters()}, {out.dtype}


def test_fp32_gradients_with_bf16_compute() -> None:
    """2 ranks: an fp32 outer dtype with param_dtype=bfloat16 gives fp32 sharded gradients."""
    for grads, outputs in run_ranks(2, fp32_gradients, Case("block", (2,))):
        assert grads == {torch.float32}
        assert outputs == {torch.bfloat16}


# Refusals, the same on every rank


def message_of(function: Any, *args: Any) -> str:
    try:
        function(*args)
    except (ConfigurationError, RankMismatchError, UnsupportedOperationError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def shard_columns(case: Case) -> str:
    with qs.quantized_model_init(recipe=RECIPES[case.recipe]):
        layer = qs.Linear(96, 96, device="cpu")
    return message_of(lambda: fully_shard(layer, mesh=mesh_of(case), shard_placement_fn=lambda _: Shard(1)))


def reshard_to_fewer(case: Case) -> str:
    with qs.quantized_model_init(recipe=RECIPES[case.recipe]):
        model = nn.Sequential(qs.Linear(96, 96, device="cpu"), qs.Linear(96, 96, device="cpu"))
    for layer in model:
        fully_shard(layer, mesh=mesh_of(case), reshard_after_forward=2)
    return message_of(lambda: model(torch.ones(1, 96)))


def different_keys(case: Case) -> str:
    torch.manual_seed(dist.get_rank())
    with qs.quantized_model_init(recipe=RECIPES[case.recipe]):
        model = nn.Sequential(qs.Linear(96, 96, device="meta"))
    fully_shard(model, mesh=mesh_of(case))
    return message_of(model[0].reset_parameters)


def different_keys_direct(case: Case) -> str:
    torch.manual_seed(dist.get_rank())
    with qs.quantized_model_init(recipe=RECIPES[case.recipe]):
        model = nn.Sequential(qs.Linear(96, 96, device="cpu"))
    fully_shard(model, mesh=mesh_of(case))
    return message_of(lambda: qs.optimizers.FusedAdam(model.named_parameters()))


def write_a_shard(case: Case) -> str:
    layer = build(Case(case.recipe, case.mesh, shapes=((96, 96),)))[0]
    local = components.quantized_local(layer.weight)
    assert local is not None
    return message_of(lambda: local.quantize_(torch.zeros(local.shape)))


def copy_high_precision(case: Case) -> str:
    layer = build(Case(case.recipe, case.mesh, shapes=((96, 96),)))[0]
    with torch.no_grad():
        return message_of(lambda: layer.weight._local_tensor.copy_(torch.zeros(layer.weight._local_tensor.shape)))


REFUSALS = {
    shard_columns: (2, "shard_placement_fn at Shard(0)"),
    reshard_to_fewer: (4, "use True or False"),
    different_keys: (3, "torch.manual_seed"),
    different_keys_direct: (3, "torch.manual_seed"),
    write_a_shard: (3, "requantize_"),
    copy_high_precision: (3, "load_high_precision"),
}


@pytest.mark.parametrize("function", REFUSALS)
def test_refused_clearly_on_every_rank(function: Any) -> None:
    """2 to 4 ranks: the same sentence on each, with the way out."""
    ranks, way_out = REFUSALS[function]
    messages = run_ranks(ranks, function, Case("current", (ranks,)))
    for message in messages:
        assert way_out in message, messages


# Non-finite gradients


def nan_flag(case: Case, value: float) -> tuple[bool, int, bool]:
    model = build(case)
    optimizer = optimizer_of(model, case)
    train(model, optimizer, case, 0, 1)
    before = bits(model, optimizer)
    with qs.autocast(recipe=RECIPES[case.recipe]):
        model(torch.ones(2, case.shapes[0][0], dtype=torch.bfloat16)).float().sum().backward()
    if dist.get_rank() == dist.get_world_size() - 1:
        for param in model.parameters():
            if param.grad is not None and param.grad._local_tensor.numel():
                param.grad._local_tensor.view(-1)[0] = value
                break
    optimizer.step()
    optimizer.zero_grad()
    after = bits(model, optimizer)
    changed = {name for name in before if before[name] != after[name]}
    # delayed scaling records what forward and backward saw; draws were taken in backward
    allowed = {name for name in changed if name.endswith(("amax_history", "draws")) and "weight_amax" not in name}
    return changed <= allowed, optimizer.skipped_steps, optimizer.param_groups[0]["step"] == 1


INFINITE, NAN = float("inf"), float("nan")


@pytest.mark.parametrize(
    ("recipe", "value"),
    exhaustive(product(("delayed", "mxfp8", "nvfp4"), (INFINITE, NAN)), [("delayed", INFINITE), ("nvfp4", NAN)]),
)
def test_non_finite_gradients_are_skipped_everywhere(recipe: str, value: float) -> None:
    """3 ranks: one bad element on one rank; no rank changes a weight, moment, scale or history."""
    assert run_ranks(3, nan_flag, Case(recipe, (3,)), value) == [(True, 1, True)] * 3


def missing_somewhere(case: Case) -> str:
    model = build(case)
    optimizer = optimizer_of(model, case)
    with qs.autocast(recipe=RECIPES[case.recipe]):
        model(torch.ones(2, case.shapes[0][0], dtype=torch.bfloat16)).float().sum().backward()
    if dist.get_rank() == 1:
        model[0].weight.grad = None
    return message_of(optimizer.step)


def test_a_gradient_missing_on_one_rank() -> None:
    """3 ranks: all of them raise and name the parameter; none hangs."""
    for message in run_ranks(3, missing_somewhere, Case("current", (3,))):
        assert "0.weight has a gradient on some ranks only" in message


# Loading high precision


def load_high(case: Case) -> dict[str, str]:
    model = build(case)
    generator = torch.Generator().manual_seed(5)
    state = {}
    for name, param in model.named_parameters():
        state[name] = torch.randn(param.shape, generator=generator).bfloat16()
    qs.checkpoints.load_high_precision(model, state)
    missing = message_of_checkpoint(lambda: qs.checkpoints.load_high_precision(model, {}))
    assert "no entry" in missing
    wrong = message_of_checkpoint(lambda: model.load_state_dict(state, strict=False))
    assert "load_high_precision" in wrong, wrong
    found = bits(model)
    found.update(
        {f"master {i}": sha(s["master_param"]) for i, s in optimizer_of(model, case).state_dict()["state"].items()}
    )
    return found


def message_of_checkpoint(function: Any) -> str:
    try:
        function()
    except (qs.errors.CheckpointError, RuntimeError) as error:
        return str(error)
    return "nothing was raised"


@pytest.mark.parametrize("recipe", some(DIFFERENT))
def test_load_high_precision(recipe: str) -> None:
    """1 and 3 ranks: the same bits from one high-precision state dict; copying it in raises and names the call."""
    [alone] = run_ranks(1, load_high, Case(recipe, None))
    for rank in run_ranks(3, load_high, Case(recipe, (3,))):
        assert rank == alone


def materialized_twice(case: Case) -> list[dict[str, str]]:
    found = []
    for to_empty in (True, False):
        model = build(Case(case.recipe, case.mesh, init="direct"))
        del model
        torch.manual_seed(case.seed)
        with qs.quantized_model_init(recipe=RECIPES[case.recipe]):
            model = nn.Sequential(
                *[qs.Linear(a, b, params_dtype=torch.bfloat16, device="meta") for a, b in case.shapes]
            )
        for layer in model:
            fully_shard(layer, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
        if to_empty:
            model.to_empty(device="cpu")
        for _ in range(2):
            for layer in model:
                layer.reset_parameters()
            found.append(bits(model))
    return found


@pytest.mark.parametrize("recipe", some(("delayed", "nvfp4")))
def test_materializing_from_meta(recipe: str) -> None:
    """1 and 3 ranks: with or without to_empty, once or twice, the bits are those of direct initialization."""
    for ranks in (1, 3):
        for found in run_ranks(ranks, materialized_twice, Case(recipe, (ranks,))):
            assert all(state == found[0] for state in found)


def born_stepped_and_trained(case: Case) -> tuple[dict[str, str], dict[str, str], list[float]]:
    """Bits at birth, after a step of gradients that are the same on every mesh, and losses from there."""
    model = build(case)
    optimizer = optimizer_of(model, case)
    born = bits(model)
    set_gradients(model, 0)
    optimizer.step()
    optimizer.zero_grad()
    stepped = bits(model, optimizer)
    return born, stepped, train(model, optimizer, case, 0, 1) + train(model, optimizer, case, 0, 9)


def test_a_recipe_of_formats_that_no_recipe_names_trains() -> None:
    """1 and 3 ranks: FP4 under E8M0 scales, two rows of the table and nothing else."""
    one, three = (run_ranks(n, born_stepped_and_trained, Case("mxfp4", (n,))) for n in (1, 3))
    for born, stepped, losses in three:
        assert (born, stepped) == one[0][:2] and born != {name: stepped[name] for name in born}
        assert losses[-1] < 0.9 * losses[0] and losses == three[0][2]
