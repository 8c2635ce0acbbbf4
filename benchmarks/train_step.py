"""Whole training steps of Llama blocks under FSDP2: forward, backward, optimizer; on as many GPUs as torchrun starts.

    torchrun --nproc-per-node 2 benchmarks/train_step.py [--shapes llama-1b,llama-8b] [--batches 4x2048,1x8192]
        [--arms 'bf16,ours-*'] [--layers 8] [--jsonl FILE] [--picture FILE.svg]

Arms run one after the other in one job, since not all fit into memory together, each with the same weights, input and
gradient of the output; what drifts meanwhile, as clocks do, is in their differences. BF16 and torchao compile each
layer, as torchtitan does, and step PyTorch's fused AdamW with states of BF16; torchao gathers FP8 where it can. Ours
run eagerly with `FusedAdam`: "lean" has masters of 16 bits and moments of 8. With one process nothing is sharded.
Tokens are of one GPU and second, with the host's time and the most memory; MFU is of a BF16 product of 8192 x 8192 x
8192 that is timed in the same job. Collectives are counted where they are called, with the bytes of their results; what
of them is exposed is the time in which NCCL's kernels run and no other one.
"""

from __future__ import annotations

import argparse
import datetime
import fnmatch
import gc
import json
import os
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import quantshard as qs
from benchmarks.block_step import GIB, Ours, Plain, Shape, data, fill
from quantshard.optimizers import FusedAdam

SHAPES = {
    "llama-1b": Shape(layers=16, hidden=2048, ffn=8192, heads=32, kv_heads=8),
    "llama-3b": Shape(layers=28, hidden=3072, ffn=8192, heads=24, kv_heads=8),
    "llama-8b": Shape(layers=8, hidden=4096, ffn=14336, heads=32, kv_heads=8),
    "tiny": Shape(layers=2, hidden=128, ffn=256, heads=4, kv_heads=2),
}
"""Blocks of Llama 3.2 1B and 3B, and a quarter of those of Llama 3 8B; "tiny" tries the script."""

LEAN = {"master_weight_dtype": torch.float16, "exp_avg_dtype": torch.uint8, "exp_avg_sq_dtype": torch.uint8}
NAMESPACES = ("c10d", "_c10d_functional")
NO_RESULTS = {"wait_tensor", "_wrap_tensor_autograd", "barrier", "monitored_barrier_", "check_for_nan", "send", "isend"}
"""Operators there that give no other rank's values."""
WARMUP = 3
GEMM = 8192


@dataclass(frozen=True)
class Arm:
    """Which model is trained, by which recipe, and with what optimizer states."""

    family: str
    recipe: str = ""
    states: str = ""
    compiled: bool = False

    @property
    def name(self) -> str:
        parts = (self.family, self.recipe, self.states, "compiled" if self.compiled and self.family == "ours" else "")
        return "-".join(filter(None, parts))


RECIPES = ("delayed", "current", "block", "rowwise", "mxfp8", "nvfp4")
ARMS = [
    Arm("bf16", compiled=True),
    *(Arm("torchao", recipe, compiled=True) for recipe in ("tensorwise", "rowwise")),
    *(Arm("ours", recipe, states) for recipe in RECIPES for states in ("", "lean")),
    *(Arm("ours", recipe, "lean", compiled=True) for recipe in RECIPES),
]


