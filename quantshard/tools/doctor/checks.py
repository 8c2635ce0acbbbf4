"""Self-test: every kernel against its oracle, and every native GEMM against float64.

Compiled kernels run on an irregular shape, which no tile size divides, and on a large one. Triton's interpreter runs
kernels slowly on the CPU, so interpreted kernels run on tiny shapes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quantshard import kernels, numerics
from quantshard.formats import Format
from quantshard.gemm.hardware import ScaledProduct
from quantshard.tools.doctor import gemms, quantize, registry
from quantshard.tools.doctor.cases import OTHER_BITS, TOO_FAR, KernelRow, Shape
from quantshard.tools.doctor.results import Result, UnavailableError, Watch, outcome_of, watched

COMPILED: tuple[Shape, ...] = ((131, 257), (2048, 4096))
"""Shapes for compiled kernels: irregular, and large."""
INTERPRETED: tuple[Shape, ...] = ((5, 34), (16, 64))
"""Shapes for interpreted kernels."""
CPU_ROWS = 256
"""Largest number of rows that the CPU quantizes for comparison."""
PRODUCTS = ((131, 257, 200), (1024, 1536, 2048), *gemms.SMALL)
"""Sizes (m, n, k) of GEMMs."""
TOLD = 3
"""Largest number of failed shapes in a message."""


class KernelCheck(NamedTuple):
    """One check: whether a kernel is correct on a shape (for a GEMM: m, n, k) and device.

    `is_right` raises `UnavailableError` if the kernel does not run. `otherwise`: message if the check fails.
    """

    name: str
    is_right: Callable[[Any, torch.device], bool]
    otherwise: str = OTHER_BITS


def run_checks(device: torch.device, watch: Watch | None = None) -> list[Result]:
    """Run all checks in order; `watch` receives progress."""
    no_kernels_reason = why_no_kernels(device)
    shapes = INTERPRETED if kernels.INTERPRETED else COMPILED
    tasks = [(check, partial(_told, check, shapes, device, no_kernels_reason)) for check in kernel_checks()]
    tasks += [(check, partial(_told, check, PRODUCTS, device, "")) for check in product_checks()]
    return watched([(check.name, partial(outcome_of, check.name, run)) for check, run in tasks], watch or Watch())


def why_no_kernels(device: torch.device) -> str:
    """Reason why kernels do not run on this device; empty if they run."""
    if device.type == "cpu" and not kernels.INTERPRETED:
        return "kernels do not run on a CPU; plain PyTorch does their work"
    if not kernels.USABLE:
        return "Triton is not installed, or this torch was not built with CUDA; plain PyTorch does the kernels' work"
    return ""


def _told(check: KernelCheck, shapes: Sequence[tuple[int, ...]], device: torch.device, why: str) -> str | None:
    """Run a check on all shapes; returns an error text, or None."""
    if why:
        raise UnavailableError(why)
    failed = [shape for shape in shapes if not check.is_right(shape, device)]
    more = f" and {len(failed) - TOLD} more" if len(failed) > TOLD else ""
    return f"{check.otherwise}, of shape {' and '.join(map(_by, failed[:TOLD]))}{more}" if failed else None


def _by(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape))


def random(shape: Shape, device: torch.device) -> Tensor:
    """A new bfloat16 tensor with values of many magnitudes, zeros, and a row of zeros."""
    return _random(shape).to(device, copy=True)


@lru_cache(maxsize=4)
def _random(shape: Shape) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    x, exponents = (torch.randn(shape, dtype=torch.float32, generator=generator, device="cpu") for _ in range(2))
    x *= torch.exp(3 * exponents)
    x[0, 0] = 0
    x[3:4] = 0
    return x.bfloat16()


# -------------------------------------------------------------------------------------------------------------- kernels


def kernel_checks() -> Iterator[KernelCheck]:
    """Checks of each format's oracle, on the device against a CPU, then the cases of the registry."""
    for fmt in quantize.QUANTIZED:
        yield KernelCheck(f"oracle {fmt.name}", partial(_oracle, fmt=fmt), "other bits than on a CPU")
    for row in registry.ROWS:
        for name, options in row.cases.items():
            yield KernelCheck(name, partial(_case, row=row, options=options), row.otherwise)


def _oracle(shape: Shape, device: torch.device, fmt: Format) -> bool:
    if device.type == "cpu":
        raise UnavailableError("this is a CPU")
    x = random(shape, device)[:CPU_ROWS]
    parts, cpu_parts = numerics.quantize(x, fmt), numerics.quantize(x.cpu(), fmt)
    return all(torch.equal(parts[name].cpu(), part) for name, part in cpu_parts.items())


def _case(shape: Shape, device: torch.device, row: KernelRow, options: Mapping[str, Any]) -> bool:
    return row.make(random(shape, device), **options).is_right()


# ------------------------------------------------------------------------------------------------------------- products


def product_checks() -> Iterator[KernelCheck]:
    """One check for each pair of formats that some hardware multiplies."""
    for left, right, native in gemms.pairs():
        yield KernelCheck(
            f"native GEMM {left.name} by {right.name}",
            partial(_product, left=left, right=right, native=native), TOO_FAR,
        )  # fmt: skip


def _product(
    shape: tuple[int, int, int], device: torch.device, left: Format, right: Format, native: ScaledProduct
) -> bool:
    if not native.is_on(device):
        raise UnavailableError(f"emulated: it needs compute capability {native.needs}")
    return gemms.is_right_product(shape, device, left, right)
