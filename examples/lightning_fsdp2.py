"""Lightning's Trainer over a network of quantized weights, sharded by FSDP2; it saves, and goes on from what it saved.

    python examples/lightning_fsdp2.py --devices 2                              # Lightning starts the processes
    torchrun --nproc-per-node 2 examples/lightning_fsdp2.py --devices 2         # torchrun does

The network predicts the next byte of Python's own library from the eight before it.
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
    """Residual layers over the embeddings of the context."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, WIDTH // CONTEXT)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))
            for _ in range(LAYERS)
        )
        self.head = nn.Linear(WIDTH, 256)

    def forward(self, text: Tensor) -> Tensor:
        """Bytes int64 [batch, context] -> logits of the next one [batch, 256]."""
        x = self.embedding(text).flatten(1)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


class NextByte(lightning.LightningModule):
    """Nothing in here but `configure_model` and the optimizer knows of quantized weights."""

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
    """The module after `steps` steps, which it has saved in `folder`."""
    content = b"".join(path.read_bytes() for path in sorted(Path(argparse.__file__).parent.glob("a*.py")))
    text = torch.frombuffer(bytearray(content), dtype=torch.uint8).long()
    windows = text[: len(text) // (CONTEXT + 1) * (CONTEXT + 1)].view(-1, CONTEXT + 1)
    data = DataLoader(TensorDataset(windows[:, :-1], windows[:, -1]), batch_size=64)
    torch.manual_seed(0)  # every rank builds the same network
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
