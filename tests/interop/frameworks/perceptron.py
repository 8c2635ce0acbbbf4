"""What the tests of frameworks train: a small network, its batches, and a plain FSDP2 loop to compare losses with."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

from quantshard.tensor import components
from tests.distributed.models import bits

FEATURES, CLASSES, LAYERS = 48, 5, 2
QUANTIZED = 2 * LAYERS
STEPS, MORE = 5, 2
"""Before and after a checkpoint."""


class Perceptron(nn.Module):
    """Residual layers of two `nn.Linear`s each, which `convert` quantizes, and a head, which it leaves."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(FEATURES, 80), nn.GELU(), nn.Linear(80, FEATURES)) for _ in range(LAYERS)
        )
        self.norm = nn.LayerNorm(FEATURES)
        self.head = nn.Linear(FEATURES, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return self.head(self.norm(x))


def batches(first: int, last: int) -> list[tuple[Tensor, Tensor]]:
    """This rank's from one number to another; two in turn."""
    generator = torch.Generator().manual_seed(1 + dist.get_rank())
    two = [
        (torch.randn(6, FEATURES, generator=generator), torch.randint(CLASSES, (6,), generator=generator))
        for _ in range(2)
    ]
    return [two[number % 2] for number in range(first, last)]


def loss_of(out: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(out.float(), target)


def quantized(model: nn.Module) -> dict[str, Tensor]:
    """The quantized weights."""
    return {name: each for name, each in model.named_parameters() if components.quantized_local(each) is not None}


def quantized_bits(model: nn.Module) -> dict[str, str]:
    """Of the quantized weights alone, whole."""
    names = quantized(model)
    return {name: value for name, value in bits(model).items() if name in names}


def changed(before: dict[str, str], model: nn.Module) -> int:
    """How many quantized weights are not as they were."""
    return sum(before[name] != value for name, value in quantized_bits(model).items())


def in_optimizer(model: nn.Module, optimizer: Optimizer) -> int:
    """How many of a model's quantized weights its optimizer holds."""
    known = {id(param) for group in optimizer.param_groups for param in group["params"]}
    return sum(id(param) in known for param in quantized(model).values())
