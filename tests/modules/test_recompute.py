"""Activation recomputation in one process: what is kept of a first forward, and what cannot be known."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import checkpoint as torch_checkpoint
from torch.utils.checkpoint import checkpoint

import quantshard as qs
from quantshard.errors import ConfigurationError, UnsupportedOperationError
from quantshard.private_torch import recomputation
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


def test_transformer_engines_arguments() -> None:
    layer = linear("current")
    with qs.autocast(recipe="current"):
        assert torch.equal(qs.checkpoint(layer, x(), distribute_saved_activations=False, tp_group=None), layer(x()))
        assert torch.equal(qs.checkpoint(layer, x(), use_reentrant=True), layer(x()))
    with pytest.raises(ConfigurationError, match="distribute_saved_activations=True"):
        qs.checkpoint(layer, x(), distribute_saved_activations=True)


def test_renamed_variables_of_checkpointing_are_noticed() -> None:
    """Without them nothing would fail: a recomputation would take another recipe, scale or draw."""
    codes = {
        "checkpoint": recomputation._CHECKPOINT,
        "_checkpoint_without_reentrant_generator": torch_checkpoint._checkpoint_without_reentrant_generator.__code__,
        "CheckpointFunction.forward": recomputation._REENTRANT_FORWARD,
        "CheckpointFunction.backward": recomputation._REENTRANT_BACKWARD,
        **recomputation._HOOK_CODES,
    }
    recomputation._require_names(codes)
    for name in ("checkpoint", "pack_hook", "unpack_hook", "_checkpoint_without_reentrant_generator"):
        with pytest.raises(AssertionError, match=f"{name} of torch.utils.checkpoint has no variable"):
            recomputation._require_names(codes | {name: (lambda x: x).__code__})
        with pytest.raises(AssertionError, match=f"{name} of torch.utils.checkpoint has no variable"):
            recomputation._require_names({key: code for key, code in codes.items() if key != name})


class Scaled(torch.nn.Module):
    """A layer that takes tensors by name, one of which needs a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = linear("current")

    def forward(self, value: Tensor, *, by: Tensor, plus: float = 0.0) -> Tensor:
        return self.layer(value) * by + plus


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_arguments_by_name_reach_the_function(use_reentrant: bool) -> None:
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
                    "tp_group": None,
                    "determinism_check": "none",
                }
                out = qs.checkpoint(module, value, use_reentrant=use_reentrant, **named)
            else:
                out = module(value, by=by, plus=2.0)
        module.zero_grad()
        out.square().sum().backward()
        found.append([out, value.grad, by.grad, module.layer.weight.grad])
    for plain, checkpointed in zip(*found, strict=True):
        assert torch.equal(plain, checkpointed)