class Collectives(TorchDispatchMode):
    """Counts what is communicated: calls, and the bytes of their results on this rank.

    Operators of c10d write their results into their first argument, functional ones return theirs.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.bytes = 0, 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = function(*args, **(kwargs or {}))
        if function.namespace in NAMESPACES and function.overloadpacket.__name__ not in NO_RESULTS:
            results = [args[0]] if function.namespace == "c10d" else [found]
            self.calls += 1
            self.bytes += sum(each.nbytes for each in tree_leaves(results) if isinstance(each, torch.Tensor))
        return found


class TrainingArm:
    """One arm on one shape, ready to step."""

    def __init__(self, arm: Arm, shape: Shape, mesh: DeviceMesh | None) -> None:
        self.arm, self.shape, self.mesh = arm, shape, mesh
        torch.manual_seed(0)  # the random keys of weights and optimizer are the same on all processes
        self.model: nn.Module = Ours(shape, arm.recipe, None) if arm.family == "ours" else Plain(shape, None)
        fill(self.model, shape)
        if arm.family == "torchao":
            _to_float8(self.model, arm.recipe, shape, gathers=mesh is not None)
        layers: Any = self.model.layers
        if arm.compiled:
            for layer in layers:
                layer.compile()
        if mesh is not None:
            policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
            for module in (*layers, self.model):
                fully_shard(module, mesh=mesh, mp_policy=policy)
            for layer, following in pairwise(layers):
                layer.set_modules_to_forward_prefetch([following])
        self.optimizer = self._optimizer()
        self.x, self.dy = data(shape)

    def _optimizer(self) -> torch.optim.Optimizer:
        if self.arm.family != "ours":
            return torch.optim.AdamW(self.model.parameters(), lr=1e-5, fused=self.shape.device == "cuda")
        states: dict[str, Any] = LEAN if self.arm.states else {}
        return FusedAdam(self.model.named_parameters(), lr=1e-5, **states)

    def step(self) -> None:
        """Forward, backward and optimizer."""
        with qs.autocast(recipe=self.arm.recipe) if self.arm.family == "ours" else nullcontext():
            y = self.model(self.x)
        y.backward(self.dy)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.x.grad = None
        if self.arm.family == "torchao" and self.mesh is not None:
            from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

            precompute_float8_dynamic_scale_for_fsdp(self.model)


def _to_float8(model: nn.Module, recipe: str, shape: Shape, gathers: bool) -> None:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = Float8LinearConfig.from_recipe_name(recipe)
    gathers = gathers and recipe == "tensorwise"  # torchao has no others
    convert_to_float8_training(
        model, config=replace(config, emulate=shape.device == "cpu", enable_fsdp_float8_all_gather=gathers)
    )


def synchronize(shape: Shape) -> None:
    if shape.device == "cuda":
        torch.cuda.synchronize()
    if dist.is_initialized():
        dist.barrier()


def measure(arm: Arm, shape: Shape, mesh: DeviceMesh | None, steps: int, peak_flops: float) -> dict[str, Any]:
    """The row of an arm: medians of its steps."""
    trained = TrainingArm(arm, shape, mesh)
    for _ in range(WARMUP):
        trained.step()
    if shape.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    times, host = [], []
    for _ in range(steps):
        synchronize(shape)
        start = time.perf_counter()
        trained.step()
        host.append(time.perf_counter() - start)
        synchronize(shape)
        times.append(time.perf_counter() - start)
    peak = torch.cuda.max_memory_allocated() / GIB if shape.device == "cuda" else 0.0
    exposed = _exposed_milliseconds(trained) if shape.device == "cuda" and mesh is not None else 0.0
    with Collectives() as seen:  # last: under a mode compiled layers run eagerly, and are compiled anew after it
        trained.step()
    seconds, tokens = statistics.median(times), shape.batch * shape.tokens
    return {
        "arm": arm.name,
        "ms": seconds * 1e3,
        "host ms": statistics.median(host) * 1e3,
        "tokens/s/GPU": tokens / seconds,
        "MFU": flops(shape) / seconds / peak_flops,
        "peak GiB": peak,
        "collectives": seen.calls,
        "MiB": seen.bytes / 2**20,
        "exposed ms": exposed,
    }


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


Span = tuple[float, float]


def _exposed_milliseconds(trained: TrainingArm) -> float:
    """How long NCCL's kernels of one step run while no other kernel does."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        trained.step()
        torch.cuda.synchronize()
    spans: dict[bool, list[Span]] = {True: [], False: []}
    for event in seen.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            spans["nccl" in event.name.lower()].append((event.time_range.start, event.time_range.end))
    return exposed(spans[True], spans[False]) / 1e3


def exposed(those: list[Span], others: list[Span]) -> float:
    """How long any of the first spans lasts while none of the others does."""
    return _length([*those, *others]) - _length(others)


def _length(spans: list[Span]) -> float:
    """How long any of some spans lasts."""
    total, until = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total


def table(rows: list[dict[str, Any]]) -> list[str]:
    """In Markdown; speeds are beside those of BF16 with the same shape and batch."""
    base = {(row["shape"], row["batch"]): row["tokens/s/GPU"] for row in rows if row["arm"] == "bf16"}
    columns = list(rows[0]) if rows else []
    lines = ["| " + " | ".join([*columns, "of BF16"]) + " |", "|" + "---|" * (len(columns) + 1)]
    for row in rows:
        cells = [f"{value:.4g}" if isinstance(value, float) else str(value) for value in row.values()]
        like = base.get((row["shape"], row["batch"]))
        lines.append("| " + " | ".join([*cells, f"{row['tokens/s/GPU'] / like:.2f}" if like else ""]) + " |")
    return lines


