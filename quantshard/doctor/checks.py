"""The self-test: every kernel against its oracle, and every native matrix product against float64.

A check runs on an irregular shape, of which nothing divides, and on a large one; under Triton's interpreter, which runs
kernels on the CPU slowly, on tiny ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quantshard import kernels, numerics, recipe
from quantshard.doctor import gemms
from quantshard.doctor.results import Result, UnavailableError, Watch, outcome_of, watched
from quantshard.formats import ALL, FORMATS, Copy, Format, Scaling
from quantshard.gemm import backend
from quantshard.gemm.backend import ScaledProduct
from quantshard.modules.layernorm_mlp import ACTIVATIONS

if kernels.USABLE:
    from quantshard.doctor import cases, experts, fused, steps

Shape = tuple[int, int]

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
MOMENTS: dict[str, dict[str, Any]] = {
    "": {},
    ", FP8 moments": {"exp_avg_dtype": torch.uint8, "exp_avg_sq_dtype": torch.uint8},
    ", FP16 moments": {"exp_avg_dtype": torch.float16, "exp_avg_sq_dtype": torch.float16},
    ", no masters": {"master_weights": False},
}
"""Options of `FusedAdam` that are checked."""

OTHER_BITS = "other bits than the oracle's"
TOO_FAR = "further from the exact result than its bound"


class KernelCheck(NamedTuple):
    """One kernel: whether it is right on a shape (of a product also the summed dim) and device.

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
    x, exponents = (torch.randn(shape, dtype=torch.float32, generator=generator) for _ in range(2))
    x *= torch.exp(3 * exponents)
    x[0, 0] = 0
    x[3:4] = 0
    return x.bfloat16()


# -------------------------------------------------------------------------------------------------------------- kernels
#
# Checks are listed on machines without Triton too, so what runs them is named in functions that are called later.


def _right(case: Any) -> bool:
    return bool(case.is_right(case.call()))


def kernel_checks() -> Iterator[KernelCheck]:
    """One for each kernel and format."""
    for fmt in FORMATS.values():
        if fmt.copies[Copy.ROWWISE].codes.encoding.bits > 8:
            yield KernelCheck(f"quantize {fmt.name}", _sixteen_bits)
        else:
            yield from _of_format(fmt)
    yield KernelCheck("transpose of bytes", lambda s, d: _right(cases.transpose_case(random(s, d))))
    yield KernelCheck("sum of gradients", lambda s, d: _right(cases.rounded_sum_case(random(s, d))))
    for centered, name in ((False, "RMSNorm"), (True, "LayerNorm")):
        yield KernelCheck(f"{name}, forward and backward", partial(_norm, centered=centered), TOO_FAR)
    for name in ACTIVATIONS:
        yield KernelCheck(f"{name}, forward and backward", partial(_activation, name=name), TOO_FAR)
    for interleaved in (False, True):
        name = "rotary embedding" + (", interleaved" if interleaved else "")
        yield KernelCheck(f"{name}, forward and backward", partial(_rotary, interleaved=interleaved))
    yield from _over_tensors()
    for name in recipe_names():
        if backend.block_together(recipe.resolve(name)) is not None:
            yield KernelCheck(f"experts at once, {name}", partial(_experts, recipe=name), f"{OTHER_BITS}, or {TOO_FAR}")


def _experts(shape: Shape, device: torch.device, recipe: str) -> bool:
    return experts.are_right(recipe, shape, device)


def _sixteen_bits(shape: Shape, device: torch.device) -> bool:
    raise UnavailableError("16-bit codes are those of optimizer states, which Adam's kernel writes")


