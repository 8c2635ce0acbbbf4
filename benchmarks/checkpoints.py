"""Measure saving and loading on this machine, beside plain DCP of the same tensors as BF16, in one run.

    python benchmarks/checkpoints.py [--gigabytes 0.25] [--recipe mxfp8] [--ranks 2] [--device cpu] [--folder DIR]
                                     [--json FILE]

Each of `--ranks` processes, on the CPU or on a GPU of its own, holds its FSDP2 part of a stack of 2048 x 2048 layers:
quantized weights, float32 masters, FP8 moments, `--gigabytes` in all. Rates are bytes on disk by seconds; every way
makes its files durable. What is loaded has just been written, so it comes from the page cache. Ours is verified as it
is restored: every byte is read twice. The stall is how long `save` held the training loop, in its second call: in the
first one memory for the copy is allocated. During that first call every weight and state is changed, and what is
restored must be the state at the call, bit for bit. Peak memory is of a whole process, so far, without that of a GPU.
"""

from __future__ import annotations

import argparse
import json
import logging
import multiprocessing
import os
import resource
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from xxhash import xxh3_128_hexdigest

import quantshard as qs
from quantshard import private_torch
from quantshard.checkpoints import Manager
from quantshard.optimizers import FusedAdam

WIDTH = 2048
BYTES_PER_ELEMENT = 7.1  # a code, a master, two moments, and scales


