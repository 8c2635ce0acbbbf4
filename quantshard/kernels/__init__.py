"""Where the GPU kernels are: Triton, one file for each fused operation; formula, kernel, launcher.

Each reproduces its oracle in `numerics`, bit for bit where values are quantized. They are compiled without fusion of
multiplications into additions, and divide and take roots with correct rounding, for the oracle does.

Only `kernel_dispatch` decides whether a kernel runs. This file imports no Triton; the others do, and are imported only
where `USABLE`: with a torch that was built for a GPU, or under Triton's interpreter (TRITON_INTERPRET=1), which runs
the kernels on the CPU, slowly, for tests.
"""

from __future__ import annotations

import os
from importlib.util import find_spec
from typing import Final

import torch

INTERPRETED: Final = os.environ.get("TRITON_INTERPRET") == "1"
"""True if Triton's interpreter runs the kernels, on tensors of any device."""

USABLE: Final = find_spec("triton") is not None and (torch.version.cuda is not None or INTERPRETED)
"""True if the kernels can be imported."""
