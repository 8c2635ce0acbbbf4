"""Ways to wrap a model: each trains to the bits of the unwrapped model whose gradients are averaged by hand.

On 1, 2 and 3 ranks, and HSDP on 4; a table is printed. Every way is tried with one of the recipes that keep most, on 2
ranks or 3, and every third with one of the others, on 1 rank or 2, in turns; `make test-all` tries the rest.
Sums of gradients have no order here, since the losses of all ranks but the first two are multiplied by zero; of three
terms, wrappers that lay out their buffers differently take different sums.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise, product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import quantshard as qs
from quantshard.errors import QuantshardError
from quantshard.optimizers import FusedAdam, MasterWeights
from tests.distributed.models import RECIPES, bits
from tests.distributed.pool import run_ranks
from tests.distributed.wraps import (
    BF16_COMPUTE,
    OFFLOAD,
    Found,
    Net,
    build,
    data_parallel,
    fp32,
    fp32_by_hand,
    inputs,
    shard,
    train,
)

pytestmark = pytest.mark.distributed

KEEPING = {"delayed": 3, "nvfp4": 2, "mxfp8 two copies": 2}
"""Recipes with amax histories, with draws, and with a copy to choose; and on how many ranks each way is tried."""


# Models


def skips_a_layer(recipe: str) -> Net:
    net = build(recipe)
    net.order = (0, 1, 3)
    return net


def uses_one_twice(recipe: str) -> Net:
    net = build(recipe)
    net.order = (0, 1, 2, 2, 3)
    return net


def tied(recipe: str) -> Net:
    net = build(recipe)
    net[2].weight = net[1].weight
    return net


def frozen(recipe: str) -> Net:
    return freeze(build(recipe))


def freeze(net: Any) -> Any:
    net[1].weight.requires_grad_(False)
    net[2].bias.requires_grad_(False)
    return net


class Mixed(nn.Sequential):
    """Plain PyTorch modules beside ours, one of which stays in high precision."""

    def forward(self, x: Tensor) -> Tensor:
        embedding, norm, first, second, head = self
        x = norm(embedding(x[:, 0].abs().mul(10).long() % 9))
        with qs.autocast(enabled=False):
            x = first(x)
        return head(second(x))


def mixed(recipe: str) -> Mixed:
    torch.manual_seed(7)
    first = qs.Linear(40, 70, params_dtype=torch.bfloat16, device="cpu")
    with qs.quantized_model_init(recipe=RECIPES[recipe]):
        second = qs.Linear(70, 33, params_dtype=torch.bfloat16, device="cpu")
    plain = [nn.Embedding(9, 40), nn.LayerNorm(40), nn.Linear(33, 3)]
    embedding, norm, head = (module.to(torch.bfloat16) for module in plain)
    return Mixed(embedding, norm, first, second, head)


# Wraps


def in_groups(model: Any) -> Any:
    fully_shard([model[0], model[1], model[2]])
    return fully_shard(model)


def prefetching(model: Any) -> Any:
    shard(model)
    for one, following in pairwise(model):
        one.set_modules_to_forward_prefetch([following])
        following.set_modules_to_backward_prefetch([one])
    return model


def sharded_copy(model: Any) -> Any:
    other = copy.deepcopy(model)
    with torch.no_grad():
        model[0].weight.quantize_(torch.zeros(model[0].weight.shape))  # not seen by the copy
    return shard(other)


def casting_by_hand(model: Any) -> Any:
    """Inputs are cast by the caller, outputs by FSDP2."""
    for layer in model:
        fully_shard(layer, mp_policy=BF16_COMPUTE)
    return fully_shard(
        model,
        mp_policy=MixedPrecisionPolicy(
            torch.bfloat16, torch.float32, output_dtype=torch.float32, cast_forward_inputs=False
        ),
    )


class Moves:
    """On one device FSDP2's CPU offload moves nothing; in this context it copies as it would to and from a GPU."""

    def __enter__(self) -> None:
        def to(tensor: Tensor, device: Any = None, non_blocking: bool = False) -> Tensor:
            moved: Tensor = torch.ops.aten._to_copy(tensor, device=device)
            return moved

        setattr(qs.QuantizedTensor, "to", to)  # noqa: B010
        setattr(qs.QuantizedTensor, "cpu", lambda tensor: to(tensor, "cpu"))  # noqa: B010

    def __exit__(self, *error: object) -> None:
        del qs.QuantizedTensor.to, qs.QuantizedTensor.cpu


def no_sync(model: DistributedDataParallel, is_last: bool) -> Any:
    return nullcontext() if is_last else model.no_sync()


