"""What the tests of experts run on each rank: grouped layers whose experts are spread over an axis."""

from __future__ import annotations

import copy
import os
import sys
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard

import quantshard as qs
from quantshard.checkpoints.loading import LoadRequest
from quantshard.interop import conversion
from quantshard.numerics.states import ROUNDING_SEED
from tests.distributed.models import RECIPES, content, joined, sha
from tests.distributed.tensor_parallel import off
from tests.pages import snippets

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
import moe

BY_NAME = StateDictOptions(flatten_optimizer_state_dict=True)

HIDDEN, FFN, TOKENS, CHOICES = 40, 72, 24, 2
"""Blocks of 32 and 128 are cut by everything."""


@dataclass(frozen=True)
class Case:
    """Experts on a mesh (dp, ep); `sharded`: by `fully_shard` over dp. `stacked`: one parameter for all experts."""

    recipe: str
    dp: int
    ep: int
    experts: int = 4
    sharded: bool = False
    meta: bool = False
    recompute: bool = False
    stacked: bool = False

    @property
    def hidden(self) -> int:
        return 128 if self.stacked else HIDDEN

    @property
    def ranks(self) -> int:
        return self.dp * self.ep


class Experts(nn.Module):
    """Two grouped layers, the router's choices given."""

    def __init__(self, case: Case, ep_mesh: DeviceMesh | None, device: str | None) -> None:
        super().__init__()
        self.ep_mesh, self.experts = ep_mesh, case.experts
        options: dict[str, Any] = {"ep_mesh": ep_mesh, "params_dtype": torch.bfloat16, "device": device}
        self.up = qs.GroupedLinear(case.experts, HIDDEN, FFN, **options)
        self.down = qs.GroupedLinear(case.experts, FFN, HIDDEN, bias=False, **options)

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        sent = qs.dispatch_tokens(x, chosen, self.experts, self.ep_mesh)
        return sent.combine(self.down(F.silu(self.up(sent.tokens, sent.m_splits)), sent.m_splits), weights)


class Stacks(nn.Module):
    """Gated experts with the attributes that transformers gives them."""

    has_gate, has_bias, is_transposed = True, False, False
    act_fn = staticmethod(F.silu)

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.config, self.num_experts = SimpleNamespace(_experts_implementation="eager"), case.experts
        self.gate_up_proj, self.down_proj = (
            nn.Parameter(torch.randn(case.experts, 128, size).bfloat16() / 8) for size in (case.hidden, 64)
        )

    def _apply_gate(self, x: Tensor) -> Tensor:
        gate, up = x.chunk(2, -1)
        return F.silu(gate) * up

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        raise AssertionError("converted experts have a forward of their own")


def recipe_of(name: str) -> Any:
    return "bf16" if name == "bf16" else RECIPES[name]


def built(case: Case, seed: int = 5) -> tuple[Experts, DeviceMesh]:
    mesh = init_device_mesh("cpu", (case.dp, case.ep), mesh_dim_names=("data", "experts"))
    torch.manual_seed(seed)
    if case.stacked:
        stacks: Any = Stacks(case)
        conversion.experts.convert_experts(
            stacks, "experts", qs.recipe.resolve(recipe_of(case.recipe)), None, True, False
        )
        if case.ep > 1:
            qs.distribute_experts(stacks, mesh["experts"])
        return fully_shard(stacks, mesh=mesh["data"]) if case.sharded else stacks, mesh
    with qs.quantized_model_init(case.recipe != "bf16", recipe=recipe_of(case.recipe)):
        module = Experts(case, mesh["experts"], "meta" if case.meta else None)
    if case.sharded:
        fully_shard(module, mesh=mesh["data"])
    if case.meta:
        module.up.reset_parameters()
        module.down.reset_parameters()
    return module, mesh


