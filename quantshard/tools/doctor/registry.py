"""The registry of kernels: a row for each launcher, with its oracle and its cases, listed here and nowhere else.

The self-test checks the cases, benchmarks/kernels.py times some of them, and the tests of kernels run them on shapes of
their own, compile them for GPUs, and find that no Triton kernel lacks a row. So a new kernel is a file in `kernels/`
and a row, in the file beside this one that is named after the kernel's folder. It stands here and not beside the
kernel, since many oracles are modules and optimizers, floors above the kernels; and it can be listed without Triton.
"""

from __future__ import annotations

from quantshard.tools.doctor import experts, fused, quantize, steps
from quantshard.tools.doctor.cases import KernelRow

ROWS: tuple[KernelRow, ...] = (*quantize.ROWS, *fused.ROWS, *steps.ROWS, *experts.ROWS)
