"""Compile cases of the case table for a Hopper GPU on a machine without one, and print what their kernels
became: one JSON object for each.

    python tests/kernels/hopper.py [--once] [--count] [--shape 256 4096] [CASE ...]

Run as a program: Triton must not have been imported under the interpreter. `--once`: of each case, each kernel as it is
launched first. `--count`: print the number of operations in Triton's IR, and stop. A kernel that is launched does not
run, so what is on the host is garbage; its arguments count alone.
"""

from __future__ import annotations

import argparse
import functools
import json
import re
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend, get_ptxas
from triton.runtime.jit import JITFunction

SHAPE = (256, 4096)


class Hopper:
    """What Triton asks of the driver of a GPU before it compiles."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


triton.runtime.driver.set_active(Hopper())
torch.version.cuda = "13.0"  # the kernels may be imported
torch.cuda.get_device_capability = lambda device=None: (9, 0)

from quantshard import kernel_dispatch, private_torch  # noqa: E402
from tests.kernels import cases as table  # noqa: E402
from tests.kernels.cases.base import KernelCase  # noqa: E402

private_torch.assert_on_device = lambda condition, message: None  # garbage need not be true

CASES = {name: (row, options) for row in table.ROWS for name, options in row.cases.items()}


def widest(ptx: str, access: str) -> int:
    """Bytes of the widest global load (ld) or store (st) of a thread."""
    found = re.findall(access + r"\.global[.\w]*?(?:\.v(\d))?\.b(\d+)", ptx)
    return max((int(count or 1) * int(bits) // 8 for count, bits in found), default=0)


def waits(assembly: str) -> int:
    """How often a thread waits for memory before it loads more: an instruction reads what was loaded, and another load
    follows it. Of instructions in the order in which they stand, whatever branches and loops do."""
    loading: set[int] = set()
    found, waited = 0, False
    for name, operands in re.findall(r"^\s+/\*[0-9a-f]+\*/\s+(?:@!?U?P\d+\s+)?([A-Z0-9_.]+)\s*(.*?);", assembly, re.M):
        written, _, read = operands.partition(",")
        if name.startswith(("ST", "RED", "ATOM")):
            read = operands
        if loading & {int(number) for number in re.findall(r"\bR(\d+)", read)}:
            loading, waited = set(), True
        if name.split(".")[0] == "LDG":
            found, waited = found + waited, False
            first, count = int(re.search(r"R(\d+)", written)[1]), {"128": 4, "64": 2}.get(name.split(".")[-1], 1)
            loading |= set(range(first, first + count))
    return found


def became(kernel: Any) -> dict[str, Any]:
    """Registers and spilled bytes as ptxas counts them, and instructions that tell of speed or of wrong bits."""
    ptx = kernel.asm["ptx"]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.ptx"
        path.write_text(ptx)
        command = [get_ptxas(90).path, "-v", "-arch=sm_90a", str(path), "-o", str(path.with_suffix(".o"))]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
        command = [triton.knobs.nvidia.nvdisasm.path, "-c", str(path.with_suffix(".o"))]
        assembly = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return {
        "waits": waits(assembly),
        "registers": int(re.search(r"Used (\d+) registers", said)[1]),
        "spilled": int(re.search(r"(\d+) bytes spill stores", said)[1]),
        "bytes of a load": widest(ptx, "ld"),
        "bytes of a store": widest(ptx, "st"),
        "casts": ptx.count("cvt.rn.satfinite"),
        # but for those of `language.encode` and `nan_where_infinite`, whose products are exact, and what is PTX itself
        "fused multiply-adds": len(re.findall(r"fma\.rn\.f32\s+%\w+, %\w+, (?!0f4A800006|0f00000000)", ptx)),
        "approximate divisions": len(re.findall(r"div\.(full|approx)", ptx)),
    }


class CompilationStoppedError(Exception):
    """Raised in place of the second stage of a compilation, with the module of the first."""


def count_operations(compiled: Callable[..., Any], *arguments: Any, **options: Any) -> dict[str, int]:
    """Count the operations of a kernel in Triton's IR. The stages that take minutes for long kernels do not run."""

    def stop(module: Any, *rest: Any) -> None:
        raise CompilationStoppedError(str(module))

    CUDABackend.make_ttgir = staticmethod(stop)
    try:
        compiled(*arguments, **options)
    except CompilationStoppedError as stopped:
        return {"operations": len(re.findall(r"^ +%", str(stopped), re.MULTILINE))}
    raise AssertionError("Triton did not call CUDABackend.make_ttgir")


def case_of(name: str, shape: Sequence[int] = SHAPE) -> KernelCase:
    """Its kernels are not compiled where their results are inputs."""
    row, options = CASES[name]
    JITFunction.run = lambda self, *arguments, **options: None
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(0)).bfloat16()
    return row.make(x, **options)


def launched(launch: Callable[[], object], compiled: Callable[..., Any], once: bool) -> list[tuple[str, Any]]:
    """Names of the kernels that are launched, and each compiled in place of that."""
    found: list[tuple[str, Any]] = []

    def run(self: JITFunction, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> None:
        name = self.fn.__name__
        if not once or name not in dict(found):
            found.append((name, compiled(self, *arguments, grid=grid, warmup=True, **options)))

    JITFunction.run = run
    launch()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--once", action="store_true")
    parser.add_argument("--count", action="store_true")
    parser.add_argument("--shape", type=int, nargs=2, default=SHAPE, help="of the matrix; a size of 1 is a constant")
    parser.add_argument("case", nargs="*", help="names of cases; default: all that are timed")
    given = parser.parse_args()
    compiled: Callable[..., Any] = JITFunction.run
    if given.count:
        compiled = functools.partial(count_operations, compiled)
    describe: Callable[[Any], dict[str, Any]] = dict if given.count else became
    with kernel_dispatch.kernels_only_on("cpu"):
        for name in given.case or [name for row in table.ROWS for name in row.timed]:
            for kernel, code in launched(case_of(name, given.shape).launch, compiled, given.once):
                print(json.dumps({"case": name, "kernel": kernel, **describe(code)}), flush=True)


if __name__ == "__main__":
    main()