def sync_last(model: Any, is_last: bool) -> Any:
    model.set_requires_gradient_sync(is_last)
    model.set_is_last_backward(is_last)
    return nullcontext()


def keep_until_last(model: Any, is_last: bool) -> Any:
    model.set_reshard_after_backward(is_last)
    return sync_last(model, is_last)


def evaluate(model: Any, recipe: str) -> None:
    model.eval()
    with torch.no_grad(), qs.autocast(recipe=RECIPES[recipe]):
        model(100 * inputs(55))
    model.train()


def gather_by_hand(model: Any, recipe: str) -> None:
    for layer in model:
        layer.unshard()
        layer.reshard()
    handle = model[1].unshard(async_op=True)
    if handle is not None:
        handle.wait()
    model[1].reshard()
    model[2].unshard()  # and left so


# The table


@dataclass(frozen=True)
class Row:
    """A way to wrap and train a model, and what its gradients are averaged like where that is done by hand."""

    wrap: Callable[[Any], Any]
    model: Callable[[str], Any] = build
    like: str = "FSDP2"
    options: dict[str, Any] = field(default_factory=dict)
    moves: bool = False

    def way(self, recipe: str) -> Found:
        with Moves() if self.moves else nullcontext():
            model = self.wrap(self.model(recipe))
            found = train(model, recipe, **self.options)
        if isinstance(model, DistributedDataParallel):
            qs.check_replicas(model)
        return found

    def by_hand(self, recipe: str) -> Found:
        if self.model is fp32:
            return fp32_by_hand(recipe)
        return train(self.model(recipe), recipe, by_hand=self.like, micro_batches=self.options.get("micro_batches", 1))

    @property
    def reference(self) -> tuple[Any, ...]:
        """Equal for rows with one reference."""
        return self.model, self.like, self.options.get("micro_batches", 1)


def ddp(model: Callable[[str], Any] = build, train: dict[str, Any] | None = None, **options: Any) -> Row:
    return Row(partial(data_parallel, **options), model, "DDP", train or {})


def fsdp(model: Callable[[str], Any] = build, **options: Any) -> Row:
    return Row(shard, model, options=options)


ROWS = {
    "DDP": ddp(),
    "DDP, gradients are views": ddp(gradient_as_bucket_view=True),
    "DDP, static graph": ddp(static_graph=True),
    "DDP, find unused": ddp(skips_a_layer, find_unused_parameters=True),
    "DDP, no_sync": ddp(train={"micro_batches": 2, "micro_batch": no_sync}),
    "DDP, plain parts": ddp(mixed),
    "DDP, tied": ddp(tied),
    "DDP, frozen": ddp(frozen),
    "FSDP2": fsdp(),
    "one group": Row(fully_shard),
    "groups of modules": Row(in_groups),
    "CPU offload": Row(partial(shard, offload_policy=OFFLOAD)),
    "CPU offload that moves": Row(partial(shard, offload_policy=OFFLOAD), moves=True),
    "fp32, computed in bf16": Row(partial(shard, mp_policy=BF16_COMPUTE), fp32, options={"input_dtype": torch.float32}),
    "fp32, casts by hand": Row(casting_by_hand, fp32),
    "frozen before": fsdp(frozen),
    "frozen after": Row(lambda model: freeze(shard(thaw(model))), frozen),
    "unused": fsdp(skips_a_layer),
    "unused in a group": Row(in_groups, skips_a_layer),
    "used twice": fsdp(uses_one_twice),
    "tied in a group": Row(in_groups, tied),
    "plain parts": fsdp(mixed),
    "deepcopy": Row(sharded_copy),
    "cast before": Row(lambda model: shard(model.float().half().bfloat16())),
    "cast after": Row(lambda model: shard(model).float().half().bfloat16()),
    "kept after forward": Row(partial(shard, reshard_after_forward=False)),
    "micro-batches": fsdp(micro_batches=2, micro_batch=sync_last),
    "kept between micro-batches": fsdp(micro_batches=2, micro_batch=keep_until_last),
    "prefetch": Row(prefetching),
    "unshard and reshard": fsdp(between=gather_by_hand),
    "evaluations between": fsdp(between=evaluate),
}

HSDP_ROWS = {
    "HSDP 2x2": Row(partial(shard, mesh=(2, 2))),
    "HSDP 2x2, CPU offload": Row(partial(shard, mesh=(2, 2), offload_policy=OFFLOAD), moves=True),
    "HSDP 2x2, frozen": Row(partial(shard, mesh=(2, 2)), frozen),
}


