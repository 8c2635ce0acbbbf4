"""Train a mixture-of-experts language model under expert parallelism and FSDP2.

Each token goes to 2 of 8 experts (Shazeer et al., 2017, arXiv:1701.06538), SwiGLU MLPs of quantized weights, with the
balance loss of Fedus et al. (2021, arXiv:2101.03961). Experts are distributed over the axis `ep` and sharded over `dp`;
everything else is sharded over all ranks. Run it in one process, or in one for each place of the mesh:

    python examples/moe.py
    torchrun --nproc-per-node 4 examples/moe.py --mesh dp=2,ep=2 --recipe nvfp4
"""

from __future__ import annotations

import argparse
import ast
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

import quantshard as qs

HIDDEN, FFN, LAYERS, HEADS = 64, 96, 2, 4
EXPERTS, CHOICES, BALANCE = 8, 2, 0.01
GLOBAL_BATCH, SEQUENCE, BYTES = 16, 32, 256
TEXT = Path(ast.__file__).read_bytes()


class Experts(nn.Module):
    """Computes down(silu(gate(x)) * up(x)) for the tokens of each expert. A separate module, for `fully_shard`."""

    def __init__(self, ep_mesh: DeviceMesh | None, **options: Any) -> None:
        super().__init__()
        options |= {"bias": False, "ep_mesh": ep_mesh}
        self.gate = qs.GroupedLinear(EXPERTS, HIDDEN, FFN, **options)
        self.up = qs.GroupedLinear(EXPERTS, HIDDEN, FFN, **options)
        self.down = qs.GroupedLinear(EXPERTS, FFN, HIDDEN, **options)

    def forward(self, tokens: Tensor, m_splits: list[int]) -> Tensor:
        return self.down(F.silu(self.gate(tokens, m_splits)) * self.up(tokens, m_splits), m_splits)