def picture(rows: list[dict[str, Any]], path: Path) -> None:
    """Tokens a second and memory of the arms, one pair of panels for each shape and batch."""
    from matplotlib.figure import Figure  # here, since it takes long to import

    kinds = list(dict.fromkeys((row["shape"], row["batch"]) for row in rows))
    figure = Figure(figsize=(9, 1 + 0.22 * len(rows)), layout="constrained")
    panels = figure.subplots(len(kinds), 2, squeeze=False, sharey="row")
    for (shape, batch), pair in zip(kinds, panels, strict=True):
        of_kind = [row for row in rows if (row["shape"], row["batch"]) == (shape, batch)][::-1]
        for panel, column in zip(pair, ("tokens/s/GPU", "peak GiB"), strict=True):
            panel.barh([row["arm"] for row in of_kind], [row[column] for row in of_kind])
            panel.set_xlabel(column)
        pair[0].set_title(f"{shape}, {batch}", loc="left")
    figure.savefig(path)


def is_first() -> bool:
    """True for the process that prints and writes."""
    return os.environ.get("RANK", "0") == "0"


@contextmanager
def process_group(device: str) -> Iterator[DeviceMesh | None]:
    """The mesh of torchrun's processes, if there are several."""
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1:
        yield None
        return
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    try:
        yield init_device_mesh(device, (size,))
    finally:
        dist.destroy_process_group()


def chosen(arms: str) -> list[Arm]:
    """The arms whose names match one of some patterns.

    Raises:
        SystemExit: a pattern matches none.
    """
    patterns = arms.split(",")
    for pattern in patterns:
        if not any(fnmatch.fnmatch(arm.name, pattern) for arm in ARMS):
            sys.exit(f"--arms: {pattern!r} matches none of {', '.join(arm.name for arm in ARMS)}")
    return [arm for arm in ARMS if any(fnmatch.fnmatch(arm.name, pattern) for pattern in patterns)]


def parse(given: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="llama-1b,llama-8b", help=f"of {', '.join(SHAPES)}")
    parser.add_argument("--batches", default="4x2048,1x8192", help="of one GPU: sequences x tokens")
    parser.add_argument("--arms", default="bf16,torchao-*,ours-*-lean", help="names or patterns, by commas")
    parser.add_argument("--layers", type=int, help="fewer or more than the shape has")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--jsonl", type=Path, help="a file that each row is appended to")
    parser.add_argument("--picture", type=Path)
    return parser.parse_args(given)


def shapes(options: argparse.Namespace) -> list[tuple[str, str, Shape]]:
    """The name of each shape, of each batch, and both together.

    Raises:
        SystemExit: there is no shape of a name, or a batch is not two numbers.
    """
    found = []
    for name in options.shapes.split(","):
        if name not in SHAPES:
            sys.exit(f"--shapes: {name!r} is none of {', '.join(SHAPES)}")
        for batch in options.batches.split(","):
            if not re.fullmatch("[1-9][0-9]*x[1-9][0-9]*", batch):
                sys.exit(f"--batches: {batch!r} is not SEQUENCESxTOKENS, as in 4x2048")
            sequences, tokens = map(int, batch.split("x"))
            shape = replace(SHAPES[name], batch=sequences, tokens=tokens, device=options.device)
            found.append((name, batch, shape if options.layers is None else replace(shape, layers=options.layers)))
    return found


def main(given: list[str] | None = None) -> None:
    options = parse(given)
    asked, arms = shapes(options), chosen(options.arms)
    rows: list[dict[str, Any]] = []
    say: Callable[[str], None] = partial(print, flush=True) if is_first() else lambda line: None
    with process_group(options.device) as mesh:
        peak, ranks = peak_flops(options.device), 1 if mesh is None else mesh.size()
        where = torch.cuda.get_device_name() if options.device == "cuda" else "CPU"
        say(f"## {ranks} x {where}, torch {torch.__version__}, {datetime.date.today()}; {peak / 1e12:.0f} TFLOP/s\n")
        for name, batch, shape in asked:
            for arm in arms:
                try:
                    found = measure(arm, shape, mesh, options.steps, peak)
                except ImportError as error:
                    say(f"- {arm.name}: skipped, {error}")
                    continue
                rows.append({"shape": name, "layers": shape.layers, "batch": batch, "GPUs": ranks, **found})
                gc.collect()
                torch._dynamo.reset()
                say(f"- {name} {batch} {arm.name}: {found['ms']:.1f} ms, host {found['host ms']:.1f}")
                if options.jsonl is not None and is_first():
                    with options.jsonl.open("a") as file:
                        file.write(json.dumps({**rows[-1], "sizes": asdict(shape)}) + "\n")
    say("\n" + "\n".join(table(rows)))
    if options.picture is not None and is_first():
        picture(rows, options.picture)


if __name__ == "__main__":
    main()
