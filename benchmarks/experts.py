"""Measure forward and backward of GroupedLinear against PyTorch's grouped_mm in BF16.

    python -m benchmarks.experts [--only '128x16;64x256'] [--recipes current,block] [--repeats 20] [--json FILE]

Each token is routed to a random expert, so experts have different numbers of rows. All variants of a shape use the same
input, output gradient and routes in one run. Variants:

- "PyTorch BF16, grouped": `torch.nn.functional.grouped_mm` on one stacked weight; "separate parameters" stacks the
  experts' weights in each step.
- "at once": one grouped kernel for all experts; "one by one": a GEMM per expert. Their outputs and gradients are
  compared first ("off by", relative norm).
- "counts on the GPU": the rows per expert are in a GPU tensor, as `dispatch_tokens` returns them; "captured": that step
  as a CUDA graph.

"host ms" is the time that Python takes to launch a step.
"""

from __future__ import annotations

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
from benchmarks.harness import capture, heading, make_parser, milliseconds, spread, table_head, table_row
from quantshard.modules import grouped_linear

RECIPES = ("delayed", "current", "rowwise", "block", "mxfp8", "nvfp4")
GROUPED = ("delayed", "current", "block", "mxfp8")
"""Recipes with a grouped kernel."""
BF16 = "PyTorch BF16, grouped"
BOUND = 1e-2
"""Largest relative difference between "at once" and "one by one": both round to BF16, and an FP8 tensor core loses
less of a sum."""
COLUMNS = (
    "experts x tokens, in, out",
    "variant",
    "ms (min, max)",
    "host ms",
    "of BF16's time",
    "of one by one",
    "off by",
)
WEIGHT_STD = 0.023


class Shape(NamedTuple):
    """`tokens`: mean number per expert."""

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
"""Forward and backward. Returns the output and the gradients of the input and of the weights [experts, out, in]."""


class Inputs(NamedTuple):
    """Common inputs of all variants of a shape."""

    shape: Shape
    splits: list[int]
    x: Tensor
    dy: Tensor


def make_inputs(shape: Shape) -> Inputs:
    torch.manual_seed(0)
    rows = shape.experts * shape.tokens
    splits = torch.randint(shape.experts, (rows,)).bincount(minlength=shape.experts).tolist()
    x, dy = (torch.randn(rows, n, device="cuda").bfloat16() for n in (shape.in_features, shape.out_features))
    return Inputs(shape, splits, x.requires_grad_(), dy)


@contextmanager
def grouped_up_to(multiplications: int) -> Iterator[None]:
    """Use the grouped kernel for experts of at most this many multiplications."""
    default, grouped_linear.LARGEST_GROUPED = grouped_linear.LARGEST_GROUPED, multiplications
    try:
        yield
    finally:
        grouped_linear.LARGEST_GROUPED = default


def ours(inputs: Inputs, recipe: str, at_once: bool, gpu_counts: bool = False) -> Step:
    shape = inputs.shape
    torch.manual_seed(1)
    with qs.quantized_model_init(recipe=recipe):
        layer = qs.GroupedLinear(
            shape.experts, shape.in_features, shape.out_features, bias=False, params_dtype=torch.bfloat16, device="cuda"
        )
    differentiated = (inputs.x, *layer.parameters())
    splits = torch.tensor(inputs.splits, device="cuda") if gpu_counts else inputs.splits

    def step() -> tuple[Tensor, ...]:
        with grouped_up_to(1 << 62 if at_once else -1), qs.autocast(recipe=recipe):
            y = layer(inputs.x, splits)
        return y.detach(), *torch.autograd.grad(y, differentiated, inputs.dy)

    return step


def torch_grouped(inputs: Inputs, separate: bool) -> Step:
    """grouped_mm on one stacked weight, or on separate parameters that each step stacks."""
    shape = inputs.shape
    stacked = torch.randn(shape.experts, shape.out_features, shape.in_features, device="cuda").bfloat16() * WEIGHT_STD
    weights = [weight.clone() for weight in stacked] if separate else [stacked]
    for weight in weights:
        weight.requires_grad_()
    ends = torch.tensor(inputs.splits).cumsum(0).to("cuda", torch.int32)

    def step() -> tuple[Tensor, ...]:
        weight = torch.stack(weights) if separate else weights[0]
        y = F.grouped_mm(inputs.x, weight.transpose(-2, -1), offs=ends)
        return y.detach(), *torch.autograd.grad(y, (inputs.x, *weights), inputs.dy)

    return step


