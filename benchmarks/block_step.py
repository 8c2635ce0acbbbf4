"""Measure forward and backward of Llama-3-8B blocks: plain PyTorch in BF16, torchao's float8, and quantshard's recipes.

    python benchmarks/block_step.py [--only 'ours-*,bf16-compiled'] [--compile-ours] [--graph-ours] [--recompute-ours]
                                    [--store-ours] [--same-attention none] [--json FILE] [--profile NAME]

All variants of a table have the same weights, input and output gradient. They stay in memory together and take turns,
so that changing clocks affect all of them equally. Each one is first compared with BF16 in eager mode.

"ms" is the median time on the device, "host ms" the time that Python takes to launch a step. Memory is what a variant
has between steps (weights, input, output gradient, caches), and the most that a step adds, gradients included. Errors
are relative norms of the differences from BF16. In the first table each variant uses its default attention, in the
second all use one backend. Exits with 1 if an error exceeds its bound.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import quantshard as qs
from benchmarks.harness import (
    DEVICE,
    GIB,
    add_sizes,
    allocated_bytes,
    device_name,
    heading,
    make_parser,
    matches,
    synchronize,
    table_head,
    table_row,
    to_float8,
)
from quantshard import checkpoints

GRADIENTS_IN_FP8 = ("nvfp4/wgrad:current", "nvfp4/dgrad:current/wgrad:current")
"""NVFP4 with FP8 gradients. On GPUs without NVFP4 GEMMs wgrad is then native, dgrad is not."""
RECIPES = ("delayed", "current", "block", "rowwise", "mxfp8", "nvfp4", *GRADIENTS_IN_FP8, "bf16")
ATTENTION = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION, "math": SDPBackend.MATH}
BASELINES = ("bf16-compiled", "torchao-tensorwise")
REFERENCE = "bf16-eager"
STEPS_IN_TURN = 2


@dataclass(frozen=True)
class Shape:
    """Sizes of the blocks and of their input [batch, tokens, hidden]."""

    layers: int = 4
    hidden: int = 4096
    ffn: int = 14336
    heads: int = 32
    kv_heads: int = 8
    batch: int = 2
    tokens: int = 8192
    device: str = "cuda"

    @property
    def head(self) -> int:
        return self.hidden // self.heads


SIZES = {field.name: field.default for field in dataclasses.fields(Shape) if field.name != "device"}
"""Default sizes by name."""


class Variant(NamedTuple):
    """A model and how it runs.

    Args:
        family: "bf16", "torchao" or "ours".
        recomputes: quantshard's recompute_activation=True.
        graphed: uses CUDA graphs, by make_graphed_callables or, if compiled, mode="reduce-overhead".
        stores: quantshard's activation_storage="fp8".
    """

    family: str
    recipe: str
    compiled: bool
    recomputes: bool = False
    graphed: bool = False
    stores: bool = False

    @property
    def name(self) -> str:
        if self.family == "bf16":
            return "bf16-compiled" if self.compiled else "bf16-eager"
        suffixes = ("-compiled" if self.family == "ours" and self.compiled else "") + "-recomputed" * self.recomputes
        suffixes += "-graphed" * self.graphed + "-fp8-activations" * self.stores
        return f"{self.family}-{self.recipe}{suffixes}"

    @property
    def bound(self) -> float:
        """Largest relative error of output and gradients, compared with BF16."""
        if self.family == "bf16" or self.recipe == "bf16":
            return 0.05
        return 0.9 if self.recipe.startswith("nvfp4") else 0.3


def variants(
    compile_ours: bool = True, recompute_ours: bool = True, graph_ours: bool = True, store_ours: bool = True
) -> list[Variant]:
    plain = [Variant("bf16", "bf16", compiled) for compiled in (False, True)]
    torchao = [Variant("torchao", recipe, True) for recipe in ("tensorwise", "rowwise")]
    modes = [(False, False, False)] + [(True, False, False)] * compile_ours + [(False, True, False)] * recompute_ours
    modes += [(False, False, True)] * graph_ours + [(True, False, True)] * (compile_ours and graph_ours)
    ours = [Variant("ours", recipe, *mode) for recipe in RECIPES for mode in modes]
    return plain + torchao + ours + [variant._replace(stores=True) for variant in ours if store_ours]


# Models ---------------------------------------------------------------------------------------------------------------


class Block(nn.Module):
    """A block of Llama 3 in plain PyTorch."""

    def __init__(self, shape: Shape, attention: str | None) -> None:
        super().__init__()
        kv = shape.kv_heads * shape.head
        options: dict[str, Any] = {"bias": False, "dtype": torch.bfloat16, "device": shape.device}
        self.attention_norm = nn.RMSNorm(shape.hidden, 1e-5, dtype=torch.bfloat16, device=shape.device)
        self.q, self.o = (nn.Linear(shape.hidden, shape.hidden, **options) for _ in range(2))
        self.k, self.v = (nn.Linear(shape.hidden, kv, **options) for _ in range(2))
        self.mlp_norm = nn.RMSNorm(shape.hidden, 1e-5, dtype=torch.bfloat16, device=shape.device)
        self.gate, self.up = (nn.Linear(shape.hidden, shape.ffn, **options) for _ in range(2))
        self.down = nn.Linear(shape.ffn, shape.hidden, **options)
        self.head, self.attention = shape.head, attention

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        h = self.attention_norm(x)
        q, k, v = (f(h).unflatten(-1, (-1, self.head)).transpose(1, 2) for f in (self.q, self.k, self.v))
        q, k = (rotate(t, cos, sin) for t in (q, k))
        with nullcontext() if self.attention is None else sdpa_kernel([ATTENTION[self.attention]]):
            attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.o(attended.transpose(1, 2).flatten(-2))
        h = self.mlp_norm(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


def rotate(t: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = t.chunk(2, dim=-1)
    return t * cos + torch.cat((-b, a), dim=-1) * sin


class Plain(nn.Module):
    """Blocks in plain PyTorch. `attention`: a key of `ATTENTION` (None: PyTorch chooses)."""

    def __init__(self, shape: Shape, attention: str | None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(shape, attention) for _ in range(shape.layers))
        angles = qs.RotaryPositionEmbedding(shape.head)(shape.tokens, device=shape.device).flatten(1)
        self.register_buffer("cos", angles.cos().bfloat16())
        self.register_buffer("sin", angles.sin().bfloat16())

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, self.cos, self.sin)
        return x


class Ours(nn.Module):
    """Transformer layers of quantshard."""

    def __init__(
        self, shape: Shape, recipe: str, attention: str | None, recomputes: bool = False, stores: bool = False
    ) -> None:
        super().__init__()
        with qs.quantized_model_init(recipe=recipe):
            self.layers = nn.ModuleList(
                qs.TransformerLayer(
                    shape.hidden, shape.ffn, shape.heads, shape.kv_heads, hidden_dropout=0.0, attention_dropout=0.0,
                    params_dtype=torch.bfloat16, bias=False, normalization="RMSNorm", activation="swiglu",
                    fuse_qkv_params=True, qkv_weight_interleaved=False, attn_input_format="bshd",
                    attention_backend=attention or "auto", recompute_activation=recomputes, device=shape.device,
                    activation_storage="fp8" if stores else "high_precision",
                )
                for _ in range(shape.layers)
            )  # fmt: skip
        self.register_buffer("angles", qs.RotaryPositionEmbedding(shape.head)(shape.tokens, device=shape.device))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, rotary_pos_emb=self.angles)
        return x


PARTS = {
    "self_attention.layernorm_qkv.layer_norm_weight": ("attention_norm",),
    "self_attention.layernorm_qkv.weight": ("q", "k", "v"),
    "self_attention.proj.weight": ("o",),
    "layernorm_mlp.layer_norm_weight": ("mlp_norm",),
    "layernorm_mlp.fc1_gate_weight": ("gate",),
    "layernorm_mlp.fc1_up_weight": ("up",),
    "layernorm_mlp.fc2_weight": ("down",),
}
"""By parameter of a quantshard layer: the parameters of `Block` that it consists of."""


def parameter(model: nn.Module, layer: int, part: str) -> Tensor:
    """Return the weight of a module in a plain model."""
    return model.get_submodule(f"layers.{layer}.{part}").weight


@torch.no_grad()
def fill(model: nn.Module, shape: Shape) -> None:
    """Load the same random weights into any model."""
    generator = torch.Generator(shape.device).manual_seed(0)
    kv = shape.kv_heads * shape.head
    sizes = dict.fromkeys("qo", (shape.hidden, shape.hidden)) | dict.fromkeys("kv", (kv, shape.hidden))
    sizes |= dict.fromkeys(("gate", "up"), (shape.ffn, shape.hidden)) | {"down": (shape.hidden, shape.ffn)}
    sizes |= dict.fromkeys(("attention_norm", "mlp_norm"), (shape.hidden,))
    state = {}
    for layer in range(shape.layers):
        for name, parts in PARTS.items():
            values = [torch.randn(sizes[part], generator=generator, device=shape.device) for part in parts]
            values = [(v * v.shape[-1] ** -0.5 + (1 if v.ndim == 1 else 0)).bfloat16() for v in values]
            if isinstance(model, Ours):
                state[f"layers.{layer}.{name}"] = torch.cat(values)
            else:
                for part, value in zip(parts, values, strict=True):
                    parameter(model, layer, part).copy_(value)
    if isinstance(model, Ours):
        checkpoints.load_high_precision(model, state)


def gradient(model: nn.Module, layer: int, name: str) -> Tensor:
    """Return the gradient of a quantshard parameter, or of the plain parameters that it consists of."""
    if isinstance(model, Ours):
        grad = model.get_parameter(f"layers.{layer}.{name}").grad
        assert grad is not None
        return grad
    return torch.cat([parameter(model, layer, part).grad for part in PARTS[name]])


class Subject:
    """A variant that is ready to step."""

    def __init__(self, variant: Variant, shape: Shape, attention: str | None, compiler: str) -> None:
        allocated = allocated_bytes(shape.device)
        self.variant, self.shape = variant, shape
        self.model: nn.Module = Plain(shape, attention)
        if variant.family == "ours":
            self.model = Ours(shape, variant.recipe, attention, variant.recomputes, variant.stores)
        fill(self.model, shape)
        if variant.family == "torchao":
            to_float8(self.model, variant.recipe, shape.device)
        self.call: Callable[[Tensor], Tensor] = self.model
        if variant.compiled:
            mode = "reduce-overhead" if variant.graphed else None
            self.call = torch.compile(self.model, backend=compiler, mode=mode)
        self.x, self.dy = make_data(shape)
        if variant.graphed and not variant.compiled:
            graph_layers(self.model, self.x, variant.recipe)
        for _ in range(3):
            self.step()
            self.clear()
        gc.collect()
        self.resident_bytes = allocated_bytes(shape.device) - allocated

    def step(self) -> Tensor:
        with qs.autocast(recipe=self.variant.recipe) if self.variant.family == "ours" else nullcontext():
            y = self.call(self.x)
        y.backward(self.dy)
        return y.detach()

    def clear(self) -> None:
        self.model.zero_grad(set_to_none=True)
        self.x.grad = None


def graph_layers(model: nn.Module, x: Tensor, recipe: str) -> None:
    """Replace forward and backward of each quantshard layer by CUDA graphs."""
    layers = list(model.layers)
    kwargs = {"rotary_pos_emb": model.angles}
    qs.make_graphed_callables(layers, [(x,)] * len(layers), sample_kwargs=[kwargs] * len(layers), recipe=recipe)


def make_data(shape: Shape) -> tuple[Tensor, Tensor]:
    """Draw the input and the output gradient."""
    generator = torch.Generator(shape.device).manual_seed(1)
    size = (shape.batch, shape.tokens, shape.hidden)
    x, dy = (torch.randn(size, generator=generator, device=shape.device).bfloat16() for _ in range(2))
    return x.requires_grad_(), dy


# Measurements ---------------------------------------------------------------------------------------------------------


def outputs(subject: Subject) -> dict[str, Tensor]:
    """Return output and gradients of a step, without the part that residual connections pass through."""
    tensors = {"y": subject.step().float() - subject.x.detach().float()}
    assert subject.x.grad is not None
    tensors["dx"] = subject.x.grad.float() - subject.dy.float()
    for layer in range(subject.shape.layers):
        tensors |= {f"{layer}.{name}": gradient(subject.model, layer, name) for name in PARTS}
    subject.clear()
    return tensors


def errors(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float]:
    """Return relative errors of output and input gradient, and the largest one of the weights' gradients."""
    by_name = {
        name: float((tensor.float() - actual[name].float()).norm() / tensor.float().norm())
        for name, tensor in expected.items()
    }
    # Unlike Python's max, Tensor.max returns a NaN.
    weights = torch.tensor([error for name, error in by_name.items() if name not in ("y", "dx")])
    return {"y": by_name["y"], "dx": by_name["dx"], "dw": float(weights.max())}