def peak() -> int:
    """The most memory that this process has had so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def build(recipe: str, layers: int, device: str) -> tuple[nn.Module, FusedAdam]:
    with qs.quantized_model_init(recipe=recipe):
        kind = [qs.Linear(WIDTH, WIDTH, bias=False, params_dtype=torch.bfloat16, device="meta") for _ in range(layers)]
        model = nn.Sequential(*kind)
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.to_empty(device=device)
    for layer in model:
        layer.reset_parameters()
    moments = {"exp_avg_dtype": torch.uint8, "exp_avg_sq_dtype": torch.uint8}
    return model, FusedAdam(model.named_parameters(), lr=1e-3, **moments)


def as_bf16(model: nn.Module) -> dict[str, Any]:
    """Each weight, its master and its moments as BF16 DTensors."""
    state: dict[str, Any] = {}
    for name, param in model.named_parameters():
        assert isinstance(param, DTensor)
        rows = WIDTH // dist.get_world_size()
        for what in ("weight", "master", "exp_avg", "exp_avg_sq"):
            local = torch.ones(rows, WIDTH, dtype=torch.bfloat16, device=param.device)
            state[f"{name}.{what}"] = DTensor.from_local(local, param.device_mesh, param.placements)
    return state


def seconds(action: Callable[[], Any]) -> float:
    dist.barrier()
    began = time.perf_counter()
    action()
    dist.barrier()
    return time.perf_counter() - began


def bits(model: nn.Module, optimizer: FusedAdam) -> dict[str, str]:
    """Checksums of what this rank holds."""
    tensors = dict(model.state_dict())
    for index, entries in optimizer.state_dict()["state"].items():
        tensors |= {f"{index}.{name}": value for name, value in entries.items()}
    local = {name: private_torch.local_tensor(value).cpu().contiguous() for name, value in tensors.items()}
    return {name: xxh3_128_hexdigest(t.reshape(-1).view(torch.uint8).numpy()) for name, t in local.items()}


def change(model: nn.Module, optimizer: FusedAdam) -> None:
    """One step with gradients of 1."""
    for param in model.parameters():
        param.grad = torch.ones_like(param, dtype=torch.bfloat16)
    optimizer.step()
    optimizer.zero_grad()


def size_of(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def plain(folder: Path, model: nn.Module) -> dict[str, float]:
    state = as_bf16(model)
    save = seconds(lambda: dcp.save(state, checkpoint_id=folder))
    load = seconds(lambda: dcp.load(state, checkpoint_id=folder))
    return {"bytes": size_of(folder), "save": save, "load": load, "stall": save, "peak": peak()}


def managed(folder: Path, model: nn.Module, optimizer: FusedAdam, mode: str | None) -> dict[str, float]:
    with Manager(folder, async_=mode) as manager:
        held = bits(model, optimizer)
        manager.save(1, model, optimizer)
        change(model, optimizer)
        assert not held.items() <= bits(model, optimizer).items()
        manager.restore(model, optimizer)
        assert held == bits(model, optimizer), f"{mode}: what is restored is not the state at the call"
        reports = []
        save = seconds(lambda: reports.append((manager.save(2, model, optimizer), manager.wait())))
        load = seconds(lambda: manager.restore(model, optimizer))
        result = {"bytes": size_of(Path(manager.path(2))), "save": save, "load": load, "peak": peak()}
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder)
    return result | {"stall": reports[0][0].held_seconds}


def measure(rank: int, options: argparse.Namespace, folder: str, results: Any) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(options.ranks))
    torch.set_num_threads(1)
    torch.manual_seed(0)
    logging.getLogger("torch.distributed.checkpoint").setLevel(logging.WARNING)
    store = dist.FileStore(f"{folder}/store", options.ranks)
    backend = "gloo"
    if options.device == "cuda":
        torch.cuda.set_device(rank)
        backend = "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, store=store, rank=rank, world_size=options.ranks)
    layers = max(1, round(options.gigabytes * 1e9 / (BYTES_PER_ELEMENT * WIDTH * WIDTH)))
    model, optimizer = build(options.recipe, layers, options.device)
    change(model, optimizer)  # its states are made, and moments are not zero
    built = peak()
    ours: dict[str | None, dict[str, float]] = {}
    for mode in (None, "thread"):
        ours[mode] = managed(Path(folder, str(mode)), model, optimizer, mode)
    found = {f"ours, {mode or 'sync'}": row for mode, row in ours.items()}
    found = {"plain DCP, BF16": plain(Path(folder, "plain"), model)} | found
    peaks: list[Any] = [None] * options.ranks
    dist.all_gather_object(peaks, {"built": built, **{name: row["peak"] for name, row in found.items()}})
    if rank == 0:
        results.put({"layers": layers, "found": found, "peaks": peaks})
    dist.destroy_process_group()


def table(result: dict[str, Any], options: argparse.Namespace) -> list[str]:
    base = result["found"]["plain DCP, BF16"]
    lines = [
        f"{options.ranks} processes, {result['layers']} layers of {WIDTH} x {WIDTH}, {options.recipe}, on "
        f"{torch.cuda.get_device_name() if options.device == 'cuda' else 'the CPU'}, torch {torch.__version__}",
        "",
        "| way | GB on disk | of plain | save, GB/s | s | of plain | load, GB/s | s | of plain | stall, s |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name, row in result["found"].items():
        cells = [f"{row['bytes'] / 1e9:.3f}", f"{row['bytes'] / base['bytes']:.2f}"]
        for what in ("save", "load"):
            rate = row["bytes"] / 1e9 / row[what]
            cells += [f"{rate:.2f}", f"{row[what]:.2f}", f"{row[what] / base[what]:.2f}"]
        lines.append(f"| {name} | {' | '.join(cells)} | {row['stall']:.3f} |")
    for rank, peaks in enumerate(result["peaks"]):
        said = ", ".join(f"{name} {value / 1e9:.2f}" for name, value in peaks.items())
        lines.append(f"\npeak memory of process {rank} in GB, after: {said}")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--gigabytes", type=float, default=0.25, help="of the checkpoint, roughly")
    parser.add_argument("--recipe", default="mxfp8")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--folder", help="where to write; default: a temporary folder")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    options = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        arguments = (options, folder, results)
        processes = [context.Process(target=measure, args=(rank, *arguments)) for rank in range(options.ranks)]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        if any(process.exitcode for process in processes):
            raise SystemExit("a process failed")
    result = results.get()
    print("\n".join(table(result, options)))
    if options.json:
        options.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
