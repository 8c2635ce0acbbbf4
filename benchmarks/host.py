"""Measure what a module costs the host: time to launch it, and how many calls, operations, kernels, copies and waits.

    python benchmarks/host.py [--modules linear,layer,llama,llama-fused] [--recipes bf16,current,delayed,block]
        [--hidden 2048] [--accumulate 4096x14336,4096x4096]

A row is forward and backward of one module; "bf16" is the same module in plain PyTorch. "llama" is a decoder layer of
transformers converted by `quantshard.convert`, "llama-fused" with modules="fused".

Columns: median microseconds to launch forward and backward; Python calls and ATen operations, counted in separate
passes by a profile hook and a dispatch mode; kernel launches, copies and waits of the CUDA runtime, from
torch.profiler; memory allocations. Without a GPU, Triton launches and scaled GEMMs do nothing (`without_device`):
times are then only of Python and dispatch, and counts repeat exactly.

With --accumulate: forward and backward of four micro-batches of 8192 tokens through a linear layer of each shape (out x
in features), whose gradients accumulate in BF16 `grad`, in float32 after each backward as training loops do it, or in
`main_grad` with `fuse_wgrad_accumulation`. Columns: device and host milliseconds, and the peak of memory above weights
and inputs.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib.util
import os
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

if not torch.cuda.is_available():
    # Triton reads this when kernels are imported; without it there are no kernels on a CPU.
    os.environ.setdefault("TRITON_INTERPRET", "1")

import quantshard as qs
from benchmarks.harness import DEVICE, GIB, make_parser, milliseconds, synchronize, table_head, table_row
from quantshard import kernel_dispatch, private_torch
from quantshard.gemm import hardware
from quantshard.gemm.hardware import ScaledProduct

TOKENS = (512, 1)
"""Length and batch."""
REPEATS = 20
WARMUP = 5
RUNTIME_CALLS = {
    "launches": ("cudaLaunchKernel", "cuLaunchKernel"),
    "copies": ("cudaMemcpy",),
    "waits": ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize"),
}
"""Prefixes of the CUDA runtime functions in each column."""
OUT_DTYPE = 7
"""Position of the output dtype among the arguments of a scaled GEMM, after the two operands."""

Row = dict[str, Any]


class PlainLayer(nn.Module):
    """A Llama layer in plain PyTorch, without rotary embedding."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.heads, ffn = hidden // 64, 4 * hidden
        self.norms = nn.ModuleList(nn.RMSNorm(hidden, dtype=torch.bfloat16) for _ in range(2))
        shapes = {"qkv": (hidden, 3 * hidden), "out": (hidden, hidden), "up": (hidden, 2 * ffn), "down": (ffn, hidden)}
        self.linear = nn.ModuleDict({name: plain_linear(*shape) for name, shape in shapes.items()})

    def forward(self, x: Tensor) -> Tensor:
        length, batch, hidden = x.shape
        qkv = self.linear["qkv"](self.norms[0](x)).view(length, batch, 3, self.heads, 64).permute(2, 1, 3, 0, 4)
        attention = nn.functional.scaled_dot_product_attention(*qkv, is_causal=True).permute(2, 0, 1, 3)
        x = x + self.linear["out"](attention.reshape(length, batch, hidden))
        gate, up = self.linear["up"](self.norms[1](x)).chunk(2, dim=-1)
        return x + self.linear["down"](nn.functional.silu(gate) * up)


def plain_linear(inputs: int, outputs: int) -> nn.Module:
    return nn.Linear(inputs, outputs, bias=False, dtype=torch.bfloat16)


def our_linear(hidden: int) -> nn.Module:
    return qs.Linear(hidden, hidden, bias=False, params_dtype=torch.bfloat16)


def our_layer(hidden: int) -> nn.Module:
    return qs.TransformerLayer(
        hidden, 4 * hidden, hidden // 64, normalization="RMSNorm", activation="swiglu", bias=False,
        hidden_dropout=0.0, attention_dropout=0.0, params_dtype=torch.bfloat16,
    )  # fmt: skip


class LlamaLayer(nn.Module):
    """A decoder layer of transformers, with the position embeddings that its model would pass."""

    def __init__(self, hidden: int) -> None:
        from transformers import LlamaConfig
        from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

        super().__init__()
        config = LlamaConfig(
            hidden_size=hidden, intermediate_size=4 * hidden, num_attention_heads=hidden // 64,
            num_key_value_heads=hidden // 64, attn_implementation="sdpa", use_cache=False,
        )  # fmt: skip
        self.layer = LlamaDecoderLayer(config, 0).to(torch.bfloat16)
        positions = torch.arange(TOKENS[0])[None]
        angles = LlamaRotaryEmbedding(config)(torch.empty(1, dtype=torch.bfloat16), positions)
        self.cos, self.sin = (nn.Buffer(part, persistent=False) for part in angles)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x.transpose(0, 1), position_embeddings=(self.cos, self.sin))
        return out.transpose(0, 1)


