"""How fast this machine is: memory, quantization, matrix products and a disk, each in about a second."""

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
"""Units: 1e9 bytes and 1e12 operations a second."""
SECONDS = 1.0
"""What one probe may take, about."""
FILE, PIECE = 256 << 20, 16 << 20
"""Bytes of the file that probes the disk, and of what is written and synced at once."""
NEAR = 2.0**-7
"""What a product's first rows may be apart from what they must be, of their norm."""


class ProbeSizes(NamedTuple):
    """Of the matrix that is copied and quantized, and of the square ones that are multiplied."""

    rows: int
    cols: int
    product: int


ON_GPU, ON_CPU = ProbeSizes(16384, 14336, 8192), ProbeSizes(256, 2048, 512)


def run_probes(device: torch.device, folder: Path, watch: Watch | None = None) -> list[Result]:
    """All probes, one after another, of which `watch` is told; `folder`: whose disk is probed."""
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
    """Of a GPU, so that the oracle, which checks what is timed, fits into its free memory."""
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
    """Bytes read and written by a copy."""
    x = _matrix(device, sizes)
    other = torch.empty_like(x)
    return 2 * bytes_of(x) / bounded(lambda: other.copy_(x), device.type, SECONDS) / 1e6


def _weights() -> Iterator[tuple[str, Format]]:
    """Formats in which recipes store weights, each once."""
    seen = set()
    for name in recipe_names():
        cell = recipe.resolve(name).weight
        if cell is not None and cell.format.name not in seen:
            seen.add(cell.format.name)
            yield name, cell.format


def probe_quantize(device: torch.device, sizes: ProbeSizes, fmt: Format) -> float:
    """Bytes that must be read and written to quantize one way: by the kernel, or by the oracle where none runs."""
    x = _matrix(device, sizes)
    if kernels.INTERPRETED:
        raise UnavailableError("kernels are interpreted")
    if checks.why_no_kernels(device):
        parts = numerics.quantize(x, fmt)
        took = bounded(lambda: numerics.quantize(x, fmt), device.type, SECONDS)
        return bytes_of(x, *parts.values()) / took / 1e6
    case = quantize.quantize_case(x, fmt)
    return case.moved / bounded(case.launch, device.type, SECONDS) / 1e6


def probe_product(device: torch.device, sizes: ProbeSizes, kind: str) -> float | str:
    """Operations of a product of square matrices by PyTorch's kernel, checked on some of its rows."""
    size = sizes.product
    try:
        made = products.KINDS[kind](size, size, size, device.type)
        first = made.call()[: products.CHECKED_ROWS].float()
    except (RuntimeError, NotImplementedError, ValueError) as error:  # PyTorch's, where there is no such kernel
        raise UnavailableError(first_line(error)) from None
    if not (first - made.expected).norm() <= NEAR * made.expected.norm():
        return "another product"
    return 2 * size**3 / bounded(made.call, device.type, SECONDS) / 1e9


def probe_write(folder: Path, speeds: list[float]) -> float:
    """Bytes written to a file and synced. It is read too, before it is gone, and that speed appended to `speeds`."""
    piece = torch.randint(0, 256, (PIECE,), dtype=torch.uint8, device="cpu").numpy().tobytes()
    try:
        with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
            start, written = time.perf_counter(), 0
            while written < FILE and time.perf_counter() - start < 2 * SECONDS:
                written += file.write(piece)
                os.fsync(file.fileno())
            speed = written / (time.perf_counter() - start) / 1e9
            speeds.append(_read(file, written))
    except OSError as error:
        raise UnavailableError(f"cannot write there: {error.strerror}") from None
    return speed


def _read(file: BinaryIO, size: int) -> float:
    """Bytes of a file read from the disk, as far as the system lets its cache be dropped."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    file.seek(0)
    start = time.perf_counter()
    while file.read(PIECE):
        pass
    return size / (time.perf_counter() - start) / 1e9


def probe_read(speeds: list[float]) -> float:
    """What `probe_write` saw when it read its file."""
    if not speeds:
        raise UnavailableError("nothing could be written")
    return speeds[0]