def captured(step: Step) -> Step:
    """Warm up on a side stream, then capture the step as a CUDA graph."""
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        step()
    torch.cuda.synchronize()
    return capture(step)


def relative_difference(actual: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> float:
    """Return the largest relative norm of a difference, over the tensors."""
    pairs = zip(actual, expected, strict=True)
    return max(float((a.float() - b.float()).norm() / b.float().norm().clamp(min=1e-30)) for a, b in pairs)


class Result(NamedTuple):
    ms: list[float]
    host_ms: float
    difference: float | None = None

    @property
    def median(self) -> float:
        return statistics.median(self.ms)


def measure(step: Step, repeats: int, difference: float | None = None) -> Result:
    times = milliseconds(step, repeats, "cuda", warmup=2)
    host_times = []
    for _ in range(min(repeats, 5)):
        torch.cuda.synchronize()
        start = time.perf_counter()
        step()
        host_times.append((time.perf_counter() - start) * 1e3)
    return Result(times, statistics.median(host_times), difference)


def measure_variants(inputs: Inputs, recipes: list[str], repeats: int) -> Iterator[tuple[str, Result]]:
    yield BF16, measure(torch_grouped(inputs, separate=False), repeats)
    yield f"{BF16}, separate parameters", measure(torch_grouped(inputs, separate=True), repeats)
    for recipe in recipes:
        one_by_one = ours(inputs, recipe, at_once=False)
        if recipe in GROUPED:
            at_once = ours(inputs, recipe, at_once=True)
            for _ in range(2):  # delayed scaling has no history in its first step
                difference = relative_difference(at_once(), one_by_one())
            if difference > BOUND:
                sys.exit(f"benchmarks/experts.py: {inputs.shape.name}, {recipe}: off by {difference} from one by one")
            yield f"{recipe}, at once", measure(at_once, repeats, difference)
            gpu_counts = ours(inputs, recipe, at_once=True, gpu_counts=True)
            yield f"{recipe}, at once, counts on the GPU", measure(gpu_counts, repeats)
            yield f"{recipe}, at once, counts on the GPU, captured", measure(captured(gpu_counts), repeats)
        yield f"{recipe}, one by one", measure(one_by_one, max(repeats // 4, 3))  # up to 100 times slower


def print_results(shape: Shape, results: dict[str, Result]) -> None:
    for name, result in results.items():
        one_by_one = results.get(f"{name.partition(',')[0]}, one by one")
        cells = [shape.name, name, spread(result.ms, 2), f"{result.host_ms:.2f}"]
        cells.append(f"{result.median / results[BF16].median:.2f}")
        cells.append("" if one_by_one is None else f"{result.median / one_by_one.median:.2f}")
        cells.append("" if result.difference is None else f"{result.difference:.1e}")
        print(table_row(cells), flush=True)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--only", default="", help="beginnings of shapes' names, separated by semicolons")
    parser.add_argument("--recipes", default=",".join(RECIPES))
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--json", type=Path, help="also write all times to this file")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("benchmarks/experts.py: needs a GPU that torch can use")
    shapes = [shape for shape in SHAPES if shape.name.startswith(tuple(options.only.split(";")))]
    if not shapes:
        parser.error(
            f"--only {options.only!r}: no shape starts so; shapes: {'; '.join(shape.name for shape in SHAPES)}"
        )
    print(f"{heading('cuda', f'Triton {triton.__version__}')}\n")
    print(f"medians of {options.repeats}, one by one of a quarter as many\n\n{table_head(COLUMNS)}")
    rows = {}
    for shape in shapes:
        results = dict(measure_variants(make_inputs(shape), options.recipes.split(","), options.repeats))
        print_results(shape, results)
        rows[shape.name] = {name: result._asdict() for name, result in results.items()}
        torch.cuda.empty_cache()
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
