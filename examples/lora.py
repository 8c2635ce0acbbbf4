"""Low-rank adapters (LoRA, Hu et al., 2021, arXiv:2106.09685) over frozen quantized weights, under FSDP2.

The base model has no masters, moments, gradients or high-precision copy, so it takes the memory of its codes.

    torchrun --nproc-per-node 2 examples/lora.py
"""

from __future__ import annotations

import os
from functools import partial

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import quantshard as qs

FEATURES, LAYERS, RANK, SCALE = 96, 3, 8, 2.0


class LoRALinear(nn.Module):
    """Computes base(x) + SCALE * up(down(x)). `base` is frozen, and `up` is zero at first."""

    def __init__(self, base: qs.Linear, dtype: torch.dtype) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        device = base.weight.device
        self.down = nn.Linear(base.in_features, RANK, bias=False, dtype=dtype, device=device)
        self.up = nn.Linear(RANK, base.out_features, bias=False, dtype=dtype, device=device)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + SCALE * self.up(self.down(x))


def build(recipe: str | qs.recipe.Recipe, dtype: torch.dtype = torch.bfloat16) -> nn.Sequential:
    """Build quantized layers with adapters of the same nominal dtype, because FSDP2 requires one dtype for a group."""
    torch.manual_seed(0)
    with qs.quantized_model_init(recipe=recipe):
        # for pretrained weights, call qs.checkpoints.load_high_precision afterwards
        init = partial(nn.init.normal_, std=FEATURES**-0.5)
        layers = [qs.Linear(FEATURES, FEATURES, init_method=init, params_dtype=dtype) for _ in range(LAYERS)]
    return nn.Sequential(*[LoRALinear(layer, dtype) for layer in layers])


def shard(model: nn.Sequential, **options: object) -> nn.Sequential:
    """Shard one group per layer. Frozen and trained parameters can share a group."""
    for layer in model:
        fully_shard(layer, **options)
    return fully_shard(model, **options)


def optimizer_of(model: nn.Module) -> qs.optimizers.FusedAdam:
    """Build an optimizer of the adapters."""
    trained = [(name, param) for name, param in model.named_parameters() if param.requires_grad]
    return qs.optimizers.FusedAdam(trained, lr=1e-2)


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, recipe: str | qs.recipe.Recipe, steps: range
) -> list[float]:
    """Train the model to copy the first feature of its input, and return this rank's losses."""
    losses = []
    device = next(model.parameters()).device
    for step in steps:
        generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
        x = torch.randn(32, FEATURES, generator=generator).bfloat16().to(device)
        with qs.autocast(recipe=recipe):
            loss = (model(x) - x)[:, 0].float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def adapters(model: nn.Module) -> dict[str, Tensor]:
    """Return the trained part of the state dict."""
    return {key: value for key, value in model.state_dict().items() if ".base." not in key}


def main(recipe: str = "auto", path: str = "adapters") -> list[float]:
    """Train adapters, save only them, load them into a new model, and continue."""
    model = shard(build(recipe))
    losses = train(model, optimizer_of(model), recipe, range(20))
    dcp.save(adapters(model), checkpoint_id=path)

    fresh = shard(build(recipe))
    state = adapters(fresh)
    dcp.load(state, checkpoint_id=path)
    fresh.load_state_dict(state, strict=False)
    return losses + train(fresh, optimizer_of(fresh), recipe, range(20, 22))


if __name__ == "__main__":
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group()
    for index, value in enumerate(main()):
        if dist.get_rank() == 0:
            print(f"step {index} loss {value:.4f}")
    dist.destroy_process_group()