def take_turn(subject: Subject, steps: int) -> dict[str, list[float]]:
    """Return milliseconds of steps on the device and to launch them, and the bytes that the first one added."""
    is_gpu = subject.shape.device == "cuda"
    if is_gpu:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    allocated = allocated_bytes(subject.shape.device)
    subject.step()  # untimed: the hardware caches are filled by another variant
    added = (torch.cuda.max_memory_allocated() if is_gpu else 0) - allocated
    subject.clear()
    device_times, host_times = [], []
    events = [
        (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(steps * is_gpu)
    ]
    for index in range(steps):
        start = time.perf_counter()
        if is_gpu:
            events[index][0].record()
        subject.step()
        if is_gpu:
            events[index][1].record()
        host_times.append((time.perf_counter() - start) * 1e3)
        subject.clear()
    if is_gpu:
        torch.cuda.synchronize()
        device_times = [start.elapsed_time(end) for start, end in events]
    return {"ms": device_times or host_times, "host ms": host_times, "added": [float(added)]}


def measure(
    selected: list[Variant], shape: Shape, attention: str | None, repeats: int, compiler: str = "inductor"
) -> dict[str, dict[str, Any]]:
    """Return times, memory and errors by variant."""
    results: dict[str, dict[str, Any]] = {}
    subjects: list[Subject] = []
    torch._dynamo.reset()
    # The limit is per function, which all models of a class share.
    torch._dynamo.config.recompile_limit = 64
    eager = Subject(Variant("bf16", "bf16", False), shape, attention, compiler)
    expected = outputs(eager)
    for variant in selected:
        start = time.perf_counter()
        try:
            subject = eager if variant.name == REFERENCE else Subject(variant, shape, attention, compiler)
        except ImportError as error:
            print(f"- {variant.name}: skipped, {error}", flush=True)
            continue
        variant_errors = errors(outputs(subject), expected)
        is_right = all(error <= variant.bound for error in variant_errors.values())
        results[variant.name] = {"errors": variant_errors, "right": is_right, "kept": subject.resident_bytes}
        subjects.append(subject)
        text = ", ".join(f"{name} {error:.4f}" for name, error in variant_errors.items())
        print(f"- {variant.name}: built in {time.perf_counter() - start:.0f} s, off by {text}", flush=True)
    del eager, expected
    gc.collect()
    for _ in range(-(repeats // -STEPS_IN_TURN)):
        for subject in subjects:
            for name, values in take_turn(subject, STEPS_IN_TURN).items():
                results[subject.variant.name].setdefault(name, []).extend(values)
    return results


def print_table(results: dict[str, dict[str, Any]]) -> None:
    medians = {name: statistics.median(result["ms"]) for name, result in results.items()}
    baselines = [name for name in BASELINES if name in results]
    columns = ["variant", "ms", "min, max", "host ms", *(f"speed / {name}" for name in baselines)]
    print(table_head([*columns, "GiB kept + added by a step", "error of y, dx, weights' gradients"]))
    for name, result in results.items():
        times, resident, added = result["ms"], result["kept"] / GIB, max(result["added"]) / GIB
        cells = [name, f"{medians[name]:.2f}", f"{min(times):.2f}, {max(times):.2f}"]
        cells += [f"{statistics.median(result['host ms']):.1f}"]
        cells += [f"{medians[baseline] / medians[name]:.3f}" for baseline in baselines]
        cells += [f"{resident:.2f} + {added:.2f} = {resident + added:.2f}"]
        error_cell = ", ".join(f"{error:.3f}" for error in result["errors"].values())
        print(table_row([*cells, error_cell + ("" if result["right"] else " WRONG")]))


def profile_step(subject: Subject, rows: int = 25) -> list[str]:
    """List the kernels of one step that take the most time, and the time of the whole step."""
    from torch.profiler import ProfilerActivity, profile

    is_gpu = subject.shape.device == "cuda"
    with profile(activities=[ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * is_gpu]) as profiler:
        start = time.perf_counter()
        subject.step()
        synchronize(subject.shape.device)
        wall = (time.perf_counter() - start) * 1e3
    kind = torch.autograd.DeviceType.CUDA if is_gpu else torch.autograd.DeviceType.CPU
    kernels = [
        ((event.self_device_time_total if is_gpu else event.self_cpu_time_total) / 1e3, event.count, event.key)
        for event in profiler.key_averages()
        if event.device_type == kind and not event.is_user_annotation
    ]
    kernels.sort(reverse=True)
    total = sum(ms for ms, _, _ in kernels)
    lines = [f"{subject.variant.name}: {sum(n for _, n, _ in kernels)} kernels, {total:.2f} ms of {wall:.2f} ms"]
    return lines + [f"{ms:8.3f} ms {ms / total:6.1%} {n:5d} x {name[:110]}" for ms, n, name in kernels[:rows]]


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = make_parser(__doc__)
    parser.add_argument("--only", default="*", help="variants, as shell patterns separated by commas")
    parser.add_argument("--compile-ours", action="store_true", help="add quantshard under torch.compile")
    parser.add_argument("--graph-ours", action="store_true", help="add quantshard in CUDA graphs")
    parser.add_argument("--recompute-ours", action="store_true", help="add recompute_activation=True")
    parser.add_argument("--store-ours", action="store_true", help='add activation_storage="fp8"')
    parser.add_argument("--compiler", default="inductor", help="backend of torch.compile")
    parser.add_argument("--same-attention", default="", help="backend of the second table; 'none' skips that table")
    add_sizes(parser, SIZES)
    parser.add_argument("--device", default=DEVICE)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    parser.add_argument("--profile", help="only list the kernels of a step of this variant")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Return 0, or 1 if the gradients of a variant were wrong."""
    options = parse(arguments)
    shape = Shape(**{name: getattr(options, name) for name in SIZES}, device=options.device)
    print(f"{heading(shape.device, f'torchao {torchao_version()}')}\n\n{shape}\n")
    if options.profile:
        variant = next(variant for variant in variants() if variant.name == options.profile)
        print("\n".join(profile_step(Subject(variant, shape, None, options.compiler))))
        return 0
    available = variants(options.compile_ours, options.recompute_ours, options.graph_ours, options.store_ours)
    selected = [variant for variant in available if matches(variant.name, options.only)]
    same = options.same_attention or ("cudnn" if shape.device == "cuda" else "math")
    results = {}
    for title, attention in (("as shipped", None), (same, same)):
        if title == "none":
            continue
        print(f"### Attention: {title}\n", flush=True)
        results[title] = measure(selected, shape, attention, options.repeats, options.compiler)
        print()
        print_table(results[title])
        print(flush=True)
        gc.collect()
        if shape.device == "cuda":
            torch.cuda.empty_cache()
    if options.json:
        versions = {"torch": torch.__version__, "torchao": torchao_version(), "date": str(date.today())}
        run = {"device": device_name(shape.device), **versions, "shape": dataclasses.asdict(shape), "tables": results}
        options.json.write_text(json.dumps(run, indent=1))
    return int(any(not result["right"] for table in results.values() for result in table.values()))


def torchao_version() -> str:
    try:
        return version("torchao")
    except PackageNotFoundError:
        return "absent"


if __name__ == "__main__":
    sys.exit(main())