class MixtureOfExperts(nn.Module):
    """Routes each token to experts, and sums their outputs weighted by the router's probabilities.

    The router computes in high precision.
    """

    def __init__(self, ep_mesh: DeviceMesh | None, **options: Any) -> None:
        super().__init__()
        self.ep_mesh = ep_mesh
        with qs.quantized_model_init(enabled=False):
            self.router = qs.Linear(HIDDEN, EXPERTS, bias=False, **options)
        self.experts = Experts(ep_mesh, **options)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the output [batch, sequence, HIDDEN] and the balance loss."""
        tokens = x.flatten(0, 1)
        with qs.autocast(enabled=False):
            probabilities = self.router(tokens).float().softmax(-1)
        weights, experts = probabilities.topk(CHOICES)
        dispatched = qs.dispatch_tokens(tokens, experts, EXPERTS, self.ep_mesh)
        outputs = self.experts(dispatched.tokens, dispatched.m_splits)
        out = dispatched.combine(outputs, weights / weights.sum(-1, keepdim=True))
        return out.view_as(x), balance_loss(probabilities, experts)


def balance_loss(probabilities: Tensor, experts: Tensor) -> Tensor:
    """Compute the balance loss: 1 if the router spreads tokens and probabilities evenly, otherwise more.

    Tokens are counted over all ranks, so the mean over ranks is the loss of the global batch.
    """
    counts = torch.bincount(experts.flatten(), minlength=EXPERTS).float()
    if dist.is_initialized():
        dist.all_reduce(counts)
    return EXPERTS * (counts / counts.sum() * probabilities.mean(0)).sum()


class Layer(nn.Module):
    """Attention, then a mixture of experts, each with a normalization and a residual connection."""

    def __init__(self, number: int, ep_mesh: DeviceMesh | None, **options: Any) -> None:
        super().__init__()
        self.attention = qs.MultiheadAttention(
            HIDDEN, HEADS, attention_dropout=0.0, layer_number=number, attn_mask_type="causal", bias=False,
            input_layernorm=True, normalization="RMSNorm", qkv_format="bshd", **options,
        )  # fmt: skip
        self.norm = qs.RMSNorm(HIDDEN, **options)
        self.moe = MixtureOfExperts(ep_mesh, **options)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = x + self.attention(x)
        out, balance = self.moe(self.norm(x))
        return x + out, balance


class LanguageModel(nn.Module):
    """Predicts the next byte; also returns the mean balance loss of the layers."""

    def __init__(self, ep_mesh: DeviceMesh | None, recipe: str | qs.recipe.Recipe, device: torch.device) -> None:
        super().__init__()
        self.recipe = recipe
        self.bytes = nn.Embedding(BYTES, HIDDEN, device=device)
        self.positions = nn.Embedding(SEQUENCE, HIDDEN, device=device)
        with qs.quantized_model_init(recipe=recipe):
            self.layers = nn.ModuleList(Layer(number + 1, ep_mesh, device=device) for number in range(LAYERS))
        self.norm = qs.RMSNorm(HIDDEN, device=device)
        self.head = nn.Linear(HIDDEN, BYTES, bias=False, device=device)

    def forward(self, text: Tensor) -> tuple[Tensor, Tensor]:
        """Compute logits [batch, SEQUENCE, BYTES] of int64 bytes [batch, SEQUENCE], and the balance loss."""
        x = self.bytes(text) + self.positions.weight
        balances = []
        with qs.autocast(recipe=self.recipe):
            for layer in self.layers:
                x, balance = layer(x)
                balances.append(balance)
        return self.head(self.norm(x)), torch.stack(balances).mean()


def build(recipe: str | qs.recipe.Recipe, mesh: DeviceMesh | None, device: torch.device) -> LanguageModel:
    """Build the model, with the same values on any mesh. `mesh`: with axes dp and ep; None: one process."""
    torch.manual_seed(0)
    model = LanguageModel(None if mesh is None else mesh["ep"], recipe, device)
    if mesh is None:
        return model
    all_ranks = init_device_mesh(device.type, (mesh.size(),), mesh_dim_names=("all",))
    for layer in model.layers:
        # the gradients of experts are means over `ep` already
        fully_shard(layer.moe.experts, mesh=mesh["dp"])
        fully_shard(layer, mesh=all_ranks)
    return fully_shard(model, mesh=all_ranks)


def optimizer_of(model: nn.Module) -> qs.optimizers.FusedAdam:
    return qs.optimizers.FusedAdam(model.named_parameters(), lr=3e-3, weight_decay=0.01)


def batch(step: int, device: torch.device) -> Tensor:
    """Return this rank's part of a step's global batch, int64 [sequences, SEQUENCE + 1]."""
    generator = torch.Generator().manual_seed(step)
    starts = torch.randint(len(TEXT) - SEQUENCE, (GLOBAL_BATCH,), generator=generator)
    windows = torch.stack([torch.tensor(list(TEXT[start : start + SEQUENCE + 1])) for start in starts.tolist()])
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    return windows.chunk(ranks)[rank].to(device)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    """Train, and return the loss of each global batch, without the balance loss."""
    losses = []
    for step in steps:
        text = batch(step, next(model.parameters()).device)
        logits, balance = model(text[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())
        (loss + BALANCE * balance).backward()
        # PyTorch's function takes parameters of one mesh only
        qs.optimizers.clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach().double())
    total = torch.stack(losses)
    if dist.is_initialized():
        dist.all_reduce(total)
        total /= dist.get_world_size()
    return total.tolist()


def save(path: str | Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Write a checkpoint that loads on any mesh."""
    qs.checkpoints.save(path, model, optimizer)


def load(path: str | Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Load a checkpoint."""
    qs.checkpoints.load(path, model, optimizer)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mesh", help="sizes of the axes, e.g. dp=2,ep=2 (default: all ranks on ep)")
    parser.add_argument("--recipe", default="auto")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--save", help="folder for a checkpoint of the last step")
    options = parser.parse_args()
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    mesh, rank, ranks = None, 0, int(os.environ.get("WORLD_SIZE", "1"))
    if "LOCAL_RANK" in os.environ:
        if kind == "cuda":
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group()
        rank = dist.get_rank()
    axes = {"dp": 1, "ep": ranks}
    if options.mesh:
        axes = {name: int(size) for name, _, size in (axis.partition("=") for axis in options.mesh.split(","))}
    if sorted(axes) != ["dp", "ep"] or axes["dp"] * axes["ep"] != ranks:
        raise SystemExit(f"--mesh {options.mesh}: the product of dp and ep must be {ranks}, the number of processes")
    if dist.is_initialized():
        mesh = init_device_mesh(kind, (axes["dp"], axes["ep"]), mesh_dim_names=("dp", "ep"))
    device = torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)
    model = build(options.recipe, mesh, device)
    optimizer = optimizer_of(model)
    for first in range(0, options.steps, 10):
        losses = train(model, optimizer, range(first, min(first + 10, options.steps)))
        if rank == 0:
            print(f"step {first + len(losses)} loss {losses[-1]:.4f}", flush=True)
    if options.save:
        save(options.save, model, optimizer)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
