"""Measure saving and loading on this machine, beside plain DCP of the same tensors as BF16, in one run.

    python benchmarks/checkpoints.py [--gigabytes 0.25] [--recipe mxfp8] [--ranks 2] [--folder DIR] [--json FILE]

Each of `--ranks` processes on the CPU holds its FSDP2 part of a stack of 2048 x 2048 layers: quantized weights, float32
masters, FP8 moments, `--gigabytes` in all. Rates are bytes on disk by seconds; every way makes its files durable. What
is loaded has just been written, so it comes from the page cache. Ours is verified as it is restored: every byte is read
twice. The stall is how long `save` held the training loop, in its second call: in the first one memory for the copy is
allocated, and a process of its own is started. Peak memory is of a whole process, so far.
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
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import quantshard as qs
from quantshard.checkpoints import Manager
from quantshard.optimizers import FusedAdam

WIDTH = 2048
BYTES_PER_ELEMENT = 7.1  # a code, a master, two moments, and scales


def peak() -> int:
    """The most memory that this process has had so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def build(recipe: str, layers: int) -> tuple[nn.Module, FusedAdam]:
    with qs.quantized_model_init(recipe=recipe):
        kind = [qs.Linear(WIDTH, WIDTH, bias=False, params_dtype=torch.bfloat16, device="meta") for _ in range(layers)]
        model = nn.Sequential(*kind)
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    model.to_empty(device="cpu")
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
            local = torch.ones(rows, WIDTH, dtype=torch.bfloat16)
            state[f"{name}.{what}"] = DTensor.from_local(local, param.device_mesh, param.placements)
    return state


def seconds(action: Callable[[], Any]) -> float:
    dist.barrier()
    began = time.perf_counter()
    action()
    dist.barrier()
    return time.perf_counter() - began


def size_of(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def plain(folder: Path, model: nn.Module) -> dict[str, float]:
    state = as_bf16(model)
    save = seconds(lambda: dcp.save(state, checkpoint_id=folder))
    load = seconds(lambda: dcp.load(state, checkpoint_id=folder))
    return {"bytes": size_of(folder), "save": save, "load": load, "stall": save, "peak": peak()}


def managed(folder: Path, model: nn.Module, optimizer: FusedAdam, mode: str | None) -> dict[str, float]:
    with Manager(folder, async_=mode) as manager:
        reports = []
        whole = 0.0
        for step in (1, 2):
            whole = seconds(lambda step=step: reports.append((manager.save(step, model, optimizer), manager.wait())))
        load = seconds(lambda: manager.restore(model, optimizer))
        result = {"bytes": size_of(Path(manager.path(2))), "save": whole, "load": load, "peak": peak()}
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder)
    return result | {"stall": reports[1][0].held_seconds}


def measure(rank: int, options: argparse.Namespace, folder: str, results: Any) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(options.ranks))
    torch.set_num_threads(1)
    torch.manual_seed(0)
    logging.getLogger("torch.distributed.checkpoint").setLevel(logging.WARNING)
    store = dist.FileStore(f"{folder}/store", options.ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=options.ranks)
    layers = max(1, round(options.gigabytes * 1e9 / (BYTES_PER_ELEMENT * WIDTH * WIDTH)))
    model, optimizer = build(options.recipe, layers)
    built = peak()
    ours: dict[str | None, dict[str, float]] = {}
    for mode in (None, "thread", "process"):
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
        f"{options.ranks} processes, {result['layers']} layers of {WIDTH} x {WIDTH}, {options.recipe}, torch "
        f"{torch.__version__}",
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
