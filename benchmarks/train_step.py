"""Whole training steps of Llama blocks: forward, backward, optimizer; on one GPU, and sharded by FSDP2 on several.

    python benchmarks/train_step.py [--gpus 1,2,4] [--shapes llama-1b,llama-3b,llama-8b] [--batches 4x2048,1x8192]
        [--arms 'bf16,torchao-*,ours-*-lean'] [--jsonl ROWS] [--minutes 8] [--picture ROWS.png]

Each row is written when it is done, also that of an arm that failed, and is left out by a later call with the same
file, so that a few minutes of a GPU at a time do; `--again bf16` measures a baseline again, on the GPU of that call.
The processes are an arm's own, one for each GPU: what fails or hangs ends with them (`ranks.py`).

All arms of a batch have the same weights, input and gradient of the output. BF16 and torchao compile each layer, as
torchtitan does, and step PyTorch's fused AdamW with states of BF16; torchao gathers FP8 where it can. Ours step
`FusedAdam` with the states of `training_arms.STATES`, eagerly or in one of the ways there. Times are of steps that
follow each other as in a training, by the device's clock, medians with the fastest and the slowest; "host ms" is until
one is launched that finds the device idle. MFU is of a BF16 product of 8192 x 8192 x 8192 that is timed in the same
process. "peak GiB" is what tensors had at most, the most of all ranks;
"reserved GiB" is with what the allocator keeps, as the memory of CUDA graphs. Collectives are counted where they are
called, with the bytes of their results; "exposed ms" is the time in which NCCL's kernels run and no other one. W and
MHz are of one GPU that steps without pause, and J is its energy for a step.
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
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from benchmarks import power, step_profile
from benchmarks.block_step import GIB, Shape, held
from benchmarks.ranks import OutOfTime, RankFailure, Ranks
from benchmarks.training_arms import ARMS, CAPTURED, NAMES, Arm, TrainingArm

SHAPES = {
    "llama-1b": Shape(layers=16, hidden=2048, ffn=8192, heads=32, kv_heads=8),
    "llama-3b": Shape(layers=28, hidden=3072, ffn=8192, heads=24, kv_heads=8),
    "llama-8b": Shape(layers=8, hidden=4096, ffn=14336, heads=32, kv_heads=8),
    "tiny": Shape(layers=2, hidden=128, ffn=256, heads=4, kv_heads=2),
}
"""Blocks of Llama 3.2 1B and 3B, and a quarter of those of Llama 3 8B; "tiny" tries the script."""

BATCHES = "2x2048,4x2048,8x2048,16x2048,1x8192,2x8192,4x8192"
SHOWN = (
    "shape", "layers", "batch", "GPUs", "arm", "ms", "ms min", "ms max", "host ms", "tokens/s/GPU", "MFU", "peak GiB",
    "reserved GiB", "collectives", "MiB", "NCCL kernels", "exposed ms", "kernels", "busy ms", "W", "MHz", "J",
)  # fmt: skip
"""The columns of the table."""
GEMM = 8192
HOST_STEPS = 3

Row = dict[str, Any]


@dataclass(frozen=True)
class Work:
    """One row to be."""

    name: str
    batch: str
    gpus: int
    arm: Arm
    shape: Shape

    def row(self) -> Row:
        sizes = {"shape": self.name, "layers": self.shape.layers, "batch": self.batch, "GPUs": self.gpus}
        return sizes | {"arm": self.arm.name, "device": self.shape.device}


def key(row: Row) -> tuple[Any, ...]:
    """What a row is of."""
    return tuple(row[name] for name in ("shape", "layers", "batch", "GPUs", "arm", "device"))


# In the processes of the GPUs -----------------------------------------------------------------------------------------


def synchronize(shape: Shape) -> None:
    if shape.device == "cuda":
        torch.cuda.synchronize()
    if dist.is_initialized():
        dist.barrier()


def measure(mesh: DeviceMesh | None, arm: Arm, shape: Shape, steps: int, seconds: float) -> Row:
    """The row of an arm on this rank. `seconds`: for how long power is measured."""
    peak, before = peak_flops(shape.device), held(shape)
    return _measured(TrainingArm(arm, shape, mesh), steps, seconds, before, peak)


def _measured(trained: TrainingArm, steps: int, seconds: float, before: int, peak: float) -> Row:
    shape, cuda = trained.shape, trained.shape.device == "cuda"
    trained.warm_up()
    traffic = _traffic(trained) if trained.arm.way == CAPTURED else {}  # a replay calls nothing that could be counted
    trained.record()
    trained.run()
    if cuda:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    host = launches(trained.run, shape, HOST_STEPS)
    times = durations(trained.run, shape, steps)
    middle, tokens = statistics.median(times), shape.batch * shape.tokens
    row: Row = {"ms": middle * 1e3, "ms min": min(times) * 1e3, "ms max": max(times) * 1e3}
    row |= {"host ms": statistics.median(host) * 1e3, "tokens/s/GPU": tokens / middle}
    row |= {"MFU": flops(shape) / middle / peak, "peak TFLOP/s": peak / 1e12}
    if cuda:
        row["peak GiB"] = (torch.cuda.max_memory_allocated() - before) / GIB
        row["reserved GiB"] = torch.cuda.max_memory_reserved() / GIB
        row |= step_profile.kernels(trained.run)
        row |= _power(trained, seconds, middle) if seconds else {}
    return row | (traffic or _traffic(trained))  # last: under a mode compiled layers run eagerly, and are compiled anew


def launches(step: Callable[[], None], shape: Shape, count: int) -> list[float]:
    """Seconds of the host for each of some steps that find the device idle."""
    found = []
    for _ in range(count):
        synchronize(shape)
        start = time.perf_counter()
        step()
        found.append(time.perf_counter() - start)
    return found


def durations(step: Callable[[], None], shape: Shape, count: int) -> list[float]:
    """Seconds between the ends of steps that follow each other, none of which is waited for; that before them is not
    timed."""
    synchronize(shape)
    step()
    if shape.device != "cuda":
        return launches(step, shape, count)
    ends = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    ends[0].record()
    for end in ends[1:]:
        step()
        end.record()
    synchronize(shape)
    return [before.elapsed_time(after) / 1e3 for before, after in pairwise(ends)]


def _power(trained: TrainingArm, seconds: float, each: float) -> Row:
    try:
        found = power.draw(trained.run, seconds, each, _agreed)
    except (OSError, ValueError) as error:
        return {"no power": str(error)}
    return {"W": found.reading.power, "MHz": found.reading.clock, "J": found.joules}


def _traffic(trained: TrainingArm) -> Row:
    if trained.mesh is None:
        return {"collectives": 0, "MiB": 0.0}
    with step_profile.Collectives() as seen:
        trained.step()
    return {"collectives": seen.calls, "MiB": seen.bytes / 2**20}


def _agreed(count: int) -> int:
    """The first rank's."""
    if not dist.is_initialized():
        return count
    found = torch.tensor(count, device="cuda" if dist.get_backend() == "nccl" else "cpu")
    dist.broadcast(found, 0)
    return int(found)


