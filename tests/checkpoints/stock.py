"""Stock optimizers, and some of a user's own, by name: for tests that save and load their states."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from quantshard.optimizers import MasterWeights


class InFloat32(Optimizer):
    """Its momentum is kept in float32 whatever the parameter is, and a second one from the third step on."""

    def __init__(self, params: Iterable[Any]) -> None:
        super().__init__(params, {"lr": 0.05})
        self.steps: list[int] = []

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        self.steps.append(len(self.state))
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                momentum = state.setdefault("momentum", torch.zeros_like(param, dtype=torch.float32))
                state["updates"] = state.get("updates", 0) + 1
                momentum.mul_(0.9).add_(param.grad)
                if state["updates"] > 1:
                    state.setdefault("slow", torch.zeros_like(momentum)).lerp_(momentum, 0.1)
                param.add_(momentum.to(param.dtype), alpha=-group["lr"])


class Rows(Optimizer):
    """Its state is one number for a row, of another shape than the parameter and cut where that is."""

    def __init__(self, params: Iterable[Any]) -> None:
        super().__init__(params, {"lr": 0.05})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                squares = param.grad.square()
                squares = squares.mean(1, keepdim=True) if param.ndim == 2 else squares
                state = self.state[param]
                state["squares"] = squares if "squares" not in state else torch.lerp(state["squares"], squares, 0.1)
                change = param.grad / (state["squares"].sqrt() + 1e-6)
                if isinstance(param, DTensor):  # from torch 2.14 on the states of a single row are on every rank
                    change = change.redistribute(placements=param.placements)
                param.add_(change, alpha=-group["lr"])


def _on_masters(kind: type[Optimizer], **options: Any) -> Callable[[Any], Optimizer]:
    return lambda params: MasterWeights(kind, params, **options)


KINDS: dict[str, Callable[[Any], Optimizer]] = {
    "AdamW": lambda params: torch.optim.AdamW(params, lr=1e-2, weight_decay=0.1),
    "AdamW foreach": lambda params: torch.optim.AdamW(params, lr=1e-2, amsgrad=True, foreach=True),
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "SGD plain": lambda params: torch.optim.SGD(params, lr=0.1),
    "NAdam": lambda params: torch.optim.NAdam(params, lr=1e-2),
    "Adagrad": lambda params: torch.optim.Adagrad(params, lr=1e-2),
    "in float32": InFloat32,
    "rows": Rows,
    "masters, AdamW": _on_masters(torch.optim.AdamW, lr=1e-2),
    "masters, SGD": _on_masters(torch.optim.SGD, lr=0.1, momentum=0.9),
}


def make(kind: str, model: nn.Module) -> Optimizer:
    return KINDS[kind](model.named_parameters())
