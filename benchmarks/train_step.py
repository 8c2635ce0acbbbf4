"""Measure whole training steps of Llama blocks (forward, backward, optimizer) on one GPU or under FSDP2 on several.

    python benchmarks/train_step.py [--gpus 1,2,4] [--shapes llama-1b,llama-3b,llama-8b] [--batches 4x2048,1x8192]
        [--arms 'bf16,torchao-*,ours-*-lean'] [--jsonl ROWS] [--minutes 8]

Each arm runs in its own processes, one per GPU (`ranks.py`). With --jsonl each row is appended to a file as soon as it
is measured, even if an arm failed. A later call with the same file skips these rows, so a few minutes of a
GPU at a time are enough; `--again bf16` measures a baseline again, on the GPU of that call.

All arms of a batch have the same weights, input and output gradient. BF16 and torchao compile each layer, as torchtitan
does, and use PyTorch's fused AdamW with BF16 states; torchao all-gathers FP8 where it can. quantshard uses `FusedAdam`
with the states of `training_arms.STATES`, eagerly or in another mode of `training_arms.MODES`.

Columns: "ms" is the median device time of consecutive steps; "host ms" the time to launch one on an idle device; "MFU"
is relative to an 8192 x 8192 x 8192 BF16 GEMM timed in the same process. "peak GiB" is the memory of tensors,
"reserved GiB" includes what the allocator keeps; both are the largest over the ranks. "collectives" and "MiB" count
calls and the bytes of their results; "exposed ms" is the time in which only NCCL's kernels run. "W", "MHz" and "J"
(energy per step) are of one GPU that steps without a pause. "of BF16" is the speed relative to BF16.
"""

from __future__ import annotations

import argparse
import datetime
import fnmatch
import json
import os
import re
import signal
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from benchmarks import harness, step_profile
from benchmarks.block_step import Shape
from benchmarks.harness import DEVICE, GIB, allocated_bytes, append_json, make_parser, matches, table_head, table_row
from benchmarks.ranks import OutOfTime, RankFailure, Ranks
from benchmarks.training_arms import ARMS, CAPTURED, NAMES, Arm, TrainingArm

SHAPES = {
    "llama-1b": Shape(layers=16, hidden=2048, ffn=8192, heads=32, kv_heads=8),
    "llama-3b": Shape(layers=28, hidden=3072, ffn=8192, heads=24, kv_heads=8),
    "llama-8b": Shape(layers=8, hidden=4096, ffn=14336, heads=32, kv_heads=8),
    "tiny": Shape(layers=2, hidden=128, ffn=256, heads=4, kv_heads=2),
}
"""Blocks of Llama 3.2 1B and 3B, a quarter of Llama 3 8B's, and a tiny shape to try the script."""

BATCHES = "2x2048,4x2048,8x2048,16x2048,1x8192,2x8192,4x8192"
COLUMNS = (
    "shape", "layers", "batch", "GPUs", "arm", "ms", "ms min", "ms max", "host ms", "tokens/s/GPU", "MFU", "peak GiB",
    "reserved GiB", "collectives", "MiB", "NCCL kernels", "exposed ms", "kernels", "busy ms", "W", "MHz", "J",
)  # fmt: skip
GEMM_SIZE = 8192
HOST_STEPS = 3

Row = dict[str, Any]


@dataclass(frozen=True)
class Work:
    """A row to measure."""

    name: str
    batch: str
    gpus: int
    arm: Arm
    shape: Shape

    def row(self) -> Row:
        sizes = {"shape": self.name, "layers": self.shape.layers, "batch": self.batch, "GPUs": self.gpus}
        return sizes | {"arm": self.arm.name, "device": self.shape.device}


def key(row: Row) -> tuple[Any, ...]:
    """Identify what a row measures."""
    return tuple(row[name] for name in ("shape", "layers", "batch", "GPUs", "arm", "device"))


# On the ranks ---------------------------------------------------------------------------------------------------------