def thaw(model: Any) -> Any:
    return model.requires_grad_(True)


Cells = dict[int, list[tuple[str, str]]]
"""Ranks -> (way, recipe)."""


VARIANTS = (
    "DDP, gradients are views", "DDP, static graph", "DDP, plain parts", "fp32, casts by hand", "frozen after",
    "unused in a group", "tied in a group", "cast before", "kept between micro-batches", "CPU offload that moves",
    "DDP, find unused", "DDP, frozen", "cast after", "prefetch", "evaluations between", "one group", "DDP, tied",
    "unshard and reshard",
)  # fmt: skip
"""Ways that are much like others, for `make test-all`."""


def cells() -> Cells:
    """Every way but variants with one of the recipes that keep something."""
    found: Cells = {ranks: [] for ranks in (1, 2, 3, 4)}
    for number, name in enumerate(name for name in ROWS if name not in VARIANTS):
        kept = list(KEEPING)[number % len(KEEPING)]
        found[KEEPING[kept]].append((name, kept))
    found[4] = [("HSDP 2x2", "delayed"), ("HSDP 2x2, frozen", "nvfp4")]
    return found


def rest() -> Cells:
    """Every way with every recipe that it is not tried with above, one that keeps something on as many ranks."""
    tried = {cell for found in cells().values() for cell in found}
    found: Cells = {ranks: [] for ranks in (1, 2, 3, 4)}
    for name, recipe in product(ROWS | HSDP_ROWS, RECIPES):
        if (name, recipe) not in tried and (name in ROWS or name == "HSDP 2x2" or recipe in KEEPING):
            found[KEEPING.get(recipe, 1) if name in ROWS else 4].append((name, recipe))
    return found


def compare(cells: list[tuple[str, str]]) -> dict[tuple[str, str], str]:
    """(name, recipe) -> "" or what differs."""
    found, references = {}, {}
    for name, recipe in cells:
        row = (ROWS | HSDP_ROWS)[name]
        key = (row.reference, recipe)
        references[key] = references.get(key) or row.by_hand(recipe)
        want, got = references[key], row.way(recipe)
        differ = [entry for entry in want if got.get(entry) != want[entry]]
        found[name, recipe] = ", ".join(differ or sorted(got.keys() - want.keys()))
    return found


@pytest.mark.parametrize("cells", [cells(), pytest.param(rest(), marks=pytest.mark.exhaustive)], ids=["some", "rest"])
def test_table(cells: Cells, show: Callable[[str], None]) -> None:
    """1, 2, 3 and 4 ranks."""
    found: dict[tuple[str, str], list[str]] = {}
    words: dict[tuple[str, str], str] = {}
    for ranks, chosen in cells.items():
        for rank, differing in enumerate(run_ranks(ranks, compare, chosen)):
            for cell, differ in differing.items():
                found.setdefault(cell, []).extend([f"rank {rank} of {ranks}: {differ}"] if differ else [])
                words[cell] = f"x{ranks} DIFFER" if found[cell] else f"x{ranks} equal"
    lines = [f"{'':<28}" + "".join(f"{recipe:<10}" for recipe in RECIPES)]
    for name in ROWS | HSDP_ROWS:
        lines.append(f"{name:<28}" + "".join(f"{words.get((name, recipe), '-'):<10}" for recipe in RECIPES).rstrip())
    show("\n".join(lines))
    assert not any(found.values()), {cell: differ for cell, differ in found.items() if differ}


# Refusals, the same on every rank


def message_of(function: Callable[[], Any]) -> str:
    try:
        function()
    except (QuantshardError, RuntimeError, AssertionError, NotImplementedError) as error:
        return str(error)
    return "nothing was raised"


def one_weight() -> qs.Linear:
    with qs.quantized_model_init(recipe="mxfp8"):
        return qs.Linear(64, 64, bias=False, device="cpu")


def plain_ddp(recipe: str) -> list[str]:
    """Several weights in one bucket, and one alone in it."""
    return [message_of(lambda model=model: DistributedDataParallel(model)) for model in (build(recipe), one_weight())]


def joined_ddp(recipe: str) -> list[str]:
    def run() -> None:
        model = data_parallel(build(recipe))
        with model.join():
            model(inputs(0)).float().sum().backward()

    return [message_of(run)]


def sharded_replicas(recipe: str) -> list[str]:
    model = shard(build(recipe))
    return [message_of(lambda: qs.check_replicas(model)), message_of(lambda: qs.broadcast_(model))]