def _of_format(fmt: Format) -> Iterator[KernelCheck]:
    """What is done with one format: each result on the device that is checked, and the oracle's there as on a CPU."""
    name, only, block = fmt.name, len(fmt.copies) == 1, fmt.copies[Copy.ROWWISE].block
    yield KernelCheck(f"oracle {name}", partial(_oracle, fmt=fmt), "other bits than on a CPU")
    yield KernelCheck(f"quantize {name}", lambda s, d: _right(cases.quantize_case(random(s, d), fmt, False, True)))
    for which in list(fmt.copies)[1:]:
        yield KernelCheck(f"quantize {name}, {which.value}", partial(_other_copy, fmt=fmt, which=which))
    if fmt.transposable:
        yield KernelCheck(
            f"quantize {name} + transpose", lambda s, d: _right(cases.quantize_case(random(s, d), fmt, True, True))
        )
    elif only and block[0] == 1:
        for scaling in _scalings(fmt):
            extras = [word for word in ("stochastic_rounding", "random_hadamard") if getattr(scaling, word)]
            yield KernelCheck(
                f"quantize {name}, both directions" + "".join(f" + {extra}" for extra in extras),
                partial(_both_ways, fmt=fmt, scaling=scaling),
            )
    yield KernelCheck(f"amax {name}", lambda s, d: _right(cases.amax_case(random(s, d), fmt)))
    if fmt.copies[Copy.ROWWISE].amax is None:
        yield KernelCheck(f"scales {name}", lambda s, d: _right(cases.scales_case(random(s, d), fmt)))
    yield KernelCheck(f"dequantize {name}", lambda s, d: _right(cases.dequantize_case(random(s, d), fmt)))
    if only and (block[0] == 1 or fmt.transposable):
        yield KernelCheck(f"LayerNorm + quantize {name}", lambda s, d: fused.norm_codes(s, d, fmt))
        yield KernelCheck(f"activation + quantize {name}", lambda s, d: fused.activation_codes(s, d, fmt))
        yield KernelCheck(f"gradient + quantize {name}", lambda s, d: fused.gradient_codes(s, d, fmt))


def _scalings(fmt: Format) -> list[Scaling]:
    """Ways to round: with transform and stochastic rounding where blocks lie along rows and within a tile."""
    if ALL in fmt.copies[Copy.ROWWISE].block:
        return [Scaling()]
    return [Scaling(), Scaling(stochastic_rounding=True), Scaling(stochastic_rounding=True, random_hadamard=True)]


def _both_ways(shape: Shape, device: torch.device, fmt: Format, scaling: Scaling) -> bool:
    return _right(cases.quantize_both_case(random(shape, device), fmt, scaling))


def _other_copy(shape: Shape, device: torch.device, fmt: Format, which: Copy) -> bool:
    return _right(cases.quantize_case(random(shape, device), fmt, False, False, which))


def _oracle(shape: Shape, device: torch.device, fmt: Format) -> bool:
    if device.type == "cpu":
        raise UnavailableError("this is a CPU")
    x = random(shape, device)[:CPU_ROWS]
    here, there = numerics.quantize(x, fmt), numerics.quantize(x.cpu(), fmt)
    return all(torch.equal(here[name].cpu(), part) for name, part in there.items())


def _norm(shape: Shape, device: torch.device, centered: bool) -> bool:
    return fused.norm(shape, device, centered)


def _activation(shape: Shape, device: torch.device, name: str) -> bool:
    return fused.activation(shape, device, name)


def _rotary(shape: Shape, device: torch.device, interleaved: bool) -> bool:
    return fused.rotary(shape, device, interleaved)


def _over_tensors() -> Iterator[KernelCheck]:
    yield KernelCheck("gradients that are not finite", lambda s, d: steps.too_large(s, d))
    yield KernelCheck("amax histories", lambda s, d: steps.histories(s, d))
    for name in recipe_names():
        for words, options in MOMENTS.items():
            yield KernelCheck(f"Adam, {name}{words}", partial(_adam, recipe=name, options=options))
    remainders = {"store_param_remainders": True}
    yield KernelCheck("Adam, bf16, remainders", partial(_adam, recipe="bf16", options=remainders))


def _adam(shape: Shape, device: torch.device, recipe: str, options: dict[str, Any]) -> bool:
    return steps.has_oracles_bits(recipe, [shape, (16, 32), (3, 34)], device.type, **options)


def recipe_names() -> list[str]:
    """Every recipe by its first name."""
    return list({kind: name for name, kind in reversed(recipe.NAMES.items())}.values())[::-1]


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