def routed(step: int, experts: int, hidden: int = HIDDEN) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Tokens, chosen experts and weights of a step, and the gradient of the output: all tokens or one; spread at
    random, or all to one expert."""
    generator = torch.Generator().manual_seed(step)
    tokens = 1 if step == 2 else TOKENS
    x, dy = (torch.randn(tokens, hidden, generator=generator).bfloat16() for _ in range(2))
    chosen = torch.rand(tokens, experts, generator=generator).topk(CHOICES).indices
    if step == 1:
        chosen = torch.full_like(chosen, experts - 1)
    return x, chosen, torch.rand(tokens, CHOICES, generator=generator), dy


def part(x: Tensor, rank: int, ranks: int) -> Tensor:
    """A rank's rows; the last ranks may have none."""
    size = -(-len(x) // ranks)
    return x[rank * size : (rank + 1) * size].clone()


def trained(case: Case) -> dict[str, str]:
    """Hashes of everything in three steps, by name and rank-independent."""
    module, mesh = built(case)
    optimizer = qs.optimizers.FusedAdam(module.named_parameters(), lr=1e-2, weight_decay=0.1)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    found = hashes({f"born {name}": value for name, value in module.state_dict().items()})
    for step in range(3):
        x, chosen, weights, dy = (part(whole, rank, ranks) for whole in routed(step, case.experts, case.hidden))
        x.requires_grad_()
        weights.requires_grad_()
        with qs.autocast(recipe=recipe_of(case.recipe)):
            y = qs.checkpoint(module, x, chosen, weights) if case.recompute else module(x, chosen, weights)
        y.backward(dy.float() * ranks)  # FSDP2, and the exchange, take the mean
        assert x.grad is not None and weights.grad is not None
        if not case.sharded:
            for param in module.parameters():
                assert param.grad is not None
                grad = param.grad._local_tensor if isinstance(param.grad, DTensor) else param.grad
                dist.all_reduce(grad, group=mesh["data"].get_group())
                grad /= case.dp
        gradients = {f"{step} gradient of {name}": param.grad.clone() for name, param in module.named_parameters()}
        found |= hashes(gradients)
        pieces: list[Any] = [None] * ranks
        dist.all_gather_object(pieces, {"y": y.detach(), "dx": x.grad / ranks, "dweights": weights.grad / ranks})
        found |= {f"{step} {name}": sha(torch.cat([held[name] for held in pieces])) for name in pieces[0]}
        qs.optimizers.clip_grad_norm_(module, 1e9)
        optimizer.step()
        optimizer.zero_grad()
    found |= hashes(module.state_dict())
    names = {param: name for name, param in module.named_parameters()}
    for param, entries in optimizer.state.items():
        found |= hashes({f"{names[param]}.{key}": value for key, value in entries.items()})
    return merged(found)


def hashes(tensors: dict[str, Tensor]) -> dict[str, str]:
    """`sha` of tensors on any meshes, with one collective: of each, its mesh's ranks have pieces."""
    sharded = {name: value for name, value in tensors.items() if isinstance(value, DTensor)}
    mine = {name: (content(value._local_tensor), value._local_tensor.shape) for name, value in sharded.items()}
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, mine)
    found = {name: sha(value) for name, value in tensors.items() if name not in sharded}
    for name, value in sharded.items():
        held = {rank: each[name] for rank, each in enumerate(every) if name in each}
        pieces = {rank: torch.from_numpy(of).view(value.dtype).view(shape) for rank, (of, shape) in held.items()}
        ranks, placements = value.device_mesh.mesh, list(value.placements)
        if not all(type(placement) in (Shard, Replicate) for placement in placements):
            # FSDP2's strided placement: its axis, the first, cut after the second
            ranks, placements = ranks.T, [Shard(placement.dim) for placement in reversed(placements)]
        whole = joined(ranks, placements, pieces)
        assert whole.shape == value.shape, name
        found[name] = sha(whole)
    return found


def merged(found: dict[str, str]) -> dict[str, str]:
    """What all ranks found; those that found the same name must have found the same."""
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, found)
    together: dict[str, str] = {}
    for each in every:
        for name, value in each.items():
            assert together.setdefault(name, value) == value, name
    return together


def table(cases: list[Case]) -> list[dict[str, str]]:
    return [trained(case) for case in cases]


# Dispatch ------------------------------------------------------------------------------------------------------------