def flops(shape: Shape) -> float:
    """Of a forward and backward of one GPU's tokens: the products of the weights, and those of causal attention."""
    kv = shape.kv_heads * shape.head
    weights = shape.hidden * (2 * shape.hidden + 2 * kv + 3 * shape.ffn)
    attention = shape.hidden * shape.tokens  # scores and values, each of half of all pairs
    return 6.0 * shape.layers * shape.batch * shape.tokens * (weights + attention)


def peak_flops(device: str) -> float:
    """Of a BF16 product, as it is timed here."""
    size = GEMM if device == "cuda" else 256
    a, b = (torch.randn((size, size), dtype=torch.bfloat16, device=device) for _ in range(2))
    for _ in range(3):
        a @ b
    if device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(10):
        a @ b
    if device == "cuda":
        torch.cuda.synchronize()
    return 20.0 * size**3 / (time.perf_counter() - start)


# In the process that is called ----------------------------------------------------------------------------------------


def run(works: list[Work], rows: list[Row], asked: argparse.Namespace, until: float) -> None:
    """Measure one after another, and add their rows as they come, also to the file."""
    say, missing = partial(print, flush=True), len(works)
    about = {"torch": torch.__version__, "date": str(datetime.date.today()), "call": round(time.time())}
    for gpus in dict.fromkeys(work.gpus for work in works):
        ranks = Ranks(gpus, asked.device, measure)
        try:
            for work in (work for work in works if work.gpus == gpus):
                left, row = until - time.monotonic(), work.row() | about | {"sizes": asdict(work.shape)}
                told = f"- {work.gpus} x {work.name} {work.batch} {work.arm.name}: "
                if left <= 0:
                    continue
                try:
                    row |= joined(ranks.ask(min(left, asked.seconds), work.arm, work.shape, asked.steps, asked.power))
                    say(f"{told}{row['ms']:.1f} ms, host {row['host ms']:.1f}")
                except RankFailure as error:
                    row["failed"] = str(error)
                    say(f"{told}failed, {error}")
                except OutOfTime:
                    if left < asked.seconds:
                        say(f"{told}cut off")
                        continue
                    row["failed"] = f"took longer than {asked.seconds:g} s"
                    say(f"{told}failed, {row['failed']}")
                missing -= 1
                rows.append(row)
                if asked.jsonl is not None:
                    append(asked.jsonl, row)
        finally:
            ranks.stop()
    if missing:
        say(f"\n{missing} of {len(works)} are left for another call")


