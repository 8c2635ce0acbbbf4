"""Measure optimizer steps on this GPU: parameters a second, and bytes a second beside a copy of the device's.

    python -m benchmarks.adam [--scale 1] [--repeats 20] [--only WORD] [--json FILE]

The parameters are the 28 weights of the linear layers of four Llama-3-8B blocks (872 million), the gradients bfloat16;
`--scale N` divides rows and columns by N. Ours have float32 masters beside quantized weights; torch's fused AdamW
trains float32 parameters by float32 gradients, torchao's optimizers (where they can be imported) bfloat16 parameters.

Bytes are those that a step must move: gradients read once, states and parameters read and written, quantized weights
written; so the fraction is of what memory allows. Ours reads gradients once more, to skip a step whose gradients are
not finite, and that counts as time. Before it is timed, its bits are compared with those in plain PyTorch, on small
weights.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from benchmarks.timing import milliseconds
from quantshard.state_storage import PRESETS
from quantshard.tensor.quantized_tensor import QuantizedTensor
from tests.kernels.cases.base import Shape
from tests.kernels.cases.steps import step_case, stepped, weights, with_gradients

try:
    from torchao.optim import AdamW8bit, AdamWFp8
except ImportError:
    AdamW8bit = AdamWFp8 = None

BLOCK = [(4096, 4096), (1024, 4096), (1024, 4096), (4096, 4096), (14336, 4096), (14336, 4096), (4096, 14336)]
"""Of a Llama-3-8B block: query, key, value, output; gate, up, down."""
BLOCKS = 4
SMALL = [(130, 144), (131, 257), (16, 32)]
"""Weights on which steps are compared with those in plain PyTorch."""

OURS = ("delayed", "current", "block", "mxfp8", "nvfp4")
STATES: dict[str, dict[str, Any]] = {
    "fp32 masters, fp32 moments": {},
    "fp32 masters, fp8 moments": {"exp_avg_dtype": torch.uint8, "exp_avg_sq_dtype": torch.uint8},
    **{name: {"preset": name} for name in PRESETS},
}


class Case(NamedTuple):
    """One optimizer: a step of it, the bytes that the step must move, and whether its bits are right, if that is known.

    `step` is None where the optimizer cannot be imported.
    """

    name: str
    step: Callable[[], Any] | None
    moved: int = 0
    is_right: bool | None = None


def bytes_of(tensor: Tensor) -> int:
    """All that is stored of a tensor; of a subclass, the tensors in it."""
    if isinstance(tensor, QuantizedTensor):
        return sum(map(bytes_of, tensor.quantized_storage.components.values()))
    if type(tensor) not in (Tensor, nn.Parameter) and hasattr(tensor, "__tensor_flatten__"):
        return sum(bytes_of(getattr(tensor, name)) for name in tensor.__tensor_flatten__()[0])
    return tensor.numel() * tensor.itemsize


def ours(
    recipe: str, shapes: list[Shape], device: str, states: str = next(iter(STATES)), replayed: bool = False,
    by: str = "Adam",
) -> Case:  # fmt: skip
    """FusedAdam, or Lion; `states`: a name of `STATES`; `replayed`: from a CUDA graph."""
    options: dict[str, Any] = {"capturable": replayed, "by": by, **STATES[states]}
    is_right = step_case(recipe, SMALL, device, **options).is_right()
    params, optimizer = stepped(recipe, shapes, device, **options)
    kept = sum(bytes_of(t) for state in optimizer.state.values() for t in state.values())
    read = sum(bytes_of(p) for p in params if "master_param" not in optimizer.state[p])  # as part of its master
    moved = 2 * kept + read + sum(bytes_of(p) + bytes_of(p.grad) for p in params)
    step: Callable[[], Any] = optimizer.step
    if replayed:
        step()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            optimizer.step()
        step = lambda held=(params, optimizer): graph.replay()  # noqa: E731  the graph reads and writes these
    name = f"ours, {recipe}, {states}" + (", from a CUDA graph" if replayed else "")
    name += "" if by == "Adam" else f", {by}"
    return Case(name, step, moved, is_right)


def other(name: str, make: Any, shapes: list[Shape], device: str, dtype: torch.dtype) -> Case:
    """An optimizer of plain parameters and gradients of a dtype."""
    if make is None:
        return Case(name, None)
    params = with_gradients([nn.Parameter(w.to(dtype)) for w in weights(shapes, device)], dtype)
    optimizer = make(params)
    optimizer.step()  # which makes the states
    states = sum(bytes_of(t) for state in optimizer.state.values() for t in state.values() if isinstance(t, Tensor))
    return Case(name, optimizer.step, 2 * states + sum(2 * bytes_of(p) + bytes_of(p.grad) for p in params))


def cases(shapes: list[Shape], device: str) -> dict[str, Callable[[], Case]]:
    """By name; each as a function, so that what one needs is freed before the next."""

    def kept(recipe: str, states: str) -> Callable[[], Case]:
        return lambda: ours(recipe, shapes, device, states)

    fp8 = "fp32 masters, fp8 moments"
    found = {f"ours {recipe}": lambda recipe=recipe: ours(recipe, shapes, device) for recipe in OURS}
    found |= {f"ours {recipe} fp8": kept(recipe, fp8) for recipe in ("delayed", "mxfp8")}
    found |= {f"ours {recipe} lean8": kept(recipe, "lean8") for recipe in ("current", "delayed", "block", "mxfp8")}
    found["ours current lion"] = lambda: ours("current", shapes, device, by="Lion")
    if device == "cuda":
        found["ours delayed graph"] = lambda: ours("delayed", shapes, device, replayed=True)
    adamw = lambda params: torch.optim.AdamW(params, lr=1e-5, weight_decay=0.1, fused=True)  # noqa: E731
    found["torch"] = lambda: other("torch AdamW(fused=True), fp32", adamw, shapes, device, torch.float32)
    for name, make in (("AdamWFp8", AdamWFp8), ("AdamW8bit", AdamW8bit)):
        found[f"torchao {name}"] = lambda name=name, make=make: other(
            f"torchao {name}, bf16", make, shapes, device, torch.bfloat16
        )
    return found


def copy_rate(numel: int, device: str, repeats: int) -> float:
    """Bytes a millisecond of copying as many bfloat16 numbers."""
    x = torch.randn(numel, device=device, dtype=torch.bfloat16)
    y = torch.empty_like(x)
    return 2 * bytes_of(x) / statistics.median(milliseconds(lambda: y.copy_(x), repeats, device))


def measure(shapes: list[Shape], device: str, repeats: int, only: str = "") -> dict[str, dict[str, Any]]:
    """Time all cases whose name has `only` in it, print a row for each, and return what was found."""
    count = sum(rows * cols for rows, cols in shapes)
    rate = copy_rate(count, device, repeats)
    copying = f"a copy moves {rate / 1e9:.2f} TB/s"
    print(f"{len(shapes)} weights, {count:,} parameters, medians of {repeats}; {copying}\n")
    columns = ("optimizer", "ms (min, max)", "Gparam/s", "bytes a parameter", "of copy", "oracle's bits")
    print("| " + " | ".join(columns) + " |\n|" + "---|" * len(columns))
    results: dict[str, dict[str, Any]] = {}
    for key, make in cases(shapes, device).items():
        if only not in key:
            continue
        case = make()
        if case.step is None:
            print(f"| {case.name} | cannot be imported | | | | |", flush=True)
            continue
        times = milliseconds(case.step, repeats, device)
        middle = statistics.median(times)
        of_copy = case.moved / middle / rate
        results[case.name] = {
            "ms": times, "parameters": count, "bytes": case.moved, "of copy": of_copy, "right": case.is_right
        }  # fmt: skip
        right = "" if case.is_right is None else case.is_right
        print(
            f"| {case.name} | {middle:.3f} ({min(times):.3f}, {max(times):.3f}) | {count / middle / 1e6:.1f} | "
            f"{case.moved / count:.2f} | {of_copy:.0%} | {right} |",
            flush=True,
        )
        del case
        if device == "cuda":
            torch.cuda.empty_cache()
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scale", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--only", default="", help="a word of the cases to run, such as ours, fp8, mxfp8, torchao")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    name = torch.cuda.get_device_name() if device == "cuda" else "CPU, in plain PyTorch"
    print(f"## {name}, torch {torch.__version__}, {datetime.date.today()}\n")
    shapes = [(rows // given.scale, cols // given.scale) for rows, cols in BLOCK] * BLOCKS
    results = measure(shapes, device, given.repeats, given.only)
    if given.json:
        given.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
