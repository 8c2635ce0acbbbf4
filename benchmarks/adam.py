"""Measure optimizer steps on this GPU: parameters per second, and memory throughput as a fraction of a device copy.

    python -m benchmarks.adam [--scale 1] [--repeats 20] [--only WORD] [--json FILE]

The parameters are the 28 linear weights of four Llama-3-8B blocks (872 million), with BF16 gradients; `--scale N`
divides rows and columns by N. quantshard's optimizers have float32 masters of quantized weights. PyTorch's fused AdamW
trains float32 parameters with float32 gradients, torchao's optimizers (if installed) BF16 parameters.

"bytes a parameter" counts what a step must move: gradients read once, states and parameters read and written,
quantized weights written. "of copy" is the throughput of these bytes relative to a copy. quantshard reads the gradients
a second time, to skip steps with non-finite gradients; only the time includes that. "oracle's bits" is the result of a
comparison with plain PyTorch on small weights before timing.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from benchmarks.harness import DEVICE, capture, heading, make_parser, milliseconds, spread, table_head, table_row
from quantshard.state_storage import PRESETS
from quantshard.tensor.quantized_tensor import QuantizedTensor
from tests.kernels.cases.base import Shape
from tests.kernels.cases.steps import step_case, stepped, weights, with_gradients

try:
    from torchao.optim import AdamW8bit, AdamWFp8
except ImportError:
    AdamW8bit = AdamWFp8 = None

BLOCK = [(4096, 4096), (1024, 4096), (1024, 4096), (4096, 4096), (14336, 4096), (14336, 4096), (4096, 14336)]
"""Weights of a Llama-3-8B block: query, key, value, output; gate, up, down."""
BLOCKS = 4
SMALL = [(130, 144), (131, 257), (16, 32)]
"""Weights on which steps are compared with plain PyTorch."""

RECIPES = ("delayed", "current", "block", "mxfp8", "nvfp4")
FP32_MOMENTS, FP8_MOMENTS = "fp32 masters, fp32 moments", "fp32 masters, fp8 moments"
STATES: dict[str, dict[str, Any]] = {
    FP32_MOMENTS: {},
    FP8_MOMENTS: {"exp_avg_dtype": torch.uint8, "exp_avg_sq_dtype": torch.uint8},
    **{name: {"preset": name} for name in PRESETS},
}
COLUMNS = ("optimizer", "ms (min, max)", "Gparam/s", "bytes a parameter", "of copy", "oracle's bits")


class Case(NamedTuple):
    """An optimizer to time.

    Args:
        step: takes a step (None: the optimizer cannot be imported).
        moved: bytes that a step must move.
        is_right: whether a step has the bits of plain PyTorch (None: not compared).
    """

    name: str
    step: Callable[[], Any] | None
    moved: int = 0
    is_right: bool | None = None


def stored_bytes(tensor: Tensor) -> int:
    """Return the bytes of a tensor, or of all tensors inside a tensor subclass."""
    if isinstance(tensor, QuantizedTensor):
        return sum(map(stored_bytes, tensor.quantized_storage.components.values()))
    if type(tensor) not in (Tensor, nn.Parameter) and hasattr(tensor, "__tensor_flatten__"):
        return sum(stored_bytes(getattr(tensor, name)) for name in tensor.__tensor_flatten__()[0])
    return tensor.numel() * tensor.itemsize


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    tensors: Iterable[Any] = (value for state in optimizer.state.values() for value in state.values())
    return sum(stored_bytes(value) for value in tensors if isinstance(value, Tensor))


def ours(
    recipe: str, shapes: list[Shape], device: str, states: str = FP32_MOMENTS, graph: bool = False, by: str = "Adam"
) -> Case:
    """Build a case of FusedAdam or Lion. `states`: a key of `STATES`; `graph`: replay the step as a CUDA graph."""
    arguments: dict[str, Any] = {"capturable": graph, "by": by, **STATES[states]}
    is_right = step_case(recipe, SMALL, device, **arguments).is_right()
    params, optimizer = stepped(recipe, shapes, device, **arguments)
    # A weight with a master is not read: the step computes it from the master.
    weights_read = sum(stored_bytes(p) for p in params if "master_param" not in optimizer.state[p])
    moved = 2 * state_bytes(optimizer) + weights_read + sum(stored_bytes(p) + stored_bytes(p.grad) for p in params)
    step: Callable[[], Any] = optimizer.step
    if graph:
        step()
        replay = capture(optimizer.step)
        step = lambda alive=(params, optimizer): replay()  # noqa: E731  the graph uses their memory
    name = f"ours, {recipe}, {states}" + ", from a CUDA graph" * graph + ("" if by == "Adam" else f", {by}")
    return Case(name, step, moved, is_right)


def other(name: str, make: Any, shapes: list[Shape], device: str, dtype: torch.dtype) -> Case:
    """Build a case of another library's optimizer, with plain parameters and gradients of a dtype."""
    if make is None:
        return Case(name, None)
    params = with_gradients([nn.Parameter(w.to(dtype)) for w in weights(shapes, device)], dtype)
    optimizer = make(params)
    optimizer.step()  # creates the states
    parameter_bytes = sum(2 * stored_bytes(p) + stored_bytes(p.grad) for p in params)
    return Case(name, optimizer.step, 2 * state_bytes(optimizer) + parameter_bytes)


