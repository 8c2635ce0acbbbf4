"""Forward and backward of Llama-3-8B blocks: plain PyTorch in BF16, torchao's float8, and quantshard by recipe.

    python benchmarks/block_step.py [--only 'ours-*,bf16-compiled'] [--compile-ours] [--graph-ours] [--recompute-ours]
                                    [--json FILE] [--profile NAME]

All variants of a table have the same weights, input and gradient, stay in memory together, and take turns, so that
clocks drift under all of them alike. Every one is first checked: output and gradients beside those of BF16 in eager
mode. "host" is the time that Python takes to launch a step. Memory is what a variant holds between steps (weights,
input, gradient of the output, caches), and the most that a step adds, gradients included. In a first table each attends
as it does by default, in a second all by one backend.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import fnmatch
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import quantshard as qs
from quantshard import checkpoints

GRADIENTS_IN_FP8 = ("nvfp4/wgrad:current", "nvfp4/dgrad:current/wgrad:current")
"""NVFP4 with gradients quantized to FP8: wgrad is then native on GPUs that have no products of NVFP4, dgrad is not."""
RECIPES = ("delayed", "current", "block", "rowwise", "mxfp8", "nvfp4", *GRADIENTS_IN_FP8, "bf16")
ATTENTION = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION, "math": SDPBackend.MATH}
BASELINES = ("bf16-compiled", "torchao-tensorwise")
REFERENCE = "bf16-eager"
STEPS_IN_TURN = 2
GIB = 2.0**30


@dataclass(frozen=True)
class Shape:
    """Of the blocks and their input [batch, tokens, hidden]."""

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


class Variant(NamedTuple):
    """`name` is made of the others. `recomputes`: with recompute_activation=True. `graphed`: in CUDA graphs, by
    make_graphed_callables, or, where it is compiled too, by mode="reduce-overhead". `stores`: with
    activation_storage="fp8"."""

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
        more = ("-compiled" if self.family == "ours" and self.compiled else "") + "-recomputed" * self.recomputes
        more += "-graphed" * self.graphed + "-fp8-activations" * self.stores
        return f"{self.family}-{self.recipe}{more}"

    @property
    def bound(self) -> float:
        """How far output and gradients may be from BF16's, in the norm of each tensor."""
        if self.family == "bf16" or self.recipe == "bf16":
            return 0.05
        return 0.9 if self.recipe.startswith("nvfp4") else 0.3


def variants(compile_ours: bool, recompute_ours: bool, graph_ours: bool, store_ours: bool = False) -> list[Variant]:
    plain = [Variant("bf16", "bf16", compiled) for compiled in (False, True)]
    torchao = [Variant("torchao", recipe, True) for recipe in ("tensorwise", "rowwise")]
    ways = [(False, False, False)] + [(True, False, False)] * compile_ours + [(False, True, False)] * recompute_ours
    ways += [(False, False, True)] * graph_ours + [(True, False, True)] * (compile_ours and graph_ours)
    ours = [Variant("ours", recipe, *way) for recipe in RECIPES for way in ways]
    return plain + torchao + ours + [each._replace(stores=True) for each in ours if store_ours]


# The models


