"""Train a small Llama on bytes under tensor parallelism, FSDP2 and replicas (HSDP); save and resume.

    torchrun --nproc-per-node 4 examples/train_fsdp2_tp.py --dp 2 --tp 2 --sequence-parallel

    tokens -> embedding (PyTorch's, vocabulary sharded by parallelize_module)
           -> layers (quantshard's, heads and features sharded; quantized weights)
           -> normalization -> head (quantshard's, vocabulary sharded; tied to the embedding)

The tied weight stays in high precision, and the head quantizes it in each forward. The vocabulary of the logits stays
sharded, also in the loss (`loss_parallel`). Activations are [sequence, batch, hidden].
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import RowwiseParallel, loss_parallel, parallelize_module
from torch.nn import functional as F

import quantshard as qs

VOCABULARY, HIDDEN, FFN, HEADS, KV_HEADS, LAYERS = 256, 64, 160, 4, 2, 2
SEQUENCE, BATCH, LEARNING_RATE, DTYPE = 32, 8, 3e-3, torch.bfloat16


class Llama(nn.Module):
    """Predicts the next byte. Built on the meta device; `fill` allocates and initializes it."""

    def __init__(self, recipe: str, tp: DeviceMesh | None, sequence_parallel: bool) -> None:
        super().__init__()
        common = {"params_dtype": DTYPE, "device": "meta", "tp_mesh": tp, "sequence_parallel": sequence_parallel}
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN, dtype=DTYPE, device="meta")
        if tp is not None:
            layout = Shard(0) if sequence_parallel else Replicate()
            parallelize_module(self.embedding, tp, RowwiseParallel(input_layouts=Replicate(), output_layouts=layout))
        self.rotary = qs.RotaryPositionEmbedding(HIDDEN // HEADS)
        with qs.quantized_model_init(recipe=recipe):
            self.layers = nn.ModuleList(
                qs.TransformerLayer(
                    HIDDEN, FFN, HEADS, KV_HEADS, hidden_dropout=0.0, attention_dropout=0.0, bias=False,
                    activation="swiglu", normalization="RMSNorm", set_parallel_mode=True, **common,
                )
                for _ in range(LAYERS)
            )  # fmt: skip
        self.norm = qs.RMSNorm(HIDDEN, **common)
        with qs.quantized_model_init(enabled=False, recipe=recipe):
            self.head = qs.Linear(HIDDEN, VOCABULARY, bias=False, parallel_mode="column", **common)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Compute this rank's part of the logits [sequence, batch, vocabulary] of int64 tokens [sequence, batch]."""
        x, angles = self.embedding(tokens), self.rotary(len(tokens), device=tokens.device)
        for layer in self.layers:
            x = layer(x, rotary_pos_emb=angles)
        return self.head(self.norm(x))


def fill(model: Llama, device: str) -> None:
    """Allocate and initialize this rank's shards. The values are the same on any mesh."""
    model.to_empty(device=device)
    # to_empty unties plain tensors
    model.head.weight = model.embedding.weight
    # the head also initializes the embedding
    for module in (*model.layers, model.norm, model.head):
        module.reset_parameters()


def build(args: argparse.Namespace, mesh: DeviceMesh | None) -> tuple[Llama, qs.optimizers.FusedAdam]:
    """Build the model and its optimizer; without a mesh, unsharded in this process."""
    torch.manual_seed(0)
    model = Llama(args.recipe, None if mesh is None else mesh["tp"], args.sequence_parallel)
    if mesh is not None:
        data = mesh["dp_shard"] if mesh["dp_replicate"].size() == 1 else mesh["dp_replicate", "dp_shard"]
        for module in (*model.layers, model):
            fully_shard(module, mesh=data, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32))
    fill(model, "cuda" if torch.cuda.is_available() else "cpu")
    return model, qs.optimizers.FusedAdam(model.named_parameters(), lr=LEARNING_RATE, weight_decay=0.01)


def batch(text: Tensor, step: int, part: int, parts: int) -> tuple[Tensor, Tensor]:
    """Return tokens and targets, int64 [sequence, batch / parts], of one part of a step's global batch."""
    starts = torch.randint(len(text) - SEQUENCE, (BATCH,), generator=torch.Generator().manual_seed(step))
    windows = [text[start : start + SEQUENCE + 1] for start in starts.chunk(parts)[part].tolist()]
    tokens = torch.stack(windows, dim=1).long()
    return tokens[:-1], tokens[1:]


def train(
    model: Llama, optimizer: torch.optim.Optimizer, recipe: str, mesh: DeviceMesh, text: Tensor, steps: range
) -> list[float]:
    """Train, and return the mean loss of each global batch."""
    tp, losses = mesh["tp"], []
    # tp is the innermost axis
    part, parts = dist.get_rank() // tp.size(), mesh.size() // tp.size()
    for step in steps:
        tokens, targets = batch(text, step, part, parts)
        with qs.autocast(recipe=recipe):
            logits = DTensor.from_local(model(tokens), tp, [Shard(-1)])
        with loss_parallel():
            loss = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.full_tensor().detach() / dist.get_world_size()
        dist.all_reduce(mean)
        losses.append(mean.item())
    return losses


