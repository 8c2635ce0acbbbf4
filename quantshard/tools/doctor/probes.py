"""Speed of this machine: memory, quantization, GEMMs and a disk, each measured in about a second."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import BinaryIO, NamedTuple

import torch
from torch import Tensor

from quantshard import kernels, numerics, recipe
from quantshard.formats import Format
from quantshard.tools.doctor import checks, products, quantize
from quantshard.tools.doctor.cases import recipe_names
from quantshard.tools.doctor.results import Result, UnavailableError, Watch, first_line, outcome_of, watched
from quantshard.tools.doctor.timing import bounded, bytes_of

RATE, FLOPS = "GB/s", "TFLOP/s"
"""Units: 1e9 bytes and 1e12 operations per second."""
SECONDS = 1.0
"""Approximate duration of a probe."""
FILE, PIECE = 256 << 20, 16 << 20
"""Bytes of the probe's file, and bytes per write and sync."""
NEAR = 2.0**-7
"""Largest error of the first rows of a GEMM, relative to their norm."""


class ProbeSizes(NamedTuple):
    """Shape of the matrix to copy and quantize (`rows`, `cols`), and side of the square GEMMs (`product`)."""

    rows: int
    cols: int
    product: int


ON_GPU, ON_CPU = ProbeSizes(16384, 14336, 8192), ProbeSizes(256, 2048, 512)


def run_probes(device: torch.device, folder: Path, watch: Watch | None = None) -> list[Result]:
    """Run all probes in order; `watch` receives progress. `folder`: a folder on the disk to probe."""
    tasks = [(name, partial(outcome_of, name, measure, unit)) for name, unit, measure in _probes(device, folder)]
    after = torch.cuda.empty_cache if device.type == "cuda" else lambda: None
    return watched(tasks, watch or Watch(), after)


def _probes(device: torch.device, folder: Path) -> Iterator[tuple[str, str, Callable[[], float | str]]]:
    sizes = _sizes(device)
    yield "copy", RATE, partial(probe_copy, device, sizes)
    for name, fmt in _weights():
        yield f"quantize, {name} weight", RATE, partial(probe_quantize, device, sizes, fmt)
    for kind in products.KINDS:
        yield f"GEMM {kind}", FLOPS, partial(probe_product, device, sizes, kind)
    speeds: list[float] = []
    yield "disk write", RATE, partial(probe_write, folder, speeds)
    yield "disk read", RATE, partial(probe_read, speeds)


def _sizes(device: torch.device) -> ProbeSizes:
    """Choose sizes so that the oracle that checks the timed kernels fits into the GPU's free memory."""
    if device.type != "cuda":
        return ON_CPU
    free = torch.cuda.mem_get_info(device)[0]
    rows = ON_GPU.rows
    while rows > 256 and rows * ON_GPU.cols * 2 > free / 60:
        rows //= 2
    return ON_GPU._replace(rows=rows, product=ON_GPU.product if rows == ON_GPU.rows else 4096)


def _matrix(device: torch.device, sizes: ProbeSizes) -> Tensor:
    return torch.randn(sizes.rows, sizes.cols, dtype=torch.bfloat16, device=device)


def probe_copy(device: torch.device, sizes: ProbeSizes) -> float:
    """Measure a copy, in bytes read and written."""
    x = _matrix(device, sizes)
    destination = torch.empty_like(x)
    return 2 * bytes_of(x) / bounded(lambda: destination.copy_(x), device.type, SECONDS) / 1e6


def _weights() -> Iterator[tuple[str, Format]]:
    """Iterate over the distinct weight formats of recipes, as (recipe name, format)."""
    names = set()
    for name in recipe_names():
        cell = recipe.resolve(name).weight
        if cell is not None and cell.format.name not in names:
            names.add(cell.format.name)
            yield name, cell.format


def probe_quantize(device: torch.device, sizes: ProbeSizes, fmt: Format) -> float:
    """Measure rowwise quantization by the kernel (without kernels: by the oracle), in bytes read and written."""
    x = _matrix(device, sizes)
    if kernels.INTERPRETED:
        raise UnavailableError("kernels are interpreted")
    if checks.why_no_kernels(device):
        parts = numerics.quantize(x, fmt)
        duration = bounded(lambda: numerics.quantize(x, fmt), device.type, SECONDS)
        return bytes_of(x, *parts.values()) / duration / 1e6
    case = quantize.quantize_case(x, fmt)
    return case.moved / bounded(case.launch, device.type, SECONDS) / 1e6


def probe_product(device: torch.device, sizes: ProbeSizes, kind: str) -> float | str:
    """Measure a square GEMM of PyTorch, in operations, and check its first rows."""
    size = sizes.product
    try:
        gemm = products.KINDS[kind](size, size, size, device.type)
        first = gemm.call()[: products.CHECKED_ROWS].float()
    # PyTorch raises these if it has no such kernel.
    except (RuntimeError, NotImplementedError, ValueError) as error:
        raise UnavailableError(first_line(error)) from None
    if not (first - gemm.expected).norm() <= NEAR * gemm.expected.norm():
        return "another product"
    return 2 * size**3 / bounded(gemm.call, device.type, SECONDS) / 1e9


def probe_write(folder: Path, speeds: list[float]) -> float:
    """Measure writes with sync to a file, and append the speed of reading the file back to `speeds`."""
    piece = torch.randint(0, 256, (PIECE,), dtype=torch.uint8, device="cpu").numpy().tobytes()
    try:
        with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
            start, size = time.perf_counter(), 0
            while size < FILE and time.perf_counter() - start < 2 * SECONDS:
                size += file.write(piece)
                os.fsync(file.fileno())
            speed = size / (time.perf_counter() - start) / 1e9
            speeds.append(_read(file, size))
    except OSError as error:
        raise UnavailableError(f"cannot write there: {error.strerror}") from None
    return speed


def _read(file: BinaryIO, size: int) -> float:
    """Measure reading a file from the disk, after asking the system to drop its cache."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    file.seek(0)
    start = time.perf_counter()
    while file.read(PIECE):
        pass
    return size / (time.perf_counter() - start) / 1e9


def probe_read(speeds: list[float]) -> float:
    """Return the read speed that `probe_write` measured."""
    if not speeds:
        raise UnavailableError("nothing could be written")
    return speeds[0]