class Block(nn.Module):
    """A block of Llama 3 as it is usually written."""

    def __init__(self, shape: Shape, attention: str | None) -> None:
        super().__init__()
        kv = shape.kv_heads * shape.head
        made: dict[str, Any] = {"bias": False, "dtype": torch.bfloat16, "device": shape.device}
        self.attention_norm = nn.RMSNorm(shape.hidden, 1e-5, dtype=torch.bfloat16, device=shape.device)
        self.q, self.o = (nn.Linear(shape.hidden, shape.hidden, **made) for _ in range(2))
        self.k, self.v = (nn.Linear(shape.hidden, kv, **made) for _ in range(2))
        self.mlp_norm = nn.RMSNorm(shape.hidden, 1e-5, dtype=torch.bfloat16, device=shape.device)
        self.gate, self.up = (nn.Linear(shape.hidden, shape.ffn, **made) for _ in range(2))
        self.down = nn.Linear(shape.ffn, shape.hidden, **made)
        self.head, self.attention = shape.head, attention

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        h = self.attention_norm(x)
        q, k, v = (f(h).unflatten(-1, (-1, self.head)).transpose(1, 2) for f in (self.q, self.k, self.v))
        q, k = (rotated(t, cos, sin) for t in (q, k))
        with nullcontext() if self.attention is None else sdpa_kernel([ATTENTION[self.attention]]):
            attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.o(attended.transpose(1, 2).flatten(-2))
        h = self.mlp_norm(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


def rotated(t: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = t.chunk(2, dim=-1)
    return t * cos + torch.cat((-b, a), dim=-1) * sin


class Plain(nn.Module):
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
"""Ours -> which parameters of `Block` it is made of."""


def parameter(model: nn.Module, layer: int, part: str) -> Tensor:
    """A parameter of a plain model."""
    return model.get_submodule(f"layers.{layer}.{part}").weight


@torch.no_grad()
def fill(model: nn.Module, shape: Shape) -> None:
    """The same weights in any model."""
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
    """By the name that it has in ours."""
    if isinstance(model, Ours):
        found = model.get_parameter(f"layers.{layer}.{name}").grad
        assert found is not None
        return found
    return torch.cat([parameter(model, layer, part).grad for part in PARTS[name]])


class Subject:
    """A variant that is ready to step."""

    def __init__(self, variant: Variant, shape: Shape, attention: str | None, compiler: str) -> None:
        before = held(shape)
        self.variant, self.shape = variant, shape
        self.model: nn.Module = Plain(shape, attention)
        if variant.family == "ours":
            self.model = Ours(shape, variant.recipe, attention, variant.recomputes, variant.stores)
        fill(self.model, shape)
        if variant.family == "torchao":
            to_float8(self.model, variant.recipe, shape)
        self.call: Callable[[Tensor], Tensor] = self.model
        if variant.compiled:
            mode = "reduce-overhead" if variant.graphed else None
            self.call = torch.compile(self.model, backend=compiler, mode=mode)
        self.x, self.dy = data(shape)
        if variant.graphed and not variant.compiled:
            capture(self.model, self.x, variant.recipe)
        for _ in range(3):
            self.step()
            self.clear()
        gc.collect()
        self.kept = held(shape) - before

    def step(self) -> Tensor:
        with qs.autocast(recipe=self.variant.recipe) if self.variant.family == "ours" else nullcontext():
            y = self.call(self.x)
        y.backward(self.dy)
        return y.detach()

    def clear(self) -> None:
        self.model.zero_grad(set_to_none=True)
        self.x.grad = None


def capture(model: nn.Module, x: Tensor, recipe: str) -> None:
    """Make the forward and the backward of each layer of ours CUDA graphs."""
    layers = list(model.layers)
    kwargs = {"rotary_pos_emb": model.angles}
    qs.make_graphed_callables(layers, [(x,)] * len(layers), sample_kwargs=[kwargs] * len(layers), recipe=recipe)


def to_float8(model: nn.Module, recipe: str, shape: Shape) -> None:
    """Convert all linear layers of a model in place, as torchao does it.

    Raises:
        ImportError: torchao is not there.
    """
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = Float8LinearConfig.from_recipe_name(recipe)
    convert_to_float8_training(model, config=dataclasses.replace(config, emulate=shape.device == "cpu"))


def data(shape: Shape) -> tuple[Tensor, Tensor]:
    """Input and gradient of the output."""
    generator = torch.Generator(shape.device).manual_seed(1)
    size = (shape.batch, shape.tokens, shape.hidden)
    x, dy = (torch.randn(size, generator=generator, device=shape.device).bfloat16() for _ in range(2))
    return x.requires_grad_(), dy


# Measuring


def held(shape: Shape) -> int:
    return torch.cuda.memory_allocated() if shape.device == "cuda" else 0


def found_by(subject: Subject) -> dict[str, Tensor]:
    """Output and gradients of one step, without what the residual connections hand through."""
    found = {"y": subject.step().float() - subject.x.detach().float()}
    assert subject.x.grad is not None
    found["dx"] = subject.x.grad.float() - subject.dy.float()
    for layer in range(subject.shape.layers):
        found |= {f"{layer}.{name}": gradient(subject.model, layer, name) for name in PARTS}
    subject.clear()
    return found


def errors(found: dict[str, Tensor], reference: dict[str, Tensor]) -> dict[str, float]:
    """Of output and input gradient, and the largest of the weights' gradients: norm of the difference by the norm."""
    apart = {
        name: float((tensor.float() - found[name].float()).norm() / tensor.float().norm())
        for name, tensor in reference.items()
    }
    weights = torch.tensor([error for name, error in apart.items() if name not in ("y", "dx")])
    return {"y": apart["y"], "dx": apart["dx"], "dw": float(weights.max())}  # NaN wins


def turn(subject: Subject, steps: int) -> dict[str, list[float]]:
    """Milliseconds of steps, on the device and to launch them, and the most bytes that the first one added."""
    cuda = subject.shape.device == "cuda"
    if cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    before = held(subject.shape)
    subject.step()  # not counted: caches are another variant's
    added = (torch.cuda.max_memory_allocated() if cuda else 0) - before
    subject.clear()
    times, launches = [], []
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(steps * cuda)]
    for index in range(steps):
        start = time.perf_counter()
        if cuda:
            events[index][0].record()
        subject.step()
        if cuda:
            events[index][1].record()
        launches.append((time.perf_counter() - start) * 1e3)
        subject.clear()
    if cuda:
        torch.cuda.synchronize()
        times = [start.elapsed_time(end) for start, end in events]
    return {"ms": times or launches, "host ms": launches, "added": [float(added)]}


def measure(
    asked: list[Variant], shape: Shape, attention: str | None, repeats: int, compiler: str = "inductor"
) -> dict[str, dict[str, Any]]:
    """Variant -> its times, memory and errors."""
    results: dict[str, dict[str, Any]] = {}
    subjects: list[Subject] = []
    torch._dynamo.reset()
    torch._dynamo.config.recompile_limit = 64  # of one function, which all models of a class share
    first = Subject(Variant("bf16", "bf16", False), shape, attention, compiler)
    reference = found_by(first)
    for variant in asked:
        start = time.perf_counter()
        try:
            subject = first if variant.name == REFERENCE else Subject(variant, shape, attention, compiler)
        except ImportError as error:
            print(f"- {variant.name}: skipped, {error}", flush=True)
            continue
        found = errors(found_by(subject), reference)
        right = all(error <= variant.bound for error in found.values())
        results[variant.name] = {"errors": found, "right": right, "kept": subject.kept}
        subjects.append(subject)
        told = ", ".join(f"{name} {error:.4f}" for name, error in found.items())
        print(f"- {variant.name}: built in {time.perf_counter() - start:.0f} s, off by {told}", flush=True)
    del first, reference
    gc.collect()
    for _ in range(-(repeats // -STEPS_IN_TURN)):
        for subject in subjects:
            for name, values in turn(subject, STEPS_IN_TURN).items():
                results[subject.variant.name].setdefault(name, []).extend(values)
    return results


def table(results: dict[str, dict[str, Any]]) -> list[str]:
    """In Markdown."""
    middle = {name: statistics.median(found["ms"]) for name, found in results.items()}
    against = [name for name in BASELINES if name in results]
    columns = ["variant", "ms", "min, max", "host ms", *(f"speed / {name}" for name in against)]
    columns += ["GiB kept + added by a step", "error of y, dx, weights' gradients"]
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    for name, found in results.items():
        kept, added = found["kept"] / GIB, max(found["added"]) / GIB
        cells = [name, f"{middle[name]:.2f}", f"{min(found['ms']):.2f}, {max(found['ms']):.2f}"]
        cells += [f"{statistics.median(found['host ms']):.1f}"]
        cells += [f"{middle[other] / middle[name]:.3f}" for other in against]
        cells += [f"{kept:.2f} + {added:.2f} = {kept + added:.2f}"]
        cells += [
            ", ".join(f"{error:.3f}" for error in found["errors"].values()) + ("" if found["right"] else " WRONG")
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def profiled(subject: Subject, rows: int = 25) -> list[str]:
    """The kernels of one step that take the most time, and how much of it the device was idle."""
    from torch.profiler import ProfilerActivity, profile

    cuda = subject.shape.device == "cuda"
    with profile(activities=[ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * cuda]) as seen:
        start = time.perf_counter()
        subject.step()
        if cuda:
            torch.cuda.synchronize()
        wall = (time.perf_counter() - start) * 1e3
    kind = torch.autograd.DeviceType.CUDA if cuda else torch.autograd.DeviceType.CPU
    found = [
        ((event.self_device_time_total if cuda else event.self_cpu_time_total) / 1e3, event.count, event.key)
        for event in seen.key_averages()
        if event.device_type == kind and not event.is_user_annotation
    ]
    found.sort(reverse=True)
    total = sum(took for took, _, _ in found)
    lines = [f"{subject.variant.name}: {sum(n for _, n, _ in found)} kernels, {total:.2f} ms of {wall:.2f} ms"]
    return lines + [f"{took:8.3f} ms {took / total:6.1%} {n:5d} x {name[:110]}" for took, n, name in found[:rows]]


def parse(given: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="names of variants, or patterns, with commas")
    parser.add_argument("--compile-ours", action="store_true", help="ours under torch.compile too")
    parser.add_argument("--graph-ours", action="store_true", help="ours in CUDA graphs too, compiled or not")
    parser.add_argument("--recompute-ours", action="store_true", help="ours with recompute_activation=True too")
    parser.add_argument("--store-ours", action="store_true", help='ours with activation_storage="fp8" too')
    parser.add_argument("--compiler", default="inductor", help="the backend of torch.compile")
    parser.add_argument("--same-attention", default="", help="that of the second table; 'none' for no such table")
    for field in dataclasses.fields(Shape)[:-1]:
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=int, default=field.default)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--profile", help="only show where the time of one step of this variant goes")
    return parser.parse_args(given)


def main(given: list[str] | None = None) -> int:
    """0, or 1 if the gradients of a variant were wrong."""
    options = parse(given)
    shape = Shape(**{field.name: getattr(options, field.name) for field in dataclasses.fields(Shape)})
    where = torch.cuda.get_device_name() if shape.device == "cuda" else "CPU"
    print(f"## {where}, torch {torch.__version__}, torchao {torchao()}, {datetime.date.today()}\n\n{shape}\n")
    known = {variant.name: variant for variant in variants(True, True, True, True)}
    if options.profile:
        print("\n".join(profiled(Subject(known[options.profile], shape, None, options.compiler))))
        return 0
    patterns = (options.only or "*").split(",")
    asked = [
        v
        for v in variants(options.compile_ours, options.recompute_ours, options.graph_ours, options.store_ours)
        if any(fnmatch.fnmatch(v.name, p) for p in patterns)
    ]
    same = options.same_attention or ("cudnn" if shape.device == "cuda" else "math")
    results = {}
    for title, attention in (("as shipped", None), (same, same)):
        if title == "none":
            continue
        print(f"### Attention: {title}\n", flush=True)
        results[title] = measure(asked, shape, attention, options.repeats, options.compiler)
        print("\n" + "\n".join(table(results[title])) + "\n", flush=True)
        gc.collect()
        if shape.device == "cuda":
            torch.cuda.empty_cache()
    if options.json:
        about = {"device": where, "torch": torch.__version__, "torchao": torchao(), "date": str(datetime.date.today())}
        options.json.write_text(json.dumps(about | {"shape": dataclasses.asdict(shape), "tables": results}, indent=1))
    return int(any(not found["right"] for each in results.values() for found in each.values()))


def torchao() -> str:
    try:
        return version("torchao")
    except PackageNotFoundError:
        return "absent"


if __name__ == "__main__":
    sys.exit(main())
