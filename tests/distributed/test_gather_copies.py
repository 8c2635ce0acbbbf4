"""What FSDP2's gather of one group of quantized weights launches and sends: counted. Each test names its rank count."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils._python_dispatch import TorchDispatchMode

import quantshard as qs
from quantshard.tools.trainer.models import model as models
from quantshard.tools.trainer.settings.config import TrainSettings
from quantshard.tools.trainer.settings.values import MeshSpec
from tests.covering import exhaustive
from tests.distributed.models import RECIPES
from tests.distributed.pool import run_ranks

pytestmark = pytest.mark.distributed
SHAPES = {"even": ((96, 192), (192, 96)), "odd": ((96, 101), (101, 37))}
"""In and out features of two layers in one group; rows of the odd ones are no multiple of any rank count."""
VIEWS = {"view", "as_strided", "slice", "select", "detach", "alias", "split", "reshape", "_unsafe_view", "empty", "t"}
"""Operations that launch nothing."""
GATHER, REDUCTION = "FSDP::pre_", "FSDP::post_backward_reduce"


class Step(NamedTuple):
    """Of one step: names of launches in each gather, bytes that it brings, and the same of the reduction."""

    gathers: list[list[str]]
    gathered_bytes: list[int]
    reduction: list[str]
    sent_bytes: int


class Launches(TorchDispatchMode):
    """Names of what is launched, by the innermost of FSDP2's own regions."""

    def __init__(self) -> None:
        super().__init__()
        self.regions: list[tuple[str, list[str], list[int]]] = []
        self._inside: list[bool] = []
        self.reduced: list[int] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function._schema.name
        short = name.split("::")[1]
        if name == "profiler::_record_function_enter_new":
            self._inside.append(args[0].startswith((GATHER, REDUCTION)))
            if self._inside[-1]:
                self.regions.append((args[0], [], []))
        found = function(*args, **(kwargs or {}))
        if name == "profiler::_record_function_exit":
            self._inside.pop()
        elif short == "allreduce_":
            self.reduced.append(sum(each.nbytes for each in args[0]))
        elif any(self._inside) and short not in VIEWS and not name.startswith("profiler"):
            _, names, sizes = self.regions[-1]
            names.append(short)
            if name.startswith("c10d"):
                sizes.append(max(each.nbytes for each in (*args, *(kwargs or {}).values()) if isinstance(each, Tensor)))
        return found


def steps(recipe: str, shapes: str, reduce_dtype: torch.dtype, micro_batches: int = 1) -> Step:
    """The second step of a group of two layers."""
    with qs.quantized_model_init(recipe=RECIPES[recipe]):
        model = nn.Sequential(
            *[qs.Linear(i, o, bias=False, params_dtype=torch.bfloat16, device="cpu") for i, o in SHAPES[shapes]]
        )
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    fully_shard(model, mesh=mesh, reshard_after_forward=True, mp_policy=MixedPrecisionPolicy(reduce_dtype=reduce_dtype))
    x = torch.randn(64, SHAPES[shapes][0][0], dtype=torch.bfloat16)
    for _ in range(2):
        with Launches() as launches:
            for _ in range(micro_batches):
                with qs.autocast(recipe=RECIPES[recipe]):
                    y = model(x)
                y.float().square().sum().backward()
        for param in model.parameters():
            param.grad = None
    gathers = [(names, sizes) for region, names, sizes in launches.regions if region.startswith(GATHER) and names]
    reductions = [(names, sizes) for region, names, sizes in launches.regions if region.startswith(REDUCTION)]
    return Step(
        [names for names, _ in gathers],
        [sum(sizes) for _, sizes in gathers],
        [name for names, _ in reductions for name in names],
        sum(sum(sizes) for _, sizes in reductions),
    )


SENT = ["all_gather_copy_in", "_allgather_base_", "split_with_sizes_copy"]
"""FSDP2's own copy into the buffer that is sent, one collective, and its own copy out of it."""
NOT_FILLED = "mxfp8 two copies"
"""Which sends less in one pass than in the other, from buffers of one size."""


