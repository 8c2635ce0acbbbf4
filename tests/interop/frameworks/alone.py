"""A process group of this process alone, which has imported what a rank of the pool would have to import first."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.distributed.tensor.debug import _clear_sharding_prop_cache


def run_alone(function: Callable[..., Any], *args: Any) -> Any:
    """What `run_ranks(1, function, *args)` finds."""
    hook = sys.excepthook  # which init_process_group wraps
    with patch.dict(os.environ, RANK="0", LOCAL_RANK="0", WORLD_SIZE="1"):
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        try:
            torch.manual_seed(0)
            return function(*args)
        finally:
            dist.destroy_process_group()
            _clear_sharding_prop_cache()
            sys.excepthook = hook