def dispatched(ranks_with_tokens: list[int], experts: int, choices: int, one: bool) -> tuple[float, float, float, bool]:
    """How far outputs and gradients, of tokens and weights, are from those of all ranks' tokens in one place, and
    whether every row came to its expert in the order of ranks and tokens."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("any",))
    rank, ranks = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator().manual_seed(1)
    counts = ranks_with_tokens
    total = sum(counts)
    x = torch.randn(total, 5, generator=generator)
    chosen = torch.rand(total, experts, generator=generator).topk(choices).indices
    if one:
        chosen = torch.zeros_like(chosen)
    weights, dy = torch.rand(total, choices, generator=generator), torch.randn(total, 5, generator=generator)
    factors = torch.arange(1.0, experts + 1)
    here = slice(sum(counts[:rank]), sum(counts[: rank + 1]))
    mine = x[here].clone().requires_grad_(), weights[here].clone().requires_grad_()
    sent = qs.dispatch_tokens(mine[0], chosen[here].squeeze(-1) if choices == 1 else chosen[here], experts, mesh)
    per_rank = experts // ranks
    own = range(rank * per_rank, (rank + 1) * per_rank)
    in_order = all(
        torch.equal(rows, x[(chosen == expert).nonzero()[:, 0]])
        for rows, expert in zip(sent.tokens.split(sent.m_splits), own, strict=True)
    )
    factor = factors[own.start : own.stop].repeat_interleave(torch.tensor(sent.m_splits)).unsqueeze(-1)
    scale = factor.clone().requires_grad_()
    y = sent.combine(sent.tokens * scale, mine[1])
    y.backward(dy[here])
    assert scale.grad is not None and mine[0].grad is not None and mine[1].grad is not None
    whole = x.clone().requires_grad_(), weights.clone().requires_grad_()
    wanted = (whole[0].unsqueeze(1) * factors[chosen].unsqueeze(-1) * whole[1].unsqueeze(-1)).sum(1)
    wanted.backward(dy)
    # of one rank's experts, what the tokens of all ranks add up to, as a mean over ranks
    everyone = (x.unsqueeze(1) * whole[1].unsqueeze(-1) * dy.unsqueeze(1)).sum(-1)
    by_expert = torch.zeros(experts).index_add_(0, chosen.flatten(), everyone.flatten().detach()) / ranks
    found = torch.zeros(experts).index_add_(
        0, torch.tensor(list(own)).repeat_interleave(torch.tensor(sent.m_splits)), scale.grad.squeeze(-1)
    )
    assert torch.allclose(found[own.start : own.stop], by_expert[own.start : own.stop], rtol=1e-4, atol=1e-5)
    again = x[here].clone().requires_grad_()
    sent = qs.dispatch_tokens(again, chosen[here], experts, mesh)
    cubes = sent.combine(sent.tokens**3, torch.ones_like(weights[here]))
    (slope,) = torch.autograd.grad(cubes.sum(), again, create_graph=True)
    (bend,) = torch.autograd.grad(slope.square().sum(), again)
    assert torch.allclose(bend, 36 * choices**2 * x[here] ** 3, rtol=1e-4)
    return (
        _worst(y, wanted[here]),
        _worst(mine[0].grad, whole[0].grad[here]),  # type: ignore[index]
        _worst(mine[1].grad, whole[1].grad[here]),  # type: ignore[index]
        in_order,
    )


def _worst(found: Tensor, wanted: Tensor) -> float:
    assert found.shape == wanted.shape
    return float((found - wanted).detach().abs().max()) if found.numel() else 0.0


def dispatches(cases: list[tuple[list[int], int, int, bool]]) -> list[tuple[float, float, float, bool]]:
    return [dispatched(*case) for case in cases]


def errors() -> dict[str, str]:
    """What is refused, and how; a wrong index on one rank."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("ep",))
    x = torch.zeros(3, 8)
    wrong = torch.tensor([[0], [ranks if rank == ranks - 1 else 0], [0]])
    found = {}

    def attempt(name: str, function: Any) -> None:
        try:
            function()
        except qs.errors.QuantshardError as error:
            found[name] = f"{type(error).__name__}: {error}"

    attempt("index", lambda: qs.dispatch_tokens(x, wrong, ranks, mesh))
    attempt("shapes", lambda: qs.dispatch_tokens(x, wrong[:2], ranks, mesh))
    attempt("division", lambda: qs.GroupedLinear(ranks + 1, 8, 8, ep_mesh=mesh))
    sent = qs.dispatch_tokens(x, wrong.clamp(max=ranks - 1), ranks, mesh)
    attempt("combine", lambda: sent.combine(sent.tokens, torch.zeros(2, 1)))
    layer = qs.GroupedLinear(2 * ranks, 8, 8, ep_mesh=mesh)
    attempt("splits", lambda: layer(x, [3]))
    stock = torch.optim.AdamW(layer.parameters())
    attempt("save", lambda: qs.checkpoints.save("/nowhere/experts", layer, stock))
    backwards = qs.optimizers.FusedAdam([*layer.named_parameters()][::-1])
    attempt("others", lambda: qs.checkpoints.save("/nowhere/experts", layer, backwards))
    spread = nn.ModuleList(qs.GroupedLinear(2 * ranks, 8, 8, bias=False, ep_mesh=mesh) for _ in range(2))
    for param in spread[rank % 2].parameters():
        param.requires_grad_(False)  # so that ranks have as many, and not the same
    trained = qs.optimizers.FusedAdam([param for param in spread.parameters() if param.requires_grad])
    attempt("frozen", lambda: qs.checkpoints.save("/nowhere/experts", spread, trained))
    attempt("load", lambda: LoadRequest("/nowhere/experts", layer, backwards).numbers)
    return found


