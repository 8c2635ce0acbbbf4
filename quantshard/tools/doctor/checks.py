"""The self-test: every kernel against its oracle, and every native matrix product against float64.

A check runs on an irregular shape, of which nothing divides, and on a large one; under Triton's interpreter, which runs
kernels on the CPU slowly, on tiny ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quantshard import kernels, numerics
from quantshard.formats import Format
from quantshard.gemm.scaled_products import ScaledProduct
from quantshard.tools.doctor import gemms, quantize, registry
from quantshard.tools.doctor.cases import OTHER_BITS, TOO_FAR, KernelRow, Shape
from quantshard.tools.doctor.results import Result, UnavailableError, Watch, outcome_of, watched

COMPILED: tuple[Shape, ...] = ((131, 257), (2048, 4096))
"""Shapes on which compiled kernels are checked: irregular, and large."""
INTERPRETED: tuple[Shape, ...] = ((5, 34), (16, 64))
"""Those under the interpreter."""
CPU_ROWS = 256
"""At most so many rows are quantized on the CPU too."""
PRODUCTS = ((131, 257, 200), (1024, 1536, 2048), *gemms.SMALL)
"""Rows, columns and summed dim of matrix products."""
TOLD = 3
"""At most so many shapes on which a check failed are named."""


class KernelCheck(NamedTuple):
    """One check: whether a kernel is right on a shape (of a product also the summed dim) and device.

    `is_right` raises `UnavailableError` where it does not run. `otherwise`: what is said if it is not.
    """

    name: str
    is_right: Callable[[Any, torch.device], bool]
    otherwise: str = OTHER_BITS


def run_checks(device: torch.device, watch: Watch | None = None) -> list[Result]:
    """All checks, one after another, of which `watch` is told."""
    why = why_no_kernels(device)
    shapes = INTERPRETED if kernels.INTERPRETED else COMPILED
    asked = [(check, partial(_told, check, shapes, device, why)) for check in kernel_checks()]
    asked += [(check, partial(_told, check, PRODUCTS, device, "")) for check in product_checks()]
    return watched([(check.name, partial(outcome_of, check.name, told)) for check, told in asked], watch or Watch())


def why_no_kernels(device: torch.device) -> str:
    """Why kernels do not run on this device; empty if they do."""
    if device.type == "cpu" and not kernels.INTERPRETED:
        return "kernels do not run on a CPU; plain PyTorch does their work"
    if not kernels.USABLE:
        return "Triton is not installed, or this torch was not built with CUDA; plain PyTorch does the kernels' work"
    return ""


def _told(check: KernelCheck, shapes: Sequence[tuple[int, ...]], device: torch.device, why: str) -> str | None:
    """What is wrong, or None."""
    if why:
        raise UnavailableError(why)
    wrong = [shape for shape in shapes if not check.is_right(shape, device)]
    more = f" and {len(wrong) - TOLD} more" if len(wrong) > TOLD else ""
    return f"{check.otherwise}, of shape {' and '.join(map(_by, wrong[:TOLD]))}{more}" if wrong else None


def _by(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape))


def random(shape: Shape, device: torch.device) -> Tensor:
    """Bfloat16 numbers of many magnitudes, with zeros and a row of them; a new tensor."""
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
    """The oracle of each format on the device that is checked and on a CPU; then the cases of the registry."""
    for fmt in quantize.QUANTIZED:
        yield KernelCheck(f"oracle {fmt.name}", partial(_oracle, fmt=fmt), "other bits than on a CPU")
    for row in registry.ROWS:
        for name, options in row.cases.items():
            yield KernelCheck(name, partial(_case, row=row, options=options), row.otherwise)


def _oracle(shape: Shape, device: torch.device, fmt: Format) -> bool:
    if device.type == "cpu":
        raise UnavailableError("this is a CPU")
    x = random(shape, device)[:CPU_ROWS]
    here, there = numerics.quantize(x, fmt), numerics.quantize(x.cpu(), fmt)
    return all(torch.equal(here[name].cpu(), part) for name, part in there.items())


def _case(shape: Shape, device: torch.device, row: KernelRow, options: Mapping[str, Any]) -> bool:
    return row.make(random(shape, device), **options).is_right()


# ------------------------------------------------------------------------------------------------------------- products


def product_checks() -> Iterator[KernelCheck]:
    """One for each pair of formats that some hardware multiplies."""
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
