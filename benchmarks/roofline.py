"""What this device allows: memory bandwidth, matrix products in each format, attention by each backend.

    python -m benchmarks.roofline [--tokens 8192] [--batch 2] [--layers 4] [--repeats 20] [--json FILE]

The products are those of the blocks of `block_step.py`, forward, for the input's gradient and for the weight's, by
PyTorch's own kernels; each is checked on some of its rows. With attention they give what a step of the blocks takes at
least, in each format.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.timing import milliseconds
from quantshard import DotProductAttention, kernel_dispatch
from quantshard.errors import ConfigurationError
from quantshard.formats import ALL
from quantshard.gemm import hardware
from quantshard.modules.attention import BACKENDS

GATE = "gate"


class Sizes(NamedTuple):
    """Of the blocks of a model and their input."""

    layers: int = 4
    hidden: int = 4096
    ffn: int = 14336
    heads: int = 32
    kv_heads: int = 8
    batch: int = 2
    tokens: int = 8192

    @property
    def head(self) -> int:
        return self.hidden // self.heads

    def products(self) -> dict[str, tuple[int, int, int]]:
        """Name -> rows, columns and summed dim. A block has each once, but `GATE` twice, for gate and up."""
        rows = self.batch * self.tokens
        qkv = (self.heads + 2 * self.kv_heads) * self.head
        weights = {
            "qkv": (qkv, self.hidden), "proj": (self.hidden, self.hidden),
            GATE: (self.ffn, self.hidden), "down": (self.hidden, self.ffn),
        }  # fmt: skip
        found = {}
        for name, (out, into) in weights.items():
            found[f"{name}, forward"] = (rows, out, into)
            found[f"{name}, input's gradient"] = (rows, into, out)
            found[f"{name}, weight's gradient"] = (out, into, rows)
        return found


def median(call: Callable[[], Any], repeats: int, device: str) -> float:
    """The median time of a call in milliseconds."""
    return statistics.median(milliseconds(call, repeats, device))


# Memory


def memory(x: Tensor, repeats: int) -> dict[str, float]:
    """Terabytes a second of operations on a matrix."""
    other, size = torch.empty_like(x), x.numel() * x.itemsize
    calls: dict[str, tuple[int, Callable[[], Any]]] = {
        "copy": (2 * size, lambda: other.copy_(x)),
        "amax, eager": (size, lambda: x.abs().amax()),
        "amax by aminmax": (size, lambda: x.aminmax()),
        "cast to FP8, eager": (size + x.numel(), lambda: x.to(torch.float8_e4m3fn)),
    }
    if kernel_dispatch.has_kernels(x):
        calls["amax, quantshard's kernel"] = (size, lambda: kernel_dispatch.block_amax(x, (ALL, ALL)))
    return {name: moved / median(call, repeats, x.device.type) / 1e9 for name, (moved, call) in calls.items()}


# Matrix products

CHECKED_ROWS = 128
"""Number of rows of a GEMM to compare with the expected result."""


class ReferenceProduct(NamedTuple):
    """A GEMM x @ y^T: the call, and the expected first rows."""

    call: Callable[[], Tensor]
    expected: Tensor


def codes(shape: tuple[int, int], device: str) -> Tensor:
    """Random FP8 values."""
    return torch.randn(shape, dtype=torch.float32, device=device).to(torch.float8_e4m3fn)


def grid(rows: int, cols: int, device: str) -> Tensor:
    """Random power-of-two scales, different enough to reveal a wrong layout."""
    return torch.randint(-3, 4, (rows, cols), device=device).float().exp2()


def spread(scales: Tensor, block: tuple[int, int], shape: tuple[int, int]) -> Tensor:
    """Expand scales of blocks to scales of elements."""
    return scales.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)[: shape[0], : shape[1]]


def bf16(m: int, n: int, k: int, device: str) -> ReferenceProduct:
    """GEMM of two operands without scales."""
    x, y = (torch.randn(rows, k, dtype=torch.bfloat16, device=device) for rows in (m, n))
    return ReferenceProduct(lambda: x @ y.t(), x[:CHECKED_ROWS].float() @ y.float().t())


class ProductScaling(NamedTuple):
    """Scaling of an operand: name in PyTorch, block shape, and layout of the scale grid."""

    kind: str
    block: tuple[int, int]
    layout: Callable[[Tensor], Tensor]


SCALAR = ProductScaling("TensorWise", (ALL, ALL), lambda scales: scales.view(()))
ROW = ProductScaling("RowWise", (1, ALL), lambda scales: scales)
ROW_RIGHT = ProductScaling("RowWise", (1, ALL), lambda scales: scales.t())
VECTOR = ProductScaling("BlockWise1x128", (1, 128), hardware.by_columns)
SQUARE = ProductScaling("BlockWise128x128", (128, 128), hardware.by_four)


def fp8_product(
    m: int, n: int, k: int, device: str, *, left: ProductScaling, right: ProductScaling, fast: bool = False
) -> ReferenceProduct:
    """GEMM of FP8 operands with scales. `fast`: accumulate in fewer bits."""
    types = F.ScalingType
    operands, scales, values = [], [], []
    for rows, side, checked in ((m, left, CHECKED_ROWS), (n, right, n)):
        x = codes((rows, k), device)
        block = (side.block[0] if side.block[0] != ALL else rows, side.block[1] if side.block[1] != ALL else k)
        scale_grid = grid(-(rows // -block[0]), -(k // -block[1]), device)
        operands.append(x)
        scales.append(side.layout(scale_grid))
        values.append(x[:checked].float() * spread(scale_grid, block, (rows, k))[:checked])
    kinds = [getattr(types, side.kind) for side in (left, right)]
    call = lambda: F.scaled_mm(  # noqa: E731
        operands[0], operands[1].t(), scales[0], kinds[0], scales[1], kinds[1], use_fast_accum=fast
    )
    return ReferenceProduct(call, values[0] @ values[1].t())


KINDS: dict[str, Callable[[int, int, int, str], ReferenceProduct]] = {
    "BF16": bf16,
    "FP8 per tensor": partial(fp8_product, left=SCALAR, right=SCALAR),
    "FP8 per tensor, fast accumulation": partial(fp8_product, left=SCALAR, right=SCALAR, fast=True),
    "FP8 by rows": partial(fp8_product, left=ROW, right=ROW_RIGHT),
    "FP8 1x128 by 128x128": partial(fp8_product, left=VECTOR, right=SQUARE),
    "FP8 1x128 by 1x128": partial(fp8_product, left=VECTOR, right=VECTOR),
}
"""Kind -> factory of a GEMM of [m, k] by [n, k] on a device."""


def products(sizes: Sizes, device: str, repeats: int) -> dict[str, dict[str, float | str]]:
    """Kind -> product -> milliseconds, or why it does not run."""
    found: dict[str, dict[str, float | str]] = {}
    for kind, make in KINDS.items():
        for name, (m, n, k) in sizes.products().items():
            try:
                product = make(m, n, k, device)
                out = product.call()[:CHECKED_ROWS].float()
                apart = (out - product.expected).norm() / product.expected.norm()
                told: float | str = "wrong" if not apart < 2**-7 else median(product.call, repeats, device)
            except (RuntimeError, NotImplementedError, ValueError) as error:  # PyTorch's, where there is no such kernel
                told = str(error).splitlines()[0]
            found.setdefault(kind, {})[name] = told
            product = out = None  # type: ignore[assignment]
    return found


# Attention


def attention(sizes: Sizes, device: str, repeats: int) -> dict[str, tuple[float, float] | str]:
    """Backend -> milliseconds of a forward, and of a forward and backward; or why it does not run."""
    found: dict[str, tuple[float, float] | str] = {}
    qkv = [
        torch.randn(sizes.batch, sizes.tokens, heads, sizes.head, device=device).bfloat16().requires_grad_()
        for heads in (sizes.heads, sizes.kv_heads, sizes.kv_heads)
    ]
    for backend in BACKENDS:
        core = DotProductAttention(
            sizes.heads, sizes.head, sizes.kv_heads, qkv_format="bshd", attention_backend=backend
        )

        def both(core: DotProductAttention = core) -> None:
            out = core(*qkv)
            torch.autograd.grad(out, qkv, out.detach())

        try:
            with torch.no_grad():
                forward = median(partial(core, *qkv), repeats, device)
            found[backend] = (forward, median(both, repeats, device))
        except (ConfigurationError, torch.cuda.OutOfMemoryError) as error:
            found[backend] = str(error).splitlines()[0]
    return found


# Printing


def print_memory(found: dict[str, float]) -> None:
    print("| memory | TB/s | of copy |\n|---|---|---|")
    for name, rate in found.items():
        print(f"| {name} | {rate:.3g} | {rate / found['copy']:.0%} |")


def print_products(found: dict[str, dict[str, float | str]], sizes: Sizes) -> None:
    shapes = sizes.products()
    print("\n| TFLOP/s: product [M, N, K] | " + " | ".join(found) + " |\n|" + "---|" * (len(found) + 1))
    for name, (m, n, k) in shapes.items():
        cells = [
            "-" if isinstance(took := of_kind[name], str) else f"{2 * m * n * k / took / 1e9:.3g}"
            for of_kind in found.values()
        ]
        print(f"| {name} [{m}, {n}, {k}] | " + " | ".join(cells) + " |")
    for kind, of_kind in found.items():
        for text in dict.fromkeys(told for told in of_kind.values() if isinstance(told, str)):
            print(f"\n{kind}: {text}")


def print_attention(found: dict[str, tuple[float, float] | str], sizes: Sizes) -> None:
    flops = 2 * sizes.batch * sizes.heads * sizes.tokens**2 * sizes.head  # causal: half of two products
    print("\n| attention, causal, bf16 | forward ms (TFLOP/s) | and backward ms (TFLOP/s) |\n|---|---|---|")
    for backend, told in found.items():
        if isinstance(told, str):
            print(f"| {backend} | {told} | |")
        else:
            cells = [f"{took:.3f} ({flops * work / took / 1e9:.3g})" for took, work in zip(told, (1, 3.5), strict=True)]
            print(f"| {backend} | " + " | ".join(cells) + " |")


def print_limits(
    kinds: dict[str, dict[str, float | str]], attended: dict[str, tuple[float, float] | str], sizes: Sizes
) -> None:
    quickest = min((told[1] for told in attended.values() if not isinstance(told, str)), default=float("nan"))
    print(f"\n| {sizes.layers} blocks, forward and backward, at least | products ms | with attention |\n|---|---|---|")
    for kind, of_kind in kinds.items():
        times = [
            told * (2 if name.startswith(GATE) else 1) for name, told in of_kind.items() if not isinstance(told, str)
        ]
        if len(times) == len(of_kind):
            total = sizes.layers * sum(times)
            print(f"| {kind} | {total:.4g} | {total + sizes.layers * quickest:.4g} |")


def main(given: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in Sizes()._asdict().items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(given)
    sizes, device = Sizes(*(getattr(options, name) for name in Sizes._fields)), options.device
    where = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    print(f"## {where}, torch {torch.__version__}, {datetime.date.today()}\n\nMedians of {options.repeats}. {sizes}\n")
    x = torch.randn(sizes.batch * sizes.tokens, sizes.ffn, device=device).bfloat16()
    moved = memory(x, options.repeats)
    print_memory(moved)
    del x
    kinds = products(sizes, device, options.repeats)
    print_products(kinds, sizes)
    attended = attention(sizes, device, options.repeats)
    print_attention(attended, sizes)
    print_limits(kinds, attended, sizes)
    if options.json:
        about = {"device": where, "torch": torch.__version__, "sizes": sizes._asdict()}
        found = {"memory TB/s": moved, "products ms": kinds, "attention ms": attended}
        options.json.write_text(json.dumps(about | found, indent=1))


if __name__ == "__main__":
    main()
