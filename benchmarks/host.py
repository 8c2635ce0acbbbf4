"""What a module costs the host: microseconds to launch it, and how many calls, operations, kernels, copies and waits.

    python benchmarks/host.py [--modules linear,layer,llama,llama-fused] [--recipes bf16,current,delayed,block]
        [--hidden 2048]
    python benchmarks/host.py --launches [--recipes current,delayed,block]

Forward and backward of one module, behind which nothing waits; "bf16" is the same module of plain PyTorch. "llama" is a
decoder layer of transformers that `quantshard.convert` converted, "llama-fused" with modules="fused". Python calls
and ATen operations are counted in a run of their own, with the profiler's hook of Python and a dispatch mode; kernels,
copies and waits are those that torch.profiler sees of the CUDA runtime. Without a GPU the launches of Triton and scaled
products do nothing (`without_device`): times are then those of Python and dispatch alone, which counts repeat exactly.

With --launches, on a GPU, instead: what one launch of each kernel of a layer costs the host, in microseconds, by
Triton's `kernel[grid](...)` and by `quantshard.kernels.launch`.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import importlib.util
import os
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # kernels are then there without a GPU; read when they are imported

import quantshard as qs
from quantshard import kernel_dispatch, private_torch
from quantshard.gemm import hardware
from quantshard.gemm.hardware import ScaledProduct

TOKENS = (512, 1)
"""Length and batch."""
REPEATS = 20
COUNTED = {
    "launches": ("cudaLaunchKernel", "cuLaunchKernel"),
    "copies": ("cudaMemcpy",),
    "waits": ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize"),
}
"""What of the CUDA runtime is counted, by the beginnings of names."""

OUT_DTYPE = 7
"""Which argument of a scaled product says its dtype, behind the two operands."""

Row = dict[str, Any]


class PlainLayer(nn.Module):
    """The blocks of a Llama layer in plain PyTorch, without rotary embedding."""

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
    """One decoder layer of transformers, with the cosines and sines that its model would give it."""

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
"""By name, the module of plain PyTorch and ours, of a width."""

CONVERTED: dict[str, tuple[Maker, str]] = {"llama": (LlamaLayer, "linear"), "llama-fused": (LlamaLayer, "fused")}
"""By name, a module of transformers and what `quantshard.convert` is to make of its layers (`modules=`)."""


def why_missing(module: str) -> str:
    """Why a module cannot be made here; "" if it can."""
    if module in CONVERTED and importlib.util.find_spec("transformers") is None:
        return "transformers is not installed"
    return ""


def made(module: str, recipe: str, hidden: int, device: str) -> nn.Module:
    """A module of `MODULES` or `CONVERTED`, plain if the recipe is "bf16"."""
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
    """Kernels and scaled products do nothing, on tensors of the CPU; yields how many kernels were launched."""
    from triton.runtime import interpreter

    counted: Counter[str] = Counter()

    def launch(*args: Any, **kwargs: Any) -> None:
        counted["launches"] += 1

    def product(a: Tensor, b: Tensor, *args: Any) -> Tensor:
        counted["launches"] += 1
        return a.new_empty((a.shape[0], b.shape[1]), dtype=args[OUT_DTYPE])

    with contextlib.ExitStack() as stack:
        stack.enter_context(kernel_dispatch.kernels_only_on("cpu"))
        stack.enter_context(
            mock.patch.object(interpreter.InterpretedFunction, "__getitem__", lambda kernel, grid: launch)
        )
        stack.enter_context(mock.patch.object(private_torch, "scaled_mm", product))
        stack.enter_context(mock.patch.object(ScaledProduct, "is_of", lambda product, capability: True))
        known = functools.cache(lambda device: (9, 0))  # any GPU's: operands of other devices are read in float32
        stack.enter_context(mock.patch.object(hardware, "capability_of", known))
        yield counted


class _Operations(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return function(*args, **(kwargs or {}))


class Subject:
    """One module and recipe, and its forward and backward."""

    def __init__(self, module: str, recipe: str, hidden: int, device: str) -> None:
        self.device = device
        torch.manual_seed(0)
        self.module = made(module, recipe, hidden, device)
        self.recipe = None if recipe == "bf16" or module in CONVERTED else recipe  # whose forward enters its own
        self.x = torch.randn(*TOKENS, hidden, dtype=torch.bfloat16, device=device, requires_grad=True)
        self.grad = torch.randn_like(self.x)

    def forward(self) -> Tensor:
        with contextlib.nullcontext() if self.recipe is None else qs.autocast(recipe=self.recipe):
            return self.module(self.x)

    def step(self) -> None:
        self.forward().backward(self.grad)

    def wait(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()


def microseconds(subject: Subject, repeats: int) -> Row:
    """Medians of the host's time to launch forward and backward; the device has nothing else to do."""
    found: dict[str, list[float]] = {"forward us": [], "backward us": []}
    for _ in range(repeats):
        subject.wait()
        begin = time.perf_counter()
        y = subject.forward()
        middle = time.perf_counter()
        subject.wait()
        again = time.perf_counter()
        y.backward(subject.grad)
        for name, value in zip(found, (middle - begin, time.perf_counter() - again), strict=True):
            found[name].append(value * 1e6)
    return {name: round(statistics.median(values)) for name, values in found.items()}