def synchronize(shape: Shape) -> None:
    harness.synchronize(shape.device)
    if dist.is_initialized():
        dist.barrier()


def measure(mesh: DeviceMesh | None, arm: Arm, shape: Shape, steps: int, power_seconds: float) -> Row:
    """Measure an arm on this rank. `power_seconds`: time for watts and clocks (0: skip them)."""
    peak, allocated = peak_flops(shape.device), allocated_bytes(shape.device)
    trained = TrainingArm(arm, shape, mesh)
    trained.warm_up()
    # A replayed graph has no calls to count, so count before capturing.
    traffic = count_traffic(trained) if arm.mode == CAPTURED else {}
    trained.record()
    trained.run()
    if shape.device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    host_times = launch_times(trained.run, shape, HOST_STEPS)
    times = step_times(trained.run, shape, steps)
    median = statistics.median(times)
    row: Row = {"ms": median * 1e3, "ms min": min(times) * 1e3, "ms max": max(times) * 1e3}
    row |= {"host ms": statistics.median(host_times) * 1e3, "tokens/s/GPU": shape.batch * shape.tokens / median}
    row |= {"MFU": flops(shape) / median / peak, "peak TFLOP/s": peak / 1e12}
    if shape.device == "cuda":
        row["peak GiB"] = (torch.cuda.max_memory_allocated() - allocated) / GIB
        row["reserved GiB"] = torch.cuda.max_memory_reserved() / GIB
        row |= step_profile.kernels(trained.run)
        row |= measure_power(trained, power_seconds, median) if power_seconds else {}
    # Last, because under a dispatch mode compiled layers run eagerly and are compiled again.
    return row | (traffic or count_traffic(trained))


def launch_times(step: Callable[[], None], shape: Shape, count: int) -> list[float]:
    """Return the host's seconds to launch each of several steps on an idle device."""
    times = []
    for _ in range(count):
        synchronize(shape)
        start = time.perf_counter()
        step()
        times.append(time.perf_counter() - start)
    return times


def step_times(step: Callable[[], None], shape: Shape, count: int) -> list[float]:
    """Return the device's seconds of consecutive steps, after an untimed one, without waiting between them."""
    synchronize(shape)
    step()
    if shape.device != "cuda":
        return launch_times(step, shape, count)
    ends = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    ends[0].record()
    for end in ends[1:]:
        step()
        end.record()
    synchronize(shape)
    return [start.elapsed_time(end) / 1e3 for start, end in pairwise(ends)]


def measure_power(trained: TrainingArm, seconds: float, step_seconds: float) -> Row:
    try:
        return step_profile.power(trained.run, seconds, step_seconds, from_first_rank)
    except (OSError, ValueError) as error:
        return {"no power": str(error)}


def count_traffic(trained: TrainingArm) -> Row:
    if trained.mesh is None:
        return {"collectives": 0, "MiB": 0.0}
    with step_profile.Collectives() as collectives:
        trained.step()
    return {"collectives": collectives.calls, "MiB": collectives.bytes / 2**20}


def from_first_rank(count: int) -> int:
    """Return the first rank's count on all ranks."""
    if not dist.is_initialized():
        return count
    tensor = torch.tensor(count, device="cuda" if dist.get_backend() == "nccl" else "cpu")
    dist.broadcast(tensor, 0)
    return int(tensor)


def flops(shape: Shape) -> float:
    """Count the floating-point operations of forward and backward on one GPU: weights and causal attention."""
    kv = shape.kv_heads * shape.head
    weights = shape.hidden * (2 * shape.hidden + 2 * kv + 3 * shape.ffn)
    attention = shape.hidden * shape.tokens  # scores and values, each for half of all pairs
    return 6.0 * shape.layers * shape.batch * shape.tokens * (weights + attention)


