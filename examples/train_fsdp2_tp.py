"""A Llama-like language model of bytes under tensor parallelism, FSDP2 and data-parallel replicas, saved and resumed.

    torchrun --nproc-per-node 4 examples/train_fsdp2_tp.py --dp 2 --tp 2 --sequence-parallel

    tokens -> embedding (PyTorch's, cut over the vocabulary by parallelize_module)
           -> layers (quantshard's, cut by heads and features; quantized weights)
           -> normalization -> head (quantshard's, cut over the vocabulary; its weight is the embedding's)

The tied weight stays in high precision, and the head quantizes it in each forward. The logits stay cut over the
vocabulary, and so does the loss (`loss_parallel`). Activations are [sequence, batch, hidden].
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
    """Logits of the next byte. It is built on the meta device; `fill` gives it memory and values."""

    def __init__(self, recipe: str, tp: DeviceMesh | None, sequence_parallel: bool) -> None:
        super().__init__()
        common = {"params_dtype": DTYPE, "device": "meta", "tp_mesh": tp, "sequence_parallel": sequence_parallel}
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN, dtype=DTYPE, device="meta")
        if tp is not None:
            rows = Shard(0) if sequence_parallel else Replicate()  # of the activations
            parallelize_module(self.embedding, tp, RowwiseParallel(input_layouts=Replicate(), output_layouts=rows))
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
        """Tokens int64 [sequence, batch] -> this rank's part of the logits [sequence, batch, vocabulary]."""
        x, angles = self.embedding(tokens), self.rotary(len(tokens), device=tokens.device)
        for layer in self.layers:
            x = layer(x, rotary_pos_emb=angles)
        return self.head(self.norm(x))


def fill(model: Llama, device: str) -> None:
    """Memory and initial values, of this rank's part alone; the values are the same on any mesh."""
    model.to_empty(device=device)
    model.head.weight = model.embedding.weight  # to_empty parts tied tensors that are no DTensors
    for module in (*model.layers, model.norm, model.head):  # the head fills the weight that it shares
        module.reset_parameters()


def build(args: argparse.Namespace, mesh: DeviceMesh | None) -> tuple[Llama, qs.optimizers.FusedAdam]:
    """The model and its optimizer; without a mesh they are whole, in this process alone."""
    torch.manual_seed(0)
    model = Llama(args.recipe, None if mesh is None else mesh["tp"], args.sequence_parallel)
    if mesh is not None:
        data = mesh["dp_shard"] if mesh["dp_replicate"].size() == 1 else mesh["dp_replicate", "dp_shard"]
        for module in (*model.layers, model):
            fully_shard(module, mesh=data, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32))
    fill(model, "cuda" if torch.cuda.is_available() else "cpu")
    return model, qs.optimizers.FusedAdam(model.named_parameters(), lr=LEARNING_RATE, weight_decay=0.01)


def batch(text: Tensor, step: int, part: int, parts: int) -> tuple[Tensor, Tensor]:
    """One part of the global batch of a step: tokens, and the next ones, int64 [sequence, batch / parts]."""
    starts = torch.randint(len(text) - SEQUENCE, (BATCH,), generator=torch.Generator().manual_seed(step))
    windows = [text[start : start + SEQUENCE + 1] for start in starts.chunk(parts)[part].tolist()]
    tokens = torch.stack(windows, dim=1).long()
    return tokens[:-1], tokens[1:]


def train(
    model: Llama, optimizer: torch.optim.Optimizer, recipe: str, mesh: DeviceMesh, text: Tensor, steps: range
) -> list[float]:
    """The losses of the global batches."""
    tp, losses = mesh["tp"], []
    part, parts = dist.get_rank() // tp.size(), mesh.size() // tp.size()  # tp is the innermost axis
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
    """A checkpoint that any mesh can load."""
    in_model, in_optimizer = get_state_dict(model, optimizer)
    dcp.save({"model": in_model, "optimizer": in_optimizer}, checkpoint_id=folder / f"{step:06d}")