# Tensor parallelism --------------------------------------------------------------------------------------------------


def cut(mode: str, recipe: str, dp: int, ep: int, quantized: bool) -> tuple[list[str], float, str]:
    """On a mesh (dp, ep, tp 2), the same tokens for all of dp: what is not bitwise equal at birth, how far two steps
    are off at most, and where."""
    mesh = init_device_mesh("cpu", (dp, ep, 2), mesh_dim_names=("dp", "ep", "tp"))
    modules = []
    for meshes in ({"ep_mesh": mesh["ep"], "tp_mesh": mesh["tp"]}, {}):
        torch.manual_seed(2)
        with qs.quantized_model_init(quantized, recipe=recipe_of(recipe)):
            modules.append(qs.GroupedLinear(4, 80, 112, parallel_mode=mode, params_dtype=torch.float32, **meshes))
    module, alone = modules
    if dp > 1:
        fully_shard(module, mesh=mesh["dp"])
    born, wanted = module.state_dict(), alone.state_dict()
    unequal = [name for name in born if sha(born[name]) != sha(wanted[name])]
    splits = [7, 0, 1, 4]
    own = module.local_gemms
    rows = slice(sum(splits[: own.start]), sum(splits[: own.stop]))
    at = mesh["tp"].get_local_rank()
    worst, where = 0.0, ""
    for step in range(2):
        generator = torch.Generator().manual_seed(step)
        x, dy = torch.randn(sum(splits), 80, generator=generator), torch.randn(sum(splits), 112, generator=generator)
        pieces = [t[rows].chunk(2, -1)[at] if c else t[rows] for t, c in ((x, mode == "row"), (dy, mode == "column"))]
        a, b = pieces[0].clone().requires_grad_(), x.clone().requires_grad_()
        with qs.autocast(recipe=recipe_of(recipe)):
            y = module(a, splits[own.start : own.stop])
        with qs.autocast(recipe=recipe_of(recipe)):
            z = alone(b, splits)
        y.backward(pieces[1].contiguous())
        z.backward(dy)
        assert a.grad is not None and b.grad is not None
        references = [{"y": z.detach(), "dx": b.grad} | {name: p.grad for name, p in alone.named_parameters()}]
        dist.broadcast_object_list(references)  # alone, each rank has random words of its own
        compared = {"y": (_whole(y.detach(), mesh, mode == "column"), references[0]["y"][rows])}
        compared["dx"] = (_whole(a.grad, mesh, mode == "row"), references[0]["dx"][rows])
        for name, param in module.named_parameters():
            assert isinstance(param.grad, DTensor)
            compared[name] = (param.grad.full_tensor(), references[0][name])
        for what, (found, reference) in compared.items():
            difference = off(found, reference) if reference.count_nonzero() else float(found.count_nonzero())
            if not difference <= worst:
                worst, where = difference, f"{what} of step {step}"
        module.zero_grad()
        alone.zero_grad()
    return unequal, worst, where


def _whole(piece: Tensor, mesh: DeviceMesh, is_cut: bool) -> Tensor:
    pieces: list[Any] = [None] * 2
    dist.all_gather_object(pieces, piece, mesh["tp"].get_group())
    return torch.cat(pieces, -1) if is_cut else piece


def cuts(cases: list[tuple[str, str, int, int, bool]]) -> list[tuple[list[str], float, str]]:
    return [cut(*case) for case in cases]


# The example ---------------------------------------------------------------------------------------------------------