def peak_flops(device: str) -> float:
    """Measure the floating-point operations per second of a BF16 GEMM."""
    size = GEMM_SIZE if device == "cuda" else 256
    a, b = (torch.randn((size, size), dtype=torch.bfloat16, device=device) for _ in range(2))
    for _ in range(3):
        a @ b
    harness.synchronize(device)
    start = time.perf_counter()
    for _ in range(10):
        a @ b
    harness.synchronize(device)
    return 20.0 * size**3 / (time.perf_counter() - start)


# In the launching process ---------------------------------------------------------------------------------------------


def run(works: list[Work], rows: list[Row], options: argparse.Namespace, deadline: float) -> None:
    """Measure one row after another, and append each to `rows` and to the file."""
    missing = len(works)
    call = {"torch": torch.__version__, "date": str(datetime.date.today()), "call": round(time.time())}
    for work in works:
        row = run_work(work, options, deadline)
        if row is not None:
            missing -= 1
            rows.append(work.row() | call | {"sizes": asdict(work.shape)} | row)
            if options.jsonl is not None:
                append_json(options.jsonl, rows[-1])
    if missing:
        print(f"\n{missing} of {len(works)} are left for another call", flush=True)


def run_work(work: Work, options: argparse.Namespace, deadline: float) -> Row | None:
    """Measure a row on its ranks. Returns its figures, or {"failed": why}, or None if the time was used up."""
    remaining = deadline - time.monotonic()
    if remaining <= 0:
        return None
    label = f"- {work.gpus} x {work.name} {work.batch} {work.arm.name}: "
    arguments = (work.arm, work.shape, options.steps, options.power)
    try:
        row = merge_ranks(Ranks(work.gpus, options.device, measure).run(min(remaining, options.seconds), *arguments))
    except RankFailure as error:
        row = {"failed": str(error)}
    except OutOfTime:
        if remaining < options.seconds:
            print(f"{label}cut off", flush=True)
            return None
        row = {"failed": f"took longer than {options.seconds:g} s"}
    result = f"failed, {row['failed']}" if "failed" in row else f"{row['ms']:.1f} ms, host {row['host ms']:.1f}"
    print(label + result, flush=True)
    return row


def merge_ranks(rows: list[Row]) -> Row:
    """Return the first rank's row with the largest memory of all ranks."""
    largest = {name: max(row[name] for row in rows) for name in ("peak GiB", "reserved GiB") if name in rows[0]}
    return rows[0] | largest


def table(rows: list[Row]) -> list[str]:
    """Format rows in Markdown, without columns that no row has.

    "of BF16" compares with a BF16 row of the same GPUs, shape and batch, from the same call if there is one.
    """
    columns = [name for name in COLUMNS if any(name in row for row in rows)]
    lines = [table_head([*columns, "of BF16"])]
    for row in rows:
        values = [row.get(name, "") for name in columns]
        cells = [f"{value:.4g}" if isinstance(value, float) else str(value) for value in values]
        if "failed" in row:
            cells[columns.index("arm")] += f": {row['failed']}"
        bf16_key = key(row | {"arm": "bf16"})
        bf16_rows = [candidate for candidate in rows if "ms" in candidate and key(candidate) == bf16_key]
        bf16_rows = [bf16_row for bf16_row in bf16_rows if bf16_row["call"] == row["call"]] or bf16_rows
        is_comparable = bf16_rows and "ms" in row
        ratio = f"{row['tokens/s/GPU'] / bf16_rows[-1]['tokens/s/GPU']:.2f}" if is_comparable else ""
        lines.append(table_row([*cells, ratio]))
    return lines


