"""Registry of kernels: one row for each launcher, with its oracle and its cases.

The self-test checks the cases, benchmarks/kernels.py times some of them, and the kernel tests run them on other shapes,
compile them for GPUs, and check that every Triton kernel has a row. To add a kernel, add a file in `kernels/` and a row
in the file here that is named after the kernel's folder.

The registry lives here because many oracles are modules and optimizers, which `kernels/` must not import. It can be
listed without Triton.
"""

from __future__ import annotations

from quantshard.tools.doctor import experts, fused, quantize, steps
from quantshard.tools.doctor.cases import KernelRow

ROWS: tuple[KernelRow, ...] = (*quantize.ROWS, *fused.ROWS, *steps.ROWS, *experts.ROWS)
