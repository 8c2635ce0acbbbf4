"""Train a network with quantized weights by Lightning's Trainer under FSDP2; save and resume.

    python examples/lightning_fsdp2.py --devices 2                              # Lightning starts the processes
    torchrun --nproc-per-node 2 examples/lightning_fsdp2.py --devices 2         # torchrun does

The network predicts a byte of Python's standard library from the eight bytes before.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import lightning
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from quantshard.integrations.lightning import TrainerStrategy, convert_and_shard
from quantshard.optimizers import FusedAdam

CONTEXT, WIDTH, LAYERS = 8, 256, 3


class Network(nn.Module):
    """Residual layers on the embeddings of the context."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, WIDTH // CONTEXT)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))
            for _ in range(LAYERS)
        )
        self.head = nn.Linear(WIDTH, 256)

    def forward(self, text: Tensor) -> Tensor:
        """Compute logits of the next byte [batch, 256] from int64 bytes [batch, context]."""
        x = self.embedding(text).flatten(1)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


class NextByte(lightning.LightningModule):
    """An ordinary module, except for `configure_model` and the optimizer."""

    def __init__(self, recipe: str) -> None:
        super().__init__()
        self.network, self.recipe, self.losses = Network(), recipe, list[float]()

    def configure_model(self) -> None:
        convert_and_shard(self.network, self.device_mesh, self.recipe)

    def configure_optimizers(self) -> FusedAdam:
        return FusedAdam(self.named_parameters(), lr=1e-3, weight_decay=0.01)

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        loss = F.cross_entropy(self.network(batch[0]).float(), batch[1])
        self.losses.append(loss.item())
        return loss


def train(recipe: str, devices: int, steps: int, folder: Path, resume: Path | None = None) -> NextByte:
    """Train for `steps` steps, save in `folder`, and return the module."""
    content = b"".join(path.read_bytes() for path in sorted(Path(argparse.__file__).parent.glob("a*.py")))
    text = torch.frombuffer(bytearray(content), dtype=torch.uint8).long()
    windows = text[: len(text) // (CONTEXT + 1) * (CONTEXT + 1)].view(-1, CONTEXT + 1)
    data = DataLoader(TensorDataset(windows[:, :-1], windows[:, -1]), batch_size=64)
    # every rank builds the same network
    torch.manual_seed(0)
    module = NextByte(recipe)
    strategy = TrainerStrategy(data_parallel_size=devices, tensor_parallel_size=1)
    trainer = lightning.Trainer(
        accelerator="auto", devices=devices, strategy=strategy, precision="bf16-true", max_steps=steps,
        gradient_clip_val=1.0, default_root_dir=folder, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, data, ckpt_path=resume, weights_only=True)
    trainer.save_checkpoint(folder / f"step-{trainer.global_step}")
    trainer.print(f"steps to {trainer.global_step}: loss {module.losses[0]:.3f} -> {module.losses[-1]:.3f}")
    return module


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--recipe", default="auto")
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--folder", type=Path, default=Path("lightning-checkpoints"))
    options = parser.parse_args()
    train(options.recipe, options.devices, options.steps, options.folder)
    more = options.steps + 5
    train(options.recipe, options.devices, more, options.folder, resume=options.folder / f"step-{options.steps}")


if __name__ == "__main__":
    main()