Maker = Callable[[int], nn.Module]

MODULES: dict[str, tuple[Maker, Maker]] = {
    "linear": (lambda hidden: plain_linear(hidden, hidden), our_linear),
    "layer": (PlainLayer, our_layer),
}
"""By name: makers of the plain PyTorch module and of quantshard's, by width."""
CONVERTED: dict[str, tuple[Maker, str]] = {"llama": (LlamaLayer, "linear"), "llama-fused": (LlamaLayer, "fused")}
"""By name: the maker of a transformers module, and `modules=` for `quantshard.convert`."""


def make_module(module: str, recipe: str, hidden: int, device: str) -> nn.Module:
    """Make a module of `MODULES` or `CONVERTED`, in plain PyTorch if the recipe is "bf16"."""
    with torch.device(device):
        if module in CONVERTED:
            maker, modules = CONVERTED[module]
            model = maker(hidden)
            if recipe != "bf16":
                qs.convert(model, recipe, modules=modules)
            return model
        plain, ours = MODULES[module]
        if recipe == "bf16":
            return plain(hidden)
        with qs.quantized_model_init(recipe=recipe):
            return ours(hidden)


@contextlib.contextmanager
def without_device() -> Iterator[Counter[str]]:
    """Replace kernels and scaled GEMMs by empty functions on CPU tensors; yields a counter of their launches."""
    from triton.runtime import interpreter

    launch_counter: Counter[str] = Counter()

    def launch(*args: Any, **kwargs: Any) -> None:
        launch_counter["launches"] += 1

    def scaled_mm(a: Tensor, b: Tensor, *args: Any) -> Tensor:
        launch_counter["launches"] += 1
        return a.new_empty((a.shape[0], b.shape[1]), dtype=args[OUT_DTYPE])

    with contextlib.ExitStack() as stack:
        stack.enter_context(kernel_dispatch.kernels_only_on("cpu"))
        stack.enter_context(
            mock.patch.object(interpreter.InterpretedFunction, "__getitem__", lambda kernel, grid: launch)
        )
        stack.enter_context(mock.patch.object(private_torch, "scaled_mm", scaled_mm))
        stack.enter_context(mock.patch.object(ScaledProduct, "is_of", lambda product, capability: True))
        # A device without a capability would read operands in float32.
        capability_of = functools.cache(lambda device: (9, 0))
        stack.enter_context(mock.patch.object(hardware, "capability_of", capability_of))
        yield launch_counter


