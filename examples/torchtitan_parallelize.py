"""Train torchtitan's Llama 3 with quantized weights, in three ways.

torchtitan's trainer and configuration, from the command line (needs GPUs):

    torchrun --nproc-per-node 8 -m torchtitan.train --module llama3 --config llama3_debugmodel \\
        --parallelism.spmd_backend partial_dtensor --override.imports \\
        'quantshard.integrations.torchtitan.linear' quantshard.integrations.torchtitan.optimizer

torchtitan's trainer and the configuration below, `quantized_debugmodel` (needs GPUs; run it in this folder):

    torchrun --nproc-per-node 8 -m torchtitan.train --module torchtitan_parallelize --config quantized_debugmodel

torchtitan's model and optimizers in your own loop under FSDP2, also on CPUs:

    torchrun --nproc-per-node 2 examples/torchtitan_parallelize.py
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional as F
from torchtitan.components.optimizer import default_adamw
from torchtitan.models.common.attention import FlexAttention, ScaledDotProductAttention
from torchtitan.models.llama3 import model_registry
from torchtitan.models.llama3.config_registry import llama3_debugmodel
from torchtitan.trainer import Trainer

from quantshard.integrations.torchtitan import TitanConverter, TitanOptimizers, optimizer

LAYERS, SEQUENCE, BATCH = 2, 32, 4


def quantized_debugmodel() -> Trainer.Config:
    """Configure torchtitan's debug model with linear layers in MXFP8 and FusedAdam instead of AdamW."""
    config = llama3_debugmodel()
    config.model_spec = model_registry("debugmodel", converters=[TitanConverter.Config()])
    config.optimizer = optimizer(config.optimizer)
    config.parallelism.spmd_backend = "partial_dtensor"
    return config


def build(recipe: str, mesh: DeviceMesh) -> tuple[nn.Module, TitanOptimizers]:
    """Build two layers on the meta device, convert and shard them; each rank initializes its shards."""
    config = model_registry("debugmodel", converters=[TitanConverter.Config(recipe=recipe)]).model
    config.layers = config.layers[:LAYERS]
    for _, _, parent, attribute in list(config.traverse(FlexAttention.Config)):
        # FlexAttention would be compiled
        setattr(parent, attribute, ScaledDotProductAttention.Config())
    with torch.device("meta"):
        model = config.build()
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
    for module in (*model.layers.values(), model):
        fully_shard(module, mesh=mesh, mp_policy=policy)
    model.to_empty(device=mesh.device_type)
    with torch.no_grad():
        model.init_weights()
    return model, optimizer(default_adamw(lr=3e-3)).build(model_parts=[model])


def train(recipe: str, mesh: DeviceMesh, steps: int) -> tuple[list[float], nn.Module, TitanOptimizers]:
    """Train on one batch of random tokens, and return this rank's losses."""
    # every rank draws the same keys for its weights
    torch.manual_seed(0)
    model, optimizers = build(recipe, mesh)
    generator = torch.Generator().manual_seed(mesh.get_rank())
    text = torch.randint(2048, (BATCH, SEQUENCE + 1), generator=generator).to(mesh.device_type)
    losses = []
    for _ in range(steps):
        loss = F.cross_entropy(model(text[:, :-1]).flatten(0, 1).float(), text[:, 1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizers.step()
        optimizers.zero_grad()
        losses.append(loss.item())
    return losses, model, optimizers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--recipe", default="auto")
    parser.add_argument("--steps", type=int, default=10)
    options = parser.parse_args()
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    if kind == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    mesh = init_device_mesh(kind, (int(os.environ["WORLD_SIZE"]),), mesh_dim_names=("fsdp",))
    losses, _, _ = train(options.recipe, mesh, options.steps)
    print(f"rank {mesh.get_rank()}: loss {losses[0]:.3f} -> {losses[-1]:.3f}\n", end="")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