@contextmanager
def small(experts: int = 4, layers: int = 1) -> Any:
    """The example's model, smaller."""
    before = moe.EXPERTS, moe.LAYERS
    moe.EXPERTS, moe.LAYERS = experts, layers
    try:
        yield
    finally:
        moe.EXPERTS, moe.LAYERS = before


def language_model(recipe: str, dp: int, ep: int) -> tuple[Any, Any]:
    """The example's model and optimizer; whole, in one process without a mesh."""
    mesh = None if dp * ep == 1 else init_device_mesh("cpu", (dp, ep), mesh_dim_names=("dp", "ep"))
    model = moe.build(recipe_of(recipe), mesh, torch.device("cpu"))
    moments = {"exp_avg_dtype": torch.uint8, "exp_avg_sq_dtype": torch.uint8}
    return model, qs.optimizers.FusedAdam(model.named_parameters(), lr=3e-3, **moments)


def model_bits(model: nn.Module, optimizer: Any) -> dict[str, str]:
    state = {**get_model_state_dict(model), **get_optimizer_state_dict(model, optimizer, options=BY_NAME)}
    named = {name: value for name, value in state.items() if not name.endswith("param_names")}  # of this rank
    named |= hashes({name: value for name, value in named.items() if isinstance(value, Tensor)})
    return merged({name: str(value) for name, value in named.items()})


def saved(jobs: list[tuple[str, str, int, int, bool]]) -> list[Any]:
    return [saved_on(*job) for job in jobs]


def saved_on(
    path: str, recipe: str, dp: int, ep: int, goes_on: bool
) -> tuple[dict[str, str], list[float], dict[str, str]]:
    """Train, save, and maybe train on: the bits that were saved, and the losses and bits after it."""
    with small():
        model, optimizer = language_model(recipe, dp, ep)
        moe.train(model, optimizer, range(2))
        moe.save(path, model, optimizer)
        bits = model_bits(model, optimizer)
        if not goes_on:
            return bits, [], {}
        return bits, moe.train(model, optimizer, range(2, 3)), model_bits(model, optimizer)


def loaded(jobs: list[tuple[dict[str, str], int, int, str]]) -> list[Any]:
    return [loaded_on(*job) for job in jobs]


def loaded_on(
    paths: dict[str, str], dp: int, ep: int, trained: str
) -> list[tuple[dict[str, str], list[float], dict[str, str]]]:
    """Load each checkpoint, by path, of a recipe, and train on with the one of the path `trained`."""
    results = []
    with small():
        for path, recipe in paths.items():
            torch.manual_seed(3)
            model, optimizer = language_model(recipe, dp, ep)
            if path == trained:
                moe.train(model, optimizer, range(1))
            moe.load(path, model, optimizer)
            bits, losses, after = model_bits(model, optimizer), list[float](), dict[str, str]()
            if path == trained:
                losses, after = moe.train(model, optimizer, range(2, 3)), model_bits(model, optimizer)
            results.append((bits, losses, after))
    return results


def losses_and_gradients(recipe: str, dp: int, ep: int, steps: int) -> tuple[list[float], dict[str, Tensor]]:
    """Of the example: losses of some steps, and the first step's gradients."""
    with small(layers=2):
        mesh = None if dp * ep == 1 else init_device_mesh("cpu", (dp, ep), mesh_dim_names=("dp", "ep"))
        model = moe.build(recipe_of(recipe), mesh, torch.device("cpu"))
        text = moe.batch(0, torch.device("cpu"))
        logits, balance = model(text[:, :-1])
        (F.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten()) + moe.BALANCE * balance).backward()
        mine = {}
        for name, param in model.named_parameters():
            assert param.grad is not None
            mine[name] = param.grad.full_tensor() if isinstance(param.grad, DTensor) else param.grad
        model.zero_grad()
        every: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(every, mine)
        gradients = {name: grad for each in every for name, grad in each.items()}
        return moe.train(model, moe.optimizer_of(model), range(steps)), gradients


# The optimizer -------------------------------------------------------------------------------------------------------


