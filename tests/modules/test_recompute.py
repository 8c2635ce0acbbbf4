"""Activation recomputation in one process: what is kept of a first forward, and what cannot be known."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import quantshard as qs
from quantshard import private_torch
from quantshard.compat.transformer_engine.pytorch import checkpoint as te_checkpoint
from quantshard.errors import TorchVersionError, UnsupportedOperationError
from quantshard.modules.contexts import settings
from quantshard.private_torch import recomputation
from quantshard.private_torch.lookup import MissingName
from quantshard.recipe import DelayedScaling

DELAYED = DelayedScaling(amax_history_len=4)


def linear(recipe: Any = DELAYED, width: int = 5) -> qs.Linear:
    torch.manual_seed(3)
    with qs.quantized_model_init(recipe=recipe):
        return qs.Linear(width, width)


def x(seed: int = 0) -> Tensor:
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(seed)).requires_grad_()


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_layer_in_two_regions_records_one_amax_a_step(reentrant: bool) -> None:
    def histories(recompute: bool) -> tuple[Tensor, Tensor]:
        layer = linear()
        for step in range(3):
            with qs.autocast(recipe=DELAYED):
                y = x(step)
                for _ in range(2):
                    y = checkpoint(layer, y, use_reentrant=reentrant) if recompute else layer(y)
            (y * torch.arange(1, 6)).sum().backward()
        return layer.input_amax_history, layer.grad_output_amax_history

    for plain, again in zip(histories(False), histories(True), strict=True):
        assert torch.equal(plain, again)
        assert (plain != 0).sum() == 3


@pytest.mark.parametrize("trains", [False, True])
@pytest.mark.parametrize("reentrant", [None, False, True])
def test_the_mode_of_the_first_forward_tells_what_is_recorded(reentrant: bool | None, trains: bool) -> None:
    """Also if train() or eval() is called before backward, as where a metric is evaluated between the two."""
    layer = linear().train(trains)
    with qs.autocast(recipe=DELAYED):
        out = layer(x()) if reentrant is None else checkpoint(layer, x(), use_reentrant=reentrant)
    layer.train(not trains)
    out.sum().backward()
    for history in (layer.input_amax_history, layer.grad_output_amax_history):
        assert (history != 0).sum() == trains


@pytest.mark.parametrize("way", [torch.no_grad, torch.inference_mode])
def test_a_forward_without_gradients_records_nothing(way: Callable[[], Any]) -> None:
    """As in TransformerEngine: ranks may generate texts of different lengths."""
    layer = linear()
    with way(), qs.autocast(recipe=DELAYED):
        layer(100 * x())
    with qs.autocast(recipe=DELAYED):
        with way():
            layer(100 * x())
        out = layer(value := x())
    out.sum().backward()
    assert layer.input_amax_history.tolist() == [0, 0, 0, value.abs().max()]


@pytest.mark.parametrize("reentrant", [False, True])
def test_graph_kept_for_a_second_backward(reentrant: bool) -> None:
    layer = linear("current")
    with qs.autocast(recipe="current"):
        out = checkpoint(layer, x(), use_reentrant=reentrant)
    out.sum().backward(retain_graph=True)
    first = layer.weight.grad.clone()
    layer.weight.grad = None
    out.sum().backward()
    assert torch.equal(first, layer.weight.grad)


def test_a_region_without_gradients_keeps_nothing_and_changes_nothing() -> None:
    layer, before = linear(), x()
    with qs.autocast(recipe=DELAYED), torch.no_grad():
        assert torch.equal(checkpoint(layer, before, use_reentrant=False), linear()(before))


class _OwnRecomputation(torch.autograd.Function):
    """A recomputation that PyTorch knows nothing of."""

    @staticmethod
    def forward(ctx: Any, module: nn.Module, value: Tensor, inside: Any) -> Tensor:
        ctx.module, ctx.inside = module, inside
        ctx.save_for_backward(value)
        with torch.no_grad(), inside():
            return module(value)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor, None]:
        value = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad(), ctx.inside():
            out = ctx.module(value)
        torch.autograd.backward(out, grads[0])
        return None, value.grad, None


def test_a_second_forward_whose_first_is_unknown_raises_or_is_told_by_autocast() -> None:
    layer = linear("current")
    with qs.autocast(recipe="current"):
        out = _OwnRecomputation.apply(layer, x(), contextlib.nullcontext)
    with pytest.raises(UnsupportedOperationError, match="enter autocast in the recomputed function"):
        out.sum().backward()

    out = _OwnRecomputation.apply(layer, x(), lambda: qs.autocast(recipe="current"))
    out.sum().backward()

    layer = linear()
    out = _OwnRecomputation.apply(layer, x(), lambda: qs.autocast(recipe=DELAYED))
    with pytest.raises(UnsupportedOperationError, match="recompute with quantshard"):
        out.sum().backward()


def test_a_function_that_does_more_the_second_time_raises() -> None:
    layer, calls = linear("current"), []

    def function(value: Tensor) -> Tensor:
        calls.append(1)
        for _ in range(len(calls)):
            value = layer(value)
        return value

    with qs.autocast(recipe="current"):
        out = checkpoint(function, x(), use_reentrant=True)
    with pytest.raises(UnsupportedOperationError, match="'weight' more often than the first forward"):
        out.sum().backward()


def one_step(way: Callable[..., Tensor], recipe: Any = DELAYED) -> list[Tensor]:
    """Gradients and histories of a step whose region holds a layer twice, the second time in a region of its own."""
    layer, value = linear(recipe), x()
    with qs.autocast(recipe=recipe):
        out = way(lambda y: way(layer, layer(y)), value)
    (out * torch.arange(1, 6)).sum().backward()
    return [out, value.grad, layer.weight.grad, layer.input_amax_history, layer.grad_output_amax_history]


REGIONS = {
    "checkpoint": partial(checkpoint, use_reentrant=False),
    "reentrant checkpoint": partial(checkpoint, use_reentrant=True),
    "quantshard.checkpoint": qs.checkpoint,
    "reentrant quantshard.checkpoint": partial(qs.checkpoint, use_reentrant=True),
}
MISSING = [
    "_top_hooks", "_pop_hooks", "_push_hooks", "_region_class", "_first_hook", "_replay_hook", "_reentrant_forward",
    "_reentrant_backward",
]  # fmt: skip


reentrant_in_reentrant = pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")


@reentrant_in_reentrant
@pytest.mark.parametrize("way", REGIONS)
def test_nested_regions_have_the_bits_of_none(way: str) -> None:
    for one, other in zip(one_step(REGIONS[way]), one_step(lambda function, y: function(y)), strict=True):
        assert torch.equal(one, other)


@reentrant_in_reentrant
def test_regions_raise_without_a_private_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """But not before they are recomputed, and not without quantization."""
    names = [getattr(recomputation, name) for name in MISSING]
    assert len(names) == len(recomputation._NAMES) and all(
        a is b for a, b in zip(names, recomputation._NAMES, strict=True)
    )
    for number, name in enumerate(MISSING):
        missing = MissingName(f"torch.{name}", recomputation._FEATURE)
        monkeypatch.setattr(recomputation, "_NAMES", (*names[:number], missing, *names[number + 1 :]))
        for way in REGIONS.values():
            with pytest.raises(TorchVersionError, match=rf"has no torch.{name}, .*recomputation"):
                one_step(way)
    monkeypatch.setattr(settings, "has_quantized", lambda: False)
    checkpoint(qs.Linear(5, 5), x(), use_reentrant=False).sum().backward()  # which nothing of ours is needed for


@pytest.mark.parametrize("name", ["_replay_hook", "_region_class", "_first_hook"])
def test_hooks_of_checkpointing_that_are_not_as_they_were_are_noticed(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a recomputation would take another recipe, scale or draw."""
    monkeypatch.setattr(recomputation, name, type("Other", (), {}))
    with pytest.raises((TorchVersionError, UnsupportedOperationError), match=r"pack_hook|more often"):
        one_step(REGIONS["checkpoint"])
    with torch.autograd.graph.save_on_cpu(), qs.autocast(recipe=DELAYED):
        linear()(x()).sum().backward()  # no hook of checkpointing


