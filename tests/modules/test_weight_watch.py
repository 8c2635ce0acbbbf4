"""Weights that have gradients and are in no optimizer are told after some of its steps, where no names are known."""

from __future__ import annotations

import copy
import gc
import warnings
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import quantshard as qs
from quantshard.errors import _told
from quantshard.modules.base import weight_watch
from quantshard.optimizers import FusedAdam, MasterWeights
from tests.distributed.pool import run_ranks

SIZE = 32


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Modules of other tests, which may have gradients still, are left out, and nothing was told yet."""
    gc.collect()
    weight_watch._modules.clear()
    before = {*_told}
    _told.clear()
    yield
    _told.update(before)


def built(quantized: bool = True) -> nn.Sequential:
    with qs.quantized_model_init(quantized, recipe="mxfp8"):
        return nn.Sequential(*[qs.Linear(SIZE, SIZE, params_dtype=torch.bfloat16, device="cpu") for _ in range(3)])


def told(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 3) -> list[str]:
    """What is said while a model trains."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for _ in range(steps):
            with qs.autocast(recipe="mxfp8"):
                model(torch.ones(4, SIZE, dtype=torch.bfloat16)).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return [str(each.message) for each in found if "in no optimizer" in str(each.message)]


def test_a_weight_that_was_left_out_is_told_once() -> None:
    model = built()
    params = [param for name, param in model.named_parameters() if not name.startswith("1.")]
    [said] = told(model, FusedAdam(params, lr=1e-2), steps=9)
    assert said.startswith(f"bias [{SIZE}] of a Linear, weight [{SIZE}, {SIZE}] of a Linear: they get gradients and ")
    assert "so no step changes them; give the optimizer model.named_parameters(), or freeze" in said


@pytest.mark.filterwarnings("ignore:Linear.weight was .* and is now a plain")
def test_a_weight_that_was_replaced_is_told() -> None:
    model = built()
    optimizer = FusedAdam(model.parameters(), lr=1e-2)
    model[0].weight = nn.Parameter(torch.zeros(SIZE, SIZE, dtype=torch.bfloat16))
    [said] = told(model, optimizer)
    assert (
        f"weight [{SIZE}, {SIZE}] of a Linear: it gets a gradient and is in no optimizer, so no step changes it" in said
    )


@pytest.mark.parametrize("converted", [False, True])
def test_what_is_unfrozen_later_is_told(converted: bool) -> None:
    """The optimizer holds what trained when it was made; of a converted model, which looks by itself at first, too."""
    if converted:
        model: nn.Module = nn.Sequential(*[nn.Linear(SIZE, SIZE, dtype=torch.bfloat16) for _ in range(3)])
        qs.convert(model, "mxfp8")
    else:
        model = built()
    model[0].requires_grad_(False)
    optimizer = FusedAdam([param for param in model.parameters() if param.requires_grad], lr=1e-4)
    assert told(model, optimizer, steps=70) == []
    model[0].requires_grad_(True)
    [said] = told(model, optimizer, steps=70)
    assert "they get gradients and are in no optimizer" in said and said.startswith("bias [32] of a ")


def test_norms_of_a_converted_model_that_are_unfrozen_later_are_told() -> None:
    model = nn.Sequential(nn.Linear(SIZE, SIZE), nn.LayerNorm(SIZE)).bfloat16()
    qs.convert(model, "mxfp8")
    model[1].requires_grad_(False)
    optimizer = FusedAdam([param for param in model.parameters() if param.requires_grad], lr=1e-4)
    assert told(model, optimizer, steps=70) == []
    model[1].requires_grad_(True)
    [said] = told(model, optimizer, steps=70)
    assert said.startswith(f"bias [{SIZE}] of a LayerNorm, weight [{SIZE}] of a LayerNorm: they get gradients")


KEPT: list[torch.optim.Optimizer] = []


def another(model: nn.Module) -> torch.optim.Optimizer:
    """Two optimizers, of which one steps."""
    first, *rest = model.parameters()
    KEPT[:] = [torch.optim.SGD(rest, lr=0.1)]
    return torch.optim.SGD([first], lr=0.1)


def frozen(model: nn.Module) -> torch.optim.Optimizer:
    model[1].requires_grad_(False)  # type: ignore[operator,index]
    return FusedAdam([param for param in model.parameters() if param.requires_grad], lr=1e-2)


def after_another(model: nn.Module) -> torch.optim.Optimizer:
    """Of a model that was trained before, whose last gradients are there."""
    trained = built()
    optimizer = FusedAdam(trained.parameters(), lr=1e-2)
    for _ in range(3):
        optimizer.zero_grad()
        with qs.autocast(recipe="mxfp8"):
            trained(torch.ones(4, SIZE, dtype=torch.bfloat16)).float().sum().backward()
        optimizer.step()
    model.before = [trained]
    return FusedAdam(model.parameters(), lr=1e-2)


def beside_an_old_gradient(model: nn.Module) -> torch.optim.Optimizer:
    """Of a model that was never trained, and is not now."""
    looked_at = built()
    with qs.autocast(recipe="mxfp8"):
        looked_at(torch.ones(4, SIZE, dtype=torch.bfloat16)).float().sum().backward()
    model.before = [looked_at]
    return FusedAdam(model.parameters(), lr=1e-2)


RIGHT: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "all": lambda model: FusedAdam(model.named_parameters(), lr=1e-2),
    "masters": lambda model: MasterWeights(torch.optim.SGD, model.parameters(), lr=0.1),
    "frozen": frozen,
    "in another": another,
    "after another model": after_another,
    "beside an old gradient": beside_an_old_gradient,
}