@contextlib.contextmanager
def without_garbage_collection() -> Iterator[None]:
    """What Python calls where it frees what others left, as the callbacks of weak references, is no call of a step."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def counts(subject: Subject, launched: Counter[str]) -> Row:
    """Python calls and ATen operations of a step, and what it asks of the device."""
    calls = 0

    def called(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event == "call" and frame.f_code.co_name != "__eq__"  # with equal keys that others left in a cache

    with torch.autograd.set_multithreading_enabled(False), without_garbage_collection():  # backward on this thread
        sys.setprofile(called)
        subject.step()
        sys.setprofile(None)
        with _Operations() as operations:
            subject.step()
    found = {"calls": calls, "operations": operations.count}
    if subject.device == "cuda":
        return found | _of_runtime(subject)
    launched.clear()
    subject.step()
    return found | {"launches": launched["launches"]}


def _of_runtime(subject: Subject) -> Row:
    kinds = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    allocated = torch.cuda.memory_stats()["allocation.all.allocated"]
    with torch.profiler.profile(activities=kinds) as profile:
        subject.step()
        allocated = torch.cuda.memory_stats()["allocation.all.allocated"] - allocated
    events = Counter({each.key: each.count for each in profile.key_averages()})
    seen = {
        name: sum(count for key, count in events.items() if key.startswith(begins)) for name, begins in COUNTED.items()
    }
    return seen | {"allocations": allocated}


def measure(module: str, recipe: str, hidden: int, repeats: int = REPEATS) -> Row:
    """One row of the table."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with contextlib.nullcontext(Counter()) if device == "cuda" else without_device() as launched:
        subject = Subject(module, recipe, hidden, device)
        for _ in range(5):
            subject.step()
        return {"module": module, "recipe": recipe, **microseconds(subject, repeats), **counts(subject, launched)}


def launches(step: Callable[[], None]) -> dict[str, tuple[Any, ...]]:
    """Of each kernel that a step launches, by its name: the kernel, a grid, arguments, and options."""
    from triton.runtime.jit import KernelInterface

    from quantshard.kernels import launch

    found: dict[str, tuple[Any, ...]] = {}
    real = KernelInterface.__getitem__

    def noted(kernel: Any, grid: tuple[int, ...]) -> Callable[..., Any]:
        def run(*args: Any, **options: Any) -> Any:
            found.setdefault(kernel.fn.__name__, (kernel, grid, args, options))
            return real(kernel, grid)(*args, **options)

        return run

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(KernelInterface, "__getitem__", noted))
        stack.enter_context(mock.patch.object(launch, "KNOWN_TRITON", False))  # each launch is Triton's own
        stack.enter_context(mock.patch.object(launch, "_VARIANTS", {}))
        step()
    return found


def host_time(call: Callable[[], object], repeats: int = 20, calls: int = 100) -> float:
    """Microseconds of a call, the least of some means; the device's queue holds the calls of one mean."""
    for _ in range(3):
        call()
    found = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(calls):
            call()
        found.append((time.perf_counter() - begin) / calls)
    torch.cuda.synchronize()
    return round(min(found) * 1e6, 1)


def triton_launch(kernel: Any, grid: tuple[int, ...], device: torch.device, *args: Any, **options: Any) -> None:
    """`launch_kernel` by Triton's own means."""
    with torch.cuda.device(device):
        kernel[grid](*args, **options)


def launch_times(recipe: str, hidden: int) -> Iterator[Row]:
    """Rows of the table of launches, of a layer under a recipe."""
    from quantshard.kernels.launch import launch_kernel

    device = torch.device("cuda", torch.cuda.current_device())
    subject = Subject("layer", recipe, hidden, "cuda")
    subject.step()
    for name, (kernel, grid, args, options) in launches(subject.step).items():
        plain, direct = (
            host_time(functools.partial(function, kernel, grid, device, *args, **options))
            for function in (triton_launch, launch_kernel)
        )
        yield {"recipe": recipe, "kernel": name, "arguments": len(args), "Triton us": plain, "direct us": direct}


def table(rows: Iterable[Row]) -> None:
    """Print rows as they come."""
    heads: list[str] = []
    for row in rows:
        if not heads:
            heads = list(row)
            print(f"| {' | '.join(heads)} |\n|{'---|' * len(heads)}")
        print(f"| {' | '.join(str(row[name]) for name in heads)} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--modules", default=",".join([*MODULES, *CONVERTED]))
    parser.add_argument("--recipes", default="bf16,current,delayed,block,rowwise,mxfp8,nvfp4")
    parser.add_argument("--hidden", type=int, default=2048 if torch.cuda.is_available() else 256)
    parser.add_argument("--launches", action="store_true", help="what one launch of each kernel costs; needs a GPU")
    asked = parser.parse_args()
    recipes = asked.recipes.split(",")
    if asked.launches:
        table(row for recipe in recipes if recipe != "bf16" for row in launch_times(recipe, asked.hidden))
        return
    modules = []
    for module in asked.modules.split(","):
        if reason := why_missing(module):
            print(f"{module}: left out, {reason}", file=sys.stderr)
        else:
            modules.append(module)
    table(measure(module, recipe, asked.hidden) for module in modules for recipe in recipes)


if __name__ == "__main__":
    main()