def joined(of_ranks: list[Row]) -> Row:
    """The first rank's row, with the most memory of all."""
    most = {name: max(row[name] for row in of_ranks) for name in ("peak GiB", "reserved GiB") if name in of_ranks[0]}
    return of_ranks[0] | most


def table(rows: list[Row]) -> list[str]:
    """In Markdown, without columns that no row has; speeds are beside those of BF16 on as many GPUs with the same shape
    and batch, by choice of the same call."""
    columns = [name for name in SHOWN if any(name in row for row in rows)]
    lines = ["| " + " | ".join([*columns, "of BF16"]) + " |", "|" + "---|" * (len(columns) + 1)]
    for row in rows:
        cells = [_cell(row.get(name, "")) for name in columns]
        if "failed" in row:
            cells[columns.index("arm")] += f": {row['failed']}"
        like = [r for r in rows if r["arm"] == "bf16" and "ms" in r and key(r | {"arm": ""}) == key(row | {"arm": ""})]
        like = [r for r in like if r["call"] == row["call"]] or like
        of = f"{row['tokens/s/GPU'] / like[-1]['tokens/s/GPU']:.2f}" if like and "ms" in row else ""
        lines.append("| " + " | ".join([*cells, of]) + " |")
    return lines


def _cell(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def picture(rows: list[Row], path: Path) -> None:
    """Tokens a second and memory of the arms, one pair of panels for each number of GPUs, shape and batch; light bars
    are what the allocator reserves. The last row of an arm is shown."""
    from matplotlib.figure import Figure  # here, since it takes long to import

    kinds: dict[tuple[Any, ...], dict[str, Row]] = {}
    for row in rows:
        kinds.setdefault((row["GPUs"], row["shape"], row["batch"]), {})[row["arm"]] = row
    counts = [len(arms) for arms in kinds.values()]
    figure = Figure(figsize=(11, sum(0.22 * count + 0.9 for count in counts)), layout="constrained")
    panels = figure.subplots(len(kinds), 2, squeeze=False, sharey="row", height_ratios=[n + 2 for n in counts])
    for ((gpus, shape, batch), arms), (speed, memory) in zip(kinds.items(), panels, strict=True):
        names = list(arms)[::-1]
        speed.barh(names, [arms[name].get("tokens/s/GPU", 0.0) for name in names])
        for column, color in (("reserved GiB", "C1"), ("peak GiB", "C0")):
            alpha = 0.4 if column == "reserved GiB" else 1.0
            memory.barh(names, [arms[name].get(column, 0.0) for name in names], color=color, alpha=alpha, label=column)
        for place, name in enumerate(names):
            if "failed" in arms[name]:
                speed.text(0, place, f" {arms[name]['failed'][:70]}", va="center", fontsize=7)
        speed.set_title(f"{gpus} x {shape}, {batch}", loc="left")
        speed.set_xlabel("tokens/s/GPU")
        memory.set_xlabel("GiB")
    panels[0][1].legend(fontsize=7)
    figure.savefig(path, dpi=120)


def chosen(patterns: str) -> list[Arm]:
    """The arms whose names match one of some patterns, in the order of the patterns.

    Raises:
        SystemExit: a pattern matches none.
    """
    found: dict[str, Arm] = {}
    for pattern in patterns.split(","):
        matching = fnmatch.filter(ARMS, pattern)
        if not matching:
            sys.exit(f"--arms: {pattern!r} matches none; arms are {NAMES}")
        found |= {name: ARMS[name] for name in matching}
    return list(found.values())


def parse(given: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--gpus", default="1", help="numbers of them, by commas; larger ones than there are are left out"
    )
    parser.add_argument("--shapes", default="llama-1b,llama-3b,llama-8b", help=f"of {', '.join(SHAPES)}")
    parser.add_argument("--batches", default=BATCHES, help="of one GPU: sequences x tokens")
    parser.add_argument("--arms", default="bf16,torchao-tensorwise,torchao-rowwise,ours-*-lean", help=NAMES)
    parser.add_argument("--again", default="", help="patterns of arms that are measured though they have rows")
    parser.add_argument("--retry", action="store_true", help="measure again what failed")
    parser.add_argument("--layers", type=int, help="fewer or more than the shape has")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--power", type=float, default=2.0, help="seconds for watts and clocks; 0 for none")
    parser.add_argument("--seconds", type=float, default=240.0, help="an arm that takes longer has failed")
    parser.add_argument("--minutes", type=float, default=600.0, help="when to stop")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--jsonl", "--json", type=Path, help="a file that each row is appended to, and that is read first"
    )
    parser.add_argument("--picture", type=Path, help="of all rows, PNG or SVG")
    return parser.parse_args(given)


