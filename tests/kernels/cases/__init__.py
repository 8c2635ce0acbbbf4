"""Case table of the kernel tests: one row for each launcher, with its oracle and its cases.

The kernel tests run the cases, compile them for GPUs, and check that every Triton kernel has a row;
benchmarks/kernel_speed.py times some. To add a kernel, add a row to the file here that is named after the kernel's
folder. The table can be listed without Triton.
"""

from __future__ import annotations

from tests.kernels.cases import experts, fused, quantize, steps
from tests.kernels.cases.base import KernelRow

ROWS: tuple[KernelRow, ...] = (*quantize.ROWS, *fused.ROWS, *steps.ROWS, *experts.ROWS)