@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.exhaustive), 3])
@pytest.mark.parametrize(
    "recipe", exhaustive([(name,) for name in RECIPES], [("current",), ("block",), ("nvfp4",), (NOT_FILLED,)])
)
def test_a_gather_is_one_collective(recipe: str, ranks: int) -> None:
    """Scales go with the codes or are here, and GEMMs read where FSDP2 puts them; in each micro-batch."""
    for found in run_ranks(ranks, steps, recipe, "even", torch.float32, 2):
        assert len(found.gathers) == 4
        for number, launches in enumerate(found.gathers):
            sent = [each for each in launches if each != "clone" and (each != "new_empty" or recipe != NOT_FILLED)]
            assert sent == SENT
            in_backward, clones = number % 2 == 1, launches.count("clone")
            assert clones == 0 if in_backward else clones <= len(SHAPES["even"])  # a forward may be an `unshard`
        packed = [name for name in found.reduction if name.startswith("chunk_cat")]  # from 2.15 on with a cast inside
        assert len(packed) == found.reduction.count("_reduce_scatter_base_") == 2


@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.exhaustive), 3])
@pytest.mark.parametrize("recipe", ["current", "mxfp8", "nvfp4"])
def test_a_short_piece_is_padded_by_one_copy(recipe: str, ranks: int) -> None:
    """On the last rank, which has fewer rows of both weights; no other rank copies, and none after the collective."""
    *others, last = run_ranks(ranks, steps, recipe, "odd", torch.float32)
    assert all(found.gathers[1] == SENT for found in others)
    for launches in last.gathers:
        assert Counter(each for each in launches if each != "clone") == Counter(SENT) + Counter(copy_=2, new_empty=2)


@pytest.mark.parametrize("shapes", SHAPES)
def test_gradients_are_reduced_in_the_dtype_that_was_chosen(shapes: str) -> None:
    """2 ranks: BF16 sends half of the bytes of float32, in one collective each."""
    wide, narrow = (run_ranks(2, steps, "current", shapes, dtype)[0] for dtype in (torch.float32, torch.bfloat16))
    rows = [-(-rows // 2) * 2 * columns for columns, rows in SHAPES[shapes]]  # padded to even pieces
    assert (wide.sent_bytes, narrow.sent_bytes) == (4 * sum(rows), 2 * sum(rows))
    assert wide.reduction.count("_reduce_scatter_base_") == narrow.reduction.count("_reduce_scatter_base_") == 1


def sent_by_train(reduce_dtype: str) -> int:
    """Bytes of gradients that a step of the train command's model reduces."""
    settings = replace(
        TrainSettings(), hidden=64, heads=2, layers=1, seq_length=16, recipe="current", reduce_dtype=reduce_dtype
    ).resolved()
    mesh = MeshSpec(dp_shard=dist.get_world_size()).device_mesh("cpu")
    model = models.build(models.ModelSpec(settings), mesh)
    tokens = torch.zeros(1, 16, dtype=torch.int64)
    with Launches() as launches:
        models.loss(model(tokens), tokens).backward()
    return sum(sum(sizes) for region, _, sizes in launches.regions if region.startswith(REDUCTION))


def test_the_train_command_reduces_in_the_dtype_that_was_chosen() -> None:
    """2 ranks."""
    wide, narrow = (run_ranks(2, sent_by_train, name)[0] for name in ("float32", "bfloat16"))
    assert wide == 2 * narrow > 0


def reduced_by_delayed_scaling(micro_batches: int) -> list[int]:
    """Bytes of each reduction over all ranks in a step."""
    with qs.quantized_model_init(recipe=RECIPES["delayed"]):
        model = nn.Sequential(*[qs.Linear(64, 64, params_dtype=torch.bfloat16, device="cpu") for _ in range(5)])
    for module in (*model, model):
        fully_shard(module, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    with Launches() as launches:
        for _ in range(micro_batches):
            with qs.autocast(recipe=RECIPES["delayed"]):
                y = model(torch.ones(32, 64, dtype=torch.bfloat16))
            y.float().square().sum().backward()
    return launches.reduced


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_delayed_scaling_reduces_4_kib_a_pass(micro_batches: int) -> None:
    """2 ranks: amaxes of all layers in one collective of the forward, and in one of the backward."""
    assert run_ranks(2, reduced_by_delayed_scaling, micro_batches) == [[4096] * 2 * micro_batches] * 2