def cases(shapes: list[Shape], device: str) -> dict[str, Callable[[], Case]]:
    """Return factories of all cases by key, so that a case is freed before the next is built."""

    def ours_factory(recipe: str, **arguments: Any) -> Callable[[], Case]:
        return lambda: ours(recipe, shapes, device, **arguments)

    def other_factory(name: str, make: Any, dtype: torch.dtype) -> Callable[[], Case]:
        return lambda: other(name, make, shapes, device, dtype)

    adamw = lambda params: torch.optim.AdamW(params, lr=1e-5, weight_decay=0.1, fused=True)  # noqa: E731
    factories = {f"ours {recipe}": ours_factory(recipe) for recipe in RECIPES}
    factories |= {f"ours {recipe} fp8": ours_factory(recipe, states=FP8_MOMENTS) for recipe in ("delayed", "mxfp8")}
    for recipe in ("current", "delayed", "block", "mxfp8"):
        factories[f"ours {recipe} lean8"] = ours_factory(recipe, states="lean8")
    factories["ours current lion"] = ours_factory("current", by="Lion")
    if device == "cuda":
        factories["ours delayed graph"] = ours_factory("delayed", graph=True)
    factories["torch"] = other_factory("torch AdamW(fused=True), fp32", adamw, torch.float32)
    for name, make in (("AdamWFp8", AdamWFp8), ("AdamW8bit", AdamW8bit)):
        factories[f"torchao {name}"] = other_factory(f"torchao {name}, bf16", make, torch.bfloat16)
    return factories


def copy_rate(numel: int, device: str, repeats: int) -> float:
    """Return the bytes per millisecond of copying this many BF16 elements."""
    x = torch.randn(numel, device=device, dtype=torch.bfloat16)
    y = torch.empty_like(x)
    return 2 * stored_bytes(x) / statistics.median(milliseconds(lambda: y.copy_(x), repeats, device))


def measure(shapes: list[Shape], device: str, repeats: int, only: str = "") -> dict[str, dict[str, Any]]:
    """Time the cases with `only` in their key, print a row for each, and return the results by name."""
    count = sum(rows * cols for rows, cols in shapes)
    rate = copy_rate(count, device, repeats)
    print(f"{len(shapes)} weights, {count:,} parameters, medians of {repeats}; a copy moves {rate / 1e9:.2f} TB/s\n")
    print(table_head(COLUMNS))
    results: dict[str, dict[str, Any]] = {}
    for key, make_case in cases(shapes, device).items():
        if only not in key:
            continue
        case = make_case()
        if case.step is None:
            print(table_row([case.name, "cannot be imported", *[""] * 4]), flush=True)
            continue
        times = milliseconds(case.step, repeats, device)
        middle = statistics.median(times)
        of_copy = case.moved / middle / rate
        results[case.name] = {
            "ms": times, "parameters": count, "bytes": case.moved, "of copy": of_copy, "right": case.is_right
        }  # fmt: skip
        cells = [case.name, spread(times, 3), f"{count / middle / 1e6:.1f}", f"{case.moved / count:.2f}"]
        cells += [f"{of_copy:.0%}", "" if case.is_right is None else str(case.is_right)]
        print(table_row(cells), flush=True)
        del case
        if device == "cuda":
            torch.cuda.empty_cache()
    return results


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--scale", type=int, default=1, help="divide rows and columns by this")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--only", default="", help="run cases whose key contains this, such as ours, fp8, torchao")
    parser.add_argument("--json", type=Path, help="also write all times to this file")
    options = parser.parse_args()
    print(f"{heading(DEVICE)}\n")
    shapes = [(rows // options.scale, cols // options.scale) for rows, cols in BLOCK] * BLOCKS
    results = measure(shapes, DEVICE, options.repeats, options.only)
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