def save(folder: Path, model: Llama, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Write a checkpoint that any mesh can load."""
    model_state, optimizer_state = get_state_dict(model, optimizer)
    dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder / f"{step:06d}")


def load(folder: Path, model: Llama, optimizer: torch.optim.Optimizer) -> int:
    """Load the newest complete checkpoint, saved on any mesh, and return its step."""
    newest = max(path for path in folder.iterdir() if qs.checkpoints.is_complete(path))
    model_state, optimizer_state = get_state_dict(model, optimizer)
    dcp.load({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=newest)
    set_state_dict(model, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state)
    return int(newest.name)


def whole(value: Tensor) -> Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def differences(model: Llama, alone: Llama, tp: DeviceMesh) -> list[str]:
    """Name the entries of the state dict, and the gathered weights, that differ from the model of one process."""
    # forward and backward write these, and `alone` runs neither
    skipped = ("_draws", "amax_history")
    expected = {name: value for name, value in alone.state_dict().items() if not name.endswith(skipped)}
    state = model.state_dict()
    wrong = [name for name in expected if not torch.equal(whole(state[name]), expected[name])]
    for layer, reference in zip(model.layers, alone.layers, strict=True):
        layer.unshard()
        for (name, param), value in zip(layer.named_parameters(), reference.parameters(), strict=True):
            piece = distribute_tensor(value.detach().dequantize(), tp, param.placements, src_data_rank=None)
            if not torch.equal(param.to_local().dequantize(), piece.to_local()):
                wrong.append(f"gathered {name}")
        layer.reshard()
    return wrong


def check(args: argparse.Namespace, mesh: DeviceMesh, text: Tensor) -> None:
    """Exit with 1 unless training has the bits of one process with the same gradients, and a resumed run has the losses
    of an uninterrupted one."""
    (model, optimizer), (alone, alone_optimizer) = build(args, mesh), build(args, None)
    wrong = differences(model, alone, mesh["tp"])

    def follow(*_: object) -> None:
        for param, reference in zip(model.parameters(), alone.parameters(), strict=True):
            reference.grad = whole(param.grad)
        alone_optimizer.step()

    hook = optimizer.register_step_pre_hook(follow)
    train(model, optimizer, args.recipe, mesh, text, range(args.steps))
    hook.remove()
    wrong += differences(model, alone, mesh["tp"])
    save(args.checkpoint, model, optimizer, args.steps)
    more_steps = range(args.steps, 2 * args.steps)
    losses = train(model, optimizer, args.recipe, mesh, text, more_steps)
    model, optimizer = build(args, mesh)
    load(args.checkpoint, model, optimizer)
    if train(model, optimizer, args.recipe, mesh, text, more_steps) != losses:
        wrong.append("the losses of the resumed run")
    if wrong:
        raise SystemExit(f"rank {dist.get_rank()}: differs: {', '.join(wrong)}")
    print(f"rank {dist.get_rank()}: every bit agrees\n", end="")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="auto", help="auto, delayed, current, block, rowwise, mxfp8, nvfp4 or bf16")
    parser.add_argument("--replicate", type=int, default=1, help="replicas of the sharded model (HSDP)")
    parser.add_argument("--dp", type=int, default=1, help="ranks of FSDP2")
    parser.add_argument("--tp", type=int, default=1, help="ranks of tensor parallelism")
    parser.add_argument("--sequence-parallel", action="store_true", help="also shard activations along the sequence")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--checkpoint", type=Path, default=Path("checkpoints"), help="folder to save to")
    parser.add_argument("--resume", action="store_true", help="continue from its newest checkpoint")
    parser.add_argument("--check", action="store_true", help="first check that sharding and resuming change no bit")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group()
    axes = {"dp_replicate": args.replicate, "dp_shard": args.dp, "tp": args.tp}
    mesh = init_device_mesh(device, tuple(axes.values()), mesh_dim_names=tuple(axes))
    # the text: Python's standard library
    library = sorted(Path(os.__file__).parent.glob("*.py"))
    content = b"".join(path.read_bytes() for path in library)[: 1 << 20]
    text = torch.frombuffer(bytearray(content), dtype=torch.uint8).to(device)
    if args.check:
        check(args, mesh, text)
    model, optimizer = build(args, mesh)
    first = load(args.checkpoint, model, optimizer) if args.resume else 0
    for step, loss in enumerate(train(model, optimizer, args.recipe, mesh, text, range(first, first + args.steps))):
        if dist.get_rank() == 0:
            print(f"step {first + step} loss {loss:.6f}")
    save(args.checkpoint, model, optimizer, first + args.steps)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
