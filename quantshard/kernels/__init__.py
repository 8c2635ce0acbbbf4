"""Where the GPU kernels are: Triton, one file for each fused operation; formula, kernel, launcher.

Each reproduces its oracle in `numerics`, bit for bit where values are quantized. They are compiled without fusion of
multiplications into additions, and divide and take roots with correct rounding, for the oracle does.

Only `kernel_dispatch` decides whether a kernel runs. This file imports no Triton; the others do, and are imported only
where `USABLE`. On the CPU kernels run under Triton's interpreter alone (TRITON_INTERPRET=1), slowly, for tests. On the
meta device they compute nothing, as everything there (`gemm.described_gpu`).
"""

from __future__ import annotations

import os
from importlib import import_module
from importlib.util import find_spec
from typing import Final

import torch

INTERPRETED: Final = os.environ.get("TRITON_INTERPRET") == "1"
"""True if Triton's interpreter runs the kernels, on tensors of any device."""


def _is_usable() -> bool:
    if find_spec("triton") is None or (torch.version.hip is not None and not INTERPRETED):
        return False
    if torch.version.cuda is not None or INTERPRETED:
        return True  # a Triton that is broken is told, where kernels are to run
    try:
        import_module("triton")
    except ImportError:
        return False
    return True


USABLE: Final = _is_usable()
"""True if the kernels can be imported: Triton is there, and a GPU, if this torch was built for one, is not AMD's."""