@pytest.mark.parametrize("name", RIGHT)
def test_what_is_right_is_not_told(name: str) -> None:
    model = built()
    assert not told(model, RIGHT[name](model), steps=9)


def test_masters_by_hand_are_not_told() -> None:
    """Whatever changes a weight, also behind autograd's back."""
    model = built(quantized=False)
    masters = [nn.Parameter(param.detach().float()) for param in model.parameters()]
    optimizer = torch.optim.SGD(masters, lr=0.1)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for _ in range(9):
            model.zero_grad()
            model(torch.ones(4, SIZE, dtype=torch.bfloat16)).float().square().sum().backward()
            for master, param in zip(masters, model.parameters(), strict=True):
                master.grad = param.grad.float()  # type: ignore[union-attr]
            optimizer.step()
            for master, param in zip(masters, model.parameters(), strict=True):
                param.data.copy_(master)
    assert not [each for each in found if "in no optimizer" in str(each.message)]


@pytest.mark.parametrize("kind", ["masters", "copy", "two in turn"])
def test_what_is_left_out_is_told_of_others_too(kind: str) -> None:
    """Of masters in an optimizer of their own; of a copied model; of a second model with the same mistake."""
    model = built()
    if kind == "masters":
        assert len(told(model, MasterWeights(torch.optim.SGD, model[:1].parameters(), lr=0.1), steps=9)) == 1
        return
    if kind == "copy":
        model = copy.deepcopy(model)
    for each in (model, built()):
        assert len(told(each, FusedAdam(each[:1].parameters(), lr=1e-2), steps=9)) == 1


def test_many_optimizers_are_looked_at_without_a_collection(monkeypatch: pytest.MonkeyPatch) -> None:
    model, collections = built(), []
    monkeypatch.setattr(weight_watch.gc, "collect", lambda: collections.append(1))
    optimizers = [FusedAdam([param], lr=1e-3) for param in model.parameters()]
    for _ in range(9):
        with qs.autocast(recipe="mxfp8"):
            model(torch.ones(4, SIZE, dtype=torch.bfloat16)).float().square().mean().backward()
        for each in optimizers:
            each.step()
            each.zero_grad()
    assert not collections


def test_a_step_without_values_is_not_looked_at() -> None:
    """As `plan` rehearses one."""
    model = nn.Sequential(*[qs.Linear(SIZE, SIZE, params_dtype=torch.bfloat16, device="meta") for _ in range(2)])
    optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)
    for _ in range(4):
        for param in model.parameters():
            param.grad = torch.empty_like(param)
        optimizer.step()


def test_a_model_that_was_given_up_is_not_told() -> None:
    """Though its parameters, which have gradients, are there until Python's collector comes."""
    gc.disable()
    try:
        model = built()
        model[0].own = model  # a cycle, as FSDP2 makes them
        model(torch.ones(4, SIZE, dtype=torch.bfloat16)).float().sum().backward()
        del model
        model = built()
        assert not told(model, FusedAdam(model.parameters(), lr=1e-2))
    finally:
        gc.enable()


def test_gradients_of_others_hide_no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that stay, of models that train no more, come first here, and are more than are looked at a second time."""
    weight_watch._modules.clear()
    others = built()
    for param in others.parameters():
        param.grad = torch.ones(param.shape, dtype=param.dtype)
    model, found = built(), weight_watch._unheld
    own = {id(module) for module in model}
    monkeypatch.setattr(weight_watch, "_MOST", 4)
    monkeypatch.setattr(weight_watch, "_unheld", lambda: sorted(found(), key=lambda each: id(each[0]) in own))
    assert told(model, torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1))
    weight_watch._modules.clear()


def sharded_too_late() -> tuple[list[str], list[str]]:
    """The optimizer before fully_shard, of quantized weights and of plain ones; what was said."""
    said = []
    for quantized in (True, False):
        gc.collect()
        weight_watch._modules.clear()
        model = built(quantized)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for module in (*model, model):
            fully_shard(module, mesh=init_device_mesh("cpu", (torch.distributed.get_world_size(),)))
        said.append(told(model, optimizer))
        weight_watch._modules.clear()
    return said[0], said[1]


@pytest.mark.distributed
def test_an_optimizer_from_before_fully_shard_is_told() -> None:
    """1 and 3 ranks, whose shards differ: it trains nothing, and PyTorch says nothing."""
    for ranks in (1, 3):
        for both in run_ranks(ranks, sharded_too_late):
            for said in both:
                assert len(said) == 1
                assert "AdamW, which stepped, has 6 parameters, none of them with a gradient; build it after" in said[0]
                assert f"bias [{SIZE}] of a Linear" in said[0] and "and 2 more: they get gradients" in said[0]


def test_a_converted_model_is_told_by_its_names_alone() -> None:
    model = nn.Sequential(*[nn.Linear(SIZE, SIZE, dtype=torch.bfloat16) for _ in range(3)])
    qs.convert(model, recipe="mxfp8")
    optimizer = FusedAdam(model[0].parameters(), lr=1e-2)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for _ in range(9):
            model(torch.ones(4, SIZE, dtype=torch.bfloat16)).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    [said] = [str(each.message) for each in found if "in no optimizer" in str(each.message)]
    assert said.startswith("1.weight, 1.bias, 2.weight, 2.bias of a Sequential")