class _Operations(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return function(*args, **(kwargs or {}))


class Subject:
    """A module with a recipe, an input and an output gradient."""

    def __init__(self, module: str, recipe: str, hidden: int, device: str) -> None:
        self.device = device
        torch.manual_seed(0)
        self.module = make_module(module, recipe, hidden, device)
        # The forward of converted modules enters its recipe by itself.
        self.recipe = None if recipe == "bf16" or module in CONVERTED else recipe
        self.x = torch.randn(*TOKENS, hidden, dtype=torch.bfloat16, device=device, requires_grad=True)
        self.grad = torch.randn_like(self.x)

    def forward(self) -> Tensor:
        with contextlib.nullcontext() if self.recipe is None else qs.autocast(recipe=self.recipe):
            return self.module(self.x)

    def step(self) -> None:
        self.forward().backward(self.grad)


def microseconds(subject: Subject, repeats: int) -> Row:
    """Return the median host times to launch forward and backward on an idle device."""
    forward_times, backward_times = [], []
    for _ in range(repeats):
        synchronize(subject.device)
        forward_start = time.perf_counter()
        y = subject.forward()
        forward_end = time.perf_counter()
        synchronize(subject.device)
        backward_start = time.perf_counter()
        y.backward(subject.grad)
        backward_end = time.perf_counter()
        forward_times.append((forward_end - forward_start) * 1e6)
        backward_times.append((backward_end - backward_start) * 1e6)
    times = {"forward us": forward_times, "backward us": backward_times}
    return {name: round(statistics.median(values)) for name, values in times.items()}


@contextlib.contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Disable garbage collection, so that freeing earlier objects (weak reference callbacks) adds no Python calls."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def counts(subject: Subject, launch_counter: Counter[str]) -> Row:
    """Count Python calls, ATen operations and device requests of a step."""
    calls = 0

    def count_call(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        # Lookups in a cache call __eq__ on equal keys of earlier modules.
        calls += event == "call" and frame.f_code.co_name != "__eq__"

    # Without multithreading, backward runs on this thread.
    with torch.autograd.set_multithreading_enabled(False), without_garbage_collection():
        sys.setprofile(count_call)
        subject.step()
        sys.setprofile(None)
        with _Operations() as operations:
            subject.step()
    row = {"calls": calls, "operations": operations.count}
    if subject.device == "cuda":
        return row | _runtime_counts(subject)
    launch_counter.clear()
    subject.step()
    return row | {"launches": launch_counter["launches"]}


def _runtime_counts(subject: Subject) -> Row:
    kinds = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    allocated = torch.cuda.memory_stats()["allocation.all.allocated"]
    with torch.profiler.profile(activities=kinds) as profile:
        subject.step()
        allocated = torch.cuda.memory_stats()["allocation.all.allocated"] - allocated
    events = Counter({event.key: event.count for event in profile.key_averages()})
    row = {
        name: sum(count for key, count in events.items() if key.startswith(prefixes))
        for name, prefixes in RUNTIME_CALLS.items()
    }
    return row | {"allocations": allocated}


def measure(module: str, recipe: str, hidden: int, repeats: int = REPEATS) -> Row:
    """Measure one row of the table."""
    with contextlib.nullcontext(Counter()) if DEVICE == "cuda" else without_device() as launch_counter:
        subject = Subject(module, recipe, hidden, DEVICE)
        for _ in range(WARMUP):
            subject.step()
        times = microseconds(subject, repeats)
        return {"module": module, "recipe": recipe, **times, **counts(subject, launch_counter)}


# Micro-batches --------------------------------------------------------------------------------------------------------

MICRO_BATCHES, MICRO_BATCH_TOKENS = 4, 8192
ACCUMULATIONS = ("grad", "grad added in float32", "main_grad")


def accumulate(recipe: str, shape: tuple[int, int], how: str, tokens: int = MICRO_BATCH_TOKENS) -> Row:
    """Measure micro-batches that accumulate the gradient of one weight."""
    rows, cols = shape
    with (
        torch.device(DEVICE),
        qs.quantized_model_init(enabled=recipe != "bf16", recipe=recipe.replace("bf16", "current")),
    ):
        layer = qs.Linear(
            cols, rows, bias=False, params_dtype=torch.bfloat16, fuse_wgrad_accumulation=how == "main_grad"
        )
        x, dy = (torch.randn(tokens, size, dtype=torch.bfloat16) for size in (cols, rows))
    x.requires_grad_()
    weight: Any = layer.weight
    if how != "grad":
        weight.main_grad = torch.zeros(rows, cols, device=DEVICE)

    def step() -> None:
        for _ in range(MICRO_BATCHES):
            with qs.autocast(enabled=recipe != "bf16", recipe=recipe.replace("bf16", "current")):
                layer(x).backward(dy)
            if how == "grad added in float32":
                weight.main_grad.add_(weight.grad)
                weight.grad = None
            x.grad = None
        weight.grad = None

    times, host = milliseconds(step, REPEATS, DEVICE), []
    for _ in range(REPEATS):
        synchronize(DEVICE)
        start = time.perf_counter()
        step()
        host.append((time.perf_counter() - start) * 1e3)
    peak = 0.0
    if DEVICE == "cuda":
        before = torch.cuda.memory_allocated() - (0 if how == "grad" else 4 * rows * cols)
        torch.cuda.reset_peak_memory_stats()
        step()
        peak = (torch.cuda.max_memory_allocated() - before) / GIB
    name = f"{rows}x{cols}"
    return {
        "shape": name, "recipe": recipe, "gradient": how, "ms": f"{statistics.median(times):.3f}",
        "host ms": f"{statistics.median(host):.3f}", "peak GiB": f"{peak:.3f}",
    }  # fmt: skip


def accumulation_rows(recipes: str, shapes: str) -> Iterator[Row]:
    for shape in shapes.split(","):
        rows, cols = map(int, shape.split("x"))
        for recipe in recipes.split(","):
            for how in ACCUMULATIONS:
                yield accumulate(recipe, (rows, cols), how)


def measured_rows(modules: str, recipes: str, hidden: int) -> Iterator[Row]:
    for module in modules.split(","):
        if module in CONVERTED and importlib.util.find_spec("transformers") is None:
            print(f"{module}: left out, transformers is not installed", file=sys.stderr)
            continue
        for recipe in recipes.split(","):
            yield measure(module, recipe, hidden)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--modules", default=",".join([*MODULES, *CONVERTED]))
    parser.add_argument("--recipes", default="bf16,current,delayed,block,rowwise,mxfp8,nvfp4")
    parser.add_argument("--hidden", type=int, default=2048 if torch.cuda.is_available() else 256)
    parser.add_argument("--accumulate", metavar="SHAPES", default="")
    options = parser.parse_args()
    if options.accumulate:
        rows = accumulation_rows(options.recipes, options.accumulate)
    else:
        rows = measured_rows(options.modules, options.recipes, options.hidden)
    for number, row in enumerate(rows):
        if number == 0:
            print(table_head(row))
        print(table_row(row.values()), flush=True)


if __name__ == "__main__":
    main()