def plan(options: argparse.Namespace) -> list[Work]:
    """All rows that are asked for.

    Raises:
        SystemExit: there is no shape of a name, a batch is not two numbers, or no such arm.
    """
    arms, found = chosen(options.arms), []
    for name in options.shapes.split(","):
        if name not in SHAPES:
            sys.exit(f"--shapes: {name!r} is none of {', '.join(SHAPES)}")
    for batch in options.batches.split(","):
        if not re.fullmatch("[1-9][0-9]*x[1-9][0-9]*", batch):
            sys.exit(f"--batches: {batch!r} is not SEQUENCESxTOKENS, as in 4x2048")
    if not re.fullmatch("[1-9][0-9]*(,[1-9][0-9]*)*", options.gpus):
        sys.exit(f"--gpus: {options.gpus!r} is not numbers with commas, as in 1,2,4")
    if "RANK" in os.environ:
        sys.exit("benchmarks/train_step.py starts its own processes: call it without torchrun, with --gpus 2")
    for gpus in map(int, options.gpus.split(",")):
        if options.device == "cuda" and gpus > torch.cuda.device_count():
            print(f"- {gpus} GPUs: left out, there are {torch.cuda.device_count()}")
            continue
        for name in options.shapes.split(","):
            for batch in options.batches.split(","):
                sequences, tokens = map(int, batch.split("x"))
                shape = replace(SHAPES[name], batch=sequences, tokens=tokens, device=options.device)
                shape = shape if options.layers is None else replace(shape, layers=options.layers)
                found += [Work(name, batch, gpus, arm, shape) for arm in arms]
    for arm, gpus, why in dict.fromkeys((w.arm.name, w.gpus, w.arm.why_not(w.gpus)) for w in found):
        if why:
            print(f"- {gpus} x {arm}: left out, {why}")
    return [work for work in found if not work.arm.why_not(work.gpus)]


def read(file: Path | None) -> list[Row]:
    """The rows of earlier calls, in a file in which lines may have been cut off."""
    if file is None or not file.exists():
        return []
    rows = []
    for line in file.read_text().splitlines():
        with suppress(json.JSONDecodeError):
            rows.append(json.loads(line))
    return rows


def append(file: Path, row: Row) -> None:
    cut_off = file.exists() and file.read_bytes()[-1:] not in (b"", b"\n")
    with file.open("a") as opened:
        opened.write("\n" * cut_off + json.dumps(row) + "\n")


def main(given: list[str] | None = None) -> None:
    options = parse(given)
    until = time.monotonic() + 60 * options.minutes
    works, rows = plan(options), read(options.jsonl)
    repeated = {name for pattern in options.again.split(",") for name in fnmatch.filter(ARMS, pattern)}
    done = {key(row) for row in rows if not (options.retry and "failed" in row) and row["arm"] not in repeated}
    left = [work for work in works if key(work.row()) not in done]
    where = torch.cuda.get_device_name() if options.device == "cuda" else "CPU"
    print(f"## {where}, torch {torch.__version__}, {datetime.date.today()}; {len(works) - len(left)} rows are there\n")
    run(left, rows, options, until)
    asked = {key(work.row()) for work in works}
    print("\n" + "\n".join(table([row for row in rows if key(row) in asked])))
    if options.picture is not None:
        picture(rows, options.picture)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that processes of ranks end with this one
    main()