def one_different_code(recipe: str) -> list[str]:
    model = build(recipe)
    if dist.get_rank() == dist.get_world_size() - 1:
        model.state_dict()["2.weight"][-1, -1] ^= 1
    return [message_of(lambda: qs.check_replicas(model))]


def different_models(recipe: str) -> list[str]:
    model = build(recipe if dist.get_rank() else "block")
    return [message_of(lambda: qs.check_replicas(model)), message_of(lambda: qs.broadcast_(model))]


def different_scaling(recipe: str) -> list[str]:
    """All names, dtypes and shapes are equal."""
    with qs.quantized_model_init(recipe=qs.recipe.DelayedScaling(margin=dist.get_rank(), amax_history_len=4)):
        model = qs.Linear(64, 64, device="cpu")
    return [message_of(lambda: qs.broadcast_(model))]


def stale(recipe: str) -> list[str]:
    model = shard(build(recipe))
    model.set_reshard_after_backward(False)
    optimizer = FusedAdam(model.parameters())
    with qs.autocast(recipe=RECIPES[recipe]):
        model(inputs(0)).float().sum().backward()
    optimizer.step()
    found = message_of(lambda: model(inputs(0)))
    for layer in model:
        layer.reshard()
    model(inputs(0))
    return [found]


def copy_of_sharded(recipe: str) -> list[str]:
    model = shard(build(recipe))
    return [message_of(lambda: copy.deepcopy(model))]


def tied_apart(recipe: str) -> list[str]:
    model = shard(tied(recipe))
    builders = (FusedAdam, lambda params: MasterWeights(torch.optim.SGD, params))
    return [message_of(lambda build=build: build(model.named_parameters())) for build in builders]


REFUSED = {
    plain_ddp: "init_sync=False",
    joined_ddp: "init_sync=False",
    sharded_replicas: "is sharded",
    one_different_code: "'2.weight'",
    different_models: "build the same model",
    different_scaling: "build the same model",
    stale: "before its last update",
    copy_of_sharded: "does not support deepcopy",
    tied_apart: "the tied 1.weight and 2.weight twice",
}


def refusals(recipe: str) -> dict[str, list[str]]:
    return {function.__name__: function(recipe) for function in REFUSED}


def test_refused_on_every_rank() -> None:
    """2 and 3 ranks: the same sentence on each, and the process group lives on."""
    for ranks, recipe in ((2, "nvfp4"), (3, "mxfp8")):
        for found in run_ranks(ranks, refusals, recipe):
            for function, way_out in REFUSED.items():
                for message in found[function.__name__]:
                    assert way_out in message, (function.__name__, ranks, found[function.__name__])


def broadcast(recipe: str, src: int) -> tuple[Found, bool]:
    torch.manual_seed(dist.get_rank())
    with qs.quantized_model_init(recipe=RECIPES[recipe], preserve_high_precision_init_val=True):
        model = nn.Sequential(qs.Linear(40, 70, device="cpu"), nn.Linear(70, 3))
    before = bits(model)
    qs.broadcast_(model, src)
    qs.check_replicas(model)
    optimizer = FusedAdam(model.named_parameters())  # masters are seeded from the initial values, which are sent too
    return bits(model, optimizer), bits(model) == before


def kept_by_some(recipe: str) -> tuple[list[str], list[bool]]:
    """What check_replicas says, and where initial values are kept after broadcast_: rank 0 alone wrote codes."""
    torch.manual_seed(0)
    with qs.quantized_model_init(recipe=RECIPES[recipe], preserve_high_precision_init_val=True):
        model = nn.Sequential(qs.Linear(40, 70, device="cpu"), qs.Linear(70, 3, device="cpu"))
    if dist.get_rank() == 0:
        for value in model[0].state_dict().values():
            if isinstance(value, torch.Tensor):
                value.copy_(value.clone())  # as `dcp.load` does
    told = message_of(lambda: qs.check_replicas(model))
    qs.broadcast_(model)
    qs.check_replicas(model)
    return [told], [layer.weight.get_high_precision_init_val() is not None for layer in model]


def test_initial_values_that_some_ranks_keep() -> None:
    for told, kept in run_ranks(3, kept_by_some, "mxfp8"):
        assert "0.weight as initialized" in told[0] and kept == [False, True]


@pytest.mark.parametrize("recipe", RECIPES)
def test_broadcast(recipe: str) -> None:
    """1 and 3 ranks, seeded differently: all get the bits of the source."""
    for ranks, src in ((1, 0), (3, 2)):
        found = run_ranks(ranks, broadcast, recipe, src)
        assert all(state == found[0][0] for state, _ in found)
        assert [kept for _, kept in found] == [rank == src for rank in range(ranks)]
