"""Measure saving and loading checkpoints on this machine, against plain DCP of the same tensors in BF16.

    python benchmarks/checkpoints.py [--gigabytes 0.25] [--recipe mxfp8] [--ranks 2] [--device cpu] [--folder DIR]
                                     [--json FILE]

Each rank, on the CPU or on its own GPU, has its FSDP2 shard of a stack of 2048 x 2048 layers with quantized weights,
float32 masters and FP8 moments, about `--gigabytes` in total. Rows: plain DCP, then quantshard's Manager saving
synchronously and in a thread. Rates are bytes on disk per second; every save is durable. Loads come from
the page cache, and quantshard reads each byte twice, because it verifies checksums.

"stall" is how long `save` blocked the training loop, in its second call: the first one allocates the staging memory.
A step during the first save changes all weights and states, and the restored state must have the
bits of the call. "peak memory" is host memory of the whole process so far.
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
from benchmarks.harness import device_name, make_parser, table_head, table_row
from quantshard import private_torch
from quantshard.checkpoints import Manager
from quantshard.optimizers import FusedAdam

WIDTH = 2048
BYTES_PER_ELEMENT = 7.1  # code, master, two moments, and scales
PLAIN = "plain DCP, BF16"
COLUMNS = (
    "way", "GB on disk", "of plain", "save, GB/s", "s", "of plain", "load, GB/s", "s", "of plain", "stall, s"
)  # fmt: skip


def peak_memory() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def build(recipe: str, layers: int, device: str) -> tuple[nn.Module, FusedAdam]:
    with qs.quantized_model_init(recipe=recipe):
        model = nn.Sequential(*(
            qs.Linear(WIDTH, WIDTH, bias=False, params_dtype=torch.bfloat16, device="meta") for _ in range(layers)
        ))  # fmt: skip
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    for module in (*model, model):
        fully_shard(module, mesh=mesh)
    model.to_empty(device=device)
    for layer in model:
        layer.reset_parameters()
    moments = {"exp_avg_dtype": torch.uint8, "exp_avg_sq_dtype": torch.uint8}
    return model, FusedAdam(model.named_parameters(), lr=1e-3, **moments)


def bf16_state(model: nn.Module) -> dict[str, DTensor]:
    """Return a BF16 DTensor for each weight, master and moment."""
    state = {}
    rows = WIDTH // dist.get_world_size()
    for name, param in model.named_parameters():
        assert isinstance(param, DTensor)
        for part in ("weight", "master", "exp_avg", "exp_avg_sq"):
            local = torch.ones(rows, WIDTH, dtype=torch.bfloat16, device=param.device)
            state[f"{name}.{part}"] = DTensor.from_local(local, param.device_mesh, param.placements)
    return state


def seconds(action: Callable[[], Any]) -> float:
    """Return the time until all ranks have finished an action."""
    dist.barrier()
    start = time.perf_counter()
    action()
    dist.barrier()
    return time.perf_counter() - start


def checksums(model: nn.Module, optimizer: FusedAdam) -> dict[str, str]:
    """Hash the local tensors of this rank."""
    tensors = dict(model.state_dict())
    for index, entries in optimizer.state_dict()["state"].items():
        tensors |= {f"{index}.{name}": value for name, value in entries.items()}
    local = {name: private_torch.local_tensor(value).cpu().contiguous() for name, value in tensors.items()}
    return {name: xxh3_128_hexdigest(t.reshape(-1).view(torch.uint8).numpy()) for name, t in local.items()}


def take_step(model: nn.Module, optimizer: FusedAdam) -> None:
    """Change all weights and states by a step with gradients of 1."""
    for param in model.parameters():
        param.grad = torch.ones_like(param, dtype=torch.bfloat16)
    optimizer.step()
    optimizer.zero_grad()


def folder_size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def measure_plain(folder: Path, model: nn.Module) -> dict[str, float]:
    state = bf16_state(model)
    save = seconds(lambda: dcp.save(state, checkpoint_id=folder))
    load = seconds(lambda: dcp.load(state, checkpoint_id=folder))
    return {"bytes": folder_size(folder), "save": save, "load": load, "stall": save, "peak": peak_memory()}


def measure_manager(folder: Path, model: nn.Module, optimizer: FusedAdam, mode: str | None) -> dict[str, float]:
    with Manager(folder, async_=mode) as manager:
        expected = checksums(model, optimizer)
        manager.save(1, model, optimizer)
        take_step(model, optimizer)
        assert not expected.items() <= checksums(model, optimizer).items()
        manager.restore(model, optimizer)
        assert expected == checksums(model, optimizer), f"{mode}: the restored state is not the one that was saved"
        reports = []
        save = seconds(lambda: reports.append((manager.save(2, model, optimizer), manager.wait())))
        load = seconds(lambda: manager.restore(model, optimizer))
        result = {"bytes": folder_size(Path(manager.path(2))), "save": save, "load": load, "peak": peak_memory()}
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder)
    return result | {"stall": reports[0][0].held_seconds}


def run_rank(rank: int, options: argparse.Namespace, folder: str, results: Any) -> None:
    """Measure on one rank; rank 0 puts the results and the peaks of all ranks into a queue."""
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
    take_step(model, optimizer)  # creates the states, with nonzero moments
    built = peak_memory()
    ours = {
        f"ours, {mode or 'sync'}": measure_manager(Path(folder, str(mode)), model, optimizer, mode)
        for mode in (None, "thread")
    }
    rows = {PLAIN: measure_plain(Path(folder, "plain"), model)} | ours
    peaks: list[Any] = [None] * options.ranks
    dist.all_gather_object(peaks, {"built": built, **{name: row["peak"] for name, row in rows.items()}})
    if rank == 0:
        results.put({"layers": layers, "rows": rows, "peaks": peaks})
    dist.destroy_process_group()


def print_table(result: dict[str, Any], options: argparse.Namespace) -> None:
    baseline = result["rows"][PLAIN]
    device = device_name(options.device) if options.device == "cuda" else "the CPU"
    print(f"{options.ranks} processes, {result['layers']} layers of {WIDTH} x {WIDTH}, {options.recipe}, ", end="")
    print(f"on {device}, torch {torch.__version__}\n\n{table_head(COLUMNS)}")
    for name, row in result["rows"].items():
        cells = [name, f"{row['bytes'] / 1e9:.3f}", f"{row['bytes'] / baseline['bytes']:.2f}"]
        for action in ("save", "load"):
            rate = row["bytes"] / 1e9 / row[action]
            cells += [f"{rate:.2f}", f"{row[action]:.2f}", f"{row[action] / baseline[action]:.2f}"]
        print(table_row([*cells, f"{row['stall']:.3f}"]))
    for rank, peaks in enumerate(result["peaks"]):
        gigabytes = ", ".join(f"{name} {value / 1e9:.2f}" for name, value in peaks.items())
        print(f"\npeak memory of process {rank} in GB, after: {gigabytes}")


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--gigabytes", type=float, default=0.25, help="approximate size of the checkpoint")
    parser.add_argument("--recipe", default="mxfp8")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--folder", help="where to write (default: a temporary folder)")
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    options = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        arguments = (options, folder, results)
        processes = [context.Process(target=run_rank, args=(rank, *arguments)) for rank in range(options.ranks)]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        if any(process.exitcode for process in processes):
            raise SystemExit("a process failed")
    result = results.get()
    print_table(result, options)
    if options.json:
        options.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
