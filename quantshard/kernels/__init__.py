"""Triton kernels for GPUs. Each fused operation has a file: formula, kernel, launcher.

Each kernel reproduces its oracle in `numerics`, bit for bit where it quantizes. So kernels are compiled without fused
multiply-adds, and round divisions and square roots correctly, as the oracle does.

Only `kernel_dispatch` decides whether a kernel runs. This file does not import Triton. The other files do, and are
imported only if `USABLE`. On the CPU, kernels run only under Triton's interpreter (TRITON_INTERPRET=1), slowly, for
tests. On the meta device they compute nothing (`gemm.predictions.described_gpu`).
"""

import os
import threading
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Final

import torch

INTERPRETED: Final = os.environ.get("TRITON_INTERPRET") == "1"
"""True if Triton's interpreter runs the kernels, on tensors of any device."""


def _is_usable() -> bool:
    if find_spec("triton") is None or (torch.version.hip is not None and not INTERPRETED):
        return False
    if torch.version.cuda is not None or INTERPRETED:
        return True  # a broken Triton raises when a kernel is imported
    try:
        import_module("triton")
    except ImportError:
        return False
    return True


USABLE: Final = _is_usable()
"""True if the kernels can be imported: Triton is installed, and this torch is not built for AMD GPUs."""


class _TracingState(threading.local):
    on = False
    step: Any = None


tracing: Final = _TracingState()
"""State of this thread: `on` is True while launches become operators of a graph (`graph_launch.traced_launches`), and
`step` is the `modules.gemms.graph_state.GraphStep` that is traced, or `functional.BETWEEN_GRAPHS`."""