def skipped() -> tuple[bool, int, bool]:
    """One rank's expert has a gradient that is not finite: whether any rank moved, how many skipped, and whether all
    ranks have one rounding seed."""
    with small():
        model, optimizer = language_model("mxfp8", dist.get_world_size() // 2, 2)
        seeds = {group[ROUNDING_SEED] for group in optimizer.param_groups}
        every: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(every, seeds)
        before = model_bits(model, optimizer)
        text = moe.batch(0, torch.device("cpu"))
        logits, _ = model(text[:, :-1])
        logits.square().mean().backward()
        if dist.get_rank() == dist.get_world_size() - 1:
            weight = model.layers[0].moe.experts.up.weight3
            assert weight.grad is not None
            weight.grad.to_local()[0] = float("inf")
        optimizer.step()
        skips = {"skipped_steps", "skipped_in_a_row"}
        after = model_bits(model, optimizer)
        moved = [name for name in before if before[name] != after[name] and name.rsplit(".", 1)[-1] not in skips]
        return bool(moved), optimizer.skipped_steps, len(set().union(*every)) == 1


OPTIMIZERS: dict[str, Any] = {
    "FusedAdam": lambda named: qs.optimizers.FusedAdam(named, exp_avg_dtype=torch.uint8),
    "capturable": lambda named: qs.optimizers.FusedAdam(named, capturable=True),
    "MasterWeights": lambda named: qs.optimizers.MasterWeights(torch.optim.AdamW, named),
}


def skipped_without_fully_shard() -> dict[str, Any]:
    """The same of plain parameters, cast, copied, or born on meta; and the norm of the gradients. What differs from
    one rank to another is an error in `merged`."""
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("dp", "ep"))
    found: dict[str, Any] = {}
    for name, make in OPTIMIZERS.items():
        torch.manual_seed(5)
        with qs.quantized_model_init(recipe="mxfp8"):
            layer = qs.GroupedLinear(
                4,
                40,
                33,
                params_dtype=torch.float32,
                ep_mesh=mesh["ep"],
                device="meta" if name == "capturable" else None,
            )
        if name == "capturable":
            layer.reset_parameters()
        model = nn.ModuleDict({"dense": nn.Linear(40, 9), "experts": layer}).bfloat16()
        if name == "MasterWeights":
            model = copy.deepcopy(model)
        optimizer = make(list(model.named_parameters()))
        for param in model.parameters():
            param.grad = torch.ones(param.shape, dtype=param.dtype)
        before = merged({key: sha(value) for key, value in model.state_dict().items()})
        if mesh.get_local_rank("ep") == 1:
            model["experts"].bias3.grad[0] = float("inf")  # type: ignore[index,union-attr]
        optimizer.step()
        after = merged({key: sha(value) for key, value in model.state_dict().items()})
        found[name] = before == after, optimizer.skipped_steps
        found[f"{name}, norm"] = float(qs.optimizers.clip_grad_norm_(model, 1.0))
        for param in model.parameters():
            param.grad = torch.ones(param.shape, dtype=param.dtype)
        optimizer.step()
        again = merged({key: sha(value) for key, value in model.state_dict().items()})
        found[f"{name}, after it"] = again != after, optimizer.skipped_steps
    return found


def both_skipped() -> tuple[tuple[bool, int, bool], dict[str, Any]]:
    return skipped(), skipped_without_fully_shard()


class Routed(nn.Module):
    """A user's module that keeps the mesh of its experts beside a parameter that all ranks have alike."""

    def __init__(self) -> None:
        super().__init__()
        self.ep_mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("ep",))
        self.router = nn.Parameter(torch.ones(4))
        self.router.grad = torch.ones(4)


def clipped(dp: int, ep: int) -> dict[str, float]:
    """Norms of the same gradients, on any mesh, before and after clipping."""
    with small():
        model, _ = language_model("mxfp8", dp, ep)
        for name, param in model.named_parameters():
            generator = torch.Generator().manual_seed(sum(name.encode()))
            whole = torch.randn(param.shape, generator=generator)
            if isinstance(param, DTensor):
                whole = torch.distributed.tensor.distribute_tensor(
                    whole, param.device_mesh, param.placements, src_data_rank=None
                )
            param.grad = whole
        norms = {}
        for p in (1.0, 2.0, float("inf")):
            norms[f"{p}"] = float(qs.optimizers.clip_grad_norm_(model, float("inf"), p))
        qs.optimizers.clip_grad_norm_(model, 3.0)
        norms["after"] = float(qs.optimizers.clip_grad_norm_(model, 9.0))
        norms["of a router"] = float(qs.optimizers.clip_grad_norm_(Routed(), 9.0))
        norms["still"] = float(qs.optimizers.clip_grad_norm_(model, 9.0))
        if dp * ep == 1:
            norms["of PyTorch"] = float(torch.nn.utils.clip_grad_norm_(model.parameters(), 9.0))
        if dist.get_rank() == 0:
            next(model.parameters()).grad = None  # on one rank only
        last = list(model.parameters())[-1]
        assert last.grad is not None
        if dist.get_rank() == dist.get_world_size() - 1:
            (last.grad.to_local() if isinstance(last.grad, DTensor) else last.grad)[0] = float("nan")
        try:
            qs.optimizers.clip_grad_norm_(model, 9.0, error_if_nonfinite=True)
        except RuntimeError:
            norms["raised"] = 1.0
        return norms


