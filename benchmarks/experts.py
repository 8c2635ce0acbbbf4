"""Forward and backward of GroupedLinear: all experts at once, one by one, and PyTorch's grouped product in BF16.

    python -m benchmarks.experts [--only '128x16;64x256'] [--recipes current,block] [--repeats 20] [--json FILE]

Each token goes to an expert of its own choice, so experts have different numbers of rows. All variants of a shape have
one input, one gradient of the output and the same routes, and are timed in one run; "host" is the time that Python
takes to launch a step. What quantshard computes at once is first compared with what it computes one by one: output and
gradients, in the norm of each. BF16 is `torch.nn.functional.grouped_mm` on weights that are one stacked tensor, and on
separate parameters, as ours are, that each step stacks. "counts on the GPU" is with the
numbers of rows in a tensor there, as dispatch_tokens leaves them, and "captured" that step as a CUDA graph, each replay
of which reads them.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
import triton
from torch import Tensor
from torch.nn import functional as F

import quantshard as qs
from benchmarks.timing import milliseconds
from quantshard.modules import grouped_linear

RECIPES = ("delayed", "current", "rowwise", "block", "mxfp8", "nvfp4")
GROUPED = ("delayed", "current", "block", "mxfp8")
BF16 = "PyTorch BF16, grouped"
SEPARATE = "PyTorch BF16, grouped, separate parameters"
BOUND = 1e-2
"""How far what is computed at once may be from what is computed one by one, in the norm: both round to BF16, and what
an FP8 tensor core loses of a sum is less."""


class Shape(NamedTuple):
    """Experts, tokens of each in the mean, and sizes of each weight."""

    experts: int
    tokens: int
    in_features: int
    out_features: int

    @property
    def name(self) -> str:
        return f"{self.experts}x{self.tokens}, {self.in_features}, {self.out_features}"


SHAPES = (
    Shape(128, 16, 2048, 768),
    Shape(128, 128, 2048, 768),
    Shape(128, 128, 768, 2048),
    Shape(64, 256, 2048, 1408),
    Shape(64, 1024, 2048, 1408),
    Shape(8, 2048, 4096, 14336),
)

Step = Callable[[], tuple[Tensor, ...]]
"""Forward and backward: the output, and the gradients of the input and of the weights [experts, out, in]."""


class Given(NamedTuple):
    """What all variants of a shape are given."""

    shape: Shape
    splits: list[int]
    x: Tensor
    dy: Tensor

    @staticmethod
    def of(shape: Shape) -> Given:
        torch.manual_seed(0)
        rows = shape.experts * shape.tokens
        splits = torch.randint(shape.experts, (rows,)).bincount(minlength=shape.experts).tolist()
        x, dy = (torch.randn(rows, n, device="cuda").bfloat16() for n in (shape.in_features, shape.out_features))
        return Given(shape, splits, x.requires_grad_(), dy)


@contextmanager
def at_once_up_to(largest: int) -> Iterator[None]:
    """Experts of no more than so many multiplications are computed at once."""
    before, grouped_linear.LARGEST_GROUPED = grouped_linear.LARGEST_GROUPED, largest
    try:
        yield
    finally:
        grouped_linear.LARGEST_GROUPED = before


def ours(given: Given, recipe: str, at_once: bool, on_device: bool = False) -> Step:
    shape = given.shape
    torch.manual_seed(1)
    with qs.quantized_model_init(recipe=recipe):
        layer = qs.GroupedLinear(
            shape.experts, shape.in_features, shape.out_features, bias=False, params_dtype=torch.bfloat16, device="cuda"
        )
    inputs = (given.x, *layer.parameters())
    splits = torch.tensor(given.splits, device="cuda") if on_device else given.splits

    def step() -> tuple[Tensor, ...]:
        with at_once_up_to(1 << 62 if at_once else -1), qs.autocast(recipe=recipe):
            y = layer(given.x, splits)
        return y.detach(), *torch.autograd.grad(y, inputs, given.dy)

    return step


def torch_grouped(given: Given) -> Step:
    shape = given.shape
    weights = torch.randn(shape.experts, shape.out_features, shape.in_features, device="cuda").bfloat16() * 0.023
    weights.requires_grad_()
    ends = torch.tensor(given.splits).cumsum(0).to("cuda", torch.int32)

    def step() -> tuple[Tensor, ...]:
        y = F.grouped_mm(given.x, weights.transpose(-2, -1), offs=ends)
        return y.detach(), *torch.autograd.grad(y, (given.x, weights), given.dy)

    return step


def torch_separate(given: Given) -> Step:
    shape = given.shape
    drawn = torch.randn(shape.experts, shape.out_features, shape.in_features, device="cuda").bfloat16() * 0.023
    weights = [weight.clone().requires_grad_() for weight in drawn]
    ends = torch.tensor(given.splits).cumsum(0).to("cuda", torch.int32)

    def step() -> tuple[Tensor, ...]:
        y = F.grouped_mm(given.x, torch.stack(weights).transpose(-2, -1), offs=ends)
        return y.detach(), *torch.autograd.grad(y, (given.x, *weights), given.dy)

    return step


def captured(step: Step) -> Step:
    """The same as a CUDA graph."""
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()

    def replay() -> tuple[Tensor, ...]:
        graph.replay()
        return found

    return replay


def difference(found: tuple[Tensor, ...], wanted: tuple[Tensor, ...]) -> float:
    """The largest, over the tensors, of |found - wanted| / |wanted| in the norm."""
    pairs = zip(found, wanted, strict=True)
    return max(float((a.float() - b.float()).norm() / b.float().norm().clamp(min=1e-30)) for a, b in pairs)


class Measured(NamedTuple):
    ms: list[float]
    host_ms: float
    difference: float | None = None

    @property
    def median(self) -> float:
        return statistics.median(self.ms)


def measured(step: Step, repeats: int, off: float | None = None) -> Measured:
    times = milliseconds(step, repeats, "cuda", warmup=2)
    hosts = []
    for _ in range(min(repeats, 5)):
        torch.cuda.synchronize()
        start = time.perf_counter()
        step()
        hosts.append((time.perf_counter() - start) * 1e3)
    return Measured(times, statistics.median(hosts), off)


def rows_of(given: Given, recipes: list[str], repeats: int) -> Iterator[tuple[str, Measured]]:
    yield BF16, measured(torch_grouped(given), repeats)
    yield SEPARATE, measured(torch_separate(given), repeats)
    for recipe in recipes:
        apart = ours(given, recipe, at_once=False)
        if recipe in GROUPED:
            together = ours(given, recipe, at_once=True)
            for _ in range(2):  # the first step of delayed scaling has no history
                off = difference(together(), apart())
            if off > BOUND:
                sys.exit(f"benchmarks/experts.py: {given.shape.name}, {recipe}: off by {off} from one by one")
            yield f"{recipe}, at once", measured(together, repeats, off)
            read = ours(given, recipe, at_once=True, on_device=True)
            yield f"{recipe}, at once, counts on the GPU", measured(read, repeats)
            yield f"{recipe}, at once, counts on the GPU, captured", measured(captured(read), repeats)
        yield f"{recipe}, one by one", measured(apart, max(repeats // 4, 3))  # a hundred times as long


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="shapes by the start of their names, with semicolons")
    parser.add_argument("--recipes", default=",".join(RECIPES))
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("benchmarks/experts.py: there is no GPU that torch can use")
    versions = f"torch {torch.__version__}, Triton {triton.__version__}, {datetime.date.today()}"
    print(f"## {torch.cuda.get_device_name()}, {versions}\n")
    print(f"medians of {asked.repeats}, one by one of a quarter as many\n")
    print("| experts x tokens, in, out | variant | ms (min, max) | host ms | of BF16's time | of one by one | off by |")
    print("|---|---|---|---|---|---|---|")
    results = {}
    chosen = [shape for shape in SHAPES if shape.name.startswith(tuple(asked.only.split(";")))]
    if not chosen:
        parser.error(f"--only {asked.only!r} begins none of: {'; '.join(shape.name for shape in SHAPES)}")
    for shape in chosen:
        found = dict(rows_of(Given.of(shape), asked.recipes.split(","), asked.repeats))
        for name, row in found.items():
            apart = found.get(f"{name.partition(',')[0]}, one by one")
            of_apart = "" if apart is None else f"{row.median / apart.median:.2f}"
            off = "" if row.difference is None else f"{row.difference:.1e}"
            spread = f"{row.median:.2f} ({min(row.ms):.2f}, {max(row.ms):.2f})"
            ratio = f"{row.median / found[BF16].median:.2f}"
            print(
                f"| {shape.name} | {name} | {spread} | {row.host_ms:.2f} | {ratio} | {of_apart} | {off} |", flush=True
            )
        results[shape.name] = {name: row._asdict() for name, row in found.items()}
        torch.cuda.empty_cache()
    if asked.json:
        asked.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