def test_hooks_that_were_looked_at_are_as_before() -> None:
    """Those within a region too, which hide it."""
    hidden = one_step(lambda function, y: checkpoint(partial(under_hooks, function), y, use_reentrant=False))
    for one, other in zip(hidden, one_step(lambda function, y: function(y)), strict=True):
        assert torch.equal(one, other)
    seen: list[Any] = []
    with torch.autograd.graph.saved_tensors_hooks(seen.append, seen.append):
        one, two = recomputation._top_hooks(True)
        private_torch.checkpointed_regions()
        assert recomputation._top_hooks(True) == (one, two)
    assert recomputation._top_hooks(True) is None


def under_hooks(function: Callable[[Tensor], Tensor], value: Tensor) -> Tensor:
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
        return function(value)


class Scaled(torch.nn.Module):
    """A layer that takes tensors by name, one of which needs a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = linear("current")

    def forward(self, value: Tensor, *, by: Tensor, plus: float = 0.0) -> Tensor:
        return self.layer(value) * by + plus


@pytest.mark.parametrize(
    "region",
    [qs.checkpoint, te_checkpoint, partial(te_checkpoint, use_reentrant=False)],
    ids=["quantshard's", "TransformerEngine's", "TransformerEngine's, not reentrant"],
)
def test_arguments_by_name_reach_the_function(region: Callable[..., Tensor]) -> None:
    """Tensors among them get the gradients that they get without checkpointing, bit for bit."""
    module, found = Scaled(), []
    for wrapped in (False, True):
        value, by = x().requires_grad_(), torch.full((), 3.0, requires_grad=True)
        with qs.autocast(recipe="current"):
            if wrapped:
                named = {
                    "by": by,
                    "plus": 2.0,
                    "preserve_rng_state": False,
                    "determinism_check": "none",
                }
                out = region(module, value, **named)
            else:
                out = module(value, by=by, plus=2.0)
        module.zero_grad()
        out.square().sum().backward()
        found.append([out, value.grad, by.grad, module.layer.weight.grad])
    for plain, checkpointed in zip(*found, strict=True):
        assert torch.equal(plain, checkpointed)