# State dicts ---------------------------------------------------------------------------------------------------------


def whole_loaded(recipe: str) -> dict[str, bool]:
    """A state dict of all experts, loaded by ranks that hold some of them, in every way there is."""
    mesh = init_device_mesh("cpu", (1, dist.get_world_size()), mesh_dim_names=("dp", "ep"))

    def model(ep_mesh: DeviceMesh | None, seed: int) -> nn.ModuleDict:
        torch.manual_seed(seed)
        with qs.quantized_model_init(recipe=recipe_of(recipe)):
            layer = qs.GroupedLinear(4, 40, 33, params_dtype=torch.bfloat16, ep_mesh=ep_mesh)
        return nn.ModuleDict({"experts": layer})

    whole = model(None, 1)
    wanted = {name: sha(value) for name, value in whole.state_dict().items()}

    def equal(part: nn.Module) -> bool:
        return merged({name: sha(value) for name, value in part.state_dict().items()}) == wanted

    part = model(mesh["ep"], 2)
    found = {"differs before": not equal(part)}
    part.load_state_dict(whole.state_dict())
    found["load_state_dict"] = equal(part)
    part = model(mesh["ep"], 2)
    fully_shard(part["experts"], mesh=mesh["dp"])
    qs.checkpoints.load_from_rank0(part, whole.state_dict() if dist.get_rank() == 0 else None)
    found["load_from_rank0"] = equal(part)
    part, again = model(mesh["ep"], 2), model(None, 2)
    values = {
        name: torch.randn(p.shape, generator=torch.Generator().manual_seed(len(name))).bfloat16()
        for name, p in whole.named_parameters()
    }
    qs.checkpoints.load_high_precision(part, values)
    qs.checkpoints.load_high_precision(again, values)
    wanted = {name: sha(value) for name, value in again.state_dict().items()}
    found["load_high_precision"] = equal(part)
    bad = {**whole.state_dict(), "experts.weight9": torch.zeros(1)}
    try:
        model(mesh["ep"], 2).load_state_dict(bad)
    except RuntimeError as error:
        found["unknown key"] = "experts.weight9" in str(error)
    return found


def unknown_axes() -> str:
    """Two meshes of two ranks each, that no mesh of all is known to hold."""
    halves = [DeviceMesh("cpu", [0, 1], mesh_dim_names=("ep",)), DeviceMesh("cpu", [2, 3], mesh_dim_names=("ep",))]
    recipe = recipe_of("delayed")
    with qs.quantized_model_init(recipe=recipe):
        layer = qs.GroupedLinear(2, 8, 8, ep_mesh=halves[dist.get_rank() // 2])
    try:
        with qs.autocast(recipe=recipe):
            layer(torch.ones(3, 8), [3])
    except qs.errors.ConfigurationError as error:
        return str(error)
    return ""


def run_snippets(folder: str) -> dict[str, bool]:
    """Run the snippets of docs/distributed.md#experts in order, and load what they saved into another model."""
    here, names = Path.cwd(), dict[str, Any]()
    os.chdir(folder)
    try:
        for snippet in snippets("docs/distributed.md#experts"):
            exec(snippet, names)
        before = merged({name: sha(value) for name, value in names["model"].state_dict().items()})
        with torch.no_grad():
            for param in names["model"].parameters():
                if isinstance(param, DTensor) and param.ndim == 1:
                    param.zero_()
        loaded_state = names["state_of"](names["model"], names["optimizer"])
        names["dcp"].load(loaded_state, checkpoint_id="experts")
        after = merged({name: sha(value) for name, value in names["model"].state_dict().items()})
    finally:
        os.chdir(here)
    return {"loaded": before == after, "norm": bool(names["loss"].isfinite())}