def load(folder: Path, model: Llama, optimizer: torch.optim.Optimizer) -> int:
    """Load the newest checkpoint, of whatever mesh; the number of steps behind it."""
    newest = max(path for path in folder.iterdir() if qs.checkpoints.is_complete(path))
    in_model, in_optimizer = get_state_dict(model, optimizer)
    dcp.load({"model": in_model, "optimizer": in_optimizer}, checkpoint_id=newest)
    set_state_dict(model, optimizer, model_state_dict=in_model, optim_state_dict=in_optimizer)
    return int(newest.name)


def whole(value: Tensor) -> Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def differences(model: Llama, alone: Llama, tp: DeviceMesh) -> list[str]:
    """Entries of the state dict, and weights as the GEMMs see them, that differ from those of one process."""
    recorded = ("_draws", "amax_history")  # by forward and backward, which `alone` does not run
    wanted = {name: value for name, value in alone.state_dict().items() if not name.endswith(recorded)}
    found = model.state_dict()
    wrong = [name for name in wanted if not torch.equal(whole(found[name]), wanted[name])]
    for layer, reference in zip(model.layers, alone.layers, strict=True):
        layer.unshard()
        for (name, param), value in zip(layer.named_parameters(), reference.parameters(), strict=True):
            piece = distribute_tensor(value.detach().dequantize(), tp, param.placements, src_data_rank=None)
            if not torch.equal(param.to_local().dequantize(), piece.to_local()):
                wrong.append(f"gathered {name}")
        layer.reshard()
    return wrong


def check(args: argparse.Namespace, mesh: DeviceMesh, text: Tensor) -> None:
    """Compare the bits of the model with those of one process that is given the same gradients; save, train on, and
    compare the losses with those of a resumed run; exit with 1 if anything differs."""
    (model, optimizer), (alone, its_optimizer) = build(args, mesh), build(args, None)
    wrong = differences(model, alone, mesh["tp"])

    def follow(*_: object) -> None:
        for param, reference in zip(model.parameters(), alone.parameters(), strict=True):
            reference.grad = whole(param.grad)
        its_optimizer.step()

    hook = optimizer.register_step_pre_hook(follow)
    train(model, optimizer, args.recipe, mesh, text, range(args.steps))
    hook.remove()
    wrong += differences(model, alone, mesh["tp"])
    save(args.checkpoint, model, optimizer, args.steps)
    after = range(args.steps, 2 * args.steps)
    losses = train(model, optimizer, args.recipe, mesh, text, after)
    model, optimizer = build(args, mesh)
    load(args.checkpoint, model, optimizer)
    if train(model, optimizer, args.recipe, mesh, text, after) != losses:
        wrong.append("the losses of the resumed run")
    if wrong:
        raise SystemExit(f"rank {dist.get_rank()}: differs: {', '.join(wrong)}")
    print(f"rank {dist.get_rank()}: every bit agrees\n", end="")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="auto", help="auto, delayed, current, block, rowwise, mxfp8, nvfp4 or bf16")
    parser.add_argument("--replicate", type=int, default=1, help="copies of the sharded model (HSDP)")
    parser.add_argument("--dp", type=int, default=1, help="ranks that FSDP2 shards a copy over")
    parser.add_argument("--tp", type=int, default=1, help="ranks of tensor parallelism")
    parser.add_argument("--sequence-parallel", action="store_true", help="cut activations along the sequence")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--checkpoint", type=Path, default=Path("checkpoints"), help="folder to save to")
    parser.add_argument("--resume", action="store_true", help="begin with the newest checkpoint there")
    parser.add_argument("--check", action="store_true", help="first compare bits; see `check`")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group()
    axes = {"dp_replicate": args.replicate, "dp_shard": args.dp, "tp": args.tp}
    mesh = init_device_mesh(device, tuple(axes.values()), mesh_dim_names=tuple(axes))
    library = sorted(Path(os.__file__).parent.glob("*.py"))  # the text: Python's own
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