def select_arms(patterns: str) -> list[Arm]:
    """Return the arms with names that match a pattern, in the order of the patterns; exits if one matches nothing."""
    arms: dict[str, Arm] = {}
    for pattern in patterns.split(","):
        names = fnmatch.filter(ARMS, pattern)
        if not names:
            sys.exit(f"--arms: {pattern!r} matches no arm; arms are {NAMES}")
        arms |= {name: ARMS[name] for name in names}
    return list(arms.values())


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = make_parser(__doc__)
    parser.add_argument("--gpus", default="1", help="numbers of GPUs; those above the number of GPUs are skipped")
    parser.add_argument("--shapes", default="llama-1b,llama-3b,llama-8b", help=f"any of {', '.join(SHAPES)}")
    parser.add_argument("--batches", default=BATCHES, help="SEQUENCESxTOKENS per GPU")
    parser.add_argument("--arms", default="bf16,torchao-tensorwise,torchao-rowwise,ours-*-lean", help=NAMES)
    parser.add_argument("--again", default="", help="patterns of arms to measure even if they have rows")
    parser.add_argument("--retry", action="store_true", help="measure failed rows again")
    parser.add_argument("--layers", type=int, help="overrides the shape's number of layers")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--power", type=float, default=2.0, help="seconds to measure watts and clocks; 0 skips them")
    parser.add_argument("--seconds", type=float, default=240.0, help="an arm that takes longer has failed")
    parser.add_argument("--minutes", type=float, default=600.0, help="stop after this time")
    parser.add_argument("--device", default=DEVICE)
    parser.add_argument("--jsonl", "--json", type=Path, help="file of earlier rows, to which each row is appended")
    return parser.parse_args(arguments)


def plan(options: argparse.Namespace) -> list[Work]:
    """Return the rows that the options name, and print why any are left out; exits on an invalid option."""
    arms, shapes, batches = select_arms(options.arms), options.shapes.split(","), options.batches.split(",")
    for name in shapes:
        if name not in SHAPES:
            sys.exit(f"--shapes: {name!r} is none of {', '.join(SHAPES)}")
    for batch in batches:
        if not re.fullmatch("[1-9][0-9]*x[1-9][0-9]*", batch):
            sys.exit(f"--batches: {batch!r} is not SEQUENCESxTOKENS, as in 4x2048")
    if not re.fullmatch("[1-9][0-9]*(,[1-9][0-9]*)*", options.gpus):
        sys.exit(f"--gpus: {options.gpus!r} is not numbers with commas, as in 1,2,4")
    if "RANK" in os.environ:
        sys.exit("benchmarks/train_step.py starts its own processes: call it without torchrun, with --gpus 2")
    works = []
    for gpus in map(int, options.gpus.split(",")):
        if options.device == "cuda" and gpus > torch.cuda.device_count():
            print(f"- {gpus} GPUs: left out, there are {torch.cuda.device_count()}")
            continue
        for arm in arms:
            if reason := arm.why_not(gpus):
                print(f"- {gpus} x {arm.name}: left out, {reason}")
        for name in shapes:
            for batch in batches:
                sequences, tokens = map(int, batch.split("x"))
                shape = replace(SHAPES[name], batch=sequences, tokens=tokens, device=options.device)
                shape = shape if options.layers is None else replace(shape, layers=options.layers)
                works += [Work(name, batch, gpus, arm, shape) for arm in arms if not arm.why_not(gpus)]
    return works


def read(file: Path | None) -> list[Row]:
    """Read the rows of earlier calls, skipping lines that were cut off."""
    if file is None or not file.exists():
        return []
    rows = []
    for line in file.read_text().splitlines():
        with suppress(json.JSONDecodeError):
            rows.append(json.loads(line))
    return rows


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    deadline = time.monotonic() + 60 * options.minutes
    works, rows = plan(options), read(options.jsonl)
    finished = {
        key(row) for row in rows if not (options.retry and "failed" in row) and not matches(row["arm"], options.again)
    }
    missing = [work for work in works if key(work.row()) not in finished]
    print(f"{harness.heading(options.device)}; {len(works) - len(missing)} rows are there\n")
    run(missing, rows, options, deadline)
    selected = {key(work.row()) for work in works}
    print("\n" + "\n".join(table([row for row in rows if key(row) in selected])))


if __name__ == "__main__":
    # SystemExit makes `Ranks.run` kill its processes.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    main()
