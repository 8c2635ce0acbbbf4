"""The mathematics of Adam, once: a pure function of gradient, master, moments and step."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Hyperparameters(NamedTuple):
    """Of one step. `step` counts from 1; `decoupled` chooses AdamW, else weight decay is added to the gradient (L2)."""

    step: int
    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    decoupled: bool
    bias_correction: bool


class Updated(NamedTuple):
    """What one step makes of a parameter: float32, of its shape."""

    master: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor


def adam(grad: Tensor, master: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, h: Hyperparameters) -> Updated:
    """One Adam step in float32; the arguments are not changed.

        m = b1 m + (1 - b1) g            v = b2 v + (1 - b2) g^2
        w = w - lr (m / c1 / (sqrt(v / c2) + eps) + wd w),   c = 1 - b^step

    Kingma and Ba, 2015; decoupled weight decay: Loshchilov and Hutter, 2019. The order of operations is
    TransformerEngine's (common/multi_tensor/adam.cu).
    """
    grad = grad.float()
    if not h.decoupled and h.weight_decay != 0:
        grad = grad + h.weight_decay * master
    exp_avg = h.beta1 * exp_avg + (1.0 - h.beta1) * grad
    exp_avg_sq = h.beta2 * exp_avg_sq + (1.0 - h.beta2) * grad * grad
    correction1 = 1.0 - h.beta1**h.step if h.bias_correction else 1.0
    correction2 = 1.0 - h.beta2**h.step if h.bias_correction else 1.0
    update = (exp_avg / correction1) / (torch.sqrt(exp_avg_sq / correction2) + h.eps)
    if h.decoupled and h.weight_decay != 0:
        update = update + h.weight_decay * master
    return Updated(master - h.lr * update, exp_avg, exp_avg_sq)
